"""What fp4bf16_conv2d makes of its result beside it: sums by channel and the quantised copy, against float64
of the stored numbers and the bytes of the CPU's quantiser."""

from __future__ import annotations

import numpy as np
import pytest
from conv_kernels import Geometry, conv_args, point, poisoned
from host_conv import expanded as expanded_on_host
from host_cuda import host_cuda, put  # noqa: F401 (a fixture)
from test_cuda_conv import Forward, _free  # noqa: F401
from test_cuda_conv_arguments import FORWARD
from test_cuda_gemm import BF16

from fp4bf16 import device
from fp4bf16.backends import cuda, cuda_conv

FAST = 1  # accumulate
both = pytest.mark.parametrize("function", ["conv2d", "conv2d_simple"])
#: Pictures that tiles fill: one part of many, whole images of 256, 64, 32 and 16 pixels, a last tile that is
#: not full of them, channels that are no multiple of a tile, wide and high pictures.
WHOLE = {
    "32x32": Geometry(3, 32, 32, 16, 128),
    "16x16": Geometry(5, 16, 16, 16, 200),
    "8x8": Geometry(7, 8, 8, 16, 136),
    "4x4": Geometry(19, 4, 4, 16, 256),
    "4x8": Geometry(9, 4, 8, 16, 24),
    "64x4": Geometry(2, 64, 4, 16, 64),
    "128x64": Geometry(1, 128, 64, 16, 72),
    "48x16": Geometry(6, 48, 16, 16, 40),
    "stride 2": Geometry(3, 32, 16, 16, 48, stride=2),
    "1x1": point(4, 16, 16, 16, 264),
}
whole = pytest.mark.parametrize("geo", WHOLE.values(), ids=WHOLE)


def parts_of(library, args) -> int:
    return int(library.lib.fp4bf16_conv2d_sum_parts(args))


class Results:
    """A convolution with its sums and its quantised copy: `d` (n, oh, ow, o), `sums` (n, parts, o, 2)."""

    def __init__(self, p: Forward, function: str, number: int, exponent=None, sums=True):
        geo, gpu = p.geo, p.gpu
        shape = (geo.n, geo.oh, geo.ow, geo.o)
        held = poisoned(gpu, shape, BF16, p.gap, p.odd)
        fields = dict(d=held.data, d_strides=held.strides, config=number)
        self.parts = parts_of(p.loaded, p.args(function, **fields)) if sums else 0
        if self.parts:
            found = gpu.empty(geo.n * self.parts * geo.o * 8)
            fields["sums"] = found
        if exponent is not None:
            bytes_ = gpu.empty(int(np.prod(shape)))
            fields |= dict(expanded=bytes_, expanded_exponent=exponent)
        p.loaded.call(function, p.args(function, **fields), 0)
        self.d = held.get()
        if self.parts:
            self.sums = gpu.get(found, (geo.n, self.parts, geo.o, 2), np.float32)
        if exponent is not None:
            self.expanded = gpu.get(bytes_, shape, np.uint8)

    def totals(self):
        """(n, o, 2) float64: what is found and what the stored numbers give, and the sums of magnitudes."""
        v = self.d.astype(np.float64).reshape(len(self.d), -1, self.d.shape[3])
        want = np.stack([v.sum(1), (v * v).sum(1)], -1)
        return self.sums.astype(np.float64).sum(1), want, np.stack([abs(v).sum(1), want[..., 1]], -1)

    def check_sums(self, name: str) -> None:
        found, want, size = self.totals()
        # A part's FP32 sums: 16 products and what was there before are aligned to the largest and cut off at
        # 24 bits by the tensor cores, which loses under 17 * 2^-23 of the sum of magnitudes each time. The
        # simple kernel's FMAs in order lose under 2^-24 of it a pixel.
        rows = self.d.shape[1] * self.d.shape[2] / self.parts
        bound = 17 / 16 * rows * 2.0**-23 * size
        assert (abs(found - want) <= bound).all(), (
            f"{name}: sums are off by {(abs(found - want) / size).max():.1e}, not {rows * 2.0**-23:.1e}"
        )


