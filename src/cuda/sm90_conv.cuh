// Convolution of NHWC pictures as an implicit GEMM: the dual-track mainloop of sm90_dual.cuh behind another
// producer. M is the pixels of the result, N its channels, K the taps times the channels of x. A tile of M is
// a box of pixels (its sides powers of two), so that the A tile of one tap and 128 bytes of channels is one
// box of x, shifted by the tap: the copy engine gathers it, and what lies outside the picture reads as zero.
#pragma once

#include "sm90_dual.cuh"

namespace fp4bf16 {

constexpr int kMostTaps = 64;

// A tap: where its pixels lie from those of the result, and which one of the weight's it is.
struct Tap {
    int8_t dy, dx;
    int16_t weight;
};

// One track: pictures and weight, k-tiles in the order taps, then channels.
struct ConvTrack {
    int taps, chunks;  // chunks of 128 bytes of channels
    int channels;
    int step;       // pixels of x from one pixel of the result to the next
    int tail;       // wgmmas of a tap's last chunk
    int first_tap;  // in `tap`

    __host__ __device__ int tiles() const { return taps * chunks; }
};

struct ConvParams {
    CUtensorMap x8, w8, x16, w16, d, residual_map;
    ConvTrack fp4, bf16;
    Tap tap[kMostTaps];
    int log_w, log_h;  // of the box of a tile; the rest of its rows are images
    int tiles_w, tiles_h;
    Divisor by_w, by_h;       // by tiles_w, tiles_h
    int n, h, w;              // of the result
    bool staged, prefetched;  // the result leaves, the residual comes through shared memory
    bool one_image;           // a tile lies in one image
    bool one_scale;           // of pictures, for all rows of a tile
    bool extra;               // anything but scales, bias and a prefetched residual
    Schedule schedule;
    Epilogue epilogue;  // column scales, activation, what d is; bias alone where it waits for alpha
    float alpha;
    const float* image_scale;
    const void* bias;
    const void* bias2;
    const void* image_bias;
    const void* residual;
    int64_t image_scale_step, image_bias_stride;
    int image_bias_dtype, residual_dtype;
    int64_t d_strides[3], residual_strides[3];
};

// Where a tile lies.
struct Pixel {
    int x, y, n;
};

// Row `row` of a tile at `corner`.
__device__ inline Pixel pixel_of(const ConvParams& p, Pixel corner, int row) {
    return {corner.x + (row & ((1 << p.log_w) - 1)), corner.y + (row >> p.log_w & ((1 << p.log_h) - 1)),
            corner.n + (row >> (p.log_w + p.log_h))};
}

template <class C>
struct ConvCorner {
    Pixel at;
    int n;  // channel

