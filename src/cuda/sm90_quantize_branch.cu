// Quantiser and down projection in one pass over x: the quantising warps, and the launch.
#include <algorithm>
#include <cuda_fp8.h>

#include "common.h"
#include "quantize.cuh"
#include "quantize_half.cuh"
#include "sm90_quantize_branch.cuh"
#include "tensor_map.h"

namespace fp4bf16 {
namespace {

using namespace branch;

// ---- a block of 16
struct Block {
    uint2 packed;
    uint4 expanded;
    uint32_t scale;
};

enum Kind { kExactFull, kExactFast, kTe, kFp8 };

__device__ const PairTable kPairs = make_pairs();

// Rules of one row; fp8 has its elements in `expanded`.
template <Kind kKind>
struct RowRules {
    static constexpr fp4bf16_format kFormat = kKind == kFp8  ? FP4BF16_FP8
                                              : kKind == kTe ? FP4BF16_NVFP4
                                                             : FP4BF16_NVFP4_EXACT;
    static constexpr uint32_t kNaNs = kE4M3NaN * 0x01010101u;
    Outer outer;

    __device__ static constexpr Rule rule() { return {kFormat, FP4BF16_RULE_TE, kKind == kExactFull, false}; }

    __device__ RowRules(const fp4bf16_quantize_args& a, int64_t row, float amax, bool first) {
        const int64_t group = row / (a.mid * a.inner) * a.inner + row % a.inner;
        outer = a.outer_given == nullptr
                    ? outer_from_amax(rule(), amax)
                    : outer_from_scale(rule(), a.outer_given[group * a.outer_given_stride]);
        if (first && a.outer_scale != nullptr && row / a.inner % a.mid == 0)
            a.outer_scale[group] = outer.decode;
    }

    __device__ Block operator()(const Work& work, const uint4& low, const uint4& high) const {
        const uint32_t w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        uint32_t most = w[0];
#pragma unroll
        for (int i = 1; i < 8; ++i) most = max_magnitudes(most, w[i]);
        most &= 0x7FFF7FFFu;
        const uint32_t top = max(most & 0xFFFF, most >> 16);  // BF16 bits
        if (kKind == kFp8) return fp8_block(w, top >= 0x7F80);
        if (top == 0) return Block{};
        if (top >= 0x7F80) return {{}, make_uint4(kNaNs, kNaNs, kNaNs, kNaNs), kE4M3NaN};
        if (kKind != kTe && (top < 32 << 7 || bits_float(top << 16) * outer.encode > 6.0f * 64.0f))
            return unusual_block(w, top);
        return fp4_block(work, w, top);
    }

    // As the rules are written down: subnormal numbers, a block beyond a given scale.
    __device__ Block unusual_block(const uint32_t (&w)[8], uint32_t top) const {
        float t[16];
#pragma unroll
        for (int j = 0; j < 16; ++j) t[j] = fabsf(element(w, j)) * outer.encode;
        const int i = search_scale(t, 16, bits_float(top << 16) * outer.encode, rule());
        const float inverse = 1.0f / scale_value(i);
        uint32_t p[2] = {}, e[4] = {};
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            const uint32_t code = e2m1_code(t[j] * inverse) | sign_bit(element(w, j));
            p[j / 8] |= code << 4 * (j % 8);
            e[j / 4] |= expanded_byte(code, scale_byte(i)) << 8 * (j % 4);
        }
        return {{p[0], p[1]}, {e[0], e[1], e[2], e[3]}, scale_byte(i)};
    }

    __device__ static float element(const uint32_t (&w)[8], int j) {
        return bits_float(j % 2 ? w[j / 2] & 0xFFFF0000u : w[j / 2] << 16);
    }

