"""Properties of the queue model, each a function of a program as JSON values.

Programs have integer times and one host thread unless a property says otherwise, so every comparison is exact.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from workbench.models.headroom import device_headroom, idle_intervals
from workbench.models.submission import (
    EventRecord,
    HostWait,
    HostWork,
    Op,
    Program,
    RangePop,
    RangePush,
    StreamWait,
    Submit,
    Timeline,
    simulate,
)

STEPS = {"submit": Submit, "work": HostWork, "wait": HostWait, "record": EventRecord, "stream_wait": StreamWait,
         "push": RangePush, "pop": RangePop}  # fmt: skip


def one(label: str, cost: float, duration: float, **op: Any) -> Submit:
    """A submission of one operation of its name."""
    return Submit(label, cost, (Op(label, duration, **op),))


def program(data: dict[str, Any]) -> Program:
    """The inverse of `program_to_json`."""

    def op(raw: dict[str, Any]) -> Op:
        return Op(**{**raw, "after": tuple(raw.get("after", ()))})

    def step(kind: str, **values: Any) -> Any:
        if "ops" in values:
            values["ops"] = tuple(map(op, values["ops"]))
        return STEPS[kind](**values)

    steps = tuple(step(**raw) for raw in data["steps"])
    return Program(steps, tuple(map(op, data["lead"])), data.get("name", ""), data.get("time_unit", ""))


def simulated(data: dict[str, Any]) -> Timeline:
    """Timeline of a program given as JSON values."""
    return simulate(program(data))


def brute_force(data: dict[str, Any]) -> dict[str, Any]:
    """Second implementation: a clock that ticks, queues that hold work, and a host that walks through its steps."""
    lanes: dict[tuple[int, int], list[Any]] = {}
    running: dict[tuple[int, int], int] = {}
    ops: list[dict[str, Any]] = []
    by_label: dict[str, int] = {}
    recorded: dict[str, int] = {}
    events_done: set[int] = set()
    out: dict[str, list[int]] = {"host_start": [], "host_end": []}

    def push(op: dict[str, Any], now: int) -> None:
        lane = (op.get("device", 0), op.get("stream", 0))
        item = {**op, "lane": lane, "submitted": now, "deps": [by_label[d] for d in op.get("after", [])], "end": None}
        ops.append(item)
        by_label[op["label"]] = len(ops) - 1
        lanes.setdefault(lane, []).append(("op", len(ops) - 1))

    def finished(j: int, now: int) -> bool:
        return ops[j]["end"] is not None and ops[j]["end"] <= now

    def drained(lane: tuple[int, int], now: int) -> bool:
        return not lanes.get(lane) and (lane not in running or finished(running[lane], now))

    def advance(now: int) -> bool:
        moved = False
        for lane, queue in lanes.items():
            if not queue or (lane in running and not finished(running[lane], now)):
                continue
            what, index = queue[0]
            if what == "op":
                if all(finished(d, now) for d in ops[index]["deps"]):
                    ops[index]["start"], ops[index]["end"] = now, now + ops[index]["duration"]
                    running[lane] = index
                    queue.pop(0)
                    moved = True
            elif what == "record" or index in events_done:
                events_done.add(index)
                queue.pop(0)
                moved = True
        return moved

    for op in data["lead"]:
        push(op, 0)
    now, position, begun = 0, 0, False
    while position < len(data["steps"]) or any(lanes.values()):
        moved = advance(now)
        if position < len(data["steps"]):
            step = data["steps"][position]
            if not begun:
                out["host_start"].append(now)
                begun = True
            if now - out["host_start"][-1] >= step.get("cost", 0):
                lane = (step.get("device", 0), step.get("stream", 0))
                over = True
                if step["kind"] == "submit":
                    for op in step["ops"]:
                        push(op, now)
                elif step["kind"] == "record":
                    recorded[step["event"]] = position
                    lanes.setdefault(lane, []).append(("record", position))
                elif step["kind"] == "stream_wait":
                    lanes.setdefault(lane, []).append(("barrier", recorded[step["event"]]))
                elif step["kind"] == "wait":
                    if "op" in step:
                        over = finished(by_label[step["op"]], now)
                    elif "event" in step:
                        over = recorded[step["event"]] in events_done
                    elif "stream" in step:
                        over = drained(lane, now)
                    else:
                        over = all(drained(one, now) for one in lanes if one[0] == step["device"])
                if over:
                    out["host_end"].append(now)
                    position, begun, moved = position + 1, False, True
        if not moved:
            now += 1
    out["op_submitted"] = [op["submitted"] for op in ops]
    out["op_start"] = [op["start"] for op in ops]
    out["op_end"] = [op["end"] for op in ops]
    return out


def agrees_with_brute_force(data: dict[str, Any]) -> None:
    """Every time equals the ticking implementation's."""
    timeline = simulated(data)
    for name, expected in brute_force(data).items():
        assert getattr(timeline, name).tolist() == expected, name


