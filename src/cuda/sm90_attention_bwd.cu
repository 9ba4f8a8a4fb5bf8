// Gradients of attention on Hopper, of at most 256 keys and 256 channels: one kernel makes the weights P
// again and dS of a row from them, both rounded to BF16 and written to the workspace, and three batched
// products finish: dV = P^T G, dQ = scale dS K, dK = scale dS^T Q. Images are taken in parts whose P and dS
// stay in the second-level cache from the one to the other.
#include <algorithm>
#include <type_traits>

#include "sm90_attention.cuh"

namespace fp4bf16 {
namespace {

constexpr const char* kOp = "attention_backward";
constexpr int64_t kPartBytes = int64_t{33} << 20;  // 132 images of 256 queries and keys: two waves of tiles

struct WeightParams {
    CUtensorMap q, k, g, v, weights, ds;
    const float* lse;
    float scale2;  // scale * log2(e)
    int heads, q_tokens, k_tokens, causal, blocks, tiles;
};

constexpr int kRing = kStagesAll - 2;

template <int kDim>
__device__ void produce(const WeightParams& p, const SharedRing<kRing>& shared) {
    Writer<kRing> writer{shared, {}};
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        const Work at(tile, p.blocks, p.heads);
        writer.template scores<kDim>(&p.q, &p.k, at);
        writer.template scores<kDim>(&p.g, &p.v, at);
    }
}

// One warpgroup's stage for the weights P, which become dS where they lie.
struct Staging {
    const Reader<kRing>& reader;
    uint32_t stage;

    __device__ explicit Staging(const Reader<kRing>& reader)
        : reader(reader), stage(reader.address(kRing + reader.group)) {}

    // Until what was stored last has been read, and every warp knows.
    __device__ void wait() const {
        if (threadIdx.x % 128 < 32) ptx::store_wait_read();
        reader.sync();
    }
    __device__ void store(const CUtensorMap* map, const Work& at) const {
        ptx::fence_async_shared();
        reader.sync();
        if (threadIdx.x % 128 >= 32 || !ptx::elect()) return;
        for (int i = 0; i < kKeys / 64; ++i)
            ptx::store_picture_box(map, stage + i * kBoxBytes, i * 64, at.row0 + 64 * reader.group, at.head,
                                   at.image);
        ptx::store_commit();
    }
};

// Scores, scaled, become the weights exp2(s - lse2), staged in pairs; `total` is the sum of each row's.
__device__ inline void stage_weights(const float (&s)[kKeys / 2], const float (&lse2)[2], float (&total)[2],
                                     uint32_t stage) {
    total[0] = total[1] = 0.0f;
#pragma unroll
    for (int box = 0; box < kKeys / 64; ++box) {
        uint32_t pairs[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const float* v = s + 32 * box + 2 * i;
            pairs[i] =
                pack_pair<FP4BF16_BFLOAT16>(exp2_fast(v[0] - lse2[i % 2]), exp2_fast(v[1] - lse2[i % 2]));
            total[i % 2] += low_half(pairs[i]) + high_half(pairs[i]);
        }
        stage_pairs(pairs, stage + box * kBoxBytes);
    }
    total[0] = row_sum(total[0]), total[1] = row_sum(total[1]);
}

// delta = sum P dP / sum P of each row, P from the stage.
__device__ inline void row_means(const float (&dp)[kKeys / 2], const float (&total)[2], float (&delta)[2],
                                 uint32_t stage) {
    delta[0] = delta[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < kKeys / 4; i += 4) {
        uint32_t w[4];
        ptx::load_matrices(pairs_address(i, stage), w);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float* v = dp + 2 * (i + j);
            delta[j % 2] = __fmaf_rn(low_half(w[j]), v[0], __fmaf_rn(high_half(w[j]), v[1], delta[j % 2]));
        }
    }
    // the sums are near one; a row that is not there has 0 / 0, which nothing reads
    delta[0] = __fdividef(row_sum(delta[0]), total[0]), delta[1] = __fdividef(row_sum(delta[1]), total[1]);
}

// The staged weights become dS = P (dP - delta).
__device__ inline void stage_gradient(const float (&dp)[kKeys / 2], const float (&delta)[2], uint32_t stage) {
#pragma unroll
    for (int i = 0; i < kKeys / 4; i += 4) {
        const uint32_t at = pairs_address(i, stage);
        uint32_t w[4];
        ptx::load_matrices(at, w);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float* v = dp + 2 * (i + j);
            w[j] = pack_pair<FP4BF16_BFLOAT16>(low_half(w[j]) * (v[0] - delta[j % 2]),
                                               high_half(w[j]) * (v[1] - delta[j % 2]));
        }
        ptx::store_matrices(at, w[0], w[1], w[2], w[3]);
    }
}

