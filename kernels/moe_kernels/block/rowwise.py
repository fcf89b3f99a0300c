"""Dispatch, experts and combine of the rowwise path as one differentiable step over the hosted ranks.

One autograd node, because its backward has phases that all ranks must share and buffers that it overwrites: gradients
of the expert outputs replace those outputs, and gradients of the dispatched rows replace those rows, each after its
last reader.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from moe_kernels._launch import check_first_order
from moe_kernels.combine import combine, combine_backward
from moe_kernels.dispatch import dispatch
from moe_kernels.grouped_gemm import grouped_gemm, grouped_gemm_wgrad
from moe_kernels.route_map import RouteMap
from moe_kernels.swiglu import swiglu, swiglu_backward
from moe_kernels.transport import Lease, SymmetricPool, Transport


@dataclass(frozen=True, eq=False)
class RowwisePlan:
    """What one forward needs beside tensors that are differentiated."""

    transport: Transport
    pool: SymmetricPool
    lease: Lease
    capacity: int
    maps: tuple[RouteMap, ...]
    impl: str | None
    gemm: str | None
    keep: bool
    """Whether a backward will follow: then it releases the lease, otherwise the forward does."""

    def hosted(self, weights: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, RouteMap]]:
        """Yield each hosted rank's slice of the n * L experts, its buffers of rows and outputs, and its map."""
        local = weights.shape[0] // len(self.maps)
        for i, (rank, route) in enumerate(zip(self.transport.local_ranks, self.maps)):
            rows, outputs = (table.tensors[rank][: self.capacity] for table in (self.lease.rows, self.lease.outputs))
            yield slice(i * local, (i + 1) * local), rows, outputs, route


def _into(out: torch.Tensor, product, a, b, offsets, impl: str | None) -> None:
    """Write a grouped product into `out`; torch's own kernel cannot, so its result is copied."""
    if impl == "torch":
        out.copy_(product(a, b, offsets, impl=impl))
    else:
        product(a, b, offsets, out=out, impl=impl)


class RowwiseExperts(torch.autograd.Function):
    """The routed experts of all ranks on the tokens of the n hosted ones: one [T, D] per hosted rank.

    Inputs are the plan, up and gate weights [n * L, D, 2F], down weights [n * L, F, D], one [T, D] of rows and then one
    FP32 [T, K] of weights per hosted rank.
    """

    @staticmethod
    def forward(ctx, plan: RowwisePlan, up_gate, down, *inputs):
        ranks = len(plan.maps)
        x_TD, weights_TK = inputs[:ranks], inputs[ranks:]
        lease, transport = plan.lease, plan.transport
        for x, route in zip(x_TD, plan.maps):
            dispatch(x.contiguous(), route.dst_rank, route.dst_row, lease.rows, impl=plan.impl)
        transport.barrier()
        hidden, activated = [], []
        for mine, rows, outputs, route in plan.hosted(up_gate):
            h = grouped_gemm(rows, up_gate[mine], route.offsets, impl=plan.gemm)
            a = swiglu(h, route.offsets, impl=plan.impl)
            _into(outputs, grouped_gemm, a, down[mine], route.offsets, plan.gemm)
            if plan.keep:
                hidden.append(h)
                activated.append(a)
        transport.barrier()
        combined = tuple(
            combine(lease.outputs, route.dst_rank, route.dst_row, weights, impl=plan.impl)
            for route, weights in zip(plan.maps, weights_TK)
        )
        ctx.plan = plan
        if plan.keep:
            ctx.save_for_backward(up_gate, down, *weights_TK, *hidden, *activated)
        else:
            plan.pool.release(lease)
        return combined

    @staticmethod
    def backward(ctx, *grads):
        plan: RowwisePlan = ctx.plan
        lease = plan.lease
        if not lease.active:
            raise RuntimeError(
                f"block {lease.key[0]!r}, microbatch {lease.key[1]!r}: backward ran before, its buffers are given back"
            )
        try:
            return RowwiseExperts._gradients(ctx, *grads)
        finally:
            # After an error too: what the buffers held is partly overwritten, no second backward could use it. The next
            # writer of these buffers is ordered after every peer's reads by the next count exchange.
            if lease.active:
                plan.pool.release(lease)

    @staticmethod
    def _gradients(ctx, *grads):
        check_first_order("the rowwise path of a routed block")
        plan: RowwisePlan = ctx.plan
        lease, transport, ranks = plan.lease, plan.transport, len(plan.maps)
        up_gate, down, *saved = ctx.saved_tensors
        weights_TK, hidden, activated = saved[:ranks], saved[ranks : 2 * ranks], saved[2 * ranks :]

        # Each output row belongs to one route, whose program reads it for the weight's gradient before overwriting it.
        d_weights = [
            combine_backward(
                g.contiguous(), lease.outputs, route.dst_rank, route.dst_row, weights, lease.outputs, impl=plan.impl
            )
            for g, route, weights in zip(grads, plan.maps, weights_TK)
        ]
        transport.barrier()
        d_up_gate, d_down = torch.empty_like(up_gate), torch.empty_like(down)
        for (mine, rows, d_outputs, route), h, a in zip(plan.hosted(up_gate), hidden, activated):
            _into(d_down[mine], grouped_gemm_wgrad, a, d_outputs, route.offsets, plan.gemm)
            d_a = grouped_gemm(d_outputs, down[mine].transpose(1, 2), route.offsets, impl=plan.gemm)
            d_h = swiglu_backward(h, d_a, route.offsets, impl=plan.impl)
            _into(d_up_gate[mine], grouped_gemm_wgrad, rows, d_h, route.offsets, plan.gemm)
            # After the weight gradient, which was the last reader of the rows.
            _into(rows, grouped_gemm, d_h, up_gate[mine].transpose(1, 2), route.offsets, plan.gemm)
        transport.barrier()
        d_x = [combine(lease.rows, route.dst_rank, route.dst_row, None, impl=plan.impl) for route in plan.maps]
        return None, d_up_gate, d_down, *d_x, *d_weights
