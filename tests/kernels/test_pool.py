"""Leases of the symmetric pool: each holds its slot until released, and a frozen pool never allocates."""

import pytest

torch = pytest.importorskip("torch")
from moe_kernels.transport import SymmetricPool, VirtualTransport  # noqa: E402


def make_pool() -> SymmetricPool:
    return SymmetricPool(VirtualTransport(2, "cpu"), width=4, dtype=torch.float32)


def test_concurrent_leases_use_distinct_memory_and_record_the_high_water():
    pool = make_pool()
    first = pool.lease(block=3, microbatch=0, capacity=8)
    second = pool.lease(block=3, microbatch=1, capacity=8)
    third = pool.lease(block=4, microbatch=0, capacity=8)
    pointers = {
        t.data_ptr() for lease in (first, second, third) for b in (lease.rows, lease.outputs) for t in b.tensors
    }
    assert len(pointers) == 3 * 2 * 2
    assert pool.high_water == 3
    assert pool.high_water_by_block == {3: 2, 4: 1}
    for lease in (first, second, third):
        pool.release(lease)
    assert pool.held == ()
    assert pool.high_water == 3
    assert pool.bytes_per_rank == 3 * 2 * 8 * 4 * 4


def test_equal_sequences_of_leases_get_equal_slots():
    pool = make_pool()

    def step() -> list[int]:
        leases = [pool.lease(block, mb, 8) for mb in range(2) for block in range(3)]
        slots = [lease.slot for lease in leases]
        for lease in reversed(leases):
            pool.release(lease)
        return slots

    step()
    assert step() == step()


def test_double_release_raises():
    pool = make_pool()
    lease = pool.lease(0, 0, 8)
    pool.release(lease)
    with pytest.raises(RuntimeError, match="block 0, microbatch 0 was already released"):
        pool.release(lease)
    assert pool.slots == 1


def test_a_pair_cannot_hold_two_leases():
    pool = make_pool()
    pool.lease(0, 0, 8)
    with pytest.raises(RuntimeError, match="already holds a lease"):
        pool.lease(0, 0, 8)


def test_frozen_pool_refuses_another_slot_and_more_rows():
    pool = make_pool()
    pool.release(pool.lease(0, 0, 8))
    pool.freeze()
    held = pool.lease(0, 0, 8)
    with pytest.raises(RuntimeError, match="frozen at 1 slots"):
        pool.lease(1, 0, 8)
    pool.release(held)
    with pytest.raises(RuntimeError, match="frozen at 8 rows per slot, 9 were asked for"):
        pool.lease(0, 0, 9)
    assert pool.slots == 1


def test_growing_under_a_live_lease_raises_and_a_smaller_lease_fits():
    pool = make_pool()
    lease = pool.lease(0, 0, 8)
    with pytest.raises(RuntimeError, match="cannot grow from 8 to 16 rows"):
        pool.lease(1, 0, 16)
    pool.release(lease)
    assert pool.lease(0, 0, 2).rows.tensors[0].shape == (8, 4)


def test_release_all_after_an_abandoned_forward():
    pool = make_pool()
    lease = pool.lease(0, 0, 8)
    pool.lease(1, 0, 8)
    pool.release_all()
    assert pool.held == ()
    assert not lease.active
    pool.lease(0, 0, 8)


def test_recompute_finds_the_lease_of_its_forward():
    pool = make_pool()
    lease = pool.lease(0, 5, 8)
    assert pool.held_lease(0, 5) is lease
    with pytest.raises(RuntimeError, match="microbatch 6 holds no lease"):
        pool.held_lease(0, 6)
