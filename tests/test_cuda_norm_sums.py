"""fp4bf16_group_norm that is given its statistics as sums by channel: with the emulated library, and on a GPU
against float64, against the kernels that make their own statistics, and against the quantiser's bytes.
"""

from __future__ import annotations

import numpy as np
import pytest
from host_cuda import host_cuda, put  # noqa: F401 (a fixture)
from test_cuda_norm import BF16, EPS, LAYOUTS, Norm, check_four_bit, grouped

from fp4bf16 import device
from fp4bf16.backends import cuda_norm
from fp4bf16.python_ref.norm import group_norm, silu

ROUNDING = 2.0**-8  # one rounding to BF16


@pytest.fixture(autouse=True)
def _free(request):
    gpu = request.getfixturevalue("gpu") if "gpu" in request.fixturenames else None
    yield
    if gpu is not None:
        gpu.free()


#: (n, pixels, groups, channels of the sources, parts of the sources). The UNet's layers (384 = 256 + 128
#: channels in groups of 12 of which one straddles the sources), then all else.
LAYERS = [
    (2, 1024, 32, (128,), (8,)), (1, 1024, 32, (256,), (8,)), (2, 1024, 32, (256, 128), (8, 8)),
    (2, 256, 32, (256,), (2,)), (3, 256, 32, (256, 256), (2, 1)), (5, 64, 32, (512,), (1,)),
    (9, 16, 32, (256,), (1,)),
]  # fmt: skip
#: Ragged pixels, one pixel, one image, groups of one channel and of all, parts that no power of two divides,
#: sources of odd channels, c that only the kernels for any shape take, more images than thread blocks at
#: once, and such of which one takes parts of several.
ODD = [
    (2, 1023, 16, (64,), (3,)), (1, 513, 8, (16, 48), (5, 7)), (3, 1, 16, (64,), (1,)),
    (2, 49, 5, (40,), (4,)), (2, 30, 48, (48,), (2,)), (3, 100, 1, (96,), (6,)),
    (2, 33, 32, (300, 20), (2, 3)), (2, 33, 4, (20,), (2,)), (1, 37, 1, (1024,), (8,)),
    (1, 3, 1, (2048,), (1,)), (1, 3, 4096, (4096,), (1,)), (700, 5, 4, (32,), (2,)),
    (1, 5000, 8, (16, 16), (8, 1)), (1, 1, 1, (1,), (1,)), (2, 9, 4, (143, 1), (2, 2)),
    (530, 300, 4, (32,), (2,)),
]  # fmt: skip


def sums_of(x: np.ndarray, parts: int) -> np.ndarray:
    """(n, parts, c, 2) float32 of x (n, pixels, c): every parts-th pixel."""
    n, _, c = x.shape
    out = np.zeros((n, parts, c, 2), np.float32)
    for i in range(parts):
        v = x[:, i::parts].astype(np.float32)
        out[:, i, :, 0], out[:, i, :, 1] = v.sum(1), (v * v).sum(1)
    return out


