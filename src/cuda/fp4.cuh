// Encode and decode of the small formats, in plain integer and FP32 steps that read like their definitions.
// The casts of <cuda_fp4.h> go through FP64 on GPUs without the instruction (sm_90 included), so none is used
// here.
#pragma once

#include <cstdint>
#include <cstring>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Arithmetic is compiled for the host as well, so that it can be tested where there is no GPU.
#define FP4BF16_HD __host__ __device__ inline

namespace fp4bf16 {

FP4BF16_HD uint32_t float_bits(float v) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(v);
#else
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    return bits;
#endif
}

FP4BF16_HD float bits_float(uint32_t bits) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(bits);
#else
    float v;
    memcpy(&v, &bits, sizeof v);
    return v;
#endif
}

constexpr int kBlock = 16;  // elements that share an E4M3 scale

// ---- loads and stores: everything computes in FP32
__device__ inline float load(const float* p) { return *p; }
__device__ inline float load(const __nv_bfloat16* p) { return __bfloat162float(*p); }
__device__ inline float load(const __half* p) { return __half2float(*p); }
__device__ inline void store(float* p, float v) { *p = v; }
__device__ inline void store(__nv_bfloat16* p, float v) { *p = __float2bfloat16_rn(v); }
__device__ inline void store(__half* p, float v) { *p = __float2half_rn(v); }

// ---- E2M1: sign, 2 exponent bits, 1 mantissa bit; values 0 .5 1 1.5 2 3 4 6
// Code of a magnitude, round half to even, saturating: one comparison for each midpoint between neighbours. A
// tie goes to the even code, so midpoints over an even code are compared with > and those under one with >=.
FP4BF16_HD uint32_t e2m1_code(float magnitude) {
    return (magnitude > 0.25f) + (magnitude >= 0.75f) + (magnitude > 1.25f) + (magnitude >= 1.75f) +
           (magnitude > 2.5f) + (magnitude >= 3.5f) + (magnitude > 5.0f);
}

// Twice the value of a magnitude code: an integer, 0 1 2 3 4 6 8 12.
FP4BF16_HD int e2m1_doubled(uint32_t code) {
    return code < 2 ? static_cast<int>(code) : static_cast<int>((2 + (code & 1)) << (code / 2 - 1));
}

FP4BF16_HD uint32_t sign_bit(float v) { return (float_bits(v) >> 31) << 3; }

FP4BF16_HD float e2m1_decode(uint32_t nibble) {
    const float magnitude = 0.5f * static_cast<float>(e2m1_doubled(nibble & 7));
    return nibble & 8 ? -magnitude : magnitude;
}

// ---- E4M3 (finite only: 448 is the largest, 0x7F is NaN)
constexpr uint32_t kE4M3NaN = 0x7F;

FP4BF16_HD float e4m3_decode(uint32_t byte) {
    const uint32_t exponent = (byte >> 3) & 15, mantissa = byte & 7;
    if ((byte & 0x7F) == kE4M3NaN) return bits_float(0x7FC00000u | (byte & 0x80) << 24);
    // Subnormals are mantissa * 2^-9; normals get their FP32 exponent and mantissa bits directly.
    const float magnitude = exponent == 0 ? static_cast<float>(mantissa) * 0x1p-9f
                                          : bits_float((exponent + 120) << 23 | mantissa << 20);
    return byte & 0x80 ? -magnitude : magnitude;
}

// Byte of a scale in [0, 448], round half to even.
FP4BF16_HD uint32_t e4m3_code(float scale) {
    if (scale < 0x1p-6f)
        return float_bits(scale * 0x1p9f + 0x1.8p23f) - 0x4B400000u;  // multiples of 2^-9; 8 is normal
    uint32_t bits = float_bits(scale);
    bits += 0x7FFFF + ((bits >> 20) & 1);  // half of the last place kept, minus one unless that place is odd
    return (bits >> 20) - (120 << 3);
}

// The least byte whose value is at least `scale`, for scale in [0, 448].
FP4BF16_HD uint32_t e4m3_code_up(float scale) {
    if (scale < 0x1p-6f) {
        const uint32_t byte = e4m3_code(scale);
        return byte + (e4m3_decode(byte) < scale);
    }
    return ((float_bits(scale) + 0xFFFFF) >> 20) - (120 << 3);
}

}  // namespace fp4bf16
