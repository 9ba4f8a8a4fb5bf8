// Group normalisation by slabs, see norm_slab.cuh: statistics, activation, BF16 and FP4 results.
#include "norm_slab.cuh"
#include "norm_results.cuh"

namespace fp4bf16 {
namespace {

// Of 16 channels.
struct alignas(16) Half {
    float scale[16], shift[16];  // see `result`
    float mean[4];               // of each unit: what is subtracted
};

template <int kChunks, bool kFp4>
struct Memory {
    static constexpr int kWarps = kSlabWarps<kChunks>;
    uint4 tile[kFp4 ? kWarps : 1][kFp4 ? kChunks * 32 : 1];  // swizzled; a warp reads what it wrote itself
    Half half[kWarps][2];
    float2 partial[kWarps][kSlab / 4];  // a warp's moments, of each unit's group
    uint2 extremes[kWarps];             // bits of the largest |gamma| and |beta|
};

// The quantiser's table, which nothing writes, towards the multiprocessor in time for its first use.
__device__ inline void prefetch_pairs() {
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    if (thread < 128) asm volatile("prefetch.global.L1 [%0];" ::"l"(&kPairs.entry[thread]));
}

// The lane's first chunk. Pinned to where it is computed, before the wait for the kernel before this one.
__device__ inline const uint4* first_chunk(const NormSlabJob& job, const SlabPlace& p) {
    const auto* x = static_cast<const __nv_bfloat16*>(job.a.x) + p.image * job.a.x_image +
                    p.first * job.a.x_pixel + p.channel + 8 * p.chunk;
    asm volatile("" : "+l"(x));
    return reinterpret_cast<const uint4*>(x);
}

// All loads at once; a chunk past the last pixel stays as it is.
template <int kChunks>
__device__ inline void load_slab(const uint4* from, int64_t x_pixel, const SlabPlace& p,
                                 uint4 (&x)[kChunks]) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k)
        if (p.row + k * kSlabRows < p.left) x[k] = load_chunk(from + k * x_pixel);
}

// Largest bits of |gamma| and |beta|, of what each warp takes, for `outer_of_block`. Four loads of each at
// once: one step for up to 512 channels in a thread block of four warps.
__device__ inline uint2 extremes_of_warp(const fp4bf16_group_norm_args& a) {
    const int c = static_cast<int>(a.c), threads = blockDim.x * blockDim.y;
    int first = threadIdx.y * blockDim.x + threadIdx.x;
    uint2 most = make_uint2(0, 0);
#pragma unroll 1
    do {
        float gamma[4] = {}, beta[4] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (first + i * threads < c)
                gamma[i] = a.gamma[first + i * threads], beta[i] = a.beta[first + i * threads];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            most.x = max(most.x, float_bits(gamma[i]) & 0x7FFFFFFF);
            most.y = max(most.y, float_bits(beta[i]) & 0x7FFFFFFF);
        }
        first += 4 * threads;
    } while (first < c);
    return make_uint2(__reduce_max_sync(0xFFFFFFFFu, most.x), __reduce_max_sync(0xFFFFFFFFu, most.y));
}

__device__ inline Outer outer_of_block(const uint2* extremes, int lane, float root) {
    uint2 most = make_uint2(0, 0);
    if (lane < static_cast<int>(blockDim.x * blockDim.y) / 32) most = extremes[lane];
    return outer_of(__reduce_max_sync(0xFFFFFFFFu, most.x), __reduce_max_sync(0xFFFFFFFFu, most.y), root);
}

// Moments of a lane's two units, or of both in the first where they belong to one group; pixels > 0.
template <int kChunks>
__device__ inline void lane_moments(const SlabPlace& p, const uint4 (&x)[kChunks], int pixels, bool one,
                                    float2 (&m)[2]) {
    UnitSums sums;
    sums.start(x[0]);
#pragma unroll
    for (int k = 0; k < kChunks; ++k)
        if (p.row + k * kSlabRows < p.left) sums.add(x[k]);
    const float inverse = inverse_of(4.0f * static_cast<float>(pixels));
#pragma unroll
    for (int u = 0; u < 2; ++u) {
        const float mean = sums.sum[u] * inverse;
        m[u] = make_float2(sums.first[u] + mean, fmaxf(sums.square[u] - sums.sum[u] * mean, 0.0f));
    }
    if (!one) return;
    const float apart = m[1].x - m[0].x;
    m[0] = make_float2(__fmaf_rn(apart, 0.5f, m[0].x),
                       __fmaf_rn(2.0f * static_cast<float>(pixels) * apart, apart, m[0].y + m[1].y));
}

// Moments of the numbers that rows_sum adds: weight, moments, and one of the means. Equal means stay.
__device__ inline float2 moments_of_rows(float weight, float2 m, float one_mean, float inverse_weight,
                                         int chunks) {
    const float sum = __fmaf_rn(weight, m.x - one_mean, 0.0f);
    const float mean = __fmaf_rn(rows_sum(sum, chunks), inverse_weight, one_mean), d = m.x - mean;
    return make_float2(mean, rows_sum(__fmaf_rn(weight * d, d, m.y), chunks));
}

