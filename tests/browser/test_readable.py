"""An exported page in both themes: its titles, badges, ticks, legends and verdicts can be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest

from workbench.core import colours
from workbench.core.experiment import Check, Experiment
from workbench.core.params import Params
from workbench.suite.export import to_html
from workbench.views import plotting
from workbench.views.contrast import LEAST, ratio

# [element's text, its colour, the ground it stands on], without text in bars.
TEXTS = """
() => Array.from(document.querySelectorAll("main text, main td, main th, main small"), (node) => {
  let ground = node.closest("svg")?.parentElement ?? node;
  while (ground && getComputedStyle(ground).backgroundColor === "rgba(0, 0, 0, 0)") ground = ground.parentElement;
  const style = getComputedStyle(node);
  return [node.textContent, node.closest("svg") ? style.fill : style.color, getComputedStyle(ground).backgroundColor];
}).filter(([text]) => text.trim())
"""


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
    found = page.evaluate(TEXTS)
    texts = {text for text, _, _ in found}
    assert {"A title", "a curve", "a remark", "✓ holds", "✗ fails", "≠ differs", "– n/a"} <= texts
    assert {f"badge of {source}" for source in colours.SOURCE_COLOURS} <= texts
    assert ratio(found[0][2], "#ffffff" if scheme == "light" else "#000000") < 1.5
    assert [(text, colour) for text, colour, ground in found if ratio(colour, ground) < LEAST] == []
