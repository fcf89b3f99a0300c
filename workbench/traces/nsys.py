"""Read Nsight Systems SQLite exports (`nsys export --type sqlite`) into a `Trace`: integer nanoseconds, lazy tables.

Tables and columns come and go with the recording and the version, so each is probed before it is read.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from workbench.traces.build import Builder
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
)

ROWS = 200_000
_COPY_KIND = {1: H2D, 2: D2H, 8: D2D}
_COPY_NAME = {H2D: "Memcpy HtoD", D2H: "Memcpy DtoH", D2D: "Memcpy DtoD", OTHER_COPY: "Memcpy"}
_MEMORY = {0: PAGEABLE, 1: PINNED}
_SYNC_NAME = {1: "Event Sync", 2: "Stream Wait Event", 3: "Stream Sync", 4: "Context Sync"}
_COMMON = ("deviceId", "streamId", "correlationId", "globalPid")
_OPERATOR = re.compile(r"^(aten|autograd|c10d|prims|torch_\w+)::|^\w+Backward\d*\b|, (op_id|seq) = \d+")
_SUFFIX = re.compile(r"(,\s*(op_id|seq|sizes|input_op_ids) = .*)$", re.DOTALL)


def read_nsys(path: str | Path) -> Trace:
    """Read one Nsight Systems SQLite export.

    Raises:
        TraceError: the file is absent or not readable, no SQLite database, or no Nsight Systems export.
    """
    path = Path(path)
    uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
            return _Reader(connection, path.name).read()
    except (sqlite3.DatabaseError, OverflowError, UnicodeDecodeError) as error:  # a message may quote damaged names
        raise TraceError(f"{path}: not a readable SQLite export of Nsight Systems ({error})") from error


class _Reader(Builder):
    def __init__(self, connection: sqlite3.Connection, source: str) -> None:
        super().__init__(source)
        self.db = connection
        self.tables = {
            r[0] for r in connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table','view')")
        }
        if not any(t.startswith(("CUPTI_ACTIVITY", "NVTX_EVENTS", "StringIds")) for t in self.tables):
            raise TraceError(f"{source}: a SQLite file without Nsight Systems tables")
        self.strings = dict(self._rows("StringIds", "id", "value"))

    def _table(self, stem: str) -> tuple[str, set[str]]:
        """(name of a table, its columns); NVTX_EVENTS and the activity tables may carry a _V2, _V3 suffix."""
        found = sorted(t for t in self.tables if t == stem or re.fullmatch(re.escape(stem) + r"_V\d+", t))
        name = found[-1] if found else ""
        return name, {r[1] for r in self.db.execute(f'PRAGMA table_info("{name}")')} if found else set()

    def _rows(self, stem: str, *columns: str) -> Iterable[tuple[Any, ...]]:
        """Rows of an optional table that has all of the columns; none otherwise."""
        table, have = self._table(stem)
        chosen = ", ".join(f'"{c}"' for c in columns)
        return self.db.execute(f'SELECT {chosen} FROM "{table}"') if set(columns) <= have else ()

    def _batches(self, stem: str, *columns: str, reason: str = "dropped_records") -> Iterator[dict[str, Sequence[Any]]]:
        """Start, end and columns (None where one is absent) of an optional table; spans without either are counted."""
        table, have = self._table(stem)
        if not table:
            return
        if missing := sorted({"start", "end"} - have):
            self.warn(f"table {table} lacks {', '.join(missing)}: not read")
            self.count("unread_tables", reason == "dropped_records")
            return
        wanted = ("start", "end", *columns)
        chosen = ", ".join(f'"{c}"' if c in have else f'NULL AS "{c}"' for c in wanted)
        cursor = self.db.execute(f'SELECT {chosen} FROM "{table}"')
        while batch := cursor.fetchmany(ROWS):
            kept = [r for r in batch if isinstance(r[0], int) and isinstance(r[1], int) and r[1] >= r[0]]
            kept = [r for r in kept if r[0] > -LARGEST and r[1] < LARGEST]
            self.count(reason, len(batch) - len(kept))
            if kept:
                yield dict(zip(wanted, zip(*kept)))

    def _process_rows(self, values: Sequence[Any]) -> list[int]:
        ids = self.processes
        return [ids.setdefault(v >> 24, len(ids)) if isinstance(v, int) else NONE for v in values]

    def _thread_rows(self, values: Sequence[Any]) -> list[int]:
        ids = self.threads
        return [ids.setdefault(_thread(v), len(ids)) for v in values]

    def _text(self, ids: Sequence[Any], fallback: str) -> np.ndarray:
        return self.name_ids(self.strings.get(i, fallback) for i in ids)

    def read(self) -> Trace:
        for read in (self._kernels, self._copies, self._sets, self._calls, self._nvtx, self._syncs):
            read()
        for thread, name in self._rows("ThreadNames", "globalTid", "nameId"):
            if name in self.strings:
                self.thread_names[_thread(thread)] = str(self.strings[name])
        self.metadata = {"format": "nsys"} | {
            k: v
            for k, v in self._rows("META_DATA_EXPORT", "name", "value")
            if k in ("EXPORT_PRODUCT_VERSION", "EXPORT_SCHEMA_VERSION")
        }
        trace = self.finish(lambda key: key & 0xFFFFFF)
        table, _ = self._table("CUDA_UM_CPU_PAGE_FAULT_EVENTS")
        faults = self.db.execute(f'SELECT COUNT(*) FROM "{table}"').fetchone()[0] if table else 0
        self.count("host_page_faults", faults)
        if faults:  # the host waited for managed memory, in no call
            self.warn(f"{faults} times the host touched managed memory that was on a device, and waited")
        if not len(trace.ops):
            self.warn("no device operations in this export (was it recorded with --trace=cuda?)")
        return trace

    def _add_ops(self, rows: dict[str, Sequence[Any]], **columns: Any) -> None:
        self.add(
            DeviceOps,
            start_ns=rows["start"],
            end_ns=rows["end"],
            process=self._process_rows(rows["globalPid"]),
            device=self.integers(rows["deviceId"]),
            stream=self.integers(rows["streamId"]),
            correlation=self.integers(rows["correlationId"]),
            **columns,
        )

    def _kernels(self) -> None:
        for rows in self._batches("CUPTI_ACTIVITY_KIND_KERNEL", *_COMMON, "demangledName", "shortName"):
            chosen = [d if d is not None else s for d, s in zip(rows["demangledName"], rows["shortName"])]
            self._add_ops(rows, kind=KERNEL, name=self._text(chosen, "kernel"))

    def _copies(self) -> None:
        for rows in self._batches("CUPTI_ACTIVITY_KIND_MEMCPY", *_COMMON, "bytes", "copyKind", "srcKind", "dstKind"):
            kind = [_COPY_KIND.get(k, OTHER_COPY) for k in rows["copyKind"]]
            host = [d if k == D2H else s for k, s, d in zip(kind, rows["srcKind"], rows["dstKind"])]
            self._add_ops(
                rows,
                kind=COPY,
                name=self.name_ids(_COPY_NAME[k] for k in kind),
                copy_kind=kind,
                host_memory=[_MEMORY.get(h, UNKNOWN_MEMORY) for h in host],
                size_bytes=self.integers(rows["bytes"]),
            )

    def _sets(self) -> None:
        for rows in self._batches("CUPTI_ACTIVITY_KIND_MEMSET", *_COMMON, "bytes"):
            self._add_ops(rows, kind=SET, name=self.name_ids(["Memset"])[0], size_bytes=self.integers(rows["bytes"]))

    def _calls(self) -> None:
        for rows in self._batches("CUPTI_ACTIVITY_KIND_RUNTIME", "globalTid", "correlationId", "nameId"):
            threads = rows["globalTid"]
            self.count("calls_without_thread", sum(not isinstance(v, int) for v in threads))
            self.add(
                Calls,
                start_ns=rows["start"],
                end_ns=rows["end"],
                name=self._text(rows["nameId"], "call"),
                process=self._process_rows([v if isinstance(v, int) else 0 for v in threads]),
                thread=self._thread_rows(threads),
                correlation=self.integers(rows["correlationId"]),
            )

    def _nvtx(self) -> None:
        # Marks have no end, and no wait or operation is lost with a range.
        for rows in self._batches(
            "NVTX_EVENTS", "globalTid", "text", "textId", "eventType", reason="marks_and_open_ranges"
        ):
            keep = np.flatnonzero([t in (None, 59, 60, 70, 71) for t in rows["eventType"]]).tolist()
            texts = [
                text if isinstance(text, str) else str(self.strings.get(known, "range"))
                for text, known in zip(rows["text"], rows["textId"])
            ]
            self.add(
                Spans,
                start_ns=np.array(rows["start"])[keep],
                end_ns=np.array(rows["end"])[keep],
                name=self.name_ids(_SUFFIX.sub("", texts[i]) or texts[i] for i in keep),
                kind=[CPU_OP if _OPERATOR.search(texts[i]) else RANGE for i in keep],
                thread=self._thread_rows([rows["globalTid"][i] for i in keep]),
            )

    def _syncs(self) -> None:
        events = self._rows(
            "CUPTI_ACTIVITY_KIND_CUDA_EVENT", "globalPid", "eventSyncId", "eventId", "streamId", "correlationId"
        )
        recorded = {(p or 0, s, e): (stream, c) for p, s, e, stream, c in events}
        wanted = ("streamId", "correlationId", "globalPid", "syncType", "eventSyncId", "eventId")
        for rows in self._batches("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", *wanted):
            keys = zip(rows["globalPid"], rows["eventSyncId"], rows["eventId"])
            source = [recorded.get((p or 0, s, e), (NONE, NONE)) for p, s, e in keys]
            # a stream is meant only by stream waits and stream syncs; others carry a filler
            streams = [
                s if t in (2, 3) and isinstance(s, int) and 0 <= s < 1 << 31 else NONE
                for t, s in zip(rows["syncType"], rows["streamId"])
            ]
            self.add(  # deviceId of this table is not reliable
                SyncRecords,
                start_ns=rows["start"],
                end_ns=rows["end"],
                name=self.name_ids(_SYNC_NAME.get(t, "Sync") for t in rows["syncType"]),
                process=self._process_rows(rows["globalPid"]),
                stream=streams,
                correlation=self.integers(rows["correlationId"]),
                wait_stream=self.integers([s for s, _ in source]),
                wait_correlation=self.integers([c for _, c in source]),
            )


def _thread(value: Any) -> tuple[int, int]:
    """(process, thread) of a globalTid."""
    key = value if isinstance(value, int) else 0
    return key >> 24, key & 0xFFFFFF
