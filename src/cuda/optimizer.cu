// AdamW, the average of the weights, their BF16 copy and FP4 twins in one pass over the flat arrays; the norm
// of the gradient and what follows from it. All are bound by memory: 39 bytes an element of the step.
//
// The table of tensors gives each a number of units; a thread block takes one. A row with a twin waits for
// its largest magnitude in shared memory, longer ones are read again from where they were just written.
#include <climits>

#include "elementwise.cuh"
#include "launch.cuh"
#include "optimizer.cuh"

namespace fp4bf16 {
namespace {

constexpr int kLanes = 128, kWarps = kLanes / 32;
constexpr int kSpan = 2048;     // elements of a tensor without a twin in a unit
constexpr int kNarrow = 512;    // columns of rows that a warp takes, kWarps of them in a unit; else one
constexpr int kHeld = 9 * 512;  // columns of a row that stays in shared memory
static_assert(kWarps * kNarrow <= kHeld, "the warps of a unit share the memory of one long row");

int64_t units_of(int64_t rows, int64_t columns, bool twin) {
    if (!twin) return ceil_div(rows * columns, kSpan);
    return columns <= kNarrow ? ceil_div(rows, kWarps) : rows;
}

// ---- one tensor of the table
struct Tensor {
    int64_t unit;  // number within the tensor
    int64_t offset, rows, columns, twin, scale;

    // The last tensor that starts at or before `unit`: a warp looks at 32 places at a time.
    __device__ Tensor(const fp4bf16_adamw_args& a, int64_t number) {
        const int lane = threadIdx.x % 32;
        int64_t low = 0, count = a.tensor_count;
        while (count > 1) {
            const int64_t step = (count + 31) / 32, at = lane * step;
            const bool before = at < count && a.tensors[8 * (low + at)] <= number;
            const int64_t passed = (__popc(__ballot_sync(0xFFFFFFFFu, before)) - 1) * step;
            low += passed;
            count = min(step, count - passed);
        }
        const int64_t* entry = a.tensors + 8 * low;
        unit = number - entry[0];
        offset = entry[1], rows = entry[2], columns = entry[3], twin = entry[4], scale = entry[5];
    }
};

// ---- elements
struct Job {
    fp4bf16_adamw_args a;
    float beta1, rest1, beta2, rest2;
};

struct Step {
    StepFactors factors;
    bool steps;

    __device__ explicit Step(const Job& job) : factors(), steps(false) {
        if (job.a.gradient == nullptr) return;
        const float* s = job.a.scalars;
        factors = {job.beta1, job.rest1, job.beta2, job.rest2, job.a.eps, s[0], s[1], s[2], s[3], s[5]};
        steps = s[4] != 0.0f;
    }
};

// One element or four, by one load or store each: all of it passes once, and much more than a cache holds.
using One = Vector<float, 1>;
using Four = Vector<float, 4>;
__device__ inline void get(const float* from, One* v) { v->v[0] = __ldcs(from); }
__device__ inline void get(const float* from, Four* v) {
    const float4 w = __ldcs(reinterpret_cast<const float4*>(from));
    *v = {w.x, w.y, w.z, w.w};
}
__device__ inline void put(const One& v, float* to) { __stcs(to, v.v[0]); }
__device__ inline void put(const Four& v, float* to) {
    __stcs(reinterpret_cast<float4*>(to), make_float4(v.v[0], v.v[1], v.v[2], v.v[3]));
}
__device__ inline void put(const One& v, __nv_bfloat16* to) { *to = __float2bfloat16_rn(v.v[0]); }
__device__ inline void put(const Four& v, __nv_bfloat16* to) {
    const __nv_bfloat162 two[2] = {__floats2bfloat162_rn(v.v[0], v.v[1]),
                                   __floats2bfloat162_rn(v.v[2], v.v[3])};
    uint2 bits;
    memcpy(&bits, two, sizeof bits);
    __stwb(reinterpret_cast<uint2*>(to), bits);
}

// The elements from `at` on: the step, the average, the BF16 copy. Returns the parameters.
template <typename Floats>
__device__ inline Floats update(const fp4bf16_adamw_args& a, const Step& step, int64_t at) {
    constexpr int kCount = sizeof(Floats) / sizeof(float);
    Floats p;
    get(a.parameters + at, &p);
    if (step.steps) {
        Floats g, m, v, average{};
        get(a.gradient + at, &g);
        get(a.first + at, &m);
        get(a.second + at, &v);
        if (a.average != nullptr) get(a.average + at, &average);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            adamw_element(step.factors, g.v[i], p.v[i], m.v[i], v.v[i]);
            average.v[i] = average_element(step.factors, average.v[i], p.v[i]);
        }
        put(p, a.parameters + at);
        put(m, a.first + at);
        put(v, a.second + at);
        if (a.average != nullptr) put(average, a.average + at);
    }
    if (a.bf16 != nullptr) put(p, static_cast<__nv_bfloat16*>(a.bf16) + at);
    return p;
}

// ---- rows
// Place of the vector i of a row in shared memory, so that neither neighbours nor every fourth conflict.
__device__ inline int swizzled(int i) { return i ^ (i >> 3 & 3); }

// Largest over the lanes of a row; what they wrote before is then visible to all of them.
template <int kRowLanes>
__device__ inline uint32_t row_max(uint32_t v) {
    v = __reduce_max_sync(0xFFFFFFFFu, v);
    __syncwarp();
    if (kRowLanes == 32) return v;
    __shared__ uint32_t warps[kWarps];
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kWarps; ++i) v = max(v, warps[i]);
    return v;
}

