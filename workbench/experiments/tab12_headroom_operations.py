"""Table 12, measured: which operations build, consume or stop submission headroom."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.core.params import Params, param

if TYPE_CHECKING:
    import plotly.graph_objects as go


@dataclass(frozen=True, kw_only=True)
class HeadroomOperationsParams(Params):
    """Parameters of the operation runs."""

    repeats: int = param(30, "timed calls of each operation, over all rounds", min=5, max=500)


ROUNDS = 5
KNOWN = {
    "compiled pointwise chain, 8192 x 4096": "fusion shortens this chain's device time more than its submission: "
    "checking the compiled region's guards costs the host more than one fused kernel of this size lasts"
}
"""Operations that stand on the other side of the report's classification, and why."""
ENGINE = (
    "this forward is cheap Python, one module deep, so that the engine's C++ has little to save, while every backward "
    "node allocates its gradients and a product's node launches two"
)


def effect(waited: bool, device_us: float, submit_us: float) -> str:
    """Classify by measurement: a region that holds the host up stops submission; else the larger time decides."""
    if waited:
        return "stops"
    return "builds" if device_us > submit_us else "consumes"


def measure(params: HeadroomOperationsParams, recorder: Any) -> list[dict[str, Any]]:
    """Measure device time per submission time of each operation on this GPU."""
    from workbench.measure.operations import operations
    from workbench.measure.regions import Region, measure_region, spin_cycles_per_us
    from workbench.measure.timing import summary

    per_us, found = spin_cycles_per_us(), operations()
    recorder.set(
        "protocol",
        timer="submission: perf_counter_ns behind a spin kernel; device: CUDA events around the queued region",
        warmup="3 calls, 1 in later rounds", repeats=params.repeats, rounds=ROUNDS,
        order="all operations once per round", spin_cycles_per_us=per_us,
        l2="warm: inputs of one operation are reused",
    )  # fmt: skip
    recorder.set("precision", parameters="bfloat16, FP32 router logits")
    recorder.set("topology", nodes=1, gpus=1)
    measured: dict[str, Region] = {}
    for turn in range(ROUNDS):
        for op in found:
            part = measure_region(op.call, repeats=params.repeats // ROUNDS, warmup=1 if turn else 3, per_us=per_us,
                                  count=turn == 0)  # fmt: skip
            region = measured.setdefault(op.name, part)
            if turn:
                region.submit_us += part.submit_us
                region.device_us += part.device_us
                region.waited &= part.waited
    for op in found:
        region = measured[op.name]
        recorder.samples(f"{op.name} submit_us", region.submit_us)
        recorder.samples(f"{op.name} device_us", region.device_us)
        recorder.row(
            operation=op.name, row=op.row, report=op.report,
            measured=effect(region.waited, region.device_p50_us, region.submit_p50_us),
            **summary(region.submit_us, "submit_us"), **summary(region.device_us, "device_us"), waited=region.waited,
            launches=region.launches,
        )  # fmt: skip
    return recorder.rows


def _per_launch(row: dict[str, Any], less: dict[str, Any] | None = None) -> float:
    """Host microseconds per device operation of a region, or of what it has beyond a shorter one."""
    shorter = less or {"submit_us_p50": 0.0, "launches": 0}
    return (row["submit_us_p50"] - shorter["submit_us_p50"]) / (row["launches"] - shorter["launches"])


