"""MXFP8 kernels and api against the reference: bytes of the row operations, products against FP64, the cases that go
wrong."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import sys

import pytest
import torch
from budgets import poison_allocator
from moe_kernels import _compat, mxfp8
from moe_kernels.mxfp8 import api, blackwell, cuda, linear, reference
from moe_kernels.mxfp8 import rows as row_ops
from moe_kernels.swiglu import swiglu

CPU = torch.device("cpu")
# Rounding the FP64 result to BF16, which keeps 8 bits, costs at most 2^-8 of each element; FP32 sums over K <= 512 add
# a few 2^-24 of the magnitudes.
BF16_ERROR = 2.0**-8
FP32_ERROR = 1e-6
# Hopper's FP8 product of a step of 32 cuts its 32 terms and the sum so far 13 bits below the largest of them.
TENSOR_CORE_STEP = 33 * 2.0**-13


def impls(device: torch.device, *, fits_cuda: bool = True) -> list[str]:
    found = ["triton", "reference"]
    if fits_cuda and device.type == "cuda" and row_ops.cuda_ready(device.index or 0):
        found.append("cuda")
    return found


def hard_rows(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    g = torch.Generator().manual_seed(4)
    x = torch.randn(23, 96, generator=g) * torch.exp2(
        torch.randint(-12, 12, (23, 3), generator=g).float()
    ).repeat_interleave(32, 1)
    x[3], x[4, 5], x[5, 70] = 0, float("nan"), float("inf")
    x[6] *= 2.0**-124
    x[7, :32], x[8], x[9] = 0, 500, 448
    x[10, 0] = -float("inf")
    return x.to(dtype).to(device)


def same_bytes(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether payloads agree byte for byte, any NaN standing for any other."""
    a, b = got.view(torch.uint8), want.view(torch.uint8)
    return bool(((a == b) | (((a & 127) == 127) & ((b & 127) == 127))).all())


def groups(sizes: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32, device=device)


def operands(sizes: list[int], rows: int, n: int, k: int, device: torch.device, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=g).bfloat16().to(device)
    w = (torch.randn(len(sizes), n, k, generator=g) * k**-0.5).bfloat16().to(device)
    return x, w, groups(sizes, device)


def folded_weight(w: torch.Tensor) -> mxfp8.Folded:
    return linear._quantize_weight(w, "floor", "reference")


def largest_terms(a, a_scale, w, w_scale, ends) -> torch.Tensor:
    """The largest magnitude among the products and running sums of every output, [M, N] FP64."""
    rows, weights = reference.dequantize(a, a_scale), reference.dequantize(w, w_scale)
    out = torch.full((len(rows), weights.shape[1]), torch.nan, dtype=torch.float64, device=a.device)
    for e, (start, stop) in enumerate(reference.group_starts(ends, len(rows))):
        terms = rows[start:stop, None, :] * weights[e][None]
        out[start:stop] = torch.maximum(terms.abs().amax(-1), terms.cumsum(-1).abs().amax(-1))
    return out


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.detach().double() - want).norm() / want.norm())


