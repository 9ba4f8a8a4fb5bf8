// Gradient of group normalisation by slabs, see norm_slab.cuh; formulas in norm_backward.cu. A lane keeps its
// elements of x and u = g * activation'(z), so that nothing is read or computed twice.
#include "norm_slab.cuh"

namespace fp4bf16 {
namespace {

// Sums of channels: of u, u * d, d.
struct Memory {
    float warps[kSlabWarps<4>][3][kSlab];  // of each warp
    float inbox[kTeam][3][kSlab];          // of each thread block of the cluster
    uint64_t barrier;                      // of the inbox
};

// The eight channels of a lane, and the one that it finishes: 8 * chunk + row.
struct Channels {
    float scale[8], shift[8], mean[2], rstd[2], gamma;

    __device__ Channels(const NormSlabBackwardJob& job, const SlabPlace& p) {
        const int channel = (p.here ? p.channel : 0) + 8 * p.chunk;
        const int64_t groups = p.image * job.a.groups;
#pragma unroll
        for (int u = 0; u < 2; ++u) {
            const int64_t at = groups + (channel + 4 * u >> job.slabs.group_shift);
            mean[u] = job.a.mean[at], rstd[u] = job.a.rstd[at];
            const float4 a = *reinterpret_cast<const float4*>(job.a.gamma + channel + 4 * u);
            const float4 b = *reinterpret_cast<const float4*>(job.a.beta + channel + 4 * u);
            scale[4 * u] = a.x, scale[4 * u + 1] = a.y, scale[4 * u + 2] = a.z, scale[4 * u + 3] = a.w;
            shift[4 * u] = b.x, shift[4 * u + 1] = b.y, shift[4 * u + 2] = b.z, shift[4 * u + 3] = b.w;
        }
        gamma = job.a.gamma[channel + p.row];
    }

    // Once all is there.
    __device__ void scale_by_rstd() {
#pragma unroll
        for (int i = 0; i < 8; ++i) scale[i] *= rstd[i / 4];
    }
};

// All loads at once; a chunk past the last pixel stays as it is.
template <int kChunks>
__device__ inline void load_slab(const void* source, int64_t image_stride, int64_t pixel_stride,
                                 const SlabPlace& p, uint4 (&x)[kChunks]) {
    const auto* from =
        reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(source) + p.image * image_stride +
                                       p.first * pixel_stride + p.channel + 8 * p.chunk);
#pragma unroll
    for (int k = 0; k < kChunks; ++k)
        if (p.row + k * kSlabRows < p.left) x[k] = load_chunk(from + k * pixel_stride);
}

// u of a lane's chunk, and what it adds to the sums of u and u * d.
template <bool kSilu>
__device__ inline void add_chunk(const uint4& x_chunk, const uint4& g_chunk, const Channels& c, float (&u)[8],
                                 float (&sums)[2][8]) {
    float x[8];
    unpack_chunk(x_chunk, x);
    unpack_chunk(g_chunk, u);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float d = x[i] - c.mean[i / 4];
        u[i] = activation_gradient<kSilu>(u[i], __fmaf_rn(d, c.scale[i], c.shift[i]));
        sums[0][i] += u[i];
        sums[1][i] = __fmaf_rn(u[i], d, sums[1][i]);
    }
}

// Over the warp's rows, of eight numbers: lane row r gets the sum of number r. Each step keeps one half and
// gives the other to the lane that keeps it.
__device__ inline float scattered_sum(float (&v)[8], int lane) {
#pragma unroll
    for (int half = 4; half > 0; half /= 2) {
        const bool upper = (lane & half * kSlabChunks) != 0;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float given = upper ? v[i] : v[i + half], kept = upper ? v[i + half] : v[i];
            v[i] = kept + __shfl_xor_sync(0xFFFFFFFFu, given, half * kSlabChunks);
        }
    }
    return v[0];
}

