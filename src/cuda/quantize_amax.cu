// amax of groups of rows. The bits of non-negative floats sort as integers, so the maximum is one of integers
// and depends on no order. NaN and Inf are left out: they spoil their own block, not the scale of the others.
#include <type_traits>

#include "quantize.cuh"

namespace fp4bf16 {
namespace {

constexpr int kPiece = 2048;  // elements of a row that a warp takes at a time

__device__ inline int magnitude(float v) {
    const uint32_t bits = float_bits(v) & 0x7FFFFFFF;
    return bits < kInfinity ? static_cast<int>(bits) : 0;
}

// Each lane's maximum goes to its group's; one atomic a warp where that is the same for all.
__device__ inline void store_max(int* amax, int64_t group, int most) {
    if (__all_sync(0xFFFFFFFFu, group == __shfl_sync(0xFFFFFFFFu, group, 0))) {
        most = __reduce_max_sync(0xFFFFFFFFu, most);
        if (threadIdx.x % 32 == 0) atomicMax(amax + group, most);
    } else {
        atomicMax(amax + group, most);
    }
}

__device__ inline bool is_outlier(const QuantizeJob& job, int64_t k) {
    return job.a.outliers > 0 && outlier_mask(job, k, 1) != 0;
}

// Vectors of 16 bytes: elements, and the largest finite magnitude among them.
template <typename T>
struct Vectors;
template <>
struct Vectors<float> {
    static constexpr int kSize = 4;
    __device__ static int largest(uint4 w) {
        return max(max(magnitude(bits_float(w.x)), magnitude(bits_float(w.y))),
                   max(magnitude(bits_float(w.z)), magnitude(bits_float(w.w))));
    }
};
template <>
struct Vectors<__nv_bfloat16> {
    static constexpr int kSize = 8;
    __device__ static int pair(uint32_t w) {
        return max(magnitude(bits_float(w << 16)), magnitude(bits_float(w & 0xFFFF0000u)));
    }
    __device__ static int largest(uint4 w) {
        // In FP32's top half BF16 numbers are compared two at a time; NaN and Inf send it the long way.
        uint32_t most = __vmaxu2(__vmaxu2(w.x & 0x7FFF7FFF, w.y & 0x7FFF7FFF),
                                 __vmaxu2(w.z & 0x7FFF7FFF, w.w & 0x7FFF7FFF));
        most = max(most & 0xFFFF, most >> 16);
        if (most < 0x7F80) return static_cast<int>(most << 16);
        return max(max(pair(w.x), pair(w.y)), max(pair(w.z), pair(w.w)));
    }
};
template <>
struct Vectors<__half> {
    static constexpr int kSize = 8;
    __device__ static int pair(uint32_t w) {
        const float2 v = __half22float2(*reinterpret_cast<const __half2*>(&w));
        return max(magnitude(v.x), magnitude(v.y));
    }
    __device__ static int largest(uint4 w) {
        return max(max(pair(w.x), pair(w.y)), max(pair(w.z), pair(w.w)));
    }
};

// A warp takes kPiece elements of a row; 16-byte loads where the rows allow them.
template <typename T>
__global__ void __launch_bounds__(kThreads, 4)
    amax_rows(const __grid_constant__ QuantizeJob job, bool vectors, int* amax) {
    wait_for_previous();
    constexpr int kSize = Vectors<T>::kSize;
    const int lane = threadIdx.x % 32;
    const int64_t pieces = (job.a.k_size + kPiece - 1) / kPiece;
    const int64_t step = int64_t{gridDim.x} * (kThreads / 32);
    for (int64_t i = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32; i < job.a.rows * pieces;
         i += step) {
        const int64_t row = i / pieces, first = i % pieces * kPiece;
        const int64_t last = min(first + kPiece, job.a.k_size);
        const T* x = static_cast<const T*>(job.a.x) + job.place(row);
        int most = 0;
        int64_t k = first;
        if (vectors) {
#pragma unroll 4
            for (k += lane * kSize; k + kSize <= last; k += 32 * kSize)
                most = max(most, Vectors<T>::largest(*reinterpret_cast<const uint4*>(x + k)));
            k = last / kSize * kSize;
            k = k > first ? k : first;
        }
        for (k += lane; k < last; k += 32)
            if (!is_outlier(job, k)) most = max(most, magnitude(load(x + k * job.a.k_stride)));
        store_max(amax, job.group(row), most);
    }
}

// Rows along memory, whatever their length: a thread block takes kPiecesAtOnce pieces, of 16 bytes where the
// rows allow them, else of an element. One atomic a thread block that is inside a group.
constexpr int kPieces = 8, kPiecesAtOnce = kPieces * kThreads;

template <typename T, bool kVectors>
__global__ void __launch_bounds__(kThreads, 4)
    amax_flat(const __grid_constant__ QuantizeJob job, const Divisor pieces, int* amax) {
    wait_for_previous();
    constexpr int kSize = kVectors ? Vectors<T>::kSize : 1;
    const int64_t start = int64_t{blockIdx.x} * kPiecesAtOnce, row = start / pieces.by;
    const auto first = static_cast<uint32_t>(start - row * pieces.by);
    const auto count = static_cast<uint32_t>(min(int64_t{kPiecesAtOnce}, job.a.rows * pieces.by - start));
    const T* x = static_cast<const T*>(job.a.x) + row * job.a.x_stride;
    typename std::conditional<kVectors, uint4, T>::type v[kPieces] = {};
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
        const uint32_t n = first + i * kThreads + threadIdx.x, line = pieces.divide(n);
        if (n >= first + count) continue;
        const T* from = x + line * job.a.x_stride + int64_t{n - line * pieces.by} * kSize;
        v[i] = *reinterpret_cast<decltype(&v[0])>(const_cast<T*>(from));
    }
    int found[kPieces], most = 0;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
        if constexpr (kVectors)
            found[i] = Vectors<T>::largest(v[i]);
        else
            found[i] = magnitude(load(&v[i]));
        most = max(most, found[i]);
    }
    int64_t group;
    if (job.one_group(row, row + pieces.divide(first + count - 1), &group)) {
        __shared__ int warps[kThreads / 32];
        most = __reduce_max_sync(0xFFFFFFFFu, most);
        if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = most;
        __syncthreads();
        if (threadIdx.x >= 32) return;
        most = __reduce_max_sync(0xFFFFFFFFu, warps[threadIdx.x % (kThreads / 32)]);
        if (threadIdx.x == 0) atomicMax(amax + group, most);
        return;
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
        const uint32_t n = min(first + i * kThreads + threadIdx.x, first + count - 1);
        store_runs(amax, static_cast<int>(job.group(row + pieces.divide(n))), found[i]);
    }
}

