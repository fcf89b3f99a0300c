"""The typed columnar `Trace` every reader produces and every analysis reads.

One NumPy array per field; times are integer nanoseconds on the clock of the file; names are ids into `Trace.names`.
"""

from __future__ import annotations

import dataclasses
import functools
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
    (STREAM_SYNC, re.compile(r"^(cuda|cu|hip)StreamSynchronize", re.IGNORECASE)),
    (EVENT_SYNC, re.compile(r"^(cuda|cu|hip)EventSynchronize", re.IGNORECASE)),
    (
        DEVICE_SYNC,
        re.compile(r"^(cuda|hip)DeviceSynchronize|^cudaThreadSynchronize|^(cu|hip)CtxSynchronize", re.IGNORECASE),
    ),
    (QUERY, re.compile(r"^(cuda|cu|hip)(Event|Stream)Query", re.IGNORECASE)),
    (STREAM_WAIT, re.compile(r"^(cuda|cu|hip)StreamWaitEvent", re.IGNORECASE)),
    (EVENT_RECORD, re.compile(r"^(cuda|cu|hip)EventRecord", re.IGNORECASE)),
    (GRAPH_LAUNCH, re.compile(r"^(cuda|cu|hip)GraphLaunch", re.IGNORECASE)),
]


class TraceError(ValueError):
    """A file that is no trace, or lacks what an analysis needs; the message names the file and what was expected."""


def call_kind(name: str) -> int:
    """Class of a runtime or driver call by its name (`STREAM_SYNC`, `EVENT_SYNC`, ... or `OTHER_CALL`)."""
    bare = name.strip().rpartition(":")[2]  # of a name with its library or namespace
    for kind, pattern in _CALL_KINDS:
        if pattern.match(bare):
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


AMBIGUOUS_LINKS = "ambiguous_links"


def link(ops: DeviceOps, calls: Calls, dropped: dict[str, int], warnings: list[str]) -> DeviceOps:
    """Device operations with `process` and `launch` filled; links that are a guess are counted and said.

    Correlations 0 and -1 are no ids. Where several calls carry one correlation (several processes in a file, or an id
    used twice), the device's usual process is preferred, then the nearest call that began before the operation. Where
    the process leaves more than one call, the link is a guess: `ambiguous_links` in `dropped`.
    """
    columns, guessed = resolve_links({f.name: getattr(ops, f.name) for f in dataclasses.fields(ops)}, calls)
    if guessed:
        dropped[AMBIGUOUS_LINKS] = guessed
        warnings.append(
            f"{guessed} operations carry a correlation id that several calls of a process share: each is linked to the "
            "nearest call before it, which is a guess"
        )
    return DeviceOps(**columns)


def resolve_links(ops: dict[str, np.ndarray], calls: Calls) -> tuple[dict[str, np.ndarray], int]:
    """(columns with `process` and `launch` filled, how many links are guesses); see `link`."""
    n = len(ops["start_ns"])
    launch = np.full(n, NONE, np.int64)
    guessed = 0
    usable = np.flatnonzero(calls.correlation > 0)
    if n and len(usable):
        ids, of_call = np.unique(calls.correlation[usable], return_inverse=True)
        at = np.minimum(np.searchsorted(ids, ops["correlation"]), len(ids) - 1)
        found = (ops["correlation"] > 0) & (ids[at] == ops["correlation"])
        own = ops["process"]
        count = np.bincount(of_call)
        only = np.empty(len(ids), np.int64)
        only[of_call] = usable
        one = np.flatnonzero(found & (count[at] == 1))
        one = one[(own[one] < 0) | (calls.process[only[at[one]]] == own[one])]
        launch[one] = only[at[one]]
        many = np.flatnonzero(found & (count[at] > 1))
        if len(many):
            home = _usual_process(launch, ops["device"], calls)
            wanted = np.array([home.get(int(d), NONE) for d in ops["device"][many]], np.int64)
            wanted = np.where(own[many] >= 0, own[many], wanted)
            start = ops["start_ns"][many]
            # More than any process: an operation may name one that made no call.
            size = int(max(calls.process.max(), own.max())) + 2
            # First among the calls of the wanted process, then (unless the operation names its process) among all.
            key = of_call * size + calls.process[usable]
            best, alike = _nearest_before(key, calls.start_ns[usable], at[many] * size + wanted, start)
            anywhere = np.flatnonzero((alike == 0) & (own[many] < 0))
            if len(anywhere):
                found_any = _nearest_before(of_call, calls.start_ns[usable], at[many[anywhere]], start[anywhere])
                best[anywhere], alike[anywhere] = found_any
            linked = alike > 0
            launch[many[linked]] = usable[best[linked]]
            guessed = int((alike > 1).sum())
    known = launch >= 0
    process = ops["process"].copy()
    process[known] = calls.process[launch[known]]
    if (process < 0).any():
        _adopt_orphans(process, ops["device"], calls)
    return {**ops, "launch": launch, "process": process}, guessed


def _nearest_before(
    key: np.ndarray, start: np.ndarray, wanted: np.ndarray, instant: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """For each wanted key the row with the last start <= its instant (else its first row), and how many rows share it.

    `start` is ascending. Without a row the count is 0. No step grows with the product of both sides: a damaged file
    may give all its calls one id.
    """
    order = np.argsort(key, kind="stable")
    keys = key[order]
    low, high = np.searchsorted(keys, wanted, "left"), np.searchsorted(keys, wanted, "right")
    times = np.searchsorted(start, instant, "right")  # how many of all rows start by then
    group = np.concatenate([[0], np.cumsum(keys[1:] != keys[:-1])])
    here = group[np.minimum(low, len(order) - 1)]
    scale = len(start) + 1
    at = np.searchsorted(group * scale + order, here * scale + times, "left") - 1
    return order[np.minimum(np.maximum(at, low), len(order) - 1)], high - low


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
