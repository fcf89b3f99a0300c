"""The sharding endpoints of Section B.3 and what lies between."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.models.sharding import POLICIES, shard


def cost(policy: str, **changes):
    args = {"dense_params": 1.3e9, "routed_params": 25.4e9, "world": 64, "ep": 8, "microbatches": 4, "blocks": 30}
    return shard(policy, **(args | changes))


sizes = {
    "dense_params": st.floats(1e6, 1e11),
    "routed_params": st.floats(0, 1e12),
    "microbatches": st.integers(1, 64),
    "blocks": st.integers(3, 100),
}
degrees = st.integers(0, 5).flatmap(lambda e: st.tuples(st.just(2**e), st.integers(e + 1, 10).map(lambda w: 2**w)))


def test_full_reshard_by_hand():
    """One group, 2 ranks, 10 parameters, 3 microbatches, 5 blocks of which 2 are resident."""
    s = shard("fsdp_full_reshard", dense_params=10, routed_params=0, world=2, ep=1, microbatches=3, blocks=5)
    assert s.weights_bytes == pytest.approx(2 * 10 * 2 / 5)
    assert s.gradients_bytes == pytest.approx(4 * 10 * (1 / 2 + 1 / 5))
    assert s.optimizer_bytes == 12 * 10 / 2
    assert s.gather_bytes == 3 * 2 * (1 / 2) * 2 * 10
    assert s.reduce_bytes == 3 * (1 / 2) * 4 * 10


def test_ddp_by_hand():
    """Weights and gradients whole, optimizer halved; one reduce-scatter and one all-gather per step."""
    s = shard("ddp_sharded_optimizer", dense_params=10, routed_params=0, world=2, ep=1, microbatches=3, blocks=5)
    assert (s.weights_bytes, s.gradients_bytes, s.optimizer_bytes) == (20, 40, 60)
    assert (s.gather_bytes, s.reduce_bytes) == (10, 20)
    assert s.memory_bytes == 120 and s.sent_bytes == 30


def test_hsdp_by_hand():
    """4 ranks in groups of 2: shards over 2; the shard gradient of 5 parameters is all-reduced over 2 groups."""
    s = shard("hsdp", dense_params=10, routed_params=0, world=4, ep=1, microbatches=3, blocks=5, shard_ranks=2)
    assert s.optimizer_bytes == 60 and s.gather_bytes == 3 * 2 * (1 / 2) * 20
    assert s.reduce_bytes == 3 * (1 / 2) * 40 + 2 * (1 / 2) * 4 * 5


def test_experts_are_shared_by_fewer_ranks():
    s = shard("ddp_sharded_optimizer", dense_params=0, routed_params=800, world=16, ep=8, microbatches=1, blocks=5)
    assert s.weights_bytes == 2 * 100 and s.optimizer_bytes == 12 * 100 / 2
    assert s.reduce_bytes == 4 * 100 / 2
    alone = shard("ddp_sharded_optimizer", dense_params=0, routed_params=800, world=8, ep=8, microbatches=1, blocks=5)
    assert alone.sent_bytes == 0, "one owner per expert has nobody to talk to"


@given(degrees=degrees, **sizes)
def test_endpoints_enclose_the_retention_policies(degrees, **args):
    ep, world = degrees
    got = {p: shard(p, ep=ep, world=world, **args) for p in POLICIES if p != "hsdp"}
    full, ddp = got["fsdp_full_reshard"], got["ddp_sharded_optimizer"]
    for policy, s in got.items():
        slack = 1 + 1e-9
        assert full.memory_bytes <= s.memory_bytes * slack and s.memory_bytes <= ddp.memory_bytes * slack, policy
        assert ddp.sent_bytes <= s.sent_bytes * slack and s.sent_bytes <= full.sent_bytes * slack, policy


@given(degrees=degrees, **sizes)
def test_retaining_weights_and_gradients_is_the_ddp_memory(degrees, **args):
    """The report's reason to analyse two endpoints only: full retention approaches the DDP path."""
    ep, world = degrees
    retained, ddp = (
        shard(p, ep=ep, world=world, **args) for p in ("fsdp_retain_step_no_sync", "ddp_sharded_optimizer")
    )
    assert retained.memory_bytes == pytest.approx(ddp.memory_bytes)
    assert retained.sent_bytes == pytest.approx(ddp.sent_bytes)


@given(degrees=degrees, **sizes)
def test_accumulation_multiplies_full_reshard_only(degrees, **args):
    ep, world = degrees
    once, twice = ({**args, "microbatches": args["microbatches"] * f} for f in (1, 2))
    full = [shard("fsdp_full_reshard", ep=ep, world=world, **a) for a in (once, twice)]
    ddp = [shard("ddp_sharded_optimizer", ep=ep, world=world, **a) for a in (once, twice)]
    assert full[1].sent_bytes == pytest.approx(2 * full[0].sent_bytes)
    assert ddp[1].sent_bytes == ddp[0].sent_bytes
    assert full[1].memory_bytes == full[0].memory_bytes


@given(degrees=degrees, policy=st.sampled_from(sorted(POLICIES)), **sizes)
def test_more_ranks_never_cost_memory(degrees, policy, **args):
    ep, world = degrees
    small, large = (shard(policy, ep=ep, world=w, shard_ranks=ep, **args) for w in (world, 2 * world))
    assert large.memory_bytes <= small.memory_bytes * (1 + 1e-9)
    assert large.sent_bytes >= small.sent_bytes * (1 - 1e-9)


def test_hsdp_over_all_ranks_is_full_reshard():
    hsdp, full = cost("hsdp", shard_ranks=64), cost("fsdp_full_reshard")
    assert hsdp.memory_bytes == pytest.approx(full.memory_bytes) and hsdp.sent_bytes == pytest.approx(full.sent_bytes)


@pytest.mark.parametrize(
    "policy, change, message",
    [
        ("zero", {}, "policy"),
        ("hsdp", {"shard_ranks": 24}, "shard_ranks"),
        ("fsdp_full_reshard", {"world": 12}, "multiple of ep"),
        ("fsdp_full_reshard", {"microbatches": 0}, "microbatches"),
    ],
)
def test_bad_arguments_raise(policy, change, message):
    with pytest.raises(ValueError, match=message):
        cost(policy, **change)
