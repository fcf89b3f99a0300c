"""The scrubbable timeline: a client-side widget, so that a slider redraws without a round trip to the kernel."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anywidget
import numpy as np
import traitlets

from workbench.core.colours import COLOURS, LABELS, PATTERNS

STATIC = Path(__file__).parent / "static"
# One ES module in parts, of which the last exports it: anywidget loads a module that imports nothing.
PARTS = ("simulate.js", "surface.js", "picture.js", "sources.js", "panel.js", "timeline.js")
SCRIPT = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in PARTS)
MAX_EVENTS = 1_000_000
MAX_LANES = 64
MAX_DEPTH = 6
MAX_TABLE_ROWS = 500
SLIM_FROM = 10  # more rows than this are drawn half as high
LOOK = {"colours": COLOURS, "patterns": PATTERNS, "labels": LABELS}


class Timeline(anywidget.AnyWidget):
    """Timeline with a scrubbable cursor; make it with `timeline_view` or `trace_view`."""

    _esm = SCRIPT
    _css = (STATIC / "timeline.css").read_text(encoding="utf-8")
    spec = traitlets.Dict().tag(sync=True)
    columns = traitlets.Bytes(b"").tag(sync=True)
    state = traitlets.Dict().tag(sync=True)
    goto_request = traitlets.Dict().tag(sync=True)

    @property
    def origin_ns(self) -> int:
        """Absolute time of the widget's zero: 0 for a program, the first event's start for a recording."""
        return int(self.spec.get("origin_ns", 0))

    @property
    def cursor_ns(self) -> int | None:
        """Where the reader's cursor is in a recording, absolute ns; None before the first move."""
        at = self.state.get("main", {}).get("cursor")
        return None if at is None else self.origin_ns + round(at)

    def values(self, panel: str | None = None) -> dict[str, float]:
        """Return the sliders' values of a panel (default: the first), as the reader left them."""
        panels = {p["id"]: p for p in self.spec.get("panels", [])}
        chosen = panel if panel is not None else next(iter(panels), "")
        if chosen not in panels:
            raise ValueError(f"unknown panel {chosen!r}: the view has {', '.join(panels) or 'none'}")
        start = {c["id"]: float(c["value"]) for c in panels[chosen].get("controls", [])}
        return start | self.state.get(chosen, {}).get("values", {})

    def goto(self, time: float, width: float | None = None, *, panel: str | None = None) -> None:
        """Move the cursor to `time` and, where `width` is given, show a window that wide around it.

        Args:
            time: absolute ns in a recording, the program's unit otherwise.
            width: window in the same unit.
            panel: id of the panel (default: the first).
        """
        for name, value in (("time", time), ("width", width)):
            if value is not None and not math.isfinite(value):
                raise ValueError(f"goto: {name} must be finite, got {value!r}")
        if width is not None and width <= 0:
            raise ValueError(f"goto: width must be > 0, got {width!r}")
        serial = int(self.goto_request.get("serial", 0)) + 1
        request = {"time": float(time - self.origin_ns), "width": width, "serial": serial}
        self.goto_request = request | ({"panel": panel} if panel is not None else {})


def timeline_view(spec: Mapping[str, Any]) -> Timeline:
    """Return the interactive view of one or more programs of the queue model.

    Args:
        spec: title, badge, layout (``stack`` or ``tabs``) and panels; each panel has timelines (a program, its rows and
            marks), controls, readouts, legend, cursor and caption.

    Raises:
        ValueError: a part is missing or refers to something that is not there.
    """
    if not isinstance(spec, Mapping) or not spec.get("panels"):
        raise ValueError("timeline_view: expected a spec with at least one panel, got none")
    seen: set[str] = set()
    for panel in spec["panels"]:
        _check_panel(panel, seen)
    if spec.get("layout", "stack") not in ("stack", "tabs"):
        raise ValueError(f"timeline_view: layout must be 'stack' or 'tabs', got {spec['layout']!r}")
    plain = json.loads(json.dumps(dict(spec), allow_nan=False, default=_plain))
    return Timeline(spec=plain | {"type": "program"} | LOOK)


