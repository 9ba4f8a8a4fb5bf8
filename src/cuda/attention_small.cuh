// Gradients of attention of at most 16 queries and 16 keys a head, by mma: one thread block a head, 64
// channels a warp, all operands in registers from first to last. The formulas are those of
// attention_simple.cuh.
//
// Arrays are held as blocks of 8 rows x 8 columns of BF16, one word a thread: thread l has columns 2 (l % 4)
// and the next of row l / 4. Such blocks are the fragments of mma.m16n8k16 (PTX ISA): of its left operand
// (rows 0-7, k 0-7), (rows 8-15, k 0-7), (rows 0-7, k 8-15), (rows 8-15, k 8-15), of its right one, whose
// rows are n, (k 0-7), (k 8-15); pairs of the result's columns are (rows 0-7), (rows 8-15).
#pragma once

#include "attention.cuh"
#include "mma.cuh"

namespace fp4bf16 {

constexpr int kSmall = 16, kSmallChannels = 64, kMostWarps = 8;

using Blocks = uint32_t[2][kSmallChannels / 8];  // 16 tokens, 64 channels
using Square = float[2][4];                      // 16 queries, two times 8 keys

__device__ inline uint32_t transposed(uint32_t block) {
    uint32_t turned;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(block));
    return turned;
}

__device__ inline uint32_t packed_pair(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
}

// One head of one image, and this thread's part of it.
struct SmallHead {
    int64_t z, image, head;
    int dim, row, column, channel;  // first row; first column of a square, first channel

    __device__ SmallHead(int64_t z, const fp4bf16_attention_args& p)
        : z(z),
          image(z / p.heads),
          head(z % p.heads),
          dim(static_cast<int>(p.dim)),
          row(threadIdx.x % 32 / 4),
          column(threadIdx.x % 4 * 2),
          channel(threadIdx.x / 32 * kSmallChannels + column) {}

    __device__ void load(Blocks& x, const void* data, const int64_t (&strides)[3], int64_t tokens) const {
        const Tokens from = tokens_of(data, strides, image, head, tokens);
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int c = 0; c < kSmallChannels / 8; ++c) {
                const __nv_bfloat16* pair = from.data + (row + 8 * r) * from.stride + channel + 8 * c;
                const bool inside = row + 8 * r < tokens && channel + 8 * c < dim;
                x[r][c] = inside ? __ldg(reinterpret_cast<const uint32_t*>(pair)) : 0;
            }
    }

    // (16, 64) = the left operand `a` times the rows of `x`, times the factors of the rows, to `data`.
    __device__ void store_product(const uint32_t (&a)[4], const Blocks& x, float factor0, float factor1,
                                  void* data, const int64_t (&strides)[3], int64_t tokens) const {
        const int64_t at = offset_of(strides, image, head) + row * strides[1] + channel;
        auto* target = static_cast<__nv_bfloat16*>(data) + at;
#pragma unroll
        for (int c = 0; c < kSmallChannels / 8; ++c) {
            float d[4] = {};
            mma(d, a[0], a[1], a[2], a[3], transposed(x[0][c]), transposed(x[1][c]));
            if (channel + 8 * c >= dim) continue;
            auto* pair = reinterpret_cast<uint32_t*>(target + 8 * c);
            auto* below = reinterpret_cast<uint32_t*>(target + 8 * c + 8 * strides[1]);
            if (row < tokens) *pair = packed_pair(d[0] * factor0, d[1] * factor0);
            if (row + 8 < tokens) *below = packed_pair(d[2] * factor1, d[3] * factor1);
        }
    }

    __device__ bool sees(const fp4bf16_attention_args& p, int half, int key) const {
        return key < p.k_tokens && (p.causal == 0 || key <= row + 8 * half);
    }
};

// The dot products of the rows of a and b over all channels, which the warps share.
__device__ inline void small_products(const Blocks& a, const Blocks& b, Square& sum) {
    __shared__ float2 part[kMostWarps][4][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        for (int i = 0; i < 4; ++i) sum[n][i] = 0.0f;
#pragma unroll
        for (int c = 0; c < kSmallChannels / 8; c += 2)
            mma(sum[n], a[0][c], a[1][c], a[0][c + 1], a[1][c + 1], b[n][c], b[n][c + 1]);
    }
    __syncthreads();  // the sums of another product may still be read
#pragma unroll
    for (int i = 0; i < 4; ++i)
        part[warp][i][lane] = make_float2(sum[i / 2][i % 2 * 2], sum[i / 2][i % 2 * 2 + 1]);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float2 total = make_float2(0.0f, 0.0f);
        for (int w = 0; w < blockDim.x / 32; ++w)
            total.x += part[w][i][lane].x, total.y += part[w][i][lane].y;
        sum[i / 2][i % 2 * 2] = total.x, sum[i / 2][i % 2 * 2 + 1] = total.y;
    }
}

