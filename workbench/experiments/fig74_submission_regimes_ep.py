"""Figures 74 and 75 over several GPUs: every rank of one step on both paths, and what the ranks' waits cost."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.core.params import param
from workbench.core.tables import recorded_kinds
from workbench.experiments import fig74_submission_regimes as one
from workbench.experiments.fig74_submission_regimes import MICROBATCH, RegimesParams, part_rows
from workbench.views.ranks import of_rank, on_every_rank, ranks_of

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import polars as pl

WAITS = {"synchronized": 7, "synchronized, wait covered": 7, "rowwise": 0}
"""Host waits of one step: one in every routed block's forward, or none."""
ALWAYS = 0.9
"""Share of the meetings from which on the rank that comes last is slow, and not late by chance."""
SLOWER_GPU = "one rank comes last at nearly every meeting: its GPU ran slower, and no way of submitting ends that wait"


@dataclass(frozen=True, kw_only=True)
class RegimesRanksParams(RegimesParams):
    """The development model on one rank per GPU, and what of its captures is shown; sizes are those of each rank."""

    ranks: int = param(0, "ranks, one per GPU; 0: as many as there are GPUs", min=0, max=64)
    rank: int = param(0, "rank that is shown", min=0, max=63, analysis=True)


def measure(params: RegimesRanksParams, recorder: Any) -> None:
    """Start one process per GPU again and again, time whole steps, and capture every rank in the first start."""
    from workbench.measure.multi_gpu import Options, run

    with tempfile.TemporaryDirectory(prefix="headroom-") as folder:
        options = Options(
            out=folder, sections=("regimes",), experts=params.experts, sequences=params.sequences,
            lengths=params.lengths, visits=params.visits,
        )  # fmt: skip
        keep(params, recorder, run(options, params.ranks, params.processes), Path(folder))


