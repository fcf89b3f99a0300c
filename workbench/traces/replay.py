"""From a trace to a program of the queue model, and what a change would gain.

The host's submitting threads become one timeline of submissions and waits; device operations keep their stream, order
and duration. Replayed unchanged the program reproduces the measured times; then waits are removed, host cost or device
speed scaled, or launches merged. What this assumes is part of the answer.

Source: report Section 8.1 (the queue rule), Equation 11.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.models.submission import SUBMIT, WAIT, WAIT_OP, WORK, Columns, simulate
from workbench.traces.idle import TURNAROUND_NS, Analysis, Window, gaps, time_inside
from workbench.traces.lookup import Locator
from workbench.traces.ranges import steps as profiler_steps
from workbench.traces.trace import CPU_OP, NONE, Trace, TraceError
from workbench.traces.waits import NOT_COUNTED, describe_waits

DEPENDENCY_SLACK_NS = 20_000
LARGEST_FACTOR = 1e6  # a duration of days times this still fits int64 nanoseconds
ROUNDS = 6


@dataclass(frozen=True)
class Replay:
    """A trace as a program: integer ns, one host timeline.

    `step_kind` (SUBMIT or WAIT), `step_cost_ns`, `step_time_ns` (measured instant of the step, from the origin),
    `wait` (row of Waits, -1 for submissions), `call` (row of Calls); `first_op` [steps + 1] over operations in
    submission order (`op` rows of DeviceOps, lead first); `core_ns` is an operation's own time and `overhead_ns` the
    time from when it could start to when it did; `target` is the operation a wait waits for; `dep` the operation of
    another stream that held one back, or -1.
    """

    analysis: Analysis
    process: int
    origin_ns: int
    end_ns: int
    step_kind: np.ndarray
    step_cost_ns: np.ndarray
    step_time_ns: np.ndarray
    return_ns: np.ndarray
    wait: np.ndarray
    call: np.ndarray
    first_op: np.ndarray
    target: np.ndarray
    op: np.ndarray
    lane: np.ndarray
    lanes: tuple[tuple[int, int], ...]
    core_ns: np.ndarray
    overhead_ns: np.ndarray
    starved: np.ndarray
    dep: np.ndarray
    notes: list[str]
    window: Window | None


def to_program(trace: Trace | Analysis, *, window: Window | None = None, process: int | None = None) -> Replay:
    """Build the program of one process (default: the one with most device operations) within a window.

    Raises:
        TraceError: no device operations with a recorded launch in the window.
    """
    analysis = trace if isinstance(trace, Analysis) else Analysis(trace)
    trace = analysis.trace
    ops, calls = trace.ops, trace.calls
    linked = ops.launch >= 0
    if not linked.any():
        raise TraceError(f"{trace.source}: no device operation has a recorded launch, so there is nothing to replay")
    if process is None:
        process = int(np.bincount(ops.process[linked]).argmax())
    notes = []
    if len({p for p, _ in analysis.rows}) > 1:
        notes.append(f"only process {trace.process_label(process)} is replayed; each process has its own host")
    low, high = window if window is not None else (np.iinfo(np.int64).min, np.iinfo(np.int64).max)
    mine = (ops.process == process) & (ops.end_ns > low)
    launched = np.where(linked, calls.start_ns[np.maximum(ops.launch, 0)], ops.start_ns)
    mine &= launched < high
    own = np.flatnonzero(mine)
    if analysis.clock_violation[own].any():
        notes.append(
            f"{int(analysis.clock_violation[own].sum())} operations start before their launch and are taken as "
            "submitted when they start"
        )
    inside = linked[own] & (launched[own] >= low)
    launches = np.unique(ops.launch[own[inside]])
    if not len(launches):
        raise TraceError(f"{trace.source}: nothing was launched in this window")
    origin = int(min(calls.start_ns[launches[0]], ops.start_ns[own].min()))
    origin = max(origin, low)

    waits = analysis.waits
    usable = (
        waits.submits & (calls.process[waits.call] == process) & (waits.start_ns >= origin) & (waits.start_ns < high)
    )
    wait_rows = np.flatnonzero(usable)
    d2h_call = np.isin(waits.call[wait_rows], launches)
    typical = _typical_call_ns(analysis, launches, waits.call[wait_rows[d2h_call]])
    instant = np.minimum(calls.end_ns[launches], analysis.first_start[launches])
    blocking = np.isin(launches, waits.call[wait_rows[d2h_call]])
    instant[blocking] = np.minimum(instant[blocking], calls.start_ns[launches[blocking]] + typical)
    begin = waits.start_ns[wait_rows].copy()
    at = np.searchsorted(launches, waits.call[wait_rows[d2h_call]])
    begin[d2h_call] = instant[at]

    kind = np.concatenate([np.full(len(launches), SUBMIT), np.full(len(wait_rows), WAIT)])
    time = np.concatenate([instant, begin])
    order = np.lexsort((kind, time))
    kind, time = kind[order], time[order]
    call = np.concatenate([launches, waits.call[wait_rows]])[order]
    wait = np.concatenate([np.full(len(launches), NONE), wait_rows])[order]

    step_of_call = np.full(len(calls), NONE, np.int64)
    submit_steps = np.flatnonzero(kind == SUBMIT)
    step_of_call[call[submit_steps]] = submit_steps
    step_of_op = np.full(len(own), NONE, np.int64)
    step_of_op[inside] = step_of_call[ops.launch[own[inside]]]
    loose = np.flatnonzero(~linked[own] & ~analysis.carry_in[own] & (ops.start_ns[own] >= origin))
    if len(loose):
        _join_previous(step_of_op, loose, own, ops)
        notes.append(
            f"{len(loose)} operations without a recorded launch are taken as submitted with the one before them on "
            "their stream"
        )
    lead = int((step_of_op < 0).sum())
    if lead:
        notes.append(f"{lead} operations were launched before the window: they are queued from the start")
    listed = np.argsort(step_of_op, kind="stable")
    op, step_of_op = own[listed], step_of_op[listed]
    first_op = np.searchsorted(step_of_op, np.arange(len(kind) + 1), "left")

    target = _wait_targets(analysis, kind, wait, time, op, step_of_op)
    crossed = _crossed(kind, wait, time, waits)
    target[crossed] = NONE
    if crossed.any():
        notes.append(
            f"{int(crossed.sum())} waits overlap submissions of another thread: taken as host time, not as waits"
        )
    after = time.copy()
    waiting = np.flatnonzero((kind == WAIT) & (target >= 0))
    after[waiting] = np.maximum(time[waiting], np.minimum(ops.end_ns[op[target[waiting]]], waits.end_ns[wait[waiting]]))
    returned = np.zeros(len(kind), np.int64)
    returned[waiting] = np.maximum(waits.end_ns[wait[waiting]] - after[waiting], 0)
    reached = np.maximum.accumulate(np.concatenate([[origin], after]))
    cost = np.maximum(time - reached[:-1], 0)

    submitted = np.where(step_of_op >= 0, time[np.maximum(step_of_op, 0)], origin)
    lanes, lane = _lanes(ops.device[op], ops.stream[op])
    dep = _dependencies(analysis, op, lane, submitted)
    base = np.maximum(submitted, _reach_before(ops.end_ns[op], lane, origin))
    held = dep >= 0
    base[held] = np.maximum(base[held], ops.end_ns[op[dep[held]]])
    starved = submitted >= base
    total = np.maximum(ops.end_ns[op] - base, 0)
    overhead = np.clip(ops.start_ns[op] - base, 0, total)
    end = int(max(ops.end_ns[op].max(), after.max()))
    return Replay(
        analysis,
        process,
        origin,
        end,
        kind,
        cost,
        time - origin,
        returned,
        wait,
        call,
        first_op,
        target,
        op,
        lane,
        lanes,
        total - overhead,
        overhead,
        starved,
        dep,
        notes,
        window,
    )


def _join_previous(step_of_op: np.ndarray, loose: np.ndarray, own: np.ndarray, ops: Any) -> None:
    """Give each operation without a launch the step of the operation before it on its stream."""
    _, lane = _lanes(ops.device[own], ops.stream[own])
    for index in np.unique(lane[loose]):
        rows = np.flatnonzero(lane == index)
        step_of_op[rows] = np.where(np.isin(rows, loose), np.maximum.accumulate(step_of_op[rows]), step_of_op[rows])


def _typical_call_ns(analysis: Analysis, launches: np.ndarray, blocking_calls: np.ndarray) -> int:
    calls = analysis.trace.calls
    plain = np.setdiff1d(launches, blocking_calls)
    plain = plain if len(plain) else launches
    return int(np.median(calls.end_ns[plain] - calls.start_ns[plain]))


def _wait_targets(
    analysis: Analysis, kind: np.ndarray, wait: np.ndarray, time: np.ndarray, op: np.ndarray, step_of_op: np.ndarray
) -> np.ndarray:
    """The operation that each wait waits for: its copy, else the last to end before the call returned."""
    ops, waits = analysis.trace.ops, analysis.waits
    target = np.full(len(kind), NONE, np.int64)
    position = np.full(len(ops), NONE, np.int64)
    position[op] = np.arange(len(op))
    by_end = np.argsort(ops.end_ns[op], kind="stable")
    ends = ops.end_ns[op][by_end]
    for step in np.flatnonzero(kind == WAIT):
        copy = waits.copy[wait[step]]
        if copy >= 0 and position[copy] >= 0 and step_of_op[position[copy]] < step:
            target[step] = position[copy]
            continue
        at = int(np.searchsorted(ends, waits.end_ns[wait[step]], "right")) - 1
        while at >= 0 and step_of_op[by_end[at]] > step:
            at -= 1
        if at >= 0:
            target[step] = by_end[at]
    return target


def _crossed(kind: np.ndarray, wait: np.ndarray, time: np.ndarray, waits: Any) -> np.ndarray:
    submits = time[kind == SUBMIT]
    crossed = np.zeros(len(kind), bool)
    rows = np.flatnonzero(kind == WAIT)
    low = np.searchsorted(submits, time[rows], "right")
    crossed[rows] = np.searchsorted(submits, waits.end_ns[wait[rows]], "left") > low
    return crossed


def _lanes(device: np.ndarray, stream: np.ndarray) -> tuple[tuple[tuple[int, int], ...], np.ndarray]:
    pairs, lane = np.unique(np.stack([device.astype(np.int64), stream]), axis=1, return_inverse=True)
    return tuple((int(d), int(s)) for d, s in pairs.T), lane.reshape(-1).astype(np.int64)


def _reach_before(end: np.ndarray, lane: np.ndarray, origin: int) -> np.ndarray:
    out = np.full(len(end), origin, np.int64)
    for index in range(int(lane.max()) + 1 if len(lane) else 0):
        rows = np.flatnonzero(lane == index)
        out[rows[1:]] = np.maximum.accumulate(end[rows])[:-1]
    return out


def _dependencies(analysis: Analysis, op: np.ndarray, lane: np.ndarray, submitted: np.ndarray) -> np.ndarray:
    """For operations held back while submitted and their stream free: the last to end on another stream just before."""
    ops = analysis.trace.ops
    start, end = ops.start_ns[op], ops.end_ns[op]
    base = np.maximum(submitted, _reach_before(end, lane, np.iinfo(np.int64).min))
    dep = np.full(len(op), NONE, np.int64)
    by_end = np.argsort(end, kind="stable")
    ends = end[by_end]
    for j in np.flatnonzero(start - base > TURNAROUND_NS):
        at = int(np.searchsorted(ends, start[j], "right")) - 1
        while at >= 0 and ends[at] > base[j] and start[j] - ends[at] <= DEPENDENCY_SLACK_NS:
            i = by_end[at]
            if lane[i] != lane[j] and i < j:
                dep[j] = i
                break
            at -= 1
    return dep


def what_if(
    trace: Trace | Analysis | Replay,
    *,
    remove_waits: bool | str = False,
    host_scale: float = 1.0,
    device_scale: float = 1.0,
    merge_launches: int = 1,
    window: Window | None = None,
) -> dict[str, Any]:
    """Predict span and idle time after a change, with the assumptions; `spans` says them in words.

    ``*_us`` is from the first submission to the last end of an operation or wait; ``*_device_us`` from the first
    device operation to the last, ``*_idle_us`` within it.

    Args:
        remove_waits: True removes all host waits, text those whose line, operator, range or call contains it.
        host_scale: factor on all host time between submissions.
        device_scale: factor on the operations' own durations.
        merge_launches: this many successive launches become one submission (a large number: one graph per step).
    Raises:
        ValueError: a factor is negative, not finite or above 1e6, or no wait matches the text.
        TraceError: the trace cannot be replayed.
    """
    for name, factor in (("host_scale", host_scale), ("device_scale", device_scale)):
        if not 0 <= factor <= LARGEST_FACTOR:
            raise ValueError(f"{name}: expected a factor of 0 to {LARGEST_FACTOR:g}, got {factor!r}")
    if merge_launches < 1:
        raise ValueError(f"merge_launches: expected at least 1, got {merge_launches!r}")
    replay = trace if isinstance(trace, Replay) else to_program(trace, window=window)
    removed = _removed(replay, remove_waits)
    unchanged, device0, idle0, _ = _run(replay, np.zeros(len(replay.step_kind), bool), 1.0, 1.0, 1)
    predicted, device1, idle1, submissions = _run(replay, removed, host_scale, device_scale, merge_launches)
    measured = replay.end_ns - replay.origin_ns
    ops = replay.analysis.trace.ops
    return {
        "schema": 1,
        "source": replay.analysis.trace.source,
        "measured_us": measured / 1e3,
        "replayed_us": unchanged / 1e3,
        "predicted_us": predicted / 1e3,
        "window_ns": None if replay.window is None else [int(t) for t in replay.window],
        "measured_device_us": int(ops.end_ns[replay.op].max() - ops.start_ns[replay.op].min()) / 1e3,
        "replayed_device_us": device0 / 1e3,
        "predicted_device_us": device1 / 1e3,
        "measured_idle_us": _measured_idle(replay) / 1e3,
        "replayed_idle_us": idle0 / 1e3,
        "predicted_idle_us": idle1 / 1e3,
        "removed_waits": int(removed.sum()),
        "removed_blocking_waits": _blocking(replay, removed),
        "submissions": submissions,
        "assumptions": _assumptions(replay, removed, host_scale, device_scale, merge_launches),
    }


def spans(answer: Mapping[str, Any]) -> list[str]:
    """Return an answer's times in words, one line a stretch: which stretch it is, measured and predicted."""
    same = "the window of `summary`" if answer["window_ns"] is None else "`summary` cuts them at the window's edges"
    return [
        f"from the first submission to the last end: measured {answer['measured_us']:.1f} us, "
        f"replayed unchanged {answer['replayed_us']:.1f} us, predicted {answer['predicted_us']:.1f} us",
        f"device operations, first to last ({same}): measured {answer['measured_device_us']:.1f} us, "
        f"predicted {answer['predicted_device_us']:.1f} us",
        f"of it idle: measured {answer['measured_idle_us']:.1f} us, predicted {answer['predicted_idle_us']:.1f} us",
    ]


