// Configurations that add every 128 elements of K to FP32 registers.
#include "sm90_gemm.cuh"

namespace fp4bf16 {
extern const GemmConfig kPromoted256x128 =
    describe<DualConfig<256, 128, 4, 1, 2, true>>("promoted 256x128 cluster 1x2");
extern const GemmConfig kPromoted128x192 = describe<DualConfig<128, 192, 5, 1, 1, true>>("promoted 128x192");
extern const GemmConfig kPromoted128x128 = describe<DualConfig<128, 128, 6, 1, 1, true>>("promoted 128x128");
}  // namespace fp4bf16
