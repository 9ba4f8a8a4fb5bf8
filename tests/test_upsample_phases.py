"""Upsampling convolutions by phases, on the CPU and by the emulated library: `ops.upsample_conv` against the
convolution of upsampled pictures, against the reference, and as `UNet2D` uses it."""

from __future__ import annotations

import host_cuda as emulation
import numpy as np
import pytest
from host_cuda import Arrays, host_cuda, put  # noqa: F401  (host_cuda is a fixture)
from test_device_products import numbers, on_grid, placed, rounded, run_of
from unet_cases import FP4, Case, joined, relative

import fp4bf16 as fb
from fp4bf16 import nn
from fp4bf16.backends import cuda_math
from fp4bf16.errors import NonFiniteError, ShapeError
from fp4bf16.nn import fused, layers
from fp4bf16.nn import ops as F
from fp4bf16.nn.cuda.phases import PhaseLayer
from fp4bf16.nn.cuda.products import Layer, doubled, input_gradient, pictures, product
from fp4bf16.nn.tape import Variable, grad
from fp4bf16.python_ref import conv as reference
from fp4bf16.python_ref.formats import E4M3


def operands(rng, n=2, h=3, w=5, c=16, o=24, dtype=np.float32):
    shapes = (n, h, w, c), (o, 3, 3, c), (o,)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def distance(y, want):
    return np.linalg.norm(y - want) / np.linalg.norm(want)


def gradient(g, kernels, shape):
    """In x: the sum over the phases of what `kernels` (O, 2, 2, 2, 2, C) send back."""
    parts = (reference.conv2d_dgrad(g[:, a::2, b::2], kernels[:, a, b], shape, 1, ((1 - a, a), (1 - b, b)))
             for a in (0, 1) for b in (0, 1))  # fmt: skip
    return sum(parts)


# ---- the definition
def test_without_rounding_it_is_the_convolution_of_the_upsampled_pictures(rng):
    x, w, b = operands(rng, dtype=np.float64)
    want = reference.conv2d(fused.upsample_nearest(x), w, 1, 1, b)
    np.testing.assert_allclose(reference.upsample_conv(x, w, b, "reference"), want, rtol=1e-12, atol=1e-12)
    got = F.upsample_conv(Variable(x), Variable(w), Variable(b), "reference").data
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_phase_weights_are_the_references_bits(rng):
    _, w, _ = operands(rng)
    made = fused.phase_weights(w)
    assert made.dtype == np.float32
    np.testing.assert_array_equal(made, reference.phase_weights(w))
    one = w[3, :, :, 5]  # by hand: {0}, {1, 2} at phase 0, {0, 1}, {2} at phase 1
    np.testing.assert_array_equal(made[3, 0, 0, 0, 0, 5], one[0, 0])
    np.testing.assert_array_equal(made[3, 0, 1, 1, 0, 5], ((one[1, 0] + one[1, 1]) + one[2, 0]) + one[2, 1])
    np.testing.assert_array_equal(made[3, 1, 1, 0, 1, 5], one[0, 2] + one[1, 2])


def test_adjoints(rng):
    """<A x, y> = <x, A* y> of both maps."""
    _, w, _ = operands(rng, dtype=np.float64)
    g = rng.standard_normal((24, 2, 2, 2, 2, 16))
    np.testing.assert_allclose((fused.phase_weights(w) * g).sum(), (fused.phase_weights_vjp(g) * w).sum())
    y, g = rng.standard_normal((2, 4, 6, 12)), rng.standard_normal((2, 6, 10, 3))
    np.testing.assert_allclose((fused.interleave_phases(y) * g).sum(),
                               (fused.interleave_phases_vjp(g) * y).sum())  # fmt: skip


@pytest.mark.parametrize("track", ["bf16", "fp4"])
def test_each_track_is_the_reference(track, rng):
    x, w, b = operands(rng)
    got = F.upsample_conv(Variable(x), Variable(w), Variable(b), track).data
    want = reference.upsample_conv(x, w, b, track)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * abs(want).max())


@pytest.mark.parametrize("smooth", [False, True])
def test_errors_beside_those_of_the_upsampled_pictures(smooth, rng):
    """BF16: one rounding of a sum in place of rounded summands. FP4: as far for independent taps, farther
    where those of a kernel are alike, since their own errors would have averaged out.
    """
    x, w, _ = operands(rng, 2, 6, 6, 64, 64)
    if smooth:
        w = ((w + w[:, 1:2, 1:2]) / 2).astype(np.float32)
    exact = reference.conv2d(fused.upsample_nearest(x.astype(np.float64)), w, 1, 1)
    for track, most in (("bf16", 1.4 if smooth else 1.2), ("fp4", 1.35 if smooth else 1.1)):
        phased = F.upsample_conv(Variable(x), Variable(w), None, track).data
        plain = F.conv2d(F.upsample_nearest(Variable(x)), Variable(w), None, 1, 1, None, track).data
        assert distance(phased, exact) < most * distance(plain, exact), track


