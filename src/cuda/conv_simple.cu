// Convolution and its two gradients by kernels that read like the formulas of fp4bf16.h, one thread an
// element of the result: what the fast ones are checked with on the device, and what other GPUs than sm_90
// run.
#include "conv.h"
#include "launch.cuh"
#include "quantize.cuh"
#include "simple.cuh"

namespace fp4bf16 {
namespace {

// Element (i, y, x, 0) of a picture.
__device__ int64_t at(const int64_t (&strides)[3], int64_t i, int64_t y, int64_t x) {
    return i * strides[0] + y * strides[1] + x * strides[2];
}

// Place of an element in an array (n, h, w, c) without gaps.
struct Place {
    int64_t i, y, x, c;
    __device__ Place(int64_t element, int64_t h, int64_t w, int64_t channels)
        : i(element / channels / w / h),
          y(element / channels / w % h),
          x(element / channels % w),
          c(element % channels) {}
};

// One track: X conv W at one element of the result, FP32 FMAs in the order of the taps, then the channels.
// With phases the pixel's place in its 2 x 2 tells which of the weight's kernels it meets, and where.
template <typename T>
struct Track {
    const T *x, *w;
    const int64_t (&strides)[3];
    int64_t w_stride, channels, h, width, kh, kw, stride, top, left;
    int phases;

