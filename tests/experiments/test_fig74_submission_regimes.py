"""Captures of the submission regimes: what the cut keeps, what the analysis says about traces whose answer is known."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from changing import changed

from workbench.experiments import fig74_submission_regimes as fig74
from workbench.experiments import load
from workbench.measure.regimes import cut, packed
from workbench.views.regimes import analyse, kernels

BLOCKS = 4
LAUNCH, WAIT_TAIL = 10.0, 2.0


class Builder:
    """A host and one FIFO stream: launches, waits and ranges become a Kineto trace. Times in us."""

    def __init__(self, host: float = 0.0, device: float = 0.0) -> None:
        self.host, self.device, self.id = host, device, 0
        self.events: list[dict[str, Any]] = []

    def event(self, cat: str, name: str, start: float, end: float, **args: Any) -> None:
        pid, tid = (0, 7) if cat in ("kernel", "gpu_memcpy") else (1, 1)
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": round(start, 3),
                            "dur": round(end - start, 3), "args": args})  # fmt: skip

    def launch(self, duration: float, name: str = "kernel", cat: str = "kernel", host: float = LAUNCH) -> None:
        self.id += 1
        call = "cudaMemcpyAsync" if cat == "gpu_memcpy" else "cudaLaunchKernel"
        self.event("cuda_runtime", call, self.host, self.host + host, correlation=self.id)
        start = max(self.host + host, self.device)
        self.event(cat, name, start, start + duration, correlation=self.id, device=0, stream=7, context=1)
        self.host, self.device = self.host + host, start + duration

    def wait(self) -> None:
        self.id += 1
        end = max(self.host, self.device) + WAIT_TAIL
        self.event("cuda_runtime", "cudaEventSynchronize", self.host, end, correlation=self.id)
        self.host = end

    def named(self, name: str, start: float) -> None:
        self.event("user_annotation", name, start, self.host)


def build(wait: bool, microbatches: int = 3, kernel: float = 100.0) -> dict[str, Any]:
    """Forward blocks of three kernels, the routed ones with a wait after their first; backward of two kernels each."""
    b = Builder()
    for m in range(microbatches):
        begin = b.host
        for block in range(BLOCKS):
            start = b.host
            b.launch(kernel, "attention")
            if block and wait:
                b.launch(5.0, "Memcpy DtoH (Device -> Pinned)", "gpu_memcpy")
                b.wait()
            b.launch(kernel, "experts")
            b.launch(kernel, "combine")
            b.named(f"block {block} forward", start)
        for block in reversed(range(BLOCKS)):
            start = b.host
            for _ in range(2):
                b.launch(kernel, "backward")
            b.named(f"block {block} backward", start)
        b.named(f"microbatch {m}", begin)
    return {"schemaVersion": 1, "traceEvents": b.events}


def written(tmp_path: Path, trace: dict[str, Any]) -> Path:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(packed(trace))
    return path


def rows_of(rows: list[dict[str, Any]], part: str) -> list[dict[str, Any]]:
    return [r for r in rows if r["part"] == part]


def test_a_wait_in_every_routed_block_keeps_the_cpu_in_step(tmp_path):
    rows = analyse(written(tmp_path, cut(build(wait=True), "microbatch 1")), "microbatch 1", (1, 2))
    blocks, (summary,) = rows_of(rows, "block"), rows_of(rows, "capture")
    assert [b["waits"] for b in blocks] == [0, 1, 1, 1] and summary["waits"] == 3
    assert [b["ahead"] for b in blocks[2:]] == [1, 1]
    assert summary["not_begun_at_submission"] == 0
    # After each wait the device stands still until the next launch has been made.
    assert summary["idle_sync_rebuild_us"] + summary["idle_sync_blocked_us"] == pytest.approx(
        summary["forward_idle_us"], abs=20
    )
    assert summary["forward_idle_us"] == pytest.approx(3 * (WAIT_TAIL + LAUNCH), rel=0.05)


def test_without_waits_the_cpu_submits_the_microbatch_early(tmp_path):
    rows = analyse(written(tmp_path, cut(build(wait=False), "microbatch 1")), "microbatch 1", (1, 2))
    blocks, (summary,) = rows_of(rows, "block"), rows_of(rows, "capture")
    assert [b["waits"] for b in blocks] == [0, 0, 0, 0]
    assert [b["ahead"] for b in blocks] == [1, 2, 3, 4]
    assert summary["not_begun_at_submission"] == BLOCKS and summary["forward_idle_us"] == 0
    assert summary["forward_us"] == pytest.approx(BLOCKS * 300)
    assert summary["launches"] == BLOCKS * 5


def test_taking_the_waits_out_predicts_the_run_without_them(tmp_path):
    rows = analyse(written(tmp_path, cut(build(wait=True), "microbatch 1")), "microbatch 1", (1, 2))
    (summary,) = rows_of(rows, "capture")
    free = BLOCKS * (300 + 200)
    copies, held = 3 * 5.0, 3 * (WAIT_TAIL + LAUNCH)
    assert summary["device_us"] == pytest.approx(free + copies + held, abs=1.0)
    # The copies that fed the waits go with them, or stay: either way the gaps are gone.
    assert free - 1 <= summary["predicted_us"] <= free + copies + 1


def test_a_run_that_is_bound_by_submission_gains_what_it_waited(tmp_path):
    path = written(tmp_path, cut(build(wait=True, kernel=4.0), "microbatch 1"))
    (summary,) = rows_of(analyse(path, "microbatch 1", (1, 2)), "capture")
    gain = summary["device_us"] - summary["predicted_us"]
    assert 0 < gain <= summary["wait_us"] + 3 * LAUNCH


def test_the_cut_keeps_launches_of_earlier_work_and_drops_operators():
    trace = build(wait=True)
    trace["traceEvents"] += [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0.0, "dur": 9.0, "args": {}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaGetDevice", "pid": 1, "tid": 1, "ts": 1.0, "dur": 0.5,
         "args": {"correlation": 9_000}},
    ]  # fmt: skip
    small = cut(trace, "microbatch 1")
    kinds = {e["cat"] for e in small["traceEvents"]}
    assert "cpu_op" not in kinds and not any(e["name"] == "cudaGetDevice" for e in small["traceEvents"])
    work = [e for e in small["traceEvents"] if e["cat"] in ("kernel", "gpu_memcpy")]
    calls = {e["args"]["correlation"] for e in small["traceEvents"] if e["cat"] == "cuda_runtime"}
    assert work and all(e["args"]["correlation"] in calls for e in work)
    low = next(e["ts"] for e in trace["traceEvents"] if e["name"] == "microbatch 1")
    assert all(e["ts"] + e["dur"] > low for e in work)
    assert any(e["ts"] < low for e in small["traceEvents"] if e["cat"] == "cuda_runtime")
    names = {e["name"] for e in small["traceEvents"] if e["cat"] == "user_annotation"}
    assert "microbatch 1" in names and "block 0 forward" in names


def test_event_queries_inside_an_allocation_are_left_out_and_polling_is_kept():
    trace = build(wait=True)
    span = next(e for e in trace["traceEvents"] if e["name"] == "microbatch 1")
    at = span["ts"] + 1.0
    trace["traceEvents"] += [
        {"ph": "X", "cat": "cpu_op", "name": "aten::empty", "pid": 1, "tid": 1, "ts": at, "dur": 2.0, "args": {}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaEventQuery", "pid": 1, "tid": 1, "ts": at + 1.0, "dur": 0.2,
         "args": {"correlation": 9_001}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaEventQuery", "pid": 1, "tid": 1, "ts": at + 4.0, "dur": 0.2,
         "args": {"correlation": 9_002}},
    ]  # fmt: skip
    kept = [e["args"]["correlation"] for e in cut(trace, "microbatch 1")["traceEvents"] if "Query" in e["name"]]
    assert kept == [9_002]


def test_a_missing_range_is_named():
    with pytest.raises(ValueError, match=r"no range 'microbatch 9'.*microbatch 0"):
        cut(build(wait=False), "microbatch 9")


def test_packed_traces_are_scrubbed_and_reproducible():
    trace = {"traceEvents": [{"name": "load /home/someone/secret/file.py", "args": {}}]}
    stamp = packed(trace)[4:8]
    assert packed(trace) == packed(trace) and stamp == bytes(4), "the time of packing must not be in the bytes"
    text = gzip.decompress(packed(trace)).decode()
    assert "someone" not in text and json.loads(text)["traceEvents"][0]["name"].startswith("load ")


def test_magnified_operations_lie_inside_their_window(tmp_path):
    path = written(tmp_path, cut(build(wait=True), "microbatch 1"))
    (summary,) = rows_of(analyse(path, "microbatch 1", (1, 2)), "capture")
    # From the middle of one kernel to the middle of another: both are cut at the window's edge.
    low, high = summary["zoom_start_us"] + 30, summary["zoom_start_us"] + summary["zoom_us"] - 30
    found = kernels(path, "microbatch 1", low, high - low)
    assert found and all(low <= r["start_us"] < r["end_us"] <= high for r in found)
    assert found[0]["start_us"] == pytest.approx(low, abs=0.01) and found[-1]["end_us"] == pytest.approx(high, abs=0.01)
    assert {r["kind"] for r in found} == {"gpu_execute", "copy"}


needs_recording = pytest.mark.skipif(fig74.EXPERIMENT.recording is None, reason="no capture is pinned yet")


@pytest.fixture(scope="module")
def recorded():
    return load("fig74_submission_regimes").run("recorded")


@needs_recording
def test_recorded_claims_hold_or_are_known(recorded):
    assert len(recorded.checks) > 10 and [c.claim for c in recorded.checks if c.fails] == []


@needs_recording
@pytest.mark.parametrize(
    "part, column, value, claim",
    [
        ("block", "waits", 2, "one host wait in every routed block"),
        ("block", "ahead", 3, "at most one block ahead"),
        ("capture", "not_begun_at_submission", 1, "submitted the whole forward"),
        ("capture", "forward_idle_us", 1e6, "back to back"),
    ],
)
def test_another_capture_would_fail_its_claim(recorded, part, column, value, claim):
    other = changed(recorded, part, pl.lit(value).alias(column))
    assert any(claim in c.claim and c.fails for c in other.checks)


@needs_recording
@pytest.mark.parametrize("variant, part, column, factor", [("rowwise", "step", "step_ms", 10),
                                                           ("rowwise", "capture", "launches", 10)])  # fmt: skip
def test_a_prediction_that_misses_elsewhere_has_no_known_reason(recorded, variant, part, column, factor):
    """What excuses the short sequences: the prediction is too long, because rowwise submits fewer launches."""
    short = fig74.captured_lengths(recorded)[-1]
    assert fig74.what_if_check(recorded, short).known
    mine = pl.col("variant") == variant
    new = pl.when(mine).then(pl.col(column) * factor).otherwise(pl.col(column)).alias(column)
    other = changed(recorded, part, new)
    assert fig74.what_if_check(other, short).fails


@needs_recording
def test_one_slower_rowwise_process_fails_the_claim(recorded):
    row = (pl.col("variant") == "rowwise") & (pl.col("process") == 2)
    slower = pl.when(row).then(pl.lit(1e4)).otherwise(pl.col("step_ms")).alias("step_ms")
    other = dataclasses.replace(
        recorded, tables=recorded.tables | {"step": recorded.tables["step"].with_columns(slower)}
    )
    assert sum("every process start" in c.claim and c.fails for c in other.checks) == 2


@needs_recording
def test_the_pinned_traces_say_what_the_table_says(recorded):
    for variant in ("synchronized", "rowwise"):
        rows = analyse(recorded.recording.file(f"trace_{variant}_8192.json.gz"), fig74.MICROBATCH)
        again = [r["waits"] for r in rows_of(rows, "block")]
        chosen = (pl.col("variant") == variant) & (pl.col("length") == 8192)
        assert again == recorded.tables["block"].filter(chosen)["waits"].to_list()


@needs_recording
def test_figure_and_view_draw_every_length(recorded):
    for length in fig74.captured_lengths(recorded):
        result = recorded.with_params(length=length)
        traces = result.figure().data
        assert {"GPU busy share", "headroom", "sync wait"} <= {t.name for t in traces}
        view = fig74.view(result)
        sizes = {len(column) for column in view["events"].values()}
        assert sizes == {len(view["events"]["lane"])} and max(view["events"]["lane"]) < len(view["lanes"])
