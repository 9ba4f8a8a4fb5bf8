"""Certificates of upsampling convolutions by phases (docs/certificate.md, section 2): factor, bound,
estimate, norm, and what the watchers of a layer get."""

from __future__ import annotations

import numpy as np
import pytest

import fp4bf16 as fb
from fp4bf16 import nn
from fp4bf16.certify import conv_factor
from fp4bf16.consistency import Fallback, Sketcher, certified_ratio
from fp4bf16.nn import fused
from fp4bf16.nn import ops as F
from fp4bf16.nn.layers import UpsampledConv2d


class Certified(nn.Watcher):
    """Keeps the certificate of each product, with an estimate where a sketch is asked for."""

    def __init__(self, sketch=False):
        self.sketch, self.seen = sketch, []

    def wants_certificate(self, layer):
        return nn.Estimate(7, 0, len(self.seen)) if self.sketch else True

    def product(self, layer, x, y, run, certificate):
        self.seen.append((x, y.data, run("bf16").data, certificate))
        return y


def layer_of(rng, kind, c, track="fp4"):
    layer = UpsampledConv2d(c, seed=rng)
    layer.track = track
    w, b = layer.weight.data, layer.bias.data
    if kind == "loud":
        w *= np.exp2(rng.integers(-8, 9, (c, 1, 1, 1)))
        b *= 1000
    elif kind == "alike":  # taps of a kernel are alike: the sums are four times as large
        w[...] = w[:, 1:2, 1:2] * (1 + 0.1 * w)
    elif kind == "low rank":
        w[...] = (rng.standard_normal((c, 1)) @ rng.standard_normal((1, 9 * c))).reshape(w.shape)
    layer.weight.touch()
    return layer


def pictures_of(rng, kind, layer, shape):
    x = rng.standard_normal(shape)
    if kind == "positive":
        x = np.abs(x)
    elif kind == "along":  # the small pictures' patches along the kernels' first singular vector
        kernels = layer.weight.phases().data.reshape(-1, 4, shape[3]).astype(np.float64)
        first = np.linalg.svd(kernels.reshape(len(kernels), -1), full_matrices=False)[2][0]
        x = np.broadcast_to(first.reshape(4, -1)[0], shape) * rng.standard_normal((*shape[:3], 1))
    elif kind == "outliers":
        x *= np.where(rng.random(shape) < 0.02, 100, 1)
    return x.astype(np.float32)