    __device__ float sum(const Place& p) const {
        float total = 0.0f;
        const int64_t a = phases != 0 ? p.y % 2 : 0, b = phases != 0 ? p.x % 2 : 0;
        const int64_t first_y = phases != 0 ? p.y / 2 + a : p.y * stride;
        const int64_t first_x = phases != 0 ? p.x / 2 + b : p.x * stride;
        const T* kernel = w + p.c * w_stride + (2 * a + b) * kh * kw * channels;
        for (int64_t r = 0; r < kh; ++r)
            for (int64_t s = 0; s < kw; ++s) {
                const int64_t y = first_y + r - top, column = first_x + s - left;
                if (y < 0 || y >= h || column < 0 || column >= width) continue;
                const T* pixel = x + at(strides, p.i, y, column);
                const T* tap = kernel + (r * kw + s) * channels;
                for (int64_t c = 0; c < channels; ++c)
                    total = __fmaf_rn(decode(pixel[c]), decode(tap[c]), total);
            }
        return total;
    }
};

// The scales stand between the two tracks: the FP4 sum is multiplied, the BF16 sum then added to it.
__global__ void __launch_bounds__(kThreads) conv2d_kernel(const __grid_constant__ fp4bf16_conv2d_args a) {
    if (skipped(a.run_if)) return;
    wait_for_previous();
    const Track<uint8_t> fp4{a.x8, a.w8, a.x8_strides, a.w8_stride, a.c8,   a.h,     a.w,
                             a.kh, a.kw, a.stride,     a.top,       a.left, a.phases};
    const bool own_grid = a.x16_on_output == 0;
    const Track<__nv_bfloat16> bf16{static_cast<const __nv_bfloat16*>(a.x16),
                                    static_cast<const __nv_bfloat16*>(a.w16),
                                    a.x16_strides,
                                    a.w16_stride,
                                    a.c16,
                                    own_grid ? a.h : a.oh,
                                    own_grid ? a.w : a.ow,
                                    own_grid ? a.kh : 1,
                                    own_grid ? a.kw : 1,
                                    own_grid ? a.stride : 1,
                                    own_grid ? a.top : 0,
                                    own_grid ? a.left : 0,
                                    a.phases};
    const int64_t elements = a.n * a.oh * a.ow * a.o;
    for (int64_t e = blockIdx.x * int64_t{kThreads} + threadIdx.x; e < elements;
         e += int64_t{kThreads} * gridDim.x) {
        const Place p(e, a.oh, a.ow, a.o);
        float scale = a.image_scale != nullptr ? a.image_scale[p.i * a.image_scale_step] : 1.0f;
        const int64_t column = a.phases != 0 ? 4 * p.c + 2 * (p.y % 2) + p.x % 2 : p.c;
        if (a.col_scale != nullptr) scale *= a.col_scale[column * a.col_scale_step];
        float v = a.c8 > 0 ? scale * fp4.sum(p) + bf16.sum(p) : scale * bf16.sum(p);
        v *= a.alpha;
        if (a.bias != nullptr) v += read(a.bias, p.c, a.bias_dtype);
        if (a.bias2 != nullptr) v += read(a.bias2, p.c, a.bias_dtype);
        if (a.image_bias != nullptr)
            v += read(a.image_bias, p.i * a.image_bias_stride + p.c, a.image_bias_dtype);
        v = activate(v, a.activation);
        if (a.residual != nullptr)
            v += read(a.residual, at(a.residual_strides, p.i, p.y, p.x) + p.c, a.residual_dtype);
        write(a.d, at(a.d_strides, p.i, p.y, p.x) + p.c, a.d_dtype, v);
    }
}

// Image, part and channel a thread: sums of what is stored. Parts are runs of pixels, as equal as can be.
__global__ void __launch_bounds__(kThreads)
    sums_kernel(const __grid_constant__ fp4bf16_conv2d_args a, int64_t parts) {
    if (skipped(a.run_if)) return;
    wait_for_previous();
    const auto* d = static_cast<const __nv_bfloat16*>(a.d);
    const int64_t elements = a.n * parts * a.o, pixels = a.oh * a.ow;
    for (int64_t e = blockIdx.x * int64_t{kThreads} + threadIdx.x; e < elements;
         e += int64_t{kThreads} * gridDim.x) {
        const int64_t c = e % a.o, part = e / a.o % parts, i = e / a.o / parts;
        float sum = 0.0f, squares = 0.0f;
        for (int64_t p = part * pixels / parts; p < (part + 1) * pixels / parts; ++p) {
            const float v = decode(d[at(a.d_strides, i, p / a.ow, p % a.ow) + c]);
            sum += v;
            squares = __fmaf_rn(v, v, squares);
        }
        a.sums[2 * e] = sum, a.sums[2 * e + 1] = squares;
    }
}

// Sixteen channels a thread, by the quantiser's definition.
__global__ void __launch_bounds__(kThreads) expand_kernel(const __grid_constant__ fp4bf16_conv2d_args a) {
    if (skipped(a.run_if)) return;
    wait_for_previous();
    const auto* d = static_cast<const __nv_bfloat16*>(a.d);
    const Rule rule = {FP4BF16_NVFP4_EXACT, FP4BF16_RULE_DEFAULT, false, false};
    const Outer outer = {power_of_two(-a.expanded_exponent), power_of_two(a.expanded_exponent), 0.0f};
    const int64_t blocks = a.n * a.oh * a.ow * (a.o / 16);
    for (int64_t b = blockIdx.x * int64_t{kThreads} + threadIdx.x; b < blocks;
         b += int64_t{kThreads} * gridDim.x) {
        const Place p(b, a.oh, a.ow, a.o / 16);
        const __nv_bfloat16* from = d + at(a.d_strides, p.i, p.y, p.x) + 16 * p.c;
        float x[16];
        for (int j = 0; j < 16; ++j) x[j] = decode(from[j]);
        Philox unused(0, 0, 0);
        Codes<16> codes;
        int counts[kCounts] = {};
        quantize_block(x, 16, 16, rule, outer, &unused, 0, 0, false, &codes, counts);
        for (int j = 0; j < 16; ++j)
            a.expanded[16 * b + j] = static_cast<uint8_t>(expanded_byte(codes.code[j], codes.byte));
    }
}

// What a pixel of the picture gets from the phases that were written from it.
__device__ float phase_gradient(const fp4bf16_conv2d_dgrad_args& a, const __nv_bfloat16* g,
                                const __nv_bfloat16* w, const Place& p) {
    float v = 0.0f;
    for (int64_t t = 0; t < 4 * a.kh * a.kw; ++t) {
        const int64_t phase = t / (a.kh * a.kw), r = t / a.kw % a.kh, s = t % a.kw;
        const int64_t y = 2 * (p.y + a.top - r) - phase / 2, x = 2 * (p.x + a.left - s) - phase % 2;
        if (y < 0 || y >= a.oh || x < 0 || x >= a.ow) continue;
        const __nv_bfloat16* pixel = g + at(a.g_strides, p.i, y, x);
        for (int64_t o = 0; o < a.o; ++o)
            v = __fmaf_rn(decode(pixel[o]), decode(w[o * a.w16_stride + t * a.c + p.c]), v);
    }
    return v;
}

// A pixel of the picture takes from those of the result that lie a whole number of strides before it.
__global__ void __launch_bounds__(kThreads)
    dgrad_kernel(const __grid_constant__ fp4bf16_conv2d_dgrad_args a) {
    wait_for_previous();
    const auto* g = static_cast<const __nv_bfloat16*>(a.g);
    const auto* w = static_cast<const __nv_bfloat16*>(a.w16);
    const int64_t elements = a.n * a.h * a.w * a.c;
    for (int64_t e = blockIdx.x * int64_t{kThreads} + threadIdx.x; e < elements;
         e += int64_t{kThreads} * gridDim.x) {
        const Place p(e, a.h, a.w, a.c);
        float v = a.phases != 0 ? phase_gradient(a, g, w, p) : 0.0f;
        for (int64_t r = 0; r < a.kh && a.phases == 0; ++r)
            for (int64_t s = 0; s < a.kw; ++s) {
                const int64_t y = p.y + a.top - r, x = p.x + a.left - s;
                if (y < 0 || y % a.stride != 0 || y / a.stride >= a.oh) continue;
                if (x < 0 || x % a.stride != 0 || x / a.stride >= a.ow) continue;
                const __nv_bfloat16* pixel = g + at(a.g_strides, p.i, y / a.stride, x / a.stride);
                const __nv_bfloat16* tap = w + (r * a.kw + s) * a.c + p.c;
                for (int64_t o = 0; o < a.o; ++o)
                    v = __fmaf_rn(decode(pixel[o]), decode(tap[o * a.w16_stride]), v);
            }
        if (a.residual != nullptr)
            v += read(a.residual, at(a.residual_strides, p.i, p.y, p.x) + p.c, a.residual_dtype);
        write(a.dx, at(a.dx_strides, p.i, p.y, p.x) + p.c, a.dx_dtype, v);
    }
}

// Each row of pixels is summed in FP32, the rows in FP64: there can be millions of pixels. Element
// (o, kh * kw * c) of a row of dw is that of db.
__global__ void __launch_bounds__(kThreads)
    wgrad_kernel(const __grid_constant__ fp4bf16_conv2d_wgrad_args a) {
    wait_for_previous();
    const auto* g = static_cast<const __nv_bfloat16*>(a.g);
    const auto* x = static_cast<const __nv_bfloat16*>(a.x);
    const int64_t columns = a.kh * a.kw * a.c, width = columns + (a.db != nullptr ? 1 : 0);
    for (int64_t e = blockIdx.x * int64_t{kThreads} + threadIdx.x; e < a.o * width;
         e += int64_t{kThreads} * gridDim.x) {
        const int64_t o = e / width, column = e % width;
        const bool bias = column == columns;
        const int64_t tap = bias ? 0 : column / a.c, c = bias ? 0 : column % a.c;
        const int64_t r = tap / a.kw - a.top, s = tap % a.kw - a.left;
        double total = 0.0;
        for (int64_t line = 0; line < a.n * a.oh; ++line) {
            const int64_t i = line / a.oh, p = line % a.oh, y = p * a.stride + r;
            if (!bias && (y < 0 || y >= a.h)) continue;
            float sum = 0.0f;
            for (int64_t q = 0; q < a.ow; ++q) {
                const int64_t z = q * a.stride + s;
                if (!bias && (z < 0 || z >= a.w)) continue;
                const float other = bias ? 1.0f : decode(x[at(a.x_strides, i, y, z) + c]);
                sum = __fmaf_rn(decode(g[at(a.g_strides, i, p, q) + o]), other, sum);
            }
            total += sum;
        }
        float* d = bias ? a.db + o : a.dw + o * a.dw_stride + column;
        *d = static_cast<float>(a.accumulate != 0 ? total + *d : total);
    }
}

}  // namespace

fp4bf16_status simple_conv2d(const char* op, const fp4bf16_conv2d_args& args, int64_t parts,
                             cudaStream_t stream) {
    launch_kernel(conv2d_kernel, grid_for(args.n * args.oh * args.ow * args.o), kThreads, 0, stream, args);
    FP4BF16_TRY(cuda_result(cudaGetLastError(), op));
    if (args.sums != nullptr) {
        launch_kernel(sums_kernel, grid_for(args.n * parts * args.o), kThreads, 0, stream, args, parts);
        FP4BF16_TRY(cuda_result(cudaGetLastError(), op));
    }
    return args.expanded == nullptr ? FP4BF16_OK : simple_expand_result(op, args, stream);
}

fp4bf16_status simple_expand_result(const char* op, const fp4bf16_conv2d_args& args, cudaStream_t stream) {
    const int64_t blocks = args.n * args.oh * args.ow * (args.o / 16);
    launch_kernel(expand_kernel, grid_for(blocks), kThreads, 0, stream, args);
    return cuda_result(cudaGetLastError(), op);
}

fp4bf16_status simple_conv2d_dgrad(const char* op, const fp4bf16_conv2d_dgrad_args& args,
                                   cudaStream_t stream) {
    launch_kernel(dgrad_kernel, grid_for(args.n * args.h * args.w * args.c), kThreads, 0, stream, args);
    return cuda_result(cudaGetLastError(), op);
}

fp4bf16_status simple_conv2d_wgrad(const char* op, const fp4bf16_conv2d_wgrad_args& args,
                                   cudaStream_t stream) {
    launch_kernel(wgrad_kernel, grid_for(args.o * (args.kh * args.kw * args.c + 1)), kThreads, 0, stream,
                  args);
    return cuda_result(cudaGetLastError(), op);
}

}  // namespace fp4bf16
