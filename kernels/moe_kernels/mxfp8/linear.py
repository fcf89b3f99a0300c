"""A grouped linear layer for training in MXFP8: FP8 forward and input gradient, BF16 weight gradient."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from moe_kernels import _compat
from moe_kernels._launch import check_first_order, check_tensor
from moe_kernels.grouped_gemm import grouped_gemm_wgrad
from moe_kernels.mxfp8.api import grouped_gemm
from moe_kernels.mxfp8.rows import FLOATS, MX, Folded, quantize


class QuantizedWeight:
    """Folded copies of a weight [E, N, K]: along K for the forward product, transposed and along N for the input
    gradient."""

    def __init__(self, weight_ENK: torch.Tensor, rounding: str = "floor", impl: str | None = None) -> None:
        check_tensor("weight", weight_ENK, shape=(None, None, None), dtypes=FLOATS)
        self.forward = _quantize_weight(weight_ENK, rounding, impl)
        self.transposed = _quantize_weight(weight_ENK.transpose(1, 2), rounding, impl)


def _quantize_weight(weight: torch.Tensor, rounding: str, impl: str | None) -> Folded:
    E, N, K = weight.shape
    payload, scale = quantize(weight.detach().contiguous().view(E * N, K), rounding, target="folded", impl=impl)
    return Folded(payload.view(E, N, K), scale.view(E, N))


def weight_gradient(
    grad_MN: torch.Tensor, x_MK: torch.Tensor, ends: torch.Tensor, impl: str | None = None
) -> torch.Tensor:
    """Return sum over each group's rows of grad^T x, [E, N, K], in the dtype of x; groups without rows get zeros.

    A BF16 product, which no MXFP8 kernel computes: "triton" and "reference" name its own, all else chooses by device.
    """
    named = impl if impl in ("triton", "reference") else None
    if named is None and x_MK.device.type == "cuda" and x_MK.dtype is torch.bfloat16:
        return _compat.torch_grouped_mm(grad_MN.t(), x_MK, ends)
    return grouped_gemm_wgrad(grad_MN, x_MK, ends, impl=named)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, weight, ends, cache, rounding, impl):
        ctx.save_for_backward(x, ends)
        ctx.cache, ctx.rounding, ctx.impl, ctx.weight_dtype = cache, rounding, impl, weight.dtype
        return _product(x, cache.forward, ends, rounding, impl)

    @staticmethod
    def backward(ctx: Any, *grads: Any):
        check_first_order("the MXFP8 grouped_linear")
        x, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_x = _product(grad, ctx.cache.transposed, ends, ctx.rounding, ctx.impl) if ctx.needs_input_grad[0] else None
        grad_w = weight_gradient(grad, x, ends, ctx.impl).to(ctx.weight_dtype) if ctx.needs_input_grad[1] else None
        return grad_x, grad_w, None, None, None, None


def _product(x: torch.Tensor, w: Folded, ends: torch.Tensor, rounding: str, impl: str | None) -> torch.Tensor:
    # Rows of no group must be finite, because the next layer's weight gradient and norms read the whole buffer.
    out = torch.zeros(x.shape[0], w.payload.shape[1], dtype=x.dtype, device=x.device)
    return grouped_gemm(x, w, ends, out=out, rounding=rounding, impl=impl)


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    cache: QuantizedWeight | None = None,
    *,
    rounding: str = "floor",
    impl: str | None = None,
) -> torch.Tensor:
    """Return x @ weight[e]^T of each group in MXFP8 [M, N], differentiable in x (MXFP8) and weight (BF16).

    Args:
        x: rows [M, K], BF16.
        weight: [E, N, K]; its own values are used only through `cache` and for the gradient's shape.
        ends: cumulative group ends [E], int32.
        cache: folded copies of `weight`; quantised here when not given.
        rounding: "floor" or "rceil".
        impl: see `moe_kernels.mxfp8.rows`; of the weight gradient see `weight_gradient`.
    """
    return _GroupedLinear.apply(x, weight, ends, cache or QuantizedWeight(weight, rounding, impl), rounding, impl)  # type: ignore[return-value]


class GroupedLinear(torch.nn.Module):
    """E linear maps K -> N on grouped rows in MXFP8. The weights are quantised once per optimizer step.

    The copies are renewed at the first forward after the weight changed in place (its version counter tells, without
    a device wait) or was replaced; `refresh` renews them at once. Writes through `weight.data` move no counter: call
    `refresh` after them. A copied or saved module leaves the copies behind.
    """

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        *,
        rounding: str = "floor",
        impl: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        if in_features % 32 or out_features % 32:
            raise ValueError(
                f"in_features and out_features must be multiples of 32; got {in_features} and {out_features}"
            )
        self.weight = torch.nn.Parameter(torch.empty(experts, out_features, in_features, device=device, dtype=dtype))
        torch.nn.init.normal_(self.weight, std=in_features**-0.5)
        self.rounding, self.impl = rounding, impl
        self._cache: QuantizedWeight | None = None
        self._version: tuple[weakref.ref[torch.Tensor], int, int] | None = None

    def refresh(self) -> QuantizedWeight:
        """Quantise the weight now and return the copies."""
        with torch.no_grad():
            self._cache = QuantizedWeight(self.weight, self.rounding, self.impl)
        # The object as well: another parameter may come to lie at the same address with the same count.
        self._version = (weakref.ref(self.weight), self.weight.data_ptr(), self.weight._version)
        return self._cache

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cache": None, "_version": None}

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Return [M, N] for rows x [M, K] and cumulative group ends [E]."""
        weight, cache = self.weight, self._cache
        if cache is None or self._version is None or self._stale(weight, *self._version):
            cache = self.refresh()
        return grouped_linear(x, weight, ends, cache, rounding=self.rounding, impl=self.impl)

    @staticmethod
    def _stale(weight: torch.Tensor, of: weakref.ref[torch.Tensor], address: int, version: int) -> bool:
        return of() is not weight or weight.data_ptr() != address or weight._version != version


def exact_operand(x: torch.Tensor, rounding: str = "floor", impl: str | None = None) -> MX:
    """Return x [..., K] as a canonical MXFP8 operand for the exact mode of `grouped_gemm`."""
    payload, scales = quantize(x.reshape(-1, x.shape[-1]).contiguous(), rounding, impl=impl)
    return MX(payload.view(x.shape), scales.view(*x.shape[:-1], -1))
