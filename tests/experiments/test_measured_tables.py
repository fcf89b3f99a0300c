"""Tables 12, 13, Equation 11, LBL branch, batch warmup: each claim fails on a table that contradicts it."""

from __future__ import annotations

import dataclasses

import polars as pl
import pytest

from workbench.core.experiment import Check
from workbench.experiments import eq11_submission_cost as eq11
from workbench.experiments import load

SLUGS = (
    "tab12_headroom_operations",
    "tab13_host_synchronization",
    "eq11_submission_cost",
    "fig45_lbl_branch",
    "fig66_batch_warmup",
)


def check(result, start: str) -> Check:
    """The one claim that starts with `start`."""
    (found,) = [c for c in result.checks if c.claim.startswith(start)]
    return found


def damaged(slug: str, *columns: pl.Expr, table: str = "table"):
    """The recorded result with columns of one table replaced."""
    result = load(slug).run("recorded")
    return dataclasses.replace(result, tables=result.tables | {table: result.tables[table].with_columns(*columns)})


@pytest.mark.parametrize("slug", SLUGS)
def test_recorded_claims_hold_or_are_known_to_differ(slug):
    result = load(slug).run("recorded")
    assert result.checks and not [c.claim for c in result.checks if c.fails]
    assert result.figure().data


def test_a_wait_that_did_not_happen_fails_table_13():
    result = damaged("tab13_host_synchronization", pl.lit(False).alias("waited"))
    assert check(result, "x.item() makes").fails
    result = damaged("tab13_host_synchronization", pl.lit(True).alias("waited"))
    assert check(result, "x[idx] does not").fails
    result = damaged("tab13_host_synchronization", pl.lit("warned").alias("debug_mode"))
    assert check(result, "set_sync_debug_mode is an audit aid").fails
    assert check(result, "set_sync_debug_mode never names").fails


def test_table_12_classifies_by_measurement():
    slow = damaged("tab12_headroom_operations", pl.lit("consumes").alias("measured"))
    assert check(slow, "dense GEMM 4096^3: builds").fails
    known = check(slow, "compiled pointwise chain, 8192 x 4096")
    assert known.holds is False and known.known, "the known disagreement stays visible"
    flat = damaged("tab12_headroom_operations", pl.lit(100.0).alias("device_us_p50"))
    assert check(flat, "backward launches roughly twice").fails


def family(cost: pl.Expr) -> pl.Expr:
    """Another submission time for the members of the family alone."""
    return cost.alias("submit_us_p20")


@pytest.mark.parametrize("column", ["launches", "operators", "modules"])
def test_equation_11_notices_a_term_that_costs_nothing(column):
    costs = {"launches": 5.0, "operators": 2.0, "views": 1.5, "modules": 1.0} | {column: 0.0}
    total = sum((pl.col(k) * v for k, v in costs.items()), start=pl.lit(3.0))
    result = damaged("eq11_submission_cost", family(total), table="family")
    start = {"launches": "a launch costs", "operators": "the framework adds", "modules": "Python bookkeeping"}[column]
    assert check(result, start).fails
    assert check(result, "submission time is linear").holds


@pytest.mark.parametrize(
    "region, cost, claim",
    [("elementwise kernel, neg_", 20.0, "the fit gives"), ("replay of a graph of 64 kernels", 9e3, "replaying")],
)
def test_equation_11_is_held_to_operators_outside_its_family(region, cost, claim):
    changed = pl.when(pl.col("region") == region).then(cost).otherwise(pl.col("submit_us_p20"))
    result = damaged("eq11_submission_cost", changed.alias("submit_us_p20"), table="api")
    assert check(result, claim).fails and len([c for c in result.checks if c.fails]) == 1


def test_the_driver_calls_of_an_operator_are_listed_under_it():
    result = load("eq11_submission_cost").run("recorded")
    seen = {"cudaLaunchKernel": (1.0, 4.254), "cudaStreamIsCapturing": (1.0, 0.5), "cudaEventRecord": (2.0, 1.0)}
    rows = [
        {"region": region, "api": api, "times": times, "us": us}
        for region in result.tables["api"]["region"]
        for api, (times, us) in seen.items()
        if region != "zero_"
    ]
    result = dataclasses.replace(result, tables=result.tables | {"call": pl.DataFrame(rows)})
    costs = {c["operator"]: c["driver calls, profiled"] for c in eq11.api_costs(result)}
    assert len(costs) == 10 and costs.pop("zero_") == "none seen"
    assert set(costs.values()) == {"cudaLaunchKernel, 4.3 us; cudaEventRecord x 2, 1.0 us"}


@pytest.mark.parametrize("backward, holds", [(300.0, True), (3000.0, False)])
def test_the_engine_is_judged_by_a_further_layer(backward, holds):
    """Entering the autograd engine costs once, whatever it submits then: a further layer holds none of it."""
    result = load("tab12_headroom_operations").run("recorded")
    whole = result.table.filter(~pl.col("operation").str.contains("four"))
    base = {r["operation"]: r for r in whole.to_dicts()}
    more = []
    for name, cost in (("forward", 500.0), ("backward", backward)):
        one = base[f"{name} of a transformer layer"]
        more.append(one | {"operation": f"{name} of four transformer layers", "launches": one["launches"] + 60,
                           "submit_us_p50": one["submit_us_p50"] + cost})  # fmt: skip
    result = dataclasses.replace(result, tables={"table": pl.concat([whole, pl.DataFrame(more, schema=whole.schema)])})
    found = check(result, "the autograd engine submits")
    assert found.holds is holds and found.value.startswith(f"{backward / 500:.2f}x in a further layer")


def test_equation_11_notices_what_is_not_linear():
    result = damaged("eq11_submission_cost", family(pl.col("launches") ** 2 + 1.0), table="family")
    assert check(result, "submission time is linear").fails


