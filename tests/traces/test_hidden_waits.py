"""Waits that a trace hides: each of these passed as synchronization-free once; what resembles one still does."""

from __future__ import annotations

import pytest
from kineto_files import PID, TID, call, d2h, event, kernel, launch
from test_analysis import K, look

from workbench.traces.verify import verify_trace


def steady(n: int = 60, start: int = 0, first: int = 1000) -> list[dict]:
    """Launches every 10 us whose kernels of 50 us follow one another: a host far ahead."""
    out = []
    for i in range(n):
        at = start + i * 10 * K
        out += [
            launch(at, at + 5 * K, first + i),
            kernel(start + (20 + i * 50) * K, start + (70 + i * 50) * K, first + i),
        ]
    return out


def sync(start: int = 650 * K, end: int = 1400 * K, name: str = "cudaStreamSynchronize", **where) -> dict:
    return call(name, start, end, 5000, **where)


def without(given: dict, key: str) -> dict:
    return {k: v for k, v in given.items() if k != key}


def copy(text: str, start: int, end: int, correlation: int = 5000) -> dict:
    return d2h(start, end, correlation, stream=8) | {"name": text}


H2D, D2H = "Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pageable)"
RECORD = event("cuda_sync", "Stream Sync", 650 * K, 1400 * K, pid=0, tid=7, correlation=5000, stream=7, device=0)
END = 3020 * K  # of the steady kernels

WAITS = {
    "a thread written as text": [sync(tid=str(TID))],
    "a process written as text": [sync(pid=str(PID))],
    "a category with a space": [sync() | {"cat": "cuda_runtime "}],
    "a name with its library": [sync(name="libcudart.so.12:cudaStreamSynchronize")],
    "a name with a namespace": [sync(name=" ::cudaStreamSynchronize")],
    "a name in capitals": [sync(name="CUDASTREAMSYNCHRONIZE")],
    "another vendor's runtime": [sync() | {"cat": "xpu_runtime"}],
    "an unknown name with the profiler's record of its wait": [sync(name="vendorWait"), RECORD],
    "a synchronous copy to the device": [sync(name="cudaMemcpy"), copy(H2D, 1390 * K, 1395 * K)],
    "a synchronous set": [sync(name="cudaMemset"), copy("Memset (Device)", 1390 * K, 1395 * K) | {"cat": "gpu_memset"}],
    "a long copy from pageable memory": [sync(name="cudaMemcpyAsync"), copy(H2D, 1390 * K, 1395 * K)],
    "a copy done by a kernel": [sync(name="hipMemcpyWithStream"), kernel(1390 * K, 1395 * K, 5000, name="copyBuffer")],
    "polling with error checks between": [
        c
        for i in range(0, 500, 5)
        for c in (
            call("cudaEventQuery", (650 + i) * K, (651 + i) * K, 5000 + i),
            call("cudaGetLastError", (652 + i) * K, (653 + i) * K, 5001 + i),
        )
    ],
    "polling that follows an allocator's query": [
        event("cpu_op", "aten::empty", 640 * K, 646 * K),
        call("cudaEventQuery", 641 * K, 642 * K, 4999),
        *(call("cudaEventQuery", (650 + i) * K, (651 + i) * K, 5000 + i) for i in range(0, 500, 5)),
    ],
}

