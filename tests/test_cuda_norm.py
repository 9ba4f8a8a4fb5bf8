"""fp4bf16_group_norm and its gradient on a GPU against float64, FP4 results against the quantiser's bytes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from host_norm import static_exponent

from fp4bf16.backends import cpu_quantize
from fp4bf16.formats import FORMATS
from fp4bf16.python_ref.norm import group_norm, sigmoid, silu

pytestmark = pytest.mark.gpu
BF16 = np.dtype(ml_dtypes.bfloat16)
EXACT = FORMATS["nvfp4_exact"]
POISON, SPARE = np.frombuffer(b"\xa5\xa5", BF16)[0], 7  # elements behind the last
EPS = 1e-5
#: One rounding to BF16, and what FP32 sums, exponentials and reciprocals add: relative to the terms.
ROUNDING, SINGLE = 2.0**-8, 2.0**-18

#: (n, pixels, c, groups). Layers of the UNet: whole images, several a thread block, parts of one in a
#: cluster.
LAYERS = [
    (2, 1024, 128, 32), (1, 1024, 256, 32), (1, 1024, 384, 32), (3, 256, 512, 32), (2, 256, 384, 32),
    (3, 64, 512, 32), (5, 64, 256, 32), (7, 16, 512, 32), (9, 16, 256, 32),
]  # fmt: skip
#: Ragged parts and rows, one pixel, one image, a group of one channel, one group of all, groups of 2, 5, 10
#: and 12 channels, more channels and more pixels than tiles take, one of everything.
ODD = [
    (2, 1023, 64, 16), (1, 513, 64, 16), (2, 49, 40, 5), (3, 1, 64, 16), (70, 1, 512, 32), (2, 30, 48, 48),
    (2, 100, 24, 2), (3, 1000, 96, 1), (2, 37, 1024, 1), (1, 3, 2048, 1), (2, 50, 64, 32), (1, 64, 80, 16),
    (2, 33, 320, 32), (2, 33, 20, 4), (3, 77, 48, 4), (1, 5000, 32, 8), (1, 20000, 16, 4), (2, 9, 144, 4),
    (1, 1, 1, 1), (1, 1, 16, 16),
]  # fmt: skip
#: Slabs of 32 channels: one pixel, three, one more than a warp or a thread block takes; groups of 4, 8, 16
#: and 32 channels; teams without a slab; parts of an image in a cluster, whole and ragged; channels that are
#: none.
SLABS = [
    (5, 1, 32, 8), (3, 3, 64, 4), (7, 17, 96, 12), (3, 16, 160, 40), (2, 40, 32, 1), (2, 65, 64, 8),
    (3, 200, 128, 32), (2, 257, 64, 4), (1, 600, 32, 2), (1, 1500, 64, 16), (1, 2049, 32, 8), (2, 64, 96, 3),
    (3, 17, 16, 4), (4, 3, 24, 6), (2, 17, 48, 12),
]  # fmt: skip
#: "odd": addresses and strides that no wide access takes
LAYOUTS = ["packed", "columns", "odd"]


@pytest.fixture(autouse=True)
def _free(gpu):
    yield
    gpu.free()


# ---- one call
def place(layout: str, n: int, pixels: int, c: int) -> tuple[int, int, int]:
    """(offset, image stride, pixel stride) in elements."""
    if layout == "columns":
        wide = 2 * c + 8 - c % 8
        return (c // 8 * 8, pixels * wide + 16, wide)
    return (1, pixels * (c + 3) + 5, c + 3) if layout == "odd" else (0, pixels * c, c)


class Norm:
    """Operands on the host and on the device, NaN between their pixels; outputs poisoned, gaps checked."""

    def __init__(self, library, gpu, rng, n, pixels, c, groups, *, layout="packed", silu=True, x=None,
                 gamma=None, beta=None):  # fmt: skip
        self.loaded, self.gpu, self.layout, self.silu = library, gpu, layout, silu
        self.shape, self.groups = (n, pixels, c), groups
        if x is None:
            x = rng.standard_normal((n, pixels, c)) * rng.uniform(0.3, 3, (n, 1, c)) + rng.normal(0, 1, c)
        self.x = x.astype(BF16)
        self.gamma = (rng.normal(0, 1, c) if gamma is None else np.broadcast_to(gamma, c)).astype(np.float32)
        self.beta = (rng.normal(0, 0.5, c) if beta is None else np.broadcast_to(beta, c)).astype(np.float32)
        self.fields = dict(n=n, pixels=pixels, c=c, groups=groups, activation=int(silu),
                           gamma=gpu.put(self.gamma), beta=gpu.put(self.beta))  # fmt: skip
        self.picture("x", self.x)
        self.pictures, self.results = {}, {}

    def picture(self, name: str, x=None) -> None:
        """`x` on the device, or room for a result."""
        offset, image, pixel = place(self.layout, *self.shape)
        n, pixels, c = self.shape
        size = offset + (n - 1) * image + (pixels - 1) * pixel + c + SPARE
        held = np.full(size, POISON if x is None else np.nan, BF16)
        if x is None:
            self.pictures[name] = held
        else:
            self.view(held)[...] = x
        address = self.gpu.put(held)
        self.fields |= {name: address + 2 * offset, f"{name}_image": image, f"{name}_pixel": pixel}

    def view(self, held):
        offset, image, pixel = place(self.layout, *self.shape)
        return np.lib.stride_tricks.as_strided(held[offset:], self.shape, (2 * image, 2 * pixel, 2))

    def read(self, name: str) -> np.ndarray:
        """A picture of layout "packed" as it is now."""
        size = int(np.prod(self.shape))
        return self.gpu.get(self.fields[name], (size + SPARE,), BF16)[:size].reshape(self.shape)

    def room(self, name: str, shape, dtype=np.float32, value=None) -> None:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self.fields[name] = self.gpu.empty(size) if value is None else self.gpu.put(value)
        self.results[name] = (shape, dtype)

    def args(self, name: str):
        kinds = dict(self.loaded.ffi.typeof(f"fp4bf16_{name}_args").fields)
        args = self.loaded.ffi.new(f"fp4bf16_{name}_args*")
        for field, value in self.fields.items():
            if field in kinds:
                pointer = kinds[field].type.kind == "pointer"
                setattr(args, field, self.loaded.ffi.cast(kinds[field].type, value) if pointer else value)
        size = getattr(self.loaded.lib, f"fp4bf16_{name}_workspace_size")(args)
        assert size >= 0
        if size:
            args.workspace = self.loaded.ffi.cast("void*", self.gpu.empty(size))
        return args

    def fetch(self) -> dict[str, np.ndarray]:
        got = {name: self.gpu.get(self.fields[name], *kind) for name, kind in self.results.items()}
        offset = place(self.layout, *self.shape)[0]
        for name, poisoned in self.pictures.items():
            held = self.gpu.get(self.fields[name] - 2 * offset, poisoned.shape, BF16)
            got[name] = self.view(held).copy()
            self.view(held)[...] = POISON
            assert (held.view(np.uint16) == POISON.view(np.uint16)).all(), f"{name}: wrote between pixels"
        return got

    def forward(self, *, y=True, expanded=False, packed=False, stats=True, stream=0) -> dict[str, np.ndarray]:
        n, pixels, c = self.shape
        self.pictures, self.results = {}, {}
        for name in ("y", "expanded", "packed", "block_scale", "outer_scale", "mean", "rstd"):
            self.fields.pop(name, None)
        self.fields["eps"] = EPS
        if y:
            self.picture("y")
        if expanded:
            self.room("expanded", (n, pixels, c), np.uint8)
        if packed:
            self.room("packed", (n, pixels, c // 2), np.uint8)
            self.room("block_scale", (n, pixels, c // 16), np.uint8)
        if expanded or packed:
            self.room("outer_scale", (1,))
        if stats:
            self.room("mean", (n, self.groups))
            self.room("rstd", (n, self.groups))
        self.loaded.call("group_norm", self.args("group_norm"), stream)
        return self.fetch()

    def backward(self, g, mean, rstd, add=None, shift=True) -> dict[str, np.ndarray]:
        n, _, c = self.shape
        self.pictures, self.results = {}, {}
        self.picture("g", g)
        if add is not None:
            self.picture("add", add)
        self.picture("dx")
        self.fields |= {"mean": self.gpu.put(mean), "rstd": self.gpu.put(rstd)}
        self.before = np.float32(0.5)  # what dgamma and dbeta hold
        for name in ("dgamma", "dbeta"):
            self.room(name, (c,), value=np.full(c, self.before))
        if shift:
            self.room("dshift", (n, c))
        self.loaded.call("group_norm_backward", self.args("group_norm_backward"), 0)
        return self.fetch()


def grouped(x, groups):
    """(n, pixels, groups, channels a group) in float64."""
    return np.asarray(x, np.float64).reshape(*x.shape[:2], groups, -1)


def check_forward(norm: Norm, got) -> None:
    """Statistics and y within FP32's errors of float64, y rounded once."""
    x = grouped(norm.x, norm.groups)
    mean = x.mean((1, 3))
    variance = ((x - mean[:, None, :, None]) ** 2).mean((1, 3))
    spread = np.abs(x - mean[:, None, :, None]).max((1, 3))
    if "mean" in got:
        assert (np.abs(got["mean"] - mean) <= 2.0**-22 * np.abs(mean) + SINGLE * spread).all()
        exact = 1 / np.sqrt(variance + EPS)
        lost = SINGLE + (2.0**-22 * np.abs(mean)) ** 2 * exact**2  # a mean that is off adds its square
        assert (np.abs(got["rstd"] - exact) <= lost * exact).all()
    if "y" not in got:
        return
    z = group_norm(norm.x, norm.groups, norm.gamma, norm.beta, EPS)
    want = silu(z) if norm.silu else z
    h = np.abs(group_norm(norm.x, norm.groups, None, None, EPS))
    far = (np.abs(mean) / np.sqrt(variance + EPS))[:, None, :, None]  # of the mean's last place in h
    # FP32 sums put the mean off by last places of the values' spread: seen where x is the mean.
    wide = (spread / np.sqrt(variance + EPS))[:, None, :, None]
    far = np.broadcast_to(far + wide, x.shape).reshape(h.shape)
    terms = np.abs(norm.gamma) * (h * SINGLE + far * 2.0**-22) + np.abs(norm.beta) * SINGLE
    bound = ROUNDING * np.abs(want) + 1.1 * terms + 1e-37
    error = np.abs(got["y"].astype(np.float64) - want)
    assert (error <= bound).all(), f"{(error / bound).max()} times the bound"


