"""Grouped GEMM: values, gradients, tails, empty groups, clamped offsets, and where torch's own kernel may be used."""

from __future__ import annotations

import threading

import pytest
import torch
from budgets import assert_within, budget, nan_filled, offsets_of, poison_allocator
from moe_kernels import _compat
from moe_kernels.grouped_gemm import grouped_gemm, grouped_gemm_wgrad, grouped_linear

from workbench.measure.capture import host_waits

IMPLS = pytest.mark.parametrize("impl", ["reference", "triton", "host_loop"])
SIZES = {
    "odd": [7, 0, 13, 21],
    "one expert has all": [0, 41, 0, 0],
    "none has any": [0, 0, 0, 0],
    "empty ends": [0, 20, 21, 0],
    "one row each": [1, 1, 1, 1],
}


def operands(sizes, k, n, dtype, device, tail=9):
    """Rows, weights, upstream gradient and offsets; rows past the last offset are NaN and +-1e30."""
    torch.manual_seed(sum(sizes) + k)
    rows = sum(sizes)
    a = torch.randn(rows + tail, k, device=device).to(dtype)
    grad = torch.randn(rows + tail, n, device=device).to(dtype)
    b = torch.randn(len(sizes), k, n, device=device).to(dtype)
    for tensor in (a, grad):
        tensor[rows::3], tensor[rows + 1 :: 3], tensor[rows + 2 :: 3] = float("nan"), 1e30, -1e30
    return a, b, grad, offsets_of(sizes, device)


def exact(a, b, sizes):
    """Product of each group in FP64, with the product of absolute values."""
    a, b = a[: sum(sizes)].double().cpu(), b.double().cpu()
    parts = a.split(sizes)
    product = torch.cat([x @ w for x, w in zip(parts, b)])
    return product, torch.cat([x.abs() @ w.abs() for x, w in zip(parts, b)])


def exact_wgrad(a, grad, sizes):
    a, grad = a[: sum(sizes)].double().cpu(), grad[: sum(sizes)].double().cpu()
    pairs = list(zip(a.split(sizes), grad.split(sizes)))
    return torch.stack([x.t() @ y for x, y in pairs]), torch.stack([x.abs().t() @ y.abs() for x, y in pairs])


@IMPLS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("k", "n"), [(64, 48), (40, 24), (33, 17)])
@pytest.mark.parametrize("name", SIZES)
def test_forward_dgrad_wgrad(impl, dtype, k, n, name, device):
    sizes = SIZES[name]
    a, b, grad, offsets = operands(sizes, k, n, dtype, device)
    rows = sum(sizes)

    out = grouped_gemm(a, b, offsets, out=nan_filled(rows + 9, n, dtype=dtype, device=device), impl=impl)
    want, magnitude = exact(a, b, sizes)
    assert_within(out[:rows].cpu(), want, budget(want, magnitude, k, dtype), "forward")
    assert out[rows:].isnan().all(), "rows past the last offset stay unwritten"

    out = nan_filled(rows + 9, k, dtype=dtype, device=device)
    d_a = grouped_gemm(grad, b.transpose(1, 2), offsets, out=out, impl=impl)
    want, magnitude = exact(grad, b.transpose(1, 2), sizes)
    assert_within(d_a[:rows].cpu(), want, budget(want, magnitude, n, dtype), "input gradient")
    assert d_a[rows:].isnan().all()

    d_b = grouped_gemm_wgrad(a, grad, offsets, out=nan_filled(4, k, n, dtype=dtype, device=device), impl=impl)
    want, magnitude = exact_wgrad(a, grad, sizes)
    assert_within(d_b.cpu(), want, budget(want, magnitude, max(sizes), dtype), "weight gradient")
    for group, size in enumerate(sizes):
        if size == 0:
            assert (d_b[group] == 0).all(), "an expert without rows has gradient exactly 0"


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_weights_stored_transposed_need_no_copy(impl, device):
    a, b, _, offsets = operands([9, 14], 40, 24, torch.float32, device)
    stored = b.transpose(1, 2).contiguous().transpose(1, 2)
    assert stored.stride() != b.stride()
    want, magnitude = exact(a, b, [9, 14])
    for weights in (stored, b):
        got = grouped_gemm(a, weights, offsets, impl=impl)[:23]
        assert_within(got.cpu(), want, budget(want, magnitude, 40, torch.float32), "forward")


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_offsets_are_clamped_and_made_monotone(impl, device):
    a, b, grad, _ = operands([200, 20, 20], 40, 24, torch.float32, device, tail=0)
    # The second group would have -195 rows, more than a tile of any backend: its tiles must not be subtracted.
    bad = torch.tensor([200, 5, 999], dtype=torch.int32, device=device)
    good = torch.tensor([200, 200, 240], dtype=torch.int32, device=device)
    assert torch.equal(grouped_gemm(a, b, bad, impl=impl), grouped_gemm(a, b, good, impl=impl))
    assert torch.equal(grouped_gemm_wgrad(a, grad, bad, impl=impl), grouped_gemm_wgrad(a, grad, good, impl=impl))


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_nan_in_a_row_reaches_only_that_row(impl, device):
    a, b, _, offsets = operands([10, 13], 40, 24, torch.float32, device, tail=0)
    clean = grouped_gemm(a, b, offsets, impl=impl)
    a[9] = float("nan")
    dirty = grouped_gemm(a, b, offsets, impl=impl)
    rest = torch.arange(23) != 9
    assert dirty[9].isnan().all() and torch.equal(dirty[rest], clean[rest])


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_nan_weights_of_one_expert_reach_only_its_rows(impl, device):
    # K = 33 makes the last step of the contraction partial: it must not touch the next expert's weights.
    for k in (33, 40):
        a, b, _, offsets = operands([10, 13], k, 24, torch.float32, device, tail=0)
        b[1] = float("nan")
        out = grouped_gemm(a, b, offsets, impl=impl)
        assert not out[:10].isnan().any() and out[10:].isnan().all()


