// What follows a product: scales, alpha, bias, activation, residual, rounding, store; straight from the registers
// of a wgmma fragment (see wgmma.cuh) to global memory, so that it needs no shared memory and no barrier.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "fp4bf16.h"

namespace fp4bf16 {

struct Epilogue {
    const float* row_scale;  // of this matrix of the batch once `at` was called; NULL: one
    const float* col_scale;
    int64_t row_step, col_step, row_batch, col_batch;
    float alpha;
    int activation;
    const void* bias;  // (n,)
    const void* residual;
    void* d;
    int bias_dtype, residual_dtype, d_dtype;
    int64_t residual_stride, residual_batch, d_stride, d_batch;
    int m, n;
    bool vector;  // 16 bytes (FP32: 8) can be stored at once: base and stride of d are aligned to it
};

__device__ inline float load_as_float(const void* p, int dtype, int64_t i) {
    if (dtype == FP4BF16_FLOAT32) return __ldg(static_cast<const float*>(p) + i);
    if (dtype == FP4BF16_BFLOAT16) return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
    return __half2float(static_cast<const __half*>(p)[i]);
}

__device__ inline uint32_t pack_pair(float low, float high, int dtype) {
    uint32_t packed;
    if (dtype == FP4BF16_BFLOAT16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// x / (1 + exp(-x)) (Elfwing et al., arXiv:1702.03118)
__device__ inline float silu(float x) { return __fdividef(x, 1.0f + expf(-x)); }
// x Phi(x), by erfc so that the negative tail keeps its digits (Hendrycks, arXiv:1606.08415)
__device__ inline float gelu(float x) { return 0.5f * x * erfcf(-0.70710678f * x); }

// Each lane t of a quad holds column t of a 4 x 4 matrix of words; after this it holds row t.
__device__ inline void transpose_quad(uint32_t (&w)[4], int t) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, t & 1 ? w[i] : w[i + 1], 1);
        (t & 1 ? w[i] : w[i + 1]) = other;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, t & 2 ? w[i] : w[i + 2], 2);
        (t & 2 ? w[i] : w[i + 2]) = other;
    }
}

// acc *= row_scale * col_scale, in place; `row`, `col`: of the fragment's first element of this thread.
template <int kAccumulators>
__device__ inline void scale_fragment(const Epilogue& e, float (&acc)[kAccumulators], int row, int col, int za,
                                      int zb) {
    if (e.row_scale == nullptr && e.col_scale == nullptr) return;
    float by_row[2] = {1.0f, 1.0f};
    if (e.row_scale != nullptr)
        for (int h = 0; h < 2; ++h)
            if (row + 8 * h < e.m) by_row[h] = e.row_scale[za * e.row_batch + (row + 8 * h) * e.row_step];
#pragma unroll
    for (int j = 0; j < kAccumulators / 4; ++j) {
        float by_col[2] = {1.0f, 1.0f};
        if (e.col_scale != nullptr)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (col + 8 * j + i < e.n)
                    by_col[i] = __ldg(e.col_scale + zb * e.col_batch + (col + 8 * j + i) * e.col_step);
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[4 * j + i] *= by_row[i / 2] * by_col[i % 2];
    }
}

// Column of accumulator i relative to the first one of this thread, and whether it is of the lower row.
__device__ constexpr int column_of(int i) { return i / 4 * 8 + i % 2; }
__device__ constexpr int lower(int i) { return i % 4 / 2; }

template <int kAccumulators>
__device__ inline void add_bias(const Epilogue& e, float (&acc)[kAccumulators], int col) {
#pragma unroll
    for (int j = 0; j < kAccumulators; j += 4)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int c = col + column_of(j + i);
            const float b = c < e.n ? load_as_float(e.bias, e.bias_dtype, c) : 0.0f;
            acc[j + i] += b;
            acc[j + i + 2] += b;
        }
}

