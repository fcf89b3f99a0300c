"""Colours of text that read on a page: at least 4.5:1 against it, by the contrast ratio of WCAG 2."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

LEAST = 4.5
NAMES = {"black": "#000000", "white": "#ffffff", "gray": "#808080", "grey": "#808080"}


@dataclass(frozen=True)
class Theme:
    """A page's own colours: of its text, and of the lightest or darkest ground that it lays beneath a figure."""

    ink: str
    ground: str


THEMES = {"light": Theme("#1c1c1c", "#ffffff"), "dark": Theme("#e8ebed", "#1f2428")}


def channels(colour: str) -> tuple[float, float, float, float] | None:
    """Return red, green, blue (0 to 255) and opacity of a CSS colour; None for one that is written otherwise."""
    text = NAMES.get(colour.strip().lower(), colour.strip())
    if re.fullmatch(r"#([0-9a-fA-F]{3}|[0-9a-fA-F]{6})", text):
        digits = text[1:] if len(text) == 7 else "".join(c * 2 for c in text[1:])
        red, green, blue = (float(int(digits[i : i + 2], 16)) for i in (0, 2, 4))
        return red, green, blue, 1.0
    found = re.fullmatch(r"rgba?\(\s*([\d.]+)\s*,\s*([\d.]+)\s*,\s*([\d.]+)\s*(?:,\s*([\d.]+)\s*)?\)", text)
    if not found:
        return None
    red, green, blue = (float(v) for v in found.groups()[:3])
    return red, green, blue, float(found[4] or 1)


def mix(colour: str, other: str, share: float) -> str:
    """Return `colour` with `share` (0 to 1) of `other` in it; both without opacity."""
    first, second = channels(colour), channels(other)
    assert first is not None and second is not None
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(first[:3], second[:3]))


def luminance(colour: str) -> float:
    """Return the relative luminance (0 to 1) of a colour without opacity."""
    found = channels(colour)
    assert found is not None, colour
    parts = (c / 255 for c in found[:3])
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def ratio(one: str, other: str) -> float:
    """Return the contrast of two colours without opacity, 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def readable(colour: str, theme: Theme) -> str:
    """Return `colour`, with as much of the theme's ink in it as it needs to be read on the theme's ground."""
    found = channels(colour)
    if found is None:
        return colour
    solid = mix(theme.ground, "#" + "".join(f"{round(c):02x}" for c in found[:3]), found[3])
    shares = (mix(solid, theme.ink, tenth / 10) for tenth in range(11))
    best = next((c for c in shares if ratio(c, theme.ground) >= LEAST), theme.ink)
    return colour if best == solid else best


def text_changes(figure: Mapping[str, Any], theme: Theme) -> list[tuple[list[str | int], str]]:
    """Return (path, colour) for each text of a plotly figure whose own colour cannot be read in a theme.

    Text that stands on something of the figure's own stays: in bars, in tables, in boxes.
    """
    fonts = [*_fonts(figure.get("layout", {}), ["layout"])]
    for i, trace in enumerate(figure.get("data", [])):
        kept = {k: v for k, v in trace.items() if k != "textfont" or "scatter" in trace.get("type", "scatter")}
        if trace.get("type") != "table":
            fonts += _fonts(kept, ["data", i])
    changed = [(path, colour, readable(colour, theme)) for path, colour in fonts]
    return [(path, after) for path, before, after in changed if after != before]


def themed(figure: Mapping[str, Any], theme: Theme) -> dict[str, Any]:
    """Return data and layout of a plotly figure with its text in colours that read in a theme."""
    copy = {"data": deepcopy(figure.get("data", [])), "layout": deepcopy(figure.get("layout", {}))}
    for path, colour in text_changes(copy, theme):
        *above, last = path
        node: Any = copy
        for part in above:
            node = node[part]
        node[last] = colour
    font = copy["layout"].setdefault("template", {}).setdefault("layout", {}).setdefault("font", {})
    font["color"] = theme.ink
    return copy


def _fonts(node: Any, path: list[str | int]) -> Iterator[tuple[list[str | int], str]]:
    if isinstance(node, (list, tuple)) and node and isinstance(node[0], Mapping):
        for i, value in enumerate(node):
            yield from _fonts(value, [*path, i])
    if not isinstance(node, Mapping) or node.get("bgcolor"):
        return
    for key, value in node.items():
        if key in ("hoverlabel", "insidetextfont", "template"):
            continue
        if key.lower().endswith("font") and isinstance(value, Mapping):
            if isinstance(value.get("color"), str):
                yield [*path, key, "color"], value["color"]
        elif isinstance(value, (Mapping, list, tuple)):
            yield from _fonts(value, [*path, key])
