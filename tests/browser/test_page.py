"""An exported page opened from a file without a network: figures show, sliders stay live, names stay text."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import ipywidgets
import nbformat
import numpy as np
import plotly.graph_objects as go
import pytest
from programs import view

from workbench.suite.export import to_html
from workbench.widgets import timeline_view, trace_view

HOSTILE = (
    '<img src=x onerror="window.pwned=1"></script><script>window.pwned=1</script>&amp;\'" \u202e \x01 \ud83d\ude80'
)


def recorded_view(events: int = 400) -> Any:
    """Two lanes; the GPU's operations carry a hostile name, idle intervals between them, a table of those."""
    start = np.arange(events) * 1000 + 1_700_000_000_000_000_123
    host = {"lane": 0, "start": start, "length": 300, "kind": "cpu_submit", "name": "launch"}
    device = {"lane": 1, "start": start + 300, "length": 600, "kind": "gpu_execute", "name": HOSTILE}
    idle = {"lane": 1, "start": start + 900, "length": 400, "kind": "idle", "name": "idle: submission"}
    groups = (host, device, idle)
    columns = {
        "lane": np.repeat([g["lane"] for g in groups], events),
        "start_ns": np.concatenate([g["start"] for g in groups]),
        "end_ns": np.concatenate([g["start"] + g["length"] for g in groups]),
        "kind": [g["kind"] for g in groups for _ in range(events)],
        "name": [g["name"] for g in groups for _ in range(events)],
    }
    shown = idle["start"][100:103]
    rows = [[f"{i}", "400 ns", HOSTILE] for i in range(3)]
    table = {"title": "Idle", "columns": ["#", "idle", "cause"], "rows": rows}
    table |= {"start_ns": shown, "end_ns": shown + 400}
    curve = {
        "label": "headroom",
        "unit": "ns",
        "t_ns": start,
        "before": np.zeros(events),
        "after": np.full(events, 600.0),
    }
    return trace_view(
        title=HOSTILE, badge="recorded", lanes=["CPU", HOSTILE], events=columns, curves=[curve], table=table
    )


def notebook_of(*widgets: Any) -> nbformat.NotebookNode:
    """A notebook as an execution leaves it: outputs and saved widget state."""
    cells = nbformat.v4
    saved: dict[str, Any] = {}
    shown = [cells.new_markdown_cell("# A title & more\n\ntext")]
    for widget in widgets:
        bundle: dict[str, Any] = {"text/plain": "widget"}
        if isinstance(widget, go.Figure):
            bundle["application/vnd.plotly.v1+json"] = widget.to_plotly_json() | {"config": {}}
        else:
            bundle["application/vnd.jupyter.widget-view+json"] = {"model_id": widget.model_id}
            family = [widget, *getattr(widget, "children", ())]
            saved |= {w.model_id: w._get_embed_state() for w in family}
        output = cells.new_output("display_data", bundle)
        shown.append(cells.new_code_cell("show()", outputs=[output], execution_count=1))
    long = cells.new_output("stream", name="stdout", text="line\n" * 200)
    shown.append(cells.new_code_cell("print()", outputs=[long], execution_count=2))
    notebook = cells.new_notebook(cells=shown)
    state = {"version_major": 2, "version_minor": 0, "state": saved}
    notebook.metadata.widgets = {"application/vnd.jupyter.widget-state+json": state}
    return notebook


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    nbformat.write(notebook_of(timeline_view(view(8)), recorded_view()), folder / "run.ipynb")
    return to_html(folder / "run.ipynb", folder / "pages" / "run.html", folder / "assets", back_link="../report.html")


@pytest.fixture
def shown(open_page: Any, exported: Path) -> Any:
    watched = open_page(exported.as_uri(), offline=True)
    watched.page.locator(".hw-stage[data-frame]").nth(1).wait_for()
    yield watched
    assert watched.errors == []
    assert watched.failed == []
    assert watched.page.evaluate("() => window.pwned") is None


def picture(stage: Any) -> str:
    stage.page.wait_for_timeout(60)
    return stage.locator(".hw-base").evaluate("c => c.toDataURL()")


