// From checked arguments to a launch of one configuration of sm90_dual.cuh.
#pragma once

#include "sm90_dual.cuh"
#include "sm90_gemm.h"
#include "sm90_launch.cuh"
#include "tensor_map.h"

namespace fp4bf16 {

// The map of one operand for configuration C: rows of M or N (`kRows` a tile, `kShare` CTAs load it
// together).
template <int kRows, int kShare>
fp4bf16_status operand_map(const char* name, const void* data, int element_bytes, bool mn_major, int64_t rows,
                           int64_t k, int64_t stride, int64_t batch, int64_t batch_stride, CUtensorMap* map) {
    const int tile_elements = kTileBytes / element_bytes;
    MapShape shape{k, rows, batch, stride, batch_stride, tile_elements, kRows / kShare};
    if (mn_major) shape = {rows, k, batch, stride, batch_stride, 64, tile_elements};
    return make_tensor_map("gemm", name, data, element_bytes, shape, map);
}

template <class C>
fp4bf16_status make_maps(const fp4bf16_gemm_args& g, DualParams* p) {
    if (g.k8 > 0) {
        FP4BF16_TRY((operand_map<C::kTileM, C::kClusterN>("a8", g.a8, 1, false, g.m, g.k8, g.a8_stride,
                                                          g.a_batch_mod, g.a8_batch_stride, &p->a8)));
        FP4BF16_TRY((operand_map<C::kTileN, C::kClusterM>("b8", g.b8, 1, false, g.n, g.k8, g.b8_stride,
                                                          g.b_batch_mod, g.b8_batch_stride, &p->b8)));
    }
    if (g.k16 > 0) {
        FP4BF16_TRY((operand_map<C::kTileM, C::kClusterN>("a16", g.a16, 2, C::kAM, g.m, g.k16, g.a16_stride,
                                                          g.a_batch_mod, g.a16_batch_stride, &p->a16)));
        FP4BF16_TRY((operand_map<C::kTileN, C::kClusterM>("b16", g.b16, 2, C::kBN, g.n, g.k16, g.b16_stride,
                                                          g.b_batch_mod, g.b16_batch_stride, &p->b16)));
    }
    return FP4BF16_OK;
}

inline Epilogue make_epilogue(const fp4bf16_gemm_args& g) {
    Epilogue e{};
    e.row_scale = g.row_scale, e.row_step = g.row_scale_step, e.row_batch = g.row_scale_batch_stride;
    e.col_scale = g.col_scale, e.col_step = g.col_scale_step, e.col_batch = g.col_scale_batch_stride;
    e.alpha = g.alpha, e.activation = g.activation, e.bias = g.bias, e.bias_dtype = g.bias_dtype;
    e.residual = g.residual, e.residual_dtype = g.residual_dtype;
    e.residual_stride = g.residual_stride, e.residual_batch = g.residual_batch_stride;
    e.d = g.d, e.d_dtype = g.d_dtype, e.d_stride = g.d_stride, e.d_batch = g.d_batch_stride;
    e.m = static_cast<int>(g.m), e.n = static_cast<int>(g.n);
    e.extra = e.alpha != 1.0f || e.bias != nullptr || e.activation != FP4BF16_NONE || e.residual != nullptr;
    e.vector = reinterpret_cast<uintptr_t>(g.d) % 8 == 0 && g.d_stride % 2 == 0 &&
               (g.batch_count == 1 || g.d_batch_stride % 2 == 0);
    return e;
}

template <class C>
fp4bf16_status launch_gemm(const fp4bf16_gemm_args& g, cudaStream_t stream) {
    DualParams p{};
    FP4BF16_TRY(make_maps<C>(g, &p));
    p.k8_tiles = static_cast<int>(ceil_div(g.k8, kTileBytes));
    p.k16_tiles = static_cast<int>(ceil_div(g.k16, kTileBytes / 2));
    p.k16_steps = static_cast<int>(ceil_div(g.k16 - (p.k16_tiles - 1) * int64_t{64}, 16));
    p.a_div = static_cast<int>(g.a_batch_div), p.a_mod = static_cast<int>(g.a_batch_mod);
    p.b_div = static_cast<int>(g.b_batch_div), p.b_mod = static_cast<int>(g.b_batch_mod);
    const int64_t tiles_m = ceil_div(g.m, C::kTileM * C::kClusterM),
                  tiles_n = ceil_div(g.n, C::kTileN * C::kClusterN);
    if (tiles_m * tiles_n > (INT32_MAX - 65536) / g.batch_count)
        return fail(
            FP4BF16_INVALID_ARGUMENT, "gemm: d (%lld, %lld, %lld) has more than 2^31 tiles; split the batch",
            static_cast<long long>(g.batch_count), static_cast<long long>(g.m), static_cast<long long>(g.n));
    p.schedule = Schedule(tiles_m, tiles_n, g.batch_count);
    p.epilogue = make_epilogue(g);
    p.run_if = g.run_if;
    p.staged = g.d_dtype != FP4BF16_FLOAT32 && reinterpret_cast<uintptr_t>(g.d) % 16 == 0 &&
               g.d_stride % 8 == 0 && (g.batch_count == 1 || g.d_batch_stride % 8 == 0);
    if (p.staged)  // 16-bit elements, whichever
        FP4BF16_TRY(make_tensor_map("gemm", "d", g.d, 2,
                                    {g.n, g.m, g.batch_count, g.d_stride, g.d_batch_stride, 64, 64}, &p.d));
    return launch_persistent<C, C::kSharedBytes, sm90_dual_gemm<C>>("gemm", p, p.schedule.total(), stream);
}

template <class C>
constexpr GemmConfig describe(const char* name) {
    return {name,        C::kTileM, C::kTileN, C::kClusterM,  C::kClusterN,
            C::kPromote, C::kAM,    C::kBN,    launch_gemm<C>};
}

}  // namespace fp4bf16
