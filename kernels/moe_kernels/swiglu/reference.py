"""SwiGLU on a prefix of rows in plain PyTorch; the reference reads the valid row count on the host."""

from __future__ import annotations

import torch


def swiglu(h_C2F: torch.Tensor, valid: int, out_CF: torch.Tensor) -> torch.Tensor:
    """Write silu(gate) * up to the first `valid` rows of `out`; gate is the first half of the columns."""
    wide = torch.promote_types(h_C2F.dtype, torch.float32)
    gate, up = h_C2F[:valid].to(wide).chunk(2, dim=1)
    out_CF[:valid] = (gate * gate.sigmoid() * up).to(out_CF.dtype)
    return out_CF


def swiglu_backward(h_C2F: torch.Tensor, grad_CF: torch.Tensor, valid: int, out_C2F: torch.Tensor) -> torch.Tensor:
    """Write the gradient of `h` to the first `valid` rows of `out`, which may be `h`."""
    wide = torch.promote_types(h_C2F.dtype, torch.float32)
    gate, up = h_C2F[:valid].to(wide).chunk(2, dim=1)
    grad = grad_CF[:valid].to(wide)
    s = gate.sigmoid()
    d_gate = grad * up * s * (1 + gate * (1 - s))
    out_C2F[:valid] = torch.cat([d_gate, grad * gate * s], dim=1).to(out_C2F.dtype)
    return out_C2F
