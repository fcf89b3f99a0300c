"""Read Kineto (PyTorch profiler) Chrome traces: .json and .json.gz of any size, exact nanoseconds, damage repaired.

The file is decoded in blocks cut where an event ends, so memory holds the typed columns and one block. Timestamps are
epoch or relative microseconds with up to three decimals; those do not fit a double, so their digits are parsed.
"""

from __future__ import annotations

import collections
import gc
import gzip
import json
import re
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from workbench.traces.digits import parse_us
from workbench.traces.repair import first_value, mend, skip_strays
from workbench.traces.scalars import copy_kind, host_memory, int32, label, number
from workbench.traces.trace import (
    COPY,
    NONE,
    UNKNOWN_MEMORY,
    Calls,
    DeviceOps,
    Spans,
    SyncRecords,
    Trace,
    TraceError,
    call_kind,
    freeze_names,
    link,
    table_from_chunks,
)

BLOCK_BYTES = 512 << 10
MAX_EVENT_BYTES = 64 << 20
_INT64 = 1 << 63

# Order: device operations (KERNEL, COPY, SET), calls, spans (CPU_OP, PYTHON, RANGE), synchronisation records.
_KERNEL, _COPY, _SET, _CALL, _OP, _PYTHON, _RANGE, _SYNC = range(8)
_CLASS = {
    "kernel": _KERNEL,
    "gpu_memcpy": _COPY,
    "memcpy": _COPY,
    "gpu_memset": _SET,
    "memset": _SET,
    "cuda_runtime": _CALL,
    "cuda_driver": _CALL,
    "runtime": _CALL,
    "driver": _CALL,
    "hip_runtime": _CALL,
    "cpu_op": _OP,
    "operator": _OP,
    "python_function": _PYTHON,
    "user_annotation": _RANGE,
    "cuda_sync": _SYNC,
}


_OTHER_PHASES = frozenset("iIRCPbneSTpFstfNODvVca()")
"""Phases of the format that hold neither calls nor operations: marks, counters, flows, objects."""
_ABSENT = msgspec.Raw(b"")


class _Args(msgspec.Struct, gc=False):
    correlation: int | str | float | None = None
    device: int | str | float | None = None
    stream: int | str | float | None = None
    size: int | str | float | None = msgspec.field(default=None, name="bytes")
    name: Any = None
    kind: Any = None
    wait_stream: int | str | float | None = msgspec.field(default=None, name="wait_on_stream")
    wait_correlation: int | str | float | None = msgspec.field(default=None, name="wait_on_cuda_event_record_corr_id")


class _Event(msgspec.Struct, gc=False):
    ph: str | None = None
    cat: str | None = None
    name: str | int | float | None = None
    pid: int | str | float | None = None
    tid: int | str | float | None = None
    ts: msgspec.Raw = _ABSENT
    dur: msgspec.Raw = _ABSENT
    args: _Args | None = None


_decode_events = msgspec.json.Decoder(list[_Event]).decode
_decode_event = msgspec.json.Decoder(_Event).decode


def read_kineto(path: str | Path) -> Trace:
    """Read one Kineto trace (.json or .json.gz) into a `Trace`.

    Raises:
        TraceError: the file is absent, empty, or holds no trace events at all.
    """
    path = Path(path)
    builder = _Builder(path.name)
    was_enabled = gc.isenabled()
    gc.disable()  # millions of live event structs make every collection a full scan
    try:
        with _open(path) as stream:
            _read_stream(stream, builder)
    finally:
        if was_enabled:
            gc.enable()
    return builder.finish()


def _open(path: Path) -> BinaryIO:
    if not path.is_file():
        raise TraceError(f"{path}: no such trace file")
    with path.open("rb") as f:
        magic = f.read(2)
    if magic == b"":
        raise TraceError(f"{path}: empty file, expected Chrome trace JSON")
    return gzip.open(path, "rb") if magic == b"\x1f\x8b" else path.open("rb")  # type: ignore[return-value]


def _read_block(stream: BinaryIO, size: int, builder: _Builder) -> bytes:
    parts, got = [], 0
    if builder.stream_ended:
        return b""
    try:
        while got < size and (part := stream.read1(size - got)):  # type: ignore[attr-defined]
            parts.append(part)
            got += len(part)
    except (EOFError, zlib.error, gzip.BadGzipFile, OSError) as error:
        builder.stream_ended = True
        builder.count("truncated_file")
        builder.warn(f"the compressed stream is damaged ({error}); events after that point are lost")
    return b"".join(parts)


