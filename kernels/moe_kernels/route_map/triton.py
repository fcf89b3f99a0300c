"""Route map in three launches: block histograms beside the keep tables, a scan over blocks, then the maps."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_kernels._launch import cdiv, compile_safe, next_power_of_two, on_device
from moe_kernels._prepared import prepared

ROUTES = 128
CHUNK = 64
EXPERTS = 64
SCAN = 1024


@triton.jit
def _load_experts(expert_ptr, at, routes, E: tl.constexpr, invalid):
    """Expert ids as int32, `invalid` for ids out of range: checked before narrowing, so that 2**32 is not expert 0."""
    raw = tl.load(expert_ptr + at, mask=at < routes, other=-1)
    return tl.where((raw >= 0) & (raw < E), raw, invalid).to(tl.int32)


@prepared
@triton.jit
def _count_kernel(
    expert_ptr, counts_ptr, histogram_ptr, base_ptr, kept_ptr, offsets_ptr, routes, blocks, capacity, RANK,
    R: tl.constexpr, L: tl.constexpr, CELLS: tl.constexpr, ROUTES: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    E: tl.constexpr = R * L
    pid = tl.program_id(0)
    if pid < blocks:
        route = pid * ROUTES + tl.arange(0, ROUTES)
        expert = _load_experts(expert_ptr, route, routes, E, -1)
        for first in tl.range(0, E, EXPERTS):
            e = first + tl.arange(0, EXPERTS)
            found = tl.sum((expert[:, None] == e[None, :]).to(tl.int32), axis=0)
            tl.store(histogram_ptr + e.to(tl.int64) * blocks + pid, found, mask=e < E)
    else:
        # Cells of one destination in (local expert, source) order; E of them for any R.
        destination = pid - blocks
        cell = tl.arange(0, CELLS)
        local = cell // R
        source = cell % R
        inside = cell < E
        at = source * E + destination * L + local
        wanted = tl.load(counts_ptr + at, mask=inside, other=0)
        total = tl.cumsum(wanted, axis=0)
        start = tl.minimum(total - wanted, capacity)
        end = tl.minimum(total, capacity)
        tl.store(kept_ptr + at, end - start, mask=inside)
        mine = inside & (source == RANK)
        tl.store(base_ptr + destination * L + local, start.to(tl.int32), mask=mine)
        if destination == RANK:
            tl.store(offsets_ptr + local, end.to(tl.int32), mask=inside & (source == R - 1))


@prepared
@triton.jit
def _scan_kernel(
    histogram_ptr, counts_ptr, kept_ptr, offsets_ptr, stats_ptr, blocks, RANK, E: tl.constexpr, L: tl.constexpr,
    CELLS: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    if expert < E:
        before = 0
        row = histogram_ptr + expert.to(tl.int64) * blocks
        for first in tl.range(0, blocks, SCAN):
            b = first + tl.arange(0, SCAN)
            found = tl.load(row + b, mask=b < blocks, other=0)
            tl.store(row + b, before + tl.cumsum(found, axis=0) - found, mask=b < blocks)
            before += tl.sum(found, axis=0)
    else:
        e = tl.arange(0, CELLS)
        offered = tl.sum(tl.load(counts_ptr + RANK * E + e, mask=e < E, other=0), axis=0)
        accepted = tl.sum(tl.load(kept_ptr + RANK * E + e, mask=e < E, other=0), axis=0)
        tl.store(stats_ptr, offered)
        tl.store(stats_ptr + 1, accepted)
        tl.store(stats_ptr + 2, offered - accepted)
        tl.store(stats_ptr + 3, tl.load(offsets_ptr + L - 1).to(tl.int64))


@prepared
@triton.jit
def _map_kernel(
    expert_ptr, prefix_ptr, base_ptr, kept_ptr, rank_ptr, row_ptr, routes, blocks, RANK, E: tl.constexpr,
    L: tl.constexpr, ROUTES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    i = tl.arange(0, ROUTES)
    at = pid * ROUTES + i
    expert = _load_experts(expert_ptr, at, routes, E, -1)
    position = tl.zeros([ROUTES], dtype=tl.int32)
    for first in tl.static_range(0, ROUTES, CHUNK):
        j = first + tl.arange(0, CHUNK)
        other = _load_experts(expert_ptr, pid * ROUTES + j, routes, E, -2)
        same = (expert[:, None] == other[None, :]) & (j[None, :] < i[:, None])
        position += tl.sum(same.to(tl.int32), axis=1)
    valid = expert >= 0
    position += tl.load(prefix_ptr + expert.to(tl.int64) * blocks + pid, mask=valid, other=0)
    keep = valid & (position < tl.load(kept_ptr + RANK * E + expert, mask=valid, other=0))
    base = tl.load(base_ptr + expert, mask=valid, other=0)
    tl.store(rank_ptr + at, tl.where(keep, expert // L, -1), mask=at < routes)
    tl.store(row_ptr + at, tl.where(keep, base + position, -1), mask=at < routes)


def _fake(experts, counts, rank, capacity):
    maps = experts.new_empty(experts.shape, dtype=torch.int32)
    offsets = experts.new_empty(counts.shape[1] // counts.shape[0], dtype=torch.int32)
    return maps, torch.empty_like(maps), offsets, torch.empty_like(counts), counts.new_empty(4)


@compile_safe("route_map", mutates=(), fake=_fake)
def route_map(
    experts: torch.Tensor, counts: torch.Tensor, rank: int, capacity: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dst_rank, dst_row int32 [T, K], offsets int32 [L], kept int64 [R, E], stats int64 [4]."""
    dst_rank, dst_row, offsets, kept, stats = _fake(experts, counts, rank, capacity)
    ranks, num_experts = counts.shape
    local = num_experts // ranks
    routes = experts.numel()
    blocks = cdiv(routes, ROUTES)
    workspace = torch.empty(num_experts * (blocks + 1), dtype=torch.int32, device=experts.device)
    base, histogram = workspace[:num_experts], workspace[num_experts:]
    cells = next_power_of_two(num_experts)
    with on_device(experts):
        _count_kernel[(blocks + ranks,)](
            experts, counts, histogram, base, kept, offsets, routes, blocks, capacity, rank, R=ranks, L=local,
            CELLS=cells, ROUTES=ROUTES, EXPERTS=min(EXPERTS, cells), num_warps=4,
        )  # fmt: skip
        _scan_kernel[(num_experts + 1,)](
            histogram, counts, kept, offsets, stats, blocks, rank, E=num_experts, L=local, CELLS=cells,
            SCAN=min(SCAN, next_power_of_two(blocks)), num_warps=4,
        )  # fmt: skip
        if routes:
            _map_kernel[(blocks,)](
                experts, histogram, base, kept, dst_rank, dst_row, routes, blocks, rank, E=num_experts, L=local,
                ROUTES=ROUTES, CHUNK=min(CHUNK, ROUTES), num_warps=4,
            )  # fmt: skip
    return dst_rank, dst_row, offsets, kept, stats
