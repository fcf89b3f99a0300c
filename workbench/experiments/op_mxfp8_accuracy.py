"""What MXFP8 expert products get wrong: errors of each mode, where folding fails, and a short training run beside
BF16."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.core.params import Params, param
from workbench.core.tables import recorded_kinds

if TYPE_CHECKING:
    import plotly.graph_objects as go

PROMOTED, EXACT = "folded", "exact"
FOLDING = "folding alone, FP64 product"
BF16_OUTPUT = 2.0e-3
"""Rounding a result to BF16 alone gives a relative error of 1.7e-3; a mode below this line adds little to it."""
LAST = 50
"""Steps at the end over which a run's loss is averaged."""


@dataclass(frozen=True, kw_only=True)
class AccuracyParams(Params):
    """Parameters of the error measurement and of the training runs."""

    rows_M: int = param(512, "rows of the error measurement", min=64, max=16384)
    k: int = param(1536, "input width", min=128, max=8192)
    n: int = param(256, "output width", min=64, max=8192)
    experts: int = param(8, "experts of the error measurement", min=1, max=64)
    steps: int = param(300, "training steps", min=0, max=5000)
    seeds: tuple[int, ...] = param((0, 1, 2), "seeds of the training runs")


def measure(params: AccuracyParams, recorder: Any) -> None:
    """Measure errors of every mode and train in both precisions from every seed.

    Kernels run on a GPU; on the CPU the reference does, whose bytes the kernels write and whose sums are FP64.
    """
    from workbench.measure.mxfp8_accuracy import errors, train

    recorder.set(
        "protocol", timer="none: errors and losses", warmup="learning rate over 20 steps", repeats=len(params.seeds),
        order="errors, then BF16 and MXFP8 by seed", exclusions="none",
    )  # fmt: skip
    recorder.set(
        "workload", layers=2, experts=8, top_k=2, shared_experts=0, capacity="dropless", sequence_tokens=128,
        global_batch_tokens=1024, mixers="causal attention, 4 heads", seeds=list(params.seeds),
        data="bytes of the Python standard library's sources",
    )  # fmt: skip
    recorder.set(
        "precision",
        parameter="bfloat16",
        activation="bfloat16; expert products of MXFP8 runs in E4M3 forward and input gradient",
        accumulation="FP32 added every 128 of K on a GPU, FP64 on the CPU",
        optimizer="bfloat16 AdamW states",
        cache="folded weights, renewed once a step",
    )
    for row in errors(params.rows_M, params.n, params.k, params.experts, seed=0):
        recorder.row(**row)
    for seed in params.seeds if params.steps else ():
        for precision in ("bf16", "mxfp8"):
            for step, loss in enumerate(train(precision, seed, steps=params.steps)):
                recorder.row(kind="loss", precision=precision, seed=seed, step=step, loss=round(loss, 5))
    recorder.split("kind")


def final_losses(result: Result) -> dict[str, list[float]]:
    """Return the mean loss of the last steps of every run, by precision, in the order of the seeds."""
    out: dict[str, list[float]] = {}
    rows = result.rows("loss")
    for precision in ("bf16", "mxfp8"):
        for seed in sorted({r["seed"] for r in rows}):
            run = [r["loss"] for r in rows if r["precision"] == precision and r["seed"] == seed]
            if run:
                out.setdefault(precision, []).append(statistics.fmean(run[-LAST:]))
    return out


