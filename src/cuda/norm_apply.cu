// Group normalisation with given sums, see norm_apply.cuh: a thread block makes the statistics of an image
// from the sums, then takes its passes of the pixels, then goes on to the next image. What it waits for,
// memory and the functions' pipe, other warps hide: with FP4 results a thread has few registers, and its
// coefficients stay in shared memory.
#include "norm_apply.cuh"

#include "norm_results.cuh"
#include "norm_sums.cuh"

namespace fp4bf16 {
namespace {

constexpr int kBlocksBf16 = 3, kBlocksFp4 = 4, kBlocksNorms = 3;  // of a multiprocessor

struct ApplyJob {
    fp4bf16_group_norm_args a;
    ApplyPlan plan;
    int group;               // channels of one
    double inverse_count;    // 1 / elements of a group
    float root;              // see static_outer
    // From a thread's pixel to its next: bytes of x, of y and of expanded codes, blocks of results.
    int64_t x_step, y_step, expanded_step;
    uint32_t block_step;
};

// What a thread keeps in shared memory, where its loops and calls cost it no register.
struct Own {
    unsigned pass, next;  // of all images': the segment's first pass, the next segment's
    uint64_t special;     // bits of its special blocks, each the pixels behind it
};

// What a thread block keeps there.
struct Shared {
    unsigned* range;       // (2,): its passes of all images', from and to
    unsigned* centred;     // whether any mean is subtracted before the product
    Own* own;              // (threads,)
    Outer* outer;          // these three with FP4 results alone
    Window* window;
    Pair* pairs;           // (128,): kPairs
    float2* coefficients;  // (c,), see `place`: what x is multiplied with and what is added
    float2* sums;          // (c,)
    float2* stats;         // (groups,): mean, rstd
    float* mean;           // (c,), see `place`, in the sums' place, if centred: what is subtracted

