"""Submission time and device time of one region of torch code, measured apart.

The device is kept busy by a spin kernel while the host submits, so the host time holds no waiting for the device and
the device time holds no waiting for the host. Standard library and torch only.

Source: report, Sections 8.1 to 8.3 (T_submit, T_device).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Region:
    """Samples of one region.

    Attributes:
        submit_us: host time of each call, device busy elsewhere.
        device_us: device time of each call, from events around it, already queued when it starts.
        launches: device operations of one call, as the profiler counts them (0 when not counted).
        api_us: per launch API, (calls, mean host us) of one call, from the profiler.
        waited: the host was held up by the spin kernel in most calls, so the region synchronizes (or fills the queue).
    """

    submit_us: list[float] = field(default_factory=list)
    device_us: list[float] = field(default_factory=list)
    launches: int = 0
    api_us: dict[str, tuple[int, float]] = field(default_factory=dict)
    waited: bool = False

    @property
    def submit_p50_us(self) -> float:
        """Median submission time."""
        return statistics.median(self.submit_us)

    @property
    def device_p50_us(self) -> float:
        """Median device time."""
        return statistics.median(self.device_us)


def spin_cycles_per_us() -> float:
    """Return how many cycles of the spin kernel last one microsecond on this device, measured."""
    import torch

    from workbench.measure import unstable

    spin = unstable.spin()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    spin(1_000_000)
    torch.cuda.synchronize()
    rates = []
    for _ in range(5):
        start.record()
        spin(4_000_000)
        end.record()
        end.synchronize()
        rates.append(4_000_000 / (start.elapsed_time(end) * 1e3))
    return statistics.median(rates)


def measure_region(
    fn: Callable[[], Any],
    *,
    repeats: int = 20,
    warmup: int = 3,
    per_us: float | None = None,
    count: bool = True,
    align: Callable[[], Any] | None = None,
) -> Region:
    """Measure submission and device time of `fn`, each with the other side out of the way.

    Args:
        fn: the region; must leave its results on the device.
        repeats: timed calls.
        warmup: calls before timing (compilation, allocator, handles).
        per_us: result of `spin_cycles_per_us`, measured when None.
        count: also profile one call for launches and API costs.
        align: puts on the device what lets it begin together with its peers, behind the spin kernel and not timed.
    Returns:
        A `Region`; `waited` is set where the host could not get ahead of the spin kernel. CUDA queues about a thousand
        launches; a region with more blocks until the spin kernel has ended, and counts as waiting.
    """
    import torch

    from workbench.measure import unstable

    spin = unstable.spin()
    per_us = per_us or spin_cycles_per_us()
    for _ in range(warmup):
        fn()
    torch.cuda.synchronize()
    t0 = time.perf_counter_ns()
    fn()
    first = (time.perf_counter_ns() - t0) / 1e3
    torch.cuda.synchronize()
    region = Region()
    spin_us = max(2000.0, 3 * first)
    blocked = 0
    for _ in range(repeats):
        spun, start, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        torch.cuda.synchronize()
        spin(int(spin_us * per_us))
        spun.record()
        if align is not None:
            align()
        start.record()
        t0 = time.perf_counter_ns()
        fn()
        t1 = time.perf_counter_ns()
        ahead = not spun.query()
        end.record()
        torch.cuda.synchronize()
        blocked += not ahead
        region.submit_us.append((t1 - t0) / 1e3)
        region.device_us.append(start.elapsed_time(end) * 1e3)
    region.waited = blocked > repeats // 2
    if count:
        region.launches, region.api_us = count_launches(fn)
    return region


LAUNCHES = ("Launch", "Memcpy", "Memset")
NOT_WORK = ("Synchronize", "Query", "GetDevice", "SetDevice", "Attribute", "Occupancy", "GetLastError", "Captur")
"""Driver calls that submit nothing; the profiler's own waits are among them."""


def count_launches(fn: Callable[[], Any], *, every: bool = False) -> tuple[int, dict[str, tuple[int, float]]]:
    """Profile one call of `fn`: device operations, and per launch API its calls and mean host microseconds.

    `every` also keeps calls that put no work on the device, such as event records and stream waits.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    fn()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        fn()
        torch.cuda.synchronize()
    device = 0
    api: dict[str, list[float]] = {}
    for event in prof.events() or []:
        if str(event.device_type).endswith("CUDA"):
            device += 1
        elif event.name.startswith("cu") and (
            not any(word in event.name for word in NOT_WORK) if every else any(w in event.name for w in LAUNCHES)
        ):
            api.setdefault(event.name, []).append(event.time_range.elapsed_us())
    return device, {k: (len(v), statistics.fmean(v)) for k, v in sorted(api.items())}


def back_to_back(call: Callable[[], Any], calls: int = 8) -> tuple[float, int]:
    """Profile back-to-back calls: the device's idle share, the first two calls left out, and operations of one call.

    Raises:
        ValueError: fewer than three calls.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    if calls < 3:
        raise ValueError(f"calls: expected at least 3, got {calls}")
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    found = profiler.profiler.kineto_results.events()
    # Synchronisations are rows of the device too, but no work.
    spans = sorted(
        (e.start_ns(), e.start_ns() + e.duration_ns())
        for e in found
        if str(e.device_type()).endswith("CUDA") and "Sync" not in e.name()
    )
    launches = round(len(spans) / calls)
    spans = spans[len(spans) * 2 // calls :]
    busy, reach = 0, spans[0][0]
    for start, end in spans:
        busy += max(0, end - max(start, reach))
        reach = max(reach, end)
    return 1.0 - busy / (reach - spans[0][0]), launches
