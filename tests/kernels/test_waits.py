"""Host waits counted from a trace: blocking calls inside the marked range, each copy by the call that issued it."""

import pytest

torch = pytest.importorskip("torch")
from moe_kernels.waits import HostWaits, count_host_waits, waits_of_trace  # noqa: E402


def event(name, cat, ts, dur=1.0, correlation=None):
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "args": args}


def trace():
    return {
        "traceEvents": [
            event("counted region", "user_annotation", 10, 100),
            event("cudaLaunchKernel", "cuda_runtime", 11, correlation=1),
            event("kernel", "kernel", 200, correlation=1),
            event("cudaMemcpyAsync", "cuda_runtime", 20, correlation=2),
            event("Memcpy DtoH (Device -> Pageable)", "gpu_memcpy", 210, correlation=2),
            event("cudaStreamSynchronize", "cuda_runtime", 21, correlation=3),
            event("cudaMemcpyAsync", "cuda_runtime", 30, correlation=4),
            event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 220, correlation=4),
            event("cudaEventSynchronize", "cuda_runtime", 31, correlation=5),
            event("cudaStreamWaitEvent", "cuda_runtime", 40, correlation=6),
            event("cudaDeviceSynchronize", "cuda_runtime", 120, correlation=7),
            event("cudaMemcpyAsync", "cuda_runtime", 5, correlation=8),
            event("Memcpy DtoH (Device -> Pageable)", "gpu_memcpy", 15, correlation=8),
        ]
    }


def test_waits_inside_the_range_count_and_others_do_not():
    waits = waits_of_trace(trace())
    assert waits.calls == {"cudaStreamSynchronize": 1, "cudaEventSynchronize": 1}
    assert (waits.pageable_d2h, waits.pinned_d2h, waits.launches) == (1, 1, 3)
    assert waits.total == 2


def test_a_pageable_copy_without_a_synchronise_call_still_counts():
    assert HostWaits(calls={}, pageable_d2h=2, pinned_d2h=0, launches=2).total == 2


def test_a_trace_without_the_range_is_refused():
    with pytest.raises(RuntimeError, match="no range named 'other'"):
        waits_of_trace(trace(), "other")


@pytest.mark.skipif(torch.cuda.is_available(), reason="concerns machines without a GPU")
def test_no_gpu_is_said():
    with pytest.raises(RuntimeError, match="no CUDA device"):
        count_host_waits(lambda: None)
