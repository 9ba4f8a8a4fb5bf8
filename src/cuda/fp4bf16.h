/* fp4bf16.h: the public C ABI, read by nvcc and (between the two cffi markers) by bindings/build_ffi.py.
 *
 * Every function returns a status; fp4bf16_last_error() then holds one sentence about this thread's last
 * failure. Kernels are ordered on `stream` (a cudaStream_t, NULL = the legacy default stream), allocate
 * nothing, never synchronise, can be captured in a CUDA graph, and run on the thread's current device.
 * Pointers are to device memory unless they say "host". No call leaves a CUDA error behind for the next one.
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
enum { FP4BF16_ABI_VERSION = 1 };

typedef enum fp4bf16_status {
    FP4BF16_OK = 0,
    FP4BF16_INVALID_ARGUMENT = 1, /* an argument is out of range; nothing was launched */
    FP4BF16_NO_DEVICE = 2,        /* no driver, or no device of that number */
    FP4BF16_UNSUPPORTED_ARCH = 3, /* the library holds no code for this device */
    FP4BF16_CUDA_ERROR = 4        /* the CUDA runtime failed */
} fp4bf16_status;

typedef enum fp4bf16_dtype { FP4BF16_FLOAT32 = 0, FP4BF16_BFLOAT16 = 1 } fp4bf16_dtype;

typedef enum fp4bf16_format { FP4BF16_NVFP4_EXACT = 0, FP4BF16_NVFP4 = 1 } fp4bf16_format;

/* Scale search of nvfp4_exact: four candidates (weights) or two (activations). */
typedef enum fp4bf16_search { FP4BF16_SEARCH_FULL = 0, FP4BF16_SEARCH_FAST = 1 } fp4bf16_search;

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

/* x (rows, k) -> packed (rows, ceil(k / 2)): E2M1, round half to even, saturating at 6; no scale. NaN becomes
 * 6 with its sign. */
FP4BF16_API fp4bf16_status fp4bf16_pack(const void* x, fp4bf16_dtype dtype, int64_t rows, int64_t k,
                                        int64_t x_stride, uint8_t* packed, void* stream);

/* packed (rows, ceil(k / 2)) -> x (rows, k): the E2M1 values themselves, no scale. */
FP4BF16_API fp4bf16_status fp4bf16_unpack(const uint8_t* packed, int64_t rows, int64_t k, void* x,
                                          fp4bf16_dtype dtype, int64_t x_stride, void* stream);

/* amax (ceil(rows / rows_per_amax),): the largest |x| of each group of consecutive rows; 1 = one a row, rows
 * = one a tensor. NaN and Inf are left out. The result depends on no order. */
FP4BF16_API fp4bf16_status fp4bf16_amax(const void* x, fp4bf16_dtype dtype, int64_t rows, int64_t k,
                                        int64_t x_stride, int64_t rows_per_amax, float* amax, void* stream);

/* x (rows, k) -> packed (rows, kp / 2), block_scale (rows, kp / 16) E4M3 bytes, outer_scale (like amax),
 * where kp is k rounded up to 16 and the padding is zero. amax as from fp4bf16_amax, or any larger number:
 * for nvfp4_exact 288 * 2^e asks for the exponent e itself; it must be finite. `search` is for nvfp4_exact
 * alone; nvfp4 is quantised as Transformer Engine does it. A block of zeros is all zero bytes; one that holds
 * NaN or Inf gets the scale NaN and codes 0. */
FP4BF16_API fp4bf16_status fp4bf16_quantize(const void* x, fp4bf16_dtype dtype, int64_t rows, int64_t k,
                                            int64_t x_stride, fp4bf16_format format, fp4bf16_search search,
                                            const float* amax, int64_t rows_per_amax, uint8_t* packed,
                                            uint8_t* block_scale, float* outer_scale, void* stream);

/* The inverse: x (rows, k) = (code * block_scale) * outer_scale, in FP32, rounded once to `dtype`. */
FP4BF16_API fp4bf16_status fp4bf16_dequantize(const uint8_t* packed, const uint8_t* block_scale,
                                              const float* outer_scale, int64_t rows, int64_t k,
                                              int64_t rows_per_outer, void* x, fp4bf16_dtype dtype,
                                              int64_t x_stride, void* stream);

/* cffi: end */

#ifdef __cplusplus
}
#endif
#endif /* FP4BF16_H */
