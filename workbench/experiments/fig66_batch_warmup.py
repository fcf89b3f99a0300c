"""Figure 66 by the same protocol, small: batch-size warmup in restarted segments, against fixed batches."""

from __future__ import annotations

import html
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.core.params import Params, param
from workbench.models.schedules import REPORT_FRACTIONS, REPORT_MULTIPLES
from workbench.views.archives import archived, opener

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import polars as pl

SCHEDULES = ("warmup", "fixed large", "fixed small")
FAR = "this run of {:,} tokens is far from converged, where the number of steps decides"
HARDLY = 2.0
"""Large batch's tokens per second over the small batch's, below which a warmup is not expected to win time."""


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
    planned_alpha: float = param(
        0.5, "learning-rate exponent of the dotted plan", min=0, max=1.5, step=0.05, analysis=True
    )
    archive: str = param(
        "", "file or folder of your own histories, one file a segment; empty: ours", analysis=True, path=True
    )
    metrics: tuple[str, ...] = param(
        (), "names in your archive: ours, an equals sign, yours; e.g. ce and train/CE loss", analysis=True
    )


def _fractions(count: int) -> tuple[float, ...]:
    if count == len(REPORT_FRACTIONS):
        return REPORT_FRACTIONS
    return tuple((i + 1) / (count + 1) for i in range(count))


def measure(params: BatchWarmupParams, recorder: Any) -> list[dict[str, Any]]:
    """Train the warmup and both fixed batches on equal tokens, one after another.

    The environment variable WORKBENCH_PARTIAL names a JSON lines file that keeps the rows of a run that is killed.
    """
    from workbench.training.campaigns import base_config, describe, place, say, scratch, segmented

    where = place(params.tiny, params.graphs)
    full = {"experts": 48, "top_k": 4, "shared_width": 256, "microbatch": 64}
    base = base_config(
        where,
        params.tiny,
        **({"experts": 12, "shared_width": 32} if params.tiny else full),
        batch=params.batch,
        total_tokens=params.total_tokens,
        warmup_tokens=params.total_tokens // 50,
        lr=params.lr,
        lbl_coefficient=0.01,
        decay_norms_and_head=False,
        seed=params.seed,
        alpha=params.alpha,
    )
    largest = params.multiples[-1]
    configs = {
        "warmup": base.replace(batch_multiples=params.multiples, batch_fractions=_fractions(len(params.multiples) - 1)),
        "fixed large": base.replace(batch=params.batch * largest, lr=params.lr * largest**params.alpha),
        "fixed small": base,
    }
    captured = "one step of each batch size compiled, captured and undone before the clock starts"
    describe(
        recorder,
        where,
        base,
        {"configs": {n: c.as_dict() for n, c in configs.items()}, "seeds": [params.seed]},
        timer="perf_counter at each read-back of metrics, every 25 steps",
        warmup="learning-rate warmup of a fiftieth of the tokens",
        prewarm=captured if where["graphs"] else "none: the first steps, with compilation, are in the times",
        synchronization="none within a step; metrics are read every 25 steps",
        repeats=1,
        order="the three runs one after another",
        segments=f"{params.segments} restarts of the warmup run, {params.overlap} steps of overlap",
        seconds="wall time at each read-back, checkpoints and repeated overlap steps left out",
    )
    partial = os.environ.get("WORKBENCH_PARTIAL")
    for name, config in configs.items():
        with scratch() as folder:
            rows = segmented(
                config,
                folder,
                schedule=name,
                segments=params.segments if name == "warmup" else 1,
                overlap=params.overlap,
                partial=Path(partial) if partial else None,
                progress=say,
                **where,
            )
        recorder.rows.extend(rows)
    return recorder.rows


def read(params: BatchWarmupParams) -> tuple[pl.DataFrame, list[str]]:
    """Read a reader's archive: rows with ``schedule`` (a run), ``segment`` (1 is the oldest), and what reading did.

    Raises:
        ValueError: a run has no metric that can be read as the cross-entropy.
    """
    import polars as pl

    from workbench.training.archive import labelled, read_archive

    tables, told = [], []
    for run in read_archive(params.archive):
        name = run.title + (f", seed {run.seed}" if run.seed else "")
        for number, segment in enumerate(run.segments, start=1):
            keys = {"schedule": name, "segment": number, "segment_name": segment.name}
            table, renamed = labelled(segment.table, params.metrics, **keys)
            if "ce" not in table.columns:
                raise ValueError(
                    f"archive: {segment.name!r} has no cross-entropy; name it in metrics as ce=COLUMN, "
                    f"columns are {', '.join(c for c in segment.table.columns if c != 'step')}"
                )
            tables.append(table)
            told += [f"{name}, {segment.name}: {line}" for line in (*segment.notes, *renamed)]
        told += [f"{name}: {line}" for line in run.stitched()[1].lines()]
    return pl.concat(tables, how="diagonal"), told


