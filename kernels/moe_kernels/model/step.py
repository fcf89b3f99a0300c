"""One training step of the development model whose host never waits for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function

from moe_kernels import _compat
from moe_kernels.model.api import DevelopmentModel


def make_optimizer(model: DevelopmentModel, learning_rate: float = 1e-4) -> torch.optim.AdamW:
    """AdamW whose step count stays on the device: fused on CUDA."""
    cuda = next(model.parameters()).device.type == "cuda"
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), fused=cuda)


class TrainStep:
    """Forward and backward over the microbatches, gradient reduction and clipping, optimizer.

    The loss is the mean over microbatches and ranks. Gradients of weights that every rank holds are summed over the
    group; those of a rank's experts already hold every rank's tokens.

    Args:
        model: on any path.
        optimizer: one that reads nothing back, see `make_optimizer`.
        clip_norm: bound of the norm over all parameters of all ranks; None leaves gradients alone. The factor is a
            device scalar and there is no finite check on the host.
        group: process group of the ranks that share the batch; None where one process holds it all.
    """

    def __init__(
        self,
        model: DevelopmentModel,
        optimizer: torch.optim.Optimizer,
        clip_norm: float | None = 1.0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.model, self.optimizer, self.clip_norm, self.group = model, optimizer, clip_norm, group
        self.ranks = dist.get_world_size(group) if group is not None else 1
        experts = {id(p) for block in model.routed_blocks for p in (block.up_gate, block.down)}
        parameters = list(model.parameters())
        sharded = group is not None and self.ranks > 1
        self.sharded = [p for p in parameters if sharded and id(p) in experts]
        self.replicated = [p for p in parameters if not (sharded and id(p) in experts)]

    def __call__(self, microbatches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Run one step over (tokens, targets) pairs [B, S]; return this rank's losses [M], detached, on the device."""
        if not microbatches:
            raise ValueError("a step needs at least one microbatch")
        try:
            return self._step(microbatches)
        except BaseException:
            # An interrupted notebook cell is run again: no lease and no gradient of this step may remain.
            if self.model.pool is not None:
                self.model.pool.release_all()
            self.optimizer.zero_grad(set_to_none=True)
            raise

    def _step(self, microbatches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        losses = []
        scale = 1.0 / (len(microbatches) * self.ranks)
        for index, (tokens, targets) in enumerate(microbatches):
            with record_function(f"microbatch {index}"):
                loss = self.model.loss(tokens, targets, microbatch=index)
                (loss * scale).backward()
            losses.append(loss.detach())
        with record_function("optimizer"):
            self._reduce()
            self._clip()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses)

    @torch.no_grad()
    def _reduce(self) -> None:
        if self.ranks == 1:
            return
        grads = _grads(self.replicated)
        flat = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(flat, group=self.group)
        parts = flat.split([g.numel() for g in grads])
        _compat.copy_each(grads, [part.view_as(g) for part, g in zip(parts, grads)])

    @torch.no_grad()
    def _clip(self) -> None:
        if self.clip_norm is None:
            return
        norm = torch.nn.utils.get_total_norm(_grads(self.replicated), foreach=True)
        if self.sharded:
            experts = torch.nn.utils.get_total_norm(_grads(self.sharded), foreach=True).float().square()
            dist.all_reduce(experts, group=self.group)
            norm = (norm.float().square() + experts).sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.replicated + self.sharded, self.clip_norm, norm, foreach=True)


def _grads(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [p.grad for p in parameters if p.grad is not None]
