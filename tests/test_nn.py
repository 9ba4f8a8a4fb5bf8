"""Layers and one whole tiny UNet against float64 finite differences; modules, twins, kernels, bad input."""

from __future__ import annotations

import doctest
import importlib

import numpy as np
import pytest

import fp4bf16 as fb
from fp4bf16 import nn
from fp4bf16.errors import ConfigError, ShapeError
from fp4bf16.nn import ops as F
from fp4bf16.nn.tape import Variable, grad, no_grad

EPS = 1e-5
CAPTIONS = np.array([[1, 0, 1, 0, 1], [0, 0, 0, 0, 0]], float)


def pictures(rng, *shape):
    return rng.standard_normal(shape)


LAYERS = {
    "linear": (lambda: nn.Linear(4, 3, seed=1), (2, 5, 4)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3, padding=1, seed=1), (2, 4, 5, 3)),
    "conv2d_1x1": (lambda: nn.Conv2d(3, 4, 1, bias=False, seed=1), (2, 3, 3, 3)),
    "group_norm": (lambda: nn.GroupNorm(2, 6), (2, 3, 3, 6)),
    "bag_embedding": (
        lambda: nn.BagEmbedding(4, 3, seed=1),
        (2, 4),
    ),  # of any (B, 4): the mean's divisor is data
    "time_embedding": (lambda: nn.TimestepEmbedding(4, 8, seed=1), (3, 4)),
    "attention": (lambda: nn.Attention(8, 8, groups=4, seed=1), (2, 2, 3, 8)),
    "attention_heads": (lambda: nn.Attention(8, 2, groups=2, scale=1.5, seed=1), (2, 2, 2, 8)),
    "resnet": (lambda: nn.ResnetBlock2D(4, 4, groups=2, seed=1), (2, 3, 3, 4)),
    "resnet_shortcut": (lambda: nn.ResnetBlock2D(4, 6, groups=2, scale=2.0, seed=1), (2, 3, 3, 4)),
    "downsample_0": (lambda: nn.Downsample2D(3, 0, seed=1), (2, 4, 4, 3)),
    "downsample_1": (lambda: nn.Downsample2D(3, 1, seed=1), (2, 4, 4, 3)),
    "upsample": (lambda: nn.Upsample2D(3, seed=1), (2, 2, 3, 3)),
}


def directional(loss, array, direction):
    """Central difference of `loss()` as `array` moves along `direction`, in place."""
    saved = array.copy()
    array[...] = saved + EPS * direction
    up = loss()
    array[...] = saved - EPS * direction
    down = loss()
    array[...] = saved
    return (up - down) / (2 * EPS)


@pytest.mark.parametrize("name", LAYERS)
def test_layer_gradients(name, rng):
    make, shape = LAYERS[name]
    layer = make().to(np.float64)
    for p in layer.parameters():  # norms start at 1 and 0: move them away
        p.data += 0.3 * rng.standard_normal(p.shape)
    x = pictures(rng, *shape)
    with fb.tracks("reference"):
        y = layer(Variable(x))
        g = rng.standard_normal(y.shape)
        inputs = [Variable(x, requires_grad=name != "bag_embedding"), *layer.parameters()]
        wanted = [v for v in inputs if v.requires_grad]
        got = grad(layer(inputs[0]), wanted, g=g)

        def loss():
            with no_grad():
                return float((layer(x).data * g).sum())

        for v, d in zip(wanted, got, strict=True):
            direction = rng.standard_normal(v.shape)
            want = directional(loss, v.data, direction)
            np.testing.assert_allclose((d.data * direction).sum(), want, rtol=1e-5, atol=1e-6, err_msg=v.name)


def test_resnet_gradient_of_the_time_embedding(rng):
    block = nn.ResnetBlock2D(4, 4, time_dim=3, groups=2, seed=1).to(np.float64)
    x, t, g = pictures(rng, 2, 3, 3, 4), rng.standard_normal((2, 3)), rng.standard_normal((2, 3, 3, 4))
    time = Variable(t, requires_grad=True)
    with fb.tracks("reference"):
        (dt,) = grad(block(x, time), [time], g=g)
        direction = rng.standard_normal(t.shape)
        want = directional(lambda: float((block(x, t).data * g).sum()), t, direction)
    np.testing.assert_allclose((dt.data * direction).sum(), want, rtol=1e-5, atol=1e-7)


