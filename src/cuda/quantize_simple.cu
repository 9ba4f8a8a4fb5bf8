// The quantiser for any arguments: every format, rule, rounding, type and layout, one thread a block. Written
// to be read: the faster kernels are checked against it on the device.
#include "quantize.cuh"

namespace fp4bf16 {
namespace {

constexpr int kRows = 32, kLanes = 8;  // tiles of 32 rows by 8 blocks, for reading across rows
static_assert(kRows * kLanes == kThreads, "a thread takes one block of the tile");

// The elements of a block, outliers zeroed; zero beyond the row's end. `at(k)` is the element k of the row.
template <int kB, typename At>
__device__ int gather(const QuantizeJob& job, int64_t b, const At& at, float (&x)[kB]) {
    const int64_t first = b * kB;
    const int n = static_cast<int>(min(int64_t{kB}, job.a.k_size - first));
    const uint32_t mask = job.a.outliers > 0 ? outlier_mask(job, first, kB) : 0;
    for (int j = 0; j < kB; ++j) x[j] = j < n && (mask >> j & 1) == 0 ? at(first + j, j) : 0.0f;
    return n;
}

// Largest over the threads of a row, whose lanes are neighbours in a warp.
__device__ inline uint32_t row_max(uint32_t v, int lanes) {
    for (int step = lanes / 2; step > 0; step /= 2) v = max(v, __shfl_xor_sync(0xFFFFFFFFu, v, step));
    return v;
}

__device__ inline double row_sum(double v, int lanes) {
    for (int step = lanes / 2; step > 0; step /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, step);
    return v;
}

template <int kB>
__device__ uint32_t finite_max(const float (&x)[kB], uint32_t most) {
    for (int j = 0; j < kB; ++j)
        if (is_finite(x[j])) most = max(most, float_bits(x[j]) & 0x7FFFFFFFu);
    return most;
}

// What a thread keeps of its row's blocks.
struct Totals {
    double sums[3];
    int counts[kCounts];
};

template <typename T, int kB>
__device__ void one_block(const QuantizeJob& job, const Outer& o, const float (&x)[kB], int n, int64_t row,
                          int64_t b, Totals* totals) {
    const fp4bf16_quantize_args& a = job.a;
    Philox random(a.seed, a.stream_word, a.call_word);
    const uint64_t element = row / a.after * (a.k_size * a.after) + b * kB * a.after + row % a.after;
    Codes<kB> codes;
    quantize_block(x, kB, n, job.rule, o, &random, element, a.after, a.sums != nullptr, &codes,
                   totals->counts);
    store_block(job, codes, kB, row, b);
    for (int i = 0; i < 3; ++i) totals->sums[i] += codes.sums[i];
}

// Sums and counts of a row's threads. Sums of float64 squares are off by less than 2^-40.
__device__ void store_totals(const QuantizeJob& job, const Totals& totals, bool inside, int64_t row, int lane,
                             int lanes) {
    if (job.a.sums != nullptr)
        for (int i = 0; i < 3; ++i) {
            const double sum = row_sum(totals.sums[i], lanes) * (1 + 0x1p-40);
            if (inside && lane == 0) job.a.sums[3 * row + i] = sum;
        }
    if (job.a.counts != nullptr)
        for (int i = 0; i < kCounts; ++i) {
            const int count = __reduce_add_sync(0xFFFFFFFFu, totals.counts[i]);
            if (threadIdx.x % 32 == 0 && count != 0) atomicAdd(job.a.counts + i, count);
        }
}

// ---- rows of their own: a warp a row
template <typename T, int kB>
__global__ void __launch_bounds__(kThreads, 2) rows_kernel(const __grid_constant__ QuantizeJob job) {
    wait_for_previous();
    const int lane = threadIdx.x % 32;
    const int64_t step = int64_t{gridDim.x} * (kThreads / 32);
    for (int64_t row = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32; row < job.a.rows;
         row += step) {
        const T* source = static_cast<const T*>(job.a.x) + job.place(row);
        const auto at = [&](int64_t k, int) { return load(source + k * job.a.k_stride); };
        float x[kB];
        Outer o = job.outer(job.rule, row);
        if (job.finds_outer()) {
            uint32_t most = 0;
            for (int64_t b = lane; b < job.blocks; b += 32) {
                gather(job, b, at, x);
                most = finite_max(x, most);
            }
            o = outer_from_amax(job.rule, bits_float(row_max(most, 32)));
        }
        Totals totals{};
        for (int64_t b = lane; b < job.blocks; b += 32) {
            const int n = gather(job, b, at, x);
            one_block<T>(job, o, x, n, row, b, &totals);
        }
        store_totals(job, totals, true, row, lane, 32);
        store_row<T>(job, o, row, lane, 32);
    }
}

// ---- blocks across rows of memory: 32 neighbouring rows of results a thread block, through shared memory
template <typename T, int kB>
struct Tile {
    float v[kRows][kLanes * (kB + 1)];  // a column in 17 (33) is spare, against bank conflicts

