// What follows a convolution's sums: scales, biases, activation, residual, rounding, store.
#pragma once

#include "sm90_conv_params.cuh"

namespace fp4bf16 {

// The pixels of this thread's rows: two a fragment, eight rows apart. They are worked out where they are
// needed, not kept in registers through the products.
template <class C>
struct Rows {
    const ConvParams& p;
    const Pixel& corner;
    int first;

    __device__ Rows(const ConvParams& p, const ConvCorner<C>& corner, int group)
        : p(p),
          corner(corner.at),
          first(group * C::kWaves * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4) {}
    __device__ Pixel at(int wave, int half) const {
        return pixel_of(p, corner, first + 64 * wave + 8 * half);
    }
    __device__ bool inside(int wave, int half) const {
        const Pixel q = at(wave, half);
        return q.x < p.w && q.y < p.h && q.n < p.n;
    }
    __device__ int64_t offset(const int64_t (&strides)[3], int wave, int half) const {
        const Pixel q = at(wave, half);
        return q.n * strides[0] + q.y * strides[1] + q.x * strides[2];
    }
};

// Scales and biases of the tile's columns; with those of the picture, where the tile lies in one.
template <class C>
__device__ inline void load_columns(const ConvParams& p, ColumnVectors<C::kTileN>& columns,
                                    const ConvCorner<C>& corner) {
    const Epilogue& e = p.epilogue;
    const int64_t image = min(corner.at.n, p.n - 1);
    const bool one_scale = p.one_scale && p.image_scale != nullptr;
    const float by_image = one_scale ? __ldg(p.image_scale + image * p.image_scale_step) : 1.0f;
#pragma unroll
    for (int i = 0; i < columns.kEach; ++i) {
        const int c = corner.channel() + threadIdx.x % 128 + 128 * i;
        columns.scale[i] = 1.0f, columns.bias[i] = 0.0f;
        if (c >= e.n || (C::kTileN % 128 != 0 && threadIdx.x % 128 + 128 * i >= C::kTileN)) continue;
        columns.scale[i] = by_image;
        if (e.col_scale != nullptr)
            columns.scale[i] *= __ldg(e.col_scale + (c * p.phases + corner.phase()) * e.col_step);
        if (p.bias != nullptr) columns.bias[i] = load_as_float(p.bias, e.bias_dtype, c);
        if (p.bias2 != nullptr) columns.bias[i] += load_as_float(p.bias2, e.bias_dtype, c);
        if (p.one_image && p.image_bias != nullptr)
            columns.bias[i] +=
                load_as_float(p.image_bias, p.image_bias_dtype, image * p.image_bias_stride + c);
    }
}

// acc = acc * scale + bias, by column; the fragments share what is read.
template <class C>
__device__ inline void scale_and_add(Accumulators<C>& acc, const float2* scale, const float2* bias) {
#pragma unroll
    for (int j = 0; j < C::kAccumulators; j += 4) {
        const float2 s = scale[j], b = bias[j];
#pragma unroll
        for (int wave = 0; wave < C::kWaves; ++wave) {
            float* v = acc[wave] + j;
            v[0] = fmaf(v[0], s.x, b.x);
            v[1] = fmaf(v[1], s.y, b.y);
            v[2] = fmaf(v[2], s.x, b.x);
            v[3] = fmaf(v[3], s.y, b.y);
        }
    }
}

// What follows the first track's product: scales, and the biases unless they wait for alpha.
template <class C>
__device__ inline void scale_rows(const ConvParams& p, Accumulators<C>& acc, const Rows<C>& rows,
                                  const ColumnVectors<C::kTileN>& columns) {
    const bool biased = p.bias != nullptr || (p.one_image && p.image_bias != nullptr);
    if (p.image_scale == nullptr && p.epilogue.col_scale == nullptr && !biased) return;
    if (__builtin_expect(!p.one_scale && p.image_scale != nullptr, 0))
#pragma unroll
        for (int i = 0; i < 2 * C::kWaves; ++i) {
            const int image = min(rows.at(i / 2, i % 2).n, p.n - 1);
            const float by_row = __ldg(p.image_scale + image * p.image_scale_step);
#pragma unroll
            for (int j = 0; j < C::kAccumulators; ++j)
                if (lower(j) == i % 2) acc[i / 2][j] *= by_row;
        }
    if (p.epilogue.bias == nullptr) return scale_and_add<C>(acc, columns.scales(), columns.biases());
#pragma unroll
    for (int wave = 0; wave < C::kWaves; ++wave) scale_fragment(acc[wave], {1.0f, 1.0f}, columns.scales());
}

// acc += rows of `base`, at offset[half] + column; rows that are not there are skipped.
template <int kAccumulators>
__device__ inline void add_rows(float (&acc)[kAccumulators], const void* base, int dtype,
                                const int64_t (&offset)[2], const bool (&there)[2], int col, int columns) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) {
        const int c = col + column_of(i);
        if (there[lower(i)] && c < columns) acc[i] += load_as_float(base, dtype, offset[lower(i)] + c);
    }
}

