"""Text can be read: contrast by WCAG's ratio, in exported pages and in the colours that notebooks use."""

from __future__ import annotations

import pytest

from workbench.core import colours
from workbench.views import plotting
from workbench.views.contrast import INKS, LEAST, ratio, themed


@pytest.mark.parametrize(
    "one, other, expected", [("#000000", "#ffffff", 21.0), ("#777777", "#ffffff", 4.48), ("#aabbcc", "#aabbcc", 1.0)]
)
def test_ratio_is_that_of_the_standard(one, other, expected):
    assert ratio(one, other) == pytest.approx(expected, abs=0.005) and ratio(other, one) == ratio(one, other)


@pytest.mark.parametrize("ground", ["#ffffff", "#f4f5f7"])
def test_words_read_on_light_grounds_and_under_white(ground):
    assert {name: c for name, c in colours.WORDS.items() if ratio(c, ground) < LEAST} == {}


@pytest.mark.parametrize("ground", ["#14171a", "#1f2428", "#0f1318"])
def test_words_read_on_dark_grounds(ground):
    assert {name: c for name, c in colours.WORDS.items() if ratio(colours.DARK[c], ground) < LEAST} == {}


@pytest.mark.parametrize("kind", [k for k in colours.COLOURS if k not in colours.PATTERNS])
def test_text_in_boxes_reads(kind):
    boxes = {"lane": ["GPU"], "label": ["x"], "start": [0], "end": [1], "kind": [kind]}
    (bar,) = plotting.draw_lanes(plotting.figure(), boxes).data
    assert ratio(bar.insidetextfont.color, bar.marker.color) >= LEAST


def test_a_figure_on_a_dark_page_has_the_words_of_one():
    fig = plotting.figure("t").add_scatter(x=[0], y=[0], marker={"color": colours.SERIES[0]})
    fig.update_layout(title_subtitle={"text": "s", "font": {"color": colours.SOURCE_COLOURS["live"].lower()}})
    fig.add_annotation(text="a", font={"color": colours.INK}, bgcolor="#123456")
    assert fig.layout.template.layout.paper_bgcolor == "#ffffff"
    for theme in ("light", "dark"):
        shown = themed(fig.to_plotly_json(), theme)
        layout, twins = shown["layout"], colours.DARK if theme == "dark" else {}
        assert (
            layout["paper_bgcolor"] == "rgba(0,0,0,0)" and layout["template"]["layout"]["font"]["color"] == INKS[theme]
        )
        badge = layout["title"]["subtitle"]["font"]["color"].upper()
        assert badge == twins.get(colours.SOURCE_COLOURS["live"], colours.SOURCE_COLOURS["live"])
        assert layout["annotations"][0]["font"]["color"] == twins.get(colours.INK, colours.INK)
        assert shown["data"][0]["marker"]["color"] == colours.SERIES[0]
        assert layout["annotations"][0]["bgcolor"] == "#123456"