@pytest.mark.parametrize("rounding", ["floor", "rceil"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", ["canonical", "folded", "row"])
def test_row_kernels_write_the_reference_bytes(device, dtype, rounding, target):
    x = hard_rows(device, dtype)
    want = mxfp8.quantize(x, rounding, target, impl="reference")
    for impl in impls(device, fits_cuda=dtype is torch.bfloat16):
        wide = torch.zeros(1, dtype=torch.int32, device=device)
        got = mxfp8.quantize(x, rounding, target, impl=impl, wide=wide)
        assert same_bytes(got[0], want[0]) and torch.equal(got[1], want[1])
        assert int(wide) == reference.fold(*reference.quantize(x, rounding))[2] > 0


def test_fold_kernels_write_the_reference_bytes(device):
    mx = mxfp8.quantize(hard_rows(device, torch.float32), impl="reference")
    mx.payload[0, :32] = 0
    mx.scales[0, 0] = 250
    payload, row_scale, count = reference.fold(*mx)
    for impl in impls(device):
        wide = torch.ones(1, dtype=torch.int32, device=device)
        got = mxfp8.fold(mx, impl=impl, wide=wide)
        assert same_bytes(got.payload, payload) and torch.equal(got.row_scale, row_scale)
        assert int(wide) == 1 + count


@pytest.mark.parametrize("k", [32, 160, 2080])
def test_rows_of_any_width(device, k):
    x = torch.randn(3, k, device=device).bfloat16()
    want = mxfp8.quantize(x, target="folded", impl="reference")
    for impl in impls(device):
        got = mxfp8.quantize(x, target="folded", impl=impl)
        assert same_bytes(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("target", ["canonical", "folded", "row"])
def test_swiglu_fused_with_quantisation(device, target):
    h = torch.randn(9, 128, device=device).bfloat16()
    want = mxfp8.swiglu_quantize(h, target=target, impl="reference")
    got = mxfp8.swiglu_quantize(h, target=target, impl="triton")
    differing = (got[0].view(torch.uint8) != want[0].view(torch.uint8)).float().mean()
    # exp differs by an ulp between libraries, which moves a value across a BF16 or E4M3 rounding boundary now and then.
    assert differing < 0.01
    assert relative(mxfp8.dequantize(mxfp8.MX(*got)), mxfp8.dequantize(mxfp8.MX(*want)).double()) < 0.01


SIZES = [[0, 17, 0, 5], [33, 0, 1, 0], [0, 0, 0, 0], [38, 0, 0, 0]]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("k", [64, 96])
def test_products_match_fp64_of_the_folded_values(device, sizes, k):
    x, w, ends = operands(sizes, 40, 48, k, device)
    a, fw = mxfp8.quantize(x, target="folded", impl="reference"), folded_weight(w)
    last = sum(sizes)
    want = reference.grouped_gemm(reference.dequantize(*a), reference.dequantize(*fw), ends)[:last]
    tensor_core = TENSOR_CORE_STEP * -(-k // 32) * largest_terms(*a, *fw, ends)[:last]
    for impl, source in itertools.product(impls(device), (a, mxfp8.quantize(x, impl="reference"), x)):
        # The interpreter truncates where the GPU rounds to BF16.
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        out = torch.full((40, 48), torch.nan, dtype=dtype, device=device)
        mxfp8.grouped_gemm(source, fw, ends, out=out, impl=impl)
        assert out[last:].isnan().all(), "rows of no group were written"
        sums = tensor_core if device.type == "cuda" and impl != "reference" else 0
        assert ((out[:last].double() - want).abs() <= BF16_ERROR * want.abs() + FP32_ERROR + sums).all()


@pytest.mark.parametrize("sizes", SIZES[:2])
def test_exact_mode_matches_fp64_of_the_canonical_values(device, sizes):
    x, w, ends = operands(sizes, 40, 48, 96, device)
    x[:, :32] *= 2.0**20
    w[:, :, :32] = 0
    a, mw, last = mxfp8.quantize(x, impl="reference"), linear.exact_operand(w, impl="reference"), sum(sizes)
    want = reference.grouped_gemm(reference.dequantize(*a), reference.dequantize(*mw), ends)[:last]
    for impl in impls(device, fits_cuda=False):
        out = torch.full((40, 48), torch.nan, dtype=torch.float32, device=device)
        mxfp8.grouped_gemm(a, mw, ends, out=out, impl=impl)
        assert out[last:].isnan().all()
        assert ((out[:last].double() - want).abs() <= FP32_ERROR + 2.0**-22 * want.abs()).all()
    for impl in impls(device):
        folded = mxfp8.grouped_gemm(a, folded_weight(w), ends, impl=impl)
        assert relative(folded[:last], want) > 0.5, "folding is expected to lose these rows"


def test_nan_stays_in_its_row_and_padding_scales_are_not_read(device):
    sizes = [5, 6]
    x, w, ends = operands(sizes, 20, 32, 96, device)
    x[3, 40] = float("nan")
    x[11:] = float("nan")
    fw = folded_weight(w)
    for impl in impls(device):
        out = mxfp8.grouped_gemm(x, fw, ends, out=torch.zeros(20, 32, dtype=torch.bfloat16, device=device), impl=impl)
        bad = out.isnan().any(1)
        assert bad.tolist() == [row == 3 for row in range(20)]


@pytest.mark.parametrize("mode", ["exact", "folded"])
def test_poisoned_scales_reach_their_own_row_and_column_only(device, mode):
    # K = 96 ends inside a tile's step, whose last scales are those of the next row: 0 times NaN would be NaN.
    x, w, ends = operands([5, 6], 20, 40, 96, device)
    a = mxfp8.quantize(x, target="folded" if mode == "folded" else "canonical", impl="reference")
    mw = folded_weight(w) if mode == "folded" else linear.exact_operand(w, impl="reference")
    rows, columns = [3, *range(11, 20)], (1, 7)
    a[0][11:] = float("nan")
    a[1][rows], mw[1][columns] = 255, 255
    for impl in impls(device, fits_cuda=mode == "folded"):
        dtype = torch.bfloat16 if impl == "cuda" else torch.float32
        out = mxfp8.grouped_gemm(a, mw, ends, out=torch.zeros(20, 40, dtype=dtype, device=device), impl=impl)
        bad = torch.zeros(20, 40, dtype=torch.bool, device=device)
        bad[3] = bad[5:11, 7] = True
        assert torch.equal(out.isnan(), bad) and (out[11:] == 0).all(), impl


@pytest.mark.parametrize("mode", ["exact", "folded"])
def test_scale_byte_0_is_two_to_the_minus_127(device, mode):
    a = torch.ones(4, 32, device=device).to(torch.float8_e4m3fn)
    w = torch.ones(1, 16, 32, device=device).to(torch.float8_e4m3fn)
    low, high = (torch.full((4, 1), 0, device=device), torch.full((1, 16, 1), 254, device=device))
    rows, weights = mxfp8.MX(a, low.byte()), mxfp8.MX(w, high.byte())
    if mode == "folded":
        rows, weights = mxfp8.Folded(a, low.byte()[:, 0]), mxfp8.Folded(w, high.byte()[..., 0])
    ends = groups([4], device)
    for impl in impls(device, fits_cuda=mode == "folded"):
        out = torch.zeros(4, 16, dtype=torch.bfloat16, device=device)
        mxfp8.grouped_gemm(rows, weights, ends, out=out, impl=impl)
        assert (out == 32).all(), impl


def test_more_rows_than_int32_counts_are_refused(device):
    with pytest.raises(ValueError, match="at most 2147483392 rows can be converted in a call; got 2147483648"):
        row_ops.new_rows(2**31, 32, "folded", device, None)


def test_offsets_past_the_rows_are_clamped(device):
    x, w, _ = operands([4, 4], 8, 32, 64, device)
    fw = folded_weight(w)
    for impl in impls(device):
        far = mxfp8.grouped_gemm(x, fw, groups([4, 1000], device), impl=impl)
        assert torch.equal(far, mxfp8.grouped_gemm(x, fw, groups([4, 4], device), impl=impl))


def test_negative_offsets_are_clamped(device):
    pool, outs = torch.randn(16, 64, device=device).bfloat16(), torch.full((16, 32), 7.0, device=device)
    _, w, _ = operands([4, 4], 8, 32, 64, device)
    rows, fw = mxfp8.quantize(pool, target="folded", impl="reference"), folded_weight(w)
    lower, ends = mxfp8.Folded(rows.payload[8:], rows.row_scale[8:]), torch.tensor([-5, 4], device=device).int()
    want = mxfp8.grouped_gemm(lower, fw, groups([0, 4], device), impl="reference")
    for impl in impls(device):
        out = outs.clone() if impl != "cuda" else outs.bfloat16()
        mxfp8.grouped_gemm(lower, fw, ends, out=out[8:], impl=impl)
        assert (out[:8] == 7).all() and (out[12:] == 7).all(), "rows of no group were written"
        assert relative(out[8:12], want[:4].double()) < 0.01


def test_bad_arguments_are_named(device):
    x, w, ends = operands([4, 4], 8, 32, 64, device)
    fw, a = folded_weight(w), mxfp8.quantize(x, impl="reference")
    with pytest.raises(ValueError, match="multiple of 32; got 40"):
        mxfp8.quantize(torch.zeros(2, 40, device=device))
    with pytest.raises(ValueError, match="positive multiple of 32; got 0"):
        mxfp8.quantize(torch.zeros(2, 0, device=device))
    with pytest.raises(TypeError, match=r"out_dtype must be torch.bfloat16 or torch.float32; got torch\.int32"):
        mxfp8.grouped_gemm(x, fw, ends, out_dtype=torch.int32)
    with pytest.raises(TypeError, match=r"out_dtype must be .*; got None"):
        mxfp8.grouped_gemm(x, fw, ends, out_dtype=None)
    with pytest.raises(TypeError, match="variant must be an int or None; got True"):
        mxfp8.grouped_gemm(x, fw, ends, variant=True)
    with pytest.raises(TypeError, match="fold takes MX; got tuple"):
        mxfp8.fold((x, x))
    with pytest.raises(TypeError, match=r"out must be a pair \(payload, scales\) or None; got int"):
        mxfp8.quantize(x, out=5)
    with pytest.raises(ValueError, match="rounding must be 'floor' or 'rceil'; got 'even'"):
        mxfp8.quantize(x, "even")
    with pytest.raises(ValueError, match="target must be one of canonical, folded, row; got 'rows'"):
        mxfp8.quantize(x, target="rows")
    with pytest.raises(TypeError, match="offsets must have dtype"):
        mxfp8.grouped_gemm(x, fw, ends.long())
    with pytest.raises(ValueError, match="offsets must have shape"):
        mxfp8.grouped_gemm(x, fw, ends[:1])
    with pytest.raises(TypeError, match="exact mode"):
        mxfp8.grouped_gemm(x, linear.exact_operand(w, impl="reference"), ends)
    with pytest.raises(ValueError, match="share memory"):
        mxfp8.grouped_gemm(x, fw, ends, out=x.view(8, 64)[:, :32].as_strided((8, 32), (32, 1)))
    with pytest.raises(ValueError, match="accumulate must be"):
        mxfp8.grouped_gemm(a, fw, ends, accumulate="slow")
    with pytest.raises(ValueError, match="out payload must have shape"):
        mxfp8.fold(
            a,
            out=(
                torch.empty(1, 64, dtype=torch.float8_e4m3fn, device=device),
                torch.empty(8, dtype=torch.uint8, device=device),
            ),
        )
    with pytest.raises(ValueError, match="multiples of 32; got 40"):
        mxfp8.GroupedLinear(2, 40, 64)
    with pytest.raises(TypeError, match=r"a must be a torch\.Tensor, MX or Folded; got list"):
        mxfp8.grouped_gemm([1.0], fw, ends)
    with pytest.raises(TypeError, match="w must be MX or Folded; got Tensor"):
        mxfp8.grouped_gemm(x, w, ends)
    with pytest.raises(TypeError, match="scratch must be Folded or None; got int"):
        mxfp8.grouped_gemm(x, fw, ends, out=torch.empty(8, 32, device=device), scratch=5)
    with pytest.raises(TypeError, match=r"out must be a torch\.Tensor; got NoneType"):
        mxfp8.prepare(x, fw, ends, None)
    with pytest.raises(ValueError, match=r"weight must have shape \[any, any, any\]; got \[32, 64\]"):
        mxfp8.QuantizedWeight(w[0])
    with pytest.raises(ValueError, match=r"width of h must be a positive multiple of 64 .*; got 65"):
        mxfp8.swiglu_quantize(torch.zeros(2, 65, device=device))
    for wide in (torch.zeros(1, device=device), torch.zeros(2, dtype=torch.int32, device=device)):
        for call in (lambda w: mxfp8.quantize(x, wide=w), lambda w: mxfp8.fold(a, wide=w)):
            with pytest.raises((TypeError, ValueError), match="wide must have"):
                call(wide)
        with pytest.raises((TypeError, ValueError), match="wide must have"):
            mxfp8.swiglu_quantize(x, wide=wide)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"accumulate": ["fast"]}, r"accumulate must be 'promoted' or 'fast'; got \['fast'\]"),
        ({"rounding": ["floor"]}, r"rounding must be 'floor' or 'rceil'; got \['floor'\]"),
        ({"impl": ["cuda"]}, r"impl must be one of cuda, triton, reference; got \['cuda'\]"),
        ({"overlap": [True]}, r"overlap must be True, False or None; got \[True\]"),
        ({"variant": [0]}, r"variant must be an int or None; got \[0\]"),
        ({"variant": 0, "impl": "reference"}, "expected impl=None or 'cuda' beside it, got 'reference'"),
    ],
)
def test_options_that_cannot_be_hashed_are_named(device, options, error):
    x, w, ends = operands([4, 4], 8, 32, 64, device)
    fw, out = folded_weight(w), torch.empty(8, 32, dtype=torch.bfloat16, device=device)
    for rows in (x, mxfp8.quantize(x, target="folded", impl="reference")):
        with pytest.raises((TypeError, ValueError), match=error):
            mxfp8.grouped_gemm(rows, fw, ends, out=out, **options)


