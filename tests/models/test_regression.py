"""Least squares and curve crossings."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.models.regression import crossing, crossing_interval, least_squares


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


@given(st.floats(0.2, 50), st.floats(0.5, 2.0), st.floats(1, 1000))
def test_crossing_of_power_law_with_constant(scale: float, power: float, submit: float):
    x = np.geomspace(0.01, 1e5, 60)
    exact = (submit / scale) ** (1 / power)
    found = crossing(x, scale * x**power, np.full_like(x, submit))
    if x[0] < exact < x[-1]:
        assert found == pytest.approx(exact, rel=1e-6)


@given(st.floats(1.1, 10))
def test_faster_device_moves_it_right_and_cheaper_submission_left(speed: float):
    x = np.geomspace(1, 1e4, 40)
    device, submit = 2 * x, np.full_like(x, 300.0)
    here = crossing(x, device, submit)
    assert crossing(x, device / speed, submit) > here
    assert crossing(x, device, submit / speed) < here


def test_crossing_at_the_ends():
    x = np.array([1.0, 2.0])
    assert crossing(x, np.array([5.0, 9.0]), np.array([1.0, 1.0])) == 1.0
    assert crossing(x, np.array([0.1, 0.2]), np.array([1.0, 1.0])) == float("inf")


def test_interval_holds_the_crossing_and_narrows_with_less_noise():
    rng = np.random.default_rng(0)
    x = np.geomspace(16, 4096, 9)

    def width(noise: float) -> float:
        device = [rng.normal(v, noise * v, 30) for v in x]
        submit = [rng.normal(400.0, noise * 400, 30) for _ in x]
        middle, low, high = crossing_interval(x, device, submit, draws=300)
        assert low <= middle <= high
        assert low < 400 * 1.1 and high > 400 * 0.9
        return high - low

    assert width(0.2) > 3 * width(0.01)


def test_a_round_that_was_slow_as_a_whole_widens_the_interval():
    rng = np.random.default_rng(1)
    x = np.geomspace(16, 4096, 9)
    device = [np.full((3, 6), v) for v in x]
    steady = [rng.normal(400.0, 4.0, (3, 6)) for _ in x]
    spells = [s + np.array([[0.0], [0.0], [200.0]]) for s in steady]

    def width(submit) -> float:
        _, low, high = crossing_interval(x, device, submit, draws=300)
        return high - low

    pooled = [s.ravel() for s in spells]
    assert width(spells) > 2 * width(pooled) and width(spells) > 10 * width(steady)