OPEN = {
    "a read whose call was not recorded": ([copy(D2H, 700 * K, 701 * K, 77777)], "1 device-to-host"),
    "a read with id 0": ([copy(D2H, 700 * K, 701 * K, 0)], "1 device-to-host"),
    "a pageable read that ends after its call": (
        [sync(end=1399 * K, name="cudaMemcpyAsync"), copy(D2H, 1390 * K, 1400 * K)],
        "into pageable memory end after their call",
    ),
    "a read whose id two calls share": (
        [
            sync(name="cudaMemcpyAsync"),
            call("cudaFuncGetAttributes", 1300 * K, 1301 * K, 5000, tid=55),
            copy("Memcpy DtoH (Device -> Host)", 1390 * K, 1400 * K),
        ],
        "share their correlation id",
    ),
    "a copy call without its copy": ([sync(name="cudaMemcpyAsync")], "1 copy calls"),
    "a name that is missing": ([sync() | {"name": None}], "of no known kind: None"),
    "a name of nobody": ([sync(name="hsa_signal_wait_scacquire")], "hsa_signal_wait_scacquire"),
    "short calls of nobody": ([sync(650 * K, 670 * K, "vendorCall")], "1 calls of 20 us"),
    "a call of the vendor that says wait": ([sync(name="cudaSomethingWait")], "cudaSomethingWait"),
    "a category that is missing": ([without(sync(), "cat")], "unknown_category 1"),
    "a thread that is missing": ([without(sync(), "tid")], "calls_without_thread 1"),
    "a process that is missing": ([without(sync(), "pid")], "calls_without_thread 1"),
    "a duration that is missing": ([without(sync(), "dur")], "missing_duration 1"),
    "times that are zero": ([sync() | {"ts": 0, "dur": 0}], "zero_time_calls 1"),
    "a phase in lower case": ([sync() | {"ph": "x"}], "stray_items 1"),
    "a phase that is empty": ([sync() | {"ph": ""}], "stray_items 1"),
    "a record of a wait that outlasts its call": ([sync(end=650 * K), RECORD], "1 synchronisation records"),
    "a read whose wait was not recorded": (
        [
            event("cpu_op", "aten::item", 640 * K, 1410 * K),
            sync(end=655 * K, name="cudaMemcpyAsync"),
            copy("Memcpy DtoH (Device -> Pinned)", 1390 * K, 1400 * K),
        ],
        "are read by an operator that waits for them",
    ),
    "a record of a wait without its call": ([RECORD], "1 synchronisation records"),
    "slow polling": (
        [call("cudaEventQuery", (650 + i) * K, (651 + i) * K, 5000 + i) for i in range(0, 700, 100)],
        "it may poll",
    ),
    "an operator that reads, without calls": (
        [event("cpu_op", "aten::_local_scalar_dense", 650 * K, 670 * K)],
        "1 operators that read device values",
    ),
    "a wait for nothing that is recorded": (
        [sync(650 * K, 740 * K), RECORD | {"args": {"correlation": 5000, "stream": 0, "device": 0}}],
        "1 synchronise calls took 20 us and more",
    ),
}


def test_without_them_the_steady_trace_passes(tmp_path):
    assert verify_trace(look(tmp_path, steady())).exit_code == 0


@pytest.mark.parametrize("what", WAITS)
def test_a_wait_in_disguise_is_found(tmp_path, what):
    found = verify_trace(look(tmp_path, [*steady(), *WAITS[what]]))
    assert found.exit_code == 1 and sum(o["count"] for o in found.offences) == 1, found


@pytest.mark.parametrize("what", OPEN)
def test_a_place_where_a_wait_may_hide_cannot_be_told(tmp_path, what):
    extra, reason = OPEN[what]
    found = verify_trace(look(tmp_path, [*steady(), *extra]))
    assert found.exit_code == 2 and any(reason in r for r in found.reasons), found


def test_memory_freed_while_work_is_queued_waits_for_the_device(tmp_path):
    before, after = steady(20), steady(20, 1004 * K, first=4000)
    found = verify_trace(look(tmp_path, [*before, sync(650 * K, 1021 * K, "cudaFree"), *after]))
    assert found.exit_code == 1 and found.offences[0]["kind"] == "implicit_sync"
    for harmless in (sync(650 * K, 651 * K, "cudaFree"), sync(650 * K, 1021 * K, "cudaFreeAsync")):
        assert verify_trace(look(tmp_path, [*before, harmless, *after])).exit_code == 0


def test_a_wait_of_a_thread_that_launches_nothing_while_all_submission_stands_still(tmp_path):
    before, after = steady(30), steady(30, 1005 * K, first=4000)
    found = verify_trace(look(tmp_path, [*before, sync(310 * K, 1000 * K, tid=99), *after]))
    assert found.exit_code == 2 and "threads that launch nothing" in found.reasons[0]
    other = [launch(700 * K, 701 * K, 8888, tid=66), kernel(1521 * K, 1522 * K, 8888)]
    assert verify_trace(look(tmp_path, [*before, sync(310 * K, 1000 * K, tid=99), *other, *after])).exit_code == 2
    assert verify_trace(look(tmp_path, [*steady(), sync(100 * K, 500 * K, tid=99)])).exit_code == 0


def test_a_synchronise_is_not_final_where_kernels_launched_after_it_were_lost(tmp_path):
    lost = [launch((3100 + i * 10) * K, (3105 + i * 10) * K, 6000 + i) for i in range(3)]
    wait = sync(650 * K, END, "cudaDeviceSynchronize")
    assert verify_trace(look(tmp_path, [*steady(), wait])).exit_code == 0
    assert verify_trace(look(tmp_path, [*steady(), wait, *lost])).exit_code == 1


