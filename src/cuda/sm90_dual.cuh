// The dual-track GEMM of Hopper: E4M3 k-tiles, then BF16 k-tiles into the same FP32 registers. A k-tile is
// 128 bytes of K, whatever the type, so both tracks share one ring of stages in shared memory. Without BF16
// tiles this is the FP4 (FP8) GEMM, without E4M3 tiles the BF16 GEMM.
//
// One producer warpgroup (one thread of it issues TMA copies), two consumer warpgroups (wgmma, epilogue); the
// grid is persistent. CTAs of a cluster share the larger operand tile: each loads half of it and multicasts.
#pragma once

#include "launch.cuh"
#include "pipeline.cuh"
#include "scheduler.cuh"
#include "wgmma.cuh"

namespace fp4bf16 {

struct DualParams {
    CUtensorMap a8, b8, a16, b16, d;
    int k8_tiles, k16_tiles;
    int k16_steps;  // wgmmas (k = 16) in the last BF16 tile
    int a_div, a_mod, b_div, b_mod;
    bool staged;  // the result leaves through shared memory, by `d`; else from the registers
    Schedule schedule;
    Epilogue epilogue;
    const int32_t* run_if;
};

// ---- producer

// One operand's tile of `kRows` rows (of M or N) from row `row` and k-tile `k`. Shared by a cluster (kShare =
// 2): this CTA loads its half and sends it to both.
template <int kRows, int kShare, bool kMnMajor>
__device__ inline void load_tile(uint8_t* tile, const CUtensorMap* map, uint64_t* full, int k, int row, int z,
                                 int tile_elements, int rank) {
    constexpr int kPart = kRows / kShare;  // rows of this CTA
    const int first = kShare == 1 ? 0 : rank * kPart;
    constexpr uint16_t kMask = (1 << kShare) - 1;
    if constexpr (kMnMajor) {  // blocks of 64 rows x 64 k, k outside
#pragma unroll
        for (int i = 0; i < kPart; i += 64) {
            uint8_t* target = tile + (first + i) * kTileBytes;
            if constexpr (kShare == 1)
                ptx::copy_box(target, map, full, row + first + i, k * tile_elements, z);
            else
                ptx::copy_box_multicast(target, map, full, row + first + i, k * tile_elements, z, kMask);
        }
    } else {
        uint8_t* target = tile + first * kTileBytes;
        if constexpr (kShare == 1)
            ptx::copy_box(target, map, full, k * tile_elements, row + first, z);
        else
            ptx::copy_box_multicast(target, map, full, k * tile_elements, row + first, z, kMask);
    }
}

// Where a CTA's part of a cluster tile lies.
template <class C>
struct TileCorner {
    int m, n, z, za, zb;

    __device__ TileCorner(const DualParams& p, int tile, int rank) {
        int cm, cn;
        p.schedule.locate(tile, &cm, &cn, &z);
        m = (cm * C::kClusterM + (C::kClusterM > 1 ? rank : 0)) * C::kTileM;
        n = (cn * C::kClusterN + (C::kClusterN > 1 ? rank : 0)) * C::kTileN;
        za = z == 0 ? 0 : z / p.a_div % p.a_mod;
        zb = z == 0 ? 0 : z / p.b_div % p.b_mod;
    }
};

template <class C>
__device__ inline void produce(const DualParams& p, const SharedStages<C>& shared, int cluster, int clusters,
                               int rank) {
    Ring<C::kStages> ring;
    for (int tile = cluster; tile < p.schedule.total(); tile += clusters) {
        const TileCorner<C> at(p, tile, rank);
        auto load = [&](const CUtensorMap* a, const CUtensorMap* b, int k, int tile_elements) {
            ptx::barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
            uint64_t* full = &shared.full[ring.stage];
            ptx::barrier_arrive_expect_bytes(full, C::kStageBytes);
            load_tile<C::kTileM, C::kClusterN, C::kAM>(shared.a(ring.stage), a, full, k, at.m, at.za,
                                                       tile_elements, rank);
            load_tile<C::kTileN, C::kClusterM, C::kBN>(shared.b(ring.stage), b, full, k, at.n, at.zb,
                                                       tile_elements, rank);
            ring.advance();
        };
        if constexpr (C::kE4m3)
            for (int k = 0; k < p.k8_tiles; ++k) load(&p.a8, &p.b8, k, 128);
        for (int k = 0; k < p.k16_tiles; ++k) load(&p.a16, &p.b16, k, 64);
        if (p.staged) {  // the next stage is the consumers' own
            ptx::barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
            ptx::barrier_arrive(&shared.full[ring.stage]);
            ring.advance();
        }
    }
}

// ---- consumers

template <class C>
using Accumulators = float[C::kWaves][C::kAccumulators];

// The value of lane 0, which all lanes share: the compiler then keeps it, and what is computed from it, in
// uniform registers, where wgmma takes its descriptors from.
__device__ inline uint32_t uniform(uint32_t value) { return __shfl_sync(0xFFFFFFFFu, value, 0); }

// What one consumer warpgroup keeps. kOwn: it tells the producer when its staging memory is free
// (the barrier behind those of the ring), kTails: every `period`-th k-tile is cut short, at `tail` steps.
template <class C, bool kOwn = false, bool kTails = false>
struct Consumer {
    static constexpr uint32_t kStageStep = C::kStageBytes >> 4;  // in descriptors
    static constexpr uint32_t kWaveStep = 64 * kTileBytes >> 4;