def test_a_target_that_cannot_be_hashed_is_named(device):
    x = torch.zeros(8, 64, device=device)
    error = r"target must be one of canonical, folded, row; got \['row'\]"
    for call in (mxfp8.quantize, mxfp8.swiglu_quantize):
        with pytest.raises(ValueError, match=error):
            call(x, target=["row"])


@pytest.mark.parametrize(("misfit", "default"), [(None, "cuda"), ("does this, got that", "triton")])
def test_the_choice_is_free_without_a_name_and_bound_by_one(monkeypatch, misfit, default):
    monkeypatch.setattr(row_ops, "cuda_ready", lambda index: True)
    gpu = torch.device("cuda", 0)
    assert row_ops.pick_impl(None, gpu, misfit) == default
    assert [row_ops.pick_impl(name, gpu, misfit) for name in ("triton", "reference")] == ["triton", "reference"]
    if misfit is None:
        assert row_ops.pick_impl("cuda", gpu, misfit) == "cuda"
    else:
        with pytest.raises(ValueError, match="impl='cuda' does this, got that; use impl='triton', or leave impl out"):
            row_ops.pick_impl("cuda", gpu, misfit)


def test_what_the_cuda_kernels_do_not_do_is_refused_under_their_name():
    x, w, ends = operands([4, 4], 8, 32, 64, CPU)
    fw, mw, odd = folded_weight(w), linear.exact_operand(w, impl="reference"), folded_weight(w[:, :20])
    a, wide = mxfp8.quantize(x, impl="reference"), torch.empty(8, 32)
    for call, words in (
        (lambda i: mxfp8.quantize(x.float(), impl=i), "quantises rows of torch.bfloat16, got x of torch.float32"),
        (lambda i: mxfp8.swiglu_quantize(x, impl=i), "quantises rows as they are, got rows that go through SwiGLU"),
        (lambda i: mxfp8.grouped_gemm(a, mw, ends, impl=i), "multiplies folded weights, got canonical w"),
        (lambda i: mxfp8.grouped_gemm(x.float(), fw, ends, impl=i), "rows of torch.bfloat16, got a of torch.float32"),
        (lambda i: mxfp8.grouped_gemm(x, fw, ends, out=wide, impl=i), "writes torch.bfloat16, got out of torch.float3"),
        (lambda i: mxfp8.grouped_gemm(x, odd, ends, impl=i), "needs N to be a multiple of 8 .*, got 20"),
    ):
        with pytest.raises(ValueError, match=f"impl='cuda' .*{words}.*; use impl='triton', or leave impl out"):
            call("cuda")
        call(None)
    with pytest.raises(RuntimeError, match="impl='cuda' needs a GPU of compute capability 9"):
        mxfp8.grouped_gemm(x, fw, ends, variant=0)


