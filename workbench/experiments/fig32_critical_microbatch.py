"""Figure 32 and Equation 12: the microbatch at which device time meets submission time, drawn and measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.core.params import Params, param
from workbench.views.crossover import (
    FASTER,
    IDLE,
    crossover_checks,
    curves,
    draw_crossovers,
    idle_us,
    recorded,
    said,
    unit,
)

if TYPE_CHECKING:
    import plotly.graph_objects as go

ROUNDS = 3
LARGE = 16384
"""Tokens above which fewer calls are timed: their times are tens of milliseconds."""
ROUTED = ("routed, rowwise", "routed, synchronized")
COMPILED = ("dense", "routed, rowwise")
"""Layers that torch.compile is tried on. The synchronized layer reads a value in its middle."""


@dataclass(frozen=True, kw_only=True)
class CriticalMicrobatchParams(Params):
    """Sizes of the measurement, and what-ifs on top of either source."""

    tokens: tuple[int, ...] = param(
        (256, 512, 1024, 2048, 4096, 8192, 16384, 32768), "microbatch sizes", unit="tokens", min=64, max=131072
    )
    compiled_tokens: tuple[int, ...] = param(
        (1024, 2048, 4096, 8192), "sizes of the compiled layers; none skips them", unit="tokens", min=64
    )
    experts: int = param(16, "routed experts on this GPU: one rank's share of 128 at EP8", min=8, max=128)
    repeats: int = param(12, "timed calls of each region, over all rounds", min=6, max=200)
    device_speed: float = param(1.0, "device faster by", min=0.25, max=8.0, step=0.05, log=True, analysis=True)
    host_cost: float = param(1.0, "submission time scaled by", min=0.1, max=4.0, step=0.05, log=True, analysis=True)
    activation_scale: float = param(
        1.0, "activation bytes per token scaled by", min=0.1, max=4.0, step=0.05, log=True, analysis=True
    )
    memory_scale: float = param(1.0, "GPU memory scaled by", min=0.25, max=4.0, step=0.05, log=True, analysis=True)
    replay: bool = param(True, "draw CUDA graph replay", analysis=True)


def model(params: CriticalMicrobatchParams) -> list[dict[str, Any]]:
    """Rows of the schematic: three devices and two ways to submit, no measured value."""
    import numpy as np

    from workbench.models.crossover import SUBMIT_EAGER, SUBMIT_REPLAY, schematic

    rows = []
    for curve in schematic(
        device_speed=params.device_speed, activation_scale=params.activation_scale, memory_scale=params.memory_scale
    ):
        for i in range(33):
            x = max(0.02, curve.limit * i / 32)
            rows.append(_schematic_row("device", curve.name, x, float(curve.time(np.asarray(x))), curve.limit))
    for name, cost in (("eager", SUBMIT_EAGER), ("replay", SUBMIT_REPLAY)):
        for x in (0.02, 16.0):
            rows.append(_schematic_row("submit", name, x, cost * params.host_cost, None))
    return rows


def _schematic_row(kind: str, name: str, x: float, time: float, limit: float | None) -> dict[str, Any]:
    return {"kind": kind, "layer": name, "passes": "schematic", "microbatch": x, "time": time, "limit": limit}


def measure(params: CriticalMicrobatchParams, recorder: Any) -> None:
    """Measure submission and device time of every layer, pass and size on this GPU.

    An interrupt while a layer is being compiled keeps what was measured before.
    """
    import torch

    from workbench.measure.blocks import LAYERS, PASSES, Layers
    from workbench.measure.critical import SizeSweep
    from workbench.measure.processes import ProcessCrashedError, in_new_process
    from workbench.measure.regions import spin_cycles_per_us

    sweep = SizeSweep(spin_cycles_per_us())
    _protocol(recorder, params.repeats, sweep.per_us)
    recorder.set("precision", parameter="bfloat16", activation="bfloat16", accumulation="float32")
    recorder.set("topology", nodes=1, gpus=1, ep_mp=1)
    recorder.set("workload", experts=params.experts, top_k=8, shared_experts=1, capacity="capacity factor 1.25",
                 layers=1, seeds=[0], sequence_tokens=8192, router="learned, untrained",
                 memory_bytes=torch.cuda.get_device_properties(0).total_memory)  # fmt: skip
    # Learned routes are those of the input: a compiled layer can be held against the eager one.
    layers = Layers(params.experts, None, router_mode="learned")
    started = time.monotonic()
    for turn in range(ROUNDS):
        for tokens in params.tokens:
            for layer in LAYERS:
                for passes in PASSES:
                    _measure_one(params, sweep, layers, tokens, layer, passes)
            torch.cuda.empty_cache()
        print(f"round {turn + 1} of {ROUNDS}: {time.monotonic() - started:.0f} s", flush=True)
    compiled: dict[str, str] = {}
    try:
        for layer in COMPILED if params.compiled_tokens else ():
            try:
                compiled[layer], found = in_new_process(_measure_compiled, params, layer, sweep.per_us)
                sweep.extend(found)
            except ProcessCrashedError as error:
                compiled[layer] = f"refused: {error}"
            print(f"{layer}, compiled: {compiled[layer]}, {time.monotonic() - started:.0f} s", flush=True)
    except KeyboardInterrupt:
        compiled["interrupted"] = "while compiling; the rows before it are kept"
    recorder.set("protocol", compile=compiled or "not asked for")
    sweep.write(recorder)


def _protocol(recorder: Any, repeats: int, per_us: float) -> None:
    recorder.set(
        "protocol",
        timer="submission: perf_counter_ns behind a spin kernel, the host wait of the synchronized path left out; "
        "device: CUDA events around the queued region; wall: perf_counter_ns over back-to-back calls",
        warmup="3 calls of each region and size, 1 in later rounds",
        repeats=repeats,
        rounds=ROUNDS,
        order="sizes ascending, layers in turn at each size, all of it once a round; replay in one round; compiled "
        "layers afterwards in as many rounds, each in a process of its own, beside as many more of the eager ones",
        l2="warm for small sizes: inputs of one region are reused",
        spin_cycles_per_us=per_us,
        idle="torch.profiler, device activities only, back-to-back calls of which the first 2 are left out",
    )


def _measure_one(params: Any, sweep: Any, layers: Any, tokens: int, layer: str, passes: str) -> None:
    from workbench.measure.blocks import activation_bytes
    from workbench.measure.critical import Key
    from workbench.measure.timing import captured_graph

    key, region, large = Key(layer, passes, "eager", tokens), layers.region(layer, passes, tokens), tokens > LARGE
    first = key not in sweep.notes
    repeats = max(2, params.repeats // ROUNDS // (2 if large else 1))
    sweep.add(key, region.submit_call, repeats)
    if not first:
        return
    sweep.add_idle(key, region.call, batch=2 if large else 4, calls=4 if large else 8)
    waits = layer == "routed, synchronized"
    sweep.note(key, activation_bytes=activation_bytes(region), waits=waits)
    # The host reads a value inside the synchronized layer, which a capture refuses.
    if not waits:
        graph = captured_graph([region.call], warmup=1)
        sweep.add(Key(layer, passes, "replay", tokens), graph.replay, max(4, params.repeats // ROUNDS))


def _measure_compiled(params: Any, layer: str, per_us: float) -> tuple[str, Any]:
    """Measure a compiled layer beside more rounds of the eager one; return what compiling it did, and the sweep.

    A refusal is a result and no failure.
    """
    import torch

    from workbench.measure.blocks import PASSES, Layers
    from workbench.measure.critical import Key, SizeSweep
    from workbench.measure.unstable import compile_counters

    counters = compile_counters()
    sweep, layers = SizeSweep(per_us), Layers(params.experts, None, router_mode="learned")
    counters.clear()
    module = torch.compile(layers.layers[layer], dynamic=True)
    each = max(2, params.repeats // ROUNDS)
    rows = []
    try:
        for turn in range(ROUNDS):
            for tokens in params.compiled_tokens:
                for passes in PASSES:
                    torch.manual_seed(tokens)
                    eager = layers.region(layer, passes, tokens)
                    torch.manual_seed(tokens)
                    region = layers.region(layer, passes, tokens, layer=module)
                    if turn == 0 and passes == "forward":
                        _same_output(eager, region)
                    if tokens in params.tokens and tokens <= LARGE:
                        sweep.add(Key(layer, passes, "eager", tokens), eager.submit_call, each)
                    key = Key(layer, passes, "compiled", tokens)
                    sweep.add(key, region.submit_call, each)
                    if turn == 0:
                        rows.append(key)
                        sweep.add_idle(key, region.call, batch=4)
    except Exception as error:  # the compiler refuses in many ways
        return f"refused: {type(error).__name__}: {str(error).strip().splitlines()[0][:200]}", sweep
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    for key in rows:
        sweep.note(key, graphs=graphs, graph_breaks=breaks)
    reasons = sorted({reason.strip().splitlines()[0][:100] for reason in counters["graph_break"]})
    told = f"{graphs} graphs over all sizes, {breaks} graph breaks" + (f": {'; '.join(reasons)}" if reasons else "")
    return told, sweep


def _same_output(eager: Any, compiled: Any) -> None:
    """Raise where a compiled forward differs from the eager one of equal input by more than BF16 fusion explains."""
    a, b = (region.call().detach().float() for region in (eager, compiled))
    error = float((a - b).norm() / a.norm())
    if not error < 0.03:
        raise ArithmeticError(f"compiled output differs from eager output by {error:.3g} of its norm")


def checks(result: Result) -> Iterator[Check]:
    """Claims of the caption and of Section 8.3."""
    if "mode" not in result.table.columns:
        yield from _schematic_checks(result)
        return
    found = {(c["layer"], c["passes"]): c for c in curves(result) if c["mode"] == "eager"}
    yield from crossover_checks(result)
    for (layer, passes), c in found.items():
        dense = found.get(("dense", passes))
        if layer in ROUTED and dense:
            yield Check(f"{layer}, {passes}: routing adds submission work to the dense layer's",
                        c["submit"][0] > dense["submit"][0],
                        f"{c['submit'][0]:.0f} against {dense['submit'][0]:.0f} us")  # fmt: skip


def crossovers(result: Result) -> list[dict[str, Any]]:
    """One row per layer, passes and mode: crossover with its interval, where idle time begins, where memory ends."""
    out = []
    for c in curves(result):
        steady = idle_us(c, c["rows"][-1])
        out.append({
            "layer": c["layer"], "passes": c["passes"], "mode": c["mode"], "crossover": said(c["critical"], c),
            "from": said(c["low"], c), "to": said(c["high"], c),
            f"idle > {IDLE:.0%} below": "" if c["idle"] is None else said(c["idle"], c),
            "us idle per call at the largest": "" if steady is None else f"{steady:,.0f}",
            f"{unit(result)} that fill the memory": "" if c["limit"] is None else f"{c['limit']:,.0f}",
        })  # fmt: skip
    return out


def _schematic_checks(result: Result) -> Iterator[Check]:
    from workbench.models.crossover import SUBMIT_EAGER, SUBMIT_REPLAY, schematic

    p = result.params
    submit, replayed = SUBMIT_EAGER * p.host_cost, SUBMIT_REPLAY * p.host_cost
    scales = {"activation_scale": p.activation_scale, "memory_scale": p.memory_scale}
    now = schematic(device_speed=p.device_speed, **scales)
    faster = schematic(device_speed=p.device_speed * FASTER, **scales)
    critical = [c.critical(submit) for c in now]
    text = ", ".join(f"{c.name} {x:.2f}" for c, x in zip(now, critical))
    limits = ", ".join(f"{c.name} {c.limit:.1f}" for c in now)
    moved = [c.critical(submit) for c in faster]
    replay = [c.critical(replayed) for c in now]
    yield Check("a faster GPU needs a larger microbatch: H100, B200, B300 in this order",
                critical[0] < critical[1] < critical[2], text)  # fmt: skip
    yield Check(f"a {FASTER:g} times faster device moves every crossover right",
                all(b > a for a, b in zip(critical, moved)), ", ".join(f"{x:.2f}" for x in moved))  # fmt: skip
    yield Check("cheaper submission (graph replay) moves every crossover left",
                all(b < a for a, b in zip(critical, replay)), ", ".join(f"{x:.2f}" for x in replay))  # fmt: skip
    yield Check("more memory extends the range of microbatches", now[0].limit < now[1].limit < now[2].limit, limits)


def draw(result: Result) -> go.Figure:
    """Draw device and submission time over the microbatch, the crossovers and where memory ends."""
    return draw_crossovers(result) if "mode" in result.table.columns else _draw_schematic(result)


def _draw_schematic(result: Result) -> go.Figure:
    import polars as pl

    from workbench.core.colours import COLOURS, SERIES
    from workbench.models.crossover import SUBMIT_EAGER, schematic
    from workbench.views.plotting import figure

    p, table = result.params, result.table
    fig = figure("Schematic: where does each GPU stop running dry?", height=540)
    devices = table.filter(pl.col("kind") == "device")
    hues = (SERIES[4], SERIES[3], SERIES[2])
    for colour, name in zip(hues, devices["layer"].unique(maintain_order=True)):
        part = devices.filter(pl.col("layer") == name)
        fig.add_scatter(x=part["microbatch"], y=part["time"], mode="lines", name=f"{name} execution",
                        line={"color": colour, "width": 3})  # fmt: skip
        fig.add_scatter(x=part["microbatch"][-1:], y=part["time"][-1:], mode="markers+text", showlegend=False,
                        text=[f"{name} memory"], textposition="top center", cliponaxis=False,
                        marker={"color": colour, "symbol": "line-ns-open", "size": 14})  # fmt: skip
    for name, dash, shown in (("eager", "solid", True), ("replay", "dash", p.replay)):
        part = table.filter((pl.col("kind") == "submit") & (pl.col("layer") == name))
        if shown:
            fig.add_scatter(x=part["microbatch"], y=part["time"], mode="lines", name=f"CPU submission, {name}",
                            line={"color": COLOURS["cpu_submit"], "dash": dash, "width": 2})  # fmt: skip
    scales = {"activation_scale": p.activation_scale, "memory_scale": p.memory_scale}
    cost = SUBMIT_EAGER * p.host_cost
    for colour, curve in zip(hues, schematic(device_speed=p.device_speed, **scales)):
        at = curve.critical(cost)
        reached = at <= curve.limit
        beyond = "" if reached else ", beyond its memory"
        fig.add_scatter(x=[at], y=[cost], mode="markers", showlegend=False,
                        marker={"color": colour, "size": 11, "symbol": "circle" if reached else "circle-open",
                                "line": {"width": 2, "color": colour}},
                        hovertemplate=f"{curve.name}: critical microbatch %{{x:.2f}}{beyond}<extra></extra>"
                        )  # fmt: skip
    fig.update_layout(legend={"yref": "container", "y": 0.005, "yanchor": "bottom"}, margin={"t": 80, "b": 140})
    fig.update_xaxes(title="microbatch size (figure units)", range=[0, 16])
    fig.update_yaxes(title="time per microbatch (figure units)", rangemode="tozero")
    return fig


def critical_microbatch(
    prepare: Callable[[int], Callable[[], Any]] | Mapping[str, Callable[[int], Callable[[], Any]]],
    sizes: Sequence[int] = (256, 512, 1024, 2048, 4096, 8192),
    *,
    unit: str = "tokens",
    repeats: int = 12,
    replay: bool = False,
) -> Result:
    """Measure where your own region's device time meets its submission time: below that size your GPU runs dry.

    Args:
        prepare: size -> a callable without arguments that runs the region at that size, its inputs made beforehand;
            or several of them by name, drawn side by side.
        sizes: at least two sizes, ascending.
        unit: what the sizes count.
        repeats: timed calls of each region and size, over three rounds.
        replay: also capture each region as a CUDA graph and measure its replay.
    Returns:
        A live `Result`: `.figure()`, `.checks`, `.table`, and the sliders of `workbench.widgets.explore`.
    Raises:
        ValueError: sizes or repeats.
        TypeError: `prepare` is no function, or returns no callable.
        RuntimeError: no GPU.

    Source: report, Section 8.3, Equation 12.
    """
    from workbench.measure.capture import require_gpu

    asked = list(sizes) if isinstance(sizes, Iterable) else [sizes]
    if len(asked) < 2 or any(type(n) is not int or n < 1 for n in asked) or sorted(set(asked)) != asked:
        raise ValueError(f"sizes: expected at least two whole numbers from 1, ascending, got {asked}")
    if type(repeats) is not int or repeats < 2 * ROUNDS:
        raise ValueError(f"repeats: expected a whole number of at least {2 * ROUNDS}, got {repeats!r}")
    named = dict(prepare) if isinstance(prepare, Mapping) else {"your layer": prepare}
    wrong = [f"{type(make).__name__} for {name!r}" for name, make in named.items() if not callable(make)]
    if wrong or not named or not all(isinstance(name, str) for name in named):
        raise TypeError("prepare: expected a function of the size, or a mapping of names to such functions, got "
                        + (", ".join(wrong) or f"{prepare!r}"))  # fmt: skip
    require_gpu("critical_microbatch")
    import torch

    from workbench.core.record import Recorder
    from workbench.measure.critical import Key, SizeSweep
    from workbench.measure.regions import spin_cycles_per_us
    from workbench.measure.timing import captured_graph

    sweep = SizeSweep(spin_cycles_per_us())
    for turn in range(ROUNDS):
        for size in asked:
            for name, make in named.items():
                call = make(size)
                if not callable(call):
                    raise TypeError(f"{name} at size {size}: expected a callable without arguments, such as "
                                    f"lambda: layer(x), got {type(call).__name__}")  # fmt: skip
                key = Key(name, "", "eager", size)
                sweep.add(key, call, repeats // ROUNDS)
                if turn == 0:
                    sweep.add_idle(key, call, batch=4)
                    sweep.note(key, waits=False)
                if turn == 0 and replay:
                    graph = captured_graph([call], warmup=1)
                    sweep.add(Key(name, "", "replay", size), graph.replay, repeats // ROUNDS)
    params = CriticalMicrobatchParams(replay=replay)
    recorder = Recorder(EXPERIMENT.slug, {})
    _protocol(recorder, repeats, sweep.per_us)
    recorder.set("workload", size_unit=unit, memory_bytes=torch.cuda.get_device_properties(0).total_memory)
    sweep.write(recorder)
    return EXPERIMENT.result(params, "live", recorder.tables, recorder.live())


EXPERIMENT = Experiment(
    slug="fig32_critical_microbatch",
    group="s08_sync_free",
    title="Critical microbatch: where device time meets submission time",
    claim="Below the crossover the GPU runs dry; a faster device moves it right, cheaper submission left.",
    kind="measured",
    anchor="Section 8.3, Equation 12 and Figure 32",
    params=CriticalMicrobatchParams,
    figure=draw,
    checks=checks,
    model=model,
    measure=measure,
    recorded=recorded,
    tests=(
        "tests/measure/test_timing.py",
        "tests/experiments/test_fig32_critical_microbatch.py",
        "tests/kernels/test_block.py",
        "tests/kernels/test_block_gpu.py",
    ),
    recording="2026-11-29_h200_1fd2a4e",
)
