// E4M3 sums kept by the tensor cores; without E4M3 tiles the BF16 convolution.
#include "sm90_conv_launch.cuh"

namespace fp4bf16 {
extern const ConvConfig kConvFast128x256 =
    describe_conv<DualConfig<128, 256, 4, 2, 1, false>>("fast 128x256 cluster 2x1");
extern const ConvConfig kConvFast256x128 =
    describe_conv<DualConfig<256, 128, 4, 2, 1, false>>("fast 256x128 cluster 2x1");
extern const ConvConfig kConvFast128x128 =
    describe_conv<DualConfig<128, 128, 6, 1, 1, false>>("fast 128x128");
}  // namespace fp4bf16
