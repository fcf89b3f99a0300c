"""What the queue-model figures share: a simulated program as tidy rows, and its drawing as lanes over curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from workbench.models.headroom import Curve, busy_window, device_headroom, idle_intervals
from workbench.models.submission import Op, Program, RangePop, RangePush, Step, Submit, program_to_json, simulate

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from workbench.core.experiment import Result

UNIT = "figure units"
EPSILON = 1e-9
BOX_KINDS = {"submit": "cpu_submit", "work": "host_work", "wait": "sync_wait", "execute": "gpu_execute"}
AT_CURSOR = (
    {"type": "cpu", "label": "CPU at the cursor", "timeline": "main", "thread": 0},
    {"type": "gpu", "label": "GPU at the cursor", "timeline": "main", "device": 0},
)
LEGEND = ("cpu_submit", "gpu_execute", "idle")
IDLE_IN_ALL = {"type": "total", "metric": "idle", "label": "GPU idle in all", "timeline": "main", "device": 0}
LANES = {"cpu0": "CPU submits", "gpu0/s0": "GPU executes", "gpu0/s1": "GPU copies"}


def one(label: str, cost: float, duration: float, tone: str = "") -> Submit:
    """A submission of one operation on stream 0."""
    return Submit(label, cost, (Op(label, duration, tone=tone),), tone=tone)


def block(name: str, *steps: Step) -> list[Step]:
    """Steps inside a named block."""
    return [RangePush(name), *steps, RangePop()]


def rows(panels: Mapping[str, Program], curves: Mapping[str, Any] | None = None) -> dict[str, list[dict[str, Any]]]:
    """Return the tables of simulated panels.

    ``boxes`` has `panel, lane, label, kind, start, end`; idle boxes lie between the device's first start and last end.
    ``curves`` has the segments of each curve: `panel, kind, start, end, value_start, value_end`; kind is its name.

    Args:
        panels: name of each panel -> what to simulate.
        curves: name -> function of the timeline that returns a Curve; default: the device's headroom.
    """
    boxes_out, curves_out = [], []
    for panel, program in panels.items():
        timeline = simulate(program)
        columns = (timeline.events[c].tolist() for c in ("lane", "label", "kind", "start", "end"))
        gaps = idle_intervals(timeline, 0, busy_window(timeline, 0)).tolist()
        found = [
            (lane, label, BOX_KINDS[kind], start, end)
            for lane, label, kind, start, end in zip(*columns)
            if kind in BOX_KINDS and (end > start or kind == "wait")
        ]
        boxes_out += [
            {"panel": panel, "lane": lane, "label": label, "kind": kind, "start": float(start), "end": float(end)}
            for lane, label, kind, start, end in [*found, *(("gpu0/s0", "idle", "idle", *gap) for gap in gaps)]
        ]
        for name, make in (curves or {"headroom": device_headroom}).items():
            curves_out += _segments(panel, name, make(timeline))
    return {"boxes": boxes_out, "curves": curves_out}


def _segments(panel: str, name: str, curve: Curve) -> list[dict[str, Any]]:
    return [
        {"panel": panel, "kind": name, "start": float(curve.t[i]), "end": float(curve.t[i + 1]),
         "value_start": float(curve.after[i]), "value_end": float(curve.before[i + 1])}
        for i in range(len(curve.t) - 1)
    ]  # fmt: skip


class Panel:
    """What the tables of `rows` say of one panel.

    Args:
        result: its tables are those of `rows`.
        name: the panel's.
    """

    def __init__(self, result: Result, name: str) -> None:
        mine = [r for table in ("boxes", "curves") for r in result.rows(table) if r["panel"] == name]
        self._rows = sorted(mine, key=lambda r: (r["start"], r["end"]))

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        """Boxes, or segments of curves, of these kinds, by start."""
        return [r for r in self._rows if r["kind"] in kinds]

    def box(self, kind: str, label: str) -> dict[str, Any]:
        """The one box with this kind and label."""
        return next(r for r in self.of(kind) if r["label"] == label)

    def total(self, kind: str) -> float:
        """Summed length of the boxes of this kind."""
        return sum(r["end"] - r["start"] for r in self.of(kind))

    def waited_for(self) -> list[str]:
        """Labels of the operations that the GPU was idle for: those that start where an idle box ends."""
        ends = [r["end"] for r in self.of("idle")]
        return [r["label"] for r in self.of("gpu_execute") if any(abs(r["start"] - e) < EPSILON for e in ends)]

    def idle_matches_zero(self) -> tuple[bool, float]:
        """Whether idle boxes are exactly the times of zero headroom, and the summed length where they differ."""
        work = self.of("gpu_execute")
        low, high = min(r["start"] for r in work), max(r["end"] for r in work)
        zero = [
            (max(r["start"], low), min(r["end"], high))
            for r in self.of("headroom")
            if abs(r["value_start"]) < EPSILON and abs(r["value_end"]) < EPSILON
        ]
        idle = [(r["start"], r["end"]) for r in self.of("idle")]
        points = sorted({p for pair in zero + idle for p in pair})

        def covered(pairs: list[tuple[float, float]], x: float) -> bool:
            return any(a <= x < b for a, b in pairs)

        differ = sum(b - a for a, b in pairwise(points) if covered(zero, (a + b) / 2) != covered(idle, (a + b) / 2))
        return differ < EPSILON, differ


def draw(result: Result, panels: Mapping[str, str], curve: str = "", label: str = "") -> go.Figure:
    """Lanes and a curve below them for each panel.

    Args:
        result: its tables are those of `rows`.
        panels: name of each panel -> its title.
        curve: kind of the curve; empty draws lanes only.
        label: what the curve is called.
    """
    from workbench.core.colours import COLOURS
    from workbench.views.plotting import draw_lanes, figure

    heights = ([2.0, 1.3] if curve else [2.0]) * len(panels)
    titles = [text for title in panels.values() for text in ((title, "") if curve else (title,))]
    pixels = 200 + round(80 * sum(heights))
    fig = figure(
        result.experiment.title, rows=len(heights), height=pixels, row_heights=heights, subplot_titles=titles,
        vertical_spacing=46 / (pixels - 200), shared_xaxes=False,
    )  # fmt: skip
    seen: set[str] = set()
    high = max(r["end"] for name in result.tables for r in result.rows(name))
    at = 0
    for name in panels:
        at += 1
        panel = Panel(result, name)
        found = [r for r in panel.of(*BOX_KINDS.values(), "idle") if r["end"] > r["start"]]
        lanes = [name for name in LANES if any(r["lane"] == name for r in found)]
        columns = {c: [r[c] for r in found] for c in ("label", "start", "end", "kind")}
        columns["lane"] = [LANES[r["lane"]] for r in found]
        draw_lanes(fig, columns, row=at, lanes=[LANES[name] for name in lanes], unit=UNIT, seen=seen)
        fig.update_xaxes(range=[0, high], showticklabels=not curve, row=at, col=1)
        if curve:
            at += 1
            segments = panel.of(curve)
            x = [v for r in segments for v in (r["start"], r["end"])]
            y = [v for r in segments for v in (r["value_start"], r["value_end"])]
            fig.add_scatter(
                x=x, y=y, mode="lines", name=label, fill="tozeroy", line={"color": COLOURS["headroom"], "width": 2},
                showlegend=curve not in seen, legendgroup=curve, hovertemplate="%{x:.4g}: %{y:.4g}", row=at, col=1,
            )  # fmt: skip
            seen.add(curve)
            fig.update_xaxes(range=[0, high], row=at, col=1)
            fig.update_yaxes(title_text=label.replace(" ", "<br>", 1), rangemode="tozero", row=at, col=1)
            if curve != "headroom":
                fig.update_yaxes(dtick=1, row=at, col=1)
    fig.update_xaxes(title_text=f"time ({UNIT})", row=at, col=1)
    # The legend sits between the badge and the first panel's title: fixed in pixels, whatever the figure's height.
    fig.update_layout(
        margin_t=140, legend={"yref": "container", "yanchor": "top", "y": 1 - 72 / pixels, "traceorder": "normal"}
    )
    fig.update_annotations(x=0, xanchor="left", font={"size": 13})
    # Neighbouring boxes of one colour need an edge, and a label that does not fit is left to the hover text.
    solid = {"marker.pattern.shape": "", "type": "bar"}
    fig.update_traces(marker_line={"color": "rgba(255,255,255,0.85)", "width": 1.2}, selector=solid)
    fig.update_layout(uniformtext={"minsize": 10, "mode": "hide"})
    return fig


def view(title: str, panels: Sequence[Mapping[str, Any]], layout: str = "stack", note: str = "") -> dict[str, Any]:
    """Spec of an interactive view, see `workbench.widgets.timeline_view`; the `note` continues its badge."""
    return {"title": title, "badge": f"model · figure time units{note}", "layout": layout, "panels": list(panels)}


def view_timeline(
    program: Program, curve: str, label: str, *, copies: bool = False, name: str = "main", title: str = "", **more: Any
) -> dict[str, Any]:
    """A timeline of an interactive panel: the CPU's lane, the GPU's (also that of `copies`), one curve, and `more`."""
    lanes = list(LANES)[: 3 if copies else 2]
    lane_rows = [{"type": "lane", "lane": lane, "label": LANES[lane]} for lane in lanes]
    curve_row = {"type": "curve", "curve": curve, "device": 0, "label": label}
    rows_shown = [*lane_rows, curve_row]
    return {"id": name, "title": title, "program": program_to_json(program), "rows": rows_shown, "marks": [], **more}


def costs(
    program: Program, labels: Sequence[str], kind: type = Submit, timeline: str = "main", scale: float = 1
) -> list[dict[str, Any]]:
    """Targets of a slider: the host costs of the steps with these labels, `scale` times its value."""
    at = [step_index(program, label, kind) for label in labels]
    return [{"timeline": timeline, "path": ["steps", i, "cost"], "scale": scale, "offset": 0} for i in at]


def control(params: Any, name: str, label: str, sets: list[dict[str, Any]], ours: bool = False) -> dict[str, Any]:
    """Slider of a parameter: bounds from its declaration; its default is marked as the report's unless it is `ours`."""
    field = type(params).__dataclass_fields__[name]
    low, high, step = (field.metadata[k] for k in ("min", "max", "step"))
    return {
        "id": name, "label": label, "unit": UNIT, "min": low, "max": high, "step": step,
        "value": getattr(params, name), "report": None if ours else field.default, "sets": sets,
    }  # fmt: skip


def step_index(program: Program, label: str, kind: type = Submit) -> int:
    """Position of the one step with this label."""
    found = [i for i, s in enumerate(program.steps) if isinstance(s, kind) and getattr(s, "label", None) == label]
    if len(found) != 1:
        raise ValueError(f"expected one {kind.__name__} labelled {label!r}, found {len(found)}")
    return found[0]
