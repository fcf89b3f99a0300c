"""Section B.3: what full-reshard FSDP2, DDP with sharded optimizer state and the policies between cost one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.core.params import Params, param

if TYPE_CHECKING:
    import plotly.graph_objects as go

SEQUENCE_TOKENS = 8192
ENDPOINTS = ("fsdp_full_reshard", "ddp_sharded_optimizer")


@dataclass(frozen=True, kw_only=True)
class FsdpEndpointsParams(Params):
    """The 30-block reference by default; its parameters outside the routed experts are printed total minus routed."""

    dense_B: float = param(1.3207, "parameters that every rank uses", unit="B", min=0.01, max=100, step=0.01)
    routed_B: float = param(25.36715, "routed-expert parameters", unit="B", min=0.0, max=3000, step=0.1)
    blocks: int = param(30, "separately wrapped blocks", min=2, max=128)
    ep: int = param(8, "expert-parallel degree", choices=(1, 2, 4, 8))
    global_batch_Mi: float = param(18.0, "global batch", unit="Mi tokens", min=0.25, max=128, step=0.25)
    rank_sequences: int = param(3, "sequences of 8192 per rank microbatch in the left panel", min=1, max=16)
    world: int = param(64, "ranks in the right panel", choices=(8, 16, 32, 64, 128, 256))
    shard_ranks: int = param(32, "ranks of one HSDP shard group", choices=(8, 16, 32))


def model(params: FsdpEndpointsParams) -> list[dict[str, Any]]:
    """Return memory and communication of every policy, over world sizes and over microbatch sizes."""
    from workbench.models.configurations import MI, accumulation_microbatches
    from workbench.models.sharding import POLICIES, shard

    batch = params.global_batch_Mi * MI
    points = [("world", w, params.rank_sequences) for w in (8, 16, 32, 64, 128, 256)]
    points += [("microbatch", params.world, s) for s in (1, 2, 3, 4, 6, 9, 12)]
    rows = []
    for sweep, world, sequences in points:
        tokens = sequences * SEQUENCE_TOKENS
        steps = accumulation_microbatches(batch, world, tokens)
        if steps < 1 or not float(steps).is_integer():
            continue
        for policy in POLICIES:
            if policy == "hsdp" and world % params.shard_ranks:
                continue
            cost = shard(
                policy,
                dense_params=params.dense_B * 1e9,
                routed_params=params.routed_B * 1e9,
                world=world,
                ep=params.ep,
                microbatches=int(steps),
                blocks=params.blocks,
                shard_ranks=params.shard_ranks,
            )
            rows.append(
                {
                    "sweep": sweep,
                    "policy": policy,
                    "world": world,
                    "rank_microbatch_tokens": tokens,
                    "microbatches": int(steps),
                    "weights_GiB": cost.weights_bytes / 2**30,
                    "gradients_GiB": cost.gradients_bytes / 2**30,
                    "optimizer_GiB": cost.optimizer_bytes / 2**30,
                    "memory_GiB": cost.memory_bytes / 2**30,
                    "gather_GB": cost.gather_bytes / 1e9,
                    "reduce_GB": cost.reduce_bytes / 1e9,
                    "sent_GB": cost.sent_bytes / 1e9,
                    "sent_bytes_per_token": cost.sent_bytes * world / batch,
                }
            )
    if not rows:
        raise ValueError(
            f"global_batch_Mi {params.global_batch_Mi:g}: no world size divides it into whole microbatches of "
            f"{params.rank_sequences} sequences"
        )
    return rows


def checks(result: Result) -> list[Check]:
    """The endpoints enclose every policy but HSDP, and retention approaches the DDP path's memory."""
    rows = result.table.to_dicts()
    at = {(r["sweep"], r["policy"], r["world"], r["rank_microbatch_tokens"]): r for r in rows}
    least = most = sent = True
    ratio = []
    for r in rows:
        if r["policy"] == "hsdp":
            continue
        place = (r["world"], r["rank_microbatch_tokens"])
        full, ddp = (at[r["sweep"], p, *place] for p in ENDPOINTS)
        least &= full["memory_GiB"] <= r["memory_GiB"] * (1 + 1e-9)
        most &= r["memory_GiB"] <= ddp["memory_GiB"] * (1 + 1e-9)
        sent &= ddp["sent_GB"] <= r["sent_GB"] * (1 + 1e-9) and r["sent_GB"] <= full["sent_GB"] * (1 + 1e-9)
        if r["policy"] == "fsdp_retain_step_no_sync":
            ratio.append(r["memory_GiB"] / ddp["memory_GiB"])
    flat = {r["sent_GB"] for r in rows if r["policy"] == ENDPOINTS[1] and r["sweep"] == "microbatch"}
    full = [
        (r["microbatches"], r["sent_GB"]) for r in rows if r["policy"] == ENDPOINTS[0] and r["sweep"] == "microbatch"
    ]
    per = {round(sent_GB / m, 6) for m, sent_GB in full}
    kept = all(abs(x - 1) < 0.01 for x in ratio)
    claims = (
        ("full resharding needs the least memory of all but HSDP", least, f"{len(rows)} rows"),
        ("no retention policy needs more memory than DDP with sharded optimizer state", most, f"{len(rows)} rows"),
        ("what they send lies between the two endpoints", sent, f"{len(rows)} rows"),
        ("weights and gradients retained across the step take the DDP path's memory", kept, f"{max(ratio):.3f} of it"),
        (
            "full resharding sends in proportion to the microbatches",
            len(per) == 1 or None,
            f"{min(per, default=0):.1f} GB each",
        ),
        (
            "the DDP path sends the same at every microbatch size",
            len(flat) == 1 or None,
            f"{min(flat, default=0):.1f} GB",
        ),
    )
    return [Check(*claim) for claim in claims]


