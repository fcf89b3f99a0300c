"""Nsight Systems exports made in the test: lazy tables, odd columns, hostile names, no CUDA at all."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from workbench.traces import TraceError, read
from workbench.traces.idle import Analysis
from workbench.traces.summary import summarise
from workbench.traces.verify import verify_trace

PROCESS, OTHER = 0x1000000 * 77, 0x1000000 * 78
K = 1_000


def create(db: sqlite3.Connection, table: str, columns: str) -> None:
    quoted = ", ".join(f'"{c}"' for c in columns.split())
    db.execute(f'CREATE TABLE "{table}" ({quoted})')


def export(folder: Path, drop: tuple[str, ...] = (), suffix: str = "") -> Path:
    """Two processes with one correlation each for their own kernel, a pinned D2H under aten::item, NVTX."""
    path = folder / "t.sqlite"
    path.unlink(missing_ok=True)
    db = sqlite3.connect(path)
    strings = {
        1: "cudaLaunchKernel_v7000",
        2: "cudaMemcpyAsync_v3020",
        3: "cudaStreamSynchronize_v3020",
        4: "<script>kernel</script>",
        5: "step",
    }
    create(db, "StringIds", "id value")
    db.executemany("INSERT INTO StringIds VALUES (?, ?)", strings.items())
    create(db, f"NVTX_EVENTS{suffix}", "start end eventType text textId globalTid")
    rows = [
        (0, 500 * K, 59, None, 5, PROCESS + 3),
        (45 * K, 80 * K, 59, "aten::item, op_id = 31", None, PROCESS + 3),
        (1, None, 34, "mark", None, PROCESS + 3),
    ]
    db.executemany(f"INSERT INTO NVTX_EVENTS{suffix} VALUES (?,?,?,?,?,?)", rows)
    create(db, "CUPTI_ACTIVITY_KIND_RUNTIME", "start end globalTid correlationId nameId returnValue")
    calls = [
        (0, 5 * K, PROCESS + 3, 1, 1, 0),
        (50 * K, 52 * K, PROCESS + 3, 2, 2, 0),
        (53 * K, 75 * K, PROCESS + 3, 3, 3, 0),
        (90 * K, 95 * K, PROCESS + 3, 4, 1, 0),
        (0, 5 * K, OTHER + 9, 1, 1, 0),
    ]
    db.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,?,?,?)", calls)
    create(db, "CUPTI_ACTIVITY_KIND_KERNEL", "start end deviceId streamId correlationId globalPid shortName")
    kernels = [
        (8 * K, 60 * K, 0, 7, 1, PROCESS, 4),
        (98 * K, 110 * K, 0, 7, 4, PROCESS, 4),
        (9 * K, 20 * K, 1, 7, 1, OTHER, 4),
    ]
    db.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,?,?,?,?,?)", kernels)
    create(
        db,
        "CUPTI_ACTIVITY_KIND_MEMCPY",
        "start end deviceId streamId correlationId globalPid bytes copyKind srcKind dstKind",
    )
    db.execute(
        "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?,?,?,?,?,?,?,?,?,?)",
        (62 * K, 63 * K, 0, 7, 2, PROCESS, 4, 2, 2, 1),
    )
    create(db, "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "start end streamId correlationId globalPid syncType")
    db.execute(
        "INSERT INTO CUPTI_ACTIVITY_KIND_SYNCHRONIZATION VALUES (?,?,?,?,?,?)", (53 * K, 74 * K, 7, 3, PROCESS, 3)
    )
    for table in drop:
        db.execute(f'DROP TABLE "{table}"')
    db.commit()
    db.close()
    return path


@pytest.mark.parametrize("suffix", ["", "_V2", "_V3"])
def test_two_processes_their_waits_and_names(tmp_path, suffix):
    analysis = Analysis(read(export(tmp_path, suffix=suffix)))
    found = summarise(analysis)
    assert [(d["process"], d["device"], d["idle_ns"]) for d in found["devices"]] == [(77, 0, 37 * K), (78, 1, 0)]
    assert found["waits"] == [
        {
            "kind": "blocking_d2h",
            "start_ns": 53 * K,
            "duration_ns": 22 * K,
            "thread": 3,
            "blocking": True,
            "line": None,
            "op": "aten::item",
            "range": "step",
        }
    ]
    assert found["devices"][0]["idle_by_cause_ns"] == {
        "submission": 0,
        "sync_blocked": 12 * K,
        "sync_rebuild": 23 * K,
        "turnaround": 2 * K,
        "dependency": 0,
        "unknown": 0,
    }
    assert verify_trace(analysis).exit_code == 1


@pytest.mark.parametrize(
    "table",
    [
        "NVTX_EVENTS",
        "StringIds",
        "CUPTI_ACTIVITY_KIND_MEMCPY",
        "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
        "CUPTI_ACTIVITY_KIND_RUNTIME",
    ],
)
def test_every_table_is_optional(tmp_path, table):
    analysis = Analysis(read(export(tmp_path, drop=(table,))))
    assert len(analysis.trace.ops) >= 3 and summarise(analysis)["devices"]
    if table.endswith("RUNTIME"):
        assert verify_trace(analysis).exit_code == 2


@pytest.mark.parametrize(("stream", "blocking"), [(7, True), (9, False)])
def test_a_stream_sync_waits_for_its_own_stream(tmp_path, stream, blocking):
    path = export(tmp_path, drop=("CUPTI_ACTIVITY_KIND_MEMCPY",))
    db = sqlite3.connect(path)
    db.execute("UPDATE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION SET streamId = ?", (stream,))
    db.commit()
    db.close()
    assert [(w["kind"], w["blocking"]) for w in summarise(read(path))["waits"]] == [("stream_sync", blocking)]


def test_no_cuda_activity_is_said(tmp_path):
    trace = read(export(tmp_path, drop=("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY")))
    assert verify_trace(trace).exit_code == 2 and any("--trace=cuda" in w for w in trace.warnings)


def test_records_without_an_end_are_dropped_and_counted(tmp_path):
    path = export(tmp_path)
    db = sqlite3.connect(path)
    db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (5, NULL, 0, 7, 9, ?, 4)", (PROCESS,))
    db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (50, 40, 0, 7, 9, ?, 4)", (PROCESS,))
    db.commit()
    db.close()
    trace = read(path)
    assert len(trace.ops) == 4 and trace.dropped["dropped_records"] >= 2


def test_ids_that_are_no_numbers_are_counted(tmp_path):
    path = export(tmp_path)
    db = sqlite3.connect(path)
    db.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET correlationId = 'x' WHERE correlationId = 4")
    db.commit()
    db.close()
    trace = read(path)
    assert (trace.ops.launch < 0).sum() == 1 and trace.dropped["out_of_range_ids"] == 1
    assert verify_trace(trace).exit_code != 0


def test_a_mark_leaves_no_hole(tmp_path):
    path = export(tmp_path)
    db = sqlite3.connect(path)
    db.execute("UPDATE CUPTI_ACTIVITY_KIND_MEMCPY SET copyKind = 1")
    db.execute("DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME WHERE nameId = 3")
    db.commit()
    trace = read(path)
    assert trace.dropped == {"marks_and_open_ranges": 1}
    found = verify_trace(trace, idle_threshold_us=100)
    assert found.exit_code == 2 and any("1 synchronisation records" in r for r in found.reasons)
    db.execute("DELETE FROM CUPTI_ACTIVITY_KIND_SYNCHRONIZATION")
    db.commit()
    db.close()
    assert verify_trace(read(path), idle_threshold_us=100).exit_code == 0


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ('ALTER TABLE CUPTI_ACTIVITY_KIND_MEMCPY DROP COLUMN "end"', "unread_tables 1"),
        ("UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET globalTid = NULL WHERE nameId = 3", "calls_without_thread 1"),
    ],
)
def test_a_table_that_is_not_read_or_a_call_of_no_thread_cannot_be_told(tmp_path, change, lost):
    path = export(tmp_path)
    db = sqlite3.connect(path)
    db.execute("UPDATE CUPTI_ACTIVITY_KIND_MEMCPY SET copyKind = 1")
    db.execute("UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET start = 76000, end = 76000 WHERE nameId = 3")
    db.execute("DELETE FROM CUPTI_ACTIVITY_KIND_SYNCHRONIZATION")
    db.commit()
    assert verify_trace(read(path), idle_threshold_us=100).exit_code == 0
    db.execute(change)
    db.commit()
    db.close()
    found = verify_trace(read(path), idle_threshold_us=100)
    assert found.exit_code == 2 and any(lost in r for r in found.reasons)


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ('CUPTI_ACTIVITY_KIND_KERNEL SET "end" = 9223372036854775807 WHERE start = 98000', 1),
        ("CUPTI_ACTIVITY_KIND_KERNEL SET start = -9223372036854775808 WHERE start = 98000", 1),
        ("CUPTI_ACTIVITY_KIND_KERNEL SET start = 'soon' WHERE start = 98000", 1),
        ("CUPTI_ACTIVITY_KIND_KERNEL SET deviceId = 'gpu', streamId = x'00', globalPid = 'me'", 0),
        ("CUPTI_ACTIVITY_KIND_RUNTIME SET globalTid = 'thread', nameId = NULL, correlationId = 'one'", 0),
        ("StringIds SET value = x'ff00fe'", 0),
        ("CUPTI_ACTIVITY_KIND_MEMCPY SET bytes = 'many', copyKind = NULL", 0),
        ("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION SET streamId = 'x', syncType = NULL", 0),
    ],
)
def test_values_of_other_types_are_no_crash(tmp_path, change, lost):
    path = export(tmp_path)
    db = sqlite3.connect(path)
    db.execute(f"UPDATE {change}")
    db.commit()
    db.close()
    trace = read(path)
    assert len(trace.ops) == 4 - lost and trace.dropped.get("dropped_records", 0) == lost
    summarise(trace)
    assert verify_trace(trace).exit_code in (1, 2)


def test_damaged_names_in_a_message(tmp_path):
    path = export(tmp_path)
    path.write_bytes(
        path.read_bytes().replace(
            b'TABLE "CUPTI_ACTIVITY_KIND_MEMCPY" (', b'TABLE "CUPTI_ACTIVITY_KIND_MEM\xffPY" \xfe'
        )
    )
    with pytest.raises(TraceError, match="not a readable"):
        read(path)


def test_another_database_and_a_damaged_one(tmp_path):
    other = tmp_path / "other.sqlite"
    db = sqlite3.connect(other)
    db.execute("CREATE TABLE t (a)")
    db.commit()
    db.close()
    with pytest.raises(TraceError, match="without Nsight Systems tables"):
        read(other)
    path = export(tmp_path)
    content = bytearray(path.read_bytes())
    content[3000:9000] = b"\xff" * 6000
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"t\.sqlite"):
        read(path)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE NVTX_EVENTS SET text = 5",
        "UPDATE NVTX_EVENTS SET text = x'ff00'",
        "UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET globalTid = NULL",
        "UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET globalTid = 'x' WHERE correlationId = 1",
    ],
)
def test_values_of_other_types_are_read(tmp_path, change):
    path = export(tmp_path)
    db = sqlite3.connect(path)
    db.execute(change)
    db.commit()
    db.close()
    trace = read(path)
    assert len(trace.calls) == 5 and verify_trace(trace).exit_code in (1, 2)
    assert summarise(trace)["devices"]


def test_page_faults_of_the_host_cannot_be_told(tmp_path):
    path = export(tmp_path, drop=("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "NVTX_EVENTS"))
    db = sqlite3.connect(path)
    db.execute("DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME WHERE nameId IN (2, 3)")
    create(db, "CUDA_UM_CPU_PAGE_FAULT_EVENTS", "start globalPid address")
    db.commit()
    assert verify_trace(read(path), idle_threshold_us=100).exit_code == 0
    db.execute("INSERT INTO CUDA_UM_CPU_PAGE_FAULT_EVENTS VALUES (5, 1, 2)")
    db.commit()
    db.close()
    found = verify_trace(read(path), idle_threshold_us=100)
    assert found.exit_code == 2 and any("host_page_faults 1" in r for r in found.reasons)
