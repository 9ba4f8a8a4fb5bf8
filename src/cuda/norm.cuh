// Group normalisation: how pictures are cut into tiles, and what the forward and the backward kernels share.
//
// A thread block holds a tile in shared memory: `width` channels (whole groups) of a part of one image's
// pixels, or of several small images. The parts of an image are a cluster, whose thread blocks read one
// another's sums. So x is read from device memory once, and no sum depends on timing.
#pragma once

#include <cuda_bf16.h>

#include "common.h"
#include "elementwise.cuh"
#include "fp4.cuh"
#include "ptx.cuh"

namespace fp4bf16 {

constexpr int kNormThreads = 256;  // most threads of a thread block
constexpr int kTeam = 8;           // threads that add up a group; most parts of an image, too

// A thread takes one chunk of 8 channels (16 bytes) of every `rows`-th pixel of one image of the tile.
// Thread t: chunk t % chunks, row t / chunks % rows, image t / chunks / rows.
struct NormPlan {
    int pixels, width, chunks, group;  // group: channels of one, a multiple of 4
    int images, part, parts, rows;     // part: pixels of a thread block; parts: thread blocks of a cluster
    int tiles, threads, swizzle;       // tiles: c / width
    int64_t blocks;                    // ceil(n / images)
    uint32_t by_chunks, by_rows, by_pairs, by_double_rows, by_units;  // see `divided`; units of a group
};

// Fails (false) where the tiles' kernels do not take the shape. align: channels that a thread takes at once;
// bytes: of all that is held of an element; per_thread: elements of a tile a thread.
struct NormShape {
    int64_t n, pixels, c, groups, align, bytes, per_thread;
    bool clusters;
};
bool norm_plan(const NormShape& shape, NormPlan* plan);

// ceil(2^20 / d): v * it / 2^20 is v / d rounded down, for v < 2048 and v * d < 2^20.
inline uint32_t reciprocal_of(int d) { return static_cast<uint32_t>((1 << 20) / d + ((1 << 20) % d != 0)); }

struct NormJob {
    fp4bf16_group_norm_args a;
    NormPlan plan;
};

struct NormBackwardJob {
    fp4bf16_group_norm_backward_args a;
    NormPlan plan;
    float* partial;  // (2, rows of partial sums, c): gradients in gamma, in beta
};

// norm_forward.cu, norm_backward.cu: tiles. norm_simple.cu: any shape, x is read several times.
fp4bf16_status norm_forward(const NormJob& job, cudaStream_t stream);
fp4bf16_status norm_backward(const NormBackwardJob& job, cudaStream_t stream);
fp4bf16_status norm_simple(const fp4bf16_group_norm_args& a, float* mean, float* rstd, cudaStream_t stream);
fp4bf16_status norm_backward_simple(const fp4bf16_group_norm_backward_args& a, float* workspace,
                                    cudaStream_t stream);
// dgamma and dbeta (c,) += the sums over `rows` rows of partial (2, rows, c).
fp4bf16_status norm_add_partials(const float* partial, int64_t rows, int64_t c, float* dgamma, float* dbeta,
                                 cudaStream_t stream);

// One launch, as clusters of plan.parts thread blocks.
template <typename Job>
fp4bf16_status norm_launch(void (*kernel)(Job), const Job& job, int64_t shared, cudaStream_t stream) {
    constexpr int64_t kMost = 65535;
    const NormPlan& p = job.plan;
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = static_cast<unsigned>(p.parts);
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t launch{};
    launch.gridDim.x = static_cast<unsigned>(p.tiles * p.parts);
    launch.gridDim.y = static_cast<unsigned>(p.blocks < kMost ? p.blocks : kMost);
    launch.gridDim.z = static_cast<unsigned>(ceil_div(p.blocks, kMost));
    launch.blockDim.x = static_cast<unsigned>(p.threads);
    launch.dynamicSmemBytes = static_cast<size_t>(shared);
    launch.stream = stream;
    launch.attrs = &cluster;
    launch.numAttrs = p.parts > 1 ? 1 : 0;
    FP4BF16_TRY(cuda_result(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
        "group_norm"));
    return cuda_result(cudaLaunchKernelEx(&launch, kernel, job), "group_norm");
}

// ---- clusters; before Hopper a plan has one part
__device__ inline void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    ptx::cluster_arrive();
#endif
}
__device__ inline void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    ptx::cluster_wait();
#endif
}
// What `here`, in shared memory, holds in thread block `rank` of the cluster.
__device__ inline float remote(const float* here, int rank) {
    float v = *here;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %1, %2;\n"
        "ld.shared::cluster.f32 %0, [there];\n"
        "}\n"
        : "=f"(v)
        : "r"(ptx::shared_address(here)), "r"(rank)
        : "memory");
