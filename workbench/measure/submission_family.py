"""A family of regions whose launches, dispatched operators and Python module calls vary independently.

Source: report, Equation 11.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FamilyMember:
    """One region with its known counts.

    Attributes:
        name: what it does.
        launches: device operations submitted.
        operators: operators that pass the dispatcher and launch a kernel.
        views: operators that pass the dispatcher and launch nothing.
        modules: Python module calls.
        call: the region.
    """

    name: str
    launches: int
    operators: int
    views: int
    modules: int
    call: Callable[[], Any]


def family(counts: tuple[int, ...]) -> list[FamilyMember]:
    """Build the family on the current device.

    Args:
        counts: how many times the unit of each member is repeated.
    """
    import torch

    from workbench.measure import unstable

    spin = unstable.spin()
    x = torch.randn(4096, device="cuda")
    y = torch.randn(4096, device="cuda")
    square = y.view(64, 64)
    identity = torch.nn.Identity()

    def repeat(n: int, unit: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                for _ in range(n):
                    unit()

        return run

    # A launch without a dispatcher: the spin kernel of zero cycles is one C call around one kernel launch.
    units: list[tuple[str, int, int, int, int, Callable[[], Any]]] = [
        ("bare launch", 1, 0, 0, 0, lambda: spin(0)),
        ("view", 0, 0, 1, 0, lambda: x.view(64, 64)),
        ("add_", 1, 1, 0, 0, lambda: x.add_(y)),
        ("view, add_", 1, 1, 1, 0, lambda: x.view(64, 64).add_(square)),
        ("Identity module", 0, 0, 0, 1, lambda: identity(x)),
        ("Identity module, add_", 1, 1, 0, 1, lambda: identity(x).add_(y)),
        ("bare launch, view", 1, 0, 1, 0, lambda: (spin(0), x.view(64, 64))),
    ]
    return [
        FamilyMember(f"{n} x {name}", n * launches, n * operators, n * views, n * modules, repeat(n, unit))
        for name, launches, operators, views, modules, unit in units
        for n in counts
    ]


CALLS = 32
"""Calls of one operator in a timed region of `launch_calls`."""


def launch_calls() -> list[tuple[str, int, Callable[[], Any]]]:
    """Return operators that reach the driver through different calls: name, calls in the region, the region."""
    import torch
    from moe_kernels.swiglu import swiglu

    from workbench.measure.timing import captured_graph

    x, y = torch.randn(4096, device="cuda"), torch.randn(4096, device="cuda")
    a, b = (torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    ends = torch.tensor([256], device="cuda", dtype=torch.int32)
    half = torch.empty(256, 128, device="cuda", dtype=torch.bfloat16)
    pinned = torch.empty(4096, pin_memory=True)
    event, stream = torch.cuda.Event(), torch.cuda.current_stream()
    graphs = {nodes: captured_graph([y.neg_] * nodes, warmup=1) for nodes in (1, 64)}
    units: list[tuple[str, Callable[[], Any]]] = [
        ("elementwise kernel, neg_", y.neg_),
        ("cuBLAS product, 256^3 BF16", lambda: torch.mm(a, b, out=product)),
        ("Triton kernel, our SwiGLU", lambda: swiglu(a, ends, out=half)),
        ("device-to-device copy_", lambda: y.copy_(x)),
        ("pinned host-to-device copy_", lambda: y.copy_(pinned, non_blocking=True)),
        ("zero_", y.zero_),
        ("event record", event.record),
        ("event record, stream wait", lambda: (event.record(), stream.wait_event(event))),
        ("replay of a graph of 1 kernel", graphs[1].replay),
        ("replay of a graph of 64 kernels", graphs[64].replay),
    ]

    def repeat(unit: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                for _ in range(CALLS):
                    unit()

        return run

    return [(name, CALLS, repeat(unit)) for name, unit in units]
