"""Section B.3: what full-reshard FSDP2, DDP with sharded optimizer state and the policies between cost one rank."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.core.params import Params, param
from workbench.models.configurations import MI, SEQUENCE_TOKENS, accumulation_microbatches

if TYPE_CHECKING:
    import plotly.graph_objects as go

WORLDS = (8, 16, 32, 64, 128, 256)
SEQUENCES = (1, 2, 3, 4, 6, 9, 12)
MEMORY = ("weights", "gradients", "optimizer", "memory")
SENT = ("gather", "reduce", "sent")
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
    world: int = param(64, "ranks in the right panel", choices=WORLDS)
    shard_ranks: int = param(32, "ranks of one HSDP shard group", choices=(8, 16, 32))


def model(params: FsdpEndpointsParams) -> list[dict[str, Any]]:
    """Return memory and communication of every policy, over world sizes and over microbatch sizes."""
    from workbench.models.sharding import POLICIES, shard

    batch = params.global_batch_Mi * MI
    points = [("world", w, params.rank_sequences) for w in WORLDS]
    points += [("microbatch", params.world, s) for s in SEQUENCES]
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
            place = {"sweep": sweep, "policy": policy, "world": world}
            sizes = {"rank_microbatch_tokens": tokens, "microbatches": int(steps)}
            memory = {f"{n}_GiB": getattr(cost, f"{n}_bytes") / 2**30 for n in MEMORY}
            sent = {f"{n}_GB": getattr(cost, f"{n}_bytes") / 1e9 for n in SENT}
            rows.append(place | sizes | memory | sent | {"sent_bytes_per_token": cost.sent_bytes * world / batch})
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
    # Each row but HSDP's between full resharding and DDP at the same place.
    between = []
    for r in rows:
        place = (r["world"], r["rank_microbatch_tokens"])
        if r["policy"] != "hsdp":
            between.append((r, *(at[r["sweep"], p, *place] for p in ENDPOINTS)))

    def ordered(name: str, *three: dict[str, Any]) -> bool:
        return all(a[name] <= b[name] * (1 + 1e-9) for a, b in itertools.pairwise(three))

    least = all(ordered("memory_GiB", full, r) for r, full, _ in between)
    most = all(ordered("memory_GiB", r, ddp) for r, _, ddp in between)
    sent = all(ordered("sent_GB", ddp, r, full) for r, full, ddp in between)
    ratio = [r["memory_GiB"] / d["memory_GiB"] for r, _, d in between if r["policy"] == "fsdp_retain_step_no_sync"]
    kept = all(abs(x - 1) < 0.01 for x in ratio)
    sizes = [r for r in rows if r["sweep"] == "microbatch"]
    per = {round(r["sent_GB"] / r["microbatches"], 6) for r in sizes if r["policy"] == ENDPOINTS[0]}
    flat = {r["sent_GB"] for r in sizes if r["policy"] == ENDPOINTS[1]}
    each, once = (f"{min(found, default=0):.1f} GB" for found in (per, flat))
    count = f"{len(rows)} rows"
    return [
        Check("full resharding needs the least memory of all but HSDP", least, count),
        Check("no retention policy needs more memory than DDP with sharded optimizer state", most, count),
        Check("what they send lies between the two endpoints", sent, count),
        Check("weights and gradients retained across the step take the DDP path's memory", kept,
              f"{max(ratio):.3f} of it"),
        Check("full resharding sends in proportion to the microbatches", len(per) == 1 or None, f"{each} each"),
        Check("the DDP path sends the same at every microbatch size", len(flat) == 1 or None, once),
    ]  # fmt: skip


def draw(result: Result) -> go.Figure:
    """Left: training state per rank against world size. Right: bytes sent per step against the microbatch."""
    from workbench.core.colours import SERIES
    from workbench.models.sharding import POLICIES
    from workbench.views.plotting import figure

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
    for i, (policy, name) in enumerate(POLICIES.items()):
        for col, sweep, x, y in (
            (1, "world", "world", "memory_GiB"),
            (2, "microbatch", "rank_microbatch_tokens", "sent_GB"),
        ):
            part = [r for r in rows if r["policy"] == policy and r["sweep"] == sweep]
            line = {"color": SERIES[i], "dash": dashes.get(policy, "dash"), "width": 3 if policy in ENDPOINTS else 2}
            fig.add_scatter(
                x=[r[x] for r in part],
                y=[r[y] for r in part],
                mode="lines+markers",
                name=name.format(p.shard_ranks),
                legendgroup=policy,
                showlegend=col == 1,
                line=line,
                marker={"symbol": i, "size": 8},
                customdata=[[r[k] for k in hover] for r in part],
                hovertemplate="%{y:.1f} at %{x}<br>weights %{customdata[0]:.1f}, gradients %{customdata[1]:.1f}, "
                "optimizer %{customdata[2]:.1f} GiB<br>gather %{customdata[3]:.1f}, "
                "reduce %{customdata[4]:.1f} GB in %{customdata[5]} microbatches<extra></extra>",
                row=1,
                col=col,
            )
    fig.update_xaxes(type="log", title="ranks", tickvals=WORLDS, row=1, col=1)
    ticks = [s * SEQUENCE_TOKENS for s in SEQUENCES]
    fig.update_xaxes(
        type="log", title="rank microbatch (tokens)", tickvals=ticks, ticktext=[f"{t // 1024}Ki" for t in ticks],
        row=1, col=2,
    )  # fmt: skip
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
