// Philox4x32-10: counter-based random words (Salmon, Moraes, Dror and Shaw, SC 2011).
#pragma once

#include "fp4.cuh"

namespace fp4bf16 {

// Element i of a draw is word i % 4 of the block with counter (i / 4 low, i / 4 high, stream, call).
class Philox {
    uint64_t seed_, block_ = ~uint64_t{0};
    uint32_t stream_, call_, words_[4] = {};

    FP4BF16_HD static uint32_t high(uint32_t a, uint32_t b) {
        return static_cast<uint32_t>(uint64_t{a} * b >> 32);
    }

    FP4BF16_HD void draw() {
        uint32_t c0 = static_cast<uint32_t>(block_), c1 = static_cast<uint32_t>(block_ >> 32);
        uint32_t c2 = stream_, c3 = call_;
        uint32_t k0 = static_cast<uint32_t>(seed_), k1 = static_cast<uint32_t>(seed_ >> 32);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
        for (int round = 0; round < 10; ++round) {
            const uint32_t h0 = high(0xD2511F53u, c0), h1 = high(0xCD9E8D57u, c2);
            const uint32_t l0 = 0xD2511F53u * c0, l1 = 0xCD9E8D57u * c2;
            c0 = h1 ^ c1 ^ k0, c1 = l1, c2 = h0 ^ c3 ^ k1, c3 = l0;
            k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
        }
        words_[0] = c0, words_[1] = c1, words_[2] = c2, words_[3] = c3;
    }

  public:
    FP4BF16_HD Philox(uint64_t seed, uint32_t stream, uint32_t call)
        : seed_(seed), stream_(stream), call_(call) {}

    // The block of the last call is kept: neighbours cost one block in four.
    FP4BF16_HD uint32_t word(uint64_t element) {
        if (element >> 2 != block_) block_ = element >> 2, draw();
        const uint32_t low = element & 1 ? words_[1] : words_[0], top = element & 1 ? words_[3] : words_[2];
        return element & 2 ? top : low;
    }
};

}  // namespace fp4bf16
