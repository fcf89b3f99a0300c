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
# As INK: over 4.5:1 on white, near 4:1 on JupyterLab's dark background. Exported pages know theirs and do better.
SOURCE_COLOURS: dict[str, str] = {"model": "#767676", "recorded": "#2879BD", "live": "#0A8560", "report": "#97648F"}
STANDING_COLOURS: dict[str, str] = {"held": "#0A8560", "differs": "#946C00", "failed": "#C84F00", "na": "#767676"}
SERIES: tuple[str, ...] = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#767676")
# One grey for both of JupyterLab's backgrounds: 4.5:1 on white, 4.2:1 on the dark one; none has 4.5 on both.
INK = "#767676"
GRID = "rgba(128,128,128,0.22)"
MONO = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
