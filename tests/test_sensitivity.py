"""Predicted rises of the loss against measured ones; gradient noise and demotion by their definitions."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

import fp4bf16 as fb
from fp4bf16 import nn
from fp4bf16.errors import ConfigError, NonFiniteError, ShapeError
from fp4bf16.nn import Watcher, watching
from fp4bf16.nn import ops as F
from fp4bf16.nn.tape import Variable, grad, no_grad
from fp4bf16.routing.curvature import Trace, layer_traces
from fp4bf16.routing.sensitivity import (
    ActivationProbe,
    Demotion,
    GradientVariance,
    curvature_omega,
    fisher_omega,
    quantisation_error,
    squared_error_scale,
    squared_norms,
)


def parameter(rng, *shape):
    return nn.Parameter(rng.standard_normal(shape).astype(np.float32), "w")


def error_of(p):
    return fb.dequantize(p.twin()).astype(np.float64) - p.data


# ---- of a weight ----

SHAPES = [(1, 1), (3, 5), (7, 64), (5, 3, 3, 17), (1, 1, 1, 1), (4, 0), (0, 16)]


@pytest.mark.parametrize("shape", SHAPES)
def test_quantisation_error_is_that_of_the_twin(shape, rng):
    p = parameter(rng, *shape)
    assert quantisation_error(p) == pytest.approx((error_of(p) ** 2).sum(), rel=1e-9, abs=0)
    p.assign(2 * p.data + 1)
    assert quantisation_error(p) == pytest.approx((error_of(p) ** 2).sum(), rel=1e-9, abs=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_omegas_are_their_formulas(shape, rng):
    p, v = parameter(rng, *shape), rng.random(shape).astype(np.float32)
    trace = Trace(float(rng.random() * 10), 1.0, 8)
    want = 0.5 * trace.value / max(1, p.size) * (error_of(p) ** 2).sum()
    assert curvature_omega(trace, p) == curvature_omega(trace.value, p) == pytest.approx(want, rel=1e-9)
    want = 0.5 * 3.0 * 16 * (v * error_of(p) ** 2).sum()
    assert fisher_omega(v, p, 16, scale=3.0) == pytest.approx(want, rel=1e-6)
    assert curvature_omega(Trace(-2.0, 1.0, 8), p) == 0


def test_curvature_predicts_the_rise_of_a_quadratic_loss(rng):
    """Squares of x W^T with orthogonal x: the Hessian is the same in all directions, and Omega is exact."""
    layer = nn.Linear(48, 5, bias=False, seed=int(rng.integers(1 << 30))).to(np.float64)
    x, _ = np.linalg.qr(rng.standard_normal((48, 48)))
    target = x @ layer.weight.data.T

    def loss():
        return F.sum((layer(x) - target) ** 2)

    with fb.tracks("reference"):
        trace = layer_traces(loss, {"w": layer.weight}, 4, 0)["w"]
        predicted = curvature_omega(trace, layer.weight)
        layer.weight.assign(fb.dequantize(layer.weight.twin()))
        with no_grad():
            assert predicted == pytest.approx(loss().item(), rel=1e-6)


def regression(rng, pictures):
    """(x, W, targets) of a linear model at its optimum, with residuals of variance 0.04."""
    x, w = rng.standard_normal((pictures, 32)), parameter(rng, 6, 32)
    return x, w, x @ w.data.T + 0.2 * rng.standard_normal((pictures, 6))


def test_fisher_predicts_the_rise_of_a_squared_error(rng):
    """E[g^2] from batches of 8 at the optimum; the mean of 2000 x 192 squares errs by some 0.3 %, the linear
    model's own curvature by 1 / sqrt(16000)."""
    x, w, target = regression(rng, 16000)
    residual = x @ w.data.T - target
    gradients = np.einsum("bno,bni->boi", residual.reshape(2000, 8, 6), x.reshape(2000, 8, 32)) * (2 / 48)
    loss = float((residual**2).mean())
    omega = fisher_omega((gradients**2).mean(0), w, batch=8, scale=squared_error_scale(loss, 6))
    rise = ((x @ error_of(w).T) ** 2).mean()  # in expectation: residuals are independent of x
    assert omega == pytest.approx(rise, rel=0.05)


def test_what_is_not_finite_is_not_known(rng):
    p = parameter(rng, 4, 16)
    assert curvature_omega(math.nan, p) == curvature_omega(Trace(math.inf, math.inf, 1), p) == math.inf
    assert fisher_omega(np.full((4, 16), np.nan), p, 4) == math.inf
    p.data[0, 0] = np.inf
    p.touch()
    with pytest.raises(NonFiniteError):
        quantisation_error(p)


