"""Ways of consuming a GPU result, each run behind a spin kernel: did the host wait?

Source: report, Table 13; the patterns beyond the table are ours.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Pattern:
    """One way of consuming a device result.

    Attributes:
        name: as code.
        report: the report's verdict: ``yes``, ``not inherently``, or ``""`` where Table 13 has no such row.
        make: returns the callable to run, with its inputs prepared.
        instead: the synchronization-free replacement, as code or words.
    """

    name: str
    report: str
    make: Callable[[Any], Callable[[], Any]]
    instead: str = ""


def _inputs(torch: Any) -> dict[str, Any]:
    gen = torch.Generator(device="cuda").manual_seed(7)
    n = 1 << 14
    x = torch.rand(n, device="cuda", generator=gen)
    return {
        "x": x,
        "s": x.sum(),
        "n": torch.tensor(64, device="cuda"),
        "mask": x > 0.5,
        "idx": torch.randperm(n, device="cuda", generator=gen),
        "ids": torch.randint(0, 32, (n,), device="cuda", generator=gen),
        "reps": torch.full((256,), 4, device="cuda"),
        "rows": torch.arange(256, device="cuda"),
        "pinned": torch.empty(n, pin_memory=True),
        "event": torch.cuda.Event(),
        "out": torch.empty(n, device="cuda"),
    }


def _pinned_then_wait(v: dict[str, Any]) -> Any:
    v["pinned"].copy_(v["x"], non_blocking=True)
    v["event"].record()
    v["event"].synchronize()
    return float(v["pinned"][0])


def _event_wait(v: dict[str, Any]) -> None:
    v["event"].record()
    v["event"].synchronize()


def _stream_wait(torch: Any, v: dict[str, Any]) -> None:
    v["event"].record()
    torch.cuda.current_stream().wait_event(v["event"])


def patterns() -> list[Pattern]:
    """Return the patterns in table order: the report's rows first."""
    import torch
    import torch.nn.functional as F

    def on(f: Callable[[dict[str, Any]], Any]) -> Callable[[Any], Callable[[], Any]]:
        def make(v: dict[str, Any]) -> Callable[[], Any]:
            return lambda: f(v)

        return make

    P = Pattern
    return [
        P("x.item()", "yes", on(lambda v: v["s"].item()), "keep the scalar a tensor; read metrics every N steps"),
        P(
            "x.cpu() then host use",
            "yes",
            on(lambda v: float(v["x"].cpu()[0])),
            "pinned non_blocking copy, read it a step later",
        ),
        P("torch.nonzero(x)", "yes", on(lambda v: torch.nonzero(v["mask"])), "torch.nonzero_static(x, size=capacity)"),
        P(
            "torch.empty([int(x)])",
            "yes",
            on(lambda v: torch.empty([int(v["n"])], device="cuda")),
            "allocate a capacity, keep the valid count on the device",
        ),
        P("x[idx]", "not inherently", on(lambda v: v["x"][v["idx"]]), ""),
        P("x.gather(0, idx)", "not inherently", on(lambda v: v["x"].gather(0, v["idx"])), ""),
        P("out.scatter_(0, idx, x)", "not inherently", on(lambda v: v["out"].scatter_(0, v["idx"], v["x"])), ""),
        P("x.tolist()", "", on(lambda v: v["s"].tolist()), "keep it a tensor"),
        P("x.masked_select(mask)", "", on(lambda v: v["x"].masked_select(v["mask"])), "torch.where(mask, x, 0)"),
        P("x[mask]", "", on(lambda v: v["x"][v["mask"]]), "torch.where(mask, x, 0)"),
        P("x[mask] = 0", "", on(lambda v: v["out"].__setitem__(v["mask"], 0.0)), "x.masked_fill_(mask, 0)"),
        P("torch.where(mask, x, 0)", "", on(lambda v: torch.where(v["mask"], v["x"], 0.0)), ""),
        P("torch.nonzero_static(x, size=n)", "", on(lambda v: torch.nonzero_static(v["mask"], size=1 << 14)), ""),
        P("torch.unique(x)", "", on(lambda v: torch.unique(v["ids"])), "sort and a boundary mask on the device"),
        P("torch.bincount(x)", "", on(lambda v: torch.bincount(v["ids"])), "torch.zeros(E).scatter_add_(0, ids, ones)"),
        P(
            "torch.bincount(x, minlength=E)",
            "",
            on(lambda v: torch.bincount(v["ids"], minlength=32)),
            "torch.zeros(E).scatter_add_(0, ids, ones)",
        ),
        P(
            "zeros(E).scatter_add_(0, ids, ones)",
            "",
            on(lambda v: torch.zeros(32, device="cuda").scatter_add_(0, v["ids"], v["x"])),
            "",
        ),
        P(
            "repeat_interleave(x, n)",
            "",
            on(lambda v: torch.repeat_interleave(v["rows"], v["reps"])),
            "pass output_size",
        ),
        P(
            "repeat_interleave(x, n, output_size=...)",
            "",
            on(lambda v: torch.repeat_interleave(v["rows"], v["reps"], output_size=1024)),
            "",
        ),
        P(
            "F.one_hot(x)",
            "",
            on(lambda v: F.one_hot(v["ids"])),
            "F.one_hot(x, num_classes=E) or ids[:, None] == arange(E)",
        ),
        P(
            "F.one_hot(x, num_classes=E)",
            "",
            on(lambda v: F.one_hot(v["ids"], num_classes=32)),
            "ids[:, None] == arange(E)",
        ),
        P("ids[:, None] == arange(E)", "", on(lambda v: v["ids"][:, None] == v["rows"][:32]), ""),
        P(
            "if x.isnan().any()",
            "",
            on(lambda v: 1 if v["x"].isnan().any() else 0),
            "multiply the update by a device 0/1 factor",
        ),
        P(
            "torch.where(isfinite(x).all(), x, 0)",
            "",
            on(lambda v: torch.where(v["x"].isfinite().all(), v["x"], 0.0)),
            "",
        ),
        P("pinned.copy_(x, non_blocking=True)", "", on(lambda v: v["pinned"].copy_(v["x"], non_blocking=True)), ""),
        P("pinned copy, event.synchronize()", "", on(_pinned_then_wait), "read the buffer a step later"),
        P("x.to('cpu', non_blocking=True)", "", on(lambda v: v["x"].to("cpu", non_blocking=True)), ""),
        P("event.record(); event.synchronize()", "", on(_event_wait), "stream.wait_event(event)"),
        P("stream.wait_event(event)", "", on(lambda v: _stream_wait(torch, v)), ""),
        P("f'{x}'", "", on(lambda v: f"{v['s']}"), "format it when the value is read back"),
        P(
            "torch.tensor([...], device='cuda')",
            "",
            on(lambda v: torch.tensor([1.0, 2.0, 3.0], device="cuda")),
            "make it once, or pin and copy with non_blocking",
        ),
        P("x * 2.0", "", on(lambda v: v["x"] * 2.0), ""),
        P("torch.equal(x, y)", "", on(lambda v: torch.equal(v["x"], v["out"])), "(x == y).all() kept on the device"),
        P(
            "torch.allclose(x, y)",
            "",
            on(lambda v: torch.allclose(v["x"], v["out"])),
            "keep the comparison on the device",
        ),
        P("clip_grad_norm_(params)", "", _clip(False), ""),
        P("clip_grad_norm_(error_if_nonfinite=True)", "", _clip(True), "error_if_nonfinite=False and a device factor"),
    ]


