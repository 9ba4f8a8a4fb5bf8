/* fp4bf16.h: the public C ABI, read by nvcc and (between the two cffi markers) by bindings/build_ffi.py; its
 * second half is fp4bf16_network.h.
 *
 * Every function returns a status; fp4bf16_last_error() then holds one sentence about this thread's last
 * failure. Kernels are ordered on `stream` (a cudaStream_t, NULL = the legacy default stream), allocate
 * nothing, never synchronise, can be captured in a CUDA graph, and run on the thread's current device.
 * Pointers are to device memory unless they say "host". No call leaves a CUDA error behind for the next one.
 *
 * `run_if`, where there is one, is NULL or one number on the device: the launch reads and writes nothing else
 * where that is 0 once all work before it on the stream is done. The host does not wait, so that a graph
 * decides anew at each replay.
 *
 * A matrix is (rows, k), the last axis contiguous; FP4 goes two codes a byte, the low nibble is the even k.
 */
#ifndef FP4BF16_H
#define FP4BF16_H

#include <stdint.h>

#if defined(_WIN32)
#ifdef FP4BF16_BUILD
#define FP4BF16_API __declspec(dllexport)
#else
#define FP4BF16_API __declspec(dllimport)
#endif
#else
#define FP4BF16_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* cffi: begin */

/* Raised whenever a declaration below changes its meaning or its arguments. */
enum { FP4BF16_ABI_VERSION = 6 };

typedef enum fp4bf16_status {
    FP4BF16_OK = 0,
    FP4BF16_INVALID_ARGUMENT = 1, /* an argument is out of range; nothing was launched */
    FP4BF16_NO_DEVICE = 2,        /* no driver, or no device of that number */
    FP4BF16_UNSUPPORTED_ARCH = 3, /* the library holds no code for this device */
    FP4BF16_CUDA_ERROR = 4        /* the CUDA runtime failed */
} fp4bf16_status;

typedef enum fp4bf16_dtype { FP4BF16_FLOAT32 = 0, FP4BF16_BFLOAT16 = 1, FP4BF16_FLOAT16 = 2 } fp4bf16_dtype;
typedef enum fp4bf16_format {
    FP4BF16_NVFP4_EXACT = 0,
    FP4BF16_NVFP4 = 1,
    FP4BF16_MXFP4 = 2,
    FP4BF16_FP8 = 3
} fp4bf16_format;
/* Scale search of nvfp4_exact: four candidates (weights) or two (activations). */
typedef enum fp4bf16_search { FP4BF16_SEARCH_FULL = 0, FP4BF16_SEARCH_FAST = 1 } fp4bf16_search;
/* How a block scale is chosen. DEFAULT: TE for nvfp4, EVEN for mxfp4 (RCEIL when rounding stochastically). */
typedef enum fp4bf16_scale_rule {
    FP4BF16_RULE_DEFAULT = 0,
    FP4BF16_RULE_TE = 1,
    FP4BF16_RULE_FOUR_OVER_SIX = 2,
    FP4BF16_RULE_FOUR_OVER_SIX_MAE = 3,
    FP4BF16_RULE_FOUR_OVER_SIX_448 = 4,
    FP4BF16_RULE_FOUR_OVER_SIX_MAE_448 = 5,
    FP4BF16_RULE_EVEN = 6,
    FP4BF16_RULE_FLOOR = 7,
    FP4BF16_RULE_RCEIL = 8,
    FP4BF16_RULE_CEIL = 9
} fp4bf16_scale_rule;
typedef enum fp4bf16_rounding { FP4BF16_NEAREST = 0, FP4BF16_STOCHASTIC = 1 } fp4bf16_rounding;
typedef enum fp4bf16_activation { FP4BF16_NONE = 0, FP4BF16_SILU = 1, FP4BF16_GELU = 2 } fp4bf16_activation;
/* FP8 tensor cores keep about 14 bits of a sum: PROMOTED adds their sum to FP32 registers every 128 elements
 * of K, FAST never does. */
typedef enum fp4bf16_accumulate { FP4BF16_PROMOTED = 0, FP4BF16_FAST = 1 } fp4bf16_accumulate;
typedef struct fp4bf16_device {
    char name[256];
    int32_t major, minor; /* compute capability */
    int32_t multiprocessors;
    int32_t shared_memory_per_block; /* bytes, opted in */
    int64_t memory;                  /* bytes */
    int64_t l2_cache;                /* bytes */
} fp4bf16_device;

FP4BF16_API int32_t fp4bf16_abi_version(void);
FP4BF16_API const char* fp4bf16_version(void);       /* of the package that this was built for */
FP4BF16_API const char* fp4bf16_source_digest(void); /* of src/cuda/ as it was built */
FP4BF16_API const char* fp4bf16_last_error(void);    /* "" while none */

