"""Every quantity of Table 51, implemented once: definition, unit, source and function.

Definitions are in this project's words; the report's terms are in ``data/report/tab51.csv``.

Source: report, Table 51 and Section B.11.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

BF16_REFERENCE_TFLOPs = 2250.0
"""Dense BF16 peak per B300 that Equation 95 divides by, for every row, MXFP8 runs included."""


@dataclass(frozen=True)
class Metric:
    """One quantity of Table 51.

    Attributes:
        slug: short name, key of `METRICS`.
        name: as the report prints it.
        unit: unit of the result.
        definition: in this project's words.
        function: the one implementation.
        evidence: regular expressions; a recording retains the metric where every one matches a column or field name.
    """

    slug: str
    name: str
    unit: str
    definition: str
    function: Callable[..., Any]
    evidence: tuple[str, ...]

    def retained(self, names: Iterable[str]) -> bool:
        """True where column and field `names` of a recording hold this metric."""
        names = list(names)
        return all(any(re.search(pattern, n) for n in names) for pattern in self.evidence)


METRICS: dict[str, Metric] = {}
"""The quantities in the order of Table 51, by slug."""
_TIME = r"(us|ms|s)$"
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _metric(name: str, unit: str, *evidence: str) -> Callable[[_Function], _Function]:
    """Enter a function into `METRICS`: its name is the slug, its docstring's first paragraph the definition."""

    def enter(function: _Function) -> _Function:
        slug, told = function.__name__, (inspect.getdoc(function) or "").partition("\n\n")[0]
        METRICS[slug] = Metric(slug, name, unit, " ".join(told.split()), function, evidence)
        return function

    return enter


def _samples(values: Sequence[float] | np.ndarray, what: str) -> np.ndarray:
    found = np.asarray(values, dtype=np.float64).ravel()
    if found.size == 0 or not np.isfinite(found).all():
        raise ValueError(f"{what}: expected one or more numbers, all finite, got {found.size} with {found[:3]} first")
    return found


def _intervals(values: Any, what: str) -> np.ndarray:
    """Return an [N, 2] array of start, end with end >= start."""
    found = np.asarray(values, dtype=np.float64).reshape(-1, 2)
    if not np.isfinite(found).all() or (found[:, 1] < found[:, 0]).any():
        raise ValueError(f"{what}: expected (start, end) pairs of finite numbers with end >= start")
    return found


def union_length(intervals: Any) -> float:
    """Return the length covered by (start, end) pairs, overlaps counted once; unit of the input."""
    pairs = _intervals(intervals, "intervals")
    if not len(pairs):
        return 0.0
    start, end = pairs[np.argsort(pairs[:, 0], kind="stable")].T
    edge = np.concatenate([start[:1], np.maximum.accumulate(end)[:-1]])
    return float(np.maximum(0.0, end - np.maximum(start, edge)).sum())


@_metric("Steady-state step time", "s", rf"(^|_)step(_wall)?_(time_)?{_TIME}|(^|_)step_.*{_TIME}")
def step_time(step_s: Sequence[float] | np.ndarray, *, warmup: int = 0) -> dict[str, float]:
    """Wall time of one optimizer step after warm-up, from its first forward to the end of the update and cache refresh.

    Args:
        step_s: wall seconds of consecutive steps.
        warmup: steps to leave out at the start.

    Returns:
        count, p20_s, median_s, p80_s, p95_s, mean_s, sd_s (sample standard deviation, 0 for one step).

    Raises:
        ValueError: no step is left, or one is not positive.
    """
    if warmup < 0:
        raise ValueError(f"warmup: expected 0 or more, got {warmup}")
    kept = _samples(np.asarray(step_s, dtype=np.float64).ravel()[warmup:], "step_s after warm-up")
    if (kept <= 0).any():
        raise ValueError("step_s: expected times above 0")
    found = dict(zip(("p20_s", "median_s", "p80_s", "p95_s"), np.percentile(kept, [20, 50, 80, 95])))
    sd = float(kept.std(ddof=1)) if kept.size > 1 else 0.0
    return {"count": kept.size, **found, "mean_s": kept.mean(), "sd_s": sd}


@_metric("Useful tokens/s/GPU", "tokens/s/GPU", r"tokens_per_s")
def useful_tokens_per_s_per_gpu(useful_tokens: float, step_s: float, gpus: int) -> float:
    """Tokens that count in the loss, per second of synchronised step time and GPU. Dropped routes do not remove their
    token.

    Args:
        useful_tokens: tokens of one step over all GPUs.
        step_s: synchronised step time, seconds.
        gpus: number of GPUs.
    """
    if useful_tokens < 0 or not step_s > 0 or gpus < 1:
        raise ValueError(
            f"expected useful_tokens >= 0, step_s > 0, gpus >= 1, got {useful_tokens!r}, {step_s!r}, {gpus!r}"
        )
    return useful_tokens / (step_s * gpus)


