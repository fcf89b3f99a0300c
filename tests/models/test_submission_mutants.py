"""The properties catch broken rules: each mutant of the model's own source turns at least one property red."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from queue_properties import PROPERTIES
from queue_vectors import random_program

from workbench.models import headroom, submission
from workbench.models.submission import program_to_json

# what is broken: (module, text, replacement)
MUTANTS = {
    "start ignores submission": (submission, "if at < now:", "if False:"),
    "streams are not FIFO": (submission, "            at = free[queue]\n", "            at = zero\n"),
    "dependencies are ignored": (submission, "if end[d] > at:", "if False:"),
    "a wait does not block": (submission, "t1 = max(t1, until)", "pass"),
    "a stream stays free": (submission, "end[j] = free[queue] = at", "end[j] = at"),
    "an event ignores its stream": (submission, "max(t1, free[lane_of_step[i]])", "t1"),
    "a stream wait is ignored": (submission, "free[queue] = max(free[queue], event_done[argument[i]])", "pass"),
    "operations queue when submission begins": (submission, "first_op[i + 1], t1)", "first_op[i + 1], t0)"),
    "host time is free": (submission, "t1 = t0 + cost[i]", "t1 = t0"),
    "a device wait sees one stream": (submission, "until = max((free[q]", "until = min((free[q]"),
    "a stream wait blocks the host": (
        submission,
        "            queue = lane_of_step[i]\n",
        "            queue = lane_of_step[i]; t1 = max(t1, event_done[argument[i]])\n",
    ),
    "headroom drains at double rate": (headroom, "t - start[np.minimum", "2 * t - 2 * start[np.minimum"),
    "headroom jumps when submission begins": (
        headroom,
        "    submitted = timeline.op_submitted[mine][order]\n",
        "    step = timeline.columns.op_step[mine][order]\n"
        "    submitted = np.where(step >= 0, timeline.host_start[step] if len(timeline.host_start) else 0, 0)\n",
    ),
    "headroom forgets finished work": (headroom, "- finished_work[finished] - partial", "- partial"),
    "headroom ignores its lane": (headroom, "(np.asarray(timeline.columns.op_lane) == lane) & ", ""),
    "idle looks at the last interval alone": (headroom, "np.maximum.accumulate(end)", "end"),
}


def mutant(module: ModuleType, text: str, replacement: str) -> ModuleType:
    """The module with one piece of its source replaced."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert source.count(text) == 1, f"{text!r} occurs {source.count(text)} times"
    name = f"{module.__name__}_mutant"
    spec = importlib.util.spec_from_loader(name, loader=None)
    assert spec is not None
    broken = importlib.util.module_from_spec(spec)
    sys.modules[name] = broken
    try:
        exec(compile(source.replace(text, replacement), name, "exec"), broken.__dict__)
    finally:
        del sys.modules[name]
    return broken


def integers(seed: int) -> dict[str, Any]:
    """A random program of the vector file with its eighths as whole units."""
    data = program_to_json(random_program(seed))
    data["steps"] = [s for s in data["steps"] if s["kind"] not in ("push", "pop")]
    for item in [*data["lead"], *data["steps"], *(op for s in data["steps"] for op in s.get("ops", []))]:
        for name in ("cost", "duration"):
            if name in item:
                item[name] = int(item[name] * 8)
    return data


def submit(label: str, cost: int, duration: int, stream: int = 0) -> dict[str, Any]:
    """A submission of one operation, as JSON values."""
    return {
        "kind": "submit",
        "label": label,
        "cost": cost,
        "ops": [{"label": label, "duration": duration, "stream": stream}],
    }


# A short interval inside a longer one before a gap, and a stream held by another: rare among random programs.
NESTED = [submit("long", 0, 9), submit("short", 1, 2, 1), submit("late", 4, 1, 1), submit("last", 9, 1)]
HELD = [submit("a", 1, 9), {"kind": "record", "event": "e"}, {"kind": "stream_wait", "event": "e", "stream": 1}]
SPECIAL = [{"schema": 1, "lead": [], "steps": steps} for steps in (NESTED, [*HELD, submit("b", 1, 1, 1)])]
POOL = [integers(seed) for seed in range(100, 140)] + SPECIAL


def red(S: ModuleType, H: ModuleType) -> list[str]:
    """Names of the properties that fail for some program of the pool."""
    failed = []
    for prop in PROPERTIES:
        for data in POOL:
            try:
                prop(S, H, data)
            except AssertionError:
                failed.append(prop.__name__)
                break
    return failed


def test_the_true_rule_is_green() -> None:
    assert red(submission, headroom) == []


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str) -> None:
    module, text, replacement = MUTANTS[name]
    broken = mutant(module, text, replacement)
    failed = red(broken if module is submission else submission, broken if module is headroom else headroom)
    print(f"{name}: {', '.join(failed)}")
    assert failed, f"no property notices: {name}"
