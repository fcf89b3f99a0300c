"""Figure 32 and Equation 12: the microbatch at which device time meets submission time, drawn and measured."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.experiment import Check, Experiment, Params, Result, param

if TYPE_CHECKING:
    import plotly.graph_objects as go

IDLE = 0.05
"""Idle share from which a device counts as running dry; below it are launch turnaround and the profiler's grain."""
SHORTER = 10.0
LARGE = 16384
"""Tokens above which fewer calls are timed: their times are tens of milliseconds."""
FASTER = 2.0
"""Device speed of the claim that a faster device moves the crossover right."""
ROUTED = ("routed, rowwise", "routed, synchronized")


@dataclass(frozen=True, kw_only=True)
class CriticalMicrobatchParams(Params):
    """Sizes of the measurement, and what-ifs on top of either source."""

    tokens: tuple[int, ...] = param(
        (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536), "microbatch sizes", unit="tokens", min=64, max=131072
    )
    compiled_tokens: tuple[int, ...] = param((1024, 4096), "sizes of the compiled dense layer", unit="tokens", min=64)
    experts: int = param(16, "routed experts on this GPU: one rank's share of 128 at EP8", min=8, max=128)
    repeats: int = param(12, "timed calls of each region", min=5, max=200)
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


def measure(params: CriticalMicrobatchParams, recorder: Any) -> list[dict[str, Any]]:
    """Measure submission and device time of every layer, pass and size on this GPU."""
    import torch

    from workbench.measure.blocks import LAYERS, PASSES, Layers
    from workbench.measure.regions import spin_cycles_per_us

    per_us = spin_cycles_per_us()
    recorder.set(
        "protocol",
        timer="submission: perf_counter_ns behind a spin kernel, the host wait of the synchronized path left out; "
        "device: CUDA events around the queued region; wall: perf_counter_ns over back-to-back calls",
        warmup="3 calls of each region and size",
        repeats=params.repeats,
        order="sizes ascending, layers in turn at each size",
        l2="warm for small sizes: inputs of one region are reused",
        spin_cycles_per_us=per_us,
        idle="torch.profiler, device activities only, 8 back-to-back calls of which the first 2 are left out",
    )
    recorder.set("precision", parameter="bfloat16", activation="bfloat16", accumulation="float32")
    recorder.set("topology", nodes=1, gpus=1, ep_mp=1)
    recorder.set("workload", experts=params.experts, top_k=8, shared_experts=1, capacity="capacity factor 1.25",
                 layers=1, seeds=[0], sequence_tokens=8192,
                 memory_bytes=torch.cuda.get_device_properties(0).total_memory)  # fmt: skip
    layers = Layers(params.experts, None)
    for tokens in params.tokens:
        for layer in LAYERS:
            for passes in PASSES:
                _measure_one(params, recorder, layers, per_us, tokens, layer, passes)
        torch.cuda.empty_cache()
    module = torch.compile(layers.layers["dense"], dynamic=True)
    for passes in PASSES:
        for tokens in params.compiled_tokens:
            _measure_mode(params, recorder, per_us, tokens, "dense", passes, "compiled",
                          layers.region("dense", passes, tokens, layer=module))  # fmt: skip
    return recorder.rows


def _measure_one(params, recorder, layers, per_us: float, tokens: int, layer: str, passes: str) -> None:
    from workbench.measure.blocks import activation_bytes
    from workbench.measure.timing import capture

    region = layers.region(layer, passes, tokens)
    _measure_mode(params, recorder, per_us, tokens, layer, passes, "eager", region)
    recorder.rows[-1]["activation_bytes"] = activation_bytes(region)
    # The host reads a value inside the synchronized layer, which a capture refuses. A replay's submission hardly
    # changes with the size, so that large ones only cost time.
    if layer == "routed, synchronized" or tokens > LARGE:
        return
    graph = capture([region.call], warmup=1)
    _measure_mode(params, recorder, per_us, tokens, layer, passes, "replay", None, graph.replay)


