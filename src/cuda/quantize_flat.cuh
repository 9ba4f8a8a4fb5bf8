// The fast quantiser for blocks whatever their rows: many short rows, such as pixels of pictures, under an
// outer scale that is given or that groups of rows share.
//
// Whole groups that a thread block holds wait for their amax in shared memory (together_kernel). Larger ones
// are read twice: thread blocks of lower number find the amaxes of a group's pieces, later ones take them
// from memory, by when the group is still in the L2 cache (ahead_kernel). Numbers are tickets that thread
// blocks draw as they start, so that those waited for have started, and they wait for none. Groups beyond
// the cache get their amax by a kernel of its own (quantize_amax.cu), whose last pieces are read again first
// (flat_kernel).
#pragma once

#include "quantize_row.cuh"

namespace fp4bf16 {
namespace {

constexpr int kFlatThreads = 128, kTileHeld = kTileBlocks / kFlatThreads;  // blocks a thread

// Thread blocks at a time on a multiprocessor: as many as without spills.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kFlatResident = 5;
#else
constexpr int kFlatResident = 8;
#endif

// `count` blocks, from block `first` of row `row` on, row by row.
struct Span {
    uint32_t row, first, count;

    // Tile `tile` of the blocks of `rows` rows from `row_0` on.
    __device__ Span(const Tiles& t, int64_t row_0, int64_t rows, int64_t tile) {
        const int64_t start = tile * kTileBlocks, left = rows * t.blocks.by - start;
        const int64_t skipped = start / t.blocks.by;
        row = static_cast<uint32_t>(row_0 + skipped);
        first = static_cast<uint32_t>(start - skipped * t.blocks.by);
        count = static_cast<uint32_t>(max(min(left, int64_t{kTileBlocks}), int64_t{0}));
    }
    // The same where all are few enough for the quicker division.
    __device__ Span(const Tiles& t, int64_t row_0, uint32_t rows, uint32_t tile) {
        const uint32_t start = tile * kTileBlocks, all = rows * t.blocks.by, skipped = t.blocks.divide(start);
        row = static_cast<uint32_t>(row_0) + skipped;
        first = start - skipped * t.blocks.by;
        count = start < all ? min(all - start, uint32_t{kTileBlocks}) : 0;
    }
};

// Block `i` of a span: its row, less the span's, its number there.
struct Place {
    uint32_t line, row;
    int b;
    bool inside;

    __device__ Place(const Tiles& t, const Span& s, uint32_t i) {
        line = t.blocks.divide(s.first + i);
        row = s.row + line;
        b = static_cast<int>(s.first + i - line * t.blocks.by);
        inside = i < s.count;
    }
};

// A span's blocks in shared memory, thread by thread kTileHeld of them; a warp reads what it copied.
struct Held {
    uint4 v[2 * kTileBlocks];  // halves of blocks, swizzled as in RowPieces

    __device__ static uint32_t number(int h) { return h * kFlatThreads + threadIdx.x; }
    __device__ static int place(int h) {
        const int lane = threadIdx.x % 32;
        return 2 * (h * kFlatThreads + static_cast<int>(threadIdx.x) - lane) + (2 * lane ^ (lane >> 2 & 1));
    }

    __device__ void fetch(const QuantizeJob& job, const Span& s) {
        if (!job.tiles.vectors) {
#pragma unroll 1
            for (int h = 0; h < kTileHeld; ++h) gather(job, Place(job.tiles, s, number(h)), h);
            return;
        }
        const uint4* start = row_source(job, s.row) + 2 * s.first;
        if (job.a.x_stride == job.a.k_size)
            copy(s, start, [&](uint32_t piece) { return start + piece; });
        else
            copy(s, start,
                 [&](uint32_t piece) { return piece_of_row(job, Place(job.tiles, s, piece / 2), piece); });
    }

    template <typename Source>
    __device__ void copy(const Span& s, const uint4* start, const Source& source) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x - lane;
#pragma unroll
        for (int i = 0; i < 2 * kTileHeld; ++i) {
            const uint32_t first = 2 * (i / 2 * kFlatThreads + warp) + i % 2 * 32, piece = first + lane;
            const bool inside = piece < 2 * s.count;
            copy_async(v + first + (lane ^ (lane >> 3 & 1)), inside ? source(piece) : start, inside);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }

    __device__ static const uint4* piece_of_row(const QuantizeJob& job, const Place& p, uint32_t piece) {
        return row_source(job, p.row) + 2 * p.b + piece % 2;
    }