@IMPLS
def test_linear_is_differentiable(impl, device):
    sizes = [5, 0, 8]
    a, b, grad, offsets = operands(sizes, 32, 16, torch.float32, device)
    a = a[:13].clone().requires_grad_()
    b.requires_grad_()
    (grouped_linear(a, b, offsets, impl=impl) * grad[:13]).sum().backward()
    want, magnitude = exact(grad[:13], b.detach().transpose(1, 2), sizes)
    assert_within(a.grad.cpu(), want, budget(want, magnitude, 16, torch.float32), "input gradient")
    want, magnitude = exact_wgrad(a.detach(), grad[:13], sizes)
    assert_within(b.grad.cpu(), want, budget(want, magnitude, 8, torch.float32), "weight gradient")


def test_no_rows_and_no_groups(device):
    offsets = torch.zeros(2, dtype=torch.int32, device=device)
    a, b = torch.empty(0, 8, device=device), torch.randn(2, 8, 4, device=device)
    assert grouped_gemm(a, b, offsets, impl="triton").shape == (0, 4)
    assert (grouped_gemm_wgrad(a, torch.empty(0, 4, device=device), offsets, impl="triton") == 0).all()


def test_errors_name_what_is_wrong():
    a, b, grad, offsets = operands([3, 4], 8, 4, torch.float32, "cpu", tail=0)
    with pytest.raises(TypeError, match=r"offsets must have dtype torch.int32; got torch.int64"):
        grouped_gemm(a, b, offsets.long())
    with pytest.raises(ValueError, match="offsets must be contiguous"):
        grouped_gemm(a, b, torch.zeros(4, dtype=torch.int32)[::2])
    with pytest.raises(ValueError, match=r"b must have shape \[2, 8, any\]; got \[3, 8, 4\]"):
        grouped_gemm(a, torch.zeros(3, 8, 4), offsets)
    with pytest.raises(TypeError, match=r"b must have dtype torch.float32"):
        grouped_gemm(a, b.bfloat16(), offsets)
    with pytest.raises(ValueError, match=r"out must have shape \[7, 4\]"):
        grouped_gemm(a, b, offsets, out=torch.zeros(7, 5))
    with pytest.raises(ValueError, match="a must be contiguous"):
        grouped_gemm(torch.zeros(8, 7).t(), b, offsets)
    with pytest.raises(ValueError, match="grad must have shape"):
        grouped_gemm_wgrad(a, grad[:3], offsets)
    with pytest.raises(ValueError, match="impl must be one of triton, torch, host_loop, reference"):
        grouped_gemm(a, b, offsets, impl="cublas")
    with pytest.raises(ValueError, match=r"impl='torch' cannot write into out="):
        grouped_gemm(a, b, offsets, out=torch.zeros(7, 4), impl="torch")


def test_torch_is_refused_where_it_would_read_the_offsets_on_the_host():
    a, b, _, offsets = operands([3, 4], 8, 4, torch.float32, "cpu", tail=0)
    with pytest.raises(RuntimeError, match="copies the offsets to the host"):
        grouped_gemm(a, b, offsets, impl="torch")


def test_triton_refuses_double():
    a, b, _, offsets = operands([3, 4], 8, 4, torch.float64, "cpu", tail=0)
    pytest.importorskip("triton")
    with pytest.raises(TypeError, match=r"takes bfloat16, float16 or float32; got torch.float64"):
        grouped_gemm(a, b, offsets, impl="triton")


