"""SwiGLU on the valid prefix of a capacity-shaped buffer, forward and backward; the tail is never touched."""

from __future__ import annotations

import torch

from moe_kernels._launch import FLOATS, check_first_order, check_no_grad, check_tensor, resolve_impl
from moe_kernels.swiglu import reference


def _check(h: torch.Tensor, offsets: torch.Tensor) -> None:
    check_tensor("h", h, shape=(None, None), dtypes=FLOATS, contiguous=True)
    if h.shape[1] % 2 or not h.shape[1]:
        raise ValueError(f"h must have shape [C, 2F]; got {list(h.shape)}")
    check_tensor("offsets", offsets, shape=(None,), dtypes=(torch.int32,), device=h.device, contiguous=True)
    if offsets.numel() < 1:
        raise ValueError("offsets must have at least one entry; got none")


def _host_valid(offsets: torch.Tensor, rows: int) -> int:
    return min(max(int(offsets[-1]), 0), rows)


def swiglu(
    h: torch.Tensor, offsets: torch.Tensor, *, out: torch.Tensor | None = None, impl: str | None = None
) -> torch.Tensor:
    """Return silu(h[:, :F]) * h[:, F:] for rows below offsets[-1]; later rows of the result are left as they are.

    Differentiable; the gradient's rows from offsets[-1] on are left unwritten too. Computed in FP32, rounded once.

    Args:
        h: [C, 2F], contiguous: gate, then up.
        offsets: int32 [L] on h's device, inclusive cumulative rows; only the last is read, on the device.
        out: [C, F] of h's dtype to write into; not allowed where h or out needs a gradient.
        impl: `triton` (default on CUDA) or `reference` (default on the CPU).

    Raises:
        ValueError, TypeError: a shape, dtype, device or layout is wrong; the message says which.
    """
    _check(h, offsets)
    impl = resolve_impl(impl, h.device, ("triton", "reference"))
    if out is not None:
        shape = (h.shape[0], h.shape[1] // 2)
        check_tensor("out", out, shape=shape, dtypes=(h.dtype,), device=h.device, contiguous=True)
        check_no_grad("out=", h, out)
        return _forward(h, offsets, out, impl)
    return _SwiGLU.apply(h, offsets, impl)


def swiglu_backward(
    h: torch.Tensor,
    grad: torch.Tensor,
    offsets: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Return the gradient [C, 2F] of `swiglu` for rows below offsets[-1]; later rows are left as they are.

    Args:
        h: [C, 2F], what the forward read.
        grad: [C, F], gradient of its result, contiguous.
        offsets: int32 [L] on the device.
        out: [C, 2F] to write into; may be `h` itself.
        impl: `triton` (default on CUDA) or `reference` (default on the CPU).
    """
    _check(h, offsets)
    impl = resolve_impl(impl, h.device, ("triton", "reference"))
    check_tensor("grad", grad, shape=(h.shape[0], h.shape[1] // 2), dtypes=(h.dtype,), device=h.device, contiguous=True)
    if out is None:
        out = torch.empty_like(h)
    else:
        check_tensor("out", out, shape=tuple(h.shape), dtypes=(h.dtype,), device=h.device, contiguous=True)
    check_no_grad("swiglu_backward", h, grad, out)
    if impl == "reference":
        return reference.swiglu_backward(h, grad, _host_valid(offsets, h.shape[0]), out)
    from moe_kernels.swiglu import triton as backend

    backend.swiglu_backward(h, grad, offsets, out)
    return out


def _forward(h: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor, impl: str) -> torch.Tensor:
    if impl == "reference":
        return reference.swiglu(h, _host_valid(offsets, h.shape[0]), out)
    from moe_kernels.swiglu import triton as backend

    backend.swiglu(h, offsets, out)
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, offsets, impl):
        ctx.save_for_backward(h, offsets)
        ctx.impl = impl
        return _forward(h, offsets, h.new_empty(h.shape[0], h.shape[1] // 2), impl)

    @staticmethod
    def backward(ctx, *grads):
        check_first_order("swiglu")
        h, offsets = ctx.saved_tensors
        return swiglu_backward(h, grads[0].contiguous(), offsets, impl=ctx.impl), None, None
