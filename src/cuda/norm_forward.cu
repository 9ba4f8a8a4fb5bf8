// Group normalisation of tiles, see norm.cuh: statistics, activation, BF16 and FP4 results.
#include <type_traits>

#include "norm.cuh"
#include "norm_quantize.cuh"

namespace fp4bf16 {
namespace {

// What a thread block keeps in shared memory. Units are four channels, which always belong to one group.
struct Shared {
    uint4* tile;        // (images, part, chunks)
    float* scale;       // (images, width): see `result`
    float* shift;       // (images, width)
    float* mean;        // (images, units): what is subtracted
    float* gamma;       // (width,)
    float* beta;        // (width,)
    float2* partial;    // (images, rows, units): moments of a thread's elements
    float2* inbox;      // (parts, groups): moments from the cluster's thread blocks
    uint64_t* barrier;  // of the inbox
    Outer* outer;

    __device__ Shared(const NormJob& job, char* memory)
        : tile(reinterpret_cast<uint4*>(memory)),
          scale(reinterpret_cast<float*>(memory + job.scale)),
          shift(reinterpret_cast<float*>(memory + job.shift)),
          mean(reinterpret_cast<float*>(memory + job.mean)),
          gamma(reinterpret_cast<float*>(memory + job.gamma)),
          beta(reinterpret_cast<float*>(memory + job.beta)),
          partial(reinterpret_cast<float2*>(memory + job.partial)),
          inbox(reinterpret_cast<float2*>(memory + job.inbox)),
          barrier(reinterpret_cast<uint64_t*>(memory + job.barrier)),
          outer(reinterpret_cast<Outer*>(memory + job.outer)) {}
};

void place(NormJob* job) {
    const NormPlan& p = job->plan;
    const int units = p.width / 4, channels = 4 * p.images * p.width;  // bytes
    job->scale = 16 * p.images * p.part * p.chunks;
    job->shift = job->scale + channels;
    job->mean = job->shift + channels;
    job->gamma = job->mean + channels / 4;
    job->beta = job->gamma + 4 * p.width;
    job->partial = job->beta + 4 * p.width;
    job->inbox = job->partial + 8 * p.images * p.rows * units;
    job->barrier = job->inbox + 8 * p.parts * p.groups;
    job->outer = job->barrier + 8;
    job->shared = job->outer + static_cast<int>(sizeof(Outer));
    job->root = root_up(int64_t{p.pixels} * p.group);
}

// ---- statistics: moments are the mean and the sum of squared distances from it
// Sums of distances from `first`, and of their squares, of a chunk's two units.
struct UnitSums {
    float first[2], sum[2] = {}, square[2] = {};

    __device__ void start(const uint4& chunk) {
        first[0] = low_float(chunk.x), first[1] = low_float(chunk.z);
    }

    __device__ void add(const uint4& chunk) {
        float x[8];
        unpack_chunk(chunk, x);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float d = x[i] - first[i / 4];
            sum[i / 4] += d;
            square[i / 4] = __fmaf_rn(d, d, square[i / 4]);
        }
    }
};

__device__ inline int pixels_of_row(const NormPlan& p, const NormTile& tile, int row) {
    return divided(tile.count - row + p.rows - 1, p.by_rows);
}

// Brings a thread's pixels, and adds up each unit's moments by distances from the first of its elements: at
// most some hundred numbers, one of which is that first, so that little cancels whatever they are.
__device__ inline void fetch(const NormJob& job, const NormTile& tile, const NormThread& t, const Shared& s) {
    const NormPlan& p = job.plan;
    const int64_t stride = p.rows * job.a.x_pixel / 8;
    const int step = p.rows * p.chunks, pixels = pixels_of_row(p, tile, t.row);
    const auto* from = reinterpret_cast<const uint4*>(
        static_cast<const __nv_bfloat16*>(job.a.x) + (tile.image + t.image) * job.a.x_image +
        (tile.first_pixel + t.row) * job.a.x_pixel + tile.channel + 8 * t.vector);
    uint4* to = s.tile + swizzled((t.image * p.part + t.row) * p.chunks + t.vector, p.swizzle);
    UnitSums sums;
    int left = pixels;
    const auto several = [&](auto count) {  // all loads before the first use
        uint4 chunks[count.value];
#pragma unroll
        for (uint4& chunk : chunks) chunk = load_chunk(from), from += stride;
        if (left == pixels) sums.start(chunks[0]);
#pragma unroll
        for (const uint4& chunk : chunks) *to = chunk, to += step, sums.add(chunk);
    };
#pragma unroll 1
    for (; left >= 8; left -= 8) several(std::integral_constant<int, 8>());
    if (left >= 4) several(std::integral_constant<int, 4>()), left -= 4;
#pragma unroll 1
    for (; left > 0; --left) several(std::integral_constant<int, 1>());
    const float inverse = inverse_of(4.0f * static_cast<float>(pixels));
    float2* partial = s.partial + (t.image * p.rows + t.row) * 2 * p.chunks + 2 * t.vector;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
        const float mean = sums.sum[u] * inverse;
        partial[u] = make_float2(sums.first[u] + mean, fmaxf(sums.square[u] - sums.sum[u] * mean, 0.0f));
    }
}

