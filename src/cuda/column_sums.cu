// Sums over the rows of a BF16 matrix, the gradient of a bias: parts of the rows first, then the parts.
#include "common.h"
#include "each.cuh"
#include "launch.cuh"

namespace fp4bf16 {
namespace {

using bf16 = __nv_bfloat16;
constexpr int kCount = kVector<bf16>;  // columns a thread
constexpr int kPartThreads = 512;
constexpr int64_t kParts = 256, kMostGroups = 64;

// kCount columns of a row, `left` of which are there, the others zero.
template <bool kAligned>
__device__ inline Raw<bf16, kCount> load_columns(const bf16* from, int64_t left) {
    if constexpr (kAligned) {
        return load_raw<kCount>(from);
    } else {
        bf16 v[kCount] = {};
#pragma unroll
        for (int j = 0; j < kCount; ++j)
            if (j < left) v[j] = from[j];
        Raw<bf16, kCount> raw;
        memcpy(&raw, v, sizeof raw);
        return raw;
    }
}

__device__ inline void add_columns(float (&sum)[kCount], const Raw<bf16, kCount>& raw) {
    const auto v = unpack<bf16, kCount>(raw);
#pragma unroll
    for (int j = 0; j < kCount; ++j) sum[j] += to_float(v.v[j]);
}

// Part blockIdx.x of the rows, columns from blockIdx.y * blockDim.x * kCount on. Thread (x, y) adds rows y, y
// + blockDim.y, ... of kCount columns; whether it loads them at once changes no sum.
template <bool kAligned>
__global__ void __launch_bounds__(kPartThreads, 2)  // without the 2 the compiler holds one row at a time
    part_sums(const bf16* x, int64_t rows, int64_t c, int64_t stride, int64_t rows_per_part, float* parts) {
    wait_for_previous();
    constexpr int kAhead = 8;  // rows loaded before the first is added
    __shared__ float shared[kPartThreads * kCount];
    const int64_t column = (blockIdx.y * int64_t{blockDim.x} + threadIdx.x) * kCount;
    const int64_t start = blockIdx.x * rows_per_part, next = start + rows_per_part;
    const int64_t end = next < rows ? next : rows, step = blockDim.y;
    float sum[kCount] = {};
    if (column < c) {
        int64_t row = start + threadIdx.y;
        for (; row + (kAhead - 1) * step < end; row += kAhead * step) {
            Raw<bf16, kCount> raw[kAhead];
#pragma unroll
            for (int u = 0; u < kAhead; ++u)
                raw[u] = load_columns<kAligned>(x + (row + u * step) * stride + column, c - column);
#pragma unroll
            for (int u = 0; u < kAhead; ++u) add_columns(sum, raw[u]);
        }
        for (; row < end; row += step)
            add_columns(sum, load_columns<kAligned>(x + row * stride + column, c - column));
    }
    const int width = blockDim.x * kCount, thread = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
    for (int j = 0; j < kCount; ++j) shared[thread * kCount + j] = sum[j];
    __syncthreads();
    for (int i = thread; i < width; i += blockDim.x * blockDim.y) {
        const int64_t at = blockIdx.y * int64_t{width} + i;
        float total = shared[i];
        for (unsigned y = 1; y < blockDim.y; ++y) total += shared[y * width + i];
        if (at < c) parts[blockIdx.x * c + at] = total;
    }
}

// sums += the parts, in double: 32 columns a block, a warp every eighth part, then the warps in order.
__global__ void __launch_bounds__(kThreads) add_parts(const float* parts, int count, int64_t c, float* sums) {
    wait_for_previous();
    constexpr int kWarps = kThreads / 32;
    __shared__ double shared[kWarps][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t column = blockIdx.x * int64_t{32} + lane;
    double sum = 0.0;
    if (column < c)
#pragma unroll 8
        for (int p = warp; p < count; p += kWarps) sum += parts[p * c + column];
    shared[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || column >= c) return;
    for (int w = 1; w < kWarps; ++w) sum += shared[w][lane];
    sums[column] = static_cast<float>(static_cast<double>(sums[column]) + sum);
}

}  // namespace
}  // namespace fp4bf16

using namespace fp4bf16;

extern "C" fp4bf16_status fp4bf16_column_sums(const void* x, int64_t rows, int64_t c, int64_t x_stride,
                                              float* sums, void* workspace, void* stream) {
    FP4BF16_TRY(check_matrix("column_sums", "x", x, rows, c, x_stride, 2));
    if (rows == 0 || c == 0) return FP4BF16_OK;
    FP4BF16_TRY(check_pointer("column_sums", "sums", sums, 4));
    FP4BF16_TRY(check_pointer("column_sums", "workspace", workspace, 4));
    const int64_t groups = ceil_div(c, kCount), width = groups < kMostGroups ? groups : kMostGroups;
    const int64_t pieces = ceil_div(groups, width);
    if (pieces > 65535)
        return fail(FP4BF16_INVALID_ARGUMENT, "column_sums: c is %lld, but at most %lld columns are taken",
                    static_cast<long long>(c), static_cast<long long>(65535 * kMostGroups * kCount));
    const int64_t rows_per_part = ceil_div(rows, rows < kParts ? rows : kParts);
    const int64_t parts = ceil_div(rows, rows_per_part);
    const dim3 grid(static_cast<unsigned>(parts), static_cast<unsigned>(pieces));
    const dim3 block(static_cast<unsigned>(width), static_cast<unsigned>(kPartThreads / width));
    const auto from = static_cast<const bf16*>(x);
    const auto to = static_cast<float*>(workspace);
    const auto s = static_cast<cudaStream_t>(stream);
    if (in_vectors(x, rows, c, x_stride, 2))
        launch_kernel(part_sums<true>, grid, block, 0, s, from, rows, c, x_stride, rows_per_part, to);
    else
        launch_kernel(part_sums<false>, grid, block, 0, s, from, rows, c, x_stride, rows_per_part, to);
    launch_kernel(add_parts, static_cast<unsigned>(ceil_div(c, 32)), kThreads, 0, s, to,
                  static_cast<int>(parts), c, sums);
    return cuda_result(cudaGetLastError(), "column_sums");
}