    Ring<C::kStages> ring;
    uint32_t full, empty;     // addresses of the barriers
    uint32_t a_tile, b_tile;  // lower halves of the descriptors of this warpgroup's rows in stage 0
    uint32_t offset = 0;      // of the stage that was waited for last
    int held = -1;            // stage that wgmmas in flight still read
    int storing = -1;         // stage that this warpgroup's stores still read
    uint32_t next_turn = 0;   // in turn: address of the other's barrier, 0 where this tile has another track
    int period = 0, tail = 4, left = 0;

    __device__ Consumer(const SharedStages<C>& shared, int group)
        : full(uniform(ptx::shared_address(shared.full))),
          empty(uniform(ptx::shared_address(shared.empty))),
          a_tile(uniform(static_cast<uint32_t>(ptx::wgmma_descriptor(
              ptx::shared_address(shared.a(0)) + group * C::kWaves * 64 * kTileBytes, 1024)))),
          b_tile(uniform(static_cast<uint32_t>(
              ptx::wgmma_descriptor(ptx::shared_address(shared.b(0)), 1024, C::kBN ? 8192 : 16)))) {}

    // The upper half of every descriptor here: atoms 1024 bytes apart, the 128-byte swizzle.
    static constexpr uint64_t kUpper = (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 62);

    __device__ bool arrived_already() const { return ptx::barrier_test(full + 8 * ring.stage, ring.parity); }
    __device__ void wait_full() {
        offset = uniform(kStageStep * ring.stage);
        ptx::barrier_wait(full + 8 * ring.stage, ring.parity);
    }
    __device__ uint64_t a(int wave, int step) const {
        return kUpper | (a_tile + offset + kWaveStep * wave + step);
    }
    __device__ uint64_t b(int step) const { return kUpper | (b_tile + offset + step); }

    // Tells every CTA that writes to this stage that this warp is done with it.
    __device__ void release(int stage) {
        const uint32_t lane = threadIdx.x % 32;
        if constexpr (C::kCluster == 1) {
            if (lane == 0) ptx::barrier_arrive(empty + 8 * stage);
        } else {
            if (lane < C::kCluster) ptx::barrier_arrive_at(empty + 8 * stage, lane);
        }
    }

    // The stage that holds a result is free once the stores have read it, which the thread that issued them
    // knows; the other warps are done with it at once. Called in the next tile, before a barrier of the
    // warpgroup.
    __device__ void release_storing() {
        if (storing < 0) return;
        if (threadIdx.x % 128 < 32) {
            ptx::store_wait_read();
            __syncwarp();
            release(storing);
            if (kOwn && threadIdx.x % 128 == 0) ptx::barrier_arrive(empty + 8 * C::kStages);
        }
        storing = -1;
    }
    __device__ void give_to_stores() {
        if (threadIdx.x % 128 >= 32) release(ring.stage);
        storing = ring.stage;
        ring.advance();
    }

