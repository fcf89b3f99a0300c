"""Row movement inside one rank, and the experts over rows that are already grouped."""

from __future__ import annotations

import torch

from moe_kernels._launch import check_first_order
from moe_kernels.combine import combine, combine_backward
from moe_kernels.dispatch import dispatch
from moe_kernels.grouped_gemm import grouped_linear
from moe_kernels.peers import PeerTable
from moe_kernels.route_map import RouteMap
from moe_kernels.swiglu import swiglu


def _table(rows: torch.Tensor) -> PeerTable:
    # A fill takes the address as a kernel argument; copying it from the host would wait for the device.
    address = torch.full((1,), rows.data_ptr(), dtype=torch.int64, device=rows.device)
    return PeerTable((rows,), address)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, route, impl):
        ctx.route, ctx.impl, ctx.tokens = route, impl, x.shape[0]
        rows = x.new_empty(route.dst_row.numel(), x.shape[1])
        dispatch(x.contiguous(), route.dst_rank, route.dst_row, _table(rows), impl=impl)
        return rows

    @staticmethod
    def backward(ctx, *grads):
        check_first_order("the permutation of a routed block")
        route = ctx.route
        d_x = combine(_table(grads[0].contiguous()), route.dst_rank, route.dst_row, None, impl=ctx.impl)
        return d_x, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weights, route, impl):
        ctx.route, ctx.impl = route, impl
        ctx.save_for_backward(rows, weights)
        return combine(_table(rows), route.dst_rank, route.dst_row, weights, impl=impl)

    @staticmethod
    def backward(ctx, *grads):
        check_first_order("the permutation of a routed block")
        rows, weights = ctx.saved_tensors
        route = ctx.route
        d_rows = torch.empty_like(rows)
        d_weights = combine_backward(
            grads[0].contiguous(), _table(rows), route.dst_rank, route.dst_row, weights, _table(d_rows), impl=ctx.impl
        )
        return d_rows, d_weights, None, None


def permute(x_TD: torch.Tensor, route: RouteMap, impl: str | None) -> torch.Tensor:
    """Copy each token's row once per route into expert order: [T, D] to [T * K, D], a dense prefix of it written."""
    return _Permute.apply(x_TD, route, impl)


def unpermute(rows: torch.Tensor, weights_TK: torch.Tensor, route: RouteMap, impl: str | None) -> torch.Tensor:
    """Add each token's K expert outputs with its FP32 weights: [rows, D] to [T, D]."""
    return _Unpermute.apply(rows, weights_TK, route, impl)


def grouped_experts(
    rows: torch.Tensor,
    up_gate: torch.Tensor,
    down: torch.Tensor,
    offsets: torch.Tensor,
    impl: str | None,
    gemm: str | None,
) -> torch.Tensor:
    """Up and gate, SwiGLU, down over rows [M, D] grouped by int32 [L] cumulative offsets on the device."""
    hidden = grouped_linear(rows, up_gate, offsets, impl=gemm)
    return grouped_linear(swiglu(hidden, offsets, impl=impl), down, offsets, impl=gemm)