// A row with a twin: columns is a multiple of 16.
template <int kRowLanes>
__device__ inline void do_row(const fp4bf16_adamw_args& a, const Step& step, const Tensor& t, int64_t row,
                              Four* held) {
    const int lane = threadIdx.x % kRowLanes;
    const int64_t first = t.offset + row * t.columns;
    const int vectors = static_cast<int>(t.columns / 4);
    const bool holds = kRowLanes == 32 || t.columns <= kHeld;
    uint32_t most = 0;
    for (int i = lane; i < vectors; i += kRowLanes) {
        const Four p = update<Four>(a, step, first + 4 * int64_t{i});
        if (holds) held[swizzled(i)] = p;
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (is_finite(p.v[j])) most = max(most, float_bits(p.v[j]) & 0x7FFFFFFFu);
    }
    if (a.twin == nullptr) return;
    const int e = outer_exponent(bits_float(row_max<kRowLanes>(most)));
    if (lane == 0) a.twin_scale[t.scale + row] = power_of_two(e);
    const Four* written = reinterpret_cast<const Four*>(a.parameters + first);
    uint4* bytes = reinterpret_cast<uint4*>(a.twin + t.twin + row * t.columns);
    for (int b = lane; b < vectors / 4; b += kRowLanes) {
        float x[16];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const Four p = holds ? held[swizzled(4 * b + c)] : written[4 * b + c];
#pragma unroll
            for (int j = 0; j < 4; ++j) x[4 * c + j] = p.v[j];
        }
        uint32_t out[4];
        twin_block(x, power_of_two(-e), out);
        bytes[b] = make_uint4(out[0], out[1], out[2], out[3]);
    }
}

__global__ void __launch_bounds__(kLanes, 8) adamw_kernel(const __grid_constant__ Job job) {
    wait_for_previous();
    __shared__ Four held[kHeld / 4];
    const Step step(job);
    const Tensor t(job.a, blockIdx.x);
    if (t.twin < 0) {
        const int64_t first = t.unit * kSpan;
        const int count = static_cast<int>(min(int64_t{kSpan}, t.rows * t.columns - first));
        for (int i = threadIdx.x; i < count / 4; i += kLanes)
            update<Four>(job.a, step, t.offset + first + 4 * i);
        const int rest = count / 4 * 4 + threadIdx.x;
        if (rest < count) update<One>(job.a, step, t.offset + first + rest);
    } else if (t.columns <= kNarrow) {
        const int warp = threadIdx.x / 32;
        const int64_t row = t.unit * kWarps + warp;
        if (row < t.rows) do_row<32>(job.a, step, t, row, held + warp * (kNarrow / 4));
    } else {
        do_row<kLanes>(job.a, step, t, t.unit, held);
    }
}

// ---- the norm of the gradient
constexpr int kParts = 1024;  // thread blocks, and doubles in the workspace

