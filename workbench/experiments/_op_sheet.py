"""Speed sheet of one op: its cases timed side by side, held against floors measured in the same run.

The floor of a case is its fewest bytes over the copy bandwidth, or its operations over the rate of a large dense BF16
product, whichever takes longer; both ceilings are measured beside the cases, on the same card.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.experiment import Check, Params, Result, param
from workbench.models.moe_cost import Cost

if TYPE_CHECKING:
    import plotly.graph_objects as go

ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class OpSheetParams(Params):
    """Sizes of the development model's routed layer, on one GPU."""

    tokens: int = param(16384, "T, tokens per microbatch", min=128, max=65536, log=True)
    top_k: int = param(8, "K, experts per token", min=1, max=16)
    experts: int = param(128, "E, routed experts", min=1, max=512)
    width: int = param(2560, "D, model width", min=64, max=8192)
    expert_width: int = param(1280, "F, expert width", min=64, max=8192)
    repeats: int = param(20, "timed graph replays per case", min=5, max=200)
    seed: int = param(0, "seed of the routes and data", min=0)


@dataclass(frozen=True)
class Case:
    """One row of the sheet.

    Attributes:
        impl: implementation, as the op's `impl=` names it, or a library's name.
        shape: what is varied, in words.
        direction: `forward`, `backward`, `dgrad` or `wgrad`.
        call: the work; must be capturable unless `waits`.
        cost: its fewest bytes and operations.
        waits: the host waits inside; then it is timed eagerly and never captured.
        copies: calls in one captured graph.
    """

    impl: str
    shape: str
    direction: str
    call: Callable[[], Any]
    cost: Cost
    waits: bool = False
    copies: int = 5


def dense_rate_TFLOPs(size: int = 8192) -> float:
    """Return the rate of a size^3 BF16 product on random data, in TFLOP/s, median of ten."""
    import torch

    from workbench.measure.timing import eager_device_us, percentile

    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / percentile(eager_device_us(lambda: a @ b, repeats=10), 0.5) / 1e6