    __device__ ConvCorner(const ConvParams& p, int tile, int rank) {
        int cm, cn, z;
        p.schedule.locate(tile, &cm, &cn, &z);
        const int m = cm * C::kClusterM + (C::kClusterM > 1 ? rank : 0);
        const int line = p.by_w.divide(m), image = p.by_h.divide(line);
        at = {(m - line * p.tiles_w) << p.log_w, (line - image * p.tiles_h) << p.log_h, 0};
        at.n = image * (C::kTileM >> (p.log_w + p.log_h));
        n = (cn * C::kClusterN + (C::kClusterN > 1 ? rank : 0)) * C::kTileN;
    }
};

// ---- producer

// This CTA's part of the pixels of one tap, from channel `c`.
template <class C>
__device__ inline void load_pixels(uint8_t* tile, const CUtensorMap* map, uint64_t* full, int c, Pixel at,
                                   int rank) {
    if constexpr (C::kClusterN == 1)
        ptx::copy_picture_box(tile, map, full, c, at.x, at.y, at.n);
    else
        ptx::copy_picture_box_multicast(tile + rank * (C::kTileM / C::kClusterN) * kTileBytes, map, full, c,
                                        at.x, at.y, at.n, (1 << C::kClusterN) - 1);
}

// Its part of the weight: kTileN output channels from `n`, K-major (o, taps * channels), or N-major (taps,
// channels of K, N).
template <class C>
__device__ inline void load_weight(uint8_t* tile, const CUtensorMap* map, uint64_t* full,
                                   const ConvTrack& track, int tap, int c, int n, int rank) {
    constexpr int kPart = C::kTileN / C::kClusterM;
    constexpr uint16_t kMask = (1 << C::kClusterM) - 1;
    const int first = C::kClusterM == 1 ? 0 : rank * kPart;
    if constexpr (C::kBN) {
#pragma unroll
        for (int i = 0; i < kPart; i += 64) {
            uint8_t* target = tile + (first + i) * kTileBytes;
            if constexpr (C::kClusterM == 1)
                ptx::copy_box(target, map, full, n + first + i, c, tap);
            else
                ptx::copy_box_multicast(target, map, full, n + first + i, c, tap, kMask);
        }
    } else {
        uint8_t* target = tile + first * kTileBytes;
        const int k = tap * track.channels + c;
        if constexpr (C::kClusterM == 1)
            ptx::copy_box(target, map, full, k, n + first, 0);
        else
            ptx::copy_box_multicast(target, map, full, k, n + first, 0, kMask);
    }
}

template <class C>
__device__ inline void produce_residual(const ConvParams& p, const SharedStages<C>& shared, int stage,
                                        const ConvCorner<C>& corner) {
    constexpr int kBoxes = C::kTileN / 64;
    ptx::barrier_arrive_expect_bytes(&shared.full[stage], C::kStagingBytes);
    for (int fragment = 0; fragment < C::kTileM / 64; ++fragment) {
        const Pixel at = pixel_of(p, corner.at, 64 * fragment);
        for (int i = 0; i < kBoxes; ++i) {
            const int offset = (fragment * kBoxes + i) * kBoxBytes;
            uint8_t* target =
                offset < C::kStageBytes ? shared.a(stage) + offset : shared.staging + offset - C::kStageBytes;
            ptx::copy_picture_box(target, &p.residual_map, &shared.full[stage], corner.n + 64 * i, at.x, at.y,
                                  at.n);
        }
    }
}

// The pixels of one tap of a later tile, on their way from memory while this tile is multiplied: its other
// taps then find nearly all of theirs in the L2 cache.
template <class C>
__device__ inline void prefetch_tile(const ConvParams& p, int tile, int rank) {
    const ConvCorner<C> corner(p, tile, rank);
    const Pixel at =
        C::kClusterN == 1 ? corner.at : pixel_of(p, corner.at, rank * (C::kTileM / C::kClusterN));
    auto prefetch = [&](const CUtensorMap* x, const ConvTrack& track, int elements) {
        const Tap tap = p.tap[track.first_tap + track.taps / 2];
        for (int c = 0; c < track.channels && track.taps > 1; c += elements)
            ptx::prefetch_picture_box(x, c, at.x * track.step + tap.dx, at.y * track.step + tap.dy, at.n);
    };
    if constexpr (C::kE4m3) prefetch(&p.x8, p.fp4, 128);
    prefetch(&p.x16, p.bf16, 64);
}

template <class C>
__device__ inline void produce_conv(const ConvParams& p, const SharedStages<C>& shared, uint64_t* own_empty,
                                    int cluster, int clusters, int rank) {
    Ring<C::kStages> ring;
    uint32_t own_parity = 1;
    for (int tile = cluster; tile < p.schedule.total(); tile += clusters) {
        const ConvCorner<C> corner(p, tile, rank);
        const Pixel part =
            C::kClusterN == 1 ? corner.at : pixel_of(p, corner.at, rank * (C::kTileM / C::kClusterN));
        auto load = [&](const CUtensorMap* x, const CUtensorMap* w, const ConvTrack& track, int elements) {
            for (int t = 0; t < track.taps; ++t) {
                const Tap tap = p.tap[track.first_tap + t];
                const Pixel at = {part.x * track.step + tap.dx, part.y * track.step + tap.dy, part.n};
                for (int c = 0; c < track.channels; c += elements) {
                    ptx::barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
                    uint64_t* full = &shared.full[ring.stage];
                    ptx::barrier_arrive_expect_bytes(full, C::kStageBytes);
                    load_pixels<C>(shared.a(ring.stage), x, full, c, at, rank);
                    load_weight<C>(shared.b(ring.stage), w, full, track, tap.weight, c, corner.n, rank);
                    ring.advance();
                }
            }
        };
        if (tile + clusters < p.schedule.total()) prefetch_tile<C>(p, tile + clusters, rank);
        if constexpr (C::kE4m3) load(&p.x8, &p.w8, p.fp4, 128);
        load(&p.x16, &p.w16, p.bf16, 64);
        if (p.staged) {  // the next stage is the consumers' own
            ptx::barrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);
            if (p.prefetched) {
                ptx::barrier_wait(own_empty, own_parity);
                own_parity ^= 1;
                produce_residual<C>(p, shared, ring.stage, corner);
            } else {
                ptx::barrier_arrive(&shared.full[ring.stage]);
            }
            ring.advance();
        }
    }
}

// ---- consumers

// The pixels of this thread's rows: two a fragment, eight rows apart.
template <class C>
struct Rows {
    Pixel at[C::kWaves][2];

