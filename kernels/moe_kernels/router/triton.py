"""Router kernels: gating, top-k, counts and loss sums in one pass over the logits, then one small reduction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from moe_kernels._launch import cdiv, check_first_order, compile_safe, grid_size, next_power_of_two, on_device
from moe_kernels._prepared import prepared

TILE = 2048
BACKWARD_TILE = 4096
PROGRAMS_PER_SM = 2


@triton.jit
def _gate(logit, inside, SIGMOID: tl.constexpr):
    """Scores, probabilities over E and logsumexp of rows of logits; 0 outside."""
    high = tl.max(tl.where(inside, logit, float("-inf")), axis=1)
    # A row that is all -inf (or a masked one) must not make inf - inf.
    high = tl.where(high > float("-inf"), high, 0.0)
    power = tl.where(inside, tl.exp(logit - high[:, None]), 0.0)
    total = tl.sum(power, axis=1)
    soft = power / total[:, None]
    lse = high + tl.log(total)
    if SIGMOID:
        score = tl.where(inside, 1.0 / (1.0 + tl.exp(-logit)) + 1e-7, 0.0)
        return score, score / tl.sum(score, axis=1)[:, None], soft, lse
    else:
        return soft, soft, soft, lse


@prepared
@triton.jit
def _route_kernel(
    logit_ptr, noise_ptr, weight_ptr, index_ptr, denominator_ptr, count_ptr, probability_ptr, z_ptr, per_group,
    E: tl.constexpr, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, SIGMOID: tl.constexpr,
    RANDOM: tl.constexpr, UNIFORM: tl.constexpr, NORMALIZE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    e = tl.arange(0, BLOCK_E)
    # Sums stay two-dimensional until the end: one exchange between warps a program, not one a step.
    count = tl.zeros([BLOCK_T, BLOCK_E], dtype=tl.int32)
    probability_sum = tl.zeros([BLOCK_T, BLOCK_E], dtype=tl.float32)
    z_sum = tl.zeros([BLOCK_T], dtype=tl.float32)
    for first in tl.range(tl.program_id(0) * BLOCK_T, per_group, tl.num_programs(0) * BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        live = t < per_group
        token = group.to(tl.int64) * per_group + t
        inside = live[:, None] & (e < E)[None, :]
        at = token[:, None] * E + e[None, :]
        logit = tl.load(logit_ptr + at, mask=inside, other=0.0)
        score, probability, _, lse = _gate(logit, inside, SIGMOID)
        if RANDOM:
            score = tl.load(noise_ptr + at, mask=inside, other=0.0).to(tl.float32)
        # NaN ranks below every score but above what is taken or out of range.
        key = tl.where(inside, tl.where(score == score, score, -1.0), float("-inf"))
        slot = tl.full([BLOCK_T, BLOCK_E], -1, dtype=tl.int32)
        for k in tl.static_range(K):
            if UNIFORM:
                pick = ((token * K + k) % E).to(tl.int32)
            else:
                best = tl.max(key, axis=1)
                pick = tl.min(tl.where(key == best[:, None], e[None, :], BLOCK_E), axis=1)
            hit = (e[None, :] == pick[:, None]) & inside
            slot = tl.where(hit, k, slot)
            key = tl.where(hit, float("-inf"), key)
        # Each chosen expert stores from where its score is: gathering K of them into a row costs more than the stores.
        taken = slot >= 0
        if NORMALIZE:
            denominator = tl.sum(tl.where(taken, score, 0.0), axis=1)
            score = score / denominator[:, None]
            tl.store(denominator_ptr + token, denominator, mask=live)
        tl.store(weight_ptr + token[:, None] * K + slot, score * SCALE, mask=taken)
        tl.store(index_ptr + token[:, None] * K + slot, tl.zeros_like(slot) + e[None, :], mask=taken)
        count += taken.to(tl.int32)
        probability_sum += tl.where(inside, probability, 0.0)
        z_sum += tl.where(live, lse * lse, 0.0)
    part = (group * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    tl.store(count_ptr + part * E + e, tl.sum(count, axis=0), mask=e < E)
    tl.store(probability_ptr + part * E + e, tl.sum(probability_sum, axis=0), mask=e < E)
    tl.store(z_ptr + part, tl.sum(z_sum, axis=0))


@prepared
@triton.jit
def _reduce_kernel(
    count_ptr, probability_ptr, z_ptr, counts_ptr, share_ptr, lbl_ptr, z_loss_ptr, groups, parts, per_group,
    E: tl.constexpr, K: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, BLOCK_E)
    r = tl.arange(0, ROWS)
    counts = tl.zeros([BLOCK_E], dtype=tl.int64)
    lbl = 0.0
    for group in tl.range(0, groups):
        count = tl.zeros([BLOCK_E], dtype=tl.int32)
        probability = tl.zeros([BLOCK_E], dtype=tl.float32)
        for first in tl.range(0, parts, ROWS):
            row = first + r
            at = (group * parts + row).to(tl.int64)[:, None] * E + e[None, :]
            mask = (row < parts)[:, None] & (e < E)[None, :]
            count += tl.sum(tl.load(count_ptr + at, mask=mask, other=0), axis=0)
            probability += tl.sum(tl.load(probability_ptr + at, mask=mask, other=0.0), axis=0)
        share = count.to(tl.float32) / per_group
        tl.store(share_ptr + group * E + e, share, mask=e < E)
        lbl += tl.sum(share * (probability / per_group), axis=0)
        counts += count.to(tl.int64)
    tl.store(counts_ptr + e, counts, mask=e < E)
    tl.store(lbl_ptr, lbl * (E / K) / groups)
    z = tl.zeros([ROWS], dtype=tl.float32)
    for first in tl.range(0, groups * parts, ROWS):
        z += tl.load(z_ptr + first + r, mask=first + r < groups * parts, other=0.0)
    tl.store(z_loss_ptr, tl.sum(z, axis=0) / (groups * per_group))


@prepared
@triton.jit
def _router_backward_kernel(
    logit_ptr, weight_ptr, index_ptr, denominator_ptr, share_ptr, d_weight_ptr, d_lbl_ptr, d_z_ptr, d_logit_ptr,
    tokens, per_group, E: tl.constexpr, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = token < tokens
    e = tl.arange(0, BLOCK_E)
    kk = tl.arange(0, BLOCK_K)
    inside = live[:, None] & (e < E)[None, :]
    at = token[:, None] * E + e[None, :]
    logit = tl.load(logit_ptr + at, mask=inside, other=0.0)
    score, probability, soft, lse = _gate(logit, inside, SIGMOID)

    route = token[:, None] * K + kk[None, :]
    stored = live[:, None] & (kk < K)[None, :]
    grad = tl.load(d_weight_ptr + route, mask=stored, other=0.0) * SCALE
    if NORMALIZE:
        weight = tl.load(weight_ptr + route, mask=stored, other=0.0) / SCALE
        denominator = tl.load(denominator_ptr + token, mask=live, other=1.0)
        grad = (grad - tl.sum(grad * weight, axis=1)[:, None]) / denominator[:, None]
    index = tl.load(index_ptr + route, mask=stored, other=-1)
    d_score = tl.zeros([BLOCK_T, BLOCK_E], dtype=tl.float32)
    for k in tl.static_range(K):
        mine = kk[None, :] == k
        pick = tl.sum(tl.where(mine, index, 0), axis=1)
        value = tl.sum(tl.where(mine, grad, 0.0), axis=1)
        d_score += tl.where(e[None, :] == pick[:, None], value[:, None], 0.0)

    # share / per_group is d(mean probability); divided by the number of groups, tokens / per_group.
    group = token // per_group
    share = tl.load(share_ptr + group[:, None] * E + e[None, :], mask=inside, other=0.0)
    d_probability = tl.load(d_lbl_ptr) * (E / K) * share / tokens
    if SIGMOID:
        total = tl.sum(score, axis=1)
        d_probability -= tl.sum(tl.where(inside, d_probability * probability, 0.0), axis=1)[:, None]
        d_score += d_probability / total[:, None]
        sigmoid = score - 1e-7
        d_logit = d_score * sigmoid * (1.0 - sigmoid)
    else:
        d_score += d_probability
        d_logit = soft * (d_score - tl.sum(tl.where(inside, d_score * soft, 0.0), axis=1)[:, None])
    d_logit += tl.load(d_z_ptr) * 2.0 * lse[:, None] / tokens * soft
    tl.store(d_logit_ptr + at, d_logit, mask=inside)


def _shape(experts: int, top_k: int, tile: int) -> tuple[int, int, int]:
    block_e = max(16, next_power_of_two(experts))
    return max(1, min(32, tile // block_e)), block_e, next_power_of_two(top_k)


def _forward_fake(logits, noise, top_k, sigmoid, uniform, normalize, scale, groups):
    tokens, experts = logits.shape
    return (
        logits.new_empty(tokens, top_k),
        logits.new_empty(tokens, top_k, dtype=torch.int32),
        logits.new_empty(tokens if normalize else 1),
        logits.new_empty(experts, dtype=torch.int64),
        logits.new_empty(groups, experts),
        logits.new_empty(()),
        logits.new_empty(()),
    )


@compile_safe("router_forward", mutates=(), fake=_forward_fake)
def _forward(
    logits: torch.Tensor,
    noise: torch.Tensor | None,
    top_k: int,
    sigmoid: bool,
    uniform: bool,
    normalize: bool,
    scale: float,
    groups: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return weights, experts, normalising denominators, counts, shares f [groups, E], lbl, z-loss."""
    tokens, experts = logits.shape
    outputs = _forward_fake(logits, noise, top_k, sigmoid, uniform, normalize, scale, groups)
    weights, index, denominator, counts, share, lbl, z_loss = outputs
    block_t, block_e, _ = _shape(experts, top_k, TILE)
    per_group = tokens // groups
    parts = min(cdiv(per_group, block_t), max(1, grid_size(logits.device, PROGRAMS_PER_SM) // groups))
    partial = logits.new_empty(groups * parts * (2 * experts + 1))
    probability, count, z = partial.split([groups * parts * experts, groups * parts * experts, groups * parts])
    count = count.view(torch.int32)
    with on_device(logits):
        _route_kernel[(parts, groups)](
            logits, noise if noise is not None else logits, weights, index, denominator, count, probability, z,
            per_group, E=experts, K=top_k, BLOCK_T=block_t, BLOCK_E=block_e, SIGMOID=sigmoid,
            RANDOM=noise is not None, UNIFORM=uniform, NORMALIZE=normalize, SCALE=scale, num_warps=4,
        )  # fmt: skip
        _reduce_kernel[(1,)](
            count, probability, z, counts, share, lbl, z_loss, groups, parts, per_group, E=experts, K=top_k,
            BLOCK_E=block_e, ROWS=max(1, min(256, 16384 // block_e)), num_warps=16,
        )  # fmt: skip
    return outputs


@compile_safe("router_backward", mutates=(), fake=lambda saved, *others: torch.empty_like(saved[0]))
def _backward(
    saved: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], sigmoid: bool, normalize: bool, scale: float
) -> torch.Tensor:
    """Return the gradient of the logits from what the forward saved and the gradients of weights, lbl and z-loss."""
    logits, index, share = saved[0], saved[2], saved[4]
    tokens, experts = logits.shape
    d_logits = torch.empty_like(logits)
    top_k = index.shape[1]
    block_t, block_e, block_k = _shape(experts, top_k, BACKWARD_TILE)
    with on_device(logits):
        _router_backward_kernel[(cdiv(tokens, block_t),)](
            *saved, *grads, d_logits, tokens, tokens // share.shape[0], E=experts, K=top_k, BLOCK_T=block_t,
            BLOCK_E=block_e, BLOCK_K=block_k, SIGMOID=sigmoid, NORMALIZE=normalize, SCALE=scale, num_warps=4,
        )  # fmt: skip
    return d_logits


class _Router(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, *choices):
        weights, index, denominator, counts, share, lbl, z_loss = _forward(logits, *choices)
        _, _, sigmoid, _, normalize, scale, _ = choices
        ctx.save_for_backward(logits, weights, index, denominator, share)
        ctx.choices = (sigmoid, normalize, scale)
        ctx.mark_non_differentiable(index, counts)
        return weights, index, counts, lbl, z_loss

    @staticmethod
    def backward(ctx, *grads):
        check_first_order("router")
        d_weights, _, _, d_lbl, d_z = grads
        d_logits = _backward(ctx.saved_tensors, (d_weights.contiguous(), d_lbl, d_z), *ctx.choices)
        return d_logits, None, None, None, None, None, None, None


def router(
    logits: torch.Tensor,
    top_k: int,
    gating: str,
    normalize: bool,
    restore_scale: bool,
    mode: str,
    groups: int,
    noise: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return weights [T, K], experts int32 [T, K], counts int64 [E], lbl, z-loss from FP32 logits [T, E]."""
    scale = float(top_k) if restore_scale else 1.0
    return _Router.apply(logits, noise, top_k, gating == "sigmoid", mode == "uniform", normalize, scale, groups)
