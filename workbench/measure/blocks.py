"""One layer of the development model as a region: dense or routed, forward or both passes, eager, replayed, compiled.

Standard library and torch only.

Source: report, Section 8.3 (Figure 32, Equation 12).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LAYERS = ("dense", "routed, rowwise", "routed, synchronized")
PASSES = ("forward", "forward + backward")
LONGEST_SEQUENCE = 8192


@dataclass(frozen=True)
class LayerRegion:
    """A layer's pass at one size.

    Attributes:
        call: the region as training runs it.
        submit_call: the same without its host wait, for submission time behind a busy device.
        retained: runs the forward and returns what keeps its activations alive.
    """

    call: Callable[[], Any]
    submit_call: Callable[[], Any]
    retained: Callable[[], Any]


class Layers:
    """The three layers, built once and run at any number of tokens."""

    def __init__(self, experts: int, grouped_gemm: str | None, seed: int = 0) -> None:
        import torch
        import torch.distributed as dist
        from moe_kernels.model import DevelopmentModel, ModelConfig, development_config
        from moe_kernels.transport import VirtualTransport

        if not dist.is_initialized():
            dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        torch.manual_seed(seed)
        block = development_config(experts).block
        sizes = ModelConfig(layers=2, vocabulary=256, max_sequence=LONGEST_SEQUENCE, block=block)
        common = {"device": "cuda", "dtype": torch.bfloat16, "grouped_gemm": grouped_gemm, "annotate": False}
        rowwise = DevelopmentModel(sizes, path="rowwise", transport=VirtualTransport(1, "cuda"), **common)
        synchronized = DevelopmentModel(sizes, path="synchronized", **common)
        self.width = sizes.width
        self.rope = (rowwise.rope_cos, rowwise.rope_sin)
        self.pool: Any = rowwise.pool
        self.layers: dict[str, Any] = {
            "dense": rowwise.layers[0],
            "routed, rowwise": rowwise.layers[1],
            "routed, synchronized": synchronized.layers[1],
        }

    def region(self, name: str, passes: str, tokens: int, layer: Any = None) -> LayerRegion:
        """Return one pass of one layer over `tokens` tokens, in sequences of at most 8192; `layer` replaces it."""
        import torch

        module = self.layers[name] if layer is None else layer
        length = min(tokens, LONGEST_SEQUENCE)
        x = torch.randn(tokens // length, length, self.width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        grad = torch.randn_like(x)
        inputs = [x, *self.layers[name].parameters()]
        pool, rope, block = self.pool, self.rope, self.layers[name].feed_forward

        def forget() -> None:
            # Losses of the last forward keep gradient nodes alive, bound to the stream that they first ran on: a
            # capture on another stream would then be refused.
            if hasattr(block, "aux_losses"):
                block.aux_losses = {}

        def forward() -> Any:
            out = module(x, rope, 0)
            # The forward of a training step holds its lease for a backward that does not come here.
            pool.release_all()
            forget()
            return out

        def both() -> Any:
            gradients = torch.autograd.grad(module(x, rope, 0), inputs, grad)
            forget()
            return gradients

        call = forward if passes == "forward" else both
        if name != "routed, synchronized":
            return LayerRegion(call, call, forward)
        exchange: Any = block.exchange
        call()

        def without_wait() -> Any:
            # One rank's split lists are the same in every call of one size, so those of the first call serve; only
            # the wait for them is left out.
            event, exchange.event = exchange.event, None
            try:
                return call()
            finally:
                exchange.event = event

        return LayerRegion(call, without_wait, forward)


def activation_bytes(region: LayerRegion) -> int:
    """Return device memory that one forward keeps for its backward, the output included."""
    import torch

    region.retained()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    kept = region.retained()
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated()
    del kept
    return after - before
