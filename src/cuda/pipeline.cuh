// What a configuration of the dual-track GEMM is, and the ring of stages in shared memory between its
// producer and its consumers.
#pragma once

#include "epilogue.cuh"
#include "ptx.cuh"

namespace fp4bf16 {

constexpr int kTileBytes = 128;         // of K, in every k-tile
constexpr int kBoxBytes = 64 * 64 * 2;  // of a result, 64 rows x 64 columns

template <int kTileM_, int kTileN_, int kStages_, int kClusterM_, int kClusterN_, bool kPromote_,
          bool kAM_ = false, bool kBN_ = false>
struct DualConfig {
    static constexpr int kTileM = kTileM_, kTileN = kTileN_, kStages = kStages_;
    static constexpr int kClusterM = kClusterM_, kClusterN = kClusterN_, kCluster = kClusterM * kClusterN;
    static constexpr bool kPromote = kPromote_;    // E4M3 sums go to FP32 registers after every k-tile
    static constexpr bool kAM = kAM_, kBN = kBN_;  // BF16 operands are M-major, N-major
    static constexpr bool kE4m3 = !kAM && !kBN;    // wgmma takes E4M3 K-major alone
    static constexpr bool kInTurn = false;         // the consumers share each tile
    static constexpr int kWaves = kTileM / 128;    // m64 fragments of a consumer warpgroup
    static constexpr int kABytes = kTileM * kTileBytes, kBBytes = kTileN * kTileBytes;
    static constexpr int kStageBytes = kABytes + kBBytes;
    // A 16-bit result is staged in a stage of the ring that the producer leaves out, and what does not fit
    // there in memory of its own, so that it is stored while the next tile is multiplied.
    static constexpr int kStagingBytes = kTileM * kTileN * 2;
    static constexpr int kBorrowedBytes = kStageBytes;
    static constexpr int kOwnStagingBytes = kStagingBytes > kStageBytes ? kStagingBytes - kStageBytes : 0;
    static constexpr int kColumnBytes = 2 * ColumnVectors<kTileN>::kFloats * 4;  // of both warpgroups
    static constexpr int kSharedBytes =
        kStages * kStageBytes + kOwnStagingBytes + kColumnBytes + 2 * kStages * 8 + 1024;  // to align
    static constexpr int kThreads = 384;
    static constexpr int kAccumulators = kTileN / 2;  // of one fragment and thread

    static_assert(kTileM % 128 == 0 && kTileM <= 256,
                  "two consumer warpgroups take 64-row fragments in turn");
    static_assert(kTileN % 32 == 0 && kTileN <= 256, "wgmma.cuh and wgmma_conv.cuh say which n there are");
    static_assert(kCluster <= 2, "a cluster shares one operand");
    static_assert((kWaves + kPromote) * kAccumulators <= 192, "accumulators must fit 232 registers");
    static_assert(kSharedBytes <= 227 * 1024, "a block has 227 KiB of shared memory");
};

template <class C>
struct SharedStages {
    uint8_t* tiles;    // (kStages, A tile then B tile), each 1024-byte aligned
    uint8_t* staging;  // (kOwnStagingBytes)
    float* columns;    // (2, ColumnVectors)
    uint64_t* full;    // (kStages,) the copies have arrived
    uint64_t* empty;   // (kStages,) the consumers of every CTA that writes here are done

    __device__ explicit SharedStages(uint8_t* raw)
        : tiles(raw + (1024 - ptx::shared_address(raw) % 1024) % 1024),
          staging(tiles + C::kStages * C::kStageBytes),
          columns(reinterpret_cast<float*>(staging + C::kOwnStagingBytes)),
          full(reinterpret_cast<uint64_t*>(staging + C::kOwnStagingBytes + C::kColumnBytes)),
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
    __device__ void skip(int stages) {
        const int rounds = stages / kStages;
        stage += stages - rounds * kStages;
        parity ^= rounds & 1;
        if (stage >= kStages) stage -= kStages, parity ^= 1;
    }
};

}  // namespace fp4bf16
