// The weight of a convolution by phases (fp4bf16_conv2d_args.phases) from that of the 3x3 convolution which
// follows a nearest upsampling: the taps that meet the same pixel of the small picture are added up.
#include "common.h"
#include "launch.cuh"

namespace fp4bf16 {
namespace {

constexpr int kMost = 128;  // threads of a block, which makes one tap of an output channel

// The taps of one side that tap `r` of phase `a` stands for: {0}, {1, 2}; {0, 1}, {2}.
__host__ __device__ constexpr int first_tap(int a, int r) { return r == 0 ? 0 : 1 + a; }
__host__ __device__ constexpr int last_tap(int a, int r) { return r == 0 ? a : 2; }

__global__ void __launch_bounds__(kMost)
    phase_weights_kernel(const float* __restrict__ weight, int64_t rows, int64_t c, float* __restrict__ out) {
    wait_for_previous();
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {  // (o, a, b, r, s)
        const int place = static_cast<int>(row % 16), a = place >> 3, b = place >> 2 & 1, r = place >> 1 & 1,
                  s = place & 1;
        const float* from = weight + row / 16 * 9 * c;
        for (int64_t i = threadIdx.x; i < c; i += blockDim.x) {
            float sum = 0.0f;
            for (int y = first_tap(a, r); y <= last_tap(a, r); ++y)
                for (int x = first_tap(b, s); x <= last_tap(b, s); ++x) {
                    const float v = from[(3 * y + x) * c + i];
                    sum = y == first_tap(a, r) && x == first_tap(b, s) ? v : sum + v;
                }
            out[row * c + i] = sum;
        }
    }
}

}  // namespace
}  // namespace fp4bf16

using namespace fp4bf16;

extern "C" fp4bf16_status fp4bf16_phase_weights(const float* weight, int64_t o, int64_t c, float* out,
                                                void* stream) {
    const char* op = "phase_weights";
    constexpr int64_t kMostSide = int64_t{1} << 28;
    FP4BF16_TRY(check_range(op, "o", o, 0, kMostSide));
    FP4BF16_TRY(check_range(op, "c", c, 0, kMostSide));
    if (o == 0 || c == 0) return FP4BF16_OK;
    FP4BF16_TRY(check_pointer(op, "weight", weight, 4));
    FP4BF16_TRY(check_pointer(op, "out", out, 4));
    const int64_t rows = 16 * o, blocks = rows < 1 << 16 ? rows : 1 << 16;
    launch_kernel(phase_weights_kernel, static_cast<unsigned>(blocks),
                  c < kMost ? 32 * ceil_div(c, 32) : kMost, 0, static_cast<cudaStream_t>(stream), weight,
                  rows, c, out);
    return cuda_result(cudaGetLastError(), op);
}
