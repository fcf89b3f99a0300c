"""MXFP8 grouped GEMM: folded, exact, or quantising its input.

Shapes, group ends and `impl` are those of `moe_kernels.mxfp8.rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_kernels import _compat
from moe_kernels._launch import check_no_grad, check_offsets, check_tensor, compile_safe, share_memory
from moe_kernels.mxfp8 import cuda, reference
from moe_kernels.mxfp8.cuda import EARLY, OVERLAP, RELEASE, SMALL, TWO_BLOCKS
from moe_kernels.mxfp8.rows import (
    FLOATS,
    FROM_FLOAT,
    FROM_MX,
    INDEX_LIMIT,
    MX,
    Folded,
    check_mx,
    fold,
    is_rceil,
    new_rows,
    pick_impl,
    quantize,
    run_rows,
)


@compile_safe("mxfp8_grouped_gemm", mutates=("out",))
def _gemm(
    a: torch.Tensor,
    a_scales: torch.Tensor | None,
    w: torch.Tensor,
    w_scales: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    impl: str,
    source: int = cuda.FROM_FOLDED,
    variant: int = 0,
    flags: int = 0,
) -> None:
    if not len(a) or not len(w):
        return
    if impl == "cuda":
        cuda.grouped_gemm(a, a_scales, w, w_scales, ends, out, source, variant, flags)
        return
    assert a_scales is not None, "only the CUDA kernels quantise inside the product"
    if impl == "reference":
        result = reference.grouped_gemm(reference.dequantize(a, a_scales), reference.dequantize(w, w_scales), ends)
        inside = torch.arange(len(a), device=out.device) < ends[-1]
        out.copy_(torch.where(inside.unsqueeze(1), result.to(out.dtype), out))
    else:
        from moe_kernels.mxfp8 import triton

        triton.grouped_gemm(a, a_scales, w, w_scales, ends, out)


OVERLAP_ROWS_PER_GROUP = 1024
"""Mean rows a group below which the second of two launches overlaps the first (measured: NOTES.md)."""
SMALL_ROWS_PER_GROUP = 16
"""Mean rows a group up to which the kernel with tokens as MMA columns is the faster one (measured: NOTES.md)."""


def choose_variant(M: int, N: int, K: int, E: int, accumulate: str) -> int:
    """Return the CUDA kernel for a mean group of M / E rows, sizes that the host knows. Measured: NOTES.md."""
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
    rows, rceil = _check_operands(a, w, ends, scratch), is_rceil(rounding)
    if accumulate not in ("promoted", "fast"):
        raise ValueError(f"accumulate must be 'promoted' or 'fast'; got {accumulate!r}")
    if overlap is not None and not isinstance(overlap, bool):
        raise TypeError(f"overlap must be True, False or None; got {overlap!r}")
    if variant is not None and (not isinstance(variant, int) or isinstance(variant, bool)):
        raise TypeError(f"variant must be an int or None; got {variant!r}")
    shape = (rows.shape[0], w.payload.shape[1])
    if out is None:
        if out_dtype not in FLOATS:
            raise TypeError(f"out_dtype must be {' or '.join(map(str, FLOATS))}; got {out_dtype!r}")
        out = torch.empty(shape, dtype=out_dtype, device=rows.device)
    else:
        check_tensor("out", out, shape=shape, dtypes=FLOATS, device=rows.device, contiguous=True)
        if share_memory(out, rows) or share_memory(out, w.payload):
            raise ValueError("out must not share memory with an input")
    check_no_grad("mxfp8.grouped_gemm", rows, out)
    if variant is not None:
        if impl not in (None, "cuda"):
            raise ValueError(f"variant chooses a CUDA kernel: expected impl=None or 'cuda' beside it, got {impl!r}")
        impl = "cuda"
    if impl is None and isinstance(w, Folded) and rows.dtype is torch.float32:
        a = _fold_rows(rows, rceil, scratch, pick_impl(None, rows.device, _misfit(rows, w, out)), False, out)
        return grouped_gemm(a, w, ends, out=out, accumulate=accumulate, overlap=overlap)
    impl = pick_impl(impl, rows.device, _misfit(rows, w, out))
    if impl == "cuda":
        chosen = choose_variant(*shape, rows.shape[1], len(w.payload), accumulate) if variant is None else variant
        _launch_cuda(a, w, ends, out, scratch, rceil, overlap, chosen, key)
        return out
    if isinstance(w, Folded) and not isinstance(a, Folded):
        a = fold(a, impl=impl) if isinstance(a, MX) else quantize(a, rounding, target="folded", impl=impl)
    _gemm(a[0], a[1], w[0], w[1], ends, out, impl)
    return out


def _check_operands(a: Any, w: Any, ends: Any, scratch: Any) -> torch.Tensor:
    """Check what is multiplied, its types first, and return the rows [M, K] of `a`."""
    if not isinstance(a, (torch.Tensor, MX, Folded)):
        raise TypeError(f"a must be a torch.Tensor, MX or Folded; got {type(a).__name__}")
    if not isinstance(w, (MX, Folded)):
        raise TypeError(f"w must be MX or Folded; got {type(w).__name__}")
    if scratch is not None and not (isinstance(scratch, tuple) and len(scratch) == 2):
        raise TypeError(f"scratch must be Folded or None; got {type(scratch).__name__}")
    check_mx("w", w, (None, None, None))
    (E, N, K), device = w.payload.shape, w.payload.device
    if isinstance(a, torch.Tensor):
        check_tensor("a", a, shape=(None, K), dtypes=FLOATS, device=device, contiguous=True)
    else:
        check_mx("a", a, (None, K), device)
    check_offsets(ends, E, device)
    if isinstance(w, MX) and not isinstance(a, MX):
        raise TypeError(f"canonical w needs canonical a (exact mode); got a as {type(a).__name__}")
    rows = a if isinstance(a, torch.Tensor) else a.payload
    if max(len(rows), E * N) > INDEX_LIMIT:
        raise ValueError(f"a and w must have at most {INDEX_LIMIT} rows (M and E * N); got {len(rows)} and {E * N}")
    return rows


def _misfit(rows: torch.Tensor, w: MX | Folded, out: torch.Tensor) -> str | None:
    """Return what the CUDA kernels would do and what is asked of them, None where they do it."""
    if isinstance(w, MX):
        return "multiplies folded weights, got canonical w (the exact mode)"
    if rows.dtype is torch.float32:
        return "quantises rows of torch.bfloat16, got a of torch.float32"
    if out.dtype is not torch.bfloat16:
        return f"writes torch.bfloat16, got out of {out.dtype}"
    if out.shape[1] % 8:
        return f"needs N to be a multiple of 8 (16-byte rows), got {out.shape[1]}"
    return None


def _launch_cuda(a, w, ends, out, scratch, rceil: bool, overlap: bool | None, variant: int, key: Any) -> None:
    """Fold or quantise and multiply in one or two launches, and keep them as a plan under `key` where there is one."""
    raw, small, direct = isinstance(a, torch.Tensor), variant >= SMALL, isinstance(a, Folded)
    rows, scales = (a, None) if raw else a
    for name, tensor in (("a", rows), ("w payload", w.payload), ("out", out)):
        cuda.check_aligned(name, tensor)
    if overlap is None:
        overlap = small or (not direct and len(rows) < OVERLAP_ROWS_PER_GROUP * len(w.payload))
    if not small and not direct and torch.compiler.is_compiling():
        overlap = False  # the compiler may put another launch between the two
    source = cuda.FROM_MX
    if direct or raw:
        source = cuda.FROM_FOLDED if direct else cuda.FROM_BF16_RCEIL if rceil else cuda.FROM_BF16_FLOOR
    flags = 0 if not overlap else OVERLAP if small or direct else OVERLAP | EARLY
    if not small and not direct:
        rows, scales = _fold_rows(a, rceil, scratch, "cuda", overlap, out)
    _gemm(rows, scales, w[0], w[1], ends, out, "cuda", source, variant, flags)
    # Only now: a plan is taken without any check, and the launch above has checked `scratch`.
    if key is not None and out.numel() and len(w.payload) and (small or direct or scratch is not None):
        _keep_plan(key, a, w, ends, out, scratch, source, variant, flags)


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


def _keep_plan(key: Any, a, w, ends, out, scratch, source: int, variant: int, flags: int) -> None:
    plan = cuda.Plan()
    rows, scales = (a, None) if isinstance(a, torch.Tensor) else a
    if variant < SMALL and source != cuda.FROM_FOLDED:
        target, release = 1, RELEASE if flags & OVERLAP else 0
        cuda.rows(rows, scales, scratch[0], scratch[1], None, source, target, release, plan)
        rows, scales = scratch
    cuda.grouped_gemm(rows, scales, w[0], w[1], ends, out, source, variant, flags, plan)
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
    a: MX | torch.Tensor, rceil: bool, scratch: Folded | None, impl: str, overlap: bool, out: torch.Tensor
) -> Folded:
    """Fold or quantise rows in a launch that lets the GEMM after it start early."""
    raw = isinstance(a, torch.Tensor)
    rows, scales = (a, None) if raw else a
    pair = new_rows(rows.shape[0], rows.shape[1], "folded", rows.device, scratch)
    if scratch is not None and (share_memory(out, pair[0]) or share_memory(rows, pair[0])):
        raise ValueError("scratch must not share memory with out or a")
    source, target = FROM_FLOAT if raw else FROM_MX, 1
    run_rows(rows, scales, *pair, None, source, target, rceil, impl, RELEASE if overlap else 0)
    return Folded(*pair)