def cases(rng, count):
    for i in range(count):
        c = int(rng.choice([16, 32, 48]))
        layer = layer_of(rng, ("plain", "loud", "alike", "low rank")[i % 4], c)
        shape = (int(rng.integers(1, 4)), int(rng.integers(1, 7)), int(rng.integers(1, 7)), c)
        yield layer, pictures_of(rng, ("normal", "positive", "along", "outliers")[i // 4 % 4], layer, shape)


def test_a_pixel_lies_in_four_patches_of_a_phase(rng):
    """Less at the border: twice the norm is met where the pictures are zero there."""
    for framed in (False, True):
        x = rng.standard_normal((2, 5, 4, 3))
        if framed:
            x[:, [0, -1]] = 0
            x[:, :, [0, -1]] = 0
        most, size = conv_factor((2, 2)) * np.linalg.norm(x), []
        for a in (0, 1):
            for b in (0, 1):
                padded = np.pad(x, ((0, 0), (1 - a, a), (1 - b, b), (0, 0)))
                size.append(np.linalg.norm(np.lib.stride_tricks.sliding_window_view(padded, (2, 2), (1, 2))))
        assert max(size) <= most * (1 + 1e-12)
        assert np.allclose(size, most) == framed
    assert conv_factor((2, 2)) == 2


def test_the_bound_holds(rng):
    """Of 96 products; float32 adds the bias on both sides, as in test_watch.py."""
    ratios = []
    for layer, x in cases(rng, 96):
        watcher = Certified()
        with nn.watching(watcher), nn.no_grad():
            plain = layer(x).data
        ((_, y, other, found),) = watcher.seen
        with nn.no_grad(), nn.watching():
            assert np.array_equal(layer(x).data, plain) and np.array_equal(plain, y)
        apart = np.linalg.norm(y.astype(np.float64) - other)
        assert apart <= found.bound + found.accumulation
        product = np.linalg.norm(F.upsample_conv(x, layer.weight, None, "fp4").data.astype(np.float64))
        noise = 2.0**-20 * np.linalg.norm(y.astype(np.float64))  # y - bias, y rounded
        assert product * (1 - 1e-6) - 2 * noise <= found.terms["product"] <= product * (1 + 1e-6)
        assert found.relative >= apart / product * (1 - 1e-6)
        assert np.isclose(certified_ratio(found), (found.bound + found.accumulation) / found.terms["product"])
        ratios.append(found.bound / max(apart, 1e-30))
    assert np.median(ratios) < 20  # a bound of some use: 3 to 19 on these, the median 5.7


def test_the_norms_are_those_of_the_kernels(rng):
    layer = layer_of(rng, "plain", 32)
    x = pictures_of(rng, "normal", layer, (2, 4, 4, 32))
    watcher = Certified()
    with nn.watching(watcher):
        layer(x)
    terms, kernels = watcher.seen[0][3].terms, layer.weight.phases().data.reshape(128, -1)
    on_grid = fb.dequantize(fb.quantize(x, outer="image", search="fast"), dtype="float32")
    twin = fb.dequantize(layer.weight.phases().twin(), dtype="float32").reshape(128, -1)
    for name, value in (
        ("sigma_used", np.linalg.norm(twin, 2)), ("sigma_error", np.linalg.norm(kernels - twin, 2)),
        ("w_used", np.linalg.norm(twin)), ("x_used", 2 * np.linalg.norm(on_grid)),
    ):  # fmt: skip
        assert value * (1 - 1e-2) <= terms[name] <= 1.05 * value, name
    assert terms["sigma_used"] >= np.linalg.norm(twin, 2)


def test_the_estimate_is_of_the_weight_itself(rng):
    """Over the distance in all of 48 products: each with 0.999 on its own, and far more where the distance is
    not of rank one. Sharper than the bound, 0.17 to 0.67 of it on 10 others.
    """
    shares = []
    for layer, x in cases(rng, 48):
        watcher = Certified(sketch=True)
        with nn.watching(watcher), nn.no_grad():
            layer(x)
        _, y, other, found = watcher.seen[0]
        apart = np.linalg.norm(y.astype(np.float64) - other)
        assert apart <= found.estimate + found.accumulation
        assert found.reference == "master" and found.confidence == 0.999
        shares.append(found.estimate / found.bound)
    assert np.median(shares) < 0.8


def test_nothing_is_certified_of_bf16_and_zeros_have_no_ratio(rng):
    layer = layer_of(rng, "plain", 16)
    x, sketcher, fallback = np.zeros((1, 2, 2, 16), np.float32), Sketcher(1), Fallback(1e-3)
    watcher = Certified()
    with nn.watching(watcher), nn.no_grad():
        layer(x)
        with fb.tracks("bf16"):
            layer(x + 1)
    zeros, none = (seen[3] for seen in watcher.seen)
    assert certified_ratio(zeros) == 0 and none is None
    with nn.watching(fallback, sketcher), nn.no_grad():
        y = layer(x + 1).data
    with fb.tracks("bf16"):
        assert np.array_equal(y, layer(x + 1).data)
    assert fallback.calls == 1 and sketcher.sketches == 1


@pytest.mark.parametrize("track", ["fp4", "bf16"])
def test_another_track_is_by_phases_too(track, rng):
    """What a watcher's ``run`` gives has the bits of that track unwatched, and gradients reach the weight."""
    layer = layer_of(rng, "plain", 16, track)
    x = pictures_of(rng, "normal", layer, (2, 3, 4, 16))
    found = {}

    class Both(nn.Watcher):
        def product(self, layer, x, y, run, certificate):
            found.update({t: run(t).data for t in ("fp4", "bf16", "dual", "reference")})
            return y

    with nn.watching(Both()):
        layer(x).sum().backward()
    for other, y in found.items():
        with fb.tracks(other):
            assert np.array_equal(y, layer(x).data), other
    assert np.array_equal(found["bf16"], F.upsample_conv(x, layer.weight, layer.bias, "bf16").data)
    assert layer.weight.grad.any()
    exact = F.conv2d(fused.upsample_nearest(x), layer.weight, layer.bias, 1, 1, None, "reference").data
    assert np.allclose(found["reference"], exact, rtol=1e-5, atol=1e-5)
