"""Device idle time with its cause, and submission headroom in device time, per stream and per device.

Idle is the complement of the union of all device operations (kernels, copies, sets) over all streams of a device.
Headroom H(t) is submitted, not yet completed device work: it jumps by an operation's duration at its submission
instant, min(end of the API call, start of the call's first operation), and drains while operations execute.

Source: report Section 8.1, Figure 30; Appendix B.6.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.traces.trace import COPY, FOREVER, NONE, Trace, Window
from workbench.traces.waits import Waits, find_waits, launch_calls

SUBMISSION, SYNC, TURNAROUND, DEPENDENCY, UNKNOWN = range(5)
CAUSES = ("submission", "sync", "turnaround", "dependency", "unknown")
TURNAROUND_NS = 5_000


@dataclass(frozen=True)
class Headroom:
    """Exact headroom curve in ns of device time: a line from (t[i], after[i]) to (t[i+1], before[i+1]), all int64."""

    t_ns: np.ndarray
    before: np.ndarray
    after: np.ndarray

    def at(self, t_ns: np.ndarray | int) -> np.ndarray:
        """Headroom at instants (right-continuous), zero outside the curve."""
        t = np.asarray(t_ns)
        if not len(self.t_ns):
            return np.zeros(t.shape, np.int64)
        i = np.clip(np.searchsorted(self.t_ns, t, "right") - 1, 0, len(self.t_ns) - 1)
        j = np.minimum(i + 1, len(self.t_ns) - 1)
        width = np.maximum(self.t_ns[j] - self.t_ns[i], 1)
        rate = (self.after[i] - self.before[j]) // width
        value = self.after[i] - np.where(j > i, rate * (t - self.t_ns[i]), 0)
        return np.where(t < self.t_ns[0], 0, value)

    def mean_max_us(self, window: Window) -> tuple[float, float]:
        """Time average and maximum over a window, in us."""
        low, high = window
        if high <= low or not len(self.t_ns):
            return 0.0, 0.0
        inside = (self.t_ns > low) & (self.t_ns < high)
        t = np.concatenate([[low], self.t_ns[inside], [high]])
        after = np.concatenate([[self.at(low)], self.after[inside]])
        before = np.concatenate([self.before[inside], [self._before(high)]])
        area = float(np.dot(np.diff(t).astype(float), (after + before) / 2.0))
        return area / (high - low) / 1e3, float(max(after.max(), before.max())) / 1e3

    def _before(self, t: int) -> int:
        i = int(np.searchsorted(self.t_ns, t, "left"))
        if i < len(self.t_ns) and self.t_ns[i] == t:
            return int(self.before[i])
        return int(self.at(t))


@dataclass(frozen=True)
class Idle:
    """Idle intervals of one device: `cause` indexes CAUSES, `blocked_ns` is the part of a `sync` interval in the wait.

    `ended_by` is the operation (row of `Trace.ops`) that ended the interval, -1 at the window's end; `wait` the row of
    the `Waits` that caused it, or -1.
    """

    start_ns: np.ndarray
    end_ns: np.ndarray
    cause: np.ndarray
    blocked_ns: np.ndarray
    ended_by: np.ndarray
    wait: np.ndarray

    @property
    def length_ns(self) -> np.ndarray:
        """Length of each interval."""
        return self.end_ns - self.start_ns

    def total_ns(self) -> int:
        """Sum of all intervals."""
        return int(self.length_ns.sum())

    def by_cause_ns(self) -> dict[str, int]:
        """Sums by cause, waits split into the blocked and the rebuild part; the values add up to the total."""
        sums = {name: int(self.length_ns[self.cause == i].sum()) for i, name in enumerate(CAUSES)}
        blocked = int(self.blocked_ns.sum())
        return {
            "submission": sums["submission"], "sync_blocked": blocked, "sync_rebuild": sums["sync"] - blocked,
            "turnaround": sums["turnaround"], "dependency": sums["dependency"], "unknown": sums["unknown"],
        }  # fmt: skip


class Analysis:
    """What every question about a trace shares: submission instants, waits, rows per device. Computed once."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        ops, calls = trace.ops, trace.calls
        self.launches = launch_calls(trace)
        self.first_start = np.full(len(calls), FOREVER, np.int64)
        linked = np.flatnonzero(ops.launch >= 0)[::-1]
        self.first_start[ops.launch[linked]] = ops.start_ns[linked]
        self.submitted = ops.start_ns.copy()
        known = ops.launch >= 0
        row = ops.launch[known]
        self.submitted[known] = np.minimum(calls.end_ns[row], self.first_start[row])
        self.clock_violation = np.zeros(len(ops), bool)
        self.clock_violation[known] = ops.start_ns[known] < calls.start_ns[row]
        self.waits: Waits = find_waits(trace)
        self.rows: dict[tuple[int, int], np.ndarray] = {
            pair: np.flatnonzero((ops.process == pair[0]) & (ops.device == pair[1])) for pair in trace.devices()
        }
        self.carry_in = np.zeros(len(ops), bool)
        for rows in self.rows.values():
            linked_rows = np.flatnonzero(known[rows])
            head = rows[: linked_rows[0]] if len(linked_rows) else rows[:0]
            self.carry_in[head] = True
            if len(head):
                self.submitted[head] = ops.start_ns[rows[0]]

    def launches_of(self, thread: int) -> np.ndarray:
        """Rows of a thread's launch calls, ascending."""
        return self.launches[self.trace.calls.thread[self.launches] == thread]

    def window(self, pair: tuple[int, int], window: Window | None = None) -> Window:
        """The given window, or from the first start to the last end of the device's operations."""
        if window is not None:
            return window
        rows = self.rows[pair]
        return int(self.trace.ops.start_ns[rows].min()), int(self.trace.ops.end_ns[rows].max())

    def idle(self, pair: tuple[int, int], window: Window | None = None) -> Idle:
        """Idle intervals of a device within a window, each with its cause."""
        low, high = self.window(pair, window)
        rows, ops = self.rows[pair], self.trace.ops
        begin, end, ended_by = gaps(ops.start_ns[rows], ops.end_ns[rows], low, high)
        after = np.where(ended_by >= 0, rows[np.maximum(ended_by, 0)], NONE) if len(rows) else ended_by
        cause, blocked, wait = self._causes(begin, end, after)
        return Idle(begin, end, cause, blocked, after, wait)

    def _causes(self, begin: np.ndarray, end: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, ...]:
        ops, calls, waits = self.trace.ops, self.trace.calls, self.waits
        n = len(begin)
        cause = np.full(n, UNKNOWN, np.uint8)
        blocked = np.zeros(n, np.int64)
        wait = np.full(n, NONE, np.int64)
        safe = np.maximum(after, 0)
        if not n or not len(ops):
            return cause, blocked, wait
        known = (after >= 0) & (ops.launch[safe] >= 0) & ~self.clock_violation[safe]
        launch = np.maximum(ops.launch[safe], 0)
        if not len(calls):
            return cause, blocked, wait
        counted = np.flatnonzero(waits.counted())
        blocking_call = np.zeros(len(calls), bool)
        blocking_call[waits.call[counted]] = True
        queued_before = (self.submitted[safe] <= begin) | (blocking_call[launch] & (calls.start_ns[launch] < begin))
        length = end - begin
        queued = known & queued_before
        cause[queued] = np.where(length[queued] <= TURNAROUND_NS, TURNAROUND, DEPENDENCY)
        late = np.flatnonzero(known & ~queued_before)
        cause[late] = SUBMISSION
        threads = calls.thread[launch[late]]
        for thread in np.unique(threads):
            here = late[threads == thread]
            mine = counted[waits.thread[counted] == thread]
            if not len(mine):
                continue
            submissions = self.launches_of(thread)
            at = np.searchsorted(submissions, launch[here], "left") - 1
            previous = np.where(at >= 0, submissions[np.maximum(at, 0)], NONE)
            last = np.searchsorted(waits.call[mine], launch[here], "left") - 1
            candidate = mine[np.maximum(last, 0)]
            is_sync = (last >= 0) & (waits.call[candidate] >= previous)
            rows = here[is_sync]
            cause[rows] = SYNC
            wait[rows] = candidate[is_sync]
            waited = time_inside(waits.start_ns[mine], waits.end_ns[mine])
            blocked[rows] = waited(end[rows]) - waited(begin[rows])
        return cause, blocked, wait

    def headroom(self, pair: tuple[int, int], stream: int | None = None) -> Headroom:
        """Headroom of one stream of a device, or (stream None) the sum over its streams."""
        rows, ops = self.rows[pair], self.trace.ops
        if stream is not None:
            rows = rows[ops.stream[rows] == stream]
        return headroom_curve(self.submitted[rows], ops.start_ns[rows], ops.end_ns[rows])

    def streams(self, pair: tuple[int, int]) -> list[int]:
        """Stream numbers of a device, ascending."""
        return [int(s) for s in np.unique(self.trace.ops.stream[self.rows[pair]])]

    def launch_to_start_ns(self, pair: tuple[int, int], window: Window | None = None) -> np.ndarray:
        """Per launch call, from the call's start to the start of its first operation on the device, within a window."""
        low, high = self.window(pair, window)
        rows, ops = self.rows[pair], self.trace.ops
        rows = rows[(ops.launch[rows] >= 0) & (ops.start_ns[rows] >= low) & (ops.start_ns[rows] < max(high, low + 1))]
        rows = rows[ops.start_ns[rows] == self.first_start[ops.launch[rows]]]
        launch, first = np.unique(ops.launch[rows], return_index=True)
        return ops.start_ns[rows[first]] - self.trace.calls.start_ns[launch]

    def copy_only_ns(self, pair: tuple[int, int], window: Window | None = None) -> int:
        """Time in which copies run and nothing else does."""
        low, high = self.window(pair, window)
        rows, ops = self.rows[pair], self.trace.ops
        busy = union_ns(ops.start_ns[rows], ops.end_ns[rows], low, high)
        rest = rows[ops.kind[rows] != COPY]
        return busy - union_ns(ops.start_ns[rest], ops.end_ns[rest], low, high)


