"""Speed sheet of the route map: three launches against the same rule in torch operations."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from workbench.core.experiment import Check, Result
from workbench.measure.sheet import Case, OpSheetParams
from workbench.models import moe_cost
from workbench.views.sheet import IMPLS, label, op_sheet, rows_of

LEAST_US = 30.0


def cases(params: OpSheetParams) -> list[Case]:
    """The maps of one rank among 1 and 8, and the torch reference."""
    import torch
    from moe_kernels.route_map import capacity_rows, route_map

    T, K, E = params.tokens, params.top_k, params.experts
    experts = torch.randn(T, E, device="cuda").topk(K).indices.int()
    counts = experts.flatten().bincount(minlength=E)
    mapped = partial(route_map, experts, rank=0, capacity=capacity_rows(T, K, 1.25))
    return [
        Case(name, f"R = {ranks}", "forward", partial(mapped, counts.expand(ranks, -1).contiguous(), impl=impl),
             moe_cost.route_map(T, K, E, ranks), copies=20)
        for ranks in (1, 8) if E % ranks == 0
        for impl, name in IMPLS.items()
    ]  # fmt: skip


def checks(result: Result) -> Iterator[Check]:
    """At most three launches and 30 us."""
    for r in rows_of(result, impl="triton"):
        yield Check(f"{label(r)}: at most 3 launches", r["launches"] <= 3, r["launches"])
        at_size = result.params.tokens <= 16384 and result.params.top_k <= 8 and result.params.experts <= 128
        holds = r["time_us_p50"] <= LEAST_US if at_size else None
        yield Check(f"{label(r)}: at most {LEAST_US:g} us on the device", holds, f"{r['time_us_p50']:.1f} us")


EXPERIMENT = op_sheet(
    "op_route_map",
    cases,
    "Route map: device time",
    limit_us=LEAST_US,
    title="Route map: speed sheet",
    claim="Destination ranks, rows, offsets and drops are built on the device in three launches and at most 30 us.",
    anchor="Section 8.5, Table 14",
    checks=checks,
    tests=("tests/kernels/test_route_map.py",),
    recording="2026-11-29_h200_464a777",
)
