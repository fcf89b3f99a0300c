"""Table 51's quantities: worked examples, properties, and what counts as retained."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from workbench.core.report_tables import printed_rows
from workbench.models import metrics as m

pair = st.tuples(st.floats(0, 100), st.floats(0, 100)).map(sorted)
pairs = st.lists(pair, max_size=12)


def test_every_row_of_table_51_has_one_metric():
    rows = printed_rows(51)
    assert [r["slug"] for r in rows] == list(m.METRICS)
    for r in rows:
        assert m.METRICS[r["slug"]].name == r["metric"]
    assert len({id(x.function) for x in m.METRICS.values()}) == len(m.METRICS) == 10


def test_step_time_leaves_warmup_out():
    got = m.step_time([9.0, 9.0, 1.0, 2.0, 3.0, 4.0], warmup=2)
    assert got["count"] == 4 and got["median_s"] == 2.5 and got["mean_s"] == 2.5
    assert got["sd_s"] == pytest.approx(np.std([1, 2, 3, 4], ddof=1))
    assert m.step_time([2.0])["sd_s"] == 0
    assert got["p20_s"] == pytest.approx(1.6) and got["p95_s"] == pytest.approx(3.85)


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=30), st.floats(1e-3, 1e3))
def test_step_time_scales_with_the_clock(values, factor):
    a, b = m.step_time(values), m.step_time([v * factor for v in values])
    for key in ("p20_s", "median_s", "p80_s", "p95_s", "mean_s"):
        assert b[key] == pytest.approx(a[key] * factor)
    assert a["p20_s"] <= a["median_s"] <= a["p80_s"] <= a["p95_s"] <= max(values)


@given(st.integers(0, 10**9), st.floats(1e-3, 1e4), st.integers(1, 4096))
def test_useful_tokens_conserve_the_batch(tokens, seconds, gpus):
    assert m.useful_tokens_per_s_per_gpu(tokens, seconds, gpus) * seconds * gpus == pytest.approx(tokens)


def test_mfu_by_hand():
    # 8 GPUs, 2 s, 18e15 FLOPs: 18e15 / (8 x 2 x 2.25e15) = 0.5
    assert m.useful_model_mfu(18e15, 2.0, 8) == 0.5 and m.useful_model_mfu(0.0, 2.0, 8) == 0
    assert m.useful_model_mfu(18e15, 2.0, 8, peak_TFLOPs=4500) == 0.25


@given(pairs)
def test_union_length_bounds(intervals):
    lengths = [b - a for a, b in intervals]
    union = m.union_length(intervals)
    assert max(lengths, default=0) <= union + 1e-9 and union <= sum(lengths) + 1e-9
    assert m.union_length(intervals + intervals) == pytest.approx(union)
    assert m.union_length(intervals[::-1]) == pytest.approx(union)


def test_d2h_counts_waits_and_merges_overlap():
    got = m.d2h_route_shape_wall_time([(0, 10), (5, 12), (20, 21)], [(0, 3)], [(2, 4), (3, 6)])
    assert got == {"count": 3, "wait_us": 13.0, "launch_gap_us": 3.0, "gpu_idle_us": 4.0}
    assert m.d2h_route_shape_wall_time([])["count"] == 0


@given(pairs, pairs)
def test_exposure_between_none_and_all(communication, compute):
    exposed = m.communication_exposure(communication, compute)
    assert -1e-9 <= exposed <= m.union_length(communication) + 1e-9
    assert m.communication_exposure(communication, []) == pytest.approx(m.union_length(communication))
    assert m.communication_exposure(communication, communication) == pytest.approx(0, abs=1e-9)


def test_exposure_by_hand():
    assert m.communication_exposure([(0, 10)], [(2, 5), (4, 7), (20, 30)]) == 5


routing = st.integers(1, 4).flatmap(
    lambda s: hnp.arrays(np.int64, (s, 4), elements=st.integers(0, 50)).flatmap(
        lambda offered: st.tuples(st.just(offered), hnp.arrays(np.float64, offered.shape, elements=st.floats(0, 1)))
    )
)


@given(routing)
def test_routing_statistics_conserve_assignments(case):
    offered, fraction = case
    accepted = np.floor(offered * fraction).astype(np.int64)
    capacity = max(1, int(accepted.sum(0).reshape(2, 2).sum(1).max()))
    got = m.route_drop_statistics(offered, accepted, capacity_rows=capacity, experts_per_rank=2)
    assert got["offered"] == offered.sum() and got["accepted"] == accepted.sum() == sum(got["load_per_expert"])
    dropped = (np.array(got["drop_rate_per_source"]) * offered.sum(1)).sum()
    assert dropped == pytest.approx(got["drop_rate"] * got["offered"])
    assert 0 <= got["capacity_utilization"] <= 1 and 1 <= got["rank_skew"] <= 2 and 1 <= got["load_max_over_mean"] <= 4


def test_routing_statistics_by_hand():
    got = m.route_drop_statistics([[4, 4], [8, 0]], [[4, 4], [4, 0]], capacity_rows=8, experts_per_rank=1)
    assert got["drop_rate"] == 0.25 and got["drop_rate_per_source"] == [0.0, 0.5]
    assert got["capacity_utilization"] == 0.75 and got["rank_skew"] == pytest.approx(8 / 6)


def test_peak_memory_is_the_fullest_rank():
    got = m.peak_device_memory([3, 9, 5], [10, 10, 12])
    assert got == {"allocated_bytes": 9, "reserved_bytes": 12, "median_rank_allocated_bytes": 5}


@given(st.lists(st.booleans(), max_size=60))
def test_lease_high_water(opens):
    events, out, high = [], 0, 0
    for o in opens:
        e = 1 if o or out == 0 else -1
        events.append(e)
        out += e
        high = max(high, out)
    assert m.lease_high_water(events) == high


def test_checkpoint_adds():
    assert m.checkpoint_peak_time(100, 160, 2.0)["added_bytes"] == 60


@given(st.floats(1e-3, 1e6), st.integers(1, 512), st.integers(1, 64))
def test_perfect_scaling_is_one(per_gpu, gpus, reference):
    assert m.scaling_efficiency(per_gpu * gpus, gpus, per_gpu * reference, reference) == pytest.approx(1)
    assert m.scaling_efficiency(per_gpu * gpus / 2, gpus, per_gpu * reference, reference) == pytest.approx(0.5)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: m.step_time([1.0], warmup=1), "step_s"),
        (lambda: m.step_time([1.0, 0.0]), "above 0"),
        (lambda: m.step_time([1.0], warmup=-1), "warmup"),
        (lambda: m.step_time([float("nan")]), "finite"),
        (lambda: m.useful_tokens_per_s_per_gpu(1, 0, 1), "step_s"),
        (lambda: m.useful_model_mfu(1, 0, 1), "step_s"),
        (lambda: m.useful_model_mfu(1, float("nan"), 1), "step_s"),
        (lambda: m.useful_model_mfu(1, 1, 0), "gpus"),
        (lambda: m.useful_model_mfu(-1, 1, 1), "step_flop"),
        (lambda: m.union_length([(2, 1)]), "end >= start"),
        (lambda: m.lease_high_water([1, -1, -1]), "event 2"),
        (lambda: m.lease_high_water([2]), "event 0"),
        (lambda: m.peak_device_memory([5], [4]), "allocated <= reserved"),
        (lambda: m.checkpoint_peak_time(5, 4, 1), "before_bytes"),
        (lambda: m.checkpoint_peak_time(4, 4, 0), "seconds"),
        (lambda: m.scaling_efficiency(1, 1, 0, 1), "reference_throughput"),
        (lambda: m.route_drop_statistics([[1]], [[2]], capacity_rows=9, experts_per_rank=1), "accepted"),
        (lambda: m.route_drop_statistics([[9]], [[9]], capacity_rows=8, experts_per_rank=1), "at least 9"),
        (lambda: m.route_drop_statistics([[1, 1]], [[1]], capacity_rows=8, experts_per_rank=1), "shape"),
    ],
)
def test_bad_input_names_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "names, slug",
    [
        (["step_time_ms"], "step_time"),
        (["tokens_per_s_per_gpu"], "useful_tokens_per_s_per_gpu"),
        (["host_waits", "host_wait_us"], "d2h_route_shape_wall_time"),
        (["drop_rate", "load_max_over_mean"], "route_drop_statistics"),
        (["peak_allocated_bytes"], "peak_device_memory"),
        (["high_water_slots"], "lease_high_water"),
    ],
)
def test_retention_is_read_from_names(names, slug):
    assert m.METRICS[slug].retained(names)
    assert not m.METRICS[slug].retained(["kernel", "median_us", "rows_M"])


def test_field_names_skip_nulls():
    record = {"protocol": {"timer": "events", "warmup": None}, "raw_outputs": {"files": {"table.csv": {"sha256": "0"}}}}
    names = m.field_names(record, ["median_us"])
    assert "timer" in names and "warmup" not in names and "median_us" in names and "table.csv" in names
