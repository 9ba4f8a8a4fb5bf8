// Group normalisation with given sums, see norm_apply.cuh: a thread block makes the statistics of its image
// from the sums, then takes a chunk of its pixels. What it waits for, memory and the functions' pipe, other
// warps hide: with FP4 results a thread has few registers, and its coefficients stay in shared memory.
#include "norm_apply.cuh"

#include <algorithm>

#include "norm_results.cuh"

namespace fp4bf16 {
namespace {

constexpr int kApplyThreads = 256;
constexpr int kBlocks = 3;       // of a multiprocessor
constexpr int kMostPixels = 64;  // of a thread: bits of its special blocks

struct ApplyJob {
    fp4bf16_group_norm_args a;
    ApplyPlan plan;
    int group;               // channels of one
    double inverse_count;    // 1 / elements of a group
    float root;              // see static_outer
    int64_t x_step, y_step;  // from a thread's pixel to its next, in 8 elements
};

// What a thread block keeps in shared memory.
struct Shared {
    float2* sums;          // (c,)
    float2* coefficients;  // (c,), see `place`: gamma, beta; then what x is multiplied with and what is added
    float2* stats;         // (groups,): mean, rstd
    Outer* outer;
    int* centred;  // whether any mean is subtracted before the product
    float* mean;   // (c,), see `place`, in the sums' place: what is subtracted

    __device__ Shared(const ApplyJob& job, void* memory)
        : sums(static_cast<float2*>(memory)),
          coefficients(sums + job.a.c),
          stats(coefficients + job.a.c),
          outer(reinterpret_cast<Outer*>(stats + job.a.groups)),
          centred(reinterpret_cast<int*>(outer + 1)),
          mean(reinterpret_cast<float*>(sums)) {}
};

int64_t shared_bytes(const fp4bf16_group_norm_args& a) {
    return 8 * (2 * a.c + a.groups) + static_cast<int64_t>(sizeof(Outer) + sizeof(int));
}

// Where a channel's coefficients are: the first pairs of all threads' kWidth channels, then the second ones.
// So threads side by side read 16 bytes side by side, and no bank of shared memory is asked twice.
template <int kWidth>
__device__ inline int place(unsigned channel, int vectors) {
    return 2 * (static_cast<int>(channel % kWidth / 2) * vectors + static_cast<int>(channel / kWidth)) +
           static_cast<int>(channel % 2);
}

// Of x, which is read once: both halves of a sector are asked for side by side, so that the L1 cache may
// bring it once for both.
__device__ inline uint4 load_vector(const uint4* from) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

// ---- statistics
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

// A team's sum of doubles, the same bits in each thread.
__device__ inline double team_sum(double v) {
#pragma unroll
    for (int step = 1; step < kTeam; step *= 2) v += __shfl_xor_sync(team_mask(), v, step);
    return v;
}

// Of all groups of an image, to global memory where that is wanted (write), and what they and gamma and beta
// make of its channels.
template <bool kSilu, int kWidth>
__device__ inline void image_statistics(const ApplyJob& job, int64_t image, bool write, const Shared& s) {
    const int lane = threadIdx.x % kTeam, team = threadIdx.x / kTeam, teams = blockDim.x / kTeam;
    const auto c = static_cast<int>(job.a.c), groups = static_cast<int>(job.a.groups);
    for (int i = threadIdx.x; i < c; i += blockDim.x) {
        s.coefficients[place<kWidth>(i, job.plan.vectors)] = make_float2(job.a.gamma[i], job.a.beta[i]);
        s.sums[i] = channel_sums(job.a, image, i);
    }
    if (threadIdx.x == 0) *s.centred = 0;
    __syncthreads();
    for (int g = team; g < groups; g += teams) {
        double sum = 0.0, square = 0.0;
        for (int i = lane; i < job.group; i += kTeam) {
            const float2 v = s.sums[g * job.group + i];
            sum += v.x, square += v.y;
        }
        const float2 m = statistics(team_sum(sum), team_sum(square), job.inverse_count, job.a.eps);
        if (lane != 0) continue;
        s.stats[g] = m;
        if (!(fabsf(m.x * m.y) <= 64.0f)) *s.centred = 1;
        if (!write) continue;
        if (job.a.mean != nullptr) job.a.mean[image * groups + g] = m.x;
        if (job.a.rstd != nullptr) job.a.rstd[image * groups + g] = m.y;
    }
    __syncthreads();
    // As in norm_forward.cu: with SiLU times -log2(e), the mean in what is added unless it is far from zero.
    constexpr float kFactor = kSilu ? -kLog2E : 1.0f;
    for (int i = threadIdx.x; i < c; i += blockDim.x) {
        const float2 m = s.stats[static_cast<unsigned>(i) / static_cast<unsigned>(job.group)];
        const int at = place<kWidth>(i, job.plan.vectors);
        const float2 affine = s.coefficients[at];
        const float subtracted = fabsf(m.x * m.y) <= 64.0f ? 0.0f : m.x, scale = affine.x * (kFactor * m.y);
        s.coefficients[at] = make_float2(scale, __fmaf_rn(subtracted - m.x, scale, kFactor * affine.y));
        s.mean[at] = subtracted;
    }
    __syncthreads();
}

// What a thread's channels are multiplied with and what is added, pair by pair: in registers, or where they
// are, for where registers are short.
template <int kWidth>
struct Held {
    float4 pair[kWidth / 2];

