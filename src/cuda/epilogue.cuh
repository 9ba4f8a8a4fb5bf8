// What follows a product: scales, alpha, bias, activation, residual, rounding, store. Works on the registers
// of a wgmma fragment (see wgmma.cuh).
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "fp4bf16.h"
#include "ptx.cuh"

namespace fp4bf16 {

struct Epilogue {
    const float* row_scale;  // element i of matrix z of A: z * row_batch + i * row_step; NULL: one
    const float* col_scale;  // likewise, of B
    int64_t row_step, col_step, row_batch, col_batch;
    float alpha;
    int activation;
    const void* bias;  // (n,)
    const void* residual;
    void* d;
    int bias_dtype, residual_dtype, d_dtype;
    int64_t residual_stride, residual_batch, d_stride, d_batch;
    int m, n;
    bool extra;   // anything but scales
    bool vector;  // FP32 pairs can be stored at once: base and stride of d are aligned to 8 bytes
};

__device__ inline float load_as_float(const void* p, int dtype, int64_t i) {
    if (dtype == FP4BF16_FLOAT32) return __ldg(static_cast<const float*>(p) + i);
    if (dtype == FP4BF16_BFLOAT16) return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
    return __half2float(static_cast<const __half*>(p)[i]);
}

template <int kDtype>
__device__ inline uint32_t pack_pair(float low, float high) {
    uint32_t packed;
    if constexpr (kDtype == FP4BF16_BFLOAT16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// x / (1 + exp(-x)) (Elfwing et al., arXiv:1702.03118); relative error about that of __expf for x < 0, which
// is 2 + 1.173 |x| units in the last place: 2^-20 near zero, 2^-16 where the result is 1e-33.
__device__ inline float silu(float x) {
    float inverse;
    asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + __expf(-x)));
    return x * inverse;
}
// x Phi(x), by erfc so that the negative tail keeps its digits (Hendrycks, arXiv:1606.08415)
__device__ inline float gelu(float x) { return 0.5f * x * erfcf(-0.70710678f * x); }

// Column of accumulator i relative to the first one of this thread, and whether it is of the lower row.
__device__ constexpr int column_of(int i) { return i / 4 * 8 + i % 2; }
__device__ constexpr int lower(int i) { return i % 4 / 2; }

// Column scales and bias of a tile, in shared memory: read from global memory by one thread a column before
// the mainloop, so that the epilogue waits for nothing. Two buffers in turn and one barrier a tile.
template <int kColumns>
struct ColumnVectors {
    static constexpr int kEach = (kColumns + 127) / 128;  // columns a thread of the warpgroup brings
    static constexpr int kFloats = 2 * 2 * kColumns;

    float* buffers;  // (2, 2, kColumns): scales, bias; of this warpgroup
    int turn = 0;
    float scale[kEach], bias[kEach];

    __device__ explicit ColumnVectors(float* buffers) : buffers(buffers) {}

    __device__ void load(const Epilogue& e, int first_col, int zb) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int c = first_col + threadIdx.x % 128 + 128 * i;
            scale[i] = 1.0f, bias[i] = 0.0f;
            if (c >= e.n || (kColumns % 128 != 0 && threadIdx.x % 128 + 128 * i >= kColumns)) continue;
            if (e.col_scale != nullptr) scale[i] = __ldg(e.col_scale + zb * e.col_batch + c * e.col_step);
            if (e.bias != nullptr) bias[i] = load_as_float(e.bias, e.bias_dtype, c);
        }
    }

    // `barrier`: a hardware barrier of this warpgroup's own.
    __device__ void publish(int barrier) {
        turn ^= 1;
        float* buffer = buffers + turn * 2 * kColumns;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int c = threadIdx.x % 128 + 128 * i;
            if (kColumns % 128 != 0 && c >= kColumns) continue;
            buffer[c] = scale[i];
            buffer[kColumns + c] = bias[i];
        }
        asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
    }

    // Pairs of this thread's columns in a fragment: pair j is columns 8 j + 2 t and the next.
    __device__ const float2* scales() const {
        return reinterpret_cast<const float2*>(buffers + turn * 2 * kColumns) + threadIdx.x % 4;
    }
    __device__ const float2* biases() const { return scales() + kColumns / 2; }
};

template <int kAccumulators>
__device__ inline void scale_fragment(float (&acc)[kAccumulators], const float (&by_row)[2],
                                      const float2* by_col) {
#pragma unroll
    for (int j = 0; j < kAccumulators; j += 4) {
        const float2 c = by_col[j];  // four pairs are eight columns
        acc[j] *= by_row[0] * c.x;
        acc[j + 1] *= by_row[0] * c.y;
        acc[j + 2] *= by_row[1] * c.x;
        acc[j + 3] *= by_row[1] * c.y;
    }
}

template <int kAccumulators>
__device__ inline void add_bias(float (&acc)[kAccumulators], const float2* bias) {
#pragma unroll
    for (int j = 0; j < kAccumulators; j += 4) {
        const float2 b = bias[j];
        acc[j] += b.x;
        acc[j + 1] += b.y;
        acc[j + 2] += b.x;
        acc[j + 3] += b.y;
    }
}

