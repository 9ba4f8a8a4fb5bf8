// What makes a convolution of few channels a 1x1 convolution: of pictures of few channels their patches side
// by side; of few outputs the products of all taps, which are then summed over the neighbours. Memory bounds
// these kernels.
#include <cuda_pipeline.h>

#include "common.h"
#include "pictures.cuh"

namespace fp4bf16 {
namespace {

using bf16 = __nv_bfloat16;

constexpr int64_t kMostSide = int64_t{1} << 28;  // of a picture and a line of results: places are ints
constexpr int64_t kMostKernel = int64_t{1} << 15;
constexpr int kValues = 8;             // elements that a thread makes at once: 16 bytes of BF16
constexpr int kTileBytes = 48 * 1024;  // of shared memory, what every GPU gives
constexpr int kTileWidth = 32;         // pixels

// Where a pixel's values come from. With kSpread values (c, r, s) of pixel (y, x) are those at (y + top - r,
// x + left - s): what each tap of a convolution of stride 1 hands back to it; else values (r, s, c) are those
// at (y * stride - top + r, x * stride - left + s): what each tap of a convolution meets.
struct Taps {
    int kh, kw, stride, top, left;
};

// ---- patches, and the adjoint of a sum over neighbours
template <typename T>
struct Patches {
    Picture<const T> x;
    int h, w, c;
    Taps taps;
    int64_t lines, block_lines;  // of the result, n * oh; of a block
    int oh, ow, groups, values;  // groups a pixel, and values before its zeros
    bf16* out;
};

// Where one value lies from the first that its pixel may meet: lines, columns, elements.
struct Step {
    int r, s;
    int64_t offset;
};

template <bool kSpread, typename T>
__device__ Step step_of(const Patches<T>& p, unsigned value) {
    const unsigned kw = p.taps.kw, inner = kSpread ? kw : p.c, mid = kSpread ? p.taps.kh : kw;
    const unsigned rest = value / inner, outer = rest / mid;
    const int fast = static_cast<int>(value - rest * inner), slow = static_cast<int>(rest - outer * mid);
    const int r = kSpread ? -slow : static_cast<int>(outer), s = kSpread ? -fast : slow;
    const int64_t c = kSpread ? outer : fast;
    return {r, s, r * p.x.row + s * p.x.pixel + c};
}

// One pixel's group; y, x: the first that it may meet, of which `from` is the first value.
template <typename T>
__device__ void make_group(const Patches<T>& p, const Step (&step)[kValues], int count, int y, int x,
                           const T* from, bf16* to) {
    T found[kValues];
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
        const bool inside = j < count && static_cast<unsigned>(y + step[j].r) < static_cast<unsigned>(p.h) &&
                            static_cast<unsigned>(x + step[j].s) < static_cast<unsigned>(p.w);
        found[j] = inside ? from[step[j].offset] : from_float<T>(0.0f);
    }
    Vector<bf16, kValues> made;
#pragma unroll
    for (int j = 0; j < kValues; ++j) made.v[j] = from_float<bf16>(to_float(found[j]));
    store_vector<kValues>(to, made);
}

// A block is (groups, pixels of a line, lines): a thread makes the same group of many pixels, so that it
// finds the places of its values once.
template <typename T, bool kSpread>
__global__ void __launch_bounds__(kThreads, 3) patches_kernel(const __grid_constant__ Patches<T> p) {
    for (int group = threadIdx.x; group < p.groups; group += blockDim.x) {
        const int count = p.values - group * kValues;
        Step step[kValues];
#pragma unroll
        for (int j = 0; j < kValues; ++j) step[j] = step_of<kSpread>(p, group * kValues + j);
        int64_t line = blockIdx.x * p.block_lines + threadIdx.z;
        const int64_t end = line - threadIdx.z + p.block_lines;
        int64_t image = quotient(line, p.oh);
        int oy = static_cast<int>(line - image * p.oh);
        for (; line < end && line < p.lines; line += blockDim.z, oy += blockDim.z) {
            for (; oy >= p.oh; oy -= p.oh) ++image;
            const int y = kSpread ? oy + p.taps.top : oy * p.taps.stride - p.taps.top;
            for (int ox = threadIdx.y; ox < p.ow; ox += blockDim.y) {
                const int x = kSpread ? ox + p.taps.left : ox * p.taps.stride - p.taps.left;
                make_group(p, step, count, y, x, p.x.at(image, y, x),
                           p.out + ((line * p.ow + ox) * p.groups + group) * kValues);
            }
        }
    }
}

template <typename T, bool kSpread>
void launch_patches(Patches<T> p, void* stream) {
    dim3 block(p.groups < kThreads ? p.groups : kThreads);
    const int pixels = kThreads / static_cast<int>(block.x);
    block.y = p.ow < pixels ? p.ow : pixels;
    block.z = kThreads / (block.x * block.y) < 64 ? kThreads / (block.x * block.y) : 64;
    const int64_t all = ceil_div(p.lines, block.z), most = 0x7FFFFFFF;  // of blocks
    int64_t turns = all < 1024 ? 1 : all < 8192 ? all / 1024 : 8;       // lines of a thread: blocks enough?
    if (turns < ceil_div(all, most)) turns = ceil_div(all, most);
    p.block_lines = turns * block.z;
    patches_kernel<T, kSpread>
        <<<static_cast<unsigned>(ceil_div(all, turns)), block, 0, static_cast<cudaStream_t>(stream)>>>(p);
}

template <bool kSpread>
void patches(const void* x, fp4bf16_dtype dtype, const int64_t* strides, int64_t h, int64_t w, int64_t c,
             const Taps& taps, int64_t n, int64_t oh, int64_t ow, void* out, int64_t width, void* stream) {
    const auto with = [&](auto zero) {
        using T = decltype(zero);
        const int64_t groups = width / kValues;
        launch_patches<T, kSpread>({{static_cast<const T*>(x), strides},
                                    static_cast<int>(h),
                                    static_cast<int>(w),
                                    static_cast<int>(c),
                                    taps,
                                    n * oh,
                                    0,
                                    static_cast<int>(oh),
                                    static_cast<int>(ow),
                                    static_cast<int>(groups),
                                    static_cast<int>(taps.kh * taps.kw * c),
                                    static_cast<bf16*>(out)},
                                   stream);
    };
    if (dtype == FP4BF16_FLOAT32)
        with(float{});
    else
        with(bf16{});
}

// ---- the sum over neighbours
struct Gather {
    Picture<const float> y;
    Picture<float> out;
    const float* bias;
    int h, w, oh, ow, o;
    Taps taps;
    int tile_h, tile_w;  // of results; those of `y` are wider by the kernel less one
    int64_t tiles;       // n * tiles_h * tiles_w
    int tiles_h, tiles_w;
};

// A block copies a tile's pixels of `y` to shared memory, each whole, for its values go to kh * kw results:
// a warp a pixel, all at once under way.
__device__ void copy_tile(const Gather& g, int64_t image, int y0, int x0, float* tile) {
    const int values = g.o * g.taps.kh * g.taps.kw, columns = g.tile_w + g.taps.kw - 1;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rows = g.tile_h + g.taps.kh - 1;
    for (int r = 0, s = warp;; s += kThreads / 32) {
        for (; s >= columns; s -= columns) ++r;
        if (r >= rows) break;
        const int y = y0 + r, x = x0 + s;
        const bool inside = static_cast<unsigned>(y) < static_cast<unsigned>(g.h) &&
                            static_cast<unsigned>(x) < static_cast<unsigned>(g.w);
        const float* from = inside ? g.y.at(image, y, x) : nullptr;
        float* to = tile + (r * columns + s) * values;
        for (int i = lane; i < values; i += 32)
            if (inside)
                __pipeline_memcpy_async(to + i, from + i, 4);
            else
                to[i] = 0.0f;
    }
    __pipeline_commit();
    __pipeline_wait_prior(0);
}

// kSide: the kernel's, 0: any.
template <int kSide>
__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ Gather g) {
    extern __shared__ float tile[];
    const int kh = kSide > 0 ? kSide : g.taps.kh, kw = kSide > 0 ? kSide : g.taps.kw;
    const int values = g.o * kh * kw, columns = g.tile_w + kw - 1;
    for (int64_t t = blockIdx.x; t < g.tiles; t += gridDim.x) {
        const int64_t row = quotient(t, g.tiles_w), image = quotient(row, g.tiles_h);
        const int oy = static_cast<int>(row - image * g.tiles_h) * g.tile_h;
        const int ox = static_cast<int>(t - row * g.tiles_w) * g.tile_w;
        copy_tile(g, image, oy - g.taps.top, ox - g.taps.left, tile);
        __syncthreads();
        for (int i = threadIdx.x; i < g.tile_h * g.tile_w * g.o; i += kThreads) {
            const int pixel = i / g.o, o = i - pixel * g.o, y = pixel / g.tile_w, x = pixel - y * g.tile_w;
            if (oy + y >= g.oh || ox + x >= g.ow) continue;
            const float* from = tile + (y * columns + x) * values + o * kh * kw;
            float sum = 0.0f;
            for (int r = 0; r < kh; ++r)
                for (int s = 0; s < kw; ++s) sum += from[(r * columns + s) * values + r * kw + s];
            if (g.bias != nullptr) sum += g.bias[o];
            g.out.at(image, oy + y, ox + x)[o] = sum;
        }
        __syncthreads();
    }
}

