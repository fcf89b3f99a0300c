"""Is a trace synchronization-free? Two tests and an honest third answer.

Test 1: no blocking wait (D2H copy, synchronise call, polling) on a submitting thread. Test 2: no submission-bound
idle interval above a stated threshold. Incomplete data cannot pass: the answer is then "cannot tell".

Source: report Section 8.5 and Appendix B.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from workbench.traces.holes import holes
from workbench.traces.idle import SUBMISSION, SYNC, Analysis, Window
from workbench.traces.lookup import NO_STACKS, Locator
from workbench.traces.trace import Trace
from workbench.traces.waits import FINAL_SYNC, NOT_COUNTED, describe_waits

IDLE_THRESHOLD_US = 20.0
LISTED = 50


@dataclass(frozen=True)
class Verdict:
    """`sync_free` is True, False, or None for "cannot tell"; `reasons` says why; `offences` groups waits by source."""

    sync_free: bool | None
    reasons: list[str]
    offences: list[dict[str, Any]]
    submission_idle: list[dict[str, Any]]
    idle_threshold_us: float
    window_ns: tuple[int, int] | None
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 synchronization-free, 1 not, 2 cannot tell."""
        return (True, False, None).index(self.sync_free)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        told = {f.name: getattr(self, f.name) for f in fields(self)}
        verdict = ("sync-free", "not sync-free", "cannot tell")[self.exit_code]
        head = {"schema": 1, "verdict": verdict, "sync_free": self.sync_free, "exit_code": self.exit_code}
        return head | told | {"window_ns": list(self.window_ns) if self.window_ns else None}

    @property
    def headline(self) -> str:
        """The verdict in words; a GPU that runs dry with no wait to blame is told apart."""
        if self.sync_free is False and not self.offences:
            return "no blocking wait, but the GPU runs dry"
        return ("synchronization-free", "NOT synchronization-free", "cannot tell")[self.exit_code]

    def __str__(self) -> str:
        lines = [self.headline, *(f"- {r}" for r in self.reasons)]
        for o in self.offences:
            where = o["line"] or o["op"] or o["call"]
            lines.append(
                f"  {o['count']} x {o['kind']} at {where}: {o['total_ns'] / 1e3:.1f} us, longest "
                f"{o['max_ns'] / 1e3:.1f} us" + (f", in {o['range']}" if o["range"] else "")
            )
        return "\n".join(lines + [f"note: {n}" for n in self.notes])


def verify_trace(
    trace: Trace | Analysis,
    *,
    window: Window | None = None,
    idle_threshold_us: float = IDLE_THRESHOLD_US,
    judge_idle: bool = True,
) -> Verdict:
    """Judge a trace (see the module) within a window, default the whole trace.

    Raises:
        ValueError: the threshold is negative or not finite.
    """
    if not (0 <= idle_threshold_us < float("inf")):
        raise ValueError(f"idle threshold: expected a finite time >= 0 us, got {idle_threshold_us!r}")
    analysis = trace if isinstance(trace, Analysis) else Analysis(trace)
    offences, exempt = _offences(analysis, window)
    lengths, starved = _submission_idle(analysis, window, idle_threshold_us)
    unknown = holes(analysis, window, idle_threshold_us * 1e3 if judge_idle else None)
    notes = []
    if exempt:
        notes.append(f"{exempt} final device synchronise (the profiler's own) is exempt")
    rest = _idle_waits(analysis, window)
    if rest and offences:
        notes.append(
            f"not counted: {rest} synchronise calls that {NOT_COUNTED} (a what-if without waits drops them too)"
        )
    if offences and not Locator(analysis.trace).has_stacks:
        notes.append(NO_STACKS)
    reasons = []
    if offences:
        n, total = sum(o["count"] for o in offences), sum(o["total_ns"] for o in offences)
        waits = "1 blocking wait holds" if n == 1 else f"{n} blocking waits hold"
        reasons.append(f"{waits} the host for {total / 1e3:.1f} us")
    if len(lengths) and judge_idle:
        worst, total = int(lengths.max()), int(lengths.sum())
        intervals = f"{len(lengths)} submission-bound idle interval{'s' if len(lengths) > 1 else ''}"
        reasons.append(
            f"{intervals} above {idle_threshold_us:g} us ({total / 1e3:.1f} us in all, longest {worst / 1e3:.1f} us)"
        )
    if reasons:
        verdict: bool | None = False
        notes += [f"incomplete data: {u}" for u in unknown]
    elif unknown:
        verdict, reasons = None, unknown
    else:
        verdict = True
        reasons = [
            f"no blocking wait and no submission-bound idle interval above {idle_threshold_us:g} us"
            if judge_idle
            else "no blocking wait"
        ]
    return Verdict(verdict, reasons, offences, starved, float(idle_threshold_us), window, notes)


