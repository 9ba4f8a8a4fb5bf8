"""fp4bf16_conv2d, its gradient in the pictures and their simple kernels on a GPU against float64 of the
decoded operands."""

from __future__ import annotations

import numpy as np
import pytest
from conv_kernels import (
    GEOMETRIES,
    Geometry,
    Pictures,
    close,
    conv64,
    conv_args,
    dgrad64,
    point,
    poisoned,
    rows,
)
from test_cuda_gemm import ACTIVATIONS, BF16, DTYPES, NAN8, ROUNDING, bf16, e4m3_bytes

from fp4bf16.python_ref.formats import E4M3


@pytest.fixture(autouse=True)
def _free(request):
    yield
    if "gpu" in request.fixturenames:
        request.getfixturevalue("gpu").free()


class Forward:
    """One convolution: operands on the host and on the device, arguments, float64 result.

    c8, c16: channels of either track; `branch`: X16 lies on the result's grid.
    """

    def __init__(self, library, gpu, rng, geo, c8=0, c16=0, *, branch=False, image=None, col=None, bias=None,
                 bias2=False, image_bias=None, residual=None, d_dtype=1, gap=0, odd=False, data="signed",
                 **fields):  # fmt: skip
        self.loaded, self.gpu, self.geo = library, gpu, geo
        self.d_dtype, self.gap, self.odd = d_dtype, gap, odd
        n, h, w, o, k = geo.n, geo.h, geo.w, geo.o, (geo.kh, geo.kw)
        grid, k16 = ((geo.oh, geo.ow), (1, 1)) if branch else ((h, w), k)
        self.geo16 = point(n, *grid, c16, o) if branch else geo
        self.x8 = e4m3_bytes(rng, 1, n * h * w, c8, data).reshape(n, h, w, c8)
        self.w8 = e4m3_bytes(rng, 1, o * k[0] * k[1], c8, data).reshape(o, *k, c8)
        self.x16 = bf16(rng, n, grid[0] * grid[1], c16, data).reshape(n, *grid, c16)
        self.w16 = bf16(rng, o, k16[0] * k16[1], c16, data).reshape(o, *k16, c16)
        shape = (n, geo.oh, geo.ow, o)
        steps = {"scalar": 0, "vector": 1}
        self.image = self.col = self.bias = self.bias2 = self.image_bias = self.residual = None
        if image:
            self.image = np.exp2(rng.integers(-3, 4, n if image == "vector" else 1)).astype(np.float32)
        if col:
            self.col = rng.uniform(0.5, 2, o if col == "vector" else 1).astype(np.float32)
        if bias is not None:
            self.bias = (10 * rng.standard_normal(o)).astype(DTYPES[bias])
        if bias2:
            self.bias2 = (10 * rng.standard_normal(o)).astype(DTYPES[bias or 0])
        if image_bias is not None:
            self.image_bias = (10 * rng.standard_normal((n, o))).astype(DTYPES[image_bias])
        if residual is not None:
            self.residual = (10 * rng.standard_normal(shape)).astype(DTYPES[residual])
        self.given = geo.fields() | dict(
            c8=c8, c16=c16, x16_on_output=int(branch), alpha=1.0, d_dtype=d_dtype, bias_dtype=bias or 0,
            image_bias_dtype=image_bias or 0, residual_dtype=residual or 0,
            image_scale_step=steps.get(image, 0), col_scale_step=steps.get(col, 0),
        ) | fields  # fmt: skip
        self.upload()

    def upload(self) -> None:
        gpu, given, gap, odd = self.gpu, self.given, self.gap, self.odd
        for name, x, w in (("8", self.x8, self.w8), ("16", self.x16, self.w16)):
            if x.shape[3] == 0:
                continue
            fill = NAN8 if name == "8" else np.nan
            held = Pictures(gpu, x, fill, gap, odd)
            address, stride = rows(gpu, w.reshape(len(w), -1), fill, gap, odd)
            given |= {f"x{name}": held.data, f"x{name}_strides": held.strides, f"w{name}": address,
                      f"w{name}_stride": stride}  # fmt: skip
        for name, x in (("image_scale", self.image), ("col_scale", self.col), ("bias", self.bias),
                        ("bias2", self.bias2)):  # fmt: skip
            if x is not None:
                given[name] = gpu.put(x)
        if self.image_bias is not None:
            given["image_bias"], given["image_bias_stride"] = rows(gpu, self.image_bias, np.nan, gap, odd)
        if self.residual is not None:
            held = Pictures(gpu, self.residual, np.nan, gap, odd)
            given |= dict(residual=held.data, residual_strides=held.strides)

    def args(self, function="conv2d", **fields):
        return conv_args(self.loaded, function, **self.given | fields)

    def run(self, function="conv2d", stream=0, **fields) -> np.ndarray:
        geo = self.geo
        d = poisoned(self.gpu, (geo.n, geo.oh, geo.ow, geo.o), DTYPES[self.d_dtype], self.gap, self.odd)
        self.loaded.call(function, self.args(function, d=d.data, d_strides=d.strides, **fields), stream)
        return d.get()

    def results(self, function="conv2d"):
        """(name, D) of every configuration that takes these arguments; the simple kernel has one."""
        if function != "conv2d":
            yield function, self.run(function)
            return
        geo = self.geo
        pixels = [geo.oh * geo.ow * geo.o, geo.ow * geo.o, geo.o]
        args, number, taken = self.args(d=1024, d_strides=pixels), 0, 0  # d is not written
        while name := self.loaded._text(self.loaded.lib.fp4bf16_conv2d_config(args, number)):
            try:
                yield f"{number} {name}", self.run(function, config=number)
                taken += number > 0
            except ValueError as error:  # numbered, but for other operands
                assert number > 0 and "config" in str(error), f"{number} {name}: {error}"
            number += 1
        assert taken or "simple" in self.loaded._text(self.loaded.lib.fp4bf16_conv2d_config(args, 0))

    def expected(self):
        """float64 D, and the sum of |products| in its units: what an accumulation error is relative to."""
        given = self.given
        y, size = conv64(E4M3[self.x8], E4M3[self.w8], self.geo)
        y16, size16 = conv64(self.x16, self.w16, self.geo16)
        scale = np.ones(1) if self.image is None else self.image[:, None, None, None].astype(np.float64)
        scale = scale if self.col is None else scale * self.col
        if given["c8"]:
            y, size = y * scale + y16, size * scale + size16
        else:
            y, size = y16 * scale, size16 * scale
        y, size = y * given["alpha"], size * abs(given["alpha"])
        for b in (self.bias, self.bias2):
            y = y if b is None else y + b.astype(np.float64)
        if self.image_bias is not None:
            y = y + self.image_bias[:, None, None].astype(np.float64)
        y = ACTIVATIONS[given.get("activation", 0)](y)
        return y if self.residual is None else y + self.residual.astype(np.float64), size

    def check(self, function="conv2d") -> None:
        y, size = self.expected()
        # What FP8 tensor cores lose, by python_ref.accumulator on these operands at K = 9 * 384: promoted and
        # fast less than 6e-4 of the sum of |products|; as a whole, by calc_diff, fast 6e-7, of which the
        # limit is five times. BF16 ones and FP32 FMAs in order lose far less.
        fast = self.given.get("accumulate", 0) == 1 and self.given["c8"] > 0 and function == "conv2d"
        part = 2**-9 if self.given["c8"] and function == "conv2d" else 2**-14
        close(self.results(function), y, 1.2 * part * size + ROUNDING[self.d_dtype] * abs(y) + 5e-5,
              (3e-6 if fast else 1e-6, 1e-5, 1e-5)[self.d_dtype])  # fmt: skip


