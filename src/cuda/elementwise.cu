// Nearest-neighbour upsampling and its adjoint, sums, SiLU: kernels that memory bounds.
#include "common.h"
#include "each.cuh"
#include "pictures.cuh"

namespace fp4bf16 {
namespace {

using bf16 = __nv_bfloat16;

// ---- pictures
// Items are groups of kCount channels of an (n, h, w, c) picture.
struct Grid {
    int64_t n, h, w, groups;  // groups a pixel
    struct Place {
        int64_t i, y, x, group;
    };

    __device__ Place place(int64_t item) const {
        const int64_t pixel = quotient(item, groups), line = quotient(pixel, w), image = quotient(line, h);
        return {image, line - image * h, pixel - line * w, item - pixel * groups};
    }
    int64_t items() const { return n * h * w * groups; }
};

// T: what is copied at once, be it one element or many.
template <typename T>
struct Upsample {
    static constexpr int kItems = 4;
    Grid grid;
    Picture<const T> x;
    Picture<T> y;
    const int32_t* run_if;
    struct Loaded {
        T v;
        T* to;
    };

    __device__ Loaded load(int64_t item) const {
        const auto p = grid.place(item);
        return {x.at(p.i, p.y, p.x)[p.group], y.at(p.i, 2 * p.y, 2 * p.x) + p.group};
    }
    __device__ void store(const Loaded& l) const {
        l.to[0] = l.v;
        l.to[y.pixel] = l.v;
        l.to[y.row] = l.v;
        l.to[y.row + y.pixel] = l.v;
    }
};

template <int kCount>
struct UpsampleBackward {
    static constexpr int kItems = kCount == 1 ? 4 : 2;
    using V = Vector<bf16, kCount>;
    Grid grid;
    Picture<const bf16> g, add;  // add.data may be NULL
    Picture<bf16> dx;
    struct Loaded {
        Raw<bf16, kCount> patch[4], add;
        bf16* to;
    };

    __device__ Loaded load(int64_t item) const {
        const auto p = grid.place(item);
        const int64_t channel = p.group * kCount;
        const bf16* from = g.at(p.i, 2 * p.y, 2 * p.x) + channel;
        Loaded l;
        l.to = dx.at(p.i, p.y, p.x) + channel;
#pragma unroll
        for (int k = 0; k < 4; ++k) l.patch[k] = load_raw<kCount>(from + (k / 2) * g.row + (k % 2) * g.pixel);
        if (add.data != nullptr) l.add = load_raw<kCount>(add.at(p.i, p.y, p.x) + channel);
        return l;
    }
    __device__ void store(const Loaded& l) const {
        const V other = unpack<bf16, kCount>(l.add);
        V v, patch[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) patch[k] = unpack<bf16, kCount>(l.patch[k]);
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
            float sum = to_float(patch[0].v[j]);
#pragma unroll
            for (int k = 1; k < 4; ++k) sum += to_float(patch[k].v[j]);
            if (add.data != nullptr) sum += to_float(other.v[j]);
            v.v[j] = from_float<bf16>(sum);
        }
        store_vector<kCount>(l.to, v);
    }
};

// ---- rows
template <int kCount>
struct Add {
    static constexpr int kItems = 4;
    int64_t groups, a_stride, b_stride, out_stride;  // groups a row
    const bf16* a;
    const bf16* b;
    bf16* out;
    struct Loaded {
        Raw<bf16, kCount> a, b;
        bf16* to;
    };

    __device__ Loaded load(int64_t item) const {
        const int64_t row = quotient(item, groups), column = (item - row * groups) * kCount;
        return {load_raw<kCount>(a + row * a_stride + column), load_raw<kCount>(b + row * b_stride + column),
                out + row * out_stride + column};
    }
    __device__ void store(const Loaded& l) const {
        const auto x = unpack<bf16, kCount>(l.a), y = unpack<bf16, kCount>(l.b);
        Vector<bf16, kCount> v;
#pragma unroll
        for (int j = 0; j < kCount; ++j) v.v[j] = from_float<bf16>(to_float(x.v[j]) + to_float(y.v[j]));
        store_vector<kCount>(l.to, v);
    }
};

// ---- SiLU, x sigmoid(x) (Elfwing et al., arXiv:1702.03118), and g times its derivative, s (1 + x (1 - s))
struct Sigmoid {
    float s, rest;  // sigmoid(z), 1 - sigmoid(z)
};

// With t = exp(-|z|) the two are 1 / (1 + t) and t / (1 + t). Both are products, for a difference 1 - s would
// keep the 2^-24 of s's rounding, and z of them stand beside a one in the derivative. Nothing overflows.
// Errors to first order, in units of 2^-23: t has 2 by expf, or 2 + 1.173 |z| by __expf, which BF16 does not
// see; the sum half, its inverse 1, each product half.
template <typename T>
__device__ inline Sigmoid sigmoid(float z) {
    const float t = sizeof(T) == 4 ? expf(-fabsf(z)) : __expf(-fabsf(z));
    float inverse;  // of 1 to 2: a division would look for exponents at the ends of FP32's range
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + t));
    const float small = t * inverse;
    return z < 0.0f ? Sigmoid{small, inverse} : Sigmoid{inverse, small};
}

