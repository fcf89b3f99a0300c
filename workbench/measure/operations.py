"""The classes of operation of Table 12, each as a callable on the GPU.

Source: report, Table 12.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Call = Callable[[], Any]


@dataclass(frozen=True)
class Operation:
    """One row of Table 12 as something that runs.

    Attributes:
        name: what runs, with its shape.
        row: the report's row that it stands for.
        report: the report's effect: ``builds``, ``consumes`` or ``stops``.
        call: the region.
    """

    name: str
    row: str
    report: str
    call: Call


def operations() -> list[Operation]:
    """Build the operations on the current device, BF16, random inputs."""
    import torch
    import torch.nn.functional as F

    gen = torch.Generator(device="cuda").manual_seed(11)

    def rand(*shape: int, grad: bool = False) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=gen) * 0.1).requires_grad_(grad)

    a, b = rand(4096, 4096), rand(4096, 4096)
    rows, weights = rand(32768, 1536), rand(16, 1536, 3072)
    ends = torch.arange(2048, 32769, 2048, device="cuda", dtype=torch.int32)
    q, k, v = (rand(2, 20, 4096, 128) for _ in range(3))
    huge, big, small = rand(65536, 4096), rand(8192, 4096), rand(16, 64)

    def chain(x: torch.Tensor) -> torch.Tensor:
        return F.silu(x * 1.01 + 0.5) * torch.sigmoid(x) + x.square() * 0.1

    compiled = torch.compile(chain, dynamic=False)
    (forward, four_forward), (backward, four_backward), compiled_forward = _transformer_layers()
    modules = torch.nn.Sequential(
        *[torch.nn.Sequential(torch.nn.Identity(), torch.nn.LayerNorm(64)) for _ in range(16)]
    )
    modules = modules.to("cuda", torch.bfloat16)
    logits = rand(16384, 128).float()
    scalar = rand(1).float()

    quiet = torch.no_grad()
    products = quiet(lambda: a @ b), quiet(lambda: F.grouped_mm(rows, weights, offs=ends))
    attention = quiet(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    table: dict[tuple[str, str], dict[str, Call]] = {
        ("Large dense and grouped GEMMs", "builds"): {
            "dense GEMM 4096^3": products[0], "grouped GEMM 16 x [2048, 1536] x 3072": products[1],
        },
        ("Scaled dot-product attention", "builds"): {"causal SDPA 2 x 20 x 4096 x 128": attention},
        ("Fused kernels and compiled regions", "builds"): {
            "compiled pointwise chain, 8192 x 4096": quiet(lambda: compiled(big)),
            "compiled pointwise chain, 65536 x 4096": quiet(lambda: compiled(huge)),
            "compiled forward of a transformer layer": compiled_forward,
        },
        ("Autograd-engine backward", "builds"): {"backward of a transformer layer": backward},
        ("Python call stacks and dispatcher overhead", "consumes"): {
            "16 small modules, eager, 16 x 64": quiet(lambda: modules(small)),
            "eager pointwise chain, 16 x 64": quiet(lambda: chain(small)),
        },
        ("Compilation-cache lookups and metadata bookkeeping", "consumes"): {
            "compiled chain on a small input, 16 x 64": quiet(lambda: compiled(small)),
        },
        ("Routing metadata and other short kernels", "consumes"): {
            "eager route map, T 1024, K 8, E 128": quiet(lambda: _route_map(logits[:1024])),
            "eager route map, T 16384, K 8, E 128": quiet(lambda: _route_map(logits)),
        },
        ("Device-to-host synchronization", "stops"): {"x.item()": quiet(scalar.item)},
        # Not rows of the table: the forward that the backward is compared with, both of four layers in a row (what a
        # further layer costs holds no cost of entering the autograd engine), and the chain without fusion.
        ("", ""): {
            "forward of a transformer layer": forward,
            "forward of four transformer layers": four_forward,
            "backward of four transformer layers": four_backward,
            "eager pointwise chain, 8192 x 4096": quiet(lambda: chain(big)),
        },
    }  # fmt: skip
    return [Operation(name, *row, call) for row, calls in table.items() for name, call in calls.items()]


def _transformer_layers() -> tuple[tuple[Call, Call], tuple[Call, Call], Call]:
    """Return forwards of one and of four dense layers on 4096 tokens, their backwards, and one compiled forward."""
    import torch
    from moe_kernels.model import DevelopmentModel, ModelConfig

    sizes = ModelConfig(layers=4, dense_layers=4, vocabulary=256, max_sequence=4096)
    model = DevelopmentModel(sizes, device="cuda", dtype=torch.bfloat16, annotate=False)
    rope = (model.rope_cos, model.rope_sin)
    x = torch.randn(1, 4096, sizes.width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)

    def passes(count: int) -> tuple[Call, Call]:
        layers = list(model.layers)[:count]
        inputs = [x, *(p for layer in layers for p in layer.parameters())]

        def forward() -> torch.Tensor:
            out = x
            for layer in layers:
                out = layer(out, rope, 0)
            return out

        out = forward()
        return forward, lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)

    forwards, backwards = zip(passes(1), passes(4))
    compiled = torch.compile(model.layers[0], dynamic=False)
    return forwards, backwards, lambda: compiled(x, rope, 0)


def _route_map(logits: Any) -> Any:
    """Order routes by expert as eager code does: sort, counts, offsets, inverse."""
    import torch

    experts = logits.topk(8, dim=-1).indices.flatten()
    order = experts.argsort(stable=True)
    counts = torch.zeros(128, dtype=torch.int64, device=logits.device).scatter_add_(
        0, experts, torch.ones_like(experts)
    )
    start = counts.cumsum(0) - counts
    rows = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    return rows - start[experts]