def keep(params: RegimesRanksParams, recorder: Any, found: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write what the ranks returned, and the analysis of the captures in `folder`."""
    from workbench.measure.regimes import trace_name
    from workbench.views.regimes import capture_rows, skew_rows

    (sizes,) = (r for r in found if r["section"] == "model" and r["rank"] == 0)
    (pool,) = (r for r in found if r["section"] == "pool" and r["rank"] == 0)
    ranks = sizes["ranks"]
    one.set_protocol(recorder, params)
    recorder.set(
        "protocol",
        timer="perf_counter_ns around one whole step on every rank, all ranks starting together with idle devices, "
        "until the rank's own device is idle; a step's time is that of its slowest rank",
        synchronization="waits counted by the profiler in one further step of one microbatch on every rank",
        skew="of a collective: how much longer its kernel lasts on a rank than on the rank that came last; of a "
        "block's start: device times of the ranks' traces on the host's clock",
    )
    recorder.set("topology", nodes=1, gpus=ranks, dp=ranks, ep_mp=ranks, microbatch=params.sequences, accumulation=1)
    told = {k: sizes[k] for k in ("layers", "experts", "top_k", "total_params", "active_params")}
    recorder.set("workload", seeds=[0], shared_experts=1, capacity="capacity factor 1.25", router="random",
                 mixers="grouped-query attention", sequence_tokens=params.lengths[0], **told,
                 symmetric_pool={k: pool[k] for k in ("slots", "high_water", "bytes_per_rank")})  # fmt: skip
    for row in rank_rows(found):
        recorder.row(**row)
    for name, values in step_samples(found).items():
        recorder.samples(name, values)
    for length in params.lengths:
        variants = one.captured_variants(params, length)
        paths = [{v: folder / trace_name(v, length, rank) for v in variants} for rank in range(ranks)]
        for rank, mine in enumerate(paths):
            for path in mine.values():
                recorder.attach(path.name, path)
            for row in capture_rows(mine, MICROBATCH):
                recorder.row(length=length, rank=rank, **row)
        for variant in variants:
            for row in skew_rows([mine[variant] for mine in paths], MICROBATCH):
                recorder.row(**{"variant": variant, "length": length, "ranks": ranks} | row)
    recorder.split("part")


def rank_rows(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return ``step`` rows (the slowest rank's time, per process start) and ``rank step`` rows (waits, drops)."""
    steps: dict[tuple[str, int, int], list[list[float]]] = {}
    counted: dict[tuple[str, int, int], dict[str, Any]] = {}
    for r in found:
        if r["section"] == "step":
            steps.setdefault((r["variant"], r["length"], r["restart"]), []).append(r["samples_ms"])
        elif r["section"] in ("waits", "metrics"):
            kept = counted.setdefault((r["variant"], r["length"], r["rank"]), {"ranks": r["ranks"]})
            kept |= {k: v for k, v in r.items() if k not in ("section", "restart", "ranks", "rank")}
    rows: list[dict[str, Any]] = []
    for (variant, length, process), by_rank in steps.items():
        slowest = [max(visit) for visit in zip(*by_rank, strict=True)]
        rows.append({"part": "step", "variant": variant, "length": length, "process": process,
                     "step_ms": round(statistics.median(slowest), 4)})  # fmt: skip
    for (_, _, rank), kept in counted.items():
        rows.append({"part": "rank step", "rank": rank, **kept})
    return rows


def step_samples(found: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Return every rank's raw step times."""
    return {
        f"step_ms {r['variant']} {r['length']} process {r['restart']} rank {r['rank']}": r["samples_ms"]
        for r in found
        if r["section"] == "step"
    }


def costs(result: Result) -> pl.DataFrame:
    """Return per variant, length and rank what one captured microbatch waited for, in ms.

    Columns: `device` (first to last device operation), `idle` (no device operation), `host_wait` (the host in waits),
    `collectives` (inside them), `peer_wait` (of it: for a rank that came later), `row_kernels` (dispatch and combine:
    rowwise rows cross between GPUs in them, synchronized ones are only permuted).
    """
    import polars as pl

    rows = []
    for (variant, length), _ in result.tables["rank"].group_by(["variant", "length"], maintain_order=True):
        for mine in part_rows(result, "rank", variant, length):
            (c,) = part_rows(of_rank(result, mine["rank"]), "capture", variant, length)
            named = {"device": c["device_us"], "idle": c["device_idle_us"], "host_wait": c["wait_us"],
                     "collectives": mine["communication_us"], "peer_wait": mine["peer_wait_us"],
                     "row_kernels": mine["row_kernels_us"]}  # fmt: skip
            rows.append({"variant": variant, "length": length, "rank": int(mine["rank"])}
                        | {k: round(v / 1e3, 3) for k, v in named.items()})  # fmt: skip
    return pl.DataFrame(rows)


def beside_one_gpu(result: Result) -> pl.DataFrame:
    """Return both paths on every rank beside the one-GPU recording: step time over process starts, and idle shares."""
    import polars as pl

    tables = {f"{len(ranks_of(result))} GPUs, rank {r}": of_rank(result, r) for r in ranks_of(result)}
    if one.EXPERIMENT.recording:
        tables["one GPU (recorded)"] = one.EXPERIMENT.run("recorded")
    rows = []
    for length in one.captured_lengths(result):
        for variant in ("synchronized", "rowwise"):
            for where, table in tables.items():
                found = part_rows(table, "capture", variant, length)
                if not found:
                    continue
                median, least, greatest = one.step_spread(table, variant, length)
                starts = len(part_rows(table, "step", variant, length))
                c = found[0]
                rows.append({
                    "length": length, "variant": variant, "where": where, "step (ms)": round(median, 1),
                    "over starts": f"{least:.1f} to {greatest:.1f} ({starts})" if starts > 1 else "one start",
                    "forward idle": f"{c['forward_idle_us'] / c['forward_us']:.2%}",
                    "idle, both passes": f"{c['device_idle_us'] / c['device_us']:.2%}",
                    "blocks not begun when submitted": int(c["not_begun_at_submission"]),
                })  # fmt: skip
    return pl.DataFrame(rows)


def skews(result: Result) -> pl.DataFrame:
    """Return per variant and length the ranks' skew at collectives and block starts: median, p80, greatest, in us."""
    import polars as pl

    columns = ["variant", "length", "skew_us"]
    parts = (("collective", "collective"), ("block_start", "block start"))
    apart = pl.concat([result.tables[name][columns].with_columns(part=pl.lit(part)) for name, part in parts])
    return apart.group_by("variant", "length", "part", maintain_order=True).agg(
        pl.len().alias("count"),
        pl.col("skew_us").median().round(1).alias("median_us"),
        pl.col("skew_us").quantile(0.8, "linear").round(1).alias("p80_us"),
        pl.col("skew_us").max().round(1).alias("greatest_us"),
    )


def checks(result: Result) -> list[Check]:
    """Claims of the captions on every rank, waits of whole steps, step times, the what-if, and the ranks' skew."""
    import polars as pl

    views = [of_rank(result, rank) for rank in ranks_of(result)]
    out = [on_every_rank(same) for same in zip(*(one.capture_checks(v) for v in views))]
    out.append(on_every_rank([one.host_loop_check(v) for v in views]))
    counted = result.tables["rank_step"].filter(pl.col("waits").is_not_null())
    for variant, wanted in WAITS.items():
        mine = counted.filter(pl.col("variant") == variant)
        waits, pageable = sorted(set(mine["waits"].to_list())), int(mine["pageable_d2h"].sum() or 0)
        claim = f"{variant}: {wanted} host waits in a whole step, on every rank"
        out.append(Check(claim, waits == [wanted] and not pageable, f"{mine.height} steps counted, waits {waits}"))
    rowwise = counted.filter(pl.col("variant") == "rowwise")
    out.append(Check("rowwise drops no route at capacity factor 1.25", int(rowwise["dropped"].sum()) == 0,
                     f"{int(rowwise['dropped'].sum())} of {int(rowwise['offered'].sum())} routes; capacity used up to "
                     f"{rowwise['capacity_use'].max():.1%}"))  # fmt: skip
    for length in one.captured_lengths(result):
        out.append(one.faster_check(result, length))
        out.append(on_every_rank([one.what_if_check(v, length) for v in views]))
    out.append(_peers_check(result))
    return out


def _peers_check(result: Result) -> Check:
    """At the report's length; where submission is the bound, ranks wait for the slowest host on either path."""
    length = one.captured_lengths(result)[0]
    found = {
        v: [r["peer_wait_us"] / 1e3 for r in part_rows(result, "rank", v, length)] for v in ("synchronized", "rowwise")
    }
    text = "; ".join(f"{v} {', '.join(f'{ms:.1f}' for ms in per_rank)} ms by rank" for v, per_rank in found.items())
    last = [r["last_rank"] for r in part_rows(result, "collective", "rowwise", length)]
    slow = max(set(last), key=last.count)
    times = last.count(slow)
    return Check(
        f"{length} tokens a sequence: synchronized ranks wait longer for each other than rowwise ones",
        sum(found["synchronized"]) > sum(found["rowwise"]),
        f"{text}; rank {slow:g} comes last at {times} of {len(last)} rowwise meetings",
        SLOWER_GPU if times >= ALWAYS * len(last) else "",
    )


def draw(result: Result) -> go.Figure:
    """Draw one rank's captures as the one-GPU figure does."""
    rank, ranks = result.params.rank, len(ranks_of(result))
    fig = one.draw(of_rank(result, rank))
    fig.update_layout(title_text=f"Two submission regimes on {ranks} GPUs: rank {rank}")
    return fig


def draw_skew(result: Result) -> go.Figure:
    """Draw how far the ranks lie apart at every collective of the captured microbatch, both paths at both lengths."""
    from workbench.core.colours import SERIES
    from workbench.views.plotting import figure

    lengths = one.captured_lengths(result)
    titles = [f"2 x {n} tokens a rank" if result.params.sequences == 2 else f"{n} tokens a sequence" for n in lengths]
    fig = figure("How long the first rank waits for the last at each collective", cols=len(lengths), height=380,
                 shared_xaxes=False, shared_yaxes=True, subplot_titles=titles)  # fmt: skip
    for column, length in enumerate(lengths, start=1):
        for variant, colour in (("synchronized", SERIES[0]), ("rowwise", SERIES[2])):
            rows = part_rows(result, "collective", variant, length)
            fig.add_scatter(
                x=[(r["block"] + 0.5) / len(rows) for r in rows], y=[max(r["skew_us"], 0.1) for r in rows],
                mode="markers", name=variant, legendgroup=variant, showlegend=column == 1,
                marker={"color": colour, "size": 6}, row=1, col=column,
                customdata=[(r["label"], r["last_rank"]) for r in rows],
                hovertemplate="%{customdata[0]}: %{y:.1f} us<br>rank %{customdata[1]} came last<extra></extra>",
            )  # fmt: skip
        fig.update_xaxes(title="collectives in order of launch", tickformat=".0%", range=[0, 1], row=1, col=column)
    fig.update_yaxes(type="log", dtick=1)
    fig.update_yaxes(title="skew (us, log)", col=1)
    fig.update_layout(legend={"y": -0.3, "yanchor": "top"}, margin={"t": 90})
    return result.badged(fig)


def view(result: Result) -> dict[str, Any]:
    """Return the arguments of `workbench.widgets.trace_view` for the shown rank's capture."""
    rank = result.params.rank
    shown = one.view(of_rank(result, rank))
    return shown | {"title": f"{shown['title']}, rank {rank}"}


EXPERIMENT = Experiment(
    slug="fig74_submission_regimes_ep",
    group="appendix_b",
    title="Figures 74 and 75 over several GPUs: both regimes on every rank",
    claim="With a host wait in every routed block all ranks keep in step with their GPUs and wait for each other; "
    "without it every rank's CPU runs ahead.",
    kind="measured",
    anchor="Appendix B.5, Figures 74 and 75; Sections 8.2 and 8.4",
    params=RegimesRanksParams,
    figure=draw,
    checks=checks,
    measure=measure,
    recorded=recorded_kinds("part"),
    tests=(
        "tests/measure/test_multi_gpu.py",
        "tests/experiments/test_expert_parallel.py",
        "tests/kernels/test_transport.py",
        "tests/kernels/test_model.py",
        "tests/kernels/test_block.py",
        "tests/kernels/test_block_gpu.py",
    ),
    recording="2026-11-29_h200_3d77586",
    needs="CUDA GPUs of one host with peer access, NCCL and nvshmem4py",
)
