// The rules of the quantisers, one block at a time in plain FP32: outer scale, block scale, codes. This is
// python_ref/quantize.py in its order of operations, and what the faster forms are checked against.
#pragma once

#include "common.h"
#include "fp4.cuh"
#include "philox.cuh"

namespace fp4bf16 {

constexpr float kFloatMax = 3.40282347e38f;
constexpr int kTop = 36;              // the scales of nvfp4_exact are numbered 0..36
constexpr int kLeastExponent = -119;  // every code * scale * 2^e is then a normal FP32 and BF16 number
constexpr uint32_t kInfinity = 0x7F800000u;
constexpr float kClip = 1.0f + 0x1p-20f;  // beyond the top by more than the rounding of 1 / s: clipped
// What a block counts.
enum { kClipped, kUnderflowed, kZero, kOverflowed, kNonFinite, kCounts };

struct Rule {
    fp4bf16_format format;
    fp4bf16_scale_rule rule;  // not DEFAULT
    bool full, stochastic;
};

// 2^e for -127 <= e <= 127 (2^-127 is subnormal).
FP4BF16_HD float power_of_two(int e) {
    return bits_float(e == -127 ? 0x00400000u : static_cast<uint32_t>(e + 127) << 23);
}

FP4BF16_HD bool is_finite(float v) { return (float_bits(v) & 0x7FFFFFFFu) < kInfinity; }

// ---- E2M1 of a magnitude, by the rounding of an addition: e2m1_code's value, half to even, saturating
FP4BF16_HD float e2m1_round(float v) {
    v = fminf(v, 6.0f);
    // 1.5 * 2^22 times the power of two under v, or one; by the exponent field.
    const int bits = static_cast<int>(float_bits(v) & 0x7F800000u);
#ifdef __CUDA_ARCH__
    const float p = __int_as_float(__viaddmax_s32(bits, 0x0B400000, 0x4AC00000));
#else
    const float p = bits_float(bits > 0x3F800000 ? bits + 0x0B400000 : 0x4AC00000);
#endif
    return (v + p) - p;
}

// Code of a magnitude that is an E2M1 value: times 2^-126 it has E2M1's fields at the top of FP32's.
FP4BF16_HD uint32_t e2m1_bits(float value) { return float_bits(value * 0x1p-126f) >> 22; }

// ---- outer scales
struct Outer {
    float encode, decode, amax;  // amax: of the group, for four-over-six
};

// Least e >= kLeastExponent with amax <= 288 * 2^e; 0 for amax 0. 288 = 1.125 * 2^8.
FP4BF16_HD int outer_exponent(float amax) {
    const uint32_t bits = float_bits(amax);
    if (bits == 0) return 0;
    const int e = static_cast<int>(bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x100000);
    return e > kLeastExponent ? e : kLeastExponent;
}

// Six times the largest block scale aimed at.
FP4BF16_HD float nvfp4_bound(fp4bf16_scale_rule rule) {
    return rule == FP4BF16_RULE_FOUR_OVER_SIX || rule == FP4BF16_RULE_FOUR_OVER_SIX_MAE ? 1536.0f : 2688.0f;
}

FP4BF16_HD Outer outer_from_amax(const Rule& r, float amax) {
    if (r.format == FP4BF16_NVFP4_EXACT) {
        const int e = outer_exponent(amax);
        return {power_of_two(-e), power_of_two(e), amax};
    }
    if (r.format == FP4BF16_NVFP4) {
        const float encode = amax == 0.0f ? 1.0f : fminf(nvfp4_bound(r.rule) / amax, kFloatMax);
        return {encode, 1.0f / encode, amax};
    }
    if (r.format == FP4BF16_FP8) {
        const float decode = amax == 0.0f ? 1.0f : fmaxf(amax / 448.0f, 0x1p-126f);
        return {1.0f / decode, decode, amax};
    }
    return {1.0f, 1.0f, amax};
}

FP4BF16_HD Outer outer_from_scale(const Rule& r, float decode) {
    return {1.0f / decode, decode, nvfp4_bound(r.rule) * decode};
}

// ---- the scales of nvfp4_exact: s = m * 2^k, m in {1, 1.25, 1.5}, k = -6..5, and 64
FP4BF16_HD uint32_t scale_byte(int i) { return 8 * (i / 3 + 1) + 2 * (i % 3); }
FP4BF16_HD float scale_value(int i) { return bits_float((scale_byte(i) << 20) + (120u << 23)); }

// Index of the least scale with 6 s >= a, unclipped; within an octave the index changes at 1.125, 1.5 and
// 1.875.
FP4BF16_HD int least_scale(float a) {
    const uint32_t bits = float_bits(a), fraction = bits & 0x7FFFFF;
    const int step = (fraction > 0x100000) + (fraction > 0x400000) + (fraction > 0x700000);
    return 3 * (static_cast<int>(bits >> 23) - 127) + 11 + step;
}

FP4BF16_HD int clip_scale(int i) { return i < 0 ? 0 : i > kTop ? kTop : i; }

// Functions of a block take its number of elements beside the array: where the compiler knows it, loops are
// unrolled; where not, they stay loops, for where registers matter more than time.

// Squared error of the magnitudes t under scale i: T = rint(16 t / s) up to 255, Q = 16 E2M1(t / s), and
// sum (T - Q)^2 weighted to one unit for all scales. All are integers (in FP32 under 2^24), so that it
// depends on no order.
template <int kB>
FP4BF16_HD int64_t block_error(const float (&t)[kB], int count, int i) {
    const float inverse = 1.0f / scale_value(i);
    float sum = 0.0f;
    for (int j = 0; j < count; ++j) {
        const float fine = (fminf(t[j] * (16.0f * inverse), 255.0f) + 0x1.8p23f) - 0x1.8p23f;
        const float d = fine - 16.0f * e2m1_round(t[j] * inverse);
        sum += d * d;
    }
    const int quarters = 4 + i % 3;
    return static_cast<int64_t>(static_cast<int>(sum) * quarters * quarters) << (2 * (i / 3));
}

// First and second candidate of the fast search, by where a falls in (6 s_{g-1}, 6 s_g].
FP4BF16_HD void fast_pair(float a, int g, int* first, int* second) {
    const float high = 6.0f * scale_value(g);
    const float low = 6.0f * (g > 0 ? scale_value(g - 1) : 0.75f * scale_value(0));
    const int m = g % 3;
    const bool lower = a <= low + (high - low) * (m == 2 ? 0.625f : 0.5f);
    *first = clip_scale(lower || m == 1 ? g - 1 : g);
    *second = clip_scale(m == 1 && !lower ? g : g + 1);
}

template <int kB>
FP4BF16_HD int search_scale(const float (&t)[kB], int count, float a, const Rule& r) {
    const int g = clip_scale(least_scale(a));
    if (r.stochastic) return g;
    int first = clip_scale(g - 1), second = g;
    if (!r.full) fast_pair(a, g, &first, &second);
    int64_t least = block_error(t, count, first);
    for (int c = 0; c < (r.full ? 3 : 1); ++c) {
        const int i = r.full ? clip_scale(g + c) : second;
        const int64_t error = block_error(t, count, i);
        if (error < least) first = i, least = error;  // strict: a tie keeps the smaller scale
    }
    return first;
}

// ---- codes of magnitudes, by chance: up iff the upper 24 bits of the word are under f * 2^24
FP4BF16_HD uint32_t e2m1_random(float v, uint32_t word) {
    v = fminf(v, 6.0f);
    const uint32_t low =
        (v >= 0.5f) + (v >= 1.0f) + (v >= 1.5f) + (v >= 2.0f) + (v >= 3.0f) + (v >= 4.0f) + (v >= 6.0f);
    const float steps = low < 4 ? 2.0f : low < 6 ? 1.0f : 0.5f;
    const float f = (v - 0.5f * static_cast<float>(e2m1_doubled(low))) * steps;
    return low + (static_cast<float>(word >> 8) < f * 0x1p24f);
}

FP4BF16_HD uint32_t e4m3_random(float v, uint32_t word) {
    v = fminf(v, 448.0f);
    uint32_t low;
    float f;
    if (v < 0x1p-6f) {
        low = static_cast<uint32_t>(v * 0x1p9f);
        f = v * 0x1p9f - static_cast<float>(low);
    } else {
        const uint32_t bits = float_bits(v);
        low = (bits >> 20) - (120 << 3);
        f = static_cast<float>(bits & 0xFFFFF) * 0x1p-20f;
    }
    return low + (static_cast<float>(word >> 8) < f * 0x1p24f);
}

// ---- a block's scale
struct Scale {
    uint32_t byte;
    float multiplier, value;  // v = |x| * multiplier is rounded to a code; code * value * outer decodes it
};

FP4BF16_HD Scale nvfp4_scale(uint32_t byte, const Outer& o) {
    const float value = e4m3_decode(byte);
    return {byte, fminf(1.0f / (value * o.decode), kFloatMax), value};
}

// Error of a block of magnitudes in the input's domain, in FP32 and in this order, which decides near-ties.
template <int kB>
FP4BF16_HD float four_over_six_error(const float (&a)[kB], int count, const Scale& s, const Outer& o,
                                     float bound, bool absolute) {
    float sum = 0.0f;
    for (int j = 0; j < count; ++j) {
        const float d = e2m1_round(a[j] * s.multiplier) * s.value * o.amax / bound - a[j];
        sum += absolute ? fabsf(d) : d * d;
    }
    return sum;
}

template <int kB>
FP4BF16_HD Scale four_over_six(const float (&a)[kB], int count, float top, const Rule& r, const Outer& o) {
    const bool absolute =
        r.rule == FP4BF16_RULE_FOUR_OVER_SIX_MAE || r.rule == FP4BF16_RULE_FOUR_OVER_SIX_MAE_448;
    const float base = top / 6.0f * o.encode, bound = nvfp4_bound(r.rule);
    const Scale four = nvfp4_scale(e4m3_code(fminf(base * 1.5f, 448.0f)), o);
    const Scale six = nvfp4_scale(e4m3_code(fminf(base, 448.0f)), o);
    const float error = four_over_six_error(a, count, four, o, bound, absolute);
    return error < four_over_six_error(a, count, six, o, bound, absolute) ? four : six;
}

FP4BF16_HD uint32_t mxfp4_rounding(fp4bf16_scale_rule rule) {
    return rule == FP4BF16_RULE_EVEN    ? 0x200000
           : rule == FP4BF16_RULE_FLOOR ? 0
           : rule == FP4BF16_RULE_RCEIL ? 0x3FFFFF
                                        : 0x7FFFFF;
}

// Scale of a finite block of magnitudes a with the largest `top` > 0; counts it where it under- or overflows.
template <int kB>
FP4BF16_HD Scale block_scale(const float (&a)[kB], int count, float top, const Rule& r, const Outer& o,
                             int* counts) {
    if (r.format == FP4BF16_NVFP4_EXACT) {
        float t[kB];
        for (int j = 0; j < count; ++j) t[j] = a[j] * o.encode;
        const float t_top = top * o.encode;
        const int i = search_scale(t, count, t_top, r);
        counts[kOverflowed] += t_top > 288.0f;
        counts[kUnderflowed] += t_top < 6.0f * 0x1p-6f;
        return {scale_byte(i), 1.0f / scale_value(i), scale_value(i)};
    }
    if (r.format == FP4BF16_NVFP4) {
        const float exact = top * (o.encode * (1.0f / 6.0f)), clipped = fminf(exact, 448.0f);
        const Scale s = r.rule != FP4BF16_RULE_TE
                            ? four_over_six(a, count, top, r, o)
                            : nvfp4_scale(r.stochastic ? e4m3_code_up(clipped) : e4m3_code(clipped), o);
        counts[kOverflowed] += exact > 464.0f;
        counts[kUnderflowed] += s.byte == 0;
        return s;
    }
    if (r.format == FP4BF16_MXFP4) {
        const int exponent = static_cast<int>((float_bits(top) + mxfp4_rounding(r.rule)) >> 23) - 2;
        const int byte = exponent > 0 ? exponent : 0;
        counts[kUnderflowed] += exponent < 0;
        return {static_cast<uint32_t>(byte), power_of_two(127 - byte), power_of_two(byte - 127)};
    }
    return {0, o.encode, 1.0f};
}

}  // namespace fp4bf16