def numbers(p: Forward, function: str):
    """(number, name) of every configuration; the simple kernel's parts are those of any."""
    args = p.args(function, d=1024, d_strides=[p.geo.oh * p.geo.ow * p.geo.o, p.geo.ow * p.geo.o, p.geo.o])
    number = 0
    while name := p.loaded._text(p.loaded.lib.fp4bf16_conv2d_config(args, number)):
        yield number, f"{function} {number} {name}"
        number += 1


def results(p: Forward, function: str, **options):
    """(name, Results) of each configuration that takes these operands."""
    for number, name in numbers(p, function):
        try:
            yield name, Results(p, function, number, **options)
        except ValueError as error:  # one for other operands
            assert number > 0 and "config" in str(error), f"{name}: {error}"


# ---- sums
def of_integers(p, rng) -> None:
    """Operands of -1, 0 and 1, few of the weights other than 0."""
    for name in ("x8", "w8", "x16", "w16"):
        at = getattr(p, name)
        few = rng.integers(-1, 2, at.shape) * (rng.random(at.shape) < (0.1 if "w" in name else 1))
        ones = np.array([0xB8, 0, 0x38], np.uint8)[few + 1] if at.dtype == np.uint8 else few.astype(BF16)
        setattr(p, name, ones)
    p.upload()


@pytest.mark.gpu
@both
@whole
@pytest.mark.parametrize("track", ["fast", "promoted", "bf16", "branch"])
def test_sums_of_integers_are_exact(library, gpu, rng, function, geo, track):
    """Small integers, whose sums FP32 holds whatever the order: one pixel in a wrong place shows."""
    c8, c16 = {"bf16": (0, 16), "branch": (16, 8)}.get(track, (16, 0))
    p = Forward(library, gpu, rng, geo, c8, c16, branch=track == "branch", accumulate=int(track == "fast"))
    of_integers(p, rng)
    taken = 0
    for name, found in results(p, function):
        assert abs(found.d.astype(np.float32)).max() <= 256, "integers that BF16 has"
        if not found.parts:
            continue
        taken += 1
        got, want, _ = found.totals()
        np.testing.assert_array_equal(got, want, name)
    assert taken > 1, "the configuration that is chosen, and at least that one by its number"


@pytest.mark.gpu
@both
@pytest.mark.parametrize("geo", [WHOLE["32x32"], WHOLE["8x8"], WHOLE["1x1"]], ids=str)
def test_sums_follow_the_whole_epilogue(library, gpu, rng, function, geo):
    for c8, c16, options in (
        (geo.c, 0, dict(image="vector", col="vector", bias=0, residual=1, accumulate=FAST)),
        (0, geo.c, dict(bias=1, image_bias=0, activation=1, gap=1)),
        (geo.c, 8, dict(branch=True, col="scalar", image_bias=1, residual=0, alpha=-0.75, bias2=True)),
        (geo.c, 24, dict(image_bias=2, residual=1, activation=2, gap=1)),
    ):
        p = Forward(library, gpu, rng, geo, c8, c16, **options)
        for name, found in results(p, function):
            if found.parts:
                found.check_sums(name)


@pytest.mark.gpu
@both
def test_sums_of_layers_and_more_tiles_than_multiprocessors(library, gpu, rng, function):
    for geo, options in (
        (Geometry(3, 16, 16, 256, 256), dict(residual=1, image_bias=1)),
        (Geometry(40, 32, 32, 16, 128), dict(residual=1)),
        (Geometry(300, 8, 8, 16, 256), dict()),
        (Geometry(700, 4, 4, 16, 256), dict(image_bias=1)),
        (Geometry(2, 16, 16, 512, 256), dict(bias=1)),
    ):
        for c8, accumulate in ((geo.c, FAST), (0, 0)):
            p = Forward(library, gpu, rng, geo, c8, 0 if c8 else geo.c, accumulate=accumulate, **options)
            found = Results(p, function, 0)
            assert found.parts > 0
            found.check_sums(str(geo))


