"""One CPU process per rank over torch.distributed (gloo), buffers in memory-mapped files that all of them see."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from moe_kernels.peers import PeerTable, peer_table
from moe_kernels.transport.base import Transport


class SharedMemoryTransport(Transport):
    """Ranks of one host that address each other's buffers directly: the multi-process twin of the NVSHMEM transport.

    It exists for tests: the phases of real, unsynchronised processes, on a machine without a GPU. A file loses its name
    as soon as every rank has mapped it, so that nothing is left behind when ranks are killed; a kill in the moment
    between leaves at most one ``moe_kernels_*`` file per rank in /dev/shm (or the temporary folder), safe to delete.
    """

    name = "shared_memory"

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise RuntimeError("SharedMemoryTransport needs torch.distributed: call init_process_group first")
        self.host_group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.local_ranks = (self.rank,)
        self.device = torch.device("cpu")
        self._allocated = 0
        root = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
        shared = [str(root / f"moe_kernels_{uuid.uuid4().hex}") if self.rank == 0 else None]
        dist.broadcast_object_list(shared, src=dist.get_global_rank(group, 0) if group else 0, group=group)
        self._prefix = shared[0]

    def allocate(self, rows: int, width: int, dtype: torch.dtype) -> PeerTable:
        nbytes = rows * width * dtype.itemsize
        paths = [Path(f"{self._prefix}_{self._allocated}_{rank}") for rank in range(self.world_size)]
        self._allocated += 1
        with open(os.open(paths[self.rank], os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600), "wb") as file:
            file.truncate(max(1, nbytes))
        try:
            self.barrier()
            flat = [torch.from_file(str(p), shared=True, size=max(1, nbytes), dtype=torch.uint8) for p in paths]
            self.barrier()
        finally:
            paths[self.rank].unlink()
        return peer_table([f[:nbytes].view(dtype).view(rows, width) for f in flat])

    def free(self, table: PeerTable) -> None:
        """Nothing to do: the mapping goes with its last reference."""

    def barrier(self) -> None:
        dist.barrier(group=self.host_group)

    def all_gather_counts(self, counts_E: Sequence[torch.Tensor]) -> torch.Tensor:
        self._check_counts(counts_E)
        gathered = torch.empty(self.world_size, counts_E[0].numel(), dtype=torch.int64)
        dist.all_gather(list(gathered.unbind(0)), counts_E[0].contiguous(), group=self.host_group)
        return gathered

    def close(self) -> None:
        self.barrier()
