// What makes a convolution of few channels a 1x1 convolution: of pictures of few channels their patches side
// by side; of the gradient in few outputs what each tap hands back. Memory bounds these kernels.
#include "common.h"
#include "launch.cuh"
#include "pictures.cuh"

namespace fp4bf16 {
namespace {

using bf16 = __nv_bfloat16;

constexpr int64_t kMostSide = int64_t{1} << 28;  // of a picture and a line of results: places are ints
constexpr int64_t kMostKernel = int64_t{1} << 15;
constexpr int kValues = 8;  // elements that a thread makes at once: 16 bytes of BF16

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
    const int32_t* run_if;
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
    if (!kSpread && skipped(p.run_if)) return;
    wait_for_previous();
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
    launch_kernel(patches_kernel<T, kSpread>, static_cast<unsigned>(ceil_div(all, turns)), block, 0,
                  static_cast<cudaStream_t>(stream), p);
}

template <bool kSpread>
void patches(const void* x, fp4bf16_dtype dtype, const int64_t* strides, int64_t h, int64_t w, int64_t c,
             const Taps& taps, int64_t n, int64_t oh, int64_t ow, void* out, int64_t width,
             const int32_t* run_if, void* stream) {
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
                                    static_cast<bf16*>(out),
                                    run_if},
                                   stream);
    };
    if (dtype == FP4BF16_FLOAT32)
        with(float{});
    else
        with(bf16{});
}

// ---- checks
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
                                          void* out, int64_t width, const int32_t* run_if, void* stream) {
    const char* op = "patches";
    FP4BF16_TRY(check_run_if(op, run_if));
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
                   run_if, stream);
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
                  nullptr, stream);
    return cuda_result(cudaGetLastError(), op);
}
