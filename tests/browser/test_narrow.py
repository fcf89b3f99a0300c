"""An exported page on a phone: no title of a figure is cut, and none lies over the legend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import plotly.graph_objects as go
import pytest
from test_page import notebook_of

from workbench.suite.export import to_html
from workbench.views import plotting

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


def lanes_with_a_legend_below() -> go.Figure:
    fig = plotting.figure(LONG, rows=2, height=460)
    for row, names in ((1, ["CPU", "GPU"]), (2, ["synchronized, wait covered", "synchronized(by_a_host_loop)"])):
        for i in range(4):
            fig.add_bar(
                y=names, x=[1 + i, 1], name=f"a long entry {i}", showlegend=row == 1, orientation="h", row=row, col=1
            )
    fig.add_annotation(
        text=f"(1) {LONG}", xref="x domain", yref="y domain", x=0, y=1, xanchor="left", yanchor="bottom",
        showarrow=False, row=1, col=1,
    )  # fmt: skip
    fig.update_xaxes(title_text="ms", row=2, col=1)
    fig.update_layout(legend={"y": -0.05, "yanchor": "top"}, margin={"t": 90})
    return fig.update_layout(title_subtitle={"text": BADGE, "font": {"size": 12}})


def test_a_legend_below_leaves_no_gap_above_and_covers_nothing(open_page: Any, tmp_path: Path) -> None:
    nbformat.write(notebook_of(lanes_with_a_legend_below()), tmp_path / "run.ipynb")
    page_file = to_html(tmp_path / "run.ipynb", tmp_path / "pages" / "run.html", tmp_path / "assets")
    watched = open_page(page_file.as_uri(), offline=True, viewport={"width": 390, "height": 900})
    watched.page.locator(".js-plotly-plot .legend").wait_for()
    watched.page.wait_for_timeout(800)
    found = watched.page.evaluate(BOXES)
    panels = watched.page.evaluate(
        "Array.from(document.querySelectorAll('.nsewdrag'), (node) => node.getBoundingClientRect().toJSON())"
    )
    (legend,), (heading,) = found["legend"], found["headings"]
    badge_ends = max(t["bottom"] for t in found["top"])
    assert badge_ends <= heading["top"] + 1 and heading["top"] - badge_ends < 40
    assert max(t["bottom"] for t in found["titles"]) <= legend["top"] + 1
    assert legend["bottom"] <= found["page"]["bottom"] + 1
    assert min(p["width"] for p in panels) > 0.5 * found["page"]["width"], "long names are broken"
    assert (watched.errors, watched.failed) == ([], [])


def test_labels_too_small_to_read_are_left_to_the_hover_text(open_page: Any, tmp_path: Path) -> None:
    boxes = {
        "lane": ["GPU"] * 2, "label": ["narrow", "wide"], "start": [0, 1], "end": [1, 500], "kind": ["gpu_execute"] * 2,
    }  # fmt: skip
    fig = plotting.draw_lanes(plotting.figure("Two boxes"), boxes)
    nbformat.write(notebook_of(fig), tmp_path / "run.ipynb")
    page_file = to_html(tmp_path / "run.ipynb", tmp_path / "pages" / "run.html", tmp_path / "assets")
    page = open_page(page_file.as_uri(), offline=True).page
    page.locator(".js-plotly-plot .bartext").first.wait_for(state="attached")
    page.wait_for_timeout(300)
    shown = page.eval_on_selector_all(
        ".bartext", "all => all.map(t => [t.textContent, getComputedStyle(t).visibility])"
    )
    assert dict(shown) == {"narrow": "hidden", "wide": "visible"}


def test_the_figure_of_a_claim_stands_beneath_it(open_page: Any, tmp_path: Path) -> None:
    from test_readable import one_of_each_source

    page_file = to_html(one_of_each_source(tmp_path / "run.ipynb"), tmp_path / "run.html")
    for width, beneath in ((390, True), (1100, False)):
        page = open_page(page_file.as_uri(), offline=True, viewport={"width": width, "height": 900}).page
        page.locator("table.claims").wait_for()
        boxes = page.eval_on_selector_all(
            "table.claims tr:nth-child(2) td", "all => all.map(t => t.getBoundingClientRect().toJSON())"
        )
        assert len(boxes) == 3 and (boxes[2]["top"] >= boxes[1]["bottom"] - 1) is beneath


def test_an_axis_on_top_stands_beneath_the_badge(open_page: Any, tmp_path: Path) -> None:
    fig = plotting.figure(LONG, height=420).add_scatter(x=[0, 1], y=[0, 1])
    fig.update_xaxes(side="top", title_text=f"an axis on top, {LONG}", tickangle=90, tickformat=".6f")
    fig.update_layout(title_subtitle={"text": BADGE, "font": {"size": 12}}, margin={"t": 110})
    nbformat.write(notebook_of(fig), tmp_path / "run.ipynb")
    page_file = to_html(tmp_path / "run.ipynb", tmp_path / "pages" / "run.html", tmp_path / "assets")
    page = open_page(page_file.as_uri(), offline=True, viewport={"width": 390, "height": 900}).page
    page.locator(".js-plotly-plot .xtitle").wait_for()
    page.wait_for_timeout(800)
    found = page.evaluate(BOXES)
    axis = page.eval_on_selector(".xtitle", "node => node.getBoundingClientRect().toJSON()")
    assert found["page"]["top"] < found["top"][0]["top"] and max(t["bottom"] for t in found["top"]) <= axis["top"] + 1
