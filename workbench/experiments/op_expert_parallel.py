"""The routed paths over several GPUs of one host: parity with one rank, bandwidth between the GPUs, block times."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.core.params import Params, param
from workbench.core.tables import recorded_kinds

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import polars as pl

PATHS = (("synchronized", "stream"), ("synchronized", "before_wait"), ("rowwise", "stream"))
LABELS = {
    ("synchronized", "stream"): "synchronized",
    ("synchronized", "before_wait"): "synchronized, wait covered",
    ("rowwise", "stream"): "rowwise",
}
COPIES = {
    "dispatch": "peer copy, write", "combine": "peer copy, read", "dispatch, backward": "peer copy, read",
}  # fmt: skip
"""The copy that bounds a call: dispatch writes to peers; combine and the backward of dispatch read from them."""
NEAR = 0.85
"""Share of a peer copy's rate that counts as near it: rows of 5 KiB scattered over a buffer against one long copy."""


@dataclass(frozen=True, kw_only=True)
class ExpertParallelParams(Params):
    """Parameters of the run; widths are those of the development model, 16 experts a rank."""

    ranks: int = param(0, "ranks, one per GPU; 0: as many as there are GPUs", min=0, max=64)
    layer_tokens: tuple[int, ...] = param((1024, 4096, 16384), "tokens per rank microbatch of the routed block")
    repeats: int = param(10, "interleaved visits of each variant", min=2, max=100)


def measure(params: ExpertParallelParams, recorder: Any) -> None:
    """Start one process per GPU, with NCCL and NVSHMEM, and gather every rank's rows."""
    from workbench.measure.multi_gpu import Options, run

    with tempfile.TemporaryDirectory() as folder:
        options = Options(out=folder, layer_tokens=params.layer_tokens, repeats=params.repeats)
        keep(params, recorder, run(options, params.ranks))


def keep(params: ExpertParallelParams, recorder: Any, found: Sequence[dict[str, Any]]) -> None:
    """Write what the ranks returned."""
    ranks = found[0]["ranks"]
    recorder.set(
        "protocol", timer="perf_counter_ns per rank, all ranks starting together, until the rank's device is idle",
        warmup="3 calls of each variant and size; the rowwise pool is frozen after them", repeats=params.repeats,
        order="variants interleaved: A B, then B A", l2="not flushed",
        synchronization="waits counted by the profiler in one further call on every rank",
        parity="float32; the experts' products are those of the reference", exclusions="none",
    )  # fmt: skip
    recorder.set("topology", nodes=1, gpus=ranks, dp=ranks, ep_mp=ranks)
    recorder.set("precision", parameter="bfloat16", activation="bfloat16", accumulation="float32",
                 communication="bfloat16; parity in float32")  # fmt: skip
    recorder.set("workload", experts=16 * ranks, top_k=8, shared_experts=1, capacity="capacity factor 1.25", layers=1,
                 seeds=[0])  # fmt: skip
    for row in found:
        if row["section"] not in ("start", "parity", "bandwidth", "layer"):
            continue
        row = dict(row)
        samples = row.pop("samples_us", None)
        if samples is not None:
            what = [row.get(k) for k in ("section", "call", "path", "shared_mode", "tokens", "rank")]
            recorder.samples("_".join(str(w) for w in what if w is not None), samples)
        recorder.row(row.pop("section"), **row)


def ranks_measured(result: Result) -> int:
    """Return how many ranks were measured."""
    return max(r["ranks"] for r in result.table.to_dicts())


def slowest_rank(result: Result) -> pl.DataFrame:
    """Return per path and tokens the block's time on its slowest rank: p20, p50 and p80 of that rank, in us."""
    slowest = result.tables["layer"].sort("time_us_p50").group_by("path", "shared_mode", "tokens").last()
    return slowest.sort("path", "shared_mode", "tokens")


def nvlink_GBps(result: Result) -> float | None:
    """Return the raw rate of one GPU's NVLinks in one direction, as the recording's environment names it."""
    links = result.recording.record.get("environment", {}).get("links", {}) if result.recording else {}
    count, rate = links.get("nvlinks_per_gpu"), links.get("nvlink_GBps_per_link")
    return count * rate if count and rate else None


def checks(result: Result) -> Iterator[Check]:
    """Parity, waits on every rank, row movement against a peer copy, block times."""
    import polars as pl

    ranks = ranks_measured(result)
    parity = result.tables["parity"]
    yield Check(
            f"both paths on {ranks} ranks equal one rank within the budgets",
            bool(parity["holds"].all()) if parity.height else None,
            f"{parity.height} tensors over all ranks, worst error over budget "
            f"{(parity['error'] / parity['budget']).max():.2g}" if parity.height else "not measured",
        )  # fmt: skip
    timed = result.tables["layer"].filter(pl.col("waits").is_not_null())
    rowwise = timed.filter(pl.col("path") == "rowwise")
    synchronized = timed.filter(pl.col("path") == "synchronized")
    for claim, part, good in (
        ("rowwise: no host wait on any rank", rowwise, (pl.col("waits") == 0) & (pl.col("pageable_d2h") == 0)),
        ("synchronized: one host wait per forward of the block on every rank", synchronized, pl.col("waits") == 1),
    ):
        seen = f"{part.height} rows, waits {sorted(set(part['waits'].to_list()))}"
        yield Check(claim, bool(part.select(good.all()).item()) if part.height else None, seen)
    yield _bandwidth_check(result, ranks)
    by_path = {
        (r["path"], r["shared_mode"], r["tokens"]): r["time_us_p50"] for r in slowest_rank(result).iter_rows(named=True)
    }
    sizes = sorted({tokens for _, _, tokens in by_path})
    ratios = {t: by_path["synchronized", "stream", t] / by_path["rowwise", "stream", t] for t in sizes}
    shown = ", ".join(f"{t}: {ratio:.2f}x" for t, ratio in ratios.items())
    holds = min(ratios.values()) > 1 if ratios else None
    yield Check("the rowwise block is faster than the synchronized one at every size", holds, shown)