@pytest.mark.gpu
def test_sums_of_a_range_of_channels_and_d_is_the_same(library, gpu, rng):
    """A result that is placed into wider pictures; what is stored does not depend on the sums."""
    geo = Geometry(3, 16, 16, 32, 128)
    p = Forward(library, gpu, rng, geo, 32, 0, residual=1)
    want = Results(p, "conv2d", 0, sums=False).d
    wide = poisoned(gpu, (3, 16, 16, 384), BF16)
    fields = dict(d=wide.data + 2 * 128, d_strides=wide.strides)
    parts = parts_of(library, p.args(**fields))
    sums = gpu.empty(3 * parts * 128 * 8)
    for _ in range(2):  # the same bits twice
        library.call("conv2d", p.args(sums=sums, **fields), 0)
        got = wide.get()
        np.testing.assert_array_equal(got[..., 128:256], want)
        first = gpu.get(sums, (3, parts, 128, 2), np.float32)
        np.testing.assert_array_equal(first, Results(p, "conv2d", 0).sums)
    poison = np.frombuffer(b"\xa5\xa5", BF16)[0]
    assert (got[..., :128] == poison).all()
    assert (got[..., 256:] == poison).all()


@pytest.mark.gpu
@both
def test_infinities_and_nan_stay_in_their_channel(library, gpu, rng, function):
    p = Forward(library, gpu, rng, Geometry(2, 16, 16, 16, 32), 16, 0, residual=1)
    p.residual[0, 3, 5, 7], p.residual[1, 15, 15, 8] = np.inf, np.nan
    p.upload()
    taken = 0
    for name, found in results(p, function):
        if not found.parts:  # a configuration for other operands; the simple kernel asks for no number
            continue
        taken += 1
        got, want, _ = found.totals()
        finite = np.isfinite(want)
        np.testing.assert_array_equal(np.isfinite(got), finite, name)
        assert got[0, 7, 0] == got[0, 7, 1] == np.inf, name
        assert finite.sum() == finite.size - 4
    assert taken > 1, "the configuration that is chosen, and at least that one by its number"


# ---- the quantised copy
def fitting(d: np.ndarray) -> int:
    """An exponent under which the largest of `d` fills the window."""
    top = abs(d.astype(np.float64)).max()
    return int(np.ceil(np.log2(top / 288)))


@pytest.mark.gpu
@both
@pytest.mark.parametrize("track", ["fp4", "bf16"])
def test_expanded_is_the_quantised_result(library, gpu, rng, function, track):
    for geo, options in (
        (Geometry(3, 32, 32, 16, 128), dict(residual=1)),
        (Geometry(2, 7, 5, 16, 48), dict(activation=1, gap=1)),  # ragged
        (Geometry(19, 4, 4, 16, 272), dict(image_bias=1)),
        (Geometry(2, 6, 6, 16, 16), dict(odd=function == "conv2d_simple")),
        (Geometry(61, 17, 16, 16, 144), dict()),  # more tiles than multiprocessors
    ):
        c8, c16 = (geo.c, 0) if track == "fp4" else (0, geo.c)
        p = Forward(library, gpu, rng, geo, c8, c16, **options)
        e = fitting(p.run(function))
        for exponent in (e, e - 3, e + 9):  # filled, saturated, the small ones vanish
            for name, found in results(p, function, exponent=exponent):
                want = expanded_on_host(found.d, exponent)
                np.testing.assert_array_equal(found.expanded, want, f"{name}, 2^{exponent}")


