// The fast quantiser for rows of up to 16384: a thread block a row, with as few threads as hold it, for what
// is done once a thread and row (addresses, outer scale) costs as much as half a block of 16. The row waits
// for its amax in registers (held_kernel) or, short rows and those that are added up, in shared memory
// (shared_kernel), which was measured to be the faster place.
#pragma once

#include "quantize_fast.cuh"

namespace fp4bf16 {
namespace {

// ---- in registers
// Threads at a time on a multiprocessor, for which registers are kept: as many as without spills. GPUs before
// Hopper need more instructions for the search of nvfp4_exact, and more registers.
template <Kind kKind, int kHeld>
__device__ constexpr int held_threads() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    if (kKind == kExactFull || kKind == kExactFast) return 512;
#endif
    return kHeld > 2 ? 768 : 1024;
}

template <Kind kKind, int kLanes, int kHeld>
__global__ void __launch_bounds__(kLanes, held_threads<kKind, kHeld>() / kLanes)
    held_kernel(const __grid_constant__ QuantizeJob job) {
    wait_for_previous();
    const int64_t row = blockIdx.x;
    const int lane = threadIdx.x, blocks = static_cast<int>(job.a.k_size / 16);
    const uint4* source = row_source(job, row);
    uint4 v[kHeld][2] = {};
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
        const int b = h * kLanes + lane;
        if (b < blocks) v[h][0] = source[2 * b], v[h][1] = source[2 * b + 1];
    }
    uint32_t w[kHeld][8], top[kHeld], most = 0;
#pragma unroll
    for (int h = 0; h < kHeld; ++h) unpack_block(v[h][0], v[h][1], w[h]);
    if (job.a.outliers > 0)
#pragma unroll
        for (int h = 0; h < kHeld; ++h) drop_outliers(job, h * kLanes + lane, w[h]);
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
        top[h] = largest(w[h]);
        most = max(most, top[h] < 0x7F80 ? top[h] : largest_finite(w[h]));
    }
    Outer o = job.outer(rule_of<kKind>(), row);
    if (job.finds_outer()) o = outer_from_amax(rule_of<kKind>(), bits_float(row_max<kLanes>(most) << 16));
    Totals none;
    uint32_t special = 0;  // bit h: block h * kLanes + lane
    const Row results(job, row, kKind == kFp8);
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
        const int b = h * kLanes + lane;
        if (!do_any<kKind, false>(job, o, w[h], top[h], results, b, b < blocks, &none)) special |= 1u << h;
    }
    if (special != 0) do_special<kKind, kLanes, false>(job, o, row, lane, special, &none);
    store_row<__nv_bfloat16>(job, o, row, lane, kLanes);
}

// ---- in shared memory
__device__ inline void copy_async(uint4* to, const uint4* from, bool inside) {
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
                 "r"(inside ? 16 : 0)
                 : "memory");
}

// A row by pieces of 8 elements: a warp copies 64 side by side (whole sectors) and reads two neighbours a
// thread, swizzled so that no banks conflict.
template <int kLanes, int kHeld>
struct RowPieces {
    uint4 v[kHeld * 2 * kLanes];

    __device__ void fetch(const QuantizeJob& job, int64_t row) {
        const int lane = threadIdx.x % 32, first = 2 * (threadIdx.x - lane);
        const int left = static_cast<int>(job.a.k_size / 8) - first - lane;
        const uint4 *start = row_source(job, row), *source = start + first + lane;
        uint4* to = v + first + (lane ^ (lane >> 3 & 1));
#pragma unroll
        for (int i = 0; i < 2 * kHeld; ++i) {
            const int p = i / 2 * 2 * kLanes + i % 2 * 32;
            copy_async(to + p, p < left ? source + p : start, p < left);  // no address outside the row
        }
        asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
        __syncwarp();
    }