template <int kAccumulators>
__device__ inline void add_residual(const Epilogue& e, float (&acc)[kAccumulators], int row, int col, int z) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) {
        const int r = row + 8 * lower(i), c = col + column_of(i);
        if (r < e.m && c < e.n)
            acc[i] += load_as_float(e.residual, e.residual_dtype,
                                    z * e.residual_batch + r * e.residual_stride + c);
    }
}

// Any shape, any alignment: an element at a time.
template <int kAccumulators>
__device__ inline void store_edge(const Epilogue& e, const float (&acc)[kAccumulators], int row, int col, int z) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) {
        const int r = row + 8 * lower(i), c = col + column_of(i);
        if (r >= e.m || c >= e.n) continue;
        const int64_t at = z * e.d_batch + r * e.d_stride + c;
        if (e.d_dtype == FP4BF16_FLOAT32) static_cast<float*>(e.d)[at] = acc[i];
        else static_cast<uint16_t*>(e.d)[at] = static_cast<uint16_t>(pack_pair(acc[i], 0.0f, e.d_dtype));
    }
}

template <int kAccumulators>
__device__ inline void store_float(const Epilogue& e, const float (&acc)[kAccumulators], int row, int col, int z) {
    float* out = static_cast<float*>(e.d) + z * e.d_batch + row * e.d_stride + col;
#pragma unroll
    for (int i = 0; i < kAccumulators; i += 2)  // a quad writes 32 bytes: one sector
        *reinterpret_cast<float2*>(out + 8 * lower(i) * e.d_stride + column_of(i)) =
            make_float2(acc[i], acc[i + 1]);
}

// Four n8 groups at a time: transposed within the quad, a lane stores eight columns, the quad 64 bytes.
template <int kDtype, int kAccumulators>
__device__ inline void store_half(const Epilogue& e, const float (&acc)[kAccumulators], int row, int col, int z) {
    const int t = threadIdx.x % 4;
    uint16_t* out = static_cast<uint16_t*>(e.d) + z * e.d_batch + row * e.d_stride + (col - 2 * t) + 8 * t;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int j = 0; j < kAccumulators; j += 16) {
            uint32_t w[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                w[i] = pack_pair(acc[j + 4 * i + 2 * h], acc[j + 4 * i + 2 * h + 1], kDtype);
            transpose_quad(w, t);
            *reinterpret_cast<uint4*>(out + 8 * h * e.d_stride + 2 * j) = make_uint4(w[0], w[1], w[2], w[3]);
        }
}

// A fragment (64 rows of a warpgroup, 2 * kAccumulators columns) through the epilogue, 32 columns at a time in
// registers of their own: those that wgmma adds to must not be written by anything else. Each step stands behind a
// uniform branch, so that a plain product runs through little code.
template <int kAccumulators>
__device__ inline void store_fragment(const Epilogue& e, const float (&sums)[kAccumulators], int row, int col,
                                      int z) {
    const int first_row = row - threadIdx.x % 32 / 4;
#pragma unroll
    for (int j = 0; j < kAccumulators; j += 16) {
        const int c = col + 2 * j, first_col = c - threadIdx.x % 4 * 2;
        float v[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) v[i] = sums[j + i] * e.alpha;
        if (e.bias != nullptr) add_bias(e, v, c);
        if (e.activation == FP4BF16_SILU)
#pragma unroll
            for (int i = 0; i < 16; ++i) v[i] = silu(v[i]);
        if (e.activation == FP4BF16_GELU)
#pragma unroll
            for (int i = 0; i < 16; ++i) v[i] = gelu(v[i]);
        if (e.residual != nullptr) add_residual(e, v, row, c, z);
        if (!e.vector || first_row + 16 > e.m || first_col + 32 > e.n) store_edge(e, v, row, c, z);
        else if (e.d_dtype == FP4BF16_FLOAT32) store_float(e, v, row, c, z);
        else if (e.d_dtype == FP4BF16_BFLOAT16) store_half<FP4BF16_BFLOAT16>(e, v, row, c, z);
        else store_half<FP4BF16_FLOAT16>(e, v, row, c, z);
    }
}

}  // namespace fp4bf16
