// dequantize and expand: packed codes and their scales -> values, or E4M3 bytes. Bit-equal to
// python_ref/quantize.py: (code * block_scale) * outer_scale in FP32, rounded once.
//
// code * block_scale is exact in FP16 for E4M3 scales (6 significant bits, 2^-10 to 2688), so it is made
// there, two at a time.
#include <cuda_fp8.h>

#include "common.h"
#include "launch.cuh"
#include "elementwise.cuh"
#include "fp4.cuh"
#include "scheduler.cuh"

namespace fp4bf16 {
namespace {

enum Kind { kNvfp4, kMxfp4, kFp8 };  // E2M1 with E4M3 scales or with E8M0 scales, plain E4M3

struct Source {
    const uint8_t* packed;
    const uint8_t* block_scale;
    const float* outer_scale;  // NULL: one
    int64_t rows, k, packed_stride, scale_stride, mid, inner;

    __device__ float outer(int64_t row) const {
        if (outer_scale == nullptr) return 1.0f;
        if (mid == 1) return outer_scale[row];                  // row / inner * inner + row % inner
        if (rows <= 0xFFFFFFFF && mid * inner <= 0xFFFFFFFF) {  // 32-bit divisions: a third of the time
            const uint32_t r = static_cast<uint32_t>(row), i = static_cast<uint32_t>(inner);
            return outer_scale[r / static_cast<uint32_t>(mid * inner) * i + r % i];
        }
        return outer_scale[row / (mid * inner) * inner + row % inner];
    }
};

// ---- decode
// E8M0: 2^(byte - 127), the least one a subnormal FP32 number; 0xFF is NaN.
__device__ float power_scale(uint32_t byte) {
    return __uint_as_float(byte == 0 ? 0x00400000u : byte == 0xFF ? 0x7FC00000u : byte << 23);
}

__device__ float2 two_floats(__half2 v) { return __half22float2(v); }

// The nibbles at bits 0..3 and 16..19 of `pair`, as FP16. S EE M moved to the top of an FP16 number is the
// value times 2^-14, subnormals included.
__device__ __half2 decode_pair(uint32_t pair) {
    const uint32_t bits = (pair & 0x00080008) << 12 | (pair & 0x00070007) << 9;
    return __hmul2(*reinterpret_cast<const __half2*>(&bits), __float2half2_rn(16384.0f));
}

// Eight nibbles -> the pairs (0, 4), (1, 5), (2, 6), (3, 7).
__device__ void decode_word(uint32_t word, __half2 (&pairs)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = decode_pair(word >> (4 * i));
}

// kCount codes of a row from column k (a multiple of kCount; none of them crosses a block) -> code * scale.
// `bytes` holds them in memory order.
template <Kind kKind, int kCount>
__device__ void decode(uint64_t bytes, uint32_t scale_byte, float (&v)[kCount]) {
    if constexpr (kKind == kFp8) {
#pragma unroll
        for (int i = 0; i < kCount; i += 2) {
            const auto two = static_cast<__nv_fp8x2_storage_t>(bytes >> (8 * i));
            const float2 f = two_floats(__half2(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3)));
            v[i] = f.x;
            v[i + 1] = f.y;
        }
    } else {
        uint32_t word = static_cast<uint32_t>(bytes);
        // Four nibbles are spread so that codes 2 and 3 stand where codes 4 and 5 of eight do.
        if (kCount == 4) word = (word & 0xFF) | (word & 0xFF00) << 8;
        const auto raw = static_cast<__nv_fp8_storage_t>(scale_byte);
        const __half2 scale = __half2half2(__half(__nv_cvt_fp8_to_halfraw(raw, __NV_E4M3)));
        const float power = kKind == kMxfp4 ? power_scale(scale_byte) : 1.0f;
#pragma unroll
        for (int i = 0; i < kCount / 2; ++i) {
            const __half2 code = decode_pair(word >> (4 * i));
            const float2 f = two_floats(kKind == kNvfp4 ? __hmul2(code, scale) : code);
            v[i] = kKind == kMxfp4 ? f.x * power : f.x;
            v[i + kCount / 2] = kKind == kMxfp4 ? f.y * power : f.y;
        }
    }
}

template <Kind kKind>
__device__ float decode_one(const Source& s, int64_t row, int64_t column) {
    const uint8_t* packed = s.packed + row * s.packed_stride;
    if (kKind == kFp8) return e4m3_decode(packed[column]);
    const uint32_t byte = packed[column / 2];
    const uint32_t scale = s.block_scale[row * s.scale_stride + column / (kKind == kMxfp4 ? 32 : 16)];
    return e2m1_decode(column & 1 ? byte >> 4 : byte & 15) *
           (kKind == kMxfp4 ? power_scale(scale) : e4m3_decode(scale));
}

// Packed bytes of kCount codes, as one load.
template <int kBytes>
__device__ uint64_t load_bytes(const uint8_t* p) {
    if constexpr (kBytes == 8) return *reinterpret_cast<const uint64_t*>(p);
    if constexpr (kBytes == 4) return *reinterpret_cast<const uint32_t*>(p);
    return *reinterpret_cast<const uint16_t*>(p);
}

// ---- whole rows without gaps: neighbouring threads take neighbouring vectors, whatever their rows, kAtOnce
// of them a block apart, all loads before the first store
template <Kind kKind, typename T, int kAtOnce>
__global__ void __launch_bounds__(kThreads)
    dequantize_flat(const uint8_t* __restrict__ packed, const uint8_t* __restrict__ block_scale,
                    const float* __restrict__ outer_scale, T* __restrict__ x, const uint32_t vectors,
                    const Divisor per_outer) {
    wait_for_previous();
    constexpr int kCount = kVector<T>, kBytes = kKind == kFp8 ? kCount : kCount / 2;
    constexpr uint32_t kVectorsPerScale = (kKind == kMxfp4 ? 32 : 16) / kCount;
    const uint32_t first = blockIdx.x * (kThreads * kAtOnce) + threadIdx.x;
    uint64_t bytes[kAtOnce];
    uint32_t scale[kAtOnce];
    float outer[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
        const uint32_t i = first + u * kThreads;
        if (i >= vectors) break;
        bytes[u] = load_bytes<kBytes>(packed + int64_t{i} * kBytes);
        scale[u] = kKind == kFp8 ? 0 : block_scale[i / kVectorsPerScale];
        outer[u] = outer_scale == nullptr ? 1.0f : outer_scale[per_outer.divide(i)];
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
        const uint32_t i = first + u * kThreads;
        if (i >= vectors) break;
        float v[kCount];
        decode<kKind, kCount>(bytes[u], scale[u], v);
        Vector<T, kCount> out;
#pragma unroll
        for (int j = 0; j < kCount; ++j) out.v[j] = from_float<T>(v[j] * outer[u]);
        *reinterpret_cast<Vector<T, kCount>*>(x + int64_t{i} * kCount) = out;
    }
}

// ---- rows of contiguous k, everything aligned: one 16-byte store a vector, loads before stores
template <Kind kKind, typename T>
__global__ void __launch_bounds__(kThreads)
    dequantize_rows(const Source s, T* __restrict__ x, int64_t x_stride) {
    wait_for_previous();
    constexpr int kCount = kVector<T>, kBytes = kKind == kFp8 ? kCount : kCount / 2;
    constexpr int kVectorsPerScale = (kKind == kMxfp4 ? 32 : 16) / kCount;
    const int k = static_cast<int>(s.k), vectors = (k + kCount - 1) / kCount;  // 32 bits are enough in a row
    const int piece = blockDim.x * kUnroll;
    const int64_t row_step = int64_t{gridDim.x} * blockDim.y;
    for (int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y; row < s.rows; row += row_step) {
        const float outer = s.outer(row);
        const uint8_t* packed = s.packed + row * s.packed_stride;
        const uint8_t* scales = s.block_scale + row * s.scale_stride;
        T* to = x + row * x_stride;
        for (int first = blockIdx.y * piece + threadIdx.x; first < vectors; first += gridDim.y * piece) {
            uint64_t bytes[kUnroll];
            uint32_t scale[kUnroll];
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                const int i = first + u * blockDim.x;
                if (i >= vectors) continue;
                bytes[u] = load_bytes<kBytes>(packed + i * int64_t{kBytes});
                scale[u] = kKind == kFp8 ? 0 : scales[i / kVectorsPerScale];
            }
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                const int i = first + u * blockDim.x;
                if (i >= vectors) continue;
                float v[kCount];
                decode<kKind, kCount>(bytes[u], scale[u], v);
                Vector<T, kCount> out;
#pragma unroll
                for (int j = 0; j < kCount; ++j) out.v[j] = from_float<T>(v[j] * outer);
                if (k - i * kCount >= kCount)
                    *reinterpret_cast<Vector<T, kCount>*>(to + i * int64_t{kCount}) = out;
                else
#pragma unroll
                    for (int j = 0; j < kCount; ++j)
                        if (j < k - i * kCount) to[i * int64_t{kCount} + j] = out.v[j];
            }
        }
    }
}