// acc += the biases of one image, from `first` on; both of a fragment's rows lie in it.
template <int kDtype, int kAccumulators>
__device__ inline void add_pairs(float (&acc)[kAccumulators], const void* base, int64_t first, int col,
                                 int columns) {
#pragma unroll
    for (int j = 0; j < kAccumulators; j += 4) {
        const int c = col + column_of(j);
        if (c >= columns) continue;
        float2 b;
        if constexpr (kDtype == FP4BF16_FLOAT32) {
            b = __ldg(reinterpret_cast<const float2*>(static_cast<const float*>(base) + first + c));
        } else {
            const auto* at = static_cast<const uint16_t*>(base) + first + c;
            const uint32_t word = __ldg(reinterpret_cast<const uint32_t*>(at));
            b = make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u));
        }
        acc[j] += b.x;
        acc[j + 1] += b.y;
        acc[j + 2] += b.x;
        acc[j + 3] += b.y;
    }
}

// acc += the biases of the rows' images.
template <int kAccumulators>
__device__ inline void add_image_bias(const ConvParams& p, float (&acc)[kAccumulators], const Pixel (&at)[2],
                                      const bool (&there)[2], int col) {
    const int64_t first = at[0].n * p.image_bias_stride;
    if (p.paired && !there[0] && !there[1]) return;
    if (p.paired && p.image_bias_dtype == FP4BF16_FLOAT32)
        return add_pairs<FP4BF16_FLOAT32>(acc, p.image_bias, first, col, p.epilogue.n);
    if (p.paired) return add_pairs<FP4BF16_BFLOAT16>(acc, p.image_bias, first, col, p.epilogue.n);
    const int64_t offset[2] = {first, at[1].n * p.image_bias_stride};
    add_rows(acc, p.image_bias, p.image_bias_dtype, offset, there, col, p.epilogue.n);
}

// All between the scaled sums and their rounding but a prefetched residual.
template <class C>
__device__ inline void finish_rows(const ConvParams& p, Accumulators<C>& acc, const Rows<C>& rows,
                                   const float2* bias, int col) {
    const Epilogue& e = p.epilogue;
#pragma unroll
    for (int wave = 0; wave < C::kWaves; ++wave) {
        bool there[2];
        for (int half = 0; half < 2; ++half) there[half] = rows.inside(wave, half);
        if (p.alpha != 1.0f)
#pragma unroll
            for (int i = 0; i < C::kAccumulators; ++i) acc[wave][i] *= p.alpha;
        if (!p.one_image && p.image_bias != nullptr)
            add_image_bias(p, acc[wave], {rows.at(wave, 0), rows.at(wave, 1)}, there, col);
        finish_fragment(e, acc[wave], bias, 0, col, 0);
        if (p.residual != nullptr && !p.prefetched) {
            int64_t offset[2];
            for (int half = 0; half < 2; ++half) offset[half] = rows.offset(p.residual_strides, wave, half);
            add_rows(acc[wave], p.residual, p.residual_dtype, offset, there, col, e.n);
        }
    }
}