// The warp's sum of d of the lane's channel; by itself, since registers run out beside the other sums.
template <int kChunks>
__device__ inline float distance_sum(const SlabPlace& p, const Channels& c, const uint4 (&chunks)[kChunks]) {
    float sums[8] = {};
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        if (p.row + k * kSlabRows >= p.left) break;
        float x[8];
        unpack_chunk(chunks[k], x);
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[i] += x[i] - c.mean[i / 4];
    }
    return scattered_sum(sums, p.lane);
}

// Over the channels of a group: lane row r of chunk q has channel 8 q + r.
__device__ inline float group_sum(float v, int group_shift) {
    v += __shfl_xor_sync(0xFFFFFFFFu, v, 4);
    v += __shfl_xor_sync(0xFFFFFFFFu, v, 8);
    if (group_shift > 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, 16);
    if (group_shift > 3) v += __shfl_xor_sync(0xFFFFFFFFu, v, 1);
    if (group_shift > 4) v += __shfl_xor_sync(0xFFFFFFFFu, v, 2);
    return v;
}

// Sums of the lane's channel over the whole image, from those over its warp's pixels.
__device__ inline void image_sums(const NormSlabs& s, const SlabPlace& p, Memory& memory, float (&sums)[3]) {
    const int channel = 8 * p.chunk + p.row;
    if (s.warps == 1 && s.parts == 1) return;
#pragma unroll
    for (int k = 0; k < 3; ++k) memory.warps[p.own][k][channel] = sums[k];
    __syncthreads();
    const auto* team = memory.warps + (p.own - p.warp);
    if (s.parts == 1) {
        for (float& sum : sums) sum = 0.0f;
#pragma unroll 2
        for (int warp = 0; warp < s.warps; ++warp)
#pragma unroll
            for (int k = 0; k < 3; ++k) sums[k] += team[warp][k][channel];
        return;
    }
    wait_for_inboxes();
#pragma unroll 1
    for (int k = p.warp; k < 3; k += s.warps) {
        float sum = 0.0f;
#pragma unroll 1
        for (int warp = 0; warp < s.warps; ++warp) sum += team[warp][k][p.lane];
#pragma unroll 1
        for (int rank = 0; rank < s.parts; ++rank)
            send(&memory.inbox[p.rank][k][p.lane], &memory.barrier, rank, sum);
    }
    wait_for_inbox(&memory.barrier);
    for (float& sum : sums) sum = 0.0f;
#pragma unroll 1
    for (int rank = 0; rank < s.parts; ++rank)
#pragma unroll
        for (int k = 0; k < 3; ++k) sums[k] += memory.inbox[rank][k][channel];
}

// dshift and the image's part of dgamma and dbeta; what is subtracted from the gradients of the lane's units:
// rstd * mean(u gamma), and a factor of d.
__device__ inline void finish_channel(const NormSlabBackwardJob& job, const SlabPlace& p, const Channels& c,
                                      const float (&sums)[3], float2 (&less)[2]) {
    const NormSlabs& s = job.slabs;
    const float rstd = p.row < 4 ? c.rstd[0] : c.rstd[1], uh = sums[1] * rstd;
    const float first = rstd * (group_sum(c.gamma * sums[0], s.group_shift) * s.inverse_count);
    const float second = rstd * rstd * (group_sum(c.gamma * uh, s.group_shift) * s.inverse_count);
    less[0] = less[1] = make_float2(first, second);
    if (s.group_shift == 2) {  // the lane's units are two groups, its rows' halves
        const float other_first = __shfl_xor_sync(0xFFFFFFFFu, first, 16);
        const float other_second = __shfl_xor_sync(0xFFFFFFFFu, second, 16);
        if (p.row < 4)
            less[1] = make_float2(other_first, other_second);
        else
            less[0] = make_float2(other_first, other_second);
    }
    if (p.warp != 0 || p.rank != 0 || !p.here) return;
    const int64_t at = p.image * job.a.c + p.channel + 8 * p.chunk + p.row;
    if (job.partial != nullptr) job.partial[at] = uh, job.partial[job.a.n * job.a.c + at] = sums[0];
    if (job.a.dshift == nullptr) return;
    const float before = __fmaf_rn(c.gamma * rstd, sums[0], -static_cast<float>(s.pixels) * first);
    job.a.dshift[at] = before - second * sums[2];
}

