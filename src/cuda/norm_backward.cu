// Gradient of group normalisation by tiles, see norm.cuh. With d = x - mean, h = d * rstd, z = h * gamma +
// beta and u = g * activation'(z), over the n elements of a group:
//     dx = rstd * (u * gamma - sum(u * gamma) / n - h * sum(u * gamma * h) / n)
//     dgamma = sum(u * h), dbeta = sum(u), dshift = sum(dx), each over a channel's pixels
// (python_ref/norm.py). Both group sums and dshift come from three sums a channel: of u, u * d and d.
#include "norm.cuh"

namespace fp4bf16 {
namespace {

struct Shared {
    uint4 *x, *g;       // (images, part, chunks)
    float* rows;        // (images, rows, width + 4): one of the sums, of each thread; rows of distinct banks
    float* sums;        // (3, images, width): of u, u * d (later u * h), d over the images' pixels
    float* inbox;       // (parts, 3, width): of the cluster's thread blocks
    float2* group;      // (images, units): what is subtracted: rstd * mean(u gamma), and a factor of d
    uint64_t* barrier;  // of the inbox

    FP4BF16_HD Shared(const NormPlan& p, void* memory) {
        const int chunks = p.images * p.part * p.chunks, channels = p.images * p.width;
        x = static_cast<uint4*>(memory);
        g = x + chunks;
        rows = reinterpret_cast<float*>(g + chunks);
        sums = rows + p.images * p.rows * (p.width + 4);
        inbox = sums + 3 * channels;
        group = reinterpret_cast<float2*>(inbox + (p.parts > 1 ? p.parts * 3 * p.width : 0));
        barrier = reinterpret_cast<uint64_t*>(group + channels / 4);
    }
    FP4BF16_HD void* end() const { return barrier + 1; }
};

// The eight channels of a thread.
struct Channels {
    float scale[8], shift[8], mean[2], rstd[2];

