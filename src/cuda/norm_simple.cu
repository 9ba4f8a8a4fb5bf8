// Group normalisation of any shape and strides: thread blocks of one group each for the sums, then threads of
// one element or one block of 16. x is read three times.
#include "launch.cuh"
#include "norm_apply.cuh"
#include "norm_quantize.cuh"
#include "norm_sums.cuh"

namespace fp4bf16 {
namespace {

constexpr int kWarps = kThreads / 32;

unsigned most_blocks(int64_t count) { return static_cast<unsigned>(count < 0x7FFFFFFF ? count : 0x7FFFFFFF); }

// Sum over the thread block, the same in every thread.
__device__ inline float block_sum(float v) {
    __shared__ float warps[kWarps];
    for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0.0f;
    for (int i = 0; i < kWarps; ++i) v += warps[i];
    return v;
}

// The elements of a group that a thread takes, without divisions: every kThreads-th of (pixels, channels).
template <typename Function>
__device__ inline void each_element(const __nv_bfloat16* x, int64_t pixels, int64_t pixel_stride,
                                    int64_t width, const Function& function) {
    const int64_t down = kThreads / width, right = kThreads % width;
    int64_t pixel = threadIdx.x / width, channel = threadIdx.x % width;
    while (pixel < pixels) {
        function(load(x + pixel * pixel_stride + channel));
        pixel += down, channel += right;
        if (channel >= width) channel -= width, ++pixel;
    }
}

__global__ void __launch_bounds__(kThreads)
    statistics_kernel(const __grid_constant__ fp4bf16_group_norm_args a, float* mean_out, float* rstd_out) {
    if (skipped(a.run_if)) return;
    wait_for_previous();
    const int64_t width = a.c / a.groups;
    const auto count = static_cast<float>(a.pixels * width);
    for (int64_t i = blockIdx.x; i < a.n * a.groups; i += gridDim.x) {
        const auto* x =
            static_cast<const __nv_bfloat16*>(a.x) + i / a.groups * a.x_image + i % a.groups * width;
        const float first = load(x);
        float sum = 0.0f, square = 0.0f;
        each_element(x, a.pixels, a.x_pixel, width, [&](float v) { sum += v - first; });
        const float mean = first + block_sum(sum) / count;
        each_element(x, a.pixels, a.x_pixel, width,
                     [&](float v) { square = __fmaf_rn(v - mean, v - mean, square); });
        square = block_sum(square);
        if (threadIdx.x == 0) mean_out[i] = mean, rstd_out[i] = 1.0f / sqrtf(square / count + a.eps);
    }
}

__device__ inline float activated(float z, fp4bf16_activation activation) {
    return activation == FP4BF16_SILU ? z * sigmoid(z) : z;
}

// BF16 results alone.
__global__ void __launch_bounds__(kThreads)
    elements_kernel(const __grid_constant__ fp4bf16_group_norm_args a, const float* mean, const float* rstd) {
    if (skipped(a.run_if)) return;
    wait_for_previous();
    const int64_t step = int64_t{gridDim.x} * kThreads, width = a.c / a.groups;
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < a.n * a.pixels * a.c; i += step) {
        const int64_t c = i % a.c, p = i / a.c % a.pixels, image = i / a.c / a.pixels;
        const int64_t group = image * a.groups + c / width;
        const float x = load(static_cast<const __nv_bfloat16*>(a.x) + image * a.x_image + p * a.x_pixel + c);
        const float z = affine(x, mean[group], a.gamma[c] * rstd[group], a.beta[c]);
        store(static_cast<__nv_bfloat16*>(a.y) + image * a.y_image + p * a.y_pixel + c,
              activated(z, a.activation));
    }
}

// FP4 results, and BF16 ones beside them.
template <bool kNorms>
__global__ void __launch_bounds__(kThreads) blocks_kernel(const __grid_constant__ fp4bf16_group_norm_args a,
                                                          const float* mean, const float* rstd, float root) {
    if (skipped(a.run_if)) return;
    wait_for_previous();
    const int64_t step = int64_t{gridDim.x} * kThreads, width = a.c / a.groups, blocks = a.c / 16;
    const Outer o = static_outer(a, root);
    if (blockIdx.x == 0 && threadIdx.x == 0) *a.outer_scale = o.decode;
    const FourBit to(a, 0);
    BlockNorms norms;
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < a.n * a.pixels * blocks; i += step) {
        const int64_t first = i % blocks * 16, p = i / blocks % a.pixels, image = i / blocks / a.pixels;
        const auto* x = static_cast<const __nv_bfloat16*>(a.x) + image * a.x_image + p * a.x_pixel + first;
        auto* y = static_cast<__nv_bfloat16*>(a.y) + image * a.y_image + p * a.y_pixel + first;
        float results[16];
        for (int j = 0; j < 16; ++j) {
            const int64_t c = first + j, group = image * a.groups + c / width;
            const float z = affine(load(x + j), mean[group], a.gamma[c] * rstd[group], a.beta[c]);
            const __nv_bfloat16 rounded = __float2bfloat16_rn(activated(z, a.activation));
            if (a.y != nullptr) y[j] = rounded;
            results[j] = load(&rounded);
        }
        if constexpr (kNorms)
            norms.add(measured_block16(results, o, to, i));
        else
            simple_block16(results, o, to, i);
    }
    if constexpr (kNorms) {
        __shared__ BlockNorms warps[kWarps];
        store_norms(a, norms, o.decode, warps, blockIdx.x);
    }
}