int64_t tile_bytes(int64_t h, int64_t w, int64_t o, const Taps& taps) {
    return (h + taps.kh - 1) * (w + taps.kw - 1) * o * taps.kh * taps.kw * 4;
}

// The largest tile that fits; none where even one result's neighbours do not.
bool choose_tile(Gather* g) {
    int w = kTileWidth;
    while (w > 1 && (w / 2 >= g->ow || tile_bytes(1, w, g->o, g->taps) > kTileBytes)) w /= 2;
    int h = 1;
    while (h < 16 && h < g->oh && tile_bytes(h + 1, w, g->o, g->taps) <= kTileBytes) ++h;
    g->tile_h = h, g->tile_w = w;
    return tile_bytes(h, w, g->o, g->taps) <= kTileBytes;
}

// ---- checks
fp4bf16_status check_range(const char* function, const char* name, int64_t value, int64_t least,
                           int64_t most) {
    if (value >= least && value <= most) return FP4BF16_OK;
    return fail(FP4BF16_INVALID_ARGUMENT, "%s: %s is %lld, but must be %lld to %lld", function, name,
                static_cast<long long>(value), static_cast<long long>(least), static_cast<long long>(most));
}

// Pictures of h x w pixels and c channels and the taps on them; results of oh x ow pixels.
fp4bf16_status check_taps(const char* function, int64_t h, int64_t w, int64_t c, int64_t oh, int64_t ow,
                          int64_t kh, int64_t kw, int64_t stride, int64_t top, int64_t left, Taps* taps) {
    FP4BF16_TRY(check_range(function, "h", h, 0, kMostSide));
    FP4BF16_TRY(check_range(function, "w", w, 0, kMostSide));
    FP4BF16_TRY(check_range(function, "kh", kh, 1, kMostKernel));
    FP4BF16_TRY(check_range(function, "kw", kw, 1, kMostKernel));
    FP4BF16_TRY(check_range(function, "stride", stride, 1, kMostKernel));
    FP4BF16_TRY(check_range(function, "oh", oh, 0, kMostSide / stride));
    FP4BF16_TRY(check_range(function, "ow", ow, 0, kMostSide / stride));
    FP4BF16_TRY(check_range(function, "top", top, -kMostKernel, kMostKernel));
    FP4BF16_TRY(check_range(function, "left", left, -kMostKernel, kMostKernel));
    FP4BF16_TRY(check_range(function, "the number of channels", c, 0, kMostSide / (kh * kw)));
    *taps = {static_cast<int>(kh), static_cast<int>(kw), static_cast<int>(stride), static_cast<int>(top),
             static_cast<int>(left)};
    return FP4BF16_OK;
}

