"""SwiGLU kernels: a persistent grid walks the valid rows only, so time follows the valid count."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_kernels._launch import cdiv, compile_safe, grid_size, next_power_of_two, on_device
from moe_kernels._prepared import prepared

PROGRAMS_PER_SM = 8
TILE = 1024


@prepared
@triton.jit
def _forward_kernel(
    h_ptr, out_ptr, offsets_ptr, last, rows, F: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr
):
    valid = tl.minimum(tl.load(offsets_ptr + last), rows)
    column_tiles: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    tiles = tl.cdiv(valid, BLOCK_R) * column_tiles
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        r = (tile // column_tiles) * BLOCK_R + tl.arange(0, BLOCK_R)
        c = (tile % column_tiles) * BLOCK_F + tl.arange(0, BLOCK_F)
        mask = (r < valid)[:, None] & (c < F)[None, :]
        at = r.to(tl.int64)[:, None] * (2 * F) + c[None, :]
        gate = tl.load(h_ptr + at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(h_ptr + at + F, mask=mask, other=0.0).to(tl.float32)
        y = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(out_ptr + r.to(tl.int64)[:, None] * F + c[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)


@prepared
@triton.jit
def _swiglu_backward_kernel(
    h_ptr, grad_ptr, out_ptr, offsets_ptr, last, rows, F: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr
):
    valid = tl.minimum(tl.load(offsets_ptr + last), rows)
    column_tiles: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    tiles = tl.cdiv(valid, BLOCK_R) * column_tiles
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        r = (tile // column_tiles) * BLOCK_R + tl.arange(0, BLOCK_R)
        c = (tile % column_tiles) * BLOCK_F + tl.arange(0, BLOCK_F)
        mask = (r < valid)[:, None] & (c < F)[None, :]
        at = r.to(tl.int64)[:, None] * (2 * F) + c[None, :]
        gate = tl.load(h_ptr + at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(h_ptr + at + F, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + r.to(tl.int64)[:, None] * F + c[None, :], mask=mask, other=0.0).to(tl.float32)
        s = 1.0 / (1.0 + tl.exp(-gate))
        d_gate = grad * up * s * (1.0 + gate * (1.0 - s))
        # Each element is read by the thread that overwrites it, so out may be h.
        tl.store(out_ptr + at, d_gate.to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(out_ptr + at + F, (grad * gate * s).to(out_ptr.dtype.element_ty), mask=mask)


def _launch(kernel, h: torch.Tensor, offsets: torch.Tensor, *others: torch.Tensor) -> None:
    """Launch one of the two kernels over h [C, 2F] and `others`, in the kernel's order."""
    rows, F = h.shape[0], h.shape[1] // 2
    if rows == 0:
        return
    even = F & -F
    block_f = min(even, 512) if even >= 64 else min(next_power_of_two(F), 512)
    block_r = max(1, TILE // block_f)
    with on_device(h):
        grid = (min(cdiv(rows, block_r) * cdiv(F, block_f), grid_size(h.device, PROGRAMS_PER_SM)),)
        last = offsets.shape[0] - 1
        kernel[grid](h, *others, offsets, last, rows, F=F, BLOCK_R=block_r, BLOCK_F=block_f, num_warps=4)


@compile_safe("swiglu", mutates=("out",))
def swiglu(h: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> None:
    """Write the activation of the valid rows of h [C, 2F] to out [C, F]."""
    _launch(_forward_kernel, h, offsets, out)


@compile_safe("swiglu_backward", mutates=("out",))
def swiglu_backward(h: torch.Tensor, grad: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> None:
    """Write the gradient of the valid rows to out [C, 2F], which may be h."""
    _launch(_swiglu_backward_kernel, h, offsets, grad, out)
