"""torch.compile: the ops on tensors trace into one graph, gradients included; row movement is its boundary."""

from __future__ import annotations

import importlib

import pytest
import torch
from moe_kernels.combine import combine, combine_backward
from moe_kernels.dispatch import dispatch
from moe_kernels.grouped_gemm import grouped_gemm_wgrad, grouped_linear
from moe_kernels.peers import peer_table
from moe_kernels.route_map import route_map
from moe_kernels.router.api import route_logits
from moe_kernels.swiglu import swiglu


def test_router_experts_and_swiglu_compile_as_one_graph(device):
    torch.manual_seed(0)
    x = torch.randn(12, 16, device=device)
    weights = [torch.randn(s, device=device) * 0.2 for s in ((16, 4), (4, 16, 16), (4, 8, 16))]

    def layer(x, gate, up, down):
        routed = route_logits(x @ gate, 1, impl="triton")
        m = route_map(routed.expert_index, routed.counts[None], rank=0, capacity=12, impl="triton")
        rows = torch.zeros_like(x).index_copy(0, m.dst_row[:, 0].long(), x)
        h = swiglu(grouped_linear(rows, up, m.offsets, impl="triton"), m.offsets, impl="triton")
        y = grouped_linear(h, down, m.offsets, impl="triton")[m.dst_row[:, 0].long()]
        return (y * routed.weights).sum() + routed.lbl + 0.1 * routed.z_loss

    leaves = [t.clone().requires_grad_() for t in (x, *weights)]
    eager = layer(*leaves)
    want = torch.autograd.grad(eager, leaves)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    got = compiled(*leaves)
    grads = torch.autograd.grad(got, leaves)
    torch.testing.assert_close(got, eager, rtol=0, atol=0)
    for g, w in zip(grads, want):
        torch.testing.assert_close(g, w, rtol=0, atol=0)


def test_row_movement_is_a_boundary_of_compiled_code(device):
    """Rows move through addresses, which a graph cannot see: it breaks there and the writes are kept."""
    torch.manual_seed(1)
    x = torch.randn(6, 8, device=device)
    experts = torch.randint(0, 3, (6, 2), device=device)
    counts = torch.zeros(1, 3, dtype=torch.int64, device=device)
    counts[0].scatter_add_(0, experts.flatten(), torch.ones(12, dtype=torch.int64, device=device))
    m = route_map(experts, counts, rank=0, capacity=12, impl="triton")
    table = peer_table([torch.zeros(12, 8, device=device)])
    weights = torch.rand(6, 2, device=device)

    def move(x, weights):
        dispatch(x, m.dst_rank, m.dst_row, table, impl="triton")
        y = combine(table, m.dst_rank, m.dst_row, weights, impl="triton")
        return y, combine_backward(y, table, m.dst_rank, m.dst_row, weights, table, impl="triton")

    want = move(x, weights)
    buffer = table.tensors[0].clone()
    table.tensors[0].zero_()
    got = torch.compile(move, backend="aot_eager")(x, weights)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert torch.equal(table.tensors[0], buffer) and (buffer != 0).any()
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(move, backend="aot_eager", fullgraph=True)(x, weights)


OPERATORS = (
    "swiglu", "swiglu_backward", "grouped_gemm", "grouped_gemm_wgrad", "route_map", "router_forward", "router_backward",
    "mxfp8_rows", "mxfp8_grouped_gemm",
)  # fmt: skip


def test_every_registered_operator_is_checked():
    for module in ("router.triton", "route_map.triton", "grouped_gemm.triton", "swiglu.triton", "mxfp8.api"):
        importlib.import_module(f"moe_kernels.{module}")
    names = {n.split("::")[1] for n in torch._C._dispatch_get_all_op_names() if n.startswith("moe_kernels::")}
    assert names == set(OPERATORS)


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_schemas_state_what_they_mutate(name, device):
    offsets = torch.tensor([3, 7], dtype=torch.int32, device=device)
    a, b = torch.randn(9, 8, device=device), torch.randn(2, 8, 4, device=device)
    grouped_gemm_wgrad(a, torch.randn(9, 4, device=device), offsets, impl="triton")  # registers the operators
    swiglu(a, offsets, impl="triton")
    ids = torch.tensor([[0], [1], [0]], device=device)
    counts = torch.tensor([[2, 1]], device=device)
    route_map(ids, counts, rank=0, capacity=3, impl="triton")
    logits = torch.randn(6, 4, device=device)
    routed = route_logits(logits, 2, impl="triton")
    e4m3, byte = torch.zeros(4, 32, device=device).to(torch.float8_e4m3fn), {"dtype": torch.uint8, "device": device}
    weights = torch.zeros(2, 32, 32, device=device).to(torch.float8_e4m3fn)
    ends, share = torch.tensor([1, 4], dtype=torch.int32, device=device), torch.ones(1, 4, device=device)
    one = torch.ones((), device=device)
    arguments = {
        "router_forward": (logits, None, 2, False, False, True, 1.0, 1),
        "router_backward": (
            [logits, routed.weights, routed.expert_index, torch.ones(6, device=device), share],
            [torch.randn(6, 2, device=device), one, one], False, True, 1.0,
        ),
        "mxfp8_rows": (
            torch.randn(4, 32, device=device), None, e4m3, torch.zeros(4, **byte),
            torch.zeros(1, dtype=torch.int32, device=device), 1, 1, False, "triton", 0,
        ),
        "mxfp8_grouped_gemm": (
            e4m3, torch.full((4,), 127, **byte), weights, torch.full((2, 32), 127, **byte), ends,
            torch.zeros(4, 32, device=device), "triton", 3, 0, 0,
        ),
        "swiglu": (a, offsets, torch.zeros(9, 4, device=device)),
        "swiglu_backward": (a, torch.randn(9, 4, device=device), offsets, torch.zeros(9, 8, device=device)),
        "grouped_gemm": (a, b, offsets, torch.zeros(9, 4, device=device)),
        "grouped_gemm_wgrad": (a, torch.randn(9, 4, device=device), offsets, torch.zeros(2, 8, 4, device=device)),
        "route_map": (ids, counts, 0, 3),
    }[name]  # fmt: skip
    operator = getattr(torch.ops.moe_kernels, name).default
    if not name.startswith("mxfp8"):
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
        return
    # The checker of schemas cannot compute with E4M3: what changes, byte by byte, must be what the schema says.
    torch.library.opcheck(operator, arguments, test_utils="test_faketensor")
    arguments[0][0, 0] = 3.0
    weights.fill_(1)
    before = [a.clone() if torch.is_tensor(a) else a for a in arguments]
    operator(*arguments)
    for a, b, said in zip(arguments, before, operator._schema.arguments):
        if torch.is_tensor(a) and not (said.alias_info and said.alias_info.is_write):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), said.name
    out = arguments[2 if name == "mxfp8_rows" else 5]
    assert (out.float() != 0).any(), "the operator wrote nothing"
