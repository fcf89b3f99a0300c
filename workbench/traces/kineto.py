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

from workbench.traces.build import Builder
from workbench.traces.digits import parse_us
from workbench.traces.repair import first_value, mend, skip_strays
from workbench.traces.trace import (
    COPY,
    D2D,
    D2H,
    H2D,
    NEVER,
    OTHER_COPY,
    PAGEABLE,
    PINNED,
    UNKNOWN_MEMORY,
    Calls,
    DeviceOps,
    Spans,
    SyncRecords,
    Trace,
    TraceError,
    call_kind,
)

BLOCK_BYTES = 512 << 10
MAX_EVENT_BYTES = 64 << 20

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
_DIRECTIONS = {D2H: ("DtoH", "DeviceToHost"), H2D: ("HtoD", "HostToDevice"), D2D: ("DtoD", "DeviceToDevice")}

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


_NO_ARGS = _Args()
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
    return builder.trace()


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
    builder.read_events(events)


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
        builder.read_events(events)
        return
    builder.read_events(_repair_block(block, builder, last=True))


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


class _Rows(dict):
    """Row of each process or thread as written; one that is written as text and as a number has one row."""

    def __init__(self, rows: dict[Any, int]) -> None:
        super().__init__()
        self.rows = rows

    def __missing__(self, key: Any) -> int:
        same = tuple(map(_number, key)) if isinstance(key, tuple) else _number(key)
        self[key] = self.rows.setdefault(same, len(self.rows))
        return self[key]


class _Builder(Builder):
    """Sorts events into the tables, block by block."""

    def __init__(self, source: str) -> None:
        super().__init__(source)
        self.process_rows, self.thread_rows = _Rows(self.processes), _Rows(self.threads)
        self.unknown_phases: set[str] = set()
        self.other_categories: dict[str, int] = {}
        self.stream_ended = False

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

    def read_events(self, events: list[_Event]) -> None:
        """Keep the events that are operations, calls, spans or synchronisation records; count what may be one."""
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
                if event.name == "thread_name" and event.args is not None and isinstance(event.args.name, str):
                    self.thread_names[_number(event.pid), _number(event.tid)] = event.args.name
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
        name = self.name_ids(e.name for e in kept)
        for table, first, last, columns in (
            (DeviceOps, _KERNEL, _SET, self._op_columns),
            (Calls, _CALL, _CALL, self._call_columns),
            (Spans, _OP, _RANGE, self._span_columns),
            (SyncRecords, _SYNC, _SYNC, self._sync_columns),
        ):
            rows = np.flatnonzero((code >= first) & (code <= last))
            if len(rows):
                kind = code[rows] - first
                own = columns([kept[i] for i in rows.tolist()], kind)
                self.add(table, start_ns=start[rows], end_ns=end[rows], name=name[rows], kind=kind, **own)

    def _times(self, events: list[_Event], code: np.ndarray) -> tuple[list[_Event], np.ndarray, np.ndarray, np.ndarray]:
        """(events with usable times, their classes, starts and ends in ns); the others are counted."""
        texts = [b"x" if e.ts is _ABSENT else e.ts for e in events]
        texts += [b"0" if e.dur is _ABSENT else e.dur for e in events]
        start, duration = np.split(parse_us(texts), 2)
        unusable = (start == NEVER) | (duration == NEVER)
        negative = (duration < 0) & ~unusable
        timeless = (start == 0) & (duration == 0)
        zero = timeless & (code <= _SET)  # CUPTI writes zero times for operations whose record never completed
        absent = np.array([e.dur is _ABSENT for e in events])
        for reason, rows in (
            ("zero_time_calls", timeless & (code == _CALL)),
            ("missing_duration", absent & (code <= _CALL)),
            ("unusable_time", unusable),
            ("negative_duration", negative),
            ("zero_time_ops", zero),
            ("zero_time_copies", zero & (code == _COPY)),
        ):
            self.count(reason, int(rows.sum()))
        keep = ~(unusable | negative | zero)
        if not keep.all():
            events = [e for e, k in zip(events, keep.tolist()) if k]
            code, start, duration = code[keep], start[keep], duration[keep]
        return events, code, start, start + duration

    def _op_columns(self, events: list[_Event], kind: np.ndarray) -> dict[str, Any]:
        args = [e.args or _NO_ARGS for e in events]
        copy_kind = np.zeros(len(events), np.uint8)
        memory = np.full(len(events), UNKNOWN_MEMORY, np.int8)
        for i in np.flatnonzero(kind == COPY).tolist():
            name = str(events[i].name)
            copy_kind[i], memory[i] = _copy_kind(f"{name} {args[i].kind or ''}"), _host_memory(name)
        return {
            "copy_kind": copy_kind,
            "host_memory": memory,
            "size_bytes": self.integers([a.size for a in args]),
            "device": self.integers([e.pid if a.device is None else a.device for a, e in zip(args, events)]),
            "stream": self.integers([e.tid if a.stream is None else a.stream for a, e in zip(args, events)]),
            "correlation": self.integers([a.correlation for a in args]),
        }

    def _call_columns(self, events: list[_Event], kind: np.ndarray) -> dict[str, Any]:
        self.count("calls_without_thread", sum(e.pid is None or e.tid is None for e in events))
        return {
            "process": [self.process_rows[e.pid] for e in events],
            "thread": [self.thread_rows[e.pid, e.tid] for e in events],
            "correlation": self.integers([(e.args or _NO_ARGS).correlation for e in events]),
        }

    def _span_columns(self, events: list[_Event], kind: np.ndarray) -> dict[str, Any]:
        return {"thread": [self.thread_rows[e.pid, e.tid] for e in events]}

    def _sync_columns(self, events: list[_Event], kind: np.ndarray) -> dict[str, Any]:
        args = [e.args or _NO_ARGS for e in events]
        return {
            "device": self.integers([e.pid if a.device is None else a.device for a, e in zip(args, events)]),
            "stream": self.integers([a.stream for a in args]),
            "correlation": self.integers([a.correlation for a in args]),
            "wait_stream": self.integers([a.wait_stream for a in args]),
            "wait_correlation": self.integers([a.wait_correlation for a in args]),
        }

    def trace(self) -> Trace:
        """The trace, with what its reader must know of it."""
        trace = self.finish(_label)
        if self.unknown_phases:
            self.warn("begin/end event pairs (ph B, E) are not read; Kineto writes complete events (ph X)")
        if not len(trace.ops):
            self.warn(self._why_no_ops(len(trace.calls) + len(trace.spans)))
        return trace

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


def _number(value: Any) -> Any:
    """A process or thread id: digits in a string are the number."""
    return int(value) if isinstance(value, str) and len(value) < 20 and value.isdecimal() else value


def _label(value: Any) -> int | str:
    """Label of a process or thread: a number or text."""
    return value if isinstance(value, (int, str)) else str(value)


def _copy_kind(text: str) -> int:
    """Direction of a copy from its name and kind."""
    text = text.replace(" ", "")
    for kind, words in _DIRECTIONS.items():
        if any(word in text for word in words):
            return kind
    return OTHER_COPY


def _host_memory(name: str) -> int:
    """Memory of a copy on the host, from its name."""
    if "Pageable" in name:
        return PAGEABLE
    return PINNED if "Pinned" in name else UNKNOWN_MEMORY
