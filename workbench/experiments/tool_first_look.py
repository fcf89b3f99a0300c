"""A first look at a real trace: lanes, headroom, idle share and the longest idle intervals, with and without waits."""

from __future__ import annotations

import gzip
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.experiment import Experiment
from workbench.core.params import Params, param
from workbench.core.scrub import scrub_trace
from workbench.traces.ranges import find_ranges
from workbench.traces.replay import to_program, what_if
from workbench.views.trace import (
    MERGED,
    REMOVED,
    SCALED,
    UNCHANGED,
    OpenedTrace,
    Tables,
    figure_of,
    first_look_checks,
    open_trace,
    trace_tables,
)

if TYPE_CHECKING:
    from workbench.core.record import Recording

RECORDING = "2026-11-29_h200_44fff12"
VARIANTS = ("free", "loaded", "item", "graph")
PAUSE_S = 0.05
LABELS = {"free": "without .item()", "item": "with .item()"}
SIZES = {"short": 256, "long": 8192}


@dataclass(frozen=True, kw_only=True)
class FirstLookParams(Params):
    """The recorded job is ours: a loop of eight bf16 transformer blocks, short (256 rows) and long (8192 rows)."""

    trace: str = param(
        "",
        "a Kineto trace of your own (.json, .json.gz) or an nsys .sqlite; empty: the recording",
        analysis=True,
        path=True,
    )
    size: str = param("long", "which recorded loop is drawn", choices=tuple(SIZES), analysis=True)
    blocks: int = param(8, "transformer blocks in the recorded loop", min=1, max=64)
    width: int = param(1024, "model width of the recorded loop", min=64, max=8192)
    steps: int = param(4, "steps per time without the profiler", min=1, max=32)
    repeats: int = param(15, "step times without the profiler", min=1, max=200)
    profiled_steps: int = param(2, "steps of a profiled stretch", min=1, max=32)
    rounds: int = param(6, "profiled stretches of each variant", min=1, max=32)


def measure(params: FirstLookParams, recorder: Any) -> None:
    """Time the loop without the profiler, variants interleaved; then profile them, interleaved in one trace."""
    import torch

    from workbench.measure import timing
    from workbench.measure.block_loop import build
    from workbench.measure.capture import capture

    recorder.set("workload", job="transformer block loop, forward, bf16, random weights, seed 0", sizes=SIZES)
    recorder.set("precision", parameters="bfloat16", activations="bfloat16")
    recorder.set("topology", gpus=1)
    recorder.set(
        "protocol",
        timer="host wall clock from an idle device to its synchronise after the steps",
        warmup=3,
        repeats=params.repeats,
        order="variants interleaved within each repeat",
        profiler=f"after the timing, one profile per size: {params.rounds} rounds after a warm-up round, in each a "
        f"stretch of {params.profiled_steps} steps per variant, {PAUSE_S * 1e3:g} ms of host sleep between stretches",
    )
    calls: dict[str, dict[str, Any]] = {}
    for size, tokens in SIZES.items():
        step = build(blocks=params.blocks, width=params.width, tokens=tokens)
        calls[size] = {
            "free": lambda step=step: step(False),
            "loaded": lambda step=step: step(False, load=True),
            "item": lambda step=step: step(True),
            "graph": timing.captured_graph([lambda step=step: step(False)]).replay,
        }
        for call in calls[size].values():
            for _ in range(3):
                call()
    torch.cuda.synchronize()
    times: dict[tuple[str, str], list[float]] = {(s, v): [] for s in SIZES for v in VARIANTS}
    for _ in range(params.repeats):
        for size, variant in times:
            times[size, variant] += timing.wall_us(calls[size][variant], repeats=1, warmup=0, batch=params.steps)
    for (size, variant), samples in times.items():
        recorder.samples(f"step_us {size} {variant}", samples)
        columns = timing.summary(samples, "step_us")
        recorder.row(size=size, variant=variant, tokens=SIZES[size], **columns, trace=f"{size}.json.gz")
    with tempfile.TemporaryDirectory() as folder:
        kept = {size: _rounds(calls[size], params, Path(folder) / f"{size}.json") for size in SIZES}
        kept["short_item_stacks"] = capture(calls["short"]["item"], Path(folder) / "stacks.json", steps=2, stacks=True)
        for name, path in kept.items():
            text = scrub_trace(path.read_text(encoding="utf-8"))
            recorder.attach(f"{name}.json.gz", gzip.compress(text.encode(), 9, mtime=0))


