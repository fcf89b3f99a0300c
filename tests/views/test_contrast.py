"""Text can be read: contrast by WCAG's ratio, in exported pages and in the colours that notebooks use."""

from __future__ import annotations

from pathlib import Path

import plotly.graph_objects as go
import pytest

from workbench.core import colours
from workbench.views import plotting
from workbench.views.contrast import LEAST, THEMES, channels, mix, ratio, readable, text_changes


@pytest.mark.parametrize(
    "one, other, expected", [("#000000", "#fff", 21.0), ("#777777", "#ffffff", 4.48), ("#abc", "#aabbcc", 1.0)]
)
def test_ratio_is_that_of_the_standard(one, other, expected):
    assert ratio(one, other) == pytest.approx(expected, abs=0.005) and ratio(other, one) == ratio(one, other)


def test_colours_are_read_in_the_ways_that_plotly_takes():
    assert channels("#0af") == channels("rgb(0, 170, 255)") == (0, 170, 255, 1)
    assert channels("rgba(1,2,3,0.5)") == (1, 2, 3, 0.5) and channels("grey") == channels("#808080")
    assert channels("rebeccapurple") is None and channels("url(#x)") is None
    assert mix("#000000", "#ffffff", 0.5) == "#808080"


@pytest.mark.parametrize("name", THEMES)
@pytest.mark.parametrize("colour", ["#767676", "#2879BD", "#000", "#fff", "rgba(128,128,128,0.3)", "yellowish"])
def test_readable_keeps_what_reads_and_changes_what_does_not(name, colour):
    theme = THEMES[name]
    got = readable(colour, theme)
    if channels(colour) is None:
        assert got == colour
        return
    assert ratio(got, theme.ground) >= LEAST
    opaque = channels(colour)[3] == 1
    assert (got == colour) is (opaque and ratio(colour, theme.ground) >= LEAST)


def test_the_colours_of_words_read_on_a_light_notebook():
    words = {**colours.SOURCE_COLOURS, **colours.STANDING_COLOURS, "ink": colours.INK}
    assert {name: c for name, c in words.items() if ratio(c, "#ffffff") < LEAST} == {}
    # None reads at 4.5:1 on white and on JupyterLab's dark #111111; these come near.
    assert {name: c for name, c in words.items() if ratio(c, "#111111") < 3.9} == {}


@pytest.mark.parametrize("kind", [k for k in colours.COLOURS if k not in colours.PATTERNS])
def test_text_in_boxes_reads(kind):
    boxes = {"lane": ["GPU"], "label": ["x"], "start": [0], "end": [1], "kind": [kind]}
    (bar,) = plotting.draw_lanes(plotting.figure(), boxes).data
    assert ratio(bar.insidetextfont.color, bar.marker.color) >= LEAST


def test_only_text_on_the_page_is_changed():
    grey = {"color": "#767676"}
    fig = go.Figure(layout={"title": {"text": "t", "subtitle": {"text": "s", "font": grey}}, "hoverlabel_font": grey})
    fig.add_annotation(text="on the page", font=grey)
    fig.add_annotation(text="in a box", font=grey, bgcolor="#ffffff")
    fig.update_xaxes(tickfont=grey)
    fig.add_scatter(x=[0], y=[0], text=["beside"], textfont=grey, marker={"color": "#767676"})
    fig.add_bar(x=[0], y=[1], text=["in"], textfont=grey, insidetextfont=grey, outsidetextfont=grey)
    fig.add_table(cells={"values": [[1]], "font": grey})
    figure = fig.to_plotly_json()
    changes = text_changes(figure, THEMES["dark"])
    assert sorted(".".join(map(str, path)) for path, _ in changes) == [
        "data.0.textfont.color",
        "data.1.outsidetextfont.color",
        "layout.annotations.0.font.color",
        "layout.title.subtitle.font.color",
        "layout.xaxis.tickfont.color",
    ]
    assert min(ratio(colour, THEMES["dark"].ground) for _, colour in changes) >= LEAST
    assert text_changes(figure, THEMES["light"]) == []


def test_the_colour_of_a_host_wait_is_drawn_by_its_kind_alone():
    """Boxes take it through their kind; a line or bar that names it would show something else as a wait."""
    root = Path(colours.__file__).parents[1]
    named = [
        f"{path.name}:{number}"
        for room in ("experiments", "views")
        for path in sorted((root / room).glob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if 'COLOURS["sync_wait"]' in line or colours.COLOURS["sync_wait"] in line
    ]
    assert named == []
