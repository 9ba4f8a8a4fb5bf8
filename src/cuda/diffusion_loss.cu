// Losses of diffusion: the squared error of each picture, its gradient, and Diffusion-DPO of such errors.
// Sums are double, each in an order that depends on the shape alone.
#include "common.h"
#include "each.cuh"
#include "launch.cuh"

namespace fp4bf16 {
namespace {

// The sums over a block's threads, in thread 0: within the warps pairwise, then the warps in order.
template <int kValues>
__device__ void block_sums(double (&v)[kValues]) {
    constexpr int kWarps = kThreads / 32;
    __shared__ double shared[kWarps][kValues];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
        for (int distance = 16; distance > 0; distance /= 2) v[i] += __shfl_down_sync(~0u, v[i], distance);
        if (lane == 0) shared[warp][i] = v[i];
    }
    __syncthreads();
    if (threadIdx.x == 0)
        for (int i = 0; i < kValues; ++i)
            for (int w = 1; w < kWarps; ++w) v[i] += shared[w][i];
    __syncthreads();  // the next call writes what was read here
}

// A picture a block, four neighbouring elements a thread; whether they are loaded at once changes no sum.
constexpr int kGroup = 4;

template <bool kAligned>
__device__ inline Vector<float, kGroup> load_group(const float* from, int64_t left) {
    if constexpr (kAligned) {
        return unpack<float, kGroup>(load_raw<kGroup>(from));
    } else {
        Vector<float, kGroup> v;
#pragma unroll
        for (int j = 0; j < kGroup; ++j) v.v[j] = j < left ? from[j] : 0.0f;
        return v;
    }
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads, 4)
    squared_error(const float* output, const float* target, int64_t n, int64_t count, double* errors) {
    wait_for_previous();
    constexpr int kAhead = 4;
    constexpr int64_t kStep = int64_t{kThreads} * kGroup;
    for (int64_t i = blockIdx.x; i < n; i += gridDim.x) {
        const float* a = output + i * count;
        const float* b = target + i * count;
        double sum[1] = {0.0};
        for (int64_t first = threadIdx.x * kGroup; first < count; first += kStep * kAhead) {
            Vector<float, kGroup> x[kAhead], y[kAhead];
#pragma unroll
            for (int u = 0; u < kAhead; ++u) {
                const int64_t at = first + u * kStep;
                if (at >= count)
                    x[u] = {}, y[u] = {};
                else
                    x[u] = load_group<kAligned>(a + at, count - at),
                    y[u] = load_group<kAligned>(b + at, count - at);
            }
#pragma unroll
            for (int u = 0; u < kAhead; ++u)
#pragma unroll
                for (int j = 0; j < kGroup; ++j) {
                    const double d = x[u].v[j] - y[u].v[j];  // rounded to FP32, as the CPU's is
                    sum[0] += d * d;
                }
        }
        block_sums(sum);
        if (threadIdx.x == 0) errors[i] = sum[0] / static_cast<double>(count);
    }
}

template <int kCount>
struct SquaredErrorBackward {
    static constexpr int kItems = 4;
    const float* output;
    const float* target;
    const double* weight;  // NULL: none
    float factor;
    int64_t groups;  // a row
    float* gradient;
    struct Loaded {
        Raw<float, kCount> output, target;
        double weight;
        int64_t at;
    };

