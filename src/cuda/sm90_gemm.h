// Host side of sm90_gemm_*.cu: one function a configuration, so that they compile side by side.
#pragma once

#include "common.h"

namespace fp4bf16 {

// What a configuration can do; its launch function makes the tensor maps and launches.
struct GemmConfig {
    const char* name;
    int tile_m, tile_n, cluster_m, cluster_n;
    bool promoted, a_m_major, b_n_major;
    fp4bf16_status (*launch)(const fp4bf16_gemm_args& args, cudaStream_t stream);
};

}  // namespace fp4bf16
