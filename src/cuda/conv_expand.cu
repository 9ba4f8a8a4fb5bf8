// A convolution's BF16 result in nvfp4_exact (fast search, E4M3 bytes) under an outer scale that is given: a
// pass over what was stored. Behind each tile's products the search, two dozen instructions a number, would
// wait for nothing and cover nothing: it costs less in a kernel whose threads all search.
#include "conv.h"
#include "launch.cuh"
#include "norm_quantize.cuh"

namespace fp4bf16 {
namespace {

// Blocks of 16 channels of a line of pixels a thread block, line after line.
__global__ void __launch_bounds__(kThreads)
    expand_lines(const __grid_constant__ fp4bf16_conv2d_args a, Divisor by_blocks) {
    if (skipped(a.run_if)) return;
    wait_for_previous();
    const auto* d = static_cast<const __nv_bfloat16*>(a.d);
    const Outer outer = {power_of_two(-a.expanded_exponent), power_of_two(a.expanded_exponent), 0.0f};
    const Window window(outer);
    const uint32_t blocks = by_blocks.by, count = static_cast<uint32_t>(a.ow) * blocks;
    fp4bf16_group_norm_args results{};
    for (int64_t line = blockIdx.x; line < a.n * a.oh; line += gridDim.x) {
        const __nv_bfloat16* from = d + line / a.oh * a.d_strides[0] + line % a.oh * a.d_strides[1];
        results.expanded = a.expanded + line * a.ow * a.o;
        const FourBit to(results, 0);
        for (uint32_t b = threadIdx.x; b < count; b += kThreads) {
            const uint32_t x = by_blocks.divide(b);
            const auto* source =
                reinterpret_cast<const uint4*>(from + x * a.d_strides[2] + 16 * (b - x * blocks));
            uint32_t w[8];
            unpack_block(source[0], source[1], w);
            if (!quantize_block16<true>(w, outer, window, to, b)) special_block16(w, outer, to, b);
        }
    }
}

}  // namespace

fp4bf16_status expand_result(const char* op, const fp4bf16_conv2d_args& args, cudaStream_t stream) {
    const int64_t blocks = args.o / 16, lines = args.n * args.oh;
    bool aligned = reinterpret_cast<uintptr_t>(args.d) % 16 == 0;
    for (const int64_t stride : args.d_strides) aligned = aligned && stride % 8 == 0;
    // Divisor is exact while the number times the divisor stays under 2^32.
    if (!aligned || args.ow * blocks > (int64_t{1} << 31) / blocks)
        return simple_expand_result(op, args, stream);
    launch_kernel(expand_lines, static_cast<unsigned>(lines < 1 << 16 ? lines : 1 << 16), kThreads, 0, stream,
                  args, Divisor(blocks));
    return cuda_result(cudaGetLastError(), op);
}

}  // namespace fp4bf16
