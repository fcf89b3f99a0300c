"""The shared expert, on the caller's stream or on its own."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_kernels._launch import compile_boundary
from moe_kernels.swiglu import swiglu

_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def shared_expert(
    x_TD: torch.Tensor, up_gate: torch.Tensor, down: torch.Tensor, rows: torch.Tensor, impl: str | None = None
) -> torch.Tensor:
    """SwiGLU feed-forward of every token: x [T, D], up_gate [D, 2F], down [F, D]; `rows` int32 [1] holds T."""
    return swiglu(x_TD @ up_gate, rows, impl=impl) @ down


class SideStream:
    """A fork of the current stream and its join; on the CPU, and without `own`, everything stays in order.

    Memory needs no record_stream. Forward: what the side stream reads lives until the join; what it allocates is reused
    by side-stream work alone, which starts behind the caller's stream at the next fork, hence behind the sum that read
    it. Backward: autograd runs these nodes on the side stream again and lets the caller's stream wait for it where
    their gradients meet those of the other paths. Both hold for one calling stream a device: streams that call blocks
    by turns must wait for each other in between.

    torch.compile never sees the streams: Dynamo of torch 2.11 ends the process (segmentation fault) where a graph that
    used a stream breaks, which a routed block's graph does.
    """

    def __init__(self, device: torch.device, own: bool) -> None:
        self._side: torch.cuda.Stream | None = None
        self._forked: torch.cuda.Event | None = None
        if own and device.type == "cuda":
            self._fork(device)

    def run(self, function: Callable[..., torch.Tensor], *args: torch.Tensor) -> torch.Tensor:
        """Submit `function(*args)` to the side stream, behind the work that the fork saw."""
        return function(*args) if self._side is None else self._run(function, *args)

    def join(self) -> None:
        """Let the current stream wait for the side stream; the host does not."""
        if self._side is not None:
            self._join(self._side)

    @compile_boundary
    def _fork(self, device: torch.device) -> None:
        self._side = _STREAMS.get(device) or _STREAMS.setdefault(device, torch.cuda.Stream(device))
        self._forked = torch.cuda.Event()
        # The device's stream by name: another device may be the current one.
        self._forked.record(torch.cuda.current_stream(device))

    @compile_boundary
    def _run(self, function: Callable[..., torch.Tensor], *args: torch.Tensor) -> torch.Tensor:
        assert self._side is not None and self._forked is not None
        self._side.wait_event(self._forked)
        with torch.cuda.stream(self._side):
            return function(*args)

    @compile_boundary
    def _join(self, side: torch.cuda.Stream) -> None:
        torch.cuda.current_stream(side.device).wait_stream(side)
