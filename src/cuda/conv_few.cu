// Convolution to few outputs, as a network's last one to three colours: each pixel's products with all taps
// are made once, as a 1x1 convolution whose outputs are (o, r, s), and stay in shared memory, where each
// result adds up those that its neighbours hold for it. Memory bounds it: pictures are read once, but for the
// rim of a tile.
#include "common.h"
#include "launch.cuh"
#include "mma.cuh"
#include "pictures.cuh"

namespace fp4bf16 {
namespace {

constexpr int kFew = 128;          // threads of a block: more blocks, whose loads and sums overlap
constexpr int kMostProducts = 64;  // o * kh * kw
constexpr int kMostChannels = 1024;
constexpr int kPixels = 32;  // of a warp at a time: two fragments

struct Few {
    Picture<const __nv_bfloat16> x;
    Picture<float> out;
    const __nv_bfloat16* weight;  // (values, c)
    const float* bias;
    int h, w, c, oh, ow, o, kh, kw, top, left;
    int values, stride;                   // o * kh * kw; floats from pixel to pixel of a tile
    int chunks, row_chunks;               // of 8 channels; of a weight row in shared memory, a multiple of 8
    int tile_h, tile_w, columns, region;  // results; pixels of a line and of all that they meet
    int64_t tiles;
    int tiles_h, tiles_w;
    const int32_t* run_if;

    __host__ __device__ int weight_chunks() const { return (values > 32 ? 64 : 32) * row_chunks; }
    int shared_bytes() const { return weight_chunks() * 16 + region * stride * 4; }
};

// Sixteen bytes of a weight row in shared memory: rows that differ in parity lie in other halves of a line of
// banks, so that the eight threads which read together meet no bank twice.
__device__ inline int weight_chunk(const Few& p, int row, int chunk) {
    return row * p.row_chunks + (chunk ^ (row % 2 * 4));
}

__device__ inline void copy_weight(const Few& p, uint4* to) {
    for (int i = threadIdx.x; i < p.weight_chunks(); i += kFew) {
        const int row = i / p.row_chunks, chunk = i - row * p.row_chunks;
        uint4 found = make_uint4(0, 0, 0, 0);
        if (row < p.values && chunk < p.chunks)
            found = __ldg(reinterpret_cast<const uint4*>(p.weight + int64_t{row} * p.c) + chunk);
        to[weight_chunk(p, row, chunk)] = found;
    }
}

// Products of 32 pixels with all taps, kParts times eight. The order of channels within a step of the tensor
// cores is free as long as both factors share it: a thread's 16 bytes are its parts of two steps.
template <int kParts>
__device__ inline void multiply(const Few& p, const __nv_bfloat16* const (&pixel)[4], const uint4* weight,
                                float (&sum)[2][kParts][4]) {
    const int row = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
#pragma unroll 2
    for (int j = quarter; j < p.row_chunks; j += 4) {
        uint4 a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a[i] = make_uint4(0, 0, 0, 0);
            if (pixel[i] != nullptr && j < p.chunks)
                a[i] = __ldg(reinterpret_cast<const uint4*>(pixel[i]) + j);
        }
#pragma unroll
        for (int n = 0; n < kParts; ++n) {
            const uint4 b = weight[weight_chunk(p, 8 * n + row, j)];
#pragma unroll
            for (int f = 0; f < 2; ++f) {
                mma(sum[f][n], a[2 * f].x, a[2 * f + 1].x, a[2 * f].y, a[2 * f + 1].y, b.x, b.y);
                mma(sum[f][n], a[2 * f].z, a[2 * f + 1].z, a[2 * f].w, a[2 * f + 1].w, b.z, b.w);
            }
        }
    }
}

// The products of a tile's pixels, of which (y0, x0) is the first; pixels outside have none.
template <int kParts>
__device__ inline void make_products(const Few& p, int64_t image, int y0, int x0, const uint4* weight,
                                     float* tile) {
    const int row = threadIdx.x % 32 / 4;
    for (int first = threadIdx.x / 32 * kPixels; first < p.region; first += kFew / 32 * kPixels) {
        const __nv_bfloat16* pixel[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = first + 8 * i + row, line = at / p.columns;
            const int y = y0 + line, x = x0 + at - line * p.columns;
            const bool inside = at < p.region && static_cast<unsigned>(y) < static_cast<unsigned>(p.h) &&
                                static_cast<unsigned>(x) < static_cast<unsigned>(p.w);
            pixel[i] = inside ? p.x.at(image, y, x) : nullptr;
        }
        float sum[2][kParts][4] = {};
        multiply(p, pixel, weight, sum);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = first + 8 * i + row;
            if (at >= p.region) continue;
#pragma unroll
            for (int n = 0; n < kParts; ++n) {
                const int value = 8 * n + threadIdx.x % 4 * 2;
                if (value < p.stride)
                    *reinterpret_cast<float2*>(tile + at * p.stride + value) =
                        make_float2(sum[i / 2][n][i % 2 * 2], sum[i / 2][n][i % 2 * 2 + 1]);
            }
        }
    }
}

