// Configurations without promotion: FP4 `fast`, and BF16 K-major.
#include "sm90_gemm.cuh"

namespace fp4bf16 {
extern const GemmConfig kFast128x256 =
    describe<DualConfig<128, 256, 4, 2, 1, false>>("fast 128x256 cluster 2x1");
extern const GemmConfig kFast128x128 = describe<DualConfig<128, 128, 6, 1, 1, false>>("fast 128x128");
}  // namespace fp4bf16
