"""Hessian-vector products against differences of gradients; block traces against exact Hessians."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import fp4bf16 as fb
from fp4bf16 import nn
from fp4bf16.errors import ConfigError, ShapeError
from fp4bf16.nn import ops as F
from fp4bf16.nn.tape import Variable, grad
from fp4bf16.routing import curvature
from fp4bf16.routing.curvature import (
    Hessian,
    Trace,
    hutch_plus_plus,
    hutchinson,
    hvp,
    layer_traces,
    rademacher,
)

# ---- products with the Hessian ----

LAYERS = (
    "conv_in.weight", "time_embedding.linear_2.weight", "down_blocks.0.downsamplers.0.conv.weight",
    "down_blocks.1.resnets.0.conv_shortcut.weight", "down_blocks.1.resnets.0.time_emb_proj.weight",
    "mid_block.attentions.0.to_q.weight", "mid_block.attentions.0.to_out.0.weight",
    "up_blocks.0.upsamplers.0.conv.weight", "conv_out.weight",
)  # fmt: skip


@pytest.fixture(scope="module")
def network():
    return nn.UNet2D(nn.UNetConfig.tiny(), seed=5).to(np.float64)


def denoising(network, rng, batch=1, side=4):
    dtype = network.conv_in.weight.dtype
    x, target = (rng.standard_normal((batch, side, side, 12)).astype(dtype) for _ in range(2))
    t = rng.integers(0, 1000, batch)
    return lambda: F.mean_squared_error(network(x, t), target)


def test_products_with_real_layers_against_differences(network, rng):
    """Central differences err by eps^2 times third derivatives and by 1e-16 / eps of rounding."""
    loss, named, eps = denoising(network, rng), network.named_parameters(), 1e-5
    parameters = [named[name] for name in LAYERS]
    v = [rng.standard_normal(p.shape) / np.sqrt(p.size) for p in parameters]
    with fb.tracks("reference"):
        got = hvp(loss(), parameters, v)
        ends = []
        for sign in (1, -1):
            with network.using(network.flat.data.copy()):
                for p, d in zip(parameters, v, strict=True):
                    p.data += sign * eps * d
                ends.append([g.data for g in grad(loss(), parameters)])
    for name, h, p, up, down in zip(LAYERS, got, parameters, *ends, strict=True):
        want = (up - down) / (2 * eps)
        assert h.shape == p.shape and h.dtype == p.dtype
        assert np.linalg.norm(want) > 1e-6, name  # the comparison says something
        assert np.linalg.norm(h - want) < 1e-6 * np.linalg.norm(want), name


def test_many_products_share_one_gradient(rng):
    layer, x = nn.Linear(3, 2).to(np.float64), rng.standard_normal((4, 3))
    with fb.tracks("reference"):
        hessian = Hessian((F.silu(layer(x)) ** 2).mean(), layer.parameters())
        vectors = [[rng.standard_normal(p.shape) for p in layer.parameters()] for _ in range(3)]
        first = [hessian.product(v) for v in vectors]
        again = hessian.product(vectors[0])
        fresh = hvp((F.silu(layer(x)) ** 2).mean(), layer.parameters(), vectors[0])
        both = hessian.product([a + b for a, b in zip(*vectors[:2], strict=True)])
    for a, b, c in zip(again, fresh, first[0], strict=True):
        assert np.array_equal(a, b) and np.array_equal(a, c)
    for a, b, c in zip(both, first[0], first[1], strict=True):  # linear in the vector
        np.testing.assert_allclose(a, b + c, rtol=1e-12, atol=1e-14)


def test_the_hessian_is_symmetric(network, rng):
    loss, named = denoising(network, rng), network.named_parameters()
    parameters = [named[name] for name in LAYERS]
    u, v = ([rng.standard_normal(p.shape) for p in parameters] for _ in range(2))
    with fb.tracks("reference"):
        hessian = Hessian(loss(), parameters)
        ends = [sum(float((a * b).sum()) for a, b in zip(x, hessian.product(y), strict=True))
                for x, y in ((u, v), (v, u))]  # fmt: skip
        size = sum(float(np.abs(a * b).sum()) for a, b in zip(u, hessian.product(v), strict=True))
    assert abs(ends[0] - ends[1]) < 1e-9 * size


def test_a_loss_without_curvature(rng):
    x = Variable(rng.standard_normal(3), requires_grad=True)
    assert hvp((x * 2.0).sum(), [x], [np.ones(3)])[0].tolist() == [0.0] * 3
    z = Variable(rng.standard_normal((0, 2)), requires_grad=True)
    (a, b) = hvp((x * x).sum(), [x, z], [np.ones(3), np.ones((0, 2))])
    assert a.tolist() == [2.0] * 3 and b.shape == (0, 2)


def test_errors_of_products(rng):
    x = Variable(np.ones(3), requires_grad=True, name="x")
    loss = (x * x).sum()
    with pytest.raises(ShapeError, match="2 entries, but there are 1 parameters"):
        hvp(loss, [x], [np.ones(3), np.ones(3)])
    with pytest.raises(
        ShapeError, match=r"vector for x has shape \(2,\), but the parameter has shape \(3,\)"
    ):
        hvp(loss, [x], [np.ones(2)])
    with pytest.raises(TypeError, match="takes no gradient"):
        hvp(loss, [Variable(np.ones(2))], [np.ones(2)])
    layer = nn.Linear(3, 2)
    hessian = Hessian((layer(np.ones((1, 3), np.float32)) ** 2).sum(), [layer.weight])
    layer.weight.assign(layer.weight.data + 1)
    with pytest.raises(RuntimeError, match="the weights have changed"):
        hessian.product([np.ones((2, 3))])


# ---- traces of a matrix that is known ----

SHAPES = {"a": (2, 2), "b": (3,), "c": (1,)}
PLACES = {"a": slice(0, 4), "b": slice(4, 7), "c": slice(7, 8)}


def matrix(rng, n=8):
    h = rng.standard_normal((n, n))
    return h + h.T


def product_with(h, shapes=SHAPES):
    def product(v):
        flat = h @ np.concatenate([v[name].reshape(-1) for name in shapes])
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes.values()])[:-1]
        parts = np.split(flat, ends)
        return {name: part.reshape(shapes[name]) for name, part in zip(shapes, parts, strict=True)}

    return product


def variance(h, place):
    """Of one random sign vector's estimate of a block's trace, as `hutchinson` states it."""
    block = h[place, place]
    cross = (h[place] ** 2).sum() - (block**2).sum()
    return 2 * ((block**2).sum() - (np.diag(block) ** 2).sum()) + cross


def every_sign(monkeypatch, sketches=None):
    """All 2^8 sign vectors once each, in the place of random ones; `sketches` different sketch vectors."""
    table = np.array(list(itertools.product((-1.0, 1.0), repeat=8)))
    drawn = curvature.rademacher

    def draw(seed, purpose, number, shapes, dtypes):
        if purpose == "sketch":
            return drawn(seed, purpose, number % sketches, shapes, dtypes)
        return {name: table[number, PLACES[name]].reshape(shape) for name, shape in shapes.items()}

    monkeypatch.setattr(curvature, "rademacher", draw)


def test_hutchinson_is_unbiased_and_its_variance_is_the_stated_one(rng, monkeypatch):
    """Over all sign vectors the mean is the trace exactly, and the spread gives the variance exactly."""
    h = matrix(rng)
    every_sign(monkeypatch)
    for name, trace in hutchinson(product_with(h), SHAPES, 256, 0).items():
        block = h[PLACES[name], PLACES[name]]
        assert trace.value == pytest.approx(np.trace(block), rel=1e-12, abs=1e-12) and trace.products == 256
        assert trace.error**2 * 255 == pytest.approx(variance(h, PLACES[name]), rel=1e-10, abs=1e-10)


def test_hutch_plus_plus_is_unbiased_block_by_block(rng, monkeypatch):
    """388 products: 129 sketches, of which 3 are independent, 3 for H Q, all 256 sign vectors."""
    h = matrix(rng)
    every_sign(monkeypatch, sketches=3)
    found = hutch_plus_plus(product_with(h), SHAPES, 388, 0)
    for name, trace in found.items():
        assert trace.value == pytest.approx(np.trace(h[PLACES[name], PLACES[name]]), rel=1e-9, abs=1e-9)
        assert trace.error > 0


@pytest.mark.parametrize("estimate", [hutchinson, hutch_plus_plus])
def test_random_signs_find_the_trace(estimate, rng):
    """Within 6 standard deviations (2e-9 a block for what is normal after 2000 samples)."""
    h = matrix(rng)
    plain, seed = estimate is hutchinson, int(rng.integers(1 << 40))
    for name, trace in estimate(product_with(h), SHAPES, 2000 if plain else 60, seed).items():
        want, limit = np.trace(h[PLACES[name], PLACES[name]]), 6 * np.sqrt(variance(h, PLACES[name]) / 2000)
        assert abs(trace.value - want) < (limit if plain else 1e-9 * np.abs(h).sum())  # 8 directions are all


def spectrum(rng, eigenvalues):
    q, _ = np.linalg.qr(rng.standard_normal((len(eigenvalues), len(eigenvalues))))
    return (q * eigenvalues) @ q.T


WIDE = {"a": (5, 4), "b": (4, 2, 3), "c": (20,)}


def errors(estimate, h, probes, seeds):
    """(mean squared error, mean squared standard error) of the blocks' traces."""
    want = dict(
        zip(WIDE, (np.trace(h[s, s]) for s in (slice(20), slice(20, 44), slice(44, 64))), strict=True)
    )
    off, stated = [], []
    for seed in seeds:
        for name, trace in estimate(product_with(h, WIDE), WIDE, probes, seed).items():
            off.append((trace.value - want[name]) ** 2)
            stated.append(trace.error**2)
    return np.mean(off), np.mean(stated)


