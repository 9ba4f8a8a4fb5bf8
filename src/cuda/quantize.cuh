// What the quantiser's kernels share: the checked arguments, a block's elements, codes and results.
#pragma once

#include "launch.cuh"
#include "quantize_rules.cuh"

namespace fp4bf16 {

// Which kernels run: kSimple takes anything; kRows takes rows one by one, or across memory; the others take
// blocks whatever their rows (quantize_flat.cuh): kTogether whole groups at a time, kAhead finds a group's
// amax shortly ahead, kFlat takes blocks whose outer scale is there.
enum class Way { kSimple, kRows, kTogether, kAhead, kFlat };

// Numbers divided by one that the host knows: exact while number * by < 2^32.
struct Divisor {
    uint32_t by, magic;

    Divisor() = default;
    explicit Divisor(int64_t n)
        : by(static_cast<uint32_t>(n)), magic(static_cast<uint32_t>(((int64_t{1} << 32) + n - 1) / n)) {}
#ifdef __CUDACC__
    __device__ uint32_t divide(uint32_t number) const { return by == 1 ? number : __umulhi(number, magic); }
#endif
};

// Blocks of 16 elements that a thread block takes at a time.
constexpr int kTileBlocks = 512;

// How blocks are dealt out to thread blocks that take them whatever their rows.
struct Tiles {
    Divisor blocks;        // of 16 elements, a row
    Divisor lines;         // kTogether: rows a group,
    uint32_t rows;         // and rows that a thread block takes
    uint32_t parts, lead;  // kAhead: tiles a group, groups that those that find amaxes are ahead
    bool vectors;          // rows are read 16 bytes at a time
};

// Arguments of fp4bf16_quantize, checked and normalised (no default rule, mid and inner at least 1).
struct QuantizeJob {
    fp4bf16_quantize_args a;
    Rule rule;
    int64_t block, blocks, kp;  // elements a block (fp8: 16 by convenience), blocks a row, padded k
    bool given;                 // outer_source holds decode scales
    const float* outer_source;  // or amaxes, one a group; NULL: of the row, to be found by the kernel itself
    int64_t outer_step;
    Way way;
    Tiles tiles;
    uint32_t* ticket;  // kAhead: of the thread block that starts next; before `found` in memory
    uint32_t* found;   // (groups, parts) kAhead: amaxes of pieces of groups, BF16's bits plus one
    double* parts;     // (pieces, rows, 3) sums of pieces of rows, where blocks lie across rows

    // Divisions of 64-bit numbers are long: the common cases do without.
    FP4BF16_HD int64_t group(int64_t row) const {
        if (a.mid == 1) return row;
        if (a.inner == 1 && a.mid >= a.rows) return 0;
        return row / (a.mid * a.inner) * a.inner + row % a.inner;
    }
    // Whether rows first to last are of one group; then that.
    FP4BF16_HD bool one_group(int64_t first, int64_t last, int64_t* group_of_all) const {
        *group_of_all = group(first);
        if (a.inner > 1) return first == last;
        return a.mid >= a.rows || last < (*group_of_all + 1) * a.mid;
    }
    FP4BF16_HD bool first_of_group(int64_t row) const {
        return a.mid == 1 || (a.inner == 1 && a.mid >= a.rows ? row == 0 : row / a.inner % a.mid == 0);
    }
    FP4BF16_HD int64_t place(int64_t row) const {
        return a.after == 1 ? row * a.x_stride : row / a.after * a.x_stride + row % a.after;
    }
    FP4BF16_HD bool finds_outer() const { return outer_source == nullptr && a.format != FP4BF16_MXFP4; }
    FP4BF16_HD Outer outer(const Rule& r, int64_t row) const {
        if (outer_source == nullptr) return {1.0f, 1.0f, 1.0f};
        return outer_of_group(r, outer_step == 0 ? 0 : group(row));
    }
    FP4BF16_HD Outer outer_of_group(const Rule& r, int64_t number) const {
        const float v = outer_source[outer_step == 0 ? 0 : number];
        return given ? outer_from_scale(r, v) : outer_from_amax(r, v);
    }
};

// What a thread block of the fast quantiser takes of a row across rows of memory.
constexpr int kAcrossPiece = 512;

// quantize_simple.cu: any arguments. quantize_fast.cu: the other ways.
fp4bf16_status quantize_simple(const QuantizeJob& job, cudaStream_t stream);
void choose_way(QuantizeJob* job);              // and its tiles
int64_t thread_blocks(const QuantizeJob& job);  // of the kernels of quantize_flat.cuh
int64_t found_bytes(const QuantizeJob& job);    // of QuantizeJob::ticket and ::found, by numbers alone
fp4bf16_status quantize_fast(const QuantizeJob& job, cudaStream_t stream);
int64_t parts_bytes(const QuantizeJob& job);  // of QuantizeJob::parts
// quantize_amax.cu: amax (groups,) of a job's groups, outliers left out; memory is set to zero first.
fp4bf16_status quantize_amax(const QuantizeJob& job, float* amax, cudaStream_t stream);
// quantize_hidden.cu: hidden but for its outlier columns and the zeros behind them.
fp4bf16_status quantize_hidden(const QuantizeJob& job, cudaStream_t stream);

// Largest of each run of lanes with the same slot, to `slots`; lanes with a slot under 0 have none.
__device__ inline void store_runs(int* slots, int slot, int most) {
    const uint32_t all = 0xFFFFFFFFu;
    const int lane = threadIdx.x % 32, before = __shfl_up_sync(all, slot, 1);
    if (__all_sync(all, slot == before)) {  // lane 0 has itself before it
        most = __reduce_max_sync(all, most);
    } else {
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_down_sync(all, most, step);
            if (slot == __shfl_down_sync(all, slot, step)) most = max(most, other);
        }
    }
    if (slot >= 0 && (lane == 0 || slot != before)) atomicMax(slots + slot, most);
}

