// attention: the checks of every argument, the choice of a kernel, and the launch of the simple ones.
#include <algorithm>
#include <cmath>

#include "attention_simple.cuh"
#include "attention_small.cuh"

namespace fp4bf16 {
namespace {

constexpr int64_t kMostTokens = (int64_t{1} << 31) - 1024, kMostStride = int64_t{1} << 40, kMostDim = 512;

long long ll(int64_t v) { return v; }

fp4bf16_status check_sizes(const char* op, const fp4bf16_attention_args& a) {
    FP4BF16_TRY(check_range(op, "n", a.n, 0, kMostTokens));
    FP4BF16_TRY(check_range(op, "heads", a.heads, 0, kMostTokens));
    FP4BF16_TRY(check_range(op, "q_tokens", a.q_tokens, 0, kMostTokens));
    FP4BF16_TRY(check_range(op, "k_tokens", a.k_tokens, 0, kMostTokens));
    FP4BF16_TRY(check_range(op, "dim", a.dim, 1, kMostDim));
    FP4BF16_TRY(check_range(op, "causal", a.causal, 0, 1));
    if (!std::isfinite(a.scale))
        return fail(FP4BF16_INVALID_ARGUMENT, "%s: scale is %g, but must be a finite number", op,
                    static_cast<double>(a.scale));
    const int64_t most = kMostStride / std::max<int64_t>(1, std::max(a.q_tokens, a.k_tokens));
    if (a.n > 0 && a.heads > most / a.n)
        return fail(FP4BF16_INVALID_ARGUMENT,
                    "%s: n is %lld, heads %lld, q_tokens %lld and k_tokens %lld, but n * heads * tokens must "
                    "be at most 2^40",
                    op, ll(a.n), ll(a.heads), ll(a.q_tokens), ll(a.k_tokens));
    return FP4BF16_OK;
}

// One array (n, tokens, heads, dim). Of what is written no two elements may lie in one place, or the result
// would depend on the order: each axis must step over all that the axes of smaller strides span.
fp4bf16_status check_array(const char* op, const char* name, const void* pointer,
                           const fp4bf16_attention_args& a, int64_t tokens, const int64_t (&strides)[3],
                           bool written) {
    if (a.n == 0 || a.heads == 0 || tokens == 0) return FP4BF16_OK;
    FP4BF16_TRY(check_pointer(op, name, pointer, 2));
    struct Axis {
        int64_t stride, count;
    } axes[3] = {{strides[0], a.n}, {strides[1], tokens}, {strides[2], a.heads}};
    for (const Axis& axis : axes)
        if (axis.count > 1 && (axis.stride > kMostStride || axis.stride < -kMostStride))
            return fail(FP4BF16_INVALID_ARGUMENT, "%s: a stride of %s is %lld, but must be -2^40 to 2^40", op,
                        name, ll(axis.stride));
    if (!written) return FP4BF16_OK;
    for (Axis& axis : axes) axis.stride = axis.count > 1 ? std::abs(axis.stride) : 0;
    std::sort(axes, axes + 3, [](const Axis& x, const Axis& y) { return x.stride < y.stride; });
    int64_t span = a.dim;
    for (const Axis& axis : axes) {
        if (axis.count == 1) continue;
        if (axis.stride < span)
            return fail(FP4BF16_INVALID_ARGUMENT,
                        "%s: %s overlaps itself: its strides are %lld, %lld and %lld elements, but one of "
                        "them steps over %lld",
                        op, name, ll(strides[0]), ll(strides[1]), ll(strides[2]), ll(span));
        span += (axis.count - 1) * axis.stride;
    }
    return FP4BF16_OK;
}

fp4bf16_status check_forward(const char* op, const fp4bf16_attention_args& a, bool backward) {
    FP4BF16_TRY(check_sizes(op, a));
    FP4BF16_TRY(check_array(op, "q", a.q, a, a.q_tokens, a.q_strides, false));
    FP4BF16_TRY(check_array(op, "k", a.k, a, a.k_tokens, a.k_strides, false));
    FP4BF16_TRY(check_array(op, "v", a.v, a, a.k_tokens, a.v_strides, false));
    FP4BF16_TRY(check_array(op, "out", a.out, a, a.q_tokens, a.out_strides, !backward));
    const bool rows = a.n > 0 && a.heads > 0 && a.q_tokens > 0;
    return (backward && rows) || a.lse != nullptr ? check_pointer(op, "lse", a.lse, 4) : FP4BF16_OK;
}

fp4bf16_status check_backward(const char* op, const fp4bf16_attention_args& a) {
    FP4BF16_TRY(check_forward(op, a, true));
    FP4BF16_TRY(check_array(op, "g", a.g, a, a.q_tokens, a.g_strides, false));
    FP4BF16_TRY(check_array(op, "dq", a.dq, a, a.q_tokens, a.dq_strides, true));
    FP4BF16_TRY(check_array(op, "dk", a.dk, a, a.k_tokens, a.dk_strides, true));
    return check_array(op, "dv", a.dv, a, a.k_tokens, a.dv_strides, true);
}

// The major number of the compute capability, 8 at least.
fp4bf16_status check_device(const char* op, int* major) {
    int minor = 0;
    FP4BF16_TRY(compute_capability(op, major, &minor));
    if (*major >= 8) return FP4BF16_OK;
    return fail(FP4BF16_UNSUPPORTED_ARCH,
                "%s: this GPU has compute capability %d.%d, but 8.0 or later is needed; host arrays run on "
                "the CPU",
                op, *major, minor);
}

// ---- the simple kernels
unsigned tiles_of(const fp4bf16_attention_args& a, int64_t tokens) {
    return static_cast<unsigned>(std::min(kMostTokens, ceil_div(tokens, kRows) * a.n * a.heads));
}

template <int kColumns>
void launch_forward(const fp4bf16_attention_args& a, cudaStream_t stream) {
    launch_kernel(attention_simple_kernel<kColumns>, tiles_of(a, a.q_tokens), kThreads, 0, stream, a);
}

template <int kColumns>
void launch_backward(const fp4bf16_attention_args& a, cudaStream_t stream) {
    const auto delta = static_cast<float*>(a.workspace);
    if (a.q_tokens > 0) {
        const unsigned grid = tiles_of(a, a.q_tokens);
        launch_kernel(attention_delta_kernel, grid, kThreads, 0, stream, a, delta);
        launch_kernel(attention_gradient_kernel<Gradient::kQ, kColumns>, grid, kThreads, 0, stream, a, delta);
    }
    if (a.k_tokens > 0) {
        const unsigned grid = tiles_of(a, a.k_tokens);
        launch_kernel(attention_gradient_kernel<Gradient::kK, kColumns>, grid, kThreads, 0, stream, a, delta);
        launch_kernel(attention_gradient_kernel<Gradient::kV, kColumns>, grid, kThreads, 0, stream, a, delta);
    }
}

fp4bf16_status forward_simple(const char* op, const fp4bf16_attention_args& a, cudaStream_t stream) {
    const auto launch = a.dim <= 128   ? launch_forward<4>
                        : a.dim <= 256 ? launch_forward<8>
                                       : launch_forward<16>;
    launch(a, stream);
    return cuda_result(cudaGetLastError(), op);
}

fp4bf16_status backward_simple(const char* op, const fp4bf16_attention_args& a, cudaStream_t stream) {
    const auto launch = a.dim <= 128   ? launch_backward<4>
                        : a.dim <= 256 ? launch_backward<8>
                                       : launch_backward<16>;
    launch(a, stream);
    return cuda_result(cudaGetLastError(), op);
}

// ---- heads of few tokens
template <class Kernel>
fp4bf16_status launch_small(const char* op, Kernel kernel, const fp4bf16_attention_args& a,
                            cudaStream_t stream) {
    const auto grid = static_cast<unsigned>(std::min(kMostTokens, a.n * a.heads));
    launch_kernel(kernel, grid, static_cast<unsigned>(32 * ceil_div(a.dim, kSmallChannels)), 0, stream, a);
    return cuda_result(cudaGetLastError(), op);
}

int64_t workspace_bytes(const fp4bf16_attention_args& a) {
    const int64_t delta = ceil_div(4 * a.n * a.heads * a.q_tokens, 16) * 16;
    return std::max(delta, sm90_attention_backward_workspace(a));
}

}  // namespace
}  // namespace fp4bf16

