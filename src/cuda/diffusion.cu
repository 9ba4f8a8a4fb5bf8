// Diffusion: noise, noisy pictures and their targets, one step of a sampler. The order of operations is that
// of fp4bf16/diffusion on the CPU, nothing is contracted (--fmad=false), and so the bits are the same.
#include <limits>

#include "common.h"
#include "each.cuh"
#include "philox.cuh"

namespace fp4bf16 {
namespace {

// ---- standard normals: Box-Muller in double, as fp4bf16/python_ref/random.py explains it
constexpr double kSqrt2 = 1.4142135623730951;
constexpr double kLn2High = 2977044471.0 / 4294967296.0, kLn2Low = 1.9082149292705877e-10;
constexpr int kLogTerms = 9, kSinTerms = 8, kCosTerms = 9;
__constant__ const double log_terms[kLogTerms] = {2.0 / 3,  2.0 / 5,  2.0 / 7,  2.0 / 9, 2.0 / 11,
                                                  2.0 / 13, 2.0 / 15, 2.0 / 17, 2.0 / 19};
__constant__ const double sin_terms[kSinTerms] = {
    3.141592653589793,   -5.16771278004997,      2.5501640398773455,     -0.5992645293207921,
    0.08214588661112823, -0.0073704309457143504, 0.00046630280576761255, -2.1915353447830217e-05};
__constant__ const double cos_terms[kCosTerms] = {
    1.0,
    -4.934802200544679,
    4.0587121264167685,
    -1.3352627688545895,
    0.2353306303588932,
    -0.02580689139001406,
    0.0019295743094039231,
    -0.0001046381049248457,
    4.303069587032947e-06,
};

template <int kTerms>
__device__ inline double polynomial(const double (&terms)[kTerms], double z) {
    double sum = terms[kTerms - 1];
#pragma unroll
    for (int i = kTerms - 2; i >= 0; --i) sum = sum * z + terms[i];
    return sum;
}

// (w + 1/2) 2^-32
__device__ inline double unit(uint32_t word) { return (static_cast<double>(word) + 0.5) * 0x1p-32; }

// ln u of a normal u in (0, 1]: u = m 2^e, ln m = 2 atanh((m - 1) / (m + 1))
__device__ inline double log_unit(double u) {
    const int64_t bits = __double_as_longlong(u);
    double e = static_cast<double>(static_cast<int>(bits >> 52) - 1023);
    double m = __longlong_as_double((bits & 0xFFFFFFFFFFFFF) | int64_t{1023} << 52);
    if (m > kSqrt2) m = m * 0.5, e = e + 1.0;
    const double s = (m - 1.0) / (m + 1.0), z = s * s;
    return e * kLn2High + (2.0 * s + (s * (z * polynomial(log_terms, z)) + e * kLn2Low));
}

// sin and cos of pi x, x in [0, 2)
__device__ inline void sincos_pi(double x, double* sine, double* cosine) {
    const int q = static_cast<int>(2.0 * x + 0.5);
    const double r = x - 0.5 * static_cast<double>(q), z = r * r;  // r in [-1/4, 1/4], exact
    const double s = polynomial(sin_terms, z) * r, c = polynomial(cos_terms, z);
    const double a = q & 1 ? c : s, b = q & 1 ? s : c;
    *sine = q & 2 ? -a : a;
    *cosine = (q + 1) & 2 ? -b : b;
}

// An item is one Philox block: four words, two pairs of normals.
struct Normal {
    static constexpr int kItems = 1;
    const uint64_t* seeds;
    const uint32_t* step;
    int64_t count, blocks;  // of a row
    uint32_t stream_word;
    bool vectors;
    float* out;
    struct Loaded {
        uint64_t seed;
        int64_t row, block;
        uint32_t step;
    };