// ---- outlier columns
// Bit j: column first + j is an outlier, j < 32.
FP4BF16_HD uint32_t outlier_mask(const QuantizeJob& job, int64_t first, int count) {
    int64_t low = 0, high = job.a.outliers;
    while (low < high) {  // least index with outlier_index >= first
        const int64_t middle = (low + high) / 2;
        if (job.a.outlier_index[middle] < first)
            low = middle + 1;
        else
            high = middle;
    }
    uint32_t mask = 0;
    for (; low < job.a.outliers && job.a.outlier_index[low] < first + count; ++low)
        mask |= 1u << (job.a.outlier_index[low] - first);
    return mask;
}

// ---- results of a block
template <int kB>
struct Codes {
    uint32_t byte;     // scale
    uint8_t code[kB];  // nibbles; fp8: bytes
    double sums[3];    // of squares: x, decoded, difference
};

template <int kB>
FP4BF16_HD void add_squares(Codes<kB>* out, float x, float decoded) {
    const double a = fabsf(x), q = fabsf(decoded), d = a - q;
    out->sums[0] += a * a;
    out->sums[1] += q * q;
    out->sums[2] += d * d;
}

// fp8: every element by itself.
template <int kB>
FP4BF16_HD void quantize_fp8(const float (&x)[kB], int n, const Rule& r, const Outer& o, Philox* random,
                             uint64_t element, uint64_t step, bool stats, Codes<kB>* out, int* counts) {
    for (int j = 0; j < n; ++j) {
        const float v = fabsf(x[j]) * o.encode;
        const bool finite = is_finite(x[j]);
        counts[kClipped] += v > 448.0f * kClip;
        counts[kNonFinite] += !finite;
        const uint32_t code = !finite        ? kE4M3NaN
                              : r.stochastic ? e4m3_random(v, random->word(element + j * step))
                                             : e4m3_code(fminf(v, 448.0f));
        out->code[j] = static_cast<uint8_t>(finite ? code | (sign_bit(x[j]) << 4) : code);
        if (stats) add_squares(out, x[j], e4m3_decode(code) * o.decode);
    }
}