# ---- one whole tiny UNet ----


@pytest.fixture(scope="module")
def network():
    config = nn.UNetConfig.tiny(block_out_channels=(16, 24), num_class_embeds=3, caption_vocabulary=5,
                                attention_head_dim=12, up_block_types=("AttnUpBlock2D", "UpBlock2D"),
                                mid_block_scale_factor=1.3, center_input_sample=True)  # fmt: skip
    return nn.UNet2D(config, seed=3).to(np.float64)


def whole(network, rng):
    """A loss of the whole network and its arguments."""
    x, target = pictures(rng, 2, 4, 4, 12), pictures(rng, 2, 4, 4, 12)

    def loss(sample=x):
        y = network(sample, np.array([3, 700]), class_labels=[2, 0], captions=CAPTIONS)
        return F.mean_squared_error(y, target)

    return x, loss


def test_whole_unet_gradients(network, rng):
    x, loss = whole(network, rng)
    names = network.named_parameters()
    sample = Variable(x, requires_grad=True)
    with fb.tracks("reference"):
        dx, *got = grad(loss(sample), [sample, *names.values()])

        def value():
            with no_grad():
                return loss().item()

        direction = rng.standard_normal(x.shape)
        np.testing.assert_allclose((dx.data * direction).sum(), directional(value, x, direction), rtol=1e-6)
        for (name, p), d in zip(names.items(), got, strict=True):
            entry = np.zeros(p.size)
            entry[rng.integers(p.size)] = 1.0
            for direction in (rng.standard_normal(p.shape), entry.reshape(p.shape)):
                want = directional(value, p.data, direction)
                got_value = (d.data * direction).sum()
                np.testing.assert_allclose(got_value, want, rtol=1e-5, atol=1e-8, err_msg=name)
        assert sum(np.abs(d.data).max() > 0 for d in got) == len(got)  # every parameter takes part


def test_whole_unet_hessian_vector_product(network, rng):
    """The tape run over its own derivatives, against a finite difference of gradients."""
    _, loss = whole(network, rng)
    parameters = network.parameters()
    v = [rng.standard_normal(p.shape) / np.sqrt(p.size) for p in parameters]
    with fb.tracks("reference"):
        first = grad(loss(), parameters, create_graph=True)
        second = grad(sum((a * b).sum() for a, b in zip(first, v, strict=True)), parameters)

        def shifted(eps):
            with network.using(network.flat.data.copy()):
                for p, d in zip(parameters, v, strict=True):
                    p.data += eps * d
                return grad(loss(), parameters)

        for a, u, d, p in zip(second, shifted(EPS), shifted(-EPS), parameters, strict=True):
            want = (u.data - d.data) / (2 * EPS)
            atol = 1e-6 * np.abs(want).max() + 1e-8
            np.testing.assert_allclose(a.data, want, rtol=1e-4, atol=atol, err_msg=p.name)


def test_hessian_vector_product_on_the_bf16_track(rng):
    block = nn.ResnetBlock2D(16, 16, time_dim=8, groups=4, seed=1)
    x, time = pictures(rng, 2, 4, 4, 16).astype(np.float32), rng.standard_normal((2, 8)).astype(np.float32)
    v = [rng.standard_normal(p.shape).astype(np.float32) for p in block.parameters()]

    def product(track):
        with fb.tracks(track):
            loss = F.mean((block(x, time)) ** 2)
            first = grad(loss, block.parameters(), create_graph=True)
            second = grad(sum((a * b).sum() for a, b in zip(first, v, strict=True)), block.parameters())
        return np.concatenate([g.data.ravel() for g in second])

    exact, got = product("reference"), product("bf16")
    assert 1e-5 < np.linalg.norm(got - exact) / np.linalg.norm(exact) < 0.05


