"""Panel for one's own trace in a notebook: path or dropped file, verdict, what-if sliders, export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workbench.core.files import replace_file

# ipywidgets cuts a description that is longer than its default width.
WIDE = {"description_width": "9em"}
# Fields that only tell something are disabled, and a disabled field is shown faint: its text is the answer here.
TOLD = "workbench-told"
INK = "var(--jp-widgets-input-color, currentColor)"
STYLE = (
    f"<style>.{TOLD} :disabled {{ opacity: 1 !important; cursor: text; color: {INK} !important;"
    f" -webkit-text-fill-color: {INK}; }}</style>"
)


def open_view(result: Any) -> Any:
    """The interactive timeline of a result's trace (of a recorded pair, the one with waits), with waits to jump to."""
    from workbench.views.trace import opened, view_arguments
    from workbench.widgets import trace_view

    analysis, window = opened(result)
    return trace_view(**view_arguments(analysis, window, badge=result.badge))


def trace_panel(result: Any = None) -> Any:
    """A panel that opens traces and answers what-ifs.

    Args:
        result: a result of the experiment `your_trace` to begin with, or None.
    """
    return TracePanel(result).box


class TracePanel:
    """The panel's state and widgets; callbacks are plain methods, so that they can be called without a browser."""

    def __init__(self, result: Any = None) -> None:
        import ipywidgets as w

        from workbench.widgets.file_drop import FileDrop

        self.analysis: Any = None
        self.window: Any = None
        self.replay: Any = None
        self.answer: dict[str, Any] = {}
        wide = {"layout": {"width": "98%"}}
        example = "path of a .json, .json.gz or .sqlite trace"
        self.path = w.Text(placeholder=example, description="trace", continuous_update=False, **wide)
        self.drop = FileDrop(self.open, label="a trace", accept=".json,.gz,.sqlite")
        self.message = w.Text(disabled=True, description="state", **wide)
        self.waits = w.Dropdown(options=["none", "all"], value="none", description="remove waits", style=WIDE)
        slider = {"min": 0.0, "max": 2.0, "step": 0.05, "value": 1.0, "continuous_update": False, "style": WIDE}
        self.host = w.FloatSlider(description="host cost x", **slider)
        self.device = w.FloatSlider(description="device time x", **slider)
        merged = [1, 2, 4, 8, 16, 64, 256, 1_000_000]
        self.merge = w.SelectionSlider(options=merged, value=1, description="merge launches", style=WIDE)
        self.text = w.Textarea(disabled=True, layout={"width": "98%", "height": "260px"})
        for field in (self.message, self.text):
            field.add_class(TOLD)
        self.view = w.Output()
        self.save_as = w.Text(value="headroom.json", description="save as")
        self.save = w.Button(description="save summary and verdict", layout={"width": "max-content"})
        for control in (self.waits, self.host, self.device, self.merge):
            control.observe(self._changed, names="value")
        self.path.observe(self._path_given, names="value")
        self.save.on_click(self._save)
        rows = [
            w.VBox([self.path, self.drop]),
            self.message,
            w.HBox([self.waits, self.merge]),
            w.HBox([self.host, self.device]),
            self.text,
            w.HBox([self.save_as, self.save]),
        ]
        self.box = w.VBox([*rows, self.view, w.HTML(STYLE, layout={"display": "none"})])
        if result is not None:
            from workbench.views.trace import opened

            self._show(*opened(result))

    def _path_given(self, change: Any) -> None:
        if change["new"].strip():
            self.open(Path(change["new"].strip()).expanduser())

    def open(self, path: Path, name: str | None = None) -> None:
        """Read a trace and show it; what is wrong with it is said in the panel."""
        from workbench.traces import TraceError, read
        from workbench.traces.idle import Analysis

        try:
            analysis = Analysis(read(path))
        except (TraceError, OSError) as error:
            self.message.value = _named(error, path, name)
            return
        self._show(analysis, None, name)
        self._draw(name or path.name)

    def _show(self, analysis: Any, window: Any, name: str | None = None) -> None:
        from workbench.traces.replay import to_program
        from workbench.traces.trace import TraceError
        from workbench.traces.verify import verify_trace

        self.analysis, self.window = analysis, window
        self.verdict = verify_trace(analysis, window=window)
        self.message.value = f"{name or analysis.trace.source}: {self.verdict.as_dict()['verdict']}"
        places = sorted({o["line"] or o["op"] or o["call"] for o in self.verdict.offences})
        try:
            self.replay = to_program(analysis, window=window)
        except TraceError as error:
            self.replay = None
            self.text.value = f"{self.verdict}\n\nno what-if: {_named(error, Path(analysis.trace.source), name)}"
            return
        self.waits.options = ["none", "all", *places]
        self._changed()

    def _draw(self, name: str) -> None:
        from IPython.display import display

        from workbench.views.trace import view_arguments
        from workbench.widgets import trace_view

        arguments = view_arguments(self.analysis, self.window, title=name, badge=f"file {name}", most=1_000_000)
        self.view.clear_output(wait=True)
        with self.view:
            display(trace_view(**arguments))

    def _changed(self, _: Any = None) -> None:
        from workbench.traces.replay import gain, spans, what_if

        if self.replay is None:
            return
        value = str(self.waits.value)
        chosen: bool | str = {"none": False, "all": True}.get(value, value)
        place = chosen.split(" (")[0] if isinstance(chosen, str) else chosen
        try:
            self.answer = what_if(self.replay, remove_waits=place, host_scale=self.host.value,
                                  device_scale=self.device.value, merge_launches=self.merge.value)  # fmt: skip
        except ValueError as error:
            self.text.value = str(error)
            return
        scaled = (self.host.value, self.device.value, self.merge.value) != (1, 1, 1)
        told = [gain(self.answer, scaled or chosen is not False), *spans(self.answer)]
        assumed = [f"- {text}" for text in self.answer["assumptions"]]
        self.text.value = "\n".join([str(self.verdict), "", *told, *assumed])

    def _save(self, _: Any = None) -> None:
        from workbench.traces.summary import summarise

        if self.analysis is None:
            self.message.value = "nothing to save: open a trace first"
            return
        target = Path(self.save_as.value).expanduser()
        found = {"summary": summarise(self.analysis, self.window), "verdict": self.verdict.as_dict()}
        content = found | {"what_if": self.answer}
        try:
            replace_file(target, json.dumps(content, indent=1))
        except OSError as error:
            self.message.value = f"not saved: {error}"
            return
        self.message.value = f"saved {target.name}"


def _named(error: Exception, path: Path, name: str | None) -> str:
    """The message with the name that the reader knows: a dropped file lies under another one while it is read."""
    return str(error).replace(path.name, name) if name else str(error)
