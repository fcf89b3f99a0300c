"""The queue model: a program of host steps, simulated against the device's streams.

The rules are the report's (Figures 29-31, 33, 34): an operation starts when its submission is complete, its stream is
free and its dependencies are met; a host wait stops submission until its target is done. Times are in the program's own
unit; an all-integer program (a trace in nanoseconds) stays exact in int64, anything else is float64.

Source: report Section 8.1, captions of Figures 29 and 30; CUDA's stream, event and wait semantics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np

SCHEMA = 1


@dataclass(frozen=True)
class Op:
    """One device operation: runs `duration` on one stream of one device, after the operations named in `after`."""

    label: str
    duration: float
    stream: int = 0
    device: int = 0
    after: tuple[str, ...] = ()
    tone: str = ""


@dataclass(frozen=True)
class Submit:
    """A host call that submits one or more operations; all of them are queued when its `cost` has been paid."""

    label: str
    cost: float
    ops: tuple[Op, ...]
    thread: int = 0
    tone: str = ""


@dataclass(frozen=True)
class HostWork:
    """Host time that submits nothing."""

    label: str
    cost: float
    thread: int = 0
    tone: str = ""


@dataclass(frozen=True)
class HostWait:
    """Blocks the host thread until its one target is done: `op` (label), `event`, `stream` of `device`, or `device`."""

    label: str
    op: str | None = None
    event: str | None = None
    stream: int | None = None
    device: int | None = None
    thread: int = 0


@dataclass(frozen=True)
class EventRecord:
    """Marks the point in a stream where all the work listed so far is complete."""

    event: str
    stream: int = 0
    device: int = 0
    cost: float = 0
    thread: int = 0


@dataclass(frozen=True)
class StreamWait:
    """Holds a stream's later work until a recorded event; the host does not block."""

    event: str
    stream: int = 0
    device: int = 0
    cost: float = 0
    thread: int = 0


@dataclass(frozen=True)
class RangePush:
    """Opens a named range (`level` says which kind: block, microbatch) on its thread."""

    name: str
    level: str = "block"
    thread: int = 0


@dataclass(frozen=True)
class RangePop:
    """Closes the thread's innermost range."""

    thread: int = 0


Step = Submit | HostWork | HostWait | EventRecord | StreamWait | RangePush | RangePop

KINDS = ("submit", "work", "wait", "record", "stream_wait", "push", "pop", "execute")
SUBMIT, WORK, WAIT, RECORD, STREAM_WAIT, PUSH, POP, EXECUTE = range(len(KINDS))
WAIT_OP, WAIT_EVENT, WAIT_STREAM, WAIT_DEVICE = range(4)
_STEP_CLASSES: tuple[type, ...] = (Submit, HostWork, HostWait, EventRecord, StreamWait, RangePush, RangePop)


@dataclass(frozen=True)
class Program:
    """Host steps in call order, and the operations already queued at time zero (`lead`)."""

    steps: tuple[Step, ...]
    lead: tuple[Op, ...] = ()
    name: str = ""
    time_unit: str = "figure units"

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(self.steps))
        object.__setattr__(self, "lead", tuple(self.lead))

    @cached_property
    def columns(self) -> Columns:
        """The program as columns; raises ValueError where a step is malformed."""
        return _compile(self)


