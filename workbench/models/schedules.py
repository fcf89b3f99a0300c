"""Learning-rate and batch-size schedules.

Standard library only. Source: report, Appendix B.7 (warmup-stable-decay) and B.8 (batch-size warmup, Equation 63).
"""

from __future__ import annotations

from dataclasses import dataclass

REPORT_MULTIPLES = (1, 2, 3, 6, 9, 15, 24)
"""Global batch of the report's run, in Mi tokens."""
REPORT_TOTAL_TOKENS = 2.07e12
REPORT_LATE_TRANSITIONS = (409e9, 777e9, 1.375e12)
"""Cumulative tokens of the last three of the six transitions."""
REPORT_FRACTIONS = (0.012, 0.036, 0.091, *(t / REPORT_TOTAL_TOKENS for t in REPORT_LATE_TRANSITIONS))
"""The six transitions as fractions of all training tokens. The report does not print the first three: those are ours,
geometric up to the first printed one."""


def warmup_stable_decay(
    step: int, *, peak: float, warmup: int, total: int, decay: int = 0, floor: float = 0.0
) -> float:
    """Return the learning rate at `step` (counted from 0): linear warmup, constant, linear decay to `floor * peak`.

    Args:
        step: optimizer step.
        peak: learning rate of the stable part.
        warmup: steps of linear warmup.
        total: steps of the whole run.
        decay: steps of linear decay at the end; 0 for none.
        floor: share of the peak at the end of the decay.
    """
    if warmup and step < warmup:
        return peak * (step + 1) / warmup
    left = total - step
    if decay and left <= decay:
        return peak * (floor + (1 - floor) * max(left, 0) / decay)
    return peak


@dataclass(frozen=True, kw_only=True)
class BatchStage:
    """One constant-batch stage of a warmup.

    Attributes:
        first_token: cumulative tokens at its start.
        multiple: batch in units of the base batch.
        lr_scale: learning rate relative to the first stage.
    """

    first_token: int
    multiple: int
    lr_scale: float


def batch_warmup(
    total_tokens: int,
    *,
    multiples: tuple[int, ...] = REPORT_MULTIPLES,
    fractions: tuple[float, ...] = REPORT_FRACTIONS,
    alpha: float = 0.5,
) -> list[BatchStage]:
    """Return the stages of a batch-size warmup; the learning rate is multiplied by (B_new / B_old)^alpha at each.

    Args:
        total_tokens: tokens of the run.
        multiples: batch sizes in units of the base batch, increasing.
        fractions: where each transition lies, one fewer than multiples, increasing within (0, 1).
        alpha: exponent of the learning-rate scaling; the report uses 1/2.
    Raises:
        ValueError: lengths or orders do not fit.

    Source: report, Appendix B.8, Equation 63.
    """
    if len(fractions) != len(multiples) - 1:
        raise ValueError(
            f"{len(multiples)} batch multiples need {len(multiples) - 1} transitions, got {len(fractions)}"
        )
    if list(multiples) != sorted(set(multiples)) or multiples[0] < 1:
        raise ValueError(f"batch multiples {multiples}: expected increasing integers from 1")
    if list(fractions) != sorted(set(fractions)) or (fractions and not 0 < fractions[0] <= fractions[-1] < 1):
        raise ValueError(f"transitions {fractions}: expected increasing fractions within (0, 1)")
    starts = (0.0, *fractions)
    return [
        BatchStage(first_token=round(total_tokens * f), multiple=m, lr_scale=(m / multiples[0]) ** alpha)
        for f, m in zip(starts, multiples)
    ]


def stage_at(stages: list[BatchStage], tokens: int) -> BatchStage:
    """Return the stage in force after `tokens` cumulative tokens."""
    return [s for s in stages if s.first_token <= tokens][-1]