    __device__ Held(const Shared& s, int vectors, int vector) {
        const auto* from = reinterpret_cast<const float4*>(s.coefficients) + vector;
#pragma unroll
        for (int i = 0; i < kWidth / 2; ++i) pair[i] = from[i * vectors];
    }

    // Of channels 2 i and 2 i + 1, two BF16 numbers.
    template <bool kSilu>
    __device__ uint32_t make(int i, uint32_t x) const {
        return pack_bf16(result<kSilu, false>(low_float(x), 0.0f, pair[i].x, pair[i].y),
                         result<kSilu, false>(high_float(x), 0.0f, pair[i].z, pair[i].w));
    }
};

template <bool kCentred>
struct Kept {
    uint32_t affine, mean, step;  // shared addresses; bytes from a pair's coefficients to the next pair's

    __device__ Kept(const Shared& s, int vectors, int vector)
        : affine(ptx::shared_address(s.coefficients + 2 * vector)),
          mean(ptx::shared_address(s.mean + 2 * vector)),
          step(16 * vectors) {}

    template <bool kSilu>
    __device__ uint32_t make(int i, uint32_t x) const {
        float4 v;  // volatile: not kept in registers after all
        float2 m{};
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                     : "r"(affine + i * step));
        if (kCentred)
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                         : "=f"(m.x), "=f"(m.y)
                         : "r"(mean + i * (step / 2)));
        return pack_bf16(result<kSilu, kCentred>(low_float(x), m.x, v.x, v.y),
                         result<kSilu, kCentred>(high_float(x), m.y, v.z, v.w));
    }
};

// ---- a thread's place
struct Place {
    int64_t image, pixel;  // pixel: the first
    int count, vector;     // count: pixels; 0: the thread has nothing to do
    bool first;            // the image's first chunk

    __device__ explicit Place(const ApplyJob& job) {
        const ApplyPlan& p = job.plan;
        const unsigned i = blockIdx.x / static_cast<unsigned>(p.chunks), chunk = blockIdx.x - i * p.chunks;
        const int row = static_cast<int>(threadIdx.x / static_cast<unsigned>(p.vectors));
        vector = static_cast<int>(threadIdx.x) - row * p.vectors;
        image = i, first = chunk == 0;
        const int64_t start = chunk * p.chunk;
        const auto pixels = static_cast<int>(min(p.chunk, job.a.pixels - start));
        pixel = start + row;
        count =
            row < min(p.rows, pixels)
                ? static_cast<int>(static_cast<unsigned>(pixels - row - 1) / static_cast<unsigned>(p.rows)) +
                      1
                : 0;
    }
};

// The first x of a thread with kWidth channels.
template <int kWidth>
__device__ inline const uint4* first_x(const ApplyJob& job, const Place& t) {
    return reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(job.a.x) +
                                          t.image * job.a.x_image + t.pixel * job.a.x_pixel +
                                          kWidth * t.vector);
}

// The x of a thread's pixels, kHalves chunks of 8 channels each, kAhead pixels before they are needed. With
// FP4 results one: more, or coefficients in registers, leave too few warps to cover the functions' pipe.
template <int kAhead, int kHalves>
struct Stream {
    uint4 held[kAhead][kHalves];
    const uint4* from;
    int64_t step;
    int left;  // pixels not asked for yet