@_metric("Useful-model MFU", "fraction of 2250 TFLOP/s (BF16 reference)", r"(^|_)mfu")
def useful_model_mfu(step_flop: float, step_s: float, gpus: int, peak_TFLOPs: float = BF16_REFERENCE_TFLOPs) -> float:
    """Active-model FLOPs of a step over GPUs, time and the BF16 reference peak; recompute and inactive experts add
    nothing.

    Args:
        step_flop: useful model FLOPs of one step over all GPUs, padding left out too.
        step_s: elapsed time of the whole step, seconds.
        gpus: number of GPUs.
        peak_TFLOPs: compute peak per GPU that the result is a fraction of; the default is the B300's dense BF16 peak.

    Raises:
        ValueError: a time, count or peak is not above 0, or the FLOPs are negative.

    Source: report, Equation 95: F / (G T C).
    """
    for name, value in {"step_s": step_s, "gpus": gpus, "peak_TFLOPs": peak_TFLOPs}.items():
        if not value > 0:
            raise ValueError(f"{name}: expected a number above 0, got {value!r}")
    if step_flop < 0:
        raise ValueError(f"step_flop: expected 0 or more, got {step_flop!r}")
    return step_flop / (gpus * step_s * peak_TFLOPs * 1e12)


@_metric(
    "D2H route-shape wall time",
    "count, us",
    r"(sync|wait|d2h).*(count|calls|per_)|(host_)?(waits|syncs)$|(count|n)_(sync|wait)",
    rf"(sync|wait|d2h).*{_TIME}",
)
def d2h_route_shape_wall_time(waits_us: Any, launch_gaps_us: Any = (), gpu_idle_us: Any = ()) -> dict[str, float]:
    """Host waits and copies between router metadata and the launches that need them, with the launch gap and GPU idle
    time of the same timeline.

    Args:
        waits_us: [N, 2] start, end of host waits and copies, microseconds.
        launch_gaps_us: [M, 2] intervals without a CPU launch that those waits caused.
        gpu_idle_us: [I, 2] GPU idle intervals of the same timeline.

    Returns:
        count, wait_us, launch_gap_us, gpu_idle_us; overlapping intervals count once.
    """
    return {
        "count": len(_intervals(waits_us, "waits_us")),
        "wait_us": union_length(waits_us),
        "launch_gap_us": union_length(launch_gaps_us),
        "gpu_idle_us": union_length(gpu_idle_us),
    }


@_metric("Communication exposure", "us", rf"expos.*{_TIME}")
def communication_exposure(communication: Any, compute: Any) -> float:
    """Communication time during which no useful compute runs, with bytes, primitive, group and direction stated beside
    it.

    Args:
        communication: [N, 2] start, end of communication.
        compute: [M, 2] start, end of useful compute on the same clock.
    """
    useful = _intervals(compute, "compute")
    both = np.concatenate([_intervals(communication, "communication"), useful])
    return max(0.0, union_length(both) - union_length(useful))


def busiest_over_mean(counts: Any) -> float:
    """Return the largest count over the mean one: the skew of ranks or experts; 1 where nothing was counted."""
    values = np.asarray(counts, dtype=np.float64)
    return float(values.max() / values.mean()) if values.size and values.sum() else 1.0


@_metric("Route/drop statistics", "assignments, fractions", r"drop", r"accepted|load|offered")
def route_drop_statistics(
    offered_SE: Any, accepted_SE: Any, *, capacity_rows: int, experts_per_rank: int
) -> dict[str, Any]:
    """Assignments offered and accepted, drop rate in all and per source, load per expert, use of capacity, skew of
    ranks.

    Args:
        offered_SE: [S, E] assignments that source rank S offered to expert E.
        accepted_SE: [S, E] assignments kept.
        capacity_rows: rows of each destination rank.
        experts_per_rank: E / ranks.

    Returns:
        offered, accepted, drop_rate, drop_rate_per_source [S], load_per_expert [E] (accepted), load_max_over_mean,
        capacity_utilization (accepted rows over all capacity), rank_skew (busiest rank over mean, accepted rows).

    Raises:
        ValueError: shapes differ, more was accepted than offered, a rank holds more than its capacity.
    """
    offered, accepted = np.asarray(offered_SE), np.asarray(accepted_SE)
    if offered.ndim != 2 or offered.shape != accepted.shape:
        raise ValueError(f"expected two [S, E] arrays of one shape, got {offered.shape} and {accepted.shape}")
    if experts_per_rank < 1 or offered.shape[1] % experts_per_rank:
        raise ValueError(f"experts_per_rank: expected a divisor of E = {offered.shape[1]}, got {experts_per_rank}")
    if (accepted < 0).any() or (accepted > offered).any():
        raise ValueError("expected 0 <= accepted <= offered everywhere")
    per_rank = accepted.sum(0).reshape(-1, experts_per_rank).sum(1)
    if capacity_rows < 1 or per_rank.max(initial=0) > capacity_rows:
        raise ValueError(
            f"capacity_rows: expected at least {per_rank.max(initial=1)}, the fullest rank, got {capacity_rows}"
        )
    total, kept, load, by_source = int(offered.sum()), int(accepted.sum()), accepted.sum(0), offered.sum(1)
    rate_S = np.divide(by_source - accepted.sum(1), by_source, out=np.zeros(len(by_source)), where=by_source > 0)
    return {
        "offered": total,
        "accepted": kept,
        "drop_rate": (total - kept) / total if total else 0.0,
        "drop_rate_per_source": rate_S.tolist(),
        "load_per_expert": load.tolist(),
        "load_max_over_mean": busiest_over_mean(load),
        "capacity_utilization": kept / (capacity_rows * len(per_rank)),
        "rank_skew": busiest_over_mean(per_rank),
    }


