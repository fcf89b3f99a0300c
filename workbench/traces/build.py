"""What the readers share: columns are collected in chunks, become tables, and operations find their launches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from workbench.traces.trace import NONE, Calls, DeviceOps, Spans, SyncRecords, Table, Trace, call_kind, of_names

AMBIGUOUS_LINKS = "ambiguous_links"
_SMALL = {"kind": np.uint8, "copy_kind": np.uint8, "host_memory": np.int8}
_INT32 = ("name", "process", "thread", "device")


class Builder:
    """Collects what a reader finds; `finish` makes the trace of it.

    `processes` and `threads` give each key (a process; a process and a thread) its row, in order of appearance.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.metadata: dict[str, Any] = {}
        self.dropped: dict[str, int] = {}
        self.warnings: list[str] = []
        self.names: dict[str, int] = {}
        self.processes: dict[Any, int] = {}
        self.threads: dict[tuple[Any, Any], int] = {}
        self.thread_names: dict[tuple[Any, Any], str] = {}
        self.chunks: dict[type[Table], list[dict[str, np.ndarray]]] = {
            table: [] for table in (DeviceOps, Calls, Spans, SyncRecords)
        }

    def count(self, reason: str, n: int = 1) -> None:
        """Count what could not be used."""
        if n:
            self.dropped[reason] = self.dropped.get(reason, 0) + int(n)

    def warn(self, text: str) -> None:
        """Say something once."""
        if text not in self.warnings:
            self.warnings.append(text)

    def name_ids(self, texts: Iterable[Any]) -> np.ndarray:
        """Ids of names, int32 [N]; new ones are added."""
        ids, intern = self.names, self.names.setdefault
        return np.fromiter((intern(t if type(t) is str else str(t), len(ids)) for t in texts), np.int32)

    def integers(self, values: Sequence[Any]) -> np.ndarray:
        """Ids as int64 [N]: absent is -1, text is parsed, what is no int64 is -1 and counted."""
        known = [NONE if value is None else value for value in values]
        try:
            return np.fromiter(known, np.int64, len(known))
        except (TypeError, ValueError, OverflowError):
            found = [_integer(value) for value in known]
        self.count("out_of_range_ids", found.count(None))
        return np.array([NONE if i is None else i for i in found], np.int64)

    def add(self, table: type[Table], **columns: Any) -> None:
        """Keep rows of a table: `start_ns` and `end_ns` [N], others as arrays or one value for all; absent is unknown.

        Values that a column's type does not hold become its nearest.
        """
        n, chunk = len(columns["start_ns"]), {}
        for name, dtype in _dtypes(table).items():
            values = np.asarray(columns.get(name, 0 if dtype == np.uint8 else NONE))
            if values.dtype.itemsize > np.dtype(dtype).itemsize:
                values = values.clip(np.iinfo(dtype).min, np.iinfo(dtype).max)
            chunk[name] = np.broadcast_to(values, n).astype(dtype, copy=False)
        self.chunks[table].append(chunk)

    def finish(self, label: Callable[[Any], int | str]) -> Trace:
        """Make the trace; `label` names a process or thread by its key."""
        ops, calls, spans, syncs = (table_from_chunks(*chunks) for chunks in self.chunks.items())
        names = list(self.names)
        calls = dataclasses.replace(calls, kind=of_names(names, calls.name, call_kind, np.uint8))
        ops, guessed = link(ops, calls)
        self.count(AMBIGUOUS_LINKS, guessed)
        if guessed:
            self.warn(
                f"{guessed} operations carry a correlation id that several calls of a process share: each is linked to "
                "the nearest call before it, which is a guess"
            )
        threads = []
        for key in self.threads:
            process = self.processes.setdefault(key[0], len(self.processes))
            threads.append((process, label(key[1]), self.thread_names.get(key, "")))
        return Trace(
            source=self.source,
            ops=ops,
            calls=calls,
            spans=spans,
            syncs=syncs,
            names=names,
            processes=[label(p) for p in self.processes],
            threads=threads,
            metadata=self.metadata,
            dropped=self.dropped,
            warnings=self.warnings,
        )


