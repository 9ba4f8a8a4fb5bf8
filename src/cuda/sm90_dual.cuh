// The dual-track GEMM of Hopper: E4M3 k-tiles, then BF16 k-tiles into the same FP32 registers. A k-tile is 128
// bytes of K, whatever the type, so both tracks share one ring of stages in shared memory. Without BF16 tiles this is
// the FP4 (FP8) GEMM, without E4M3 tiles the BF16 GEMM.
//
// One producer warpgroup (one thread of it issues TMA copies), two consumer warpgroups (wgmma, epilogue); the grid
// is persistent. CTAs of a cluster share the larger operand tile: each loads half of it and multicasts.
#pragma once

#include "epilogue.cuh"
#include "ptx.cuh"
#include "scheduler.cuh"
#include "wgmma.cuh"

namespace fp4bf16 {

constexpr int kTileBytes = 128;  // of K, in every k-tile

struct DualParams {
    CUtensorMap a8, b8, a16, b16;
    int k8_tiles, k16_tiles;
    int k16_steps;  // wgmmas (k = 16) in the last BF16 tile
    int a_div, a_mod, b_div, b_mod;
    Schedule schedule;
    Epilogue epilogue;
};

template <int kTileM_, int kTileN_, int kStages_, int kClusterM_, int kClusterN_, bool kPromote_, bool kAM_ = false,
          bool kBN_ = false>
struct DualConfig {
    static constexpr int kTileM = kTileM_, kTileN = kTileN_, kStages = kStages_;
    static constexpr int kClusterM = kClusterM_, kClusterN = kClusterN_, kCluster = kClusterM * kClusterN;
    static constexpr bool kPromote = kPromote_;          // E4M3 sums go to FP32 registers after every k-tile
    static constexpr bool kAM = kAM_, kBN = kBN_;        // BF16 operands are M-major, N-major
    static constexpr bool kE4m3 = !kAM && !kBN;          // wgmma takes E4M3 K-major alone
    static constexpr int kWaves = kTileM / 128;          // m64 fragments of a consumer warpgroup
    static constexpr int kABytes = kTileM * kTileBytes, kBBytes = kTileN * kTileBytes;
    static constexpr int kStageBytes = kABytes + kBBytes;
    static constexpr int kSharedBytes = kStages * kStageBytes + 2 * kStages * 8 + 1024;  // 1024: to align tiles
    static constexpr int kThreads = 384;
    static constexpr int kAccumulators = kTileN / 2;     // of one fragment and thread

    static_assert(kTileM % 128 == 0 && kTileM <= 256, "two consumer warpgroups take 64-row fragments in turn");
    static_assert(kTileN == 64 || kTileN == 128 || kTileN == 256, "wgmma.cuh has n = 64, 128, 256");
    static_assert(kCluster <= 2, "a cluster shares one operand");
    static_assert((kWaves + kPromote) * kAccumulators <= 192, "accumulators must fit 232 registers");
    static_assert(kSharedBytes <= 227 * 1024, "a block has 227 KiB of shared memory");
};

template <class C>
struct SharedStages {
    uint8_t* tiles;   // (kStages, A tile then B tile), each 1024-byte aligned
    uint64_t* full;   // (kStages,) the copies have arrived
    uint64_t* empty;  // (kStages,) the consumers of every CTA that writes here are done

