// Attention by kernels that can be read in one sitting and run on every GPU: any number of tokens, up to 512
// channels a head. What the fast ones are checked with, and what takes the shapes that they do not.
//
//     forward     S = scale Q K^T, P = exp(S - max S) rounded to BF16, O = P V / sum P
//     backward    P = exp(S - lse), dP = G V^T, delta = sum P dP / sum P, dS = P (dP - delta);
//                 dV = P^T G, dQ = scale dS K, dK = scale dS^T Q, P and dS rounded to BF16 before they are
//                 multiplied (Dao et al., FlashAttention, arXiv:2205.14135, appendix B.2)
//
// A thread block owns kRows rows of its result and walks over the rows of the other side, kOthers at a time:
// queries over keys for O and dQ, keys over queries for dK and dV. Warp w has the rows 4 w .. 4 w + 3; of a
// tile of weights lane l has the columns l and l + 32, of a result the columns l, l + 32, ...
#pragma once

#include "attention.cuh"

namespace fp4bf16 {

constexpr int kRows = 32, kOthers = 64, kDimStep = 32;
constexpr int kWarpRows = kRows / (kThreads / 32), kWide = kOthers / 32;

using Weights = float[kWarpRows][kWide];

__device__ inline int warp_row() { return threadIdx.x / 32 * kWarpRows; }
__device__ inline int lane() { return threadIdx.x % 32; }

__device__ inline float element(const Tokens& x, int64_t row, int column, int dim) {
    return row < x.count && column < dim ? __bfloat162float(x.data[row * x.stride + column]) : 0.0f;
}

// sum += the dot products of rows row0.. of `own` with rows other0.. of `other`.
__device__ inline void add_products(const Tokens& own, int64_t row0, const Tokens& other, int64_t other0,
                                    int dim, Weights& sum) {
    __shared__ float a[kRows][kDimStep], b[kDimStep][kOthers + 1];
    for (int d0 = 0; d0 < dim; d0 += kDimStep) {
        __syncthreads();
        for (int i = threadIdx.x; i < kRows * kDimStep; i += kThreads)
            a[i / kDimStep][i % kDimStep] = element(own, row0 + i / kDimStep, d0 + i % kDimStep, dim);
        for (int i = threadIdx.x; i < kOthers * kDimStep; i += kThreads)
            b[i % kDimStep][i / kDimStep] = element(other, other0 + i / kDimStep, d0 + i % kDimStep, dim);
        __syncthreads();
#pragma unroll 8
        for (int d = 0; d < kDimStep; ++d)
#pragma unroll
            for (int i = 0; i < kWarpRows; ++i)
#pragma unroll
                for (int j = 0; j < kWide; ++j)
                    sum[i][j] = __fmaf_rn(a[warp_row() + i][d], b[d][lane() + 32 * j], sum[i][j]);
    }
}

// total += the weights, rounded to BF16, times rows other0.. of `factor`.
template <int kColumns>
__device__ inline void add_weighted(const Weights& weights, const Tokens& factor, int64_t other0, int dim,
                                    float (&total)[kWarpRows][kColumns]) {
    __shared__ float rounded[kRows][kOthers];  // each warp its own rows
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i)
#pragma unroll
        for (int j = 0; j < kWide; ++j)
            rounded[warp_row() + i][lane() + 32 * j] = __bfloat162float(__float2bfloat16_rn(weights[i][j]));
    __syncwarp();
    const int others = static_cast<int>(min(int64_t{kOthers}, factor.count - other0));
    for (int o = 0; o < others; ++o)
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            const float v = element(factor, other0 + o, lane() + 32 * c, dim);
#pragma unroll
            for (int i = 0; i < kWarpRows; ++i)
                total[i][c] = __fmaf_rn(rounded[warp_row() + i][o], v, total[i][c]);
        }
}

template <int kColumns>
__device__ inline void store_row(void* data, int64_t at, const float (&value)[kColumns], int dim) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
        if (lane() + 32 * c < dim)
            static_cast<__nv_bfloat16*>(data)[at + lane() + 32 * c] = __float2bfloat16_rn(value[c]);
}

__device__ inline float warp_max(float v) {
    for (int i = 16; i > 0; i /= 2) v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, i));
    return v;
}
__device__ inline float warp_sum(float v) {
    for (int i = 16; i > 0; i /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, i);
    return v;
}

