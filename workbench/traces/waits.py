"""Host waits of a trace: blocking device-to-host copies, synchronise calls, polling; judged by outcome, not by name.

Source: report Section 8.4 and Appendix B.6.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.traces.lookup import Locator
from workbench.traces.trace import (
    D2H,
    DEVICE_SYNC,
    EVENT_SYNC,
    FOREVER,
    NEVER,
    NONE,
    OTHER_CALL,
    PAGEABLE,
    PINNED,
    QUERY,
    STREAM_SYNC,
    Table,
    Trace,
)

BLOCKING_D2H, STREAM, EVENT, DEVICE, POLLING, BLOCKING_COPY, IMPLICIT, FINAL_SYNC = range(8)
WAIT_KINDS = (
    "blocking_d2h", "stream_sync", "event_sync", "device_sync", "polling", "blocking_copy", "implicit_sync",
    "final_device_sync",
)  # fmt: skip
NOT_COUNTED = "had nothing left to wait for, or are the final synchronise"
POLL_CALLS, POLL_NS = 8, 20_000
LONG_CALL_NS = 100_000
LAUNCH = re.compile(r"^(cuda|cu|hip)(Ext)?(ModuleLaunch|Launch)(Cooperative)?Kernel|^hipExtModuleLaunchKernel")
COPY_CALL = re.compile(r"^(cuda|cu|hip)Memcpy")
_MOVES = re.compile(r"^(cuda|cu|hip)Mem(cpy|set)")
_FREES = re.compile(r"^(cuda|cu|hip)(Mem)?Free(Array|Host|MipmappedArray)?(_v\d+)*$")
"""Calls that wait for all work of the device before they return."""
_RECORD_KIND = (
    (re.compile("^Event Sync"), EVENT_SYNC),
    (re.compile("^Stream Sync"), STREAM_SYNC),
    (re.compile("^Context Sync"), DEVICE_SYNC),
)
_ASYNCHRONOUS = re.compile("Async")
_HARMLESS = re.compile(r"^(cuda|hip)(GetLastError|PeekAtLastError|GetDevice|SetDevice)|^cuCtx(Get|Set)Current")
_ALLOCATION = re.compile(r"aten::(new_)?(empty|resize|_?pin_memory|set_|clone)")


@dataclass(frozen=True)
class Waits(Table):
    """One row per wait, sorted by start. `blocking`: device work ended during the call, so the host did wait for it.

    `blocking_copy` is a synchronous copy that is no device-to-host copy by its record (host to device, or done by a
    kernel) during which other work ended; `implicit_sync` a call that frees memory and left the device drained.
    `copy` is the D2H operation (row of `Trace.ops`) that the wait delivers, or -1; `submits` says whether the thread
    is one that launches device work (a watchdog thread's wait stops no submission).
    """

    kind: np.ndarray
    start_ns: np.ndarray
    end_ns: np.ndarray
    call: np.ndarray
    thread: np.ndarray
    blocking: np.ndarray
    submits: np.ndarray
    copy: np.ndarray

    def counted(self) -> np.ndarray:
        """Mask of waits that held up submission: blocking, on a submitting thread, not the profiler's final one."""
        return self.blocking & self.submits & (self.kind != FINAL_SYNC)


def launch_calls(trace: Trace) -> np.ndarray:
    """Rows of the calls that own at least one device operation, ascending."""
    owned = trace.ops.launch[trace.ops.launch >= 0]
    mask = np.zeros(len(trace.calls), bool)
    mask[owned] = True
    return np.flatnonzero(mask)


def find_waits(trace: Trace) -> Waits:
    """All waits of a trace (see `Waits`).

    A D2H copy call that returned at or after the end of its copy blocked (a pinned asynchronous copy never does by
    itself); a pinned copy makes the next synchronise call of its thread the wait that delivers it. Stream waits, and
    launches held up by a full queue, are not waits.
    """
    ops, calls = trace.ops, trace.calls
    launches = launch_calls(trace)
    submits = trace.named(LAUNCH, calls.name)  # of kernels that were not recorded, too
    submits[launches] = True
    launching = np.zeros(len(trace.threads) + 1, bool)
    launching[calls.thread[submits]] = True
    delivered = np.full(len(calls), NONE, np.int64)
    call_kind = _kinds(trace, launches)

    copies = np.flatnonzero((ops.copy_kind == D2H) & (ops.launch >= 0))
    own = ops.launch[copies]
    asynchronous = trace.named(_ASYNCHRONOUS, calls.name)
    returned_late = (calls.end_ns[own] >= ops.end_ns[copies]) & (calls.start_ns[own] <= ops.start_ns[copies])
    blocks = returned_late & ~((ops.host_memory[copies] == PINNED) & asynchronous[own])
    delivered[own[blocks]] = copies[blocks]

    syncs = np.flatnonzero(np.isin(call_kind, (STREAM_SYNC, EVENT_SYNC, DEVICE_SYNC)))
    _deliver_by_sync(trace, copies[~blocks], syncs, delivered)

    other_copies = _synchronous_copies(trace, launches, delivered, ~asynchronous)
    frees = _draining_frees(trace)
    rows = np.unique(np.concatenate([syncs, own[blocks], other_copies, frees]))
    kind = np.full(len(rows), BLOCKING_D2H, np.uint8)
    for code, wait in ((STREAM_SYNC, STREAM), (EVENT_SYNC, EVENT), (DEVICE_SYNC, DEVICE)):
        kind[(call_kind[rows] == code) & (delivered[rows] < 0)] = wait
    kind[np.isin(rows, other_copies)] = BLOCKING_COPY
    kind[np.isin(rows, frees)] = IMPLICIT
    blocking = _outlived_work(trace, rows) | (delivered[rows] >= 0) | (kind == IMPLICIT)
    kind[np.isin(rows, _final_syncs(trace, submits))] = FINAL_SYNC

    poll_first, poll_last = _polls(trace, launching)
    poll_blocks = ended_between(trace, calls.process[poll_first], calls.start_ns[poll_first], calls.end_ns[poll_last])
    start = np.concatenate([calls.start_ns[rows], calls.start_ns[poll_first]])
    call = np.concatenate([rows, poll_first])
    order = np.argsort(start, kind="stable")
    thread = calls.thread[call]
    return Waits(
        kind=np.concatenate([kind, np.full(len(poll_first), POLLING, np.uint8)])[order],
        start_ns=start[order],
        end_ns=np.concatenate([calls.end_ns[rows], calls.end_ns[poll_last]])[order],
        call=call[order],
        thread=thread[order],
        blocking=np.concatenate([blocking, poll_blocks])[order],
        submits=launching[thread][order],
        copy=np.concatenate([delivered[rows], np.full(len(poll_first), NONE, np.int64)])[order],
    )


def _kinds(trace: Trace, launches: np.ndarray) -> np.ndarray:
    """`Calls.kind`, and for calls of other names the kind that the profiler's own record of the wait gives."""
    calls, syncs = trace.calls, trace.syncs
    kind = calls.kind.copy()
    for name, code in _RECORD_KIND:
        meant = trace.named(name, syncs.name) & (syncs.correlation > 0)
        found = np.isin(calls.correlation, syncs.correlation[meant]) & (kind == OTHER_CALL)
        found[launches] = False
        kind[found] = code
    return kind


def _synchronous_copies(
    trace: Trace, launches: np.ndarray, delivered: np.ndarray, synchronous: np.ndarray
) -> np.ndarray:
    """Copy calls, no D2H by their record, that returned after their work and other work ended.

    Synchronous by name, or long and from pageable memory, which the driver reads before it returns.
    """
    ops, calls = trace.ops, trace.calls
    pageable = np.zeros(len(calls), bool)
    pageable[ops.launch[(ops.launch >= 0) & (ops.host_memory == PAGEABLE)]] = True
    may_wait = synchronous | (pageable & (calls.end_ns - calls.start_ns >= POLL_NS))
    rows = launches[(trace.named(_MOVES, calls.name) & may_wait)[launches] & (delivered[launches] < 0)]
    mine = np.flatnonzero(np.isin(ops.launch, rows))
    first = np.full(len(calls), FOREVER, np.int64)
    np.minimum.at(first, ops.launch[mine], ops.start_ns[mine])
    rows = rows[trace.last_end_ns(mine)[rows] <= calls.end_ns[rows]]
    # Other work that ended between the call's start and the copy's own: the call waited for it.
    return rows[ended_between(trace, calls.process[rows], calls.start_ns[rows], np.maximum(first[rows], 0))]


def _draining_frees(trace: Trace) -> np.ndarray:
    """Calls that free memory, during which the last of all work submitted before them ended."""
    ops, calls = trace.ops, trace.calls
    frees = np.flatnonzero(trace.named(_FREES, calls.name))
    ends = trace.last_end_ns(np.arange(len(ops)))
    found = [frees[:0]]
    for p in np.unique(calls.process[frees]):
        mine = np.flatnonzero(calls.process == p)
        drained = np.maximum.accumulate(ends[mine])  # end of all work submitted by calls up to this one
        at = np.flatnonzero(np.isin(mine, frees))
        rows = mine[at]
        found.append(rows[(drained[at] > calls.start_ns[rows]) & (drained[at] <= calls.end_ns[rows])])
    return np.concatenate(found)


def _deliver_by_sync(trace: Trace, copies: np.ndarray, syncs: np.ndarray, delivered: np.ndarray) -> None:
    ops, calls = trace.ops, trace.calls
    own = ops.launch[copies]
    for thread in np.unique(calls.thread[own]):
        mine = syncs[calls.thread[syncs] == thread]
        here = calls.thread[own] == thread
        at = np.searchsorted(calls.start_ns[mine], calls.end_ns[own[here]], "left")
        inside = at < len(mine)
        sync, copy = mine[at[inside]], copies[here][inside]
        needed = calls.end_ns[sync] >= ops.end_ns[copy]
        delivered[sync[needed]] = copy[needed]


def _outlived_work(trace: Trace, rows: np.ndarray) -> np.ndarray:
    """Did device work that the call waits for end during the call? Uses the synchronised stream where recorded."""
    calls, syncs = trace.calls, trace.syncs
    result = ended_between(trace, calls.process[rows], calls.start_ns[rows], calls.end_ns[rows])
    if len(syncs):
        known = {int(c): i for i, c in enumerate(syncs.correlation) if c > 0 and syncs.stream[i] >= 0}
        for i, row in enumerate(rows):
            record = known.get(int(calls.correlation[row]))
            if record is None or not trace.names[syncs.name[record]].startswith("Stream Sync"):
                continue
            if syncs.process[record] >= 0 and syncs.process[record] != calls.process[row]:
                continue
            ends = trace.stream_ends_ns(int(calls.process[row]), int(syncs.stream[record]))
            low = np.searchsorted(ends, calls.start_ns[row], "right")
            result[i] = np.searchsorted(ends, calls.end_ns[row], "right") > low
    return result | (calls.end_ns[rows] - calls.start_ns[rows] >= LONG_CALL_NS)


def ended_between(trace: Trace, process: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    result = np.zeros(len(start), bool)
    for p in np.unique(process):
        ends = np.sort(trace.ops.end_ns[trace.ops.process == p])
        here = process == p
        low = np.searchsorted(ends, start[here], "right")
        result[here] = np.searchsorted(ends, end[here], "right") > low
    return result


def _final_syncs(trace: Trace, submits: np.ndarray) -> np.ndarray:
    """Per process the last device synchronise where nothing is submitted after it: the profiler's own, exempt."""
    calls, found = trace.calls, []
    for p in np.unique(calls.process):
        mine = np.flatnonzero((calls.process == p) & (calls.kind == DEVICE_SYNC))
        submitted = np.flatnonzero(submits & (calls.process == p))
        last = calls.start_ns[submitted].max() if len(submitted) else NEVER
        if len(mine) and calls.start_ns[mine[-1]] > last:
            found.append(mine[-1])
    return np.array(found, np.int64)


def _polls(trace: Trace, launching: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First and last call of each run of queries on a launching thread, with no other call between them."""
    runs = query_runs(trace, launching, trace.named(_HARMLESS, trace.calls.name), POLL_CALLS, POLL_NS, _ALLOCATION)
    return runs[:, 0], runs[:, 1]


def query_runs(
    trace: Trace, launching: np.ndarray, ignored: np.ndarray, least: int, least_ns: int, own: re.Pattern[str]
) -> np.ndarray:
    """(first, last) call of runs of at least `least` queries over `least_ns`, with only `ignored` calls between.

    Queries inside operators that match `own` are left out: the caching allocator asks its whole list of events once
    inside an allocation, and waits for none of them.
    """
    calls = trace.calls
    rows = np.flatnonzero(launching[calls.thread] & ~ignored)
    if not (calls.kind[rows] == QUERY).any():
        return np.empty((0, 2), np.int64)
    rows = rows[np.lexsort((calls.start_ns[rows], calls.thread[rows]))]
    query = calls.kind[rows] == QUERY
    change = np.flatnonzero((query[1:] != query[:-1]) | (calls.thread[rows][1:] != calls.thread[rows][:-1])) + 1
    begin = np.concatenate([[0], change])
    end = np.concatenate([change, [len(rows)]])
    first, last = rows[begin], rows[end - 1]
    long_enough = calls.end_ns[last] - calls.start_ns[first] >= least_ns
    locator, found = Locator(trace), []

    def foreign(i: int) -> bool:
        return not own.match(locator.where(int(calls.thread[i]), int(calls.start_ns[i])).op)

    keep = query[begin] & (end - begin >= least) & long_enough
    for a, b in zip(begin[keep], end[keep]):
        run = rows[a:b]
        head = next((i for i in range(len(run)) if foreign(run[i])), None)
        if head is None:
            continue
        tail = next(i for i in range(len(run) - 1, -1, -1) if foreign(run[i]))
        if tail - head + 1 >= least and calls.end_ns[run[tail]] - calls.start_ns[run[head]] >= least_ns:
            found.append((run[head], run[tail]))
    return np.array(found, np.int64).reshape(-1, 2)


def describe_waits(trace: Trace, waits: Waits, locator: Locator | None = None) -> list[dict[str, Any]]:
    """Waits as plain rows: kind, start_ns, duration_ns, thread, blocking, line, op, range."""
    locator = locator or Locator(trace)
    rows = []
    for i in range(len(waits)):
        where = locator.where(int(waits.thread[i]), int(waits.start_ns[i]))
        _, label, _ = trace.threads[waits.thread[i]]
        rows.append({
            "kind": WAIT_KINDS[waits.kind[i]], "start_ns": int(waits.start_ns[i]),
            "duration_ns": int(waits.end_ns[i] - waits.start_ns[i]), "thread": label,
            "blocking": bool(waits.blocking[i]), **where.as_dict(),
        })  # fmt: skip
    return rows
