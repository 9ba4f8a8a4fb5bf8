"""Convolutions by phases (`phases = 1`) on a GPU, forward and gradient, every configuration and the simple
kernels, against float64; fp4bf16_phase_weights against the reference's bits; what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from conv_kernels import Geometry, close, conv64, conv_args, dgrad64, poisoned, rows
from test_cuda_conv import Forward, Gradient, _free, backward, forward  # noqa: F401
from test_cuda_conv_arguments import FORWARD
from test_cuda_conv_sums import Results, of_integers, results
from test_cuda_gemm import BF16, ROUNDING, bf16, e4m3_bytes

from fp4bf16.python_ref.conv import phase_weights
from fp4bf16.python_ref.formats import E4M3


class Phased(Geometry):
    """Small pictures (n, h, w, c), result (n, 2 h, 2 w, o): the sides are those of the whole result."""

    @property
    def oh(self) -> int:
        return 2 * self.h

    @property
    def ow(self) -> int:
        return 2 * self.w


def small(n, h, w, c, o, kh=2, kw=2, top=1, left=1):
    return Phased(n, h, w, c, o, kh, kw, 1, top, left)


def placed(geo, a, b):
    """The convolution that makes phase (a, b), as a geometry whose result is h x w."""
    top, left = geo.top - a, geo.left - b
    return Geometry(geo.n, geo.h, geo.w, geo.c, geo.o, geo.kh, geo.kw, 1, top, left,
                    geo.kh - 1 - top, geo.kw - 1 - left)  # fmt: skip


def phases64(x, w, geo):
    """The result in float64, and the sum of magnitudes; w (o, 2, 2, kh, kw, c)."""
    y = np.zeros((2, geo.n, geo.oh, geo.ow, geo.o))
    for a, b in np.ndindex(2, 2):
        y[:, :, a::2, b::2] = conv64(x, w[:, a, b], placed(geo, a, b))
    return y


class PhasedForward(Forward):
    """`Forward` with weights (o, 4 * kh * kw * c) and scales for each phase of an output channel."""

    def __init__(self, library, gpu, rng, geo, c8=0, c16=0, *, col=None, **options):
        super().__init__(library, gpu, rng, geo, c8, c16, col=None, **options)
        o, k = geo.o, geo.kh * geo.kw
        self.w8 = e4m3_bytes(rng, 1, 4 * o * k, c8, options.get("data", "signed"))
        self.w8 = self.w8.reshape(o, 2, 2, geo.kh, geo.kw, c8)
        self.w16 = bf16(rng, 4 * o, k, c16).reshape(o, 2, 2, geo.kh, geo.kw, c16)
        if col:
            self.col = rng.uniform(0.5, 2, 4 * o if col == "vector" else 1).astype(np.float32)
        self.given |= dict(phases=1, col_scale_step=int(col == "vector"))
        self.upload()

    def expected(self):
        y8, size8 = phases64(E4M3[self.x8], E4M3[self.w8], self.geo)
        y16, size16 = phases64(self.x16, self.w16, self.geo)
        scale = np.ones((self.geo.n, self.geo.oh, self.geo.ow, self.geo.o))
        if self.image is not None:
            scale = scale * self.image[:, None, None, None].astype(np.float64)
        if self.col is not None:
            columns = np.broadcast_to(self.col.astype(np.float64), 4 * self.geo.o)
            columns = columns.reshape(self.geo.o, 2, 2)
            for a, b in np.ndindex(2, 2):
                scale[:, a::2, b::2] *= columns[:, a, b]
        if self.given["c8"]:
            y, size = y8 * scale + y16, size8 * scale + size16
        else:
            y, size = y16 * scale, size16 * scale
        y = y * self.given["alpha"]
        for extra in (self.bias, self.bias2):
            y = y if extra is None else y + extra.astype(np.float64)
        if self.image_bias is not None:
            y = y + self.image_bias[:, None, None].astype(np.float64)
        return y, size * abs(self.given["alpha"])


GEOMETRIES = {
    "one pixel": small(1, 1, 1, 16, 24),
    "ragged": small(3, 7, 5, 16, 40),
    "tall": small(2, 33, 1, 32, 64),
    "4x4": small(37, 4, 4, 64, 72),
    "channels of 2.5 tiles": small(2, 5, 9, 320, 72),
    "a tile and a bit": small(1, 16, 17, 48, 136),
    "3x2, shifted": small(2, 6, 9, 32, 32, 3, 2, 0, 2),
    "1x1": small(2, 9, 11, 64, 96, 1, 1, 0, 0),
    "2x4": small(2, 5, 6, 16, 200, 2, 4, 1, 2),
    "of the UNet": small(6, 16, 16, 256, 256),
    "more tiles than multiprocessors": small(45, 16, 16, 32, 136),
}
geometries = pytest.mark.parametrize("geo", GEOMETRIES.values(), ids=GEOMETRIES)


@pytest.mark.gpu
@forward
@geometries
@pytest.mark.parametrize("track", ["fp4", "fast", "bf16", "dual"])
def test_geometries(library, gpu, rng, function, geo, track):
    c8, c16 = {"bf16": (0, geo.c), "dual": (geo.c, 24)}.get(track, (geo.c, 0))
    p = PhasedForward(library, gpu, rng, geo, c8, c16, gap=geo.n % 2, accumulate=int(track == "fast"),
                      image="vector", col="vector", bias=1)  # fmt: skip
    p.check(function)


@pytest.mark.gpu
@forward
@pytest.mark.parametrize("d_dtype", [0, 1, 2])
def test_epilogue(library, gpu, rng, function, d_dtype):
    geo = small(5, 6, 7, 32, 72)
    for c8, c16, options in (
        (32, 0, dict(image="vector", col="vector", bias=0)),
        (0, 32, dict(image="scalar", bias=1, bias2=True)),
        (32, 16, dict(col="scalar", image_bias=1, alpha=-0.75)),
        (16, 8, dict(image="vector", col="vector", bias2=True, image_bias=0, gap=1)),
    ):
        options = dict(alpha=2.0**-6) | options
        PhasedForward(library, gpu, rng, geo, c8, c16, d_dtype=d_dtype, **options).check(function)


@pytest.mark.gpu
def test_a_result_that_the_copy_engine_does_not_store(library, gpu, rng):
    PhasedForward(library, gpu, rng, small(3, 8, 8, 32, 36), 32, 0, odd=True, bias=0).check("conv2d_simple")
    p = PhasedForward(library, gpu, rng, small(3, 8, 8, 32, 36), 32, 0, bias=0)
    y, size = p.expected()
    wide = poisoned(gpu, (3, 16, 16, 43), BF16)
    library.call("conv2d", p.args(d=wide.data + 6, d_strides=wide.strides), 0)
    got = wide.get()
    close([("odd", got[..., 3:39])], y, 2**-8 * size + ROUNDING[1] * abs(y) + 5e-5, 1e-5)
    assert (got[..., :3].view(np.uint16) == 0xA5A5).all()
    assert (got[..., 39:].view(np.uint16) == 0xA5A5).all()


@pytest.mark.gpu
@forward
def test_placed_into_wider_pictures(library, gpu, rng, function):
    """As the network does: a range of the channels that the next step reads."""
    p = PhasedForward(library, gpu, rng, small(3, 8, 8, 64, 128), 64, 0, col="vector")
    whole = poisoned(gpu, (3, 16, 16, 384), BF16)
    library.call(function, p.args(function, d=whole.data + 2 * 128, d_strides=whole.strides), 0)
    np.testing.assert_array_equal(whole.get()[..., 128:256], p.run(function))


@pytest.mark.gpu
@pytest.mark.parametrize("track", ["fast", "fp4", "bf16"])
def test_equals_the_convolution_of_upsampled_pictures(library, gpu, rng, track):
    """Integers, exact in every order: the launch with a 3x3 kernel on pictures of twice the size."""
    geo = small(5, 8, 8, 32, 72)
    w = rng.integers(-1, 2, (72, 3, 3, 32)).astype(np.float32)
    x = rng.integers(-2, 3, (5, 8, 8, 32)).astype(np.float32)
    kernels = phase_weights(w)
    bytes_of = {float(v): np.uint8(i) for i, v in enumerate(E4M3) if np.isfinite(v) and i < 0x80}
    bytes_of |= {-v: np.uint8(i | 0x80) for v, i in list(bytes_of.items()) if v}
    as_bytes = np.vectorize(bytes_of.__getitem__, otypes=[np.uint8])
    c8, c16 = (0, 32) if track == "bf16" else (32, 0)
    p = PhasedForward(library, gpu, rng, geo, c8, c16, accumulate=int(track == "fast"))
    q = Forward(library, gpu, rng, Geometry(5, 16, 16, 32, 72), c8, c16, accumulate=int(track == "fast"))
    if track == "bf16":
        p.x16, p.w16, q.w16 = x.astype(BF16), kernels.astype(BF16), w.astype(BF16)
        q.x16 = p.x16.repeat(2, 1).repeat(2, 2)
    else:
        p.x8, p.w8, q.w8 = as_bytes(x), as_bytes(kernels), as_bytes(w)
        q.x8 = p.x8.repeat(2, 1).repeat(2, 2)
    p.upload(), q.upload()
    want = q.run()
    for name, got in p.results():
        np.testing.assert_array_equal(got, want, name)


@pytest.mark.gpu
@forward
@pytest.mark.parametrize("track", ["fp4", "bf16"])
def test_twice_the_same_bits_and_in_any_batch(library, gpu, rng, function, track):
    geo = small(12, 8, 8, 128, 128)
    p = PhasedForward(library, gpu, rng, geo, *((128, 0) if track == "fp4" else (0, 128)), col="vector")
    first = p.run(function)
    np.testing.assert_array_equal(p.run(function), first)
    name = "x8" if track == "fp4" else "x16"
    x = getattr(p, name)
    setattr(p, name, np.concatenate([x[:5], x[11:4:-1]]))
    p.upload()
    np.testing.assert_array_equal(p.run(function)[:5], first[:5])


# ---- sums
@pytest.mark.gpu
@pytest.mark.parametrize("function", ["conv2d", "conv2d_simple"])
@pytest.mark.parametrize("track", ["fast", "promoted", "bf16"])
@pytest.mark.parametrize("side", [4, 8, 16])
def test_sums(library, gpu, rng, function, track, side):
    """Exact for small integers; each phase has parts of its own, and none is left unwritten."""
    geo = small(7, side, side, 16, 136)
    p = PhasedForward(library, gpu, rng, geo, *((0, 16) if track == "bf16" else (16, 0)),
                      accumulate=int(track == "fast"))  # fmt: skip
    of_integers(p, rng)
    taken = 0
    for name, found in results(p, function):
        if not found.parts:
            continue
        taken += 1
        assert function != "conv2d" or found.parts % 4 == 0, name
        got, want, _ = found.totals()
        np.testing.assert_array_equal(got, want, name)
    assert taken > 1


@pytest.mark.gpu
def test_sums_of_real_numbers(library, gpu, rng):
    p = PhasedForward(library, gpu, rng, small(9, 16, 16, 64, 256), 64, 0, accumulate=1, bias=0, col="vector")
    Results(p, "conv2d", 0).check_sums("chosen")


# ---- gradient
class PhasedGradient(Gradient):
    def __init__(self, library, gpu, rng, geo, **options):
        super().__init__(library, gpu, rng, geo, **options)
        self.w = bf16(rng, 4 * geo.o, geo.kh * geo.kw, geo.c).reshape(geo.o, 2, 2, geo.kh, geo.kw, geo.c)
        address, stride = rows(gpu, self.w.reshape(geo.o, -1), np.nan, self.gap, self.odd)
        self.given |= dict(phases=1, w16=address, w16_stride=stride)

    def check(self, function="conv2d_dgrad"):
        y = np.zeros((2, self.geo.n, self.geo.h, self.geo.w, self.geo.c))
        for a, b in np.ndindex(2, 2):
            y += dgrad64(self.g[:, a::2, b::2], self.w[:, a, b], placed(self.geo, a, b))
        y, size = y
        if self.residual is not None:
            y = y + self.residual.astype(np.float64)
        bound = 2**-14 * size + ROUNDING[self.dx_dtype] * abs(y) + 5e-5
        limit = (1e-6, 1e-5, 1e-5)[self.dx_dtype]
        for config in range(21) if function == "conv2d_dgrad" else (0,):
            try:
                found = self.run(function, config=config)
            except ValueError as error:  # numbered, but for other operands
                assert config > 0 and "config" in str(error)
                continue
            close([(f"{function} {config}", found)], y, bound, limit)


@pytest.mark.gpu
@backward
@geometries
def test_gradient_geometries(library, gpu, rng, function, geo):
    PhasedGradient(library, gpu, rng, geo, gap=geo.n % 2, residual=geo.n % 3).check(function)


@pytest.mark.gpu
@backward
@pytest.mark.parametrize("dx_dtype", [0, 1, 2])
def test_gradient_dtypes(library, gpu, rng, function, dx_dtype):
    PhasedGradient(library, gpu, rng, small(3, 6, 10, 40, 24), dx_dtype=dx_dtype, residual=1).check(function)


# ---- the weights
@pytest.mark.gpu
@pytest.mark.parametrize("o, c", [(1, 1), (3, 20), (256, 256), (8, 1000)])
def test_phase_weights(library, gpu, rng, o, c):
    w = rng.standard_normal((o, 3, 3, c)).astype(np.float32)
    w.reshape(-1)[0] = np.float32(-0.0)
    out = gpu.put(np.full((o, 2, 2, 2, 2, c), np.nan, np.float32))
    library.call("phase_weights", gpu.put(w), o, c, out, 0)
    got = gpu.get(out, (o, 2, 2, 2, 2, c), np.float32)
    np.testing.assert_array_equal(got.view(np.uint32), phase_weights(w).view(np.uint32))


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ((64, -1, 4, 64, 0), "o is -1"),
        ((64, 4, -1, 64, 0), "c is -1"),
        ((66, 4, 4, 64, 0), "weight is 2 bytes past a multiple of 4"),
        ((64, 4, 4, 0, 0), "out is NULL"),
    ],
)
def test_phase_weights_are_refused(library, arguments, sentence):
    with pytest.raises(ValueError, match=f"^phase_weights: {sentence}"):
        library.call("phase_weights", *arguments)
    library.call("phase_weights", 0, 0, 4, 0, 0)  # nothing to do


# ---- what is refused
SMALL = FORWARD | dict(n=2, h=4, w=4, oh=8, ow=8, o=16, kh=2, kw=2, top=1, left=1, phases=1,
                       d_strides=[1024, 128, 16])  # fmt: skip
MISTAKES = [
    (dict(phases=2), "phases is 2, but must be 0 to 1"),
    (dict(stride=2), "phases is 1 with a kernel of 2 x 2 and stride 2, but at most 8 taps and stride 1"),
    (dict(kh=3, kw=3), "phases is 1 with a kernel of 3 x 3 and stride 1"),
    (dict(oh=7), "phases is 1 and the result's sides are 7 x 8, but both must be even"),
    (dict(ow=9), "phases is 1 and the result's sides are 8 x 9, but both must be even"),
    (dict(residual=64, residual_strides=[1024, 128, 16]), "phases is 1 with a residual"),
    (dict(x16_on_output=1), "phases is 1 with x16_on_output = 1"),
]


@pytest.mark.parametrize("function", ["conv2d", "conv2d_simple"])
@pytest.mark.parametrize("fields, sentence", MISTAKES, ids=lambda x: str(x)[:40])
def test_mistakes_are_refused_before_any_launch(library, function, fields, sentence):
    with pytest.raises(ValueError, match=f"^{function}: {sentence}"):
        library.call(function, conv_args(library, function, **SMALL | fields), 0)


def test_a_weight_of_one_phase_is_too_short(library):
    """Rows of a weight must hold all four phases."""
    with pytest.raises(ValueError, match="row stride of w8 is 144 elements, less than its 256 columns"):
        library.call("conv2d", conv_args(library, "conv2d", **SMALL), 0)


def test_parts_by_shape(library):
    """Four times those of a phase, where it has any."""

    def parts(side, **fields):
        own = SMALL | dict(n=64, h=side, w=side, oh=2 * side, ow=2 * side, o=256, d_dtype=1, accumulate=1,
                           d_strides=[4 * side * side * 256, 512 * side, 256])  # fmt: skip
        return int(library.lib.fp4bf16_conv2d_sum_parts(conv_args(library, "conv2d", **own | fields)))

    assert parts(16) % 4 == 0 and parts(8) % 4 == 0 and parts(4) % 4 == 0
    if parts(16):
        assert parts(4) == 4
    assert parts(16, oh=31) == parts(16, stride=2) == parts(16, d_dtype=0) == 0
