"""Named ranges (steps, blocks, microbatches): windows, blocks ahead, and the trace rows of Table 51.

Source: report Section 8.1 (Figure 31), Appendix B.6 and Table 51.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.models.metrics import communication_exposure, d2h_route_shape_wall_time, step_time, union_length
from workbench.traces.idle import SYNC, Analysis, Window
from workbench.traces.trace import KERNEL, RANGE, Trace, TraceError, of_names
from workbench.traces.waits import BLOCKING_D2H

_TIME = re.compile(r"^(\+?)(\d+(?:\.\d+)?)(ns|us|ms|s|)$")
_STEP = re.compile("^ProfilerStep")
_UNIT_NS = {"": 1, "ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
COLLECTIVE = re.compile(
    r"nccl|rccl|nvshmem|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|sendrecv|barrier_on_stream|sync_on_stream",
    re.I,
)
"""Names of kernels that talk to peers; NVSHMEM's own barriers do not carry its name."""


@dataclass(frozen=True)
class RangeTable:
    """Instances of ranges in host order; device times are -1 where a range launched nothing."""

    name: list[str]
    host_start_ns: np.ndarray
    host_end_ns: np.ndarray
    device_start_ns: np.ndarray
    device_end_ns: np.ndarray


def find_ranges(analysis: Analysis, pattern: str) -> RangeTable:
    """Ranges (annotations, NVTX) whose name matches a regular expression, with the span of the work each launched.

    Raises:
        TraceError: no range matches; the message lists names that are there.
    """
    trace = analysis.trace
    spans, calls, ops = trace.spans, trace.calls, trace.ops
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise TraceError(f"range pattern {pattern!r}: {error}") from error
    rows = np.flatnonzero((spans.kind == RANGE) & trace.named(wanted, spans.name))
    if not len(rows):
        have = sorted({trace.names[i] for i in np.unique(spans.name[spans.kind == RANGE])})
        raise TraceError(f"no range matches {pattern!r}; ranges here: {', '.join(have[:12]) or 'none'}")
    device_start = np.full(len(rows), -1, np.int64)
    device_end = np.full(len(rows), -1, np.int64)
    last_end = trace.last_end_ns(np.arange(len(ops)))
    for thread in np.unique(spans.thread[rows]):
        mine = analysis.launches_of(thread)
        for i in np.flatnonzero(spans.thread[rows] == thread):
            a = np.searchsorted(calls.start_ns[mine], spans.start_ns[rows[i]], "left")
            b = np.searchsorted(calls.start_ns[mine], spans.end_ns[rows[i]], "left")
            if b > a:
                device_start[i] = analysis.first_start[mine[a:b]].min()
                device_end[i] = last_end[mine[a:b]].max()
    return RangeTable(
        [trace.names[i] for i in spans.name[rows]], spans.start_ns[rows], spans.end_ns[rows], device_start, device_end
    )


def blocks_ahead(ranges: RangeTable) -> tuple[np.ndarray, np.ndarray]:
    """(t_ns, ranges ahead) from each instant on: host's current range minus the furthest range the device has begun."""
    begun = ranges.device_start_ns >= 0
    host = ranges.host_start_ns
    number = np.arange(len(host))
    order = np.argsort(ranges.device_start_ns[begun], kind="stable")
    started = ranges.device_start_ns[begun][order]
    furthest = np.maximum.accumulate(np.concatenate([[-1], number[begun][order]]))
    t = np.unique(np.concatenate([host, started]))
    ahead = np.searchsorted(host, t, "right") - 1 - furthest[np.searchsorted(started, t, "right")]
    return t, np.maximum(ahead, 0)


def steps(trace: Trace) -> list[tuple[str, Window]]:
    """The profiler's steps (ProfilerStep#N) in order, the last one included."""
    spans = trace.spans
    rows = np.flatnonzero((spans.kind == RANGE) & trace.named(_STEP, spans.name))
    return [(trace.names[spans.name[i]], (int(spans.start_ns[i]), int(spans.end_ns[i]))) for i in rows]