template <int kAccumulators>
__device__ inline void add_residual(const Epilogue& e, float (&acc)[kAccumulators], int row, int col, int z) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) {
        const int r = row + 8 * lower(i), c = col + column_of(i);
        if (r < e.m && c < e.n)
            acc[i] +=
                load_as_float(e.residual, e.residual_dtype, z * e.residual_batch + r * e.residual_stride + c);
    }
}

// Any shape, any alignment: an element at a time.
template <int kAccumulators>
__device__ inline void store_edge(const Epilogue& e, const float (&acc)[kAccumulators], int row, int col,
                                  int z) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) {
        const int r = row + 8 * lower(i), c = col + column_of(i);
        if (r >= e.m || c >= e.n) continue;
        const int64_t at = z * e.d_batch + r * e.d_stride + c;
        if (e.d_dtype == FP4BF16_FLOAT32)
            static_cast<float*>(e.d)[at] = acc[i];
        else if (e.d_dtype == FP4BF16_BFLOAT16)
            static_cast<__nv_bfloat16*>(e.d)[at] = __float2bfloat16_rn(acc[i]);
        else
            static_cast<__half*>(e.d)[at] = __float2half_rn(acc[i]);
    }
}

template <int kAccumulators>
__device__ inline void store_float(const Epilogue& e, const float (&acc)[kAccumulators], int row, int col,
                                   int z) {
    float* out = static_cast<float*>(e.d) + z * e.d_batch + row * e.d_stride + col;
#pragma unroll
    for (int i = 0; i < kAccumulators; i += 2)  // a quad writes 32 bytes: one sector
        *reinterpret_cast<float2*>(out + 8 * lower(i) * e.d_stride + column_of(i)) =
            make_float2(acc[i], acc[i + 1]);
}

// Where 16-byte chunk `chunk` of row `row` of a box of 64 or 32 16-bit columns lies: under the 128-byte
// swizzle the chunks of eight rows of 128 bytes change places, under that of 64 bytes those of four pairs of
// rows.
template <int kColumns>
__device__ inline int box_offset(int row, int chunk) {
    static_assert(kColumns == 64 || kColumns == 32);
    return row * 2 * kColumns + (chunk ^ (kColumns == 64 ? row % 8 : row / 2 % 4)) * 16;
}

// Columns kColumns `box` .. + kColumns - 1 of a fragment of 64 rows into shared memory.
template <int kDtype, int kColumns = 64, int kAccumulators>
__device__ inline void stage_box(const float (&acc)[kAccumulators], int box, uint32_t memory) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int j = 0; j < kColumns / 8; j += 2) {  // two n8 groups: 16 rows x 16 columns
        const float* v = acc + 4 * (kColumns / 8 * box + j);
        ptx::store_matrices(memory + box_offset<kColumns>(row, j + lane / 16), pack_pair<kDtype>(v[0], v[1]),
                            pack_pair<kDtype>(v[2], v[3]), pack_pair<kDtype>(v[4], v[5]),
                            pack_pair<kDtype>(v[6], v[7]));
    }
}

// Everything up to rounding, in place, of a fragment (64 rows of a warpgroup, 2 * kAccumulators columns).
// Each step is one pass over the registers behind one uniform branch, so that a plain product runs through
// little code.
template <int kAccumulators>
__device__ inline void finish_fragment(const Epilogue& e, float (&acc)[kAccumulators], const float2* bias,
                                       int row, int col, int z) {
    if (e.alpha != 1.0f)
#pragma unroll
        for (int i = 0; i < kAccumulators; ++i) acc[i] *= e.alpha;
    if (e.bias != nullptr) add_bias(acc, bias);
#pragma unroll
    for (int i = 0; i < kAccumulators; i += 8) {
        int activation = e.activation;
        asm volatile("" : "+r"(activation));  // a branch each eight: all at once would spill registers
        if (activation == FP4BF16_SILU)
#pragma unroll
            for (int j = 0; j < 8; ++j) acc[i + j] = silu(acc[i + j]);
        if (activation == FP4BF16_GELU)
#pragma unroll
            for (int j = 0; j < 8; ++j) acc[i + j] = gelu(acc[i + j]);
    }
    if (e.residual != nullptr) add_residual(e, acc, row, col, z);
}

// From the registers to global memory: FP32 results, and shapes that the copy engine does not take.
template <int kAccumulators>
__device__ inline void store_fragment(const Epilogue& e, const float (&acc)[kAccumulators], int row, int col,
                                      int z) {
    const int first_row = row - threadIdx.x % 32 / 4, first_col = col - threadIdx.x % 4 * 2;
    const bool whole = first_row + 16 <= e.m && first_col + 2 * kAccumulators <= e.n;
    if (e.d_dtype == FP4BF16_FLOAT32 && e.vector && whole)
        store_float(e, acc, row, col, z);
    else
        store_edge(e, acc, row, col, z);
}

}  // namespace fp4bf16