def _idle_waits(analysis: Analysis, window: Window | None) -> int:
    """Synchronise calls of submitting threads that are no offence."""
    waits = analysis.waits
    return int((waits.submits & ~waits.counted() & waits.within(window)).sum())


def _offences(analysis: Analysis, window: Window | None) -> tuple[list[dict[str, Any]], int]:
    trace, waits = analysis.trace, analysis.waits
    inside = waits.within(window)
    rows = np.flatnonzero(waits.counted() & inside)
    caused = np.zeros(len(waits) + 1, np.int64)
    for pair in analysis.rows:
        idle = analysis.idle(pair, window)
        sync = idle.cause == SYNC
        np.add.at(caused, idle.wait[sync], idle.length_ns[sync])
    groups: dict[tuple[Any, ...], list[tuple[dict[str, Any], int]]] = {}
    for i, wait in zip(rows, describe_waits(trace, waits.take(rows))):
        call = trace.names[trace.calls.name[waits.call[i]]]
        groups.setdefault((wait["kind"], call, wait["line"], wait["op"]), []).append((wait, int(caused[i])))
    found = [_offence(call, *zip(*group)) for (_, call, _, _), group in groups.items()]
    exempt = int((inside & (waits.kind == FINAL_SYNC) & waits.submits).sum())
    return sorted(found, key=lambda g: -g["total_ns"]), exempt


def _offence(call: str, waits: Sequence[dict[str, Any]], idle_ns: Sequence[int]) -> dict[str, Any]:
    """Return what the waits of one place have in common, and their sums."""
    lengths = [w["duration_ns"] for w in waits]
    ranges = list(dict.fromkeys(w["range"] for w in waits))
    one = ranges[0] if len(ranges) == 1 else f"{next(filter(None, ranges))} and {len(ranges) - 1} more"
    return {
        "kind": waits[0]["kind"], "call": call, "line": waits[0]["line"], "op": waits[0]["op"], "range": one,
        "count": len(waits), "total_ns": sum(lengths), "max_ns": max(lengths), "gpu_idle_ns": sum(idle_ns),
        "first_ns": waits[0]["start_ns"],
    }  # fmt: skip


def _submission_idle(
    analysis: Analysis, window: Window | None, threshold_us: float
) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Lengths (ns) of all submission-bound intervals above the threshold, and the longest of them with their place."""
    trace = analysis.trace
    found: list[tuple[int, int, int, tuple[int, int]]] = []
    for pair in analysis.rows:
        idle = analysis.idle(pair, window)
        rows = np.flatnonzero((idle.cause == SUBMISSION) & (idle.length_ns > threshold_us * 1e3))
        found += [(int(idle.length_ns[i]), int(idle.start_ns[i]), int(idle.ended_by[i]), pair) for i in rows]
    found.sort(reverse=True)
    locator = Locator(trace)
    out = []
    for length_ns, start_ns, op, pair in found[:LISTED]:
        call = trace.ops.launch[op]
        where = locator.where(int(trace.calls.thread[call]), int(trace.calls.start_ns[call]))
        out.append({
            "process": trace.process_label(pair[0]), "device": pair[1], "start_ns": start_ns,
            "duration_ns": length_ns, "before": trace.names[trace.ops.name[op]], **where.as_dict(),
        })  # fmt: skip
    return np.array([f[0] for f in found], np.int64), out
