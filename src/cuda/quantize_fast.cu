// The launch of the fast quantiser's kernels.
#include "quantize.cuh"

namespace fp4bf16 {

// One file a format, see quantize_fast.cuh.
void fast_exact(const QuantizeJob& job, cudaStream_t stream);
void fast_nvfp4(const QuantizeJob& job, cudaStream_t stream);
void fast_mxfp4(const QuantizeJob& job, cudaStream_t stream);
void fast_fp8(const QuantizeJob& job, cudaStream_t stream);

namespace {

// Sums of rows from those of their pieces, in order; FP32 sums of blocks are off by less than 2^-19.
__global__ void __launch_bounds__(kThreads)
    add_parts(const double* parts, int64_t count, int64_t pieces, double* sums) {
    wait_for_previous();
    const int64_t step = int64_t{gridDim.x} * kThreads;
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
        double sum = 0;
        for (int64_t p = 0; p < pieces; ++p) sum += parts[p * count + i];
        sums[i] = sum * (1 + 0x1p-19);
    }
}

}  // namespace

int64_t parts_bytes(const QuantizeJob& job) {
    if (job.way != Way::kRows || job.a.after == 1 || job.a.sums == nullptr) return 0;
    return ceil_div(job.a.k_size, kAcrossPiece) * job.a.rows * 3 * static_cast<int64_t>(sizeof(double));
}

fp4bf16_status quantize_fast(const QuantizeJob& job, cudaStream_t stream) {
    if (job.way == Way::kAhead)
        FP4BF16_TRY(cuda_result(cudaMemsetAsync(job.ticket, 0, found_bytes(job), stream), "quantize"));
    if (job.a.format == FP4BF16_NVFP4_EXACT)
        fast_exact(job, stream);
    else if (job.a.format == FP4BF16_NVFP4)
        fast_nvfp4(job, stream);
    else if (job.a.format == FP4BF16_MXFP4)
        fast_mxfp4(job, stream);
    else
        fast_fp8(job, stream);
    if (parts_bytes(job) > 0) {
        const int64_t count = 3 * job.a.rows;
        launch_kernel(add_parts, grid_for(count), kThreads, 0, stream, job.parts, count,
                      ceil_div(job.a.k_size, kAcrossPiece), job.a.sums);
    }
    return cuda_result(cudaGetLastError(), "quantize");
}

}  // namespace fp4bf16