def checks(result: Result) -> Iterator[Check]:
    """Each row of the report's classification, and the autograd claim of Section 8.1."""
    rows = {r["operation"]: r for r in result.table.to_dicts()}
    for r in rows.values():
        if r["row"]:
            agrees = r["measured"] == r["report"]
            ratio = (
                "host held up"
                if r["waited"]
                else f"{r['device_us_p50'] / r['submit_us_p50']:.2f} device us per submit us"
            )
            known = "" if agrees else KNOWN.get(r["operation"], "")
            yield Check(f"{r['operation']}: {r['report']} headroom ({r['row']})", agrees, ratio, known)
    fwd, bwd = rows["forward of a transformer layer"], rows["backward of a transformer layer"]
    ratio = bwd["device_us_p50"] / fwd["device_us_p50"]
    yield Check("backward launches roughly twice the forward's device work", 1.5 <= ratio <= 2.5, f"{ratio:.2f}x")
    alone = _per_launch(bwd) / _per_launch(fwd)
    four = [rows[f"{name} of four transformer layers"] for name in ("backward", "forward")]
    further = _per_launch(four[0], bwd) / _per_launch(four[1], fwd)
    yield Check("the autograd engine submits with less host time per launch than the Python forward", further < 1,
                f"{further:.2f}x in a further layer, {alone:.2f}x with the cost of entering the engine",
                "" if further < 1 else ENGINE)  # fmt: skip


def draw(result: Result) -> go.Figure:
    """Draw the device time that each microsecond of submission buys; at 1 headroom neither grows nor shrinks."""
    import plotly.graph_objects as go

    from workbench.core.colours import COLOURS, INK, SERIES
    from workbench.views.plotting import WIDE_LABELS, figure, on

    colours = {"builds": SERIES[0], "consumes": SERIES[3], "stops": COLOURS["sync_wait"]}
    rows = sorted(result.table.to_dicts(), key=lambda r: r["device_us_p50"] / r["submit_us_p50"])
    fig = figure("Device time bought by each microsecond of submission", height=170 + 27 * len(rows))
    for name, colour in colours.items():
        part = [r for r in rows if r["measured"] == name]
        fig.add_trace(
            go.Bar(
                orientation="h",
                y=[r["operation"] for r in part],
                x=[r["device_us_p50"] / r["submit_us_p50"] for r in part],
                name=f"measured: {name}",
                marker={"color": colour, "pattern": {"shape": "x" if name == "stops" else "", "solidity": 0.3}},
                text=[f"{r['device_us_p50']:.0f} / {r['submit_us_p50']:.0f} us" for r in part],
                # Inside, clear of break-even, where the bar is long enough; a pattern carries no text.
                textposition="outside" if name == "stops" else "auto",
                insidetextanchor="start",
                insidetextfont={"color": on(colour)},
                cliponaxis=False,
                customdata=[(r["row"] or "not a row of Table 12", r["report"] or "none", r["launches"]) for r in part],
                hovertemplate="%{y}<br>%{text} (device / submission)<br>%{customdata[0]}<br>"
                "report: %{customdata[1]}; %{customdata[2]} device operations<extra></extra>",
            )
        )
    fig.add_vline(x=1, line={"color": INK, "dash": "dash"}, layer="below")
    # Annotations take log10 of a log axis's value.
    fig.add_annotation(x=0, y=1, yref="paper", text="break-even", showarrow=False, xanchor="left", yanchor="bottom")
    top = max(r["device_us_p50"] / r["submit_us_p50"] for r in rows)
    fig.update_xaxes(
        type="log", dtick=1, title="device us per submission us (log)", range=[-2.1, math.log10(top) + 0.3]
    )
    fig.update_layout(WIDE_LABELS)
    fig.update_yaxes(categoryorder="array", categoryarray=[r["operation"] for r in rows])
    return fig


EXPERIMENT = Experiment(
    slug="tab12_headroom_operations",
    group="s08_sync_free",
    title="Table 12, measured: what builds, consumes and stops headroom",
    claim="GEMMs, attention, compiled regions and backward build headroom; small work consumes it; a read stops it.",
    kind="measured",
    anchor="Section 8.1, Table 12",
    params=HeadroomOperationsParams,
    figure=draw,
    checks=checks,
    measure=measure,
    tests=("tests/measure/test_timing.py", "tests/experiments/test_measured_tables.py"),
    recording="2026-11-29_h200_1a32063",
)
