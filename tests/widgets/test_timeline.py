"""The Python side of the timelines: what is refused, what is packed, how overlapping events are split."""

from __future__ import annotations

import json
import re
import zlib
from typing import Any

import numpy as np
import pytest

from workbench.widgets import Timeline, timeline_view, trace_view
from workbench.widgets.timeline import MAX_DEPTH, SCRIPT

ORIGIN = 1_700_000_000_123_456_789


def events(**changes: Any) -> dict[str, Any]:
    columns: dict[str, Any] = {
        "lane": [0, 1, 1],
        "start_ns": [ORIGIN, ORIGIN + 5, ORIGIN + 20],
        "end_ns": [ORIGIN + 4, ORIGIN + 15, ORIGIN + 21],
        "kind": ["cpu_submit", "gpu_execute", "idle"],
        "name": ["launch", "gemm", "idle: submission"],
    }
    return columns | changes


def unpack(view: Timeline, name: str) -> np.ndarray:
    data = zlib.decompress(view.columns)
    entry = view.spec["columns"][name]
    return np.frombuffer(data, dtype=f"<{entry['type']}", count=entry["length"], offset=entry["offset"])


def program_view(**changes: Any) -> dict[str, Any]:
    steps = [{"kind": "submit", "label": "a", "cost": 1.0, "ops": [{"label": "a", "duration": 2.0}]}]
    program = {"schema": 1, "name": "p", "time_unit": "s", "steps": steps}
    control = {"id": "c", "label": "cost", "unit": "", "min": 0.0, "max": 2.0, "step": 0.1, "value": 1.0, "report": 1.0}
    control["sets"] = [{"timeline": "main", "path": ["steps", 0, "cost"]}]
    rows = [{"type": "lane", "lane": "cpu0", "label": "CPU"}]
    panel = {"id": "a", "timelines": [{"id": "main", "title": "", "program": program, "rows": rows}]}
    return {"title": "t", "panels": [panel | {"controls": [control], "readouts": []} | changes]}


def test_the_module_has_one_export_and_no_imports() -> None:
    assert re.findall(r"^export.*$", SCRIPT, flags=re.M) == ["export default { render };"]
    assert not re.findall(r"^import\b", SCRIPT, flags=re.M)
    assert "innerHTML" not in SCRIPT


def test_times_are_exact_nanoseconds_from_the_first_event() -> None:
    view = trace_view(lanes=["CPU", "GPU"], events=events(), cursor_ns=ORIGIN + 7, window_ns=(ORIGIN, ORIGIN + 10))
    assert view.origin_ns == ORIGIN
    assert unpack(view, "start").tolist() == [0, 5, 20]
    assert unpack(view, "end").tolist() == [4, 15, 21]
    assert (view.spec["cursor"], view.spec["window"], view.spec["extent"]) == (7, [0, 10], [0, 21])
    assert [view.spec["names"][i] for i in unpack(view, "name")] == ["launch", "gemm", "idle: submission"]
    assert [view.spec["kinds"][i] for i in unpack(view, "kind")] == ["cpu_submit", "gpu_execute", "idle"]


def test_indices_into_names_and_kinds_give_the_same_view() -> None:
    plain = trace_view(lanes=["CPU", "GPU"], events=events())
    coded = events(kind=np.array([2, 0, 1]), name=np.array([1, 0, 2]))
    view = trace_view(
        lanes=["CPU", "GPU"],
        events=coded,
        kinds=["gpu_execute", "idle", "cpu_submit"],
        names=["gemm", "launch", "idle: submission"],
    )
    for got in (plain, view):
        assert [got.spec["names"][i] for i in unpack(got, "name")] == ["launch", "gemm", "idle: submission"]
        assert [got.spec["kinds"][i] for i in unpack(got, "kind")] == ["cpu_submit", "gpu_execute", "idle"]


def test_nested_events_get_rows_without_overlap() -> None:
    rng = np.random.default_rng(0)
    start = rng.integers(0, 1000, 300) + ORIGIN
    columns = {"lane": np.zeros(300, int), "start_ns": start, "end_ns": start + rng.integers(0, 12, 300)}
    columns |= {"kind": ["gpu_execute"] * 300, "name": ["n"] * 300}
    view = trace_view(lanes=["GPU"], events=columns)
    begin, end = unpack(view, "start"), unpack(view, "end")
    assert len(view.spec["lanes"]) > 1
    for row in view.spec["lanes"]:
        part = slice(row["first"], row["first"] + row["count"])
        assert np.all(np.diff(begin[part]) >= 0)
        assert np.all(begin[part][1:] >= end[part][:-1])
    drawn = sum(row["count"] for row in view.spec["lanes"])
    said = int((re.search(r"(\d+) events nested deeper", view.spec["caption"]) or ["", "0"])[1])
    assert drawn + said == 300


