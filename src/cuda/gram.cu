// fp4bf16_gram: x x^T of matrices in double, for the singular values of weights. The array frameworks' own
// products of doubles are right too, but CuPy's cannot be captured in a graph.
#include "common.h"
#include "launch.cuh"

namespace fp4bf16 {
namespace {

constexpr int kTile = 64, kDepth = 16;   // of the result, a side; columns of x at a time
constexpr int kSide = 16, kEach = kTile / kSide;  // threads a side; rows and columns of each
constexpr int kGramThreads = kSide * kSide;
constexpr int kPitch = kTile + 1;

// Rows of x from `first` on, columns from `k` on, into shared memory, turned; zeros beyond.
__device__ inline void load_rows(const double* x, int64_t m, int64_t n, int64_t first, int64_t k,
                                 double (&to)[kDepth][kPitch]) {
    const int column = threadIdx.x % kDepth;
#pragma unroll
    for (int row = threadIdx.x / kDepth; row < kTile; row += kGramThreads / kDepth) {
        const bool there = first + row < m && k + column < n;
        to[column][row] = there ? x[(first + row) * n + k + column] : 0.0;
    }
}

// A tile on or under the diagonal, and its mirror image: each sum in order of the columns, so that the result
// is symmetric to the bit.
__global__ void __launch_bounds__(kGramThreads)
    gram_kernel(const double* x, int64_t m, int64_t n, double* out) {
    wait_for_previous();
    __shared__ double left[kDepth][kPitch], right[kDepth][kPitch];
    if (blockIdx.y > blockIdx.x) return;
    const int64_t row = int64_t{blockIdx.x} * kTile, column = int64_t{blockIdx.y} * kTile;
    x += int64_t{blockIdx.z} * m * n, out += int64_t{blockIdx.z} * m * m;
    const int across = threadIdx.x % kSide, down = threadIdx.x / kSide;
    double sum[kEach][kEach] = {};
    for (int64_t k = 0; k < n; k += kDepth) {
        if (k > 0) __syncthreads();
        load_rows(x, m, n, row, k, left), load_rows(x, m, n, column, k, right);
        __syncthreads();
#pragma unroll
        for (int j = 0; j < kDepth; ++j)
#pragma unroll
            for (int r = 0; r < kEach; ++r)
#pragma unroll
                for (int c = 0; c < kEach; ++c)
                    sum[r][c] = fma(left[j][down + kSide * r], right[j][across + kSide * c], sum[r][c]);
    }
#pragma unroll
    for (int r = 0; r < kEach; ++r)
#pragma unroll
        for (int c = 0; c < kEach; ++c) {
            const int64_t i = row + down + kSide * r, j = column + across + kSide * c;
            if (i < m && j < m) out[i * m + j] = out[j * m + i] = sum[r][c];
        }
}

}  // namespace
}  // namespace fp4bf16

using namespace fp4bf16;

extern "C" fp4bf16_status fp4bf16_gram(const double* x, int64_t count, int64_t m, int64_t n, double* out,
                                       void* stream) {
    const char* f = "gram";
    constexpr int64_t kMostRows = int64_t{65535} * kTile;
    FP4BF16_TRY(check_range(f, "count", count, 0, 65535));
    FP4BF16_TRY(check_range(f, "m", m, 0, kMostRows));
    FP4BF16_TRY(check_range(f, "n", n, 0, int64_t{1} << 40));
    if (count == 0 || m == 0) return FP4BF16_OK;
    if (n > 0) FP4BF16_TRY(check_pointer(f, "x", x, alignof(double)));
    FP4BF16_TRY(check_pointer(f, "out", out, alignof(double)));
    const auto tiles = static_cast<unsigned>(ceil_div(m, kTile));
    launch_kernel(gram_kernel, dim3(tiles, tiles, static_cast<unsigned>(count)), kGramThreads, 0,
                  static_cast<cudaStream_t>(stream), x, m, n, out);
    return cuda_result(cudaGetLastError(), f);
}
