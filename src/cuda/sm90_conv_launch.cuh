// From checked arguments to a launch of one configuration of sm90_conv.cuh.
#pragma once

#include <atomic>

#include "sm90_conv.cuh"
#include "sm90_conv_host.h"

namespace fp4bf16 {

template <class C>
fp4bf16_status launch_conv(const ConvParams& params, cudaStream_t stream) {
    static std::atomic<int> known[64];  // clusters that a device holds at once
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = C::kCluster, cluster.val.clusterDim.y = 1, cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t launch{};
    launch.blockDim = dim3(C::kThreads);
    launch.dynamicSmemBytes = kConvSharedBytes<C>;
    launch.stream = stream;
    launch.attrs = &cluster;
    launch.numAttrs = 1;
    int device = 0, clusters = 0;
    FP4BF16_TRY(cuda_result(cudaGetDevice(&device), "conv2d"));
    if (device < 64) clusters = known[device].load();
    if (clusters == 0) {
        FP4BF16_TRY(
            cuda_result(cudaFuncSetAttribute(sm90_conv<C>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             kConvSharedBytes<C>),
                        "conv2d"));
        launch.gridDim = dim3(C::kCluster);
        FP4BF16_TRY(cuda_result(cudaOccupancyMaxActiveClusters(&clusters, sm90_conv<C>, &launch), "conv2d"));
        if (clusters < 1) clusters = 1;  // another process may hold part of the GPU: the grid then waits
        if (device < 64) known[device] = clusters;
    }
    if (params.schedule.total() < clusters) clusters = params.schedule.total();
    launch.gridDim = dim3(static_cast<unsigned>(C::kCluster * clusters));
    const cudaError_t error = cudaLaunchKernelEx(&launch, sm90_conv<C>, params);
    return cuda_result(error != cudaSuccess ? error : cudaGetLastError(), "conv2d");
}

template <class C>
constexpr ConvConfig describe_conv(const char* name) {
    static_assert(kConvSharedBytes<C> <= 227 * 1024, "a block has 227 KiB of shared memory");
    return {name, C::kTileM, C::kTileN, C::kClusterM, C::kClusterN, C::kPromote, C::kBN, launch_conv<C>};
}

}  // namespace fp4bf16