@dataclass(frozen=True, eq=False)
class Columns:
    """A program as arrays: n steps, m operations (lead first), r ranges. Built from a Program, or directly by a trace.

    Args:
        kind: int [n], index into KINDS. thread: int [n]. cost: int64 or float64 [n], full host cost. label: n names.
        first_op: int [n + 1], step i submits operations first_op[i]..first_op[i + 1]; first_op[0] = number of lead ops.
        argument: int [n]; wait: its target (operation, event instance, lane or device); record, stream_wait: event
            instance. wait_kind: int [n], one of WAIT_*. lane_of_step: int [n], lane of record and stream_wait.
        op_duration: int64 or float64 [m]. op_lane: int [m], index into `lanes`. op_label: m names.
        op_range_step: int [m], the submitting step, -1 for lead.
        dep_first: int [m + 1], dep_op: int [d]: operation j waits for dep_op[dep_first[j]:dep_first[j + 1]], each < j.
        lanes: (device, stream) pairs. range_of_step: int [n], innermost range, -1 for none.
        range_name, range_level: r names; range_parent: int [r], -1 for none; range_push: int [r], its step.
    """

    kind: np.ndarray
    thread: np.ndarray
    cost: np.ndarray
    label: Sequence[str]
    first_op: np.ndarray
    op_duration: np.ndarray
    op_lane: np.ndarray
    op_label: Sequence[str]
    lanes: tuple[tuple[int, int], ...]
    argument: np.ndarray = None  # type: ignore[assignment]
    wait_kind: np.ndarray = None  # type: ignore[assignment]
    lane_of_step: np.ndarray = None  # type: ignore[assignment]
    dep_first: np.ndarray = None  # type: ignore[assignment]
    dep_op: np.ndarray = None  # type: ignore[assignment]
    range_of_step: np.ndarray = None  # type: ignore[assignment]
    range_name: Sequence[str] = ()
    range_level: Sequence[str] = ()
    range_parent: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    range_push: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def __post_init__(self) -> None:
        n, m = len(self.kind), len(self.op_duration)
        for name in ("argument", "wait_kind", "lane_of_step"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, np.zeros(n, np.int64))
        if self.range_of_step is None:
            object.__setattr__(self, "range_of_step", np.full(n, -1, np.int64))
        if self.dep_first is None or self.dep_op is None:
            object.__setattr__(self, "dep_first", np.zeros(m + 1, np.int64))
            object.__setattr__(self, "dep_op", np.empty(0, np.int64))
        for name, length in (("thread", n), ("cost", n), ("label", n), ("first_op", n + 1), ("argument", n),
                             ("wait_kind", n), ("lane_of_step", n), ("range_of_step", n), ("op_lane", m),
                             ("op_label", m), ("dep_first", m + 1)):  # fmt: skip
            if len(getattr(self, name)) != length:
                raise ValueError(f"Columns.{name}: expected {length} entries, got {len(getattr(self, name))}")
        for name in ("cost", "op_duration"):
            values = getattr(self, name)
            bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
            if len(bad):
                raise ValueError(f"Columns.{name}[{bad[0]}]: expected a finite time >= 0, got {values[bad[0]]}")
        deps = np.asarray(self.dep_op)
        if len(deps) and (deps.min() < 0 or np.any(deps >= np.repeat(np.arange(m), np.diff(self.dep_first)))):
            raise ValueError("Columns.dep_op: an operation may only wait for operations listed before it")

    @cached_property
    def op_step(self) -> np.ndarray:
        """int64 [m]: the step that submits each operation, -1 for the lead."""
        lead = int(self.first_op[0])
        return np.concatenate([np.full(lead, -1), np.repeat(np.arange(len(self.kind)), np.diff(self.first_op))])


@dataclass(frozen=True, eq=False)
class Timeline:
    """A simulated program: times per step [n] and per operation [m], in the program's unit.

    `host_start`, `host_end` [n]; `op_submitted`, `op_start`, `op_end` [m]; intervals are half open [start, end).
    """

    columns: Columns
    host_start: np.ndarray
    host_end: np.ndarray
    op_submitted: np.ndarray
    op_start: np.ndarray
    op_end: np.ndarray

    @cached_property
    def makespan(self) -> float:
        """End of the last host step or operation, 0 for an empty program."""
        ends = [a.max() for a in (self.host_end, self.op_end) if len(a)]
        return max(ends).item() if ends else 0

    @cached_property
    def events(self) -> dict[str, np.ndarray]:
        """The events table, host steps then operations, as equal-length arrays.

        `lane` ("cpu0", "gpu0/s0"), `label`, `start`, `end`, `kind` (see KINDS) and `range` (innermost range's name, ""
        for none) as str; `step` and `op` int64 indices (-1 where they do not apply). Range pushes and pops have no row.
        """
        c = self.columns
        rows = np.flatnonzero((c.kind != PUSH) & (c.kind != POP))
        m = len(c.op_duration)
        names = np.array([*c.range_name, ""], dtype=object)
        op_range = np.where(c.op_step >= 0, c.range_of_step[c.op_step] if len(c.kind) else -1, -1)
        threads, thread_code = np.unique(np.asarray(c.thread)[rows], return_inverse=True)
        host_lane = np.array([f"cpu{t}" for t in threads] or [""], dtype=object)
        gpu_lane = np.array([lane_name(lane) for lane in c.lanes] or [""], dtype=object)
        label = np.array([*c.label], dtype=object)
        return {
            "lane": np.concatenate([host_lane[thread_code], gpu_lane[np.asarray(c.op_lane, np.int64)]]),
            "label": np.concatenate([label[rows], np.array([*c.op_label], dtype=object)]),
            "start": np.concatenate([self.host_start[rows], self.op_start]),
            "end": np.concatenate([self.host_end[rows], self.op_end]),
            "kind": np.array(KINDS, dtype=object)[np.concatenate([c.kind[rows], np.full(m, EXECUTE)])],
            "range": names[np.concatenate([c.range_of_step[rows], op_range])],
            "step": np.concatenate([rows, c.op_step]),
            "op": np.concatenate([np.full(len(rows), -1), np.arange(m)]),
        }