// Moments of a team's numbers, in each of its threads: of what `each` calls its argument with, weight and
// moments. first: one of the means; equal means stay as they are.
template <typename Each>
__device__ inline float2 team_moments(float first, float inverse_weight, const Each& each) {
    float sum = 0.0f, square = 0.0f;
    each([&](float weight, const float2& m) { sum = __fmaf_rn(weight, m.x - first, sum); });
    const float mean = __fmaf_rn(team_sum(sum), inverse_weight, first);
    each([&](float weight, const float2& m) {
        const float d = m.x - mean;
        square = __fmaf_rn(weight * d, d, square + m.y);
    });
    return make_float2(mean, team_sum(square));
}

// What the second half needs of group g of an image, whose moments over all pixels are `m`. Where the mean is
// not far from zero it goes into the shift, which loses under 2^-18 of gamma; else it is subtracted first.
template <bool kSilu>
__device__ inline void finish_group(const NormJob& job, const NormTile& tile, const Shared& s, int image,
                                    int g, const float2& m) {
    const NormPlan& p = job.plan;
    const float rstd = rsqrtf(__fmaf_rn(m.y, p.inverse_count, job.a.eps));
    const float subtracted = fabsf(m.x * rstd) <= 64.0f ? 0.0f : m.x, factor = kSilu ? -kLog2E : 1.0f;
    const int lane = threadIdx.x % kTeam, first = g * p.group, at = image * p.width + first;
#pragma unroll 1
    for (int i = lane; i < p.group; i += kTeam) {
        const float scale = s.gamma[first + i] * (factor * rstd);
        s.scale[at + i] = scale;
        s.shift[at + i] = __fmaf_rn(subtracted - m.x, scale, factor * s.beta[first + i]);
        if (i % 4 == 0) s.mean[(at + i) / 4] = subtracted;
    }
    if (lane != 0 || tile.rank != 0) return;
    const int64_t out =
        (tile.image + image) * job.a.groups + static_cast<int>(blockIdx.x >> p.parts_shift) * p.groups + g;
    if (job.a.mean != nullptr) job.a.mean[out] = m.x;
    if (job.a.rstd != nullptr) job.a.rstd[out] = rstd;
}

// Statistics of each group from those of the threads, by teams.
template <bool kSilu>
__device__ inline void group_moments(const NormJob& job, const NormTile& tile, int images, const Shared& s) {
    const NormPlan& p = job.plan;
    const int lane = threadIdx.x % kTeam, team = threadIdx.x / kTeam, teams = blockDim.x / kTeam;
    const int units = p.width / 4, of_group = p.group / 4, rows = min(p.rows, tile.count);
    const float inverse = inverse_of(static_cast<float>(tile.count * p.group));
    for (int image = 0; image < images; ++image)
        for (int g = team; g < p.groups; g += teams) {
            const float2* from = s.partial + image * p.rows * units + g * of_group;
            const float2 m = team_moments(from->x, inverse, [&](const auto& add) {
#pragma unroll 1
                for (int row = lane; row < rows; row += kTeam) {
                    const float weight = 4.0f * static_cast<float>(pixels_of_row(p, tile, row));
                    for (int u = 0; u < of_group; ++u) add(weight, from[row * units + u]);
                }
            });
            if (p.parts == 1) {
                finish_group<kSilu>(job, tile, s, image, g, m);
            } else if (lane < p.parts) {
                float2* to = s.inbox + tile.rank * p.groups + g;
                send(&to->x, s.barrier, lane, m.x);
                send(&to->y, s.barrier, lane, m.y);
            }
        }
    if (p.parts == 1) return;
    wait_for_inbox(s.barrier);
    const int there = lane < p.parts ? min(p.part, p.pixels - lane * p.part) : 0;  // pixels of a part
    for (int g = team; g < p.groups; g += teams) {
        const float2 m = team_moments(s.inbox[g].x, p.inverse_count, [&](const auto& add) {
            if (there > 0) add(static_cast<float>(there * p.group), s.inbox[lane * p.groups + g]);
        });
        finish_group<kSilu>(job, tile, s, 0, g, m);
    }
}

