// Whether kernels are launched to overlap: see launch.cuh.
#include "launch.cuh"

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace fp4bf16 {
namespace {

// Never launched: it tells which code of this library the device runs.
__global__ void probe_kernel() {}

bool wanted() {
    static const bool on = [] {
        const char* named = std::getenv("FP4BF16_PDL");
        return named == nullptr || std::strcmp(named, "0") != 0;
    }();
    return on;
}

// A library built for older GPUs alone runs on a new one, too, but its kernels do not wait.
bool waits(int device) {
    int major = 0;
    cudaFuncAttributes code{};
    return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
           major >= 9 && cudaFuncGetAttributes(&code, probe_kernel) == cudaSuccess && code.ptxVersion >= 90;
}

}  // namespace

bool launches_overlap() {
    constexpr int kKnown = 64;              // devices with a place in the table; others are asked each time
    static std::atomic<int> known[kKnown];  // 0: not asked yet, 1: no, 2: yes
    int device = 0;
    if (!wanted() || cudaGetDevice(&device) != cudaSuccess) return false;
    int answer = device < kKnown ? known[device].load(std::memory_order_relaxed) : 0;
    if (answer == 0) {
        answer = waits(device) ? 2 : 1;
        if (device < kKnown) known[device].store(answer, std::memory_order_relaxed);
    }
    return answer == 2;
}

}  // namespace fp4bf16
