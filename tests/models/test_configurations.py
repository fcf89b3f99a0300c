"""Configurations against the report's printed values, and properties of the counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.core.report_tables import printed_rows, report_table, run_sizes, table_47
from workbench.models import configurations as c

SPARSE = c.WORKLOADS


def interval(printed) -> c.Interval:
    return c.Interval(*printed.interval)


def printed_undetermined() -> dict[str, c.Interval]:
    t = table_47()
    sizes = [interval(t[q][w]) for w in ("reference", "profiling") for q in ("total_params", "active_params")]
    return c.undetermined(*sizes)


@st.composite
def sparse_models(draw) -> c.Sparse:
    blocks = draw(st.integers(1, 100))
    experts = draw(st.integers(1, 512))
    return c.Sparse(
        blocks=blocks,
        dense_blocks=draw(st.integers(0, blocks)),
        d_model=draw(st.integers(1, 16384)),
        routed_experts=experts,
        top_k=draw(st.integers(1, experts)),
        expert_width=draw(st.integers(1, 16384)),
    )


def test_inactive_expert_parameters_are_exact():
    assert c.REFERENCE_30_BLOCK.inactive_params == 23_781_703_680
    assert c.PROFILING.inactive_params == 1_019_215_872


@pytest.mark.parametrize("workload", ["reference", "profiling"])
def test_constants_are_those_of_table_47(workload):
    t = {k: v[workload] for k, v in table_47().items()}
    s = SPARSE[workload]
    for name in ("blocks", "dense_blocks", "routed_blocks", "d_model", "routed_experts", "top_k", "expert_width"):
        assert getattr(s, name) == t[name].value, name


@pytest.mark.parametrize("workload", ["reference", "profiling"])
def test_derived_values_agree_to_half_a_digit(workload):
    t = {k: v[workload] for k, v in table_47().items()}
    active, total = t["active_params"].value, t["total_params"].value
    assert t["alpha_P"].agrees(100 * c.alpha_P(active, total))
    assert t["capacity_to_active"].agrees(1 / c.alpha_P(active, total))
    assert t["experts_per_active"].value == SPARSE[workload].experts_per_active
    assert t["balanced_assignments_per_expert"].value == c.balanced_assignments(
        t["global_batch_tokens"].value, SPARSE[workload]
    )
    assert not t["alpha_P"].agrees(100 * c.alpha_P(active * 1.001, total))


@pytest.mark.parametrize("gpus, expected", [(8, 4), (32, 1)])
def test_accumulation_of_the_profiling_workload(gpus, expected):
    t = table_47()
    printed = t[f"accumulation_{gpus}_gpus"]["profiling"].value
    got = c.accumulation_microbatches(t["global_batch_tokens"]["profiling"].value, gpus, 24_576)
    assert got == printed == expected


def test_printed_sizes_are_consistent_and_tighten():
    u = printed_undetermined()
    assert u["total_reference"].low == 26_687_500_000 and u["total_reference"].high == 2_906_500_000 + 23_781_703_680
    assert u["total_profiling"].low == 994_500_000 + 1_019_215_872 and u["total_profiling"].high == 2_014_500_000
    assert u["unrouted_reference"].high - u["unrouted_reference"].low < 1e6


@given(
    mixer=st.floats(1e6, 1e8),
    shared=st.integers(0, 8192),
    dense=st.integers(0, 32768),
    embedding=st.floats(0, 1e9),
    rounding=st.floats(0, 5e5),
)
def test_undetermined_contains_the_truth(mixer, shared, dense, embedding, rounding):
    """Any model of the family, rounded as the report rounds, is inside the intervals."""
    whole = {
        k: c.model_size(
            s, shared_width=shared, mixer_params_per_block=mixer, dense_width=dense, embedding_params=embedding
        )
        for k, s in SPARSE.items()
    }
    around = lambda x: c.Interval(x - rounding - 1, x + rounding + 1)  # noqa: E731
    r, p = whole["reference"], whole["profiling"]
    u = c.undetermined(around(r.total), around(r.active), around(p.total), around(p.active))
    shared_params = 3 * 1536 * shared
    assert mixer + shared_params in u["per_extra_block"]
    assert r.unrouted in u["unrouted_reference"] and p.unrouted in u["unrouted_profiling"]


def test_feasible_dense_width_needs_the_embedding():
    u = printed_undetermined()
    free = c.dense_width_range(u["rest"], 0, c.PROFILING)
    half = c.dense_width_range(u["rest"], 308e6, c.PROFILING)
    assert free is not None and half is not None
    assert half.high < free.low, "the printed sizes alone do not fix the dense width"
    assert c.dense_width_range(u["rest"], 1e9, c.PROFILING) is None


def test_shared_width_equal_to_expert_width_recovers_rest():
    """With a shared expert as wide as a routed one, `rest` is embedding plus dense feed-forwards."""
    sizes = [
        c.model_size(s, shared_width=1536, mixer_params_per_block=2.3e7, dense_width=9216, embedding_params=3e8)
        for s in SPARSE.values()
    ]
    args = [c.Interval(x - 10, x + 10) for s in sizes for x in (s.total, s.active)]
    u = c.undetermined(*args)
    assert 3e8 + 2 * 3 * 1536 * 9216 in u["rest"] and 2.3e7 in u["mixer"]
    width = c.dense_width_range(u["rest"], 3e8, c.PROFILING)
    assert width is not None and 9216 in width and width.high - width.low < 0.01


def test_contradicting_sizes_raise():
    with pytest.raises(ValueError, match="contradict"):
        c.tightened_total(c.Interval(26e9, 26.1e9), c.Interval(2.9e9, 2.91e9), c.REFERENCE_30_BLOCK)


@given(sparse_models())
def test_counts_add_up(s):
    assert s.routed_params == s.active_routed_params + s.inactive_params
    assert s.inactive_params >= 0 and (s.inactive_params == 0) == (s.top_k == s.routed_experts or s.routed_blocks == 0)
    assert s.experts_per_active >= 1


@given(sparse_models(), st.integers(0, 9999), st.floats(0, 1e8), st.integers(0, 9999), st.floats(1, 1e9))
def test_size_parts(s, shared, mixer, dense, embedding):
    size = c.model_size(
        s, shared_width=shared, mixer_params_per_block=mixer, dense_width=dense, embedding_params=embedding
    )
    assert size.total - size.active == pytest.approx(s.inactive_params, rel=1e-12, abs=1e-3 + 1e-12 * size.total)
    assert size.total == pytest.approx(
        s.routed_params
        + 3 * s.d_model * (shared * s.routed_blocks + dense * s.dense_blocks)
        + s.d_model * s.routed_experts * s.routed_blocks
        + mixer * s.blocks
        + embedding
    )


@given(sparse_models())
def test_routed_parameters_scale_with_each_factor(s):
    more = c.Sparse(**{**vars(s), "expert_width": 2 * s.expert_width})
    assert more.routed_params == 2 * s.routed_params
    wider = c.Sparse(**{**vars(s), "routed_experts": 2 * s.routed_experts})
    assert wider.routed_params == 2 * s.routed_params and wider.active_routed_params == s.active_routed_params
    assert wider.router_params == 2 * s.router_params


@given(st.integers(1, 2**30), st.integers(1, 512), st.integers(1, 2**17))
def test_accumulation_is_the_inverse_of_the_batch(microbatches, dp, rank):
    assert c.accumulation_microbatches(microbatches * dp * rank, dp, rank) == pytest.approx(microbatches)


@pytest.mark.parametrize("run", report_table(49).to_dicts(), ids=lambda r: r["configuration"])
def test_every_run_of_table_49_obeys_its_rules(run):
    rules = c.run_rules(run)
    assert len(rules) == 6
    assert [r for r in rules if not r.holds] == []


@pytest.mark.parametrize(
    "change, rule",
    [
        ({"dense_dp": 32}, "dense-DP x PP = GPUs"),
        ({"expert_dp": 3}, "expert-DP x EP x PP = GPUs"),
        ({"nodes": 3}, "nodes x GPUs per node = GPUs"),
        ({"global_batch_Mi": 8.5}, "microbatches per step are whole"),
        ({"rank_microbatch_tokens": 65537}, "sequences per rank microbatch are whole"),
        ({"routed_experts": 63}, "experts per EP rank are whole"),
    ],
)
def test_a_wrong_run_is_caught_by_its_rule(change, rule):
    row = report_table(49).to_dicts()[1] | change
    assert rule in [r.rule for r in c.run_rules(row) if not r.holds]


def models_of_configurations() -> dict[str, str]:
    return {r["configuration"]: r["model"] for r in report_table(49).to_dicts()}


def test_table_50_obeys_its_rules():
    rules = c.headline_rules(report_table(50).to_dicts(), models_of_configurations())
    # The alternates of Table 50 are rows of Table 49 without a headline of their own.
    assert [(r.rule, r.row) for r in rules if not r.holds] == [
        ("a configuration with random routing has a headline", "Small-64E, 16 Mi"),
        ("a configuration with random routing has a headline", "Large-128E, PP8"),
    ]
    assert sum(r.rule.startswith("headline is") for r in rules) == 8


def test_a_headline_below_its_repeat_is_caught():
    rows = report_table(50).to_dicts()
    rows[8]["TFLOPs_per_gpu"] = 900.0
    broken = [r for r in c.headline_rules(rows, models_of_configurations()) if not r.holds and "highest" in r.rule]
    assert {r.row for r in broken} == {"Medium-96E"} and "855 of 855, 900, 740" in [r.value for r in broken]


def test_equal_learned_and_random_rates_are_no_disagreement():
    row = {"configuration": "x", "use": "headline", "TFLOPs_per_gpu": 5.0}
    rules = c.headline_rules(
        [row | {"routing": "Random"}, row | {"routing": "Learned", "use": "companion"}], {"x": "m"}
    )
    assert [r.rule for r in rules if not r.holds] == []


@pytest.mark.parametrize("dp, rank", [(0, 1), (1, 0)])
def test_empty_batches_are_refused(dp, rank):
    with pytest.raises(ValueError, match="both above 0"):
        c.accumulation_microbatches(1, dp, rank)


def test_one_family_has_one_expert_size():
    """(total - active)/(N - K) of runs that differ only in their experts must overlap."""
    by_model: dict[str, c.Interval] = {}
    for r in printed_rows(49):
        active, total = run_sizes(r)
        by_model[r["model"]] = c.params_per_routed_expert(
            interval(active), interval(total), int(r["routed_experts"]), 4
        )
    for family in ("Medium", "Ultra"):
        found = [v for k, v in by_model.items() if k.startswith(family)]
        common = found[0]
        for other in found[1:]:
            both = common.meet(other)
            assert both is not None, family
            common = both
    assert by_model["Tiny-64E"].meet(by_model["Small-64E"]) is None


@pytest.mark.parametrize(
    "change, message",
    [
        ({"top_k": 0}, "top_k"),
        ({"top_k": 200}, "1 to 128"),
        ({"dense_blocks": 31}, "dense_blocks"),
        ({"d_model": -1}, "d_model"),
        ({"blocks": 1.5}, "blocks: expected a whole number"),
    ],
)
def test_bad_models_raise(change, message):
    with pytest.raises(ValueError, match=message):
        c.Sparse(**{**vars(c.REFERENCE_30_BLOCK), **change})


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6), st.floats(-1e6, 1e6), st.floats(0, 1e6))
def test_interval_arithmetic_holds_every_sum(a, da, b, db):
    x, y = c.Interval(a, a + da), c.Interval(b, b + db)
    assert a + b in x + y and x.high + y.high in x + y and (x - y).low <= a - b <= (x - y).high
    assert x.meet(y) is None or (x.meet(y).low in x and x.meet(y).low in y)
