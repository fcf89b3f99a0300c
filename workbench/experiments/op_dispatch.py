"""Speed sheet of rowwise dispatch: bytes moved against the device's own copy."""

from __future__ import annotations

from functools import partial

from workbench.measure.sheet import Case, OpSheetParams
from workbench.models import moe_cost
from workbench.views.sheet import bandwidth_checks, op_sheet


def cases(params: OpSheetParams) -> list[Case]:
    """The PUT of all routes into one rank's buffer, and into eight buffers of one device."""
    import torch
    from moe_kernels.combine import combine
    from moe_kernels.dispatch import dispatch
    from moe_kernels.peers import peer_table
    from moe_kernels.route_map import route_map

    T, K, D, E = params.tokens, params.top_k, params.width, params.experts
    x = torch.randn(T, D, device="cuda").bfloat16()
    experts = torch.randn(T, E, device="cuda").topk(K).indices
    counts = experts.flatten().bincount(minlength=E)
    cost, cost_back = moe_cost.dispatch(T, T * K, D, K), moe_cost.combine(T, T * K, D, K)
    ours, found = partial(Case, "triton", copies=3), []
    for ranks in (r for r in (1, 8) if E % r == 0):
        # One source only: the other ranks send nothing, so the row count is T * K for any R.
        gathered = torch.zeros(ranks, E, dtype=torch.int64, device="cuda")
        gathered[0] = counts
        m = route_map(experts, gathered, rank=0, capacity=T * K)
        rows = T * K if ranks == 1 else 2 * T * K // ranks + 1
        buffers = peer_table([torch.empty(rows, D, dtype=torch.bfloat16, device="cuda") for _ in range(ranks)])
        weights = torch.rand(T, K, device="cuda")
        shape = f"{ranks} buffer{'s' if ranks > 1 else ''}"
        put = partial(dispatch, x, m.dst_rank, m.dst_row, buffers)
        found += [
            ours(shape, "forward", put, cost),
            ours(f"{shape}, weighted", "forward", partial(put, weights=weights), cost),
            ours(shape, "backward", partial(combine, buffers, m.dst_rank, m.dst_row), cost_back),
        ]
        if ranks == 1:
            token = torch.arange(T, device="cuda").repeat_interleave(K)
            source = torch.empty_like(token).scatter_(0, m.dst_row.flatten().long(), token)
            select = partial(torch.index_select, x, 0, source, out=buffers.tensors[0])
            found.append(Case("torch index_select", shape, "forward", select, cost, copies=3))
    return found


EXPERIMENT = op_sheet(
    "op_dispatch",
    cases,
    "Rowwise dispatch: share of the copy bandwidth",
    claimed_percent=85,
    title="Rowwise dispatch: speed sheet",
    claim="One launch moves each kept row straight to its owner at 85 % of the copy bandwidth or more.",
    anchor="Section 8.5, Table 14",
    checks=partial(bandwidth_checks, impl="triton"),
    tests=("tests/kernels/test_dispatch.py",),
    recording="2026-11-29_h200_464a777",
)
