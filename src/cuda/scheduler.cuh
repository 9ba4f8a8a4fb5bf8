// Which tile a cluster computes next: a fixed order, so that results do not depend on timing.
#pragma once

namespace fp4bf16 {

// Tiles are walked in columns of kGroup tile rows, so that those computed at one time share operands in L2.
struct Schedule {
    int tiles_m, tiles_n, batch;  // in tiles of a whole cluster

    static constexpr int kGroup = 8;

    __host__ __device__ int64_t total() const { return int64_t{tiles_m} * tiles_n * batch; }

    __device__ void locate(int64_t tile, int* m, int* n, int* z) const {
        const int matrix = tiles_m * tiles_n;
        *z = static_cast<int>(tile / matrix);
        const int i = static_cast<int>(tile % matrix), group = i / (kGroup * tiles_n);
        const int height = min(kGroup, tiles_m - group * kGroup), inside = i - group * kGroup * tiles_n;
        *m = group * kGroup + inside % height;
        *n = inside / height;
    }
};

}  // namespace fp4bf16
