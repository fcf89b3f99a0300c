"""Small cases of every op of `moe_kernels.OPS`, for compute-sanitizer; each result is compared with the reference.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \\
        python3 tests/kernels/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 9 $(python3 tests/kernels/sanitize.py --names) \\
        python3 tests/kernels/sanitize.py --own

Without its cache, torch's allocator gives each tensor memory of its own, so that an access past a tensor is seen.
`--own` leaves out kernels of others, the block (in it the race checker aborts with an internal error at a product of
torch's) and the CUDA kernels, whose barriers in memory it does not follow. `--names` prints the checker's filter for
our Triton kernels.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels"))

import torch
from moe_kernels import mxfp8
from moe_kernels.block import BlockConfig, RoutedBlock
from moe_kernels.combine import combine, combine_backward
from moe_kernels.dispatch import dispatch
from moe_kernels.grouped_gemm import grouped_gemm, grouped_gemm_wgrad, grouped_linear
from moe_kernels.mxfp8.linear import exact_operand
from moe_kernels.mxfp8.rows import cuda_ready
from moe_kernels.peers import peer_table
from moe_kernels.route_map import route_map
from moe_kernels.router import router
from moe_kernels.swiglu import swiglu, swiglu_backward
from moe_kernels.transport import VirtualTransport

GPU = torch.device("cuda", 0)
KERNELS = (
    "_combine_",
    "_dispatch_kernel",
    "_gemm_kernel",
    "_mxfp8_gemm_kernel",
    "_rows_kernel",
    "_wgrad_kernel",
    "_route_kernel",
    "_reduce_kernel",
    "_router_backward_kernel",
    "_swiglu_backward_kernel",
    "_forward_kernel",
    "_count_kernel",
    "_scan_kernel",
    "_map_kernel",
)
DTYPES = (torch.bfloat16, torch.float32)


def agree(name: str, got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    """Raise where the norm of the difference exceeds `tolerance` times the norm; print the case otherwise."""
    error = ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)).item()
    if not error <= tolerance:
        raise AssertionError(f"{name}: relative error {error:.2e}, allowed {tolerance:.0e}")
    print(f"ok {name}", flush=True)


def offsets_of(sizes: list[int]) -> torch.Tensor:
    """Return int32 inclusive cumulative offsets of group sizes."""
    return torch.tensor(sizes, device=GPU).cumsum(0).to(torch.int32)


def routes(tokens: int, experts: int, top_k: int, capacity: int):
    """Maps of one rank with invalid ids and, where the capacity is small, drops."""
    ids = torch.randint(-1, experts + 1, (tokens, top_k), device=GPU)
    valid = (ids >= 0) & (ids < experts)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=GPU).scatter_add_(
        0, torch.where(valid, ids, experts).flatten(), torch.ones(ids.numel(), dtype=torch.int64, device=GPU)
    )[:experts]
    got = route_map(ids, counts[None].contiguous(), rank=0, capacity=capacity)
    want = route_map(ids, counts[None].contiguous(), rank=0, capacity=capacity, impl="reference")
    agree(f"route_map {tokens} x {top_k} to {experts}, capacity {capacity}", got.dst_row, want.dst_row, 0)
    return got


def movement(dtype: torch.dtype, width: int) -> None:
    """Dispatch, combine and its gradient, in place and not."""
    m = routes(37, 6, 3, 80)
    x, weights = torch.randn(37, width, device=GPU).to(dtype), torch.rand(37, 3, device=GPU)
    rows = [torch.full((80, width), float("nan"), dtype=dtype, device=GPU) for _ in range(2)]
    for buffer, impl in zip(rows, ("triton", "reference")):
        dispatch(x, m.dst_rank, m.dst_row, peer_table([buffer]), weights=weights, impl=impl)
    valid = int(m.offsets[-1])
    agree(f"dispatch {dtype} {width}", rows[0][:valid], rows[1][:valid], 0)
    table = peer_table([rows[0]])
    got = combine(table, m.dst_rank, m.dst_row, weights)
    agree(f"combine {dtype} {width}", got, combine(table, m.dst_rank, m.dst_row, weights, impl="reference"), 2.0**-8)
    for in_place in (False, True):
        results = []
        for impl in ("triton", "reference"):
            source = peer_table([rows[1].clone()])
            target = source if in_place else peer_table([torch.zeros_like(rows[1])])
            d_w = combine_backward(x, source, m.dst_rank, m.dst_row, weights, target, impl=impl)
            results.append((d_w, target.tensors[0][:valid]))
        name = f"combine backward {dtype} {width}{', in place' if in_place else ''}"
        agree(name + ", weights", results[0][0], results[1][0], 1e-5)
        agree(name + ", rows", results[0][1], results[1][1], 2.0**-8)


def products(dtype: torch.dtype, k: int, n: int, impls: tuple[str, ...]) -> None:
    """Grouped product, its two gradients and SwiGLU, on odd, empty and single-row groups."""
    sizes = [70, 0, 1, 133]
    rows, offsets = sum(sizes), offsets_of(sizes)
    a, grad = (torch.randn(rows + 9, c, device=GPU).to(dtype) for c in (k, n))
    b = torch.randn(4, k, n, device=GPU).to(dtype)
    a[rows:], grad[rows:] = float("nan"), float("nan")
    for impl in impls:
        for name, call, valid in (
            ("forward", lambda i: grouped_gemm(a, b, offsets, impl=i), rows),
            ("dgrad", lambda i: grouped_gemm(grad, b.transpose(1, 2), offsets, impl=i), rows),
            ("wgrad", lambda i: grouped_gemm_wgrad(a, grad, offsets, impl=i), 4),
        ):
            agree(f"grouped gemm {impl} {name} {dtype} {k} x {n}", call(impl)[:valid], call("reference")[:valid], 1e-2)
    for impl in impls:
        results = []
        for i in (impl, "reference"):
            leaves = [t.clone().requires_grad_() for t in (a, b)]
            grouped_linear(*leaves, offsets, impl=i).backward(grad)
            results.append([leaves[0].grad[:rows], leaves[1].grad])
        for name, got, want in zip(("rows", "weight"), *results):
            agree(f"grouped linear {impl}, gradient of {name} {dtype} {k} x {n}", got, want, 1e-2)
    got, want = swiglu(grad, offsets), swiglu(grad, offsets, impl="reference")
    agree(f"swiglu {dtype} {n}", got[:rows], want[:rows], 1e-2)
    pull = torch.randn(rows + 9, n // 2, device=GPU).to(dtype)
    got, want = (swiglu_backward(grad, pull, offsets, impl=i) for i in ("triton", "reference"))
    agree(f"swiglu backward {dtype} {n}", got[:rows], want[:rows], 1e-2)


def mxfp8_rows(impl: str, width: int) -> None:
    """Quantise to every target, fold, and quantise behind SwiGLU where the implementation does."""
    x = torch.randn(37, width, device=GPU).bfloat16()
    x[3], x[4, :32] = 0, 1e-3
    for target in ("canonical", "folded", "row"):
        got, want = (mxfp8.dequantize(mxfp8.quantize(x, target=target, impl=i)) for i in (impl, "reference"))
        agree(f"mxfp8 quantise {impl} {target} {width}", got, want, 0)
    canonical = mxfp8.quantize(x, impl="reference")
    got, want = (mxfp8.dequantize(mxfp8.fold(canonical, impl=i)) for i in (impl, "reference"))
    agree(f"mxfp8 fold {impl} {width}", got, want, 0)
    if impl != "cuda":
        h = torch.randn(37, 2 * width, device=GPU).bfloat16()
        got, want = (mxfp8.dequantize(mxfp8.swiglu_quantize(h, impl=i)) for i in (impl, "reference"))
        agree(f"mxfp8 quantise behind swiglu {impl} {width}", got, want, 1e-2)


def mxfp8_products(impl: str, k: int, n: int) -> None:
    """Folded, quantising and exact products on odd, empty and single-row groups, and the layer with its gradients."""
    sizes = [70, 0, 1, 133]
    rows, ends = sum(sizes), offsets_of(sizes)
    x, w = torch.randn(rows + 9, k, device=GPU).bfloat16(), torch.randn(4, n, k, device=GPU).bfloat16()
    folded = mxfp8.QuantizedWeight(w, impl=impl).forward
    inputs = {"folded": mxfp8.quantize(x, target="folded", impl=impl), "canonical": mxfp8.quantize(x), "bfloat16": x}
    for name, a in inputs.items():
        got, want = (mxfp8.grouped_gemm(a, folded, ends, impl=i)[:rows] for i in (impl, "reference"))
        agree(f"mxfp8 product {impl} of {name} rows {k} x {n}", got, want, 1e-2)
    if impl != "cuda":
        exact = exact_operand(w, impl=impl)
        got, want = (mxfp8.grouped_gemm(mxfp8.quantize(x), exact, ends, impl=i)[:rows] for i in (impl, "reference"))
        agree(f"mxfp8 exact product {impl} {k} x {n}", got, want, 1e-2)
    results = []
    for i in (impl, "reference"):
        torch.manual_seed(3)
        layer = mxfp8.GroupedLinear(4, k, n, impl=i, device=GPU)
        leaf = x.clone().requires_grad_()
        layer(leaf, ends).square().sum().backward()
        y = mxfp8.grouped_linear(x, layer.weight, ends, impl=i)
        results.append({"output": y, "rows": leaf.grad, "weight": layer.weight.grad})
    for name, want in results[1].items():
        agree(f"mxfp8 layer {impl} {k} x {n}, {name}", results[0][name], want, 3e-2)


def routing(dtype: torch.dtype, gating: str, experts: int, top_k: int) -> None:
    """Router forward and gradient, logits included."""
    data = [torch.randn(s, device=GPU).to(dtype) for s in ((51, 48), (experts, 48))]
    results = []
    for impl in ("triton", "reference"):
        x, w = (t.clone().requires_grad_() for t in data)
        out = router(x, w, top_k, gating=gating, impl=impl)
        (out.weights.square().sum() + out.lbl + out.z_loss).backward()
        results.append((out, x.grad, w.grad))
    (got, *got_grads), (want, *want_grads) = results
    agree(f"router {gating} {dtype} {top_k} of {experts}, experts", got.expert_index, want.expert_index, 0)
    agree(f"router {gating} {dtype} {top_k} of {experts}, weights", got.weights, want.weights, 1e-5)
    for name, g, w in zip(("rows", "weight"), got_grads, want_grads):
        agree(f"router {gating} {dtype} {top_k} of {experts}, gradient of {name}", g, w, 2e-2)


def block(path: str, ranks: int, factor: float, dtype: torch.dtype) -> None:
    """The routed block, forward and backward, against its reference implementation on the same path."""
    config = BlockConfig(width=64, expert_width=32, num_experts=8, top_k=2, capacity_factor=factor, shared_width=32)
    results = []
    for impl in (None, "reference"):
        options = {"transport": VirtualTransport(ranks, "cuda")} if path == "rowwise" else {}
        one = RoutedBlock(
            config, path=path, seed=1, device="cuda", dtype=dtype, impl=impl, grouped_gemm=impl, **options
        )
        torch.manual_seed(7)
        x = torch.randn(48, 64, device=GPU).to(dtype).requires_grad_()
        y = one(x)
        y.backward(torch.randn(48, 64, device=GPU).to(dtype))
        results.append({"output": y.detach(), "x": x.grad, **{n: p.grad for n, p in one.named_parameters()}})
    for name, want in results[1].items():
        agree(f"block {path} x{ranks} cf {factor} {dtype}, {name}", results[0][name], want, 3e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--own", action="store_true", help="only cases whose kernels are ours")
    parser.add_argument("--names", action="store_true", help="print the filter for our kernels and stop")
    args = parser.parse_args()
    if args.names:
        print(*(f"--kernel-name kns={name}" for name in KERNELS))
        return
    own = args.own
    torch.manual_seed(0)
    routes(0, 4, 2, 1)
    routes(300, 5, 2, 90)
    for dtype in DTYPES:
        for width in (40, 33):
            movement(dtype, width)
        impls = ("triton",) if own or dtype is not torch.bfloat16 else ("triton", "torch")
        products(dtype, 64, 48, impls)
        products(dtype, 33, 18, ("triton",))
        for gating in ("softmax", "sigmoid"):
            routing(dtype, gating, 5, 2)
    routing(torch.float32, "softmax", 128, 8)
    for impl in ("cuda", "triton") if not own and cuda_ready(0) else ("triton",):
        for width in (96, 544):
            mxfp8_rows(impl, width)
        mxfp8_products(impl, 96, 64)
        mxfp8_products(impl, 160, 288)
    if not own:
        for dtype in DTYPES:
            for ranks, factor in ((1, 1.25), (4, 8.0), (4, 0.5)):
                block("rowwise", ranks, factor, dtype)
            block("no_ep", 1, 1.25, dtype)
        block("synchronized", 1, 1.25, torch.bfloat16)
    torch.cuda.synchronize()
    print("all cases agree")


if __name__ == "__main__":
    main()
