"""Slider panel for any experiment, made from the bounds in its parameters."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import ipywidgets as widgets

from workbench.core.experiment import Experiment, Result
from workbench.views.plotting import as_json

QUIET_S = 0.15  # a drag sends many values; only the one the reader rests on is worth a recomputation


def explore(
    what: Experiment | Result,
    *,
    only: Sequence[str] | None = None,
    choices: Mapping[str, Sequence[Any]] | None = None,
    source: str = "auto",
    **start: Any,
) -> widgets.VBox:
    """Return sliders for bounded parameters above a figure and its checks.

    Args:
        what: an experiment, run anew at each change; or a result, whose table is kept where it was measured or
            recorded and only drawn and checked anew.
        only: names of the parameters that get a control; all bounded ones when None.
        choices: values of parameters that only this result bounds; each of them gets a menu.
        source: where an experiment's table comes from, see `Experiment.run`.
        **start: an experiment's first values; the others keep their defaults.

    Raises:
        ValueError: an unknown parameter or a value outside its bounds.
    """
    result = what if isinstance(what, Result) else what.run(source=source, **start)
    return Explorer(result, only, choices or {}).view


class Explorer:
    """State behind `explore`: the controls, the last result and the output it is shown in.

    Attributes:
        controls: name -> control widget.
        result: the last result, None where the last values could not be run.
        view: the widget to display.
    """

    def __init__(self, result: Result, only: Sequence[str] | None, choices: Mapping[str, Sequence[Any]]) -> None:
        self.first = result
        params = result.experiment.params
        fields = {f.name: f for f in dataclasses.fields(params)}
        if unknown := set(only or ()) - set(fields):
            raise ValueError(f"unknown parameters {', '.join(sorted(unknown))}: allowed are {', '.join(fields)}")
        hints = typing.get_type_hints(params)
        self.controls = {}
        for name, f in fields.items():
            if only is not None and name not in only:
                continue
            control = _control(f, getattr(result.params, name), hints[name], choices.get(name))
            if control is not None:
                control.observe(self._changed, names="value")
                self.controls[name] = control
        reset = widgets.Button(description="Defaults", tooltip="Set every slider back to its default")
        reset.on_click(self._reset)
        self.output = widgets.Output()
        self.result: Result | None = None
        self._waiting: asyncio.TimerHandle | None = None
        box = widgets.VBox([*self.controls.values(), reset] if self.controls else [])
        self.view: Any = widgets.VBox([box, self.output])
        self.view.explorer = self
        self._show(result)

    def values(self) -> dict[str, Any]:
        """Return the parameters as set."""
        values = {name: control.value for name, control in self.controls.items()}
        for f in dataclasses.fields(self.first.experiment.params):
            # Ten to the power of a logarithm may miss its bound.
            if f.metadata.get("log") and f.name in values and f.metadata.get("choices") is None:
                values[f.name] = min(max(values[f.name], f.metadata["min"]), f.metadata["max"])
        return values

    def update(self) -> None:
        """Run the experiment with the controls' values and show it; an error is shown in its place."""
        try:
            result = self.first.with_params(**self.values())
        except ValueError as error:
            self.result = None
            self.output.outputs = ({"output_type": "stream", "name": "stderr", "text": f"{error}\n"},)
            return
        self._show(result)

    def _show(self, result: Result) -> None:
        self.result = result
        # A plain figure, not a FigureWidget: that sends its own 5 MB of script each time and is saved as a snapshot.
        figure = result.figure()
        bundle = {"application/vnd.plotly.v1+json": as_json(figure), "text/plain": result.badge}
        shown = [{"output_type": "display_data", "data": bundle, "metadata": {}}]
        if result.checks:
            text = {"text/html": result._checks_html(), "text/plain": result._checks_text()}
            shown.append({"output_type": "display_data", "data": text, "metadata": {}})
        self.output.outputs = tuple(shown)

    def _changed(self, _: Any) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # plain Python: nothing would ever run a delayed call
            self.update()
            return
        self._waiting = loop.call_later(QUIET_S, self.update)

    def _reset(self, _: Any) -> None:
        for f in dataclasses.fields(self.first.experiment.params):
            if f.name in self.controls:
                self.controls[f.name].value = f.default


def _control(f: dataclasses.Field[Any], value: Any, hint: Any, choices: Sequence[Any] | None) -> Any:
    """Return a control for a field, None where neither its metadata nor `choices` bound it."""
    meta = f.metadata if choices is None else {**f.metadata, "choices": choices}
    look = {"style": {"description_width": "12em"}, "layout": {"width": "36em"}, "tooltip": meta.get("doc", "")}
    look["description"] = f.name.replace("_", " ")
    if meta.get("choices") is not None and meta.get("log"):
        return widgets.SelectionSlider(options=list(meta["choices"]), value=value, continuous_update=False, **look)
    if meta.get("choices") is not None:
        return widgets.Dropdown(options=list(meta["choices"]), value=value, **look)
    if hint is bool:
        return widgets.Checkbox(value=value, **look)
    low, high = meta.get("min"), meta.get("max")
    if hint not in (int, float) or low is None or high is None:
        return None
    if meta.get("unit"):
        look["description"] += f" ({meta['unit']})"
    if hint is int:
        return widgets.IntSlider(value, low, high, int(meta.get("step") or 1), continuous_update=False, **look)
    if meta.get("log"):
        ends = {"min": math.log10(low), "max": math.log10(high)}
        return widgets.FloatLogSlider(value, step=0.01, continuous_update=False, **ends, **look)
    step = meta.get("step") or (high - low) / 100
    return widgets.FloatSlider(
        value, min=low, max=high, step=step, continuous_update=False, readout_format=".3g", **look
    )
