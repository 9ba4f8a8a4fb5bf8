// What the host knows of a configuration of the convolution.
#pragma once

#include "common.h"

namespace fp4bf16 {

struct ConvParams;

// Of a box of the result that is staged.
constexpr int box_channels(int tile_n) { return tile_n % 64 == 0 ? 64 : 32; }

struct ConvConfig {
    const char* name;
    int tile_m, tile_n, cluster_m, cluster_n;
    bool promoted;
    bool n_major;  // the weight: the gradient in the pictures
    bool in_turn;  // the warpgroups take whole tiles: no epilogue without products beside it
    fp4bf16_status (*launch)(const ConvParams& params, cudaStream_t stream);
};

extern const ConvConfig kConvPromoted256x128N, kConvPromoted256x128M, kConvPromoted128x128,
    kConvPromoted128x160, kConvFast128x256, kConvFast256x128, kConvFast128x128, kConvTurns128x128,
    kConvTurns128x160, kConvFast128x64, kConvGradient128x256, kConvGradient256x128, kConvGradient128x128;

}  // namespace fp4bf16