    __device__ Loaded load(int64_t item) const {
        const int64_t at = item * kCount;
        return {load_raw<kCount>(output + at), load_raw<kCount>(target + at),
                weight == nullptr ? 1.0 : weight[quotient(item, groups)], at};
    }
    __device__ void store(const Loaded& l) const {
        const auto x = unpack<float, kCount>(l.output), y = unpack<float, kCount>(l.target);
        const auto w = static_cast<float>(l.weight);
        Vector<float, kCount> v;
#pragma unroll
        for (int j = 0; j < kCount; ++j) v.v[j] = (x.v[j] - y.v[j]) * factor * w;
        store_vector<kCount>(gradient + l.at, v);
    }
};

// ln(1 + exp(x)) without overflow
__device__ inline double softplus(double x) { return fmax(x, 0.0) + log1p(exp(-fabs(x))); }

// Wallace et al. 2023, "Diffusion Model Alignment Using Direct Preference Optimization", eq. 14: one block.
__global__ void __launch_bounds__(kThreads) dpo(const double* errors, const double* reference, int64_t pairs,
                                                double beta, double* weight, double* stats) {
    wait_for_previous();
    const auto count = static_cast<double>(pairs);
    const double half = beta / 2;
    double sums[9] = {};
    for (int64_t i = threadIdx.x; i < pairs; i += kThreads) {
        const double chosen = errors[i], rejected = errors[pairs + i];
        const double reference_chosen = reference[i], reference_rejected = reference[pairs + i];
        const double reward_chosen = half * (reference_chosen - chosen);
        const double reward_rejected = half * (reference_rejected - rejected);
        const double margin = reward_chosen - reward_rejected;
        const double slope = exp(-softplus(margin)) / count;  // sigmoid(-margin) / pairs
        weight[i] = slope * half;
        weight[pairs + i] = -slope * half;
        const double sign = margin > 0.0 ? 1.0 : margin < 0.0 ? -1.0 : margin;  // NaN stays
        const double terms[9] = {softplus(-margin), reward_chosen, reward_rejected, margin,
                                 0.5 + 0.5 * sign,  chosen,        rejected,        reference_chosen,
                                 reference_rejected};
#pragma unroll
        for (int j = 0; j < 9; ++j) sums[j] += terms[j];
    }
    block_sums(sums);
    if (threadIdx.x == 0)
        for (int j = 0; j < 9; ++j) stats[j] = sums[j] / count;
}

}  // namespace
}  // namespace fp4bf16

using namespace fp4bf16;

extern "C" fp4bf16_status fp4bf16_squared_error(const float* output, const float* target, int64_t n,
                                                int64_t count, double* errors, void* stream) {
    FP4BF16_TRY(check_matrix("squared_error", "output", output, n, count, count, 4));
    FP4BF16_TRY(check_matrix("squared_error", "target", target, n, count, count, 4));
    if (n == 0) return FP4BF16_OK;
    FP4BF16_TRY(check_pointer("squared_error", "errors", errors, 8));
    const unsigned grid = static_cast<unsigned>(n < 0x7FFFFFFF ? n : 0x7FFFFFFF);
    const auto s = static_cast<cudaStream_t>(stream);
    if (in_vectors(output, n, count, count, 4) && in_vectors(target, n, count, count, 4))
        launch_kernel(squared_error<true>, grid, kThreads, 0, s, output, target, n, count, errors);
    else
        launch_kernel(squared_error<false>, grid, kThreads, 0, s, output, target, n, count, errors);
    return cuda_result(cudaGetLastError(), "squared_error");
}

extern "C" fp4bf16_status fp4bf16_squared_error_backward(const float* output, const float* target,
                                                         const double* weight, int64_t n, int64_t count,
                                                         float* gradient, void* stream) {
    FP4BF16_TRY(check_matrix("squared_error_backward", "output", output, n, count, count, 4));
    FP4BF16_TRY(check_matrix("squared_error_backward", "target", target, n, count, count, 4));
    FP4BF16_TRY(check_matrix("squared_error_backward", "gradient", gradient, n, count, count, 4));
    if (n == 0 || count == 0) return FP4BF16_OK;
    if (weight != nullptr) FP4BF16_TRY(check_pointer("squared_error_backward", "weight", weight, 8));
    const auto factor = static_cast<float>(2.0 / static_cast<double>(weight == nullptr ? n * count : count));
    if (count % kGroup == 0 && aligned(output, 16) && aligned(target, 16) && aligned(gradient, 16))
        launch_each(SquaredErrorBackward<kGroup>{output, target, weight, factor, count / kGroup, gradient},
                    n * (count / kGroup), stream);
    else
        launch_each(SquaredErrorBackward<1>{output, target, weight, factor, count, gradient}, n * count,
                    stream);
    return cuda_result(cudaGetLastError(), "squared_error_backward");
}

extern "C" fp4bf16_status fp4bf16_dpo(const double* errors, const double* reference, int64_t pairs,
                                      double beta, double* weight, double* stats, void* stream) {
    FP4BF16_TRY(check_matrix("dpo", "errors", errors, 2, pairs, pairs, 8));
    FP4BF16_TRY(check_matrix("dpo", "reference", reference, 2, pairs, pairs, 8));
    FP4BF16_TRY(check_matrix("dpo", "weight", weight, 2, pairs, pairs, 8));
    FP4BF16_TRY(check_pointer("dpo", "stats", stats, 8));
    launch_kernel(dpo, 1, kThreads, 0, static_cast<cudaStream_t>(stream), errors, reference, pairs, beta,
                  weight, stats);
    return cuda_result(cudaGetLastError(), "dpo");
}
