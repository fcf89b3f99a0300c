"""W ranks in one process: W buffers, the same kernels, phases in stream order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_kernels._launch import check_int
from moe_kernels.peers import PeerTable, peer_table
from moe_kernels.transport.base import Transport


class VirtualTransport(Transport):
    """All `world_size` ranks live in this process on one device (CPU or one GPU).

    Every rank's work goes to the current stream, phase after phase, which is what orders it: the barrier has nothing
    left to do. Results equal those of separate ranks; times mean nothing beyond world_size 1.
    """

    name = "virtual"

    def __init__(self, world_size: int, device: torch.device | str) -> None:
        check_int("world_size", world_size)
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        self.world_size = world_size
        self.local_ranks = tuple(range(world_size))
        self.device = torch.device(device)

    def allocate(self, rows: int, width: int, dtype: torch.dtype) -> PeerTable:
        return peer_table([torch.empty(rows, width, dtype=dtype, device=self.device) for _ in self.local_ranks])

    def free(self, table: PeerTable) -> None:
        """Nothing to do: the tensors are freed with their last reference."""

    def barrier(self) -> None:
        """Nothing to do: one stream orders the phases of all ranks."""

    def all_gather_counts(self, counts_E: Sequence[torch.Tensor]) -> torch.Tensor:
        self._check_counts(counts_E)
        return torch.stack(tuple(counts_E)) if self.world_size > 1 else counts_E[0][None]

    def all_gather_host(self, values: Sequence[int]) -> list[int]:
        return list(values)
