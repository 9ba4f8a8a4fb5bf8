// Group normalisation of tiles, see norm.cuh: statistics, activation, BF16 and FP4 results.
#include "norm.cuh"
#include "norm_quantize.cuh"

namespace fp4bf16 {
namespace {

// Mean and sum of squared distances from it, of `weight` numbers.
struct Moments {
    float weight, mean, m2;
};

// Of both together (Chan, Golub and LeVeque 1983, equations 2.1); `a` is empty only where `b` is. Equal means
// stay as they are.
__device__ inline Moments merge(const Moments& a, const Moments& b) {
    const float weight = a.weight + b.weight, d = b.mean - a.mean;
    const float part = b.weight > 0.0f ? __fdividef(b.weight, weight) : 0.0f;
    return {weight, __fmaf_rn(d, part, a.mean), __fmaf_rn(d * d, a.weight * part, a.m2 + b.m2)};
}

__device__ inline Moments merge_team(Moments m) {
#pragma unroll
    for (int step = 1; step < kTeam; step *= 2) {
        const Moments other = {__shfl_xor_sync(team_mask(), m.weight, step),
                               __shfl_xor_sync(team_mask(), m.mean, step),
                               __shfl_xor_sync(team_mask(), m.m2, step)};
        m = threadIdx.x & step ? merge(other, m) : merge(m, other);
    }
    return m;
}

// What a thread block keeps in shared memory. Units are four channels, which always belong to one group.
struct Shared {
    uint4* tile;      // (images, part, chunks)
    Pair* pairs;      // (128,) of the quantiser
    float* scale;     // (images, width): gamma * rstd
    float* mean;      // (images, units)
    float* gamma;     // (width,)
    float* beta;      // (width,)
    float2* partial;  // (images, rows, units): mean and m2 of a thread's elements
    float2* group;    // (images, groups here): of this thread block's elements, for the cluster
    uint32_t* most;   // (2, warps): largest |gamma| and |beta| of all channels, as bits

    FP4BF16_HD Shared(const NormPlan& p, void* memory) {
        const int units = p.width / 4;
        tile = static_cast<uint4*>(memory);
        pairs = reinterpret_cast<Pair*>(tile + p.images * p.part * p.chunks);
        scale = reinterpret_cast<float*>(pairs + 128);
        mean = scale + p.images * p.width;
        gamma = mean + p.images * units;
        beta = gamma + p.width;
        partial = reinterpret_cast<float2*>(beta + p.width);
        group = partial + p.images * p.rows * units;
        most = reinterpret_cast<uint32_t*>(group + p.images * (p.width / p.group));
    }
    FP4BF16_HD void* end() const { return most + 2 * (kNormThreads / 32); }
};

// ---- the steps
__device__ inline void fetch(const NormJob& job, const NormTile& tile, const NormThread& t, int images,
                             const Shared& s) {
    const NormPlan& p = job.plan;
    if (t.image >= 0 && t.image < images) {
        const auto* from = static_cast<const __nv_bfloat16*>(job.a.x) +
                           (tile.image + t.image) * job.a.x_image +
                           (tile.first_pixel + t.row) * job.a.x_pixel + tile.channel + 8 * t.vector;
        const int64_t stride = p.rows * job.a.x_pixel;
        const int step = p.rows * p.chunks;
        uint4* to = s.tile + swizzled((t.image * p.part + t.row) * p.chunks + t.vector, p.swizzle);
#pragma unroll 4
        for (int pixel = t.row; pixel < tile.count; pixel += p.rows, from += stride, to += step)
            copy_chunk(to, from);
    }
}

__device__ inline void fetch_vectors(const NormJob& job, const NormTile& tile, const Shared& s) {
    for (int i = threadIdx.x; i < job.plan.width; i += blockDim.x) {
        s.gamma[i] = job.a.gamma[tile.channel + i];
        s.beta[i] = job.a.beta[tile.channel + i];
    }
}

// Each unit's mean and m2 over this thread's pixels, by distances from the first of its elements: at most
// some hundred numbers, one of which is that first, so that little cancels whatever they are.
__device__ inline void unit_moments(const NormPlan& p, const NormTile& tile, const NormThread& t,
                                    const Shared& s) {
    if (t.image < 0 || t.row >= tile.count) return;
    const uint4* from = s.tile + swizzled((t.image * p.part + t.row) * p.chunks + t.vector, p.swizzle);
    const int step = p.rows * p.chunks;
    float sum[2] = {}, square[2] = {};
    const float first[2] = {low_float(from->x), low_float(from->z)};
#pragma unroll 4
    for (int pixel = t.row; pixel < tile.count; pixel += p.rows, from += step) {
        float x[8];
        unpack_chunk(*from, x);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float d = x[i] - first[i / 4];
            sum[i / 4] += d;
            square[i / 4] = __fmaf_rn(d, d, square[i / 4]);
        }
    }
    const float weight = 4.0f * static_cast<float>(divided(tile.count - t.row + p.rows - 1, p.by_rows));
    float2* to = s.partial + (t.image * p.rows + t.row) * 2 * p.chunks + 2 * t.vector;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
        const float mean = __fdividef(sum[u], weight);
        to[u] = make_float2(first[u] + mean, fmaxf(square[u] - sum[u] * mean, 0.0f));
    }
}

