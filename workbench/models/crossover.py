"""The critical microbatch: where device time meets submission time, of the schematic and of measured curves.

NumPy only. Source: report, Section 8.3, Equation 12 and Figure 32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class DeviceCurve:
    """Device time of one region against microbatch size: a fixed part and a part per unit of work.

    Attributes:
        name: GPU.
        fixed: time of the region's shortest form (latency of its kernel sequence), figure time units.
        per_unit: time per unit of microbatch.
        limit: largest microbatch that fits in memory.
    """

    name: str
    fixed: float
    per_unit: float
    limit: float

    def time(self, microbatch: np.ndarray) -> np.ndarray:
        """Return device time at each microbatch size."""
        return self.fixed + self.per_unit * np.asarray(microbatch, dtype=float)

    def critical(self, submit: float) -> float:
        """Return the microbatch at which device time reaches `submit`; 0 where it does from the start.

        A crossing beyond `limit` cannot be reached on this device and is returned as it is.
        """
        return max(0.0, (submit - self.fixed) / self.per_unit)


SUBMIT_EAGER = 2.4
SUBMIT_REPLAY = 0.8
"""Host time per microbatch of the schematic, figure time units: the report prints none, these are ours."""


def schematic(
    *, device_speed: float = 1.0, activation_scale: float = 1.0, memory_scale: float = 1.0
) -> tuple[DeviceCurve, ...]:
    """Return the three device curves of the schematic.

    The report prints no values for its curves. Ours: an H100 takes 1.00 time unit per unit of microbatch; B200 and
    B300 are drawn 1.7 and 2.4 times faster, so that the three crossings stand apart as in the report; memory limits
    are in the proportion of the datasheets' 80, 180 and 288 GB.

    Args:
        device_speed: makes every device this much faster.
        activation_scale: activation bytes per unit of microbatch, relative to the drawn ones.
        memory_scale: device memory, relative to the datasheets'.

    Raises:
        ValueError: a scale that is not positive.
    """
    scales = {"device_speed": device_speed, "activation_scale": activation_scale, "memory_scale": memory_scale}
    for name, value in scales.items():
        if not (value > 0 and np.isfinite(value)):
            raise ValueError(f"{name} must be positive and finite, got {value}")
    drawn = (("H100", 1.0, 80.0), ("B200", 1.7, 180.0), ("B300", 2.4, 288.0))
    return tuple(
        DeviceCurve(
            name=name,
            fixed=0.35 / (speed * device_speed),
            per_unit=1.0 / (speed * device_speed),
            limit=4.0 * gigabytes / 80.0 * memory_scale / activation_scale,
        )
        for name, speed, gigabytes in drawn
    )


def largest_microbatch(memory_bytes: float, activation_bytes_per_token: float) -> float:
    """Return the tokens whose activations fill `memory_bytes`: where a device's curve ends.

    Raises:
        ValueError: bytes per token are not positive.
    """
    if not activation_bytes_per_token > 0:
        raise ValueError(f"activation_bytes_per_token must be positive, got {activation_bytes_per_token}")
    return memory_bytes / activation_bytes_per_token


def idle_begins(sizes: np.ndarray, idle: np.ndarray, threshold: float) -> float:
    """Return the size below which the device's idle share exceeds `threshold`, interpolated in log size.

    Args:
        sizes: [N] increasing, positive.
        idle: [N] idle shares.
        threshold: share that counts as running dry.

    Returns:
        The largest such size; the first size where no share exceeds it, infinity where the last one does.
    """
    sizes, idle = np.asarray(sizes, dtype=float), np.asarray(idle, dtype=float)
    above = np.flatnonzero(idle > threshold)
    if not above.size:
        return float(sizes[0])
    j = int(above[-1])
    if j == len(sizes) - 1:
        return float("inf")
    part = (idle[j] - threshold) / (idle[j] - idle[j + 1])
    return float(sizes[j] * (sizes[j + 1] / sizes[j]) ** part)


def crossing(x: np.ndarray, device: np.ndarray, submit: np.ndarray) -> float:
    """Return the least x where `device` reaches `submit`, by log-log interpolation between samples.

    Args:
        x: [N] increasing, positive.
        device: [N] positive.
        submit: [N] positive.
    Returns:
        The crossing; `x[0]` where device is at or above from the start, infinity where it never gets there.

    Source: report, Equation 12.
    """
    gap = np.log(device) - np.log(submit)
    if gap[0] >= 0:
        return float(x[0])
    above = np.flatnonzero(gap >= 0)
    if not above.size:
        return float("inf")
    j = int(above[0])
    share = -gap[j - 1] / (gap[j] - gap[j - 1])
    return float(np.exp(np.log(x[j - 1]) + share * (np.log(x[j]) - np.log(x[j - 1]))))


def crossing_interval(
    x: np.ndarray,
    device: list[np.ndarray],
    submit: list[np.ndarray],
    *,
    level: float = 0.95,
    draws: int = 1000,
    seed: int = 0,
) -> tuple[float, float, float]:
    """Return (crossing of the medians, low, high), the interval from resampled repeats at every x.

    Args:
        x: [N] increasing.
        device: N arrays of repeats, [repeats] or [rounds, repeats].
        submit: N arrays of repeats, alike. Rounds are resampled first and repeats inside them, so that a spell that
            slowed one whole round widens the interval.
        level: coverage.
        draws: bootstrap resamples.
        seed: of the resampling.
    """
    middle = crossing(x, np.array([np.median(d) for d in device]), np.array([np.median(s) for s in submit]))
    rng = np.random.default_rng(seed)

    def resampled(samples: list[np.ndarray]) -> np.ndarray:
        columns = []
        for values in map(np.atleast_2d, samples):
            rounds, repeats = values.shape
            pick = rng.integers(0, rounds, (draws, rounds, 1))
            inside = rng.integers(0, repeats, (draws, rounds, repeats))
            columns.append(np.median(values[pick, inside], axis=(1, 2)))
        return np.stack(columns, axis=1)

    found = [crossing(x, d, s) for d, s in zip(resampled(device), resampled(submit))]
    tail = (1 - level) / 2
    ordered = sorted(found)
    return middle, ordered[int(tail * (draws - 1))], ordered[int((1 - tail) * (draws - 1))]
