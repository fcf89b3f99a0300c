"""Parameters, batches and topologies of MoE training runs, and what a printed configuration leaves open.

Shapes in the formulas: D model width, F expert width, N routed experts, K top-k.

Source: report, Tables 46, 47 and 49, Sections B.2, B.4 and B.10.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MI = 2**20
GPUS_PER_NODE = 8
"""Of all runs (Table 45)."""
SEQUENCE_TOKENS = 8192
"""Sequence length of all runs (Section B.10)."""


@dataclass(frozen=True)
class Interval:
    """A closed interval of real numbers, for sums of rounded figures."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"interval: expected low <= high, got {self.low!r} and {self.high!r}")

    def __add__(self, other: Interval | float) -> Interval:
        o = _interval(other)
        return Interval(self.low + o.low, self.high + o.high)

    def __sub__(self, other: Interval | float) -> Interval:
        o = _interval(other)
        return Interval(self.low - o.high, self.high - o.low)

    def scaled(self, factor: float) -> Interval:
        """Return the interval times a factor above 0."""
        if not factor > 0:
            raise ValueError(f"factor: expected a number above 0, got {factor!r}")
        return Interval(self.low * factor, self.high * factor)

    def meet(self, other: Interval) -> Interval | None:
        """Return what both allow, None where they contradict each other."""
        low, high = max(self.low, other.low), min(self.high, other.high)
        return Interval(low, high) if low <= high else None

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def _interval(value: Interval | float) -> Interval:
    return value if isinstance(value, Interval) else Interval(value, value)


def _counts(**values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name}: expected a whole number, 0 or more, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Sparse:
    """The routed part of an MoE transformer: everything here follows from the printed sizes, exactly.

    Attributes:
        blocks: transformer blocks.
        dense_blocks: how many of them have a dense feed-forward instead of experts.
        d_model: D.
        routed_experts: N.
        top_k: K.
        expert_width: F; three D x F matrices per expert (gate, up, down).
    """

    blocks: int
    dense_blocks: int
    d_model: int
    routed_experts: int
    top_k: int
    expert_width: int

    def __post_init__(self) -> None:
        _counts(**vars(self))
        if self.dense_blocks > self.blocks:
            raise ValueError(f"dense_blocks: expected at most {self.blocks} (blocks), got {self.dense_blocks}")
        if not 1 <= self.top_k <= self.routed_experts:
            raise ValueError(f"top_k: expected 1 to {self.routed_experts} (routed_experts), got {self.top_k}")

    @property
    def routed_blocks(self) -> int:
        """Blocks with experts."""
        return self.blocks - self.dense_blocks

    @property
    def params_per_expert(self) -> int:
        """3 D F."""
        return 3 * self.d_model * self.expert_width

    @property
    def routed_params(self) -> int:
        """Parameters of all routed experts."""
        return self.routed_blocks * self.routed_experts * self.params_per_expert

    @property
    def active_routed_params(self) -> int:
        """Routed-expert parameters that one token uses."""
        return self.routed_blocks * self.top_k * self.params_per_expert

    @property
    def inactive_params(self) -> int:
        """Routed-expert parameters that one token does not use: total minus active."""
        return self.routed_params - self.active_routed_params

    @property
    def router_params(self) -> int:
        """D x N per routed block."""
        return self.routed_blocks * self.d_model * self.routed_experts

    @property
    def experts_per_active(self) -> float:
        """N/K."""
        return self.routed_experts / self.top_k


@dataclass(frozen=True)
class Size:
    """Parameter count of a whole model.

    Attributes:
        routed: routed experts.
        inactive: routed-expert parameters outside a token's top-k.
        unrouted: everything else: shared experts, routers, mixers, dense feed-forwards, embedding and output head.
    """

    routed: float
    inactive: float
    unrouted: float

    @property
    def total(self) -> float:
        """All parameters."""
        return self.routed + self.unrouted

    @property
    def active(self) -> float:
        """Parameters that one token uses."""
        return self.total - self.inactive


def model_size(
    sparse: Sparse, *, shared_width: int, mixer_params_per_block: float, dense_width: int, embedding_params: float
) -> Size:
    """Return the size of a fully specified model.

    Args:
        sparse: the routed part.
        shared_width: width of all shared experts together; three D x width matrices per routed block.
        mixer_params_per_block: mixer and norms of one block.
        dense_width: feed-forward width of a dense block, gated (three matrices).
        embedding_params: embedding and head together.
    """
    _counts(shared_width=shared_width, dense_width=dense_width)
    shared = 3.0 * sparse.d_model * shared_width * sparse.routed_blocks
    mixer = mixer_params_per_block * sparse.blocks
    dense = 3.0 * sparse.d_model * dense_width * sparse.dense_blocks
    unrouted = shared + sparse.router_params + mixer + dense + embedding_params
    return Size(sparse.routed_params, sparse.inactive_params, unrouted)