    __device__ Stream(const ApplyJob& job, const Place& t)
        : from(first_x<8 * kHalves>(job, t)), step(job.x_step), left(t.count) {
#pragma unroll
        for (int j = 0; j < kAhead; ++j) ask(j);
    }

    __device__ void ask(int j) {
        if (left > 0) {
#pragma unroll
            for (int h = 0; h < kHalves; ++h) held[j][h] = load_vector(from + h);
        }
        --left, from += step;
    }
};

// ---- BF16 results alone
template <bool kSilu, int kAhead, typename Coefficients>
__device__ inline void stream_bf16(const ApplyJob& job, const Place& t, Stream<kAhead, 1>& x,
                                   const Coefficients& coefficients) {
    const int64_t stride = 8 * job.y_step;
    auto* to = static_cast<__nv_bfloat16*>(job.a.y) + t.image * job.a.y_image + t.pixel * job.a.y_pixel +
               8 * t.vector;
#pragma unroll 1
    for (int i = 0; i < t.count; i += kAhead) {
#pragma unroll
        for (int j = 0; j < kAhead; ++j, to += stride) {
            if (i + j >= t.count) return;
            const uint4 v = x.held[j][0];
            x.ask(j);
            *reinterpret_cast<uint4*>(to) = make_uint4(
                coefficients.template make<kSilu>(0, v.x), coefficients.template make<kSilu>(1, v.y),
                coefficients.template make<kSilu>(2, v.z), coefficients.template make<kSilu>(3, v.w));
        }
    }
}

template <bool kSilu>
__global__ void __launch_bounds__(kApplyThreads, kBlocks) bf16_kernel(const __grid_constant__ ApplyJob job) {
    extern __shared__ uint4 memory[];
    wait_for_previous();
    const Shared s(job, memory);
    const Place t(job);
    Stream<4, 1> x(job, t);
    image_statistics<kSilu, 8>(job, t.image, t.first, s);
    if (*s.centred == 0)
        stream_bf16<kSilu>(job, t, x, Held<8>(s, job.plan.vectors, t.vector));
    else
        stream_bf16<kSilu>(job, t, x, Kept<true>(s, job.plan.vectors, t.vector));
}

// ---- FP4 results, and BF16 ones beside them
template <bool kSilu, typename Coefficients>
__device__ inline void block_results(const uint4& low, const uint4& high, const Coefficients& coefficients,
                                     uint32_t (&w)[8]) {
    unpack_block(low, high, w);
#pragma unroll
    for (int j = 0; j < 8; ++j) w[j] = coefficients.template make<kSilu>(j, w[j]);
}

// Of thread t, the first of its blocks of results and its first y.
__device__ inline uint32_t first_block(const ApplyJob& job, const Place& t) {
    return static_cast<uint32_t>((t.image * job.a.pixels + t.pixel) * job.plan.vectors + t.vector);
}

__device__ inline uint4* first_y(const ApplyJob& job, const Place& t) {
    return reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(job.a.y) + t.image * job.a.y_image +
                                    t.pixel * job.a.y_pixel + 16 * t.vector);
}

// A thread's pixel k, which the fast quantiser does not take, once more: from y where it is there, since y
// may lie where x was. On its own, so that the loop before it has the registers.
template <bool kSilu>
__device__ __noinline__ void special_pixel(const ApplyJob& job, void* memory, int k) {
    const Shared s(job, memory);
    const Place t(job);
    uint32_t w[8];
    if (job.a.y != nullptr) {
        const uint4* const y = first_y(job, t) + k * job.y_step;
        unpack_block(y[0], y[1], w);
    } else {
        const uint4* const x = first_x<16>(job, t) + k * job.x_step;
        block_results<kSilu>(x[0], x[1], Kept<true>(s, job.plan.vectors, t.vector), w);
    }
    const auto stride = static_cast<uint32_t>(job.plan.rows * job.plan.vectors);
    special_block16(w, *s.outer, FourBit(job.a, 0), first_block(job, t) + k * stride);
}

