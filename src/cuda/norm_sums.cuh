// Statistics of group normalisation from given sums by channel, see norm_apply.cuh.
#pragma once

#include "norm.cuh"

namespace fp4bf16 {
namespace {

// A channel's sums over an image: its parts, one after the other.
__device__ inline float2 channel_sums(const fp4bf16_group_norm_args& a, int64_t image, int64_t channel) {
    const int source = channel >= a.sum_channels[0] ? 1 : 0;
    const int64_t width = a.sum_channels[source], parts = a.sum_parts[source];
    const auto* from = reinterpret_cast<const float2*>(a.sums[source]) + image * parts * width + channel -
                       (source == 0 ? 0 : a.sum_channels[0]);
    float2 sum = *from;
#pragma unroll 4
    for (int64_t part = 1; part < parts; ++part) {
        from += width;
        const float2 v = *from;
        sum.x += v.x, sum.y += v.y;
    }
    return sum;
}

// Mean and rstd of a group from its sums. In double, as are the sums over channels: what the variance loses
// where the mean is far from zero then is what the channels' sums have lost.
__device__ inline float2 statistics(double sum, double square, double inverse_count, float eps) {
    const double mean = sum * inverse_count, rest = fma(-mean, mean, square * inverse_count);
    const double variance = rest < 0.0 ? 0.0 : rest;  // NaN stays
    return make_float2(static_cast<float>(mean), rsqrtf(static_cast<float>(variance + eps)));
}

}  // namespace
}  // namespace fp4bf16
