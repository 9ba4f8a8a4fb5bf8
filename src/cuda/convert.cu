// convert: a freely strided matrix -> contiguous rows of another dtype, padded with zeros. Three ways:
// 16-byte accesses where rows are contiguous and aligned, a transposing tile where the rows' direction is the
// contiguous one, one element at a time otherwise.
#include "common.h"
#include "launch.cuh"
#include "elementwise.cuh"

namespace fp4bf16 {
namespace {

template <typename T>
struct Strided {
    const T* data;
    int64_t batch, rows, k, batch_stride, row_stride, k_stride;
};

template <typename In, typename Out>
constexpr int kStep = 16 / (sizeof(In) > sizeof(Out) ? sizeof(In) : sizeof(Out));

// ---- rows of contiguous, aligned k; loads before stores
template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads)
    convert_rows(const Strided<In> x, Out* __restrict__ out, int64_t out_stride) {
    wait_for_previous();
    constexpr int kCount = kStep<In, Out>;
    const int64_t vectors = out_stride / kCount, piece = int64_t{blockDim.x} * kUnroll;
    const int64_t row_step = int64_t{gridDim.x} * blockDim.y;
    for (int64_t z = blockIdx.z; z < x.batch; z += gridDim.z)
        for (int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y; row < x.rows; row += row_step) {
            const In* __restrict__ from = x.data + z * x.batch_stride + row * x.row_stride;
            Out* to = out + (z * x.rows + row) * out_stride;
            for (int64_t first = blockIdx.y * piece + threadIdx.x; first < vectors;
                 first += gridDim.y * piece) {
                Vector<In, kCount> in[kUnroll];
#pragma unroll
                for (int u = 0; u < kUnroll; ++u) {
                    const int64_t column = (first + u * int64_t{blockDim.x}) * kCount;
                    if (column + kCount <= x.k) {
                        in[u] = *reinterpret_cast<const Vector<In, kCount>*>(from + column);
                    } else {
#pragma unroll
                        for (int j = 0; j < kCount; ++j)
                            in[u].v[j] = column + j < x.k ? from[column + j] : from_float<In>(0.0f);
                    }
                }
#pragma unroll
                for (int u = 0; u < kUnroll; ++u) {
                    const int64_t i = first + u * int64_t{blockDim.x};
                    if (i >= vectors) continue;
                    Vector<Out, kCount> v;
#pragma unroll
                    for (int j = 0; j < kCount; ++j) v.v[j] = from_float<Out>(to_float(in[u].v[j]));
                    *reinterpret_cast<Vector<Out, kCount>*>(to + i * kCount) = v;
                }
            }
        }
}

// ---- row_stride = 1: tiles of 64 x 64 are read along the rows and written along k
template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads)
    convert_transposed(const Strided<In> x, Out* __restrict__ out, int64_t out_stride) {
    wait_for_previous();
    constexpr int kTile = 64;
    __shared__ float tile[kTile][kTile + 1];  // (k, rows)
    const int64_t tiles_r = (x.rows + kTile - 1) / kTile, tiles_k = (out_stride + kTile - 1) / kTile;
    const int lane = threadIdx.x % kTile, first = threadIdx.x / kTile;
    for (int64_t i = blockIdx.x; i < tiles_r * tiles_k * x.batch; i += gridDim.x) {
        const int64_t z = i / (tiles_r * tiles_k);
        const int64_t row0 = i % tiles_r * kTile, k0 = i / tiles_r % tiles_k * kTile;
        const In* __restrict__ from = x.data + z * x.batch_stride + row0 + lane;
#pragma unroll
        for (int k = first; k < kTile; k += kThreads / kTile)
            tile[k][lane] =
                row0 + lane < x.rows && k0 + k < x.k ? to_float(from[(k0 + k) * x.k_stride]) : 0.0f;
        __syncthreads();
        Out* to = out + (z * x.rows + row0) * out_stride + k0 + lane;
#pragma unroll
        for (int row = first; row < kTile; row += kThreads / kTile)
            if (row0 + row < x.rows && k0 + lane < out_stride)
                to[row * out_stride] = from_float<Out>(tile[lane][row]);
        __syncthreads();
    }
}

// ---- any strides: a warp takes 128 neighbouring columns of a row
template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads)
    convert_any(const Strided<In> x, Out* __restrict__ out, int64_t out_stride) {
    wait_for_previous();
    constexpr int kColumns = 128;
    const int64_t pieces = (out_stride + kColumns - 1) / kColumns,
                  warps = int64_t{gridDim.x} * (kThreads / 32);
    const int64_t all = x.batch * x.rows * pieces;
    for (int64_t i = (blockIdx.x * int64_t{kThreads} + threadIdx.x) / 32; i < all; i += warps) {
        const int64_t row = i / pieces, z = row / x.rows;
        const In* __restrict__ from = x.data + z * x.batch_stride + (row - z * x.rows) * x.row_stride;
#pragma unroll
        for (int j = 0; j < kColumns; j += 32) {
            const int64_t column = i % pieces * kColumns + j + threadIdx.x % 32;
            if (column >= out_stride) continue;
            const float v = column < x.k ? to_float(from[column * x.k_stride]) : 0.0f;
            out[row * out_stride + column] = from_float<Out>(v);
        }
    }
}

