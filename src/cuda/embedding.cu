// What conditions a network: sinusoids of the timestep, rows of a table, and the table's gradient.
#include <cmath>

#include "common.h"
#include "each.cuh"
#include "launch.cuh"

namespace fp4bf16 {
namespace {

using bf16 = __nv_bfloat16;

// ---- timesteps: an item is a frequency of a row, then where dim is odd the last column's zero
struct Sinusoids {
    static constexpr int kItems = 1;
    const int64_t* t;
    int64_t t_step, half, items, sine, cosine;  // items a row; first columns of either
    float exponent, divisor;                    // frequency i: exp(exponent * i / divisor)
    bf16* out;
    int64_t stride;
    struct Loaded {
        float t;
        int64_t i;
        bf16* to;
    };

    __device__ Loaded load(int64_t item) const {
        const int64_t row = quotient(item, items);
        return {static_cast<float>(t[row * t_step]), item - row * items, out + row * stride};
    }
    __device__ void store(const Loaded& l) const {
        if (l.i == half) {
            l.to[2 * half] = from_float<bf16>(0.0f);
            return;
        }
        const float angle = l.t * expf(exponent * static_cast<float>(l.i) / divisor);
        l.to[sine + l.i] = from_float<bf16>(sinf(angle));
        l.to[cosine + l.i] = from_float<bf16>(cosf(angle));
    }
};

// ---- rows
template <int kCount>
struct TakeRows {
    static constexpr int kItems = 2;
    const float* weight;
    const int64_t* index;
    int64_t count, dim, groups;  // groups a row
    bf16* out;
    int64_t stride;
    struct Loaded {
        Raw<float, kCount> v;
        bf16* to;
    };

    __device__ Loaded load(int64_t item) const {
        const int64_t row = quotient(item, groups), column = (item - row * groups) * kCount;
        const int64_t from = index[row];
        Loaded l{{}, out + row * stride + column};
        if (0 <= from && from < count) l.v = load_raw<kCount>(weight + from * dim + column);
        return l;
    }
    __device__ void store(const Loaded& l) const {
        const auto from = unpack<float, kCount>(l.v);
        Vector<bf16, kCount> v;
#pragma unroll
        for (int j = 0; j < kCount; ++j) v.v[j] = from_float<bf16>(from.v[j]);
        store_vector<kCount>(l.to, v);
    }
};

// A block owns rows blockIdx.x, + gridDim.x, ... of the table and kThreads of their columns. It looks through
// the whole index, a thread an entry, lists the rows that name its own in ascending order, and adds them.
__global__ void __launch_bounds__(kThreads)
    take_rows_backward(const bf16* g, int64_t g_stride, const int64_t* index, int64_t rows, int64_t dim,
                       float* dweight, int64_t count) {
    wait_for_previous();
    constexpr int kWarps = kThreads / 32, kAhead = 8;  // rows loaded before the first is added
    __shared__ uint32_t found[kWarps];
    __shared__ int list[kThreads];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t column = blockIdx.y * int64_t{kThreads} + threadIdx.x;
    for (int64_t own = blockIdx.x; own < count; own += gridDim.x) {
        float* to = dweight + own * dim + column;
        float sum = 0.0f;
        bool any = false;
        for (int64_t first = 0; first < rows; first += kThreads) {
            const bool match = first + threadIdx.x < rows && index[first + threadIdx.x] == own;
            const uint32_t mask = __ballot_sync(~0u, match);
            if (lane == 0) found[warp] = mask;
            __syncthreads();
            int total = 0, before = 0;
            for (int w = 0; w < kWarps; ++w) {
                if (w == warp) before = total;
                total += __popc(found[w]);
            }
            if (match) list[before + __popc(mask & ((1u << lane) - 1))] = threadIdx.x;
            __syncthreads();
            if (total > 0 && column < dim) {
                if (!any) sum = *to, any = true;
                const bf16* from = g + first * g_stride + column;
                for (int i = 0; i < total; i += kAhead) {
                    float v[kAhead];
#pragma unroll
                    for (int u = 0; u < kAhead; ++u)
                        if (i + u < total) v[u] = to_float(from[list[i + u] * g_stride]);
#pragma unroll
                    for (int u = 0; u < kAhead; ++u)
                        if (i + u < total) sum += v[u];
                }
            }
        }
        if (any) *to = sum;
    }
}

}  // namespace
}  // namespace fp4bf16