_FORMATS = {
    b"\xff\xfe": "this is UTF-16 text, expected UTF-8",
    b"\xfe\xff": "this is UTF-16 text, expected UTF-8",
    b"PK": "this is a zip archive, unpack it first",
    b"\x28\xb5": "this is compressed with zstd, unpack it first",
    b"BZ": "this is compressed with bzip2, unpack it first",
    b"\xfd7": "this is compressed with xz, unpack it first",
    b"\x1f\x8b": "this is compressed twice, unpack it once",
    b"\x80\x04": "this is a Python pickle, which is never read",
    b"<!": "this is a web page (a failed download?)",
    b"<h": "this is a web page (a failed download?)",
}
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_EVENT_KEYS = rb'(?:ph|name|cat|pid|tid|ts|dur|id|args|s|bp)"'
_NEXT_EVENT = re.compile(rb",\s*(?=\{\s*\"" + _EVENT_KEYS + rb"\s*:)")
_EVENT_START = re.compile(rb"(?:^|[\[,\n])\s*(?=\{\s*\"" + _EVENT_KEYS + rb"\s*:)")


def _read_stream(stream: BinaryIO, builder: _Builder) -> None:
    rest = _find_events(stream, builder)
    if rest is None:
        return
    while True:
        more = _read_block(stream, BLOCK_BYTES, builder)
        if not more:
            break
        rest += more
        cut = _last_event_end(rest)
        if cut is None:
            if len(rest) > MAX_EVENT_BYTES:
                builder.count("damaged_bytes", len(rest))
                builder.warn(f"no event boundary within {MAX_EVENT_BYTES} bytes; they were skipped")
                rest = b""
            continue
        _decode_block(rest[: cut[0]], builder)
        rest = rest[cut[1] :]
    _decode_last(rest, builder)


def _find_events(stream: BinaryIO, builder: _Builder) -> bytes | None:
    """Read up to the first event; returns the bytes after the opening bracket, None where there is no event array."""
    head = b""
    while True:
        more = _read_block(stream, BLOCK_BYTES, builder)
        head += more
        stripped = head.lstrip(b"\xef\xbb\xbf \t\r\n")
        if stripped[:1] == b"[":
            return stripped[1:]
        found = _EVENTS_KEY.search(head)
        if found:
            builder.read_metadata(head[: found.start()] + b'"traceEvents":[]}')
            return head[found.end() :]
        if not more:
            break
        if len(head) > MAX_EVENT_BYTES:
            raise TraceError(
                f"{builder.source}: no traceEvents in the first {len(head)} bytes, expected a Kineto trace"
            )
    if not builder.read_metadata(head):
        found = [*builder.warnings, _FORMATS.get(head[:2], "") if head else "nothing in it"]
        raise TraceError(
            f"{builder.source}: neither trace JSON with traceEvents nor a list of events"
            + "".join(f"; {f}" for f in found if f)
        )
    if "ph" in builder.metadata:
        raise TraceError(f"{builder.source}: one event per line, expected traceEvents or a list of events")
    builder.warn("the file has metadata but no traceEvents")
    return None


def _last_event_end(block: bytes) -> tuple[int, int] | None:
    """(end of the last complete event, start of the next) in a block; None where the block has no boundary."""
    for reach in (1 << 16, len(block)):
        base = max(0, len(block) - reach)
        found = collections.deque(_NEXT_EVENT.finditer(block, base), maxlen=1)
        if found:
            return found[0].start(), found[0].end()
        if base == 0:
            break
    return None


def _decode_block(block: bytes, builder: _Builder) -> None:
    try:
        events = _decode_events(b"[" + block + b"]")
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError):
        events = _repair_block(block, builder)
    builder.add(events)


def _decode_last(block: bytes, builder: _Builder) -> None:
    """Decode the tail of the file: events, the closing bracket, and metadata that follows it."""
    tails = list(re.finditer(rb"\]\s*[,}]|\]\s*$", block[-(1 << 22) :]))
    base = max(0, len(block) - (1 << 22))
    for tail in reversed(tails[-64:]):
        at = base + tail.start()
        after = block[at + 1 :].strip()
        body = block[:at].rstrip().rstrip(b",")
        if body.strip() and not body.endswith(b"}"):
            continue
        try:
            events = _decode_events(b"[" + body + b"]")
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError):
            continue
        builder.read_rest(after)
        builder.add(events)
        return
    builder.add(_repair_block(block, builder, last=True))


