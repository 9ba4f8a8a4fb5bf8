"""attention and its gradient against the NumPy reference, PyTorch, its invariants, and bad input."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fp4bf16 as fb
from fp4bf16.python_ref import attention as ref

BF16 = ml_dtypes.bfloat16
TRACKS = ["reference", "bf16", "fp4", "dual"]
#: (batch, seq_q, seq_k, heads, dim, dim_v): the tiny UNet's, ragged, one query, unaligned, one key, empty,
#: several blocks of queries with their own mean and several tasks a head
CASES = [
    (3, 16, 16, 1, 64, 64),
    (2, 37, 50, 3, 40, 24),
    (1, 1, 19, 2, 16, 16),
    (2, 9, 9, 2, 5, 3),
    (1, 6, 1, 1, 32, 32),
    (0, 4, 4, 2, 16, 16),
    (2, 0, 4, 1, 16, 16),
    (1, 300, 1100, 2, 64, 32),
]


def make(rng, batch, queries, keys, heads, dim, dim_v, dtype=np.float32):
    """q and k with a mean of their own, as a network's are, so that smoothing matters."""
    q = rng.standard_normal((batch, queries, heads, dim)) + rng.standard_normal((1, 1, heads, dim))
    k = rng.standard_normal((batch, keys, heads, dim)) + 2 * rng.standard_normal((1, 1, heads, dim))
    return q.astype(dtype), k.astype(dtype), rng.standard_normal((batch, keys, heads, dim_v)).astype(dtype)


def error(y, want) -> float:
    """|y - want| / |want|."""
    y, want = np.asarray(y, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(y - want) / (np.linalg.norm(want) or 1.0))


def cosine(y, want) -> float:
    y, want = np.asarray(y, np.float64), np.asarray(want, np.float64)
    return float((y * want).sum() / np.sqrt((y * y).sum() * (want * want).sum()))