def checks(result: Result) -> Iterator[Check]:
    """What the modes promise, and that training does not notice."""
    found = {(r["distribution"], r["mode"]): r for r in result.rows("error")}
    ordinary = sorted({d for d, _ in found} - {"adversarial"})
    for mode, claim in ((PROMOTED, "the folded product"), (EXACT, "exact mode")):
        worst = max((found[d, mode]["error_vs_mx"] for d in ordinary), default=None)
        yield Check(f"{claim} adds little to the rounding of a BF16 result on ordinary inputs",
                    None if worst is None else worst < BF16_OUTPUT,
                    worst if worst is None else f"{worst:.2e}")  # fmt: skip
    hard = found.get(("adversarial", FOLDING))
    if hard:
        yield Check("folding fails where blocks far below the row maximum carry the result",
                    hard["error_vs_mx"] > 0.5, f"{hard['error_vs_mx']:.2f}")  # fmt: skip
        yield Check("the spread counter counts every such row", hard["wide_rows"] == hard["rows"],
                    f"{hard['wide_rows']} of {hard['rows']}")  # fmt: skip
        exact = found["adversarial", EXACT]["error_vs_mx"]
        yield Check("exact mode is right there", exact < BF16_OUTPUT, f"{exact:.2e}")
    losses = final_losses(result)
    if len(losses.get("bf16", [])) > 1:
        gap = abs(statistics.fmean(losses["mxfp8"]) - statistics.fmean(losses["bf16"]))
        noise = max(losses["bf16"]) - min(losses["bf16"])
        yield Check("training losses in MXFP8 and BF16 agree within the spread over seeds", gap <= noise,
                    f"{gap:.4f} apart, spread {noise:.4f}")  # fmt: skip


def draw(result: Result) -> go.Figure:
    """Draw errors by mode and distribution, and the loss curves."""
    from workbench.core.colours import SERIES
    from workbench.views.plotting import WIDE_LABELS, figure

    fig = figure(
        "What MXFP8 expert products get wrong", rows=2, height=820, shared_xaxes=False, vertical_spacing=0.19,
        subplot_titles=("relative error against FP64 of the exact MX values", "training loss, every seed"),
    )  # fmt: skip
    errors = result.rows("error")
    for i, name in enumerate(dict.fromkeys(r["distribution"] for r in errors)):
        part = [r for r in errors if r["distribution"] == name]
        fig.add_scatter(
            x=[r["error_vs_mx"] for r in part], y=[r["mode"] for r in part], name=name, mode="markers",
            marker={"size": 10, "color": SERIES[i], "symbol": i}, row=1, col=1,
        )  # fmt: skip
    losses = result.rows("loss")
    # The curves coincide: the wider one beneath stays visible.
    looks = (("bf16", SERIES[5], "solid", 4, 0.5), ("mxfp8", SERIES[6], "dot", 1.2, 1.0))
    for precision, colour, dash, width, opacity in looks:
        for seed in sorted({r["seed"] for r in losses}):
            run = [r for r in losses if r["precision"] == precision and r["seed"] == seed]
            fig.add_scatter(
                x=[r["step"] for r in run], y=[r["loss"] for r in run], name=f"loss, {precision}",
                legendgroup=precision, showlegend=seed == losses[0]["seed"],
                line={"color": colour, "dash": dash, "width": width}, opacity=opacity, row=2, col=1,
            )  # fmt: skip
    fig.update_xaxes(type="log", title="relative error (log)", exponentformat="power", row=1, col=1)
    fig.update_yaxes(autorange="reversed", row=1, col=1)
    fig.update_yaxes(type="log", title="nats a byte (log)", row=2, col=1)
    fig.update_xaxes(title="step", row=2, col=1)
    fig.update_layout(WIDE_LABELS | {"margin": {"t": 110, "b": 130}})
    return fig


EXPERIMENT = Experiment(
    slug="op_mxfp8_accuracy",
    group="tools",
    title="MXFP8 expert products: errors and a training run",
    claim="Folded MXFP8 loses little against exact MX on ordinary inputs, fails on a countable kind of row, "
    "and trains like BF16.",
    kind="measured",
    anchor="kernels/moe_kernels/mxfp8; report, Section 11 and Appendix B.6",
    params=AccuracyParams,
    figure=draw,
    checks=checks,
    measure=measure,
    recorded=recorded_kinds("kind"),
    tests=("tests/kernels/test_mxfp8.py", "tests/kernels/test_mxfp8_reference.py"),
    recording="2026-11-29_h200_464a777",
    live_on_cpu=True,
)