def test_the_branch_must_start_at_the_checkpoint_and_part():
    same = damaged("fig45_lbl_branch", *(pl.lit(1.5).alias(f"load_max_over_mean_{i}") for i in range(1, 6)))
    assert check(same, "with a smaller coefficient the most loaded").fails
    result = load("fig45_lbl_branch").run("recorded")
    late = dataclasses.replace(
        result, tables={"table": result.table.filter((pl.col("arm") == "branch") | (pl.col("step") > 700))}
    )
    assert check(late, "seed 0: the branch starts").fails
    worse = damaged(
        "fig45_lbl_branch",
        pl.when(pl.col("arm") == "branch").then(pl.col("ce") + 0.5).otherwise(pl.col("ce")).alias("ce"),
    )
    assert check(worse, "the smaller coefficient costs no").fails
    lower = damaged(
        "fig45_lbl_branch",
        pl.when(pl.col("arm") == "branch").then(pl.col("lbl") - 0.05).otherwise(pl.col("lbl")).alias("lbl"),
    )
    assert check(lower, "the load-balancing loss itself").fails, "the floor near 1 explains no fall of 0.05"


def test_the_longer_tiny_branch_shows_what_the_known_disagreement_says():
    from workbench.core.record import data_root

    table = data_root() / "recorded" / "fig45_lbl_branch" / "2026-11-29_cpu_14cd643" / "table.csv"
    longer = load("fig45_lbl_branch").run(archive=str(table))
    assert check(longer, "the load-balancing loss itself settles higher").holds
    assert check(longer, "with a smaller coefficient the most loaded").holds


def test_a_branch_that_decides_nothing_neither_holds_nor_fails():
    result = load("fig45_lbl_branch").run("recorded")
    noise = pl.col("step").hash(7) % 1000 / 250 - 2.0  # median just above 0, far wider than it
    original = result.table.filter(pl.col("arm") == "original")
    columns = [f"load_max_over_mean_{i}" for i in range(1, 6)]
    branch = original.filter(pl.col("step") > 700).with_columns(
        pl.lit("branch").alias("arm"), *(pl.col(c) + noise for c in columns)
    )
    unsure = dataclasses.replace(result, tables={"table": pl.concat([original, branch])})
    found = check(unsure, "with a smaller coefficient the most loaded")
    assert found.holds is None and "[-" in str(found.value), found
    alone = dataclasses.replace(result, tables={"table": result.table.filter(pl.col("seed") == 0)})
    assert check(alone, "the smaller coefficient costs no").holds is None, "one seed decides nothing"


def test_the_stitching_rule_and_schedule_are_checked():
    result = damaged("fig66_batch_warmup", (pl.col("batch") * 2).alias("batch"))
    assert check(result, "the batch grows").fails
    result = damaged("fig66_batch_warmup", pl.lit(1e-3).alias("lr"))
    assert check(result, "the learning rate").fails
    result = damaged("fig66_batch_warmup", (pl.col("ce") + 0.1 * pl.col("segment")).alias("ce"))
    assert check(result, "a repeated step").fails
    whole = load("fig66_batch_warmup").run("recorded")
    holes = dataclasses.replace(whole, tables={"table": whole.table.filter(pl.col("segment") != 9)})
    assert check(holes, "no step is missing").fails


def test_claims_about_the_losses_fail_on_other_losses():
    warmup, small = pl.col("schedule") == "warmup", pl.col("schedule") == "fixed small"
    worse = damaged("fig66_batch_warmup", pl.when(warmup).then(pl.col("ce") + 5).otherwise(pl.col("ce")).alias("ce"))
    assert check(worse, "at equal tokens the warmup ends below").fails
    for claim in ("at equal tokens the warmup keeps", "when the warmup ends"):
        assert check(worse, claim).fails, "no known reason explains 5 nats, nor a machine where large batches gain time"
    whole = load("fig66_batch_warmup").run("recorded")
    assert check(whole, "when the warmup ends").holds is True
    few = dataclasses.replace(whole, tables={"table": whole.table.filter(~small | (pl.col("step") <= 500))})
    assert check(whole, "the warmup takes far fewer").holds and check(few, "the warmup takes far fewer").fails


def test_final_losses_say_what_a_run_took():
    from workbench.experiments.fig66_batch_warmup import final_losses

    table = pl.DataFrame({"step": [1, 2, 3], "tokens": [10, 20, 30], "ce": [3.0, 2.0, 1.0], "applied": [1.0, 0.0, 1.0],
                          "seconds": [1.0, 2.0, 3.0]})  # fmt: skip
    (found,) = final_losses({"run": table}).values()
    assert (found["median"], found["steps"], found["skipped"], found["tokens_per_s"]) == (1.0, 3, 1, 10)


def test_a_stitch_that_keeps_the_oldest_segment_is_noticed(monkeypatch):
    from workbench.training import histories

    stitch = histories.stitch
    result = load("fig66_batch_warmup").run("recorded")
    later = result.table.with_columns((pl.col("ce") + 1e-4 * pl.col("segment")).alias("ce"))
    result = dataclasses.replace(result, tables={"table": later})
    assert check(result, "at every overlapping step").holds
    monkeypatch.setattr(histories, "stitch", lambda segments: stitch(segments[::-1]))
    assert check(dataclasses.replace(result), "at every overlapping step").fails


def test_error_bars_reach_from_the_20th_to_the_80th_percentile():
    from workbench.views.plotting import spread

    bars = spread([{"time_us_p20": 1000.0, "time_us_p50": 3000.0, "time_us_p80": 8000.0}], "time_us", 1e3)
    assert (bars["arrayminus"], bars["array"], bars["symmetric"]) == ([2.0], [5.0], False)
