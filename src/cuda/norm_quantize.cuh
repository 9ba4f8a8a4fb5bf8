// nvfp4_exact, fast search, of what group normalisation makes: the outer scale that needs no amax, and a
// block of 16 BF16 numbers in registers, by the steps of the quantiser (quantize_fast.cuh).
#pragma once

#include <cmath>

#include "quantize_fast.cuh"

namespace fp4bf16 {
namespace {

// Least power of two that no result can exceed 288 times of, by one warp. Of n numbers with mean 0 and mean
// square at most 1 none exceeds root = sqrt(n - 1); SiLU makes no magnitude larger. Rounded up at each step.
__device__ inline Outer static_outer(const fp4bf16_group_norm_args& a, float root) {
    uint32_t gamma = 0, beta = 0;
    const int c = static_cast<int>(a.c);
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < c; i += 32) {
        gamma = max(gamma, float_bits(a.gamma[i]) & 0x7FFFFFFF);
        beta = max(beta, float_bits(a.beta[i]) & 0x7FFFFFFF);
    }
    gamma = __reduce_max_sync(0xFFFFFFFFu, gamma), beta = __reduce_max_sync(0xFFFFFFFFu, beta);
    const int e = min(outer_exponent(__fadd_ru(__fmul_ru(bits_float(gamma), root), bits_float(beta))), 120);
    return {power_of_two(-e), power_of_two(e), 0.0f};
}

// Host: root of the above.
inline float root_up(int64_t count) {
    const double root = std::sqrt(static_cast<double>(count - 1));
    const auto near = static_cast<float>(root);
    return static_cast<double>(near) < root ? std::nextafterf(near, kFloatMax) : near;
}

// Where the FP4 results go; `first`: number of the first block.
struct FourBit {
    uint8_t *packed, *expanded, *block_scale;  // NULL: not wanted

    __device__ FourBit(const fp4bf16_group_norm_args& a, int64_t first)
        : packed(a.packed == nullptr ? nullptr : a.packed + 8 * first),
          expanded(a.expanded == nullptr ? nullptr : a.expanded + 16 * first),
          block_scale(a.packed == nullptr ? nullptr : a.block_scale + first) {}
};

// Numbers that the fast quantiser takes: as in do_block, and some more blocks, of zeros, are left.
__device__ inline bool is_special16(uint32_t top) { return top - (32u << 7) >= 0x7F80u - (32u << 7); }

// Block `at` behind the first, which is not special. top: bits of its largest magnitude.
__device__ inline void quantize_block16(const uint32_t (&w)[8], uint32_t top, const Outer& o,
                                        const FourBit& to, uint32_t at) {
    const int exponent = static_cast<int>(top >> 7);  // as in round_block
    const uint32_t shift = shift_of(17, exponent);
    uint32_t y[8], q[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = to_half(w[i] & kMagnitudes, shift);
    const uint32_t byte =
        search_fast_half(y, bits_float(top << 16) * o.encode, power_of_two(exponent - 129) * o.encode,
                         kPairs.entry[top & 0x7F], q);
    if (to.expanded != nullptr) {
        const uint32_t scale = byte * 0x800080u;
        reinterpret_cast<uint4*>(to.expanded)[at] =
            make_uint4(expand_codes(q, w, scale), expand_codes(q + 2, w + 2, scale),
                       expand_codes(q + 4, w + 4, scale), expand_codes(q + 6, w + 6, scale));
    }
    if (to.packed != nullptr) {
#pragma unroll
        for (int i = 0; i < 8; ++i) q[i] |= w[i] & kSigns;
        reinterpret_cast<uint2*>(to.packed)[at] = make_uint2(pack_codes(q), pack_codes(q + 4));
        to.block_scale[at] = static_cast<uint8_t>(byte);
    }
}

// Any block, the simple way. Byte by byte: results may lie anywhere.
__device__ __noinline__ void simple_block16(const float (&x)[16], Outer o, FourBit to, int64_t at) {
    const Rule rule = {FP4BF16_NVFP4_EXACT, FP4BF16_RULE_DEFAULT, false, false};
    Philox unused(0, 0, 0);
    Codes<16> codes;
    int counts[kCounts] = {};
    quantize_block(x, 16, 16, rule, o, &unused, 0, 0, false, &codes, counts);
    if (to.expanded != nullptr)
        for (int j = 0; j < 16; ++j)
            to.expanded[16 * at + j] = static_cast<uint8_t>(expanded_byte(codes.code[j], codes.byte));
    if (to.packed == nullptr) return;
    for (int j = 0; j < 8; ++j)
        to.packed[8 * at + j] = static_cast<uint8_t>(codes.code[2 * j] | codes.code[2 * j + 1] << 4);
    to.block_scale[at] = static_cast<uint8_t>(codes.byte);
}

__device__ inline void special_block16(const uint32_t (&w)[8], const Outer& o, const FourBit& to,
                                       int64_t at) {
    float x[16];
#pragma unroll
    for (int j = 0; j < 16; ++j) x[j] = bits_float(j % 2 == 0 ? w[j / 2] << 16 : w[j / 2] & 0xFFFF0000u);
    simple_block16(x, o, to, at);
}

}  // namespace
}  // namespace fp4bf16