def _rounds(calls: dict[str, Any], params: FirstLookParams, path: Path) -> Path:
    """Profile the variants in turn within one trace: ranges "free 0", "loaded 0", "item 0", "graph 0", "free 1"...

    Separate profiles cannot be compared on a shared host: its speed was seen to change by a factor of 2.5 from one to
    the next. Stretches are parted by sleep, so that each begins on an idle device and no synchronise is in the trace.
    """
    import torch
    from torch.profiler import record_function

    from workbench.measure.capture import STEP, Profile

    torch.cuda.synchronize()
    number = 0
    with Profile(path) as recording:
        for i in range(-1, params.rounds):
            for variant, call in calls.items():
                with record_function(f"{variant} {i}" if i >= 0 else f"warmup {variant}"):
                    for _ in range(params.profiled_steps):
                        with record_function(f"{STEP}{number}"):
                            call()
                        number += 1
                time.sleep(PAUSE_S)
                if not torch.cuda.current_stream().query():
                    raise RuntimeError(f"{variant}: the device still works {PAUSE_S * 1e3:g} ms after its last launch")
    return recording.path


@dataclass(frozen=True)
class Stretch:
    """A profiled stretch of steps of one variant: host times of its range, and when the device finished it (ns)."""

    start_ns: int
    host_end_ns: int
    device_end_ns: int

    @property
    def window(self) -> tuple[int, int]:
        """All of it, on both sides."""
        return self.start_ns, max(self.host_end_ns, self.device_end_ns)

    @property
    def submission(self) -> tuple[int, int]:
        """The host's part: what a what-if replays is launched in here."""
        return self.start_ns, self.host_end_ns


def stretches(analysis: Any) -> dict[str, list[Stretch]]:
    """The stretches of each variant, round by round."""
    found = find_ranges(analysis, rf"^({'|'.join(VARIANTS)}) \d+$")
    times = zip(found.host_start_ns.tolist(), found.host_end_ns.tolist(), found.device_end_ns.tolist())
    out: dict[str, list[Stretch]] = {v: [] for v in VARIANTS}
    for name, time_ns in zip(found.name, times):
        out[name.split()[0]].append(Stretch(*time_ns))
    return out


