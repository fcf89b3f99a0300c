"""A reader's way through JupyterLab: open a notebook, run all, move the slider, scrub; and how much a redraw paints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from programs import COUNT, CURSOR_PAINTED, MOST_PAINTED, view

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "notebooks" / "s08_sync_free" / "fig29_running_dry.ipynb"
KEYS = 20


def run_all(lab: Any, open_page: Any, name: str, cells: int) -> Any:
    """Open a notebook, wait for a kernel that is really there, run every cell."""
    watched = open_page(lab.address(name))
    page = watched.page
    # The indicator in the toolbar says idle before there is a kernel; Run All then silently does nothing.
    page.wait_for_function(
        """() => {
          const panel = window.jupyterapp?.shell?.currentWidget;
          return panel?.sessionContext?.session?.kernel && panel.sessionContext.kernelDisplayStatus === "idle";
        }""",
        timeout=60_000,
    )
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")
    page.wait_for_function(
        """(cells) => {
          const model = window.jupyterapp.shell.currentWidget.content.model;
          const code = Array.from(model.cells).filter((c) => c.type === "code");
          return code.length === cells && code.every((c) => c.executionCount !== null);
        }""",
        arg=cells,
        timeout=120_000,
    )
    return watched


def execute(page: Any, code: str) -> str:
    """Run code in the open notebook's kernel; returns ``ok`` or the error."""
    run = """async (code) => {
      const { kernel } = window.jupyterapp.shell.currentWidget.sessionContext.session;
      const { content } = await kernel.requestExecute({ code }).done;
      return content.status === "ok" ? "ok" : `${content.ename}: ${content.evalue}`;
    }"""
    return page.evaluate(run, code)


def picture(stage: Any) -> list[str]:
    return stage.evaluate("s => Array.from(s.querySelectorAll('canvas'), (c) => c.toDataURL())")


def painted(page: Any, target: Any, stage: Any) -> list[int]:
    """Press a key `KEYS` times with the focus on `target`; returns how many things each frame painted."""
    before = picture(stage)
    page.evaluate("() => { window.painted.length = 0; }")
    target.focus()
    for _ in range(KEYS):
        page.keyboard.press("ArrowRight")
        page.wait_for_timeout(30)
    page.wait_for_timeout(100)
    assert picture(stage) != before, "the picture did not change"
    return page.evaluate("() => window.painted")


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [50, 5000])
def test_a_key_paints_a_frame_whose_work_does_not_grow_with_the_program(lab: Any, open_page: Any, blocks: int) -> None:
    cells = nbformat.v4
    spec = json.dumps(view(blocks))
    code = f"import json\nfrom workbench.widgets import timeline_view\nview = timeline_view(json.loads({spec!r}))\nview"
    notebook = cells.new_notebook(cells=[cells.new_code_cell(code)])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, lab.folder / f"boxes_{blocks}.ipynb")
    watched = run_all(lab, open_page, f"boxes_{blocks}.ipynb", cells=1)
    page = watched.page
    stage = page.locator(".hw-stage")
    stage.wait_for()
    slider = page.locator(".hw-track input")
    stage.evaluate(COUNT)
    for target, most in ((slider, MOST_PAINTED), (stage, CURSOR_PAINTED)):
        frames = painted(page, target, stage)
        assert 0 < len(frames) <= KEYS and max(frames) <= most, frames
    page.wait_for_timeout(800)  # the state reaches the kernel after the reader rests
    assert execute(page, f"assert view.values() == {{'submit': {slider.input_value()}}}, view.state") == "ok"
    assert execute(page, "view.goto(3.25)") == "ok"
    page.wait_for_function("() => document.querySelector('.hw-stage').getAttribute('aria-valuenow') === '3.25'")
    assert watched.errors == []
    assert watched.failed == []
    lab.stop_kernels()


@pytest.mark.slow
def test_the_notebook_of_figure_29(lab: Any, open_page: Any) -> None:
    if not NOTEBOOK.exists():
        pytest.skip(f"{NOTEBOOK.name} is not in this checkout")
    shutil.copy(NOTEBOOK, lab.folder / NOTEBOOK.name)
    cells = sum(c.cell_type == "code" for c in nbformat.read(NOTEBOOK, as_version=4).cells)
    watched = run_all(lab, open_page, NOTEBOOK.name, cells)
    page = watched.page
    stage = page.locator(".hw-stage").first
    stage.wait_for()
    stage.scroll_into_view_if_needed()
    before = picture(stage)
    slider = page.locator(".hw-track input").first
    value = slider.input_value()
    slider.focus()
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    page.wait_for_timeout(200)
    assert slider.input_value() != value
    assert picture(stage) != before
    spoken = stage.get_attribute("aria-valuetext")
    stage.focus()
    page.keyboard.press("End")
    page.wait_for_timeout(200)
    assert stage.get_attribute("aria-valuetext") != spoken
    page.wait_for_timeout(800)  # the state reaches the kernel after the reader rests
    assert watched.errors == []
    assert watched.failed == []
    lab.stop_kernels()