template <int kCount>
__device__ inline double block_sum(double v) {  // over the kCount threads, in a fixed order
    __shared__ double sums[kCount];
    sums[threadIdx.x] = v;
    for (int half = kCount / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    __syncthreads();
    return sums[0];
}

__device__ inline double square(float v) { return static_cast<double>(v) * v; }

template <bool kAligned>
__global__ void __launch_bounds__(kThreads) squares_kernel(const float* x, int64_t count, double* parts) {
    wait_for_previous();
    const int64_t vectors = count / 4, stride = int64_t{gridDim.x} * kThreads;
    double sum[4] = {};
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < vectors; i += 4 * stride) {
        Four v[4] = {};
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            const int64_t at = i + u * stride;
            if (at >= vectors) continue;
            if (kAligned)
                v[u] = reinterpret_cast<const Four*>(x)[at];
            else
                for (int j = 0; j < 4; ++j) v[u].v[j] = x[4 * at + j];
        }
#pragma unroll
        for (int u = 0; u < 4; ++u)
#pragma unroll
            for (int j = 0; j < 4; ++j) sum[j] += square(v[u].v[j]);
    }
    const int64_t last = 4 * vectors + threadIdx.x;
    if (blockIdx.x == 0 && last < count) sum[0] += square(x[last]);
    const double total = block_sum<kThreads>((sum[0] + sum[1]) + (sum[2] + sum[3]));
    if (threadIdx.x == 0) parts[blockIdx.x] = total;
}

__global__ void __launch_bounds__(kParts) total_kernel(const double* parts, int count, double* squares) {
    wait_for_previous();
    const double total = block_sum<kParts>(static_cast<int>(threadIdx.x) < count ? parts[threadIdx.x] : 0.0);
    if (threadIdx.x == 0) *squares = total;
}

__global__ void clip_kernel(const double* squares, const double* loss, double limit, float* scalars,
                            double* norm_out) {
    wait_for_previous();
    const double norm = sqrt(*squares);
    const bool finite = isfinite(norm) && (loss == nullptr || isfinite(*loss));
    scalars[3] = limit > 0 && norm > limit ? static_cast<float>(limit / norm) : 1.0f;
    scalars[4] = finite ? 1.0f : 0.0f;
    if (norm_out != nullptr) *norm_out = norm;
}

// ---- checks
fp4bf16_status check_step(const fp4bf16_adamw_args& a) {
    FP4BF16_TRY(check_pointer("adamw", "gradient", a.gradient, 16));
    FP4BF16_TRY(check_pointer("adamw", "first", a.first, 16));
    FP4BF16_TRY(check_pointer("adamw", "second", a.second, 16));
    FP4BF16_TRY(check_pointer("adamw", "scalars", a.scalars, alignof(float)));
    if (a.average != nullptr) FP4BF16_TRY(check_pointer("adamw", "average", a.average, 16));
    for (const double beta : {a.beta1, a.beta2})
        if (!(beta >= 0 && beta < 1))
            return fail(FP4BF16_INVALID_ARGUMENT,
                        "adamw: beta1 and beta2 are %g and %g, but must be at least 0 and less than 1",
                        a.beta1, a.beta2);
    if (!(a.eps >= 0))
        return fail(FP4BF16_INVALID_ARGUMENT, "adamw: eps is %g, but must be at least 0", a.eps);
    return FP4BF16_OK;
}

fp4bf16_status check_adamw(const fp4bf16_adamw_args& a) {
    if (a.units < 0 || a.units > INT_MAX || a.tensor_count < 0 || a.tensor_count > INT_MAX)
        return fail(FP4BF16_INVALID_ARGUMENT,
                    "adamw: units is %lld and tensor_count is %lld, but both must be 0 to 2^31 - 1",
                    static_cast<long long>(a.units), static_cast<long long>(a.tensor_count));
    if (a.units == 0) return FP4BF16_OK;
    if (a.tensor_count == 0)
        return fail(FP4BF16_INVALID_ARGUMENT, "adamw: tensor_count is 0, but units is %lld",
                    static_cast<long long>(a.units));
    FP4BF16_TRY(check_pointer("adamw", "tensors", a.tensors, alignof(int64_t)));
    FP4BF16_TRY(check_pointer("adamw", "parameters", a.parameters, 16));
    if (a.bf16 != nullptr) FP4BF16_TRY(check_pointer("adamw", "bf16", a.bf16, 16));
    if (a.twin != nullptr) {
        FP4BF16_TRY(check_pointer("adamw", "twin", a.twin, 16));
        FP4BF16_TRY(check_pointer("adamw", "twin_scale", a.twin_scale, alignof(float)));
    }
    return a.gradient == nullptr ? FP4BF16_OK : check_step(a);
}

}  // namespace
}  // namespace fp4bf16

