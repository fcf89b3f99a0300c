"""Rowwise dispatch: rows move bit for bit, nothing else is touched."""

from __future__ import annotations

import pytest
import torch
from budgets import nan_filled
from moe_kernels.dispatch import dispatch
from moe_kernels.peers import peer_table
from moe_kernels.route_map import route_map

BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().view(BITS[tensor.dtype])


def ranks_maps(ids: torch.Tensor, experts: int, capacity: int, device):
    """Route maps of all ranks from ids [R, T, K]."""
    flat = ids.view(ids.shape[0], -1)
    inside = (flat >= 0) & (flat < experts)
    counts = torch.stack([f[ok].bincount(minlength=experts) for f, ok in zip(flat, inside)]).to(device)
    return [
        route_map(ids[r].to(device), counts, rank=r, capacity=capacity, impl="reference") for r in range(ids.shape[0])
    ]


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [40, 33, 1])
def test_rows_land_bit_for_bit_and_other_rows_stay(impl, dtype, width, device):
    torch.manual_seed(0)
    ranks, tokens, capacity = 3, 17, 30
    ids = torch.randint(-1, 7, (ranks, tokens, 3))
    maps = ranks_maps(ids, 6, capacity, device)
    rows = [torch.randn(tokens, width, device=device).to(dtype) for _ in range(ranks)]
    rows[0][3] = float("nan")  # moves like any other row
    table = peer_table([nan_filled(capacity, width, dtype=dtype, device=device) for _ in range(ranks)])
    want = [bits(t).clone() for t in table.tensors]
    for x, m in zip(rows, maps):
        for t in range(tokens):
            for rank, row in zip(m.dst_rank[t].tolist(), m.dst_row[t].tolist()):
                if row >= 0:
                    want[rank][row] = bits(x)[t]
        dispatch(x, m.dst_rank, m.dst_row, table, impl=impl)
    assert sum(int(m.stats[2]) for m in maps) > 0
    for rank, (buffer, expected) in enumerate(zip(table.tensors, want)):
        assert torch.equal(bits(buffer), expected), f"buffer of rank {rank}"


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_weights_multiply_in_fp32_and_dropped_weights_are_not_used(impl, device):
    x = torch.randn(4, 24, device=device)
    dst_rank = torch.tensor([[0, -1], [0, 0], [-1, -1], [-1, 0]], dtype=torch.int32, device=device)
    dst_row = torch.tensor([[2, -1], [0, 4], [-1, -1], [-1, 1]], dtype=torch.int32, device=device)
    weights = torch.rand(4, 2, device=device)
    weights[dst_row < 0] = float("nan")
    table = peer_table([nan_filled(6, 24, dtype=torch.float32, device=device)])
    dispatch(x, dst_rank, dst_row, table, weights=weights, impl=impl)
    (got,) = table.tensors
    for t, k, row in [(0, 0, 2), (1, 0, 0), (1, 1, 4), (3, 1, 1)]:
        assert torch.equal(got[row], x[t] * weights[t, k])
    assert got[[3, 5]].isnan().all()


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("shape", [(0, 2), (3, 0)])
def test_nothing_to_move(impl, shape, device):
    table = peer_table([nan_filled(4, 8, dtype=torch.float32, device=device)])
    empty = torch.empty(shape, dtype=torch.int32, device=device)
    dispatch(torch.ones(shape[0], 8, device=device), empty, empty, table, impl=impl)
    assert table.tensors[0].isnan().all()


def test_row_addresses_pass_two_to_the_31_elements(device):
    # Untouched pages cost nothing: one row is written near the end of a buffer of 2**31 + 2**13 elements.
    width = 4096
    rows = 2**31 // width + 2
    table = peer_table([torch.empty(rows, width, dtype=torch.bfloat16, device=device)])
    x = torch.randn(1, width, device=device).bfloat16()
    where = torch.tensor([[rows - 1]], dtype=torch.int32, device=device)
    dispatch(x, torch.zeros_like(where), where, table, impl="triton")
    assert torch.equal(table.tensors[0][-1], x[0])


def test_errors_name_what_is_wrong():
    x = torch.zeros(3, 8)
    maps = torch.zeros(3, 2, dtype=torch.int32)
    table = peer_table([torch.zeros(4, 8)])
    with pytest.raises(TypeError, match=r"dst_rank must have dtype torch.int32; got torch.int64"):
        dispatch(x, maps.long(), maps, table)
    with pytest.raises(ValueError, match=r"dst_row must have shape \[3, 2\]; got \[3, 1\]"):
        dispatch(x, maps, maps[:, :1].contiguous(), table)
    with pytest.raises(ValueError, match=r"peers must hold rows of 8 torch.bfloat16; got 8 torch.float32"):
        dispatch(x.bfloat16(), maps, maps, table)
    with pytest.raises(ValueError, match="x must be contiguous"):
        dispatch(torch.zeros(8, 3).t(), maps, maps, table)
    with pytest.raises(ValueError, match=r"weights must have shape \[3, 2\]"):
        dispatch(x, maps, maps, table, weights=torch.zeros(3))


def test_peer_table_refuses_buffers_that_differ():
    with pytest.raises(ValueError, match="at least one buffer"):
        peer_table([])
    with pytest.raises(ValueError, match="rank 1 has"):
        peer_table([torch.zeros(4, 8), torch.zeros(5, 8)])
    with pytest.raises(ValueError, match="rank 0 must be contiguous"):
        peer_table([torch.zeros(8, 4).t()])
    with pytest.raises(ValueError, match="aligned to 16 bytes"):
        peer_table([torch.zeros(33)[1:].view(4, 8)])