// Element (row, k) of x lies at row / after * x_stride + k * k_stride + row % after.
struct Layout {
    int64_t after, x_stride, k_stride;
};

inline unsigned limited(int64_t blocks) {
    return static_cast<unsigned>(blocks < 0x7FFFFFFF ? blocks : 0x7FFFFFFF);
}

// ---- after > 1: the rows are neighbours in x. A warp takes 32 of them, a thread 16 columns of its own: read
// at once (kWhole: aligned), stored one by one beside those of its neighbours.
template <Kind kKind, bool kWhole, typename T>
__global__ void __launch_bounds__(kThreads)
    dequantize_columns(const Source s, T* __restrict__ x, const Layout to) {
    wait_for_previous();
    constexpr int kColumns = 16, kPart = 8, kBytes = kKind == kFp8 ? kPart : kPart / 2;
    constexpr int kTileK = kColumns * (kThreads / 32);
    const int64_t tiles_r = (s.rows + 31) / 32, tiles_k = (s.k + kTileK - 1) / kTileK;
    for (int64_t tile = blockIdx.x; tile < tiles_r * tiles_k; tile += gridDim.x) {
        const int64_t row = tile / tiles_k * 32 + threadIdx.x % 32;
        const int64_t k0 = tile % tiles_k * kTileK + threadIdx.x / 32 * kColumns;
        if (row >= s.rows || k0 >= s.k) continue;
        const uint8_t* packed = s.packed + row * s.packed_stride + (kKind == kFp8 ? k0 : k0 / 2);
        const int64_t block = row * s.scale_stride + k0 / (kKind == kMxfp4 ? 32 : 16);
        const uint32_t scale = kKind == kFp8 ? 0 : s.block_scale[block];
        const float outer = s.outer(row);
        T* base = x + row / to.after * to.x_stride + row % to.after + k0 * to.k_stride;
#pragma unroll
        for (int part = 0; part < kColumns; part += kPart) {
            if (k0 + part >= s.k) break;
            const uint8_t* from = packed + part / kPart * kBytes;
            uint64_t bytes = 0;
            if constexpr (kWhole)
                bytes = load_bytes<kBytes>(from);
            else
                for (int j = 0; j < kBytes; ++j)
                    if (kKind != kFp8 || k0 + part + j < s.k) bytes |= uint64_t{from[j]} << (8 * j);
            float v[kPart];
            decode<kKind, kPart>(bytes, scale, v);
#pragma unroll
            for (int j = 0; j < kPart; ++j)
                if (k0 + part + j < s.k) base[(part + j) * to.k_stride] = from_float<T>(v[j] * outer);
        }
    }
}

