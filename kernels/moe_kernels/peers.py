"""The table of every rank's buffer that rowwise dispatch and combine address."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


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
    def ranks(self) -> int:
        return len(self.tensors)

    @property
    def capacity(self) -> int:
        return self.tensors[0].shape[0]

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