// ---- backward
struct Room {
    float* partial;  // (2, n, c): sums of u * h, of u, over an image's pixels
    float* d;        // (n, c): sums of x - mean
    float* group;    // (n, groups, 2): rstd * mean(u gamma), rstd^2 * mean(u gamma h)

    Room(const fp4bf16_group_norm_backward_args& a, float* workspace)
        : partial(workspace), d(partial + 2 * a.n * a.c), group(d + a.n * a.c) {}
};

__device__ inline float gradient_before(float g, float z, fp4bf16_activation activation) {
    if (activation == FP4BF16_NONE) return g;
    const float s = sigmoid(z);
    return g * (s * __fmaf_rn(z, 1.0f - s, 1.0f));
}

// Sums over the pixels of up to 32 channels from `first` on: a thread a channel, a warp every eighth pixel.
// True in the warp that holds them in the end.
__device__ inline bool channel_sums(const fp4bf16_group_norm_backward_args& a, int64_t image, int64_t first,
                                    int64_t end, float mean, float rstd, float (&sums)[3]) {
    __shared__ float parts[3][kWarps][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t c = first + lane;
    for (float& sum : sums) sum = 0.0f;
    if (c < end) {
        const auto* x = static_cast<const __nv_bfloat16*>(a.x) + image * a.x_image + c;
        const auto* g = static_cast<const __nv_bfloat16*>(a.g) + image * a.g_image + c;
        const float scale = a.gamma[c] * rstd, shift = a.beta[c];
        for (int64_t p = warp; p < a.pixels; p += kWarps) {
            const float d = load(x + p * a.x_pixel) - mean;
            const float u =
                gradient_before(load(g + p * a.g_pixel), __fmaf_rn(d, scale, shift), a.activation);
            sums[0] += u, sums[1] = __fmaf_rn(u, d, sums[1]), sums[2] += d;
        }
    }
    __syncthreads();
    for (int k = 0; k < 3; ++k) parts[k][warp][lane] = sums[k];
    __syncthreads();
    for (int k = 0; k < 3; ++k) {
        sums[k] = 0.0f;
        for (int i = 0; i < kWarps; ++i) sums[k] += parts[k][i][lane];
    }
    return warp == 0 && c < end;
}

__global__ void __launch_bounds__(kThreads)
    sums_kernel(const __grid_constant__ fp4bf16_group_norm_backward_args a, const Room room) {
    wait_for_previous();
    const int64_t width = a.c / a.groups;
    const float inverse = 1.0f / (static_cast<float>(a.pixels) * static_cast<float>(width));
    for (int64_t i = blockIdx.x; i < a.n * a.groups; i += gridDim.x) {
        const int64_t image = i / a.groups, start = i % a.groups * width, end = start + width;
        const float mean = a.mean[i], rstd = a.rstd[i];
        float first = 0.0f, second = 0.0f;
        for (int64_t from = start; from < end; from += 32) {
            float sums[3];
            const int64_t c = from + threadIdx.x % 32, at = image * a.c + c;
            if (!channel_sums(a, image, from, end, mean, rstd, sums)) continue;
            room.partial[at] = sums[1] * rstd;
            room.partial[a.n * a.c + at] = sums[0];
            room.d[at] = sums[2];
            first = __fmaf_rn(a.gamma[c], sums[0], first);
            second = __fmaf_rn(a.gamma[c], sums[1] * rstd, second);
        }
        first = rstd * (block_sum(first) * inverse);
        second = rstd * rstd * (block_sum(second) * inverse);
        if (threadIdx.x == 0) room.group[2 * i] = first, room.group[2 * i + 1] = second;
        if (a.dshift == nullptr) continue;
        for (int64_t c = start + threadIdx.x; c < end; c += kThreads) {
            const int64_t at = image * a.c + c;
            const float u = room.partial[a.n * a.c + at] * (a.gamma[c] * rstd);
            a.dshift[at] = u - static_cast<float>(a.pixels) * first - second * room.d[at];
        }
    }
}

__global__ void __launch_bounds__(kThreads)
    gradient_kernel(const __grid_constant__ fp4bf16_group_norm_backward_args a, const float* group_sums) {
    wait_for_previous();
    const int64_t step = int64_t{gridDim.x} * kThreads, width = a.c / a.groups;
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < a.n * a.pixels * a.c; i += step) {
        const int64_t c = i % a.c, p = i / a.c % a.pixels, image = i / a.c / a.pixels;
        const int64_t group = image * a.groups + c / width;
        const float scale = a.gamma[c] * a.rstd[group];
        const auto* x = static_cast<const __nv_bfloat16*>(a.x) + image * a.x_image + p * a.x_pixel + c;
        const auto* g = static_cast<const __nv_bfloat16*>(a.g) + image * a.g_image + p * a.g_pixel + c;
        const float d = load(x) - a.mean[group];
        const float u = gradient_before(load(g), __fmaf_rn(d, scale, a.beta[c]), a.activation);
        float dx = __fmaf_rn(u, scale, __fmaf_rn(d, -group_sums[2 * group + 1], -group_sums[2 * group]));
        if (a.add != nullptr)
            dx += load(static_cast<const __nv_bfloat16*>(a.add) + image * a.add_image + p * a.add_pixel + c);
        store(static_cast<__nv_bfloat16*>(a.dx) + image * a.dx_image + p * a.dx_pixel + c, dx);
    }
}

