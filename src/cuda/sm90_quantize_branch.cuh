// The quantiser that also multiplies: x (rows, k) BF16 is read once and leaves as FP4 (or E4M3) and as
// T = x D, D (k, rank) being the down projection of a low-rank branch.
//
// A cluster of CTAs takes 64 rows at a time, each CTA a fixed range of at most 16 * 64 columns. In a CTA
//     warp 20          copies boxes of 64 x 64 elements into a ring of shared memory (21 to 23 only give
//     registers) warps 0..3       multiply each box by the matching (rank, 64) slice of D^T on the tensor
//     cores and, while
//                      these work, take the amax of its rows; at the end of a tile they send the amax to
//                      every CTA of the cluster and the partial sums of T to the CTA that adds them up
//     warps 4..19      quantise the boxes, once the amax of the whole row is known, and free them
// so that the first five warps run up to a tile ahead of the others, which never wait for them in the long
// run.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>

#include "fp4bf16.h"
#include "ptx.cuh"
#include "wgmma.cuh"

namespace fp4bf16::branch {

constexpr int kRows = 64, kColumns = 64;  // of a box
constexpr int kBoxBytes = kRows * kColumns * 2;
constexpr int kMostBoxes = 16, kMostCtas = 8;  // boxes of a tile in a CTA, CTAs of a cluster
constexpr int kMathWarps = 4, kQuantWarps = 16;
constexpr int kCtaThreads = 32 * (kMathWarps + kQuantWarps + 4);
constexpr int kMathRegisters = 104, kQuantRegisters = 88, kCopyRegisters = 24;  // 80 a thread at the start
static_assert(4 * kMathRegisters + 16 * kQuantRegisters + 4 * kCopyRegisters <= 24 * 80,
              "more than there are");
constexpr int kGroups = kQuantWarps / 8;  // eight warps take a box

template <int kRank>
struct Shared {
    static constexpr int kSlots = kRank <= 64 ? 22 : 17;
    static constexpr int kDownSlots = 3;
    static constexpr int kPitch = kRank + 8;  // floats; keeps the rows of a fragment in different banks

    alignas(1024) uint8_t x[kSlots][kBoxBytes];           // (64, 64) BF16, 128-byte swizzle
    alignas(1024) uint8_t down[kDownSlots][kRank * 128];  // (rank, 64) BF16, 128-byte swizzle
    float partial[kRows * kPitch];       // (CTAs, 64 / CTAs, rank): T of my rows, from every CTA
    uint32_t amax[2][kMostCtas][kRows];  // FP32 bits
    uint64_t x_full[kSlots], x_empty[kSlots], down_full[kDownSlots], down_empty[kDownSlots];
    uint64_t amax_full[2], amax_read[2], partial_full;
    int first_outlier[kMostBoxes + 1];  // of a box: index into outlier_index
};

// What a launch works on.
struct Work {
    fp4bf16_quantize_args args;
    int64_t kp;                   // k_size padded to blocks
    int tiles, boxes, cta_boxes;  // of 64 rows; of a row of tiles, whole and in a CTA
    uint32_t ctas;                // of a cluster
};

// A CTA's part of it.
struct Part {
    uint32_t rank;
    int first, boxes;  // its boxes in a tile
    int tile, step;    // its first tile, and from one to the next

    __device__ explicit Part(const Work& w) : rank(ptx::cluster_rank()) {
        first = static_cast<int>(rank) * w.cta_boxes;
        boxes = min(w.cta_boxes, w.boxes - first);
        tile = static_cast<int>(blockIdx.x / w.ctas);
        step = static_cast<int>(gridDim.x / w.ctas);
    }
};

// ptx::barrier_wait acquires from the whole cluster, for which it empties the L1 cache: this is for what only
// this CTA and the copy engine write.
__device__ inline void wait(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra.uni finished;\n"
        "bra.uni again;\n"
        "finished:\n"
        "}\n" ::"r"(ptx::shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// ---- shared memory of other CTAs
__device__ inline uint32_t address_at(const void* pointer, uint32_t rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(address)
        : "r"(ptx::shared_address(pointer)), "r"(rank));
    return address;
}

// Stores to another CTA; its bytes are counted by `barrier` of that CTA.
__device__ inline void store_at(uint32_t address, uint32_t value, uint32_t barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(address),
        "r"(value), "r"(barrier)
        : "memory");
}
__device__ inline void store_at(uint32_t address, float x, float y, uint32_t barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
            address),
        "f"(x), "f"(y), "r"(barrier)
        : "memory");
}

__device__ inline void sync_math_warps() {
    asm volatile("bar.sync 1, %0;" ::"n"(32 * kMathWarps) : "memory");
}

// ---- amax of BF16 pairs, as bits: those of magnitudes sort as integers
constexpr uint32_t kMagnitudes = 0x7FFF7FFFu;

