"""One training step of the development model whose host never waits for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_kernels.model.api import DevelopmentModel


def make_optimizer(model: DevelopmentModel, learning_rate: float = 1e-4) -> torch.optim.AdamW:
    """AdamW whose step count stays on the device: fused on CUDA."""
    cuda = next(model.parameters()).device.type == "cuda"
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), fused=cuda)


class TrainStep:
    """Forward and backward over the microbatches, gradient clipping, optimizer; returns losses on the device.

    Args:
        model: on any path.
        optimizer: one that reads nothing back, see `make_optimizer`.
        clip_norm: gradients are scaled by a device scalar, None leaves them; no finite check on the host.
    """

    def __init__(
        self, model: DevelopmentModel, optimizer: torch.optim.Optimizer, clip_norm: float | None = 1.0
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.clip_norm = clip_norm

    def __call__(self, microbatches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Run one step over (tokens, targets) pairs [B, S]; return the losses [M], detached, on the device."""
        if not microbatches:
            raise ValueError("a step needs at least one microbatch")
        losses = []
        for index, (tokens, targets) in enumerate(microbatches):
            with torch.autograd.profiler.record_function(f"microbatch {index}"):
                loss = self.model.loss(tokens, targets, microbatch=index) / len(microbatches)
                loss.backward()
            losses.append(loss.detach() * len(microbatches))
        with torch.autograd.profiler.record_function("optimizer"):
            if self.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm, foreach=True)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses)