def gain(answer: Mapping[str, Any], changed: bool) -> str:
    """Return one line: how many times as fast the answer predicts the replayed stretch, or that nothing was changed."""
    if not changed:
        return "nothing is changed: remove waits, scale host or device time, or merge launches"
    before, after = answer["replayed_us"], answer["predicted_us"]
    if not after > 0:
        return "predicted: no time is left"
    return f"predicted: {before / after:.3g} times as fast, {100 * (after / before - 1):+.1f} % time"


def _removed(replay: Replay, which: bool | str) -> np.ndarray:
    is_wait = replay.step_kind == WAIT
    if which is True:
        return is_wait.copy()
    if which is False or which is None:
        return np.zeros(len(is_wait), bool)
    steps = np.flatnonzero(is_wait)
    analysis = replay.analysis
    rows = describe_waits(analysis.trace, analysis.waits.take(replay.wait[steps]))
    calls = analysis.trace.names
    out = np.zeros(len(is_wait), bool)
    places = set()
    for step, row in zip(steps, rows):
        call = calls[analysis.trace.calls.name[replay.call[step]]]
        texts = [t for t in (row["line"], row["op"], row["range"], call, row["kind"]) if t]
        places.add(row["line"] or row["op"] or call)
        out[step] = any(which in t for t in texts)
    if not out.any():
        known = f"waits are at: {', '.join(sorted(places)[:10])}" if places else "the trace has no host wait"
        raise ValueError(f"no wait matches {which!r}; {known}")
    return out


