"""The routed block and the development model's step: synchronized against rowwise over microbatch sizes, eager."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.core.params import Params, param
from workbench.measure.regimes import VARIANTS

if TYPE_CHECKING:
    import plotly.graph_objects as go

TICKS_MS = [digit * 10.0**power for power in range(-2, 5) for digit in (1, 1.5, 2, 3, 5, 7)]
"""Of a log axis that spans about a decade: plotly would write single digits between the powers of ten."""


@dataclass(frozen=True, kw_only=True)
class RoutedBlockParams(Params):
    """Parameters of the runs; widths are those of the development model."""

    num_experts: int = param(16, "experts on this GPU: one rank's share of 128 at EP8", min=8, max=128)
    layer_tokens: tuple[int, ...] = param((1024, 4096, 16384), "tokens per microbatch of the layer")
    step_tokens: tuple[int, ...] = param((2048, 16384), "tokens per microbatch of the model step, two sequences")
    rounds: int = param(4, "interleaved visits of each variant in each process", min=2, max=100)
    processes: int = param(3, "process starts over which times are repeated", min=1, max=20)
    grouped_gemm: str = param("triton", "grouped GEMM of the experts", choices=("triton", "torch"))


def measure(params: RoutedBlockParams, recorder: Any) -> list[dict[str, Any]]:
    """Time every variant over process starts; find its host waits, in this process, in a profile."""
    from workbench.measure.processes import in_new_process

    recorder.set(
        "protocol",
        timer="perf_counter_ns around back-to-back eager calls, device synchronised before and after; per call",
        warmup="2 calls of each variant and size in each process, then 1 per visit of the layer",
        repeats=f"layer {2 * params.rounds}, step {params.rounds} in each process",
        restarts=params.processes,
        order="variants interleaved: A B, then B A",
        l2="not flushed; a microbatch's rows exceed it",
        exclusions="none",
        synchronization="waits of one further call, judged in its profile by outcome: what returned only when "
        "device work had ended",
    )
    recorder.set("precision", parameter="bfloat16", activation="bfloat16", accumulation="float32",
                 optimizer="bfloat16 AdamW states, fused", communication="bfloat16")  # fmt: skip
    recorder.set("topology", nodes=1, gpus=1, dp=1, ep_mp=1, microbatch=1, accumulation=1)
    recorder.set("workload", experts=params.num_experts, top_k=8, shared_experts=1, capacity="capacity factor 1.25",
                 layers=8, seeds=[0], mixers="grouped-query attention")  # fmt: skip
    starts = [in_new_process(visit, params, timeout_s=150) for _ in range(params.processes - 1)] + [
        visit(params, count=True)
    ]
    for cells in zip(*starts, strict=True):
        _row(recorder, cells, [_of(start, cells[0]) for start in starts])
    return recorder.rows


def _of(cells: list[dict[str, Any]], like: dict[str, Any]) -> dict[str, Any]:
    """The synchronized path's cell of the same level, pass and size."""
    same = ("level", "pass", "tokens")
    return next(c for c in cells if c["path"] == "synchronized" and all(c[k] == like[k] for k in same))


def _row(recorder: Any, cells: Sequence[dict[str, Any]], synchronized: Sequence[dict[str, Any]]) -> None:
    """Record one variant at one size: times pooled over process starts, speedups paired within each start."""
    from workbench.measure.timing import percentile, summary

    last = cells[-1]
    for process, cell in enumerate(cells):
        name = "_".join(str(last[k]) for k in ("level", "pass", "path", "tokens"))
        recorder.samples(f"{name}_process_{process}".replace(" ", "_").replace(",", ""), cell["times_us"])
    medians = [percentile(c["times_us"], 0.5) for c in cells]
    speedups = [percentile(s["times_us"], 0.5) / m for s, m in zip(synchronized, medians)]
    recorder.row(
        level=last["level"], path=last["path"], tokens=last["tokens"], **{"pass": last["pass"]},
        **summary([t for c in cells for t in c["times_us"]]), starts=len(cells),
        start_p50_least_us=round(min(medians), 3), start_p50_greatest_us=round(max(medians), 3),
        speedup_p50=round(percentile(speedups, 0.5), 4), speedup_least=round(min(speedups), 4),
        waits=last["waits"], pageable_d2h=last["pageable_d2h"], launches=last["launches"],
    )  # fmt: skip


