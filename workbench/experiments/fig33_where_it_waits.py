"""Figures 33 and 34: where the all-to-all waits for route counts, and what covering that wait does not change.

The report draws order only: every duration here is ours. The device route map panel is a sketch of the rowwise path of
Section 8.5, not a figure of the report. Copies count as device work, so GPU idle starts when the copy ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.core.params import Params, param
from workbench.models.submission import HostWait, Op, Program, Submit
from workbench.views.queue import (
    AT_CURSOR,
    EPSILON,
    box,
    boxes,
    control,
    draw,
    lane_rows,
    one,
    rows,
    step_index,
    total,
    view_timeline,
)

BARE, COVERED, DEVICE = "figure 33", "figure 34", "device route map"
SHARED, EXCHANGE, ROUTER = "shared", "All-To-All", "router"


@dataclass(frozen=True, kw_only=True)
class Fig33Params(Params):
    """All values are ours; the report draws order only."""

    shared_expert: float = param(
        2.0, "device time of the shared expert that covers the wait", min=0.0, max=4.0, step=0.1
    )
    previous_work: float = param(4.0, "GPU work already queued (attention and so on)", min=0.0, max=8.0, step=0.1)
    router_execute: float = param(1.5, "device time of the router's forward", min=0.1, max=4.0, step=0.1)
    copy_execute: float = param(0.5, "device time of the D2H copy of the counts", min=0.0, max=4.0, step=0.1)
    exchange_submit: float = param(1.0, "host cost of launching the all-to-all", min=0.0, max=4.0, step=0.1)
    exchange_execute: float = param(2.5, "device time of the all-to-all", min=0.1, max=4.0, step=0.1)


def split_lists(params: Fig33Params, shared_expert: float) -> Program:
    """The host needs the counts: it waits for their copy, then launches the all-to-all."""
    return Program(
        (
            one(ROUTER, 1.0, params.router_execute),
            one(SHARED, 0.6 if shared_expert > 0 else 0.0, shared_expert, tone="alt"),
            Submit("D2H", 0.4, (Op("D2H", params.copy_execute, stream=1, after=(ROUTER,)),)),
            HostWait("stream.synchronize()", stream=1),
            one(EXCHANGE, params.exchange_submit, params.exchange_execute),
        ),
        (Op("previous GPU work", params.previous_work),),
        name="host split lists",
    )


def route_map(params: Fig33Params, shared_expert: float) -> Program:
    """The counts stay on the GPU: nothing on the host depends on them."""
    return Program(
        (
            one(ROUTER, 1.0, params.router_execute),
            one("map", 0.4, 0.4),
            one(SHARED, 0.6 if shared_expert > 0 else 0.0, shared_expert, tone="alt"),
            one("dispatch", params.exchange_submit, params.exchange_execute),
        ),
        (Op("previous GPU work", params.previous_work),),
        name="device route map",
    )


def model(params: Fig33Params) -> dict[str, list[dict[str, Any]]]:
    """Simulate Figure 33 (no cover), Figure 34 (covered) and the device route map."""
    return rows(
        {
            BARE: split_lists(params, 0.0),
            COVERED: split_lists(params, params.shared_expert),
            DEVICE: route_map(params, params.shared_expert),
        }
    )


def figure(result: Result):
    """Lanes of the three cases on one time axis."""
    return draw(
        result,
        [
            (BARE, "Figure 33: host split lists, the wait is exposed", "", ""),
            (COVERED, "Figure 34: host split lists, shared expert submitted before the wait", "", ""),
            (DEVICE, "Device route map (sketch of Section 8.5): no host wait", "", ""),
        ],
    )


def checks(result: Result) -> list[Check]:
    """Claims of both captions."""
    submitted = {p: box(result, p, "gpu_execute", EXCHANGE)["start"] for p in (BARE, COVERED)}
    wait = {p: total(boxes(result, p, "sync_wait")) for p in (BARE, COVERED, DEVICE)}
    idle = {p: total(boxes(result, p, "idle")) for p in (BARE, COVERED, DEVICE)}
    begins = {p: _launch(result, p, submitted[p]) for p in submitted}
    visible = {p: max(r["end"] for r in boxes(result, p, "sync_wait")) for p in (BARE, COVERED)}
    copied = {
        p: max((r["end"] for r in boxes(result, p, "gpu_execute") if r["label"] == "D2H"), default=visible[p])
        for p in visible
    }
    gaps = [r["end"] for r in boxes(result, BARE, "idle")]
    return [
        Check(
            "Figure 33: the GPU becomes idle until the host has the counts and submits the all-to-all",
            any(abs(end - submitted[BARE]) < EPSILON for end in gaps),
            f"idle {idle[BARE]:.2f}",
        ),
        Check(
            "The all-to-all is launched only after the counts are host-visible",
            all(begins[p] >= visible[p] - EPSILON and visible[p] >= copied[p] - EPSILON for p in begins),
            ", ".join(f"{p}: counts {visible[p]:.2f}, launch {begins[p]:.2f}" for p in begins),
        ),
        Check(
            "Figure 34: the shared expert closes the GPU bubble", idle[COVERED] < EPSILON, f"idle {idle[COVERED]:.2f}"
        ),
        Check(
            "Figure 34: the wait remains, and the all-to-all is not launched earlier",
            wait[COVERED] > EPSILON and begins[COVERED] >= begins[BARE] - EPSILON,
            f"wait {wait[COVERED]:.2f}; launch at {begins[COVERED]:.2f} against {begins[BARE]:.2f} without cover",
        ),
        Check(
            "Device route map: no host wait, and the GPU is not idle",
            not boxes(result, DEVICE, "sync_wait") and idle[DEVICE] < EPSILON,
            f"wait {wait[DEVICE]:.2f}, idle {idle[DEVICE]:.2f}",
        ),
    ]


def _launch(result: Result, panel: str, otherwise: float) -> float:
    """When the host begins to launch the all-to-all; a launch without host cost has no box."""
    return next((r["start"] for r in boxes(result, panel, "cpu_submit") if r["label"] == EXCHANGE), otherwise)


def interactive(params: Fig33Params) -> dict[str, Any]:
    """Scrubbable view: two tabs (host split lists, device route map), each with the shared-expert slider."""
    programs = {"split": split_lists(params, params.shared_expert), "map": route_map(params, params.shared_expert)}

    def cover(program: Program) -> dict[str, Any]:
        step = step_index(program, SHARED)
        return control(
            params, "shared_expert", "Shared-expert work before the wait",
            [
                {"timeline": "main", "path": ["steps", step, "ops", 0, "duration"], "scale": 1, "offset": 0},
                {"timeline": "main", "path": ["steps", step, "cost"], "if_positive": 0.6},
            ],
        )  # fmt: skip

    waits = {"type": "total", "metric": "wait", "label": "Host wait", "timeline": "main", "device": 0}
    bubble = {
        "type": "choice", "metric": "idle", "threshold": EPSILON, "label": "GPU bubble", "timeline": "main",
        "above": "The queue drains: the GPU is idle until the host receives the counts and submits the all-to-all.",
        "below": "Covered: the GPU remains busy while the host waits. The wait itself is still there.",
    }  # fmt: skip
    text = {
        "split": (
            "Host split lists",
            "Slide to zero to recover Figure 33; the marked value is Figure 34.",
            "launched only after the counts are host-visible",
            [bubble],
        ),
        "map": (
            "Device route map",
            "A sketch of the rowwise path: counts, offsets and dispatch input stay CUDA tensors.",
            "launched without waiting; its route values never leave the GPU",
            [],
        ),
    }
    return {
        "title": EXPERIMENT.title,
        "badge": "model · figure time units, order only",
        "layout": "tabs",
        "panels": [
            {
                "id": name,
                "title": text[name][0],
                "caption": text[name][1],
                "timelines": [view_timeline(program, lane_rows("headroom", "headroom", copies=name == "split"))],
                "cursor": params.previous_work + params.router_execute + params.copy_execute,
                "controls": [cover(program)],
                "readouts": [
                    *AT_CURSOR,
                    {"type": "text", "label": "All-to-all", "text": text[name][2]},
                    waits,
                    *text[name][3],
                ],
                "legend": ["cpu_submit", "gpu_execute", "idle", "sync_wait", "headroom"],
            }
            for name, program in programs.items()
        ],
    }


EXPERIMENT = Experiment(
    slug="fig33_where_it_waits",
    group="s08_sync_free",
    title="Where the all-to-all waits, and what covering the wait changes",
    claim="Split sizes that the host must see delay the all-to-all; "
    "independent work hides the GPU bubble but not the wait.",
    kind="conceptual",
    anchor="Section 8.4, Figures 33 and 34",
    params=Fig33Params,
    figure=figure,
    checks=checks,
    model=model,
    interactive=interactive,
)