def test_events_beyond_the_depth_are_counted() -> None:
    n = MAX_DEPTH + 3
    columns = {"lane": [0] * n, "start_ns": list(range(n)), "end_ns": [100] * n, "kind": ["host_work"] * n}
    view = trace_view(lanes=["CPU"], events=columns | {"name": ["n"] * n})
    assert len(view.spec["lanes"]) == MAX_DEPTH
    assert f"3 events nested deeper than {MAX_DEPTH} levels are not drawn." in view.spec["caption"]


def test_an_empty_recording_has_its_lanes() -> None:
    view = trace_view(lanes=["CPU"], events={c: [] for c in events()})
    assert [row["count"] for row in view.spec["lanes"]] == [0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"end_ns": [ORIGIN + 4, ORIGIN + 1, ORIGIN + 21]}, r"events\['end_ns'\]: expected end >= start.*row 1"),
        ({"lane": [0, 1, 2]}, r"events\['lane'\]: expected 0 to 1, got 0 to 2"),
        ({"start_ns": [0.5, 1.0, 2.0]}, r"events\['start_ns'\]: expected one dimension of integers, got float64"),
        ({"kind": ["cpu_submit", "gpu", "idle"]}, r"events\['kind'\]: unknown 'gpu'"),
        ({"name": ["a"]}, r"equal length, got .*'name': 1"),
    ],
)
def test_bad_columns_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trace_view(lanes=["CPU", "GPU"], events=events(**changes))


def test_missing_columns_and_bad_windows_are_named() -> None:
    with pytest.raises(ValueError, match="missing kind, name"):
        trace_view(lanes=["CPU"], events={"lane": [], "start_ns": [], "end_ns": []})
    with pytest.raises(ValueError, match="window_ns: expected"):
        trace_view(lanes=["CPU", "GPU"], events=events(), window_ns=(ORIGIN + 5, ORIGIN + 5))
    with pytest.raises(ValueError, match=r"curves\[0\]\['t_ns'\]: expected sorted"):
        curve = {"label": "h", "t_ns": [2, 1], "before": [0, 0], "after": [0, 0]}
        trace_view(lanes=["CPU", "GPU"], events=events(), curves=[curve])


def test_goto_is_relative_to_the_origin_and_repeats() -> None:
    view = trace_view(lanes=["CPU", "GPU"], events=events())
    view.goto(ORIGIN + 9, width=4)
    first = dict(view.goto_request)
    assert (first["time"], first["width"]) == (9, 4)
    view.goto(ORIGIN + 9, width=4)
    assert view.goto_request != first, "asking again for the same place must reach the reader who moved away"
    with pytest.raises(ValueError, match="width must be > 0"):
        view.goto(ORIGIN, width=0)
    with pytest.raises(ValueError, match="time must be finite"):
        view.goto(float("nan"))


def test_the_cursor_and_the_sliders_come_back() -> None:
    view = trace_view(lanes=["CPU", "GPU"], events=events())
    assert view.cursor_ns is None
    view.state = {"main": {"cursor": 7.0}}
    assert view.cursor_ns == ORIGIN + 7
    sliders = timeline_view(program_view())
    assert sliders.values() == {"c": 1.0}
    sliders.state = {"a": {"values": {"c": 1.5}}}
    assert sliders.values() == {"c": 1.5}
    with pytest.raises(ValueError, match="unknown panel 'z': the view has a"):
        sliders.values("z")


def test_numpy_values_become_plain_json() -> None:
    spec = program_view()
    spec["panels"][0]["controls"][0]["value"] = np.float64(1.0)
    spec["panels"][0]["cursor"] = np.int64(1)
    json.dumps(timeline_view(spec).spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "at least one panel"),
        (program_view(id=""), "needs an id"),
        (program_view(timelines=[]), "panel 'a': expected at least one timeline"),
        (program_view(readouts=[{"type": "cpu", "label": "x", "timeline": "z"}]), "readout 'x': no timeline 'z'"),
        (program_view() | {"layout": "grid"}, "layout must be"),
    ],
)
def test_bad_specs_are_named(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        timeline_view(spec)


def test_a_slider_that_sets_nothing_is_refused() -> None:
    spec = program_view()
    spec["panels"][0]["controls"][0]["sets"][0]["path"] = ["steps", 7, "cost"]
    with pytest.raises(ValueError, match=r"control 'c': the program has no steps\.7\.cost"):
        timeline_view(spec)
    spec["panels"][0]["controls"][0] |= {"value": 3.0}
    with pytest.raises(ValueError, match="control 'c': value must lie in"):
        timeline_view(spec)
