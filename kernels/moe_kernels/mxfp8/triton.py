"""Portable MXFP8 kernels: rows (quantise, fold, SwiGLU first), grouped GEMM (folded, exact).

E4M3 is coded and decoded in integers, so bytes are the same on every GPU and in Triton's CPU interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_kernels import _compat
from moe_kernels._launch import cdiv, next_power_of_two, on_device

INTEGERS = {torch.float8_e4m3fn: torch.uint8, torch.bfloat16: torch.int16}
"""Dtypes whose bits a kernel reads as integers."""
ROWS, SPAN = 4, 512


@triton.jit
def _decode(byte):
    b = byte.to(tl.int32)
    magnitude = b & 127
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where(magnitude == 127, float("nan"), value)
    # The sign as a bit: Triton 3.6 writes -x as 0 - x, which turns -0 into +0.
    return (value.to(tl.int32, bitcast=True) | ((b & 128) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _encode(value):
    bits = value.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 128
    nan = value != value
    magnitude = tl.minimum(tl.where(nan, 0.0, tl.abs(value)), 448.0)
    m = magnitude.to(tl.int32, bitcast=True)
    # Adding 2^14 rounds to multiples of 2^-9, the subnormal step; adding 0x7FFFF and the last kept bit rounds to even.
    low = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    normal = ((m + 0x7FFFF + ((m >> 20) & 1)) >> 20) - 960
    code = tl.where(magnitude < 0.015625, low, normal)
    return (tl.where(nan, 127, code) | sign).to(tl.uint8)


@triton.jit
def _scale(byte):
    b = byte.to(tl.int32)
    bits = tl.where(b == 0, 0x00400000, b << 23)
    return tl.where(b == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def _power(exponent):
    """2^exponent for -126 <= exponent <= 127; smaller exponents give 0."""
    return tl.where(exponent < -126, 0, (exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _exponent(amax, RCEIL: tl.constexpr):
    bits = amax.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) & 255
    byte = exponent - 8
    if RCEIL:
        byte += ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.where(exponent == 255, 255, tl.minimum(tl.maximum(byte, 0), 254))


@triton.jit
def _float(raw):
    # BF16 comes as int16: the interpreter's own conversion is wrong for subnormals and NaN.
    if raw.dtype == tl.int16:
        return (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return raw.to(tl.float32)


@triton.jit
def _blocks(x_ptr, s_ptr, r, k0, M, K, SRC: tl.constexpr, RCEIL: tl.constexpr, R: tl.constexpr, S: tl.constexpr):
    """Return values [R, S/32, 32] (MX: unscaled), their block bytes [R, S/32], and which blocks hold something."""
    k = k0 + tl.arange(0, S)
    mask = (r < M)[:, None] & (k < K)[None, :]
    row = r.to(tl.int64)[:, None]
    if SRC == 0:
        v = _decode(tl.load(x_ptr + row * K + k[None, :], mask=mask, other=0))
    elif SRC == 1:
        v = _float(tl.load(x_ptr + row * K + k[None, :], mask=mask, other=0))
    else:
        gate = _float(tl.load(x_ptr + row * (2 * K) + k[None, :], mask=mask, other=0))
        up = _float(tl.load(x_ptr + row * (2 * K) + K + k[None, :], mask=mask, other=0))
        # Rounded to BF16 in integers: what an unfused SwiGLU would have stored.
        y = gate / (1.0 + tl.exp(-gate)) * up
        b = y.to(tl.int32, bitcast=True)
        b = (b + 0x7FFF + ((b >> 16) & 1)) & -65536
        v = tl.where(y != y, y, b.to(tl.float32, bitcast=True))
    v = tl.reshape(v, (R, S // 32, 32))
    # As integers, because a maximum in floating point would drop NaN.
    top = tl.max(tl.abs(v).to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)
    if SRC == 0:
        block = k0 // 32 + tl.arange(0, S // 32)
        byte = tl.load(
            s_ptr + row * (K // 32) + block[None, :], mask=(r < M)[:, None] & (block < K // 32)[None, :], other=0
        ).to(tl.int32)
    else:
        byte = _exponent(top.to(tl.float32, bitcast=True), RCEIL)
    return v, byte, (top != 0) | (byte == 255)


@triton.jit
def _rows_kernel(
    x_ptr, s_ptr, out_ptr, out_s_ptr, wide_ptr, M, K, SRC: tl.constexpr, TGT: tl.constexpr, RCEIL: tl.constexpr,
    COUNT: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * R + tl.arange(0, R)
    top = tl.zeros((R,), tl.int32)
    low = tl.full((R,), 255, tl.int32)
    if TGT != 0 or COUNT:
        for k0 in range(0, K, S):
            v, byte, some = _blocks(x_ptr, s_ptr, r, k0, M, K, SRC, RCEIL, R, S)
            top = tl.maximum(top, tl.max(tl.where(some, byte, 0), axis=1))
            low = tl.minimum(low, tl.min(tl.where(some, byte, 255), axis=1))
        if COUNT:
            tl.atomic_add(wide_ptr, tl.sum(((r < M) & (top - low > 8)).to(tl.int32)))
    for k0 in range(0, K, S):
        v, byte, some = _blocks(x_ptr, s_ptr, r, k0, M, K, SRC, RCEIL, R, S)
        use = byte
        if TGT == 2:
            use = tl.zeros_like(byte) + top[:, None]
        if SRC != 0:
            # Two factors, because 2^127 * 2^x of byte 0 would leave FP32's normal range.
            half = (127 - use) // 2
            code = _encode(v * _power(half)[:, :, None] * _power(127 - use - half)[:, :, None])
            code = tl.where((use == 255)[:, :, None], 127, code)
            if TGT == 1:
                code = tl.where(
                    (use == 255)[:, :, None],
                    127,
                    _encode(_decode(code) * _power(tl.minimum(use - top[:, None], 0))[:, :, None]),
                )
        else:
            code = tl.where(
                (use == 255)[:, :, None], 127, _encode(v * _power(tl.minimum(use - top[:, None], 0))[:, :, None])
            )
        code = tl.reshape(code.to(tl.uint8), (R, S))
        k = k0 + tl.arange(0, S)
        block = k0 // 32 + tl.arange(0, S // 32)
        mask = (r < M)[:, None] & (k < K)[None, :]
        s_mask = (r < M)[:, None] & (block < K // 32)[None, :]
        row = r.to(tl.int64)[:, None]
        tl.store(out_ptr + row * K + k[None, :], code, mask=mask)
        if TGT == 0:
            tl.store(out_s_ptr + row * (K // 32) + block[None, :], byte.to(tl.uint8), mask=s_mask)
        elif k0 == 0:
            tl.store(out_s_ptr + r, top.to(tl.uint8), mask=r < M)


def rows(x, scales, out, out_scales, wide, source: int, target: int, rceil: bool) -> None:
    """Convert rows: MX, float or SwiGLU input -> canonical, folded or row-scaled E4M3. Shapes as in the api."""
    M, K = out.shape
    if M == 0:
        return
    raw = x.view(INTEGERS.get(x.dtype, x.dtype))
    with on_device(out):
        _rows_kernel[(cdiv(M, ROWS),)](
            raw, raw if scales is None else scales, out.view(torch.uint8), out_scales,
            out_scales if wide is None else wide, M, K, SRC=source, TGT=target, RCEIL=rceil, COUNT=wide is not None,
            R=ROWS, S=min(SPAN, max(32, next_power_of_two(K))),
        )  # fmt: skip


@triton.jit
def _mxfp8_gemm_kernel(
    a_ptr, as_ptr, w_ptr, ws_ptr, ends_ptr, out_ptr, M, N, K, E, FOLDED: tl.constexpr, NATIVE: tl.constexpr,
    WIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    n_tiles = tl.cdiv(N, BN)
    tile = tl.program_id(0) // n_tiles
    n = (tl.program_id(0) % n_tiles) * BN + tl.arange(0, BN)
    # Walks the group ends on the device; a group without rows makes no tile.
    e = 0
    start = 0
    stop = tl.maximum(tl.minimum(tl.load(ends_ptr), M), 0)
    before = 0
    tiles = tl.cdiv(tl.maximum(stop - start, 0), BM)
    while (e < E - 1) & (tile >= before + tiles):
        before += tiles
        e += 1
        start = stop
        stop = tl.maximum(tl.minimum(tl.load(ends_ptr + e), M), 0)
        tiles = tl.cdiv(tl.maximum(stop - start, 0), BM)
    if tile < before + tiles:
        m = start + (tile - before) * BM + tl.arange(0, BM)
        row = m.to(tl.int64)[:, None]
        col = (e * N + n).to(tl.int64)[:, None]
        acc = tl.zeros((BM, BN), tl.float32)
        for k0 in range(0, K, BK):
            k = k0 + tl.arange(0, BK)
            a_mask = (m < stop)[:, None] & (k < K)[None, :]
            w_mask = (n < N)[:, None] & (k < K)[None, :]
            a = tl.load(a_ptr + row * K + k[None, :], mask=a_mask, other=0)
            w = tl.load(w_ptr + col * K + k[None, :], mask=w_mask, other=0)
            if FOLDED and NATIVE:
                fa, fw = a.to(tl.float8e4nv, bitcast=True), w.to(tl.float8e4nv, bitcast=True)
                acc = tl.dot(fa, fw.T, acc, max_num_imprecise_acc=128)
            else:
                va, vw = _decode(a), _decode(w)
                if not FOLDED:
                    # E4M3 has 4 significant bits, so value times scale is exact in BF16 over its whole exponent range.
                    va *= _scale(tl.load(as_ptr + row * (K // 32) + (k // 32)[None, :], mask=a_mask, other=0))
                    vw *= _scale(tl.load(ws_ptr + col * (K // 32) + (k // 32)[None, :], mask=w_mask, other=0))
                acc = tl.dot(va.to(WIDE), vw.to(WIDE).T, acc, input_precision="ieee")
        if FOLDED:
            acc *= _scale(tl.load(as_ptr + m, mask=m < stop, other=0))[:, None]
            acc *= _scale(tl.load(ws_ptr + e * N + n, mask=n < N, other=0))[None, :]
        mask = (m < stop)[:, None] & (n < N)[None, :]
        tl.store(out_ptr + row * N + n[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


def grouped_gemm(a, a_scales, w, w_scales, ends, out) -> None:
    """Grouped GEMM of folded (scales [M], [E, N]) or canonical (scales [M, K/32], [E, N, K/32]) operands into out
    [M, N]."""
    (M, K), (E, N, _) = a.shape, w.shape
    if M == 0 or E == 0:
        return
    interpreted = _compat.interpreter_active()
    folded = a_scales.dim() == 1
    bm, bn, bk = (16, 32, 64) if interpreted else (64, 128, 128) if folded else (64, 128, 64)
    with on_device(out):
        _mxfp8_gemm_kernel[((cdiv(M, bm) + E) * cdiv(N, bn),)](
            a.view(torch.uint8), a_scales, w.view(torch.uint8), w_scales, ends, out, M, N, K, E, FOLDED=folded,
            NATIVE=not interpreted, WIDE=tl.float32 if interpreted else tl.bfloat16, BM=bm, BN=bn, BK=bk, num_warps=4,
            num_stages=3 if folded else 2,
        )  # fmt: skip
