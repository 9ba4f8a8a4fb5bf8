// The kernel of one configuration of the convolution, and its launch.
#pragma once

#include "sm90_conv_host.h"
#include "sm90_conv_turns.cuh"
#include "sm90_launch.cuh"

namespace fp4bf16 {

template <class C>
constexpr int kConvSharedBytes = C::kSharedBytes + 8 * Turns::kCount;

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) sm90_conv(const __grid_constant__ ConvParams p) {
    if (skipped(p.run_if)) return;
    extern __shared__ uint8_t raw[];
    const SharedStages<C> shared(raw);
    uint64_t* const more = shared.empty + C::kStages;
    uint64_t* own_empty = more;  // staging memory beside the ring: its stores are done
    const Turns turns(more);     // in place of it
    const int rank = C::kCluster == 1 ? 0 : ptx::cluster_rank();
    const int cluster = blockIdx.x / C::kCluster, clusters = gridDim.x / C::kCluster;

    if (threadIdx.x == 0) {
        for (int i = 0; i < C::kStages; ++i) {
            ptx::barrier_init(&shared.full[i], 1);
            ptx::barrier_init(&shared.empty[i], (C::kInTurn ? 4 : 8) * C::kCluster);  // the consumer warps
        }
        if constexpr (C::kInTurn)
            turns.init();
        else
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
            if (p.staged)
                for (int i = 0; i < p.phases; ++i) ptx::prefetch_map(&p.d[i]);
            if (p.prefetched) ptx::prefetch_map(&p.residual_map);
            wait_for_previous();
            produce_conv<C>(p, shared, own_empty, cluster, clusters, rank);
        }
        if constexpr (C::kInTurn)
            if (p.staged && threadIdx.x / 32 == 1 && ptx::elect()) {
                wait_for_previous();
                grant_staging<C>(p, shared, turns, cluster, clusters, rank);
            }
        __syncwarp();
    } else {
        ptx::take_registers<232>();
        wait_for_previous();
        if constexpr (C::kInTurn)
            consume_in_turn<C>(p, shared, turns, cluster, clusters, rank);
        else
            consume_conv<C>(p, shared, clusters);
    }
    // No CTA leaves while another may still write to its shared memory or arrive at its barriers.
    if constexpr (C::kCluster > 1) ptx::cluster_arrive(), ptx::cluster_wait();
}

// ---- launch
template <class C>
fp4bf16_status launch_conv(const ConvParams& params, cudaStream_t stream) {
    return launch_persistent<C, kConvSharedBytes<C>, sm90_conv<C>>("conv2d", params, params.schedule.total(),
                                                                   stream);
}

template <class C>
constexpr ConvConfig describe_conv(const char* name) {
    static_assert(kConvSharedBytes<C> <= 227 * 1024, "a block has 227 KiB of shared memory");
    return {name,        C::kTileM, C::kTileN,  C::kClusterM,  C::kClusterN,
            C::kPromote, C::kBN,    C::kInTurn, launch_conv<C>};
}

}  // namespace fp4bf16
