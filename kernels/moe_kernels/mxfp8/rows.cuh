// Rows to E4M3: E8M0 scales, conversion of one row by one warp, and the kernel over all rows.
#pragma once
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "ptx.cuh"

namespace {

constexpr int kSpreadLimit = 8;

__device__ __forceinline__ float scale_value(int byte) {
    return __int_as_float(byte == 255 ? 0x7FFFFFFF : byte == 0 ? 0x00400000 : byte << 23);
}
__device__ __forceinline__ float inverse_scale(int byte) { return __int_as_float(byte >= 254 ? 0x00400000 : (254 - byte) << 23); }

template <bool RCEIL>
__device__ __forceinline__ int block_exponent(uint32_t amax_bf16_bits) {
    const int e = static_cast<int>(amax_bf16_bits >> 7);
    if (e == 255) return 255;
    return max(e - 8 + (RCEIL && (amax_bf16_bits & 127) > 96), 0);
}

__device__ __forceinline__ uint32_t amax_pair(uint32_t a, uint32_t b) { return __vmaxu2(a & 0x7FFF7FFFu, b & 0x7FFF7FFFu); }

__device__ __forceinline__ uint32_t to_e4m3x2(float lo, float hi) {
    return __nv_cvt_float2_to_fp8x2(make_float2(lo, hi), __NV_SATFINITE, __NV_E4M3);
}
__device__ __forceinline__ uint32_t shift_e4m3x2(uint32_t pair, __half2 factor) {
    const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3);
    const __half2 r = __hmul2(__half2(h), factor);
    return __nv_cvt_halfraw2_to_fp8x2(static_cast<__half2_raw>(r), __NV_SATFINITE, __NV_E4M3);
}
// 2^-d; d > 24 gives 0, and every e4m3 value shifted by 19 or more rounds to zero anyway.
__device__ __forceinline__ __half2 half_shift(int d) {
    const uint16_t bits = d <= 14 ? static_cast<uint16_t>((15 - d) << 10) : d <= 24 ? static_cast<uint16_t>(1 << (24 - d)) : 0;
    return __half2half2(__ushort_as_half(bits));
}
__device__ __forceinline__ uint2 shift8(uint2 p, int d) {
    if (d == 0) return p;
    const __half2 f = half_shift(d);
    uint2 r;
    r.x = shift_e4m3x2(p.x & 0xFFFF, f) | (shift_e4m3x2(p.x >> 16, f) << 16);
    r.y = shift_e4m3x2(p.y & 0xFFFF, f) | (shift_e4m3x2(p.y >> 16, f) << 16);
    return r;
}
__device__ __forceinline__ uint2 quantise8(uint4 v, int byte) {
    if (byte == 255) return make_uint2(0x7F7F7F7Fu, 0x7F7F7F7Fu);
    const float inv = inverse_scale(byte);
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
    uint32_t o[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) o[i] = to_e4m3x2(__uint_as_float(w[i] << 16) * inv, __uint_as_float(w[i] & 0xFFFF0000u) * inv);
    return make_uint2(o[0] | (o[1] << 16), o[2] | (o[3] << 16));
}

enum Source { kMx = 0, kBf16Floor = 1, kBf16Rceil = 2 };
enum Target { kCanonical = 0, kFolded = 1, kRowScaled = 2 };

