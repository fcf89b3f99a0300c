"""Route metrics, computed on the device and only when asked for: a forward launches nothing for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_kernels.route_map import RouteMap


@dataclass(frozen=True, eq=False)
class ForwardRecord:
    """Tensors of one forward that metrics are computed from, one entry per hosted rank."""

    counts_E: tuple[torch.Tensor, ...]
    weights_TK: tuple[torch.Tensor, ...]
    maps: tuple[RouteMap, ...]
    expert_load: torch.Tensor | None
    capacity: int | None


@torch.no_grad()
def route_metrics(record: ForwardRecord) -> dict[str, torch.Tensor]:
    """Return device tensors of the n hosted ranks.

    `offered`, `accepted`, `dropped` int64 scalars; `dropped_by_source` int64 [n]; `per_expert_load` int64 [E], routes
    that the hosted ranks' tokens ask of each expert; `received_load` int64 [n * L], rows that the hosted experts got;
    `capacity_use` [n], received rows over capacity (1 where rows are not bounded); `confidence` scalar, mean over
    tokens of the first choice's share of the K weights.

    Source: report Table 51, route and drop statistics.
    """
    stats = torch.stack([m.stats for m in record.maps])
    offsets, received = [m.offsets for m in record.maps], record.expert_load
    if received is None:
        received = torch.cat([torch.diff(o, prepend=o.new_zeros(1)).long() for o in offsets])
    if record.capacity is None:
        use = torch.ones(len(record.maps), device=stats.device)
    else:
        use = torch.stack([o[-1] for o in offsets]) / record.capacity
    weights = torch.cat(record.weights_TK)
    return {
        "offered": stats[:, 0].sum(),
        "accepted": stats[:, 1].sum(),
        "dropped": stats[:, 2].sum(),
        "dropped_by_source": stats[:, 2],
        "per_expert_load": torch.stack(record.counts_E).sum(0),
        "received_load": received,
        "capacity_use": use,
        "confidence": (weights[:, 0] / weights.sum(-1)).mean(),
    }
