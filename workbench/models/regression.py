"""Least squares with bootstrap intervals.

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
