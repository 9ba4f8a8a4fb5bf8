"""The distance between the FP4 and the BF16 result of a product: a bound from norms, an estimate by a sketch.

With X' the operand that the FP4 track multiplies and dX = X - X', likewise W' and dW,

    X W - X' W' = dX W' + X dW,   so   |X W - X' W'|_F <= |dX|_F sigma(W') + |X|_F sigma(dW),

sigma being the largest singular value. Every number that stands for a sigma here is an *upper* bound: power
iteration would give a lower one and prove nothing.
"""

from __future__ import annotations

import math
from functools import partial

import ml_dtypes
import numpy as np

from .accumulator import FP8

#: Largest relative error of one rounding to a dtype, and the largest absolute one under its normal range.
UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}
SUBNORMAL_STEP = {"bfloat16": 2.0**-134, "float16": 2.0**-25, "float32": 2.0**-150, "float64": 2.0**-1075}
#: |f(x) - f(y)| <= L |x - y|: the largest slope of each activation, rounded up.
LIPSCHITZ = {None: 1.0, "silu": 1.0999, "gelu": 1.1290}
#: Error of an FP32 sum of K products over the norms of its factors, per K: gamma_K is about K 2^-24 in any
#: order of summation (Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1), taken four
#: times. The BF16 tensor cores' sums, which cut toward zero, are covered as well: see `accumulation_bound`.
FP32_ACCUMULATION = 2.0**-22
#: Elements of K that the FP8 tensor cores add before their sum goes to an FP32 register.
PROMOTION = 128


def spectral_norm_upper(w, squarings=5, multiply=np.matmul):
    """An upper bound of the largest singular value of `w` (m, n), over it by under 1 % on ordinary matrices.

    For G = W^T W and q = 2^squarings, sigma^(2 q) = |G^q|_2 <= |G^q|_F. G is scaled by tau = |G|_F first; the
    factor 1 + 2^-20 covers the FP64 rounding of what is done here, by whatever function `multiply` is.
    """
    w = np.asarray(w, np.float64)
    if w.size == 0 or not np.any(w):
        return 0.0
    if not np.all(np.isfinite(w)):
        return math.inf
    scale = float(np.abs(w).max())
    w = w / scale  # so that squares neither overflow nor vanish
    gram = multiply(w, w.T) if w.shape[0] <= w.shape[1] else multiply(w.T, w)
    return scale * math.sqrt(radius_upper(gram, squarings, multiply)) * (1 + 2.0**-20)


def radius_upper(gram, squarings=5, multiply=np.matmul):
    """An upper bound of the largest |eigenvalue| of a symmetric matrix, not all zero: |G^q|_F^(1/q)."""
    tau = math.sqrt(float(np.einsum("ij,ij->", gram, gram)))
    power = gram / tau
    for _ in range(squarings):
        power = multiply(power, power)
    return tau * math.sqrt(float(np.einsum("ij,ij->", power, power))) ** (0.5**squarings)


def float32_gram_slack(m, k, trace):
    """|G - W W^T|_2 where G (m, m) of trace `trace` was summed in float32 over `k` products in any order.

    Each element errs by at most gamma_k (|W| |W|^T), gamma_k = k 2^-24 / (1 - k 2^-24) (Higham, section 3.1),
    and by 2^-149 for each product that underflows, which makes m k 2^-149 in the norm. ||W| |W|^T|_F is at
    most |W|_F^2, and that at most (trace + m k 2^-149) / (1 - gamma_k), gamma_k / (1 - gamma_k) being
    u / (1 - 2 u) for u = k 2^-24. Against |G|_2, of which |W|_F^2 is at most min(m, k) times, this is under
    0.2 % of sigma up to 64 x 576 and under 2 % up to 256 x 2304.
    """
    u = k * 2.0**-24
    return u / (1 - 2 * u) * trace * (1 + 2.0**-40) + m * k * 2.0**-148 if u < 0.25 else math.inf


def exact_bound(x_norm, dx_norm, sigma_twin, sigma_error):
    """|X W - X' W'|_F <= |dX| sigma(W') + |X| sigma(dW), all activation norms Frobenius."""
    return dx_norm * sigma_twin + x_norm * sigma_error


def dual_bound(x_norm, dx_norm, hidden_norm, sigma_twin, sigma_error, sigma_up, hidden_step=0.0):
    """The same for X' Q(R) + T U with T = bf16(X D).

    |dX| sigma(Q(R)) + |X| sigma(W - D U - Q(R)) + u |T| sigma(U), u relative to the rounded T.
    `hidden_step` is the rounding of T under the normal range, see `hidden_rounding`.
    """
    rounding = UNIT_ROUNDOFF["bfloat16"] * (1 + 2.0**-7) * hidden_norm + hidden_step
    return exact_bound(x_norm, dx_norm, sigma_twin, sigma_error) + rounding * sigma_up


