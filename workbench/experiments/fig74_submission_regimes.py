"""Figures 74 and 75, measured: the synchronized path keeps CPU and GPU in step, rowwise lets the CPU run ahead."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.core.params import Params, param
from workbench.core.tables import recorded_kinds

if TYPE_CHECKING:
    import plotly.graph_objects as go

VARIANTS = ("synchronized", "synchronized, wait covered", "synchronized, host loop", "rowwise")
MICROBATCH = "microbatch 1"
BACK_TO_BACK = 0.01
"""Share of the forward that device idle may take where blocks run back to back: launch turnaround alone is about 1 us
for each of some 300 operations."""
BAND = 0.10
"""Distance of predicted from measured step time within which a what-if counts as right."""
BLOCK_GAP_US = 100.0
"""Idle time of a block above what launch turnaround between its some 40 operations explains."""
LANES = ("CUDA API", "CPU blocks", "GPU blocks", "GPU kernels")


@dataclass(frozen=True, kw_only=True)
class RegimesParams(Params):
    """The development model on one GPU, and what of its captures is shown."""

    experts: int = param(16, "routed experts on this GPU: one rank's share of 128 at EP8", min=8, max=128)
    sequences: int = param(2, "sequences per microbatch", min=1, max=8)
    lengths: tuple[int, ...] = param((8192, 1024), "sequence lengths; the first is the report's", unit="tokens", min=64)
    processes: int = param(5, "process starts over which step times are repeated", min=1, max=20)
    visits: int = param(2, "timed steps of each variant in each process", min=1, max=50)
    length: int = param(8192, "sequence length that is shown", unit="tokens", analysis=True)
    variant: str = param("synchronized", "variant above rowwise", choices=VARIANTS[:3], analysis=True)


def measure(params: RegimesParams, recorder: Any) -> None:
    """Time whole steps over process restarts, then capture every variant in this process."""
    from workbench.measure.processes import in_new_process
    from workbench.measure.regimes import Bench, packed, step_times, trace_name
    from workbench.views.regimes import capture_rows

    options = {
        "experts": params.experts, "grouped_gemm": None, "seed": 0, "microbatches": 1, "visits": params.visits,
        "sizes": [[params.sequences, length] for length in params.lengths],
    }  # fmt: skip
    set_protocol(recorder, params)
    recorder.set("topology", nodes=1, gpus=1, dp=1, ep_mp=1, microbatch=params.sequences, accumulation=1,
                 note="one rank: NCCL exchanges with itself, rowwise moves rows in its own memory; the model is one "
                 "rank's share of the report's, with all eight layers")  # fmt: skip
    for process in range(params.processes - 1):
        _step_rows(recorder, in_new_process(step_times, options, timeout_s=120), process)
    bench = Bench(experts=params.experts, grouped_gemm=None)
    config = bench.config
    recorder.set("workload", layers=config.layers, experts=params.experts, top_k=config.block.top_k, shared_experts=1,
                 capacity=f"capacity factor {config.block.capacity_factor}", sequence_tokens=params.lengths[0],
                 total_params=config.parameters, active_params=config.active_parameters, seeds=[0],
                 mixers="grouped-query attention", router=config.block.router_mode)  # fmt: skip
    here = {
        f"{params.sequences} x {length}": bench.times_ms(1, params.sequences, length, params.visits)
        for length in params.lengths
    }
    _step_rows(recorder, here, params.processes - 1)
    with tempfile.TemporaryDirectory(prefix="headroom-") as folder:
        for length in params.lengths:
            paths = {}
            for variant in captured_variants(params, length):
                paths[variant] = Path(folder) / trace_name(variant, length)
                paths[variant].write_bytes(packed(bench.capture(variant, params.sequences, length)))
                recorder.attach(paths[variant].name, paths[variant])
            recorder.rows.extend({"length": length, **r} for r in capture_rows(paths, MICROBATCH))
    recorder.split("part")


def set_protocol(recorder: Any, params: RegimesParams) -> None:
    """Write how steps are timed and captures made."""
    recorder.set(
        "protocol",
        timer="perf_counter_ns around one whole step, device synchronised before and after",
        warmup="1 step of each variant and size in each process",
        repeats=params.processes * params.visits,
        restarts=params.processes,
        order="variants interleaved: A B C D, then D C B A",
        profiler="one more step of three microbatches after a warm-up step; CPU and CUDA activities, no stacks",
        cut=f"captures keep {MICROBATCH} of three from the host's start to the end of its device work: device "
        "operations, their launches, waits, stream waits, named ranges; operators and other arguments are left out",
    )
    recorder.set("precision", parameter="bfloat16", activation="bfloat16", accumulation="float32",
                 optimizer="bfloat16 AdamW states, fused", communication="bfloat16")  # fmt: skip


def captured_variants(params: RegimesParams, length: int) -> tuple[str, ...]:
    """All variants at the report's length, the two paths at others."""
    return VARIANTS if length == params.lengths[0] else (VARIANTS[0], VARIANTS[-1])