    __device__ Block fp8_block(const uint32_t (&w)[8], bool special) const {
        uint32_t two[8];
#pragma unroll
        for (int i = 0; i < 8; ++i)
            two[i] = __nv_cvt_float2_to_fp8x2(make_float2(bits_float(w[i] << 16) * outer.encode,
                                                          bits_float(w[i] & 0xFFFF0000u) * outer.encode),
                                              __NV_SATFINITE, __NV_E4M3);
        if (special)  // NaN and Inf
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (!is_finite(element(w, 2 * i))) two[i] = (two[i] & 0xFF00) | kE4M3NaN;
                if (!is_finite(element(w, 2 * i + 1))) two[i] = (two[i] & 0xFF) | kE4M3NaN << 8;
            }
        const auto four = [&](int i) { return two[2 * i] | two[2 * i + 1] << 16; };
        return {{}, make_uint4(four(0), four(1), four(2), four(3)), 0};
    }

    __device__ Block fp4_block(const Work& work, const uint32_t (&w)[8], uint32_t top) const {
        const float largest = bits_float(top << 16);
        uint32_t q[8], byte, unit;  // magnitudes of the codes in FP16; scale, and as FP16 times 2^-8
        if constexpr (kKind == kTe) {
            const Scale s =
                nvfp4_scale(e4m3_code(fminf(largest * (outer.encode * (1.0f / 6.0f)), 448.0f)), outer);
#pragma unroll
            for (int i = 0; i < 8; ++i) q[i] = round_pair(w[i] & 0x7FFF7FFFu, s.multiplier);
            byte = s.byte, unit = 0;
        } else {
            const int exponent = static_cast<int>(top >> 7);
            const uint32_t shift = shift_of(17, exponent);  // the largest of y is in [4, 8)
            uint32_t y[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) y[i] = to_half(w[i] & 0x7FFF7FFFu, shift);
            const float t_top = largest * outer.encode, one = power_of_two(exponent - 129) * outer.encode;
            if constexpr (kKind == kExactFull)
                byte = search_full_half(y, t_top, one, q);
            else
                byte = search_fast_half(y, t_top, one, kPairs.entry[top & 0x7F], q);
            unit = byte * 0x00800080u;  // E4M3's bits in FP16's fields
        }
        Block out{{}, {}, byte};
        if (kKind != kTe && work.expanded_end > 0)
            out.expanded = make_uint4(expand_codes(q, w, unit), expand_codes(q + 2, w + 2, unit),
                                      expand_codes(q + 4, w + 4, unit), expand_codes(q + 6, w + 6, unit));
        if (work.packed_end > 0) {
#pragma unroll
            for (int i = 0; i < 8; ++i) q[i] |= w[i] & 0x80008000u;
            out.packed = make_uint2(pack_codes(q), pack_codes(q + 4));
        }
        return out;
    }
};

// Where a row's blocks go.
struct Target {
    uint8_t *expanded, *packed, *scale;
    bool inside;  // the row

    __device__ Target(const Work& w, int64_t row) : inside(row < w.args.rows) {
        const fp4bf16_quantize_args& a = w.args;
        expanded = keep(a.expanded + row * a.expanded_stride);
        packed = keep(a.packed + (a.format == FP4BF16_FP8 ? row * w.kp : row * w.kp / 2));
        scale = keep(a.block_scale + row * w.kp / 16);
    }

    template <typename Rules>
    __device__ void store(const Work& w, uint32_t column, const Block& b) const {
        constexpr bool kFp8 = Rules::kFormat == FP4BF16_FP8;
        if (!inside) return;
        if (Rules::kFormat != FP4BF16_NVFP4 && column < w.expanded_end)
            *reinterpret_cast<uint4*>(expanded + column) = b.expanded;
        if (kFp8 && column < w.packed_end) *reinterpret_cast<uint4*>(packed + column) = b.expanded;
        if (!kFp8 && column < w.packed_end) *reinterpret_cast<uint2*>(packed + column / 2) = b.packed;
        if (!kFp8 && column < w.scale_end) scale[column / 16] = static_cast<uint8_t>(b.scale);
    }

    // In a register, or the compiler makes the address anew for every block.
    __device__ static uint8_t* keep(uint8_t* pointer) {
        size_t address = __cvta_generic_to_global(pointer);
        asm volatile("" : "+l"(address));
        return static_cast<uint8_t*>(__cvta_global_to_generic(address));
    }
};