def test_errors_of_omegas(rng):
    p = parameter(rng, 4, 16)
    with pytest.raises(ShapeError, match=r"v_hat has shape \(16, 4\), but w has shape \(4, 16\)"):
        fisher_omega(np.ones((16, 4)), p, 4)
    with pytest.raises(ConfigError, match="batch is 0, but must be a positive"):
        fisher_omega(np.ones((4, 16)), p, 0)
    with pytest.raises(ConfigError, match="loss is nan"):
        squared_error_scale(math.nan, 3)
    with pytest.raises(ConfigError, match="outputs is 0"):
        squared_error_scale(1.0, 0)
    assert squared_error_scale(0.0, 3) == 0 and squared_error_scale(0.25, 12) == 24


# ---- of a product ----


class Seen(Watcher):
    """Products on both tracks."""

    def __init__(self):
        self.pairs = {}

    def product(self, layer, x, y, run, certificate):
        with no_grad():
            self.pairs[layer.key] = x, y, run("fp4").data, run("bf16").data
        return y


class Net(nn.Module):
    """A product of each kind, with bias, stride and residual."""

    def __init__(self, seed, track):
        rng = nn.generator(seed)
        self.first = nn.Conv2d(5, 24, 3, stride=2, padding=1, seed=rng)
        self.second = nn.Conv2d(24, 24, 3, padding=1, seed=rng)
        self.last = nn.Linear(24, 3, seed=rng)
        self.apply_route({"*": track})

    def forward(self, x):
        h = self.first(x)
        return self.last(F.silu(self.second(F.silu(h), residual=h)))


@pytest.mark.parametrize("track", ["bf16", "fp4", "dual"])
def test_probe_against_its_definition(track, rng):
    net, batch = Net(int(rng.integers(1 << 30)), track), int(rng.integers(1, 6))
    x = rng.standard_normal((batch, 6, 5, 5)).astype(np.float32)
    probe, seen = ActivationProbe(scale=3.0), Seen()
    with watching(probe):
        (net(x) ** 2).mean().backward()
    with watching(seen):
        loss = (net(x) ** 2).mean()
    outputs = {name: y for name, (_, y, _, _) in seen.pairs.items()}
    gradients = grad(loss, list(outputs.values()))
    assert set(probe.omega) == {"first.weight", "second.weight", "last.weight"} == set(outputs)
    for (name, (_, _, low, high)), g in zip(seen.pairs.items(), gradients, strict=True):
        error = low.astype(np.float64) - high
        want = 0.5 * 3.0 * batch * (g.data**2 * error**2).sum()
        assert probe.omega[name] == pytest.approx(want, rel=1e-4) and want > 0


def test_probe_of_the_activations_alone(rng):
    """x on the FP4 grid, weights and sums in float64; BF16 rounds the error by 2^-9 of itself."""
    net, x = Net(int(rng.integers(1 << 30)), "bf16"), rng.standard_normal((3, 6, 6, 5)).astype(np.float32)
    probe, seen = ActivationProbe(["first.weight", "last.weight"], operands="activations"), Seen()
    with watching(probe):
        (net(x) ** 2).mean().backward()
    with watching(seen):
        loss = (net(x) ** 2).mean()
    names = list(probe.omega)
    gradients = grad(loss, [seen.pairs[name][1] for name in names])
    for name, g in zip(names, gradients, strict=True):
        layer, given = (net.first if "first" in name else net.last), seen.pairs[name][0]
        given = given.data if isinstance(given, Variable) else given
        outer = "image" if layer is net.first else "row"
        error = fb.dequantize(fb.quantize(given, outer=outer, search="fast")).astype(np.float64) - given
        with fb.tracks("reference"):
            if layer is net.first:
                change = fb.conv2d(error, layer.weight.data.astype(np.float64), stride=2, padding=1)
            else:
                change = error @ layer.weight.data.T.astype(np.float64)
        want = 0.5 * 3 * (g.data.astype(np.float64) ** 2 * change**2).sum()
        assert probe.omega[name] == pytest.approx(want, rel=0.02)
    assert len(names) == 2


