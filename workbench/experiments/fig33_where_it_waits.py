"""Figures 33 and 34: where the all-to-all waits for route counts, and what covering that wait does not change.

The report draws order only: every duration here is ours. The device route map panel is a sketch of the rowwise path of
Section 8.5, not a figure of the report. Copies count as device work, so GPU idle starts when the copy ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.core.params import Params, param
from workbench.models.submission import HostWait, Op, Program, Submit
from workbench.views import queue
from workbench.views.queue import EPSILON, Panel, one

BARE, COVERED, DEVICE = "figure 33", "figure 34", "device route map"
TITLES = {
    BARE: "Figure 33: host split lists, the wait is exposed",
    COVERED: "Figure 34: host split lists, shared expert submitted before the wait",
    DEVICE: "Device route map (sketch of Section 8.5): no host wait",
}
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
    return queue.rows(
        {
            BARE: split_lists(params, 0.0),
            COVERED: split_lists(params, params.shared_expert),
            DEVICE: route_map(params, params.shared_expert),
        }
    )


def figure(result: Result):
    """Lanes of the three cases on one time axis."""
    return queue.draw(result, TITLES)


def checks(result: Result) -> Iterator[Check]:
    """Claims of both captions."""
    bare, covered, device = (Panel(result, name) for name in TITLES)
    split = {BARE: bare, COVERED: covered}
    begins = {name: _launch(panel) for name, panel in split.items()}
    visible = {name: max(r["end"] for r in panel.of("sync_wait")) for name, panel in split.items()}
    copied = {
        name: max((r["end"] for r in panel.of("gpu_execute") if r["label"] == "D2H"), default=visible[name])
        for name, panel in split.items()
    }
    starts = bare.box("gpu_execute", EXCHANGE)["start"]
    yield Check("Figure 33: the GPU becomes idle until the host has the counts and submits the all-to-all",
                any(abs(gap["end"] - starts) < EPSILON for gap in bare.of("idle")),
                f"idle {bare.total('idle'):.2f}")  # fmt: skip
    yield Check("The all-to-all is launched only after the counts are host-visible",
                all(begins[p] >= visible[p] - EPSILON and visible[p] >= copied[p] - EPSILON for p in split),
                ", ".join(f"{p}: counts {visible[p]:.2f}, launch {begins[p]:.2f}" for p in split))  # fmt: skip
    yield Check("Figure 34: the shared expert closes the GPU bubble", covered.total("idle") < EPSILON,
                f"idle {covered.total('idle'):.2f}")  # fmt: skip
    yield Check(
        "Figure 34: the wait remains, and the all-to-all is not launched earlier",
        covered.total("sync_wait") > EPSILON and begins[COVERED] >= begins[BARE] - EPSILON,
        f"wait {covered.total('sync_wait'):.2f}; "
        f"launch at {begins[COVERED]:.2f} against {begins[BARE]:.2f} without cover",
    )
    yield Check("Device route map: no host wait, and the GPU is not idle",
                not device.of("sync_wait") and device.total("idle") < EPSILON,
                f"wait {device.total('sync_wait'):.2f}, idle {device.total('idle'):.2f}")  # fmt: skip


def _launch(panel: Panel) -> float:
    """When the host begins to launch the all-to-all; a launch without host cost has no box, its work starts then."""
    launches = [r for r in panel.of("cpu_submit") if r["label"] == EXCHANGE]
    return (launches or [panel.box("gpu_execute", EXCHANGE)])[0]["start"]


def interactive(params: Fig33Params) -> dict[str, Any]:
    """Scrubbable view: two tabs (host split lists, device route map), each with the shared-expert slider."""
    bubble = {
        "type": "choice", "metric": "idle", "threshold": EPSILON, "label": "GPU bubble", "timeline": "main",
        "above": "The queue drains: the GPU is idle until the host receives the counts and submits the all-to-all.",
        "below": "Covered: the GPU remains busy while the host waits. The wait itself is still there.",
    }  # fmt: skip

    def panel(name: str, title: str, caption: str, program: Program, launch: str, *more: Any) -> dict[str, Any]:
        step = queue.step_index(program, SHARED)
        sets = [
            {"timeline": "main", "path": ["steps", step, "ops", 0, "duration"], "scale": 1, "offset": 0},
            {"timeline": "main", "path": ["steps", step, "cost"], "if_positive": 0.6},
        ]
        all_to_all = {"type": "text", "label": "All-to-all", "text": launch}
        waits = {"type": "total", "metric": "wait", "label": "Host wait", "timeline": "main", "device": 0}
        return {
            "id": name,
            "title": title,
            "caption": caption,
            "timelines": [queue.view_timeline(program, "headroom", "headroom", copies=name == "split")],
            "cursor": params.previous_work + params.router_execute + params.copy_execute,
            "controls": [queue.control(params, "shared_expert", "Shared-expert work before the wait", sets)],
            "readouts": [*queue.AT_CURSOR, all_to_all, waits, *more],
            "legend": [*queue.LEGEND, "sync_wait", "headroom"],
        }

    panels = [
        panel(
            "split",
            "Host split lists",
            "Slide to zero to recover Figure 33; the marked value is Figure 34.",
            split_lists(params, params.shared_expert),
            "launched only after the counts are host-visible",
            bubble,
        ),
        panel(
            "map",
            "Device route map",
            "A sketch of the rowwise path: counts, offsets and dispatch input stay CUDA tensors.",
            route_map(params, params.shared_expert),
            "launched without waiting; its route values never leave the GPU",
        ),
    ]
    return queue.view(EXPERIMENT.title, panels, "tabs", note=", order only")


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