def _clip(strict: bool) -> Callable[[Any], Callable[[], Any]]:
    def make(v: dict[str, Any]) -> Callable[[], Any]:
        import torch

        w = torch.nn.Parameter(torch.ones(1024, device="cuda"))
        w.grad = torch.ones_like(w)
        return lambda: torch.nn.utils.clip_grad_norm_([w], 1e6, error_if_nonfinite=strict)

    return make


def measure_pattern(pattern: Pattern, *, repeats: int, spin_us: float, per_us: float) -> dict[str, Any]:
    """Run one pattern behind a spin kernel and return a row of the table.

    The host waited when the spin kernel had ended by the time the call returned.

    Args:
        pattern: what to run.
        repeats: timed calls.
        spin_us: length of the spin kernel.
        per_us: cycles per microsecond of `torch.cuda._sleep`.
    Returns:
        name, report, waited, waited_share, host_us_p20/p50/p80 (behind the spin), host_us_idle_p50 (idle device),
        debug_mode (what `set_sync_debug_mode` said: ``warned`` or ``silent``), instead.
    """
    import torch

    from workbench.measure.timing import percentile

    values = _inputs(torch)
    call = pattern.make(values)
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
        torch.cuda._sleep(int(spin_us * per_us))
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
        "pattern": pattern.name,
        "report": pattern.report,
        "waited": waits > repeats // 2,
        "waited_share": waits / repeats,
        "host_us_p20": percentile(behind, 0.2),
        "host_us_p50": percentile(behind, 0.5),
        "host_us_p80": percentile(behind, 0.8),
        "host_us_idle_p50": percentile(idle, 0.5),
        "debug_mode": "warned" if warned else "silent",
        "instead": pattern.instead,
        "samples": behind,
    }