// ---- the quantising warps: a lane takes a block of 16, a warp 8 rows of a box
template <int kRank, typename Rules>
__device__ inline void quantise(Shared<kRank>& s, const Work& w, const Part& part) {
    using S = Shared<kRank>;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 - kMathWarps - 4;
    const uint32_t group = warp / 8, row = warp % 8 * 8 + lane / 4, quarter = lane % 4;
    const uint32_t offset = chunk(row, 2 * quarter);  // and offset ^ 16
    uint32_t done = 0;                                // boxes of the tiles before
    uint32_t n = 0;
    for (int tile = part.tile; tile < w.tiles; tile += part.step, ++n, done += part.boxes) {
        const int64_t i = int64_t{tile} * kRows + row;
        ptx::barrier_wait(&s.amax_full[n % 2], n / 2 & 1);
        uint32_t most = 0;
#pragma unroll 1
        for (uint32_t c = 0; c < w.ctas; ++c) most = max(most, s.amax[n % 2][c][row]);
        __syncwarp();
        if (lane == 0) ptx::barrier_arrive(&s.amax_read[n % 2]);

        const bool inside = i < w.args.rows;
        const Rules rules(w.args, inside ? i : 0, __uint_as_float(most),
                          inside && part.rank + group + quarter == 0);
        const Target target(w, i);
        const int b0 = static_cast<int>((done + group) % kGroups);  // boxes alternate between the groups
        uint32_t column = (part.first + b0) * kColumns + 16 * quarter;
        const uint32_t end = (part.first + part.boxes) * kColumns;
        Ring<S::kSlots> ring{(done + b0) % S::kSlots, (done + b0) / S::kSlots & 1};
#pragma unroll 1
        for (; column < end; column += kGroups * kColumns) {
            ptx::barrier_wait(&s.x_full[ring.slot], ring.parity);
            const uint8_t* const box = s.x[ring.slot];
            const uint4 low = *reinterpret_cast<const uint4*>(box + offset);
            const uint4 high = *reinterpret_cast<const uint4*>(box + (offset ^ 16));
            __syncwarp();
            if (lane == 0) ptx::barrier_arrive(&s.x_empty[ring.slot]);
            ring.next(kGroups);
            target.store<Rules>(w, column, rules(w, low, high));
        }
        if (inside && w.expanded_end > 0 && part.first + part.boxes == w.boxes && group == 0)
#pragma unroll 1
            for (int64_t c = int64_t{w.boxes} * kColumns + 16 * quarter; c < w.args.expanded_stride;
                 c += kColumns)
                *reinterpret_cast<uint4*>(target.expanded + c) = uint4{};
    }
}

template <int kRank>
__device__ inline void begin(Shared<kRank>& s, const Work& w) {
    using S = Shared<kRank>;
    if (threadIdx.x == 0) {
#pragma unroll 1
        for (int i = 0; i < S::kSlots; ++i) {
            ptx::barrier_init(&s.x_full[i], 1);
            ptx::barrier_init(&s.x_empty[i], kQuantWarps / kGroups);
        }
        ptx::barrier_init(&s.down_full, 1);
        for (int i = 0; i < 2; ++i) {
            ptx::barrier_init(&s.amax_full[i], 1);
            ptx::barrier_init(&s.amax_read[i], kQuantWarps);
        }
        ptx::barrier_init(&s.partial_full, 1);
        ptx::barrier_init(&s.partial_free, w.ctas);
        ptx::fence_barrier_init();
    }
    wait_for_previous();
    if (w.args.outliers > 0 && threadIdx.x <= S::kMostBoxes) {  // first index at or behind the box
        const int64_t column = int64_t{Part(w).first + static_cast<int>(threadIdx.x)} * kColumns;
        int64_t low = 0, high = w.args.outliers;
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (w.args.outlier_index[middle] < column)
                low = middle + 1;
            else
                high = middle;
        }
        s.first_outlier[threadIdx.x] = static_cast<int>(low);
    }
    __syncthreads();
    ptx::cluster_arrive();
    ptx::cluster_wait();
}

