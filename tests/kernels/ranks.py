"""Separate rank processes for tests: each check runs on every rank, and a failure of any rank fails the test."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from moe_kernels.block import BlockConfig, RoutedBlock

# Relative norms on FP32 with E 8, K 2 and ample capacity; a row is summed in another order, nothing else differs.
BUDGET_OUTPUT = 5e-4
BUDGET_WEIGHT = 1e-3


def spawn(check: Callable, world_size: int, folder: Path, *args) -> None:
    """Run check(rank, world_size, *args) on `world_size` processes joined by gloo."""
    init = folder / f"init_{check.__name__}_{world_size}"
    mp.start_processes(_entry, (check, world_size, str(init), args), nprocs=world_size, start_method="spawn")


def _entry(rank: int, check: Callable, world_size: int, init: str, args: tuple) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{init}", rank=rank, world_size=world_size)
    check(rank, world_size, *args)
    # A rank that leaves while another still talks to it ends that one with an abort.
    dist.barrier()
    dist.destroy_process_group()
    # While an interpreter winds down, gloo's threads have aborted the process that had passed its check.
    os._exit(0)


def relative_error(got: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ||got - reference|| / ||reference||; NaN stays NaN and so never passes a comparison."""
    scale = reference.double().norm().clamp_min(1e-30)
    return ((got.double() - reference.double()).norm() / scale).item()


def assert_close(name: str, got: torch.Tensor, reference: torch.Tensor, budget: float) -> None:
    """Fail with the error and its budget unless the relative error stays within it."""
    error = relative_error(got, reference)
    assert error <= budget, f"{name}: relative error {error:.2e} exceeds {budget:.0e}"


def run_block(block: RoutedBlock, x: torch.Tensor, d_out: torch.Tensor) -> dict[str, torch.Tensor]:
    """Run forward and backward; return output, input gradient and weight gradients by name."""
    x = x.detach().clone().requires_grad_()
    out = block(x)
    out.backward(d_out)
    result = {"output": out.detach(), "x": x.grad}
    for name, parameter in block.named_parameters():
        assert parameter.grad is not None, f"{name} got no gradient"
        result[name] = parameter.grad
    return {name: t for name, t in result.items() if t is not None}


def compare_with_one_rank(
    block: RoutedBlock, config: BlockConfig, tokens: int, rank: int, world_size: int, device: str, grouped: bool = True
) -> None:
    """Compare a block whose ranks hold `tokens` rows each with one rank that holds all rows and experts.

    Gradients of weights that every rank holds are summed over the ranks first.
    """
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(world_size * tokens, config.width, generator=generator).to(device)
    d_out = torch.randn(world_size * tokens, config.width, generator=generator).to(device)
    one = RoutedBlock(config, seed=5, device=device, impl=block.impl, grouped_gemm=block.gemm)
    expected = run_block(one, x, d_out)
    mine = slice(rank * tokens, (rank + 1) * tokens)
    got = run_block(block, x[mine], d_out[mine])
    experts = torch.tensor(block.expert_ids, device=device)
    for name, tensor in got.items():
        if name in ("output", "x"):
            assert_close(name, tensor, expected[name][mine], BUDGET_OUTPUT)
        elif name in ("up_gate", "down"):
            assert_close(name, tensor, expected[name][experts], BUDGET_WEIGHT)
        else:
            summed = tensor.cpu()
            if grouped:
                dist.all_reduce(summed)
            assert_close(name, summed, expected[name].cpu(), BUDGET_WEIGHT)