def draw(result: Result) -> go.Figure:
    """Left: training state per rank against world size. Right: bytes sent per step against the microbatch."""
    import plotly.graph_objects as go

    from workbench.core.colours import SERIES
    from workbench.views.plotting import figure

    names = {
        "fsdp_full_reshard": "FSDP2, full reshard (endpoint)",
        "fsdp_retain_backward": "FSDP2, weights kept through backward",
        "fsdp_retain_step": "FSDP2, weights kept across the step",
        "fsdp_retain_step_no_sync": "FSDP2, weights and gradients kept (on the DDP line)",
        "hsdp": f"HSDP, shard groups of {result.params.shard_ranks}",
        "ddp_sharded_optimizer": "DDP, sharded optimizer (endpoint)",
    }
    dashes = {"fsdp_full_reshard": "solid", "ddp_sharded_optimizer": "solid", "fsdp_retain_step_no_sync": "dot"}
    p = result.params
    fig = figure(
        "Two endpoints and what lies between, per rank",
        height=520,
        cols=2,
        shared_xaxes=False,
        horizontal_spacing=0.12,
        subplot_titles=(
            f"Training state, {p.rank_sequences} sequences per microbatch",
            f"Sent per optimizer step, {p.world} ranks",
        ),
    )
    rows = result.table.to_dicts()
    hover = ("weights_GiB", "gradients_GiB", "optimizer_GiB", "gather_GB", "reduce_GB", "microbatches")
    for i, (policy, name) in enumerate(names.items()):
        for col, sweep, x, y in (
            (1, "world", "world", "memory_GiB"),
            (2, "microbatch", "rank_microbatch_tokens", "sent_GB"),
        ):
            part = [r for r in rows if r["policy"] == policy and r["sweep"] == sweep]
            line = {"color": SERIES[i], "dash": dashes.get(policy, "dash"), "width": 3 if policy in ENDPOINTS else 2}
            fig.add_trace(
                go.Scatter(
                    x=[r[x] for r in part],
                    y=[r[y] for r in part],
                    mode="lines+markers",
                    name=name,
                    legendgroup=policy,
                    showlegend=col == 1,
                    line=line,
                    marker={"symbol": i, "size": 8},
                    customdata=[[r[k] for k in hover] for r in part],
                    hovertemplate="%{y:.1f} at %{x}<br>weights %{customdata[0]:.1f}, gradients %{customdata[1]:.1f}, "
                    "optimizer %{customdata[2]:.1f} GiB<br>gather %{customdata[3]:.1f}, "
                    "reduce %{customdata[4]:.1f} GB in %{customdata[5]} microbatches<extra></extra>",
                ),
                row=1,
                col=col,
            )
    fig.update_xaxes(type="log", title="ranks", tickvals=[8, 16, 32, 64, 128, 256], row=1, col=1)
    ticks = [s * SEQUENCE_TOKENS for s in (1, 2, 3, 4, 6, 9, 12)]
    fig.update_xaxes(
        type="log",
        title="rank microbatch (tokens)",
        tickvals=ticks,
        ticktext=[f"{t // 1024}Ki" for t in ticks],
        row=1,
        col=2,
    )
    fig.update_yaxes(title="GiB per rank", rangemode="tozero", row=1, col=1)
    fig.update_yaxes(
        title="GB sent per rank and step", type="log", tickvals=[20, 50, 100, 200, 500, 1000], row=1, col=2
    )
    fig.update_layout(legend={"y": -0.26, "yanchor": "top"}, margin={"b": 150, "t": 90})
    return fig


EXPERIMENT = Experiment(
    slug="b3_fsdp_endpoints",
    group="appendix_b",
    title="Section B.3: memory and communication of sharding, between two endpoints",
    claim="Full resharding keeps the least and sends the most; DDP with sharded optimizer state does the opposite.",
    kind="model",
    anchor="Section B.3",
    params=FsdpEndpointsParams,
    figure=draw,
    checks=checks,
    model=model,
)
