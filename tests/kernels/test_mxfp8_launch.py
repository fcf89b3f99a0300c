"""The host side of the MXFP8 launches (`launch.cuh`) on made-up devices: a stand-in for the CUDA runtime, compiled by
the C++ compiler of the machine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from moe_kernels import mxfp8

HEADER = Path(mxfp8.__file__).parent / "launch.cuh"

RUNTIME = r"""
#pragma once
#include <cstddef>
#include <cstdint>
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
using cudaStream_t = void*;
struct dim3 { unsigned x = 1, y = 1, z = 1; dim3() = default; dim3(unsigned n) : x(n) {} };
struct cudaLaunchAttribute { int id; struct { int programmaticStreamSerializationAllowed; } val; };
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim; std::size_t dynamicSmemBytes; cudaStream_t stream;
    cudaLaunchAttribute* attrs; unsigned numAttrs;
};
enum { cudaLaunchAttributeProgrammaticStreamSerialization, cudaDevAttrMultiProcessorCount, cudaEnableDefault,
       cudaFuncAttributeMaxDynamicSharedMemorySize };

inline int current = 0, refuse_at = -1, launched = 0, pending = 0, seen[8];
inline cudaError_t cudaGetDevice(int* d) { *d = current; return 0; }
inline cudaError_t cudaSetDevice(int d) { current = d; return 0; }
inline cudaError_t cudaDeviceGetAttribute(int* v, int, int device) { *v = 100 + device; return 0; }
inline cudaError_t cudaFuncSetAttribute(const void*, int, int) { return 0; }
inline cudaError_t cudaGetLastError() { int e = pending; pending = 0; return e; }
inline cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) {
    seen[launched] = current;
    return launched++ == refuse_at ? pending = 9 : 0;
}
using cudaDriverEntryPointQueryResult = int;
inline cudaError_t cudaGetDriverEntryPointByVersion(const char*, void**, int, int, int*) { return 1; }
using CUresult = int; using CUtensorMapDataType = int; using CUtensorMapInterleave = int;
using CUtensorMapSwizzle = int; using CUtensorMapL2promotion = int; using CUtensorMapFloatOOBfill = int;
using cuuint32_t = std::uint32_t; using cuuint64_t = std::uint64_t;
struct CUtensorMap { std::uint64_t opaque[16]; };
enum { CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
       CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };
"""

PROGRAM = r"""
#include "launch.cuh"
#include <cstdio>
#include <initializer_list>
void kernel(int) {}
int main() {
    for (int d : {0, 3, 0, 1}) { current = d; std::printf("%d ", sm_count()); }
    Plan plan{};
    current = 1;
    launch(kernel, 1, 32, 0, false, nullptr, &plan, 5), launch(kernel, 1, 32, 0, true, nullptr, &plan, 6);
    std::printf("| %d launched, %d kept | ", launched, plan.count);
    for (int d : {1, 2}) {
        current = d, launched = 0;
        const int rc = plan.run(nullptr);
        std::printf("from %d: %d on %d %d, back on %d | ", d, rc, seen[0], seen[1], current);
    }
    launched = 0, refuse_at = 0;
    const int rc = plan.run(nullptr);
    std::printf("refused: %d after %d, back on %d, %d pending", rc, launched, current, pending);
}
"""


def test_plans_and_grids_follow_the_device(tmp_path):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    for name, text in (("cuda_runtime.h", RUNTIME), ("cuda.h", '#include "cuda_runtime.h"\n'), ("main.cpp", PROGRAM)):
        (tmp_path / name).write_text(text)
    program = tmp_path / "main"
    command = [compiler, "-std=c++17", f"-I{tmp_path}", f"-I{HEADER.parent}", str(tmp_path / "main.cpp"), "-o", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    shown = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    assert shown.split(" | ") == [
        "100 103 100 101",
        "0 launched, 2 kept",
        "from 1: 0 on 1 1, back on 1",
        "from 2: 0 on 1 1, back on 2",
        "refused: 9 after 1, back on 2, 0 pending",
    ]
