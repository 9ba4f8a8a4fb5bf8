// nvfp4_exact, fast search, of what group normalisation makes: the outer scale that needs no amax, and a
// block of 16 BF16 numbers in registers, by the steps of the quantiser (quantize_fast.cuh).
#pragma once

#include <cmath>

#include "quantize_fast.cuh"

namespace fp4bf16 {
namespace {

// Of the bits of the largest |gamma| and |beta|, see below.
__device__ inline Outer outer_of(uint32_t gamma, uint32_t beta, float root) {
    const int e = min(outer_exponent(__fadd_ru(__fmul_ru(bits_float(gamma), root), bits_float(beta))), 120);
    return {power_of_two(-e), power_of_two(e), 0.0f};
}

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
    return outer_of(gamma, beta, root);
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

// What the search needs of the outer scale: from `least` to `least + span`, BF16 bits of a block's largest
// magnitude in both halves, both candidates of the table are block scales. octaves: FP16 bits, in both
// halves, of a scale that the table and the largest's exponent have no part in. shift: of to_half, without
// the largest's exponent, always the same: where it comes from memory a block costs an instruction less.
struct Window {
    uint32_t least, span, octaves, shift;

    __device__ explicit Window(const Outer& o) {
        const uint32_t e = float_bits(o.decode) >> 23;  // biased, 8 to 247
        const uint32_t low = max(e - 3, 32u) << 7, high = min((e + 8) << 7 | 16, 0x7F7Fu);  // t = .125, 288
        least = (low <= high ? low : 0xFFFFu) * 0x10001u;
        span = (low <= high ? high - low : 0) * 0x10001u;
        octaves = (0x2000 - e * 1024) * 0x10001u;
        shift = 0x08810880u;
    }
};

// Candidates where one may lie outside the scales' range, as in search_fast_half: `scales` in FP16.
__device__ inline void pair_at_edge(uint32_t top, const Outer& o, Pair* p, uint32_t* scales) {
    const float t = bits_float(top << 16) * o.encode;
    const float unit = power_of_two(static_cast<int>(top >> 7) - 129) * o.encode;
    int first, second;
    fast_pair(t, clip_scale(least_scale(t)), &first, &second);
    const float s = scale_value(first), r = scale_value(second);
    p->inverse = bits_of(__floats2half2_rn(unit * reciprocal(s), unit * reciprocal(r)));
    p->weight[0] = s * s, p->weight[1] = r * r;
    *scales = bits_of(__floats2half2_rn(s, r));
}

// E4M3 of four FP16 numbers that it holds exactly.
__device__ inline uint32_t e4m3_of(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t low, high;
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(low) : "r"(a));
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(high) : "r"(b));
    return low | static_cast<uint32_t>(high) << 16;
#else
    const uint32_t magnitudes[2] = {a & kMagnitudes, b & kMagnitudes}, signs[2] = {a, b};
    return expand_codes(magnitudes, signs, 0x1C001C00u);  // 2^-8
#endif
}

// Block `at` behind the first. `mark` is called where it is special: what is written then is of no use. So
// the usual path has one branch. kExpanded: the expanded codes are all that is wanted. pairs: kPairs, or a
// copy.
template <bool kExpanded, typename Mark>
__device__ inline void quantize_block16(const uint32_t (&w)[8], const Outer& o, const Window& window,
                                        const Pair* pairs, const FourBit& to, uint32_t at, const Mark& mark) {
    uint32_t y[8], top = w[0] & kMagnitudes;
#pragma unroll
    for (int i = 1; i < 8; ++i) top = max2(top, w[i] & kMagnitudes);
    top = max2(top, bytes(top, 0, 0x1032));  // in both halves
    const uint32_t exponent = top >> 23;
    Pair p = pairs[top >> 16 & 0x7F];
    uint32_t scales = p.bytes * 128 + (exponent * 0x04000400u + window.octaves);  // E4M3's bits as FP16's
    if (top - window.least > window.span) {
        if (is_special16(top >> 16) || bits_float(top) * o.encode > 6.0f * 64.0f)
            mark();
        else
            pair_at_edge(top >> 16, o, &p, &scales);
    }
    const uint32_t shift = window.shift - exponent * 0x00800080u;  // shift_of(17, exponent)
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = to_half(w[i] & kMagnitudes, shift);
    uint32_t first[8], second[8];
    const float error = static_cast<float>(try_scale<true>(y, low_twice(p.inverse), first)) * p.weight[0];
    // Strict: a tie keeps the smaller scale. Integers under 2^24, as floats.
    const bool better =
        static_cast<float>(try_scale<false>(y, high_twice(p.inverse), second)) * p.weight[1] < error;
    if constexpr (kExpanded) {  // the other's scale is 0
        const uint32_t s = better ? 0 : low_twice(scales), r = better ? high_twice(scales) : 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) y[i] = fma2(second[i], r, mul2(first[i], s)) | (w[i] & kSigns);
    } else {
        const uint32_t s = better ? high_twice(scales) : low_twice(scales);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            first[i] = (better ? second[i] : first[i]) | (w[i] & kSigns);
            y[i] = mul2(first[i], s);
        }
        if (to.packed != nullptr) {
            reinterpret_cast<uint2*>(to.packed)[at] = make_uint2(pack_codes(first), pack_codes(first + 4));
            to.block_scale[at] = static_cast<uint8_t>((s - 0x2000u) >> 7);
        }
    }
    if (kExpanded || to.expanded != nullptr)
        reinterpret_cast<uint4*>(to.expanded)[at] =
            make_uint4(e4m3_of(y[0], y[1]), e4m3_of(y[2], y[3]), e4m3_of(y[4], y[5]), e4m3_of(y[6], y[7]));
}

// The same; false: it is special.
template <bool kExpanded>
__device__ inline bool quantize_block16(const uint32_t (&w)[8], const Outer& o, const Window& window,
                                        const FourBit& to, uint32_t at) {
    bool usual = true;
    quantize_block16<kExpanded>(w, o, window, kPairs.entry, to, at, [&] { usual = false; });
    return usual;
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