    __device__ Channels(const NormBackwardJob& job, const NormTile& tile, const NormThread& t) {
        if (t.image < 0) return;
        const NormPlan& p = job.plan;
        const int64_t groups = (tile.image + t.image) * job.a.groups + tile.channel / p.group;
#pragma unroll
        for (int u = 0; u < 2; ++u) {
            const int64_t at = groups + divided(2 * t.vector + u, p.by_units);
            mean[u] = job.a.mean[at], rstd[u] = job.a.rstd[at];
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            scale[i] = job.a.gamma[tile.channel + 8 * t.vector + i] * rstd[i / 4];
            shift[i] = job.a.beta[tile.channel + 8 * t.vector + i];
        }
    }
};

__device__ inline void fetch(const void* source, int64_t image_stride, int64_t pixel_stride,
                             const NormPlan& p, const NormTile& tile, const NormThread& t, uint4* to) {
    const auto* from = static_cast<const __nv_bfloat16*>(source) + (tile.image + t.image) * image_stride +
                       (tile.first_pixel + t.row) * pixel_stride + tile.channel + 8 * t.vector;
    const int64_t stride = p.rows * pixel_stride;
    const int step = p.rows * p.chunks;
    to += (t.image * p.part + t.row) * p.chunks + t.vector;
#pragma unroll 4
    for (int pixel = t.row; pixel < tile.count; pixel += p.rows, from += stride, to += step)
        copy_chunk(to, from);
}

// Of a thread's pixels: each channel's sums.
template <bool kSilu>
__device__ inline void add_pixels(const NormPlan& p, const NormTile& tile, const NormThread& t,
                                  const Channels& c, const Shared& s, float (&sums)[3][8]) {
    const int first = (t.image * p.part + t.row) * p.chunks + t.vector, step = p.rows * p.chunks;
    const uint4 *from_x = s.x + first, *from_g = s.g + first;
#pragma unroll 1
    for (int pixel = t.row; pixel < tile.count; pixel += p.rows, from_x += step, from_g += step) {
        float x[8], g[8];
        unpack_chunk(*from_x, x);
        unpack_chunk(*from_g, g);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float d = x[i] - c.mean[i / 4];
            const float u = activation_gradient<kSilu>(g[i], __fmaf_rn(d, c.scale[i], c.shift[i]));
            sums[0][i] += u;
            sums[1][i] = __fmaf_rn(u, d, sums[1][i]);
            sums[2][i] += d;
        }
    }
}

// Sum k of each channel of the images: over the rows, to s.sums or to the inboxes of the cluster.
__device__ inline void add_rows(const NormPlan& p, const NormTile& tile, int images, int k, const Shared& s) {
    const int lanes = p.rows < kTeam ? 1 : kTeam, stride = p.width + 4;
    const int lane = threadIdx.x % lanes, first = threadIdx.x / lanes, step = blockDim.x / lanes;
    for (int image = 0; image < images; ++image)
        for (int i = first; i < p.width; i += step) {
            const float* from = s.rows + image * p.rows * stride + i;
            float sum = 0.0f;
#pragma unroll 4
            for (int row = lane; row < p.rows; row += lanes) sum += from[row * stride];
            if (lanes > 1) sum = team_sum(sum);
            if (p.parts == 1 && lane == 0) s.sums[(k * p.images + image) * p.width + i] = sum;
            if (p.parts > 1)
                for (int rank = lane; rank < p.parts; rank += lanes)
                    send(s.inbox + (tile.rank * 3 + k) * p.width + i, s.barrier, rank, sum);
        }
}

__device__ inline void add_threads(const NormPlan& p, const NormTile& tile, const NormThread& t, int images,
                                   const float (&sums)[3][8], const Shared& s) {
#pragma unroll
    for (int k = 0; k < 3; ++k) {
        if (t.image >= 0) {
            auto* to =
                reinterpret_cast<float4*>(s.rows + (t.image * p.rows + t.row) * (p.width + 4) + 8 * t.vector);
            to[0] = make_float4(sums[k][0], sums[k][1], sums[k][2], sums[k][3]);
            to[1] = make_float4(sums[k][4], sums[k][5], sums[k][6], sums[k][7]);
        }
        __syncthreads();
        if (k == 0 && p.parts > 1) wait_for_inboxes();
        add_rows(p, tile, images, k, s);
        __syncthreads();
    }
    if (p.parts == 1) return;
    wait_for_inbox(s.barrier);
    for (int i = threadIdx.x; i < 3 * p.width; i += blockDim.x) {
        float sum = 0.0f;
        for (int rank = 0; rank < p.parts; ++rank) sum += s.inbox[rank * 3 * p.width + i];
        s.sums[i] = sum;
    }
    __syncthreads();
}

// Group sums by teams; dshift.
__device__ inline void finish_groups(const NormBackwardJob& job, const NormTile& tile, int images,
                                     const Shared& s) {
    const NormPlan& p = job.plan;
    const int lane = threadIdx.x % kTeam, team = threadIdx.x / kTeam, teams = blockDim.x / kTeam;
    const int groups = p.width / p.group, channels = p.images * p.width;
    for (int image = 0; image < images; ++image)
        for (int g = team; g < groups; g += teams) {
            const float rstd = job.a.rstd[(tile.image + image) * job.a.groups + tile.channel / p.group + g];
            const float* gamma = job.a.gamma + tile.channel + g * p.group;
            float *u = s.sums + image * p.width + g * p.group, *uh = u + channels, *d = uh + channels;
            float first = 0.0f, second = 0.0f;
            for (int i = lane; i < p.group; i += kTeam) {
                uh[i] *= rstd;
                first = __fmaf_rn(gamma[i], u[i], first);
                second = __fmaf_rn(gamma[i], uh[i], second);
            }
            first = rstd * (team_sum(first) * p.inverse_count);
            second = rstd * rstd * (team_sum(second) * p.inverse_count);
            for (int i = lane; i < p.group / 4; i += kTeam)
                s.group[(image * p.width + g * p.group) / 4 + i] = make_float2(first, second);
            if (job.a.dshift == nullptr || tile.rank != 0) continue;
            float* to = job.a.dshift + (tile.image + image) * job.a.c + tile.channel + g * p.group;
            for (int i = lane; i < p.group; i += kTeam)
                to[i] =
                    __fmaf_rn(gamma[i] * rstd, u[i], -static_cast<float>(p.pixels) * first) - second * d[i];
        }
}

// What the tile's images give dgamma and dbeta.
__device__ inline void store_partials(const NormBackwardJob& job, const NormTile& tile, int images,
                                      const Shared& s) {
    const NormPlan& p = job.plan;
    if (job.partial == nullptr || tile.rank != 0) return;
    float* to = job.partial + tile.image / p.images * job.a.c + tile.channel;
    for (int i = threadIdx.x; i < p.width; i += blockDim.x) {
        float gamma = 0.0f, beta = 0.0f;
        for (int image = 0; image < images; ++image) {
            beta += s.sums[image * p.width + i];
            gamma += s.sums[(p.images + image) * p.width + i];
        }
        to[i] = gamma;
        to[p.blocks * job.a.c + i] = beta;
    }
}

template <bool kSilu>
__device__ inline void store_gradient(const NormBackwardJob& job, const NormTile& tile, const NormThread& t,
                                      const Channels& c, const Shared& s) {
    const NormPlan& p = job.plan;
    const int first = (t.image * p.part + t.row) * p.chunks + t.vector, step = p.rows * p.chunks;
    const uint4 *from_x = s.x + first, *from_g = s.g + first;
    const int64_t image = tile.image + t.image, pixel = tile.first_pixel + t.row;
    const int channel = tile.channel + 8 * t.vector;
    const auto* add = static_cast<const __nv_bfloat16*>(job.a.add) + image * job.a.add_image +
                      pixel * job.a.add_pixel + channel;
    auto* to =
        static_cast<__nv_bfloat16*>(job.a.dx) + image * job.a.dx_image + pixel * job.a.dx_pixel + channel;
    const int64_t add_stride = p.rows * job.a.add_pixel, to_stride = p.rows * job.a.dx_pixel;
    const bool adds = job.a.add != nullptr;
    float2 less[2];
#pragma unroll
    for (int u = 0; u < 2; ++u) less[u] = s.group[t.image * p.width / 4 + 2 * t.vector + u];
#pragma unroll 1
    for (int at = t.row; at < tile.count; at += p.rows, from_x += step, from_g += step) {
        uint4 more{};
        if (adds) more = *reinterpret_cast<const uint4*>(add);
        float x[8], g[8], extra[8];
        unpack_chunk(*from_x, x);
        unpack_chunk(*from_g, g);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float d = x[i] - c.mean[i / 4];
            const float u = activation_gradient<kSilu>(g[i], __fmaf_rn(d, c.scale[i], c.shift[i]));
            x[i] = __fmaf_rn(u, c.scale[i], __fmaf_rn(d, -less[i / 4].y, -less[i / 4].x));
        }
        unpack_chunk(more, extra);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] += extra[i];
        *reinterpret_cast<uint4*>(to) = pack_chunk(x);
        add += add_stride, to += to_stride;
    }
}

