// The quantiser of BF16 rows at memory speed: rounding to nearest, nvfp4_exact, nvfp4 by Transformer Engine's
// rule, mxfp4 and fp8. A thread takes blocks of 16 elements (mxfp4: a pair of threads, 32), a thread block a
// row. Special blocks wait for the end and go the simple way.
//
// Here: what the kernels share, and the one for rows of any length, which reads them again from the L2 cache.
// Rows that are read once are in quantize_row.cuh, blocks across rows of memory in quantize_across.cuh.
#pragma once

#include <cuda_fp8.h>

#include "quantize.cuh"
#include "quantize_half.cuh"

namespace fp4bf16 {
namespace {  // of each file that includes this: one a format, so that they compile side by side

enum Kind { kExactFull, kExactFast, kTe, kMx, kFp8 };

template <Kind kKind>
__device__ constexpr Rule rule_of() {
    return {kKind == kTe    ? FP4BF16_NVFP4
            : kKind == kMx  ? FP4BF16_MXFP4
            : kKind == kFp8 ? FP4BF16_FP8
                            : FP4BF16_NVFP4_EXACT,
            kKind == kTe ? FP4BF16_RULE_TE : FP4BF16_RULE_DEFAULT, kKind == kExactFull, false};
}

// Where a row's results go, and which there are.
struct Row {
    int64_t number;
    uint8_t *packed, *expanded, *block_scale;
    bool packs, expands, scales;

    __device__ Row(const QuantizeJob& job, int64_t row, bool fp8) : number(row) {
        const fp4bf16_quantize_args& a = job.a;
        packs = a.packed != nullptr, expands = a.expanded != nullptr, scales = a.block_scale != nullptr;
        packed = a.packed + row * (fp8 ? job.kp : job.kp >> 1);
        expanded = a.expanded + row * a.expanded_stride;
        block_scale = a.block_scale + row * job.blocks;
    }
};

struct Totals {
    double sums[3] = {};
    int counts[kCounts] = {};

    __device__ void add(const Totals& other) {
        for (int i = 0; i < 3; ++i) sums[i] += other.sums[i];
        for (int i = 0; i < kCounts; ++i) counts[i] += other.counts[i];
    }
};

__device__ inline uint32_t larger_half(uint32_t w) { return max(w & 0xFFFF, w >> 16); }

__device__ inline uint32_t largest(const uint32_t (&w)[8]) {
    uint32_t top = w[0] & kMagnitudes;
#pragma unroll
    for (int i = 1; i < 8; ++i) top = max2(top, w[i] & kMagnitudes);
    return larger_half(top);
}

// BF16 bits of the largest finite magnitude.
__device__ inline uint32_t largest_finite(const uint32_t (&w)[8]) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const uint32_t low = w[i] & 0x7FFF, high = w[i] >> 16 & 0x7FFF;
        most = max(most, max(low < 0x7F80 ? low : 0, high < 0x7F80 ? high : 0));
    }
    return most;
}

// Outliers among the elements of block b become zero.
__device__ inline void drop_outliers(const QuantizeJob& job, int b, uint32_t (&w)[8]) {
    const uint32_t mask = outlier_mask(job, 16 * int64_t{b}, 16);
    if (mask == 0) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (mask >> (2 * i) & 1) w[i] &= 0xFFFF0000u;
        if (mask >> (2 * i) & 2) w[i] &= 0x0000FFFFu;
    }
}

// A block the simple way: NaN and Inf, subnormal numbers, blocks beyond a given outer scale.
template <int kB>
__device__ __noinline__ void special_block(const QuantizeJob& job, Outer o, int64_t row, int64_t b,
                                           Totals* totals) {
    const auto source = static_cast<const __nv_bfloat16*>(job.a.x) + job.place(row) + b * kB * job.a.k_stride;
    float x[kB];
    const int count = static_cast<int>(job.block);  // kB, but the compiler shall not unroll the loops
    const uint32_t outliers = job.a.outliers > 0 ? outlier_mask(job, b * kB, kB) : 0;
    for (int j = 0; j < count; ++j)
        x[j] = outliers >> j & 1 || b * kB + j >= job.a.k_size ? 0.0f : load(source + j * job.a.k_stride);
    Rule rule = job.rule;
    rule.stochastic = false;
    Philox unused(0, 0, 0);
    Codes<kB> codes;
    quantize_block(x, count, count, rule, o, &unused, 0, 0, job.a.sums != nullptr, &codes, totals->counts);
    store_block(job, codes, count, row, b);
    for (int i = 0; i < 3; ++i) totals->sums[i] += codes.sums[i];
}