// ---- results
// With SiLU scale and shift are times -log2(e), and so is z here: z silu's sigmoid without a product more.
template <bool kSilu, bool kCentred>
__device__ inline float result(float x, float mean, float scale, float shift) {
    const float z = kCentred ? affine(x, mean, scale, shift) : __fmaf_rn(x, scale, shift);
    return kSilu ? z * inverse_of(__fmaf_rn(exp2_of(z), -kLog2E, -kLog2E)) : z;
}

// BF16 results alone: a thread writes the chunks that it read.
template <bool kSilu>
__device__ inline void store_bf16(const NormJob& job, const NormTile& tile, const NormThread& t,
                                  const Shared& s) {
    const NormPlan& p = job.plan;
    const uint4* from = s.tile + swizzled((t.image * p.part + t.row) * p.chunks + t.vector, p.swizzle);
    auto* to = static_cast<__nv_bfloat16*>(job.a.y) + (tile.image + t.image) * job.a.y_image +
               (tile.first_pixel + t.row) * job.a.y_pixel + tile.channel + 8 * t.vector;
    const int64_t stride = p.rows * job.a.y_pixel;
    const int step = p.rows * p.chunks;
    float scale[8], shift[8], mean[2];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        scale[i] = s.scale[t.image * p.width + 8 * t.vector + i];
        shift[i] = s.shift[t.image * p.width + 8 * t.vector + i];
        if (i % 4 == 0) mean[i / 4] = s.mean[(t.image * p.width + 8 * t.vector + i) / 4];
    }
#pragma unroll 2
    for (int pixel = t.row; pixel < tile.count; pixel += p.rows, from += step, to += stride) {
        float x[8];
        unpack_chunk(*from, x);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = result<kSilu, true>(x[i], mean[i / 4], scale[i], shift[i]);
        *reinterpret_cast<uint4*>(to) = pack_chunk(x);
    }
}

// Sixteen results of one pixel, in place.
template <bool kSilu, bool kCentred>
__device__ inline void results16(uint32_t (&w)[8], const float4* mean, const float4* scale,
                                 const float4* shift) {
    float4 m{};
    if (kCentred) m = *mean;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float4 a = scale[j], b = shift[j];
        const float middle = j == 0 ? m.x : j == 1 ? m.y : j == 2 ? m.z : m.w;
        uint32_t &low = w[2 * j], &high = w[2 * j + 1];
        low = pack_bf16(result<kSilu, kCentred>(low_float(low), middle, a.x, b.x),
                        result<kSilu, kCentred>(high_float(low), middle, a.y, b.y));
        high = pack_bf16(result<kSilu, kCentred>(low_float(high), middle, a.z, b.z),
                         result<kSilu, kCentred>(high_float(high), middle, a.w, b.w));
    }
}

// FP4 results, and BF16 ones beside them, of blocks of 16 channels. What the fast quantiser does not take is
// made again at the end.
template <bool kSilu, bool kCentred>
__device__ inline void store_blocks(const NormJob& job, const NormTile& tile, const NormThread& t, Outer o,
                                    const Shared& s) {
    const NormPlan& p = job.plan;
    const int step = 2 * p.rows * p.chunks, blocks = static_cast<int>(job.a.c) / 16;
    uint4* from = s.tile + swizzled((t.image * p.part + t.row) * p.chunks + 2 * t.vector, p.swizzle);
    const int high = (from - s.tile & 1) != 0 ? -1 : 1;  // where the other half lies
    const auto* scale = reinterpret_cast<const float4*>(s.scale + t.image * p.width) + 4 * t.vector;
    const auto* shift = reinterpret_cast<const float4*>(s.shift + t.image * p.width) + 4 * t.vector;
    const auto* mean = reinterpret_cast<const float4*>(s.mean + t.image * p.width / 4) + t.vector;
    const int64_t image = tile.image + t.image, pixel = tile.first_pixel + t.row;
    const int block = tile.channel / 16 + t.vector;
    const FourBit to(job.a, (image * p.pixels + pixel) * blocks + block);
    const uint32_t stride = 2 * p.rows * blocks;
    auto* y =
        static_cast<__nv_bfloat16*>(job.a.y) + image * job.a.y_image + pixel * job.a.y_pixel + 16 * block;
    uint32_t special = 0, at = 0;
    int i = 0;
#pragma unroll 1
    for (int row = t.row; row < tile.count; row += 2 * p.rows, ++i, from += step, at += stride) {
        uint32_t w[8];
        unpack_block(from[0], from[high], w);
        results16<kSilu, kCentred>(w, mean, scale, shift);
        if (job.a.y != nullptr) {
            reinterpret_cast<uint4*>(y)[0] = make_uint4(w[0], w[1], w[2], w[3]);
            reinterpret_cast<uint4*>(y)[1] = make_uint4(w[4], w[5], w[6], w[7]);
            y += 2 * p.rows * job.a.y_pixel;
        }
        const uint32_t top = largest(w);
        if (is_special16(top))
            special |= 1u << i;
        else
            quantize_block16(w, top, o, to, at);
    }
    for (from -= i * step; special != 0; special &= special - 1) {
        const int k = __ffs(static_cast<int>(special)) - 1;
        uint32_t w[8];
        unpack_block(from[k * step], from[k * step + high], w);
        results16<kSilu, kCentred>(w, mean, scale, shift);
        special_block16(w, o, to, int64_t{k} * stride);
    }
}

