"""Rowwise dispatch kernel: one program a token reads its row once and stores it to K owners."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_kernels._launch import compile_boundary, next_power_of_two, on_device
from moe_kernels._peer_rows import peer_row
from moe_kernels._prepared import prepared
from moe_kernels.peers import PeerTable

BLOCK_D = 2048


@prepared
@triton.jit
def _dispatch_kernel(
    x_ptr, rank_ptr, row_ptr, peer_ptr, weight_ptr, D: tl.constexpr, K: tl.constexpr, BLOCK_D: tl.constexpr,
    WEIGHTED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    for start in tl.static_range(0, D, BLOCK_D):
        c = start + tl.arange(0, BLOCK_D)
        x = tl.load(x_ptr + token * D + c, mask=c < D, other=0.0)
        for k in tl.static_range(K):
            at = token * K + k
            target, kept = peer_row(peer_ptr, rank_ptr, row_ptr, at, D, x_ptr.dtype.element_ty, ALIGNED)
            y = x
            if WEIGHTED:
                y = (x.to(tl.float32) * tl.load(weight_ptr + at).to(tl.float32)).to(x.dtype)
            tl.store(target + c, y, mask=c < tl.where(kept, D, 0))


@compile_boundary
def dispatch(
    x: torch.Tensor, dst_rank: torch.Tensor, dst_row: torch.Tensor, peers: PeerTable, weights: torch.Tensor | None
) -> None:
    """Store rows of x [T, D] into the peers' buffers."""
    tokens, width = x.shape
    top_k = dst_row.shape[1]
    if tokens == 0 or top_k == 0 or width == 0:
        return
    with on_device(x):
        _dispatch_kernel[(tokens,)](
            x, dst_rank, dst_row, peers.ptrs, weights if weights is not None else x, D=width, K=top_k,
            BLOCK_D=min(BLOCK_D, next_power_of_two(width)), WEIGHTED=weights is not None,
            ALIGNED=width * x.element_size() % 16 == 0, num_warps=4,
        )  # fmt: skip