// ---- what is added up of a block: FP32 sums of 16 terms, off by less than 2^-19. The block's largest is in
// 2^-60 .. 2^60, so that no square overflows, and what underflows is less than 2^-140 together.
__device__ inline void add_stats(const uint32_t (&w)[8], const float (&code)[16], float value, float first,
                                 float multiplier, float limit, const Outer& o, Totals* totals) {
    float square = 0.0f, decoded = 0.0f, error = 0.0f;
    uint32_t any = 0;
    int clipped = 0;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        const float a = bits_float((j & 1 ? w[j / 2] & 0xFFFF0000u : w[j / 2] << 16) & 0x7FFFFFFFu);
        const float q = code[j] * value * o.decode, d = a - q;
        square = __fmaf_rn(a, a, square);
        decoded = __fmaf_rn(q, q, decoded);
        error = __fmaf_rn(d, d, error);
        any |= float_bits(d);  // a difference of zero is +0
        clipped += a * first * multiplier > limit;
    }
    totals->sums[0] += square;
    totals->sums[1] += decoded;
    totals->sums[2] += any == 0 ? 0.0 : static_cast<double>(error) + 0x1p-140;
    totals->counts[kClipped] += clipped;
}

// Values of packed FP16 codes.
__device__ inline void unpack_codes(const uint32_t (&q)[8], float (&code)[16]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float2 v = __half22float2(pair(q[i]));
        code[2 * i] = v.x, code[2 * i + 1] = v.y;
    }
}

// ---- one block of 16: its scale and the values of its codes, no sign
struct Rounded {
    uint32_t byte;
    float value, first, multiplier;  // as in quantize_rules.cuh
};

__device__ const PairTable kPairs = make_pairs();

// The table's entry; host code, which tests alone have, makes its own.
FP4BF16_HD Pair fast_pairs(uint32_t fraction) {
#ifdef __CUDA_ARCH__
    return kPairs.entry[fraction];
#else
    static constexpr PairTable kTable = make_pairs();
    return kTable.entry[fraction];
#endif
}

template <Kind kKind, bool kStats>
__device__ inline Rounded round_block(const uint32_t (&w)[8], uint32_t top, const QuantizeJob& job,
                                      const Outer& o, uint32_t (&q)[8], Totals* totals) {
    const int exponent = static_cast<int>(top >> 7);  // biased
    const float largest = bits_float(top << 16);
    if constexpr (kKind == kTe) {
        const float exact = largest * (o.encode * (1.0f / 6.0f));
        const Scale s = nvfp4_scale(e4m3_code(fminf(exact, 448.0f)), o);
#pragma unroll
        for (int i = 0; i < 8; ++i) q[i] = round_pair(w[i], s.multiplier);
        if (kStats) totals->counts[kOverflowed] += exact > 464.0f;
        if (kStats) totals->counts[kUnderflowed] += s.byte == 0;
        return {s.byte, s.value, 1.0f, s.multiplier};
    } else if constexpr (kKind == kMx) {
        const int byte = static_cast<int>(((top << 16) + mxfp4_rounding(job.rule.rule)) >> 23) - 2;
        const uint32_t shift = shift_of(15, byte);
#pragma unroll
        for (int i = 0; i < 8; ++i) q[i] = e2m1_round(min2(to_half(w[i] & kMagnitudes, shift), 0x46004600u));
        return {static_cast<uint32_t>(byte), power_of_two(byte - 127), 1.0f, power_of_two(127 - byte)};
    } else {
        uint32_t y[8];
        const uint32_t shift = shift_of(17, exponent);  // the largest of y is in [4, 8)
#pragma unroll
        for (int i = 0; i < 8; ++i) y[i] = to_half(w[i] & kMagnitudes, shift);
        const float t = largest * o.encode, unit = power_of_two(exponent - 129) * o.encode;
        uint32_t byte;
        if constexpr (kKind == kExactFull)
            byte = search_full_half(y, t, unit, q);
        else
            byte = search_fast_half(y, t, unit, kPairs.entry[top & 0x7F], q);
        if (kStats) totals->counts[kOverflowed] += t > 288.0f;
        if (kStats) totals->counts[kUnderflowed] += t < 6.0f * 0x1p-6f;
        const float s = bits_float((byte << 20) + (120u << 23));
        return {byte, s, o.encode, reciprocal(s)};
    }
}

