"""Figure 66 by the same protocol, small: batch-size warmup in restarted segments, against fixed batches."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.experiment import Check, Experiment, Params, Result, param
from workbench.models.schedules import REPORT_MULTIPLES, report_fractions

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import polars as pl

SCHEDULES = ("warmup", "fixed large", "fixed small")


@dataclass(frozen=True, kw_only=True)
class BatchWarmupParams(Params):
    """Parameters of the three runs and of their analysis."""

    total_tokens: int = param(8_388_608, "tokens of each run", unit="tokens", min=20_000, max=10**12)
    batch: int = param(8, "sequences per step at multiple 1", min=1, max=4096)
    multiples: tuple[int, ...] = param(REPORT_MULTIPLES, "batch multiples", min=1, max=1000)
    alpha: float = param(0.5, "learning-rate exponent of a batch increase", min=0, max=1.5, step=0.05)
    lr: float = param(5e-4, "learning rate at multiple 1", min=0, max=1, log=True)
    segments: int = param(26, "restarted segments of the warmup run", min=1, max=200)
    overlap: int = param(5, "steps that a segment trains past its successor's restart", min=0, max=1000)
    seed: int = param(0, "seed", min=0, max=10_000)
    tiny: bool = param(False, "a model that a CPU trains in a minute")
    graphs: bool = param(True, "on a GPU, replay steps as CUDA graphs: eager steps of this size wait for submission")
    span: int = param(9, "steps of the running median that is drawn", min=1, max=501, step=2, analysis=True)


def _fractions(count: int) -> tuple[float, ...]:
    printed = report_fractions()
    if count == len(printed):
        return printed
    return tuple((i + 1) / (count + 1) for i in range(count))


def measure(params: BatchWarmupParams, recorder: Any) -> list[dict[str, Any]]:
    """Train the warmup and both fixed batches on equal tokens, one after another.

    The environment variable WORKBENCH_PARTIAL names a JSON lines file that keeps the rows of a run that is killed.
    """
    import torch

    from workbench.training.campaigns import run_all
    from workbench.training.config import TINY, RunConfig
    from workbench.training.corpus import load_corpus

    gpu = torch.cuda.is_available()
    if not (gpu or params.tiny):
        raise ValueError("tiny: expected True on a machine without a GPU, where the full size would take hours")
    sizes = dict(TINY) if params.tiny else {"experts": 48, "top_k": 4, "shared_width": 256, "microbatch": 64}
    if params.tiny:
        sizes |= {"shared_width": 32, "experts": 12}
    base = RunConfig(
        **{
            **sizes,
            "batch": params.batch,
            "total_tokens": params.total_tokens,
            "warmup_tokens": params.total_tokens // 50,
            "lr": params.lr,
            "lbl_coefficient": 0.01,
            "decay_norms_and_head": False,
            "seed": params.seed,
            "alpha": params.alpha,
            "dtype": "bfloat16" if gpu else "float32",
        }
    )
    largest = params.multiples[-1]
    configs = {
        "warmup": base.replace(batch_multiples=params.multiples, batch_fractions=_fractions(len(params.multiples) - 1)),
        "fixed large": base.replace(batch=params.batch * largest, lr=params.lr * largest**params.alpha),
        "fixed small": base,
    }
    graphs = gpu and params.graphs
    partial = os.environ.get("WORKBENCH_PARTIAL")
    common = {
        "overlap": params.overlap,
        "device": "cuda" if gpu else "cpu",
        "graphs": graphs,
        "partial": Path(partial) if partial else None,
    }
    jobs = [
        (
            "segmented",
            {"config": c.as_dict(), "schedule": name, "segments": params.segments if name == "warmup" else 1} | common,
        )
        for name, c in configs.items()
    ]
    recorder.set(
        "workload",
        configs={n: c.as_dict() for n, c in configs.items()},
        corpus=load_corpus(base.corpus).provenance,
        seeds=[params.seed],
    )
    recorder.set("precision", parameters=base.dtype, masters="float32", moments="float32", router="float32")
    recorder.set("topology", nodes=1, gpus=int(gpu))
    recorder.set(
        "protocol",
        timer="perf_counter at each read-back of metrics, every 25 steps",
        warmup="learning-rate warmup of a fiftieth of the tokens",
        prewarm="one step of each batch size compiled, captured and undone before the clock starts"
        if graphs
        else "none: the first steps, with compilation, are in the times",
        synchronization="none within a step; metrics are read every 25 steps",
        steps="CUDA graph replays" if graphs else "eager",
        repeats=1,
        order="the three runs one after another",
        segments=f"{params.segments} restarts of the warmup run, {params.overlap} steps of overlap",
        seconds="wall time at each read-back, checkpoints and repeated overlap steps left out",
        exclusions="none",
    )
    recorder.rows.extend(run_all(jobs, processes=1))
    return recorder.rows


def stitched(result: Result) -> tuple[dict[str, pl.DataFrame], Any]:
    """Return each schedule's stitched history, and the merge report of the warmup run."""
    import polars as pl

    from workbench.training.histories import History, stitch

    tables, report = {}, None
    for name in SCHEDULES:
        part = result.table.filter(pl.col("schedule") == name)
        if not part.height:
            continue
        pieces = [
            History(f"segment {int(n):02d}", part.filter(pl.col("segment") == n).drop("schedule", "segment"))
            for n in part["segment"].unique().sort()
        ]
        tables[name], merged = stitch(pieces)
        report = merged if name == "warmup" else report
    return tables, report


