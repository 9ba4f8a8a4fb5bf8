// nvfp4_exact, fast search, of what group normalisation makes: the outer scale that needs no amax, and a
// block of 16 BF16 numbers in registers, by the steps of the quantiser (quantize_fast.cuh).
#pragma once

#include <cmath>
#include <type_traits>

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

// ---- norms
// FP32 rounded up.
FP4BF16_HD float float_up(double v) {
#ifdef __CUDA_ARCH__
    return __double2float_ru(v);
#else
    const auto near = static_cast<float>(v);
    return near < v ? nextafterf(near, INFINITY) : near;
#endif
}
FP4BF16_HD float add_up(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fadd_ru(a, b);
#else
    return float_up(double{a} + b);
#endif
}
FP4BF16_HD float fma_up(float a, float b, float c) {
#ifdef __CUDA_ARCH__
    return __fmaf_ru(a, b, c);
#else
    return float_up(double{a} * b + c);
#endif
}

// Of a thread's blocks, with t = y / outer scale: upper bounds of the sum of (t - q s)^2, q s being what a
// block's codes and scale make of it, and of the sum of (q s)^2.
//
// The search of a block leaves E, the sum of (T - Q)^2 over its 16 elements for the scale that it chose; T =
// rint(16 t / s) and Q = 16 q are integers. With r = 16 t / s - T, |r| <= 1/2, the block's error is s / 16
// times the norm of (T - Q) + r, at most sqrt(E) + 2 by Minkowski, and (sqrt(E) + 2)^2 <= 9/8 E + 36 for any
// E: twice a product is at most the sum of its factors' squares, here of sqrt(E / 8) and sqrt(32). E is some
// 170 on Gaussian data, where this gives away 1 %, and takes no root, whose pipe SiLU keeps busy.
//
// An outer scale that is known before the data must not count overflows, as that of a quantiser must: 288
// times it is at least any y, by outer_of, and a block is clipped beyond 384 times it. Were the given sums
// wrong, and y larger after all, the block would go to any_block16, which measures what clipping loses. So
// the sums here are of any block what they say.
struct BlockNorms {
    float error = 0.0f, used = 0.0f;

    // squares: sums of q^2 in two halves, multiples of 1/4 under 512, so exact. scale: s in FP16, twice.
    FP4BF16_HD void add(int e, uint32_t squares, uint32_t scale) {
        const float s = __low2float(pair(scale)), square = s * s;  // s has two significant bits: exact
        const float q = __low2float(pair(squares)) + __high2float(pair(squares));
        error = fma_up(square * (1.0f / 256), fmaf(static_cast<float>(e), 1.125f, 36.0f), error);
        used = fma_up(square, q, used);
    }
    FP4BF16_HD void add(const BlockNorms& other) {
        error = add_up(error, other.error), used = add_up(used, other.used);
    }
};

// Where the FP4 results go; `first`: number of the first block.
struct FourBit {
    uint8_t *packed, *expanded, *block_scale;  // NULL: not wanted

    FP4BF16_HD FourBit(const fp4bf16_group_norm_args& a, int64_t first)
        : packed(a.packed == nullptr ? nullptr : a.packed + 8 * first),
          expanded(a.expanded == nullptr ? nullptr : a.expanded + 16 * first),
          block_scale(a.packed == nullptr ? nullptr : a.block_scale + first) {}
};

// Numbers that the fast quantiser takes: as in do_block, and some more blocks, of zeros, are left.
FP4BF16_HD bool is_special16(uint32_t top) { return top - (32u << 7) >= 0x7F80u - (32u << 7); }

// What the search needs of the outer scale: from `least` to `least + span`, BF16 bits of a block's largest
// magnitude in both halves, both candidates of the table are block scales. octaves: FP16 bits, in both
// halves, of a scale that the table and the largest's exponent have no part in. shift: of to_half, without
// the largest's exponent, always the same: where it comes from memory a block costs an instruction less.
struct Window {
    uint32_t least, span, octaves, shift;

