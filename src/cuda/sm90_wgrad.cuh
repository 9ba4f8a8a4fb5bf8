// Gradient of a convolution in its weights as an implicit GEMM: M = channels of g, N = taps x channels of x,
// K = pixels, both operands with K outside, as pictures lie. A k-tile is a box of 64 pixels (its sides powers
// of two) of g, and the same box of x shifted by the tap: the copy engine gathers it, and what lies outside
// the picture reads as zero. N goes in blocks of 64 channels of one tap, so that a tile may hold several
// taps.
//
// The pixels are split into runs; each run's sum goes to the caller's workspace. The mainloop is that of
// sm90_dual.cuh; a spare warp of the producer's warpgroup sums g over the pixels.
#pragma once

#include "sm90_dual.cuh"

namespace fp4bf16 {

constexpr int kBlockChannels = 64;  // of one copied box, 128 bytes
constexpr int kBoxPixels = 64;      // of a k-tile

struct WgradParams {
    CUtensorMap g, x;
    int log_w, log_h;            // of a box; the rest of its pixels are images
    int boxes_w, boxes_h;        // of a picture
    int k_tiles, splits;         // boxes; runs of them
    int tiles_m, tiles_n;        // of a whole cluster
    int o, c, c_blocks, blocks;  // c_blocks of a tap, blocks of all taps
    int kw, stride, top, left;
    float* out;   // (splits, o, 64 * blocks) sums, or dw itself
    float* sums;  // (splits * N tiles, o): sums of g; NULL: not wanted
    int64_t row_stride, split_stride;
};

// A block of N: its tap's shift and its first channel.
struct WgradBlock {
    int dx, dy, c;

    WgradBlock() = default;
    __device__ WgradBlock(const WgradParams& p, int block) {
        const int tap = block / p.c_blocks, r = tap / p.kw;
        dx = tap - r * p.kw - p.left;
        dy = r - p.top;
        // beyond the last block: channels that are not there, which read as zero
        c = (block < p.blocks ? block - tap * p.c_blocks : p.c_blocks) * kBlockChannels;
    }
};

// What a CTA computes: channels of g from m, blocks of N from `block` (tile `column` of them), k-tiles from
// `first` to before `last`.
template <class C>
struct WgradUnit {
    int m, column, block, split, first, last;

    __device__ WgradUnit(const WgradParams& p, int unit, int rank) {
        const int tiles = p.tiles_m * p.tiles_n;
        split = unit / tiles;
        const int tile = unit - split * tiles, n = tile / p.tiles_m;
        m = ((tile - n * p.tiles_m) * C::kClusterM + (C::kClusterM > 1 ? rank : 0)) * C::kTileM;
        column = n * C::kClusterN + (C::kClusterN > 1 ? rank : 0);
        block = column * (C::kTileN / kBlockChannels);
        first = static_cast<int>(int64_t{p.k_tiles} * split / p.splits);
        last = static_cast<int>(int64_t{p.k_tiles} * (split + 1) / p.splits);
    }
};

__device__ inline int wgrad_units(const WgradParams& p) { return p.tiles_m * p.tiles_n * p.splits; }

// ---- producer

template <int kShare>
__device__ inline void load_box(uint8_t* target, const CUtensorMap* map, uint64_t* full, int c, int x, int y,
                                int n) {
    if constexpr (kShare == 1)
        ptx::copy_picture_box(target, map, full, c, x, y, n);
    else
        ptx::copy_picture_box_multicast(target, map, full, c, x, y, n, (1 << kShare) - 1);
}

template <class C>
__device__ inline void produce_wgrad(const WgradParams& p, const SharedStages<C>& shared, int cluster,
                                     int clusters, int rank) {
    // blocks of either operand that this CTA brings, for the whole cluster
    constexpr int kA = C::kTileM / kBlockChannels / C::kClusterN,
                  kB = C::kTileN / kBlockChannels / C::kClusterM;
    const int first_a = C::kClusterN > 1 ? rank * kA : 0, first_b = C::kClusterM > 1 ? rank * kB : 0;
    Ring<C::kStages> ring;
    for (int unit = cluster; unit < wgrad_units(p); unit += clusters) {
        const WgradUnit<C> at(p, unit, rank);
        WgradBlock blocks[kB];
#pragma unroll
        for (int i = 0; i < kB; ++i) blocks[i] = WgradBlock(p, at.block + first_b + i);
        int line = at.first / p.boxes_w, bx = at.first - line * p.boxes_w;
        int image = line / p.boxes_h, by = line - image * p.boxes_h;
        for (int k = at.first; k < at.last; ++k) {
            ptx::barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
            uint64_t* full = &shared.full[ring.stage];
            ptx::barrier_arrive_expect_bytes(full, C::kStageBytes);
            const int x = bx << p.log_w, y = by << p.log_h, n = image * (kBoxPixels >> (p.log_w + p.log_h));
#pragma unroll
            for (int i = first_a; i < first_a + kA; ++i)
                load_box<C::kClusterN>(shared.a(ring.stage) + i * kBoxBytes, &p.g, full,
                                       at.m + i * kBlockChannels, x, y, n);
#pragma unroll
            for (int i = 0; i < kB; ++i)
                load_box<C::kClusterM>(shared.b(ring.stage) + (first_b + i) * kBoxBytes, &p.x, full,
                                       blocks[i].c, x * p.stride + blocks[i].dx, y * p.stride + blocks[i].dy,
                                       n);
            ring.advance();
            if (++bx == p.boxes_w) {
                bx = 0;
                if (++by == p.boxes_h) by = 0, ++image;
            }
        }
    }
}

// ---- sums of g over the pixels

// Lane l adds channels 4 l .. 4 l + 3 of the tile's 128: eight bytes of each pixel's row.
__device__ inline void add_pixels(const uint8_t* tile, float (&sum)[4]) {
    const int lane = threadIdx.x % 32, chunk = lane % 16 / 2;
    const uint8_t* box = tile + lane / 16 * kBoxBytes + lane % 2 * 8;
#pragma unroll 8
    for (int pixel = 0; pixel < kBoxPixels; ++pixel) {
        const uint2 v = *reinterpret_cast<const uint2*>(box + pixel * 128 + (chunk ^ pixel % 8) * 16);
        sum[0] += __uint_as_float(v.x << 16);
        sum[1] += __uint_as_float(v.x & 0xFFFF0000u);
        sum[2] += __uint_as_float(v.y << 16);
        sum[3] += __uint_as_float(v.y & 0xFFFF0000u);
    }
}

// Every tile of N sees all of g: each sums its share of the k-tiles, so that none takes longer.
template <class C>
__device__ inline void sum_gradient(const WgradParams& p, const SharedStages<C>& shared, int cluster,
                                    int clusters, int rank) {
    static_assert(C::kTileM == 128, "four channels a lane");
    const int lane = threadIdx.x % 32, columns = p.tiles_n * C::kClusterN;
    Ring<C::kStages> ring;
    for (int unit = cluster; unit < wgrad_units(p); unit += clusters) {
        const WgradUnit<C> at(p, unit, rank);
        float sum[4] = {};
        int turn = at.column;
        for (int k = at.first; k < at.last; ++k) {
            ptx::barrier_wait(&shared.full[ring.stage], ring.parity);
            if (turn == 0) add_pixels(shared.a(ring.stage), sum), turn = columns;
            --turn;
            __syncwarp();
            const uint32_t empty = ptx::shared_address(&shared.empty[ring.stage]);
            if (lane < C::kCluster) ptx::barrier_arrive_at(empty, lane);
            ring.advance();
        }
        float* out = p.sums + (int64_t{at.split} * columns + at.column) * p.o;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int channel = at.m + lane / 16 * kBlockChannels + lane % 16 * 4 + i;
            if (channel < p.o) out[channel] = sum[i];
        }
    }
}