def _step_rows(recorder: Any, times: dict[str, dict[str, list[float]]], process: int) -> None:
    from workbench.models.metrics import step_time

    for size, variants in times.items():
        for variant, values in variants.items():
            recorder.samples(f"step_ms {variant} {size} process {process}", values)
            recorder.row(part="step", variant=variant, length=int(size.split(" x ")[1]), process=process,
                         step_ms=round(step_time([v / 1e3 for v in values])["median_s"] * 1e3, 4))  # fmt: skip


def part_rows(result: Result, part: str, variant: str, length: int) -> list[dict[str, Any]]:
    """Return the rows of one table, variant and sequence length."""
    import polars as pl

    if part not in result.tables:
        return []
    return result.tables[part].filter((pl.col("variant") == variant) & (pl.col("length") == length)).to_dicts()


def captured_lengths(result: Result) -> list[int]:
    """Return the sequence lengths of a table, longest first."""
    return sorted(set(result.tables["capture"]["length"].to_list()), reverse=True)


def step_spread(result: Result, variant: str, length: int) -> tuple[float, float, float]:
    """Return (median, least, greatest) over processes of the median step time in ms."""
    values = [r["step_ms"] for r in part_rows(result, "step", variant, length)]
    return statistics.median(values), min(values), max(values)


def paired_ratios(result: Result, length: int) -> list[float]:
    """Return synchronized over rowwise step time, one ratio for each process start: the host differs between them."""
    by = {
        v: {r["process"]: r["step_ms"] for r in part_rows(result, "step", v, length)}
        for v in ("synchronized", "rowwise")
    }
    return [by["synchronized"][p] / by["rowwise"][p] for p in sorted(by["rowwise"])]


def what_if(result: Result, length: int) -> tuple[float, float]:
    """Return (predicted, measured) step time in ms: the synchronized step without its waits, and the rowwise step.

    The prediction scales the unprofiled synchronized step by what its trace loses when replayed without host waits,
    so that the profiler's own cost cancels.
    """
    (summary,) = part_rows(result, "capture", "synchronized", length)
    synchronized, rowwise = (step_spread(result, v, length)[0] for v in ("synchronized", "rowwise"))
    return synchronized * summary["predicted_us"] / summary["device_us"], rowwise


def checks(result: Result) -> Iterator[Check]:
    """Claims of the caption at the report's length, and the what-if at every length."""
    yield from capture_checks(result)
    yield host_loop_check(result)
    for length in captured_lengths(result):
        yield faster_check(result, length)
        yield what_if_check(result, length)


def capture_checks(result: Result) -> Iterator[Check]:
    """Claims of the caption about the captures at the report's length."""
    full = captured_lengths(result)[0]
    for variant in VARIANTS[:2]:
        blocks, capture = (part_rows(result, part, variant, full) for part in ("block", "capture"))
        yield from _lockstep_checks(variant, blocks, capture)
    gaps = [b["idle_us"] for b in part_rows(result, "block", "synchronized", full) if 1 <= b["block"] < 7]
    (exposed,) = part_rows(result, "capture", "synchronized", full)
    yield Check("synchronized: idle gaps recur in every routed block", min(gaps) > BLOCK_GAP_US,
              f"{min(gaps):.0f} to {max(gaps):.0f} us idle a block; "
              f"{exposed['forward_idle_us'] / exposed['forward_us']:.1%} of the forward")  # fmt: skip
    yield from _ahead_checks(
        part_rows(result, "block", "rowwise", full), part_rows(result, "capture", "rowwise", full)[0]
    )
    (covered,) = part_rows(result, "capture", "synchronized, wait covered", full)
    after = "idle_sync_rebuild_us"
    yield Check(
        "shared-expert work before the wait covers idle time without removing the wait",
        covered["forward_idle_us"] < exposed["forward_idle_us"] and covered["waits"] >= 7,
        f"forward idle {exposed['forward_idle_us'] / 1e3:.2f} to {covered['forward_idle_us'] / 1e3:.2f} ms, "
        f"after waits {exposed[after] / 1e3:.2f} to {covered[after] / 1e3:.2f} ms; {covered['waits']:.0f} waits",
    )


