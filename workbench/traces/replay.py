"""From a trace to a program of the queue model, and what a change would gain.

The host's submitting threads become one timeline of submissions and waits; device operations keep their stream, order
and duration. Replayed unchanged the program reproduces the measured times; then waits are removed, host cost or device
speed scaled, or launches merged. What this assumes is part of the answer.

Source: report Section 8.1 (the queue rule), Equation 11.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workbench.models.submission import SUBMIT, WAIT, WAIT_OP, WORK, Columns, simulate
from workbench.traces.idle import TURNAROUND_NS, Analysis, Window, gaps, time_inside
from workbench.traces.lookup import Locator
from workbench.traces.ranges import steps as profiler_steps
from workbench.traces.trace import CPU_OP, FOREVER, NEVER, NONE, Trace, TraceError
from workbench.traces.waits import NOT_COUNTED, describe_waits

DEPENDENCY_SLACK_NS = 20_000
LARGEST_FACTOR = 1e6  # a duration of days times this still fits int64 nanoseconds
ROUNDS = 6
_READ = ("aten::item", "aten::_local_scalar_dense")


class Replay:
    """A trace as a program: one host timeline of n steps, m operations in submission order (lead first).

    Times are int64 ns on the trace's clock, `origin_ns` to `end_ns`.

    Args:
        analysis: of the trace.
        window: launches and waits that begin in it are replayed; None is the whole trace.
        process: whose; None is the one with most device operations.

    Attributes:
        step_kind: [n] SUBMIT or WAIT. step_ns: [n] measured instant of the step. step_cost_ns: [n] host time before it.
        return_ns: [n] from the end of what a wait waited for to the return of its call.
        wait: [n] row of Waits, -1 for submissions. call: [n] row of Calls.
        target: [n] operation that a wait waits for, or -1.
        op: [m] row of DeviceOps. op_step: [m] the step that submits it, -1 for the lead. first_op: [n + 1].
        lanes: (device, stream) pairs. lane: [m] index into them.
        core_ns: [m] an operation's own time. overhead_ns: [m] from when it could start to when it did.
        starved: [m] its queue was empty when it was submitted.
        dep: [m] operation of another stream that held it back, or -1.
        notes: what this replay had to assume of this trace.

    Raises:
        TraceError: no device operations with a recorded launch in the window.
    """

    def __init__(self, analysis: Analysis, window: Window | None, process: int | None) -> None:
        self.analysis, self.window = analysis, window
        self.notes: list[str] = []
        ops, linked = analysis.trace.ops, analysis.trace.ops.launch >= 0
        if not linked.any():
            source = analysis.trace.source
            raise TraceError(f"{source}: no device operation has a recorded launch, so there is nothing to replay")
        self.process = int(np.bincount(ops.process[linked]).argmax()) if process is None else process
        own, launches = self._choose_operations(linked)
        self._order_steps(launches)
        self._fill_queue(own, launches)
        self._find_targets()
        self._measure_steps()
        self._measure_operations()

    def _choose_operations(self, linked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(rows of the operations that are replayed, rows of the calls in the window that launched some of them)."""
        analysis, trace = self.analysis, self.analysis.trace
        ops, calls = trace.ops, trace.calls
        if len({p for p, _ in analysis.rows}) > 1:
            label = trace.process_label(self.process)
            self.notes.append(f"only process {label} is replayed; each process has its own host")
        low, high = self.window or (NEVER, FOREVER)
        launched = np.where(linked, calls.start_ns[np.maximum(ops.launch, 0)], ops.start_ns)
        own = np.flatnonzero((ops.process == self.process) & (ops.end_ns > low) & (launched < high))
        if violated := int(analysis.clock_violation[own].sum()):
            self.notes.append(
                f"{violated} operations start before their launch and are taken as submitted when they start"
            )
        launches = np.unique(ops.launch[own[linked[own] & (launched[own] >= low)]])
        if not len(launches):
            raise TraceError(f"{trace.source}: nothing was launched in this window")
        self.origin_ns = max(int(min(calls.start_ns[launches[0]], ops.start_ns[own].min())), low)
        return own, launches

    def _order_steps(self, launches: np.ndarray) -> None:
        """Submissions and waits in the order of their instants."""
        analysis, calls, waits = self.analysis, self.analysis.trace.calls, self.analysis.waits
        high = self.window[1] if self.window else FOREVER
        mine = waits.submits & (calls.process[waits.call] == self.process)
        rows = np.flatnonzero(mine & (waits.start_ns >= self.origin_ns) & (waits.start_ns < high))
        # A call that submits and waits has submitted after the time that such calls take without a wait.
        waited = np.isin(launches, waits.call[rows])
        plain = launches[~waited] if not waited.all() else launches
        typical = int(np.median(calls.end_ns[plain] - calls.start_ns[plain]))
        submitted = np.minimum(calls.end_ns[launches], analysis.first_start[launches])
        submitted[waited] = np.minimum(submitted[waited], calls.start_ns[launches[waited]] + typical)
        begin = waits.start_ns[rows].copy()
        both = np.isin(waits.call[rows], launches)
        begin[both] = submitted[np.searchsorted(launches, waits.call[rows[both]])]

        kind = np.concatenate([np.full(len(launches), SUBMIT), np.full(len(rows), WAIT)])
        instant = np.concatenate([submitted, begin])
        order = np.lexsort((kind, instant))
        self.step_kind, self.step_ns = kind[order], instant[order]
        self.call = np.concatenate([launches, waits.call[rows]])[order]
        self.wait = np.concatenate([np.full(len(launches), NONE), rows])[order]

    def _fill_queue(self, own: np.ndarray, launches: np.ndarray) -> None:
        """Operations in the order of their submission, each with its step and lane."""
        analysis, ops = self.analysis, self.analysis.trace.ops
        step_of_call = np.full(len(analysis.trace.calls), NONE, np.int64)
        submits = np.flatnonzero(self.step_kind == SUBMIT)
        step_of_call[self.call[submits]] = submits
        linked = ops.launch[own] >= 0
        step = np.where(linked, step_of_call[ops.launch[own]], NONE)
        pairs = np.stack([ops.device[own].astype(np.int64), ops.stream[own]])
        lanes, lane = np.unique(pairs, axis=1, return_inverse=True)
        self.lanes, lane = tuple((int(d), int(s)) for d, s in lanes.T), lane.reshape(-1).astype(np.int64)
        loose = ~linked & ~analysis.carry_in[own] & (ops.start_ns[own] >= self.origin_ns)
        if loose.any():
            for index in np.unique(lane[loose]):
                rows = np.flatnonzero(lane == index)
                step[rows] = np.where(loose[rows], np.maximum.accumulate(step[rows]), step[rows])
            self.notes.append(
                f"{int(loose.sum())} operations without a recorded launch are taken as submitted with the one before "
                "them on their stream"
            )
        if lead := int((step < 0).sum()):
            self.notes.append(f"{lead} operations were launched before the window: they are queued from the start")
        listed = np.argsort(step, kind="stable")
        self.op, self.op_step, self.lane = own[listed], step[listed], lane[listed]
        self.first_op = np.searchsorted(self.op_step, np.arange(len(self.step_kind) + 1), "left")

    def _find_targets(self) -> None:
        """What each wait waits for: its copy, else the last to end before it returned; nothing if others submitted."""
        ops, waits = self.analysis.trace.ops, self.analysis.waits
        self.target = np.full(len(self.step_kind), NONE, np.int64)
        position = np.full(len(ops), NONE, np.int64)
        position[self.op] = np.arange(len(self.op))
        by_end = np.argsort(ops.end_ns[self.op], kind="stable")
        ends = ops.end_ns[self.op][by_end]
        submissions = self.step_ns[self.step_kind == SUBMIT]
        crossed = 0
        for step in np.flatnonzero(self.step_kind == WAIT):
            copy, until = waits.copy[self.wait[step]], waits.end_ns[self.wait[step]]
            if np.searchsorted(submissions, until) > np.searchsorted(submissions, self.step_ns[step], "right"):
                crossed += 1
                continue
            if copy >= 0 and position[copy] >= 0 and self.op_step[position[copy]] < step:
                self.target[step] = position[copy]
                continue
            at = int(np.searchsorted(ends, until, "right")) - 1
            while at >= 0 and self.op_step[by_end[at]] > step:
                at -= 1
            if at >= 0:
                self.target[step] = by_end[at]
        if crossed:
            self.notes.append(
                f"{crossed} waits overlap submissions of another thread: taken as host time, not as waits"
            )

    def _measure_steps(self) -> None:
        """Host time before each step, and how long a wait's call took to return."""
        ops, waits = self.analysis.trace.ops, self.analysis.waits
        waiting = np.flatnonzero((self.step_kind == WAIT) & (self.target >= 0))
        returned = waits.end_ns[self.wait[waiting]]
        after = self.step_ns.copy()
        done = np.minimum(ops.end_ns[self.op[self.target[waiting]]], returned)
        after[waiting] = np.maximum(self.step_ns[waiting], done)
        self.return_ns = np.zeros(len(after), np.int64)
        self.return_ns[waiting] = np.maximum(returned - after[waiting], 0)
        reached = np.maximum.accumulate(np.concatenate([[self.origin_ns], after]))
        self.step_cost_ns = np.maximum(self.step_ns - reached[:-1], 0)
        self.end_ns = int(max(ops.end_ns[self.op].max(), after.max()))

    def _measure_operations(self) -> None:
        """Each operation's own time, and what kept it from starting earlier."""
        ops, op = self.analysis.trace.ops, self.op
        start, end = ops.start_ns[op], ops.end_ns[op]
        submitted = np.where(self.op_step >= 0, self.step_ns[np.maximum(self.op_step, 0)], self.origin_ns)
        free = np.full(len(op), NEVER, np.int64)  # when the operations before it on its stream had ended
        for index in range(len(self.lanes)):
            rows = np.flatnonzero(self.lane == index)
            free[rows[1:]] = np.maximum.accumulate(end[rows])[:-1]
        self.dep = self._dependencies(np.maximum(submitted, free))
        could = np.maximum(submitted, np.maximum(free, self.origin_ns))
        held = self.dep >= 0
        could[held] = np.maximum(could[held], end[self.dep[held]])
        self.starved = submitted >= could
        total = np.maximum(end - could, 0)
        self.overhead_ns = np.clip(start - could, 0, total)
        self.core_ns = total - self.overhead_ns

    def _dependencies(self, could: np.ndarray) -> np.ndarray:
        """For operations held back though submitted and their stream free: the last to end just before elsewhere."""
        ops, lane = self.analysis.trace.ops, self.lane
        start, end = ops.start_ns[self.op], ops.end_ns[self.op]
        dep = np.full(len(start), NONE, np.int64)
        by_end = np.argsort(end, kind="stable")
        ends = end[by_end]
        for j in np.flatnonzero(start - could > TURNAROUND_NS):
            at = int(np.searchsorted(ends, start[j], "right")) - 1
            while at >= 0 and ends[at] > could[j] and start[j] - ends[at] <= DEPENDENCY_SLACK_NS:
                i = by_end[at]
                if lane[i] != lane[j] and i < j:
                    dep[j] = i
                    break
                at -= 1
        return dep


