// MXFP8 kernels for sm_90a: row quantise / fold, and the grouped GEMM out[m, n] = 2^(ea[m] + ew[e, n] - 254) * sum_k a[m, k] w[e, n, k]
// on folded operands (one power-of-two scale per row). Group ends are int32 on the device; one launch walks them.
//   mx_rows   (rows.cuh) one warp per row: bf16 -> canonical MX | folded MX | row-scaled, and canonical MX -> folded
//   mx_small  weights are the 64-row MMA operand, tokens its NT columns; tokens are folded or quantised in the prologue,
//             while the weight pipeline is already filling
//   mx_big    persistent, 128 x BN tiles, one producer warp and two consumer warpgroups
// Programmatic launch: every kernel waits for the grid before it, only then reads device memory and releases the next one. A
// predecessor that never releases lets this grid start when its blocks have ended, which is before its writes are visible.
// The one exception is mx_big behind mx_rows, see BigArgs::early.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "launch.cuh"
#include "ptx.cuh"
#include "rows.cuh"
#include "wgmma_e4m3.cuh"

namespace {

constexpr int kChunk = 128;  // bytes of K in one stage: one row of the 128-byte swizzle
constexpr int kMaxExperts = 256;

// ---------------------------------------------------------------- schedule
// Row starts and cumulative work units of every expert, from int32 group ends on the device; ends are clamped to M.
struct Schedule {
    int start[kMaxExperts + 1];
    int units[kMaxExperts + 1];
};
__device__ __forceinline__ void build_schedule(Schedule& s, const int* ends, int E, int M, int rows_per_unit, int units_per_row_tile, int lane) {
    int carry_units = 0, carry_end = 0;
    if (lane == 0) s.start[0] = s.units[0] = 0;
    for (int base = 0; base < E; base += 32) {
        const int e = base + lane;
        const int end = e < E ? min(max(ends[e], 0), M) : 0;
        int begin = __shfl_up_sync(0xFFFFFFFFu, end, 1);
        if (lane == 0) begin = carry_end;
        int u = e < E ? (max(end - begin, 0) + rows_per_unit - 1) / rows_per_unit * units_per_row_tile : 0;
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            const int t = __shfl_up_sync(0xFFFFFFFFu, u, d);
            if (lane >= d) u += t;
        }
        if (e < E) s.start[e + 1] = end, s.units[e + 1] = carry_units + u;
        carry_units += __shfl_sync(0xFFFFFFFFu, u, 31);
        carry_end = __shfl_sync(0xFFFFFFFFu, end, 31);
    }
}

// ---------------------------------------------------------------- small M
struct SmallArgs {
    const void* x;
    const uint8_t* x_scales;
    const uint8_t* w_exp;
    const int* ends;
    __nv_bfloat16* out;
    int M, N, K, E, stages;
};