@pytest.mark.gpu
@both
@pytest.mark.parametrize("exponent", [-119, -100, 0, 120])
def test_expanded_of_special_numbers(library, gpu, rng, function, exponent):
    """NaN, infinities, zeros, subnormal and the largest numbers, and a range of magnitudes over blocks."""
    geo = Geometry(2, 16, 16, 16, 64)
    p = Forward(library, gpu, rng, geo, 16, 0, residual=1)
    p.w8[:] = 0  # the residual is the result
    words = rng.integers(0, 1 << 16, p.residual.shape, np.uint16)
    sizes = np.exp2(rng.integers(-130, 120, (*words.shape[:3], 1)))
    smooth = (rng.standard_normal(words.shape) * sizes).astype(BF16)
    p.residual = np.where(rng.random((*words.shape[:3], 1)) < 0.5, words.view(BF16), smooth)
    p.residual[0, 0] = 0
    p.upload()
    for name, found in results(p, function, exponent=exponent):
        finite = np.isfinite(found.d)
        np.testing.assert_array_equal(found.d[finite], p.residual[finite])
        np.testing.assert_array_equal(found.expanded, expanded_on_host(found.d, exponent), name)


@pytest.mark.gpu
def test_expanded_of_an_unaligned_result(library, gpu, rng):
    """A result that the copy engine cannot store."""
    p = Forward(library, gpu, rng, Geometry(2, 8, 8, 16, 32), 16, 0)
    wide = poisoned(gpu, (2, 8, 8, 36), BF16)
    fields = dict(d=wide.data + 2, d_strides=wide.strides)
    found = gpu.empty(2 * 8 * 8 * 32)
    assert parts_of(library, p.args(**fields)) == 0
    library.call("conv2d", p.args(**fields, expanded=found, expanded_exponent=-6), 0)
    got = gpu.get(found, (2, 8, 8, 32), np.uint8)
    np.testing.assert_array_equal(got, expanded_on_host(wide.get()[..., 1:33], -6))


@pytest.mark.gpu
def test_all_at_once_in_a_graph(library, gpu, rng):
    rt = gpu.rt
    p = Forward(library, gpu, rng, Geometry(5, 16, 16, 32, 128), 32, 0, residual=1, image_bias=1)
    want = Results(p, "conv2d", 0, exponent=-5)
    held = poisoned(gpu, want.d.shape, BF16)
    sums, found = gpu.empty(want.sums.nbytes), gpu.empty(want.expanded.nbytes)
    args = p.args(d=held.data, d_strides=held.strides, sums=sums, expanded=found, expanded_exponent=-5)
    stream = gpu.check(rt.cudaStreamCreateWithFlags(rt.cudaStreamNonBlocking))
    gpu.check(rt.cudaStreamBeginCapture(stream, rt.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal))
    library.call("conv2d", args, int(stream))
    graph = gpu.check(rt.cudaStreamEndCapture(stream))
    run = gpu.check(rt.cudaGraphInstantiate(graph, 0))
    gpu.check(rt.cudaGraphLaunch(run, stream))
    gpu.check(rt.cudaStreamSynchronize(stream))
    np.testing.assert_array_equal(held.get(), want.d)
    np.testing.assert_array_equal(gpu.get(sums, want.sums.shape, np.float32), want.sums)
    np.testing.assert_array_equal(gpu.get(found, want.d.shape, np.uint8), want.expanded)
    gpu.check(rt.cudaGraphExecDestroy(run))
    gpu.check(rt.cudaStreamDestroy(stream))


# ---- arguments
def layer(n=4, h=32, w=32, o=128, **fields):
    steps = [h * w * o, w * o, o]
    own = dict(n=n, h=h, w=w, oh=h, ow=w, o=o, d_dtype=1, d_strides=steps, accumulate=FAST)
    return FORWARD | own | fields


def hopper_or_none() -> bool:
    return all(found.compute_capability.startswith("9.") for found in cuda.devices())