def _plain(value: Any) -> Any:
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise TypeError(f"timeline_view: expected plain JSON values, got {type(value).__name__}")


def _check_panel(panel: Mapping[str, Any], seen: set[str]) -> None:
    name = panel.get("id")
    if not name or name in seen:
        raise ValueError(f"timeline_view: every panel needs an id of its own, got {name!r}")
    seen.add(name)
    timelines = {t["id"]: t for t in panel.get("timelines", [])}
    if not timelines:
        raise ValueError(f"panel {name!r}: expected at least one timeline, got none")
    for control in panel.get("controls", []):
        low, high, value = control["min"], control["max"], control["value"]
        if not low <= value <= high:
            raise ValueError(f"control {control['id']!r}: value must lie in {low} to {high}, got {value}")
        for target in control["sets"]:
            _check_path(control["id"], target, timelines)
    for readout in panel.get("readouts", []):
        asked = readout.get("timeline")
        if asked is not None and asked not in timelines:
            raise ValueError(f"readout {readout['label']!r}: no timeline {asked!r}; allowed are {', '.join(timelines)}")


def _check_path(control: str, target: Mapping[str, Any], timelines: Mapping[str, Any]) -> None:
    if target["timeline"] not in timelines:
        raise ValueError(f"control {control!r}: no timeline {target['timeline']!r}; allowed are {', '.join(timelines)}")
    at = timelines[target["timeline"]]["program"]
    for part in target["path"]:
        try:
            at = at[part]
        except (KeyError, IndexError, TypeError):
            path = ".".join(map(str, target["path"]))
            raise ValueError(f"control {control!r}: the program has no {path}") from None


def trace_view(
    *,
    lanes: Sequence[str],
    events: Mapping[str, Any],
    title: str = "",
    badge: str = "",
    caption: str = "",
    names: Sequence[str] | None = None,
    kinds: Sequence[str] | None = None,
    curves: Sequence[Mapping[str, Any]] = (),
    table: Mapping[str, Any] | None = None,
    window_ns: tuple[int, int] | None = None,
    cursor_ns: int | None = None,
    hides_previous: bool = False,
) -> Timeline:
    """Return the interactive view of recorded events, up to a million.

    Args:
        lanes: labels from top to bottom.
        events: equal-length columns ``lane`` (index into `lanes`), ``start_ns``, ``end_ns`` (int, absolute), ``kind``
            (key of `core.colours.COLOURS`, or an index into `kinds`) and ``name`` (text, or an index into `names`).
        title: heading.
        badge: where the numbers come from.
        caption: one or two sentences below the picture.
        names: texts of the events where ``name`` holds indices.
        kinds: keys of `core.colours.COLOURS` where ``kind`` holds indices.
        curves: ``label, unit, t_ns, before, after``: a straight line runs from ``(t[i], after[i])`` to
            ``(t[i+1], before[i+1])``; unit ``"ns"`` is shown as a time, any other as a plain number.
        table: ``title, columns, rows, start_ns, end_ns``; a row takes the reader to its interval.
        window_ns: first window shown, absolute (default: everything).
        cursor_ns: where the cursor starts, absolute.
        hides_previous: once drawn in a notebook it hides the output above it, a still picture that stood in for it.

    Raises:
        ValueError: a column is missing or has the wrong length, type or range; the message names it.
    """
    columns = _event_columns(lanes, events, names, kinds)
    origin = int(columns["start"].min()) if len(columns["start"]) else 0
    extent_end = int(columns["end"].max()) - origin if len(columns["end"]) else 1
    order, rows, dropped = _rows(lanes, columns)
    pack = _Pack()
    packed = {
        "start": pack.add(columns["start"][order] - origin, "<f8"),
        "end": pack.add(columns["end"][order] - origin, "<f8"),
        "kind": pack.add(columns["kind"][order], "<u1"),
        "name": pack.add(columns["name"][order], "<u4"),
    }
    if dropped:
        caption = f"{caption} {dropped} events nested deeper than {MAX_DEPTH} levels are not drawn.".strip()
    spec = {
        "type": "recorded",
        "title": _text(title),
        "badge": _text(badge),
        "caption": _text(caption),
        "origin_ns": origin,
        "extent": [0, max(extent_end, 1)],
        "lanes": rows,
        "columns": packed,
        "names": columns["names"],
        "kinds": columns["kinds"],
        "curves": [_curve(i, c, origin, pack) for i, c in enumerate(curves)],
        "table": _table(table, origin) if table else None,
        "window": [int(t) - origin for t in window_ns] if window_ns else None,
        "cursor": int(cursor_ns) - origin if cursor_ns is not None else None,
        "hides_previous": hides_previous,
    }
    if spec["window"] and not spec["window"][0] < spec["window"][1]:
        raise ValueError(f"window_ns: expected (low, high) with low < high, got {window_ns!r}")
    return Timeline(spec=spec | LOOK, columns=zlib.compress(pack, 6))