template <int kRank, typename Rules>
__global__ void __launch_bounds__(kCtaThreads, 1)
    branch_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap down_map,
                  const __grid_constant__ Work w) {
    extern __shared__ __align__(1024) uint8_t memory[];
    auto& s = *reinterpret_cast<Shared<kRank>*>(memory);
    begin(s, w);
    const uint32_t warp = threadIdx.x / 32;
    if (warp < kMathWarps) {
        ptx::take_registers<kMathRegisters>();
        multiply<kRank>(s, w, Part(w));
    } else if (warp < kMathWarps + 4) {
        ptx::give_registers<kCopyRegisters>();
        if (threadIdx.x == 32 * kMathWarps) copy_x<kRank>(s, x_map, w, Part(w));
        if (threadIdx.x == 32 * (kMathWarps + 1)) copy_down<kRank>(s, down_map, Part(w));
    } else {
        if (kGroups == 2) ptx::take_registers<kQuantRegisters>();  // of three, each keeps what it has
        quantise<kRank, Rules>(s, w, Part(w));
    }
    __syncwarp();
    ptx::cluster_arrive();  // no CTA leaves while another may still write to its shared memory
    ptx::cluster_wait();
}

// ---- launch
constexpr int kDevices = 64;

int64_t boxes_of(const fp4bf16_quantize_args& a) { return ceil_div(a.k_size, kColumns); }

int most_boxes(const fp4bf16_quantize_args& a) {
    return a.rank <= 64 ? Shared<64>::kMostBoxes : Shared<128>::kMostBoxes;
}

// CTAs of a cluster: by k and rank alone, so that the order of summation does not depend on the rows.
uint32_t ctas_for(const fp4bf16_quantize_args& a) {
    uint32_t ctas = 1;
    while (ctas * most_boxes(a) < boxes_of(a)) ctas *= 2;
    return ctas;
}

// How many clusters of `ctas` run at once; 0: this GPU has no room for one.
template <int kRank, typename Rules>
fp4bf16_status configure(uint32_t ctas, int* active) {
    static int known[kDevices][kMostCtas + 1] = {};  // one more than there are
    constexpr int kBytes = sizeof(Shared<kRank>);
    static_assert(kBytes <= 227 * 1024, "a CTA of sm_90 has at most 227 KB of shared memory");
    const auto kernel = branch_kernel<kRank, Rules>;
    int device = 0;
    FP4BF16_TRY(cuda_result(cudaGetDevice(&device), "quantize"));
    FP4BF16_TRY(cuda_result(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
                            "quantize"));
    FP4BF16_TRY(cuda_result(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
                            "quantize"));
    if (device < kDevices && known[device][ctas] > 0) return *active = known[device][ctas] - 1, FP4BF16_OK;
    const LaunchPlan one(ctas, kCtaThreads, kBytes, nullptr, ctas);
    FP4BF16_TRY(cuda_result(cudaOccupancyMaxActiveClusters(active, kernel, &one.config()), "quantize"));
    if (device < kDevices) known[device][ctas] = *active + 1;
    return FP4BF16_OK;
}

template <int kRank, typename Rules>
fp4bf16_status launch(const Work& w, const CUtensorMap& x_map, const CUtensorMap& down_map,
                      cudaStream_t stream) {
    int active = 0;
    FP4BF16_TRY((configure<kRank, Rules>(w.ctas, &active)));
    const unsigned clusters = static_cast<unsigned>(std::min(std::max(active, 1), w.tiles));
    launch_clusters(w.ctas, branch_kernel<kRank, Rules>, w.ctas * clusters, kCtaThreads,
                    sizeof(Shared<kRank>), stream, x_map, down_map, w);
    return cuda_result(cudaGetLastError(), "quantize");
}

// Clusters of more than eight CTAs need not fit (a slice of a GPU may have fewer multiprocessors together).
bool cluster_fits(const fp4bf16_quantize_args& a) {
    const uint32_t ctas = ctas_for(a);
    if (ctas <= 8) return true;
    int active = 0;
    const fp4bf16_status status = a.rank <= 64 ? configure<64, RowRules<kTe>>(ctas, &active)
                                               : configure<128, RowRules<kTe>>(ctas, &active);
    return status == FP4BF16_OK && active > 0;
}

