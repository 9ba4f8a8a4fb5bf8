// Launch of a persistent kernel of clusters: as many as the device holds at once, or as there is work for.
#pragma once

#include <atomic>

#include "launch.cuh"

namespace fp4bf16 {

// `kKernel` takes `params` by value; C tells threads and cluster.
template <class C, int kSharedBytes, auto kKernel, class Params>
fp4bf16_status launch_persistent(const char* op, const Params& params, int64_t units, cudaStream_t stream) {
    static std::atomic<int> known[64];  // clusters that a device holds at once; 0: not asked yet
    LaunchPlan plan(dim3(C::kCluster), dim3(C::kThreads), kSharedBytes, stream, C::kCluster);
    int device = 0, clusters = 0;
    FP4BF16_TRY(cuda_result(cudaGetDevice(&device), op));
    if (device < 64) clusters = known[device].load();
    if (clusters == 0) {
        FP4BF16_TRY(cuda_result(
            cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes), op));
        FP4BF16_TRY(cuda_result(cudaOccupancyMaxActiveClusters(&clusters, kKernel, &plan.config()), op));
        if (clusters < 1) clusters = 1;  // another process may hold part of the GPU: the grid then waits
        if (device < 64) known[device] = clusters;
    }
    if (units < clusters) clusters = static_cast<int>(units);
    plan.set_grid(dim3(static_cast<unsigned>(C::kCluster * clusters)));
    const cudaError_t error = plan.launch(kKernel, params);
    return cuda_result(error != cudaSuccess ? error : cudaGetLastError(), op);
}

}  // namespace fp4bf16
