// amax, quantise, dequantise: nvfp4_exact and nvfp4, one thread a block of 16. Written to be read and to
// agree bit for bit with python_ref/quantize.py: this is what faster kernels are checked against on the
// device.
#include "common.h"
#include "fp4.cuh"

namespace fp4bf16 {
namespace {

constexpr int kTop = 36;              // the scales of nvfp4_exact are numbered 0..36
constexpr int kLeastExponent = -119;  // every code * scale * 2^e is then a normal FP32 and BF16 number

// ---- the scales of nvfp4_exact: s = m * 2^k, m in {1, 1.25, 1.5}, k = -6..5, and 64
__device__ inline int quarters(int i) { return 4 + i % 3; }  // 4 m
__device__ inline int octave(int i) { return i / 3 - 6; }    // k
__device__ inline uint32_t scale_byte(int i) { return 8 * (i / 3 + 1) + 2 * (i % 3); }
__device__ inline float scale_value(int i) { return e4m3_decode(scale_byte(i)); }

__device__ inline float power_of_two(int e) { return __uint_as_float(static_cast<uint32_t>(e + 127) << 23); }

// Least e >= kLeastExponent with amax <= 288 * 2^e; 0 for amax 0.
__device__ inline int outer_exponent(float amax) {
    if (amax == 0.0f) return 0;
    int e;
    const float fraction = frexpf(amax, &e);  // in [0.5, 1), and 288 = 0.5625 * 2^9
    e = e - 9 + (fraction > 0.5625f);
    return e > kLeastExponent ? e : kLeastExponent;
}

// Index of the least scale with 6 s >= a; the top one where none is.
__device__ inline int least_scale(float a) {
    int g = 0;
    while (g < kTop && 6.0f * scale_value(g) < a) ++g;
    return g;
}

// Squared error of a block under scale i, in integers: sixteenths of a code step, rescaled to one unit for
// all scales, so that it does not depend on the order of the sum, on FMA or on how a division rounds.
__device__ inline int64_t block_error(const float (&t)[kBlock], int i) {
    const float inverse = 1.0f / scale_value(i);
    const float inverse16 = 16.0f * inverse;
    int64_t sum = 0;
    for (int j = 0; j < kBlock; ++j) {
        const float magnitude = fabsf(t[j]);
        const int fine = __float2int_rn(fminf(magnitude * inverse16, 255.0f));
        const int coded = 8 * e2m1_doubled(e2m1_code(magnitude * inverse));
        sum += static_cast<int64_t>(fine - coded) * (fine - coded);
    }
    return sum * (quarters(i) * quarters(i)) << (2 * (octave(i) + 6));
}

// Which of g-1, g, g+1, g+2 are tried, as bits 0..3: all of them, or the two that matter for where a falls in
// (6 s_{g-1}, 6 s_g].
__device__ inline uint32_t candidates(int g, float a, bool fast) {
    if (!fast) return 0b1111;
    const float high = 6.0f * scale_value(g), low = g > 0 ? 6.0f * scale_value(g - 1) : 0.0f;
    const int m = quarters(g);
    if (a <= low + (high - low) * (m == 6 ? 0.625f : 0.5f)) return 0b0101;
    return m == 5 ? 0b0011 : 0b0110;
}

__device__ inline int search_scale(const float (&t)[kBlock], float a, bool fast) {
    const int g = least_scale(a);
    const uint32_t tried = candidates(g, a, fast);
    int chosen = -1;
    int64_t least = 0;
    for (int c = 0; c < 4; ++c) {
        if ((tried >> c & 1) == 0) continue;
        const int i = min(max(g + c - 1, 0), kTop);
        const int64_t error = block_error(t, i);
        if (chosen < 0 || error < least) chosen = i, least = error;  // strict: a tie keeps the smaller scale
    }
    return chosen;
}

__device__ inline void write_block(const float (&t)[kBlock], float multiplier, uint8_t* packed) {
    for (int j = 0; j < kBlock; j += 2) {
        const uint32_t low = e2m1_code(fabsf(t[j]) * multiplier) | sign_bit(t[j]);
        const uint32_t high = e2m1_code(fabsf(t[j + 1]) * multiplier) | sign_bit(t[j + 1]);
        packed[j / 2] = static_cast<uint8_t>(low | high << 4);
    }
}

// ---- one block
__device__ inline void quantize_exact(const float (&x)[kBlock], float a, float amax, bool fast,
                                      uint8_t* packed, uint8_t* block_scale) {
    const int e = outer_exponent(amax);
    float t[kBlock];
    const float inverse = power_of_two(-e);
    for (int j = 0; j < kBlock; ++j) t[j] = x[j] * inverse;
    const int i = search_scale(t, a * inverse, fast);
    *block_scale = scale_byte(i);
    write_block(t, 1.0f / scale_value(i), packed);
}

// NVFP4 as in Transformer Engine (its reference quantiser): every step in FP32, in this order.
constexpr float kFloatMax = 3.40282347e38f;

__device__ inline float te_encode(float amax) {
    // 2688 = 448 * 6; not 0 for any finite amax
    return amax == 0.0f ? 1.0f : fminf(2688.0f / amax, kFloatMax);
}

__device__ inline void quantize_te(const float (&x)[kBlock], float a, float amax, uint8_t* packed,
                                   uint8_t* block_scale) {
    const float encode = te_encode(amax);
    const uint32_t byte = e4m3_code(fminf(a * (encode * (1.0f / 6.0f)), 448.0f));
    const float multiplier = fminf(1.0f / (e4m3_decode(byte) * (1.0f / encode)), kFloatMax);
    *block_scale = static_cast<uint8_t>(byte);
    write_block(x, multiplier, packed);
}

// One thread, one block of 16; the last block of a row is padded with zeros.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const T* x, int64_t rows, int64_t k, int64_t stride, fp4bf16_format format, bool fast,
                    const float* amax, int64_t rows_per_amax, uint8_t* packed, uint8_t* block_scale,
                    float* outer_scale) {
    const int64_t blocks = (k + kBlock - 1) / kBlock;  // a row
    const int64_t step = int64_t{gridDim.x} * kThreads;
    for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < rows * blocks; i += step) {
        const int64_t row = i / blocks, column = i % blocks * kBlock, group = row / rows_per_amax;
        float v[kBlock], a = 0.0f;  // (16,)
        bool finite = true;
        for (int j = 0; j < kBlock; ++j) {
            v[j] = column + j < k ? load(x + row * stride + column + j) : 0.0f;
            a = fmaxf(a, fabsf(v[j]));
            finite = finite && isfinite(v[j]);
        }
        if (!finite || a == 0.0f) {
            block_scale[i] = finite ? 0 : kE4M3NaN;
            for (int j = 0; j < kBlock / 2; ++j) packed[i * (kBlock / 2) + j] = 0;
        } else if (format == FP4BF16_NVFP4_EXACT) {
            quantize_exact(v, a, amax[group], fast, packed + i * (kBlock / 2), block_scale + i);
        } else {
            quantize_te(v, a, amax[group], packed + i * (kBlock / 2), block_scale + i);
        }
        if (column == 0 && row % rows_per_amax == 0)
            outer_scale[group] = format == FP4BF16_NVFP4_EXACT ? power_of_two(outer_exponent(amax[group]))
                                                               : 1.0f / te_encode(amax[group]);
    }
}

