// From checked arguments to a launch of one configuration of sm90_conv.cuh.
#pragma once

#include "sm90_conv.cuh"
#include "sm90_conv_host.h"
#include "sm90_launch.cuh"

namespace fp4bf16 {

template <class C>
fp4bf16_status launch_conv(const ConvParams& params, cudaStream_t stream) {
    return launch_persistent<C, kConvSharedBytes<C>, sm90_conv<C>>("conv2d", params, params.schedule.total(),
                                                                   stream);
}

template <class C>
constexpr ConvConfig describe_conv(const char* name) {
    static_assert(kConvSharedBytes<C> <= 227 * 1024, "a block has 227 KiB of shared memory");
    return {name, C::kTileM, C::kTileN, C::kClusterM, C::kClusterN, C::kPromote, C::kBN, launch_conv<C>};
}

}  // namespace fp4bf16
