"""What a trace leaves open: holes in which a wait or an idle device may hide. A trace with one cannot pass.

Source: report Section 8.5 and Appendix B.6.
"""

from __future__ import annotations

import re

import numpy as np

from workbench.traces.build import AMBIGUOUS_LINKS
from workbench.traces.idle import UNKNOWN, Analysis, Window
from workbench.traces.lookup import Locator
from workbench.traces.summary import UNLINKED_SHARE, empty_graph_launches
from workbench.traces.trace import (
    COPY,
    CPU_OP,
    D2H,
    FOREVER,
    GRAPH_LAUNCH,
    KERNEL,
    NEVER,
    NONE,
    OTHER_CALL,
    OTHER_COPY,
    PAGEABLE,
    Trace,
)
from workbench.traces.waits import (
    COPY_CALL,
    FINAL_SYNC,
    LAUNCH,
    LONG_CALL_NS,
    POLL_NS,
    POLLING,
    ended_between,
    query_runs,
)

VIOLATION_SHARE = 0.01
TIMELESS_SHARE = 0.5
UNSEEN_HOST_SHARE, UNSEEN_HOST_NS = 0.05, 1_000_000
SLOW_POLL_CALLS = 3
# In traces of asynchronous launches 0.6 % at most return after their kernel's end; in synchronous ones all do.
SYNCHRONOUS_SHARE, FEWEST_LAUNCHES = 0.5, 10
# Reasons of `Trace.dropped` that leave a hole where a wait or an operation may have been.
LOST = (
    "damaged_events", "damaged_bytes", "truncated_file", "dropped_records", "unread_tables", "unusable_time",
    "missing_duration", "negative_duration", "out_of_range_ids", "begin_end_events", "unknown_category",
    "calls_without_thread", "host_page_faults", "stray_items", "second_document", "zero_time_copies",
    "zero_time_calls",
)  # fmt: skip
_VENDOR = re.compile(r"^_{0,2}(cuda|cu|hip|roc|nvtx|nccl|rccl|cudnn|cublas)[A-Z]|^INVALID$")
_MAY_WAIT = re.compile(r"(?<!Stream)Wait|Sync(?!hronizationPolicy)|Fence")
_SCALAR = re.compile(r"^aten::(item|_local_scalar_dense)$")
_CAPTURE_BEGINS, _CAPTURE_ENDS = re.compile("StreamBeginCapture"), re.compile("StreamEndCapture")
_STREAM_WAIT = re.compile("^Stream Wait")
_POLL = f"{POLL_NS / 1e3:g} us"
_ATEN = re.compile(r"aten::")


def holes(analysis: Analysis, window: Window | None, idle_threshold_ns: float | None) -> list[str]:
    """Why the trace cannot pass, in words; empty where it is complete. A threshold: idle of unknown cause counts."""
    trace, ops = analysis.trace, analysis.trace.ops
    untimed = trace.dropped.get("zero_time_ops", 0)
    if not len(ops):
        return (
            [f"all {untimed} device operations have no times"]
            if untimed
            else trace.warnings or ["no device operations"]
        )
    why = []
    if window is not None and not ops.within(window).any():
        why.append(f"the window {window[0]}:{window[1]} ns holds no device operations")
    if not len(trace.calls):
        why.append("the trace has no launch rows (runtime or driver calls), so nothing can be said about the host")
    else:
        for part in (_links, _launches, _copies, _host, _calls):
            why += part(analysis, window)
        if idle_threshold_ns is not None:
            why += _idle(analysis, window, idle_threshold_ns)
    timeless, recorded = int((ops.end_ns == ops.start_ns).sum()) + untimed, len(ops) + untimed
    if timeless > TIMELESS_SHARE * recorded:
        why.append(
            f"{timeless} of {recorded} device operations have no duration (bound: {TIMELESS_SHARE:.0%}), so idle time "
            "and waits cannot be told"
        )
    if lost := lost_events(trace):
        why.append(lost)
    return why


def lost_events(trace: Trace) -> str:
    """What was lost while recording or reading, in words; empty where nothing was."""
    lost = ", ".join(f"{k} {v}" for k, v in trace.dropped.items() if k in LOST)
    return f"events were lost while recording or reading: {lost}" if lost else ""


def _counted(*found: tuple[int, str]) -> list[str]:
    """Return the words of those that were found, each after its number."""
    return [f"{n} {words}" for n, words in found if n > 0]