    __device__ Rows(const ConvParams& p, const ConvCorner<C>& corner, int group) {
        const int first = group * C::kWaves * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < 2 * C::kWaves; ++i)
            at[i / 2][i % 2] = pixel_of(p, corner.at, first + i / 2 * 64 + i % 2 * 8);
    }
    __device__ bool inside(const ConvParams& p, int wave, int half) const {
        const Pixel& q = at[wave][half];
        return q.x < p.w && q.y < p.h && q.n < p.n;
    }
    __device__ int64_t offset(const int64_t (&strides)[3], int wave, int half) const {
        const Pixel& q = at[wave][half];
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
        const int c = corner.n + threadIdx.x % 128 + 128 * i;
        columns.scale[i] = 1.0f, columns.bias[i] = 0.0f;
        if (c >= e.n || (C::kTileN % 128 != 0 && threadIdx.x % 128 + 128 * i >= C::kTileN)) continue;
        columns.scale[i] = by_image;
        if (e.col_scale != nullptr) columns.scale[i] *= __ldg(e.col_scale + c * e.col_step);
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
            const int image = min(rows.at[i / 2][i % 2].n, p.n - 1);
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

// All between the scaled sums and their rounding but a prefetched residual.
template <class C>
__device__ inline void finish_rows(const ConvParams& p, Accumulators<C>& acc, const Rows<C>& rows,
                                   const float2* bias, int col) {
    const Epilogue& e = p.epilogue;
#pragma unroll
    for (int wave = 0; wave < C::kWaves; ++wave) {
        bool there[2];
        for (int half = 0; half < 2; ++half) there[half] = rows.inside(p, wave, half);
        if (p.alpha != 1.0f)
#pragma unroll
            for (int i = 0; i < C::kAccumulators; ++i) acc[wave][i] *= p.alpha;
        if (!p.one_image && p.image_bias != nullptr) {
            int64_t offset[2];
            for (int half = 0; half < 2; ++half) offset[half] = rows.at[wave][half].n * p.image_bias_stride;
            add_rows(acc[wave], p.image_bias, p.image_bias_dtype, offset, there, col, e.n);
        }
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
                                  int col) {
    const Epilogue& e = p.epilogue;
#pragma unroll
    for (int wave = 0; wave < C::kWaves; ++wave)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (!rows.inside(p, wave, half)) continue;
            const int64_t base = rows.offset(p.d_strides, wave, half);
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

// Adds the prefetched residual of columns 64 `box` .. + 63, which lies where the result will.
template <int kAccumulators>
__device__ inline void add_box(float (&acc)[kAccumulators], int box, uint32_t memory) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        float* v = acc + 4 * (8 * box + j);
        uint32_t word[4];
        ptx::load_matrices(memory + row * 128 + ((j + lane / 16) ^ (row % 8)) * 16, word);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            v[2 * i] += __uint_as_float(word[i] << 16);
            v[2 * i + 1] += __uint_as_float(word[i] & 0xFFFF0000u);
        }
    }
}

template <class C>
__device__ inline void store_pixels(const ConvParams& p, const SharedStages<C>& shared, int stage,
                                    Accumulators<C>& acc, int group, const ConvCorner<C>& corner) {
    constexpr int kBoxes = C::kTileN / 64;
    const uint32_t in_stage = uniform(ptx::shared_address(shared.a(stage)));
    const uint32_t in_own = uniform(ptx::shared_address(shared.staging)) - C::kStageBytes;
    auto memory = [&](int wave, int i) -> uint32_t {
        const int at = ((group * C::kWaves + wave) * kBoxes + i) * kBoxBytes;
        return (at < C::kStageBytes ? in_stage : in_own) + at;
    };
#pragma unroll
    for (int wave = 0; wave < C::kWaves; ++wave)
#pragma unroll
        for (int i = 0; i < kBoxes; ++i) {
            if (p.prefetched) add_box(acc[wave], i, memory(wave, i));
            if (p.epilogue.d_dtype == FP4BF16_BFLOAT16)
                stage_box<FP4BF16_BFLOAT16>(acc[wave], i, memory(wave, i));
            else
                stage_box<FP4BF16_FLOAT16>(acc[wave], i, memory(wave, i));
        }
    ptx::fence_async_shared();
    asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
    if (threadIdx.x % 128 >= 32 || !ptx::elect()) return;
#pragma unroll
    for (int wave = 0; wave < C::kWaves; ++wave) {
        const Pixel at = pixel_of(p, corner.at, 64 * (group * C::kWaves + wave));
#pragma unroll
        for (int i = 0; i < kBoxes; ++i)
            ptx::store_picture_box(&p.d, memory(wave, i), corner.n + 64 * i, at.x, at.y, at.n);
    }
    ptx::store_commit();
}