def test_interpreter_still_multiplies_bfloat16_wrongly(device):
    """The kernels cast to FP32 under the interpreter; when this fails, the cast can go."""
    if device.type != "cpu":
        pytest.skip("concerns the CPU interpreter only")
    import triton
    import triton.language as tl

    @triton.jit
    def product(a_ptr, b_ptr, out_ptr):
        i = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(out_ptr + i, tl.dot(tl.load(a_ptr + i), tl.load(b_ptr + i)))

    a, b = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16()
    out = torch.empty(16, 16)
    product[(1,)](a, b, out)
    assert not torch.allclose(out, a.float() @ b.float(), atol=0.1), "the interpreter's bfloat16 tl.dot is right now"


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_device_scheduled_kernels_wait_for_nothing(impl):
    a, b, grad, offsets = operands([300, 0, 500, 224], 256, 512, torch.bfloat16, "cuda", tail=256)
    grouped_gemm(a, b, offsets, impl=impl)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = grouped_gemm(a, b, offsets, impl=impl)
        grouped_gemm_wgrad(a, grad, offsets, impl=impl)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    want, magnitude = exact(a, b, [300, 0, 500, 224])
    assert_within(out[:1024].cpu(), want, budget(want, magnitude, 256, torch.bfloat16), "forward")


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_profiler_sees_no_wait_and_no_copy_to_the_host(impl):
    a, b, grad, offsets = operands([300, 0, 500, 224], 256, 512, torch.bfloat16, "cuda", tail=256)

    def every_direction():
        grouped_gemm(a, b, offsets, impl=impl)
        grouped_gemm(grad, b.transpose(1, 2), offsets, impl=impl)
        grouped_gemm_wgrad(a, grad, offsets, impl=impl)

    waits = host_waits(every_direction)
    assert waits.launches >= 3
    assert (len(waits), waits.pageable_d2h, waits.pinned_d2h) == (0, 0, 0), waits


@pytest.mark.gpu
def test_profiler_sees_torchs_fallback_read_the_offsets_on_the_host():
    """Why impl='torch' is refused outside bfloat16; when this fails, the refusal can be narrowed."""
    a, b, _, offsets = operands([300, 0, 500, 224], 256, 512, torch.float32, "cuda", tail=0)
    assert not _compat.torch_grouped_mm_is_device_scheduled(a.device, a.dtype)
    waits = host_waits(lambda: _compat.torch_grouped_mm(a, b, offsets))
    assert len(waits) >= 1 and waits.pageable_d2h >= 1
    waits = host_waits(lambda: grouped_gemm(a, b, offsets, impl="host_loop"))
    assert len(waits) >= 4, "one read per expert"


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_poisoned_allocator_and_tail_leave_every_gradient_clean(impl):
    sizes = [300, 0, 500, 224, 0]
    a, _, grad, offsets = operands(sizes, 256, 512, torch.bfloat16, "cuda", tail=256)
    poison_allocator(5 * 256 * 512 * 2, "cuda")
    d_b = grouped_gemm_wgrad(a, grad, offsets, impl=impl)
    want, magnitude = exact_wgrad(a, grad, sizes)
    assert_within(d_b.cpu(), want, budget(want, magnitude, 500, torch.bfloat16), "weight gradient")
    assert (d_b[1] == 0).all() and (d_b[4] == 0).all()


@pytest.mark.gpu
def test_host_loop_is_seen_to_wait():
    a, b, _, offsets = operands([30, 10], 64, 64, torch.bfloat16, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            grouped_gemm(a, b, offsets, impl="host_loop")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_offsets_on_the_cpu_are_refused():
    a, b, _, offsets = operands([30, 10], 64, 64, torch.bfloat16, "cuda")
    with pytest.raises(ValueError, match="offsets must be on cuda:0; got cpu"):
        grouped_gemm(a, b, offsets.cpu())


@pytest.mark.gpu
def test_many_tiles_and_more_than_two_to_the_31_elements():
    rows, k, n = 2**31 // 2048 + 200, 2048, 64
    a = torch.empty(rows, k, dtype=torch.bfloat16, device="cuda").normal_()
    b = torch.randn(2, k, n, device="cuda").bfloat16()
    offsets = offsets_of([rows - 130, 130], "cuda")
    out = grouped_gemm(a, b, offsets)
    want = a[-300:].double() @ b[1].double()
    want[:170] = a[-300:-130].double() @ b[0].double()
    magnitude = a[-300:].double().abs() @ b[1].double().abs()
    assert_within(out[-300:].cpu(), want.cpu(), budget(want, magnitude, k, torch.bfloat16).cpu(), "last rows")


def test_an_output_over_an_input_is_refused():
    a, b = torch.randn(8, 16), torch.randn(2, 16, 16)
    offsets = torch.tensor([4, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match="memory of its own"):
        grouped_gemm(a, b, offsets, out=a, impl="reference")


@pytest.mark.gpu
def test_a_thread_that_has_asked_nothing_of_the_gpu_yet_can_launch():
    """Autograd's threads are such ones: the backward of a product alone is the first that they do."""
    a, b = torch.randn(64, 32, device="cuda").bfloat16(), torch.randn(2, 32, 48, device="cuda").bfloat16()
    offsets = torch.tensor([40, 64], dtype=torch.int32, device="cuda")
    want, got = grouped_gemm(a, b, offsets, impl="triton"), []
    thread = threading.Thread(target=lambda: got.append(grouped_gemm(a, b, offsets, impl="triton")))
    thread.start()
    thread.join()
    assert got and torch.equal(got[0], want)