// x: the block, zero beyond its n elements; element, step: numbers of their random words.
template <int kB>
FP4BF16_HD void quantize_block(const float (&x)[kB], int count, int n, const Rule& r, const Outer& o,
                               Philox* random, uint64_t element, uint64_t step, bool stats, Codes<kB>* out,
                               int* counts) {
    out->byte = 0;
    for (int j = 0; j < count; ++j) out->code[j] = 0;
    for (int i = 0; i < 3; ++i) out->sums[i] = 0;
    if (r.format == FP4BF16_FP8) {
        quantize_fp8(x, n, r, o, random, element, step, stats, out, counts);
        return;
    }
    float a[kB], top = 0.0f;
    bool finite = true;
    for (int j = 0; j < count; ++j) {
        a[j] = fabsf(x[j]);
        top = fmaxf(top, a[j]);
        finite = finite && is_finite(x[j]);
    }
    if (!finite || top == 0.0f) {
        out->byte = finite ? 0 : r.format == FP4BF16_MXFP4 ? 0xFF : kE4M3NaN;
        ++counts[finite ? kZero : kNonFinite];
        return;
    }
    const Scale s = block_scale(a, count, top, r, o, counts);
    const float first = r.format == FP4BF16_NVFP4_EXACT ? o.encode : 1.0f;
    out->byte = s.byte;
    for (int j = 0; j < count; ++j) {
        const float v = a[j] * first * s.multiplier;
        counts[kClipped] += v > 6.0f * kClip && (s.byte != 0 || r.format != FP4BF16_NVFP4);
        uint32_t code = 0;
        if (!r.stochastic)
            code = e2m1_bits(e2m1_round(v));
        else if (j < n)
            code = e2m1_random(v, random->word(element + j * step));
        out->code[j] = static_cast<uint8_t>(code | sign_bit(x[j]));
        if (stats) add_squares(out, x[j], e2m1_decode(code) * s.value * o.decode);
    }
}

// ---- stores
// E4M3 byte of a nibble times an E4M3 scale byte, whose product E4M3 holds.
FP4BF16_HD uint32_t expanded_byte(uint32_t nibble, uint32_t scale) {
    if (scale == kE4M3NaN) return kE4M3NaN;
    return e4m3_code(e2m1_decode(nibble & 7) * e4m3_decode(scale)) | (nibble & 8) << 4;
}

template <int kB>
__device__ inline void store_block(const QuantizeJob& job, const Codes<kB>& c, int count, int64_t row,
                                   int64_t b) {
    const bool fp8 = job.rule.format == FP4BF16_FP8;
    const int64_t first = b * kB;
    const int n = static_cast<int>(job.kp - first < count ? job.kp - first : count);
    if (job.a.packed != nullptr && fp8)
        for (int j = 0; j < n; ++j) job.a.packed[row * job.kp + first + j] = c.code[j];
    if (job.a.packed != nullptr && !fp8) {
        for (int j = 0; j < count; j += 2)
            job.a.packed[(row * job.kp + first + j) / 2] =
                static_cast<uint8_t>(c.code[j] | c.code[j + 1] << 4);
        job.a.block_scale[row * job.blocks + b] = static_cast<uint8_t>(c.byte);
    }
    if (job.a.packed == nullptr && job.a.block_scale != nullptr && !fp8)
        job.a.block_scale[row * job.blocks + b] = static_cast<uint8_t>(c.byte);
    if (job.a.expanded != nullptr)
        for (int j = 0; j < n; ++j)
            job.a.expanded[row * job.a.expanded_stride + first + j] =
                static_cast<uint8_t>(fp8 ? c.code[j] : expanded_byte(c.code[j], c.byte));
}

// ---- the rest of a row, by `lanes` neighbouring threads
template <typename T>
__device__ inline void store_row(const QuantizeJob& job, const Outer& o, int64_t row, int lane, int lanes) {
    const fp4bf16_quantize_args& a = job.a;
    if (lane == 0 && a.outer_scale != nullptr && job.rule.format != FP4BF16_MXFP4 && job.first_of_group(row))
        a.outer_scale[job.group(row)] = o.decode;
    if (a.expanded != nullptr)
        for (int64_t i = job.kp + lane; i < a.expanded_stride; i += lanes)
            a.expanded[row * a.expanded_stride + i] = 0;
    if (a.hidden == nullptr) return;
    const auto hidden = static_cast<__nv_bfloat16*>(a.hidden) + row * a.hidden_stride;
    const T* x = static_cast<const T*>(a.x) + job.place(row);
    for (int64_t i = lane; i < a.hidden_stride - a.rank; i += lanes)
        hidden[a.rank + i] =
            __float2bfloat16_rn(i < a.outliers ? load(x + a.outlier_index[i] * a.k_stride) : 0.0f);
}

}  // namespace fp4bf16