def stitched(result: Result) -> tuple[dict[str, pl.DataFrame], dict[str, Any]]:
    """Return each schedule's stitched history, and its merge report."""
    import polars as pl

    from workbench.training.histories import History, stitch

    tables, reports = {}, {}
    keys = ("schedule", "segment", "segment_name")
    for name in result.table["schedule"].unique(maintain_order=True):
        part = result.table.filter(pl.col("schedule") == name)
        pieces = []
        for number in part["segment"].unique().sort():
            piece = part.filter(pl.col("segment") == number)
            named = "segment_name" in piece.columns
            title = str(piece["segment_name"][0]) if named else f"segment {int(number):02d}"
            pieces.append(History(title, piece.drop(*(k for k in keys if k in piece.columns))))
        tables[name], reports[name] = stitch(pieces)
    return tables, reports


def merge_table(result: Result) -> pl.DataFrame:
    """Return what stitching did: per schedule and segment its rows, steps, and rows kept and replaced."""
    import polars as pl

    _, reports = stitched(result)
    return pl.DataFrame([{"schedule": n} | s for n, r in reports.items() for s in r.segments])


def final_losses(tables: dict[str, pl.DataFrame]) -> dict[str, dict[str, Any]]:
    """Return the median cross-entropy over the last twentieth of the tokens, with interval, steps and rate."""
    from workbench.training.histories import window_median

    out = {}
    for name, table in tables.items():
        axis = table["tokens"] if "tokens" in table.columns else table["step"]
        first = table.filter(axis > 0.95 * axis.max())["step"].min()  # type: ignore[operator]
        found = window_median(table, "ce", int(first), int(table["step"].max()))  # type: ignore[arg-type]
        out[name] = found | {"steps": int(table["step"].max())}  # type: ignore[arg-type]
        if "applied" in table.columns:
            out[name] |= {"skipped": table.filter(table["applied"] == 0).height}
        if {"seconds", "tokens"} <= set(table.columns):
            seconds, tokens = float(table["seconds"].max()), int(table["tokens"].max())  # type: ignore[arg-type]
            out[name] |= {"seconds": seconds, "tokens_per_s": round(tokens / seconds)}
    return out


def rates(table: pl.DataFrame) -> pl.DataFrame:
    """Return tokens per second between reads of the metrics: ``tokens, batch, tokens_per_s``."""
    import polars as pl

    # All rows of one read carry its time; the last of them is the read's own.
    reads = table.group_by("seconds", maintain_order=True).last().sort("step")
    rate = pl.col("tokens").diff().fill_null(pl.col("tokens")) / pl.col("seconds").diff().fill_null(pl.col("seconds"))
    found = reads.with_columns(rate.alias("tokens_per_s")).select("tokens", "batch", "tokens_per_s")
    return found.filter(pl.col("tokens_per_s").is_finite() & (pl.col("tokens_per_s") > 0))


def checks(result: Result) -> Iterator[Check]:
    """The stitching rule, the schedule as printed, and what the warmup buys at equal tokens."""
    tables, reports = stitched(result)
    main = tables["warmup"] if "warmup" in tables else next(iter(tables.values()))
    yield from _stitching_checks(result, tables, reports)
    yield from _schedule_checks(result, main)
    yield from _loss_checks(tables)


