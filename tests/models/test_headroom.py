"""Headroom curves, idle time, blocks ahead and readouts on programs whose answers are known by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from queue_properties import one
from queue_vectors import readouts

from workbench.models.headroom import blocks_ahead, busy_window, device_headroom, idle_intervals, queued_blocks
from workbench.models.submission import HostWait, HostWork, Op, Program, RangePop, RangePush, simulate


def test_curve_by_hand() -> None:
    timeline = simulate(Program((one("a", 1, 2), one("b", 1, 2), HostWork("w", 4), one("c", 1, 1))))
    curve = device_headroom(timeline)
    assert curve.t.tolist() == [0, 1, 2, 3, 5, 7, 8]
    assert curve.before.tolist() == [0, 0, 1, 2, 0, 0, 0]
    assert curve.after.tolist() == [0, 2, 3, 2, 0, 1, 0]
    assert curve.at(np.array([-1, 0.5, 1, 2.5, 4, 6, 7.25, 99])).tolist() == [0, 0, 2, 2.5, 1, 0, 0.75, 0]
    x, y = curve.path()
    assert x[:4].tolist() == [0, 0, 1, 1] and y[:4].tolist() == [0, 0, 0, 2]
    assert idle_intervals(timeline).tolist() == [[0, 1], [5, 7]]
    assert busy_window(timeline) == (1, 8)


def test_lead_is_there_at_time_zero() -> None:
    curve = device_headroom(simulate(Program((HostWork("w", 5),), (Op("l", 3),))))
    assert (curve.before[0], curve.after[0], curve.at(2)) == (0, 3, 1)


def test_device_curve_is_the_sum_of_its_streams() -> None:
    timeline = simulate(Program((one("a", 1, 4), one("b", 1, 4, stream=1), one("c", 0, 1, device=1))))
    x = np.linspace(0, timeline.makespan, 37)
    total = device_headroom(timeline, 0, 0).at(x) + device_headroom(timeline, 0, 1).at(x)
    assert device_headroom(timeline, 0).at(x) == pytest.approx(total, abs=1e-12)
    assert device_headroom(timeline, 0).at(3) == 2 + 3


def test_a_stream_s_curve_jumps_when_submission_is_complete_and_drains_at_unit_rate() -> None:
    timeline = simulate(Program((one("a", 3, 2, stream=1), one("b", 1, 4), one("c", 1, 2))))
    x = np.array([1, 2.5, 3, 4, 5, 6, 8, 9, 10, 11])
    assert device_headroom(timeline, 0, 0).at(x).tolist() == [0, 0, 0, 4, 5, 4, 2, 1, 0, 0]
    assert device_headroom(timeline, 0, 1).at(x).tolist() == [0, 0, 2, 1, 0, 0, 0, 0, 0, 0]


def test_a_short_interval_inside_a_long_one_ends_no_work() -> None:
    timeline = simulate(Program((one("long", 0, 9), one("short", 1, 2, stream=1), one("late", 4, 1, stream=1),
                                 one("last", 9, 1))))  # fmt: skip
    assert idle_intervals(timeline).tolist() == [[9, 14]]


def test_idle_window_clips() -> None:
    timeline = simulate(Program((one("a", 1, 2), HostWork("w", 4), one("c", 1, 1))))
    assert idle_intervals(timeline, window=(2, 5)).tolist() == [[3, 5]]
    with pytest.raises(ValueError, match="end >= start"):
        idle_intervals(timeline, window=(5, 2))


def test_blocks() -> None:
    steps = []
    for i in range(3):
        steps += [RangePush(f"b{i}"), one(f"k{i}", 1, 3), RangePop()]
    timeline = simulate(Program(tuple(steps)))
    assert blocks_ahead(timeline).at(np.array([0, 0.5, 1, 2, 4, 7])).tolist() == [1, 1, 1, 2, 1, 0]
    assert queued_blocks(timeline).at(np.array([0.5, 1, 2, 3, 4, 7])).tolist() == [0, 0, 1, 2, 1, 0]
    assert not blocks_ahead(timeline, "microbatch").after.any()


def test_operations_of_an_inner_range_belong_to_the_block_around_it() -> None:
    inner = [RangePush("attention", "layer"), one("k0", 1, 5), RangePop()]
    timeline = simulate(Program((RangePush("b0"), *inner, RangePop(), RangePush("b1"), one("k1", 1, 5), RangePop())))
    assert blocks_ahead(timeline).at(1.5) == 1
    assert blocks_ahead(timeline).at(6) == 0


def test_readouts_by_hand() -> None:
    steps = (
        one("a", 1, 4),
        HostWait("sync", op="a"),
        HostWork("read", 1),
        one("b", 1, 2),
        one("c", 0, 1, after=("b",)),
    )
    timeline = simulate(Program(steps))
    waiting = readouts(timeline, 2)
    assert waiting["cpu"] == {"0": {"kind": "wait", "label": "sync", "step": 1}}
    assert waiting["gpu"] == {"0": {"kind": "execute", "ops": [0]}}
    assert waiting["headroom"] == {"0": 3}
    idle = readouts(timeline, 6)
    assert idle["cpu"]["0"]["label"] == "b"
    assert idle["gpu"] == {"0": {"kind": "idle", "next": 1, "reason": "submission"}}
    assert readouts(timeline, 7)["queued_ops"] == 1
    assert readouts(timeline, 99)["cpu"] == {"0": {"kind": "done"}}


def test_idle_for_a_dependency_is_not_blamed_on_submission() -> None:
    timeline = simulate(Program((one("a", 1, 9, device=1), one("b", 1, 1, after=("a",)))))
    state = readouts(timeline, 5)
    assert state["gpu"]["0"] == {"kind": "idle", "next": 1, "reason": "dependency"}
    assert state["headroom"]["0"] == 1


@pytest.mark.parametrize("call", [lambda t: device_headroom(t, 0, 5), lambda t: device_headroom(t, 3)])
def test_unknown_lane_is_named(call: Any) -> None:
    with pytest.raises(ValueError, match=r"no (lane|device)"):
        call(simulate(Program((one("a", 1, 1),))))
