"""Persistent grouped GEMM kernels that walk the int32 offsets on the device.

Rows are read through TMA descriptors where alignment allows it (16-byte rows), else through masked pointers; both
paths give the same values. Forward and input gradient never contract over rows, so rows past a group's end only reach
accumulator rows that are not stored. The weight gradient contracts over rows: in its last partial step both factors are
set to 0 behind the group's end.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_kernels import _compat
from moe_kernels._launch import compile_safe, grid_size, next_power_of_two, on_device
from moe_kernels._prepared import prepared


@triton.jit
def _dot(a, b, acc, CAST: tl.constexpr):
    if CAST:
        # The CPU interpreter multiplies bfloat16 as integers.
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _group_bounds(offsets_ptr, rows, L: tl.constexpr, BLOCK_L: tl.constexpr):
    """First and last row of each group, clamped to [0, rows] and made non-decreasing; no rows past L."""
    g = tl.arange(0, BLOCK_L)
    end = tl.load(offsets_ptr + g, mask=g < L, other=0)
    start = tl.load(offsets_ptr + g - 1, mask=(g > 0) & (g <= L), other=0)
    end = tl.associative_scan(tl.minimum(tl.maximum(end, 0), rows), 0, _larger)
    start = tl.associative_scan(tl.minimum(tl.maximum(start, 0), rows), 0, _larger)
    return start, end


@prepared
@triton.jit
def _gemm_kernel(
    a, b, out_ptr, offsets_ptr, rows, N, stride_bl, stride_bk, stride_bn, K: tl.constexpr, L: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr,
    TRANSPOSED: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    g = tl.arange(0, BLOCK_L)
    starts, ends = _group_bounds(offsets_ptr, rows, L, BLOCK_L)
    n_tiles = tl.cdiv(N, BLOCK_N)
    tile_ends = tl.cumsum(tl.cdiv(ends - starts, BLOCK_M) * n_tiles, axis=0)
    total = tl.max(tile_ends, axis=0)
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        group = tl.sum((tile_ends <= tile).to(tl.int32), axis=0)
        here = g == group
        start = tl.sum(tl.where(here, starts, 0), axis=0)
        end = tl.sum(tl.where(here, ends, 0), axis=0)
        m_tiles = tl.cdiv(end - start, BLOCK_M)
        local = tile - (tl.sum(tl.where(here, tile_ends, 0), axis=0) - m_tiles * n_tiles)
        m0 = start + (local % m_tiles) * BLOCK_M
        n0 = (local // m_tiles) * BLOCK_N
        m = m0 + tl.arange(0, BLOCK_M)
        n = n0 + tl.arange(0, BLOCK_N)
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        if TMA:
            for k0 in tl.range(0, K, BLOCK_K):
                x = a.load([m0, k0])
                if TRANSPOSED:
                    w = b.load([group, n0, k0]).reshape(BLOCK_N, BLOCK_K).T
                else:
                    w = b.load([group, k0, n0]).reshape(BLOCK_K, BLOCK_N)
                acc = _dot(x, w, acc, CAST)
        else:
            a_row = a + m.to(tl.int64)[:, None] * K
            b_column = b + group.to(tl.int64) * stride_bl + n.to(tl.int64)[None, :] * stride_bn
            for k0 in tl.range(0, K, BLOCK_K):
                k = k0 + tl.arange(0, BLOCK_K)
                x = tl.load(a_row + k[None, :], mask=(m < end)[:, None] & (k < K)[None, :], other=0.0)
                w = tl.load(
                    b_column + k.to(tl.int64)[:, None] * stride_bk, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0
                )
                acc = _dot(x, w, acc, CAST)
        mask = (m < end)[:, None] & (n < N)[None, :]
        tl.store(out_ptr + m.to(tl.int64)[:, None] * N + n[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


@prepared
@triton.jit
def _wgrad_kernel(
    a, grad, out, offsets_ptr, rows, K, N, L: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, TMA: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    g = tl.arange(0, BLOCK_L)
    starts, ends = _group_bounds(offsets_ptr, rows, L, BLOCK_L)
    m_tiles = tl.cdiv(K, BLOCK_M)
    n_tiles = tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), L * m_tiles * n_tiles, tl.num_programs(0)):
        group = tile // (m_tiles * n_tiles)
        local = tile % (m_tiles * n_tiles)
        m0 = (local // n_tiles) * BLOCK_M
        n0 = (local % n_tiles) * BLOCK_N
        start = tl.sum(tl.where(g == group, starts, 0), axis=0)
        end = tl.sum(tl.where(g == group, ends, 0), axis=0)
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        if TMA:
            whole = start + (end - start) // BLOCK_R * BLOCK_R
            for r0 in tl.range(start, whole, BLOCK_R):
                acc = _dot(a.load([r0, m0]).T, grad.load([r0, n0]), acc, CAST)
            if whole < end:
                # Rows of the next group, or of the tail, come along: both factors must be 0 there, for 0 * NaN is NaN.
                inside = (whole + tl.arange(0, BLOCK_R) < end)[:, None]
                x = tl.where(inside, a.load([whole, m0]), 0.0)
                y = tl.where(inside, grad.load([whole, n0]), 0.0)
                acc = _dot(x.T, y, acc, CAST)
            # The copy engine writes the tile while the next one is multiplied; it leaves out what lies past K and N.
            out.store([group, m0, n0], acc.to(out.dtype).reshape(1, BLOCK_M, BLOCK_N))
        else:
            m = m0 + tl.arange(0, BLOCK_M)
            n = n0 + tl.arange(0, BLOCK_N)
            for r0 in tl.range(start, end, BLOCK_R):
                r = r0 + tl.arange(0, BLOCK_R)
                inside = r < end
                x = tl.load(
                    a + r.to(tl.int64)[None, :] * K + m[:, None], mask=inside[None, :] & (m < K)[:, None], other=0.0
                )
                y = tl.load(
                    grad + r.to(tl.int64)[:, None] * N + n[None, :], mask=inside[:, None] & (n < N)[None, :], other=0.0
                )
                acc = _dot(x, y, acc, CAST)
            at = group.to(tl.int64) * K * N + m.to(tl.int64)[:, None] * N + n[None, :]
            tl.store(out + at, acc.to(out.dtype.element_ty), mask=(m < K)[:, None] & (n < N)[None, :])


def gemm_tiles(rows_per_group: int, interpreted: bool, wide: bool) -> tuple[int, int, int, int, int]:
    """Return BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages for an average group size known from shapes alone."""
    if interpreted:
        return 16, 32, 32, 4, 1
    if wide:
        return 64, 64, 32, 4, 2
    if rows_per_group <= 64:
        return 64, 128, 64, 4, 4
    return 128, 256, 64, 8, 3


def wgrad_tiles(rows_per_group: int, interpreted: bool, wide: bool) -> tuple[int, int, int, int, int]:
    """Return BLOCK_M (of K), BLOCK_N, BLOCK_R (rows a step), num_warps, num_stages; two programs share an SM."""
    if interpreted:
        return 32, 32, 16, 4, 1
    if wide:
        return 64, 64, 32, 4, 2
    return 128, 128, 32, 4, 2 if rows_per_group <= 64 else 4


@cache
def _has_tma(device: torch.device) -> bool:
    return device.type == "cpu" or torch.cuda.get_device_capability(device)[0] >= 9


def _tma_ready(*tensors: torch.Tensor) -> bool:
    """Whether base addresses and the outer strides are multiples of 16 bytes and the last stride is 1."""
    for tensor in tensors:
        size, (*outer, last) = tensor.element_size(), tensor.stride()
        if last != 1 or tensor.data_ptr() % 16 or not tensor.numel():
            return False
        for stride in outer:
            if stride * size % 16 or not stride:
                return False
    if tensors[0].is_cuda:
        _compat.bind_context()
    return _has_tma(tensors[0].device)


def _descriptor(tensor: torch.Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


@compile_safe("grouped_gemm", mutates=("out",))
def grouped_gemm(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> None:
    """Write a [M, K] @ b [L, K, N] group by group to out [M, N]."""
    rows, K = a.shape
    groups, _, N = b.shape
    if rows == 0 or N == 0 or groups == 0:
        return
    cast = _compat.interpreter_active()
    bm, bn, bk, warps, stages = gemm_tiles(rows // groups, cast, a.dtype is torch.float32)
    transposed = b.stride(2) != 1
    stored = b.transpose(1, 2) if transposed else b
    tma = K > 0 and _tma_ready(a, stored)
    with on_device(a):
        _gemm_kernel[(grid_size(a.device),)](
            _descriptor(a, [bm, bk]) if tma else a,
            _descriptor(stored, [1, bn, bk] if transposed else [1, bk, bn]) if tma else b, out, offsets, rows, N,
            b.stride(0), b.stride(1), b.stride(2), K=K, L=groups, BLOCK_L=next_power_of_two(groups), BLOCK_M=bm,
            BLOCK_N=bn, BLOCK_K=bk, TMA=tma, TRANSPOSED=transposed, CAST=cast, num_warps=warps, num_stages=stages,
        )  # fmt: skip


@compile_safe("grouped_gemm_wgrad", mutates=("out",))
def grouped_gemm_wgrad(a: torch.Tensor, grad: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> None:
    """Write a^T @ grad of each group to out [L, K, N]."""
    groups, K, N = out.shape
    if out.numel() == 0:
        return
    cast = _compat.interpreter_active()
    bm, bn, br, warps, stages = wgrad_tiles(a.shape[0] // groups, cast, a.dtype is torch.float32)
    tma = _tma_ready(a, grad, out)
    with on_device(a):
        _wgrad_kernel[(grid_size(a.device, 2),)](
            _descriptor(a, [br, bm]) if tma else a, _descriptor(grad, [br, bn]) if tma else grad,
            _descriptor(out, [1, bm, bn]) if tma else out, offsets, a.shape[0], K, N, L=groups,
            BLOCK_L=next_power_of_two(groups), BLOCK_M=bm, BLOCK_N=bn, BLOCK_R=br, TMA=tma, CAST=cast,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