template <int kDim>
__device__ void consume(const WeightParams& p, const SharedRing<kRing>& shared) {
    Reader<kRing> reader(shared);
    const Staging staging(reader);
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        const Work at(tile, p.blocks, p.heads);
        const int row = reader.row(at);
        float s[kKeys / 2], total[2], row_value[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)  // weights of rows that are not there are zero
            row_value[i] =
                row + 8 * i < p.q_tokens ? __ldg(p.lse + at.z * p.q_tokens + row + 8 * i) * kLog2e : INFINITY;
        reader.template scores<kDim>(s);
        scale_and_mask(s, p.scale2, row, p.k_tokens, p.causal != 0);
        staging.wait();
        stage_weights(s, row_value, total, staging.stage);
        staging.store(&p.weights, at);
        reader.template scores<kDim>(s);  // dP
        row_means(s, total, row_value, staging.stage);
        staging.wait();
        stage_gradient(s, row_value, staging.stage);
        staging.store(&p.ds, at);
    }
    ptx::store_wait();
}

template <int kDim>
__global__ void __launch_bounds__(kBlock, 1)
    sm90_attention_weights_kernel(const __grid_constant__ WeightParams p) {
    extern __shared__ uint8_t raw[];
    const SharedRing<kRing> shared(raw);
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

// P and dS of some images: (n, heads, q_tokens, stride) BF16 each, one behind the other.
struct Workspace {
    int64_t stride, head, image, all;  // elements
    __nv_bfloat16 *weights, *ds;

    explicit Workspace(const fp4bf16_attention_args& a)
        : stride(ceil_div(a.k_tokens, 8) * 8),
          head(a.q_tokens * stride),
          image(a.heads * head),
          all(a.n * image),
          weights(static_cast<__nv_bfloat16*>(a.workspace)),
          ds(weights + all) {}
};

template <int kDim>
fp4bf16_status launch_weights(const fp4bf16_attention_args& a, const Workspace& w, cudaStream_t stream) {
    WeightParams p{};
    FP4BF16_TRY(make_head_map(kOp, "q", a.q, a, a.q_tokens, a.q_strides, a.dim, kQueries, &p.q));
    FP4BF16_TRY(make_head_map(kOp, "k", a.k, a, a.k_tokens, a.k_strides, a.dim, kKeys, &p.k));
    FP4BF16_TRY(make_head_map(kOp, "g", a.g, a, a.q_tokens, a.g_strides, a.dim, kQueries, &p.g));
    FP4BF16_TRY(make_head_map(kOp, "v", a.v, a, a.k_tokens, a.v_strides, a.dim, kKeys, &p.v));
    const int64_t strides[3] = {w.image, w.stride, w.head};
    FP4BF16_TRY(
        make_head_map(kOp, "workspace", w.weights, a, a.q_tokens, strides, a.k_tokens, 64, &p.weights));
    FP4BF16_TRY(make_head_map(kOp, "workspace", w.ds, a, a.q_tokens, strides, a.k_tokens, 64, &p.ds));
    p.lse = a.lse;
    p.scale2 = a.scale * kLog2e;
    p.heads = static_cast<int>(a.heads), p.causal = a.causal;
    p.q_tokens = static_cast<int>(a.q_tokens), p.k_tokens = static_cast<int>(a.k_tokens);
    p.blocks = static_cast<int>(ceil_div(a.q_tokens, kQueries));
    p.tiles = static_cast<int>(p.blocks * a.heads * a.n);
    unsigned grid = 0;
    FP4BF16_TRY(persistent_grid(kOp, sm90_attention_weights_kernel<kDim>, p.tiles, &grid));
    launch_kernel(sm90_attention_weights_kernel<kDim>, grid, kBlock, kSharedSize, stream, p);
    return cuda_result(cudaGetLastError(), kOp);
}

// One side of a product over all images: matrices of one head, row stride and step from image to image.
struct Side {
    const __nv_bfloat16* data;
    int64_t stride, image;
};

Side side(const void* data, const int64_t (&strides)[3], int64_t head) {
    return {static_cast<const __nv_bfloat16*>(data) + head * strides[2], strides[1], strides[0]};
}

// d (tokens, dim) = alpha * the weights (or, `turned`, their transpose) times b (inner, dim), image by image.
fp4bf16_status multiply(const fp4bf16_attention_args& a, int64_t tokens, int64_t inner, const Side& weights,
                        bool turned, const Side& b, float alpha, const Side& d, cudaStream_t stream) {
    fp4bf16_gemm_args g{}, checked;
    g.m = tokens, g.n = a.dim, g.k16 = inner, g.alpha = alpha;
    g.a16 = weights.data, g.a16_stride = weights.stride, g.a16_m_major = turned;
    g.b16 = b.data, g.b16_stride = b.stride, g.b16_n_major = 1;
    g.d = const_cast<__nv_bfloat16*>(d.data), g.d_stride = d.stride, g.d_dtype = FP4BF16_BFLOAT16;
    g.batch_count = g.a_batch_mod = g.b_batch_mod = a.n;
    g.a16_batch_stride = weights.image, g.b16_batch_stride = b.image, g.d_batch_stride = d.image;
    FP4BF16_TRY(check_gemm(kOp, g, &checked));
    return sm90_gemm(checked, stream);
}

fp4bf16_status backward(const fp4bf16_attention_args& a, cudaStream_t stream) {
    const Workspace w(a);
    FP4BF16_TRY(a.dim <= 64    ? launch_weights<64>(a, w, stream)
                : a.dim <= 128 ? launch_weights<128>(a, w, stream)
                               : launch_weights<256>(a, w, stream));
    for (int64_t h = 0; h < a.heads; ++h) {
        const Side weights{w.weights + h * w.head, w.stride, w.image},
            ds{w.ds + h * w.head, w.stride, w.image};
        FP4BF16_TRY(multiply(a, a.k_tokens, a.q_tokens, weights, true, side(a.g, a.g_strides, h), 1.0f,
                             side(a.dv, a.dv_strides, h), stream));
        FP4BF16_TRY(multiply(a, a.q_tokens, a.k_tokens, ds, false, side(a.k, a.k_strides, h), a.scale,
                             side(a.dq, a.dq_strides, h), stream));
        FP4BF16_TRY(multiply(a, a.k_tokens, a.q_tokens, ds, true, side(a.q, a.q_strides, h), a.scale,
                             side(a.dk, a.dk_strides, h), stream));
    }
    return FP4BF16_OK;
}

bool sizes_fit(const fp4bf16_attention_args& a) {
    return a.n >= 1 && a.heads >= 1 && a.q_tokens >= 1 && a.k_tokens >= 1 && a.k_tokens <= kKeys &&
           a.dim <= 256 && a.dim % 8 == 0 && ceil_div(a.q_tokens, kQueries) * a.heads < INT32_MAX / 1024;
}

int64_t image_bytes(const fp4bf16_attention_args& a) {
    return 4 * a.heads * a.q_tokens * ceil_div(a.k_tokens, 8) * 8;
}

int64_t images_a_part(const fp4bf16_attention_args& a) {
    return std::min(a.n, std::max<int64_t>(1, kPartBytes / image_bytes(a)));
}

// Whether the matrices of all images follow one another, as the batched product takes them.
bool batched(const fp4bf16_attention_args& a, int64_t tokens, const int64_t (&strides)[3]) {
    return (tokens == 1 || strides[1] >= a.dim) &&
           (a.n == 1 || strides[0] >= (tokens - 1) * (tokens == 1 ? 0 : strides[1]) + a.dim);
}

template <class T>
T* moved(T* data, int64_t elements) {
    using Element = std::conditional_t<std::is_const_v<T>, const __nv_bfloat16, __nv_bfloat16>;
    return static_cast<Element*>(data) + elements;
}

}  // namespace

