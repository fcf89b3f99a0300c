"""A program of the queue model, written as a Kineto file and read back: idle, causes, waits and headroom, exactly."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from kineto_files import call, event, kernel, write

from workbench.models.headroom import busy_window, device_headroom, idle_intervals
from workbench.models.submission import SUBMIT, WAIT, HostWait, HostWork, Op, Program, Submit, simulate
from workbench.traces import read
from workbench.traces.idle import CAUSES, TURNAROUND_NS, Analysis
from workbench.traces.replay import to_program, what_if
from workbench.traces.waits import FINAL_SYNC, WAIT_KINDS

costs = st.integers(0, 12_000)


@st.composite
def programs(draw, threads: int = 2) -> Program:
    steps: list = []
    ops: list[str] = []
    for i in range(draw(st.integers(1, 18))):
        thread = draw(st.integers(0, threads - 1))
        kind = draw(st.sampled_from(["submit", "submit", "submit", "work", "wait", "stream"])) if ops else "submit"
        if kind == "submit":
            made = tuple(
                Op(f"o{i}.{j}", draw(st.integers(1, 20_000)), draw(st.integers(0, 2)), draw(st.integers(0, 1)))
                for j in range(draw(st.integers(1, 3)))
            )
            steps.append(Submit(f"s{i}", draw(costs), made, thread=thread))
            ops += [o.label for o in made]
        elif kind == "work":
            steps.append(HostWork("w", draw(costs), thread=thread))
        elif kind == "wait":
            where = draw(st.sampled_from(["op", "stream", "device"]))
            target = {
                "op": {"op": draw(st.sampled_from(ops))},
                "stream": {"stream": draw(st.integers(0, 2)), "device": draw(st.integers(0, 1))},
                "device": {"device": draw(st.integers(0, 1))},
            }[where]
            steps.append(HostWait("wait", thread=thread, **target))
        else:  # a stream dependency: the operation starts after one of another stream
            held = Op(
                f"o{i}",
                draw(st.integers(1, 20_000)),
                draw(st.integers(0, 2)),
                draw(st.integers(0, 1)),
                (draw(st.sampled_from(ops)),),
            )
            steps.append(Submit(f"s{i}", draw(costs), (held,), thread=thread))
            ops.append(held.label)
    return Program(tuple(steps))


API = {"op": "cudaEventSynchronize", "stream": "cudaStreamSynchronize", "device": "cudaDeviceSynchronize"}


def written(timeline, program) -> list[dict]:
    out, c = [], timeline.columns
    for i, step in enumerate(program.steps):
        begin, end = int(timeline.host_start[i]), int(timeline.host_end[i])
        where = {"tid": 10 + step.thread}
        if c.kind[i] == SUBMIT:
            name = "cudaGraphLaunch" if len(step.ops) > 1 else "cudaLaunchKernel"
            out.append(call(name, begin, end, i + 1, **where))
            for j in range(c.first_op[i], c.first_op[i + 1]):
                device, stream = c.lanes[c.op_lane[j]]
                out.append(
                    kernel(int(timeline.op_start[j]), int(timeline.op_end[j]), i + 1, stream=stream, device=device)
                )
        elif c.kind[i] == WAIT:
            target = "op" if step.op is not None else "stream" if step.stream is not None else "device"
            out.append(call(API[target], begin, end, i + 1, **where))
    out.append(event("cpu_op", "aten::empty", 0, 1))
    return out


def expected_causes(timeline, program, device: int) -> list[tuple[int, int, str, int]]:
    c = timeline.columns
    rows = []
    final = {i for i, s in enumerate(program.steps) if isinstance(s, HostWait) and s.op is None and s.stream is None}
    last_submission = max(int(timeline.host_start[i]) for i in range(len(c.kind)) if c.kind[i] == SUBMIT)
    submits_on = {program.steps[i].thread for i in range(len(c.kind)) if c.kind[i] == SUBMIT}
    in_order = sorted(final, key=lambda i: (int(timeline.host_start[i]), int(timeline.host_end[i]), i))
    exempt = {in_order[-1]} if in_order and timeline.host_start[in_order[-1]] > last_submission else set()
    for a, b in idle_intervals(timeline, device, busy_window(timeline, device)).tolist():
        enders = [
            j for j in range(len(timeline.op_start)) if timeline.op_start[j] == b and c.lanes[c.op_lane[j]][0] == device
        ]
        j = max(enders, key=lambda j: (int(timeline.op_end[j]), -int(c.op_step[j])))
        step = int(c.op_step[j])
        if timeline.op_submitted[j] <= a:
            rows.append((a, b, "turnaround" if b - a <= TURNAROUND_NS else "dependency", 0))
            continue
        thread, waited, blocked = program.steps[step].thread, False, 0
        for i in range(step - 1, -1, -1):
            if program.steps[i].thread == thread and c.kind[i] == SUBMIT:
                break
            length = timeline.host_end[i] - timeline.host_start[i]
            waited |= program.steps[i].thread == thread and c.kind[i] == WAIT and length > 0 and i not in exempt
        if waited and thread in submits_on:
            for i in range(len(c.kind)):
                if program.steps[i].thread == thread and c.kind[i] == WAIT and i not in exempt:
                    blocked += max(0, min(b, int(timeline.host_end[i])) - max(a, int(timeline.host_start[i])))
        rows.append((a, b, "sync" if waited else "submission", blocked))
    return rows


@settings(max_examples=250)
@given(programs())
def test_idle_causes_waits_and_headroom_come_back_exactly(tmp_path_factory, program):
    timeline = simulate(program)
    trace = read(write(tmp_path_factory.getbasetemp(), written(timeline, program)))
    analysis = Analysis(trace)
    for pair in analysis.rows:
        device = pair[1]
        idle = analysis.idle(pair)
        found = [
            (int(a), int(b), CAUSES[k], int(w))
            for a, b, k, w in zip(idle.start_ns, idle.end_ns, idle.cause, idle.blocked_ns)
        ]
        assert found == expected_causes(timeline, program, device)
        want = device_headroom(timeline, device)
        got = analysis.headroom(pair)
        t = want.t.astype(np.int64)
        assert got.at(t).tolist() == want.after.tolist() and set(got.t_ns) <= set(t)
        for stream in analysis.streams(pair):
            alone = device_headroom(timeline, device, stream)
            assert analysis.headroom(pair, stream).at(alone.t.astype(np.int64)).tolist() == alone.after.tolist()
    c = timeline.columns
    waits = sorted(
        (int(timeline.host_start[i]), int(timeline.host_end[i])) for i in range(len(c.kind)) if c.kind[i] == WAIT
    )
    assert sorted(zip(analysis.waits.start_ns.tolist(), analysis.waits.end_ns.tolist())) == waits
    assert analysis.waits.blocking.tolist() == [b > a for a, b in zip(analysis.waits.start_ns, analysis.waits.end_ns)]
    assert len(WAIT_KINDS) == FINAL_SYNC + 1


@settings(max_examples=150)
@given(programs(threads=1))
def test_one_host_thread_replays_to_the_measured_span(tmp_path_factory, program):
    timeline = simulate(program)
    trace = read(write(tmp_path_factory.getbasetemp(), written(timeline, program)))
    answer = what_if(to_program(trace))
    assert answer["replayed_us"] == answer["measured_us"]
    assert answer["replayed_idle_us"] == answer["measured_idle_us"]


@settings(max_examples=80)
@given(programs(threads=1))
def test_removing_waits_and_scaling_never_lengthen_where_nothing_depends_on_latency(tmp_path_factory, program):
    timeline = simulate(program)
    replay = to_program(read(write(tmp_path_factory.getbasetemp(), written(timeline, program))))
    base = what_if(replay)["predicted_us"]
    if not replay.overhead_ns.any():
        assert what_if(replay, remove_waits=True)["predicted_us"] <= base
        assert what_if(replay, host_scale=0.5)["predicted_us"] <= base + 1e-3 * len(replay.step_kind)
        assert what_if(replay, device_scale=0.5)["predicted_us"] <= base
