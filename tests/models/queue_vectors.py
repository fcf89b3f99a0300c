"""Writes tests/vectors/queue_vectors.json: programs with the queue model's answers, for every port of the rule.

Run `python tests/models/queue_vectors.py` after a change of the model; test_submission_vectors.py compares.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from queue_properties import one

from workbench.core.files import replace_file
from workbench.models.headroom import blocks_ahead, device_headroom, idle_intervals, queued_blocks
from workbench.models.submission import (
    KINDS,
    EventRecord,
    HostWait,
    HostWork,
    Op,
    Program,
    RangePop,
    RangePush,
    StreamWait,
    Submit,
    Timeline,
    lane_name,
    program_to_json,
    simulate,
)

TIMES = ("host_start", "host_end", "op_submitted", "op_start", "op_end")
PATH = Path(__file__).parents[1] / "vectors" / "queue_vectors.json"


def _block(i: int, *steps: Any) -> list[Any]:
    return [RangePush(f"block {i}"), *steps, RangePop()]


def hand_made() -> list[Program]:
    """Programs that each isolate one part of the rule."""
    dry = [s for i in range(8) for s in _block(i, one(f"b{i + 1}", 1.55, 1.0))]
    routed = []
    for i in range(3):
        routed += _block(i, one(f"route {i}", 0.5, 1.0), HostWait("sync", op=f"route {i}"), one(f"rest {i}", 0.5, 1.5))
    return [
        Program((), name="empty"),
        Program((), (Op("lead", 2),), name="lead only"),
        Program((HostWork("python", 3),), name="host only"),
        Program((one("k1", 1, 2), one("k2", 1, 2), one("k3", 7, 1)), name="integers"),
        Program(tuple(dry), (Op("lead", 3.25),), name="running dry"),
        Program((one("k1", 0.4, 2.0), one("k2", 0.4, 2.0), *(one(f"k{i}", 2.0, 0.7) for i in range(4, 8))), name="k"),
        Program(tuple(routed), name="wait in every block"),
        Program(
            (one("a", 1, 4, stream=1), one("b", 1, 3, stream=2, after=("a",)), HostWait("w", stream=2)), name="after"
        ),
        Program(
            (
                one("a", 1, 4, stream=1),
                EventRecord("done a", stream=1, cost=0.25),
                StreamWait("done a", stream=2, cost=0.25),
                one("b", 1, 2, stream=2),
                HostWait("w", event="done a"),
                one("c", 1, 1, stream=1),
                HostWait("all", device=0),
                HostWork("tail", 0.5),
            ),
            name="events",
        ),
        Program(
            (Submit("graph", 1, tuple(Op(f"n{i}", 0.5 * i, stream=i % 2) for i in range(5))),), name="graph launch"
        ),
        Program((one("a", 1, 2, device=0), one("b", 1, 2, device=1), HostWait("w", device=1)), name="two devices"),
        Program((one("same", 1, 3), one("same", 1, 1), HostWait("w", op="same")), name="repeated label"),
        Program(
            (
                Submit("a", 2, (Op("a", 3),)),
                Submit("b", 1, (Op("b", 2, stream=1),), thread=1),
                HostWait("w", op="a", thread=1),
                HostWork("tail", 1, thread=1),
            ),
            name="two threads",
        ),
        Program((one("zero", 0, 0), one("k", 0, 1), HostWait("w", op="zero")), name="zero lengths"),
    ]


def random_program(seed: int) -> Program:
    """A valid program of 5 to 25 steps on a grid of eighths, so that sums are exact in binary."""
    rng = random.Random(seed)

    def time(top: int = 24) -> float:
        return rng.randrange(0, top) / 8

    lead = tuple(Op(f"lead{i}", time(), rng.randrange(2)) for i in range(rng.randrange(3)))
    labels, events, steps, depth = [op.label for op in lead], [], [], 0
    for i in range(rng.randrange(5, 26)):
        pick = rng.random()
        lane = {"stream": rng.randrange(2), "device": rng.choice([0, 0, 0, 1])}
        if pick < 0.5:
            ops = []
            for j in range(rng.choice([1, 1, 1, 3])):
                after = (rng.choice(labels),) if labels and rng.random() < 0.25 else ()
                ops.append(Op(f"k{i}.{j}", time(), after=after, **lane))
            labels += [op.label for op in ops]
            steps.append(Submit(f"s{i}", time(16), tuple(ops)))
        elif pick < 0.6:
            steps.append(HostWork(f"w{i}", time()))
        elif pick < 0.7:
            targets: list[dict[str, Any]] = [{"stream": lane["stream"], "device": lane["device"]}, {"device": 0}]
            targets += [{"op": rng.choice(labels)}] if labels else []
            targets += [{"event": rng.choice(events)}] if events else []
            steps.append(HostWait(f"wait{i}", **rng.choice(targets)))
        elif pick < 0.78:
            events.append(f"e{rng.randrange(3)}")
            steps.append(EventRecord(events[-1], cost=time(4), **lane))
        elif pick < 0.86 and events:
            steps.append(StreamWait(rng.choice(events), cost=time(4), **lane))
        elif depth and pick < 0.93:
            steps.append(RangePop())
            depth -= 1
        else:
            steps.append(RangePush(f"r{i}", rng.choice(["block", "block", "microbatch"])))
            depth += 1
    return Program(tuple(steps), lead, f"random {seed}")


def readouts(timeline: Timeline, t: float) -> dict[str, Any]:
    """What a cursor at `t` shows: each CPU thread and device, queued operations and blocks, headroom, blocks ahead."""
    c = timeline.columns
    devices = sorted({device for device, _ in c.lanes})
    positive = timeline.op_end > timeline.op_start
    waiting = positive & (timeline.op_submitted <= t) & (t < timeline.op_start)
    return {
        "t": t,
        "cpu": {str(thread): _cpu_at(timeline, thread, t) for thread in np.unique(c.thread).tolist()},
        "gpu": {str(device): _gpu_at(timeline, device, t) for device in devices},
        "queued_ops": int(waiting.sum()),
        "queued_blocks": int(queued_blocks(timeline).at(t)),
        "headroom": {str(device): device_headroom(timeline, device).at(t).item() for device in devices},
        "blocks_ahead": int(blocks_ahead(timeline).at(t)),
    }


def _cpu_at(timeline: Timeline, thread: int, t: float) -> dict[str, Any]:
    c = timeline.columns
    inside = (c.thread == thread) & (timeline.host_start <= t) & (t < timeline.host_end)
    if not inside.any():
        return {"kind": "done"}
    step = int(np.argmax(inside))
    return {"kind": KINDS[c.kind[step]], "label": c.label[step], "step": step}


def _gpu_at(timeline: Timeline, device: int, t: float) -> dict[str, Any]:
    lanes = [i for i, (owner, _) in enumerate(timeline.columns.lanes) if owner == device]
    ours = np.isin(timeline.columns.op_lane, lanes) & (timeline.op_end > timeline.op_start)
    running = ours & (timeline.op_start <= t) & (t < timeline.op_end)
    if running.any():
        return {"kind": "execute", "ops": np.flatnonzero(running).tolist()}
    later = np.flatnonzero(ours & (timeline.op_start > t))
    if not len(later):
        return {"kind": "done"}
    following = int(later[np.argmin(timeline.op_start[later])])
    reason = "submission" if timeline.op_submitted[following] > t else "dependency"
    return {"kind": "idle", "next": following, "reason": reason}


def expect(program: Program) -> dict[str, Any]:
    """The model's answers for one program, as plain JSON values."""
    timeline = simulate(program)
    lanes = timeline.columns.lanes
    devices = sorted({device for device, _ in lanes})

    def curve(c: Any) -> dict[str, list[float]]:
        return {"t": c.t.tolist(), "before": c.before.tolist(), "after": c.after.tolist()}

    times = np.unique(np.concatenate([timeline.host_start, timeline.op_start, timeline.op_end, [0.0]]))
    middles = (times[:-1] + times[1:]) / 2
    queries = np.unique(np.concatenate([times[:: max(1, len(times) // 6)], middles[:: max(1, len(middles) // 6)]]))
    return {
        **{name: getattr(timeline, name).tolist() for name in TIMES},
        "makespan": timeline.makespan,
        "headroom_stream": {lane_name(lane): curve(device_headroom(timeline, *lane)) for lane in sorted(lanes)},
        "headroom_device": {str(d): curve(device_headroom(timeline, d)) for d in devices},
        "idle": {str(d): idle_intervals(timeline, d).tolist() for d in devices},
        "queries": [readouts(timeline, t) for t in queries.tolist()],
    }  # fmt: skip


def document() -> str:
    """The vector file's text."""
    programs = hand_made() + [random_program(seed) for seed in range(20)]
    cases = [{"name": p.name, "program": program_to_json(p), "expect": expect(p)} for p in programs]
    lines = ",\n".join(json.dumps(case, allow_nan=False) for case in cases)
    return f'{{"schema": 1, "cases": [\n{lines}\n]}}\n'


if __name__ == "__main__":
    replace_file(PATH, document())