def _stitching_checks(result: Result, tables: dict[str, pl.DataFrame], reports: dict[str, Any]) -> Iterator[Check]:
    import polars as pl

    newest = result.table.filter(pl.col("segment") == pl.col("segment").max().over("schedule", "step"))
    kept = pl.concat([t.select(pl.lit(n).alias("schedule"), "step", "ce") for n, t in tables.items()])
    both = newest.select("schedule", "step", pl.col("ce").alias("newest")).join(kept, on=["schedule", "step"])
    wrong = both.filter(pl.col("ce").ne_missing(pl.col("newest"))).height + abs(both.height - kept.height)
    segments = sum(len(r.segments) for r in reports.values())
    overlaps = sum(r.overlaps for r in reports.values())
    gaps = [g for r in reports.values() for g in r.gaps]
    repeated = result.table.group_by("schedule", "step").agg(pl.col("ce"), pl.len()).filter(pl.col("len") > 1)
    spread = max((max(v) - min(v) for v in repeated["ce"].drop_nulls().to_list()), default=0.0)
    yield Check("at every overlapping step the newest segment's value is retained", wrong == 0,
                f"{segments} segments, {overlaps} overlapping steps, {wrong} others")  # fmt: skip
    yield Check("no step is missing", None if result.own else not gaps, f"{len(gaps)} gaps")
    yield Check("a repeated step repeats its loss", None if result.own or not repeated.height else spread < 0.02,
                f"largest difference over {repeated.height} steps: {spread:.2g}")  # fmt: skip


def _schedule_checks(result: Result, table: pl.DataFrame) -> list[Check]:
    import polars as pl

    grows = "the batch grows through the printed multiples"
    scaled = "the learning rate is multiplied by (B_new / B_old)^alpha at each increase"
    if "batch" not in table.columns:
        return [Check(name, None, "no batch in the history") for name in (grows, scaled)]
    table = table.filter(pl.col("batch").is_not_null())
    batches = [float(b) for b in table.filter(pl.col("batch").diff().fill_null(1) != 0)["batch"]]
    base = batches[0] if result.own else result.params.batch
    out = [Check(grows, batches == [base * m for m in result.params.multiples], " → ".join(f"{b:g}" for b in batches))]
    if "lr" not in table.columns:
        return [*out, Check(scaled, None, "no learning rate in the history")]
    jump = table.with_columns(
        (pl.col("lr") / pl.col("lr").shift()).alias("lr_ratio"),
        (pl.col("batch") / pl.col("batch").shift()).alias("batch_ratio"),
    ).filter(pl.col("batch_ratio") > 1)
    # The first increase lies within the learning rate's own warmup.
    errors = (jump["lr_ratio"] - jump["batch_ratio"] ** result.params.alpha).abs().to_list()[1:]
    worst = max(errors, default=0.0)
    small = worst < (0.01 if result.own else 1e-5)
    return [*out, Check(scaled, small if errors else None, f"largest error {worst:.1g}")]


def _loss_checks(tables: dict[str, pl.DataFrame]) -> list[Check]:
    claims = (
        "the warmup takes far fewer steps than the small batch",
        "at equal tokens the warmup ends below the fixed large batch",
        "at equal tokens the warmup keeps the loss of the small batch",
        "when the warmup ends, the small batch is still above it at that wall time",
    )
    if not set(SCHEDULES) <= set(tables):
        return [Check(claim, None, "needs the runs warmup, fixed large and fixed small") for claim in claims]
    final = final_losses(tables)
    warm, large, small = (final[n] for n in SCHEDULES)
    text = ", ".join(f"{n} {f['median']:.3f} [{f['low']:.3f}, {f['high']:.3f}] in {f['steps']} steps"
                     for n, f in final.items())  # fmt: skip
    kept = warm["low"] <= small["high"]
    # The reason explains a warmup behind the small batch; one nearer to the large batch it would not.
    explained = warm["median"] - small["median"] < large["median"] - warm["median"]
    why = FAR.format(int(tables["warmup"]["tokens"].max()))  # type: ignore[arg-type]
    return [
        Check(claims[0], warm["steps"] < 0.5 * small["steps"], text),
        Check(claims[1], warm["high"] < large["low"], text),
        Check(claims[2], kept, text, why if explained and not kept else ""),
        _equal_time_check(claims[3], tables, final),
    ]


def _equal_time_check(claim: str, tables: dict[str, pl.DataFrame], final: dict[str, dict[str, Any]]) -> Check:
    from workbench.training.histories import window_median

    warm = final["warmup"]
    small, end = tables["fixed small"], float(tables["warmup"]["seconds"].max())  # type: ignore[arg-type]
    then = small.filter((small["seconds"] > 0.95 * end) & (small["seconds"] <= end))["step"]
    if not len(then) or small["seconds"].max() < end:  # type: ignore[operator]
        return Check(claim, None, f"the small batch has no step at {end:.1f} s")
    found = window_median(small, "ce", int(then.min()), int(then.max()))  # type: ignore[arg-type]
    text = f"at {end:.1f} s: warmup {warm['median']:.3f}, fixed small {found['median']:.3f} " \
           f"[{found['low']:.3f}, {found['high']:.3f}]"  # fmt: skip
    ahead = found["low"] > warm["high"]
    gain = final["fixed large"]["tokens_per_s"] / final["fixed small"]["tokens_per_s"]
    why = f"on this machine large batches hardly gain time: {gain:.1f} times the small batch's tokens/s"
    return Check(claim, ahead, text, why if not ahead and gain < HARDLY else "")


