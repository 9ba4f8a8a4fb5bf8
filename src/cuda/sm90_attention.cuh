// What the forward and the backward pass on Hopper share: a ring of stages in shared memory between one
// producer thread (TMA copies) and two consumer warpgroups, and the product of scores.
//
// A tile of work is 128 queries of one head, all its keys (at most 256) at once, so that a row of scores lies
// whole in the registers of four threads; warpgroup g has the queries 64 g .. 64 g + 63. The grid is
// persistent. A stage is 32 KiB:
//
//     left operand of the scores    two k-tiles of 64 channels, 128 queries each
//     right operand                 one k-tile of 64 channels, 256 keys
//     factor of the weights         32 KiB / (2 kDim) keys, kDim channels, in blocks of 64 channels
//     result                        one a warpgroup, in boxes of 64 queries x 64 columns
//
// Seven stages fit. Forward, a result takes two stages of the ring, which the producer leaves out; backward
// it has two of its own and the ring has five.
#pragma once

#include "attention.cuh"
#include "pipeline.cuh"
#include "tensor_map.h"
#include "wgmma.cuh"

namespace fp4bf16 {

constexpr int kQueries = 128, kKeys = 256, kTileChannels = 64;
constexpr int kStageSize = 32768, kStagesAll = 7, kBlock = 384;
constexpr int kSharedSize = kStagesAll * kStageSize + 2 * kStagesAll * 8 + 1024;  // to align
constexpr float kLog2e = 1.44269504088896341f, kLn2 = 0.693147180559945309f;
static_assert(kSharedSize <= 227 * 1024, "a block has 227 KiB of shared memory");

// Which head of which image, and which of its queries.
struct Work {
    int image, head, row0;
    int64_t z;  // of all heads

    __device__ Work(int tile, int blocks, int heads) : row0(tile % blocks * kQueries), z(tile / blocks) {
        image = static_cast<int>(z / heads), head = static_cast<int>(z % heads);
    }
};

template <int kRing>
struct SharedRing {
    uint8_t* tiles;   // (kStagesAll, kStageSize), of which kRing are the ring's
    uint64_t* full;   // (kRing,) the copies have arrived
    uint64_t* empty;  // (kRing,) both warpgroups are done

    __device__ explicit SharedRing(uint8_t* raw)
        : tiles(raw + (1024 - ptx::shared_address(raw) % 1024) % 1024),
          full(reinterpret_cast<uint64_t*>(tiles + kStagesAll * kStageSize)),
          empty(full + kRing) {}

    __device__ void init() const {
        if (threadIdx.x == 0) {
            for (int i = 0; i < kRing; ++i) {
                ptx::barrier_init(&full[i], 1);
                ptx::barrier_init(&empty[i], 8);  // the consumer warps
            }
            ptx::fence_barrier_init();
        }
        __syncthreads();
    }
};

// ---- producer
template <int kRing>
struct Writer {
    const SharedRing<kRing>& shared;
    Ring<kRing> ring;

    // The next stage, once it is free; `bytes` will arrive there.
    __device__ uint8_t* take(uint32_t bytes, uint64_t** full) {
        ptx::barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
        *full = &shared.full[ring.stage];
        ptx::barrier_arrive_expect_bytes(*full, bytes);
        uint8_t* stage = shared.tiles + ring.stage * kStageSize;
        ring.advance();
        return stage;
    }
    // Stages that the consumers fill themselves.
    __device__ void give(int count) {
        for (int i = 0; i < count; ++i) {
            ptx::barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
            ptx::barrier_arrive(&shared.full[ring.stage]);
            ring.advance();
        }
    }

