"""Table 48: what submission hides of short MXFP8 expert products, with our kernels beside the report's numbers."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.core.colours import COLOURS, INK, SERIES
from workbench.core.experiment import Check, Experiment, Result
from workbench.core.params import Params, param
from workbench.models.moe_cost import Cost, grouped_gemm

if TYPE_CHECKING:
    import plotly.graph_objects as go

INPUTS = ("prequantized", "including_q")
MODES = ("eager", "graph")
BASELINE = "bf16_grouped"
REPORT = "report (one B300)"
CONVERGED = 0.1
"""Eager and graph speedups that differ by less than this share count as converged."""
ROWS_M, SWEPT_M = (128, 4096, 32768), (16, 64, 512, 2048, 8192, 65536)


@dataclass(frozen=True, kw_only=True)
class SubmissionTaxParams(Params):
    """Parameters of the runs; the shapes are Table 48's."""

    rows_M: tuple[int, ...] = param(ROWS_M, "rows of the table, in all experts together")
    swept_M: tuple[int, ...] = param(SWEPT_M, "further rows, timed once")
    experts: int = param(16, "balanced local experts", min=1, max=128)
    k: int = param(1536, "input width", min=128, max=8192)
    n: int = param(3072, "output width", min=128, max=8192)
    restarts: int = param(3, "process restarts of the table's rows", min=1, max=10)
    seed: int = param(0, "seed of inputs and weights", min=0, max=1000)
    view_M: int = param(
        4096, "rows to read off the curves", choices=tuple(sorted(ROWS_M + SWEPT_M)), log=True, analysis=True
    )


