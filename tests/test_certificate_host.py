"""The formulas of `fp4bf16_certificate`, the kernel's own code on the host (certificate_host.cu), against
`certify.certificate`."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
from host_code import compiled
from host_cuda import host_cuda  # noqa: F401 (a fixture)

from fp4bf16 import certify
from fp4bf16.backends.cuda_certificate import upper
from fp4bf16.python_ref import certify as formulas

DTYPES = ("float32", "bfloat16", "float16")
OVER = 1e-3  # of what is returned, at most


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    return compiled(tmp_path_factory, "certificate_host")


# ---- one certificate
class Case:
    """Norms of one product; numbers that FP32 arguments hold are FP32 here as well."""

    def __init__(self, rng, dtype: str, accumulate: str, activation: str | None, by_norms: bool = True,
                 outer: bool = True):  # fmt: skip
        def magnitude(low: float, high: float) -> float:
            return float(np.float32(2.0 ** rng.uniform(low, high)))

        self.dtype, self.by_norms = dtype, by_norms
        self.k, self.columns = int(rng.integers(1, 9000)), int(rng.integers(1, 600))
        self.rows = int(rng.integers(1, 5000))
        self.elements = self.rows * self.columns
        self.kind, self.activation = accumulate, activation
        self.factor = float(np.float32(formulas.conv_factor((3, 3)) if rng.integers(2) else 1.0))
        self.slope = upper(formulas.LIPSCHITZ[activation])
        error, used = magnitude(-8, 6), magnitude(-4, 12)
        self.sums = [0.0 if by_norms else (used * 1.01 + error) ** 2, used**2, error**2,
                     magnitude(-4, 12) ** 2]  # fmt: skip
        full, used, error = (math.sqrt(s) for s in self.sums[:3])
        self.activations = (used + error if by_norms else full, used, error)
        sigma = magnitude(-3, 4)
        w = [sigma * 3, sigma * 2.9, sigma, sigma * 0.99, sigma * 0.1, magnitude(-8, 0) if outer else 0.0]
        self.weight = np.array([*w, 0, 0], np.float32)
        self.outer = magnitude(-8, 2) if outer else None
        more = {"subnormal": 0} if outer else {}
        self.gain = upper(formulas.ACCUMULATE[accumulate](self.k, **more))

    def expected(self):
        """(bound, accumulation) of `certify.certificate`, for one row of all."""
        x = certify.ActivationNorms(*(np.array([v]) for v in self.activations))
        w = certify.WeightNorms(*self.weight[:5].astype(np.float64))
        made = certify.certificate(x, w, k=self.k, columns=self.elements, dtype=self.dtype,
                                   activation=None, factor=self.factor)  # fmt: skip
        rounding = made.terms["rounding"]
        bound = self.slope * (made.bound - rounding) + rounding
        return bound, self.slope * (made.accumulation + self.tensor_cores())

    def tensor_cores(self) -> float:
        used, w_used = self.factor * self.activations[1], float(self.weight[1])
        if self.outer is not None:
            used = formulas.subnormal_norm(used, self.outer, self.rows * self.k)
            w_used = formulas.subnormal_norm(w_used, float(self.weight[5]), self.k * self.columns)
        return self.gain * used * w_used * formulas.accumulated_rounding(self.dtype)


class Call:
    """The struct, results poisoned; `got` after `run`."""

    def __init__(self, fake, case: Case, threshold: float = -1.0, **change):
        self.out, self.flag = np.full(4, np.nan, np.float32), np.full(1, 77, np.int32)
        self.counts, self.case = np.array([5, 3], np.int32), case
        self.weight = case.weight.copy()
        self.outer = np.float32([0 if case.outer is None else case.outer])
        fields = dict(
            weight=self.weight.ctypes.data, k=case.k, columns=case.columns, elements=case.elements,
            factor=case.factor, gain=case.gain, output=DTYPES.index(case.dtype), slope=case.slope,
            out=self.out.ctypes.data, flag=self.flag.ctypes.data, counts=self.counts.ctypes.data,
            threshold=threshold, outer_scale=0 if case.outer is None else self.outer.ctypes.data,
            norms=8 if case.by_norms else 0,
        )  # fmt: skip
        fields |= change
        kinds = dict(fake.ffi.typeof("fp4bf16_certificate_args").fields)
        cast = {n: fake.ffi.cast(kinds[n].type, v) if kinds[n].type.kind == "pointer" else v
                for n, v in fields.items()}  # fmt: skip
        self.fake, self.args = fake, fake.ffi.new("fp4bf16_certificate_args*", cast)

    def run(self, host, sums=None) -> np.ndarray:
        sums = np.array(self.case.sums if sums is None else sums, np.float64)
        at = int(self.fake.ffi.cast("uintptr_t", self.args))
        host.host_certificate(ctypes.c_void_p(at), ctypes.c_void_p(sums.ctypes.data))
        return self.out.astype(np.float64)


def above(got: float, want: float) -> None:
    assert want <= got <= want * (1 + OVER), (got, want)


# ---- tests
@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
@pytest.mark.parametrize("accumulate", ["fp32", "promoted", "fast"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_never_less_than_the_host_s(host, host_cuda, rng, dtype, accumulate, activation):  # noqa: F811
    for _ in range(40):
        case = Case(rng, dtype, accumulate, activation, bool(rng.integers(2)), bool(rng.integers(2)))
        call = Call(host_cuda, case)
        got, (bound, accumulation) = call.run(host), case.expected()
        if dtype == "float16" and math.isinf(bound):
            assert got[0] == math.inf  # results beyond float16's range
            continue
        above(got[0], bound), above(got[1], accumulation)
        product = math.sqrt(case.sums[3])
        above(got[2], (bound + accumulation) / product), above(got[3], product)
        assert call.flag[0] == 0 and call.counts.tolist() == [6, 3]  # there is no threshold


def test_the_gain_alone_holds_what_subnormal_bytes_add(host, host_cuda, rng):  # noqa: F811
    """Without outer scales: `device_certificate`'s numbers as they are."""
    for accumulate in ("promoted", "fast"):
        case = Case(rng, "bfloat16", accumulate, None, outer=False)
        x = certify.ActivationNorms(*(np.array([v]) for v in case.activations))
        w = certify.WeightNorms(*case.weight[:5].astype(np.float64))
        want = certify.device_certificate(x, w, k=case.k, columns=case.elements, dtype="bfloat16",
                                          accumulate=accumulate, factor=case.factor)  # fmt: skip
        got = Call(host_cuda, case).run(host)
        above(got[0], want.bound), above(got[1], want.accumulation)