def test_rows_in_fp32_are_quantised_before_a_product_that_chooses_for_itself():
    x, w, ends = operands([4, 4], 8, 32, 64, CPU)
    fw, out = folded_weight(w), torch.empty(8, 32)
    scratch = mxfp8.Folded(*(torch.empty_like(t) for t in mxfp8.quantize(x, target="folded", impl="reference")))
    want = mxfp8.grouped_gemm(mxfp8.quantize(x, target="folded"), fw, ends, out_dtype=torch.float32)
    assert mxfp8.grouped_gemm(x.float(), fw, ends, out=out, scratch=scratch) is out and torch.equal(out, want)
    assert torch.equal(scratch.payload.view(torch.uint8), mxfp8.quantize(x, target="folded")[0].view(torch.uint8))


def test_slices_of_one_buffer_and_no_rows_at_all_are_fine(device):
    pool = torch.zeros(16, 64, dtype=torch.bfloat16, device=device)
    pool[:8].normal_()
    _, w, ends = operands([4, 4], 8, 64, 64, device)
    fw = folded_weight(w)
    out = mxfp8.grouped_gemm(pool[:8], fw, ends, out=pool[8:], impl="reference")
    assert out.abs().sum() > 0
    assert mxfp8.grouped_gemm(pool[:0], fw, ends * 0).shape == (0, 64)


