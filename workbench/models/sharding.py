"""Memory and communication of the ways to shard data-parallel training state, per rank and optimizer step.

Full-reshard FSDP2 and DDP with sharded optimizer state are the two endpoints; retention policies and HSDP lie between.
Parameters fall in two groups: those replicated over all W ranks (dense), and routed experts, of which each rank holds
1/EP and which W/EP ranks share. Collectives count the bytes that one rank sends in a ring: (n - 1)/n of the payload
for an all-gather or reduce-scatter, twice that for an all-reduce. Activations and fragmentation are not counted.

Source: report, Section B.3 and B.4 (FP32 gradient and optimizer policy); PyTorch's documented FSDP2 switches
(`reshard_after_forward`, `set_reshard_after_backward`, `set_requires_gradient_sync`, `set_requires_all_reduce`).
"""

from __future__ import annotations

from dataclasses import dataclass

POLICIES: dict[str, str] = {
    "fsdp_full_reshard": "FSDP2, full reshard (endpoint)",
    "fsdp_retain_backward": "FSDP2, weights kept through backward",
    "fsdp_retain_step": "FSDP2, weights kept across the step",
    "fsdp_retain_step_no_sync": "FSDP2, weights and gradients kept (on the DDP line)",
    "hsdp": "HSDP, shard groups of {}",
    "ddp_sharded_optimizer": "DDP, sharded optimizer (endpoint)",
}
"""Full reshard gathers weights for forward and again for backward. HSDP does so inside a shard group, and all-reduces
gradient shards across groups once per step. DDP keeps weights and gradients on the device."""


WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 4, 12
"""Per parameter: BF16 weights, FP32 gradients, FP32 master weights with two Adam moments."""
RESIDENT_BLOCKS = 2
"""Blocks unsharded at once under full reshard: the one in use and the one being prefetched."""


@dataclass(frozen=True)
class Sharding:
    """What one policy costs one rank.

    Attributes:
        weights_bytes: unsharded compute weights at the peak.
        gradients_bytes: gradients at the peak.
        optimizer_bytes: master weights and moments (for FSDP2 the weight shard is the master).
        gather_bytes: all-gather bytes sent per optimizer step.
        reduce_bytes: reduce-scatter and all-reduce bytes sent per optimizer step.
    """

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    gather_bytes: float
    reduce_bytes: float

    def __add__(self, other: Sharding) -> Sharding:
        return Sharding(*(a + b for a, b in zip(vars(self).values(), vars(other).values())))

    @property
    def memory_bytes(self) -> float:
        """Peak bytes of training state on one rank."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def sent_bytes(self) -> float:
        """Bytes sent by one rank per optimizer step."""
        return self.gather_bytes + self.reduce_bytes


def shard(
    policy: str,
    *,
    dense_params: float,
    routed_params: float,
    world: int,
    ep: int,
    microbatches: int,
    blocks: int,
    shard_ranks: int = 8,
) -> Sharding:
    """Return memory and communication of `policy` on one rank.

    Args:
        policy: key of `POLICIES`.
        dense_params: parameters that every rank uses.
        routed_params: routed-expert parameters of the whole model.
        world: data-parallel ranks, a multiple of `ep`.
        ep: expert-parallel degree.
        microbatches: accumulation microbatches per step and rank.
        blocks: separately wrapped blocks, taken as equally large.
        shard_ranks: ranks of one HSDP shard group; experts are sharded over `shard_ranks // ep` of them.

    Raises:
        ValueError: unknown policy, a count below 1, or sizes that do not divide.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, got {policy!r}")
    counts = {"world": world, "ep": ep, "microbatches": microbatches, "blocks": blocks, "shard_ranks": shard_ranks}
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name}: expected 1 or more, got {value!r}")
    if world % ep:
        raise ValueError(f"world: expected a multiple of ep {ep}, got {world}")
    if policy == "hsdp" and (world % shard_ranks or max(shard_ranks, ep) % min(shard_ranks, ep)):
        expected = f"a divisor of world {world} that divides ep {ep} or is a multiple of it"
        raise ValueError(f"shard_ranks: expected {expected}, got {shard_ranks}")
    dense = _group(policy, dense_params, world, shard_ranks, microbatches, blocks)
    return dense + _group(policy, routed_params / ep, world // ep, max(1, shard_ranks // ep), microbatches, blocks)


def _group(policy: str, p: float, n: int, s: int, m: int, blocks: int) -> Sharding:
    """Cost of `p` parameters per rank that `n` ranks share, `s` of them forming an HSDP shard group."""
    ranks = s if policy == "hsdp" else n
    ring = (ranks - 1) / ranks
    unsharded = policy in ("ddp_sharded_optimizer", "fsdp_retain_step_no_sync")
    gathers = {"fsdp_full_reshard": 2 * m, "hsdp": 2 * m, "fsdp_retain_backward": m}.get(policy, 1)
    reduces = 1 if unsharded else m
    replicas = n // ranks
    across = 2 * (replicas - 1) / replicas * GRADIENT_BYTES * p / ranks
    keeps_all = policy not in ("fsdp_full_reshard", "hsdp") or ranks == 1
    # The unsharded gradient of the block in backward exists beside the accumulated shard.
    gradients = GRADIENT_BYTES * p * (1.0 if unsharded or ranks == 1 else min(1.0, 1 / ranks + 1.0 / blocks))
    return Sharding(
        weights_bytes=WEIGHT_BYTES * p * (1.0 if keeps_all else min(1.0, RESIDENT_BLOCKS / blocks)),
        gradients_bytes=gradients,
        optimizer_bytes=OPTIMIZER_BYTES * p / ranks,
        gather_bytes=gathers * ring * WEIGHT_BYTES * p,
        reduce_bytes=reduces * ring * GRADIENT_BYTES * p + across,
    )