def _run(
    replay: Replay, removed: np.ndarray, host_scale: float, device_scale: float, merge: int
) -> tuple[int, int, int, int]:
    """(makespan, device span, idle, submissions) in ns after a change. Launch latency follows the queue's state."""
    changed = bool(removed.any()) or host_scale != 1 or device_scale != 1 or merge > 1
    columns, order = _columns(replay, removed, host_scale, merge)
    core = np.rint(replay.core_ns[order] * device_scale).astype(np.int64)
    measured, was_starved = replay.overhead_ns[order], replay.starved[order]
    dropped = _dropped_copies(replay, removed)
    queued_gap = _median(measured[~was_starved])
    starved_gap = max(_median(measured[was_starved]), queued_gap)
    overhead = measured
    starved = was_starved
    timeline = None
    for _ in range(ROUNDS if changed else 1):
        timeline = simulate(_with_durations(columns, np.where(dropped, 0, core + overhead)))
        if not changed:
            break
        now = timeline.op_start <= timeline.op_submitted
        if (now == starved).all():
            break
        starved = now
        overhead = np.where(now == was_starved, measured, np.where(now, starved_gap, queued_gap))
    assert timeline is not None
    lead = np.maximum(timeline.op_end - np.where(dropped, 0, core), timeline.op_start)
    kept = ~dropped
    device = int(timeline.op_end[kept].max() - lead[kept].min()) if kept.any() else 0
    idle = _idle(replay, order, lead, timeline.op_end)
    return int(timeline.makespan), device, idle, int((columns.kind == SUBMIT).sum())


