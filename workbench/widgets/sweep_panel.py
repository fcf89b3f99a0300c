"""Menus over a finished sweep: which column, against which parameter."""

from __future__ import annotations

import ipywidgets as widgets

from workbench.core.experiment import Result
from workbench.views.sweep import columns
from workbench.widgets.explore import explore


def sweep_panel(result: Result) -> widgets.VBox:
    """Return menus for x, y and colour above the figure; `result` is that of the experiment ``sweep_explorer``."""
    everything = ["", *(c for c in result.table.columns if c not in ("run", "status"))]
    _, numeric = columns(result.origin, result.table)
    return explore(result, choices={"x": everything, "y": ["", *numeric], "colour": everything})
