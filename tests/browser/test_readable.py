"""Text can be read in both themes: of an exported page, and of JupyterLab with everything that we show in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from test_trace import open_cell

from workbench.core import colours
from workbench.core.experiment import Check, Experiment
from workbench.core.params import Params
from workbench.suite.export import to_html
from workbench.views import plotting
from workbench.views.contrast import LEAST, ratio

# [text, its colour, the ground it stands on] of every text in view, both as laid over what lies beneath; the labels
# inside plotly's bars are left to the tests of their colours.
TEXTS = """
(root) => {
  const pen = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data];
  };
  const over = (front, back, opacity = 1) =>
    [0, 1, 2].map((i) => back[i] + ((front[i] - back[i]) * front[3] * opacity) / 255).concat(255);
  const groundOf = (node) => {
    const layers = [];
    for (let at = node; at; at = at.parentElement) layers.unshift(rgba(getComputedStyle(at).backgroundColor));
    return layers.reduce((back, front) => over(front, back), [255, 255, 255, 255]);
  };
  const hex = (colour) => `#${colour.slice(0, 3).map((v) => Math.round(v).toString(16).padStart(2, "0")).join("")}`;
  const found = [];
  const look = (text, node, style) => {
    const svg = node.closest("svg");
    const ground = groundOf(svg?.closest(".js-plotly-plot")?.querySelector(".main-svg") ?? node);
    let opacity = 1;
    for (let at = node; at; at = at.parentElement) opacity *= Number(getComputedStyle(at).opacity);
    const shown = node.checkVisibility({ visibilityProperty: true }) && node.getBoundingClientRect().width > 2;
    const words = text.replaceAll("\\u200b", "").trim();
    const ink = rgba(svg ? style.fill : style.color);
    if (words && shown) found.push([words, hex(over(ink, ground, opacity)), hex(ground)]);
  };
  for (const place of document.querySelectorAll(root)) {
    const nodes = document.createTreeWalker(place, NodeFilter.SHOW_TEXT);
    while (nodes.nextNode()) {
      const node = nodes.currentNode.parentElement;
      if (node.closest("style, script, .bartext, .modebar")) continue;
      look(nodes.currentNode.data, node, getComputedStyle(node));
    }
    for (const field of place.querySelectorAll("input:not([type=range]), select, textarea")) {
      look(field.value, field, getComputedStyle(field));
      look(field.placeholder ?? "", field, getComputedStyle(field, "::placeholder"));
    }
  }
  return found;
}
"""
# Colours of the solid pixels left of the lanes in a timeline's picture: its labels.
LABELS = """
(canvases) => canvases.map((canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, 80 * devicePixelRatio, canvas.height);
  const found = new Set();
  for (let i = 0; i < data.length; i += 4)
    if (data[i + 3] === 255) found.add(new Uint8Array(data.slice(i, i + 3)).toHex());
  return Array.from(found, (hex) => `#${hex}`);
})
"""
EVERYTHING = """
import sys
sys.path.insert(0, {folder!r})
from pathlib import Path
from IPython.display import display
from kineto_files import write
from test_analysis import stacked
import workbench
from workbench import magic
from workbench.traces import read
from workbench.traces.idle import Analysis
from workbench.traces.verify import verify_trace
from workbench.widgets import explore, timeline_view
from workbench.widgets.trace_panel import TracePanel
experiment = workbench.load("fig29_running_dry")
result = experiment.run()
display(result.figure(), timeline_view(experiment.interactive(result.params)), explore(result))
result.report()
path = write(Path("."), stacked())
panel = TracePanel()
display(panel.box)
panel.open(path)
analysis = Analysis(read(path))
magic.show(analysis, verify_trace(analysis), None, display)
broken = {{"id": "main", "title": "", "rows": [], "program": {{"steps": [{{}}]}}}}
timeline_view({{"panels": [{{"id": "a", "timelines": [broken]}}]}})
"""
PARTS = ("CPU submits", "✓ holds", "not sync-free", "submit cost", "drop a trace here", "GPU idle", "path of a .json")


def one_of_each_source(path: Path) -> Path:
    standings = [Check("a", True, "1 of 1"), Check("b", False), Check("c", False, known="why"), Check("d", None)]
    cells = []
    for source in colours.SOURCE_COLOURS:
        fig = plotting.figure("A title")
        fig.add_scatter(x=[0, 1], y=[0, 1], name="a curve", showlegend=True)
        fig.add_annotation(text="a remark", x=0, y=0, font={"color": colours.INK})
        fig.update_layout(
            title_subtitle={"text": f"badge of {source}", "font": {"color": colours.SOURCE_COLOURS[source]}}
        )
        shown = nbformat.v4.new_output("display_data", {"application/vnd.plotly.v1+json": fig.to_plotly_json()})
        cells.append(nbformat.v4.new_code_cell("x", outputs=[shown], execution_count=1))
    experiment = Experiment(
        slug="s", group="tools", title="t", claim="c", kind="model", anchor="a", params=Params,
        figure=lambda r: None, checks=lambda r: standings, model=lambda p: [],
    )  # fmt: skip
    result = experiment.result(Params(), "model", [])
    table = nbformat.v4.new_output("display_data", {"text/html": result._checks_html()})
    cells.append(nbformat.v4.new_code_cell("y", outputs=[table], execution_count=2))
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_of_an_exported_page_can_be_read(open_page: Any, tmp_path: Path, scheme: str) -> None:
    file = to_html(one_of_each_source(tmp_path / "run.ipynb"), tmp_path / "run.html")
    page = open_page(file.as_uri(), offline=True, color_scheme=scheme).page
    page.locator(".js-plotly-plot .legend").nth(3).wait_for()
    found = page.evaluate(TEXTS, "main")
    texts = {text for text, _, _ in found}
    assert {"A title", "a curve", "a remark", "✓ holds", "✗ fails", "≠ differs", "– n/a"} <= texts
    assert {f"badge of {source}" for source in colours.SOURCE_COLOURS} <= texts
    assert ratio(found[0][2], "#ffffff" if scheme == "light" else "#000000") < 1.5
    assert [(text, colour) for text, colour, ground in found if ratio(colour, ground) < LEAST] == []


def test_every_text_reads_in_both_themes_of_jupyterlab(lab: Any, open_page: Any) -> None:
    watched = open_cell(
        lab, open_page, "all.ipynb", EVERYTHING.format(folder=str(Path(__file__).parents[1] / "traces"))
    )
    page = watched.page
    page.locator(".hw-stage[data-frame]").nth(2).wait_for(timeout=60_000)
    page.get_by_text("This timeline cannot be drawn").wait_for()
    for theme, bright in (("JupyterLab Dark", False), ("JupyterLab Light", True)):
        page.evaluate("(theme) => window.jupyterapp.commands.execute('apputils:change-theme', { theme })", theme)
        page.wait_for_function(
            "(light) => document.body.dataset.jpThemeLight === light", arg=str(bright).lower(), timeout=30_000
        )
        page.wait_for_timeout(1000)
        found = page.evaluate(TEXTS, ".jp-OutputArea-output")
        texts = " ".join(text for text, _, _ in found)
        for part in PARTS:
            assert part.lower() in texts.lower(), part
        assert [(*f, round(ratio(*f[1:]), 2)) for f in found if ratio(*f[1:]) < LEAST] == [], theme
        ground = "#ffffff" if bright else "#111111"
        painted = page.locator(".hw-base").evaluate_all(LABELS)
        assert len(painted) == 4 and min(max(ratio(c, ground) for c in labels) for labels in painted) > 2 * LEAST
    lab.stop_kernels()
