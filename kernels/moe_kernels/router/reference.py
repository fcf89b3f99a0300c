"""Router in plain PyTorch, in the precision of its logits: FP64 on the CPU defines correctness."""

from __future__ import annotations

import torch


def router(
    logits_TE: torch.Tensor,
    top_k: int,
    gating: str,
    normalize: bool,
    restore_scale: bool,
    mode: str,
    groups: int,
    noise_TE: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return weights [T, K], experts int32 [T, K], counts int64 [E], load-balancing loss, z-loss."""
    tokens, experts = logits_TE.shape
    if gating == "softmax":
        scores = probabilities = logits_TE.softmax(-1)
    else:
        scores = logits_TE.sigmoid() + 1e-7
        probabilities = scores / scores.sum(-1, keepdim=True)
    if mode == "random":
        # The value is the noise, the gradient is the learned scores': a systems run keeps its backward work.
        scores = noise_TE.to(scores.dtype) + (scores - scores.detach())
    if mode == "uniform":
        route = torch.arange(tokens * top_k, device=logits_TE.device).view(tokens, top_k)
        index = route % experts
    else:
        # NaN ranks below every score, ties go to the lower expert: K distinct valid experts for any row.
        key = torch.where(scores.isnan(), -torch.ones_like(scores), scores).detach()
        index = key.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(-1, index)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    if restore_scale:
        weights = weights * top_k

    chosen = torch.zeros_like(logits_TE, dtype=torch.int64).scatter_(-1, index, 1)
    if tokens == 0:
        zero = logits_TE.sum()
        return weights, index.to(torch.int32), chosen.sum(0), zero, zero
    per_group = tokens // groups
    f_GE = chosen.view(groups, per_group, experts).sum(1).to(logits_TE.dtype) / per_group
    p_GE = probabilities.view(groups, per_group, experts).mean(1)
    lbl = experts / top_k * (f_GE * p_GE).sum(-1).mean()
    z_loss = logits_TE.logsumexp(-1).square().mean()
    return weights, index.to(torch.int32), chosen.sum(0), lbl, z_loss
