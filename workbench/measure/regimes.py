"""The development model on its expert-parallel paths: profiler captures cut to one microbatch, and step times.

Standard library and torch only.

Source: report, Appendix B.5 (Figures 74 and 75).
"""

from __future__ import annotations

import bisect
import gzip
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from workbench.measure.processes import join_as_single_rank

VARIANTS: dict[str, dict[str, str]] = {
    "synchronized": {"path": "synchronized", "shared_mode": "stream"},
    "synchronized, wait covered": {"path": "synchronized", "shared_mode": "before_wait"},
    "synchronized, host loop": {"path": "synchronized", "shared_mode": "stream", "grouped_gemm": "host_loop"},
    "rowwise": {"path": "rowwise", "shared_mode": "stream"},
}
"""The paths, Figure 34's order of submission, and the grouped GEMM that reads each expert's count."""

MICROBATCHES = 3
"""Of a captured step: the middle one has steady work before and behind it."""

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_KEPT_CALLS = re.compile(r"Synchronize|StreamWaitEvent|EventRecord|GraphLaunch")
_QUERY = re.compile(r"(Event|Stream)Query")
_KEPT_ARGS = ("correlation", "device", "stream", "context", "bytes")
_NAME_LENGTH = 90


class Bench:
    """Models of all variants over one set of weights, one optimizer, and random tokens; one rank's share of them.

    Args:
        experts: routed experts over all ranks.
        grouped_gemm: implementation of the experts' products where the variant does not name one.
        variants: names of `VARIANTS`.
        seed: of weights and tokens; tokens and random routes differ between ranks.
        transport: of the rowwise path; None: this process is the only rank and makes its own process group.
        small: sizes that a CPU runs in milliseconds, FP32, on the transport's device.
        meet: waits until every rank is here and its device idle; None where this process is the only rank.
    """

    def __init__(
        self,
        *,
        experts: int,
        grouped_gemm: str | None,
        variants: Iterable[str] = tuple(VARIANTS),
        seed: int = 0,
        transport: Any = None,
        small: bool = False,
        meet: Callable[[], None] | None = None,
    ) -> None:
        import torch
        import torch.distributed as dist
        from moe_kernels.model import DevelopmentModel, TrainStep, development_config, make_optimizer, small_config
        from moe_kernels.transport import VirtualTransport

        join_as_single_rank()
        transport = transport if transport is not None else VirtualTransport(1, "cuda")
        self.device = transport.device
        self.meet = meet or self.synchronize
        self.seed = seed + dist.get_rank()
        torch.manual_seed(self.seed)
        self.models: dict[str, Any] = {}
        base = None
        for name in variants:
            wanted = VARIANTS[name]
            options = {"num_experts": experts, "router_mode": "random", "shared_mode": wanted["shared_mode"]}
            model = DevelopmentModel(
                small_config(**options) if small else development_config(**options),
                path=wanted["path"],
                transport=transport if wanted["path"] == "rowwise" else None,
                device=self.device,
                dtype=torch.float32 if small else torch.bfloat16,
                grouped_gemm=wanted.get("grouped_gemm", grouped_gemm),
                seed=seed,
            )
            base = base if base is not None else model
            _share(model, base)
            self.models[name] = model
        assert base is not None
        self.config = base.config
        optimizer = make_optimizer(base)
        group = dist.group.WORLD if dist.get_world_size() > 1 else None
        self.steps: dict[str, Callable[[Any], Any]] = {
            name: TrainStep(model, optimizer, group=group) for name, model in self.models.items()
        }

    def synchronize(self) -> None:
        """Wait for this rank's device."""
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        """Free the symmetric memory. Collective."""
        for model in self.models.values():
            if model.pool is not None:
                model.pool.close()

    def _freeze(self, frozen: bool) -> None:
        """End the rowwise dry run, or begin one: until it has ended, ranks agree on T through their hosts."""
        for model in self.models.values():
            if model.pool is not None:
                model.pool.frozen = frozen

    def batch(self, microbatches: int, sequences: int, length: int) -> list[Any]:
        """Random (tokens, targets) pairs [sequences, length]."""
        import torch

        generator = torch.Generator(device=self.device).manual_seed(self.seed)
        size = (sequences, length)
        return [
            tuple(
                torch.randint(self.config.vocabulary, size, device=self.device, generator=generator) for _ in range(2)
            )
            for _ in range(microbatches)
        ]

    def times_ms(self, microbatches: int, sequences: int, length: int, visits: int) -> dict[str, list[float]]:
        """Wall time of whole steps without a profiler, variants interleaved (A B, then B A), ranks starting together.

        The first visit warms up and is left out. A rank's time ends with its own device's work.
        """
        batch = self.batch(microbatches, sequences, length)
        out: dict[str, list[float]] = {n: [] for n in self.steps}
        for visit in range(visits + 1):
            self._freeze(visit > 0)
            for name in list(self.steps)[:: 1 if visit % 2 == 0 else -1]:
                self.meet()
                start = time.perf_counter_ns()
                self.steps[name](batch)
                self.synchronize()
                if visit:
                    out[name].append((time.perf_counter_ns() - start) / 1e6)
        return out

    def capture(self, variant: str, sequences: int, length: int) -> dict[str, Any]:
        """Profile one step of three microbatches behind a warm-up step and return the middle one's trace, cut.

        Collective: every rank captures the same step.
        """
        from torch.profiler import ProfilerActivity, profile

        batch = self.batch(MICROBATCHES, sequences, length)
        step = self.steps[variant]
        self._freeze(False)
        step(batch)
        self._freeze(True)
        self.meet()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            step(batch)
            self.synchronize()
        handle, path = tempfile.mkstemp(suffix=".json")
        os.close(handle)
        try:
            profiler.export_chrome_trace(path)
            with open(path, encoding="utf-8", errors="replace") as file:
                return cut(json.load(file), f"microbatch {MICROBATCHES // 2}")
        finally:
            os.unlink(path)