// A warp's moments of each unit of the lane's chunk, the same in all lanes of a group.
template <int kChunks>
__device__ inline void warp_moments(const NormSlabs& s, const SlabPlace& p, const uint4 (&x)[kChunks],
                                    float2 (&m)[2]) {
    const bool one = s.group_shift > 2;
    const int chunks = one ? 1 << (s.group_shift - 3) : 1, units = one ? 1 : 2;
    const int pixels = max(0, p.left - p.row + kSlabRows - 1) / kSlabRows;
    m[0] = m[1] = make_float2(0.0f, 0.0f);
    if (pixels > 0) lane_moments(p, x, pixels, one, m);
    const auto weight = static_cast<float>(pixels * (one ? 8 : 4));
    const float inverse = inverse_of(static_cast<float>(max(p.left, 1) << s.group_shift));
#pragma unroll
    for (int u = 0; u < 2; ++u) {
        if (u == units) break;
        const float first = __shfl_sync(0xFFFFFFFFu, m[u].x, p.lane & (kSlabChunks - chunks));
        m[u] = moments_of_rows(weight, m[u], first, inverse, chunks);
    }
    if (one) m[1] = m[0];
}

// The image's moments from the team's warps': lane row r takes those of warp r.
template <int kChunks>
__device__ inline void team_moments(const NormSlabs& s, const SlabPlace& p,
                                    const float2 (*partial)[kSlab / 4], float2 (&m)[2]) {
    static_assert(kSlabWarps<kChunks> <= kSlabRows, "a lane takes one warp's moments");
    const bool one = s.group_shift > 2;
    const auto weight = static_cast<float>(SlabPlace::pixels_of(s.pixels, p.row, kChunks) << s.group_shift);
#pragma unroll
    for (int u = 0; u < 2; ++u) {
        if (u == 1 && one) break;
        const float2 of = weight > 0.0f ? partial[p.row][2 * p.chunk + u] : float2{};
        m[u] = moments_of_rows(weight, of, partial[0][2 * p.chunk + u].x, s.inverse_count, 1);
    }
    if (one) m[1] = m[0];
}

// Scale and shift of channel 8 * chunk + row, from its unit's moments; see norm_forward.cu.
template <bool kSilu>
__device__ inline void finish_channel(const NormSlabJob& job, const SlabPlace& p, const float2& m,
                                      float gamma, float beta, Half* halves) {
    const NormSlabs& s = job.slabs;
    const int channel = 8 * p.chunk + p.row;
    const float rstd = rsqrtf(__fmaf_rn(m.y, s.inverse_count, job.a.eps));
    const float subtracted = fabsf(m.x * rstd) <= 64.0f ? 0.0f : m.x, factor = kSilu ? -kLog2E : 1.0f;
    const float slope = gamma * (factor * rstd);
    Half& h = halves[p.chunk / 2];
    const int i = channel % 16;
    h.scale[i] = slope;
    h.shift[i] = __fmaf_rn(subtracted - m.x, slope, factor * beta);
    if (i % 4 == 0) h.mean[i / 4] = subtracted;
    if (p.warp != 0 || !p.here || (channel & ((1 << s.group_shift) - 1)) != 0) return;
    const int64_t out = p.image * job.a.groups + ((p.channel + channel) >> s.group_shift);
    if (job.a.mean != nullptr) job.a.mean[out] = m.x;
    if (job.a.rstd != nullptr) job.a.rstd[out] = rstd;
}

template <bool kSilu, int kChunks>
__device__ inline void store_bf16(const NormSlabJob& job, const SlabPlace& p, const uint4 (&chunks)[kChunks],
                                  const Half& h) {
    auto* to = static_cast<__nv_bfloat16*>(job.a.y) + p.image * job.a.y_image + p.first * job.a.y_pixel +
               p.channel + 8 * p.chunk;
    const int side = p.chunk % 2;
    const float2 middle = make_float2(h.mean[2 * side], h.mean[2 * side + 1]);
    float a[8], b[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i] = h.scale[8 * side + i], b[i] = h.shift[8 * side + i];
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
        if (p.row + k * kSlabRows >= p.left) break;
        float x[8];
        unpack_chunk(chunks[k], x);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = result<kSilu, true>(x[i], i < 4 ? middle.x : middle.y, a[i], b[i]);
        *reinterpret_cast<uint4*>(to + k * kSlabRows * job.a.y_pixel) = pack_chunk(x);
    }
}

