// nvfp4 of quantize_fast.cuh.
#include "quantize_across.cuh"

namespace fp4bf16 {

void fast_nvfp4(const QuantizeJob& job, cudaStream_t stream) { launch<kTe>(job, stream); }

}  // namespace fp4bf16
