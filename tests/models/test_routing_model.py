"""The routing model's draws and curves; tests of the kernels compare its routes with theirs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.models import routing


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 40), st.integers(1, 3), st.floats(0, 2), st.integers(0, 99))
def test_draws_are_distinct_valid_experts(ranks, local, tokens, top_k, skew, seed):
    experts = ranks * local
    top_k = min(top_k, experts)
    drawn = routing.skewed_experts(ranks, tokens, top_k, experts, skew, np.random.default_rng(seed))
    assert drawn.shape == (ranks, tokens, top_k)
    assert ((drawn >= 0) & (drawn < experts)).all()
    assert all(len(set(row)) == top_k for row in drawn.reshape(-1, top_k))


def test_skew_concentrates_the_load():
    loads = []
    for skew in (0.0, 0.5, 1.5):
        drawn = routing.skewed_experts(2, 2000, 2, 16, skew, np.random.default_rng(1))
        loads.append(np.bincount(drawn.ravel(), minlength=16).max() / drawn.size)
    assert loads[0] < 0.08 < loads[1] < loads[2]


@settings(max_examples=30)
@given(st.integers(0, 99), st.floats(0, 2))
def test_drop_curve_equals_routing_at_each_factor(seed, skew):
    drawn = routing.skewed_experts(4, 30, 2, 8, skew, np.random.default_rng(seed))
    factors = np.array([0.25, 0.5, 1.0, 1.25, 4.0])
    drops, use = routing.drop_rate_curve(drawn, 8, factors)
    for factor, drop, used in zip(factors, drops, use):
        done = routing.route(drawn, 8, routing.capacity_rows(30, 2, factor))
        assert drop == pytest.approx(done.dropped / drawn.size)
        assert used == pytest.approx(done.capacity_use.mean())
    assert (np.diff(drops) <= 0).all() and drops[-1] == 0


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match=r"experts must have shape \[R, T, K\]; got \[4, 2\]"):
        routing.route(np.zeros((4, 2), dtype=int), 4, 8)
    with pytest.raises(ValueError, match="E = 5, R = 2"):
        routing.route(np.zeros((2, 3, 1), dtype=int), 5, 8)
    with pytest.raises(ValueError, match="capacity must be at least 1; got 0"):
        routing.route(np.zeros((2, 3, 1), dtype=int), 4, 0)
    with pytest.raises(ValueError, match="top_k must be 1 to E = 4; got 5"):
        routing.skewed_experts(2, 3, 5, 4, 0.0, np.random.default_rng(0))
