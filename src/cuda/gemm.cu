// gemm: the checks of every argument, the choice of a kernel, and the simple kernel, which reads like the
// formula of fp4bf16.h and is what the fast ones are checked with on the device.
#include "common.h"
#include "launch.cuh"
#include "simple.cuh"

namespace fp4bf16 {
namespace {

constexpr int64_t kMostRows = (int64_t{1} << 31) - 1024;  // of m, n and k: a tile's last row is an int
constexpr int64_t kMostStride = int64_t{1} << 40;  // far beyond any memory: no sum of products overflows

long long ll(int64_t v) { return v; }

// The dtype of an operand that is there.
fp4bf16_status check_operand_dtype(const char* op, const char* name, fp4bf16_dtype dtype) {
    return check_range(op, name, dtype, FP4BF16_FLOAT32, FP4BF16_FLOAT16);
}

// An operand stored as `rows` rows of `k` elements. The stride of a single row is never used: it becomes one
// that every kernel takes.
fp4bf16_status check_operand(const char* op, const char* name, const void* pointer, int64_t rows, int64_t k,
                             int64_t* stride, int64_t alignment) {
    FP4BF16_TRY(check_matrix(op, name, pointer, rows, k, *stride, alignment));
    if (rows <= 1) *stride = ceil_div(k, 16) * 16;
    if (*stride <= kMostStride) return FP4BF16_OK;
    return fail(FP4BF16_INVALID_ARGUMENT,
                "%s: the row stride of %s is %lld elements, but at most 2^40 are "
                "taken",
                op, name, ll(*stride));
}

fp4bf16_status check_shape(const char* op, const fp4bf16_gemm_args& a) {
    FP4BF16_TRY(check_range(op, "m", a.m, 0, kMostRows));
    FP4BF16_TRY(check_range(op, "n", a.n, 0, kMostRows));
    FP4BF16_TRY(check_range(op, "k8", a.k8, 0, kMostRows));
    FP4BF16_TRY(check_range(op, "k16", a.k16, 0, kMostRows));
    FP4BF16_TRY(check_range(op, "a16_m_major", a.a16_m_major, 0, 1));
    FP4BF16_TRY(check_range(op, "b16_n_major", a.b16_n_major, 0, 1));
    FP4BF16_TRY(check_range(op, "activation", a.activation, FP4BF16_NONE, FP4BF16_GELU));
    FP4BF16_TRY(check_range(op, "accumulate", a.accumulate, FP4BF16_PROMOTED, FP4BF16_FAST));
    FP4BF16_TRY(check_operand_dtype(op, "d_dtype", a.d_dtype));
    if (a.bias != nullptr) FP4BF16_TRY(check_operand_dtype(op, "bias_dtype", a.bias_dtype));
    if (a.residual != nullptr) FP4BF16_TRY(check_operand_dtype(op, "residual_dtype", a.residual_dtype));
    FP4BF16_TRY(check_range(op, "row_scale_step", a.row_scale_step, 0, 1));
    FP4BF16_TRY(check_range(op, "col_scale_step", a.col_scale_step, 0, 1));
    FP4BF16_TRY(check_range(op, "config", a.config, 0, INT32_MAX));
    return check_run_if(op, a.run_if);
}

fp4bf16_status check_batch(const char* op, fp4bf16_gemm_args* a) {
    const struct {
        const char* name;
        int64_t* value;
    } counts[] = {
        {"batch_count", &a->batch_count}, {"a_batch_div", &a->a_batch_div}, {"a_batch_mod", &a->a_batch_mod},
        {"b_batch_div", &a->b_batch_div}, {"b_batch_mod", &a->b_batch_mod},
    };
    for (const auto& count : counts) {
        FP4BF16_TRY(check_range(op, count.name, *count.value, 0, kMostRows));
        if (*count.value == 0) *count.value = 1;
    }
    const bool many = a->batch_count > 1;
    if (!many) a->a_batch_div = a->a_batch_mod = a->b_batch_div = a->b_batch_mod = 1;
    const bool many_a = a->a_batch_mod > 1, many_b = a->b_batch_mod > 1;
    const struct {
        const char* name;
        int64_t* value;
        bool used;
        int64_t least;  // what is read by address alone may also lie backwards
    } strides[] = {
        {"a8_batch_stride", &a->a8_batch_stride, many_a, 0},
        {"a16_batch_stride", &a->a16_batch_stride, many_a, 0},
        {"row_scale_batch_stride", &a->row_scale_batch_stride, many_a, -kMostStride},
        {"b8_batch_stride", &a->b8_batch_stride, many_b, 0},
        {"b16_batch_stride", &a->b16_batch_stride, many_b, 0},
        {"col_scale_batch_stride", &a->col_scale_batch_stride, many_b, -kMostStride},
        {"residual_batch_stride", &a->residual_batch_stride, many, -kMostStride},
        {"d_batch_stride", &a->d_batch_stride, many, 0},
    };
    for (const auto& stride : strides) {
        if (!stride.used) *stride.value = 0;  // of a single matrix: never read
        FP4BF16_TRY(check_range(op, stride.name, *stride.value, stride.least, kMostStride));
    }
    return FP4BF16_OK;
}

// Two elements of D in one place would make the result depend on the order: matrices follow one another, or
// their rows interleave.
fp4bf16_status check_overlap(const char* op, const fp4bf16_gemm_args& a) {
    if (a.batch_count == 1) return FP4BF16_OK;
    const int64_t matrix = (a.m - 1) * a.d_stride + a.n;
    const bool interleaved =
        a.d_batch_stride >= a.n && (a.batch_count - 1) * a.d_batch_stride + a.n <= a.d_stride;
    if (a.d_batch_stride >= matrix || interleaved) return FP4BF16_OK;
    return fail(
        FP4BF16_INVALID_ARGUMENT,
        "%s: the %lld matrices of d overlap: d_batch_stride is %lld elements, but one matrix spans %lld", op,
        ll(a.batch_count), ll(a.d_batch_stride), ll(matrix));
}

}  // namespace

fp4bf16_status check_gemm(const char* op, const fp4bf16_gemm_args& in, fp4bf16_gemm_args* out) {
    fp4bf16_gemm_args& a = *out;
    a = in;
    FP4BF16_TRY(check_shape(op, a));
    FP4BF16_TRY(check_batch(op, &a));
    if (a.m == 0 || a.n == 0) return FP4BF16_OK;  // nothing is read or written
    FP4BF16_TRY(check_operand(op, "a8", a.a8, a.m, a.k8, &a.a8_stride, 1));
    FP4BF16_TRY(check_operand(op, "b8", a.b8, a.n, a.k8, &a.b8_stride, 1));
    const int64_t a_rows = a.a16_m_major ? a.k16 : a.m, b_rows = a.b16_n_major ? a.k16 : a.n;
    FP4BF16_TRY(check_operand(op, "a16", a.a16, a_rows, a.a16_m_major ? a.m : a.k16, &a.a16_stride, 2));
    FP4BF16_TRY(check_operand(op, "b16", a.b16, b_rows, a.b16_n_major ? a.n : a.k16, &a.b16_stride, 2));
    if (a.row_scale != nullptr) FP4BF16_TRY(check_pointer(op, "row_scale", a.row_scale, 4));
    if (a.col_scale != nullptr) FP4BF16_TRY(check_pointer(op, "col_scale", a.col_scale, 4));
    if (a.bias != nullptr) FP4BF16_TRY(check_pointer(op, "bias", a.bias, size_of(a.bias_dtype)));
    if (a.residual != nullptr)
        FP4BF16_TRY(check_operand(op, "residual", a.residual, a.m, a.n, &a.residual_stride,
                                  size_of(a.residual_dtype)));
    FP4BF16_TRY(check_operand(op, "d", a.d, a.m, a.n, &a.d_stride, size_of(a.d_dtype)));
    return check_overlap(op, a);
}

namespace {

// ---- the simple kernel: tiles of 64 x 64, a thread has 4 x 4 sums, FP32 FMAs along k from first to last
constexpr int kTile = 64, kTileK = 32, kSide = 4;
static_assert((kTile / kSide) * (kTile / kSide) == kThreads, "16 x 16 threads cover a tile");

// One operand of one track: element (i, k) lies at i * row_stride + k * k_stride.
template <typename T>
struct Operand {
    const T* data;
    int64_t rows, row_stride, k_stride;
};

// Rows row0.. of k-columns k0.. -> tile, transposed; zeros beyond the operand. Neighbouring threads read
// neighbouring elements.
template <typename T>
__device__ void load_tile(const Operand<T>& x, int64_t row0, int64_t k0, int64_t k_size,
                          float (&tile)[kTileK][kTile + 1]) {
    for (int i = threadIdx.x; i < kTile * kTileK; i += kThreads) {
        const int row = x.k_stride == 1 ? i / kTileK : i % kTile;
        const int k = x.k_stride == 1 ? i % kTileK : i / kTile;
        const bool inside = row0 + row < x.rows && k0 + k < k_size;
        tile[k][row] = inside ? decode(x.data[(row0 + row) * x.row_stride + (k0 + k) * x.k_stride]) : 0.0f;
    }
}

// sum (4, 4) += the rows ty + 16 i of A's tile times the rows tx + 16 j of B's.
template <typename T>
__device__ void multiply(const Operand<T>& a, const Operand<T>& b, int64_t k_size, int64_t row0, int64_t col0,
                         float (&sum)[kSide][kSide]) {
    __shared__ float tile_a[kTileK][kTile + 1], tile_b[kTileK][kTile + 1];  // (k, rows)
    const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    for (int64_t k0 = 0; k0 < k_size; k0 += kTileK) {
        load_tile(a, row0, k0, k_size, tile_a);
        load_tile(b, col0, k0, k_size, tile_b);
        __syncthreads();
        const int valid = static_cast<int>(min(int64_t{kTileK}, k_size - k0));
        for (int k = 0; k < valid; ++k)
#pragma unroll
            for (int i = 0; i < kSide; ++i)
                for (int j = 0; j < kSide; ++j)
                    sum[i][j] = __fmaf_rn(tile_a[k][ty + 16 * i], tile_b[k][tx + 16 * j], sum[i][j]);
        __syncthreads();
    }
}

// The scales stand between the two tracks: the FP4 sum is multiplied, the BF16 sum then added to it.
__global__ void __launch_bounds__(kThreads) gemm_simple_kernel(const fp4bf16_gemm_args p) {
    if (skipped(p.run_if)) return;
    wait_for_previous();
    const int64_t tiles_m = (p.m + kTile - 1) / kTile, tiles_n = (p.n + kTile - 1) / kTile;
    const int64_t tiles = tiles_m * tiles_n * p.batch_count;
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int64_t z = tile / (tiles_m * tiles_n), za = z / p.a_batch_div % p.a_batch_mod,
                      zb = z / p.b_batch_div % p.b_batch_mod;
        const int64_t row0 = tile / tiles_n % tiles_m * kTile, col0 = tile % tiles_n * kTile;
        const Operand<uint8_t> a8{p.a8 + za * p.a8_batch_stride, p.m, p.a8_stride, 1};
        const Operand<uint8_t> b8{p.b8 + zb * p.b8_batch_stride, p.n, p.b8_stride, 1};
        const Operand<__nv_bfloat16> a16{static_cast<const __nv_bfloat16*>(p.a16) + za * p.a16_batch_stride,
                                         p.m, p.a16_m_major ? 1 : p.a16_stride,
                                         p.a16_m_major ? p.a16_stride : 1};
        const Operand<__nv_bfloat16> b16{static_cast<const __nv_bfloat16*>(p.b16) + zb * p.b16_batch_stride,
                                         p.n, p.b16_n_major ? 1 : p.b16_stride,
                                         p.b16_n_major ? p.b16_stride : 1};
        float sum8[kSide][kSide] = {}, sum16[kSide][kSide] = {};
        multiply(a8, b8, p.k8, row0, col0, sum8);
        multiply(a16, b16, p.k16, row0, col0, sum16);
#pragma unroll
        for (int i = 0; i < kSide; ++i)
#pragma unroll
            for (int j = 0; j < kSide; ++j) {
                const int64_t row = row0 + threadIdx.x / 16 + 16 * i, col = col0 + threadIdx.x % 16 + 16 * j;
                if (row >= p.m || col >= p.n) continue;
                float scale =
                    p.row_scale ? p.row_scale[za * p.row_scale_batch_stride + row * p.row_scale_step] : 1.0f;
                if (p.col_scale) scale *= p.col_scale[zb * p.col_scale_batch_stride + col * p.col_scale_step];
                float v = p.k8 > 0 ? scale * sum8[i][j] + sum16[i][j] : scale * sum16[i][j];
                v *= p.alpha;
                if (p.bias) v += read(p.bias, col, p.bias_dtype);
                v = activate(v, p.activation);
                if (p.residual)
                    v += read(p.residual, z * p.residual_batch_stride + row * p.residual_stride + col,
                              p.residual_dtype);
                write(p.d, z * p.d_batch_stride + row * p.d_stride + col, p.d_dtype, v);
            }
    }
}

fp4bf16_status launch_simple(const char* op, const fp4bf16_gemm_args& args, cudaStream_t stream) {
    const int64_t tiles = ceil_div(args.m, kTile) * ceil_div(args.n, kTile);  // under 2^50
    const int64_t all = tiles > kMostRows / args.batch_count ? kMostRows : tiles * args.batch_count;
    launch_kernel(gemm_simple_kernel, static_cast<unsigned>(all), kThreads, 0, stream, args);
    return cuda_result(cudaGetLastError(), op);
}

// ---- what TMA on sm_90 asks of an operand: 16-byte addresses and strides
fp4bf16_status check_tma(const char* op, const char* name, const void* pointer, int64_t stride,
                         int64_t batch_stride, int64_t size) {
    FP4BF16_TRY(check_pointer(op, name, pointer, 16));
    if (stride * size % 16 == 0 && batch_stride * size % 16 == 0) return FP4BF16_OK;
    const bool row = stride * size % 16 != 0;
    return fail(
        FP4BF16_INVALID_ARGUMENT,
        "%s: the %s stride of %s is %lld bytes, but on sm_90 it must be a multiple of 16; copy it with "
        "fp4bf16_convert or a padded array",
        op, row ? "row" : "batch", name, ll((row ? stride : batch_stride) * size));
}

fp4bf16_status gemm_on_sm90(const char* op, const fp4bf16_gemm_args& a, cudaStream_t stream) {
    if (a.k8 > 0) {
        FP4BF16_TRY(check_tma(op, "a8", a.a8, a.a8_stride, a.a8_batch_stride, 1));
        FP4BF16_TRY(check_tma(op, "b8", a.b8, a.b8_stride, a.b8_batch_stride, 1));
    }
    if (a.k16 > 0) {
        FP4BF16_TRY(check_tma(op, "a16", a.a16, a.a16_stride, a.a16_batch_stride, 2));
        FP4BF16_TRY(check_tma(op, "b16", a.b16, a.b16_stride, a.b16_batch_stride, 2));
    }
    if (a.config > 0 && sm90_gemm_config(a, a.config)[0] == '\0')
        return fail(FP4BF16_INVALID_ARGUMENT,
                    "%s: there is no configuration %d for these arguments; 0 lets the library choose", op,
                    static_cast<int>(a.config));
    return sm90_gemm(a, stream);
}

}  // namespace
}  // namespace fp4bf16