def gaps(start: np.ndarray, end: np.ndarray, low: int, high: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Maximal intervals of [low, high) covered by none of the spans (sorted by start), and the row that ends each."""
    if high <= low:
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64)
    reach = np.maximum.accumulate(np.concatenate([[low], np.maximum(end, low)]))
    begin = np.minimum(reach, high)
    stop = np.clip(np.concatenate([start, [high]]), low, high)
    rows = np.flatnonzero(stop > begin)
    by = np.where(rows < len(start), rows, NONE)
    return begin[rows], stop[rows], by


def union_ns(start: np.ndarray, end: np.ndarray, low: int, high: int) -> int:
    """Length of the union of spans (sorted by start) within [low, high)."""
    begin, stop, _ = gaps(start, end, low, high)
    return max(0, high - low) - int((stop - begin).sum())


def headroom_curve(submitted: np.ndarray, start: np.ndarray, end: np.ndarray) -> Headroom:
    """Exact headroom of operations from their submission instants, starts and ends (int64 ns)."""
    t, where = np.unique(np.concatenate([submitted, start, end]), return_inverse=True)
    n, m = len(submitted), len(t)
    if not m:
        empty = np.empty(0, np.int64)
        return Headroom(empty, empty, empty)
    jump = np.bincount(where[:n], weights=(end - start).astype(float), minlength=m).astype(np.int64)
    running = np.cumsum(np.bincount(where[n : 2 * n], minlength=m) - np.bincount(where[2 * n :], minlength=m))
    executed = np.concatenate([[0], np.cumsum(running[:-1] * np.diff(t))])
    after = np.cumsum(jump) - executed
    return Headroom(t, after - jump, after)


def time_inside(start: np.ndarray, end: np.ndarray):
    """Total time inside disjoint sorted spans up to t, as a function."""
    before = np.concatenate([[0], np.cumsum(end - start)])

    def total(t: np.ndarray) -> np.ndarray:
        i = np.searchsorted(start, t, "right")
        inside = np.where(i > 0, np.minimum(t, end[np.maximum(i - 1, 0)]) - start[np.maximum(i - 1, 0)], 0)
        return np.where(i > 0, before[np.maximum(i - 1, 0)] + inside, 0)

    return total