#endif
    return v;
}

// ---- a thread's place
__device__ inline int divided(int v, uint32_t by) {
    return static_cast<int>(static_cast<uint32_t>(v) * by >> 20);
}

struct NormTile {
    int rank, first_pixel, count, channel;  // rank in the cluster; pixels here; first channel
    int64_t image;                          // first image

    __device__ explicit NormTile(const NormPlan& p) {
        const int tile = static_cast<int>(blockIdx.x) / p.parts;
        rank = static_cast<int>(blockIdx.x) - tile * p.parts;
        first_pixel = rank * p.part;
        count = max(0, min(p.part, p.pixels - first_pixel));
        channel = tile * p.width;
        image = (int64_t{blockIdx.z} * 65535 + blockIdx.y) * p.images;
    }
};

// Of a thread that takes vectors of channels, `vectors` a pixel; image: of the tile, -1: has nothing to do.
struct NormThread {
    int image, row, vector;

    __device__ NormThread(int vectors, uint32_t by_vectors, int rows, uint32_t by_rows, int images) {
        const int q = divided(threadIdx.x, by_vectors);
        vector = threadIdx.x - q * vectors;
        image = divided(q, by_rows);
        row = q - image * rows;
        if (image >= images) image = -1;
    }
};

// Images of the tile that there are.
__device__ inline int images_here(const NormPlan& p, const NormTile& tile, int64_t n) {
    return static_cast<int>(min(int64_t{p.images}, n - tile.image));
}

// Chunks are stored swizzled, so that neighbouring threads that each read two read from all banks.
__device__ inline int swizzled(int chunk, int swizzle) { return chunk ^ (chunk >> 3 & swizzle); }

__device__ inline void copy_chunk(uint4* to, const __nv_bfloat16* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(ptx::shared_address(to)), "l"(from)
                 : "memory");
}
__device__ inline void wait_chunks() {
    asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
}

// ---- numbers
__device__ inline float low_float(uint32_t w) { return __uint_as_float(w << 16); }
__device__ inline float high_float(uint32_t w) { return __uint_as_float(w & 0xFFFF0000u); }
__device__ inline uint32_t pack_bf16(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ inline void unpack_chunk(const uint4& v, float (&x)[8]) {
    x[0] = low_float(v.x), x[1] = high_float(v.x), x[2] = low_float(v.y), x[3] = high_float(v.y);
    x[4] = low_float(v.z), x[5] = high_float(v.z), x[6] = low_float(v.w), x[7] = high_float(v.w);
}
__device__ inline uint4 pack_chunk(const float (&x)[8]) {
    return make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
                      pack_bf16(x[6], x[7]));
}

// 1 / (1 + exp(-z)), relative error about that of ex2.approx and of z log2(e): 2^-22 + 2^-24 |z|. Under
// z = -87 it is zero, where exact values are under 2^-125.
__device__ inline float sigmoid(float z) {
    float e, inverse;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(z * -1.44269504f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + e));
    return inverse;
}

// Forward and backward compute z in the same steps; scale = gamma * rstd.
__device__ inline float affine(float x, float mean, float scale, float shift) {
    return __fmaf_rn(x - mean, scale, shift);
}

// ---- sums over the threads of a team, the same bits in each
__device__ inline uint32_t team_mask() { return 0xFFu << (threadIdx.x & 24); }

__device__ inline float team_sum(float v) {
#pragma unroll
    for (int step = 1; step < kTeam; step *= 2) v += __shfl_xor_sync(team_mask(), v, step);
    return v;
}

}  // namespace fp4bf16
