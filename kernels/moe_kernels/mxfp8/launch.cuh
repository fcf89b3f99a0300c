// Host side of the launches: tensor maps, shared-memory grants, launches that are submitted at once or kept in a plan.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

constexpr int kMaxDevices = 32;

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                            const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

inline Encode encoder() {
    static Encode fn = [] {
        void* p = nullptr;
        cudaDriverEntryPointQueryResult q;
        return cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &p, 12000, cudaEnableDefault, &q) == cudaSuccess ? reinterpret_cast<Encode>(p)
                                                                                                                           : nullptr;
    }();
    return fn;
}

// A row-major byte matrix [rows, K], read in boxes of `box_rows` rows of `width` bytes with the 128-byte swizzle.
inline int make_map(CUtensorMap* map, const void* ptr, int64_t rows, int K, int width, int box_rows) {
    const cuuint64_t dims[2] = {static_cast<cuuint64_t>(K), static_cast<cuuint64_t>(rows)}, strides[1] = {static_cast<cuuint64_t>(K)};
    const cuuint32_t box[2] = {static_cast<cuuint32_t>(width), static_cast<cuuint32_t>(box_rows)}, one[2] = {1, 1};
    if (encoder() == nullptr) return -1;
    return encoder()(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(ptr), dims, strides, box, one, CU_TENSOR_MAP_INTERLEAVE_NONE,
                     CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// Multiprocessors of the current device; 0 where there is none, which the launch then refuses.
inline int sm_count() {
    static int counts[kMaxDevices];
    int device = 0, count = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return 0;
    if (device < kMaxDevices && counts[device] > 0) return counts[device];
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    if (device < kMaxDevices) counts[device] = count;
    return count;
}

// A launch with its arguments, ready to be submitted again and again.
struct Launch {
    const void* kernel;
    cudaLaunchConfig_t config;
    bool overlap;
    alignas(64) unsigned char storage[640];
    int offset[12];
    int count, used;

    int submit(void* stream) const {
        cudaLaunchAttribute attribute[1];
        attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute[0].val.programmaticStreamSerializationAllowed = 1;
        cudaLaunchConfig_t c = config;
        c.stream = static_cast<cudaStream_t>(stream), c.attrs = attribute, c.numAttrs = overlap;
        void* args[12];
        for (int i = 0; i < count; ++i) args[i] = const_cast<unsigned char*>(storage) + offset[i];
        const cudaError_t rc = cudaLaunchKernelExC(&c, kernel, args);
        if (rc != cudaSuccess) cudaGetLastError();  // told to the caller; left pending, the next kernel of torch would report it
        return rc;
    }
    template <class T>
    void add(const T& value) {
        static_assert(std::is_trivially_copyable<T>::value, "arguments are kept as bytes");
        used = (used + static_cast<int>(alignof(T)) - 1) / static_cast<int>(alignof(T)) * static_cast<int>(alignof(T));
        std::memcpy(storage + used, &value, sizeof(T));
        offset[count++] = used;
        used += sizeof(T);
    }
};

struct Plan {
    Launch launches[2];
    int count, device;

    // The default stream is another one on every device, and any other stream belongs to one device: that of the plan
    // is made current for its launches.
    int run(void* stream) const {
        int current = 0;
        if (int rc = cudaGetDevice(&current)) return rc;
        if (current != device)
            if (int rc = cudaSetDevice(device)) return rc;
        int rc = 0;
        for (int i = 0; i < count && rc == 0; ++i) rc = launches[i].submit(stream);
        if (current != device) cudaSetDevice(current);
        return rc;
    }
};

// Submits at once, or keeps the launch in `plan` where one is given.
template <class... P, class... A>
int launch(void (*kernel)(P...), int grid, int block, int smem, bool overlap, void* stream, Plan* plan, A... args) {
    static_assert((sizeof(P) + ... + 0) + 64 * 3 <= sizeof(Launch::storage) && sizeof...(P) <= 12, "arguments outgrow the storage");
    Launch one{};
    one.kernel = reinterpret_cast<const void*>(kernel), one.overlap = overlap;
    one.config.gridDim = dim3(grid), one.config.blockDim = dim3(block), one.config.dynamicSmemBytes = smem;
    (one.add(static_cast<P>(args)), ...);
    if (plan == nullptr) return one.submit(stream);
    if (plan->count == 2) return -6;
    if (int rc = cudaGetDevice(&plan->device)) return rc;
    plan->launches[plan->count++] = one;
    return 0;
}

// Dynamic shared memory beyond 48 KB is granted per kernel and device.
inline int grant(const void* kernel, int bytes, int (&granted)[kMaxDevices]) {
    int device = 0;
    if (int rc = cudaGetDevice(&device)) return rc;
    if (device >= kMaxDevices) return -7;
    if (granted[device] >= bytes) return 0;
    const int rc = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (rc == 0) granted[device] = bytes;
    return rc;
}

}  // namespace
