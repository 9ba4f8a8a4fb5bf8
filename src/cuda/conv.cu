// conv2d and its gradients: the checks of every argument and the choice of a kernel.
#include "conv.h"

#include "sm90_conv.h"

namespace fp4bf16 {
namespace {

constexpr int64_t kMostCount =
    (int64_t{1} << 31) - 1024;                   // of pictures and channels: a tile's last is an int
constexpr int64_t kMostSide = int64_t{1} << 28;  // of a picture: 2 * side + kernel is an int
constexpr int64_t kMostKernel = int64_t{1} << 15;
constexpr int64_t kMostSize = int64_t{1}
                              << 40;  // elements, far beyond any memory: no sum of products overflows

constexpr int kMostPhaseTaps = 8;

long long ll(int64_t v) { return v; }

// The dtype of an operand that is there.
fp4bf16_status check_operand_dtype(const char* op, const char* name, fp4bf16_dtype dtype) {
    return check_range(op, name, dtype, FP4BF16_FLOAT32, FP4BF16_FLOAT16);
}

int64_t phase_count(const fp4bf16_conv2d_args& a) { return a.phases != 0 ? 4 : 1; }
int64_t phase_count(const fp4bf16_conv2d_dgrad_args& a) { return a.phases != 0 ? 4 : 1; }
int64_t phase_count(const fp4bf16_conv2d_wgrad_args&) { return 1; }

template <class Args>
fp4bf16_status check_geometry(const char* op, const Args& a) {
    FP4BF16_TRY(check_range(op, "n", a.n, 0, kMostCount));
    FP4BF16_TRY(check_range(op, "h", a.h, 0, kMostSide));
    FP4BF16_TRY(check_range(op, "w", a.w, 0, kMostSide));
    FP4BF16_TRY(check_range(op, "oh", a.oh, 0, kMostSide));
    FP4BF16_TRY(check_range(op, "ow", a.ow, 0, kMostSide));
    FP4BF16_TRY(check_range(op, "o", a.o, 0, kMostCount));
    FP4BF16_TRY(check_range(op, "kh", a.kh, 1, kMostKernel));
    FP4BF16_TRY(check_range(op, "kw", a.kw, 1, kMostKernel));
    FP4BF16_TRY(check_range(op, "stride", a.stride, 1, kMostKernel));
    FP4BF16_TRY(check_range(op, "top", a.top, -kMostKernel, kMostKernel));
    return check_range(op, "left", a.left, -kMostKernel, kMostKernel);
}

// After check_geometry.
template <class Args>
fp4bf16_status check_phases(const char* op, const Args& a) {
    FP4BF16_TRY(check_range(op, "phases", a.phases, 0, 1));
    if (a.phases == 0) return FP4BF16_OK;
    if (a.stride != 1 || a.kh * a.kw > kMostPhaseTaps)
        return fail(
            FP4BF16_INVALID_ARGUMENT,
            "%s: phases is 1 with a kernel of %lld x %lld and stride %lld, but at most %d taps and stride "
            "1 are taken; upsample the pictures, and pass 0",
            op, ll(a.kh), ll(a.kw), ll(a.stride), kMostPhaseTaps);
    if (a.oh % 2 == 0 && a.ow % 2 == 0) return FP4BF16_OK;
    return fail(FP4BF16_INVALID_ARGUMENT,
                "%s: phases is 1 and the result's sides are %lld x %lld, but both must be even; upsample the "
                "pictures, and pass 0",
                op, ll(a.oh), ll(a.ow));
}

// Pictures (n, h, w, c). The stride of an axis of one element is never used: it becomes one that every kernel
// takes.
struct Pictures {
    const char* name;
    const void* pointer;
    int64_t n, h, w, c;
    int64_t* strides;
    int64_t size;  // of an element, bytes

