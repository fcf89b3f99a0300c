"""Drawing of real traces: lanes and headroom as a plotly figure, and the columns of the interactive view."""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.experiment import Check, Result
from workbench.traces import read
from workbench.traces.idle import CAUSES, Analysis, Headroom, Window
from workbench.traces.lookup import Locator
from workbench.traces.trace import COPY, RANGE
from workbench.traces.waits import WAIT_KINDS, describe_waits

if TYPE_CHECKING:
    import plotly.graph_objects as go

MAX_BOXES = 1200
VIEW_EVENTS = 100_000
UNCHANGED, REMOVED, MERGED = "replay, unchanged", "waits removed", "one submission per step"
SCALED = "waits removed, at the host's speed in the loop without reads"
# Why a what-if of the recorded pair may miss; shown beside a claim that does not hold.
MISSED = {
    MERGED: "the eager loop starved the GPU, so its trace holds neither the gaps between a graph's kernels nor the "
    "cost of its launch; where kernels are long neither counts"
}


@dataclass(frozen=True)
class OpenedTrace:
    """One trace, read and analysed once: what a result's tables, its view and its panel are made from."""

    analysis: Analysis

    @property
    def note(self) -> str:
        """The GPU where the trace says it, for the badge."""
        gpus = self.analysis.trace.metadata.get("deviceProperties")
        gpu = gpus[0].get("name") if isinstance(gpus, list) and gpus and isinstance(gpus[0], dict) else None
        return f" ({gpu or 'of a GPU that it does not name'})"

    def shown(self, params: Any) -> tuple[Analysis, Window | None]:
        """Return the analysis, and the window that the parameters choose."""
        from workbench.traces.ranges import parse_window

        return self.analysis, parse_window(self.analysis.trace, getattr(params, "window", None))


def open_trace(path: str | Path) -> OpenedTrace:
    """Read and analyse a trace."""
    return OpenedTrace(Analysis(read(Path(path))))


def _lanes(analysis: Analysis, low: int, high: int) -> list[tuple[str, str, np.ndarray, np.ndarray, list[str]]]:
    """(lane, kind, start, end, names) per lane and kind within a window; waits and idle are lanes' boxes too."""
    trace = analysis.trace
    calls, ops, waits = trace.calls, trace.ops, analysis.waits
    out = []
    threads = np.unique(calls.thread[analysis.launches])
    for thread in threads:
        label = f"CPU thread {trace.threads[thread][1]}"
        rows = np.flatnonzero((calls.thread == thread) & (calls.end_ns > low) & (calls.start_ns < high))
        waiting = np.isin(rows, waits.call[waits.blocking]) if len(waits) else np.zeros(len(rows), bool)
        submit = rows[np.isin(rows, analysis.launches) & ~waiting]
        out.append(
            (
                label,
                "cpu_submit",
                calls.start_ns[submit],
                calls.end_ns[submit],
                [trace.names[i] for i in calls.name[submit]],
            )
        )
        mine = np.flatnonzero(
            (waits.thread == thread) & waits.blocking & (waits.end_ns > low) & (waits.start_ns < high)
        )
        out.append(
            (label, "sync_wait", waits.start_ns[mine], waits.end_ns[mine], [WAIT_KINDS[k] for k in waits.kind[mine]])
        )
    for pair in analysis.rows:
        rows = analysis.rows[pair]
        rows = rows[(ops.end_ns[rows] > low) & (ops.start_ns[rows] < high)]
        for stream in np.unique(ops.stream[rows]):
            label = f"GPU {pair[1]} stream {stream}"
            for kind, chosen in (("gpu_execute", ops.kind[rows] != COPY), ("copy", ops.kind[rows] == COPY)):
                mine = rows[(ops.stream[rows] == stream) & chosen]
                out.append(
                    (label, kind, ops.start_ns[mine], ops.end_ns[mine], [trace.names[i] for i in ops.name[mine]])
                )
        idle = analysis.idle(pair, (low, high))
        out.append((f"GPU {pair[1]} idle", "idle", idle.start_ns, idle.end_ns, [CAUSES[c] for c in idle.cause]))
    return [(lane, kind, start, end, names) for lane, kind, start, end, names in out if len(start)]