def test_probe_predicts_the_rise_of_a_likelihood(rng):
    """1/2 |y - target|^2 a picture with residuals of variance 1 is a negative log-likelihood: its Hessian is
    1 and E[g^2] is 1. 40 000 independent squares of normals, weighted: a standard error of about 1 %.
    """
    layer = nn.Linear(32, 10, seed=int(rng.integers(1 << 30)))
    layer.apply_route({"*": "bf16"})
    layer.key = "w"
    x = rng.standard_normal((4000, 32)).astype(np.float32)
    with no_grad(), fb.tracks("fp4"):
        low = layer(x).data
    with no_grad():
        y = layer(x).data
    target = y + rng.standard_normal(y.shape).astype(np.float32)
    probe = ActivationProbe()
    with watching(probe):
        F.mul(F.sum((layer(x) - target) ** 2), 0.5 / len(x)).backward()
    rise = 0.5 * ((low - y).astype(np.float64) ** 2).sum() / len(x)
    assert probe.omega["w"] == pytest.approx(rise, rel=0.1)


def unet_and_batch(rng, batch=2):
    model = nn.UNet2D(nn.UNetConfig.tiny(block_out_channels=(16, 24)), seed=int(rng.integers(1 << 30)))
    x, target = (rng.standard_normal((batch, 4, 4, 12)).astype(np.float32) for _ in range(2))
    t = rng.integers(0, 1000, batch)
    return model, lambda: F.mean_squared_error(model(x, t), target)


@pytest.mark.parametrize("route", [{"*": "bf16"}, {"*attentions*": "bf16", "conv_*": "bf16", "*": "fp4"}])
def test_the_probe_changes_nothing(route, rng):
    model, loss = unet_and_batch(rng)
    chosen = model.apply_route(route)
    plain = loss()
    plain.backward()
    want = model.flat.grad.copy()
    model.zero_grad()
    probe = ActivationProbe()
    with watching(probe):
        probed = loss()
        probed.backward()
    assert probed.item() == plain.item() and np.array_equal(model.flat.grad, want)
    assert set(probe.omega) == {name for name in chosen if name.endswith(".weight")}
    assert all(0 < v < math.inf for v in probe.omega.values())


def test_the_probe_looks_where_it_is_told(rng):
    model, loss = unet_and_batch(rng)
    model.apply_route({"*": "bf16"})
    probe = ActivationProbe({"conv_out.weight"})
    with watching(probe):
        with no_grad():
            loss()
        assert probe.omega == {}
        grad(loss(), [model.conv_in.weight], create_graph=True)  # a walk for curvature
        assert probe.omega == {}
        loss().backward()
        once = probe.omega["conv_out.weight"]
        assert list(probe.omega) == ["conv_out.weight"]
        probe.begin(passes=2)
        loss().backward()
        loss().backward()
    assert probe.omega["conv_out.weight"] == pytest.approx(once, rel=1e-12)
    probe.begin()
    assert probe.omega == {}


def test_calls_of_one_layer_add_up(rng):
    layer = nn.Linear(16, 16, seed=3)
    layer.key = "shared"
    x = rng.standard_normal((4, 16)).astype(np.float32)
    one, two = ActivationProbe(), ActivationProbe()
    with watching(one):
        layer(x).sum().backward()
    with watching(two):
        F.add(layer(x).sum(), layer(x).sum()).backward()
    assert two.omega["shared"] == pytest.approx(2 * one.omega["shared"], rel=1e-9)


def test_a_frozen_layer_is_measured(rng):
    model, loss = unet_and_batch(rng)
    model.apply_route({"*": "bf16"})
    free, frozen = ActivationProbe(), ActivationProbe()
    with watching(free):
        loss().backward()
    nn.LoRA(model, 2, 2.0)  # its branches start at zero
    model.zero_grad()
    with watching(frozen):
        loss().backward()
    assert set(frozen.omega) == set(free.omega) and not model.flat.grad.any()
    for name, value in free.omega.items():
        assert frozen.omega[name] == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("operands", ["both", "activations"])
def test_inputs_that_are_not_finite_are_infinitely_sensitive(operands, rng):
    layer = nn.Linear(16, 4)
    layer.key = "w"
    x = rng.standard_normal((2, 16)).astype(np.float32)
    x[1, 3] = np.nan
    probe = ActivationProbe(operands=operands)
    with watching(probe), np.errstate(invalid="ignore"):
        y = layer(x)  # the step goes on
        y.backward(np.ones_like(y.data))
        assert probe.omega == {"w": math.inf}
        probe.begin()
        y = layer(rng.standard_normal((2, 16)).astype(np.float32))
        y.backward(np.full_like(y.data, np.nan))
    assert probe.omega == {"w": math.inf}


def test_errors_of_the_probe():
    with pytest.raises(
        ConfigError, match="operands is 'activation', which is not known; did you mean 'activ"
    ):
        ActivationProbe(operands="activation")
    with pytest.raises(ConfigError, match="passes is 0"):
        ActivationProbe().begin(passes=0)


# ---- variance of gradients ----