// ---- consumers

// Rows `row` and `row` + 8 of a fragment, block by block; a quad writes 32 bytes, one sector.
template <class C>
__device__ inline void store_sums(const WgradParams& p, const WgradUnit<C>& at,
                                  const float (&acc)[C::kAccumulators], int row) {
    constexpr int kEach = kBlockChannels / 2;  // accumulators of a block
    float* out = p.out + at.split * p.split_stride + row * p.row_stride + threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < C::kTileN / kBlockChannels; ++j) {
        float* block = out + int64_t{at.block + j} * kBlockChannels;
        if (at.block + j >= p.blocks) continue;
#pragma unroll
        for (int i = 0; i < kEach; i += 2)
            if (row + 8 * lower(i) < p.o)
                *reinterpret_cast<float2*>(block + 8 * lower(i) * p.row_stride + column_of(i)) =
                    make_float2(acc[j * kEach + i], acc[j * kEach + i + 1]);
    }
}

template <class C>
__device__ inline void consume_wgrad(const WgradParams& p, const SharedStages<C>& shared, int cluster,
                                     int clusters, int rank) {
    static_assert(C::kWaves == 1, "a warpgroup has one fragment");
    const int group = uniform(threadIdx.x / 128 - 1);
    Consumer<C> consumer(shared, group);
    for (int unit = cluster; unit < wgrad_units(p); unit += clusters) {
        const WgradUnit<C> at(p, unit, rank);
        Accumulators<C> acc;
        consumer.template bf16_tile<4, Consumer<C>::kBegin>(acc);
        for (int k = at.first + 1; k < at.last; ++k) consumer.template bf16_tile<4, Consumer<C>::kAdd>(acc);
        consumer.drain();
        store_sums<C>(p, at, acc[0], at.m + group * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4);
    }
}

// ---- kernel

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) sm90_wgrad(const __grid_constant__ WgradParams p) {
    extern __shared__ uint8_t raw[];
    const SharedStages<C> shared(raw);
    const int rank = C::kCluster == 1 ? 0 : ptx::cluster_rank();
    const int cluster = blockIdx.x / C::kCluster, clusters = gridDim.x / C::kCluster;

    if (threadIdx.x == 0) {
        const int readers = 8 + (p.sums != nullptr ? 1 : 0);  // warps of a CTA
        for (int i = 0; i < C::kStages; ++i) {
            ptx::barrier_init(&shared.full[i], 1);
            ptx::barrier_init(&shared.empty[i], readers * C::kCluster);
        }
        ptx::fence_barrier_init();
    }
    if constexpr (C::kCluster == 1)
        __syncthreads();
    else
        ptx::cluster_arrive(), ptx::cluster_wait();

    if (threadIdx.x < 128) {
        ptx::give_registers<40>();
        if (threadIdx.x < 32 && ptx::elect()) {
            ptx::prefetch_map(&p.g), ptx::prefetch_map(&p.x);
            wait_for_previous();
            produce_wgrad<C>(p, shared, cluster, clusters, rank);
        }
        if (threadIdx.x / 32 == 1 && p.sums != nullptr) {
            wait_for_previous();
            sum_gradient<C>(p, shared, cluster, clusters, rank);
        }
        __syncwarp();
    } else {
        ptx::take_registers<232>();
        wait_for_previous();
        consume_wgrad<C>(p, shared, cluster, clusters, rank);
    }
    // No CTA leaves while another may still write to its shared memory or arrive at its barriers.
    if constexpr (C::kCluster > 1) ptx::cluster_arrive(), ptx::cluster_wait();
}

}  // namespace fp4bf16
