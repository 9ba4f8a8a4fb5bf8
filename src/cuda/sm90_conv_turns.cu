// E4M3 sums kept by the tensor cores, warpgroups in turn; without E4M3 tiles the BF16 convolution.
#include "sm90_conv_launch.cuh"

namespace fp4bf16 {
extern const ConvConfig kConvTurns128x128 =
    describe_conv<TurnConfig<128, 128, 5, 2, 1>>("fast 128x128 in turn, cluster 2x1");
extern const ConvConfig kConvTurns128x160 =
    describe_conv<TurnConfig<128, 160, 5, 2, 1>>("fast 128x160 in turn, cluster 2x1");
}  // namespace fp4bf16
