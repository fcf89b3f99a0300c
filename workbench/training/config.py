"""Everything that determines a training run, in one frozen record."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from workbench.models.schedules import BatchStage, batch_warmup, stage_at, warmup_stable_decay


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run of the small routed language model.

    Sizes default to the shape of the report's checkpoint-branched model (first block dense, 64 experts, top-4, sigmoid
    gating, grouped-query attention at a ratio of 4), shrunk to what one GPU trains in minutes.

    Raises:
        ValueError: a value is out of range; the message names it.

    Source: report, Appendix B.7 and B.8.
    """

    layers: int = 6
    width: int = 256
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    dense_width: int = 1024
    experts: int = 64
    top_k: int = 4
    expert_width: int = 256
    shared_width: int = 0
    gating: str = "sigmoid"
    vocabulary: int = 256
    sequence: int = 256
    batch: int = 32
    """Sequences per step at the first stage."""
    microbatch: int = 32
    """Sequences per forward, at most."""
    total_tokens: int = 8_192_000
    warmup_tokens: int = 409_600
    decay_tokens: int = 0
    lr: float = 1e-3
    lbl_coefficient: float = 0.05
    head_z_coefficient: float = 1e-5
    weight_decay: float = 0.1
    decay_norms_and_head: bool = True
    """False leaves normalisation weights and the head out of weight decay too, as in the batch-warmup run."""
    clip: float = 1.0
    skip_window: int = 128
    skip_sigma: float = 6.0
    batch_multiples: tuple[int, ...] = (1,)
    batch_fractions: tuple[float, ...] = ()
    """Where the batch grows, as fractions of all tokens."""
    alpha: float = 0.5
    """Learning-rate exponent of a batch increase."""
    corpus: str = "stdlib"
    data_seed: int = 0
    seed: int = 0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("layers", "width", "experts", "top_k", "sequence", "batch", "microbatch", "total_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.vocabulary < 2:
            raise ValueError(f"vocabulary: expected at least 2, got {self.vocabulary}")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype: expected 'float32' or 'bfloat16', got {self.dtype!r}")
        if self.top_k > self.experts:
            raise ValueError(f"top_k: expected at most experts ({self.experts}), got {self.top_k}")
        self.stages()

    def stages(self) -> list[BatchStage]:
        """Return the batch-size stages."""
        return batch_warmup(
            self.total_tokens, multiples=self.batch_multiples, fractions=self.batch_fractions, alpha=self.alpha
        )

    def at(self, tokens: int) -> tuple[int, float]:
        """Return (sequences of the next step, its learning rate) after `tokens` tokens."""
        stage = stage_at(self.stages(), tokens)
        lr = warmup_stable_decay(
            tokens, peak=self.lr, warmup=self.warmup_tokens, total=self.total_tokens, decay=self.decay_tokens
        )
        return self.batch * stage.multiple, lr * stage.lr_scale

    def replace(self, **changes: Any) -> RunConfig:
        """Return a changed copy, checked like a new one."""
        return dataclasses.replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunConfig:
        """Rebuild from `as_dict`.

        Raises:
            ValueError: an unknown field.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := set(values) - known:
            raise ValueError(f"run configuration: unknown fields {', '.join(sorted(unknown))}")
        plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**plain)


TINY: dict[str, Any] = {
    "layers": 3,
    "width": 64,
    "heads": 4,
    "kv_heads": 1,
    "head_dim": 16,
    "dense_width": 128,
    "experts": 16,
    "top_k": 2,
    "expert_width": 32,
    "sequence": 64,
    "batch": 8,
    "microbatch": 8,
}
"""Sizes that a CPU trains in a minute."""