using namespace fp4bf16;

extern "C" fp4bf16_status fp4bf16_gemm(const fp4bf16_gemm_args* args, void* stream) {
    FP4BF16_TRY(check_pointer("gemm", "args", args, alignof(fp4bf16_gemm_args)));
    fp4bf16_gemm_args checked;
    FP4BF16_TRY(check_gemm("gemm", *args, &checked));
    if (checked.m == 0 || checked.n == 0) return FP4BF16_OK;
    int major = 0, minor = 0;
    FP4BF16_TRY(compute_capability("gemm", &major, &minor));
    if (major < 8)
        return fail(
            FP4BF16_UNSUPPORTED_ARCH,
            "gemm: this GPU has compute capability %d.%d, but 8.0 or later is needed; host arrays run "
            "on the CPU",
            major, minor);
    const auto s = static_cast<cudaStream_t>(stream);
    if (major != 9 || (checked.k8 == 0 && checked.k16 == 0)) return launch_simple("gemm", checked, s);
    return gemm_on_sm90("gemm", checked, s);
}

extern "C" fp4bf16_status fp4bf16_gemm_simple(const fp4bf16_gemm_args* args, void* stream) {
    FP4BF16_TRY(check_pointer("gemm_simple", "args", args, alignof(fp4bf16_gemm_args)));
    fp4bf16_gemm_args checked;
    FP4BF16_TRY(check_gemm("gemm_simple", *args, &checked));
    if (checked.m == 0 || checked.n == 0) return FP4BF16_OK;
    return launch_simple("gemm_simple", checked, static_cast<cudaStream_t>(stream));
}

// Without a device the answer is sm_90's.
extern "C" const char* fp4bf16_gemm_config(const fp4bf16_gemm_args* args, int32_t config) {
    fp4bf16_gemm_args checked;
    if (check_pointer("gemm_config", "args", args, alignof(fp4bf16_gemm_args)) != FP4BF16_OK) return "";
    if (check_gemm("gemm_config", *args, &checked) != FP4BF16_OK || config < 0) return "";
    int major = 9, minor = 0;
    if (compute_capability("gemm_config", &major, &minor) == FP4BF16_OK && major != 9)
        return config == 0 ? "simple" : "";
    return sm90_gemm_config(checked, config);
}
