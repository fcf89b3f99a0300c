"""Table 51: each metric with its definition, unit and a worked example, and which of our recordings retain it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.core.params import Params, param

if TYPE_CHECKING:
    import plotly.graph_objects as go


@dataclass(frozen=True, kw_only=True)
class MetricDefinitionsParams(Params):
    """What is shown."""

    pinned_only: bool = param(False, "leave out recordings that no experiment shows")


# Per metric: the example in words, the arguments, which result, and the value worked out by hand.
EXAMPLES: dict[str, tuple[str, tuple[Any, ...], str, float]] = {
    "step_time": ("steps of 9, 2, 3, 4 s, the first is warm-up", ([9.0, 2.0, 3.0, 4.0],), "median_s", 3.0),
    "useful_tokens_per_s_per_gpu": ("8 Mi tokens per step of 4 s on 16 GPUs", (8 * 2**20, 4.0, 16), "", 131072.0),
    "useful_model_mfu": ("903 TFLOP per second on one GPU (Table 50, row 2)", (903e12, 1.0, 1), "", 903 / 2250),
    "d2h_route_shape_wall_time": (
        "two waits of 40 and 50 us",
        ([(0, 40), (100, 150)], [(0, 55)], [(20, 45), (120, 160)]),
        "wait_us",
        90.0,
    ),
    "communication_exposure": (
        "10 us of communication, 5 us of them under compute",
        ([(0, 10)], [(2, 5), (4, 7)]),
        "",
        5.0,
    ),
    "route_drop_statistics": (
        "16 routes offered, 12 accepted",
        ([[4, 4], [8, 0]], [[4, 4], [4, 0]]),
        "drop_rate",
        0.25,
    ),
    "peak_device_memory": (
        "two ranks, 3 and 5 GiB allocated",
        ([3 * 2**30, 5 * 2**30], [6 * 2**30, 6 * 2**30]),
        "allocated_bytes",
        5 * 2.0**30,
    ),
    "lease_high_water": ("out, out, back, out, out, back", ([1, 1, -1, 1, 1, -1],), "", 3),
    "checkpoint_peak_time": (
        "10 GiB before the save, 12 GiB at its peak",
        (10 * 2**30, 12 * 2**30, 3.0),
        "added_bytes",
        2 * 2**30,
    ),
    "scaling_efficiency": ("700 units on 32 GPUs against 200 on 8", (700.0, 32, 200.0, 8), "", 0.875),
}
OPTIONS: dict[str, dict[str, int]] = {
    "step_time": {"warmup": 1},
    "route_drop_statistics": {"capacity_rows": 8, "experts_per_rank": 1},
}


def _recordings(pinned_only: bool) -> dict[str, list[str]]:
    """Return the column and field names of every recording, ``slug/name`` -> names."""
    import csv
    import json

    from workbench.core.record import data_root
    from workbench.experiments import load, slugs
    from workbench.models.metrics import field_names

    pins = {(s, load(s).recording) for s in slugs()} if pinned_only else set()
    found = {}
    for path in sorted((data_root() / "recorded").glob("*/*/record.json")):
        slug, name = path.parts[-3], path.parts[-2]
        if pinned_only and (slug, name) not in pins:
            continue
        with (path.parent / "table.csv").open(encoding="utf-8", newline="") as f:
            columns = next(csv.reader(f), [])
        found[f"{slug}/{name}"] = field_names(json.loads(path.read_text(encoding="utf-8")), columns)
    return found


def model(params: MetricDefinitionsParams) -> list[dict[str, Any]]:
    """Return one row per metric: definition, example computed, and the recordings that retain it."""
    from workbench.core.report_tables import printed_rows
    from workbench.models.metrics import METRICS

    anchors = {r["slug"]: r["anchor"] for r in printed_rows(51)}
    recordings = _recordings(params.pinned_only)
    rows = []
    for slug, metric in METRICS.items():
        words, arguments, part, by_hand = EXAMPLES[slug]
        value = metric.function(*arguments, **OPTIONS.get(slug, {}))
        kept = [name for name, names in recordings.items() if metric.retained(names)]
        rows.append({
            "metric": metric.name, "slug": slug, "unit": metric.unit, "definition": metric.definition,
            "example": words, "result": float(value[part] if part else value), "result_of": part or slug,
            "by_hand": float(by_hand), "retained_by": len(kept), "recordings": len(recordings),
            "where": ", ".join(kept), "anchor": anchors[slug],
        })  # fmt: skip
    return rows


def checks(result: Result) -> Iterator[Check]:
    """Every row of the table has one implementation, and each example gives what was worked out by hand."""
    import math

    from workbench.core.report_tables import printed_rows

    rows = result.table.to_dicts()
    names = [r["metric"] for r in printed_rows(51)] == [r["metric"] for r in rows]
    one_each = "every metric of Table 51 has one implementation, under its printed name"
    yield Check(one_each, names, f"{len(rows)} metrics")
    for r in rows:
        same = math.isclose(r["result"], r["by_hand"], rel_tol=1e-12)
        yield Check(f"{r['metric']}: {r['example']}", same, f"{r['result_of']} = {r['result']:g}")


def draw(result: Result) -> go.Figure:
    """Draw which recording retains which metric, as a matrix with marks (not colours alone)."""
    from workbench.core.colours import INK, SERIES
    from workbench.views.plotting import figure

    rows = result.table.to_dicts()
    kept = {r["metric"]: {x for x in r["where"].split(", ") if x} for r in rows}
    names = sorted(_recordings(result.params.pinned_only))
    metrics = [r["metric"] for r in rows]
    fig = figure("Which recordings retain which metric", height=300 + 22 * max(4, len(names)))
    mark = {"symbol": "circle", "size": 13, "color": SERIES[0]}
    no_mark = {"symbol": "circle-open", "size": 6, "color": INK}
    retained = "retained (read from record.json and table.csv)"
    for label, holds, style in ((retained, True, mark), ("not retained", False, no_mark)):
        points = [(m, n) for m in metrics for n in names if (n in kept[m]) == holds]
        fig.add_scatter(
            x=[m for m, _ in points], y=[n.replace("/", "<br>") for _, n in points], mode="markers", name=label,
            showlegend=True, marker=style, hovertemplate="%{y}<br>%{x}<extra></extra>",
        )  # fmt: skip
    fig.update_xaxes(categoryorder="array", categoryarray=metrics, tickangle=-35)
    fig.update_yaxes(tickfont={"size": 10}, autorange="reversed")
    fig.update_layout(legend={"y": 1.02}, margin={"t": 100, "b": 140})
    return fig


EXPERIMENT = Experiment(
    slug="tab51_metric_definitions",
    group="appendix_b",
    title="Table 51: the metrics, defined once",
    claim="Each quantity has one definition and one implementation; a definition does not say that a run retained it.",
    kind="model",
    anchor="Section B.11, Table 51",
    params=MetricDefinitionsParams,
    figure=draw,
    checks=checks,
    model=model,
)