inline unsigned limited(int64_t blocks) {
    return static_cast<unsigned>(blocks < 0x7FFFFFFF ? blocks : 0x7FFFFFFF);
}

template <typename In, typename Out>
void launch_convert(Strided<In> x, Out* out, int64_t out_stride, cudaStream_t stream) {
    constexpr int64_t kCount = kStep<In, Out>;
    // Rows that follow one another without a gap are one row: it starts aligned, whatever k is.
    if (x.k_stride == 1 && x.row_stride == x.k && out_stride == x.k &&
        (x.batch == 1 || x.batch_stride == x.rows * x.k)) {
        const int64_t elements = x.batch * x.rows * x.k, whole = elements / kCount * kCount;
        if (whole == elements) {
            x.k = x.row_stride = out_stride = elements;
            x.batch = x.rows = 1;
        }
    }
    const bool rows_aligned = (x.rows == 1 || x.row_stride % kCount == 0) &&
                              (x.batch == 1 || x.batch_stride % kCount == 0) && out_stride % kCount == 0;
    if ((x.k_stride == 1 || x.k <= 1) && rows_aligned && aligned(x.data, kCount * sizeof(In)) &&
        aligned(out, kCount * sizeof(Out))) {
        const RowGrid g(x.rows, out_stride / kCount, x.batch);
        launch_kernel(convert_rows<In, Out>, g.grid, g.block, 0, stream, x, out, out_stride);
    } else if (x.row_stride == 1 && x.k_stride != 1 && x.rows > 8) {
        const int64_t tiles = ceil_div(x.rows, 64) * ceil_div(out_stride, 64);
        launch_kernel(convert_transposed<In, Out>, limited(tiles * x.batch), kThreads, 0, stream, x, out,
                      out_stride);
    } else {
        const int64_t warps = x.batch * x.rows * ceil_div(out_stride, 128);
        launch_kernel(convert_any<In, Out>, limited(ceil_div(warps, kThreads / 32)), kThreads, 0, stream, x,
                      out, out_stride);
    }
}

}  // namespace
}  // namespace fp4bf16

using namespace fp4bf16;

extern "C" fp4bf16_status fp4bf16_convert(const void* x, fp4bf16_dtype dtype, int64_t batch, int64_t rows,
                                          int64_t k, int64_t batch_stride, int64_t row_stride,
                                          int64_t k_stride, void* out, fp4bf16_dtype out_dtype,
                                          int64_t out_stride, void* stream) {
    FP4BF16_TRY(check_dtype("convert", dtype));
    FP4BF16_TRY(check_dtype("convert", out_dtype));
    constexpr int64_t kLimit = int64_t{1} << 40;
    if (batch < 0 || batch > kLimit || (batch > 0 && rows > kLimit / batch))
        return fail(
            FP4BF16_INVALID_ARGUMENT,
            "convert: batch is %lld with %lld rows each, but it must be at least 0 and the product at "
            "most 2^40",
            static_cast<long long>(batch), static_cast<long long>(rows));
    FP4BF16_TRY(
        check_matrix("convert", "out", out, batch * rows, out_stride, out_stride, size_of(out_dtype)));
    if (k < 0 || k > out_stride)
        return fail(FP4BF16_INVALID_ARGUMENT,
                    "convert: k is %lld, but must be 0 to out_stride, which is %lld",
                    static_cast<long long>(k), static_cast<long long>(out_stride));
    const struct {
        const char* name;
        int64_t value, count;  // a stride of a single element is never used
    } strides[] = {
        {"batch_stride", batch_stride, batch}, {"row_stride", row_stride, rows}, {"k_stride", k_stride, k}};
    for (const auto& s : strides)
        if (s.count > 1 && (s.value > kLimit || s.value < -kLimit))
            return fail(FP4BF16_INVALID_ARGUMENT, "convert: %s is %lld elements, but must be -2^40 to 2^40",
                        s.name, static_cast<long long>(s.value));
    if (batch == 0 || rows == 0 || out_stride == 0) return FP4BF16_OK;
    if (k > 0) FP4BF16_TRY(check_pointer("convert", "x", x, size_of(dtype)));
    by_dtype(dtype, [&](auto from) {
        using In = decltype(from);
        const Strided<In> source{
            static_cast<const In*>(x), batch, rows, k, batch_stride, row_stride, k_stride};
        by_dtype(out_dtype, [&](auto to) {
            launch_convert(source, static_cast<decltype(to)*>(out), out_stride,
                           static_cast<cudaStream_t>(stream));
        });
    });
    return cuda_result(cudaGetLastError(), "convert");
}