def final_losses(tables: dict[str, pl.DataFrame]) -> dict[str, dict[str, Any]]:
    """Return the median cross-entropy over the last twentieth of the tokens, with interval, steps and seconds."""
    from workbench.training.histories import window_median

    out = {}
    for name, table in tables.items():
        last = table["tokens"].max()
        first = table.filter(table["tokens"] > 0.95 * last)["step"].min()  # type: ignore[operator]
        found = window_median(table, "ce", int(first), int(table["step"].max()))  # type: ignore[arg-type]
        out[name] = found | {"steps": table.height, "seconds": float(table["seconds"].max())}  # type: ignore[arg-type]
    return out


def checks(result: Result) -> list[Check]:
    """The stitching rule, the schedule as printed, and what the warmup buys at equal tokens."""
    import polars as pl

    tables, report = stitched(result)
    out = []
    replaced = sum(s["replaced"] for s in report.segments)
    out.append(
        Check(
            "at every overlapping step the newest segment's value is retained",
            replaced == report.overlaps and not report.gaps,
            f"{len(report.segments)} segments, {report.overlaps} overlapping steps, {len(report.gaps)} gaps",
        )
    )
    overlap = (
        result.table.filter(pl.col("schedule") == "warmup")
        .group_by("step")
        .agg(pl.col("ce"), pl.len())
        .filter(pl.col("len") > 1)
    )
    spread = max((max(v) - min(v) for v in overlap["ce"].to_list()), default=0.0)
    out.append(
        Check(
            "a repeated step repeats its loss",
            spread < 0.02,
            f"largest difference over {overlap.height} steps: {spread:.2g}",
        )
    )
    warm = tables["warmup"]
    seen = warm.filter(pl.col("batch").diff().fill_null(1) != 0)
    batches = [int(b) for b in seen["batch"]]
    out.append(
        Check(
            "the batch grows through the printed multiples",
            batches == [result.params.batch * m for m in result.params.multiples],
            " → ".join(map(str, batches)),
        )
    )
    jumps = warm.filter(pl.col("batch").diff().fill_null(0) > 0)["step"].to_list()
    ratios = []
    for step in jumps[1:]:
        a, b = (warm.filter(pl.col("step") == s) for s in (step - 1, step))
        ratios.append(abs(b["lr"][0] / a["lr"][0] - (b["batch"][0] / a["batch"][0]) ** result.params.alpha))
    out.append(
        Check(
            "the learning rate is multiplied by (B_new / B_old)^alpha at each increase",
            max(ratios, default=0) < 1e-5,
            f"largest error {max(ratios, default=0):.1g}",
        )
    )
    final = final_losses(tables)
    text = ", ".join(f"{n} {f['median']:.3f} in {f['steps']} steps" for n, f in final.items())
    out.append(
        Check(
            "the warmup takes far fewer steps than the small batch",
            final["warmup"]["steps"] < 0.5 * final["fixed small"]["steps"],
            text,
        )
    )
    out.append(
        Check(
            "at equal tokens the warmup ends below the fixed large batch",
            final["warmup"]["high"] < final["fixed large"]["low"],
            text,
        )
    )
    kept = final["warmup"]["low"] <= final["fixed small"]["high"]
    why = f"this run of {int(warm['tokens'].max()):,} tokens is far from converged, where the number of steps decides"  # type: ignore[arg-type]
    out.append(Check("at equal tokens the warmup keeps the loss of the small batch", kept, text, "" if kept else why))
    return out


