"""Ways of consuming a GPU result, each run behind a spin kernel: did the host wait?

Source: report, Table 13; the patterns beyond the table are ours.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True)
class Pattern:
    """One way of consuming a device result.

    Attributes:
        name: as code.
        call: what is run; its inputs are prepared.
        report: the report's verdict: ``yes``, ``not inherently``, or ``""`` where Table 13 has no such row.
        instead: the synchronization-free replacement, as code or words.
    """

    name: str
    call: Callable[[], Any]
    report: str = ""
    instead: str = ""


def patterns() -> list[Pattern]:
    """Return the patterns in table order, the report's rows first; no pattern changes what another reads."""
    import torch
    import torch.nn.functional as F

    gen = torch.Generator(device="cuda").manual_seed(7)
    n, E = 1 << 14, 32
    x = torch.rand(n, device="cuda", generator=gen)
    s, count, mask = x.sum(), torch.tensor(64, device="cuda"), x > 0.5
    idx = torch.randperm(n, device="cuda", generator=gen)
    ids = torch.randint(0, E, (n,), device="cuda", generator=gen)
    reps, rows = torch.full((256,), 4, device="cuda"), torch.arange(256, device="cuda")
    pinned, out, event = torch.empty(n, pin_memory=True), torch.empty(n, device="cuda"), torch.cuda.Event()

    def event_wait() -> None:
        event.record()
        event.synchronize()

    def stream_wait() -> None:
        event.record()
        torch.cuda.current_stream().wait_event(event)

    def pinned_then_wait() -> float:
        pinned.copy_(x, non_blocking=True)
        event_wait()
        return float(pinned[0])

    w = torch.nn.Parameter(torch.ones(1024, device="cuda"))
    w.grad = torch.ones_like(w)
    clip = partial(torch.nn.utils.clip_grad_norm_, [w], 1e6)
    P, zeros, rest = Pattern, partial(torch.zeros, E, device="cuda"), "torch.zeros(E).scatter_add_(0, ids, ones)"
    later = "pinned non_blocking copy, read it a step later"
    capacity = "allocate a capacity, keep the valid count on the device"
    repeated = partial(torch.repeat_interleave, rows, reps)
    return [
        P("x.item()", s.item, "yes", "keep the scalar a tensor; read metrics every N steps"),
        P("x.cpu() then host use", lambda: float(x.cpu()[0]), "yes", later),
        P("torch.nonzero(x)", lambda: torch.nonzero(mask), "yes", "torch.nonzero_static(x, size=capacity)"),
        P("torch.empty([int(x)])", lambda: torch.empty([int(count)], device="cuda"), "yes", capacity),
        P("x[idx]", lambda: x[idx], "not inherently"),
        P("x.gather(0, idx)", lambda: x.gather(0, idx), "not inherently"),
        P("out.scatter_(0, idx, x)", lambda: out.scatter_(0, idx, x), "not inherently"),
        P("x.tolist()", s.tolist, instead="keep it a tensor"),
        P("x.masked_select(mask)", lambda: x.masked_select(mask), instead="torch.where(mask, x, 0)"),
        P("x[mask]", lambda: x[mask], instead="torch.where(mask, x, 0)"),
        P("x[mask] = 0", lambda: out.__setitem__(mask, 0.0), instead="x.masked_fill_(mask, 0)"),
        P("torch.where(mask, x, 0)", lambda: torch.where(mask, x, 0.0)),
        P("torch.nonzero_static(x, size=n)", lambda: torch.nonzero_static(mask, size=n)),
        P("torch.unique(x)", lambda: torch.unique(ids), instead="sort and a boundary mask on the device"),
        P("torch.bincount(x)", lambda: torch.bincount(ids), instead=rest),
        P("torch.bincount(x, minlength=E)", lambda: torch.bincount(ids, minlength=E), instead=rest),
        P("zeros(E).scatter_add_(0, ids, ones)", lambda: zeros().scatter_add_(0, ids, x)),
        P("repeat_interleave(x, n)", repeated, instead="pass output_size"),
        P("repeat_interleave(x, n, output_size=...)", partial(repeated, output_size=1024)),
        P("F.one_hot(x)", lambda: F.one_hot(ids), instead="F.one_hot(x, num_classes=E) or ids[:, None] == arange(E)"),
        P("F.one_hot(x, num_classes=E)", lambda: F.one_hot(ids, E), instead="ids[:, None] == arange(E)"),
        P("ids[:, None] == arange(E)", lambda: ids[:, None] == rows[:E]),
        P("if x.isnan().any()", lambda: bool(x.isnan().any()), instead="multiply the update by a device 0/1 factor"),
        P("torch.where(isfinite(x).all(), x, 0)", lambda: torch.where(x.isfinite().all(), x, 0.0)),
        P("pinned.copy_(x, non_blocking=True)", lambda: pinned.copy_(x, non_blocking=True)),
        P("pinned copy, event.synchronize()", pinned_then_wait, instead="read the buffer a step later"),
        P("x.to('cpu', non_blocking=True)", lambda: x.to("cpu", non_blocking=True)),
        P("event.record(); event.synchronize()", event_wait, instead="stream.wait_event(event)"),
        P("stream.wait_event(event)", stream_wait),
        P("f'{x}'", lambda: f"{s}", instead="format it when the value is read back"),
        P("torch.tensor([...], device='cuda')", lambda: torch.tensor([1.0, 2.0, 3.0], device="cuda"),
          instead="make it once, or pin and copy with non_blocking"),
        P("x * 2.0", lambda: x * 2.0),
        P("torch.equal(x, y)", lambda: torch.equal(x, out), instead="(x == y).all() kept on the device"),
        P("torch.allclose(x, y)", lambda: torch.allclose(x, out), instead="keep the comparison on the device"),
        P("clip_grad_norm_(params)", clip),
        P("clip_grad_norm_(error_if_nonfinite=True)", partial(clip, error_if_nonfinite=True),
          instead="error_if_nonfinite=False and a device factor"),
    ]  # fmt: skip


