// Convolution of NHWC pictures as an implicit GEMM: the dual-track mainloop of sm90_dual.cuh behind another
// producer. M is the pixels of the result, N its channels, K the taps times the channels of x. A tile of M is
// a box of pixels (its sides powers of two), so that the A tile of one tap and 128 bytes of channels is one
// box of x, shifted by the tap: the copy engine gathers it, and what lies outside the picture reads as zero.
#pragma once

#include <type_traits>

#include "sm90_conv_epilogue.cuh"
#include "sm90_conv_sums.cuh"

namespace fp4bf16 {

// ---- producer

// This CTA's part of the pixels of one tap, from channel `c`.
template <class C>
__device__ inline void load_pixels(uint8_t* tile, const CUtensorMap* map, uint64_t* full, int c, Pixel at,
                                   int rank) {
    if constexpr (C::kClusterN == 1)
        ptx::copy_picture_box(tile, map, full, c, at.x, at.y, at.n);
    else
        ptx::copy_picture_box_multicast(tile + rank * (C::kTileM / C::kClusterN) * kTileBytes, map, full, c,
                                        at.x, at.y, at.n, (1 << C::kClusterN) - 1);
}

// Its part of the weight: kTileN output channels from `n`, K-major (o, taps * channels), or N-major (taps,
// channels of K, N).
template <class C>
__device__ inline void load_weight(uint8_t* tile, const CUtensorMap* map, uint64_t* full,
                                   const ConvTrack& track, int tap, int c, int n, int rank) {
    constexpr int kPart = C::kTileN / C::kClusterM;
    constexpr uint16_t kMask = (1 << C::kClusterM) - 1;
    const int first = C::kClusterM == 1 ? 0 : rank * kPart;
    if constexpr (C::kBN) {
#pragma unroll
        for (int i = 0; i < kPart; i += 64) {
            uint8_t* target = tile + (first + i) * kTileBytes;
            if constexpr (C::kClusterM == 1)
                ptx::copy_box(target, map, full, n + first + i, c, tap);
            else
                ptx::copy_box_multicast(target, map, full, n + first + i, c, tap, kMask);
        }
    } else {
        uint8_t* target = tile + first * kTileBytes;
        const int k = tap * track.channels + c;
        if constexpr (C::kClusterM == 1)
            ptx::copy_box(target, map, full, k, n + first, 0);
        else
            ptx::copy_box_multicast(target, map, full, k, n + first, 0, kMask);
    }
}

template <class C>
__device__ inline void produce_residual(const ConvParams& p, const SharedStages<C>& shared, uint64_t* full,
                                        int stage, const ConvCorner<C>& corner) {
    using S = Staging<C>;
    ptx::barrier_arrive_expect_bytes(full, C::kStagingBytes);
    for (int fragment = 0; fragment < C::kTileM / 64; ++fragment) {
        const Pixel at = pixel_of(p, corner.at, 64 * fragment);
        for (int i = 0; i < S::kBoxes; ++i) {
            const int offset = (fragment * S::kBoxes + i) * S::kBytes;
            uint8_t* target = offset < C::kBorrowedBytes ? shared.a(stage) + offset
                                                         : shared.staging + offset - C::kBorrowedBytes;
            ptx::copy_picture_box(target, &p.residual_map, full, corner.channel() + S::kColumns * i, at.x,
                                  at.y, at.n);
        }
    }
}

// The pixels of one tap of a later tile, on their way from memory while this tile is multiplied: its other
// taps then find nearly all of theirs in the L2 cache.
template <class C>
__device__ inline void prefetch_tile(const ConvParams& p, int tile, int rank) {
    const ConvCorner<C> corner(p, tile, rank);
    const Pixel at =
        C::kClusterN == 1 ? corner.at : pixel_of(p, corner.at, rank * (C::kTileM / C::kClusterN));
    auto prefetch = [&](const CUtensorMap* x, const ConvTrack& track, int elements) {
        const Tap tap = p.tap[track.first_tap + corner.phase() * track.taps + track.taps / 2];
        for (int c = 0; c < track.channels && track.taps > 1; c += elements)
            ptx::prefetch_picture_box(x, c, at.x * track.step + tap.dx, at.y * track.step + tap.dy, at.n);
    };
    if constexpr (C::kE4m3) prefetch(&p.x8, p.fp4, 128);
    prefetch(&p.x16, p.bf16, 64);
}

template <class C>
__device__ inline void produce_conv(const ConvParams& p, const SharedStages<C>& shared, uint64_t* own_empty,
                                    int cluster, int clusters, int rank) {
    Ring<C::kStages> ring;
    uint32_t own_parity = 1;
    for (int tile = cluster; tile < p.schedule.total(); tile += clusters) {
        const ConvCorner<C> corner(p, tile, rank);
        const Pixel part =
            C::kClusterN == 1 ? corner.at : pixel_of(p, corner.at, rank * (C::kTileM / C::kClusterN));
        auto load = [&](const CUtensorMap* x, const CUtensorMap* w, const ConvTrack& track, int elements) {
            const Tap* taps = p.tap + track.first_tap + corner.phase() * track.taps;
            for (int t = 0; t < track.taps; ++t) {
                const Tap tap = taps[t];
                const Pixel at = {part.x * track.step + tap.dx, part.y * track.step + tap.dy, part.n};
                for (int c = 0; c < track.channels; c += elements) {
                    ptx::barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
                    uint64_t* full = &shared.full[ring.stage];
                    ptx::barrier_arrive_expect_bytes(full, C::kStageBytes);
                    load_pixels<C>(shared.a(ring.stage), x, full, c, at, rank);
                    load_weight<C>(shared.b(ring.stage), w, full, track, tap.weight, c, corner.channel(),
                                   rank);
                    ring.advance();
                }
            }
        };
        if (tile + clusters < p.schedule.total()) prefetch_tile<C>(p, tile + clusters, rank);
        if constexpr (C::kE4m3) load(&p.x8, &p.w8, p.fp4, 128);
        load(&p.x16, &p.w16, p.bf16, 64);
        if (!C::kInTurn && p.staged) {  // the next stage is the consumers' own
            ptx::barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
            if (p.prefetched) {
                ptx::barrier_wait(own_empty, own_parity);
                own_parity ^= 1;
                produce_residual<C>(p, shared, &shared.full[ring.stage], ring.stage, corner);
            } else {
                ptx::barrier_arrive(&shared.full[ring.stage]);
            }
            ring.advance();
        }
    }
}

// ---- consumers

// The sums of a tile; `scale` is what follows those of the first track. In turn: `next_turn` is the barrier
// that lets the other warpgroup begin.
template <class C, bool kOwn, class Scale>
__device__ __forceinline__ void multiply_conv(const ConvParams& p, Consumer<C, kOwn, true>& c,
                                              Accumulators<C>& acc, uint32_t next_turn, Scale scale) {
    const auto bf16 = [&](auto empty) {
        c.period = p.bf16.chunks, c.tail = p.bf16.tail;
        c.next_turn = next_turn;
        c.template bf16<decltype(empty)::value>(acc, p.bf16.tiles(), p.bf16.tail);
    };
    // No path may seem to add to sums that were not begun: their registers would be taken all the time.
    if (C::kE4m3 && p.fp4.taps > 0) {
        if constexpr (C::kE4m3) {
            c.period = p.fp4.chunks, c.tail = p.fp4.tail;
            c.next_turn = p.bf16.taps > 0 ? 0 : next_turn;
            if constexpr (C::kPromote)
                c.e4m3_promoted(acc, p.fp4.tiles());
            else
                c.e4m3_fast(acc, p.fp4.tiles());
            scale();
            if (p.bf16.taps > 0) bf16(std::false_type());
        }
    } else if (C::kInTurn || p.bf16.taps > 0) {
        bf16(std::true_type());
        scale();
    } else {  // no tap meets these pixels
#pragma unroll
        for (int i = 0; i < C::kWaves * C::kAccumulators; ++i)
            acc[i / C::kAccumulators][i % C::kAccumulators] = 0;
        c.release_storing();
        scale();
    }
}

template <class C>
__device__ __forceinline__ void consume_conv(const ConvParams& p, const SharedStages<C>& shared,
                                             int clusters) {
    const int group = uniform(threadIdx.x / 128 - 1);
    Consumer<C, true, true> c(shared, group);
    ColumnVectors<C::kTileN> columns(shared.columns + group * ColumnVectors<C::kTileN>::kFloats);
    // Block and rank are read here, not shared with the producer's code: that would cost a register through
    // the products, which 128x256 does not have.
    uint32_t block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    for (int tile = block / C::kCluster; tile < p.schedule.total(); tile += clusters) {
        const ConvCorner<C> corner(p, tile, C::kCluster == 1 ? 0 : ptx::cluster_rank());
        const Rows<C> rows(p, corner, group);
        Accumulators<C> acc;
        load_columns<C>(p, columns, corner);
        multiply_conv<C>(p, c, acc, 0, [&] {
            columns.publish(threadIdx.x / 128);
            scale_rows<C>(p, acc, rows, columns);
        });
        const int col = corner.channel() + threadIdx.x % 4 * 2;
        if (__builtin_expect(p.extra, 0)) finish_rows<C>(p, acc, rows, columns.biases(), col);
        if (p.staged) {
            c.wait_full();  // the stage that the producer left out
            const Staging<C> staging(shared, c.ring.stage);
            store_pixels<C>(p, staging, acc, group, corner);
            if (C::kE4m3 && p.sums != nullptr) sum_staged<C>(p, staging, group, corner);
            c.give_to_stores();
        } else {
            store_rows<C>(p, acc, rows, col, corner.phase());
        }
    }
    ptx::store_wait();
}

}  // namespace fp4bf16
