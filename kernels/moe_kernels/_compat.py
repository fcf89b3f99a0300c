"""Every call whose name or behaviour depends on the torch or triton version (torch 2.11 to 2.13, triton 3.6 to 3.9)."""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_TRITON = importlib.util.find_spec("triton") is not None


@cache
def interpreter_active() -> bool:
    """Whether Triton kernels run in its CPU interpreter (it must be set before the first kernel is imported)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def triton_available() -> bool:
    """Whether the triton package can be imported; nothing is imported."""
    return _TRITON


def torch_grouped_mm(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Torch's grouped matrix product with int32 cumulative offsets."""
    return torch.nn.functional.grouped_mm(a, b, offs=offsets)


def torch_grouped_mm_is_device_scheduled(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's grouped product keeps the offsets on the device.

    Its CUTLASS kernels exist for bfloat16 on sm_90 and sm_100; every other case takes a fallback that copies the
    offsets to the host and loops.
    """
    if device.type != "cuda" or dtype is not torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def matmul_fp32_out(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Product of two bfloat16 CUDA matrices accumulated and returned in FP32, without casting the operands."""
    return torch.mm(a, b, out_dtype=torch.float32)


def disable_compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` as torch.compile must leave it; the public spelling would import dynamo at once (seconds)."""
    return torch._disable_dynamo(function)


def current_device() -> int:
    """Index of the current CUDA device; the public call checks initialisation first, which a launch need not."""
    return torch._C._cuda_getDevice()


_THREAD = threading.local()


def bind_context() -> None:
    """Make CUDA's context current on this thread, at its first call: autograd's threads for device 0 begin without one,
    and a TMA descriptor cannot be made without. Of torch's calls that do so, this one is allowed in a graph capture."""
    if not getattr(_THREAD, "bound", False):
        torch.cuda.is_current_stream_capturing()
        _THREAD.bound = True


def current_stream_address(device: int) -> int:
    """Handle of the current stream of CUDA device `device`; a public Stream object costs the host several us."""
    return torch._C._cuda_getCurrentRawStream(device)


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source over its target in a few launches for all of them; a loop would launch one copy a tensor."""
    torch._foreach_copy_(targets, sources)
