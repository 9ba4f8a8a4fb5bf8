// Versions, errors, devices. No kernel here, and nothing here creates a CUDA context.
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "common.h"
#include "fp4bf16_build_info.h"

namespace fp4bf16 {
namespace {
thread_local char last_error[512] = "";
}

fp4bf16_status fail(fp4bf16_status status, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return status;
}

// Names the GPU that the library has no code for.
static fp4bf16_status no_code(const char* where, cudaError_t error) {
    int device = 0, major = 0, minor = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess)
        cudaGetLastError();
    return fail(
        FP4BF16_UNSUPPORTED_ARCH,
        "%s: device %d has compute capability %d.%d, but this library holds no code for it (%s); build it "
        "with -C cmake.define.FP4BF16_CUDA_NEUTRAL_ARCHS=%d%d-real",
        where, device, major, minor, cudaGetErrorString(error), major, minor);
}

fp4bf16_status cuda_result(cudaError_t error, const char* where) {
    if (error == cudaSuccess) return FP4BF16_OK;
    cudaGetLastError();  // the runtime keeps the error too: take it, or the next call reports it
    switch (error) {
        case cudaErrorNoKernelImageForDevice:
        case cudaErrorInvalidDeviceFunction:
        case cudaErrorUnsupportedPtxVersion:
            return no_code(where, error);
        case cudaErrorInsufficientDriver: {
            int driver = 0;
            if (cudaDriverGetVersion(&driver) != cudaSuccess) cudaGetLastError();
            if (driver == 0)
                return fail(FP4BF16_NO_DEVICE, "%s: no NVIDIA driver is installed on this machine", where);
            return fail(FP4BF16_NO_DEVICE,
                        "%s: the NVIDIA driver supports CUDA %d.%d, but %d.%d is needed; update it", where,
                        driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
        }
        case cudaErrorNoDevice:
        case cudaErrorInvalidDevice:
        case cudaErrorStubLibrary:
            return fail(FP4BF16_NO_DEVICE, "%s: no usable GPU: %s (CUDA error %d)", where,
                        cudaGetErrorString(error), static_cast<int>(error));
        default:
            return fail(FP4BF16_CUDA_ERROR, "%s: %s (CUDA error %d, %s)", where, cudaGetErrorString(error),
                        static_cast<int>(error), cudaGetErrorName(error));
    }
}

fp4bf16_status check_pointer(const char* function, const char* name, const void* pointer, int64_t alignment) {
    if (pointer == nullptr) return fail(FP4BF16_INVALID_ARGUMENT, "%s: %s is NULL", function, name);
    const auto offset = reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(alignment);
    if (offset != 0)
        return fail(FP4BF16_INVALID_ARGUMENT,
                    "%s: %s is %d bytes past a multiple of %d, but must be aligned to it", function, name,
                    static_cast<int>(offset), static_cast<int>(alignment));
    return FP4BF16_OK;
}

fp4bf16_status check_matrix(const char* function, const char* name, const void* pointer, int64_t rows,
                            int64_t k, int64_t stride, int64_t alignment) {
    constexpr int64_t kLimit = int64_t{1} << 40;  // far beyond any memory, and rows * k stays an int64
    if (rows < 0 || k < 0 || rows > kLimit || k > kLimit || (k > 0 && rows > (int64_t{1} << 62) / k))
        return fail(FP4BF16_INVALID_ARGUMENT,
                    "%s: %s is (%lld, %lld), but both must be 0 to 2^40 and the product "
                    "under 2^62",
                    function, name, static_cast<long long>(rows), static_cast<long long>(k));
    if (rows > 1 && stride > kLimit)
        return fail(FP4BF16_INVALID_ARGUMENT,
                    "%s: the row stride of %s is %lld elements, but at most 2^40 are taken", function, name,
                    static_cast<long long>(stride));
    if (rows > 1 && stride < k)
        return fail(FP4BF16_INVALID_ARGUMENT,
                    "%s: the row stride of %s is %lld elements, less than its %lld columns", function, name,
                    static_cast<long long>(stride), static_cast<long long>(k));
    return rows == 0 || k == 0 ? FP4BF16_OK : check_pointer(function, name, pointer, alignment);
}

fp4bf16_status check_range(const char* function, const char* name, int64_t value, int64_t least,
                           int64_t most) {
    if (value >= least && value <= most) return FP4BF16_OK;
    return fail(FP4BF16_INVALID_ARGUMENT, "%s: %s is %lld, but must be %lld to %lld", function, name,
                static_cast<long long>(value), static_cast<long long>(least), static_cast<long long>(most));
}

fp4bf16_status check_dtype(const char* function, fp4bf16_dtype dtype) {
    if (dtype == FP4BF16_FLOAT32 || dtype == FP4BF16_BFLOAT16 || dtype == FP4BF16_FLOAT16) return FP4BF16_OK;
    return fail(FP4BF16_INVALID_ARGUMENT,
                "%s: dtype is %d, but FP4BF16_FLOAT32 (0), FP4BF16_BFLOAT16 (1) or FP4BF16_FLOAT16 (2) is "
                "needed",
                function, static_cast<int>(dtype));
}

fp4bf16_status check_group(const char* function, const char* name, int64_t rows_per_group) {
    if (rows_per_group >= 1 && rows_per_group <= int64_t{1} << 40) return FP4BF16_OK;
    return fail(FP4BF16_INVALID_ARGUMENT, "%s: %s is %lld, but must be at least 1 and at most 2^40", function,
                name, static_cast<long long>(rows_per_group));
}

fp4bf16_status check_groups(const char* function, int64_t mid, int64_t inner) {
    FP4BF16_TRY(check_group(function, "mid", mid));
    FP4BF16_TRY(check_group(function, "inner", inner));
    if (mid <= (int64_t{1} << 40) / inner) return FP4BF16_OK;
    return fail(FP4BF16_INVALID_ARGUMENT,
                "%s: mid is %lld and inner is %lld, but their product must be at most 2^40", function,
                static_cast<long long>(mid), static_cast<long long>(inner));
}

// The two attributes are asked once a device: a launch then costs one cudaGetDevice, which makes no context.
fp4bf16_status multiprocessor_count(const char* function, int* count) {
    constexpr int kKnown = 64;
    static std::atomic<int> known[kKnown];
    int device = 0;
    FP4BF16_TRY(cuda_result(cudaGetDevice(&device), function));
    *count = device < kKnown ? known[device].load(std::memory_order_relaxed) : 0;
    if (*count > 0) return FP4BF16_OK;
    FP4BF16_TRY(cuda_result(cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device), function));
    if (device < kKnown) known[device].store(*count, std::memory_order_relaxed);
    return FP4BF16_OK;
}