    __device__ Shared(const ApplyJob& job, void* memory, bool fp4)
        : range(static_cast<unsigned*>(memory)),
          centred(range + 2),
          own(reinterpret_cast<Own*>(range + 4)),
          outer(reinterpret_cast<Outer*>(own + kApplyThreads)),
          window(reinterpret_cast<Window*>(own + kApplyThreads + 1)),
          pairs(reinterpret_cast<Pair*>(own + kApplyThreads + 2)),
          coefficients(reinterpret_cast<float2*>(fp4 ? pairs + 128 : pairs - 2)),
          sums(coefficients + job.a.c + 2 * job.plan.vectors),
          stats(sums + job.a.c),
          mean(reinterpret_cast<float*>(sums)) {}
};
static_assert(sizeof(Outer) <= 16 && sizeof(Window) <= 16 && sizeof(Pair) == 16 && sizeof(Own) == 16,
              "Shared's places");

int64_t shared_bytes(const fp4bf16_group_norm_args& a, int64_t vectors, bool fp4) {
    return 16 * (1 + kApplyThreads + (fp4 ? 2 + 128 : 0)) + 8 * (2 * a.c + 2 * vectors + a.groups);
}

// Where a channel's coefficients are: a thread's kWidth side by side, and a gap of two. So threads that read
// 16 bytes each ask no bank of shared memory twice.
template <int kWidth>
__device__ inline unsigned place(unsigned channel) {
    return channel + channel / kWidth * 2;
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
// A team's sum of doubles, the same bits in each thread.
__device__ inline double team_sum(double v) {
#pragma unroll
    for (int step = 1; step < kTeam; step *= 2) v += __shfl_xor_sync(team_mask(), v, step);
    return v;
}

// Of all groups of an image, to global memory where that is wanted (write), and what they and gamma and beta
// make of its channels: a team takes a group.
template <bool kSilu, int kWidth>
__device__ inline void image_statistics(const ApplyJob& job, int64_t image, bool write, const Shared& s) {
    const int lane = threadIdx.x % kTeam, team = threadIdx.x / kTeam, teams = job.plan.threads / kTeam;
    const auto c = static_cast<int>(job.a.c), groups = static_cast<int>(job.a.groups), group = job.group;
    __syncthreads();  // the image before is done with
#pragma unroll 1
    for (int i = threadIdx.x; i < c; i += job.plan.threads) s.sums[i] = channel_sums(job.a, image, i);
    // As in norm_forward.cu: with SiLU times -log2(e), the mean in what is added unless it is far from zero.
    constexpr float kFactor = kSilu ? -kLog2E : 1.0f;
    const auto is_far = [](const float2& m) { return !(fabsf(m.x * m.y) <= 64.0f); };
    const int first = team < groups && lane < group ? team * group + lane : 0;
    const float2 own = make_float2(job.a.gamma[first], job.a.beta[first]);  // asked for before the wait
    __syncthreads();
    bool far = false;
#pragma unroll 1
    for (int g = team; g < groups; g += teams) {
        double sum = 0.0, square = 0.0;
#pragma unroll 1
        for (int i = lane; i < group; i += kTeam) {
            const float2 v = s.sums[g * group + i];
            sum += v.x, square += v.y;
        }
        const float2 m = statistics(team_sum(sum), team_sum(square), job.inverse_count, job.a.eps);
        far = far || is_far(m);
        const float subtracted = is_far(m) ? m.x : 0.0f;
#pragma unroll 1
        for (int i = lane; i < group; i += kTeam) {
            const int channel = g * group + i;
            const float2 affine =
                channel == first ? own : make_float2(job.a.gamma[channel], job.a.beta[channel]);
            const float scale = affine.x * (kFactor * m.y);
            s.coefficients[place<kWidth>(channel)] =
                make_float2(scale, __fmaf_rn(subtracted - m.x, scale, kFactor * affine.y));
        }
        if (lane != 0) continue;
        s.stats[g] = m;
        if (!write) continue;
        if (job.a.mean != nullptr) job.a.mean[image * groups + g] = m.x;
        if (job.a.rstd != nullptr) job.a.rstd[image * groups + g] = m.y;
    }
    far = __syncthreads_or(far);
    *s.centred = far;  // by each thread
    if (!far) return;
#pragma unroll 1
    for (int i = threadIdx.x; i < c; i += job.plan.threads) {
        const float2 m = s.stats[static_cast<unsigned>(i) / static_cast<unsigned>(group)];
        s.mean[place<kWidth>(i)] = is_far(m) ? m.x : 0.0f;
    }
    __syncthreads();
}

// What a thread's channels are multiplied with and what is added, pair by pair: in registers, or where they
// are, for where registers are short.
template <int kWidth>
struct Held {
    float4 pair[kWidth / 2];

    __device__ Held(const Shared& s, int vector) {
        const auto* from = reinterpret_cast<const float4*>(s.coefficients + place<kWidth>(kWidth * vector));
#pragma unroll
        for (int i = 0; i < kWidth / 2; ++i) pair[i] = from[i];
    }

    // Of channels 2 i and 2 i + 1, two BF16 numbers.
    template <bool kSilu>
    __device__ uint32_t make(int i, uint32_t x) const {
        return pack_bf16(result<kSilu, false>(low_float(x), 0.0f, pair[i].x, pair[i].y),
                         result<kSilu, false>(high_float(x), 0.0f, pair[i].z, pair[i].w));
    }
};

template <int kWidth, bool kCentred>
struct Kept {
    uint32_t affine, mean;  // shared addresses

    __device__ Kept(const Shared& s, int vector)
        : affine(ptx::shared_address(s.coefficients + place<kWidth>(kWidth * vector))),
          mean(ptx::shared_address(s.mean + place<kWidth>(kWidth * vector))) {}

    template <bool kSilu>
    __device__ uint32_t make(int i, uint32_t x) const {
        float4 v;  // volatile: not kept in registers after all
        float2 m{};
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                     : "r"(affine + 16 * i));
        if (kCentred)
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                         : "=f"(m.x), "=f"(m.y)
                         : "r"(mean + 8 * i));
        return pack_bf16(result<kSilu, kCentred>(low_float(x), m.x, v.x, v.y),
                         result<kSilu, kCentred>(high_float(x), m.y, v.z, v.w));
    }
};

// ---- a thread's elements
template <typename T>
__device__ inline T* later(T* from, int64_t bytes) {
    return reinterpret_cast<T*>(reinterpret_cast<intptr_t>(from) + bytes);
}

// The first x of a thread with kWidth channels, and its first y.
template <int kWidth>
__device__ inline const uint4* first_x(const ApplyJob& job, const ApplyPlace& t) {
    return reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(job.a.x) +
                                          t.image * job.a.x_image + t.pixel * job.a.x_pixel +
                                          kWidth * t.vector);
}

template <int kWidth>
__device__ inline uint4* first_y(const ApplyJob& job, const ApplyPlace& t) {
    return reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(job.a.y) + t.image * job.a.y_image +
                                    t.pixel * job.a.y_pixel + kWidth * t.vector);
}

