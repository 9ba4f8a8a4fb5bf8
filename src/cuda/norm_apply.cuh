// Group normalisation whose statistics are given as sums by channel (fp4bf16_conv2d's): x is read once, by
// thread blocks that need no other's.
#pragma once

#include "norm.cuh"

namespace fp4bf16 {

// How an image is cut. A thread takes the same 16 channels (BF16 results alone: 8) of every `rows`-th pixel.
struct ApplyPlan {
    int vectors, rows, threads;  // vectors: of a pixel
    int chunks;                  // thread blocks of an image
    int64_t chunk;               // pixels of one
};

// norm_apply.cu. Fails (false) where the stream of this file does not take the shape or the addresses.
// The plan's chunks are for norm_apply to choose.
bool apply_plan(const fp4bf16_group_norm_args& a, ApplyPlan* plan);
fp4bf16_status norm_apply(const fp4bf16_group_norm_args& a, ApplyPlan plan, cudaStream_t stream);
// Any shape: statistics from the sums to memory, then norm_simple.cu's results.
fp4bf16_status norm_apply_simple(const fp4bf16_group_norm_args& a, float* mean, float* rstd,
                                 cudaStream_t stream);
fp4bf16_status norm_simple_results(const fp4bf16_group_norm_args& a, const float* mean, const float* rstd,
                                   cudaStream_t stream);

}  // namespace fp4bf16
