// nvfp4_exact of quantize_fast.cuh.
#include "quantize_across.cuh"

namespace fp4bf16 {

void fast_exact(const QuantizeJob& job, cudaStream_t stream) {
    job.rule.full ? launch<kExactFull>(job, stream) : launch<kExactFast>(job, stream);
}

}  // namespace fp4bf16
