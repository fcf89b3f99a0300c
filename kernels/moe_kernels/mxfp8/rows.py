"""MXFP8 operations on rows: quantise, fold, dequantise, after SwiGLU.

Shapes: T or M rows, K input width, N output width, E groups; `ends` are cumulative group ends, int32 [E], on the
device and never read by the host; rows past the last end belong to no group and keep what `out` held.

impl: "cuda" (sm_90a, needs nvcc once), "triton" (any GPU, or the CPU interpreter), "reference" (FP64 inside, any
device); what it names runs or the call raises. Without `impl` it is "cuda" on compute capability 9 where those kernels
do what is asked, else "triton" on a GPU and "reference" on the CPU.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple, overload

import torch

from moe_kernels import _compat
from moe_kernels._launch import check_tensor, compile_safe, on_device, resolve_impl
from moe_kernels.mxfp8 import reference

BLOCK = reference.BLOCK
E4M3 = torch.float8_e4m3fn
IMPLS = ("cuda", "triton", "reference")
FLOATS = (torch.bfloat16, torch.float32)
INDEX_LIMIT = 2**31 - 256
"""Most rows of a matrix: they are int32 in the kernels, and so is a tile's last row past the end."""
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
    from moe_kernels.mxfp8 import cuda

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


def stream_of(device: torch.device) -> int:
    return _compat.current_stream_address(device.index)


def check_width(name: str, width: int) -> None:
    if width % BLOCK or not width:
        raise ValueError(f"the last dimension of {name} must be a positive multiple of {BLOCK}; got {width}")


def check_aligned(name: str, tensor: torch.Tensor) -> None:
    # The CUDA kernels move 16 bytes at a time; an odd address would end the process's use of the GPU. The compiler's
    # tensors have no address.
    if not torch.compiler.is_compiling() and tensor.data_ptr() % 16:
        raise ValueError(
            f"impl='cuda' needs {name} to start at a multiple of 16 bytes; got {tensor.data_ptr() % 16} bytes past one"
        )


def check_wide(wide: torch.Tensor | None, device: torch.device) -> None:
    if wide is not None:
        check_tensor("wide", wide, shape=(1,), dtypes=(torch.int32,), device=device)


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
    M, K = out.shape
    if impl == "cuda":
        from moe_kernels.mxfp8 import cuda

        check_aligned("the rows", x)
        check_aligned("out payload", out)
        kind = cuda.FROM_MX if source == 0 else cuda.FROM_BF16_RCEIL if rceil else cuda.FROM_BF16_FLOOR
        with on_device(out):
            status = (
                cuda.library().mx_rows_launch(
                    x.data_ptr(),
                    None if scales is None else scales.data_ptr(),
                    out.data_ptr(),
                    out_scales.data_ptr(),
                    None if wide is None else wide.data_ptr(),
                    M,
                    K,
                    kind,
                    target,
                    flags,
                    stream_of(out.device),
                    None,
                )
                if M
                else 0
            )
        cuda.check(status, "MXFP8 row kernel")
    elif impl == "reference":
        _rows_reference(x, scales, out, out_scales, wide, source, target, "rceil" if rceil else "floor")
    else:
        from moe_kernels.mxfp8 import triton

        with on_device(out):
            triton.rows(x, scales, out, out_scales, source=source, target=target, rceil=rceil, wide=wide)


def _rows_reference(x, scales, out, out_scales, wide, source, target, rounding) -> None:
    if source == 0:
        payload, byte, count = reference.fold(x, scales)
    elif target == 2:
        (payload, byte), count = (
            reference.quantize_rows(x, rounding),
            reference.fold(*reference.quantize(x, rounding))[2],
        )
    else:
        payload, byte = reference.swiglu_quantize(x, rounding) if source == 2 else reference.quantize(x, rounding)
        folded, row_scale, count = reference.fold(payload, byte)
        if target == 1:
            payload, byte = folded, row_scale
    out.copy_(payload)
    out_scales.copy_(byte)
    if wide is not None:
        wide += count


def _target_code(target: str) -> int:
    if target not in tuple(_TARGETS):  # a tuple, because what cannot be hashed shall get the same error
        raise ValueError(f"target must be one of {', '.join(_TARGETS)}; got {target!r}")
    return _TARGETS[target]


def new_rows(rows: int, width: int, target: str, device: torch.device, out: tuple[torch.Tensor, torch.Tensor] | None):
    _target_code(target)
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


def _pack(target: str, payload: torch.Tensor, scales: torch.Tensor) -> MX | Folded:
    return MX(payload, scales) if target == "canonical" else Folded(payload, scales)


@overload
def quantize(
    x: torch.Tensor,
    rounding: str = "floor",
    target: Literal["canonical"] = "canonical",
    *,
    impl: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    wide: torch.Tensor | None = None,
) -> MX: ...


@overload
def quantize(
    x: torch.Tensor,
    rounding: str = "floor",
    *,
    target: Literal["folded", "row"],
    impl: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    wide: torch.Tensor | None = None,
) -> Folded: ...


