"""Hypothesis: the queue model's properties hold for generated programs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_properties import PROPERTIES, simulated

from workbench.models.headroom import device_headroom, idle_intervals
from workbench.models.submission import Op, Program, Submit, simulate

TIME = st.integers(0, 6)


@st.composite
def programs(draw: st.DrawFn) -> dict[str, Any]:
    """One thread, up to two devices with two streams each, every kind of step, integer times."""
    lead = [
        {"label": f"lead{i}", "duration": draw(TIME), "stream": draw(st.integers(0, 1))}
        for i in range(draw(st.integers(0, 2)))
    ]
    labels, events, steps = [op["label"] for op in lead], [], []
    for i in range(draw(st.integers(0, 10))):
        kinds = ["submit", "submit", "work", "wait_stream", "wait_device", "record"]
        kinds += ["wait_op"] * 2 * bool(labels) + ["wait_event", "stream_wait"] * bool(events)
        kind = draw(st.sampled_from(kinds))
        lane = {"stream": draw(st.integers(0, 1)), "device": draw(st.sampled_from([0, 0, 1]))}
        if kind == "submit":
            ops = []
            for j in range(draw(st.sampled_from([1, 1, 2]))):
                after = draw(st.lists(st.sampled_from(labels), max_size=2)) if labels else []
                ops.append({"label": f"k{i}.{j}", "duration": draw(TIME), "after": after, **lane})
            labels += [op["label"] for op in ops]
            steps.append({"kind": kind, "label": f"s{i}", "cost": draw(TIME), "ops": ops})
        elif kind == "work":
            steps.append({"kind": kind, "label": "w", "cost": draw(TIME)})
        elif kind == "record":
            events.append(draw(st.sampled_from("xy")))
            steps.append({"kind": kind, "event": events[-1], "cost": draw(TIME), **lane})
        elif kind == "stream_wait":
            steps.append({"kind": kind, "event": draw(st.sampled_from(events)), "cost": draw(TIME), **lane})
        else:
            target: dict[str, Any] = {"wait_stream": lane, "wait_device": {"device": lane["device"]}}.get(kind, {})
            if kind == "wait_op":
                target = {"op": draw(st.sampled_from(labels))}
            elif kind == "wait_event":
                target = {"event": draw(st.sampled_from(events))}
            steps.append({"kind": "wait", "label": "wait", **target})
    return {"schema": 1, "name": "", "time_unit": "", "lead": lead, "steps": steps}


@pytest.mark.parametrize("prop", PROPERTIES, ids=lambda p: p.__name__)
def test_property(prop: Any) -> None:
    @settings(max_examples=120)
    @given(programs())
    def run(data: dict[str, Any]) -> None:
        prop(data)

    run()


FLOAT = st.floats(0.001, 1e3)


@settings(max_examples=150)
@given(st.lists(st.tuples(FLOAT, FLOAT), min_size=1, max_size=30))
def test_idle_exactly_at_zero_headroom_survives_rounding(costs: list[tuple[float, float]]) -> None:
    steps = tuple(Submit(f"k{i}", cost, (Op(f"k{i}", time),)) for i, (cost, time) in enumerate(costs))
    timeline = simulate(Program(steps))
    curve = device_headroom(timeline)
    zero = (curve.after[:-1] == 0) & (curve.before[1:] == 0)
    spans = np.column_stack([curve.t[:-1], curve.t[1:]])[zero]
    assert spans.tolist() == idle_intervals(timeline).tolist()


@settings(max_examples=80)
@given(programs(), programs(), st.randoms())
def test_threads_without_shared_streams_do_not_disturb_each_other(first: dict, second: dict, rng: Any) -> None:
    """Two programs on threads of their own, steps interleaved at random, run as each does alone."""
    moved = []
    for step in second["steps"]:
        step = (
            {**step, "thread": 7, "ops": [_renamed(op) for op in step["ops"]]}
            if "ops" in step
            else {**step, "thread": 7}
        )
        for name in ("op", "event"):
            if name in step:
                step[name] = "B" + step[name]
        if "device" in step:
            step["device"] += 2
        moved.append(step)
    queues = [list(first["steps"]), list(moved)]
    steps, order = [], []
    while queues[0] or queues[1]:
        side = rng.randrange(2) if queues[0] and queues[1] else int(not queues[0])
        steps.append(queues[side].pop(0))
        order.append(side)
    lead = [*first["lead"], *(_renamed({"device": 0, **op}) for op in second["lead"])]
    both = simulated({**first, "lead": lead, "steps": steps})
    for side, alone in enumerate((first, second)):
        expected = simulated(alone)
        assert both.host_end[np.array(order, int) == side].tolist() == expected.host_end.tolist()


def _renamed(op: dict[str, Any]) -> dict[str, Any]:
    after = ["B" + label for label in op.get("after", [])]
    return {**op, "label": "B" + op["label"], "device": op["device"] + 2, "after": after}
