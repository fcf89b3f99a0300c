"""Small Kineto files for the tests: one function per kind of event, times in whole nanoseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PID, TID = 100, 7


def us(ns: int) -> str:
    """Microseconds with three decimals, as Kineto writes them."""
    sign = "-" if ns < 0 else ""
    return f"{sign}{abs(ns) // 1000}.{abs(ns) % 1000:03d}"


def event(cat: str, name: str, start: int, end: int, *, pid: Any = PID, tid: Any = TID, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": end - start, "args": args}


def call(name: str, start: int, end: int, correlation: Any, **where: Any) -> dict[str, Any]:
    return event("cuda_runtime", name, start, end, correlation=correlation, **where)


def launch(start: int, end: int, correlation: Any, **where: Any) -> dict[str, Any]:
    return call("cudaLaunchKernel", start, end, correlation, **where)


def kernel(
    start: int, end: int, correlation: Any, *, stream: Any = 7, device: Any = 0, name: str = "kernel", **args: Any
):
    return event(
        "kernel",
        name,
        start,
        end,
        pid=device,
        tid=stream,
        correlation=correlation,
        stream=stream,
        device=device,
        **args,
    )


def d2h(start: int, end: int, correlation: Any, memory: str = "Pageable", *, stream: int = 7, device: int = 0):
    name = f"Memcpy DtoH (Device -> {memory})"
    return event(
        "gpu_memcpy", name, start, end, pid=device, tid=stream, correlation=correlation, stream=stream, device=device
    )


def text(events: list[dict[str, Any]], **top: Any) -> str:
    """The file's text, times written digit by digit."""
    parts = []
    for e in events:
        rest = {k: v for k, v in e.items() if k not in ("ts", "dur")}
        times = "".join(f', "{k}": {us(e[k])}' for k in ("ts", "dur") if k in e)
        parts.append(json.dumps(rest)[:-1] + times + "}")
    head = {"schemaVersion": 1, "distributedInfo": {"rank": 0}, **top}
    return json.dumps(head)[:-1] + ', "traceEvents": [\n' + ",\n".join(parts) + "\n]}"


def write(folder: Path, events: list[dict[str, Any]], name: str = "trace.json", **top: Any) -> Path:
    path = folder / name
    path.write_text(text(events, **top), encoding="utf-8")
    return path
