"""Grouped GEMM in plain PyTorch: one product per group, FP32 accumulation or wider, offsets read on the host."""

from __future__ import annotations

import torch


def bounds(offsets: torch.Tensor, rows: int) -> list[tuple[int, int]]:
    """Return (start, end) of each group; offsets are clamped to [0, rows] and made non-decreasing."""
    end, out = 0, []
    for value in offsets.tolist():
        start, end = end, min(max(int(value), end), rows)
        out.append((start, end))
    return out


def grouped_gemm(a_MK: torch.Tensor, b_LKN: torch.Tensor, offsets: torch.Tensor, out_MN: torch.Tensor) -> None:
    """Write a[rows of group l] @ b[l] to the same rows of `out`; rows past the last offset stay as they are."""
    wide = torch.promote_types(a_MK.dtype, torch.float32)
    for group, (start, end) in enumerate(bounds(offsets, a_MK.shape[0])):
        if end > start:
            out_MN[start:end] = (a_MK[start:end].to(wide) @ b_LKN[group].to(wide)).to(out_MN.dtype)


def grouped_gemm_wgrad(a_MK: torch.Tensor, grad_MN: torch.Tensor, offsets: torch.Tensor, out_LKN: torch.Tensor) -> None:
    """Write a[rows]^T @ grad[rows] of each group to out[l]; exactly 0 for a group without rows."""
    wide = torch.promote_types(a_MK.dtype, torch.float32)
    for group, (start, end) in enumerate(bounds(offsets, a_MK.shape[0])):
        out_LKN[group] = (a_MK[start:end].to(wide).t() @ grad_MN[start:end].to(wide)).to(out_LKN.dtype)
