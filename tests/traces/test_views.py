"""Figures, the interactive view's columns, the panel: hostile names are text, windows aggregate, callbacks answer."""

from __future__ import annotations

import json

import ipywidgets
import numpy as np
import pytest
from kineto_files import event, kernel, launch, write
from test_analysis import stacked

import workbench
from workbench.traces import TraceError, read
from workbench.traces.idle import Analysis
from workbench.views.trace import MAX_BOXES, longest_idle, opened, trace_figure, trace_tables, view_arguments
from workbench.widgets.file_drop import MAX_BYTES, FileDrop
from workbench.widgets.trace_panel import TOLD, TracePanel

K = 1_000
HOSTILE = "<img src=x onerror=alert(1)>"


def test_names_are_text_in_figures_and_views(tmp_path):
    trace = read(write(tmp_path, [launch(0, K, 1), kernel(2 * K, 3 * K, 1, name=HOSTILE)]))
    figure = json.dumps(trace_figure(trace_tables(Analysis(trace), None, "")).to_plotly_json(), default=str)
    assert HOSTILE not in figure and "&lt;img" in figure
    assert HOSTILE in view_arguments(Analysis(trace))["events"]["name"]  # the widget draws names with fillText only


def test_a_long_window_stays_a_few_thousand_boxes_and_idle_is_never_overstated(tmp_path):
    events = [
        e
        for i in range(4_000)
        for e in (launch(i * 20 * K, i * 20 * K + K, i + 1), kernel(i * 20 * K + 2 * K, i * 20 * K + 12 * K, i + 1))
    ]
    events += [launch(200_000 * K, 200_001 * K, 9_999), kernel(200_002 * K, 200_003 * K, 9_999)]
    analysis = Analysis(read(write(tmp_path, events)))
    tables = trace_tables(analysis, None, "t")
    boxes, idle = tables["boxes"], next(r["value"] for r in tables["sums"] if r["quantity"] == "idle")
    drawn = sum(r["end_us"] - r["start_us"] for r in boxes if r["kind"] == "idle")
    assert len(boxes) < 4 * MAX_BOXES and 0 < drawn <= idle
    assert idle == pytest.approx(3_999 * 10 + 120_010)


def test_the_interactive_view_is_binned_not_emptied(tmp_path):
    events = [
        e
        for i in range(2_000)
        for e in (launch(i * 20 * K, i * 20 * K + K, i + 1), kernel(i * 20 * K + 2 * K, i * 20 * K + 12 * K, i + 1))
    ]
    analysis = Analysis(read(write(tmp_path, events)))
    whole = view_arguments(analysis)["events"]
    few = view_arguments(analysis, most=600)["events"]
    assert len(whole["lane"]) == 3 * 2_000 - 2 and 300 < len(few["lane"]) <= 610
    idle = np.array(few["kind"]) == "idle"
    assert set((few["end_ns"] - few["start_ns"])[idle].tolist()) == {10 * K}


def test_experiment_reads_a_file_and_its_badge_names_it(tmp_path):
    path = write(tmp_path, stacked(), "mine.json", deviceProperties=[{"name": "Some GPU"}])
    result = workbench.load("your_trace").run(trace=str(path))
    assert result.badge == "your trace: mine.json (Some GPU)"
    verdict = next(c for c in result.checks if c.claim.startswith("Verdict"))
    assert verdict.value == "not sync-free" and not any(c.fails for c in result.checks)
    assert longest_idle(workbench.load("tool_first_look").run(trace=str(path)))["cause"].to_list()[0] == "sync"
    with pytest.raises(TraceError, match=r"absent\.json"):
        workbench.load("your_trace").run(trace=str(tmp_path / "absent.json"))
    with pytest.raises(ValueError, match="host_scale"):
        workbench.load("your_trace").run(trace=str(path), host_scale=-1.0)


@pytest.mark.parametrize("size", ["short", "long"])
def test_recorded_pair_holds_its_claims(size):
    result = workbench.load("tool_first_look").run(source="recorded", size=size)
    assert [c.claim for c in result.checks if c.fails] == [] and len(result.checks) == 9


