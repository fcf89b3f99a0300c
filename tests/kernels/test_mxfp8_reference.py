"""The MXFP8 reference: bytes of torchao, bytes of an integer oracle, folding and its failure."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from moe_kernels.mxfp8 import reference

GOLDENS = np.load(Path(__file__).parent / "goldens" / "mxfp8_torchao.npz")
NAMES = sorted({key.split("/")[0] for key in GOLDENS.files})
E4M3_VALUES = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()


def golden(name: str, dtype: str, rounding: str) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    x = torch.from_numpy(GOLDENS[f"{name}/input"]).view(torch.float32)
    x = x if dtype == "fp32" else x.to(torch.bfloat16)
    key = f"{name}/{dtype}/{rounding}"
    return x, GOLDENS[f"{key}/payload"], GOLDENS[f"{key}/scales"]


def as_bytes(payload: torch.Tensor) -> np.ndarray:
    """Payload bytes with every NaN as 0x7F: IEEE leaves the sign of a NaN open."""
    raw = payload.view(torch.uint8).numpy().copy()
    raw[(raw & 0x7F) == 0x7F] = 0x7F
    return raw


def nan_signless(raw: np.ndarray) -> np.ndarray:
    return np.where((raw & 0x7F) == 0x7F, 0x7F, raw)


def quantize_torchao(x: torch.Tensor, rounding: str = "floor") -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise as torchao 0.18's `to_mx`, with its four departures from the rules above, for comparison byte for byte.

    They are: rceil takes log2 in FP32, so a maximum one ulp above 448 * 2^n is rounded down; the scale of byte 0
    counts as 2^-126 (floor) or 1 (rceil); Inf gives byte 247 (floor) or 254 (rceil) and saturates; in a
    block with a NaN only the NaN itself is a NaN element under floor.
    """
    blocks = x.to(torch.float32).unflatten(-1, (-1, reference.BLOCK))
    amax = blocks.abs().amax(-1)
    byte = reference.exponent_byte(amax, rounding).to(torch.int32)
    if rounding == "rceil":
        rounded = torch.ceil(torch.log2(amax / reference.E4M3_MAX)).clamp(-127, 127).nan_to_num(0) + 127
        byte = torch.where(byte == reference.NAN_SCALE, byte, rounded.to(torch.int32))
    byte = torch.where(amax.isinf(), 247 if rounding == "floor" else 254, byte)
    scale = reference.scale_value(byte.to(torch.uint8))
    if rounding == "floor":
        scale = torch.where(byte == reference.NAN_SCALE, torch.inf, torch.where(byte == 0, 2.0**-126, scale))
    else:
        scale = torch.where(byte == 0, 1.0, scale)
    scaled = (blocks.to(torch.float64) / scale.unsqueeze(-1)).to(torch.float32)
    return reference.to_e4m3(scaled).flatten(-2), byte.to(torch.uint8)


