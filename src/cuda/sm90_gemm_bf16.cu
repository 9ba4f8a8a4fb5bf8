// BF16 with operands that are M-major or N-major: what transposed views and gradients need.
#include "sm90_gemm.cuh"

namespace fp4bf16 {
namespace {
template <bool kAM, bool kBN>
using Large = DualConfig<128, 256, 4, 2, 1, false, kAM, kBN>;
template <bool kAM, bool kBN>
using Small = DualConfig<128, 128, 6, 1, 1, false, kAM, kBN>;
}  // namespace

extern const GemmConfig kBf16Mk256 = describe<Large<true, false>>("bf16 a^T 128x256 cluster 2x1");
extern const GemmConfig kBf16Kn256 = describe<Large<false, true>>("bf16 b^T 128x256 cluster 2x1");
extern const GemmConfig kBf16Mn256 = describe<Large<true, true>>("bf16 a^T b^T 128x256 cluster 2x1");
extern const GemmConfig kBf16Mk128 = describe<Small<true, false>>("bf16 a^T 128x128");
extern const GemmConfig kBf16Kn128 = describe<Small<false, true>>("bf16 b^T 128x128");
extern const GemmConfig kBf16Mn128 = describe<Small<true, true>>("bf16 a^T b^T 128x128");
}  // namespace fp4bf16
