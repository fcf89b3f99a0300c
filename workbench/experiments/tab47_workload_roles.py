"""Tables 46 and 47: two workloads of one family, every printed value derived anew, and what stays undetermined."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.core.params import Params, param

if TYPE_CHECKING:
    import plotly.graph_objects as go

WORKLOADS = {"reference": "30-block reference", "profiling": "profiling workload"}


@dataclass(frozen=True, kw_only=True)
class WorkloadRolesParams(Params):
    """A configuration of one's own: the routed part of the 30-block reference, the rest one feasible point."""

    blocks: int = param(30, "transformer blocks", min=1, max=128)
    dense_blocks: int = param(2, "blocks with a dense feed-forward", min=0, max=8)
    d_model: int = param(1536, "model width", min=256, max=8192, step=256)
    routed_experts: int = param(128, "routed experts per block", min=8, max=512, step=8)
    top_k: int = param(8, "experts per token", min=1, max=16)
    expert_width: int = param(1536, "expert width", min=128, max=8192, step=128)
    shared_width: int = param(1536, "width of the shared expert; not printed", min=0, max=8192, step=128)
    mixer_M: float = param(22.94, "mixer parameters per block; not printed", unit="M", min=0, max=500, step=0.02)
    dense_width: int = param(13984, "dense feed-forward width; not printed", min=0, max=65536, step=32)
    embedding_M: float = param(300.0, "embedding and head; not printed", unit="M", min=0, max=5000, step=10)
    gpus: int = param(32, "GPUs, a multiple of EP", min=8, max=1024, step=8)
    ep: int = param(8, "expert-parallel degree", choices=(1, 2, 4, 8))
    global_batch_Mi: float = param(18.0, "global batch", unit="Mi tokens", min=0.25, max=128, step=0.25)
    rank_microbatch_tokens: int = param(24576, "rank microbatch", unit="tokens", min=8192, max=131072, step=8192)
    submit_us: float = param(
        1500.0, "host time per routed block's forward; assumed", unit="us", min=50, max=20000, step=50
    )
    device_TFLOPs: float = param(
        800.0, "rate of the GPU's block forward; assumed", unit="TFLOP/s", min=50, max=2250, step=10
    )


def model(params: WorkloadRolesParams) -> dict[str, list[dict[str, Any]]]:
    """Return printed values beside computed ones, what is exact, what stays open, and the own configuration."""
    return {"derived": _derived(), **_open(), "own": _own(params)}


def _ratios(active: float, total: float, batch: float, sparse: Any) -> list[tuple[str, str, float, float]]:
    """(quantity, unit, value, scale to the unit) of what both a printed and one's own configuration derive."""
    from workbench.models import configurations as c

    share = c.alpha_P(active, total)
    return [
        ("alpha_P", "%", 100 * share, 1.0),
        ("capacity_to_active", "x", 1.0 / share, 1.0),
        ("experts_per_active", "", sparse.experts_per_active, 1.0),
        ("balanced_assignments_per_expert", "Mi", c.balanced_assignments(batch, sparse), c.MI),
    ]


def _derived() -> list[dict[str, Any]]:
    """Every derived value that Section B.4 prints, computed from the sizes of Table 47."""
    from workbench.core.report_tables import table_47
    from workbench.models import configurations as c

    printed = table_47()
    rows = []
    for workload, sparse in c.WORKLOADS.items():
        t = {q: v[workload] for q, v in printed.items()}
        active, total, batch = (t[q].value for q in ("active_params", "total_params", "global_batch_tokens"))
        computed = _ratios(active, total, batch, sparse)
        if t["rank_microbatch_tokens"]:
            for gpus in (8, 32):
                steps = c.accumulation_microbatches(batch, gpus, t["rank_microbatch_tokens"].value)
                computed.append((f"accumulation_{gpus}_gpus", "microbatches", steps, 1.0))
        for quantity, unit, value, scale in computed:
            p = t[quantity]
            rows.append({"workload": workload, "quantity": quantity, "unit": unit, "value": value / scale,
                         "printed": p.text, "printed_value": p.value / scale, "agrees": p.agrees(value)})  # fmt: skip
    return rows