template <bool kSilu>
__global__ void __launch_bounds__(kNormThreads, 3)
    norm_backward_kernel(const __grid_constant__ NormBackwardJob job) {
    extern __shared__ uint4 memory[];
    const NormPlan& p = job.plan;
    const Shared s(p, memory);
    const NormTile tile(p);
    if (tile.image >= job.a.n) return;  // the whole cluster
    const int images = images_here(p, tile, job.a.n);
    const NormThread t(p.chunks, p.by_chunks, p.rows, p.by_rows, images);
    if (p.parts > 1) open_inbox(s.barrier, p.parts * 3 * p.width * static_cast<int>(sizeof(float)));
    wait_for_previous();
    if (t.image >= 0) {
        fetch(job.a.x, job.a.x_image, job.a.x_pixel, p, tile, t, s.x);
        fetch(job.a.g, job.a.g_image, job.a.g_pixel, p, tile, t, s.g);
    }
    const Channels c(job, tile, t);
    wait_chunks();
    float sums[3][8] = {};
    if (t.image >= 0) add_pixels<kSilu>(p, tile, t, c, s, sums);
    add_threads(p, tile, t, images, sums, s);
    finish_groups(job, tile, images, s);
    __syncthreads();
    store_partials(job, tile, images, s);
    if (t.image >= 0) store_gradient<kSilu>(job, tile, t, c, s);
}

}  // namespace

fp4bf16_status norm_backward(const NormBackwardJob& job, cudaStream_t stream) {
    const Shared s(job.plan, nullptr);
    const auto bytes = reinterpret_cast<intptr_t>(s.end());
    FP4BF16_TRY(job.a.activation == FP4BF16_SILU
                    ? norm_launch<norm_backward_kernel<true>>(job, bytes, stream)
                    : norm_launch<norm_backward_kernel<false>>(job, bytes, stream));
    if (job.partial == nullptr) return FP4BF16_OK;
    return norm_add_partials(job.partial, job.plan.blocks, job.a.c, job.a.dgamma, job.a.dbeta, stream);
}

}  // namespace fp4bf16
