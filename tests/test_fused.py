"""Compiled kernels of group norm, SiLU and column sums against the plain functions in float64."""

from __future__ import annotations

import numpy as np
import pytest

from fp4bf16.nn import fused
from fp4bf16.nn import ops as F

SIZES = [((3, 17, 24), 4), ((1, 1, 8), 8), ((2, 64, 32), 8), ((5, 300, 96), 1)]


@pytest.mark.parametrize("shape, groups", SIZES)
@pytest.mark.parametrize("act", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
def test_group_norm_kernel(shape, groups, act, shifted, rng):
    n, _, c = shape
    x, g = (rng.standard_normal(shape).astype(np.float32) * 2 + 1 for _ in range(2))
    w, b = rng.standard_normal(c).astype(np.float32), rng.standard_normal(c).astype(np.float32)
    s = rng.standard_normal((n, c)).astype(np.float32) if shifted else None
    y, mean, rstd = fused.group_norm(x, s, w, b, groups, 1e-6, act)
    wide = [None if a is None else a.astype(np.float64) for a in (x, s, w, b)]
    want, *stats = fused.plain_group_norm(*wide, groups, 1e-6, act)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=2e-5)
    got = fused.group_norm_vjp(g, x, s, w, b, groups, act, mean, rstd)
    exact = fused.plain_group_norm_vjp(g.astype(np.float64), *wide, groups, act, *stats)
    for a, e in zip(got, exact, strict=True):
        scale = np.abs(e).max()
        np.testing.assert_allclose(a, e, rtol=1e-3, atol=1e-5 * scale + 1e-5 * np.sqrt(shape[1]))


def test_group_norm_of_the_reference(rng):
    from fp4bf16.python_ref import norm

    x = rng.standard_normal((2, 4, 3, 8)).astype(np.float32) + 3
    w, b = rng.standard_normal(8).astype(np.float32), rng.standard_normal(8).astype(np.float32)
    want = norm.group_norm(x, 4, w, b, 1e-6, "silu")
    np.testing.assert_allclose(F.group_norm(x, w, b, 4, 1e-6, silu=True).data, want, rtol=1e-4, atol=1e-5)


def test_group_norm_far_from_zero(rng):
    """Two passes: a mean a thousand times the spread costs no accuracy beyond that of x itself."""
    x = (rng.standard_normal((1, 64, 16)) + 1000).astype(np.float32)
    y = fused.group_norm(x, None, np.ones(16, np.float32), np.zeros(16, np.float32), 2, 1e-6, False)[0]
    want = fused.plain_group_norm(x.astype(float), None, np.ones(16), np.zeros(16), 2, 1e-6, False)[0]
    np.testing.assert_allclose(y, want, atol=3e-4)


@pytest.mark.parametrize("size", [0, 1, 7, 40000, 70001])
def test_silu_kernel(size, rng):
    x, g = (rng.standard_normal(size).astype(np.float32) * 10 for _ in range(2))
    np.testing.assert_allclose(fused.silu(x), fused.plain_silu(x.astype(float)), rtol=1e-6, atol=1e-30)
    want = fused.plain_silu_vjp(g.astype(float), x.astype(float))
    np.testing.assert_allclose(fused.silu_vjp(g, x), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 3), (1, 5), (63, 32), (3, 70, 7), (4097, 12)])
def test_column_sums(shape, rng):
    x = (rng.standard_normal(shape) + 1).astype(np.float32)
    want = x.astype(np.float64).reshape(-1, shape[-1]).sum(0)
    np.testing.assert_allclose(fused.column_sums(x), want, rtol=2e-6, atol=2e-5)
    np.testing.assert_allclose(fused.column_sums(x.astype(np.float64)), want)


def test_silu_at_the_ends():
    x = np.array([-3e4, -200, -0.0, 200, 3e4, np.nan, np.inf], np.float32)
    y = fused.silu(x)
    assert np.abs(y[:3]).max() < 1e-30 and y[3] == 200 and y[4] == 3e4 and np.isnan(y[5]) and y[6] == np.inf


def test_read_only_inputs_compile_nothing(rng):
    from fp4bf16.backends import cpu_norm

    x, g = (rng.standard_normal((2, 4, 8)).astype(np.float32) for _ in range(2))
    w = np.ones(8, np.float32)
    kernels = (cpu_norm._silu, cpu_norm._silu_vjp, cpu_norm._group_norm, cpu_norm._group_norm_vjp)

    def run(*arrays):
        for a in arrays:
            a.flags.writeable = writeable
        x, g, w = arrays
        y, mean, rstd = fused.group_norm(x, None, w, w, 2, 1e-6, True)
        return (
            y,
            fused.group_norm_vjp(g, x, None, w, w, 2, True, mean, rstd)[0],
            fused.silu_vjp(g, x),
            fused.silu(x),
        )

    writeable = True
    want = run(x, g, w)
    before = [len(k.signatures) for k in kernels]
    writeable = False
    for a, b in zip(run(x, g, w), want, strict=True):
        assert np.array_equal(a, b)
    assert [len(k.signatures) for k in kernels] == before


def test_float64_and_strided_inputs_take_the_plain_path(rng):
    x = rng.standard_normal((4, 6))
    assert fused.silu(x).dtype == np.float64
    strided = x.astype(np.float32)[::2, ::-1]
    np.testing.assert_allclose(fused.silu(strided), fused.plain_silu(strided), rtol=1e-6)
