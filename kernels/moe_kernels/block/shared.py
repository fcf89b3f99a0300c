"""The shared expert, on the caller's stream or on its own."""

from __future__ import annotations

import torch

from moe_kernels.swiglu import swiglu

_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def shared_expert(
    x_TD: torch.Tensor, up_gate: torch.Tensor, down: torch.Tensor, rows: torch.Tensor, impl: str | None = None
) -> torch.Tensor:
    """SwiGLU feed-forward of every token: x [T, D], up_gate [D, 2F], down [F, D]; `rows` int32 [1] holds T."""
    return swiglu(x_TD @ up_gate, rows, impl=impl) @ down


class SideStream:
    """A fork of the current stream and its join; on the CPU everything stays in order.

    Memory needs no record_stream: what the side stream reads outlives the join, and what it allocates is only reused
    by side-stream work, which starts after the current stream at the next fork.
    """

    def __init__(self, device: torch.device) -> None:
        self._side = None
        if device.type == "cuda":
            self._side = _STREAMS.setdefault(device, torch.cuda.Stream(device))
            self._forked = torch.cuda.Event()
            self._forked.record()

    def run(self, function, *args: torch.Tensor) -> torch.Tensor:
        """Submit `function(*args)` to the side stream, behind the work that the fork saw."""
        if self._side is None:
            return function(*args)
        self._side.wait_event(self._forked)
        with torch.cuda.stream(self._side):
            return function(*args)

    def join(self) -> None:
        """Let the current stream wait for the side stream; the host does not."""
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)
