"""fp4bf16_conv2d_wgrad and its simple kernel on a GPU against float64 of the rounded operands."""

from __future__ import annotations

import numpy as np
import pytest
from conv_kernels import GEOMETRIES, Geometry, Pictures, close, conv_args, point, rows, wgrad64
from test_cuda_gemm import POISON, bf16

pytestmark = pytest.mark.gpu
functions = pytest.mark.parametrize("function", ["conv2d_wgrad", "conv2d_wgrad_simple"])


@pytest.fixture(autouse=True)
def _free(gpu):
    yield
    gpu.free()


class Weights:
    """One gradient in the weights: operands, what dw and db hold before, arguments, float64 result."""

    def __init__(self, library, gpu, rng, geo, *, bias=True, accumulate=False, gap=0, odd=False,
                 data="signed"):  # fmt: skip
        self.loaded, self.gpu, self.geo, self.accumulate = library, gpu, geo, accumulate
        self.g = bf16(rng, geo.n, geo.oh * geo.ow, geo.o, data).reshape(geo.n, geo.oh, geo.ow, geo.o)
        self.x = bf16(rng, geo.n, geo.h * geo.w, geo.c, data).reshape(geo.n, geo.h, geo.w, geo.c)
        self.gap, self.odd, self.bias = gap, odd, bias
        self.before = rng.standard_normal((geo.o, geo.kh * geo.kw * geo.c)).astype(np.float32)
        self.db_before = rng.standard_normal(geo.o).astype(np.float32)
        self.given = geo.fields() | dict(c=geo.c, accumulate=int(accumulate))
        self.upload()

    def upload(self):
        for name, x in (("g", self.g), ("x", self.x)):
            held = Pictures(self.gpu, x, np.nan, self.gap, self.odd)
            self.given |= {name: held.data, f"{name}_strides": held.strides}

    def run(self, function="conv2d_wgrad", **fields):
        """(dw (o, kh, kw, c), db), after a look at everything around them."""
        geo, gpu, k = self.geo, self.gpu, self.before.shape[1]
        fill = np.full(4, POISON, np.uint8).view(np.float32)[0]
        before = self.before if self.accumulate else np.full_like(self.before, fill)
        dw, stride = rows(gpu, before, fill, self.gap, self.odd)
        db = 0
        if self.bias:
            db = gpu.put(self.db_before) if self.accumulate else gpu.empty(4 * geo.o)
        args = conv_args(self.loaded, function, **self.given | dict(dw=dw, db=db, dw_stride=stride) | fields)
        size = self.loaded.lib.fp4bf16_conv2d_wgrad_workspace_size(args)
        assert size >= 0
        workspace = gpu.empty(size)
        args.workspace = self.loaded.ffi.cast("void*", workspace)
        self.loaded.call(function, args, 0)
        gpu.get(workspace, (size,), np.uint8)  # nothing behind its end
        got = gpu.get(dw, (geo.o, stride), np.float32)
        assert (np.ascontiguousarray(got[:, k:]).view(np.uint8) == POISON).all(), "wrote between rows"
        sums = gpu.get(db, (geo.o,), np.float32) if db else None
        return got[:, :k].reshape(geo.o, geo.kh, geo.kw, geo.c), sums

    def check(self, function="conv2d_wgrad"):
        (y, size), g = wgrad64(self.g, self.x, self.geo), self.g.reshape(-1, self.geo.o).astype(np.float64)
        dw, db = self.run(function)
        if self.accumulate:
            y = y + self.before.reshape(y.shape)
        # FP32 sums: signed terms grow as the root of their number, so that the rounding of the running sum is
        # far below 2^-16 of the sum of their sizes; positive ones lose up to 2^-24 of it a step, thousands.
        part = 2**-16 if (self.g < 0).any() else 2**-12
        if y.size:
            close([(function, dw)], y, part * size + 2**-21 * abs(y) + 1e-5, 1e-8 if part < 2**-12 else 1e-6)
        if db is not None:
            y = g.sum(axis=0) + (self.db_before if self.accumulate else 0)
            bound = part * abs(g).sum(axis=0) + 2**-21 * abs(y) + 1e-5
            assert (abs(db - y) <= bound).all(), f"db is off by {abs(db - y).max():.1e}"


