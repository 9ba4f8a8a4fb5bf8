// What a convolution on Hopper is given, and where its tiles lie.
#pragma once

#include "sm90_conv_host.h"
#include "sm90_dual.cuh"
#include "wgmma_conv.cuh"

namespace fp4bf16 {

constexpr int kMostTaps = 64;
constexpr int kMostPhases = 4;

// A tap: where its pixels lie from those of the result, and which one of the weight's it is.
struct Tap {
    int8_t dy, dx;
    int16_t weight;
};

// One track: pictures and weight, k-tiles in the order taps, then channels.
struct ConvTrack {
    int taps, chunks;  // taps of a phase; chunks of 128 bytes of channels
    int channels;
    int step;       // pixels of x from one pixel of the result to the next
    int tail;       // wgmmas of a tap's last chunk
    int first_tap;  // in `tap`; those of the next phase follow

    __host__ __device__ int tiles() const { return taps * chunks; }
};

struct ConvParams {
    CUtensorMap x8, w8, x16, w16, residual_map;
    CUtensorMap d[kMostPhases];
    ConvTrack fp4, bf16;
    Tap tap[kMostTaps];
    int log_w, log_h;  // of the box of a tile; the rest of its rows are images
    int tiles_w, tiles_h;
    Divisor by_w, by_h;       // by tiles_w, tiles_h
    int n, h, w;              // of the result; of each of its phases
    int phases;               // 1, or 4: pixels (2 y + a, 2 x + b) are those of phase 2 a + b
    int phase_tiles;          // columns of tiles (of whole clusters) of a phase
    Divisor by_phase;         // by phase_tiles
    bool staged, prefetched;  // the result leaves, the residual comes through shared memory
    bool one_image;           // a tile lies in one image
    bool one_scale;           // of pictures, for all rows of a tile
    bool paired;              // sixteen rows of a warp lie in one image, whose biases can be read in pairs
    bool extra;               // anything but scales, bias and a prefetched residual
    Schedule schedule;
    Epilogue epilogue;  // column scales, activation, what d is; bias alone where it waits for alpha
    float alpha;
    const float* image_scale;
    const void* bias;
    const void* bias2;
    const void* image_bias;
    const void* residual;
    int64_t image_scale_step, image_bias_stride;
    int image_bias_dtype, residual_dtype;
    int64_t d_strides[3], residual_strides[3];
    int64_t phase_strides[2];  // from phase to phase of d: by a, by b
    float* sums;               // (n, sum_parts, o, 2), of the staged BF16 result; NULL: not wanted
    int sum_parts;             // of an image
    int phase_parts;           // of a phase of it
    int log_part;              // rows of a part, which lie in one warpgroup's: 16 or more
    const int32_t* run_if;     // of the launch; NULL: always
};

// Where a tile lies.
struct Pixel {
    int x, y, n;
};

// Row `row` of a tile at `corner`.
__host__ __device__ inline Pixel pixel_of(const ConvParams& p, Pixel corner, int row) {
    return {corner.x + (row & ((1 << p.log_w) - 1)), corner.y + (row >> p.log_w & ((1 << p.log_h) - 1)),
            corner.n + (row >> (p.log_w + p.log_h))};
}

template <class C>
struct ConvCorner {
    Pixel at;
    int place;  // the channel, a multiple of 32, and the phase below it: one register for both

    __host__ __device__ ConvCorner(const ConvParams& p, int tile, int rank) {
        int cm, cn, z;
        p.schedule.locate(tile, &cm, &cn, &z);
        const int m = cm * C::kClusterM + (C::kClusterM > 1 ? rank : 0);
        const int line = p.by_w.divide(m), image = p.by_h.divide(line);
        at = {(m - line * p.tiles_w) << p.log_w, (line - image * p.tiles_h) << p.log_h, 0};
        at.n = image * (C::kTileM >> (p.log_w + p.log_h));
        const int phase = p.by_phase.divide(cn);
        cn -= phase * p.phase_tiles;
        place = (cn * C::kClusterN + (C::kClusterN > 1 ? rank : 0)) * C::kTileN | phase;
    }
    __host__ __device__ int channel() const { return place & ~(kMostPhases - 1); }
    __host__ __device__ int phase() const { return place & (kMostPhases - 1); }
};

}  // namespace fp4bf16
