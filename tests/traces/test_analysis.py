"""Idle causes, headroom, waits and the verdict: the ways in which other tools went wrong, from small inputs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kineto_files import call, d2h, event, kernel, launch, write
from slow_oracle import analyse

from workbench.traces import TraceError, read
from workbench.traces.folder import analyse_folder
from workbench.traces.idle import CAUSES, Analysis
from workbench.traces.ranges import blocks_ahead, find_ranges, parse_window, table51
from workbench.traces.summary import summarise
from workbench.traces.verify import verify_trace
from workbench.traces.waits import WAIT_KINDS

K = 1_000


def look(tmp_path, events, **top) -> Analysis:
    return Analysis(read(write(tmp_path, events, **top)))


def device(analysis: Analysis, number: int = 0) -> tuple[int, int]:
    return next(p for p in analysis.rows if p[1] == number)


def causes(analysis: Analysis, number: int = 0) -> dict[str, int]:
    return {k: v for k, v in analysis.idle(device(analysis, number)).by_cause_ns().items() if v}


def waits(analysis: Analysis) -> list[tuple[str, bool]]:
    return [(WAIT_KINDS[k], bool(b)) for k, b in zip(analysis.waits.kind, analysis.waits.blocking)]


def test_long_lead_is_healthy_however_long_the_launch_to_start_distance(tmp_path):
    a = look(
        tmp_path,
        [launch(0, 5 * K, 1), kernel(10 * K, 5010 * K, 1), launch(6 * K, 11 * K, 2), kernel(5010 * K, 5110 * K, 2)],
    )
    assert causes(a) == {} and verify_trace(a).sync_free is True
    assert a.launch_to_start_ns(device(a)).max() == 5004 * K


def test_submission_bound(tmp_path):
    a = look(
        tmp_path,
        [launch(0, 5 * K, 1), kernel(8 * K, 18 * K, 1), launch(100 * K, 105 * K, 2), kernel(108 * K, 118 * K, 2)],
    )
    assert causes(a) == {"submission": 90 * K}
    verdict = verify_trace(a)
    assert verdict.exit_code == 1 and verdict.submission_idle[0]["duration_ns"] == 90 * K
    assert verdict.headline == "no blocking wait, but the GPU runs dry"
    assert verify_trace(a, idle_threshold_us=90).exit_code == 0
    assert verify_trace(a, idle_threshold_us=89.999).exit_code == 1


def item(memory: str, sync_end: int = 70 * K) -> list[dict]:
    return [
        event("cpu_op", "aten::item", 5 * K, 75 * K),
        launch(0, 5 * K, 1),
        kernel(8 * K, 58 * K, 1),
        call("cudaMemcpyAsync", 6 * K, 66 * K if memory == "Pageable" else 10 * K, 2),
        d2h(60 * K, 62 * K, 2, memory),
        call("cudaStreamSynchronize", 67 * K if memory == "Pageable" else 11 * K, sync_end, 3),
        launch(90 * K, 95 * K, 4),
        kernel(98 * K, 108 * K, 4),
    ]


def test_pageable_copy_blocks_by_outcome_and_its_idle_splits(tmp_path):
    a = look(tmp_path, item("Pageable"))
    assert waits(a) == [("blocking_d2h", True), ("stream_sync", False)]
    assert causes(a) == {"turnaround": 2 * K, "sync_blocked": 4 * K, "sync_rebuild": 32 * K}
    found = verify_trace(a)
    assert found.exit_code == 1 and [o["count"] for o in found.offences] == [1]
    assert found.headline == "NOT synchronization-free" and "1 blocking wait holds" in found.reasons[0]
    assert found.offences[0]["op"] == "aten::item" and found.offences[0]["gpu_idle_ns"] == 36 * K


def test_pinned_copy_and_the_wait_that_needs_it_are_one_blocking_read(tmp_path):
    a = look(tmp_path, item("Pinned"))
    assert waits(a) == [("blocking_d2h", True)]
    assert a.waits.start_ns[0] == 11 * K
    assert causes(a) == {"turnaround": 2 * K, "sync_blocked": 8 * K, "sync_rebuild": 28 * K}


def test_pinned_copy_alone_is_no_wait(tmp_path):
    a = look(
        tmp_path,
        [
            launch(0, 5 * K, 1),
            kernel(8 * K, 58 * K, 1),
            call("cudaMemcpyAsync", 6 * K, 10 * K, 2),
            d2h(60 * K, 62 * K, 2, "Pinned"),
            launch(11 * K, 16 * K, 3),
            kernel(62 * K, 72 * K, 3),
        ],
    )
    assert waits(a) == [] and verify_trace(a).sync_free is True


def test_pinned_copy_that_ends_before_its_asynchronous_call_returns_is_no_wait(tmp_path):
    a = look(
        tmp_path,
        [
            launch(0, 5 * K, 1),
            kernel(4 * K, 5 * K, 1),
            call("cudaMemcpyAsync", 6 * K, 20 * K, 2),
            d2h(7 * K, 8 * K, 2, "Pinned"),
            launch(21 * K, 22 * K, 3),
            kernel(23 * K, 24 * K, 3),
        ],
    )
    assert waits(a) == []


def test_rocm_copy_without_a_synchronise_call_blocks_by_outcome(tmp_path):
    a = look(
        tmp_path,
        [
            call("hipLaunchKernel", 0, 5 * K, 1),
            kernel(8 * K, 50 * K, 1),
            call("hipMemcpyWithStream", 6 * K, 60 * K, 2),
            event(
                "gpu_memcpy",
                "Memcpy DtoH (Device -> Host)",
                52 * K,
                55 * K,
                pid=0,
                tid=0,
                correlation=2,
                stream=0,
                device=0,
            ),
        ],
    )
    assert waits(a) == [("blocking_d2h", True)]


def test_covered_wait_is_a_blocking_call_without_idle(tmp_path):
    a = look(
        tmp_path,
        [
            launch(0, 5 * K, 1),
            kernel(8 * K, 28 * K, 1),
            launch(6 * K, 11 * K, 2),
            kernel(28 * K, 228 * K, 2, stream=20),
            call("cudaEventSynchronize", 12 * K, 32 * K, 3),
            launch(40 * K, 45 * K, 4),
            kernel(50 * K, 60 * K, 4),
        ],
    )
    assert causes(a) == {} and waits(a) == [("event_sync", True)]
    assert verify_trace(a).exit_code == 1


def test_cuda_sync_rows_are_no_device_work(tmp_path):
    sync = event("cuda_sync", "Stream Sync", 7 * K, 59 * K, pid=0, tid=7, correlation=2, stream=7, device=0)
    a = look(
        tmp_path,
        [
            launch(0, 5 * K, 1),
            kernel(8 * K, 58 * K, 1),
            call("cudaStreamSynchronize", 6 * K, 60 * K, 2),
            sync,
            launch(70 * K, 75 * K, 3),
            kernel(78 * K, 88 * K, 3),
        ],
    )
    assert len(a.trace.ops) == 2 and causes(a) == {"sync_blocked": 2 * K, "sync_rebuild": 18 * K}


def test_a_stream_sync_of_another_stream_does_not_block_by_coincidence(tmp_path):
    events = [
        launch(0, 5 * K, 1),
        kernel(8 * K, 30 * K, 1),
        call("cudaStreamSynchronize", 20 * K, 40 * K, 2),
        event("cuda_sync", "Stream Sync", 20 * K, 40 * K, pid=0, tid=9, correlation=2, stream=9, device=0),
    ]
    assert waits(look(tmp_path, events)) == [("stream_sync", False)]
    events[-1]["args"]["stream"] = 7
    assert waits(look(tmp_path, events)) == [("stream_sync", True)]


def test_graph_kernels_share_one_submission(tmp_path):
    nodes = [kernel(30 * K + i * 12 * K, 40 * K + i * 12 * K, 1) for i in range(4)]
    a = look(
        tmp_path,
        [call("cudaGraphLaunch", 0, 20 * K, 1), *nodes, launch(200 * K, 205 * K, 9), kernel(210 * K, 215 * K, 9)],
    )
    summary = summarise(a)["devices"][0]
    assert summary["launches"] == 2 and summary["ops"] == 5 and summary["headroom_us"]["max"] == 40
    assert causes(a) == {"turnaround": 6 * K, "submission": 134 * K}


@pytest.mark.parametrize("name", ["cudaLaunchKernelExC", "cuLaunchKernelEx", "cudaLaunchKernel_v11060", "somethingNew"])
def test_launch_names_do_not_matter(tmp_path, name):
    a = look(
        tmp_path,
        [
            call(name, 0, 5 * K, 1),
            kernel(8 * K, 18 * K, 1),
            call(name, 100 * K, 105 * K, 2),
            kernel(108 * K, 118 * K, 2),
        ],
    )
    assert causes(a) == {"submission": 90 * K}


@pytest.mark.parametrize(
    "name", ["cudaStreamSynchronize_v3020", "cuStreamSynchronize", "hipStreamSynchronize", "cuCtxSynchronize"]
)
def test_synchronise_names_with_suffixes(tmp_path, name):
    a = look(
        tmp_path,
        [
            launch(0, 5 * K, 1),
            kernel(8 * K, 58 * K, 1),
            call(name, 6 * K, 60 * K, 2),
            launch(61 * K, 62 * K, 3),
            kernel(63 * K, 64 * K, 3),
        ],
    )
    assert len(a.waits) == 1 and a.waits.blocking[0]


def test_stream_wait_is_no_host_wait(tmp_path):
    a = look(
        tmp_path,
        [
            launch(0, 5 * K, 1),
            kernel(8 * K, 58 * K, 1),
            call("cudaStreamWaitEvent", 6 * K, 7 * K, 2),
            launch(8 * K, 9 * K, 3),
            kernel(80 * K, 90 * K, 3, stream=9),
        ],
    )
    assert waits(a) == [] and causes(a) == {"dependency": 22 * K}


@pytest.mark.parametrize(("gap", "cause"), [(5_000, "turnaround"), (5_001, "dependency")])
def test_a_gap_of_queued_work_up_to_5_us_is_turnaround(tmp_path, gap, cause):
    a = look(tmp_path, [launch(0, K, 1), kernel(2 * K, 9 * K, 1), launch(K, 2 * K, 2), kernel(9 * K + gap, 20 * K, 2)])
    assert causes(a) == {cause: gap}


def test_carry_in_at_the_head_is_queued_work(tmp_path):
    a = look(
        tmp_path,
        [kernel(5 * K, 15 * K, 101), kernel(30 * K, 40 * K, 102), launch(40 * K, 45 * K, 1), kernel(60 * K, 70 * K, 1)],
    )
    assert a.headroom(device(a)).at(5 * K) == 20 * K
    assert causes(a) == {"unknown": 15 * K, "submission": 20 * K}
    assert verify_trace(a).exit_code == 0 and any("carried in" in w for w in summarise(a)["warnings"])


def test_operation_that_starts_before_its_api_returns(tmp_path):
    a = look(tmp_path, [launch(0, 50 * K, 1), kernel(5 * K, 15 * K, 1)])
    curve = a.headroom(device(a))
    assert curve.at(4 * K) == 0 and curve.at(5 * K) == 10 * K and a.submitted.tolist() == [5 * K]


def test_programmatic_dependent_launch_overlaps_legally(tmp_path):
    a = look(
        tmp_path,
        [launch(0, 5 * K, 1), kernel(10 * K, 110 * K, 1), launch(6 * K, 11 * K, 2), kernel(90 * K, 130 * K, 2)],
    )
    assert causes(a) == {} and a.headroom(device(a)).after[-1] == 0 and (a.headroom(device(a)).after >= 0).all()


def test_two_devices_with_one_stream_number_and_several_processes(tmp_path):
    a = look(
        tmp_path,
        [
            launch(0, 5 * K, 1),
            kernel(10 * K, 110 * K, 1),
            launch(6 * K, 11 * K, 2, tid=8),
            kernel(20 * K, 120 * K, 2, device=1),
            launch(300 * K, 305 * K, 3),
            kernel(310 * K, 320 * K, 3),
            launch(306 * K, 311 * K, 4, tid=8),
            kernel(320 * K, 330 * K, 4, device=1),
        ],
    )
    assert causes(a, 0) == {"submission": 200 * K} and causes(a, 1) == {"submission": 200 * K}


def test_copies_are_work_and_have_their_own_share(tmp_path):
    a = look(
        tmp_path,
        [
            launch(0, 1 * K, 1),
            kernel(2 * K, 10 * K, 1),
            call("cudaMemcpyAsync", 1 * K, 2 * K, 2),
            event(
                "gpu_memcpy",
                "Memcpy HtoD (Pinned -> Device)",
                8 * K,
                20 * K,
                pid=0,
                tid=9,
                correlation=2,
                stream=9,
                device=0,
            ),
        ],
    )
    assert causes(a) == {} and a.copy_only_ns(device(a)) == 10 * K
    fill = event("gpu_memset", "Memset (Device)", 15 * K, 25 * K, pid=0, tid=7, correlation=1, stream=7, device=0)
    copy = event("gpu_memcpy", "Memcpy HtoD", 18 * K, 30 * K, pid=0, tid=9, correlation=1, stream=9, device=0)
    a = look(tmp_path, [launch(0, 1 * K, 1), fill, copy])
    assert a.copy_only_ns(device(a)) == 5 * K


def test_a_synchronise_that_returned_before_the_pinned_copy_did_not_wait_for_it(tmp_path):
    events = [e for e in item("Pinned", sync_end=50 * K) if e["name"] != "kernel" or e["ts"] != 98 * K]
    assert waits(look(tmp_path, events)) == [("stream_sync", False)]


def test_full_launch_queue_is_healthy(tmp_path):
    events = []
    for i in range(60):
        begin = i * 10 * K if i < 20 else 200 * K + (i - 20) * 1000 * K
        events += [
            launch(begin, begin + (5 * K if i < 20 else 990 * K), i + 1),
            kernel(1000 * K * i, 1000 * K * (i + 1), i + 1),
        ]
    a = look(tmp_path, events)
    assert waits(a) == [] and verify_trace(a).sync_free is True


def test_the_profilers_final_synchronise_is_exempt_but_an_earlier_one_is_not(tmp_path):
    work = [launch(0, 5 * K, 1), kernel(8 * K, 58 * K, 1)]
    last = call("cudaDeviceSynchronize", 10 * K, 60 * K, 2)
    a = look(tmp_path, [*work, last])
    found = verify_trace(a)
    assert (
        waits(a) == [("final_device_sync", True)] and found.exit_code == 0 and any("exempt" in n for n in found.notes)
    )
    a = look(tmp_path, [*work, last, launch(61 * K, 62 * K, 3), kernel(63 * K, 64 * K, 3)])
    assert waits(a) == [("device_sync", True)] and verify_trace(a).exit_code == 1


def polling(op: str) -> list[dict]:
    queries = [call("cudaEventQuery", (6 + 5 * i) * K, (7 + 5 * i) * K, 100 + i) for i in range(12)]
    return [
        event("cpu_op", op, 5 * K, 80 * K),
        launch(0, 5 * K, 1),
        kernel(8 * K, 58 * K, 1),
        *queries,
        launch(90 * K, 91 * K, 3),
        kernel(92 * K, 95 * K, 3),
    ]


def test_busy_polling_is_a_wait_of_its_own_kind(tmp_path):
    a = look(tmp_path, polling("my_op"))
    assert waits(a) == [("polling", True)] and causes(a)["sync_rebuild"] > 0
    assert verify_trace(a).exit_code == 1


def test_the_allocators_queries_are_no_polling(tmp_path):
    assert waits(look(tmp_path, polling("aten::empty_strided"))) == []


def test_queries_of_a_thread_that_launches_nothing_are_ignored(tmp_path):
    events = [dict(e, tid=99) if "Query" in e["name"] else e for e in polling("my_op")]
    assert waits(look(tmp_path, events)) == []


def test_a_watchdogs_wait_holds_up_no_submission(tmp_path):
    a = look(
        tmp_path,
        [launch(0, 5 * K, 1), kernel(8 * K, 58 * K, 1), call("cudaEventSynchronize", 10 * K, 60 * K, 2, tid=50)],
    )
    assert waits(a) == [("event_sync", True)] and not a.waits.counted().any() and verify_trace(a).exit_code == 0


def test_wait_of_a_finished_device_does_not_block(tmp_path):
    a = look(
        tmp_path,
        [
            launch(0, 5 * K, 1),
            kernel(8 * K, 9 * K, 1),
            call("cudaStreamSynchronize", 20 * K, 22 * K, 2),
            launch(25 * K, 26 * K, 3),
            kernel(27 * K, 28 * K, 3),
        ],
    )
    assert waits(a) == [("stream_sync", False)] and "submission" in causes(a)


FRAMES = [
    ("train.py(10): main", 0, 1000),
    ("model.py(41): forward", 10, 900),
    ("torch/nn/modules/module.py(1773): _call_impl", 12, 890),
    ("model.py(57): route", 20, 300),
    ("torch/_tensor.py(5): item", 30, 280),
    ("<built-in method item of Tensor object at 0x7f>", 40, 250),
    ("model.py(99): other", 300, 500),
]


def stacked(frames=FRAMES) -> list[dict]:
    return [
        *(event("python_function", n, a * K, b * K) for n, a, b in frames),
        event("user_annotation", "block 3", 15 * K, 600 * K),
        event("user_annotation", "ProfilerStep#1", 0, 1000 * K),
        event("cpu_op", "aten::item", 45 * K, 240 * K),
        event("cpu_op", "aten::_local_scalar_dense", 50 * K, 230 * K),
        launch(1 * K, 2 * K, 1),
        kernel(5 * K, 200 * K, 1),
        call("cudaMemcpyAsync", 60 * K, 220 * K, 2),
        d2h(201 * K, 203 * K, 2),
        launch(700 * K, 701 * K, 3),
        kernel(702 * K, 703 * K, 3),
    ]


def test_a_wait_names_the_innermost_user_frame_operator_and_range(tmp_path):
    wait = summarise(look(tmp_path, stacked()))["waits"][0]
    assert wait == {
        "kind": "blocking_d2h",
        "start_ns": 60 * K,
        "duration_ns": 160 * K,
        "thread": 7,
        "blocking": True,
        "line": "model.py:57 (route)",
        "op": "aten::_local_scalar_dense",
        "range": "block 3",
    }


def test_a_wait_inside_libraries_alone_names_the_innermost_of_them(tmp_path):
    frames = [
        event("python_function", "torch/nn/modules/module.py(1): outer", 0, 900 * K),
        event("python_function", "torch/_tensor.py(2): inner", 1 * K, 800 * K),
        event("python_function", "<built-in method item>", 2 * K, 700 * K),
    ]
    events = [dict(e, ts=e["ts"] + 10 * K) for e in item("Pageable")]
    (offence,) = verify_trace(look(tmp_path, [*events, *frames])).offences
    assert offence["line"] == "torch/_tensor.py:2 (inner)"


def test_frames_that_overrun_their_parents_are_clamped(tmp_path):
    over = [
        ("train.py(10): main", 0, 1000),
        ("model.py(20): a", 10, 59),
        ("model.py(30): late child of a", 20, 62),
        ("model.py(57): route", 59, 300),
    ]
    assert summarise(look(tmp_path, stacked(over)))["waits"][0]["line"] == "model.py:57 (route)"


def test_without_stacks_the_report_says_how_to_record_them(tmp_path):
    found = summarise(look(tmp_path, item("Pageable")))
    assert found["waits"][0]["line"] is None and any("with_stack=True" in w for w in found["warnings"])


def test_many_frames_are_searched_across_index_blocks(tmp_path):
    frames = [("train.py(1): main", 0, 10_000)] + [
        (f"noise.py({i}): f", 1 + i * 0.001, 1 + i * 0.001 + 0.0005) for i in range(5_000)
    ]
    events = [e for e in stacked([]) if e["cat"] != "python_function"]
    events += [event("python_function", n, int(a * K), int(b * K)) for n, a, b in frames]
    assert summarise(look(tmp_path, events))["waits"][0]["line"] == "train.py:1 (main)"


def steps_events() -> list[dict]:
    out = []
    for i in range(3):
        a = i * 100 * K
        out += [
            event("user_annotation", f"ProfilerStep#{i}", a, a + 90 * K),
            event("user_annotation", f"block {i}", a + 1 * K, a + 30 * K),
            launch(a + 5 * K, a + 6 * K, i + 1),
            kernel(a + 10 * K + i * 40 * K, a + 60 * K + i * 40 * K, i + 1),
        ]
    return out


def test_windows(tmp_path):
    trace = read(write(tmp_path, steps_events()))
    assert parse_window(trace, "all") is None
    assert parse_window(trace, "steps") == (100 * K, 290 * K)
    assert parse_window(trace, "step:2") == (200 * K, 290 * K)
    assert parse_window(trace, "block 1") == (101 * K, 130 * K)
    assert parse_window(trace, "5000:9000") == (5000, 9000)
    assert parse_window(trace, "+0:+1.5ms") == (10 * K, 1510 * K)
    for bad in ("step:3", "nonsense", "9:5", "1:2:3", ""):
        with pytest.raises(TraceError, match="window"):
            parse_window(trace, bad)


def test_the_last_step_is_kept_and_missing_steps_are_said(tmp_path):
    rows = table51(look(tmp_path, steps_events()))
    assert rows[0]["metric"] == "step time" and rows[0]["count"] == 3 and rows[0]["median_us"] == 90
    a = look(tmp_path, item("Pageable"))
    assert [r["metric"] for r in table51(a)] == ["D2H route-shape wall time", "communication exposure"]
    with pytest.raises(TraceError, match="no ProfilerStep"):
        parse_window(a.trace, "steps")


def test_table51_rows(tmp_path):
    d2h_row, _ = table51(look(tmp_path, item("Pageable")))
    assert (d2h_row["count"], d2h_row["wait_us"], d2h_row["launch_gap_us"], d2h_row["gpu_idle_us"]) == (1, 60, 84, 36)
    a = look(
        tmp_path,
        [
            launch(0, 1 * K, 1),
            kernel(2 * K, 10 * K, 1),
            launch(1 * K, 2 * K, 2),
            kernel(6 * K, 30 * K, 2, stream=9, name="ncclDevKernel_AllReduce"),
        ],
    )
    comm = table51(a)[-1]
    assert (comm["communication_us"], comm["exposed_us"]) == (24, 20)


def test_work_before_the_window_stays_out_of_it(tmp_path):
    a = look(tmp_path, steps_events())
    found = summarise(a, (100 * K, 190 * K))["devices"][0]
    assert found["busy_ns"] == 40 * K and found["idle_ns"] == 50 * K and found["window_ns"] == [100 * K, 190 * K]


def test_blocks_ahead(tmp_path):
    a = look(tmp_path, steps_events())
    t, ahead = blocks_ahead(find_ranges(a, "^block"))
    assert dict(zip((t // K).tolist(), ahead.tolist())) == {1: 1, 10: 0, 101: 1, 150: 0, 201: 1, 290: 0}
    with pytest.raises(TraceError, match="block 0"):
        find_ranges(a, "microbatch")


def test_steps_of_ranks_that_start_apart(tmp_path):
    late = [dict(e, ts=e["ts"] + 7 * K) for e in steps_events()]
    for i, events in enumerate((steps_events(), late)):
        write(tmp_path, events, f"{i}.json", distributedInfo={"rank": i})
    rows = {r["step"]: r for r in analyse_folder(tmp_path).skew}
    assert rows["ProfilerStep#1"]["ranks"] == 2 and rows["ProfilerStep#1"]["start_spread_us"] == 7 * K / 1e3


def test_epoch_times_keep_their_last_nanosecond(tmp_path):
    base = 1712195495519680000
    events = [
        launch(base + 47, base + 3147, 1),
        kernel(base + 9447, base + 9647, 1),
        launch(base + 4000, base + 7000, 2),
        kernel(base + 9812, base + 9962, 2),
    ]
    assert look(tmp_path, events).idle(device(look(tmp_path, events))).total_ns() == 165


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 60),
            st.integers(0, 8),
            st.integers(-4, 20),
            st.integers(1, 15),
            st.integers(0, 2),
            st.integers(0, 1),
            st.sampled_from(["kernel", "copy", "none"]),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_a_slow_oracle_agrees(tmp_path_factory, rows):
    events = []
    for i, (at, length, delay, duration, stream, dev, kind) in enumerate(rows):
        start = max(at, at + length + delay)
        if kind == "none":
            events.append(call("cudaFuncGetAttributes", at * K, (at + length) * K, 500 + i))
            continue
        events.append(launch(at * K, (at + length) * K, i + 1))
        make = kernel if kind == "kernel" else d2h
        events.append(make(start * K, (start + duration) * K, i + 1, stream=stream, device=dev))
    a = look(tmp_path_factory.getbasetemp(), events)
    expected = analyse(events)
    assert sorted(d for _, d in a.rows) == sorted(expected)
    for pair in a.rows:
        want = expected[pair[1]]
        assert a.window(pair) == want["window"]
        assert a.idle(pair).total_ns() == want["idle"] == sum(a.idle(pair).by_cause_ns().values())
        assert a.copy_only_ns(pair) == want["copy_only"]
        t = np.array([x for x, _ in want["headroom"]])
        assert a.headroom(pair).at(t).tolist() == [h for _, h in want["headroom"]]
        streams = sum(a.headroom(pair, s).at(t) for s in a.streams(pair))
        assert streams.tolist() == [h for _, h in want["headroom"]]
    assert set(CAUSES) == {"submission", "sync", "turnaround", "dependency", "unknown"}
