"""Figure 29: two ways the GPU runs out of queued work, slow submission and a host wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.core.params import Params, param
from workbench.models.headroom import queued_blocks
from workbench.models.submission import HostWait, HostWork, Program, Submit
from workbench.views.queue import (
    AT_CURSOR,
    EPSILON,
    block,
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
    waited_for,
)

SLOW, WAIT = "a", "b"
QUEUED_BEFORE_WAIT = 4


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
    curves = {"queued_blocks": queued_blocks}
    return rows({SLOW: slow_submission(params), WAIT: host_wait(params)}, curves)


def figure(result: Result):
    """Lanes and queued blocks of both panels."""
    return draw(
        result,
        [
            (
                SLOW,
                "(a) Submitting a block costs the CPU more than executing it costs the GPU",
                "queued_blocks",
                "queued blocks",
            ),
            (WAIT, "(b) The CPU blocks on a device value", "queued_blocks", "queued blocks"),
        ],
    )


def checks(result: Result) -> list[Check]:
    """Claims of the caption."""
    params = result.params
    labels = [f"b{i + 1}" for i in range(params.blocks)]
    waited = waited_for(result, SLOW)
    first = labels.index(waited[0]) if waited else None
    behind_lead = (
        box(result, SLOW, "gpu_execute", "b1")["start"] > box(result, SLOW, "cpu_submit", "b1")["end"] + EPSILON
    )
    idle = [r["end"] - r["start"] for r in boxes(result, SLOW, "idle")]
    wait = box(result, WAIT, "sync_wait", "device value")
    gap = total(boxes(result, WAIT, "idle"))
    resumed = box(result, WAIT, "cpu_submit", f"b{QUEUED_BEFORE_WAIT + 1}")
    submitted_meanwhile = [
        r
        for r in boxes(result, WAIT, "cpu_submit")
        if wait["start"] < r["end"] - EPSILON and r["start"] < wait["end"] - EPSILON
    ]
    idle_until = [r["end"] for r in boxes(result, WAIT, "idle")]
    queued = boxes(result, WAIT, "queued_blocks")
    at_resume = max((r["value_start"] for r in queued if wait["end"] <= r["start"] < resumed["end"]), default=0)
    rebuilt = max((r["value_start"] for r in queued if r["start"] >= resumed["end"]), default=0)
    return [
        Check(
            "(a) The queued lead is spent, then every later block waits for its own submission",
            behind_lead and first is not None and waited == labels[first:],
            f"the GPU waits for {', '.join(waited) or 'no block'}",
        ),
        Check(
            "(a) The GPU idles a little before every block: by submission minus execution once the lead is spent",
            bool(
                len(idle) > 1 and all(abs(v - (params.submit_cost - params.execute_cost)) < EPSILON for v in idle[1:])
            ),
            f"idle {', '.join(f'{v:.2f}' for v in idle) or 'never'}",
        ),
        Check(
            "(b) Submission stops entirely while the CPU blocks",
            wait["end"] > wait["start"] and not submitted_meanwhile,
            f"{len(submitted_meanwhile)} submissions in a wait of {wait['end'] - wait['start']:.2f}",
        ),
        Check(
            "(b) The GPU finishes the queued work and sits idle until the host resumes",
            gap > EPSILON and any(abs(v - resumed["end"]) < EPSILON for v in idle_until),
            f"idle {gap:.2f}",
        ),
        Check(
            "(b) The host must then rebuild its lead",
            at_resume == 0 and rebuilt >= 1,
            f"queued blocks: {at_resume:.0f} when it resumes, then up to {rebuilt:.0f}",
        ),
    ]


def interactive(params: Fig29Params) -> dict[str, Any]:
    """Scrubbable view of both panels."""
    slow, wait = slow_submission(params), host_wait(params)

    def costs(program: Program, names: list[str], kind: type = Submit) -> list[dict[str, Any]]:
        at = [step_index(program, name, kind) for name in names]
        return [{"timeline": "main", "path": ["steps", i, "cost"], "scale": 1, "offset": 0} for i in at]

    wait_step = step_index(wait, "device value", HostWait)
    resumed = step_index(wait, f"b{QUEUED_BEFORE_WAIT + 1}")
    ops = [op.label for step in wait.steps for op in getattr(step, "ops", ())]
    marks = [
        {"anchor": {"step": wait_step}, "edge": "start", "row": 0, "text": "1"},
        {"anchor": {"op": ops.index(f"b{QUEUED_BEFORE_WAIT}")}, "edge": "end", "row": 1, "text": "2"},
        {"anchor": {"step": wait_step}, "edge": "end", "row": 0, "text": "3"},
        {"anchor": {"step": resumed}, "edge": "end", "row": 0, "text": "4"},
    ]
    every_block = [f"b{i + 1}" for i in range(params.blocks)]
    slow_control = control(params, "submit_cost", "Submission cost per block", costs(slow, every_block))
    read_control = control(
        params, "read_cost", "Host time after the value arrives", costs(wait, ["read"], HostWork), ours=True
    )
    slow_caption = "A block starts when its submission is complete and the GPU is free; q blocks were queued before."
    wait_caption = (
        "1 the CPU blocks on a device value; 2 the GPU has finished the queued work; 3 the value has been produced; "
        "4 the host has resumed and rebuilds its lead."
    )
    before_b4 = (params.lead_blocks + 3) * params.execute_cost + 0.1
    panels = [
        _panel(SLOW, "(a) Slow submission", slow_caption, slow, slow_control, [], before_b4),
        _panel(WAIT, "(b) Host wait", wait_caption, wait, read_control, marks, 5.0 * params.execute_cost),
    ]
    return {"title": EXPERIMENT.title, "badge": "model · figure time units", "layout": "stack", "panels": panels}


def _panel(
    name: str, title: str, caption: str, program: Program, slider: dict[str, Any], marks: list[Any], cursor: float
) -> dict[str, Any]:
    readouts = [
        *AT_CURSOR,
        {"type": "queued_blocks", "label": "Queued blocks", "timeline": "main"},
        {"type": "total", "metric": "idle", "label": "GPU idle in all", "timeline": "main", "device": 0},
    ]
    return {
        "id": name,
        "title": title,
        "caption": caption,
        "timelines": [view_timeline(program, lane_rows("queued_blocks", "queued blocks"), marks)],
        "cursor": cursor,
        "controls": [slider],
        "readouts": readouts,
        "legend": ["cpu_submit", "gpu_execute", "idle", "sync_wait"],
    }


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