def test_kernels_that_were_lost_in_the_middle(tmp_path):
    events = [e for e in steady() if e["cat"] != "kernel" or not 1020 <= e["args"]["correlation"] < 1023]
    found = verify_trace(look(tmp_path, events), idle_threshold_us=1000)
    assert found.exit_code == 2 and "3 kernel launches have no recorded kernel" in found.reasons[0]
    capture = [
        call("cudaStreamBeginCapture_v10000", 196 * K, 197 * K, 1),
        call("cudaStreamEndCapture", 226 * K, 227 * K, 2),
    ]
    assert verify_trace(look(tmp_path, [*events, *capture]), idle_threshold_us=1000).exit_code == 0


def test_idle_of_unknown_cause_above_the_threshold(tmp_path):
    tail = [
        kernel(END + 500 * K, END + 510 * K, 0),
        launch(END + 490 * K, END + 495 * K, 1),
        kernel(END + 510 * K, END + 520 * K, 1),
    ]
    found = verify_trace(look(tmp_path, [*steady(), *tail]))
    assert found.exit_code == 2 and "1 idle intervals above 20 us have no known cause (500.0 us" in found.reasons[0]
    assert verify_trace(look(tmp_path, [*steady(), *tail]), judge_idle=False).exit_code == 0
    assert verify_trace(look(tmp_path, [*steady(), *tail]), idle_threshold_us=500).exit_code == 0


def test_a_host_that_is_recorded_only_at_the_end(tmp_path):
    head = [kernel(i * 50 * K, (i + 1) * 50 * K, 100 + i) for i in range(100)]
    late = [launch(4980 * K, 4985 * K, 1), kernel(5000 * K, 5010 * K, 1)]
    found = verify_trace(look(tmp_path, [*head, *late]))
    assert found.exit_code == 2 and "recorded only from 4980.0 us after" in found.reasons[0]


def test_a_window_whose_operations_have_no_launch(tmp_path):
    bare = [kernel(END + i * 50 * K, END + (i + 1) * 50 * K, 9000 + i, stream=8) for i in range(3)]
    a = look(tmp_path, [*steady(), *bare])
    assert verify_trace(a).exit_code == 0
    found = verify_trace(a, window=(END, END + 150 * K))
    assert found.exit_code == 2 and "3 of 3 operations in the window have no recorded launch" in found.reasons[0]


def test_queries_where_nothing_is_launched_are_no_polling(tmp_path):
    found = verify_trace(look(tmp_path, [call("cudaEventQuery", i * K, i * K + K, i) for i in range(1, 30)]))
    assert found.exit_code == 2 and found.offences == []


def test_a_short_copy_from_pageable_memory_or_a_long_one_from_pinned_does_not_wait(tmp_path):
    pinned = [sync(name="cudaMemcpyAsync"), copy("Memcpy HtoD (Pinned -> Device)", 1390 * K, 1395 * K)]
    short = [sync(1386 * K, 1400 * K, "cudaMemcpyAsync"), copy(H2D, 1392 * K, 1395 * K)]
    for extra in (pinned, short):
        assert verify_trace(look(tmp_path, [*steady(), *extra])).exit_code == 0


@pytest.mark.parametrize(("blocking", "code"), [(20, 2), (3, 0)])
def test_launches_that_return_only_after_their_kernel(tmp_path, blocking, code):
    events = []
    for i in range(20):
        at = i * 20 * K
        end = at + (12 * K if i < blocking else 4 * K)
        events += [launch(at, end, 1 + i), kernel(at + 5 * K, at + 11 * K, 1 + i)]
    found = verify_trace(look(tmp_path, events))
    assert found.exit_code == code and ("CUDA_LAUNCH_BLOCKING" in str(found)) == (code == 2)


def test_a_wait_of_a_thread_none_of_whose_kernels_was_recorded(tmp_path):
    lost = [launch((i * 10 + 6) * K, (i * 10 + 8) * K, 7000 + i, tid=8) for i in range(30)]
    found = verify_trace(look(tmp_path, [*steady(), *lost]))
    assert found.exit_code == 2 and "30 kernel launches have no recorded kernel" in found.reasons[0]
    assert verify_trace(look(tmp_path, [*steady(), *lost, sync(tid=8)])).exit_code == 1
