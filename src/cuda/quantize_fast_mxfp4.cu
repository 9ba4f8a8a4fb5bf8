// mxfp4 of quantize_fast.cuh.
#include "quantize_across.cuh"

namespace fp4bf16 {

void fast_mxfp4(const QuantizeJob& job, cudaStream_t stream) { launch<kMx>(job, stream); }

}  // namespace fp4bf16