// ---- nothing is aligned: a warp takes 256 neighbouring columns of a row
template <Kind kKind, typename T>
__global__ void __launch_bounds__(kThreads)
    dequantize_any(const Source s, T* __restrict__ x, const Layout to) {
    wait_for_previous();
    constexpr int kColumns = 256;
    const int64_t pieces = (s.k + kColumns - 1) / kColumns, warps = int64_t{gridDim.x} * (kThreads / 32);
    for (int64_t i = (blockIdx.x * int64_t{kThreads} + threadIdx.x) / 32; i < s.rows * pieces; i += warps) {
        const int64_t row = i / pieces, k0 = i % pieces * kColumns + threadIdx.x % 32;
        const float outer = s.outer(row);
        T* base = x + row * to.x_stride;
#pragma unroll
        for (int64_t column = k0; column < k0 + kColumns; column += 32)
            if (column < s.k)
                base[column * to.k_stride] = from_float<T>(decode_one<kKind>(s, row, column) * outer);
    }
}

constexpr int64_t kMostVectors = int64_t{1} << 30;  // numbers of vectors and their blocks, in 32 bits

// Whether rows follow one another in x and in the source alike, and so do those of an outer scale.
template <Kind kKind, typename T>
bool is_flat(const Source& s, const Layout& to) {
    constexpr int kCount = kVector<T>, kWhole = kKind == kFp8 ? kCount : kKind == kMxfp4 ? 32 : 16;
    return s.k % kWhole == 0 && (s.rows == 1 || to.x_stride == s.k) &&
           s.rows * (s.k / kCount) <= kMostVectors &&
           (s.outer_scale == nullptr || s.mid == 1 || s.inner == 1);
}

