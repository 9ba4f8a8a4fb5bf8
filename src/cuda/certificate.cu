// fp4bf16_certificate: the sums that the certificate of one FP4 product is made of, and its checks. Where
// there is much to add up, as the squares of a large convolution, a cluster shares it: one multiprocessor
// alone would wait a tenth of a millisecond for its memory.
#include "certificate.cuh"
#include "common.h"
#include "launch.cuh"
#include "ptx.cuh"

namespace fp4bf16 {
namespace {

constexpr int kMany = 1024;        // threads of a thread block
constexpr int kWarps = kMany / 32;
constexpr int kShared = 8;         // thread blocks of a cluster
constexpr int64_t kAlone = 32768;  // numbers that one thread block adds up by itself

// Adds what this thread takes of `count` items, in a fixed order: eight are loaded before the first is added.
template <typename Load, typename Add>
__device__ inline void each(int64_t count, const Load& load, const Add& add) {
    constexpr int kAhead = 8;
    const int64_t step = int64_t{gridDim.x} * kMany;
    for (int64_t first = blockIdx.x * int64_t{kMany} + threadIdx.x; first < count; first += kAhead * step) {
        decltype(load(first)) v[kAhead] = {};
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
            if (first + i * step < count) v[i] = load(first + i * step);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) add(v[i]);
    }
}

__device__ inline CertificateSums sums_of_thread(const fp4bf16_certificate_args& a) {
    CertificateSums s{};
    if (a.norms != nullptr) {
        const auto* norms = reinterpret_cast<const float2*>(a.norms);
        const auto load = [&](int64_t i) { return norms[i]; };
        each(a.norm_parts, load, [&](const float2& v) { s.error += v.x, s.used += v.y; });
    } else {
        const auto load = [&](int64_t i) {
            const double* v = a.sums + 3 * i;
            return make_double3(v[0], v[1], v[2]);
        };
        each(a.sum_rows, load, [&](const double3& v) { s.full += v.x, s.used += v.y, s.error += v.z; });
    }
    if (a.squares != nullptr) {
        const auto load = [&](int64_t i) { return a.squares[i * a.square_stride]; };
        each(a.square_count, load, [&](float v) { s.result += v; });
    }
    return s;
}

__device__ inline double warp_sum(double v) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, step);
    return v;
}

__device__ inline CertificateSums warp_sums(const CertificateSums& s) {
    return {warp_sum(s.full), warp_sum(s.used), warp_sum(s.error), warp_sum(s.result)};
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// To where `here` is in the first thread block of the cluster.
__device__ inline void send_first(double* here, double v) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, 0;\n"
        "st.shared::cluster.f64 [there], %1;\n"
        "}\n" ::"r"(ptx::shared_address(here)),
        "d"(v)
        : "memory");
}
#endif

// Over the grid, one cluster: in the first warp of its first thread block.
__device__ inline CertificateSums sums_of_all(const CertificateSums& of_thread) {
    __shared__ CertificateSums warps[kWarps];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const CertificateSums w = warp_sums(of_thread);
    if (lane == 0) warps[warp] = w;
    __syncthreads();
    CertificateSums all{};
    if (warp == 0) all = warp_sums(warps[lane]);
    if (gridDim.x == 1) return all;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    __shared__ CertificateSums blocks[kShared];
    ptx::cluster_arrive(), ptx::cluster_wait();  // every thread block has begun: its memory is there
    if (threadIdx.x == 0) {
        CertificateSums& to = blocks[blockIdx.x];
        send_first(&to.full, all.full), send_first(&to.used, all.used);
        send_first(&to.error, all.error), send_first(&to.result, all.result);
    }
    ptx::cluster_arrive(), ptx::cluster_wait();
    if (blockIdx.x == 0 && warp == 0) all = warp_sums(lane < kShared ? blocks[lane] : CertificateSums{});
#endif
    return all;
}

__global__ void __launch_bounds__(kMany)
    certificate_kernel(const __grid_constant__ fp4bf16_certificate_args a) {
    wait_for_previous();
    const CertificateSums all = sums_of_all(sums_of_thread(a));
    if (blockIdx.x == 0 && threadIdx.x == 0) finish_certificate(a, all);
}

