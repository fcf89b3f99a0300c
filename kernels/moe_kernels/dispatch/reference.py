"""Rowwise dispatch in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def dispatch(
    x_TD: torch.Tensor,
    dst_rank_TK: torch.Tensor,
    dst_row_TK: torch.Tensor,
    peers: Sequence[torch.Tensor],
    weights_TK: torch.Tensor | None,
) -> None:
    """Write x[t] (times its weight) to row dst_row[t, k] of peers[dst_rank[t, k]]."""
    for rank, buffer_CD in enumerate(peers):
        token, slot = ((dst_rank_TK == rank) & (dst_row_TK >= 0)).nonzero(as_tuple=True)
        rows = x_TD[token]
        if weights_TK is not None:
            wide = torch.promote_types(x_TD.dtype, torch.float32)
            rows = rows.to(wide) * weights_TK[token, slot, None].to(wide)
        buffer_CD[dst_row_TK[token, slot].long()] = rows.to(buffer_CD.dtype)
