"""Grouped GEMM: rows of L experts in one call, with int32 cumulative offsets that stay on the device."""

from __future__ import annotations

import torch

from moe_kernels import _compat
from moe_kernels._launch import (
    FLOATS,
    check_first_order,
    check_no_grad,
    check_offsets,
    check_tensor,
    resolve_impl,
    share_memory,
)

IMPLS = ("triton", "torch", "host_loop", "reference")
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def grouped_gemm(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, *, out: torch.Tensor | None = None, impl: str | None = None
) -> torch.Tensor:
    """Return [M, N]: rows of group l are a[offsets[l-1]:offsets[l]] @ b[l]; rows from offsets[-1] on stay unwritten.

    No gradient (see `grouped_linear`). The input gradient is the same call with b.transpose(1, 2). Rows of `a` from
    offsets[-1] on may hold anything, NaN included. FP32 accumulation, one rounding.

    Args:
        a: [M, K], contiguous rows.
        b: [L, K, N]; either of the last two strides is 1, so a transposed view needs no copy.
        offsets: int32 [L] on a's device, inclusive, non-decreasing. Values are clamped to [0, M], never trusted.
        out: [M, N] of a's dtype to write into, rows contiguous; memory of its own.
        impl: `triton` (default on CUDA), `torch` (its device-scheduled kernel; raises where it would fall back to a
            host loop), `host_loop` (bad example: one `.item()` per expert), `reference` (default on the CPU).

    Raises:
        ValueError, TypeError: a shape, dtype, device or layout is wrong; the message says which.
        RuntimeError: impl='torch' where torch would read the offsets on the host.
    """
    impl = _check(a, offsets, impl)
    check_tensor("b", b, shape=(offsets.shape[0], a.shape[1], None), dtypes=(a.dtype,), device=a.device)
    check_no_grad("grouped_gemm", a, b)
    if 1 not in b.stride()[1:] and min(b.shape) > 1:
        raise ValueError(f"b: one of its last two strides must be 1; got strides {tuple(b.stride())}")
    if impl == "torch":
        return _torch(a, b, offsets, out)
    out = _own_or_new(out, (a.shape[0], b.shape[2]), a, b)
    _backend(impl).grouped_gemm(a, b, offsets, out)
    return out


def grouped_gemm_wgrad(
    a: torch.Tensor,
    grad: torch.Tensor,
    offsets: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Return [L, K, N]: a[rows of l]^T @ grad[rows of l]; exactly 0 for a group without rows.

    Args:
        a: [M, K], the forward's rows.
        grad: [M, N], gradient of its result.
        offsets: int32 [L] on the device.
        out: [L, K, N] of a's dtype to write into, contiguous; memory of its own.
        impl: as for `grouped_gemm`.
    """
    impl = _check(a, offsets, impl)
    check_tensor("grad", grad, shape=(a.shape[0], None), dtypes=(a.dtype,), device=a.device, contiguous=True)
    check_no_grad("grouped_gemm_wgrad", a, grad)
    if impl == "torch":
        return _torch(a.t(), grad, offsets, out)
    out = _own_or_new(out, (offsets.shape[0], a.shape[1], grad.shape[1]), a, grad)
    _backend(impl).grouped_gemm_wgrad(a, grad, offsets, out)
    return out


def grouped_linear(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """Differentiable `grouped_gemm`; rows from offsets[-1] on of the result and of a's gradient stay unwritten."""
    return _GroupedLinear.apply(a, b, offsets, impl)


def _check(a: torch.Tensor, offsets: torch.Tensor, impl: str | None) -> str:
    check_tensor("a", a, shape=(None, None), dtypes=FLOATS, contiguous=True)
    check_tensor("offsets", offsets, shape=(None,))
    check_offsets(offsets, offsets.shape[0], a.device)
    impl = resolve_impl(impl, a.device, IMPLS)
    if impl == "triton" and a.dtype not in TRITON_DTYPES:
        raise TypeError(f"impl='triton' takes bfloat16, float16 or float32; got {a.dtype}")
    return impl


def _own_or_new(out: torch.Tensor | None, shape: tuple[int, ...], *inputs: torch.Tensor) -> torch.Tensor:
    a = inputs[0]
    if out is None:
        return a.new_empty(shape)
    check_tensor("out", out, shape=shape, dtypes=(a.dtype,), device=a.device, contiguous=True)
    check_no_grad("out=", out)
    if any(share_memory(out, tensor) for tensor in inputs):
        raise ValueError("out: expected memory of its own, got that of an input, which other tiles still read")
    return out


def _torch(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    if out is not None:
        raise ValueError("impl='torch' cannot write into out=; use impl='triton'")
    if not _compat.torch_grouped_mm_is_device_scheduled(a.device, a.dtype):
        raise RuntimeError(
            f"impl='torch': for {a.dtype} on {a.device} torch's grouped product copies the offsets to the host; "
            "use impl='triton'"
        )
    return _compat.torch_grouped_mm(a, b, offsets)


def _backend(impl: str):
    if impl == "triton":
        from moe_kernels.grouped_gemm import triton as backend
    elif impl == "host_loop":
        from moe_kernels.grouped_gemm import host_loop as backend
    else:
        from moe_kernels.grouped_gemm import reference as backend
    return backend


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, offsets, impl):
        ctx.save_for_backward(a, b, offsets)
        ctx.impl = impl
        return grouped_gemm(a, b, offsets, impl=impl)

    @staticmethod
    def backward(ctx, *grads):
        check_first_order("grouped_linear")
        a, b, offsets = ctx.saved_tensors
        grad = grads[0].contiguous()
        d_b = grouped_gemm_wgrad(a, grad, offsets, impl=ctx.impl) if ctx.needs_input_grad[1] else None
        d_a = grouped_gemm(grad, b.transpose(1, 2), offsets, impl=ctx.impl) if ctx.needs_input_grad[0] else None
        return d_a, d_b, None, None