@pytest.mark.parametrize("track, limit", [("bf16", 0.02), ("fp4", 0.9), ("dual", 0.8)])
def test_gradients_on_the_tracks_are_near_the_unrounded_ones(track, limit, rng):
    model = nn.UNet2D(nn.UNetConfig.tiny(), seed=1)
    x, target = (pictures(rng, 2, 8, 8, 12).astype(np.float32) for _ in range(2))

    def gradient(name, create_graph=False):
        with fb.tracks(name):
            loss = F.mean_squared_error(model(x, 40), target)
            found = grad(loss, model.parameters(), create_graph=create_graph)
            return np.concatenate([g.data.ravel() for g in found])

    exact, got, taped = gradient("reference"), gradient(track), gradient(track, create_graph=True)
    error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
    assert 1e-5 < error < limit
    cosine = got @ exact / np.linalg.norm(got) / np.linalg.norm(exact)
    assert cosine > 1 - limit / 2
    assert np.linalg.norm(taped - got) < 0.05 * np.linalg.norm(got)  # both forms see the same operands


# ---- modules ----


def tiny(**changes):
    return nn.UNet2D(nn.UNetConfig.tiny(block_out_channels=(16, 16), caption_vocabulary=5, **changes), seed=0)


def test_parameters_live_in_one_buffer():
    model = tiny()
    flat = model.flat
    assert flat.data.dtype == np.float32 and flat.data.ndim == 1
    for name, p in model.named_parameters().items():
        assert p.name == name and p.data.base is flat.data and p.grad.base is flat.grad
        assert flat.offsets[name] % 16 == 0
    flat.data[:] = 2.0
    assert model.conv_in.bias.data[0] == 2.0
    assert model.parameter_count() == sum(p.size for p in model.parameters()) <= flat.data.size


@pytest.mark.parametrize("how", ["touch", "assign", "load_state"])
def test_backward_after_the_weights_have_changed(rng, how):
    """It would take derivatives at neither the old nor the new weights; the device says the same sentence."""
    model, g = nn.Linear(4, 3), rng.standard_normal((2, 3)).astype(np.float32)
    x = rng.standard_normal((2, 4)).astype(np.float32)
    y = model(Variable(x) * 2.0)
    state = {name: p.data.copy() for name, p in model.named_parameters().items()}
    if how == "touch":
        model.flat.data += 1
        model.flat.touch()
    elif how == "assign":
        model.weight.assign(model.weight.data + 1)
    else:
        model.load_state_dict(state)
    model.zero_grad()
    with pytest.raises(RuntimeError, match=r"the weights have changed since this forward \(weight, in "):
        y.backward(g)
    assert not model.flat.grad.any()
    model(x).backward(g)
    assert model.flat.grad.any()


def test_backward_fills_the_flat_gradient(rng):
    model = tiny()
    x = pictures(rng, 2, 4, 4, 12).astype(np.float32)

    def loss():
        return F.mean_squared_error(model(x, 5, captions=CAPTIONS), x)

    model.zero_grad()
    loss().backward()
    once = model.flat.grad.copy()
    assert np.abs(once).max() > 0
    wanted = grad(loss(), model.parameters())
    for p, g in zip(model.parameters(), wanted, strict=True):
        assert np.array_equal(p.grad, g.data)
    loss().backward()
    np.testing.assert_allclose(model.flat.grad, 2 * once, rtol=1e-6)
    before = loss().item()
    model.flat.data -= 0.05 * once
    model.flat.touch()
    assert loss().item() < before


def test_same_seed_same_network():
    a, b, c = tiny(), tiny(), nn.UNet2D(tiny().config, seed=1)
    assert np.array_equal(a.flat.data, b.flat.data)
    assert not np.array_equal(a.flat.data, c.flat.data)


def test_initial_distribution():
    w = nn.Conv2d(16, 64, 3, seed=5).weight.data
    bound = 1 / np.sqrt(16 * 9)
    assert np.abs(w).max() <= bound and abs(w.std() * np.sqrt(3) / bound - 1) < 0.05
    assert not nn.Conv2d(3, 4, 3, zero=True).weight.data.any()


def test_zero_conv_out_predicts_zero(rng):
    model = nn.UNet2D(nn.UNetConfig.tiny(), zero_conv_out=True)
    assert not model(pictures(rng, 1, 8, 8, 12), 3).data.any()
    assert model.parameter_count() == 657388


def test_state_dict_round_trip(rng):
    a, b = tiny(), nn.UNet2D(tiny().config, seed=9)
    state = a.state_dict()
    assert list(state) == list(a.named_parameters())
    b.load_state_dict(state)
    assert np.array_equal(a.flat.data, b.flat.data)
    state["conv_in.bias"][0] += 1  # a copy, not a view
    assert a.conv_in.bias.data[0] != state["conv_in.bias"][0]
    average = rng.standard_normal(a.flat.data.size).astype(np.float32)
    assert np.array_equal(a.state_dict(average)["conv_in.weight"], a.flat.views(average)["conv_in.weight"])