// A thread block adds 32 columns, 32 rows at a time.
__global__ void __launch_bounds__(1024)
    add_partials_kernel(const float* partial, int64_t rows, int64_t c, float* dgamma, float* dbeta) {
    wait_for_previous();
    __shared__ float parts[32][33];
    float* to = blockIdx.y == 0 ? dgamma : dbeta;
    if (to == nullptr) return;
    for (int64_t first = int64_t{blockIdx.x} * 32; first < c; first += int64_t{gridDim.x} * 32) {
        const int64_t column = first + threadIdx.x;
        const float* from = partial + blockIdx.y * rows * c + column;
        float sum = 0.0f;
        if (column < c)
#pragma unroll 8
            for (int64_t row = threadIdx.y; row < rows; row += 32) sum += from[row * c];
        __syncthreads();
        parts[threadIdx.y][threadIdx.x] = sum;
        __syncthreads();
        sum = parts[threadIdx.x][threadIdx.y];
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
        if (threadIdx.x == 0 && first + threadIdx.y < c) to[first + threadIdx.y] += sum;
    }
}

// ---- statistics from given sums, a warp a group
__global__ void __launch_bounds__(kThreads)
    given_kernel(const __grid_constant__ fp4bf16_group_norm_args a, float* mean, float* rstd) {
    if (skipped(a.run_if)) return;
    wait_for_previous();
    const int64_t group = a.c / a.groups;
    const double inverse_count = 1.0 / (static_cast<double>(a.pixels) * static_cast<double>(group));
    for (int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; i < a.n * a.groups;
         i += int64_t{gridDim.x} * kWarps) {
        double sum = 0.0, square = 0.0;
        for (int64_t j = threadIdx.x % 32; j < group; j += 32) {
            const float2 v = channel_sums(a, i / a.groups, i % a.groups * group + j);
            sum += v.x, square += v.y;
        }
        for (int step = 1; step < 32; step *= 2) {
            sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
            square += __shfl_xor_sync(0xFFFFFFFFu, square, step);
        }
        const float2 m = statistics(sum, square, inverse_count, a.eps);
        if (threadIdx.x % 32 == 0) mean[i] = m.x, rstd[i] = m.y;
    }
}

}  // namespace