def test_linear_gradients_against_fp64(device):
    sizes = [7, 0, 12]
    x, w, ends = operands(sizes, 24, 64, 96, device)
    layer = mxfp8.GroupedLinear(3, 96, 64, device=device, impl="reference" if device.type == "cpu" else None)
    layer.weight.data.copy_(w)
    x.requires_grad_()
    grad = torch.randn(24, 64, device=device).bfloat16()
    y = layer(x, ends)
    for nbytes in (layer.weight.nbytes, x.nbytes, y.nbytes):
        poison_allocator(nbytes, device)
    y.backward(grad)
    assert (y[19:] == 0).all() and (x.grad[19:] == 0).all()
    want_y = reference.grouped_gemm(x.detach(), w, ends)[:19]
    want_x = reference.grouped_gemm(grad, w.transpose(1, 2), ends)[:19]
    # Both operands keep 4 significant bits of E4M3: 2^-4 at worst an element, near 4e-2 in the norm.
    assert relative(y[:19], want_y) < 0.06 and relative(x.grad[:19], want_x) < 0.06
    for e, (start, stop) in enumerate(reference.group_starts(ends, 24)):
        want = grad[start:stop].double().T @ x.detach()[start:stop].double()
        assert ((layer.weight.grad[e].double() - want).abs() <= 2.0**-8 * want.abs() + 1e-5).all()


def test_weight_copies_are_renewed_once_after_each_step(monkeypatch):
    made = []
    real = linear.QuantizedWeight
    monkeypatch.setattr(linear, "QuantizedWeight", lambda *a: made.append(1) or real(*a))
    layer = mxfp8.GroupedLinear(2, 32, 32, dtype=torch.float32)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    x, ends = torch.randn(4, 32), torch.tensor([2, 4], dtype=torch.int32)
    outputs = []
    for _ in range(2):
        for _ in range(3):
            outputs.append(layer(x, ends))
        outputs[-1].sum().backward()
        optimizer.step()
    assert len(made) == 2
    assert torch.equal(outputs[0], outputs[2]) and not torch.equal(outputs[2], outputs[3])


def test_a_weight_that_took_the_place_of_another_is_quantised_anew():
    layer, ends = mxfp8.GroupedLinear(2, 32, 32, dtype=torch.float32), torch.tensor([2, 4], dtype=torch.int32)
    memory, x = layer.weight.data, torch.randn(4, 32)
    layer(x, ends)
    memory.mul_(2)
    first, layer.weight = layer.weight, torch.nn.Parameter(memory)
    assert (layer.weight.data_ptr(), layer.weight._version) == (first.data_ptr(), first._version)
    assert torch.equal(layer(x, ends), mxfp8.grouped_linear(x, layer.weight, ends))


def test_a_copied_or_saved_layer_quantises_its_own_weight():
    layer, ends = mxfp8.GroupedLinear(2, 32, 32, dtype=torch.float32), torch.tensor([2, 4], dtype=torch.int32)
    x = torch.randn(4, 32)
    want = layer(x, ends)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other._cache is None and torch.equal(other(x, ends), want)
        with torch.no_grad():
            other.weight.mul_(2)
        assert torch.equal(other(x, ends), 2 * want)
    assert torch.equal(layer(x, ends), want)


class Recorded:
    """A library that notes which launchers were called, and launches nothing."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str):
        def launcher(*args):
            self.calls.append(name + (" kept" if name.endswith("_launch") and args[-1] is not None else ""))
            return 1 if name == "mx_plan_new" else 0

        return launcher


@pytest.fixture
def recorded(monkeypatch) -> Recorded:
    """CPU tensors take the CUDA kernels' host path, with a device 7 current."""
    lib = Recorded()
    monkeypatch.setattr(cuda, "library", lambda: lib)
    monkeypatch.setattr(api, "pick_impl", lambda impl, device, misfit: "cuda")
    monkeypatch.setattr(row_ops, "pick_impl", lambda impl, device, misfit=None: impl or "reference")
    monkeypatch.setattr(_compat, "current_stream_address", lambda index: 0)
    monkeypatch.setattr(_compat, "current_device", lambda: 7)
    monkeypatch.setattr(api, "_PLANS", {})
    return lib


