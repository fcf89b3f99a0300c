"""Equation 95 and the conversions around it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.core.report_tables import report_table
from workbench.models import mfu as m

positive = st.floats(1e-3, 1e6)


def test_equation_95_by_hand():
    # 8 GPUs, 2 s, 18e15 FLOPs: 18e15 / (8 x 2 x 2.25e15) = 0.5
    assert m.mfu(18e15, 2.0, 8) == 0.5
    assert m.mfu(0.0, 2.0, 8) == 0
    assert m.BF16_REFERENCE_TFLOPs == 2250


@pytest.mark.parametrize("row", report_table(50).to_dicts(), ids=lambda r: r["anchor"])
def test_mfu_of_each_observation_is_a_fraction(row):
    assert m.mfu_of_rate(row["TFLOPs_per_gpu"]) == pytest.approx(row["TFLOPs_per_gpu"] / 2250)
    assert 0.3 < m.mfu_of_rate(row["TFLOPs_per_gpu"]) < 0.41


@given(positive, positive, st.integers(1, 4096))
def test_mfu_is_linear_in_work_and_inverse_in_time_and_gpus(flop, seconds, gpus):
    base = m.mfu(flop * 1e12, seconds, gpus)
    assert m.mfu(2 * flop * 1e12, seconds, gpus) == pytest.approx(2 * base)
    assert m.mfu(flop * 1e12, 2 * seconds, gpus) == pytest.approx(base / 2)
    assert m.mfu(flop * 1e12, seconds, 2 * gpus) == pytest.approx(base / 2)
    assert m.mfu(flop * 1e12, seconds, gpus, 2 * 2250) == pytest.approx(base / 2)


@given(st.floats(1e3, 1e9), positive, st.integers(1, 4096), st.floats(1e6, 1e12))
def test_step_time_and_mfu_close_the_loop(batch, tokens, gpus, flop):
    """MFU from the step equals MFU from the rate: Equation 95 both ways."""
    step = m.step_s(batch, tokens, gpus)
    assert m.mfu(batch * flop, step, gpus) == pytest.approx(m.mfu_of_rate(tokens * flop / 1e12))


def test_token_budget_in_days():
    # 1e12 tokens at 1e4 tokens/s/GPU on 512 GPUs: 1e12 / 5.12e6 s = 195312.5 s
    assert m.days_for_tokens(1e12, 1e4, 512) == pytest.approx(195312.5 / 86400)


def test_flop_per_token_by_hand():
    assert m.flop_per_token(1e9) == 6e9
    # one layer, width 1024, sequence 8192, causal: forward 2 matmuls x 2 x 1024 x 4096, training three times that
    assert m.flop_per_token(1e9, layers=1, attention_width=1024, sequence=8192) - 6e9 == 3 * 2 * 2 * 1024 * 4096


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda: m.mfu(1, 0, 1), "step_s"),
        (lambda: m.mfu(1, 1, 0), "gpus"),
        (lambda: m.mfu(-1, 1, 1), "step_flop"),
        (lambda: m.step_s(1, 0, 1), "tokens_per_s_per_gpu"),
        (lambda: m.tokens_per_s_per_gpu(1, 0), "flop_per_token"),
        (lambda: m.flop_per_token(0), "active_params"),
        (lambda: m.mfu(1, float("nan"), 1), "step_s"),
    ],
)
def test_bad_values_name_the_argument(call, name):
    with pytest.raises(ValueError, match=name):
        call()