    __device__ explicit SharedStages(uint8_t* raw)
        : tiles(raw + (1024 - ptx::shared_address(raw) % 1024) % 1024),
          full(reinterpret_cast<uint64_t*>(tiles + C::kStages * C::kStageBytes)),
          empty(full + C::kStages) {}
    __device__ uint8_t* a(int stage) const { return tiles + stage * C::kStageBytes; }
    __device__ uint8_t* b(int stage) const { return a(stage) + C::kABytes; }
};

// Position in the ring; `parity` is that of the phase to wait for.
template <int kStages>
struct Ring {
    int stage = 0;
    uint32_t parity = 0;
    __device__ void advance() {
        if (++stage == kStages) stage = 0, parity ^= 1;
    }
};

// ---- producer ----------------------------------------------------------------------------------------------

// One operand's tile of `kRows` rows (of M or N) from row `row` and k-tile `k`. Shared by a cluster (kShare = 2): this
// CTA loads its half and sends it to both.
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

template <class C>
__device__ inline void produce(const DualParams& p, const SharedStages<C>& shared, int cluster, int clusters, int rank) {
    Ring<C::kStages> ring;
    for (int64_t tile = cluster; tile < p.schedule.total(); tile += clusters) {
        int cm, cn, z;
        p.schedule.locate(tile, &cm, &cn, &z);
        const int m = (cm * C::kClusterM + (C::kClusterM > 1 ? rank : 0)) * C::kTileM;
        const int n = (cn * C::kClusterN + (C::kClusterN > 1 ? rank : 0)) * C::kTileN;
        const int za = z / p.a_div % p.a_mod, zb = z / p.b_div % p.b_mod;
        auto load = [&](const CUtensorMap* a, const CUtensorMap* b, int k, int tile_elements) {
            ptx::barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
            uint64_t* full = &shared.full[ring.stage];
            ptx::barrier_arrive_expect_bytes(full, C::kStageBytes);
            load_tile<C::kTileM, C::kClusterN, C::kAM>(shared.a(ring.stage), a, full, k, m, za, tile_elements, rank);
            load_tile<C::kTileN, C::kClusterM, C::kBN>(shared.b(ring.stage), b, full, k, n, zb, tile_elements, rank);
            ring.advance();
        };
        if constexpr (C::kE4m3)
            for (int k = 0; k < p.k8_tiles; ++k) load(&p.a8, &p.b8, k, 128);
        for (int k = 0; k < p.k16_tiles; ++k) load(&p.a16, &p.b16, k, 64);
    }
}

// ---- consumers ---------------------------------------------------------------------------------------------

template <class C>
struct Consumer {
    const SharedStages<C>& shared;
    Ring<C::kStages> ring;
    int group;  // consumer warpgroup 0 or 1
    int held = -1;  // stage that wgmmas in flight still read
    float acc[C::kWaves][C::kAccumulators];

    __device__ Consumer(const SharedStages<C>& shared, int group) : shared(shared), group(group) {}

    // Tells every CTA that writes to this stage that this warp is done with it.
    __device__ void release(int stage) {
        const uint32_t lane = threadIdx.x % 32;
        if constexpr (C::kCluster == 1) {
            if (lane == 0) ptx::barrier_arrive(&shared.empty[stage]);
        } else {
            if (lane < C::kCluster) ptx::barrier_arrive_at(&shared.empty[stage], lane);
        }
    }

    __device__ uint64_t a_tile(int wave) const {
        const uint32_t rows = (group * C::kWaves + wave) * 64;
        return ptx::wgmma_descriptor(ptx::shared_address(shared.a(ring.stage)) + rows * kTileBytes, 1024);
    }
    __device__ uint64_t b_tile() const {
        return ptx::wgmma_descriptor(ptx::shared_address(shared.b(ring.stage)), 1024, C::kBN ? 8192 : 16);
    }

    // After the wgmmas of this k-tile were committed: those before are finished, their stage is free.
    __device__ void move_on() {
        ptx::wgmma_wait<1>();
        if (held >= 0) release(held);
        held = ring.stage;
        ring.advance();
    }
    __device__ void drain() {
        ptx::wgmma_wait<0>();
        if (held >= 0) release(held);
        held = -1;
    }

    // E4M3 k-tiles, sums kept by the tensor core (about 14 bits).
    __device__ void e4m3_fast(int tiles) {
        for (int k = 0; k < tiles; ++k) {
            ptx::barrier_wait(&shared.full[ring.stage], ring.parity);
            ptx::wgmma_fence();
            const uint64_t b = b_tile();
#pragma unroll
            for (int wave = 0; wave < C::kWaves; ++wave) {
                const uint64_t a = a_tile(wave);
#pragma unroll
                for (int i = 0; i < 4; ++i)  // 32 bytes of K each
                    ptx::E4m3Mma<C::kTileN>::mma(acc[wave], a + 2 * i, b + 2 * i, i > 0 || k > 0);
            }
            ptx::wgmma_commit();
            move_on();
        }
        drain();
    }

    // E4M3 k-tiles, each summed from zero in `part` and added in FP32.
    __device__ void e4m3_promoted(int tiles) {
#pragma unroll
        for (int wave = 0; wave < C::kWaves; ++wave)
#pragma unroll
            for (int i = 0; i < C::kAccumulators; ++i) acc[wave][i] = 0.0f;
        for (int k = 0; k < tiles; ++k) {
            ptx::barrier_wait(&shared.full[ring.stage], ring.parity);
            const uint64_t b = b_tile();
#pragma unroll
            for (int wave = 0; wave < C::kWaves; ++wave) {
                float part[C::kAccumulators];
                const uint64_t a = a_tile(wave);
                ptx::wgmma_fence();
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    ptx::E4m3Mma<C::kTileN>::mma(part, a + 2 * i, b + 2 * i, i > 0);
                ptx::wgmma_commit();
                ptx::wgmma_wait<0>();
                if (wave == C::kWaves - 1) release(ring.stage);
#pragma unroll
                for (int i = 0; i < C::kAccumulators; ++i) acc[wave][i] += part[i];
            }
            ring.advance();
        }
    }

