"""Figures 45 and 46 by the same protocol, small: branch a run at a checkpoint, change the LBL coefficient alone."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.experiment import Check, Experiment, Params, Result, param

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import polars as pl

REPORT_BRANCH_STEP = 17_000
REPORT_LAST_STEP = 25_669
REPORT_WINDOWS = ((17_001, 17_999), (24_000, 25_669))
"""Early and late windows of the archived histories."""


@dataclass(frozen=True, kw_only=True)
class BranchParams(Params):
    """Parameters of the branch experiment and of its analysis."""

    coefficient: float = param(0.05, "LBL coefficient of the original trajectory", min=0, max=10)
    branch_coefficient: float = param(0.005, "LBL coefficient of the branch", min=0, max=10)
    steps: int = param(1200, "optimizer steps of the original run", min=20, max=1_000_000)
    branch_step: int = param(700, "step of the checkpoint that is branched", min=5, max=1_000_000)
    seeds: tuple[int, ...] = param((0, 1, 2), "seeds, one original and one branch each", min=0, max=10_000)
    tiny: bool = param(False, "a model that a CPU trains in a minute")
    graphs: bool = param(True, "on a GPU, replay steps as CUDA graphs: eager steps of this size wait for submission")
    span: int = param(15, "steps of the running median that is drawn", min=1, max=501, step=2, analysis=True)
    early: float = param(0.115, "length of the early window, as a share of the branch", min=0.01, max=1, analysis=True)
    late: float = param(0.807, "start of the late window, as a share of the branch", min=0, max=0.99, analysis=True)


def measure(params: BranchParams, recorder: Any) -> list[dict[str, Any]]:
    """Train original and branch for every seed, on the GPU where there is one."""
    import torch

    from workbench.training.campaigns import run_all
    from workbench.training.config import TINY, RunConfig
    from workbench.training.corpus import load_corpus

    if params.branch_step >= params.steps:
        raise ValueError(f"branch_step: expected less than steps ({params.steps}), got {params.branch_step}")
    gpu = torch.cuda.is_available()
    if not (gpu or params.tiny):
        raise ValueError("tiny: expected True on a machine without a GPU, where the full size would take hours")
    base = RunConfig(
        lbl_coefficient=params.coefficient, dtype="bfloat16" if gpu else "float32", **(TINY if params.tiny else {})
    )
    tokens = params.steps * base.batch * base.sequence
    base = base.replace(total_tokens=tokens, warmup_tokens=tokens // 20)
    jobs = [
        (
            "lbl_branch",
            {
                "config": base.replace(seed=s, data_seed=s).as_dict(),
                "at_step": params.branch_step,
                "coefficient": params.branch_coefficient,
                "device": "cuda" if gpu else "cpu",
                "graphs": gpu and params.graphs,
            },
        )
        for s in params.seeds
    ]
    recorder.set(
        "workload", config=base.as_dict(), corpus=load_corpus(base.corpus).provenance, seeds=list(params.seeds)
    )
    recorder.set("precision", parameters=base.dtype, masters="float32", moments="float32", router="float32")
    recorder.set("topology", nodes=1, gpus=int(gpu), processes=len(jobs))
    recorder.set(
        "protocol",
        branch="model and optimizer reloaded at the branch step; only lbl_coefficient changed",
        timer="none: losses, not times",
        steps="CUDA graph replays" if gpu and params.graphs else "eager",
        warmup="learning-rate warmup of a twentieth of the tokens",
        repeats=len(jobs),
        repetitions=f"{len(jobs)} seeds",
        exclusions="none",
    )
    recorder.rows.extend(run_all(jobs, processes=len(jobs) if gpu else 1))
    return recorder.rows


def windows(table: pl.DataFrame, params: BranchParams) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the early and late windows: the report's for histories of its length, proportional ones else."""
    import polars as pl

    branch = table.filter(pl.col("arm") == "branch")["step"]
    first, last = int(branch.min()), int(table.filter(pl.col("arm") == "original")["step"].max())  # type: ignore[arg-type]
    if first == REPORT_BRANCH_STEP + 1 and last >= REPORT_LAST_STEP:
        return REPORT_WINDOWS
    length = last - first + 1
    return (first, first + max(1, round(length * params.early)) - 1), (first + round(length * params.late), last)


def window_table(
    result: Result, metrics: tuple[str, ...] = ("ce", "lbl", "load_max_over_mean", "grad_norm")
) -> pl.DataFrame:
    """Return medians with intervals per seed, arm and window."""
    import polars as pl

    from workbench.training.histories import window_median

    table = with_layer_means(result.table)
    rows = []
    for name, (first, last) in zip(("early", "late"), windows(table, result.params)):
        for (seed, arm), part in table.group_by(["seed", "arm"], maintain_order=True):
            for metric in metrics:
                if metric in part.columns:
                    found = window_median(part, metric, first, last)
                    rows.append(
                        {"window": name, "first": first, "last": last, "seed": seed, "arm": arm, "metric": metric}
                        | found
                    )
    return pl.DataFrame(rows)


def with_layer_means(table: pl.DataFrame) -> pl.DataFrame:
    """Add the mean over layers of each per-layer metric."""
    import polars as pl

    for metric in ("load_max_over_mean", "load_entropy", "dead_experts", "confidence"):
        columns = [c for c in table.columns if c.startswith(metric + "_")]
        if columns and metric not in table.columns:
            table = table.with_columns(pl.mean_horizontal(columns).alias(metric))
    return table


