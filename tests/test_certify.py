"""Certificates: never violated, not vacuous, and made of numbers that are what they claim to be."""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest

import fp4bf16 as fb
from fp4bf16 import certify
from fp4bf16.python_ref import accumulator
from fp4bf16.python_ref import certify as ref
from fp4bf16.python_ref import gemm as ref_gemm

BF16 = ml_dtypes.bfloat16


def size(rng, most=512):
    """Log-uniform in 1..most."""
    return int(np.exp(rng.uniform(0, np.log(most + 1))))


def distance_of(y, other):
    """|y - other|_F in float64, without BLAS's threads."""
    with np.errstate(all="ignore"):
        return math.sqrt(np.square(np.asarray(y, np.float64) - np.asarray(other, np.float64)).sum())


# ---- operands that try to break the bound ------------------------------------------------------------------


def gaussian(rng, m, k, n):
    return rng.standard_normal((m, k)), rng.standard_normal((k, n)) / math.sqrt(k)


def aligned(rng, m, k, n):
    """Every row the same, and a weight of rank one along its quantisation error: the bound is nearly met."""
    row = rng.standard_normal((1, k)).astype(BF16).astype(np.float32)
    error = row - ref_gemm.fake_quantize(row, search="fast")
    return np.repeat(row, m, 0), error.T * np.sign(rng.standard_normal((1, n)))


def same_sign(rng, m, k, n):
    return rng.uniform(0.5, 1, (m, k)), rng.uniform(0.5, 1, (k, n))


def outliers(rng, m, k, n):
    x, w = gaussian(rng, m, k, n)
    x[:, rng.integers(k)] *= 10 ** rng.uniform(1, 4)
    w[rng.integers(k)] *= 10 ** rng.uniform(1, 4)
    return x, w


def ties(rng, m, k, n):
    """Numbers half-way between two codes, and between two bfloat16 numbers."""
    halfway = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 1 + 2**-8, 2 + 2**-7])
    return rng.choice(halfway, (m, k)) * rng.choice([-1, 1], (m, k)), rng.choice(halfway, (k, n))


def tiny_and_huge(rng, m, k, n):
    x, w = gaussian(rng, m, k, n)
    return x * 10.0 ** rng.uniform(-44, 17), w * 10.0 ** rng.uniform(-44, 17)


