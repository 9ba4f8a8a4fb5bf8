// BF16 with a weight that is read N-major: the gradient in the pictures needs no transposed copy of it.
#include "sm90_conv_launch.cuh"

namespace fp4bf16 {
extern const ConvConfig kConvGradient128x256 =
    describe_conv<DualConfig<128, 256, 4, 2, 1, false, false, true>>("gradient 128x256 cluster 2x1");
extern const ConvConfig kConvGradient256x128 =
    describe_conv<DualConfig<256, 128, 4, 2, 1, false, false, true>>("gradient 256x128 cluster 2x1");
extern const ConvConfig kConvGradient128x128 =
    describe_conv<DualConfig<128, 128, 6, 1, 1, false, false, true>>("gradient 128x128");
}  // namespace fp4bf16
