"""One layer of the development model as a region: dense or routed, forward or both passes, eager, replayed, compiled.

Standard library and torch only.

Source: report, Section 8.3 (Figure 32, Equation 12).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from workbench.measure.processes import join_as_single_rank

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
    """The three layers, built once and run at any number of tokens; one rank's share of them.

    Args:
        experts: routed experts over all ranks.
        grouped_gemm: implementation of the experts' products; None chooses by device.
        seed: of weights and inputs.
        transport: of the rowwise layer; None: this process is the only rank and makes its own process group.
        router_mode: over several ranks `learned`, whose routes are those of its input: submission without the wait
            uses the split lists of an earlier call, which must be those of this one on every rank.
        small: sizes that a CPU runs in milliseconds, FP32, on the transport's device.
    """

    def __init__(
        self,
        experts: int,
        grouped_gemm: str | None,
        seed: int = 0,
        *,
        transport: Any = None,
        router_mode: str = "random",
        small: bool = False,
    ) -> None:
        import torch
        import torch.distributed as dist
        from moe_kernels.model import DevelopmentModel, ModelConfig, development_config, small_config
        from moe_kernels.transport import VirtualTransport

        join_as_single_rank()
        if dist.get_world_size() > 1 and router_mode == "random":
            raise ValueError("router_mode: expected learned or uniform over several ranks, got random: routes change")
        transport = transport if transport is not None else VirtualTransport(1, "cuda")
        torch.manual_seed(seed + dist.get_rank())
        if small:
            sizes = small_config(num_experts=experts, router_mode=router_mode)
        else:
            block = development_config(experts, router_mode=router_mode).block
            sizes = ModelConfig(layers=2, vocabulary=256, max_sequence=LONGEST_SEQUENCE, block=block)
        self.device, self.dtype = transport.device, torch.float32 if small else torch.bfloat16
        common = {"device": self.device, "dtype": self.dtype, "grouped_gemm": grouped_gemm, "annotate": False}
        rowwise = DevelopmentModel(sizes, path="rowwise", transport=transport, **common)
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
        size = (tokens // length, length, self.width)
        x = torch.randn(size, device=self.device, dtype=self.dtype, requires_grad=True)
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
        if pool.transport.world_size > 1:
            # Until the dry run has ended, ranks agree on T through their hosts.
            pool.frozen = False
            call()
            pool.freeze()
        if name != "routed, synchronized":
            return LayerRegion(call, call, forward)
        exchange: Any = block.exchange
        call()

        def without_wait() -> Any:
            # The split lists are the same in every call on one input (with one rank: of one size), so those of the
            # first call serve; only the wait for them is left out.
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
