// The convolutions by simple kernels (conv_simple.cu), for checked arguments; `op` stands in errors.
#pragma once

#include "common.h"

namespace fp4bf16 {

fp4bf16_status simple_conv2d(const char* op, const fp4bf16_conv2d_args& args, cudaStream_t stream);
fp4bf16_status simple_conv2d_dgrad(const char* op, const fp4bf16_conv2d_dgrad_args& args,
                                   cudaStream_t stream);
fp4bf16_status simple_conv2d_wgrad(const char* op, const fp4bf16_conv2d_wgrad_args& args,
                                   cudaStream_t stream);

}  // namespace fp4bf16