def parse_window(trace: Trace, text: str | None) -> Window | None:
    """A window from text: `all`, `steps` (profiler steps after the first), a range's name, `step:N`, or `A:B`.

    A and B are times on the trace's clock in ns, or with a unit (ns, us, ms, s); a leading `+` counts from the first
    device operation. None means the whole trace.

    Raises:
        TraceError: the text is none of these, or names no range.
    """
    if text is None or text == "all":
        return None
    found = steps(trace)
    if text == "steps":
        kept = found[1:] or found
        if not kept:
            raise TraceError("window 'steps': the trace has no ProfilerStep ranges; give A:B or a range's name")
        return kept[0][1][0], kept[-1][1][1]
    if re.fullmatch(r"step:\d+", text):
        number = int(text[5:])
        if number >= len(found):
            raise TraceError(f"window {text!r}: the trace has {len(found)} steps, counted from 0")
        return found[number][1]
    spans = trace.spans
    named = np.flatnonzero((spans.kind == RANGE) & of_names(trace.names, spans.name, lambda name: name == text))
    if len(named):
        return int(spans.start_ns[named[0]]), int(spans.end_ns[named[0]])
    parts = text.split(":")
    times = [_TIME.match(p) for p in parts]
    if len(parts) != 2 or not all(times):
        raise TraceError(
            f"window {text!r}: expected all, steps, step:N, a range's name, or A:B such as 12000:90000 or +1ms:+5ms"
        )
    origin = int(trace.ops.start_ns.min()) if len(trace.ops) else 0
    low, high = (_time_ns((m[1], m[2], m[3]), origin) for m in times if m)
    if high >= 1 << 63:
        raise TraceError(f"window {text!r}: expected times below 2^63 ns")
    if high <= low:
        raise TraceError(f"window {text!r}: ends before it starts")
    return low, high


def _time_ns(parts: tuple[str, str, str], origin: int) -> int:
    sign, number, unit = parts
    whole = int(number) * _UNIT_NS[unit] if number.isdigit() else round(float(number) * _UNIT_NS[unit])
    return whole + (origin if sign else 0)


def table51(analysis: Analysis, window: Window | None = None) -> list[dict[str, Any]]:
    """The trace-based rows of Table 51: step time, D2H route-shape wall time, communication exposure."""
    trace = analysis.trace
    calls, ops, waits = trace.calls, trace.ops, analysis.waits
    rows: list[dict[str, Any]] = []
    durations = np.array([b - a for _, (a, b) in steps(trace)]) / 1e9
    if len(durations):
        found = step_time(durations)
        summary = {f"{k.removesuffix('_s')}_us": float(found[k]) * 1e6 for k in ("median_s", "mean_s", "sd_s")}
        rows.append({"metric": "step time", "count": len(durations), **summary})
    for pair in analysis.rows:
        low, high = analysis.window(pair, window)
        idle = analysis.idle(pair, window)
        where = {"process": trace.process_label(pair[0]), "device": pair[1]}
        of_process = calls.process[waits.call] == pair[0] if len(waits) else np.empty(0, bool)
        chosen = waits.counted() & (waits.kind == BLOCKING_D2H) & of_process
        chosen &= (waits.end_ns > low) & (waits.start_ns < high)
        picked = np.flatnonzero(chosen)
        caused = (idle.cause == SYNC) & np.isin(idle.wait, picked)
        begin = waits.start_ns[picked]
        wall = d2h_route_shape_wall_time(
            _pairs_us(begin, waits.end_ns[picked], low),
            _pairs_us(begin, begin + _launch_gaps(analysis, picked), low),
            _pairs_us(idle.start_ns[caused], idle.end_ns[caused], low),
        )
        rows.append({"metric": "D2H route-shape wall time", **where, **wall})
        mine = analysis.rows[pair]
        is_comm = trace.named(COLLECTIVE, ops.name[mine]) & (ops.kind[mine] == KERNEL)
        start, end = np.clip(ops.start_ns[mine], low, high), np.clip(ops.end_ns[mine], low, high)
        comm = _pairs_us(start[is_comm], end[is_comm], low)
        rows.append(
            {
                "metric": "communication exposure",
                **where,
                "count": int(is_comm.sum()),
                "communication_us": union_length(comm),
                "exposed_us": communication_exposure(comm, _pairs_us(start[~is_comm], end[~is_comm], low)),
            }
        )
    return rows


def _pairs_us(start_ns: np.ndarray, end_ns: np.ndarray, origin_ns: int) -> np.ndarray:
    """[N, 2] microseconds from an origin of the same clock: epoch nanoseconds do not fit a double."""
    return np.stack([start_ns - origin_ns, end_ns - origin_ns], axis=1) / 1e3


def _launch_gaps(analysis: Analysis, picked: np.ndarray) -> np.ndarray:
    """From the start of each wait to the start of the next launch on its thread, ns."""
    calls, waits = analysis.trace.calls, analysis.waits
    out = np.zeros(len(picked), np.int64)
    for thread in np.unique(waits.thread[picked]):
        mine = analysis.launches_of(thread)
        here = np.flatnonzero(waits.thread[picked] == thread)
        at = np.searchsorted(calls.start_ns[mine], waits.end_ns[picked[here]], "left")
        ok = at < len(mine)
        out[here[ok]] = calls.start_ns[mine[at[ok]]] - waits.start_ns[picked[here[ok]]]
    return out