def _links(analysis: Analysis, window: Window | None) -> list[str]:
    """Operations whose launch is unknown, a guess or impossible; graph launches without operations."""
    trace, ops = analysis.trace, analysis.trace.ops
    why = _counted((empty_graph_launches(analysis), "graph launches have no recorded device operations"))
    unlinked = (ops.launch < 0) & ~analysis.carry_in
    for rows, where in ((ops.within(None), ""), (ops.within(window), " in the window")):
        n, of = int((unlinked & rows).sum()), int(rows.sum())
        if n > UNLINKED_SHARE * of:
            why.append(f"{n} of {of} operations{where} have no recorded launch (bound: {UNLINKED_SHARE:.0%})")
            break
    guessed = trace.dropped.get(AMBIGUOUS_LINKS, 0)
    if guessed > UNLINKED_SHARE * len(ops):
        why.append(
            f"{guessed} of {len(ops)} operations share their correlation id with several calls, so their launch is a "
            f"guess (bound: {UNLINKED_SHARE:.0%})"
        )
    violations = int(analysis.clock_violation.sum())
    if violations > VIOLATION_SHARE * len(ops):
        why.append(f"{violations} of {len(ops)} operations start before their own launch: clocks disagree")
    return why


def _launches(analysis: Analysis, window: Window | None) -> list[str]:
    """Launches whose operations are missing, or that waited for them."""
    trace, calls = analysis.trace, analysis.trace.calls
    bare, followed = _bare(analysis)
    bare &= calls.within(window)
    dropped = trace.dropped.get("zero_time_ops", 0) - trace.dropped.get("zero_time_copies", 0)
    kernels = int((bare & followed & trace.named(LAUNCH, calls.name)).sum()) - dropped
    why = _counted((kernels, "kernel launches have no recorded kernel, though later ones do: device records were lost"))
    share, of = _synchronous_launches(analysis)
    if of >= FEWEST_LAUNCHES and share > SYNCHRONOUS_SHARE:
        why.append(
            f"{share:.0%} of {of} kernel launches returned only after their kernel had ended: was it recorded with "
            "CUDA_LAUNCH_BLOCKING=1?"
        )
    copies = np.flatnonzero(bare & trace.named(COPY_CALL, calls.name) & (calls.end_ns - calls.start_ns >= POLL_NS))
    worked = ended_between(trace, calls.process[copies], calls.start_ns[copies], calls.end_ns[copies])
    lone = int((followed[copies] | worked).sum())
    return why + _counted((lone, f"copy calls of {_POLL} and more have no recorded copy: they may have waited"))


def _synchronous_launches(analysis: Analysis) -> tuple[float, int]:
    """(share of the kernel launches, graphs left out, that returned after their kernel ended; how many there are)."""
    ops, calls = analysis.trace.ops, analysis.trace.calls
    kernels = np.flatnonzero(ops.kind == KERNEL)
    ends = analysis.trace.last_end_ns(kernels)
    rows = np.flatnonzero((ends > NEVER) & (calls.kind != GRAPH_LAUNCH))
    return float((calls.end_ns[rows] >= ends[rows]).mean()) if len(rows) else 0.0, len(rows)


def _bare(analysis: Analysis) -> tuple[np.ndarray, np.ndarray]:
    """Masks: calls without operations outside captures; calls that a launch of their thread with operations follows."""
    trace, calls = analysis.trace, analysis.trace.calls
    last = np.full(len(trace.threads) + 1, NEVER, np.int64)
    np.maximum.at(last, calls.thread[analysis.launches], calls.start_ns[analysis.launches])
    # threads none of whose launches has its operation
    last[last == NEVER] = calls.start_ns[analysis.launches].max(initial=NEVER)
    followed = calls.start_ns < last[calls.thread]
    bare = np.ones(len(calls), bool)
    bare[analysis.launches] = False
    edge = trace.named(_CAPTURE_BEGINS, calls.name).astype(int) - trace.named(_CAPTURE_ENDS, calls.name)
    for p in np.unique(calls.process[edge != 0]):
        depth = np.cumsum(np.where(calls.process == p, edge, 0))
        capturing = depth > min(0, int(depth.min()))  # a capture that began before the recording
        bare &= ~(capturing & (calls.process == p))
    return bare, followed


