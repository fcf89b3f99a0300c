"""An independent, slow reading of a list of event dicts: plain loops over every instant."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def analyse(events: list[dict[str, Any]], step: int = 1000) -> dict[int, dict[str, Any]]:
    """Per device: window, idle and copy-only time, headroom at every `step` ns; times must be multiples of `step`."""
    calls = {e["args"]["correlation"]: e for e in events if e["cat"] == "cuda_runtime"}
    by_device: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for e in events:
        if e["cat"] in DEVICE and not (e["ts"] == 0 and e["dur"] == 0):
            by_device[e["args"]["device"]].append(e)
    out = {}
    for device, ops in by_device.items():
        low = min(o["ts"] for o in ops)
        high = max(o["ts"] + o["dur"] for o in ops)
        first = {}
        for o in ops:
            c = o["args"]["correlation"]
            first[c] = min(first.get(c, o["ts"]), o["ts"])
        idle = copy_only = 0
        headroom = []
        for t in range(low, high, step):
            running = [o for o in ops if o["ts"] <= t < o["ts"] + o["dur"]]
            idle += step * (not running)
            copy_only += step * (bool(running) and all(o["cat"] == "gpu_memcpy" for o in running))
            h = 0
            for o in ops:
                c = calls.get(o["args"]["correlation"])
                submitted = min(c["ts"] + c["dur"], first[o["args"]["correlation"]]) if c else o["ts"]
                if submitted <= t:
                    done = max(0, min(t, o["ts"] + o["dur"]) - o["ts"])
                    h += o["dur"] - done
            headroom.append((t, h))
        out[device] = {"window": (low, high), "idle": idle, "copy_only": copy_only, "headroom": headroom}
    return out