template <int NT, int SRC, bool FOLDED>
__global__ void __launch_bounds__(288, NT <= 32 ? 2 : 1) mx_small(const __grid_constant__ CUtensorMap map_w, const SmallArgs p) {
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ Schedule sched;
    __shared__ __align__(8) uint64_t bars[64];
    __shared__ uint8_t tok_exp[NT];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int chunks = (p.K + kChunk - 1) / kChunk;
    const uint32_t tokens = smem_addr(smem), ring = tokens + chunks * NT * kChunk;
    const uint32_t full = smem_addr(bars), empty = full + 32 * 8;
    constexpr int STAGE = 128 * kChunk;

    const int n_tiles = (p.N + 127) / 128;
    if (threadIdx.x == 32) {
        prefetch_map(&map_w);
        for (int s = 0; s < p.stages; ++s) bar_init(full + s * 8, 1), bar_init(empty + s * 8, 8);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    wait_previous_grid();
    release_next_grid();
    if (warp == 0) build_schedule(sched, p.ends, p.E, p.M, NT, n_tiles, lane);
    __syncthreads();

    const int64_t total = sched.units[p.E];
    const int first = static_cast<int>(total * blockIdx.x / gridDim.x), last = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x);
    int e = 0, stage = 0, phase = 0;
    if (warp == 8) {
        if (lane == 0) {
            const uint64_t policy = evict_first();
            for (int u = first; u < last; ++u) {
                while (u >= sched.units[e + 1]) ++e;
                const int n0 = (u - sched.units[e]) % n_tiles * 128;
                for (int c = 0; c < chunks; ++c) {
                    bar_wait(empty + stage * 8, phase ^ 1);
                    bar_expect(full + stage * 8, STAGE);
                    tma_load(ring + stage * STAGE, &map_w, c * kChunk, e * p.N + n0, full + stage * 8, policy);
                    if (++stage == p.stages) stage = 0, phase ^= 1;
                }
            }
        }
        return;
    }
    const int wg = warp >> 2;
    int have = -1;
    for (int u = first; u < last; ++u) {
        while (u >= sched.units[e + 1]) ++e;
        const int r = u - sched.units[e], n0 = r % n_tiles * 128;
        const int row0 = sched.start[e] + r / n_tiles * NT, rows = min(NT, sched.start[e + 1] - row0);
        if (row0 != have) {
            named_sync(1, 256);
            for (int t = warp; t < rows; t += 8) {
                const int64_t row = row0 + t;
                const auto put = [&](int k, uint2 bytes) {
                    const int c = k >> 7, unit = ((k >> 4) & 7) ^ (t & 7);
                    *reinterpret_cast<uint2*>(smem + c * NT * kChunk + t * kChunk + unit * 16 + (k & 8)) = bytes;
                };
                if constexpr (FOLDED) {
                    // Loads of 2048 elements are in flight at once: one at a time would cost a memory latency each.
                    for (int base = lane * 8; base < p.K; base += 2048) {
                        uint2 v[8];
#pragma unroll
                        for (int i = 0; i < 8; ++i)
                            if (base + i * 256 < p.K) v[i] = *reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(p.x) + row * p.K + base + i * 256);
#pragma unroll
                        for (int i = 0; i < 8; ++i)
                            if (base + i * 256 < p.K) put(base + i * 256, v[i]);
                    }
                    if (lane == 0) tok_exp[t] = p.x_scales[row];
                } else {
                    int spread;
                    const int hi = convert_row<SRC, kFolded>(
                        static_cast<const char*>(p.x) + row * p.K * (SRC == kMx ? 1 : 2), p.x_scales + row * (p.K / 32), p.K, lane, put,
                        [](int, int) {}, spread);
                    if (lane == 0) tok_exp[t] = static_cast<uint8_t>(hi);
                }
            }
            // The last chunk of a K that is no multiple of 128 meets zeros on the weight side, but NaN bytes would survive.
            if (p.K & 127)
                for (int i = threadIdx.x; i < NT * 8; i += 256) {
                    const int t = i >> 3, c16 = i & 7;
                    if (c16 * 16 >= (p.K & 127))
                        *reinterpret_cast<uint4*>(smem + (chunks - 1) * NT * kChunk + t * kChunk + ((c16 ^ (t & 7)) * 16)) = make_uint4(0, 0, 0, 0);
                }
            fence_to_async();
            named_sync(1, 256);
            have = row0;
        }
        const int n_lo = n0 + wg * 64 + (warp & 3) * 16 + (lane >> 2);
        const int ew0 = n_lo < p.N ? p.w_exp[static_cast<int64_t>(e) * p.N + n_lo] : 0;
        const int ew1 = n_lo + 8 < p.N ? p.w_exp[static_cast<int64_t>(e) * p.N + n_lo + 8] : 0;
        float acc[NT / 2], part[NT / 2];
#pragma unroll
        for (int i = 0; i < NT / 2; ++i) acc[i] = 0.f;
        for (int c = 0; c < chunks; ++c) {
            bar_wait(full + stage * 8, phase);
            const uint64_t da = descriptor(ring + stage * STAGE + wg * 64 * kChunk), db = descriptor(tokens + c * NT * kChunk);
            pin(part);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k) Wgmma<NT>::mma(part, da + 2 * k, db + 2 * k, k != 0);
            wgmma_commit();
            wgmma_wait<0>();
            pin(part);
            if (lane == 0) bar_arrive(empty + stage * 8);
            if (++stage == p.stages) stage = 0, phase ^= 1;
#pragma unroll
            for (int i = 0; i < NT / 2; ++i) acc[i] += part[i];
        }
        const float sw0 = scale_value(ew0), sw1 = scale_value(ew1);
