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
    "fsdp_full_reshard": "FSDP2, full reshard: weights gathered for forward and again for backward",
    "fsdp_retain_backward": "FSDP2, weights retained from forward through backward",
    "fsdp_retain_step": "FSDP2, weights retained across the step's accumulation microbatches",
    "fsdp_retain_step_no_sync": "FSDP2, weights and unsharded gradients retained across the step",
    "hsdp": "HSDP: full reshard inside a shard group, gradient shards all-reduced across groups once per step",
    "ddp_sharded_optimizer": "DDP with sharded optimizer state: weights and gradients stay on the device",
}


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes per parameter: by default BF16 weights, FP32 gradients, FP32 master weights with two Adam moments."""

    weight_bytes: int = 2
    gradient_bytes: int = 4
    optimizer_bytes: int = 12


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """What one policy costs one rank.

    Attributes:
        policy: key of `POLICIES`.
        weights_bytes: unsharded compute weights at the peak.
        gradients_bytes: gradients at the peak.
        optimizer_bytes: master weights and moments (for FSDP2 the weight shard is the master).
        gather_bytes: all-gather bytes sent per optimizer step.
        reduce_bytes: reduce-scatter and all-reduce bytes sent per optimizer step.
    """

    policy: str
    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    gather_bytes: float
    reduce_bytes: float

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
    resident_blocks: int = 2,
    shard_ranks: int = 8,
    precision: Precision = Precision(),
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
        resident_blocks: blocks unsharded at once under full reshard: the one in use and the one being prefetched.
        shard_ranks: ranks of one HSDP shard group; experts are sharded over `shard_ranks // ep` of them.
        precision: bytes per parameter.

    Raises:
        ValueError: unknown policy, a count below 1, or sizes that do not divide.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, got {policy!r}")
    counts = {"world": world, "ep": ep, "microbatches": microbatches, "blocks": blocks}
    for name, value in (counts | {"resident_blocks": resident_blocks, "shard_ranks": shard_ranks}).items():
        if value < 1:
            raise ValueError(f"{name}: expected 1 or more, got {value!r}")
    if world % ep:
        raise ValueError(f"world: expected a multiple of ep {ep}, got {world}")
    if policy == "hsdp" and (world % shard_ranks or max(shard_ranks, ep) % min(shard_ranks, ep)):
        expected = f"a divisor of world {world} that divides ep {ep} or is a multiple of it"
        raise ValueError(f"shard_ranks: expected {expected}, got {shard_ranks}")
    groups = ((dense_params, world, shard_ranks), (routed_params / ep, world // ep, max(1, shard_ranks // ep)))
    resident = min(1.0, resident_blocks / blocks)
    parts = [_group(policy, p, n, s, microbatches, resident, 1.0 / blocks, precision) for p, n, s in groups]
    return Sharding(policy=policy, **{k: sum(part[k] for part in parts) for k in parts[0]})


def _group(
    policy: str, p: float, n: int, s: int, m: int, resident: float, one: float, b: Precision
) -> dict[str, float]:
    """Cost of `p` parameters per rank that `n` ranks share, `s` of them forming an HSDP shard group."""
    ranks = s if policy == "hsdp" else n
    ring = (ranks - 1) / ranks
    unsharded = policy in ("ddp_sharded_optimizer", "fsdp_retain_step_no_sync")
    gathers = {"fsdp_full_reshard": 2 * m, "hsdp": 2 * m, "fsdp_retain_backward": m}.get(policy, 1)
    reduces = 1 if unsharded else m
    replicas = n // ranks
    across = 2 * (replicas - 1) / replicas * b.gradient_bytes * p / ranks
    keeps_all = policy not in ("fsdp_full_reshard", "hsdp") or ranks == 1
    # The unsharded gradient of the block in backward exists beside the accumulated shard.
    gradients = b.gradient_bytes * p * (1.0 if unsharded or ranks == 1 else min(1.0, 1 / ranks + one))
    return {
        "weights_bytes": b.weight_bytes * p * (1.0 if keeps_all else resident),
        "gradients_bytes": gradients,
        "optimizer_bytes": b.optimizer_bytes * p / ranks,
        "gather_bytes": gathers * ring * b.weight_bytes * p,
        "reduce_bytes": reduces * ring * b.gradient_bytes * p + across,
    }
