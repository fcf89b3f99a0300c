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
from workbench.models.submission import HostWait, Op, Program, Submit
from workbench.views import queue
from workbench.views.queue import EPSILON, Panel, block, one

DENSE, ROUTED = "dense", "routed"
CURVE = "blocks_ahead", "blocks ahead"
TITLES = {DENSE: "Dense model", ROUTED: "MoE model, a sync point in every block"}


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
    return queue.rows({DENSE: dense(params), ROUTED: routed(params)}, curves)


def figure(result: Result):
    """Lanes and blocks ahead of both timelines."""
    return queue.draw(result, TITLES, *CURVE)


def checks(result: Result) -> list[Check]:
    """Claims of the caption."""
    params, plain, moe = result.params, Panel(result, DENSE), Panel(result, ROUTED)
    ahead, ahead_moe = (max(r["value_start"] for r in p.of("blocks_ahead")) for p in (plain, moe))
    headroom = max(r["value_start"] for r in moe.of("headroom"))
    idle, idle_moe = plain.total("idle"), moe.total("idle")
    waits = moe.of("sync_wait")

    def in_order(wait: dict[str, Any]) -> bool:
        number = wait["label"].split()[1]
        reached = max(wait["start"], moe.box("gpu_execute", f"{number} route")["end"])
        rest = moe.box("cpu_submit", f"{number} rest")["start"]
        return abs(wait["end"] - reached) <= EPSILON and rest >= wait["end"] - EPSILON

    late = sum(not in_order(w) for w in waits)
    return [
        Check("Dense: the CPU runs three blocks ahead in the drawn span", ahead == 3, f"{ahead:.0f}"),
        Check("Dense: the GPU always finds its next operation waiting", idle < EPSILON, f"idle {idle:.2f}"),
        Check("MoE: the CPU is never more than one block ahead", ahead_moe <= 1, f"{ahead_moe:.0f}"),
        Check(
            "MoE: the CPU waits until the GPU reaches the matching point, then submits the rest of the block",
            len(waits) == params.blocks and not late and all(w["end"] > w["start"] for w in waits),
            f"{len(waits)} waits in {params.blocks} blocks, {late} out of order",
        ),
        Check(
            "MoE: headroom cannot accumulate beyond one block",
            headroom <= params.execute_cost + EPSILON,
            f"at most {headroom:.2f}, a block is {params.execute_cost:.2f}",
        ),
        Check("MoE: the stall at each sync point is exposed", idle_moe > EPSILON, f"idle {idle_moe:.2f}"),
    ]


def interactive(params: Fig31Params) -> dict[str, Any]:
    """Scrubbable view: both timelines share one time axis, cursor and slider."""
    programs = {DENSE: dense(params), ROUTED: routed(params)}
    halves = [f"{i} {half}" for i in range(params.blocks) for half in ("route", "rest")]
    sets = queue.costs(programs[DENSE], [f"B{i}" for i in range(params.blocks)], timeline=DENSE)
    sets += queue.costs(programs[ROUTED], halves, timeline=ROUTED, scale=0.5)
    readouts: list[dict[str, Any]] = []
    for name, short in ((DENSE, "Dense"), (ROUTED, "MoE")):
        readouts += [
            {"type": "cpu", "label": f"{short}: CPU", "timeline": name, "thread": 0},
            {"type": "gpu", "label": f"{short}: GPU", "timeline": name, "device": 0},
            {"type": "blocks_ahead", "label": f"{short}: blocks ahead", "timeline": name},
        ]
    panel = {
        "id": "both",
        "title": "How far ahead can the CPU get?",
        "caption": "Blocks ahead: how many blocks the CPU's current block is ahead of the GPU's. "
        "A red dot starts a sync wait, a black dot ends it.",
        "timelines": [
            queue.view_timeline(p, *CURVE, name=name, title=TITLES[name], shared=True) for name, p in programs.items()
        ],
        "cursor": 1.5 * params.execute_cost,
        "controls": [queue.control(params, "submit_cost", "Submission cost per block", sets, ours=True)],
        "readouts": readouts,
        "legend": [*queue.LEGEND, "sync_wait"],
    }
    return queue.view(EXPERIMENT.title, [panel], note=", order only")


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
