"""Route map: destination rank and row of every route, and the experts' offsets, built on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from moe_kernels._launch import check_int, check_tensor, resolve_impl
from moe_kernels.route_map import reference

INDEX_LIMIT = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class RouteMap:
    """Where each route of this rank goes; every field is a device tensor.

    Attributes:
        dst_rank: int32 [T, K], -1 where the route drops or its expert id is invalid.
        dst_row: int32 [T, K], row in the destination's buffer, -1 likewise.
        offsets: int32 [L], inclusive cumulative rows that this rank receives per local expert.
        kept: int64 [R, E], rows accepted from each source for each expert, equal on all ranks.
        stats: int64 [4], this rank's offered, accepted and dropped routes, and the rows it receives.
    """

    dst_rank: torch.Tensor
    dst_row: torch.Tensor
    offsets: torch.Tensor
    kept: torch.Tensor
    stats: torch.Tensor


def capacity_rows(tokens: int, top_k: int, capacity_factor: float) -> int:
    """Return C = max(1, ceil(capacity_factor * T * K)), from shapes that the host knows. Source: Section 8.5, Table 14.

    Raises:
        TypeError: counts that are no integers, or a factor that is no number.
        ValueError: a negative token count, top_k below 1, or a factor that is not positive and finite.
    """
    check_int("tokens", tokens)
    check_int("top_k", top_k)
    if isinstance(capacity_factor, bool) or not isinstance(capacity_factor, (int, float)):
        raise TypeError(f"capacity_factor must be a number; got {capacity_factor!r} ({type(capacity_factor).__name__})")
    if tokens < 0 or top_k < 1 or not (capacity_factor > 0 and math.isfinite(capacity_factor)):
        raise ValueError(f"need tokens >= 0, top_k >= 1, capacity_factor > 0; got {tokens}, {top_k}, {capacity_factor}")
    return max(1, math.ceil(capacity_factor * tokens * top_k))


def route_map(
    expert_index: torch.Tensor, counts: torch.Tensor, *, rank: int, capacity: int, impl: str | None = None
) -> RouteMap:
    """Build the route map of one rank in at most three launches, without a host read.

    Overflow drops, per destination, the highest local experts first, within one the highest sources, within one cell
    the latest routes. The destination layout is a dense prefix: expert, then source, then token order.

    Args:
        expert_index: int32 or int64 [T, K], global expert ids; ids below 0 or >= E drop.
        counts: int64 [R, E] or [R, R, L]: each source's routes per expert, after the count exchange. Row `rank` must be
            the histogram of `expert_index`.
        rank: this rank.
        capacity: C, rows of every rank's buffer.
        impl: `triton` (default on CUDA) or `reference` (default on the CPU).

    Raises:
        ValueError, TypeError: a shape, dtype, device or size is wrong; the message says which.
    """
    check_tensor("expert_index", expert_index, shape=(None, None), dtypes=(torch.int32, torch.int64))
    check_tensor("counts", counts, dtypes=(torch.int64,), device=expert_index.device)
    if counts.dim() not in (2, 3) or (counts.dim() == 3 and counts.shape[0] != counts.shape[1]):
        raise ValueError(f"counts must have shape [R, E] or [R, R, L]; got {list(counts.shape)}")
    ranks = counts.shape[0]
    counts = counts.reshape(ranks, -1)
    if ranks < 1 or counts.shape[1] < 1 or counts.shape[1] % ranks:
        raise ValueError(f"counts: E must be a positive multiple of R; got R = {ranks}, E = {counts.shape[1]}")
    for name, value in (("rank", rank), ("capacity", capacity)):
        check_int(name, value)
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must be 0 to R - 1 = {ranks - 1}; got {rank}")
    if not 1 <= capacity <= INDEX_LIMIT:
        raise ValueError(f"capacity must be 1 to {INDEX_LIMIT} (rows are int32); got {capacity}")
    if expert_index.numel() > INDEX_LIMIT:
        raise ValueError(f"expert_index must have at most {INDEX_LIMIT} routes; got {expert_index.numel()}")
    if resolve_impl(impl, expert_index.device, ("triton", "reference")) == "reference":
        return RouteMap(*reference.route_map(expert_index, counts, rank, capacity))
    from moe_kernels.route_map import triton as backend

    return RouteMap(*backend.route_map(expert_index.contiguous(), counts.contiguous(), rank, capacity))
