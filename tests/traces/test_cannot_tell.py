"""Traces that lost data, or links from launches to device work: the verdict says that it cannot tell, and why."""

from __future__ import annotations

import pytest
from kineto_files import call, d2h, event, kernel, launch, write
from test_analysis import K, causes, device, item, look

from workbench.traces import TraceError, read
from workbench.traces.ranges import parse_window
from workbench.traces.verify import verify_trace


def test_graph_replay_recorded_without_its_kernels_cannot_be_told(tmp_path):
    graphs = [call("cudaGraphLaunch", i * 10 * K, i * 10 * K + 5 * K, 10 + i) for i in range(9)]
    a = look(tmp_path, [launch(0, 5 * K, 1), kernel(6 * K, 7 * K, 1), *graphs])
    found = verify_trace(a)
    assert found.exit_code == 2 and "9 graph launches" in found.reasons[0]


def test_kernels_without_api_rows(tmp_path):
    a = look(tmp_path, [kernel(0, 10 * K, 1), kernel(50 * K, 60 * K, 2)])
    assert causes(a) == {"unknown": 40 * K}
    assert verify_trace(a).exit_code == 2 and "no launch rows" in verify_trace(a).reasons[0]


def test_unlinked_share_above_the_bound(tmp_path):
    events = [launch(0, 1 * K, 1), kernel(2 * K, 3 * K, 1)] + [
        kernel((4 + i) * K, (5 + i) * K, 900 + i) for i in range(5)
    ]
    found = verify_trace(look(tmp_path, events))
    assert found.exit_code == 2 and "5 of 6" in found.reasons[0]


def test_operations_before_their_launch_or_off_by_1e14(tmp_path):
    a = look(
        tmp_path,
        [
            launch(10 * K, 15 * K, 1),
            kernel(5 * K, 8 * K, 1),
            launch(20 * K, 25 * K, 2),
            kernel(100_000_000_000_000, 100_000_000_001_000, 2),
        ],
    )
    assert a.clock_violation.tolist() == [True, False]
    late = look(
        tmp_path, [launch(0, K, 1), kernel(2 * K, 3 * K, 1), launch(90 * K, 95 * K, 2), kernel(50 * K, 60 * K, 2)]
    )
    assert causes(late) == {"unknown": 47 * K}
    assert verify_trace(a, idle_threshold_us=1e12).exit_code == 2
    assert all(v >= 0 for v in a.idle(device(a)).by_cause_ns().values())


def test_no_gpu_and_dropped_events_cannot_be_told(tmp_path):
    assert verify_trace(look(tmp_path, [event("cpu_op", "aten::mm", 0, 5 * K)])).exit_code == 2
    path = write(tmp_path, [launch(0, 5 * K, 1), kernel(8 * K, 9 * K, 1), launch(9 * K, 10 * K, 2)])
    path.write_text(path.read_text()[:-40])
    found = verify_trace(read(path))
    assert found.exit_code == 2 and "truncated_file" in found.reasons[0]


HEALTHY = [launch(0, 5 * K, 1), kernel(8 * K, 9 * K, 1), launch(9 * K, 10 * K, 2), kernel(11 * K, 12 * K, 2)]


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (kernel(15 * K, 13 * K, 3), "negative_duration 1"),
        ({k: v for k, v in kernel(13 * K, 14 * K, 3).items() if k != "ts"}, "unusable_time 1"),
        (kernel(13 * K, 14 * K, 2, stream=2**70), "out_of_range_ids 1"),
        (call("cudaStreamSynchronize", 13 * K, 14 * K, 3) | {"ph": "B"}, "begin_end_events 1"),
    ],
)
def test_a_hole_in_the_data_cannot_be_told(tmp_path, extra, reason):
    assert verify_trace(look(tmp_path, HEALTHY)).exit_code == 0
    found = verify_trace(look(tmp_path, [*HEALTHY, extra]))
    assert found.exit_code == 2 and any(reason in r for r in found.reasons), found


@pytest.mark.parametrize(("whole", "lost", "code"), [(3, 2, 0), (2, 2, 0), (2, 3, 2), (0, 3, 2)])
@pytest.mark.parametrize("start", [0, 50 * K])
def test_operations_mostly_without_duration_cannot_be_told(tmp_path, whole, lost, code, start):
    n = whole + lost
    events = [launch(i * 2 * K, i * 2 * K + K, i + 1) for i in range(n)]
    events += [kernel(n * 2 * K + i * 2 * K, n * 2 * K + (i + 1) * 2 * K, i + 1) for i in range(whole)]
    events += [kernel(start, start, whole + i + 1) for i in range(lost)]
    found = verify_trace(look(tmp_path, events))
    assert found.exit_code == code
    if code == 2:
        assert (
            f"{lost} of {n} device operations have no duration" in found.reasons[0]
            or "have no times" in found.reasons[0]
        )


def test_a_copy_without_times_cannot_be_told(tmp_path):
    found = verify_trace(look(tmp_path, [*HEALTHY, d2h(0, 0, 2)]))
    assert found.exit_code == 2 and "zero_time_copies 1" in found.reasons[0]


@pytest.mark.parametrize(("shared", "code"), [(1, 0), (2, 2)])
def test_launches_that_are_a_guess_cannot_be_told(tmp_path, shared, code):
    n = 20
    ids = [i + 1 for i in range(n)]
    events = [launch(i * 10 * K, i * 10 * K + K, c) for i, c in enumerate(ids)]
    events += [kernel(i * 10 * K + 2 * K, i * 10 * K + 9 * K, c) for i, c in enumerate(ids)]
    events += [call("cudaFuncGetAttributes", i * 10 * K - K, i * 10 * K, ids[i]) for i in range(1, shared + 1)]
    found = verify_trace(look(tmp_path, events))
    assert found.exit_code == code, found
    if code:
        assert "2 of 20 operations share their correlation id" in found.reasons[0]


def test_begin_and_end_of_other_categories_leave_no_hole(tmp_path):
    other = event("my_library", "span", 0, 5 * K) | {"ph": "B"}
    assert verify_trace(look(tmp_path, [*HEALTHY, other])).exit_code == 0


def test_a_window_without_device_operations_cannot_be_told(tmp_path):
    a = look(tmp_path, HEALTHY)
    assert verify_trace(a, window=(8 * K, 12 * K)).exit_code == 0
    found = verify_trace(a, window=(12 * K, 50 * K))
    assert found.exit_code == 2 and "holds no device operations" in found.reasons[0]
    with pytest.raises(TraceError, match=r"below 2\^63"):
        parse_window(a.trace, f"0:{2**63}")


def test_a_blocking_wait_decides_even_where_data_are_incomplete(tmp_path):
    path = write(tmp_path, item("Pageable"))
    path.write_text(path.read_text()[:-40])
    found = verify_trace(read(path))
    assert found.exit_code == 1 and any("incomplete" in n for n in found.notes)
