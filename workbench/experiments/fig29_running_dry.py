"""Figure 29: two ways the GPU runs out of queued work, slow submission and a host wait."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.core.params import Params, param
from workbench.models.headroom import queued_blocks
from workbench.models.submission import HostWait, HostWork, Program
from workbench.views import queue
from workbench.views.queue import EPSILON, Panel, block, one

SLOW, WAIT = "a", "b"
QUEUED_BEFORE_WAIT = 4
CURVE = "queued_blocks", "queued blocks"
TITLES = {
    SLOW: "(a) Submitting a block costs the CPU more than executing it costs the GPU",
    WAIT: "(b) The CPU blocks on a device value",
}


@dataclass(frozen=True, kw_only=True)
class Fig29Params(Params):
    """Panel (a) has the report's proportions (1.55, 1.00, eight blocks); its lead and all of panel (b) are ours."""

    submit_cost: float = param(1.55, "host cost of one block's submission, panel (a)", min=0.2, max=3.0, step=0.05)
    execute_cost: float = param(1.0, "device time of one block", min=0.2, max=3.0, step=0.05)
    blocks: int = param(8, "blocks submitted in the drawn span", min=1, max=24, step=1)
    lead_blocks: int = param(3, "blocks already queued at time zero, panel (a) (ours)", min=0, max=8, step=1)
    wait_submit_cost: float = param(
        0.5, "host cost of one block's submission, panel (b) (ours)", min=0.1, max=2.0, step=0.05
    )
    read_cost: float = param(
        0.6, "host time from the value's arrival to the next submission (ours)", min=0.0, max=3.0, step=0.1
    )
    value_block: int = param(4, "block whose device value the host waits for, panel (b) (ours)", min=1, max=4, step=1)


def slow_submission(params: Fig29Params) -> Program:
    """Panel (a). Blocks queued before time zero are submissions without host cost, so that they count as blocks."""
    steps = [
        s for i in range(params.lead_blocks) for s in block(f"q{i + 1}", one(f"q{i + 1}", 0.0, params.execute_cost))
    ]
    for i in range(params.blocks):
        steps += block(f"b{i + 1}", one(f"b{i + 1}", params.submit_cost, params.execute_cost))
    return Program(tuple(steps), name="slow submission")


def host_wait(params: Fig29Params) -> Program:
    """Panel (b): four blocks are queued, the host waits for one block's value, reads it, and submits four more."""
    cost, duration = params.wait_submit_cost, params.execute_cost
    steps = []
    for i in range(2 * QUEUED_BEFORE_WAIT):
        if i == QUEUED_BEFORE_WAIT:
            steps += [HostWait("device value", op=f"b{params.value_block}"), HostWork("read", params.read_cost)]
        steps += block(f"b{i + 1}", one(f"b{i + 1}", cost, duration))
    return Program(tuple(steps), name="host wait")


def model(params: Fig29Params) -> dict[str, list[dict[str, Any]]]:
    """Simulate both panels."""
    return queue.rows({SLOW: slow_submission(params), WAIT: host_wait(params)}, {"queued_blocks": queued_blocks})


def figure(result: Result):
    """Lanes and queued blocks of both panels."""
    return queue.draw(result, TITLES, *CURVE)


