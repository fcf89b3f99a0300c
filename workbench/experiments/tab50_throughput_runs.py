"""Tables 49 and 50: MFU by Equation 95, tokens and step time of each run, and whether the rows agree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.core.params import Params, param

if TYPE_CHECKING:
    import plotly.graph_objects as go

KNOWN = {
    "a configuration with random routing has a headline": (
        "Table 50 marks these rows as alternates: one headline per model, not per row of Table 49."
    )
}
FLOP_PER_PARAMETER = 6
"""Training FLOPs per token and active parameter, forward and backward; attention scores come on top, so that tokens/s
from it is an upper bound. The report does not print what it counts."""
SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, kw_only=True)
class ThroughputRunsParams(Params):
    """What to convert the printed rates with."""

    peak_TFLOPs: float = param(
        2250.0, "peak per GPU that MFU is a fraction of", unit="TFLOP/s", min=100, max=20000, step=50
    )
    budget_T: float = param(
        2.0, "token budget for the days column", unit="trillion tokens", min=0.01, max=100, step=0.1
    )


def report(params: ThroughputRunsParams) -> list[dict[str, Any]]:
    """Return the transcribed observations with their configurations, nothing computed."""
    from workbench.core.report_tables import report_table

    runs = {r.pop("configuration"): r for r in report_table(49).drop("anchor").to_dicts()}
    return [o | runs[o["configuration"]] for o in report_table(50).to_dicts()]


def model(params: ThroughputRunsParams) -> list[dict[str, Any]]:
    """Add MFU, microbatches and, from 6 FLOPs per active parameter, bounds on tokens/s, step time and days."""
    from workbench.core.report_tables import parse_printed
    from workbench.models.configurations import MI, accumulation_microbatches

    rows = []
    for r in report(params):
        rate, batch = r["TFLOPs_per_gpu"], r["global_batch_Mi"] * MI
        tokens = rate * 1e12 / (FLOP_PER_PARAMETER * parse_printed(r["active"]).value)
        added = {
            "mfu_bf16_ref": mfu(rate, params),
            "microbatches": accumulation_microbatches(batch, r["dense_dp"], r["rank_microbatch_tokens"]),
            "tokens_per_s_per_gpu_at_most": tokens,
            "step_s_at_least": batch / (tokens * r["gpus"]),
            "days_at_least": params.budget_T * 1e12 / (tokens * r["gpus"]) / SECONDS_PER_DAY,
        }
        rows.append(r | added)
    return rows


def mfu(rate_TFLOPs: float, params: ThroughputRunsParams) -> float:
    """Return the MFU of a printed useful TFLOP/s per GPU: Equation 95 over one second on one GPU."""
    from workbench.models.metrics import useful_model_mfu

    return useful_model_mfu(rate_TFLOPs * 1e12, 1.0, 1, params.peak_TFLOPs)


def rules() -> list[Any]:
    """Apply every consistency rule to Tables 49 and 50."""
    from workbench.core.report_tables import printed_rows, report_table, run_sizes
    from workbench.models import configurations as c

    runs = report_table(49).to_dicts()
    found = [rule for run in runs for rule in c.run_rules(run)]
    found += c.headline_rules(report_table(50).to_dicts(), {r["configuration"]: r["model"] for r in runs})
    sizes = {r["model"]: (*run_sizes(r), int(r["routed_experts"])) for r in printed_rows(49)}
    experts = {
        name: c.params_per_routed_expert(c.Interval(*a.interval), c.Interval(*t.interval), n, top_k=4)
        for name, (a, t, n) in sizes.items()
    }
    for family in dict.fromkeys(name.split("-")[0] for name in experts):
        mine = [v for k, v in experts.items() if k.startswith(family)]
        low, high = max(i.low for i in mine), min(i.high for i in mine)
        value = f"{low / 1e9:.5f} to {high / 1e9:.5f} B over all layers"
        found.append(c.Rule("one routed expert has one size in a family", family, low <= high, value))
    return found


def checks(result: Result) -> Iterator[Check]:
    """One claim per rule; rows that disagree are named in its value."""
    by_rule: dict[str, list[Any]] = {}
    for rule in rules():
        by_rule.setdefault(rule.rule, []).append(rule)
    for name, applied in by_rule.items():
        wrong = [f"{r.row}: {r.value}" for r in applied if not r.holds]
        right = f"{len(applied)} of {len(applied)} rows"
        yield Check(name, not wrong, "; ".join(wrong) or right, KNOWN.get(name, "") if wrong else "")


def draw(result: Result) -> go.Figure:
    """Draw each observation's printed rate, with the MFU it means on a second axis."""
    from workbench.core.colours import SERIES
    from workbench.views.plotting import figure

    rows = result.table.to_dicts()
    p = result.params
    styles = {
        "headline": ("headline, random routing", SERIES[0], "circle"),
        "repeat": ("slower repeat, random routing", SERIES[1], "x"),
        "alternate": ("alternate batch or topology, random", SERIES[2], "square"),
        "companion": ("learned-routing companion", SERIES[3], "triangle-up"),
        "unpaired": ("learned, no random pair", SERIES[4], "triangle-down"),
    }
    fig = figure("Useful TFLOP/s per GPU of the production-throughput runs", height=560)
    for use, (name, colour, symbol) in styles.items():
        part = [r for r in rows if r["use"] == use]
        fig.add_scatter(
            x=[r["TFLOPs_per_gpu"] for r in part],
            y=[r["configuration"] for r in part],
            mode="markers",
            name=f"{name} (report)",
            marker={"color": colour, "symbol": symbol, "size": 12},
            customdata=[(r["anchor"], r["observation"], 100 * mfu(r["TFLOPs_per_gpu"], p)) for r in part],
            hovertemplate="%{y}: %{x} TFLOP/s/GPU, MFU %{customdata[2]:.1f} %<br>%{customdata[1]}<br>"
            "%{customdata[0]}<extra></extra>",
        )
    low, high = 640, 920
    ticks = [m for m in range(0, 101) if low <= m / 100 * p.peak_TFLOPs <= high]
    # An empty trace carries the second axis; its ticks stand where the first axis has that share of the peak.
    fig.add_scatter(x=[low], y=[rows[0]["configuration"]], xaxis="x2", showlegend=False, hoverinfo="skip", opacity=0)
    axis2 = {
        "overlaying": "x", "side": "top", "range": [low, high], "tickvals": [m / 100 * p.peak_TFLOPs for m in ticks],
        "ticktext": [f"{m} %" for m in ticks], "title": f"MFU (model), of {p.peak_TFLOPs:g} TFLOP/s, Equation 95",
        "showgrid": False,
    }  # fmt: skip
    fig.update_layout(xaxis={"range": [low, high], "title": "useful TFLOP/s per GPU"}, xaxis2=axis2)
    order = list(dict.fromkeys(r["configuration"] for r in rows))
    fig.update_yaxes(categoryorder="array", categoryarray=order[::-1])
    fig.update_layout(legend={"y": -0.24, "yanchor": "top"}, margin={"t": 110, "b": 170})
    return fig


EXPERIMENT = Experiment(
    slug="tab50_throughput_runs",
    group="appendix_b",
    title="Tables 49 and 50: throughput runs, their MFU and their consistency",
    claim=(
        "Each headline is the highest random-routing rate of its configuration; MFU by Equation 95 divides every row, "
        "MXFP8 included, by the BF16 peak."
    ),
    kind="report",
    anchor="Sections B.10 and B.11, Tables 49 and 50, Equation 95",
    params=ThroughputRunsParams,
    figure=draw,
    checks=checks,
    model=model,
    report=report,
)