def host_loop_check(result: Result) -> Check:
    """The worst case: a wait for every expert's count."""
    full = captured_lengths(result)[0]
    (exposed,), (loop,) = (part_rows(result, "capture", v, full) for v in (VARIANTS[0], VARIANTS[2]))
    slowest = [step_spread(result, v, full)[0] for v in (VARIANTS[2], *VARIANTS[:2], VARIANTS[3])]
    return Check(
        "the host-loop grouped GEMM waits for every expert and is the slowest variant",
        loop["waits"] > 10 * exposed["waits"] and slowest[0] == max(slowest),
        f"{loop['waits']:.0f} waits a microbatch; {slowest[0]:.0f} ms a step",
    )


def faster_check(result: Result, length: int) -> Check:
    """Rowwise against synchronized step times, paired by process start."""
    medians = {v: step_spread(result, v, length) for v in ("synchronized", "rowwise")}
    text = "; ".join(f"{v} {m:.1f} ms ({a:.1f} to {b:.1f})" for v, (m, a, b) in medians.items())
    ratios = paired_ratios(result, length)
    starts = "every process start" if len(ratios) > 1 else "the one process start there is"
    return Check(
        f"{length} tokens a sequence: rowwise steps are faster in {starts}",
        min(ratios) > 1,
        f"{min(ratios):.2f} to {max(ratios):.2f} times; {text}",
    )


def _lockstep_checks(variant: str, blocks: list[dict[str, Any]], capture: list[dict[str, Any]]) -> Iterator[Check]:
    routed = [b for b in blocks if b["block"] >= 1]
    # The first routed block is submitted while the previous backward runs; its wait is what brings the two together.
    following = [b["ahead"] for b in routed if b["block"] >= 2]
    yield Check(
        f"{variant}: one host wait in every routed block's forward",
        all(b["waits"] == 1 for b in routed),
        f"{', '.join(str(int(b['waits'])) for b in routed)}; {capture[0]['wait_us'] / 1e3:.0f} ms waited",
    )
    yield Check(f"{variant}: from the first wait on, the CPU is at most one block ahead", max(following) <= 1,
                ", ".join(str(int(a)) for a in following))  # fmt: skip


def _ahead_checks(blocks: list[dict[str, Any]], capture: dict[str, Any]) -> Iterator[Check]:
    idle = capture["forward_idle_us"] / capture["forward_us"]
    yield Check("rowwise: no host wait in the whole microbatch", capture["waits"] == 0, f"{capture['waits']:.0f} waits")
    yield Check(
        "rowwise: the CPU has submitted the whole forward while the GPU still executes earlier work",
        capture["not_begun_at_submission"] == len(blocks),
        f"{capture['not_begun_at_submission']:.0f} of {len(blocks)} blocks not begun; submitted after "
        f"{capture['forward_submitted_us'] / 1e3:.0f} ms, the GPU begins at "
        f"{blocks[0]['device_start_us'] / 1e3:.0f} ms",
    )
    yield Check("rowwise: blocks run back to back", idle < BACK_TO_BACK,
                f"{idle:.2%} of the forward idle, longest interval {capture['longest_idle_us']:.1f} us")  # fmt: skip


