"""Rowwise combine and its gradient in plain PyTorch, accumulating in FP32 or wider, in k order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_kernels.dispatch.reference import dispatch


def _gather(
    peers: Sequence[torch.Tensor], rank_T: torch.Tensor, row_T: torch.Tensor, wide: torch.dtype
) -> torch.Tensor:
    rows_TD = torch.zeros(row_T.numel(), peers[0].shape[1], dtype=wide, device=row_T.device)
    for rank, buffer_CD in enumerate(peers):
        (token,) = ((rank_T == rank) & (row_T >= 0)).nonzero(as_tuple=True)
        rows_TD[token] = buffer_CD[row_T[token].long()].to(wide)
    return rows_TD


def combine(
    peers: Sequence[torch.Tensor], dst_rank_TK: torch.Tensor, dst_row_TK: torch.Tensor, weights_TK: torch.Tensor | None
) -> torch.Tensor:
    """Return sum over k of weight[t, k] * row; a dropped route adds 0 whatever its weight."""
    wide = torch.promote_types(peers[0].dtype, torch.float32)
    out_TD = torch.zeros(dst_row_TK.shape[0], peers[0].shape[1], dtype=wide, device=dst_row_TK.device)
    for k in range(dst_row_TK.shape[1]):
        rows = _gather(peers, dst_rank_TK[:, k], dst_row_TK[:, k], wide)
        if weights_TK is not None:
            kept = (dst_row_TK[:, k] >= 0).unsqueeze(1)
            rows = torch.where(kept, rows * weights_TK[:, k, None].to(wide), 0)
        out_TD += rows
    return out_TD.to(peers[0].dtype)


def combine_backward(
    grad_TD: torch.Tensor,
    peers: Sequence[torch.Tensor],
    dst_rank_TK: torch.Tensor,
    dst_row_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    grad_peers: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Write grad * weight to each route's row of `grad_peers`; return the weights' gradient [T, K]."""
    wide = torch.promote_types(grad_TD.dtype, torch.float32)
    grads = []
    for k in range(dst_row_TK.shape[1]):
        rows = _gather(peers, dst_rank_TK[:, k], dst_row_TK[:, k], wide)
        dot = (rows * grad_TD.to(wide)).sum(1)
        grads.append(torch.where(dst_row_TK[:, k] >= 0, dot, 0))
    d_weights = torch.stack(grads, dim=1).to(weights_TK.dtype)
    dispatch(grad_TD, dst_rank_TK, dst_row_TK, grad_peers, weights_TK)
    return d_weights