#pragma unroll
        for (int j = 0; j < NT / 8; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int t = j * 8 + (lane & 3) * 2 + i;
                if (t >= rows) continue;
                const float sx = scale_value(tok_exp[t]);
                __nv_bfloat16* o = p.out + static_cast<int64_t>(row0 + t) * p.N + n_lo;
                if (n_lo < p.N) o[0] = __float2bfloat16_rn(acc[4 * j + i] * sx * sw0);
                if (n_lo + 8 < p.N) o[8] = __float2bfloat16_rn(acc[4 * j + 2 + i] * sx * sw1);
            }
    }
}

// ---------------------------------------------------------------- big M
struct BigArgs {
    const uint8_t* a_exp;
    const uint8_t* w_exp;
    const int* ends;
    __nv_bfloat16* out;
    int M, N, K, E;
    int early;  // the grid before this one wrote the rows only, after all before it had ended: the rest may be read at once
};

// PROMOTE = 0 leaves all of K in the tensor core's short accumulator; p > 0 adds every 128 * p of K in FP32. SUB columns are
// multiplied at a time, so that the partial sums take SUB / 2 registers.
template <int BN, int SUB, int PROMOTE, int STAGES>
__global__ void __launch_bounds__(384, 1) mx_big(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_w, const BigArgs p) {
    constexpr int NSUB = BN / SUB, A_BYTES = 128 * kChunk, W_BYTES = BN * kChunk, STAGE = A_BYTES + W_BYTES;
    constexpr int ROW = 64 * 2 + 16;  // staged output row: 64 columns, padded against bank conflicts
    extern __shared__ __align__(1024) uint8_t smem[];
    __shared__ Schedule sched;
    __shared__ __align__(8) uint64_t bars[2 * STAGES];
    __shared__ __align__(16) uint8_t col_exp[2][BN];
    const uint32_t ring = smem_addr(smem), full = smem_addr(bars), empty = full + STAGES * 8;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, wg = warp >> 2;
    const int n_tiles = (p.N + BN - 1) / BN;

    if (threadIdx.x == 32) {
        prefetch_map(&map_a), prefetch_map(&map_w);
        for (int s = 0; s < STAGES; ++s) bar_init(full + s * 8, 1), bar_init(empty + s * 8, 8);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (!p.early) wait_previous_grid();
    release_next_grid();
    if (warp == 0) build_schedule(sched, p.ends, p.E, p.M, 128, n_tiles, lane);
    __syncthreads();

    const int chunks = (p.K + kChunk - 1) / kChunk, total = sched.units[p.E];
    int e = 0, stage = 0, phase = 0;
    const auto locate = [&](int u, int& row0, int& n0) {
        while (u >= sched.units[e + 1]) ++e;
        const int m_units = (sched.start[e + 1] - sched.start[e] + 127) / 128, r = u - sched.units[e];
        row0 = sched.start[e] + r % m_units * 128;
        n0 = r / m_units * BN;
    };
    if (wg == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            const auto load_w = [&](int s, int c, int n0) {
                bar_expect(full + s * 8, STAGE);
                tma_load(ring + s * STAGE + A_BYTES, &map_w, c * kChunk, e * p.N + n0, full + s * 8);
            };
            int ahead = 0;  // stages whose weights are under way already
            if (p.early) {
                if (blockIdx.x < total) {
                    int row0, n0;
                    locate(blockIdx.x, row0, n0);
                    ahead = min(STAGES, chunks);
                    for (int c = 0; c < ahead; ++c) load_w(c, c, n0);
                }
                wait_previous_grid();
            }
            for (int u = blockIdx.x; u < total; u += gridDim.x) {
                int row0, n0;
                locate(u, row0, n0);
                for (int c = 0; c < chunks; ++c) {
                    bar_wait(empty + stage * 8, phase ^ 1);
                    if (c >= ahead) load_w(stage, c, n0);
                    tma_load(ring + stage * STAGE, &map_a, c * kChunk, row0, full + stage * 8);
                    if (++stage == STAGES) stage = 0, phase ^= 1;
                }
                ahead = 0;
            }
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int g = wg - 1, tid = threadIdx.x & 127;
    uint8_t* staged = smem + STAGES * STAGE + (warp - 4) * 16 * ROW;
    const auto release = [&](int s) {
        if (lane == 0) bar_arrive(empty + s * 8);
    };
    const auto advance = [&]() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    };
    if (p.early) wait_previous_grid();
    for (int u = blockIdx.x; u < total; u += gridDim.x) {
        int row0, n0;
        locate(u, row0, n0);
        const int end = sched.start[e + 1], wrow = row0 + g * 64 + (warp & 3) * 16;
        const int r_lo = wrow + (lane >> 2);
        const int ea0 = r_lo < end ? p.a_exp[r_lo] : 0, ea1 = r_lo + 8 < end ? p.a_exp[r_lo + 8] : 0;
        uint32_t ew = 0;
        if (tid < BN / 2 && n0 + 2 * tid < p.N) ew = *reinterpret_cast<const uint16_t*>(p.w_exp + static_cast<int64_t>(e) * p.N + n0 + 2 * tid);
        float acc[NSUB][SUB / 2];
        if constexpr (PROMOTE == 0) {
            static_assert(NSUB == 1, "one part holds all columns");
            int previous = -1;
            for (int c = 0; c < chunks; ++c) {
                bar_wait(full + stage * 8, phase);
                const uint64_t da = descriptor(ring + stage * STAGE + g * 64 * kChunk), db = descriptor(ring + stage * STAGE + A_BYTES);
                pin(acc[0]);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < 4; ++k) Wgmma<SUB>::mma(acc[0], da + 2 * k, db + 2 * k, c + k != 0);
                wgmma_commit();
                wgmma_wait<1>();
                pin(acc[0]);
                if (previous >= 0) release(previous);
                previous = stage;
                advance();
            }
            wgmma_wait<0>();
            pin(acc[0]);
            release(previous);
        } else {
#pragma unroll
            for (int s = 0; s < NSUB; ++s)
#pragma unroll
                for (int i = 0; i < SUB / 2; ++i) acc[s][i] = 0.f;
            float part[SUB / 2];
            // The number of stages in a group is a constant: a condition between wgmmas would make the compiler serialise them.
            const auto group = [&](auto stages_in_group) {
                constexpr int P = decltype(stages_in_group)::value;
                uint64_t da[P], db[P];
                int held[P];
#pragma unroll
                for (int j = 0; j < P; ++j) {
                    held[j] = stage;
                    da[j] = descriptor(ring + stage * STAGE + g * 64 * kChunk), db[j] = descriptor(ring + stage * STAGE + A_BYTES);
                    bar_wait(full + stage * 8, phase);
                    advance();
                }
#pragma unroll
                for (int s = 0; s < NSUB; ++s) {
                    pin(part);
                    wgmma_fence();
#pragma unroll
                    for (int j = 0; j < P; ++j)
#pragma unroll
                        for (int k = 0; k < 4; ++k) Wgmma<SUB>::mma(part, da[j] + 2 * k, db[j] + s * (SUB * kChunk / 16) + 2 * k, j + k != 0);
                    wgmma_commit();
                    wgmma_wait<0>();
                    pin(part);
                    if (s == NSUB - 1) {
#pragma unroll
                        for (int j = 0; j < P; ++j) release(held[j]);
                    }
#pragma unroll
                    for (int i = 0; i < SUB / 2; ++i) acc[s][i] += part[i];
                }
            };
            int c = 0;
            for (; c + PROMOTE <= chunks; c += PROMOTE) group(std::integral_constant<int, PROMOTE>{});
            if constexpr (PROMOTE > 1)
                for (; c < chunks; ++c) group(std::integral_constant<int, 1>{});
        }
        named_sync(1 + g, 128);
        if (tid < BN / 2) *reinterpret_cast<uint16_t*>(&col_exp[g][2 * tid]) = static_cast<uint16_t>(ew);
        named_sync(1 + g, 128);
        const float sa0 = scale_value(ea0), sa1 = scale_value(ea1);
        const int rows = min(16, end - wrow);
#pragma unroll
        for (int piece = 0; piece < BN / 64; ++piece) {
            __syncwarp();
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                uint32_t r[4];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int c8 = piece * 8 + q * 2 + h;
                    const float* d = &acc[c8 / (SUB / 8)][c8 % (SUB / 8) * 4];
                    const uint32_t b = *reinterpret_cast<const uint16_t*>(&col_exp[g][c8 * 8 + (lane & 3) * 2]);
                    const float s0 = scale_value(b & 255), s1 = scale_value(b >> 8);
                    const __nv_bfloat162 lo = __floats2bfloat162_rn(d[0] * sa0 * s0, d[1] * sa0 * s1);
                    const __nv_bfloat162 hi = __floats2bfloat162_rn(d[2] * sa1 * s0, d[3] * sa1 * s1);
                    r[2 * h] = *reinterpret_cast<const uint32_t*>(&lo);
                    r[2 * h + 1] = *reinterpret_cast<const uint32_t*>(&hi);
                }
                const uint32_t at = smem_addr(staged + ((lane >> 3 & 1) * 8 + (lane & 7)) * ROW + (q * 2 + (lane >> 4)) * 16);
                asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                             : "memory");
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = i * 4 + (lane >> 3), col = n0 + piece * 64 + (lane & 7) * 8;
                if (row < rows && col < p.N) {
                    const uint4 v = *reinterpret_cast<const uint4*>(staged + row * ROW + (lane & 7) * 16);
                    *reinterpret_cast<uint4*>(p.out + static_cast<int64_t>(wrow + row) * p.N + col) = v;
                }
            }
        }
    }
}