/* CUDA versions as 1000 * major + 10 * minor; *driver is 0 where there is none. Host pointers. */
FP4BF16_API fp4bf16_status fp4bf16_cuda_versions(int32_t* driver, int32_t* runtime);
/* Devices that can be used. FP4BF16_NO_DEVICE with *count = 0 where there is no driver. Host pointer. */
FP4BF16_API fp4bf16_status fp4bf16_device_count(int32_t* count);
FP4BF16_API fp4bf16_status fp4bf16_device_query(int32_t device, fp4bf16_device* info);

/* x (rows, k) -> packed (rows, ceil(k / 2)): E2M1, half to even, saturating at 6; no scale. NaN: 6 of its
 * sign. */
FP4BF16_API fp4bf16_status fp4bf16_pack(const void* x, fp4bf16_dtype dtype, int64_t rows, int64_t k,
                                        int64_t x_stride, uint8_t* packed, void* stream);
/* packed (rows, ceil(k / 2)) -> x (rows, k): the E2M1 values themselves, no scale. */
FP4BF16_API fp4bf16_status fp4bf16_unpack(const uint8_t* packed, int64_t rows, int64_t k, void* x,
                                          fp4bf16_dtype dtype, int64_t x_stride, void* stream);

/* amax (ceil(rows / rows_per_amax),): the largest |x| of each group of consecutive rows; 1 = one a row, rows
 * = one a tensor. NaN and Inf are left out. The result depends on no order. */
FP4BF16_API fp4bf16_status fp4bf16_amax(const void* x, fp4bf16_dtype dtype, int64_t rows, int64_t k,
                                        int64_t x_stride, int64_t rows_per_amax, float* amax, void* stream);

/* What fp4bf16_quantize reads and writes. Zero-initialise it, then fill in. `rows` are those of the stored
 * layout, blocks run along k. Element (row, k) of x lies at
 *     (row / after) * x_stride + k * k_stride + row % after
 * and is element (row / after) * (k_size * after) + k * after + row % after of the logical array (the index
 * of its random number). after = 1, k_stride = 1: rows of contiguous k, x_stride apart. after = n,
 * k_stride = n: blocks run along the second last axis, `after` being the product of the axes behind it. */
typedef struct fp4bf16_quantize_args {
    const void* x;
    int64_t rows, k_size, after, x_stride, k_stride;
    fp4bf16_dtype dtype;
    fp4bf16_format format;
    fp4bf16_scale_rule rule;
    fp4bf16_search search;
    fp4bf16_rounding rounding;
    uint32_t stream_word, call_word; /* Philox counter words 2 and 3 */
    uint64_t seed;                   /* Philox key */

    /* Outer scales: row belongs to group row / (mid * inner) * inner + row % inner. (mid, inner) = (1, rows):
     * one a row; (rows, 1): one a tensor; (rows an image, 1): one an image. There are
     * ceil(rows / (mid * inner)) * inner groups. */
    int64_t mid, inner;
    const float* outer_given;   /* (groups,) decode scales, powers of two; NULL: found from the amax */
    int64_t outer_given_stride; /* 0: one for all groups, 1: one a group */

    /* Results, each may be NULL; packed needs block_scale (but for fp8, which has none). kp is k_size rounded
     * up to 16 (32 for mxfp4, 1 for fp8); the padding is zero. */
    uint8_t* packed;   /* (rows, kp / 2); fp8: (rows, kp) */
    uint8_t* expanded; /* (rows, expanded_stride) E4M3 of code * block scale, nvfp4_exact and fp8 alone */
    int64_t expanded_stride; /* bytes, at least kp; what lies between kp and it is zeroed */
    uint8_t* block_scale;    /* (rows, kp / 16 or 32) */
    float* outer_scale;      /* (groups,) decode scales; mxfp4: not written */
    double* sums;    /* (rows, 3): squares of x, of its decoded value, of the difference; upper bounds */
    int32_t* counts; /* (5,), added to: clipped elements; underflowed, zero, overflowed, non-finite blocks */

    /* Outlier columns: their BF16 values go to hidden, and they count as zero in everything above. */
    const int32_t* outlier_index; /* (outliers,) ascending */
    int64_t outliers;
    /* Low-rank branch: hidden[:, :rank] = bf16(bf16(x) @ down^T), summed in FP32, over the columns that are
     * no outliers (down is zero there); hidden[:, rank:rank + outliers] = bf16(x[:, outlier_index]);
     * what lies between rank + outliers and hidden_stride is zeroed. */
    const void* down_t; /* (rank, down_stride) BF16, row r is column r of D */
    int64_t rank, down_stride;
    void* hidden; /* (rows, hidden_stride) BF16 */
    int64_t hidden_stride;

    void* workspace; /* fp4bf16_quantize_workspace_size() bytes, 16-byte aligned; NULL where that is 0 */
} fp4bf16_quantize_args;
FP4BF16_API int64_t fp4bf16_quantize_workspace_size(const fp4bf16_quantize_args* args); /* host; -1: bad */
FP4BF16_API fp4bf16_status fp4bf16_quantize(const fp4bf16_quantize_args* args, void* stream);