def card(page: Any, label: str, nth: int = 0) -> str:
    return page.locator(".hw-card").filter(has_text=label).nth(nth).locator("dd").inner_text()


def test_a_slider_moves_the_picture_without_a_network(shown: Any) -> None:
    page = shown.page
    stage = page.locator(".hw-stage").first
    before = picture(stage)
    idle = card(page, "GPU idle")
    slider = page.get_by_label("Submission cost", exact=True)
    slider.focus()
    page.keyboard.press("End")
    assert picture(stage) != before
    assert slider.input_value() == "5"
    assert page.locator(".hw-value").first.inner_text() == "5.00 figure units"
    assert card(page, "GPU idle") != idle
    page.get_by_role("button", name="Set Submission cost to the report’s value").click()
    assert picture(stage) == before


def test_the_cursor_follows_keys_and_pointer(shown: Any) -> None:
    page = shown.page
    stage = page.locator(".hw-stage").first
    stage.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.wait_for_timeout(60)
    assert float(stage.get_attribute("aria-valuenow")) == pytest.approx(1.55)
    assert card(page, "CPU at the cursor") == "submitting b2"
    page.keyboard.press("ArrowRight")
    page.wait_for_timeout(60)
    assert float(stage.get_attribute("aria-valuenow")) == pytest.approx(2.0)
    assert card(page, "GPU at the cursor") == "executing b1"
    page.keyboard.press("End")
    page.wait_for_timeout(60)
    assert card(page, "CPU at the cursor") == "done"
    box = stage.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 60)
    page.mouse.down()
    page.wait_for_timeout(60)
    pressed = float(stage.get_attribute("aria-valuenow"))
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 60, steps=4)
    page.mouse.up()
    page.wait_for_timeout(60)
    assert 0 < pressed < float(stage.get_attribute("aria-valuenow"))
    assert stage.get_attribute("aria-valuetext").startswith("time ")


def test_idle_and_waiting_are_told_in_the_words_of_the_report(shown: Any) -> None:
    page = shown.page
    stage = page.locator(".hw-stage").first
    stage.focus()
    page.keyboard.press("Home")
    spoken = set()
    for _ in range(30):
        page.keyboard.press("ArrowRight")
        page.wait_for_timeout(20)
        spoken.add(card(page, "GPU at the cursor"))
    assert "idle: waiting for b4’s submission" in spoken
    assert "executing b3" in spoken


def test_zoom_pan_and_the_table_of_a_recording(shown: Any) -> None:
    page = shown.page
    stage = page.locator(".hw-stage").nth(1)
    whole = picture(stage)
    page.locator(".hw-row-button").nth(1).click()
    assert picture(stage) != whole
    assert float(stage.get_attribute("aria-valuenow")) == pytest.approx(101_900)
    assert "idle: submission (400 ns)" in stage.get_attribute("aria-valuetext")
    assert page.locator(".hw-scroll").nth(1).is_visible()
    stage.focus()
    near = picture(stage)
    page.keyboard.press("-")
    assert picture(stage) not in (near, whole)
    page.keyboard.press("0")
    assert picture(stage) == whole
    assert page.locator(".hw-scroll").nth(1).is_hidden()


def test_hostile_names_stay_text(shown: Any) -> None:
    page = shown.page
    assert page.locator(".hw-timeline img, .hw-timeline script").count() == 0
    assert page.locator(".hw-title").nth(1).inner_text().startswith("<img src=x")
    stage = page.locator(".hw-stage").nth(1)
    stage.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.wait_for_timeout(60)
    assert "<img src=x" in stage.get_attribute("aria-valuetext")