bool sm90_attention_backward_takes(const fp4bf16_attention_args& a) {
    return sizes_fit(a) && tma_takes(a.q, a, a.q_tokens, a.q_strides) &&
           tma_takes(a.k, a, a.k_tokens, a.k_strides) && tma_takes(a.v, a, a.k_tokens, a.v_strides) &&
           tma_takes(a.g, a, a.q_tokens, a.g_strides) && batched(a, a.q_tokens, a.dq_strides) &&
           batched(a, a.k_tokens, a.dk_strides) && batched(a, a.k_tokens, a.dv_strides) &&
           (a.q_tokens == 1 || (a.q_strides[1] >= a.dim && a.g_strides[1] >= a.dim)) &&
           (a.k_tokens == 1 || a.k_strides[1] >= a.dim);
}

int64_t sm90_attention_backward_workspace(const fp4bf16_attention_args& a) {
    return sizes_fit(a) ? images_a_part(a) * image_bytes(a) : 0;
}

fp4bf16_status sm90_attention_backward(const fp4bf16_attention_args& a, cudaStream_t stream) {
    const int64_t most = images_a_part(a);
    for (int64_t first = 0; first < a.n; first += most) {
        fp4bf16_attention_args part = a;
        part.n = std::min(most, a.n - first);
        part.q = moved(a.q, first * a.q_strides[0]), part.k = moved(a.k, first * a.k_strides[0]);
        part.v = moved(a.v, first * a.v_strides[0]), part.g = moved(a.g, first * a.g_strides[0]);
        part.dq = moved(a.dq, first * a.dq_strides[0]), part.dk = moved(a.dk, first * a.dk_strides[0]);
        part.dv = moved(a.dv, first * a.dv_strides[0]);
        part.lse = a.lse + first * a.heads * a.q_tokens;
        FP4BF16_TRY(backward(part, stream));
    }
    return FP4BF16_OK;
}

}  // namespace fp4bf16
