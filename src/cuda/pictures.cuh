// Pictures (n, h, w, c) with any strides but that of the channels, and the checks of their arguments.
#pragma once

#include "each.cuh"

namespace fp4bf16 {

template <typename T>
struct Picture {
    T* data;
    int64_t image, row, pixel;  // strides

    Picture(T* data, const int64_t* strides)
        : data(data), image(strides[0]), row(strides[1]), pixel(strides[2]) {}
    __device__ T* at(int64_t i, int64_t y, int64_t x) const { return data + i * image + y * row + x * pixel; }
    bool in_vectors(int64_t n, int64_t h, int64_t w, int64_t c) const {
        constexpr int64_t kSize = sizeof(T);
        return fp4bf16::in_vectors(data, n, c, image, kSize) && fp4bf16::in_vectors(data, h, c, row, kSize) &&
               fp4bf16::in_vectors(data, w, c, pixel, kSize);
    }
};

constexpr int64_t kMostElements = int64_t{1} << 40;

inline fp4bf16_status check_sizes(const char* function, int64_t n, int64_t h, int64_t w, int64_t c) {
    int64_t elements = 1;
    bool fits = true;
    for (const int64_t size : {n, h, w, c}) {
        fits = fits && size >= 0 && size <= kMostElements && (size == 0 || elements <= kMostElements / size);
        if (fits && size > 0) elements *= size;
    }
    if (fits) return FP4BF16_OK;
    return fail(
        FP4BF16_INVALID_ARGUMENT,
        "%s: (n, h, w, c) is (%lld, %lld, %lld, %lld), but each must be at least 0 and the product at "
        "most 2^40",
        function, static_cast<long long>(n), static_cast<long long>(h), static_cast<long long>(w),
        static_cast<long long>(c));
}

inline fp4bf16_status check_picture(const char* function, const char* name, const void* pointer,
                                    const int64_t* strides, int64_t alignment) {
    FP4BF16_TRY(check_pointer(function, name, pointer, alignment));
    if (strides == nullptr)
        return fail(FP4BF16_INVALID_ARGUMENT, "%s: the strides of %s are NULL, but three are needed",
                    function, name);
    for (int axis = 0; axis < 3; ++axis)
        if (strides[axis] < -kMostElements || strides[axis] > kMostElements)
            return fail(FP4BF16_INVALID_ARGUMENT,
                        "%s: stride %d of %s is %lld elements, but -2^40 to 2^40 are taken", function, axis,
                        name, static_cast<long long>(strides[axis]));
    return FP4BF16_OK;
}

}  // namespace fp4bf16