// ---------------------------------------------------------------- host
template <int NT, int SRC, bool FOLDED>
int run_small(const void* w, SmallArgs a, int per_sm, bool overlap, void* stream, Plan* plan) {
    const auto kernel = mx_small<NT, SRC, FOLDED>;
    CUtensorMap map;
    if (int rc = make_map(&map, w, static_cast<int64_t>(a.E) * a.N, a.K, kChunk, 128)) return rc;
    const int tokens = (a.K + kChunk - 1) / kChunk * NT * kChunk;
    const int room = 227 * 1024 / per_sm - 4096 - tokens;
    a.stages = room / (128 * kChunk);
    if (a.stages > 32) a.stages = 32;
    if (a.stages < 2) return -2;
    const int smem = tokens + a.stages * 128 * kChunk;
    static int granted[kMaxDevices];
    if (int rc = grant(reinterpret_cast<const void*>(kernel), smem, granted)) return rc;
    return launch(kernel, sm_count() * per_sm, 288, smem, overlap, stream, plan, map, a);
}

template <int BN, int SUB, int PROMOTE, int STAGES>
int run_big(const void* a, const void* w, const BigArgs& args, bool overlap, void* stream, Plan* plan) {
    const auto kernel = mx_big<BN, SUB, PROMOTE, STAGES>;
    CUtensorMap ma, mw;
    if (int rc = make_map(&ma, a, args.M, args.K, kChunk, 128)) return rc;
    if (int rc = make_map(&mw, w, static_cast<int64_t>(args.E) * args.N, args.K, kChunk, BN)) return rc;
    const int smem = STAGES * (128 + BN) * kChunk + 8 * 16 * (64 * 2 + 16);
    static int granted[kMaxDevices];
    if (int rc = grant(reinterpret_cast<const void*>(kernel), smem, granted)) return rc;
    return launch(kernel, sm_count(), 384, smem, overlap, stream, plan, ma, mw, args);
}

