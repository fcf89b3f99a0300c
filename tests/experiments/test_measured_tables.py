"""Tables 12, 13, Equation 11, LBL branch, batch warmup: each claim fails on a table that contradicts it."""

from __future__ import annotations

import dataclasses

import polars as pl
import pytest

from workbench.experiment import Check, load

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


def damaged(slug: str, *columns: pl.Expr):
    """The recorded result with columns replaced."""
    result = load(slug).run("recorded")
    return dataclasses.replace(result, table=result.table.with_columns(*columns))


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


@pytest.mark.parametrize("column", ["launches", "operators", "modules"])
def test_equation_11_notices_a_term_that_costs_nothing(column):
    costs = {"launches": 5.0, "operators": 2.0, "views": 1.5, "modules": 1.0} | {column: 0.0}
    total = sum((pl.col(k) * v for k, v in costs.items()), start=pl.lit(3.0))
    result = damaged("eq11_submission_cost", total.alias("submit_us_p20"))
    start = {"launches": "a launch costs", "operators": "the framework adds", "modules": "Python bookkeeping"}[column]
    assert check(result, start).fails
    assert check(result, "submission time is linear").holds


def test_equation_11_notices_what_is_not_linear():
    result = damaged("eq11_submission_cost", (pl.col("launches") ** 2 + 1.0).alias("submit_us_p20"))
    assert check(result, "submission time is linear").fails


def test_the_branch_must_start_at_the_checkpoint_and_part():
    same = damaged("fig45_lbl_branch", *(pl.lit(1.5).alias(f"load_max_over_mean_{i}") for i in range(1, 6)))
    assert check(same, "with a smaller coefficient the most loaded").fails
    result = load("fig45_lbl_branch").run("recorded")
    late = dataclasses.replace(result, table=result.table.filter((pl.col("arm") == "branch") | (pl.col("step") > 700)))
    assert check(late, "seed 0: the branch starts").fails
    worse = damaged(
        "fig45_lbl_branch",
        pl.when(pl.col("arm") == "branch").then(pl.col("ce") + 0.5).otherwise(pl.col("ce")).alias("ce"),
    )
    assert check(worse, "the late cross-entropy").fails


def test_the_stitching_rule_and_schedule_are_checked():
    result = damaged("fig66_batch_warmup", (pl.col("batch") * 2).alias("batch"))
    assert check(result, "the batch grows").fails
    result = damaged("fig66_batch_warmup", pl.lit(1e-3).alias("lr"))
    assert check(result, "the learning rate").fails
    result = damaged("fig66_batch_warmup", (pl.col("ce") + 0.1 * pl.col("segment")).alias("ce"))
    assert check(result, "a repeated step").fails
    whole = load("fig66_batch_warmup").run("recorded")
    holes = dataclasses.replace(whole, table=whole.table.filter(pl.col("segment") != 9))
    assert check(holes, "at every overlapping step").fails