class Gradient:
    """One gradient in the pictures."""

    def __init__(self, library, gpu, rng, geo, *, residual=None, dx_dtype=1, gap=0, odd=False):
        self.loaded, self.gpu, self.geo = library, gpu, geo
        self.dx_dtype, self.gap, self.odd = dx_dtype, gap, odd
        self.g = bf16(rng, geo.n, geo.oh * geo.ow, geo.o).reshape(geo.n, geo.oh, geo.ow, geo.o)
        self.w = bf16(rng, geo.o, geo.kh * geo.kw, geo.c).reshape(geo.o, geo.kh, geo.kw, geo.c)
        held = Pictures(gpu, self.g, np.nan, gap, odd)
        address, stride = rows(gpu, self.w.reshape(geo.o, geo.kh * geo.kw * geo.c), np.nan, gap, odd)
        self.given = geo.fields() | dict(c=geo.c, g=held.data, g_strides=held.strides, w16=address,
                                         w16_stride=stride, dx_dtype=dx_dtype)  # fmt: skip
        self.residual = None
        if residual is not None:
            shape = (geo.n, geo.h, geo.w, geo.c)
            self.residual = (10 * rng.standard_normal(shape)).astype(DTYPES[residual])
            held = Pictures(gpu, self.residual, np.nan, gap, odd)
            self.given |= dict(residual=held.data, residual_strides=held.strides, residual_dtype=residual)

    def run(self, function="conv2d_dgrad", stream=0, **fields):
        geo = self.geo
        dx = poisoned(self.gpu, (geo.n, geo.h, geo.w, geo.c), DTYPES[self.dx_dtype], self.gap, self.odd)
        fields = self.given | dict(dx=dx.data, dx_strides=dx.strides) | fields
        self.loaded.call(function, conv_args(self.loaded, function, **fields), stream)
        return dx.get()

    def check(self, function="conv2d_dgrad"):
        y, size = dgrad64(self.g, self.w, self.geo)
        if self.residual is not None:
            y = y + self.residual.astype(np.float64)
        bound = 2**-14 * size + ROUNDING[self.dx_dtype] * abs(y) + 5e-5
        close([(function, self.run(function))], y, bound, (1e-6, 1e-5, 1e-5)[self.dx_dtype])


