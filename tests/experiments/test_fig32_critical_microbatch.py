"""Figure 32: the schematic's claims, and the analysis of measured tables whose crossover is known."""

from __future__ import annotations

import dataclasses
import json

import polars as pl
import pytest

from workbench.experiment import Result, load
from workbench.experiments import fig32_critical_microbatch as fig32

TOKENS = (256, 512, 1024, 2048, 4096, 8192)


def table(crossing: float = 2048.0, idle_until: float = 2048.0, growth: float = 1.0) -> list[dict]:
    """Layers whose device time is proportional to tokens and meets submission at `crossing`."""
    rows = []
    for layer in ("dense", "routed, rowwise", "routed, synchronized"):
        submit = 1000.0 if layer == "dense" else 2000.0
        for passes in ("forward", "forward + backward"):
            for mode, cost in (("eager", submit), ("replay", submit / 8)):
                if mode == "replay" and layer == "routed, synchronized":
                    continue
                for tokens in TOKENS:
                    device = submit * tokens / crossing
                    spent = cost * growth ** (tokens / TOKENS[-1])
                    row = {"kind": "measured", "layer": layer, "passes": passes, "mode": mode, "tokens": tokens,
                           "submit_us": json.dumps([spent * f for f in (0.99, 1, 1.01)]),
                           "device_us": json.dumps([device * f for f in (0.99, 1, 1.01)]), "launches": 20}  # fmt: skip
                    if mode == "eager":
                        row |= {"activation_bytes": 100_000 * tokens,
                                "idle_share": 0.5 if tokens < idle_until else 0.01}  # fmt: skip
                    rows.append(row)
    return rows


def measured(rows: list[dict], **params) -> Result:
    """A live result over rows, without a GPU."""
    from workbench.record import Recorder

    recorder = Recorder("fig32_critical_microbatch", {})
    recorder.set("workload", memory_bytes=100_000_000_000)
    recorder.rows = rows
    frame = pl.DataFrame(rows, infer_schema_length=None)
    values = fig32.CriticalMicrobatchParams(tokens=TOKENS, **params)
    return Result(experiment=fig32.EXPERIMENT, params=values, source="live", table=frame, recording=recorder.live())


def failing(result: Result) -> list[str]:
    return [c.claim for c in result.checks if c.holds is False]


def test_schematic_claims_hold_and_the_curves_end_at_their_memory():
    result = load("fig32_critical_microbatch").run("model")
    assert len(result.checks) == 4 and not failing(result)
    ends = result.table.filter(pl.col("kind") == "device").group_by("layer").agg(
        pl.col("microbatch").max(), pl.col("limit").first()
    )  # fmt: skip
    assert (ends["microbatch"] - ends["limit"]).abs().max() < 1e-9


def test_a_schematic_without_room_for_cheaper_submission_fails_its_claim():
    """At an absurdly small host cost every crossover sits at zero: nothing is left to move."""
    assert any("left" in claim for claim in failing(load("fig32_critical_microbatch").run("model", host_cost=0.1)))


def test_the_known_crossover_is_found_with_its_interval():
    found = {(c["layer"], c["passes"], c["mode"]): c for c in fig32.curves(measured(table()))}
    for key, c in found.items():
        expected = 256.0 if key[2] == "replay" else 2048.0
        assert c["critical"] == pytest.approx(expected, rel=1e-6) and c["low"] <= c["critical"] <= c["high"]
        assert c["high"] / c["low"] < 1.05
    assert found["dense", "forward", "eager"]["limit"] == pytest.approx(1e6)
    assert not failing(measured(table()))


def test_sliders_scale_the_measured_table():
    plain = fig32.curves(measured(table()))[0]
    faster = fig32.curves(measured(table(), device_speed=2.0))[0]
    cheaper = fig32.curves(measured(table(), host_cost=0.5))[0]
    smaller = fig32.curves(measured(table(), activation_scale=2.0, memory_scale=0.5))[0]
    assert faster["critical"] == pytest.approx(2 * plain["critical"], rel=1e-6)
    assert cheaper["critical"] == pytest.approx(plain["critical"] / 2, rel=1e-6)
    assert smaller["limit"] == pytest.approx(plain["limit"] / 4)


def test_idle_far_from_the_crossover_fails_the_claim():
    result = measured(table(idle_until=100_000))
    bad = [c for c in result.checks if c.holds is False]
    assert len(bad) == 6 and all("runs dry" in c.claim for c in bad)
    # Only the path that waits has a known reason to run dry above its crossover.
    assert {c.claim.split(":")[0] for c in bad if c.known} == {
        "routed, synchronized layer, forward",
        "routed, synchronized layer, forward + backward",
    }


def test_submission_that_grows_with_the_microbatch_fails_the_claim():
    assert any("shortens device time" in claim for claim in failing(measured(table(growth=8.0))))


def test_replay_that_costs_more_fails_the_claim():
    rows = [r | {"submit_us": json.dumps([9e9])} if r["mode"] == "replay" else r for r in table()]
    assert sum("moves the crossover left" in claim for claim in failing(measured(rows))) == 4


@pytest.mark.parametrize(
    "share, expected",
    [
        ([0.5, 0.5, 0.0], 2 ** (0.45 / 0.5) * 200),
        ([0.0, 0.0, 0.0], 100.0),
        ([0.5, 0.5, 0.5], float("inf")),
        ([0.5, 0.01, 0.5], float("inf")),
    ],
)
def test_where_idle_begins(share, expected):
    assert fig32.idle_begins([100, 200, 400], share) == pytest.approx(expected)


def test_figures_of_both_sources_draw():
    for result in (measured(table()), load("fig32_critical_microbatch").run("model", replay=False)):
        names = {t.name for t in result.figure().data}
        assert ("submission time, eager" in names) or ("CPU submission, eager" in names)
    hidden = {t.name for t in measured(table(), replay=False).figure().data}
    assert "submission time, replay" not in hidden


@pytest.mark.skipif(fig32.EXPERIMENT.recording is None, reason="no recording is pinned yet")
def test_recorded_claims_hold_or_are_known():
    result = load("fig32_critical_microbatch").run("recorded")
    assert len(result.checks) > 15 and [c.claim for c in result.checks if c.fails] == []
    faster = dataclasses.replace(result, params=result.params.replace(host_cost=0.5))
    for a, b in zip(fig32.curves(result), fig32.curves(faster)):
        assert b["critical"] <= a["critical"]