// The bits of non-negative floats sort as integers, so the maximum is one of integers and depends on no
// order. NaN and Inf are left out: they spoil their own block, not the scale of the others.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    amax_kernel(const T* x, int64_t rows, int64_t k, int64_t stride, int64_t rows_per_amax, int* amax) {
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        int most = 0;
        for (int64_t column = threadIdx.x; column < k; column += kThreads) {
            const float v = fabsf(load(x + row * stride + column));
            if (isfinite(v)) most = max(most, __float_as_int(v));
        }
        most = __reduce_max_sync(0xFFFFFFFFu, most);
        if (threadIdx.x % 32 == 0) atomicMax(amax + row / rows_per_amax, most);
    }
}

}  // namespace
}  // namespace fp4bf16

using namespace fp4bf16;

extern "C" fp4bf16_status fp4bf16_amax(const void* x, fp4bf16_dtype dtype, int64_t rows, int64_t k,
                                       int64_t x_stride, int64_t rows_per_amax, float* amax, void* stream) {
    FP4BF16_TRY(check_dtype("amax", dtype));
    FP4BF16_TRY(check_matrix("amax", "x", x, rows, k, x_stride, size_of(dtype)));
    FP4BF16_TRY(check_group("amax", "rows_per_amax", rows_per_amax));
    if (rows == 0) return FP4BF16_OK;
    FP4BF16_TRY(check_pointer("amax", "amax", amax, alignof(float)));
    const auto s = static_cast<cudaStream_t>(stream);
    FP4BF16_TRY(
        cuda_result(cudaMemsetAsync(amax, 0, ceil_div(rows, rows_per_amax) * sizeof(float), s), "amax"));
    if (k == 0) return FP4BF16_OK;
    const auto bits = reinterpret_cast<int*>(amax);
    const unsigned grid = static_cast<unsigned>(rows < 65535 ? rows : 65535);
    if (dtype == FP4BF16_FLOAT32)
        amax_kernel<<<grid, kThreads, 0, s>>>(static_cast<const float*>(x), rows, k, x_stride, rows_per_amax,
                                              bits);
    else
        amax_kernel<<<grid, kThreads, 0, s>>>(static_cast<const __nv_bfloat16*>(x), rows, k, x_stride,
                                              rows_per_amax, bits);
    return cuda_result(cudaGetLastError(), "amax");
}