def _share(model: Any, base: Any) -> None:
    """Let `model` use the parameters of `base`: one set of weights, one optimizer."""
    for name, parameter in base.named_parameters():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._parameters[leaf] = parameter


def cut(trace: Mapping[str, Any], window: str) -> dict[str, Any]:
    """Keep what a Kineto trace says about one named range: device work, its launches, waits, and named ranges.

    The window runs from the host's start of the range to the end of the device work that it launched. Left out:
    operators, Python frames, calls that launch nothing and wait for nothing, the caching allocator's event queries
    (those inside an operator), all other arguments; long names are cut.

    Raises:
        ValueError: no range of that name.
    """
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and isinstance(e.get("args", {}), dict)]
    named = [e for e in events if e.get("cat") == "user_annotation" and e["name"] == window]
    if not named:
        have = sorted({e["name"] for e in events if e.get("cat") == "user_annotation"})
        raise ValueError(f"no range {window!r} in the trace; it has {', '.join(have[:20]) or 'none'}")
    low, host_end = float(named[0]["ts"]), float(named[0]["ts"]) + float(named[0]["dur"])
    calls = [e for e in events if e.get("cat") in _CALLS]
    inside = {e["args"].get("correlation") for e in calls if low <= float(e["ts"]) <= host_end}
    device = [e for e in events if e.get("cat") in _DEVICE]
    high = max((_end(e) for e in device if e["args"].get("correlation") in inside), default=host_end)

    def overlaps(event: Mapping[str, Any]) -> bool:
        return _end(event) > low and float(event["ts"]) < high

    work = [e for e in device if overlaps(e)]
    owned = {e["args"].get("correlation") for e in work}
    launching = {e["tid"] for e in calls if e["args"].get("correlation") in owned}
    inside_operator = _coverage(e for e in events if e.get("cat") == "cpu_op" and e["name"].startswith("aten::"))

    def kept_for_itself(event: Mapping[str, Any]) -> bool:
        if not overlaps(event) or event["tid"] not in launching:
            return False
        polls = _QUERY.search(event["name"]) and not inside_operator(event)
        return bool(_KEPT_CALLS.search(event["name"]) or polls)

    kept = [e for e in calls if e["args"].get("correlation") in owned or kept_for_itself(e)]
    ranges = [e for e in events if e.get("cat") == "user_annotation" and overlaps(e)]
    return {
        "schemaVersion": trace.get("schemaVersion"),
        "baseTimeNanoseconds": trace.get("baseTimeNanoseconds"),
        "cut": f"{window}: host start to device end; operators, Python frames and other arguments left out",
        "traceEvents": [_small(e) for e in (*ranges, *kept, *work)],
    }


def _end(event: Mapping[str, Any]) -> float:
    return float(event["ts"]) + float(event.get("dur", 0))


def _coverage(spans: Iterable[Mapping[str, Any]]) -> Callable[[Mapping[str, Any]], bool]:
    """Return a test whether an event starts inside one of the spans of its own thread."""
    merged: dict[Any, list[list[float]]] = {}
    for span in sorted(spans, key=lambda e: float(e["ts"])):
        mine = merged.setdefault(span["tid"], [])
        if mine and float(span["ts"]) <= mine[-1][1]:
            mine[-1][1] = max(mine[-1][1], _end(span))
        else:
            mine.append([float(span["ts"]), _end(span)])

    def covered(event: Mapping[str, Any]) -> bool:
        mine = merged.get(event["tid"], [])
        at = bisect.bisect_right(mine, float(event["ts"]), key=lambda s: s[0]) - 1
        return at >= 0 and float(event["ts"]) <= mine[at][1]

    return covered


def _small(event: Mapping[str, Any]) -> dict[str, Any]:
    args = {k: v for k, v in event["args"].items() if k in _KEPT_ARGS}
    kept = {k: event[k] for k in ("ph", "cat", "name", "pid", "tid", "ts", "dur") if k in event}
    return kept | {"name": str(event["name"])[:_NAME_LENGTH], "args": args}


def trace_name(variant: str, length: int, rank: int | None = None) -> str:
    """Return the file name of one capture; one of several ranks says which."""
    name = f"trace_{re.sub(r'[^a-z]+', '_', variant)}_{length}"
    return f"{name}.json.gz" if rank is None else f"{name}_rank{rank}.json.gz"


def packed(trace: Mapping[str, Any]) -> bytes:
    """Return a trace as gzip'd JSON with identifying text taken out, equal bytes for equal traces."""
    from workbench.core.scrub import scrub

    return gzip.compress(json.dumps(scrub(trace), separators=(",", ":")).encode(), 9, mtime=0)


def step_times(options: Mapping[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Return step times in ms by ``sequences x length`` and variant, measured in this process."""
    bench = Bench(experts=options["experts"], grouped_gemm=options["grouped_gemm"], seed=options["seed"])
    return {
        f"{sequences} x {length}": bench.times_ms(options["microbatches"], sequences, length, options["visits"])
        for sequences, length in options["sizes"]
    }
