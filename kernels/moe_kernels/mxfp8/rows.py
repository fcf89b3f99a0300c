"""MXFP8 operations on rows: quantise, fold, dequantise, after SwiGLU.

Shapes: T or M rows, K input width, N output width, E groups; `ends` are cumulative group ends, int32 [E], on the
device and never read by the host; rows past the last end belong to no group and keep what `out` held.

impl: "cuda" (sm_90a, needs nvcc once), "triton" (any GPU, or the CPU interpreter), "reference" (FP64 inside, any
device); what it names runs or the call raises. Without `impl` it is "cuda" on compute capability 9 where those kernels
do what is asked, else "triton" on a GPU and "reference" on the CPU.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from moe_kernels._launch import check_tensor, compile_safe, resolve_impl
from moe_kernels.mxfp8 import cuda, reference

BLOCK = reference.BLOCK
E4M3 = torch.float8_e4m3fn
IMPLS = ("cuda", "triton", "reference")
FLOATS = (torch.bfloat16, torch.float32)
INDEX_LIMIT = 2**31 - 256
"""Most rows of a matrix: they are int32 in the kernels, and so is a tile's last row past the end."""
FROM_MX, FROM_FLOAT, FROM_SWIGLU = 0, 1, 2
"""What rows are made of."""
_TARGETS = {"canonical": 0, "folded": 1, "row": 2}


class MX(NamedTuple):
    """A canonical MXFP8 tensor: payload [..., K] E4M3, scales [..., K/32] uint8 (E8M0 bytes)."""

    payload: torch.Tensor
    scales: torch.Tensor


class Folded(NamedTuple):
    """An MXFP8 tensor whose rows have one scale each: payload [..., K] E4M3, row_scale [...] uint8 (E8M0 bytes)."""

    payload: torch.Tensor
    row_scale: torch.Tensor


@cache
def _cuda_ready(index: int) -> bool:
    return cuda.available(torch.device("cuda", index))


@torch.compiler.assume_constant_result
def cuda_ready(index: int) -> bool:
    """Whether the CUDA kernels run on device `index`; a constant to torch.compile."""
    return _cuda_ready(index)


def pick_impl(impl: str | None, device: torch.device, misfit: str | None = None) -> str:
    """Return the implementation to run: the caller's, or by rule the first that does what is asked.

    Args:
        impl: one of `IMPLS`, or None.
        device: where the tensors are.
        misfit: what the CUDA kernels would do and what was asked instead, to be read after "impl='cuda'".

    Raises:
        ValueError: unknown name, or impl='cuda' with a misfit.
        RuntimeError: the implementation cannot run on this device.
    """
    if impl is None and misfit is None and device.type == "cuda" and cuda_ready(device.index or 0):
        return "cuda"
    impl = resolve_impl(impl, device, IMPLS)
    if impl == "cuda" and misfit is not None:
        raise ValueError(f"impl='cuda' {misfit}; use impl='triton', or leave impl out")
    if impl == "cuda" and not (device.type == "cuda" and cuda_ready(device.index or 0)):
        raise RuntimeError(f"impl='cuda' needs a GPU of compute capability 9 and nvcc; got a tensor on {device}")
    return impl


def check_width(name: str, width: int) -> None:
    if width % BLOCK or not width:
        raise ValueError(f"the last dimension of {name} must be a positive multiple of {BLOCK}; got {width}")