def hidden_rounding(k, rank):
    """What a row of T = bf16(X D), sums of `k` products, can lose under the normal ranges of both."""
    return (SUBNORMAL_STEP["bfloat16"] + k * 2.0**-147) * math.sqrt(rank)


def output_rounding(dtype, outputs, bf16_norm, fp4_norm, added_norm=0.0):
    """Rounding of both results to `dtype`: u (|Y_bf16| + |Y_fp4| + 2 |bias and residual|), and subnormals.

    float32 and float64 outputs are the accumulators themselves and are not rounded again.
    """
    if dtype in ("float32", "float64"):
        return 0.0
    norms = bf16_norm + fp4_norm + 2 * added_norm
    return UNIT_ROUNDOFF[dtype] * norms + 2 * SUBNORMAL_STEP[dtype] * math.sqrt(outputs)


def accumulated_rounding(dtype):
    """What the sums lost is rounded with the result: `output_rounding` is of the exact products alone."""
    return 1 + UNIT_ROUNDOFF[dtype] if dtype in ("bfloat16", "float16") else 1.0


def accumulation_bound(k, outputs, *factor_norms, per_k=FP32_ACCUMULATION):
    """K 2^-22 times the sum of |A|_F |B|_F over the products (pairs) summed in FP32, and FP32's underflow.

    Sums of BF16 products on Hopper's tensor cores keep to it too. By their rule (accumulator.BF16, confirmed
    on an H200) a step adds 16 products and the sum so far, each cut by less than 2^-25 of the largest, and
    cuts the result by less than 2^-23 of itself. None of these exceeds S = sum |a| |b|, as cutting toward
    zero makes nothing larger, so K / 16 steps lose under (K / 16) (17 + 4) 2^-25 S < K 2^-24 S.
    """
    return k * (per_k * sum(a * b for a, b in factor_norms) + 2.0**-147 * math.sqrt(outputs))


def fp8_accumulation(k, interval=PROMOTION, subnormal=2.0**-17):
    """g with |Y_device - A B|_F <= (g + K 2^-22) |A|_F |B|_F for FP8 products on Hopper's tensor cores.

    `interval`: products between two promotions, None for one chain (``accumulate="fast"``).

    A step (accumulator.FP8, measured on an H200) adds 32 products and the sum so far, 33 terms, each cut
    toward zero by less than q = 2^(e - 13), 2^e being at most the largest of them; then it cuts their sum,
    whose exponent is E, to 13 fraction bits, which loses nothing where E <= e and less than 2^(E - 13) else.
    Let S = sum |a| |b| over an interval. A product is at most S, and so is every sum so far: cutting toward
    zero makes nothing larger. With E <= e a step loses less than 33 q <= 33 * 2^-13 S; with E > e, less than
    (33 / 2 + 1) 2^(E - 13) <= 17.5 * 2^-13 S. An interval of I products loses less than 33 (I / 32) 2^-13 S.
    The intervals' losses add up to that many times the sum over all of K, an element of |A| |B|, whose
    Frobenius norm is at most |A|_F |B|_F. K counts in whole tiles of 128 elements, since the zeros behind it
    are multiplied too. The additions of promotion (K / 128, each 2^-24), up to four scalings in the epilogue
    and BF16 steps that follow on the FP8 sum are within K 2^-22, FP32's own.

    A subnormal E4M3 factor, under 2^-6, counts with the exponent -6. So |a| stands for max(|a|, 2^-6) of the
    bytes, times the row's outer scale o, and |A|_F^2 grows by K (2^-6 o)^2 a row at most. Where o was found
    from the row's own largest element, up to 4 octaves of slack included, that element is over 6 o after
    quantisation, hence |A|_F^2 grows by less than K 2^-17 of itself, and |A|_F |B|_F too. `subnormal` says
    otherwise (`subnormal_norm`): 0 where the norms hold it already. Neither result can exceed S, so that g
    needs to be no more than 2.

    >>> round(fp8_accumulation(4096), 6), fp8_accumulation(256, None, subnormal=0)
    (0.016617, 0.0322265625)
    """
    length = 128 * math.ceil(k / 128)
    steps = (length if interval is None else min(interval, length)) / FP8.depth
    return min(2.0, steps * (FP8.depth + 1) * 2.0**-FP8.fraction * (1 + k * subnormal))


def subnormal_norm(norm, outer, elements):
    """Root of |A|_F^2 and what subnormal bytes can add to it: (2^-6 o)^2 an element.

    `outer`: decode scales, each of `elements` elements.
    """
    return math.hypot(norm, 2.0**-6 * math.sqrt(elements) * float(np.linalg.norm(np.ravel(outer))))


