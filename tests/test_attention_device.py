"""Device front end of attention on an emulated GPU, beside the CPU's results: what is copied and converted,
where results go, every sentence, streams, and that nothing is read back.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from host_cuda import Arrays, FakeArray, host_cuda, put  # noqa: F401  (host_cuda is a fixture)

import fp4bf16 as fb
from fp4bf16.backends import cuda_gemm, cuda_math, cuda_tape
from fp4bf16.python_ref import attention as ref

BF16 = np.dtype(ml_dtypes.bfloat16)
#: (batch, seq_q, seq_k, heads, dim, dim_v): the UNet's two, ragged, cross-attention, unaligned, dim_v below
#: and above dim, one query, one key, empty. Short sequences are many, for `near` is of the whole: of a few
#: numbers one weight that goes to the other side may be all of its limit.
CASES = [
    (2, 256, 256, 1, 256, 256), (3, 16, 16, 1, 64, 64), (2, 37, 50, 3, 40, 40), (4, 3, 77, 6, 16, 16),
    (4, 9, 9, 6, 5, 3), (2, 9, 12, 2, 24, 40), (8, 1, 19, 6, 16, 16), (1, 6, 1, 1, 32, 32),
    (0, 4, 4, 2, 16, 16), (2, 0, 4, 1, 16, 16), (1, 1, 1, 1, 1, 1), (4, 4, 5, 3, 512, 8),
]  # fmt: skip


@pytest.fixture(autouse=True)
def gpu(host_cuda, monkeypatch):  # noqa: F811
    monkeypatch.setitem(cuda_math._KNOWN, "fake", Arrays())
    monkeypatch.setattr(cuda_tape, "_local", type(cuda_tape._local)())
    cuda_gemm._struct.cache_clear()
    return host_cuda


def make(rng, batch, queries, keys, heads, dim, dim_v, dtype=np.float32):
    shapes = (batch, queries, heads, dim), (batch, keys, heads, dim), (batch, keys, heads, dim_v)
    return tuple(rng.standard_normal(s).astype(dtype) for s in shapes)


def number(x) -> np.ndarray:
    return np.asarray(x.array if isinstance(x, FakeArray) else x, np.float64)


def near(got, want, least: float = 0.0, limit: float = 4e-3) -> None:
    """Within BF16: the emulated kernels round the result once (2^-9 of each element at most), and a weight
    beside a tie may go to the other side than the CPU's. `least`: what |want| counts as at least.
    """
    got, want = number(got), number(want)
    assert got.shape == want.shape
    assert np.linalg.norm(got - want) <= limit * max(np.linalg.norm(want), least)


# ---- values ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_result_is_the_cpus(rng, gpu, case, causal):
    arrays = make(rng, *case)
    want = fb.attention(*arrays, causal=causal)
    y = fb.attention(*map(put, arrays), causal=causal)
    assert isinstance(y, FakeArray) and y.dtype == np.float32
    near(y, want)
    assert gpu.fake.moved == 0
    assert gpu.calls["attention"] == int(y.array.size > 0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_the_cpus(rng, gpu, case, causal):
    q, k, v = make(rng, *case)
    g = rng.standard_normal((*q.shape[:3], v.shape[3])).astype(np.float32)
    want = fb.attention_vjp(g, q, k, v, causal=causal)
    exact = ref.attention_vjp(g, q, k, v, "reference", causal)
    got = fb.attention_vjp(*map(put, (g, q, k, v)), causal=causal)
    for a, b, e, like in zip(got, want, exact, (q, k, v), strict=True):
        assert isinstance(a, FakeArray) and a.shape == like.shape and a.dtype == np.float32
        # of one key dq and dk are zero on a GPU and but for rounding on the CPU; what dS loses to BF16 is
        # relative to the gradient that is not rounded
        near(a, b, max(np.linalg.norm(e), 1e-3 * np.linalg.norm(like)), 8e-3)
    assert gpu.fake.moved == 0


@pytest.mark.parametrize("track", ["reference"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_reference_track_is_the_frameworks(rng, gpu, track, dtype):
    for causal in (False, True):
        q, k, v = make(rng, 2, 9, 12, 2, 24, 40, dtype)
        g = rng.standard_normal((2, 9, 2, 40)).astype(dtype)
        limit = 1e-5 if dtype == np.float32 else 1e-13
        y = fb.attention(*map(put, (q, k, v)), track=track, causal=causal)
        assert y.dtype == dtype
        near(y, ref.attention(q, k, v, "reference", causal), limit=limit)
        for a, b in zip(fb.attention_vjp(*map(put, (g, q, k, v)), track=track, causal=causal),
                        ref.attention_vjp(g, q, k, v, "reference", causal), strict=True):  # fmt: skip
            assert a.dtype == dtype
            near(a, b, limit=limit)
    assert not gpu.calls


@pytest.mark.parametrize("dtypes,result", [
    (("float32",) * 3, "float32"), (("bfloat16",) * 3, "bfloat16"), (("float16",) * 3, "float16"),
    (("float64",) * 3, "float64"), (("float32", "bfloat16", "bfloat16"), "float32"),
    (("float16", "bfloat16", "bfloat16"), "float32"), (("bfloat16", "bfloat16", "float64"), "float64"),
])  # fmt: skip
def test_dtypes(rng, dtypes, result):
    made = make(rng, 2, 9, 7, 2, 16, 16)
    arrays = [x.astype(fb.interop.np_dtype(d)) for x, d in zip(made, dtypes, strict=True)]
    want = fb.attention(*arrays, dtype="float64")
    for dtype in (None, "float32", "bfloat16", "float16", "float64"):
        y = fb.attention(*map(put, arrays), dtype=dtype)
        assert str(y.dtype) == (dtype or result)
        near(y, want)
    g = put(rng.standard_normal((2, 9, 2, 16)).astype(np.float32))
    assert [str(x.dtype) for x in fb.attention_vjp(g, *map(put, arrays))] == list(dtypes)


def test_scale(rng):
    q, k, v = make(rng, 1, 9, 12, 2, 16, 16)
    for scale in (0.0, -0.5, 2.0, 1e-3):
        near(fb.attention(put(q), put(k), put(v), scale=scale), fb.attention(q, k, v, scale=scale))


# ---- memory ------------------------------------------------------------------------------------------------
def test_columns_of_one_matrix_are_read_and_written_where_they_lie(rng, gpu):
    """q, k and v of one product (n, tokens, 3 * heads * dim): no copy, no conversion."""
    n, tokens, heads, dim = 3, 16, 2, 32
    both = rng.standard_normal((n, tokens, 3 * heads * dim)).astype(BF16)
    columns = FakeArray(both)
    q, k, v = (FakeArray(columns.array.reshape(n, tokens, 3, heads, dim)[:, :, i]) for i in range(3))
    y = fb.attention(q, k, v)
    assert gpu.fake.made == [((n, tokens, heads, dim), "bfloat16")] and gpu.calls == {"attention": 1}
    near(y, fb.attention(q.array, k.array, v.array))
    g = put(rng.standard_normal(y.shape).astype(BF16))
    made = np.full((n, tokens, 3, heads, dim), np.nan, BF16)
    out = tuple(FakeArray(made[:, :, i]) for i in range(3))
    gpu.fake.made.clear()
    gpu.calls.clear()
    got = fb.attention_vjp(g, q, k, v, out=out)
    assert all(a is b for a, b in zip(got, out, strict=True))
    # the forward pass again, its row sums, the workspace
    assert [shape for shape, _ in gpu.fake.made] == [(n, tokens, heads, dim), (n, heads, tokens), (48,)]
    assert gpu.calls == {"attention": 1, "attention_backward": 1}
    for a, b in zip(got, fb.attention_vjp(g.array, q.array, k.array, v.array), strict=True):
        near(a, b, limit=8e-3)


def test_any_strides(rng):
    """Heads before tokens, steps, negative and zero strides, channels that are not side by side, odd
    addresses."""
    base = rng.standard_normal((4, 6, 10, 48)).astype(np.float32)
    for dtype in (BF16, np.float32, np.float16, np.float64):
        x = base.astype(dtype)
        views = {
            "heads first": x.transpose(0, 2, 1, 3), "steps": x[::2, ::2, ::3], "channels": x[..., ::3],
            "backwards": x[::-1, :, ::-1], "inner": x.transpose(0, 1, 3, 2), "odd": x[:, 1:, :, 1:17],
            "repeated": np.broadcast_to(x[:1], x.shape), "one head": x[:, :, :1], "one image": x[1:2, 1:],
            "one channel": x[..., 5:6],
        }  # fmt: skip
        for name, view in views.items():
            want = fb.attention(view, view, view, dtype="float32")
            y = fb.attention(*(FakeArray(view) for _ in range(3)), dtype="float32")
            near(y, want), name
            for a, b in zip(fb.attention_vjp(*(FakeArray(view) for _ in range(4))),
                            fb.attention_vjp(view, view, view, view), strict=True):  # fmt: skip
                near(a, b, limit=8e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16", "float64"])
def test_out(rng, dtype):
    q, k, v = (put(x) for x in make(rng, 2, 9, 7, 2, 16, 24, BF16))
    want = fb.attention(q.array, k.array, v.array, dtype="float64")
    kind = fb.interop.np_dtype(dtype)
    for shape, index in (((2, 9, 2, 24), ...), ((2, 9, 2, 48), (..., slice(None, None, 2))),
                         ((3, 9, 2, 40), (slice(0, 2), ..., slice(8, 32)))):  # fmt: skip
        held = np.full(shape, np.nan, kind)
        out = FakeArray(held[index])
        assert fb.attention(q, k, v, out=out, dtype=dtype) is out
        near(out, want)
        mask = np.ones(shape, bool)
        mask[index] = False
        assert np.isnan(held[mask].astype(np.float64)).all(), "wrote beside out"


def test_streams(rng, gpu):
    q, k, v = map(put, make(rng, 1, 4, 4, 1, 16, 16))
    for stream in (None, 0, 77):
        gpu.streams.clear()
        fb.attention(q, k, v, stream=stream)
        fb.attention_vjp(q, q, k, v, stream=stream)
        assert set(gpu.streams) == {stream or 0}
        assert gpu.fake.stream == 0


# ---- misuse ------------------------------------------------------------------------------------------------
def test_what_does_not_run_on_a_gpu_is_said(rng):
    q, k, v = map(put, make(rng, 1, 4, 4, 1, 16, 16))
    for track in ("fp4", "dual"):
        with pytest.raises(ValueError, match=f"attention: track is '{track}', but q is on cuda:0.*'bf16'"):
            fb.attention(q, k, v, track=track)
        with pytest.raises(ValueError, match=f"attention_vjp: track is '{track}'"):
            fb.attention_vjp(q, q, k, v, track=track)
    wide = put(rng.standard_normal((1, 3, 1, 520)).astype(np.float32))
    with pytest.raises(fb.ShapeError, match="q has heads of 520 channels, but at most 512.*'reference'"):
        fb.attention(wide, wide, wide)
    with pytest.raises(fb.ShapeError, match="attention_vjp: v has heads of 520 channels"):
        fb.attention_vjp(wide, q[:, :3], k[:, :3], wide)
    want = ref.attention(wide.array, wide.array, wide.array, "reference")
    near(fb.attention(wide, wide, wide, track="reference"), want)


def test_operands_that_do_not_fit(rng):
    q, k, v = make(rng, 2, 9, 7, 2, 16, 24)
    with pytest.raises(fb.ShapeError, match="heads of q .* is 2 but heads of k"):
        fb.attention(put(q), put(k[:, :, :1]), put(v))
    with pytest.raises(fb.ShapeError, match="at least one key"):
        fb.attention(put(q), put(k[:, :0]), put(v[:, :0]))
    with pytest.raises(fb.ShapeError, match=r"\(batch, seq, heads, dim\) is needed"):
        fb.attention(put(q[0]), put(k), put(v))
    with pytest.raises(fb.ShapeError, match="g has shape"):
        fb.attention_vjp(put(q), put(q), put(k), put(v))
    with pytest.raises(TypeError, match="q is a fake array on cuda:0 but k is a numpy array on the host"):
        fb.attention(put(q), k, put(v))
    with pytest.raises(TypeError, match="on cuda:0 but v is a fake array on cuda:1"):
        fb.attention(put(q), put(k), put(v, 1))
    with pytest.raises(fb.DTypeError, match="k: has dtype int32"):
        fb.attention(put(q), put(k.astype(np.int32)), put(v))
    with pytest.raises(TypeError, match="q is a QuantizedArray"):
        fb.attention(fb.quantize(q), put(k), put(v))
    with pytest.raises(ValueError, match="scale is inf"):
        fb.attention(put(q), put(k), put(v), scale=float("inf"))


def test_out_that_does_not_fit(rng):
    q, k, v = map(put, make(rng, 2, 9, 9, 2, 16, 16, BF16))
    with pytest.raises(fb.ShapeError, match="out has shape"):
        fb.attention(q, k, v, out=put(np.empty((2, 9, 2, 8), BF16)))
    with pytest.raises(fb.DTypeError, match="out has dtype float32"):
        fb.attention(q, k, v, out=put(np.empty((2, 9, 2, 16), np.float32)))
    with pytest.raises(ValueError, match="out overlaps k"):
        fb.attention(q, k, v, out=k)
    with pytest.raises(ValueError, match="repeats the same memory"):
        fb.attention(q, k, v, out=FakeArray(np.broadcast_to(np.empty((1, 9, 2, 16), BF16), (2, 9, 2, 16))))
    made = [put(np.empty(x.shape, BF16)) for x in (q, k, v)]
    with pytest.raises(TypeError, match="out is 2 of them, but 3 arrays"):
        fb.attention_vjp(q, q, k, v, out=tuple(made[:2]))
    with pytest.raises(ValueError, match="out: dq and dv overlap in memory"):
        fb.attention_vjp(q, q, k, v, out=(made[0], made[1], made[0]))
    shifted = FakeArray(np.empty((2, 9, 2, 24), BF16))
    with pytest.raises(ValueError, match="out: dq and dk overlap in memory"):
        fb.attention_vjp(q, q, k, v, out=(shifted[..., :16], shifted[..., 8:], None))