forward = pytest.mark.parametrize("function", ["conv2d", "conv2d_simple"])
backward = pytest.mark.parametrize("function", ["conv2d_dgrad", "conv2d_dgrad_simple"])
geometries = pytest.mark.parametrize("geo", GEOMETRIES.values(), ids=GEOMETRIES)


# ---- forward
@pytest.mark.gpu
@forward
@geometries
@pytest.mark.parametrize("track", ["fp4", "bf16", "dual", "branch"])
def test_geometries(library, gpu, rng, function, geo, track):
    c8, c16 = {"fp4": (geo.c, 0), "bf16": (0, geo.c), "dual": (geo.c, 24), "branch": (geo.c, 40)}[track]
    Forward(library, gpu, rng, geo, c8, c16, branch=track == "branch", gap=geo.n % 2).check(function)


@pytest.mark.gpu
@forward
@pytest.mark.parametrize("d_dtype", [0, 1, 2])
@pytest.mark.parametrize("activation", [0, 1, 2])
def test_epilogue(library, gpu, rng, function, d_dtype, activation):
    geo = Geometry(5, 6, 7, 32, 72)
    for c8, c16, options in (
        (32, 0, dict(image="vector", col="vector", bias=0, residual=2)),
        (0, 32, dict(image="scalar", bias=1, bias2=True)),
        (32, 16, dict(branch=True, col="scalar", image_bias=1, residual=0, alpha=-0.75)),
        (16, 8, dict(image="vector", col="vector", bias2=True, image_bias=0, residual=1, gap=1)),
    ):
        p = Forward(library, gpu, rng, geo, c8, c16, activation=activation, d_dtype=d_dtype,
                    **dict(alpha=2.0**-6) | options)  # fmt: skip
        p.check(function)


