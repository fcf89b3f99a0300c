"""Route explorer: keep, drop and destination layout of one exchange, and what the capacity factor costs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.experiment import Check, Experiment, Result
from workbench.core.params import Params, param
from workbench.models import routing

if TYPE_CHECKING:
    import plotly.graph_objects as go

FACTORS = np.round(np.arange(0.25, 3.01, 0.125), 3)
ROW_BYTES_PER_WIDTH = 2


@dataclass(frozen=True, kw_only=True)
class RouteExplorerParams(Params):
    """One exchange: T tokens on each of R ranks choose K of E experts."""

    tokens: int = param(512, "T, tokens per rank", min=16, max=4096, step=16)
    top_k: int = param(4, "K, experts per token", min=1, max=8)
    ranks: int = param(8, "R, ranks that hold the experts", min=1, max=16)
    local_experts: int = param(4, "L, experts per rank", min=1, max=16)
    capacity_factor: float = param(1.25, "rows of a rank's buffer over T * K", min=0.25, max=3.0, step=0.05)
    skew: float = param(
        0.6, "how uneven the experts are: expert i is wanted in proportion to 1 / i^skew", min=0.0, max=2.0, step=0.05
    )
    width: int = param(2560, "D, model width, for the bytes of a row in BF16", min=64, max=16384)
    seed: int = param(0, "seed of the draw", min=0, max=1000)


def _experts(params: RouteExplorerParams) -> np.ndarray:
    experts = params.ranks * params.local_experts
    if params.top_k > experts:
        raise ValueError(f"top_k ({params.top_k}) must not exceed E = R * L = {experts}")
    rng = np.random.default_rng(params.seed)
    return routing.skewed_experts(params.ranks, params.tokens, params.top_k, experts, params.skew, rng)


def _rows(
    params: RouteExplorerParams, kept_re: np.ndarray, offered_re: np.ndarray, chosen: np.ndarray
) -> dict[str, list[dict[str, Any]]]:
    """Tables: ``cell``, a row for each (destination, local expert, source); ``curve``, one for each capacity factor."""
    local, cells = params.local_experts, []
    for destination in range(params.ranks):
        start = 0
        for expert in range(destination * local, (destination + 1) * local):
            for source in range(params.ranks):
                kept = int(kept_re[source, expert])
                cells.append({
                    "destination": destination, "expert": expert, "source": source, "kept": kept, "first_row": start,
                    "offered": int(offered_re[source, expert]), "capacity_factor": params.capacity_factor,
                })  # fmt: skip
                start += kept
    drops, use = routing.drop_rate_curve(chosen, params.ranks * local, FACTORS)
    curve = [
        {"capacity_factor": float(factor), "drop_rate": float(drop), "capacity_use": float(used),
         "buffer_bytes": routing.capacity_rows(params.tokens, params.top_k, float(factor)) * params.width
         * ROW_BYTES_PER_WIDTH}
        for factor, drop, used in zip(FACTORS, drops, use)
    ]  # fmt: skip
    return {"curve": curve, "cell": cells}


def model(params: RouteExplorerParams) -> dict[str, list[dict[str, Any]]]:
    """Route by the NumPy model."""
    chosen = _experts(params)
    experts = params.ranks * params.local_experts
    capacity = routing.capacity_rows(params.tokens, params.top_k, params.capacity_factor)
    done = routing.route(chosen, experts, capacity)
    return _rows(params, done.kept, done.offered, chosen)


def measure(params: RouteExplorerParams, recorder: Any) -> None:
    """Route the same draw by the kernels (their reference where there is no GPU)."""
    import torch
    from moe_kernels.route_map import route_map

    chosen = _experts(params)
    experts = params.ranks * params.local_experts
    capacity = routing.capacity_rows(params.tokens, params.top_k, params.capacity_factor)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    offered = np.stack([np.bincount(c.ravel(), minlength=experts) for c in chosen]).astype(np.int64)
    counts = torch.from_numpy(offered).to(device)
    kept = route_map(torch.from_numpy(chosen[0]).to(device), counts, rank=0, capacity=capacity).kept.cpu().numpy()
    recorder.set("protocol", timer="none: routes are computed, not timed", warmup="none", repeats=1)
    for name, rows in _rows(params, kept, offered, chosen).items():
        for row in rows:
            recorder.row(name, **row)


def checks(result: Result) -> Iterator[Check]:
    """The invariants of the rule, and what capacity costs."""
    params = result.params
    cells, curve = result.rows("cell"), result.rows("curve")
    capacity = routing.capacity_rows(params.tokens, params.top_k, params.capacity_factor)
    received = [sum(c["kept"] for c in cells if c["destination"] == d) for d in range(params.ranks)]
    offered, kept = sum(c["offered"] for c in cells), sum(c["kept"] for c in cells)
    drops = [r["drop_rate"] for r in curve]
    ordered = True
    for destination in range(params.ranks):
        full = False
        for c in (c for c in cells if c["destination"] == destination):
            ordered &= not (full and c["kept"])
            full |= c["kept"] < c["offered"]
    yield Check(
        "no rank receives more rows than its capacity", max(received) <= capacity, f"{max(received)} of {capacity}"
    )
    yield Check("kept and dropped routes add up to the offered ones",
                offered == params.ranks * params.tokens * params.top_k,
                f"{kept} kept, {offered - kept} dropped")  # fmt: skip
    yield Check("a larger capacity never drops more routes", all(a >= b for a, b in itertools.pairwise(drops)),
                f"{drops[0]:.1%} to {drops[-1]:.1%}")  # fmt: skip
    yield Check("after the first cell that drops, no later cell of that rank keeps a row", ordered, None)


def draw(result: Result) -> go.Figure:
    """Draw each destination's buffer by expert, drops beyond it, and drop rate and capacity use over the factor."""
    import plotly.graph_objects as go
    import polars as pl

    from workbench.core.colours import INK, SERIES
    from workbench.views.plotting import figure

    params = result.params
    curve, cells = result.rows("curve"), result.tables["cell"]
    capacity = routing.capacity_rows(params.tokens, params.top_k, params.capacity_factor)
    fig = figure(
        "Where routes land, and what capacity costs", rows=2, height=620, shared_xaxes=False, vertical_spacing=0.16,
        row_heights=[0.6, 0.4],
    )  # fmt: skip
    bars = {"orientation": "h", "y": [f"rank {d}" for d in range(params.ranks)]}
    experts = cells.group_by("expert", maintain_order=True).agg(pl.sum("kept"), pl.min("first_row"))
    for local in range(params.local_experts):
        mine = experts.gather_every(params.local_experts, local)  # the expert at this place of each rank
        bar = go.Bar(
            **bars,
            x=mine["kept"].to_list(),
            base=mine["first_row"].to_list(),
            name=f"local expert {local}",
            legendgroup=f"{local}",
            showlegend=local < 8,
            marker={"color": SERIES[local % len(SERIES)], "line": {"color": "white", "width": 0.5}},
            hovertemplate=f"%{{y}}, local expert {local}<br>%{{x}} rows from row %{{base}}<extra></extra>",
        )
        fig.add_trace(bar, row=1, col=1)
    ranks = cells.group_by("destination", maintain_order=True).agg(pl.sum("offered") - pl.sum("kept"))
    pattern = {"shape": "x", "fgcolor": SERIES[4], "size": 6}
    dropped = go.Bar(
        **bars,
        x=ranks["offered"].to_list(),
        base=[capacity] * params.ranks,
        name="dropped",
        marker={"color": "rgba(0,0,0,0)", "line": {"color": SERIES[4], "width": 1}, "pattern": pattern},
        hovertemplate="%{y}<br>%{x} routes dropped<extra></extra>",
    )
    fig.add_trace(dropped, row=1, col=1)
    fig.add_vline(x=capacity, line_color=INK, line_dash="dash", row=1, col=1)  # type: ignore[arg-type]
    for name, column, colour in (
        ("routes dropped", "drop_rate", SERIES[4]),
        ("capacity used", "capacity_use", SERIES[6]),
    ):
        line = go.Scatter(
            x=[r["capacity_factor"] for r in curve],
            y=[100 * r[column] for r in curve],
            name=name,
            mode="lines+markers",
            line_color=colour,
            marker_size=5,
            customdata=[r["buffer_bytes"] / 2**20 for r in curve],
            hovertemplate=name + " %{y:.2f} % at factor %{x}<br>one buffer %{customdata:.1f} MiB<extra></extra>",
        )
        fig.add_trace(line, row=2, col=1)
    fig.add_vline(x=params.capacity_factor, line_color=INK, line_dash="dash", row=2, col=1)  # type: ignore[arg-type]
    fig.update_layout(barmode="overlay")
    fig.update_xaxes(title="row of the destination's buffer (dashed: capacity)", row=1, col=1)
    fig.update_yaxes(autorange="reversed", row=1, col=1)
    fig.update_xaxes(title="capacity factor", row=2, col=1)
    fig.update_yaxes(title="percent", rangemode="tozero", row=2, col=1)
    return fig


EXPERIMENT = Experiment(
    slug="tool_route_explorer",
    group="tools",
    title="Route explorer",
    claim="Fixed capacity trades memory and possible drops for a host that never reads a count.",
    kind="model",
    anchor="Section 8.5, Table 14",
    params=RouteExplorerParams,
    figure=draw,
    checks=checks,
    model=model,
    measure=measure,
    tests=("tests/kernels/test_route_map.py", "tests/models/test_routing_model.py"),
    live_on_cpu=True,
    needs="a CUDA GPU, or the kernels' reference on the CPU",
    default_source="model",
)
