"""The ops in sequence: the whole routed path of one rank against a dense FP64 sum, and captured in a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from budgets import nan_filled
from moe_kernels.combine import combine, combine_backward
from moe_kernels.dispatch import dispatch
from moe_kernels.grouped_gemm import grouped_gemm, grouped_gemm_wgrad
from moe_kernels.peers import peer_table
from moe_kernels.route_map import route_map
from moe_kernels.router.api import route_logits
from moe_kernels.swiglu import swiglu, swiglu_backward


class Path:
    """Buffers of one rank and the op sequence, forward and backward, as a training step submits it."""

    def __init__(self, tokens, width, hidden, experts, top_k, capacity, dtype, device, impl):
        self.impl, self.top_k, self.capacity = impl, top_k, capacity
        self.x = torch.randn(tokens, width, device=device).to(dtype)
        self.logits = torch.randn(tokens, experts, device=device)
        self.pull = torch.randn(tokens, width, device=device).to(dtype)
        self.up = (torch.randn(experts, width, 2 * hidden, device=device) * width**-0.5).to(dtype)
        self.down = (torch.randn(experts, hidden, width, device=device) * hidden**-0.5).to(dtype)
        self.rows = peer_table([nan_filled(capacity, width, dtype=dtype, device=device)])
        self.outputs = peer_table([nan_filled(capacity, width, dtype=dtype, device=device)])
        self.h = nan_filled(capacity, 2 * hidden, dtype=dtype, device=device)
        self.a = nan_filled(capacity, hidden, dtype=dtype, device=device)

    def __call__(self):
        rows, outputs = self.rows.tensors[0], self.outputs.tensors[0]
        impl = self.impl
        routed = route_logits(self.logits, self.top_k, impl=impl)
        m = route_map(routed.expert_index, routed.counts[None], rank=0, capacity=self.capacity, impl=impl)
        dispatch(self.x, m.dst_rank, m.dst_row, self.rows, impl=impl)
        grouped_gemm(rows, self.up, m.offsets, out=self.h, impl=impl)
        swiglu(self.h, m.offsets, out=self.a, impl=impl)
        grouped_gemm(self.a, self.down, m.offsets, out=outputs, impl=impl)
        y = combine(self.outputs, m.dst_rank, m.dst_row, routed.weights, impl=impl)
        d_weights = combine_backward(
            self.pull, self.outputs, m.dst_rank, m.dst_row, routed.weights, self.outputs, impl=impl
        )
        d_down = grouped_gemm_wgrad(self.a, outputs, m.offsets, impl=impl)
        d_a = grouped_gemm(outputs, self.down.transpose(1, 2), m.offsets, impl=impl)
        d_h = swiglu_backward(self.h, d_a, m.offsets, out=self.h, impl=impl)
        d_up = grouped_gemm_wgrad(rows, d_h, m.offsets, impl=impl)
        # Only now may the rows be overwritten by their own gradient.
        grouped_gemm(d_h, self.up.transpose(1, 2), m.offsets, out=rows, impl=impl)
        d_x = combine(self.rows, m.dst_rank, m.dst_row, impl=impl)
        return y, d_x, d_up, d_down, d_weights, m

    def exact(self):
        """The same in FP64 by autograd over every expert, from the routes that were kept."""
        with torch.no_grad():
            routed = route_logits(self.logits, self.top_k)
            m = route_map(routed.expert_index, routed.counts[None], rank=0, capacity=self.capacity)
        x, up, down = (t.double().requires_grad_() for t in (self.x, self.up, self.down))
        weights = routed.weights.double().requires_grad_()
        y = torch.zeros_like(x)
        for e in range(up.shape[0]):
            share = (weights * ((routed.expert_index == e) & (m.dst_row >= 0))).sum(1, keepdim=True)
            gate, lift = (x @ up[e]).chunk(2, dim=1)
            y = y + share * ((torch.nn.functional.silu(gate) * lift) @ down[e])
        (y * self.pull.double()).sum().backward()
        return y.detach(), x.grad, up.grad, down.grad, weights.grad * (m.dst_row >= 0)


NAMES = ("output", "input gradient", "up gradient", "down gradient", "weights gradient")


def compare(got, want, tolerance):
    for name, g, w in zip(NAMES, got, want):
        assert not g.isnan().any(), f"{name}: something read the unwritten tail"
        error = ((g.double() - w).norm() / w.norm()).item()
        assert error < tolerance, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("capacity", [120, 50], ids=["roomy", "drops"])
def test_path_equals_the_dense_sum(impl, capacity, device):
    torch.manual_seed(0)
    path = Path(30, 32, 16, 5, 3, capacity, torch.float32, device, impl)
    got = path()
    assert (int(got[-1].stats[2]) > 0) == (capacity == 50)
    # FP32 throughout; chains of at most 100 terms.
    compare(got, path.exact(), 100 * 2.0**-23)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_all_tokens_drop(impl, device):
    torch.manual_seed(1)
    path = Path(4, 32, 16, 2, 1, 1, torch.float32, device, impl)
    path.logits[:, 0], path.logits[:, 1] = 1.0, 0.0
    y, d_x, *_, d_weights, m = path()
    assert int(m.stats[2]) == 3
    assert (y[1:] == 0).all() and (d_x[1:] == 0).all() and (d_weights[1:] == 0).all() and (y[0] != 0).any()


@pytest.mark.gpu
def test_profiler_sees_no_wait_and_no_copy_to_the_host_on_the_whole_path():
    from workbench.measure.capture import host_waits

    torch.manual_seed(2)
    path = Path(512, 256, 128, 16, 4, 512 * 4, torch.bfloat16, "cuda", "triton")
    waits = host_waits(path)
    assert waits.launches >= 15, "the profiler saw less than the path launches"
    assert (len(waits), waits.pageable_d2h, waits.pinned_d2h) == (0, 0, 0), waits
    read = host_waits(path()[-1].stats[2].item)
    assert len(read) == 1 and read.pageable_d2h + read.pinned_d2h == 1, "a read of one count must be seen"


@pytest.mark.gpu
def test_graph_of_the_whole_path_replays_with_other_routes():
    torch.manual_seed(2)
    path = Path(2048, 256, 128, 16, 4, 2048 * 4, torch.bfloat16, "cuda", "triton")
    path()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        path()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = path()
    for seed in (3, 4):
        torch.manual_seed(seed)
        path.logits.copy_(torch.randn_like(path.logits) + torch.randn(16, device="cuda") * seed)
        path.x.copy_(torch.randn_like(path.x))
        graph.replay()
        # BF16 rounds at five places in a row, each by at most 2**-8 relative, and sums of many average out.
        compare(got, path.exact(), 5 * 2.0**-8)
