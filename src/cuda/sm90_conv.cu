// Which configuration a convolution gets, the box of pixels that its tiles are, and its launch. The gradient
// in the pictures is a convolution of g, one for each residue of the pixels by the stride, with the taps that
// meet it.
#include "sm90_conv.h"

#include <algorithm>

#include "sm90_conv.cuh"
#include "sm90_conv_host.h"
#include "tensor_map.h"

namespace fp4bf16 {
namespace {

const ConvConfig* const kConfigs[] = {&kConvPromoted256x128N, &kConvPromoted256x128M, &kConvPromoted128x128,
                                      &kConvFast128x256,      &kConvFast256x128,      &kConvFast128x128,
                                      &kConvGradient128x256,  &kConvGradient256x128,  &kConvGradient128x128,
                                      &kConvTurns128x128,     &kConvTurns128x160,     &kConvPromoted128x160,
                                      &kConvFast128x64};
constexpr int kCount = sizeof kConfigs / sizeof kConfigs[0];

// One track's operands.
struct Source {
    const void* x;
    const void* w;
    const int64_t* strides;
    int64_t w_stride;
    int n, h, w_, channels;  // of x
    int step;
    int weight_taps;  // of the weight; those used are `taps` for each phase
    int taps;
    Tap tap[kMostTaps];
};

// A convolution as the kernel sees it, whichever way it came about.
struct Problem {
    const char* op;
    bool n_major, promoted, sums;  // sums: wanted
    int n, h, w, o;                // of the result, or of each of its phases
    int phases = 1;
    Source fp4, bf16;
    ConvParams params;  // what does not depend on the configuration