using namespace fp4bf16;

extern "C" fp4bf16_status fp4bf16_attention(const fp4bf16_attention_args* args, void* stream) {
    const char* op = "attention";
    FP4BF16_TRY(check_pointer(op, "args", args, alignof(fp4bf16_attention_args)));
    FP4BF16_TRY(check_forward(op, *args, false));
    if (args->n == 0 || args->heads == 0 || args->q_tokens == 0) return FP4BF16_OK;
    int major = 0;
    FP4BF16_TRY(check_device(op, &major));
    const auto s = static_cast<cudaStream_t>(stream);
    return major == 9 && sm90_attention_takes(*args) ? sm90_attention(*args, s)
                                                     : forward_simple(op, *args, s);
}

extern "C" int64_t fp4bf16_attention_backward_workspace_size(const fp4bf16_attention_args* args) {
    const char* op = "attention_backward_workspace_size";
    if (check_pointer(op, "args", args, alignof(fp4bf16_attention_args)) != FP4BF16_OK) return -1;
    return check_sizes(op, *args) == FP4BF16_OK ? workspace_bytes(*args) : -1;
}

extern "C" fp4bf16_status fp4bf16_attention_backward(const fp4bf16_attention_args* args, void* stream) {
    const char* op = "attention_backward";
    FP4BF16_TRY(check_pointer(op, "args", args, alignof(fp4bf16_attention_args)));
    FP4BF16_TRY(check_backward(op, *args));
    if (args->n == 0 || args->heads == 0) return FP4BF16_OK;
    if (workspace_bytes(*args) > 0) FP4BF16_TRY(check_pointer(op, "workspace", args->workspace, 16));
    int major = 0;
    FP4BF16_TRY(check_device(op, &major));
    const auto s = static_cast<cudaStream_t>(stream);
    if (small_gradient_takes(*args)) return launch_small(op, attention_small_gradient_kernel, *args, s);
    return major == 9 && sm90_attention_backward_takes(*args) ? sm90_attention_backward(*args, s)
                                                              : backward_simple(op, *args, s);
}
