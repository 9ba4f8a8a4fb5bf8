// What attention.cu shares with the kernels of Hopper: where one head's tokens lie.
#pragma once

#include <cuda_bf16.h>

#include "launch.cuh"

namespace fp4bf16 {

// sm90_attention_fwd.cu and sm90_attention_bwd.cu, for checked arguments: whether there is a kernel, and it.
bool sm90_attention_takes(const fp4bf16_attention_args& args);
fp4bf16_status sm90_attention(const fp4bf16_attention_args& args, cudaStream_t stream);
bool sm90_attention_backward_takes(const fp4bf16_attention_args& args);
int64_t sm90_attention_backward_workspace(const fp4bf16_attention_args& args);  // bytes, by the sizes alone
fp4bf16_status sm90_attention_backward(const fp4bf16_attention_args& args, cudaStream_t stream);

// The tokens (count, dim) of one head of one image; rows `stride` elements apart.
struct Tokens {
    const __nv_bfloat16* data;
    int64_t stride, count;
};

__device__ inline int64_t offset_of(const int64_t (&strides)[3], int64_t image, int64_t head) {
    return image * strides[0] + head * strides[2];
}

__device__ inline Tokens tokens_of(const void* data, const int64_t (&strides)[3], int64_t image, int64_t head,
                                   int64_t count) {
    return {static_cast<const __nv_bfloat16*>(data) + offset_of(strides, image, head), strides[1], count};
}

}  // namespace fp4bf16
