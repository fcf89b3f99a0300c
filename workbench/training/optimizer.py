"""Skip-step AdamW without a host wait.

Every decision (clip, skip, bias correction) is a device value; parameters and moments live in flat buffers, so that a
step is a handful of launches whatever the model's depth.

Source: report, Appendix B.7, B.8 (skip-step AdamW, betas 0.9 and 0.95, weight decay 0.1 with exclusions, clipping 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class SkipStepAdamW:
    """AdamW on flat FP32 masters that leaves parameters and moments untouched on an outlying or non-finite step.

    A step is skipped when its loss or gradient norm is not finite, or lies more than `sigma` standard deviations above
    the mean of the last `window` finite values, once half of the window is filled. The factor is a 0/1 device scalar.

    Args:
        model: a torch module; its parameters become views of the flat buffers.
        lr: default learning rate; `step` may be given another.
        betas: decay rates of the moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled, multiplied by the learning rate.
        no_decay: named parameter -> True where weight decay is left out.
        clip: largest gradient norm; None for no clipping.
        window: steps of loss and gradient norm that are remembered.
        sigma: standard deviations above the mean that make an outlier.
    """

    def __init__(
        self,
        model: Any,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        no_decay: Callable[[str, Any], bool] = lambda name, p: False,
        clip: float | None = 1.0,
        window: int = 128,
        sigma: float = 6.0,
    ) -> None:
        import torch

        if window < 2 or sigma <= 0:
            raise ValueError(f"skip rule: expected window >= 2 and sigma > 0, got window {window}, sigma {sigma}")
        self.lr, self.betas, self.eps, self.clip, self.sigma = lr, betas, eps, clip, sigma
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        kept = [(n, p) for n, p in named if not no_decay(n, p)]
        free = [(n, p) for n, p in named if no_decay(n, p)]
        device = named[0][1].device
        self.names = [n for n, _ in kept + free]
        sizes = [p.numel() for _, p in kept + free]
        total = sum(sizes)
        dtypes = {p.dtype for _, p in named}
        if len(dtypes) != 1 or not named[0][1].dtype.is_floating_point:
            raise ValueError(
                f"flat optimizer: expected parameters of one floating dtype, got {sorted(map(str, dtypes))}"
            )
        self.params = torch.empty(total, dtype=torch.float32, device=device)
        # What the model computes with: the masters themselves in FP32, else their rounded copy.
        low = dtypes.pop()
        self.rounded = self.params if low == torch.float32 else torch.empty(total, dtype=low, device=device)
        self.grads = torch.zeros(total, dtype=low, device=device)
        at = 0
        for (_, p), n in zip(kept + free, sizes):
            self.params[at : at + n].copy_(p.detach().reshape(-1))
            self.rounded[at : at + n].copy_(p.detach().reshape(-1))
            p.data = self.rounded[at : at + n].view(p.shape)
            p.grad = self.grads[at : at + n].view(p.shape)
            at += n
        self.exp_avg = torch.zeros_like(self.params)
        self.exp_avg_sq = torch.zeros_like(self.params)
        self.decay = torch.zeros_like(self.params)
        self.decay[: sum(p.numel() for _, p in kept)] = weight_decay
        self.applied = torch.zeros((), dtype=torch.float32, device=device)
        self.seen = torch.zeros((), dtype=torch.int64, device=device)
        # Rows: loss, gradient norm.
        self.recent = torch.zeros(2, window, dtype=torch.float32, device=device)
        self.skipped = torch.zeros((), dtype=torch.float32, device=device)

    def zero_grad(self) -> None:
        """Zero the flat gradient buffer; parameters keep their views of it."""
        self.grads.zero_()

    def step(self, loss: Any, lr: Any = None) -> dict[str, Any]:
        """Apply one step, or none of it.

        Args:
            loss: device scalar of this step.
            lr: learning rate of this step, a number or (inside a CUDA graph) a device scalar.
        Returns:
            Device scalars ``grad_norm`` (before clipping) and ``applied`` (1.0, or 0.0 where skipped).
        """
        import torch

        with torch.no_grad():
            lr = self.lr if lr is None else lr
            grads = self.grads.float()
            norm = torch.linalg.vector_norm(grads)
            ok = self._accept(torch.stack([loss.detach().float(), norm]))
            if self.clip is not None:
                grads = grads * (self.clip / (norm + 1e-6)).clamp(max=1.0)
            beta1, beta2 = self.betas
            # torch.where and not a product: 0 * NaN is NaN.
            self.exp_avg.copy_(torch.where(ok, torch.lerp(self.exp_avg, grads, 1 - beta1), self.exp_avg))
            self.exp_avg_sq.copy_(
                torch.where(ok, torch.lerp(self.exp_avg_sq, grads * grads, 1 - beta2), self.exp_avg_sq)
            )
            factor = ok.float()
            self.applied += factor
            self.skipped += 1 - factor
            t = self.applied.clamp(min=1.0)
            denominator = (self.exp_avg_sq / (1 - beta2**t)).sqrt_().add_(self.eps)
            update = self.exp_avg / (1 - beta1**t) / denominator + self.decay * self.params
            self.params.copy_(torch.where(ok, self.params - lr * update, self.params))
            self._round()
            return {"grad_norm": norm, "applied": factor}

    def _accept(self, now: Any) -> Any:
        """Return a 0-d bool: finite, and not an outlier of the window; remember finite values."""
        import torch

        window = self.recent.shape[1]
        filled = self.seen.clamp(max=window)
        valid = torch.arange(window, device=now.device) < filled
        n = filled.clamp(min=1).float()
        mean = (self.recent * valid).sum(1) / n
        spread = ((self.recent - mean[:, None]).square() * valid).sum(1).div(n).sqrt()
        finite = now.isfinite().all()
        outlier = (now > mean + self.sigma * spread).any() & (filled >= window // 2)
        slot = (self.seen % window).view(1, 1).expand(2, 1)
        kept = torch.where(finite, now, self.recent.gather(1, slot)[:, 0])
        self.recent.scatter_(1, slot, kept[:, None])
        self.seen += finite.long()
        return finite & ~outlier

    def _round(self) -> None:
        if self.rounded is not self.params:
            self.rounded.copy_(self.params)

    def state(self) -> dict[str, Any]:
        """Return the tensors that a checkpoint keeps."""
        return {
            "params": self.params, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "applied": self.applied,
            "seen": self.seen, "recent": self.recent, "skipped": self.skipped,
        }  # fmt: skip

    def load_state(self, state: dict[str, Any]) -> None:
        """Copy a checkpoint's tensors in place.

        Raises:
            ValueError: a tensor is missing or has another shape (window, model).
        """
        import torch

        for name, here in self.state().items():
            if name not in state:
                raise ValueError(f"checkpoint lacks optimizer tensor {name!r}")
            if state[name].shape != here.shape:
                raise ValueError(
                    f"optimizer tensor {name!r}: expected shape {tuple(here.shape)}, got {tuple(state[name].shape)}"
                )
            with torch.no_grad():
                here.copy_(state[name])
        self._round()
