"""The accuracy experiment: its inputs are what their names say, and its claims can fail."""

from __future__ import annotations

import pytest
import torch

from workbench.core.experiment import Result
from workbench.core.tables import grouped
from workbench.experiments import op_mxfp8_accuracy as accuracy
from workbench.measure import mxfp8_accuracy

DISTRIBUTIONS = mxfp8_accuracy.DISTRIBUTIONS


def table(**changed: float) -> Result:
    rows = []
    for name in DISTRIBUTIONS:
        for mode, error in ((accuracy.FOLDING, 1e-6), (accuracy.PROMOTED, 1.7e-3), (accuracy.EXACT, 1.7e-3)):
            hard = name == "adversarial" and mode != accuracy.EXACT
            value = changed.get(f"{name}/{mode}", 1.0 if hard else error)
            wide = changed.get("wide_rows", 512) if name == "adversarial" else 0
            rows.append(
                {
                    "kind": "error",
                    "distribution": name,
                    "mode": mode,
                    "error_vs_mx": value,
                    "wide_rows": wide,
                    "rows": 512,
                }
            )
    for precision, offset in (("bf16", 0.0), ("mxfp8", changed.get("offset", 0.01))):
        for seed, base in ((0, 2.00), (1, 2.02)):
            rows += [
                {"kind": "loss", "precision": precision, "seed": seed, "step": s, "loss": base + offset}
                for s in range(60)
            ]
    return accuracy.EXPERIMENT.result(accuracy.AccuracyParams(), "model", grouped(rows, "kind"))


def test_claims_hold_on_these_rows():
    assert [c.holds for c in table().checks] == [True] * 6
    assert table().figure().data


@pytest.mark.parametrize(
    ("changed", "failing"),
    [
        ({"gaussian/folded": 3e-3}, 0),
        ({"swiglu/exact": 3e-3}, 1),
        ({f"adversarial/{accuracy.FOLDING}": 1e-3}, 2),
        ({"wide_rows": 511}, 3),
        ({"adversarial/exact": 0.1}, 4),
        ({"offset": 0.03}, 5),
    ],
)
def test_claims_can_fail(changed, failing):
    assert [i for i, c in enumerate(table(**changed).checks) if not c.holds] == [failing]


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions_are_what_they_are_called(name):
    g = torch.Generator().manual_seed(0)
    x, w = mxfp8_accuracy.operands(name, 32, 16, 256, 2, g, torch.device("cpu"))
    assert x.shape == (32, 256) and w.shape == (2, 16, 256) and x.dtype == w.dtype == torch.bfloat16
    blocks = x.float().view(32, 8, 32).abs().amax(-1)
    spread = (blocks.amax(1) / blocks.amin(1)).log2().mean()
    lows, highs = (
        {"gaussian": 0, "swiglu": 0, "outlier columns": 4, "spread blocks": 6, "adversarial": 18},
        {"gaussian": 2},
    )
    assert lows[name] <= spread < highs.get(name, 30)
    if name == "adversarial":
        assert (w[:, :, :32] == 0).all() and (w[:, :, 32:] != 0).any()


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="distribution must be one of gaussian"):
        mxfp8_accuracy.operands("flat", 2, 2, 32, 1, torch.Generator(), torch.device("cpu"))
    with pytest.raises(ValueError, match="'bf16' or 'mxfp8'; got 'fp4'"):
        mxfp8_accuracy.train("fp4", 0, steps=1)


def test_same_seed_starts_both_precisions_alike():
    small = {"steps": 2, "layers": 1, "width": 64, "expert_width": 32, "sequence": 16, "batch": 2}
    bf16, mxfp8 = (mxfp8_accuracy.train(p, 3, **small) for p in ("bf16", "mxfp8"))
    assert bf16 == mxfp8_accuracy.train("bf16", 3, **small)
    assert bf16[0] == pytest.approx(mxfp8[0], abs=0.02) and bf16 != mxfp8