def _open() -> dict[str, list[dict[str, Any]]]:
    """What the printed sizes determine exactly, and the range of what they leave open, in parameters.

    Tables: ``exact``; ``gap``, of printed total and active size, which must hold the inactive experts; ``range``;
    ``dense_width``, in columns, over the size of embedding and head.
    """
    from workbench.core.report_tables import table_47
    from workbench.models import configurations as c

    t = table_47()
    sizes = {(q, w): c.Interval(*t[f"{q}_params"][w].interval) for q in ("total", "active") for w in WORKLOADS}
    u = c.undetermined(*(sizes[q, w] for w in WORKLOADS for q in ("total", "active")))
    exact, gaps, ranges = [], [], []
    for workload, sparse in c.WORKLOADS.items():
        for quantity in ("routed_params", "active_routed_params", "inactive_params", "router_params"):
            exact.append({"workload": workload, "quantity": quantity, "value": float(getattr(sparse, quantity))})
        gap = sizes["total", workload] - sizes["active", workload]
        gaps.append({"workload": workload, "low": gap.low, "high": gap.high, "agrees": sparse.inactive_params in gap})
        ranges += [(workload, f"{n} parameters", u[f"{n}_{workload}"]) for n in ("total", "unrouted")]
    ranges += [
        ("both", "mixer + shared expert, mean of an added block", u["per_extra_block"]),
        ("both", "mixer per block", u["mixer"]),
        ("both", "embedding + head + two dense feed-forwards", u["rest"]),
    ]
    widths = {M: c.dense_width_range(u["rest"], M * 1e6, c.PROFILING) for M in range(0, 441, 20)}
    return {
        "exact": exact,
        "gap": gaps,
        "range": [{"workload": w, "quantity": q, "low": i.low, "high": i.high} for w, q, i in ranges],
        "dense_width": [{"embedding_M": M, "low": i.low, "high": i.high} for M, i in widths.items() if i is not None],
    }


def _own(p: WorkloadRolesParams) -> list[dict[str, Any]]:
    """The configuration of the sliders: sizes, batch, training state per GPU and where submission meets execution."""
    from workbench.models import configurations as c
    from workbench.models.sharding import shard

    names = ("blocks", "dense_blocks", "d_model", "routed_experts", "top_k", "expert_width")
    sparse = c.Sparse(**{n: getattr(p, n) for n in names})
    size = c.model_size(
        sparse,
        shared_width=p.shared_width,
        mixer_params_per_block=p.mixer_M * 1e6,
        dense_width=p.dense_width,
        embedding_params=p.embedding_M * 1e6,
    )
    batch = p.global_batch_Mi * c.MI
    ratios = _ratios(size.active, size.total, batch, sparse)
    steps = c.accumulation_microbatches(batch, p.gpus, p.rank_microbatch_tokens)
    block = p.mixer_M * 1e6 + 3 * p.d_model * (p.shared_width + p.top_k * p.expert_width) + p.d_model * p.routed_experts
    per_token_us = 2 * block / (p.device_TFLOPs * 1e6)
    crossing = p.submit_us / per_token_us
    rows = [
        ("total parameters", "parameters", size.total),
        ("active parameters", "parameters", size.active),
        ("inactive_params", "parameters", size.inactive),
        ("unrouted parameters", "parameters", size.unrouted),
        *((quantity, unit, value / scale) for quantity, unit, value, scale in ratios),
        ("accumulation microbatches", "microbatches", steps),
        ("crossover: microbatch where device time meets submission", "tokens", crossing),
        ("device time over submission time at this microbatch", "x", p.rank_microbatch_tokens / crossing),
    ]
    for policy in ("ddp_sharded_optimizer", "fsdp_full_reshard"):
        cost = shard(
            policy,
            dense_params=size.unrouted,
            routed_params=size.routed,
            world=p.gpus,
            ep=p.ep,
            microbatches=max(1, round(steps)),
            blocks=p.blocks,
        )
        rows.append((f"training state per GPU, {policy}", "GiB", cost.memory_bytes / 2**30))
    return [{"quantity": quantity, "unit": unit, "value": float(value)} for quantity, unit, value in rows]


def checks(result: Result) -> Iterator[Check]:
    """Printed derived values to half a digit; exact inactive experts inside the printed gap; whole accumulation."""
    out = []
    for r in result.rows("derived"):
        claim = f"{WORKLOADS[r['workload']]}: {r['quantity']} is {r['printed']} {r['unit']}".rstrip()
        out.append(Check(claim, r["agrees"], f"{r['value']:.6g}"))
    for r in result.rows("gap"):
        exact = _find(result, "exact", r["workload"], "inactive_params")["value"]
        claim = f"{WORKLOADS[r['workload']]}: inactive experts lie in total - active"
        out.append(Check(claim, r["agrees"], f"{exact:,.0f}"))
    steps = _own_value(result, "accumulation microbatches")
    whole = float(steps).is_integer() and steps >= 1
    claim = "own configuration: the global batch is a whole number of microbatches"
    yield from out
    yield Check(claim, whole or None, f"{steps:g}")


def _find(result: Result, table: str, workload: str, quantity: str) -> dict[str, Any]:
    (row,) = (r for r in result.rows(table) if (r["workload"], r["quantity"]) == (workload, quantity))
    return row


def _own_value(result: Result, quantity: str) -> float:
    return next(r["value"] for r in result.rows("own") if r["quantity"] == quantity)


