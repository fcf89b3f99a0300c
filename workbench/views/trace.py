"""Drawing of real traces: lanes and headroom as a plotly figure, and the columns of the interactive view."""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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


class Lane(NamedTuple):
    """Boxes of one kind on one lane, by start: starts and ends [N] in ns, and what each is called."""

    label: str
    kind: str
    start_ns: np.ndarray
    end_ns: np.ndarray
    names: list[str]

    def joined(self, first: np.ndarray) -> Lane:
        """Join the boxes from each one that is `first` to the next: from their first start to their last end."""
        at = np.flatnonzero(first)
        counts = np.diff(np.append(at, len(first)))
        names = [self.names[i] if n == 1 else f"{n} boxes from {self.names[i]}" for i, n in zip(at, counts)]
        return self._replace(start_ns=self.start_ns[at], end_ns=np.maximum.reduceat(self.end_ns, at), names=names)

    def chosen(self, rows: np.ndarray) -> Lane:
        """Return these boxes alone."""
        names = [self.names[i] for i in rows]
        return self._replace(start_ns=self.start_ns[rows], end_ns=self.end_ns[rows], names=names)

    def apart(self, gap: int) -> Lane:
        """Join boxes closer than `gap` ns, so that a long window stays a few hundred boxes; short idle is left out."""
        if self.kind == "idle":  # joined idle intervals would overstate idle time by the work between them
            return self.chosen(np.flatnonzero(self.end_ns - self.start_ns >= gap))
        reach = np.maximum.accumulate(self.end_ns)
        return self.joined(np.concatenate([[True], self.start_ns[1:] > reach[:-1] + gap]))

    def binned(self, width: int) -> Lane:
        """Leave at most one box per `width` ns: all of them joined, or the longest idle interval."""
        bins = self.start_ns // width
        first = np.concatenate([[True], np.diff(bins) > 0])
        if self.kind == "idle":
            return self.chosen(np.lexsort((self.start_ns - self.end_ns, bins))[first])
        return self.joined(first)


