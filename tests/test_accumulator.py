"""The model of the tensor cores' sums: against a loop over fractions, measured errors and the device."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import math
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from fp4bf16.python_ref import accumulator as acc

ROOT = Path(__file__).resolve().parents[1]

# Measured on an H200 (cuBLAS FP8, FP32 output): operands, positive, K, error without promotion, promoted
# every 128. That of one scale, signed, K = 16384 comes from the few sums that leave 2^14 units: looser.
MEASURED = [
    ("one", False, 1024, 0, 0), ("one", False, 4096, 0, 0), ("one", False, 16384, 8.6e-5, 0),
    ("one", True, 1024, 1.2e-3, 0), ("one", True, 4096, 3.2e-2, 0), ("one", True, 16384, 2.0e-1, 0),
    ("power_of_two", False, 1024, 2.7e-4, 6.1e-5), ("power_of_two", False, 4096, 7.4e-4, 6.0e-5),
    ("power_of_two", False, 16384, 1.9e-3, 6.1e-5), ("power_of_two", True, 1024, 5.9e-3, 1.8e-4),
    ("power_of_two", True, 4096, 3.5e-2, 1.6e-4), ("power_of_two", True, 16384, 1.4e-1, 1.6e-4),
    ("nvfp4_exact", False, 1024, 6.6e-4, 1.7e-4), ("nvfp4_exact", False, 4096, 1.5e-3, 1.7e-4),
    ("nvfp4_exact", False, 16384, 3.4e-3, 1.7e-4), ("nvfp4_exact", True, 1024, 1.4e-2, 7.8e-4),
    ("nvfp4_exact", True, 4096, 6.3e-2, 7.6e-4), ("nvfp4_exact", True, 16384, 1.9e-1, 7.5e-4),
]  # fmt: skip


# ---- one element at a time, in exact fractions -------------------------------------------------------------
def floor_log2(x):
    """floor(log2 |x|) of a nonzero fraction."""
    return math.frexp(float(abs(x)))[1] - 1


def loop_step(c, a, b, rule, smallest):
    """c + a . b of one instruction, by hand."""
    tops = [floor_log2(c)] if c else []
    for x, y in zip(a, b, strict=True):
        if not x * y:
            continue
        if rule.exponent == "value":
            tops.append(floor_log2(x * y))
        else:
            least = smallest if rule.exponent == "sum_subnormal" else -(10**6)
            tops.append(max(floor_log2(x), least) + max(floor_log2(y), least))
    if not tops:
        return Fraction(0)
    quantum = Fraction(2) ** (max(tops) - rule.fraction)
    cut = (lambda t: math.trunc(t)) if rule.rounding == "zero" else math.floor
    total = sum(cut(t / quantum) for t in [c, *(x * y for x, y in zip(a, b, strict=True))]) * quantum
    if not total:
        return Fraction(0)
    last = Fraction(2) ** (floor_log2(total) - rule.output)
    return math.trunc(total / last) * last


def loop_matmul(a, b, promote, rule, c, smallest):
    y = np.zeros((len(a), len(b)), np.float32)
    for i, j in itertools.product(range(len(a)), range(len(b))):
        total, chain = np.float32(c[i, j]), Fraction(0)
        if promote is None:
            chain = Fraction(float(total))
        left, right = ([Fraction(float(v)) for v in row] for row in (a[i], b[j]))
        for start in range(0, len(left), rule.depth):
            stop = start + rule.depth
            chain = loop_step(chain, left[start:stop], right[start:stop], rule, smallest)
            if promote is not None and (stop % promote == 0 or stop >= len(left)):
                total, chain = total + np.float32(float(chain)), Fraction(0)
        y[i, j] = np.float32(float(chain)) if promote is None else total
    return y


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("promote", [64, 128, None])
def test_equals_a_loop_over_fractions(rng, dtype, promote):
    """Random bytes of all exponents, subnormals and zeros among them; every rule that can be asked for."""
    finite = np.array([v for v in range(256) if np.isfinite(acc.values(np.uint8(v), dtype))], np.uint8)
    a, b = (rng.choice(finite, (3, 256)) for _ in "ab")
    a[rng.random(a.shape) < 0.1] = 0
    c = (rng.standard_normal((3, 3)) * 2.0 ** rng.integers(-20, 20, (3, 3))).astype(np.float32)
    for rounding, exponent, output in itertools.product(
        ("zero", "floor"), ("value", "sum", "sum_subnormal"), (13, 23)
    ):
        rule = acc.Rule(int(rng.integers(10, 16)), int(rng.choice([8, 16, 32])), rounding, exponent, output)
        y = acc.fp8_matmul(a, b, promote, dtype, rule, c)
        smallest = {"e4m3": -6, "e5m2": -14}[dtype]
        expected = loop_matmul(acc.values(a, dtype), acc.values(b, dtype), promote, rule, c, smallest)
        np.testing.assert_array_equal(y, expected, err_msg=str(rule))


def test_bf16_equals_a_loop_over_fractions(rng):
    a, b = (rng.standard_normal((3, 64)).astype(ml_dtypes.bfloat16) for _ in "ab")
    c = rng.standard_normal((3, 3)).astype(np.float32)
    expected = loop_matmul(a, b, None, acc.BF16, c, -126)
    np.testing.assert_array_equal(acc.bf16_matmul(a, b, c=c), expected)
    np.testing.assert_array_equal(acc.bf16_matmul(a.view(np.uint16), b.view(np.uint16), c=c), expected)


# ---- what is claimed of it ---------------------------------------------------------------------------------
@pytest.mark.parametrize(("scales", "positive", "k", "never", "promoted"), MEASURED)
def test_errors_as_measured(scales, positive, k, never, promoted):
    """Within 1.25 times of every measured cell, exact where the device was exact."""
    rng = np.random.default_rng([k, positive, len(scales)])
    a, b = (acc.operands(rng, (rows, k), scales, positive) for rows in (32, 48))
    for promote, error in ((None, never), (128, promoted)):
        found = acc.relative_error(acc.fp8_matmul(a, b, promote), a @ b.T)
        factor = 3 if (scales, positive, k, promote) == ("one", False, 16384, None) else 1.25
        assert error / factor <= found <= error * factor, (promote, found)


def test_operands_are_exact_in_their_formats(rng):
    for scales, positive in itertools.product(acc.SCALES, (False, True)):
        x = acc.operands(rng, (16, 512), scales, positive)
        for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)[: 1 if scales == "nvfp4_exact" else 2]:
            np.testing.assert_array_equal(x.astype(dtype).astype(np.float64), x)
        assert (x > 0).all() == positive


def test_one_scale_is_exact_below_two_to_the_fourteen_units(rng):
    """Products of E2M1 are multiples of 1/4: nothing is cut while every partial sum is under 2^14 of them."""
    for k in (1024, 4096):
        a, b = (acc.operands(rng, (64, k)) for _ in "ab")
        np.testing.assert_array_equal(acc.fp8_matmul(a, b, promote=None), a @ b.T)
    a = np.full((1, 512), 6.0)  # 36 = 144 units: 113 of them stay under 2^14
    for interval in (32, 64, 96):
        np.testing.assert_array_equal(acc.fp8_matmul(a, a, interval), a @ a.T)


def test_bytes_and_values_are_the_same(rng):
    a, b = (acc.operands(rng, (8, 256), "nvfp4_exact") for _ in "ab")
    bits = [x.astype(ml_dtypes.float8_e4m3fn) for x in (a, b)]
    y = acc.fp8_matmul(a, b)
    np.testing.assert_array_equal(acc.fp8_matmul(*bits), y)
    np.testing.assert_array_equal(acc.fp8_matmul(*(x.view(np.uint8) for x in bits)), y)


def test_promotion_interval_must_hold_whole_steps():
    with pytest.raises(ValueError, match="promote is 100, but a multiple of the depth 32 is needed"):
        acc.fp8_matmul(np.ones((1, 128)), np.ones((1, 128)), promote=100)


def test_zeros_and_starting_values():
    zero, c = np.zeros((2, 64)), np.float32([[0.0, 1.0], [-(2 - 2.0**-23), 2.0**-120]])
    y = acc.fp8_matmul(zero, zero, None, c=c)
    np.testing.assert_array_equal(y, acc.cut(c.astype(np.float64), acc.FP8.fraction))
    np.testing.assert_array_equal(acc.fp8_matmul(zero, zero, 64, c=c), c)


# ---- on the device -----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def probe():
    spec = importlib.util.spec_from_file_location("probe_accumulator", ROOT / "bench/probe_accumulator.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def device(probe):
    cupy = pytest.importorskip("cupy")
    pytest.importorskip("cuda.bindings.nvrtc")
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        count = 0
    if count == 0:
        pytest.skip("no GPU")
    return probe.Device()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["e4m3", "e5m2", "bf16"])
def test_device_equals_the_model(probe, device, rng, dtype):
    """Single instructions and whole products, bit for bit."""
    for name, (a, b, c) in probe.single(dtype, rng).items():
        y, expected = device(a, b, dtype, None, c), probe.expected(a, b, dtype, None, c)
        np.testing.assert_array_equal(y, expected, err_msg=name)
    scales = "power_of_two" if dtype == "e5m2" else "nvfp4_exact"
    for promote in (128, 256, None):
        a, b = (acc.operands(rng, (64, 1024), scales) for _ in "ab")
        y, expected = device(a, b, dtype, promote), probe.expected(a, b, dtype, promote)
        np.testing.assert_array_equal(y, expected, err_msg=str(promote))


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", ["promoted", "fast"])
@pytest.mark.parametrize("shape", [(64, 512, 64), (200, 1040, 136), (256, 4096, 384)])
def test_library_equals_the_model(rng, accumulate, shape):
    """The FP4 track's products, bit for bit: the model of the bytes, times powers of two."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    import fp4bf16 as fb

    m, k, n = shape
    x, w = (torch.from_numpy(rng.standard_normal(s, np.float32)).cuda() for s in ((m, k), (k, n)))
    x[:, ::3] *= 2.0**-9  # blocks of the least scale, whose bytes are subnormal
    x, w = fb.quantize(x, search="fast"), fb.quantize(w, axis=-2)
    a, b = (fb.dequantize(q).cpu().numpy().astype(np.float64) for q in (x, w.mT))
    units = [np.broadcast_to(q.outer_scale.cpu().numpy().reshape(-1, 1), (len(q_), 1))
             for q, q_ in ((x, a), (w, b))]  # fmt: skip
    y = fb.matmul(x, w, accumulate=accumulate).cpu().numpy()
    expected = acc.fp8_matmul(a / units[0], b / units[1], 128 if accumulate == "promoted" else None)
    np.testing.assert_array_equal(y, expected * units[0].astype(np.float32) * units[1].T.astype(np.float32))


def test_probe_finds_the_rule_of_a_device(probe):
    """The search in the probe recovers a rule that differs from the model's in two fields."""
    rule = dataclasses.replace(acc.FP8, fraction=14, rounding="floor")
    rng = np.random.default_rng(3)
    chosen = ("mixed exponents and c", "cancelling", "two instructions")
    probes = {name: p for name, p in probe.single("e4m3", rng).items() if name in chosen}
    results = {n: probe.expected(a, b, "e4m3", None, c, rule) for n, (a, b, c) in probes.items()}
    found, score, _ = probe.fit("e4m3", probes, results)
    assert (found.fraction, found.rounding) == (14, "floor")
    assert set(score.values()) == {1.0}
