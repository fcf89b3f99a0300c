"""Least squares with bootstrap intervals, and the crossing of two sampled curves.

NumPy only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Fit:
    """Ordinary least squares.

    Attributes:
        coefficients: [P].
        low: [P], lower end of the interval.
        high: [P], upper end.
        residuals: [N], observed minus fitted.
        r2: share of variance explained.
    """

    coefficients: np.ndarray
    low: np.ndarray
    high: np.ndarray
    residuals: np.ndarray
    r2: float


def least_squares(
    design: np.ndarray, observed: np.ndarray, *, level: float = 0.95, draws: int = 1000, seed: int = 0
) -> Fit:
    """Fit `observed ~ design @ coefficients` with intervals from resampled rows.

    Args:
        design: [N, P] float.
        observed: [N] float.
        level: coverage of the interval.
        draws: bootstrap resamples.
        seed: of the resampling.
    Raises:
        ValueError: fewer rows than columns, or columns that are not independent.
    """
    n, p = design.shape
    if n <= p or np.linalg.matrix_rank(design) < p:
        raise ValueError(
            f"design of shape {n} x {p} cannot be fitted: expected more rows than columns, independent columns"
        )
    coefficients = np.linalg.lstsq(design, observed, rcond=None)[0]
    residuals = observed - design @ coefficients
    rng = np.random.default_rng(seed)
    kept = []
    while len(kept) < draws:
        pick = rng.integers(0, n, n)
        sample = design[pick]
        if np.linalg.matrix_rank(sample) == p:
            kept.append(np.linalg.lstsq(sample, observed[pick], rcond=None)[0])
    tail = 100 * (1 - level) / 2
    low, high = np.percentile(kept, [tail, 100 - tail], axis=0)
    total = float(((observed - observed.mean()) ** 2).sum())
    r2 = 1.0 - float((residuals**2).sum()) / total if total else 1.0
    return Fit(coefficients, low, high, residuals, r2)


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
