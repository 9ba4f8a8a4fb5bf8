"""Watchers of a network's products: nothing changes without them, they see what runs, may replace it."""

from __future__ import annotations

import numpy as np
import pytest

import fp4bf16 as fb
from fp4bf16 import nn
from fp4bf16.backends import cpu_spectral
from fp4bf16.nn import ops as F
from fp4bf16.nn.watch import current

ROUTE = {"conv_in*": "bf16", "conv_out*": "bf16", "*": "fp4"}


def network(rng, route=ROUTE):
    unet = nn.UNet2D(nn.UNetConfig.tiny(caption_vocabulary=5), seed=int(rng.integers(1 << 30)))
    return unet, unet.apply_route(route)


def batch(rng, n=2):
    x = rng.standard_normal((n, 8, 8, 12)).astype(np.float32)
    return (x, rng.integers(0, 1000, n)), {"captions": rng.integers(0, 2, (n, 5)).astype(np.float32)}


class Certified(nn.Watcher):
    """Asks for every certificate and keeps what it sees."""

    def __init__(self):
        self.seen = []

    def wants_certificate(self, layer):
        return True

    def product(self, layer, x, y, run, certificate):
        self.seen.append((layer.key, nn.track_of(layer), y, run, certificate))
        return y


class On(nn.Watcher):
    """Replaces every product by that of another track."""

    def __init__(self, track):
        self.track = track

    def product(self, layer, x, y, run, certificate):
        return run(self.track)


def gradients(unet, args, kwargs, *watchers):
    with nn.watching(*watchers):
        y = unet(*args, **kwargs)
    unet.zero_grad()
    F.mean_squared_error(y, np.ones(y.shape, np.float32)).backward()
    return y.data, unet.flat.grad.copy()


@pytest.mark.parametrize("track", ["fp4", "bf16", "dual", "reference"])
def test_watching_changes_nothing(rng, track):
    """Outputs and gradients to the bit, with certificates too."""
    unet, _ = network(rng, {"conv_in*": "bf16", "*embedding*": "bf16", "*": track})
    args, kwargs = batch(rng)
    y, g = gradients(unet, args, kwargs)
    for watchers in ((nn.Watcher(),), (Certified(), nn.Watcher())):
        z, h = gradients(unet, args, kwargs, *watchers)
        assert np.array_equal(y, z) and np.array_equal(g, h)


