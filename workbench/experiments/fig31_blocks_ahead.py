"""Figure 31: a synchronization point in every block stops the CPU from running ahead.

The report draws order only: every duration here is ours. The dense lead grows as long as the program does; it is three
in the drawn span of five blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.core.params import Params, param
from workbench.models.headroom import blocks_ahead, device_headroom
from workbench.models.submission import HostWait, Op, Program, Submit, program_to_json
from workbench.views.queue import EPSILON, block, box, boxes, control, draw, lane_rows, one, rows, step_index, total

DENSE, ROUTED = "dense", "routed"


@dataclass(frozen=True, kw_only=True)
class Fig31Params(Params):
    """All values are ours; the report draws order only."""

    submit_cost: float = param(1.0, "host cost of submitting one block", min=0.1, max=4.0, step=0.05)
    execute_cost: float = param(3.0, "device time of one block", min=0.5, max=6.0, step=0.05)
    blocks: int = param(5, "blocks in the drawn span", min=2, max=16, step=1)
    sync_every: int = param(1, "a synchronization point in every n-th block of the routed model", min=1, max=16, step=1)


def dense(params: Fig31Params) -> Program:
    """Every block is one submission; nothing waits."""
    steps = []
    for i in range(params.blocks):
        steps += block(f"Block {i}", Submit(f"B{i}", params.submit_cost, (Op(f"Block {i}", params.execute_cost),)))
    return Program(tuple(steps), name="dense")


def routed(params: Fig31Params) -> Program:
    """Half a block is submitted, the host waits until the GPU has done it, then the rest is submitted."""
    cost, duration = params.submit_cost / 2, params.execute_cost / 2
    steps = []
    for i in range(params.blocks):
        head, rest = f"{i} route", f"{i} rest"
        wait = [HostWait(f"sync {i}", op=head)] if (i + 1) % params.sync_every == 0 else []
        steps += block(f"Block {i}", one(head, cost, duration), *wait, one(rest, cost, duration, tone="alt"))
    return Program(tuple(steps), name="routed")


def model(params: Fig31Params) -> dict[str, list[dict[str, Any]]]:
    """Simulate both timelines."""
    curves = {"blocks_ahead": blocks_ahead, "headroom": device_headroom}
    return rows({DENSE: dense(params), ROUTED: routed(params)}, curves)


def figure(result: Result):
    """Lanes and blocks ahead of both timelines."""
    return draw(
        result,
        [
            (DENSE, "Dense model", "blocks_ahead", "blocks ahead"),
            (ROUTED, "MoE model, a sync point in every block", "blocks_ahead", "blocks ahead"),
        ],
    )


def checks(result: Result) -> list[Check]:
    """Claims of the caption."""
    params = result.params
    ahead = {p: max(r["value_start"] for r in boxes(result, p, "blocks_ahead")) for p in (DENSE, ROUTED)}
    headroom = max(r["value_start"] for r in boxes(result, ROUTED, "headroom"))
    dense_idle, routed_idle = (total(boxes(result, p, "idle")) for p in (DENSE, ROUTED))
    waits = boxes(result, ROUTED, "sync_wait")
    late = [
        w["label"]
        for w in waits
        if abs(w["end"] - max(w["start"], box(result, ROUTED, "gpu_execute", f"{w['label'].split()[1]} route")["end"]))
        > EPSILON
        or box(result, ROUTED, "cpu_submit", f"{w['label'].split()[1]} rest")["start"] < w["end"] - EPSILON
    ]
    return [
        Check("Dense: the CPU runs three blocks ahead in the drawn span", ahead[DENSE] == 3, f"{ahead[DENSE]:.0f}"),
        Check("Dense: the GPU always finds its next operation waiting", dense_idle < EPSILON, f"idle {dense_idle:.2f}"),
        Check("MoE: the CPU is never more than one block ahead", ahead[ROUTED] <= 1, f"{ahead[ROUTED]:.0f}"),
        Check(
            "MoE: the CPU waits until the GPU reaches the matching point, then submits the rest of the block",
            len(waits) == params.blocks and not late and all(w["end"] > w["start"] for w in waits),
            f"{len(waits)} waits in {params.blocks} blocks, {len(late)} out of order",
        ),
        Check(
            "MoE: headroom cannot accumulate beyond one block",
            headroom <= params.execute_cost + EPSILON,
            f"at most {headroom:.2f}, a block is {params.execute_cost:.2f}",
        ),
        Check("MoE: the stall at each sync point is exposed", routed_idle > EPSILON, f"idle {routed_idle:.2f}"),
    ]


def interactive(params: Fig31Params) -> dict[str, Any]:
    """Scrubbable view: both timelines share one time axis, cursor and slider."""
    programs = {DENSE: dense(params), ROUTED: routed(params)}
    titles = {DENSE: "Dense model", ROUTED: "MoE model, a sync point in every block"}
    sets = []
    for i in range(params.blocks):
        sets.append((DENSE, step_index(programs[DENSE], f"B{i}"), 1))
        sets += [(ROUTED, step_index(programs[ROUTED], f"{i} {half}"), 0.5) for half in ("route", "rest")]
    targets = [{"timeline": t, "path": ["steps", i, "cost"], "scale": scale, "offset": 0} for t, i, scale in sets]
    readouts: list[dict[str, Any]] = []
    for name in programs:
        short = "Dense" if name == DENSE else "MoE"
        readouts += [
            {"type": "cpu", "label": f"{short}: CPU", "timeline": name, "thread": 0},
            {"type": "gpu", "label": f"{short}: GPU", "timeline": name, "device": 0},
            {"type": "blocks_ahead", "label": f"{short}: blocks ahead", "timeline": name},
        ]
    return {
        "title": EXPERIMENT.title,
        "badge": "model · figure time units, order only",
        "layout": "stack",
        "panels": [
            {
                "id": "both",
                "title": "How far ahead can the CPU get?",
                "caption": "Blocks ahead: how many blocks the CPU's current block is ahead of the GPU's. "
                "A red dot starts a sync wait, a black dot ends it.",
                "timelines": [
                    {
                        "id": name,
                        "title": titles[name],
                        "program": program_to_json(program),
                        "rows": lane_rows("blocks_ahead", "blocks ahead"),
                        "marks": [],
                        "shared": True,
                    }
                    for name, program in programs.items()
                ],
                "cursor": 1.5 * params.execute_cost,
                "controls": [control(params, "submit_cost", "Submission cost per block", targets, ours=True)],
                "readouts": readouts,
                "legend": ["cpu_submit", "gpu_execute", "idle", "sync_wait"],
            }
        ],
    }


EXPERIMENT = Experiment(
    slug="fig31_blocks_ahead",
    group="s08_sync_free",
    title="How far ahead can the CPU get?",
    claim="A synchronization point in every block keeps the CPU at most one block ahead; "
    "without one it runs several ahead.",
    kind="conceptual",
    anchor="Section 8.1, Figure 31",
    params=Fig31Params,
    figure=figure,
    checks=checks,
    model=model,
    interactive=interactive,
)