def _text(value: Any) -> str:
    """Return text that JSON and a web page can carry: a trace may hold lone surrogates, which no encoder takes."""
    return str(value).encode("utf-8", "replace").decode("utf-8")


class _Pack(bytearray):
    """Arrays one after another, each aligned to 8 bytes as typed arrays need it."""

    def add(self, values: np.ndarray, dtype: str) -> dict[str, Any]:
        """Append `values` as `dtype` and return where they lie."""
        array = np.ascontiguousarray(values, dtype)
        entry = {"type": dtype[1:], "offset": len(self), "length": len(array)}
        self += array.tobytes() + b"\0" * (-array.nbytes % 8)
        return entry


def _complete(where: str, given: Mapping[str, Any], wanted: Sequence[str], *others: str) -> None:
    """Raise ValueError where a wanted column or one of `others` is missing, or where the columns' lengths differ."""
    if missing := [c for c in (*others, *wanted) if c not in given]:
        raise ValueError(f"{where}: missing {', '.join(missing)}; expected {', '.join(wanted)}, got {', '.join(given)}")
    lengths = {c: len(given[c]) for c in wanted}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{where}: expected columns of equal length, got {lengths}")


def _integers(name: str, values: Any) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name}: expected one dimension of integers, got {array.dtype} {array.shape}")
    return array.astype(np.int64)


def _coded(name: str, values: Any, labels: Sequence[str] | None) -> tuple[np.ndarray, list[str]]:
    if labels is not None:
        codes = _integers(name, values)
        if codes.size and not 0 <= codes.min() <= codes.max() < len(labels):
            raise ValueError(
                f"{name}: expected indices from 0 to {len(labels) - 1}, got {codes.min()} to {codes.max()}"
            )
        return codes, [_text(v) for v in labels]
    known: dict[str, int] = {}
    codes = np.fromiter((known.setdefault(str(v), len(known)) for v in values), dtype=np.int64)
    return codes, [_text(v) for v in known]


def _event_columns(
    lanes: Sequence[str], events: Mapping[str, Any], names: Sequence[str] | None, kinds: Sequence[str] | None
) -> dict[str, Any]:
    _complete("events", events, ("lane", "start_ns", "end_ns", "kind", "name"))
    lane, start, end = (_integers(f"events[{c!r}]", events[c]) for c in ("lane", "start_ns", "end_ns"))
    kind, kind_names = _coded("events['kind']", events["kind"], kinds)
    name, text = _coded("events['name']", events["name"], names)
    if not 1 <= len(lanes) <= MAX_LANES:
        raise ValueError(f"lanes: expected 1 to {MAX_LANES}, got {len(lanes)}")
    if len(lane) > MAX_EVENTS:
        raise ValueError(f"events: expected at most {MAX_EVENTS}, got {len(lane)}; slice the trace to a window first")
    if len(lane) and not 0 <= lane.min() <= lane.max() < len(lanes):
        raise ValueError(f"events['lane']: expected 0 to {len(lanes) - 1}, got {lane.min()} to {lane.max()}")
    if (wrong := np.flatnonzero(end < start)).size:
        i = int(wrong[0])
        raise ValueError(f"events['end_ns']: expected end >= start, got {end[i]} < {start[i]} at row {i}")
    if unknown := [k for k in kind_names if k not in COLOURS]:
        raise ValueError(f"events['kind']: unknown {unknown[0]!r}; expected one of {', '.join(COLOURS)}")
    return {"lane": lane, "start": start, "end": end, "kind": kind, "name": name, "names": text, "kinds": kind_names}


