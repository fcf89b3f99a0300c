"""MXFP8 in short PyTorch that runs anywhere, in integers and FP64: it defines what the kernels must compute.

Source: OCP Microscaling Formats (MX) v1.0, section 6.3 (floor rule); NVIDIA's block-scaling rule `2^ceil(log2(amax /
448))` (rceil).
"""

from __future__ import annotations

import torch

BLOCK = 32
E4M3_MAX = 448.0
NAN_SCALE = 255
SPREAD_LIMIT = 8
"""A row whose non-zero blocks spread over more powers of two than this is counted by the fold's spread counter."""


def scale_value(byte: torch.Tensor) -> torch.Tensor:
    """Return 2^(byte - 127) in FP64; byte 255 is NaN and byte 0 is 2^-127. byte: any shape, uint8."""
    return torch.where(byte == NAN_SCALE, torch.nan, _power_of_two(byte.to(torch.int64) - 127))


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2^exponent in FP64, from its bits. exponent: int64, -1022 to 1023.

    `torch.ldexp` of torch 2.11 runs on the current device, whichever its tensors are on.
    """
    return (exponent + 1023 << 52).view(torch.float64)


def to_e4m3(value: torch.Tensor) -> torch.Tensor:
    """Round to nearest even E4M3 with saturation at 448; NaN stays NaN.

    The clamp stands before the cast because torch before 2.13 turns finite overflow into NaN.
    """
    return value.to(torch.float32).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def exponent_byte(amax: torch.Tensor, rounding: str) -> torch.Tensor:
    """Return the E8M0 byte of a block (or row) maximum, from its FP32 bits. amax: any shape, FP32, not negative.

    floor: floor(log2 amax) - 8; rceil: ceil(log2(amax / 448)). NaN and Inf give 255, underflow 0.
    """
    if rounding not in ("floor", "rceil"):
        raise ValueError(f"rounding must be 'floor' or 'rceil'; got {rounding!r}")
    bits = amax.to(torch.float32).view(torch.int32)
    exponent, mantissa = (bits >> 23) & 255, bits & 0x7FFFFF
    byte = exponent - 8
    if rounding == "rceil":
        byte = byte + (mantissa > 0x600000).to(torch.int32)
    byte = byte.clamp(0, 254)
    return torch.where(exponent == 255, NAN_SCALE, byte).to(torch.uint8)


def quantize(x: torch.Tensor, rounding: str = "floor") -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise blocks of 32 along the last dimension. x: [..., K] FP32 or BF16 -> payload [..., K] E4M3, scales
    [..., K/32] uint8.

    A block that holds NaN or Inf gets scale 255 and NaN elements. Raises ValueError when K is no multiple of 32.
    """
    if x.shape[-1] % BLOCK:
        raise ValueError(f"the last dimension must be a multiple of {BLOCK}; got {x.shape[-1]}")
    blocks = x.to(torch.float32).unflatten(-1, (-1, BLOCK))
    byte = exponent_byte(blocks.abs().amax(-1), rounding)
    scaled = blocks.to(torch.float64) / scale_value(byte).unsqueeze(-1)
    return to_e4m3(scaled).flatten(-2), byte


def quantize_rows(x: torch.Tensor, rounding: str = "floor") -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with one shared power-of-two scale a row (also a valid MXFP8 tensor). x: [M, K] -> payload [M, K],
    row scale [M] uint8."""
    byte = exponent_byte(x.to(torch.float32).abs().amax(-1), rounding)
    return to_e4m3(x.to(torch.float64) / scale_value(byte).unsqueeze(-1)), byte


def dequantize(payload: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the exact values in FP64. payload: [..., K] E4M3; scales: [..., K/32] uint8, or [...] uint8 for one
    scale a row."""
    values = payload.to(torch.float64)
    if scales.dim() == payload.dim() - 1:
        return values * scale_value(scales).unsqueeze(-1)
    return (values.unflatten(-1, (-1, BLOCK)) * scale_value(scales).unsqueeze(-1)).flatten(-2)


def fold(payload: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Shift every block of a row to the row's largest exponent. [M, K] E4M3, [M, K/32] uint8 -> payload, row scale
    [M] uint8, wide rows.

    Blocks of zeros have no say in the maximum. Elements that stay normal are unchanged; others err by at most 2^(d -
    18) of
    their own block's maximum, where d is the shift. A row with a NaN scale becomes NaN as a whole.
    """
    blocks = payload.to(torch.float64).unflatten(-1, (-1, BLOCK))
    byte = scales.to(torch.int32)
    counts = (blocks != 0).any(-1) | (byte == NAN_SCALE)
    top = torch.where(counts, byte, 0).amax(-1)
    low = torch.where(counts, byte, 255).amin(-1)
    shift = (top.unsqueeze(-1) - byte).clamp(min=0)
    moved = blocks * _power_of_two(-shift.to(torch.int64)).unsqueeze(-1)
    moved = torch.where((byte == NAN_SCALE).unsqueeze(-1), torch.nan, moved)
    return to_e4m3(moved).flatten(-2), top.to(torch.uint8), int(((top - low) > SPREAD_LIMIT).sum())


def group_starts(ends: torch.Tensor, rows: int) -> list[tuple[int, int]]:
    """Return (start, stop) of every group; ends are cumulative, int32 [E]; rows past the last end belong to no
    group."""
    stops = [min(max(int(e), 0), rows) for e in ends.tolist()]
    return list(zip([0, *stops[:-1]], stops))


def grouped_gemm(a_MK: torch.Tensor, w_ENK: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return a @ w[e]^T for the rows of every group in FP64; rows of no group are NaN. a: [M, K], w: [E, N, K],
    ends: [E] int32."""
    out = torch.full((a_MK.shape[0], w_ENK.shape[1]), torch.nan, dtype=torch.float64, device=a_MK.device)
    for e, (start, stop) in enumerate(group_starts(ends, a_MK.shape[0])):
        if stop > start:
            out[start:stop] = a_MK[start:stop].to(torch.float64) @ w_ENK[e].to(torch.float64).T
    return out


def swiglu(h_M2F: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, gate first, rounded to BF16. h: [M, 2F] -> [M, F]."""
    gate, up = h_M2F.to(torch.float32).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(torch.bfloat16)
