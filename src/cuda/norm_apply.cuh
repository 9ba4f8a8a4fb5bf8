// Group normalisation whose statistics are given as sums by channel (fp4bf16_conv2d's): x is read once, by
// thread blocks that need no other's.
#pragma once

#include <algorithm>

#include "norm.cuh"

namespace fp4bf16 {

constexpr int kApplyThreads = 256;    // of a thread block, at most
constexpr unsigned kMostPasses = 64;  // of a segment: bits of a thread's special blocks

// A thread takes the same 16 channels (BF16 results alone: 8) of every `rows`-th pixel of an image, one each
// pass. All images' passes, one image after the other, are shared out evenly to thread blocks that all run at
// once (BF16 results alone: to as many as there are images, if these are more). Where they are a multiple of
// the images, none has passes of two.
struct ApplyPlan {
    int vectors, rows, threads;    // vectors: of a pixel
    unsigned passes;               // of an image
    unsigned blocks, each, extra;  // passes of all images: blocks * each + extra, extra < blocks
};

// What a thread block does between two looks at its place: passes of one image.
struct Segment {
    unsigned image, pass, count;  // pass: the first, of the image's
};

// First of thread block b's passes, of all images': b / blocks of all of them. b = blocks: their number.
FP4BF16_HD unsigned first_pass(const ApplyPlan& p, unsigned b) { return b * p.each + b * p.extra / p.blocks; }

// From `pass` of all images' on, before `end`.
FP4BF16_HD Segment segment_at(const ApplyPlan& p, unsigned pass, unsigned end) {
    const unsigned image = pass / p.passes, own = pass - image * p.passes;
    unsigned count = end - pass;
    if (count > p.passes - own) count = p.passes - own;
    return {image, own, count < kMostPasses ? count : kMostPasses};
}

// What a thread takes of a segment: `count` pixels of an image, every `rows`-th from `pixel` on, 0: none.
struct ApplyPlace {
    int64_t image, pixel;
    int count, vector;

    __host__ __device__ ApplyPlace(const ApplyPlan& p, int64_t pixels, const Segment& g, unsigned thread) {
        const int row = static_cast<int>(thread / static_cast<unsigned>(p.vectors));
        vector = static_cast<int>(thread) - row * p.vectors;
        image = g.image, pixel = int64_t{g.pass} * p.rows + row;
        const int64_t last = pixel + int64_t{g.count - 1} * p.rows;  // only it may be missing
        count = row < p.rows ? static_cast<int>(g.count) - (last >= pixels) : 0;
    }
};

// vectors: at most kApplyThreads.
inline ApplyPlan passes_of(int64_t pixels, int64_t vectors) {
    const int64_t rows = std::min(kApplyThreads / vectors, pixels);
    return {static_cast<int>(vectors), static_cast<int>(rows),
            static_cast<int>(32 * ceil_div(rows * vectors, 32)),
            static_cast<unsigned>(ceil_div(pixels, rows)), 0, 0, 0};
}

// Thread blocks, of `slots` that run at once, for the least time of the slowest. Each image that one begins
// costs, for its statistics, about as much as two passes.
inline void share_out(int64_t n, int64_t slots, ApplyPlan* plan) {
    constexpr int64_t kStart = 2, kMostBlocks = 0xFFFF;
    const int64_t passes = plan->passes, total = n * passes;
    const auto time = [&](int64_t blocks) {
        const int64_t most = ceil_div(total, blocks);
        return most + kStart * (blocks % n == 0 ? 1 : 1 + ceil_div(most - 1, passes));
    };
    int64_t blocks = std::min({slots, total, kMostBlocks});
    if (n < blocks && time(blocks / n * n) <= time(blocks)) blocks = blocks / n * n;
    plan->blocks = static_cast<unsigned>(blocks);
    plan->each = static_cast<unsigned>(total / blocks), plan->extra = static_cast<unsigned>(total % blocks);
}

// norm_apply.cu. Fails (false) where the stream of this file does not take the shape or the addresses.
// How the plan shares out the passes is for norm_apply to choose.
bool apply_plan(const fp4bf16_group_norm_args& a, ApplyPlan* plan);
// Its thread blocks, which are the parts of `norms`; without a device those of an H200.
int64_t norm_apply_parts(const fp4bf16_group_norm_args& a, ApplyPlan plan);
fp4bf16_status norm_apply(const fp4bf16_group_norm_args& a, ApplyPlan plan, cudaStream_t stream);
// norm_simple.cu: any shape; statistics from the sums to memory, then results as without sums.
fp4bf16_status norm_apply_simple(const fp4bf16_group_norm_args& a, float* mean, float* rstd,
                                 cudaStream_t stream);
fp4bf16_status norm_simple_results(const fp4bf16_group_norm_args& a, const float* mean, const float* rstd,
                                   cudaStream_t stream);

// Thread blocks of its FP4 results.
int64_t norm_simple_parts(const fp4bf16_group_norm_args& a);

}  // namespace fp4bf16
