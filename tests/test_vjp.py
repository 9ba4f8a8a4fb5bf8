"""Every public gradient: against finite differences in float64, and against the straight-through formulas.

A gradient in direction d of L = sum(g * f(x)) is compared with the central difference (L(x + h d) - L(x - h
d)) / 2h at two steps, from which Richardson's rule removes the h^2 term: what is left is about 1e-10
relative.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import fp4bf16 as fb
from fp4bf16.conv import conv2d_dgrad, conv2d_wgrad
from fp4bf16.python_ref import attention as ref_attention
from fp4bf16.python_ref import conv as ref_conv
from fp4bf16.python_ref import gemm as ref_gemm
from fp4bf16.python_ref import norm as ref_norm

LIMIT = 1e-7
EXACT = {"track": "reference"}


def derivative(f, g, inputs: list, index: int, direction) -> float:
    """d/dt sum(g * f(..., inputs[index] + t direction, ...)) at t = 0."""

    def loss(t: float) -> float:
        moved = list(inputs)
        moved[index] = inputs[index] + t * direction
        return float((g * f(*moved)).sum())

    def central(h: float) -> float:
        return (loss(h) - loss(-h)) / (2 * h)

    h = 1e-3
    return (4 * central(h / 2) - central(h)) / 3


def check(rng, f, vjp, inputs: list) -> None:
    """Each gradient of `vjp(g, *inputs)` has the derivatives of f along six random directions and one axis.
    """
    y = f(*inputs)
    g = rng.standard_normal(np.shape(y))
    gradients = vjp(g, *inputs)
    assert len(gradients) == len(inputs)
    for i, (gradient, x) in enumerate(zip(gradients, inputs, strict=True)):
        assert gradient.shape == x.shape and gradient.dtype == np.float64
        axis = np.zeros(x.shape)
        axis.flat[rng.integers(x.size)] = 1
        for d in [axis, *(rng.standard_normal(x.shape) for _ in range(6))]:
            got, want = float((gradient * d).sum()), derivative(f, g, inputs, i, d)
            scale = np.linalg.norm(gradient) * np.linalg.norm(d) / np.sqrt(x.size) + 1e-6
            assert abs(got - want) <= LIMIT * max(scale, abs(want)), (i, got, want)


def normal(rng, *shapes) -> list:
    return [rng.standard_normal(s) for s in shapes]


# ---- finite differences ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "a,b",
    [
        ((5, 7), (7, 3)),
        ((1, 4), (4, 1)),
        ((2, 3, 5), (5, 4)),
        ((2, 1, 3, 5), (4, 5, 2)),
        ((6,), (6, 2)),
        ((3, 6), (6,)),
    ],
)
def test_matmul(rng, a, b):
    check(rng, lambda x, y: fb.matmul(x, y, **EXACT), lambda g, x, y: fb.matmul_vjp(g, x, y, **EXACT),
          normal(rng, a, b))  # fmt: skip


@pytest.mark.parametrize("x,w", [((5, 7), (3, 7)), ((2, 3, 4), (6, 4)), ((1, 1), (1, 1))])
def test_linear(rng, x, w):
    def vjp(g, x, w, b):
        return fb.linear_vjp(g, x, w, **EXACT)

    check(rng, lambda x, w, b: fb.linear(x, w, b, **EXACT), vjp, normal(rng, x, w, w[:1]))


CONVS = [
    ((2, 5, 6, 3), (4, 3, 3, 3), {"padding": 1}),
    ((2, 6, 5, 3), (2, 3, 3, 3), {"stride": 2, "padding": 1}),
    ((1, 6, 6, 2), (3, 3, 3, 2), {"stride": 2, "padding": ((0, 1), (0, 1))}),
    ((2, 4, 3, 5), (4, 1, 1, 5), {}),
    ((1, 5, 5, 2), (2, 2, 2, 2), {"padding": ((1, 0), (2, 1))}),
    ((1, 7, 8, 2), (2, 5, 4, 2), {"stride": 3, "padding": ((3, 0), (0, 4))}),
]


@pytest.mark.parametrize("x,w,how", CONVS)
def test_conv2d(rng, x, w, how):
    how = how | EXACT

    def vjp(g, x, w, b):
        return fb.conv2d_vjp(g, x, w, **how)

    check(rng, lambda x, w, b: fb.conv2d(x, w, bias=b, **how), vjp, normal(rng, x, w, w[:1]))


@pytest.mark.parametrize("x,w,how", CONVS)
def test_gradients_of_the_gradients_of_conv2d(rng, x, w, how):
    """dgrad and wgrad are linear in both operands; their gradients are conv2d, wgrad and dgrad again."""
    how, size = how | EXACT, w[1:3]
    g = rng.standard_normal(fb.conv2d(*normal(rng, x, w), **how).shape)

    def dgrad_vjp(u, g, w):
        return fb.conv2d(u, w, **how), conv2d_wgrad(g, u, size, **how)

    def wgrad_vjp(u, g, x):
        return fb.conv2d(x, u, **how), conv2d_dgrad(g, u, x.shape, **how)

    check(rng, lambda g, w: conv2d_dgrad(g, w, x, **how), dgrad_vjp, [g, *normal(rng, w)])
    check(rng, lambda g, x: conv2d_wgrad(g, x, size, **how), wgrad_vjp, [g, *normal(rng, x)])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 1.3])
@pytest.mark.parametrize(
    "q,k,v", [((2, 5, 2, 4),) * 3, ((1, 3, 1, 4), (1, 6, 1, 4), (1, 6, 1, 2)), ((2, 1, 1, 3),) * 3]
)
def test_attention(rng, q, k, v, causal, scale):
    how = {"causal": causal, "scale": scale} | EXACT
    inputs = normal(rng, q, k, v)
    check(rng, lambda *x: fb.attention(*x, **how), lambda *x: fb.attention_vjp(*x, **how), inputs)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("shape,groups", [((2, 3, 4, 6), 3), ((1, 2, 2, 4), 4), ((3, 5, 8), 1)])
def test_group_norm(rng, shape, groups, activation):
    def forward(x, gamma, beta):
        return ref_norm.group_norm(x, groups, gamma, beta, 1e-2, activation)

    def vjp(g, x, gamma, beta):
        return ref_norm.group_norm_vjp(g, x, groups, gamma, beta, 1e-2, activation)

    check(rng, forward, vjp, normal(rng, shape, shape[-1:], shape[-1:]))


def test_group_norm_is_that_of_pytorch(rng):
    torch = pytest.importorskip("torch")
    x, gamma, beta = normal(rng, (2, 5, 4, 12), (12,), (12,))
    leaves = [torch.tensor(a, requires_grad=True) for a in (x.transpose(0, 3, 1, 2).copy(), gamma, beta)]
    want = torch.nn.functional.silu(torch.nn.functional.group_norm(leaves[0], 4, *leaves[1:], eps=1e-6))
    y = ref_norm.group_norm(x, 4, gamma, beta, 1e-6, "silu")
    np.testing.assert_allclose(y, want.detach().numpy().transpose(0, 2, 3, 1), rtol=0, atol=1e-12)
    g = rng.standard_normal(y.shape)
    want.backward(torch.tensor(g.transpose(0, 3, 1, 2).copy()))
    dx, *rest = ref_norm.group_norm_vjp(g, x, 4, gamma, beta, 1e-6, "silu")
    np.testing.assert_allclose(dx, leaves[0].grad.numpy().transpose(0, 2, 3, 1), rtol=0, atol=1e-11)
    for a, leaf in zip(rest, leaves[1:], strict=True):
        np.testing.assert_allclose(a, leaf.grad.numpy(), rtol=0, atol=1e-11)


def test_the_check_sees_a_wrong_gradient(rng):
    """A gradient that is wrong by one part in a hundred thousand fails, so that passing means something."""
    inputs = normal(rng, (4, 6), (6, 3))

    def off(g, x, y):
        da, db = fb.matmul_vjp(g, x, y, **EXACT)
        return da * (1 + 1e-5), db

    with pytest.raises(AssertionError):
        check(rng, lambda x, y: fb.matmul(x, y, **EXACT), off, inputs)


# ---- straight through --------------------------------------------------------------------------------------
def close(got, want, limit: float = 2e-6) -> None:
    """Equal up to the order of FP32 sums."""
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert np.linalg.norm(a - b) <= limit * np.linalg.norm(b), np.linalg.norm(a - b) / np.linalg.norm(b)


def single(rng, *shapes) -> list:
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


@pytest.mark.parametrize("track", ["bf16", "fp4"])
def test_low_precision_matmul(rng, track):
    a, b, g = single(rng, (3, 9, 40), (40, 13), (3, 9, 13))
    want = ref_gemm.matmul_vjp(g, a, b, track=track, accumulate=np.float64)
    close(fb.matmul_vjp(g, a, b, track=track), want)


@pytest.mark.parametrize("track", ["bf16", "fp4"])
def test_low_precision_linear(rng, track):
    x, w, g = single(rng, (11, 40), (13, 40), (11, 13))
    want = ref_gemm.linear_vjp(g, x, w, track=track, accumulate=np.float64)
    close(fb.linear_vjp(g, x, w, track=track), want)


@pytest.mark.parametrize("track", ["bf16", "fp4"])
@pytest.mark.parametrize("stride", [1, 2])
def test_low_precision_conv2d(rng, track, stride):
    x, w = single(rng, (2, 6, 6, 20), (5, 3, 3, 20))
    g = rng.standard_normal(ref_conv.conv2d(x, w, stride, 1).shape).astype(np.float32)
    close(fb.conv2d_vjp(g, x, w, stride=stride, padding=1, track=track),
          ref_conv.conv2d_vjp_track(g, x, w, stride, 1, track))  # fmt: skip


@pytest.mark.parametrize("track", ["bf16", "fp4", "dual"])
def test_low_precision_attention(rng, track):
    q, k, v, g = single(rng, *[(2, 20, 2, 32)] * 4)
    # A weight on a rounding edge may fall to the other side: one step of BF16 or E4M3 of a few weights
    close(fb.attention_vjp(g, q, k, v, track=track), ref_attention.attention_vjp(g, q, k, v, track), 3e-3)


def test_no_gradient_is_masked(rng):
    """Identity straight through: elements beyond the largest code of their block keep their gradient."""
    a, b = single(rng, (4, 32), (32, 8))
    a[0, 0], a[1, :16] = 1e6, 1e-6
    da, _ = fb.matmul_vjp(np.ones((4, 8), np.float32), a, b, track="fp4")
    used = np.asarray(fb.quantize(b, axis=0)).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_allclose(da, np.broadcast_to(used.sum(1), da.shape), rtol=1e-5, atol=1e-5)


# ---- what is kept for the backward pass, out, stream -------------------------------------------------------
def test_conv2d_may_keep_the_bf16_operands(rng):
    """save="bf16" changes dw alone, backward="master" dx alone; also under an override of the track."""
    x, w = single(rng, (2, 5, 5, 32), (8, 3, 3, 32))
    g = rng.standard_normal((2, 5, 5, 8)).astype(np.float32)
    fp4, bf16 = (fb.conv2d_vjp(g, x, w, padding=1, track=t) for t in ("fp4", "bf16"))
    with fb.tracks("fp4"):
        dx, dw, _ = fb.conv2d_vjp(g, x, w, padding=1, save="bf16")
    assert np.array_equal(dx, fp4[0]) and np.array_equal(dw, bf16[1]) and not np.array_equal(dw, fp4[1])
    dx, dw, _ = fb.conv2d_vjp(g, x, w, padding=1, track="fp4", backward="master")
    assert np.array_equal(dx, bf16[0]) and np.array_equal(dw, fp4[1])
    dual = fb.DualWeight(w, rank=4)
    dx, dw, _ = fb.conv2d_vjp(g, x, dual, padding=1, save="bf16", backward="master")
    assert np.array_equal(dx, fb.conv2d_vjp(g, x, np.float32(dual.master), padding=1)[0])
    assert np.array_equal(dw, bf16[1])
    with pytest.raises(ValueError, match="conv2d_vjp: save: 'fp8' is not known"):
        fb.conv2d_vjp(g, x, w, padding=1, save="fp8")
    with pytest.raises(TypeError, match="backward is 'master' but w is a QuantizedArray"):
        fb.conv2d_vjp(g, x, fb.quantize(w, outer="image"), padding=1, backward="master")


def _vjps(rng):
    """(function, arguments) of every gradient."""
    a, b, g = single(rng, (9, 32), (32, 7), (9, 7))
    yield fb.matmul_vjp, (g, a, b)
    yield fb.matmul_vjp, single(rng, (2, 4, 7), (2, 4, 32), (2, 32, 7))
    yield fb.linear_vjp, (g, a, np.ascontiguousarray(b.T))
    yield fb.conv2d_vjp, single(rng, (1, 3, 3, 4), (1, 5, 5, 16), (4, 3, 3, 16))
    yield fb.attention_vjp, single(rng, *[(1, 6, 2, 16)] * 4)


@pytest.mark.parametrize("track", ["bf16", "fp4"])
def test_gradients_are_written_where_one_asks(rng, track):
    for function, arguments in _vjps(rng):
        want = function(*arguments, track=track)
        out = [np.full(w.shape, np.nan, w.dtype) for w in want]
        strided = [np.full((*w.shape[:-1], 2 * w.shape[-1]), np.nan, w.dtype)[..., ::-2] for w in want]
        for given in (tuple(out), strided, (None, *out[1:])):
            got = function(*arguments, track=track, out=given)
            for array, asked, expected in zip(got, given, want, strict=True):
                assert asked is None or array is asked
                np.testing.assert_array_equal(array, expected)


def test_out_of_a_gradient_is_checked(rng):
    for function, arguments in _vjps(rng):
        want = function(*arguments)
        with pytest.raises(TypeError, match=rf"out is 1 of them, but {len(want)} arrays \(d\w+, "):
            function(*arguments, out=(None,))
        with pytest.raises(TypeError, match="out is a ndarray, but"):
            function(*arguments, out=want[0])
        with pytest.raises(fb.ShapeError, match="out has shape"):
            function(*arguments, out=(want[0][:-1] if len(want[0]) > 1 else want[0][0], *want[1:]))
        with pytest.raises(ValueError, match="overlaps an input"):
            function(*arguments, out=(arguments[1], *want[1:]))
        with pytest.raises(ValueError, match="overlap in memory"):
            function(*arguments, out=(want[0], want[0], *want[2:]))
        with pytest.raises(ValueError, match="stream is 5"):
            function(*arguments, stream=5)


def test_out_of_a_convolution_is_checked_by_name_before_any_is_written(rng):
    g, x, w = single(rng, (1, 3, 3, 4), (1, 5, 5, 16), (4, 3, 3, 16))
    good = [np.full(a.shape, 7, np.float32) for a in (x, w, w[:, 0, 0, 0])]
    for i, name in enumerate(("dx", "dw", "dbias")):
        bad = list(good)
        bad[i] = np.full((2, *good[i].shape), 7, np.float32)
        with pytest.raises(fb.ShapeError, match=f"conv2d_vjp: {name}: out has shape"):
            fb.conv2d_vjp(g, x, w, out=tuple(bad))
        bad[i] = good[i].astype(np.float64)
        with pytest.raises(fb.DTypeError, match=f"conv2d_vjp: {name}: out has dtype float64 but the result"):
            fb.conv2d_vjp(g, x, w, out=tuple(bad))
        assert all((a == 7).all() for a in good)
    needs = (True, True, False)
    assert fb.conv2d_vjp(g, x, w, needs=needs, out=(*good[:2], np.zeros(9)))[2] is None
