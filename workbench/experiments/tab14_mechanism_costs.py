"""Table 14, measured: what device-resident metadata, capacity-shaped buffers and device offsets cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.core.params import Params, param
from workbench.core.tables import recorded_kinds

if TYPE_CHECKING:
    import plotly.graph_objects as go

BF16_BYTES = 2
BUFFERS = 2
"""Capacity-shaped buffers of the rowwise path per in-flight block: dispatched rows, and expert outputs."""
NEAR = 0.10
"""Relative distance at which a measured time counts as proportional to its rows."""
METADATA, BLOCK = "route map, counts to offsets", "routed block, forward"


@dataclass(frozen=True, kw_only=True)
class MechanismCostsParams(Params):
    """Sizes of the development model at EP8; skew is the exponent of the experts' popularity."""

    ranks: int = param(8, "ranks of expert parallelism", min=1, max=64)
    num_experts: int = param(128, "routed experts over all ranks", min=8, max=512)
    top_k: int = param(8, "experts per token", min=1, max=32)
    width: int = param(2560, "model width", min=64, max=16384)
    expert_width: int = param(1280, "expert width", min=64, max=16384)
    drop_tokens: int = param(2048, "tokens per rank of the drop study", min=64, max=16384)
    tokens: tuple[int, ...] = param((1024, 4096, 16384), "tokens per rank of the timed sizes", min=64, max=65536)
    capacity_factors: tuple[float, ...] = param((1.0, 1.1, 1.25, 1.5, 2.0, 3.0), "capacity factors", min=0.25, max=16.0)
    skews: tuple[float, ...] = param((0.0, 0.3, 0.6, 1.0), "popularity exponents, 0 is balanced", min=0.0, max=4.0)
    seed: int = param(0, "of the drawn routes", min=0)


def _routes(params: MechanismCostsParams, skew: float) -> Any:
    import numpy as np

    from workbench.models.routing import skewed_experts

    rng = np.random.default_rng(params.seed)
    return skewed_experts(params.ranks, params.drop_tokens, params.top_k, params.num_experts, skew, rng)


def _drop_row(params: MechanismCostsParams, skew: float, factor: float, drop: float, use: float) -> dict[str, Any]:
    from workbench.models.routing import capacity_rows

    rows = capacity_rows(params.drop_tokens, params.top_k, factor)
    return {
        "what": f"skew {skew:g}", "tokens": params.drop_tokens, "capacity_factor": factor,
        "skew": skew, "drop_rate": drop, "capacity_use": use,
        "bytes": BUFFERS * rows * params.width * BF16_BYTES,
    }  # fmt: skip


def hottest_experts(params: MechanismCostsParams) -> dict[float, float]:
    """Per skew, the load of the most wanted expert over the mean, in the drawn routes of all ranks."""
    import numpy as np

    loads = {s: np.bincount(_routes(params, s).ravel(), minlength=params.num_experts) for s in params.skews}
    return {s: float(n.max() / n.mean()) for s, n in loads.items()}


def trained_routers() -> tuple[float, float] | None:
    """Least and greatest load of the most wanted expert over the mean, by layer and run of the recorded LBL branch.

    Medians of the last tenth of each run. None where no such run is recorded.
    """
    import polars as pl

    from workbench.experiments import load

    branch = load("fig45_lbl_branch")
    if branch.recording is None:
        return None
    table = branch.run("recorded").table
    names = [c for c in table.columns if c.startswith("load_max_over_mean_")]
    if not names:
        return None
    late = table.filter(pl.col("step") > pl.col("step").max().over("seed", "arm") * 0.9)
    found = late.group_by("seed", "arm").agg(pl.col(names).median()).select(names).to_numpy()
    return float(found.min()), float(found.max())


def model(params: MechanismCostsParams) -> dict[str, list[dict[str, Any]]]:
    """Drops and capacity use of drawn routes, on the CPU."""
    import numpy as np

    from workbench.models.routing import drop_rate_curve

    rows = []
    for skew in params.skews:
        drops, use = drop_rate_curve(_routes(params, skew), params.num_experts, np.array(params.capacity_factors))
        for factor, drop, used in zip(params.capacity_factors, drops, use):
            rows.append(_drop_row(params, skew, factor, float(drop), float(used)))
    return {"drops": rows}


