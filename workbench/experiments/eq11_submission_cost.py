"""Equation 11, fitted: what one launch, one dispatched operator and one Python module call cost the host."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.core.params import Params, param
from workbench.core.tables import recorded_kinds

if TYPE_CHECKING:
    import plotly.graph_objects as go

TERMS = ("fixed", "launch", "operator", "view", "module")
NEAR = 0.25
"""Distance at which a fitted cost counts as that of an operator which was not in the fit."""


@dataclass(frozen=True, kw_only=True)
class SubmissionCostParams(Params):
    """Parameters of the launch family."""

    counts: tuple[int, ...] = param((1, 4, 16, 64, 128, 256), "repetitions of each unit", min=1, max=400)
    repeats: int = param(32, "timed calls of each region", min=5, max=500)
    level: float = param(0.95, "coverage of the intervals", min=0.5, max=0.999, analysis=True)


def measure(params: SubmissionCostParams, recorder: Any) -> None:
    """Time the submission of every member of the family, interleaved in rounds."""
    from workbench.measure.regions import count_launches, measure_region, spin_cycles_per_us
    from workbench.measure.submission_family import family, launch_calls
    from workbench.measure.timing import summary

    per_us = spin_cycles_per_us()
    members = family(params.counts)
    rounds = 8
    recorder.set(
        "protocol", timer="perf_counter_ns behind a spin kernel", warmup="3 calls in each round",
        repeats=params.repeats, rounds=rounds, order="all members once per round", spin_cycles_per_us=per_us,
    )  # fmt: skip
    recorder.set("precision", parameters="float32 vectors of 4096 elements")
    recorder.set("topology", nodes=1, gpus=1)
    calls = launch_calls()
    samples: dict[str, list[float]] = {name: [] for name in [m.name for m in members] + [name for name, _, _ in calls]}
    regions = [(m.name, 1, m.call) for m in members] + calls
    for _ in range(rounds):
        for name, times, call in regions:
            region = measure_region(call, repeats=max(3, params.repeats // rounds), per_us=per_us, count=False)
            samples[name] += [v / times for v in region.submit_us]
    for name, values in samples.items():
        recorder.samples(name, values)
    for m in members:
        recorder.row(
            "family", region=m.name, launches=m.launches, operators=m.operators, views=m.views, modules=m.modules,
            **summary(samples[m.name], "submit_us"),
        )  # fmt: skip
    for name, times, call in calls:
        found = {api: (count / times, us) for api, (count, us) in count_launches(call, every=True)[1].items()}
        recorder.row("api", region=name, **summary(samples[name], "submit_us"))
        for api, (times, us) in found.items():
            recorder.row("call", region=name, api=api, times=times, us=us)


def recorded(params: SubmissionCostParams, recording: Any) -> dict[str, Any]:
    """The recording's tables; an older one holds one table, with each operation's driver calls as JSON in a cell."""
    tables = recorded_kinds("part")(params, recording)
    if "call" not in tables:
        api = tables["api"]
        tables["call"] = [
            {"region": region, "api": name, "times": times, "us": us}
            for region, cell in zip(api["region"], api["api"])
            for name, (times, us) in json.loads(cell).items()
        ]
        tables["api"] = api.drop("api")
    return tables


def fit(result: Result) -> Any:
    """Fit the family's 20th percentiles; see `workbench.models.regression.Fit`.

    A shared host has slow spells of seconds that double every cost; the lower quantile is the undisturbed cost.
    """
    import numpy as np

    from workbench.models.regression import least_squares

    t = result.tables["family"]
    design = np.column_stack([np.ones(t.height), t["launches"], t["operators"], t["views"], t["modules"]]).astype(float)
    return least_squares(design, t["submit_us_p20"].to_numpy(), level=result.params.level)


def _called(region: str, api: str, times: float, us: float) -> str:
    return f"{api}{f' x {times:g}' if times != 1 else ''}, {us:.1f} us"


def api_costs(result: Result) -> list[dict[str, Any]]:
    """Per operator: its host time, and the driver calls it makes, each with what the profiler says one takes."""
    from workbench.measure.regions import NOT_WORK

    out = []
    for r in result.rows("api"):
        calls = [
            _called(**c)
            for c in result.rows("call")
            if c["region"] == r["region"] and not any(word in c["api"] for word in NOT_WORK)
        ]
        out.append({
            "operator": r["region"], "host us, p20": r["submit_us_p20"], "p50": r["submit_us_p50"],
            "p80": r["submit_us_p80"], "driver calls, profiled": "; ".join(calls) or "none seen",
        })  # fmt: skip
    return out


def checks(result: Result) -> list[Check]:
    """The equation's form: linear in launches, every term positive, framework beside the launch itself."""
    f = fit(result)
    at: dict[str, tuple[float, float, float]] = dict(zip(TERMS, zip(f.coefficients, f.low, f.high)))

    def text(term: str) -> str:
        return "{:.2f} us ({:.2f} to {:.2f})".format(*at[term])

    cost = dict(result.tables["api"].select("region", "submit_us_p20").iter_rows())
    unseen, graph = cost["elementwise kernel, neg_"], cost["replay of a graph of 64 kernels"]
    predicted = at["launch"][0] + at["operator"][0]
    return [
        Check("submission time is linear in launches, operators and module calls", f.r2 > 0.99, f"R2 = {f.r2:.4f}"),
        Check("a launch costs the host a positive time", at["launch"][1] > 0, text("launch")),
        Check("the framework adds to every launch", at["operator"][1] > 0, text("operator")),
        Check("Python bookkeeping adds to every module call", at["module"][1] > 0, text("module")),
        Check(
            f"the fit gives the cost of an operator outside the family, neg_, within {NEAR:.0%}",
            abs(predicted / unseen - 1) <= NEAR,
            f"{predicted:.2f} us fitted, {unseen:.2f} us measured",
        ),
        Check(
            "replaying a graph of 64 kernels costs the host less than launching them",
            graph < 64 * at["launch"][1],
            f"{graph:.1f} us against 64 launches of {at['launch'][0]:.2f} us",
        ),
    ]