@pytest.mark.parametrize("track", ["bf16", "fp4"])
def test_gradients(track, rng):
    """In x with the phases' rounded weights; in the weight the convolution's of the upsampled pictures, which
    has the same terms.
    """
    x, w, b = operands(rng)
    inputs = [Variable(v, requires_grad=True) for v in (x, w, b)]
    y = F.upsample_conv(*inputs, track)
    g = rng.integers(-4, 5, y.shape).astype(np.float32)
    dx, dw, db = (v.data for v in grad(y, inputs, g=g))
    x_seen, kernels = reference.operands(x, reference.phase_weights(w).reshape(-1, 2, 2, 16), track)
    kernels = np.asarray(kernels, np.float64).reshape(24, 2, 2, 2, 2, 16)
    np.testing.assert_allclose(dx, gradient(g, kernels, x.shape), rtol=1e-5, atol=1e-4)
    want = reference.conv2d_wgrad(g, fused.upsample_nearest(np.asarray(x_seen)), (3, 3), 1, 1)
    np.testing.assert_allclose(dw, want, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(db, g.sum((0, 1, 2)), rtol=1e-6)


# ---- the layer
def plainly(layer, x, track="bf16"):
    """The convolution of the upsampled pictures."""
    twin = layer.conv.weight.dual() if track == "dual" else None
    return F.conv2d(F.upsample_nearest(x), layer.conv.weight, layer.conv.bias, 1, 1, None, track, twin).data


@pytest.mark.parametrize("track", ["bf16", "fp4", "reference"])
def test_the_layer_takes_phases_where_it_can(track, rng):
    layer = nn.Upsample2D(16, seed=0)
    conv, x = layer.conv, rng.standard_normal((2, 4, 4, 16)).astype(np.float32)
    with fb.tracks(track):
        phased = layer(x).data
        np.testing.assert_array_equal(phased, F.upsample_conv(x, conv.weight, conv.bias, track).data)
        conv.phases = False
        plain = layer(x).data
    conv.phases = True
    if track != "fp4":  # whose twin is made with the same search, but at another place
        np.testing.assert_array_equal(plain, plainly(layer, x, track))
    assert distance(phased, plain) < {"bf16": 0.01, "fp4": 0.2, "reference": 1e-6}[track]
    assert track == "reference" or distance(phased, plain) > 0
    assert not conv.by_phases("dual")
    with fb.tracks("dual"):
        assert not conv.by_phases("bf16")
        np.testing.assert_array_equal(layer(x).data, plainly(layer, x, "dual"))
    narrow = nn.Upsample2D(24, seed=0)  # no whole blocks
    assert not narrow.conv.by_phases("fp4")
    x = x[..., :1].repeat(24, 3)
    np.testing.assert_array_equal(narrow(x).data, plainly(narrow, x))


def test_what_is_made_of_a_weight_is_made_anew_when_it_changes(rng):
    layer = nn.Upsample2D(16, seed=0)
    weight, x = layer.conv.weight, rng.standard_normal((1, 2, 2, 16)).astype(np.float32)
    made = weight.phases()
    assert weight.phases() is made and made.twin() is made.twin()
    np.testing.assert_array_equal(made.data, fused.phase_weights(weight.data).reshape(64, 2, 2, 16))
    layer.conv.track = "fp4"
    before = layer(x).data
    weight.assign(2 * weight.data)
    assert weight.phases() is not made
    np.testing.assert_allclose(layer(x).data - layer.conv.bias.data, 2 * (before - layer.conv.bias.data),
                               rtol=1e-5, atol=1e-5)  # fmt: skip
    weight.data[0, 0, 0, 0] = np.inf
    weight.touch()
    with pytest.raises(NonFiniteError):
        layer(x)


def test_a_network_by_phases_is_near(rng):
    model = nn.UNet2D(nn.UNetConfig.tiny(), seed=1)
    x = rng.standard_normal((2, 8, 8, 12)).astype(np.float32)
    found = {}
    for track in ("reference", "bf16"):
        for on in (False, True):
            assert model.upsample_by_phases(on) is model
            with fb.tracks(track), nn.no_grad():
                found[track, on] = model(x, 10).data
    assert distance(found["reference", True], found["reference", False]) < 1e-5
    error = distance(found["bf16", False], found["reference", False])
    assert distance(found["bf16", True], found["reference", False]) < 1.5 * error


@pytest.mark.parametrize("track", ["reference", "bf16", "fp4"])
def test_no_picture(track, rng):
    """A batch of none gives none, and gradients of zeros."""
    layer = nn.Upsample2D(16, seed=rng.integers(100))
    assert layer.conv.by_phases(track)
    layer.conv.track = track
    x = Variable(np.zeros((0, 3, 5, 16), np.float32), requires_grad=True)
    y = layer(x)
    assert y.shape == (0, 6, 10, 16)
    dx, dw = grad(y, [x, layer.conv.weight], np.zeros(y.shape, np.float32))
    assert dx.shape == x.shape and dw.shape == layer.conv.weight.shape and not np.any(dw.data)


def test_adapters_that_are_off_cost_no_upsampled_picture(rng, monkeypatch):
    model, made = nn.UNet2D(nn.UNetConfig.tiny(), seed=1), []
    real = layers.F.upsample_nearest
    monkeypatch.setattr(layers.F, "upsample_nearest", lambda x: made.append(x.shape) or real(x))
    lora, x = nn.LoRA(model, 2, 2.0), rng.standard_normal((1, 8, 8, 12)).astype(np.float32)
    count = len(layers.upsampling(model))
    with nn.no_grad():
        with lora.disabled():
            model(x, 10)
        assert not made
        model(x, 10)
    assert len(made) == count > 0


# ---- the device form, by the emulated library
@pytest.fixture
def _emulated(host_cuda, monkeypatch):  # noqa: F811
    monkeypatch.setitem(cuda_math._KNOWN, "fake", Arrays())
    monkeypatch.setattr(emulation, "POISON", 0xFF)


class Net(nn.Module):
    def __init__(self, rng, c, o):
        self.conv, self.norm = nn.Conv2d(c, o, 3, padding=1), nn.GroupNorm(4, c)
        weight = rng.integers(-1, 2, self.conv.weight.shape).astype(np.float32)
        self.conv.weight.assign(weight)  # sums of taps reach 4
        self.conv.bias.assign(rng.integers(-8, 8, o).astype(np.float32))
        self.flat  # noqa: B018  (packs the parameters)


@pytest.mark.parametrize("track", ["fp4", "bf16"])
@pytest.mark.parametrize("c, o", [(16, 8), (32, 24)])
def test_product_and_gradient_are_exact(_emulated, track, c, o, rng):
    """Layout, scales and gradient, on integers: of the quantised kernels, of BF16's also the convolution of
    the upsampled pictures.
    """
    net = Net(rng, c, o)
    w, run = net.conv.weight.data, run_of(net)
    layer, plain, x = PhaseLayer("conv", net.conv), Layer("conv", net.conv), on_grid(rng, (2, 3, 4, c))
    kernels = fused.phase_weights(np.array(w)).reshape(-1, 2, 2, c)
    seen = reference.operands(x, kernels, track)[1]
    feed = pictures(run, placed(x), track)
    d = run.empty(layer.output(x.shape))
    assert d.shape == (2, 6, 8, o)
    made = product(run, layer, feed, d, sums=True)
    assert made.sums == ()  # a small batch: they do not pay
    want = reference.upsample_conv(x, w, net.conv.bias.data, track)
    np.testing.assert_array_equal(numbers(d), rounded(want))
    if track == "bf16":
        whole = reference.conv2d(fused.upsample_nearest(x), w, 1, 1, net.conv.bias.data)
        np.testing.assert_array_equal(numbers(d), rounded(whole))
    g = rng.integers(-4, 5, d.shape).astype(np.float32)
    dx = input_gradient(run, layer, track, placed(g), x.shape)
    parts = np.asarray(seen, np.float64).reshape(o, 2, 2, 2, 2, c)
    np.testing.assert_array_equal(numbers(dx), rounded(gradient(g, parts, x.shape)))
    assert plain.output(doubled(run, feed.again(run)).shape) == d.shape


def test_the_copies_are_the_quantisers(_emulated, rng):
    net = Net(rng, 16, 8)
    net.conv.weight.assign(rng.standard_normal(net.conv.weight.shape).astype(np.float32))
    run = run_of(net)
    made = run.weights.phases_of("conv.weight")
    flat = fused.phase_weights(np.array(net.conv.weight.data)).reshape(32, 2, 2, 16)
    np.testing.assert_array_equal(made.data.owner.array.reshape(flat.shape), flat)
    np.testing.assert_array_equal(numbers(made.bf16).reshape(flat.shape), rounded(flat))
    values = E4M3[made.twin.owner.array].reshape(32, -1) * made.twin_scale.owner.array[:, None]
    want = reference.operands(flat[:1], flat, "fp4")[1]
    np.testing.assert_array_equal(values.reshape(flat.shape), want)
    assert run.weights.phase_bytes() == 16 * 8 * 16 * 7 + 32 * 4
    assert run.weights.phases_of("conv.weight") is made


def test_phases_of_other_kernels_are_refused(_emulated, rng):
    class Other(nn.Module):
        def __init__(self):
            self.conv = nn.Conv2d(24, 8, 3)

    with pytest.raises(ShapeError, match=r"phases_of: conv.weight has shape \(8, 3, 3, 24\), but \(O,"):
        run_of(Other()).weights.phases_of("conv.weight")


# ---- the network, by the emulated library
@pytest.mark.parametrize("name", ["tiny", "variants"])
def test_the_network_is_the_cpus(_emulated, name, rng):
    """Prediction and gradients, where the numbers that are rounded are other ones on both sides."""
    case = Case(name, rng, put)
    exact, exact_gradients = case.on_host("reference")
    theirs, their_gradients = case.on_host()
    ours, gradients = case.on_device()
    assert 1e-4 < relative(ours, exact) < 2.5 * relative(theirs, exact)
    want = joined(exact_gradients)
    assert relative(joined(gradients), want) < 2.5 * relative(joined(their_gradients), want)
    n = next(n for n in gradients if "upsamplers" in n and n.endswith("weight"))
    assert relative(gradients[n], exact_gradients[n]) < 4 * relative(their_gradients[n], exact_gradients[n])
    for model in (case.host, case.device):
        model.upsample_by_phases(False)  # a choice of each call
    plain, _ = case.on_device()
    assert not np.array_equal(plain, ours)
    assert relative(plain, exact) < 2.5 * relative(theirs, exact)


def test_what_an_fp4_layer_does(_emulated, rng):
    """As in test_unet_device.py: the difference that the layer's FP4 makes is the CPU's, but for the
    roundings that carry a number over to another code.
    """
    squares = np.zeros((2, 3))  # prediction, gradients: effect, rounding, distance of effects
    for _ in range(4):
        case = Case("tiny", rng, put, {"up_blocks.0.upsamplers*": "fp4"}, "upsamplers")
        (y0, g0), (y1, g1) = case.on_host("bf16"), case.on_host()
        (z0, h0), (z1, h1) = case.on_device("bf16"), case.on_device()
        g0, g1, h0, h1 = (joined(g) for g in (g0, g1, h0, h1))
        for i, (a0, a1, b0, b1) in enumerate(((y0, y1, z0, z1), (g0, g1, h0, h1))):
            found = (np.linalg.norm(v) for v in (a1 - a0, b0 - a0, (b1 - b0) - (a1 - a0)))
            squares[i] += np.square(list(found)) / np.square(np.linalg.norm(a1 - a0))
    effect, rounding, apart = np.sqrt(squares / 4).T
    assert (effect > 2.5 * rounding).all()
    assert (apart < 0.85 * effect).all()


@pytest.mark.parametrize("save", ["packed", "bf16", "recompute"])
def test_phases_follow_the_weights(_emulated, save, rng):
    """What is made of the weights by phases is made anew when they change, in copies of the set as well."""
    case = Case("tiny", rng, put, FP4, save=save)
    before, _ = case.on_device()
    assert case.device.inventory()["weights by phases"] == 16 * 64 * 64 * 7 + 4 * 64 * 4
    flat, name = case.device.flat, "up_blocks.0.upsamplers.0.conv.weight"
    other = flat.clone()
    for made in (flat.phases_of(name), other.phases_of(name)):
        w = np.array(flat.data_of(name).owner.array)
        np.testing.assert_array_equal(made.data.owner.array, fused.phase_weights(w).reshape(-1))
    state = case.host.state_dict()
    state[name] = np.roll(state[name], 1, axis=0)
    case.device.load_state_dict(state)
    case.host.load_state_dict(state)
    w = np.array(flat.data_of(name).owner.array)
    np.testing.assert_array_equal(flat.phases_of(name).data.owner.array, fused.phase_weights(w).reshape(-1))
    after, _ = case.on_device()
    assert relative(after, before) > 0.01
    assert relative(after, case.on_host()[0]) < relative(after, before)


def test_a_network_on_the_device_has_its_phases_at_once(_emulated, rng):
    """Not first while a graph is captured."""
    model = nn.UNet2D(nn.UNetConfig.tiny(), seed=1)
    model.cuda(put(np.zeros(1, np.float32)))
    assert model.inventory()["weights by phases"] == 16 * 64 * 64 * 7 + 4 * 64 * 4