int64_t norm_simple_parts(const fp4bf16_group_norm_args& a) {
    return grid_for(a.n * a.pixels * (a.c / 16));
}

fp4bf16_status norm_simple_results(const fp4bf16_group_norm_args& a, const float* mean, const float* rstd,
                                   cudaStream_t stream) {
    if (a.expanded != nullptr || a.packed != nullptr)
        launch_kernel(a.norms == nullptr ? blocks_kernel<false> : blocks_kernel<true>,
                      static_cast<unsigned>(norm_simple_parts(a)), kThreads, 0, stream, a, mean, rstd,
                      root_up(a.pixels * (a.c / a.groups)));
    else if (a.y != nullptr)
        launch_kernel(elements_kernel, grid_for(a.n * a.pixels * a.c), kThreads, 0, stream, a, mean, rstd);
    return cuda_result(cudaGetLastError(), "group_norm");
}

fp4bf16_status norm_simple(const fp4bf16_group_norm_args& a, float* mean, float* rstd, cudaStream_t stream) {
    launch_kernel(statistics_kernel, most_blocks(a.n * a.groups), kThreads, 0, stream, a, mean, rstd);
    return norm_simple_results(a, mean, rstd, stream);
}

fp4bf16_status norm_apply_simple(const fp4bf16_group_norm_args& a, float* mean, float* rstd,
                                 cudaStream_t stream) {
    launch_kernel(given_kernel, grid_for(a.n * a.groups * 32), kThreads, 0, stream, a, mean, rstd);
    return norm_simple_results(a, mean, rstd, stream);
}

fp4bf16_status norm_backward_simple(const fp4bf16_group_norm_backward_args& a, float* workspace,
                                    cudaStream_t stream) {
    const Room room(a, workspace);
    launch_kernel(sums_kernel, most_blocks(a.n * a.groups), kThreads, 0, stream, a, room);
    launch_kernel(gradient_kernel, grid_for(a.n * a.pixels * a.c), kThreads, 0, stream, a, room.group);
    FP4BF16_TRY(cuda_result(cudaGetLastError(), "group_norm_backward"));
    if (a.dgamma == nullptr && a.dbeta == nullptr) return FP4BF16_OK;
    return norm_add_partials(room.partial, a.n, a.c, a.dgamma, a.dbeta, stream);
}

fp4bf16_status norm_add_partials(const float* partial, int64_t rows, int64_t c, float* dgamma, float* dbeta,
                                 cudaStream_t stream) {
    const int64_t columns = ceil_div(c, 32);
    const dim3 grid(static_cast<unsigned>(columns < 65535 ? columns : 65535), 2), block(32, 32);
    launch_kernel(add_partials_kernel, grid, block, 0, stream, partial, rows, c, dgamma, dbeta);
    return cuda_result(cudaGetLastError(), "group_norm_backward");
}

}  // namespace fp4bf16