def test_every_product_is_seen_once_with_its_name_and_track(rng):
    unet, route = network(rng)
    args, kwargs = batch(rng)
    watcher = Certified()
    with nn.watching(watcher):
        unet(*args, **kwargs)
    names = [name for name, module in unet.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    assert sorted(key for key, *_ in watcher.seen) == sorted(f"{name}.weight" for name in names)
    for key, track, _, _, certificate in watcher.seen:
        assert track == route[key] and (certificate is not None) == (track == "fp4")
        if certificate is not None:
            assert certificate.reference == "master" and certificate.estimate is None


@pytest.mark.parametrize("track", ["fp4", "dual"])
@pytest.mark.parametrize("lora", [False, True])
def test_certificates_of_a_network_hold(rng, track, lora):
    """Of every layer, bias, residual and all, against its own BF16 product."""
    unet, _ = network(rng, {"*embedding*": "bf16", "*": track})
    unet.flat.data[...] *= rng.uniform(0.1, 10, unet.flat.data.size).astype(np.float32)
    unet.flat.touch()
    if lora:
        adapters = nn.LoRA(unet, 4, 8, seed=1)
        adapters.flat.data[...] = 0.05 * rng.standard_normal(adapters.flat.data.size)
        adapters.flat.touch()
    watcher = Certified()
    args, kwargs = batch(rng)
    with nn.watching(watcher):
        unet(*args, **kwargs)
    certified = [s for s in watcher.seen if s[-1] is not None]
    assert len(certified) > 30
    distances = []
    for key, _, y, run, certificate in certified:
        with nn.no_grad():
            distance = np.linalg.norm((y.data - run("bf16").data).astype(np.float64))
        # bias and residual are added in float32 on both sides
        added = 2.0**-22 * np.linalg.norm(y.data.astype(np.float64))
        assert distance <= certificate.bound + certificate.accumulation + added, key
        assert certificate.relative < 100, key
        distances.append(distance)
    assert np.median(distances) > 0  # a product may vanish in what is added to it


def test_run_is_the_same_product_on_another_track(rng):
    """On the tape, and whatever ``with tracks(...)`` says."""
    # softmax(Q K) V and the captions are no watched products
    unet, _ = network(rng, {"*attentions.0": "bf16", "*embedding.weight": "bf16", **ROUTE})
    args, kwargs = batch(rng)
    with fb.tracks("bf16"):
        y, g = gradients(unet, args, kwargs)
    z, h = gradients(unet, args, kwargs, On("bf16"))
    assert np.array_equal(y, z) and np.array_equal(g, h)
    inside, _ = gradients(unet, args, kwargs, On("fp4"))
    with fb.tracks("bf16"):
        again, _ = gradients(unet, args, kwargs, On("fp4"))
    assert not np.array_equal(y, inside) and np.array_equal(inside, again)


def test_replacing_does_not_ask_the_watchers_again(rng):
    layer = nn.Linear(16, 4)
    layer.apply_route({"*": "fp4"})
    calls = []

    class Twice(nn.Watcher):
        def product(self, layer, x, y, run, certificate):
            calls.append(1)
            return run("bf16") + run("fp4")

    x = rng.standard_normal((3, 16)).astype(np.float32)
    with nn.watching(Twice()):
        y = layer(x)
    with fb.tracks("bf16"):
        want = layer(x).data + F.sub(layer(x), 0).data * 0
    assert len(calls) == 1 and np.array_equal(y.data, layer(x).data + want)


def test_only_the_innermost_set_is_in_force(rng):
    layer, x = nn.Linear(16, 4), rng.standard_normal((3, 16)).astype(np.float32)
    outer, inner = Certified(), Certified()
    with nn.watching(outer):
        layer(x)
        with nn.watching(inner):
            layer(x)
            with nn.watching():
                layer(x)
        with pytest.raises(ZeroDivisionError), nn.watching(inner):
            raise ZeroDivisionError
        layer(x)
    assert (len(outer.seen), len(inner.seen)) == (2, 1) and current() == ()


def test_watchers_are_asked_in_order(rng):
    layer, x = nn.Conv2d(3, 4, 3, padding=1), rng.standard_normal((1, 5, 4, 3)).astype(np.float32)

    class Plus(nn.Watcher):
        def __init__(self, factor, offset):
            self.factor, self.offset = factor, offset

        def product(self, layer, x, y, run, certificate):
            return y * self.factor + self.offset

    with nn.watching(Plus(2.0, 0.0), Plus(1.0, 3.0)):
        y = layer(x)
    assert np.array_equal(y.data, layer(x).data * np.float32(2) + np.float32(3))


@pytest.mark.parametrize("given", [None, np.ones((3, 4), np.float32), nn.Variable(np.ones((3, 1)))])
def test_what_is_no_product_is_refused(rng, given):
    class Forgets(nn.Watcher):
        def product(self, layer, x, y, run, certificate):
            return given

    layer = nn.Linear(16, 4)
    layer.apply_route({"*": "fp4"})
    with pytest.raises(TypeError, match="Forgets.product: a .* came back for .weight, but a Variable of sha"):
        with nn.watching(Forgets()):
            layer(rng.standard_normal((3, 16)).astype(np.float32))
    assert current() == ()


def test_what_is_no_watcher_is_refused():
    with pytest.raises(TypeError, match="'x' is a str, but a Watcher is needed"), nn.watching("x"):
        pass


# ---- norms of the weights ----------------------------------------------------------------------------------
def test_norms_are_computed_once_a_version(rng, monkeypatch):
    layer, x = nn.Linear(48, 20), rng.standard_normal((3, 48)).astype(np.float32)
    layer.apply_route({"*": "fp4"})
    made, real = [], cpu_spectral.twin_norms
    monkeypatch.setattr(fb.certify.backend_for(), "twin_norms", lambda *a: made.append(1) or real(*a))
    watcher = Certified()

    def bound():
        with nn.watching(watcher):
            layer(x)
        return watcher.seen[-1][-1].bound

    first = bound()
    assert bound() == first and len(made) == 1
    layer.weight.data *= 2
    layer.weight.touch()
    assert np.isclose(bound(), 2 * first, rtol=1e-6) and len(made) == 2
    layer(x)  # unwatched: nothing is computed
    layer.weight.touch()
    layer(x)
    assert len(made) == 2


@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 40), (40, 1), (7, 33), (64, 64), (16, 3, 3, 8), (8, 1, 1, 50), (5, 2, 3, 17)]
)
@pytest.mark.parametrize("scale", [0.0, 1e-36, 1e-18, 1.0, 1e15])
def test_norms_of_a_twin_are_upper_bounds_and_close(rng, shape, scale):
    p = nn.Parameter((rng.standard_normal(shape) * scale).astype(np.float32))
    if rng.random() < 0.5 and p.data.size > 1:
        p.data.reshape(-1)[rng.integers(p.data.size)] *= 1000
    norms = p.twin_norms()
    w = p.data.astype(fb.interop.BFLOAT16).astype(np.float64).reshape(shape[0], -1)
    used = np.asarray(fb.dequantize(p.twin()), np.float64).reshape(w.shape)
    for upper, matrix, room in (
        (norms.sigma_used, used, 1.07),
        (norms.sigma_error, w - used, 1.16),
        (norms.sigma, w, 1.6),
    ):
        exact = np.linalg.norm(matrix, 2)
        assert exact * (1 - 1e-12) <= upper <= room * exact + 1e-42
    assert np.linalg.norm(w) * (1 - 1e-12) <= norms.norm <= 1.01 * np.linalg.norm(w) + 1e-38
    assert np.isclose(norms.used, np.linalg.norm(used), rtol=1e-9) and norms.reference == "master"