// kExpanded: the expanded codes are all that is wanted. Returns bits of the special blocks. The next pixel is
// asked for before this one's codes are searched. (Written as one loop, for kAhead = 1, this spills.)
template <bool kSilu, bool kExpanded, int kAhead, typename Coefficients>
__device__ inline uint64_t stream_fp4(const ApplyJob& job, const Place& t, const Outer& o,
                                      Stream<kAhead, 2>& x, const Coefficients& coefficients) {
    const Window window(o);
    const FourBit to(job.a, 0);
    const auto stride = static_cast<uint32_t>(job.plan.rows * job.plan.vectors);
    uint4* y = kExpanded || job.a.y == nullptr ? nullptr : first_y(job, t);
    uint32_t at = first_block(job, t);
    uint64_t special = 0;
#pragma unroll 1
    for (int i = 0; i < t.count; i += kAhead) {
#pragma unroll
        for (int j = 0; j < kAhead; ++j, at += stride) {
            if (i + j >= t.count) break;
            uint32_t w[8];
            block_results<kSilu>(x.held[j][0], x.held[j][1], coefficients, w);
            x.ask(j);
            if (!kExpanded && y != nullptr) {
                y[0] = make_uint4(w[0], w[1], w[2], w[3]), y[1] = make_uint4(w[4], w[5], w[6], w[7]);
                y += job.y_step;
            }
            if (!quantize_block16<kExpanded>(w, o, window, to, at)) special |= uint64_t{1} << (i + j);
        }
    }
    return special;
}

template <bool kSilu, bool kExpanded>
__global__ void __launch_bounds__(kApplyThreads, kBlocks) fp4_kernel(const __grid_constant__ ApplyJob job) {
    extern __shared__ uint4 memory[];
    wait_for_previous();
    const Shared s(job, memory);
    const Place t(job);
    Stream<1, 2> x(job, t);
    if (threadIdx.x >= blockDim.x - 32) {
        const Outer o = static_outer(job.a, job.root);
        if (threadIdx.x == blockDim.x - 1) {
            *s.outer = o;
            if (blockIdx.x == 0) *job.a.outer_scale = o.decode;
        }
    }
    image_statistics<kSilu, 16>(job, t.image, t.first, s);
    const int vectors = job.plan.vectors;
    uint64_t special;
    if (*s.centred == 0)
        special = stream_fp4<kSilu, kExpanded>(job, t, *s.outer, x, Kept<false>(s, vectors, t.vector));
    else
        special = stream_fp4<kSilu, kExpanded>(job, t, *s.outer, x, Kept<true>(s, vectors, t.vector));
    for (; special != 0; special &= special - 1)
        special_pixel<kSilu>(job, memory, __ffsll(static_cast<long long>(special)) - 1);
}

// ---- any shape: statistics to memory, a warp a group
__global__ void __launch_bounds__(kThreads)
    sums_kernel(const __grid_constant__ fp4bf16_group_norm_args a, float* mean, float* rstd) {
    wait_for_previous();
    constexpr int kWarps = kThreads / 32;
    const int64_t group = a.c / a.groups;
    const double inverse_count = 1.0 / (static_cast<double>(a.pixels) * static_cast<double>(group));
    for (int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; i < a.n * a.groups;
         i += int64_t{gridDim.x} * kWarps) {
        double sum = 0.0, square = 0.0;
        for (int64_t j = threadIdx.x % 32; j < group; j += 32) {
            const float2 v = channel_sums(a, i / a.groups, i % a.groups * group + j);
            sum += v.x, square += v.y;
        }
        for (int step = 1; step < 32; step *= 2) {
            sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
            square += __shfl_xor_sync(0xFFFFFFFFu, square, step);
        }
        const float2 m = statistics(sum, square, inverse_count, a.eps);
        if (threadIdx.x % 32 == 0) mean[i] = m.x, rstd[i] = m.y;
    }
}

bool gives_fp4(const fp4bf16_group_norm_args& a) { return a.expanded != nullptr || a.packed != nullptr; }

bool takes(const void* pointer, int64_t image, int64_t pixel) {
    return pointer == nullptr || (aligned(pointer, 16) && image % 8 == 0 && pixel % 8 == 0);
}