fp4bf16_status check_wide(const char* function, int64_t values, int64_t ow, const void* out, int64_t width) {
    if (width % kValues != 0 || width < values)
        return fail(FP4BF16_INVALID_ARGUMENT,
                    "%s: width is %lld, but must be a multiple of %d that holds the %lld values of a pixel",
                    function, static_cast<long long>(width), kValues, static_cast<long long>(values));
    FP4BF16_TRY(check_range(function, "width", width, 0, 8 * kMostSide / (ow > 0 ? ow : 1)));
    return check_pointer(function, "out", out, 16);
}

fp4bf16_status check_source(const char* function, const char* name, const void* x, fp4bf16_dtype dtype,
                            const int64_t* strides) {
    FP4BF16_TRY(check_range(function, "dtype", dtype, FP4BF16_FLOAT32, FP4BF16_BFLOAT16));
    return check_picture(function, name, x, strides, size_of(dtype));
}

}  // namespace
}  // namespace fp4bf16

using namespace fp4bf16;

extern "C" fp4bf16_status fp4bf16_patches(const void* x, fp4bf16_dtype dtype, int64_t n, int64_t h, int64_t w,
                                          int64_t c, const int64_t x_strides[3], int64_t oh, int64_t ow,
                                          int64_t kh, int64_t kw, int64_t stride, int64_t top, int64_t left,
                                          void* out, int64_t width, void* stream) {
    const char* op = "patches";
    Taps taps{};
    FP4BF16_TRY(check_sizes(op, n, h, w, c));
    FP4BF16_TRY(check_taps(op, h, w, c, oh, ow, kh, kw, stride, top, left, &taps));
    FP4BF16_TRY(check_sizes(op, n, oh, ow, width));
    if (n == 0 || oh == 0 || ow == 0 || width == 0) return FP4BF16_OK;
    FP4BF16_TRY(check_wide(op, kh * kw * c, ow, out, width));
    if (h > 0 && w > 0 && c > 0) FP4BF16_TRY(check_source(op, "x", x, dtype, x_strides));
    const int64_t none[3] = {};
    if (c == 0) h = 0, c = 1;  // nothing to read, either
    patches<false>(x, dtype, x_strides != nullptr ? x_strides : none, h, w, c, taps, n, oh, ow, out, width,
                   stream);
    return cuda_result(cudaGetLastError(), op);
}