// ---- stores
template <Kind kKind>
__device__ inline void store_codes(const Row& row, int b, const uint32_t (&w)[8], uint32_t (&q)[8],
                                   uint32_t byte) {
    if ((kKind == kExactFull || kKind == kExactFast) && row.expands) {
        const uint32_t scale = byte * 0x800080u;  // E4M3's bits in FP16's fields: the scale times 2^-8
        reinterpret_cast<uint4*>(row.expanded)[b] =
            make_uint4(expand_codes(q, w, scale), expand_codes(q + 2, w + 2, scale),
                       expand_codes(q + 4, w + 4, scale), expand_codes(q + 6, w + 6, scale));
    }
    if (row.packs) {
#pragma unroll
        for (int i = 0; i < 8; ++i) q[i] |= w[i] & kSigns;
        reinterpret_cast<uint2*>(row.packed)[b] = make_uint2(pack_codes(q), pack_codes(q + 4));
    }
    if (!row.scales) return;
    if (kKind != kMx)
        row.block_scale[b] = static_cast<uint8_t>(byte);
    else if (b % 2 == 0)
        row.block_scale[b / 2] = static_cast<uint8_t>(byte);
}

// Block b of 16 elements, `inside` its row; mxfp4: threads of blocks 2 i and 2 i + 1 are neighbours. False:
// it is special and left to special_block.
template <Kind kKind, bool kStats>
__device__ inline bool do_block(const QuantizeJob& job, const Outer& o, uint32_t (&w)[8], uint32_t top,
                                const Row& row, int b, bool inside, Totals* totals) {
    if (kKind == kMx) top = max(top, __shfl_xor_sync(0xFFFFFFFFu, top, 1));
    if (!inside) return true;
    uint32_t q[8] = {};
    if (top == 0) {
        if (kStats) totals->counts[kZero] += kKind != kMx || b % 2 == 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) w[i] = 0;
        store_codes<kKind>(row, b, w, q, 0);
        return true;
    }
    const uint32_t least = kStats ? (127 - 60) << 7 : 32 << 7, most = kStats ? (127 + 60) << 7 : 0x7F80;
    bool special = top < least || top >= most;
    if (kKind == kExactFull || kKind == kExactFast)
        special = special || bits_float(top << 16) * o.encode > 6.0f * 64.0f;
    if (special) return false;
    const Rounded r = round_block<kKind, kStats>(w, top, job, o, q, totals);
    if (kStats) {
        float code[16];
        unpack_codes(q, code);
        const float limit = kKind == kTe && r.byte == 0 ? bits_float(kInfinity) : 6.0f * kClip;
        add_stats(w, code, r.value, r.first, r.multiplier, limit, o, totals);
    }
    store_codes<kKind>(row, b, w, q, r.byte);
    return true;
}

// fp8: sixteen elements.
template <bool kStats>
__device__ inline bool do_fp8(const QuantizeJob& job, const Outer& o, const uint32_t (&w)[8], uint32_t top,
                              const Row& row, int b, bool inside, Totals* totals) {
    if (!inside) return true;
    const uint32_t least = (127 - 60) << 7, most = kStats ? (127 + 60) << 7 : 0x7F80;
    if (top >= most || (kStats && top != 0 && top < least)) return false;
    uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        uint32_t two[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float2 v = make_float2(bits_float(w[i + j] << 16) * o.encode,
                                         bits_float(w[i + j] & 0xFFFF0000u) * o.encode);
            two[j] = __nv_cvt_float2_to_fp8x2(v, __NV_SATFINITE, __NV_E4M3);
        }
        out[i / 2] = two[0] | two[1] << 16;
    }
    if (kStats) {
        float code[16];
#pragma unroll
        for (int j = 0; j < 16; ++j) code[j] = e4m3_decode(out[j / 4] >> (8 * (j % 4)) & 0x7F);
        add_stats(w, code, 1.0f, 1.0f, o.encode, 448.0f * kClip, o, totals);
    }
    const uint4 all = make_uint4(out[0], out[1], out[2], out[3]);
    if (row.packs) reinterpret_cast<uint4*>(row.packed)[b] = all;
    if (row.expands) reinterpret_cast<uint4*>(row.expanded)[b] = all;
    return true;
}

// The blocks of a thread that bits of `special` name.
template <Kind kKind, int kLanes, bool kStats>
__device__ inline void do_special(const QuantizeJob& job, const Outer& o, int64_t row, int lane,
                                  uint64_t special, Totals* totals) {
    constexpr int kHalves = kKind == kMx ? 2 : 1;
    Totals extra;
    for (; special != 0; special &= special - 1) {
        const int b = (__ffsll(static_cast<long long>(special)) - 1) * kLanes + lane;
        if (b % kHalves == 0) special_block<16 * kHalves>(job, o, row, b / kHalves, &extra);
    }
    if (kStats) totals->add(extra);
}

// ---- a row
// Largest over the kLanes threads of a row.
template <int kLanes>
__device__ inline uint32_t row_max(uint32_t v) {
    v = __reduce_max_sync(0xFFFFFFFFu, v);
    if (kLanes == 32) return v;
    __shared__ uint32_t warps[kLanes / 32];
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
    __syncthreads();
    for (int i = 0; i < kLanes / 32; ++i) v = max(v, warps[i]);
    return v;
}