    // One BF16 k-tile of `steps` times k = 16; what lies beyond is zero and not multiplied.
    template <int kSteps>
    __device__ void bf16_tile(bool first) {
        constexpr int kAStep = C::kAM ? 2048 >> 4 : 2, kBStep = C::kBN ? 2048 >> 4 : 2;
        ptx::barrier_wait(&shared.full[ring.stage], ring.parity);
        ptx::wgmma_fence();
        const uint64_t b = b_tile();
#pragma unroll
        for (int wave = 0; wave < C::kWaves; ++wave) {
            const uint64_t a = a_tile(wave);
#pragma unroll
            for (int i = 0; i < kSteps; ++i)
                ptx::Bf16Mma<C::kTileN, C::kAM, C::kBN>::mma(acc[wave], a + kAStep * i, b + kBStep * i,
                                                             i > 0 || !first);
        }
        ptx::wgmma_commit();
        move_on();
    }

    __device__ void bf16(int tiles, int steps, bool first) {
        for (int k = 0; k < tiles - 1; ++k) bf16_tile<4>(first && k == 0);
        first = first && tiles == 1;
        switch (steps) {
            case 1: bf16_tile<1>(first); break;
            case 2: bf16_tile<2>(first); break;
            case 3: bf16_tile<3>(first); break;
            default: bf16_tile<4>(first);
        }
        drain();
    }

    __device__ void scale(const Epilogue& e, int row, int col, int za, int zb) {
#pragma unroll
        for (int wave = 0; wave < C::kWaves; ++wave) scale_fragment(e, acc[wave], row + 64 * wave, col, za, zb);
    }
};

template <class C>
__device__ inline void consume(const DualParams& p, const SharedStages<C>& shared, int cluster, int clusters, int rank) {
    const int group = threadIdx.x / 128 - 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    Consumer<C> c(shared, group);
    for (int64_t tile = cluster; tile < p.schedule.total(); tile += clusters) {
        int cm, cn, z;
        p.schedule.locate(tile, &cm, &cn, &z);
        const int m = (cm * C::kClusterM + (C::kClusterM > 1 ? rank : 0)) * C::kTileM;
        const int n = (cn * C::kClusterN + (C::kClusterN > 1 ? rank : 0)) * C::kTileN;
        const int row = m + group * C::kWaves * 64 + warp * 16 + lane / 4, col = n + lane % 4 * 2;
        const int za = z / p.a_div % p.a_mod, zb = z / p.b_div % p.b_mod;
        const bool e4m3 = C::kE4m3 && p.k8_tiles > 0;
        if constexpr (C::kE4m3) {
            if (e4m3) {
                if constexpr (C::kPromote) c.e4m3_promoted(p.k8_tiles);
                else c.e4m3_fast(p.k8_tiles);
                c.scale(p.epilogue, row, col, za, zb);
            }
        }
        if (p.k16_tiles > 0) {
            c.bf16(p.k16_tiles, p.k16_steps, !e4m3);
            if (!e4m3) c.scale(p.epilogue, row, col, za, zb);
        }
#pragma unroll
        for (int wave = 0; wave < C::kWaves; ++wave)
            store_fragment(p.epilogue, c.acc[wave], row + 64 * wave, col, z);
    }
}

// ---- kernel ------------------------------------------------------------------------------------------------

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) sm90_dual_gemm(const __grid_constant__ DualParams p) {
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
    if constexpr (C::kCluster == 1) __syncthreads();
    else ptx::cluster_arrive(), ptx::cluster_wait();

    if (threadIdx.x < 128) {
        ptx::give_registers<40>();
        if (threadIdx.x < 32 && ptx::elect()) {
            if (p.k8_tiles > 0) ptx::prefetch_map(&p.a8), ptx::prefetch_map(&p.b8);
            if (p.k16_tiles > 0) ptx::prefetch_map(&p.a16), ptx::prefetch_map(&p.b16);
            produce<C>(p, shared, cluster, clusters, rank);
        }
        __syncwarp();
    } else {
        ptx::take_registers<232>();
        consume<C>(p, shared, cluster, clusters, rank);
    }
    // No CTA leaves while another may still write to its shared memory or arrive at its barriers.
    if constexpr (C::kCluster > 1) ptx::cluster_arrive(), ptx::cluster_wait();
}

}  // namespace fp4bf16
