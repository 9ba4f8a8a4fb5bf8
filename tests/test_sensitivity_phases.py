"""Omegas of weights that are multiplied by phases, against the rise of a loss and their definitions."""

from __future__ import annotations

import numpy as np
import pytest

import fp4bf16 as fb
from fp4bf16 import nn
from fp4bf16.nn import fused
from fp4bf16.nn import ops as F
from fp4bf16.nn.layers import UpsampledConv2d
from fp4bf16.routing import ActivationProbe, ClosedLoop
from fp4bf16.routing.curvature import layer_traces
from fp4bf16.routing.sensitivity import curvature_omega, fisher_omega, quantisation_error
from fp4bf16.train.config import LoopConfig


def error_of(p):
    return fb.dequantize(p.twin()).astype(np.float64) - p.data


def test_the_error_is_a_quarter_of_the_kernels(rng):
    """Which is that of the plain weight again where the kernels' own error is S times its error: 4 kernels
    hold each tap.
    """
    layer = UpsampledConv2d(32, seed=rng)
    p = layer.weight
    assert quantisation_error(p, True) == pytest.approx((error_of(p.phases()) ** 2).sum() / 4, rel=1e-9)
    d = rng.standard_normal((500, 3, 3, 32))  # independent errors of taps
    ratio = (fused.phase_weights(d) ** 2).sum() / (d**2).sum()
    assert ratio == pytest.approx(4, rel=0.05)


@pytest.mark.parametrize("phases", [True, False])
def test_omegas_predict_the_rise_of_a_quadratic_loss(phases, rng):
    """Squares of the product of white pictures: the Hessian in the kernels is nearly a multiple of the
    identity. Of 20 seeds predictions by phases lay within 1.5 % of the rise, plain ones within 6 %.
    """
    layer = UpsampledConv2d(16, seed=rng)
    layer.phases, layer.bias = phases, None
    x = rng.standard_normal((24, 12, 12, 16)).astype(np.float32)

    with fb.tracks("reference"), nn.no_grad():
        target = layer(x).data

    def loss():
        return F.sum((layer(x) - target) ** 2)

    with fb.tracks("reference"):
        trace = layer_traces(loss, {"w": layer.weight}, 8, 0)["w"]
        kernels = layer.multiplied("fp4")
        changed = fb.dequantize(kernels.twin(), dtype="float32").reshape(kernels.shape)
        pictures = x if phases else fused.upsample_nearest(x)
        y = F.conv2d(pictures, changed, None, 1, 1, None, "reference").data
    y = fused.interleave_phases(y) if phases else y
    rise = ((y - target).astype(np.float64) ** 2).sum()
    assert curvature_omega(trace, layer.weight, phases) == pytest.approx(rise, rel=0.12)


def test_fisher_is_its_formula_by_phases(rng):
    """From gradients of the kernels that are independent, of squares that differ by output: the kernels'
    own sum g_K^2 (Q(K) - K)^2 / 2 comes back from the taps' moments alone.
    """
    layer = UpsampledConv2d(16, seed=rng)
    p, samples = layer.weight, 400
    size = np.exp2(rng.integers(-2, 3, (16, 1, 1, 1, 1, 1)).astype(np.float64))
    v = np.zeros(p.shape)
    for _ in range(samples):
        v += fused.phase_weights_vjp(size * rng.standard_normal((16, 2, 2, 2, 2, 16))) ** 2 / samples
    kernels = p.phases()
    want = 0.5 * 3.0 * 8 * (size**2 * error_of(kernels).reshape(16, 2, 2, 2, 2, 16) ** 2).sum()
    assert fisher_omega(v, p, 8, scale=3.0, phases=True) == pytest.approx(want, rel=0.05)
    assert fisher_omega(np.full(p.shape, np.inf), p, 8, phases=True) == np.inf


@pytest.mark.parametrize("fast, sensitivity", [("fp4", "fisher"), ("dual", "fisher"), ("dual", "curvature")])
def test_the_omega_of_a_loop_is_of_the_product_on_its_fast_track(fast, sensitivity, rng):
    """On "dual" an upsampling convolution is not by phases."""
    unet = nn.UNet2D(nn.UNetConfig.tiny(), seed=1)
    settings = LoopConfig(forward="router", sensitivity=sensitivity)
    loop = ClosedLoop(unet, {"*": fast}, settings, 100, 0, 8)
    name = next(name for name in loop.free if "upsamplers" in name)
    assert unet.phased("fp4") == unet.phased("bf16") == [name] and loop.router.fast == fast
    p = unet.named_parameters()[name]
    moment = rng.random(p.shape) * (1 + 9 * (np.arange(p.shape[0]) % 2)[:, None, None, None])
    loop.traces = {name: 3.0}

    def expected(phases):
        if sensitivity == "fisher":
            return fisher_omega(moment, p, 4, 2.0, phases)
        return curvature_omega(3.0, p, phases)

    assert loop._weight_omega(name, {name: moment}, 4, 2.0) == expected(fast != "dual")
    assert expected(True) != expected(False)


@pytest.mark.parametrize("operands", ["both", "activations"])
def test_the_probe_is_of_the_product_by_phases(operands, rng):
    layer = UpsampledConv2d(16, seed=rng)
    layer.key, x = "layer", rng.standard_normal((2, 4, 4, 16)).astype(np.float32)
    probe = ActivationProbe(operands=operands)
    with nn.watching(probe):
        y = layer(x)
    g = rng.standard_normal(y.shape).astype(np.float32)
    y.backward(g)
    on_grid = fb.dequantize(fb.quantize(x, outer="image", search="fast"), dtype="float32")
    quantised = (x, "fp4") if operands == "both" else (on_grid, "bf16")
    low, high = (F.upsample_conv(a, layer.weight, None, t).data.astype(np.float64)
                 for a, t in (quantised, (x, "bf16")))  # fmt: skip
    want = 0.5 * 2 * np.sum((g * (low - high)) ** 2)
    assert probe.omega["layer"] == pytest.approx(want, rel=0.02)  # of inputs Q(x) - x is rounded itself