def one_stream(data: dict[str, Any]) -> dict[str, Any]:
    """The program with all work on one stream of one device."""
    data = copy.deepcopy(data)
    for item in [*data["lead"], *data["steps"], *(op for s in data["steps"] for op in s.get("ops", []))]:
        for name in ("stream", "device"):
            if name in item:
                item[name] = 0
    return data


def idle_exactly_at_zero_headroom(data: dict[str, Any]) -> None:
    """On one stream the device is idle exactly while headroom is zero, and headroom is never negative."""
    timeline = simulated(one_stream(data))
    if not len(timeline.op_end):
        return
    curve = device_headroom(timeline)
    assert (curve.before >= 0).all() and (curve.after >= 0).all()
    idle = idle_intervals(timeline)
    for i in range(len(curve.t) - 1):
        middle = (curve.t[i] + curve.t[i + 1]) / 2
        executing = bool(np.any((timeline.op_start <= middle) & (middle < timeline.op_end)))
        inside = bool(np.any((idle[:, 0] <= middle) & (middle < idle[:, 1])))
        zero = curve.after[i] == 0 and curve.before[i + 1] == 0
        assert executing != zero and inside == zero


def drains_at_unit_rate_only_while_executing(data: dict[str, Any]) -> None:
    """Between breakpoints a stream's curve falls by the time it executes; the device's by the sum over its streams."""
    timeline = simulated(data)
    lane_of_op = np.asarray(timeline.columns.op_lane)
    for index, (device, stream) in enumerate(timeline.columns.lanes):
        curve = device_headroom(timeline, device, stream)
        start, end = timeline.op_start[lane_of_op == index], timeline.op_end[lane_of_op == index]
        for a, b, high, low in zip(curve.t, curve.t[1:], curve.after, curve.before[1:], strict=False):
            assert high - low == (b - a) * bool(np.any((start <= a) & (b <= end) & (end > start)))


def drain_equals_work_done(data: dict[str, Any]) -> None:
    """What a device's curve drains, and what it jumps up by, is the work done; it ends at zero."""
    timeline = simulated(data)
    for device in {d for d, _ in timeline.columns.lanes}:
        lanes = [i for i, (d, _) in enumerate(timeline.columns.lanes) if d == device]
        work = int(np.sum(timeline.columns.op_duration[np.isin(timeline.columns.op_lane, lanes)]))
        curve = device_headroom(timeline, device)
        assert curve.drained() == work
        assert int(np.sum(curve.after - curve.before)) == work
        assert curve.after[-1] == 0


def jumps_when_submission_completes(data: dict[str, Any]) -> None:
    """Each positive submission jumps at the end of its host step, by its operations' duration on that device."""
    timeline = simulated(data)
    c = timeline.columns
    expected: dict[tuple[int, int], int] = {}
    for j, duration in enumerate(c.op_duration.tolist()):
        when = 0 if c.op_step[j] < 0 else int(timeline.host_end[c.op_step[j]])
        key = (c.lanes[c.op_lane[j]][0], when)
        expected[key] = expected.get(key, 0) + duration
    for device in {d for d, _ in c.lanes}:
        curve = device_headroom(timeline, device)
        jumps = {int(t): int(up) for t, up in zip(curve.t, curve.after - curve.before, strict=True) if up}
        assert jumps == {when: up for (owner, when), up in expected.items() if owner == device and up}


def makespan_within_bounds(data: dict[str, Any]) -> None:
    """At least the host's and every stream's own work, at most everything one after another."""
    timeline = simulated(data)
    c = timeline.columns
    host, work = int(np.sum(c.cost)), int(np.sum(c.op_duration))
    streams = [int(np.sum(c.op_duration[np.asarray(c.op_lane) == lane])) for lane in range(len(c.lanes))]
    assert max([host, *streams]) <= timeline.makespan <= host + work