template <bool kSilu>
__device__ inline void store_fp4(const NormJob& job, const NormTile& tile, int images, Outer o,
                                 const Shared& s) {
    const NormPlan& p = job.plan;
    const NormThread t(p.chunks / 2, p.by_pairs, 2 * p.rows, p.by_double_rows, images);
    if (t.image < 0) return;
    const float4 mean = reinterpret_cast<const float4*>(s.mean + t.image * p.width / 4)[t.vector];
    if (mean.x == 0.0f && mean.y == 0.0f && mean.z == 0.0f && mean.w == 0.0f)
        store_blocks<kSilu, false>(job, tile, t, o, s);
    else
        store_blocks<kSilu, true>(job, tile, t, o, s);
}

template <bool kSilu, bool kFp4>
__global__ void __launch_bounds__(kNormThreads, 3) norm_kernel(const __grid_constant__ NormJob job) {
    extern __shared__ uint4 memory[];
    const NormPlan& p = job.plan;
    const Shared s(job, reinterpret_cast<char*>(memory));
    const NormTile tile(p);
    if (tile.image >= job.a.n) return;  // the whole cluster
    const int images = images_here(p, tile, job.a.n);
    const NormThread t(p.chunks, p.by_chunks, p.rows, p.by_rows, images);
    if (p.parts > 1) open_inbox(s.barrier, p.parts * p.groups * static_cast<int>(sizeof(float2)));
    for (int i = threadIdx.x; i < p.width; i += blockDim.x) {
        s.gamma[i] = job.a.gamma[tile.channel + i];
        s.beta[i] = job.a.beta[tile.channel + i];
    }
    if (kFp4 && threadIdx.x >= blockDim.x - 32) {
        const Outer o = static_outer(job.a, job.root);
        if (threadIdx.x == blockDim.x - 1) {
            *s.outer = o;
            if (blockIdx.x == 0 && tile.image == 0) *job.a.outer_scale = o.decode;
        }
    }
    if (t.image >= 0 && t.row < tile.count) fetch(job, tile, t, s);
    __syncthreads();
    if (p.parts > 1) wait_for_inboxes();
    group_moments<kSilu>(job, tile, images, s);
    __syncthreads();
    if constexpr (kFp4) {
        const Outer o = *s.outer;
        store_fp4<kSilu>(job, tile, images, o, s);
    } else {
        if (t.image >= 0 && job.a.y != nullptr) store_bf16<kSilu>(job, tile, t, s);
    }
}

template <bool kSilu, bool kFp4>
fp4bf16_status launch(const NormJob& job, cudaStream_t stream) {
    return norm_launch<norm_kernel<kSilu, kFp4>>(job, job.shared, stream);
}

}  // namespace

fp4bf16_status norm_forward(NormJob job, cudaStream_t stream) {
    place(&job);
    const bool fp4 = job.a.expanded != nullptr || job.a.packed != nullptr;
    if (job.a.activation == FP4BF16_SILU)
        return fp4 ? launch<true, true>(job, stream) : launch<true, false>(job, stream);
    return fp4 ? launch<false, true>(job, stream) : launch<false, false>(job, stream);
}

}  // namespace fp4bf16
