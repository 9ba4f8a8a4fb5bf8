// The convolutions by simple kernels (conv_simple.cu), for checked arguments; `op` stands in errors.
#pragma once

#include "common.h"

namespace fp4bf16 {

// parts: of args.sums
fp4bf16_status simple_conv2d(const char* op, const fp4bf16_conv2d_args& args, int64_t parts,
                             cudaStream_t stream);
// args.expanded, of what args.d holds; conv_expand.cu: the fast one
fp4bf16_status simple_expand_result(const char* op, const fp4bf16_conv2d_args& args, cudaStream_t stream);
fp4bf16_status expand_result(const char* op, const fp4bf16_conv2d_args& args, cudaStream_t stream);
fp4bf16_status simple_conv2d_dgrad(const char* op, const fp4bf16_conv2d_dgrad_args& args,
                                   cudaStream_t stream);
fp4bf16_status simple_conv2d_wgrad(const char* op, const fp4bf16_conv2d_wgrad_args& args,
                                   cudaStream_t stream);

}  // namespace fp4bf16