def checks(result: Result) -> Iterator[Check]:
    """Claims of the caption."""
    params, a, b = result.params, Panel(result, SLOW), Panel(result, WAIT)
    labels = [f"b{i + 1}" for i in range(params.blocks)]
    waited = a.waited_for()
    behind_lead = a.box("gpu_execute", "b1")["start"] > a.box("cpu_submit", "b1")["end"] + EPSILON
    one_by_one = behind_lead and waited and waited == labels[labels.index(waited[0]) :]
    idle = [r["end"] - r["start"] for r in a.of("idle")]
    excess = params.submit_cost - params.execute_cost
    wait = b.box("sync_wait", "device value")
    resumed = b.box("cpu_submit", f"b{QUEUED_BEFORE_WAIT + 1}")
    submits = b.of("cpu_submit")
    meanwhile = sum(wait["start"] < r["end"] - EPSILON and r["start"] < wait["end"] - EPSILON for r in submits)
    ends_on_resume = any(abs(r["end"] - resumed["end"]) < EPSILON for r in b.of("idle"))
    queued = b.of("queued_blocks")
    at_resume = max((r["value_start"] for r in queued if wait["end"] <= r["start"] < resumed["end"]), default=0)
    rebuilt = max((r["value_start"] for r in queued if r["start"] >= resumed["end"]), default=0)
    yield Check("(a) The queued lead is spent, then every later block waits for its own submission", bool(one_by_one),
                f"the GPU waits for {', '.join(waited) or 'no block'}")  # fmt: skip
    yield Check("(a) The GPU idles a little before every block: by submission minus execution once the lead is spent",
                len(idle) > 1 and all(abs(v - excess) < EPSILON for v in idle[1:]),
                f"idle {', '.join(f'{v:.2f}' for v in idle) or 'never'}")  # fmt: skip
    yield Check("(b) Submission stops entirely while the CPU blocks", wait["end"] > wait["start"] and not meanwhile,
                f"{meanwhile} submissions in a wait of {wait['end'] - wait['start']:.2f}")  # fmt: skip
    yield Check("(b) The GPU finishes the queued work and sits idle until the host resumes",
                b.total("idle") > EPSILON and ends_on_resume, f"idle {b.total('idle'):.2f}")  # fmt: skip
    yield Check("(b) The host must then rebuild its lead", at_resume == 0 and rebuilt >= 1,
                f"queued blocks: {at_resume:.0f} when it resumes, then up to {rebuilt:.0f}")  # fmt: skip


def interactive(params: Fig29Params) -> dict[str, Any]:
    """Scrubbable view of both panels."""
    slow, wait = slow_submission(params), host_wait(params)
    wait_step = queue.step_index(wait, "device value", HostWait)
    resumed = queue.step_index(wait, f"b{QUEUED_BEFORE_WAIT + 1}")
    ops = [op.label for step in wait.steps for op in getattr(step, "ops", ())]
    marks = [
        {"anchor": {"step": wait_step}, "edge": "start", "row": 0, "text": "1"},
        {"anchor": {"op": ops.index(f"b{QUEUED_BEFORE_WAIT}")}, "edge": "end", "row": 1, "text": "2"},
        {"anchor": {"step": wait_step}, "edge": "end", "row": 0, "text": "3"},
        {"anchor": {"step": resumed}, "edge": "end", "row": 0, "text": "4"},
    ]
    every_block = queue.costs(slow, [f"b{i + 1}" for i in range(params.blocks)])
    read = queue.costs(wait, ["read"], HostWork)
    queued = {"type": "queued_blocks", "label": "Queued blocks", "timeline": "main"}
    shared = {"readouts": [*queue.AT_CURSOR, queued, queue.IDLE_IN_ALL], "legend": [*queue.LEGEND, "sync_wait"]}
    panels = [
        {
            "id": SLOW,
            "title": "(a) Slow submission",
            "caption": "A block starts when its submission is complete and the GPU is free; "
            "q blocks were queued before.",
            "timelines": [queue.view_timeline(slow, *CURVE)],
            "cursor": (params.lead_blocks + 3) * params.execute_cost + 0.1,
            "controls": [queue.control(params, "submit_cost", "Submission cost per block", every_block)],
            **shared,
        },
        {
            "id": WAIT,
            "title": "(b) Host wait",
            "caption": "1 the CPU blocks on a device value; 2 the GPU has finished the queued work; "
            "3 the value has been produced; 4 the host has resumed and rebuilds its lead.",
            "timelines": [queue.view_timeline(wait, *CURVE, marks=marks)],
            "cursor": 5.0 * params.execute_cost,
            "controls": [queue.control(params, "read_cost", "Host time after the value arrives", read, ours=True)],
            **shared,
        },
    ]
    return queue.view(EXPERIMENT.title, panels)


EXPERIMENT = Experiment(
    slug="fig29_running_dry",
    group="s08_sync_free",
    title="Two ways the GPU runs out of queued work",
    claim="A GPU runs dry when blocks are submitted more slowly than they execute, "
    "or when the host blocks on a device value.",
    kind="conceptual",
    anchor="Section 8, Figure 29",
    params=Fig29Params,
    figure=figure,
    checks=checks,
    model=model,
    interactive=interactive,
)
