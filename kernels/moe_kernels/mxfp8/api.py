"""MXFP8 operations on rows and groups: quantise, fold, dequantise, grouped GEMM (folded, exact, quantising its input).

Shapes: T or M rows, K input width, N output width, E groups; `ends` are cumulative group ends, int32 [E], on the
device and
never read by the host; rows past the last end belong to no group and keep what `out` held.

impl: "cuda" (sm_90a, needs nvcc once), "triton" (any GPU, or the CPU interpreter), "reference" (FP64 inside, any
    device). Without
`impl` it is "cuda" on compute capability 9, "triton" on other GPUs and "reference" on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal, NamedTuple, overload

import torch

from moe_kernels._launch import check_offsets, check_tensor, compile_safe, on_device, resolve_impl
from moe_kernels.mxfp8 import reference

BLOCK = reference.BLOCK
E4M3 = torch.float8_e4m3fn
IMPLS = ("cuda", "triton", "reference")
_FLOATS = (torch.bfloat16, torch.float32)
_TARGETS = {"canonical": 0, "folded": 1, "row": 2}
SMALL_ROWS_PER_GROUP = 16
"""Mean rows a group up to which the kernel with tokens as MMA columns is the faster one (measured: NOTES.md)."""


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


def _impl(impl: str | None, device: torch.device) -> str:
    if impl is None and device.type == "cuda" and _cuda_ready(device.index or 0):
        return "cuda"
    impl = resolve_impl(impl, device, IMPLS)
    if impl == "cuda" and not (device.type == "cuda" and _cuda_ready(device.index or 0)):
        raise RuntimeError(f"impl='cuda' needs a GPU of compute capability 9 and nvcc; got a tensor on {device}")
    return impl


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def _check_width(name: str, width: int) -> None:
    if width % BLOCK:
        raise ValueError(f"the last dimension of {name} must be a multiple of {BLOCK}; got {width}")


def _rounding(rounding: str) -> bool:
    if rounding not in ("floor", "rceil"):
        raise ValueError(f"rounding must be 'floor' or 'rceil'; got {rounding!r}")
    return rounding == "rceil"


@compile_safe("mxfp8_rows", mutates=("out", "out_scales", "wide"))
def _rows(
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
    if impl == "cuda" and source != 2 and x.dtype is not torch.float32:
        from moe_kernels.mxfp8 import cuda

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
                    _stream(out.device),
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


def _new_rows(rows: int, width: int, target: str, device: torch.device, out: tuple[torch.Tensor, torch.Tensor] | None):
    if target not in _TARGETS:
        raise ValueError(f"target must be one of {', '.join(_TARGETS)}; got {target!r}")
    shape = (rows, width // BLOCK) if target == "canonical" else (rows,)
    if out is None:
        return torch.empty(rows, width, dtype=E4M3, device=device), torch.empty(shape, dtype=torch.uint8, device=device)
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
            row chosen
            from the row's maximum (another rounding and other clipping than "folded").
        impl: see the module.
        out: (payload, scales) to write.
        wide: int32 [1] on x's device; rows whose non-zero blocks spread over more than 8 powers of two are added to it.

    Raises:
        ValueError, TypeError: wrong shape, dtype or option.

    Source: OCP MX v1.0, section 6.3.
    """
    check_tensor("x", x, shape=(None, None), dtypes=_FLOATS, contiguous=True)
    _check_width("x", x.shape[1])
    payload, scales = _new_rows(x.shape[0], x.shape[1], target, x.device, out)
    _rows(x, None, payload, scales, wide, 1, _TARGETS[target], _rounding(rounding), _impl(impl, x.device))
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
    check_tensor("payload", mx.payload, shape=(None, None), dtypes=(E4M3,), contiguous=True)
    M, K = mx.payload.shape
    _check_width("payload", K)
    check_tensor(
        "scales", mx.scales, shape=(M, K // BLOCK), dtypes=(torch.uint8,), device=mx.payload.device, contiguous=True
    )
    payload, row_scale = _new_rows(M, K, "folded", mx.payload.device, out)
    _rows(mx.payload, mx.scales, payload, row_scale, wide, 0, 1, False, _impl(impl, mx.payload.device))
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
    check_tensor("h", h, shape=(None, None), dtypes=_FLOATS, contiguous=True)
    F = h.shape[1] // 2
    _check_width("h's half", F)
    payload, scales = _new_rows(h.shape[0], F, target, h.device, out)
    _rows(h, None, payload, scales, wide, 2, _TARGETS[target], _rounding(rounding), _impl(impl, h.device))
    return _pack(target, payload, scales)


def dispatch_quantize(
    x: torch.Tensor,
    rank: torch.Tensor,
    row: torch.Tensor,
    peer_payload: torch.Tensor,
    peer_scales: torch.Tensor,
    rounding: str = "floor",
    target: str = "canonical",
) -> None:
    """Quantise each token once and put it into its destinations' buffers, which may be peers' memory mapped here.

    Args:
        x: tokens [T, K], BF16 or FP32.
        rank: destination rank [T, k], int32; -1 drops the copy.
        row: destination row [T, k], int32.
        peer_payload: addresses [R], int64, of the ranks' payload buffers [C, K] E4M3, on x's device.
        peer_scales: addresses [R], int64, of their scale buffers, [C, K/32] ("canonical") or [C] bytes.
        rounding: as in `quantize`.
        target: as in `quantize`.

    Puts are complete for a peer only after the caller's own barrier, as with the BF16 dispatch.
    """
    check_tensor("x", x, shape=(None, None), dtypes=_FLOATS, contiguous=True)
    _check_width("x", x.shape[1])
    if target not in _TARGETS:
        raise ValueError(f"target must be one of {', '.join(_TARGETS)}; got {target!r}")
    check_tensor("rank", rank, shape=(x.shape[0], None), dtypes=(torch.int32,), device=x.device, contiguous=True)
    check_tensor("row", row, shape=rank.shape, dtypes=(torch.int32,), device=x.device, contiguous=True)
    check_tensor("peer_payload", peer_payload, shape=(None,), dtypes=(torch.int64,), device=x.device)
    check_tensor("peer_scales", peer_scales, shape=peer_payload.shape, dtypes=(torch.int64,), device=x.device)
    resolve_impl("triton", x.device, ("triton",))
    from moe_kernels.mxfp8 import triton

    with on_device(x):
        triton.scatter_rows(x, peer_payload, peer_scales, rank, row, target=_TARGETS[target], rceil=_rounding(rounding))


@compile_safe("mxfp8_grouped_gemm", mutates=("out",))
def _gemm(
    a: torch.Tensor,
    a_scales: torch.Tensor | None,
    w: torch.Tensor,
    w_scales: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    source: int,
    impl: str,
    variant: int,
    flags: int,
) -> None:
    (M, K), (E, N) = a.shape, w.shape[:2]
    if M == 0 or E == 0:
        return
    if impl == "cuda" and w_scales.dim() == 2:
        from moe_kernels.mxfp8 import cuda

        lib = cuda.library()
        head = (
            a.data_ptr(),
            None if a_scales is None else a_scales.data_ptr(),
            w.data_ptr(),
            w_scales.data_ptr(),
            ends.data_ptr(),
            out.data_ptr(),
            M,
            N,
            K,
            E,
        )
        with on_device(out):
            if variant >= SMALL:
                status = lib.mx_small_launch(*head, source, variant - SMALL, flags, _stream(out.device))
            else:
                status = lib.mx_big_launch(*head, variant, flags, _stream(out.device))
        cuda.check(status, "MXFP8 grouped GEMM")
        return
    if a_scales is None:
        raise ValueError("only the CUDA kernels quantise inside the product; quantise the rows first")
    if impl == "reference":
        result = reference.grouped_gemm(reference.dequantize(a, a_scales), reference.dequantize(w, w_scales), ends)
        inside = torch.arange(M, device=out.device) < ends[-1]
        out.copy_(torch.where(inside.unsqueeze(1), result.to(out.dtype), out))
    else:
        from moe_kernels.mxfp8 import triton

        with on_device(out):
            triton.grouped_gemm(a, a_scales, w, w_scales, ends, out)


OVERLAP, RELEASE = 1, 2
"""Launcher flags: start while the launch before drains; a row kernel lets the launch after it start early."""
SMALL, TWO_BLOCKS = 1000, 100
"""Variants of the CUDA GEMM: 0 to 3 as listed in cuda.cu's `mx_big_launch`; SMALL + token columns (8, 16, 32, 64),
plus TWO_BLOCKS
for two blocks on each multiprocessor."""


def choose_variant(M: int, N: int, K: int, E: int, accumulate: str) -> int:
    """Return the CUDA kernel for mean group size M / E (host-known sizes only, so that nothing waits). Measured:
    NOTES.md."""
    mean = M / max(E, 1)
    if mean <= SMALL_ROWS_PER_GROUP and K <= 2048:
        return SMALL + TWO_BLOCKS + (8 if mean <= 8 else 16)
    if mean <= 128:
        return 0
    if accumulate == "fast":
        return 3
    return 1 if mean < 1024 else 2


def grouped_gemm(
    a: MX | Folded | torch.Tensor,
    w: MX | Folded,
    ends: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    accumulate: str = "promoted",
    rounding: str = "floor",
    impl: str | None = None,
    scratch: Folded | None = None,
    overlap: bool | None = None,
    variant: int | None = None,
) -> torch.Tensor:
    """Return a @ w[e]^T for the rows of every group, [M, N].

    What runs follows from the operands: folded `w` takes the FP8 tensor cores (a folded; canonical or BF16 `a` is
    folded or quantised
    first, inside the same launch while groups are small); canonical `w` with canonical `a` is the exact mode, in
    BF16 tensor cores,
    because E4M3 times a power of two is exact in BF16.

    Args:
        a: rows [M, K]: Folded, MX, or BF16 to be quantised.
        w: weights [E, N, K]: Folded (row_scale [E, N]) or MX (scales [E, N, K/32]).
        ends: cumulative group ends [E], int32, on the device.
        out: where to write, [M, N]; it must not alias an input. Rows of no group are left as they were.
        out_dtype: of a new `out`; the CUDA kernels write BF16.
        accumulate: "promoted" adds every 128 of K in FP32 (every 256 from 1024 rows a group on); "fast" leaves all
            of K to the tensor
            core's shorter accumulator where that is faster: above 128 rows a group, CUDA kernels only.
        rounding: of the quantisation when `a` is BF16.
        impl: see the module.
        scratch: where rows that a launch of their own folds or quantises are kept (payload [M, K], row_scale [M]);
            allocated when absent.
        overlap: let the CUDA kernel set itself up while the launch before it drains; it waits for that launch before
            it reads anything. By default only the small-M kernel overlaps (measured: NOTES.md).
        variant: CUDA kernel variant, for measurements.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or options that do not fit.
    """
    if accumulate not in ("promoted", "fast"):
        raise ValueError(f"accumulate must be 'promoted' or 'fast'; got {accumulate!r}")
    raw = isinstance(a, torch.Tensor)
    rows = a if raw else a.payload
    check_tensor("w payload", w.payload, shape=(None, None, None), dtypes=(E4M3,), contiguous=True)
    E, N, K = w.payload.shape
    device = w.payload.device
    check_tensor("a", rows, shape=(None, K), dtypes=_FLOATS if raw else (E4M3,), device=device, contiguous=True)
    M = rows.shape[0]
    _check_width("a", K)
    check_offsets(ends, E, device)
    folded = isinstance(w, Folded)
    check_tensor(
        "w scales",
        w[1],
        shape=(E, N) if folded else (E, N, K // BLOCK),
        dtypes=(torch.uint8,),
        device=device,
        contiguous=True,
    )
    if not raw:
        check_tensor(
            "a scales",
            a[1],
            shape=(M,) if isinstance(a, Folded) else (M, K // BLOCK),
            dtypes=(torch.uint8,),
            device=device,
            contiguous=True,
        )
    if not folded and not isinstance(a, MX):
        raise TypeError(f"canonical w needs canonical a (exact mode); got a as {type(a).__name__}")
    if out is None:
        out = torch.empty(M, N, dtype=out_dtype, device=device)
    else:
        check_tensor("out", out, shape=(M, N), dtypes=(torch.bfloat16, torch.float32), device=device, contiguous=True)
        if _overlap(out, rows) or _overlap(out, w.payload):
            raise ValueError("out must not share memory with an input")
    impl = _impl(impl, device)
    if not folded:
        _gemm(rows, a[1], w[0], w[1], ends, out, 0, "triton" if impl == "cuda" else impl, 0, 0)
        return out
    if impl != "cuda":
        if not isinstance(a, Folded):
            a = quantize(a, rounding, target="folded", impl=impl) if raw else fold(a, impl=impl)
        _gemm(a[0], a[1], w[0], w[1], ends, out, 3, impl, 0, 0)
        return out
    if out.dtype is not torch.bfloat16:
        raise TypeError(f"impl='cuda' writes bfloat16; got out of dtype {out.dtype}")
    if N % 8:
        raise ValueError(f"impl='cuda' needs N to be a multiple of 8 (16-byte rows); got {N}")
    chosen = choose_variant(M, N, K, E, accumulate) if variant is None else variant
    overlap = chosen >= SMALL if overlap is None else overlap
    if chosen >= SMALL:
        if raw and a.dtype is torch.float32:
            raise TypeError("impl='cuda' quantises bfloat16 rows; got float32")
        source = 3 if isinstance(a, Folded) else 0 if not raw else 2 if _rounding(rounding) else 1
        _gemm(
            rows,
            None if raw else a[1],
            w[0],
            w[1],
            ends,
            out,
            source,
            impl,
            chosen,
            OVERLAP if overlap else 0,
        )
        return out
    if not isinstance(a, Folded):
        a = _fold_rows(a, rounding, scratch, impl, overlap)
    _gemm(a[0], a[1], w[0], w[1], ends, out, 3, impl, chosen, OVERLAP if overlap else 0)
    return out


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    start, other = a.data_ptr(), b.data_ptr()
    return start < other + b.nbytes and other < start + a.nbytes


def prepare(
    a: Folded | torch.Tensor,
    w: Folded,
    ends: torch.Tensor,
    out: torch.Tensor,
    *,
    scratch: Folded | None = None,
    accumulate: str = "promoted",
    rounding: str = "floor",
) -> Callable[[], torch.Tensor]:
    """Check everything once and return a call without arguments that launches the CUDA kernels on the current stream.

    For buffers that stay where they are from step to step: the call costs the host its launches and nothing else. It
    holds the tensors; new values in them are seen, new tensors are not. Arguments and errors are `grouped_gemm`'s,
    folded or BF16 rows only; BF16 rows need `scratch` where two launches are taken.
    """
    grouped_gemm(a, w, ends, out=out, scratch=scratch, accumulate=accumulate, rounding=rounding, impl="cuda")
    from moe_kernels.mxfp8 import cuda

    lib, (E, N, K), M, device = cuda.library(), w.payload.shape, out.shape[0], out.device
    chosen = choose_variant(M, N, K, E, accumulate)
    raw = isinstance(a, torch.Tensor)
    source = (2 if _rounding(rounding) else 1) if raw else 3
    rows, scale = (a, None) if raw else a
    first = None
    if raw and chosen < SMALL:
        if scratch is None:
            raise ValueError("BF16 rows take two launches at this size: give scratch to keep the quantised rows")
        first = (a.data_ptr(), None, scratch[0].data_ptr(), scratch[1].data_ptr(), None, M, K, source, 1, 0)
        rows, scale = scratch
    tensors = (rows, scale, w[0], w[1], ends, out)
    head = (*(None if t is None else t.data_ptr() for t in tensors), M, N, K, E)
    small = chosen >= SMALL
    launch = lib.mx_small_launch if small else lib.mx_big_launch
    tail = (source, chosen - SMALL, OVERLAP) if small else (chosen, 0)
    index = device.index if device.index is not None else torch.cuda.current_device()

    def call() -> torch.Tensor:
        stream = torch._C._cuda_getCurrentRawStream(index)
        if first is not None and (status := lib.mx_rows_launch(*first, stream)):
            cuda.check(status, "MXFP8 row kernel")
        if status := launch(*head, *tail, stream):
            cuda.check(status, "MXFP8 grouped GEMM")
        return out

    call.tensors = (a, *tensors)  # type: ignore[attr-defined]  # keeps the addresses valid
    return call


def _fold_rows(a: MX | torch.Tensor, rounding: str, scratch: Folded | None, impl: str, overlap: bool) -> Folded:
    """Fold or quantise rows in a launch that lets the GEMM after it start early."""
    raw = isinstance(a, torch.Tensor)
    rows = a if raw else a.payload
    payload, scale = _new_rows(rows.shape[0], rows.shape[1], "folded", rows.device, scratch)
    _rows(
        rows,
        None if raw else a.scales,
        payload,
        scale,
        None,
        1 if raw else 0,
        1,
        _rounding(rounding),
        impl,
        RELEASE if overlap else 0,
    )
    return Folded(payload, scale)
