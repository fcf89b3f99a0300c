"""What kernel tests share: NaN-filled buffers, a poisoned allocator, error budgets derived from the arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# One rounding of a result loses at most one unit in the last place: half of it to nearest (hardware), all of it where
# the cast truncates (Triton's CPU interpreter). One bound for both.
ROUNDING = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-23, torch.float64: 2.0**-52}
# A tensor core adds aligned, truncated products: at most one FP32 unit in the last place per term.
FP32_TERM = 2.0**-23


def nan_filled(*shape: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Return a tensor of NaN: an element that nothing wrote stays visible."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def poison_allocator(size_bytes: int, device: torch.device | str) -> None:
    """Leave a freed block of NaN in torch's caching allocator, for the next allocation of that size to find."""
    block = nan_filled(max(1, size_bytes // 4), dtype=torch.float32, device=device)
    del block


def budget(reference: torch.Tensor, magnitude: torch.Tensor, terms: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the largest allowed error of each element of a sum computed in FP32 and rounded once to `dtype`.

    Args:
        reference: the exact result, FP64.
        magnitude: sum of the absolute values of the terms, same shape.
        terms: their number; every addition may lose one FP32 unit in the last place of the running magnitude.
        dtype: what the result is rounded to.
    """
    return ROUNDING[dtype] * reference.abs() + (terms + 2) * FP32_TERM * magnitude.abs() + 1e-37


def assert_within(actual: torch.Tensor, reference: torch.Tensor, allowed: torch.Tensor, name: str = "result") -> None:
    """Fail where |actual - reference| exceeds `allowed` or anything is NaN; the message gives the worst element."""
    error = (actual.detach().double() - reference).abs()
    bad = ~(error <= allowed)
    if bool(bad.any()):
        worst = int((error / allowed).nan_to_num(nan=float("inf")).argmax())
        raise AssertionError(
            f"{name}: {int(bad.sum())} of {bad.numel()} elements outside the budget; worst: got "
            f"{actual.flatten()[worst].item():.9g}, exact {reference.flatten()[worst].item():.9g}, "
            f"allowed error {allowed.flatten()[worst].item():.3g}"
        )


def offsets_of(sizes: Sequence[int], device: torch.device | str) -> torch.Tensor:
    """Return int32 inclusive cumulative offsets of group sizes."""
    return torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
