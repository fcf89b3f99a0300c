"""Real traces of others (never committed): exact idle and span, waits, verdicts; skipped where they are absent."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from workbench.traces import read
from workbench.traces.idle import Analysis
from workbench.traces.replay import what_if
from workbench.traces.summary import summarise
from workbench.traces.verify import verify_trace
from workbench.traces.waits import WAIT_KINDS

IDLE_AND_SPAN_NS = {
    "a100_eager_60_syncs.json.gz": (76_007_000, 464_594_000),
    "v100_cuda_graphs.json.gz": (27_296_000, 745_239_000),
    "v100_ns_resolution.json.gz": (7_574_738, 480_029_179),
    "nccl_training.json.gz": (503_050_991, 660_551_005),
    "event_sync.json.gz": (212_000, 263_000),
    "event_sync_multi_stream.json.gz": (19_134_000, 19_506_000),
    "triton_one_kernel.json.gz": (0, 1_760),
    "mi250_rocm.json.gz": (8_762_845, 8_911_887),
}
VERDICTS = {
    "01_long_lead_not_starved": 0,
    "02_submission_bound": 1,
    "03_sync_bound_item": 1,
    "04_sync_covered": 1,
    "06_graph_one_corr": 1,
    "07_ex_launch_names": 0,
    "08_two_devices_same_stream": 1,
    "09_sub_us_float": 0,
    "10_start_before_api_returns": 0,
    "12_orphan_kernels": 0,
    "13_pdl_overlap_same_stream": 0,
    "14_no_gpu": 2,
    "16_zero_ts_kernel": 0,
    "18_cuda_sync_events": 1,
    "19_pinned_d2h_no_block": 0,
    "22_truncated": 2,
    "25_top_level_list": 1,
    "26_metadata_only": 2,
}


@pytest.fixture(scope="module")
def traces(shared: Path) -> Path:
    folder = shared / "traces"
    if not folder.is_dir():
        pytest.skip("the traces of others are not on this machine")
    return folder


@pytest.mark.parametrize("name", IDLE_AND_SPAN_NS)
def test_exact_idle_and_span(traces: Path, name: str):
    analysis = Analysis(read(traces / name))
    (device,) = summarise(analysis)["devices"]
    low, high = device["window_ns"]
    assert (device["idle_ns"], high - low) == IDLE_AND_SPAN_NS[name]
    assert sum(device["idle_by_cause_ns"].values()) == device["idle_ns"]
    answer = what_if(analysis)
    assert answer["replayed_us"] == pytest.approx(answer["measured_us"], rel=0.02)


def counts(analysis: Analysis) -> Counter:
    return Counter(WAIT_KINDS[k] for k, b in zip(analysis.waits.kind, analysis.waits.blocking) if b)


def test_sixty_blocking_reads(traces: Path):
    assert counts(Analysis(read(traces / "a100_eager_60_syncs.json.gz")))["blocking_d2h"] == 60


def test_twelve_graph_launches_own_5046_kernels(traces: Path):
    analysis = Analysis(read(traces / "v100_cuda_graphs.json.gz"))
    trace = analysis.trace
    graph = [i for i in analysis.launches if trace.names[trace.calls.name[i]] == "cudaGraphLaunch"]
    owned = Counter(trace.ops.launch.tolist())
    assert len(graph) == 12 and sum(owned[i] for i in graph) == 5046


def test_full_launch_queue_is_not_blamed(traces: Path):
    analysis = Analysis(read(traces / "v100_ns_resolution.json.gz"))
    assert not analysis.waits.counted().any()
    assert max(analysis.trace.calls.end_ns - analysis.trace.calls.start_ns) > 80_000_000


def test_item_and_nonzero(traces: Path):
    analysis = Analysis(read(traces / "h200_item_and_nonzero.json.gz"))
    assert counts(analysis) == {"blocking_d2h": 6}
    ops = Counter(o["op"] for o in verify_trace(analysis).offences for _ in range(o["count"]))
    assert ops == {"aten::_local_scalar_dense": 3, "aten::nonzero": 3}


def test_nsys_export_of_two_processes(traces: Path):
    analysis = Analysis(read(traces / "h100_2gpu_1s.sqlite"))
    summary = summarise(analysis)
    by_device = {d["device"]: d for d in summary["devices"]}
    assert by_device[0]["idle_ns"] == 6_557_358 and by_device[1]["idle_ns"] == 6_447_873
    low, high = by_device[0]["window_ns"]
    assert high - low == 969_447_605
    reads = [w for w in summary["waits"] if w["kind"] == "blocking_d2h"]
    assert len(reads) == 4 and all(w["op"] == "aten::_local_scalar_dense" for w in reads)
    assert len(summary["waits"]) == 8
    assert sum(w["duration_ns"] for w in summary["waits"]) == pytest.approx(856.9e6, abs=0.05e6)
    assert by_device[0]["headroom_us"]["max"] > 420_000


@pytest.mark.parametrize("name", VERDICTS)
def test_verdicts_of_the_minimal_files(traces: Path, name: str):
    assert verify_trace(read(traces / "minimal" / f"{name}.json")).exit_code == VERDICTS[name]
