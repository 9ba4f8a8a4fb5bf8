// fp4bf16_group_norm and its gradient: checks, how tiles are cut, choice of the kernels.
#include "norm.cuh"
#include "norm_apply.cuh"
#include "norm_slab.cuh"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

namespace fp4bf16 {
namespace {

constexpr int64_t kLimit = int64_t{1} << 40;

// Numbers of either direction.
template <typename Args>
fp4bf16_status check_numbers(const char* f, const Args& a) {
    FP4BF16_TRY(check_range(f, "n", a.n, 0, kLimit));
    FP4BF16_TRY(check_range(f, "pixels", a.pixels, 0, kLimit));
    FP4BF16_TRY(check_range(f, "c", a.c, 0, kLimit));
    FP4BF16_TRY(check_range(f, "groups", a.groups, 1, kLimit));
    if (static_cast<double>(a.n) * static_cast<double>(a.pixels) * static_cast<double>(a.c) > 0x1p60)
        return fail(FP4BF16_INVALID_ARGUMENT, "%s: n * pixels * c is %lld * %lld * %lld, but at most 2^60", f,
                    static_cast<long long>(a.n), static_cast<long long>(a.pixels),
                    static_cast<long long>(a.c));
    if (a.c % a.groups != 0)
        return fail(FP4BF16_INVALID_ARGUMENT, "%s: c is %lld, but must be a multiple of groups, %lld", f,
                    static_cast<long long>(a.c), static_cast<long long>(a.groups));
    if (a.activation == FP4BF16_NONE || a.activation == FP4BF16_SILU) return FP4BF16_OK;
    return fail(FP4BF16_INVALID_ARGUMENT,
                "%s: activation is %d, but FP4BF16_NONE (0) or FP4BF16_SILU (1) is "
                "needed",
                f, static_cast<int>(a.activation));
}

template <typename Args>
bool empty(const Args& a) {
    return a.n == 0 || a.pixels == 0 || a.c == 0;
}

// A picture: pointer and strides. What is written must not overlap itself.
template <typename Args>
fp4bf16_status check_picture(const char* f, const Args& a, const char* name, const void* pointer,
                             int64_t image, int64_t pixel, bool written) {
    FP4BF16_TRY(check_pointer(f, name, pointer, 2));
    const int64_t low = written ? a.c : -kLimit;
    char stride[32];
    std::snprintf(stride, sizeof stride, "%s_image", name);
    if (a.n > 1) FP4BF16_TRY(check_range(f, stride, image, low, kLimit));
    std::snprintf(stride, sizeof stride, "%s_pixel", name);
    return a.pixels > 1 ? check_range(f, stride, pixel, low, kLimit) : FP4BF16_OK;
}

fp4bf16_status check_floats(const char* f, const char* name, const float* pointer, bool optional) {
    return pointer == nullptr && optional ? FP4BF16_OK : check_pointer(f, name, pointer, alignof(float));
}

// ---- tiles
// Channels of a tile: the least multiple of `unit` that divides c and is at least `want`, or the one below it
// where that is more than twice as much.
int64_t tile_width(int64_t c, int64_t unit, int64_t want) {
    int64_t below = unit;
    for (int64_t width = unit; width <= c; width += unit) {
        if (c % width != 0) continue;
        if (width >= want) return width > 2 * want ? below : width;
        below = width;
    }
    return below;
}

// Whether tiles of this width fit; the plan then is complete.
bool cut(const NormShape& shape, int64_t width, int64_t tile_bytes, NormPlan* p) {
    const int64_t most_bytes = shape.clusters ? 200 << 10 : 88 << 10, chunks = width / 8;
    int64_t parts = 1;
    while (shape.clusters && parts < kTeam &&
           4 * ceil_div(shape.pixels, parts) * width * shape.bytes > 5 * tile_bytes)
        parts *= 2;
    const int64_t part = ceil_div(shape.pixels, parts), bytes = part * width * shape.bytes;
    if (chunks > kNormThreads / 2 || bytes > most_bytes || part > 2047) return false;
    // Rows, and with them every sum's order, do not depend on n: an image gives the same bits in any batch.
    const int64_t room = parts > 1 ? 1 : std::max<int64_t>(1, tile_bytes / bytes);
    const int64_t most_images = std::min(room, kNormThreads / chunks),
                  images = std::min(most_images, shape.n);
    const int64_t aimed = most_images * part * width / shape.per_thread;
    const int64_t threads = std::min<int64_t>(kNormThreads, std::max<int64_t>(64, aimed));
    int64_t rows = std::max<int64_t>(1, std::min(part, threads / (most_images * chunks)));
    const int64_t even = 16 / std::gcd<int64_t>(16, chunks);  // rows whose chunks are a multiple of 16
    if (rows >= even) rows -= rows % even;
    if (part > 64 * rows) return false;  // bits of store_fp4's special blocks
    p->pixels = static_cast<int>(shape.pixels), p->width = static_cast<int>(width);
    p->chunks = static_cast<int>(chunks), p->group = static_cast<int>(shape.c / shape.groups);
    p->inverse_count = 1.0f / (static_cast<float>(p->pixels) * static_cast<float>(p->group));
    p->images = static_cast<int>(images), p->part = static_cast<int>(part);
    p->parts = static_cast<int>(parts), p->rows = static_cast<int>(rows);
    p->tiles = static_cast<int>(shape.c / width);
    p->groups = p->width / p->group, p->parts_shift = 0;
    while (1 << p->parts_shift < p->parts) ++p->parts_shift;
    p->threads = static_cast<int>(32 * ceil_div(images * rows * chunks, 32));
    p->swizzle = rows * chunks % 16 == 0;
    p->blocks = ceil_div(shape.n, images);
    p->by_chunks = reciprocal_of(p->chunks), p->by_rows = reciprocal_of(p->rows);
    p->by_pairs = reciprocal_of(std::max(1, p->chunks / 2)), p->by_double_rows = reciprocal_of(2 * p->rows);
    p->by_units = reciprocal_of(p->group / 4);
    return int64_t{p->tiles} * p->parts <= 0x7FFFFFFF && p->blocks <= int64_t{65535} * 65535;
}

}  // namespace

bool norm_plan(const NormShape& shape, NormPlan* plan) {
    const int64_t group = shape.c / shape.groups, unit = std::lcm(group, shape.align);
    if (group % 4 != 0 || shape.c % shape.align != 0 || unit > 4 * kNormThreads) return false;
    const int64_t tile_bytes = shape.bytes << 14;
    const int64_t want = tile_bytes / (shape.bytes * std::min(shape.pixels, shape.most_pixels));
    return cut(shape, tile_width(shape.c, unit, std::min<int64_t>(want, 4 * kNormThreads)), tile_bytes,
               plan) ||
           cut(shape, unit, tile_bytes, plan);
}

namespace {

bool strides_fit(const void* pointer, int64_t image, int64_t pixel) {
    return pointer == nullptr || (aligned(pointer, 16) && image % 8 == 0 && pixel % 8 == 0);
}

// ---- forward
bool gives_fp4(const fp4bf16_group_norm_args& a) { return a.expanded != nullptr || a.packed != nullptr; }

bool forward_fits(const fp4bf16_group_norm_args& a) {
    return strides_fit(a.x, a.x_image, a.x_pixel) && strides_fit(a.y, a.y_image, a.y_pixel) &&
           (a.expanded == nullptr || aligned(a.expanded, 16)) &&
           (a.packed == nullptr || aligned(a.packed, 8));
}

bool forward_plan(const fp4bf16_group_norm_args& a, bool clusters, NormPlan* plan) {
    // The same tiles, and so the same bits of y, with and without FP4 results.
    // Small pictures take more threads, so that more tiles are under way (measured on an H200).
    const int64_t per_thread = a.pixels <= 16 ? 64 : 128;
    const NormShape shape = {a.n, a.pixels,   a.c, a.groups, a.c % 16 == 0 ? 16 : 8,
                             2,   per_thread, 256, clusters};
    return forward_fits(a) && norm_plan(shape, plan);
}

bool forward_slabs(const fp4bf16_group_norm_args& a, NormSlabs* slabs) {
    return forward_fits(a) && norm_slabs(a.n, a.pixels, a.c, a.groups, 1, slabs);
}

// Room for the statistics that the caller does not want, where the kernels pass them in memory. Does not ask
// for the device: without clusters fewer shapes fit.
int64_t forward_workspace(const fp4bf16_group_norm_args& a) {
    if (empty(a) || (a.mean != nullptr && a.rstd != nullptr)) return 0;
    NormPlan plan;
    ApplyPlan apply;
    if (a.sums[0] != nullptr ? apply_plan(a, &apply) : forward_plan(a, false, &plan)) return 0;
    return 2 * a.n * a.groups * static_cast<int64_t>(sizeof(float));
}

// The given sums: those of all channels, side by side.
fp4bf16_status check_sums(const fp4bf16_group_norm_args& a) {
    const char* f = "group_norm";
    if (a.sums[0] == nullptr && a.sums[1] == nullptr) return FP4BF16_OK;
    constexpr const char* kNames[2] = {"sums[0]", "sums[1]"};
    constexpr const char* kParts[2] = {"sum_parts[0]", "sum_parts[1]"};
    constexpr const char* kChannels[2] = {"sum_channels[0]", "sum_channels[1]"};
    int64_t channels = 0;
    for (int i = 0; i < 2; ++i) {
        if (i == 1 && a.sums[i] == nullptr) break;
        FP4BF16_TRY(check_pointer(f, kNames[i], a.sums[i], 2 * alignof(float)));
        FP4BF16_TRY(check_range(f, kParts[i], a.sum_parts[i], 1, kLimit));
        FP4BF16_TRY(check_range(f, kChannels[i], a.sum_channels[i], 1, kLimit));
        channels += a.sum_channels[i];
    }
    if (channels == a.c) return FP4BF16_OK;
    return fail(FP4BF16_INVALID_ARGUMENT,
                "group_norm: sum_channels are %lld and %lld, but c is %lld; give the sums of all channels, "
                "or none",
                static_cast<long long>(a.sum_channels[0]),
                static_cast<long long>(a.sums[1] == nullptr ? 0 : a.sum_channels[1]),
                static_cast<long long>(a.c));
}

fp4bf16_status check_forward(const fp4bf16_group_norm_args& a) {
    const char* f = "group_norm";
    FP4BF16_TRY(check_sums(a));
    FP4BF16_TRY(check_picture(f, a, "x", a.x, a.x_image, a.x_pixel, false));
    FP4BF16_TRY(check_floats(f, "gamma", a.gamma, false));
    FP4BF16_TRY(check_floats(f, "beta", a.beta, false));
    FP4BF16_TRY(check_floats(f, "mean", a.mean, true));
    FP4BF16_TRY(check_floats(f, "rstd", a.rstd, true));
    if (a.y != nullptr) FP4BF16_TRY(check_picture(f, a, "y", a.y, a.y_image, a.y_pixel, true));
    FP4BF16_TRY(check_floats(f, "norms", a.norms, true));
    FP4BF16_TRY(check_run_if(f, a.run_if));
    if (a.norms != nullptr && !gives_fp4(a))
        return fail(FP4BF16_INVALID_ARGUMENT,
                    "group_norm: norms is given, but neither expanded nor packed is, whose error it is; pass "
                    "one of them, or NULL");
    if (!gives_fp4(a)) return FP4BF16_OK;
    if (a.c % 16 != 0)
        return fail(FP4BF16_INVALID_ARGUMENT,
                    "group_norm: c is %lld, but FP4 results need a multiple of 16; quantise y by itself",
                    static_cast<long long>(a.c));
    if (a.packed != nullptr && a.block_scale == nullptr)
        return fail(FP4BF16_INVALID_ARGUMENT, "group_norm: block_scale is NULL, but packed needs it");
    return check_floats(f, "outer_scale", a.outer_scale, false);
}

// Kernels of a forward, the first that takes the shape and the addresses.
struct ForwardWay {
    enum { kApply, kSlabs, kTiles, kSimple } way;
    ApplyPlan apply;
    NormSlabs slabs;
    NormPlan tiles;

