// What kernels share that stream matrices: FP32 from and to each dtype, 16-byte accesses, a grid over rows of
// vectors.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common.h"

namespace fp4bf16 {

// ---- one element
__device__ inline float to_float(float v) { return v; }
__device__ inline float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ inline float to_float(__half v) { return __half2float(v); }

template <typename T>
__device__ T from_float(float v);
template <>
__device__ inline float from_float<float>(float v) {
    return v;
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
    return __float2bfloat16_rn(v);
}
template <>
__device__ inline __half from_float<__half>(float v) {
    return __float2half_rn(v);
}

// ---- several at once: one load or store of at most 16 bytes
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
    static_assert(sizeof(T) * kCount <= 16, "a thread loads and stores at most 16 bytes at once");
    T v[kCount];
};

template <typename T>
constexpr int kVector = 16 / sizeof(T);  // elements of a full one

// ---- a dtype number -> a type: by_dtype(dtype, [&](auto zero) { using T = decltype(zero); ... })
template <typename Function>
void by_dtype(fp4bf16_dtype dtype, const Function& function) {
    switch (dtype) {
        case FP4BF16_BFLOAT16:
            return function(__nv_bfloat16{});
        case FP4BF16_FLOAT16:
            return function(__half{});
        default:
            return function(float{});
    }
}

// ---- (rows, vectors): up to 32 neighbouring threads take a row, each kUnroll vectors of it that lie
// blockDim.x apart; blockIdx.x goes over rows, blockIdx.y over the pieces of a row, both strided by the grid
constexpr int kUnroll = 4;

struct RowGrid {
    dim3 grid, block;
    RowGrid(int64_t rows, int64_t vectors, int64_t batch = 1) {
        unsigned width = 1;
        while (width < 32 && width < vectors) width *= 2;
        block = dim3(width, kThreads / width);
        const int64_t x = ceil_div(rows, block.y), y = ceil_div(vectors, int64_t{width} * kUnroll);
        grid.x = static_cast<unsigned>(x < 0x7FFFFFFF ? x : 0x7FFFFFFF);
        grid.y = static_cast<unsigned>(y < 65535 ? y : 65535);
        grid.z = static_cast<unsigned>(batch < 65535 ? batch : 65535);
    }
};

inline bool aligned(const void* pointer, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

}  // namespace fp4bf16