@_metric("Peak device memory", "bytes per rank", r"(peak|max).*(memory|alloc|MiB|GiB|bytes)")
def peak_device_memory(allocated_bytes: Sequence[float], reserved_bytes: Sequence[float]) -> dict[str, float]:
    """Greatest allocated and reserved bytes of a rank since a declared reset.

    Args:
        allocated_bytes: maximum allocated bytes per rank.
        reserved_bytes: maximum reserved bytes per rank.
    """
    allocated, reserved = _samples(allocated_bytes, "allocated_bytes"), _samples(reserved_bytes, "reserved_bytes")
    if allocated.shape != reserved.shape or (allocated > reserved).any():
        raise ValueError("expected one allocated and one reserved value per rank, allocated <= reserved")
    return {
        "allocated_bytes": float(allocated.max()),
        "reserved_bytes": float(reserved.max()),
        "median_rank_allocated_bytes": float(np.median(allocated)),
    }


@_metric("Lease high-water", "slots", r"high_water")
def lease_high_water(events: Iterable[int]) -> int:
    """Most saved-payload slots checked out at once.

    Args:
        events: +1 (check-out) and -1 (return) in order.

    Raises:
        ValueError: a slot came back that was not out, or an event is neither +1 nor -1.
    """
    out = high = 0
    for i, event in enumerate(events):
        if event not in (1, -1):
            raise ValueError(f"event {i}: expected +1 or -1, got {event!r}")
        out += event
        if out < 0:
            raise ValueError(f"event {i}: a slot was returned that was not out")
        high = max(high, out)
    return high


@_metric(
    "Checkpoint peak/time", "bytes, s", rf"(checkpoint|save|load).*{_TIME}", r"(checkpoint|save|load).*(bytes|MiB)"
)
def checkpoint_peak_time(before_bytes: float, peak_bytes: float, seconds: float) -> dict[str, float]:
    """Memory before and at the peak of a save or load, and its elapsed time."""
    if not 0 <= before_bytes <= peak_bytes or not seconds > 0:
        got = f"{before_bytes!r}, {peak_bytes!r}, {seconds!r}"
        raise ValueError(f"expected 0 <= before_bytes <= peak_bytes and seconds > 0, got {got}")
    added = peak_bytes - before_bytes
    return {"before_bytes": before_bytes, "peak_bytes": peak_bytes, "added_bytes": added, "seconds": seconds}


@_metric("Scaling efficiency", "fraction", r"scaling_efficiency")
def scaling_efficiency(throughput: float, gpus: int, reference_throughput: float, reference_gpus: int) -> float:
    """Useful throughput per GPU over that of a declared smallest reference, under a stated strong or weak batch rule.

    Args:
        throughput: useful tokens/s (or TFLOP/s) over all GPUs.
        gpus: its GPUs.
        reference_throughput: the same quantity of the reference, under the declared strong or weak batch rule.
        reference_gpus: its GPUs.
    """
    if throughput < 0 or not reference_throughput > 0 or gpus < 1 or reference_gpus < 1:
        raise ValueError("expected throughput >= 0, reference_throughput > 0 and one or more GPUs each")
    return (throughput / gpus) / (reference_throughput / reference_gpus)


def field_names(record: Mapping[str, Any], columns: Iterable[str] = ()) -> list[str]:
    """Return the names that a recording answers to: table columns and record keys whose value is not null."""
    names = list(columns)

    def walk(value: Any) -> None:
        if isinstance(value, Mapping):
            for k, v in value.items():
                if v is not None:
                    names.append(str(k))
                    walk(v)

    for group in ("protocol", "raw_outputs"):
        walk(record.get(group, {}))
    return names