def draw(result: Result) -> go.Figure:
    """Draw cross-entropy against tokens, steps and wall time, and the batch schedule."""
    import plotly.graph_objects as go

    from workbench.plotting import SERIES, figure
    from workbench.training.histories import smooth

    tables, _ = stitched(result)
    fig = figure(
        "Batch-size warmup against fixed batches, equal tokens",
        rows=2,
        cols=2,
        shared_xaxes=False,
        height=680,
        vertical_spacing=0.16,
        horizontal_spacing=0.1,
    )
    places = [("tokens", 1, 1, "tokens"), ("step", 1, 2, "optimizer steps"), ("seconds", 2, 1, "wall time (s)")]
    for i, (name, table) in enumerate(tables.items()):
        ce = smooth(table["ce"].to_numpy(), result.params.span)
        for column, row, col, _label in places:
            fig.add_trace(
                go.Scatter(
                    x=table[column].to_list(),
                    y=ce,
                    mode="lines",
                    line={"color": SERIES[i], "width": 1.5},
                    name=name,
                    legendgroup=name,
                    showlegend=column == "tokens",
                    hovertemplate=f"{name}<br>{column} %{{x}}<br>ce %{{y:.3f}}<extra></extra>",
                ),
                row=row,
                col=col,
            )
        fig.add_trace(
            go.Scatter(
                x=table["tokens"].to_list(),
                y=table["batch"].to_list(),
                mode="lines",
                name=name,
                legendgroup=name,
                showlegend=False,
                line={"color": SERIES[i], "shape": "hv"},
            ),
            row=2,
            col=2,
        )
    for column, row, col, label in places:
        fig.update_xaxes(title=label, row=row, col=col)
        fig.update_yaxes(title="cross-entropy", row=row, col=col)
        if column == "step":
            fig.update_xaxes(type="log", dtick=1, row=row, col=col)
    fig.update_xaxes(title="tokens", row=2, col=2)
    fig.update_yaxes(title="sequences per step", type="log", dtick=1, row=2, col=2)
    return fig


EXPERIMENT = Experiment(
    slug="fig66_batch_warmup",
    group="appendix_b",
    title="Figure 66 by the same protocol: batch-size warmup",
    claim="At equal tokens a growing batch ends below a fixed large one, in far fewer steps than a fixed small one.",
    kind="measured",
    anchor="Appendix B.8, Figure 66",
    params=BatchWarmupParams,
    figure=draw,
    checks=checks,
    measure=measure,
    recording="2026-11-29_cpu_5c3a259",
    needs="one CUDA GPU, or tiny=True",
    live_on_cpu=True,
)
