"""One trace, summarised: what `workbench trace summary --json` prints. Integer nanoseconds, fixed keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.traces.idle import Analysis, Window
from workbench.traces.lookup import NO_STACKS, Locator
from workbench.traces.trace import GRAPH_LAUNCH, PYTHON, Trace
from workbench.traces.waits import describe_waits

SCHEMA = 1
UNLINKED_SHARE = 0.05


def summarise(trace: Trace | Analysis, window: Window | None = None) -> dict[str, Any]:
    """Devices with idle by cause and headroom, waits with their source, what was dropped, warnings.

    The window is the whole trace (first start to last end of each device's operations) unless given.
    """
    analysis = trace if isinstance(trace, Analysis) else Analysis(trace)
    trace = analysis.trace
    locator = Locator(trace)
    devices = [_device(analysis, pair, window) for pair in analysis.rows]
    waits = analysis.waits.take(analysis.waits.within(window))
    return {
        "schema": SCHEMA, "devices": devices, "waits": describe_waits(trace, waits, locator),
        "dropped": dict(trace.dropped), "warnings": [*trace.warnings, *caveats(analysis)],
    }  # fmt: skip


def _device(analysis: Analysis, pair: tuple[int, int], window: Window | None) -> dict[str, Any]:
    trace = analysis.trace
    low, high = analysis.window(pair, window)
    idle = analysis.idle(pair, window)
    rows, ops = analysis.rows[pair], trace.ops
    inside = rows[(ops.end_ns[rows] > low) & (ops.start_ns[rows] < high) | (ops.start_ns[rows] == low)]
    launches = ops.launch[inside]
    distance = analysis.launch_to_start_ns(pair, window) / 1e3
    mean, most = analysis.headroom(pair).mean_max_us((low, high))
    p50, p95 = np.percentile(distance, [50, 95]) if len(distance) else (None, None)
    total = idle.total_ns()
    return {
        "process": trace.process_label(pair[0]),
        "device": pair[1],
        "window_ns": [low, high],
        "busy_ns": high - low - total,
        "idle_ns": total,
        "copy_only_ns": analysis.copy_only_ns(pair, window),
        "idle_by_cause_ns": idle.by_cause_ns(),
        "ops": len(inside),
        "launches": len(np.unique(launches[launches >= 0])),
        "headroom_us": {"mean": mean, "max": most},
        "launch_to_start_us": {"p50": None if p50 is None else float(p50), "p95": None if p95 is None else float(p95)},
    }


def caveats(analysis: Analysis) -> list[str]:
    """What a reader must know before trusting figures from this trace."""
    trace, ops = analysis.trace, analysis.trace.ops
    notes = []
    unlinked = int(((ops.launch < 0) & ~analysis.carry_in).sum())
    carried = int(analysis.carry_in.sum())
    if carried:
        notes.append(f"{carried} operations at the head were launched before the recording: carried in, H(0) > 0")
    if unlinked:
        notes.append(f"{unlinked} of {len(ops)} operations have no recorded launch; idle that they end is 'unknown'")
    violations = int(analysis.clock_violation.sum())
    if violations:
        notes.append(f"{violations} operations start before their own launch: the host and device clocks disagree")
    for pair in analysis.rows:
        if len(analysis.streams(pair)) > 1:
            notes.append(
                f"device {pair[1]} runs {len(analysis.streams(pair))} streams: its summed headroom drains faster than "
                "unit rate and launch-to-start distance includes waiting for other streams"
            )
    empty = empty_graph_launches(analysis)
    if empty:
        notes.append(f"{empty} graph launches have no recorded device operations: their device time is missing")
    if len(analysis.waits) and not (trace.spans.kind == PYTHON).any():
        notes.append(NO_STACKS)
    return notes


def empty_graph_launches(analysis: Analysis) -> int:
    """Graph launches that own no device operation (replay recorded without its kernels)."""
    calls = analysis.trace.calls
    graph = np.flatnonzero(calls.kind == GRAPH_LAUNCH)
    return int(len(graph) - np.isin(graph, analysis.launches).sum())