def draw(result: Result) -> go.Figure:
    """Draw measured against fitted submission time, and the residuals below."""
    from workbench.core.colours import GRID, SERIES
    from workbench.views.plotting import figure

    f = fit(result)
    t = result.tables["family"]
    measured = t["submit_us_p20"].to_numpy()
    fitted = measured - f.residuals
    fig = figure("Submission time, measured and by Equation 11", rows=2, height=680, row_heights=[0.7, 0.3])
    units = t["region"].str.replace(r"^\d+ x ", "")
    for i, unit in enumerate(units.unique(maintain_order=True)):
        at = (units == unit).to_numpy()
        style = {"color": SERIES[i % len(SERIES)], "size": 8, "symbol": i}
        hover = "%{text}<br>fitted %{x:.1f} us<br>%{y:.1f} us<extra></extra>"
        names = t["region"].to_numpy()[at]
        common = {
            "mode": "markers", "marker": style, "name": unit, "legendgroup": unit, "text": names,
            "hovertemplate": hover,
        }  # fmt: skip
        fig.add_scatter(x=fitted[at], y=measured[at], **common, row=1, col=1)
        fig.add_scatter(x=fitted[at], y=f.residuals[at], showlegend=False, **common, row=2, col=1)
    top = float(max(measured.max(), fitted.max()))
    fig.add_scatter(x=[0, top], y=[0, top], mode="lines", line={"color": GRID}, showlegend=False, row=1, col=1)
    lines = [f"{k} <b>{c:.2f}</b> us ({a:.2f} to {b:.2f})" for k, c, a, b in zip(TERMS, f.coefficients, f.low, f.high)]
    # The lower right of the panel is free: points lie on its diagonal.
    fig.add_annotation(
        text="<br>".join(lines), xref="x domain", yref="y domain", x=0.99, y=0.03, showarrow=False, align="right",
        xanchor="right", yanchor="bottom", font={"size": 12},
    )  # fmt: skip
    fig.update_layout(legend={"yref": "container", "y": 0.005, "yanchor": "bottom"}, margin={"t": 80, "b": 130})
    fig.update_yaxes(title="measured, p20 (us)", row=1, col=1)
    fig.update_yaxes(title="residual (us)", row=2, col=1)
    fig.update_xaxes(title="fitted (us)", row=2, col=1)
    return fig


EXPERIMENT = Experiment(
    slug="eq11_submission_cost",
    group="s08_sync_free",
    title="Equation 11, fitted: the parts of submission time",
    claim="Submission time is launches times a launch cost, plus framework and bookkeeping.",
    kind="measured",
    anchor="Section 8.2, Equation 11",
    params=SubmissionCostParams,
    figure=draw,
    checks=checks,
    measure=measure,
    recorded=recorded,
    tests=("tests/measure/test_timing.py", "tests/experiments/test_measured_tables.py"),
    recording="2026-11-29_h200_1a32063",
)