@pytest.mark.gpu
@forward
def test_layers_of_the_unet(library, gpu, rng, function):
    for geo, c8, c16, options in (
        (Geometry(3, 32, 32, 128, 128), 128, 0, dict(image_bias=1)),
        (Geometry(5, 16, 16, 512, 256), 512, 32, dict(branch=True, residual=1)),
        (Geometry(19, 4, 4, 256, 256), 256, 512, dict(branch=True)),
        (Geometry(9, 8, 8, 256, 256), 0, 256, dict(bias2=True)),
        (Geometry(4, 32, 32, 8, 128), 0, 8, dict()),
        (Geometry(2, 32, 32, 128, 3), 0, 128, dict(d_dtype=0)),
    ):
        p = Forward(library, gpu, rng, geo, c8, c16, image="vector", col="vector", bias=1, **options)
        p.check(function)


@pytest.mark.gpu
@forward
def test_fast_accumulation(library, gpu, rng, function):
    for c16 in (0, 32):
        geo = Geometry(3, 9, 8, 384, 200)
        Forward(library, gpu, rng, geo, 384, c16, branch=True, accumulate=1, col="vector").check(function)


@pytest.mark.gpu
@forward
@pytest.mark.parametrize("data", ["positive", "heavy"])
def test_data(library, gpu, rng, function, data):
    Forward(library, gpu, rng, Geometry(2, 8, 8, 256, 64), 256, 0, data=data).check(function)
    Forward(library, gpu, rng, Geometry(2, 8, 8, 128, 64), 0, 128, data=data).check(function)


@pytest.mark.gpu
def test_more_tiles_than_multiprocessors(library, gpu, rng):
    """Several tiles a thread block: what one leaves behind must not reach the next."""
    for c8, c16, options in ((64, 0, dict(residual=1)), (0, 64, dict()), (32, 16, dict(d_dtype=0))):
        p = Forward(library, gpu, rng, Geometry(61, 33, 32, 64, 136), c8, c16, image="vector", **options)
        p.check()


@pytest.mark.gpu
def test_simple_kernel_takes_any_alignment_stride_and_padding(library, gpu, rng):
    for geo in (Geometry(2, 11, 7, 5, 3, 4, 3, 3, 5, -1, 2, 4), Geometry(1, 3, 3, 7, 9, 5, 5, 1, 9, 9, 9, 9)):
        Forward(library, gpu, rng, geo, geo.c, 3, branch=True, odd=True, gap=1, image="vector").check(
            "conv2d_simple"
        )
        Gradient(library, gpu, rng, geo, odd=True, gap=1, residual=2).check("conv2d_dgrad_simple")


@pytest.mark.gpu
@forward
def test_residual_in_place(library, gpu, rng, function):
    geo = Geometry(2, 8, 8, 32, 64)
    p = Forward(library, gpu, rng, geo, 32, 0, residual=1)
    want = p.run(function)
    d = Pictures(gpu, p.residual, np.nan)
    library.call(function, p.args(function, residual=d.data, residual_strides=d.strides, d=d.data,
                                  d_strides=d.strides), 0)  # fmt: skip
    np.testing.assert_array_equal(d.get(), want)


@pytest.mark.gpu
@forward
def test_placed_into_wider_pictures(library, gpu, rng, function):
    """A result beside another in one buffer: concatenation."""
    geo = Geometry(3, 8, 8, 64, 128)
    p = Forward(library, gpu, rng, geo, 64, 0)
    whole = poisoned(gpu, (3, 8, 8, 384), BF16)
    for i in range(3):
        data = whole.data + 2 * 128 * i
        library.call(function, p.args(function, d=data, d_strides=whole.strides, alpha=2.0**i), 0)
    one = p.run(function)
    want = np.concatenate([one * BF16.type(2**i) for i in range(3)], axis=3)
    np.testing.assert_array_equal(whole.get(), want)