    // After the wgmmas of this k-tile were committed: those before are finished, their stage is free.
    __device__ void move_on() {
        ptx::wgmma_wait<1>();
        if (held >= 0) release(held);
        held = ring.stage;
        ring.advance();
        release_storing();
    }
    __device__ void drain() {
        if (C::kInTurn && next_turn != 0 && threadIdx.x % 32 == 0) ptx::barrier_arrive(next_turn);
        ptx::wgmma_wait<0>();
        if (held >= 0) release(held);
        held = -1;
    }

    // The wgmmas of `kSteps` times 32 bytes of K of one stage. Sums are added to (kAdd), begun in registers
    // that held nothing (kBegin), or begun anew in registers that keep their place (kRenew).
    enum First { kAdd, kBegin, kRenew };
    template <First kFirst, class Mma, int kSteps, int kAStep, int kBStep>
    __device__ void multiply(float (&sum)[C::kAccumulators], int wave) {
        if constexpr (kFirst == kBegin)
            Mma::begin(sum, a(wave, 0), b(0));
        else
            Mma::mma(sum, a(wave, 0), b(0), kFirst == kAdd);
#pragma unroll
        for (int i = 1; i < kSteps; ++i) Mma::mma(sum, a(wave, kAStep * i), b(kBStep * i));
    }

    // Whether the k-tile at hand is one that is cut short; a first tile never needs to be, what lies beyond
    // is zero in one operand.
    __device__ bool at_tail() {
        if constexpr (!kTails) return false;
        if (--left > 0) return false;
        left = period;
        return tail < 4;
    }

    template <First kFirst, int kSteps = 4>
    __device__ void e4m3_tile(Accumulators<C>& acc) {
        wait_full();
        ptx::wgmma_fence();
#pragma unroll
        for (int wave = 0; wave < C::kWaves; ++wave)
            multiply<kFirst, ptx::E4m3Mma<C::kTileN>, kSteps, 2, 2>(acc[wave], wave);
        ptx::wgmma_commit();
    }

    // E4M3 k-tiles, sums kept by the tensor core (about 14 bits).
    __device__ void e4m3_fast(Accumulators<C>& acc, int tiles) {
        left = period;
        at_tail();
        e4m3_tile<kBegin>(acc);
        move_on();
        for (int k = 1; k < tiles; ++k) {
            if (at_tail())
                e4m3_tile<kAdd, kTails ? 2 : 4>(acc);
            else
                e4m3_tile<kAdd>(acc);
            move_on();
        }
        drain();
    }

    template <int kSteps>
    __device__ void e4m3_part(float (&part)[C::kAccumulators], int wave) {
        ptx::wgmma_fence();
        multiply<kRenew, ptx::E4m3Mma<C::kTileN>, kSteps, 2, 2>(part, wave);
        ptx::wgmma_commit();
    }

    // E4M3 k-tiles, each summed from zero and added in FP32. The other warpgroup's wgmmas must cover all that
    // this one does between two of its own. So whether the next tile has arrived is asked while this one is
    // multiplied, and where there are two sums a tile the last is added while the next tile's address is
    // fetched.
    __device__ void e4m3_promoted(Accumulators<C>& acc, int tiles) {
        constexpr int kLast = C::kWaves - 1;
        constexpr bool kDefer = C::kWaves > 1;
        float part[C::kAccumulators];
#pragma unroll
        for (int i = 0; i < C::kAccumulators; ++i) part[i] = -0.0f;  // adds nothing to any number
        left = period;
        at_tail();
        e4m3_tile<kBegin>(acc);  // onto nothing: needs no second sum
        int stage = ring.stage;
        ring.advance();
        bool arrived = tiles > 1 && arrived_already();
        ptx::wgmma_wait<0>();
        release(stage);
        release_storing();
        for (int k = 1; k < tiles; ++k) {
            offset = uniform(kStageStep * ring.stage);
            if (kDefer) add(acc[kLast], part);
            if (!arrived) ptx::barrier_wait(full + 8 * ring.stage, ring.parity);
            stage = ring.stage;
            ring.advance();
            const bool cut = at_tail();
#pragma unroll
            for (int wave = 0; wave < C::kWaves; ++wave) {
                if (cut)
                    e4m3_part<kTails ? 2 : 4>(part, wave);
                else
                    e4m3_part<4>(part, wave);
                if (wave == kLast) arrived = k + 1 < tiles && arrived_already();
                ptx::wgmma_wait<0>();
                if (wave == kLast) release(stage);
                if (!kDefer || wave != kLast) add(acc[wave], part);
            }
        }
        if (kDefer) add(acc[kLast], part);
    }
    __device__ static void add(float (&sum)[C::kAccumulators], const float (&part)[C::kAccumulators]) {
#pragma unroll
        for (int i = 0; i < C::kAccumulators; ++i) sum[i] += part[i];
    }

