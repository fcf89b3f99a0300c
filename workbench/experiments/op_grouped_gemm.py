"""Speed sheet of the grouped GEMM: device offsets in Triton and torch, and the host loop that waits per expert."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.core.experiment import Check, Experiment, Result
from workbench.measure.sheet import Case, OpSheetParams, measure_sheet
from workbench.models import moe_cost
from workbench.views.sheet import draw_sheet, label, rows_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

SMALL_TOKENS = 256


def measure(params: OpSheetParams, recorder: Any) -> list[dict[str, Any]]:
    """Time up, its two gradients and down at full size, and up at a small one, by implementation."""
    import torch
    from moe_kernels.grouped_gemm import grouped_gemm, grouped_gemm_wgrad

    torch.manual_seed(params.seed)
    D, F, E = params.width, params.expert_width, params.experts
    up = (torch.randn(E, D, 2 * F, device="cuda") * D**-0.5).bfloat16()
    down = (torch.randn(E, F, D, device="cuda") * F**-0.5).bfloat16()
    cases = []
    for tokens in dict.fromkeys((params.tokens, min(SMALL_TOKENS, params.tokens))):
        rows = tokens * params.top_k
        counts = torch.randint(0, E, (rows,), device="cuda").bincount(minlength=E)
        offsets = counts.cumsum(0).int()
        x, h, a = (torch.randn(rows, n, device="cuda").bfloat16() for n in (D, 2 * F, F))
        small = "" if tokens == params.tokens else f", {tokens} tokens"
        for impl in ("triton", "torch", "host_loop"):
            work = {
                ("up", "forward"): (lambda i=impl, x=x, o=offsets: grouped_gemm(x, up, o, impl=i), D, 2 * F),
                ("up", "dgrad"): (
                    lambda i=impl, h=h, o=offsets: grouped_gemm(h, up.transpose(1, 2), o, impl=i),
                    2 * F,
                    D,
                ),
                ("up", "wgrad"): (lambda i=impl, x=x, h=h, o=offsets: grouped_gemm_wgrad(x, h, o, impl=i), D, 2 * F),
                ("down", "forward"): (lambda i=impl, a=a, o=offsets: grouped_gemm(a, down, o, impl=i), F, D),
            }
            for (matrix, direction), (call, k, n) in work.items():
                cost = moe_cost.grouped_gemm(rows, k, n, E)
                waits = impl == "host_loop"
                cases.append(Case(impl, matrix + small, direction, call, cost, waits=waits, copies=1 if waits else 2))
    recorder.set("workload", experts=E, top_k=params.top_k)
    return measure_sheet(cases, params, recorder)


def checks(result: Result) -> list[Check]:
    """One launch without a wait against a loop that waits; our kernel against torch's."""
    out = []
    for r in rows_of(result, impl="triton"):
        out.append(
            Check(f"{label(r)}: one launch, no host wait", r["launches"] == 1 and not r["host_waits"], r["launches"])
        )
    for r in rows_of(result, impl="host_loop", direction="forward"):
        ours = rows_of(result, impl="triton", direction="forward", shape=r["shape"])[0]
        ratio = r["submit_us_p50"] / ours["submit_us_p50"]
        out.append(
            Check(
                f"{label(r)}: holds the host at least ten times longer than device offsets do",
                ratio >= 10,
                f"{ratio:.0f}x",
            )
        )
    for r in rows_of(result, impl="triton"):
        other = rows_of(result, impl="torch", direction=r["direction"], shape=r["shape"])[0]
        ratio = other["time_us_p50"] / r["time_us_p50"]
        out.append(Check(f"{label(r)}: at least 0.8 of torch's speed", ratio >= 0.8, f"{ratio:.2f}x"))
    return out


def draw(result: Result) -> go.Figure:
    """Draw the sheet."""
    return draw_sheet(result, "Grouped GEMM: share of the floor")


EXPERIMENT = Experiment(
    slug="op_grouped_gemm",
    group="s08_sync_free",
    title="Grouped GEMM with device offsets: speed sheet",
    claim="Offsets that stay on the device need one launch and no wait; a host loop waits once per expert.",
    kind="measured",
    anchor="Section 8.5, Figures 36 and 37",
    params=OpSheetParams,
    figure=draw,
    checks=checks,
    measure=measure,
    tests=("tests/kernels/test_grouped_gemm.py",),
    recording="2026-11-29_h200_1a32063",
)