    __device__ Loaded load(int64_t item) const {
        const int64_t row = quotient(item, blocks);
        return {seeds[row], row, item - row * blocks, *step};
    }
    __device__ void store(const Loaded& l) const {
        Philox random(l.seed, stream_word, l.step);
        Vector<float, 4> v;
#pragma unroll
        for (int pair = 0; pair < 4; pair += 2) {
            const uint64_t element = 4 * static_cast<uint64_t>(l.block) + pair;
            const double radius = sqrt(-2.0 * log_unit(unit(random.word(element))));
            double sine, cosine;
            sincos_pi(2.0 * unit(random.word(element + 1)), &sine, &cosine);
            v.v[pair] = static_cast<float>(radius * cosine);
            v.v[pair + 1] = static_cast<float>(radius * sine);
        }
        float* to = out + l.row * count + 4 * l.block;
        if (vectors) {
            store_vector<4>(to, v);
            return;
        }
        for (int j = 0; j < 4; ++j)
            if (4 * l.block + j < count) to[j] = v.v[j];
    }
};

// ---- noisy pictures: DDPM (Ho et al. 2020), eq. 4; v of progressive distillation (Salimans and Ho 2022)
template <int kCount>
struct AddNoise {
    static constexpr int kItems = 2;
    const float* pictures;
    int64_t picture_count;
    const int64_t* index;
    const float* eps;
    const int64_t* t;
    const double* alpha_bar;
    int64_t steps, groups;  // groups a row
    fp4bf16_prediction prediction;
    float* x_t;
    float* target;
    struct Loaded {
        Raw<float, kCount> x0, eps;
        float alpha, sigma;
        int64_t at;
    };

    __device__ Loaded load(int64_t item) const {
        const int64_t row = quotient(item, groups), from = index == nullptr ? row : index[row], time = t[row];
        Loaded l{{}, load_raw<kCount>(eps + item * kCount), nanf(""), nanf(""), item * kCount};
        if (from < 0 || from >= picture_count || time < 0 || time >= steps) return l;
        l.x0 = load_raw<kCount>(pictures + (from * groups + item - row * groups) * kCount);
        const double kept = alpha_bar[time];
        l.alpha = static_cast<float>(sqrt(kept));
        l.sigma = static_cast<float>(sqrt(1.0 - kept));
        return l;
    }
    __device__ void store(const Loaded& l) const {
        const auto x0 = unpack<float, kCount>(l.x0), e = unpack<float, kCount>(l.eps);
        Vector<float, kCount> noisy, wanted;
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
            noisy.v[j] = l.alpha * x0.v[j] + l.sigma * e.v[j];
            wanted.v[j] = prediction == FP4BF16_V     ? l.alpha * e.v[j] - l.sigma * x0.v[j]
                          : isnan(l.alpha)            ? l.alpha
                          : prediction == FP4BF16_EPS ? e.v[j]
                                                      : x0.v[j];
        }
        if (x_t != nullptr) store_vector<kCount>(x_t + l.at, noisy);
        if (target != nullptr) store_vector<kCount>(target + l.at, wanted);
    }
};

// ---- a step of DDIM (Song et al. 2021, eq. 12) or of ancestral sampling (DDPM, eq. 6 and 7)
template <int kCount>
struct SamplerStep {
    static constexpr int kItems = 2;
    const float* output;
    const float* noise;
    const float* coefficients;
    fp4bf16_prediction prediction;
    float* x;
    struct Loaded {
        Raw<float, kCount> output, noise, x;
        int64_t at;
    };

    __device__ Loaded load(int64_t item) const {
        Loaded l{
            load_raw<kCount>(output + item * kCount), {}, load_raw<kCount>(x + item * kCount), item * kCount};
        if (noise != nullptr) l.noise = load_raw<kCount>(noise + l.at);
        return l;
    }
    // (x0, eps) that the network means, x0 clipped.
    __device__ void meaning(float out, float xt, float* x0, float* eps) const {
        const float alpha = coefficients[0], sigma = coefficients[1], clip = coefficients[6];
        if (prediction == FP4BF16_V) {
            *x0 = alpha * xt - sigma * out;
            *eps = sigma * xt + alpha * out;
        } else if (prediction == FP4BF16_EPS) {
            *x0 = (xt - sigma * out) / alpha;
            *eps = out;
        } else {
            *x0 = out;
        }
        if (clip != 0.0f) *x0 = *x0 < -clip ? -clip : *x0 > clip ? clip : *x0;  // NaN stays
        if (clip != 0.0f || prediction == FP4BF16_X0) *eps = (xt - alpha * *x0) / sigma;
    }
    __device__ void store(const Loaded& l) const {
        const float a = coefficients[2], b = coefficients[3], c = coefficients[4], d = coefficients[5];
        const auto out = unpack<float, kCount>(l.output), xt = unpack<float, kCount>(l.x);
        const auto z = unpack<float, kCount>(l.noise);
        Vector<float, kCount> v;
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
            float x0, eps;
            meaning(out.v[j], xt.v[j], &x0, &eps);
            float sum = a * x0;
            if (b != 0.0f || c == 0.0f) sum += b * eps;
            if (c != 0.0f) sum += c * xt.v[j];
            if (d != 0.0f) sum += d * (noise == nullptr ? nanf("") : z.v[j]);
            v.v[j] = sum;
        }
        store_vector<kCount>(x + l.at, v);
    }
};

