"""Text that can be read: contrast by the ratio of WCAG 2, and figures in the colours of a light or a dark page."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from workbench.core.colours import DARK

LEAST = 4.5
INKS = {"light": "#1c1c1c", "dark": "#e8ebed"}
"""Text of our pages."""


def luminance(colour: str) -> float:
    """Return the relative luminance (0 to 1) of a colour written ``#rrggbb``."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def ratio(one: str, other: str) -> float:
    """Return the contrast of two colours written ``#rrggbb``, 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def themed(figure: Mapping[str, Any], theme: str) -> dict[str, Any]:
    """Return data and layout of a plotly figure that stands on a page, not on its own white ground; `INKS` are themes.

    Its words take the colours they have on such a page. ``offline.js`` does the same where a page is open.
    """
    text = json.dumps({"data": figure.get("data", []), "layout": figure.get("layout", {})})
    if theme == "dark":
        text = re.sub("#[0-9A-Fa-f]{6}", lambda found: DARK.get(found[0].upper(), found[0]), text)
    shown = json.loads(text)
    shown["layout"] |= {"paper_bgcolor": "rgba(0,0,0,0)"}
    font = shown["layout"].setdefault("template", {}).setdefault("layout", {}).setdefault("font", {})
    font["color"] = INKS[theme]
    return shown