    // Operands of a product of scores: `left` rows row0.., all rows of `right`.
    template <int kDim>
    __device__ void scores(const CUtensorMap* left, const CUtensorMap* right, const Work& at) {
        constexpr int kTiles = kDim / kTileChannels, kLeftBytes = kQueries * kTileChannels * 2;
        uint64_t* full;
#pragma unroll 1
        for (int t = 0; t < kTiles; ++t) {
            if (t % 2 == 0) {
                const int count = min(2, kTiles - t);
                uint8_t* stage = take(count * kLeftBytes, &full);
                for (int i = 0; i < count; ++i)
                    ptx::copy_picture_box(stage + i * kLeftBytes, left, full, (t + i) * kTileChannels,
                                          at.row0, at.head, at.image);
            }
            uint8_t* stage = take(kStageSize, &full);
            ptx::copy_picture_box(stage, right, full, t * kTileChannels, 0, at.head, at.image);
        }
    }
};

// ---- consumers

// The value of lane 0, which all lanes share, in uniform registers, where wgmma takes its descriptors from.
__device__ inline uint32_t uniform(uint32_t value) { return __shfl_sync(0xFFFFFFFFu, value, 0); }

// K-major operands: atoms of eight rows 1024 bytes apart.
__device__ inline uint64_t k_major(uint32_t address) { return ptx::wgmma_descriptor(uniform(address), 1024); }

template <int kRing>
struct Reader {
    uint32_t tiles, full, empty;  // addresses
    int group, lane;              // warpgroup, 0 or 1
    Ring<kRing> ring;
    int storing = -1;  // stage that this warpgroup's stores still read

    __device__ explicit Reader(const SharedRing<kRing>& shared)
        : tiles(uniform(ptx::shared_address(shared.tiles))),
          full(uniform(ptx::shared_address(shared.full))),
          empty(uniform(ptx::shared_address(shared.empty))),
          group(static_cast<int>(uniform(threadIdx.x / 128 - 1))),
          lane(threadIdx.x % 32) {}

    // First row of this thread's fragments.
    __device__ int row(const Work& at) const {
        return at.row0 + 64 * group + static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane / 4;
    }
    __device__ uint32_t address(int stage) const { return tiles + stage * kStageSize; }
    // Number of the next stage, once it is full.
    __device__ int take() {
        const int stage = ring.stage;
        ptx::barrier_wait(full + 8 * stage, ring.parity);
        ring.advance();
        return stage;
    }
    // This warp is done with it.
    __device__ void release(int stage) const {
        if (lane == 0) ptx::barrier_arrive(empty + 8 * stage);
    }
    __device__ void sync() const { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); }

    // The two stages of a result: this warpgroup's own; the other one is the other's.
    __device__ uint32_t take_own() {
        if (group == 1) release(take());
        storing = take();
        if (group == 0) release(take());
        return address(storing);
    }
    // The own stage holds `boxes` boxes: they go to the rows of `map` that belong to this warpgroup.
    __device__ void store(const CUtensorMap* map, int boxes, const Work& at) {
        ptx::fence_async_shared();
        sync();
        if (threadIdx.x % 128 >= 32) return release(storing);
        if (!ptx::elect()) return;
        for (int i = 0; i < boxes; ++i)
            ptx::store_picture_box(map, address(storing) + i * kBoxBytes, i * 64, at.row0 + 64 * group,
                                   at.head, at.image);
        ptx::store_commit();
    }
    // Once the stores have read their stage, the thread that issued them knows.
    __device__ void release_storing() {
        if (storing >= 0 && threadIdx.x % 128 < 32) {
            ptx::store_wait_read();
            __syncwarp();
            release(storing);
        }
        storing = -1;
    }

    // sum (64, kKeys) = this warpgroup's rows of the left operand times the rows of the right one.
    template <int kDim>
    __device__ void scores(float (&sum)[kKeys / 2]) {
        using Mma = ptx::Bf16Mma<kKeys, false, false>;
        constexpr int kTiles = kDim / kTileChannels, kLeftBytes = kQueries * kTileChannels * 2;
        int left = 0, right = 0;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            const int before[2] = {left, right};
            if (t % 2 == 0) left = take();
            right = take();
            const uint64_t a = k_major(address(left) + t % 2 * kLeftBytes + group * (kLeftBytes / 2)),
                           b = k_major(address(right));
            ptx::wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (t == 0 && i == 0)
                    Mma::begin(sum, a, b);
                else
                    Mma::mma(sum, a + 2 * i, b + 2 * i);
            }
            ptx::wgmma_commit();
            if (t == 0) {
                release_storing();
                continue;
            }
            ptx::wgmma_wait<1>();
            release(before[1]);
            if (t % 2 == 0) release(before[0]);
        }
        ptx::wgmma_wait<0>();
        release(right);
        release(left);
    }
};