def draw(result: Result) -> go.Figure:
    """Left: parameters by part, with the printed totals. Right: which dense widths fit, for each embedding size."""
    import plotly.graph_objects as go

    from workbench.core.colours import COLOURS, SERIES
    from workbench.core.report_tables import table_47
    from workbench.views.plotting import figure

    fig = figure(
        "What the printed sizes determine, and what they leave open", height=600, cols=2, column_widths=[0.55, 0.45],
        horizontal_spacing=0.14, shared_xaxes=False, subplot_titles=("Parameters", "Dense width against embedding"),
    )  # fmt: skip
    names = ["30-block<br>reference", "profiling<br>workload", "own<br>configuration"]
    own = {q: _own_value(result, q) for q in ("inactive_params", "unrouted parameters", "active parameters")}
    inactive = [_find(result, "exact", w, "inactive_params")["value"] for w in WORKLOADS] + [own["inactive_params"]]
    unrouted = [_middle(_find(result, "range", w, "unrouted parameters")) for w in WORKLOADS]
    unrouted.append(own["unrouted parameters"])
    routed = [_find(result, "exact", w, "active_routed_params")["value"] for w in WORKLOADS]
    routed.append(own["active parameters"] - unrouted[-1])
    parts = (
        ("all but routed experts (model, from the printed total)", unrouted, SERIES[0]),
        ("routed, active per token (model, exact)", routed, SERIES[2]),
        ("routed, inactive (model, exact)", inactive, SERIES[5]),
    )
    for name, values, colour in parts:
        bar = go.Bar(x=names, y=[v / 1e9 for v in values], name=name, marker_color=colour, hovertemplate="%{y:.3f} B")
        fig.add_trace(bar, row=1, col=1)
    printed = table_47()
    for quantity, symbol in (("total_params", "diamond-open"), ("active_params", "circle-open")):
        y = [printed[quantity][w].value / 1e9 for w in WORKLOADS]
        marker = {"symbol": symbol, "size": 13, "color": COLOURS["report"], "line": {"width": 2}}
        label = f"{quantity.split('_')[0]} (report)"
        fig.add_scatter(x=names[:2], y=y, mode="markers", name=label, marker=marker, row=1, col=1)
    open_rows = result.rows("dense_width")
    x = [r["embedding_M"] for r in open_rows]
    band = go.Scatter(
        x=x + x[::-1],
        y=[r["low"] for r in open_rows] + [r["high"] for r in open_rows][::-1],
        fill="toself",
        mode="lines",
        line={"color": SERIES[3], "width": 3},
        name="feasible, on the stated assumptions (model)",
    )
    fig.add_trace(band, row=1, col=2)
    p = result.params
    cross = {"symbol": "x", "size": 11, "color": SERIES[1]}
    own_point = go.Scatter(x=[p.embedding_M], y=[p.dense_width], mode="markers", name="own configuration", marker=cross)
    fig.add_trace(own_point, row=1, col=2)
    fig.update_layout(barmode="stack", legend={"y": -0.26, "yanchor": "top"}, margin={"b": 250, "t": 90})
    below = {"xref": "paper", "yref": "paper", "x": 0, "y": 0, "yshift": -175, "xanchor": "left", "yanchor": "top"}
    fig.add_annotation(text=summary(result), align="left", showarrow=False, **below)
    fig.update_yaxes(title="parameters (billions)", row=1, col=1)
    fig.update_yaxes(title="dense feed-forward width", rangemode="tozero", row=1, col=2)
    fig.update_xaxes(title="embedding and head (M parameters)", row=1, col=2)
    return fig


def summary(result: Result) -> str:
    """Say the own configuration in three lines: size, training state per GPU, crossover."""
    own = lambda q: _own_value(result, q)  # noqa: E731
    size = f"{own('total parameters') / 1e9:.3f} B total, {own('active parameters') / 1e9:.3f} B active"
    sparsity = f"{own('alpha_P'):.2f} % active, {own('capacity_to_active'):.2f}x gap"
    ddp, fsdp = (own(f"training state per GPU, {p}") for p in ("ddp_sharded_optimizer", "fsdp_full_reshard"))
    crossing = own("crossover: microbatch where device time meets submission")
    ratio = own("device time over submission time at this microbatch")
    verdict = "the CPU can stay ahead" if ratio >= 1 else "the GPU can run dry"
    p = result.params
    return (
        f"Own configuration (model): {size}; {sparsity}<br>"
        f"training state on {p.gpus} GPUs, EP {p.ep}: {ddp:.1f} GiB each (DDP), {fsdp:.1f} GiB (full reshard)<br>"
        f"a block's forward outlasts its submission above {crossing:,.0f} tokens (hint): "
        f"at {p.rank_microbatch_tokens:,} {verdict}, {ratio:.1f}x"
    )


def _middle(row: dict[str, Any]) -> float:
    return (row["low"] + row["high"]) / 2


EXPERIMENT = Experiment(
    slug="tab47_workload_roles",
    group="appendix_b",
    title="Tables 46 and 47: two workloads that must not be compared",
    claim=(
        "The 30-block reference and the profiling workload share a core path but differ in sparsity and batch; "
        "every derived value follows from the printed sizes."
    ),
    kind="model",
    anchor="Sections B.2 and B.4, Tables 46 and 47",
    params=WorkloadRolesParams,
    figure=draw,
    checks=checks,
    model=model,
)