def test_panel_answers_and_says_what_is_wrong(tmp_path):
    panel = TracePanel()
    panel.open(write(tmp_path, stacked()))
    assert "not sync-free" in panel.message.value and "predicted" in panel.text.value
    styles = [c.value for c in panel.box.children if isinstance(c, ipywidgets.HTML)]
    assert all(f.disabled and TOLD in f._dom_classes for f in (panel.message, panel.text))
    assert len(styles) == 1 and f".{TOLD} :disabled {{ opacity: 1 !important" in styles[0], "the answer is not faint"
    before = panel.answer["predicted_us"]
    assert "\nnothing is changed: remove waits" in panel.text.value
    panel.waits.value = "model.py:57 (route)"
    assert "times as fast, -" in panel.text.value and "nothing is changed" not in panel.text.value
    assert panel.answer["removed_waits"] == 1 and panel.answer["predicted_us"] < before
    panel.waits.value, panel.host.value = "none", 0.5
    assert panel.answer["removed_waits"] == 0 and "scaled by 0.5" in panel.text.value
    panel.path.value = str(tmp_path / "absent.json")
    assert "no such trace file" in panel.message.value
    panel.save_as.value = str(tmp_path / "out.json")
    panel._save()
    assert json.loads((tmp_path / "out.json").read_text())["verdict"]["exit_code"] == 1
    panel.save_as.value = str(tmp_path / "absent" / "out.json")
    panel._save()
    assert "not saved" in panel.message.value


@pytest.mark.parametrize("events", [[event("cpu_op", "aten::mm", 0, 5 * K)], []])
def test_a_trace_without_device_work_is_shown_and_said(tmp_path, events):
    path = write(tmp_path, events, "host.json")
    panel = TracePanel()
    panel.open(path)
    assert panel.message.value == "host.json: cannot tell" and "no device operations in this trace" in panel.text.value
    result = workbench.load("your_trace").run(trace=str(path))
    result.figure()
    assert view_arguments(*opened(result))["lanes"] == ["no device work"]
    assert [c.value for c in result.checks] == ["no device operations", "cannot tell"]


def test_panel_takes_a_dropped_file(tmp_path):
    panel = TracePanel()
    content = write(tmp_path, stacked()).read_bytes()
    panel.drop.take({"at": 0, "size": len(content), "name": f"{HOSTILE}.json"}, [memoryview(content)])
    assert panel.message.value.startswith(f"{HOSTILE}.json: not sync-free")
    panel.drop.take({"at": 0, "size": 5, "name": "notes.txt"}, [memoryview(b"hello")])
    assert panel.message.value == "notes.txt: neither trace JSON with traceEvents nor a list of events"


def test_a_dropped_file_comes_in_pieces_and_is_gone_afterwards():
    seen = []
    drop = FileDrop(lambda path, name: seen.append((path, name, path.read_bytes())))
    for at, piece in ((0, b"abc"), (3, b"defg"), (7, b"h")):
        assert seen == []
        drop.take({"at": at, "size": 8, "name": "../../x.json.gz"}, [piece])
    ((path, name, content),) = seen
    assert content == b"abcdefgh" and name == "../../x.json.gz" and path.name == "dropped.gz" and not path.exists()
    drop.take({"at": 0, "size": 0, "name": "empty"}, [b""])
    assert seen[1][1:] == ("empty", b"")


def test_pieces_that_do_not_fit_are_refused_and_the_next_file_is_taken(monkeypatch):
    seen, told = [], []
    drop = FileDrop(lambda path, name: seen.append(name))
    monkeypatch.setattr(drop, "send", told.append)
    drop._received(drop, {"at": 3, "size": 8, "name": "late"}, [b"abc"])
    drop._received(drop, {"at": 0, "size": 2, "name": "long"}, [b"abc"])
    drop._received(drop, {"at": 0, "size": MAX_BYTES + 1, "name": "huge"}, [b"abc"])
    drop._received(drop, {"at": 0, "size": 3, "name": "good"}, [b"abc"])
    assert [bool(t["error"]) for t in told] == [True, True, True, False] and seen == ["good"]
    assert "do not follow" in told[0]["error"] and "expected at most" in told[2]["error"]


def test_two_files_dropped_at_once_are_never_mixed(monkeypatch):
    seen, told = [], []
    drop = FileDrop(lambda path, name: seen.append((name, path.read_bytes())))
    monkeypatch.setattr(drop, "send", told.append)
    for at, name, piece in ((0, "a", b"abc"), (0, "b", b"xyz"), (3, "a", b"def"), (3, "b", b"uvw")):
        drop._received(drop, {"at": at, "size": 6, "name": name}, [piece])
    assert seen == [] and "two files at once" in told[2]["error"] and "do not follow" in told[3]["error"]


def test_a_failing_reader_still_answers_the_page(monkeypatch):
    told = []

    def reader(path, name):
        raise RecursionError("too deep")

    drop = FileDrop(reader)
    monkeypatch.setattr(drop, "send", told.append)
    with pytest.raises(RecursionError):
        drop._received(drop, {"at": 0, "size": 1, "name": "a"}, [b"a"])
    assert told == [{"error": "too deep"}]