@pytest.mark.parametrize("rows", [16, 4096])
def test_a_plan_is_found_whichever_device_is_current(recorded, rows):
    x, w, ends = operands([rows // 2] * 2, rows, 32, 64, CPU)
    fw, out = folded_weight(w), torch.empty(rows, 32, dtype=torch.bfloat16)
    scratch = mxfp8.quantize(x, target="folded", impl="reference")
    mxfp8.grouped_gemm(x, fw, ends, out=out, scratch=scratch)
    launches = ["mx_small_launch"] if rows == 16 else ["mx_rows_launch", "mx_big_launch"]
    assert recorded.calls == [*launches, "mx_plan_new", *(f"{name} kept" for name in launches)]
    recorded.calls.clear()
    mxfp8.grouped_gemm(x, fw, ends, out=out, scratch=scratch)
    assert recorded.calls == ["mx_plan_run"]
    recorded.calls.clear()
    ready = mxfp8.prepare(x, fw, ends, out, scratch=scratch)
    assert ready() is out
    assert recorded.calls[-1] == "mx_plan_run"


def test_bad_scratch_is_refused_at_every_call(recorded):
    x, w, ends = operands([512, 512], 1024, 32, 64, CPU)
    fw, out = folded_weight(w), torch.empty(1024, 32, dtype=torch.bfloat16)
    short = mxfp8.Folded(*(t[:8] for t in mxfp8.quantize(x, target="folded", impl="reference")))
    inside = mxfp8.Folded(out.view(torch.float8_e4m3fn), torch.empty(1024, dtype=torch.uint8))
    shared = inside._replace(payload=x.view(-1).view(torch.float8_e4m3fn)[: x.numel()].view_as(x))
    alias = "scratch must not share memory"
    for scratch, error in ((short, "out payload must have shape"), (inside, alias), (shared, alias)):
        for _ in range(3):
            with pytest.raises(ValueError, match=error):
                mxfp8.grouped_gemm(x, fw, ends, out=out, scratch=scratch)
    assert not api._PLANS and not recorded.calls


def test_an_address_between_16_bytes_is_refused_before_a_launch(recorded):
    def moved(t: torch.Tensor) -> torch.Tensor:
        raw = torch.empty(t.nbytes + 32, dtype=torch.uint8)
        start = -raw.data_ptr() % 16 + 8
        return raw[start : start + t.nbytes].view(t.dtype).view(t.shape)

    x, w, ends = operands([4, 4], 8, 32, 64, CPU)
    fw, out = folded_weight(w), torch.empty(8, 32, dtype=torch.bfloat16)
    bad_w = fw._replace(payload=moved(fw.payload))
    for name, args in (("a", (moved(x), fw, out)), ("w payload", (x, bad_w, out)), ("out", (x, fw, moved(out)))):
        with pytest.raises(ValueError, match=f"{name} to start at a multiple of 16 bytes; got 8 bytes past"):
            mxfp8.grouped_gemm(args[0], args[1], ends, out=args[2])
    with pytest.raises(ValueError, match="the rows to start at a multiple of 16 bytes"):
        mxfp8.quantize(moved(x), impl="cuda")
    assert not recorded.calls


def test_a_plan_without_a_library_leaves_no_second_error(monkeypatch):
    def missing():
        raise RuntimeError("no nvcc")

    ignored = []
    monkeypatch.setattr(cuda, "library", missing)
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    with pytest.raises(RuntimeError, match="no nvcc"):
        cuda.Plan()
    gc.collect()
    assert not ignored


def test_a_given_out_does_not_break_a_compiled_graph():
    x, w, ends = operands([4, 4], 8, 32, 64, CPU)
    fw, out = folded_weight(w), torch.zeros(8, 32)
    compiled = torch.compile(
        lambda a: mxfp8.grouped_gemm(a, fw, ends, out=out, impl="reference") * 2, fullgraph=True, backend="eager"
    )
    assert torch.equal(compiled(x), 2 * mxfp8.grouped_gemm(x, fw, ends, out=torch.zeros(8, 32), impl="reference"))


@pytest.mark.parametrize(("impl", "asked"), [("reference", "reference"), ("triton", "triton"), (None, None)])
def test_a_named_implementation_is_that_of_the_weight_gradient_too(impl, asked, monkeypatch):
    seen = []
    monkeypatch.setattr(linear, "grouped_gemm_wgrad", lambda grad, x, ends, impl: seen.append(impl) or grad)
    linear.weight_gradient(torch.zeros(4, 32), torch.zeros(4, 32), torch.tensor([4], dtype=torch.int32), impl)
    assert seen == [asked]


def test_block_scaled_layout_is_a_permutation_with_known_places():
    scales = torch.arange(200 * 6, dtype=torch.int32).view(200, 6)
    flat = blackwell.swizzle_scales(scales)
    assert flat.numel() == 256 * 8
    for r, c in ((0, 0), (31, 3), (32, 1), (127, 3), (128, 0), (199, 5)):
        tile = (r // 128) * 2 + c // 4
        assert flat[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] == scales[r, c]
    with pytest.raises(RuntimeError, match="compute capability 10"):
        blackwell.grouped_gemm(
            mxfp8.quantize(torch.zeros(2, 32)),
            linear.exact_operand(torch.zeros(1, 2, 32)),
            torch.tensor([2], dtype=torch.int32),
        )


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", ["floor", "rceil"])
@pytest.mark.parametrize("target", ["canonical", "folded", "row"])
def test_swiglu_fused_writes_the_bytes_of_swiglu_then_quantise(target, rounding):
    h = torch.randn(70, 2 * 352, device=GPU).mul_(3).bfloat16()
    h[5], h[6, 400] = 0, float("nan")
    plain = swiglu(h, groups([70], GPU), impl="triton")
    want = mxfp8.quantize(plain, rounding, target, impl="reference")
    got = mxfp8.swiglu_quantize(h, rounding, target, impl="triton")
    assert same_bytes(got[0], want[0]) and torch.equal(got[1], want[1])


GPU = torch.device("cuda")


@pytest.fixture
def cuda_kernels() -> None:
    if not row_ops.cuda_ready(0):
        pytest.skip("the CUDA kernels need compute capability 9 and nvcc")


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [*range(4), *(api.SMALL + c for c in (8, 16, 32, 64, 108, 116, 132))])
@pytest.mark.parametrize("n, k", [(768, 1536), (208, 2336)])
def test_every_cuda_variant(cuda_kernels, variant, n, k):
    sizes = [0, 129, 300, 128, 0, 1, 8, 250]
    x, w, ends = operands(sizes, 1000, n, k, GPU)
    fw = folded_weight(w)
    last = sum(sizes)
    want = reference.grouped_gemm(
        reference.dequantize(*mxfp8.quantize(x, target="folded", impl="reference")), reference.dequantize(*fw), ends
    )[:last]
    # The tensor core's own accumulator keeps 14 bits or so of a sum: 1e-3 of the norm at these K.
    limit = 2.5e-3 if variant == 3 else 1.8e-3
    for source, overlap in itertools.product((x, mxfp8.quantize(x), mxfp8.quantize(x, target="folded")), (False, True)):
        out = torch.full((1000, n), torch.nan, dtype=torch.bfloat16, device=GPU)
        mxfp8.grouped_gemm(source, fw, ends, out=out, variant=variant, overlap=overlap)
        assert out[last:].isnan().all()
        assert relative(out[:last], want) < limit


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [48, 4096])
def test_replay_follows_new_offsets_and_repeats_bitwise(cuda_kernels, rows):
    sizes = [rows // 4] * 4
    x, w, ends = operands(sizes, rows, 256, 256, GPU)
    fw, out = folded_weight(w), torch.empty(rows, 256, dtype=torch.bfloat16, device=GPU)
    scratch = mxfp8.Folded(*mxfp8.quantize(x, target="folded"))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        mxfp8.grouped_gemm(x, fw, ends, out=out, scratch=scratch)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for _ in range(3):
                mxfp8.grouped_gemm(x, fw, ends, out=out, scratch=scratch)
    for new in ([rows // 2, 0, rows // 4, rows // 4], [1, 2, 3, 4], [0, 0, 0, rows]):
        ends.copy_(groups(new, GPU))
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        eager = torch.full_like(out, torch.nan)
        mxfp8.grouped_gemm(x, fw, ends, out=eager)
        assert torch.equal(out.nan_to_num(7.0), eager.nan_to_num(7.0))
        assert eager[: sum(new)].isfinite().all() and eager[sum(new) :].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [48, 4096])
def test_prepared_call_sees_new_values_and_equals_the_checked_one(cuda_kernels, rows):
    x, w, ends = operands([rows // 4] * 4, rows, 256, 256, GPU)
    fw, out = folded_weight(w), torch.empty(rows, 256, dtype=torch.bfloat16, device=GPU)
    scratch = mxfp8.Folded(*mxfp8.quantize(x, target="folded"))
    folded = mxfp8.quantize(x, target="folded")
    for source in (x, folded):
        call = mxfp8.prepare(source, fw, ends, out, scratch=scratch)
        x.mul_(2)
        folded.row_scale.add_(1)
        out.fill_(torch.nan)
        assert torch.equal(call(), mxfp8.grouped_gemm(source, fw, ends))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [48, 4096])
def test_a_repeated_call_launches_what_the_first_one_checked(cuda_kernels, rows):
    x, w, ends = operands([rows // 4] * 4, rows, 256, 256, GPU)
    fw, scratch = folded_weight(w), mxfp8.Folded(*mxfp8.quantize(x, target="folded"))
    outs = [torch.empty(rows, 256, dtype=torch.bfloat16, device=GPU) for _ in range(2)]
    api._PLANS.clear()
    for step, source in enumerate((x, x, x * 2, mxfp8.quantize(x), mxfp8.quantize(x, target="folded"))):
        for out in outs:
            want = mxfp8.grouped_gemm(source, fw, ends)
            for _ in range(3):
                out.fill_(torch.nan)
                mxfp8.grouped_gemm(source, fw, ends, out=out, scratch=scratch)
                assert torch.equal(out, want)
        assert len(api._PLANS) == (2, 2, 4, 6, 8)[step]
    with pytest.raises(TypeError, match="offsets must have dtype"):
        mxfp8.grouped_gemm(x, fw, ends.view(torch.float32), out=outs[0], scratch=scratch)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [48, 4096])
@pytest.mark.parametrize(("home", "current"), [(1, 0), (0, 1)])
def test_launches_follow_their_tensors_whichever_device_is_current(cuda_kernels, rows, home, current):
    if torch.cuda.device_count() < 2 or not row_ops.cuda_ready(1):
        pytest.skip("needs two GPUs of compute capability 9")
    device = torch.device("cuda", home)
    x, w, ends = operands([rows // 4] * 4, rows, 256, 256, device)
    fw, scratch = folded_weight(w), mxfp8.Folded(*mxfp8.quantize(x, target="folded"))
    out, stream = torch.empty(rows, 256, dtype=torch.bfloat16, device=device), torch.cuda.Stream(device)
    with torch.cuda.device(device):
        want = mxfp8.grouped_gemm(x, fw, ends)
    api._PLANS.clear()
    with torch.cuda.device(current):
        ready = mxfp8.prepare(x, fw, ends, out, scratch=scratch)
        for call in (ready, lambda: mxfp8.grouped_gemm(x, fw, ends, out=out, scratch=scratch, impl="cuda")):
            for _ in range(3):
                out.fill_(torch.nan)
                assert call() is out and torch.equal(out, want)
                assert torch.cuda.current_device() == current
        (kept,) = api._PLANS.values()
        out.fill_(torch.nan)
        torch.cuda.synchronize(device)
        with torch.cuda.stream(stream):
            torch.cuda.set_device(current)
            ready()
        stream.synchronize()
        assert torch.equal(out, want)
    assert kept[1] == home


@pytest.mark.gpu
def test_chain_of_overlapped_launches_sees_fresh_rows(cuda_kernels):
    x, w, ends = operands([16] * 4, 64, 256, 256, GPU)
    fw = folded_weight(w)
    for step in range(200):
        rows = x * (1 + step % 7)
        first = mxfp8.grouped_gemm(rows, fw, ends)
        second = mxfp8.grouped_gemm(first, fw, ends)
        if step % 20 == 0:
            want = mxfp8.grouped_gemm(mxfp8.grouped_gemm(rows, fw, ends, overlap=False), fw, ends, overlap=False)
            assert torch.equal(second, want)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [512, 2048])
def test_an_early_product_sees_weights_and_group_ends_written_just_before(cuda_kernels, rows):
    x, w, ends = operands([rows // 4] * 4, rows, 512, 512, GPU)
    fw, scratch = folded_weight(w), mxfp8.Folded(*mxfp8.quantize(x, target="folded"))
    out, split = (
        torch.empty(rows, 512, dtype=torch.bfloat16, device=GPU),
        [groups([8 * i, 64, 32, 64], GPU) for i in range(7)],
    )
    for step in range(200):
        x.mul_(-1)
        fw.payload.view(torch.uint8).bitwise_xor_(128)
        fw.row_scale.copy_(fw.row_scale ^ 1)
        ends.copy_(split[step % 7])
        out.fill_(torch.nan)
        mxfp8.grouped_gemm(x, fw, ends, out=out, scratch=scratch)
        if step % 10 == 0:
            want = mxfp8.grouped_gemm(x, fw, ends, out=torch.full_like(out, torch.nan), overlap=False)
            assert torch.equal(out.nan_to_num(7.0), want.nan_to_num(7.0)) and out[: 8 * (step % 7)].isfinite().all()


@pytest.mark.gpu
def test_traces_under_torch_compile(cuda_kernels):
    x, w, ends = operands([16] * 4, 64, 256, 256, GPU)
    fw = folded_weight(w)
    compiled = torch.compile(lambda a: mxfp8.grouped_gemm(a, fw, ends) * 2, fullgraph=True)
    torch.testing.assert_close(compiled(x), mxfp8.grouped_gemm(x, fw, ends) * 2)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["cuda", "triton"])
def test_rows_and_products_of_more_than_two_to_the_31_elements(cuda_kernels, impl):
    k, n = 2048, 64
    rows = 2**31 // k + 300
    x = torch.empty(rows, k, dtype=torch.bfloat16, device=GPU).normal_()
    _, w, ends = operands([rows - 170, 130], 1, n, k, GPU)
    fw, last = folded_weight(w), slice(rows - 300, rows - 40)
    a = mxfp8.quantize(x, target="folded", impl=impl)
    want = mxfp8.quantize(x[last], target="folded", impl="reference")
    assert same_bytes(a[0][last], want[0]) and torch.equal(a[1][last], want[1])
    for source in (a, x):
        out = torch.full((rows, n), torch.nan, dtype=torch.bfloat16, device=GPU)
        mxfp8.grouped_gemm(source, fw, ends, out=out, impl=impl)
        exact = reference.grouped_gemm(reference.dequantize(*want), reference.dequantize(*fw), groups([130, 130], GPU))
        assert relative(out[last], exact) < 2.5e-3 and out[-40:].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [48, 512, 4096])
@pytest.mark.parametrize("impl", ["cuda", "triton"])
def test_launches_go_to_the_current_stream(cuda_kernels, rows, impl):
    # The default stream sleeps: whatever were launched to it would come after the check on the other stream.
    x, w, ends = operands([rows // 4] * 4, rows, 256, 256, GPU)
    fw, out = folded_weight(w), torch.empty(rows, 256, dtype=torch.bfloat16, device=GPU)
    scratch = mxfp8.Folded(*mxfp8.quantize(x, target="folded"))
    want = mxfp8.grouped_gemm(x, fw, ends, impl=impl)
    side = torch.cuda.Stream()
    for _ in range(3):  # the third call runs a kept plan
        out.fill_(torch.nan)
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        with torch.cuda.stream(side):
            mxfp8.grouped_gemm(x, fw, ends, out=out, scratch=scratch, impl=impl)
            got = out.clone()
        side.synchronize()
        assert torch.equal(got, want)
        torch.cuda.synchronize()
