// The quantiser that also multiplies: x (rows, k) BF16 is read once and leaves as FP4 (or E4M3) and as
// T = x D, D (k, rank) being the down projection of a low-rank branch.
//
// A cluster of CTAs takes 64 rows at a time, each CTA a fixed range of at most 8 * 64 columns, whose slices
// of D^T it keeps in shared memory. In a CTA
//     warp 4      copies boxes of 64 x 64 elements of x into a ring of shared memory (warp 5: D^T, once),
//     warps 0..3  multiply each box by its slice and meanwhile take the amax of its rows; after a tile they
//                 send the amax to every CTA and partial sums of T to the CTA that adds them up,
//     warps 8..   quantise the boxes, once the amax of the whole row is known, and free them,
// so that the former run up to a tile ahead of the latter, which seldom wait. Warps 6, 7 only give registers.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>

#include "fp4bf16.h"
#include "ptx.cuh"
#include "wgmma.cuh"

namespace fp4bf16::branch {

constexpr int kRows = 64, kColumns = 64;  // of a box
constexpr int kBoxBytes = kRows * kColumns * 2;
constexpr int kMostCtas = 16;  // of a cluster; more than 8 are not portable, but every H100 and H200 has them
constexpr int kGroups = 2;  // of quantising warps: eight take a box
constexpr int kMathWarps = 4, kQuantWarps = 8 * kGroups;
constexpr int kCtaThreads = 32 * (kMathWarps + kQuantWarps + 4);
constexpr int kMathRegisters = 104, kQuantRegisters = kGroups == 2 ? 88 : 64, kCopyRegisters = 24;
static_assert(4 * kMathRegisters + kQuantWarps * kQuantRegisters + 4 * kCopyRegisters <=
                  (kGroups == 2 ? 24 * 80 : 32 * 64),
              "more registers than a launch gets");

template <int kRank>
struct Shared {
    static constexpr int kSlots = kRank <= 64 ? 16 : 14;
    static constexpr int kMostBoxes = kRank <= 64 ? 8 : 4;  // of a tile in a CTA
    static constexpr int kPitch = kRank + 8;  // floats; keeps the rows of a fragment in different banks

    alignas(1024) uint8_t x[kSlots][kBoxBytes];           // (64, 64) BF16, 128-byte swizzle
    alignas(1024) uint8_t down[kMostBoxes][kRank * 128];  // (rank, 64) BF16, 128-byte swizzle
    float partial[kRows * kPitch];       // (CTAs, 64 / CTAs, rank): T of my rows, from every CTA
    uint32_t amax[2][kMostCtas][kRows];  // FP32 bits
    uint64_t x_full[kSlots], x_empty[kSlots], down_full;
    uint64_t amax_full[2], amax_read[2], partial_full, partial_free;
    int first_outlier[kMostBoxes + 1];  // of a box: index into outlier_index
};

// What a launch works on.
struct Work {
    fp4bf16_quantize_args args;
    int64_t kp;                                    // k_size padded to blocks
    uint32_t expanded_end, packed_end, scale_end;  // columns of a row that are stored; 0: none
    int tiles, boxes;                              // of 64 rows; of a tile
    uint32_t ctas;                                 // of a cluster
};

// A CTA's part of it.
struct Part {
    uint32_t rank;
    int first, boxes;  // its boxes in a tile
    int tile, step;    // its first tile, and from one to the next

    __device__ explicit Part(const Work& w) : rank(ptx::cluster_rank()) {
        first = w.boxes * static_cast<int>(rank) / static_cast<int>(w.ctas);
        boxes = w.boxes * static_cast<int>(rank + 1) / static_cast<int>(w.ctas) - first;
        tile = static_cast<int>(blockIdx.x / w.ctas);
        step = static_cast<int>(gridDim.x / w.ctas);
    }
};

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

// Orders no more than this CTA's reads before it: enough for another to write over what was read.
__device__ inline void arrive_at(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
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

// Of the math warps, thread t sees 16 bytes, always the same ones, of rows t / 8 + 16 j of every box.
__device__ inline uint4 row_part(const uint8_t* box, uint32_t j) {
    return *reinterpret_cast<const uint4*>(box + threadIdx.x * 16 + j * 16 * 128);
}

__device__ inline void add_magnitudes(uint32_t (&most)[4], const uint8_t* box) {
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) {
        const uint4 v = row_part(box, j);
        most[j] = max_magnitudes(max_magnitudes(max_magnitudes(max_magnitudes(most[j], v.x), v.y), v.z), v.w);
    }
}

// The largest finite magnitude of a pair, NaN and Inf being left out.
__device__ inline uint32_t finite_magnitude(uint32_t v) {
    const uint32_t low = v & 0x7FFF, high = v >> 16 & 0x7FFF;
    return max(low < 0x7F80 ? low : 0, high < 0x7F80 ? high : 0);
}

// ---- rings of shared memory
template <int kSlots>
struct Ring {
    uint32_t slot = 0, parity = 0;