def check_four_bit(norm: Norm, got) -> None:
    """The bytes are those of the quantiser for the BF16 result, the outer scale the static one."""
    n, pixels, c = norm.shape
    e = static_exponent(norm.gamma, norm.beta, pixels * c // norm.groups)
    assert got["outer_scale"][0] == np.float32(2.0**e)
    y = got["y"].astype(np.float32)
    assert (np.abs(np.where(np.isfinite(y), y, 0).astype(np.float64)) <= 288 * 2.0**e).all()
    outer = np.full(n * pixels, 2.0**e, np.float32)
    q = cpu_quantize.quantize_rows(y.reshape(-1, c), EXACT, outer, None, "fast", "propagate")
    if "packed" in got:
        np.testing.assert_array_equal(got["packed"].reshape(-1, c // 2), q.packed)
        np.testing.assert_array_equal(got["block_scale"].reshape(-1, c // 16), q.block_scale)
    if "expanded" in got:
        want = cpu_quantize.expand_rows(q.packed, q.block_scale, EXACT)
        np.testing.assert_array_equal(got["expanded"].reshape(-1, c), want)


def check_backward(norm: Norm, got, g, mean, rstd, add=None) -> None:
    """Against float64 with the statistics given; bounds relative to the sums of the terms' magnitudes."""
    x, gamma, beta = grouped(norm.x, norm.groups), norm.gamma.astype(np.float64), norm.beta.astype(np.float64)
    rstd, shape = rstd.astype(np.float64)[:, None, :, None], norm.x.shape
    h = (x - mean.astype(np.float64)[:, None, :, None]) * rstd
    u = g.astype(np.float64)
    flat = h.reshape(shape)
    if norm.silu:
        z = flat * gamma + beta
        s = sigmoid(z)
        u = u * (s * (1 + z * (1 - s)))
    a = grouped(u * gamma, norm.groups)
    first, second = a.mean((1, 3), keepdims=True), (a * h).mean((1, 3), keepdims=True)
    dx = (rstd * (a - first - h * second)).reshape(shape)
    # silu' is in -0.1 .. 1.1 and its slope at most 0.5: z's error counts whole; g stands for u where u is 0
    gain = np.abs(g.astype(np.float64)) * (1 + np.abs(flat * gamma) + np.abs(beta))
    large, far = grouped(gain * np.abs(gamma), norm.groups), np.abs(h)
    around = large.mean((1, 3), keepdims=True) + far * (large * far).mean((1, 3), keepdims=True)
    terms = (rstd * (large + around)).reshape(shape)
    want = dx if add is None else dx + add.astype(np.float64)
    bound = ROUNDING * np.abs(want) + SINGLE * (terms + np.abs(want)) + 1e-37
    error = np.abs(got["dx"].astype(np.float64) - want)
    assert (error <= bound).all(), f"dx: {(error / bound).max()} times the bound"
    for name, value, size in (
        ("dgamma", (u * flat).sum((0, 1)), (gain * np.abs(flat)).sum((0, 1))),
        ("dbeta", u.sum((0, 1)), gain.sum((0, 1))),
    ):
        error = np.abs(got[name].astype(np.float64) - norm.before - value)
        assert (error <= SINGLE * (size + 1)).all(), f"{name}: {(error / (SINGLE * (size + 1))).max()} times"
    if "dshift" in got:
        error = np.abs(got["dshift"] - dx.sum(1))
        bound = SINGLE * terms.sum(1) + 1e-37
        assert (error <= bound).all(), f"dshift: {(error / bound).max()} times the bound"


# ---- on a GPU
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n, pixels, c, groups", LAYERS + ODD + SLABS)
def test_forward(library, gpu, rng, n, pixels, c, groups, layout):
    if layout == "odd" and pixels > 1000:
        pytest.skip("the kernels for any shape, seen at smaller ones")
    norm = Norm(library, gpu, rng, n, pixels, c, groups, layout=layout, silu=bool(rng.integers(2)))
    got = norm.forward()
    check_forward(norm, got)
    again = norm.forward(stats=False)
    np.testing.assert_array_equal(got["y"].view(np.uint16), again["y"].view(np.uint16))
    if c % 16:
        return
    four = norm.forward(expanded=True, packed=True)
    np.testing.assert_array_equal(four["y"].view(np.uint16), got["y"].view(np.uint16))
    check_four_bit(norm, four)
    for wanted in ({"expanded": True}, {"packed": True}):
        part = norm.forward(y=False, stats=False, **wanted)
        for name, value in part.items():
            np.testing.assert_array_equal(value, four[name])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n, pixels, c, groups", LAYERS + ODD + SLABS)
def test_backward(library, gpu, rng, n, pixels, c, groups, layout):
    if layout == "odd" and pixels > 1000:
        pytest.skip("the kernels for any shape, seen at smaller ones")
    norm = Norm(library, gpu, rng, n, pixels, c, groups, layout=layout, silu=bool(rng.integers(2)))
    stats = norm.forward(y=False)
    g = rng.standard_normal((n, pixels, c)).astype(BF16)
    add = rng.standard_normal((n, pixels, c)).astype(BF16) if rng.integers(2) else None
    got = norm.backward(g, stats["mean"], stats["rstd"], add)
    check_backward(norm, got, g, stats["mean"], stats["rstd"], add)
    again = norm.backward(g, stats["mean"], stats["rstd"], add, shift=False)
    for name, value in again.items():
        np.testing.assert_array_equal(value.view(np.uint8), got[name].view(np.uint8))


@pytest.mark.parametrize("n, pixels, c, groups", [(5, 64, 256, 32), (6, 16, 512, 32), (2, 1024, 64, 16),
                                                   (3, 200, 64, 16), (9, 3, 96, 6)])  # fmt: skip
def test_an_image_gives_the_same_bits_in_any_batch(library, gpu, rng, n, pixels, c, groups):
    norm = Norm(library, gpu, rng, n, pixels, c, groups)
    whole = norm.forward(expanded=True)
    for i in range(n):
        alone = norm.x[i : i + 1]
        one = Norm(library, gpu, rng, 1, pixels, c, groups, x=alone, gamma=norm.gamma, beta=norm.beta)
        got = one.forward(expanded=True)
        for name in ("y", "expanded", "mean", "rstd"):
            np.testing.assert_array_equal(got[name][0].view(np.uint8), whole[name][i].view(np.uint8))


def test_more_images_than_a_grid_has_rows(library, gpu, rng):
    norm = Norm(library, gpu, rng, 65540, 1, 32, 8)
    got = norm.forward()
    check_forward(norm, got)
    g = rng.standard_normal(norm.shape).astype(BF16)
    check_backward(norm, norm.backward(g, got["mean"], got["rstd"]), g, got["mean"], got["rstd"])


@pytest.mark.parametrize("pixels, c, groups", [(1024, 64, 16), (64, 64, 16), (16, 32, 8), (1, 64, 16),
                                               (49, 80, 8), (200, 96, 12), (17, 64, 2)])  # fmt: skip
def test_numbers_far_from_zero(library, gpu, rng, pixels, c, groups):
    """Means of a thousand, one outlier among equal numbers, constant groups, zeros."""
    near = 1000 + 4 * rng.integers(-2, 3, (1, pixels, c))
    outlier = np.full((1, pixels, c), -3.0)
    outlier[0, pixels // 2, ::4] = 10000
    constant = np.full((1, pixels, c), 1.0) * np.repeat(rng.normal(0, 1000, groups), c // groups)
    for x in (near, outlier, constant, np.zeros((1, pixels, c))):
        norm = Norm(library, gpu, rng, 1, pixels, c, groups, x=x, silu=False)
        got = norm.forward(expanded=True)
        check_forward(norm, got)
        check_four_bit(norm, got)
        if x is constant or not x.any():
            beta = np.broadcast_to(norm.beta.astype(BF16), norm.shape)
            np.testing.assert_array_equal(got["y"].view(np.uint16), beta.view(np.uint16))


@pytest.mark.parametrize("gamma, beta", [(0, 0), (0, 3), (2.0**-126, 0), (1e-30, 1e-32), (2e38, 3e38), (9, 0),
                                         (1, 2.0**-20), (288, 0)])  # fmt: skip
@pytest.mark.parametrize("pixels, c, groups", [(256, 64, 16), (64, 32, 32), (33, 80, 8)])
def test_outer_scale_of_any_gamma_and_beta(library, gpu, rng, gamma, beta, pixels, c, groups):
    norm = Norm(library, gpu, rng, 2, pixels, c, groups, gamma=gamma, beta=beta, silu=False)
    got = norm.forward(expanded=True, packed=True)
    check_four_bit(norm, got)
    if gamma == beta == 0:
        assert got["outer_scale"][0] == 1 and not got["expanded"].any() and not got["packed"].any()


@pytest.mark.parametrize("c, groups", [(64, 16), (80, 8)])
def test_blocks_that_the_fast_quantiser_leaves(library, gpu, rng, c, groups):
    """SiLU of numbers around -80 (tiny and subnormal results), NaN and Inf in single groups."""
    x = rng.standard_normal((3, 64, c))
    norm = Norm(library, gpu, rng, 3, 64, c, groups, x=x, gamma=3, beta=np.repeat([-80, -70, -95, 1], c // 4))
    check_four_bit(norm, norm.forward(expanded=True, packed=True))
    x[0, 5, 3], x[1, 63, c - 1], x[2, 0, c // 2] = np.nan, np.inf, -np.inf
    norm = Norm(library, gpu, rng, 3, 64, c, groups, x=x)
    got = norm.forward(expanded=True, packed=True)
    check_four_bit(norm, got)
    width = c // groups
    bad = np.zeros((3, groups), bool)
    bad[0, 3 // width] = bad[1, -1] = bad[2, c // 2 // width] = True
    np.testing.assert_array_equal(np.isnan(got["y"]).all(1), np.repeat(bad, width, axis=1))
    assert np.isfinite(got["y"].astype(np.float32)[~np.repeat(bad, width, 1)[:, None].repeat(64, 1)]).all()


def test_results_may_replace_what_they_are_made_of(library, gpu, rng):
    """y in x's place, dx in that of g or of what is added."""
    norm = Norm(library, gpu, rng, 2, 1024, 64, 16)
    want = norm.forward()
    fields = dict(norm.fields)
    norm.fields |= {"y": norm.fields["x"], "y_image": fields["x_image"], "y_pixel": fields["x_pixel"]}
    library.call("group_norm", norm.args("group_norm"), 0)
    np.testing.assert_array_equal(norm.read("x").view(np.uint16), want["y"].view(np.uint16))
    norm.picture("x", norm.x)
    g, add = (rng.standard_normal(norm.shape).astype(BF16) for _ in range(2))
    want = norm.backward(g, want["mean"], want["rstd"], add)
    for name in ("g", "add"):
        again = Norm(library, gpu, rng, 2, 1024, 64, 16, x=norm.x, gamma=norm.gamma, beta=norm.beta)
        again.fields |= {k: v for k, v in norm.fields.items() if k in ("mean", "rstd")}
        again.picture("g", g), again.picture("add", add)
        for part in ("", "_image", "_pixel"):
            again.fields[f"dx{part}"] = again.fields[f"{name}{part}"]
        library.call("group_norm_backward", again.args("group_norm_backward"), 0)
        np.testing.assert_array_equal(again.read(name).view(np.uint16), want["dx"].view(np.uint16))


def test_captured_in_a_graph_and_replayed(library, gpu, rng):
    rt = gpu.rt
    stream = gpu.check(rt.cudaStreamCreateWithFlags(rt.cudaStreamNonBlocking))
    norm = Norm(library, gpu, rng, 2, 1024, 64, 16)
    want = norm.forward(expanded=True)
    args = norm.args("group_norm")
    gpu.check(rt.cudaMemset(norm.fields["expanded"], gpu.POISON, want["expanded"].nbytes))
    gpu.check(rt.cudaStreamBeginCapture(stream, rt.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal))
    library.call("group_norm", args, int(stream))
    graph = gpu.check(rt.cudaStreamEndCapture(stream))
    run = gpu.check(rt.cudaGraphInstantiate(graph, 0))
    gpu.check(rt.cudaGraphLaunch(run, stream))
    gpu.check(rt.cudaStreamSynchronize(stream))
    got = gpu.get(norm.fields["expanded"], norm.shape, np.uint8)
    np.testing.assert_array_equal(got, want["expanded"])
