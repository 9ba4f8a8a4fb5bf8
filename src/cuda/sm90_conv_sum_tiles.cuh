// Sums and sums of squares of a convolution's result by channel, as those of sm90_conv_sums.cuh, by warps
// that have nothing else to do: warps 1 to 3 of the producer's warpgroup. They take the staged tile from the
// consumers, which go on to multiply the next, store it, sum what is stored and give its memory back.
//
// Not by the tensor cores: those are the consumers' now, and FP32 instructions find free places to issue.
#pragma once

#include "sm90_conv_sums.cuh"

namespace fp4bf16 {

// Barriers behind those of the ring where the consumers share each tile, by their index.
struct Beside {
    enum {
        kOwnEmpty,  // staging memory beside the ring: its stores are done
        kStaged,    // all of a result lies in shared memory
        kSummed,    // it has been stored and summed
        kCount
    };
    __device__ static void init(uint64_t* barriers) {
        ptx::barrier_init(&barriers[kOwnEmpty], 2);  // a thread of each consumer warpgroup
        ptx::barrier_init(&barriers[kStaged], 8);    // the consumer warps
        ptx::barrier_init(&barriers[kSummed], 1);
    }
};

constexpr int kSumWarps = 3;

__device__ inline uint4 load_words(uint32_t address) {
    uint4 word;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
                 : "r"(address)
                 : "memory");
    return word;
}

// Eight channels of some of a part's rows: what a lane adds up.
struct EightSums {
    float sum[8] = {}, squares[8] = {};

    __device__ void add(const uint4& word) {
        const uint32_t pair[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float v = __uint_as_float(i % 2 == 0 ? pair[i / 2] << 16 : pair[i / 2] & 0xFFFF0000u);
            sum[i] += v;
            squares[i] = __fmaf_rn(v, v, squares[i]);
        }
    }
    // Lanes that differ in bits 2 to 4 hold the same channels. In each step a lane keeps half of its channels
    // and gets the other's sums of them: at last channel lane / 4 is left, of all eight lanes.
    __device__ float2 total(int lane) {
#pragma unroll
        for (int kept = 4; kept > 0; kept /= 2) {
            const bool upper = (lane & 4 * kept) != 0;
#pragma unroll
            for (int i = 0; i < kept; ++i) {
                sum[i] = exchange(sum[i], sum[i + kept], upper, 4 * kept);
                squares[i] = exchange(squares[i], squares[i + kept], upper, 4 * kept);
            }
        }
        return make_float2(sum[0], squares[0]);
    }

  private:
    __device__ static float exchange(float low, float high, bool upper, int mask) {
        return (upper ? high : low) + __shfl_xor_sync(0xFFFFFFFFu, upper ? low : high, mask);
    }
};

// 32 channels of `rows` rows that lie together, the first of them at `at`: four lanes a row, eight rows at a
// time. What is added was asked for eight rows before.
template <int kColumns>
__device__ inline void sum_rows_of_box(EightSums& sums, uint32_t at, int rows) {
    constexpr int kEight = 8 * 2 * kColumns;
    const uint32_t last = at + rows / 8 * kEight - kEight;
    uint4 even = load_words(at);
#pragma unroll 1
    for (; at < last; at += 2 * kEight) {
        const uint4 odd = load_words(at + kEight);
        sums.add(even);
        even = load_words(min(at + 2 * kEight, last));
        sums.add(odd);
    }
}

// Where this lane's first eight channels of 32 from `channel` lie, in the eight rows from `row`. Eight lanes
// read 128 bytes at once: of rows whose swizzled chunks, or halves of 128 bytes, differ.
template <class C>
__device__ inline int first_of_lane(int row, int channel) {
    using S = Staging<C>;
    const int lane = ptx::thread_again() % 32, eighth = lane / 4;
    const int in_eight = S::kColumns == 64 ? eighth / 2 + eighth % 2 * 4 : eighth;
    return (row / 64 * S::kBoxes + channel / S::kColumns) * S::kBytes +
           box_offset<S::kColumns>(row % 64 + in_eight, channel % S::kColumns / 8 + lane % 4);
}

