"""The queue model on programs whose answers are known by hand, its JSON form, its errors and its speed."""

from __future__ import annotations

import time

import numpy as np
import pytest
from queue_properties import one
from queue_properties import program as from_json

from workbench.models import submission as S
from workbench.models.submission import (
    Columns,
    EventRecord,
    HostWait,
    HostWork,
    Op,
    Program,
    RangePop,
    RangePush,
    StreamWait,
    Submit,
    program_to_json,
    simulate,
)


def test_events_table_by_hand() -> None:
    steps = (RangePush("block 0"), one("a", 2, 3), HostWait("wait", op="a"), RangePop(), one("b", 1, 1, stream=4))
    events = simulate(Program(steps, (Op("lead", 4),))).events
    assert [*zip(*(events[c].tolist() for c in ("lane", "label", "start", "end", "kind", "range")))] == [
        ("cpu0", "a", 0, 2, "submit", "block 0"),
        ("cpu0", "wait", 2, 7, "wait", "block 0"),
        ("cpu0", "b", 7, 8, "submit", ""),
        ("gpu0/s0", "lead", 0, 4, "execute", ""),
        ("gpu0/s0", "a", 4, 7, "execute", "block 0"),
        ("gpu0/s4", "b", 8, 9, "execute", ""),
    ]
    assert events["start"].dtype == np.int64
    assert events["step"].tolist() == [1, 2, 4, -1, 1, 4]


# What the rule says, one clause a row: the program, and the times of its host steps or operations worked out by hand.
RULES = {
    "an operation starts after its submission": ((HostWork("w", 5), one("a", 1, 2)), "op_start", [6]),
    "it starts when its stream is free": ((one("a", 1, 4), one("b", 1, 1)), "op_start", [1, 5]),
    "it starts when its dependencies are met": (
        (one("a", 1, 4), one("b", 1, 1, stream=1, after=("a",))), "op_start", [1, 5]),
    "a submission costs host time, then its operations are queued": (
        (one("a", 3, 1), one("b", 2, 1)), "op_submitted", [3, 5]),
    "host work costs host time": ((HostWork("w", 5), HostWork("v", 2)), "host_end", [5, 7]),
    "a wait stops submission until its target is done": (
        (one("a", 1, 4), HostWait("w", op="a"), one("b", 1, 1)), "op_submitted", [1, 6]),
    "a wait for what is done costs nothing": (
        (one("a", 1, 1), HostWork("w", 4), HostWait("w", op="a"), HostWork("v", 1)), "host_end", [1, 5, 5, 6]),
    "an event is done with the work before it": (
        (one("a", 1, 9), EventRecord("e"), HostWait("w", event="e")), "host_end", [1, 1, 10]),
    "a device wait is for all its streams": (
        (one("a", 1, 9), one("b", 1, 1, stream=1), HostWait("w", device=0)), "host_end", [1, 2, 10]),
    "a stream wait is for one stream": (
        (one("a", 1, 9), one("b", 1, 1, stream=1), HostWait("w", stream=1)), "host_end", [1, 2, 3]),
    "a stream wait of the device holds the stream": (
        (one("a", 1, 9), EventRecord("e"), StreamWait("e", stream=1), one("b", 1, 1, stream=1)), "op_start", [1, 10]),
    "and not the host": (
        (one("a", 1, 9), EventRecord("e"), StreamWait("e", stream=1), HostWork("w", 1)), "host_end", [1, 1, 1, 2]),
}  # fmt: skip


@pytest.mark.parametrize("clause", RULES)
def test_rule(clause: str) -> None:
    steps, times, expected = RULES[clause]
    assert getattr(simulate(Program(steps)), times).tolist() == expected


def test_integer_nanoseconds_stay_exact() -> None:
    epoch = 2**62 + 1
    timeline = simulate(Program((HostWork("gap", epoch), one("a", 1, 1))))
    assert timeline.op_end[0] == epoch + 2


def test_json_round_trip() -> None:
    steps = (
        RangePush("mb", "microbatch"),
        Submit("g", 1.5, (Op("x", 1, 3, 1), Op("y", 2, after=("x",), tone="alt")), 2, "alt"),
        HostWork("w", 0), HostWait("s", stream=0), HostWait("d", device=1), EventRecord("e", 1, 1, 0.5),
        StreamWait("e", 2), HostWait("e", event="e"), RangePop(),
    )  # fmt: skip
    program = Program(steps, (Op("lead", 1),), "name", "us")
    assert from_json(program_to_json(program)) == program


BAD = {
    "negative": (Program((one("a", -1, 1),)), r"step 0 \(Submit\), cost: expected a finite time >= 0, got -1"),
    "nan": (Program((one("a", 1, float("nan")),)), "'a', duration: expected a finite time"),
    "text": (Program((HostWork("w", "3"),)), "expected a number, got '3'"),  # type: ignore[arg-type]
    "unknown op": (Program((one("a", 1, 1), HostWait("w", op="b"))), r"step 1 .*unknown operation 'b'.*\['a'\]"),
    "unknown event": (Program((StreamWait("e"),)), "unknown event 'e'"),
    "later op": (Program((one("a", 1, 1, after=("a",)),)), "unknown operation 'a'"),
    "two targets": (Program((one("a", 1, 1), HostWait("w", op="a", stream=0))), "exactly one target"),
    "no target": (Program((HostWait("w"),)), "exactly one target"),
    "no ops": (Program((Submit("a", 1, ()),)), "at least one operation"),
    "pop": (Program((RangePop(),)), "no range is open on thread 0"),
    "not a step": (Program((3,)), "step 0: expected a Submit"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", BAD)
def test_bad_program_is_named(name: str) -> None:
    program, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        simulate(program)


def test_columns_refuse_wrong_lengths_and_later_dependencies() -> None:
    base = simulate(Program((one("a", 1, 1), one("b", 1, 1)))).columns
    fields = {k: v for k, v in base.__dict__.items() if k != "op_step"}
    with pytest.raises(ValueError, match=r"Columns\.label: expected 2 entries, got 1"):
        Columns(**{**fields, "label": ["a"]})
    with pytest.raises(ValueError, match="listed before it"):
        Columns(**{**fields, "dep_first": np.array([0, 1, 1]), "dep_op": np.array([1])})


def test_a_million_steps_in_a_few_seconds() -> None:
    n = 1_000_000
    rng = np.random.default_rng(0)
    kind = np.where(rng.random(n) < 0.05, S.WAIT, S.SUBMIT).astype(np.int8)
    submits = kind == S.SUBMIT
    m = int(submits.sum())
    columns = Columns(
        kind=kind, thread=np.zeros(n, np.int64), cost=rng.integers(1, 10_000, n), label=["s"] * n,
        first_op=np.concatenate([[0], np.cumsum(submits)]), op_duration=rng.integers(1, 10_000, m),
        op_lane=rng.integers(0, 2, m), op_label=["k"] * m, lanes=((0, 0), (0, 7)), wait_kind=np.full(n, S.WAIT_DEVICE),
    )  # fmt: skip
    began = time.process_time()
    timeline = simulate(columns)
    spent = time.process_time() - began
    print(f"{n} steps simulated in {spent:.2f} s of CPU time")
    assert spent < 5
    assert timeline.makespan >= columns.cost.sum()