@pytest.mark.parametrize("rounding", ["floor", "rceil"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_torchao_convention_matches_torchao_byte_for_byte(name, dtype, rounding):
    x, payload, scales = golden(name, dtype, rounding)
    got_payload, got_scales = quantize_torchao(x, rounding)
    np.testing.assert_array_equal(got_scales.numpy(), scales)
    np.testing.assert_array_equal(as_bytes(got_payload), nan_signless(payload))


@pytest.mark.parametrize("rounding", ["floor", "rceil"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_default_matches_torchao_where_torchao_follows_the_specification(name, dtype, rounding):
    x, payload, scales = golden(name, dtype, rounding)
    got_payload, got_scales = reference.quantize(x, rounding)
    amax = x.float().unflatten(-1, (-1, 32)).abs().amax(-1).numpy()
    finite = np.isfinite(amax)
    just_above = (
        finite
        & (rounding == "rceil")
        & ((amax.view(np.int32) & 0x7FFFFF) > 0x600000)
        & ((amax.view(np.int32) & 0x7FFFFF) < 0x600010)
    )
    assert just_above.any() == (name == "edge" and dtype == "fp32" and rounding == "rceil")
    follows = finite & ~just_above
    np.testing.assert_array_equal(got_scales.numpy()[follows], scales[follows])
    assert (got_scales.numpy()[~finite] == 255).all()
    same = follows & ((got_scales.numpy() != 0) | (amax == 0))
    assert same.any()
    wide = np.repeat(same, 32, axis=-1)
    np.testing.assert_array_equal(as_bytes(got_payload)[wide], payload[wide])


@pytest.mark.parametrize(
    ("amax", "floor", "rceil"),
    [(500.0, 127, 128), (448.0, 127, 127), (0.0, 0, 0), (1.0, 119, 119), (0.99999994, 118, 119)],
)
def test_block_maximum_gives_the_stated_byte(amax, floor, rceil):
    value = torch.tensor([amax])
    assert reference.exponent_byte(value, "floor").item() == floor
    assert reference.exponent_byte(value, "rceil").item() == rceil


@pytest.mark.parametrize("rounding", ["floor", "rceil"])
def test_elements_match_exact_rational_rounding(rounding):
    rng = np.random.default_rng(3)
    x = torch.from_numpy((rng.standard_normal((6, 32)) * np.exp2(rng.integers(-12, 4, (6, 32)))).astype(np.float32))
    payload, scales = reference.quantize(x, rounding)
    table = [Fraction(v) for v in E4M3_VALUES]
    for row in range(6):
        scale = Fraction(2) ** (int(scales[row, 0]) - 127)
        for value, byte in zip(x[row].tolist(), payload[row].view(torch.uint8).tolist()):
            wanted = min(abs(Fraction(value)) / scale, table[-1])
            distances = [abs(v - wanted) for v in table]
            nearest = [i for i, d in enumerate(distances) if d == min(distances)]
            best = nearest[0] if len(nearest) == 1 or nearest[0] % 2 == 0 else nearest[1]
            assert byte & 127 == best
            assert (byte >> 7) == int(np.signbit(value))


def test_quantize_needs_whole_blocks():
    with pytest.raises(ValueError, match="multiple of 32; got 40"):
        reference.quantize(torch.zeros(2, 40))


def test_fold_is_exact_while_elements_stay_normal_and_bounded_after():
    rng = np.random.default_rng(5)
    x = torch.from_numpy(
        (rng.standard_normal((16, 256)) * np.exp2(np.repeat(rng.integers(-6, 6, (16, 8)), 32, 1))).astype(np.float32)
    )
    payload, scales = reference.quantize(x)
    folded, row_scale, _ = reference.fold(payload, scales)
    exact, got = reference.dequantize(payload, scales), reference.dequantize(folded, row_scale)
    shift = (row_scale.int()[:, None] - scales.int()).repeat_interleave(32, 1)
    normal = exact.abs() >= reference.scale_value(row_scale)[:, None] * 2.0**-6
    assert normal.any() and (~normal).any()
    assert torch.equal(exact[normal], got[normal])
    amax = exact.unflatten(-1, (-1, 32)).abs().amax(-1).repeat_interleave(32, 1)
    assert ((exact - got).abs() <= amax * torch.exp2(shift - 18.0)).all()


def test_fold_counts_rows_whose_blocks_spread_too_far():
    x = torch.ones(4, 96)
    x[1, :32] *= 2.0**9
    x[2, :32] *= 2.0**8
    x[3, :32] = 0
    _, _, wide = reference.fold(*reference.quantize(x))
    assert wide == 1


def test_fold_ignores_the_scale_of_a_zero_block_and_spreads_a_nan_scale():
    payload, scales = reference.quantize(torch.randn(3, 64, generator=torch.Generator().manual_seed(1)))
    payload[0, :32] = 0
    scales[0, 0] = 200
    scales[1, 1] = 255
    folded, row_scale, _ = reference.fold(payload, scales)
    assert row_scale[0] == scales[0, 1] and row_scale[1] == 255
    assert torch.equal(reference.dequantize(folded, row_scale)[0], reference.dequantize(payload, scales)[0])
    assert reference.dequantize(folded, row_scale)[1].isnan().all()


def test_folding_fails_on_cancelled_large_blocks_is_counted_and_exact_mode_is_right():
    g = torch.Generator().manual_seed(2)
    x = torch.randn(8, 128, generator=g)
    x[:, :32] *= 2.0**20
    w = torch.randn(1, 16, 128, generator=g)
    w[:, :, :32] = 0
    ends = torch.tensor([8], dtype=torch.int32)
    xq, wq = reference.quantize(x), reference.quantize(w)
    exact = reference.grouped_gemm(reference.dequantize(*xq), reference.dequantize(*wq), ends)
    folded, row_scale, wide = reference.fold(*xq)
    got = reference.grouped_gemm(reference.dequantize(folded, row_scale), reference.dequantize(*wq), ends)
    assert wide == 8
    assert (got - exact).norm() / exact.norm() > 0.5


def test_grouped_gemm_leaves_rows_of_no_group_alone():
    a, w = torch.randn(6, 32), torch.randn(3, 5, 32)
    out = reference.grouped_gemm(a, w, torch.tensor([2, 2, 5], dtype=torch.int32))
    assert out[5].isnan().all()
    torch.testing.assert_close(out[2:5], a[2:5].double() @ w[2].double().T)
