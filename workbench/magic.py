"""`%%headroom`: profile the cell on the GPU and show timeline, headroom curve, verdict and wait list inline."""

from __future__ import annotations

import argparse
import dataclasses
import html
import shlex
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench.core.colours import pill
from workbench.views.plotting import as_json

STANDS_IN = "workbench_stands_in"
"""Metadata of an output that an interactive one of the same cell replaces."""
USAGE = "%%headroom [-n STEPS] [-w WARMUP] [--stacks] [--idle-threshold US] [--keep FILE]"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(f"{message}; usage: {USAGE}")


def _options(line: str) -> argparse.Namespace:
    parser = _Parser(prog="%%headroom", add_help=False)
    parser.add_argument("-n", "--steps", type=int, default=3)
    parser.add_argument("-w", "--warmup", type=int, default=2)
    parser.add_argument("--stacks", action="store_true")
    parser.add_argument("--idle-threshold", type=float, default=None)
    parser.add_argument("--keep", default=None)
    options = parser.parse_args(shlex.split(line))
    if options.steps < 1 or options.warmup < 0:
        raise ValueError(
            f"expected steps >= 1 and warmup >= 0, got {options.steps} and {options.warmup}; usage: {USAGE}"
        )
    return options


def headroom(line: str, cell: str, shell: Any) -> Any:
    """Run a cell to warm up and in steps under the profiler, and display what it says.

    The cell runs in the notebook's namespace. Stacks (`--stacks`) name the source line of each wait but slow the host.
    """
    from IPython.display import display

    try:
        options = _options(line)
    except ValueError as error:
        display({"text/plain": f"%%headroom: {error}"}, raw=True)
        return None
    from workbench.core.experiment import gpu_present
    from workbench.measure.capture import NO_GPU

    if not gpu_present():
        display({"text/plain": f"%%headroom {NO_GPU}"}, raw=True)
        return None
    run = _compiled(cell, shell)
    with tempfile.TemporaryDirectory(prefix="headroom-") as folder:
        return _profile(run, options, Path(folder), shell)


def _compiled(cell: str, shell: Any) -> Callable[[], None]:
    source = shell.transform_cell(cell)
    name = shell.compile.cache(source, getattr(shell, "execution_count", 0), raw_code=cell)
    code = compile(source, name, "exec")
    return lambda: exec(code, shell.user_ns)


def _profile(run: Callable[[], None], options: argparse.Namespace, folder: Path, shell: Any) -> Any:
    from IPython.display import display

    from workbench.measure.capture import capture, steady_window
    from workbench.traces.idle import Analysis
    from workbench.traces.kineto import read_kineto
    from workbench.traces.verify import IDLE_THRESHOLD_US, verify_trace

    path = Path(options.keep) if options.keep else folder / "trace.json"
    trace = read_kineto(capture(run, path, steps=options.steps, warmup=options.warmup, stacks=options.stacks))
    analysis = Analysis(trace)
    window = steady_window(trace)
    limit = IDLE_THRESHOLD_US if options.idle_threshold is None else options.idle_threshold
    verdict = verify_trace(analysis, window=window, idle_threshold_us=limit)
    show(analysis, _told(verdict, options), window, display)
    return None


def _told(verdict: Any, options: argparse.Namespace) -> Any:
    """The verdict with what a reader of a cell needs: how often it ran, and this magic's way to source lines."""
    from workbench.measure.capture import calls
    from workbench.traces.lookup import NO_STACKS

    stacks = "no source lines: %%headroom --stacks names the line of each wait"
    notes = [stacks if n == NO_STACKS and not options.stacks else n for n in verdict.notes]
    ran = f"the cell ran {calls(options.steps, options.warmup)} times; judged are the last {options.steps} (-n, -w)"
    return dataclasses.replace(verdict, notes=[ran, *notes])


def show(analysis: Any, verdict: Any, window: tuple[int, int] | None, display: Callable[..., Any]) -> None:
    """Display verdict and waits, and the timeline with headroom.

    The timeline is interactive where widgets work. A still one stands in for it elsewhere: in a notebook that is opened
    again without its kernel, in nbconvert's pages, on a code host. The interactive one hides it where it is drawn.
    """
    from workbench.views.still import timeline_svg
    from workbench.views.trace import trace_figure, trace_tables, view_arguments

    bundle = {"text/html": verdict_html(verdict), "text/plain": str(verdict)}
    display(bundle, raw=True)
    if not len(analysis.trace.ops):
        return
    tables = trace_tables(analysis, window, "")
    still = {
        "application/vnd.plotly.v1+json": as_json(trace_figure(tables, "%%headroom")),
        "text/html": timeline_svg(tables),
        "text/plain": "timeline with headroom",
    }
    display(still, raw=True, metadata={STANDS_IN: True})
    try:
        from workbench.widgets import trace_view
    except ImportError:
        return
    arguments = view_arguments(analysis, window, badge="measured live on this GPU")
    display(trace_view(**arguments, hides_previous=True))


def verdict_html(verdict: Any) -> str:
    """The verdict and its waits as an HTML table; names are shown as text."""
    standing = {True: "held", False: "failed", None: "na"}[verdict.sync_free]
    parts = [f'<p><b style="{pill(standing)}">{verdict.headline}</b></p><ul>']
    parts += [f"<li>{html.escape(r)}</li>" for r in [*verdict.reasons, *verdict.notes]]
    parts.append("</ul>")
    waits = [
        {
            "wait": o["kind"],
            "count": o["count"],
            "total us": f"{o['total_ns'] / 1e3:.1f}",
            "longest us": f"{o['max_ns'] / 1e3:.1f}",
            "GPU idle us": f"{o['gpu_idle_ns'] / 1e3:.1f}",
        }
        | {name: o[name] or "–" for name in ("line", "op", "range")}
        for o in verdict.offences[:50]
    ]
    if waits:
        head = "".join(f"<th>{name}</th>" for name in waits[0])
        parts.append(f"<table><tr>{head}</tr>")
        for wait in waits:
            cells = (f'<td style="text-align:left">{html.escape(str(v))}</td>' for v in wait.values())
            parts.append(f"<tr>{''.join(cells)}</tr>")
        parts.append("</table>")
    return "".join(parts)


def load_ipython_extension(ipython: Any) -> None:
    """Register `%%headroom` with an IPython shell."""

    def cell_magic(line: str, cell: str) -> Any:
        return headroom(line, cell, ipython)

    cell_magic.__doc__ = f"""{USAGE}

    Runs the cell to warm up (WARMUP times, 2, and again under the profiler), then STEPS times (3), and shows verdict,
    waits and timeline of these.

    --stacks names the source line of each wait, and slows the host. --keep FILE keeps the trace. --idle-threshold is
    the longest idle interval for want of submitted work that passes, in us (20).
    """
    ipython.register_magic_function(cell_magic, "cell", "headroom")
