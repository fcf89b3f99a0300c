"""Rowwise dispatch: PUT each kept row of this rank straight into its owner's buffer."""

from __future__ import annotations

import torch

from moe_kernels._launch import FLOATS, check_no_grad, check_tensor, resolve_impl
from moe_kernels.dispatch import reference
from moe_kernels.peers import PeerTable, check_maps, check_table


def dispatch(
    x: torch.Tensor,
    dst_rank: torch.Tensor,
    dst_row: torch.Tensor,
    peers: PeerTable,
    *,
    weights: torch.Tensor | None = None,
    impl: str | None = None,
) -> None:
    """Write row x[t] to row dst_row[t, k] of rank dst_rank[t, k]'s buffer, for every route that is not -1.

    Rows that no route names stay as they are. Peers may read only after a barrier. Without weights rows
    move bit for bit; with `weights` each row is multiplied in FP32 and rounded once. No gradient is
    recorded: without weights it is the `combine` of the rows' gradients.

    Args:
        x: [T, D], contiguous; rows of 16-byte multiples move fastest.
        dst_rank, dst_row: int32 [T, K] of `route_map`. Values are not checked: others than it gives, or those of a map
            whose capacity exceeds the buffers', write outside.
        peers: buffers [C, D] of x's dtype.
        weights: FP32 [T, K], optional.
        impl: `triton` (default on CUDA) or `reference` (default on the CPU).

    Raises:
        ValueError, TypeError: a shape, dtype, device or layout is wrong; the message says which.
    """
    check_tensor("x", x, shape=(None, None), dtypes=FLOATS, contiguous=True)
    check_maps(dst_rank, dst_row, weights, x.shape[0], x.device)
    check_table("peers", peers, x.device, like=x)
    check_no_grad("dispatch", x, weights)
    if resolve_impl(impl, x.device, ("triton", "reference")) == "reference":
        reference.dispatch(x, dst_rank, dst_row, peers.tensors, weights)
        return
    from moe_kernels.dispatch import triton as backend

    backend.dispatch(x, dst_rank, dst_row, peers, weights)
