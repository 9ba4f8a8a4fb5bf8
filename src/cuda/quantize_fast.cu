// Which arguments the fast quantiser takes, and its kernels' launch.
#include "quantize.cuh"

namespace fp4bf16 {

// One file a format, see quantize_fast.cuh.
void fast_exact(const QuantizeJob& job, cudaStream_t stream);
void fast_nvfp4(const QuantizeJob& job, cudaStream_t stream);
void fast_mxfp4(const QuantizeJob& job, cudaStream_t stream);
void fast_fp8(const QuantizeJob& job, cudaStream_t stream);

namespace {

bool multiple(const void* pointer, uintptr_t of) { return reinterpret_cast<uintptr_t>(pointer) % of == 0; }

}  // namespace

bool fast_takes(const QuantizeJob& job) {
    const fp4bf16_quantize_args& a = job.a;
    if (a.dtype != FP4BF16_BFLOAT16 || job.rule.stochastic || a.after != 1 || a.k_stride != 1) return false;
    if (a.outliers > 0 || a.rows > 0x7FFFFFFF || a.k_size > 64 * 256 * 16) return false;
    if (a.format == FP4BF16_NVFP4 && a.rule != FP4BF16_RULE_TE) return false;
    const bool in = a.k_size % job.block == 0 && a.x_stride % 8 == 0 && multiple(a.x, 16);
    return in && multiple(a.packed, a.format == FP4BF16_FP8 ? 16 : 8) && multiple(a.expanded, 16) &&
           (a.expanded == nullptr || a.expanded_stride % 16 == 0);
}

fp4bf16_status quantize_fast(const QuantizeJob& job, cudaStream_t stream) {
    if (job.a.format == FP4BF16_NVFP4_EXACT)
        fast_exact(job, stream);
    else if (job.a.format == FP4BF16_NVFP4)
        fast_nvfp4(job, stream);
    else if (job.a.format == FP4BF16_MXFP4)
        fast_mxfp4(job, stream);
    else
        fast_fp8(job, stream);
    return cuda_result(cudaGetLastError(), "quantize");
}

}  // namespace fp4bf16