def lane_name(lane: tuple[int, int]) -> str:
    """Name of a (device, stream) lane: "gpu0/s7"."""
    return f"gpu{lane[0]}/s{lane[1]}"


def simulate(program: Program | Columns) -> Timeline:
    """Runs a program in one pass over its steps: O(steps + operations + dependencies).

    Source: report Section 8.1 and the captions of Figures 29 and 30.
    """
    c = program.columns if isinstance(program, Program) else program
    exact = all(np.issubdtype(a.dtype, np.integer) for a in (c.cost, c.op_duration))
    dtype = np.int64 if exact else np.float64
    n, m = len(c.kind), len(c.op_duration)
    kind, cost, first_op = c.kind.tolist(), c.cost.astype(dtype).tolist(), c.first_op.tolist()
    argument, wait_kind, lane_of_step = (a.tolist() for a in (c.argument, c.wait_kind, c.lane_of_step))
    duration, lane = c.op_duration.astype(dtype).tolist(), np.asarray(c.op_lane).tolist()
    dep_first, dep_op = c.dep_first.tolist(), c.dep_op.tolist()
    threads, thread = np.unique(c.thread, return_inverse=True)
    thread = thread.tolist()
    zero = dtype(0).item()
    clock = [zero] * len(threads)
    free = [zero] * len(c.lanes)
    lanes_of_device: dict[int, list[int]] = {}
    for index, (device, _) in enumerate(c.lanes):
        lanes_of_device.setdefault(device, []).append(index)
    event_done: dict[int, Any] = {}
    host_start, host_end = [zero] * n, [zero] * n
    submitted, start, end = [zero] * m, [zero] * m, [zero] * m

    def enqueue(begin: int, stop: int, now: Any) -> None:
        for j in range(begin, stop):
            queue = lane[j]
            at = free[queue]
            if at < now:
                at = now
            for d in dep_op[dep_first[j] : dep_first[j + 1]]:
                if end[d] > at:
                    at = end[d]
            submitted[j], start[j] = now, at
            end[j] = free[queue] = at + duration[j]

    enqueue(0, first_op[0] if n else m, zero)
    for i in range(n):
        t0 = clock[thread[i]]
        t1 = t0 + cost[i]
        k = kind[i]
        if k == SUBMIT:
            enqueue(first_op[i], first_op[i + 1], t1)
        elif k == WAIT:
            which, target = wait_kind[i], argument[i]
            if which == WAIT_OP:
                until = end[target]
            elif which == WAIT_EVENT:
                until = event_done[target]
            elif which == WAIT_STREAM:
                until = free[target]
            else:
                until = max((free[q] for q in lanes_of_device.get(target, ())), default=zero)
            t1 = max(t1, until)
        elif k == RECORD:
            event_done[argument[i]] = max(t1, free[lane_of_step[i]])
        elif k == STREAM_WAIT:
            queue = lane_of_step[i]
            free[queue] = max(free[queue], event_done[argument[i]])
        host_start[i], host_end[i] = t0, t1
        clock[thread[i]] = t1
    arrays = (np.array(a, dtype) for a in (host_start, host_end, submitted, start, end))
    return Timeline(c, *arrays)