def test_variance_of_one_step_is_the_sample_variance(rng):
    """Of k micro-batches of b pictures: b times the sample variance of their means, exactly."""
    b, k = int(rng.integers(1, 9)), int(rng.integers(2, 6))
    gradients = [{"a": rng.standard_normal((3, 7)), "b": rng.standard_normal(1)} for _ in range(k)]
    noise = GradientVariance()
    noise.observe(gradients, b)
    for name, found in noise.traces().items():
        values = np.array([g[name] for g in gradients])
        assert found == noise.trace(name) == pytest.approx(b * values.var(0, ddof=1).sum(), rel=1e-9)
        want = (values.mean(0) ** 2).sum() - values.var(0, ddof=1).sum() / k
        assert noise.signal(name) == pytest.approx(max(0.0, want), rel=1e-7, abs=1e-12)


def test_variance_averages_numerator_and_denominator(rng):
    """Steps of other batch sizes count by their denominators; a mean of ratios would be another number."""
    noise, numerator, denominator = GradientVariance(decay=0.75), 0.0, 0.0
    for _ in range(7):
        small, big = {"w": 1 + rng.random()}, {"w": rng.random()}
        b_small = int(rng.integers(1, 5))
        b_big = b_small + int(rng.integers(1, 9))
        noise.update(small, big, b_small, b_big)
        numerator = 0.75 * numerator + 0.25 * (small["w"] - big["w"])
        denominator = 0.75 * denominator + 0.25 * (1 / b_small - 1 / b_big)
    assert noise.trace("w") == pytest.approx(numerator / denominator, rel=1e-12)


def test_variance_is_unbiased(rng):
    """800 steps of 2 x 3 pictures, 50 elements of variance 4: the mean's standard deviation is
    4 x 50 sqrt(2 / (800 x 50)) = 1.4, doubled by the moving average's weights at most."""
    noise = GradientVariance(decay=0.999)
    for _ in range(800):
        noise.observe([{"w": 0.1 + rng.normal(0, (4 / 3) ** 0.5, 50)} for _ in range(2)], 3)
    assert abs(noise.trace("w") - 200) < 17


def test_variance_is_never_negative_and_skips_what_is_not_finite():
    noise = GradientVariance()
    noise.update({"w": 1.0}, {"w": 2.0}, 1, 2)
    assert noise.trace("w") == 0 and noise.signal("w") == 3
    before = noise.state()["sums"]
    noise.update({"w": math.nan}, {"w": 2.0}, 1, 2)
    noise.update({"w": 1.0}, {"w": math.inf}, 1, 2)
    assert noise.state()["sums"] == before and noise.skipped == {"w": 2}
    with pytest.raises(KeyError, match="nothing is known of 'x' yet"):
        noise.trace("x")


def test_errors_of_the_variance(rng):
    noise, g = GradientVariance(), {"w": np.ones(2)}
    with pytest.raises(ConfigError, match="b_small is 4 and b_big 4"):
        noise.update({"w": 1.0}, {"w": 1.0}, 4, 4)
    with pytest.raises(ConfigError, match="'x' is in big alone"):
        noise.update({"w": 1.0}, {"w": 1.0, "x": 1.0}, 2, 4)
    with pytest.raises(ConfigError, match="1 micro-batch"):
        noise.observe([g], 2)
    with pytest.raises(ConfigError, match="'x' is in another micro-batch alone"):
        noise.observe([g, g | {"x": g["w"]}], 2)
    with pytest.raises(ConfigError, match="decay is 1, but must be from 0 to below 1"):
        GradientVariance(decay=1)
    noise.update({}, {}, 1, 2)  # no layers
    assert noise.traces() == {}


# ---- demotion ----


def test_a_layer_is_demoted_at_the_square_root_of_three(rng):
    g = rng.standard_normal(20)
    g /= np.linalg.norm(g)
    d = rng.standard_normal(20)
    d *= 1 / (np.linalg.norm(d) * math.sqrt(3))
    rule = Demotion()
    rule.update(
        {"under": g + 0.999 * d, "over": g + 1.001 * d, "same": g},
        dict.fromkeys(("under", "over", "same"), g),
    )
    assert set(rule.demoted()) == {"over"}
    size, noise = rule.demoted()["over"]
    assert size == pytest.approx(1) and noise == pytest.approx(1.001 / math.sqrt(3))
    assert rule.norms()["same"] == (pytest.approx(1), 0)


