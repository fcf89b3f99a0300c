"""Your own trace: headroom, causes of idle time, waits by source line, a verdict, and what a change would gain."""

from __future__ import annotations

import contextlib
import gzip
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.core.params import Params, param
from workbench.core.scrub import scrub_notebook, scrub_trace
from workbench.traces.replay import what_if
from workbench.traces.trace import TraceError
from workbench.traces.verify import verify_trace
from workbench.views.trace import OpenedTrace, Tables, accounted, figure_of, open_trace, trace_tables

if TYPE_CHECKING:
    from workbench.core.record import Recording

RECORDING = "2026-11-29_h200_98b6695"
FILE = "loop_with_stacks.json.gz"


@dataclass(frozen=True, kw_only=True)
class YourTraceParams(Params):
    """Without a path: a recording of ours, a loop of eight short blocks with one `.item()` each, with Python stacks."""

    trace: str = param(
        "",
        "a Kineto trace (.json, .json.gz) or an nsys .sqlite of your own; empty: the recording",
        analysis=True,
        path=True,
    )
    window: str = param("all", "all, steps, step:N, a range's name, or A:B (ns, or +1ms:+5ms)", analysis=True)
    idle_threshold_us: float = param(
        20.0, "longest tolerated submission-bound idle interval", unit="us", min=0.0, max=1e6, analysis=True
    )
    remove_waits: bool = param(True, "what-if: remove host waits", analysis=True)
    host_scale: float = param(1.0, "what-if: factor on host cost", min=0.0, max=4.0, step=0.05, analysis=True)
    device_scale: float = param(1.0, "what-if: factor on device time", min=0.0, max=4.0, step=0.05, analysis=True)
    merge_launches: int = param(1, "what-if: launches merged into one submission", min=1, max=1_000_000, analysis=True)


def measure(params: YourTraceParams, recorder: Any) -> None:
    """Profile the loop with reads, with stacks, and keep the trace and its verdict."""
    from workbench.measure.block_loop import build
    from workbench.measure.capture import capture, verify

    recorder.set(
        "workload", job="eight bf16 transformer blocks of width 1024 over 256 rows, forward, one .item() per block"
    )
    recorder.set("protocol", timer="torch.profiler", warmup=2, repeats=1, stacks=True)
    step = build(blocks=8, width=1024, tokens=256)
    for name, call in (("with .item()", lambda: step(True)), ("without .item()", lambda: step(False))):
        verdict = verify(call, steps=3, warmup=2, idle_threshold_us=params.idle_threshold_us)
        recorder.row(
            loop=name,
            exit_code=verdict.exit_code,
            waits=sum(o["count"] for o in verdict.offences),
            wait_us=sum(o["total_ns"] for o in verdict.offences) / 1e3,
            line=verdict.offences[0]["line"] if verdict.offences else None,
            submission_idle=len(verdict.submission_idle),
        )
    with tempfile.TemporaryDirectory() as folder:
        path = capture(lambda: step(True), Path(folder) / "trace.json", steps=3, warmup=2, stacks=True)
        text = scrub_trace(path.read_text(encoding="utf-8"))
    recorder.attach(FILE, gzip.compress(text.encode(), 9, mtime=0))
    notebook = _headroom_notebook()
    if notebook is not None:
        recorder.attach("headroom.ipynb", json.dumps(scrub_notebook(notebook)).encode())


CELLS = (
    "%load_ext workbench",
    "from workbench.measure.block_loop import build\n\nstep = build(blocks=8, width=1024, tokens=8192)",
    "%%headroom -n 3 -w 2 --stacks\nstep(True)",
    "%%headroom -n 3 -w 2\nstep(False)",
)


def _headroom_notebook() -> dict[str, Any] | None:
    """A notebook that uses `%%headroom`, executed headlessly here; None where no notebook software is installed."""
    try:
        import nbformat
        from nbclient import NotebookClient
    except ImportError:
        return None
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    return notebook


def opens(params: YourTraceParams, recording: Recording | None) -> OpenedTrace:
    """The reader's trace, or the recording's."""
    return open_trace(recording.file(FILE) if recording else params.trace)


def recorded(params: YourTraceParams, origin: OpenedTrace) -> Tables:
    """Boxes, headroom and sums; the verdict; the what-if, where the trace has steps to replay."""
    analysis, window = origin.shown(params)
    verdict = verify_trace(analysis, window=window, idle_threshold_us=params.idle_threshold_us)
    tables = trace_tables(analysis, window, analysis.trace.source)
    tables["verdict"] = [{"verdict": verdict.as_dict()["verdict"], "exit_code": verdict.exit_code}]
    with contextlib.suppress(TraceError):
        answer = what_if(
            analysis,
            remove_waits=params.remove_waits,
            host_scale=params.host_scale,
            window=window,
            device_scale=params.device_scale,
            merge_launches=params.merge_launches,
        )
        tables["what_if"] = [{k: answer[k] for k in ("measured_us", "replayed_us", "predicted_us")}]
    return tables


def checks(result: Result) -> list[Check]:
    """Sums that must hold for every trace, and the verdict as a value."""
    (verdict,) = result.rows("verdict")
    found = [accounted(result), Check("Verdict (a value, not a claim)", None, verdict["verdict"])]
    for span in result.rows("what_if"):
        ratio = span["replayed_us"] / span["measured_us"] if span["measured_us"] else 1.0
        claim = "Replayed unchanged, the queue model reproduces the measured span within 2 %"
        found.append(Check(claim, abs(ratio - 1) <= 0.02, f"replayed / measured {ratio:.4f}"))
        value = (
            f"from the first submission to the last end: predicted {span['predicted_us']:.1f} us, measured "
            f"{span['measured_us']:.1f} us"
        )
        found.append(Check("What-if (a value, not a claim)", None, value))
    return found


EXPERIMENT = Experiment(
    slug="your_trace",
    group="tools",
    title="Your own trace: why the GPU waited",
    claim="A profile tells how far ahead the CPU was, why the GPU waited, at which line, and what a change gains.",
    kind="measured",
    anchor="Section 8.1, Appendix B.5, B.6, Table 51",
    params=YourTraceParams,
    figure=figure_of,
    checks=checks,
    opens=opens,
    own="trace",
    recorded=recorded,
    measure=measure,
    tests=("tests/measure/test_capture.py", "tests/traces/test_on_gpu.py"),
    recording=RECORDING,
    default_source="recorded",
)