@pytest.mark.gpu
@forward
def test_without_anything_to_sum(library, gpu, rng, function):
    """No channels, or pictures without pixels: the epilogue of zero."""
    p = Forward(library, gpu, rng, Geometry(2, 3, 4, 0, 24), bias=1, residual=0, activation=1)
    p.check(function)
    p = Forward(library, gpu, rng, Geometry(2, 0, 4, 16, 24, 1, 1, 1, 1, 0, 2, 0), 16, bias=0)
    assert p.geo.oh == 3
    np.testing.assert_array_equal(p.run(function), np.broadcast_to(p.bias.astype(BF16), (2, 3, 4, 24)))


@pytest.mark.gpu
@forward
@pytest.mark.parametrize("track", ["fp4", "bf16", "branch"])
def test_twice_the_same_bits(library, gpu, rng, function, track):
    c8, c16 = {"fp4": (256, 0), "bf16": (0, 256), "branch": (256, 32)}[track]
    geo = Geometry(7, 9, 9, 256, 264)
    p = Forward(library, gpu, rng, geo, c8, c16, branch=track == "branch", image="vector")
    for (name, first), (_, again) in zip(p.results(function), p.results(function), strict=True):
        assert first.tobytes() == again.tobytes(), name


@pytest.mark.gpu
@pytest.mark.parametrize("track", ["fp4", "fast", "bf16", "branch"])
@pytest.mark.parametrize("residual", [None, 1])
def test_several_tiles_a_multiprocessor(library, gpu, rng, track, residual):
    """Two to five tiles follow each other, of one k-tile and of nine or more, also where warpgroups take them
    in turn: an odd number of them, and more of one warpgroup than of the other.
    """
    c16 = {"bf16": 40, "branch": 72}.get(track, 0)
    for geo, c8 in ((Geometry(40, 32, 32, 16, 136), 16), (point(46, 32, 32, 48, 128), 48),
                    (Geometry(33, 16, 32, 144, 256), 144)):  # fmt: skip
        p = Forward(library, gpu, rng, geo, 0 if track == "bf16" else c8, c16, branch=track == "branch",
                    col="vector", residual=residual, accumulate=int(track != "fp4"))  # fmt: skip
        p.check()
        gpu.free()


@pytest.mark.gpu
@forward
def test_a_picture_does_not_depend_on_its_batch(library, gpu, rng, function):
    """The first pictures of a batch of 12 as a batch of 12 with others behind them: the same bits."""
    p = Forward(library, gpu, rng, Geometry(12, 8, 8, 128, 128), 128, 0)
    first = p.run(function)
    p.x8 = np.concatenate([p.x8[:5], p.x8[11:4:-1]])
    p.upload()
    np.testing.assert_array_equal(p.run(function)[:5], first[:5])


# ---- gradient in the pictures
@pytest.mark.gpu
@backward
@geometries
def test_gradient_geometries(library, gpu, rng, function, geo):
    Gradient(library, gpu, rng, geo, gap=geo.n % 2).check(function)


@pytest.mark.gpu
@backward
@pytest.mark.parametrize("dx_dtype", [0, 1, 2])
@pytest.mark.parametrize("residual", [None, 0, 1, 2])
def test_gradient_dtypes_and_residual(library, gpu, rng, function, dx_dtype, residual):
    for stride in (1, 2):
        geo = Geometry(3, 6, 10, 40, 24, stride=stride)
        Gradient(library, gpu, rng, geo, residual=residual, dx_dtype=dx_dtype, gap=stride % 2).check(function)


@pytest.mark.gpu
@backward
def test_gradients_of_the_unet(library, gpu, rng, function):
    for geo in (Geometry(3, 32, 32, 128, 128), Geometry(5, 16, 16, 512, 256), Geometry(21, 4, 4, 256, 256),
                Geometry(3, 32, 32, 128, 128, stride=2), point(3, 16, 16, 384, 256),
                Geometry(2, 32, 32, 128, 8), Geometry(40, 16, 16, 256, 256)):  # fmt: skip
        Gradient(library, gpu, rng, geo, residual=1).check(function)