def monotone_in_every_cost(data: dict[str, Any]) -> None:
    """Raising any one cost or duration makes nothing earlier."""
    base = simulated(data)
    places = [(s, "cost") for s in range(len(data["steps"])) if data["steps"][s].get("cost") is not None]
    for step, name in places:
        changed = copy.deepcopy(data)
        changed["steps"][step][name] += 3
        _nothing_earlier(base, simulated(changed))
        for j in range(len(changed["steps"][step].get("ops", []))):
            longer = copy.deepcopy(data)
            longer["steps"][step]["ops"][j]["duration"] += 3
            _nothing_earlier(base, simulated(longer))


def _nothing_earlier(base: Any, other: Any) -> None:
    for name in ("host_end", "op_submitted", "op_start", "op_end"):
        assert (getattr(other, name) >= getattr(base, name)).all(), name
    assert other.makespan >= base.makespan


def scaling_costs_scales_times(data: dict[str, Any]) -> None:
    """Seven times every cost gives seven times every time."""
    scaled = copy.deepcopy(data)
    for item in [*scaled["lead"], *scaled["steps"], *(op for s in scaled["steps"] for op in s.get("ops", []))]:
        for name in ("cost", "duration"):
            if name in item:
                item[name] *= 7
    one, seven = simulated(data), simulated(scaled)
    for name in ("host_start", "host_end", "op_submitted", "op_start", "op_end"):
        assert (getattr(seven, name) == 7 * getattr(one, name)).all(), name


def removing_a_wait_never_lengthens(data: dict[str, Any]) -> None:
    """Without any one host wait or stream wait, no operation ends later and the makespan is no longer."""
    base = simulated(data)
    for i, step in enumerate(data["steps"]):
        if step["kind"] in ("wait", "stream_wait"):
            without = {**data, "steps": data["steps"][:i] + data["steps"][i + 1 :]}
            other = simulated(without)
            assert other.makespan <= base.makespan
            assert (other.op_end <= base.op_end).all()


def wait_stops_submission_until_done(data: dict[str, Any]) -> None:
    """A wait on an operation ends when both host and operation are there; nothing is submitted in between."""
    timeline = simulated(data)
    labels = [op["label"] for op in data["lead"]]
    for i, step in enumerate(data["steps"]):
        if step["kind"] == "wait" and "op" in step:
            target = len(labels) - 1 - labels[::-1].index(step["op"])
            assert timeline.host_end[i] == max(timeline.host_start[i], timeline.op_end[target])
            later = timeline.op_submitted[np.asarray(timeline.columns.op_step) > i]
            assert (later >= timeline.op_end[target]).all()
        labels += [op["label"] for op in step.get("ops", [])]


def starts_as_soon_as_allowed(data: dict[str, Any]) -> None:
    """Without stream waits, an operation starts at the last of: submission, stream free, dependencies done."""
    data = {**data, "steps": [s for s in data["steps"] if s["kind"] != "stream_wait"]}
    timeline = simulated(data)
    c = timeline.columns
    free: dict[int, int] = {}
    for j in range(len(c.op_duration)):
        lane = int(c.op_lane[j])
        deps = c.dep_op[c.dep_first[j] : c.dep_first[j + 1]]
        reasons = [timeline.op_submitted[j], free.get(lane, 0), *timeline.op_end[deps]]
        assert timeline.op_start[j] == max(reasons)
        assert timeline.op_end[j] == timeline.op_start[j] + c.op_duration[j]
        free[lane] = timeline.op_end[j]


def idle_is_the_rest_of_the_window(data: dict[str, Any]) -> None:
    """Per unit of time: a device is idle where none of its streams executes (integer times, so units are exact)."""
    timeline = simulated(data)
    for device in {d for d, _ in timeline.columns.lanes}:
        owner = np.array([d for d, _ in timeline.columns.lanes])[np.asarray(timeline.columns.op_lane, int)]
        idle = idle_intervals(timeline, device)
        for unit in range(int(timeline.makespan)):
            executing = (owner == device) & (timeline.op_start <= unit) & (unit < timeline.op_end)
            assert bool(executing.any()) != bool(np.any((idle[:, 0] <= unit) & (unit < idle[:, 1])))


PROPERTIES = (
    agrees_with_brute_force,
    idle_exactly_at_zero_headroom,
    drains_at_unit_rate_only_while_executing,
    drain_equals_work_done,
    jumps_when_submission_completes,
    makespan_within_bounds,
    monotone_in_every_cost,
    scaling_costs_scales_times,
    removing_a_wait_never_lengthens,
    wait_stops_submission_until_done,
    starts_as_soon_as_allowed,
    idle_is_the_rest_of_the_window,
)