    // Elements k to k + 8 kB of rows first to first + 32; neighbouring threads read neighbouring rows.
    __device__ void fill(const QuantizeJob& job, int64_t first, int64_t k) {
        const int64_t row = first + threadIdx.x % kRows;
        const T* source = static_cast<const T*>(job.a.x) + job.place(row);
        __syncthreads();
        for (int i = threadIdx.x / kRows; i < kLanes * kB; i += kLanes)
            v[threadIdx.x % kRows][i / kB * (kB + 1) + i % kB] =
                row < job.a.rows && k + i < job.a.k_size ? load(source + (k + i) * job.a.k_stride) : 0.0f;
        __syncthreads();
    }
};

template <typename T, int kB>
__global__ void __launch_bounds__(kThreads, 2) across_kernel(const __grid_constant__ QuantizeJob job) {
    wait_for_previous();
    __shared__ Tile<T, kB> tile;
    const int lane = threadIdx.x % kLanes, line = threadIdx.x / kLanes;
    const auto at = [&](int64_t, int j) { return tile.v[line][lane * (kB + 1) + j]; };
    const int64_t step = int64_t{gridDim.x} * kRows;
    for (int64_t first = int64_t{blockIdx.x} * kRows; first < job.a.rows; first += step) {
        const int64_t row = first + line;
        const bool inside = row < job.a.rows;
        float x[kB];
        Outer o = job.outer(job.rule, inside ? row : 0);
        if (job.finds_outer()) {
            uint32_t most = 0;
            for (int64_t b = 0; b < job.blocks; b += kLanes) {
                tile.fill(job, first, b * kB);
                gather(job, b + lane, at, x);
                most = finite_max(x, most);
            }
            o = outer_from_amax(job.rule, bits_float(row_max(most, kLanes)));
        }
        Totals totals{};
        for (int64_t b = 0; b < job.blocks; b += kLanes) {
            tile.fill(job, first, b * kB);
            if (!inside || b + lane >= job.blocks) continue;
            const int n = gather(job, b + lane, at, x);
            one_block<T>(job, o, x, n, row, b + lane, &totals);
        }
        store_totals(job, totals, inside, row, lane, kLanes);
        if (inside) store_row<T>(job, o, row, lane, kLanes);
    }
}

template <typename T, int kB>
void launch(const QuantizeJob& job, cudaStream_t stream) {
    const int64_t groups = ceil_div(job.a.rows, job.a.after > 1 ? kRows : kThreads / 32);
    const auto grid = static_cast<unsigned>(groups < 0x7FFFFFFF ? groups : 0x7FFFFFFF);
    if (job.a.after > 1)
        launch_kernel(across_kernel<T, kB>, grid, kThreads, 0, stream, job);
    else
        launch_kernel(rows_kernel<T, kB>, grid, kThreads, 0, stream, job);
}

template <typename T>
void launch(const QuantizeJob& job, cudaStream_t stream) {
    job.block == 32 ? launch<T, 32>(job, stream) : launch<T, 16>(job, stream);
}

}  // namespace

fp4bf16_status quantize_simple(const QuantizeJob& job, cudaStream_t stream) {
    if (job.a.dtype == FP4BF16_FLOAT32)
        launch<float>(job, stream);
    else if (job.a.dtype == FP4BF16_FLOAT16)
        launch<__half>(job, stream);
    else
        launch<__nv_bfloat16>(job, stream);
    return cuda_result(cudaGetLastError(), "quantize");
}

}  // namespace fp4bf16
