"""What a convolution's launch sets up (boxes, taps, maps, parts of the sums, phases) and where its tiles lie,
by the library's own code on the host, with plain loops in place of the kernel: see conv_host.cu."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from conv_kernels import Geometry, conv64, conv_args, dgrad64
from host_code import HOPPER, compiled
from host_cuda import host_cuda  # noqa: F401  (a fixture)
from test_cuda_conv_phases import phases64, placed, small

from fp4bf16.interop import BFLOAT16
from fp4bf16.python_ref.formats import E4M3


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    library = compiled(tmp_path_factory, "conv_host", HOPPER)
    library.host_sum_parts.restype = ctypes.c_int64
    values = np.nan_to_num(E4M3.astype(np.float64))
    library.host_set_values(ctypes.c_void_p(values.ctypes.data))
    return library


class Case:
    """Small integers on both tracks, whose sums are exact; `got` for each configuration that takes them."""

    def __init__(self, host, fake, rng, geo, c8, c16, phases, gap=0, **fields):
        self.host, self.fake, self.geo, self.gap = host, fake, geo, gap
        kernel = (2, 2, geo.kh, geo.kw) if phases else (geo.kh, geo.kw)
        self.x8 = self.codes(rng, (geo.n, geo.h, geo.w, c8))
        self.w8 = self.codes(rng, (geo.o, *kernel, c8))
        self.x16, self.w16 = (rng.integers(-1, 2, s).astype(BFLOAT16)
                              for s in ((geo.n, geo.h, geo.w, c16), (geo.o, *kernel, c16)))  # fmt: skip
        self.scale = np.exp2(rng.integers(0, 2, geo.o * (4 if phases else 1))).astype(np.float32)
        self.bias = rng.integers(-2, 3, geo.o).astype(np.float32)
        self.phases = phases
        self.given = geo.fields() | dict(alpha=1.0, phases=int(phases), col_scale=self.scale.ctypes.data,
                                         col_scale_step=1, bias=self.bias.ctypes.data, d_dtype=1)  # fmt: skip
        for bits, x, w in ((8, self.x8, self.w8), (16, self.x16, self.w16)):
            if x.shape[3]:
                h, wide, c = x.shape[1:]
                self.given |= {f"c{bits}": c, f"x{bits}": x.ctypes.data, f"w{bits}": w.ctypes.data,
                               f"x{bits}_strides": [h * wide * c, wide * c, c],
                               f"w{bits}_stride": w[0].size}  # fmt: skip
        self.given |= fields

    @staticmethod
    def codes(rng, shape):
        return np.array([0xB8, 0, 0x38], np.uint8)[rng.integers(0, 3, shape)]

    def expected(self):
        work = phases64 if self.phases else conv64
        y8 = work(E4M3[self.x8], E4M3[self.w8], self.geo)[0]
        y16 = work(self.x16, self.w16, self.geo)[0]
        scale = np.ones(y8.shape)
        for a, b in np.ndindex(2, 2):
            own = self.scale.reshape(-1, 2, 2)[:, a, b] if self.phases else self.scale
            scale[:, a::2, b::2] = own
        y = y8 * scale + y16 if self.x8.shape[3] else y16 * scale
        return y + self.bias

    def results(self, sums=False):
        """(configuration, d, sums or None); the gaps beside d are looked at."""
        geo, width = self.geo, self.geo.o + 8 * self.gap
        dtype = BFLOAT16 if self.given["d_dtype"] == 1 else np.dtype(np.float32)
        for i in range(self.host.host_config_count()):
            whole = np.full((geo.n, geo.oh + self.gap, geo.ow + self.gap, width), np.nan, dtype)
            strides = [s // dtype.itemsize for s in whole.strides[:3]]
            given = self.given | dict(d=whole.ctypes.data, d_strides=strides)
            found = None
            if sums:
                args = conv_args(self.fake, "conv2d", **given)
                parts = self.host.host_sum_parts(self.at(args), i)
                found = np.zeros((geo.n, parts, geo.o, 2), np.float32) if parts else None
                given |= dict(sums=found.ctypes.data) if parts else {}
            args = conv_args(self.fake, "conv2d", **given)
            status = self.host.host_conv2d(self.at(args), i)
            if status == -1:
                continue
            assert status == 0, i
            d = whole[:, : geo.oh, : geo.ow, : geo.o].astype(np.float64)
            whole[:, : geo.oh, : geo.ow, : geo.o] = np.nan
            assert np.isnan(whole.astype(np.float32)).all(), f"configuration {i} wrote beside the result"
            yield i, d, found

    def at(self, args):
        return ctypes.c_void_p(int(self.fake.ffi.cast("uintptr_t", args)))


GEOMETRIES = {
    "3x3": (Geometry(3, 7, 5, 16, 40), False),
    "stride 2": (Geometry(2, 8, 6, 16, 24, stride=2), False),
    "16x16": (Geometry(2, 16, 16, 16, 136), False),
    "phases, ragged": (small(3, 7, 5, 16, 40), True),
    "phases, 4x4": (small(19, 4, 4, 16, 24), True),
    "phases, 16x16": (small(2, 16, 16, 16, 24), True),
    "phases, 8x8, wide": (small(5, 8, 8, 16, 264), True),
    "phases, 3x2": (small(2, 6, 9, 16, 16, 3, 2, 0, 2), True),
    "phases, one pixel": (small(1, 1, 1, 16, 8), True),
}
geometries = pytest.mark.parametrize("geo, phases", GEOMETRIES.values(), ids=GEOMETRIES)


@geometries
@pytest.mark.parametrize("track", ["fast", "promoted", "bf16", "dual"])
def test_every_configuration_places_its_tiles(host, host_cuda, geo, phases, track, rng):  # noqa: F811
    c8, c16 = {"bf16": (0, 16), "dual": (16, 8)}.get(track, (16, 0))
    p = Case(host, host_cuda, rng, geo, c8, c16, phases, geo.n % 2, accumulate=int(track == "fast"))
    want, taken = p.expected(), 0
    assert abs(want).max() < 256  # which BF16 holds
    for i, d, _ in p.results():
        np.testing.assert_array_equal(d, want, str(i))
        taken += 1
    assert taken >= 4


@geometries
def test_results_that_the_copy_engine_does_not_store(host, host_cuda, geo, phases, rng):  # noqa: F811
    p = Case(host, host_cuda, rng, geo, 16, 0, phases, 1, accumulate=1, d_dtype=0)
    for i, d, _ in p.results():
        np.testing.assert_array_equal(d, p.expected(), str(i))


@geometries
def test_sums(host, host_cuda, geo, phases, rng):  # noqa: F811
    """Every part is written, each pixel counts in one, and in one of its own phase."""
    p = Case(host, host_cuda, rng, geo, 16, 0, phases, accumulate=1)
    taken = 0
    for i, d, sums in p.results(sums=True):
        if sums is None:
            continue
        taken += 1
        np.testing.assert_array_equal(sums[..., 0].sum(1), d.sum((1, 2)), str(i))
        np.testing.assert_array_equal(sums[..., 1].sum(1), (d * d).sum((1, 2)), str(i))
        if phases:
            own = sums[..., 0].reshape(geo.n, 4, -1, geo.o).sum(2)
            for a, b in np.ndindex(2, 2):
                np.testing.assert_array_equal(own[:, 2 * a + b], d[:, a::2, b::2].sum((1, 2)), str(i))
    sides = geo.h * geo.w if phases else geo.oh * geo.ow
    assert (taken > 0) == (sides % 16 == 0 and geo.h == geo.w)


@geometries
def test_gradients(host, host_cuda, geo, phases, rng):  # noqa: F811
    kernel = (2, 2, geo.kh, geo.kw) if phases else (geo.kh, geo.kw)
    g = rng.integers(-1, 2, (geo.n, geo.oh, geo.ow, geo.o)).astype(BFLOAT16)
    w = rng.integers(-1, 2, (geo.o, *kernel, geo.c)).astype(BFLOAT16)
    if phases:
        want = sum(dgrad64(g[:, a::2, b::2], w[:, a, b], placed(geo, a, b))[0] for a, b in np.ndindex(2, 2))
    else:
        want = dgrad64(g, w, geo)[0]
    residual = rng.integers(-3, 4, want.shape).astype(BFLOAT16)
    c, taken = geo.c, 0
    for i in range(host.host_config_count()):
        dx = np.full(want.shape, np.nan, BFLOAT16)
        steps = [geo.h * geo.w * c, geo.w * c, c]
        args = conv_args(host_cuda, "conv2d_dgrad", **geo.fields(), c=c, phases=int(phases), g=g.ctypes.data,
                         g_strides=[geo.oh * geo.ow * geo.o, geo.ow * geo.o, geo.o], w16=w.ctypes.data,
                         w16_stride=w[0].size, dx=dx.ctypes.data, dx_strides=steps, dx_dtype=1,
                         residual=residual.ctypes.data, residual_dtype=1, residual_strides=steps)  # fmt: skip
        status = host.host_dgrad(ctypes.c_void_p(int(host_cuda.ffi.cast("uintptr_t", args))), i)
        if status == -1:
            continue
        assert status == 0, i
        taken += 1
        np.testing.assert_array_equal(dx.astype(np.float64), (want + residual).astype(BFLOAT16), str(i))
    assert taken == 3
