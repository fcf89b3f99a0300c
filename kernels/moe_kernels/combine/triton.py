"""Rowwise combine kernels: one program a token gathers its K rows; the backward PUTs gradients to the same rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_kernels._launch import compile_boundary, next_power_of_two, on_device
from moe_kernels._peer_rows import peer_row
from moe_kernels._prepared import prepared
from moe_kernels.peers import PeerTable

BLOCK_D = 1024
BACKWARD_TILE = 4096
BACKWARD_STAGES = 3


@prepared
@triton.jit
def _combine_kernel(
    out_ptr, rank_ptr, row_ptr, peer_ptr, weight_ptr, D: tl.constexpr, K: tl.constexpr, BLOCK_D: tl.constexpr,
    WEIGHTED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    for start in tl.static_range(0, D, BLOCK_D):
        c = start + tl.arange(0, BLOCK_D)
        total = tl.zeros([BLOCK_D], dtype=tl.float32)
        for k in tl.static_range(K):
            at = token * K + k
            source, kept = peer_row(peer_ptr, rank_ptr, row_ptr, at, D, out_ptr.dtype.element_ty, ALIGNED)
            y = tl.load(source + c, mask=c < tl.where(kept, D, 0), other=0.0).to(tl.float32)
            if WEIGHTED:
                # A dropped route's weight may be anything, NaN included: it must not be multiplied.
                y = y * tl.where(kept, tl.load(weight_ptr + at).to(tl.float32), 0.0)
            total += y
        tl.store(out_ptr + token * D + c, total.to(out_ptr.dtype.element_ty), mask=c < D)


@prepared
@triton.jit
def _combine_backward_kernel(
    grad_ptr, d_weight_ptr, rank_ptr, row_ptr, peer_ptr, grad_peer_ptr, weight_ptr, D: tl.constexpr, K: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, ALIGNED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    # Routes past K repeat the last one's addresses and touch nothing.
    at = token * K + tl.minimum(k, K - 1)
    y_row, kept = peer_row(peer_ptr, rank_ptr, row_ptr, at, D, grad_ptr.dtype.element_ty, ALIGNED)
    g_row, kept = peer_row(grad_peer_ptr, rank_ptr, row_ptr, at, D, grad_ptr.dtype.element_ty, ALIGNED)
    kept = kept & (k < K)
    weight = tl.load(weight_ptr + at, mask=kept, other=0.0).to(tl.float32)
    dot = tl.zeros([BLOCK_K], dtype=tl.float32)
    # Loads run STAGES ahead through shared memory, so a store never meets the load of its own line in flight: in place,
    # where the compiler ordered them by itself, that was three times slower.
    for start in tl.range(0, D, BLOCK_D, num_stages=STAGES):
        c = start + tl.arange(0, BLOCK_D)
        mask = kept[:, None] & (c < D)[None, :]
        grad = tl.load(grad_ptr + token * D + c, mask=c < D, other=0.0).to(tl.float32)
        y = tl.load(y_row[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)
        dot += tl.sum(tl.where(mask, y * grad[None, :], 0.0), axis=1)
        out = (grad[None, :] * weight[:, None]).to(grad_ptr.dtype.element_ty)
        tl.store(g_row[:, None] + c[None, :], out, mask=mask)
    tl.store(d_weight_ptr + at, dot, mask=k < K)


@compile_boundary
def combine(
    peers: PeerTable, dst_rank: torch.Tensor, dst_row: torch.Tensor, weights: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Gather and add K rows a token into out [T, D]."""
    tokens, width = out.shape
    if tokens == 0 or width == 0:
        return
    with on_device(out):
        _combine_kernel[(tokens,)](
            out, dst_rank, dst_row, peers.ptrs, weights if weights is not None else out, D=width, K=dst_row.shape[1],
            BLOCK_D=min(BLOCK_D, next_power_of_two(width)), WEIGHTED=weights is not None,
            ALIGNED=width * out.element_size() % 16 == 0, num_warps=4,
        )  # fmt: skip


@compile_boundary
def combine_backward(
    grad: torch.Tensor,
    peers: PeerTable,
    dst_rank: torch.Tensor,
    dst_row: torch.Tensor,
    weights: torch.Tensor,
    grad_peers: PeerTable,
    d_weights: torch.Tensor,
) -> None:
    """Store gradients of the rows into `grad_peers`, and the weights' gradient into d_weights [T, K]."""
    tokens, width = grad.shape
    top_k = dst_row.shape[1]
    if tokens == 0 or top_k == 0:
        return
    block_k = next_power_of_two(top_k)
    with on_device(grad):
        _combine_backward_kernel[(tokens,)](
            grad, d_weights, dst_rank, dst_row, peers.ptrs, grad_peers.ptrs, weights, D=width, K=top_k,
            BLOCK_K=block_k, BLOCK_D=min(max(64, BACKWARD_TILE // block_k), next_power_of_two(width)),
            ALIGNED=width * grad.element_size() % 16 == 0, STAGES=BACKWARD_STAGES, num_warps=4,
        )  # fmt: skip