def _rows(lanes: Sequence[str], columns: Mapping[str, Any]) -> tuple[np.ndarray, list[dict[str, Any]], int]:
    """Split lanes into rows without overlap; returns the order of the events, the rows, and how many were left out."""
    lane, start, end = columns["lane"], columns["start"], columns["end"]
    order = np.lexsort((-end, start, lane))
    pieces: list[np.ndarray] = []
    rows: list[dict[str, Any]] = []
    first = dropped = 0
    for index, label in enumerate(lanes):
        mine = order[np.searchsorted(lane[order], index) : np.searchsorted(lane[order], index, side="right")]
        levels, lost = _levels(start[mine], end[mine])
        dropped += lost
        for depth in range(max(int(levels.max(initial=0)), 0) + 1):
            part = mine[levels == depth]
            pieces.append(part)
            row = {"label": _text(label) if depth == 0 else "", "lane": _text(label), "slim": depth > 0}
            rows.append(row | {"first": first, "count": len(part)})
            first += len(part)
    for at, row in enumerate(rows):
        nested = row["slim"] or (at + 1 < len(rows) and rows[at + 1]["slim"])
        row["slim"] = nested or len(rows) > SLIM_FROM
    return np.concatenate(pieces) if pieces else order[:0], rows, dropped


def _levels(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, int]:
    """Return each event's row among its lane's, the first that is free at its start; -1 beyond `MAX_DEPTH`."""
    levels = np.zeros(len(start), dtype=np.int64)
    if len(start) < 2 or not np.any(start[1:] < np.maximum.accumulate(end)[:-1]):
        return levels, 0
    busy_until: list[int] = []
    lost = 0
    for i, (begin, finish) in enumerate(zip(start.tolist(), end.tolist())):
        depth = next((d for d, until in enumerate(busy_until) if until <= begin), len(busy_until))
        if depth >= MAX_DEPTH:
            levels[i] = -1
            lost += 1
            continue
        if depth == len(busy_until):
            busy_until.append(finish)
        busy_until[depth] = finish
        levels[i] = depth
    return levels, lost


def _curve(index: int, curve: Mapping[str, Any], origin: int, pack: _Pack) -> dict[str, Any]:
    where = f"curves[{index}]"
    _complete(where, curve, ("t_ns", "before", "after"), "label")
    t = _integers(f"{where}['t_ns']", curve["t_ns"]) - origin
    if np.any(np.diff(t) < 0):
        raise ValueError(f"{where}['t_ns']: expected sorted times")
    colour = curve.get("colour", "headroom")
    if colour not in COLOURS:
        raise ValueError(f"{where}['colour']: unknown {colour!r}; expected one of {', '.join(COLOURS)}")
    columns = {"t": t, "before": curve["before"], "after": curve["after"]}
    packed = {name: pack.add(column, "<f8") for name, column in columns.items()}
    return {"label": _text(curve["label"]), "unit": _text(curve.get("unit", "ns")), "colour": colour} | packed


def _table(table: Mapping[str, Any], origin: int) -> dict[str, Any]:
    _complete("table", table, ("rows", "start_ns", "end_ns"))
    rows = [[v if isinstance(v, int) else _text(v) for v in row] for row in table["rows"]]
    start, end = ((_integers(f"table[{c!r}]", table[c]) - origin).tolist() for c in ("start_ns", "end_ns"))
    if len(rows) > MAX_TABLE_ROWS:
        raise ValueError(f"table: expected at most {MAX_TABLE_ROWS} rows, got {len(rows)}")
    if wrong := [r for r in rows if len(r) != len(table["columns"])]:
        raise ValueError(f"table: expected {len(table['columns'])} cells a row, got {len(wrong[0])}")
    columns = [_text(c) for c in table["columns"]]
    return {"title": _text(table["title"]), "columns": columns, "rows": rows, "start": start, "end": end}
