"""What every op refuses by name: devices without data, gradients it would lose, second derivatives, torch.func."""

from __future__ import annotations

import pytest
import torch
from moe_kernels import mxfp8
from moe_kernels.block import BlockConfig, RoutedBlock
from moe_kernels.combine import combine, combine_backward
from moe_kernels.dispatch import dispatch
from moe_kernels.grouped_gemm import grouped_gemm, grouped_gemm_wgrad, grouped_linear
from moe_kernels.peers import PeerTable, peer_table
from moe_kernels.route_map import route_map
from moe_kernels.router import router
from moe_kernels.router.api import route_logits
from moe_kernels.swiglu import swiglu, swiglu_backward
from moe_kernels.transport import VirtualTransport

CONFIG = BlockConfig(width=32, expert_width=16, num_experts=4, top_k=2, capacity_factor=8.0, shared_width=16)
IMPLS = pytest.mark.parametrize("impl", [None, "triton", "reference"])


def table(device, dtype=torch.float32) -> PeerTable:
    return peer_table([torch.zeros(8, 32, device=device, dtype=dtype)])


def maps(device) -> list[torch.Tensor]:
    rows = torch.arange(8, dtype=torch.int32, device=device).view(4, 2)
    return [torch.zeros_like(rows), rows]


def offsets(device) -> torch.Tensor:
    return torch.tensor([1, 4], dtype=torch.int32, device=device)


def floats(*shape, device, grad=False) -> torch.Tensor:
    return torch.ones(*shape, device=device, requires_grad=grad)


def weight(device) -> mxfp8.Folded:
    """Ones with one scale a row, made by hand: a device without data quantises nothing."""
    scale = torch.full((2, 32), 127, dtype=torch.uint8, device=device)
    return mxfp8.Folded(torch.ones(2, 32, 32, device=device).to(torch.float8_e4m3fn), scale)


def canonical(device) -> mxfp8.MX:
    scales = torch.full((4, 1), 127, dtype=torch.uint8, device=device)
    return mxfp8.MX(torch.ones(4, 32, device=device).to(torch.float8_e4m3fn), scales)


# Each op on tensors of one device; `g` tells which of its tensors require a gradient, `out` included.
CALLS = {
    "router.router": lambda d, i, g: route_logits(floats(4, 8, device=d), 2, impl=i),
    "route_map.route_map": lambda d, i, g: route_map(
        maps(d)[1], torch.ones(1, 8, dtype=torch.int64, device=d), rank=0, capacity=8, impl=i
    ),
    "swiglu.swiglu": lambda d, i, g: swiglu(floats(4, 32, device=d), offsets(d), impl=i),
    "swiglu.swiglu out": lambda d, i, g: swiglu(
        floats(4, 64, device=d, grad=g == 0), offsets(d), out=floats(4, 32, device=d, grad=g == 1), impl=i
    ),
    "swiglu.swiglu_backward": lambda d, i, g: swiglu_backward(
        floats(4, 64, device=d, grad=g == 0), floats(4, 32, device=d, grad=g == 1), offsets(d), impl=i
    ),
    "grouped_gemm.grouped_gemm": lambda d, i, g: grouped_gemm(
        floats(4, 32, device=d, grad=g == 0), floats(2, 32, 32, device=d, grad=g == 1), offsets(d), impl=i
    ),
    "grouped_gemm.grouped_gemm out": lambda d, i, g: grouped_gemm(
        floats(4, 32, device=d), floats(2, 32, 32, device=d), offsets(d), out=floats(4, 32, device=d, grad=True), impl=i
    ),
    "grouped_gemm.grouped_gemm_wgrad": lambda d, i, g: grouped_gemm_wgrad(
        floats(4, 32, device=d, grad=g == 0), floats(4, 32, device=d, grad=g == 1), offsets(d), impl=i
    ),
    "mxfp8.quantize": lambda d, i, g: mxfp8.quantize(floats(4, 32, device=d), impl=i),
    "mxfp8.fold": lambda d, i, g: mxfp8.fold(canonical(d), impl=i),
    "mxfp8.swiglu_quantize": lambda d, i, g: mxfp8.swiglu_quantize(floats(4, 64, device=d), impl=i),
    "mxfp8.QuantizedWeight": lambda d, i, g: mxfp8.QuantizedWeight(floats(2, 32, 32, device=d), impl=i),
    "mxfp8.grouped_gemm": lambda d, i, g: mxfp8.grouped_gemm(
        floats(4, 32, device=d, grad=g == 0), weight(d), offsets(d), out=floats(4, 32, device=d, grad=g == 1), impl=i
    ),
}
MOVES = {
    "dispatch.dispatch": lambda d, i, g: dispatch(
        floats(4, 32, device=d, grad=g == 0), *maps(d), table(d), weights=floats(4, 2, device=d, grad=g == 1), impl=i
    ),
    "combine.combine": lambda d, i, g: combine(
        table(d), *maps(d), floats(4, 2, device=d, grad=g == 0), out=floats(4, 32, device=d, grad=g == 1), impl=i
    ),
}
WEIGHTED = {
    "dispatch.dispatch": lambda d, i, w: dispatch(floats(4, 32, device=d), *maps(d), table(d), weights=w, impl=i),
    "combine.combine": lambda d, i, w: combine(table(d), *maps(d), w, impl=i),
    "combine.combine_backward": lambda d, i, w: combine_backward(
        floats(4, 32, device=d), table(d), *maps(d), w, table(d), impl=i
    ),
}
NO_GRADIENT = (
    "swiglu.swiglu out",
    "swiglu.swiglu_backward",
    "grouped_gemm.grouped_gemm",
    "grouped_gemm.grouped_gemm out",
    "grouped_gemm.grouped_gemm_wgrad",
    "mxfp8.grouped_gemm",
)


