// E4M3 sums promoted to FP32 after every k-tile.
#include "sm90_conv_launch.cuh"

namespace fp4bf16 {
extern const ConvConfig kConvPromoted256x128N =
    describe_conv<DualConfig<256, 128, 4, 1, 2, true>>("promoted 256x128 cluster 1x2");
extern const ConvConfig kConvPromoted256x128M =
    describe_conv<DualConfig<256, 128, 4, 2, 1, true>>("promoted 256x128 cluster 2x1");
extern const ConvConfig kConvPromoted128x128 =
    describe_conv<DualConfig<128, 128, 6, 1, 1, true>>("promoted 128x128");
extern const ConvConfig kConvPromoted128x160 =
    describe_conv<DualConfig<128, 160, 6, 2, 1, true>>("promoted 128x160 cluster 2x1");
}  // namespace fp4bf16