def differences(result: Result, metric: str, window: str) -> list[float]:
    """Return branch minus original of a metric's window median, one value a seed."""
    import polars as pl

    t = window_table(result, (metric,)).filter(pl.col("window") == window)
    wide = t.pivot(on="arm", index="seed", values="median")
    return (wide["branch"] - wide["original"]).to_list()


def checks(result: Result) -> list[Check]:
    """What lowering the coefficient does here, seed by seed; our scale, not the report's run."""
    import polars as pl

    out = []
    table = result.table
    for seed in table["seed"].unique(maintain_order=True):
        part = table.filter(pl.col("seed") == seed)
        steps = part.filter(pl.col("arm") == "branch")["step"]
        at = int(steps.min()) - 1  # type: ignore[operator]
        out.append(
            Check(
                f"seed {seed}: the branch starts where the checkpoint was",
                at in part.filter(pl.col("arm") == "original")["step"],
                f"step {at}",
            )
        )

    def shown(values: list[float]) -> str:
        return "branch - original by seed: " + ", ".join(f"{v:+.4f}" for v in values)

    load = differences(result, "load_max_over_mean", "late")
    out.append(
        Check("with a smaller coefficient the most loaded expert takes more", all(v > 0 for v in load), shown(load))
    )
    sure = differences(result, "confidence", "late")
    out.append(Check("the router grows more confident", all(v > 0 for v in sure), shown(sure)))
    lbl = differences(result, "lbl", "late")
    higher = all(v > 0 for v in lbl)
    why = (
        "near-uniform sigmoid scores hardly follow the load, so the product that the loss measures can fall, "
        "even below 1, while the largest load grows"
    )
    out.append(Check("the load-balancing loss itself settles higher", higher, shown(lbl), "" if higher else why))
    ce = differences(result, "ce", "late")
    enough = len(ce) > 1
    spread = statistics.stdev(ce) / len(ce) ** 0.5 if enough else 0.0
    out.append(
        Check(
            "the late cross-entropy of the two arms differs by no more than chance over seeds",
            abs(statistics.fmean(ce)) <= 2 * spread if enough else None,
            f"{shown(ce)}; mean {statistics.fmean(ce):+.4f}, standard error {spread:.4f}",
        )
    )
    return out


def draw(result: Result) -> go.Figure:
    """Draw cross-entropy, LBL, load and gradient norm of both arms, every seed, with the two windows shaded."""
    import plotly.graph_objects as go
    import polars as pl

    from workbench.plotting import COLOURS, figure
    from workbench.training.histories import smooth

    table = with_layer_means(result.table)
    panels = [
        ("ce", "cross-entropy"),
        ("lbl", "LBL (1 is balance)"),
        ("load_max_over_mean", "load, max / mean"),
        ("confidence", "router confidence"),
    ]
    panels = [(m, label) for m, label in panels if m in table.columns]
    fig = figure("One checkpoint, two LBL coefficients", rows=len(panels), height=190 * len(panels) + 140)
    style = {"original": (COLOURS["cpu_submit"], f"original, {result.params.coefficient:g}", "solid"),
             "branch": (COLOURS["sync_wait"], f"branch, {result.params.branch_coefficient:g}", "solid")}  # fmt: skip
    for row, (metric, label) in enumerate(panels, start=1):
        for (seed, arm), part in table.group_by(["seed", "arm"], maintain_order=True):
            colour, name, dash = style[str(arm)]
            fig.add_trace(
                go.Scatter(
                    x=part["step"].to_list(),
                    y=smooth(part[metric].to_numpy(), result.params.span),
                    mode="lines",
                    line={"color": colour, "width": 1.3, "dash": dash},
                    opacity=0.8,
                    name=name,
                    legendgroup=str(arm),
                    showlegend=row == 1 and seed == table["seed"][0],
                    hovertemplate=f"seed {seed}, {arm}<br>step %{{x}}<br>%{{y:.4f}}<extra></extra>",
                ),
                row=row,
                col=1,
            )
        fig.update_yaxes(title=label, row=row, col=1)
        after = table.filter(pl.col("step") > table["step"].max() * 0.1)[metric]  # type: ignore[operator]
        low, high = after.quantile(0.005), after.quantile(0.995)
        if low is not None and high is not None and high > low:
            pad = 0.08 * (high - low)
            fig.update_yaxes(range=[low - pad, high + pad], row=row, col=1)
        for name, (first, last) in zip(("early", "late"), windows(table, result.params)):
            band: dict[str, Any] = {"x0": first, "x1": last, "row": row, "col": 1, "line_width": 0}
            if row == 1:
                band |= {"annotation_text": name, "annotation_position": "top left"}
            fig.add_vrect(fillcolor="rgba(128,128,128,0.14)", **band)
    fig.update_xaxes(title="optimizer step", row=len(panels), col=1)
    return fig


EXPERIMENT = Experiment(
    slug="fig45_lbl_branch",
    group="appendix_b",
    title="Figures 45 and 46 by the same protocol: the LBL-coefficient branch",
    claim="Changing only the LBL coefficient at a checkpoint moves expert balance, and shows what it costs in loss.",
    kind="measured",
    anchor="Appendix B.7, Figures 45 and 46",
    params=BranchParams,
    figure=draw,
    checks=checks,
    measure=measure,
    recording="2026-11-29_h200_5b112d1",
    needs="one CUDA GPU, or tiny=True",
    live_on_cpu=True,
)