// A fragment straight from the registers: FP32 results, and layouts that the copy engine does not take.
template <class C>
__device__ inline void store_rows(const ConvParams& p, const Accumulators<C>& acc, const Rows<C>& rows,
                                  int col, int phase) {
    const Epilogue& e = p.epilogue;
    const int64_t first = (phase >> 1) * p.phase_strides[0] + (phase & 1) * p.phase_strides[1];
#pragma unroll
    for (int wave = 0; wave < C::kWaves; ++wave)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (!rows.inside(wave, half)) continue;
            const int64_t base = first + rows.offset(p.d_strides, wave, half);
#pragma unroll
            for (int i = 0; i < C::kAccumulators; i += 4) {
                const int c = col + column_of(i);
                const float low = acc[wave][i + 2 * half], high = acc[wave][i + 2 * half + 1];
                if (e.vector && c + 1 < e.n && e.d_dtype == FP4BF16_FLOAT32) {
                    *reinterpret_cast<float2*>(static_cast<float*>(e.d) + base + c) = make_float2(low, high);
                    continue;
                }
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    if (c + j >= e.n) continue;
                    const float value = j ? high : low;
                    if (e.d_dtype == FP4BF16_FLOAT32)
                        static_cast<float*>(e.d)[base + c + j] = value;
                    else if (e.d_dtype == FP4BF16_BFLOAT16)
                        static_cast<__nv_bfloat16*>(e.d)[base + c + j] = __float2bfloat16_rn(value);
                    else
                        static_cast<__half*>(e.d)[base + c + j] = __float2half_rn(value);
                }
            }
        }
}

// Adds the prefetched residual of the columns of box `box`, which lies where the result will.
template <int kColumns, int kAccumulators>
__device__ inline void add_box(float (&acc)[kAccumulators], int box, uint32_t memory) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int j = 0; j < kColumns / 8; j += 2) {
        float* v = acc + 4 * (kColumns / 8 * box + j);
        uint32_t word[4];
        ptx::load_matrices(memory + box_offset<kColumns>(row, j + lane / 16), word);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            v[2 * i] += __uint_as_float(word[i] << 16);
            v[2 * i + 1] += __uint_as_float(word[i] & 0xFFFF0000u);
        }
    }
}

// Where a tile's result lies in shared memory until it is stored: boxes of 64 pixels and 64 channels (32
// where a tile is not a multiple of 64 wide), in the stage that the producer left out and, what does not fit
// there, in memory of its own.
template <class C>
struct Staging {
    static constexpr int kColumns = box_channels(C::kTileN);
    static constexpr int kBoxes = C::kTileN / kColumns;  // of a fragment
    static constexpr int kBytes = 64 * kColumns * 2;     // of a box
    uint32_t in_stage, in_own;

    __device__ Staging(const SharedStages<C>& shared, int stage)
        : in_stage(uniform(ptx::shared_address(shared.a(stage)))),
          in_own(uniform(ptx::shared_address(shared.staging)) - C::kBorrowedBytes) {}
    __device__ uint32_t box(int fragment, int i) const {
        const int at = (fragment * kBoxes + i) * kBytes;
        return (at < C::kBorrowedBytes ? in_stage : in_own) + at;
    }
};

template <class C>
__device__ inline void store_pixels(const ConvParams& p, const Staging<C>& staging, Accumulators<C>& acc,
                                    int group, const ConvCorner<C>& corner) {
    constexpr int kBoxes = Staging<C>::kBoxes, kColumns = Staging<C>::kColumns;
#pragma unroll
    for (int wave = 0; wave < C::kWaves; ++wave)
#pragma unroll
        for (int i = 0; i < kBoxes; ++i) {
            const uint32_t memory = staging.box(group * C::kWaves + wave, i);
            if (p.prefetched) add_box<kColumns>(acc[wave], i, memory);
            if (p.epilogue.d_dtype == FP4BF16_BFLOAT16)
                stage_box<FP4BF16_BFLOAT16, kColumns>(acc[wave], i, memory);
            else
                stage_box<FP4BF16_FLOAT16, kColumns>(acc[wave], i, memory);
        }
    ptx::fence_async_shared();
    asm volatile("bar.sync %0, 128;" ::"r"(threadIdx.x / 128) : "memory");
    if (threadIdx.x % 128 >= 32 || !ptx::elect()) return;
#pragma unroll
    for (int wave = 0; wave < C::kWaves; ++wave) {
        const int fragment = group * C::kWaves + wave;
        const Pixel at = pixel_of(p, corner.at, 64 * fragment);
#pragma unroll
        for (int i = 0; i < kBoxes; ++i)
            ptx::store_picture_box(&p.d[corner.phase()], staging.box(fragment, i),
                                   corner.channel() + kColumns * i, at.x, at.y, at.n);
    }
    ptx::store_commit();
}

}  // namespace fp4bf16
