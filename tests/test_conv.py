"""conv2d and its gradients against the NumPy reference, PyTorch, and what bad input must say."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fp4bf16 as fb
from fp4bf16.conv import conv2d_dgrad, conv2d_wgrad
from fp4bf16.python_ref import conv as ref

BF16 = ml_dtypes.bfloat16
#: x, w, stride, padding: a real layer, ragged, a single row, unaligned C, asymmetric, 1x1, to
#: fewer and to more channels, empty
CASES = [
    ((32, 8, 8, 32), (32, 3, 3, 32), 1, 1),
    ((3, 7, 9, 5), (4, 3, 3, 5), 1, 1),
    ((1, 1, 1, 16), (8, 1, 1, 16), 1, 0),
    ((2, 6, 5, 20), (7, 5, 2, 20), 2, ((0, 1), (0, 1))),
    ((2, 9, 9, 48), (16, 3, 3, 48), 2, 1),
    ((2, 4, 4, 33), (64, 1, 1, 33), 1, 0),
    ((1, 3, 3, 3), (2, 3, 3, 3), 1, 0),
    ((5, 4, 6, 32), (6, 3, 2, 32), 1, ((2, 0), (1, 3))),
    ((3, 5, 4, 3), (32, 3, 3, 3), 1, 1),
    ((0, 4, 4, 16), (8, 3, 3, 16), 1, 1),
    ((2, 4, 4, 16), (0, 3, 3, 16), 1, 1),
]
IDS = [f"{x}*{w}/{s}" for x, w, s, _ in CASES]


def calc_diff(x, y) -> float:
    """1 - 2<x, y> / (<x, x> + <y, y>), 0 for equal arrays."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    norm = (x * x).sum() + (y * y).sum()
    return 0.0 if norm == 0 else 1 - 2 * (x * y).sum() / norm


def make(rng, x_shape, w_shape, dtype=np.float32):
    x = rng.standard_normal(x_shape) * np.exp2(rng.integers(-6, 6, (*x_shape[:1], 1, 1, 1)))
    return x.astype(dtype), rng.standard_normal(w_shape).astype(dtype)


# ---- forward -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("track", ["bf16", "fp4"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_float32_result_is_that_of_the_rounded_operands(rng, case, track):
    x_shape, w_shape, stride, padding = case
    x, w = make(rng, x_shape, w_shape)
    want = ref.conv2d_track(x, w, stride, padding, track)
    out = np.full(want.shape, np.nan, np.float32)  # poisoned: every element must be written
    y = fb.conv2d(x, w, stride=stride, padding=padding, track=track, out=out)
    assert y is out and y.dtype == np.float32
    assert calc_diff(y, want) < 1e-11
    if want.size:
        size = ref.conv2d(*map(np.abs, ref.operands(x, w, track)), stride, padding)
        assert np.all(np.abs(y - want) <= 2e-6 * size)


@pytest.mark.parametrize("track", ["bf16", "fp4"])
@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float64])
def test_other_dtypes_in_and_out(rng, dtype, track):
    x, w = make(rng, (2, 6, 6, 24), (8, 3, 3, 24), dtype)
    x = (x * dtype(0.02)).astype(dtype)
    y = fb.conv2d(x, w, padding=1, track=track)
    assert y.dtype == dtype
    assert calc_diff(y, ref.conv2d_track(x.astype(np.float32), w.astype(np.float32), 1, 1, track)) < 1e-5
    wide = fb.conv2d(x, w, padding=1, track=track, dtype="float32")
    np.testing.assert_array_equal(wide.astype(dtype), y)  # rounded once, from the float32 sums


@pytest.mark.parametrize("format", ["nvfp4_exact", "nvfp4", "mxfp4", "fp8"])
def test_prepared_weight_is_the_weight_quantised_on_the_fly(rng, format):
    x, w = make(rng, (2, 5, 5, 40), (6, 3, 3, 40))
    wq = fb.quantize(w, format, axis=-1, outer=None if format == "mxfp4" else "image")
    y = fb.conv2d(x, wq, padding=1)
    np.testing.assert_array_equal(y, fb.conv2d(x, w, padding=1, track="fp4", format=format))
    assert calc_diff(y, ref.conv2d_track(x, w, 1, 1, "fp4", format)) < 1e-11
    bf16 = fb.conv2d(x, wq, padding=1, track="bf16")
    np.testing.assert_array_equal(bf16, fb.conv2d(x, np.asarray(wq), padding=1, track="bf16"))