    bool empty() const { return n == 0 || h == 0 || w == 0 || c == 0; }
};

fp4bf16_status check_pictures(const char* op, const Pictures& p) {
    int64_t left = kMostSize;
    for (const int64_t extent : {p.n, p.h, p.w, p.c}) {
        if (p.empty()) return FP4BF16_OK;
        if (extent > left)
            return fail(FP4BF16_INVALID_ARGUMENT,
                        "%s: %s (%lld, %lld, %lld, %lld) has more than 2^40 elements", op, p.name, ll(p.n),
                        ll(p.h), ll(p.w), ll(p.c));
        left /= extent;
    }
    const int64_t extents[3] = {p.n, p.h, p.w};
    int64_t spare = ceil_div(p.c, 16) * 16;
    for (int i = 2; i >= 0; --i) {
        if (extents[i] == 1) p.strides[i] = spare;
        spare = p.strides[i];
        if (spare >= 0 && spare <= kMostSize / extents[i]) continue;
        return fail(FP4BF16_INVALID_ARGUMENT,
                    "%s: %s_strides[%d] is %lld elements, but %lld such steps must be 0 to 2^40", op, p.name,
                    i, ll(spare), ll(extents[i]));
    }
    return check_pointer(op, p.name, p.pointer, p.size);
}

// Two elements of a result in one place would make it depend on the order.
fp4bf16_status check_result(const char* op, const Pictures& p) {
    FP4BF16_TRY(check_pictures(op, p));
    if (p.empty()) return FP4BF16_OK;
    const int64_t extents[3] = {p.n, p.h, p.w};
    bool seen[3] = {};
    int64_t span = p.c;
    for (int turn = 0; turn < 3; ++turn) {  // axes by ascending stride
        int axis = -1;
        for (int i = 2; i >= 0; --i)
            if (!seen[i] && extents[i] > 1 && (axis < 0 || p.strides[i] < p.strides[axis])) axis = i;
        if (axis < 0) break;
        seen[axis] = true;
        if (p.strides[axis] < span)
            return fail(
                FP4BF16_INVALID_ARGUMENT,
                "%s: elements of %s overlap: %s_strides[%d] is %lld elements, but what lies in one step "
                "spans %lld",
                op, p.name, p.name, axis, ll(p.strides[axis]), ll(span));
        span += (extents[axis] - 1) * p.strides[axis];
    }
    return FP4BF16_OK;
}

// `rows` rows of `k` elements.
fp4bf16_status check_rows(const char* op, const char* name, const void* pointer, int64_t rows, int64_t k,
                          int64_t* stride, int64_t size) {
    FP4BF16_TRY(check_matrix(op, name, pointer, rows, k, *stride, size));
    if (rows <= 1) *stride = ceil_div(k, 16) * 16;
    return FP4BF16_OK;
}

fp4bf16_status check_epilogue(const char* op, fp4bf16_conv2d_args* a) {
    FP4BF16_TRY(check_range(op, "image_scale_step", a->image_scale_step, 0, 1));
    FP4BF16_TRY(check_range(op, "col_scale_step", a->col_scale_step, 0, 1));
    FP4BF16_TRY(check_range(op, "activation", a->activation, FP4BF16_NONE, FP4BF16_GELU));
    if (a->image_scale != nullptr) FP4BF16_TRY(check_pointer(op, "image_scale", a->image_scale, 4));
    if (a->col_scale != nullptr) FP4BF16_TRY(check_pointer(op, "col_scale", a->col_scale, 4));
    if (a->bias != nullptr || a->bias2 != nullptr)
        FP4BF16_TRY(check_operand_dtype(op, "bias_dtype", a->bias_dtype));
    if (a->bias != nullptr) FP4BF16_TRY(check_pointer(op, "bias", a->bias, size_of(a->bias_dtype)));
    if (a->bias2 != nullptr) FP4BF16_TRY(check_pointer(op, "bias2", a->bias2, size_of(a->bias_dtype)));
    if (a->image_bias != nullptr) {
        FP4BF16_TRY(check_operand_dtype(op, "image_bias_dtype", a->image_bias_dtype));
        FP4BF16_TRY(check_rows(op, "image_bias", a->image_bias, a->n, a->o, &a->image_bias_stride,
                               size_of(a->image_bias_dtype)));
    }
    if (a->residual == nullptr) return FP4BF16_OK;
    FP4BF16_TRY(check_operand_dtype(op, "residual_dtype", a->residual_dtype));
    return check_pictures(op, {"residual", a->residual, a->n, a->oh, a->ow, a->o, a->residual_strides,
                               size_of(a->residual_dtype)});
}

Pictures x8_of(fp4bf16_conv2d_args* a) { return {"x8", a->x8, a->n, a->h, a->w, a->c8, a->x8_strides, 1}; }
Pictures x16_of(fp4bf16_conv2d_args* a) {
    const bool own = a->x16_on_output == 0;
    return {"x16", a->x16, a->n, own ? a->h : a->oh, own ? a->w : a->ow, a->c16, a->x16_strides, 2};
}
int64_t taps8(const fp4bf16_conv2d_args& a) { return a.kh * a.kw * phase_count(a); }
int64_t taps16(const fp4bf16_conv2d_args& a) { return a.x16_on_output == 0 ? taps8(a) : 1; }

fp4bf16_status check_conv2d(const char* op, fp4bf16_conv2d_args* a) {
    FP4BF16_TRY(check_geometry(op, *a));
    FP4BF16_TRY(check_range(op, "c8", a->c8, 0, kMostCount));
    FP4BF16_TRY(check_range(op, "c16", a->c16, 0, kMostCount));
    FP4BF16_TRY(check_range(op, "x16_on_output", a->x16_on_output, 0, 1));
    FP4BF16_TRY(check_phases(op, *a));
    if (a->phases != 0 && (a->residual != nullptr || a->x16_on_output != 0))
        return fail(
            FP4BF16_INVALID_ARGUMENT,
            "%s: phases is 1 with %s, which lies on the result's own grid; pass 0, or add it afterwards", op,
            a->residual != nullptr ? "a residual" : "x16_on_output = 1");
    FP4BF16_TRY(check_range(op, "accumulate", a->accumulate, FP4BF16_PROMOTED, FP4BF16_FAST));
    FP4BF16_TRY(check_range(op, "config", a->config, 0, INT32_MAX));
    FP4BF16_TRY(check_run_if(op, a->run_if));
    FP4BF16_TRY(check_operand_dtype(op, "d_dtype", a->d_dtype));
    FP4BF16_TRY(check_result(op, {"d", a->d, a->n, a->oh, a->ow, a->o, a->d_strides, size_of(a->d_dtype)}));
    if (a->n == 0 || a->oh == 0 || a->ow == 0 || a->o == 0) return FP4BF16_OK;  // nothing is read or written
    FP4BF16_TRY(check_pictures(op, x8_of(a)));
    FP4BF16_TRY(check_pictures(op, x16_of(a)));
    FP4BF16_TRY(check_rows(op, "w8", a->w8, a->o, taps8(*a) * a->c8, &a->w8_stride, 1));
    FP4BF16_TRY(check_rows(op, "w16", a->w16, a->o, taps16(*a) * a->c16, &a->w16_stride, 2));
    return check_epilogue(op, a);
}

fp4bf16_status check_dgrad(const char* op, fp4bf16_conv2d_dgrad_args* a) {
    FP4BF16_TRY(check_geometry(op, *a));
    FP4BF16_TRY(check_range(op, "c", a->c, 0, kMostCount));
    FP4BF16_TRY(check_range(op, "config", a->config, 0, INT32_MAX));
    FP4BF16_TRY(check_phases(op, *a));
    FP4BF16_TRY(check_operand_dtype(op, "dx_dtype", a->dx_dtype));
    FP4BF16_TRY(check_result(op, {"dx", a->dx, a->n, a->h, a->w, a->c, a->dx_strides, size_of(a->dx_dtype)}));
    if (a->n == 0 || a->h == 0 || a->w == 0 || a->c == 0) return FP4BF16_OK;
    FP4BF16_TRY(check_pictures(op, {"g", a->g, a->n, a->oh, a->ow, a->o, a->g_strides, 2}));
    const int64_t taps = a->kh * a->kw * phase_count(*a);
    FP4BF16_TRY(check_rows(op, "w16", a->w16, a->o, taps * a->c, &a->w16_stride, 2));
    if (a->residual == nullptr) return FP4BF16_OK;
    FP4BF16_TRY(check_operand_dtype(op, "residual_dtype", a->residual_dtype));
    return check_pictures(op, {"residual", a->residual, a->n, a->h, a->w, a->c, a->residual_strides,
                               size_of(a->residual_dtype)});
}

// What the workspace's size depends on.
fp4bf16_status check_wgrad_shape(const char* op, const fp4bf16_conv2d_wgrad_args& a) {
    FP4BF16_TRY(check_geometry(op, a));
    FP4BF16_TRY(check_range(op, "c", a.c, 0, kMostCount));
    FP4BF16_TRY(check_range(op, "accumulate", a.accumulate, 0, 1));
    if (a.o > 0 && a.kh * a.kw * a.c > kMostSize / a.o)
        return fail(FP4BF16_INVALID_ARGUMENT, "%s: dw (%lld, %lld, %lld, %lld) has more than 2^40 elements",
                    op, ll(a.o), ll(a.kh), ll(a.kw), ll(a.c));
    if (a.oh > 0 && a.ow > 0 && a.n > kMostSize / a.oh / a.ow)
        return fail(FP4BF16_INVALID_ARGUMENT, "%s: g (%lld, %lld, %lld, o) has more than 2^40 pixels", op,
                    ll(a.n), ll(a.oh), ll(a.ow));
    return FP4BF16_OK;
}

fp4bf16_status check_wgrad(const char* op, fp4bf16_conv2d_wgrad_args* a) {
    FP4BF16_TRY(check_wgrad_shape(op, *a));
    if (a->o == 0) return FP4BF16_OK;
    FP4BF16_TRY(check_rows(op, "dw", a->dw, a->o, a->kh * a->kw * a->c, &a->dw_stride, 4));
    if (a->db != nullptr) FP4BF16_TRY(check_pointer(op, "db", a->db, 4));
    FP4BF16_TRY(check_pictures(op, {"g", a->g, a->n, a->oh, a->ow, a->o, a->g_strides, 2}));
    return check_pictures(op, {"x", a->x, a->n, a->h, a->w, a->c, a->x_strides, 2});
}

// ---- what TMA on sm_90 asks of an operand: 16-byte addresses and strides
fp4bf16_status check_tma(const char* op, const Pictures& p) {
    FP4BF16_TRY(check_pointer(op, p.name, p.pointer, 16));
    for (int i = 0; i < 3; ++i)
        if (p.strides[i] * p.size % 16 != 0)
            return fail(FP4BF16_INVALID_ARGUMENT,
                        "%s: %s_strides[%d] is %lld bytes, but on sm_90 it must be a multiple of 16; copy %s "
                        "into a padded array",
                        op, p.name, i, ll(p.strides[i] * p.size), p.name);
    return FP4BF16_OK;
}

fp4bf16_status check_tma(const char* op, const char* name, const void* pointer, int64_t stride,
                         int64_t size) {
    FP4BF16_TRY(check_pointer(op, name, pointer, 16));
    if (stride * size % 16 == 0) return FP4BF16_OK;
    return fail(
        FP4BF16_INVALID_ARGUMENT,
        "%s: the row stride of %s is %lld bytes, but on sm_90 it must be a multiple of 16; copy it into "
        "a padded array",
        op, name, ll(stride * size));
}

// Whether the current device is an sm_90; a sentence where it is too old for any kernel.
fp4bf16_status find_hopper(const char* op, bool* hopper) {
    int major = 0, minor = 0;
    FP4BF16_TRY(compute_capability(op, &major, &minor));
    *hopper = major == 9;
    if (major >= 8) return FP4BF16_OK;
    return fail(
        FP4BF16_UNSUPPORTED_ARCH,
        "%s: this GPU has compute capability %d.%d, but 8.0 or later is needed; host arrays run on the "
        "CPU",
        op, major, minor);
}

// Strides above 2, kernels of many taps and paddings beyond them are rare: the simple kernels take them, and
// what has nothing to sum.
template <class Args>
bool usual(const Args& a) {
    const int64_t most = 32;
    return a.stride <= 2 && a.kh * a.kw * phase_count(a) <= most && a.top >= -most && a.top <= most &&
           a.left >= -most && a.left <= most && a.n > 0 && a.h > 0 && a.w > 0 && a.oh > 0 && a.ow > 0 &&
           a.o > 0;
}

bool sm90_takes(const fp4bf16_conv2d_args& a) { return usual(a) && (a.c8 > 0 || a.c16 > 0); }

fp4bf16_status conv2d_on_sm90(const char* op, fp4bf16_conv2d_args* a, cudaStream_t stream) {
    if (a->c8 > 0) {
        FP4BF16_TRY(check_tma(op, x8_of(a)));
        FP4BF16_TRY(check_tma(op, "w8", a->w8, a->w8_stride, 1));
    }
    if (a->c16 > 0) {
        FP4BF16_TRY(check_tma(op, x16_of(a)));
        FP4BF16_TRY(check_tma(op, "w16", a->w16, a->w16_stride, 2));
    }
    if (a->config > 0 && sm90_conv2d_config(*a, a->config)[0] == '\0')
        return fail(FP4BF16_INVALID_ARGUMENT,
                    "%s: there is no configuration %d for these arguments; 0 lets the library choose", op,
                    static_cast<int>(a->config));
    FP4BF16_TRY(sm90_conv2d(*a, stream));
    return a->expanded == nullptr ? FP4BF16_OK : expand_result(op, *a, stream);
}

bool hopper_or_no_device(const char* op) {
    int major = 9, minor = 0;
    return compute_capability(op, &major, &minor) != FP4BF16_OK || major == 9;
}

// Without a device: sm_90's.
int64_t sum_parts_of(const fp4bf16_conv2d_args& a) {
    return hopper_or_no_device("conv2d_sum_parts") && sm90_takes(a) ? sm90_conv2d_sum_parts(a) : 0;
}

// What is made of the result beside it.
fp4bf16_status check_more_results(const char* op, const fp4bf16_conv2d_args& a) {
    if (a.sums != nullptr) {
        FP4BF16_TRY(check_pointer(op, "sums", a.sums, 8));
        if (sum_parts_of(a) == 0)
            return fail(FP4BF16_INVALID_ARGUMENT,
                        "%s: sums is given, but fp4bf16_conv2d_sum_parts is 0 for a result (%lld, %lld, "
                        "%lld, %lld) of this dtype, place and configuration; pass NULL, and group_norm "
                        "computes its statistics itself",
                        op, ll(a.n), ll(a.oh), ll(a.ow), ll(a.o));
    }
    if (a.expanded == nullptr) return FP4BF16_OK;
    FP4BF16_TRY(check_pointer(op, "expanded", a.expanded, 16));
    FP4BF16_TRY(check_range(op, "expanded_exponent", a.expanded_exponent, -119, 120));
    if (a.d_dtype != FP4BF16_BFLOAT16)
        return fail(FP4BF16_INVALID_ARGUMENT,
                    "%s: expanded is the result as it is stored in BF16 (dtype %d), but d_dtype is %d; pass "
                    "a BF16 d, or quantise d",
                    op, static_cast<int>(FP4BF16_BFLOAT16), static_cast<int>(a.d_dtype));
    if (a.o % 16 == 0) return FP4BF16_OK;
    return fail(FP4BF16_INVALID_ARGUMENT,
                "%s: expanded has blocks of 16 channels, but o is %lld; pad the weight with rows of zeros",
                op, ll(a.o));
}

bool wgrad_on_sm90(const fp4bf16_conv2d_wgrad_args& a) { return usual(a) && a.c > 0; }

}  // namespace
}  // namespace fp4bf16

