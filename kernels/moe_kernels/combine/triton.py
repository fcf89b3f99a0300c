"""Rowwise combine kernels: one program a token gathers its K rows; the backward PUTs gradients to the same rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_kernels._launch import compile_boundary, next_power_of_two, on_device
from moe_kernels.peers import PeerTable

BLOCK_D = 1024
BACKWARD_TILE = 8192
BACKWARD_WARPS = 4
WARPS = 4


@triton.jit
def _combine_kernel(
    out_ptr,
    rank_ptr,
    row_ptr,
    peer_ptr,
    weight_ptr,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    for start in tl.static_range(0, D, BLOCK_D):
        c = start + tl.arange(0, BLOCK_D)
        total = tl.zeros([BLOCK_D], dtype=tl.float32)
        for k in tl.static_range(K):
            row = tl.load(row_ptr + token * K + k)
            rank = tl.maximum(tl.load(rank_ptr + token * K + k), 0)
            base = tl.load(peer_ptr + rank).to(tl.pointer_type(out_ptr.dtype.element_ty))
            if ALIGNED:
                base = tl.multiple_of(base, 16)
            y = tl.load(base + row.to(tl.int64) * D + c, mask=c < tl.where(row >= 0, D, 0), other=0.0).to(tl.float32)
            if WEIGHTED:
                # A dropped route's weight may be anything, NaN included: it must not be multiplied.
                y = y * tl.where(row >= 0, tl.load(weight_ptr + token * K + k).to(tl.float32), 0.0)
            total += y
        tl.store(out_ptr + token * D + c, total.to(out_ptr.dtype.element_ty), mask=c < D)


@triton.jit
def _combine_backward_kernel(
    grad_ptr,
    d_weight_ptr,
    rank_ptr,
    row_ptr,
    peer_ptr,
    grad_peer_ptr,
    weight_ptr,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    at = token * K + k
    row = tl.load(row_ptr + at, mask=k < K, other=-1)
    kept = row >= 0
    rank = tl.maximum(tl.load(rank_ptr + at, mask=k < K, other=0), 0)
    weight = tl.load(weight_ptr + at, mask=kept, other=0.0).to(tl.float32)
    y_base = tl.load(peer_ptr + rank).to(tl.pointer_type(grad_ptr.dtype.element_ty))
    g_base = tl.load(grad_peer_ptr + rank).to(tl.pointer_type(grad_ptr.dtype.element_ty))
    if ALIGNED:
        y_base = tl.multiple_of(y_base, 16)
        g_base = tl.multiple_of(g_base, 16)
    y_row = y_base + row.to(tl.int64) * D
    g_row = g_base + row.to(tl.int64) * D
    dot = tl.zeros([BLOCK_K, BLOCK_D], dtype=tl.float32)
    for start in tl.static_range(0, D, BLOCK_D):
        c = start + tl.arange(0, BLOCK_D)
        mask = kept[:, None] & (c < D)[None, :]
        grad = tl.load(grad_ptr + token * D + c, mask=c < D, other=0.0).to(tl.float32)
        y = tl.load(y_row[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)
        dot += tl.where(mask, y * grad[None, :], 0.0)
    # The sum needs every y, so the stores below cannot meet a load of the same line in flight: in place that was
    # three times slower.
    tl.store(d_weight_ptr + at, tl.sum(dot, axis=1), mask=k < K)
    for start in tl.static_range(0, D, BLOCK_D):
        c = start + tl.arange(0, BLOCK_D)
        mask = kept[:, None] & (c < D)[None, :]
        grad = tl.load(grad_ptr + token * D + c, mask=c < D, other=0.0).to(tl.float32)
        out = (grad[None, :] * weight[:, None]).to(grad_ptr.dtype.element_ty)
        tl.store(g_row[:, None] + c[None, :], out, mask=mask)


@compile_boundary
def _combine(
    out: torch.Tensor,
    dst_rank: torch.Tensor,
    dst_row: torch.Tensor,
    ptrs: torch.Tensor,
    weights: torch.Tensor | None,
) -> None:
    tokens, width = out.shape
    if tokens == 0 or width == 0:
        return
    with on_device(out):
        _combine_kernel[(tokens,)](
            out,
            dst_rank,
            dst_row,
            ptrs,
            weights if weights is not None else out,
            D=width,
            K=dst_row.shape[1],
            BLOCK_D=min(BLOCK_D, next_power_of_two(width)),
            WEIGHTED=weights is not None,
            ALIGNED=width * out.element_size() % 16 == 0,
            num_warps=4,
        )


@compile_boundary
def _combine_backward(
    grad: torch.Tensor,
    ptrs: torch.Tensor,
    dst_rank: torch.Tensor,
    dst_row: torch.Tensor,
    weights: torch.Tensor,
    grad_ptrs: torch.Tensor,
    d_weights: torch.Tensor,
) -> None:
    tokens, width = grad.shape
    top_k = dst_row.shape[1]
    if tokens == 0 or top_k == 0:
        return
    block_k = next_power_of_two(top_k)
    with on_device(grad):
        _combine_backward_kernel[(tokens,)](
            grad,
            d_weights,
            dst_rank,
            dst_row,
            ptrs,
            grad_ptrs,
            weights,
            D=width,
            K=top_k,
            BLOCK_K=block_k,
            BLOCK_D=min(max(64, BACKWARD_TILE // block_k), next_power_of_two(width)),
            ALIGNED=width * grad.element_size() % 16 == 0,
            num_warps=BACKWARD_WARPS,
        )


def combine(
    peers: PeerTable,
    dst_rank: torch.Tensor,
    dst_row: torch.Tensor,
    weights: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Gather and add K rows a token into out [T, D]."""
    if out is None:
        out = torch.empty(dst_row.shape[0], peers.width, dtype=peers.dtype, device=dst_row.device)
    _combine(out, dst_rank, dst_row, peers.ptrs, weights)
    return out


def combine_backward(
    grad: torch.Tensor,
    peers: PeerTable,
    dst_rank: torch.Tensor,
    dst_row: torch.Tensor,
    weights: torch.Tensor,
    grad_peers: PeerTable,
) -> torch.Tensor:
    """Store gradients of the rows into `grad_peers`; return the weights' gradient [T, K]."""
    d_weights = torch.empty_like(weights)
    _combine_backward(
        grad,
        peers.ptrs,
        dst_rank,
        dst_row,
        weights,
        grad_peers.ptrs,
        d_weights,
    )
    return d_weights
