// Blocks of 16 BF16 numbers two at a time, in packed FP16. Where the outer scale is a power of two this gives
// the codes and errors of quantize_rules.cuh exactly: with y = |x| * 2^i, m in {1, 1.25, 1.5} and h any
// midpoint of E2M1 or of sixteenths, y has 8 significant bits and m h at most 10, so y / m either is h, and
// then FP16's y * (1 / m) is h as well, or lies further from it than FP16 rounds.
//
// A word holds elements 2 i (low half) and 2 i + 1 of its block.
#pragma once

#include "quantize_rules.cuh"

namespace fp4bf16 {

constexpr uint32_t kMagnitudes = 0x7FFF7FFFu, kSigns = 0x80008000u;

// ---- FP16 pairs as words
FP4BF16_HD __half2 pair(uint32_t bits) {
    __half2 v;
    memcpy(static_cast<void*>(&v), &bits, sizeof v);
    return v;
}
FP4BF16_HD uint32_t bits_of(__half2 v) {
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    return bits;
}
FP4BF16_HD uint32_t mul2(uint32_t a, uint32_t b) { return bits_of(__hmul2_rn(pair(a), pair(b))); }
FP4BF16_HD uint32_t add2(uint32_t a, uint32_t b) { return bits_of(__hadd2_rn(pair(a), pair(b))); }
FP4BF16_HD uint32_t sub2(uint32_t a, uint32_t b) { return bits_of(__hsub2_rn(pair(a), pair(b))); }
FP4BF16_HD uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
#ifdef __CUDA_ARCH__
    return bits_of(__hfma2(pair(a), pair(b), pair(c)));
#else
    const float2 x = __half22float2(pair(a)), y = __half22float2(pair(b)), z = __half22float2(pair(c));
    return bits_of({__double2half(double{x.x} * y.x + z.x), __double2half(double{x.y} * y.y + z.y)});
#endif
}
// max(a b + c, 0)
FP4BF16_HD uint32_t fma2_relu(uint32_t a, uint32_t b, uint32_t c) {
#ifdef __CUDA_ARCH__
    return bits_of(__hfma2_relu(pair(a), pair(b), pair(c)));
#else
    const uint32_t v = fma2(a, b, c);
    return v & ~((v >> 15 & 0x10001u) * 0xFFFFu);
#endif
}
// Of non-negative halves, as integers.
FP4BF16_HD uint32_t max2(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
    return __vmaxu2(a, b);
#else
    const uint32_t low = (a & 0xFFFF) > (b & 0xFFFF) ? a & 0xFFFF : b & 0xFFFF;
    return (a >> 16 > b >> 16 ? a >> 16 : b >> 16) << 16 | low;
#endif
}
FP4BF16_HD uint32_t min2(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
    return __vminu2(a, b);
#else
    const uint32_t low = (a & 0xFFFF) < (b & 0xFFFF) ? a & 0xFFFF : b & 0xFFFF;
    return (a >> 16 < b >> 16 ? a >> 16 : b >> 16) << 16 | low;
#endif
}
FP4BF16_HD uint32_t low_twice(uint32_t v) { return bits_of(__low2half2(pair(v))); }
FP4BF16_HD uint32_t high_twice(uint32_t v) { return bits_of(__high2half2(pair(v))); }
FP4BF16_HD uint32_t both(float v) { return bits_of(__float2half2_rn(v)); }
FP4BF16_HD uint32_t bytes(uint32_t a, uint32_t b, uint32_t selector) {
#ifdef __CUDA_ARCH__
    return __byte_perm(a, b, selector);
#else
    const uint64_t all = uint64_t{b} << 32 | a;
    uint32_t out = 0;
    for (int i = 0; i < 4; ++i)
        out |= static_cast<uint32_t>(all >> (8 * (selector >> (4 * i) & 7)) & 0xFF) << (8 * i);
    return out;
#endif
}

// Magnitudes of BF16 times 2^n as FP16, n in the exponent field of `shift` (both halves) less the biases'
// difference; what falls under FP16's least normal number becomes something smaller than it.
FP4BF16_HD uint32_t to_half(uint32_t magnitudes, uint32_t shift) {
#ifdef __CUDA_ARCH__
    return __viaddmax_s16x2(magnitudes, shift, 0) << 3;
#else
    uint32_t out = 0;
    for (int i = 0; i < 32; i += 16) {
        const int v = static_cast<int16_t>(magnitudes >> i) + static_cast<int16_t>(shift >> i);
        out |= static_cast<uint32_t>(v > 0 ? v : 0) << i;
    }
    return out << 3;
#endif
}