def test_norms_serve_every_product_with_the_twin(rng):
    """Also where they were known less well before: by the norm of the error alone."""
    p = nn.Parameter(rng.standard_normal((32, 64)).astype(np.float32))
    x = rng.standard_normal((5, 64)).astype(np.float32)
    _, loose = fb.linear(x, p.twin(), certify="bound")
    p.twin_norms()
    _, tight = fb.linear(x, p.twin(), certify="bound")
    assert (loose.reference, tight.reference) == ("original", "master") and tight.bound < loose.bound
    distance = np.linalg.norm(fb.linear(x, p.twin()) - fb.linear(x, p.data))
    assert distance <= tight.bound + tight.accumulation


@pytest.mark.parametrize("shape", [(3, 9), (64, 576), (200, 100), (1, 7), (100, 3)])
def test_quick_spectral_norm_is_an_upper_bound_and_close(rng, shape):
    for w in (rng.standard_normal(shape), np.ones(shape), rng.uniform(0, 1, shape), np.eye(*shape)):
        w = w.astype(np.float32)
        exact = np.linalg.norm(w.astype(np.float64), 2)
        for squarings in range(7):
            upper = cpu_spectral.quick_spectral_norm_upper(w, squarings)
            # sums in float32 cost under 2 %, and equal singular values their number^(1 / (4 2^squarings))
            assert exact <= upper <= 1.02 * exact * min(shape) ** (0.25 / 2**squarings)
    assert cpu_spectral.quick_spectral_norm_upper(np.zeros(shape, np.float32)) == 0
    assert cpu_spectral.quick_spectral_norm_upper(np.full(shape, np.nan, np.float32)) == np.inf
    huge = cpu_spectral.quick_spectral_norm_upper(np.full(shape, 1e30, np.float32))
    assert 1e30 * np.sqrt(shape[0] * shape[1]) * (1 - 1e-6) <= huge < np.inf


# ---- tap ---------------------------------------------------------------------------------------------------
def test_tap_is_the_identity_and_sees_the_gradient(rng):
    x = nn.Variable(rng.standard_normal((3, 4)), requires_grad=True)
    seen = []

    def on_backward(g):
        seen.append(g.copy())
        return g + 1

    y = nn.tap(x * 2.0, on_backward)
    assert np.array_equal(y.data, 2 * x.data)
    (y * y).sum().backward()
    assert len(seen) == 1 and np.array_equal(seen[0], 4 * x.data)
    assert np.array_equal(x.grad, 2 * (4 * x.data + 1))


def test_tap_leaves_second_derivatives_alone(rng):
    x = nn.Variable(rng.standard_normal(5), requires_grad=True)
    v = rng.standard_normal(5)

    def never(g):
        raise AssertionError("called in a recorded walk")

    y = nn.tap(x * x, never)
    (g,) = nn.grad((y * y).sum(), [x], create_graph=True)
    assert np.allclose(g.data, 4 * x.data**3)
    (h,) = nn.grad((g * v).sum(), [x], create_graph=True)
    assert np.allclose(h.data, 12 * x.data**2 * v)


