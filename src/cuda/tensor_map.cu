// cuTensorMapEncodeTiled, fetched from the driver at run time so that the library loads without one.
#include "tensor_map.h"

#include <cudaTypedefs.h>

namespace fp4bf16 {
namespace {

using Encode = PFN_cuTensorMapEncodeTiled_v12000;

fp4bf16_status encoder(const char* function, Encode* encode) {
    static Encode found = nullptr;  // two threads at worst look it up twice
    if (found == nullptr) {
        void* entry = nullptr;
        cudaDriverEntryPointQueryResult state;
        FP4BF16_TRY(cuda_result(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                                 cudaEnableDefault, &state),
                                function));
        if (state != cudaDriverEntryPointSuccess || entry == nullptr)
            return fail(
                FP4BF16_CUDA_ERROR,
                "%s: the driver has no cuTensorMapEncodeTiled (query result %d); update it to one for "
                "CUDA 12 or later",
                function, static_cast<int>(state));
        found = reinterpret_cast<Encode>(entry);
    }
    *encode = found;
    return FP4BF16_OK;
}

CUtensorMapDataType data_type(int element_bytes) {
    return element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

}  // namespace

fp4bf16_status make_tensor_map(const char* function, const char* name, const void* pointer, int element_bytes,
                               const MapShape& shape, CUtensorMap* map) {
    Encode encode = nullptr;
    FP4BF16_TRY(encoder(function, &encode));
    const auto bytes = static_cast<cuuint64_t>(element_bytes);
    const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(shape.columns), static_cast<cuuint64_t>(shape.rows),
                                 static_cast<cuuint64_t>(shape.batch)};
    const cuuint64_t row = static_cast<cuuint64_t>(shape.row_stride) * bytes;
    const cuuint64_t matrix = static_cast<cuuint64_t>(shape.batch_stride) * bytes;
    const cuuint64_t strides[2] = {row, shape.batch > 1 ? matrix : row};
    const cuuint32_t box[3] = {static_cast<cuuint32_t>(shape.box_columns),
                               static_cast<cuuint32_t>(shape.box_rows), 1};
    const cuuint32_t steps[3] = {1, 1, 1};
    const CUresult result =
        encode(map, data_type(element_bytes), 3, const_cast<void*>(pointer), sizes, strides, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result == CUDA_SUCCESS) return FP4BF16_OK;
    return fail(
        FP4BF16_INVALID_ARGUMENT,
        "%s: no tensor map for %s (%lld, %lld) with a row stride of %lld bytes at offset %d of 16 (driver "
        "error %d); operands must be 16-byte aligned, strides multiples of 16 bytes",
        function, name, static_cast<long long>(shape.rows), static_cast<long long>(shape.columns),
        static_cast<long long>(row), static_cast<int>(reinterpret_cast<uintptr_t>(pointer) % 16),
        static_cast<int>(result));
}

fp4bf16_status make_picture_map(const char* function, const char* name, const void* pointer,
                                int element_bytes, const PictureShape& shape, CUtensorMap* map) {
    Encode encode = nullptr;
    FP4BF16_TRY(encoder(function, &encode));
    const int64_t extents[4] = {shape.channels, shape.w, shape.h, shape.n};
    cuuint64_t sizes[4], strides[3];
    cuuint32_t box[4], steps[4] = {1, 1, 1, 1};
    // The stride of an axis of one element is never used: it becomes one that the driver takes.
    int64_t spare = ceil_div(shape.channels, 16) * 16;
    for (int i = 0; i < 4; ++i) {
        const bool spatial = i == 1 || i == 2;
        sizes[i] = static_cast<cuuint64_t>(extents[i]);
        steps[i] = spatial ? static_cast<cuuint32_t>(shape.step) : 1;
        box[i] = static_cast<cuuint32_t>(shape.box[i]) * steps[i];
        if (i == 0) continue;
        const int64_t stride = extents[i] > 1 ? shape.strides[3 - i] : spare;
        strides[i - 1] = static_cast<cuuint64_t>(stride * element_bytes);
        spare = stride;
    }
    const auto swizzle =
        shape.box[0] * element_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
    const CUresult result = encode(map, data_type(element_bytes), 4, const_cast<void*>(pointer), sizes,
                                   strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result == CUDA_SUCCESS) return FP4BF16_OK;
    return fail(
        FP4BF16_INVALID_ARGUMENT,
        "%s: no tensor map for %s (%lld, %lld, %lld, %lld) with strides of %lld, %lld and %lld bytes at "
        "offset %d of 16 (driver error %d); pictures must be 16-byte aligned, strides multiples of 16 "
        "bytes",
        function, name, static_cast<long long>(shape.n), static_cast<long long>(shape.h),
        static_cast<long long>(shape.w), static_cast<long long>(shape.channels),
        static_cast<long long>(strides[2]), static_cast<long long>(strides[1]),
        static_cast<long long>(strides[0]), static_cast<int>(reinterpret_cast<uintptr_t>(pointer) % 16),
        static_cast<int>(result));
}

}  // namespace fp4bf16
