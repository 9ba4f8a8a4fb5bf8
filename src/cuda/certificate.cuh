// The certificate of an FP4 product from norms, in the order of fp4bf16/certify.py; python_ref/certify.py
// derives the formulas. In double; for the host as well, so that it can be tested without a GPU.
#pragma once

#include <cmath>

#include "fp4.cuh"
#include "fp4bf16.h"

namespace fp4bf16 {

constexpr double kUnbounded = HUGE_VAL;

// Sums of squares: of x (not there with norms), of what is multiplied, of the difference; of the result.
struct CertificateSums {
    double full, used, error, result;
};

struct WeightBounds {
    double norm, used, sigma, sigma_used, sigma_error, outer;
};

struct Bounds {
    double bound, accumulation;
};

FP4BF16_HD double bounded(double v) { return isfinite(v) ? v : kUnbounded; }

// Norm of |A|_F and what subnormal E4M3 bytes add: `elements` of them count as 2^-6 times the outer scale.
FP4BF16_HD double with_subnormals(double norm, double outer, double elements) {
    const double added = 0x1p-6 * outer;
    return sqrt(norm * norm + elements * (added * added));
}

// Largest relative error of a rounding, and the absolute one under the normal range; FP32 is not rounded to.
FP4BF16_HD double roundoff(fp4bf16_dtype dtype) {
    return dtype == FP4BF16_BFLOAT16 ? 0x1p-8 : dtype == FP4BF16_FLOAT16 ? 0x1p-11 : 0.0;
}
FP4BF16_HD double subnormal_step(fp4bf16_dtype dtype) {
    return dtype == FP4BF16_BFLOAT16 ? 0x1p-134 : dtype == FP4BF16_FLOAT16 ? 0x1p-25 : 0.0;
}

// size, used, error: |X|, |X^| and |X - X^|, times factor. As certify.certificate for one row of all of it.
FP4BF16_HD Bounds bounds_of(const fp4bf16_certificate_args& a, double size, double used, double error,
                            const WeightBounds& w) {
    const double unit = roundoff(a.output);
    const auto k = static_cast<double>(a.k), columns = static_cast<double>(a.columns),
               elements = static_cast<double>(a.elements);
    double exact = error * w.sigma_used + size * w.sigma_error;
    const double bf16 = size * w.sigma, fp4 = used * w.sigma_used;
    const double rounding = unit * (bf16 + fp4) + 2 * subnormal_step(a.output) * sqrt(elements);
    double accumulation = k * (0x1p-22 * (size * w.norm + used * w.used) + 0x1p-147 * sqrt(elements));
    if (a.gain > 0.0f) {
        const double outer = a.outer_scale != nullptr ? *a.outer_scale : 0.0;
        const double rows = columns > 0 ? elements / columns : 0.0;
        accumulation += a.gain * with_subnormals(used, outer, rows * k) *
                        with_subnormals(w.used, w.outer, k * columns);
    }
    accumulation *= 1 + unit;
    // Neither an operand nor a sum nor a result may overflow. No comparison holds of NaN.
    const double largest = fmax(bf16 + exact, fp4), parts = size * w.norm + exact;
    const bool in_range = parts < 0x1p127 && largest < 0x1p127 && size < 0x1p127 && w.norm < 0x1p127 &&
                          (a.output != FP4BF16_FLOAT16 || largest < 65504);
    if (!in_range) exact = kUnbounded;
    return {bounded(a.slope * exact + rounding), bounded(a.slope * accumulation)};
}

// Over what another order of the sums may come to.
FP4BF16_HD float rounded_up(double v) {
    const double over = v * (1 + 0x1p-30);
    const auto near = static_cast<float>(over);
    return near < over ? nextafterf(near, HUGE_VALF) : near;
}

// Everything but the sums themselves.
FP4BF16_HD void finish_certificate(const fp4bf16_certificate_args& a, const CertificateSums& s) {
    const double used = sqrt(s.used), error = sqrt(s.error), factor = a.factor;
    const double full = a.norms != nullptr ? used + error : sqrt(s.full);
    const WeightBounds w = {a.weight[0], a.weight[1], a.weight[2], a.weight[3], a.weight[4], a.weight[5]};
    const Bounds b = bounds_of(a, factor * full, factor * used, factor * error, w);
    const double result = sqrt(s.result);
    double ratio = result > 0.0 && result < kUnbounded ? (b.bound + b.accumulation) / result : kUnbounded;
    if (isnan(result)) ratio = result;
    const float of_result = rounded_up(ratio);
    a.out[0] = rounded_up(b.bound), a.out[1] = rounded_up(b.accumulation);
    a.out[2] = of_result, a.out[3] = rounded_up(result);
    const bool over = a.threshold >= 0.0f && !(of_result <= a.threshold);
    if (a.flag != nullptr) *a.flag = over ? 1 : 0;
    if (a.counts != nullptr) a.counts[0] += 1, a.counts[1] += over ? 1 : 0;
}

}  // namespace fp4bf16
