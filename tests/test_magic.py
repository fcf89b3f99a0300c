"""`%%headroom`: registration, options, the message without a GPU, and escaped names."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import pytest
from IPython.core.interactiveshell import InteractiveShell

from workbench import magic
from workbench.traces.lookup import NO_STACKS
from workbench.traces.verify import Verdict


@pytest.fixture
def shell():
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "workbench")
    return shell


@pytest.fixture
def shown(monkeypatch):
    import IPython.display

    out: list = []
    monkeypatch.setattr(IPython.display, "display", lambda *a, **k: out.append(a[0]))
    return out


def test_extension_registers_the_cell_magic(shell):
    assert "headroom" in shell.magics_manager.magics["cell"]


def test_without_a_gpu_the_message_is_clear_and_the_cell_does_not_run(shell, shown, monkeypatch):
    monkeypatch.setattr("workbench.core.experiment.gpu_present", lambda: False)
    shell.user_ns["ran"] = False
    shell.run_cell_magic("headroom", "", "ran = True\n")
    assert "needs a CUDA GPU" in shown[0]["text/plain"] and shell.user_ns["ran"] is False


@pytest.mark.parametrize(
    ("line", "part"), [("-n 0", "steps >= 1"), ("--nope", "unrecognized"), ("-n x", "invalid int"), ("-w -1", "warmup")]
)
def test_bad_options_say_what_is_allowed(shell, shown, line, part):
    shell.run_cell_magic("headroom", line, "x = 1\n")
    assert part in shown[0]["text/plain"] and "usage: %%headroom" in shown[0]["text/plain"]


def test_the_cell_runs_in_the_notebooks_namespace_with_its_own_magics(shell):
    run = magic._compiled("value = 41\nvalue += 1\n!true\n", shell)
    run()
    assert shell.user_ns["value"] == 42


def test_the_verdict_of_a_cell_says_how_often_it_ran_and_how_to_get_source_lines(shell):
    verdict = Verdict(False, [], [], [], 20.0, None, [NO_STACKS, "other"])
    told = magic._told(verdict, magic._options("-n 4 -w 1")).notes
    assert told[0].startswith("the cell ran 6 times; judged are the last 4") and told[2:] == ["other"]
    assert "%%headroom --stacks" in told[1] and "torch.profiler" not in told[1]
    assert magic._told(verdict, magic._options("--stacks")).notes[1:] == [NO_STACKS, "other"]
    usage = shell.find_cell_magic("headroom").__doc__
    assert magic.USAGE in usage and "Runs the cell" in usage


@pytest.mark.parametrize(("steps", "warmup"), [(3, 2), (4, 1), (1, 0)])
def test_a_capture_calls_as_often_as_the_verdict_says(monkeypatch, steps, warmup):
    from workbench.measure import capture

    monkeypatch.setattr(capture, "require_gpu", lambda _: None)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr(capture, "Profile", lambda path, stacks: contextlib.nullcontext(SimpleNamespace(path=path)))
    made = []
    capture.capture(lambda: made.append(1), "x.json", steps=steps, warmup=warmup)
    assert len(made) == capture.calls(steps, warmup)


def test_names_are_shown_as_text():
    hostile = "<img src=x onerror=alert(1)>"
    offence = {
        "kind": "blocking_d2h",
        "call": hostile,
        "line": hostile,
        "op": hostile,
        "range": hostile,
        "count": 1,
        "total_ns": 5,
        "max_ns": 5,
        "gpu_idle_ns": 0,
    }
    text = magic.verdict_html(Verdict(False, [hostile], [offence], [], 20.0, None, [hostile]))
    assert "<img" not in text and text.count("&lt;img") == 5


def test_show_displays_verdict_and_one_timeline_with_a_still_that_stands_in(shown, tmp_path):
    import sys

    sys.path.insert(0, "tests/traces")
    from kineto_files import kernel, launch, write

    from workbench.traces import read
    from workbench.traces.idle import Analysis
    from workbench.traces.verify import verify_trace

    analysis = Analysis(read(write(tmp_path, [launch(0, 5000, 1), kernel(8000, 9000, 1, name="<b>k</b>")])))
    metadata: list[dict] = []

    def display(what, raw=False, metadata_of=metadata, metadata=None):
        shown.append(what)
        metadata_of.append(metadata or {})

    magic.show(analysis, verify_trace(analysis), None, display)
    assert "synchronization-free" in shown[0]["text/plain"] and len(shown) == 3
    still, view = shown[1:]
    figure = json.dumps(still["application/vnd.plotly.v1+json"])
    assert "<b>k</b>" not in figure and "&lt;b&gt;k" in figure
    assert still["text/html"].startswith("<svg") and view.spec["hides_previous"] is True
    assert metadata[1] == {magic.STANDS_IN: True} and magic.STANDS_IN not in metadata[0]
