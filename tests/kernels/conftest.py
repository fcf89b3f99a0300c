"""Kernel tests: on a machine without a CUDA device the Triton kernels run under Triton's CPU interpreter."""

from __future__ import annotations

import os

import pytest
import torch

# Before the first kernel module is imported: the decorator decides once.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def device() -> torch.device:
    """CUDA where it is, otherwise the CPU with interpreted kernels."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
