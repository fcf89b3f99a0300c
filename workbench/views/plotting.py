"""How every figure looks: colours by meaning, one template, timeline lanes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workbench.core.colours import COLOURS, GRID, INK, LABELS, MONO, PATTERNS, SANS, SERIES
from workbench.views.contrast import ratio

if TYPE_CHECKING:
    import plotly.graph_objects as go

WIDE_LABELS: dict[str, Any] = {
    "title": {"xref": "container", "x": 0.02},
    "legend": {"xref": "container", "x": 0.02, "yref": "container", "y": 0.005, "yanchor": "bottom"},
    "margin": {"t": 90, "b": 110},
}
"""Layout of a figure whose long category names take half of a narrow page: title and legend start at its edge."""


def on(fill: str) -> str:
    """Return the colour of text on a filled box: near black or white, whichever has more contrast."""
    return max("#1b1b1b", "#ffffff", key=lambda ink: ratio(ink, fill))


def template() -> go.layout.Template:
    """Return the project's plotly template: on white in a notebook, light or dark; pages lay their own ground."""
    import plotly.graph_objects as go

    lines = dict.fromkeys(("gridcolor", "linecolor", "tickcolor"), GRID)
    axis = {"zeroline": False, "ticks": "outside", "automargin": True} | lines
    at_top = {"yref": "container", "y": 1, "yanchor": "top"}
    bars = {"color": INK, "thickness": 1}
    errors = {"error_x": bars, "error_y": bars}
    return go.layout.Template(
        layout={
            "colorway": list(SERIES),
            "paper_bgcolor": "#ffffff",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"color": INK, "size": 13, "family": SANS},
            "title": {"xref": "paper", "x": 0, "xanchor": "left", "pad": {"t": 12}, "font": {"size": 16}} | at_top,
            "xaxis": axis,
            "yaxis": axis,
            "legend": {"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0},
            "margin": {"l": 60, "r": 20, "t": 110, "b": 50},
            "hovermode": "closest",
            "hoverlabel": {"font": {"family": MONO}},
            "bargap": 0.15,
        },
        data={"bar": [errors], "scatter": [errors]},
    )


def figure(title: str = "", *, rows: int = 1, height: int = 420, **subplot_options: Any) -> go.Figure:
    """Return an empty figure in the project's template.

    Args:
        title: figure title.
        rows: number of stacked panels with a shared x axis.
        height: pixels.
        **subplot_options: passed to `plotly.subplots.make_subplots`.
    """
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    if rows > 1 or subplot_options:
        options = {"shared_xaxes": True, "vertical_spacing": 0.06} | subplot_options
        fig = make_subplots(rows=rows, **options)
    else:
        fig = go.Figure()
    fig.update_layout(template=template(), title_text=title, height=height)
    return fig


def spread(rows: Sequence[Mapping[str, Any]], name: str, per: float = 1.0) -> dict[str, Any]:
    """Return the error bars of medians: from ``<name>_p20`` to ``<name>_p80`` around ``<name>_p50``, over `per`."""
    return {
        "type": "data", "symmetric": False, "thickness": 1,
        "array": [(r[f"{name}_p80"] - r[f"{name}_p50"]) / per for r in rows],
        "arrayminus": [(r[f"{name}_p50"] - r[f"{name}_p20"]) / per for r in rows],
    }  # fmt: skip


def draw_lanes(
    fig: go.Figure,
    boxes: Mapping[str, Sequence[Any]],
    *,
    row: int | None = None,
    lanes: Sequence[str] | None = None,
    labels: bool = True,
    unit: str = "",
    seen: set[str] | None = None,
) -> go.Figure:
    """Draw boxes on named horizontal lanes, one trace per kind, coloured by meaning.

    Args:
        fig: figure of `figure()`.
        boxes: columns ``lane, label, start, end, kind``; kinds are keys of `COLOURS`.
        row: panel of a stacked figure.
        lanes: lane order from top to bottom (default: order of appearance).
        labels: write labels inside boxes.
        unit: unit of the times, for hover texts.
        seen: kinds that already have a legend entry; extended in place.
    """
    import plotly.graph_objects as go

    seen = set() if seen is None else seen
    rows = list(zip(*(boxes[c] for c in ("lane", "label", "start", "end", "kind"))))
    order = list(lanes) if lanes is not None else list(dict.fromkeys(boxes["lane"]))
    where: dict[str, Any] = {"row": row, "col": 1} if row is not None else {}
    for kind in dict.fromkeys(boxes["kind"]):
        lane, label, start, end = zip(*(r[:4] for r in rows if r[4] == kind))
        colour, name, idle = COLOURS[kind], LABELS.get(kind, kind), kind in PATTERNS
        fig.add_trace(
            go.Bar(
                orientation="h",
                y=lane,
                base=[float(a) for a in start],
                x=[float(b) - float(a) for a, b in zip(start, end)],
                name=name,
                legendgroup=kind,
                showlegend=kind not in seen,
                marker={
                    "color": "rgba(0,0,0,0)" if idle else colour,
                    "line": {"color": colour, "width": 1},
                    "pattern": {"shape": PATTERNS.get(kind, ""), "fgcolor": colour, "size": 6, "solidity": 0.35},
                },
                text=[str(text) for text in label] if labels and not idle else None,
                textposition="inside",
                insidetextanchor="middle",
                insidetextfont={"color": on(colour)},
                textangle=0,
                constraintext="inside",
                customdata=[(str(text), float(b)) for text, b in zip(label, end)],
                hovertemplate=f"%{{customdata[0]}}<br>%{{base:.4g}} to %{{customdata[1]:.4g}} {unit}"
                f"<extra>{name}</extra>",
            ),
            **where,
        )
        seen.add(kind)
    fig.update_layout(barmode="overlay")
    fig.update_yaxes(categoryorder="array", categoryarray=order[::-1], **where)
    return fig


def as_json(fig: go.Figure) -> dict[str, Any]:
    """Return a figure as plain JSON values: the content of its MIME type in a notebook's output."""
    from plotly.utils import PlotlyJSONEncoder

    return json.loads(json.dumps(fig.to_plotly_json(), cls=PlotlyJSONEncoder))
