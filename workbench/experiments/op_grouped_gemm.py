"""Speed sheet of the grouped GEMM: device offsets in Triton and torch, and the host loop that waits per expert."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from workbench.core.experiment import Check, Result
from workbench.measure.sheet import Case, OpSheetParams
from workbench.models import moe_cost
from workbench.views.sheet import label, op_sheet, rows_of

SMALL_TOKENS = 256


def cases(params: OpSheetParams) -> list[Case]:
    """Up, its two gradients and down at full size, and up at a small one, by implementation."""
    import torch
    from moe_kernels.grouped_gemm import grouped_gemm, grouped_gemm_wgrad

    D, F, E = params.width, params.expert_width, params.experts
    up = (torch.randn(E, D, 2 * F, device="cuda") * D**-0.5).bfloat16()
    down = (torch.randn(E, F, D, device="cuda") * F**-0.5).bfloat16()
    found = []
    for tokens in dict.fromkeys((params.tokens, min(SMALL_TOKENS, params.tokens))):
        rows = tokens * params.top_k
        counts = torch.randint(0, E, (rows,), device="cuda").bincount(minlength=E)
        offsets = counts.cumsum(0).int()
        x, h, a = (torch.randn(rows, n, device="cuda").bfloat16() for n in (D, 2 * F, F))
        small = "" if tokens == params.tokens else f", {tokens} tokens"
        work = {
            ("up", "forward"): (partial(grouped_gemm, x, up, offsets), D, 2 * F),
            ("up", "dgrad"): (partial(grouped_gemm, h, up.transpose(1, 2), offsets), 2 * F, D),
            ("up", "wgrad"): (partial(grouped_gemm_wgrad, x, h, offsets), D, 2 * F),
            ("down", "forward"): (partial(grouped_gemm, a, down, offsets), F, D),
        }
        for impl in ("triton", "torch", "host_loop"):
            waits = impl == "host_loop"
            for (matrix, direction), (product, k, n) in work.items():
                call, cost = partial(product, impl=impl), moe_cost.grouped_gemm(rows, k, n, E)
                found.append(Case(impl, matrix + small, direction, call, cost, waits, copies=1 if waits else 2))
    return found


def checks(result: Result) -> Iterator[Check]:
    """One launch without a wait against a loop that waits; our kernel against torch's."""
    for r in rows_of(result, impl="triton"):
        alone = r["launches"] == 1 and not r["host_waits"]
        yield Check(f"{label(r)}: one launch, no host wait", alone, r["launches"])
    for r in rows_of(result, impl="host_loop", direction="forward"):
        ours = rows_of(result, impl="triton", direction="forward", shape=r["shape"])[0]
        ratio = r["submit_us_p50"] / ours["submit_us_p50"]
        claim = f"{label(r)}: holds the host at least ten times longer than device offsets do"
        yield Check(claim, ratio >= 10, f"{ratio:.0f}x")
    for r in rows_of(result, impl="triton"):
        other = rows_of(result, impl="torch", direction=r["direction"], shape=r["shape"])[0]
        ratio = other["time_us_p50"] / r["time_us_p50"]
        yield Check(f"{label(r)}: at least 0.8 of torch's speed", ratio >= 0.8, f"{ratio:.2f}x")


EXPERIMENT = op_sheet(
    "op_grouped_gemm",
    cases,
    "Grouped GEMM: share of the floor",
    title="Grouped GEMM with device offsets: speed sheet",
    claim="Offsets that stay on the device need one launch and no wait; a host loop waits once per expert.",
    anchor="Section 8.5, Figures 36 and 37",
    checks=checks,
    tests=("tests/kernels/test_grouped_gemm.py",),
    recording="2026-11-29_h200_1a32063",
)