def _repair_block(block: bytes, builder: _Builder, last: bool = False) -> list[_Event]:
    """Salvage whole events from a damaged block: mend the text, then decode event by event, counting what fails."""
    events: list[_Event] = []
    damaged = repaired = strays = 0
    starts = [m.end() for m in _EVENT_START.finditer(block)]
    leading = (block[: starts[0]] if starts else block).rstrip(b"[")
    count, rest = skip_strays(mend(leading))
    strays += count
    damaged += bool(rest and rest[0] != "]" and not last)
    for begin, end in zip(starts, [*starts[1:], len(block)]):
        event, mended, rest = _salvage(block[begin:end])
        if event is None:
            damaged += not (last and end == len(block)) or block.rstrip().endswith((b"]", b"}"))
            continue
        events.append(event)
        count, rest = skip_strays(rest)
        strays += count
        repaired += mended
        if rest and rest[0] != "]":
            damaged += 1
        elif rest and not (last and end == len(block)):
            builder.second_document()
    builder.count("damaged_events", damaged)
    builder.count("repaired_events", repaired)
    builder.count("stray_items", strays)
    if last and rest[:1] == "]":
        builder.read_rest(rest[1:].encode("utf-8", "replace"))
    elif last and not block.rstrip().endswith((b"]", b"]}")):
        builder.count("truncated_file")
        builder.warn("the file ends inside the event list: the last event and everything after it are lost")
    return events


def _salvage(piece: bytes) -> tuple[_Event | None, bool, str]:
    """(event or None, was its text mended, the text after it)."""
    try:
        return _decode_event(piece.rstrip(b" \t\r\n,")), False, ""
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError):
        pass
    try:
        raw, mended, rest = first_value(piece)
        return _decode_event(raw), mended, rest
    except (ValueError, msgspec.DecodeError, RecursionError):
        return None, False, ""


class _Ids(dict):
    """Row of each process or thread as written; one that is written as text and as a number has one row."""

    def __init__(self, rows: dict[Any, int]) -> None:
        super().__init__()
        self.rows = rows

    def __missing__(self, key: Any) -> int:
        same = tuple(map(number, key)) if isinstance(key, tuple) else number(key)
        self[key] = self.rows.setdefault(same, len(self.rows))
        return self[key]


