"""Times of a CUDA callable: device time eager and replayed, wall time, host time to submit; A against B interleaved.

Standard library and torch only. Every function returns raw repeats in microseconds; `summary` gives p20, p50, p80.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Call = Callable[[], Any]


def percentile(values: Sequence[float], q: float) -> float:
    """Return the q-quantile (0 to 1) of `values`, linear between neighbours.

    Raises:
        ValueError: no values, or q outside 0 to 1.
    """
    if not values or not 0 <= q <= 1:
        raise ValueError(f"percentile needs values and 0 <= q <= 1; got {len(values)} values, q = {q}")
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def summary(times_us: Sequence[float], prefix: str = "time_us") -> dict[str, float]:
    """Return p20, p50 and p80 of `times_us` under `<prefix>_p20` and so on, rounded to nanoseconds."""
    return {f"{prefix}_p{q}": round(percentile(times_us, q / 100), 3) for q in (20, 50, 80)}


def eager_device_us(call: Call, repeats: int = 30, warmup: int = 3, flush_bytes: int = 0) -> list[float]:
    """Return device time between two events around each eager call.

    A short call is bounded below by its own submission, because the device then waits for the host inside the region.
    `flush_bytes` > 0 writes that much memory before each call, outside the region: the L2 then holds none of its data.
    """
    import torch

    for _ in range(warmup):
        call()
    scratch = torch.empty(flush_bytes, dtype=torch.uint8, device="cuda") if flush_bytes else None
    pairs = []
    for _ in range(repeats):
        if scratch is not None:
            scratch.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in pairs]


def captured_graph(calls: Sequence[Call], warmup: int = 3) -> Any:
    """Capture `calls`, in order, into one CUDA graph after running them `warmup` times on a side stream."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmup):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def graph_us(call: Call | Sequence[Call], copies: int = 10, repeats: int = 20, warmup: int = 3) -> list[float]:
    """Return device time per call from replays of a graph that holds `copies` calls, without submission gaps.

    Several callables (the same work on rotating inputs) are captured in turn.
    """
    calls = [call] if callable(call) else list(call)
    graph = captured_graph([calls[i % len(calls)] for i in range(copies)], warmup=1)
    return [t / copies for t in eager_device_us(graph.replay, repeats=repeats, warmup=warmup)]


def wall_us(call: Call, repeats: int = 30, warmup: int = 3, batch: int = 10) -> list[float]:
    """Return host wall time per call of `batch` back-to-back calls, the wait for the device at the end included."""
    import torch

    for _ in range(warmup):
        call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for _ in range(batch):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter_ns() - start) / 1e3 / batch)
    return times


def submit_us(call: Call, repeats: int = 30, warmup: int = 3) -> list[float]:
    """Return the host's time inside one call on an idle device; a call that waits for the device shows that wait."""
    import torch

    for _ in range(warmup):
        call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1e3)
    torch.cuda.synchronize()
    return times


def interleaved(
    calls: Mapping[str, Call], rounds: int = 10, timer: Callable[[Call], list[float]] | None = None
) -> dict[str, list[float]]:
    """Return pooled repeats of each named call, taken in rounds (A B, then B A), so that drift reaches all alike.

    Args:
        calls: name to callable.
        rounds: how often each is visited.
        timer: call -> repeats in us; default three eager event timings a visit.
    """
    timer = timer or (lambda call: eager_device_us(call, repeats=3, warmup=1))
    out: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        order = list(calls) if turn % 2 == 0 else list(calls)[::-1]
        for name in order:
            out[name] += timer(calls[name])
    return out


def launches(call: Call) -> int:
    """Return how many kernels, copies and fills one call puts on the device, counted by the profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        call()
        torch.cuda.synchronize()
    return sum(1 for event in profiled.events() or [] if event.device_type == torch.autograd.DeviceType.CUDA)


def copy_bandwidth_GBps(size_bytes: int = 1 << 30, repeats: int = 20) -> float:
    """Return this device's copy bandwidth in GB/s (1e9), bytes read plus bytes written, median over `repeats`."""
    import torch

    source = torch.empty(size_bytes // 4, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    times = eager_device_us(lambda: target.copy_(source), repeats=repeats)
    return 2 * source.numel() * 4 / percentile(times, 0.5) / 1e3