def statistics(sums: list[np.ndarray], groups: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance (n, groups) that the sums give: parts added up in float32, the rest in float64."""
    by_channel = []
    for s in sums:
        total = s[:, 0].copy()
        for i in range(1, s.shape[1]):
            total += s[:, i]
        by_channel.append(total.astype(np.float64))
    all_of = np.concatenate(by_channel, 1)
    mean, square = (all_of[..., k].reshape(len(all_of), groups, -1).sum(-1) / count for k in range(2))
    return mean, np.maximum(square - mean * mean, 0)


class Given(Norm):
    """A `Norm` with its sums, of one or two sources."""

    def __init__(self, library, gpu, rng, n, pixels, groups, channels, parts, **more):
        super().__init__(library, gpu, rng, n, pixels, sum(channels), groups, **more)
        edges = np.cumsum([0, *channels])
        self.channels, self.parts, self.given = channels, parts, True
        self.sums = [sums_of(self.x[..., a:b], p) for a, b, p in zip(edges, edges[1:], parts, strict=False)]
        self.addresses = [gpu.put(s) for s in self.sums]

    def args(self, name):
        args = super().args(name)
        if name == "group_norm" and self.given:
            for i, address in enumerate(self.addresses):
                args.sums[i] = self.loaded.ffi.cast("const float*", address)
                args.sum_parts[i], args.sum_channels[i] = self.parts[i], self.channels[i]
            size = self.loaded.lib.fp4bf16_group_norm_workspace_size(args)
            assert size >= 0
            args.workspace = self.loaded.ffi.cast("void*", self.gpu.empty(size) if size else 0)
        return args


def check(norm: Given, got) -> None:
    """Statistics: those of the sums, but for the last places of float32. y: float64 of the statistics that
    the kernel gives, and one rounding; besides, scale and shift lose last places of their terms (the mean's
    is at most 64 gamma, or it is subtracted first), the sigmoid 2^-22 and of its exponent 2^-23.
    """
    n, pixels, c = norm.shape
    mean, variance = statistics(norm.sums, norm.groups, pixels * c // norm.groups)
    exact = 1 / np.sqrt(variance + EPS)
    assert (np.abs(got["mean"] - mean) <= 2.0**-23 * np.abs(mean) + 1e-37).all()
    assert (np.abs(got["rstd"] - exact) <= 2.0**-21 * exact).all()
    mean, rstd = (got[name].astype(np.float64)[:, None, :, None] for name in ("mean", "rstd"))
    h = ((grouped(norm.x, norm.groups) - mean) * rstd).reshape(norm.shape)
    far = np.broadcast_to(np.minimum(np.abs(mean * rstd), 64), (n, pixels, norm.groups, c // norm.groups))
    z = h * norm.gamma + norm.beta
    terms = np.abs(norm.gamma) * (np.abs(h) * 2.0**-21 + far.reshape(norm.shape) * 2.0**-23)
    terms += np.abs(norm.beta) * 2.0**-22
    want = silu(z) if norm.silu else z
    lost = 1.1 * terms + (np.abs(want) * (2.0**-21 + np.abs(z) * 2.0**-22) if norm.silu else 0)
    bound = ROUNDING * (np.abs(want) + lost) + lost + 1e-37
    error = np.abs(got["y"].astype(np.float64) - want)
    assert (error <= bound).all(), f"{(error / bound).max()} times the bound"


# ---- on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n, pixels, groups, channels, parts", LAYERS + ODD)
def test_results(library, gpu, rng, n, pixels, groups, channels, parts, layout):
    if layout == "odd" and pixels > 1000:
        pytest.skip("the kernels for any shape, seen at smaller ones")
    silu = bool(rng.integers(2))
    norm = Given(library, gpu, rng, n, pixels, groups, channels, parts, layout=layout, silu=silu)
    got = norm.forward()
    check(norm, got)
    again = norm.forward(stats=False)
    np.testing.assert_array_equal(got["y"].view(np.uint16), again["y"].view(np.uint16))
    if sum(channels) % 16:
        return
    four = norm.forward(expanded=True, packed=True)
    np.testing.assert_array_equal(four["y"].view(np.uint16), got["y"].view(np.uint16))
    check_four_bit(norm, four)
    for wanted in ({"expanded": True}, {"packed": True}, {"expanded": True, "stats": True},
                   {"expanded": True, "y": True}):  # fmt: skip
        part = norm.forward(**({"y": False, "stats": False} | wanted))
        for name, value in part.items():
            np.testing.assert_array_equal(value.view(np.uint8), four[name].view(np.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("n, pixels, groups, channels, parts", LAYERS)
def test_nearly_the_results_of_own_statistics(library, gpu, rng, n, pixels, groups, channels, parts):
    """Float32 sums of 1024 pixels put mean and rstd off by some 2^-21 of the data's scale, here at most 8 of
    the deviations: y moves by 2^-18 of its terms, which reaches the middle between two BF16 numbers, 2^-8
    apart, in one of some hundred; it then moves by one last place.
    """
    norm = Given(library, gpu, rng, n, pixels, groups, channels, parts)
    got = norm.forward()["y"].astype(np.float32)
    norm.given = False
    own = norm.forward()["y"].astype(np.float32)
    large = np.abs(norm.gamma) * 8 + np.abs(norm.beta)
    assert (np.abs(got - own) <= 2.0**-7 * np.abs(own) + 2.0**-18 * large).all()
    assert (got != own).mean() < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("far", [100, 1000])
@pytest.mark.parametrize("groups, channels", [(32, (128,)), (32, (256, 128)), (4, (64,))])
def test_numbers_far_from_zero(library, gpu, rng, far, groups, channels):
    """Means of 100 and 1000 deviations. The sums lose less of the variance than rounding the data to BF16
    does, whose steps there are about 0.5 and 4: the square of a step / 12.
    """
    c = sum(channels)
    x = (far + rng.standard_normal((2, 1024, c))).astype(BF16)
    norm = Given(library, gpu, rng, 2, 1024, groups, channels, (8, 8)[: len(channels)], x=x, silu=False)
    _, variance = statistics(norm.sums, groups, 1024 * c // groups)
    step = 2.0 ** (np.floor(np.log2(far)) - 7)
    assert (np.abs(variance - grouped(x, groups).var((1, 3))) <= step**2 / 12).all()
    got = norm.forward(expanded=True, packed=True)
    check(norm, got)
    check_four_bit(norm, got)


@pytest.mark.gpu
def test_constant_images(library, gpu, rng):
    """Sums of equal BF16 numbers and of their squares, here 16 at a time, are exact in float32: the variance
    is 0, the mean the number, and y is beta.
    """
    for value in (0.0, 2.0, -1024.0, 3.140625, 1000.0):
        x = np.full((2, 64, 64), value)
        norm = Given(library, gpu, rng, 2, 64, 16, (64,), (4,), x=x, silu=False)
        got = norm.forward(expanded=True)
        check(norm, got)
        check_four_bit(norm, got)
        beta = np.broadcast_to(norm.beta.astype(BF16), norm.shape)
        np.testing.assert_array_equal(got["y"].view(np.uint16), beta.view(np.uint16))


@pytest.mark.gpu
def test_blocks_that_the_fast_quantiser_leaves(library, gpu, rng):
    """SiLU of numbers around -80 (tiny and subnormal results), NaN and Inf in single groups."""
    beta = np.repeat([-80, -70, -95, 1], 16)
    norm = Given(library, gpu, rng, 3, 64, 16, (64,), (2,), gamma=3, beta=beta)
    four = norm.forward(expanded=True, packed=True)
    check_four_bit(norm, four)
    for name, value in norm.forward(y=False, stats=False, expanded=True).items():
        np.testing.assert_array_equal(value, four[name])
    x = rng.standard_normal((3, 64, 64))
    x[0, 5, 3], x[1, 63, 63], x[2, 0, 32] = np.nan, np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        norm = Given(library, gpu, rng, 3, 64, 16, (64,), (2,), x=x)
    got = norm.forward(expanded=True, packed=True)
    check_four_bit(norm, got)
    bad = np.zeros((3, 16), bool)
    bad[0, 0] = bad[1, -1] = bad[2, 8] = True
    np.testing.assert_array_equal(np.isnan(got["y"].astype(np.float32)).all(1), np.repeat(bad, 4, axis=1))


@pytest.mark.gpu
def test_y_in_the_place_of_x(library, gpu, rng):
    """Special blocks (beta -80), which are made again at the end, read what was written."""
    norm = Given(library, gpu, rng, 2, 1024, 16, (64,), (4,), beta=np.repeat([-80, 1], 32))
    want = norm.forward(expanded=True)
    for part in ("", "_image", "_pixel"):
        norm.fields[f"y{part}"] = norm.fields[f"x{part}"]
    gpu.check(gpu.rt.cudaMemset(norm.fields["expanded"], gpu.POISON, want["expanded"].nbytes))
    library.call("group_norm", norm.args("group_norm"), 0)
    np.testing.assert_array_equal(norm.read("x").view(np.uint16), want["y"].view(np.uint16))
    got = gpu.get(norm.fields["expanded"], norm.shape, np.uint8)
    np.testing.assert_array_equal(got, want["expanded"])


@pytest.mark.gpu
@pytest.mark.parametrize("n, pixels, channels, groups", [(264, 80, 2048, 32), (5, 64, 256, 32)])
def test_an_image_gives_the_same_bits_in_any_batch(library, gpu, rng, n, pixels, channels, groups):
    """Chunks of 40 pixels a thread, more than one segment, and of few."""
    beta = np.tile(np.repeat([-80, 1], 16), channels // 32)
    x = rng.standard_normal((1, pixels, channels)).astype(BF16)
    one = Given(library, gpu, rng, 1, pixels, groups, (channels,), (2,), x=x, beta=beta)
    want = one.forward(expanded=True)
    check(one, want)
    check_four_bit(one, want)
    all_of = Given(library, gpu, rng, 1, pixels, groups, (channels,), (2,), x=x, gamma=one.gamma, beta=beta)
    all_of.addresses = [gpu.put(np.repeat(one.sums[0], n, 0))]
    all_of.shape, all_of.fields["n"] = (n, pixels, channels), n
    all_of.picture("x", np.broadcast_to(x, all_of.shape))
    got = all_of.forward(y=False, expanded=True)
    for name in ("expanded", "mean", "rstd"):
        alike = np.broadcast_to(want[name].view(np.uint8), got[name].view(np.uint8).shape)
        np.testing.assert_array_equal(got[name].view(np.uint8), alike)


# ---- without a GPU
GOOD = {"n": 2, "pixels": 4, "c": 32, "groups": 8, "x": 64, "gamma": 64, "beta": 64, "x_image": 128,
        "x_pixel": 32, "y": 64, "y_image": 128, "y_pixel": 32, "eps": 1e-5}  # fmt: skip


@pytest.mark.parametrize(
    "sums, parts, channels, sentence",
    [
        ((64,), (0,), (32,), r"sum_parts\[0\] is 0"),
        ((64,), (1,), (0,), r"sum_channels\[0\] is 0"),
        ((68,), (1,), (32,), r"sums\[0\] is 4 bytes past a multiple of 8"),
        ((64,), (1,), (16,), "sum_channels are 16 and 0, but c is 32"),
        ((64, 0), (1, 1), (16, 16), "sum_channels are 16 and 0, but c is 32"),
        ((64, 64), (1, 1), (16, 17), "sum_channels are 16 and 17, but c is 32"),
        ((64, 64), (1, -1), (16, 16), r"sum_parts\[1\] is -1"),
        ((64, 65), (1, 1), (16, 16), r"sums\[1\] is 1 bytes past"),
        ((0, 64), (1, 1), (16, 16), r"sums\[0\] is NULL"),
    ],
)
def test_bad_sums_are_refused_before_any_launch(library, sums, parts, channels, sentence):
    args = library.ffi.new("fp4bf16_group_norm_args*")
    kinds = dict(library.ffi.typeof("fp4bf16_group_norm_args").fields)
    for field, value in GOOD.items():
        pointer = kinds[field].type.kind == "pointer"
        setattr(args, field, library.ffi.cast(kinds[field].type, value) if pointer else value)
    for i, (address, part, channel) in enumerate(zip(sums, parts, channels, strict=True)):
        args.sums[i] = library.ffi.cast("const float*", address)
        args.sum_parts[i], args.sum_channels[i] = part, channel
    with pytest.raises(ValueError, match=f"group_norm: {sentence}"):
        library.call("group_norm", args, 0)


@pytest.mark.usefixtures("host_cuda")
@pytest.mark.parametrize("channels, parts", [((32,), (3,)), ((20, 12), (2, 1))])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_wrapper(rng, channels, parts, activation):
    """`cuda_norm` with the emulated library, which takes the statistics from the sums: those of 2 x here."""
    shape, groups = (2, 3, 5, 32), 4
    x = rng.standard_normal(shape).astype(BF16)
    gamma, beta = (rng.standard_normal(32).astype(np.float32) for _ in range(2))
    edges = np.cumsum([0, *channels])
    flat = 2 * x.reshape(2, 15, 32)
    sums = [sums_of(flat[..., a:b], p) for a, b, p in zip(edges, edges[1:], parts, strict=False)]
    held = [device.operand(put(v), name) for v, name in ((x, "x"), (gamma, "gamma"), (beta, "beta"))]
    y, mean = (device.empty(s, t, held[0]) for s, t in ((shape, "bfloat16"), ((2, groups), "float32")))
    cuda_norm.group_norm(*held, groups, EPS, 0, silu=activation == "silu", y=y, mean=mean,
                         sums=[device.operand(put(s), "sums") for s in sums])  # fmt: skip
    of_two = grouped(flat, groups)
    np.testing.assert_allclose(device.to_host(mean.owner), of_two.mean((1, 3)), rtol=1e-5, atol=1e-6)
    h = (grouped(x.reshape(2, 15, 32), groups) - of_two.mean((1, 3), keepdims=True)) / np.sqrt(
        of_two.var((1, 3), keepdims=True) + EPS
    )
    z = h.reshape(shape) * gamma + beta
    want = silu(z) if activation else z
    assert (np.abs(device.to_host(y.owner) - want) <= ROUNDING * np.abs(want) + 1e-5).all()


@pytest.mark.usefixtures("host_cuda")
def test_wrapper_without_sums_makes_its_own(rng):
    x = rng.standard_normal((2, 6, 16)).astype(BF16)
    one, none = np.ones(16, np.float32), np.zeros(16, np.float32)
    held = [device.operand(put(v), name) for v, name in ((x, "x"), (one, "gamma"), (none, "beta"))]
    y = device.empty(x.shape, "bfloat16", held[0])
    cuda_norm.group_norm(*held, 4, EPS, 0, silu=False, y=y)
    want = group_norm(x, 4, one, none, EPS)
    assert (np.abs(device.to_host(y.owner) - want) <= ROUNDING * np.abs(want) + 1e-6).all()