def product_cost(M: int, params: Any, variant: str, source: str) -> Cost:
    """Return the fewest bytes and operations of one product [M, k] x [experts, n, k]: BF16, or MXFP8 with BF16
    output."""
    bf16 = grouped_gemm(M, params.k, params.n, params.experts)
    if variant.startswith("bf16"):
        return bf16
    elements = M * params.k * (2 if source == "including_q" else 1) + params.experts * params.n * params.k
    # Scales count one byte a row: the folded form. Canonical rows carry k / 32 each.
    canonical = variant in ("ours_canonical", "multi_launch") and source == "prequantized"
    scales = params.experts * params.n + (M * params.k // 32 if canonical else M)
    return Cost(elements + scales + 2 * M * params.n, bf16.flop)


def measure(params: SubmissionTaxParams, recorder: Any) -> list[dict[str, Any]]:
    """Run the protocol in `restarts` fresh processes, one after another, and gather their medians."""
    from workbench.measure.processes import in_new_process
    from workbench.measure.table48 import measure_process

    processes = []
    for restart in range(params.restarts):
        request = {key: getattr(params, key) for key in ("experts", "k", "n", "seed")}
        request |= {"rows_M": params.rows_M, "swept_M": params.swept_M if restart == 0 else (), "honest": restart == 0}
        request["reverse"] = restart % 2 == 1
        processes.append(in_new_process(measure_process, request))
    failures = [f for p in processes for f in p["failures"]]
    ceilings = processes[0]["ceilings"]
    rows = gather(processes, params, ceilings)
    for row in rows:
        recorder.row(**row)
    recorder.attach("samples.json", json.dumps({"processes": processes}))
    recorder.set("topology", nodes=1, gpus=1)
    recorder.set("workload", experts=params.experts, capacity="balanced groups, no padding", seeds=[params.seed])
    recorder.set(
        "precision",
        parameter="E4M3, one E8M0 scale a row (folded from 1x32 blocks, floor rule), or BF16",
        activation="as the parameters",
        accumulation="FP32, added every 128 of K (ours), tensor-core accumulator (fast)",
        layout="rows [M, k], weights [experts, n, k]",
    )
    recorder.set(
        "protocol",
        timer="eager: triton do_bench, 25 ms warm-up, 100 ms windows, L2 flushed before each call; "
        "graph: CUDA events around a replay of 32 copies",
        warmup="eager 25 ms; graph 3 replays",
        repeats="two visits a process, each: eager every call of a 100 ms window, graph 5 replays; swept rows and "
        "variants beside the table: one visit in the first process",
        order="variants forwards, then backwards; the other way round in every second process",
        l2="eager: flushed by writing 256 MB; graph: warm, except rotating_us (3 weight sets in turn)",
        synchronization="none inside a timed region",
        compile="kernels compiled before the first timed call",
        exclusions="weight quantisation (once per optimizer step)",
        retries="none" if not failures else f"{len(failures)} variants failed, see samples.json",
        restarts=params.restarts,
        ceilings=ceilings,
    )
    return recorder.rows


def gather(processes: Sequence[Mapping[str, Any]], params: Any, ceilings: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return tidy rows from the raw samples of each process; a speedup is taken inside its process, then the median
    over processes."""
    times: dict[tuple[int, str, str, str], dict[int, float]] = {}
    beside: dict[tuple[int, str, str], Mapping[str, Any]] = {}
    errors: dict[tuple[int, str, str], list[float]] = {}
    spread: dict[tuple[int, str, str, str], list[float]] = {}
    for number, process in enumerate(processes):
        for sample in process["samples"]:
            sources = INPUTS if sample["variant"].startswith("bf16") else (sample["input"],)
            for source in sources:
                key = (sample["M"], source, sample["variant"])
                if "error" in sample:
                    errors.setdefault(key, []).append(sample["error"])
                if "submit_us" in sample:
                    beside[key] = sample
                for mode in MODES:
                    pooled = [t for visit in sample[mode] for t in visit]
                    if pooled:
                        times.setdefault((*key, mode), {})[number] = statistics.median(pooled)
                        spread.setdefault((*key, mode), []).extend(pooled)
    rows = []
    for (M, source, variant, mode), medians in times.items():
        base = times.get((M, source, BASELINE, mode), {})
        ratios = [base[number] / t for number, t in medians.items() if number in base]
        if not ratios:
            continue
        time_us = statistics.median(medians.values())
        rate = ceilings["bf16_TFLOPs" if variant.startswith("bf16") else "fp8_TFLOPs"]
        floor_us = product_cost(M, params, variant, source).floor_us(ceilings["copy_GBps"], rate)
        extra = beside.get((M, source, variant), {})
        cuts = (
            statistics.quantiles(spread[M, source, variant, mode], n=5)
            if len(spread[M, source, variant, mode]) > 1
            else [time_us] * 4
        )
        rows.append({
            "M": M, "input": source, "variant": variant, "mode": mode, "speedup": round(statistics.median(ratios), 4),
            "time_us_p50": round(time_us, 3), "bf16_time_us_p50": round(statistics.median(base.values()), 3),
            "floor_share": round(floor_us / time_us, 4), "speedup_min": round(min(ratios), 4),
            "speedup_max": round(max(ratios), 4), "restarts": len(ratios), "time_us_p20": round(cuts[0], 3),
            "time_us_p80": round(cuts[3], 3), "floor_us": round(floor_us, 3),
            "submit_us_p50": _median(extra.get("submit_us")),
            "back_to_back_us_p50": _median(extra.get("back_to_back_us")),
            "rotating_us_p50": _median(extra.get("rotating_us")), "launches": extra.get("launches"),
            "error": max(errors.get((M, source, variant), ()), default=None),
        })  # fmt: skip
    return sorted(rows, key=lambda r: (r["M"], INPUTS.index(r["input"]), r["variant"], r["mode"]))


def _median(values: Iterable[float] | None) -> float | None:
    return None if values is None else round(statistics.median(values), 3)


def report_rows(_: Any = None) -> list[dict[str, Any]]:
    """Return the report's twelve cells as tidy rows of variant `report`."""
    from workbench.core.report_tables import printed_rows

    unknown = dict.fromkeys(("time_us_p50", "bf16_time_us_p50", "floor_share"))
    return [
        {"M": int(row["rows_M"]), "input": source, "variant": "report", "mode": mode,
         "speedup": float(row[f"{source}_{mode}"])} | unknown
        for row in printed_rows(48) for source in INPUTS for mode in MODES
    ]  # fmt: skip


def comparison(result: Result) -> list[dict[str, Any]]:
    """Return the table as the report prints it, one row a cell: report, ours with its range over restarts, and
    who is ahead."""
    found = {(r["M"], r["input"], r["mode"]): r for r in result.table.to_dicts() if r["variant"] == "ours"}
    out = []
    for cell in report_rows():
        ours = found.get((cell["M"], cell["input"], cell["mode"]))
        out.append(
            {key: cell[key] for key in ("M", "input", "mode")}
            | {
                REPORT: cell["speedup"],
                "ours": ours and ours["speedup"],
                "least": ours and ours["speedup_min"],
                "most": ours and ours["speedup_max"],
                "share of floor": ours and ours["floor_share"],
                "ahead": ours and ours["speedup"] > cell["speedup"],
            }
        )
    return out


def launch_costs(result: Result) -> list[dict[str, Any]]:
    """Return what each launch costs the host: submission time and launches per call of every variant in the table's
    rows."""
    rows = [r for r in result.table.to_dicts() if r.get("launches") and r["mode"] == "eager"]
    keys = (
        "M", "input", "variant", "launches", "submit_us_p50", "back_to_back_us_p50", "time_us_p50", "rotating_us_p50",
        "floor_us", "error",
    )  # fmt: skip
    return [
        {key: r.get(key) for key in keys} | {"submit_us_per_launch": round(r["submit_us_p50"] / r["launches"], 2)}
        for r in rows
    ]


def checks(result: Result) -> Iterator[Check]:
    """The report's reading of Table 48 against this table."""
    if result.source == "report":
        cells = {(r["M"], r["input"], r["mode"]): r["speedup"] for r in result.table.to_dicts()}
        yield _converges(cells, "the report's operation")
        yield from _graph_above(cells, "the report's operation")
        return
    rows = result.table.to_dicts()
    ours = {(r["M"], r["input"], r["mode"]): r["speedup"] for r in rows if r["variant"] == "ours"}
    many = {(r["M"], r["input"], r["mode"]): r["speedup"] for r in rows if r["variant"] == "multi_launch"}
    cells = [c for c in comparison(result) if c["ours"] is not None]
    behind = [f"M = {c['M']} {c['input']} {c['mode']}" for c in cells if not c["ahead"]]
    ahead = Check(
        "ours is ahead of the report in all twelve cells",
        None if len(cells) < 12 else not behind,
        "behind at " + ", ".join(behind)
        if behind
        else f"{len(cells)} cells, least lead {min((c['ours'] / c[REPORT] for c in cells), default=0):.2f}x",
    )
    yield _converges(ours, "our operation")
    yield from _graph_above(many, "the operation of several launches")
    yield ahead


def _converges(cells: Mapping[tuple[int, str, str], float], whose: str) -> Check:
    M = max(ROWS_M)
    claim = f"at M = {M} eager and graph speedups of {whose} converge: less than {CONVERGED:.0%} apart for either input"
    if any((M, source, mode) not in cells for source in INPUTS for mode in MODES):
        return Check(claim, None, f"this table lacks a cell at M = {M}")
    gaps = {s: _gap(cells[M, s, "eager"], cells[M, s, "graph"]) for s in INPUTS}
    shown = ", ".join(f"{s.replace('_', ' ')} {gap:.1%}" for s, gap in gaps.items())
    return Check(claim, max(gaps.values()) < CONVERGED, f"{shown} apart")


def _gap(a: float, b: float) -> float:
    return max(a, b) / min(a, b) - 1


def _graph_above(cells: Mapping[tuple[int, str, str], float], whose: str) -> Iterator[Check]:
    for source in INPUTS:
        claim = (
            f"at M = 128, {source.replace('_', ' ')}, graph replay shows more speedup than eager submission for {whose}"
        )
        if any((128, source, mode) not in cells for mode in MODES):
            yield Check(claim, None, "this table has no such row at M = 128")
            continue
        eager, graph = cells[128, source, "eager"], cells[128, source, "graph"]
        yield Check(claim, graph > eager, f"{graph:.2f}x against {eager:.2f}x")


LINES = ((BASELINE, "BF16 grouped", INK), ("ours", "ours", SERIES[0]), ("multi_launch", "several launches", SERIES[1]))


def draw(result: Result) -> go.Figure:
    """Draw time and speedup over M, eager against graph, the floor, and what the host needs to submit."""
    from workbench.views.plotting import figure

    rows = result.table.to_dicts()
    fig = figure(
        "What submission hides of a short MXFP8 product", rows=2, height=800, cols=2, shared_yaxes=True,
        vertical_spacing=0.1, subplot_titles=("prequantized input", "including quantisation", "", ""),
    )  # fmt: skip
    for column, source in enumerate(INPUTS, start=1):
        for variant, name, colour in LINES:
            for mode in MODES:
                line = [r for r in rows if (r["variant"], r["input"], r["mode"]) == (variant, source, mode)]
                _add(fig, line, "time_us_p50", f"{name}, {mode}", colour, mode, 1, column)
                if variant != BASELINE:
                    _add(fig, line, "speedup", f"{name}, {mode}", colour, mode, 2, column, legend=False)
            host = [
                r
                for r in rows
                if (r["variant"], r["input"], r["mode"]) == (variant, source, "eager") and r.get("submit_us_p50")
            ]
            if host:
                _add(fig, host, "submit_us_p50", f"{name}, host submission", colour, "host", 1, column)
        floor = [r for r in rows if (r["variant"], r["input"], r["mode"]) == ("ours", source, "graph")]
        if floor:
            _add(fig, floor, "floor_us", "MXFP8 floor", SERIES[3], "floor", 1, column)
        for mode in MODES:
            printed = [r for r in report_rows() if r["input"] == source and r["mode"] == mode]
            _add(fig, printed, "speedup", f"report (one B300), {mode}", COLOURS["report"], f"report {mode}", 2, column)
    view: Any = {"x": result.params.view_M, "line": {"dash": "dot", "width": 1, "color": INK}}
    fig.add_vline(**view)
    fig.add_hline(y=1, line={"width": 1, "color": INK}, row=2, col="all")  # type: ignore[arg-type]
    fig.update_xaxes(type="log", dtick=1)
    fig.update_xaxes(title="rows M", row=2)
    fig.update_yaxes(type="log", dtick=1, title="time of one call (us, log)", row=1, col=1)
    fig.update_yaxes(type="log", dtick=1, row=1, col=2)
    fig.update_yaxes(title="speedup over BF16", row=2, col=1)
    # Thirteen entries take two to five lines: below the panels plotly makes room for them, above it would not.
    fig.update_layout(margin={"t": 135}, legend={"y": -0.17, "yanchor": "top"})
    _read_off(fig, result)
    return fig


def _add(
    fig: Any,
    rows: list[dict[str, Any]],
    y: str,
    name: str,
    colour: str,
    style: str,
    row: int,
    column: int,
    legend: bool = True,
) -> None:

    if not rows:
        return
    dash = {"graph": "solid", "eager": "dash", "floor": "dot"}.get(style, "solid")
    symbol = {"host": "triangle-up-open", "report eager": "diamond-open", "report graph": "diamond"}.get(
        style, "circle"
    )
    marks = style in ("host", "report eager", "report graph")
    fig.add_scatter(
        x=[r["M"] for r in rows], y=[r[y] for r in rows], name=name, legendgroup=name,
        showlegend=legend and column == 1,
        mode="markers" if marks else "lines+markers" if style != "floor" else "lines",
        line={"color": colour, "dash": dash}, marker={"color": colour, "symbol": symbol, "size": 10 if marks else 5},
        hovertemplate=f"{name}<br>M = %{{x}}<br>%{{y:.2f}}<extra></extra>", row=row, col=column,
    )  # fmt: skip


def _read_off(fig: Any, result: Result) -> None:
    """Write the values at the recorded size nearest to `view_M` under the headings of the two columns."""
    rows = [r for r in result.table.to_dicts() if r["variant"] == "ours"]
    if not rows:
        return
    nearest = min({r["M"] for r in rows}, key=lambda M: _gap(M, result.params.view_M))
    for heading, source in zip(fig.layout.annotations, INPUTS):
        at = {r["mode"]: r for r in rows if r["M"] == nearest and r["input"] == source}
        lines = [
            f"ours at M = {nearest}, {mode}: {at[mode]['time_us_p50']:.1f} us, {at[mode]['speedup']:.2f}x BF16"
            for mode in MODES
            if mode in at
        ]
        heading.text += "".join(f'<br><span style="font-size:12px">{line}</span>' for line in lines)


EXPERIMENT = Experiment(
    slug="tab48_submission_tax",
    group="appendix_b",
    title="Table 48: the submission tax on short MXFP8 products",
    claim="Ordinary eager submission can hide the device-level benefit of short MXFP8 expert operations; "
    "the number of launches decides.",
    kind="measured",
    anchor="Appendix B.6, Table 48",
    params=SubmissionTaxParams,
    figure=draw,
    checks=checks,
    report=report_rows,
    measure=measure,
    tests=(
        "tests/experiments/test_tab48_submission_tax.py",
        "tests/kernels/test_mxfp8.py",
        "tests/kernels/test_mxfp8_launch.py",
    ),
    recording="2026-11-29_h200_9c4015b",
    needs="one GPU of compute capability 9 (H100, H200)",
)
