"""Figure 30: submission headroom is the queued, not yet executed device work.

Only the 2.00 and 0.70 of k4-k7 are printed in the report. Every other default is ours, chosen so that the caption
holds: in panel (b) the backward inverts the forward's imbalance exactly, so the cycle repeats.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.core.params import Params, param
from workbench.models.submission import Op, Program
from workbench.views import queue
from workbench.views.queue import EPSILON, Panel, block, one

KERNELS, MICROBATCH = "a", "b"
CURVE = "headroom", "headroom H(t)"
TITLES = {
    KERNELS: "(a) Cheap submissions of large kernels build the lead, host-heavy small ones spend it",
    MICROBATCH: "(b) One microbatch: forward F drains the lead, backward B rebuilds it for the next forward F′",
}
LAYERS = 4
LARGE, SMALL = ("k1", "k2", "k3"), ("k4", "k5", "k6", "k7")


@dataclass(frozen=True, kw_only=True)
class Fig30Params(Params):
    """Panel (a): `small_*` are the report's. Panel (b) and the large kernels are ours."""

    small_submit_cost: float = param(2.0, "host cost of each of k4-k7", min=0.1, max=3.0, step=0.05)
    small_execute_cost: float = param(0.7, "device time of each of k4-k7", min=0.1, max=3.0, step=0.05)
    large_submit_cost: float = param(0.5, "host cost of each of k1-k3 (ours)", min=0.1, max=3.0, step=0.05)
    large_execute_cost: float = param(2.0, "device time of each of k1-k3 (ours)", min=0.1, max=4.0, step=0.05)
    carried_lead: float = param(5.0, "lead carried in from the previous backward (ours)", min=0.0, max=10.0, step=0.25)
    forward_submit_cost: float = param(2.0, "host cost of one forward layer (ours)", min=0.25, max=4.0, step=0.05)
    forward_execute_cost: float = param(1.0, "device time of one forward layer (ours)", min=0.25, max=4.0, step=0.05)
    backward_submit_cost: float = param(1.0, "host cost of one backward layer (ours)", min=0.25, max=4.0, step=0.05)
    backward_execute_cost: float = param(2.0, "device time of one backward layer (ours)", min=0.25, max=4.0, step=0.05)


def kernels(params: Fig30Params) -> Program:
    """Panel (a): three cheap submissions of large kernels, then four host-heavy submissions of small ones."""
    steps = [one(k, params.large_submit_cost, params.large_execute_cost) for k in LARGE]
    steps += [one(k, params.small_submit_cost, params.small_execute_cost) for k in SMALL]
    return Program(tuple(steps), name="kernels")


def microbatch(params: Fig30Params) -> Program:
    """Panel (b): forward and backward of one microbatch, then the next microbatch's forward."""

    def forward(prime: str) -> list[Any]:
        return [one(f"F{i + 1}{prime}", params.forward_submit_cost, params.forward_execute_cost) for i in range(LAYERS)]

    backward = [
        one(f"B{i + 1}", params.backward_submit_cost, params.backward_execute_cost, tone="alt")
        for i in reversed(range(LAYERS))
    ]
    steps = block("forward", *forward("")) + block("backward", *backward) + block("next forward", *forward("′"))
    return Program(tuple(steps), (Op("previous backward", params.carried_lead, tone="alt"),), name="microbatch")


def model(params: Fig30Params) -> dict[str, list[dict[str, Any]]]:
    """Simulate both panels."""
    return queue.rows({KERNELS: kernels(params), MICROBATCH: microbatch(params)})


def figure(result: Result):
    """Lanes and headroom of both panels."""
    return queue.draw(result, TITLES, *CURVE)


def _lead(panel: Panel, time: float, side: str = "start") -> float:
    """Headroom at `time`, after a jump there; with ``end`` as its side, just before."""
    return next((r[f"value_{side}"] for r in panel.of("headroom") if abs(r[side] - time) < EPSILON), 0.0)