def _measure_mode(params, recorder, per_us, tokens, layer, passes, mode, region, call=None) -> None:
    from workbench.measure.blocks import idle_share
    from workbench.measure.regions import measure_region
    from workbench.measure.timing import percentile, wall_us

    call = call or region.call
    submit_call = region.submit_call if region else call
    repeats = params.repeats if tokens <= LARGE else max(5, params.repeats // 2)
    measured = measure_region(submit_call, repeats=repeats, per_us=per_us, count=mode != "replay")
    row: dict[str, Any] = {"kind": "measured", "layer": layer, "passes": passes, "mode": mode, "tokens": tokens}
    for name, values in (("submit", measured.submit_us), ("device", measured.device_us)):
        recorder.samples(f"{layer} {passes} {mode} {tokens} {name}_us", values)
        row |= {f"{name}_us_p{q}": round(percentile(values, q / 100), 3) for q in (20, 50, 80)}
        row[f"{name}_us"] = json.dumps([round(v, 2) for v in values])
    row |= {"launches": measured.launches, "host_held_up": measured.waited}
    if mode == "eager":
        walls = wall_us(call, repeats=3, warmup=1, batch=6 if tokens <= LARGE else 2)
        row |= {"wall_us_p50": round(percentile(walls, 0.5), 3), "idle_share": round(idle_share(call), 5)}
    recorder.row(**row)


def curves(result: Result) -> list[dict[str, Any]]:
    """Per layer, pass and mode of a measured table: sizes, scaled medians, and the crossover with its interval."""
    import numpy as np
    import polars as pl

    from workbench.models.crossover import largest_microbatch
    from workbench.models.regression import crossing_interval

    p = result.params
    table = result.table.filter(pl.col("kind") == "measured")
    out = []
    for (layer, passes, mode), part in table.group_by(["layer", "passes", "mode"], maintain_order=True):
        rows = sorted(part.to_dicts(), key=lambda r: r["tokens"])
        device = [np.array(json.loads(r["device_us"])) / p.device_speed for r in rows]
        submit = [np.array(json.loads(r["submit_us"])) * p.host_cost for r in rows]
        x = np.array([r["tokens"] for r in rows], dtype=float)
        at, low, high = crossing_interval(x, device, submit, draws=300)
        top = rows[-1].get("activation_bytes")
        memory = _memory_bytes(result) * p.memory_scale
        limit = None
        if top and memory:
            limit = largest_microbatch(memory, top / rows[-1]["tokens"] * p.activation_scale)
        out.append({
            "layer": layer, "passes": passes, "mode": mode, "tokens": x, "rows": rows, "limit": limit,
            "device": np.array([np.median(d) for d in device]), "submit": np.array([np.median(s) for s in submit]),
            "device_samples": device, "submit_samples": submit, "critical": at, "low": low, "high": high,
        })  # fmt: skip
    return out


def _memory_bytes(result: Result) -> float:
    if result.recording is None:
        return 0.0
    return float(result.recording.record.get("workload", {}).get("memory_bytes") or 0.0)


def idle_begins(tokens: Any, share: Any, threshold: float = IDLE) -> float:
    """Return the size, interpolated in log tokens, below which the idle share exceeds `threshold`.

    The largest such size counts; the first size where no share exceeds it, infinity where the last one does.
    """
    import numpy as np

    above = np.flatnonzero(np.asarray(share) > threshold)
    if not above.size:
        return float(tokens[0])
    j = int(above[-1])
    if j == len(tokens) - 1:
        return float("inf")
    part = (share[j] - threshold) / (share[j] - share[j + 1])
    return float(tokens[j] * (tokens[j + 1] / tokens[j]) ** part)


def checks(result: Result) -> list[Check]:
    """Claims of the caption and of Section 8.3."""
    if "mode" not in result.table.columns:
        return _schematic_checks(result)
    from workbench.models.regression import crossing

    found = {(c["layer"], c["passes"], c["mode"]): c for c in curves(result)}
    eager = [c for c in found.values() if c["mode"] == "eager"]
    out = []
    for c in eager:
        name = f"{c['layer']} layer, {c['passes']}"
        faster = crossing(c["tokens"], c["device"] / FASTER, c["submit"])
        inside = c["critical"] > c["tokens"][0]
        out.append(
            Check(
                f"{name}: a {FASTER:g} times faster device moves the crossover right",
                faster > c["critical"] if faster > c["tokens"][0] else None,
                f"{_tokens(c['critical'], c)} ({_tokens(c['low'], c)} to {_tokens(c['high'], c)}) "
                f"to {_tokens(faster, c)} tokens",
            )
        )
        replay = found.get((c["layer"], c["passes"], "replay"))
        if replay:
            out.append(
                Check(
                    f"{name}: cheaper submission (graph replay) moves the crossover left",
                    replay["critical"] < c["critical"] if inside else None,
                    f"{_tokens(c['critical'], c)} to {_tokens(replay['critical'], replay)} tokens",
                )
            )
        out.append(_idle_check(name, c))
    for passes in ("forward", "forward + backward"):
        dense = found.get(("dense", passes, "eager"))
        for layer in ROUTED:
            c = found.get((layer, passes, "eager"))
            if dense and c:
                ratio = float(c["submit"][0] / dense["submit"][0])
                out.append(
                    Check(f"{layer} {passes}: routing adds submission work to the dense layer's", ratio > 1,
                          f"{c['submit'][0]:.0f} against {dense['submit'][0]:.0f} us")
                )  # fmt: skip
    flat = [float(c["submit"].max() / c["submit"].min()) for c in eager]
    grows = [float(c["device"][-1] / c["device"][0]) for c in eager]
    out.append(
        Check(
            f"shrinking the microbatch shortens device time at least {SHORTER:g} times as much as submission time",
            min(grows) / max(flat) > SHORTER,
            f"over {eager[0]['tokens'][-1] / eager[0]['tokens'][0]:.0f} times the tokens: submission at most "
            f"{max(flat):.2f}x, device at least {min(grows):.0f}x",
        )
    )
    return out


def _idle_check(name: str, c: dict[str, Any]) -> Check:
    share = [r["idle_share"] for r in c["rows"]]
    begins = idle_begins(c["tokens"], share)
    waits = c["layer"] == "routed, synchronized"
    claim = f"{name}: the device runs dry below the crossover and not above, within one doubling"
    value = f"idle above {IDLE:.0%} below {_tokens(begins, c)} tokens; crossover {_tokens(c['critical'], c)}"
    holds = bool(c["critical"] / 2 <= begins <= c["critical"] * 2)
    known = ""
    if not holds and waits:
        known = "the host wait in every call lets the device run dry far above the crossover of plain submission"
    return Check(claim, holds, value, known)


def _tokens(value: float, c: dict[str, Any]) -> str:
    if value <= c["tokens"][0]:
        return f"at most {c['tokens'][0]:.0f}"
    return f"beyond {c['tokens'][-1]:.0f}" if value > c["tokens"][-1] else f"{value:.0f}"


def _schematic_checks(result: Result) -> list[Check]:
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
    return [
        Check("a faster GPU needs a larger microbatch: H100, B200, B300 in this order",
              critical[0] < critical[1] < critical[2], text),
        Check(f"a {FASTER:g} times faster device moves every crossover right",
              all(b > a for a, b in zip(critical, moved)), ", ".join(f"{x:.2f}" for x in moved)),
        Check("cheaper submission (graph replay) moves every crossover left",
              all(b < a for a, b in zip(critical, replay)), ", ".join(f"{x:.2f}" for x in replay)),
        Check("more memory extends the range of microbatches", now[0].limit < now[1].limit < now[2].limit, limits),
    ]  # fmt: skip


def draw(result: Result) -> go.Figure:
    """Draw device and submission time over the microbatch, the crossovers and where memory ends."""
    return _draw_measured(result) if "mode" in result.table.columns else _draw_schematic(result)


def _draw_schematic(result: Result) -> go.Figure:
    import plotly.graph_objects as go
    import polars as pl

    from workbench.models.crossover import SUBMIT_EAGER, schematic
    from workbench.plotting import COLOURS, SERIES, figure

    p, table = result.params, result.table
    fig = figure("Schematic: where does each GPU stop running dry?", height=480)
    devices = table.filter(pl.col("kind") == "device")
    hues = (SERIES[0], SERIES[3], SERIES[2])
    for colour, name in zip(hues, devices["layer"].unique(maintain_order=True)):
        part = devices.filter(pl.col("layer") == name)
        fig.add_scatter(x=part["microbatch"], y=part["time"], mode="lines", name=f"{name} execution",
                        line={"color": colour, "width": 3})  # fmt: skip
        fig.add_scatter(x=part["microbatch"][-1:], y=part["time"][-1:], mode="markers+text", showlegend=False,
                        text=[f" {name} memory"], textposition="middle right", cliponaxis=False,
                        marker={"color": colour, "symbol": "line-ns-open", "size": 14})  # fmt: skip
    for name, dash, shown in (("eager", "solid", True), ("replay", "dash", p.replay)):
        part = table.filter((pl.col("kind") == "submit") & (pl.col("layer") == name))
        if shown:
            fig.add_scatter(x=part["microbatch"], y=part["time"], mode="lines", name=f"CPU submission, {name}",
                            line={"color": COLOURS["sync_wait"], "dash": dash, "width": 2})  # fmt: skip
    scales = {"activation_scale": p.activation_scale, "memory_scale": p.memory_scale}
    cost = SUBMIT_EAGER * p.host_cost
    for colour, curve in zip(hues, schematic(device_speed=p.device_speed, **scales)):
        at = curve.critical(cost)
        reached = at <= curve.limit
        fig.add_trace(
            go.Scatter(
                x=[at], y=[cost], mode="markers", showlegend=False,
                marker={"color": colour, "size": 11, "symbol": "circle" if reached else "circle-open",
                        "line": {"width": 2, "color": colour}},
                hovertemplate=f"{curve.name}: critical microbatch %{{x:.2f}}"
                + ("" if reached else ", beyond its memory") + "<extra></extra>",
            )
        )  # fmt: skip
    fig.update_xaxes(title="microbatch size (figure units)", range=[0, 16])
    fig.update_yaxes(title="time per microbatch (figure units)", rangemode="tozero")
    return fig


def _draw_measured(result: Result) -> go.Figure:
    import plotly.graph_objects as go

    from workbench.measure.blocks import LAYERS, PASSES
    from workbench.plotting import COLOURS, INK, SERIES, figure

    p = result.params
    fig = figure("Device time against submission time of one layer", rows=2, cols=3, height=720, shared_yaxes=True,
                 vertical_spacing=0.14, horizontal_spacing=0.03,
                 subplot_titles=[f"{n}<br>{q}" for q in PASSES for n in LAYERS])  # fmt: skip
    fig.update_annotations(font={"size": 12})
    # Sub-plot titles would sit under the legend.
    fig.update_layout(legend={"y": -0.15, "yanchor": "top"}, margin={"t": 110})
    style = {
        "eager": {"dash": "solid", "device": COLOURS["gpu_execute"], "submit": COLOURS["sync_wait"]},
        "replay": {"dash": "dash", "device": COLOURS["gpu_execute"], "submit": COLOURS["sync_wait"]},
        "compiled": {"dash": "dot", "device": SERIES[5], "submit": SERIES[4]},
    }
    seen: set[str] = set()
    drawn = [c for c in curves(result) if p.replay or c["mode"] != "replay"]
    for c in drawn:
        where: Any = {"row": PASSES.index(c["passes"]) + 1, "col": LAYERS.index(c["layer"]) + 1}
        look = style[c["mode"]]
        for kind, label in (("device", "device"), ("submit", "submission")):
            if kind == "device" and c["mode"] == "replay":
                continue
            name = f"{label} time, {c['mode']}"
            fig.add_trace(
                go.Scatter(
                    x=c["tokens"], y=c[kind] / 1e3, mode="lines+markers", name=name, legendgroup=name,
                    showlegend=name not in seen, marker={"size": 5},
                    line={"color": look[kind], "dash": look["dash"], "width": 2},
                    customdata=[(r["launches"], r.get("idle_share") or 0.0) for r in c["rows"]],
                    hovertemplate="%{x} tokens: %{y:.3f} ms<br>%{customdata[0]} launches"
                    + ("<br>device idle %{customdata[1]:.1%}" if c["mode"] == "eager" else "")
                    + f"<extra>{name}</extra>",
                ),
                **where,
            )  # fmt: skip
            seen.add(name)
        if c["mode"] == "eager":
            _mark_crossover(fig, c, where, COLOURS["idle"], INK)
    times = [float(v) / 1e3 for c in drawn for v in (*c["device"], *c["submit"])]
    # A decade above the curves holds the panels' words.
    fig.update_xaxes(type="log", dtick=1)
    fig.update_yaxes(type="log", dtick=1, range=[math.log10(min(times)) - 0.2, math.log10(max(times)) + 1.0])
    fig.update_xaxes(title="tokens per microbatch (log)", row=2, col=2)
    fig.update_yaxes(title="time (ms, log)", col=1)
    return fig


def _mark_crossover(fig: go.Figure, c: dict[str, Any], where: Any, band: str, ink: str) -> None:
    begins = idle_begins(c["tokens"], [r["idle_share"] for r in c["rows"]])
    if c["tokens"][0] < begins < c["tokens"][-1]:
        fig.add_vrect(x0=c["tokens"][0], x1=begins, fillcolor=band, opacity=0.22, line_width=0, **where)
    text = f"crossover {_tokens(c['critical'], c)} tokens<br>idle > {IDLE:.0%} below {_tokens(begins, c)}"
    if c["tokens"][0] < c["critical"] <= c["tokens"][-1]:
        fig.add_vline(x=c["critical"], line={"color": ink, "dash": "dot"}, layer="below", **where)
    if c["limit"]:
        text += f"<br>{c['limit']:,.0f} tokens fill the memory"
    fig.add_annotation(text=text, x=0.03, y=0.97, xref="x domain", yref="y domain", xanchor="left", yanchor="top",
                       showarrow=False, align="left", font={"size": 11}, **where)  # fmt: skip


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
    recording="2026-11-29_h200_5b112d1",
)