def _median(values: np.ndarray) -> int:
    return int(np.median(values)) if len(values) else 0


def _with_durations(columns: Columns, durations: np.ndarray) -> Columns:
    return dataclasses.replace(columns, op_duration=durations)


def _columns(replay: Replay, removed: np.ndarray, host_scale: float, merge: int) -> tuple[Columns, np.ndarray]:
    kind = replay.step_kind.astype(np.int8).copy()
    argument = np.where(kind == WAIT, np.maximum(replay.target, 0), 0)
    cost = replay.step_cost_ns.astype(np.float64)
    # A removed wait takes the return of its call along, a removed read (`.item()`) all of its operator's host time.
    back = np.flatnonzero(removed)
    following = back[back + 1 < len(kind)] + 1
    until = replay.step_time_ns + replay.origin_ns
    since = until - replay.step_cost_ns
    spans = _read_spans(replay, removed)
    gone = np.zeros(len(kind), np.int64)
    gone[following] = replay.return_ns[following - 1]
    if len(spans):
        inside = time_inside(spans[:, 0], spans[:, 1])
        overlap = inside(until) - inside(since)
        gone = np.where(overlap > 0, np.maximum(overlap, gone), gone)
    cost = np.maximum(cost - gone, 0)
    kind[removed | ((kind == WAIT) & (replay.target < 0))] = WORK
    first_op = replay.first_op.copy()
    if merge > 1:
        kind, cost, first_op = _merge(replay, kind, cost, first_op, merge)
    held = replay.dep >= 0
    dep_first = np.concatenate([[0], np.cumsum(held)])
    cost_ns = np.rint(cost * host_scale).astype(np.int64)
    n, m = len(kind), len(replay.op)
    columns = Columns(
        kind=kind,
        thread=np.zeros(n, np.int64),
        cost=cost_ns,
        label=[""] * n,
        first_op=first_op,
        op_duration=np.zeros(m, np.int64),
        op_lane=replay.lane,
        op_label=[""] * m,
        lanes=replay.lanes,
        argument=argument,
        wait_kind=np.full(n, WAIT_OP, np.int64),
        dep_first=dep_first,
        dep_op=replay.dep[held],
    )
    return columns, np.arange(m)