def _copies(analysis: Analysis, window: Window | None) -> list[str]:
    """Device-to-host copies of which it cannot be told whether they blocked."""
    ops, calls = analysis.trace.ops, analysis.trace.calls
    rows = np.flatnonzero((ops.kind == COPY) & ops.within(window))
    rows = rows[(ops.copy_kind[rows] == D2H) | (ops.copy_kind[rows] == OTHER_COPY)]
    launch = ops.launch[rows]
    d2h, known = ops.copy_kind[rows] == D2H, launch >= 0
    safe = np.maximum(launch, 0)
    waited = np.isin(rows, analysis.waits.copy) | (known & np.isin(safe, analysis.waits.call))
    shared = known & _shared_ids(analysis, rows)
    early = calls.end_ns[safe] < ops.end_ns[rows]
    read, locator = np.zeros(len(rows), bool), Locator(analysis.trace)
    for i in np.flatnonzero(d2h & known & ~waited):
        at = int(calls.thread[safe[i]]), CPU_OP, int(calls.start_ns[safe[i]])
        read[i] = any(_SCALAR.match(name) for name in locator.names(*at))
    late = known & ~early & (calls.end_ns[safe] - calls.start_ns[safe] >= POLL_NS)
    found = (
        (d2h & ~known & ~analysis.carry_in[rows], "have no recorded launch, so whether they blocked is open"),
        (d2h & shared & ~waited, "share their correlation id with several calls: which of them waited is a guess"),
        (d2h & analysis.clock_violation[rows] & ~waited, "start before their own call: clocks disagree"),
        (
            d2h & known & early & (ops.host_memory[rows] == PAGEABLE) & ~waited,
            "into pageable memory end after their call, which by specification returns later: clocks disagree",
        ),
        (read, "are read by an operator that waits for them, but no wait was recorded"),
        (~d2h & late & ~waited, "have no direction, and their calls returned after they ended"),
    )
    return _counted(*((int(mask.sum()), f"device-to-host or undirected copies {words}") for mask, words in found))


def _shared_ids(analysis: Analysis, rows: np.ndarray) -> np.ndarray:
    """Do several calls of the operation's own process carry its correlation id?"""
    ops, calls = analysis.trace.ops, analysis.trace.calls
    wanted = np.unique(ops.correlation[rows])
    mine = np.flatnonzero(np.isin(calls.correlation, wanted))
    size = len(analysis.trace.processes) + 2
    key = np.searchsorted(wanted, calls.correlation[mine]) * size + calls.process[mine] + 1
    count = np.bincount(key, minlength=len(wanted) * size + size)
    return count[np.searchsorted(wanted, ops.correlation[rows]) * size + ops.process[rows] + 1] > 1


def _host(analysis: Analysis, window: Window | None) -> list[str]:
    """Processes whose calls were recorded only from the middle of their device work on."""
    trace = analysis.trace
    why = []
    for pair in analysis.rows:
        low, high = analysis.window(pair, window)
        mine = trace.calls.start_ns[trace.calls.process == pair[0]] if pair[0] >= 0 else trace.calls.start_ns[:0]
        unseen = min(int(mine[0]), high) - low if len(mine) else 0
        if unseen > max(UNSEEN_HOST_NS, UNSEEN_HOST_SHARE * (high - low)):
            why.append(
                f"the host's calls are recorded only from {unseen / 1e3:.1f} us after the first operation of device "
                f"{pair[1]} on (bound: {UNSEEN_HOST_SHARE:.0%} of {(high - low) / 1e3:.1f} us)"
            )
    return why


def _calls(analysis: Analysis, window: Window | None) -> list[str]:
    """Calls that held a submitting thread and may have waited, without evidence that they did."""
    trace, calls, waits = analysis.trace, analysis.trace.calls, analysis.waits
    inside = waits.within(window) & (waits.kind != FINAL_SYNC) & (waits.kind != POLLING)
    idle = inside & waits.submits & ~waits.blocking & (waits.end_ns - waits.start_ns >= POLL_NS)
    held = _standstills(analysis, np.flatnonzero(inside & ~waits.submits & waits.blocking))
    launching = np.zeros(len(trace.threads) + 1, bool)
    launching[calls.thread[analysis.launches]] = True
    other = calls.kind == OTHER_CALL
    other[analysis.launches] = False
    names = calls.name
    unknown = other & (~trace.named(_VENDOR, names) | trace.named(_MAY_WAIT, names)) & launching[calls.thread]
    unknown &= (calls.end_ns - calls.start_ns >= POLL_NS) & calls.within(window)
    unknown[waits.call] = False
    some = ", ".join(sorted({trace.names[i] for i in names[unknown]})[:3])
    runs = query_runs(trace, launching, other, SLOW_POLL_CALLS, LONG_CALL_NS, _ATEN)
    return _counted(
        (
            int(idle.sum()),
            f"synchronise calls took {_POLL} and more though no recorded work that they wait for ended in them",
        ),
        (
            held,
            "blocking waits of threads that launch nothing, while no thread submitted: one may have waited for them",
        ),
        (int(unknown.sum()), f"calls of {_POLL} and more are of no known kind: {some}"),
        (_orphans(analysis, window), "synchronisation records belong to no recorded call as long as they"),
        (
            _unjudged(analysis, runs, window),
            "times a submitting thread asked for events or streams again and again: it may poll",
        ),
        (
            _reads_without_calls(analysis, window),
            "operators that read device values contain no recorded call: their waits are not seen",
        ),
    )


