"""A small transformer block loop to record: bf16, forward only, with or without one `.item()` per block.

The smallest program that shows both regimes of Section 8.1: short blocks are bound by submission, long blocks hide it,
and one host read per block stops submission either way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

HEADS = 8


def build(*, blocks: int, width: int, tokens: int, device: str = "cuda", seed: int = 0) -> Callable[..., Any]:
    """Return `step(read, load=False)`: one pass over the loop; `read` adds one `.item()` per block.

    `load` computes the same scalar in every block and leaves it on the device: the loop with reads, less its waits.

    Args:
        blocks: transformer blocks (RMS norm, attention, SwiGLU-free MLP of four times the width).
        width: model width, a multiple of the eight heads.
        tokens: rows of the one sequence.
    """
    import torch
    from torch.profiler import record_function

    generator = torch.Generator(device=device).manual_seed(seed)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device=device, dtype=torch.bfloat16, generator=generator) * rows**-0.5

    layers = [
        (weight(width, 3 * width), weight(width, width), weight(width, 4 * width), weight(4 * width, width))
        for _ in range(blocks)
    ]
    x0 = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, generator=generator)

    def block(x: torch.Tensor, layer: tuple[torch.Tensor, ...]) -> torch.Tensor:
        qkv, out, up, down = layer
        h = torch.nn.functional.rms_norm(x, (width,))
        q, k, v = (h @ qkv).view(tokens, 3, HEADS, width // HEADS).permute(1, 2, 0, 3).unbind(0)
        a = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        x = x + a.transpose(0, 1).reshape(tokens, width) @ out
        h = torch.nn.functional.rms_norm(x, (width,))
        return x + torch.nn.functional.gelu(h @ up) @ down

    def step(read: bool, load: bool = False) -> torch.Tensor:
        x = x0
        with torch.no_grad():
            for i, layer in enumerate(layers):
                with record_function(f"block {i}"):
                    x = block(x, layer)
                    if read:
                        value = x[0, 0].float().item()
                        if value != value:
                            raise FloatingPointError(f"block {i} produced NaN")
                    elif load:
                        x[0, 0].float()
        return x

    return step
