// What every .cu shares: the thread's last error, argument checks, the launch check.
#pragma once

#include <cuda_runtime.h>

#include "fp4bf16.h"

namespace fp4bf16 {

// Keeps one sentence for fp4bf16_last_error() and returns `status`.
[[gnu::format(printf, 2, 3)]] fp4bf16_status fail(fp4bf16_status status, const char* format, ...);

// Turns a CUDA error into a status and a sentence, and clears it, so that the next call starts clean.
fp4bf16_status cuda_result(cudaError_t error, const char* where);

// A matrix argument: shape and row stride in elements, pointer alignment in bytes.
fp4bf16_status check_matrix(const char* function, const char* name, const void* pointer, int64_t rows,
                            int64_t k, int64_t stride, int64_t alignment);
fp4bf16_status check_pointer(const char* function, const char* name, const void* pointer, int64_t alignment);
// A condition of a launch: NULL, or one number.
inline fp4bf16_status check_run_if(const char* function, const int32_t* run_if) {
    return run_if == nullptr ? FP4BF16_OK : check_pointer(function, "run_if", run_if, alignof(int32_t));
}
fp4bf16_status check_dtype(const char* function, fp4bf16_dtype dtype);
fp4bf16_status check_range(const char* function, const char* name, int64_t value, int64_t least,
                           int64_t most);
fp4bf16_status check_group(const char* function, const char* name, int64_t rows_per_group);
// The groups of an outer scale: mid * inner rows must not overflow.
fp4bf16_status check_groups(const char* function, int64_t mid, int64_t inner);

// Compute capability of the current device.
fp4bf16_status compute_capability(const char* function, int* major, int* minor);
// Its multiprocessors.
fp4bf16_status multiprocessor_count(const char* function, int* count);

// gemm.cu: every argument of `in` checked; `out` is the same without a 0 that reads as 1.
fp4bf16_status check_gemm(const char* function, const fp4bf16_gemm_args& in, fp4bf16_gemm_args* out);
// sm90_gemm.cu, for checked arguments.
fp4bf16_status sm90_gemm(const fp4bf16_gemm_args& args, cudaStream_t stream);
const char* sm90_gemm_config(const fp4bf16_gemm_args& args, int32_t config);

// sm90_quantize_branch.cu: the quantiser that also makes the low-rank branch's T = X D.
bool branch_takes(const fp4bf16_quantize_args& args);
int64_t branch_workspace(const fp4bf16_quantize_args& args);
fp4bf16_status quantize_branch(const fp4bf16_quantize_args& args, cudaStream_t stream);

inline int64_t size_of(fp4bf16_dtype dtype) { return dtype == FP4BF16_FLOAT32 ? 4 : 2; }
__host__ __device__ inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Every check returns its failure at once.
#define FP4BF16_TRY(expression)                      \
    do {                                             \
        const fp4bf16_status status_ = (expression); \
        if (status_ != FP4BF16_OK) return status_;   \
    } while (0)

// Launches are grid-strided: any number of elements with a grid that every device takes.
constexpr int kThreads = 256;
inline unsigned grid_for(int64_t work) {
    const int64_t blocks = ceil_div(work, kThreads);
    return static_cast<unsigned>(blocks < 65535 ? blocks : 65535);
}

}  // namespace fp4bf16
