"""Speed sheet of one op: its cases timed side by side, held against floors measured in the same run.

The floor of a case is its fewest bytes over the copy bandwidth, or its operations over the rate of a large dense BF16
product, whichever takes longer; both ceilings are measured beside the cases, on the same card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.measure.sheet import Case, OpSheetParams, measure_sheet

if TYPE_CHECKING:
    import plotly.graph_objects as go

IMPLS = {"triton": "triton", "reference": "torch operations"}
"""`impl=` of an op that has no library's name, and what figures call it."""


def op_sheet(
    slug: str,
    cases: Callable[[OpSheetParams], Sequence[Case]],
    heading: str,
    *,
    claimed_percent: float | None = None,
    limit_us: float | None = None,
    **fields: Any,
) -> Experiment:
    """Return the experiment that times `cases(params)` side by side.

    Args:
        cases: makes inputs and calls on this machine's GPU.
        heading: the figure's title.
        claimed_percent, limit_us: see `draw_sheet`.
        **fields: the other fields of `Experiment`.
    """

    def draw(result: Result) -> go.Figure:
        return draw_sheet(result, heading, claimed_percent, limit_us)

    return Experiment(slug=slug, group="s08_sync_free", kind="measured", params=OpSheetParams, figure=draw,
                      measure=partial(measure_sheet, cases), **fields)  # fmt: skip


def rows_of(result: Result, **match: Any) -> list[dict[str, Any]]:
    """Return the rows whose columns equal `match`."""
    return [r for r in result.table.to_dicts() if all(r[k] == v for k, v in match.items())]


def label(row: dict[str, Any]) -> str:
    """Name of a row in figures and checks."""
    return f"{row['impl']}: {row['shape']}, {row['direction']}"


def bandwidth_checks(result: Result, least_percent: float = 85.0, **match: Any) -> Iterator[Check]:
    """One claim a matching row: at least this share of the copy bandwidth measured in the same run."""
    for r in rows_of(result, **match):
        share = 100 * r["GBps"] / r["copy_GBps"]
        claim = f"{label(r)}: at least {least_percent:g} % of the copy bandwidth"
        yield Check(claim, share >= least_percent, f"{r['GBps']:.0f} of {r['copy_GBps']:.0f} GB/s, {share:.1f} %")


def _rate(row: dict[str, Any]) -> str:
    """What sets the floor, arithmetic or bytes, as the rate that was reached."""
    arithmetic = row["flop"] / row["dense_TFLOPs"] / 1e6 > row["bytes"] / row["copy_GBps"] / 1e3
    return f"{row['TFLOPs']:.0f} TFLOP/s" if arithmetic else f"{row['GBps']:.0f} GB/s"


def draw_sheet(
    result: Result, title: str, claimed_percent: float | None = None, limit_us: float | None = None
) -> go.Figure:
    """Draw each case's share of its floor, or its time where `limit_us` is claimed. Dashed: what is claimed."""

    from workbench.core.colours import INK, SERIES
    from workbench.views.plotting import WIDE_LABELS, figure, on

    rows = result.table.to_dicts()
    first = rows[0]
    fig = figure(title, height=235 + 32 * len(rows))
    impls = list(dict.fromkeys(r["impl"] for r in rows))
    told = ("time_us_p20", "time_us_p80", "launches", "submit_us_p50", "floor_us", "percent_of_floor")
    for impl, colour in zip(impls, cycle(SERIES)):
        part = [r for r in rows if r["impl"] == impl]
        fig.add_bar(
            orientation="h",
            y=[label(r) for r in part],
            x=[r["percent_of_floor" if limit_us is None else "time_us_p50"] for r in part],
            name=impl,
            marker_color=colour,
            insidetextfont={"color": on(colour)},
            text=[f"{r['time_us_p50']:.1f} us, {_rate(r)}" for r in part],
            textposition="auto",
            insidetextanchor="start",
            cliponaxis=False,
            customdata=[[r[name] for name in told] for r in part],
            hovertemplate="%{y}<br>%{customdata[5]:.1f} % of the floor of %{customdata[4]:.1f} us<br>"
            "p20 %{customdata[0]:.1f}, p80 %{customdata[1]:.1f} us<br>"
            "%{customdata[2]} launches, %{customdata[3]:.0f} us to submit<extra></extra>",
        )
    if limit_us is None:
        fig.add_vline(x=100, line_color=INK, line_width=1)
    if claimed_percent is not None:
        fig.add_vline(x=claimed_percent, line_color=INK, line_dash="dash", line_width=1)
        fig.add_annotation(x=claimed_percent, y=1, yref="paper", text=f"{claimed_percent:g} %", showarrow=False,
                           yanchor="bottom")  # fmt: skip
    fig.update_yaxes(categoryorder="array", categoryarray=[label(r) for r in rows][::-1])
    drawn = "percent of the floor" if limit_us is None else f"device time (us), claimed: at most {limit_us:g}"
    fig.update_layout(WIDE_LABELS | {"margin": {"t": 90, "b": 130}})
    fig.update_xaxes(
        title=f"{drawn}<br>(same run: copy {first['copy_GBps']:.0f} GB/s, BF16 {first['dense_TFLOPs']:.0f} TFLOP/s)",
        rangemode="tozero",
    )
    return fig