// ---- forward: the largest score of each row first, then the scores again, their weights and the product
__device__ inline void scores(const fp4bf16_attention_args& p, const Tokens& q, int64_t row0, const Tokens& k,
                              int64_t key0, Weights& s) {
    add_products(q, row0, k, key0, static_cast<int>(p.dim), s);
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i)
#pragma unroll
        for (int j = 0; j < kWide; ++j) {
            const int64_t query = row0 + warp_row() + i, key = key0 + lane() + 32 * j;
            const bool seen = key < p.k_tokens && (p.causal == 0 || key <= query);
            s[i][j] = seen ? s[i][j] * p.scale : -INFINITY;
        }
}

template <int kColumns>
__global__ void __launch_bounds__(kThreads) attention_simple_kernel(const fp4bf16_attention_args p) {
    wait_for_previous();
    const int dim = static_cast<int>(p.dim);
    const int64_t blocks = (p.q_tokens + kRows - 1) / kRows, tiles = blocks * p.n * p.heads;
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int64_t z = tile / blocks, image = z / p.heads, head = z % p.heads,
                      row0 = tile % blocks * kRows;
        const Tokens q = tokens_of(p.q, p.q_strides, image, head, p.q_tokens),
                     k = tokens_of(p.k, p.k_strides, image, head, p.k_tokens),
                     v = tokens_of(p.v, p.v_strides, image, head, p.k_tokens);
        const int64_t seen = p.causal ? min(p.k_tokens, row0 + kRows) : p.k_tokens;
        float top[kWarpRows], sum[kWarpRows] = {}, total[kWarpRows][kColumns] = {};
        for (int i = 0; i < kWarpRows; ++i) top[i] = -INFINITY;
        for (int64_t key0 = 0; key0 < seen; key0 += kOthers) {
            Weights s = {};
            scores(p, q, row0, k, key0, s);
            for (int i = 0; i < kWarpRows; ++i)
                for (int j = 0; j < kWide; ++j) top[i] = fmaxf(top[i], s[i][j]);
        }
        for (int i = 0; i < kWarpRows; ++i) top[i] = warp_max(top[i]);
        for (int64_t key0 = 0; key0 < seen; key0 += kOthers) {
            Weights s = {};
            scores(p, q, row0, k, key0, s);
            for (int i = 0; i < kWarpRows; ++i)
                for (int j = 0; j < kWide; ++j) {
                    s[i][j] = __bfloat162float(__float2bfloat16_rn(expf(s[i][j] - top[i])));
                    sum[i] += s[i][j];
                }
            add_weighted(s, v, key0, dim, total);
        }
        for (int i = 0; i < kWarpRows; ++i) {
            const int64_t row = row0 + warp_row() + i;
            if (row >= p.q_tokens) break;
            sum[i] = warp_sum(sum[i]);
            for (int c = 0; c < kColumns; ++c) total[i][c] = sum[i] == 0.0f ? 0.0f : total[i][c] / sum[i];
            store_row(p.out, offset_of(p.out_strides, image, head) + row * p.out_strides[1], total[i], dim);
            if (p.lse != nullptr && lane() == 0) p.lse[z * p.q_tokens + row] = top[i] + logf(sum[i]);
        }
    }
}

// ---- backward
// Whether a query sees a key, both inside their arrays.
__device__ inline bool sees(const fp4bf16_attention_args& p, int64_t query, int64_t key) {
    return query < p.q_tokens && key < p.k_tokens && (p.causal == 0 || key <= query);
}

