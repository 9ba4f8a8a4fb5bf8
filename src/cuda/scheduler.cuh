// Which tile a cluster computes next: a fixed order, so that results do not depend on timing.
#pragma once

#include <cstdint>

namespace fp4bf16 {

// Division by a number that the host knows, of dividends under 2^31: a multiplication (Granlund and
// Montgomery, "Division by invariant integers using multiplication", PLDI 1994, figure 4.1).
struct Divisor {
    uint32_t multiplier = 0, shift = 0;  // 0: by one

    Divisor() = default;
    explicit Divisor(uint32_t d) {
        if (d <= 1) return;
        uint32_t log2 = 0;
        while ((uint64_t{1} << log2) < d) ++log2;
        multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + log2)) + d - 1) / d);
        shift = log2 - 1;
    }
    __host__ __device__ uint32_t divide(uint32_t n) const {
#ifdef __CUDA_ARCH__
        return multiplier == 0 ? n : __umulhi(n, multiplier) >> shift;
#else
        return multiplier == 0 ? n : static_cast<uint32_t>(uint64_t{n} * multiplier >> 32) >> shift;
#endif
    }
};

// Tiles are walked in columns of kGroup tile rows, so that those computed at one time share operands in L2.
struct Schedule {
    int tiles_m, tiles_n, batch;  // in tiles of a whole cluster
    Divisor by_matrix, by_group;

    static constexpr int kGroup = 8;

    Schedule() = default;
    Schedule(int64_t m, int64_t n, int64_t batch)
        : tiles_m(static_cast<int>(m)),
          tiles_n(static_cast<int>(n)),
          batch(static_cast<int>(batch)),
          by_matrix(static_cast<uint32_t>(m * n)),
          by_group(static_cast<uint32_t>(kGroup * n)) {}

    __host__ __device__ int total() const { return tiles_m * tiles_n * batch; }

    __host__ __device__ void locate(int tile, int* m, int* n, int* z) const {
        *z = batch == 1 ? 0 : by_matrix.divide(tile);
        const int i = tile - *z * tiles_m * tiles_n, group = by_group.divide(i);
        const int inside = i - group * kGroup * tiles_n, height = min(kGroup, tiles_m - group * kGroup);
        *n = height == kGroup ? inside / kGroup : inside / height;
        *m = group * kGroup + inside - *n * height;
    }
};

}  // namespace fp4bf16
