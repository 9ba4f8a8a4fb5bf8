// The plan of a gradient in the weights (configuration, box of pixels, number of runs), its launch, and the
// kernel that adds up the runs.
#include "sm90_wgrad.cuh"

#include <cmath>

#include "sm90_conv.h"
#include "sm90_launch.cuh"
#include "tensor_map.h"

namespace fp4bf16 {
namespace {

// What an estimate of the time is made of, microseconds on an H200. The plan depends on the shape alone, so
// that the order of the sums does: on another GPU it is as right, if not as fast.
constexpr int kMultiprocessors = 132, kMostSplits = 132;
constexpr double kUnitTime = 6.0;        // of a unit's first load and last store
constexpr double kReduceTime = 4.0;      // of a second kernel
constexpr double kPartialBytes = 3.0e6;  // written and read again, in one microsecond

constexpr int kTileM = 128;

struct WgradConfig {
    int tile_n, cluster_m, cluster_n;
    double tile_time;  // of a k-tile, microseconds on an H200
    fp4bf16_status (*launch)(const WgradParams& params, cudaStream_t stream);

    int64_t slots() const { return kMultiprocessors / (cluster_m * cluster_n); }
};

template <int kTileN, int kStages, int kClusterM, int kClusterN>
using Config = DualConfig<kTileM, kTileN, kStages, kClusterM, kClusterN, false, true, true>;

template <class C>
fp4bf16_status launch(const WgradParams& p, cudaStream_t stream) {
    return launch_persistent<C, C::kSharedBytes, sm90_wgrad<C>>(
        "conv2d_wgrad", p, int64_t{p.tiles_m} * p.tiles_n * p.splits, stream);
}

template <class C>
constexpr WgradConfig describe(double tile_time) {
    return {C::kTileN, C::kClusterM, C::kClusterN, tile_time, launch<C>};
}

// Two CTAs share x where there are channels of g for both, else they share g.
constexpr WgradConfig kConfigs[] = {
    describe<Config<256, 4, 2, 1>>(0.90),
    describe<Config<192, 5, 1, 2>>(0.75),
    describe<Config<128, 6, 1, 1>>(0.70),
};
constexpr int kConfigCount = sizeof kConfigs / sizeof kConfigs[0];

struct WgradPlan {
    int config = 0, log_w = 0, log_h = 0;
    int64_t boxes_w = 1, boxes_h = 1, k_tiles = 1;
    int64_t c_blocks = 0, blocks = 0, tiles_m = 0, tiles_n = 0, splits = 1;
    double partial_time = 0.0;  // of writing and adding up one run

