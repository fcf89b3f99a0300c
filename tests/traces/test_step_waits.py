"""Host waits of the named steps: what the live measurements count, judged by outcome and never by a call's name."""

from __future__ import annotations

import pytest
from kineto_files import call, d2h, event, kernel, launch, write

from workbench.measure.capture import step_waits
from workbench.traces import read

K = 1_000
WORK = [launch(100 * K, 105 * K, 1), kernel(110 * K, 200 * K, 1)]
STEP = event("user_annotation", "ProfilerStep#0", 90 * K, 300 * K)
PROFILER = call("cudaDeviceSynchronize", 310 * K, 320 * K, 99)

CASES = {
    "a synchronous copy to the host": (
        [call("cudaMemcpy", 120 * K, 203 * K, 2), d2h(200 * K, 202 * K, 2)],
        "cudaMemcpy",
    ),
    "a pageable copy": (
        [call("cudaMemcpyAsync", 120 * K, 203 * K, 2), d2h(200 * K, 202 * K, 2),
         call("cudaStreamSynchronize", 204 * K, 205 * K, 3)],
        "cudaMemcpyAsync",
    ),
    "a pinned copy and the wait for it": (
        [call("cudaMemcpyAsync", 120 * K, 123 * K, 2), d2h(200 * K, 202 * K, 2, "Pinned"),
         call("cudaEventSynchronize", 125 * K, 204 * K, 3)],
        "cudaEventSynchronize",
    ),
    "memory freed while work is queued": ([call("cudaFree", 120 * K, 201 * K, 2)], "cudaFree"),
    "polling of an event": (
        [call("cudaEventQuery", t * K, (t + 2) * K, t) for t in range(120, 205, 5)],
        "cudaEventQuery",
    ),
    "a stream's synchronise": ([call("cudaStreamSynchronize", 120 * K, 201 * K, 2)], "cudaStreamSynchronize"),
    "the step's own last synchronise": ([call("cudaDeviceSynchronize", 120 * K, 201 * K, 2)], "cudaDeviceSynchronize"),
    "a synchronise of an idle stream": ([call("cudaStreamSynchronize", 210 * K, 212 * K, 2)], None),
    "a copy to pinned memory alone": (
        [call("cudaMemcpyAsync", 120 * K, 123 * K, 2), d2h(200 * K, 202 * K, 2, "Pinned")],
        None,
    ),
    "a wait of a thread that launches nothing": ([call("cudaEventSynchronize", 120 * K, 201 * K, 2, tid=50)], None),
    "nothing": ([], None),
}  # fmt: skip


@pytest.mark.parametrize("profiled", [True, False], ids=["final synchronise", "no final synchronise"])
@pytest.mark.parametrize("what", CASES)
def test_one_definition_of_a_wait(tmp_path, what, profiled):
    events, expected = CASES[what]
    found = step_waits(read(write(tmp_path, [STEP, *WORK, *events, *([PROFILER] if profiled else [])])))
    assert [w["call"] for w in found.waits] == ([expected] if expected else [])
    assert all(w["duration_ns"] > 0 for w in found.waits)


def test_copies_and_launches_of_the_steps_alone_are_counted(tmp_path):
    read_back = [call("cudaMemcpyAsync", 120 * K, 123 * K, 2), d2h(200 * K, 202 * K, 2, "Pinned")]
    paged = [call("cudaMemcpyAsync", 130 * K, 206 * K, 3), d2h(204 * K, 205 * K, 3)]
    before = [call("cudaMemcpyAsync", 10 * K, 20 * K, 4), d2h(12 * K, 19 * K, 4)]
    found = step_waits(read(write(tmp_path, [*before, STEP, *WORK, *read_back, *paged, PROFILER])))
    assert found.row() == {"waits": 1, "pageable_d2h": 1, "launches": 3} and found.pinned_d2h == 1


def test_a_trace_that_proves_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="ProfilerStep#N, got none"):
        step_waits(read(write(tmp_path, WORK)))
    with pytest.raises(ValueError, match="the profiler recorded none"):
        step_waits(read(write(tmp_path, [*WORK, event("user_annotation", "ProfilerStep#0", 300 * K, 400 * K)])))