def visit(params: RoutedBlockParams, count: bool = False) -> list[dict[str, Any]]:
    """Return one dict per level, pass, path and size: `times_us`, and with `count` the waits and launches of a call."""
    import torch

    from workbench.measure.processes import join_as_single_rank

    join_as_single_rank()
    cells: list[dict[str, Any]] = []
    blocks = _blocks(params)
    for tokens in params.layer_tokens:
        for passes, calls in _layer_calls(blocks, tokens).items():
            cells += _cells(params, "layer", passes, tokens, calls, count)
    del blocks
    torch.cuda.empty_cache()
    steps = _steps(params)
    for tokens in params.step_tokens:
        cells += _cells(params, "step", "step", tokens, _step_calls(steps, tokens), count)
    return cells


def _cells(
    params: RoutedBlockParams, level: str, passes: str, tokens: int, calls: dict[str, Callable], count: bool
) -> list[dict[str, Any]]:
    from workbench.measure.capture import host_waits
    from workbench.measure.timing import interleaved, wall_us

    for call in calls.values():
        for _ in range(2):
            call()
    if level == "layer":
        options = {"repeats": 2, "warmup": 1, "batch": max(2, min(8, 16384 // tokens))}
    else:
        options = {"repeats": 1, "warmup": 0, "batch": 1}
    times = interleaved(calls, rounds=params.rounds, timer=lambda call: wall_us(call, **options))
    cells = []
    for name, call in calls.items():
        cell = {"level": level, "pass": passes, "path": name, "tokens": tokens, "times_us": times[name]}
        if count:
            cell |= host_waits(call, warmup=1).row()
        cells.append(cell)
    return cells


def _options(variant: dict[str, str], params: RoutedBlockParams) -> dict[str, Any]:
    from moe_kernels.transport import VirtualTransport

    options: dict[str, Any] = {
        "path": variant["path"],
        "grouped_gemm": variant.get("grouped_gemm", params.grouped_gemm),
    }
    if variant["path"] == "rowwise":
        options["transport"] = VirtualTransport(1, "cuda")
    return options


def _blocks(params: RoutedBlockParams) -> dict[str, Any]:
    import torch
    from moe_kernels.block import RoutedBlock
    from moe_kernels.model import development_config

    blocks = {}
    for name, variant in VARIANTS.items():
        config = development_config(params.num_experts, shared_mode=variant["shared_mode"]).block
        blocks[name] = RoutedBlock(config, device="cuda", dtype=torch.bfloat16, **_options(variant, params))
    return blocks


def _layer_calls(blocks: dict[str, Any], tokens: int) -> dict[str, dict[str, Callable]]:
    import torch

    x = torch.randn(tokens, 2560, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    d_out = torch.randn(tokens, 2560, device="cuda", dtype=torch.bfloat16)

    def forward(block: Any) -> None:
        with torch.no_grad():
            block(x)

    def both(block: Any) -> None:
        torch.autograd.grad(block(x), [x, *block.parameters()], d_out)

    return {
        "forward": {name: functools.partial(forward, block) for name, block in blocks.items()},
        "forward + backward": {name: functools.partial(both, block) for name, block in blocks.items()},
    }


def _steps(params: RoutedBlockParams) -> dict[str, Any]:
    import torch
    from moe_kernels.model import DevelopmentModel, TrainStep, development_config, make_optimizer

    steps = {}
    for name, variant in VARIANTS.items():
        config = development_config(params.num_experts, shared_mode=variant["shared_mode"])
        model = DevelopmentModel(config, device="cuda", dtype=torch.bfloat16, **_options(variant, params))
        steps[name] = TrainStep(model, make_optimizer(model))
    return steps


def _step_calls(steps: dict[str, Any], tokens: int) -> dict[str, Callable]:
    import torch

    shape = (2, tokens // 2)
    batch = [(torch.randint(0, 100352, shape, device="cuda"), torch.randint(0, 100352, shape, device="cuda"))]
    return {name: functools.partial(step, batch) for name, step in steps.items()}


def checks(result: Result) -> Iterator[Check]:
    """Waits are exact claims; times are claims about the sizes that were measured."""
    import polars as pl

    table = result.table
    routed = {"forward": 1, "forward + backward": 1, "step": 7}
    sync = table.filter(pl.col("path").is_in(["synchronized", "synchronized, wait covered"]))
    row = table.filter(pl.col("path") == "rowwise")
    yield Check("the synchronized path waits exactly once per routed-block forward",
                all(r["waits"] == routed[r["pass"]] for r in sync.iter_rows(named=True)),
                ", ".join(sorted({f"{r['pass']}: {r['waits']}" for r in sync.iter_rows(named=True)})))  # fmt: skip
    yield Check("the rowwise path contains no host wait and no blocking copy: forward, backward and optimizer",
                int(row["waits"].sum()) == 0 and int(row["pageable_d2h"].sum()) == 0,
                f"{int(row['waits'].sum())} waits in {row.height} rows")  # fmt: skip
    for level in ("layer", "step"):
        passes = "step" if level == "step" else "forward + backward"
        part = row.filter((pl.col("level") == level) & (pl.col("pass") == passes)).sort("tokens")
        # A table without the column is an earlier recording, of one process: it has no pairs to compare.
        if part.height and "speedup_least" in table.columns:
            shown = ", ".join(
                f"{r['tokens']}: {r['speedup_p50']:.2f}x (least {r['speedup_least']:.2f})"
                for r in part.iter_rows(named=True)
            )
            yield Check(f"rowwise is faster than synchronized at every size and in every process start ({level})",
                        min(part["speedup_least"].to_list()) > 1, shown)  # fmt: skip


def draw(result: Result) -> go.Figure:
    """Draw time per call over tokens for the layer and the model step: pooled median, p20 to p80 as bars."""
    from workbench.core.colours import SERIES
    from workbench.views.plotting import figure, spread

    panels = [("layer", "forward + backward", "routed block, forward + backward"), ("step", "step", "model step")]
    titles = [panel[2] for panel in panels]
    fig = figure("Synchronized against rowwise, eager", height=430, cols=2, shared_xaxes=False, subplot_titles=titles)
    table = result.table.to_dicts()
    for column, (level, passes, _) in enumerate(panels, start=1):
        for path, colour in zip(VARIANTS, (SERIES[0], SERIES[1], SERIES[3], SERIES[2])):
            rows = sorted(
                (r for r in table if (r["level"], r["pass"], r["path"]) == (level, passes, path)),
                key=lambda r: r["tokens"],
            )
            fig.add_scatter(
                x=[r["tokens"] for r in rows], y=[r["time_us_p50"] / 1e3 for r in rows], mode="lines+markers",
                error_y=spread(rows, "time_us", 1e3),
                name=path, legendgroup=path, showlegend=column == 1, line={"color": colour},
                customdata=[(r["waits"], r["launches"], r.get("starts", 1), r.get("speedup_p50")) for r in rows],
                hovertemplate="%{x} tokens: %{y:.2f} ms over %{customdata[2]} process starts<br>"
                "%{customdata[3]:.2f} of the synchronized path's speed<br>"
                "%{customdata[0]} host waits, %{customdata[1]} launches",
                row=1, col=column,
            )  # fmt: skip
        sizes = sorted({r["tokens"] for r in table if r["level"] == level})
        fig.update_xaxes(
            type="log", title="tokens per microbatch", tickvals=sizes, tickformat="d", minor={}, row=1, col=column
        )
        fig.update_yaxes(type="log", title="time per call (ms)", tickvals=TICKS_MS, minor={}, row=1, col=column)
    # Above the panels, where the template puts it, the legend would cover their titles.
    fig.update_layout(legend={"orientation": "h", "x": 0, "y": -0.3, "yanchor": "top"}, margin={"b": 110})
    return fig


EXPERIMENT = Experiment(
    slug="op_routed_block",
    group="s08_sync_free",
    title="Routed block and model step: synchronized against rowwise",
    claim="Keeping counts on the device removes every host wait of the routed path; the step is faster for it.",
    kind="measured",
    anchor="Sections 8.4, 8.5, Table 14",
    params=RoutedBlockParams,
    figure=draw,
    checks=checks,
    measure=measure,
    tests=(
        "tests/experiments/test_op_routed_block.py",
        "tests/kernels/test_model.py",
        "tests/kernels/test_block.py",
        "tests/kernels/test_block_gpu.py",
    ),
    recording="2026-12-01_h200_efd5b84",
)
