// fp4bf16_quantize and fp4bf16_amax: checks, normal form of the arguments, choice of the kernels.
#include <algorithm>

#include "quantize.cuh"

namespace fp4bf16 {
namespace {

constexpr const char* kName = "quantize";

// The rule, DEFAULT replaced; fails for one that the format or stochastic rounding does not have.
fp4bf16_status check_rule(fp4bf16_quantize_args* a) {
    const bool stochastic = a->rounding == FP4BF16_STOCHASTIC;
    int low = FP4BF16_RULE_DEFAULT, high = FP4BF16_RULE_DEFAULT;
    if (a->format == FP4BF16_NVFP4) {
        if (a->rule == FP4BF16_RULE_DEFAULT) a->rule = FP4BF16_RULE_TE;
        low = FP4BF16_RULE_TE;
        high = stochastic ? FP4BF16_RULE_TE : FP4BF16_RULE_FOUR_OVER_SIX_MAE_448;
    } else if (a->format == FP4BF16_MXFP4) {
        if (a->rule == FP4BF16_RULE_DEFAULT) a->rule = stochastic ? FP4BF16_RULE_RCEIL : FP4BF16_RULE_EVEN;
        low = stochastic ? FP4BF16_RULE_RCEIL : FP4BF16_RULE_EVEN;
        high = FP4BF16_RULE_CEIL;
    }
    if (a->rule >= low && a->rule <= high) return FP4BF16_OK;
    return fail(FP4BF16_INVALID_ARGUMENT,
                "quantize: rule is %d, but format %d with rounding %d takes %d to %d or DEFAULT (0)",
                static_cast<int>(a->rule), static_cast<int>(a->format), static_cast<int>(a->rounding), low,
                high);
}

// Numbers alone, no pointers: what the size of the workspace depends on.
fp4bf16_status check_numbers(fp4bf16_quantize_args* a) {
    FP4BF16_TRY(check_dtype(kName, a->dtype));
    FP4BF16_TRY(check_range(kName, "format", a->format, FP4BF16_NVFP4_EXACT, FP4BF16_FP8));
    FP4BF16_TRY(check_range(kName, "search", a->search, FP4BF16_SEARCH_FULL, FP4BF16_SEARCH_FAST));
    FP4BF16_TRY(check_range(kName, "rounding", a->rounding, FP4BF16_NEAREST, FP4BF16_STOCHASTIC));
    FP4BF16_TRY(check_rule(a));
    const int64_t most = int64_t{1} << 40;
    FP4BF16_TRY(check_range(kName, "after", a->after, 1, most));
    FP4BF16_TRY(check_matrix(kName, "x", a /* x may be NULL here */, a->rows, a->k_size,
                             a->after == 1 && a->k_stride == 1 ? a->x_stride : most, 1));
    FP4BF16_TRY(check_range(kName, "outliers", a->outliers, 0, a->k_size));
    FP4BF16_TRY(check_range(kName, "rank", a->rank, 0, int64_t{1} << 20));
    if (a->rows == 0) return FP4BF16_OK;
    if (a->rows % a->after != 0)
        return fail(FP4BF16_INVALID_ARGUMENT, "quantize: rows is %lld, but must be a multiple of after, %lld",
                    static_cast<long long>(a->rows), static_cast<long long>(a->after));
    FP4BF16_TRY(check_range(kName, "x_stride", a->x_stride, -most, most));
    FP4BF16_TRY(check_range(kName, "k_stride", a->k_stride, -most, most));
    FP4BF16_TRY(check_range(kName, "hidden_stride", a->hidden_stride, 0, most));
    FP4BF16_TRY(check_range(kName, "expanded_stride", a->expanded_stride, 0, most));
    FP4BF16_TRY(check_range(kName, "mid", a->mid, 1, a->rows));
    FP4BF16_TRY(check_range(kName, "inner", a->inner, 1, a->rows));
    return check_groups(kName, a->mid, a->inner);
}

fp4bf16_status check_hidden(const fp4bf16_quantize_args& a) {
    if (a.outliers > 0) FP4BF16_TRY(check_pointer(kName, "outlier_index", a.outlier_index, alignof(int32_t)));
    if (a.rank > 0 && a.k_size > 0) {
        FP4BF16_TRY(check_pointer(kName, "down_t", a.down_t, 2));
        FP4BF16_TRY(check_matrix(kName, "down_t", a.down_t, a.rank, a.k_size, a.down_stride, 2));
    }
    if (a.rank + a.outliers == 0 && a.hidden == nullptr) return FP4BF16_OK;
    FP4BF16_TRY(check_pointer(kName, "hidden", a.hidden, 2));
    if (a.hidden_stride >= a.rank + a.outliers) return FP4BF16_OK;
    return fail(FP4BF16_INVALID_ARGUMENT,
                "quantize: hidden_stride is %lld, less than its %lld columns (rank + outliers)",
                static_cast<long long>(a.hidden_stride), static_cast<long long>(a.rank + a.outliers));
}

template <typename T>
fp4bf16_status check_optional(const char* name, const T* pointer) {
    return pointer == nullptr ? FP4BF16_OK : check_pointer(kName, name, pointer, alignof(T));
}

fp4bf16_status check_results(const fp4bf16_quantize_args& a, int64_t kp) {
    FP4BF16_TRY(check_optional("outer_given", a.outer_given));
    FP4BF16_TRY(check_optional("outer_scale", a.outer_scale));
    FP4BF16_TRY(check_optional("sums", a.sums));
    FP4BF16_TRY(check_optional("counts", a.counts));
    FP4BF16_TRY(check_range(kName, "outer_given_stride", a.outer_given_stride, 0, 1));
    if (a.outer_given != nullptr && a.format == FP4BF16_MXFP4)
        return fail(FP4BF16_INVALID_ARGUMENT,
                    "quantize: outer_given is set, but mxfp4 (2) has no outer scale; pass NULL");
    if (a.packed != nullptr && a.block_scale == nullptr && a.format != FP4BF16_FP8)
        return fail(FP4BF16_INVALID_ARGUMENT, "quantize: block_scale is NULL, but packed needs it");
    if (a.expanded == nullptr) return check_hidden(a);
    if (a.format == FP4BF16_NVFP4 || a.format == FP4BF16_MXFP4)
        return fail(FP4BF16_INVALID_ARGUMENT,
                    "quantize: expanded is set, but E4M3 does not hold every product of format %d; "
                    "nvfp4_exact (0) and fp8 (3) alone expand",
                    static_cast<int>(a.format));
    if (a.expanded_stride < kp)
        return fail(FP4BF16_INVALID_ARGUMENT, "quantize: expanded_stride is %lld, less than its %lld bytes",
                    static_cast<long long>(a.expanded_stride), static_cast<long long>(kp));
    return check_hidden(a);
}

QuantizeJob make_job(const fp4bf16_quantize_args& a) {
    QuantizeJob job{};
    job.a = a;
    if (a.mid == 1) job.a.inner = 1;  // a row each, either way
    job.rule = {a.format, a.rule, a.search == FP4BF16_SEARCH_FULL, a.rounding == FP4BF16_STOCHASTIC};
    job.block = a.format == FP4BF16_MXFP4 ? 32 : 16;
    job.blocks = ceil_div(a.k_size, job.block);
    job.kp = a.format == FP4BF16_FP8 ? a.k_size : job.blocks * job.block;
    job.given = a.outer_given != nullptr;
    job.outer_source = a.outer_given;
    job.outer_step = job.given ? a.outer_given_stride : 1;
    return job;
}

QuantizeJob make_job_with_way(const fp4bf16_quantize_args& a) {
    QuantizeJob job = make_job(a);
    choose_way(&job);
    return job;
}

// Of amaxes, of groups or of their pieces; by numbers alone, whichever kernels run.
int64_t amax_bytes(const QuantizeJob& job) {
    if (job.given || job.rule.format == FP4BF16_MXFP4 || job.a.rows == 0) return 0;
    if (job.a.mid == 1 && !(job.a.after > 1 && job.way == Way::kRows)) return 0;  // the kernel finds it
    const int64_t groups = ceil_div(job.a.rows, job.a.mid * job.a.inner) * job.a.inner;
    return ceil_div(std::max(4 * groups, found_bytes(job)), 16) * 16;
}

// The branch's own kernel makes everything where it takes the arguments.
fp4bf16_status branch_runs(const fp4bf16_quantize_args& a, bool* runs) {
    *runs = false;
    if (a.rank == 0 || a.rows == 0 || !branch_takes(a)) return FP4BF16_OK;
    int major = 0, minor = 0;
    FP4BF16_TRY(compute_capability(kName, &major, &minor));
    *runs = major == 9;
    return FP4BF16_OK;
}

fp4bf16_status run(const fp4bf16_quantize_args& a, cudaStream_t stream) {
    QuantizeJob job = make_job_with_way(a);
    const int64_t bytes = amax_bytes(job), parts = parts_bytes(job);
    if (bytes + parts > 0) FP4BF16_TRY(check_pointer(kName, "workspace", a.workspace, 16));
    if (parts > 0) job.parts = reinterpret_cast<double*>(static_cast<char*>(a.workspace) + bytes);
    if (job.way == Way::kAhead) {
        job.ticket = static_cast<uint32_t*>(a.workspace);
        job.found = job.ticket + 1;
    } else if (bytes > 0 && job.way != Way::kTogether) {
        const auto amax = static_cast<float*>(a.workspace);
        FP4BF16_TRY(quantize_amax(job, amax, stream));
        job.outer_source = amax;
    }
    if (a.rank > 0) FP4BF16_TRY(quantize_hidden(job, stream));
    return job.way == Way::kSimple ? quantize_simple(job, stream) : quantize_fast(job, stream);
}

}  // namespace
}  // namespace fp4bf16

