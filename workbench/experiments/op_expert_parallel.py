"""The routed paths over several GPUs of one host: parity, bandwidth, layer and step times, waits on every rank."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.experiment import Check, Experiment, Params, Result, param

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import polars as pl

PATHS = (("synchronized", "stream"), ("synchronized", "before_wait"), ("rowwise", "stream"))
LABELS = {
    ("synchronized", "stream"): "synchronized",
    ("synchronized", "before_wait"): "synchronized, wait covered",
    ("rowwise", "stream"): "rowwise",
}


@dataclass(frozen=True, kw_only=True)
class ExpertParallelParams(Params):
    """Parameters of the run; widths are those of the development model, 16 experts a rank."""

    ranks: int = param(0, "ranks, one per GPU; 0: as many as there are GPUs", min=0, max=64)
    layer_tokens: tuple[int, ...] = param((1024, 4096, 16384), "tokens per rank microbatch of the layer")
    sequence: tuple[int, ...] = param((1024, 2048, 8192), "tokens per sequence of the model step, two a microbatch")
    repeats: int = param(10, "interleaved visits of each variant", min=2, max=100)
    restarts: int = param(5, "process starts; later ones time whole steps only", min=1, max=20)
    grouped_gemm: str = param("triton", "grouped GEMM of the experts", choices=("triton", "torch"))
    folder: str = param("", "where the ranks' traces go; empty: they are not kept")


def measure(params: ExpertParallelParams, recorder: Any) -> list[dict[str, Any]]:
    """Start one process per GPU, with NCCL and NVSHMEM, and gather every rank's rows."""
    import torch

    from workbench.measure.multi_gpu import Options, run

    ranks = params.ranks or torch.cuda.device_count()
    recorder.set(
        "protocol",
        timer="perf_counter_ns per rank, all ranks starting together, until the rank's device is idle",
        warmup="3 calls of each variant and size",
        repeats=params.repeats,
        restarts=params.restarts,
        order="variants interleaved: A B, then B A",
        l2="not flushed",
        synchronization="waits counted by the profiler in one further call on every rank",
        exclusions="none",
    )
    recorder.set("topology", nodes=1, gpus=ranks, dp=ranks, ep_mp=ranks, microbatch=1, accumulation=1)
    recorder.set("precision", parameter="bfloat16", activation="bfloat16", accumulation="float32",
                 optimizer="bfloat16 AdamW states, fused", communication="bfloat16; parity in float32")  # fmt: skip
    recorder.set("workload", experts=16 * ranks, top_k=8, shared_experts=1, capacity="capacity factor 1.25", layers=8,
                 mixers="grouped-query attention", seeds=[0])  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        options = Options(
            out=params.folder or scratch, layer_tokens=params.layer_tokens, sequence=params.sequence,
            grouped_gemm=params.grouped_gemm, repeats=params.repeats, traces=bool(params.folder),
        )  # fmt: skip
        for row in run(options, ranks, params.restarts):
            samples = row.pop("samples_us", None)
            if samples is not None:
                key = (row["section"], row["path"], row["shared_mode"], row["tokens"], row["restart"], row["rank"])
                recorder.samples("_".join(map(str, key)), samples)
            recorder.row(**row)
        for trace in sorted(Path(options.out).glob("trace_*.json.gz")):
            recorder.attach(trace.name, trace)
    return recorder.rows


def slowest_rank(table: pl.DataFrame, section: str) -> pl.DataFrame:
    """Return per path, tokens and restart the slowest rank's median, then over restarts least, median and greatest."""
    import polars as pl

    rows = table.filter(pl.col("section") == section)
    starts = rows.group_by("path", "shared_mode", "tokens", "restart").agg(pl.col("time_us_p50").max())
    return (
        starts.group_by("path", "shared_mode", "tokens")
        .agg(
            pl.col("time_us_p50").min().alias("least_us"),
            pl.col("time_us_p50").median().alias("median_us"),
            pl.col("time_us_p50").max().alias("greatest_us"),
            pl.len().alias("restarts"),
        )
        .sort("path", "shared_mode", "tokens")
    )


