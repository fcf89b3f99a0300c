"""Parameters, batches and topologies of MoE training runs, and what a printed configuration leaves open.

Shapes in the formulas: D model width, F expert width, N routed experts, K top-k.

Source: report, Tables 46, 47 and 49, Sections B.2, B.4 and B.10.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MI = 2**20


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


@dataclass(frozen=True, kw_only=True)
class Size:
    """Parameter count of a whole model by part.

    Attributes:
        routed: routed experts.
        inactive: routed-expert parameters outside a token's top-k.
        shared: shared experts.
        router: routers.
        mixer: attention or other sequence mixers, norms included.
        dense: feed-forwards of the dense blocks.
        embedding: embedding and output head.
    """

    routed: float
    inactive: float
    shared: float
    router: float
    mixer: float
    dense: float
    embedding: float

    @property
    def total(self) -> float:
        """All parameters."""
        return self.routed + self.unrouted

    @property
    def unrouted(self) -> float:
        """All parameters but the routed experts."""
        return self.shared + self.router + self.mixer + self.dense + self.embedding

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
    return Size(
        routed=sparse.routed_params,
        inactive=sparse.inactive_params,
        shared=3.0 * sparse.d_model * shared_width * sparse.routed_blocks,
        router=sparse.router_params,
        mixer=mixer_params_per_block * sparse.blocks,
        dense=3.0 * sparse.d_model * dense_width * sparse.dense_blocks,
        embedding=embedding_params,
    )


REFERENCE_30_BLOCK = Sparse(blocks=30, dense_blocks=2, d_model=1536, routed_experts=128, top_k=8, expert_width=1536)
"""Routed part of the 30-block reference. Its mixers, dense widths and vocabulary are not printed."""
PROFILING = Sparse(blocks=8, dense_blocks=2, d_model=1536, routed_experts=32, top_k=8, expert_width=1536)
"""Routed part of the reduced profiling workload."""


def alpha_P(active_params: float, total_params: float) -> float:
    """Return the active fraction of the parameters."""
    if not 0 < active_params <= total_params:
        raise ValueError(f"expected 0 < active <= total, got active {active_params!r}, total {total_params!r}")
    return active_params / total_params


def capacity_to_active(active_params: float, total_params: float) -> float:
    """Return total over active parameters: the gap between what is stored and what a token uses."""
    return 1.0 / alpha_P(active_params, total_params)


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


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Parallel degrees of a run: dense data parallel, expert data parallel, expert parallel, pipeline."""

    dense_dp: int
    expert_dp: int
    ep: int
    pp: int

    @property
    def gpus_by_dense(self) -> int:
        """Dense-DP x PP: how many GPUs the dense part spans."""
        return self.dense_dp * self.pp

    @property
    def gpus_by_expert(self) -> int:
        """Expert-DP x EP x PP: how many GPUs the experts span."""
        return self.expert_dp * self.ep * self.pp


