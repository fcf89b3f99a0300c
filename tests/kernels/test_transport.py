"""Transports in one process: peers' memory is addressable, counts gather in rank order, mistakes are named."""

import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from moe_kernels.peers import peer_table  # noqa: E402
from moe_kernels.transport import NvshmemTransport, SharedMemoryTransport, VirtualTransport  # noqa: E402
from ranks import spawn  # noqa: E402


def test_addresses_are_those_of_the_ranks_buffers():
    transport = VirtualTransport(3, "cpu")
    table = transport.allocate(2, 4, torch.float32)
    for rank, address in enumerate(table.ptrs.tolist()):
        table.tensors[rank].fill_(rank + 0.5)
        assert list((ctypes.c_float * 8).from_address(address)) == [rank + 0.5] * 8
    assert len(set(table.ptrs.tolist())) == 3


def test_counts_gather_in_rank_order():
    transport = VirtualTransport(2, "cpu")
    counts = [torch.tensor([1, 2]), torch.tensor([3, 4])]
    assert transport.all_gather_counts(counts).tolist() == [[1, 2], [3, 4]]


def test_wrong_counts_are_named():
    transport = VirtualTransport(2, "cpu")
    good = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="counts of 2 hosted ranks expected, got 1"):
        transport.all_gather_counts([good])
    with pytest.raises(TypeError, match=r"counts of rank 1 must have dtype torch\.int64; got torch\.int32"):
        transport.all_gather_counts([good, good.int()])


def test_unequal_values_name_every_rank():
    transport = VirtualTransport(3, "cpu")
    assert transport.require_equal("width", [4, 4, 4]) == 4
    with pytest.raises(ValueError, match="width must be equal on all 3 ranks, got rank 0: 4, rank 1: 5, rank 2: 4"):
        transport.require_equal("width", [4, 5, 4])


def test_no_rank_is_no_transport():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        VirtualTransport(0, "cpu")


@pytest.mark.parametrize("transport", [SharedMemoryTransport, NvshmemTransport])
def test_process_transports_say_what_they_need(transport):
    with pytest.raises(RuntimeError, match=r"needs torch\.distributed"):
        transport()


class LateTransport(NvshmemTransport):
    """The host-barrier exchange of rank `rank` over a table in this process; rank 1 is late after every meeting."""

    def __init__(self, rank: int, table, meeting: threading.Barrier) -> None:
        self.rank, self.world_size, self.local_ranks = rank, 2, (rank,)
        self.device, self.host_barriers = torch.device("cpu"), True
        self._counts, self._meeting = table, meeting

    def _meet(self) -> None:
        self._meeting.wait(timeout=10)
        time.sleep(0.02 * self.rank)


def test_a_fast_peers_next_count_exchange_does_not_overwrite_this_one():
    # What every rank writes is what its peers read: each has a table of its own.
    own = [torch.zeros(2, 3, dtype=torch.int64) for _ in range(2)]
    meeting = threading.Barrier(2)

    def exchange(rank: int) -> list[list[list[int]]]:
        transport = LateTransport(rank, peer_table(own), meeting)
        return [transport.all_gather_counts([torch.full((3,), 10 * n + rank)]).tolist() for n in range(4)]

    expected = [[[10 * n] * 3, [10 * n + 1] * 3] for n in range(4)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(exchange, (0, 1))) == [expected, expected]


def check_names(rank: int, world_size: int) -> None:
    transport = SharedMemoryTransport()
    prefix = Path(transport._prefix)
    tables = [transport.allocate(rows, 4, torch.float32) for rows in (3, 0)]
    transport.barrier()
    # A rank that were killed from here on would leave nothing behind.
    assert list(prefix.parent.glob(f"{prefix.name}*")) == []
    tables[0].tensors[(rank + 1) % world_size].fill_(rank)
    transport.barrier()
    assert (tables[0].tensors[rank] == (rank - 1) % world_size).all()
    dist.barrier()
    transport.close()


def test_shared_memory_has_no_name_once_it_is_mapped(tmp_path):
    spawn(check_names, 2, tmp_path)
