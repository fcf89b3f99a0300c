"""One's own trace in JupyterLab: a file above the server's message limit is dropped, a million events are shown."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from programs import COUNT, MOST_PAINTED
from test_lab import run_all

sys.path.insert(0, str(Path(__file__).parents[1] / "traces"))
from kineto_files import text
from test_analysis import stacked

MOVES = 20
PADDING = 11 << 20
HOSTILE = "<img src=x onerror='window.pwned=1'>.json"

PANEL = "from workbench.widgets.trace_panel import trace_panel\npanel = trace_panel()\npanel"
MILLION = """
import numpy as np
from workbench.widgets import trace_view
n = 500_000
start = np.arange(n) * 2_000 + 1_700_000_000_000_000_123
lane, kind = np.repeat([0, 1], n), np.repeat([0, 1], n)
times = np.concatenate([start, start + 700])
ends = times + np.repeat([400, 1_200], n)
events = dict(lane=lane, start_ns=times, end_ns=ends, kind=kind, name=np.arange(2 * n) % 50)
view = trace_view(lanes=["CPU", "GPU"], events=events, names=[f"kernel {i}" for i in range(50)],
                  kinds=["cpu_submit", "gpu_execute"])
view
"""

DROP = """
(zone, [name, body, padding]) => {
  const transfer = new DataTransfer();
  const at = body.indexOf("[") + 1;
  transfer.items.add(new File([body.slice(0, at), " ".repeat(padding), body.slice(at)], name));
  zone.dispatchEvent(new DragEvent("drop", { bubbles: true, cancelable: true, dataTransfer: transfer }));
}
"""


def open_cell(lab: Any, open_page: Any, name: str, code: str) -> Any:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, lab.folder / name)
    return run_all(lab, open_page, name, cells=1)


@pytest.mark.slow
def test_a_large_file_is_dropped_and_shown(lab: Any, open_page: Any) -> None:
    watched = open_cell(lab, open_page, "drop.ipynb", PANEL)
    page = watched.page
    zone = page.locator(".hw-drop")
    zone.wait_for()
    zone.evaluate(DROP, [HOSTILE, text(stacked()), PADDING])
    zone.get_by_text("is read").wait_for(timeout=60_000)
    page.locator(".hw-stage[data-frame]").wait_for(timeout=60_000)
    state = page.get_by_label("state").input_value()
    assert state == f"{HOSTILE}: not sync-free"
    zone.evaluate(DROP, ["none.json", "no trace [ at all", 0])
    zone.get_by_text("none.json is read").wait_for(timeout=60_000)
    assert "neither trace JSON" in page.get_by_label("state").input_value()
    assert page.evaluate("() => window.pwned") is None
    assert (watched.errors, watched.failed) == ([], [])
    lab.stop_kernels()


@pytest.mark.slow
def test_a_million_events_are_zoomed_and_moved_with_bounded_work(lab: Any, open_page: Any) -> None:
    watched = open_cell(lab, open_page, "million.ipynb", MILLION)
    page = watched.page
    stage = page.locator(".hw-stage[data-frame]")
    stage.wait_for(timeout=60_000)
    stage.scroll_into_view_if_needed()
    stage.evaluate(COUNT)
    box = stage.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    stage.focus()
    for key in "+-":
        for _ in range(MOVES):
            page.keyboard.press(key)
            page.wait_for_timeout(30)
    for _ in range(3):
        page.keyboard.press("+")
    page.keyboard.down("Shift")
    for i in range(MOVES):
        page.mouse.wheel(0, 120 if i < MOVES // 2 else -120)
        page.wait_for_timeout(30)
    page.keyboard.up("Shift")
    page.wait_for_timeout(100)
    frames = page.evaluate("() => window.painted")
    assert MOVES < len(frames) <= 3 * MOVES + 3 and max(frames) <= MOST_PAINTED, frames
    assert (watched.errors, watched.failed) == ([], [])
    lab.stop_kernels()


SHOW = """
import sys
sys.path.insert(0, {folder!r})
from pathlib import Path
from kineto_files import write
from test_analysis import stacked
from IPython.display import display
from workbench import magic
from workbench.traces import read
from workbench.traces.idle import Analysis
from workbench.traces.verify import verify_trace
analysis = Analysis(read(write(Path("."), stacked())))
magic.show(analysis, verify_trace(analysis), None, display)
"""
OUTPUTS = """
() => Array.from(document.querySelectorAll(".jp-OutputArea-child")).map((node) => [
  node.getBoundingClientRect().height > 0,
  node.querySelector(".hw-stage") ? "view" : node.querySelector(".jp-RenderedPlotly") ? "still" : "text",
])
"""


def test_one_timeline_is_shown_and_a_still_where_its_view_is_gone(lab: Any, open_page: Any) -> None:
    code = SHOW.format(folder=str(Path(__file__).parents[1] / "traces"))
    watched = open_cell(lab, open_page, "magic.ipynb", code)
    page = watched.page
    page.locator(".hw-stage[data-frame]").wait_for(timeout=60_000)
    page.locator(".jp-RenderedPlotly").wait_for(state="attached")
    page.wait_for_timeout(300)
    assert page.evaluate(OUTPUTS) == [[True, "text"], [False, "still"], [True, "view"]]
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    page.wait_for_function("() => !window.jupyterapp.shell.currentWidget.context.model.dirty")
    assert (watched.errors, watched.failed) == ([], [])
    lab.stop_kernels()
    again = open_page(lab.address("magic.ipynb")).page
    again.locator(".jp-RenderedPlotly").wait_for(timeout=60_000)
    assert [shown for shown, kind in again.evaluate(OUTPUTS) if kind == "still"] == [True]
    saved = nbformat.read(lab.folder / "magic.ipynb", as_version=4)
    from nbconvert import HTMLExporter

    pages, _ = HTMLExporter().from_notebook_node(saved)
    assert pages.count('aria-label="Timeline and headroom"') == 1, (
        "nbconvert shows the still: it has neither plotly nor the view's state"
    )