def test_threshold(host, host_cuda, rng):  # noqa: F811
    case = Case(rng, "bfloat16", "fast", None)
    ratio = Call(host_cuda, case).run(host)[2]
    below = float(np.nextafter(np.float32(ratio), np.float32(0)))
    for threshold, flag in ((float(ratio), 0), (below, 1), (0.0, 1), (-1.0, 0)):
        call = Call(host_cuda, case, threshold)
        call.run(host)
        assert call.flag[0] == flag and call.counts.tolist() == [6, 3 + flag]
    call = Call(host_cuda, case, 0.5, flag=0, counts=0)
    call.run(host)
    assert call.flag[0] == 77 and call.counts.tolist() == [5, 3]


@pytest.mark.parametrize("spoil", ["error", "used", "weight", "zero weight", "product", "no product", "vast"])
def test_what_proves_nothing_is_infinite_and_over_every_threshold(host, host_cuda, rng, spoil):  # noqa: F811
    case = Case(rng, "bfloat16", "promoted", None, by_norms=spoil != "vast")
    sums = list(case.sums)
    if spoil in ("error", "used"):
        sums[2 if spoil == "error" else 1] = rng.choice([math.nan, math.inf])
    elif spoil == "weight":
        case.weight[rng.integers(5)] = math.inf
    elif spoil == "zero weight":  # 0 times infinity
        case.weight[4], sums[1], sums[2] = math.inf, 0.0, 0.0
    elif spoil == "vast":
        sums[0] = 2.0**255
    else:
        sums[3] = math.nan if spoil == "product" else 0.0
    call = Call(host_cuda, case, 1e30)
    got = call.run(host, sums)
    assert call.flag[0] == 1 and call.counts.tolist() == [6, 4]
    if "product" in spoil:
        assert np.isfinite(got[:2]).all()
        assert math.isnan(got[2]) == math.isnan(got[3]) == (spoil == "product")
    else:
        assert got[0] + got[1] == got[2] == math.inf and not np.isnan(got).any()


def test_nothing_multiplied(host, host_cuda, rng):  # noqa: F811
    case = Case(rng, "float32", "promoted", None)
    case.k = case.columns = case.elements = 0
    got = Call(host_cuda, case, outer_scale=0).run(host, [0.0, 0.0, 0.0, 0.0])
    assert got[:2].tolist() == [0, 0] and got[2] == math.inf
