"""Profile a callable or a block of code with torch.profiler, and judge the trace.

The profiler's own final device synchronise is the only one added; steps follow warm-up steps without a synchronise
between them, so that the window begins in steady state.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.core.files import replacing

if TYPE_CHECKING:
    from workbench.traces.trace import Trace
    from workbench.traces.verify import Verdict

STEP = "ProfilerStep#"
NO_GPU = "needs a CUDA GPU: torch.cuda.is_available() is False here"


def require_gpu(what: str) -> None:
    """Raise RuntimeError, naming what needed it, where there is no usable GPU."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(f"{what} {NO_GPU}")


class Profile(AbstractContextManager):
    """Profiles the body of a `with` statement; afterwards `path` is the trace file.

    Args:
        path: where the trace goes (.json or .json.gz); written under a temporary name, then renamed.
        stacks: record Python stacks, so that waits have source lines; this slows the host.
    """

    def __init__(self, path: str | Path, *, stacks: bool = False) -> None:
        self.path = Path(path)
        self.stacks = stacks
        self._profiler: Any = None

    def __enter__(self) -> Profile:
        from torch.profiler import ProfilerActivity, profile

        require_gpu("profiling")
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], with_stack=self.stacks, acc_events=True
        )
        self._profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profiler.__exit__(*error)
        if error[0] is None:
            suffix = ".json.gz" if self.path.name.endswith(".gz") else ".json"
            with replacing(self.path, suffix) as temporary:
                self._profiler.export_chrome_trace(str(temporary))


def records_device_work() -> bool:
    """Does the profiler see a kernel here? Without the right to CUPTI, or beside another profiler, it sees none."""
    import torch

    from workbench.traces.kineto import read_kineto

    with tempfile.TemporaryDirectory(prefix="headroom-") as folder:
        with Profile(Path(folder) / "probe.json") as profile:
            torch.zeros(1, device="cuda")
        return bool(len(read_kineto(profile.path).ops))