def zero_blocks(rng, m, k, n):
    x, w = gaussian(rng, m, k, n)
    x[:, : k // 2] = 0
    w[rng.random((k, n)) < 0.9] = 0
    return x, w


ADVERSARIAL = (aligned, same_sign, outliers, ties, tiny_and_huge, zero_blocks)


def weight_of(rng, kind, w, format):
    """(right operand, keyword arguments) of a call on the FP4 or dual track, and of its BF16 twin."""
    if kind == "plain":
        return w, {"track": "fp4", "format": format}, w
    if kind == "quantized":
        return fb.quantize(w, format, axis=-2), {}, w
    dual = fb.DualWeight(w, rank=int(rng.integers(0, 9)), format=format)
    return dual, {"track": rng.choice(["dual", "fp4"])}, dual


@pytest.mark.parametrize("most", [2_500, pytest.param(10_000, marks=pytest.mark.long)])
def test_no_bound_is_violated_in_thousands_of_calls(rng, most):
    """Against the BF16 track's own result; a third of the calls adversarial, sizes log-uniform in 1..512."""
    calls, ratios = 0, []
    while calls < most:
        k, n = size(rng), size(rng)
        make = gaussian if rng.random() < 2 / 3 else ADVERSARIAL[rng.integers(len(ADVERSARIAL))]
        kind = rng.choice(["quantized", "quantized", "plain", "dual"]) if k * n < 1 << 14 else "quantized"
        format = str(rng.choice(["nvfp4_exact", "nvfp4_exact", "nvfp4", "mxfp4", "fp8"]))
        source = BF16 if rng.random() < 0.5 else np.float32
        x, w = make(rng, size(rng), k, n)
        b, how, b16 = weight_of(rng, kind, w.astype(source), format)
        for _ in range(8 if kind == "quantized" else 4):
            calls += 1
            xs = x.astype(source)
            more = {"dtype": str(rng.choice(["float32", "float32", "bfloat16", "float16"]))}
            if rng.random() < 0.2:
                more["activation"] = str(rng.choice(["silu", "gelu"]))
                more["bias"] = rng.standard_normal(n).astype(source)
            if rng.random() < 0.1:
                more["residual"] = rng.standard_normal((len(x), n)).astype(source)
            y, cert = fb.matmul(xs, b, certify="bound", **how, **more)
            distance = distance_of(y, fb.matmul(xs, b16, track="bf16", **more))
            allowed = cert.bound + cert.accumulation
            what = (
                make.__name__,
                kind,
                format,
                xs.shape,
                n,
                source.__name__,
                more.get("dtype"),
                more.get("activation"),
            )
            assert distance <= allowed or (allowed == np.inf and not np.isfinite(distance)), (
                what,
                distance,
                cert,
            )
            if 0 < distance and np.isfinite(allowed):
                ratios.append(allowed / distance)
            x = make(rng, len(x), k, n)[0] if make is not aligned else x  # the next activations, same weight
    assert min(ratios) < 2, "the adversarial operands no longer come near the bound"


@pytest.mark.parametrize("shape", [(64, 256, 128), (256, 512, 512), (8, 64, 40)])
@pytest.mark.parametrize("kind", ["plain", "dual", "quantized"])
def test_bound_is_not_vacuous(rng, shape, kind):
    m, k, n = shape
    x, w = (v.astype(BF16) for v in gaussian(rng, m, k, n))
    b, how, b16 = weight_of(rng, kind, w, "nvfp4_exact")
    y, cert = fb.matmul(
        x, b, certify=True, dtype="float32", **(how | {"track": "dual"} if kind == "dual" else how)
    )
    distance = distance_of(y, fb.matmul(x, b16, track="bf16", dtype="float32"))
    # a weight that is known by the norm of its error alone is bounded by |dW|_F, not by sigma(dW)
    assert distance < cert.bound < (25 if kind == "quantized" else 10) * distance
    assert cert.accumulation < 0.03 * cert.bound
    if kind != "quantized":
        assert cert.estimate < 3 * distance and 0.05 < cert.relative < 0.5
        assert cert.ok(0.5) and not cert.ok(0.05)


@pytest.mark.parametrize("make,calls,most", [(aligned, 1000, 7), (gaussian, 300, 4), (outliers, 300, 4)])
def test_estimate_holds_with_its_confidence(rng, make, calls, most):
    """At 1e-3 a call, more than `most` failures have probability 2e-5; a difference of rank one is the worst
    case."""
    failures = 0
    for _ in range(calls):
        x, w = (v.astype(BF16) for v in make(rng, 7, 32, 12))
        y, cert = fb.matmul(x, w, track="fp4", certify=True, dtype="float32")
        distance = distance_of(y, fb.matmul(x, w, dtype="float32"))
        failures += distance > cert.estimate + cert.accumulation
        assert cert.confidence == 0.999
    assert failures <= most


def test_estimate_is_unbiased(rng):
    x, w, y = (rng.standard_normal(s) for s in ((9, 20), (20, 30), (9, 30)))
    factor = ref.sketch_factor(16, 1e-3)
    squares = [(certify.sketch(x, w, y) / factor) ** 2 for _ in range(2000)]
    exact = np.linalg.norm(x @ w - y) ** 2
    assert abs(np.mean(squares) - exact) < 5 * np.std(squares) / math.sqrt(2000)
    assert abs(np.mean([ref.estimate(x, w, y, seed=i) ** 2 for i in range(500)]) / exact - 1) < 0.1


def test_sketch_repeats_by_counter_and_never_by_accident():
    a, b = certify.gaussian(40, 16, call=7, step=3), certify.gaussian(40, 16, call=7, step=3)
    assert np.array_equal(a, b)
    assert not np.array_equal(a, certify.gaussian(40, 16, call=8, step=3))
    assert not np.array_equal(a, certify.gaussian(40, 16, call=7, step=4))
    assert not np.array_equal(certify.gaussian(40, 16), certify.gaussian(40, 16))
    assert abs(certify.gaussian(4000, 16).std() - 1) < 0.02


# ---- the parts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (40, 7), (7, 40), (150, 150), (1, 300), (300, 1)])
@pytest.mark.parametrize("power", [-300, -30, 0, 30, 150])
def test_spectral_norm_is_an_upper_bound_and_close(rng, shape, power):
    w = rng.standard_normal(shape) * 10.0**power
    sigma = np.linalg.norm(w / 10.0**power, 2) * 10.0**power
    upper = certify.spectral_norm_upper(w)
    assert sigma <= upper <= 1.07 * sigma


def test_spectral_norm_of_hard_matrices(rng):
    q, _ = np.linalg.qr(rng.standard_normal((64, 64)))
    assert (
        1 <= certify.spectral_norm_upper(q) <= 64 ** (1 / 64) * 1.0001
    )  # all singular values equal: the worst case
    assert 1 <= certify.spectral_norm_upper(np.outer(np.eye(50)[0], np.eye(60)[3])) <= 1 + 2**-19
    assert (
        certify.spectral_norm_upper(np.zeros((5, 6))) == 0
        and certify.spectral_norm_upper(np.zeros((0, 6))) == 0
    )
    assert certify.spectral_norm_upper(np.array([[1.0, np.nan]])) == math.inf
    wide = rng.standard_normal((200, 1000))
    assert certify.spectral_norm_upper(wide) <= 1.03 * np.linalg.norm(wide, 2)


@pytest.mark.parametrize("k,p,quantile", [  # tables of the chi-square distribution
    (1, 0.05, 0.003932), (1, 0.001, 1.5708e-6), (2, 0.5, 1.386294), (5, 0.01, 0.5543), (8, 0.001, 0.8571),
    (10, 0.01, 2.5582), (16, 0.001, 3.9416), (16, 0.05, 7.9616), (30, 0.999, 59.7031), (32, 0.001, 12.8107),
    (100, 0.05, 77.9295), (100, 0.95, 124.3421),
])  # fmt: skip
def test_chi_square_quantile(k, p, quantile):
    assert math.isclose(ref.chi_square_quantile(p, k), quantile, rel_tol=5e-5)
    assert math.isclose(ref.chi_square_cdf(ref.chi_square_quantile(p, k), k), p, rel_tol=1e-10)


def test_sketch_factor():
    assert math.isclose(certify.sketch_factor(16, 1e-3), math.sqrt(16 / 3.94163), rel_tol=1e-5)  # 2.015
    assert math.isclose(certify.sketch_factor(32, 1e-3), 1.5805, rel_tol=1e-4)
    for k in (1, 4, 16, 64):
        assert (
            certify.sketch_factor(k, 1e-6)
            > certify.sketch_factor(k, 1e-3)
            > certify.sketch_factor(k, 0.1)
            > 1
        )


def test_formulas_of_the_package_are_the_references(rng):
    x, w = (v.astype(BF16) for v in gaussian(rng, 20, 64, 30))
    y, cert = fb.matmul(x, w, track="fp4", certify="bound", dtype="float32")
    used = ref_gemm.operands(x.astype(np.float32), w.astype(np.float32), "fp4")
    bound, accumulation = ref.matmul_certificate(x, w, *used, dtype="float32")
    # row by row the terms are added before the norm is taken, which is never more (Minkowski)
    assert 0.98 * bound < cert.bound < bound * (1 + 1e-6)
    assert math.isclose(cert.accumulation, accumulation, rel_tol=1e-6)
    assert math.isclose(distance_of(y, 0), cert.terms["product"], rel_tol=1e-6)


def test_rows_are_bounded_each(rng):
    x, w = (v.astype(np.float32) for v in gaussian(rng, 50, 64, 30))
    x[3] *= 1000
    for b, track in (
        (w, "fp4"),
        (fb.DualWeight(w, rank=4), "dual"),
        (fb.DualWeight(w, rank=4, outliers=3), "dual"),
    ):
        y, cert = fb.matmul(x, b, track=track, certify="bound")
        distance = np.linalg.norm((y - fb.matmul(x, w)).astype(np.float64), axis=1)
        assert cert.rows.shape == (50,) and (distance <= cert.rows * (1 + 1e-3)).all()
        assert np.isclose(np.linalg.norm(cert.rows), cert.bound)
        assert cert.rows[4] < 0.1 * cert.rows[3]


def test_conv_factor_bounds_the_patches(rng):
    for kernel, stride in (
        ((3, 3), (1, 1)),
        ((3, 3), (2, 2)),
        ((1, 1), (1, 1)),
        ((4, 2), (3, 1)),
        ((1, 1), (2, 2)),
    ):
        x = rng.standard_normal((11, 13))
        padded = np.pad(x, 3)
        windows = np.lib.stride_tricks.sliding_window_view(padded, kernel)[:: stride[0], :: stride[1]]
        assert np.linalg.norm(windows) <= certify.conv_factor(kernel, stride) * np.linalg.norm(x) + 1e-12
    assert certify.conv_factor((3, 3)) == 3


def test_overflow_and_range_fail_the_certificate(rng):
    x, w = (v.astype(np.float32) for v in gaussian(rng, 8, 64, 16))
    low = fb.quantize(x, outer=-12)
    assert low.stats.overflow > 0
    _, cert = fb.matmul(low, fb.quantize(w, axis=-2), certify=True)
    assert cert.bound == math.inf and cert.estimate == math.inf and not cert.ok(1e9)
    _, cert = fb.matmul(x * np.float32(1e5), w, track="fp4", certify=True, dtype="float16")
    assert cert.bound == math.inf
    with np.errstate(over="ignore", invalid="ignore"):
        _, cert = fb.matmul(x * np.float32(1e25), w * np.float32(1e20), track="fp4", certify="bound")
    assert cert.bound == math.inf


def test_other_tracks_and_arguments(rng):
    x, w = (v.astype(np.float32) for v in gaussian(rng, 8, 64, 16))
    y, cert = fb.matmul(x, w, certify=True)
    assert np.array_equal(y, fb.matmul(x, w)) and cert.limit == 0 and cert.ok(0)
    y, cert = fb.matmul(x, w, track="reference", certify=True)
    assert np.linalg.norm(y - fb.matmul(x, w)) <= cert.bound + cert.accumulation and cert.ok(0.05)
    loaded = fb.quantize(w, axis=-2)
    loaded.stats = None
    _, cert = fb.matmul(x, loaded, certify=True)
    assert cert.reference == "quantized"
    distance = np.linalg.norm(fb.matmul(x, loaded) - fb.matmul(x, loaded, track="bf16"))
    assert distance <= cert.estimate + cert.accumulation <= cert.bound * 1.2
    assert fb.matmul(x, fb.quantize(w, axis=-2), certify="bound")[1].estimate is None
    y, cert = fb.linear(x, w.T, certify=True, track="fp4")
    assert isinstance(cert, fb.Certificate) and "bound" in repr(cert) and "99.9" in repr(cert)
    with pytest.raises(ValueError, match="certify is 'yes'"):
        fb.matmul(x, w, certify="yes")
    with pytest.raises(
        fb.ShapeError, match=r"b has shape \(2, 64, 16\), but a certificate is for one matrix"
    ):
        fb.matmul(np.stack([x, x]), np.stack([w, w]), certify=True)


def test_zero_sizes(rng):
    for shape in ((0, 32, 8), (5, 0, 3), (4, 16, 0)):
        x, w = (
            v.astype(np.float32) for v in (rng.standard_normal(shape[:2]), rng.standard_normal(shape[1:]))
        )
        for b in (w, fb.DualWeight(w), fb.quantize(w, axis=-2)):
            y, cert = fb.matmul(x, b, certify=True, track=None if b is not w else "fp4")
            assert (
                y.shape == (shape[0], shape[2])
                and cert.bound + cert.accumulation < 1e-30
                and cert.relative == 0
            )


def test_norms_of_a_prepared_weight_are_computed_once(rng, monkeypatch):
    x, w = (v.astype(np.float32) for v in gaussian(rng, 8, 64, 16))
    calls = []
    real = certify.spectral_norm_upper
    monkeypatch.setattr(certify, "spectral_norm_upper", lambda m: calls.append(1) or real(m))
    q = fb.quantize(w, axis=-2)
    first = fb.matmul(x, q, certify="bound")[1]
    count = len(calls)
    assert count > 0 and fb.matmul(x, q, certify="bound")[1] == first and len(calls) == count
    fb.quantize(2 * w, axis=-2, out=q)  # new numbers in the same memory
    assert math.isclose(fb.matmul(x, q, certify="bound")[1].bound, 2 * first.bound, rel_tol=1e-6)
    assert len(calls) == 2 * count


# ---- sums on FP8 tensor cores ------------------------------------------------------------------------------
def e4m3(x):
    return np.asarray(x).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def drifting(rng, m, k, n):
    """A large product first in each interval, then products too small to be added to it."""
    a, b = np.full((m, k), 2.0**-7), np.full((n, k), 1.75 * 2.0**-7)
    a[:, ::128] = b[:, ::128] = 1
    return a, b


def fp8_same_sign(rng, m, k, n):
    return e4m3(rng.uniform(0.5, 2, (m, k))), e4m3(rng.uniform(0.5, 2, (n, k)))


def fp8_spread(rng, m, k, n):
    """Every exponent of E4M3, subnormals too."""
    return tuple(e4m3(rng.standard_normal((s, k)) * 2.0 ** rng.integers(-9, 7, (s, k))) for s in (m, n))


def fp8_tiny_and_large(rng, m, k, n):
    a, b = fp8_same_sign(rng, m, k, n)
    small = rng.random((1, k)) < 0.9
    return np.where(small, a * 2.0**-6, a), np.where(small, b * 2.0**-7, b)


def fp8_cancelling(rng, m, k, n):
    """Large products of both signs that leave the small ones."""
    a, b = fp8_tiny_and_large(rng, m, k, n)
    return a * np.where(np.arange(k) % 2, -1, 1), b


def fp8_blocks(rng, m, k, n):
    return tuple(accumulator.operands(rng, (s, k), "nvfp4_exact") for s in (m, n))


FP8_OPERANDS = (drifting, fp8_same_sign, fp8_spread, fp8_tiny_and_large, fp8_cancelling, fp8_blocks)


@pytest.mark.parametrize("make", FP8_OPERANDS)
@pytest.mark.parametrize("interval", [128, 256, None])
def test_tensor_core_sums_keep_to_their_bound(rng, make, interval):
    """Element by element and in the norm, for sums modelled as in python_ref.accumulator."""
    ratios = []
    for k in (32, 128, 160, 1024, 4096):
        a, b = make(rng, 12, k, 20)
        error = np.abs(accumulator.fp8_matmul(a, b, interval) - a @ b.T)
        g = ref.fp8_accumulation(k, interval, subnormal=0) + k * ref.FP32_ACCUMULATION
        largest = [np.where(v == 0, 0, np.maximum(np.abs(v), 2.0**-6)) for v in (a, b)]
        assert (error <= g * (largest[0] @ largest[1].T)).all()
        size = [ref.subnormal_norm(np.linalg.norm(v), np.ones(len(v)), k) for v in (a, b)]
        assert np.linalg.norm(error) <= g * size[0] * size[1]
        ratios.append(np.max(error / (g * (np.abs(a) @ np.abs(b).T))))
    if make is drifting and interval == 128:
        assert max(ratios) > 0.8, "the operands no longer come near the bound"


def test_subnormal_bytes_cost_precision_and_the_bound_knows():
    """A product 2^-9 * 2^6 counts with 2^0, so that products under 2^-13 beside it vanish."""
    a, b = np.zeros((2, 128)), np.zeros((2, 128))
    a[:, 0], b[:, 0] = 2.0**-9, 2.0**6
    a[:, 1:], b[:, 1:] = 2.0**-6, 1.75 * 2.0**-8
    own = dataclasses.replace(accumulator.FP8, exponent="sum")
    error, least = (np.linalg.norm(accumulator.fp8_matmul(a, b, rule=r) - a @ b.T) for r in
                    (accumulator.FP8, own))  # fmt: skip
    assert error == 2 * 31 * 1.75 * 2.0**-14 and least < error / 10
    size = [ref.subnormal_norm(np.linalg.norm(v), np.ones(2), 128) for v in (a, b)]
    assert error <= ref.fp8_accumulation(128, subnormal=0) * size[0] * size[1]


@pytest.mark.parametrize("make", [gaussian, same_sign, outliers])
def test_bf16_tensor_core_sums_keep_to_the_bound_of_fp32(rng, make):
    for k in (16, 512, 4096):
        a, b = make(rng, 12, k, 20)
        a, b = a.astype(BF16).astype(np.float64), b.T.astype(BF16).astype(np.float64)
        error = np.abs(accumulator.bf16_matmul(a, b) - a @ b.T)
        assert (error <= k * 2.0**-24 * (np.abs(a) @ np.abs(b).T)).all()


def test_accumulate_adds_its_term_alone(rng):
    x, w = (v.astype(np.float32) for v in gaussian(rng, 16, 512, 24))
    q = fb.quantize(x, search="fast")
    norms = certify.weight_norms(w, ref_gemm.fake_quantize(w.T).T)
    plain = certify.certificate(certify.activation_norms(q.stats, 512), norms, k=512, columns=24)
    size = certify.norm(np.sqrt(q.stats.row_quantized_norm_sq)) * norms.used
    for accumulate, g in (("fp32", 0), ("promoted", 33 * 4 * 2.0**-13), ("fast", 33 * 16 * 2.0**-13)):
        g *= 1 + 512 * 2.0**-17
        cert = certify.device_certificate(q.stats, norms, k=512, columns=24, accumulate=accumulate)
        assert (cert.bound, cert.terms) == (plain.bound, plain.terms)
        assert math.isclose(cert.accumulation, plain.accumulation + g * size)
        used = ref_gemm.operands(x, w, "fp4")
        _, accumulation = ref.matmul_certificate(x, w, *used, "float32", accumulate)
        assert math.isclose(cert.accumulation, accumulation, rel_tol=1e-2)
    assert ref.fp8_accumulation(1 << 20, None) == 2
    same = certify.device_certificate(q.stats, norms, k=512, columns=24, outer=(0.0, np.zeros(24)))
    wide = certify.device_certificate(q.stats, norms, k=512, columns=24, outer=(np.ones(16), 1.0))
    assert math.isclose(same.accumulation, plain.accumulation + 33 * 4 * 2.0**-13 * size)
    assert wide.accumulation > 1.03 * same.accumulation
    with pytest.raises(ValueError, match="accumulate is 'slow', but 'fp32', 'promoted' or 'fast' is needed"):
        certify.device_certificate(q.stats, norms, k=512, columns=24, accumulate="slow")


@pytest.mark.parametrize("make", [gaussian, same_sign, outliers, aligned])
@pytest.mark.parametrize("accumulate", ["promoted", "fast"])
def test_modelled_device_result_keeps_to_its_certificate(rng, make, accumulate):
    """Operands quantised as by the call, multiplied by the models of both tensor cores."""
    k = int(rng.choice([128, 512, 2048]))
    x, w = (v.astype(BF16) for v in make(rng, 12, k, 20))
    q = fb.quantize(x, search="fast")
    operands = ref_gemm.operands(x.astype(np.float32), w.astype(np.float32), "fp4")
    used, twin = (v.astype(np.float64) for v in operands)
    interval = 128 if accumulate == "promoted" else None
    # in units of each row's outer scale, the least power of two with amax <= 288 units
    rows, columns = (2.0 ** np.ceil(np.log2(np.abs(v).max(1) / 288))[:, None] for v in (used, twin.T))
    y = accumulator.fp8_matmul(used / rows, twin.T / columns, interval) * rows * columns.T
    y16 = accumulator.bf16_matmul(x, w.T)
    sums = np.stack([q.stats.row_norm_sq, q.stats.row_quantized_norm_sq, q.stats.row_error_sq], -1)
    stats = certify.quant_stats(sums, [0, 0, 0, 0, 0], "bfloat16")
    norms = certify.weight_norms(w.astype(np.float64), twin)
    cert = certify.device_certificate(stats, norms, k=k, columns=20, accumulate=accumulate)
    assert distance_of(y, y16) <= cert.bound + cert.accumulation < math.inf
