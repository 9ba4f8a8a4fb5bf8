// Low-rank adapters of all layers of a network in one launch: what each thread of a block does between two
// barriers; compiled for the host as well, so that it can be tested without a GPU.
//
// A weight is a matrix (rows, columns), a row an output. Products of two FP32 numbers are exact in FP64, in
// which all sums are made, in an order that the shapes alone decide; what is stored is rounded once.
#pragma once

#include <cmath>

#include "common.h"
#include "fp4.cuh"

namespace fp4bf16 {

constexpr int kLoraLanes = 128;
constexpr int kMergeRows = 16, kMergeRanks = 32;  // of a tile, whose columns are the lanes
constexpr int kUpRows = 4, kDownColumns = 32;     // of a unit of the gradient
constexpr int kRanks = 8;                         // that a thread of the gradient sums at a time
constexpr int kAhead = 4;                         // elements of a column that it reads at a time
constexpr int kUpSums = kUpRows * kRanks;
constexpr int kPitch = kLoraLanes + 4;  // so that four lanes a sum meet no bank twice
constexpr int kRowLanes = kLoraLanes / kDownColumns;
static_assert(kRowLanes == 4 && kLoraLanes == 4 * kUpSums, "sums end in four parts");

struct LoraLayer {
    int64_t unit;  // number within the layer
    int64_t rows, columns, weight, first_down, first_up;
    int rank;
    bool transposed;

    // The last layer that starts at or before unit `number` of merge (which = 0) or gradient (1).
    FP4BF16_HD LoraLayer(const fp4bf16_lora_args& a, int which, int64_t number)
        : rank(static_cast<int>(a.rank)) {
        int64_t low = 0, high = a.layer_count;
        while (high - low > 1) {
            const int64_t middle = (low + high) / 2;
            (a.layers[8 * middle + which] <= number ? low : high) = middle;
        }
        const int64_t* entry = a.layers + 8 * low;
        unit = number - entry[which];
        rows = entry[2], columns = entry[3], weight = entry[4];
        first_down = entry[5], first_up = entry[6], transposed = entry[7] != 0;
    }

    FP4BF16_HD int64_t at(int64_t row, int64_t column) const { return weight + row * columns + column; }
    FP4BF16_HD int64_t down(int64_t j, int64_t column) const {
        return first_down + (transposed ? column * rank + j : j * columns + column);
    }
    FP4BF16_HD int64_t up(int64_t row, int64_t j) const {
        return first_up + (transposed ? j * rows + row : row * rank + j);
    }
};

FP4BF16_HD int64_t merge_units(int64_t rows, int64_t columns) {
    return ceil_div(rows, kMergeRows) * ceil_div(columns, kLoraLanes);
}
FP4BF16_HD int64_t up_units(int64_t rows) { return ceil_div(rows, kUpRows); }
FP4BF16_HD int64_t down_units(int64_t columns) { return ceil_div(columns, kDownColumns); }

// ---- weights = base + scale up down: a thread has one column of a tile
struct Merge {
    const fp4bf16_lora_args& a;
    const LoraLayer& t;
    int lane;
    int64_t row, column;
    double sum[kMergeRows] = {};

    FP4BF16_HD Merge(const fp4bf16_lora_args& args, const LoraLayer& layer, int thread)
        : a(args), t(layer), lane(thread) {
        const uint32_t unit = static_cast<uint32_t>(t.unit);
        const uint32_t across = static_cast<uint32_t>(ceil_div(t.columns, kLoraLanes));
        row = int64_t{unit / across} * kMergeRows;
        column = int64_t{unit % across} * kLoraLanes + lane;
    }

    // Ranks from `first` on of the tile's rows: up[(rank, row)].
    FP4BF16_HD void stage(int first, double* up) const {
        for (int i = lane; i < kMergeRows * kMergeRanks; i += kLoraLanes) {
            const int64_t o = row + i % kMergeRows, j = first + i / kMergeRows;
            up[i] = o < t.rows && j < t.rank ? a.adapters[t.up(o, j)] : 0.0f;
        }
    }

    FP4BF16_HD void add(int first, const double* up) {
        if (column >= t.columns) return;
        const int count = t.rank - first < kMergeRanks ? t.rank - first : kMergeRanks;
        for (int j = 0; j < count; ++j) {
            const double d = a.adapters[t.down(first + j, column)];
            for (int r = 0; r < kMergeRows; ++r) sum[r] = fma(up[kMergeRows * j + r], d, sum[r]);
        }
    }

