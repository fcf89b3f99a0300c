"""Speed sheet of SwiGLU on the valid prefix: bandwidth, and time that follows the valid rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from workbench.core.experiment import Check, Result
from workbench.measure.sheet import Case, OpSheetParams
from workbench.models import moe_cost
from workbench.views.sheet import bandwidth_checks, label, op_sheet, rows_of

SHARES = (100, 75, 50, 25)
CAPACITY_FACTOR = 1.25


def cases(params: OpSheetParams) -> list[Case]:
    """Forward and backward at four valid shares of a capacity-shaped buffer, and torch on all rows."""
    import torch
    from moe_kernels.route_map import capacity_rows
    from moe_kernels.swiglu import swiglu, swiglu_backward

    rows, F = capacity_rows(params.tokens, params.top_k, CAPACITY_FACTOR), params.expert_width
    h = torch.randn(rows, 2 * F, device="cuda").bfloat16()
    out, grad = torch.empty(rows, F, dtype=h.dtype, device="cuda"), torch.randn(rows, F, device="cuda").bfloat16()
    d_h = torch.empty_like(h)
    ours, found = partial(Case, "triton", copies=3), []
    for share in SHARES:
        valid = rows * share // 100
        ends = torch.tensor([valid], dtype=torch.int32, device="cuda")
        forward, backward = partial(swiglu, h, ends, out=out), partial(swiglu_backward, h, grad, ends, out=d_h)
        found.append(ours(f"{share} % valid", "forward", forward, moe_cost.swiglu(valid, F)))
        found.append(ours(f"{share} % valid", "backward", backward, moe_cost.swiglu(valid, F, backward=True)))

    def in_torch() -> torch.Tensor:
        gate, up = h.chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up

    return [*found, Case("torch operations", "all rows", "forward", in_torch, moe_cost.swiglu(rows, F), copies=1)]


def checks(result: Result) -> Iterator[Check]:
    """At least 85 % of the copy bandwidth, and time in proportion to the valid rows."""
    yield from bandwidth_checks(result, impl="triton", shape="100 % valid")
    for direction in ("forward", "backward"):
        whole = rows_of(result, impl="triton", shape="100 % valid", direction=direction)[0]
        for share in SHARES[1:]:
            r = rows_of(result, impl="triton", shape=f"{share} % valid", direction=direction)[0]
            ratio = 100 * r["time_us_p50"] / whole["time_us_p50"]
            claim = f"{label(r)}: takes {share} % of the full time, within 5 points"
            yield Check(claim, abs(ratio - share) <= 5, f"{ratio:.1f} %")


EXPERIMENT = op_sheet(
    "op_swiglu",
    cases,
    "SwiGLU on the valid prefix: share of the copy bandwidth",
    claimed_percent=85,
    title="SwiGLU on the valid prefix: speed sheet",
    claim="Forward and backward touch the valid rows only; their time follows the valid count, which no host reads.",
    anchor="Section 8.5",
    checks=checks,
    tests=("tests/kernels/test_swiglu.py",),
    recording="2026-11-29_h200_464a777",
)
