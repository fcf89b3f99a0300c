"""Speed sheet of rowwise combine: weighted gather and its gradient against the device's own copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.measure.sheet import Case, OpSheetParams, measure_sheet
from workbench.models import moe_cost
from workbench.views.sheet import bandwidth_checks, draw_sheet

if TYPE_CHECKING:
    import plotly.graph_objects as go


def measure(params: OpSheetParams, recorder: Any) -> list[dict[str, Any]]:
    """Time the GET of all routes' rows with weights, without, and its backward into other and the same buffers."""
    import torch
    from moe_kernels.combine import combine, combine_backward
    from moe_kernels.peers import peer_table
    from moe_kernels.route_map import route_map

    torch.manual_seed(params.seed)
    T, K, D, E = params.tokens, params.top_k, params.width, params.experts
    experts = torch.randn(T, E, device="cuda").topk(K).indices
    counts = experts.flatten().bincount(minlength=E)
    m = route_map(experts, counts[None], rank=0, capacity=T * K)
    rows = peer_table([torch.randn(T * K, D, device="cuda").bfloat16()])
    grads = peer_table([torch.randn(T * K, D, device="cuda").bfloat16()])
    weights = torch.rand(T, K, device="cuda")
    out, pull = torch.empty(T, D, dtype=torch.bfloat16, device="cuda"), torch.randn(T, D, device="cuda").bfloat16()
    forward, backward = moe_cost.combine(T, T * K, D, K), moe_cost.combine_backward(T, T * K, D, K)
    where = m.dst_row.long()

    def in_torch() -> torch.Tensor:
        return (rows.tensors[0][where] * weights.unsqueeze(-1).bfloat16()).sum(1)

    cases = [
        Case(
            "triton",
            "weighted",
            "forward",
            lambda: combine(rows, m.dst_rank, m.dst_row, weights, out=out),
            forward,
            copies=3,
        ),
        Case(
            "triton", "unweighted", "forward", lambda: combine(rows, m.dst_rank, m.dst_row, out=out), forward, copies=3
        ),
        Case("torch operations", "weighted", "forward", in_torch, forward, copies=1),
        Case(
            "triton",
            "other buffer",
            "backward",
            lambda: combine_backward(pull, rows, m.dst_rank, m.dst_row, weights, grads),
            backward,
            copies=3,
        ),
        Case(
            "triton",
            "in place",
            "backward",
            lambda: combine_backward(pull, grads, m.dst_rank, m.dst_row, weights, grads),
            backward,
            copies=3,
        ),
    ]
    return measure_sheet(cases, params, recorder)


def checks(result: Result) -> list[Check]:
    """At least 85 % of the copy bandwidth."""
    return bandwidth_checks(result, impl="triton")


def draw(result: Result) -> go.Figure:
    """Draw the sheet."""
    return draw_sheet(result, "Rowwise combine: share of the copy bandwidth", target_percent=85)


EXPERIMENT = Experiment(
    slug="op_combine",
    group="s08_sync_free",
    title="Rowwise combine: speed sheet",
    claim="Combine reads each kept row once and adds in FP32, at the copy bandwidth; its backward comes within 10 %.",
    kind="measured",
    anchor="Section 8.5, Table 14",
    params=OpSheetParams,
    figure=draw,
    checks=checks,
    measure=measure,
    tests=("tests/kernels/test_combine.py", "tests/kernels/test_combine_path.py"),
    recording="2026-11-29_h200_464a777",
)