template <int kLanes>
__device__ inline double row_sum(double v) {
    for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, step);
    if (kLanes == 32) return v;
    __shared__ double warps[kLanes / 32];
    __syncthreads();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0;
    for (int i = 0; i < kLanes / 32; ++i) v += warps[i];
    return v;
}

template <int kLanes>
__device__ inline void store_totals(const QuantizeJob& job, const Totals& totals, int64_t row) {
    if (job.a.sums != nullptr)
        for (int i = 0; i < 3; ++i) {
            const double sum = row_sum<kLanes>(totals.sums[i]) * (1 + 0x1p-19);
            if (threadIdx.x % kLanes == 0) job.a.sums[3 * row + i] = sum;
        }
    if (job.a.counts != nullptr)
        for (int i = 0; i < kCounts; ++i) {
            const int count = __reduce_add_sync(0xFFFFFFFFu, totals.counts[i]);
            if (threadIdx.x % 32 == 0 && count != 0) atomicAdd(job.a.counts + i, count);
        }
}

__device__ inline const uint4* row_source(const QuantizeJob& job, int64_t row) {
    return reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(job.a.x) + row * job.a.x_stride);
}

__device__ inline void unpack_block(const uint4& low, const uint4& high, uint32_t (&w)[8]) {
    w[0] = low.x, w[1] = low.y, w[2] = low.z, w[3] = low.w;
    w[4] = high.x, w[5] = high.y, w[6] = high.z, w[7] = high.w;
}

template <Kind kKind, bool kStats>
__device__ inline bool do_any(const QuantizeJob& job, const Outer& o, uint32_t (&w)[8], uint32_t top,
                              const Row& row, int b, bool inside, Totals* totals) {
    if constexpr (kKind == kFp8)
        return do_fp8<kStats>(job, o, w, top, row, b, inside, totals);
    else
        return do_block<kKind, kStats>(job, o, w, top, row, b, inside, totals);
}

// A row of any length, read twice.
template <Kind kKind, bool kStats>
__global__ void __launch_bounds__(kThreads, kStats || kKind == kExactFull ? 2
                                            : kKind == kExactFast         ? 3
                                                                          : 4)
    long_kernel(const __grid_constant__ QuantizeJob job) {
    wait_for_previous();
    constexpr int kLanes = kThreads, kHeld = 2, kSpan = kLanes * kHeld;  // blocks at a time
    const int lane = threadIdx.x;
    const int64_t row = blockIdx.x;
    const int blocks = static_cast<int>(job.a.k_size / 16);
    const uint4* source = row_source(job, row);
    uint32_t w[kHeld][8], top[kHeld];
    const auto fetch = [&](int base) {
#pragma unroll
        for (int h = 0; h < kHeld; ++h) {
            const int b = base + h * kLanes + lane;
            uint4 low{}, high{};
            if (b < blocks) low = source[2 * b], high = source[2 * b + 1];
            unpack_block(low, high, w[h]);
        }
        if (job.a.outliers > 0)
#pragma unroll
            for (int h = 0; h < kHeld; ++h) drop_outliers(job, base + h * kLanes + lane, w[h]);
#pragma unroll
        for (int h = 0; h < kHeld; ++h) top[h] = largest(w[h]);
    };
    Outer o = job.outer(rule_of<kKind>(), row);
    if (job.finds_outer()) {
        uint32_t most = 0;
        for (int base = 0; base < blocks; base += kSpan) {
            fetch(base);
#pragma unroll
            for (int h = 0; h < kHeld; ++h) most = max(most, top[h] < 0x7F80 ? top[h] : largest_finite(w[h]));
        }
        o = outer_from_amax(rule_of<kKind>(), bits_float(row_max<kLanes>(most) << 16));
    }
    Totals totals;
    uint64_t special = 0;  // bit i: block i * kLanes + lane
    const Row results(job, row, kKind == kFp8);
    for (int base = 0; base < blocks; base += kSpan) {
        fetch(base);
#pragma unroll
        for (int h = 0; h < kHeld; ++h) {
            const int b = base + h * kLanes + lane;
            if (!do_any<kKind, kStats>(job, o, w[h], top[h], results, b, b < blocks, &totals))
                special |= uint64_t{1} << (base / kLanes + h);
        }
    }
    if (special != 0) do_special<kKind, kLanes, kStats>(job, o, row, lane, special, &totals);
    if (kStats) store_totals<kLanes>(job, totals, row);
    store_row<__nv_bfloat16>(job, o, row, lane, kLanes);
}

}  // namespace
}  // namespace fp4bf16