    // One BF16 k-tile of `kSteps` times k = 16; what lies beyond is zero and not multiplied.
    template <int kSteps, First kFirst>
    __device__ void bf16_tile(Accumulators<C>& acc) {
        wait_full();
        ptx::wgmma_fence();
#pragma unroll
        for (int wave = 0; wave < C::kWaves; ++wave)
            multiply<kFirst, ptx::Bf16Mma<C::kTileN, C::kAM, C::kBN>, kSteps, C::kAM ? 2048 >> 4 : 2,
                     C::kBN ? 2048 >> 4 : 2>(acc[wave], wave);
        ptx::wgmma_commit();
        move_on();
    }

    // kEmpty: the accumulators hold nothing yet. The copy engine fills what lies beyond k with zeros, so that
    // a first tile may be multiplied whole.
    template <bool kEmpty>
    __device__ void bf16(Accumulators<C>& acc, int tiles, int steps) {
        left = period;
        if constexpr (kEmpty) {
            at_tail();
            bf16_tile<4, kBegin>(acc);
            if (--tiles == 0) return drain();
        }
        for (int k = 0; k < tiles - 1; ++k) {
            if (at_tail())
                bf16_last(acc, tail);
            else
                bf16_tile<4, kAdd>(acc);
        }
        bf16_last(acc, steps);
        drain();
    }
    __device__ void bf16_last(Accumulators<C>& acc, int steps) {
        switch (steps) {
            case 1:
                bf16_tile<1, kAdd>(acc);
                break;
            case 2:
                bf16_tile<2, kAdd>(acc);
                break;
            case 3:
                bf16_tile<3, kAdd>(acc);
                break;
            default:
                bf16_tile<4, kAdd>(acc);
        }
    }
};

template <class C>
__device__ inline void row_scales(const Epilogue& e, int row, int za, float (&scale)[C::kWaves][2]) {
#pragma unroll
    for (int i = 0; i < 2 * C::kWaves; ++i) {
        const int r = row + i / 2 * 64 + i % 2 * 8;
        scale[i / 2][i % 2] =
            e.row_scale != nullptr && r < e.m ? __ldg(e.row_scale + za * e.row_batch + r * e.row_step) : 1.0f;
    }
}

// Through shared memory, in boxes of 64 rows and 64 columns, which one thread hands to the copy engine.
template <class C>
__device__ inline void store_staged(const DualParams& p, const SharedStages<C>& shared, int stage,
                                    const Accumulators<C>& acc, int group, int m, int n, int z) {
    constexpr int kBoxes = C::kTileN / 64;  // of a fragment
    const uint32_t in_stage = uniform(ptx::shared_address(shared.a(stage)));
    const uint32_t in_own = uniform(ptx::shared_address(shared.staging)) - C::kStageBytes;
    auto memory = [&](int wave, int i) -> uint32_t {
        const int at = ((group * C::kWaves + wave) * kBoxes + i) * kBoxBytes;
        return (at < C::kStageBytes ? in_stage : in_own) + at;
    };
#pragma unroll
    for (int wave = 0; wave < C::kWaves; ++wave)
#pragma unroll
        for (int i = 0; i < kBoxes; ++i) {
            if (p.epilogue.d_dtype == FP4BF16_BFLOAT16)
                stage_box<FP4BF16_BFLOAT16>(acc[wave], i, memory(wave, i));
            else
                stage_box<FP4BF16_FLOAT16>(acc[wave], i, memory(wave, i));
        }
    ptx::fence_async_shared();
    asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
    if (threadIdx.x % 128 >= 32 || !ptx::elect()) return;
#pragma unroll
    for (int wave = 0; wave < C::kWaves; ++wave)
#pragma unroll
        for (int i = 0; i < kBoxes; ++i)
            ptx::store_box(&p.d, memory(wave, i), n + 64 * i, m + 64 * (group * C::kWaves + wave), z);
    ptx::store_commit();
}

template <class C>
__device__ inline void consume(const DualParams& p, const SharedStages<C>& shared, int cluster, int clusters,
                               int rank) {
    const int group = uniform(threadIdx.x / 128 - 1), lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const Epilogue& e = p.epilogue;
    const bool scaled = e.row_scale != nullptr || e.col_scale != nullptr;
    const bool e4m3 = C::kE4m3 && p.k8_tiles > 0;
    Consumer<C> c(shared, group);
    ColumnVectors<C::kTileN> columns(shared.columns + group * ColumnVectors<C::kTileN>::kFloats);
    for (int tile = cluster; tile < p.schedule.total(); tile += clusters) {
        const TileCorner<C> at(p, tile, rank);
        const int row = at.m + group * C::kWaves * 64 + warp * 16 + lane / 4, col = at.n + lane % 4 * 2;
        Accumulators<C> acc;
        float by_row[C::kWaves][2];
        row_scales<C>(e, row, at.za, by_row);
        columns.load(e, at.n, at.zb);
        auto scale = [&] {
            if (!scaled) return;
#pragma unroll
            for (int wave = 0; wave < C::kWaves; ++wave)
                scale_fragment(acc[wave], by_row[wave], columns.scales());
        };
        if constexpr (C::kE4m3) {
            if (e4m3) {
                if constexpr (C::kPromote)
                    c.e4m3_promoted(acc, p.k8_tiles);
                else
                    c.e4m3_fast(acc, p.k8_tiles);
                columns.publish(1 + group);
                scale();
            }
        }
        if (e4m3 && p.k16_tiles > 0) {
            c.template bf16<false>(acc, p.k16_tiles, p.k16_steps);
        } else if (p.k16_tiles > 0) {
            c.template bf16<true>(acc, p.k16_tiles, p.k16_steps);
            columns.publish(1 + group);
            scale();
        }
        if (__builtin_expect(e.extra, 0))
#pragma unroll
            for (int wave = 0; wave < C::kWaves; ++wave)
                finish_fragment(e, acc[wave], columns.biases(), row + 64 * wave, col, at.z);
        if (p.staged) {
            c.wait_full();  // the stage that the producer left out
            store_staged<C>(p, shared, c.ring.stage, acc, group, at.m, at.n, at.z);
            c.give_to_stores();
        } else {
#pragma unroll
            for (int wave = 0; wave < C::kWaves; ++wave)
                store_fragment(e, acc[wave], row + 64 * wave, col, at.z);
        }
    }
    ptx::store_wait();
}

// ---- kernel

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) sm90_dual_gemm(const __grid_constant__ DualParams p) {
    if (skipped(p.run_if)) return;
    extern __shared__ uint8_t raw[];
    const SharedStages<C> shared(raw);
    const int rank = C::kCluster == 1 ? 0 : ptx::cluster_rank();
    const int cluster = blockIdx.x / C::kCluster, clusters = gridDim.x / C::kCluster;

    if (threadIdx.x == 0) {
        for (int i = 0; i < C::kStages; ++i) {
            ptx::barrier_init(&shared.full[i], 1);
            ptx::barrier_init(&shared.empty[i], 8 * C::kCluster);  // the consumer warps
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
            if (p.k8_tiles > 0) ptx::prefetch_map(&p.a8), ptx::prefetch_map(&p.b8);
            if (p.k16_tiles > 0) ptx::prefetch_map(&p.a16), ptx::prefetch_map(&p.b16);
            if (p.staged) ptx::prefetch_map(&p.d);
            wait_for_previous();
            produce<C>(p, shared, cluster, clusters, rank);
        }
        __syncwarp();
    } else {
        ptx::take_registers<232>();
        wait_for_previous();
        consume<C>(p, shared, cluster, clusters, rank);
    }
    // No CTA leaves while another may still write to its shared memory or arrive at its barriers.
    if constexpr (C::kCluster > 1) ptx::cluster_arrive(), ptx::cluster_wait();
}

}  // namespace fp4bf16