def checks(result: Result) -> list[Check]:
    """Claims of the caption."""
    a, b = Panel(result, KERNELS), Panel(result, MICROBATCH)
    done = {r["label"]: r["end"] for panel in (a, b) for r in panel.of("cpu_submit")}
    names, forward = (*LARGE, *SMALL), [f"F{i + 1}" for i in range(LAYERS)]
    lead = {name: _lead(a, done[name]) for name in names}
    waited, waited_b = a.waited_for(), b.waited_for()
    before = [_lead(b, done[name], "end") for name in forward]
    carried_in = _lead(b, 0.0)
    rebuilt = _lead(b, b.of("cpu_submit")[2 * LAYERS]["start"])
    backward_end = b.box("gpu_execute", "B1")["end"]

    def idle_where_zero(panel: Panel, name: str) -> Check:
        same, differ = panel.idle_matches_zero()
        value = f"idle and zero headroom differ for {differ:.3g} figure units"
        return Check(f"({name}) The GPU is idle exactly where headroom is zero", same, value)

    return [
        Check(
            "(a) Cheap submissions of large kernels k1-k3 build the lead",
            lead["k1"] < lead["k2"] < lead["k3"],
            _numbers(lead, LARGE),
        ),
        Check(
            "(a) Host-heavy submissions of small kernels k4-k6 spend the lead faster than it is replaced",
            all(lead[after] < lead[name] - EPSILON for name, after in pairwise(names[2:-1])),
            _numbers(lead, names[2:-1]),
        ),
        Check(
            "(a) After the lead reaches zero the GPU waits for k7's submission, and for that one alone",
            waited == ["k7"] and _lead(a, done["k7"], "end") == 0,
            f"the GPU waits for {', '.join(waited) or 'no kernel'}",
        ),
        idle_where_zero(a, "a"),
        Check(
            "(b) Forward drains the lead layer by layer",
            all(late < early for early, late in pairwise(before)),
            ", ".join(f"{v:.2f}" for v in before),
        ),
        Check(
            "(b) The lead grazes zero just as the last forward submission arrives, and the GPU never idles",
            abs(before[-1]) < EPSILON and not waited_b,
            f"headroom {before[-1]:.2f} before {forward[-1]}; the GPU waits for {', '.join(waited_b) or 'no kernel'}",
        ),
        Check(
            "(b) Backward rebuilds the lead that the next forward will spend",
            rebuilt >= carried_in - EPSILON and rebuilt > 0,
            f"{rebuilt:.2f} against {carried_in:.2f} carried in",
        ),
        Check(
            "(b) The CPU already submits the next forward while the GPU executes the backward",
            done["F1′"] < backward_end - EPSILON,
            f"F1′ submitted at {done['F1′']:.2f}, backward ends at {backward_end:.2f}",
        ),
        idle_where_zero(b, "b"),
    ]


def _numbers(lead: dict[str, float], names: tuple[str, ...]) -> str:
    return ", ".join(f"{k} {lead[k]:.2f}" for k in names)


def interactive(params: Fig30Params) -> dict[str, Any]:
    """Scrubbable view: one panel at a time, each with one submission cost to change."""
    in_a, in_b = kernels(params), microbatch(params)
    small = queue.costs(in_a, SMALL)
    forward = queue.costs(in_b, [f"F{i + 1}{prime}" for prime in ("", "′") for i in range(LAYERS)])
    lead = {"type": "headroom", "label": "Headroom at the cursor", "timeline": "main"}
    shared = {"readouts": [*queue.AT_CURSOR, lead, queue.IDLE_IN_ALL], "legend": [*queue.LEGEND, "headroom"]}
    panels = [
        {
            "id": KERNELS,
            "title": "(a) Kernels",
            "caption": "k1-k3 build the lead, k4-k7 spend it; then the GPU waits for k7. "
            "Only k4-k7 are the report's values.",
            "timelines": [queue.view_timeline(in_a, *CURVE)],
            "cursor": 9.0,
            "controls": [queue.control(params, "small_submit_cost", "Submission cost of k4-k7", small)],
            **shared,
        },
        {
            "id": MICROBATCH,
            "title": "(b) One microbatch",
            "caption": "Forward drains the lead carried in; backward rebuilds it. All values of this panel are ours.",
            "timelines": [queue.view_timeline(in_b, *CURVE)],
            "cursor": 8.0,
            "controls": [
                queue.control(params, "forward_submit_cost", "Submission cost of a forward layer", forward, ours=True)
            ],
            **shared,
        },
    ]
    return queue.view(EXPERIMENT.title, panels, "tabs")


EXPERIMENT = Experiment(
    slug="fig30_submission_headroom",
    group="s08_sync_free",
    title="Submission headroom: the work already waiting on the GPU",
    claim="Headroom jumps by a kernel's device time when its submission completes, drains at unit rate, and the GPU is "
    "idle exactly while it is zero.",
    kind="conceptual",
    anchor="Section 8.1, Figure 30",
    params=Fig30Params,
    figure=figure,
    checks=checks,
    model=model,
    interactive=interactive,
)
