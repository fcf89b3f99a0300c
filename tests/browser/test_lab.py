"""A reader's way through JupyterLab: open a notebook, run all, move the slider, scrub; and how long a redraw takes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from programs import view

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "notebooks" / "s08_sync_free" / "fig29_running_dry.ipynb"
LIMIT_MS = 50.0
KEYS = 60
ROUNDS = 3
KEY_INTERVAL_MS = 30  # a held key repeats about this fast

# From the key's own time stamp to the task after the frame that shows the new picture.
WATCH = """
(stage) => {
  const samples = (window.latencies = []);
  let pressed = null;
  window.addEventListener("keydown", (event) => (pressed ??= event.timeStamp), true);
  const channel = new MessageChannel();
  let shown = null;
  channel.port1.onmessage = () => samples.push(performance.now() - shown);
  new MutationObserver(() => {
    if (pressed === null) return;
    shown = pressed;
    pressed = null;
    channel.port2.postMessage(0);
  }).observe(stage, { attributes: true, attributeFilter: ["data-frame"] });
}
"""


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


def quantile(samples: list[float], share: float) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def picture(stage: Any) -> list[str]:
    return stage.evaluate("s => Array.from(s.querySelectorAll('canvas'), (c) => c.toDataURL())")


def measure(page: Any, target: Any, stage: Any) -> tuple[float, float]:
    """Press a key `KEYS` times with the focus on `target`; returns p50 and p95 in ms of the best round.

    The best of three rounds: other work on the machine is not the widget's, a slow redraw would be slow in each.
    """
    stage.evaluate(WATCH)
    rounds = []
    for _ in range(ROUNDS):
        before = picture(stage)
        page.evaluate("() => { window.latencies.length = 0; }")
        target.focus()
        for _ in range(KEYS):
            page.keyboard.press("ArrowRight")
            page.wait_for_timeout(KEY_INTERVAL_MS)
        page.wait_for_timeout(100)
        samples = page.evaluate("() => window.latencies.slice()")
        assert picture(stage) != before, "the picture did not change"
        assert len(samples) >= KEYS * 0.9, f"only {len(samples)} of {KEYS} keys drew a frame"
        rounds.append((quantile(samples, 0.5), quantile(samples, 0.95)))
        if rounds[-1][1] < LIMIT_MS:
            break
        for _ in range(KEYS):
            page.keyboard.press("ArrowLeft")
    return min(rounds, key=lambda r: r[1])


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [50, 5000])
def test_a_key_redraws_within_50_ms(lab: Any, open_page: Any, blocks: int) -> None:
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
    for name, target in (("slider", slider), ("scrub", stage)):
        p50, p95 = measure(page, target, stage)
        print(f"\n{2 * blocks} boxes, {name}: keydown to frame p50 {p50:.1f} ms, p95 {p95:.1f} ms")
        assert p95 < LIMIT_MS, f"{name} at {2 * blocks} boxes: p95 {p95:.1f} ms, expected below {LIMIT_MS} ms"
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
