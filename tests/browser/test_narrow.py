"""An exported page on a phone: no title of a figure is cut, and none lies over the legend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import plotly.graph_objects as go
import pytest
from test_page import notebook_of

from workbench import plotting
from workbench.export import to_html

LONG = "A title of many words that no telephone shows in one line, so that it has to go on in another"
BADGE = "■ recorded on NVIDIA H200, 2026-11-29, commit 98b6695, written afterwards from the log of a run"

# Boxes of all texts of titles, headings and the legend, and of the drawing that holds them.
BOXES = """
() => {
  const box = (node) => node.getBoundingClientRect().toJSON();
  const plot = document.querySelector(".js-plotly-plot");
  const all = (selector) => Array.from(plot.querySelectorAll(selector), box);
  return {
    page: box(plot),
    titles: all(".gtitle, .gtitle-subtitle, .x2title, .ytitle, .y2title, .annotation-text"),
    top: all(".gtitle, .gtitle-subtitle"),
    legend: all(".legend"),
    headings: all(".annotation-text"),
  };
}
"""


def long_figure() -> go.Figure:
    fig = plotting.figure(LONG, rows=2, height=460)
    for row in (1, 2):
        for i in range(3):
            fig.add_scatter(x=[0, 1], y=[i, i + 1], name=f"a curve called {i}", showlegend=row == 1, row=row, col=1)
        fig.update_yaxes(title_text="headroom of the device, us", row=row, col=1)
        fig.add_annotation(
            text=f"({row}) {LONG}", xref="x domain", yref="y domain", x=0, y=1, xanchor="left", yanchor="bottom",
            showarrow=False, row=row, col=1,
        )  # fmt: skip
    fig.update_xaxes(title_text=f"us from the window's start ({LONG[:60]})", row=2, col=1)
    return fig.update_layout(title_subtitle={"text": BADGE, "font": {"size": 12}})


@pytest.mark.parametrize("width", [390, 1100])
def test_titles_are_whole_and_apart(open_page: Any, tmp_path: Path, width: int) -> None:
    nbformat.write(notebook_of(long_figure()), tmp_path / "run.ipynb")
    page_file = to_html(tmp_path / "run.ipynb", tmp_path / "pages" / "run.html", tmp_path / "assets")
    watched = open_page(page_file.as_uri(), offline=True, viewport={"width": width, "height": 900})
    page = watched.page
    page.locator(".js-plotly-plot .legend").wait_for()
    page.wait_for_timeout(500)
    found = page.evaluate(BOXES)
    outside = [
        t for t in found["titles"] if t["left"] < found["page"]["left"] - 1 or t["right"] > found["page"]["right"] + 1
    ]
    assert len(found["titles"]) == 7 and outside == []
    (legend,) = found["legend"]
    assert max(t["bottom"] for t in found["top"]) <= legend["top"] + 2
    assert legend["bottom"] <= found["headings"][0]["top"] + 6 or width > 390
    assert (watched.errors, watched.failed) == ([], [])


def test_panels_beside_each_other_scroll_in_their_own_box(open_page: Any, tmp_path: Path) -> None:
    fig = plotting.figure("Two panels", cols=2, shared_xaxes=False)
    for column in (1, 2):
        fig.add_scatter(x=[0, 1], y=[0, 1], row=1, col=column)
        fig.update_yaxes(title_text="speedup", row=1, col=column)
    nbformat.write(notebook_of(fig), tmp_path / "run.ipynb")
    page_file = to_html(tmp_path / "run.ipynb", tmp_path / "pages" / "run.html", tmp_path / "assets")
    page = open_page(page_file.as_uri(), offline=True, viewport={"width": 390, "height": 900}).page
    page.locator(".js-plotly-plot .y2title").wait_for()
    found = page.evaluate(BOXES)
    assert found["page"]["width"] > 900
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate("(b => b.scrollWidth > b.clientWidth)(document.querySelector('.side-by-side'))")