template <typename T, int kCount, bool kBackward>
struct Silu {
    static constexpr int kItems = kBackward ? 2 : 4;
    const T* g;
    const T* x;
    T* out;
    struct Loaded {
        Raw<T, kCount> g, x;
        int64_t at;
    };

    __device__ Loaded load(int64_t item) const {
        Loaded l;
        l.at = item * kCount;
        l.x = load_raw<kCount>(x + l.at);
        if (kBackward) l.g = load_raw<kCount>(g + l.at);
        return l;
    }
    __device__ void store(const Loaded& l) const {
        const auto from = unpack<T, kCount>(l.x), gradient = unpack<T, kCount>(l.g);
        Vector<T, kCount> v;
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
            const float z = to_float(from.v[j]);
            const auto [s, rest] = sigmoid<T>(z);
            v.v[j] =
                from_float<T>(kBackward ? to_float(gradient.v[j]) * (s * __fmaf_rn(z, rest, 1.0f)) : z * s);
        }
        store_vector<kCount>(out + l.at, v);
    }
};

// ---- launches
// Strides in units of T, which is one element or 16 bytes of `bytes`-byte elements.
template <typename T>
void launch_upsample(const Grid& grid, const void* x, const int64_t* x_strides, void* y,
                     const int64_t* y_strides, int64_t per_unit, const int32_t* run_if, void* stream) {
    int64_t from[3], to[3];
    for (int i = 0; i < 3; ++i) from[i] = x_strides[i] / per_unit, to[i] = y_strides[i] / per_unit;
    const Upsample<T> op{grid, {static_cast<const T*>(x), from}, {static_cast<T*>(y), to}, run_if};
    launch_each(op, grid.items(), stream);
}

template <typename T>
void upsample(int64_t n, int64_t h, int64_t w, int64_t c, const void* x, const int64_t* x_strides, void* y,
              const int64_t* y_strides, const int32_t* run_if, void* stream) {
    const Picture<const T> from(static_cast<const T*>(x), x_strides);
    const Picture<T> to(static_cast<T*>(y), y_strides);
    if (from.in_vectors(n, h, w, c) && to.in_vectors(n, 2 * h, 2 * w, c))
        launch_upsample<uint4>({n, h, w, c / kVector<T>}, x, x_strides, y, y_strides, kVector<T>, run_if,
                               stream);
    else
        launch_upsample<T>({n, h, w, c}, x, x_strides, y, y_strides, 1, run_if, stream);
}

template <typename T, bool kBackward>
void launch_silu(const void* g, const void* x, int64_t count, void* out, void* stream) {
    const auto from = static_cast<const T*>(x), gradient = static_cast<const T*>(g);
    const auto to = static_cast<T*>(out);
    if (count % kVector<T> == 0 && aligned(g, 16) && aligned(x, 16) && aligned(out, 16))
        launch_each(Silu<T, kVector<T>, kBackward>{gradient, from, to}, count / kVector<T>, stream);
    else
        launch_each(Silu<T, 1, kBackward>{gradient, from, to}, count, stream);
}

template <bool kBackward>
void silu(const void* g, const void* x, int64_t count, fp4bf16_dtype dtype, void* out, void* stream) {
    if (dtype == FP4BF16_FLOAT32)
        launch_silu<float, kBackward>(g, x, count, out, stream);
    else
        launch_silu<bf16, kBackward>(g, x, count, out, stream);
}

// ---- checks
fp4bf16_status check_silu(const char* function, const void* x, int64_t count, fp4bf16_dtype dtype,
                          const void* out, const char* out_name) {
    if (dtype != FP4BF16_FLOAT32 && dtype != FP4BF16_BFLOAT16)
        return fail(FP4BF16_INVALID_ARGUMENT,
                    "%s: dtype is %d, but FP4BF16_FLOAT32 (0) or FP4BF16_BFLOAT16 (1) is needed", function,
                    static_cast<int>(dtype));
    FP4BF16_TRY(check_matrix(function, "x", x, 1, count, count, size_of(dtype)));
    return check_matrix(function, out_name, out, 1, count, count, size_of(dtype));
}

}  // namespace
}  // namespace fp4bf16

using namespace fp4bf16;