@pytest.mark.parametrize("nth", [0, 1])
def test_pictures_are_saved(shown: Any, tmp_path: Path, nth: int) -> None:
    page = shown.page
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save as SVG").nth(nth).click()
    saved.value.save_as(tmp_path / "picture.svg")
    root = ElementTree.fromstring((tmp_path / "picture.svg").read_text(encoding="utf-8"))
    tags = [e.tag.split("}")[1] for e in root.iter()]
    assert tags.count("rect") > 15
    assert "pattern" in tags
    assert not {"script", "img"} & set(tags)
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save as PNG").nth(nth).click()
    saved.value.save_as(tmp_path / "picture.png")
    data = (tmp_path / "picture.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert int.from_bytes(data[16:20], "big") > 1200  # twice the size on screen


def test_code_and_long_outputs_are_folded(shown: Any, exported: Path) -> None:
    page = shown.page
    assert page.title() == "A title & more"
    assert page.get_by_role("link", name="Report").get_attribute("href") == "../report.html"
    code = page.locator("details.code pre").first
    assert not code.is_visible()
    page.get_by_role("button", name="Show code").click()
    assert code.is_visible()
    assert page.locator("details.long").count() == 1
    assert not (exported.parents[1] / "assets").exists(), "plotly was copied for a page without a figure"


def test_plotly_figures_and_other_widgets(open_page: Any, tmp_path: Path) -> None:
    figure = go.Figure(go.Bar(x=["a"], y=[1]), layout={"title": {"text": "bars"}})
    choice = ipywidgets.Dropdown(options=["<i>", "other"], value="<i>", description="shape")
    steps = ipywidgets.IntSlider(3, description="steps")
    box = ipywidgets.VBox([steps, choice, ipywidgets.HTML("<b>bold</b>")])
    nbformat.write(notebook_of(figure, box), tmp_path / "run.ipynb")
    page_file = to_html(tmp_path / "run.ipynb", tmp_path / "pages" / "run.html", tmp_path / "the assets")
    watched = open_page(page_file.as_uri(), offline=True)
    watched.page.locator(".main-svg").first.wait_for()
    title = watched.page.locator(".gtitle")
    assert title.text_content() == "bars"
    light = title.evaluate("e => getComputedStyle(e).fill")
    watched.page.emulate_media(color_scheme="dark")
    watched.page.wait_for_function(
        "(light) => getComputedStyle(document.querySelector('.gtitle')).fill !== light", arg=light
    )
    assert watched.page.locator(".setting").all_inner_texts() == ["steps: 3", "shape: <i>"]
    assert watched.page.locator("b", has_text="bold").count() == 1
    assert watched.errors == []
    assert watched.failed == []


def test_an_open_page_follows_the_theme(shown: Any) -> None:
    page = shown.page
    seen = []
    for scheme in ("light", "dark", "light"):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_timeout(60)
        background = page.locator(".hw-timeline").first.evaluate("e => getComputedStyle(e).backgroundColor")
        seen.append((background, picture(page.locator(".hw-stage").first)))
    assert seen[0] == seen[2]
    assert seen[0][0] != seen[1][0]
    assert seen[0][1] != seen[1][1]


def test_a_program_that_cannot_run_says_why(open_page: Any, tmp_path: Path) -> None:
    spec = view(2)
    spec["panels"][0]["timelines"][0]["program"]["steps"].append({"kind": "wait", "label": "w", "op": "absent"})
    nbformat.write(notebook_of(timeline_view(spec)), tmp_path / "bad.ipynb")
    page = open_page(to_html(tmp_path / "bad.ipynb", tmp_path / "bad.html").as_uri()).page
    page.get_by_role("alert").wait_for()
    assert "no earlier operation is called absent" in page.get_by_role("alert").inner_text()


def test_a_page_opens_where_it_was_left(open_page: Any, tmp_path: Path) -> None:
    program, asked, moved_on = timeline_view(view(8)), recorded_view(), recorded_view()
    program.state = {"a": {"values": {"submit": 2.5}, "cursor": 7.25}}
    for recording in (asked, moved_on):
        recording.goto(recording.origin_ns + 5_100, width=1000)
    moved_on.state = {"_goto": 1, "main": {"cursor": 70_000.0}}
    nbformat.write(notebook_of(program, asked, moved_on), tmp_path / "run.ipynb")
    page = open_page(to_html(tmp_path / "run.ipynb", tmp_path / "run.html").as_uri()).page
    stages = page.locator(".hw-stage[data-frame]")
    stages.nth(2).wait_for()
    assert page.get_by_label("Submission cost", exact=True).input_value() == "2.5"
    assert [float(stages.nth(i).get_attribute("aria-valuenow")) for i in range(3)] == [7.25, 5_100, 70_000]
    assert page.locator(".hw-scroll").nth(1).is_visible()