@dataclass(frozen=True, kw_only=True)
class Undetermined:
    """What the printed sizes of the reference and the profiling workload leave open (parameters, as intervals).

    Attributes:
        total_reference: total of the reference, tightened by its active count.
        total_profiling: total of the profiling workload, likewise.
        unrouted_reference: everything but routed experts, reference.
        unrouted_profiling: everything but routed experts, profiling workload.
        per_extra_block: mean mixer + shared expert of one of the reference's additional routed blocks.
        mixer_if_shared: the mixer's part of it if the shared expert is as wide as a routed one; else unknown.
        rest: embedding, head and the two dense feed-forwards together, under the same condition.
    """

    total_reference: Interval
    total_profiling: Interval
    unrouted_reference: Interval
    unrouted_profiling: Interval
    per_extra_block: Interval
    mixer_if_shared: Interval
    rest: Interval


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
    total_reference: Interval,
    active_reference: Interval,
    total_profiling: Interval,
    active_profiling: Interval,
    *,
    reference: Sparse = REFERENCE_30_BLOCK,
    profiling: Sparse = PROFILING,
) -> Undetermined:
    """Return what two printed sizes leave open, if the workloads share width, mixers and dense blocks.

    It assumes equal embedding, dense blocks and mean mixer in both; the report says only that width and mixer family
    are the same.

    Raises:
        ValueError: the models differ in width or dense blocks, or have the same number of routed blocks.
    """
    if (reference.d_model, reference.dense_blocks) != (profiling.d_model, profiling.dense_blocks):
        raise ValueError("expected models of one width and one number of dense blocks")
    extra = reference.routed_blocks - profiling.routed_blocks
    if extra <= 0:
        raise ValueError(f"expected the first model to have more routed blocks, by at least 1, got {extra} more")
    total_r = tightened_total(total_reference, active_reference, reference)
    total_p = tightened_total(total_profiling, active_profiling, profiling)
    unrouted_r = total_r - float(reference.routed_params)
    unrouted_p = total_p - float(profiling.routed_params)
    known = float(reference.router_params - profiling.router_params)
    per_block = (unrouted_r - unrouted_p - known).scaled(1 / extra)
    mixer = per_block - float(profiling.params_per_expert)
    rest = unrouted_p - float(profiling.router_params) - per_block.scaled(profiling.routed_blocks)
    rest = rest - mixer.scaled(profiling.dense_blocks) if profiling.dense_blocks else rest
    return Undetermined(
        total_reference=total_r,
        total_profiling=total_p,
        unrouted_reference=unrouted_r,
        unrouted_profiling=unrouted_p,
        per_extra_block=per_block,
        mixer_if_shared=mixer,
        rest=rest,
    )


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


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One consistency rule applied to one row: whether the row obeys it, and the figures that say so."""

    rule: str
    row: str
    holds: bool
    value: str


def run_rules(run: Mapping[str, Any], *, gpus_per_node: int = 8, sequence_tokens: int = 8192) -> list[Rule]:
    """Apply the rules that one row of Table 49 must obey by itself.

    Args:
        run: typed row with configuration, dense_dp, expert_dp, ep, pp, gpus, nodes, global_batch_Mi,
            rank_microbatch_tokens, routed_experts.
        gpus_per_node: GPUs per node (Table 45).
        sequence_tokens: sequence length of all rows (Section B.10).
    """
    t = Topology(dense_dp=run["dense_dp"], expert_dp=run["expert_dp"], ep=run["ep"], pp=run["pp"])
    gpus, name = run["gpus"], run["configuration"]
    steps = accumulation_microbatches(run["global_batch_Mi"] * MI, t.dense_dp, run["rank_microbatch_tokens"])
    sequences = run["rank_microbatch_tokens"] / sequence_tokens
    local = run["routed_experts"] / t.ep
    found = [
        ("dense-DP x PP = GPUs", t.gpus_by_dense == gpus, f"{t.dense_dp} x {t.pp} = {t.gpus_by_dense}, GPUs {gpus}"),
        (
            "expert-DP x EP x PP = GPUs",
            t.gpus_by_expert == gpus,
            f"{t.expert_dp} x {t.ep} x {t.pp} = {t.gpus_by_expert}, GPUs {gpus}",
        ),
        (
            "nodes x GPUs per node = GPUs",
            run["nodes"] * gpus_per_node == gpus,
            f"{run['nodes']} x {gpus_per_node}, GPUs {gpus}",
        ),
        ("microbatches per step are whole", steps > 0 and float(steps).is_integer(), f"{steps:g}"),
        ("sequences per rank microbatch are whole", sequences > 0 and float(sequences).is_integer(), f"{sequences:g}"),
        ("experts per EP rank are whole", local >= 1 and float(local).is_integer(), f"{local:g}"),
    ]
    return [Rule(rule=r, row=name, holds=bool(ok), value=v) for r, ok, v in found]


def headline_rules(observations: Sequence[Mapping[str, Any]], model_of: Mapping[str, str]) -> list[Rule]:
    """Apply the rules of Table 50: each headline is the highest random-routing value of its configuration, and so on.

    Args:
        observations: rows with configuration, routing, TFLOPs_per_gpu, use.
        model_of: model of each configuration of Table 49.
    """
    rules: list[Rule] = []
    for name in dict.fromkeys(o["configuration"] for o in observations):
        mine = [o for o in observations if o["configuration"] == name]
        random = [o["TFLOPs_per_gpu"] for o in mine if o["routing"] == "Random"]
        headline = [o for o in mine if o["use"] == "headline"]
        rules.append(
            Rule(
                rule="configuration is in Table 49",
                row=name,
                holds=name in model_of,
                value=model_of.get(name, "absent"),
            )
        )
        for h in headline:
            best = bool(random) and h["routing"] == "Random" and h["TFLOPs_per_gpu"] == max(random)
            text = f"{h['TFLOPs_per_gpu']:g} of {', '.join(f'{r:g}' for r in random)}"
            rules.append(
                Rule(
                    rule="headline is its configuration's highest random-routing value",
                    row=name,
                    holds=best,
                    value=text,
                )
            )
        if random:
            rules.append(
                Rule(
                    rule="a configuration with random routing has a headline",
                    row=name,
                    holds=bool(headline),
                    value=", ".join(f"{r:g}" for r in random),
                )
            )
        if len(headline) > 1:
            rules.append(
                Rule(rule="at most one headline per configuration", row=name, holds=False, value=str(len(headline)))
            )
        learned = [o["TFLOPs_per_gpu"] for o in mine if o["routing"] == "Learned"]
        if learned and random:
            text = f"random {max(random):g}, learned {max(learned):g}"
            rules.append(
                Rule(
                    rule="learned routing is not faster than random",
                    row=name,
                    holds=max(learned) <= max(random),
                    value=text,
                )
            )
    for model in dict.fromkeys(model_of.values()):
        mine = [o for o in observations if model_of.get(o["configuration"]) == model and o["routing"] == "Random"]
        headline = [o["TFLOPs_per_gpu"] for o in mine if o["use"] == "headline"]
        if mine:
            best = max(o["TFLOPs_per_gpu"] for o in mine)
            rules.append(
                Rule(
                    rule="model has one headline, its highest random-routing value",
                    row=model,
                    holds=headline == [best],
                    value=f"headlines {', '.join(f'{h:g}' for h in headline) or 'none'}, highest {best:g}",
                )
            )
    return rules
