"""Kernel tests: on a machine without a CUDA device the Triton kernels run under Triton's CPU interpreter."""

from __future__ import annotations

import os

import pytest
import torch

# Before the first kernel module is imported: the decorator decides once.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU with interpreted kernels, and the GPU with compiled ones; one process can do only one of them."""
    if request.param == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("Triton compiles for the GPU in this process; the interpreter needs TRITON_INTERPRET=1")
        pytest.importorskip("triton", reason="the interpreter needs the triton package")
    return torch.device(request.param)
