// Group normalisation by slabs: a team of warps holds 32 channels, whole groups, of one whole image in its
// registers, and its lanes add up by shuffles: no cluster, one barrier. For small images, whose time is the
// latency of one thread block's steps, and any whose slab fits.
//
// Lane l takes chunk l % 4, 8 channels, of every eighth pixel of its warp's from l / 4 on.
#pragma once

#include "launch.cuh"
#include "norm.cuh"

namespace fp4bf16 {

constexpr int kSlab = 32, kSlabChunks = 4, kSlabRows = 8;  // channels; chunks of a pixel; pixels at once

// Does not depend on n, so that an image gives the same bits in any batch.
struct NormSlabs {
    int pixels, slabs;    // slabs: c / 32
    int part, parts;      // pixels of a thread block; thread blocks of a slab, a cluster
    int parts_shift;      // parts = 2^parts_shift
    int chunks;           // of a lane: 2 or 4
    int warps, teams;     // of a team; of a thread block
    int group_shift;      // a group is 2^group_shift channels, 4 to 32
    float inverse_count;  // 1 / elements of a group
};

struct NormSlabJob {
    fp4bf16_group_norm_args a;
    NormSlabs slabs;
    float root;  // as NormJob's
};

struct NormSlabBackwardJob {
    fp4bf16_group_norm_backward_args a;
    NormSlabs slabs;
    float* partial;  // (2, n, c): gradients in gamma, in beta; NULL: not wanted
};

// most_parts: thread blocks of a cluster. False: not such a shape.
bool norm_slabs(int64_t n, int64_t pixels, int64_t c, int64_t groups, int most_parts, NormSlabs* slabs);

fp4bf16_status norm_slab_forward(NormSlabJob job, cudaStream_t stream);
fp4bf16_status norm_slab_backward(const NormSlabBackwardJob& job, cudaStream_t stream);

template <int kChunks>
constexpr int kSlabWarps = 2 * kChunks;  // most of a thread block

struct SlabPlace {
    int lane, row, chunk, warp;  // warp: of the team
    int own;                     // warp of the thread block
    int rank, channel;           // rank in the cluster; first channel
    int64_t image;
    bool here;  // false: a team without a slab, in a thread block that has others
    int first;  // first pixel of the lane, then every eighth
    int left;   // pixels of the warp

    __device__ SlabPlace(const NormSlabs& s, int chunks)
        : lane(threadIdx.x % 32),
          row(lane / kSlabChunks),
          chunk(lane % kSlabChunks),
          warp(threadIdx.x / 32),
          own(threadIdx.y * s.warps + warp),
          rank(blockIdx.x & (s.parts - 1)),
          image(int64_t{blockIdx.z} * 65535 + blockIdx.y) {
        const int slab = (blockIdx.x >> s.parts_shift) * s.teams + threadIdx.y;
        channel = slab * kSlab;
        here = slab < s.slabs;
        first = rank * s.part + warp * chunks * kSlabRows + row;
        left = here ? pixels_of(min(s.part, s.pixels - rank * s.part), warp, chunks) : 0;
    }

    // Of a warp, where the thread block has so many.
    __device__ static int pixels_of(int pixels, int warp, int chunks) {
        return max(0, min(kSlabRows * chunks, pixels - warp * chunks * kSlabRows));
    }
};

// A grid of thread blocks of teams of warps.
template <auto kKernel, typename Job>
fp4bf16_status slab_launch(const Job& job, size_t shared, cudaStream_t stream) {
    constexpr int64_t kMost = 65535;
    const NormSlabs& s = job.slabs;
    FP4BF16_TRY(norm_prepare<kKernel>());
    const dim3 grid(static_cast<unsigned>(ceil_div(s.slabs, s.teams) * s.parts),
                    static_cast<unsigned>(job.a.n < kMost ? job.a.n : kMost),
                    static_cast<unsigned>(ceil_div(job.a.n, kMost)));
    const dim3 block(static_cast<unsigned>(32 * s.warps), static_cast<unsigned>(s.teams));
    LaunchPlan plan(grid, block, shared, stream, s.parts > 1 ? static_cast<unsigned>(s.parts) : 0);
    return cuda_result(plan.launch(kKernel, job), "group_norm");
}

// ---- sums over lanes, the same bits in each
// Over the rows of a warp, and over `chunks` (1, 2 or 4) neighbouring lanes.
__device__ inline float rows_sum(float v, int chunks) {
#pragma unroll
    for (int step = kSlabChunks; step < 32; step *= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, step);
    if (chunks > 1) v += __shfl_xor_sync(0xFFFFFFFFu, v, 1);
    if (chunks > 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, 2);
    return v;
}

}  // namespace fp4bf16
