// Group normalisation of tiles, see norm.cuh: statistics, activation, BF16 and FP4 results.
#include <type_traits>

#include "norm.cuh"
#include "norm_results.cuh"

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

template <bool kSilu, bool kNorms>
__device__ inline void store_fp4(const NormJob& job, const NormTile& tile, int images, Outer o,
                                 const Shared& s, BlockNorms* norms) {
    const NormPlan& p = job.plan;
    const NormThread t(p.chunks / 2, p.by_pairs, 2 * p.rows, p.by_double_rows, images);
    if (t.image < 0 || t.row >= tile.count) return;
    const uint4* from = s.tile + swizzled((t.image * p.part + t.row) * p.chunks + 2 * t.vector, p.swizzle);
    BlockRun run(job.a, tile.image + t.image, tile.first_pixel + t.row, 2 * p.rows,
                 tile.channel / 16 + t.vector);
    run.from = from, run.high = (from - s.tile & 1) != 0 ? -1 : 1, run.step = 2 * p.rows * p.chunks;
    run.mean = reinterpret_cast<const float4*>(s.mean + t.image * p.width / 4) + t.vector;
    run.scale = reinterpret_cast<const float4*>(s.scale + t.image * p.width) + 4 * t.vector;
    run.shift = reinterpret_cast<const float4*>(s.shift + t.image * p.width) + 4 * t.vector;
    run.count = divided(tile.count - t.row + 2 * p.rows - 1, p.by_double_rows);
    const float4 mean = *run.mean;
    const bool centred = mean.x != 0.0f || mean.y != 0.0f || mean.z != 0.0f || mean.w != 0.0f;
    store_blocks<kSilu, kNorms>(job.a, run, centred, o, norms);
}

template <bool kSilu, bool kFp4, bool kCertify>
__global__ void __launch_bounds__(kNormThreads, 3) norm_kernel(const __grid_constant__ NormJob job) {
    if (kCertify && skipped(job.a.run_if)) return;
    extern __shared__ uint4 memory[];
    const NormPlan& p = job.plan;
    const Shared s(job, reinterpret_cast<char*>(memory));
    const NormTile tile(p);
    if (tile.image >= job.a.n) return;  // the whole cluster
    const int images = images_here(p, tile, job.a.n);
    const NormThread t(p.chunks, p.by_chunks, p.rows, p.by_rows, images);
    if (p.parts > 1) open_inbox(s.barrier, p.parts * p.groups * static_cast<int>(sizeof(float2)));
    wait_for_previous();
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
        BlockNorms norms;
        store_fp4<kSilu, kCertify>(job, tile, images, o, s, &norms);
        if constexpr (kCertify)
            store_norms(job.a, norms, o.decode, memory, tile.image / p.images * gridDim.x + blockIdx.x);
    } else {
        if (t.image >= 0 && job.a.y != nullptr) store_bf16<kSilu>(job, tile, t, s);
    }
}

template <bool kSilu, bool kFp4>
fp4bf16_status launch(const NormJob& job, cudaStream_t stream) {
    return certifies(job.a) ? norm_launch<norm_kernel<kSilu, kFp4, true>>(job, job.shared, stream)
                            : norm_launch<norm_kernel<kSilu, kFp4, false>>(job, job.shared, stream);
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