// The x of a thread's pixels, kHalves chunks of 8 channels each, kAhead pixels before they are needed. With
// FP4 results one: more, or coefficients in registers, leave too few warps to cover the functions' pipe.
template <int kAhead, int kHalves>
struct Stream {
    uint4 held[kAhead][kHalves];
    const uint4* from;
    int64_t step;
    int left;  // pixels not asked for yet; below 0: pixels asked for that there are not

    __device__ Stream(const ApplyJob& job, const ApplyPlace& t)
        : from(first_x<8 * kHalves>(job, t)), step(job.x_step), left(t.count) {
#pragma unroll
        for (int j = 0; j < kAhead; ++j) ask(j);
    }

    __device__ void ask(int j) {
        if (left > 0) {
#pragma unroll
            for (int h = 0; h < kHalves; ++h) held[j][h] = load_vector(from + h);
        }
        --left, from = later(from, step);
    }

    // Whether all of them are taken; behind the one that is next.
    __device__ bool done() const { return left <= -kAhead; }
    __device__ int behind() const { return left + kAhead - 1; }
};

// ---- BF16 results alone
template <bool kSilu, int kAhead, typename Coefficients>
__device__ inline void stream_bf16(const ApplyJob& job, const ApplyPlace& t, Stream<kAhead, 1>& x,
                                   const Coefficients& coefficients) {
    uint4* to = first_y<8>(job, t);
#pragma unroll 1
    while (true) {
#pragma unroll
        for (int j = 0; j < kAhead; ++j, to = later(to, job.y_step)) {
            if (x.done()) return;
            const uint4 v = x.held[j][0];
            x.ask(j);
            *to = make_uint4(
                coefficients.template make<kSilu>(0, v.x), coefficients.template make<kSilu>(1, v.y),
                coefficients.template make<kSilu>(2, v.z), coefficients.template make<kSilu>(3, v.w));
        }
    }
}

// Calls `take` with a thread's place in each segment of the thread block's, behind the statistics of its
// image, and with what `ask`, called before these, gave.
template <bool kSilu, int kWidth, typename Ask, typename Take>
__device__ inline void each_segment(const ApplyJob& job, const Shared& s, const Ask& ask, const Take& take) {
    // The range is written by each thread, so that none waits for it.
    s.range[0] = first_pass(job.plan, blockIdx.x), s.range[1] = first_pass(job.plan, blockIdx.x + 1);
    Own& own = s.own[threadIdx.x];
    own.special = 0;
    for (own.pass = s.range[0]; own.pass < s.range[1]; own.pass = own.next) {
        const Segment g = segment_at(job.plan, own.pass, s.range[1]);
        own.next = own.pass + g.count;
        const ApplyPlace t(job.plan, job.a.pixels, g, threadIdx.x);
        auto x = ask(t);
        const bool begins = g.pass == 0;
        if (begins || own.pass == s.range[0]) image_statistics<kSilu, kWidth>(job, t.image, begins, s);
        take(t, x);
    }
}

template <bool kSilu, bool kCertify>
__global__ void __launch_bounds__(kApplyThreads, kBlocksBf16)
    bf16_kernel(const __grid_constant__ ApplyJob job) {
    if (kCertify && skipped(job.a.run_if)) return;
    extern __shared__ uint4 memory[];
    wait_for_previous();
    const Shared s(job, memory, false);
    each_segment<kSilu, 8>(
        job, s, [&](const ApplyPlace& t) { return Stream<4, 1>(job, t); },
        [&](const ApplyPlace& t, Stream<4, 1>& x) {
            if (*s.centred != 0)
                stream_bf16<kSilu>(job, t, x, Kept<8, true>(s, t.vector));
            else
                stream_bf16<kSilu>(job, t, x, Held<8>(s, t.vector));
        });
}

// ---- FP4 results, and BF16 ones beside them
template <bool kSilu, typename Coefficients>
__device__ inline void block_results(const uint4& low, const uint4& high, const Coefficients& coefficients,
                                     uint32_t (&w)[8]) {
    unpack_block(low, high, w);
#pragma unroll
    for (int j = 0; j < 8; ++j) w[j] = coefficients.template make<kSilu>(j, w[j]);
}

// Of thread t, the first of its blocks of results.
__device__ inline uint32_t first_block(const ApplyJob& job, const ApplyPlace& t) {
    return static_cast<uint32_t>((t.image * job.a.pixels + t.pixel) * job.plan.vectors + t.vector);
}