// Of the part that begins at row `row` of the tile.
template <class C>
__device__ inline void store_part(const ConvParams& p, const ConvCorner<C>& corner, int row, int channel,
                                  float2 total) {
    const int log_image = p.log_w + p.log_h;
    const int c = corner.n + channel, image = corner.at.n + (row >> log_image);
    if (image >= p.n || c >= p.epilogue.n) return;
    const int box = (corner.at.y >> p.log_h) * p.tiles_w + (corner.at.x >> p.log_w);
    const int part = (box << (log_image - p.log_part)) + ((row & ((1 << log_image) - 1)) >> p.log_part);
    reinterpret_cast<float2*>(p.sums)[(int64_t{image} * p.sum_parts + part) * p.epilogue.n + c] = total;
}

// Every third of the tile's parts of 32 channels. Few registers are there: what can be is worked out anew.
template <class C>
__device__ inline void sum_tile(const ConvParams& p, const Staging<C>& staging, int tile) {
    using S = Staging<C>;
    constexpr int kBlocks = C::kTileN / 32;
    for (int unit = ptx::thread_again() / 32 - 1; unit < kBlocks * (C::kTileM >> p.log_part);
         unit += kSumWarps) {
        EightSums sums;
        int at = first_of_lane<C>(unit / kBlocks << p.log_part, unit % kBlocks * 32);
#pragma unroll 1
        for (int rows = 1 << p.log_part; rows > 0; rows -= 64, at += S::kBoxes * S::kBytes)
            sum_rows_of_box<S::kColumns>(sums, staging.memory(at), min(64, 1 << p.log_part));
        const int lane = ptx::thread_again() % 32;
        const float2 total = sums.total(lane);
        asm volatile("" : "+r"(tile), "+r"(unit));
        const ConvCorner<C> corner(p, tile, C::kCluster == 1 ? 0 : ptx::cluster_rank());
        store_part<C>(p, corner, unit / kBlocks << p.log_part, unit % kBlocks * 32 + lane % 4 * 8 + lane / 4,
                      total);
    }
}

// The consumers' first warps and their threads that store have left these arrivals to one warp.
template <class C>
__device__ inline void give_back(uint32_t empty, int stage, int lane) {
    if constexpr (C::kCluster == 1) {
        if (lane < 2) ptx::barrier_arrive(empty + 8 * stage);
    } else {
        if (lane < 2 * C::kCluster) ptx::barrier_arrive_at(empty + 8 * stage, lane % C::kCluster);
    }
    if (lane < 2) ptx::barrier_arrive(empty + 8 * (C::kStages + Beside::kOwnEmpty));
    if (lane == 0) ptx::barrier_arrive(empty + 8 * (C::kStages + Beside::kSummed));
}

// Warps 1 to 3. The consumers stage no result before kSummed has told of the one before, so that these
// barriers are never more than a phase ahead of those who wait.
template <class C>
__device__ inline void store_and_sum_tiles(const ConvParams& p, const SharedStages<C>& shared) {
    const uint32_t empty = ptx::shared_address(shared.empty);
    const int clusters = gridDim.x / C::kCluster;
    Ring<C::kStages> ring;
    uint32_t parity = 0;
    for (int tile = blockIdx.x / C::kCluster; tile < p.schedule.total(); tile += clusters) {
        ring.skip(p.fp4.tiles() + p.bf16.tiles());
        const Staging<C> staging(shared, ring.stage);
        ptx::barrier_wait(empty + 8 * (C::kStages + Beside::kStaged), parity);
        parity ^= 1;
        if (ptx::thread_again() < 64 && ptx::elect()) {
            const ConvCorner<C> corner(p, tile, C::kCluster == 1 ? 0 : ptx::cluster_rank());
#pragma unroll 1
            for (int fragment = 0; fragment < C::kTileM / 64; ++fragment)
                store_staged_fragment<C>(p, staging, fragment, corner);
            ptx::store_commit();
        }
        __syncwarp();
        sum_tile<C>(p, staging, tile);
        if (ptx::thread_again() < 64) ptx::store_wait_read();
        __syncwarp();
        asm volatile("bar.sync 3, 96;" ::: "memory");  // none of the three reads any more
        if (ptx::thread_again() < 64) give_back<C>(empty, ring.stage, threadIdx.x % 32);
        ring.advance();
    }
    if (ptx::thread_again() < 64) ptx::store_wait();
}

}  // namespace fp4bf16