template <Kind kKind, typename T>
void launch_flat(const Source& s, T* x, cudaStream_t stream) {
    constexpr int kAtOnce = 4;
    const int64_t per_row = s.k / kVector<T>, vectors = s.rows * per_row;
    const int64_t rows = s.mid < s.rows ? s.mid : s.rows;  // of an outer scale: of mid * inner, one is 1
    const Divisor per_outer(static_cast<uint32_t>(rows * per_row));
    const auto n = static_cast<uint32_t>(vectors);
    // Several at once hide the latency of memory; with few in all, they would leave multiprocessors idle.
    if (vectors >= int64_t{kThreads} * kAtOnce * 512)
        launch_kernel(dequantize_flat<kKind, T, kAtOnce>, ceil_div(vectors, kThreads * kAtOnce), kThreads, 0,
                      stream, s.packed, s.block_scale, s.outer_scale, x, n, per_outer);
    else
        launch_kernel(dequantize_flat<kKind, T, 1>, ceil_div(vectors, kThreads), kThreads, 0, stream,
                      s.packed, s.block_scale, s.outer_scale, x, n, per_outer);
}

template <Kind kKind, typename T>
void launch_dequantize(const Source& s, T* x, const Layout& to, cudaStream_t stream) {
    constexpr int kCount = kVector<T>, kBytes = kKind == kFp8 ? kCount : kCount / 2;
    const bool fast = s.k < 1 << 30 && to.after == 1 && (to.k_stride == 1 || s.k == 1) && aligned(x, 16) &&
                      aligned(s.packed, kBytes) && s.packed_stride % kBytes == 0 &&
                      (s.rows == 1 || to.x_stride % kCount == 0);
    if (fast && is_flat<kKind, T>(s, to)) return launch_flat<kKind, T>(s, x, stream);
    // A row's last vector is loaded whole: FP4 rows are padded to blocks, FP8 rows must end on a vector.
    if (fast && (kKind != kFp8 || s.k % kCount == 0)) {
        const RowGrid g(s.rows, ceil_div(s.k, kCount));
        launch_kernel(dequantize_rows<kKind, T>, g.grid, g.block, 0, stream, s, x, to.x_stride);
        return;
    }
    if (to.after == 1) {
        const int64_t warps = s.rows * ceil_div(s.k, 256);
        launch_kernel(dequantize_any<kKind, T>, limited(ceil_div(warps, kThreads / 32)), kThreads, 0, stream,
                      s, x, to);
        return;
    }
    const unsigned grid = limited(ceil_div(s.rows, 32) * ceil_div(s.k, 128));
    const int64_t word = kKind == kFp8 ? 8 : 4;
    if (aligned(s.packed, word) && s.packed_stride % word == 0)
        launch_kernel(dequantize_columns<kKind, true, T>, grid, kThreads, 0, stream, s, x, to);
    else
        launch_kernel(dequantize_columns<kKind, false, T>, grid, kThreads, 0, stream, s, x, to);
}

// ---- expand: one block of 16 codes and its scale -> 16 E4M3 bytes, one store
struct Counted {
    uint32_t bytes[4];
    int inexact;
};