_READ = ("aten::item", "aten::_local_scalar_dense")


def _read_spans(replay: Replay, removed: np.ndarray) -> np.ndarray:
    """[k, 2] host spans of the scalar reads whose waits are removed, disjoint and sorted."""
    analysis = replay.analysis
    locator = Locator(analysis.trace)
    spans = set()
    for step in np.flatnonzero(removed):
        wait = replay.wait[step]
        thread, start = int(analysis.waits.thread[wait]), int(analysis.waits.start_ns[wait])
        found = [(a, b) for name, a, b in locator.enclosing(thread, CPU_OP, start) if name in _READ]
        if found:
            spans.add(found[0])
    return np.array(sorted(spans), np.int64).reshape(-1, 2)


def _dropped_copies(replay: Replay, removed: np.ndarray) -> np.ndarray:
    """Mask of the operations that only served removed scalar reads."""
    mask = np.zeros(len(replay.op), bool)
    spans = _read_spans(replay, removed)
    waits = replay.analysis.waits
    for step in np.flatnonzero(removed):
        wait = replay.wait[step]
        at = np.searchsorted(spans[:, 0], waits.start_ns[wait], "right") - 1
        if at >= 0 and waits.start_ns[wait] < spans[at, 1] and waits.copy[wait] >= 0:
            mask[replay.op == waits.copy[wait]] = True
    return mask


