// Narrow tiles for problems that would not give every multiprocessor one of the others.
#include "sm90_conv_launch.cuh"

namespace fp4bf16 {
extern const ConvConfig kConvFast128x64 = describe_conv<DualConfig<128, 64, 8, 1, 1, false>>("fast 128x64");
}  // namespace fp4bf16
