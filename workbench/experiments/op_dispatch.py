"""Speed sheet of rowwise dispatch: bytes moved against the device's own copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.measure.sheet import Case, OpSheetParams, measure_sheet
from workbench.models import moe_cost
from workbench.views.sheet import bandwidth_checks, draw_sheet

if TYPE_CHECKING:
    import plotly.graph_objects as go


def measure(params: OpSheetParams, recorder: Any) -> list[dict[str, Any]]:
    """Time the PUT of all routes into one rank's buffer, and into eight buffers of one device."""
    import torch
    from moe_kernels.combine import combine
    from moe_kernels.dispatch import dispatch
    from moe_kernels.peers import peer_table
    from moe_kernels.route_map import route_map

    torch.manual_seed(params.seed)
    T, K, D, E = params.tokens, params.top_k, params.width, params.experts
    x = torch.randn(T, D, device="cuda").bfloat16()
    experts = torch.randn(T, E, device="cuda").topk(K).indices
    counts = experts.flatten().bincount(minlength=E)
    cases = []
    for ranks in (1, 8):
        if E % ranks:
            continue
        # One source only: the other ranks send nothing, so the row count is T * K for any R.
        gathered = torch.zeros(ranks, E, dtype=torch.int64, device="cuda")
        gathered[0] = counts
        m = route_map(experts, gathered, rank=0, capacity=T * K)
        rows = T * K if ranks == 1 else 2 * T * K // ranks + 1
        buffers = peer_table([torch.empty(rows, D, dtype=torch.bfloat16, device="cuda") for _ in range(ranks)])
        weights = torch.rand(T, K, device="cuda")
        cost = moe_cost.dispatch(T, T * K, D, K)
        shape = f"{ranks} buffer{'s' if ranks > 1 else ''}"
        cases += [
            Case(
                "triton", shape, "forward", lambda m=m, b=buffers: dispatch(x, m.dst_rank, m.dst_row, b), cost, copies=3
            ),
            Case(
                "triton",
                f"{shape}, weighted",
                "forward",
                lambda m=m, b=buffers, w=weights: dispatch(x, m.dst_rank, m.dst_row, b, weights=w),
                cost,
                copies=3,
            ),
            Case(
                "triton",
                shape,
                "backward",
                lambda m=m, b=buffers: combine(b, m.dst_rank, m.dst_row),
                moe_cost.combine(T, T * K, D, K),
                copies=3,
            ),
        ]
        if ranks == 1:
            token = torch.arange(T, device="cuda").repeat_interleave(K)
            where = m.dst_row.flatten().long()
            source = torch.empty_like(token).scatter_(0, where, token)
            target = buffers.tensors[0]
            cases.append(
                Case(
                    "torch index_select",
                    shape,
                    "forward",
                    lambda source=source, target=target: torch.index_select(x, 0, source, out=target),
                    cost,
                    copies=3,
                )
            )
    return measure_sheet(cases, params, recorder)


def checks(result: Result) -> list[Check]:
    """At least 85 % of the copy bandwidth."""
    return bandwidth_checks(result, impl="triton")


def draw(result: Result) -> go.Figure:
    """Draw the sheet."""
    return draw_sheet(result, "Rowwise dispatch: share of the copy bandwidth", target_percent=85)


EXPERIMENT = Experiment(
    slug="op_dispatch",
    group="s08_sync_free",
    title="Rowwise dispatch: speed sheet",
    claim="One launch moves each kept row straight to its owner at 85 % of the copy bandwidth or more.",
    kind="measured",
    anchor="Section 8.5, Table 14",
    params=OpSheetParams,
    figure=draw,
    checks=checks,
    measure=measure,
    tests=("tests/kernels/test_dispatch.py",),
    recording="2026-11-29_h200_464a777",
)
