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