def test_load_state_dict_says_everything_at_once():
    model = tiny()
    state = model.state_dict()
    before = model.flat.data.copy()
    del state["conv_in.bias"]
    state["extra"] = np.ones(2)
    state["conv_out.weight"] = np.ones((3, 3, 3, 3))
    state["conv_out.bias"] += 1
    with pytest.raises(ShapeError) as error:
        model.load_state_dict(state)
    for part in ("missing: conv_in.bias", "unexpected: extra", "conv_out.weight has shape (3, 3, 3, 3)",
                 "instead of (12, 3, 3, 16)"):  # fmt: skip
        assert part in str(error.value)
    assert np.array_equal(model.flat.data, before)


def test_using_other_weights(rng):
    model, x = tiny(), pictures(rng, 1, 4, 4, 12)
    other = model.flat.data * 1.1
    with no_grad():
        before = model(x, 5, captions=CAPTIONS[:1]).data
        with model.using(other):
            inside = model(x, 5, captions=CAPTIONS[:1]).data
            assert model.flat.data is other
        after = model(x, 5, captions=CAPTIONS[:1]).data
    assert np.array_equal(before, after) and not np.array_equal(before, inside)
    with pytest.raises(ShapeError, match=r"using: flat has shape \(3,\)"), model.using(np.ones(3)):
        pass


def test_to_float64_and_back():
    model = tiny()
    data = model.flat.data.copy()
    assert model.to(np.float64).flat.data.dtype == np.float64
    assert model.flat.grad.dtype == np.float64
    assert np.array_equal(model.to(np.float32).flat.data, data)
    with pytest.raises(TypeError, match="float16"):
        model.to(np.float16)


def test_route_reaches_every_product():
    model = tiny()
    chosen = model.apply_route({"conv_in*": "bf16", "conv_out*": "bf16", "*embedding*": "bf16", "*": "fp4"})
    for layer in (model.conv_in, model.time_embedding.linear_1, model.caption_embedding):
        assert layer.track == "bf16"
    for layer in (model.down_blocks[0].resnets[0].conv1, model.mid_block.attentions[0]):
        assert layer.track == "fp4"
    assert chosen["conv_in.weight"] == "bf16" and chosen["mid_block.attentions.0.to_q.weight"] == "fp4"
    products = {k for k, p in model.named_parameters().items() if p.ndim > 1}
    assert products <= set(chosen)
    with pytest.raises(ValueError, match="did you mean 'fp4'"):
        model.apply_route({"*": "fp5"})


# ---- FP4 twins ----


def test_twins_are_prepared_once_and_renewed(rng, monkeypatch):
    from fp4bf16.nn import module

    made = []
    real = module.quantize
    monkeypatch.setattr(module, "quantize", lambda x, *a, **k: made.append(x.shape) or real(x, *a, **k))
    model, x = tiny(), pictures(rng, 1, 4, 4, 12)
    model.apply_route({"conv_in*": "bf16", "conv_out*": "bf16", "*embedding*": "bf16", "*": "fp4"})
    with no_grad():
        first = model(x, 5, captions=CAPTIONS[:1]).data
        count = len(made)
        assert count > 10
        assert np.array_equal(model(x, 5, captions=CAPTIONS[:1]).data, first)
        assert len(made) == count
        model.flat.data *= 1.5
        model.flat.touch()
        assert not np.array_equal(model(x, 5, captions=CAPTIONS[:1]).data, first)
        assert len(made) == 2 * count
        model.conv_in.weight.assign(model.conv_in.weight.data * 2)
        model(x, 5, captions=CAPTIONS[:1])
        assert len(made) == 2 * count  # conv_in runs in BF16: it has no twin


PRODUCTS = [
    (lambda: nn.Linear(24, 8, seed=2), (3, 24)),
    (lambda: nn.Conv2d(20, 8, 3, padding=1, seed=2), (2, 4, 4, 20)),
]


