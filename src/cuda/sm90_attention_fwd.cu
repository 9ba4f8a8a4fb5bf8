// Attention on Hopper, forward, of at most 256 keys and 256 channels: scores by wgmma, the softmax of whole
// rows in registers, whose rounded weights are the left operand of the product with V without leaving them.
#include "attention_wgmma.cuh"
#include "sm90_attention.cuh"

namespace fp4bf16 {
namespace {

struct ForwardParams {
    CUtensorMap q, k, v, out;
    float* lse;
    float scale2;  // scale * log2(e): weights are powers of two
    int heads, q_tokens, k_tokens, causal, blocks, tiles;
};

template <int kDim>
__device__ void produce(const ForwardParams& p, const SharedRing<kStagesAll>& shared) {
    constexpr int kTokens = kStageSize / (2 * kDim);  // of V in a stage
    Writer<kStagesAll> writer{shared, {}};
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        const Work at(tile, p.blocks, p.heads);
        writer.template scores<kDim>(&p.q, &p.k, at);
#pragma unroll 1
        for (int token = 0; token < kKeys; token += kTokens) {
            uint64_t* full;
            uint8_t* stage = writer.take(kStageSize, &full);
            for (int c = 0; c < kDim; c += kTileChannels)
                ptx::copy_picture_box(stage + c * 2 * kTokens, &p.v, full, c, token, at.head, at.image);
        }
        writer.give(2);
    }
}

// s becomes the weights exp2(s - top), packed in pairs; `sum` is that of the rounded weights.
__device__ inline void softmax(const float (&s)[kKeys / 2], uint32_t (&weights)[kKeys / 4], float (&top)[2],
                               float (&sum)[2]) {
    top[0] = top[1] = -INFINITY;
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) top[lower(i)] = fmaxf(top[lower(i)], s[i]);
    top[0] = row_max(top[0]), top[1] = row_max(top[1]);
    sum[0] = sum[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) {
        const float t = top[i % 2];
        weights[i] = pack_pair<FP4BF16_BFLOAT16>(exp2_fast(s[2 * i] - t), exp2_fast(s[2 * i + 1] - t));
        sum[i % 2] += low_half(weights[i]) + high_half(weights[i]);
    }
    sum[0] = row_sum(sum[0]), sum[1] = row_sum(sum[1]);
}

// out (64, kDim) = weights times V.
template <int kDim>
__device__ inline void weighted(Reader<kStagesAll>& reader, const uint32_t (&weights)[kKeys / 4],
                                float (&out)[kDim / 2]) {
    using Mma = ptx::RegisterMma<kDim>;
    constexpr int kTokens = kStageSize / (2 * kDim), kSteps = kTokens / 16;
    int stage = 0;
    ptx::wgmma_fence();
#pragma unroll
    for (int c = 0; c < kKeys / kTokens; ++c) {
        const int before = stage;
        stage = reader.take();
        // N-major: eight tokens are 1024 bytes, blocks of 64 channels lie one after another
        const uint64_t b =
            ptx::wgmma_descriptor(uniform(reader.address(stage)), 1024, kTokens * kTileChannels * 2);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            const uint32_t* a = weights + 4 * (c * kSteps + i);
            if (c == 0 && i == 0)
                Mma::begin(out, a, b);
            else
                Mma::mma(out, a, b + i * (2048 >> 4));
        }
        ptx::wgmma_commit();
        if (c == 0) continue;
        ptx::wgmma_wait<1>();
        reader.release(before);
    }
    ptx::wgmma_wait<0>();
    reader.release(stage);
}

template <int kDim>
__device__ void consume(const ForwardParams& p, const SharedRing<kStagesAll>& shared) {
    Reader<kStagesAll> reader(shared);
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        const Work at(tile, p.blocks, p.heads);
        uint32_t weights[kKeys / 4];
        float sum[2];
        {
            const int row = reader.row(at);
            float s[kKeys / 2], top[2];
            reader.template scores<kDim>(s);
            scale_and_mask(s, p.scale2, row, p.k_tokens, p.causal != 0);
            softmax(s, weights, top, sum);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (p.lse != nullptr && threadIdx.x % 4 == 0 && row + 8 * i < p.q_tokens)
                    p.lse[at.z * p.q_tokens + row + 8 * i] = (top[i] + log2f(sum[i])) * kLn2;
                sum[i] = 1.0f / sum[i];
            }
        }
        float out[kDim / 2];
        weighted<kDim>(reader, weights, out);
        const uint32_t stage = reader.take_own();