def checks(result: Result) -> list[Check]:
    """Parity, waits on every rank, row movement against a peer copy, step times."""
    import polars as pl

    table = result.table
    ranks = int(table["ranks"].max())  # type: ignore[arg-type]
    parity = table.filter(pl.col("section") == "parity")
    out = [
        Check(
            f"both paths on {ranks} ranks equal one rank within the budgets",
            bool(parity["holds"].all()) if parity.height else None,
            f"{parity.height} tensors over all ranks, worst error over budget "
            f"{(parity['error'] / parity['budget']).max():.2g}" if parity.height else "not measured",
        )
    ]  # fmt: skip
    timed = table.filter(pl.col("section").is_in(["layer", "step"]) & pl.col("waits").is_not_null())
    rowwise = timed.filter(pl.col("path") == "rowwise")
    wanted = pl.when(pl.col("section") == "step").then(7).otherwise(1)
    synchronized = timed.filter(pl.col("path") == "synchronized")
    for claim, part, good in (
        ("rowwise: no host wait on any rank", rowwise, (pl.col("waits") == 0) & (pl.col("pageable_d2h") == 0)),
        ("synchronized: one host wait per routed-block forward on every rank", synchronized, pl.col("waits") == wanted),
    ):
        seen = f"{part.height} rows, waits {sorted(set(part['waits'].to_list()))}"
        out.append(Check(claim, bool(part.select(good.all()).item()) if part.height else None, seen))
    out.append(_bandwidth_check(table, ranks))
    for section in ("layer", "step"):
        by_path = {
            (r["path"], r["shared_mode"], r["tokens"]): r["median_us"]
            for r in slowest_rank(table, section).iter_rows(named=True)
        }
        sizes = sorted({tokens for _, _, tokens in by_path})
        ratios = {t: by_path["synchronized", "stream", t] / by_path["rowwise", "stream", t] for t in sizes}
        shown = ", ".join(f"{t}: {ratio:.2f}x" for t, ratio in ratios.items())
        holds = min(ratios.values()) > 1 if ratios else None
        out.append(
            Check(f"rowwise is faster than synchronized at every size ({section})", holds, shown or "not measured")
        )
    return out


def _bandwidth_check(table: pl.DataFrame, ranks: int) -> Check:
    import polars as pl

    claim = "dispatch and combine move their remote bytes at 85 % of a peer copy's rate or better"
    rows = table.filter((pl.col("section") == "bandwidth") & (pl.col("rank") == 0))
    if ranks == 1 or not rows.height:
        return Check(claim, None, "one rank has no peer")
    by_call = {r["call"]: r for r in rows.iter_rows(named=True)}
    shares = {}
    for call, copy in (("dispatch", "peer copy, write"), ("combine", "peer copy, read")):
        row = by_call[call]
        remote_GBps = row["GBps"] * row["remote_share"]
        shares[call] = remote_GBps / by_call[copy]["GBps"]
    shown = ", ".join(f"{call} {share:.0%}" for call, share in shares.items())
    return Check(claim, min(shares.values()) >= 0.85, shown)


def draw(result: Result) -> go.Figure:
    """Draw the slowest rank's time over tokens, layer and step; whiskers span the process restarts."""
    from workbench.plotting import SERIES, figure

    panels = [("layer", "routed block, forward + backward"), ("step", "model step")]
    ranks = int(result.table["ranks"].max())  # type: ignore[arg-type]
    fig = figure(
        f"Synchronized against rowwise on {ranks} GPU{'s' if ranks > 1 else ''}, eager", height=430, cols=2,
        shared_xaxes=False, subplot_titles=[title for _, title in panels],
    )  # fmt: skip
    for column, (section, _) in enumerate(panels, start=1):
        table = slowest_rank(result.table, section).to_dicts()
        for key, colour in zip(PATHS, SERIES):
            rows = [r for r in table if (r["path"], r["shared_mode"]) == key]
            fig.add_scatter(
                x=[r["tokens"] for r in rows], y=[r["median_us"] / 1e3 for r in rows], mode="lines+markers",
                error_y={
                    "type": "data", "symmetric": False, "thickness": 1,
                    "array": [(r["greatest_us"] - r["median_us"]) / 1e3 for r in rows],
                    "arrayminus": [(r["median_us"] - r["least_us"]) / 1e3 for r in rows],
                },
                name=LABELS[key], legendgroup=LABELS[key], showlegend=column == 1, line={"color": colour},
                customdata=[r["restarts"] for r in rows],
                hovertemplate="%{x} tokens a rank: %{y:.2f} ms, %{customdata} starts", row=1, col=column,
            )  # fmt: skip
        sizes = sorted({r["tokens"] for r in table})
        fig.update_xaxes(
            type="log", title="tokens per rank microbatch", tickvals=sizes, tickformat="d", minor={}, row=1, col=column
        )
        fig.update_yaxes(type="log", title="slowest rank (ms)", row=1, col=column)
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
    needs="CUDA GPUs of one host with peer access, NCCL and nvshmem4py",
)
