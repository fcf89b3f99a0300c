"""The bad example: offsets copied to the host, one `.item()` and one launch per expert. Kept to be measured against.

Source: report, Section 8.5, Figure 36.
"""

from __future__ import annotations

import torch


def grouped_gemm(a_MK: torch.Tensor, b_LKN: torch.Tensor, offsets: torch.Tensor, out_MN: torch.Tensor) -> None:
    """As the reference, in the operands' own precision; the host waits once per expert."""
    start = 0
    for group in range(b_LKN.shape[0]):
        end = int(offsets[group].item())
        if end > start:
            torch.mm(a_MK[start:end], b_LKN[group], out=out_MN[start:end])
        start = end


def grouped_gemm_wgrad(a_MK: torch.Tensor, grad_MN: torch.Tensor, offsets: torch.Tensor, out_LKN: torch.Tensor) -> None:
    """As the reference, in the operands' own precision; the host waits once per expert."""
    start = 0
    for group in range(out_LKN.shape[0]):
        end = int(offsets[group].item())
        if end > start:
            torch.mm(a_MK[start:end].t(), grad_MN[start:end], out=out_LKN[group])
        else:
            out_LKN[group].zero_()
        start = end