// The shift that takes numbers of biased exponent `from` to those of FP16's biased exponent `to`.
FP4BF16_HD uint32_t shift_of(int to, int from) {
    return (static_cast<uint32_t>((to - from) * 128) & 0xFFFF) * 0x10001u;
}

// ---- E2M1
// 0 <= v < 9 rounded to {0, .5, 1, 1.5, 2, 3, 4, 6, 8}. Added to m = 512 + 508 max(v - 1, 0), v lands where
// FP16's last place is the grid's step, .5, 1 or 2; within a quarter of 2 and of 4 it may be the next
// octave's, which rounds to the same. m is a multiple of the step, an even one where v is a tie: ties go to
// the even code. All in FP16's pipe, which the search's other halves, integers, leave free.
FP4BF16_HD uint32_t e2m1_round(uint32_t v) {
    const uint32_t over_one = fma2_relu(v, 0x3C003C00u, 0xBC00BC00u);  // 1, -1
    const uint32_t m = fma2(over_one, 0x5FF05FF0u, 0x60006000u);       // 508, 512
    return sub2(add2(v, m), m);
}

// Packed codes of eight: q 2^-14 has the code at the top of FP16's fields, under the sign.
FP4BF16_HD uint32_t pack_codes(const uint32_t* q) {
    uint32_t h[4];
    for (int i = 0; i < 4; ++i) h[i] = mul2(q[i], 0x04000400u);
    const uint32_t a = bytes(h[0], h[1], 0x7351), b = bytes(h[2], h[3], 0x7351);
    const uint32_t even = bytes(a, b, 0x5410), odd = bytes(a, b, 0x7632);  // S...CCC. in each byte
    const uint32_t low = 0x0F0F0F0Fu;
    const uint32_t codes = (even >> 1 & low) | (odd << 3 & ~low);
    return codes | (even >> 4 & low) | (odd & ~low);
}

// E4M3 of four: q s 2^-8 has E4M3's bits in the fields of FP16, subnormals included.
FP4BF16_HD uint32_t expand_codes(const uint32_t* magnitude, const uint32_t* sign, uint32_t scale) {
    const uint32_t a = mul2(magnitude[0], scale) << 1, b = mul2(magnitude[1], scale) << 1;
    return bytes(a, b, 0x7531) | (bytes(sign[0], sign[1], 0x7531) & 0x80808080u);
}

// ---- the scale search of nvfp4_exact
// Candidate: v = y / s rounded to E2M1 -> q; the sum of (T - Q)^2. Numbers 96 + T / 16 - q in FP16 have
// 16 T - Q in their lowest byte.
template <bool kClips>
FP4BF16_HD int try_scale(const uint32_t (&y)[8], uint32_t inverse, uint32_t (&q)[8]) {
    int sum = 0;
    for (int i = 0; i < 8; i += 2) {
        uint32_t d[2];
        for (int j = 0; j < 2; ++j) {
            const uint32_t v = mul2(y[i + j], inverse);
            q[i + j] = e2m1_round(kClips ? min2(v, 0x46004600u) : v);  // 6
            d[j] = sub2(add2(v, 0x56005600u), q[i + j]);               // 96
        }
        const uint32_t four = bytes(d[0], d[1], 0x6420);
#ifdef __CUDA_ARCH__
        sum = __dp4a(static_cast<int>(four), static_cast<int>(four), sum);
#else
        for (int j = 0; j < 32; j += 8)
            sum += static_cast<int8_t>(four >> j) * static_cast<int8_t>(four >> j);
#endif
    }
    return sum;
}

FP4BF16_HD float reciprocal(float v) {
#ifdef __CUDA_ARCH__
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(v));  // rounded to FP16 before it is used
    return v;
#else
    return 1.0f / v;
#endif
}

// The two candidates of the fast search for a block whose largest t is f 2^n: their scales are those of n = 0
// times 2^n, and they depend on f's seven bits alone.
struct alignas(16) Pair {
    uint32_t inverse;  // FP16, 1 / s of the first (low half) and the second, in units of a largest in [4, 8)
    uint32_t bytes;    // s at n = 0; an octave is 8
    float weight[2];   // (8 s)^2 in the units of `inverse`
};

