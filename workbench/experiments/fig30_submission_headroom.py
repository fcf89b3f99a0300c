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
from workbench.views.queue import (
    AT_CURSOR,
    EPSILON,
    block,
    boxes,
    control,
    draw,
    idle_matches_zero,
    lane_rows,
    one,
    rows,
    step_index,
    view_timeline,
    waited_for,
)

KERNELS, MICROBATCH = "a", "b"
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
    return rows({KERNELS: kernels(params), MICROBATCH: microbatch(params)})


def figure(result: Result):
    """Lanes and headroom of both panels."""
    panels = [
        (KERNELS, "(a) Cheap submissions of large kernels build the lead, host-heavy small ones spend it"),
        (MICROBATCH, "(b) One microbatch: forward F drains the lead, backward B rebuilds it for the next forward F′"),
    ]
    return draw(result, [(panel, title, "headroom", "headroom H(t)") for panel, title in panels])


def _after(result: Result, panel: str, time: float) -> float:
    """Headroom at `time`, after a jump there."""
    return next((r["value_start"] for r in boxes(result, panel, "headroom") if abs(r["start"] - time) < EPSILON), 0.0)


def _before(result: Result, panel: str, time: float) -> float:
    """Headroom just before `time`."""
    return next((r["value_end"] for r in boxes(result, panel, "headroom") if abs(r["end"] - time) < EPSILON), 0.0)


def checks(result: Result) -> list[Check]:
    """Claims of the caption."""
    done = {r["label"]: r["end"] for p in (KERNELS, MICROBATCH) for r in boxes(result, p, "cpu_submit")}
    lead = {k: _after(result, KERNELS, done[k]) for k in (*LARGE, *SMALL)}
    names = (*LARGE, *SMALL)
    built = lead["k1"] < lead["k2"] < lead["k3"]
    spent = all(lead[b] < lead[a] - EPSILON for a, b in pairwise(names[2:-1]))
    waited = waited_for(result, KERNELS)
    same_a, differ_a = idle_matches_zero(result, KERNELS)
    same_b, differ_b = idle_matches_zero(result, MICROBATCH)
    forward = [f"F{i + 1}" for i in range(LAYERS)]
    before = [_before(result, MICROBATCH, done[name]) for name in forward]
    waited_b = waited_for(result, MICROBATCH)
    forward_begins = boxes(result, MICROBATCH, "cpu_submit")[2 * LAYERS]["start"]
    carried_in = _after(result, MICROBATCH, 0.0)
    rebuilt = _after(result, MICROBATCH, forward_begins)
    backward_end = next(r["end"] for r in boxes(result, MICROBATCH, "gpu_execute") if r["label"] == "B1")
    return [
        Check("(a) Cheap submissions of large kernels k1-k3 build the lead", built, _numbers(lead, LARGE)),
        Check(
            "(a) Host-heavy submissions of small kernels k4-k6 spend the lead faster than it is replaced",
            spent,
            _numbers(lead, names[2:-1]),
        ),
        Check(
            "(a) After the lead reaches zero the GPU waits for k7's submission, and for that one alone",
            waited == ["k7"] and _before(result, KERNELS, done["k7"]) == 0,
            f"the GPU waits for {', '.join(waited) or 'no kernel'}",
        ),
        Check(
            "(a) The GPU is idle exactly where headroom is zero",
            same_a,
            f"idle and zero headroom differ for {differ_a:.3g} figure units",
        ),
        Check(
            "(b) Forward drains the lead layer by layer",
            all(b < a for a, b in pairwise(before)),
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
        Check(
            "(b) The GPU is idle exactly where headroom is zero",
            same_b,
            f"idle and zero headroom differ for {differ_b:.3g} figure units",
        ),
    ]


def _numbers(lead: dict[str, float], names: tuple[str, ...]) -> str:
    return ", ".join(f"{k} {lead[k]:.2f}" for k in names)


def interactive(params: Fig30Params) -> dict[str, Any]:
    """Scrubbable view: one panel at a time, each with one submission cost to change."""
    programs = {KERNELS: kernels(params), MICROBATCH: microbatch(params)}

    def costs(panel: str, names: list[str]) -> list[dict[str, Any]]:
        at = [step_index(programs[panel], name) for name in names]
        return [{"timeline": "main", "path": ["steps", i, "cost"], "scale": 1, "offset": 0} for i in at]

    forward = [f"F{i + 1}{prime}" for prime in ("", "′") for i in range(LAYERS)]
    controls = {
        KERNELS: control(params, "small_submit_cost", "Submission cost of k4-k7", costs(KERNELS, list(SMALL))),
        MICROBATCH: control(
            params, "forward_submit_cost", "Submission cost of a forward layer", costs(MICROBATCH, forward), ours=True
        ),
    }
    about = {
        KERNELS: (
            "(a) Kernels",
            "k1-k3 build the lead, k4-k7 spend it; then the GPU waits for k7. Only k4-k7 are the report's values.",
        ),
        MICROBATCH: (
            "(b) One microbatch",
            "Forward drains the lead carried in; backward rebuilds it. All values of this panel are ours.",
        ),
    }
    cursors = {KERNELS: 9.0, MICROBATCH: 8.0}
    return {
        "title": EXPERIMENT.title,
        "badge": "model · figure time units",
        "layout": "tabs",
        "panels": [
            {
                "id": panel,
                "title": about[panel][0],
                "caption": about[panel][1],
                "timelines": [view_timeline(program, lane_rows("headroom", "headroom H(t)"))],
                "cursor": cursors[panel],
                "controls": [controls[panel]],
                "readouts": [
                    *AT_CURSOR,
                    {"type": "headroom", "label": "Headroom at the cursor", "timeline": "main"},
                    {"type": "total", "metric": "idle", "label": "GPU idle in all", "timeline": "main", "device": 0},
                ],
                "legend": ["cpu_submit", "gpu_execute", "idle", "headroom"],
            }
            for panel, program in programs.items()
        ],
    }


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