    __device__ uint32_t load(const QuantizeJob& job, int h, uint32_t (&w)[8]) const {
        const int lane = threadIdx.x % 32, place = 2 * (threadIdx.x - lane) + (2 * lane ^ (lane >> 2 & 1));
        const uint4* from = v + h * (2 * kLanes);
        unpack_block(from[place], from[place ^ 1], w);
        if (job.a.outliers > 0) drop_outliers(job, h * kLanes + threadIdx.x, w);
        return largest(w);
    }
};

template <Kind kKind, int kLanes, int kHeld, bool kStats>
__global__ void __launch_bounds__(kLanes, (kStats ? 512 : 1024) / kLanes)
    shared_kernel(const __grid_constant__ QuantizeJob job) {
    wait_for_previous();
    __shared__ RowPieces<kLanes, kHeld> pieces;
    const int64_t row = blockIdx.x;
    const int lane = threadIdx.x, blocks = static_cast<int>(job.a.k_size / 16);
    pieces.fetch(job, row);
    uint32_t w[8], most = 0;
#pragma unroll
    for (int h = 0; h < kHeld && kKind != kMx; ++h) {
        const uint32_t top = pieces.load(job, h, w);
        most = max(most, top < 0x7F80 ? top : largest_finite(w));
    }
    Outer o = job.outer(rule_of<kKind>(), row);
    if (job.finds_outer()) o = outer_from_amax(rule_of<kKind>(), bits_float(row_max<kLanes>(most) << 16));
    Totals totals;
    uint32_t special = 0;  // bit h: block h * kLanes + lane
    const Row results(job, row, kKind == kFp8);
#pragma unroll 1
    for (int h = 0; h * kLanes < blocks; ++h) {
        const int b = h * kLanes + lane;
        const uint32_t top = pieces.load(job, h, w);
        if (!do_any<kKind, kStats>(job, o, w, top, results, b, b < blocks, &totals)) special |= 1u << h;
    }
    if (special != 0) do_special<kKind, kLanes, kStats>(job, o, row, lane, special, &totals);
    if (kStats) store_totals<kLanes>(job, totals, row);
    store_row<__nv_bfloat16>(job, o, row, lane, kLanes);
}

// ---- launch, 1 to kMostRowBlocks blocks a row; the choice is by time on an H200
constexpr int64_t kMostRowBlocks = 4 * 256;

template <Kind kKind, int kLanes, int kHeld, bool kStats>
void launch_shared(const QuantizeJob& job, cudaStream_t stream) {
    const auto rows = static_cast<unsigned>(job.a.rows);
    launch_kernel(shared_kernel<kKind, kLanes, kHeld, kStats>, rows, kLanes, 0, stream, job);
}

template <Kind kKind, int kLanes, int kHeld>
void launch_held(const QuantizeJob& job, cudaStream_t stream) {
    launch_kernel(held_kernel<kKind, kLanes, kHeld>, static_cast<unsigned>(job.a.rows), kLanes, 0, stream,
                  job);
}

template <Kind kKind>
void launch_row(const QuantizeJob& job, int64_t blocks, cudaStream_t stream) {
    const bool stats = job.a.sums != nullptr || job.a.counts != nullptr;
    constexpr bool kFewer = kKind == kExactFast || kKind == kTe;  // threads, with more blocks each
    if (blocks <= 4 * 32 && stats)
        launch_shared<kKind, 32, 4, true>(job, stream);
    else if (blocks <= 3 * 32)
        launch_shared<kKind, 32, 3, false>(job, stream);
    else if (blocks <= 4 * 32)
        launch_shared<kKind, 32, 4, false>(job, stream);
    else if (blocks <= 256 && stats)
        launch_shared<kKind, 64, 4, true>(job, stream);
    else if (blocks <= 256)
        launch_held<kKind, 128, 2>(job, stream);
    else if (blocks <= 512 && stats)
        launch_shared<kKind, 128, 4, true>(job, stream);
    else if (blocks <= 512)
        launch_held<kKind, kFewer ? 128 : 256, kFewer ? 4 : 2>(job, stream);
    else if (stats)
        launch_shared<kKind, 256, 4, true>(job, stream);
    else
        launch_shared<kKind, 256, 4, false>(job, stream);
}

}  // namespace
}  // namespace fp4bf16
