"""Keep, drop and destination rows of routed tokens: the rule of the kernels, on NumPy, with a plain loop beside it.

Source: report, Section 8.5 and Table 14.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from workbench.models.metrics import route_drop_statistics


@dataclass(frozen=True)
class Routing:
    """Where the routes of all ranks go.

    Attributes:
        dst_rank: int64 [R, T, K], -1 where a route drops.
        dst_row: int64 [R, T, K], row in the destination's buffer, -1 likewise.
        offered: int64 [R, E], routes of each source for each expert.
        kept: int64 [R, E], of those, rows accepted.
        offsets: int64 [R, L], inclusive cumulative rows per local expert of each destination.
        capacity: rows of each destination's buffer.
    """

    dst_rank: np.ndarray
    dst_row: np.ndarray
    offered: np.ndarray
    kept: np.ndarray
    offsets: np.ndarray
    capacity: int

    @property
    def dropped(self) -> int:
        """Routes that found no row, over all ranks."""
        return int(self.offered.sum() - self.kept.sum())

    @property
    def capacity_use(self) -> np.ndarray:
        """Share of each destination's rows that is valid, float [R]."""
        return self.offsets[:, -1] / self.capacity


def capacity_rows(tokens: int, top_k: int, capacity_factor: float) -> int:
    """Return C = max(1, ceil(capacity_factor * T * K)).

    Raises:
        ValueError: a size or factor out of range.
    """
    if tokens < 0 or top_k < 1 or not (capacity_factor > 0 and math.isfinite(capacity_factor)):
        raise ValueError(f"need tokens >= 0, top_k >= 1, capacity_factor > 0; got {tokens}, {top_k}, {capacity_factor}")
    return max(1, math.ceil(capacity_factor * tokens * top_k))


def _checked(experts: np.ndarray, num_experts: int, capacity: int) -> tuple[int, int, int, int]:
    if experts.ndim != 3:
        raise ValueError(f"experts must have shape [R, T, K]; got {list(experts.shape)}")
    ranks, tokens, top_k = experts.shape
    if ranks < 1 or num_experts < 1 or num_experts % ranks:
        raise ValueError(f"E must be a positive multiple of R; got E = {num_experts}, R = {ranks}")
    if capacity < 1:
        raise ValueError(f"capacity must be at least 1; got {capacity}")
    return ranks, tokens, top_k, num_experts // ranks


def keep_table(offered: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows kept and first destination row of each (source, expert) cell, both int64 [R, E].

    Cells of a destination stand in (local expert, source) order; their running sum is clamped at the capacity, so that
    overflow drops the highest local experts first and within one the highest sources.
    """
    ranks, experts = offered.shape
    local = experts // ranks
    cells = offered.reshape(ranks, ranks, local).transpose(1, 2, 0).reshape(ranks, local * ranks)
    end = np.minimum(np.cumsum(cells, axis=1), capacity)
    start = np.concatenate([np.zeros((ranks, 1), dtype=end.dtype), end[:, :-1]], axis=1)

    def by_source(table: np.ndarray) -> np.ndarray:
        return table.reshape(ranks, local, ranks).transpose(2, 0, 1).reshape(ranks, experts)

    return by_source(end - start), by_source(start)


def route(experts: np.ndarray, num_experts: int, capacity: int) -> Routing:
    """Route expert ids [R, T, K] of all ranks; ids outside 0..E-1 drop.

    Raises:
        ValueError: wrong shape, E not a multiple of R, or no capacity.
    """
    ranks, _, _, local = _checked(experts, num_experts, capacity)
    flat = experts.reshape(ranks, -1).astype(np.int64)
    valid = (flat >= 0) & (flat < num_experts)
    offered = np.stack([np.bincount(flat[r][valid[r]], minlength=num_experts) for r in range(ranks)]).astype(np.int64)
    kept, base = keep_table(offered, capacity)
    dst_rank, dst_row = np.full_like(flat, -1), np.full_like(flat, -1)
    for rank in range(ranks):
        routes = np.flatnonzero(valid[rank])
        e = flat[rank][routes]
        order = np.argsort(e, kind="stable")
        first = np.cumsum(offered[rank]) - offered[rank]
        position = np.empty_like(e)
        position[order] = np.arange(len(e)) - first[e[order]]
        fits = position < kept[rank][e]
        dst_rank[rank, routes[fits]] = e[fits] // local
        dst_row[rank, routes[fits]] = base[rank][e[fits]] + position[fits]
    received = kept.reshape(ranks, ranks, local).sum(0)
    return Routing(
        dst_rank.reshape(experts.shape),
        dst_row.reshape(experts.shape),
        offered,
        kept,
        np.cumsum(received, axis=1),
        capacity,
    )


def skewed_experts(
    ranks: int, tokens: int, top_k: int, num_experts: int, skew: float, rng: np.random.Generator
) -> np.ndarray:
    """Draw int64 [R, T, K] expert ids, distinct within a token; expert e is wanted in proportion to (e + 1) ** -skew.

    `skew` 0 is balanced. Draws without replacement by the largest of log-weight plus Gumbel noise.

    Raises:
        ValueError: K exceeds E.
    """
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k must be 1 to E = {num_experts}; got {top_k}")
    log_weight = -skew * np.log(np.arange(1, num_experts + 1))
    # Popular experts are spread over the ranks: which one is popular says nothing about where it lives.
    log_weight = log_weight[np.random.default_rng(0).permutation(num_experts)]
    keys = log_weight + rng.gumbel(size=(ranks, tokens, num_experts))
    return np.argsort(-keys, axis=-1, kind="stable")[..., :top_k].astype(np.int64)


def drop_rate_curve(
    experts: np.ndarray, num_experts: int, capacity_factors: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the share of routes dropped and the mean capacity use at each capacity factor, from one set of routes."""
    ranks, tokens, top_k, _ = _checked(experts, num_experts, 1)
    flat = experts.reshape(ranks, -1)
    offered = np.stack([np.bincount(row[(row >= 0) & (row < num_experts)], minlength=num_experts) for row in flat])
    drops, use = [], []
    for factor in capacity_factors:
        capacity = capacity_rows(tokens, top_k, float(factor))
        kept, _ = keep_table(offered.astype(np.int64), capacity)
        found = route_drop_statistics(offered, kept, capacity_rows=capacity, experts_per_rank=num_experts // ranks)
        drops.append(found["drop_rate"])
        use.append(found["capacity_utilization"])
    return np.array(drops), np.array(use)