def what_if_check(result: Result, length: int) -> Check:
    """Predicted against measured step time."""
    predicted, measured = what_if(result, length)
    ratio = predicted / measured
    holds = abs(ratio - 1) <= BAND
    known = ""
    submitted = [part_rows(result, "capture", v, length)[0]["launches"] for v in ("rowwise", "synchronized")]
    if ratio > 1 + BAND and submitted[0] < submitted[1]:
        known = (
            "at this size steps are bound by submission, of which the waits are a small part; rowwise submits less: "
            f"{submitted[0]:.0f} launches a microbatch against {submitted[1]:.0f}"
        )
    claim = f"{length} tokens a sequence: the synchronized trace without its waits predicts the rowwise step"
    value = f"predicted / measured {predicted:.1f} / {measured:.1f} ms = {ratio:.3f}"
    return Check(f"{claim} within {BAND:.0%}", holds, value, known)


def draw(result: Result) -> go.Figure:
    """Draw both captures: lanes, utilisation band and headroom, magnified strips of equal width, step times."""
    from workbench.core.colours import COLOURS, INK
    from workbench.views.plotting import draw_lanes, figure

    length = result.params.length if result.params.length in captured_lengths(result) else captured_lengths(result)[0]
    shown = [result.params.variant, "rowwise"]
    if not part_rows(result, "capture", shown[0], length):
        shown[0] = "synchronized"
    titles = []
    for v in shown:
        what = f"one microbatch of {result.params.sequences} x {length} tokens, ms from the host's start"
        titles += [f"{v}: {what}", "busy share and headroom"]
    (first,) = part_rows(result, "capture", shown[0], length)
    titles += [f"{v}: GPU kernels, {first['zoom_us'] / 1e3:.1f} ms of the forward" for v in shown]
    titles.append("step time without the profiler, all process starts")
    fig = figure("Two submission regimes", rows=7, height=1240, shared_xaxes=False, vertical_spacing=0.048,
                 row_heights=[0.22, 0.1, 0.22, 0.1, 0.07, 0.07, 0.16], subplot_titles=titles,
                 specs=[[{"secondary_y": i in (1, 3)}] for i in range(7)])  # fmt: skip
    seen: set[str] = set()
    for i, variant in enumerate(shown):
        boxes = _columns(part_rows(result, "lane", variant, length), 1e3)
        draw_lanes(fig, boxes, row=2 * i + 1, lanes=LANES, unit="ms", seen=seen)
        bins = part_rows(result, "band", variant, length)
        x = [(r["start_us"] + r["end_us"]) / 2e3 for r in bins]
        fig.add_scatter(x=x, y=[r["busy"] for r in bins], fill="tozeroy", mode="lines", name="GPU busy share",
                        line={"color": COLOURS["gpu_execute"], "width": 1}, showlegend=i == 0, row=2 * i + 2, col=1,
                        hovertemplate="%{x:.2f} ms: %{y:.1%} busy<extra></extra>")  # fmt: skip
        fig.add_scatter(x=x, y=[r["headroom_us"] / 1e3 for r in bins], mode="lines", name="headroom",
                        line={"color": COLOURS["headroom"], "width": 2}, showlegend=i == 0, row=2 * i + 2, col=1,
                        secondary_y=True, hovertemplate="%{x:.2f} ms: %{y:.2f} ms queued<extra></extra>")  # fmt: skip
        end = max(r["end_us"] for r in bins) / 1e3
        for row in (2 * i + 1, 2 * i + 2):
            fig.update_xaxes(range=[0, end], row=row, col=1)
        fig.update_yaxes(range=[0, 1.05], tickformat=".0%", row=2 * i + 2, col=1, secondary_y=False)
        peak = max(r["headroom_us"] for r in bins) / 1e3
        fig.update_yaxes(title="ms", showgrid=False, range=[0, 1.05 * peak], tickmode="array", tickvals=[0, peak],
                         ticktext=["0", f"{peak:.3g}"], row=2 * i + 2, col=1, secondary_y=True)  # fmt: skip
        (summary,) = part_rows(result, "capture", variant, length)
        start, width = summary["zoom_start_us"], first["zoom_us"]
        fig.add_vrect(x0=start / 1e3, x1=min((start + width) / 1e3, end), line_width=1, line_color=INK,
                      fillcolor="rgba(0,0,0,0)", **_at(2 * i + 1))  # fmt: skip
        strip = _columns(part_rows(result, "kernel", variant, length), 1e3, start)
        draw_lanes(fig, strip, row=5 + i, labels=False, unit="ms", seen=seen)
        fig.update_xaxes(range=[0, width / 1e3], row=5 + i, col=1)
    for variant in VARIANTS:
        values = [r["step_ms"] for r in part_rows(result, "step", variant, length)]
        fig.add_scatter(x=values, y=[variant] * len(values), mode="markers", showlegend=False, row=7, col=1,
                        marker={"color": INK, "size": 9, "symbol": "line-ns-open",
                                "line": {"width": 2}},
                        hovertemplate="%{y}: %{x:.1f} ms<extra></extra>")  # fmt: skip
    fig.update_yaxes(autorange="reversed", row=7, col=1)
    fig.update_xaxes(title="ms", row=7, col=1)
    # Titles of panels stand at their left, clear of the lanes' boxes.
    for annotation in fig.layout.annotations:  # pyright: ignore[reportAttributeAccessIssue]
        annotation.update(x=0, xanchor="left", font={"size": 13})
    fig.update_layout(legend={"y": -0.075, "yanchor": "top"}, margin={"t": 90})
    return fig