    FP4BF16_HD explicit Window(const Outer& o) {
        const uint32_t e = float_bits(o.decode) >> 23;  // biased, 8 to 247
        const uint32_t low = max(e - 3, 32u) << 7, high = min((e + 8) << 7 | 16, 0x7F7Fu);  // t = .125, 288
        least = (low <= high ? low : 0xFFFFu) * 0x10001u;
        span = (low <= high ? high - low : 0) * 0x10001u;
        octaves = (0x2000 - e * 1024) * 0x10001u;
        shift = 0x08810880u;
    }
};

// Candidates where one may lie outside the scales' range, as in search_fast_half: `scales` in FP16.
FP4BF16_HD void pair_at_edge(uint32_t top, const Outer& o, Pair* p, uint32_t* scales) {
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
FP4BF16_HD uint32_t e4m3_of(uint32_t a, uint32_t b) {
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
// the usual path has one branch. kExpanded: the expanded codes are all that is wanted. kNorms: the block is
// added to `norms`, unless it is special. pairs: what gives a pair of fast_pairs.
template <bool kExpanded, bool kNorms, typename Pairs, typename Mark>
FP4BF16_HD void quantize_block16(const uint32_t (&w)[8], const Outer& o, const Window& window,
                                 const Pairs& pairs, const FourBit& to, uint32_t at, const Mark& mark,
                                 BlockNorms* norms) {
    uint32_t y[8], top = w[0] & kMagnitudes;
    for (int i = 1; i < 8; ++i) top = max2(top, w[i] & kMagnitudes);
    top = max2(top, bytes(top, 0, 0x1032));  // in both halves
    const uint32_t exponent = top >> 23;
    Pair p = pairs(top >> 16 & 0x7F);
    bool usual = true;
    uint32_t scales = p.bytes * 128 + (exponent * 0x04000400u + window.octaves);  // E4M3's bits as FP16's
    if (top - window.least > window.span) {
        if (is_special16(top >> 16) || bits_float(top) * o.encode > 6.0f * 64.0f)
            mark(), usual = false;
        else
            pair_at_edge(top >> 16, o, &p, &scales);
    }
    const uint32_t shift = window.shift - exponent * 0x00800080u;  // shift_of(17, exponent)
    for (int i = 0; i < 8; ++i) y[i] = to_half(w[i] & kMagnitudes, shift);
    uint32_t first[8], second[8];
    const int e = try_scale<true>(y, low_twice(p.inverse), first);
    const float error = static_cast<float>(e) * p.weight[0];
    // Strict: a tie keeps the smaller scale. Integers under 2^24, as floats.
    const int f = try_scale<false>(y, high_twice(p.inverse), second);
    const bool better = static_cast<float>(f) * p.weight[1] < error;
    if constexpr (kExpanded && !kNorms) {  // the other's scale is 0
        const uint32_t s = better ? 0 : low_twice(scales), r = better ? high_twice(scales) : 0;
        for (int i = 0; i < 8; ++i) y[i] = fma2(second[i], r, mul2(first[i], s)) | (w[i] & kSigns);
    } else {
        const uint32_t s = better ? high_twice(scales) : low_twice(scales);
        if constexpr (kNorms) {
            uint32_t squares = 0;
            for (int i = 0; i < 8; ++i) {
                first[i] = better ? second[i] : first[i];
                squares = fma2(first[i], first[i], squares);
                first[i] |= w[i] & kSigns;
                y[i] = mul2(first[i], s);
            }
            if (usual) norms->add(better ? f : e, squares, s);
        } else {
            for (int i = 0; i < 8; ++i) {
                first[i] = (better ? second[i] : first[i]) | (w[i] & kSigns);
                y[i] = mul2(first[i], s);
            }
        }
        if (!kExpanded && to.packed != nullptr) {
            reinterpret_cast<uint2*>(to.packed)[at] = make_uint2(pack_codes(first), pack_codes(first + 4));
            to.block_scale[at] = static_cast<uint8_t>((s - 0x2000u) >> 7);
        }
    }
    if (kExpanded || to.expanded != nullptr)
        reinterpret_cast<uint4*>(to.expanded)[at] =
            make_uint4(e4m3_of(y[0], y[1]), e4m3_of(y[2], y[3]), e4m3_of(y[4], y[5]), e4m3_of(y[6], y[7]));
}

// The same; false: it is special.
template <bool kExpanded, bool kNorms = false>
FP4BF16_HD bool quantize_block16(const uint32_t (&w)[8], const Outer& o, const Window& window,
                                 const FourBit& to, uint32_t at, BlockNorms* norms = nullptr) {
    bool usual = true;
    quantize_block16<kExpanded, kNorms>(
        w, o, window, [](uint32_t i) { return fast_pairs(i); }, to, at, [&] { usual = false; }, norms);
    return usual;
}

// Any block, the simple way. Byte by byte: results may lie anywhere. Returns what it adds to `norms`.
template <bool kNorms>
FP4BF16_HD BlockNorms any_block16(const float (&x)[16], const Outer& o, const FourBit& to, int64_t at) {
    const Rule rule = {FP4BF16_NVFP4_EXACT, FP4BF16_RULE_DEFAULT, false, false};
    Philox unused(0, 0, 0);
    Codes<16> codes;
    int counts[kCounts] = {};
    quantize_block(x, 16, 16, rule, o, &unused, 0, 0, kNorms, &codes, counts);
    if (to.expanded != nullptr)
        for (int j = 0; j < 16; ++j)
            to.expanded[16 * at + j] = static_cast<uint8_t>(expanded_byte(codes.code[j], codes.byte));
    if (to.packed != nullptr) {
        for (int j = 0; j < 8; ++j)
            to.packed[8 * at + j] = static_cast<uint8_t>(codes.code[2 * j] | codes.code[2 * j + 1] << 4);
        to.block_scale[at] = static_cast<uint8_t>(codes.byte);
    }
    BlockNorms norms;
    if constexpr (kNorms) {  // doubles: 2^-40 is far more than they lose
        const double unit = double{o.encode} * o.encode * (1 + 0x1p-40);
        norms.error = float_up(codes.sums[2] * unit), norms.used = float_up(codes.sums[1] * unit);
        if (codes.byte == kE4M3NaN) norms.error = norms.used = bits_float(kInfinity);
    }
    return norms;
}

__device__ __noinline__ void simple_block16(const float (&x)[16], Outer o, FourBit to, int64_t at) {
    any_block16<false>(x, o, to, at);
}
__device__ __noinline__ BlockNorms measured_block16(const float (&x)[16], Outer o, FourBit to, int64_t at) {
    return any_block16<true>(x, o, to, at);
}

// What a function returns that adds to norms where they are wanted.
template <bool kNorms>
using Measured = std::conditional_t<kNorms, BlockNorms, void>;

template <bool kNorms = false>
__device__ inline Measured<kNorms> special_block16(const uint32_t (&w)[8], const Outer& o, const FourBit& to,
                                                   int64_t at) {
    float x[16];
#pragma unroll
    for (int j = 0; j < 16; ++j) x[j] = bits_float(j % 2 == 0 ? w[j / 2] << 16 : w[j / 2] & 0xFFFF0000u);
    if constexpr (kNorms)
        return measured_block16(x, o, to, at);
    else
        simple_block16(x, o, to, at);
}

// A thread block's norms, as part `part`, where they are wanted. By all of its threads, whole warps; memory:
// 8 bytes a warp, which may be anything's that no thread needs any more.
__device__ inline void store_norms(const fp4bf16_group_norm_args& a, BlockNorms norms, float decode,
                                   void* memory, int64_t part) {
    if (a.norms == nullptr) return;
    auto* warps = static_cast<BlockNorms*>(memory);
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, count = blockDim.x * blockDim.y / 32;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        BlockNorms other;
        other.error = __shfl_xor_sync(0xFFFFFFFFu, norms.error, step);
        other.used = __shfl_xor_sync(0xFFFFFFFFu, norms.used, step);
        norms.add(other);
    }
    __syncthreads();
    if (thread % 32 == 0) warps[thread / 32] = norms;
    __syncthreads();
    if (thread != 0) return;
    for (int i = 1; i < count; ++i) norms.add(warps[i]);
    a.norms[2 * part] = __fmul_ru(__fmul_ru(norms.error, decode), decode);
    a.norms[2 * part + 1] = __fmul_ru(__fmul_ru(norms.used, decode), decode);
}

}  // namespace
}  // namespace fp4bf16