extern "C" fp4bf16_status fp4bf16_quantize(const void* x, fp4bf16_dtype dtype, int64_t rows, int64_t k,
                                           int64_t x_stride, fp4bf16_format format, fp4bf16_search search,
                                           const float* amax, int64_t rows_per_amax, uint8_t* packed,
                                           uint8_t* block_scale, float* outer_scale, void* stream) {
    FP4BF16_TRY(check_dtype("quantize", dtype));
    FP4BF16_TRY(check_matrix("quantize", "x", x, rows, k, x_stride, size_of(dtype)));
    FP4BF16_TRY(check_group("quantize", "rows_per_amax", rows_per_amax));
    if (format != FP4BF16_NVFP4_EXACT && format != FP4BF16_NVFP4)
        return fail(FP4BF16_INVALID_ARGUMENT,
                    "quantize: format is %d, but FP4BF16_NVFP4_EXACT (0) or FP4BF16_NVFP4 "
                    "(1) is needed",
                    static_cast<int>(format));
    if (search != FP4BF16_SEARCH_FULL && search != FP4BF16_SEARCH_FAST)
        return fail(FP4BF16_INVALID_ARGUMENT,
                    "quantize: search is %d, but FP4BF16_SEARCH_FULL (0) or "
                    "FP4BF16_SEARCH_FAST (1) is needed",
                    static_cast<int>(search));
    if (rows == 0 || k == 0) return FP4BF16_OK;
    FP4BF16_TRY(check_pointer("quantize", "amax", amax, alignof(float)));
    FP4BF16_TRY(check_pointer("quantize", "packed", packed, 1));
    FP4BF16_TRY(check_pointer("quantize", "block_scale", block_scale, 1));
    FP4BF16_TRY(check_pointer("quantize", "outer_scale", outer_scale, alignof(float)));
    const unsigned grid = grid_for(rows * ceil_div(k, kBlock));
    const bool fast = search == FP4BF16_SEARCH_FAST;
    const auto s = static_cast<cudaStream_t>(stream);
    if (dtype == FP4BF16_FLOAT32)
        quantize_kernel<<<grid, kThreads, 0, s>>>(static_cast<const float*>(x), rows, k, x_stride, format,
                                                  fast, amax, rows_per_amax, packed, block_scale,
                                                  outer_scale);
    else
        quantize_kernel<<<grid, kThreads, 0, s>>>(static_cast<const __nv_bfloat16*>(x), rows, k, x_stride,
                                                  format, fast, amax, rows_per_amax, packed, block_scale,
                                                  outer_scale);
    return cuda_result(cudaGetLastError(), "quantize");
}
