"""Transports in one process: peers' memory is addressable, counts gather in rank order, mistakes are named."""

import ctypes

import pytest

torch = pytest.importorskip("torch")
from moe_kernels.transport import NvshmemTransport, SharedMemoryTransport, VirtualTransport  # noqa: E402


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
    with pytest.raises(TypeError, match=r"rank 1: int64 \[E\] expected, got torch\.int32"):
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