// What the second half needs of group g of an image, whose moments over all pixels are `m`.
__device__ inline void finish_group(const NormJob& job, const NormTile& tile, const Shared& s, int image,
                                    int g, const Moments& m) {
    const NormPlan& p = job.plan;
    const float rstd = 1.0f / sqrtf(m.m2 / m.weight + job.a.eps);
    const int lane = threadIdx.x % kTeam, first = g * p.group;
    for (int i = lane; i < p.group; i += kTeam)
        s.scale[image * p.width + first + i] = s.gamma[first + i] * rstd;
    for (int i = lane; i < p.group / 4; i += kTeam) s.mean[(image * p.width + first) / 4 + i] = m.mean;
    if (lane != 0 || tile.rank != 0) return;
    const int64_t at = (tile.image + image) * job.a.groups + tile.channel / p.group + g;
    if (job.a.mean != nullptr) job.a.mean[at] = m.mean;
    if (job.a.rstd != nullptr) job.a.rstd[at] = rstd;
}

// Statistics of each group from those of the threads, by teams.
__device__ inline void group_moments(const NormJob& job, const NormTile& tile, int images, const Shared& s) {
    const NormPlan& p = job.plan;
    const int lane = threadIdx.x % kTeam, team = threadIdx.x / kTeam, teams = blockDim.x / kTeam;
    const int groups = p.width / p.group, units = p.width / 4, of_group = p.group / 4;
    for (int image = 0; image < images; ++image)
        for (int g = team; g < groups; g += teams) {
            Moments m{};
            for (int row = lane; row < min(p.rows, tile.count); row += kTeam) {
                const float weight =
                    4.0f * static_cast<float>(divided(tile.count - row + p.rows - 1, p.by_rows));
                const float2* from = s.partial + (image * p.rows + row) * units + g * of_group;
                for (int u = 0; u < of_group; ++u) m = merge(m, {weight, from[u].x, from[u].y});
            }
            m = merge_team(m);
            if (p.parts == 1)
                finish_group(job, tile, s, image, g, m);
            else if (lane == 0)
                s.group[g] = make_float2(m.mean, m.m2);
        }
    if (p.parts == 1) return;
    cluster_arrive(), cluster_wait();
    for (int g = team; g < groups; g += teams) {
        Moments m{};
        const int there = min(p.part, p.pixels - lane * p.part);
        if (lane < p.parts && there > 0)
            m = {static_cast<float>(there * p.group), remote(&s.group[g].x, lane),
                 remote(&s.group[g].y, lane)};
        finish_group(job, tile, s, 0, g, merge_team(m));
    }
    cluster_arrive();  // the others may go on (and end) once this has read
}

template <bool kSilu>
__device__ inline float result(float x, float mean, float scale, float shift) {
    const float z = affine(x, mean, scale, shift);
    return kSilu ? z * sigmoid(z) : z;
}

// BF16 results alone: a thread writes the chunks that it read.
template <bool kSilu>
__device__ inline void store_bf16(const NormJob& job, const NormTile& tile, const NormThread& t, int images,
                                  const Shared& s) {
    const NormPlan& p = job.plan;
    if (t.image < 0 || t.image >= images || job.a.y == nullptr) return;
    const uint4* from = s.tile + swizzled((t.image * p.part + t.row) * p.chunks + t.vector, p.swizzle);
    auto* to = static_cast<__nv_bfloat16*>(job.a.y) + (tile.image + t.image) * job.a.y_image +
               (tile.first_pixel + t.row) * job.a.y_pixel + tile.channel + 8 * t.vector;
    const int64_t stride = p.rows * job.a.y_pixel;
    const int step = p.rows * p.chunks;
    float scale[8], shift[8], mean[2];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        scale[i] = s.scale[t.image * p.width + 8 * t.vector + i];
        shift[i] = s.beta[8 * t.vector + i];
        if (i % 4 == 0) mean[i / 4] = s.mean[(t.image * p.width + 8 * t.vector + i) / 4];
    }
#pragma unroll 2
    for (int pixel = t.row; pixel < tile.count; pixel += p.rows, from += step, to += stride) {
        float x[8];
        unpack_chunk(*from, x);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = result<kSilu>(x[i], mean[i / 4], scale[i], shift[i]);
        *reinterpret_cast<uint4*>(to) = pack_chunk(x);
    }
}