# ---- against the reference ---------------------------------------------------------------------------------
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("track", TRACKS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(rng, case, track, causal):
    q, k, v = make(rng, *case)
    want = ref.attention(q, k, v, track, causal)
    out = np.full(want.shape, np.nan, np.float32)
    assert fb.attention(q, k, v, track=track, causal=causal, out=out) is out
    # A weight that lies on a rounding edge may fall to the other side: one step of one weight
    assert error(out, want) < (2e-6 if track == "reference" else 2e-3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("track", TRACKS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(rng, case, track, causal):
    q, k, v = make(rng, *case)
    g = rng.standard_normal((*q.shape[:3], v.shape[3])).astype(np.float32)
    got = fb.attention_vjp(g, q, k, v, track=track, causal=causal)
    want = ref.attention_vjp(g, q, k, v, track, causal)
    exact = ref.attention_vjp(g, q, k, v, "reference", causal)
    for a, b, scale, like in zip(got, want, exact, (q, k, v), strict=True):
        assert a.shape == like.shape and a.dtype == np.float32
        size = np.linalg.norm(scale) or 1.0  # of one key, dq and dk are zero but for rounding
        assert np.linalg.norm(a - b) < (5e-6 if track == "reference" else 3e-3) * max(size, np.linalg.norm(b))


@given(st.data())
def test_float64_is_the_reference(data):
    size = st.integers(1, 12)
    case = [data.draw(st.integers(1, 2)), *(data.draw(size) for _ in range(2)), data.draw(st.integers(1, 3)),
            *(data.draw(size) for _ in range(2))]  # fmt: skip
    causal, scale = data.draw(st.booleans()), data.draw(st.sampled_from([None, 0.0, -0.5, 2.0]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    q, k, v = make(rng, *case, dtype=np.float64)
    y = fb.attention(q, k, v, track="reference", causal=causal, scale=scale)
    assert y.dtype == np.float64
    np.testing.assert_allclose(y, ref.attention(q, k, v, "reference", causal, scale), rtol=0, atol=1e-12)
    g = rng.standard_normal(y.shape)
    got = fb.attention_vjp(g, q, k, v, track="reference", causal=causal, scale=scale)
    for a, b in zip(got, ref.attention_vjp(g, q, k, v, "reference", causal, scale), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("causal", [False, True])
def test_bf16_is_as_good_as_numpy_in_bf16(rng, causal):
    """At most twice the error of the same steps taken in ml_dtypes' bfloat16 by NumPy."""
    q, k, v = make(rng, 2, 128, 128, 2, 64, 64)
    want = ref.attention(q, k, v, "reference", causal)
    low = [ref.heads_first(x.astype(BF16)) for x in (q, k, v)]
    s = (low[0].astype(np.float32) @ np.swapaxes(low[1], 2, 3).astype(np.float32)) * np.float32(0.125)
    s = np.where(np.tri(128, dtype=bool), s, -np.inf) if causal else s
    p = np.exp(s - s.max(-1, keepdims=True))
    p = (p / p.sum(-1, keepdims=True)).astype(BF16).astype(np.float32)
    numpy_bf16 = ref.heads_first((p @ low[2].astype(np.float32)).astype(BF16))
    y = fb.attention(*(x.astype(BF16) for x in (q, k, v)), causal=causal)
    assert y.dtype == BF16
    assert error(y, want) <= 2 * error(numpy_bf16, want)


# ---- invariants --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("track", TRACKS)
@pytest.mark.parametrize("keys", [1, 16, 77, 256, 1000])
def test_uniform_scores_average(rng, track, keys):
    """Equal keys and v = 1 give 1: the weights of a row sum to one after their rounding."""
    q = rng.standard_normal((1, 5, 2, 32)).astype(np.float32)
    k = np.broadcast_to(rng.standard_normal((1, 1, 2, 32)).astype(np.float32), (1, keys, 2, 32))
    y = fb.attention(q, k, np.ones((1, keys, 2, 8), np.float32), track=track)
    np.testing.assert_allclose(y, 1, rtol=0, atol=1e-5)


@pytest.mark.parametrize("track", TRACKS)
def test_constant_values_come_back(rng, track):
    """With v = 1 the result is 1 whatever the scores are."""
    q, k, _ = make(rng, 2, 40, 130, 2, 48, 1)
    y = fb.attention(4 * q, k, np.ones((2, 130, 2, 4), np.float32), track=track)
    np.testing.assert_allclose(y, 1, rtol=0, atol=1e-5)


@pytest.mark.parametrize("format", ["nvfp4_exact", "nvfp4", "mxfp4", "fp8"])
@pytest.mark.parametrize("track", ["fp4", "dual"])
def test_low_precision_points_the_same_way(rng, track, format):
    """And is the reference's: a weight beside a tie of E4M3 may go to the other side, which is far less than
    what BF16 alone would do; weights that are not rounded, or otherwise, would be far more."""
    q, k, v = (rng.standard_normal((2, 256, 2, 64)).astype(np.float32) for _ in range(3))
    y, want = fb.attention(q, k, v, track=track, format=format), fb.attention(q, k, v, track="reference")
    assert cosine(y, want) >= 0.94
    bf16 = error(fb.attention(q, k, v, track="bf16"), want)
    assert error(y, ref.attention(q, k, v, track, fmt=format)) < 2 * bf16


def test_smoothing_and_outlier_channels_earn_their_place(rng):
    """A common mean costs the FP4 track nothing; a hot channel does, and the dual track takes it out."""
    q, k, v = (rng.standard_normal((2, 256, 2, 64)).astype(np.float32) for _ in range(3))
    plain = error(fb.attention(q, k, v, track="fp4"), fb.attention(q, k, v, track="reference"))
    shift = 8 * rng.standard_normal((1, 1, 2, 64)).astype(np.float32)
    far = fb.attention(q, k + shift, v, track="reference")
    assert error(fb.attention(q, k + shift, v, track="fp4"), far) < 1.05 * plain
    q[..., 5] *= 6
    k[..., 5] *= 6
    want = fb.attention(q, k, v, track="reference")
    fp4, dual = (error(fb.attention(q, k, v, track=t), want) for t in ("fp4", "dual"))
    assert dual < 0.7 * fp4
    none = fb.attention(q, k, v, track="dual", outliers=0)
    np.testing.assert_array_equal(none, fb.attention(q, k, v, track="fp4"))


@pytest.mark.parametrize("track", TRACKS)
def test_causal_sees_no_future(rng, track):
    q, k, v = make(rng, 1, 200, 200, 1, 32, 16)
    first = fb.attention(q, k, v, track=track, causal=True)
    v[:, 100:] = 100.0  # one outer scale a head: the FP4 codes of earlier tokens move, but hardly
    k[:, 100:] -= k[:, 100:].mean(1, keepdims=True) - k[:, :100].mean(1, keepdims=True)
    second = fb.attention(q, k, v, track=track, causal=True)
    close = 1e-6 if track == "reference" else 1e-2 if track == "bf16" else 0.5
    assert error(second[:, :100], first[:, :100]) < close
    assert error(second[:, 100:], first[:, 100:]) > 1


def test_heads_are_independent(rng):
    q, k, v = make(rng, 2, 40, 40, 3, 32, 32)
    for track in TRACKS:
        whole = fb.attention(q, k, v, track=track)
        for h in range(3):
            one = fb.attention(*(x[:, :, h : h + 1] for x in (q, k, v)), track=track)
            np.testing.assert_allclose(whole[:, :, h : h + 1], one, rtol=1e-5, atol=1e-5)


# ---- frameworks, views, out --------------------------------------------------------------------------------
@pytest.mark.parametrize("causal", [False, True])
def test_like_pytorch(rng, causal):
    torch = pytest.importorskip("torch")
    q, k, v = make(rng, 2, 33, 33, 2, 16, 8, dtype=np.float64)
    tensors = [torch.tensor(x.swapaxes(1, 2).copy(), requires_grad=True) for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal)
    y = fb.attention(q, k, v, track="reference", causal=causal)
    np.testing.assert_allclose(y, want.detach().numpy().swapaxes(1, 2), rtol=0, atol=1e-12)
    g = rng.standard_normal(y.shape)
    want.backward(torch.tensor(g.swapaxes(1, 2).copy()))
    for a, t in zip(fb.attention_vjp(g, q, k, v, track="reference", causal=causal), tensors, strict=True):
        np.testing.assert_allclose(a, t.grad.numpy().swapaxes(1, 2), rtol=0, atol=1e-11)


def test_pytorch_tensors_in_and_out(rng):
    torch = pytest.importorskip("torch")
    arrays = make(rng, 2, 16, 16, 2, 32, 32, dtype=BF16)
    tensors = [torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) for x in arrays]
    for track in ("bf16", "fp4", "dual"):
        y = fb.attention(*tensors, track=track)
        assert y.dtype == torch.bfloat16
        want = fb.attention(*arrays, track=track)
        np.testing.assert_array_equal(y.view(torch.int16).numpy(), want.view(np.int16))
        assert [x.dtype for x in fb.attention_vjp(y, *tensors, track=track)] == [torch.bfloat16] * 3
    with pytest.raises(TypeError, match="q is a torch array but k is a numpy array"):
        fb.attention(tensors[0], *arrays[1:])


@pytest.mark.parametrize("track", TRACKS)
def test_views(rng, track):
    q, k, v = make(rng, 2, 24, 24, 4, 32, 32)
    views = q[:, ::-1, ::2, ::2], k[:, ::2, 1::2, ::2], v[:, ::2, ::2, ::-1]
    y = fb.attention(*views, track=track)
    np.testing.assert_array_equal(y, fb.attention(*(x.copy() for x in views), track=track))


def test_out(rng):
    q, k, v = make(rng, 2, 8, 8, 2, 16, 16)
    want = fb.attention(q, k, v)
    out = np.empty((2, 8, 2, 32), np.float32)[..., ::2]
    assert fb.attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, want)
    frozen = np.empty_like(want)
    frozen.flags.writeable = False
    for kind, word, bad in (
        (ValueError, "read-only", frozen),
        (ValueError, "overlaps", q),
        (ValueError, "overlaps", v[::-1]),
        (fb.ShapeError, r"\(2, 8, 2, 15\)", np.empty((2, 8, 2, 15), np.float32)),
        (fb.DTypeError, "float64", np.empty(want.shape)),
    ):
        with pytest.raises(kind, match=word):
            fb.attention(q, k, v, out=bad)


def test_the_same_call_gives_the_same_bits(rng):
    q, k, v = make(rng, 4, 64, 64, 2, 32, 32)
    g = rng.standard_normal(q.shape).astype(np.float32)
    for track in TRACKS:
        first = fb.attention(q, k, v, track=track), *fb.attention_vjp(g, q, k, v, track=track)
        again = fb.attention(q, k, v, track=track), *fb.attention_vjp(g, q, k, v, track=track)
        for a, b in zip(first, again, strict=True):
            np.testing.assert_array_equal(a, b)


# ---- bad input ---------------------------------------------------------------------------------------------
Q = np.ones((2, 4, 2, 16), np.float32)


@pytest.mark.parametrize(
    "kind,words,call",
    [
        (fb.ShapeError, ["q", "(4, 2, 16)", "(batch, seq"], lambda: fb.attention(Q[0], Q, Q)),
        (fb.ShapeError, ["batch of q", "is 2", "is 1"], lambda: fb.attention(Q, Q[:1], Q)),
        (fb.ShapeError, ["heads of q", "is 2", "is 1"], lambda: fb.attention(Q, Q, Q[:, :, :1])),
        (fb.ShapeError, ["dim of q", "is 16", "is 8"], lambda: fb.attention(Q, Q[..., :8], Q)),
        (fb.ShapeError, ["seq of k", "is 4", "is 3"], lambda: fb.attention(Q, Q, Q[:, :3])),
        (fb.ShapeError, ["at least one key"], lambda: fb.attention(Q, Q[:, :0], Q[:, :0])),
        (fb.ShapeError, ["g", "(2, 3, 2, 16)"], lambda: fb.attention_vjp(Q[:, :3], Q, Q, Q)),
        (fb.DTypeError, ["k", "int32"], lambda: fb.attention(Q, Q.astype(np.int32), Q)),
        (fb.DTypeError, ["int8"], lambda: fb.attention(Q, Q, Q, dtype="int8")),
        (TypeError, ["k", "QuantizedArray"], lambda: fb.attention(Q, fb.quantize(Q), Q)),
        (TypeError, ["v", "set"], lambda: fb.attention(Q, Q, {1})),
        (ValueError, ["scale", "inf"], lambda: fb.attention(Q, Q, Q, scale=float("inf"))),
        (ValueError, ["outliers", "-1"], lambda: fb.attention(Q, Q, Q, track="dual", outliers=-1)),
        (ValueError, ["'fp8'", "not a track"], lambda: fb.attention(Q, Q, Q, track="fp8")),
        (ValueError, ["'nvfp5'", "nvfp4"], lambda: fb.attention(Q, Q, Q, track="fp4", format="nvfp5")),
        (ValueError, ["stream"], lambda: fb.attention(Q, Q, Q, stream=1)),
    ],
)
def test_bad_input_is_told_in_a_sentence(kind, words, call):
    with pytest.raises(kind) as raised:
        call()
    for word in words:
        assert word in str(raised.value), str(raised.value)


@pytest.mark.parametrize("track", ["bf16", "fp4", "dual"])
def test_non_finite(rng, track):
    q, k, v = make(rng, 2, 8, 8, 1, 16, 16)
    v[1, 3, 0, 2] = np.nan
    if track == "bf16":
        y = fb.attention(q, k, v)
        assert np.isnan(y[1, :, :, 2]).all() and np.isfinite(y[0]).all()
    else:
        with pytest.raises(fb.NonFiniteError):
            fb.attention(q, k, v, track=track)