REFERENCE_30_BLOCK = Sparse(blocks=30, dense_blocks=2, d_model=1536, routed_experts=128, top_k=8, expert_width=1536)
"""Routed part of the 30-block reference. Its mixers, dense widths and vocabulary are not printed."""
PROFILING = Sparse(blocks=8, dense_blocks=2, d_model=1536, routed_experts=32, top_k=8, expert_width=1536)
"""Routed part of the reduced profiling workload."""
WORKLOADS = {"reference": REFERENCE_30_BLOCK, "profiling": PROFILING}


def alpha_P(active_params: float, total_params: float) -> float:
    """Return the active fraction of the parameters."""
    if not 0 < active_params <= total_params:
        raise ValueError(f"expected 0 < active <= total, got active {active_params!r}, total {total_params!r}")
    return active_params / total_params


def balanced_assignments(global_batch_tokens: float, sparse: Sparse) -> float:
    """Return assignments per routed expert and optimizer step if routing were balanced: tokens x K / N."""
    return global_batch_tokens * sparse.top_k / sparse.routed_experts


def accumulation_microbatches(global_batch_tokens: float, data_parallel: int, rank_microbatch_tokens: float) -> float:
    """Return microbatches per rank and optimizer step; a value that is not whole is a batch that does not fit.

    Args:
        global_batch_tokens: tokens per optimizer step over all ranks.
        data_parallel: ranks that see different tokens (dense data-parallel degree).
        rank_microbatch_tokens: tokens of one microbatch on one rank.
    """
    if not (data_parallel > 0 and rank_microbatch_tokens > 0):
        raise ValueError(
            f"expected both above 0: data_parallel {data_parallel!r}, rank_microbatch_tokens {rank_microbatch_tokens!r}"
        )
    return global_batch_tokens / (data_parallel * rank_microbatch_tokens)


def tightened_total(total: Interval, active: Interval, sparse: Sparse) -> Interval:
    """Return the totals that both printed figures allow: total - active is exactly the inactive experts.

    Raises:
        ValueError: the printed figures contradict the routed part.
    """
    both = total.meet(active + float(sparse.inactive_params))
    if both is None:
        raise ValueError(
            f"total {total.low:.6g} to {total.high:.6g} and active {active.low:.6g} to {active.high:.6g} contradict "
            f"{sparse.inactive_params} inactive expert parameters"
        )
    return both


def undetermined(
    total_reference: Interval, active_reference: Interval, total_profiling: Interval, active_profiling: Interval
) -> dict[str, Interval]:
    """Return what the printed sizes of the two workloads leave open, if they share width, mixers and dense blocks.

    It assumes equal embedding, dense blocks and mean mixer in both; the report says only that width and mixer family
    are the same.

    Returns:
        Parameters by name: total_reference and total_profiling, each tightened by its active count;
        unrouted_reference and unrouted_profiling, everything but routed experts; per_extra_block, mean mixer + shared
        expert of one of the reference's additional routed blocks. If the shared expert is as wide as a routed one also
        mixer, that part of it, and rest: embedding, head and the two dense feed-forwards together.
    """
    reference, profiling = WORKLOADS.values()
    total_r = tightened_total(total_reference, active_reference, reference)
    total_p = tightened_total(total_profiling, active_profiling, profiling)
    unrouted_r, unrouted_p = total_r - float(reference.routed_params), total_p - float(profiling.routed_params)
    known = float(reference.router_params - profiling.router_params)
    per_block = (unrouted_r - unrouted_p - known).scaled(1 / (reference.routed_blocks - profiling.routed_blocks))
    mixer = per_block - float(profiling.params_per_expert)
    rest = unrouted_p - float(profiling.router_params) - per_block.scaled(profiling.routed_blocks)
    return {
        "total_reference": total_r, "total_profiling": total_p, "unrouted_reference": unrouted_r,
        "unrouted_profiling": unrouted_p, "per_extra_block": per_block, "mixer": mixer,
        "rest": rest - mixer.scaled(profiling.dense_blocks),
    }  # fmt: skip