def check_mx(name: str, mx: MX | Folded, shape: tuple[int | None, ...], device: torch.device | None = None) -> None:
    """Check payload [..., K] E4M3 and its scales, [..., K/32] or one a row, against `shape` and each other."""
    payload, scales = mx
    check_tensor(f"{name} payload", payload, shape=shape, dtypes=(E4M3,), device=device, contiguous=True)
    *rows, K = payload.shape
    check_width(name, K)
    wanted = rows if isinstance(mx, Folded) else (*rows, K // BLOCK)
    check_tensor(f"{name} scales", scales, shape=wanted, dtypes=(torch.uint8,), device=payload.device, contiguous=True)


def is_rceil(rounding: str) -> bool:
    if rounding not in ("floor", "rceil"):
        raise ValueError(f"rounding must be 'floor' or 'rceil'; got {rounding!r}")
    return rounding == "rceil"


@compile_safe("mxfp8_rows", mutates=("out", "out_scales", "wide"))
def run_rows(
    x: torch.Tensor,
    scales: torch.Tensor | None,
    out: torch.Tensor,
    out_scales: torch.Tensor,
    wide: torch.Tensor | None,
    source: int,
    target: int,
    rceil: bool,
    impl: str,
    flags: int = 0,
) -> None:
    if impl == "cuda":
        kind = cuda.FROM_MX if source == FROM_MX else cuda.FROM_BF16_RCEIL if rceil else cuda.FROM_BF16_FLOOR
        cuda.rows(x, scales, out, out_scales, wide, kind, target, flags)
    elif impl == "reference":
        _rows_reference(x, scales, out, out_scales, wide, source, target, "rceil" if rceil else "floor")
    else:
        from moe_kernels.mxfp8 import triton

        triton.rows(x, scales, out, out_scales, wide, source, target, rceil)


def _rows_reference(x, scales, out, out_scales, wide, source, target, rounding) -> None:
    if source == FROM_MX:
        payload, byte, count = reference.fold(x, scales)
    else:
        x = reference.swiglu(x) if source == FROM_SWIGLU else x
        canonical = reference.quantize(x, rounding)
        *folded, count = reference.fold(*canonical)
        payload, byte = (canonical, folded, reference.quantize_rows(x, rounding))[target]
    out.copy_(payload)
    out_scales.copy_(byte)
    if wide is not None:
        wide += count


def new_rows(rows: int, width: int, target: str, device: torch.device, out: tuple[torch.Tensor, torch.Tensor] | None):
    if target not in tuple(_TARGETS):  # a tuple, because what cannot be hashed shall get the same error
        raise ValueError(f"target must be one of {', '.join(_TARGETS)}; got {target!r}")
    if rows > INDEX_LIMIT:
        raise ValueError(f"at most {INDEX_LIMIT} rows can be converted in a call; got {rows}")
    shape = (rows, width // BLOCK) if target == "canonical" else (rows,)
    if out is None:
        return torch.empty(rows, width, dtype=E4M3, device=device), torch.empty(shape, dtype=torch.uint8, device=device)
    if not isinstance(out, tuple) or len(out) != 2:
        raise TypeError(f"out must be a pair (payload, scales) or None; got {type(out).__name__}")
    check_tensor("out payload", out[0], shape=(rows, width), dtypes=(E4M3,), device=device, contiguous=True)
    check_tensor("out scales", out[1], shape=shape, dtypes=(torch.uint8,), device=device, contiguous=True)
    return out


def _convert(x, scales, source, width, target, rounding, impl, out, wide, misfit=None) -> Any:
    if wide is not None:
        check_tensor("wide", wide, shape=(1,), dtypes=(torch.int32,), device=x.device)
    pair = new_rows(x.shape[0], width, target, x.device, out)
    impl, rceil = pick_impl(impl, x.device, misfit), is_rceil(rounding)
    run_rows(x, scales, *pair, wide, source, _TARGETS[target], rceil, impl)
    return MX(*pair) if target == "canonical" else Folded(*pair)


def quantize(
    x: torch.Tensor,
    rounding: str = "floor",
    target: str = "canonical",
    *,
    impl: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    wide: torch.Tensor | None = None,
) -> Any:
    """Quantise rows to MXFP8. x: [M, K] BF16 or FP32, K a multiple of 32 and of 16 bytes.

    Args:
        x: rows.
        rounding: "floor" (OCP, the default) or "rceil" (NVIDIA).
        target: "canonical" scales of 32; "folded": canonical and then shifted to one scale a row; "row": one scale a
            row chosen from the row's maximum (another rounding and other clipping than "folded").
        impl: see the module.
        out: (payload, scales) to write.
        wide: int32 [1] on x's device; rows whose non-zero blocks spread over more than 8 powers of two are added to it.

    Returns:
        MX for the target "canonical", Folded for the others.

    Raises:
        ValueError, TypeError: wrong shape, dtype or option.

    Source: OCP MX v1.0, section 6.3.
    """
    check_tensor("x", x, shape=(None, None), dtypes=FLOATS, contiguous=True)
    check_width("x", x.shape[1])
    misfit = None if x.dtype is torch.bfloat16 else f"quantises rows of torch.bfloat16, got x of {x.dtype}"
    return _convert(x, None, FROM_FLOAT, x.shape[1], target, rounding, impl, out, wide, misfit)


def fold(
    mx: MX,
    *,
    impl: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    wide: torch.Tensor | None = None,
) -> Folded:
    """Shift every block of a row to the row's largest exponent. mx: payload [M, K], scales [M, K/32].

    Elements that stay normal keep their value; others err by at most 2^(d - 18) of their block's maximum for a shift
    of d. It is not exact: `wide` (int32 [1], added to) counts the rows whose spread exceeds 8; `grouped_gemm` of
    canonical operands is exact.
    """
    if not isinstance(mx, MX):
        raise TypeError(f"fold takes MX; got {type(mx).__name__}")
    check_mx("mx", mx, (None, None))
    return _convert(*mx, FROM_MX, mx.payload.shape[1], "folded", "floor", impl, out, wide)


def dequantize(mx: MX | Folded, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the values of an MXFP8 tensor [..., K] in `dtype`: exact in FP64, in BF16 within its exponent range."""
    return reference.dequantize(*mx).to(dtype)


def swiglu_quantize(
    h: torch.Tensor,
    rounding: str = "floor",
    target: str = "canonical",
    *,
    impl: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    wide: torch.Tensor | None = None,
) -> Any:
    """Return quantize(silu(gate) * up) in one pass. h: [M, 2F] BF16 or FP32, gate first; the product is rounded to
    BF16 in between."""
    check_tensor("h", h, shape=(None, None), dtypes=FLOATS, contiguous=True)
    if h.shape[1] % (2 * BLOCK) or not h.shape[1]:
        raise ValueError(f"the width of h must be a positive multiple of {2 * BLOCK} (gate and up); got {h.shape[1]}")
    misfit = "quantises rows as they are, got rows that go through SwiGLU first"
    return _convert(h, None, FROM_SWIGLU, h.shape[1] // 2, target, rounding, impl, out, wide, misfit)
