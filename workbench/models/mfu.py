"""From TFLOP/s to MFU, tokens per second, step time and days, and back: Equation 95 and what follows from it.

The report prints useful-model TFLOP/s per GPU. How many FLOPs it counts per token is not printed; `flop_per_token` with
attention left out (6 FLOPs per active parameter) is a lower bound, so tokens/s from it is an upper bound.

Source: report, Equation 95 and Section B.11.
"""

from __future__ import annotations

from workbench.models.hardware import BF16_REFERENCE_TFLOPs

SECONDS_PER_DAY = 86_400.0


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}: expected a number above 0, got {value!r}")


def mfu(step_flop: float, step_s: float, gpus: int, peak_TFLOPs: float = BF16_REFERENCE_TFLOPs) -> float:
    """Return F / (G T C), a fraction of the BF16 reference (Equation 95).

    Args:
        step_flop: useful model FLOPs of one step over all GPUs; no recompute, inactive experts or padding.
        step_s: elapsed time of the whole step, seconds.
        gpus: number of GPUs.
        peak_TFLOPs: compute peak per GPU that the result is a fraction of; the default is the B300's dense BF16 peak.

    Raises:
        ValueError: a time, count or peak is not above 0, or the FLOPs are negative.
    """
    _positive(step_s=step_s, gpus=gpus, peak_TFLOPs=peak_TFLOPs)
    if step_flop < 0:
        raise ValueError(f"step_flop: expected 0 or more, got {step_flop!r}")
    return step_flop / (gpus * step_s * peak_TFLOPs * 1e12)


def mfu_of_rate(TFLOPs_per_gpu: float, peak_TFLOPs: float = BF16_REFERENCE_TFLOPs) -> float:
    """Return the MFU of a printed useful TFLOP/s per GPU: Equation 95 over one second on one GPU."""
    return mfu(TFLOPs_per_gpu * 1e12, 1.0, 1, peak_TFLOPs)


def flop_per_token(active_params: float, *, layers: int = 0, attention_width: int = 0, sequence: int = 0) -> float:
    """Return training FLOPs per token: 6 per active parameter, plus causal attention scores where its shape is given.

    Args:
        active_params: parameters that one token uses, input embedding excluded if it is to be exact.
        layers: attention layers.
        attention_width: heads times head dimension.
        sequence: tokens per sequence; each token attends to half of them on average.

    Source: forward 2 FLOPs per parameter, backward twice that; scores and values 2 x 2 x width x sequence / 2 forward.
    """
    _positive(active_params=active_params)
    return 6.0 * active_params + 3.0 * 2.0 * layers * attention_width * sequence


def tokens_per_s_per_gpu(TFLOPs_per_gpu: float, flop_per_token: float) -> float:
    """Return useful tokens/s/GPU at a useful rate."""
    _positive(flop_per_token=flop_per_token)
    return TFLOPs_per_gpu * 1e12 / flop_per_token


def step_s(global_batch_tokens: float, tokens_per_s_per_gpu: float, gpus: int) -> float:
    """Return seconds per optimizer step."""
    _positive(tokens_per_s_per_gpu=tokens_per_s_per_gpu, gpus=gpus)
    return global_batch_tokens / (tokens_per_s_per_gpu * gpus)


def days_for_tokens(budget_tokens: float, tokens_per_s_per_gpu: float, gpus: int) -> float:
    """Return days of uninterrupted training for a token budget."""
    return step_s(budget_tokens, tokens_per_s_per_gpu, gpus) / SECONDS_PER_DAY
