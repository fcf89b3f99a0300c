"""How long a timeline takes from a key or a wheel's turn to the frame that shows it, in an exported page in Chromium.

python benchmarks/redraw.py --moves 60
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
from playwright.sync_api import sync_playwright

from workbench.suite.export import to_html
from workbench.widgets import timeline_view, trace_view

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "browser"))
from programs import view

INTERVAL_MS = 30
"""A held key repeats about this fast."""
# From the event's own time stamp to the task after the frame that shows the new picture.
WATCH = """
(stage) => {
  window.latencies = [];
  let moved = null;
  for (const type of ["keydown", "wheel"])
    window.addEventListener(type, (event) => { if (event.key !== "Shift") moved ??= event.timeStamp; }, true);
  const channel = new MessageChannel();
  let shown = null;
  channel.port1.onmessage = () => window.latencies.push(performance.now() - shown);
  new MutationObserver(() => {
    if (moved === null) return;
    shown = moved;
    moved = null;
    channel.port2.postMessage(0);
  }).observe(stage, { attributes: true, attributeFilter: ["data-frame"] });
}
"""


def million() -> Any:
    """A view of a million events on two lanes."""
    n = 500_000
    times = np.concatenate([np.arange(n) * 2_000, np.arange(n) * 2_000 + 700])
    events = {"lane": np.repeat([0, 1], n), "start_ns": times, "end_ns": times + np.repeat([400, 1_200], n),
              "kind": np.repeat([0, 1], n), "name": np.arange(2 * n) % 50}  # fmt: skip
    names = [f"kernel {i}" for i in range(50)]
    return trace_view(lanes=["CPU", "GPU"], events=events, names=names, kinds=["cpu_submit", "gpu_execute"])


def exported(widget: Any, folder: Path) -> str:
    """Return the address of a page with one widget."""
    bundle = {"application/vnd.jupyter.widget-view+json": {"model_id": widget.model_id}}
    output = nbformat.v4.new_output("display_data", bundle)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("view", outputs=[output])])
    state = {"state": {widget.model_id: widget._get_embed_state()}}
    notebook.metadata.widgets = {"application/vnd.jupyter.widget-state+json": state}
    nbformat.write(notebook, folder / "view.ipynb")
    return to_html(folder / "view.ipynb", folder / "view.html").as_uri()


def measured(page: Any, moves: int, move: Callable[[int], None]) -> str:
    """Move the picture so many times; returns the median and the 95th percentile in ms."""
    page.evaluate("() => { window.latencies.length = 0; }")
    for i in range(moves):
        move(i)
        page.wait_for_timeout(INTERVAL_MS)
    page.wait_for_timeout(100)
    samples = page.evaluate("() => window.latencies")
    middle, high = np.percentile(samples, [50, 95])
    return f"p50 {middle:5.1f} ms, p95 {high:5.1f} ms ({len(samples)} frames)"


def watch(page: Any, moves: int) -> dict[str, str]:
    """Return what `measured` says of each way to change the picture of an open page."""
    stage = page.locator(".hw-stage[data-frame]")
    stage.wait_for(timeout=120_000)
    stage.evaluate(WATCH)
    stage.hover()
    press, half, told = page.keyboard.press, moves // 2, {}
    for slider in page.locator(".hw-track input").all():
        slider.focus()
        told["slider"] = measured(page, moves, lambda _: press("ArrowRight"))
    stage.focus()
    told["cursor"] = measured(page, moves, lambda _: press("ArrowRight"))
    told["zoom"] = measured(page, moves, lambda i: press("+" if i < half else "-"))
    for _ in range(3):
        press("+")
    page.keyboard.down("Shift")
    told["pan"] = measured(page, moves, lambda i: page.mouse.wheel(0, 120 if i < half else -120))
    page.keyboard.up("Shift")
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=60)
    moves = parser.parse_args().moves
    views = {
        "100 boxes": timeline_view(view(50)),
        "10,000 boxes": timeline_view(view(5000)),
        "1,000,000 events": million(),
    }
    with tempfile.TemporaryDirectory() as made, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, widget in views.items():
            page = browser.new_page()
            page.goto(exported(widget, Path(made)))
            for what, times in watch(page, moves).items():
                print(f"{name:>16} {what:>6}: {times}", flush=True)
            page.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