def planned(table: pl.DataFrame, alpha: float, recorded_alpha: float) -> pl.Series:
    """Return the learning rate that a history's batch sizes ask for with another exponent, after the first warmup."""
    growth = table["batch"] / table["batch"][0]
    first = (table["lr"] / growth**recorded_alpha).max()
    return first * growth**alpha  # type: ignore[operator]


def draw(result: Result) -> go.Figure:
    """Draw cross-entropy against tokens, steps and wall time; batch size, learning rate and throughput."""
    from workbench.core.colours import SERIES
    from workbench.training.histories import smooth, thinned
    from workbench.views.plotting import figure

    tables, _ = stitched(result)
    fig = figure(
        "Batch-size warmup against fixed batches, equal tokens", rows=3, cols=2, shared_xaxes=False, height=900,
        vertical_spacing=0.11, horizontal_spacing=0.12,
    )  # fmt: skip

    def line(x: Any, y: Any, row: int, col: int, name: str, **style: Any) -> None:
        first = name not in shown
        shown.add(name)
        fig.add_scatter(
            x=list(thinned(x)), y=list(thinned(y)), mode="lines", name=html.escape(name), legendgroup=name,
            showlegend=first, line={"width": 1.5} | style, row=row, col=col,
        )  # fmt: skip

    shown: set[str] = set()
    places = [("tokens", 1, 1, "tokens"), ("step", 1, 2, "optimizer steps"), ("seconds", 2, 1, "wall time (s)")]
    for i, (name, table) in enumerate(tables.items()):
        colour = {"color": SERIES[i % len(SERIES)]}
        ce = smooth(table["ce"].to_numpy(), result.params.span)
        has = set(table.columns)
        along = "tokens" if "tokens" in has else "step"
        for column, row, col, _label in places:
            if column == "seconds" and column in has:
                # All rows of one read of the metrics carry its time.
                end = (table[column] != table[column].shift(-1)).fill_null(True).to_numpy()
                line(table[column].to_numpy()[end], ce[end], row, col, name, **colour)
            elif column in has:
                line(table[column], ce, row, col, name, **colour)
        if "batch" in has:
            line(table[along], table["batch"], 2, 2, name, shape="hv", **colour)
        if "lr" in has:
            line(table[along], table["lr"], 3, 1, name, shape="hv", **colour)
            if "batch" in has and table["batch"].n_unique() > 1:
                plan = planned(table, result.params.planned_alpha, result.params.alpha)
                label = f"{name}: plan, alpha {result.params.planned_alpha:g}"
                line(table[along], plan, 3, 1, label, shape="hv", dash="dot", **colour)
        if {"seconds", "tokens", "batch"} <= has:
            rate = rates(table)
            line(rate["tokens"], rate["tokens_per_s"], 3, 2, name, **colour)
    for column, row, col, label in places:
        fig.update_xaxes(title=label, row=row, col=col)
        fig.update_yaxes(title="cross-entropy", row=row, col=col)
        if column == "step":
            fig.update_xaxes(type="log", dtick=1, row=row, col=col)
    for row, col, label in ((2, 2, "sequences per step"), (3, 1, "learning rate"), (3, 2, "tokens/s")):
        fig.update_xaxes(title="tokens", row=row, col=col)
        fig.update_yaxes(title=label, row=row, col=col)
    fig.update_yaxes(type="log", dtick=1, row=2, col=2)
    fig.update_yaxes(rangemode="tozero", row=3, col=2)
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
    tests=("tests/training/test_run.py", "tests/training/test_optimizer.py", "tests/kernels/test_model.py"),
    opens=opener(read),
    own="archive",
    recorded=archived,
    recording="2026-11-29_h200_9bc0ffa",
    needs="one CUDA GPU, or tiny=True",
    live_on_cpu=True,
)
