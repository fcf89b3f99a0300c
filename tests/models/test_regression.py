"""Least squares."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.models.regression import least_squares


def test_recovers_known_coefficients_and_covers_them():
    rng = np.random.default_rng(3)
    design = np.column_stack([np.ones(80), rng.integers(0, 200, (80, 3))]).astype(float)
    truth = np.array([5.0, 2.5, 1.2, 0.4])
    fit = least_squares(design, design @ truth + rng.normal(0, 1.0, 80), level=0.999, draws=2000)
    assert np.all((fit.low < truth) & (truth < fit.high)), (fit.low, fit.high)
    assert fit.r2 > 0.99
    assert abs(fit.residuals.mean()) < 1e-9  # an intercept is in the design


def test_refuses_what_cannot_be_fitted():
    with pytest.raises(ValueError, match="independent columns"):
        least_squares(np.ones((5, 2)), np.ones(5))