template <typename Rules>
fp4bf16_status launch_on(const fp4bf16_quantize_args& a, cudaStream_t stream) {
    Work w{};
    w.args = a;
    w.kp = a.format == FP4BF16_FP8 ? a.k_size : ceil_div(a.k_size, 16) * 16;
    const auto end = [](const void* result, int64_t columns) {
        return result == nullptr ? 0 : static_cast<uint32_t>(columns);
    };
    w.expanded_end = end(a.expanded, std::min(a.expanded_stride, boxes_of(a) * kColumns));
    w.packed_end = end(a.packed, w.kp);
    w.scale_end = end(a.format == FP4BF16_FP8 ? nullptr : a.block_scale, w.kp);
    w.tiles = static_cast<int>(ceil_div(a.rows, kRows));
    w.boxes = static_cast<int>(boxes_of(a));
    w.ctas = ctas_for(a);
    const int rank = a.rank <= 64 ? 64 : 128;
    CUtensorMap x_map, down_map;
    FP4BF16_TRY(make_tensor_map("quantize", "x", a.x, 2,
                                {a.k_size, a.rows, 1, a.x_stride, 0, kColumns, kRows}, &x_map));
    FP4BF16_TRY(make_tensor_map("quantize", "down_t", a.down_t, 2,
                                {a.k_size, a.rank, 1, a.down_stride, 0, kColumns, rank}, &down_map));
    return rank == 64 ? launch<64, Rules>(w, x_map, down_map, stream)
                      : launch<128, Rules>(w, x_map, down_map, stream);
}

bool aligned(const void* pointer, uintptr_t bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// Results take the stores of a whole block.
bool stores_fit(const fp4bf16_quantize_args& a) {
    if (a.expanded != nullptr && !(aligned(a.expanded, 16) && a.expanded_stride % 16 == 0)) return false;
    if (a.format == FP4BF16_FP8) return a.packed == nullptr || (aligned(a.packed, 16) && a.k_size % 16 == 0);
    return a.packed == nullptr || aligned(a.packed, 8);
}

// What the product needs, whatever else is asked for. A cluster of one CTA would write to its own memory as
// if it were another's, which memory checkers refuse; there a product of its own is as fast.
bool branch_multiplies(const fp4bf16_quantize_args& a) {
    int major = 0, minor = 0;
    return a.rank >= 1 && a.rank <= 128 && a.dtype == FP4BF16_BFLOAT16 && a.rows > 0 &&
           a.rows < INT32_MAX - kRows && a.k_size > 0 && boxes_of(a) <= most_boxes(a) * kMostCtas &&
           ctas_for(a) > 1 && a.after == 1 && a.k_stride == 1 && a.x_stride % 8 == 0 && aligned(a.x, 16) &&
           a.down_stride % 8 == 0 && aligned(a.down_t, 16) &&
           compute_capability("quantize", &major, &minor) == FP4BF16_OK && major == 9 && minor == 0 &&
           cluster_fits(a);
}

}  // namespace

bool branch_takes(const fp4bf16_quantize_args& a) {
    const bool te =
        a.format == FP4BF16_NVFP4 && (a.rule == FP4BF16_RULE_DEFAULT || a.rule == FP4BF16_RULE_TE);
    return (te || a.format == FP4BF16_NVFP4_EXACT || a.format == FP4BF16_FP8) &&
           a.rounding == FP4BF16_NEAREST && (a.outer_given != nullptr || a.mid == 1) && a.sums == nullptr &&
           a.counts == nullptr && stores_fit(a) && branch_multiplies(a);
}

int64_t branch_workspace(const fp4bf16_quantize_args&) { return 0; }

fp4bf16_status quantize_branch(const fp4bf16_quantize_args& a, cudaStream_t stream) {
    if (a.format == FP4BF16_FP8) return launch_on<RowRules<kFp8>>(a, stream);
    if (a.format == FP4BF16_NVFP4) return launch_on<RowRules<kTe>>(a, stream);
    return a.search == FP4BF16_SEARCH_FULL ? launch_on<RowRules<kExactFull>>(a, stream)
                                           : launch_on<RowRules<kExactFast>>(a, stream);
}

}  // namespace fp4bf16