@IMPLS
@pytest.mark.parametrize("name", CALLS)
def test_tensors_without_data_are_refused(name, impl):
    # On a GPU the kernels would take their address, 0, and end the process's use of the device.
    with torch.no_grad(), pytest.raises(RuntimeError, match="run on CUDA and CPU tensors; got a tensor on meta"):
        CALLS[name]("meta", impl, None)


def test_buffers_without_addresses_or_of_another_device_are_refused():
    with pytest.raises(ValueError, match="rank 0 must be memory that kernels on meta can address; got meta"):
        table("meta")
    with pytest.raises(ValueError, match="rank 0 must be memory that kernels on cuda can address; got cpu"):
        peer_table([torch.zeros(4, 8)], torch.device("cuda"))
    with pytest.raises(TypeError, match=r"rank 0 must be a torch\.Tensor; got list"):
        peer_table([[1.0]])


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", [*NO_GRADIENT, *MOVES])
def test_no_gradient_is_lost_silently(name, which, impl, device):
    call = (CALLS | MOVES)[name]
    with pytest.raises(ValueError, match=r"is for calls without gradients; a tensor of shape \[.*\] requires one"):
        call(device, impl, which)
    with torch.no_grad():
        call(device, impl, which)


def functions(device, impl):
    """Every differentiable entry: a scalar of one tensor, and that tensor's shape."""
    ends, b = offsets(device), floats(2, 32, 32, device=device)
    cache = mxfp8.QuantizedWeight(b, impl="reference")
    layer = mxfp8.GroupedLinear(2, 32, 32, impl=impl, device=device, dtype=torch.float32)
    layer.refresh()
    options = {"device": device, "impl": impl}
    paths = {"no_ep": {}, "synchronized": {}, "rowwise": {"transport": VirtualTransport(1, device)}}
    blocks = {p: RoutedBlock(CONFIG, path=p, **options, **extra) for p, extra in paths.items()}
    return {
        "swiglu.swiglu": (lambda h: swiglu(h, ends, impl=impl)[:4], (4, 64)),
        "grouped_gemm.grouped_linear": (lambda a: grouped_linear(a, b, ends, impl=impl), (4, 32)),
        "mxfp8.grouped_linear": (lambda a: mxfp8.grouped_linear(a, b, ends, cache, impl=impl), (4, 32)),
        "mxfp8.GroupedLinear": (lambda a: layer(a, ends), (4, 32)),
        **({"router.router": (lambda x: route_logits(x, 2, impl=impl).weights, (4, 8))} if impl == "triton" else {}),
        **{f"block.RoutedBlock {path}": (block, (4, 32)) for path, block in blocks.items()},
    }


