// fp8 of quantize_fast.cuh.
#include "quantize_across.cuh"

namespace fp4bf16 {

void fast_fp8(const QuantizeJob& job, cudaStream_t stream) { launch<kFp8>(job, stream); }

}  // namespace fp4bf16
