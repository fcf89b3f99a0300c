"""Every name of torch's that is not public: one file to look at when a release renames them.

Each function returns torch's own, so that a timed call holds nothing of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def spin() -> Callable[[int], None]:
    """The kernel that keeps a device busy for so many cycles."""
    import torch

    return torch.cuda._sleep


def scaled_mm() -> Callable[..., Any]:
    """The dense FP8 product."""
    import torch

    return torch._scaled_mm


def scaled_grouped_mm() -> Callable[..., Any]:
    """The grouped FP8 product."""
    import torch

    return torch._scaled_grouped_mm


def compile_counters() -> Any:
    """What torch.compile did since they were cleared: graphs, and breaks by reason."""
    from torch._dynamo.utils import counters

    return counters