def test_scale_of_a_picture_is_its_own(rng):
    """One outer scale a picture: a large neighbour in the batch changes no bit."""
    x, w = make(rng, (3, 8, 8, 32), (16, 3, 3, 32))
    alone = fb.conv2d(x[:1], w, padding=1, track="fp4")
    x[1] *= 2.0**20
    batch = fb.conv2d(x, w, padding=1, track="fp4")
    np.testing.assert_allclose(batch[:1], alone, rtol=1e-5, atol=1e-6 * np.abs(alone).max())


@given(st.data())
def test_reference_track_is_the_reference(data):
    draw, small = data.draw, st.integers(0, 3)
    kh, kw, stride = draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    pair = st.tuples(small, small)
    padding = draw(st.one_of(st.integers(0, 4), st.tuples(pair, pair)))
    pads = ref.padding_pairs(padding)
    h = draw(st.integers(max(1, kh - sum(pads[0])), 9))
    w = draw(st.integers(max(1, kw - sum(pads[1])), 9))
    n, c, o = draw(st.integers(0, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x, weight = rng.standard_normal((n, h, w, c)), rng.standard_normal((o, kh, kw, c))
    how = {"stride": stride, "padding": padding, "track": "reference"}
    y = fb.conv2d(x, weight, **how)
    np.testing.assert_allclose(y, ref.conv2d(x, weight, stride, padding), rtol=0, atol=1e-12)
    g = rng.standard_normal(y.shape)
    want = ref.conv2d_vjp(g, x, weight, stride, padding)
    for a, b in zip(fb.conv2d_vjp(g, x, weight, **how), want, strict=True):
        assert a.dtype == np.float64
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("track", ["reference", "bf16", "fp4"])
@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
def test_epilogue(rng, activation, track):
    x, w = make(rng, (4, 6, 6, 16), (8, 3, 3, 16), np.float64)
    bias, residual = rng.standard_normal(8), rng.standard_normal((4, 6, 6, 8))
    y = fb.conv2d(x, w, padding=1, bias=bias, activation=activation, residual=residual, track=track)
    want = ref.conv2d_track(x, w, 1, 1, track, bias=bias, activation=activation, residual=residual)
    limit = 1e-12 if track == "reference" else 1e-5
    np.testing.assert_allclose(y, want, rtol=0, atol=limit * np.abs(want).max())


def test_the_same_call_gives_the_same_bits(rng):
    x, w = make(rng, (16, 8, 8, 48), (32, 3, 3, 48))
    g = rng.standard_normal((16, 8, 8, 32)).astype(np.float32)
    first = fb.conv2d(x, w, padding=1), *fb.conv2d_vjp(g, x, w, padding=1)
    for _ in range(3):
        again = fb.conv2d(x, w, padding=1), *fb.conv2d_vjp(g, x, w, padding=1)
        for a, b in zip(first, again, strict=True):
            np.testing.assert_array_equal(a, b)


# ---- views, out --------------------------------------------------------------------------------------------
def test_views_and_negative_strides(rng):
    x, w = make(rng, (6, 8, 8, 32), (8, 3, 3, 32))
    views = (x[::-1, ::2, ::-1], w[:, ::-1]), (x[..., ::2], w[..., 1::2]), (x.swapaxes(1, 2), w)
    for view, weight in views:
        y = fb.conv2d(view, weight, padding=1)
        np.testing.assert_array_equal(y, fb.conv2d(view.copy(), weight.copy(), padding=1))
        g = rng.standard_normal((*y.shape[:3], 16)).astype(np.float32)[..., ::2]
        copies = fb.conv2d_vjp(g.copy(), view.copy(), weight.copy(), padding=1)
        for a, b in zip(fb.conv2d_vjp(g, view, weight, padding=1), copies, strict=True):
            np.testing.assert_array_equal(a, b)


def test_out(rng):
    x, w = make(rng, (2, 4, 4, 16), (8, 3, 3, 16))
    want = fb.conv2d(x, w, padding=1)
    for out in (np.empty((2, 4, 4, 8), np.float32), np.empty((2, 4, 4, 16), np.float32)[..., ::-2]):
        assert fb.conv2d(x, w, padding=1, out=out) is out
        np.testing.assert_array_equal(out, want)
    frozen = np.empty_like(want)
    frozen.flags.writeable = False
    square = rng.standard_normal((16, 1, 1, 16)).astype(np.float32)
    for kind, word, weight, out in (
        (ValueError, "read-only", w, frozen),
        (fb.ShapeError, r"\(2, 4, 4, 7\)", w, np.empty((2, 4, 4, 7), np.float32)),
        (fb.DTypeError, "float64", w, np.empty((2, 4, 4, 8))),
    ):
        with pytest.raises(kind, match=word):
            fb.conv2d(x, weight, padding=1, out=out)
    for shared in (x, x[::-1]):
        with pytest.raises(ValueError, match="overlaps"):
            fb.conv2d(x, square, out=shared)
    with pytest.raises(ValueError, match="overlaps"):
        fb.conv2d(x, square, residual=(r := x.copy()), out=r)


# ---- prepared input, certificates --------------------------------------------------------------------------
def test_prepared_input(rng):
    x, w = make(rng, (2, 5, 5, 40), (6, 3, 3, 40))
    xq = fb.quantize(x, outer="image", search="fast")
    np.testing.assert_array_equal(fb.conv2d(xq, w, padding=1), fb.conv2d(x, w, padding=1, track="fp4"))
    g = rng.standard_normal((2, 5, 5, 6)).astype(np.float32)
    saved = fb.conv2d_vjp(g, xq, w, padding=1)  # what the forward pass may keep: 4.5 bits an element
    for a, b in zip(saved, fb.conv2d_vjp(g, x, w, padding=1, track="fp4"), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(fb.ShapeError, match="x .* blocked along axis 1"):
        fb.conv2d(fb.quantize(x, axis=1), w)


def certified(rng, x, w, track, **how):
    """|y - y_bf16| of a certified call, and its certificate."""
    bf16 = how | {"track": "bf16"}
    y, certificate = fb.conv2d(x, w, track=track, certify=True, **how)
    np.testing.assert_allclose(y, fb.conv2d(x, w, track=track, **how), rtol=1e-5, atol=1e-5 * np.abs(y).max())
    return np.linalg.norm(np.float64(y) - fb.conv2d(x, w, **bf16)), certificate


@given(st.data())
def test_certified_bound_holds(data):
    draw, rng = data.draw, np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    kh, kw, stride = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    c, o = draw(st.integers(1, 40)), draw(st.integers(1, 20))
    x, w = make(rng, (draw(st.integers(1, 3)), 5, 4, c), (o, kh, kw, c))
    if draw(st.booleans()):  # same sign, with an outlier: errors add up instead of cancelling
        x, w = np.abs(x), np.abs(w)
        x.flat[rng.integers(x.size)] *= 100
    activation = draw(st.sampled_from([None, "silu"]))
    how = {"stride": stride, "padding": draw(st.integers(0, 1)), "activation": activation}
    if draw(st.booleans()):
        how["bias"] = rng.standard_normal(o).astype(np.float32)
    weight, track = draw(st.sampled_from([(w, "fp4"), (fb.DualWeight(w, rank=3), "dual"), (w, "reference")]))
    distance, certificate = certified(rng, x, weight, track, **how)
    assert distance <= certificate.bound + certificate.accumulation
    assert certificate.rows is None and certificate.confidence == 0.999


@pytest.mark.parametrize("channels", [1, 12])
def test_estimate_holds_with_its_confidence(rng, channels):
    """At 1e-3 a call, more than 4 failures in 300 have probability 2e-5; one output channel, where the
    difference has rank one, is the worst case.
    """
    failures = 0
    for _ in range(300):
        x, w = make(rng, (1, 3, 3, 16), (channels, 2, 2, 16))
        distance, certificate = certified(rng, x, w, "fp4")
        failures += distance > certificate.estimate + certificate.accumulation
    assert failures <= 4


def test_certificate_is_of_use(rng):
    x, w = make(rng, (4, 8, 8, 64), (32, 3, 3, 64))
    distance, certificate = certified(rng, x, w, "fp4", padding=1)
    assert certificate.bound < 20 * distance and certificate.estimate < 2.5 * distance
    assert fb.conv2d(x, w, certify=True)[1].limit == 0
    only = fb.conv2d(x, fb.quantize(w, outer="image"), padding=1, certify="bound")[1]
    assert only.estimate is None and distance <= only.bound + only.accumulation


# ---- gradients ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("track", ["bf16", "fp4"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_gradients_are_straight_through(rng, case, track):
    x_shape, w_shape, stride, padding = case
    x, w = make(rng, x_shape, w_shape)
    shape = ref.conv2d(x, w, stride, padding).shape
    g = rng.standard_normal(shape).astype(np.float32)
    got = fb.conv2d_vjp(g, x, w, stride=stride, padding=padding, track=track)
    want = ref.conv2d_vjp_track(g, x, w, stride, padding, track)
    for a, b, like in zip(got, want, (x, w, np.empty(w_shape[0])), strict=True):
        assert a.shape == like.shape and a.dtype == np.float32
        assert calc_diff(a, b) < 1e-11


@pytest.mark.parametrize("track", ["bf16", "fp4", "reference"])
def test_halves_of_the_gradient(rng, track):
    x, w = make(rng, (2, 7, 7, 16), (8, 3, 3, 16))
    g = rng.standard_normal((2, 4, 4, 8)).astype(np.float32)
    how = {"stride": 2, "padding": 1, "track": track}
    dx, dw, db = fb.conv2d_vjp(g, x, w, **how)
    np.testing.assert_array_equal(dx, conv2d_dgrad(g, w, x.shape, **how))
    np.testing.assert_array_equal(dw, conv2d_wgrad(g, x, (3, 3), **how))
    only = fb.conv2d_vjp(g, x, w, needs=(False, True, False), **how)
    assert only[0] is None and only[2] is None
    np.testing.assert_array_equal(only[1], dw)


def test_adjoint_identities(rng):
    """<g, conv(x, w)> = <dgrad(g, w), x> = <wgrad(g, x), w>: the three are one trilinear form."""
    x, w = make(rng, (3, 8, 6, 7), (5, 3, 2, 7), np.float64)
    how = {"stride": 2, "padding": ((1, 0), (2, 1)), "track": "reference"}
    y = fb.conv2d(x, w, **how)
    g = rng.standard_normal(y.shape)
    want = (g * y).sum()
    assert abs((conv2d_dgrad(g, w, x.shape, **how) * x).sum() - want) < 1e-9 * np.abs(g * y).sum()
    assert abs((conv2d_wgrad(g, x, (3, 2), **how) * w).sum() - want) < 1e-9 * np.abs(g * y).sum()


def test_gradient_of_a_prepared_weight(rng):
    x, w = make(rng, (2, 5, 5, 32), (8, 3, 3, 32))
    g = rng.standard_normal((2, 5, 5, 8)).astype(np.float32)
    prepared = fb.conv2d_vjp(g, x, fb.quantize(w, outer="image"), padding=1)
    for a, b in zip(prepared, fb.conv2d_vjp(g, x, w, padding=1, track="fp4"), strict=True):
        np.testing.assert_array_equal(a, b)


# ---- dual weight -------------------------------------------------------------------------------------------
@pytest.fixture
def dual(rng):
    x, w = make(rng, (4, 6, 6, 40), (24, 3, 3, 40))
    left, right = rng.standard_normal((24, 4)), rng.standard_normal((4, 3 * 3 * 40))
    return x, fb.DualWeight((w + (left @ right).reshape(w.shape)).astype(np.float32), rank=4)


def test_dual_weight_adds_its_branch(rng, dual):
    x, w = dual
    down = np.asarray(w.down, np.float64).T.reshape(4, 3, 3, 40)
    up = np.asarray(w.up, np.float64).T.reshape(24, 1, 1, 4)
    bulk = ref.conv2d(ref.operands(x, x, "fp4")[0], np.asarray(w.twin), 1, 1)
    want = bulk + ref.conv2d(ref.conv2d(np.float64(x.astype(BF16)), down, 1, 1), up)
    y = fb.conv2d(x, w, padding=1)
    sqnr = 10 * np.log10((want**2).sum() / ((y - want) ** 2).sum())
    assert sqnr > 40
    exact = ref.conv2d_track(x, np.asarray(w.master, np.float32), 1, 1, "bf16")
    plain = fb.conv2d(x, np.asarray(w.master, np.float32), padding=1, track="fp4")
    assert np.linalg.norm(y - exact) < 0.75 * np.linalg.norm(plain - exact)  # the branch earns its place


def test_tracks_of_a_dual_weight(rng, dual):
    x, w = dual
    master = np.asarray(w.master, np.float32)
    np.testing.assert_array_equal(fb.conv2d(x, w, padding=1, track="bf16"), fb.conv2d(x, master, padding=1))
    np.testing.assert_array_equal(fb.conv2d(x, w, padding=1, track="fp4"), fb.conv2d(x, w.twin, padding=1))
    with fb.tracks("bf16"):
        np.testing.assert_array_equal(fb.conv2d(x, w, padding=1), fb.conv2d(x, master, padding=1))


@pytest.mark.parametrize("stride", [1, 2])
def test_gradients_of_a_dual_weight(rng, dual, stride):
    x, w = dual
    y = fb.conv2d(x, w, stride=stride, padding=1)
    g = rng.standard_normal(y.shape).astype(np.float32)
    dx, dw, db = fb.conv2d_vjp(g, x, w, stride=stride, padding=1)
    product = (np.asarray(w.down, np.float64) @ np.asarray(w.up, np.float64)).T.reshape(w.shape)
    used = np.asarray(w.twin, np.float64) + product
    g16 = g.astype(BF16).astype(np.float64)
    want = ref.conv2d_dgrad(g16, used, x.shape, stride, 1)
    assert np.linalg.norm(dx - want) < 4e-3 * np.linalg.norm(want)  # g up^T is rounded to BF16
    want = ref.conv2d_wgrad(g16, ref.operands(x, x, "fp4")[0], (3, 3), stride, 1)
    assert dw.shape == w.shape and calc_diff(dw, want) < 1e-11


# ---- PyTorch -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stride,padding", [(1, 1), (2, 1), (1, 0), (2, 0), (3, 2)])
def test_like_pytorch(rng, stride, padding):
    torch = pytest.importorskip("torch")
    x, w = make(rng, (2, 9, 8, 5), (6, 3, 3, 5), np.float64)
    a, b = (torch.tensor(v.transpose(0, 3, 1, 2).copy(), requires_grad=True) for v in (x, w))
    want = torch.nn.functional.conv2d(a, b, stride=stride, padding=padding)
    y = fb.conv2d(x, w, stride=stride, padding=padding, track="reference")
    np.testing.assert_allclose(y, want.detach().numpy().transpose(0, 2, 3, 1), rtol=0, atol=1e-9)
    g = rng.standard_normal(y.shape)
    want.backward(torch.tensor(g.transpose(0, 3, 1, 2).copy()))
    dx, dw, _ = fb.conv2d_vjp(g, x, w, stride=stride, padding=padding, track="reference")
    np.testing.assert_allclose(dx, a.grad.numpy().transpose(0, 2, 3, 1), rtol=0, atol=1e-9)
    np.testing.assert_allclose(dw, b.grad.numpy().transpose(0, 2, 3, 1), rtol=0, atol=1e-9)


def test_pytorch_tensors_in_and_out(rng):
    torch = pytest.importorskip("torch")
    x, w = make(rng, (2, 4, 4, 16), (8, 3, 3, 16), BF16)
    tx, tw = (torch.from_numpy(v.view(np.int16)).view(torch.bfloat16) for v in (x, w))
    out = torch.full((2, 4, 4, 8), float("nan"), dtype=torch.bfloat16)
    for track in ("bf16", "fp4"):
        y = fb.conv2d(tx, tw, padding=1, track=track, out=out)
        assert y is out
        want = fb.conv2d(x, w, padding=1, track=track)
        np.testing.assert_array_equal(out.view(torch.int16).numpy(), want.view(np.int16))
        grads = fb.conv2d_vjp(out, tx, tw, padding=1, track=track)
        assert [g.dtype for g in grads] == [torch.bfloat16] * 3
    with pytest.raises(TypeError, match="x is a numpy array but w is a torch array"):
        fb.conv2d(x, tw, padding=1)
    with pytest.raises(TypeError, match="torch array"):
        fb.conv2d(tx, fb.quantize(w.astype(np.float32), outer="image"), padding=1)


# ---- bad input ---------------------------------------------------------------------------------------------
X, W = np.ones((1, 4, 4, 16), np.float32), np.ones((8, 3, 3, 16), np.float32)


@pytest.mark.parametrize(
    "kind,words,call",
    [
        (fb.ShapeError, ["16 channels", "takes 8"], lambda: fb.conv2d(X, W[..., :8])),
        (fb.ShapeError, ["(4, 4, 16)", "(N, H, W, C)"], lambda: fb.conv2d(X[0], W)),
        (fb.ShapeError, ["(8, 144)", "transpose"], lambda: fb.conv2d(X, W.reshape(8, -1))),
        (fb.ShapeError, ["larger", "(2, 4)"], lambda: fb.conv2d(X[:, :2], W)),
        (fb.ShapeError, ["axis 0", "axis=-1"], lambda: fb.conv2d(X, fb.quantize(W, axis=0))),
        (fb.ShapeError, ["stride", "0"], lambda: fb.conv2d(X, W, stride=0)),
        (fb.ShapeError, ["stride", "(1, 1)"], lambda: fb.conv2d(X, W, stride=(1, 1))),
        (fb.ShapeError, ["padding", "'same'"], lambda: fb.conv2d(X, W, padding="same")),
        (fb.ShapeError, ["padding", "-1"], lambda: fb.conv2d(X, W, padding=-1)),
        (fb.ShapeError, ["bias", "(3,)", "(8,)"], lambda: fb.conv2d(X, W, bias=np.ones(3, np.float32))),
        (fb.ShapeError, ["residual", "(1, 2, 2, 8)"], lambda: fb.conv2d(X, W, residual=X)),
        (fb.DTypeError, ["x", "int64", "astype"], lambda: fb.conv2d(X.astype(np.int64), W)),
        (fb.DTypeError, ["w", "complex64"], lambda: fb.conv2d(X, W.astype(np.complex64))),
        (fb.DTypeError, ["int8"], lambda: fb.conv2d(X, W, dtype="int8")),
        (ValueError, ["'relu'", "gelu"], lambda: fb.conv2d(X, W, activation="relu")),
        (ValueError, ["'fp5'", "fp4"], lambda: fb.conv2d(X, W, track="fp5")),
        (ValueError, ["stream"], lambda: fb.conv2d(X, W, stream=3)),
        (ValueError, ["certify", "'yes'"], lambda: fb.conv2d(X, W, track="fp4", certify="yes")),
        (TypeError, ["dual", "plain array", "DualWeight"], lambda: fb.conv2d(X, W, track="dual")),
        (TypeError, ["dual", "QuantizedArray"], lambda: fb.conv2d(X, fb.quantize(W), track="dual")),
        (fb.ShapeError, ["(16, 8)", "(O, kh, kw, C)"], lambda: fb.conv2d(X, fb.DualWeight(W[:, 0, 0].T))),
        (fb.ShapeError, ["g", "(1, 4, 4, 8)", "(1, 2, 2, 8)"], lambda: fb.conv2d_vjp(X[..., :8], X, W)),
        (fb.ShapeError, ["g"], lambda: conv2d_dgrad(X[..., :8], W, (1, 9, 9, 16))),
        (fb.ShapeError, ["g"], lambda: conv2d_wgrad(X[..., :8], X, (3, 3))),
    ],
)
def test_bad_input_is_told_in_a_sentence(kind, words, call):
    with pytest.raises(kind) as error:
        call()
    for word in words:
        assert word in str(error.value), str(error.value)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # NumPy's own, for inf - inf
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite(rng, value):
    x, w = make(rng, (2, 4, 4, 16), (8, 3, 3, 16))
    x[1, 0, 0, 3] = value
    with pytest.raises(fb.NonFiniteError):
        fb.conv2d(x, w, padding=1, track="fp4")
    y = fb.conv2d(x, w, padding=1)  # the BF16 track carries it to the outputs that see it, and to no other
    assert not np.isfinite(y[1, :2, :2]).any() and np.isfinite(y[0]).all() and np.isfinite(y[1, 2:]).all()