// One of a thread's special blocks once more: from y where it is there, since y may lie where x was. On its
// own, so that the loop before it has the registers.
template <bool kSilu, bool kNorms>
__device__ __noinline__ Measured<kNorms> special_pixel(const ApplyJob& job, void* memory) {
    const Shared s(job, memory, true);
    Own& own = s.own[threadIdx.x];
    const ApplyPlace t(job.plan, job.a.pixels, segment_at(job.plan, own.pass, own.next), threadIdx.x);
    const uint64_t special = own.special;
    own.special = special & (special - 1);
    const int k = t.count - __ffsll(static_cast<long long>(special));  // the lowest bit's
    uint32_t w[8];
    if (job.a.y != nullptr) {
        const uint4* const y = later(first_y<16>(job, t), k * job.y_step);
        unpack_block(y[0], y[1], w);
    } else {
        const uint4* const x = later(first_x<16>(job, t), k * job.x_step);
        if (*s.centred != 0)
            block_results<kSilu>(x[0], x[1], Kept<16, true>(s, t.vector), w);
        else
            block_results<kSilu>(x[0], x[1], Kept<16, false>(s, t.vector), w);
    }
    return special_block16<kNorms>(w, *s.outer, FourBit(job.a, 0), first_block(job, t) + k * job.block_step);
}

// kExpanded: the expanded codes are all that is wanted. The next pixel is asked for before this one's codes
// are searched. Special blocks are noted in shared memory, which costs the others nothing.
template <bool kSilu, bool kExpanded, bool kNorms, typename Coefficients>
__device__ inline void stream_fp4(const ApplyJob& job, const ApplyPlace& t, const Shared& s, Stream<1, 2>& x,
                                  const Coefficients& coefficients, BlockNorms* norms) {
    const Window window = *s.window;
    FourBit to(job.a, kExpanded ? first_block(job, t) : 0);
    uint4* y = kExpanded || job.a.y == nullptr ? nullptr : first_y<16>(job, t);
    uint32_t at = kExpanded ? 0 : first_block(job, t);
#pragma unroll 1
    while (!x.done()) {
        uint32_t w[8];
        const int behind = x.behind();
        block_results<kSilu>(x.held[0][0], x.held[0][1], coefficients, w);
        x.ask(0);
        if (!kExpanded && y != nullptr) {
            y[0] = make_uint4(w[0], w[1], w[2], w[3]), y[1] = make_uint4(w[4], w[5], w[6], w[7]);
            y = later(y, job.y_step);
        }
        quantize_block16<kExpanded, kNorms>(
            w, *s.outer, window, [&](uint32_t i) { return s.pairs[i]; }, to, at,
            [&] { s.own[threadIdx.x].special |= uint64_t{1} << behind; }, norms);
        if (kExpanded)
            to.expanded += job.expanded_step;
        else
            at += job.block_step;
    }
}

template <bool kSilu, bool kExpanded, bool kCertify>
__global__ void __launch_bounds__(kApplyThreads, kCertify ? kBlocksNorms : kBlocksFp4)
    fp4_kernel(const __grid_constant__ ApplyJob job) {
    if (kCertify && skipped(job.a.run_if)) return;
    extern __shared__ uint4 memory[];
    wait_for_previous();
    const Shared s(job, memory, true);
    const int threads = job.plan.threads;
    for (int i = threadIdx.x; i < 128; i += threads) s.pairs[i] = kPairs.entry[i];
    if (static_cast<int>(threadIdx.x) >= threads - 32) {
        const Outer o = static_outer(job.a, job.root);
        if (static_cast<int>(threadIdx.x) == threads - 1) {
            *s.outer = o, *s.window = Window(o);
            if (blockIdx.x == 0) *job.a.outer_scale = o.decode;
        }
    }
    BlockNorms norms;
    each_segment<kSilu, 16>(
        job, s, [&](const ApplyPlace& t) { return Stream<1, 2>(job, t); },
        [&](const ApplyPlace& t, Stream<1, 2>& x) {
            if (*s.centred != 0)
                stream_fp4<kSilu, kExpanded, kCertify>(job, t, s, x, Kept<16, true>(s, t.vector), &norms);
            else
                stream_fp4<kSilu, kExpanded, kCertify>(job, t, s, x, Kept<16, false>(s, t.vector), &norms);
            while (s.own[threadIdx.x].special != 0) {
                if constexpr (kCertify)
                    norms.add(special_pixel<kSilu, true>(job, memory));
                else
                    special_pixel<kSilu, false>(job, memory);
            }
        });
    if constexpr (kCertify) store_norms(job.a, norms, s.outer->decode, memory, blockIdx.x);
}