def _at(row: int) -> Any:
    return {"row": row, "col": 1}


def _columns(rows: list[dict[str, Any]], scale: float, origin: float = 0.0) -> dict[str, list[Any]]:
    return {
        "lane": [r["lane"] for r in rows],
        "label": [r["label"] or "" for r in rows],
        "kind": [r["kind"] for r in rows],
        "start": [(r["start_us"] - origin) / scale for r in rows],
        "end": [(r["end_us"] - origin) / scale for r in rows],
    }


def view(result: Result, variant: str | None = None) -> dict[str, Any]:
    """Return the arguments of `workbench.widgets.trace_view` for one capture of the table."""
    length = result.params.length if result.params.length in captured_lengths(result) else captured_lengths(result)[0]
    variant = variant or str(result.params.variant)
    rows = part_rows(result, "lane", variant, length)
    idle = sorted((r for r in rows if r["kind"] == "idle"), key=lambda r: r["start_us"] - r["end_us"])[:50]
    ns: Callable[[float], int] = lambda us: round(us * 1e3)  # noqa: E731
    bins = part_rows(result, "band", variant, length)
    points = [ns(b["start_us"]) for b in bins]
    level = [ns(b["headroom_us"]) for b in bins]
    return {
        "title": f"{variant}: one microbatch of {result.params.sequences} x {length} tokens",
        "badge": result.badge,
        "lanes": list(LANES),
        "events": {
            "lane": [LANES.index(r["lane"]) for r in rows],
            "start_ns": [ns(r["start_us"]) for r in rows],
            "end_ns": [ns(r["end_us"]) for r in rows],
            "kind": [r["kind"] for r in rows],
            "name": [r["label"] or "kernels" for r in rows],
        },
        "curves": [{"label": "headroom", "unit": "ns", "t_ns": points, "before": level, "after": level}],
        "table": {
            "title": "Longest idle intervals",
            "columns": ["at", "idle", "cause"],
            "rows": [[f"{r['start_us'] / 1e3:.2f} ms", f"{r['end_us'] - r['start_us']:.0f} us", r["label"][6:]]
                     for r in idle],
            "start_ns": [ns(r["start_us"]) for r in idle],
            "end_ns": [ns(r["end_us"]) for r in idle],
        },
        "caption": "F0 to F7 are forward blocks, B7 to B0 backward blocks; kernels closer than 3 us are one box, and "
        "so are launches closer than a 400th of the microbatch. Headroom is drawn through 240 samples.",
    }  # fmt: skip


EXPERIMENT = Experiment(
    slug="fig74_submission_regimes",
    group="appendix_b",
    title="Figures 74 and 75, measured: two submission regimes",
    claim="A host wait in every routed block keeps CPU and GPU in step; without it the CPU submits the microbatch "
    "early and the GPU runs block after block.",
    kind="measured",
    anchor="Appendix B.5, Figures 74 and 75; Section 8.4, Figure 34",
    params=RegimesParams,
    figure=draw,
    checks=checks,
    measure=measure,
    recorded=recorded_kinds("part"),
    tests=(
        "tests/experiments/test_fig74_submission_regimes.py",
        "tests/measure/test_capture.py",
        "tests/kernels/test_model.py",
        "tests/kernels/test_block.py",
        "tests/kernels/test_block_gpu.py",
    ),
    recording="2026-11-29_h200_464a777",
)