__device__ inline uint32_t max_magnitudes(uint32_t a, uint32_t b) {  // the signs mean nothing
    asm("max.NaN.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}

// Offset in a box of 16 bytes: eight elements of a row.
__device__ inline uint32_t chunk(uint32_t row, uint32_t index) {
    return row * 128 + ((index ^ (row & 7)) * 16);
}

// The largest finite magnitudes of 32 elements of a row, even and odd ones apart.
__device__ inline uint32_t row_amax(const uint8_t* box, uint32_t row, uint32_t half) {
    uint32_t most = 0;
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) {
        const uint4 v = *reinterpret_cast<const uint4*>(box + chunk(row, 4 * half + j));
        most = max_magnitudes(max_magnitudes(max_magnitudes(max_magnitudes(most, v.x), v.y), v.z), v.w);
    }
    most &= kMagnitudes;
    if ((most + 0x00800080u & 0x80008000u) == 0) return most;
    most = 0;  // NaN and Inf are left out
    for (uint32_t j = 0; j < 16; ++j) {
        const uint32_t v = *reinterpret_cast<const uint32_t*>(box + chunk(row, 4 * half + j / 4) + j % 4 * 4);
        const uint32_t low = v & 0x7FFF, high = v >> 16 & 0x7FFF;
        most = __vmaxu2(most, (low < 0x7F80 ? low : 0) | (high < 0x7F80 ? high : 0) << 16);
    }
    return most;
}

// ---- the copying warp: one lane
template <int kRank>
__device__ inline void copy(Shared<kRank>& s, const CUtensorMap& x_map, const Work& w, const Part& part) {
    uint32_t slot = 0, parity = 1;
    for (int tile = part.tile; tile < w.tiles; tile += part.step) {
        for (int b = 0; b < part.boxes; ++b) {
            wait(&s.x_empty[slot], parity);
            ptx::barrier_arrive_expect_bytes(&s.x_full[slot], kBoxBytes);
            ptx::copy_box(s.x[slot], &x_map, &s.x_full[slot], (part.first + b) * kColumns, tile * kRows, 0);
            if (++slot == Shared<kRank>::kSlots) slot = 0, parity ^= 1;
        }
    }
}

// ---- the multiplying warps
// Outliers of a box go to `hidden`, and zero takes their place.
__device__ inline void take_outliers(uint8_t* box, const Work& w, int64_t row0, int column0, int begin,
                                     int end) {
    const uint32_t row = threadIdx.x % kRows;
    for (int i = begin + static_cast<int>(threadIdx.x) / kRows; i < end; i += 32 * kMathWarps / kRows) {
        const uint32_t column = static_cast<uint32_t>(w.args.outlier_index[i] - column0);
        auto* const v = reinterpret_cast<uint16_t*>(box + chunk(row, column / 8) + column % 8 * 2);
        if (row0 + row < w.args.rows)
            static_cast<uint16_t*>(w.args.hidden)[(row0 + row) * w.args.hidden_stride + w.args.rank + i] = *v;
        *v = 0;
    }
    ptx::fence_async_shared();
    sync_math_warps();
}

// The amax of this CTA's rows goes to every CTA of the cluster; returns once that of all CTAs is here. Two
// buffers are enough: what this overwrites, that of tile n - 2, every CTA has read, since each waits here for
// its quantising warps to have read n - 2 before it sends n - 1, and n is not sent before all n - 1 have
// come.
template <int kRank>
__device__ inline void send_amax(Shared<kRank>& s, const Work& w, const Part& part, uint32_t n,
                                 uint32_t most) {
    const uint32_t row = threadIdx.x / 2, half = threadIdx.x % 2, now = n % 2;
    most = max(most & 0xFFFF, most >> 16);
    most = max(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
    if (n > 0) wait(&s.amax_read[now ^ 1], (n - 1) / 2 & 1);
    if (threadIdx.x == 0) ptx::barrier_arrive_expect_bytes(&s.amax_full[now], w.ctas * kRows * 4);
    for (uint32_t c = half; c < w.ctas; c += 2)
        store_at(address_at(&s.amax[now][part.rank][row], c), most << 16, address_at(&s.amax_full[now], c));
    ptx::barrier_wait(&s.amax_full[now], n / 2 & 1);
}

// The partial sums of T go to the CTA that adds up their row. That one is done with the tile before: it has
// sent its amax of this tile.
template <int kRank>
__device__ inline void send_partial(Shared<kRank>& s, const Work& w, const Part& part,
                                    const float (&d)[kRank / 64][32]) {
    const uint32_t rows = kRows / w.ctas, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) ptx::barrier_arrive_expect_bytes(&s.partial_full, kRows * kRank * 4);
#pragma unroll
    for (uint32_t lower = 0; lower < 2; ++lower) {
        const uint32_t row = threadIdx.x / 32 * 16 + lane / 4 + 8 * lower, owner = row / rows;
        const uint32_t index = (part.rank * rows + row % rows) * Shared<kRank>::kPitch + 2 * (lane % 4);
        const uint32_t to = address_at(&s.partial[index], owner),
                       barrier = address_at(&s.partial_full, owner);
#pragma unroll
        for (uint32_t j = 0; j < kRank / 8; ++j)
            store_at(to + 32 * j, d[j / 8][j % 8 * 4 + 2 * lower], d[j / 8][j % 8 * 4 + 2 * lower + 1],
                     barrier);
    }
}

// Adds up T of this CTA's rows in the order of the CTAs, and zeroes what lies behind rank and outliers.
template <int kRank>
__device__ inline void finish_rows(const Shared<kRank>& s, const Work& w, const Part& part, int64_t row0) {
    const uint32_t rows = kRows / w.ctas;
    auto* const hidden =
        static_cast<__nv_bfloat16*>(w.args.hidden) + (row0 + part.rank * rows) * w.args.hidden_stride;
    const int64_t left = w.args.rows - row0 - part.rank * rows;
    for (uint32_t i = threadIdx.x; i < rows * kRank; i += 32 * kMathWarps) {
        const uint32_t row = i / kRank, column = i % kRank;
        if (row >= left || column >= w.args.rank) continue;
        float sum = 0.0f;
        for (uint32_t c = 0; c < w.ctas; ++c)
            sum += s.partial[(c * rows + row) * Shared<kRank>::kPitch + column];
        hidden[row * w.args.hidden_stride + column] = __float2bfloat16_rn(sum);
    }
    const int64_t used = w.args.rank + w.args.outliers;
    for (uint32_t row = threadIdx.x / 32; row < rows && row < left; row += kMathWarps)
        for (int64_t column = used + threadIdx.x % 32; column < w.args.hidden_stride; column += 32)
            hidden[row * w.args.hidden_stride + column] = __float2bfloat16_rn(0.0f);
}

template <int kRank>
__device__ inline void multiply(Shared<kRank>& s, const CUtensorMap& down_map, const Work& w,
                                const Part& part) {
    using S = Shared<kRank>;
    const uint32_t thread = threadIdx.x, row = thread / 2, half = thread % 2;
    const uint32_t mine = part.tile < w.tiles ? (w.tiles - 1 - part.tile) / part.step + 1 : 0;  // tiles
    const uint32_t total = mine * part.boxes;
    const auto copy_down = [&](uint32_t g) {  // slice of D^T for the g-th box of this CTA
        uint64_t* const full = &s.down_full[g % S::kDownSlots];
        ptx::barrier_arrive_expect_bytes(full, kRank * 128);
        ptx::copy_box(s.down[g % S::kDownSlots], &down_map, full, (part.first + g % part.boxes) * kColumns, 0,
                      0);
    };
    if (thread == 0)
        for (uint32_t g = 0; g < min(total, uint32_t{S::kDownSlots}); ++g) copy_down(g);
    __syncwarp();

    float d[kRank / 64][32];  // (64, rank) over the warpgroup
    uint32_t g = 0;           // boxes done
    for (uint32_t n = 0; n < mine; ++n) {
        const int64_t row0 = int64_t{part.tile + static_cast<int>(n) * part.step} * kRows;
        uint32_t most = 0;
        for (int b = 0; b < part.boxes; ++b, ++g) {
            const uint32_t slot = g % S::kSlots, down = g % S::kDownSlots;
            wait(&s.x_full[slot], g / S::kSlots & 1);
            if (w.args.outliers > 0 && s.first_outlier[b] < s.first_outlier[b + 1])
                take_outliers(s.x[slot], w, row0, (part.first + b) * kColumns, s.first_outlier[b],
                              s.first_outlier[b + 1]);
            wait(&s.down_full[down], g / S::kDownSlots & 1);
            ptx::wgmma_fence();
            const uint64_t a = ptx::wgmma_descriptor(ptx::shared_address(s.x[slot]), 1024);
            const uint64_t c = ptx::wgmma_descriptor(ptx::shared_address(s.down[down]), 1024);
#pragma unroll
            for (uint32_t k = 0; k < 4; ++k)  // 16 columns, 32 bytes each
#pragma unroll
                for (uint32_t j = 0; j < kRank / 64; ++j)
                    ptx::Bf16Mma<64, false, false>::mma(d[j], a + 2 * k, c + 512 * j + 2 * k, b > 0 || k > 0);
            ptx::wgmma_commit();
            most = __vmaxu2(most, row_amax(s.x[slot], row, half));
            if (thread == 0 && g > 0 && g - 1 + S::kDownSlots < total) {
                wait(&s.down_empty[(g - 1) % S::kDownSlots], (g - 1) / S::kDownSlots & 1);
                copy_down(g - 1 + S::kDownSlots);
            }
            __syncwarp();
            ptx::wgmma_wait<0>();
            if (thread % 32 == 0) ptx::barrier_arrive(&s.down_empty[down]);
        }
        send_amax(s, w, part, n, most);
        send_partial(s, w, part, d);
        ptx::barrier_wait(&s.partial_full, n & 1);
        finish_rows(s, w, part, row0);
        sync_math_warps();  // `partial` has been read before the next amax says so to the cluster
    }
}

}  // namespace fp4bf16::branch
