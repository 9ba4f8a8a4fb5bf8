// Group normalisation: how pictures are cut into tiles, and what the forward and the backward kernels share.
//
// A thread block holds a tile in shared memory: `width` channels (whole groups) of a part of one image's
// pixels, or of several small images. The parts of an image are a cluster, whose thread blocks read one
// another's sums. So x is read from device memory once, and no sum depends on timing.
#pragma once

#include <atomic>
#include <cuda_bf16.h>

#include "common.h"
#include "elementwise.cuh"
#include "fp4.cuh"
#include "launch.cuh"
#include "ptx.cuh"

namespace fp4bf16 {

constexpr int kNormThreads = 256;  // most threads of a thread block
constexpr int kTeam = 8;           // threads that add up a group; most parts of an image, too

// A thread takes one chunk of 8 channels (16 bytes) of every `rows`-th pixel of one image of the tile.
// Thread t: chunk t % chunks, row t / chunks % rows, image t / chunks / rows.
struct NormPlan {
    int pixels, width, chunks, group;  // group: channels of one, a multiple of 4
    float inverse_count;               // 1 / elements of a group
    int images, part, parts, rows;     // part: pixels of a thread block; parts: thread blocks of a cluster
    int tiles, threads, swizzle;       // tiles: c / width
    int groups, parts_shift;           // groups of a tile; parts = 2^parts_shift
    int64_t blocks;                    // ceil(n / images)
    uint32_t by_chunks, by_rows, by_pairs, by_double_rows, by_units;  // see `divided`; units of a group
};

// Kernels are made twice: what certificates need (run_if, norms of FP4 results) costs the others nothing, not
// even another order of their instructions.
inline bool certifies(const fp4bf16_group_norm_args& a) { return a.norms != nullptr || a.run_if != nullptr; }

// Fails (false) where the tiles' kernels do not take the shape. align: channels that a thread takes at once;
// bytes: of all that is held of an element; per_thread: elements of a tile a thread.
struct NormShape {
    int64_t n, pixels, c, groups, align, bytes, per_thread;
    int64_t most_pixels;  // that a tile's width is chosen for
    bool clusters;
};
bool norm_plan(const NormShape& shape, NormPlan* plan);

// ceil(2^20 / d): v * it / 2^20 is v / d rounded down, for v < 2048 and v * d < 2^20.
inline uint32_t reciprocal_of(int d) { return static_cast<uint32_t>((1 << 20) / d + ((1 << 20) % d != 0)); }

struct NormJob {
    fp4bf16_group_norm_args a;
    NormPlan plan;
    float root;  // sqrt(elements of a group - 1), rounded up
    // Where things are in shared memory, in bytes: see norm_forward.cu.
    int scale, shift, mean, gamma, beta, partial, inbox, barrier, outer, shared;
};

struct NormBackwardJob {
    fp4bf16_group_norm_backward_args a;
    NormPlan plan;
    float* partial;  // (2, rows of partial sums, c): gradients in gamma, in beta
};

// norm_forward.cu, norm_backward.cu: tiles. norm_simple.cu: any shape, x is read several times.
fp4bf16_status norm_forward(NormJob job, cudaStream_t stream);
fp4bf16_status norm_backward(const NormBackwardJob& job, cudaStream_t stream);
fp4bf16_status norm_simple(const fp4bf16_group_norm_args& a, float* mean, float* rstd, cudaStream_t stream);
fp4bf16_status norm_backward_simple(const fp4bf16_group_norm_backward_args& a, float* workspace,
                                    cudaStream_t stream);
// dgamma and dbeta (c,) += the sums over `rows` rows of partial (2, rows, c).
fp4bf16_status norm_add_partials(const float* partial, int64_t rows, int64_t c, float* dgamma, float* dbeta,
                                 cudaStream_t stream);

// All of the shared memory that a device has, asked for once a kernel and device.
template <auto kKernel>
fp4bf16_status norm_prepare() {
    constexpr int kKnown = 64;  // devices with a place in the table
    static std::atomic<bool> known[kKnown];
    int device = 0, bytes = 0;
    FP4BF16_TRY(cuda_result(cudaGetDevice(&device), "group_norm"));
    if (device < kKnown && known[device].load(std::memory_order_relaxed)) return FP4BF16_OK;
    FP4BF16_TRY(cuda_result(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
                            "group_norm"));
    FP4BF16_TRY(cuda_result(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                            "group_norm"));
    FP4BF16_TRY(cuda_result(cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                                 cudaSharedmemCarveoutMaxShared),
                            "group_norm"));
    if (device < kKnown) known[device].store(true, std::memory_order_relaxed);
    return FP4BF16_OK;
}

