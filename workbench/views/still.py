"""A timeline as inline SVG, for a page that has neither plotly nor widgets: nbconvert's, a mail, a code review."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.core.colours import COLOURS, LABELS

WIDTH, GUTTER, LANE, CURVE = 900, 150, 24, 90


def timeline_svg(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return lanes of boxes and, beneath them, the headroom curves, as SVG text; names are escaped.

    Args:
        tables: of `views.trace.trace_tables`; ``boxes`` and ``headroom`` are drawn.
    """
    boxes, points = tables["boxes"], tables["headroom"]
    lanes = list(dict.fromkeys(r["lane"] for r in boxes))
    end = max([r["end_us"] for r in boxes] + [r["at_us"] for r in points], default=0.0) or 1.0
    most = max((r["queued_us"] for r in points), default=0.0) or 1.0
    top = 26

    def x(us: float) -> float:
        return round(GUTTER + (WIDTH - GUTTER - 10) * max(us, 0.0) / end, 1)

    parts = []
    for i, kind in enumerate(dict.fromkeys(r["kind"] for r in boxes)):
        left = GUTTER + 125 * i
        parts += [_box(left, 4, 11, 11, kind), _text(left + 16, 14, LABELS.get(kind) or str(kind))]
    for i, lane in enumerate(lanes):
        y = top + LANE * i
        parts.append(_text(GUTTER - 8, y + 15, lane[:22], "end"))
        placed = [(x(r["start_us"]), x(r["end_us"]), r["kind"]) for r in boxes if r["lane"] == lane]
        parts += [_box(left, y + 2, max(0.4, right - left), LANE - 4, kind) for left, right, kind in placed]
    foot = top + LANE * len(lanes)
    for lane in dict.fromkeys(r["lane"] for r in points):
        curve = [(x(r["at_us"]), 1 - r["queued_us"] / most) for r in points if r["lane"] == lane]
        path = " ".join(f"{at},{foot + 8 + (CURVE - 12) * depth:.1f}" for at, depth in curve)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS["headroom"]}" stroke-width="1.5"/>')
    if points:
        parts.append(_text(GUTTER - 8, foot + 16, f"headroom, to {most:.3g} us", "end"))
        foot += CURVE
    parts += [_text(GUTTER, foot + 14, "0"), _text(WIDTH - 10, foot + 14, f"{end:,.6g} us", "end")]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {foot + 20}" style="max-width:{WIDTH}px" '
        f'role="img" aria-label="Timeline and headroom">{"".join(parts)}</svg>'
    )


def _box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width:.1f}" height="{height}" fill="{COLOURS[kind]}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="12" font-family="sans-serif" fill="currentColor">'
        f"{html.escape(text)}</text>"
    )