// kSide: the kernel's, 0: any.
template <int kSide>
__device__ inline void add_taps(const Few& p, int64_t image, int oy, int ox, const float* tile) {
    const int kh = kSide > 0 ? kSide : p.kh, kw = kSide > 0 ? kSide : p.kw;
    for (int i = threadIdx.x; i < p.tile_h * p.tile_w * p.o; i += kFew) {
        const int pixel = i / p.o, o = i - pixel * p.o, y = pixel / p.tile_w, x = pixel - y * p.tile_w;
        if (oy + y >= p.oh || ox + x >= p.ow) continue;
        const float* from = tile + (y * p.columns + x) * p.stride + o * kh * kw;
        float sum = 0.0f;
        for (int r = 0; r < kh; ++r)
            for (int s = 0; s < kw; ++s) sum += from[(r * p.columns + s) * p.stride + r * kw + s];
        if (p.bias != nullptr) sum += p.bias[o];
        p.out.at(image, oy + y, ox + x)[o] = sum;
    }
}

template <int kSide, int kParts>
__global__ void __launch_bounds__(kFew) few_kernel(const __grid_constant__ Few p) {
    if (skipped(p.run_if)) return;
    extern __shared__ uint4 few_memory[];
    wait_for_previous();
    auto* tile = reinterpret_cast<float*>(few_memory + p.weight_chunks());
    copy_weight(p, few_memory);
    for (int64_t t = blockIdx.x; t < p.tiles; t += gridDim.x) {
        __syncthreads();
        const int64_t row = quotient(t, p.tiles_w), image = quotient(row, p.tiles_h);
        const int oy = static_cast<int>(row - image * p.tiles_h) * p.tile_h;
        const int ox = static_cast<int>(t - row * p.tiles_w) * p.tile_w;
        make_products<kParts>(p, image, oy - p.top, ox - p.left, few_memory, tile);
        __syncthreads();
        add_taps<kSide>(p, image, oy, ox, tile);
    }
}

// Tiles as wide as a picture of up to 32 pixels, and eight high; lower, then narrower, where the kernel is
// large for `most` bytes of shared memory.
bool choose_tile(Few* p, int most) {
    const auto fits = [&](int h, int w) {
        p->tile_h = h, p->tile_w = w, p->columns = w + p->kw - 1;
        p->region = (h + p->kh - 1) * p->columns;
        return p->shared_bytes() <= most;
    };
    int h = p->oh < 8 ? p->oh : 8, w = p->ow < 32 ? p->ow : 32;
    while (h > 1 && !fits(h, w)) h /= 2;
    while (w > 1 && !fits(h, w)) w /= 2;
    return fits(h, w);
}

fp4bf16_status check(const char* op, int64_t n, int64_t h, int64_t w, int64_t c, int64_t oh, int64_t ow,
                     int64_t o, int64_t kh, int64_t kw, int64_t top, int64_t left) {
    FP4BF16_TRY(check_sizes(op, n, h, w, c));
    FP4BF16_TRY(check_sizes(op, n, oh, ow, o));
    const struct {
        const char* name;
        int64_t value, least, most;
    } ranges[] = {{"h", h, 0, 1 << 28},
                  {"w", w, 0, 1 << 28},
                  {"oh", oh, 0, 1 << 28},
                  {"ow", ow, 0, 1 << 28},
                  {"kh", kh, 1, 1 << 15},
                  {"kw", kw, 1, 1 << 15},
                  {"top", top, -(1 << 15), 1 << 15},
                  {"left", left, -(1 << 15), 1 << 15},
                  {"o", o, 0, kMostProducts}};
    for (const auto& range : ranges)
        if (range.value < range.least || range.value > range.most)
            return fail(FP4BF16_INVALID_ARGUMENT, "%s: %s is %lld, but must be %lld to %lld", op, range.name,
                        static_cast<long long>(range.value), static_cast<long long>(range.least),
                        static_cast<long long>(range.most));
    if (o * kh * kw > kMostProducts)
        return fail(
            FP4BF16_INVALID_ARGUMENT,
            "%s: there are %lld outputs of %lld x %lld taps, but at most %d in all are taken; use conv2d", op,
            static_cast<long long>(o), static_cast<long long>(kh), static_cast<long long>(kw), kMostProducts);
    if (c % 8 != 0 || c > kMostChannels)
        return fail(FP4BF16_INVALID_ARGUMENT,
                    "%s: c is %lld, but must be a multiple of 8 up to %d; pad the channels, or use conv2d",
                    op, static_cast<long long>(c), kMostChannels);
    return FP4BF16_OK;
}