struct PairTable {
    Pair entry[128];
};

constexpr PairTable make_pairs() {
    PairTable table{};
    for (int i = 0; i < 128; ++i) {
        const int f = i;  // in 128ths over one; thresholds as in least_scale and fast_pair
        const int first = -1 + (f > 7) + (f > 40) + (f > 112);
        const int second = 1 + (f > 16) + (f > 64) - (f > 88) + 2 * (f > 112);
        // Of s = .625, .75, 1, 1.25, 1.5, 2 times 1 / 4: E4M3, FP16 of 1 / (4 s), (8 * 4 s)^2.
        constexpr uint32_t kBytes[6] = {0x22, 0x24, 0x28, 0x2A, 0x2C, 0x30};
        constexpr uint32_t kInverse[6] = {0x3E66, 0x3D55, 0x3C00, 0x3A66, 0x3955, 0x3800};
        constexpr float kWeight[6] = {25, 36, 64, 100, 144, 256};
        table.entry[i] = {kInverse[first + 1] | kInverse[second + 1] << 16,
                          kBytes[first + 1] | kBytes[second + 1] << 16,
                          {kWeight[first + 1], kWeight[second + 1]}};
    }
    return table;
}

// Byte of the scale of a block y = |x| 2^n, its largest in [4, 8), and its codes' values. t_top: its largest
// t, at most 6 * 64; unit: 1 in y's units, t = y * unit.
FP4BF16_HD uint32_t search_fast_half(const uint32_t (&y)[8], float t_top, float unit, Pair p,
                                     uint32_t (&q)[8]) {
    const uint32_t octaves = (float_bits(t_top) >> 23) - 127;
    uint32_t both_bytes = p.bytes + octaves * 0x80008u;
    if (t_top < 0.125f || t_top > 288.0f) {  // a candidate may lie outside the window
        const int g = clip_scale(least_scale(t_top));
        int first, second;
        fast_pair(t_top, g, &first, &second);
        const float s = scale_value(first), r = scale_value(second);
        p.inverse = bits_of(__floats2half2_rn(unit * reciprocal(s), unit * reciprocal(r)));
        both_bytes = scale_byte(first) | scale_byte(second) << 16;
        p.weight[0] = s * s;
        p.weight[1] = r * r;
    }
    const float error = static_cast<float>(try_scale<true>(y, low_twice(p.inverse), q)) * p.weight[0];
    uint32_t other[8];
    // Strict: a tie keeps the smaller scale. Integers under 2^24, as floats.
    const bool better =
        static_cast<float>(try_scale<false>(y, high_twice(p.inverse), other)) * p.weight[1] < error;
    for (int j = 0; j < 8; ++j) q[j] = better ? other[j] : q[j];
    return better ? both_bytes >> 16 : both_bytes & 0xFF;
}

FP4BF16_HD uint32_t search_full_half(const uint32_t (&y)[8], float t_top, float unit, uint32_t (&q)[8]) {
    const int base = least_scale(t_top), g = base > 0 ? base : 0;
    int chosen = clip_scale(g - 1);
    float s = scale_value(chosen);
    float least = static_cast<float>(try_scale<true>(y, both(unit * reciprocal(s)), q)) * (s * s);
    for (int c = 0; c < 3; ++c) {
        const int i = clip_scale(g + c);
        uint32_t other[8];
        s = scale_value(i);
        const float error =
            static_cast<float>(try_scale<false>(y, both(unit * reciprocal(s)), other)) * (s * s);
        const bool better = error < least;
        least = better ? error : least;
        chosen = better ? i : chosen;
        for (int j = 0; j < 8; ++j) q[j] = better ? other[j] : q[j];
    }
    return scale_byte(chosen);
}

// ---- any multiplier: v = RN32(|x| * multiplier) in FP32
// Of two BF16 numbers' magnitudes.
FP4BF16_HD uint32_t round_pair(uint32_t w, float multiplier) {
    const float low = fabsf(bits_float(w << 16)), high = fabsf(bits_float(w & 0xFFFF0000u));
    return bits_of(__floats2half2_rn(e2m1_round(low * multiplier), e2m1_round(high * multiplier)));
}

}  // namespace fp4bf16