def _orphans(analysis: Analysis, window: Window | None) -> int:
    """How many synchronisation records last longer than the call of their id, stream waits left out."""
    trace, calls, syncs = analysis.trace, analysis.trace.calls, analysis.trace.syncs
    ids, of_call = np.unique(calls.correlation, return_inverse=True)
    longest = np.zeros(len(ids), np.int64)  # several processes may use one id
    np.maximum.at(longest, of_call, calls.end_ns - calls.start_ns)
    at = np.minimum(np.searchsorted(ids, syncs.correlation), len(ids) - 1)
    lasted = np.where(ids[at] == syncs.correlation, longest[at], 0)
    orphan = ~trace.named(_STREAM_WAIT, syncs.name) & (syncs.end_ns - syncs.start_ns - lasted >= POLL_NS)
    return int((orphan & syncs.within(window)).sum())


def _unjudged(analysis: Analysis, runs: np.ndarray, window: Window | None) -> int:
    """How many runs (first and last call) in the window meet no wait that is known as polling."""
    calls, waits = analysis.trace.calls, analysis.waits
    low, high = window or (NEVER, FOREVER)
    polls = waits.take(waits.kind == POLLING)
    spans = zip(calls.start_ns[runs[:, 0]], calls.end_ns[runs[:, 1]])
    return sum(a < high and b > low and not polls.within((a, b)).any() for a, b in spans)


def _standstills(analysis: Analysis, rows: np.ndarray) -> int:
    """In how many of these waits nothing was submitted for half of the time, and work was submitted later."""
    calls, waits = analysis.trace.calls, analysis.waits
    starts = calls.start_ns[analysis.launches]
    found = 0
    for i in rows:
        begin, end = int(waits.start_ns[i]), int(waits.end_ns[i])
        first, last = np.searchsorted(starts, [begin, end])
        if last == len(starts):
            continue
        still = np.diff([begin, *starts[first:last], end]).max()
        found += bool(still >= max(POLL_NS, (end - begin) // 2))
    return found


def _reads_without_calls(analysis: Analysis, window: Window | None) -> int:
    trace, spans, calls = analysis.trace, analysis.trace.spans, analysis.trace.calls
    rows = np.flatnonzero(
        (spans.kind == CPU_OP)
        & trace.named(_SCALAR, spans.name)
        & (spans.end_ns - spans.start_ns >= POLL_NS)
        & spans.within(window)
    )
    found = 0
    for thread in np.unique(spans.thread[rows]):
        starts = calls.start_ns[calls.thread == thread]
        mine = rows[spans.thread[rows] == thread]
        found += int(
            (np.searchsorted(starts, spans.end_ns[mine]) == np.searchsorted(starts, spans.start_ns[mine])).sum()
        )
    return found


def _idle(analysis: Analysis, window: Window | None, threshold_ns: float) -> list[str]:
    """Idle above the threshold whose cause is unknown, unless work carried in from before the recording ended it."""
    n = total = 0
    for pair in analysis.rows:
        idle = analysis.idle(pair, window)
        rows = (idle.cause == UNKNOWN) & (idle.length_ns > threshold_ns) & (idle.ended_by != NONE)
        rows &= ~analysis.carry_in[np.maximum(idle.ended_by, 0)]
        n, total = n + int(rows.sum()), total + int(idle.length_ns[rows].sum())
    words = f"idle intervals above {threshold_ns / 1e3:g} us have no known cause ({total / 1e3:.1f} us in all)"
    return _counted((n, words))