def test_parts_by_shape(library):
    def parts(**fields):
        return parts_of(library, conv_args(library, "conv2d", **layer(**fields)))

    nothing = (
        dict(h=33, w=31), dict(h=3, w=3), dict(d_dtype=0), dict(d_dtype=2), dict(o=12), dict(d=66), dict(n=0),
        dict(stride=3), dict(c8=0, c16=0), dict(config=10**6), dict(kh=0), dict(c8=-1),
    )  # fmt: skip
    for fields in nothing:
        assert parts(**fields) == 0, fields
    assert parts_of(library, library.ffi.NULL) == 0
    if not hopper_or_none():
        assert parts() == 0
        return
    for side, least, most in ((32, 8, 16), (16, 2, 4), (8, 1, 1), (4, 1, 1)):
        found = parts(n=64, h=side, w=side)  # pictures enough to fill a tile
        assert max(1, least // 2) <= found <= most, (side, found)  # in turn a part is twice as large
        assert found == parts(n=64, h=side, w=side, d=0, x8=0, w8=0, x16=0, w16=0)  # no array is needed yet
    some = {parts(config=i) for i in range(1, 20)}
    assert {0, 8, 16} <= some, "tiles of 256 and of 128 rows, and configurations for other operands"


NONE = r"sums is given, but fp4bf16_conv2d_sum_parts is 0 for a result"
MISTAKES = [
    (dict(sums=64, d_dtype=0), NONE + r" \(4, 32, 32, 128\)"),
    (dict(sums=64, h=33, w=31), NONE + r" \(4, 33, 31, 128\)"),
    (dict(sums=68), "sums is 4 bytes past a multiple of 8"),
    (dict(expanded=72), "expanded is 8 bytes past a multiple of 16"),
    (dict(expanded=64, o=40), "expanded has blocks of 16 channels, but o is 40"),
    (dict(expanded=64, d_dtype=0), r"expanded is .* in BF16 \(dtype 1\), but d_dtype is 0"),
    (dict(expanded=64, d_dtype=2), r"expanded is .* in BF16 \(dtype 1\), but d_dtype is 2"),
    (dict(expanded=64, expanded_exponent=-120), "expanded_exponent is -120, but must be -119 to 120"),
    (dict(expanded=64, expanded_exponent=121), "expanded_exponent is 121, but must be -119 to 120"),
]


@both
@pytest.mark.parametrize("fields, sentence", MISTAKES, ids=lambda x: str(x)[:40])
def test_mistakes_are_refused_before_any_launch(library, function, fields, sentence):
    with pytest.raises(ValueError, match=f"^{function}: {sentence}"):
        library.call(function, conv_args(library, function, **layer(**fields)), 0)
    library.call(function, conv_args(library, function, **layer(**fields | dict(n=0))), 0)


# ---- the wrapper, without a GPU
def test_the_wrapper_passes_them_on(host_cuda, rng):  # noqa: F811
    fake, geo = host_cuda.fake, cuda_conv.Geometry(3, 16, 16, 16, 16, 32, 1, 1, 1, 0, 0)
    x, w = put(rng.standard_normal((3, 16, 16, 8)).astype(BF16)), rng.standard_normal((32, 1, 1, 8))
    operands = dict(x16=fake.wrap(x, "x"), w16=fake.wrap(put(w.astype(BF16)), "w"))
    d = device.empty((3, 16, 16, 32), "bfloat16", like=operands["x16"])
    parts = cuda_conv.sum_parts(geo, d, **operands)
    assert parts == 2
    sums = device.empty((3, parts, 32, 2), "float32", like=d)
    expanded = device.empty((3, 16, 16, 32), "uint8", like=d)
    more = dict(sums=sums, expanded=expanded, expanded_exponent=-5)
    for simple in (False, True):
        for made in (d, sums, expanded):
            made.owner.array.view(np.uint8)[...] = 0xA5
        cuda_conv.forward(geo, d, 0, simple=simple, **operands, **more)
        v = d.owner.array.astype(np.float64).reshape(3, 256, 32)
        np.testing.assert_allclose(sums.owner.array.sum(1)[..., 0], v.sum(1), atol=1e-3)
        np.testing.assert_allclose(sums.owner.array.sum(1)[..., 1], (v * v).sum(1), rtol=1e-5)
        np.testing.assert_array_equal(expanded.owner.array, expanded_on_host(d.owner.array, -5))
