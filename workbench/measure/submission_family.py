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
        ("bare launch", 1, 0, 0, 0, lambda: torch.cuda._sleep(0)),
        ("view", 0, 0, 1, 0, lambda: x.view(64, 64)),
        ("add_", 1, 1, 0, 0, lambda: x.add_(y)),
        ("view, add_", 1, 1, 1, 0, lambda: x.view(64, 64).add_(square)),
        ("Identity module", 0, 0, 0, 1, lambda: identity(x)),
        ("Identity module, add_", 1, 1, 0, 1, lambda: identity(x).add_(y)),
        ("bare launch, view", 1, 0, 1, 0, lambda: (torch.cuda._sleep(0), x.view(64, 64))),
    ]
    return [
        FamilyMember(f"{n} x {name}", n * launches, n * operators, n * views, n * modules, repeat(n, unit))
        for name, launches, operators, views, modules, unit in units
        for n in counts
    ]