def _time(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ValueError(f"{where}: expected a number, got {value!r}")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{where}: expected a finite time >= 0, got {value!r}")
    return value.item() if isinstance(value, (np.integer, np.floating)) else value


def _compile(program: Program) -> Columns:
    steps = program.steps
    n = len(steps)
    lanes: dict[tuple[int, int], int] = {}
    kind, thread, cost, label = [], [], [], []
    argument, wait_kind, lane_of_step, range_of_step = [0] * n, [0] * n, [0] * n, [-1] * n
    op_duration, op_lane, op_label, dep_first, dep_op, first_op = [], [], [], [0], [], []
    last_op: dict[str, int] = {}
    last_event: dict[str, int] = {}
    open_ranges: dict[int, list[int]] = {}
    ranges: list[tuple[str, str, int, int]] = []

    def lane_index(device: int, stream: int) -> int:
        return lanes.setdefault((device, stream), len(lanes))

    def known(names: Mapping[str, int], name: str, what: str, where: str) -> int:
        if name not in names:
            raise ValueError(f"{where}: unknown {what} {name!r}; listed before it: {sorted(names)[:8]}")
        return names[name]

    def add_op(op: Op, where: str) -> None:
        op_duration.append(_time(op.duration, f"{where}, operation {op.label!r}, duration"))
        op_lane.append(lane_index(op.device, op.stream))
        dep_op.extend(known(last_op, name, "operation", f"{where}, operation {op.label!r}, after") for name in op.after)
        dep_first.append(len(dep_op))
        last_op[op.label] = len(op_label)
        op_label.append(op.label)

    for op in program.lead:
        add_op(op, "lead")
    for i, step in enumerate(steps):
        where = f"step {i} ({type(step).__name__})"
        if not isinstance(step, _STEP_CLASSES):
            raise ValueError(f"step {i}: expected a Submit, HostWork, HostWait, ... got {step!r}")
        kind.append(_STEP_CLASSES.index(type(step)))
        thread.append(step.thread)
        cost.append(_time(getattr(step, "cost", 0), f"{where}, cost"))
        label.append(next(getattr(step, f) for f in ("label", "event", "name", "thread") if hasattr(step, f)))
        first_op.append(len(op_label))
        stack = open_ranges.setdefault(step.thread, [])
        if isinstance(step, Submit):
            if not step.ops:
                raise ValueError(f"{where} {step.label!r}: expected at least one operation; HostWork submits nothing")
            for op in step.ops:
                add_op(op, f"{where} {step.label!r}")
        elif isinstance(step, HostWait):
            argument[i], wait_kind[i] = _wait_target(step, where, last_op, last_event, lane_index, known)
        elif isinstance(step, EventRecord):
            last_event[step.event] = argument[i] = i
            lane_of_step[i] = lane_index(step.device, step.stream)
        elif isinstance(step, StreamWait):
            argument[i] = known(last_event, step.event, "event", where)
            lane_of_step[i] = lane_index(step.device, step.stream)
        elif isinstance(step, RangePush):
            ranges.append((step.name, step.level, stack[-1] if stack else -1, i))
            stack.append(len(ranges) - 1)
        elif isinstance(step, RangePop):
            if not stack:
                raise ValueError(f"{where}: no range is open on thread {step.thread}")
            stack.pop()
        range_of_step[i] = stack[-1] if stack else -1
    first_op.append(len(op_label))
    integers = all(isinstance(v, int) for v in cost) and all(isinstance(v, int) for v in op_duration)
    time = np.int64 if integers else np.float64
    return Columns(
        kind=np.array(kind, np.int8), thread=np.array(thread, np.int64), cost=np.array(cost, time),
        label=[str(v) for v in label], first_op=np.array(first_op, np.int64),
        op_duration=np.array(op_duration, time),
        op_lane=np.array(op_lane, np.int64), op_label=op_label, lanes=tuple(lanes),
        argument=np.array(argument, np.int64),
        wait_kind=np.array(wait_kind, np.int64), lane_of_step=np.array(lane_of_step, np.int64),
        dep_first=np.array(dep_first, np.int64), dep_op=np.array(dep_op, np.int64),
        range_of_step=np.array(range_of_step, np.int64), range_name=[r[0] for r in ranges],
        range_level=[r[1] for r in ranges], range_parent=np.array([r[2] for r in ranges], np.int64),
        range_push=np.array([r[3] for r in ranges], np.int64),
    )  # fmt: skip


def _wait_target(
    step: HostWait, where: str, last_op: Any, last_event: Any, lane_index: Any, known: Any
) -> tuple[int, int]:
    targets = [step.op is not None, step.event is not None, step.stream is not None or step.device is not None]
    if sum(targets) != 1:
        raise ValueError(
            f"{where} {step.label!r}: expected exactly one target (op, event, stream or device), got {step}"
        )
    if step.op is not None:
        return known(last_op, step.op, "operation", where), WAIT_OP
    if step.event is not None:
        return known(last_event, step.event, "event", where), WAIT_EVENT
    if step.stream is not None:
        return lane_index(step.device or 0, step.stream), WAIT_STREAM
    assert step.device is not None
    return step.device, WAIT_DEVICE


def program_to_json(program: Program) -> dict[str, Any]:
    """The program as plain JSON values (schema 1); fields at their default are left out."""

    def plain(item: Any) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for f in fields(item):
            value = getattr(item, f.name)
            if value != f.default or f.name in ("label", "cost", "duration", "event", "name", "level"):
                out[f.name] = value
        if isinstance(item, Submit):
            out["ops"] = [plain(op) for op in item.ops]
        if "after" in out:
            out["after"] = list(out["after"])
        return {k: v for k, v in out.items() if v is not None}

    names = dict(zip(_STEP_CLASSES, KINDS))
    return {
        "schema": SCHEMA, "name": program.name, "time_unit": program.time_unit,
        "lead": [plain(op) for op in program.lead],
        "steps": [{"kind": names[type(step)], **plain(step)} for step in program.steps],
    }  # fmt: skip
