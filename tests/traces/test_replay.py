"""What-ifs: removed waits (all, by line), scales, merged launches, windows, and what is said about assumptions."""

from __future__ import annotations

import pytest
from kineto_files import call, d2h, event, kernel, launch, write

from workbench.traces import TraceError, read
from workbench.traces.replay import spans, to_program, what_if
from workbench.traces.summary import summarise

K = 1_000


def loop(reads: bool, n: int = 6) -> list[dict]:
    """Submission 10 us, device 30 us per block; a read returns 5 us after its copy. Times follow the queue rule."""
    events, clock, free = [], 0, 0
    for i in range(n):
        events.append(event("python_function", f"model.py({10 + i}): block", clock, clock + 200 * K))
        events.append(launch(clock + 2 * K, clock + 10 * K, 2 * i + 1))
        clock += 10 * K
        start = max(clock, free)
        free = start + 30 * K
        events.append(kernel(start, free, 2 * i + 1))
        if reads:
            op = event("cpu_op", "aten::item", clock, free + 7 * K)
            events += [
                op,
                call("cudaMemcpyAsync", clock, clock + 2 * K, 2 * i + 2),
                d2h(free, free + 1 * K, 2 * i + 2, "Pinned"),
                call("cudaStreamSynchronize", clock + 3 * K, free + 6 * K, 900 + i),
            ]
            free += 1 * K
            clock = free + 6 * K
    return events


def test_removing_the_reads_predicts_the_loop_without_them(tmp_path):
    with_reads = read(write(tmp_path, loop(True)))
    without = what_if(read(write(tmp_path, loop(False), "free.json")))
    answer = what_if(with_reads, remove_waits=True)
    assert answer["replayed_us"] == answer["measured_us"] and answer["removed_waits"] == 6
    assert answer["predicted_us"] == pytest.approx(without["measured_us"], rel=0.01)
    assert answer["predicted_idle_us"] == pytest.approx(0, abs=2) and answer["measured_idle_us"] > 70


def test_waits_of_one_line_only(tmp_path):
    trace = read(write(tmp_path, loop(True)))
    some = what_if(trace, remove_waits="model.py:12")
    every = what_if(trace, remove_waits=True)
    assert some["removed_waits"] == 1 and every["predicted_us"] < some["predicted_us"] < some["measured_us"]
    with pytest.raises(ValueError, match=r"no wait matches 'absent.py'; waits are at: model.py:10"):
        what_if(trace, remove_waits="absent.py")
    with pytest.raises(ValueError, match=r"no wait matches 'absent.py'; the trace has no host wait"):
        what_if(read(write(tmp_path, loop(False))), remove_waits="absent.py")


def test_the_answer_says_which_stretch_each_time_is_of(tmp_path):
    events = [launch(0, 10 * K, 1), kernel(12 * K, 17 * K, 1), launch(20 * K, 30 * K, 2), kernel(32 * K, 40 * K, 2)]
    trace = read(write(tmp_path, events))
    answer = what_if(trace)
    (device,) = summarise(trace)["devices"]
    low, high = device["window_ns"]
    assert answer["measured_us"] == 40 and answer["measured_device_us"] == answer["replayed_device_us"] == 28
    assert answer["measured_device_us"] == (high - low) / 1e3 and answer["measured_idle_us"] == device["idle_ns"] / 1e3
    lines = spans(answer)
    assert lines[0].startswith("from the first submission to the last end: measured 40.0 us, replayed unchanged 40.0")
    assert "device operations, first to last (the window of `summary`): measured 28.0 us" in lines[1]
    assert lines[2] == "of it idle: measured 15.0 us, predicted 15.0 us"
    first = what_if(trace, window=(low - 20 * K, low + 5 * K))
    assert first["measured_device_us"] == 5 and "`summary` cuts them at the window's edges" in spans(first)[1]


