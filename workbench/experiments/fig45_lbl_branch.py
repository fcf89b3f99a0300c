"""Figures 45 and 46 by the same protocol, small: branch a run at a checkpoint, change the LBL coefficient alone."""

from __future__ import annotations

import html
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.core.params import Params, param
from workbench.views.archives import archived, opener

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import polars as pl

REPORT_WINDOWS = ((17_001, 17_999), (24_000, 25_669))
"""Early and late windows of the archived histories."""
METRICS = ("ce", "lbl", "load_max_over_mean", "confidence", "grad_norm", "load_entropy", "dead_experts")
LABELS = {
    "ce": "cross-entropy", "lbl": "LBL (1 is balance)", "load_max_over_mean": "load, max / mean",
    "confidence": "router confidence", "grad_norm": "gradient norm",
}  # fmt: skip
ENOUGH_SEEDS = 3
FLOOR_NOISE = 0.01
"""Largest difference of the LBL that its lying at the floor near 1 explains; the recorded ones are below 0.004."""


@dataclass(frozen=True, kw_only=True)
class BranchParams(Params):
    """Parameters of the branch experiment and of its analysis."""

    coefficient: float = param(0.05, "LBL coefficient of the original trajectory", min=0, max=10)
    branch_coefficient: float = param(0.005, "LBL coefficient of the branch", min=0, max=10)
    steps: int = param(2000, "optimizer steps of the original run", min=20, max=1_000_000)
    branch_step: int = param(700, "step of the checkpoint that is branched", min=5, max=1_000_000)
    seeds: tuple[int, ...] = param((0, 1, 2), "seeds, one original and one branch each", min=0, max=10_000)
    tiny: bool = param(False, "a model that a CPU trains in a minute")
    graphs: bool = param(True, "on a GPU, replay steps as CUDA graphs: eager steps of this size wait for submission")
    span: int = param(15, "steps of the running median that is drawn", min=1, max=501, step=2, analysis=True)
    early: float = param(0.115, "length of the early window, as a share of the branch", min=0.01, max=1, analysis=True)
    late: float = param(0.807, "start of the late window, as a share of the branch", min=0, max=0.99, analysis=True)
    archive: str = param(
        "", "file or folder of your own histories, original and branch; empty: ours", analysis=True, path=True
    )
    archive_branch: str = param(
        "", "file or folder of the branch, where `archive` is the original", analysis=True, path=True
    )
    metrics: tuple[str, ...] = param(
        (), "names in your archive: ours, an equals sign, yours; e.g. ce and train/CE loss", analysis=True
    )
    window_steps: tuple[int, ...] = param(
        (), "first and last step of the early and of the late window; empty: see `windows`", min=0, analysis=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        w = self.window_steps
        if w and not (len(w) == 4 and w[0] <= w[1] and w[2] <= w[3]):
            raise ValueError(f"window_steps: expected four steps, first and last of two windows, got {list(w)}")
        if self.archive_branch and not self.archive:
            raise ValueError("archive_branch: expected `archive` to name the original's histories, got none")


def measure(params: BranchParams, recorder: Any) -> list[dict[str, Any]]:
    """Train original and branch for every seed, on the GPU where there is one."""
    from workbench.training.campaigns import base_config, describe, lbl_branch, place, say, scratch

    if params.branch_step >= params.steps:
        raise ValueError(f"branch_step: expected less than steps ({params.steps}), got {params.branch_step}")
    where = place(params.tiny, params.graphs)
    base = base_config(where, params.tiny, lbl_coefficient=params.coefficient)
    tokens = params.steps * base.batch * base.sequence
    base = base.replace(total_tokens=tokens, warmup_tokens=tokens // 20)
    configs = [base.replace(seed=s, data_seed=s) for s in params.seeds]
    describe(
        recorder,
        where,
        base,
        {"config": base.as_dict(), "seeds": list(params.seeds)},
        branch="model and optimizer reloaded at the branch step; only lbl_coefficient changed",
        timer="perf_counter between reads of the metrics, every 25 steps: tokens per second of each run",
        order="all runs in one process, a step of each in turn; with graphs their streams overlap",
        warmup="learning-rate warmup of a twentieth of the tokens",
        repeats=len(configs),
        repetitions=f"{len(configs)} seeds",
    )
    branch = {"at_step": params.branch_step, "coefficient": params.branch_coefficient}
    with scratch() as folder:
        recorder.rows.extend(lbl_branch(configs, folder, progress=say, **branch, **where))
    return recorder.rows


def read(params: BranchParams) -> tuple[pl.DataFrame, list[str]]:
    """Read a reader's archive: rows with ``seed`` and ``arm``, and what reading and stitching did.

    Two runs are told apart by `archive_branch`, by the word "branch" in one name, or by the later first step.

    Raises:
        ValueError: the archive does not hold exactly two runs (per seed), or nothing tells them apart.
    """
    import polars as pl

    from workbench.training.archive import labelled, read_archive

    named = [("original", r) for r in read_archive(params.archive)]
    if params.archive_branch:
        named += [("branch", r) for r in read_archive(params.archive_branch)]
    else:
        names = sorted({r.name for _, r in named})
        if len(names) != 2:
            raise ValueError(
                f"archive: expected two runs, original and branch (or archive_branch), got {len(names)}: "
                + ", ".join(map(repr, names[:10]))
            )
        word = [n for n in names if "branch" in n.lower()]
        first = {n: min(int(r.stitched()[0]["step"][0]) for _, r in named if r.name == n) for n in names}
        if len(word) != 1 and first[names[0]] == first[names[1]]:
            raise ValueError(f"archive: both runs start at step {first[names[0]]}; name the branch in archive_branch")
        branch = word[0] if len(word) == 1 else max(names, key=lambda n: first[n])
        named = [("branch" if r.name == branch else "original", r) for _, r in named]
    for arm in ("original", "branch"):
        seeds = [r.seed for a, r in named if a == arm]
        if len(seeds) != len(set(seeds)) or not seeds:
            raise ValueError(f"archive: expected one {arm} run per seed, got {len(seeds)} runs of seeds {seeds}")
    tables, told = [], []
    for arm, run in named:
        table, merged = run.stitched()
        table, renamed = labelled(table.drop("segment"), params.metrics, seed=run.seed, arm=arm)
        tables.append(table)
        who = f"{arm}, seed {run.seed}" if len(named) > 2 else arm
        told += [f"{who}: {line}" for line in (*merged.lines(), *run.notes, *renamed)]
    return pl.concat(tables, how="diagonal"), told


def windows(table: pl.DataFrame, params: BranchParams) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the early and late windows: those asked for, the report's where both arms have them, else shares."""
    import polars as pl

    if params.window_steps:
        a, b, c, d = params.window_steps
        return (a, b), (c, d)
    arms = [table.filter(pl.col("arm") == a)["step"] for a in ("original", "branch")]
    if all(s.is_between(*w).any() for s in arms for w in REPORT_WINDOWS):
        return REPORT_WINDOWS
    first, last = int(arms[1].min()), min(int(s.max()) for s in arms)  # type: ignore[arg-type]
    length = max(1, last - first + 1)
    return (first, first + max(1, round(length * params.early)) - 1), (first + round(length * params.late), last)


def _windowed(result: Result) -> Iterator[tuple[dict[str, Any], dict[str, pl.DataFrame]]]:
    """Yield each window and seed, as row entries, with the history of each arm."""
    import polars as pl

    table = with_layer_means(result.table)
    for name, (first, last) in zip(("early", "late"), windows(table, result.params)):
        for (seed,), part in table.group_by(["seed"], maintain_order=True):
            arms = {arm: part.filter(pl.col("arm") == arm) for arm in part["arm"].unique(maintain_order=True)}
            yield {"window": name, "first": first, "last": last, "seed": seed}, arms


def window_table(result: Result, metrics: tuple[str, ...] = (*METRICS, "tokens_per_s")) -> pl.DataFrame:
    """Return medians with intervals per seed, arm and window."""
    import polars as pl

    from workbench.training.histories import window_median

    return pl.DataFrame(
        at | {"arm": arm, "metric": metric} | window_median(part, metric, at["first"], at["last"])
        for at, arms in _windowed(result)
        for arm, part in arms.items()
        for metric in metrics
        if metric in part.columns
    )


def difference_table(result: Result, metrics: tuple[str, ...] = METRICS) -> pl.DataFrame:
    """Return branch minus original per window, seed and metric: medians of step-by-step differences, with intervals.

    Both arms see the same batch at the same step, so that the batch's noise cancels, as it does not between medians.
    """
    import polars as pl

    from workbench.training.histories import paired_difference

    return pl.DataFrame(
        {"window": at["window"], "seed": at["seed"], "metric": metric}
        | paired_difference(arms["branch"], arms["original"], metric, at["first"], at["last"])
        for at, arms in _windowed(result)
        for metric in metrics
        if metric in arms["branch"].columns
    )


def with_layer_means(table: pl.DataFrame) -> pl.DataFrame:
    """Add the mean over layers of each per-layer metric."""
    import polars as pl

    for metric in ("load_max_over_mean", "load_entropy", "dead_experts", "confidence"):
        columns = [c for c in table.columns if c.startswith(metric + "_")]
        if columns and metric not in table.columns:
            table = table.with_columns(pl.mean_horizontal(columns).alias(metric))
    return table


def checks(result: Result) -> list[Check]:
    """What lowering the coefficient does, seed by seed.

    The report's appendix states the protocol and no outcome, so all but the first claim are what one expects of it.
    """
    import polars as pl

    out = []
    table = result.table
    for seed in table["seed"].unique(maintain_order=True):
        part = table.filter(pl.col("seed") == seed)
        at = int(part.filter(pl.col("arm") == "branch")["step"].min()) - 1  # type: ignore[arg-type]
        steps = part.filter(pl.col("arm") == "original")["step"]
        inside = bool(steps.min() <= at <= steps.max())  # type: ignore[operator]
        out.append(Check(f"seed {seed}: the branch starts where the checkpoint was", inside, f"step {at}"))
    late = difference_table(result).filter(pl.col("window") == "late")

    def judge(claim: str, metric: str, decide: Callable[[list[dict[str, Any]]], bool | None], why: str = "") -> Check:
        rows = late.filter((pl.col("metric") == metric) & (pl.col("rows") > 0)).to_dicts()
        if not rows:
            return Check(claim, None, f"no {metric} in the late window")
        shown = ", ".join(f"{r['median']:+.4f} [{r['low']:+.4f}, {r['high']:+.4f}]" for r in rows)
        text = f"branch - original, paired by step, by seed: {shown}"
        if metric == "ce" and len(rows) > 1:
            values = [r["median"] for r in rows]
            error = statistics.stdev(values) / len(values) ** 0.5
            text += f"; mean {statistics.fmean(values):+.4f}, standard error over seeds {error:.4f}"
        found = decide(rows)
        small = all(abs(r["median"]) < FLOOR_NOISE for r in rows)
        return Check(claim, found, text, why if found is False and small else "")

    def higher(rows: list[dict[str, Any]]) -> bool | None:
        if all(r["low"] > 0 for r in rows):
            return True
        return False if any(r["median"] <= 0 for r in rows) else None

    def not_higher(rows: list[dict[str, Any]]) -> bool | None:
        # Right after the switch the loss rises for a while: one short branch decides nothing.
        return None if len(rows) < ENOUGH_SEEDS else not all(r["low"] > 0 for r in rows)

    near = (
        "at this size the loss lies at its floor near 1, and it can fall even below 1 while the largest load grows; "
        "the tiny model's longer recording shows the rise"
    )
    return [
        *out,
        judge("with a smaller coefficient the most loaded expert takes more", "load_max_over_mean", higher),
        judge("the router grows more confident", "confidence", higher),
        judge("the load-balancing loss itself settles higher", "lbl", higher, near),
        judge("the smaller coefficient costs no late cross-entropy", "ce", not_higher),
    ]


def draw(result: Result) -> go.Figure:
    """Draw cross-entropy, LBL, load and gradient norm of both arms, every seed, with the two windows shaded."""
    import polars as pl

    from workbench.core.colours import SERIES
    from workbench.training.histories import smooth, thinned
    from workbench.views.plotting import figure

    table = with_layer_means(result.table)
    told = (m.partition("=")[0] for m in result.params.metrics)
    drawn = [m for m in dict.fromkeys((*METRICS[:4], *told)) if m in table.columns]
    drawn = drawn or [c for c in table.columns if c not in ("seed", "arm", "step")][:4]
    panels = [(m, LABELS.get(m, html.escape(m))) for m in drawn]
    fig = figure("One checkpoint, two LBL coefficients", rows=len(panels), cols=1, height=190 * len(panels) + 140)
    style = {"original": (SERIES[2], f"original, {result.params.coefficient:g}", "solid"),
             "branch": (SERIES[4], f"branch, {result.params.branch_coefficient:g}", "solid")}  # fmt: skip
    for row, (metric, label) in enumerate(panels, start=1):
        for (seed, arm), part in table.group_by(["seed", "arm"], maintain_order=True):
            colour, name, dash = style[str(arm)]
            part = part.filter(pl.col(metric).is_finite())
            fig.add_scatter(
                x=thinned(part["step"].to_list()), y=thinned(smooth(part[metric].to_numpy(), result.params.span)),
                mode="lines", line={"color": colour, "width": 1.3, "dash": dash}, opacity=0.8, name=name,
                legendgroup=str(arm), showlegend=row == 1 and seed == table["seed"][0],
                hovertemplate=f"seed {seed}, {arm}<br>step %{{x}}<br>%{{y:.4f}}<extra></extra>", row=row, col=1,
            )  # fmt: skip
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
    tests=("tests/training/test_run.py", "tests/training/test_optimizer.py", "tests/kernels/test_model.py"),
    opens=opener(read),
    own="archive",
    recorded=archived,
    recording="2026-11-29_h200_9c4015b",
    needs="one CUDA GPU, or tiny=True",
    live_on_cpu=True,
)
