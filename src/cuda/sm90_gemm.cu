// Which configuration of the dual-track GEMM a product gets, and its launch.
#include "sm90_gemm.h"

namespace fp4bf16 {

extern const GemmConfig kPromoted256x128, kPromoted128x192, kPromoted128x128, kFast128x256, kFast128x128,
    kBf16Mk256, kBf16Kn256, kBf16Mn256, kBf16Mk128, kBf16Kn128, kBf16Mn128;

namespace {

// Numbered from 1.
const GemmConfig* const kConfigs[] = {&kPromoted256x128, &kPromoted128x192, &kPromoted128x128, &kFast128x256,
                                      &kFast128x128,     &kBf16Mk256,       &kBf16Kn256,       &kBf16Mn256,
                                      &kBf16Mk128,       &kBf16Kn128,       &kBf16Mn128};
constexpr int kCount = sizeof kConfigs / sizeof kConfigs[0];

bool fits(const GemmConfig& c, const fp4bf16_gemm_args& g) {
    const bool a = g.k16 > 0 && g.a16_m_major, b = g.k16 > 0 && g.b16_n_major;
    if (c.a_m_major != a || c.b_n_major != b) return false;
    if (g.k8 > 0) return !a && !b && c.promoted == (g.accumulate == FP4BF16_PROMOTED);
    return !c.promoted;
}

// Time of a product up to a factor: waves, times the k-tiles of one output tile and what comes between two of
// them (measured on an H200: about 2 k-tiles of 128 x 256), times the size of a tile. Small tiles keep the
// tensor cores waiting for shared memory; a promoted 256x128 tile waits for its additions.
double cost(const GemmConfig& c, const fp4bf16_gemm_args& g, int multiprocessors) {
    const int64_t rows = int64_t{c.tile_m} * c.cluster_m, columns = int64_t{c.tile_n} * c.cluster_n;
    const int64_t tiles = ceil_div(g.m, rows) * ceil_div(g.n, columns) * g.batch_count;
    const auto waves = static_cast<double>(ceil_div(tiles, multiprocessors / (c.cluster_m * c.cluster_n)));
    const double size = c.tile_m * c.tile_n / 32768.0;
    const auto k_tiles = static_cast<double>(ceil_div(g.k8, 128) + ceil_div(g.k16, 64));
    const double slower = size < 0.6 ? 1.15 : c.promoted && size > 0.9 ? 1.04 : 1.0;
    return waves * size * slower * (k_tiles + 2);
}

int choose(const fp4bf16_gemm_args& g, int multiprocessors) {
    int best = -1;
    for (int i = 0; i < kCount; ++i)
        if (fits(*kConfigs[i], g) &&
            (best < 0 || cost(*kConfigs[i], g, multiprocessors) < cost(*kConfigs[best], g, multiprocessors)))
            best = i;
    return best;
}

}  // namespace

const char* sm90_gemm_config(const fp4bf16_gemm_args& g, int32_t config) {
    if (config < 0 || config > kCount) return "";
    int count = 132;  // of an H100 or H200, where there is no device to ask
    if (config == 0 && multiprocessor_count("gemm", &count) != FP4BF16_OK) count = 132;
    const int i = config == 0 ? choose(g, count) : config - 1;
    return i < 0 ? "" : kConfigs[i]->name;
}

fp4bf16_status sm90_gemm(const fp4bf16_gemm_args& g, cudaStream_t stream) {
    int count = 0;
    FP4BF16_TRY(multiprocessor_count("gemm", &count));
    const int i = g.config == 0 ? choose(g, count) : g.config - 1;
    if (i < 0 || i >= kCount || !fits(*kConfigs[i], g))
        return fail(
            FP4BF16_INVALID_ARGUMENT,
            "gemm: config is %d, but there is none of that number (1 to %d) for k8 = %lld, accumulate = %d, "
            "a16_m_major = %d, b16_n_major = %d; pass 0",
            g.config, kCount, static_cast<long long>(g.k8), static_cast<int>(g.accumulate), g.a16_m_major,
            g.b16_n_major);
    return kConfigs[i]->launch(g, stream);
}

}  // namespace fp4bf16
