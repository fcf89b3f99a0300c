"""Tables of submission and device time over sizes: their crossovers, the claims about them, and the drawing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.experiment import Check, Result
from workbench.core.tables import MAIN
from workbench.models.crossover import crossing, crossing_interval, idle_begins, largest_microbatch

if TYPE_CHECKING:
    import plotly.graph_objects as go

IDLE = 0.05
"""Idle share from which a device counts as running dry; below it are launch turnaround and the profiler's grain."""
SHORTER = 10.0
FASTER = 2.0
"""Device speed of the claim that a faster device moves the crossover right."""
GUARDS = (
    "a compiled region pays for its guards and its Python wrapper in every call, and again after every graph break, "
    "which costs this layer as much as the launches that fusion saves, or more"
)
MEASURED_IDLE = "idle time was measured at the speeds of the table, which the what-if leaves"
KEYS = ("layer", "passes", "mode", "tokens")
"""Columns that name a region of both tables; over several ranks `rank` as well."""
REPEATS = ("submit_us", "device_us")
CHEAPER = {"replay": "graph replay", "compiled": "torch.compile"}


def taken_apart(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Give the repeats of every row, kept as JSON in the cells of one table, the table of their own that they have."""
    tables: dict[str, list[dict[str, Any]]] = {MAIN: [], "repeats": []}
    for row in rows:
        tables[MAIN].append({k: v for k, v in row.items() if k not in REPEATS})
        region = {k: row[k] for k in ("rank", *KEYS) if k in row}
        for times in zip(*(json.loads(row[name]) for name in REPEATS), strict=True):
            tables["repeats"].append(region | dict(zip(REPEATS, times)))
    return tables


def recorded(params: Any, recording: Any) -> dict[str, Any]:
    """`Experiment.recorded` of measured crossovers: recordings had one table once, with the repeats in its cells."""
    tables = recording.tables()
    return tables if "repeats" in tables else taken_apart(tables[MAIN].to_dicts())


def curves(result: Result) -> list[dict[str, Any]]:
    """Per layer, pass and mode of a measured table: sizes, scaled medians, and the crossover with its interval."""
    import polars as pl

    p = result.params
    scaled = (p.device_speed, p.host_cost) != (1, 1)
    table = result.table.filter(pl.col("kind") == "measured")
    repeats = dict(iter(result.tables["repeats"].group_by(KEYS)))

    def times(row: dict[str, Any], name: str) -> Any:
        """Repeats of one row as [rounds, repeats of a round]."""
        return repeats[tuple(row[k] for k in KEYS)][name].to_numpy().reshape(int(row.get("rounds") or 1), -1)

    out = []
    for (layer, passes, mode), part in table.group_by(["layer", "passes", "mode"], maintain_order=True):
        rows = sorted(part.to_dicts(), key=lambda r: r["tokens"])
        device = [times(r, "device_us") / p.device_speed for r in rows]
        submit = [times(r, "submit_us") * p.host_cost for r in rows]
        x = np.array([r["tokens"] for r in rows], dtype=float)
        at, low, high = crossing_interval(x, device, submit, draws=300)
        top = rows[-1].get("activation_bytes")
        memory = float(_workload(result, "memory_bytes") or 0.0) * p.memory_scale
        limit = None
        if top and memory:
            limit = largest_microbatch(memory, top / rows[-1]["tokens"] * p.activation_scale)
        idle = [r.get("idle_share") for r in rows]
        out.append({
            "layer": layer, "passes": passes, "mode": mode, "tokens": x, "rows": rows, "limit": limit,
            "device": np.array([np.median(d) for d in device]), "submit": np.array([np.median(s) for s in submit]),
            "critical": at, "low": low, "high": high, "waits": bool(rows[0].get("waits", "synchronized" in layer)),
            "idle": None if scaled or None in idle else idle_begins(x, np.array(idle, dtype=float), IDLE),
            "what_if": scaled and None not in idle,
        })  # fmt: skip
    return out


def _workload(result: Result, name: str) -> Any:
    if result.recording is None:
        return None
    return result.recording.record.get("workload", {}).get(name)


def unit(result: Result) -> str:
    """What the sizes count, for labels."""
    return _workload(result, "size_unit") or "tokens"


def said(value: float, c: dict[str, Any]) -> str:
    """A size as text; one outside the measured sizes says so."""
    if value <= c["tokens"][0]:
        return f"at most {c['tokens'][0]:,.0f}"
    return f"beyond {c['tokens'][-1]:,.0f}" if value > c["tokens"][-1] else f"{value:,.0f}"


def interval(c: dict[str, Any]) -> str:
    """A crossover with its interval as text."""
    at, low, high = (said(c[k], c) for k in ("critical", "low", "high"))
    return at if at == low == high else f"{at} ({low} to {high})"


def idle_us(c: dict[str, Any], row: dict[str, Any]) -> float | None:
    """Device idle in one call of a back-to-back run, microseconds; None where it was not measured."""
    if c["what_if"] or row.get("idle_share") is None or row.get("wall_us_p50") is None:
        return None
    return row["idle_share"] * row["wall_us_p50"]


def crossover_checks(result: Result) -> Iterator[Check]:
    """Claims of Figure 32's caption and of Section 8.3 about every layer of the table."""
    found = {(c["layer"], c["passes"], c["mode"]): c for c in curves(result)}
    eager = [c for c in found.values() if c["mode"] == "eager"]
    what = unit(result)
    for c in eager:
        name = _name(c)
        faster = crossing(c["tokens"], c["device"] / FASTER, c["submit"])
        held = [f"{r['tokens']:,}" for r in c["rows"] if r["host_held_up"]]
        yield Check(
            f"{name}: submission{', its known wait left out,' if c['waits'] else ''} waits for no device value "
            "(a full launch queue would look the same)",
            not held,
            f"held up behind a busy device at {', '.join(held)} {what}" if held else "never held up",
        )
        yield Check(f"{name}: a {FASTER:g} times faster device moves the crossover right",
                    faster > c["critical"] if faster > c["tokens"][0] and math.isfinite(c["critical"]) else None,
                    f"{interval(c)} to {said(faster, c)} {what}")  # fmt: skip
        for mode in CHEAPER:
            other = found.get((c["layer"], c["passes"], mode))
            if other:
                yield from _cheaper_checks(name, c, other, what)
        if c["idle"] is not None or c["what_if"]:
            yield _wait_check(name, c, what) if c["waits"] else _idle_check(name, c, what)
    flat = max(float(c["submit"].max() / c["submit"].min()) for c in eager)
    grows = min(float(c["device"][-1] / c["device"][0]) for c in eager)
    span = float(eager[0]["tokens"][-1] / eager[0]["tokens"][0])
    yield Check(
        f"shrinking the microbatch shortens device time at least {SHORTER:g} times as much as submission time",
        grows / flat > SHORTER if span > 2 * SHORTER else None,
        f"over {span:.0f} times the {what}: submission at most {flat:.2f}x, device at least {grows:.0f}x",
    )


def _name(c: dict[str, Any]) -> str:
    return f"{c['layer']}, {c['passes']}" if c["passes"] else str(c["layer"])


def _cheaper_checks(name: str, c: dict[str, Any], other: dict[str, Any], what: str) -> Iterator[Check]:
    """What another way of submitting does to submission time, and what that alone does to the crossover.

    A compiled layer also computes faster, which by itself moves the crossover right.
    """
    mine = {t: i for i, t in enumerate(c["tokens"])}
    at = [(mine[t], j) for j, t in enumerate(other["tokens"]) if t in mine]
    i, j = (np.array(column) for column in zip(*at))
    submit = float(np.median(other["submit"][j] / c["submit"][i]))
    device = float(np.median(other["device"][j] / c["device"][i]))
    before = crossing(c["tokens"][i], c["device"][i], c["submit"][i])
    after = crossing(c["tokens"][i], c["device"][i], other["submit"][j])
    means, cheaper, first = CHEAPER[other["mode"]], submit < 1, c["tokens"][i][0]
    known = "" if other["mode"] != "compiled" or cheaper else GUARDS
    yield Check(
        f"{name}: {means} submits with less host time",
        cheaper,
        f"{submit:.2f} times eager's submission; device time {device:.2f} times; medians over sizes" + _broken(other),
        known,
    )
    yield Check(
        f"{name}: cheaper submission ({means}), device time as it was, moves the crossover left",
        after < before if cheaper and before > first and min(after, before) <= c["tokens"][i][-1] else None,
        f"{said(before, c)} to {said(after, other)} {what}"
        + ("" if cheaper else "; it is not cheaper")
        + f"; with its own device time {interval(other)}",
    )


def _broken(c: dict[str, Any]) -> str:
    graphs, breaks = (c["rows"][0].get(name) for name in ("graphs", "graph_breaks"))
    return "" if graphs is None else f"; {graphs:.0f} graphs, {breaks:.0f} breaks"


def _idle_check(name: str, c: dict[str, Any], what: str) -> Check:
    claim = f"{name}: the device runs dry below the crossover and not above, within one doubling"
    if c["what_if"]:
        return Check(claim, None, MEASURED_IDLE)
    return Check(
        claim,
        bool(c["critical"] / 2 <= c["idle"] <= c["critical"] * 2),
        f"idle above {IDLE:.0%} below {said(c['idle'], c)} {what}; crossover {said(c['critical'], c)}",
    )


def _wait_check(name: str, c: dict[str, Any], what: str) -> Check:
    """Waits serialise: each one empties the queue, so the crossover of plain submission is no bound on idle time.

    Inside the crossover's interval nothing is decided.
    """
    claim = f"{name}: a host wait in every call leaves the device idle beyond the crossover of plain submission"
    if c["what_if"]:
        return Check(claim, None, MEASURED_IDLE)
    beyond = True if c["idle"] > c["high"] else False if c["idle"] < c["low"] else None
    return Check(
        claim,
        beyond if math.isfinite(c["high"]) else None,
        f"idle above {IDLE:.0%} below {said(c['idle'], c)} {what}; crossover without the wait {interval(c)}",
    )


def draw_crossovers(result: Result) -> go.Figure:
    """Draw one panel per layer and passes: both times over the size, the crossover, and where the device idles."""

    from workbench.core.colours import COLOURS, INK
    from workbench.views.plotting import figure

    drawn = [c for c in curves(result) if result.params.replay or c["mode"] != "replay"]
    layers = list(dict.fromkeys(c["layer"] for c in drawn))
    passes = list(dict.fromkeys(c["passes"] for c in drawn))
    eager = {(c["layer"], c["passes"]): c for c in drawn if c["mode"] == "eager"}
    titles = [_title(n, q, eager.get((n, q))) for q in passes for n in layers]
    fig = figure("Where device time meets submission time", rows=len(passes), cols=len(layers),
                 height=190 + 290 * len(passes), shared_yaxes=True, vertical_spacing=0.22 / len(passes),
                 horizontal_spacing=0.03, subplot_titles=titles)  # fmt: skip
    fig.update_annotations(font={"size": 12})
    # Sub-plot titles would sit under the legend.
    fig.update_layout(legend={"yref": "container", "y": 0.005, "yanchor": "bottom"}, margin={"t": 125, "b": 130})
    dashes = {"eager": "solid", "replay": "dash", "compiled": "dot"}
    colours = {"device": COLOURS["gpu_execute"], "submit": COLOURS["cpu_submit"]}
    seen: set[str] = set()
    for c in drawn:
        where: Any = {"row": passes.index(c["passes"]) + 1, "col": layers.index(c["layer"]) + 1}
        for kind, label in (("device", "device"), ("submit", "submission")):
            if kind == "device" and c["mode"] == "replay":
                continue
            name = f"{label} time, {c['mode']}"
            fig.add_scatter(
                x=c["tokens"], y=c[kind] / 1e3, mode="lines+markers", name=name, legendgroup=name,
                showlegend=name not in seen, marker={"size": 5}, customdata=[_hover(c, r) for r in c["rows"]],
                line={"color": colours[kind], "dash": dashes[c["mode"]], "width": 2},
                hovertemplate=f"%{{x:,}} {unit(result)}: %{{y:.3f}} ms%{{customdata}}<extra>{name}</extra>", **where,
            )  # fmt: skip
            seen.add(name)
        _mark(fig, c, where, INK, unit(result), "crossover" not in seen)
        seen.add("crossover")
    for (layer, q), c in eager.items():
        if c["idle"] is not None and c["tokens"][0] < c["idle"]:
            where = {"row": passes.index(q) + 1, "col": layers.index(layer) + 1}
            fig.add_vrect(x0=c["tokens"][0], x1=min(c["idle"], c["tokens"][-1]), fillcolor=COLOURS["idle"],
                          opacity=0.22, line_width=0, layer="below", **where)  # fmt: skip
    sizes = [float(v) for c in drawn for v in c["tokens"]]
    fig.update_xaxes(type="log", dtick=1, range=[math.log10(min(sizes)) - 0.15, math.log10(max(sizes)) + 0.15])
    times = [float(v) / 1e3 for c in drawn for v in (*c["device"], *c["submit"])]
    fig.update_yaxes(type="log", dtick=1, range=[math.log10(min(times)) - 0.2, math.log10(max(times)) + 0.2])
    fig.update_xaxes(title=f"{unit(result)} per microbatch (log)", row=len(passes), col=(len(layers) + 1) // 2)
    fig.update_yaxes(title="time (ms, log)", col=1)
    return fig


def _title(layer: str, passes: str, c: dict[str, Any] | None) -> str:
    text = f"{layer}<br>{passes}" if passes else layer
    return text if c is None else f"{text}: <b>{said(c['critical'], c)}</b>"


def _hover(c: dict[str, Any], row: dict[str, Any]) -> str:
    text = f"<br>{row['launches']} device operations" if row.get("launches") else ""
    lost = idle_us(c, row)
    if lost is not None:
        text += f"<br>device idle {row['idle_share']:.1%}, {lost:,.0f} us per call"
    if row.get("graphs"):
        text += f"<br>{row['graphs']} compiled graphs, {row['graph_breaks']} breaks"
    return text


def _mark(fig: go.Figure, c: dict[str, Any], where: Any, ink: str, what: str, legend: bool) -> None:
    """Mark a crossover that was reached, its interval as bars."""
    at, first, last = c["critical"], c["tokens"][0], c["tokens"][-1]
    if not first < at <= last:
        return
    height = float(np.exp(np.interp(np.log(at), np.log(c["tokens"]), np.log(c["submit"]))))
    text = f"{c['mode']}: crossover {interval(c)} {what}"
    if c["idle"] is not None:
        text += f"<br>idle above {IDLE:.0%} below {said(c['idle'], c)}"
        text += "<br>a host wait in every call empties the queue" if c["waits"] else ""
    if c["limit"]:
        text += f"<br>activations of {c['limit']:,.0f} {what} fill the memory"
    fig.add_scatter(
        x=[at], y=[height / 1e3], mode="markers", name="crossover, 95%", legendgroup="crossover", showlegend=legend,
        marker={"color": ink, "size": 10, "symbol": "diamond" if c["mode"] == "eager" else "diamond-open"},
        error_x={"array": [min(c["high"], last) - at], "arrayminus": [at - c["low"]], "color": ink, "thickness": 1.5},
        hovertemplate=text + "<extra></extra>", **where,
    )  # fmt: skip