    ForwardWay(const fp4bf16_group_norm_args& a, bool clusters) : way(kSimple), apply(), slabs(), tiles() {
        if (a.sums[0] != nullptr)
            way = apply_plan(a, &apply) ? kApply : kSimple;
        else
            way = forward_slabs(a, &slabs) ? kSlabs : forward_plan(a, clusters, &tiles) ? kTiles : kSimple;
    }

    // Thread blocks that write FP4 results, each its part of `norms`.
    int64_t parts(const fp4bf16_group_norm_args& a) const {
        if (way == kApply) return norm_apply_parts(a, apply);
        if (way == kSlabs) return a.n * ceil_div(slabs.slabs, slabs.teams) * slabs.parts;
        return way == kTiles ? tiles.blocks * tiles.tiles * tiles.parts : norm_simple_parts(a);
    }
};

// ---- backward
// Two rows of partial sums an image at most, and what the kernels for any shape pass in memory.
int64_t backward_floats(const fp4bf16_group_norm_backward_args& a) { return a.n * (3 * a.c + 2 * a.groups); }

fp4bf16_status check_backward(const fp4bf16_group_norm_backward_args& a) {
    const char* f = "group_norm_backward";
    FP4BF16_TRY(check_picture(f, a, "x", a.x, a.x_image, a.x_pixel, false));
    FP4BF16_TRY(check_picture(f, a, "g", a.g, a.g_image, a.g_pixel, false));
    if (a.add != nullptr) FP4BF16_TRY(check_picture(f, a, "add", a.add, a.add_image, a.add_pixel, false));
    FP4BF16_TRY(check_picture(f, a, "dx", a.dx, a.dx_image, a.dx_pixel, true));
    FP4BF16_TRY(check_floats(f, "gamma", a.gamma, false));
    FP4BF16_TRY(check_floats(f, "beta", a.beta, false));
    FP4BF16_TRY(check_floats(f, "mean", a.mean, false));
    FP4BF16_TRY(check_floats(f, "rstd", a.rstd, false));
    FP4BF16_TRY(check_floats(f, "dgamma", a.dgamma, true));
    FP4BF16_TRY(check_floats(f, "dbeta", a.dbeta, true));
    FP4BF16_TRY(check_floats(f, "dshift", a.dshift, true));
    return check_pointer(f, "workspace", a.workspace, 16);
}

bool backward_fits(const fp4bf16_group_norm_backward_args& a) {
    return strides_fit(a.x, a.x_image, a.x_pixel) && strides_fit(a.g, a.g_image, a.g_pixel) &&
           strides_fit(a.add, a.add_image, a.add_pixel) && strides_fit(a.dx, a.dx_image, a.dx_pixel);
}

bool backward_plan(const fp4bf16_group_norm_backward_args& a, bool clusters, NormPlan* plan) {
    // Narrower tiles of more pixels than forward: 0.73 of the time at 1024 pixels (measured on an H200).
    const NormShape shape = {a.n, a.pixels, a.c, a.groups, 8, 4, 64, 512, clusters};
    return backward_fits(a) && norm_plan(shape, plan);
}

// A slab's lane keeps 32 elements at most: images of 256 pixels, and of 2048 by clusters.
bool backward_slabs(const fp4bf16_group_norm_backward_args& a, bool clusters, NormSlabs* slabs) {
    return backward_fits(a) && aligned(a.gamma, 16) && aligned(a.beta, 16) &&
           norm_slabs(a.n, a.pixels, a.c, a.groups, clusters ? kTeam : 1, slabs);
}

}  // namespace
}  // namespace fp4bf16