@overload
def quantize(
    x: torch.Tensor,
    rounding: str = "floor",
    target: str = "canonical",
    *,
    impl: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    wide: torch.Tensor | None = None,
) -> MX | Folded: ...


def quantize(
    x: torch.Tensor,
    rounding: str = "floor",
    target: str = "canonical",
    *,
    impl: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    wide: torch.Tensor | None = None,
) -> MX | Folded:
    """Quantise rows to MXFP8. x: [M, K] BF16 or FP32, K a multiple of 32 and of 16 bytes.

    Args:
        x: rows.
        rounding: "floor" (OCP, the default) or "rceil" (NVIDIA).
        target: "canonical" scales of 32; "folded": canonical and then shifted to one scale a row; "row": one scale a
            row chosen from the row's maximum (another rounding and other clipping than "folded").
        impl: see the module.
        out: (payload, scales) to write.
        wide: int32 [1] on x's device; rows whose non-zero blocks spread over more than 8 powers of two are added to it.

    Raises:
        ValueError, TypeError: wrong shape, dtype or option.

    Source: OCP MX v1.0, section 6.3.
    """
    check_tensor("x", x, shape=(None, None), dtypes=FLOATS, contiguous=True)
    check_width("x", x.shape[1])
    check_wide(wide, x.device)
    payload, scales = new_rows(x.shape[0], x.shape[1], target, x.device, out)
    misfit = None if x.dtype is torch.bfloat16 else f"quantises rows of torch.bfloat16, got x of {x.dtype}"
    impl = pick_impl(impl, x.device, misfit)
    run_rows(x, None, payload, scales, wide, 1, _TARGETS[target], is_rceil(rounding), impl)
    return _pack(target, payload, scales)


def fold(
    mx: MX,
    *,
    impl: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    wide: torch.Tensor | None = None,
) -> Folded:
    """Shift every block of a row to the row's largest exponent. mx: payload [M, K], scales [M, K/32].

    Elements that stay normal keep their value; others err by at most 2^(d - 18) of their block's maximum for a shift
    of d. It is not
    exact: `wide` (int32 [1], added to) counts the rows whose spread exceeds 8; `grouped_gemm` of canonical operands
        is exact.
    """
    if not isinstance(mx, MX):
        raise TypeError(f"fold takes MX; got {type(mx).__name__}")
    check_tensor("payload", mx.payload, shape=(None, None), dtypes=(E4M3,), contiguous=True)
    M, K = mx.payload.shape
    check_width("payload", K)
    check_tensor(
        "scales", mx.scales, shape=(M, K // BLOCK), dtypes=(torch.uint8,), device=mx.payload.device, contiguous=True
    )
    check_wide(wide, mx.payload.device)
    payload, row_scale = new_rows(M, K, "folded", mx.payload.device, out)
    run_rows(mx.payload, mx.scales, payload, row_scale, wide, 0, 1, False, pick_impl(impl, mx.payload.device))
    return Folded(payload, row_scale)


def dequantize(mx: MX | Folded, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the values of an MXFP8 tensor [..., K] in `dtype` (exact in FP64, and in BF16 within its exponent
    range)."""
    return reference.dequantize(*mx).to(dtype)


@overload
def swiglu_quantize(
    h: torch.Tensor,
    rounding: str = "floor",
    target: Literal["canonical"] = "canonical",
    *,
    impl: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    wide: torch.Tensor | None = None,
) -> MX: ...


@overload
def swiglu_quantize(
    h: torch.Tensor,
    rounding: str = "floor",
    *,
    target: Literal["folded", "row"],
    impl: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    wide: torch.Tensor | None = None,
) -> Folded: ...


@overload
def swiglu_quantize(
    h: torch.Tensor,
    rounding: str = "floor",
    target: str = "canonical",
    *,
    impl: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    wide: torch.Tensor | None = None,
) -> MX | Folded: ...


def swiglu_quantize(
    h: torch.Tensor,
    rounding: str = "floor",
    target: str = "canonical",
    *,
    impl: str | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    wide: torch.Tensor | None = None,
) -> MX | Folded:
    """Return quantize(silu(gate) * up) in one pass. h: [M, 2F] BF16 or FP32, gate first; the product is rounded to
    BF16 in between."""
    check_tensor("h", h, shape=(None, None), dtypes=FLOATS, contiguous=True)
    if h.shape[1] % (2 * BLOCK) or not h.shape[1]:
        raise ValueError(f"the width of h must be a positive multiple of {2 * BLOCK} (gate and up); got {h.shape[1]}")
    F = h.shape[1] // 2
    check_wide(wide, h.device)
    payload, scales = new_rows(h.shape[0], F, target, h.device, out)
    impl = pick_impl(impl, h.device, "quantises rows as they are, got rows that go through SwiGLU first")
    run_rows(h, None, payload, scales, wide, 2, _TARGETS[target], is_rceil(rounding), impl)
    return _pack(target, payload, scales)
