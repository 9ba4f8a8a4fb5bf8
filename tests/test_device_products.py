"""The device network's products, by the emulated library, on numbers that FP4 and BF16 hold exactly.

Blocks hold a 6, so that both scale searches find the scale with no error: every product must then be exact
but for the rounding of its result.
"""

from __future__ import annotations

import host_cuda as emulation
import numpy as np
import pytest
from host_cuda import Arrays, host_cuda, put  # noqa: F401  (host_cuda is a fixture)

import fp4bf16 as fb
from fp4bf16 import device, nn
from fp4bf16.backends import cuda_math
from fp4bf16.interop import BFLOAT16
from fp4bf16.nn.cuda.parameters import DeviceParameters
from fp4bf16.nn.cuda.products import (
    Layer,
    Norm,
    input_gradient,
    normed,
    pictures,
    product,
    upsampled,
    weight_gradient,
)
from fp4bf16.nn.cuda.workspace import SAVES, Pictures, Run, part
from fp4bf16.python_ref.formats import E4M3

CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@pytest.fixture(autouse=True)
def _arithmetic(host_cuda, monkeypatch):  # noqa: F811
    monkeypatch.setitem(cuda_math._KNOWN, "fake", Arrays())
    monkeypatch.setattr(emulation, "POISON", 0xFF)


def on_grid(rng, shape):
    """Codes with a 6 in each block of the last axis, times a power of two for each index of the first."""
    x = rng.choice(CODES, shape)
    x[..., ::16] = 6
    return x * np.exp2(rng.integers(-3, 3, (shape[0], *[1] * (len(shape) - 1)))).astype(np.float32)


class Net(nn.Module):
    def __init__(self, rng, c, o, kernel=3, stride=1, padding=1):
        self.conv = nn.Conv2d(c, o, kernel, stride, padding)
        self.conv.weight.assign(on_grid(rng, self.conv.weight.shape))
        self.conv.bias.assign(rng.integers(-8, 8, o).astype(np.float32))
        self.norm = nn.GroupNorm(4, c)
        self.norm.weight.assign(rng.uniform(0.5, 2, c).astype(np.float32))
        self.flat  # noqa: B018  (packs the parameters)


def run_of(net, **options):
    weights = DeviceParameters(net.flat, put(np.zeros(1, np.float32)))
    weights.refresh()
    defaults = {"save": "packed", "backward": "twin", "accumulate": "fast"}
    return Run(weights, weights, weights.data, True, **defaults | options)


def placed(x):
    """BF16 pictures on the device as channels 8 .. of wider ones, the others NaN."""
    c = x.shape[3]
    wide = np.full((*x.shape[:3], 8 + -(-c // 8) * 8), np.nan, BFLOAT16)
    wide[..., 8 : 8 + c] = x
    return part(device.operand(put(wide), "x"), 8, c)


def numbers(x):
    """What a `DeviceArray` of any strides holds, float64."""
    return np.array(emulation.memory(x.address, x.shape, _dtype(x), x.strides)).astype(np.float64)


def _dtype(x):
    return BFLOAT16 if x.dtype == "bfloat16" else np.dtype(x.dtype)


def rounded(x):
    return np.asarray(x, np.float32).astype(BFLOAT16).astype(np.float64)


CASES = [
    (16, 8, 3, 1, 1),
    (12, 16, 3, 1, 1),
    (32, 24, 3, 2, ((0, 1), (0, 1))),
    (24, 8, 3, 1, 1),
    (16, 3, 1, 1, 0),
]


@pytest.mark.parametrize("track", ["fp4", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_product_and_gradients_are_exact(case, track, rng):
    c, o, kernel, stride, padding = case
    net = Net(rng, c, o, kernel, stride, padding)
    run, layer, x = run_of(net), Layer("conv", net.conv), on_grid(rng, (2, 6, 4, c))
    how = dict(stride=stride, padding=padding, track="reference")
    w64, x64 = net.conv.weight.data.astype(np.float64), x.astype(np.float64)
    want = fb.conv2d(x64, w64, **how) + net.conv.bias.data
    if track == "bf16" and c % 8:  # as the first layer of a network: padded with zeros
        x16 = np.zeros((*x.shape[:3], 16), np.float32)
        x16[..., :c] = x
        feed = pictures(run, placed(x16), track)
        again = placed(x)
    else:
        feed = pictures(run, placed(x), track)
        again = feed.again(run)
    assert (feed.scale is None) == (track == "bf16")
    assert np.array_equal(numbers(again), x)
    d = run.empty(layer.output(x.shape))
    product(run, layer, feed, d)
    assert np.array_equal(numbers(d), rounded(want))
    g = rng.integers(-4, 5, want.shape).astype(np.float32)
    placed_g = placed(g)
    weight_gradient(run, layer, again, placed_g)
    flat = run.gradients
    want_dw = fb.conv.conv2d_wgrad(g.astype(np.float64), x64, (kernel, kernel), **how)
    assert np.array_equal(numbers(flat.grad_of("conv.weight")), want_dw.astype(np.float32))
    assert np.array_equal(numbers(flat.grad_of("conv.bias")), g.sum((0, 1, 2)))
    if c % 8 == 0:
        dx = input_gradient(run, layer, track, placed_g, x.shape)
        want_dx = fb.conv.conv2d_dgrad(g.astype(np.float64), w64, x.shape, **how)
        assert np.array_equal(numbers(dx), rounded(want_dx))


def test_upsampling_doubles_what_the_product_reads(rng):
    x = on_grid(rng, (2, 3, 2, 16))
    for track in ("fp4", "bf16"):
        run = run_of(Net(rng, 16, 8))
        feed = upsampled(run, placed(x), track)
        assert np.array_equal(numbers(feed.again(run)), x.repeat(2, 1).repeat(2, 2))
        values = numbers(feed.x)
        if track == "fp4":
            values = E4M3[values.astype(np.uint8)] * numbers(feed.scale)[:, None, None, None]
        assert np.array_equal(values, x.repeat(2, 1).repeat(2, 2))


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("c", [16, 24])
def test_the_backward_sees_what_the_forward_saw(c, save, rng):
    """Of a norm and of pictures, in each way to save: `again` is what the product multiplied, exactly."""
    net = Net(rng, c, 8)
    run, x = run_of(net, save=save), rng.standard_normal((2, 4, 3, c)).astype(np.float32)
    norm, source = Norm("norm", net.norm), placed(x)
    feed, statistics = normed(run, norm, Pictures(source), True, "fp4")
    assert statistics["mean"].shape == (2, 4)
    y = numbers(normed(run, norm, Pictures(source), True, "bf16")[0].x)
    for found, near in ((feed, y), (pictures(run, source, "fp4"), rounded(x))):
        scale = numbers(found.scale).reshape(-1, 1, 1, 1)
        seen = (E4M3[numbers(found.x).astype(np.uint8)] * scale)[..., :c]
        again = numbers(found.again(run))
        assert np.array_equal(again, seen)
        assert 0.02 < np.linalg.norm(seen - near) / np.linalg.norm(near) < 0.12  # 9 % on Gaussian data