using namespace fp4bf16;

extern "C" fp4bf16_status fp4bf16_conv2d(const fp4bf16_conv2d_args* args, void* stream) {
    FP4BF16_TRY(check_pointer("conv2d", "args", args, alignof(fp4bf16_conv2d_args)));
    fp4bf16_conv2d_args a = *args;
    FP4BF16_TRY(check_conv2d("conv2d", &a));
    if (a.n == 0 || a.oh == 0 || a.ow == 0 || a.o == 0) return FP4BF16_OK;
    FP4BF16_TRY(check_more_results("conv2d", a));
    bool hopper = false;
    FP4BF16_TRY(find_hopper("conv2d", &hopper));
    const auto s = static_cast<cudaStream_t>(stream);
    return hopper && sm90_takes(a) ? conv2d_on_sm90("conv2d", &a, s) : simple_conv2d("conv2d", a, 0, s);
}

extern "C" fp4bf16_status fp4bf16_conv2d_simple(const fp4bf16_conv2d_args* args, void* stream) {
    FP4BF16_TRY(check_pointer("conv2d_simple", "args", args, alignof(fp4bf16_conv2d_args)));
    fp4bf16_conv2d_args a = *args;
    FP4BF16_TRY(check_conv2d("conv2d_simple", &a));
    if (a.n == 0 || a.oh == 0 || a.ow == 0 || a.o == 0) return FP4BF16_OK;
    FP4BF16_TRY(check_more_results("conv2d_simple", a));
    const int64_t parts = a.sums == nullptr ? 0 : sum_parts_of(a);
    return simple_conv2d("conv2d_simple", a, parts, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t fp4bf16_conv2d_sum_parts(const fp4bf16_conv2d_args* args) {
    const char* op = "conv2d_sum_parts";
    if (check_pointer(op, "args", args, alignof(fp4bf16_conv2d_args)) != FP4BF16_OK) return 0;
    const fp4bf16_conv2d_args& a = *args;  // whose arrays need not be there yet
    if (check_geometry(op, a) != FP4BF16_OK || check_range(op, "c8", a.c8, 0, kMostCount) != FP4BF16_OK ||
        check_range(op, "c16", a.c16, 0, kMostCount) != FP4BF16_OK || check_phases(op, a) != FP4BF16_OK)
        return 0;
    return sum_parts_of(a);
}

// Without a device the answer is sm_90's.
extern "C" const char* fp4bf16_conv2d_config(const fp4bf16_conv2d_args* args, int32_t config) {
    if (check_pointer("conv2d_config", "args", args, alignof(fp4bf16_conv2d_args)) != FP4BF16_OK) return "";
    fp4bf16_conv2d_args a = *args;
    if (check_conv2d("conv2d_config", &a) != FP4BF16_OK || config < 0) return "";
    if (!hopper_or_no_device("conv2d_config") || !sm90_takes(a)) return config == 0 ? "simple" : "";
    return sm90_conv2d_config(a, config);
}

extern "C" fp4bf16_status fp4bf16_conv2d_dgrad(const fp4bf16_conv2d_dgrad_args* args, void* stream) {
    const char* op = "conv2d_dgrad";
    FP4BF16_TRY(check_pointer(op, "args", args, alignof(fp4bf16_conv2d_dgrad_args)));
    fp4bf16_conv2d_dgrad_args a = *args;
    FP4BF16_TRY(check_dgrad(op, &a));
    if (a.n == 0 || a.h == 0 || a.w == 0 || a.c == 0) return FP4BF16_OK;
    bool hopper = false;
    FP4BF16_TRY(find_hopper(op, &hopper));
    const auto s = static_cast<cudaStream_t>(stream);
    if (!hopper || !usual(a)) return simple_conv2d_dgrad(op, a, s);
    FP4BF16_TRY(check_tma(op, {"g", a.g, a.n, a.oh, a.ow, a.o, a.g_strides, 2}));
    FP4BF16_TRY(check_tma(op, "w16", a.w16, a.w16_stride, 2));
    return sm90_conv2d_dgrad(a, s);
}

extern "C" fp4bf16_status fp4bf16_conv2d_dgrad_simple(const fp4bf16_conv2d_dgrad_args* args, void* stream) {
    const char* op = "conv2d_dgrad_simple";
    FP4BF16_TRY(check_pointer(op, "args", args, alignof(fp4bf16_conv2d_dgrad_args)));
    fp4bf16_conv2d_dgrad_args a = *args;
    FP4BF16_TRY(check_dgrad(op, &a));
    if (a.n == 0 || a.h == 0 || a.w == 0 || a.c == 0) return FP4BF16_OK;
    return simple_conv2d_dgrad(op, a, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t fp4bf16_conv2d_wgrad_workspace_size(const fp4bf16_conv2d_wgrad_args* args) {
    const char* op = "conv2d_wgrad_workspace_size";
    if (check_pointer(op, "args", args, alignof(fp4bf16_conv2d_wgrad_args)) != FP4BF16_OK) return -1;
    if (check_wgrad_shape(op, *args) != FP4BF16_OK) return -1;
    return hopper_or_no_device(op) && wgrad_on_sm90(*args) ? sm90_conv2d_wgrad_workspace(*args) : 0;
}

extern "C" fp4bf16_status fp4bf16_conv2d_wgrad(const fp4bf16_conv2d_wgrad_args* args, void* stream) {
    const char* op = "conv2d_wgrad";
    FP4BF16_TRY(check_pointer(op, "args", args, alignof(fp4bf16_conv2d_wgrad_args)));
    fp4bf16_conv2d_wgrad_args a = *args;
    FP4BF16_TRY(check_wgrad(op, &a));
    if (a.o == 0) return FP4BF16_OK;
    bool hopper = false;
    FP4BF16_TRY(find_hopper(op, &hopper));
    const auto s = static_cast<cudaStream_t>(stream);
    if (!hopper || !wgrad_on_sm90(a)) return simple_conv2d_wgrad(op, a, s);
    FP4BF16_TRY(check_tma(op, {"g", a.g, a.n, a.oh, a.ow, a.o, a.g_strides, 2}));
    FP4BF16_TRY(check_tma(op, {"x", a.x, a.n, a.h, a.w, a.c, a.x_strides, 2}));
    FP4BF16_TRY(check_pointer(op, "workspace", a.workspace, 16));
    return sm90_conv2d_wgrad(a, s);
}

extern "C" fp4bf16_status fp4bf16_conv2d_wgrad_simple(const fp4bf16_conv2d_wgrad_args* args, void* stream) {
    const char* op = "conv2d_wgrad_simple";
    FP4BF16_TRY(check_pointer(op, "args", args, alignof(fp4bf16_conv2d_wgrad_args)));
    fp4bf16_conv2d_wgrad_args a = *args;
    FP4BF16_TRY(check_wgrad(op, &a));
    if (a.o == 0) return FP4BF16_OK;
    return simple_conv2d_wgrad(op, a, static_cast<cudaStream_t>(stream));
}