def measure_sheet(cases: Sequence[Case], params: OpSheetParams, recorder: Any) -> list[dict[str, Any]]:
    """Time all cases in interleaved rounds and record one row each."""
    from workbench.measure.timing import (
        capture,
        copy_bandwidth_GBps,
        eager_device_us,
        interleaved,
        launches,
        percentile,
        submit_us,
        summary,
    )

    copy_GBps, dense_TFLOPs = copy_bandwidth_GBps(), dense_rate_TFLOPs()
    recorder.set(
        "protocol",
        timer="CUDA events around replays of a graph that holds several calls; eager events where the host waits",
        warmup="1 call, then 1 replay a visit",
        repeats=params.repeats,
        order=f"cases interleaved, {ROUNDS} rounds, direction alternating",
        l2="warm, but each case moves more than the L2 holds unless its bytes say otherwise",
        synchronization="submit_us is the host's time inside one call on an idle device",
    )
    recorder.set("precision", activation="bfloat16", accumulation="float32", communication="none")
    recorder.set("topology", nodes=1, gpus=1)
    each = max(1, -(-params.repeats // ROUNDS))
    runs: dict[str, tuple[Case, Callable[[], Any], int]] = {}
    for case in cases:
        name = f"{case.impl}, {case.shape}, {case.direction}"
        if case.waits:
            runs[name] = (case, case.call, 1)
        else:
            runs[name] = (case, capture([case.call] * case.copies, warmup=1).replay, case.copies)
    times = interleaved(
        {name: run for name, (_, run, _) in runs.items()},
        rounds=ROUNDS,
        timer=lambda run: eager_device_us(run, repeats=each, warmup=1),
    )
    for name, (case, _, copies) in runs.items():
        samples = [t / copies for t in times[name]]
        recorder.samples(f"{name} time_us", samples)
        submitted = submit_us(case.call, repeats=10)
        recorder.samples(f"{name} submit_us", submitted)
        median = percentile(samples, 0.5)
        floor = case.cost.floor_us(copy_GBps, dense_TFLOPs)
        recorder.row(
            impl=case.impl,
            shape=case.shape,
            direction=case.direction,
            **summary(samples),
            submit_us_p50=round(percentile(submitted, 0.5), 3),
            launches=launches(case.call),
            host_waits=case.waits,
            bytes=case.cost.bytes,
            flop=case.cost.flop,
            GBps=round(case.cost.bytes / median / 1e3, 2),
            TFLOPs=round(case.cost.flop / median / 1e6, 3),
            floor_us=round(floor, 3),
            percent_of_floor=round(100 * floor / median, 2),
            copy_GBps=round(copy_GBps, 1),
            dense_TFLOPs=round(dense_TFLOPs, 1),
        )
    return recorder.rows


def rows_of(result: Result, **match: Any) -> list[dict[str, Any]]:
    """Return the rows whose columns equal `match`."""
    return [r for r in result.table.to_dicts() if all(r[k] == v for k, v in match.items())]


def label(row: dict[str, Any]) -> str:
    """Name of a row in figures and checks."""
    return f"{row['impl']}: {row['shape']}, {row['direction']}"


def bandwidth_checks(result: Result, least_percent: float = 85.0, **match: Any) -> list[Check]:
    """One claim a matching row: at least this share of the copy bandwidth measured in the same run."""
    out = []
    for r in rows_of(result, **match):
        share = 100 * r["GBps"] / r["copy_GBps"]
        claim = f"{label(r)}: at least {least_percent:g} % of the copy bandwidth"
        out.append(Check(claim, share >= least_percent, f"{r['GBps']:.0f} of {r['copy_GBps']:.0f} GB/s, {share:.1f} %"))
    return out


def _by_arithmetic(row: dict[str, Any]) -> bool:
    """Whether arithmetic, not bytes, sets the floor."""
    return row["flop"] / row["dense_TFLOPs"] / 1e6 > row["bytes"] / row["copy_GBps"] / 1e3


def draw_sheet(
    result: Result, title: str, target_percent: float | None = None, limit_us: float | None = None
) -> go.Figure:
    """Draw each case's share of its floor, or its time where `limit_us` is claimed. Dashed: the target."""
    import plotly.graph_objects as go

    from workbench.plotting import INK, SERIES, WIDE_LABELS, figure, on

    rows = result.table.to_dicts()
    first = rows[0]
    fig = figure(title, height=235 + 32 * len(rows))
    impls = list(dict.fromkeys(r["impl"] for r in rows))
    for i, impl in enumerate(impls):
        part = [r for r in rows if r["impl"] == impl]
        fig.add_trace(
            go.Bar(
                orientation="h",
                y=[label(r) for r in part],
                x=[r["percent_of_floor" if limit_us is None else "time_us_p50"] for r in part],
                name=impl,
                marker_color=SERIES[i % len(SERIES)],
                insidetextfont={"color": on(SERIES[i % len(SERIES)])},
                text=[
                    f"{r['time_us_p50']:.1f} us"
                    + (f", {r['TFLOPs']:.0f} TFLOP/s" if _by_arithmetic(r) else f", {r['GBps']:.0f} GB/s")
                    for r in part
                ],
                textposition="auto",
                insidetextanchor="start",
                cliponaxis=False,
                customdata=[
                    (
                        r["time_us_p20"],
                        r["time_us_p80"],
                        r["launches"],
                        r["submit_us_p50"],
                        r["floor_us"],
                        r["percent_of_floor"],
                    )
                    for r in part
                ],
                hovertemplate="%{y}<br>%{customdata[5]:.1f} % of the floor of %{customdata[4]:.1f} us<br>"
                "p20 %{customdata[0]:.1f}, p80 %{customdata[1]:.1f} us<br>"
                "%{customdata[2]} launches, %{customdata[3]:.0f} us to submit<extra></extra>",
            )
        )
    if limit_us is None:
        fig.add_vline(x=100, line_color=INK, line_width=1)
    if target_percent is not None:
        fig.add_vline(x=target_percent, line_color=INK, line_dash="dash", line_width=1)
        fig.add_annotation(x=target_percent, y=1, yref="paper", text=f"{target_percent:g} %", showarrow=False,
                           yanchor="bottom")  # fmt: skip
    fig.update_yaxes(categoryorder="array", categoryarray=[label(r) for r in rows][::-1])
    drawn = "percent of the floor" if limit_us is None else f"device time (us), claimed: at most {limit_us:g}"
    fig.update_layout(WIDE_LABELS | {"margin": {"t": 90, "b": 130}})
    fig.update_xaxes(
        title=f"{drawn}<br>(same run: copy {first['copy_GBps']:.0f} GB/s, BF16 {first['dense_TFLOPs']:.0f} TFLOP/s)",
        rangemode="tozero",
    )
    return fig