extern "C" fp4bf16_status fp4bf16_spread_taps(const void* g, fp4bf16_dtype dtype, int64_t n, int64_t oh,
                                              int64_t ow, int64_t o, const int64_t g_strides[3], int64_t h,
                                              int64_t w, int64_t kh, int64_t kw, int64_t top, int64_t left,
                                              void* y, int64_t width, void* stream) {
    const char* op = "spread_taps";
    Taps taps{};
    FP4BF16_TRY(check_sizes(op, n, oh, ow, o));
    FP4BF16_TRY(check_taps(op, h, w, o, oh, ow, kh, kw, 1, top, left, &taps));
    FP4BF16_TRY(check_sizes(op, n, h, w, width));
    if (n == 0 || h == 0 || w == 0 || width == 0) return FP4BF16_OK;
    FP4BF16_TRY(check_wide(op, kh * kw * o, w, y, width));
    if (oh > 0 && ow > 0 && o > 0) FP4BF16_TRY(check_source(op, "g", g, dtype, g_strides));
    const int64_t none[3] = {};
    patches<true>(g, dtype, g_strides != nullptr ? g_strides : none, oh, ow, o, taps, n, h, w, y, width,
                  stream);
    return cuda_result(cudaGetLastError(), op);
}

extern "C" fp4bf16_status fp4bf16_gather_taps(const float* y, int64_t n, int64_t h, int64_t w,
                                              const int64_t y_strides[3], int64_t oh, int64_t ow, int64_t o,
                                              int64_t kh, int64_t kw, int64_t top, int64_t left,
                                              const float* bias, float* out, const int64_t out_strides[3],
                                              void* stream) {
    const char* op = "gather_taps";
    Taps taps{};
    FP4BF16_TRY(check_taps(op, h, w, o, oh, ow, kh, kw, 1, top, left, &taps));
    FP4BF16_TRY(check_sizes(op, n, h, w, kh * kw * o));
    FP4BF16_TRY(check_sizes(op, n, oh, ow, o));
    if (n == 0 || oh == 0 || ow == 0 || o == 0) return FP4BF16_OK;
    if (h > 0 && w > 0) FP4BF16_TRY(check_picture(op, "y", y, y_strides, 4));
    FP4BF16_TRY(check_picture(op, "out", out, out_strides, 4));
    if (bias != nullptr) FP4BF16_TRY(check_pointer(op, "bias", bias, 4));
    const int64_t none[3] = {};
    Gather g{{y, y_strides != nullptr ? y_strides : none}, {out, out_strides}, bias};
    g.h = static_cast<int>(h), g.w = static_cast<int>(w), g.oh = static_cast<int>(oh);
    g.ow = static_cast<int>(ow), g.o = static_cast<int>(o), g.taps = taps;
    if (!choose_tile(&g))
        return fail(FP4BF16_INVALID_ARGUMENT,
                    "gather_taps: the neighbours of one pixel are %lld x %lld of %lld values, but at most %d "
                    "values in all are taken; use conv2d",
                    static_cast<long long>(kh), static_cast<long long>(kw),
                    static_cast<long long>(kh * kw * o), kTileBytes / 4);
    g.tiles_h = static_cast<int>(ceil_div(oh, g.tile_h)),
    g.tiles_w = static_cast<int>(ceil_div(ow, g.tile_w));
    g.tiles = n * g.tiles_h * g.tiles_w;
    const auto grid = static_cast<unsigned>(g.tiles < 0x7FFFFFFF ? g.tiles : 0x7FFFFFFF);
    const auto kernel = kh == 3 && kw == 3 ? gather_kernel<3> : gather_kernel<0>;
    kernel<<<grid, kThreads, tile_bytes(g.tile_h, g.tile_w, o, taps), static_cast<cudaStream_t>(stream)>>>(g);
    return cuda_result(cudaGetLastError(), op);
}