def test_hutch_plus_plus_needs_fewer_products_where_eigenvalues_fall(rng):
    h, seeds = spectrum(rng, 1.0 / np.arange(1, 65) ** 2), range(60)
    plain, _ = errors(hutchinson, h, 15, seeds)
    better, _ = errors(hutch_plus_plus, h, 15, seeds)
    assert better < plain / 4


@pytest.mark.parametrize("estimate", [hutchinson, hutch_plus_plus])
def test_standard_errors_are_what_they_say(estimate, rng):
    h = spectrum(rng, 1.0 / np.arange(1, 65))
    off, stated = errors(estimate, h, 12, range(300))
    assert 0.6 < off / stated < 1.6


def test_a_matrix_of_low_rank_is_known_exactly(rng):
    u = rng.standard_normal((64, 2))
    h = u @ u.T
    for name, place in zip(WIDE, (slice(20), slice(20, 44), slice(44, 64)), strict=True):
        found = hutch_plus_plus(product_with(h, WIDE), WIDE, 8, 1)[name]
        assert found.value == pytest.approx(np.trace(h[place, place]), rel=1e-9) and found.error < 1e-9
        assert found.products == 8
    nothing = hutch_plus_plus(product_with(0 * h, WIDE), WIDE, 8, 1)
    assert set(nothing.values()) == {Trace(0.0, 0.0, 8)}


