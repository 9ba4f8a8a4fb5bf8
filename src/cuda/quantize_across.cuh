// The fast quantiser for blocks across rows of memory (after > 1), and the launch of all.
//
// A thread block takes 64 rows of results by pieces of 512 elements: tiles of 64 by 64 are read along memory
// and gathered from shared memory. Outer scales come from a pass of their own.
#pragma once

#include "quantize_flat.cuh"
#include "quantize_row.cuh"

namespace fp4bf16 {
namespace {

constexpr int kTile = 64, kTileLanes = kTile / 16;
static_assert(kTile * kTileLanes == kThreads, "a thread takes one block of the tile");

// 64 lines of k by 64 rows, BF16 bits: padded so that writes of 16 bytes and reads of a row meet no conflict.
struct Tile {
    uint4 v[(kTile * 72 + kTileLanes * 16) / 8];

    __device__ uint16_t* at(int line, int row) {
        return reinterpret_cast<uint16_t*>(v) + line * 72 + line / 16 * 16 + row;
    }

    __device__ void fill(const QuantizeJob& job, int64_t first_row, int64_t first_k) {
        const int64_t row = first_row + threadIdx.x % 8 * 8;
        const auto x = static_cast<const __nv_bfloat16*>(job.a.x) + job.place(row);
        uint4 w[2] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int64_t k = first_k + threadIdx.x / 8 + 32 * i;
            if (row < job.a.rows && k < job.a.k_size)
                w[i] = *reinterpret_cast<const uint4*>(x + k * job.a.k_stride);
        }
        __syncthreads();  // the last tile has been read
#pragma unroll
        for (int i = 0; i < 2; ++i)
            *reinterpret_cast<uint4*>(at(threadIdx.x / 8 + 32 * i, threadIdx.x % 8 * 8)) = w[i];
        __syncthreads();
    }
};

// Sums of a row's piece, for quantize_parts to add up; counts of a warp.
__device__ inline void store_parts(const QuantizeJob& job, const Totals& totals, bool inside, int64_t row,
                                   int lane) {
    for (int i = 0; i < 3 && job.a.sums != nullptr; ++i) {
        double sum = totals.sums[i];
        for (int step = kTileLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
        if (inside && lane == 0) job.parts[(blockIdx.y * job.a.rows + row) * 3 + i] = sum;
    }
    for (int i = 0; i < kCounts && job.a.counts != nullptr; ++i) {
        const int count = __reduce_add_sync(0xFFFFFFFFu, totals.counts[i]);
        if (threadIdx.x % 32 == 0 && count != 0) atomicAdd(job.a.counts + i, count);
    }
}

template <Kind kKind, bool kStats>
__global__ void __launch_bounds__(kThreads, kStats ? 2 : 3)
    across_kernel(const __grid_constant__ QuantizeJob job) {
    wait_for_previous();
    __shared__ Tile tile;
    const int line = threadIdx.x / kTileLanes, lane = threadIdx.x % kTileLanes;
    const int64_t first = int64_t{blockIdx.x} * kTile, row = first + line;
    const bool inside = row < job.a.rows;
    const int blocks = static_cast<int>(job.a.k_size / 16), piece = blockIdx.y * (kAcrossPiece / 16);
    const Outer o = job.outer(rule_of<kKind>(), inside ? row : 0);
    const Row results(job, row, kKind == kFp8);
    Totals totals;
    uint64_t special = 0;  // bit i: block piece + i * kTileLanes + lane
#pragma unroll 1
    for (int i = 0; i < kAcrossPiece / kTile; ++i) {
        const int b = piece + i * kTileLanes + lane;
        if (piece + i * kTileLanes >= blocks) break;
        tile.fill(job, first, 16 * (piece + i * kTileLanes));
        uint32_t w[8];
#pragma unroll
        for (int j = 0; j < 8; ++j)
            w[j] = *tile.at(16 * lane + 2 * j, line) | uint32_t{*tile.at(16 * lane + 2 * j + 1, line)} << 16;
        if (job.a.outliers > 0) drop_outliers(job, b, w);
        if (!do_any<kKind, kStats>(job, o, w, largest(w), results, b, inside && b < blocks, &totals))
            special |= uint64_t{1} << i;
    }
    if (special != 0) do_special<kKind, kTileLanes, kStats>(job, o, row, piece + lane, special, &totals);
    if (kStats) store_parts(job, totals, inside, row, lane);
    if (inside && blockIdx.y == 0) store_row<__nv_bfloat16>(job, o, row, lane, kTileLanes);
}

// ---- launch
template <Kind kKind>
void launch_long(const QuantizeJob& job, cudaStream_t stream) {
    const auto grid = static_cast<unsigned>(job.a.rows);
    if (job.a.sums != nullptr || job.a.counts != nullptr)
        launch_kernel(long_kernel<kKind, true>, grid, kThreads, 0, stream, job);
    else
        launch_kernel(long_kernel<kKind, false>, grid, kThreads, 0, stream, job);
}

template <Kind kKind>
void launch_across(const QuantizeJob& job, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>(ceil_div(job.a.rows, kTile)),
                    static_cast<unsigned>(ceil_div(job.a.k_size, kAcrossPiece)));
    if (job.a.sums != nullptr || job.a.counts != nullptr)
        launch_kernel(across_kernel<kKind, true>, grid, kThreads, 0, stream, job);
    else
        launch_kernel(across_kernel<kKind, false>, grid, kThreads, 0, stream, job);
}

template <Kind kKind>
void launch(const QuantizeJob& job, cudaStream_t stream) {
    if (job.way != Way::kRows) return launch_flat<kKind>(job, stream);
    if (job.a.after > 1) return launch_across<kKind>(job, stream);
    const int64_t blocks = job.a.k_size / 16;
    if (blocks > 0 && blocks <= kMostRowBlocks)
        launch_row<kKind>(job, blocks, stream);
    else
        launch_long<kKind>(job, stream);
}

}  // namespace
}  // namespace fp4bf16