// One warp turns one row into E4M3. Each lane holds 8 elements of every 256, so four neighbours share a block of 32.
// put(k, bytes) stores 8 elements, put_scale(block, byte) a block scale. Returns the row exponent; spread is the distance
// between the largest and the smallest exponent of blocks that are not zero.
template <int SRC, int TGT, class Put, class PutScale>
__device__ __forceinline__ int convert_row(const void* row, const uint8_t* scales, int K, int lane, Put put, PutScale put_scale, int& spread) {
    constexpr int IT = 8;
    constexpr int SPAN = IT * 256;
    using Raw = typename std::conditional<SRC == kMx, uint2, uint4>::type;
    Raw v[IT];
    int eb[IT];
    int hi = 0, lo = 255;
    const auto load = [&](int base) {
#pragma unroll
        for (int i = 0; i < IT; ++i) {
            const int k = base + i * 256 + lane * 8;
            if (k < K) {
                v[i] = *reinterpret_cast<const Raw*>(static_cast<const char*>(row) + static_cast<int64_t>(k) * (SRC == kMx ? 1 : 2));
                if constexpr (SRC == kMx) eb[i] = scales[k / 32];
            } else {
                v[i] = Raw{};
                eb[i] = 0;
            }
        }
    };
    const auto exponents = [&]() {
#pragma unroll
        for (int i = 0; i < IT; ++i) {
            bool zero;
            if constexpr (SRC == kMx) {
                zero = ((v[i].x | v[i].y) & 0x7F7F7F7Fu) == 0;
                zero = __all_sync(0xFu << (lane & 28), zero);
            } else {
                uint32_t m = __vmaxu2(amax_pair(v[i].x, v[i].y), amax_pair(v[i].z, v[i].w));
                m = __vmaxu2(m, __shfl_xor_sync(0xFFFFFFFFu, m, 1));
                m = __vmaxu2(m, __shfl_xor_sync(0xFFFFFFFFu, m, 2));
                const uint32_t amax = max(m & 0xFFFFu, m >> 16);
                zero = amax == 0;
                eb[i] = block_exponent<SRC == kBf16Rceil>(amax);
            }
            hi = max(hi, zero && eb[i] != 255 ? 0 : eb[i]);
            if (!zero) lo = min(lo, eb[i]);
        }
    };
    for (int base = 0; base < K; base += SPAN) {
        load(base);
        exponents();
    }
#pragma unroll
    for (int s = 16; s; s >>= 1) {
        hi = max(hi, __shfl_xor_sync(0xFFFFFFFFu, hi, s));
        lo = min(lo, __shfl_xor_sync(0xFFFFFFFFu, lo, s));
    }
    spread = max(hi - lo, 0);
    for (int base = 0; base < K; base += SPAN) {
        if (K > SPAN) {
            load(base);
            int keep_hi = hi, keep_lo = lo;
            exponents();
            hi = keep_hi, lo = keep_lo;
        }
#pragma unroll
        for (int i = 0; i < IT; ++i) {
            const int k = base + i * 256 + lane * 8;
            if (k >= K) continue;
            uint2 out;
            if constexpr (SRC == kMx) {
                out = eb[i] == 255 ? make_uint2(0x7F7F7F7Fu, 0x7F7F7F7Fu) : shift8(v[i], max(hi - eb[i], 0));
            } else if constexpr (TGT == kRowScaled) {
                out = quantise8(v[i], hi);
            } else {
                out = quantise8(v[i], eb[i]);
                if constexpr (TGT == kFolded) out = shift8(out, eb[i] == 255 ? 0 : max(hi - eb[i], 0));
            }
            put(k, out);
            if (TGT == kCanonical && (lane & 3) == 0) put_scale(k / 32, eb[i]);
        }
    }
    return hi;
}

template <int SRC, int TGT>
__global__ void __launch_bounds__(256) mx_rows(const void* x, const uint8_t* scales, uint8_t* out, uint8_t* out_scales, int* wide, int M, int K, int release) {
    wait_previous_grid();
    if (release) release_next_grid();
    const int lane = threadIdx.x & 31;
    for (int64_t row = blockIdx.x * 8 + (threadIdx.x >> 5); row < M; row += gridDim.x * 8) {
        int spread;
        uint8_t* dst = out + row * K;
        const int hi = convert_row<SRC, TGT>(
            static_cast<const char*>(x) + row * K * (SRC == kMx ? 1 : 2), scales + row * (K / 32), K, lane,
            [&](int k, uint2 bytes) { *reinterpret_cast<uint2*>(dst + k) = bytes; },
            [&](int block, int byte) { out_scales[row * (K / 32) + block] = static_cast<uint8_t>(byte); }, spread);
        if (lane == 0) {
            if (TGT != kCanonical) out_scales[row] = static_cast<uint8_t>(hi);
            if (wide != nullptr && spread > kSpreadLimit) atomicAdd(wide, 1);
        }
    }
}

}  // namespace
