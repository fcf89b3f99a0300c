"""Count the host waits of a piece of work from the profiler's runtime events."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cuStreamSynchronize",
         "cuEventSynchronize", "cuCtxSynchronize")  # fmt: skip
_MARK = "counted region"


@dataclass(frozen=True)
class HostWaits:
    """Waits seen while `count_host_waits` ran its region.

    Attributes:
        calls: number of each blocking synchronise call.
        pageable_d2h: device-to-host copies into pageable memory; each blocks the host until it has arrived.
        pinned_d2h: copies into pinned memory, which block only through a wait that is counted above.
        launches: runtime calls that started device work.
    """

    calls: dict[str, int]
    pageable_d2h: int
    pinned_d2h: int
    launches: int
    trace: dict[str, Any] = field(repr=False, compare=False, default_factory=dict)

    @property
    def total(self) -> int:
        """Blocking calls. A pageable copy of torch's shows as a copy and its stream synchronise: counted once."""
        return max(sum(self.calls.values()), self.pageable_d2h)


def count_host_waits(region: Callable[[], object], warmup: int = 3) -> HostWaits:
    """Profile one call of `region` after `warmup` calls; the profiler's own synchronisation stays outside.

    Raises:
        RuntimeError: no CUDA device, or the profiler lost the marked region.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("host waits are counted from CUDA runtime events; no CUDA device is visible")
    from torch.profiler import ProfilerActivity, profile, record_function

    for _ in range(warmup):
        region()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function(_MARK):
            region()
        torch.cuda.synchronize()
    handle, path = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    try:
        profiler.export_chrome_trace(path)
        with open(path, encoding="utf-8", errors="replace") as file:
            trace = json.load(file)
    finally:
        os.unlink(path)
    return waits_of_trace(trace)


def waits_of_trace(trace: dict[str, Any], mark: str = _MARK) -> HostWaits:
    """Count waits in the first range named `mark` of a Kineto trace. Copies count by the call that issued them."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    marked = [e for e in events if e.get("name") == mark and e.get("cat") == "user_annotation"]
    if not marked:
        raise RuntimeError(f"the trace holds no range named {mark!r}")
    begin, end = marked[0]["ts"], marked[0]["ts"] + marked[0]["dur"]
    runtime = [
        e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver") and begin <= e["ts"] and e["ts"] <= end
    ]
    issued = {e["args"].get("correlation") for e in runtime}
    copies = [e["name"] for e in events if e.get("cat") == "gpu_memcpy" and e["args"].get("correlation") in issued]
    device = {e["args"].get("correlation") for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")}
    calls = Counter(e["name"] for e in runtime if e["name"] in WAITS)
    return HostWaits(
        calls=dict(calls),
        pageable_d2h=sum("DtoH" in name and "Pageable" in name for name in copies),
        pinned_d2h=sum("DtoH" in name and "Pageable" not in name for name in copies),
        launches=len(issued & device),
        trace=trace,
    )