def measure_pattern(pattern: Pattern, *, repeats: int, spin_us: float, per_us: float) -> dict[str, Any]:
    """Run one pattern behind a spin kernel and return a row of the table.

    The host waited when the spin kernel had ended by the time the call returned.

    Args:
        pattern: what to run.
        repeats: timed calls.
        spin_us: length of the spin kernel.
        per_us: cycles per microsecond of the spin kernel.
    Returns:
        name, report, waited, waited_share, host_us_p20/p50/p80 (behind the spin), host_us_idle_p50 (idle device),
        debug_mode (what `set_sync_debug_mode` said: ``warned`` or ``silent``), instead.
    """
    import torch

    from workbench.measure import unstable
    from workbench.measure.timing import percentile

    spin = unstable.spin()
    call = pattern.call
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    idle = []
    for _ in range(repeats):
        t0 = time.perf_counter_ns()
        call()
        idle.append((time.perf_counter_ns() - t0) / 1e3)
        torch.cuda.synchronize()
    behind, waits = [], 0
    for _ in range(repeats):
        done = torch.cuda.Event()
        torch.cuda.synchronize()
        spin(int(spin_us * per_us))
        done.record()
        t0 = time.perf_counter_ns()
        call()
        t1 = time.perf_counter_ns()
        waits += done.query()
        behind.append((t1 - t0) / 1e3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    warned = any("synchroniz" in str(w.message).lower() for w in said)
    return {
        "pattern": pattern.name, "report": pattern.report, "waited": waits > repeats // 2,
        "waited_share": waits / repeats, "host_us_p20": percentile(behind, 0.2),
        "host_us_p50": percentile(behind, 0.5), "host_us_p80": percentile(behind, 0.8),
        "host_us_idle_p50": percentile(idle, 0.5), "debug_mode": "warned" if warned else "silent",
        "instead": pattern.instead, "samples": behind,
    }  # fmt: skip
