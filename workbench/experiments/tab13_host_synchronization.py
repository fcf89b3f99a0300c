"""Table 13, run: which ways of consuming a GPU result make the host wait, for how long, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.core.params import Params, param

if TYPE_CHECKING:
    import plotly.graph_objects as go


@dataclass(frozen=True, kw_only=True)
class HostSyncParams(Params):
    """Parameters of the pattern runs."""

    repeats: int = param(15, "timed calls of each pattern", min=3, max=200)
    spin_us: float = param(
        3000.0, "length of the spin kernel that keeps the device busy", unit="us", min=500, max=50000
    )


def measure(params: HostSyncParams, recorder: Any) -> list[dict[str, Any]]:
    """Run every pattern behind a spin kernel on this GPU."""
    from workbench.measure.regions import spin_cycles_per_us
    from workbench.measure.sync_patterns import measure_pattern, patterns

    per_us = spin_cycles_per_us()
    recorder.set(
        "protocol",
        timer="perf_counter_ns around the call; it waited when the spin kernel's event had completed at its return",
        warmup="3 calls of each pattern",
        repeats=params.repeats,
        spin_us=params.spin_us,
        spin_cycles_per_us=per_us,
        order="patterns one after another, idle-device calls before the calls behind the spin kernel",
        exclusions="none",
    )
    recorder.set("precision", parameters="float32 and int64 inputs of 16384 elements")
    recorder.set("topology", nodes=1, gpus=1)
    for pattern in patterns():
        row = measure_pattern(pattern, repeats=params.repeats, spin_us=params.spin_us, per_us=per_us)
        recorder.samples(pattern.name, row.pop("samples"))
        recorder.row(**row)
    return recorder.rows


def checks(result: Result) -> Iterator[Check]:
    """The report's verdicts, row by row, and what the debug mode misses."""
    import polars as pl

    rows = result.table.to_dicts()
    for r in rows:
        if r["report"] == "yes":
            yield Check(f"{r['pattern']} makes the host wait", bool(r["waited"]),
                        f"{r['host_us_p50']:.0f} us behind the spin kernel")  # fmt: skip
        elif r["report"]:
            yield Check(f"{r['pattern']} does not inherently wait", not r["waited"],
                        f"{r['host_us_p50']:.0f} us behind the spin kernel")  # fmt: skip
    missed = result.table.filter(pl.col("waited") & (pl.col("debug_mode") == "silent"))["pattern"].to_list()
    yield Check("set_sync_debug_mode is an audit aid, not a substitute for a timeline: it stays silent on some waits",
                bool(missed), ", ".join(missed) or "it named every wait here")  # fmt: skip
    alarms = result.table.filter(~pl.col("waited") & (pl.col("debug_mode") == "warned"))["pattern"].to_list()
    yield Check(
        "set_sync_debug_mode never names a call that did not wait", not alarms, ", ".join(alarms) or "no false alarm"
    )


def draw(result: Result) -> go.Figure:
    """Draw the host time of each pattern behind the spin kernel."""
    from workbench.core.colours import COLOURS
    from workbench.views.plotting import WIDE_LABELS, figure, spread

    rows = result.table.sort("host_us_p50", descending=False).to_dicts()
    fig = figure("How long the host is held when the device is busy", height=170 + 22 * len(rows))
    for waited, colour, name in ((True, "sync_wait", "host waited"), (False, "cpu_submit", "host went on")):
        part = [r for r in rows if bool(r["waited"]) == waited]
        fig.add_bar(
            orientation="h",
            y=[r["pattern"] for r in part],
            x=[r["host_us_p50"] for r in part],
            error_x=spread(part, "host_us"),
            name=name,
            marker={"color": COLOURS[colour], "pattern": {"shape": "x" if waited else "", "solidity": 0.3, "size": 6}},
            customdata=[
                (r["debug_mode"], r["report"] or "not in Table 13", r["instead"] or "nothing to replace") for r in part
            ],
            hovertemplate="%{y}<br>%{x:.1f} us<br>debug mode: %{customdata[0]}<br>"
            "report: %{customdata[1]}<br>instead: %{customdata[2]}<extra></extra>",
        )
    fig.update_xaxes(type="log", dtick=1, title="host time (us, log)")
    fig.update_layout(WIDE_LABELS)
    fig.update_yaxes(
        categoryorder="array", categoryarray=[r["pattern"] for r in rows], tickfont={"family": "monospace", "size": 11}
    )
    return fig


EXPERIMENT = Experiment(
    slug="tab13_host_synchronization",
    group="s08_sync_free",
    title="Table 13, run: what makes the host wait",
    claim="Whether the host waits depends on how a GPU result is consumed, not on whether an operation is dynamic.",
    kind="measured",
    anchor="Section 8.4, Table 13",
    params=HostSyncParams,
    figure=draw,
    checks=checks,
    measure=measure,
    tests=("tests/measure/test_capture.py", "tests/experiments/test_measured_tables.py"),
    recording="2026-11-29_h200_464a777",
)