template <bool kCount>
__device__ Counted expand_block(uint64_t codes, uint32_t scale_byte) {
    const __half2 scale = __float2half2_rn(e4m3_decode(scale_byte));
    Counted out{};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        __half2 pairs[4];
        uint32_t two[4];  // bytes of the pairs (0, 4), (1, 5), (2, 6), (3, 7)
        decode_word(static_cast<uint32_t>(codes >> (32 * half)), pairs);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const __half2 value = __hmul2(pairs[i], scale);
            two[i] = __nv_cvt_halfraw2_to_fp8x2(value, __NV_SATFINITE, __NV_E4M3);
            if (kCount) {  // NaN is no number that is not held: the comparison is ordered
                const auto raw = static_cast<__nv_fp8x2_storage_t>(two[i]);
                const __half2 back(__nv_cvt_fp8x2_to_halfraw2(raw, __NV_E4M3));
                out.inexact += __popc(__hne2_mask(back, value) & 0x00010001);
            }
        }
        const uint32_t low = two[0] | two[1] << 16, high = two[2] | two[3] << 16;
        out.bytes[2 * half] = __byte_perm(low, high, 0x6420);
        out.bytes[2 * half + 1] = __byte_perm(low, high, 0x7531);
    }
    return out;
}

// Blocks from kp / 16 on are the padding.
template <bool kCount, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    expand_kernel(const uint8_t* __restrict__ packed, const uint8_t* __restrict__ block_scale, int64_t rows,
                  int64_t blocks, uint8_t* __restrict__ expanded, int64_t stride, int32_t* inexact) {
    wait_for_previous();
    int count = 0;
    const int64_t vectors = (stride + 15) / 16, piece = int64_t{blockDim.x} * kUnroll;
    const int64_t row_step = int64_t{gridDim.x} * blockDim.y;
    for (int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y; row < rows; row += row_step)
        for (int64_t first = blockIdx.y * piece + threadIdx.x; first < vectors; first += gridDim.y * piece) {
            uint64_t codes[kUnroll];
            uint32_t scale[kUnroll];
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                const int64_t i = first + u * int64_t{blockDim.x};
                codes[u] = scale[u] = 0;
                if (i >= blocks) continue;
                const uint8_t* from = packed + (row * blocks + i) * 8;
                scale[u] = block_scale[row * blocks + i];
                if (kAligned)
                    codes[u] = load_bytes<8>(from);
                else
                    for (int j = 0; j < 8; ++j) codes[u] |= uint64_t{from[j]} << (8 * j);
            }
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                const int64_t i = first + u * int64_t{blockDim.x};
                if (i >= vectors) continue;
                const Counted out = expand_block<kCount>(codes[u], scale[u]);
                count += out.inexact;
                uint8_t* to = expanded + row * stride + i * 16;
                if (kAligned)
                    *reinterpret_cast<uint4*>(to) =
                        make_uint4(out.bytes[0], out.bytes[1], out.bytes[2], out.bytes[3]);
                else
#pragma unroll
                    for (int j = 0; j < 16; ++j)
                        if (i * 16 + j < stride)
                            to[j] = static_cast<uint8_t>(out.bytes[j / 4] >> (8 * (j % 4)));
            }
        }
    if (kCount && count != 0) atomicAdd(inexact, count);
}

template <bool kCount, bool kAligned>
void launch_expand(const uint8_t* packed, const uint8_t* block_scale, int64_t rows, int64_t blocks,
                   uint8_t* expanded, int64_t stride, int32_t* inexact, cudaStream_t stream) {
    const RowGrid g(rows, ceil_div(stride, 16));
    launch_kernel(expand_kernel<kCount, kAligned>, g.grid, g.block, 0, stream, packed, block_scale, rows,
                  blocks, expanded, stride, inexact);
}

fp4bf16_status check_format(const char* op, fp4bf16_format format) {
    if (format >= FP4BF16_NVFP4_EXACT && format <= FP4BF16_FP8) return FP4BF16_OK;
    return fail(FP4BF16_INVALID_ARGUMENT,
                "%s: format is %d, but FP4BF16_NVFP4_EXACT (0), FP4BF16_NVFP4 (1), FP4BF16_MXFP4 (2) or "
                "FP4BF16_FP8 (3) is needed",
                op, static_cast<int>(format));
}

fp4bf16_status check_layout(const char* op, int64_t rows, int64_t k, const Layout& to) {
    FP4BF16_TRY(check_group(op, "after", to.after));
    if (k > 1 && to.k_stride < to.after)
        return fail(FP4BF16_INVALID_ARGUMENT, "%s: k_stride is %lld, less than after, which is %lld", op,
                    static_cast<long long>(to.k_stride), static_cast<long long>(to.after));
    const int64_t span = k > 1 ? (k - 1) * to.k_stride + to.after : to.after;
    if (rows > to.after && to.x_stride < span)
        return fail(FP4BF16_INVALID_ARGUMENT,
                    "%s: x_stride is %lld elements, less than the %lld that one of its matrices spans", op,
                    static_cast<long long>(to.x_stride), static_cast<long long>(span));
    return FP4BF16_OK;
}

}  // namespace
}  // namespace fp4bf16