template <int kChunks>
__device__ inline void store_gradient(const NormSlabBackwardJob& job, const SlabPlace& p, const Channels& c,
                                      const float2 (&less)[2], const uint4 (&x_chunks)[kChunks],
                                      const float (&u)[kChunks][8], const uint4 (&add)[kChunks]) {
    auto* to = static_cast<__nv_bfloat16*>(job.a.dx) + p.image * job.a.dx_image + p.first * job.a.dx_pixel +
               p.channel + 8 * p.chunk;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        if (p.row + k * kSlabRows >= p.left) break;
        float x[8], extra[8];
        unpack_chunk(x_chunks[k], x);
        unpack_chunk(add[k], extra);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float d = x[i] - c.mean[i / 4];
            x[i] = __fmaf_rn(u[k][i], c.scale[i], __fmaf_rn(d, -less[i / 4].y, -less[i / 4].x)) + extra[i];
        }
        *reinterpret_cast<uint4*>(to + k * kSlabRows * job.a.dx_pixel) = pack_chunk(x);
    }
}

template <bool kSilu, int kChunks>
__global__ void __launch_bounds__(32 * kSlabWarps<kChunks>, kChunks == 2 ? 5 : 2)
    norm_slab_backward_kernel(const __grid_constant__ NormSlabBackwardJob job) {
    extern __shared__ uint4 shared[];
    auto& memory = *reinterpret_cast<Memory*>(shared);
    const SlabPlace p(job.slabs, kChunks);
    if (p.image >= job.a.n) return;  // the whole cluster
    if (job.slabs.parts > 1)
        open_inbox(&memory.barrier, job.slabs.parts * static_cast<int>(sizeof memory.inbox[0]));
    wait_for_previous();
    uint4 x[kChunks], g[kChunks], add[kChunks] = {};
    load_slab(job.a.x, job.a.x_image, job.a.x_pixel, p, x);
    load_slab(job.a.g, job.a.g_image, job.a.g_pixel, p, g);
    Channels c(job, p);
    c.scale_by_rstd();
    float u[kChunks][8], by_channel[2][8] = {}, sums[3] = {};
#pragma unroll
    for (int k = 0; k < kChunks; ++k)
        if (p.row + k * kSlabRows < p.left) add_chunk<kSilu>(x[k], g[k], c, u[k], by_channel);
#pragma unroll
    for (int k = 0; k < 2; ++k) sums[k] = scattered_sum(by_channel[k], p.lane);
    if (job.a.dshift != nullptr) sums[2] = distance_sum(p, c, x);
    if (job.a.add != nullptr) load_slab(job.a.add, job.a.add_image, job.a.add_pixel, p, add);
    image_sums(job.slabs, p, memory, sums);
    float2 less[2];
    finish_channel(job, p, c, sums, less);
    store_gradient(job, p, c, less, x, u, add);
}

template <int kChunks>
fp4bf16_status launch(const NormSlabBackwardJob& job, cudaStream_t stream) {
    return job.a.activation == FP4BF16_SILU
               ? slab_launch<norm_slab_backward_kernel<true, kChunks>>(job, sizeof(Memory), stream)
               : slab_launch<norm_slab_backward_kernel<false, kChunks>>(job, sizeof(Memory), stream);
}

}  // namespace

fp4bf16_status norm_slab_backward(const NormSlabBackwardJob& job, cudaStream_t stream) {
    FP4BF16_TRY(job.slabs.chunks == 2 ? launch<2>(job, stream) : launch<4>(job, stream));
    if (job.partial == nullptr) return FP4BF16_OK;
    return norm_add_partials(job.partial, job.a.n, job.a.c, job.a.dgamma, job.a.dbeta, stream);
}

}  // namespace fp4bf16
