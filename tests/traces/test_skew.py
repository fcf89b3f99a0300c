"""Ranks apart: collectives by who came last, block starts by one clock, and what cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workbench.traces.idle import Analysis
from workbench.traces.kineto import read_kineto
from workbench.traces.ranges import table51
from workbench.traces.skew import collective_skew, start_skew
from workbench.traces.trace import TraceError

NCCL, BARRIER = "ncclDevKernel_SendRecv(args)", "void barrier_on_stream_kernel_threadgroup<(threadgroup_t)1>(int, int)"
WHOLE = (0, 10**15)


def rank(folder: Path, name: str, work: list[tuple[str, float, float]], base: int = 0) -> Analysis:
    """A trace of (kernel, launch us, duration us), each in a range "block i" and started 10 us after its launch."""
    events: list[dict[str, Any]] = []
    for i, (kernel, at, lasts) in enumerate(work, start=1):
        host = {"ph": "X", "pid": 1, "tid": 1, "ts": at}
        events += [
            host | {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": 2.0, "args": {"correlation": i}},
            host | {"cat": "user_annotation", "name": f"block {i}", "ts": at - 1.0, "dur": 5.0, "args": {}},
            {"ph": "X", "cat": "kernel", "name": kernel, "pid": 0, "tid": 7, "ts": at + 10.0, "dur": lasts,
             "args": {"correlation": i, "device": 0, "stream": 7}},
        ]  # fmt: skip
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"schemaVersion": 1, "baseTimeNanoseconds": base, "traceEvents": events}))
    return Analysis(read_kineto(path))


def test_the_shortest_kernel_is_the_last_rank(tmp_path):
    ranks = [
        rank(tmp_path, "a", [("gemm", 100, 7), (NCCL, 200, 50), (BARRIER, 300, 5)]),
        rank(tmp_path, "b", [("gemm", 100, 9), (NCCL, 240, 10), (BARRIER, 300, 25)]),
        rank(tmp_path, "c", [("gemm", 100, 9), (NCCL, 220, 30), (BARRIER, 300, 15)]),
    ]
    first, second = collective_skew(ranks, [WHOLE] * 3)
    assert (first["name"], second["name"]) == ("ncclDevKernel_SendRecv", "barrier_on_stream_kernel_threadgroup")
    assert (first["last"], first["skew_us"], first["duration_us"]) == (1, 40.0, 10.0)
    assert first["waited_us"] == [40.0, 0.0, 20.0]
    assert (second["last"], second["waited_us"]) == (0, [0.0, 20.0, 10.0])


def test_only_what_was_launched_in_the_window_is_compared(tmp_path):
    ranks = [rank(tmp_path, n, [(NCCL, 100, 9), (NCCL, 200, lasts)]) for n, lasts in (("a", 5), ("b", 8))]
    (only,) = collective_skew(ranks, [(150_000, 250_000)] * 2)
    assert only["skew_us"] == 3.0


def test_ranks_that_did_different_things_are_refused(tmp_path):
    one = rank(tmp_path, "one", [(NCCL, 100, 5)])
    two = rank(tmp_path, "two", [(NCCL, 100, 5), (NCCL, 200, 5)])
    other = rank(tmp_path, "other", [(BARRIER, 100, 5)])
    with pytest.raises(TraceError, match=r"different numbers of collectives in their windows: \[1, 2\]"):
        collective_skew([one, two], [WHOLE] * 2)
    with pytest.raises(TraceError, match=r"collective 0 differs between the ranks: barrier_on_stream.*, ncclDevKernel"):
        collective_skew([one, other], [WHOLE] * 2)


def test_block_starts_are_compared_on_one_clock(tmp_path):
    ranks = [
        rank(tmp_path, "a", [("gemm", 100, 5), ("gemm", 200, 5)], base=1_000_000),
        rank(tmp_path, "b", [("gemm", 90, 5), ("gemm", 160, 5)], base=1_030_000),
    ]
    rows = start_skew(ranks, r"^block \d+$", [WHOLE] * 2)
    assert [(r["name"], r["skew_us"], r["last"]) for r in rows] == [("block 1", 20.0, 1), ("block 2", 10.0, 0)]


def test_a_barrier_of_nvshmem_is_communication(tmp_path):
    (row,) = (
        r
        for r in table51(rank(tmp_path, "a", [("gemm", 100, 7), (BARRIER, 300, 25)]))
        if r["metric"] == "communication exposure"
    )
    assert (row["count"], row["communication_us"], row["exposed_us"]) == (1, 25.0, 25.0)


def test_no_ranks_have_no_skew():
    assert collective_skew([], []) == start_skew([], "block", []) == []
