"""Sizes and choices of a routed block."""

from __future__ import annotations

from dataclasses import dataclass

from moe_kernels._launch import check_int
from moe_kernels.route_map import capacity_rows
from moe_kernels.router.api import GATINGS, GRANULARITIES, MODES

PATHS = ("no_ep", "synchronized", "rowwise")
SHARED_MODES = ("stream", "before_wait", "none")


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Sizes and routing rules of one routed block, equal on all ranks.

    Raises:
        TypeError: a size is no integer, or the capacity factor is no number.
        ValueError: a size or choice is out of range; the message names it.
    """

    width: int
    expert_width: int
    num_experts: int
    top_k: int
    shared_width: int = 0
    """Hidden width of the shared expert; 0 for none."""
    shared_mode: str = "stream"
    """`stream`: on its own stream; `before_wait`: on the same stream, submitted before the host may wait; `none`."""
    capacity_factor: float = 1.25
    """Rows per rank of the rowwise path over T * K, rounded up."""
    gating: str = "softmax"
    normalize_weights: bool = True
    restore_scale: bool = False
    router_mode: str = "learned"
    lbl_granularity: str = "batch"
    sequence_length: int | None = None
    """Tokens per sequence, for the load-balancing loss per instance."""

    def __post_init__(self) -> None:
        for name in ("width", "expert_width", "num_experts", "top_k", "shared_width"):
            check_int(name, getattr(self, name))
        for name in ("width", "expert_width", "num_experts", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k ({self.top_k}) must not exceed num_experts ({self.num_experts})")
        if self.shared_width < 0:
            raise ValueError(f"shared_width must be 0 or more, got {self.shared_width}")
        capacity_rows(1, self.top_k, self.capacity_factor)
        if self.sequence_length is not None:
            check_int("sequence_length", self.sequence_length)
            if self.sequence_length < 1:
                raise ValueError(f"sequence_length must be at least 1 or None, got {self.sequence_length}")
        for name, choices in (
            ("shared_mode", SHARED_MODES),
            ("gating", GATINGS),
            ("router_mode", MODES),
            ("lbl_granularity", GRANULARITIES),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}")

    @property
    def has_shared(self) -> bool:
        """Whether a shared expert runs."""
        return self.shared_width > 0 and self.shared_mode != "none"
