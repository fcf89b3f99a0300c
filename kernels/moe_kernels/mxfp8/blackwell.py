"""Block-scaled MXFP8 in hardware (compute capability 10) through torch's scaled grouped GEMM.

Written from the documentation and NOT RUN: no such GPU was at hand. The layout of the scales is tested on the CPU.
"""

from __future__ import annotations

import torch

from moe_kernels.mxfp8.rows import MX


def available(device: torch.device | None = None) -> bool:
    """Whether this GPU multiplies MXFP8 blocks itself (compute capability 10.x) and torch offers the call (2.10 or
    newer)."""
    return (
        torch.cuda.is_available()
        and (device is None or device.type == "cuda")
        and torch.cuda.get_device_capability(device)[0] == 10
        and hasattr(torch.nn.functional, "scaled_grouped_mm")
    )


def swizzle_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return scales [rows, K/32] in the 128 x 4 tiles that the tensor cores read, padded with zeros, flat.

    Inside a tile the byte of row r and block c lies at (r % 32) * 16 + (r // 32) * 4 + c.

    Source: NVIDIA cuBLAS documentation, "1D block scaling factors layout".
    """
    rows, blocks = scales.shape
    padded = torch.nn.functional.pad(scales, (0, -blocks % 4, 0, -rows % 128))
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def grouped_gemm(a: MX, w: MX, ends: torch.Tensor) -> torch.Tensor:
    """Return a @ w[e]^T of each group in BF16 from canonical operands. Group sizes must be multiples of 128 (padded
    scale tiles).

    Raises:
        RuntimeError: the GPU has no block-scaled MMA.
    """
    if not available(a.payload.device):
        raise RuntimeError(
            "the block-scaled path needs a GPU of compute capability 10 and torch 2.10; "
            "moe_kernels.mxfp8.grouped_gemm runs elsewhere"
        )
    from torch.nn import functional as F

    E = w.payload.shape[0]
    w_scales = torch.stack([swizzle_scales(s) for s in w.scales]).view(torch.float8_e8m0fnu)
    return F.scaled_grouped_mm(  # pyright: ignore[reportAttributeAccessIssue]
        a.payload,
        w.payload.transpose(1, 2),
        swizzle_scales(a.scales).view(torch.float8_e8m0fnu),
        F.ScalingType.BlockWise1x32,
        w_scales.view(E, -1),
        F.ScalingType.BlockWise1x32,
        swizzle_a=F.SwizzleType.SWIZZLE_32_4_4,
        swizzle_b=F.SwizzleType.SWIZZLE_32_4_4,
        offs=ends,
        output_dtype=torch.bfloat16,
    )