def ran(fn: Callable[[], Any]) -> None:
    """Call a step once.

    Raises:
        TypeError: it returned a coroutine or a generator, so that its body did not run.
    """
    result = fn()
    if inspect.iscoroutine(result):
        result.close()
    if inspect.iscoroutine(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        kind = type(result).__name__.replace("_", " ")
        raise TypeError(f"expected a function that runs the step, got one that returns a {kind}: its body did not run")


def calls(steps: int, warmup: int) -> int:
    """How often `capture` calls: warm-up runs without the profiler, again under it (at least one), and the steps."""
    return warmup + max(1, warmup) + steps


def capture(fn: Callable[[], Any], path: str | Path, *, steps: int = 3, warmup: int = 2, stacks: bool = False) -> Path:
    """Run `fn` in named profiler steps after warm-up runs, half of them profiled too (`calls` in all); write the trace.

    Raises:
        ValueError: steps < 1 or warmup < 0.
        TypeError: `fn` returns a coroutine or a generator.
        RuntimeError: no GPU.
    """
    import torch
    from torch.profiler import record_function

    if steps < 1 or warmup < 0:
        raise ValueError(f"capture: expected steps >= 1 and warmup >= 0, got steps={steps}, warmup={warmup}")
    require_gpu("profiling")
    for _ in range(warmup):
        ran(fn)
    torch.cuda.synchronize()
    with Profile(path, stacks=stacks) as profile:
        for _ in range(max(1, warmup)):
            with record_function("warmup"):
                ran(fn)
        for i in range(steps):
            with record_function(f"{STEP}{i}"):
                ran(fn)
    return profile.path


def steady_window(trace: Trace) -> tuple[int, int] | None:
    """From the start of the first named step to the end of all device work; None where no step is named."""
    from workbench.traces.ranges import steps

    found = steps(trace)
    if not found or not len(trace.ops):
        return None
    return found[0][1][0], max(int(trace.ops.end_ns.max()), found[0][1][0] + 1)


@dataclass(frozen=True)
class StepWaits:
    """What the named steps of a trace did to their host.

    Attributes:
        waits: one dict per wait that held up submission: `kind`, `call`, `line`, `op`, `range`, `duration_ns`.
        pageable_d2h, pinned_d2h: device-to-host copies, by the memory they went to.
        launches: calls that started device work.
        trace: where it was read from.
    """

    waits: list[dict[str, Any]]
    pageable_d2h: int
    pinned_d2h: int
    launches: int
    trace: Trace = field(repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.waits)

    def row(self) -> dict[str, int]:
        """The counts as columns of a recorded table."""
        return {"waits": len(self), "pageable_d2h": self.pageable_d2h, "launches": self.launches}


def step_waits(trace: Trace) -> StepWaits:
    """Judge, by outcome as `workbench.traces.waits` does, what began between the start and end of the named steps.

    The profiler's synchronise lies behind the last step; a step's own last synchronise does not and counts.

    Raises:
        ValueError: the trace names no step, or holds no device work of one: the profiler saw nothing.
    """
    import numpy as np

    from workbench.traces.ranges import steps
    from workbench.traces.trace import D2H, PAGEABLE
    from workbench.traces.waits import describe_waits, find_waits, launch_calls

    found, calls, ops = steps(trace), trace.calls, trace.ops
    if not found:
        raise ValueError(f"host waits: expected a trace with ranges named {STEP}N, got none")

    def inside(start_ns: np.ndarray) -> np.ndarray:
        return (start_ns >= found[0][1][0]) & (start_ns < found[-1][1][1])

    launches = launch_calls(trace)
    launches = launches[inside(calls.start_ns[launches])]
    if not len(launches):
        raise ValueError("host waits: expected device work inside the steps, the profiler recorded none")
    waits = find_waits(trace)
    held = waits.take(np.flatnonzero(waits.blocking & waits.submits & inside(waits.start_ns)))
    called = [{"call": trace.names[i]} for i in calls.name[held.call]]
    read = np.isin(ops.launch, launches) & (ops.copy_kind == D2H)
    pageable = int((read & (ops.host_memory == PAGEABLE)).sum())
    rows = [name | wait for name, wait in zip(called, describe_waits(trace, held), strict=True)]
    return StepWaits(rows, pageable, int(read.sum()) - pageable, len(launches), trace)


def host_waits(fn: Callable[[], Any], *, steps: int = 1, warmup: int = 2, stacks: bool = False) -> StepWaits:
    """Profile a callable (see `capture`) and return the host waits of its steps.

    Raises:
        RuntimeError: no GPU.
        ValueError: the profiler recorded no device work (no right to CUPTI, or beside another profiler).
    """
    from workbench.traces.kineto import read_kineto

    with tempfile.TemporaryDirectory(prefix="headroom-") as folder:
        return step_waits(
            read_kineto(capture(fn, Path(folder) / "trace.json", steps=steps, warmup=warmup, stacks=stacks))
        )


def verify(
    fn: Callable[[], Any],
    *,
    steps: int = 3,
    warmup: int = 2,
    idle_threshold_us: float | None = None,
    stacks: bool = True,
    trace_path: str | Path | None = None,
) -> Verdict:
    """Profile a callable on the GPU and say whether its steps are synchronization-free.

    The verdict comes from a profile without stacks (stacks slow the host and so make idle time); where it fails and
    `stacks` is set, a second profile names the source lines of the waits.

    Args:
        fn: one step; called `calls(steps, warmup)` times (7), and again for the second profile.
        idle_threshold_us: longest tolerated submission-bound idle interval; None takes the default of the verifier.
        trace_path: keep the trace there.
    Raises:
        RuntimeError: no GPU.

    Source: report, Appendix B.6.
    """
    import dataclasses

    from workbench.traces.kineto import read_kineto
    from workbench.traces.verify import IDLE_THRESHOLD_US, verify_trace

    limit = IDLE_THRESHOLD_US if idle_threshold_us is None else idle_threshold_us
    with tempfile.TemporaryDirectory(prefix="headroom-") as folder:
        path = capture(fn, trace_path or Path(folder) / "trace.json", steps=steps, warmup=warmup)
        trace = read_kineto(path)
        verdict = verify_trace(trace, window=steady_window(trace), idle_threshold_us=limit)
        if verdict.offences and stacks:
            second = capture(fn, Path(folder) / "stacks.json", steps=steps, warmup=warmup, stacks=True)
            lines = read_kineto(second)
            named = verify_trace(lines, window=steady_window(lines), idle_threshold_us=limit)
            if named.offences:
                notes = [n for n in verdict.notes if "stacks" not in n]
                notes.append("source lines and wait times are from a second profile, with stacks")
                verdict = dataclasses.replace(verdict, offences=named.offences, notes=notes)
    return verdict