extern "C" fp4bf16_status fp4bf16_upsample(const void* x, int32_t element_bytes, int64_t n, int64_t h,
                                           int64_t w, int64_t c, const int64_t x_strides[3], void* y,
                                           const int64_t y_strides[3], const int32_t* run_if, void* stream) {
    FP4BF16_TRY(check_run_if("upsample", run_if));
    if (element_bytes != 1 && element_bytes != 2)
        return fail(FP4BF16_INVALID_ARGUMENT, "upsample: element_bytes is %d, but must be 1 or 2",
                    static_cast<int>(element_bytes));
    FP4BF16_TRY(check_sizes("upsample", n, h, w, c));
    if (n == 0 || h == 0 || w == 0 || c == 0) return FP4BF16_OK;
    FP4BF16_TRY(check_picture("upsample", "x", x, x_strides, element_bytes));
    FP4BF16_TRY(check_picture("upsample", "y", y, y_strides, element_bytes));
    if (element_bytes == 1)
        upsample<uint8_t>(n, h, w, c, x, x_strides, y, y_strides, run_if, stream);
    else
        upsample<uint16_t>(n, h, w, c, x, x_strides, y, y_strides, run_if, stream);
    return cuda_result(cudaGetLastError(), "upsample");
}

extern "C" fp4bf16_status fp4bf16_upsample_backward(const void* g, int64_t n, int64_t h, int64_t w, int64_t c,
                                                    const int64_t g_strides[3], const void* add,
                                                    const int64_t add_strides[3], void* dx,
                                                    const int64_t dx_strides[3], void* stream) {
    FP4BF16_TRY(check_sizes("upsample_backward", n, h, w, c));
    if (n == 0 || h == 0 || w == 0 || c == 0) return FP4BF16_OK;
    FP4BF16_TRY(check_picture("upsample_backward", "g", g, g_strides, 2));
    if (add != nullptr) FP4BF16_TRY(check_picture("upsample_backward", "add", add, add_strides, 2));
    FP4BF16_TRY(check_picture("upsample_backward", "dx", dx, dx_strides, 2));
    const Picture<const bf16> from(static_cast<const bf16*>(g), g_strides);
    const Picture<const bf16> other(static_cast<const bf16*>(add), add == nullptr ? dx_strides : add_strides);
    const Picture<bf16> to(static_cast<bf16*>(dx), dx_strides);
    const bool vectors =
        from.in_vectors(n, 2 * h, 2 * w, c) && to.in_vectors(n, h, w, c) && other.in_vectors(n, h, w, c);
    constexpr int kMost = kVector<bf16>;
    if (vectors) {
        const Grid grid{n, h, w, c / kMost};
        launch_each(UpsampleBackward<kMost>{grid, from, other, to}, grid.items(), stream);
    } else {
        const Grid grid{n, h, w, c};
        launch_each(UpsampleBackward<1>{grid, from, other, to}, grid.items(), stream);
    }
    return cuda_result(cudaGetLastError(), "upsample_backward");
}

extern "C" fp4bf16_status fp4bf16_add(const void* a, int64_t a_stride, const void* b, int64_t b_stride,
                                      int64_t rows, int64_t c, void* out, int64_t out_stride, void* stream) {
    FP4BF16_TRY(check_matrix("add", "a", a, rows, c, a_stride, 2));
    FP4BF16_TRY(check_matrix("add", "b", b, rows, c, b_stride, 2));
    FP4BF16_TRY(check_matrix("add", "out", out, rows, c, out_stride, 2));
    if (rows == 0 || c == 0) return FP4BF16_OK;
    if (a_stride == c && b_stride == c && out_stride == c) c *= rows, rows = 1;  // one row starts aligned
    const auto x = static_cast<const bf16*>(a), y = static_cast<const bf16*>(b);
    const auto to = static_cast<bf16*>(out);
    constexpr int kMost = kVector<bf16>;
    if (in_vectors(a, rows, c, a_stride, 2) && in_vectors(b, rows, c, b_stride, 2) &&
        in_vectors(out, rows, c, out_stride, 2)) {
        const int64_t groups = c / kMost;
        launch_each(Add<kMost>{groups, a_stride, b_stride, out_stride, x, y, to}, rows * groups, stream);
    } else {
        launch_each(Add<1>{c, a_stride, b_stride, out_stride, x, y, to}, rows * c, stream);
    }
    return cuda_result(cudaGetLastError(), "add");
}

extern "C" fp4bf16_status fp4bf16_silu(const void* x, int64_t count, fp4bf16_dtype dtype, void* y,
                                       void* stream) {
    FP4BF16_TRY(check_silu("silu", x, count, dtype, y, "y"));
    if (count > 0) silu<false>(nullptr, x, count, dtype, y, stream);
    return cuda_result(cudaGetLastError(), "silu");
}

extern "C" fp4bf16_status fp4bf16_silu_backward(const void* g, const void* x, int64_t count,
                                                fp4bf16_dtype dtype, void* dx, void* stream) {
    FP4BF16_TRY(check_silu("silu_backward", x, count, dtype, dx, "dx"));
    FP4BF16_TRY(check_matrix("silu_backward", "g", g, 1, count, count, size_of(dtype)));
    if (count > 0) silu<true>(g, x, count, dtype, dx, stream);
    return cuda_result(cudaGetLastError(), "silu_backward");
}