DIFFERENTIABLE = (
    "swiglu.swiglu",
    "grouped_gemm.grouped_linear",
    "mxfp8.grouped_linear",
    "mxfp8.GroupedLinear",
    "router.router",
    "block.RoutedBlock no_ep",
    "block.RoutedBlock synchronized",
    "block.RoutedBlock rowwise",
)


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_second_derivative_is_refused(name, impl, device):
    known = functions(device, impl)
    if name not in known:
        pytest.skip("the router's reference is plain PyTorch, differentiable any number of times")
    function, shape = known[name]
    x = torch.randn(*shape, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        (grad,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        grad.sum().backward()
    if name == "block.RoutedBlock rowwise":
        assert function.pool.held == ()


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_function_transforms_are_refused(name, transform, device):
    function, shape = functions(device, "triton")[name]
    x = torch.randn(*shape, device=device)
    calls = {
        "grad": lambda: torch.func.grad(lambda x: function(x).sum())(x),
        "vmap": lambda: torch.func.vmap(function)(torch.stack([x, x])),
        "jvp": lambda: torch.func.jvp(function, (x,), (x,)),
    }
    with pytest.raises(RuntimeError, match=r"setup_context|vmap|transform"):
        calls[transform]()
    if name == "block.RoutedBlock rowwise":
        assert function.pool.held == ()


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32])
@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_that_are_no_floats_are_refused(name, dtype, impl, device):
    with pytest.raises(TypeError, match=f"weights must have dtype .*; got {dtype}"):
        WEIGHTED[name](device, impl, torch.ones(4, 2, dtype=dtype, device=device))


def test_tables_that_are_none_are_refused():
    x, w = floats(4, 32, device="cpu"), floats(4, 2, device="cpu")
    calls = (
        lambda p: dispatch(x, *maps("cpu"), p),
        lambda p: combine(p, *maps("cpu")),
        lambda p: combine_backward(x, p, *maps("cpu"), w, table("cpu")),
    )
    for call in calls:
        with pytest.raises(TypeError, match="peers must be a PeerTable; got list"):
            call([x])
        with pytest.raises(TypeError, match=r"peers must hold rows of dtype .*; got torch\.int64"):
            call(table("cpu", torch.int64))


@pytest.mark.parametrize("place", ["inside", "overlapping"])
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_products_refuse_an_output_that_touches_an_input(place, impl, device):
    pool = torch.randn(16, 32, device=device)
    out = pool[:4] if place == "inside" else pool[3:7]
    with pytest.raises(ValueError, match="memory of its own"):
        grouped_gemm(pool[:4], floats(2, 32, 32, device=device), offsets(device), out=out, impl=impl)
    gradients = pool.view(-1)[: 2 * 8 * 8].view(2, 8, 8)
    for a, grad in (
        (pool.view(-1, 8)[:4], floats(4, 8, device=device)),
        (floats(4, 8, device=device), gradients[0, :4]),
    ):
        with pytest.raises(ValueError, match="memory of its own"):
            grouped_gemm_wgrad(a, grad, offsets(device), out=gradients, impl=impl)
    grouped_gemm(pool[:4], floats(2, 32, 32, device=device), offsets(device), out=pool[4:8], impl=impl)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_router_rows_that_are_no_floats_are_refused(dtype):
    x, w = torch.ones(4, 8, dtype=dtype), torch.ones(4, 8)
    with pytest.raises(TypeError, match=f"x must have dtype .*; got {dtype}"):
        router(x, w, 2)
    with pytest.raises(TypeError, match=f"weight must have dtype .*; got {dtype}"):
        router(w, x, 2)


GROUPED = {
    "swiglu": lambda d, o: swiglu(floats(4, 64, device=d), o),
    "swiglu_backward": lambda d, o: swiglu_backward(floats(4, 64, device=d), floats(4, 32, device=d), o),
    "grouped_gemm": lambda d, o: grouped_gemm(floats(4, 32, device=d), floats(2, 32, 32, device=d), o),
    "grouped_gemm_wgrad": lambda d, o: grouped_gemm_wgrad(floats(4, 32, device=d), floats(4, 32, device=d), o),
    "mxfp8.grouped_gemm": lambda d, o: mxfp8.grouped_gemm(floats(4, 32, device=d), weight(d), o),
}


@pytest.mark.parametrize("name", GROUPED)
def test_offsets_of_another_kind_are_refused(name, device):
    good = offsets(device)
    for bad, error, words in (
        (good.long(), TypeError, r"offsets must have dtype torch\.int32; got torch\.int64"),
        (good.to("meta"), ValueError, f"offsets must be on {device.type}.*; got meta"),
        (good.repeat(2)[::2], ValueError, "offsets must be contiguous"),
        (good[None], ValueError, "offsets must have shape"),
        ([1, 4], TypeError, r"offsets must be a torch\.Tensor; got list"),
        (None, TypeError, r"offsets must be a torch\.Tensor; got NoneType"),
    ):
        with pytest.raises(error, match=words):
            GROUPED[name](device, bad)
    if device.type == "cuda":
        with pytest.raises(ValueError, match="offsets must be on cuda:0; got cpu"):
            GROUPED[name](device, good.cpu())