    __device__ void next(uint32_t steps = 1) {
        slot += steps;
        if (slot >= kSlots) slot -= kSlots, parity ^= 1;
    }
};

// ---- the copying warps: one lane each
template <int kRank>
__device__ inline void copy_x(Shared<kRank>& s, const CUtensorMap& map, const Work& w, const Part& part) {
    Ring<Shared<kRank>::kSlots> ring;
    for (int tile = part.tile; tile < w.tiles; tile += part.step) {
#pragma unroll 1
        for (int b = 0; b < part.boxes; ++b, ring.next()) {
            ptx::barrier_wait(&s.x_empty[ring.slot], ring.parity ^ 1);
            ptx::barrier_arrive_expect_bytes(&s.x_full[ring.slot], kBoxBytes);
            ptx::copy_box(s.x[ring.slot], &map, &s.x_full[ring.slot], (part.first + b) * kColumns,
                          tile * kRows, 0);
        }
    }
}

template <int kRank>
__device__ inline void copy_down(Shared<kRank>& s, const CUtensorMap& map, const Part& part) {
    ptx::barrier_arrive_expect_bytes(&s.down_full, part.boxes * kRank * 128);
#pragma unroll 1
    for (int b = 0; b < part.boxes; ++b)
        ptx::copy_box(s.down[b], &map, &s.down_full, (part.first + b) * kColumns, 0, 0);
}

// ---- the multiplying warps
// Outliers of a box go to `hidden`, and zero takes their place.
__device__ inline void take_outliers(uint8_t* box, const Work& w, int64_t row0, int column0, int begin,
                                     int end) {
    const uint32_t row = threadIdx.x % kRows;
#pragma unroll 1
    for (int i = begin + static_cast<int>(threadIdx.x) / kRows; i < end; i += 32 * kMathWarps / kRows) {
        const uint32_t column = static_cast<uint32_t>(w.args.outlier_index[i] - column0);
        auto* const v = reinterpret_cast<__nv_bfloat16*>(box + chunk(row, column / 8) + column % 8 * 2);
        if (row0 + row < w.args.rows)  // through FP32, which gives every NaN the same bits
            static_cast<__nv_bfloat16*>(
                w.args.hidden)[(row0 + row) * w.args.hidden_stride + w.args.rank + i] =
                __float2bfloat16_rn(__bfloat162float(*v));
        *v = __float2bfloat16_rn(0.0f);
    }
    ptx::fence_async_shared();
    sync_math_warps();
}

// The amax of this CTA's rows goes to every CTA of the cluster. Two buffers are enough: what this overwrites,
// that of tile n - 2, every CTA has read, since none sends n - 1 before its quantising warps have read n - 2,
// nor n before all n - 1 have come.
template <int kRank>
__device__ inline void send_amax(Shared<kRank>& s, const Work& w, const Part& part, uint32_t n,
                                 const uint32_t (&amax)[4]) {
    const uint32_t row = threadIdx.x / 8, first = threadIdx.x % 8, now = n % 2;
    if (n > 0) {
        ptx::barrier_wait(&s.amax_read[now ^ 1], (n - 1) / 2 & 1);
        ptx::barrier_wait(&s.amax_full[now ^ 1], (n - 1) / 2 & 1);
    }
    if (threadIdx.x == 0) ptx::barrier_arrive_expect_bytes(&s.amax_full[now], w.ctas * kRows * 4);
    for (uint32_t c = first; c < w.ctas; c += 8) {
        const uint32_t to = address_at(&s.amax[now][part.rank][row], c);
        const uint32_t barrier = address_at(&s.amax_full[now], c);
        for (uint32_t j = 0; j < 4; ++j) store_at(to + 16 * 4 * j, amax[j] << 16, barrier);
    }
}

// The partial sums of T go to the CTA that adds up their row, once that is done with those of the tile
// before.
template <int kRank>
__device__ inline void send_partial(Shared<kRank>& s, const Work& w, const Part& part, uint32_t n,
                                    const float (&d)[kRank / 64][32]) {
    const uint32_t rows = kRows / w.ctas, lane = threadIdx.x % 32;
    if (n > 0) ptx::barrier_wait(&s.partial_free, (n - 1) & 1);
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
#pragma unroll 1
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
#pragma unroll 1
        for (int64_t column = used + threadIdx.x % 32; column < w.args.hidden_stride; column += 32)
            hidden[row * w.args.hidden_stride + column] = __float2bfloat16_rn(0.0f);
}

// The same for tile n, when all partial sums are there; then the cluster may send those of the next.
template <int kRank>
__device__ inline void take_partial(Shared<kRank>& s, const Work& w, const Part& part, uint32_t n) {
    ptx::barrier_wait(&s.partial_full, n & 1);
    finish_rows(s, w, part, (int64_t{part.tile} + int64_t{n} * part.step) * kRows);
    sync_math_warps();
    if (threadIdx.x < w.ctas) arrive_at(address_at(&s.partial_free, threadIdx.x));
}

// Magnitudes of a thread's parts of a tile's boxes -> amax of its four rows. The boxes are still there.
template <int kRank>
__device__ inline void finish_amax(const Shared<kRank>& s, const Part& part, uint32_t first_slot,
                                   uint32_t (&most)[4]) {
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) {
        most[j] &= kMagnitudes;
        if ((most[j] + 0x00800080u & 0x80008000u) != 0) {  // NaN or Inf: once more without them
            most[j] = 0;
            Ring<Shared<kRank>::kSlots> ring{first_slot};
#pragma unroll 1
            for (int b = 0; b < part.boxes; ++b, ring.next()) {
                const uint4 v = row_part(s.x[ring.slot], j);
                most[j] = max(max(most[j], max(finite_magnitude(v.x), finite_magnitude(v.y))),
                              max(finite_magnitude(v.z), finite_magnitude(v.w)));
            }
        }
        most[j] = max(most[j] & 0xFFFF, most[j] >> 16);
        for (uint32_t lanes = 1; lanes < 8; lanes *= 2)
            most[j] = max(most[j], __shfl_xor_sync(0xFFFFFFFFu, most[j], lanes));
    }
}

