"""How far the ranks of one program lie apart: who comes last to each collective, and how long the others wait for it.

Source: report, Table 51 (rank skew).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from workbench.traces.idle import Analysis, Window
from workbench.traces.ranges import COLLECTIVE, find_ranges
from workbench.traces.trace import KERNEL, TraceError

_ARGUMENTS = re.compile(r"[<(].*")


def collective_skew(analyses: Sequence[Analysis], windows: Sequence[Window]) -> list[dict[str, Any]]:
    """Return one row per collective that the ranks launched in their windows, in order of launch.

    A collective ends on all ranks at once, so the rank whose kernel is shortest came last, and what another rank's
    kernel lasts longer is its wait for that rank. No clock is compared between ranks.

    Args:
        analyses: one per rank, in rank order.
        windows: per rank, host time in ns within which the launches lie.

    Returns:
        Rows ``index, name, duration_us`` (the shortest), ``waited_us`` (per rank), ``skew_us`` (the longest wait),
        ``last`` (position of the rank that came last).

    Raises:
        TraceError: the ranks launched different collectives.
    """
    found = [_collectives(a, w) for a, w in zip(analyses, windows, strict=True)]
    lengths = [len(f) for f in found]
    if len(set(lengths)) > 1:
        raise TraceError(f"the ranks launched different numbers of collectives in their windows: {lengths}")
    rows = []
    for index, same in enumerate(zip(*found)):
        names = {name for name, _ in same}
        if len(names) > 1:
            raise TraceError(f"collective {index} differs between the ranks: {', '.join(sorted(names))}")
        durations = np.array([duration for _, duration in same], dtype=float) / 1e3
        waited = durations - durations.min()
        rows.append({
            "index": index, "name": same[0][0], "duration_us": float(durations.min()), "waited_us": waited.tolist(),
            "skew_us": float(waited.max()), "last": int(durations.argmin()),
        })  # fmt: skip
    return rows


def start_skew(analyses: Sequence[Analysis], pattern: str, windows: Sequence[Window]) -> list[dict[str, Any]]:
    """Return per range, by name, how far the ranks' devices begin it apart; one clock over the ranks is assumed.

    Args:
        analyses: one per rank, in rank order.
        pattern: regular expression of range names, each at most once in a window.
        windows: per rank, host time in ns within which the ranges begin.

    Returns:
        Rows ``name, skew_us`` (last start minus first), ``last`` (position of the rank that began last).
    """
    starts: list[dict[str, int]] = []
    for analysis, (low, high) in zip(analyses, windows, strict=True):
        table = find_ranges(analysis, pattern)
        inside = (table.host_start_ns >= low) & (table.host_start_ns < high) & (table.device_start_ns >= 0)
        base = analysis.trace.base_ns
        starts.append({table.name[i]: int(table.device_start_ns[i]) + base for i in np.flatnonzero(inside)})
    return [
        {"name": name, "skew_us": spread_us(begun.values()), "last": max(begun, key=begun.__getitem__)}
        for name, begun in by_name(starts).items()
        if len(begun) == len(starts)
    ]


def by_name(ranks: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, Any]]:
    """What each name stands for on which rank, by the rank's position; names in the order of their appearance."""
    found: dict[str, dict[int, Any]] = {}
    for position, values in enumerate(ranks):
        for name, value in values.items():
            found.setdefault(name, {})[position] = value
    return found


def spread_us(times_ns: Collection[int]) -> float:
    """How far times of the ranks lie apart, last minus first."""
    return (max(times_ns) - min(times_ns)) / 1e3


def _collectives(analysis: Analysis, window: Window) -> list[tuple[str, int]]:
    """(name, duration in ns) of the collectives launched within the window, in order of launch."""
    ops, calls, names = analysis.trace.ops, analysis.trace.calls, analysis.trace.names
    rows = np.flatnonzero(analysis.trace.named(COLLECTIVE, ops.name) & (ops.kind == KERNEL) & (ops.launch >= 0))
    launched = calls.start_ns[ops.launch[rows]]
    rows = rows[(launched >= window[0]) & (launched < window[1])]
    rows = rows[np.lexsort((ops.start_ns[rows], calls.start_ns[ops.launch[rows]]))]
    short = {i: _ARGUMENTS.sub("", names[i]).removeprefix("void ") for i in set(ops.name[rows].tolist())}
    return [(short[int(ops.name[i])], int(ops.end_ns[i] - ops.start_ns[i])) for i in rows]
