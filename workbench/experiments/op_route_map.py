"""Speed sheet of the route map: three launches against the same rule in torch operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.measure.sheet import Case, OpSheetParams, measure_sheet
from workbench.models import moe_cost
from workbench.views.sheet import draw_sheet, label, rows_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

LEAST_US = 30.0


def measure(params: OpSheetParams, recorder: Any) -> list[dict[str, Any]]:
    """Time the maps of one rank among 1 and 8, and the torch reference."""
    import torch
    from moe_kernels.route_map import capacity_rows, route_map

    torch.manual_seed(params.seed)
    logits = torch.randn(params.tokens, params.experts, device="cuda")
    experts = logits.topk(params.top_k).indices.int()
    counts = experts.flatten().bincount(minlength=params.experts)
    capacity = capacity_rows(params.tokens, params.top_k, 1.25)
    cases = []
    for ranks in (1, 8):
        if params.experts % ranks:
            continue
        gathered = counts.expand(ranks, -1).contiguous()
        for impl in ("triton", "reference"):
            cases.append(
                Case(
                    "triton" if impl == "triton" else "torch operations",
                    f"R = {ranks}",
                    "forward",
                    lambda impl=impl, gathered=gathered: route_map(
                        experts, gathered, rank=0, capacity=capacity, impl=impl
                    ),
                    moe_cost.route_map(params.tokens, params.top_k, params.experts, ranks),
                    copies=20,
                )
            )
    return measure_sheet(cases, params, recorder)


def checks(result: Result) -> list[Check]:
    """At most three launches and 30 us."""
    out = []
    for r in rows_of(result, impl="triton"):
        out.append(Check(f"{label(r)}: at most 3 launches", r["launches"] <= 3, r["launches"]))
        at_size = result.params.tokens <= 16384 and result.params.top_k <= 8 and result.params.experts <= 128
        holds = r["time_us_p50"] <= LEAST_US if at_size else None
        out.append(Check(f"{label(r)}: at most {LEAST_US:g} us on the device", holds, f"{r['time_us_p50']:.1f} us"))
    return out


def draw(result: Result) -> go.Figure:
    """Draw the sheet."""
    return draw_sheet(result, "Route map: device time", limit_us=LEAST_US)


EXPERIMENT = Experiment(
    slug="op_route_map",
    group="s08_sync_free",
    title="Route map: speed sheet",
    claim="Destination ranks, rows, offsets and drops are built on the device in three launches and at most 30 us.",
    kind="measured",
    anchor="Section 8.5, Table 14",
    params=OpSheetParams,
    figure=draw,
    checks=checks,
    measure=measure,
    tests=("tests/kernels/test_route_map.py",),
    recording="2026-11-29_h200_464a777",
)
