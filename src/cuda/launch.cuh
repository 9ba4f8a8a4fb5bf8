// How every kernel here is launched, and what every kernel does first: programmatic dependent launch, so that
// on Hopper a kernel's launch and its first steps overlap the end of the one before, on a stream and in a
// captured graph alike.
//
// The rule: a kernel that is launched this way calls wait_for_previous() in every thread block before the
// first access to global memory, reads of weights included (an optimizer may have just written them) and
// writes, too (the kernel before may still read). Thread blocks that touch nothing may end without, if others
// of the grid wait. No kernel lets the next one start before its own blocks have ended (griddepcontrol.
// launch_dependents): blocks that wait on a busy multiprocessor made a network 1.5 % slower, this rule 0.2 to
// 0.8 % faster.
//
// Why the wait for one kernel is a wait for all before it: griddepcontrol.wait returns once "all prerequisite
// grids in flight have completed and all the memory operations from the prerequisite grids are performed and
// made visible to the current grid" (PTX ISA, griddepcontrol). The prerequisite is the kernel before alone.
// But that one does not complete until its own thread blocks have returned from their wait, and so on back.
// A kernel that never waits would break this chain, so none may be launched by the functions below.
//
// Other work on the stream: the overlap is with "the previous kernel in the stream, if that kernel requests
// the overlap" (cudaLaunchAttributeProgrammaticStreamSerialization, driver_types.h). A kernel of another
// library does not request it, copies and memsets are no kernels (in a graph,
// cudaGraphDependencyTypeProgrammatic "may only be used between kernel nodes"), and a kernel launched without
// the attribute depends on all of the stream's work: in each of these cases the dependency is the usual full
// one.
//
// One thread's wait makes the other kernels' writes visible to the whole grid, so that threads which a
// barrier orders behind it need none of their own.
#pragma once

#include <utility>

#include "common.h"

namespace fp4bf16 {

// launch.cu: whether kernels may overlap on the current device: from compute capability 9.0 on, where the
// kernels' code has the wait, unless FP4BF16_PDL is 0 in the environment at the first launch.
bool launches_overlap();

// What cudaLaunchKernelEx takes. cluster: thread blocks of one, along x; 0: none.
class LaunchPlan {
  public:
    LaunchPlan(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, unsigned cluster = 0) {
        config_.gridDim = grid, config_.blockDim = block;
        config_.dynamicSmemBytes = shared_bytes, config_.stream = stream;
        config_.attrs = attributes_;
        if (cluster > 0) {
            cudaLaunchAttribute& a = attributes_[config_.numAttrs++];
            a.id = cudaLaunchAttributeClusterDimension;
            a.val.clusterDim.x = cluster, a.val.clusterDim.y = a.val.clusterDim.z = 1;
        }
    }
    LaunchPlan(const LaunchPlan&) = delete;
    LaunchPlan& operator=(const LaunchPlan&) = delete;

    // For cudaOccupancyMaxActiveClusters and its like.
    const cudaLaunchConfig_t& config() const { return config_; }
    void set_grid(dim3 grid) { config_.gridDim = grid; }

    template <typename... Parameters, typename... Arguments>
    cudaError_t launch(void (*kernel)(Parameters...), Arguments&&... arguments) {
        if (launches_overlap()) {
            cudaLaunchAttribute& a = attributes_[config_.numAttrs++];
            a.id = cudaLaunchAttributeProgrammaticStreamSerialization;
            a.val.programmaticStreamSerializationAllowed = 1;
        }
        return cudaLaunchKernelEx(&config_, kernel, std::forward<Arguments>(arguments)...);
    }

  private:
    cudaLaunchConfig_t config_{};
    cudaLaunchAttribute attributes_[2] = {};
};

// In place of kernel<<<grid, block, shared_bytes, stream>>>(arguments...). As there, cudaGetLastError knows
// of a failure.
template <typename... Parameters, typename... Arguments>
void launch_kernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                   cudaStream_t stream, Arguments&&... arguments) {
    LaunchPlan(grid, block, shared_bytes, stream).launch(kernel, std::forward<Arguments>(arguments)...);
}

// The same in clusters of `cluster` thread blocks along x.
template <typename... Parameters, typename... Arguments>
void launch_clusters(unsigned cluster, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                     size_t shared_bytes, cudaStream_t stream, Arguments&&... arguments) {
    LaunchPlan(grid, block, shared_bytes, stream, cluster)
        .launch(kernel, std::forward<Arguments>(arguments)...);
}

// ---- in a kernel
// All that the kernels before wrote is there, and nothing that they read will be read again.
__device__ inline void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// First of all in a kernel whose arguments have a `run_if`: true where the launch shall do nothing. It is
// read once the kernels before have written it, past what L1 may hold, and is the same in every thread of the
// grid: all thread blocks of a cluster leave together, owing one another no arrival and no copy.
__device__ inline bool skipped(const int32_t* run_if) {
    if (run_if == nullptr) return false;
    wait_for_previous();
    return *static_cast<const volatile int32_t*>(run_if) == 0;
}

}  // namespace fp4bf16