    int64_t k_tiles() const {
        return fp4.taps * ceil_div(fp4.channels, 128) + bf16.taps * ceil_div(bf16.channels, 64);
    }
    int most_step() const { return std::max(fp4.taps > 0 ? fp4.step : 1, bf16.taps > 0 ? bf16.step : 1); }
};

// ---- the box of a tile

struct Box {
    int log_w, log_h, n;
    int64_t tiles_w, tiles_h, tiles_n;
    int64_t tiles() const { return tiles_w * tiles_h * tiles_n; }
};

// Sides for `rows` pixels with the fewest tiles; of equal ones the widest, then the highest.
Box box_for(const Problem& p, int rows) {
    Box best{};
    const int most = 256 / p.most_step();  // pixels that a side of a copied box may span
    for (int log_w = 6; log_w >= 0; --log_w)
        for (int log_h = 8; log_h >= 0; --log_h) {
            if (log_w + log_h > 8 || (1 << log_w) > most || (1 << log_h) > most) continue;
            const int n = rows >> (log_w + log_h);
            if (n < 1) continue;
            const Box box{log_w,
                          log_h,
                          n,
                          ceil_div(p.w, int64_t{1} << log_w),
                          ceil_div(p.h, int64_t{1} << log_h),
                          ceil_div(p.n, n)};
            if (best.n == 0 || box.tiles() < best.tiles()) best = box;
        }
    return best;
}

// Columns of tiles of one phase, in tiles of a whole cluster.
int64_t column_tiles(const ConvConfig& c, const Problem& p) {
    return ceil_div(p.o, int64_t{c.tile_n} * c.cluster_n);
}

// ---- choice

bool fits(const ConvConfig& c, const Problem& p) {
    return c.n_major == p.n_major && c.promoted == p.promoted;
}

// Whether what was measured of FP8 sums kept by the tensor cores (bench/NOTES.md) is known of the
// configuration.
bool measured(const ConvConfig& c, const Problem& p) { return p.fp4.taps > 0 && !c.promoted; }

// Clocks of a k-tile. The tensor cores take 4096 products of FP8 (half as many of BF16) a clock, shared
// memory moves 128 bytes: a wgmma reads its 64 rows of A and all of B, and each stage is written once. A
// promoted sum that a warpgroup cannot add while the other's products run costs a sixth more. Measured on
// E4M3: what is moved costs warpgroups in turn and tiles of 256 rows a fiftieth only.
double k_tile_clocks(const ConvConfig& c, const Problem& p) {
    const double m = c.tile_m, n = c.tile_n, products = m * n / 32;
    const double moved = (m * 128 + m / 64 * n * 128 + (m + n) * 128) / 128;
    if (measured(c, p) && (c.in_turn || c.tile_m == 256)) return products * 1.02;
    return std::max({products, moved, c.promoted && c.tile_m == 256 ? products * 7 / 6 : 0});
}

// Clocks of a tile's epilogue, about two k-tiles of 128x256. Measured on E4M3: half as much again with sums,
// twice as much on tiles of 256 rows; warpgroups in turn gain nothing by lying under each other's products.
double epilogue_clocks(const ConvConfig& c, const Problem& p) {
    const double plain = c.tile_m * c.tile_n / 16;
    if (!measured(c, p)) return plain;
    if (c.in_turn) return plain * (p.sums ? 1.75 : 1.5);
    return plain * (c.tile_m == 256 ? (p.sums ? 1.62 : 0.83) : (p.sums ? 1.5 : 1.0));
}

// Waves of tiles, each its k-tiles and an epilogue, of which on BF16 warpgroups in turn leave little
// uncovered but at the beginning and the end.
double cost(const ConvConfig& c, const Problem& p, int multiprocessors) {
    const int64_t tiles = ceil_div(box_for(p, c.tile_m).tiles(), c.cluster_m) * column_tiles(c, p) * p.phases;
    const auto waves = static_cast<double>(ceil_div(tiles, multiprocessors / (c.cluster_m * c.cluster_n)));
    return waves * k_tile_clocks(c, p) * static_cast<double>(p.k_tiles()) +
           (c.in_turn && !measured(c, p) ? 12 + waves / 8 : waves) * epilogue_clocks(c, p);
}

int choose(const Problem& p, int multiprocessors) {
    int best = -1;
    for (int i = 0; i < kCount; ++i)
        if (fits(*kConfigs[i], p) &&
            (best < 0 || cost(*kConfigs[i], p, multiprocessors) < cost(*kConfigs[best], p, multiprocessors)))
            best = i;
    return best;
}

// ---- maps

// Sides of a box of `rows` consecutive rows of a tile.
void box_sides(const ConvParams& p, int rows, int channels, int (&sides)[4]) {
    sides[0] = channels;
    sides[1] = std::min(rows, 1 << p.log_w);
    sides[2] = std::min(rows / sides[1], 1 << p.log_h);
    sides[3] = rows / (sides[1] * sides[2]);
}

fp4bf16_status source_maps(const ConvConfig& c, const Problem& p, const Source& s, int element_bytes,
                           const char* x_name, const char* w_name, CUtensorMap* x, CUtensorMap* w) {
    if (s.taps == 0) return FP4BF16_OK;
    const int elements = kTileBytes / element_bytes;
    PictureShape shape{s.channels, s.w_, s.h, s.n, s.strides, {}, s.step};
    box_sides(p.params, c.tile_m / c.cluster_n, elements, shape.box);
    FP4BF16_TRY(make_picture_map(p.op, x_name, s.x, element_bytes, shape, x));
    MapShape weight{
        int64_t{s.weight_taps} * s.channels, p.o, 1, s.w_stride, 0, elements, c.tile_n / c.cluster_m};
    if (p.n_major) weight = {p.o, s.channels, s.weight_taps, s.w_stride, p.o, 64, elements};
    return make_tensor_map(p.op, w_name, s.w, element_bytes, weight, w);
}

bool copy_engine_takes(const void* data, const int64_t (&strides)[3], int64_t n, int64_t h, int64_t w) {
    const int64_t extents[3] = {n, h, w};
    for (int i = 0; i < 3; ++i)
        if (extents[i] > 1 && (strides[i] % 8 != 0 || strides[i] <= 0)) return false;
    return reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

fp4bf16_status result_map(const ConvConfig& c, const Problem& p, const char* name, const void* data,
                          const int64_t* strides, CUtensorMap* map) {
    PictureShape shape{p.o, p.w, p.h, p.n, strides, {}, 1};
    box_sides(p.params, 64, box_channels(c.tile_n), shape.box);
    return make_picture_map(p.op, name, data, 2, shape, map);
}

// ---- sums by channel

bool is_staged(const Problem& p) {
    const ConvParams& q = p.params;
    return q.epilogue.d_dtype != FP4BF16_FLOAT32 && q.phase_strides[0] % 8 == 0 &&
           q.phase_strides[1] % 8 == 0 && copy_engine_takes(q.epilogue.d, q.d_strides, p.n, p.h, p.w);
}

// Parts of an image's pixels, of so many rows of a tile; none where boxes reach beyond the pictures, or less
// than the sixteen rows that are added up at once lie in one image. A phase has its own parts.
struct SumParts {
    int64_t count;  // of a phase
    int rows;
};

SumParts sum_parts(const ConvConfig& c, const Problem& p) {
    const Box box = box_for(p, c.tile_m);
    const int pixels = 1 << (box.log_w + box.log_h);                         // of an image in a tile
    const int rows = std::min(pixels, c.in_turn ? c.tile_m : c.tile_m / 2);  // a warpgroup's
    const int64_t count = box.tiles_w * box.tiles_h * (pixels / rows);
    const bool whole = p.w % (1 << box.log_w) == 0 && p.h % (1 << box.log_h) == 0;
    if (!whole || rows < 16 || count > INT32_MAX / kMostPhases) return {};
    return p.params.epilogue.d_dtype == FP4BF16_BFLOAT16 && is_staged(p) ? SumParts{count, rows} : SumParts{};
}

// ---- launch

ConvTrack track_of(const Source& s, int elements, int first_tap) {
    ConvTrack t{};
    const int rest = s.channels % elements;
    t.taps = s.taps, t.channels = s.channels, t.step = s.step, t.first_tap = first_tap;
    t.chunks = static_cast<int>(ceil_div(s.channels, elements));
    // An E4M3 chunk is multiplied whole or by half.
    t.tail = rest == 0 ? 4 : elements == 64 ? static_cast<int>(ceil_div(rest, 16)) : rest <= 64 ? 2 : 4;
    return t;
}

fp4bf16_status launch(const ConvConfig& c, Problem& problem, cudaStream_t stream) {
    ConvParams& p = problem.params;
    const Box box = box_for(problem, c.tile_m);
    if (box.tiles() * ceil_div(problem.o, c.tile_n) * problem.phases > INT32_MAX / 2)
        return fail(FP4BF16_INVALID_ARGUMENT,
                    "%s: the result (%d, %d, %d, %d) has more than 2^30 tiles; split the batch", problem.op,
                    problem.n, problem.h, problem.w, problem.o);
    p.log_w = box.log_w, p.log_h = box.log_h;
    p.tiles_w = static_cast<int>(box.tiles_w), p.tiles_h = static_cast<int>(box.tiles_h);
    p.by_w = Divisor(static_cast<uint32_t>(box.tiles_w)),
    p.by_h = Divisor(static_cast<uint32_t>(box.tiles_h));
    p.one_image = box.n == 1;
    p.phases = problem.phases;
    p.phase_tiles = static_cast<int>(column_tiles(c, problem));
    p.by_phase = Divisor(static_cast<uint32_t>(p.phase_tiles));
    // The phases of the same pixels lie side by side: they read the same pictures, and write the same lines.
    p.schedule = Schedule(ceil_div(box.tiles(), c.cluster_m), column_tiles(c, problem) * p.phases, 1);
    p.n = problem.n, p.h = problem.h, p.w = problem.w;
    p.fp4 = track_of(problem.fp4, 128, 0);
    const int taps8 = problem.fp4.taps * p.phases;
    p.bf16 = track_of(problem.bf16, 64, taps8);
    std::copy_n(problem.fp4.tap, taps8, p.tap);
    std::copy_n(problem.bf16.tap, problem.bf16.taps * p.phases, p.tap + taps8);
    FP4BF16_TRY(source_maps(c, problem, problem.fp4, 1, "x8", "w8", &p.x8, &p.w8));
    FP4BF16_TRY(
        source_maps(c, problem, problem.bf16, 2, problem.n_major ? "g" : "x16", "w16", &p.x16, &p.w16));
    const Epilogue& e = p.epilogue;
    p.staged = is_staged(problem);
    if (p.sums != nullptr) {
        const SumParts parts = sum_parts(c, problem);
        p.phase_parts = static_cast<int>(parts.count);
        p.sum_parts = p.phase_parts * p.phases;
        for (p.log_part = 4; 1 << p.log_part < parts.rows;) ++p.log_part;
    }
    p.prefetched = p.staged && p.residual != nullptr && p.residual_dtype == FP4BF16_BFLOAT16 &&
                   copy_engine_takes(p.residual, p.residual_strides, p.n, p.h, p.w);
    // Two biases at a time: 8 bytes of FP32, 4 of BF16.
    p.paired = box.log_w + box.log_h >= 4 && e.n % 2 == 0 && p.image_bias_stride % 2 == 0 &&
               p.image_bias_dtype != FP4BF16_FLOAT16 && reinterpret_cast<uintptr_t>(p.image_bias) % 8 == 0;
    p.one_scale = p.one_image || p.image_scale_step == 0;
    p.extra = p.alpha != 1.0f || (p.image_bias != nullptr && !p.one_image) || e.activation != FP4BF16_NONE ||
              (p.residual != nullptr && !p.prefetched);
    for (int i = 0; p.staged && i < p.phases; ++i) {
        const int64_t first = (i >> 1) * p.phase_strides[0] + (i & 1) * p.phase_strides[1];
        const char* d = static_cast<const char*>(e.d) + 2 * first;
        FP4BF16_TRY(result_map(c, problem, "d", d, p.d_strides, &p.d[i]));
    }
    if (p.prefetched)
        FP4BF16_TRY(result_map(c, problem, "residual", p.residual, p.residual_strides, &p.residual_map));
    return c.launch(p, stream);
}

fp4bf16_status multiprocessor_count(int* count) {
    int device = 0;
    FP4BF16_TRY(cuda_result(cudaGetDevice(&device), "conv2d"));
    return cuda_result(cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device), "conv2d");
}

// Index of the configuration of that number, or of the one chosen; -1: none.
int find_config(const Problem& p, int config, int multiprocessors) {
    const int i = config == 0 ? choose(p, multiprocessors) : config - 1;
    return i >= 0 && i < kCount && fits(*kConfigs[i], p) ? i : -1;
}

fp4bf16_status run(Problem& p, int config, cudaStream_t stream) {
    int count = 0;
    FP4BF16_TRY(multiprocessor_count(&count));
    const int i = find_config(p, config, count);
    if (i < 0)
        return fail(FP4BF16_INVALID_ARGUMENT,
                    "%s: config is %d, but there is none of that number (1 to %d) for these operands; pass 0",
                    p.op, config, kCount);
    return launch(*kConfigs[i], p, stream);
}

// The epilogue's part that is the same for both directions.
void set_result(ConvParams* p, void* d, fp4bf16_dtype dtype, const int64_t* strides, const void* residual,
                fp4bf16_dtype residual_dtype, const int64_t* residual_strides, int64_t o) {
    Epilogue& e = p->epilogue;
    e.d = d, e.d_dtype = dtype, e.n = static_cast<int>(o), e.alpha = 1.0f;
    p->residual = residual, p->residual_dtype = residual_dtype;
    std::copy_n(strides, 3, p->d_strides);
    std::copy_n(residual_strides, 3, p->residual_strides);
    e.vector = reinterpret_cast<uintptr_t>(d) % 8 == 0 && strides[0] % 2 == 0 && strides[1] % 2 == 0 &&
               strides[2] % 2 == 0;
}

// The result's pixels (2 y + a, 2 x + b) are phase 2 a + b, whose taps lie a lower and b further right than
// those of phase 0.
void set_phases(Problem* p, const fp4bf16_conv2d_args& a) {
    p->phases = 4, p->h /= 2, p->w /= 2;
    for (Source* s : {&p->fp4, &p->bf16}) {
        s->weight_taps = 4 * s->taps;
        for (int t = s->taps; t < s->weight_taps; ++t) {
            const Tap& first = s->tap[t % s->taps];
            const int phase = t / s->taps;
            s->tap[t] = {static_cast<int8_t>(first.dy + phase / 2), static_cast<int8_t>(first.dx + phase % 2),
                         static_cast<int16_t>(t)};
        }
    }
    ConvParams& q = p->params;
    q.phase_strides[0] = a.d_strides[1], q.phase_strides[1] = a.d_strides[2];
    q.d_strides[1] *= 2, q.d_strides[2] *= 2;
}

Problem forward_problem(const fp4bf16_conv2d_args& a) {
    Problem p{};
    p.op = "conv2d";
    p.promoted = a.c8 > 0 && a.accumulate == FP4BF16_PROMOTED;
    p.sums = a.sums != nullptr;
    p.n = static_cast<int>(a.n), p.h = static_cast<int>(a.oh), p.w = static_cast<int>(a.ow);
    p.o = static_cast<int>(a.o);
    const auto source = [&](const void* x, const void* w, const int64_t* strides, int64_t w_stride, int64_t c,
                            bool on_output) {
        Source s{x,
                 w,
                 strides,
                 w_stride,
                 static_cast<int>(a.n),
                 static_cast<int>(on_output ? a.oh : a.h),
                 static_cast<int>(on_output ? a.ow : a.w),
                 static_cast<int>(c),
                 1,
                 1,
                 0,
                 {}};
        if (c == 0) return s;
        if (on_output) return s.taps = 1, s;
        s.step = static_cast<int>(a.stride), s.taps = s.weight_taps = static_cast<int>(a.kh * a.kw);
        for (int t = 0; t < s.taps; ++t)
            s.tap[t] = {static_cast<int8_t>(t / a.kw - a.top), static_cast<int8_t>(t % a.kw - a.left),
                        static_cast<int16_t>(t)};
        return s;
    };
    p.fp4 = source(a.x8, a.w8, a.x8_strides, a.w8_stride, a.c8, false);
    p.bf16 = source(a.x16, a.w16, a.x16_strides, a.w16_stride, a.c16, a.x16_on_output != 0);
    ConvParams& q = p.params;
    set_result(&q, a.d, a.d_dtype, a.d_strides, a.residual, a.residual_dtype, a.residual_strides, a.o);
    q.epilogue.col_scale = a.col_scale, q.epilogue.col_step = a.col_scale_step;
    q.epilogue.activation = a.activation;
    q.bias = a.bias, q.bias2 = a.bias2, q.epilogue.bias_dtype = a.bias_dtype;
    if (q.bias == nullptr) std::swap(q.bias, q.bias2);
    q.alpha = a.alpha;
    // Any that is not NULL says that the biases of the columns come after alpha.
    if (q.alpha != 1.0f) q.epilogue.bias = q.bias != nullptr ? q.bias : a.image_bias;
    q.image_scale = a.image_scale, q.image_scale_step = a.image_scale_step;
    q.image_bias = a.image_bias, q.image_bias_stride = a.image_bias_stride;
    q.image_bias_dtype = a.image_bias_dtype;
    q.sums = a.sums, q.run_if = a.run_if;
    if (a.phases != 0) set_phases(&p, a);
    return p;
}

// Pixels of the result with y % stride == py, x % stride == px.
Problem gradient_problem(const fp4bf16_conv2d_dgrad_args& a, int64_t py, int64_t px) {
    Problem p{};
    p.op = "conv2d_dgrad";
    p.n_major = true;
    p.n = static_cast<int>(a.n), p.o = static_cast<int>(a.c);
    p.h = static_cast<int>(ceil_div(a.h - py, a.stride)),
    p.w = static_cast<int>(ceil_div(a.w - px, a.stride));
    p.bf16 = {a.g,
              a.w16,
              a.g_strides,
              a.w16_stride,
              static_cast<int>(a.n),
              static_cast<int>(a.oh),
              static_cast<int>(a.ow),
              static_cast<int>(a.o),
              1,
              static_cast<int>(a.kh * a.kw),
              0,
              {}};
    for (int64_t r = 0; r < a.kh; ++r)
        for (int64_t s = 0; s < a.kw; ++s) {
            const int64_t y = py + a.top - r, x = px + a.left - s;
            if (y % a.stride != 0 || x % a.stride != 0) continue;
            p.bf16.tap[p.bf16.taps++] = {static_cast<int8_t>(y / a.stride), static_cast<int8_t>(x / a.stride),
                                         static_cast<int16_t>(r * a.kw + s)};
        }
    const auto shifted = [&](const void* data, const int64_t* strides, fp4bf16_dtype dtype) -> void* {
        if (data == nullptr) return nullptr;
        const int64_t offset = (py * strides[1] + px * strides[2]) * size_of(dtype);
        return const_cast<char*>(static_cast<const char*>(data) + offset);
    };
    const auto apart = [&](const int64_t* s, int64_t* out) {
        out[0] = s[0], out[1] = s[1] * a.stride, out[2] = s[2] * a.stride;
    };
    int64_t strides[3], residual_strides[3];
    apart(a.dx_strides, strides), apart(a.residual_strides, residual_strides);
    set_result(&p.params, shifted(a.dx, a.dx_strides, a.dx_dtype), a.dx_dtype, strides,
               shifted(a.residual, a.residual_strides, a.residual_dtype), a.residual_dtype, residual_strides,
               a.c);
    p.params.alpha = 1.0f;
    return p;
}

// Of pictures whose phases were written from them: pixel y met those of phase a at 2 (y - r + top - a) + a.
// The taps of all phases make one convolution of stride 2.
Problem phase_gradient_problem(const fp4bf16_conv2d_dgrad_args& a) {
    Problem p{};
    p.op = "conv2d_dgrad";
    p.n_major = true;
    p.n = static_cast<int>(a.n), p.h = static_cast<int>(a.h), p.w = static_cast<int>(a.w);
    p.o = static_cast<int>(a.c);
    Source& s = p.bf16;
    s = {a.g, a.w16, a.g_strides, a.w16_stride, p.n, 0, 0, static_cast<int>(a.o), 2, 0, 0, {}};
    s.h = static_cast<int>(a.oh), s.w_ = static_cast<int>(a.ow);
    for (int64_t phase = 0; phase < 4; ++phase)
        for (int64_t r = 0; r < a.kh; ++r)
            for (int64_t q = 0; q < a.kw; ++q, ++s.taps)
                s.tap[s.taps] = {static_cast<int8_t>(2 * (a.top - r) - phase / 2),
                                 static_cast<int8_t>(2 * (a.left - q) - phase % 2),
                                 static_cast<int16_t>(s.taps)};
    s.weight_taps = s.taps;
    set_result(&p.params, a.dx, a.dx_dtype, a.dx_strides, a.residual, a.residual_dtype, a.residual_strides,
               a.c);
    p.params.alpha = 1.0f;
    return p;
}

fp4bf16_status check_taps(const char* op, int64_t kh, int64_t kw, int64_t top, int64_t left, int64_t extra) {
    if (kh * kw + extra <= kMostTaps && top < 64 && left < 64) return FP4BF16_OK;
    return fail(FP4BF16_INVALID_ARGUMENT,
                "%s: the kernel is %lld x %lld with padding %lld, %lld; at most %d taps and padding under 64 "
                "run here",
                op, static_cast<long long>(kh), static_cast<long long>(kw), static_cast<long long>(top),
                static_cast<long long>(left), kMostTaps - 1);
}

}  // namespace

fp4bf16_status sm90_conv2d(const fp4bf16_conv2d_args& a, cudaStream_t stream) {
    FP4BF16_TRY(check_taps("conv2d", a.phases != 0 ? 4 * a.kh : a.kh, a.kw, a.top, a.left, 1));
    Problem p = forward_problem(a);
    return run(p, a.config, stream);
}

const char* sm90_conv2d_config(const fp4bf16_conv2d_args& a, int32_t config) {
    if (config < 0 || config > kCount) return "";
    if (config > 0) return kConfigs[config - 1]->name;
    if (a.kh * a.kw * (a.phases != 0 ? 4 : 1) >= kMostTaps) return "";
    const int i = choose(forward_problem(a), 132);  // of an H100 or H200
    return i < 0 ? "" : kConfigs[i]->name;
}

int64_t sm90_conv2d_sum_parts(const fp4bf16_conv2d_args& a) {
    Problem p = forward_problem(a);
    p.sums = true;  // as the launch, to which they will be given
    int count = 0;
    if (multiprocessor_count(&count) != FP4BF16_OK) count = 132;
    const int i = find_config(p, a.config, count);
    return i < 0 ? 0 : sum_parts(*kConfigs[i], p).count * p.phases;
}

fp4bf16_status sm90_conv2d_dgrad(const fp4bf16_conv2d_dgrad_args& a, cudaStream_t stream) {
    FP4BF16_TRY(check_taps("conv2d_dgrad", a.phases != 0 ? 4 * a.kh : a.kh, a.kw, a.top, a.left, 0));
    if (a.phases != 0) {
        Problem p = phase_gradient_problem(a);
        return run(p, a.config, stream);
    }
    for (int64_t py = 0; py < std::min(a.stride, a.h); ++py)
        for (int64_t px = 0; px < std::min(a.stride, a.w); ++px) {
            Problem p = gradient_problem(a, py, px);
            FP4BF16_TRY(run(p, a.config, stream));
        }
    return FP4BF16_OK;
}

}  // namespace fp4bf16