template <int SRC, int TGT>
int run_rows(const void* x, const void* s, void* out, void* os, int* wide, int M, int K, int flags, void* stream, Plan* plan) {
    const int grid = (M + 7) / 8 < sm_count() * 8 ? (M + 7) / 8 : sm_count() * 8;
    return launch(mx_rows<SRC, TGT>, grid, 256, 0, flags & 1, stream, plan, x, static_cast<const uint8_t*>(s), static_cast<uint8_t*>(out),
                  static_cast<uint8_t*>(os), wide, M, K, flags & 2);
}

}  // namespace

extern "C" {

void* mx_plan_new() { return new Plan{}; }
void mx_plan_free(void* plan) { delete static_cast<Plan*>(plan); }
int mx_plan_run(const void* plan, void* stream) { return static_cast<const Plan*>(plan)->run(stream); }

// source: 0 canonical MX, 1 bf16 floor, 2 bf16 rceil; target: 0 canonical, 1 folded, 2 row-scaled. wide may be null. A plan, where given,
// keeps the launch instead of submitting it; so for the launchers below.
int mx_rows_launch(const void* x, const void* s, void* out, void* os, int* wide, int M, int K, int source, int target, int flags, void* stream,
                   void* plan) {
#define ROWS(SOURCE, TARGET) return run_rows<SOURCE, TARGET>(x, s, out, os, wide, M, K, flags, stream, static_cast<Plan*>(plan))
    switch (source * 3 + target) {
        case 1: ROWS(kMx, kFolded);
        case 3: ROWS(kBf16Floor, kCanonical);
        case 4: ROWS(kBf16Floor, kFolded);
        case 5: ROWS(kBf16Floor, kRowScaled);
        case 6: ROWS(kBf16Rceil, kCanonical);
        case 7: ROWS(kBf16Rceil, kFolded);
        case 8: ROWS(kBf16Rceil, kRowScaled);
        default: return -4;
    }
#undef ROWS
}

// source: 0 canonical MX, 1 bf16 floor, 2 bf16 rceil, 3 folded. columns: token columns of a tile (8, 16, 32, 64) + 100 for two
// blocks an SM.
int mx_small_launch(const void* x, const void* xs, const void* w, const void* we, const void* ends, void* out, int M, int N, int K, int E, int source,
                    int columns, int flags, void* stream, void* plan) {
    if (E > kMaxExperts) return -5;
    const SmallArgs a{x, static_cast<const uint8_t*>(xs), static_cast<const uint8_t*>(we), static_cast<const int*>(ends),
                      static_cast<__nv_bfloat16*>(out), M, N, K, E, 0};
    const bool overlap = flags & 1;
    const int per_sm = columns / 100 + 1;
    Plan* const kept = static_cast<Plan*>(plan);
#define SMALL(NT)                                                                              \
    switch (source) {                                                                          \
        case 0: return run_small<NT, kMx, false>(w, a, per_sm, overlap, stream, kept);         \
        case 1: return run_small<NT, kBf16Floor, false>(w, a, per_sm, overlap, stream, kept);  \
        case 2: return run_small<NT, kBf16Rceil, false>(w, a, per_sm, overlap, stream, kept);  \
        case 3: return run_small<NT, kMx, true>(w, a, per_sm, overlap, stream, kept);          \
        default: return -4;                                                                    \
    }
    switch (columns % 100) {
        case 8: SMALL(8)
        case 16: SMALL(16)
        case 32: SMALL(32)
        case 64: SMALL(64)
        default: return -4;
    }
#undef SMALL
}

int mx_big_launch(const void* a, const void* ae, const void* w, const void* we, const void* ends, void* out, int M, int N, int K, int E, int variant,
                  int flags, void* stream, void* plan) {
    if (E > kMaxExperts) return -5;
    const BigArgs args{static_cast<const uint8_t*>(ae), static_cast<const uint8_t*>(we), static_cast<const int*>(ends), static_cast<__nv_bfloat16*>(out),
                       M, N, K, E, flags & 4};
    const bool overlap = flags & 1;
#define BIG(ID, ...) \
    case ID: return run_big<__VA_ARGS__>(a, w, args, overlap, stream, static_cast<Plan*>(plan));
    switch (variant) {
        BIG(0, 128, 128, 1, 6)
        BIG(1, 256, 128, 1, 4)
        BIG(2, 256, 128, 2, 4)
        BIG(3, 256, 256, 0, 4)
        default: return -4;
    }
#undef BIG
}
}
