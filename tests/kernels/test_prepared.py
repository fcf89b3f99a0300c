"""Prepared launches: a key that separates whatever Triton compiles separately, and launches equal to Triton's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton")
from moe_kernels import _compat  # noqa: E402
from moe_kernels._prepared import PreparedKernel, kinds  # noqa: E402
from triton import language as tl  # noqa: E402
from triton.backends.nvidia.compiler import CUDABackend  # noqa: E402
from triton.runtime.jit import JITFunction, native_specialize_impl  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

BYTES = torch.zeros(4096, dtype=torch.uint8)
FIRST = -BYTES.data_ptr() % 16


@st.composite
def arguments(draw):
    """Integers around every boundary, tensors of any dtype and alignment, descriptors of some blocks."""
    what = draw(st.sampled_from(["int", "tensor", "descriptor", "other"]))
    if what == "int":
        near = draw(st.sampled_from([0, 1, 16, 2**31, -(2**31), 2**63]))
        return near + draw(st.integers(-17, 17))
    if what == "tensor":
        dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64]))
        start = FIRST + dtype.itemsize * draw(st.integers(0, 16))
        return BYTES[start : start + 64].view(dtype)
    if what == "descriptor":
        dtype = draw(st.sampled_from([torch.bfloat16, torch.float32]))
        base = BYTES[FIRST : FIRST + 2048].view(dtype).view(-1, 16)
        block = [draw(st.sampled_from([16, 32])), 16]
        return TensorDescriptor(base, list(base.shape), list(base.stride()), block)
    return draw(st.sampled_from([True, False, 1.5, None]))


def kind_of(arg):
    """Key of one argument, None where unknown."""
    known = kinds((arg,))
    return None if known is None else known[0]


def of_triton(arg):
    return native_specialize_impl(CUDABackend, arg, False, True, True)


@settings(max_examples=300)
@given(arguments(), arguments())
def test_arguments_of_one_kind_are_of_one_kind_to_triton(a, b):
    if kind_of(a) is not None and kind_of(a) == kind_of(b):
        assert of_triton(a) == of_triton(b)


def test_what_triton_separates_is_separated_and_unknown_arguments_have_no_kind():
    aligned, shifted = BYTES[FIRST : FIRST + 64], BYTES[FIRST + 8 : FIRST + 72]
    kinds = [1, 3, 32, aligned.view(torch.bfloat16), shifted.view(torch.bfloat16), aligned.view(torch.float32)]
    assert len({repr(of_triton(a)) for a in kinds}) == len({repr(kind_of(a)) for a in kinds}) == len(kinds)
    assert [kind_of(a) for a in (True, 1.5, None, "x", 2**31, -(2**31) - 1)] == [None] * 6
    assert kind_of(2**31 - 1) is not None


def signature(out, rows, WIDTH: tl.constexpr, SCALE: tl.constexpr = 1.0, TAIL: tl.constexpr = None):
    """Parameters of the kernel below."""


class Recorded:
    """Stands for the JIT function and its compiled kernel; keeps what went Triton's way and what went straight."""

    params = JITFunction(signature).params
    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.slow, self.fast = [], []

    def __getitem__(self, grid):
        def launch(*args, **constants):
            self.slow.append((grid, args, constants))
            return self

        return launch

    def run(self, *args):
        self.fast.append(args)


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(_compat, "current_device", lambda: 0)
    monkeypatch.setattr(_compat, "current_stream_address", lambda device: 7)
    return PreparedKernel(Recorded())


def test_a_second_launch_goes_straight_with_addresses_and_constants_in_order(kernel):
    out = BYTES[FIRST : FIRST + 64]
    for _ in range(2):
        kernel[(5, 2)](out, 48, SCALE=2.0, TAIL=3, WIDTH=8, num_warps=4)
    assert len(kernel.kernel.slow) == 1
    straight = (5, 2, 1, 7, "function", "metadata", None, None, None, out.data_ptr(), 48, 8, 2.0, 3)
    assert kernel.kernel.fast == [straight]


def test_constants_left_at_their_defaults_are_passed_as_such_and_kept_apart_from_given_ones(kernel):
    out = BYTES[FIRST : FIRST + 64]
    for constants in ({"WIDTH": 8}, {"WIDTH": 8, "TAIL": 3}, {"WIDTH": 8}, {"WIDTH": 8, "TAIL": 3}):
        kernel[(1,)](out, 48, **constants)
    assert [constants for _, _, constants in kernel.kernel.slow] == [{"WIDTH": 8}, {"WIDTH": 8, "TAIL": 3}]
    assert [launch[-3:] for launch in kernel.kernel.fast] == [(8, 1.0, None), (8, 1.0, 3)]


def test_any_change_that_may_change_the_code_goes_to_triton(kernel, monkeypatch):
    out = BYTES[FIRST : FIRST + 64]
    usual = ((out, 48), {"WIDTH": 8, "SCALE": 1.0, "num_warps": 4})
    others = [
        ((BYTES[FIRST + 8 : FIRST + 72], 48), usual[1]),
        ((out.view(torch.int32), 48), usual[1]),
        ((out, 1), usual[1]),
        ((out, 50), usual[1]),
        (usual[0], usual[1] | {"WIDTH": 16}),
        (usual[0], usual[1] | {"SCALE": 1}),
        (usual[0], usual[1] | {"SCALE": True}),
        (usual[0], usual[1] | {"num_warps": 8}),
    ]
    for args, constants in [usual, *others]:
        kernel[(1,)](*args, **constants)
    assert len(kernel.kernel.slow) == 1 + len(others) and not kernel.kernel.fast
    monkeypatch.setattr(_compat, "current_device", lambda: 1)
    kernel[(1,)](*usual[0], **usual[1])
    assert len(kernel.kernel.slow) == 2 + len(others) and not kernel.kernel.fast


def test_unknown_arguments_and_hooks_of_a_profiler_go_to_triton(kernel, monkeypatch):
    for _ in range(2):
        kernel[(1,)](1.5, 3, WIDTH=8, SCALE=1.0)
    assert len(kernel.kernel.slow) == 2 and not kernel.compiled
    kernel[(1,)](2, 3, WIDTH=8, SCALE=1.0)
    monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [lambda metadata: None])
    kernel[(1,)](2, 3, WIDTH=8, SCALE=1.0)
    assert len(kernel.kernel.slow) == 4 and not kernel.kernel.fast


@pytest.mark.gpu
def test_later_launches_equal_the_first_and_the_reference_at_every_alignment():
    from moe_kernels.swiglu import swiglu
    from moe_kernels.swiglu import triton as backend

    flat = torch.randn(40 * 64 + 16, device="cuda").bfloat16()
    offsets = torch.tensor([33], dtype=torch.int32, device="cuda")
    backend._forward_kernel.compiled.clear()
    kernels = []
    for shift in (0, 2, 8, 0, 2, 8):
        h = flat[shift : shift + 40 * 64].view(40, 64)
        got = swiglu(h, offsets, impl="triton")[:33]
        torch.testing.assert_close(got, swiglu(h, offsets, impl="reference")[:33], rtol=2**-7, atol=1e-6)
        kernels.append(len(backend._forward_kernel.compiled))
    # Shifts of 4 bytes need a kernel of their own; one of 16 bytes does not.
    assert kernels == [1, 2, 2, 2, 2, 2]