bool gives_fp4(const fp4bf16_group_norm_args& a) { return a.expanded != nullptr || a.packed != nullptr; }

bool takes(const void* pointer, int64_t image, int64_t pixel) {
    return pointer == nullptr || (aligned(pointer, 16) && image % 8 == 0 && pixel % 8 == 0);
}

template <auto kKernel>
fp4bf16_status start(const ApplyJob& job, cudaStream_t stream) {
    const int64_t shared = shared_bytes(job.a, job.plan.vectors, gives_fp4(job.a));
    launch_kernel(kKernel, job.plan.blocks, job.plan.threads, static_cast<size_t>(shared), stream, job);
    return cuda_result(cudaGetLastError(), "group_norm");
}

template <bool kSilu, bool kCertify>
fp4bf16_status start_any(const ApplyJob& job, cudaStream_t stream) {
    if (!gives_fp4(job.a)) return start<bf16_kernel<kSilu, kCertify>>(job, stream);
    if (job.a.y == nullptr && job.a.packed == nullptr)
        return start<fp4_kernel<kSilu, true, kCertify>>(job, stream);
    return start<fp4_kernel<kSilu, false, kCertify>>(job, stream);
}

template <bool kSilu>
fp4bf16_status start_any(const ApplyJob& job, cudaStream_t stream) {
    return certifies(job.a) ? start_any<kSilu, true>(job, stream) : start_any<kSilu, false>(job, stream);
}

}  // namespace

bool apply_plan(const fp4bf16_group_norm_args& a, ApplyPlan* plan) {
    constexpr int64_t kMostShared = 48 << 10;
    const bool fp4 = gives_fp4(a);
    const int64_t width = fp4 ? 16 : 8, vectors = a.c / width;
    if (a.c % width != 0 || vectors > kApplyThreads || shared_bytes(a, vectors, fp4) > kMostShared)
        return false;
    if (!takes(a.x, a.x_image, a.x_pixel) || !takes(a.y, a.y_image, a.y_pixel)) return false;
    if ((a.expanded != nullptr && !aligned(a.expanded, 16)) ||
        (a.packed != nullptr && !aligned(a.packed, 8)) || (!fp4 && a.y == nullptr))
        return false;
    if (a.n > 0xFFFFFFFF / (a.pixels * vectors)) return false;
    *plan = passes_of(a.pixels, vectors);
    return true;
}

int64_t norm_apply_parts(const fp4bf16_group_norm_args& a, ApplyPlan plan) {
    int multiprocessors = 0;
    if (multiprocessor_count("group_norm", &multiprocessors) != FP4BF16_OK) multiprocessors = 132;
    share_out(a.n, int64_t{multiprocessors} * kBlocksNorms, &plan);
    return plan.blocks;
}

fp4bf16_status norm_apply(const fp4bf16_group_norm_args& a, ApplyPlan plan, cudaStream_t stream) {
    int multiprocessors = 0;
    FP4BF16_TRY(multiprocessor_count("group_norm", &multiprocessors));
    const int blocks = !gives_fp4(a) ? kBlocksBf16 : certifies(a) ? kBlocksNorms : kBlocksFp4;
    // BF16 results alone wait for memory: an image a thread block, of which some begin while others stream,
    // took 2 to 6 % less time at 1024 images than thread blocks that stay.
    int64_t slots = int64_t{multiprocessors} * blocks;
    if (!gives_fp4(a)) slots = std::max(slots, a.n);
    share_out(a.n, slots, &plan);
    ApplyJob job{a,
                 plan,
                 static_cast<int>(a.c / a.groups),
                 0.0,
                 0.0f,
                 2 * plan.rows * a.x_pixel,
                 2 * plan.rows * a.y_pixel,
                 int64_t{16} * plan.rows * plan.vectors,
                 static_cast<uint32_t>(plan.rows * plan.vectors)};
    const int64_t count = a.pixels * job.group;
    job.inverse_count = 1.0 / static_cast<double>(count), job.root = root_up(count);
    return a.activation == FP4BF16_SILU ? start_any<true>(job, stream) : start_any<false>(job, stream);
}

}  // namespace fp4bf16