__device__ inline float quad_sum(float v) {
    v += __shfl_xor_sync(0xFFFFFFFFu, v, 1);
    return v + __shfl_xor_sync(0xFFFFFFFFu, v, 2);
}

// P and dS of a head, rounded, as left operands.
__device__ inline void small_weights(const fp4bf16_attention_args& p, const SmallHead& at, const Square& s,
                                     const Square& dp, uint32_t (&weights)[4], uint32_t (&ds)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int64_t row = at.row + 8 * half;
        const float lse = row < p.q_tokens ? __ldg(p.lse + at.z * p.q_tokens + row) : INFINITY;
        float w[4], sum = 0.0f, mean = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bool seen = at.sees(p, half, 8 * (i / 2) + at.column + i % 2);
            w[i] = seen ? expf(s[i / 2][2 * half + i % 2] * p.scale - lse) : 0.0f;
            sum += w[i];
            mean = __fmaf_rn(w[i], dp[i / 2][2 * half + i % 2], mean);
        }
        sum = quad_sum(sum), mean = quad_sum(mean);
        const float delta = sum == 0.0f ? 0.0f : mean / sum;  // of a row that is not there
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            weights[2 * n + half] = packed_pair(w[2 * n], w[2 * n + 1]);
            ds[2 * n + half] = packed_pair(w[2 * n] * (dp[n][2 * half] - delta),
                                           w[2 * n + 1] * (dp[n][2 * half + 1] - delta));
        }
    }
}

__device__ inline void transpose(const uint32_t (&a)[4], uint32_t (&turned)[4]) {
    turned[0] = transposed(a[0]), turned[1] = transposed(a[2]);
    turned[2] = transposed(a[1]), turned[3] = transposed(a[3]);
}

__global__ void __launch_bounds__(32 * kMostWarps)
    attention_small_gradient_kernel(const fp4bf16_attention_args p) {
    wait_for_previous();
    for (int64_t z = blockIdx.x; z < p.n * p.heads; z += gridDim.x) {
        const SmallHead at(z, p);
        Blocks q, k, v, g;
        at.load(q, p.q, p.q_strides, p.q_tokens);
        at.load(k, p.k, p.k_strides, p.k_tokens);
        at.load(v, p.v, p.v_strides, p.k_tokens);
        at.load(g, p.g, p.g_strides, p.q_tokens);
        Square s, dp;
        small_products(q, k, s);
        small_products(g, v, dp);
        uint32_t weights[4], ds[4], turned[4];
        small_weights(p, at, s, dp, weights, ds);
        at.store_product(ds, k, p.scale, p.scale, p.dq, p.dq_strides, p.q_tokens);
        transpose(ds, turned);
        at.store_product(turned, q, p.scale, p.scale, p.dk, p.dk_strides, p.k_tokens);
        transpose(weights, turned);
        at.store_product(turned, g, 1.0f, 1.0f, p.dv, p.dv_strides, p.k_tokens);
    }
}

// ---- host

// Whether an array can be read and written in pairs.
inline bool even(const void* pointer, const int64_t (&strides)[3]) {
    return reinterpret_cast<uintptr_t>(pointer) % 4 == 0 && strides[0] % 2 == 0 && strides[1] % 2 == 0 &&
           strides[2] % 2 == 0;
}

inline bool small_gradient_takes(const fp4bf16_attention_args& a) {
    return a.q_tokens >= 1 && a.q_tokens <= kSmall && a.k_tokens >= 1 && a.k_tokens <= kSmall &&
           a.dim % 2 == 0 && a.dim <= kSmallChannels * kMostWarps && even(a.q, a.q_strides) &&
           even(a.k, a.k_strides) && even(a.v, a.v_strides) && even(a.g, a.g_strides) &&
           even(a.dq, a.dq_strides) && even(a.dk, a.dk_strides) && even(a.dv, a.dv_strides);
}

}  // namespace fp4bf16
