"""Router logits and their gradient on the tensor cores at FP32 accuracy, for BF16 rows.

Products of BF16 values are exact in FP32, so a BF16 product with FP32 accumulation and output is the FP32 product of
the cast operands. An FP32 operand is the sum of BF16 pieces (8 bits of mantissa each): three carry an FP32 weight
whole, two carry an FP32 gradient to 2**-16, far below the BF16 rounding of the result.
"""

from __future__ import annotations

import torch

from moe_kernels._compat import matmul_fp32_out
from moe_kernels._launch import check_first_order


def pieces(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Return `count` BF16 tensors whose sum is `tensor` up to 2**(-8 * count), relative; one if it is BF16 already."""
    if tensor.dtype is torch.bfloat16:
        return [tensor]
    out = []
    rest = tensor
    for i in range(count):
        out.append(rest.bfloat16())
        if i + 1 < count:
            rest = rest - out[-1]
    return out


def side_by_side(tensor: torch.Tensor) -> torch.Tensor:
    """Return the two BF16 pieces of FP32 [T, E] as columns of one [T, 2E], in two launches."""
    out = torch.empty(tensor.shape[0], 2 * tensor.shape[1], dtype=torch.bfloat16, device=tensor.device)
    high, low = out.split(tensor.shape[1], dim=1)
    high.copy_(tensor)
    torch.sub(tensor, high, out=low)
    return out


def supports(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether x [T, D] and weight [E, D] can take this path: CUDA, BF16 rows, BF16 or FP32 weight, something to do."""
    kinds = (torch.bfloat16, torch.float32)
    return x.is_cuda and x.dtype is torch.bfloat16 and weight.dtype in kinds and min(*x.shape, *weight.shape) > 0


class RouterLogits(torch.autograd.Function):
    """FP32 logits [T, E] of BF16 x [T, D] and weight [E, D]."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        parts = pieces(weight, 3)
        if len(parts) == 1:
            return matmul_fp32_out(x, weight.t())
        logits = matmul_fp32_out(x, torch.cat(parts).t())
        return logits.view(x.shape[0], len(parts), -1).sum(1)

    @staticmethod
    def backward(ctx, *grads):
        check_first_order("router_logits of BF16 rows on CUDA")
        x, weight = ctx.saved_tensors
        halves = side_by_side(grads[0])
        d_x = d_weight = None
        if ctx.needs_input_grad[0]:
            # Pieces meet along the contraction: they are added in the FP32 accumulator.
            weights = pieces(weight, 2)
            left = halves if len(weights) == 1 else halves.repeat(1, len(weights))
            d_x = left @ torch.cat([w for w in weights for _ in range(2)])
        if ctx.needs_input_grad[1]:
            both = matmul_fp32_out(halves.t(), x)
            d_weight = both.view(2, *weight.shape).sum(0).to(weight.dtype)
        return d_x, d_weight
