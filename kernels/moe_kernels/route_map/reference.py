"""Route map in plain PyTorch on integers: the definition, exact on any device."""

from __future__ import annotations

import torch


def keep_table(counts_RE: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return kept rows and first destination row of each (source, expert) cell, both int64 [R, E].

    Per destination the cells stand in (local expert, source) order; their running sum is clamped at the capacity.
    """
    ranks, experts = counts_RE.shape
    local = experts // ranks
    cells = counts_RE.view(ranks, ranks, local).permute(1, 2, 0).reshape(ranks, local * ranks)
    end = cells.cumsum(1).clamp(max=capacity)
    kept = torch.diff(end, dim=1, prepend=end.new_zeros(ranks, 1))

    def by_source(table: torch.Tensor) -> torch.Tensor:
        return table.view(ranks, local, ranks).permute(2, 0, 1).reshape(ranks, experts)

    return by_source(kept), by_source(end - kept)


def route_map(
    experts_TK: torch.Tensor, counts_RE: torch.Tensor, rank: int, capacity: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dst_rank, dst_row int32 [T, K], offsets int32 [L], kept int64 [R, E], stats int64 [4]."""
    ranks, experts = counts_RE.shape
    local = experts // ranks
    kept, base = keep_table(counts_RE, capacity)
    flat = experts_TK.reshape(-1).to(torch.int64)
    valid = (flat >= 0) & (flat < experts)
    safe = torch.where(valid, flat, experts)
    order = safe.sort(stable=True).indices
    sizes = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device).scatter_add_(0, safe, torch.ones_like(safe))
    first = sizes.cumsum(0) - sizes
    position = torch.empty_like(flat)
    position[order] = torch.arange(flat.numel(), device=flat.device) - first[safe[order]]
    safe = torch.where(valid, flat, 0)
    keep = valid & (position < kept[rank][safe])
    dst_rank = torch.where(keep, safe // local, -1).to(torch.int32).view_as(experts_TK)
    dst_row = torch.where(keep, base[rank][safe] + position, -1).to(torch.int32).view_as(experts_TK)
    mine = kept[:, rank * local : (rank + 1) * local]
    offsets = mine.sum(0).cumsum(0).to(torch.int32)
    offered = counts_RE[rank].sum()
    accepted = kept[rank].sum()
    stats = torch.stack([offered, accepted, offered - accepted, mine.sum()])
    return dst_rank, dst_row, offsets, kept, stats
