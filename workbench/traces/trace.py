"""The typed columnar `Trace` every reader produces and every analysis reads.

One NumPy array per field; times are integer nanoseconds on the clock of the file; names are ids into `Trace.names`.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np

KERNEL, COPY, SET = 0, 1, 2
H2D, D2H, D2D, OTHER_COPY = 1, 2, 3, 4
PAGEABLE, PINNED, UNKNOWN_MEMORY = 0, 1, -1
CPU_OP, PYTHON, RANGE = 0, 1, 2
STREAM_SYNC, EVENT_SYNC, DEVICE_SYNC, QUERY, STREAM_WAIT, EVENT_RECORD, GRAPH_LAUNCH, OTHER_CALL = (
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    0,
)
NONE = -1

_CALL_KINDS = [
    (STREAM_SYNC, re.compile(r"^(cuda|cu|hip)StreamSynchronize")),
    (EVENT_SYNC, re.compile(r"^(cuda|cu|hip)EventSynchronize")),
    (DEVICE_SYNC, re.compile(r"^(cuda|hip)DeviceSynchronize|^cudaThreadSynchronize|^(cu|hip)CtxSynchronize")),
    (QUERY, re.compile(r"^(cuda|cu|hip)(Event|Stream)Query")),
    (STREAM_WAIT, re.compile(r"^(cuda|cu|hip)StreamWaitEvent")),
    (EVENT_RECORD, re.compile(r"^(cuda|cu|hip)EventRecord")),
    (GRAPH_LAUNCH, re.compile(r"^(cuda|cu|hip)GraphLaunch")),
]


class TraceError(ValueError):
    """A file that is no trace, or lacks what an analysis needs; the message names the file and what was expected."""


def call_kind(name: str) -> int:
    """Class of a runtime or driver call by its name (`STREAM_SYNC`, `EVENT_SYNC`, ... or `OTHER_CALL`)."""
    for kind, pattern in _CALL_KINDS:
        if pattern.match(name):
            return kind
    return OTHER_CALL


class _Table:
    """Columns of equal length; `take` selects rows."""

    def __len__(self) -> int:
        return len(getattr(self, dataclasses.fields(self)[0].name))  # type: ignore[arg-type]

    def take(self, rows: np.ndarray) -> Any:
        """The same table with only the given rows (mask or indices)."""
        columns = {f.name: getattr(self, f.name)[rows] for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return type(self)(**columns)


@dataclasses.dataclass(frozen=True)
class DeviceOps(_Table):
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
class Calls(_Table):
    """Runtime and driver API calls, sorted by start. `thread` is a row of `Trace.threads`."""

    start_ns: np.ndarray
    end_ns: np.ndarray
    name: np.ndarray
    kind: np.ndarray
    process: np.ndarray
    thread: np.ndarray
    correlation: np.ndarray


@dataclasses.dataclass(frozen=True)
class Spans(_Table):
    """Host spans (framework operators, Python frames, named ranges), sorted by start."""

    start_ns: np.ndarray
    end_ns: np.ndarray
    name: np.ndarray
    kind: np.ndarray
    thread: np.ndarray


@dataclasses.dataclass(frozen=True)
class SyncRecords(_Table):
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


def column_dtypes(table: type) -> dict[str, Any]:
    """dtype of each column of a table class."""
    small = {"kind": np.uint8, "copy_kind": np.uint8, "host_memory": np.int8}
    wide = ("start_ns", "end_ns", "size_bytes", "correlation", "launch", "stream", "wait_stream", "wait_correlation")
    return {f.name: small.get(f.name, np.int64 if f.name in wide else np.int32) for f in dataclasses.fields(table)}


def table_from_chunks(table: type, chunks: list[dict[str, np.ndarray]]) -> Any:
    """Concatenate column chunks into one table sorted by start.

    At equal starts the longer goes first, so that parents precede; calls follow one another on their thread, so there
    the shorter does.
    """
    columns = {}
    for name, dtype in column_dtypes(table).items():
        parts = [c.pop(name) for c in chunks]
        columns[name] = np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype)
    start, end = columns["start_ns"], columns["end_ns"]
    if len(start) > 1:
        step = np.diff(start)
        second = end if table is Calls else -end
        if (step < 0).any() or ((step == 0) & (np.diff(second) < 0)).any():
            order = np.lexsort((second, start))
            for name in columns:
                columns[name] = columns[name][order]
    return table(**columns)


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

    def name(self, index: int) -> str:
        """Text of a name id."""
        return self.names[index]

    @property
    def rank(self) -> int | None:
        """Rank in the distributed job, where the file says it."""
        info = self.metadata.get("distributedInfo")
        rank = info.get("rank") if isinstance(info, dict) else None
        return rank if isinstance(rank, int) and not isinstance(rank, bool) else None

    def devices(self) -> list[tuple[int, int]]:
        """The (process, device) pairs that executed operations; process is a row of `processes`, or -1."""
        if not len(self.ops):
            return []
        pairs = np.unique(np.stack([self.ops.process, self.ops.device], axis=1), axis=0)
        return [(int(p), int(d)) for p, d in pairs]

    def process_label(self, process: int) -> int | str | None:
        """Label of a process row; None where the file has no host rows for it."""
        return self.processes[process] if process >= 0 else None


def resolve_links(ops: dict[str, np.ndarray], calls: Calls) -> dict[str, np.ndarray]:
    """Fill `process` and `launch` of device operations from (process, correlation).

    Correlations 0 and -1 are no ids. Where several calls carry one correlation (several processes in a file, or an id
    used twice), the device's usual process is preferred, then the nearest call that began before the operation.
    """
    n = len(ops["start_ns"])
    launch = np.full(n, NONE, np.int64)
    usable_calls = np.flatnonzero(calls.correlation > 0)
    op_correlation = ops["correlation"]
    if n and len(usable_calls):
        order = usable_calls[np.argsort(calls.correlation[usable_calls], kind="stable")]
        keys = calls.correlation[order]
        low = np.searchsorted(keys, op_correlation, "left")
        count = np.searchsorted(keys, op_correlation, "right") - low
        count[op_correlation <= 0] = 0
        one = np.flatnonzero(count == 1)
        own, found = ops["process"][one], order[low[one]]
        same = (own < 0) | (calls.process[found] == own)
        launch[one[same]] = found[same]
        many = np.flatnonzero(count > 1)
        if len(many):
            _resolve_ambiguous(ops, calls, launch, many, low, count, order)
    known = launch >= 0
    process = ops["process"].copy()
    process[known] = calls.process[launch[known]]
    if (process < 0).any():
        _adopt_orphans(process, ops["device"], calls)
    return {**ops, "launch": launch, "process": process}


def _resolve_ambiguous(
    ops: dict[str, np.ndarray],
    calls: Calls,
    launch: np.ndarray,
    many: np.ndarray,
    low: np.ndarray,
    count: np.ndarray,
    order: np.ndarray,
) -> None:
    home = _usual_process(launch, ops["device"], calls)
    rows = np.repeat(many, count[many])
    first = np.repeat(np.cumsum(count[many]) - count[many], count[many])
    candidate = order[low[rows] + np.arange(len(rows)) - first]
    own = ops["process"][rows]
    at_home = np.array([home.get(int(d), NONE) for d in ops["device"][rows]])
    wrong_process = np.where(own >= 0, calls.process[candidate] != own, False)
    foreign = (at_home >= 0) & (calls.process[candidate] != at_home)
    lead = ops["start_ns"][rows] - calls.start_ns[candidate]
    rank = np.lexsort((np.abs(lead), lead < 0, foreign, wrong_process, rows))
    best = rank[np.unique(rows[rank], return_index=True)[1]]
    keep = ~wrong_process[best]
    launch[rows[best[keep]]] = candidate[best[keep]]


def _usual_process(launch: np.ndarray, device: np.ndarray, calls: Calls) -> dict[int, int]:
    known = launch >= 0
    home: dict[int, int] = {}
    for d in np.unique(device[known]):
        owners = calls.process[launch[known & (device == d)]]
        home[int(d)] = int(np.bincount(owners).argmax())
    return home


def _adopt_orphans(process: np.ndarray, device: np.ndarray, calls: Calls) -> None:
    """Give operations without a launch the process that drives their device, so that one device stays one device."""
    only = np.unique(calls.process)
    for d in np.unique(device[process < 0]):
        here = device == d
        owners = process[here & (process >= 0)]
        if len(owners):
            process[here & (process < 0)] = np.bincount(owners).argmax()
        elif len(only) == 1:
            process[here & (process < 0)] = only[0]


def freeze_names(names: list[str], calls: Calls) -> Calls:
    """Fill `Calls.kind` from the names, once per distinct name."""
    if not len(calls):
        return calls
    used = np.unique(calls.name)
    lookup = np.zeros(int(used.max()) + 1, np.uint8)
    for i in used:
        lookup[i] = call_kind(names[i])
    return dataclasses.replace(calls, kind=lookup[calls.name])