def test_host_and_device_scales(tmp_path):
    submission_bound = [
        e
        for i in range(5)
        for e in (
            launch(i * 20 * K, i * 20 * K + 10 * K, i + 1),
            kernel(i * 20 * K + 12 * K, i * 20 * K + 17 * K, i + 1),
        )
    ]
    trace = read(write(tmp_path, submission_bound))
    assert what_if(trace)["measured_us"] == 97
    assert what_if(trace, host_scale=0.5)["predicted_us"] == pytest.approx(90 / 2 + 7, abs=0.1)
    assert what_if(trace, host_scale=0.5)["predicted_device_us"] == pytest.approx(80 / 2 + 5, abs=0.1)
    assert what_if(trace, device_scale=0.5)["predicted_us"] == pytest.approx(94.5, abs=0.1)
    assert what_if(trace, host_scale=0)["predicted_us"] < 40
    for bad in ({"host_scale": -1}, {"device_scale": float("nan")}, {"merge_launches": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            what_if(trace, **bad)


def test_merging_launches_cuts_submissions_but_not_across_waits_or_steps(tmp_path):
    events = [
        e
        for i in range(8)
        for e in (
            launch(i * 20 * K, i * 20 * K + 10 * K, i + 1),
            kernel(i * 20 * K + 12 * K, i * 20 * K + 17 * K, i + 1),
        )
    ]
    trace = read(write(tmp_path, events))
    assert what_if(trace, merge_launches=4)["submissions"] == 2
    graph = what_if(trace, merge_launches=1000)
    assert graph["submissions"] == 1 and graph["predicted_us"] < 65
    stepped = [event("user_annotation", f"ProfilerStep#{i}", i * 80 * K, i * 80 * K + 79 * K) for i in range(2)]
    assert what_if(read(write(tmp_path, [*events, *stepped])), merge_launches=1000)["submissions"] == 2
    assert what_if(read(write(tmp_path, loop(True))), merge_launches=1000)["submissions"] == 6


def test_cross_stream_dependency_is_inferred_and_kept(tmp_path):
    events = [
        launch(0, 1 * K, 1),
        kernel(2 * K, 50 * K, 1),
        launch(2 * K, 3 * K, 2),
        kernel(51 * K, 60 * K, 2, stream=9),
    ]
    replay = to_program(read(write(tmp_path, events)))
    assert (replay.dep >= 0).sum() == 1
    assert what_if(replay, device_scale=2)["predicted_us"] == pytest.approx(1 + 1 + 96 + 1 + 18, abs=0.1)
    assert any("another stream" in text for text in what_if(replay)["assumptions"])


def test_a_trace_without_launches_cannot_be_replayed(tmp_path):
    with pytest.raises(TraceError, match="no device operation has a recorded launch"):
        to_program(read(write(tmp_path, [kernel(0, 5 * K, 1)])))
    with pytest.raises(TraceError, match="nothing was launched in this window"):
        to_program(read(write(tmp_path, loop(False))), window=(10**9, 2 * 10**9))


def test_carry_in_is_queued_from_the_start(tmp_path):
    events = [kernel(0, 50 * K, 77), launch(10 * K, 12 * K, 1), kernel(50 * K, 60 * K, 1)]
    answer = what_if(read(write(tmp_path, events)))
    assert answer["replayed_us"] == answer["measured_us"] == 60
    assert any("queued from the start" in text for text in answer["assumptions"])


def test_a_removed_wait_takes_the_return_of_its_call_along(tmp_path):
    events = [launch(0, 5 * K, 1), kernel(8 * K, 20 * K, 1), call("cudaStreamSynchronize", 6 * K, 40 * K, 2)]
    events += [launch(50 * K, 55 * K, 3), kernel(57 * K, 60 * K, 3)]
    assert what_if(read(write(tmp_path, events)), remove_waits=True)["predicted_us"] == 6 + (55 - 40) + 2 + 3


def test_assumptions_name_every_change(tmp_path):
    text = " ".join(
        what_if(
            read(write(tmp_path, loop(True))), remove_waits=True, host_scale=0.5, device_scale=0.25, merge_launches=3
        )["assumptions"]
    )
    for part in (
        "6 waits are removed",
        "0.5",
        "0.25",
        "up to 3 successive launches",
        "one host timeline",
        "profiler itself",
    ):
        assert part in text


@pytest.mark.parametrize("factor", [-1.0, float("nan"), float("inf"), 1e300])
def test_a_factor_that_no_time_survives_is_refused(tmp_path, factor):
    trace = read(write(tmp_path, [launch(0, 5_000, 1), kernel(6_000, 9_000, 1)]))
    for name in ("host_scale", "device_scale"):
        with pytest.raises(ValueError, match=f"{name}: expected a factor of 0 to 1e"):
            what_if(trace, **{name: factor})