def to_program(trace: Trace | Analysis, *, window: Window | None = None, process: int | None = None) -> Replay:
    """Build the program of one process (default: the one with most device operations) within a window.

    Raises:
        TraceError: no device operations with a recorded launch in the window.
    """
    return Replay(trace if isinstance(trace, Analysis) else Analysis(trace), window, process)


@dataclass(frozen=True)
class Change:
    """What differs from the trace: waits left out (mask over the steps [n]), factors, launches merged into one."""

    removed: np.ndarray
    host_scale: float = 1.0
    device_scale: float = 1.0
    merge: int = 1

    def __bool__(self) -> bool:
        return bool(self.removed.any()) or self.host_scale != 1 or self.device_scale != 1 or self.merge > 1


def what_if(
    trace: Trace | Analysis | Replay,
    *,
    remove_waits: bool | str | Sequence[str] = False,
    host_scale: float = 1.0,
    device_scale: float = 1.0,
    merge_launches: int = 1,
    window: Window | None = None,
) -> dict[str, Any]:
    """Predict span and idle time after a change, with the assumptions; `spans` says them in words.

    ``*_us`` is from the first submission to the last end of an operation or wait; ``*_device_us`` from the first
    device operation to the last, ``*_idle_us`` within it.

    Args:
        remove_waits: True removes all host waits, text those whose line, operator, range or call contains it; several
            texts remove the waits of each.
        host_scale: factor on all host time between submissions.
        device_scale: factor on the operations' own durations.
        merge_launches: this many successive launches become one submission (a large number: one graph per step).
    Raises:
        ValueError: a factor is negative, not finite or above 1e6, or no wait matches a text.
        TraceError: the trace cannot be replayed.
    """
    for name, factor in (("host_scale", host_scale), ("device_scale", device_scale)):
        if not 0 <= factor <= LARGEST_FACTOR:
            raise ValueError(f"{name}: expected a factor of 0 to {LARGEST_FACTOR:g}, got {factor!r}")
    if merge_launches < 1:
        raise ValueError(f"merge_launches: expected at least 1, got {merge_launches!r}")
    replay = trace if isinstance(trace, Replay) else to_program(trace, window=window)
    change = Change(_removed(replay, remove_waits), host_scale, device_scale, merge_launches)
    unchanged, device0, idle0, _ = _run(replay, Change(np.zeros(len(replay.step_kind), bool)))
    predicted, device1, idle1, submissions = _run(replay, change)
    ops = replay.analysis.trace.ops
    start, end = ops.start_ns[replay.op], ops.end_ns[replay.op]
    return {
        "schema": 1,
        "source": replay.analysis.trace.source,
        "measured_us": (replay.end_ns - replay.origin_ns) / 1e3,
        "replayed_us": unchanged / 1e3,
        "predicted_us": predicted / 1e3,
        "window_ns": None if replay.window is None else [int(t) for t in replay.window],
        "measured_device_us": int(end.max() - start.min()) / 1e3,
        "replayed_device_us": device0 / 1e3,
        "predicted_device_us": device1 / 1e3,
        "measured_idle_us": _idle(replay, start, end) / 1e3,
        "replayed_idle_us": idle0 / 1e3,
        "predicted_idle_us": idle1 / 1e3,
        "removed_waits": int(change.removed.sum()),
        "removed_blocking_waits": _blocking(replay, change.removed),
        "submissions": submissions,
        "assumptions": _assumptions(replay, change),
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


def _removed(replay: Replay, which: bool | str | Sequence[str]) -> np.ndarray:
    """Mask of the steps that are waits to leave out: all, none, or those of which a text says something."""
    is_wait = replay.step_kind == WAIT
    if isinstance(which, bool):
        return is_wait & which
    analysis = replay.analysis
    steps = np.flatnonzero(is_wait)
    texts, places = [], set()
    for step, row in zip(steps, describe_waits(analysis.trace, analysis.waits.take(replay.wait[steps]))):
        call = analysis.trace.names[analysis.trace.calls.name[replay.call[step]]]
        texts.append([t for t in (row["line"], row["op"], row["range"], call, row["kind"]) if t])
        places.add(row["line"] or row["op"] or call)
    out = np.zeros(len(is_wait), bool)
    for wanted in [which] if isinstance(which, str) else which:
        found = [any(wanted in t for t in of_wait) for of_wait in texts]
        if not any(found):
            known = f"waits are at: {', '.join(sorted(places)[:10])}" if places else "the trace has no host wait"
            raise ValueError(f"no wait matches {wanted!r}; {known}")
        out[steps[found]] = True
    return out


def _run(replay: Replay, change: Change) -> tuple[int, int, int, int]:
    """(makespan, device span, idle, submissions) in ns after a change. Launch latency follows the queue's state."""
    reads, dropped = _reads(replay, change.removed)
    columns = _columns(replay, change, reads)
    core = np.where(dropped, 0, np.rint(replay.core_ns * change.device_scale).astype(np.int64))
    measured, starved = replay.overhead_ns, replay.starved
    queued_gap = _median(measured[~replay.starved])
    starved_gap = max(_median(measured[replay.starved]), queued_gap)
    overhead = measured
    for _ in range(ROUNDS):
        timeline = simulate(replace(columns, op_duration=np.where(dropped, 0, core + overhead)))
        now = timeline.op_start <= timeline.op_submitted
        if not change or (now == starved).all():
            break
        starved = now
        overhead = np.where(now == replay.starved, measured, np.where(now, starved_gap, queued_gap))
    start = np.maximum(timeline.op_end - core, timeline.op_start)
    kept = ~dropped
    device = int(timeline.op_end[kept].max() - start[kept].min()) if kept.any() else 0
    idle = _idle(replay, start, timeline.op_end)
    return int(timeline.makespan), device, idle, int((columns.kind == SUBMIT).sum())


def _median(values: np.ndarray) -> int:
    return int(np.median(values)) if len(values) else 0


def _reads(replay: Replay, removed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """([k, 2] sorted host spans of the scalar reads whose waits are removed, mask [m] of the copies serving them)."""
    waits, locator = replay.analysis.waits, Locator(replay.analysis.trace)
    spans, copies = set(), []
    for wait in replay.wait[removed]:
        thread, start = int(waits.thread[wait]), int(waits.start_ns[wait])
        found = [(a, b) for name, a, b in locator.enclosing(thread, CPU_OP, start) if name in _READ]
        if found:
            spans.add(found[0])
            copies.append(waits.copy[wait])
    return np.array(sorted(spans), np.int64).reshape(-1, 2), np.isin(replay.op, copies)


def _columns(replay: Replay, change: Change, reads: np.ndarray) -> Columns:
    """The changed program, its operations still without durations."""
    kind = replay.step_kind.astype(np.int8)
    # A removed wait takes the return of its call along, a removed read (`.item()`) all of its operator's host time.
    following = np.flatnonzero(change.removed[:-1]) + 1
    gone = np.zeros(len(kind), np.int64)
    gone[following] = replay.return_ns[following - 1]
    if len(reads):
        inside = time_inside(reads[:, 0], reads[:, 1])
        overlap = inside(replay.step_ns) - inside(replay.step_ns - replay.step_cost_ns)
        gone = np.where(overlap > 0, np.maximum(overlap, gone), gone)
    cost = np.maximum(replay.step_cost_ns.astype(np.float64) - gone, 0)
    kind[change.removed | ((kind == WAIT) & (replay.target < 0))] = WORK
    first_op = replay.first_op.copy()
    if change.merge > 1:
        _merge(replay, kind, cost, first_op, change.merge)
    held = replay.dep >= 0
    n, m = len(kind), len(replay.op)
    return Columns(
        kind=kind,
        thread=np.zeros(n, np.int64),
        cost=np.rint(cost * change.host_scale).astype(np.int64),
        label=[""] * n,
        first_op=first_op,
        op_duration=np.zeros(m, np.int64),
        op_lane=replay.lane,
        op_label=[""] * m,
        lanes=replay.lanes,
        argument=np.where(kind == WAIT, replay.target, 0),
        wait_kind=np.full(n, WAIT_OP, np.int64),
        dep_first=np.concatenate([[0], np.cumsum(held)]),
        dep_op=replay.dep[held],
    )


def _merge(replay: Replay, kind: np.ndarray, cost: np.ndarray, first_op: np.ndarray, merge: int) -> None:
    """Make one submission, for the cost of one, of successive ones within a profiler step and between waits."""
    edges = sorted(start for _, (start, _) in profiler_steps(replay.analysis.trace))
    part = np.searchsorted(np.array(edges, np.int64), replay.step_ns, "right")
    one = float(np.median(cost[kind == SUBMIT])) if (kind == SUBMIT).any() else 0.0
    groups: list[list[int]] = []
    opened = None  # the part in which the last group may still grow
    for i in range(len(kind)):
        if kind[i] == SUBMIT:
            if opened == part[i] and len(groups[-1]) < merge:
                groups[-1].append(i)
            else:
                groups.append([i])
            opened = part[i]
        elif kind[i] != WORK or part[i] != opened:
            opened = None
    for head, *rest in groups:
        if rest:
            kind[rest] = WORK
            cost[rest] = 0
            if part[head] == part[max(head - 1, 0)]:
                cost[head] = min(cost[head], one)
            first_op[head + 1 : rest[-1] + 1] = first_op[rest[-1] + 1]


def _idle(replay: Replay, start: np.ndarray, end: np.ndarray) -> int:
    """Time (ns) in which a device runs nothing, from its first start to its last end."""
    device = replay.analysis.trace.ops.device[replay.op]
    total = 0
    for d in np.unique(device):
        s, e = start[device == d], end[device == d]
        by = np.argsort(s, kind="stable")
        begin, stop, _ = gaps(s[by], e[by], int(s.min()), int(e.max()))
        total += int((stop - begin).sum())
    return total


def _blocking(replay: Replay, removed: np.ndarray) -> int:
    """How many of the removed waits held up submission: those that the verifier counts."""
    return int(replay.analysis.waits.counted()[replay.wait[removed]].sum())


def _assumptions(replay: Replay, change: Change) -> list[str]:
    out = [
        "the submitting threads of the process are one host timeline; time between submissions is host cost and "
        "does not depend on the device",
        "operations keep their stream, order and duration; a slower or faster neighbour does not change them",
        "host cost includes what the profiler itself adds",
    ]
    held = int((replay.dep >= 0).sum())
    if held:
        out.append(f"{held} operations wait for the last operation that ended on another stream before them (inferred)")
    if change:
        out.append(
            "an operation that finds its queue empty starts after the measured launch latency, one that was queued "
            "after the measured gap between operations; where a change moves it between these, the median applies"
        )
    removed = int(change.removed.sum())
    if removed:
        held = _blocking(replay, change.removed)
        others = removed - held
        out.append(
            f"{removed} waits are removed with the return of their call"
            + (f" ({held} held the host, as `verify` counts; {others} {NOT_COUNTED})" if others else "")
            + "; a scalar read (`.item()`) goes with its host time and its copy, other copies still run"
        )
    if change.host_scale != 1:
        out.append(f"all host cost is scaled by {change.host_scale:g}, the return from waits included")
    if change.device_scale != 1:
        out.append(
            f"all operations take {change.device_scale:g} of their measured time, copies and collectives included"
        )
    if change.merge > 1:
        out.append(
            f"up to {change.merge} successive launches between waits and within a profiler step become one submission "
            "that costs no more than the median launch; the first of a step keeps its own cost"
        )
    return out + replay.notes