def dense_width_range(rest: Interval, embedding_params: float, sparse: Sparse) -> Interval | None:
    """Return the dense feed-forward widths that fit `rest` for one embedding size, None where no width does."""
    fits = (rest - embedding_params).scaled(1 / (3 * sparse.d_model * sparse.dense_blocks))
    return Interval(max(fits.low, 0.0), fits.high) if fits.high >= 0 else None


def params_per_routed_expert(active: Interval, total: Interval, routed_experts: int, top_k: int) -> Interval:
    """Return the parameters of one routed expert over all layers: (total - active) / (N - K).

    Two runs of one model family with different N must give overlapping intervals.
    """
    if not top_k < routed_experts:
        raise ValueError(f"expected top_k below routed_experts, got {top_k} and {routed_experts}")
    return (total - active).scaled(1 / (routed_experts - top_k))


@dataclass(frozen=True)
class Rule:
    """One consistency rule applied to one row: whether the row obeys it, and the figures that say so."""

    rule: str
    row: str
    holds: bool
    value: str


def run_rules(run: Mapping[str, Any]) -> list[Rule]:
    """Apply the rules that one row of Table 49 must obey by itself.

    Args:
        run: typed row with configuration, dense_dp, expert_dp, ep, pp, gpus, nodes, global_batch_Mi,
            rank_microbatch_tokens, routed_experts.
    """
    dense_dp, expert_dp, ep, pp, gpus, nodes = (run[k] for k in ("dense_dp", "expert_dp", "ep", "pp", "gpus", "nodes"))
    dense, expert = dense_dp * pp, expert_dp * ep * pp
    tokens = run["rank_microbatch_tokens"]
    whole = {
        "microbatches per step": accumulation_microbatches(run["global_batch_Mi"] * MI, dense_dp, tokens),
        "sequences per rank microbatch": tokens / SEQUENCE_TOKENS,
        "experts per EP rank": run["routed_experts"] / ep,
    }
    found = [
        ("dense-DP x PP = GPUs", dense == gpus, f"{dense_dp} x {pp} = {dense}, GPUs {gpus}"),
        ("expert-DP x EP x PP = GPUs", expert == gpus, f"{expert_dp} x {ep} x {pp} = {expert}, GPUs {gpus}"),
        ("nodes x GPUs per node = GPUs", nodes * GPUS_PER_NODE == gpus, f"{nodes} x {GPUS_PER_NODE}, GPUs {gpus}"),
        *((f"{what} are whole", n > 0 and float(n).is_integer(), f"{n:g}") for what, n in whole.items()),
    ]
    return [Rule(rule, run["configuration"], holds, value) for rule, holds, value in found]


def headline_rules(observations: Sequence[Mapping[str, Any]], model_of: Mapping[str, str]) -> list[Rule]:
    """Apply the rules of Table 50: each headline is the highest random-routing value of its configuration, and so on.

    Args:
        observations: rows with configuration, routing, TFLOPs_per_gpu, use.
        model_of: model of each configuration of Table 49.
    """
    rules: list[Rule] = []

    def rates(configurations: Collection[str], **wanted: str) -> list[float]:
        mine = (o for o in observations if o["configuration"] in configurations)
        return [o["TFLOPs_per_gpu"] for o in mine if all(o[k] == v for k, v in wanted.items())]

    def told(values: list[float]) -> str:
        return ", ".join(f"{v:g}" for v in values)

    for name in dict.fromkeys(o["configuration"] for o in observations):
        random, learned = rates([name], routing="Random"), rates([name], routing="Learned")
        headlines = rates([name], use="headline")
        highest = rates([name], use="headline", routing="Random") == headlines == [max(random, default=None)]
        known = model_of.get(name, "absent")
        rules.append(Rule("configuration is in Table 49", name, name in model_of, known))
        if headlines:
            rule = "headline is its configuration's highest random-routing value"
            rules.append(Rule(rule, name, highest, f"{told(headlines)} of {told(random)}"))
        if random:
            rules.append(
                Rule("a configuration with random routing has a headline", name, bool(headlines), told(random))
            )
        if learned and random:
            text = f"random {max(random):g}, learned {max(learned):g}"
            rules.append(Rule("learned routing is not faster than random", name, max(learned) <= max(random), text))
    for model in dict.fromkeys(model_of.values()):
        family = [name for name, its in model_of.items() if its == model]
        random, headlines = rates(family, routing="Random"), rates(family, routing="Random", use="headline")
        if random:
            text = f"headlines {told(headlines) or 'none'}, highest {max(random):g}"
            rule = "model has one headline, its highest random-routing value"
            rules.append(Rule(rule, model, headlines == [max(random)], text))
    return rules
