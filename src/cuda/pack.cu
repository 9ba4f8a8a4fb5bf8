// pack and unpack: E2M1 values with no scale, two a byte. The low nibble is the even column.
#include "common.h"
#include "launch.cuh"
#include "elementwise.cuh"
#include "fp4.cuh"

namespace fp4bf16 {
namespace {

// One thread, one byte.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    pack_kernel(const T* x, int64_t rows, int64_t k, int64_t stride, uint8_t* packed) {
    wait_for_previous();
    const int64_t bytes = (k + 1) / 2;  // a row
    const int64_t step = int64_t{gridDim.x} * kThreads;
    for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < rows * bytes; i += step) {
        const int64_t row = i / bytes, column = i % bytes * 2;
        uint32_t byte = 0;
        for (int half = 0; half < 2; ++half) {
            const float v = column + half < k ? to_float(x[row * stride + column + half]) : 0.0f;
            const uint32_t code = isnan(v) ? 7 : e2m1_code(fabsf(v));
            byte |= (code | sign_bit(v)) << (4 * half);
        }
        packed[i] = static_cast<uint8_t>(byte);
    }
}

// One thread, one element.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    unpack_kernel(const uint8_t* packed, int64_t rows, int64_t k, T* x, int64_t stride) {
    wait_for_previous();
    const int64_t bytes = (k + 1) / 2;
    const int64_t step = int64_t{gridDim.x} * kThreads;
    for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < rows * k; i += step) {
        const int64_t row = i / k, column = i % k;
        const uint32_t byte = packed[row * bytes + column / 2];
        x[row * stride + column] = from_float<T>(e2m1_decode(column & 1 ? byte >> 4 : byte & 15));
    }
}

}  // namespace
}  // namespace fp4bf16

using namespace fp4bf16;

extern "C" fp4bf16_status fp4bf16_pack(const void* x, fp4bf16_dtype dtype, int64_t rows, int64_t k,
                                       int64_t x_stride, uint8_t* packed, void* stream) {
    FP4BF16_TRY(check_dtype("pack", dtype));
    FP4BF16_TRY(check_matrix("pack", "x", x, rows, k, x_stride, size_of(dtype)));
    if (rows == 0 || k == 0) return FP4BF16_OK;
    FP4BF16_TRY(check_pointer("pack", "packed", packed, 1));
    const unsigned grid = grid_for(rows * ((k + 1) / 2));
    const auto s = static_cast<cudaStream_t>(stream);
    by_dtype(dtype, [&](auto zero) {
        const auto from = static_cast<const decltype(zero)*>(x);
        launch_kernel(pack_kernel<decltype(zero)>, grid, kThreads, 0, s, from, rows, k, x_stride, packed);
    });
    return cuda_result(cudaGetLastError(), "pack");
}

extern "C" fp4bf16_status fp4bf16_unpack(const uint8_t* packed, int64_t rows, int64_t k, void* x,
                                         fp4bf16_dtype dtype, int64_t x_stride, void* stream) {
    FP4BF16_TRY(check_dtype("unpack", dtype));
    FP4BF16_TRY(check_matrix("unpack", "x", x, rows, k, x_stride, size_of(dtype)));
    if (rows == 0 || k == 0) return FP4BF16_OK;
    FP4BF16_TRY(check_pointer("unpack", "packed", packed, 1));
    const unsigned grid = grid_for(rows * k);
    const auto s = static_cast<cudaStream_t>(stream);
    by_dtype(dtype, [&](auto zero) {
        const auto to = static_cast<decltype(zero)*>(x);
        launch_kernel(unpack_kernel<decltype(zero)>, grid, kThreads, 0, s, packed, rows, k, to, x_stride);
    });
    return cuda_result(cudaGetLastError(), "unpack");
}