// ---- checks
constexpr int64_t kMost = int64_t{1} << 60;

fp4bf16_status check_number(const char* name, float v, float least) {
    if (v >= least && std::isfinite(v)) return FP4BF16_OK;
    return fail(FP4BF16_INVALID_ARGUMENT, "certificate: %s is %g, but must be finite and at least %g", name,
                static_cast<double>(v), static_cast<double>(least));
}

// What there is to add up.
fp4bf16_status check_sums(const fp4bf16_certificate_args& a) {
    const char* f = "certificate";
    if ((a.norms != nullptr) == (a.sums != nullptr))
        return fail(FP4BF16_INVALID_ARGUMENT,
                    "certificate: norms and sums are both %s, but one of them is needed: group_norm's norms "
                    "or the quantiser's sums",
                    a.norms != nullptr ? "given" : "NULL");
    if (a.norms != nullptr) {
        FP4BF16_TRY(check_pointer(f, "norms", a.norms, 2 * alignof(float)));
        FP4BF16_TRY(check_range(f, "norm_parts", a.norm_parts, 0, kMost));
    } else {
        FP4BF16_TRY(check_pointer(f, "sums", a.sums, alignof(double)));
        FP4BF16_TRY(check_range(f, "sum_rows", a.sum_rows, 0, kMost));
    }
    if (a.squares == nullptr) return FP4BF16_OK;
    FP4BF16_TRY(check_pointer(f, "squares", a.squares, alignof(float)));
    FP4BF16_TRY(check_range(f, "square_count", a.square_count, 0, int64_t{1} << 40));
    return check_range(f, "square_stride", a.square_stride, 1, 1 << 20);
}

fp4bf16_status check(const fp4bf16_certificate_args& a) {
    const char* f = "certificate";
    FP4BF16_TRY(check_sums(a));
    FP4BF16_TRY(check_pointer(f, "weight", a.weight, alignof(float)));
    if (a.outer_scale != nullptr) FP4BF16_TRY(check_pointer(f, "outer_scale", a.outer_scale, alignof(float)));
    FP4BF16_TRY(check_range(f, "k", a.k, 0, kMost));
    FP4BF16_TRY(check_range(f, "columns", a.columns, 0, kMost));
    FP4BF16_TRY(check_range(f, "elements", a.elements, 0, kMost));
    FP4BF16_TRY(check_number("factor", a.factor, 0.0f));
    FP4BF16_TRY(check_number("gain", a.gain, 0.0f));
    FP4BF16_TRY(check_number("slope", a.slope, 0.0f));
    FP4BF16_TRY(check_range(f, "output", a.output, FP4BF16_FLOAT32, FP4BF16_FLOAT16));
    if (std::isnan(a.threshold))
        return fail(FP4BF16_INVALID_ARGUMENT, "certificate: threshold is NaN; pass -1 for none");
    FP4BF16_TRY(check_pointer(f, "out", a.out, alignof(float)));
    if (a.flag != nullptr) FP4BF16_TRY(check_pointer(f, "flag", a.flag, alignof(int32_t)));
    return a.counts == nullptr ? FP4BF16_OK : check_pointer(f, "counts", a.counts, alignof(int32_t));
}

}  // namespace
}  // namespace fp4bf16

using namespace fp4bf16;

extern "C" fp4bf16_status fp4bf16_certificate(const fp4bf16_certificate_args* args, void* stream) {
    FP4BF16_TRY(check_pointer("certificate", "args", args, alignof(fp4bf16_certificate_args)));
    const fp4bf16_certificate_args& a = *args;
    FP4BF16_TRY(check(a));
    int major = 0, minor = 0;
    FP4BF16_TRY(compute_capability("certificate", &major, &minor));
    const int64_t numbers = (a.norms != nullptr ? a.norm_parts : a.sum_rows) +
                            (a.squares != nullptr ? a.square_count : 0);
    const auto s = static_cast<cudaStream_t>(stream);
    if (major >= 9 && numbers > kAlone)
        launch_clusters(kShared, certificate_kernel, kShared, kMany, 0, s, a);
    else
        launch_kernel(certificate_kernel, 1, kMany, 0, s, a);
    return cuda_result(cudaGetLastError(), "certificate");
}
