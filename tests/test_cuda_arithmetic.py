"""The CUDA quantisers' arithmetic compiled for the host: bit-equal to python_ref without a GPU."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest
from host_code import compiled
from test_cuda_quantize import CASES, FORMATS, RULES, data, spoil

from fp4bf16.backends import cpu_quantize
from fp4bf16.python_ref.quantize import expand, quantize


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    return compiled(tmp_path_factory, "quantize_host")


def _address(array):
    return ctypes.c_void_p(array.ctypes.data)


@pytest.mark.parametrize("fmt, rule, search, stochastic", CASES)
def test_rules(host, rng, fmt, rule, search, stochastic):
    rule_number = RULES.index(rule) if rule or fmt != "nvfp4" else RULES.index("te")
    for rows, k in ((7, 333), (33, 160)):
        x = data(rng, rows, k, np.float32)
        x = spoil(rng, x) if k % 2 else x.astype(ml_dtypes.bfloat16).astype(np.float32)
        for given in (None, int(rng.integers(-12, 12))) if fmt != "mxfp4" else (None,):
            seed = int(rng.integers(2**63))
            outer = None if fmt == "mxfp4" else "row" if given is None else given
            want = quantize(x, fmt, outer=outer, scale_rule=rule, search=search, nan="propagate",
                            rounding="stochastic" if stochastic else "nearest", seed=seed)  # fmt: skip
            source = np.where(np.isfinite(x), np.abs(x), 0).max(1)
            source = source if given is None else np.full(rows, np.float32(2.0**given))
            packed = np.empty_like(want.packed)
            scale = np.empty((rows, -(-k // (32 if fmt == "mxfp4" else 16))), np.uint8)
            outers, sums = np.empty(rows, np.float32), np.zeros((rows, 3))
            counts = np.zeros(5, np.int32)
            host.host_rows(_address(x), ctypes.c_int64(rows), ctypes.c_int64(k), FORMATS[fmt], rule_number,
                           search == "full", stochastic, ctypes.c_uint64(seed), _address(source),
                           given is not None, _address(packed), _address(scale), _address(outers),
                           _address(sums), _address(counts))  # fmt: skip
            np.testing.assert_array_equal(packed, want.packed)
            if fmt != "fp8":
                np.testing.assert_array_equal(scale, want.block_scale)
            if want.outer_scale is not None:
                np.testing.assert_array_equal(outers, np.broadcast_to(want.outer_scale, (rows, 1))[:, 0])
            if not stochastic:
                decode = None if given is None else source
                cpu = cpu_quantize.quantize_rows(x, fmt, decode, rule, search, "propagate")
                np.testing.assert_array_equal(counts, cpu.counts)
                np.testing.assert_allclose(sums, cpu.sums, rtol=1e-12)


@pytest.mark.parametrize("search", ["full", "fast"])
def test_packed_half_search(host, rng, search):
    """Every mantissa of a block's largest, elements on and around midpoints, the octaves of the window."""
    for shift in range(-15, 4):
        n = 2048
        exponent = 127 + shift + rng.integers(-12, 1, (n, 16))
        bits = exponent << 7 | rng.integers(0, 128, (n, 16))
        bits[:, 0] = (127 + shift) << 7 | np.arange(n) % 128
        bits = np.where(rng.random((n, 16)) < 0.5, bits | 0x8000, bits).astype(np.uint16)
        e = -4  # 6 * 64 * 2^-4 = 24
        want = quantize(bits.view(ml_dtypes.bfloat16).astype(np.float32), outer=e, search=search)
        packed, expanded, scale = (np.empty((n, *shape), np.uint8) for shape in ((8,), (16,), ()))
        host.host_blocks(_address(bits), ctypes.c_int64(n), search == "full", ctypes.c_float(2.0**e),
                         *map(_address, (packed, scale, expanded)))  # fmt: skip
        np.testing.assert_array_equal(scale, want.block_scale[:, 0])
        np.testing.assert_array_equal(packed, want.packed)
        np.testing.assert_array_equal(expanded, expand(want))