def peer_shares(table: pl.DataFrame) -> dict[str, float]:
    """Return per call the least share over the ranks of a peer copy's rate at which its remote bytes move."""
    import polars as pl

    shares: dict[str, float] = {}
    for rank in table["rank"].unique().to_list():
        rows = table.filter(pl.col("rank") == rank)
        rate = {r["call"]: r["remote_GBps"] for r in rows.iter_rows(named=True)}
        for call, copy in COPIES.items():
            shares[call] = min(shares.get(call, float("inf")), rate[call] / rate[copy])
    return shares


def _bandwidth_check(result: Result, ranks: int) -> Check:
    claim = f"dispatch, combine and dispatch's backward move their remote bytes at {NEAR:.0%} of a peer copy or better"
    if ranks == 1 or not result.rows("bandwidth"):
        return Check(claim, None, "one rank has no peer")
    shares = peer_shares(result.tables["bandwidth"])
    return Check(claim, min(shares.values()) >= NEAR, ", ".join(f"{c} {share:.0%}" for c, share in shares.items()))


def draw(result: Result) -> go.Figure:
    """Draw the block's time over tokens on its slowest rank, and the rate of the bytes that cross to a peer."""
    import polars as pl

    from workbench.core.colours import INK, SERIES
    from workbench.views.plotting import figure, spread

    ranks = ranks_measured(result)
    fig = figure(
        f"Expert parallelism on {ranks} GPU{'s' if ranks > 1 else ''}", height=430, cols=2, shared_xaxes=False,
        column_widths=[0.52, 0.48], horizontal_spacing=0.22,
        subplot_titles=["routed block, forward + backward, eager", "bytes that cross to a peer"],
    )  # fmt: skip
    table = slowest_rank(result).to_dicts()
    for key, colour in zip(PATHS, SERIES):
        rows = [r for r in table if (r["path"], r["shared_mode"]) == key]
        fig.add_scatter(
            x=[r["tokens"] for r in rows], y=[r["time_us_p50"] / 1e3 for r in rows], mode="lines+markers",
            error_y=spread(rows, "time_us", 1e3),
            name=LABELS[key], line={"color": colour}, customdata=[r["launches"] for r in rows],
            hovertemplate="%{x} tokens a rank: %{y:.2f} ms, %{customdata} launches", row=1, col=1,
        )  # fmt: skip
    sizes = sorted({r["tokens"] for r in table})
    fig.update_xaxes(type="log", title="tokens per rank microbatch", tickvals=sizes, tickformat="d", minor={}, col=1)
    fig.update_yaxes(type="log", title="slowest rank (ms)", col=1)
    moved = result.tables["bandwidth"].filter(pl.col("remote_bytes") > 0)
    rates = moved.group_by("call", maintain_order=True).agg(pl.col("remote_GBps").min()).to_dicts()[::-1]
    copies = set(COPIES.values())
    fig.add_bar(
        x=[r["remote_GBps"] for r in rates], y=[r["call"] for r in rates], orientation="h", showlegend=False,
        marker={"color": [SERIES[5] if r["call"] in copies else SERIES[2] for r in rates]},
        hovertemplate="%{y}: %{x:.0f} GB/s on the slower rank<extra></extra>", row=1, col=2,
    )  # fmt: skip
    limit = nvlink_GBps(result)
    if limit:
        fig.add_vline(x=limit, line={"dash": "dot", "color": INK}, annotation_text=f"NVLink {limit:.0f}", row=1, col=2)  # type: ignore[arg-type]
    fig.update_xaxes(title="GB/s, slowest rank", rangemode="tozero", col=2)
    # Above the panels, where the template puts it, the legend would cover their titles.
    fig.update_layout(legend={"orientation": "h", "x": 0, "y": -0.3, "yanchor": "top"}, margin={"b": 110})
    return fig


EXPERIMENT = Experiment(
    slug="op_expert_parallel",
    group="s08_sync_free",
    title="Expert parallelism over NVLink: synchronized against rowwise",
    claim="Over several GPUs the rowwise path computes what one rank computes, and no rank's host ever waits.",
    kind="measured",
    anchor="Sections 8.4, 8.5, Appendix B.5",
    params=ExpertParallelParams,
    figure=draw,
    checks=checks,
    measure=measure,
    recorded=recorded_kinds("section"),
    tests=(
        "tests/measure/test_multi_gpu.py",
        "tests/experiments/test_expert_parallel.py",
        "tests/kernels/test_transport.py",
        "tests/kernels/test_all_to_all.py",
        "tests/kernels/test_block.py",
        "tests/kernels/test_block_gpu.py",
    ),
    recording="2026-11-29_h200_3d77586",
    needs="CUDA GPUs of one host with peer access, NCCL and nvshmem4py",
)
