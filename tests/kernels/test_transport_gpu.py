"""NVSHMEM on one GPU: several PEs share it, peers' memory is read and written, and the rowwise path equals one rank."""

import os

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from moe_kernels.block import BlockConfig, RoutedBlock  # noqa: E402
from moe_kernels.transport import NvshmemTransport  # noqa: E402
from ranks import compare_with_one_rank, spawn  # noqa: E402

pytestmark = pytest.mark.gpu
PARITY = BlockConfig(
    width=512, expert_width=1024, num_experts=8, top_k=2, capacity_factor=8.0, shared_width=256, lbl_granularity="batch"
)


def check_nvshmem(rank: int, world_size: int, impl: str | None) -> None:
    transport = NvshmemTransport(f"cuda:{rank % torch.cuda.device_count()}")
    assert transport.host_barriers == (world_size > torch.cuda.device_count())
    device = transport.device

    table = transport.allocate(world_size, 6, torch.int64)
    table.tensors[rank].fill_(rank)
    transport.barrier()
    for peer in range(world_size):
        assert (table.tensors[peer] == peer).all(), f"rank {rank} read {table.tensors[peer]} from {peer}"
    transport.barrier()
    for peer in range(world_size):
        table.tensors[peer][rank] = 100 * rank + peer
    transport.barrier()
    expected = torch.arange(world_size, device=device)[:, None].expand(-1, 6) * 100 + rank
    assert torch.equal(table.tensors[rank], expected), f"rank {rank} holds {table.tensors[rank].tolist()}"
    transport.barrier()

    if dist.get_backend() == "nccl" or transport.host_barriers:
        for round_ in range(3):
            counts = torch.arange(4, device=device) + 10 * rank + 100 * round_
            gathered = transport.all_gather_counts([counts])
            rows = torch.arange(world_size, device=device)[:, None] * 10
            wanted = rows + torch.arange(4, device=device) + 100 * round_
            told = f"rank {rank}, round {round_}: got {gathered.tolist()}, expected {wanted.tolist()}"
            assert torch.equal(gathered, wanted), told

        block = RoutedBlock(PARITY, path="rowwise", transport=transport, seed=5, device=device, impl=impl)
        compare_with_one_rank(block, PARITY, 64, rank, world_size, str(device))
        with pytest.raises(ValueError, match="tokens per rank"):
            block(torch.zeros(8 + rank % 2, 512, device=device))
        assert block.pool.held == ()
        block.pool.close()
    transport.free(table)
    transport.close()


@pytest.mark.parametrize("impl", [None, "reference"])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_several_pes_on_one_gpu(tmp_path, world_size, impl):
    pytest.importorskip("nvshmem")
    os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(512 << 20))
    spawn(check_nvshmem, world_size, tmp_path, impl)


def check_one_pe(rank: int, world_size: int) -> None:
    torch.cuda.set_device(0)
    group = dist.new_group(backend="nccl")
    transport = NvshmemTransport("cuda:0", device_group=group)
    assert not transport.host_barriers
    block = RoutedBlock(PARITY, path="rowwise", transport=transport, seed=5, device="cuda:0")
    compare_with_one_rank(block, PARITY, 64, rank, world_size, "cuda:0")
    block.pool.close()
    transport.close()


def test_one_pe_with_stream_barriers(tmp_path):
    pytest.importorskip("nvshmem")
    spawn(check_one_pe, 1, tmp_path)
