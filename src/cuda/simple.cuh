// What the simple kernels share: one element of any dtype, and the activations by their definitions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "fp4.cuh"
#include "fp4bf16.h"

namespace fp4bf16 {

__device__ inline float decode(uint8_t byte) { return e4m3_decode(byte); }
__device__ inline float decode(__nv_bfloat16 v) { return __bfloat162float(v); }

__device__ inline float read(const void* p, int64_t i, fp4bf16_dtype dtype) {
    switch (dtype) {
        case FP4BF16_BFLOAT16:
            return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
        case FP4BF16_FLOAT16:
            return __half2float(static_cast<const __half*>(p)[i]);
        default:
            return static_cast<const float*>(p)[i];
    }
}

__device__ inline void write(void* p, int64_t i, fp4bf16_dtype dtype, float v) {
    switch (dtype) {
        case FP4BF16_BFLOAT16:
            static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16_rn(v);
            break;
        case FP4BF16_FLOAT16:
            static_cast<__half*>(p)[i] = __float2half_rn(v);
            break;
        default:
            static_cast<float*>(p)[i] = v;
    }
}

__device__ inline float activate(float v, fp4bf16_activation activation) {
    switch (activation) {
        case FP4BF16_SILU:
            return v / (1.0f + expf(-v));
        case FP4BF16_GELU:
            return 0.5f * v * erfcf(v * -0.707106781186547524f);  // erfc: no loss where v << 0
        default:
            return v;
    }
}

}  // namespace fp4bf16