using namespace fp4bf16;

extern "C" {

int64_t fp4bf16_adamw_units(int64_t rows, int64_t columns, int32_t twin) {
    constexpr int64_t kLimit = int64_t{1} << 40;
    if (rows < 0 || columns < 0 || rows > kLimit || columns > kLimit ||
        (columns > 0 && rows > kLimit / columns))
        return -1;
    if (twin != 0 && (columns % 16 != 0 || columns > INT_MAX)) return -1;
    return columns == 0 ? 0 : units_of(rows, columns, twin != 0);
}

fp4bf16_status fp4bf16_adamw(const fp4bf16_adamw_args* args, void* stream) {
    FP4BF16_TRY(check_pointer("adamw", "args", args, alignof(fp4bf16_adamw_args)));
    FP4BF16_TRY(check_adamw(*args));
    if (args->units == 0) return FP4BF16_OK;
    const Job job{*args, static_cast<float>(args->beta1), static_cast<float>(1 - args->beta1),
                  static_cast<float>(args->beta2), static_cast<float>(1 - args->beta2)};
    launch_kernel(adamw_kernel, static_cast<unsigned>(args->units), kLanes, 0,
                  static_cast<cudaStream_t>(stream), job);
    return cuda_result(cudaGetLastError(), "adamw");
}

fp4bf16_status fp4bf16_sum_of_squares(const float* x, int64_t count, double* squares, void* workspace,
                                      void* stream) {
    FP4BF16_TRY(check_matrix("sum_of_squares", "x", x, 1, count, count, alignof(float)));
    FP4BF16_TRY(check_pointer("sum_of_squares", "squares", squares, alignof(double)));
    FP4BF16_TRY(check_pointer("sum_of_squares", "workspace", workspace, alignof(double)));
    const auto parts = static_cast<double*>(workspace);
    const int64_t wanted = ceil_div(count, 4 * 4 * kThreads);
    const int blocks = static_cast<int>(wanted < 1 ? 1 : wanted > kParts ? kParts : wanted);
    const auto queue = static_cast<cudaStream_t>(stream);
    if (aligned(x, 16))
        launch_kernel(squares_kernel<true>, blocks, kThreads, 0, queue, x, count, parts);
    else
        launch_kernel(squares_kernel<false>, blocks, kThreads, 0, queue, x, count, parts);
    launch_kernel(total_kernel, 1, kParts, 0, queue, parts, blocks, squares);
    return cuda_result(cudaGetLastError(), "sum_of_squares");
}

fp4bf16_status fp4bf16_clip_scalars(const double* squares, const double* loss, double limit, float* scalars,
                                    double* norm_out, void* stream) {
    FP4BF16_TRY(check_pointer("clip_scalars", "squares", squares, alignof(double)));
    FP4BF16_TRY(check_pointer("clip_scalars", "scalars", scalars, alignof(float)));
    if (loss != nullptr) FP4BF16_TRY(check_pointer("clip_scalars", "loss", loss, alignof(double)));
    if (norm_out != nullptr)
        FP4BF16_TRY(check_pointer("clip_scalars", "norm_out", norm_out, alignof(double)));
    if (!(limit >= 0))
        return fail(FP4BF16_INVALID_ARGUMENT, "clip_scalars: limit is %g, but must be at least 0 (0: none)",
                    limit);
    launch_kernel(clip_kernel, 1, 1, 0, static_cast<cudaStream_t>(stream), squares, loss, limit, scalars,
                  norm_out);
    return cuda_result(cudaGetLastError(), "clip_scalars");
}

}  // extern "C"
