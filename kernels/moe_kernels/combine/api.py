"""Rowwise combine: GET the K rows of each token from their owners and add them with their weights."""

from __future__ import annotations

import torch

from moe_kernels._launch import FLOATS, check_no_grad, check_tensor, resolve_impl
from moe_kernels.combine import reference
from moe_kernels.peers import PeerTable, check_maps, check_table


def combine(
    peers: PeerTable,
    dst_rank: torch.Tensor,
    dst_row: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Return [T, D]: for each token the sum over k, in k order, of weight times row; FP32 accumulation, one rounding.

    Dropped routes (-1) add 0 whatever their weight; a token whose routes all drop gives 0. Without weights this is the
    gradient of dispatch. A barrier must stand between the peers' last write and this call. It records no gradient:
    `combine_backward` is there for an autograd node to call.

    Args:
        peers: buffers [C, D].
        dst_rank, dst_row: int32 [T, K] of `route_map` for at most C rows; values are not checked, as in `dispatch`.
        weights: FP32 [T, K], or None for weight 1.
        out: [T, D] of the buffers' dtype, contiguous, to write into; memory of its own.
        impl: `triton` (default on CUDA) or `reference` (default on the CPU).

    Raises:
        ValueError, TypeError: a shape, dtype, device or layout is wrong; the message says which.
    """
    check_tensor("dst_row", dst_row, shape=(None, None))
    device, tokens = dst_row.device, dst_row.shape[0]
    check_maps(dst_rank, dst_row, weights, tokens, device)
    check_table("peers", peers, device)
    if out is not None:
        check_tensor("out", out, shape=(tokens, peers.width), dtypes=(peers.dtype,), device=device, contiguous=True)
    check_no_grad("combine", weights, out)
    if resolve_impl(impl, device, ("triton", "reference")) == "reference":
        result = reference.combine(peers.tensors, dst_rank, dst_row, weights)
        return result if out is None else out.copy_(result)
    from moe_kernels.combine import triton as backend

    if out is None:
        out = torch.empty(tokens, peers.width, dtype=peers.dtype, device=device)
    backend.combine(peers, dst_rank, dst_row, weights, out)
    return out


def combine_backward(
    grad: torch.Tensor,
    peers: PeerTable,
    dst_rank: torch.Tensor,
    dst_row: torch.Tensor,
    weights: torch.Tensor,
    grad_peers: PeerTable,
    *,
    impl: str | None = None,
) -> torch.Tensor:
    """Differentiate a weighted combine: PUT grad * weight to the owners, return the weights' gradient FP32 [T, K].

    `grad_peers` may be `peers`: each row has one route, which reads the row before it overwrites it.

    Args:
        grad: [T, D], gradient of combine's result, contiguous.
        peers: the rows that combine read.
        dst_rank, dst_row: int32 [T, K] of `route_map`.
        weights: FP32 [T, K].
        grad_peers: buffers for the rows' gradients; rows that no route names stay as they are.
        impl: `triton` (default on CUDA) or `reference` (default on the CPU).

    Raises:
        ValueError, TypeError: a shape, dtype, device or layout is wrong; the message says which.
    """
    check_tensor("grad", grad, shape=(None, None), dtypes=FLOATS, contiguous=True)
    check_tensor("weights", weights)
    check_maps(dst_rank, dst_row, weights, grad.shape[0], grad.device)
    check_table("peers", peers, grad.device, like=grad)
    check_table("grad_peers", grad_peers, grad.device, like=grad)
    if resolve_impl(impl, grad.device, ("triton", "reference")) == "reference":
        return reference.combine_backward(grad, peers.tensors, dst_rank, dst_row, weights, grad_peers.tensors)
    from moe_kernels.combine import triton as backend

    d_weights = torch.empty_like(weights)
    backend.combine_backward(grad, peers, dst_rank, dst_row, weights, grad_peers, d_weights)
    return d_weights
