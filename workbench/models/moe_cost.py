"""Fewest bytes and operations of each op of the routed path: the floors that measured times are held against.

Each input is read once and each output written once; metadata of a few bytes per route is counted where it is part of
the op. Elements are BF16 (2 bytes) unless an argument says otherwise.

Source: report, Section 8.5; counts from the ops' own shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

BF16_BYTES = 2
FP32_BYTES = 4
INDEX_BYTES = 4


@dataclass(frozen=True)
class Cost:
    """Bytes moved through device memory and floating-point operations of one call."""

    bytes: int
    flop: int = 0

    def floor_us(self, bandwidth_GBps: float, rate_TFLOPs: float = float("inf")) -> float:
        """Return the larger of the two times at `bandwidth_GBps` (1e9) and `rate_TFLOPs` (1e12).

        Raises:
            ValueError: a rate that is not positive.
        """
        if not (bandwidth_GBps > 0 and rate_TFLOPs > 0):
            raise ValueError(f"bandwidth and rate must be positive; got {bandwidth_GBps} GB/s, {rate_TFLOPs} TFLOP/s")
        return max(self.bytes / bandwidth_GBps / 1e3, self.flop / rate_TFLOPs / 1e6)


def _not_negative(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 0:
            raise ValueError(f"{name} must be 0 or more; got {value}")


def router(tokens: int, experts: int, top_k: int, backward: bool = False) -> Cost:
    """Gating and top-k from FP32 logits [T, E]: logits in, weights and ids out; backward also writes logits."""
    _not_negative(tokens=tokens, experts=experts, top_k=top_k)
    logits = tokens * experts * FP32_BYTES
    routes = tokens * top_k * (FP32_BYTES + INDEX_BYTES)
    return Cost(2 * logits + routes + tokens * top_k * FP32_BYTES if backward else logits + routes)


def router_logits(tokens: int, width: int, experts: int) -> Cost:
    """FP32 logits of BF16 rows [T, D] and an FP32 weight [E, D]."""
    _not_negative(tokens=tokens, width=width, experts=experts)
    size = tokens * width * BF16_BYTES + experts * width * FP32_BYTES + tokens * experts * FP32_BYTES
    return Cost(size, 2 * tokens * width * experts)


def route_map(tokens: int, top_k: int, experts: int, ranks: int) -> Cost:
    """Expert ids in, destination rank and row out (int32 each), counts [R, E] in int64."""
    _not_negative(tokens=tokens, top_k=top_k, experts=experts, ranks=ranks)
    return Cost(3 * tokens * top_k * INDEX_BYTES + 2 * ranks * experts * 8)


def dispatch(tokens: int, kept_routes: int, width: int, top_k: int) -> Cost:
    """Each token's row read once, each kept route's row written once, the two maps read."""
    _not_negative(tokens=tokens, kept_routes=kept_routes, width=width, top_k=top_k)
    return Cost((tokens + kept_routes) * width * BF16_BYTES + 2 * tokens * top_k * INDEX_BYTES)


def combine(tokens: int, kept_routes: int, width: int, top_k: int) -> Cost:
    """Each kept route's row read once, each token's row written once, maps and FP32 weights read."""
    _not_negative(tokens=tokens, kept_routes=kept_routes, width=width, top_k=top_k)
    size = (tokens + kept_routes) * width * BF16_BYTES + tokens * top_k * (2 * INDEX_BYTES + FP32_BYTES)
    return Cost(size, 2 * kept_routes * width)


def combine_backward(tokens: int, kept_routes: int, width: int, top_k: int) -> Cost:
    """Rows of kept routes read, their gradients written, each token's gradient read, the weights' gradient written."""
    _not_negative(tokens=tokens, kept_routes=kept_routes, width=width, top_k=top_k)
    size = (tokens + 2 * kept_routes) * width * BF16_BYTES + tokens * top_k * (2 * INDEX_BYTES + 2 * FP32_BYTES)
    return Cost(size, 3 * kept_routes * width)


def swiglu(valid_rows: int, expert_width: int, backward: bool = False) -> Cost:
    """[rows, 2F] read and [rows, F] written; backward reads both and writes [rows, 2F]."""
    _not_negative(valid_rows=valid_rows, expert_width=expert_width)
    return Cost(valid_rows * expert_width * (5 if backward else 3) * BF16_BYTES)


def grouped_gemm(valid_rows: int, k: int, n: int, experts: int) -> Cost:
    """rows [M, K] x weights [L, K, N] to [M, N]; as a weight gradient, two row matrices in and [L, K, N] out.

    Weights of an expert without rows are counted too: which experts are empty is not known from shapes.
    """
    _not_negative(valid_rows=valid_rows, k=k, n=n, experts=experts)
    return Cost((valid_rows * (k + n) + experts * k * n) * BF16_BYTES, 2 * valid_rows * k * n)
