"""A folder of ranks made from one real trace, to rehearse the analysis of many ranks."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from workbench.core.files import replace_file


def make_ranks(
    traces: Sequence[str | Path],
    folder: str | Path,
    ranks: int,
    *,
    repeat: int = 1,
    jitter_us: float = 20.0,
    slow: Mapping[int, float] | None = None,
    seed: int = 0,
) -> list[Path]:
    """Write ``rank00000.json.gz``, ... : copies of Kineto traces, each on one rank, apart by random start times.

    Args:
        traces: Kineto .json or .json.gz; rank r is made from trace r modulo their number.
        folder: made if missing.
        ranks: files to write.
        repeat: the trace's events follow each other this many times, steps numbered on.
        jitter_us: standard deviation of the ranks' start times.
        slow: rank -> factor on all its times.
        seed: of the start times.
    """
    target, rng, slow = Path(folder), np.random.default_rng(seed), dict(slow or {})
    target.mkdir(parents=True, exist_ok=True)
    sources = [_load(Path(p)) for p in traces]
    written = []
    for rank in range(ranks):
        source = sources[rank % len(sources)]
        factor, shift = slow.get(rank, 1.0), abs(float(rng.normal(0.0, jitter_us)))
        whole = {k: v for k, v in source.items() if k not in ("traceEvents", "distributedInfo")}
        whole["distributedInfo"] = {"backend": "synthetic", "rank": rank, "world_size": ranks}
        whole["traceEvents"] = _repeated(source["traceEvents"], repeat, factor, shift)
        path = target / f"rank{rank:05d}.json.gz"
        replace_file(path, gzip.compress(json.dumps(whole, separators=(",", ":")).encode(), 1))
        written.append(path)
    return written


def _load(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    return json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)


def _repeated(events: list[dict[str, Any]], repeat: int, factor: float, shift_us: float) -> list[dict[str, Any]]:
    timed = [e for e in events if isinstance(e.get("ts"), (int, float)) and e.get("ph") == "X"]
    start = min(float(e["ts"]) for e in timed)
    length = max(float(e["ts"]) + float(e.get("dur", 0)) for e in timed) - start
    # A correlation that one copy uses must not link to another copy's launch.
    ids = 1 + max((e["args"].get("correlation", 0) for e in timed if isinstance(e.get("args"), dict)), default=0)
    steps = sum(str(e.get("name", "")).startswith("ProfilerStep#") and e.get("cat") == "user_annotation" for e in timed)
    out = [e for e in events if e.get("ph") == "M"]
    for copy in range(repeat):
        for event in timed:
            new = dict(event)
            new["ts"] = start + shift_us + (float(event["ts"]) - start + copy * length) * factor
            new["dur"] = float(event.get("dur", 0)) * factor
            arguments = event.get("args")
            correlation = arguments.get("correlation") if isinstance(arguments, dict) else None
            if copy and isinstance(correlation, int) and correlation > 0:
                new["args"] = {**event["args"], "correlation": correlation + copy * ids}
            name = str(event.get("name", ""))
            if copy and name.startswith("ProfilerStep#"):
                new["name"] = f"ProfilerStep#{int(name.split('#')[1]) + copy * steps}"
            out.append(new)
    return out
