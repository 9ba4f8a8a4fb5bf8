// The fast quantiser for short rows, a warp each: thread blocks stay and take row after row, the next ones
// being copied to shared memory while these are worked on. Each thread reads but what it copied itself.
// Longer rows gain nothing from it.
#pragma once

#include "quantize_fast.cuh"

namespace fp4bf16 {
namespace {

constexpr int kRowLanes = 32, kRowsAtOnce = kThreads / kRowLanes;
// Blocks of a row that one thread takes, at most: 48 KiB of shared memory, which every GPU gives unasked.
constexpr int kMostHeld = 3;
constexpr int64_t stream_bytes(int held) { return int64_t{held} * 2 * 2 * 16 * kThreads; }

__device__ inline void copy_async(uint4* to, const uint4* from, bool inside) {
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
                 "r"(inside ? 16 : 0)
                 : "memory");  // not before what was read of the buffer
}

// A row's blocks in shared memory: (2 buffers, held, 2 halves, threads).
struct Stream {
    uint4* v;
    int held, blocks;

    __device__ uint4* at(int buffer, int h) const {
        return v + ((buffer * held + h) * 2) * kThreads + threadIdx.x;
    }

    __device__ void fetch(const QuantizeJob& job, int64_t row, int buffer) const {
        const auto source =
            reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(job.a.x) + row * job.a.x_stride);
#pragma unroll 1
        for (int h = 0; h < held; ++h) {
            const int b = h * kRowLanes + threadIdx.x % kRowLanes;
            const uint4* from = source + (b < blocks ? 2 * b : 0);  // no address outside the row
            copy_async(at(buffer, h), from, b < blocks);
            copy_async(at(buffer, h) + kThreads, from + 1, b < blocks);
        }
    }

    __device__ uint32_t load(const QuantizeJob& job, int buffer, int h, int b, uint32_t (&w)[8]) const {
        const uint4 low = at(buffer, h)[0], high = at(buffer, h)[kThreads];
        w[0] = low.x, w[1] = low.y, w[2] = low.z, w[3] = low.w;
        w[4] = high.x, w[5] = high.y, w[6] = high.z, w[7] = high.w;
        if (job.a.outliers > 0) drop_outliers(job, b, w);
        return largest(w);
    }
};

template <Kind kKind, bool kStats>
__global__ void __launch_bounds__(kThreads, kStats ? 2 : kKind == kExactFull || kKind == kExactFast ? 3 : 4)
    stream_kernel(const __grid_constant__ QuantizeJob job, int held) {
    extern __shared__ uint4 shared[];
    const int lane = threadIdx.x % kRowLanes;
    const Stream stream{shared, held, static_cast<int>(job.a.k_size / 16)};
    const int64_t step = int64_t{gridDim.x} * kRowsAtOnce;
    int64_t row = int64_t{blockIdx.x} * kRowsAtOnce + threadIdx.x / kRowLanes;
    if (row < job.a.rows) stream.fetch(job, row, 0);
    asm volatile("cp.async.commit_group;");
#pragma unroll 1
    for (int turn = 0; row < job.a.rows; row += step, turn ^= 1) {
        if (row + step < job.a.rows) stream.fetch(job, row + step, turn ^ 1);
        asm volatile("cp.async.commit_group;\ncp.async.wait_group 1;" ::: "memory");
        uint32_t w[8];
        Outer o = job.outer(rule_of<kKind>(), row);
        if (job.finds_outer()) {
            uint32_t most = 0;
#pragma unroll 1
            for (int h = 0; h < held; ++h) {
                const uint32_t top = stream.load(job, turn, h, h * kRowLanes + lane, w);
                most = max(most, top < 0x7F80 ? top : largest_finite(w));
            }
            o = outer_from_amax(rule_of<kKind>(), bits_float(__reduce_max_sync(0xFFFFFFFFu, most) << 16));
        }
        Totals totals;
        uint64_t special = 0;
        const Row results(job, row);
#pragma unroll 1
        for (int h = 0; h < held; ++h) {
            const int b = h * kRowLanes + lane;
            const uint32_t top = stream.load(job, turn, h, b, w);
            bool done;
            if constexpr (kKind == kFp8)
                done = do_fp8<kStats>(job, o, w, top, results, b, b < stream.blocks, &totals);
            else
                done = do_block<kKind, kStats>(job, o, w, top, results, b, b < stream.blocks, &totals);
            if (!done) special |= uint64_t{1} << h;
        }
        if (special != 0) do_special<kKind, kRowLanes, kStats>(job, o, row, lane, special, &totals);
        if (kStats) store_totals<kRowLanes>(job, totals, row);
        store_row<__nv_bfloat16>(job, o, row, lane, kRowLanes);
    }
}

template <Kind kKind>
void launch_stream(const QuantizeJob& job, cudaStream_t stream) {
    const int held = static_cast<int>(ceil_div(job.a.k_size / 16, kRowLanes));
    int device = 0, multiprocessors = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
        return;  // cudaGetLastError of the caller has it
    const int64_t rows = ceil_div(job.a.rows, kRowsAtOnce), most = int64_t{4} * multiprocessors;
    const auto grid = static_cast<unsigned>(rows < most ? rows : most);
    const auto bytes = static_cast<size_t>(stream_bytes(held));
    if (job.a.sums != nullptr || job.a.counts != nullptr)
        stream_kernel<kKind, true><<<grid, kThreads, bytes, stream>>>(job, held);
    else
        stream_kernel<kKind, false><<<grid, kThreads, bytes, stream>>>(job, held);
}

}  // namespace
}  // namespace fp4bf16
