// Configurations of the convolution whose two consumer warpgroups take whole tiles in turn: one's epilogue
// runs while the other multiplies. The producer loads tile after tile as ever; warpgroup w takes tiles w,
// w + 2, ... of the CTA's and passes over the stages of the others.
//
// A barrier tells only the parity of its phase, so that a warpgroup which has passed over more than a round
// of the ring could take the copies of a round before for its own. It therefore waits for its turn: until the
// other's warps have seen the last copies of the tile before arrive. The tensor cores then still have that
// tile's last products to do.
//
// The result is staged in memory beside the ring: a stage held during the epilogue would stop the producer.
// A warp of its own grants that memory to the tiles in their order, with the residual in it if there is one.
#pragma once

#include "sm90_conv.cuh"

namespace fp4bf16 {

template <int kTileM_, int kTileN_, int kStages_, int kClusterM_, int kClusterN_>
struct TurnConfig {
    static constexpr int kTileM = kTileM_, kTileN = kTileN_, kStages = kStages_;
    static constexpr int kClusterM = kClusterM_, kClusterN = kClusterN_, kCluster = kClusterM * kClusterN;
    static constexpr bool kPromote = false, kAM = false, kBN = false, kE4m3 = true, kInTurn = true;
    static constexpr int kWaves = kTileM / 64;
    static constexpr int kABytes = kTileM * kTileBytes, kBBytes = kTileN * kTileBytes;
    static constexpr int kStageBytes = kABytes + kBBytes;
    static constexpr int kStagingBytes = kTileM * kTileN * 2;
    static constexpr int kBorrowedBytes = 0, kOwnStagingBytes = kStagingBytes;
    static constexpr int kColumnBytes = 2 * ColumnVectors<kTileN>::kFloats * 4;
    static constexpr int kSharedBytes =
        kStages * kStageBytes + kOwnStagingBytes + kColumnBytes + 2 * kStages * 8 + 1024;
    static constexpr int kThreads = 384;
    static constexpr int kAccumulators = kTileN / 2;

    static_assert(kTileM % 64 == 0 && kWaves * kAccumulators <= 160, "accumulators must fit 232 registers");
    static_assert(kCluster <= 2, "a cluster shares one operand");
};

// The barriers beside the ring's.
struct Turns {
    static constexpr int kCount = 5;
    uint64_t* turn;     // (2,) a warpgroup may begin its next tile; 16-byte aligned
    uint64_t* granted;  // (2,) it may write its result, to which the residual has come
    uint64_t* stored;   // (1,) the result has left the memory

    __device__ explicit Turns(uint64_t* memory) : turn(memory), granted(memory + 2), stored(memory + 4) {}
    __device__ void init() const {
        for (int i = 0; i < 2; ++i) {
            ptx::barrier_init(&turn[i], 4);  // the other's warps: each has then passed its own last wait here
            ptx::barrier_init(&granted[i], 1);
        }
        ptx::barrier_init(stored, 4);  // the warps of the warpgroup whose result it was
    }
};

// Counted anew for each tile: kept through the products, it would be a register too many.
__device__ inline int k_tiles_of(const ConvParams& p) {
    int taps8 = p.fp4.taps, taps16 = p.bf16.taps;
    asm volatile("" : "+r"(taps8), "+r"(taps16));
    return taps8 * p.fp4.chunks + taps16 * p.bf16.chunks;
}

// One thread.
template <class C>
__device__ inline void grant_staging(const ConvParams& p, const SharedStages<C>& shared, const Turns& turns,
                                     int cluster, int clusters, int rank) {
    int group = 0;
    uint32_t parity = 1;
    for (int tile = cluster; tile < p.schedule.total(); tile += clusters) {
        ptx::barrier_wait(turns.stored, parity);
        parity ^= 1;
        if (p.prefetched)
            produce_residual<C>(p, shared, &turns.granted[group], 0, ConvCorner<C>(p, tile, rank));
        else
            ptx::barrier_arrive(&turns.granted[group]);
        group ^= 1;
    }
}

template <class C>
__device__ __forceinline__ void consume_in_turn(const ConvParams& p, const SharedStages<C>& shared,
                                                const Turns& turns, int cluster, int clusters, int rank) {
    const int group = uniform(threadIdx.x / 128 - 1);
    Consumer<C, false, true> c(shared, 0);
    ColumnVectors<C::kTileN> columns(shared.columns +
                                     (threadIdx.x / 128 - 1) * ColumnVectors<C::kTileN>::kFloats);
    // Addresses of its barriers from one register: that of turn[group]; the other's differs in bit 3.
    const uint32_t turn = ptx::shared_address(turns.turn) + threadIdx.x / 128 * 8 - 8;
    uint32_t parity = 0;
    if (group == 1) c.ring.skip(k_tiles_of(p));
    for (int tile = cluster + group * clusters; tile < p.schedule.total(); tile += 2 * clusters) {
        const ConvCorner<C> corner(p, tile, rank);
        Accumulators<C> acc;
        load_columns<C>(p, columns, corner);
        // The first tile has no other before it: parity 1 is that of a phase before the first.
        ptx::barrier_wait(turn, parity ^ 1 ^ (turn >> 3 & 1));
        multiply_conv<C>(p, c, acc, turn ^ 8, [&] {
            columns.publish(threadIdx.x / 128);
            scale_rows<C>(p, acc, Rows<C>(p, corner, 0), columns);
        });
        const int col = corner.channel() + threadIdx.x % 4 * 2;
        if (__builtin_expect(p.extra, 0))
            finish_rows<C>(p, acc, Rows<C>(p, corner, 0), columns.biases(), col);
        if (p.staged) {
            ptx::barrier_wait(turn + 16, parity);  // granted[group]
            const Staging<C> staging(shared, 0);
            store_pixels<C>(p, staging, acc, 0, corner);
            if (C::kE4m3 && p.sums != nullptr) sum_staged<C>(p, staging, 0, corner);
            if (threadIdx.x % 128 < 32) ptx::store_wait_read();
            __syncwarp();
            if (threadIdx.x % 32 == 0) ptx::barrier_arrive(turns.stored);
        } else {
            store_rows<C>(p, acc, Rows<C>(p, corner, 0), col, corner.phase());
        }
        parity ^= 1;
        c.ring.skip(k_tiles_of(p));
    }
    ptx::store_wait();
}

}  // namespace fp4bf16