@pytest.mark.parametrize("make, shape", PRODUCTS, ids=["linear", "conv2d"])
def test_twin_equals_quantising_on_the_fly(make, shape, rng):
    layer, x = make(), rng.standard_normal(shape).astype(np.float32)
    layer.track = "fp4"
    if x.ndim == 2:
        want = fb.linear(x, layer.weight.data, layer.bias.data, track="fp4")
    else:
        want = fb.conv2d(x, layer.weight.data, padding=1, bias=layer.bias.data, track="fp4")
    np.testing.assert_allclose(layer(x).data, want, rtol=1e-6, atol=1e-6)
    assert np.abs(layer(x).data - make()(x).data).max() > 1e-3


DUAL = [
    (lambda: nn.Linear(64, 32, seed=2), (16, 64)),
    (lambda: nn.Conv2d(32, 48, 3, padding=1, seed=2), (2, 4, 4, 32)),
]


@pytest.mark.parametrize("make, shape", DUAL, ids=["linear", "conv2d"])
def test_dual_layers(make, shape, rng):
    layer, x = make(), rng.standard_normal(shape).astype(np.float32)
    with fb.tracks("reference"):
        exact = layer(x).data
    error = {}
    for track in ("fp4", "dual", "bf16"):
        layer.track = track
        error[track] = np.linalg.norm(layer(x).data - exact) / np.linalg.norm(exact)
    assert error["bf16"] < error["dual"] < error["fp4"] < 0.2
    layer.track = "dual"
    v = Variable(x, requires_grad=True)
    g = rng.standard_normal(exact.shape).astype(np.float32)
    got = grad(layer(v), [v, layer.weight], g=g)
    taped = grad(layer(v), [v, layer.weight], g=g, create_graph=True)
    with fb.tracks("reference"):
        want = grad(layer(v), [v, layer.weight], g=g)
    for a, b, c in zip(got, taped, want, strict=True):
        assert a.shape == c.shape
        np.testing.assert_allclose(a.data, b.data, rtol=1e-5, atol=1e-5)
        assert np.linalg.norm(a.data - c.data) < 0.12 * np.linalg.norm(c.data)


@pytest.mark.parametrize("make, shape", PRODUCTS, ids=["linear", "conv2d"])
def test_fp4_gradients_use_the_dequantised_operands(make, shape, rng):
    """dX = g W^ and dW = g^T X^ with BF16 products, straight through the quantiser."""
    layer, x = make(), rng.standard_normal(shape).astype(np.float32)
    layer.track = "fp4"
    v = Variable(x, requires_grad=True)
    g = rng.standard_normal(layer(x).shape).astype(np.float32)
    dx, dw, db = grad(layer(v), [v, layer.weight, layer.bias], g=g)
    outer = "row" if x.ndim == 2 else "image"
    near = fb.dequantize(fb.quantize(x, outer=outer, search="fast"))
    weight = fb.dequantize(fb.quantize(layer.weight.data, outer=outer))
    if x.ndim == 2:
        want = fb.matmul(g, weight), fb.matmul(g.T, near)
    else:
        want = fb.conv2d_vjp(g, near, weight, padding=1)[:2]
    np.testing.assert_allclose(dx.data, want[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dw.data, want[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(db.data, g.reshape(-1, 8).sum(0), rtol=1e-5, atol=1e-5)


# ---- bad input ----

BAD = [
    (lambda: nn.GroupNorm(5, 8), ConfigError, "5 groups do not divide 8 channels"),
    (lambda: nn.Attention(8, 3, groups=2), ConfigError, "attention_head_dim: 3 does not divide 8"),
    (lambda: nn.BagEmbedding(4, 2)(np.ones((2, 3))), ShapeError, r"captions: shape \(2, 3\).*4 words"),
    (lambda: nn.Embedding(4, 2)([4]), ShapeError, "4 rows"),
    (lambda: nn.Parameter(np.ones(2), "w").assign(np.ones(3)), ShapeError, r"w has shape \(2,\).*\(3,\)"),
]


@pytest.mark.parametrize("call, error, message", BAD, ids=range(len(BAD)))
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


DOCUMENTED = ["tape", "xp", "module", "layers", "unet", "loader", "ops_math", "ops_shape", "ops_network",
              "ops_upsample"]  # fmt: skip


@pytest.mark.parametrize("name", DOCUMENTED)
def test_examples_in_docstrings(name):
    module = importlib.import_module(f"fp4bf16.nn.{name}")
    assert doctest.testmod(module).failed == 0