// Blocks across rows of memory: a lane a row, so that neighbours read neighbours.
template <typename T>
__global__ void __launch_bounds__(kThreads) amax_across(const __grid_constant__ QuantizeJob job, int* amax) {
    wait_for_previous();
    const int64_t row = int64_t{blockIdx.x} * 32 + threadIdx.x % 32;
    const int64_t inside = min(row, job.a.rows - 1);
    const T* x = static_cast<const T*>(job.a.x) + job.place(inside);
    int most = 0;
#pragma unroll 4
    for (int64_t k = int64_t{blockIdx.y} * (kThreads / 32) + threadIdx.x / 32; k < job.a.k_size;
         k += int64_t{gridDim.y} * (kThreads / 32))
        if (!is_outlier(job, k)) most = max(most, magnitude(load(x + k * job.a.k_stride)));
    store_max(amax, job.group(inside), most);
}

// The same for BF16 in 16-byte vectors of 8 rows: a thread block takes 64 rows by kLines lines of k.
constexpr int kLines = 512;

__device__ inline uint32_t finite_pair(uint32_t w) {
    const uint32_t low = w & 0x7FFF, high = w & 0x7FFF0000;
    return (low < 0x7F80 ? low : 0) | (high < 0x7F800000 ? high : 0);
}

__global__ void __launch_bounds__(kThreads)
    amax_across_vectors(const __grid_constant__ QuantizeJob job, int* amax) {
    wait_for_previous();
    __shared__ int found[64];
    if (threadIdx.x < 64) found[threadIdx.x] = 0;
    const int64_t row = int64_t{blockIdx.x} * 64 + threadIdx.x % 8 * 8;
    const auto x = static_cast<const __nv_bfloat16*>(job.a.x) + job.place(row);
    const int64_t first = int64_t{blockIdx.y} * kLines, last = min(first + kLines, job.a.k_size);
    uint32_t most[4] = {};
    if (row < job.a.rows)
#pragma unroll 4
        for (int64_t k = first + threadIdx.x / 8; k < last; k += kThreads / 8) {
            if (is_outlier(job, k)) continue;
            const uint4 w = *reinterpret_cast<const uint4*>(x + k * job.a.k_stride);
            most[0] = __vmaxu2(most[0], finite_pair(w.x));
            most[1] = __vmaxu2(most[1], finite_pair(w.y));
            most[2] = __vmaxu2(most[2], finite_pair(w.z));
            most[3] = __vmaxu2(most[3], finite_pair(w.w));
        }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // over the four lines of a warp
        most[i] = __vmaxu2(most[i], __shfl_xor_sync(0xFFFFFFFFu, most[i], 8));
        most[i] = __vmaxu2(most[i], __shfl_xor_sync(0xFFFFFFFFu, most[i], 16));
        if (threadIdx.x % 32 >= 8) continue;
        atomicMax(found + threadIdx.x % 8 * 8 + 2 * i, static_cast<int>(most[i] << 16));
        atomicMax(found + threadIdx.x % 8 * 8 + 2 * i + 1, static_cast<int>(most[i] & 0xFFFF0000u));
    }
    __syncthreads();
    const int64_t mine = int64_t{blockIdx.x} * 64 + threadIdx.x;
    if (threadIdx.x < 64) store_max(amax, job.group(min(mine, job.a.rows - 1)), found[threadIdx.x]);
}

