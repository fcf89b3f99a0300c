"""Rowwise combine: weighted gather, its gradient, dropped routes, buffers shared with their gradients."""

from __future__ import annotations

import pytest
import torch
from budgets import assert_within, budget, nan_filled
from moe_kernels.combine import combine, combine_backward
from moe_kernels.dispatch import dispatch
from moe_kernels.peers import peer_table
from test_dispatch import ranks_maps

IMPLS = pytest.mark.parametrize("impl", ["reference", "triton"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def example(device, dtype, width=40, capacity=30):
    """Three ranks with drops; the rows that no route names are NaN."""
    torch.manual_seed(1)
    ids = torch.randint(-1, 7, (3, 17, 3))
    ids[0, 5] = -1  # a token whose routes all drop
    maps = ranks_maps(ids, 6, capacity, device)
    buffers = [nan_filled(capacity, width, dtype=dtype, device=device) for _ in maps]
    for buffer, m in zip(buffers, maps):
        valid = int(m.offsets[-1])
        buffer[:valid] = torch.randn(valid, width, device=device).to(dtype)
    weights = []
    for m in maps:
        w = torch.rand(17, 3, device=device)
        w[m.dst_row < 0] = float("nan")
        weights.append(w)
    return maps, buffers, weights


def exact(m, buffers, weights):
    """Sum over k in FP64 by a plain loop, with the sum of absolute terms."""
    total = torch.zeros(m.dst_row.shape[0], buffers[0].shape[1], dtype=torch.float64)
    magnitude = torch.zeros_like(total)
    for t in range(total.shape[0]):
        for k, (rank, row) in enumerate(zip(m.dst_rank[t].tolist(), m.dst_row[t].tolist())):
            if row >= 0:
                term = buffers[rank][row].double().cpu() * (1.0 if weights is None else weights[t, k].double().item())
                total[t] += term
                magnitude[t] += term.abs()
    return total, magnitude


@IMPLS
@DTYPES
@pytest.mark.parametrize("width", [40, 33])
@pytest.mark.parametrize("weighted", [True, False])
def test_combine_is_the_weighted_sum(impl, dtype, width, weighted, device):
    maps, buffers, weights = example(device, dtype, width)
    table = peer_table(buffers)
    for m, w in zip(maps, weights):
        out = nan_filled(17, width, dtype=dtype, device=device)
        got = combine(table, m.dst_rank, m.dst_row, w if weighted else None, out=out, impl=impl)
        assert got.data_ptr() == out.data_ptr()
        want, magnitude = exact(m, buffers, w if weighted else None)
        assert_within(got.cpu(), want, budget(want, magnitude, 3, dtype), "combine")


@IMPLS
def test_token_without_kept_routes_gives_zero_and_nan_stays_in_its_rows(impl, device):
    maps, buffers, weights = example(device, torch.float32)
    m = maps[0]
    clean = combine(peer_table(buffers), m.dst_rank, m.dst_row, weights[0], impl=impl)
    assert (m.dst_row[5] == -1).all() and (clean[5] == 0).all() and not clean.isnan().any()
    token = int((m.dst_row >= 0).any(1).nonzero()[0])
    k = int((m.dst_row[token] >= 0).nonzero()[0])
    buffers[int(m.dst_rank[token, k])][int(m.dst_row[token, k])] = float("nan")
    dirty = combine(peer_table(buffers), m.dst_rank, m.dst_row, weights[0], impl=impl)
    rest = torch.arange(17, device=dirty.device) != token
    assert dirty[token].isnan().all() and torch.equal(dirty[rest], clean[rest])


@IMPLS
@DTYPES
@pytest.mark.parametrize("in_place", [False, True])
def test_backward_puts_gradients_and_returns_the_weights_gradient(impl, dtype, in_place, device):
    maps, buffers, weights = example(device, dtype)
    before = [b.clone() for b in buffers]
    rows = peer_table(buffers)
    grads = rows if in_place else peer_table([nan_filled(*b.shape, dtype=dtype, device=device) for b in buffers])
    pulls = [torch.randn(17, 40, device=device).to(dtype) for _ in maps]
    d_weights = [
        combine_backward(g, rows, m.dst_rank, m.dst_row, w, grads, impl=impl) for g, m, w in zip(pulls, maps, weights)
    ]
    for pull, m, w, d_w in zip(pulls, maps, weights, d_weights):
        for t in range(17):
            for k, (rank, row) in enumerate(zip(m.dst_rank[t].tolist(), m.dst_row[t].tolist())):
                if row < 0:
                    assert d_w[t, k].item() == 0
                    continue
                want = pull[t].double() * w[t, k].double()
                assert_within(grads.tensors[rank][row], want, budget(want, want, 1, dtype), "row gradient")
                terms = pull[t].double() * before[rank][row].double()
                dot = terms.sum()
                allowed = budget(dot, terms.abs().sum(), 40, torch.float32)
                assert_within(d_w[t, k][None], dot[None], allowed[None], "weight gradient")
    for buffer, m in zip(grads.tensors, maps):
        assert buffer[int(m.offsets[-1]) :].isnan().all(), "rows past the valid prefix stay untouched"


def test_reference_is_the_derivative():
    torch.manual_seed(2)
    m = ranks_maps(torch.tensor([[[0, 2], [1, 0], [2, 1]]]), 3, 5, "cpu")[0]
    rows = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    pull = torch.randn(3, 4, dtype=torch.float64)
    keep = (m.dst_row >= 0).unsqueeze(-1)
    gathered = torch.where(keep, rows[m.dst_row.clamp(min=0).long()], 0)
    ((gathered * weights.unsqueeze(-1)).sum(1) * pull).sum().backward()
    table, grads = peer_table([rows.detach()]), peer_table([torch.zeros(5, 4, dtype=torch.float64)])
    d_weights = combine_backward(pull, table, m.dst_rank, m.dst_row, weights.detach(), grads, impl="reference")
    torch.testing.assert_close(grads.tensors[0], rows.grad)
    torch.testing.assert_close(d_weights, weights.grad)
    # Dispatch's gradient is the unweighted combine.
    upstream = torch.randn(5, 4, dtype=torch.float64)
    moved = torch.zeros(5, 4, dtype=torch.float64).index_put(
        (m.dst_row[m.dst_row >= 0].long(),), x[(m.dst_row >= 0).nonzero()[:, 0]]
    )
    (moved * upstream).sum().backward()
    d_x = combine(peer_table([upstream]), m.dst_rank, m.dst_row, impl="reference")
    torch.testing.assert_close(d_x, x.grad)


@IMPLS
def test_nan_gradient_gives_a_dropped_route_no_gradient(impl, device):
    maps, buffers, weights = example(device, torch.float32)
    m, w = maps[0], weights[0]
    dropped = m.dst_row < 0
    mixed = dropped.any(1) & ~dropped.all(1)
    assert mixed.any() and dropped.all(1).any()
    grad = torch.randn(17, 40, device=device)
    grad[dropped.any(1)] = float("nan")
    d_weights = combine_backward(
        grad, peer_table(buffers), m.dst_rank, m.dst_row, w, peer_table([b.clone() for b in buffers]), impl=impl
    )
    assert (d_weights[dropped] == 0).all()
    assert d_weights[mixed][~dropped[mixed]].isnan().all() and not d_weights[~dropped.any(1)].isnan().any()


@IMPLS
def test_combine_undoes_dispatch(impl, device):
    torch.manual_seed(3)
    ids = torch.randint(0, 4, (1, 9, 1))
    (m,) = ranks_maps(ids, 4, 9, device)
    x = torch.randn(9, 16, device=device).bfloat16()
    table = peer_table([nan_filled(9, 16, dtype=torch.bfloat16, device=device)])
    dispatch(x, m.dst_rank, m.dst_row, table, impl=impl)
    assert torch.equal(combine(table, m.dst_rank, m.dst_row, impl=impl), x)


@IMPLS
def test_no_tokens(impl, device):
    table = peer_table([nan_filled(4, 8, dtype=torch.float32, device=device)])
    empty = torch.empty(0, 2, dtype=torch.int32, device=device)
    assert combine(table, empty, empty, impl=impl).shape == (0, 8)
    grad = torch.empty(0, 8, device=device)
    weights = torch.empty(0, 2, device=device)
    assert combine_backward(grad, table, empty, empty, weights, table, impl=impl).shape == (0, 2)
    assert table.tensors[0].isnan().all()


def test_row_addresses_pass_two_to_the_31_elements(device):
    # Untouched pages cost nothing: one row is used near the end of a buffer of 2**31 + 2**13 elements.
    width = 4096
    rows = 2**31 // width + 2
    table = peer_table([torch.empty(rows, width, dtype=torch.bfloat16, device=device)])
    table.tensors[0][-1] = row = torch.randn(width, device=device).bfloat16()
    where = torch.tensor([[rows - 1]], dtype=torch.int32, device=device)
    rank, weight = torch.zeros_like(where), torch.full((1, 1), 0.5, device=device)
    assert torch.equal(combine(table, rank, where, weight, impl="triton")[0], row * 0.5)
    grad = torch.randn(1, width, device=device).bfloat16()
    want = (grad.double() * row.double()).sum()
    allowed = budget(want, (grad.double() * row.double()).abs().sum(), width, torch.float32)
    d_weight = combine_backward(grad, table, rank, where, weight, table, impl="triton")
    assert_within(d_weight[0], want[None], allowed[None], "weight gradient")
    assert torch.equal(table.tensors[0][-1], grad[0] * 0.5)


@pytest.mark.gpu
def test_more_programs_than_can_run_at_once():
    # No program waits for another one, so a grid may exceed what a collective launch could hold.
    tokens, width = 300_000, 64
    ids = torch.randint(0, 16, (1, tokens, 1))
    (m,) = ranks_maps(ids, 16, tokens, torch.device("cuda"))
    x = torch.randn(tokens, width, device="cuda").bfloat16()
    table = peer_table([nan_filled(tokens, width, dtype=torch.bfloat16, device="cuda")])
    dispatch(x, m.dst_rank, m.dst_row, table)
    assert torch.equal(combine(table, m.dst_rank, m.dst_row), x)
    weights = torch.ones(tokens, 1, device="cuda")
    d_weights = combine_backward(x, table, m.dst_rank, m.dst_row, weights, table)
    torch.testing.assert_close(d_weights[:, 0], x.float().square().sum(1), rtol=1e-5, atol=1e-5)
    assert torch.equal(combine(table, m.dst_rank, m.dst_row), x)


def test_errors_name_what_is_wrong():
    maps = torch.zeros(3, 2, dtype=torch.int32)
    table = peer_table([torch.zeros(4, 8)])
    with pytest.raises(ValueError, match=r"out must have shape \[3, 8\]; got \[3, 7\]"):
        combine(table, maps, maps, out=torch.zeros(3, 7))
    with pytest.raises(ValueError, match=r"weights must have shape \[3, 2\]"):
        combine(table, maps, maps, torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"peers must hold rows of 8 torch.bfloat16; got 8 torch.float32"):
        combine_backward(torch.zeros(3, 8).bfloat16(), table, maps, maps, torch.zeros(3, 2), table)
    other = peer_table([torch.zeros(4, 6)])
    with pytest.raises(ValueError, match="grad_peers must hold rows of 8"):
        combine_backward(torch.zeros(3, 8), table, maps, maps, torch.zeros(3, 2), other)
