"""The queue-model figures: the captions' claims hold at the defaults, and each one fails for some other value."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

import workbench
from workbench.core.experiment import Result
from workbench.experiments.fig30_submission_headroom import Fig30Params, kernels
from workbench.models.headroom import busy_window, device_headroom, idle_intervals
from workbench.models.submission import simulate

SLUGS = ("fig29_running_dry", "fig30_submission_headroom", "fig31_blocks_ahead", "fig33_where_it_waits")

# (experiment, start of the claim, parameters under which it must fail)
BREAKERS = [
    ("fig29_running_dry", "(a) The queued lead is spent", {"submit_cost": 0.8}),
    ("fig29_running_dry", "(a) The queued lead is spent", {"lead_blocks": 0}),
    ("fig29_running_dry", "(a) The GPU idles a little", {"execute_cost": 1.6}),
    ("fig29_running_dry", "(b) The GPU finishes the queued work", {"value_block": 1}),
    ("fig29_running_dry", "(b) The host must then rebuild", {"wait_submit_cost": 1.2}),
    ("fig30_submission_headroom", "(a) Cheap submissions", {"large_submit_cost": 2.5}),
    ("fig30_submission_headroom", "(a) Host-heavy submissions", {"small_execute_cost": 2.5}),
    ("fig30_submission_headroom", "(a) After the lead reaches zero", {"small_submit_cost": 1.0}),
    ("fig30_submission_headroom", "(a) After the lead reaches zero", {"large_execute_cost": 1.0}),
    ("fig30_submission_headroom", "(b) Forward drains", {"forward_execute_cost": 2.5}),
    ("fig30_submission_headroom", "(b) The lead grazes zero", {"forward_submit_cost": 1.9}),
    ("fig30_submission_headroom", "(b) The lead grazes zero", {"forward_submit_cost": 2.1}),
    ("fig30_submission_headroom", "(b) Backward rebuilds", {"backward_submit_cost": 1.5}),
    ("fig30_submission_headroom", "(b) The CPU already submits", {"backward_submit_cost": 4.0}),
    ("fig31_blocks_ahead", "Dense: the CPU runs three", {"submit_cost": 3.5}),
    ("fig31_blocks_ahead", "Dense: the GPU always", {"submit_cost": 3.5}),
    ("fig31_blocks_ahead", "MoE: the CPU is never", {"sync_every": 2}),
    ("fig31_blocks_ahead", "MoE: the CPU waits", {"sync_every": 2}),
    ("fig31_blocks_ahead", "MoE: headroom cannot", {"sync_every": 3}),
    ("fig31_blocks_ahead", "MoE: the stall", {"sync_every": 16}),
    ("fig33_where_it_waits", "Figure 33: the GPU becomes idle", {"exchange_submit": 0.0}),
    ("fig33_where_it_waits", "Figure 34: the shared expert", {"shared_expert": 0.5}),
    (
        "fig33_where_it_waits",
        "Figure 34: the wait remains",
        {"previous_work": 0.0, "router_execute": 0.1, "copy_execute": 0.0},
    ),
    ("fig33_where_it_waits", "Device route map", {"previous_work": 0.0, "router_execute": 0.1, "shared_expert": 0.0}),
]


def holds(result: Result, claim: str) -> bool | None:
    found = [c for c in result.checks if c.claim.startswith(claim)]
    assert len(found) == 1, f"{len(found)} claims start with {claim!r}"
    return found[0].holds


@pytest.mark.parametrize("slug", SLUGS)
def test_every_claim_holds_at_the_defaults(slug: str) -> None:
    result = workbench.load(slug).run()
    assert result.source == "model"
    assert [c.claim for c in result.checks if c.holds is not True] == []


@pytest.mark.parametrize(("slug", "claim", "params"), BREAKERS, ids=[f"{s[:5]}-{c}-{p}" for s, c, p in BREAKERS])
def test_claim_can_fail(slug: str, claim: str, params: dict[str, Any]) -> None:
    assert holds(workbench.load(slug).run(**params), claim) is False


def test_identities_of_the_rule_fail_on_a_damaged_table() -> None:
    """Claims that the rule itself guarantees fail where a table breaks it."""
    result = workbench.load("fig30_submission_headroom").run()
    for panel in ("a", "b"):
        claim = f"({panel}) The GPU is idle exactly where headroom is zero"
        rows = [r for r in result.table.to_dicts() if r["kind"] != "idle"]
        extra = next(r for r in rows if r["panel"] == panel and r["kind"] == "gpu_execute")
        rows.append({**extra, "kind": "idle"})
        assert holds(_with(result, pl.DataFrame(rows, infer_schema_length=None)), claim) is False
    result = workbench.load("fig33_where_it_waits").run()
    early = pl.when((pl.col("label") == "All-To-All") & (pl.col("kind") == "cpu_submit")).then(1.0)
    table = result.table.with_columns(start=early.otherwise(pl.col("start")))
    assert holds(_with(result, table), "The all-to-all is launched only after") is False
    result = workbench.load("fig29_running_dry").run()
    early = pl.when((pl.col("panel") == "b") & (pl.col("label") == "b6") & (pl.col("kind") == "cpu_submit")).then(2.5)
    table = result.table.with_columns(
        start=early.otherwise(pl.col("start")), end=pl.when(early.is_not_null()).then(3.0).otherwise(pl.col("end"))
    )
    assert holds(_with(result, table), "(b) Submission stops entirely") is False


def _with(result: Result, table: pl.DataFrame) -> Result:
    return Result(
        experiment=result.experiment,
        params=result.params,
        source=result.source,
        tables=result.tables | {"boxes": table},
    )


def test_printed_values_are_the_defaults() -> None:
    params = workbench.load("fig29_running_dry").params()
    assert (params.submit_cost, params.execute_cost, params.blocks) == (1.55, 1.0, 8)
    params = workbench.load("fig30_submission_headroom").params()
    assert (params.small_submit_cost, params.small_execute_cost) == (2.0, 0.7)


def test_figure_33_is_figure_34_without_cover() -> None:
    table = workbench.load("fig33_where_it_waits").run(shared_expert=0.0).table
    bare, covered = (table.filter(pl.col("panel") == p).drop("panel") for p in ("figure 33", "figure 34"))
    assert bare.equals(covered)


@pytest.mark.parametrize("slug", SLUGS)
def test_figure_draws_every_box_and_its_source(slug: str) -> None:
    result = workbench.load(slug).run()
    fig = result.figure()
    drawn = sum(len(t.x) for t in fig.data if t.type == "bar")
    boxes = result.tables["boxes"].filter(pl.col("end") > pl.col("start"))
    assert drawn == boxes.height
    assert fig.layout.meta["badge"] == "conceptual model, not measured"


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Numbers and words of plain JSON values by where they stand."""
    if isinstance(value, (dict, list)):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, part in parts for k, v in leaves(part, f"{path}/{key}").items()}
    return {path: value}


