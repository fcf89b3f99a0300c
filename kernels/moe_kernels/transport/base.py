"""What the routed path asks of a transport: symmetric buffers, a count all-gather and a barrier in device order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from moe_kernels._launch import check_tensor
from moe_kernels.peers import PeerTable


class Transport(ABC):
    """Ranks, of which this process hosts `local_ranks`, with memory that each of them can address.

    A hosted list longer than one exists only in the in-process transport; callers loop over it phase by phase, so
    that one code path serves both.
    """

    name: str
    world_size: int
    local_ranks: tuple[int, ...]
    device: torch.device
    host_group: Any = None
    """Process group of host-side meetings where every rank has a process of its own; None: the default group."""

    @abstractmethod
    def allocate(self, rows: int, width: int, dtype: torch.dtype) -> PeerTable:
        """Allocate one buffer [rows, width] per rank. Collective: every rank calls it in the same order."""

    @abstractmethod
    def free(self, table: PeerTable) -> None:
        """Give a buffer back. Collective."""

    @abstractmethod
    def barrier(self) -> None:
        """Order all ranks' device work before this point ahead of all ranks' device work after it."""

    @abstractmethod
    def all_gather_counts(self, counts_E: Sequence[torch.Tensor]) -> torch.Tensor:
        """Gather one int64 [E] row per hosted rank into int64 [R, E] on the device, without reading it on the host.

        No rank's later device work starts before every rank has contributed, so this also orders the reuse of a
        symmetric buffer: whoever writes to a peer after it knows that the peer's earlier reads are over.
        """

    def all_gather_host(self, values: Sequence[int]) -> list[int]:
        """Gather one host integer per hosted rank, in rank order. For set-up only: the host waits for its peers."""
        everywhere: list[int] = [0] * self.world_size
        dist.all_gather_object(everywhere, values[0], group=self.host_group)
        return everywhere

    def require_equal(self, what: str, values: Sequence[int]) -> int:
        """Return the value that every rank has. Raises ValueError, naming each rank's value, where they differ."""
        everywhere = self.all_gather_host(values)
        if len(set(everywhere)) > 1:
            listed = ", ".join(f"rank {r}: {v}" for r, v in enumerate(everywhere))
            raise ValueError(f"{what} must be equal on all {self.world_size} ranks, got {listed}")
        return everywhere[0]

    def close(self) -> None:  # noqa: B027 - most transports hold nothing
        """Release what the transport holds. Collective."""

    def _check_counts(self, counts_E: Sequence[torch.Tensor]) -> None:
        if len(counts_E) != len(self.local_ranks):
            raise ValueError(f"counts of {len(self.local_ranks)} hosted ranks expected, got {len(counts_E)}")
        for rank, counts in zip(self.local_ranks, counts_E):
            check_tensor(f"counts of rank {rank}", counts, shape=(None,), dtypes=(torch.int64,))
