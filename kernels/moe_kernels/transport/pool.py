"""Symmetric payload buffers, leased per in-flight (block, microbatch) and frozen after a dry run."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from moe_kernels.peers import PeerTable
from moe_kernels.transport.base import Transport


@dataclass(eq=False)
class Lease:
    """Buffers that belong to one (block, microbatch) until `SymmetricPool.release`.

    `rows` [C, D] holds the dispatched rows, `outputs` [C, D] the experts' outputs. A lease that is handed out twice
    would lose what backward needs; the pool refuses.
    """

    key: tuple[Hashable, ...]
    slot: int
    rows: PeerTable
    outputs: PeerTable
    active: bool = True


class SymmetricPool:
    """Slots of two [C, D] symmetric buffers each.

    Slots are taken last-in first-out, so equal sequences of leases give every rank, and every step, the same
    addresses. After `freeze` a lease that finds no free slot raises instead of allocating.

    Source: report Table 51, lease high-water.
    """

    def __init__(self, transport: Transport, width: int, dtype: torch.dtype) -> None:
        self.transport = transport
        self.width = width
        self.dtype = dtype
        self.frozen = False
        self.capacity = 0
        self.high_water = 0
        self.high_water_by_block: dict[Hashable, int] = {}
        self._slots: list[tuple[PeerTable, PeerTable]] = []
        self._free: list[int] = []
        self._held: dict[tuple[Hashable, ...], Lease] = {}

    @property
    def slots(self) -> int:
        """Slots allocated so far."""
        return len(self._slots)

    @property
    def held(self) -> tuple[tuple[Hashable, ...], ...]:
        """Keys of the leases now out."""
        return tuple(self._held)

    @property
    def bytes_per_rank(self) -> int:
        """Symmetric bytes that the slots take on each rank."""
        return sum(table.tensors[0].nbytes for pair in self._slots for table in pair)

    def freeze(self) -> None:
        """End the dry run: from here on neither the capacity nor the number of slots can grow."""
        self.frozen = True

    def lease(self, block: Hashable, microbatch: Hashable, capacity: int) -> Lease:
        """Take a slot of at least `capacity` rows for (block, microbatch).

        Raises:
            RuntimeError: the pair already holds a lease, or the frozen pool has no slot left or too few rows.
        """
        key = (block, microbatch)
        if key in self._held:
            raise RuntimeError(
                f"block {block!r}, microbatch {microbatch!r} already holds a lease: its backward has not run. Give "
                f"microbatches in flight different numbers, or call release_all() after an abandoned forward"
            )
        if capacity > self.capacity:
            self._grow(capacity)
        if not self._free:
            self._add_slot(key)
        slot = self._free.pop()
        rows, outputs = self._slots[slot]
        lease = Lease(key, slot, rows, outputs)
        self._held[key] = lease
        self.high_water = max(self.high_water, len(self._held))
        of_block = sum(1 for held_block, _ in self._held if held_block == block)
        self.high_water_by_block[block] = max(self.high_water_by_block.get(block, 0), of_block)
        return lease

    def held_lease(self, block: Hashable, microbatch: Hashable) -> Lease:
        """Return the lease that (block, microbatch) holds, for a recomputed forward. Raises RuntimeError if none."""
        lease = self._held.get((block, microbatch))
        if lease is None:
            raise RuntimeError(f"block {block!r}, microbatch {microbatch!r} holds no lease to recompute into")
        return lease

    def release(self, lease: Lease) -> None:
        """Give a slot back. Raises RuntimeError for a lease that was given back before."""
        if not lease.active:
            raise RuntimeError(f"lease of block {lease.key[0]!r}, microbatch {lease.key[1]!r} was already released")
        lease.active = False
        del self._held[lease.key]
        self._free.append(lease.slot)

    def release_all(self) -> None:
        """Give back every lease now out, for forwards whose backward will never run."""
        for lease in list(self._held.values()):
            self.release(lease)

    def close(self) -> None:
        """Free the slots. Collective."""
        self.release_all()
        for pair in self._slots:
            for table in pair:
                self.transport.free(table)
        self._slots.clear()
        self._free.clear()
        self.capacity = 0

    def _grow(self, capacity: int) -> None:
        if self.frozen:
            raise RuntimeError(
                f"the pool is frozen at {self.capacity} rows per slot, {capacity} were asked for: allocation after the "
                f"dry run would stop every rank. Run the dry run with the largest microbatch"
            )
        if self._held:
            raise RuntimeError(
                f"the pool cannot grow from {self.capacity} to {capacity} rows while leases are out: {self.held}"
            )
        self.close()
        self.capacity = capacity

    def _add_slot(self, key: tuple[Hashable, ...]) -> None:
        if self.frozen:
            raise RuntimeError(
                f"the pool is frozen at {self.slots} slots, all leased ({self.held}), and block {key[0]!r}, microbatch "
                f"{key[1]!r} asks for one more: the dry run must hold as many microbatches in flight as training does"
            )
        rows = self.transport.allocate(self.capacity, self.width, self.dtype)
        outputs = self.transport.allocate(self.capacity, self.width, self.dtype)
        self._slots.append((rows, outputs))
        self._free.append(self.slots - 1)
