// Low-rank adapters beside the weights of a network: merged into them, and their gradients from those of the
// weights; one launch each for all layers. Memory bounds both: 8 and 8 bytes an element of the weights.
#include "lora.cuh"

#include <climits>

#include "launch.cuh"

namespace fp4bf16 {
namespace {

__global__ void __launch_bounds__(kLoraLanes) merge_kernel(const __grid_constant__ fp4bf16_lora_args a) {
    wait_for_previous();
    __shared__ double up[kMergeRows * kMergeRanks];
    const LoraLayer t(a, 0, blockIdx.x);
    Merge merge(a, t, threadIdx.x);
    for (int first = 0; a.adapters != nullptr && first < t.rank; first += kMergeRanks) {
        if (first > 0) __syncthreads();
        merge.stage(first, up);
        __syncthreads();
        merge.add(first, up);
    }
    merge.store();
}

__global__ void __launch_bounds__(kLoraLanes) gradient_kernel(const __grid_constant__ fp4bf16_lora_args a) {
    wait_for_previous();
    __shared__ double sums[kUpSums * kPitch];
    const LoraLayer t(a, 1, blockIdx.x);
    const int lane = threadIdx.x;
    if (t.unit < up_units(t.rows)) {
        const Up up{a, t, lane};
        for (int first = 0; first < t.rank; first += kRanks) {
            if (first > 0) __syncthreads();
            up.add(first, sums);
            __syncthreads();
            up.quarter(sums);
            __syncthreads();
            up.store(first, sums);
        }
        return;
    }
    const Down down{a, t, lane};
    for (int first = 0; first < t.rank; first += kRanks) {
        if (first > 0) __syncthreads();
        down.add(first, sums);
        __syncthreads();
        down.store(first, sums);
    }
}

// ---- checks
fp4bf16_status check(const char* op, const fp4bf16_lora_args& a) {
    FP4BF16_TRY(check_range(op, "layer_count", a.layer_count, 0, INT_MAX));
    FP4BF16_TRY(check_range(op, "units", a.units, 0, INT_MAX));
    if (a.units == 0) return FP4BF16_OK;
    if (a.layer_count == 0)
        return fail(FP4BF16_INVALID_ARGUMENT, "%s: layer_count is 0, but units is %lld", op,
                    static_cast<long long>(a.units));
    FP4BF16_TRY(check_range(op, "rank", a.rank, 1, 1 << 20));
    if (!std::isfinite(a.scale))
        return fail(FP4BF16_INVALID_ARGUMENT, "%s: scale is %g, but a finite number is needed", op, a.scale);
    return check_pointer(op, "layers", a.layers, alignof(int64_t));
}

}  // namespace
}  // namespace fp4bf16

using namespace fp4bf16;

extern "C" {

int64_t fp4bf16_lora_units(int64_t rows, int64_t columns, int32_t gradient) {
    constexpr int64_t kMost = int64_t{1} << 28;
    if (rows < 0 || columns < 0 || rows > kMost || columns > kMost) return -1;
    // Without rows or columns there is nothing to merge; the gradient that there is consists of zeros.
    return gradient != 0 ? up_units(rows) + down_units(columns) : merge_units(rows, columns);
}

fp4bf16_status fp4bf16_lora_merge(const fp4bf16_lora_args* args, void* stream) {
    const char* op = "lora_merge";
    FP4BF16_TRY(check_pointer(op, "args", args, alignof(fp4bf16_lora_args)));
    FP4BF16_TRY(check(op, *args));
    if (args->units == 0) return FP4BF16_OK;
    FP4BF16_TRY(check_pointer(op, "base", args->base, alignof(float)));
    FP4BF16_TRY(check_pointer(op, "weights", args->weights, alignof(float)));
    if (args->adapters != nullptr)
        FP4BF16_TRY(check_pointer(op, "adapters", args->adapters, alignof(float)));
    launch_kernel(merge_kernel, static_cast<unsigned>(args->units), kLoraLanes, 0,
                  static_cast<cudaStream_t>(stream), *args);
    return cuda_result(cudaGetLastError(), op);
}

fp4bf16_status fp4bf16_lora_gradient(const fp4bf16_lora_args* args, void* stream) {
    const char* op = "lora_gradient";
    FP4BF16_TRY(check_pointer(op, "args", args, alignof(fp4bf16_lora_args)));
    FP4BF16_TRY(check(op, *args));
    if (args->units == 0) return FP4BF16_OK;
    FP4BF16_TRY(check_pointer(op, "adapters", args->adapters, alignof(float)));
    FP4BF16_TRY(check_pointer(op, "gradient", args->gradient, alignof(float)));
    FP4BF16_TRY(check_pointer(op, "adapters_gradient", args->adapters_gradient, alignof(float)));
    launch_kernel(gradient_kernel, static_cast<unsigned>(args->units), kLoraLanes, 0,
                  static_cast<cudaStream_t>(stream), *args);
    return cuda_result(cudaGetLastError(), op);
}

}  // extern "C"