def test_tap_is_not_called_where_nothing_is_recorded(rng):
    x = nn.Variable(rng.standard_normal(5), requires_grad=True)

    def never(g):
        raise AssertionError("called")

    with nn.no_grad():
        assert not nn.tap(x * 2.0, never).requires_grad
    assert not nn.tap(nn.Variable(np.ones(2)), never).requires_grad


# ---- what the quantiser refuses ----------------------------------------------------------------------------
@pytest.mark.parametrize("what", ["input", "weight"])
def test_refused_products_are_raised_or_replaced(rng, what):
    layer = nn.Conv2d(3, 4, 3, padding=1)
    layer.apply_route({"*": "fp4"})
    x = rng.standard_normal((2, 5, 4, 3)).astype(np.float32)
    target = x if what == "input" else layer.weight.data
    target.reshape(-1)[7] = rng.choice([np.nan, np.inf])
    layer.weight.touch()

    class Rescue(nn.Watcher):
        def refused(self, layer, x, run, error):
            assert layer.key == ".weight" and isinstance(error, fb.NonFiniteError)
            return run("bf16")

    for watchers in ((), (nn.Watcher(),), (Certified(),)):
        with pytest.raises(fb.NonFiniteError), nn.watching(*watchers):
            layer(x)
    with nn.watching(nn.Watcher(), Rescue()):
        y = layer(x)
    with fb.tracks("bf16"):
        assert np.array_equal(y.data, layer(x).data, equal_nan=True)


class Sketches(nn.Watcher):
    """An estimate of every product, and what the distance is."""

    def __init__(self):
        self.calls, self.ratios = 0, []

    def wants_certificate(self, layer):
        self.calls += 1
        return nn.Estimate(7, 0, self.calls)

    def product(self, layer, x, y, run, certificate):
        with nn.no_grad():
            distance = np.linalg.norm((y.data - run("bf16").data).astype(np.float64))
        self.ratios.append((certificate.estimate + certificate.accumulation) / distance)
        return y


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("track", ["fp4", "dual"])
def test_estimates_see_what_the_twin_of_a_weight_lost(rng, kind, track):
    """With inputs on the grid most of the distance is the weight's error. At 1e-3 a call, more than 4
    failures of 100 have probability 8e-8 (Poisson with mean 0.1).
    """
    layer = nn.Linear(64, 20) if kind == "linear" else nn.Conv2d(16, 8, 3, padding=1)
    shape = (9, 64) if kind == "linear" else (2, 5, 5, 16)
    layer.apply_route({"*": track})
    watcher = Sketches()
    for _ in range(100):
        x = rng.standard_normal(shape).astype(np.float32)
        x = np.asarray(fb.dequantize(fb.quantize(x, search="full")), np.float32)
        with nn.watching(watcher), nn.no_grad():
            layer(x)
    assert sum(ratio < 1 for ratio in watcher.ratios) <= 4
    assert np.median(watcher.ratios) < 5  # and are sharp: about 2


def test_estimates_of_a_twin_alone_add_what_it_lost(rng):
    """Where the sketch does not know the weight, whose norms are known."""
    p = nn.Parameter(rng.standard_normal((20, 64)).astype(np.float32))
    x = np.asarray(fb.dequantize(fb.quantize(rng.standard_normal((9, 64)).astype(np.float32), search="full")))
    p.twin_norms()
    y, certificate = fb.linear(x, p.twin(), certify=True)
    distance = np.linalg.norm((y - fb.linear(x, p.data)).astype(np.float64))
    assert certificate.reference == "master"
    assert distance <= certificate.estimate <= 1.1 * certificate.bound


def test_an_estimate_is_drawn_from_its_numbers(rng):
    layer, x = nn.Linear(64, 20), rng.standard_normal((9, 64)).astype(np.float32)
    layer.apply_route({"*": "fp4"})

    class Sketched(nn.Watcher):
        def __init__(self, *numbers):
            self.wish = nn.Estimate(*numbers)

        def wants_certificate(self, layer):
            return self.wish

        def product(self, layer, x, y, run, certificate):
            self.found = certificate
            return y

    found = []
    for numbers in ((1, 2, 3), (1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4)):
        watcher = Sketched(*numbers)
        with nn.watching(watcher):
            layer(x)
        found.append(watcher.found.estimate)
    assert found[0] == found[1] and len(set(found)) == 4
    distance = np.linalg.norm(layer(x).data - fb.linear(x, layer.weight.data, layer.bias.data))
    assert distance < 3 * min(found)