def test_one_vector_has_no_spread(rng):
    h = matrix(rng)
    assert all(np.isinf(t.error) for t in hutchinson(product_with(h), SHAPES, 1, 0).values())
    assert all(np.isinf(t.error) for t in hutch_plus_plus(product_with(h), SHAPES, 3, 0).values())


def test_signs_belong_to_seed_purpose_layer_and_number():
    shapes, types = {"a": (40, 50), "b": (2000,)}, {"a": np.float32, "b": np.float64}
    signs = rademacher(1, "probe", 2, shapes, types)
    assert signs["a"].dtype == np.float32 and signs["b"].dtype == np.float64 and signs["a"].shape == (40, 50)
    assert set(np.unique(signs["a"])) == {-1, 1}
    alone = rademacher(1, "probe", 2, {"b": (2000,)}, types)["b"]
    assert np.array_equal(alone, signs["b"])
    others = [
        signs["a"].ravel(),
        rademacher(2, "probe", 2, shapes, types)["b"],
        rademacher(1, "sketch", 2, shapes, types)["b"],
        rademacher(1, "probe", 3, shapes, types)["b"],
    ]
    for other in others:  # fixed seeds: correlations of 2000 signs within 6 / sqrt(2000)
        assert abs(np.mean(alone * other)) < 0.134
    assert abs(np.mean(alone)) < 0.134


# ---- traces of networks ----


class Small(nn.Module):
    """Eight weights in two layers."""

    def __init__(self, seed):
        rng = nn.generator(seed)
        self.first, self.second = nn.Linear(2, 3, bias=False, seed=rng), nn.Linear(3, 1, bias=False, seed=rng)

    def forward(self, x):
        return self.second(F.silu(self.first(x)))


