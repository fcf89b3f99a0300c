"""Byte and operation counts against the shapes' own arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.models import moe_cost

SIZES = st.integers(1, 4096)


def nbytes(*arrays: tuple[tuple[int, ...], type]) -> int:
    return sum(int(np.prod(shape)) * np.dtype(kind).itemsize for shape, kind in arrays)


HALF, FULL, INDEX, COUNT = np.uint16, np.float32, np.int32, np.int64


@given(t=SIZES, k=SIZES, d=SIZES, e=SIZES)
def test_row_movement_counts_each_array_once(t, k, d, e):
    kept = t * k
    maps = [((t, k), INDEX), ((t, k), INDEX)]
    rows, tokens, weights = ((kept, d), HALF), ((t, d), HALF), ((t, k), FULL)
    assert moe_cost.dispatch(t, kept, d, k).bytes == nbytes(tokens, rows, *maps)
    assert moe_cost.combine(t, kept, d, k).bytes == nbytes(tokens, rows, weights, *maps)
    assert moe_cost.combine_backward(t, kept, d, k).bytes == nbytes(tokens, rows, rows, weights, weights, *maps)
    assert moe_cost.route_map(t, k, e, 2).bytes == nbytes(((t, k), INDEX), *maps, ((2, e), COUNT), ((2, e), COUNT))


@given(t=SIZES, k=SIZES, d=SIZES, e=SIZES)
def test_router_and_swiglu_count_each_array_once(t, k, d, e):
    logits, routes = ((t, e), FULL), [((t, k), FULL), ((t, k), INDEX)]
    assert moe_cost.router(t, e, k).bytes == nbytes(logits, *routes)
    assert moe_cost.router(t, e, k, backward=True).bytes == nbytes(logits, logits, *routes, ((t, k), FULL))
    assert moe_cost.router_logits(t, d, e).bytes == nbytes(((t, d), HALF), ((e, d), FULL), logits)
    assert moe_cost.swiglu(t, d).bytes == nbytes(((t, 2 * d), HALF), ((t, d), HALF))
    assert moe_cost.swiglu(t, d, backward=True).bytes == nbytes(((t, 2 * d), HALF), ((t, d), HALF), ((t, 2 * d), HALF))


@given(m=SIZES, k=SIZES, n=SIZES, groups=st.integers(1, 8))
def test_grouped_gemm_equals_the_sum_of_its_groups_and_its_gradients(m, k, n, groups):
    whole = moe_cost.grouped_gemm(m * groups, k, n, groups)
    part = moe_cost.grouped_gemm(m, k, n, 1)
    assert (whole.flop, whole.bytes) == (groups * part.flop, groups * part.bytes)
    assert moe_cost.grouped_gemm(m, n, k, 1) == part, "forward and input gradient cost the same"


def test_development_model_layer():
    # 16,384 tokens, top 8, 2560 -> 2 x 1280: 1.72 PFLOP/1000 and 0.76 GB in dispatch.
    assert moe_cost.grouped_gemm(131072, 2560, 2560, 128).flop == 2 * 131072 * 2560 * 2560
    assert moe_cost.dispatch(16384, 131072, 2560, 8).bytes == pytest.approx(0.756e9, rel=1e-3)


def test_floor_is_the_larger_of_both_times():
    cost = moe_cost.Cost(bytes=4_000_000, flop=2_000_000_000)
    assert cost.floor_us(4000, 1000) == pytest.approx(2.0)
    assert cost.floor_us(1000, 1000) == pytest.approx(4.0)
    with pytest.raises(ValueError, match="must be positive; got 0 GB/s"):
        cost.floor_us(0)
    with pytest.raises(ValueError, match="tokens must be 0 or more; got -1"):
        moe_cost.router(-1, 4, 2)