def _merge(
    replay: Replay, kind: np.ndarray, cost: np.ndarray, first_op: np.ndarray, merge: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Groups of successive submissions within a profiler step and between waits become one, for the cost of one."""
    edges = np.array([a - replay.origin_ns for _, (a, _) in profiler_steps(replay.analysis.trace)], np.int64)
    part = np.searchsorted(np.sort(edges), replay.step_time_ns, "right")
    cost, kind, first_op = cost.copy(), kind.copy(), first_op.copy()
    one = float(np.median(cost[kind == SUBMIT])) if (kind == SUBMIT).any() else 0.0
    group: list[int] = []

    def close() -> None:
        if len(group) > 1:
            head, rest = group[0], group[1:]
            kind[rest] = WORK
            cost[rest] = 0
            cost[head] = min(cost[head], one) if part[head] == part[max(head - 1, 0)] else cost[head]
            first_op[head + 1 : rest[-1] + 1] = first_op[rest[-1] + 1]
        group.clear()

    for i in range(len(kind)):
        if kind[i] == SUBMIT and group and part[i] == part[group[-1]] and len(group) < merge:
            group.append(i)
            continue
        if kind[i] == WORK and group and part[i] == part[group[-1]]:
            continue
        close()
        if kind[i] == SUBMIT:
            group.append(i)
    close()
    return kind, cost, first_op


def _idle(replay: Replay, order: np.ndarray, start: np.ndarray, end: np.ndarray) -> int:
    device = replay.analysis.trace.ops.device[replay.op[order]]
    total = 0
    for d in np.unique(device):
        s, e = start[device == d], end[device == d]
        by = np.argsort(s, kind="stable")
        begin, stop, _ = gaps(s[by], e[by], int(s.min()), int(e.max()))
        total += int((stop - begin).sum())
    return total


def _measured_idle(replay: Replay) -> int:
    ops = replay.analysis.trace.ops
    return _idle(replay, np.arange(len(replay.op)), ops.start_ns[replay.op], ops.end_ns[replay.op])


def _blocking(replay: Replay, removed: np.ndarray) -> int:
    """How many of the removed waits held up submission: those that the verifier counts."""
    return int(replay.analysis.waits.counted()[replay.wait[removed]].sum())


def _assumptions(replay: Replay, removed: np.ndarray, host_scale: float, device_scale: float, merge: int) -> list[str]:
    out = [
        "the submitting threads of the process are one host timeline; time between submissions is host cost and "
        "does not depend on the device",
        "operations keep their stream, order and duration; a slower or faster neighbour does not change them",
        "host cost includes what the profiler itself adds",
    ]
    held = int((replay.dep >= 0).sum())
    if held:
        out.append(f"{held} operations wait for the last operation that ended on another stream before them (inferred)")
    changed = removed.any() or host_scale != 1 or device_scale != 1 or merge > 1
    if changed:
        out.append(
            "an operation that finds its queue empty starts after the measured launch latency, one that was queued "
            "after the measured gap between operations; where a change moves it between these, the median applies"
        )
    if removed.any():
        held = _blocking(replay, removed)
        others = int(removed.sum()) - held
        out.append(
            f"{int(removed.sum())} waits are removed with the return of their call"
            + (f" ({held} held the host, as `verify` counts; {others} {NOT_COUNTED})" if others else "")
            + "; a scalar read (`.item()`) goes with its host time and its copy, other copies still run"
        )
    if host_scale != 1:
        out.append(f"all host cost is scaled by {host_scale:g}, the return from waits included")
    if device_scale != 1:
        out.append(f"all operations take {device_scale:g} of their measured time, copies and collectives included")
    if merge > 1:
        out.append(
            f"up to {merge} successive launches between waits and within a profiler step become one submission that "
            "costs no more than the median launch; the first of a step keeps its own cost"
        )
    return out + replay.notes