// Whether vectors of 16 bytes lie whole in the rows (after = 1) or across them.
template <typename T>
bool takes_vectors(const fp4bf16_quantize_args& a) {
    constexpr int kSize = Vectors<T>::kSize;
    if (reinterpret_cast<uintptr_t>(a.x) % 16 != 0 || a.x_stride % kSize != 0) return false;
    return a.after == 1 ? a.k_stride == 1 && a.outliers == 0
                        : a.after % kSize == 0 && a.k_stride % kSize == 0;
}

template <typename T>
void launch(const QuantizeJob& job, int* amax, cudaStream_t stream) {
    const fp4bf16_quantize_args& a = job.a;
    if (a.after > 1) {
        const int64_t y = ceil_div(a.k_size, 256);
        const dim3 grid(static_cast<unsigned>(ceil_div(a.rows, 32)),
                        static_cast<unsigned>(y < 65535 ? y : 65535));
        const int64_t lines = ceil_div(a.k_size, kLines);
        if (std::is_same<T, __nv_bfloat16>::value && takes_vectors<T>(a) && lines <= 65535)
            launch_kernel(amax_across_vectors,
                          dim3(static_cast<unsigned>(ceil_div(a.rows, 64)), static_cast<unsigned>(lines)),
                          kThreads, 0, stream, job, amax);
        else
            launch_kernel(amax_across<T>, grid, kThreads, 0, stream, job, amax);
        return;
    }
    const bool vectors = takes_vectors<T>(a) && a.k_size % Vectors<T>::kSize == 0;
    const int64_t pieces = vectors ? a.k_size / Vectors<T>::kSize : a.k_size;
    if (a.k_stride == 1 && a.outliers == 0 && pieces <= 32768 && a.rows <= 0x7FFFFFFF) {
        const auto grid = static_cast<unsigned>(ceil_div(a.rows * pieces, kPiecesAtOnce));
        vectors ? launch_kernel(amax_flat<T, true>, grid, kThreads, 0, stream, job, Divisor(pieces), amax)
                : launch_kernel(amax_flat<T, false>, grid, kThreads, 0, stream, job, Divisor(pieces), amax);
        return;
    }
    const int64_t warps = a.rows * ceil_div(a.k_size, kPiece), blocks = ceil_div(warps, kThreads / 32);
    launch_kernel(amax_rows<T>, static_cast<unsigned>(blocks < 0x7FFFFFFF ? blocks : 0x7FFFFFFF), kThreads, 0,
                  stream, job, takes_vectors<T>(a), amax);
}

}  // namespace

fp4bf16_status quantize_amax(const QuantizeJob& job, float* amax, cudaStream_t stream) {
    const int64_t groups = ceil_div(job.a.rows, job.a.mid * job.a.inner) * job.a.inner;
    FP4BF16_TRY(cuda_result(cudaMemsetAsync(amax, 0, groups * sizeof(float), stream), "amax"));
    if (job.a.k_size == 0) return FP4BF16_OK;
    const auto bits = reinterpret_cast<int*>(amax);
    if (job.a.dtype == FP4BF16_FLOAT32)
        launch<float>(job, bits, stream);
    else if (job.a.dtype == FP4BF16_FLOAT16)
        launch<__half>(job, bits, stream);
    else
        launch<__nv_bfloat16>(job, bits, stream);
    return cuda_result(cudaGetLastError(), "amax");
}

}  // namespace fp4bf16
