"""Speed sheet of the router: logits, gating with top-k, counts and losses, and the gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.measure.sheet import Case, OpSheetParams, measure_sheet
from workbench.models import moe_cost
from workbench.views.sheet import draw_sheet, label, rows_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

LOGITS = "BF16 product, FP32 out"
"""The router's logits and their gradient are torch's products on pieces: no kernel of ours."""


def measure(params: OpSheetParams, recorder: Any) -> list[dict[str, Any]]:
    """Time the kernels and the same router as torch operations."""
    import torch
    from moe_kernels.router import router_logits
    from moe_kernels.router.api import route_logits

    torch.manual_seed(params.seed)
    T, E, K = params.tokens, params.experts, params.top_k
    x = torch.randn(T, params.width, device="cuda").bfloat16()
    weight = (torch.randn(E, params.width, device="cuda") * params.width**-0.5).bfloat16()
    logits = router_logits(x, weight)
    d_logits = torch.randn_like(logits)
    wx, ww = x.clone().requires_grad_(), weight.clone().requires_grad_()
    cases = [
        Case(LOGITS, "logits", "forward", lambda: router_logits(x, weight), moe_cost.router_logits(T, params.width, E)),
        Case(
            "torch FP32",
            "logits",
            "forward",
            lambda: x.float() @ weight.float().t(),
            moe_cost.router_logits(T, params.width, E),
        ),
    ]
    # Capture runs on a side stream, and a backward runs on its forward's stream: both are captured together.
    both = moe_cost.router_logits(T, params.width, E)
    both = moe_cost.Cost(2 * both.bytes + T * params.width * 2 + E * params.width * 2, 3 * both.flop)
    for impl, forward in ((LOGITS, lambda: router_logits(wx, ww)), ("torch FP32", lambda: wx.float() @ ww.float().t())):

        def step(forward=forward) -> Any:
            return torch.autograd.grad(forward(), (wx, ww), d_logits)

        cases.append(Case(impl, "logits", "forward and backward", step, both))
    pull, one = torch.randn(T, K, device="cuda"), torch.ones((), device="cuda")
    leaf = logits.clone().requires_grad_()
    forward_cost, backward_cost = moe_cost.router(T, E, K), moe_cost.router(T, E, K, backward=True)
    for gating in ("softmax", "sigmoid"):
        for impl in ("triton", "reference"):
            name = "triton" if impl == "triton" else "torch operations"

            def gate(x=logits, gating=gating, impl=impl) -> Any:
                return route_logits(x, K, gating=gating, impl=impl)

            def learn(gate=gate) -> Any:
                out = gate(leaf)
                return torch.autograd.grad((out.weights, out.lbl, out.z_loss), leaf, (pull, one, one))

            cost = moe_cost.Cost(forward_cost.bytes + backward_cost.bytes)
            cases.append(Case(name, f"gate, {gating}", "forward", gate, forward_cost))
            cases.append(Case(name, f"gate, {gating}", "forward and backward", learn, cost))
    return measure_sheet(cases, params, recorder)


def checks(result: Result) -> list[Check]:
    """Launch counts, and no slower than torch operations."""
    out = []
    for r in rows_of(result, impl="triton", direction="forward"):
        if r["shape"].startswith("gate"):
            out.append(Check(f"{label(r)}: counts and losses in at most 2 launches", r["launches"] <= 2, r["launches"]))
    ours = ("triton", LOGITS)
    for r in [*rows_of(result, impl=LOGITS), *rows_of(result, impl="triton")]:
        other = [
            o
            for o in result.table.to_dicts()
            if o["impl"] not in ours and o["shape"] == r["shape"] and o["direction"] == r["direction"]
        ]
        if other:
            ratio = other[0]["time_us_p50"] / r["time_us_p50"]
            out.append(Check(f"{label(r)}: faster than {other[0]['impl']}", ratio > 1, f"{ratio:.2f}x"))
    return out


def draw(result: Result) -> go.Figure:
    """Draw the sheet."""
    return draw_sheet(result, "Router: time against its floor")


EXPERIMENT = Experiment(
    slug="op_router",
    group="s08_sync_free",
    title="Router: speed sheet",
    claim="Gating, top-k, counts per expert and both losses take two launches and no host read.",
    kind="measured",
    anchor="Section 8.5",
    params=OpSheetParams,
    figure=draw,
    checks=checks,
    measure=measure,
    tests=("tests/kernels/test_router.py",),
    recording="2026-11-29_h200_1a32063",
)