// A lane takes 16 channels, two chunks of the tile, of every sixteenth pixel.
template <bool kSilu, bool kNorms>
__device__ inline void store_fp4(const NormSlabJob& job, const SlabPlace& p, const uint4* tile,
                                 const Outer& o, const Half& h, BlockNorms* norms) {
    const int half = p.lane % 2, row = p.lane / 2, first = 2 * p.lane;
    const int count = max(0, p.left - row + 15) / 16;
    BlockRun run(job.a, p.image, p.first - p.row + row, 16, p.channel / 16 + half);
    run.from = tile + swizzled(first, 1), run.high = (first >> 3 & 1) != 0 ? -1 : 1;
    run.step = 16 * kSlabChunks;
    run.mean = reinterpret_cast<const float4*>(h.mean);
    run.scale = reinterpret_cast<const float4*>(h.scale);
    run.shift = reinterpret_cast<const float4*>(h.shift);
    run.count = count;
    const float4 m = *run.mean;
    const bool centred = m.x != 0.0f || m.y != 0.0f || m.z != 0.0f || m.w != 0.0f;
    store_blocks<kSilu, kNorms>(job.a, run, __any_sync(0xFFFFFFFFu, centred), o, norms);
}

// Thread blocks of a multiprocessor. With norms of FP4 results fewer: 64 registers would not hold all.
template <bool kNorms, int kChunks>
constexpr int kSlabBlocks = !kNorms ? 16 / kChunks : kChunks == 2 ? 5 : 3;

template <bool kSilu, bool kFp4, bool kCertify, int kChunks>
__global__ void __launch_bounds__(32 * kSlabWarps<kChunks>, kSlabBlocks<kFp4 && kCertify, kChunks>)
    norm_slab_kernel(const __grid_constant__ NormSlabJob job) {
    if (kCertify && skipped(job.a.run_if)) return;
    extern __shared__ uint4 memory[];
    auto& s = *reinterpret_cast<Memory<kChunks, kFp4>*>(memory);
    const SlabPlace p(job.slabs, kChunks);
    if (kFp4) prefetch_pairs();
    const uint4* from = first_chunk(job, p);
    wait_for_previous();
    if (p.image >= job.a.n) return;  // the whole thread block
    uint4 x[kChunks];
    load_slab(from, job.a.x_pixel, p, x);
    const int own_channel = (p.here ? p.channel : 0) + 8 * p.chunk + p.row;
    const float gamma = job.a.gamma[own_channel], beta = job.a.beta[own_channel];
    if constexpr (kFp4) {
        const uint2 most = extremes_of_warp(job.a);
        if (p.lane == 0) s.extremes[p.own] = most;
        uint4* to = s.tile[p.own] + swizzled(p.lane, 1);
#pragma unroll
        for (int k = 0; k < kChunks; ++k)
            if (p.row + k * kSlabRows < p.left) to[32 * k] = x[k];
    }
    float2 m[2];
    warp_moments(job.slabs, p, x, m);
    if (p.row == 0) s.partial[p.own][2 * p.chunk] = m[0], s.partial[p.own][2 * p.chunk + 1] = m[1];
    if (kFp4 || (kChunks > 2 && job.slabs.warps > 1)) __syncthreads();
    if (kChunks > 2 && job.slabs.warps > 1)
        team_moments<kChunks>(job.slabs, p, s.partial + (p.own - p.warp), m);
    finish_channel<kSilu>(job, p, p.row < 4 ? m[0] : m[1], gamma, beta, s.half[p.own]);
    __syncwarp();
    if constexpr (kFp4) {
        const Outer o = outer_of_block(s.extremes, p.lane, job.root);
        if (blockIdx.x == 0 && p.image == 0 && p.own == 0 && p.lane == 0) *job.a.outer_scale = o.decode;
        BlockNorms norms;
        store_fp4<kSilu, kCertify>(job, p, s.tile[p.own], o, s.half[p.own][p.lane % 2], &norms);
        if constexpr (kCertify) store_norms(job.a, norms, o.decode, memory, p.image * gridDim.x + blockIdx.x);
    } else {
        if (job.a.y != nullptr) store_bf16<kSilu>(job, p, x, s.half[p.own][p.chunk / 2]);
    }
}

template <bool kSilu, bool kFp4, int kChunks>
fp4bf16_status launch(const NormSlabJob& job, cudaStream_t stream) {
    constexpr size_t kShared = sizeof(Memory<kChunks, kFp4>);
    if (certifies(job.a))
        return slab_launch<norm_slab_kernel<kSilu, kFp4, true, kChunks>>(job, kShared, stream);
    return slab_launch<norm_slab_kernel<kSilu, kFp4, false, kChunks>>(job, kShared, stream);
}

template <int kChunks>
fp4bf16_status launch(const NormSlabJob& job, cudaStream_t stream) {
    const bool fp4 = job.a.expanded != nullptr || job.a.packed != nullptr;
    if (job.a.activation == FP4BF16_SILU)
        return fp4 ? launch<true, true, kChunks>(job, stream) : launch<true, false, kChunks>(job, stream);
    return fp4 ? launch<false, true, kChunks>(job, stream) : launch<false, false, kChunks>(job, stream);
}

}  // namespace

fp4bf16_status norm_slab_forward(NormSlabJob job, cudaStream_t stream) {
    job.root = root_up(int64_t{job.slabs.pixels} << job.slabs.group_shift);
    return job.slabs.chunks == 2 ? launch<2>(job, stream) : launch<4>(job, stream);
}

}  // namespace fp4bf16