    const WgradConfig& chosen() const { return kConfigs[config]; }
    int64_t sum_rows() const { return splits * tiles_n * chosen().cluster_n; }
};

// The box of 64 pixels of which the fewest cover (n, oh, ow); of those the widest.
void choose_box(const fp4bf16_conv2d_wgrad_args& a, WgradPlan* plan) {
    int64_t fewest = INT64_MAX;
    for (int log_w = 6; log_w >= 0; --log_w)
        for (int log_h = 6 - log_w; log_h >= 0; --log_h) {
            const int64_t w = ceil_div(a.ow, 1 << log_w), h = ceil_div(a.oh, 1 << log_h);
            const int64_t boxes = w * h * ceil_div(a.n, kBoxPixels >> (log_w + log_h));
            if (boxes >= fewest) continue;
            fewest = boxes;
            plan->log_w = log_w, plan->log_h = log_h;
            plan->boxes_w = w, plan->boxes_h = h, plan->k_tiles = boxes;
        }
}

// A configuration and a number of runs, if they are faster than the best so far.
void consider(const fp4bf16_conv2d_wgrad_args& a, int config, int64_t splits, double* best, WgradPlan* plan) {
    const WgradConfig& c = kConfigs[config];
    const int64_t m = ceil_div(a.o, kTileM * c.cluster_m);
    const int64_t n = ceil_div(plan->blocks, c.tile_n / kBlockChannels * c.cluster_n);
    const double turns = static_cast<double>(ceil_div(m * n * splits, c.slots()));
    double time = turns * (static_cast<double>(ceil_div(plan->k_tiles, splits)) * c.tile_time + kUnitTime);
    if (splits > 1) time += kReduceTime + static_cast<double>(splits) * plan->partial_time;
    if (time >= *best) return;
    *best = time;
    plan->config = config, plan->tiles_m = m, plan->tiles_n = n, plan->splits = splits;
}

// For a number of turns (tiles that a cluster computes one after another) as many runs as fill them, or so
// many that another would cost more to add up than it saves.
WgradPlan make_plan(const fp4bf16_conv2d_wgrad_args& a) {
    constexpr int kMostTurns = 6;
    WgradPlan plan;
    choose_box(a, &plan);
    plan.c_blocks = ceil_div(a.c, kBlockChannels);
    plan.blocks = a.kh * a.kw * plan.c_blocks;
    plan.partial_time = 8.0 * static_cast<double>(a.o * plan.blocks * kBlockChannels) / kPartialBytes;
    const int64_t most = plan.k_tiles < kMostSplits ? plan.k_tiles : kMostSplits;
    double best = HUGE_VAL;
    for (int i = 0; i < kConfigCount; ++i) {
        const WgradConfig& c = kConfigs[i];
        consider(a, i, 1, &best, &plan);
        const int64_t tiles = ceil_div(a.o, kTileM * c.cluster_m) *
                              ceil_div(plan.blocks, c.tile_n / kBlockChannels * c.cluster_n);
        const double even = std::sqrt(static_cast<double>(plan.k_tiles) * c.tile_time / plan.partial_time);
        for (int turns = 1; turns <= kMostTurns; ++turns) {
            int64_t splits = c.slots() * turns / tiles;
            if (splits > most) splits = most;
            if (splits < 2) continue;
            consider(a, i, splits, &best, &plan);
            if (even >= 2.0 && even < static_cast<double>(splits))
                consider(a, i, static_cast<int64_t>(even), &best, &plan);
        }
    }
    return plan;
}

int64_t partial_floats(const fp4bf16_conv2d_wgrad_args& a, const WgradPlan& plan) {
    return plan.splits * a.o * plan.blocks * kBlockChannels;
}

fp4bf16_status make_maps(const fp4bf16_conv2d_wgrad_args& a, const WgradPlan& plan, WgradParams* p) {
    const int w = 1 << plan.log_w, h = 1 << plan.log_h, n = kBoxPixels / w / h;
    FP4BF16_TRY(make_picture_map("conv2d_wgrad", "g", a.g, 2,
                                 {a.o, a.ow, a.oh, a.n, a.g_strides, {kBlockChannels, w, h, n}, 1}, &p->g));
    return make_picture_map(
        "conv2d_wgrad", "x", a.x, 2,
        {a.c, a.w, a.h, a.n, a.x_strides, {kBlockChannels, w, h, n}, static_cast<int>(a.stride)}, &p->x);
}

// ---- adding up the runs, in their order
struct ReduceParams {
    const float* partial;  // (splits, o, row); NULL: dw is there already
    const float* sums;     // (sum_rows, o); NULL: no db
    float *dw, *db;
    int64_t dw_stride;
    int splits, sum_rows, o, row, c, c_blocks;
    bool accumulate, vector;  // vector: four elements of dw are aligned and whole
};

__device__ void reduce_columns(const ReduceParams& p, int quad) {
    const int quads = p.row / 4, o = quad / quads, column = (quad - o * quads) * 4;
    const int block = column / kBlockChannels, tap = block / p.c_blocks;
    const int c = (block - tap * p.c_blocks) * kBlockChannels + column % kBlockChannels;
    if (c >= p.c) return;
    const auto* run = reinterpret_cast<const float4*>(p.partial) + quad;
    const int64_t step = int64_t{p.o} * quads;
    float4 sum = *run;
#pragma unroll 4
    for (int i = 1; i < p.splits; ++i) {
        run += step;
        const float4 v = *run;
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    float* d = p.dw + o * p.dw_stride + int64_t{tap} * p.c + c;
    if (p.vector) {
        auto* four = reinterpret_cast<float4*>(d);
        if (p.accumulate) sum.x += four->x, sum.y += four->y, sum.z += four->z, sum.w += four->w;
        *four = sum;
        return;
    }
    const float each[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (c + i < p.c) d[i] = p.accumulate ? d[i] + each[i] : each[i];
}

__device__ void reduce_bias(const ReduceParams& p, int o) {
    const float* run = p.sums + o;
    float sum = *run;
#pragma unroll 8
    for (int i = 1; i < p.sum_rows; ++i) {
        run += p.o;
        sum += *run;
    }
    p.db[o] = p.accumulate ? p.db[o] + sum : sum;
}

// A thread has four columns of dw, or one element of db.
__global__ void __launch_bounds__(kThreads) reduce_kernel(const __grid_constant__ ReduceParams p) {
    wait_for_previous();
    const int quads = p.partial != nullptr ? p.o * (p.row / 4) : 0;
    const int64_t all = quads + int64_t{p.sums != nullptr ? p.o : 0};
    for (int64_t e = blockIdx.x * int64_t{kThreads} + threadIdx.x; e < all;
         e += int64_t{kThreads} * gridDim.x) {
        if (e < quads)
            reduce_columns(p, static_cast<int>(e));
        else
            reduce_bias(p, static_cast<int>(e - quads));
    }
}

fp4bf16_status reduce(const fp4bf16_conv2d_wgrad_args& a, const WgradPlan& plan, const WgradParams& w,
                      cudaStream_t stream) {
    ReduceParams p{};
    p.partial = w.out != a.dw ? w.out : nullptr;
    p.sums = w.sums, p.dw = a.dw, p.db = a.db;
    p.splits = w.splits, p.sum_rows = static_cast<int>(plan.sum_rows());
    p.o = w.o, p.row = w.blocks * kBlockChannels, p.c = w.c, p.c_blocks = w.c_blocks;
    p.dw_stride = a.dw_stride, p.accumulate = a.accumulate != 0;
    p.vector = reinterpret_cast<uintptr_t>(a.dw) % 16 == 0 && a.dw_stride % 4 == 0 && a.c % 4 == 0;
    const int64_t work =
        (p.partial != nullptr ? int64_t{p.o} * (p.row / 4) : 0) + (p.sums != nullptr ? p.o : 0);
    if (work == 0) return FP4BF16_OK;
    launch_kernel(reduce_kernel, grid_for(work), kThreads, 0, stream, p);
    return cuda_result(cudaGetLastError(), "conv2d_wgrad");
}

}  // namespace

int64_t sm90_conv2d_wgrad_workspace(const fp4bf16_conv2d_wgrad_args& a) {
    const WgradPlan plan = make_plan(a);
    const int64_t sums = a.db != nullptr ? plan.sum_rows() * a.o : 0;
    return 4 * (partial_floats(a, plan) + sums);
}

fp4bf16_status sm90_conv2d_wgrad(const fp4bf16_conv2d_wgrad_args& a, cudaStream_t stream) {
    const WgradPlan plan = make_plan(a);
    if (plan.k_tiles > INT32_MAX || plan.blocks * (kBlockChannels / 4) > INT32_MAX / a.o ||
        plan.tiles_m * plan.tiles_n > INT32_MAX / 2 / plan.splits)
        return fail(
            FP4BF16_INVALID_ARGUMENT,
            "conv2d_wgrad: g (%lld, %lld, %lld, %lld) and %lld columns of dw make more than 2^31 tiles; "
            "split the batch or the channels",
            static_cast<long long>(a.n), static_cast<long long>(a.oh), static_cast<long long>(a.ow),
            static_cast<long long>(a.o), static_cast<long long>(a.kh * a.kw * a.c));
    WgradParams p{};
    FP4BF16_TRY(make_maps(a, plan, &p));
    p.log_w = plan.log_w, p.log_h = plan.log_h;
    p.boxes_w = static_cast<int>(plan.boxes_w), p.boxes_h = static_cast<int>(plan.boxes_h);
    p.k_tiles = static_cast<int>(plan.k_tiles), p.splits = static_cast<int>(plan.splits);
    p.tiles_m = static_cast<int>(plan.tiles_m), p.tiles_n = static_cast<int>(plan.tiles_n);
    p.o = static_cast<int>(a.o), p.c = static_cast<int>(a.c);
    p.c_blocks = static_cast<int>(plan.c_blocks), p.blocks = static_cast<int>(plan.blocks);
    p.kw = static_cast<int>(a.kw), p.stride = static_cast<int>(a.stride);
    p.top = static_cast<int>(a.top), p.left = static_cast<int>(a.left);
    auto* workspace = static_cast<float*>(a.workspace);
    p.out = workspace, p.row_stride = plan.blocks * kBlockChannels, p.split_stride = a.o * p.row_stride;
    if (plan.splits == 1 && a.accumulate == 0 && a.c % kBlockChannels == 0 && a.dw_stride % 2 == 0 &&
        reinterpret_cast<uintptr_t>(a.dw) % 8 == 0)  // whole blocks, in pairs: nothing is left to do
        p.out = a.dw, p.row_stride = a.dw_stride;
    if (a.db != nullptr) p.sums = workspace + partial_floats(a, plan);
    FP4BF16_TRY(plan.chosen().launch(p, stream));
    return reduce(a, plan, p, stream);
}

}  // namespace fp4bf16
