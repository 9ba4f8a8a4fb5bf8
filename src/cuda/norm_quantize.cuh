// nvfp4_exact, fast search, of what group normalisation makes: the outer scale that needs no amax, and a
// block of 16 BF16 numbers in registers, by the steps of the quantiser (quantize_fast.cuh).
#pragma once

#include "quantize_fast.cuh"

namespace fp4bf16 {
namespace {

// most (2, 8): bits of the largest |gamma| and |beta| of each warp's channels.
__device__ inline void fetch_largest(const fp4bf16_group_norm_args& a, uint32_t* most) {
    uint32_t gamma = 0, beta = 0;
    for (int64_t i = threadIdx.x; i < a.c; i += blockDim.x) {
        gamma = max(gamma, float_bits(a.gamma[i]) & 0x7FFFFFFF);
        beta = max(beta, float_bits(a.beta[i]) & 0x7FFFFFFF);
    }
    gamma = __reduce_max_sync(0xFFFFFFFFu, gamma), beta = __reduce_max_sync(0xFFFFFFFFu, beta);
    if (threadIdx.x % 32 == 0) most[threadIdx.x / 32] = gamma, most[8 + threadIdx.x / 32] = beta;
}

// Least power of two that no result can exceed 288 times of. Of n numbers with mean 0 and mean square at most
// 1 none exceeds sqrt(n - 1); SiLU makes no magnitude larger. Rounded up at each step.
__device__ inline Outer static_outer(const uint32_t* most, int warps, int64_t pixels, int64_t group) {
    uint32_t gamma = most[0], beta = most[8];
    for (int i = 1; i < warps; ++i) gamma = max(gamma, most[i]), beta = max(beta, most[8 + i]);
    const float root = __fsqrt_ru(__ll2float_ru(pixels * group - 1));
    const int e = min(outer_exponent(__fadd_ru(__fmul_ru(bits_float(gamma), root), bits_float(beta))), 120);
    return {power_of_two(-e), power_of_two(e), 0.0f};
}

// Where the FP4 results go; `first`: number of the first block.
struct FourBit {
    uint8_t *packed, *expanded, *block_scale;
    bool packs, expands;

    __device__ FourBit(const fp4bf16_group_norm_args& a, int64_t first)
        : packed(a.packed + 8 * first),
          expanded(a.expanded + 16 * first),
          block_scale(a.block_scale + first),
          packs(a.packed != nullptr),
          expands(a.expanded != nullptr) {}
};

// Block `at` behind the first. False: it is special and left to special_block16.
__device__ inline bool quantize_block16(uint32_t (&w)[8], const Outer& o, const Pair* pairs,
                                        const FourBit& to, int64_t at) {
    const uint32_t top = largest(w);
    uint32_t q[8] = {}, byte = 0;
    if (top != 0) {
        if (top < 32 << 7 || top >= 0x7F80) return false;
        const int exponent = static_cast<int>(top >> 7);  // as in round_block
        const uint32_t shift = shift_of(17, exponent);
        uint32_t y[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) y[i] = to_half(w[i] & kMagnitudes, shift);
        byte = search_fast_half(y, bits_float(top << 16) * o.encode, power_of_two(exponent - 129) * o.encode,
                                pairs[top & 0x7F], q);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) w[i] = 0;
    }
    if (to.expands) {
        const uint32_t scale = byte * 0x800080u;
        reinterpret_cast<uint4*>(to.expanded)[at] =
            make_uint4(expand_codes(q, w, scale), expand_codes(q + 2, w + 2, scale),
                       expand_codes(q + 4, w + 4, scale), expand_codes(q + 6, w + 6, scale));
    }
    if (to.packs) {
#pragma unroll
        for (int i = 0; i < 8; ++i) q[i] |= w[i] & kSigns;
        reinterpret_cast<uint2*>(to.packed)[at] = make_uint2(pack_codes(q), pack_codes(q + 4));
        to.block_scale[at] = static_cast<uint8_t>(byte);
    }
    return true;
}

// Any block, the simple way. Byte by byte: results may lie anywhere.
__device__ __noinline__ void simple_block16(const float (&x)[16], const Outer& o, const FourBit& to,
                                            int64_t at) {
    const Rule rule = {FP4BF16_NVFP4_EXACT, FP4BF16_RULE_DEFAULT, false, false};
    Philox unused(0, 0, 0);
    Codes<16> codes;
    int counts[kCounts] = {};
    quantize_block(x, 16, 16, rule, o, &unused, 0, 0, false, &codes, counts);
    if (to.expands)
        for (int j = 0; j < 16; ++j)
            to.expanded[16 * at + j] = static_cast<uint8_t>(expanded_byte(codes.code[j], codes.byte));
    if (!to.packs) return;
    for (int j = 0; j < 8; ++j)
        to.packed[8 * at + j] = static_cast<uint8_t>(codes.code[2 * j] | codes.code[2 * j + 1] << 4);
    to.block_scale[at] = static_cast<uint8_t>(codes.byte);
}

__device__ __noinline__ void special_block16(const uint4* from, int high, const Outer& o, const FourBit& to,
                                             int64_t at) {
    float x[16];
    for (int j = 0; j < 16; ++j)
        x[j] = load(reinterpret_cast<const __nv_bfloat16*>(from + (j < 8 ? 0 : high)) + j % 8);
    simple_block16(x, o, to, at);
}

}  // namespace
}  // namespace fp4bf16