def _integer(value: Any) -> int | None:
    """An id as written; None where it is no int64."""
    try:
        number = int(value, 0) if isinstance(value, str) else int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    exact = not isinstance(value, float) or (number == value and abs(number) < 1 << 53)
    return number if exact and -(1 << 63) <= number < 1 << 63 else None


def _dtypes(table: type[Table]) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(table)]  # type: ignore[arg-type]
    return {n: _SMALL.get(n, np.int32 if n in _INT32 else np.int64) for n in names}


def table_from_chunks(table: type[Table], chunks: list[dict[str, np.ndarray]]) -> Any:
    """Concatenate column chunks, which are used up, into one table sorted by start.

    At equal starts the longer goes first, so that parents precede; calls follow one another on their thread, so there
    the shorter does.
    """
    columns = {}
    for name, dtype in _dtypes(table).items():
        parts = [c.pop(name) for c in chunks]
        columns[name] = np.concatenate(parts) if parts else np.empty(0, dtype)
    start, end = columns["start_ns"], columns["end_ns"]
    second = end if table is Calls else -end
    step = np.diff(start)
    if (step < 0).any() or ((step == 0) & (np.diff(second) < 0)).any():
        order = np.lexsort((second, start))
        for name in columns:
            columns[name] = columns[name][order]
    return table(**columns)


def link(ops: DeviceOps, calls: Calls) -> tuple[DeviceOps, int]:
    """(operations with `process` and `launch` filled, how many of the links are a guess).

    Correlations 0 and -1 are no ids. Where several calls carry one correlation (several processes in a file, or an id
    used twice), the device's usual process is preferred, then the nearest call that began before the operation. Where
    the process leaves more than one call, the link is a guess.
    """
    launch = np.full(len(ops), NONE, np.int64)
    guessed = 0
    usable = np.flatnonzero(calls.correlation > 0)
    if len(ops) and len(usable):
        ids, of_call = np.unique(calls.correlation[usable], return_inverse=True)
        at = np.minimum(np.searchsorted(ids, ops.correlation), len(ids) - 1)
        found = (ops.correlation > 0) & (ids[at] == ops.correlation)
        count = np.bincount(of_call)
        only = np.empty(len(ids), np.int64)
        only[of_call] = usable
        one = np.flatnonzero(found & (count[at] == 1))
        one = one[(ops.process[one] < 0) | (calls.process[only[at[one]]] == ops.process[one])]
        launch[one] = only[at[one]]
        many = np.flatnonzero(found & (count[at] > 1))
        if len(many):
            home, own, start = _usual_process(launch, ops, calls), ops.process[many], ops.start_ns[many]
            process = np.where(own >= 0, own, [home.get(d, NONE) for d in ops.device[many].tolist()])
            size = int(max(calls.process.max(), own.max())) + 2  # an operation may name a process that made no call
            key, began = of_call * size + calls.process[usable], calls.start_ns[usable]
            # First among the calls of the wanted process, then (unless the operation names its process) among all.
            best, alike = _nearest_before(key, began, at[many] * size + process, start)
            rest = np.flatnonzero((alike == 0) & (own < 0))
            if len(rest):
                best[rest], alike[rest] = _nearest_before(of_call, began, at[many[rest]], start[rest])
            launch[many] = np.where(alike > 0, usable[best], NONE)
            guessed = int((alike > 1).sum())
    known = launch >= 0
    process = ops.process.copy()
    process[known] = calls.process[launch[known]]
    _adopt_orphans(process, ops.device, calls)
    return dataclasses.replace(ops, launch=launch, process=process), guessed


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


def _usual_process(launch: np.ndarray, ops: DeviceOps, calls: Calls) -> dict[int, int]:
    """Device -> the process that launched most of its operations."""
    known = launch >= 0
    home: dict[int, int] = {}
    for d in np.unique(ops.device[known]):
        owners = calls.process[launch[known & (ops.device == d)]]
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