class _Builder:
    """Collects typed columns block by block."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.metadata: dict[str, Any] = {}
        self.dropped: dict[str, int] = {}
        self.warnings: list[str] = []
        self.names: dict[str, int] = {}
        self.processes: dict[Any, int] = {}
        self.threads: dict[tuple[Any, Any], int] = {}
        self.process_ids, self.thread_ids = _Ids(self.processes), _Ids(self.threads)
        self.thread_names: dict[tuple[Any, Any], str] = {}
        self.chunks: dict[str, list[dict[str, np.ndarray]]] = {"ops": [], "calls": [], "spans": [], "syncs": []}
        self.unknown_phases: set[str] = set()
        self.other_categories: dict[str, int] = {}
        self.stream_ended = False

    def count(self, reason: str, n: int = 1) -> None:
        if n:
            self.dropped[reason] = self.dropped.get(reason, 0) + int(n)

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def read_metadata(self, raw: bytes) -> bool:
        """Merge top-level fields; False where the bytes are no JSON object."""
        text = mend(raw).lstrip("\ufeff \t\r\n")
        for candidate in (text, re.sub(r",\s*}\s*$", "}", text)):
            try:
                value, stop = json.JSONDecoder(strict=False).raw_decode(candidate)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                events = value.pop("traceEvents", None)
                if (isinstance(events, list) and events) or '"traceEvents"' in candidate[stop:]:
                    self.second_document()
                elif candidate[stop:].strip("\0 \t\r\n"):
                    self.warn("text after the end of the JSON document is ignored")
                self.metadata.update(value)
                return True
        return False

    def read_rest(self, after: bytes) -> None:
        """Metadata that follows the list of events."""
        after = after.strip(b"\0 \t\r\n")
        if after and not self.read_metadata(b"{" + after.lstrip(b", \t\r\n")):
            self.warn("text after the event list is no JSON and is ignored")

    def second_document(self) -> None:
        """Note that the file holds more than one list of events."""
        self.count("second_document")
        self.warn("the file holds more than one list of events (documents joined?): give each one in a file of its own")

    def add(self, events: list[_Event]) -> None:
        kept: list[_Event] = []
        codes: list[int] = []
        known, other = _CLASS.get, self.other_categories
        for event in events:
            if event.ph == "X":
                cat = event.cat or ""
                code = known(cat)
                if code is None:
                    code = _category(cat)
                if code is not None:
                    kept.append(event)
                    codes.append(code)
                else:
                    other[cat] = other.get(cat, 0) + 1
                    lost_id = not cat and event.args is not None and event.args.correlation is not None
                    if lost_id or (isinstance(event.name, str) and call_kind(event.name)):
                        self.count("unknown_category")
            elif event.ph == "M":
                self._meta_event(event)
            elif event.ph in ("B", "E"):
                self.unknown_phases.add(event.ph)
                if event.ph == "B" and event.cat is not None and _category(event.cat) is not None:
                    self.count("begin_end_events")
            elif event.ph not in _OTHER_PHASES and (
                event.name is not None or event.cat is not None or event.ts is not _ABSENT
            ):
                self.count("stray_items")
        if not kept:
            return
        kept, code, start, end = self._times(kept, np.array(codes, np.uint8))
        columns = {"start_ns": start, "end_ns": end, "name": self._name_ids(kept)}
        for first, last, add in (
            (_KERNEL, _SET, self._add_ops),
            (_CALL, _CALL, self._add_calls),
            (_OP, _RANGE, self._add_spans),
            (_SYNC, _SYNC, self._add_syncs),
        ):
            rows = np.flatnonzero((code >= first) & (code <= last))
            if len(rows):
                add([kept[i] for i in rows.tolist()], code[rows] - first, {k: v[rows] for k, v in columns.items()})

    def _meta_event(self, event: _Event) -> None:
        if event.name == "thread_name" and event.args is not None and isinstance(event.args.name, str):
            self.thread_names[number(event.pid), number(event.tid)] = event.args.name

    def _times(self, events: list[_Event], code: np.ndarray) -> tuple[list[_Event], np.ndarray, np.ndarray, np.ndarray]:
        n = len(events)
        texts = [b"x" if e.ts is _ABSENT else e.ts for e in events]
        texts += [b"0" if e.dur is _ABSENT else e.dur for e in events]
        both = parse_us(texts)
        start, duration = both[:n], both[n:]
        bad = np.iinfo(np.int64).min
        unusable = (start == bad) | (duration == bad)
        negative = (duration < 0) & ~unusable
        # CUPTI writes zero times for operations whose record never completed.
        zero = (start == 0) & (duration == 0) & (code <= _SET)
        drop = unusable | negative | zero
        self.count("zero_time_calls", int(((start == 0) & (duration == 0) & (code == _CALL)).sum()))
        missing = [i for i, e in enumerate(events) if e.dur is _ABSENT]
        self.count("missing_duration", int((code[missing] <= _CALL).sum()) if missing else 0)
        if drop.any():
            self.count("unusable_time", int(unusable.sum()))
            self.count("negative_duration", int(negative.sum()))
            self.count("zero_time_ops", int(zero.sum()))
            self.count("zero_time_copies", int((zero & (code == _COPY)).sum()))
            keep = ~drop
            events = [e for e, k in zip(events, keep.tolist()) if k]
            code, start, duration = code[keep], start[keep], duration[keep]
        return events, code, start, start + duration

    def _name_ids(self, events: list[_Event]) -> np.ndarray:
        ids = self.names
        intern = ids.setdefault
        return np.fromiter(
            (intern(e.name if type(e.name) is str else str(e.name), len(ids)) for e in events), np.int32, len(events)
        )

    def _thread_ids(self, events: list[_Event]) -> np.ndarray:
        ids = self.thread_ids
        return np.fromiter((ids[e.pid, e.tid] for e in events), np.int32, len(events))

    def _process_ids(self, events: list[_Event]) -> np.ndarray:
        ids = self.process_ids
        return np.fromiter((ids[e.pid] for e in events), np.int32, len(events))

    def _add_ops(self, events: list[_Event], kind: np.ndarray, columns: dict[str, np.ndarray]) -> None:
        empty = _Args()
        args = [e.args or empty for e in events]
        n = len(events)
        device = _integers([e.pid if a.device is None else a.device for a, e in zip(args, events)], self)
        columns |= {
            "kind": kind,
            "copy_kind": np.zeros(n, np.uint8),
            "host_memory": np.full(n, UNKNOWN_MEMORY, np.int8),
            "size_bytes": _integers([a.size for a in args], self),
            "process": np.full(n, NONE, np.int32),
            "device": int32(device),
            "stream": _integers([e.tid if a.stream is None else a.stream for a, e in zip(args, events)], self),
            "correlation": _integers([a.correlation for a in args], self),
            "launch": np.full(n, NONE, np.int64),
        }
        for i in np.flatnonzero(kind == COPY).tolist():
            name = str(events[i].name)
            columns["copy_kind"][i] = copy_kind(f"{name} {args[i].kind or ''}")
            columns["host_memory"][i] = host_memory(name)
        self.chunks["ops"].append(columns)

    def _add_calls(self, events: list[_Event], kind: np.ndarray, columns: dict[str, np.ndarray]) -> None:
        self.count("calls_without_thread", sum(e.pid is None or e.tid is None for e in events))
        columns |= {
            "kind": kind,
            "process": self._process_ids(events),
            "thread": self._thread_ids(events),
            "correlation": _integers([e.args.correlation if e.args else None for e in events], self),
        }
        self.chunks["calls"].append(columns)

    def _add_spans(self, events: list[_Event], kind: np.ndarray, columns: dict[str, np.ndarray]) -> None:
        self.chunks["spans"].append(columns | {"kind": kind, "thread": self._thread_ids(events)})

    def _add_syncs(self, events: list[_Event], kind: np.ndarray, columns: dict[str, np.ndarray]) -> None:
        empty = _Args()
        args = [e.args or empty for e in events]
        device = _integers([e.pid if a.device is None else a.device for a, e in zip(args, events)], self)
        columns |= {
            "process": np.full(len(kind), NONE, np.int32),
            "device": int32(device),
            "stream": _integers([a.stream for a in args], self),
            "correlation": _integers([a.correlation for a in args], self),
            "wait_stream": _integers([a.wait_stream for a in args], self),
            "wait_correlation": _integers([a.wait_correlation for a in args], self),
        }
        self.chunks["syncs"].append(columns)

    def finish(self) -> Trace:
        calls = table_from_chunks(Calls, self.chunks["calls"])
        spans = table_from_chunks(Spans, self.chunks["spans"])
        syncs = table_from_chunks(SyncRecords, self.chunks["syncs"])
        ops = table_from_chunks(DeviceOps, self.chunks["ops"])
        names = list(self.names)
        calls = freeze_names(names, calls)
        ops = link(ops, calls, self.dropped, self.warnings)
        threads: list[tuple[int, int | str, str]] = []
        for pid, tid in self.threads:
            process = self.processes.setdefault(pid, len(self.processes))
            threads.append((process, label(tid), self.thread_names.get((pid, tid), "")))
        if self.unknown_phases:
            self.warn("begin/end event pairs (ph B, E) are not read; Kineto writes complete events (ph X)")
        if not len(ops):
            self.warn(self._why_no_ops(len(calls) + len(spans)))
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

    def _why_no_ops(self, host_events: int) -> str:
        if host_events:
            return (
                "no device operations in this trace, only host events: recorded without ProfilerActivity.CUDA, or "
                "nothing ran on a GPU"
            )
        if self.other_categories:
            common = sorted(self.other_categories, key=lambda c: -self.other_categories[c])[:5]
            total, found = sum(self.other_categories.values()), ", ".join(c[:40] or "none" for c in common)
            return (
                f"no device operations in this trace: none of its {total} complete events has a category of the "
                f"PyTorch profiler (found: {found}; expected kernel, gpu_memcpy, cuda_runtime, cpu_op and others); "
                "traces of JAX, XLA, TensorFlow or torch before 1.8.1 are not read"
            )
        return "no device operations in this trace"


def _category(text: str) -> int | None:
    """Class of an event by its category, whatever its case; calls of every vendor's runtime and driver are calls."""
    text = text.strip().lower()
    return _CALL if text.endswith(("_runtime", "_driver")) else _CLASS.get(text)


def _integers(values: list[Any], builder: _Builder) -> np.ndarray:
    """int64 column from JSON scalars; absent is -1, text is parsed, what does not fit int64 is -1 and counted."""
    try:
        return np.fromiter(values, np.int64, len(values))
    except (TypeError, ValueError, OverflowError):
        pass
    out = np.full(len(values), NONE, np.int64)
    odd = 0
    for i, value in enumerate(values):
        if type(value) is int and -_INT64 <= value < _INT64:
            out[i] = value
        elif isinstance(value, str):
            try:
                out[i] = int(value, 0)
            except (ValueError, OverflowError):
                odd += 1
        elif isinstance(value, float) and value == int(value if abs(value) < 2**53 else 0):
            out[i] = int(value)
        elif value is not None:
            odd += 1
    if odd:
        builder.count("out_of_range_ids", odd)
    return out