def _aggregate(
    start: np.ndarray, end: np.ndarray, names: list[str], gap: int
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Merge boxes closer than `gap` (start sorted), so that a long window stays a few hundred boxes."""
    if len(start) < 2:
        return start, end, names
    reach = np.maximum.accumulate(end)
    first = np.concatenate([[True], start[1:] > reach[:-1] + gap])
    at = np.flatnonzero(first)
    count = np.diff(np.concatenate([at, [len(start)]]))
    merged = [names[i] if n == 1 else f"{n} boxes from {names[i]}" for i, n in zip(at, count)]
    return start[at], reach[np.concatenate([at[1:] - 1, [len(start) - 1]])], merged


def _binned(
    start: np.ndarray, end: np.ndarray, names: list[str], width: int, longest: bool
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """At most one box per `width` ns: from the first start to the last end in it, or (`longest`) its longest box."""
    if not len(start):
        return start, end, names
    at = np.flatnonzero(np.concatenate([[True], np.diff(start // width) > 0]))
    if longest:  # a joined box would count the work between idle intervals as idle
        keep = np.lexsort((start - end, start // width))[at]
        return start[keep], end[keep], [names[i] for i in keep]
    count = np.diff(np.concatenate([at, [len(start)]]))
    joined = [names[i] if n == 1 else f"{n} boxes from {names[i]}" for i, n in zip(at, count)]
    return start[at], np.maximum.reduceat(end, at), joined


def _thin(curve: Headroom, low: int, high: int, points: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    """x in us from `low` and headroom in us for drawing; above `points` breakpoints, the extremes of equal bins."""
    inside = (curve.t_ns >= low) & (curve.t_ns <= high)
    t = np.repeat(curve.t_ns[inside], 2)
    value = np.column_stack([curve.before[inside], curve.after[inside]]).ravel()
    if len(t) > 2 * points:
        bins = np.array_split(np.arange(len(t)), points)
        keep = np.unique(np.concatenate([[b[value[b].argmin()], b[value[b].argmax()]] for b in bins]))
        t, value = t[keep], value[keep]
    return (t - low) / 1e3, value / 1e3


Tables = dict[str, list[dict[str, Any]]]


def trace_tables(analysis: Analysis, window: Window | None, variant: str) -> Tables:
    """The tables of one trace, times in us from the window's start.

    ``boxes``: `trace, lane, kind, label, start_us, end_us`; ``headroom``: `trace, lane, at_us, queued_us`; ``sums``:
    `trace, lane, quantity, value` (us, waits as a count).
    """
    low, high = _window(analysis, window)
    gap = max(0, (high - low) // MAX_BOXES)
    boxes: list[dict[str, Any]] = []
    for lane, kind, start, end, names in _lanes(analysis, low, high):
        if len(start) > MAX_BOXES // 4:
            if kind == "idle":  # merging idle intervals over the work between them would overstate idle time
                seen = np.flatnonzero(end - start >= gap)
                start, end, names = start[seen], end[seen], [names[i] for i in seen]
            else:
                start, end, names = _aggregate(start, end, names, gap)
        boxes += [
            {"trace": variant, "lane": lane, "kind": kind, "label": name, "start_us": a, "end_us": b}
            for a, b, name in zip(((start - low) / 1e3).tolist(), ((end - low) / 1e3).tolist(), names)
        ]
    headroom, sums = [], []
    for pair in analysis.rows:
        lane = f"GPU {pair[1]}"
        x, y = _thin(analysis.headroom(pair), low, high)
        headroom += [
            {"trace": variant, "lane": lane, "at_us": a, "queued_us": v} for a, v in zip(x.tolist(), y.tolist())
        ]
        idle = analysis.idle(pair, (low, high))
        found = {"window": high - low, "idle": idle.total_ns(), **idle.by_cause_ns()}
        sums += [{"trace": variant, "lane": lane, "quantity": k, "value": v / 1e3} for k, v in found.items()]
    waits = analysis.waits
    inside = waits.counted() & (waits.end_ns > low) & (waits.start_ns < high)
    sums.append({"trace": variant, "lane": "host", "quantity": "waits", "value": float(inside.sum())})
    return {"boxes": boxes, "headroom": headroom, "sums": sums}


def _window(analysis: Analysis, window: Window | None) -> Window:
    if window is not None:
        return window
    ops = analysis.trace.ops
    if not len(ops):
        return 0, 1
    return int(ops.start_ns.min()), int(ops.end_ns.max())


def trace_figure(tables: Tables, title: str = "") -> go.Figure:
    """Lanes and headroom curve of each trace in `trace_tables`, a pair of panels each; long windows are aggregated."""
    from workbench.core.colours import COLOURS
    from workbench.views.plotting import draw_lanes, figure

    variants = list(dict.fromkeys(r["trace"] for r in tables["sums"]))
    n = len(variants)
    fig = figure(
        title,
        rows=2 * n,
        height=150 + 330 * n,
        row_heights=[0.6, 0.4] * n,
        shared_xaxes="all",
        vertical_spacing=0.05 if n > 1 else 0.08,
    )
    seen: set[str] = set()
    for i, variant in enumerate(variants):
        boxes, curve = ([r for r in tables[name] if r["trace"] == variant] for name in ("boxes", "headroom"))
        draw_lanes(
            fig,
            {
                "lane": [r["lane"] for r in boxes],
                "label": [html.escape(r["label"])[:80] for r in boxes],
                "start": [r["start_us"] for r in boxes],
                "end": [r["end_us"] for r in boxes],
                "kind": [r["kind"] for r in boxes],
            },
            row=2 * i + 1,
            labels=False,
            unit="us",
            seen=seen,
        )
        for lane in dict.fromkeys(r["lane"] for r in curve):
            points = [r for r in curve if r["lane"] == lane]
            fig.add_scatter(
                x=[r["at_us"] for r in points],
                y=[r["queued_us"] for r in points],
                mode="lines",
                name=f"headroom, {lane}",
                line={"color": COLOURS["headroom"], "width": 1.5},
                showlegend="headroom" not in seen,
                hovertemplate="%{x:.1f} us: %{y:.1f} us queued<extra></extra>",
                row=2 * i + 2,
                col=1,
            )
            seen.add("headroom")
        fig.update_yaxes(title_text="headroom, us", rangemode="tozero", row=2 * i + 2, col=1)
        if variant and n > 1:
            fig.add_annotation(
                text=f"<b>{html.escape(variant)}</b>",
                xref="x domain",
                yref="y domain",
                x=1,
                y=0.98,
                showarrow=False,
                xanchor="right",
                yanchor="top",
                row=2 * i + 2,
                col=1,
            )
    width = max([r["end_us"] for r in tables["boxes"]] + [r["at_us"] for r in tables["headroom"]], default=0.0)
    fig.update_xaxes(
        title_text=f"us from the window's start (boxes closer than {width / MAX_BOXES:.3g} us are joined)",
        row=2 * n,
        col=1,
    )
    return fig


def figure_of(result: Result) -> go.Figure:
    """The figure of a result whose tables are those of `trace_tables`."""
    return trace_figure({name: result.rows(name) for name in ("boxes", "headroom", "sums")}, result.experiment.title)


def view_arguments(
    analysis: Analysis, window: Window | None = None, *, title: str = "", badge: str = "", most: int = VIEW_EVENTS
) -> dict[str, Any]:
    """Keyword arguments of `workbench.widgets.trace_view` for a trace; the table jumps to waits and long idle times."""
    low, high = _window(analysis, window)
    trace, spans = analysis.trace, analysis.trace.spans
    parts = _lanes(analysis, low, high)
    for thread in np.unique(trace.calls.thread[analysis.launches]):
        rows = np.flatnonzero(
            (spans.thread == thread) & (spans.kind == RANGE) & (spans.end_ns > low) & (spans.start_ns < high)
        )
        if len(rows):
            parts.insert(
                0,
                (
                    f"ranges, thread {trace.threads[thread][1]}",
                    "host_work",
                    spans.start_ns[rows],
                    spans.end_ns[rows],
                    [trace.names[i] for i in spans.name[rows]],
                ),
            )
    total = sum(len(p[2]) for p in parts)
    if total > most:  # an exported notebook carries every event it shows
        width = max(1, (high - low) * len(parts) * 20 // (most * 19))  # lanes begin and end within a bin
        parts = [(lane, kind, *_binned(s, e, n, width, kind == "idle")) for lane, kind, s, e, n in parts]
    lanes = list(dict.fromkeys(p[0] for p in parts))[:64] or ["no device work"]
    parts = [p for p in parts if p[0] in lanes]
    names: dict[str, int] = {}
    kinds = list(dict.fromkeys(p[1] for p in parts))
    events = {
        "lane": np.concatenate([np.full(len(p[2]), lanes.index(p[0])) for p in parts] or [np.empty(0, int)]),
        "start_ns": np.concatenate([p[2] for p in parts] or [np.empty(0, np.int64)]),
        "end_ns": np.concatenate([p[3] for p in parts] or [np.empty(0, np.int64)]),
        "kind": np.concatenate([np.full(len(p[2]), kinds.index(p[1])) for p in parts] or [np.empty(0, int)]),
        "name": np.array([names.setdefault(n, len(names)) for p in parts for n in p[4]], int),
    }
    curves = []
    for pair in analysis.rows:
        curve = analysis.headroom(pair)
        keep = np.flatnonzero((curve.t_ns >= low) & (curve.t_ns <= high))
        keep = keep[:: max(1, len(keep) // 20_000)]
        curves.append(
            {
                "label": f"headroom, GPU {pair[1]}",
                "unit": "ns",
                "t_ns": curve.t_ns[keep],
                "before": curve.before[keep],
                "after": curve.after[keep],
            }
        )
    return {
        "title": title or trace.source,
        "badge": badge,
        "lanes": lanes,
        "events": events,
        "names": list(names),
        "kinds": kinds,
        "curves": curves,
        "table": _jump_table(analysis, low, high),
        "caption": "Idle: no stream of the device works. Headroom: submitted, unfinished device time.",
    }


def _jump_table(analysis: Analysis, low: int, high: int) -> dict[str, Any]:
    waits = analysis.waits
    rows = np.flatnonzero(waits.blocking & (waits.end_ns > low) & (waits.start_ns < high))
    rows = rows[np.argsort(waits.start_ns[rows] - waits.end_ns[rows], kind="stable")][:200]
    locator = Locator(analysis.trace)
    lines: list[list[str]] = []
    start, end = [], []
    for w in describe_waits(analysis.trace, waits.take(rows), locator):
        lines.append(
            [
                f"{(w['start_ns'] - low) / 1e3:.1f} us",
                f"{w['duration_ns'] / 1e3:.1f} us",
                w["kind"],
                w["line"] or w["op"] or "",
            ]
        )
        start.append(w["start_ns"])
        end.append(w["start_ns"] + w["duration_ns"])
    for pair in analysis.rows:
        idle = analysis.idle(pair, (low, high))
        longest = np.argsort(idle.start_ns - idle.end_ns, kind="stable")[:50]
        for i in longest:
            op = int(idle.ended_by[i])
            after = f"before {analysis.trace.names[analysis.trace.ops.name[op]][:60]}" if op >= 0 else ""
            lines.append(
                [
                    f"{(idle.start_ns[i] - low) / 1e3:.1f} us",
                    f"{(idle.end_ns[i] - idle.start_ns[i]) / 1e3:.1f} us",
                    f"GPU {pair[1]} idle: {CAUSES[idle.cause[i]]}",
                    after,
                ]
            )
            start.append(int(idle.start_ns[i]))
            end.append(int(idle.end_ns[i]))
    return {
        "title": "Waits and longest idle intervals",
        "columns": ["at", "length", "what", "where"],
        "rows": lines,
        "start_ns": start,
        "end_ns": end,
    }


def sums(result: Result) -> dict[str, dict[str, float]]:
    """The sums of each trace of a result, over its devices, us."""
    out: dict[str, dict[str, float]] = {}
    for r in result.rows("sums"):
        mine = out.setdefault(r["trace"], {})
        mine[r["quantity"]] = mine.get(r["quantity"], 0.0) + r["value"]
    return out


def sums_table(result: Result) -> Any:
    """The sums as a table: a row per quantity (us, waits as a count), a column per trace."""
    import polars as pl

    found = sums(result)
    names = list(dict.fromkeys(k for mine in found.values() for k in mine))
    columns = {trace: [mine.get(k) for k in names] for trace, mine in found.items()}
    return pl.DataFrame({"us": [k.replace("_", " ") for k in names], **columns})


def accounted(result: Result) -> Check:
    """Every idle interval has a cause, and the causes add up."""
    claim, worst = "Idle time by cause adds up to all idle time", 0.0
    devices = [mine for mine in sums(result).values() if "idle" in mine]
    if not devices:
        return Check(claim, None, "no device operations")
    for mine in devices:
        causes = sum(
            mine[k] for k in ("submission", "sync_blocked", "sync_rebuild", "turnaround", "dependency", "unknown")
        )
        worst = max(worst, abs(causes - mine["idle"]))
    return Check(claim, worst < 1e-6, f"largest difference {worst:.6f} us")


def prediction_checks(result: Result) -> list[Check]:
    """The unchanged replay within 2 %; what-ifs against what was measured in the same round, median over the rounds."""
    cases: dict[str, list[dict[str, float]]] = {}
    for r in result.rows("what_if"):
        cases.setdefault(r["case"], []).append(r)
    factors = sorted(r["factor"] for r in result.rows("host_speed"))
    checks = []
    for case, rounds in cases.items():
        ratios = sorted(r["predicted_us"] / r["measured_us"] for r in rounds)
        predicted, measured = (float(np.median([r[k] for r in rounds])) for k in ("predicted_us", "measured_us"))
        limit, median = (0.02 if case == UNCHANGED else 0.15), float(np.median(ratios))
        holds = abs(median - 1) <= limit
        checks.append(
            Check(
                f"What-if ({case}): predicted within {limit:.0%} of measured",
                holds,
                f"median ratio {median:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f} over {len(ratios)} rounds); medians: "
                f"predicted {predicted:.0f} us, measured {measured:.0f} us",
                known="" if holds else MISSED.get(case, ""),
            )
        )
    if factors:
        value = f"median {np.median(factors):.2f} ({factors[0]:.2f} to {factors[-1]:.2f} over {len(factors)} rounds)"
        checks.append(
            Check("Host time of the same code, without reads over with them (a value, no claim)", None, value)
        )
    return checks


def first_look_checks(result: Result) -> list[Check]:
    """The recorded pair: no wait and no idle from waits without `.item()`; one wait a block with it."""
    found = sums(result)
    checks = [accounted(result), *prediction_checks(result)]
    if {"without .item()", "with .item()"} <= set(found):
        free, item = found["without .item()"], found["with .item()"]
        waited = item["sync_blocked"] + item["sync_rebuild"]
        expected = result.params.blocks * result.params.profiled_steps
        checks += [
            Check("Without a host read no wait holds up submission", free["waits"] == 0, f"{free['waits']:.0f} waits"),
            Check(
                "With one read per block the host waits at least once per block and step",
                item["waits"] >= expected,
                f"{item['waits']:.0f} waits, {expected} blocks",
            ),
            Check("The GPU idles because of those waits", waited > 0, f"{waited:.1f} us of {item['window']:.1f} us"),
        ]
    return checks


def longest_idle(result: Result, rows: int = 12) -> Any:
    """The longest idle intervals of a result's traces with their cause, as a table."""
    import polars as pl

    idle = result.tables["boxes"].filter(pl.col("kind") == "idle")
    length = (pl.col("end_us") - pl.col("start_us")).alias("idle_us")
    chosen = idle.select("trace", "lane", pl.col("label").alias("cause"), "start_us", length)
    return chosen.sort("idle_us", descending=True).head(rows)


def opened(result: Result) -> tuple[Analysis, Window | None]:
    """Return the trace behind a result as it was analysed for its tables, and the window that is shown."""
    if result.origin is None:
        raise ValueError(f"{result.slug}: this result keeps no trace file; give the parameter trace, or record it")
    return result.origin.shown(result.params)