fp4bf16_status check_prediction(const char* function, fp4bf16_prediction prediction) {
    if (prediction == FP4BF16_EPS || prediction == FP4BF16_V || prediction == FP4BF16_X0) return FP4BF16_OK;
    return fail(FP4BF16_INVALID_ARGUMENT,
                "%s: prediction is %d, but FP4BF16_EPS (0), FP4BF16_V (1) or FP4BF16_X0 (2) is needed",
                function, static_cast<int>(prediction));
}

bool all_aligned(const void* a, const void* b, const void* c, const void* d) {
    return aligned(a, 16) && aligned(b, 16) && aligned(c, 16) && aligned(d, 16);
}

}  // namespace
}  // namespace fp4bf16

using namespace fp4bf16;

extern "C" fp4bf16_status fp4bf16_normal(const uint64_t* seeds, int64_t n, int64_t count,
                                         uint32_t stream_word, const uint32_t* step, float* out,
                                         void* stream) {
    FP4BF16_TRY(check_matrix("normal", "out", out, n, count, count, 4));
    if (n == 0 || count == 0) return FP4BF16_OK;
    FP4BF16_TRY(check_pointer("normal", "seeds", seeds, 8));
    FP4BF16_TRY(check_pointer("normal", "step", step, 4));
    const int64_t blocks = ceil_div(count, 4);
    const bool vectors = count % 4 == 0 && aligned(out, 16);
    launch_each(Normal{seeds, step, count, blocks, stream_word, vectors, out}, n * blocks, stream);
    return cuda_result(cudaGetLastError(), "normal");
}

extern "C" fp4bf16_status fp4bf16_add_noise(const float* pictures, int64_t picture_count,
                                            const int64_t* index, const float* eps, const int64_t* t,
                                            const double* alpha_bar, int64_t steps, int64_t n, int64_t count,
                                            fp4bf16_prediction prediction, float* x_t, float* target,
                                            void* stream) {
    FP4BF16_TRY(check_prediction("add_noise", prediction));
    FP4BF16_TRY(check_matrix("add_noise", "eps", eps, n, count, count, 4));
    FP4BF16_TRY(check_matrix("add_noise", "pictures", pictures, picture_count, count, count, 4));
    FP4BF16_TRY(check_matrix("add_noise", "alpha_bar", alpha_bar, 1, steps, steps, 8));
    if (n == 0 || count == 0 || (x_t == nullptr && target == nullptr)) return FP4BF16_OK;
    FP4BF16_TRY(check_pointer("add_noise", "t", t, 8));
    if (index != nullptr) FP4BF16_TRY(check_pointer("add_noise", "index", index, 8));
    if (x_t != nullptr) FP4BF16_TRY(check_pointer("add_noise", "x_t", x_t, 4));
    if (target != nullptr) FP4BF16_TRY(check_pointer("add_noise", "target", target, 4));
    if (count % 4 == 0 && all_aligned(pictures, eps, x_t, target))
        launch_each(AddNoise<4>{pictures, picture_count, index, eps, t, alpha_bar, steps, count / 4,
                                prediction, x_t, target},
                    n * (count / 4), stream);
    else
        launch_each(AddNoise<1>{pictures, picture_count, index, eps, t, alpha_bar, steps, count, prediction,
                                x_t, target},
                    n * count, stream);
    return cuda_result(cudaGetLastError(), "add_noise");
}

extern "C" fp4bf16_status fp4bf16_sampler_step(const float* output, const float* noise,
                                               const float* coefficients, fp4bf16_prediction prediction,
                                               int64_t count, float* x, void* stream) {
    FP4BF16_TRY(check_prediction("sampler_step", prediction));
    FP4BF16_TRY(check_matrix("sampler_step", "output", output, 1, count, count, 4));
    FP4BF16_TRY(check_matrix("sampler_step", "x", x, 1, count, count, 4));
    if (count == 0) return FP4BF16_OK;
    FP4BF16_TRY(check_pointer("sampler_step", "coefficients", coefficients, 4));
    if (noise != nullptr) FP4BF16_TRY(check_pointer("sampler_step", "noise", noise, 4));
    if (count % 4 == 0 && all_aligned(output, noise, x, nullptr))
        launch_each(SamplerStep<4>{output, noise, coefficients, prediction, x}, count / 4, stream);
    else
        launch_each(SamplerStep<1>{output, noise, coefficients, prediction, x}, count, stream);
    return cuda_result(cudaGetLastError(), "sampler_step");
}