CASES = GEOMETRIES | {
    "few channels": Geometry(3, 8, 8, 8, 24),
    "odd channels": Geometry(3, 9, 6, 5, 3),
    "of a picture": Geometry(2, 16, 16, 3, 128),
    "to a picture": Geometry(2, 16, 16, 128, 3),
    "channels of SD": Geometry(2, 8, 8, 320, 320),
    "many taps": Geometry(2, 9, 9, 16, 16, 5, 5, 1, 2, 2, 2, 2),
    "one row": Geometry(2, 1, 200, 72, 40, 1, 3, 1, 0, 1, 0, 1),
    "one column": Geometry(2, 200, 1, 72, 40, 3, 1, 1, 1, 0, 1, 0),
    "padding beyond the kernel": Geometry(2, 4, 4, 16, 16, 3, 3, 1, 5, 4, 6, 7),
    "negative padding": Geometry(2, 9, 9, 16, 16, 3, 3, 1, -2, -1, 0, -1),
}


@functions
@pytest.mark.parametrize("geo", CASES.values(), ids=CASES)
@pytest.mark.parametrize("accumulate", [False, True])
def test_geometries(library, gpu, rng, function, geo, accumulate):
    Weights(library, gpu, rng, geo, accumulate=accumulate, gap=geo.n % 2).check(function)


@functions
@pytest.mark.parametrize("accumulate", [False, True])
def test_layers_of_the_unet(library, gpu, rng, function, accumulate):
    for geo in (
        Geometry(6, 32, 32, 128, 128),
        Geometry(9, 16, 16, 256, 256),
        Geometry(5, 16, 16, 512, 256),
        Geometry(40, 4, 4, 256, 256),
        Geometry(6, 32, 32, 128, 128, stride=2, top=0, left=0),
        point(5, 16, 16, 384, 256),
        point(300, 1, 1, 128, 512),
    ):
        Weights(library, gpu, rng, geo, accumulate=accumulate, bias=geo.kh == 3).check(function)


def test_more_tiles_than_multiprocessors(library, gpu, rng):
    """Several tiles a thread block, several runs: what one leaves behind must not reach the next."""
    for geo in (Geometry(8, 8, 8, 640, 520), Geometry(64, 4, 4, 1024, 512), point(30, 8, 8, 2048, 2048)):
        Weights(library, gpu, rng, geo, gap=1).check()


def test_many_pixels_against_the_simple_kernel(library, gpu, rng):
    for geo in (Geometry(64, 32, 32, 128, 128), Geometry(256, 16, 16, 64, 64), point(64, 32, 32, 128, 128)):
        p = Weights(library, gpu, rng, geo)
        (dw, db), (want, db_want) = p.run(), p.run("conv2d_wgrad_simple")
        bound = np.full(want.shape, 2**-16 * 2 / np.pi * geo.n * geo.h * geo.w)  # of the sum of |products|
        close([("dw", dw)], want.astype(np.float64), bound, 1e-8)
        np.testing.assert_allclose(db, db_want, rtol=1e-5, atol=2e-2)


@functions
def test_positive_operands(library, gpu, rng, function):
    Weights(library, gpu, rng, Geometry(64, 8, 8, 64, 64), data="positive").check(function)


def test_simple_kernel_takes_any_alignment_stride_and_padding(library, gpu, rng):
    for geo in (Geometry(2, 11, 7, 5, 3, 4, 3, 3, 5, -1, 2, 4), Geometry(1, 3, 3, 7, 9, 5, 5, 1, 9, 9, 9, 9)):
        Weights(library, gpu, rng, geo, odd=True, gap=1).check("conv2d_wgrad_simple")
    # and stands in for the fast one where that does not take the geometry
    Weights(library, gpu, rng, Geometry(2, 11, 7, 8, 8, 4, 3, 3, 5, -1, 2, 4)).check()


