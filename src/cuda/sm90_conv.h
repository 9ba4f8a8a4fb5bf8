// Host side of the Hopper convolutions, for checked arguments.
#pragma once

#include "common.h"

namespace fp4bf16 {

// sm90_conv.cu
fp4bf16_status sm90_conv2d(const fp4bf16_conv2d_args& args, cudaStream_t stream);
// Parts of args.sums; 0: there are none.
int64_t sm90_conv2d_sum_parts(const fp4bf16_conv2d_args& args);
fp4bf16_status sm90_conv2d_dgrad(const fp4bf16_conv2d_dgrad_args& args, cudaStream_t stream);
// Name of configuration `config` ("" past the last); of 0: the one that these args would get.
const char* sm90_conv2d_config(const fp4bf16_conv2d_args& args, int32_t config);

// sm90_wgrad.cu
fp4bf16_status sm90_conv2d_wgrad(const fp4bf16_conv2d_wgrad_args& args, cudaStream_t stream);
int64_t sm90_conv2d_wgrad_workspace(const fp4bf16_conv2d_wgrad_args& args);

}  // namespace fp4bf16
