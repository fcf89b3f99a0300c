"""Read Nsight Systems SQLite exports (`nsys export --type sqlite`) into a `Trace`: integer nanoseconds, lazy tables.

Tables and columns come and go with the recording and the version, so each is probed before it is read.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np

from workbench.traces.digits import LARGEST
from workbench.traces.trace import (
    COPY,
    CPU_OP,
    D2D,
    D2H,
    H2D,
    KERNEL,
    NONE,
    OTHER_COPY,
    PAGEABLE,
    PINNED,
    RANGE,
    SET,
    UNKNOWN_MEMORY,
    Calls,
    DeviceOps,
    Spans,
    SyncRecords,
    Trace,
    TraceError,
    freeze_names,
    link,
    table_from_chunks,
)

ROWS = 200_000
_COPY_KIND = {1: H2D, 2: D2H, 8: D2D}
_MEMORY = {0: PAGEABLE, 1: PINNED}
_SYNC_NAME = {1: "Event Sync", 2: "Stream Wait Event", 3: "Stream Sync", 4: "Context Sync"}
_OPERATOR = re.compile(r"^(aten|autograd|c10d|prims|torch_\w+)::|^\w+Backward\d*\b|, (op_id|seq) = \d+")
_SUFFIX = re.compile(r"(,\s*(op_id|seq|sizes|input_op_ids) = .*)$", re.DOTALL)


def read_nsys(path: str | Path) -> Trace:
    """Read one Nsight Systems SQLite export.

    Raises:
        TraceError: the file is absent, no SQLite database, or no Nsight Systems export.
    """
    path = Path(path)
    if not path.is_file():
        raise TraceError(f"{path}: no such trace file")
    uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
            return _Reader(connection, path.name).read()
    except (sqlite3.DatabaseError, OverflowError, UnicodeDecodeError) as error:  # a message may quote damaged names
        raise TraceError(f"{path}: not a readable SQLite export of Nsight Systems ({error})") from error


class _Reader:
    def __init__(self, connection: sqlite3.Connection, source: str) -> None:
        self.db = connection
        self.source = source
        self.tables = {
            r[0] for r in connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table','view')")
        }
        if not any(t.startswith(("CUPTI_ACTIVITY", "NVTX_EVENTS", "StringIds")) for t in self.tables):
            raise TraceError(f"{source}: a SQLite file without Nsight Systems tables")
        self.names: dict[str, int] = {}
        self.strings: dict[int, int] = {}
        self.processes: dict[int, int] = {}
        self.threads: dict[int, int] = {}
        self.dropped: dict[str, int] = {}
        self.warnings: list[str] = []
        if "StringIds" in self.tables:
            self.strings = {i: self._name(v) for i, v in self.db.execute('SELECT id, "value" FROM StringIds')}

    def _name(self, text: Any) -> int:
        return self.names.setdefault(text if isinstance(text, str) else str(text), len(self.names))

    def _columns(self, table: str) -> set[str]:
        return {r[1] for r in self.db.execute(f'PRAGMA table_info("{table}")')}

    def _find(self, stem: str) -> str | None:
        """A table by name; NVTX_EVENTS and the activity tables may carry a _V2, _V3 suffix."""
        found = sorted(t for t in self.tables if t == stem or re.fullmatch(re.escape(stem) + r"_V\d+", t))
        return found[-1] if found else None

    def _select(
        self,
        stem: str,
        wanted: list[str],
        required: tuple[str, ...] = ("start", "end"),
        reason: str = "dropped_records",
    ) -> Any:
        """Batches of columns (lists, None where a column is absent) of an optional table."""
        table = self._find(stem)
        if table is None:
            return
        have = self._columns(table)
        if not set(required) <= have:
            self.warnings.append(f"table {table} lacks {', '.join(sorted(set(required) - have))}: not read")
            if reason == "dropped_records":
                self.dropped["unread_tables"] = self.dropped.get("unread_tables", 0) + 1
            return
        chosen = ", ".join(f'"{c}"' if c in have else f'NULL AS "{c}"' for c in wanted)
        cursor = self.db.execute(f'SELECT {chosen} FROM "{table}"')
        while batch := cursor.fetchmany(ROWS):
            kept = [r for r in batch if isinstance(r[0], int) and isinstance(r[1], int) and r[1] >= r[0]]
            kept = [r for r in kept if r[0] > -LARGEST and r[1] < LARGEST]
            if len(kept) < len(batch):
                self.dropped[reason] = self.dropped.get(reason, 0) + len(batch) - len(kept)
            if kept:
                yield list(zip(*kept))

    def _process(self, values: Any) -> np.ndarray:
        ids = self.processes
        return np.fromiter(
            (ids.setdefault(v >> 24, len(ids)) if isinstance(v, int) else NONE for v in values), np.int32, len(values)
        )

    def _thread(self, values: Any) -> np.ndarray:
        ids = self.threads
        keys = (v if isinstance(v, int) else 0 for v in values)
        return np.fromiter((ids.setdefault(k, len(ids)) for k in keys), np.int32, len(values))

    def _text(self, ids: Any, fallback: str) -> np.ndarray:
        other = self._name(fallback)
        return np.fromiter((self.strings.get(i, other) for i in ids), np.int32, len(ids))

    def read(self) -> Trace:
        ops = table_from_chunks(DeviceOps, [*self._kernels(), *self._copies(), *self._sets()])
        calls = table_from_chunks(Calls, list(self._calls()))
        spans = table_from_chunks(Spans, list(self._nvtx()))
        syncs = table_from_chunks(SyncRecords, list(self._syncs()))
        names = list(self.names)
        calls = freeze_names(names, calls)
        ops = link(ops, calls, self.dropped, self.warnings)
        thread_names = self._thread_names()
        threads = []
        for key in self.threads:
            process = self.processes.setdefault(key >> 24, len(self.processes))
            threads.append((process, key & 0xFFFFFF, thread_names.get(key, "")))
        if "CUDA_UM_CPU_PAGE_FAULT_EVENTS" in self.tables:
            faults = self.db.execute("SELECT COUNT(*) FROM CUDA_UM_CPU_PAGE_FAULT_EVENTS").fetchone()[0]
            if faults:  # the host waited for managed memory, in no call
                self.dropped["host_page_faults"] = faults
                self.warnings.append(f"{faults} times the host touched managed memory that was on a device, and waited")
        if not len(ops):
            self.warnings.append("no device operations in this export (was it recorded with --trace=cuda?)")
        return Trace(
            source=self.source,
            ops=ops,
            calls=calls,
            spans=spans,
            syncs=syncs,
            names=names,
            processes=[key & 0xFFFFFF for key in self.processes],
            threads=threads,
            metadata=self._metadata(),
            dropped=self.dropped,
            warnings=self.warnings,
        )

    def _ops(self, rows: list[Any], kind: int, name: np.ndarray, size: Any = None) -> dict[str, np.ndarray]:
        start, end, device, stream, correlation, process = rows[:6]
        n = len(start)
        return {
            "start_ns": np.array(start, np.int64),
            "end_ns": np.array(end, np.int64),
            "name": name,
            "kind": np.full(n, kind, np.uint8),
            "copy_kind": np.zeros(n, np.uint8),
            "host_memory": np.full(n, UNKNOWN_MEMORY, np.int8),
            "size_bytes": _ints(size, n),
            "process": self._process(process),
            "device": _ints(device, n).astype(np.int32),
            "stream": _ints(stream, n),
            "correlation": _ints(correlation, n),
            "launch": np.full(n, NONE, np.int64),
        }

    _COMMON = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")

    def _kernels(self) -> Any:
        for rows in self._select("CUPTI_ACTIVITY_KIND_KERNEL", [*self._COMMON, "demangledName", "shortName"]):
            chosen = [d if d is not None else s for d, s in zip(rows[6], rows[7])]
            yield self._ops(rows, KERNEL, self._text(chosen, "kernel"))

    def _copies(self) -> Any:
        for rows in self._select(
            "CUPTI_ACTIVITY_KIND_MEMCPY", [*self._COMMON, "bytes", "copyKind", "srcKind", "dstKind"]
        ):
            kind = np.array([_COPY_KIND.get(k, OTHER_COPY) for k in rows[7]], np.uint8)
            labels = {H2D: "Memcpy HtoD", D2H: "Memcpy DtoH", D2D: "Memcpy DtoD", OTHER_COPY: "Memcpy"}
            columns = self._ops(rows, COPY, np.array([self._name(labels[int(k)]) for k in kind], np.int32), rows[6])
            host = [d if k == D2H else s for k, s, d in zip(kind, rows[8], rows[9])]
            columns["copy_kind"] = kind
            columns["host_memory"] = np.array([_MEMORY.get(h, UNKNOWN_MEMORY) for h in host], np.int8)
            yield columns

    def _sets(self) -> Any:
        for rows in self._select("CUPTI_ACTIVITY_KIND_MEMSET", [*self._COMMON, "bytes"]):
            yield self._ops(rows, SET, np.full(len(rows[0]), self._name("Memset"), np.int32), rows[6])

    def _calls(self) -> Any:
        for rows in self._select(
            "CUPTI_ACTIVITY_KIND_RUNTIME", ["start", "end", "globalTid", "correlationId", "nameId"]
        ):
            n = len(rows[0])
            nowhere = sum(not isinstance(v, int) for v in rows[2])
            if nowhere:
                self.dropped["calls_without_thread"] = self.dropped.get("calls_without_thread", 0) + nowhere
            yield {
                "start_ns": np.array(rows[0], np.int64),
                "end_ns": np.array(rows[1], np.int64),
                "name": self._text(rows[4], "call"),
                "kind": np.zeros(n, np.uint8),
                "process": self._process([v if isinstance(v, int) else 0 for v in rows[2]]),
                "thread": self._thread(rows[2]),
                "correlation": _ints(rows[3], n),
            }

    def _nvtx(self) -> Any:
        table = self._find("NVTX_EVENTS")
        if table is None:
            return
        wanted = ["start", "end", "globalTid", "text", "textId", "eventType"]
        # Marks have no end, and no wait or operation is lost with a range.
        for rows in self._select("NVTX_EVENTS", wanted, reason="marks_and_open_ranges"):
            keep = [i for i, t in enumerate(rows[5]) if t in (None, 59, 60, 70, 71)]
            ids, kinds = [], []
            texts = list(self.names)
            for i in keep:
                text = rows[3][i]
                if not isinstance(text, str):
                    known = self.strings.get(rows[4][i])
                    text = texts[known] if known is not None else "range"
                kinds.append(CPU_OP if _OPERATOR.search(text) else RANGE)
                ids.append(self._name(_SUFFIX.sub("", text) or text))
            yield {
                "start_ns": np.array([rows[0][i] for i in keep], np.int64),
                "end_ns": np.array([rows[1][i] for i in keep], np.int64),
                "name": np.array(ids, np.int32),
                "kind": np.array(kinds, np.uint8),
                "thread": self._thread([rows[2][i] for i in keep]),
            }

    def _syncs(self) -> Any:
        wanted = ["start", "end", "streamId", "correlationId", "globalPid", "syncType", "eventSyncId", "eventId"]
        recorded = self._event_records()
        for rows in self._select("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", wanted):
            n = len(rows[0])
            source = [recorded.get((p or 0, s, e), (NONE, NONE)) for p, s, e in zip(rows[4], rows[6], rows[7])]
            yield {
                "start_ns": np.array(rows[0], np.int64),
                "end_ns": np.array(rows[1], np.int64),
                "name": np.array([self._name(_SYNC_NAME.get(t, "Sync")) for t in rows[5]], np.int32),
                "process": self._process(rows[4]),
                "device": np.full(n, NONE, np.int32),  # deviceId of this table is not reliable
                # a stream is meant only by stream waits and stream syncs; others carry a filler
                "stream": np.where(np.isin(_ints(rows[5], n), (2, 3)), _streams(rows[2]), NONE),
                "correlation": _ints(rows[3], n),
                "wait_stream": np.array([s[0] for s in source], np.int64),
                "wait_correlation": np.array([s[1] for s in source], np.int64),
            }

    def _event_records(self) -> dict[tuple[int, Any, Any], tuple[int, int]]:
        table = self._find("CUPTI_ACTIVITY_KIND_CUDA_EVENT")
        if table is None or not {"globalPid", "eventSyncId", "eventId", "streamId", "correlationId"} <= self._columns(
            table
        ):
            return {}
        query = f'SELECT globalPid, eventSyncId, eventId, streamId, correlationId FROM "{table}"'
        return {(p or 0, s, e): (stream, c) for p, s, e, stream, c in self.db.execute(query)}

    def _thread_names(self) -> dict[int, str]:
        if "ThreadNames" not in self.tables or not {"nameId", "globalTid"} <= self._columns("ThreadNames"):
            return {}
        texts = list(self.names)
        rows = self.db.execute("SELECT globalTid, nameId FROM ThreadNames")
        return {t: texts[self.strings[n]] for t, n in rows if n in self.strings}

    def _metadata(self) -> dict[str, Any]:
        found: dict[str, Any] = {"format": "nsys"}
        if "META_DATA_EXPORT" in self.tables and {"name", "value"} <= self._columns("META_DATA_EXPORT"):
            rows = dict(self.db.execute('SELECT name, "value" FROM META_DATA_EXPORT'))
            found |= {k: rows[k] for k in ("EXPORT_PRODUCT_VERSION", "EXPORT_SCHEMA_VERSION") if k in rows}
        return found


def _ints(values: Any, n: int) -> np.ndarray:
    if values is None:
        return np.full(n, NONE, np.int64)
    return np.fromiter((v if isinstance(v, int) else NONE for v in values), np.int64, n)


def _streams(values: Any) -> np.ndarray:
    return np.array([v if isinstance(v, int) and 0 <= v < (1 << 31) else NONE for v in values], np.int64)
