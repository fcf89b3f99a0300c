"""One colour means one thing: no hex has two meanings, and colours that stand side by side can be told apart."""

from __future__ import annotations

import re
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest

from workbench.core import colours
from workbench.experiments import load, slugs
from workbench.views.contrast import ratio

PACKAGE = Path(colours.__file__).parents[1]
FILES = sorted(
    path for folder in ("widgets", "suite", "core") for path in (PACKAGE / folder).rglob("*")
    if path.suffix in (".js", ".css", ".j2")
)  # fmt: skip
# Simulations of Machado, Oliveira and Fernandes (2009) at full severity, over linear RGB.
SEEN = {
    "by all cones": np.eye(3),
    "without red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "without green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "without blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


def oklab(colour: str, seen: str = "by all cones") -> np.ndarray:
    """Return a colour in OKLab, where equal distances look about equally far."""
    channels = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    red, green, blue = np.clip(np.array(SEEN[seen]) @ linear, 0, 1)
    long, middle, short = np.cbrt([
        0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue,
        0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue,
        0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue,
    ])  # fmt: skip
    return np.array([
        0.2104542553 * long + 0.793617785 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.428592205 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.808675766 * short,
    ])  # fmt: skip


def apart(one: str, other: str, seen: str = "by all cones") -> float:
    return float(np.linalg.norm(oklab(one, seen) - oklab(other, seen)))


def meanings() -> dict[str, str]:
    """Return every name of a colour with it; the report's points and the report's badge are one meaning."""
    words = {f"{name}, {where}": c for name, colour in colours.WORDS.items() if name != "report"
             for where, c in (("light", colour), ("dark", colours.DARK[colour]))}  # fmt: skip
    return {**colours.COLOURS, **{f"series {i}": c for i, c in enumerate(colours.SERIES)}, **words}


def test_no_colour_has_two_meanings():
    named = meanings()
    assert {pair for pair in combinations(named, 2) if named[pair[0]].upper() == named[pair[1]].upper()} == set()
    assert colours.SOURCE_COLOURS["report"] == colours.COLOURS["report"]
    assert set(colours.DARK) == set(colours.WORDS.values())


@pytest.mark.parametrize("seen", SEEN)
def test_series_are_told_from_each_other_and_from_the_meanings(seen):
    least, from_meanings = (0.13, 0.1) if seen == "by all cones" else (0.09, 0.035)
    assert [p for p in combinations(colours.SERIES, 2) if apart(*p, seen) < least] == []
    assert [p for p in product(colours.SERIES, colours.COLOURS.values()) if apart(*p, seen) < from_meanings] == []


@pytest.mark.parametrize("ground", ["#ffffff", "#1f2428"])
def test_series_stand_out_on_light_and_dark(ground):
    assert {c: round(ratio(c, ground), 1) for c in colours.SERIES if ratio(c, ground) < 2.4} == {}


@pytest.mark.parametrize("words", ["SOURCE_COLOURS", "STANDING_COLOURS"])
def test_words_of_one_kind_are_told_apart(words):
    pairs = list(combinations(getattr(colours, words).values(), 2))
    assert [p for p in pairs if apart(*p) < 0.06 or apart(*(colours.DARK[c] for c in p)) < 0.05] == []


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_pages_and_widgets_take_every_colour_that_means_something_from_the_palette(path):
    """What scripts and styles spell out themselves is grey, or the accent of what can be clicked."""
    links = {colours.LINK.lower(), colours.DARK[colours.LINK].lower()}
    text = path.read_text(encoding="utf-8").replace("&#", "")
    found = {f"#{h}".lower() for h in re.findall(r"#([0-9a-fA-F]{6}(?:[0-9a-fA-F]{2})?|[0-9a-fA-F]{3})\b", text)}
    whole = {"#" + "".join(2 * c for c in h[1:]) if len(h) == 4 else h[:7] for h in found}
    coloured = {h for h in whole if float(np.linalg.norm(oklab(h)[1:])) > 0.02}
    assert coloured - links == set()
    assert whole & {c.lower() for c in meanings().values()} <= links
    name = r"(?:colou?r|fill|stroke|background)[\"']?\s*[:=]\s*[\"']?(?:red|green|blue|orange|yellow|purple|pink)\b"
    assert re.findall(name, text) == []


# What a trace in a meaning's colour may be called.
SAID = {
    "cpu_submit": "submi|host went on",
    "host_work": "host work|CPU work",
    "gpu_execute": "execut|device time|GPU|metadata",
    "copy": "copy",
    "communication": "communication",
    "idle": "idle",
    "sync_wait": "wait|stops",
    "headroom": "headroom|ahead|queued",
    "report": "report|Table",
}


@pytest.mark.parametrize("slug", slugs())
def test_a_trace_in_a_colour_of_meaning_shows_what_it_means(slug: str):
    experiment = load(slug)
    figure = experiment.run("recorded" if experiment.recording else experiment.sources()[0]).figure()
    meant = {colour.upper(): name for name, colour in colours.COLOURS.items()}
    for trace in figure.data:
        used = {str(part.color) for part in (trace.marker, getattr(trace, "line", None)) if part is not None}
        for name in {meant[colour.upper()] for colour in used if colour.upper() in meant}:
            assert re.search(SAID[name], f"{trace.name} {trace.hovertemplate}", re.I), f"{trace.name!r} in {name}"
