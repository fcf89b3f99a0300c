"""Menus over a finished sweep: which column, against which parameter."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets
from IPython.display import display

from workbench.core.experiment import Result
from workbench.views.sweep import columns


def sweep_panel(result: Result) -> widgets.VBox:
    """Return menus for x, y and colour above the figure; `result` is that of the experiment ``sweep_explorer``."""
    summary: Any = getattr(result, "summary")  # noqa: B009  (only a sweep's result has one)
    _, numeric = columns(summary, result.table)
    everything = [c for c in result.table.columns if c not in ("run", "status")]
    menus = {
        "x": widgets.Dropdown(options=["", *everything], value=result.params.x, description="x"),
        "y": widgets.Dropdown(options=["", *numeric], value=result.params.y, description="y"),
        "colour": widgets.Dropdown(options=["", *everything], value=result.params.colour, description="colour"),
    }
    output = widgets.Output()

    def show(_: Any = None) -> None:
        output.clear_output(wait=True)
        with output:
            try:
                display(result.with_params(**{name: menu.value for name, menu in menus.items()}).figure())
            except ValueError as error:
                print(error)

    for menu in menus.values():
        menu.observe(show, names="value")
    show()
    return widgets.VBox([widgets.HBox(list(menus.values())), output])
