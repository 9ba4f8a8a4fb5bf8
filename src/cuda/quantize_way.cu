// Which kernels the quantiser runs, by the arguments alone.
#include <algorithm>

#include "quantize.cuh"

namespace fp4bf16 {
namespace {

constexpr int64_t kMostFlat = 16 * 16384;  // columns, for Divisor
// Blocks of 16 a row up to which rows are taken together; threads of a row's own would wait idle.
constexpr int64_t kShort = 16, kShortGiven = 32;
constexpr int64_t kMostParts = 256;    // tiles of a group that is read twice in one go: 4 MiB
constexpr int64_t kAheadTiles = 1584;  // thread blocks, one and a half times what an H200 runs at a time

bool multiple(const void* pointer, uintptr_t of) { return reinterpret_cast<uintptr_t>(pointer) % of == 0; }

// Formats, types and results that one of the fast kernels takes, whatever the layout of x.
bool results_fit(const QuantizeJob& job) {
    const fp4bf16_quantize_args& a = job.a;
    if (a.dtype != FP4BF16_BFLOAT16 || job.rule.stochastic || a.rows > 0x7FFFFFFF) return false;
    if (a.format == FP4BF16_NVFP4 && a.rule != FP4BF16_RULE_TE) return false;
    return multiple(a.packed, a.format == FP4BF16_FP8 ? 16 : 8) && multiple(a.expanded, 16) &&
           (a.expanded == nullptr || a.expanded_stride % 16 == 0);
}

bool vectors_fit(const QuantizeJob& job) {
    return job.a.k_size % job.block == 0 && job.a.x_stride % 8 == 0 && multiple(job.a.x, 16);
}

bool rows_fit(const QuantizeJob& job) {
    const fp4bf16_quantize_args& a = job.a;
    if (!vectors_fit(job) || !results_fit(job)) return false;
    return a.after == 1
               ? a.k_stride == 1 && a.k_size <= 64 * 256 * 16
               : a.k_size > 0 && a.after % 8 == 0 && a.k_stride % 8 == 0 && a.k_size <= 65535 * kAcrossPiece;
}

// Nothing but codes and scales is made, of rows along memory.
bool flat_fits(const QuantizeJob& job) {
    const fp4bf16_quantize_args& a = job.a;
    if (a.after != 1 || a.k_stride != 1 || a.k_size == 0 || a.k_size > kMostFlat) return false;
    if (a.sums != nullptr || a.counts != nullptr || a.hidden != nullptr || a.outliers + a.rank > 0)
        return false;
    return results_fit(job) && (a.format != FP4BF16_FP8 || a.k_size % 16 == 0);
}

bool finds_none(const QuantizeJob& job) { return job.given || job.rule.format == FP4BF16_MXFP4; }

int64_t groups(const QuantizeJob& job) { return ceil_div(job.a.rows, job.a.mid); }

// Blocks of 16 elements of a group of neighbouring rows.
int64_t group_blocks(const QuantizeJob& job) {
    return std::min(job.a.mid, job.a.rows) * ceil_div(job.a.k_size, 16);
}

// Tiles of a group that kAhead takes, else 0.
int64_t parts(const QuantizeJob& job) {
    const fp4bf16_quantize_args& a = job.a;
    if (finds_none(job) || a.mid == 1 || a.inner != 1 || a.after != 1 || a.k_size > kMostFlat) return 0;
    const int64_t count = ceil_div(group_blocks(job), kTileBlocks);
    if (a.dtype != FP4BF16_BFLOAT16 || count == 1 || count > kMostParts) return 0;
    return 2 * count * groups(job) + 4 * kAheadTiles <= 0x7FFFFFFF ? count : 0;
}

Way choose(const QuantizeJob& job) {
    const bool rows = rows_fit(job);
    const int64_t blocks = ceil_div(job.a.k_size, 16);
    if (!flat_fits(job)) return rows ? Way::kRows : Way::kSimple;
    if (finds_none(job)) return rows && blocks > kShortGiven ? Way::kRows : Way::kFlat;
    if (job.a.mid == 1 && rows && blocks > kShort) return Way::kRows;
    if (job.a.inner == 1 && group_blocks(job) <= kTileBlocks) return Way::kTogether;
    if (job.a.mid == 1) return rows ? Way::kRows : Way::kSimple;
    return job.tiles.vectors && parts(job) > 0 ? Way::kAhead : Way::kFlat;
}

Tiles make_tiles(const QuantizeJob& job) {
    Tiles t{};
    const int64_t of_group = group_blocks(job);
    t.blocks = Divisor(ceil_div(job.a.k_size, job.block) * job.block / 16);
    t.vectors = vectors_fit(job);
    if (of_group <= kTileBlocks) {
        t.lines = Divisor(job.a.mid);
        t.rows = static_cast<uint32_t>(kTileBlocks / of_group * job.a.mid);
    }
    t.parts = static_cast<uint32_t>(parts(job));
    if (t.parts > 0) t.lead = static_cast<uint32_t>(ceil_div(kAheadTiles, 2 * t.parts));
    return t;
}

}  // namespace

void choose_way(QuantizeJob* job) {
    if (job->a.rows == 0) return;
    if (job->a.k_size > 0 && job->a.k_size <= kMostFlat) job->tiles = make_tiles(*job);
    job->way = choose(*job);
}

int64_t found_bytes(const QuantizeJob& job) {
    const int64_t found = groups(job) * parts(job);
    return found == 0 ? 0 : (1 + found) * static_cast<int64_t>(sizeof(uint32_t));
}

int64_t thread_blocks(const QuantizeJob& job) {
    const Tiles& t = job.tiles;
    if (job.way == Way::kTogether) return ceil_div(job.a.rows, t.rows);
    if (job.way == Way::kAhead) return (groups(job) + t.lead) * 2 * t.parts;
    return ceil_div(job.a.rows * t.blocks.by, kTileBlocks);
}

}  // namespace fp4bf16