fp4bf16_status check_vectors(const char* op, const int64_t* strides) {
    for (int axis = 0; axis < 3; ++axis)
        if (strides[axis] % 8 != 0)
            return fail(FP4BF16_INVALID_ARGUMENT,
                        "%s: stride %d of x is %lld elements, but must be a multiple of 8; copy x", op, axis,
                        static_cast<long long>(strides[axis]));
    return FP4BF16_OK;
}

template <int kSide, int kParts>
fp4bf16_status launch(const char* op, const Few& p, cudaStream_t stream) {
    const int bytes = p.shared_bytes();
    if (bytes > 48 * 1024)
        FP4BF16_TRY(cuda_result(cudaFuncSetAttribute(few_kernel<kSide, kParts>,
                                                     cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                                op));
    const auto grid = static_cast<unsigned>(p.tiles < 0x7FFFFFFF ? p.tiles : 0x7FFFFFFF);
    launch_kernel(few_kernel<kSide, kParts>, grid, kFew, bytes, stream, p);
    return cuda_result(cudaGetLastError(), op);
}

}  // namespace
}  // namespace fp4bf16

using namespace fp4bf16;

extern "C" fp4bf16_status fp4bf16_conv2d_few(const void* x, int64_t n, int64_t h, int64_t w, int64_t c,
                                             const int64_t x_strides[3], const void* weight, int64_t oh,
                                             int64_t ow, int64_t o, int64_t kh, int64_t kw, int64_t top,
                                             int64_t left, const float* bias, float* out,
                                             const int64_t out_strides[3], const int32_t* run_if,
                                             void* stream) {
    const char* op = "conv2d_few";
    FP4BF16_TRY(check_run_if(op, run_if));
    FP4BF16_TRY(check(op, n, h, w, c, oh, ow, o, kh, kw, top, left));
    if (n == 0 || oh == 0 || ow == 0 || o == 0) return FP4BF16_OK;
    const bool empty = h == 0 || w == 0 || c == 0;  // nothing to read: the biases alone
    const int64_t none[3] = {};
    if (!empty) {
        FP4BF16_TRY(check_picture(op, "x", x, x_strides, 16));
        FP4BF16_TRY(check_vectors(op, x_strides));
        FP4BF16_TRY(check_pointer(op, "weight", weight, 16));
    }
    FP4BF16_TRY(check_picture(op, "out", out, out_strides, 4));
    if (bias != nullptr) FP4BF16_TRY(check_pointer(op, "bias", bias, 4));
    Few p{{static_cast<const __nv_bfloat16*>(x), empty ? none : x_strides}, {out, out_strides}};
    p.weight = static_cast<const __nv_bfloat16*>(weight), p.bias = bias;
    p.h = static_cast<int>(empty ? 0 : h), p.w = static_cast<int>(w), p.c = static_cast<int>(c);
    p.oh = static_cast<int>(oh), p.ow = static_cast<int>(ow), p.o = static_cast<int>(o);
    p.kh = static_cast<int>(kh), p.kw = static_cast<int>(kw);
    p.top = static_cast<int>(top), p.left = static_cast<int>(left);
    p.values = p.o * p.kh * p.kw, p.stride = p.values + p.values % 2;
    p.chunks = empty ? 0 : p.c / 8, p.row_chunks = static_cast<int>(ceil_div(p.chunks, 8)) * 8;
    int device = 0, most = 0;
    FP4BF16_TRY(cuda_result(cudaGetDevice(&device), op));
    FP4BF16_TRY(
        cuda_result(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), op));
    if (!choose_tile(&p, most))
        return fail(FP4BF16_INVALID_ARGUMENT,
                    "%s: one result meets %lld x %lld pixels, which do not fit into the %d bytes of shared "
                    "memory; use conv2d",
                    op, static_cast<long long>(kh), static_cast<long long>(kw), most);
    p.tiles_h = static_cast<int>(ceil_div(oh, p.tile_h)),
    p.tiles_w = static_cast<int>(ceil_div(ow, p.tile_w));
    p.tiles = n * p.tiles_h * p.tiles_w, p.run_if = run_if;
    const auto s = static_cast<cudaStream_t>(stream);
    if (kh == 3 && kw == 3) return p.values > 32 ? launch<3, 8>(op, p, s) : launch<3, 4>(op, p, s);
    return p.values > 32 ? launch<0, 8>(op, p, s) : launch<0, 4>(op, p, s);
}
