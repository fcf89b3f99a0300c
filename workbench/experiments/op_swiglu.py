"""Speed sheet of SwiGLU on the valid prefix: bandwidth, and time that follows the valid rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.measure.sheet import Case, OpSheetParams, measure_sheet
from workbench.models import moe_cost
from workbench.views.sheet import bandwidth_checks, draw_sheet, label, rows_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

SHARES = (100, 75, 50, 25)
CAPACITY_FACTOR = 1.25


def measure(params: OpSheetParams, recorder: Any) -> list[dict[str, Any]]:
    """Time forward and backward at four valid shares of a capacity-shaped buffer, and torch on all rows."""
    import torch
    from moe_kernels.route_map import capacity_rows
    from moe_kernels.swiglu import swiglu, swiglu_backward

    torch.manual_seed(params.seed)
    rows = capacity_rows(params.tokens, params.top_k, CAPACITY_FACTOR)
    F = params.expert_width
    h = torch.randn(rows, 2 * F, device="cuda").bfloat16()
    out, grad = torch.empty(rows, F, dtype=h.dtype, device="cuda"), torch.randn(rows, F, device="cuda").bfloat16()
    d_h = torch.empty_like(h)
    cases = []
    for share in SHARES:
        valid = rows * share // 100
        offsets = torch.tensor([valid], dtype=torch.int32, device="cuda")
        cases += [
            Case(
                "triton",
                f"{share} % valid",
                "forward",
                lambda o=offsets: swiglu(h, o, out=out),
                moe_cost.swiglu(valid, F),
                copies=3,
            ),
            Case(
                "triton",
                f"{share} % valid",
                "backward",
                lambda o=offsets: swiglu_backward(h, grad, o, out=d_h),
                moe_cost.swiglu(valid, F, backward=True),
                copies=3,
            ),
        ]

    def in_torch() -> torch.Tensor:
        gate, up = h.chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up

    cases.append(Case("torch operations", "all rows", "forward", in_torch, moe_cost.swiglu(rows, F), copies=1))
    return measure_sheet(cases, params, recorder)


def checks(result: Result) -> list[Check]:
    """At least 85 % of the copy bandwidth, and time in proportion to the valid rows."""
    out = bandwidth_checks(result, impl="triton", shape="100 % valid")
    for direction in ("forward", "backward"):
        whole = rows_of(result, impl="triton", shape="100 % valid", direction=direction)[0]
        for share in SHARES[1:]:
            r = rows_of(result, impl="triton", shape=f"{share} % valid", direction=direction)[0]
            ratio = 100 * r["time_us_p50"] / whole["time_us_p50"]
            out.append(
                Check(
                    f"{label(r)}: takes {share} % of the full time, within 5 points",
                    abs(ratio - share) <= 5,
                    f"{ratio:.1f} %",
                )
            )
    return out


def draw(result: Result) -> go.Figure:
    """Draw the sheet."""
    return draw_sheet(result, "SwiGLU on the valid prefix: share of the copy bandwidth", target_percent=85)


EXPERIMENT = Experiment(
    slug="op_swiglu",
    group="s08_sync_free",
    title="SwiGLU on the valid prefix: speed sheet",
    claim="Forward and backward touch the valid rows only; their time follows the valid count, which no host reads.",
    kind="measured",
    anchor="Section 8.5",
    params=OpSheetParams,
    figure=draw,
    checks=checks,
    measure=measure,
    tests=("tests/kernels/test_swiglu.py",),
    recording="2026-11-29_h200_464a777",
)