@pytest.mark.gpu
@backward
def test_gradient_twice_the_same_bits(library, gpu, rng, function):
    for stride in (1, 2):
        p = Gradient(library, gpu, rng, Geometry(7, 9, 9, 136, 264, stride=stride), residual=0)
        assert p.run(function).tobytes() == p.run(function).tobytes()


@pytest.mark.gpu
@backward
def test_gradient_without_anything_to_sum(library, gpu, rng, function):
    p = Gradient(library, gpu, rng, Geometry(2, 3, 4, 16, 0), residual=0, dx_dtype=0)
    np.testing.assert_array_equal(p.run(function), p.residual)


# ---- graphs, misuse
@pytest.mark.gpu
def test_captured_in_a_graph_and_replayed(library, gpu, rng):
    rt = gpu.rt
    p = Forward(library, gpu, rng, Geometry(3, 9, 8, 64, 72), 64, 32, branch=True, image="vector", bias=1)
    q = Gradient(library, gpu, rng, Geometry(3, 9, 8, 64, 72, stride=2))
    d, dx = poisoned(gpu, (3, 9, 8, 72), BF16), poisoned(gpu, (3, 9, 8, 64), BF16)
    stream = gpu.check(rt.cudaStreamCreateWithFlags(rt.cudaStreamNonBlocking))
    gpu.check(rt.cudaStreamBeginCapture(stream, rt.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal))
    library.call("conv2d", p.args(d=d.data, d_strides=d.strides), int(stream))
    given = q.given | dict(dx=dx.data, dx_strides=dx.strides)
    library.call("conv2d_dgrad", conv_args(library, "conv2d_dgrad", **given), int(stream))
    graph = gpu.check(rt.cudaStreamEndCapture(stream))
    run = gpu.check(rt.cudaGraphInstantiate(graph, 0))
    gpu.check(rt.cudaGraphLaunch(run, stream))
    gpu.check(rt.cudaStreamSynchronize(stream))
    np.testing.assert_array_equal(d.get(), p.run())
    np.testing.assert_array_equal(dx.get(), q.run())
    gpu.check(rt.cudaGraphExecDestroy(run))
    gpu.check(rt.cudaStreamDestroy(stream))


@pytest.mark.gpu
def test_misaligned_pictures_are_refused_and_nothing_sticks(library, gpu, rng):
    if int(library.device(0).compute_capability.split(".")[0]) != 9:
        pytest.skip("only TMA on sm_90 needs 16 bytes")
    p = Forward(library, gpu, rng, Geometry(2, 8, 8, 64, 64), 64, 64)
    for fields, sentence in (
        (dict(x8=p.given["x8"] + 4), "x8 is 4 bytes past a multiple of 16"),
        (dict(w16=p.given["w16"] + 8), "w16 is 8 bytes past a multiple of 16"),
        (dict(x8_strides=[4096, 520, 64]), r"x8_strides\[1\] is 520 bytes.* multiple of 16"),
        (dict(x16_strides=[4096, 512, 68]), r"x16_strides\[2\] is 136 bytes.* multiple of 16"),
        (dict(w8_stride=584), "row stride of w8 is 584 bytes.* multiple of 16"),
        (dict(config=10**6), "no configuration 1000000"),
    ):
        with pytest.raises(ValueError, match=sentence):
            p.run(**fields)
        p.check()
    q = Gradient(library, gpu, rng, Geometry(2, 8, 8, 64, 64))
    with pytest.raises(ValueError, match="g is 2 bytes past a multiple of 16"):
        q.run(g=q.given["g"] + 2)
    q.check()
    gpu.check(gpu.rt.cudaDeviceSynchronize())
