"""The critical microbatch of the schematic: where it lies, and what moves it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.models.crossover import (
    SUBMIT_EAGER,
    SUBMIT_REPLAY,
    DeviceCurve,
    crossing,
    crossing_interval,
    idle_begins,
    largest_microbatch,
    schematic,
)

positive = st.floats(0.05, 50.0)


@given(fixed=positive, per_unit=positive, submit=positive)
def test_device_time_at_the_critical_size_is_the_submission_time(fixed, per_unit, submit):
    curve = DeviceCurve(name="x", fixed=fixed, per_unit=per_unit, limit=1.0)
    at = curve.critical(submit)
    if submit <= fixed:
        assert at == 0.0
    else:
        assert curve.time(np.array([at]))[0] == pytest.approx(submit, rel=1e-9)


@given(fixed=positive, per_unit=positive, x=st.floats(0.0, 100.0))
def test_device_time_grows_by_its_slope(fixed, per_unit, x):
    curve = DeviceCurve(name="x", fixed=fixed, per_unit=per_unit, limit=1.0)
    a, b = curve.time(np.array([x, x + 1.0]))
    assert b - a == pytest.approx(per_unit, rel=1e-6, abs=1e-9)


@given(speed=st.floats(1.01, 8.0))
def test_a_faster_device_needs_a_larger_microbatch(speed):
    for slow, fast in zip(schematic(), schematic(device_speed=speed)):
        assert fast.critical(SUBMIT_EAGER) > slow.critical(SUBMIT_EAGER)
        assert fast.time(np.array([3.0]))[0] == pytest.approx(slow.time(np.array([3.0]))[0] / speed)


@given(cheaper=st.floats(0.2, 0.99))
def test_cheaper_submission_moves_the_crossover_left(cheaper):
    for curve in schematic():
        assert curve.critical(SUBMIT_EAGER * cheaper) < curve.critical(SUBMIT_EAGER)
        assert curve.critical(SUBMIT_REPLAY) < curve.critical(SUBMIT_EAGER)


def test_the_drawn_story():
    h100, b200, b300 = schematic()
    assert [c.name for c in (h100, b200, b300)] == ["H100", "B200", "B300"]
    assert h100.critical(SUBMIT_EAGER) < b200.critical(SUBMIT_EAGER) < b300.critical(SUBMIT_EAGER)
    assert h100.critical(SUBMIT_EAGER) <= h100.limit
    # What memory is for: B300's crossover lies beyond the microbatch that an H100 could hold.
    assert h100.limit < b300.critical(SUBMIT_EAGER) < b300.limit
    assert b300.limit / h100.limit == pytest.approx(288 / 80)


@given(memory=positive, activation=positive)
def test_limits_scale_with_memory_over_activations(memory, activation):
    plain, scaled = schematic(), schematic(memory_scale=memory, activation_scale=activation)
    for a, b in zip(plain, scaled):
        assert b.limit == pytest.approx(a.limit * memory / activation)


@pytest.mark.parametrize("name", ["device_speed", "activation_scale", "memory_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_not_positive_is_refused(name, value):
    with pytest.raises(ValueError, match=name):
        schematic(**{name: value})


def test_tokens_that_fill_the_memory():
    assert largest_microbatch(141e9, 100_000) == pytest.approx(1.41e6)
    with pytest.raises(ValueError, match="activation_bytes_per_token"):
        largest_microbatch(1.0, 0.0)


@pytest.mark.parametrize(
    "share, expected",
    [
        ([0.5, 0.5, 0.0], 2 ** (0.45 / 0.5) * 200),
        ([0.0, 0.0, 0.0], 100.0),
        ([0.5, 0.5, 0.5], float("inf")),
        ([0.5, 0.01, 0.5], float("inf")),
    ],
)
def test_where_idle_begins(share, expected):
    assert idle_begins(np.array([100, 200, 400]), np.array(share), 0.05) == pytest.approx(expected)


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