template <int kRank>
__device__ inline void multiply(Shared<kRank>& s, const Work& w, const Part& part) {
    using S = Shared<kRank>;
    Ring<S::kSlots> ring;
    float d[kRank / 64][32];  // (64, rank) over the warpgroup
    uint32_t n = 0;
    ptx::barrier_wait(&s.down_full, 0);
    for (int tile = part.tile; tile < w.tiles; tile += part.step, ++n) {
        const uint32_t first_slot = ring.slot;
        uint32_t most[4] = {};
#pragma unroll 1
        for (int b = 0; b < part.boxes; ++b, ring.next()) {
            ptx::barrier_wait(&s.x_full[ring.slot], ring.parity);
            if (w.args.outliers > 0 && s.first_outlier[b] < s.first_outlier[b + 1])
                take_outliers(s.x[ring.slot], w, int64_t{tile} * kRows, (part.first + b) * kColumns,
                              s.first_outlier[b], s.first_outlier[b + 1]);
            ptx::wgmma_fence();
            const uint64_t x = ptx::wgmma_descriptor(ptx::shared_address(s.x[ring.slot]), 1024);
            const uint64_t y = ptx::wgmma_descriptor(ptx::shared_address(s.down[b]), 1024);
#pragma unroll
            for (uint32_t k = 0; k < 4; ++k)  // 16 columns, 32 bytes each
#pragma unroll
                for (uint32_t j = 0; j < kRank / 64; ++j)
                    ptx::Bf16Mma<64, false, false>::mma(d[j], x + 2 * k, y + 512 * j + 2 * k, b > 0 || k > 0);
            ptx::wgmma_commit();
            __syncwarp();  // or the compiler puts between the products what shall run beside them
            add_magnitudes(most, s.x[ring.slot]);
            ptx::wgmma_wait<0>();
            if (n > 0 && b == min(2, part.boxes - 1))
                take_partial(s, w, part, n - 1);  // they have come by now
        }
        finish_amax(s, part, first_slot, most);
        send_amax(s, w, part, n, most);
        send_partial(s, w, part, n, d);
    }
    if (n > 0) take_partial(s, w, part, n - 1);
}

}  // namespace fp4bf16::branch