def test_demotion_follows_moving_averages(rng):
    rule, size, noise, weight = Demotion(decay=0.8, least=3), 0.0, 0.0, 0.0
    for step in range(6):
        g16 = rng.standard_normal((4, 5)).astype(np.float32)
        g4 = g16 + (5.0 * rng.standard_normal((4, 5))).astype(np.float32)
        rule.update({"w": g4}, {"w": g16})
        size = 0.8 * size + 0.2 * np.linalg.norm(g16.astype(float))
        noise = 0.8 * noise + 0.2 * np.linalg.norm(g4.astype(float) - g16)
        weight = 0.8 * weight + 0.2
        assert rule.norms()["w"] == (pytest.approx(size / weight), pytest.approx(noise / weight))
        assert bool(rule.demoted()) == (step >= 2 and size < math.sqrt(3) * noise)


def test_gradients_that_vanish_or_are_not_finite_demote_nothing(rng):
    zero, one = np.zeros(3), np.ones(3)
    rule = Demotion()
    rule.update({"w": zero}, {"w": zero})
    assert rule.demoted() == {}
    with np.errstate(all="ignore"):
        rule.update({"w": one * np.nan}, {"w": one})
        rule.update({"w": one}, {"w": one * np.inf})
    assert rule.skipped == {"w": 2} and rule.norms() == {"w": (0.0, 0.0)}
    rule.update({"e": np.zeros((0, 4))}, {"e": np.zeros((0, 4))})  # a layer of no weights
    assert rule.demoted() == {} and rule.norms()["e"] == (0.0, 0.0)


def test_demotion_of_a_network_whose_forward_is_noisy(rng):
    """The FP4 forward of real layers: noise is a part of the gradient. Ten times that noise demotes all."""
    model, loss = unet_and_batch(rng, batch=4)
    gradients = {}
    for track in ("bf16", "fp4"):
        model.apply_route({"*": track})
        model.zero_grad()
        loss().backward()
        gradients[track] = {name: p.grad.copy() for name, p in model.named_parameters().items() if p.ndim > 1}
    rule = Demotion()
    rule.update(gradients["fp4"], gradients["bf16"])
    assert rule.demoted().keys() < rule.norms().keys()
    assert rule.norms()["conv_out.weight"][1] > 0 and "conv_out.weight" not in rule.demoted()
    noisy = {name: g + 10 * (gradients["fp4"][name] - g) for name, g in gradients["bf16"].items()}
    rule = Demotion()
    rule.update(noisy, gradients["bf16"])
    assert "conv_in.weight" in rule.demoted()


def test_errors_of_demotion():
    rule, g = Demotion(), {"w": np.ones((2, 3))}
    with pytest.raises(ConfigError, match="'x' is in g4 alone"):
        rule.update(g | {"x": g["w"]}, g)
    with pytest.raises(ShapeError, match=r"gradients of w have shape \(2, 3\) \(FP4\) and \(3, 2\) \(BF16\)"):
        rule.update(g, {"w": np.ones((3, 2))})
    with pytest.raises(ConfigError, match="least is 0"):
        Demotion(least=0)


# ---- state ----


def feed_variance(noise, rng):
    noise.observe([{"a": rng.standard_normal(9), "b": rng.standard_normal(2)} for _ in range(2)], 2)


def feed_demotion(rule, rng):
    g = {"a": rng.standard_normal(9), "b": rng.standard_normal(2)}
    rule.update({name: v + rng.standard_normal(v.shape) for name, v in g.items()}, g)


@pytest.mark.parametrize("kind, feed", [(GradientVariance, feed_variance), (Demotion, feed_demotion)])
def test_state_goes_through_json_bit_for_bit(kind, feed, rng):
    straight = kind()
    for _ in range(3):
        feed(straight, rng)
    resumed = kind()
    resumed.restore(json.loads(json.dumps(straight.state(), allow_nan=False)))
    seed = int(rng.integers(1 << 30))
    for one in (straight, resumed):
        again = np.random.default_rng(seed)
        for _ in range(3):
            feed(one, again)
    assert straight.state() == resumed.state()
    assert kind().state() != straight.state()


def test_a_state_of_another_class_is_refused(rng):
    noise = GradientVariance()
    feed_variance(noise, rng)
    held = noise.state() | {"count": {}}
    with pytest.raises(ConfigError, match="state of 'a' has 5 numbers instead of 3"):
        Demotion().restore(held)
    copy = json.loads(json.dumps(held))
    feed_variance(noise, rng)
    assert held == copy  # a state that was given is not written any more


def test_squared_norms_of_any_shape(rng):
    g = {"a": rng.standard_normal((3, 4)).astype(np.float32), "b": np.float32(2.0), "c": np.zeros((0, 3))}
    found = squared_norms(g)
    assert found == {"a": pytest.approx((g["a"].astype(float) ** 2).sum()), "b": 4.0, "c": 0.0}