#pragma unroll
        for (int box = 0; box < kDim / 64; ++box) {
            uint32_t pairs[16];
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const float* o = out + 32 * box + 2 * i;
                pairs[i] = pack_pair<FP4BF16_BFLOAT16>(o[0] * sum[i % 2], o[1] * sum[i % 2]);
            }
            stage_pairs(pairs, stage + box * kBoxBytes);
        }
        reader.store(&p.out, kDim / 64, Work(tile, p.blocks, p.heads));
    }
    ptx::store_wait();
}

template <int kDim>
__global__ void __launch_bounds__(kBlock, 1) sm90_attention_kernel(const __grid_constant__ ForwardParams p) {
    extern __shared__ uint8_t raw[];
    const SharedRing<kStagesAll> shared(raw);
    shared.init();
    if (threadIdx.x < 128) {
        ptx::give_registers<40>();
        if (threadIdx.x < 32 && ptx::elect()) {
            wait_for_previous();
            produce<kDim>(p, shared);
        }
        __syncwarp();
    } else {
        ptx::take_registers<232>();
        wait_for_previous();
        consume<kDim>(p, shared);
    }
}

template <int kDim>
fp4bf16_status launch(const fp4bf16_attention_args& a, cudaStream_t stream) {
    const char* op = "attention";
    ForwardParams p{};
    FP4BF16_TRY(make_head_map(op, "q", a.q, a, a.q_tokens, a.q_strides, a.dim, kQueries, &p.q));
    FP4BF16_TRY(make_head_map(op, "k", a.k, a, a.k_tokens, a.k_strides, a.dim, kKeys, &p.k));
    FP4BF16_TRY(
        make_head_map(op, "v", a.v, a, a.k_tokens, a.v_strides, a.dim, kStageSize / (2 * kDim), &p.v));
    FP4BF16_TRY(make_head_map(op, "out", a.out, a, a.q_tokens, a.out_strides, a.dim, 64, &p.out));
    p.lse = a.lse;
    p.scale2 = a.scale * kLog2e;
    p.heads = static_cast<int>(a.heads), p.causal = a.causal;
    p.q_tokens = static_cast<int>(a.q_tokens), p.k_tokens = static_cast<int>(a.k_tokens);
    p.blocks = static_cast<int>(ceil_div(a.q_tokens, kQueries));
    p.tiles = static_cast<int>(p.blocks * a.heads * a.n);
    unsigned grid = 0;
    FP4BF16_TRY(persistent_grid(op, sm90_attention_kernel<kDim>, p.tiles, &grid));
    launch_kernel(sm90_attention_kernel<kDim>, grid, kBlock, kSharedSize, stream, p);
    return cuda_result(cudaGetLastError(), op);
}

}  // namespace

bool sm90_attention_takes(const fp4bf16_attention_args& a) {
    return a.k_tokens >= 1 && a.k_tokens <= kKeys && a.dim <= 256 && a.dim % 8 == 0 &&
           ceil_div(a.q_tokens, kQueries) * a.n * a.heads < INT32_MAX - 1024 &&
           tma_takes(a.q, a, a.q_tokens, a.q_strides) && tma_takes(a.k, a, a.k_tokens, a.k_strides) &&
           tma_takes(a.v, a, a.k_tokens, a.v_strides) && tma_takes(a.out, a, a.q_tokens, a.out_strides);
}

fp4bf16_status sm90_attention(const fp4bf16_attention_args& a, cudaStream_t stream) {
    return a.dim <= 64    ? launch<64>(a, stream)
           : a.dim <= 128 ? launch<128>(a, stream)
                          : launch<256>(a, stream);
}

}  // namespace fp4bf16