#: What `accumulate` adds to the bound of FP32 sums, for the product of the FP4 operands.
ACCUMULATE = {
    "fp32": lambda k, **_: 0.0, "promoted": fp8_accumulation,
    "fast": partial(fp8_accumulation, interval=None),
}  # fmt: skip


def bf16_rounding(norm, size):
    """|X - bf16(X)|_F of a tensor of `size` elements: 2^-8 |X|_F, and the step under the normal range."""
    return UNIT_ROUNDOFF["bfloat16"] * (1 + 2.0**-15) * norm + SUBNORMAL_STEP["bfloat16"] * math.sqrt(size)


def conv_factor(kernel, stride=(1, 1)):
    """How often a convolution reads a pixel, as a norm: sqrt(ceil(kh / sh) ceil(kw / sw)).

    |im2col(X)|_F <= conv_factor |X|_F, so the bounds of a product hold with the weight as (Cout, kh kw Cin).
    """
    (kh, kw), (sh, sw) = kernel, stride
    return math.sqrt(math.ceil(kh / sh) * math.ceil(kw / sw))


def chi_square_cdf(x, k):
    """P(chi-square with `k` degrees of freedom <= x): the regularised gamma function by its series."""
    if x <= 0:
        return 0.0
    a, half = k / 2, x / 2
    term = total = 1 / a
    n = 0
    while term > total * 1e-17:
        n += 1
        term *= half / (a + n)
        total += term
    return total * math.exp(a * math.log(half) - half - math.lgamma(a))


def normal_quantile(p):
    """Standard normal quantile by bisection on math.erfc."""
    low, high = -40.0, 40.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if 0.5 * math.erfc(-middle / math.sqrt(2)) < p else (low, middle)
    return (low + high) / 2


def chi_square_quantile(p, k):
    """x with P(chi-square_k <= x) = p: Wilson and Hilferty's start (PNAS 1931), then Newton in log x."""
    start = k * (1 - 2 / (9 * k) + normal_quantile(p) * math.sqrt(2 / (9 * k))) ** 3
    # far in the lower tail the cube may vanish or be negative; there cdf ~ (x/2)^(k/2) / Gamma(k/2 + 1)
    tail = 2 * math.exp((math.log(p) + math.lgamma(k / 2 + 1)) * 2 / k)
    log_x = math.log(start if start > tail else tail)
    for _ in range(60):
        x = math.exp(log_x)
        log_density = (k / 2) * math.log(x / 2) - x / 2 - math.lgamma(k / 2)  # of log x
        value = chi_square_cdf(x, k)
        step = (math.log(value) - math.log(p)) * value / math.exp(log_density)
        log_x -= max(-1.0, min(1.0, step))
        if abs(step) < 1e-14:
            break
    return math.exp(log_x)


def sketch_factor(k=16, delta=1e-3):
    """sqrt(k / chi-square_{k, delta}): the estimate of k columns times it falls short at delta only."""
    return math.sqrt(k / chi_square_quantile(delta, k))


def estimate(x, w, y, k=16, seed=0):
    """Estimate of |X W - Y|_F, unbiased in its square, from `k` Gaussian columns; 2 k (MK + KN + MN) flops.

    |X (W G) - Y G|_F^2 / k with G ~ N(0, 1), (N, k): Gaussian Freivalds (arXiv:1705.10449).
    """
    g = np.random.default_rng(seed).standard_normal((np.shape(w)[1], k))
    x, w, y = (np.asarray(m, np.float64) for m in (x, w, y))
    return float(np.linalg.norm(x @ (w @ g) - y @ g)) / math.sqrt(k)


def matmul_certificate(x, w, x_used, w_used, dtype="bfloat16", accumulate="fp32"):
    """(bound, accumulation) of the FP4 product of `x_used`, `w_used` against the BF16 product of `x`, `w`.

    `accumulate`: how the FP4 product is summed, "fp32", or on FP8 tensor cores "promoted" or "fast".
    """
    x, w = (np.asarray(m).astype(ml_dtypes.bfloat16).astype(np.float64) for m in (x, w))
    x_used, w_used = (np.asarray(m, np.float64) for m in (x_used, w_used))
    norm, sigma = np.linalg.norm, spectral_norm_upper
    outputs = x.shape[0] * w.shape[1]
    bound = exact_bound(norm(x), norm(x - x_used), sigma(w_used), sigma(w - w_used))
    bound += output_rounding(dtype, outputs, norm(x) * sigma(w), norm(x_used) * sigma(w_used))
    pairs = (norm(x), norm(w)), (norm(x_used), norm(w_used))
    accumulation = accumulation_bound(x.shape[1], outputs, *pairs)
    accumulation += ACCUMULATE[accumulate](x.shape[1]) * norm(x_used) * norm(w_used)
    return bound, accumulation * accumulated_rounding(dtype)
