"""MXFP8 grouped GEMM: folded, exact, or quantising its input.

Shapes, group ends and `impl` are those of `moe_kernels.mxfp8.rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_kernels import _compat
from moe_kernels._launch import (
    check_no_grad,
    check_offsets,
    check_tensor,
    compile_safe,
    on_device,
    resolve_impl,
    share_memory,
)
from moe_kernels.mxfp8 import reference
from moe_kernels.mxfp8.rows import (
    BLOCK,
    E4M3,
    FLOATS,
    IMPLS,
    INDEX_LIMIT,
    MX,
    Folded,
    check_aligned,
    check_width,
    fold,
    is_rceil,
    new_rows,
    pick_impl,
    quantize,
    run_rows,
    stream_of,
)


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
    if impl == "cuda":
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
                status = lib.mx_small_launch(*head, source, variant - SMALL, flags, stream_of(out.device), None)
            else:
                status = lib.mx_big_launch(*head, variant, flags, stream_of(out.device), None)
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
EARLY = 4
"""Flag of the large GEMM: weights and group ends are read before the launch before it has ended. That is right only
after a row kernel of our own, which starts when all before it have ended and writes neither."""
SMALL, TWO_BLOCKS = 1000, 100
"""Variants of the CUDA GEMM: 0 to 3 as listed in cuda.cu's `mx_big_launch`; SMALL + token columns (8, 16, 32, 64),
plus TWO_BLOCKS
for two blocks on each multiprocessor."""
OVERLAP_ROWS_PER_GROUP = 1024
"""Mean rows a group below which the second of two launches overlaps the first (measured: NOTES.md)."""
SMALL_ROWS_PER_GROUP = 16
"""Mean rows a group up to which the kernel with tokens as MMA columns is the faster one (measured: NOTES.md)."""


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
    return 1 if mean < 512 else 2


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
    """Return a @ w[e]^T for the rows of every group, [M, N]; no gradient is recorded (see `grouped_linear`).

    What runs follows from the operands: folded `w` takes the FP8 tensor cores (a folded; other `a` is folded or
    quantised first, inside the same launch while groups are small); canonical `w` with canonical `a` is the exact mode,
    in BF16 tensor cores, because E4M3 times a power of two is exact in BF16. The CUDA kernels multiply folded weights
    and write BF16 with N a multiple of 8; without `impl` other calls take the Triton kernels.

    Args:
        a: rows [M, K]: Folded, MX, or BF16 or FP32 to be quantised.
        w: weights [E, N, K]: Folded (row_scale [E, N]) or MX (scales [E, N, K/32]).
        ends: cumulative group ends [E], int32, on the device.
        out: where to write, [M, N]; it must not alias an input. Rows of no group are left as they were.
        out_dtype: of a new `out`.
        accumulate: "promoted" adds every 128 of K in FP32 (every 256 from 512 rows a group on); "fast" leaves all of
            K to the tensor core's shorter accumulator where that is faster: above 128 rows a group, CUDA kernels
            only.
        rounding: of the quantisation of BF16 or FP32 `a`.
        impl: see the module; FP32 `a` is quantised in a call of its own without `impl`, and refused by "cuda".
        scratch: where rows that a launch of their own folds or quantises are kept (payload [M, K], row_scale [M]);
            allocated when absent.
        overlap: let the CUDA kernel set itself up while the launch before it drains; it waits for that launch before
            it reads what that wrote. By default the small-M kernel overlaps, and of two launches below 1024 rows a
            group the second one (measured: NOTES.md).
        variant: CUDA kernel variant, for measurements; it stands for impl="cuda".

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or options that do not fit.
    """
    key = None
    if out is not None and not torch.compiler.is_compiling():
        key = _plan_key(a, w, ends, out, scratch, accumulate, rounding, impl, overlap, variant)
        try:
            found = _PLANS.get(key)
        except TypeError:  # an option that cannot be hashed: the checks below name it
            key = found = None
        if found is not None and found[1] == out.get_device():
            found[0].run(_compat.current_stream_address(found[1]))
            return out
    if accumulate not in ("promoted", "fast"):
        raise ValueError(f"accumulate must be 'promoted' or 'fast'; got {accumulate!r}")
    rceil = is_rceil(rounding)
    if overlap is not None and not isinstance(overlap, bool):
        raise TypeError(f"overlap must be True, False or None; got {overlap!r}")
    if variant is not None and (not isinstance(variant, int) or isinstance(variant, bool)):
        raise TypeError(f"variant must be an int or None; got {variant!r}")
    raw = isinstance(a, torch.Tensor)
    if not raw and not isinstance(a, (MX, Folded)):
        raise TypeError(f"a must be a torch.Tensor, MX or Folded; got {type(a).__name__}")
    if not isinstance(w, (MX, Folded)):
        raise TypeError(f"w must be MX or Folded; got {type(w).__name__}")
    if scratch is not None and not (isinstance(scratch, tuple) and len(scratch) == 2):
        raise TypeError(f"scratch must be Folded or None; got {type(scratch).__name__}")
    rows = a if raw else a.payload
    check_tensor("w payload", w.payload, shape=(None, None, None), dtypes=(E4M3,), contiguous=True)
    E, N, K = w.payload.shape
    device = w.payload.device
    check_tensor("a", rows, shape=(None, K), dtypes=FLOATS if raw else (E4M3,), device=device, contiguous=True)
    M = rows.shape[0]
    check_width("a", K)
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
    if max(M, E * N) > INDEX_LIMIT:
        raise ValueError(f"a and w must have at most {INDEX_LIMIT} rows (M and E * N); got {M} and {E * N}")
    if out is None:
        if out_dtype not in FLOATS:
            raise TypeError(f"out_dtype must be {' or '.join(map(str, FLOATS))}; got {out_dtype!r}")
        out = torch.empty(M, N, dtype=out_dtype, device=device)
    else:
        check_tensor("out", out, shape=(M, N), dtypes=FLOATS, device=device, contiguous=True)
        if share_memory(out, rows) or share_memory(out, w.payload):
            raise ValueError("out must not share memory with an input")
    check_no_grad("mxfp8.grouped_gemm", rows, out)
    if impl is None and variant is not None:
        impl = "cuda"
    wide = raw and rows.dtype is torch.float32
    if folded and wide and impl is None:
        a = _fold_rows(rows, rounding, scratch, resolve_impl(None, device, IMPLS), False, out)
        return grouped_gemm(a, w, ends, out=out, accumulate=accumulate, overlap=overlap)
    misfit = None
    if not folded:
        misfit = "multiplies folded weights, got canonical w (the exact mode)"
    elif wide:
        misfit = "quantises rows of torch.bfloat16, got a of torch.float32"
    elif out.dtype is not torch.bfloat16:
        misfit = f"writes torch.bfloat16, got out of {out.dtype}"
    elif N % 8:
        misfit = f"needs N to be a multiple of 8 (16-byte rows), got {N}"
    impl = pick_impl(impl, device, misfit)
    if not folded:
        _gemm(rows, a[1], w[0], w[1], ends, out, 0, impl, 0, 0)
        return out
    if impl != "cuda":
        if not isinstance(a, Folded):
            a = quantize(a, rounding, target="folded", impl=impl) if raw else fold(a, impl=impl)
        _gemm(a[0], a[1], w[0], w[1], ends, out, 3, impl, 0, 0)
        return out
    check_aligned("a", rows)
    check_aligned("w payload", w.payload)
    check_aligned("out", out)
    chosen = choose_variant(M, N, K, E, accumulate) if variant is None else variant
    small, direct = chosen >= SMALL, isinstance(a, Folded)
    if overlap is None:
        overlap = small or (not direct and M < OVERLAP_ROWS_PER_GROUP * E)
    if not small and not direct and torch.compiler.is_compiling():
        overlap = False  # the compiler may put another launch between the two
    source = 3 if direct else 0 if not raw else 2 if rceil else 1
    flags = 0 if not overlap else OVERLAP if small or direct else OVERLAP | EARLY
    if small:
        _gemm(rows, None if raw else a[1], w[0], w[1], ends, out, source, impl, chosen, flags)
    else:
        folded_a = a if isinstance(a, Folded) else _fold_rows(a, rounding, scratch, impl, overlap, out)
        _gemm(folded_a[0], folded_a[1], w[0], w[1], ends, out, 3, impl, chosen, flags)
    # Only now: a plan is taken without any check, and the launch above has checked `scratch`.
    if key is not None and M and E and (small or direct or scratch is not None):
        _keep_plan(key, a, w, ends, out, scratch, source, chosen, flags)
    return out


_PLANS: dict[Any, tuple[Any, int]] = {}
_MOST_PLANS = 256
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _plan_key(a: Any, w: Any, ends: Any, out: Any, scratch: Any, *options: Any) -> Any:
    """Return all that the checks and the launches of `grouped_gemm` depend on, or None where it is no plain call.

    Whatever has the same addresses, shapes, dtypes and contiguity passes the same checks and is launched alike.
    """
    kind = type(a)
    if type(w) is not Folded or kind not in (torch.Tensor, MX, Folded):
        return None
    tensors = (a, *w, ends, out) if kind is torch.Tensor else (*a, *w, ends, out)
    if scratch is not None:
        if not isinstance(scratch, tuple):
            return None
        tensors += scratch
    facts: list[Any] = [kind, options]
    for t in tensors:
        if type(t) not in _PLAIN:
            return None
        facts += (t.data_ptr(), t.shape, t.dtype, t.is_contiguous())
    return tuple(facts)


def _keep_plan(key: Any, a, w, ends, out, scratch, source: int, chosen: int, flags: int) -> None:
    from moe_kernels.mxfp8 import cuda

    lib, plan = cuda.library(), cuda.Plan()
    (E, N, K), M = w.payload.shape, out.shape[0]
    rows, scale = (a, None) if isinstance(a, torch.Tensor) else a

    def address(t: torch.Tensor | None) -> int | None:
        return None if t is None else t.data_ptr()

    with on_device(out):
        if chosen < SMALL and source != 3:
            kept = (address(scratch[0]), address(scratch[1]))
            release = RELEASE if flags & OVERLAP else 0
            status = lib.mx_rows_launch(
                address(rows), address(scale), *kept, None, M, K, source, 1, release, None, plan.handle
            )
            cuda.check(status, "MXFP8 row kernel")
            rows, scale = scratch
        head = (*map(address, (rows, scale, w[0], w[1], ends, out)), M, N, K, E)
        if chosen >= SMALL:
            status = lib.mx_small_launch(*head, source, chosen - SMALL, flags, None, plan.handle)
        else:
            status = lib.mx_big_launch(*head, chosen, flags, None, plan.handle)
    cuda.check(status, "MXFP8 grouped GEMM")
    if len(_PLANS) >= _MOST_PLANS:
        _PLANS.clear()
    _PLANS[key] = plan, out.get_device()


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
    """Check everything once and return a call without arguments that launches the CUDA kernels on the current stream
    of the tensors' device, whichever device is current.

    For buffers that stay where they are from step to step: the call costs the host its launches and nothing else. It
    holds the tensors; new values in them are seen, new tensors are not. Arguments and errors are `grouped_gemm`'s,
    folded or BF16 rows only; BF16 rows need `scratch` where two launches are taken.
    """
    check_tensor("out", out)
    options = (accumulate, rounding, "cuda", None, None)
    grouped_gemm(a, w, ends, out=out, scratch=scratch, accumulate=accumulate, rounding=rounding, impl="cuda")
    found = _PLANS.get(_plan_key(a, w, ends, out, scratch, *options))
    if found is None:
        raise ValueError(
            "a call is prepared for plain tensors with rows; BF16 rows that take two launches need scratch as well"
        )
    plan, index = found

    def call() -> torch.Tensor:
        plan.run(_compat.current_stream_address(index))
        return out

    call.tensors = (a, w, ends, scratch)  # type: ignore[attr-defined]  # keeps the addresses valid
    return call


def _fold_rows(
    a: MX | torch.Tensor, rounding: str, scratch: Folded | None, impl: str, overlap: bool, out: torch.Tensor
) -> Folded:
    """Fold or quantise rows in a launch that lets the GEMM after it start early."""
    raw = isinstance(a, torch.Tensor)
    rows = a if raw else a.payload
    payload, scale = new_rows(rows.shape[0], rows.shape[1], "folded", rows.device, scratch)
    if scratch is not None and (share_memory(out, payload) or share_memory(rows, payload)):
        raise ValueError("scratch must not share memory with out or a")
    run_rows(
        rows,
        None if raw else a.scales,
        payload,
        scale,
        None,
        1 if raw else 0,
        1,
        is_rceil(rounding),
        impl,
        RELEASE if overlap else 0,
    )
    return Folded(payload, scale)
