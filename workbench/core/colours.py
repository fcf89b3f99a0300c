"""The colours by meaning: one colour means one thing, in figures, timelines, pages and JupyterLab."""

from __future__ import annotations

# Okabe-Ito hues: told apart by readers with any common colour-vision deficiency. Idle and waits are also hatched.
COLOURS: dict[str, str] = {
    "cpu_submit": "#0072B2",
    "host_work": "#7FB8D8",
    "gpu_execute": "#009E73",
    "copy": "#56B4E9",
    "communication": "#E69F00",
    "idle": "#B8B8B8",
    "sync_wait": "#D55E00",
    "headroom": "#CC79A7",
    "report": "#555555",
}
LABELS: dict[str, str] = {
    "cpu_submit": "CPU submission",
    "host_work": "host work",
    "gpu_execute": "GPU execution",
    "copy": "copy",
    "communication": "communication",
    "idle": "GPU idle",
    "sync_wait": "sync wait",
    "headroom": "headroom",
    "report": "report",
}
PATTERNS: dict[str, str] = {"idle": "/", "sync_wait": "x"}
# Of whatever a figure compares. The largest distances in OKLab from each other and from the meanings that one search
# over both found, seen with full colour vision and with each common deficiency, on white and on a dark page.
SERIES: tuple[str, ...] = ("#4E47EE", "#AB5763", "#4E6817", "#96A856", "#CE79FD", "#787AAF", "#834596")
GRID = "rgba(128,128,128,0.22)"
SANS = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"

# Words: over 4.5:1 on white, where figures stand, and as a ground beneath white words.
INK = "#5C6166"
LINK = "#0B5CAD"
SOURCE_COLOURS: dict[str, str] = {
    "model": "#7B5B2E",
    "recorded": "#2B4F81",
    "live": "#A11C5C",
    "report": COLOURS["report"],
}
STANDING_COLOURS: dict[str, str] = {"held": "#1F7A1F", "differs": "#8A6A00", "failed": "#B3261E", "na": "#3E6C80"}
WORDS: dict[str, str] = {"soft": INK, "link": LINK, **SOURCE_COLOURS, **STANDING_COLOURS}
DARK: dict[str, str] = {
    INK: "#A3ABB2",
    LINK: "#7DBBFF",
    SOURCE_COLOURS["model"]: "#CDA874",
    SOURCE_COLOURS["recorded"]: "#A0B4FF",
    SOURCE_COLOURS["live"]: "#F08CB8",
    SOURCE_COLOURS["report"]: "#D0D0D0",
    STANDING_COLOURS["held"]: "#6CCB6C",
    STANDING_COLOURS["differs"]: "#D9B740",
    STANDING_COLOURS["failed"]: "#FF8A80",
    STANDING_COLOURS["na"]: "#9FD0D0",
}
"""The same words on a dark page."""


def pill(standing: str) -> str:
    """Return the CSS of a standing's word. It stands on a ground of its own: a notebook may be light or dark."""
    return f"color:#fff;background:{STANDING_COLOURS[standing]};padding:1px 6px;border-radius:4px;white-space:nowrap"