@pytest.mark.parametrize("slug", SLUGS)
def test_interactive_sliders_reproduce_the_model(slug: str) -> None:
    """A slider's targets, set to another value, give the program that Python builds for that value."""
    experiment = workbench.load(slug)
    default = experiment.params()
    spec = experiment.interactive(default)
    assert spec["panels"]
    for number, panel in enumerate(spec["panels"]):
        for slider in panel["controls"]:
            for value in (slider["min"], (slider["min"] + slider["max"]) / 2, slider["max"]):
                changed = experiment.interactive(default.replace(**{slider["id"]: value}))["panels"][number]
                programs = {t["id"]: t["program"] for t in panel["timelines"]}
                for target in slider["sets"]:
                    at: Any = programs[target["timeline"]]
                    for key in target["path"][:-1]:
                        at = at[key]
                    if "if_positive" in target:
                        at[target["path"][-1]] = target["if_positive"] if value > 0 else 0
                    else:
                        at[target["path"][-1]] = value * target["scale"] + target["offset"]
                for timeline in changed["timelines"]:
                    assert leaves(programs[timeline["id"]]) == pytest.approx(leaves(timeline["program"]), abs=1e-9)


def test_headroom_of_figure_30_by_hand() -> None:
    timeline = simulate(kernels(Fig30Params()))
    curve = device_headroom(timeline)
    assert curve.at([0.5, 1.5, 3.5, 9.0, 9.5]) == pytest.approx([2.0, 5.0, 3.7, 0.0, 0.7], abs=1e-9)
    gaps = idle_intervals(timeline, 0, busy_window(timeline))
    assert (gaps[:, 1] - gaps[:, 0]).sum() == pytest.approx(0.9, abs=1e-9)
