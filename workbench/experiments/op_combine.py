"""Speed sheet of rowwise combine: weighted gather and its gradient against the device's own copy."""

from __future__ import annotations

from functools import partial

from workbench.measure.sheet import Case, OpSheetParams
from workbench.models import moe_cost
from workbench.views.sheet import bandwidth_checks, op_sheet


def cases(params: OpSheetParams) -> list[Case]:
    """The GET of all routes' rows with weights, without, and its backward into other and the same buffers."""
    import torch
    from moe_kernels.combine import combine, combine_backward
    from moe_kernels.peers import peer_table
    from moe_kernels.route_map import route_map

    T, K, D, E = params.tokens, params.top_k, params.width, params.experts
    experts = torch.randn(T, E, device="cuda").topk(K).indices
    counts = experts.flatten().bincount(minlength=E)
    m = route_map(experts, counts[None], rank=0, capacity=T * K)
    rows = peer_table([torch.randn(T * K, D, device="cuda").bfloat16()])
    grads = peer_table([torch.randn(T * K, D, device="cuda").bfloat16()])
    weights = torch.rand(T, K, device="cuda")
    out, pull = torch.empty(T, D, dtype=torch.bfloat16, device="cuda"), torch.randn(T, D, device="cuda").bfloat16()
    cost, cost_back = moe_cost.combine(T, T * K, D, K), moe_cost.combine_backward(T, T * K, D, K)
    where = m.dst_row.long()

    def in_torch() -> torch.Tensor:
        return (rows.tensors[0][where] * weights.unsqueeze(-1).bfloat16()).sum(1)

    forward = partial(combine, rows, m.dst_rank, m.dst_row, out=out)
    other, same = (partial(combine_backward, pull, b, m.dst_rank, m.dst_row, weights, grads) for b in (rows, grads))
    return [
        Case("triton", "weighted", "forward", partial(forward, weights=weights), cost, copies=3),
        Case("triton", "unweighted", "forward", forward, cost, copies=3),
        Case("torch operations", "weighted", "forward", in_torch, cost, copies=1),
        Case("triton", "other buffer", "backward", other, cost_back, copies=3),
        Case("triton", "in place", "backward", same, cost_back, copies=3),
    ]


EXPERIMENT = op_sheet(
    "op_combine",
    cases,
    "Rowwise combine: share of the copy bandwidth",
    claimed_percent=85,
    title="Rowwise combine: speed sheet",
    claim="Combine reads each kept row once and adds in FP32, at the copy bandwidth; its backward comes within 10 %.",
    anchor="Section 8.5, Table 14",
    checks=partial(bandwidth_checks, impl="triton"),
    tests=("tests/kernels/test_combine.py", "tests/kernels/test_combine_path.py"),
    recording="2026-11-29_h200_464a777",
)
