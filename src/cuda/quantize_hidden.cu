// The low-rank branch's T = X D for any arguments: FP32 sums of BF16 products, a warp a number. Small and
// plain; sm90_quantize_branch.cu does it on tensor cores where it can.
#include "quantize.cuh"

namespace fp4bf16 {
namespace {

template <typename T>
__global__ void __launch_bounds__(kThreads) hidden_kernel(const __grid_constant__ QuantizeJob job) {
    wait_for_previous();
    const fp4bf16_quantize_args& a = job.a;
    const auto down = static_cast<const __nv_bfloat16*>(a.down_t);
    const int lane = threadIdx.x % 32;
    const int64_t step = int64_t{gridDim.x} * (kThreads / 32);
    for (int64_t i = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32; i < a.rows * a.rank;
         i += step) {
        const int64_t row = i / a.rank, column = i % a.rank;
        const T* x = static_cast<const T*>(a.x) + job.place(row);
        float sum = 0.0f;
        for (int64_t k = lane; k < a.k_size; k += 32) {
            // Down is zero in the outlier columns, but x may hold Inf there.
            if (a.outliers > 0 && outlier_mask(job, k, 1) != 0) continue;
            const float v = __bfloat162float(__float2bfloat16_rn(load(x + k * a.k_stride)));
            sum = __fmaf_rn(v, load(down + column * a.down_stride + k), sum);
        }
        for (int distance = 16; distance > 0; distance /= 2)
            sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
        if (lane == 0) store(static_cast<__nv_bfloat16*>(a.hidden) + row * a.hidden_stride + column, sum);
    }
}

}  // namespace

fp4bf16_status quantize_hidden(const QuantizeJob& job, cudaStream_t stream) {
    const int64_t blocks = ceil_div(job.a.rows * job.a.rank, kThreads / 32);
    const auto grid = static_cast<unsigned>(blocks < 0x7FFFFFFF ? blocks : 0x7FFFFFFF);
    if (job.a.dtype == FP4BF16_FLOAT32)
        launch_kernel(hidden_kernel<float>, grid, kThreads, 0, stream, job);
    else if (job.a.dtype == FP4BF16_FLOAT16)
        launch_kernel(hidden_kernel<__half>, grid, kThreads, 0, stream, job);
    else
        launch_kernel(hidden_kernel<__nv_bfloat16>, grid, kThreads, 0, stream, job);
    return cuda_result(cudaGetLastError(), "quantize");
}

}  // namespace fp4bf16
