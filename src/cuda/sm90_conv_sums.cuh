// Sums and sums of squares of a convolution's result by channel, for the group normalisation that follows:
// of the BF16 numbers that wait in shared memory for their store, so that what is summed is what is stored.
//
// The tensor cores add up rows: with B sixteen pixels of eight channels and A (16 x 16) those same numbers
// transposed above rows of ones, row i of the upper half of A B has at column i the sum of squares of channel
// i, and each row of the lower half the sums. A and B are then the same registers. That seven of eight
// products of channels are not looked at costs less than FP32 instructions for each number would.
#pragma once

#include "mma.cuh"
#include "sm90_conv_epilogue.cuh"

namespace fp4bf16 {
namespace ptx {

// Four 8 x 8 matrices of 16-bit numbers, transposed; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void load_transposed(uint32_t address, uint32_t (&word)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(address)
                 : "memory");
}

// sum += (X^T over ones) X, for the 16 x 8 BF16 numbers X of which `low` has the first eight rows,
// transposed.
__device__ inline void add_squares_and_sums(float (&sum)[4], uint32_t low, uint32_t high) {
    constexpr uint32_t kOnes = 0x3F803F80u;
    mma(sum, low, kOnes, high, kOnes, low, high);
}

// threadIdx.x, read anew: what is computed from it is not kept in registers through the products before.
__device__ inline uint32_t thread_again() {
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

}  // namespace ptx

// Sums of 16 * kPairs channels from `channel` on (of all only `channels`), of the part that begins at row
// `row` of the tile. Lane 4 i + t has rows i and 8 + i, columns 2 t and 2 t + 1 of each product: a lane of
// eight holds a diagonal's number.
template <int kPairs>
__device__ inline void store_sums(const ConvParams& p, float (&sum)[kPairs][2][4], Pixel corner, int phase,
                                  int row, int lane, int channel, int channels) {
    const int log_image = p.log_w + p.log_h;
    const int image = corner.n + (row >> log_image);
    if (image < p.n && lane / 8 == lane % 4) {
        const int box = (corner.y >> p.log_h) * p.tiles_w + (corner.x >> p.log_w);
        const int part = phase * p.phase_parts + (box << (log_image - p.log_part)) +
                         ((row & ((1 << log_image) - 1)) >> p.log_part);
        float2* out =
            reinterpret_cast<float2*>(p.sums) + (int64_t{image} * p.sum_parts + part) * p.epilogue.n;
        const bool second = lane / 4 % 2 != 0;
#pragma unroll
        for (int i = 0; i < 2 * kPairs; ++i) {
            const float* v = sum[i / 2][i % 2];
            const int c = channel + 8 * i + lane / 4;
            if (c < channels) out[c] = second ? make_float2(v[3], v[1]) : make_float2(v[2], v[0]);
        }
    }
#pragma unroll
    for (int i = 0; i < 8 * kPairs; ++i) sum[i / 8][i / 4 % 2][i % 4] = 0.0f;
}

// A warp takes about a quarter of the channels of all of its warpgroup's rows, 16 * kSteps at a time.
template <class C, int kSteps>
__device__ inline void sum_rows(const ConvParams& p, const Staging<C>& staging, int group,
                                const ConvCorner<C>& corner) {
    constexpr int kBox = Staging<C>::kColumns, kAll = C::kTileN / 16, kPairs = (kAll + 3) / 4;
    const int thread = ptx::thread_again(), lane = thread % 32, first = uniform(thread / 32 % 4) * kPairs;
    const int begin = group * C::kWaves * 64, part = 1 << p.log_part;
    float sum[kPairs][2][4] = {};
#pragma unroll 1
    for (int row = begin; row < begin + C::kWaves * 64; row += 16 * kSteps) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            if (kAll % 4 != 0 && first + i >= kAll) continue;
            const int channel = 16 * (first + i);
            const uint32_t memory = staging.box(row / 64, channel / kBox) +
                                    box_offset<kBox>(row % 64 + lane % 16, channel % kBox / 8 + lane / 16);
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                uint32_t word[4];
                ptx::load_transposed(memory + step * 16 * 2 * kBox, word);  // the swizzle repeats
                ptx::add_squares_and_sums(sum[i][0], word[0], word[1]);
                ptx::add_squares_and_sums(sum[i][1], word[2], word[3]);
            }
        }
        const int end = row + 16 * kSteps;
        if (end % part == 0)
            store_sums(p, sum, corner.at, corner.phase(), end - part, lane, corner.channel() + 16 * first,
                       min(p.epilogue.n, corner.channel() + C::kTileN));
    }
}

// After the warpgroup's barrier behind the staging, before its stage is released.
template <class C>
__device__ inline void sum_staged(const ConvParams& p, const Staging<C>& staging, int group,
                                  const ConvCorner<C>& corner) {
    __syncwarp();
    if (p.log_part >= 6)
        sum_rows<C, 4>(p, staging, group, corner);
    else
        sum_rows<C, 1>(p, staging, group, corner);
}

}  // namespace fp4bf16