def _lanes(analysis: Analysis, window: Window, ranges: bool = False) -> list[Lane]:
    """Lanes with boxes in a window, of threads that launch and of devices; waits and idle are lanes' boxes too."""
    trace, waits = analysis.trace, analysis.waits
    calls, ops, spans = trace.calls, trace.ops, trace.spans
    out: list[Lane] = []

    def add(label: str, kind: str, table: Any, mask: np.ndarray | bool, names: Any, name: np.ndarray) -> None:
        rows = np.flatnonzero(mask & (table.end_ns > window[0]) & (table.start_ns < window[1]))
        if len(rows):
            out.append(Lane(label, kind, table.start_ns[rows], table.end_ns[rows], [names[i] for i in name[rows]]))

    threads = np.unique(calls.thread[analysis.launches])
    for thread in threads if ranges else ():
        named = (spans.thread == thread) & (spans.kind == RANGE)
        add(f"ranges, thread {trace.threads[thread][1]}", "host_work", spans, named, trace.names, spans.name)
    submits = np.zeros(len(calls), bool)
    submits[analysis.launches] = True
    submits &= ~np.isin(np.arange(len(calls)), waits.call[waits.blocking])
    for thread in threads:
        label = f"CPU thread {trace.threads[thread][1]}"
        add(label, "cpu_submit", calls, submits & (calls.thread == thread), trace.names, calls.name)
        add(label, "sync_wait", waits, waits.blocking & (waits.thread == thread), WAIT_KINDS, waits.kind)
    for pair in analysis.rows:
        mine = (ops.process == pair[0]) & (ops.device == pair[1])
        for stream in np.unique(ops.stream[mine & ops.within(window)]):
            here = mine & (ops.stream == stream)
            for kind, sort in (("gpu_execute", ops.kind != COPY), ("copy", ops.kind == COPY)):
                add(f"GPU {pair[1]} stream {stream}", kind, ops, here & sort, trace.names, ops.name)
        idle = analysis.idle(pair, window)
        add(f"GPU {pair[1]} idle", "idle", idle, True, CAUSES, idle.cause)
    return out


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
    low, high = window = _window(analysis, window)
    lanes = _lanes(analysis, window)
    gap = max(0, (high - low) // MAX_BOXES)
    lanes = [lane.apart(gap) if len(lane.names) > MAX_BOXES // 4 else lane for lane in lanes]
    boxes = [
        {"trace": variant, "lane": lane.label, "kind": lane.kind, "label": name, "start_us": a, "end_us": b}
        for lane in lanes
        for name, a, b in zip(lane.names, *(((t - low) / 1e3).tolist() for t in (lane.start_ns, lane.end_ns)))
    ]
    headroom, sums = [], []
    for pair in analysis.rows:
        lane = f"GPU {pair[1]}"
        x, y = _thin(analysis.headroom(pair), low, high)
        points = zip(x.tolist(), y.tolist())
        headroom += [{"trace": variant, "lane": lane, "at_us": at, "queued_us": value} for at, value in points]
        idle = analysis.idle(pair, (low, high))
        found = {"window": high - low, "idle": idle.total_ns(), **idle.by_cause_ns()}
        sums += [{"trace": variant, "lane": lane, "quantity": k, "value": v / 1e3} for k, v in found.items()]
    waits = analysis.waits
    inside = waits.counted() & waits.within(window)
    sums.append({"trace": variant, "lane": "host", "quantity": "waits", "value": float(inside.sum())})
    return {"boxes": boxes, "headroom": headroom, "sums": sums}


def _window(analysis: Analysis, window: Window | None) -> Window:
    ops = analysis.trace.ops
    if window is None and len(ops):
        return int(ops.start_ns.min()), int(ops.end_ns.max())
    return window or (0, 1)


def trace_figure(tables: Tables, title: str = "") -> go.Figure:
    """Lanes and headroom curve of each trace in `trace_tables`, a pair of panels each; long windows are aggregated."""
    from workbench.core.colours import COLOURS
    from workbench.views.plotting import draw_lanes, figure

    variants = list(dict.fromkeys(r["trace"] for r in tables["sums"]))
    n = len(variants)
    gaps = {"shared_xaxes": "all", "vertical_spacing": 0.05 if n > 1 else 0.08}
    fig = figure(title, rows=2 * n, height=150 + 330 * n, row_heights=[0.6, 0.4] * n, **gaps)
    seen: set[str] = set()
    for i, variant in enumerate(variants):
        boxes, curve = ([r for r in tables[name] if r["trace"] == variant] for name in ("boxes", "headroom"))
        columns = {name: [r[name] for r in boxes] for name in ("lane", "kind")}
        columns |= {name: [r[f"{name}_us"] for r in boxes] for name in ("start", "end")}
        columns["label"] = [html.escape(r["label"])[:80] for r in boxes]
        draw_lanes(fig, columns, row=2 * i + 1, labels=False, unit="us", seen=seen)
        below: Any = {"row": 2 * i + 2, "col": 1}
        for lane in dict.fromkeys(r["lane"] for r in curve):
            points = [(r["at_us"], r["queued_us"]) for r in curve if r["lane"] == lane]
            x, y = zip(*points)
            line = {"color": COLOURS["headroom"], "width": 1.5}
            hover = "%{x:.1f} us: %{y:.1f} us queued<extra></extra>"
            named = {"name": f"headroom, {lane}", "showlegend": "headroom" not in seen}
            fig.add_scatter(x=x, y=y, mode="lines", line=line, hovertemplate=hover, **named, **below)
            seen.add("headroom")
        fig.update_yaxes(title_text="headroom, us", rangemode="tozero", **below)
        if variant and n > 1:
            corner = {"xref": "x domain", "x": 1, "xanchor": "right", "yref": "y domain", "y": 0.98, "yanchor": "top"}
            fig.add_annotation(text=f"<b>{html.escape(variant)}</b>", showarrow=False, **corner, **below)
    width = max([r["end_us"] for r in tables["boxes"]] + [r["at_us"] for r in tables["headroom"]], default=0.0)
    joined = f"boxes closer than {width / MAX_BOXES:.3g} us are joined"
    fig.update_xaxes(title_text=f"us from the window's start ({joined})", row=2 * n, col=1)
    return fig


def figure_of(result: Result) -> go.Figure:
    """The figure of a result whose tables are those of `trace_tables`."""
    return trace_figure({name: result.rows(name) for name in ("boxes", "headroom", "sums")}, result.experiment.title)


def view_arguments(
    analysis: Analysis, window: Window | None = None, *, title: str = "", badge: str = "", most: int = VIEW_EVENTS
) -> dict[str, Any]:
    """Keyword arguments of `workbench.widgets.trace_view` for a trace; the table jumps to waits and long idle times."""
    low, high = window = _window(analysis, window)
    parts = _lanes(analysis, window, ranges=True)
    if sum(len(p.names) for p in parts) > most:  # an exported notebook carries every event it shows
        width = max(1, (high - low) * len(parts) * 20 // (most * 19))  # lanes begin and end within a bin
        parts = [p.binned(width) for p in parts]
    lanes = list(dict.fromkeys(p.label for p in parts))[:64] or ["no device work"]
    parts = [p for p in parts if p.label in lanes]
    nothing = np.empty(0, np.int64)
    events = {
        "lane": np.concatenate([nothing, *(np.full(len(p.names), lanes.index(p.label)) for p in parts)]),
        "start_ns": np.concatenate([nothing, *(p.start_ns for p in parts)]),
        "end_ns": np.concatenate([nothing, *(p.end_ns for p in parts)]),
        "kind": [p.kind for p in parts for _ in p.names],
        "name": [name for p in parts for name in p.names],
    }
    curves = []
    for pair in analysis.rows:
        curve = analysis.headroom(pair)
        keep = np.flatnonzero((curve.t_ns >= low) & (curve.t_ns <= high))
        keep = keep[:: max(1, len(keep) // 20_000)]
        columns = {"t_ns": curve.t_ns[keep], "before": curve.before[keep], "after": curve.after[keep]}
        curves.append({"label": f"headroom, GPU {pair[1]}", "unit": "ns"} | columns)
    return {
        "title": title or analysis.trace.source,
        "badge": badge,
        "lanes": lanes,
        "events": events,
        "curves": curves,
        "table": _jump_table(analysis, low, high),
        "caption": "Idle: no stream of the device works. Headroom: submitted, unfinished device time.",
    }


def _jump_table(analysis: Analysis, low: int, high: int) -> dict[str, Any]:
    trace, waits = analysis.trace, analysis.waits
    rows = np.flatnonzero(waits.blocking & waits.within((low, high)))
    rows = rows[np.argsort(waits.start_ns[rows] - waits.end_ns[rows], kind="stable")][:200]
    found = [
        (w["start_ns"], w["start_ns"] + w["duration_ns"], w["kind"], w["line"] or w["op"] or "")
        for w in describe_waits(trace, waits.take(rows), Locator(trace))
    ]
    for pair in analysis.rows:
        idle = analysis.idle(pair, (low, high))
        for i in np.argsort(idle.start_ns - idle.end_ns, kind="stable")[:50]:
            op = idle.ended_by[i]
            after = f"before {trace.names[trace.ops.name[op]][:60]}" if op >= 0 else ""
            what = f"GPU {pair[1]} idle: {CAUSES[idle.cause[i]]}"
            found.append((int(idle.start_ns[i]), int(idle.end_ns[i]), what, after))
    return {
        "title": "Waits and longest idle intervals",
        "columns": ["at", "length", "what", "where"],
        "rows": [
            [f"{(start - low) / 1e3:.1f} us", f"{(end - start) / 1e3:.1f} us", *told] for start, end, *told in found
        ],
        "start_ns": [start for start, *_ in found],
        "end_ns": [end for _, end, *_ in found],
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
    claim = "Idle time by cause adds up to all idle time"
    devices = [mine for mine in sums(result).values() if "idle" in mine]
    if not devices:
        return Check(claim, None, "no device operations")
    names = ("submission", "sync_blocked", "sync_rebuild", "turnaround", "dependency", "unknown")
    worst = max(abs(sum(mine[name] for name in names) - mine["idle"]) for mine in devices)
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
        claim = "Host time of the same code, without reads over with them (a value, no claim)"
        checks.append(Check(claim, None, value))
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
