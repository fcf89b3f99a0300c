"""Speed sheets on made-up tables, so that every claim can hold and fail; the route explorer's two sources."""

from __future__ import annotations

import polars as pl
import pytest

import workbench
from workbench.core.experiment import Result
from workbench.experiments.op_router import LOGITS

OPS = ["op_router", "op_route_map", "op_dispatch", "op_combine", "op_swiglu", "op_grouped_gemm"]


def row(impl="triton", shape="", direction="forward", **values):
    base = {
        "time_us_p20": 9.0,
        "time_us_p50": 10.0,
        "time_us_p80": 11.0,
        "submit_us_p50": 20.0,
        "launches": 1,
        "host_waits": False,
        "bytes": 40_000_000,
        "flop": 0,
        "GBps": 4000.0,
        "TFLOPs": 0.0,
        "floor_us": 9.0,
        "percent_of_floor": 90.0,
        "copy_GBps": 4200.0,
        "dense_TFLOPs": 700.0,
    }
    return {"impl": impl, "shape": shape, "direction": direction} | base | values


def result(slug, rows):
    experiment = workbench.load(slug)
    return Result(
        experiment=experiment, params=experiment.params(), source="model", tables={"table": pl.DataFrame(rows)}
    )


def verdicts(slug, rows):
    return [c.holds for c in result(slug, rows).checks]


@pytest.mark.parametrize("slug", ["op_dispatch", "op_combine"])
def test_bandwidth_claims(slug):
    assert verdicts(slug, [row(GBps=3571.0)]) == [True]
    assert verdicts(slug, [row(GBps=3569.0)]) == [False]


def test_route_map_claims():
    assert verdicts("op_route_map", [row(launches=3, time_us_p50=29.0)]) == [True, True]
    assert verdicts("op_route_map", [row(launches=4, time_us_p50=31.0)]) == [False, False]


def test_swiglu_claims():
    times = {100: 40.0, 75: 30.0, 50: 21.0, 25: 11.0}
    rows = [
        row(shape=f"{s} % valid", direction=d, time_us_p50=t) for s, t in times.items() for d in ("forward", "backward")
    ]
    assert all(verdicts("op_swiglu", rows))
    rows[-1]["time_us_p50"] = 20.0
    assert verdicts("op_swiglu", rows).count(False) == 1


def test_grouped_gemm_claims():
    def rows(torch_us, loop_submit):
        return [
            row(shape="up"),
            row("torch", "up", time_us_p50=torch_us),
            row("host_loop", "up", submit_us_p50=loop_submit, host_waits=True, launches=256),
        ]

    assert verdicts("op_grouped_gemm", rows(9.0, 400.0)) == [True, True, True]
    assert verdicts("op_grouped_gemm", rows(7.0, 100.0)) == [True, False, False]


def test_router_claims():
    rows = [row(shape="gate, softmax", launches=2), row("torch operations", "gate, softmax", time_us_p50=90.0)]
    assert verdicts("op_router", rows) == [True, True]
    rows[0] |= {"launches": 3, "time_us_p50": 95.0}
    assert verdicts("op_router", rows) == [False, False]
    logits = [row(LOGITS, "logits"), row("torch FP32", "logits", time_us_p50=90.0)]
    assert verdicts("op_router", logits) == [True]
    logits[1]["time_us_p50"] = 9.0
    assert verdicts("op_router", logits) == [False]


@pytest.mark.parametrize("slug", OPS)
def test_figure_shows_every_row_and_its_source(slug):
    rows = [row(shape="100 % valid"), row("torch", "100 % valid", flop=10**12, TFLOPs=500.0)]
    fig = result(slug, rows).figure()
    assert sum(len(t.y) for t in fig.data) == 2
    assert fig.layout.meta["source"] == "model"


def test_route_explorer_gives_the_same_table_by_model_and_by_the_kernels_reference():
    experiment = workbench.load("tool_route_explorer")
    sizes = {"tokens": 64, "top_k": 3, "ranks": 4, "local_experts": 3, "skew": 1.0, "capacity_factor": 0.9}
    model = experiment.run(source="model", **sizes)
    assert model.table.equals(experiment.run(source="live", **sizes).table)
    assert all(c.holds for c in model.checks) and len(model.checks) == 4
    assert model.figure().data


def test_route_explorer_notices_a_broken_table():
    experiment = workbench.load("tool_route_explorer")
    good = experiment.run(source="model", tokens=64, capacity_factor=0.5)
    rows = good.rows("cell")
    rows[0]["kept"] += 10_000
    broken = experiment.result(good.params, "model", good.tables | {"cell": rows})
    assert not all(c.holds for c in broken.checks)