@functions
def test_without_anything_to_sum(library, gpu, rng, function):
    """No pixels: zero, or what was there; no channels of x: db alone."""
    for accumulate in (False, True):
        for geo in (Geometry(0, 4, 4, 8, 8), Geometry(2, 0, 4, 8, 8, 1, 1, 1, 1, 0, 1, 0)):
            p = Weights(library, gpu, rng, geo, accumulate=accumulate)
            dw, db = p.run(function)
            np.testing.assert_array_equal(dw, p.before.reshape(dw.shape) if accumulate else 0)
            if geo.n == 0:
                np.testing.assert_array_equal(db, p.db_before if accumulate else 0)
            else:
                p.check(function)
        Weights(library, gpu, rng, Geometry(2, 4, 4, 0, 24), accumulate=accumulate).check(function)


@functions
def test_twice_the_same_bits(library, gpu, rng, function):
    for geo in (Geometry(30, 16, 16, 128, 128), Geometry(100, 4, 4, 192, 72)):
        p = Weights(library, gpu, rng, geo)
        for first, again in zip(p.run(function), p.run(function), strict=True):
            assert first.tobytes() == again.tobytes()


@functions
def test_non_finite_operands_spoil_their_own_rows_and_columns(library, gpu, rng, function):
    p = Weights(library, gpu, rng, Geometry(4, 8, 8, 72, 136))
    p.g[1, 3, 4, 77], p.x[2, 5, 5, 13] = np.nan, np.inf
    p.upload()
    (dw, db), finite = p.run(function), np.ones((136, 3, 3, 72), bool)
    finite[77], finite[..., 13] = False, False
    assert np.isnan(dw[77]).all()
    assert not np.isfinite(dw[..., 13]).any()
    assert np.isfinite(dw[finite]).all()
    assert np.isnan(db[77])
    assert np.isfinite(np.delete(db, 77)).all()


def test_captured_in_a_graph_and_replayed(library, gpu, rng):
    rt = gpu.rt
    p = Weights(library, gpu, rng, Geometry(20, 8, 8, 64, 128))
    want, want_db = p.run()
    dw, db = gpu.empty(want.nbytes), gpu.empty(want_db.nbytes)
    args = conv_args(library, "conv2d_wgrad", **p.given | dict(dw=dw, db=db, dw_stride=want[0].size))
    size = library.lib.fp4bf16_conv2d_wgrad_workspace_size(args)
    args.workspace = library.ffi.cast("void*", gpu.empty(size))
    stream = gpu.check(rt.cudaStreamCreateWithFlags(rt.cudaStreamNonBlocking))
    gpu.check(rt.cudaStreamBeginCapture(stream, rt.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal))
    library.call("conv2d_wgrad", args, int(stream))
    graph = gpu.check(rt.cudaStreamEndCapture(stream))
    run = gpu.check(rt.cudaGraphInstantiate(graph, 0))
    for _ in range(2):
        gpu.check(rt.cudaGraphLaunch(run, stream))
    gpu.check(rt.cudaStreamSynchronize(stream))
    np.testing.assert_array_equal(gpu.get(dw, want.shape, np.float32), want)
    np.testing.assert_array_equal(gpu.get(db, want_db.shape, np.float32), want_db)
    gpu.check(rt.cudaGraphExecDestroy(run))
    gpu.check(rt.cudaStreamDestroy(stream))


def test_misaligned_operands_are_refused_and_nothing_sticks(library, gpu, rng):
    if int(library.device(0).compute_capability.split(".")[0]) != 9:
        pytest.skip("only TMA on sm_90 needs 16 bytes")
    p = Weights(library, gpu, rng, Geometry(20, 8, 8, 64, 64))
    for fields, sentence in (
        (dict(g=p.given["g"] + 2), "g is 2 bytes past a multiple of 16"),
        (dict(x=p.given["x"] + 8), "x is 8 bytes past a multiple of 16"),
        (dict(x_strides=[4096, 516, 64]), r"x_strides\[1\] is 1032 bytes.* multiple of 16"),
        (dict(g_strides=[4096, 512, 65]), r"g_strides\[2\] is 130 bytes.* multiple of 16"),
    ):
        with pytest.raises(ValueError, match=sentence):
            p.run(**fields)
        p.check()
    args = conv_args(library, "conv2d_wgrad", **p.given | dict(dw=256, dw_stride=576, db=256, workspace=0))
    with pytest.raises(ValueError, match="workspace is NULL"):
        library.call("conv2d_wgrad", args, 0)
    gpu.check(gpu.rt.cudaDeviceSynchronize())