// delta (n, heads, q_tokens): the mean of dP under a row's weights P. (It is the row sum of G * O, too, but O
// is rounded, and what dP - delta leaves where one weight is nearly all is smaller than that.)
__global__ void __launch_bounds__(kThreads)
    attention_delta_kernel(const fp4bf16_attention_args p, float* delta) {
    wait_for_previous();
    const int dim = static_cast<int>(p.dim);
    const int64_t blocks = (p.q_tokens + kRows - 1) / kRows, tiles = blocks * p.n * p.heads;
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int64_t z = tile / blocks, image = z / p.heads, head = z % p.heads,
                      row0 = tile % blocks * kRows;
        const Tokens q = tokens_of(p.q, p.q_strides, image, head, p.q_tokens),
                     k = tokens_of(p.k, p.k_strides, image, head, p.k_tokens),
                     v = tokens_of(p.v, p.v_strides, image, head, p.k_tokens),
                     g = tokens_of(p.g, p.g_strides, image, head, p.q_tokens);
        const int64_t seen = p.causal ? min(p.k_tokens, row0 + kRows) : p.k_tokens;
        float sum[kWarpRows] = {}, mean[kWarpRows] = {};
        for (int64_t key0 = 0; key0 < seen; key0 += kOthers) {
            Weights s = {}, flow = {};
            add_products(q, row0, k, key0, dim, s);
            add_products(g, row0, v, key0, dim, flow);
            for (int i = 0; i < kWarpRows; ++i)
                for (int j = 0; j < kWide; ++j) {
                    const int64_t row = row0 + warp_row() + i;
                    if (!sees(p, row, key0 + lane() + 32 * j)) continue;
                    const float weight = expf(s[i][j] * p.scale - p.lse[z * p.q_tokens + row]);
                    sum[i] += weight;
                    mean[i] = __fmaf_rn(weight, flow[i][j], mean[i]);
                }
        }
        for (int i = 0; i < kWarpRows; ++i) {
            const int64_t row = row0 + warp_row() + i;
            sum[i] = warp_sum(sum[i]), mean[i] = warp_sum(mean[i]);
            if (row < p.q_tokens && lane() == 0) delta[z * p.q_tokens + row] = mean[i] / sum[i];
        }
    }
}

enum class Gradient { kQ, kK, kV };

template <Gradient kOf, int kColumns>
__global__ void __launch_bounds__(kThreads)
    attention_gradient_kernel(const fp4bf16_attention_args p, const float* delta) {
    wait_for_previous();
    constexpr bool kQueries = kOf == Gradient::kQ;  // own the rows, and keys are the other side
    const int dim = static_cast<int>(p.dim);
    const int64_t count = kQueries ? p.q_tokens : p.k_tokens, others = kQueries ? p.k_tokens : p.q_tokens;
    const int64_t blocks = (count + kRows - 1) / kRows, tiles = blocks * p.n * p.heads;
    void* result = kOf == Gradient::kQ ? p.dq : kOf == Gradient::kK ? p.dk : p.dv;
    const auto& strides = kOf == Gradient::kQ   ? p.dq_strides
                          : kOf == Gradient::kK ? p.dk_strides
                                                : p.dv_strides;
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int64_t z = tile / blocks, image = z / p.heads, head = z % p.heads,
                      row0 = tile % blocks * kRows;
        const Tokens q = tokens_of(p.q, p.q_strides, image, head, p.q_tokens),
                     k = tokens_of(p.k, p.k_strides, image, head, p.k_tokens),
                     v = tokens_of(p.v, p.v_strides, image, head, p.k_tokens),
                     g = tokens_of(p.g, p.g_strides, image, head, p.q_tokens);
        const int64_t first = p.causal && !kQueries ? row0 / kOthers * kOthers : 0;
        const int64_t last = p.causal && kQueries ? min(others, row0 + kRows) : others;
        float total[kWarpRows][kColumns] = {};
        for (int64_t other0 = first; other0 < last; other0 += kOthers) {
            Weights s = {}, flow = {};
            add_products(kQueries ? q : k, row0, kQueries ? k : q, other0, dim, s);
            if (kOf != Gradient::kV)
                add_products(kQueries ? g : v, row0, kQueries ? v : g, other0, dim, flow);
#pragma unroll
            for (int i = 0; i < kWarpRows; ++i)
#pragma unroll
                for (int j = 0; j < kWide; ++j) {
                    const int64_t row = row0 + warp_row() + i, other = other0 + lane() + 32 * j;
                    const int64_t query = kQueries ? row : other, key = kQueries ? other : row;
                    const bool seen = sees(p, query, key);
                    const int64_t at = z * p.q_tokens + query;
                    float weight = seen ? expf(s[i][j] * p.scale - p.lse[at]) : 0.0f;
                    if (kOf != Gradient::kV && seen) weight *= flow[i][j] - delta[at];
                    s[i][j] = weight;
                }
            add_weighted(s, kOf == Gradient::kQ ? k : kOf == Gradient::kK ? q : g, other0, dim, total);
        }
        for (int i = 0; i < kWarpRows; ++i) {
            const int64_t row = row0 + warp_row() + i;
            if (row >= count) break;
            for (int c = 0; c < kColumns; ++c) total[i][c] *= kOf == Gradient::kV ? 1.0f : p.scale;
            store_row(result, offset_of(strides, image, head) + row * strides[1], total[i], dim);
        }
    }
}

}  // namespace fp4bf16