using namespace fp4bf16;

extern "C" fp4bf16_status fp4bf16_dequantize(fp4bf16_format format, const uint8_t* packed,
                                             const uint8_t* block_scale, const float* outer_scale,
                                             int64_t rows, int64_t k, int64_t mid, int64_t inner, void* x,
                                             fp4bf16_dtype dtype, int64_t after, int64_t x_stride,
                                             int64_t k_stride, void* stream) {
    FP4BF16_TRY(check_format("dequantize", format));
    FP4BF16_TRY(check_dtype("dequantize", dtype));
    FP4BF16_TRY(check_matrix("dequantize", "x", x, rows, k, k, size_of(dtype)));
    FP4BF16_TRY(check_groups("dequantize", mid, inner));
    const Layout to{after, x_stride, k_stride};
    FP4BF16_TRY(check_layout("dequantize", rows, k, to));
    if (rows == 0 || k == 0) return FP4BF16_OK;
    FP4BF16_TRY(check_pointer("dequantize", "packed", packed, 1));
    if (format != FP4BF16_FP8) FP4BF16_TRY(check_pointer("dequantize", "block_scale", block_scale, 1));
    if (outer_scale != nullptr) FP4BF16_TRY(check_pointer("dequantize", "outer_scale", outer_scale, 4));
    const int64_t block = format == FP4BF16_MXFP4 ? 32 : 16, blocks = ceil_div(k, block);
    const Source s{packed, block_scale, outer_scale, rows, k, format == FP4BF16_FP8 ? k : blocks * block / 2,
                   blocks, mid,         inner};
    const auto st = static_cast<cudaStream_t>(stream);
    by_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        if (format == FP4BF16_FP8)
            launch_dequantize<kFp8>(s, static_cast<T*>(x), to, st);
        else if (format == FP4BF16_MXFP4)
            launch_dequantize<kMxfp4>(s, static_cast<T*>(x), to, st);
        else
            launch_dequantize<kNvfp4>(s, static_cast<T*>(x), to, st);
    });
    return cuda_result(cudaGetLastError(), "dequantize");
}

extern "C" fp4bf16_status fp4bf16_expand(fp4bf16_format format, const uint8_t* packed,
                                         const uint8_t* block_scale, int64_t rows, int64_t kp,
                                         uint8_t* expanded, int64_t expanded_stride, int32_t* inexact,
                                         void* stream) {
    if (format != FP4BF16_NVFP4_EXACT && format != FP4BF16_NVFP4)
        return fail(FP4BF16_INVALID_ARGUMENT,
                    "expand: format is %d, but FP4BF16_NVFP4_EXACT (0) or FP4BF16_NVFP4 (1) is needed",
                    static_cast<int>(format));
    FP4BF16_TRY(check_matrix("expand", "expanded", expanded, rows, kp, expanded_stride, 1));
    if (kp % 16 != 0)
        return fail(FP4BF16_INVALID_ARGUMENT, "expand: kp is %lld, but must be a multiple of 16",
                    static_cast<long long>(kp));
    if (rows == 0 || kp == 0) return FP4BF16_OK;
    FP4BF16_TRY(check_pointer("expand", "packed", packed, 1));
    FP4BF16_TRY(check_pointer("expand", "block_scale", block_scale, 1));
    if (inexact != nullptr) FP4BF16_TRY(check_pointer("expand", "inexact", inexact, 4));
    const int64_t stride =
        expanded_stride < kp ? kp : expanded_stride;  // a single row's stride may be anything
    const bool fast = aligned(packed, 8) && aligned(expanded, 16) && stride % 16 == 0;
    const auto launch = inexact ? (fast ? launch_expand<true, true> : launch_expand<true, false>)
                                : (fast ? launch_expand<false, true> : launch_expand<false, false>);
    launch(packed, block_scale, rows, kp / 16, expanded, stride, inexact, static_cast<cudaStream_t>(stream));
    return cuda_result(cudaGetLastError(), "expand");
}