using namespace fp4bf16;

extern "C" int64_t fp4bf16_group_norm_workspace_size(const fp4bf16_group_norm_args* args) {
    if (args == nullptr) return fail(FP4BF16_INVALID_ARGUMENT, "group_norm: args is NULL"), -1;
    return check_numbers("group_norm", *args) == FP4BF16_OK ? forward_workspace(*args) : -1;
}

extern "C" int64_t fp4bf16_group_norm_norm_parts(const fp4bf16_group_norm_args* args) {
    const char* f = "group_norm_norm_parts";
    if (args == nullptr) return fail(FP4BF16_INVALID_ARGUMENT, "%s: args is NULL", f), -1;
    if (check_numbers(f, *args) != FP4BF16_OK) return -1;
    if (args->c % 16 != 0)
        return fail(FP4BF16_INVALID_ARGUMENT, "%s: c is %lld, but FP4 results need a multiple of 16", f,
                    static_cast<long long>(args->c)),
               -1;
    if (empty(*args)) return 0;
    int major = 9, minor = 0;  // without a device: Hopper's
    if (compute_capability(f, &major, &minor) != FP4BF16_OK) major = 9;
    return ForwardWay(*args, major >= 9).parts(*args);
}

extern "C" fp4bf16_status fp4bf16_group_norm(const fp4bf16_group_norm_args* args, void* stream) {
    if (args == nullptr) return fail(FP4BF16_INVALID_ARGUMENT, "group_norm: args is NULL");
    NormJob job{};
    job.a = *args;
    FP4BF16_TRY(check_numbers("group_norm", job.a));
    if (!(job.a.eps >= 0.0f && std::isfinite(job.a.eps)))
        return fail(FP4BF16_INVALID_ARGUMENT, "group_norm: eps is %g, but must be finite and at least 0",
                    static_cast<double>(job.a.eps));
    if (empty(job.a)) return FP4BF16_OK;
    FP4BF16_TRY(check_forward(job.a));
    int major = 0, minor = 0;
    FP4BF16_TRY(compute_capability("group_norm", &major, &minor));
    const auto s = static_cast<cudaStream_t>(stream);
    const bool given = job.a.sums[0] != nullptr;
    const ForwardWay way(job.a, major >= 9);
    if (way.way == ForwardWay::kApply) return norm_apply(job.a, way.apply, s);
    if (way.way == ForwardWay::kSlabs) return norm_slab_forward({job.a, way.slabs, 0.0f}, s);
    job.plan = way.tiles;
    if (way.way == ForwardWay::kTiles) return norm_forward(job, s);
    float *mean = job.a.mean, *rstd = job.a.rstd;
    if (mean == nullptr || rstd == nullptr) {
        FP4BF16_TRY(check_pointer("group_norm", "workspace", job.a.workspace, alignof(float)));
        const auto room = static_cast<float*>(job.a.workspace);
        mean = mean == nullptr ? room : mean;
        rstd = rstd == nullptr ? room + job.a.n * job.a.groups : rstd;
    }
    return given ? norm_apply_simple(job.a, mean, rstd, s) : norm_simple(job.a, mean, rstd, s);
}