    FP4BF16_HD void store() const {
        if (column >= t.columns) return;
        for (int r = 0; r < kMergeRows; ++r) {
            if (row + r >= t.rows) return;
            const int64_t at = t.at(row + r, column);
            const float base = a.base[at];
            a.weights[at] = a.adapters == nullptr ? base : static_cast<float>(base + a.scale * sum[r]);
        }
    }
};

// ---- gradient of up = scale G down^T: the threads share the columns of kUpRows rows
struct Up {
    const fp4bf16_lora_args& a;
    const LoraLayer& t;
    int lane;

    FP4BF16_HD int64_t row(int r) const { return t.unit * kUpRows + r; }

    FP4BF16_HD void add(int first, double* sums) const {
        double sum[kUpSums] = {};
        for (int64_t k = lane; k < t.columns; k += kLoraLanes) {
            double d[kRanks], g[kUpRows];
            for (int j = 0; j < kRanks; ++j)
                d[j] = first + j < t.rank ? a.adapters[t.down(first + j, k)] : 0.0f;
            for (int r = 0; r < kUpRows; ++r) g[r] = row(r) < t.rows ? a.gradient[t.at(row(r), k)] : 0.0f;
            for (int i = 0; i < kUpSums; ++i) sum[i] = fma(g[i / kRanks], d[i % kRanks], sum[i]);
        }
        for (int i = 0; i < kUpSums; ++i) sums[i * kPitch + lane] = sum[i];
    }

    // A quarter of the threads' parts of one sum; it stays where nobody else reads.
    FP4BF16_HD void quarter(double* sums) const {
        double* parts = sums + lane / 4 * kPitch + lane % 4;
        double sum = parts[0];
        for (int i = 4; i < kLoraLanes; i += 4) sum += parts[i];
        parts[0] = sum;
    }

    FP4BF16_HD void store(int first, const double* sums) const {
        const int r = lane / kRanks, j = first + lane % kRanks;
        if (lane >= kUpSums || row(r) >= t.rows || j >= t.rank) return;
        const double* q = sums + lane * kPitch;
        a.adapters_gradient[t.up(row(r), j)] = static_cast<float>(a.scale * ((q[0] + q[1]) + (q[2] + q[3])));
    }
};

// ---- gradient of down = scale up^T G: a thread has one column, and every fourth row
struct Down {
    const fp4bf16_lora_args& a;
    const LoraLayer& t;
    int lane;

    FP4BF16_HD int64_t column(int of) const {
        return (t.unit - up_units(t.rows)) * kDownColumns + of % kDownColumns;
    }

    FP4BF16_HD void add(int first, double* sums) const {
        double sum[kRanks] = {};
        const int64_t k = column(lane);
        if (k < t.columns) {
            for (int64_t o = lane / kDownColumns; o < t.rows; o += kRowLanes * kAhead) {
                double g[kAhead];  // asked for at once
                for (int i = 0; i < kAhead; ++i) {
                    const int64_t row = o + i * kRowLanes;
                    g[i] = row < t.rows ? a.gradient[t.at(row, k)] : 0.0f;
                }
                for (int i = 0; i < kAhead; ++i) {
                    const int64_t row = o + i * kRowLanes;
                    for (int j = 0; j < kRanks; ++j) {
                        const bool live = row < t.rows && first + j < t.rank;
                        const double u = live ? a.adapters[t.up(row, first + j)] : 0.0f;
                        sum[j] = fma(u, g[i], sum[j]);
                    }
                }
            }
        }
        for (int j = 0; j < kRanks; ++j)
            sums[(lane / kDownColumns * kRanks + j) * kDownColumns + lane % kDownColumns] = sum[j];
    }

    FP4BF16_HD void store(int first, const double* sums) const {
        constexpr int kPart = kRanks * kDownColumns;
        for (int i = lane; i < kPart; i += kLoraLanes) {
            const int64_t j = first + i / kDownColumns, k = column(i);
            if (j >= t.rank || k >= t.columns) continue;
            const double* p = sums + i;
            const double sum = (p[0] + p[kPart]) + (p[2 * kPart] + p[3 * kPart]);
            a.adapters_gradient[t.down(j, k)] = static_cast<float>(a.scale * sum);
        }
    }
};

}  // namespace fp4bf16
