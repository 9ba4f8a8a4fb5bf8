// The arithmetic of an optimizer step and of a weight's FP4 twin, an element and a block at a time; compiled
// for the host as well, so that it can be tested without a GPU.
#pragma once

#include <cuda_fp8.h>

#include "quantize_rules.cuh"

namespace fp4bf16 {

// What all elements of a step share.
struct StepFactors {
    float beta1, rest1, beta2, rest2, eps;        // rest: 1 - beta
    float size, correction, shrink, factor, mix;  // scalars[0] to [3], [5]
};

// Parameter p and its moments after gradient g, in the order of operations of nn/optim.py, none fused.
FP4BF16_HD void adamw_element(const StepFactors& s, float g, float& p, float& m, float& v) {
    g = g * s.factor;
    v = v * s.beta2 + g * g * s.rest2;
    m = m * s.beta1 + g * s.rest1;
    const float root = sqrtf(v) * s.correction + s.eps;
    p = p * s.shrink - m / root * s.size;
}

// The average after the step, as diffusion/ema.py has it.
FP4BF16_HD float average_element(const StepFactors& s, float average, float p) {
    return average + (p - average) * s.mix;
}

// 1 / s of scale i, rounded once: its power of two is exact.
FP4BF16_HD float inverse_scale(int i) {
    const int third = i / 3, m = i - 3 * third;
    return (m == 0 ? 1.0f : m == 1 ? 0.8f : 2.0f / 3.0f) * power_of_two(6 - third);
}

// Squared error of the magnitudes of t under scale i: block_error of quantize_rules.cuh in another unit. d is
// a multiple of 1/16 and their squares add up to less than 2^24 / 256 for every candidate of the search, so
// that FP32 holds all of it exactly, fused or not.
FP4BF16_HD float candidate_error(const float (&t)[16], int i) {
    const float inverse = inverse_scale(i), s = scale_value(i);
    float sum = 0.0f;
    for (int j = 0; j < 16; ++j) {
        const float v = fabsf(t[j]) * inverse;
        const float d = ((v + 0x1.8p19f) - 0x1.8p19f) - e2m1_round(v);
        sum = fmaf(d, d, sum);
    }
    return sum * (s * s);
}

// Index of the scale of a block whose largest magnitude is a <= 288.
FP4BF16_HD int search_full(const float (&t)[16], float a) {
    const int base = least_scale(a), g = base > 0 ? base : 0;
    int best = g > 0 ? g - 1 : 0;
    float least = candidate_error(t, best);
    for (int c = 0; c < 3; ++c) {
        const int i = clip_scale(g + c);
        const float error = candidate_error(t, i);
        if (error < least) best = i, least = error;  // strict: a tie keeps the smaller scale
    }
    return best;
}

// E4M3 of two numbers that it holds.
FP4BF16_HD uint32_t e4m3_pair(float low, float high) {
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

// A block of nvfp4_exact by full search, expanded: E4M3 bytes of code * block scale. The row's largest finite
// magnitude is at most 288 / encode. x is used up.
FP4BF16_HD void twin_block(float (&x)[16], float encode, uint32_t (&bytes)[4]) {
    uint32_t top = 0;
    for (int j = 0; j < 16; ++j) {
        const uint32_t bits = float_bits(x[j]) & 0x7FFFFFFFu;
        top = bits > top ? bits : top;
        x[j] *= encode;
    }
    if (top == 0 || top >= kInfinity) {  // zeros lose their signs; NaN and Inf spoil the whole block
        for (int i = 0; i < 4; ++i) bytes[i] = top == 0 ? 0 : kE4M3NaN * 0x01010101u;
        return;
    }
    const int i = search_full(x, bits_float(top) * encode);
    const float inverse = inverse_scale(i), s = scale_value(i);
    for (int j = 0; j < 16; ++j) x[j] = copysignf(e2m1_round(fabsf(x[j]) * inverse) * s, x[j]);
    for (int j = 0; j < 4; ++j)
        bytes[j] = e4m3_pair(x[4 * j], x[4 * j + 1]) | e4m3_pair(x[4 * j + 2], x[4 * j + 3]) << 16;
}

}  // namespace fp4bf16