using namespace fp4bf16;

extern "C" fp4bf16_status fp4bf16_timestep_embedding(const int64_t* t, int64_t t_step, int64_t rows,
                                                     int64_t dim, int32_t flip, float freq_shift,
                                                     float max_period, void* out, int64_t out_stride,
                                                     void* stream) {
    FP4BF16_TRY(check_matrix("timestep_embedding", "out", out, rows, dim, out_stride, 2));
    if (t_step != 0 && t_step != 1)
        return fail(FP4BF16_INVALID_ARGUMENT, "timestep_embedding: t_step is %lld, but must be 0 or 1",
                    static_cast<long long>(t_step));
    const int64_t half = dim / 2;
    // as fp4bf16.nn.layers rounds them
    const auto exponent = static_cast<float>(-std::log(static_cast<double>(max_period)));
    const auto divisor = static_cast<float>(static_cast<double>(half) - static_cast<double>(freq_shift));
    if (half > 0 && !(divisor != 0.0f && std::isfinite(divisor) && max_period > 0.0f))
        return fail(FP4BF16_INVALID_ARGUMENT,
                    "timestep_embedding: freq_shift is %g and max_period is %g, but dim / 2 = %lld less the "
                    "former must not be 0, and the latter be positive",
                    static_cast<double>(freq_shift), static_cast<double>(max_period),
                    static_cast<long long>(half));
    if (rows == 0 || dim == 0) return FP4BF16_OK;
    FP4BF16_TRY(check_pointer("timestep_embedding", "t", t, 8));
    const int64_t items = half + dim % 2, sine = flip ? half : 0;
    launch_each(Sinusoids{t, t_step, half, items, sine, half - sine, exponent, divisor,
                          static_cast<bf16*>(out), out_stride},
                rows * items, stream);
    return cuda_result(cudaGetLastError(), "timestep_embedding");
}

extern "C" fp4bf16_status fp4bf16_take_rows(const float* weight, int64_t count, int64_t dim,
                                            const int64_t* index, int64_t rows, void* out, int64_t out_stride,
                                            void* stream) {
    FP4BF16_TRY(check_matrix("take_rows", "weight", weight, count, dim, dim, 4));
    FP4BF16_TRY(check_matrix("take_rows", "out", out, rows, dim, out_stride, 2));
    if (rows == 0 || dim == 0) return FP4BF16_OK;
    FP4BF16_TRY(check_pointer("take_rows", "index", index, 8));
    const auto to = static_cast<bf16*>(out);
    if (dim % 4 == 0 && aligned(weight, 16) && aligned(out, 8) && (rows == 1 || out_stride % 4 == 0))
        launch_each(TakeRows<4>{weight, index, count, dim, dim / 4, to, out_stride}, rows * (dim / 4),
                    stream);
    else
        launch_each(TakeRows<1>{weight, index, count, dim, dim, to, out_stride}, rows * dim, stream);
    return cuda_result(cudaGetLastError(), "take_rows");
}

extern "C" fp4bf16_status fp4bf16_take_rows_backward(const void* g, int64_t g_stride, const int64_t* index,
                                                     int64_t rows, int64_t dim, float* dweight, int64_t count,
                                                     void* stream) {
    FP4BF16_TRY(check_matrix("take_rows_backward", "g", g, rows, dim, g_stride, 2));
    FP4BF16_TRY(check_matrix("take_rows_backward", "dweight", dweight, count, dim, dim, 4));
    if (rows == 0 || dim == 0 || count == 0) return FP4BF16_OK;
    FP4BF16_TRY(check_pointer("take_rows_backward", "index", index, 8));
    const int64_t pieces = ceil_div(dim, kThreads);
    if (pieces > 65535)
        return fail(FP4BF16_INVALID_ARGUMENT,
                    "take_rows_backward: dim is %lld, but at most %d columns are taken",
                    static_cast<long long>(dim), 65535 * kThreads);
    const dim3 grid(static_cast<unsigned>(count < 0x7FFFFFFF ? count : 0x7FFFFFFF),
                    static_cast<unsigned>(pieces));
    launch_kernel(take_rows_backward, grid, kThreads, 0, static_cast<cudaStream_t>(stream),
                  static_cast<const bf16*>(g), g_stride, index, rows, dim, dweight, count);
    return cuda_result(cudaGetLastError(), "take_rows_backward");
}
