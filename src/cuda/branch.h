// The low-rank branch's product T = X D for any format and rounding, as a kernel of its own.
#pragma once

#include "common.h"

namespace fp4bf16 {

// Whether multiply_branch takes these arguments: BF16 rows of contiguous k up to 8192 (4096 where rank > 64),
// on sm_90.
bool branch_multiplies(const fp4bf16_quantize_args& args);
// Writes `hidden`, all of it; nothing is quantised.
fp4bf16_status multiply_branch(fp4bf16_quantize_args args, cudaStream_t stream);

}  // namespace fp4bf16
