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
        parts.append(f'<rect x="{GUTTER + 125 * i}" y="4" width="11" height="11" fill="{COLOURS[kind]}"/>')
        parts.append(_text(GUTTER + 125 * i + 16, 14, LABELS.get(kind) or str(kind)))
    for i, lane in enumerate(lanes):
        y = top + LANE * i
        parts.append(_text(GUTTER - 8, y + 15, lane[:22], "end"))
        for r in (r for r in boxes if r["lane"] == lane):
            left = x(r["start_us"])
            parts.append(
                f'<rect x="{left}" y="{y + 2}" width="{max(0.4, x(r["end_us"]) - left):.1f}" height="{LANE - 4}" '
                f'fill="{COLOURS[r["kind"]]}"/>'
            )
    foot = top + LANE * len(lanes)
    for lane in dict.fromkeys(r["lane"] for r in points):
        path = " ".join(
            f"{x(r['at_us'])},{foot + 8 + (CURVE - 12) * (1 - r['queued_us'] / most):.1f}"
            for r in points
            if r["lane"] == lane
        )
        parts.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS["headroom"]}" stroke-width="1.5"/>')
    if points:
        parts.append(_text(GUTTER - 8, foot + 16, f"headroom, to {most:.3g} us", "end"))
        foot += CURVE
    parts += [_text(GUTTER, foot + 14, "0"), _text(WIDTH - 10, foot + 14, f"{end:,.6g} us", "end")]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {foot + 20}" style="max-width:{WIDTH}px" '
        f'role="img" aria-label="Timeline and headroom">{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="12" font-family="sans-serif" fill="currentColor">'
        f"{html.escape(text)}</text>"
    )
