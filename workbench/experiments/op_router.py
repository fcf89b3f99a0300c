"""Speed sheet of the router: logits, gating with top-k, counts and losses, and the gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from workbench.core.experiment import Check, Result
from workbench.measure.sheet import Case, OpSheetParams
from workbench.models import moe_cost
from workbench.views.sheet import IMPLS, label, op_sheet, rows_of

LOGITS = "BF16 product, FP32 out"
"""The router's logits and their gradient are torch's products on pieces: no kernel of ours."""


def cases(params: OpSheetParams) -> list[Case]:
    """The kernels and the same router as torch operations."""
    import torch
    from moe_kernels.router import router_logits
    from moe_kernels.router.api import route_logits

    T, E, K, D = params.tokens, params.experts, params.top_k, params.width
    x = torch.randn(T, D, device="cuda").bfloat16()
    weight = (torch.randn(E, D, device="cuda") * D**-0.5).bfloat16()
    d_logits = torch.randn_like(router_logits(x, weight))

    def in_torch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x.float() @ weight.float().t()

    # Capture runs on a side stream, and a backward runs on its forward's stream: both are captured together.
    def both(forward: Callable[..., Any], leaves: tuple[Any, ...], pulls: Any) -> Any:
        return torch.autograd.grad(forward(*leaves), leaves, pulls)

    cost = moe_cost.router_logits(T, D, E)
    cost_both = moe_cost.Cost(2 * cost.bytes + T * D * 2 + E * D * 2, 3 * cost.flop)
    leaves = (x.clone().requires_grad_(), weight.clone().requires_grad_())
    found = []
    for impl, logits in ((LOGITS, router_logits), ("torch FP32", in_torch)):
        found.append(Case(impl, "logits", "forward", partial(logits, x, weight), cost))
        learned = partial(both, logits, leaves, d_logits)
        found.append(Case(impl, "logits", "forward and backward", learned, cost_both))
    pull, one = torch.randn(T, K, device="cuda"), torch.ones((), device="cuda")
    scores = router_logits(x, weight)
    leaf = scores.clone().requires_grad_()
    cost, back = moe_cost.router(T, E, K), moe_cost.router(T, E, K, backward=True)
    for gating in ("softmax", "sigmoid"):
        for impl, name in IMPLS.items():
            gate = partial(route_logits, top_k=K, gating=gating, impl=impl)

            def differentiable(x: torch.Tensor, gate=gate) -> tuple[torch.Tensor, ...]:
                out = gate(x)
                return out.weights, out.lbl, out.z_loss

            learned = partial(both, differentiable, (leaf,), (pull, one, one))
            found.append(Case(name, f"gate, {gating}", "forward", partial(gate, scores), cost))
            found.append(
                Case(name, f"gate, {gating}", "forward and backward", learned, moe_cost.Cost(cost.bytes + back.bytes))
            )
    return found


def checks(result: Result) -> Iterator[Check]:
    """Launch counts, and no slower than torch operations."""
    for r in rows_of(result, impl="triton", direction="forward"):
        if r["shape"].startswith("gate"):
            yield Check(f"{label(r)}: counts and losses in at most 2 launches", r["launches"] <= 2, r["launches"])
    ours = ("triton", LOGITS)
    for r in [*rows_of(result, impl=LOGITS), *rows_of(result, impl="triton")]:
        other = [o for o in rows_of(result, shape=r["shape"], direction=r["direction"]) if o["impl"] not in ours]
        if other:
            ratio = other[0]["time_us_p50"] / r["time_us_p50"]
            yield Check(f"{label(r)}: faster than {other[0]['impl']}", ratio > 1, f"{ratio:.2f}x")


EXPERIMENT = op_sheet(
    "op_router",
    cases,
    "Router: time against its floor",
    title="Router: speed sheet",
    claim="Gating, top-k, counts per expert and both losses take two launches and no host read.",
    anchor="Section 8.5",
    checks=checks,
    tests=("tests/kernels/test_router.py",),
    recording="2026-11-29_h200_1a32063",
)