    // Rows that no vector takes, and those that end inside a block.
    __device__ void gather(const QuantizeJob& job, const Place& p, int h) {
        const auto x = static_cast<const uint16_t*>(job.a.x) + p.row * job.a.x_stride + 16 * p.b;
        const int64_t left = p.inside ? job.a.k_size - 16 * p.b : 0;
        uint32_t w[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            w[i] = 2 * i < left ? x[2 * i] : 0;
            if (2 * i + 1 < left) w[i] |= uint32_t{x[2 * i + 1]} << 16;
        }
        v[place(h)] = make_uint4(w[0], w[1], w[2], w[3]);
        v[place(h) ^ 1] = make_uint4(w[4], w[5], w[6], w[7]);
    }

    __device__ static void wait() {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncwarp();
    }

    __device__ uint32_t load(int h, uint32_t (&w)[8]) const {
        unpack_block(v[place(h)], v[place(h) ^ 1], w);
        return largest(w);
    }
};

// Results of a span's blocks; `outer(p)`: the outer scale, `starts(p)`: whether p's row is its group's first.
template <Kind kKind, typename OuterOf, typename Starts>
__device__ inline void quantize_held(const QuantizeJob& job, const Span& s, const Held& held,
                                     const OuterOf& outer, const Starts& starts) {
    constexpr int kHalves = kKind == kMx ? 2 : 1;
    Totals none;
    uint32_t special = 0;
#pragma unroll 1
    for (int h = 0; h < kTileHeld; ++h) {
        const Place p(job.tiles, s, Held::number(h));
        const Outer o = outer(p);
        const int64_t row = p.row;
        uint32_t w[8];
        const uint32_t top = held.load(h, w);
        if (!do_any<kKind, false>(job, o, w, top, Row(job, row, kKind == kFp8), p.b, p.inside, &none))
            special |= 1u << h;
        if (!p.inside) continue;
        if (kKind != kMx && p.b == 0 && job.a.outer_scale != nullptr && starts(p))
            job.a.outer_scale[job.group(row)] = o.decode;
        if (job.a.expanded == nullptr || p.b + 1 != static_cast<int>(job.tiles.blocks.by)) continue;
#pragma unroll 1
        for (int64_t i = 16 * int64_t{job.tiles.blocks.by}; i < job.a.expanded_stride; i += 16)
            *reinterpret_cast<uint4*>(job.a.expanded + row * job.a.expanded_stride + i) = uint4{};
    }
    Totals unused;
    for (; special != 0; special &= special - 1) {
        const Place p(job.tiles, s, Held::number(__ffs(static_cast<int>(special)) - 1));
        if (p.b % kHalves == 0) special_block<16 * kHalves>(job, outer(p), p.row, p.b / kHalves, &unused);
    }
}

// ---- outer scales that are there
template <Kind kKind>
__global__ void __launch_bounds__(kFlatThreads, kFlatResident)
    flat_kernel(const __grid_constant__ QuantizeJob job) {
    wait_for_previous();
    const Span s(job.tiles, 0, job.a.rows, int64_t{gridDim.x - 1 - blockIdx.x});
    __shared__ Held held;
    held.fetch(job, s);
    int64_t group = 0;
    const uint32_t last = s.row + job.tiles.blocks.divide(s.first + s.count - 1);
    const bool one = kKind == kMx || job.one_group(s.row, last, &group);
    const bool begins = one && (job.a.inner == 1 ? s.row == group * job.a.mid : job.first_of_group(s.row));
    Outer shared{1.0f, 1.0f, 1.0f};
    if (kKind != kMx && one) shared = job.outer_of_group(rule_of<kKind>(), group);
    held.wait();
    quantize_held<kKind>(
        job, s, held,
        [&](const Place& p) { return one ? shared : job.outer(rule_of<kKind>(), p.inside ? p.row : s.row); },
        [&](const Place& p) { return one ? begins && p.line == 0 : job.first_of_group(p.row); });
}

// ---- whole groups
template <Kind kKind>
__global__ void __launch_bounds__(kFlatThreads, kFlatResident)
    together_kernel(const __grid_constant__ QuantizeJob job) {
    wait_for_previous();
    __shared__ int found[kTileBlocks];
    __shared__ Held held;
    const int64_t row = int64_t{blockIdx.x} * job.tiles.rows;
    const auto rows = static_cast<uint32_t>(min(int64_t{job.tiles.rows}, job.a.rows - row));
    const Span s(job.tiles, row, rows, 0u);
    held.fetch(job, s);
    for (int i = threadIdx.x; i < kTileBlocks; i += kFlatThreads) found[i] = 0;
    held.wait();
    __syncthreads();
#pragma unroll 1
    for (int h = 0; h < kTileHeld; ++h) {
        const Place p(job.tiles, s, Held::number(h));
        uint32_t w[8];
        const uint32_t top = held.load(h, w);
        store_runs(found, p.inside ? static_cast<int>(job.tiles.lines.divide(p.line)) : -1,
                   static_cast<int>(top < 0x7F80 ? top : largest_finite(w)) << 16);
    }
    __syncthreads();
    const auto group = [&](const Place& p) { return p.inside ? job.tiles.lines.divide(p.line) : 0; };
    quantize_held<kKind>(
        job, s, held,
        [&](const Place& p) { return outer_from_amax(rule_of<kKind>(), __int_as_float(found[group(p)])); },
        [&](const Place& p) { return group(p) * job.tiles.lines.by == p.line; });
}

// ---- groups that are read twice
// The amax of a group's piece, plus one, so that it is no zero.
__device__ inline uint32_t find_part(const QuantizeJob& job, const Span& s) {
    uint4 v[2 * kTileHeld] = {};
#pragma unroll
    for (int i = 0; i < 2 * kTileHeld; ++i) {
        const uint32_t piece = i * kFlatThreads + threadIdx.x;
        if (piece < 2 * s.count) v[i] = *Held::piece_of_row(job, Place(job.tiles, s, piece / 2), piece);
    }
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 2 * kTileHeld; ++i)
        most = max2(most, max2(max2(v[i].x & kMagnitudes, v[i].y & kMagnitudes),
                               max2(v[i].z & kMagnitudes, v[i].w & kMagnitudes)));
    most = larger_half(most);
    if (most >= 0x7F80) {  // NaN or Inf among them
        most = 0;
#pragma unroll
        for (int i = 0; i < 2 * kTileHeld; i += 2) {
            uint32_t w[8];
            unpack_block(v[i], v[i + 1], w);
            most = max(most, largest_finite(w));
        }
    }
    return row_max<kFlatThreads>(most) + 1;
}

// The amax of a group, once all its pieces are there; `first` is what was `found` of the thread's first one.
__device__ inline uint32_t await_amax(const volatile uint32_t* found, uint32_t count, uint32_t first) {
    uint32_t most = 1;
    for (uint32_t i = threadIdx.x; i < count; i += kFlatThreads) {
        uint32_t v = i == threadIdx.x ? first : found[i];
        while (v == 0) {
            __nanosleep(100);
            v = found[i];
        }
        most = max(most, v);
    }
    return row_max<kFlatThreads>(most) - 1;
}

template <Kind kKind>
__global__ void __launch_bounds__(kFlatThreads, kFlatResident)
    ahead_kernel(const __grid_constant__ QuantizeJob job) {
    wait_for_previous();
    __shared__ Held held;
    __shared__ uint32_t ticket;
    if (threadIdx.x == 0) ticket = atomicAdd(job.ticket, 1u);
    __syncthreads();
    const uint32_t number = ticket, parts = job.tiles.parts;
    const uint32_t step = number / (2 * parts), turn = number % (2 * parts);
    const bool finds = turn < parts;
    const int64_t group = int64_t{step} - (finds ? 0 : job.tiles.lead), row = group * job.a.mid;
    if (group < 0 || row >= job.a.rows) return;
    const uint32_t part = finds ? turn : turn - parts;
    const Span s(job.tiles, row, static_cast<uint32_t>(min(job.a.mid, job.a.rows - row)), part);
    volatile uint32_t* found = job.found + group * parts;
    if (finds) {
        const uint32_t amax = find_part(job, s);
        if (threadIdx.x == 0) found[part] = amax;
        return;
    }
    if (s.count == 0) return;                                   // the last group has fewer rows
    const uint32_t first = found[min(threadIdx.x, parts - 1)];  // it most likely is there
    held.fetch(job, s);
    const uint32_t amax = await_amax(found, parts, first);
    const Outer o = outer_from_amax(rule_of<kKind>(), bits_float(amax << 16));
    held.wait();
    quantize_held<kKind>(
        job, s, held, [&](const Place&) { return o; },
        [&](const Place& p) { return part == 0 && p.line == 0; });
}

// ---- launch
template <Kind kKind>
void launch_flat(const QuantizeJob& job, cudaStream_t stream) {
    const auto grid = static_cast<unsigned>(thread_blocks(job));
    if constexpr (kKind != kMx) {
        if (job.way == Way::kTogether)
            return launch_kernel(together_kernel<kKind>, grid, kFlatThreads, 0, stream, job);
        if (job.way == Way::kAhead)
            return launch_kernel(ahead_kernel<kKind>, grid, kFlatThreads, 0, stream, job);
    }
    launch_kernel(flat_kernel<kKind>, grid, kFlatThreads, 0, stream, job);
}

}  // namespace
}  // namespace fp4bf16
