"""Group normalisation without a GPU: refused arguments, and the wrapper with the emulated library."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from host_cuda import host_cuda, put  # noqa: F401 (a fixture)
from host_norm import static_exponent

from fp4bf16 import device
from fp4bf16.backends import cpu_quantize, cuda_norm
from fp4bf16.errors import ShapeError
from fp4bf16.formats import FORMATS
from fp4bf16.python_ref.norm import group_norm, group_norm_vjp

BF16 = np.dtype(ml_dtypes.bfloat16)
EXACT = FORMATS["nvfp4_exact"]
EPS = 1e-5
ROUNDING = 2.0**-8  # one rounding to BF16

# ---- arguments
GOOD = {"n": 2, "pixels": 4, "c": 32, "groups": 8, "x": 64, "gamma": 64, "beta": 64, "x_image": 128,
        "x_pixel": 32, "y": 64, "y_image": 128, "y_pixel": 32, "eps": 1e-5}  # fmt: skip


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"n": -1}, "n is -1"),
        ({"c": 2**41}, "c is .* 0 to 1099511627776"),
        ({"groups": 0}, "groups is 0"),
        ({"groups": 5}, "c is 32, but must be a multiple of groups, 5"),
        ({"activation": 2}, "activation is 2"),
        ({"eps": -1.0}, "eps is -1"),
        ({"eps": float("nan")}, "eps is nan"),
        ({"x": 0}, "x is NULL"),
        ({"x": 65}, "x is 1 bytes past a multiple of 2"),
        ({"x_pixel": 2**41}, "x_pixel is"),
        ({"gamma": 66}, "gamma is 2 bytes past a multiple of 4"),
        ({"mean": 66}, "mean is 2 bytes past"),
        ({"y_pixel": 31}, "y_pixel is 31, but must be 32 to"),
        ({"c": 40, "expanded": 64, "y": 0}, "c is 40, but FP4 results need a multiple of 16"),
        ({"packed": 64, "outer_scale": 64}, "block_scale is NULL, but packed needs it"),
        ({"expanded": 64}, "outer_scale is NULL"),
    ],
)
def test_bad_arguments_are_refused_before_any_launch(library, fields, sentence):
    _refused(library, "group_norm", GOOD | fields, sentence)


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"pixels": -3}, "pixels is -3"),
        ({"g": 0}, "g is NULL"),
        ({"mean": 0}, "mean is NULL"),
        ({"rstd": 0}, "rstd is NULL"),
        ({"dx_pixel": 8}, "dx_pixel is 8, but must be 32 to"),
        ({"add": 67, "add_image": 128, "add_pixel": 32}, "add is 1 bytes past"),
        ({"dshift": 65}, "dshift is 1 bytes past"),
        ({"workspace": 0}, "workspace is NULL"),
        ({"workspace": 72}, "workspace is 8 bytes past a multiple of 16"),
    ],
)
def test_bad_arguments_of_the_gradient_are_refused(library, fields, sentence):
    more = {"g": 64, "g_image": 128, "g_pixel": 32, "dx": 64, "dx_image": 128, "dx_pixel": 32, "mean": 64,
            "rstd": 64, "workspace": 64}  # fmt: skip
    good = {k: v for k, v in GOOD.items() if not k.startswith("y") and k != "eps"} | more
    _refused(library, "group_norm_backward", good | fields, sentence)


def _refused(library, name, fields, sentence):
    args = library.ffi.new(f"fp4bf16_{name}_args*")
    kinds = dict(library.ffi.typeof(f"fp4bf16_{name}_args").fields)
    for field, value in fields.items():
        pointer = kinds[field].type.kind == "pointer"
        setattr(args, field, library.ffi.cast(kinds[field].type, value) if pointer else value)
    with pytest.raises(ValueError, match=f"{name}: {sentence}"):
        library.call(name, args, 0)


def test_empty_pictures_are_nothing_to_do(library):
    for name in ("group_norm", "group_norm_backward"):
        for field in ("n", "pixels", "c"):
            args = library.ffi.new(f"fp4bf16_{name}_args*")
            args.n = args.pixels = args.c = args.groups = 1
            setattr(args, field, 0)
            library.call(name, args, 0)


# ---- the wrapper
@pytest.mark.usefixtures("host_cuda")
class TestWrapper:
    """`cuda_norm` with the emulated library."""

    def arrays(self, rng, shape, groups):
        x = rng.standard_normal(shape).astype(BF16)
        vectors = [rng.standard_normal(shape[-1]).astype(np.float32) for _ in range(2)]
        held = {"x": put(x), "gamma": put(vectors[0]), "beta": put(vectors[1])}
        found = {name: device.operand(array, name) for name, array in held.items()}
        return x, vectors, found

    def made(self, like, shape, dtype="float32"):
        return device.empty(shape, dtype, like)

    @pytest.mark.parametrize("shape", [(2, 4, 4, 32), (3, 7, 16), (1, 1, 1, 16), (0, 4, 4, 16)])
    @pytest.mark.parametrize("activation", [None, "silu"])
    def test_forward(self, rng, shape, activation):
        x, (gamma, beta), d = self.arrays(rng, shape, 4)
        y, stats = self.made(d["x"], shape, "bfloat16"), self.made(d["x"], (shape[0], 4))
        byte, outer = self.made(d["x"], shape, "uint8"), self.made(d["x"], (1,))
        cuda_norm.group_norm(d["x"], d["gamma"], d["beta"], 4, EPS, 0, silu=activation == "silu", y=y,
                             expanded=byte, outer_scale=outer, mean=stats)  # fmt: skip
        if 0 in shape:
            return
        want = group_norm(x, 4, gamma, beta, EPS, activation)
        got = device.to_host(y.owner)
        assert (np.abs(got.astype(np.float64) - want) <= ROUNDING * np.abs(want) + 1e-6).all()
        e = static_exponent(gamma, beta, x[0].size // 4)
        flat = got.astype(np.float32).reshape(-1, shape[-1])
        q = cpu_quantize.quantize_rows(flat, EXACT, np.full(len(flat), 2.0**e, np.float32), None, "fast",
                                       "propagate")  # fmt: skip
        expanded = cpu_quantize.expand_rows(q.packed, q.block_scale, EXACT).reshape(shape)
        np.testing.assert_array_equal(device.to_host(byte.owner), expanded)
        assert device.to_host(outer.owner)[0] == np.float32(2.0**e)
        mean = x.astype(np.float64).reshape(shape[0], -1, 4, shape[-1] // 4).mean((1, 3))
        np.testing.assert_allclose(device.to_host(stats.owner), mean, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("activation", [None, "silu"])
    def test_backward(self, rng, activation):
        shape, groups = (2, 3, 5, 16), 4
        x, (gamma, beta), d = self.arrays(rng, shape, groups)
        g, add = (rng.standard_normal(shape).astype(BF16) for _ in range(2))
        mean, rstd = self.made(d["x"], (2, groups)), self.made(d["x"], (2, groups))
        silu = activation == "silu"
        cuda_norm.group_norm(d["x"], d["gamma"], d["beta"], groups, EPS, 0, silu=silu, mean=mean, rstd=rstd)
        dx, shift = self.made(d["x"], shape, "bfloat16"), self.made(d["x"], (2, 16))
        sums = [device.operand(put(np.ones(16, np.float32)), name) for name in ("dgamma", "dbeta")]
        cuda_norm.group_norm_backward(
            d["x"], device.operand(put(g), "g"), d["gamma"], d["beta"], groups, 0, silu=silu, mean=mean,
            rstd=rstd, dx=dx, add=device.operand(put(add), "add"), dgamma=sums[0], dbeta=sums[1],
            dshift=shift,
        )  # fmt: skip
        want, dgamma, dbeta = group_norm_vjp(g, x, groups, gamma, beta, EPS, activation)
        got = device.to_host(dx.owner).astype(np.float64)
        whole = want + add.astype(np.float64)
        assert (np.abs(got - whole) <= ROUNDING * np.abs(whole) + 1e-5).all()
        np.testing.assert_allclose(device.to_host(shift.owner), want.sum((1, 2)), atol=1e-4)
        np.testing.assert_allclose(device.to_host(sums[0].owner), dgamma + 1, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(device.to_host(sums[1].owner), dbeta + 1, rtol=1e-4, atol=1e-4)

    def test_views_of_wider_pictures(self, rng):
        """Channels cut out, images left out; pixels that are not evenly spaced are refused."""
        wide = put(rng.standard_normal((4, 6, 5, 48)).astype(BF16))
        gamma, beta = (device.operand(put(np.ones(16, np.float32)), name) for name in ("gamma", "beta"))
        x = device.operand(wide[::2, :, :, 16:32], "x")
        y = device.operand(put(np.zeros((2, 6, 5, 16), BF16)), "y")
        cuda_norm.group_norm(x, gamma, beta, 2, EPS, 0, silu=False, y=y)
        want = group_norm(wide.array[::2, :, :, 16:32], 2, np.ones(16), np.ones(16), EPS)
        error = np.abs(device.to_host(y.owner).astype(np.float64) - want)
        assert (error <= ROUNDING * np.abs(want) + 1e-6).all()
        with pytest.raises(ShapeError, match="x of shape .* evenly spaced"):
            cuda_norm.group_norm(device.operand(wide[:, :, :3, :16], "x"), gamma, beta, 2, EPS, 0, silu=False)

    def test_empty_and_outer_scale_of_nothing(self):
        assert static_exponent(np.zeros(3), np.zeros(3), 16) == 0
        assert static_exponent(np.ones(1), np.zeros(1), 288**2 + 1) == 0
        assert static_exponent(np.ones(1), np.full(1, 2.0**-30), 288**2 + 1) == 1
        assert static_exponent(np.full(1, 1e-38), np.zeros(1), 2) == -119
