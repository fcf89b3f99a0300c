"""Symmetric memory between ranks: in one process, between CPU processes, or through NVSHMEM."""

from moe_kernels.transport.base import Transport
from moe_kernels.transport.nvshmem import NvshmemTransport
from moe_kernels.transport.pool import Lease, SymmetricPool
from moe_kernels.transport.shared_memory import SharedMemoryTransport
from moe_kernels.transport.virtual import VirtualTransport

__all__ = ["Lease", "NvshmemTransport", "SharedMemoryTransport", "SymmetricPool", "Transport", "VirtualTransport"]
