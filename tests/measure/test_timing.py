"""Timers: quantiles by hand; on a GPU, times that agree with one another and a wait that shows."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.measure import timing


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
def test_percentile_agrees_with_the_median_and_stays_in_range(values):
    assert timing.percentile(values, 0.5) == pytest.approx(statistics.median(values))
    assert timing.percentile(values, 0) == min(values) and timing.percentile(values, 1) == max(values)


def test_summary_names_its_quantiles():
    assert timing.summary([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == {
        "time_us_p20": 2.0,
        "time_us_p50": 3.5,
        "time_us_p80": 5.0,
    }
    with pytest.raises(ValueError, match="got 0 values"):
        timing.percentile([], 0.5)
    with pytest.raises(ValueError, match=r"q = 1\.5"):
        timing.percentile([1.0], 1.5)


def test_interleaved_alternates_the_order():
    seen = []

    def record(name):
        return lambda: seen.append(name)

    out = timing.interleaved({"a": record("a"), "b": record("b")}, rounds=3, timer=lambda call: [call() or 1.0])
    assert seen == ["a", "b", "b", "a", "a", "b"]
    assert out == {"a": [1.0] * 3, "b": [1.0] * 3}


@pytest.mark.gpu
def test_timers_agree_on_a_long_kernel_and_count_launches():
    import torch

    # 2.2e12 operations, milliseconds a call: what the host adds once per measurement, even on a busy machine, is small
    # against it, so that the tolerance judges the timers.
    a, b = (torch.randn(10240, 10240, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def call():
        torch.mm(a, b, out=out)

    eager = timing.percentile(timing.eager_device_us(call, repeats=9), 0.5)
    graph = timing.percentile(timing.graph_us(call, copies=3, repeats=7), 0.5)
    wall = timing.percentile(timing.wall_us(call, repeats=7, batch=3), 0.5)
    assert graph == pytest.approx(eager, rel=0.25) and wall == pytest.approx(eager, rel=0.25)
    assert timing.percentile(timing.submit_us(call), 0.5) < eager
    assert timing.launches(lambda: out.mul_(1.0)) == 1 and timing.launches(lambda: out.mul_(1.0).add_(0.0)) == 2
    # A submission that waits for the device holds its time; the clock of the device differs between the measurements.
    assert timing.percentile(timing.submit_us(lambda: (call(), out[0, 0].item())), 0.5) > 0.75 * graph
    assert timing.copy_bandwidth_GBps(1 << 28) > 100