extern "C" int64_t fp4bf16_group_norm_backward_workspace_size(const fp4bf16_group_norm_backward_args* args) {
    if (args == nullptr) return fail(FP4BF16_INVALID_ARGUMENT, "group_norm_backward: args is NULL"), -1;
    if (check_numbers("group_norm_backward", *args) != FP4BF16_OK) return -1;
    return backward_floats(*args) * static_cast<int64_t>(sizeof(float));
}

extern "C" fp4bf16_status fp4bf16_group_norm_backward(const fp4bf16_group_norm_backward_args* args,
                                                      void* stream) {
    if (args == nullptr) return fail(FP4BF16_INVALID_ARGUMENT, "group_norm_backward: args is NULL");
    NormBackwardJob job{*args, {}, nullptr};
    FP4BF16_TRY(check_numbers("group_norm_backward", job.a));
    if (empty(job.a)) return FP4BF16_OK;
    FP4BF16_TRY(check_backward(job.a));
    int major = 0, minor = 0;
    FP4BF16_TRY(compute_capability("group_norm_backward", &major, &minor));
    const auto s = static_cast<cudaStream_t>(stream);
    const auto room = static_cast<float*>(job.a.workspace);
    job.partial = job.a.dgamma == nullptr && job.a.dbeta == nullptr ? nullptr : room;
    if (NormSlabs slabs; backward_slabs(job.a, major >= 9, &slabs))
        return norm_slab_backward({job.a, slabs, job.partial}, s);
    if (!backward_plan(job.a, major >= 9, &job.plan)) return norm_backward_simple(job.a, room, s);
    return norm_backward(job, s);
}