/* x (rows, k) = (code * block_scale) * outer_scale[group], in FP32, rounded once to `dtype`. Groups as above;
 * outer_scale may be NULL (one). Element (row, k) is written to (row / after) * x_stride + k * k_stride +
 * row % after. */
FP4BF16_API fp4bf16_status fp4bf16_dequantize(fp4bf16_format format, const uint8_t* packed,
                                              const uint8_t* block_scale, const float* outer_scale,
                                              int64_t rows, int64_t k, int64_t mid, int64_t inner, void* x,
                                              fp4bf16_dtype dtype, int64_t after, int64_t x_stride,
                                              int64_t k_stride, void* stream);

/* expanded (rows, expanded_stride) = E4M3 of code * block_scale; packed (rows, kp / 2). *inexact (device, may
 * be NULL) counts products that E4M3 does not hold, and must be zero before. Only nvfp4_exact and nvfp4. */
FP4BF16_API fp4bf16_status fp4bf16_expand(fp4bf16_format format, const uint8_t* packed,
                                          const uint8_t* block_scale, int64_t rows, int64_t kp,
                                          uint8_t* expanded, int64_t expanded_stride, int32_t* inexact,
                                          void* stream);

/* out (batch, rows, out_stride) = x, converted to `out_dtype` (round half to even); columns from k to
 * out_stride are zeroed. x is strided freely, in elements; strides may be 0 or negative. */
FP4BF16_API fp4bf16_status fp4bf16_convert(const void* x, fp4bf16_dtype dtype, int64_t batch, int64_t rows,
                                           int64_t k, int64_t batch_stride, int64_t row_stride,
                                           int64_t k_stride, void* out, fp4bf16_dtype out_dtype,
                                           int64_t out_stride, void* stream);

/* D = activation(alpha * (S * (A8 B8^T) + A16 B16^T) + bias) + residual, S = row_scale x col_scale.
 *
 * The FP4 track is (m, k8) E4M3 bytes times (n, k8) E4M3 bytes, the BF16 track (m, k16) times (n, k16);
 * either k may be 0. With k8 = 0 the scales apply to the BF16 product instead. Zero-initialise, then fill in.
 *
 * Operands are K-major: row i starts at i * stride. With a16_m_major = 1, A16 is stored (k16, m): element
 * (i, k) lies at k * a16_stride + i; b16_n_major likewise (k16, n). On sm_90 operands must be 16-byte
 * aligned, their strides in bytes multiples of 16, and beside an FP4 track (k8 > 0) A16 and B16 K-major. D
 * and the residual are (m, n) with any stride >= n.
 *
 * Batch: matrix z of batch_count multiplies A's matrix z / a_batch_div % a_batch_mod (B likewise), those lie
 * *_batch_stride elements apart. A single matrix has div = mod = 1 and any stride; 0 reads as 1. Scales,
 * residual and D go with A (row_scale), B (col_scale) and z (residual, D). */
typedef struct fp4bf16_gemm_args {
    int64_t m, n, k8, k16;
    const uint8_t* a8; /* (m, a8_stride) */
    const uint8_t* b8; /* (n, b8_stride) */
    int64_t a8_stride, b8_stride;
    const void* a16; /* BF16 */
    const void* b16;
    int64_t a16_stride, b16_stride;
    int32_t a16_m_major, b16_n_major;
    const float* row_scale; /* element i * row_scale_step; NULL: one */
    const float* col_scale;
    int64_t row_scale_step, col_scale_step; /* 0 or 1 */
    float alpha;
    fp4bf16_activation activation;
    const void* bias; /* (n,) */
    const void* residual;
    fp4bf16_dtype bias_dtype, residual_dtype, d_dtype;
    int64_t residual_stride, d_stride;
    void* d;
    int64_t batch_count; /* 0 reads as 1 */
    int64_t a_batch_div, a_batch_mod, b_batch_div, b_batch_mod;
    int64_t a8_batch_stride, b8_batch_stride, a16_batch_stride, b16_batch_stride;
    int64_t row_scale_batch_stride, col_scale_batch_stride, residual_batch_stride, d_batch_stride;
    fp4bf16_accumulate accumulate;
    int32_t config; /* 0: chosen by shape; else the number of a configuration, from 1 */
    const int32_t* run_if; /* NULL: always; see above */
} fp4bf16_gemm_args;
FP4BF16_API fp4bf16_status fp4bf16_gemm(const fp4bf16_gemm_args* args, void* stream);
/* The same by a short kernel that runs on every GPU: what the fast one is checked with. */
FP4BF16_API fp4bf16_status fp4bf16_gemm_simple(const fp4bf16_gemm_args* args, void* stream);
/* Name of configuration `config` ("" past the last); of 0: the one that these args would get. Host. */
FP4BF16_API const char* fp4bf16_gemm_config(const fp4bf16_gemm_args* args, int32_t config);

/* cffi: end */

#ifdef __cplusplus
}
#endif

#include "fp4bf16_network.h"

#endif /* FP4BF16_H */
