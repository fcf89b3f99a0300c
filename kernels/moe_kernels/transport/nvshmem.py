"""NVSHMEM symmetric memory, one PE per rank, started over torch.distributed by unique id (no MPI)."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist

from moe_kernels.peers import PeerTable, peer_table
from moe_kernels.transport.base import Transport


class NvshmemTransport(Transport):
    """Peers' buffers are mapped into this process; kernels load and store through their addresses.

    With one PE per GPU the barrier is NVSHMEM's own, on the current stream, and no host waits. Where several PEs share
    a GPU, NVSHMEM refuses its barriers and collectives, so the host waits for its stream and meets its peers through
    torch.distributed instead: correct, and its timing means nothing (`host_barriers` tells which of the two runs).

    Args:
        device: this rank's CUDA device.
        host_group: process group for host-side meetings, gloo. Made when omitted.
        device_group: NCCL group for the count all-gather. The default group when it is NCCL and omitted.
        host_barriers: force host barriers (True) or require stream barriers (False). Chosen by itself when omitted.

    Raises:
        RuntimeError: torch.distributed or nvshmem4py is missing, or a peer has no direct address (another node).

    Source: NVSHMEM 3 documentation, nvshmem_ptr and nvshmem_barrier_all_on_stream.
    """

    name = "nvshmem"

    def __init__(
        self,
        device: torch.device | str | None = None,
        host_group: dist.ProcessGroup | None = None,
        device_group: dist.ProcessGroup | None = None,
        host_barriers: bool | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError("NvshmemTransport needs torch.distributed: call init_process_group first")
        # A program that uses NVLink multicast can put a host's GPUs out of service; plain peer access is enough here.
        os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
        try:
            import nvshmem.core as nvshmem
            from cuda.core import Device
        except ImportError as error:
            raise RuntimeError(f"NvshmemTransport needs the package nvshmem4py-cu13: {error}") from error

        self.device = torch.device(device if device is not None else f"cuda:{torch.cuda.current_device()}")
        torch.cuda.set_device(self.device)
        self.host_group = host_group if host_group is not None else dist.new_group(backend="gloo")
        self._device_group = device_group
        self.rank = dist.get_rank(self.host_group)
        self.world_size = dist.get_world_size(self.host_group)
        self.local_ranks = (self.rank,)
        self._nvshmem = nvshmem

        places: list[tuple[str, str]] = [("", "")] * self.world_size
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        dist.all_gather_object(places, (socket.gethostname(), uuid), group=self.host_group)
        shared_gpu = len(set(places)) < self.world_size
        if shared_gpu and host_barriers is False:
            raise RuntimeError(f"stream barriers need one PE per GPU, but {self.world_size} PEs share GPUs: {places}")
        self.host_barriers = shared_gpu if host_barriers is None else host_barriers

        uid = nvshmem.get_unique_id(empty=self.rank != 0)
        raw = torch.frombuffer(bytearray(uid._data.tobytes()), dtype=torch.uint8).clone()
        dist.broadcast(raw, src=dist.get_global_rank(self.host_group, 0), group=self.host_group)
        uid._data[:] = raw.numpy().view(uid._data.dtype)
        cuda_device = Device(self.device.index or 0)
        cuda_device.set_current()
        nvshmem.init(device=cuda_device, uid=uid, rank=self.rank, nranks=self.world_size, initializer_method="uid")
        self._counts: PeerTable | None = None

    def allocate(self, rows: int, width: int, dtype: torch.dtype) -> PeerTable:
        nvshmem = self._nvshmem
        # nvshmem4py maps bfloat16 and others through NumPy; bytes and a view work for every dtype.
        nbytes = rows * width * dtype.itemsize
        own = nvshmem.tensor((max(16, nbytes),), dtype=torch.uint8)
        peers = []
        for rank in range(self.world_size):
            try:
                peers.append(own if rank == self.rank else nvshmem.get_peer_tensor(own, rank))
            except nvshmem.NvshmemError as error:
                raise RuntimeError(
                    f"rank {self.rank} has no direct address of rank {rank}: this transport needs peers reachable by "
                    f"load and store (one host, or one NVLink domain); a network transport is missing"
                ) from error
        table = peer_table([p[:nbytes].view(dtype).view(rows, width) for p in peers], self.device)
        self._meet()
        return table

    def free(self, table: PeerTable) -> None:
        self._meet()
        self._nvshmem.free_tensor(table.tensors[self.rank])

    def barrier(self) -> None:
        if self.host_barriers:
            self._meet()
        else:
            self._nvshmem.barrier_all(_Stream(torch.cuda.current_stream(self.device).cuda_stream))

    def all_gather_counts(self, counts_E: Sequence[torch.Tensor]) -> torch.Tensor:
        self._check_counts(counts_E)
        (counts,) = counts_E
        if not self.host_barriers:
            gathered = torch.empty(self.world_size * counts.numel(), dtype=torch.int64, device=self.device)
            # The first name is that of torch 2.13 on, which deprecates the second.
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            gather(gathered, counts.contiguous(), group=self._device_group)
            return gathered.view(self.world_size, -1)
        if self._counts is not None and self._counts.width != counts.numel():
            self.free(self._counts)
            self._counts = None
        if self._counts is None:
            self._counts = self.allocate(self.world_size, counts.numel(), torch.int64)
        for peer in self._counts.tensors:
            peer[self.rank].copy_(counts)
        self._meet()
        gathered = self._counts.tensors[self.rank].clone()
        # Without a second meeting a faster peer's next exchange could overwrite the table before this copy has run.
        self._meet()
        return gathered

    def close(self) -> None:
        if self._counts is not None:
            self.free(self._counts)
            self._counts = None
        self._meet()
        self._nvshmem.finalize()

    def _meet(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()
        dist.barrier(group=self.host_group)


class _Stream:
    """A raw stream handle in the form that cuda.core's protocol asks for."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._handle)
