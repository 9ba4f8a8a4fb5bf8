// What the kernels of group normalisation share that hold x on chip: moments of a thread's elements, results
// in BF16 and in FP4.
#pragma once

#include "norm.cuh"
#include "norm_quantize.cuh"

namespace fp4bf16 {
namespace {

// Sums of distances from `first`, and of their squares, of a chunk's two units.
struct UnitSums {
    float first[2], sum[2] = {}, square[2] = {};

    __device__ void start(const uint4& chunk) {
        first[0] = low_float(chunk.x), first[1] = low_float(chunk.z);
    }

    __device__ void add(const uint4& chunk) {
        float x[8];
        unpack_chunk(chunk, x);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float d = x[i] - first[i / 4];
            sum[i / 4] += d;
            square[i / 4] = __fmaf_rn(d, d, square[i / 4]);
        }
    }
};

// ---- results
// With SiLU scale and shift are times -log2(e), and so is z here: z silu's sigmoid without a product more.
template <bool kSilu, bool kCentred>
__device__ inline float result(float x, float mean, float scale, float shift) {
    const float z = kCentred ? affine(x, mean, scale, shift) : __fmaf_rn(x, scale, shift);
    return kSilu ? z * inverse_of(__fmaf_rn(exp2_of(z), -kLog2E, -kLog2E)) : z;
}

// Sixteen results of one pixel, in place.
template <bool kSilu, bool kCentred>
__device__ inline void results16(uint32_t (&w)[8], const float4* mean, const float4* scale,
                                 const float4* shift) {
    float4 m{};
    if (kCentred) m = *mean;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float4 a = scale[j], b = shift[j];
        const float middle = j == 0 ? m.x : j == 1 ? m.y : j == 2 ? m.z : m.w;
        uint32_t &low = w[2 * j], &high = w[2 * j + 1];
        low = pack_bf16(result<kSilu, kCentred>(low_float(low), middle, a.x, b.x),
                        result<kSilu, kCentred>(high_float(low), middle, a.y, b.y));
        high = pack_bf16(result<kSilu, kCentred>(low_float(high), middle, a.z, b.z),
                         result<kSilu, kCentred>(high_float(high), middle, a.w, b.w));
    }
}

// Blocks of 16 channels, every so many pixels of one image, and where their results go.
struct BlockRun {
    const uint4* from;                   // in shared memory: the first block's first half
    int high, step;                      // chunks to a block's other half, to the next block
    const float4 *mean, *scale, *shift;  // of the block's channels: see `result`
    int count, every;                    // blocks, pixels from one to the next
    int64_t block, y;                    // numbers of the results' first block, of y's first element

    // Channels from 16 * column on, every `every`-th pixel from `pixel` on.
    __device__ BlockRun(const fp4bf16_group_norm_args& a, int64_t image, int64_t pixel, int every, int column)
        : every(every),
          block((image * a.pixels + pixel) * (a.c / 16) + column),
          y(image * a.y_image + pixel * a.y_pixel + 16 * column) {}
};

// FP4 results, and BF16 ones beside them. What the fast quantiser does not take is made again at the end.
// kExpanded: those alone, and BF16 ones. kNorms: all blocks are added to `norms`.
template <bool kSilu, bool kCentred, bool kExpanded, bool kNorms>
__device__ inline void store_blocks_as(const fp4bf16_group_norm_args& a, BlockRun run, const Outer& o,
                                       BlockNorms* norms) {
    const int stride = run.every * static_cast<int>(a.c / 16);
    const Window window(o);
    uint32_t special = 0;
#pragma unroll 1
    for (int i = 0; i < run.count; ++i, run.from += run.step, run.block += stride) {
        uint32_t w[8];
        unpack_block(run.from[0], run.from[run.high], w);
        results16<kSilu, kCentred>(w, run.mean, run.scale, run.shift);
        if (a.y != nullptr) {
            auto* y = reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(a.y) + run.y);
            y[0] = make_uint4(w[0], w[1], w[2], w[3]), y[1] = make_uint4(w[4], w[5], w[6], w[7]);
            run.y += run.every * a.y_pixel;
        }
        if (!quantize_block16<kExpanded, kNorms>(w, o, window, FourBit(a, run.block), 0, norms))
            special |= 1u << i;
    }
    for (; special != 0; special &= special - 1) {
        const int k = __ffs(static_cast<int>(special)) - 1 - run.count;  // from behind the last
        uint32_t w[8];
        unpack_block(run.from[k * run.step], run.from[k * run.step + run.high], w);
        results16<kSilu, kCentred>(w, run.mean, run.scale, run.shift);
        const FourBit to(a, run.block + int64_t{k} * stride);
        if constexpr (kNorms)
            norms->add(special_block16<true>(w, o, to, 0));
        else
            special_block16(w, o, to, 0);
    }
}

template <bool kSilu, bool kNorms>
__device__ inline void store_blocks(const fp4bf16_group_norm_args& a, const BlockRun& run, bool centred,
                                    const Outer& o, BlockNorms* norms) {
    if (a.packed != nullptr)
        store_blocks_as<kSilu, true, false, kNorms>(a, run, o, norms);
    else if (centred)
        store_blocks_as<kSilu, true, true, kNorms>(a, run, o, norms);
    else
        store_blocks_as<kSilu, false, true, kNorms>(a, run, o, norms);
}

}  // namespace
}  // namespace fp4bf16