def shown(found: dict[str, list[Stretch]]) -> dict[str, Stretch]:
    """The round that is drawn: the one whose stretch with reads has the median span."""
    spans = [s.device_end_ns - s.start_ns for s in found["item"]]
    middle = sorted(range(len(spans)), key=spans.__getitem__)[len(spans) // 2]
    return {variant: each[middle] for variant, each in found.items()}


@dataclass(frozen=True)
class Pair:
    """The recorded loops, one trace a size, each analysed when it is first drawn."""

    recording: Recording
    analyses: dict[str, Any] = field(default_factory=dict)

    def analysis(self, size: str) -> Any:
        """The analysed trace of one size."""
        if size not in self.analyses:
            self.analyses[size] = open_trace(self.recording.file(f"{size}.json.gz")).analysis
        return self.analyses[size]

    def shown(self, params: FirstLookParams) -> tuple[Any, tuple[int, int]]:
        """The trace of the drawn size, and its stretch with waits."""
        analysis = self.analysis(params.size)
        return analysis, shown(stretches(analysis))["item"].window


def opens(params: FirstLookParams, recording: Recording | None) -> Pair | OpenedTrace:
    """The reader's trace, or the recorded pair."""
    return Pair(recording) if recording else open_trace(params.trace)


def recorded(params: FirstLookParams, origin: Pair | OpenedTrace) -> Tables:
    """Boxes, headroom and sums of the reader's trace, or of one recorded round, with what-ifs of all rounds."""
    if not isinstance(origin, Pair):
        return trace_tables(origin.analysis, None, Path(params.trace).name)
    analysis = origin.analysis(params.size)
    found = stretches(analysis)
    tables: Tables = {}
    for variant in LABELS:
        for name, rows in trace_tables(analysis, shown(found)[variant].window, LABELS[variant]).items():
            tables.setdefault(name, []).extend(rows)
    return tables | predictions(analysis, found)


def predictions(analysis: Any, found: dict[str, list[Stretch]]) -> Tables:
    """Predicted and measured spans in each round (``what_if``), and the hosts' speeds (``host_speed``).

    Waits removed stands against the stretch that computes the same scalars and leaves them on the device: a what-if
    knows the waits, not the indexing that a programmer would drop with them. It keeps the host's speed of its own
    stretch, which on a shared host is not its neighbour's; a second case takes the neighbour's. Launches merged stand
    against the graph.
    """
    rows, speeds = [], []
    for i, (free, loaded, item, graph) in enumerate(zip(*(found[v] for v in VARIANTS), strict=True)):
        plain, on_device, reads, merged = (
            to_program(analysis, window=s.submission) for s in (free, loaded, item, graph)
        )
        unchanged = what_if(reads)
        speed = _host_speed(analysis, loaded, item)
        without = what_if(on_device)["measured_us"]
        cases = {
            UNCHANGED: (unchanged["replayed_us"], unchanged["measured_us"]),
            REMOVED: (what_if(reads, remove_waits=True)["predicted_us"], without),
            SCALED: (what_if(reads, remove_waits=True, host_scale=speed)["predicted_us"], without),
            MERGED: (what_if(plain, merge_launches=1_000_000)["predicted_us"], what_if(merged)["measured_us"]),
        }
        rows += [{"case": c, "round": i, "predicted_us": p, "measured_us": m} for c, (p, m) in cases.items()]
        speeds.append({"round": i, "factor": speed})
    return {"what_if": rows, "host_speed": speeds}


def _host_speed(analysis: Any, loaded: Stretch, item: Stretch) -> float:
    """Host time of the same code, a block up to its last launch before the read: without reads over with them."""
    calls, launches = analysis.trace.calls, analysis.launches
    starts = calls.start_ns[launches]
    blocks = find_ranges(analysis, r"^block \d+$")

    def times(stretch: Stretch, count: int | None) -> tuple[float, int]:
        inside = (blocks.host_start_ns >= stretch.start_ns) & (blocks.host_start_ns < stretch.host_end_ns)
        spans = []
        for begin, end in zip(blocks.host_start_ns[inside], blocks.host_end_ns[inside]):
            first, last = np.searchsorted(starts, [begin, end])
            count = count or int(last - first)
            spans.append(int(calls.end_ns[launches[first + count - 1]] - begin))
        return float(np.median(spans)), count or 0

    without, count = times(loaded, None)
    return without / times(item, count)[0]


EXPERIMENT = Experiment(
    slug="tool_first_look",
    group="tools",
    title="A first look at a real trace",
    claim="In a real profile, one host read per block stops submission, empties the queue, and the GPU waits.",
    kind="measured",
    anchor="Section 8.1, Appendix B.6",
    params=FirstLookParams,
    figure=figure_of,
    checks=first_look_checks,
    opens=opens,
    own="trace",
    recorded=recorded,
    measure=measure,
    tests=("tests/traces/test_first_look.py", "tests/measure/test_capture.py"),
    recording=RECORDING,
)
