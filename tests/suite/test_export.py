"""What an exported page is made of, without a browser."""

from __future__ import annotations

import os
import re
from pathlib import Path

import nbformat
import pytest

from workbench.suite.export import _markdown, to_html

CELLS = nbformat.v4


def write(path: Path, *cells: nbformat.NotebookNode) -> Path:
    nbformat.write(CELLS.new_notebook(cells=list(cells)), path)
    return path


@pytest.mark.parametrize(
    ("tex", "expected"),
    [
        (r"$T_\mathrm{submit} \ge T_{device}$", "<i>T</i><sub>submit</sub> ≥<i>T</i><sub>device</sub>"),
        (r"$N_\mathrm{launch}\, t$", "<i>N</i><sub>launch</sub>\u2009<i>t</i>"),
        (r"$$x^2$$", "<i>x</i><sup>2</sup>"),
    ],
)
def test_simple_formulas_are_set(tex: str, expected: str) -> None:
    assert f'<span class="formula">{expected}</span>' in _markdown(f"before {tex} after")


@pytest.mark.parametrize("text", [r"$\frac{a}{b}$", "`$x_1$`", "cost $5"])
def test_anything_else_stays_as_written(text: str) -> None:
    assert "formula" not in _markdown(text)
    assert text.strip("`").replace("\\", "\\") in _markdown(text)


def test_streams_are_joined_and_colours_kept(tmp_path: Path) -> None:
    outputs = [CELLS.new_output("stream", name="stdout", text=f"\x1b[31mline {i}\x1b[0m\n") for i in range(3)]
    path = write(tmp_path / "a.ipynb", CELLS.new_code_cell("x", outputs=outputs, execution_count=1))
    text = to_html(path, tmp_path / "a.html").read_text(encoding="utf-8")
    assert text.count('<pre class="plain">') == 1
    assert '<span class="ansi-red-fg">line 2</span>' in text


def test_parameters_that_a_run_set_are_told_from_the_defaults(tmp_path: Path) -> None:
    cells = [CELLS.new_code_cell("x = 1") for _ in range(3)]
    cells[0].metadata["tags"], cells[1].metadata["tags"] = ["parameters"], ["injected-parameters"]
    text = to_html(write(tmp_path / "a.ipynb", *cells), tmp_path / "a.html").read_text(encoding="utf-8")
    assert re.findall(r"<summary>([^<]+)</summary>", text) == ["Parameters", "Parameters that were set", "Code"]


def test_titles_links_and_code_are_escaped(tmp_path: Path) -> None:
    heading = CELLS.new_markdown_cell("# <script>alert(1)</script>")
    code = CELLS.new_code_cell("'</pre><script>alert(2)</script>'")
    path = write(tmp_path / "a.ipynb", heading, code)
    text = to_html(path, tmp_path / "a.html", back_link='"><script>alert(3)</script>').read_text(encoding="utf-8")
    assert "<title>&lt;script&gt;" in text
    assert "alert(2)" in text and "<script>alert(2)" not in text
    assert "<script>alert(3)" not in text


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.ipynb", CELLS.new_markdown_cell("new"))
    (tmp_path / "a.html").write_text("old")

    def refuse(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no space"):
        to_html(path, tmp_path / "a.html")
    assert (tmp_path / "a.html").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.html", "a.ipynb"]


@pytest.mark.parametrize("content", ["{]", "[]", '{"cells": 3}', "\ufeff\x00"])
def test_not_a_notebook_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.ipynb").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"x\.ipynb: expected a Jupyter notebook"):
        to_html(tmp_path / "x.ipynb", tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()


def test_sliders_at_rest_do_not_show_again_what_the_cells_show(tmp_path: Path) -> None:
    def shown(text: str) -> dict:
        return {"output_type": "display_data", "data": {"text/html": f"<i>{text}</i>"}, "metadata": {}}

    view = {"output_type": "display_data", "metadata": {}}
    view["data"] = {"application/vnd.jupyter.widget-view+json": {"model_id": "m"}}
    figure = {"output_type": "display_data", "metadata": {}}
    figure["data"] = {"application/vnd.plotly.v1+json": {"data": [{"y": [1]}], "layout": {"title": {"text": "t"}}}}
    cells = [
        CELLS.new_code_cell("a", outputs=[nbformat.from_dict(figure)], execution_count=1),
        CELLS.new_code_cell("b", outputs=[nbformat.from_dict(view)], execution_count=2),
        CELLS.new_code_cell("c", outputs=[nbformat.from_dict(shown("claims"))], execution_count=3),
    ]
    for at_rest in (True, False):
        notebook = CELLS.new_notebook(cells=cells)
        again = [figure, shown("claims")] if at_rest else [shown("other claims")]
        state = {"m": {"model_name": "OutputModel", "state": {"outputs": again}}}
        notebook.metadata.widgets = {"application/vnd.jupyter.widget-state+json": {"state": state}}
        nbformat.write(notebook, tmp_path / "a.ipynb")
        text = to_html(tmp_path / "a.ipynb", tmp_path / "a.html").read_text(encoding="utf-8")
        assert text.count("<i>claims</i>") == 1 and text.count("data-figure=") == 1
        assert (text.count("In JupyterLab the sliders"), text.count("<i>other claims</i>")) == (at_rest, not at_rest)


def test_a_still_is_left_out_where_its_interactive_view_is_kept(tmp_path: Path) -> None:
    still = CELLS.new_output("display_data", {"text/html": "<i>still</i>"}, metadata={"workbench_stands_in": True})
    view = CELLS.new_output("display_data", {"application/vnd.jupyter.widget-view+json": {"model_id": "m"}})
    for kept in (True, False):
        notebook = CELLS.new_notebook(cells=[CELLS.new_code_cell("x", outputs=[still, view], execution_count=1)])
        state = {"m": {"model_name": "AnyModel", "state": {"_esm": "", "spec": {}}}} if kept else {}
        notebook.metadata.widgets = {"application/vnd.jupyter.widget-state+json": {"state": state}}
        nbformat.write(notebook, tmp_path / "a.ipynb")
        text = to_html(tmp_path / "a.ipynb", tmp_path / "a.html").read_text(encoding="utf-8")
        assert (text.count("<i>still</i>"), text.count('data-model="m"')) == (not kept, kept)