template <class C>
__device__ inline void consume_conv(const ConvParams& p, const SharedStages<C>& shared, uint64_t* own_empty,
                                    int cluster, int clusters, int rank) {
    const int group = uniform(threadIdx.x / 128 - 1);
    const bool e4m3 = C::kE4m3 && p.fp4.taps > 0;
    Consumer<C, true, true> c(shared, group);
    c.own_empty = uniform(ptx::shared_address(own_empty));
    ColumnVectors<C::kTileN> columns(shared.columns + group * ColumnVectors<C::kTileN>::kFloats);
    for (int tile = cluster; tile < p.schedule.total(); tile += clusters) {
        const ConvCorner<C> corner(p, tile, rank);
        const Rows<C> rows(p, corner, group);
        Accumulators<C> acc;
        load_columns<C>(p, columns, corner);
        auto scale = [&] {
            columns.publish(1 + group);
            scale_rows<C>(p, acc, rows, columns);
        };
        if constexpr (C::kE4m3) {
            if (e4m3) {
                c.period = p.fp4.chunks, c.tail = p.fp4.tail;
                if constexpr (C::kPromote)
                    c.e4m3_promoted(acc, p.fp4.tiles());
                else
                    c.e4m3_fast(acc, p.fp4.tiles());
                scale();
            }
        }
        if (p.bf16.taps > 0) {
            c.period = p.bf16.chunks, c.tail = p.bf16.tail;
            if (e4m3) {
                c.template bf16<false>(acc, p.bf16.tiles(), p.bf16.tail);
            } else {
                c.template bf16<true>(acc, p.bf16.tiles(), p.bf16.tail);
                scale();
            }
        } else if (!e4m3) {  // no tap meets these pixels
#pragma unroll
            for (int i = 0; i < C::kWaves * C::kAccumulators; ++i)
                acc[i / C::kAccumulators][i % C::kAccumulators] = 0;
            c.release_storing();
            scale();
        }
        const int col = corner.n + threadIdx.x % 4 * 2;
        if (__builtin_expect(p.extra, 0)) finish_rows<C>(p, acc, rows, columns.biases(), col);
        if (p.staged) {
            c.wait_full();  // the stage that the producer left out
            store_pixels<C>(p, shared, c.ring.stage, acc, group, corner);
            c.give_to_stores();
        } else {
            store_rows<C>(p, acc, rows, col);
        }
    }
    ptx::store_wait();
}

// ---- kernel

template <class C>
constexpr int kConvSharedBytes = C::kSharedBytes + 16;

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) sm90_conv(const __grid_constant__ ConvParams p) {
    extern __shared__ uint8_t raw[];
    const SharedStages<C> shared(raw);
    uint64_t* own_empty = shared.empty + C::kStages;  // staging memory beside the ring: its stores are done
    const int rank = C::kCluster == 1 ? 0 : ptx::cluster_rank();
    const int cluster = blockIdx.x / C::kCluster, clusters = gridDim.x / C::kCluster;

    if (threadIdx.x == 0) {
        for (int i = 0; i < C::kStages; ++i) {
            ptx::barrier_init(&shared.full[i], 1);
            ptx::barrier_init(&shared.empty[i], 8 * C::kCluster);  // the consumer warps
        }
        ptx::barrier_init(own_empty, 2);  // a thread of each consumer warpgroup
        ptx::fence_barrier_init();
    }
    if constexpr (C::kCluster == 1)
        __syncthreads();
    else
        ptx::cluster_arrive(), ptx::cluster_wait();

    if (threadIdx.x < 128) {
        ptx::give_registers<40>();
        if (threadIdx.x < 32 && ptx::elect()) {
            if (p.fp4.taps > 0) ptx::prefetch_map(&p.x8), ptx::prefetch_map(&p.w8);
            if (p.bf16.taps > 0) ptx::prefetch_map(&p.x16), ptx::prefetch_map(&p.w16);
            if (p.staged) ptx::prefetch_map(&p.d);
            if (p.prefetched) ptx::prefetch_map(&p.residual_map);
            produce_conv<C>(p, shared, own_empty, cluster, clusters, rank);
        }
        __syncwarp();
    } else {
        ptx::take_registers<232>();
        consume_conv<C>(p, shared, own_empty, cluster, clusters, rank);
    }
    // No CTA leaves while another may still write to its shared memory or arrive at its barriers.
    if constexpr (C::kCluster > 1) ptx::cluster_arrive(), ptx::cluster_wait();
}

}  // namespace fp4bf16