// One launch, as clusters of plan.parts thread blocks.
template <auto kKernel, typename Job>
fp4bf16_status norm_launch(const Job& job, int64_t shared, cudaStream_t stream) {
    constexpr int64_t kMost = 65535;
    const NormPlan& p = job.plan;
    FP4BF16_TRY(norm_prepare<kKernel>());
    const dim3 grid(static_cast<unsigned>(p.tiles * p.parts),
                    static_cast<unsigned>(p.blocks < kMost ? p.blocks : kMost),
                    static_cast<unsigned>(ceil_div(p.blocks, kMost)));
    LaunchPlan plan(grid, dim3(static_cast<unsigned>(p.threads)), static_cast<size_t>(shared), stream,
                    p.parts > 1 ? static_cast<unsigned>(p.parts) : 0);
    return cuda_result(plan.launch(kKernel, job), "group_norm");
}

// ---- clusters: each thread block sends its sums to all, which wait for them at a barrier of their own. So
// none ends before all that is sent to it is there. Before Hopper a plan has one part.
// By all threads, at the start: `bytes` will come to this thread block.
__device__ inline void open_inbox(uint64_t* barrier, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
        ptx::barrier_init(barrier, 1);
        ptx::fence_barrier_init();
        ptx::barrier_arrive_expect_bytes(barrier, static_cast<uint32_t>(bytes));
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
// By all threads, before the first is sent: all inboxes are open.
__device__ inline void wait_for_inboxes() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    ptx::cluster_wait();
#endif
}
// v to where `here` is in thread block `rank` of the cluster.
__device__ inline void send(float* here, uint64_t* barrier, int rank, float v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .b32 there, their_barrier;\n"
        "mapa.shared::cluster.u32 there, %0, %2;\n"
        "mapa.shared::cluster.u32 their_barrier, %1, %2;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %3, [their_barrier];\n"
        "}\n" ::"r"(ptx::shared_address(here)),
        "r"(ptx::shared_address(barrier)), "r"(rank), "f"(v)
        : "memory");
#endif
}
__device__ inline void wait_for_inbox(uint64_t* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    ptx::barrier_wait(barrier, 0);
#endif
}

// ---- a thread's place
__device__ inline int divided(int v, uint32_t by) {
    return static_cast<int>(static_cast<uint32_t>(v) * by >> 20);
}

struct NormTile {
    int rank, first_pixel, count, channel;  // rank in the cluster; pixels here; first channel
    int64_t image;                          // first image

    __device__ explicit NormTile(const NormPlan& p) {
        const int tile = static_cast<int>(blockIdx.x) >> p.parts_shift;
        rank = static_cast<int>(blockIdx.x) & (p.parts - 1);
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

// Of what is read once, past the L1 cache.
__device__ inline uint4 load_chunk(const uint4* from) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}
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

// Approximations of one instruction, relative error about 2^-23; what is subnormal counts as zero.
__device__ inline float inverse_of(float v) {
    asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(v));
    return v;
}
__device__ inline float exp2_of(float v) {
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(v));
    return v;
}
constexpr float kLog2E = 1.44269504f;

// 1 / (1 + exp(-z)), relative error 2^-22 + 2^-24 |z|. Under z = -87 it is zero, where exact values are under
// 2^-125.
__device__ inline float sigmoid(float z) { return inverse_of(1.0f + exp2_of(z * -kLog2E)); }

// g * activation'(z): silu'(z) = s (1 + z (1 - s)), s = sigmoid(z).
template <bool kSilu>
__device__ inline float activation_gradient(float g, float z) {
    if (!kSilu) return g;
    const float s = sigmoid(z);
    return g * (s * __fmaf_rn(z, 1.0f - s, 1.0f));
}

// scale = gamma * rstd
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