using namespace fp4bf16;

extern "C" int64_t fp4bf16_quantize_workspace_size(const fp4bf16_quantize_args* args) {
    if (args == nullptr) return fail(FP4BF16_INVALID_ARGUMENT, "quantize: args is NULL"), -1;
    fp4bf16_quantize_args a = *args;
    bool branch = false;
    if (check_numbers(&a) != FP4BF16_OK || branch_runs(a, &branch) != FP4BF16_OK) return -1;
    if (branch) return branch_workspace(a);
    const QuantizeJob job = make_job_with_way(a);
    return amax_bytes(job) + parts_bytes(job);
}

extern "C" fp4bf16_status fp4bf16_quantize(const fp4bf16_quantize_args* args, void* stream) {
    if (args == nullptr) return fail(FP4BF16_INVALID_ARGUMENT, "quantize: args is NULL");
    fp4bf16_quantize_args a = *args;
    FP4BF16_TRY(check_numbers(&a));
    if (a.rows == 0) return FP4BF16_OK;
    if (a.k_size > 0) FP4BF16_TRY(check_pointer(kName, "x", a.x, size_of(a.dtype)));
    FP4BF16_TRY(check_results(a, make_job(a).kp));
    const auto s = static_cast<cudaStream_t>(stream);
    bool branch = false;
    FP4BF16_TRY(branch_runs(a, &branch));
    return branch ? quantize_branch(a, s) : run(a, s);
}

extern "C" fp4bf16_status fp4bf16_amax(const void* x, fp4bf16_dtype dtype, int64_t rows, int64_t k,
                                       int64_t x_stride, int64_t rows_per_amax, float* amax, void* stream) {
    FP4BF16_TRY(check_dtype("amax", dtype));
    FP4BF16_TRY(check_matrix("amax", "x", x, rows, k, x_stride, size_of(dtype)));
    FP4BF16_TRY(check_group("amax", "rows_per_amax", rows_per_amax));
    if (rows == 0) return FP4BF16_OK;
    FP4BF16_TRY(check_pointer("amax", "amax", amax, alignof(float)));
    fp4bf16_quantize_args a{};
    a.x = x, a.dtype = dtype, a.rows = rows, a.k_size = k, a.x_stride = x_stride;
    a.after = a.k_stride = a.inner = 1, a.mid = rows_per_amax;
    return quantize_amax(make_job(a), amax, static_cast<cudaStream_t>(stream));
}
