"""Table 14: drops and memory of the model, and claims about measured tables that can fail."""

from __future__ import annotations

import dataclasses

import numpy as np
import polars as pl
import pytest

from workbench.core.experiment import Result
from workbench.core.record import Recorder
from workbench.core.tables import grouped, tables_of
from workbench.experiments import load
from workbench.experiments import tab14_mechanism_costs as tab14
from workbench.models.routing import route, skewed_experts

SMALL = {"drop_tokens": 256, "num_experts": 32, "ranks": 4}


@pytest.fixture(scope="module")
def drawn() -> Result:
    return load("tab14_mechanism_costs").run("model", **SMALL)


def measured_rows(drawn: Result) -> list[dict]:
    """The drawn drops plus times that follow the valid rows."""
    rows = [r | {"part": "drops"} for r in drawn.table.to_dicts()]
    for tokens, block in ((1024, 500.0), (4096, 1500.0)):
        rows.append({"part": "metadata", "what": tab14.METADATA, "tokens": tokens, "time_us_p50": 20.0, "launches": 3})
        rows.append({"part": "metadata", "what": tab14.BLOCK, "tokens": tokens, "time_us_p50": block, "launches": 40})
        for what, time in (("device offsets", 100.0), ("item() per expert", 400.0)):
            rows.append({"part": "host loop", "what": what, "tokens": tokens, "time_us_p50": time})
        for factor in (1.25, 2.0):
            for what in ("SwiGLU forward", "grouped GEMM, up and gate"):
                for rows_of, time in (("whole capacity", 100.0 * factor), ("valid prefix", 100.0)):
                    rows.append({"part": "tail", "what": what, "tokens": tokens, "capacity_factor": factor,
                                 "rows": rows_of, "time_us_p50": time})  # fmt: skip
    return rows


def measured(drawn: Result, rows: list[dict]) -> Result:
    """A result over rows, as if measured."""
    return dataclasses.replace(drawn, tables=tables_of(grouped(rows, "part")))


def test_model_claims_hold(drawn):
    assert len(drawn.checks) == 4 and all(c.holds for c in drawn.checks)


def test_drops_equal_routing_every_route(drawn):
    """The curve only counts; routing the same ids route by route must lose as many."""
    p = drawn.params
    for row in drawn.table.filter(pl.col("capacity_factor").is_in([1.0, 1.5])).to_dicts():
        rng = np.random.default_rng(p.seed)
        ids = skewed_experts(p.ranks, p.drop_tokens, p.top_k, p.num_experts, row["skew"], rng)
        capacity = int(np.ceil(row["capacity_factor"] * p.drop_tokens * p.top_k))
        routed = route(ids, p.num_experts, capacity)
        assert row["drop_rate"] == pytest.approx(routed.dropped / ids.size)
        assert row["capacity_use"] == pytest.approx(float(routed.capacity_use.mean()))
        assert row["bytes"] == 2 * capacity * p.width * 2


def test_measured_claims_hold_on_a_table_that_follows_its_rows(drawn):
    result = measured(drawn, measured_rows(drawn))
    assert len(result.checks) == 10 and [c.claim for c in result.checks if not c.holds] == []


@pytest.mark.parametrize(
    "match, change, claim",
    [
        ({"what": tab14.METADATA, "tokens": 4096}, {"time_us_p50": 900.0}, "share of a routed block"),
        ({"what": tab14.METADATA}, {"launches": 9}, "at most three launches"),
        (
            {"part": "tail", "rows": "valid prefix", "what": "SwiGLU forward"},
            {"time_us_p50": 199.0},
            "SwiGLU forward stops",
        ),
        ({"what": "item() per expert"}, {"time_us_p50": 50.0}, "host loop"),
        ({"part": "drops", "skew": 1.0, "capacity_factor": 1.0}, {"drop_rate": 0.9}, "exactly the routes"),
        ({"part": "drops", "skew": 0.0, "capacity_factor": 1.25}, {"drop_rate": 0.01}, "without a drop"),
        ({"part": "drops", "capacity_factor": 3.0}, {"capacity_use": 1.0}, "reserves memory"),
    ],
)
def test_each_claim_can_fail(drawn, match, change, claim):
    rows = [r | change if all(r.get(k) == v for k, v in match.items()) else r for r in measured_rows(drawn)]
    bad = [c.claim for c in measured(drawn, rows).checks if c.fails]
    assert any(claim in c for c in bad), bad


def test_measured_drops_stand_in_the_table_of_the_model(drawn, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    recorder = Recorder("tab14_mechanism_costs", drawn.params.as_dict())
    tab14._measure_drops(drawn.params.replace(skews=(0.0, 1.0), capacity_factors=(1.0, 1.25)), recorder)
    assert list(recorder.tables) == ["drops"]
    drawn_drops = {(r["skew"], r["capacity_factor"]): r["drop_rate"] for r in drawn.rows("drops")}
    for r in recorder.tables["drops"]:
        assert r["drop_rate"] == pytest.approx(drawn_drops[r["skew"], r["capacity_factor"]])


def test_skews_that_stop_short_of_a_trained_router_fail_the_claim():
    result = load("tab14_mechanism_costs").run("model", skews=[0.0, 0.1], **SMALL)
    assert tab14.trained_routers()[0] < tab14.trained_routers()[1]
    assert [c.claim for c in result.checks if c.fails and "trained routers" in c.claim]
    assert list(tab14.hottest_experts(result.params)) == [0.0, 0.1]


def test_figures_draw_with_and_without_measurements(drawn):
    plain, full = drawn.figure(), measured(drawn, measured_rows(drawn)).figure()
    assert len(plain.data) == 8 and len(full.data) == 8 + 1 + 2 + 1
    assert list(full.data[8].y) == [pytest.approx(20 / 500), pytest.approx(20 / 1500)]


@pytest.mark.skipif(tab14.EXPERIMENT.recording is None, reason="no recording is pinned yet")
def test_recorded_claims_hold_or_are_known():
    result = load("tab14_mechanism_costs").run("recorded")
    assert len(result.checks) >= 9 and [c.claim for c in result.checks if c.fails] == []