def measure(params: MechanismCostsParams, recorder: Any) -> None:
    """Time the mechanisms on this GPU and count its drops."""
    recorder.set(
        "protocol",
        timer="CUDA events around replays of a graph of several calls, per call; host loop: wall time of eager calls",
        warmup="3 replays; 3 eager calls",
        repeats=12,
        order="sizes ascending; whole capacity and valid prefix in turn",
        l2="not flushed; buffers of the largest size exceed it",
    )
    recorder.set("precision", parameter="bfloat16", activation="bfloat16", accumulation="float32")
    recorder.set("topology", nodes=1, gpus=1, ep_mp=params.ranks)
    recorder.set("workload", experts=params.num_experts, top_k=params.top_k,
                 metadata="route maps of one of the ranks; the counts of the others are drawn on the CPU")  # fmt: skip
    _measure_metadata(params, recorder)
    _measure_drops(params, recorder)
    _measure_tails(params, recorder)


def _timed(recorder: Any, name: str, call: Callable[[], Any], copies: int = 4) -> dict[str, float]:
    from workbench.measure.timing import graph_us, summary

    times = graph_us(call, copies=copies, repeats=12)
    recorder.samples(name, times)
    return summary(times)


def _measure_metadata(params: MechanismCostsParams, recorder: Any) -> None:
    import torch
    from moe_kernels.block import RoutedBlock
    from moe_kernels.model import development_config
    from moe_kernels.route_map import capacity_rows, route_map
    from moe_kernels.transport import VirtualTransport

    from workbench.measure.timing import launches, submit_us, summary

    # One rank's share of the experts does one rank's device work, here without its peers.
    config = development_config(params.num_experts // params.ranks, shared_mode="none").block
    block = RoutedBlock(config, path="rowwise", transport=VirtualTransport(1, "cuda"), device="cuda",
                        dtype=torch.bfloat16)  # fmt: skip
    for tokens in params.tokens:
        index = torch.rand(tokens, params.num_experts, device="cuda").topk(params.top_k).indices.int()
        counts = index.flatten().bincount(minlength=params.num_experts)
        everywhere, capacity = counts.repeat(params.ranks, 1), capacity_rows(tokens, params.top_k, 1.25)
        x = _random(tokens, config.width)
        calls = {
            METADATA: lambda i=index, n=everywhere, c=capacity: route_map(i, n, rank=0, capacity=c),
            BLOCK: torch.no_grad()(lambda x=x: block(x)),
        }
        for what, call in calls.items():
            recorder.row("metadata", what=what, tokens=tokens, capacity_factor=1.25,
                         **_timed(recorder, f"{what} {tokens}", call), **summary(submit_us(call), "submit_us"),
                         launches=launches(call))  # fmt: skip


def _measure_drops(params: MechanismCostsParams, recorder: Any) -> None:
    import numpy as np
    import torch
    from moe_kernels.route_map import capacity_rows, route_map

    for skew in params.skews:
        experts = _routes(params, skew)
        offered = np.stack([np.bincount(r.ravel(), minlength=params.num_experts) for r in experts])
        index = torch.from_numpy(experts).int().cuda()
        counts = torch.from_numpy(offered).long().cuda()
        for factor in params.capacity_factors:
            capacity = capacity_rows(params.drop_tokens, params.top_k, factor)
            stats = [route_map(index[r], counts, rank=r, capacity=capacity).stats for r in range(params.ranks)]
            total = torch.stack(stats).sum(0).tolist()
            row = _drop_row(params, skew, factor, total[2] / total[0], total[3] / (params.ranks * capacity))
            recorder.row("drops", **row, dropped=total[2], offered=total[0])


def _measure_tails(params: MechanismCostsParams, recorder: Any) -> None:
    import torch

    for tokens in params.tokens[-2:]:
        for factor in (1.25, 2.0):
            _measure_tail(params, recorder, tokens, factor)
            torch.cuda.empty_cache()
        _measure_host_loop(params, recorder, tokens)


def _even(rows: int, experts: int) -> Any:
    import torch

    ends = [rows * (i + 1) // experts for i in range(experts)]
    return torch.tensor(ends, dtype=torch.int32, device="cuda")


def _random(*shape: int, scale: float = 1.0) -> Any:
    import torch

    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


def _measure_tail(params: MechanismCostsParams, recorder: Any, tokens: int, factor: float) -> None:
    import torch
    from moe_kernels.grouped_gemm import grouped_gemm
    from moe_kernels.route_map import capacity_rows
    from moe_kernels.swiglu import swiglu, swiglu_backward

    experts, hidden = params.num_experts // params.ranks, params.expert_width
    valid, capacity = tokens * params.top_k, capacity_rows(tokens, params.top_k, factor)
    weights = _random(experts, params.width, 2 * hidden, scale=0.02)
    x, h, grad = _random(capacity, params.width), _random(capacity, 2 * hidden), _random(capacity, hidden)
    out_h, out_a = torch.empty_like(h), torch.empty_like(grad)
    for rows, ends in (("whole capacity", _even(capacity, experts)), ("valid prefix", _even(valid, experts))):
        calls = {
            "SwiGLU forward": lambda e=ends: swiglu(h, e, out=out_a),
            "SwiGLU backward": lambda e=ends: swiglu_backward(h, grad, e, out=out_h),
            "grouped GEMM, up and gate": lambda e=ends: grouped_gemm(x, weights, e, out=out_h),
        }
        for what, call in calls.items():
            recorder.row("tail", what=what, tokens=tokens, capacity_factor=factor, rows=rows,
                         **_timed(recorder, f"{what} {rows} {tokens} {factor}", call))  # fmt: skip


def _measure_host_loop(params: MechanismCostsParams, recorder: Any, tokens: int) -> None:
    import torch
    from moe_kernels.grouped_gemm import grouped_gemm

    from workbench.measure.timing import interleaved, summary, wall_us

    experts, hidden = params.num_experts // params.ranks, params.expert_width
    rows = tokens * params.top_k
    weights, x = _random(experts, params.width, 2 * hidden, scale=0.02), _random(rows, params.width)
    ends, out = _even(rows, experts), torch.empty(rows, 2 * hidden, device="cuda", dtype=torch.bfloat16)
    calls = {
        name: lambda i=impl: grouped_gemm(x, weights, ends, out=out, impl=i)
        for name, impl in (("device offsets", "triton"), ("item() per expert", "host_loop"))
    }
    times = interleaved(calls, rounds=6, timer=lambda call: wall_us(call, repeats=2, warmup=1, batch=4))
    for name, values in times.items():
        recorder.samples(f"grouped GEMM, {name}, {tokens}", values)
        recorder.row("host_loop", what=name, tokens=tokens, experts=experts, **summary(values))


def _ratio(rows: list[dict[str, Any]], what: str, tokens: int, factor: float) -> float | None:
    """Time on the valid prefix over time on the whole capacity."""
    at = {
        r["rows"]: r["time_us_p50"]
        for r in rows
        if (r["what"], r["tokens"], r["capacity_factor"]) == (what, tokens, factor)
    }
    return at["valid prefix"] / at["whole capacity"] if len(at) == 2 else None


def metadata_share(rows: list[dict[str, Any]]) -> dict[int, tuple[float, float]]:
    """Per size, the metadata kernels' device time in us and their share of a routed block's forward."""
    at = {(r["what"], r["tokens"]): r["time_us_p50"] for r in rows}
    return {t: (at[METADATA, t], at[METADATA, t] / at[BLOCK, t]) for t in sorted({t for _, t in at})}


def checks(result: Result) -> Iterator[Check]:
    """Costs that the table accepts, and what each mechanism removes."""
    drops = result.rows("drops")
    by = {(r["skew"], r["capacity_factor"]): r for r in drops}
    skews = sorted({r["skew"] for r in drops})
    factors = sorted({r["capacity_factor"] for r in drops})
    yield Check(
        "fixed capacity can drop routes: more at a smaller factor, more under skew",
        all(by[s, a]["drop_rate"] >= by[s, b]["drop_rate"] for s in skews for a, b in pairwise(factors))
        and by[skews[-1], factors[0]]["drop_rate"] > by[skews[0], factors[0]]["drop_rate"],
        ", ".join(f"skew {s:g}: {by[s, factors[0]]['drop_rate']:.1%}" for s in skews) + f" at {factors[0]:g}",
    )
    if 1.25 in factors and 0.0 in skews:
        yield Check(
            "balanced routes fit the default factor of 1.25 without a drop",
            by[0.0, 1.25]["drop_rate"] == 0,
            f"{by[0.0, 1.25]['drop_rate']:.2%}; skew {skews[-1]:g}: {by[skews[-1], 1.25]['drop_rate']:.1%}",
        )
    trained, drawn = trained_routers(), hottest_experts(result.params)
    if trained:
        text = ", ".join(f"skew {s:g}: {drawn[s]:.1f}x" for s in skews)
        yield Check(
            "the drawn skews span trained routers: the hottest expert's load over the mean",
            drawn[skews[0]] <= trained[0] and trained[1] <= drawn[skews[-1]],
            f"{text}; layers of the trained model of fig45_lbl_branch: {trained[0]:.1f}x to {trained[1]:.1f}x",
        )
    most = by[skews[0], factors[-1]]
    yield Check(
        "capacity reserves memory beyond the valid rows",
        most["capacity_use"] < 1,
        f"at factor {factors[-1]:g}: {most['bytes'] / 2**20:.0f} MiB per block and microbatch, "
        f"{most['capacity_use']:.0%} of it used",
    )
    if "metadata" in result.tables:
        yield from _measured_checks(result, by)


def _measured_checks(result: Result, by: dict[tuple[float, float], Any]) -> Iterator[Check]:
    drawn = model(result.params)
    same = sum(abs(by[r["skew"], r["capacity_factor"]]["drop_rate"] - r["drop_rate"]) < 1e-12 for r in drawn["drops"])
    metadata = result.rows("metadata")
    shares = metadata_share(metadata)
    launches = {r["launches"] for r in metadata if r["what"] == METADATA}
    yield Check(
        "the device drops exactly the routes that the CPU model drops", same == len(by), f"{same} of {len(by)} settings"
    )
    yield Check("metadata costs every routed layer device time, in at most three launches",
                min(t for t, _ in shares.values()) > 0 and max(launches) <= 3,
                ", ".join(f"{t} tokens: {us:.1f} us" for t, (us, _) in shares.items()))  # fmt: skip
    yield Check("metadata's share of a routed block's forward falls as the microbatch grows",
              all(shares[a][1] > shares[b][1] for a, b in pairwise(sorted(shares))),
              ", ".join(f"{t} tokens: {share:.1%}" for t, (_, share) in shares.items()))  # fmt: skip
    tails = result.rows("tail")
    for what in dict.fromkeys(r["what"] for r in tails):
        found = {
            (t, f): _ratio(tails, what, t, f)
            for t, f in sorted({(r["tokens"], r["capacity_factor"]) for r in tails if r["what"] == what})
        }
        # One-sided: on a GPU at its power limit the longer call also runs at a lower clock.
        near = all(v is not None and v * f < 1 + NEAR for (_, f), v in found.items())
        text = ", ".join(f"{t} tokens, factor {f:g}: {v:.2f} (rows {1 / f:.2f})" for (t, f), v in found.items() if v)
        yield Check(f"{what} stops at the valid rows: its time falls at least with them, within {NEAR:.0%}", near, text)
    loops = {(r["what"], r["tokens"]): r["time_us_p50"] for r in result.rows("host_loop")}
    text = ", ".join(
        f"{t} tokens: {loops['item() per expert', t] / loops['device offsets', t]:.2f}x"
        for t in sorted({t for _, t in loops})
    )
    slower = all(loops["item() per expert", t] > loops["device offsets", t] for _, t in loops)
    yield Check("a host loop with item() per expert is slower than device offsets", slower, text)


def draw(result: Result) -> go.Figure:
    """Draw drops and reserved memory over the capacity factor; measured: metadata share and avoided tail work too."""
    from workbench.core.colours import SERIES
    from workbench.views.plotting import figure

    measured = "metadata" in result.tables
    titles = ["Routes dropped", "Capacity memory used"]
    if measured:
        titles += ["Metadata, share of a forward", "Time, valid rows / all rows"]
    fig = figure("What the mechanisms of Table 14 cost", rows=2 if measured else 1, cols=2,
                 height=780 if measured else 450, shared_xaxes=False, vertical_spacing=0.2, horizontal_spacing=0.12,
                 subplot_titles=titles)  # fmt: skip
    fig.update_annotations(font={"size": 12})
    hottest = hottest_experts(result.params)
    drops = result.rows("drops")
    for colour, skew in zip(SERIES, sorted({r["skew"] for r in drops})):
        name = f"skew {skew:g}: {hottest[skew]:.1f}x"
        load = f"skew {skew:g}, hottest expert {hottest[skew]:.1f}x the mean"
        part = sorted((r for r in drops if r["skew"] == skew), key=lambda r: r["capacity_factor"])
        for column, key in ((1, "drop_rate"), (2, "capacity_use")):
            fig.add_scatter(
                x=[r["capacity_factor"] for r in part], y=[r[key] for r in part], mode="lines+markers",
                name=name, legendgroup=name, showlegend=column == 1, line={"color": colour},
                customdata=[r["bytes"] / 2**20 for r in part],
                hovertemplate=load + "<br>factor %{x}: %{y:.2%}<br>%{customdata:.0f} MiB per block and microbatch"
                "<extra></extra>",
                row=1, col=column,
            )  # fmt: skip
        fig.update_yaxes(tickformat=".0%", row=1)
    fig.update_xaxes(title="capacity factor", row=1)
    if measured:
        _draw_measured(fig, result)
    fig.update_layout(legend={"yref": "container", "y": 0.005, "yanchor": "bottom"},
                      margin={"t": 100, "b": 170 if measured else 110})  # fmt: skip
    return fig


def _draw_measured(fig: go.Figure, result: Result) -> None:
    from workbench.core.colours import COLOURS, INK, SERIES

    shares = metadata_share(result.rows("metadata"))
    fig.add_bar(
        x=[f"{t:,}" for t in shares], y=[s for _, s in shares.values()], showlegend=False,
        text=[f"{us:.0f} us<br>{s:.1%}" for us, s in shares.values()], textposition="outside", cliponaxis=False,
        marker={"color": COLOURS["gpu_execute"]}, hovertemplate="%{x} tokens: %{y:.2%}<extra>metadata</extra>",
        row=2, col=1,
    )  # fmt: skip
    tails = result.rows("tail")
    tokens = max(r["tokens"] for r in tails)
    factors = sorted({r["capacity_factor"] for r in tails})
    for colour, what in zip(SERIES[4:] + SERIES, dict.fromkeys(r["what"] for r in tails)):
        fig.add_bar(x=[f"{f:g}" for f in factors], y=[_ratio(tails, what, tokens, f) for f in factors], name=what,
                    marker={"color": colour}, hovertemplate="factor %{x}: %{y:.2f}<extra>" + what + "</extra>",
                    row=2, col=2)  # fmt: skip
    fig.add_bar(x=[f"{f:g}" for f in factors], y=[1 / f for f in factors], name="share of rows that is valid",
                marker={"color": "rgba(0,0,0,0)", "line": {"color": INK, "width": 2}},
                hovertemplate="factor %{x}: %{y:.2f}<extra>valid rows</extra>", row=2, col=2)  # fmt: skip
    fig.update_xaxes(type="category", title="capacity factor", row=2, col=2)
    fig.update_xaxes(type="category", title="tokens per rank", row=2, col=1)
    # The words above the bars need room.
    top = 1.25 * max(s for _, s in shares.values())
    fig.update_yaxes(tickformat=".1%", title="share of device time", row=2, col=1, range=[0, top])
    fig.update_yaxes(title=f"at {tokens:,} tokens", row=2, col=2, rangemode="tozero")


EXPERIMENT = Experiment(
    slug="tab14_mechanism_costs",
    group="s08_sync_free",
    title="Table 14, measured: the costs accepted for device-resident routes",
    claim="Metadata kernels, reserved capacity and drops are what the removed host dependencies cost.",
    kind="measured",
    anchor="Section 8.5, Table 14",
    params=MechanismCostsParams,
    figure=draw,
    checks=checks,
    model=model,
    measure=measure,
    recorded=recorded_kinds("part"),
    tests=(
        "tests/experiments/test_tab14_mechanism_costs.py",
        "tests/kernels/test_route_map.py",
        "tests/kernels/test_block.py",
        "tests/kernels/test_block_gpu.py",
    ),
    recording="2026-11-29_h200_464a777",
)
