"""The table of every rank's buffer that rowwise dispatch and combine address, and what they ask of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_kernels._launch import FLOATS, check_tensor


@dataclass(frozen=True, slots=True)
class PeerTable:
    """One [C, D] buffer per rank, reachable from this device by address.

    Attributes:
        tensors: R contiguous tensors of one shape [C, D] and dtype; `tensors[r]` is rank r's buffer as seen from here.
        ptrs: int64 [R] on the device: their addresses, made once, before the loop.
    """

    tensors: tuple[torch.Tensor, ...]
    ptrs: torch.Tensor

    @property
    def width(self) -> int:
        return self.tensors[0].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype


def peer_table(tensors: Sequence[torch.Tensor], device: torch.device | None = None) -> PeerTable:
    """Build a `PeerTable` from R buffers [C, D]; copies R addresses to the device, so call it before the loop.

    Args:
        tensors: one buffer per rank, in rank order (for symmetric memory: the peers' tensors).
        device: where kernels run; default: the first buffer's.

    Raises:
        TypeError: something that is no tensor.
        ValueError: no buffer, shapes or dtypes differ, not contiguous, an address not aligned to 16 bytes, a device
            without addresses (meta) or of another type than the kernels' device.
    """
    if not tensors:
        raise ValueError("peer_table needs at least one buffer; got none")
    for rank, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"the buffer of rank {rank} must be a torch.Tensor; got {type(tensor).__name__}")
    first = tensors[0]
    device = device or first.device
    if first.dim() != 2:
        raise ValueError(f"peer buffers must have shape [C, D]; got {list(first.shape)}")
    for rank, tensor in enumerate(tensors):
        if tensor.shape != first.shape or tensor.dtype != first.dtype:
            raise ValueError(
                f"peer buffers must agree: rank 0 has {list(first.shape)} {first.dtype}, "
                f"rank {rank} has {list(tensor.shape)} {tensor.dtype}"
            )
        if tensor.device.type != device.type or device.type == "meta":
            raise ValueError(
                f"the buffer of rank {rank} must be memory that kernels on {device} can address; got {tensor.device}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"the buffer of rank {rank} must be contiguous; got strides {tuple(tensor.stride())}")
        if tensor.data_ptr() % 16:
            raise ValueError(
                f"the buffer of rank {rank} must be aligned to 16 bytes; its address ends in {tensor.data_ptr() % 16}"
            )
    ptrs = torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=device)
    return PeerTable(tuple(t.detach() for t in tensors), ptrs)


def check_maps(
    dst_rank: torch.Tensor, dst_row: torch.Tensor, weights: torch.Tensor | None, tokens: int, device: torch.device
) -> None:
    """Check the two int32 [T, K] maps against T and the device, and weights [T, K] where there are any."""
    check_tensor("dst_rank", dst_rank, shape=(tokens, None), dtypes=(torch.int32,), device=device, contiguous=True)
    shape = tuple(dst_rank.shape)
    check_tensor("dst_row", dst_row, shape=shape, dtypes=(torch.int32,), device=device, contiguous=True)
    if weights is not None:
        check_tensor("weights", weights, shape=shape, dtypes=FLOATS, device=device, contiguous=True)


def check_table(name: str, peers: PeerTable, device: torch.device, like: torch.Tensor | None = None) -> None:
    """Check that a table of buffers is one, of float rows as those of `like`, with its addresses on `device`."""
    if not isinstance(peers, PeerTable):
        raise TypeError(f"{name} must be a PeerTable; got {type(peers).__name__}")
    if peers.dtype not in FLOATS:
        raise TypeError(f"{name} must hold rows of dtype {' or '.join(map(str, FLOATS))}; got {peers.dtype}")
    if like is not None and (peers.dtype is not like.dtype or peers.width != like.shape[1]):
        raise ValueError(f"{name} must hold rows of {like.shape[1]} {like.dtype}; got {peers.width} {peers.dtype}")
    if peers.ptrs.device != device:
        raise ValueError(f"{name}: its address table must be on {device}; got {peers.ptrs.device}")