// Chunks of an image for the least time: multiprocessors hold `slots` thread blocks at once, and each costs,
// before its pixels, about as much as two pixels of its threads.
int64_t chunks_for(int64_t n, int64_t passes, int64_t slots) {
    constexpr int64_t kStart = 2, kMost = 64;
    int64_t best = 1, least = ceil_div(n, slots) * (kStart + passes);
    for (int64_t chunks = 2; chunks <= std::min(passes, kMost); ++chunks) {
        const int64_t time = ceil_div(n * chunks, slots) * (kStart + ceil_div(passes, chunks));
        if (time < least) least = time, best = chunks;
    }
    return best;
}

void cut(const fp4bf16_group_norm_args& a, int multiprocessors, ApplyPlan* plan) {
    const int64_t passes = ceil_div(a.pixels, plan->rows);
    int64_t chunks = chunks_for(a.n, passes, int64_t{multiprocessors} * kBlocks);
    if (a.n > 0x7FFFFFFF / chunks) chunks = 1;
    chunks = std::max(chunks, ceil_div(passes, kMostPixels));
    plan->chunk = ceil_div(passes, chunks) * plan->rows;
    plan->chunks = static_cast<int>(ceil_div(a.pixels, plan->chunk));
}

template <auto kKernel>
fp4bf16_status start(const ApplyJob& job, cudaStream_t stream) {
    const auto blocks = static_cast<unsigned>(job.a.n * job.plan.chunks);
    launch_kernel(kKernel, blocks, job.plan.threads, static_cast<size_t>(shared_bytes(job.a)), stream, job);
    return cuda_result(cudaGetLastError(), "group_norm");
}

template <bool kSilu>
fp4bf16_status start_any(const ApplyJob& job, cudaStream_t stream) {
    if (!gives_fp4(job.a)) return start<bf16_kernel<kSilu>>(job, stream);
    if (job.a.y == nullptr && job.a.packed == nullptr) return start<fp4_kernel<kSilu, true>>(job, stream);
    return start<fp4_kernel<kSilu, false>>(job, stream);
}

}  // namespace

bool apply_plan(const fp4bf16_group_norm_args& a, ApplyPlan* plan) {
    constexpr int64_t kMostShared = 48 << 10;
    const bool fp4 = gives_fp4(a);
    const int64_t width = fp4 ? 16 : 8, vectors = a.c / width;
    if (a.c % width != 0 || vectors > kApplyThreads || shared_bytes(a) > kMostShared) return false;
    if (!takes(a.x, a.x_image, a.x_pixel) || !takes(a.y, a.y_image, a.y_pixel)) return false;
    if ((a.expanded != nullptr && !aligned(a.expanded, 16)) ||
        (a.packed != nullptr && !aligned(a.packed, 8)) || (!fp4 && a.y == nullptr))
        return false;
    const int64_t rows = std::min<int64_t>(kApplyThreads / vectors, a.pixels);
    if (a.n > 0x7FFFFFFF / ceil_div(a.pixels, rows * kMostPixels)) return false;
    if (a.n > 0xFFFFFFFF / (a.pixels * vectors)) return false;
    *plan = {static_cast<int>(vectors), static_cast<int>(rows),
             static_cast<int>(32 * ceil_div(rows * vectors, 32)), 1, a.pixels};
    return true;
}

fp4bf16_status norm_apply(const fp4bf16_group_norm_args& a, ApplyPlan plan, cudaStream_t stream) {
    int device = 0, multiprocessors = 0;
    FP4BF16_TRY(cuda_result(cudaGetDevice(&device), "group_norm"));
    FP4BF16_TRY(cuda_result(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
                            "group_norm"));
    cut(a, multiprocessors, &plan);
    ApplyJob job{a,
                 plan,
                 static_cast<int>(a.c / a.groups),
                 0.0,
                 0.0f,
                 plan.rows * a.x_pixel / 8,
                 plan.rows * a.y_pixel / 8};
    const int64_t count = a.pixels * job.group;
    job.inverse_count = 1.0 / static_cast<double>(count), job.root = root_up(count);
    return a.activation == FP4BF16_SILU ? start_any<true>(job, stream) : start_any<false>(job, stream);
}

fp4bf16_status norm_apply_simple(const fp4bf16_group_norm_args& a, float* mean, float* rstd,
                                 cudaStream_t stream) {
    launch_kernel(sums_kernel, grid_for(a.n * a.groups * 32), kThreads, 0, stream, a, mean, rstd);
    return norm_simple_results(a, mean, rstd, stream);
}

}  // namespace fp4bf16
