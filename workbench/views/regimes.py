"""What one captured microbatch says about the submission regime: spans, waits, blocks ahead, idle, headroom, what-if.

Source: report, Section 8.1 and Appendix B.5 (Figures 74 and 75).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from workbench.traces.idle import CAUSES, Analysis, union_ns
from workbench.traces.kineto import read_kineto
from workbench.traces.ranges import COLLECTIVE, find_ranges
from workbench.traces.replay import what_if
from workbench.traces.skew import collective_skew, start_skew

BINS = 240
"""Of the utilisation band and the headroom curve."""
MERGE_NS = 3_000
"""Device work with smaller gaps is drawn as one box: kernels follow each other within about a microsecond."""


def capture_rows(paths: Mapping[str, Path], microbatch: str) -> list[dict[str, Any]]:
    """Return the rows of `analyse` and `kernels` for captures that are shown together, by name of their variant."""
    rows: list[dict[str, Any]] = []
    summaries: dict[str, dict[str, Any]] = {}
    for variant, path in paths.items():
        captured = [{"variant": variant, **r} for r in analyse(path, microbatch)]
        rows += captured
        summaries[variant] = captured[-1]
    # Equal width everywhere, or the strips could not be compared.
    width = max(s["zoom_us"] for s in summaries.values())
    for variant, summary in summaries.items():
        found = kernels(paths[variant], microbatch, summary["zoom_start_us"], width)
        rows += [{"variant": variant, **r} for r in found]
        summary["zoom_us"] = width
    return rows


def skew_rows(paths: Sequence[Path], microbatch: str) -> list[dict[str, Any]]:
    """Return how far the ranks lie apart in one captured microbatch; `paths` in rank order.

    Parts: ``collective`` and ``block start`` (one row each: who came last, by how much), ``rank`` (one per rank: time
    in collectives, of which waiting for peers; time in the kernels of dispatch and combine).
    """
    analyses = [Analysis(read_kineto(p)) for p in paths]
    wholes = [find_ranges(a, f"^{microbatch}$") for a in analyses]
    windows = [(int(w.host_start_ns[0]), int(w.host_end_ns[0])) for w in wholes]
    together = collective_skew(analyses, windows)
    rows = [
        {"part": "collective", "label": c["name"], "block": c["index"], "skew_us": round(c["skew_us"], 3),
         "last_rank": c["last"], "duration_us": round(c["duration_us"], 3)}
        for c in together
    ]  # fmt: skip
    for pattern in (r"^block \d+ forward$", r"^block \d+ backward$"):
        rows += [
            {"part": "block start", "label": s["name"], "block": int(s["name"].split()[1]),
             "skew_us": round(s["skew_us"], 3), "last_rank": s["last"]}
            for s in start_skew(analyses, pattern, windows)
        ]  # fmt: skip
    for rank in range(len(paths)):
        waited = sum(c["waited_us"][rank] for c in together)
        rows.append({"part": "rank", "rank": rank, "collectives": len(together), "peer_wait_us": round(waited, 3),
                     "communication_us": round(waited + sum(c["duration_us"] for c in together), 3),
                     "row_kernels_us": _kernel_us(analyses[rank], windows[rank], "_dispatch", "_combine")})  # fmt: skip
    return rows


def _kernel_us(analysis: Analysis, window: tuple[int, int], *prefixes: str) -> float:
    """Device time of the kernels so named that were launched within the window."""
    ops, calls = analysis.trace.ops, analysis.trace.calls
    named = [name.startswith(prefixes) for name in analysis.trace.names]
    mine = [i for i in (ops.launch >= 0).nonzero()[0] if named[ops.name[i]]]
    starts = calls.start_ns[ops.launch[mine]]
    inside = (starts >= window[0]) & (starts < window[1])
    return _us((ops.end_ns[mine] - ops.start_ns[mine])[inside].sum())


def analyse(path: Path, microbatch: str, zoom_blocks: tuple[int, int] = (3, 5)) -> list[dict[str, Any]]:
    """Return rows about one microbatch of a trace that `workbench.measure.regimes.cut` wrote.

    Times are microseconds from the host's start of the microbatch. Parts: ``block`` (one per forward block), ``lane``
    (boxes), ``kernel`` (single operations inside the magnified window), ``band`` (busy share and headroom per bin),
    ``capture`` (one summary).
    """
    analysis = Analysis(read_kineto(path))
    (pair,) = list(analysis.rows)
    whole = find_ranges(analysis, f"^{microbatch}$")
    low, host_end = int(whole.host_start_ns[0]), int(whole.host_end_ns[0])
    forward = _of_microbatch(find_ranges(analysis, r"^block \d+ forward$"), low, host_end)
    backward = _of_microbatch(find_ranges(analysis, r"^block \d+ backward$"), low, host_end)
    high = max(r["device_end"] for r in (*forward, *backward))
    blocks = _block_rows(analysis, pair, forward, low)
    lanes = _lane_rows(analysis, pair, (low, high), forward, backward)
    start = forward[zoom_blocks[0]]["device_start"]
    width = forward[min(zoom_blocks[1], len(forward) - 1)]["device_end"] - start
    summary = _summary(analysis, pair, (low, high), forward, backward, host_end)
    summary |= {"zoom_start_us": _us(start - low), "zoom_us": _us(width)}
    return [*blocks, *lanes, *_band_rows(analysis, pair, (low, high)), summary]


def kernels(path: Path, microbatch: str, start_us: float, width_us: float) -> list[dict[str, Any]]:
    """Return single device operations inside a magnified window, on the clock of `analyse`."""
    analysis = Analysis(read_kineto(path))
    ops, names = analysis.trace.ops, analysis.trace.names
    low = int(find_ranges(analysis, f"^{microbatch}$").host_start_ns[0])
    a, b = low + int(start_us * 1e3), low + int((start_us + width_us) * 1e3)
    out = []
    for i in ((ops.end_ns > a) & (ops.start_ns < b)).nonzero()[0]:
        kind = "communication" if COLLECTIVE.search(names[ops.name[i]]) else "copy" if ops.kind[i] else "gpu_execute"
        start, end = max(a, int(ops.start_ns[i])) - low, min(b, int(ops.end_ns[i])) - low
        label = names[ops.name[i]][:60]
        out.append({"part": "kernel", "lane": "GPU kernels", "label": label, "kind": kind, "start_us": _us(start),
                    "end_us": _us(end)})  # fmt: skip
    return out


def _us(ns: Any) -> float:
    return round(float(ns) / 1e3, 3)


def _of_microbatch(table: Any, low: int, high: int) -> list[dict[str, Any]]:
    rows = [
        {"name": n, "block": int(n.split()[1]), "host_start": int(a), "host_end": int(b), "device_start": int(c),
         "device_end": int(d)}
        for n, a, b, c, d in zip(table.name, table.host_start_ns, table.host_end_ns, table.device_start_ns,
                                 table.device_end_ns)
        if low <= a < high and c >= 0
    ]  # fmt: skip
    return sorted(rows, key=lambda r: r["host_start"])


def _waits_within(analysis: Analysis, start: int, end: int) -> np.ndarray:
    waits = analysis.waits
    return (waits.counted() & (waits.start_ns >= start) & (waits.start_ns < end)).nonzero()[0]


def _block_rows(analysis: Analysis, pair: Any, forward: list[dict[str, Any]], low: int) -> list[dict[str, Any]]:
    rows = []
    for i, block in enumerate(forward):
        waits = _waits_within(analysis, block["host_start"], block["host_end"])
        begun = [b["block"] for b in forward if b["device_start"] <= block["host_start"]]
        following = forward[i + 1]["device_start"] if i + 1 < len(forward) else None
        idle = 0
        if following is not None:
            idle = analysis.idle(pair, (block["device_start"], following)).total_ns()
        rows.append({
            "part": "block", "block": block["block"], "waits": len(waits),
            "wait_us": _us((analysis.waits.end_ns[waits] - analysis.waits.start_ns[waits]).sum()),
            "ahead": block["block"] - max(begun, default=-1),
            "host_start_us": _us(block["host_start"] - low), "host_end_us": _us(block["host_end"] - low),
            "device_start_us": _us(block["device_start"] - low), "device_end_us": _us(block["device_end"] - low),
            "idle_us": _us(idle),
        })  # fmt: skip
    return rows


def _merged(start: np.ndarray, end: np.ndarray, gap: int) -> list[tuple[int, int]]:
    out: list[list[int]] = []
    for a, b in zip(start.tolist(), end.tolist()):
        if out and a - out[-1][1] <= gap:
            out[-1][1] = max(out[-1][1], b)
        else:
            out.append([a, b])
    return [(a, b) for a, b in out]


def _lane_rows(
    analysis: Analysis, pair: Any, window: tuple[int, int], forward: list[Any], backward: list[Any]
) -> list[dict[str, Any]]:
    low, high = window
    calls, ops, waits = analysis.trace.calls, analysis.trace.ops, analysis.waits
    rows: list[dict[str, Any]] = []

    def box(lane: str, label: str, kind: str, start: int, end: int) -> None:
        if end > low and start < high:
            rows.append({"part": "lane", "lane": lane, "label": label, "kind": kind,
                         "start_us": _us(max(start, low) - low), "end_us": _us(min(end, high) - low)})  # fmt: skip

    counted = waits.counted().nonzero()[0]
    launches = analysis.launches[(calls.end_ns[analysis.launches] > low) & (calls.start_ns[analysis.launches] < high)]
    for a, b in _merged(calls.start_ns[launches], calls.end_ns[launches], (high - low) // 400):
        box("CUDA API", "launches", "cpu_submit", a, b)
    for i in counted:
        name = analysis.trace.names[calls.name[waits.call[i]]]
        box("CUDA API", name, "sync_wait", int(waits.start_ns[i]), int(waits.end_ns[i]))
    for letter, blocks in (("F", forward), ("B", backward)):
        for block in blocks:
            label = f"{letter}{block['block']}"
            box("CPU blocks", label, "cpu_submit" if letter == "F" else "host_work", block["host_start"],
                block["host_end"])  # fmt: skip
            box("GPU blocks", label, "gpu_execute", block["device_start"], block["device_end"])
    mine = analysis.rows[pair]
    for a, b in _merged(ops.start_ns[mine], ops.end_ns[mine], MERGE_NS):
        box("GPU kernels", "", "gpu_execute", a, b)
    idle = analysis.idle(pair, window)
    for a, b, cause in zip(idle.start_ns, idle.end_ns, idle.cause):
        if b - a > MERGE_NS:
            box("GPU kernels", f"idle: {CAUSES[cause]}", "idle", int(a), int(b))
    return rows


def _band_rows(analysis: Analysis, pair: Any, window: tuple[int, int]) -> list[dict[str, Any]]:
    low, high = window
    ops, mine = analysis.trace.ops, analysis.rows[pair]
    edges = np.linspace(low, high, BINS + 1).astype(np.int64)
    curve = analysis.headroom(pair)
    return [
        {"part": "band", "start_us": _us(a - low), "end_us": _us(b - low),
         "busy": round(union_ns(ops.start_ns[mine], ops.end_ns[mine], int(a), int(b)) / (b - a), 4),
         "headroom_us": _us(curve.at(a))}
        for a, b in pairwise(edges)
    ]  # fmt: skip


def _summary(
    analysis: Analysis, pair: Any, window: tuple[int, int], forward: list[Any], backward: list[Any], host_end: int
) -> dict[str, Any]:
    low, high = window
    begin, end = forward[0]["device_start"], forward[-1]["device_end"]
    idle = analysis.idle(pair, (begin, end))
    submitted_at = forward[-1]["host_end"]
    not_begun = sum(b["device_start"] > submitted_at for b in forward)
    gaps = idle.end_ns - idle.start_ns
    waits = _waits_within(analysis, low, host_end)
    launched = analysis.trace.calls.start_ns[analysis.launches]
    device_us = _us(high - begin)
    replayed = what_if(analysis, remove_waits=True)
    gain_us = replayed["replayed_us"] - replayed["predicted_us"]
    return {
        "part": "capture",
        "forward_us": _us(end - begin), "forward_idle_us": _us(idle.total_ns()),
        **{f"idle_{cause}_us": _us(ns) for cause, ns in idle.by_cause_ns().items()},
        "idle_intervals": int((gaps > MERGE_NS).sum()), "longest_idle_us": _us(gaps.max() if len(gaps) else 0),
        "waits": len(waits), "wait_us": _us((analysis.waits.end_ns[waits] - analysis.waits.start_ns[waits]).sum()),
        "launches": int(((launched >= low) & (launched < host_end)).sum()),
        "submitted_us": _us(host_end - low), "forward_submitted_us": _us(submitted_at - low),
        "not_begun_at_submission": not_begun, "device_us": device_us,
        "device_idle_us": _us(analysis.idle(pair, (begin, high)).total_ns()),
        "predicted_us": round(device_us - gain_us, 3),
        "backward_blocks": len(backward),
    }  # fmt: skip