// 2^x; results under 2^-126 are zero.
__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_half(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// Over the four threads that hold a row.
__device__ inline float row_max(float v) {
    v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, 1));
    return fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, 2));
}
__device__ inline float row_sum(float v) {
    v += __shfl_xor_sync(0xFFFFFFFFu, v, 1);
    return v + __shfl_xor_sync(0xFFFFFFFFu, v, 2);
}

// Scores times `scale`; -inf where a query does not see the key. `row`: of this thread's first row.
__device__ inline void scale_and_mask(float (&s)[kKeys / 2], float scale, int row, int keys, bool causal) {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) s[i] *= scale;
    if (keys == kKeys && !causal) return;
    const int limit[2] = {causal ? min(keys, row + 1) : keys, causal ? min(keys, row + 9) : keys};
    const int first = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i)
        if (first + column_of(i) >= limit[lower(i)]) s[i] = -INFINITY;
}

// Where the pairs `first` .. first + 3 of a fragment (16 rows of this warp x 16 columns) lie in a stage of
// boxes, for ldmatrix and stmatrix.
__device__ inline uint32_t pairs_address(int first, uint32_t stage) {
    const uint32_t row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16;
    const uint32_t chunk = (first % 16 / 2 + threadIdx.x % 32 / 16) ^ (row % 8);
    return stage + first / 16 * kBoxBytes + row * 128 + chunk * 16;
}

// A box (64 rows x 64 columns) of a fragment given as packed pairs.
__device__ inline void stage_pairs(const uint32_t (&pairs)[16], uint32_t box) {
#pragma unroll
    for (int i = 0; i < 16; i += 4)
        ptx::store_matrices(pairs_address(i, box), pairs[i], pairs[i + 1], pairs[i + 2], pairs[i + 3]);
}

// ---- host

// Whether TMA reads and writes an array: 16-byte addresses and steps, ascending.
inline bool tma_takes(const void* pointer, const fp4bf16_attention_args& a, int64_t tokens,
                      const int64_t (&strides)[3]) {
    const int64_t counts[3] = {a.n, tokens, a.heads};
    for (int i = 0; i < 3; ++i)
        if (counts[i] > 1 && (strides[i] < 8 || strides[i] % 8 != 0 || strides[i] >= int64_t{1} << 38))
            return false;
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

// Boxes of 64 channels and `rows` tokens of one head.
inline fp4bf16_status make_head_map(const char* op, const char* name, const void* pointer,
                                    const fp4bf16_attention_args& a, int64_t tokens,
                                    const int64_t (&strides)[3], int64_t columns, int rows,
                                    CUtensorMap* map) {
    const int64_t by_picture[3] = {strides[0], strides[2], strides[1]};  // images, heads, tokens
    const PictureShape shape{columns, tokens, a.heads, a.n, by_picture, {kTileChannels, rows, 1, 1}, 1};
    return make_picture_map(op, name, pointer, 2, shape, map);
}

// The persistent grid of a kernel, at most one block a multiprocessor; raises its limit of shared memory.
template <class Kernel>
fp4bf16_status persistent_grid(const char* op, Kernel kernel, int64_t tiles, unsigned* grid) {
    int device = 0, count = 0;
    FP4BF16_TRY(cuda_result(cudaGetDevice(&device), op));
    FP4BF16_TRY(cuda_result(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), op));
    FP4BF16_TRY(cuda_result(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedSize), op));
    *grid = static_cast<unsigned>(tiles < count ? tiles : count);
    return FP4BF16_OK;
}

}  // namespace fp4bf16