// FP4 results, and BF16 ones beside them: a thread takes blocks of 16 channels. What the fast quantiser does
// not take waits in the tile for the end.
template <bool kSilu>
__device__ inline void store_fp4(const NormJob& job, const NormTile& tile, int images, const Outer& o,
                                 const Shared& s) {
    const NormPlan& p = job.plan;
    const NormThread t(p.chunks / 2, p.by_pairs, 2 * p.rows, p.by_double_rows, p.images);
    if (t.image < 0 || t.image >= images) return;
    const int c = static_cast<int>(job.a.c), block = tile.channel / 16 + t.vector,
              step = 2 * p.rows * p.chunks;
    uint4* from = s.tile + swizzled((t.image * p.part + t.row) * p.chunks + 2 * t.vector, p.swizzle);
    const int high = p.swizzle && (from - s.tile & 1) ? -1 : 1;  // where the other half lies
    const auto* scale = reinterpret_cast<const float4*>(s.scale + t.image * p.width + 16 * t.vector);
    const auto* shift = reinterpret_cast<const float4*>(s.beta + 16 * t.vector);
    const auto* mean = reinterpret_cast<const float4*>(s.mean + (t.image * p.width + 16 * t.vector) / 4);
    const int64_t image = tile.image + t.image, pixel = image * p.pixels + tile.first_pixel + t.row;
    FourBit to(job.a, pixel * (c / 16) + block);
    auto* y = static_cast<__nv_bfloat16*>(job.a.y) + image * job.a.y_image +
              (tile.first_pixel + t.row) * job.a.y_pixel + 16 * block;
    const int64_t y_stride = 2 * p.rows * job.a.y_pixel;
    uint64_t special = 0;
    int i = 0;
#pragma unroll 1
    for (int at = t.row; at < tile.count; at += 2 * p.rows, ++i, from += step, y += y_stride) {
        uint32_t w[8];
        unpack_block(from[0], from[high], w);
        const float4 m = *mean;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float4 a = scale[j], b = shift[j];
            const float middle = j == 0 ? m.x : j == 1 ? m.y : j == 2 ? m.z : m.w;
            w[2 * j] = pack_bf16(result<kSilu>(low_float(w[2 * j]), middle, a.x, b.x),
                                 result<kSilu>(high_float(w[2 * j]), middle, a.y, b.y));
            w[2 * j + 1] = pack_bf16(result<kSilu>(low_float(w[2 * j + 1]), middle, a.z, b.z),
                                     result<kSilu>(high_float(w[2 * j + 1]), middle, a.w, b.w));
        }
        if (job.a.y != nullptr) {
            reinterpret_cast<uint4*>(y)[0] = make_uint4(w[0], w[1], w[2], w[3]);
            reinterpret_cast<uint4*>(y)[1] = make_uint4(w[4], w[5], w[6], w[7]);
        }
        if (!quantize_block16(w, o, s.pairs, to, int64_t{i} * 2 * p.rows * (c / 16))) {
            special |= uint64_t{1} << i;
            from[0] = make_uint4(w[0], w[1], w[2], w[3]);
            from[high] = make_uint4(w[4], w[5], w[6], w[7]);
        }
    }
    for (from -= i * step; special != 0; special &= special - 1) {
        const int k = __ffsll(static_cast<long long>(special)) - 1;
        special_block16(from + k * step, high, o, to, int64_t{k} * 2 * p.rows * (c / 16));
    }
}

template <bool kSilu, bool kFp4>
__global__ void __launch_bounds__(kNormThreads, 3) norm_kernel(const __grid_constant__ NormJob job) {
    extern __shared__ uint4 memory[];
    const NormPlan& p = job.plan;
    const Shared s(p, memory);
    const NormTile tile(p);
    if (tile.image >= job.a.n) return;  // the whole cluster
    const int images = images_here(p, tile, job.a.n);
    const NormThread t(p.chunks, p.by_chunks, p.rows, p.by_rows, p.images);
    fetch(job, tile, t, images, s);
    fetch_vectors(job, tile, s);
    if constexpr (kFp4) {
        fetch_largest(job.a, s.most);
        for (int i = threadIdx.x; i < 128; i += blockDim.x) s.pairs[i] = kPairs.entry[i];
    }
    wait_chunks();
    unit_moments(p, tile, t, s);  // of what the thread itself has brought
    __syncthreads();
    group_moments(job, tile, images, s);
    __syncthreads();
    if constexpr (kFp4) {
        const Outer o = static_outer(s.most, blockDim.x / 32, p.pixels, p.group);
        if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0)
            *job.a.outer_scale = o.decode;
        store_fp4<kSilu>(job, tile, images, o, s);
    } else {
        store_bf16<kSilu>(job, tile, t, images, s);
    }
    if (p.parts > 1) cluster_wait();
}

template <bool kSilu, bool kFp4>
fp4bf16_status launch(const NormJob& job, cudaStream_t stream) {
    const Shared s(job.plan, nullptr);
    return norm_launch(norm_kernel<kSilu, kFp4>, job, reinterpret_cast<intptr_t>(s.end()), stream);
}

}  // namespace

fp4bf16_status norm_forward(const NormJob& job, cudaStream_t stream) {
    const bool fp4 = job.a.expanded != nullptr || job.a.packed != nullptr;
    if (job.a.activation == FP4BF16_SILU)
        return fp4 ? launch<true, true>(job, stream) : launch<true, false>(job, stream);
    return fp4 ? launch<false, true>(job, stream) : launch<false, false>(job, stream);
}

}  // namespace fp4bf16