fp4bf16_status compute_capability(const char* function, int* major, int* minor) {
    constexpr int kKnown = 64;              // devices with a place in the table; others are asked each time
    static std::atomic<int> known[kKnown];  // 1000 * major + minor, 0 = not asked yet
    int device = 0;
    FP4BF16_TRY(cuda_result(cudaGetDevice(&device), function));
    int both = device < kKnown ? known[device].load(std::memory_order_relaxed) : 0;
    if (both == 0) {
        FP4BF16_TRY(
            cuda_result(cudaDeviceGetAttribute(major, cudaDevAttrComputeCapabilityMajor, device), function));
        FP4BF16_TRY(
            cuda_result(cudaDeviceGetAttribute(minor, cudaDevAttrComputeCapabilityMinor, device), function));
        both = 1000 * *major + *minor;
        if (device < kKnown) known[device].store(both, std::memory_order_relaxed);
    }
    *major = both / 1000;
    *minor = both % 1000;
    return FP4BF16_OK;
}

}  // namespace fp4bf16

using namespace fp4bf16;

extern "C" {

int32_t fp4bf16_abi_version(void) { return FP4BF16_ABI_VERSION; }
const char* fp4bf16_version(void) { return FP4BF16_VERSION; }
const char* fp4bf16_source_digest(void) { return FP4BF16_SOURCE_DIGEST; }
const char* fp4bf16_last_error(void) { return last_error; }

fp4bf16_status fp4bf16_cuda_versions(int32_t* driver, int32_t* runtime) {
    FP4BF16_TRY(check_pointer("cuda_versions", "driver", driver, alignof(int32_t)));
    FP4BF16_TRY(check_pointer("cuda_versions", "runtime", runtime, alignof(int32_t)));
    int version = 0;
    const cudaError_t error = cudaDriverGetVersion(&version);
    *driver = error == cudaSuccess ? version : 0;
    cudaGetLastError();
    return cuda_result(cudaRuntimeGetVersion(runtime), "cuda_versions");
}

fp4bf16_status fp4bf16_device_count(int32_t* count) {
    FP4BF16_TRY(check_pointer("device_count", "count", count, alignof(int32_t)));
    int found = 0;
    const cudaError_t error = cudaGetDeviceCount(&found);
    *count = error == cudaSuccess ? found : 0;
    return cuda_result(error, "device_count");
}

fp4bf16_status fp4bf16_device_query(int32_t device, fp4bf16_device* info) {
    FP4BF16_TRY(check_pointer("device_query", "info", info, alignof(fp4bf16_device)));
    int32_t count = 0;
    FP4BF16_TRY(fp4bf16_device_count(&count));
    if (device < 0 || device >= count)
        return fail(FP4BF16_NO_DEVICE, "device_query: device is %d, but there are %d (numbered from 0)",
                    device, count);
    cudaDeviceProp properties;
    FP4BF16_TRY(cuda_result(cudaGetDeviceProperties(&properties, device), "device_query"));
    *info = {};
    std::snprintf(info->name, sizeof info->name, "%s", properties.name);
    info->major = properties.major;
    info->minor = properties.minor;
    info->multiprocessors = properties.multiProcessorCount;
    info->shared_memory_per_block = static_cast<int32_t>(properties.sharedMemPerBlockOptin);
    info->memory = static_cast<int64_t>(properties.totalGlobalMem);
    info->l2_cache = properties.l2CacheSize;
    return FP4BF16_OK;
}

}  // extern "C"
