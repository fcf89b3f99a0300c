"""SwiGLU on the valid prefix: values, gradient, and a tail that nothing reads or writes."""

from __future__ import annotations

import pytest
import torch
from budgets import assert_within, budget, nan_filled, offsets_of
from moe_kernels.swiglu import swiglu, swiglu_backward

IMPLS = pytest.mark.parametrize("impl", ["reference", "triton"])
# exp, a division and two products in FP32, then the rounding of the result: eight units in the last place cover them.
TERMS = 8


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().view(torch.int16 if tensor.dtype is torch.bfloat16 else torch.int32)


def exact(h: torch.Tensor, grad: torch.Tensor | None = None):
    """Value, or gradient, in FP64 by autograd, with the magnitude of what the gradient's products cancel."""
    h = h.detach().double().cpu().requires_grad_(grad is not None)
    gate, up = h.chunk(2, dim=1)
    y = torch.nn.functional.silu(gate) * up
    if grad is None:
        return y.detach()
    (y * grad.double().cpu()).sum().backward()
    s = gate.detach().sigmoid()
    g = grad.double().cpu()
    magnitude = torch.cat([(g * up).abs() * s * (1 + gate.abs()), (g * gate).abs() * s], dim=1).detach()
    return h.grad, magnitude


@IMPLS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [64, 33, 1])
def test_forward_and_backward_on_the_prefix(impl, dtype, width, device):
    torch.manual_seed(0)
    rows, valid = 70, 41
    offsets = offsets_of([20, 0, 21], device)
    h = (torch.randn(rows, 2 * width, device=device) * 3).to(dtype)
    grad = torch.randn(rows, width, device=device).to(dtype)
    # A tail row that were read would give NaN in one row and a finite value, written over the NaN fill, in the next.
    h[valid::2], grad[valid::2] = float("nan"), 1e30
    tail = bits(h[valid:])
    out = swiglu(h, offsets, out=nan_filled(rows, width, dtype=dtype, device=device), impl=impl)
    want = exact(h[:valid])
    assert_within(out[:valid].cpu(), want, budget(want, want, TERMS, dtype), "forward")
    assert out[valid:].isnan().all()
    want, magnitude = exact(h[:valid], grad[:valid])
    back = swiglu_backward(h, grad, offsets, out=nan_filled(rows, 2 * width, dtype=dtype, device=device), impl=impl)
    assert_within(back[:valid].cpu(), want, budget(want, magnitude, TERMS, dtype), "backward")
    assert back[valid:].isnan().all()
    assert swiglu_backward(h, grad, offsets, out=h, impl=impl).data_ptr() == h.data_ptr()
    assert torch.equal(h[:valid], back[:valid]) and torch.equal(bits(h[valid:]), tail)


@IMPLS
def test_autograd_gives_the_same_gradient(impl, device):
    torch.manual_seed(1)
    offsets = offsets_of([5, 4], device)
    h = torch.randn(12, 16, device=device, requires_grad=True)
    pull = torch.randn(9, 8, device=device)
    (swiglu(h, offsets, impl=impl)[:9] * pull).sum().backward()
    want, magnitude = exact(h[:9], pull)
    assert_within(h.grad[:9].cpu(), want, budget(want, magnitude, TERMS, torch.float32), "gradient")


@IMPLS
@pytest.mark.parametrize(("last", "written"), [(0, 0), (-3, 0), (6, 6), (99, 6)])
def test_valid_count_is_clamped_to_the_buffer(impl, last, written, device):
    offsets = torch.tensor([last], dtype=torch.int32, device=device)
    h = torch.randn(6, 8, device=device)
    out = swiglu(h, offsets, out=nan_filled(6, 4, dtype=torch.float32, device=device), impl=impl)
    assert int((~out.isnan().any(1)).sum()) == written


@IMPLS
def test_large_gates_saturate_without_nan(impl, device):
    h = torch.tensor([[200.0, 1.0], [-200.0, 1.0], [-1e30, 1.0], [0.0, 5.0]], device=device)
    got = swiglu(h, offsets_of([4], device), impl=impl)
    assert got.flatten().tolist() == [200.0, 0.0, 0.0, 0.0]


@IMPLS
def test_no_rows(impl, device):
    offsets = torch.zeros(2, dtype=torch.int32, device=device)
    assert swiglu(torch.empty(0, 8, device=device), offsets, impl=impl).shape == (0, 4)


def test_errors_name_what_is_wrong():
    h, offsets = torch.zeros(4, 8), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"offsets must have dtype torch.int32; got torch.int64"):
        swiglu(h, offsets.long())
    with pytest.raises(ValueError, match=r"h must have shape \[C, 2F\]; got \[4, 7\]"):
        swiglu(torch.zeros(4, 7), offsets)
    with pytest.raises(ValueError, match="h must be contiguous"):
        swiglu(torch.zeros(8, 4).t(), offsets)
    with pytest.raises(ValueError, match="offsets must have at least one entry"):
        swiglu(h, offsets[:0])
    with pytest.raises(ValueError, match="out= is for calls without gradients"):
        swiglu(h.requires_grad_(), offsets, out=torch.zeros(4, 4))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    width = 4096
    rows = 2**31 // (2 * width) + 3
    h = torch.empty(rows, 2 * width, dtype=torch.bfloat16, device="cuda")
    h[-2:] = torch.randn(2, 2 * width, device="cuda")
    out = swiglu(h, torch.tensor([rows], dtype=torch.int32, device="cuda"))
    want = exact(h[-2:])
    assert_within(out[-2:].cpu(), want, budget(want, want, TERMS, torch.bfloat16), "last rows")