def exact_blocks(loss, parameters):
    """The blocks of the Hessian from differences of gradients, one weight at a time."""
    eps, blocks = 1e-5, {}
    for name, p in parameters.items():
        columns = []
        for i in range(p.size):
            ends = []
            for sign in (1, -1):
                p.data.reshape(-1)[i] += sign * eps
                ends.append(grad(loss(), [p])[0].data.ravel())
                p.data.reshape(-1)[i] -= sign * eps
            columns.append((ends[0] - ends[1]) / (2 * eps))
        blocks[name] = np.array(columns)
    return blocks


@pytest.mark.parametrize("method", ["hutchinson", "hutch++"])
def test_traces_of_a_network_against_its_exact_hessian(method, rng):
    model = Small(int(rng.integers(1 << 30))).to(np.float64)
    x, target = rng.standard_normal((7, 2)), rng.standard_normal((7, 1))
    parameters = model.named_parameters()
    with fb.tracks("reference"):

        def loss():
            return F.mean_squared_error(model(x), target)

        blocks = exact_blocks(loss, parameters)
        found = layer_traces(loss, parameters, 400, int(rng.integers(1 << 40)), method)
    scale = max(abs(np.trace(b)) for b in blocks.values())
    for name, trace in found.items():
        off = abs(trace.value - np.trace(blocks[name]))
        assert off < 6 * trace.error + 1e-7 * scale
        assert method == "hutchinson" or off < 1e-7 * scale  # 9 directions are all there are


def test_products_on_the_bf16_track_are_near_the_unrounded_ones(rng):
    """What the trainer has: float32 weights, every product of the walk there and back rounded."""
    model, found = nn.UNet2D(nn.UNetConfig.tiny(), seed=1), {}
    loss, named = denoising(model, rng, batch=2), model.named_parameters()
    v = [rng.standard_normal(named[name].shape) for name in LAYERS]
    for track in ("reference", "bf16"):
        with fb.tracks(track):
            found[track] = hvp(loss(), [named[name] for name in LAYERS], v)
    for name, exact, got in zip(LAYERS, found["reference"], found["bf16"], strict=True):
        assert got.dtype == np.float32
        error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
        assert 1e-5 < error < 0.3, name


def test_nothing_is_left_behind(rng):
    """Gradients are not written, and frozen parameters (a base beside adapters) stay frozen."""
    model = nn.UNet2D(nn.UNetConfig.tiny(block_out_channels=(16, 16)), seed=1)
    before = model.flat.data.copy()
    nn.LoRA(model, 2, 2.0)
    assert not model.conv_out.weight.requires_grad
    loss, named = denoising(model, rng), {"conv_out.weight": model.conv_out.weight}
    first = layer_traces(loss, named, 3, 7)
    assert first["conv_out.weight"].value > 0
    assert not model.conv_out.weight.requires_grad and not model.flat.grad.any()
    assert np.array_equal(model.flat.data, before)
    assert layer_traces(loss, named, 3, 7) == first  # bit for bit
    assert layer_traces(loss, named, 3, 8) != first


def test_a_layer_that_is_not_finite(rng):
    layer = nn.Linear(4, 2)
    layer.weight.data[0, 0] = np.nan
    loss = lambda: (layer(np.ones((2, 4), np.float32)) ** 3).mean()  # noqa: E731
    with np.errstate(invalid="ignore"):
        for method in curvature.METHODS:
            trace = layer_traces(loss, {"w": layer.weight}, 6, 0, method)["w"]
            assert np.isnan(trace.value) and np.isinf(trace.error)


def test_no_layers_no_loss():
    def never():
        raise AssertionError("called")

    assert layer_traces(never, {}) == {}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(method="hutch+"), r"method is 'hutch\+', which is not known; did you mean 'hutch\+\+'"),
        (dict(probes=0), "probes is 0, but must be a whole number from 1 on"),
        (dict(probes=2, method="hutch++"), "probes is 2, but must be a whole number from 3 on"),
        (dict(probes=True), "probes is True"),
        (dict(probes=2.0), "probes is 2.0"),
    ],
)
def test_errors_of_traces(arguments, message):
    with pytest.raises(ConfigError, match=message):
        layer_traces(lambda: None, {"w": nn.Linear(2, 2).weight}, **arguments)
