"""The typed columnar `Trace` every reader produces and every analysis reads.

One NumPy array per field; times are integer nanoseconds on the clock of the file; names are ids into `Trace.names`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

KERNEL, COPY, SET = 0, 1, 2
H2D, D2H, D2D, OTHER_COPY = 1, 2, 3, 4
PAGEABLE, PINNED, UNKNOWN_MEMORY = 0, 1, -1
CPU_OP, PYTHON, RANGE = 0, 1, 2
OTHER_CALL, STREAM_SYNC, EVENT_SYNC, DEVICE_SYNC, QUERY, STREAM_WAIT, EVENT_RECORD, GRAPH_LAUNCH = range(8)
NONE = -1
NEVER, FOREVER = np.iinfo(np.int64).min, np.iinfo(np.int64).max
Window = tuple[int, int]

_CALL_KINDS = {
    STREAM_SYNC: r"(cuda|cu|hip)StreamSynchronize",
    EVENT_SYNC: r"(cuda|cu|hip)EventSynchronize",
    DEVICE_SYNC: r"(cuda|hip)DeviceSynchronize|cudaThreadSynchronize|(cu|hip)CtxSynchronize",
    QUERY: r"(cuda|cu|hip)(Event|Stream)Query",
    STREAM_WAIT: r"(cuda|cu|hip)StreamWaitEvent",
    EVENT_RECORD: r"(cuda|cu|hip)EventRecord",
    GRAPH_LAUNCH: r"(cuda|cu|hip)GraphLaunch",
}


class TraceError(ValueError):
    """A file that is no trace, or lacks what an analysis needs; the message names the file and what was expected."""


def call_kind(name: str) -> int:
    """Class of a runtime or driver call by its name (`STREAM_SYNC`, `EVENT_SYNC`, ... or `OTHER_CALL`)."""
    bare = name.strip().rpartition(":")[2]  # of a name with its library or namespace
    found = (kind for kind, pattern in _CALL_KINDS.items() if re.match(pattern, bare, re.IGNORECASE))
    return next(found, OTHER_CALL)


def of_names(names: Sequence[str], ids: np.ndarray, answer: Callable[[str], Any], dtype: Any = bool) -> np.ndarray:
    """Return `answer(name)` for each name id [N]; each distinct name is asked once."""
    answers = np.zeros(len(names), dtype)
    used = np.flatnonzero(np.bincount(ids)).tolist()
    answers[used] = [answer(names[i]) for i in used]
    return answers[ids]


class Table:
    """Columns of equal length; `take` selects rows."""

    start_ns: np.ndarray
    end_ns: np.ndarray

    def __len__(self) -> int:
        return len(self.start_ns)

    def take(self, rows: np.ndarray) -> Self:
        """The same table with only the given rows (mask or indices)."""
        columns = {f.name: getattr(self, f.name)[rows] for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return type(self)(**columns)

    def within(self, window: Window | None) -> np.ndarray:
        """Mask of the rows that overlap a window; every row without one."""
        if window is None:
            return np.ones(len(self), bool)
        return (self.end_ns > window[0]) & (self.start_ns < window[1])


@dataclasses.dataclass(frozen=True)
class DeviceOps(Table):
    """Kernels, copies and sets, sorted by start. Times int64 ns; `launch` is the row in `Trace.calls`, or -1."""

    start_ns: np.ndarray
    end_ns: np.ndarray
    name: np.ndarray
    kind: np.ndarray
    copy_kind: np.ndarray
    host_memory: np.ndarray
    size_bytes: np.ndarray
    process: np.ndarray
    device: np.ndarray
    stream: np.ndarray
    correlation: np.ndarray
    launch: np.ndarray


@dataclasses.dataclass(frozen=True)
class Calls(Table):
    """Runtime and driver API calls, sorted by start. `thread` is a row of `Trace.threads`."""

    start_ns: np.ndarray
    end_ns: np.ndarray
    name: np.ndarray
    kind: np.ndarray
    process: np.ndarray
    thread: np.ndarray
    correlation: np.ndarray


@dataclasses.dataclass(frozen=True)
class Spans(Table):
    """Host spans (framework operators, Python frames, named ranges), sorted by start."""

    start_ns: np.ndarray
    end_ns: np.ndarray
    name: np.ndarray
    kind: np.ndarray
    thread: np.ndarray


@dataclasses.dataclass(frozen=True)
class SyncRecords(Table):
    """The profiler's own synchronisation records (`cuda_sync`): what a wait or stream wait was for; no device work."""

    start_ns: np.ndarray
    end_ns: np.ndarray
    name: np.ndarray
    process: np.ndarray
    device: np.ndarray
    stream: np.ndarray
    correlation: np.ndarray
    wait_stream: np.ndarray
    wait_correlation: np.ndarray


@dataclasses.dataclass(frozen=True)
class Trace:
    """One profile: device operations, API calls, host spans, and what was dropped while reading.

    `processes[i]` is the label of host process i; `threads[i]` is `(process, label, name)`; `dropped` counts what
    could not be used, by reason; `warnings` says in words what a reader of figures from this trace must know.
    """

    source: str
    ops: DeviceOps
    calls: Calls
    spans: Spans
    syncs: SyncRecords
    names: list[str]
    processes: list[int | str]
    threads: list[tuple[int, int | str, str]]
    metadata: dict[str, Any]
    dropped: dict[str, int]
    warnings: list[str]

    def named(self, pattern: re.Pattern[str], ids: np.ndarray) -> np.ndarray:
        """Mask of the name ids [N] in whose text the pattern is found."""
        return of_names(self.names, ids, lambda name: bool(pattern.search(name)))

    def last_end_ns(self, ops: np.ndarray) -> np.ndarray:
        """Per call, when the last of its operations among the rows `ops` ended, int64; `NEVER` where it has none."""
        ends = np.full(len(self.calls), NEVER, np.int64)
        linked = ops[self.ops.launch[ops] >= 0]
        np.maximum.at(ends, self.ops.launch[linked], self.ops.end_ns[linked])
        return ends

    @property
    def rank(self) -> int | None:
        """Rank in the distributed job, where the file says it."""
        info = self.metadata.get("distributedInfo")
        rank = info.get("rank") if isinstance(info, dict) else None
        return rank if isinstance(rank, int) and not isinstance(rank, bool) else None

    @property
    def base_ns(self) -> int:
        """What the file's times count from, ns: add it to compare times of several files. 0 where none is named."""
        base = self.metadata.get("baseTimeNanoseconds")
        return base if isinstance(base, int) else 0

    def stream_ends_ns(self, process: int, stream: int) -> np.ndarray:
        """Ends of a stream's operations, ascending; sorted once."""
        if (process, stream) not in self._stream_ends:
            mine = (self.ops.process == process) & (self.ops.stream == stream)
            self._stream_ends[process, stream] = np.sort(self.ops.end_ns[mine])
        return self._stream_ends[process, stream]

    @functools.cached_property
    def _stream_ends(self) -> dict[tuple[int, int], np.ndarray]:
        return {}

    def devices(self) -> list[tuple[int, int]]:
        """The (process, device) pairs that executed operations; process is a row of `processes`, or -1."""
        if not len(self.ops):
            return []
        pairs = np.unique(np.stack([self.ops.process, self.ops.device], axis=1), axis=0)
        return [(int(p), int(d)) for p, d in pairs]

    def process_label(self, process: int) -> int | str | None:
        """Label of a process row; None where the file has no host rows for it."""
        return self.processes[process] if process >= 0 else None
