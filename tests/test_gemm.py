"""matmul, linear and their gradients on the CPU: track table, NumPy's shapes, bad input, other frameworks."""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fp4bf16 as fb
from fp4bf16.dispatch import available_backends, backend_for
from fp4bf16.python_ref import gemm as ref

BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPES = [
    (37, 100, 19),
    (1, 64, 33),
    (130, 48, 1),
    (33, 17, 65),
    (0, 32, 8),
    (5, 0, 3),
    (4, 16, 0),
    (96, 320, 128),
]


def calc_diff(x, y):
    x, y = (np.asarray(v, np.float64) for v in (x, y))
    total = (x * x + y * y).sum()
    return 0.0 if total == 0 else 1 - 2 * (x * y).sum() / total


def draw(rng, shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


# ---- values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("track,format", [
    ("bf16", None), ("reference", None), ("fp4", "nvfp4_exact"), ("fp4", "nvfp4"), ("fp4", "mxfp4"), ("fp4",
    "fp8"),
])  # fmt: skip
def test_product_equals_float64_of_what_is_multiplied(rng, shape, track, format):
    m, k, n = shape
    a, b = draw(rng, (m, k)), draw(rng, (k, n))
    out = np.full((m, n), np.nan, np.float32)  # poisoned
    y = fb.matmul(a, b, track=track, format=format, out=out)
    assert y is out
    want = ref.matmul(a, b, track, format, accumulate=np.float64)
    assert calc_diff(y, want) < 1e-10 and np.isfinite(y).all()
    y16 = fb.matmul(a, b, track=track, format=format, dtype="bfloat16")
    assert y16.dtype == BF16 and calc_diff(y16, want) < 1e-5
    assert np.array_equal(y16, y.astype(BF16))


@pytest.mark.parametrize("shape", [(37, 100, 19), (700, 96, 300), (40, 300, 900)])
def test_prepared_operands_give_the_same_bits(rng, shape):
    m, k, n = shape
    a, b = draw(rng, (m, k)), draw(rng, (k, n))
    want = fb.matmul(a, b, track="fp4")
    aq, bq = fb.quantize(a, search="fast"), fb.quantize(b, axis=-2)
    from_linear = fb.quantize(np.ascontiguousarray(b.T)).T  # the PyTorch way round gives the same bytes
    assert np.array_equal(bq.packed, from_linear.packed)
    for got in (
        fb.matmul(a, bq),
        fb.matmul(aq, bq),
        fb.matmul(aq, b),
        fb.matmul(a, from_linear, track="fp4"),
    ):
        assert calc_diff(got, want) < 1e-12
    dequantised = fb.matmul(a, bq, track="bf16")
    assert calc_diff(dequantised, ref.round_bf16(a).astype(np.float64) @ np.asarray(bq, np.float64)) < 1e-10


@pytest.mark.parametrize("track", ["bf16", "fp4", "reference"])
@pytest.mark.parametrize("shapes", [
    ((32,), (32, 7)), ((5, 32), (32,)), ((32,), (32,)), ((2, 3, 5, 32), (32, 7)), ((2, 3, 5, 32), (3, 32, 7)),
    ((32,), (3, 32, 7)), ((2, 5, 32), (1, 32, 7)), ((2, 5, 32), (32,)), ((2, 0, 32), (2, 32, 4)), ((1, 5, 32),
    (4, 32, 3)),
])  # fmt: skip
def test_shapes_are_those_of_np_matmul(rng, shapes, track):
    a, b = (draw(rng, s) for s in shapes)
    y, want = fb.matmul(a, b, track=track), ref.matmul(a, b, track, accumulate=np.float64)
    assert np.shape(y) == np.shape(np.matmul(a, b)) and y.dtype == np.float32
    assert type(y) is type(np.matmul(a, b))
    assert calc_diff(y, want) < 1e-10
    if track == "fp4" and b.ndim > 1:
        assert calc_diff(fb.matmul(a, fb.quantize(b, axis=-2)), want) < 1e-10
        assert calc_diff(fb.matmul(fb.quantize(a, search="fast"), b, track="fp4"), want) < 1e-10


@given(data=st.data())
def test_any_strides(data):
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    m, k, n = (data.draw(st.integers(1, 40)) for _ in range(3))
    steps = [data.draw(st.sampled_from([1, -1, 2, -3])) for _ in range(4)]
    dtype = data.draw(st.sampled_from([np.float32, np.float64, np.float16, BF16]))

    def view(rows, columns, s, t, turned):
        base = draw(
            rng, (columns * abs(t), rows * abs(s)) if turned else (rows * abs(s), columns * abs(t))
        ).astype(dtype)
        return (base.T if turned else base)[::s, ::t]

    a = view(m, k, *steps[:2], data.draw(st.booleans()))
    b = view(k, n, *steps[2:], data.draw(st.booleans()))
    track = data.draw(st.sampled_from(["bf16", "fp4", "reference"]))
    want = ref.matmul(a.astype(np.float64), b.astype(np.float64), track, accumulate=np.float64)
    y = fb.matmul(a, b, track=track, dtype="float64")
    assert a.shape == (m, k) and b.shape == (k, n)
    assert calc_diff(y, want) < 1e-9
    out = np.full((2 * m, 2 * n), 7, np.float64)[1::2, ::2]
    assert np.array_equal(fb.matmul(a, b, track=track, out=out, dtype="float64"), y) and np.array_equal(
        out, y
    )
    assert (out.base[::2] == 7).all()


@pytest.mark.parametrize("dtypes,result", [
    (("float32", "float32"), "float32"), (("bfloat16", "bfloat16"), "bfloat16"), (("float64", "float64"),
    "float64"), (("float16", "float16"), "float16"), (("float32", "bfloat16"), "float32"), (("float16",
    "bfloat16"), "float32"), (("float64", "bfloat16"), "float64"),
])  # fmt: skip
@pytest.mark.parametrize("track", ["bf16", "fp4", "reference"])
def test_result_dtype(rng, dtypes, result, track):
    a, b = (
        draw(rng, s).astype(fb.interop.np_dtype(d)) for s, d in zip(((9, 48), (48, 6)), dtypes, strict=True)
    )
    y = fb.matmul(a, b, track=track)
    assert str(y.dtype) == result
    assert calc_diff(y, ref.matmul(a, b, track, accumulate=np.float64)) < 1e-5


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_read_only_operands(rng, dtype):
    a, b = draw(rng, (40, 64)).astype(dtype), draw(rng, (64, 30)).astype(dtype)
    want = {track: fb.matmul(a, b, track=track) for track in ("bf16", "fp4", "reference")}
    a.flags.writeable = b.flags.writeable = False
    for track, y in want.items():
        assert np.array_equal(fb.matmul(a, b, track=track), y)
    da, db = fb.matmul_vjp(np.broadcast_to(np.float32(1), (40, 30)), a, b)
    assert da.shape == a.shape and db.flags.writeable


def test_reference_track_is_exact_in_float64(rng):
    a, b = rng.standard_normal((7, 40)), rng.standard_normal((40, 5))
    assert np.allclose(fb.matmul(a, b, track="reference"), a @ b, rtol=1e-14, atol=1e-14)
    assert not np.allclose(fb.matmul(a, b, track="bf16"), a @ b, rtol=1e-6)


@pytest.mark.parametrize("track", ["bf16", "fp4", "dual", "reference"])
@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
@pytest.mark.parametrize("shape", [(37, 64, 19), (9, 48, 200)])
def test_epilogue_order(rng, track, activation, shape):
    m, k, n = shape
    a, b, bias, residual = (
        draw(rng, (2, m, k)),
        draw(rng, (k, n)),
        draw(rng, n),
        draw(rng, (2, m, n)).astype(BF16),
    )
    w = fb.DualWeight(b, rank=4) if track == "dual" else b
    plain = fb.matmul(a, w, track=track).astype(np.float64)
    want = ref.epilogue(plain, bias, activation, residual.astype(np.float64))
    y = fb.matmul(a, w, track=track, bias=bias, activation=activation, residual=residual)
    assert np.abs(y - want).max() <= 4e-6 * np.abs(want).max()


def test_activations_in_the_tails():
    x = np.array([[-200.0, -90.0, -12.0, -6.0, -0.0, 0.0, 1e-30, 6.0, 90.0, np.inf, np.nan]], np.float32)
    with np.errstate(all="raise"):
        silu = fb.matmul(x.T, np.ones((1, 1), np.float32), activation="silu", track="reference")[:, 0]
        gelu = fb.matmul(x.T, np.ones((1, 1), np.float32), activation="gelu", track="reference")[:, 0]
    exact = [0 if v < -100 else v / (1 + math.exp(-v)) for v in x[0, :9].tolist()]
    assert np.allclose(silu[:9], exact, rtol=1e-6, atol=1e-36) and np.isnan(silu[10]) and silu[9] == np.inf
    exact = [0.5 * v * math.erfc(-v / math.sqrt(2)) for v in x[0, :9].tolist()]
    assert np.allclose(gelu[:9], exact, rtol=1e-6, atol=1e-38) and np.isnan(gelu[10]) and gelu[9] == np.inf


def test_linear_takes_the_weight_as_pytorch_keeps_it(rng):
    x, weight, bias = draw(rng, (3, 5, 48)), draw(rng, (10, 48)), draw(rng, 10)
    want = fb.matmul(x, weight.T, bias=bias, activation="silu")
    assert np.array_equal(fb.linear(x, weight, bias, activation="silu"), want)
    want = ref.linear(x, weight, bias, track="fp4", accumulate=np.float64)
    assert calc_diff(fb.linear(x, fb.quantize(weight), bias), want) < 1e-10
    assert calc_diff(fb.linear(x, weight, bias, track="fp4"), want) < 1e-10
    assert fb.linear(x, fb.DualWeight(np.ascontiguousarray(weight.T)), bias).shape == (3, 5, 10)


def test_accumulate_is_checked_and_changes_nothing_here(rng):
    a, b = draw(rng, (4, 32)), draw(rng, (32, 3))
    want = fb.matmul(a, b, track="fp4")
    assert np.array_equal(fb.matmul(a, b, track="fp4", accumulate="fast"), want)
    assert np.array_equal(fb.linear(a, b.T, track="fp4", accumulate="fast"), want)
    with pytest.raises(ValueError, match="accumulate: 'promote' is not known; did you mean 'promoted'"):
        fb.matmul(a, b, accumulate="promote")


def test_tracks_override_argument(rng, monkeypatch):
    a, b = draw(rng, (4, 32)), draw(rng, (32, 3))
    fp4, bf16 = fb.matmul(a, b, track="fp4"), fb.matmul(a, b)
    with fb.tracks("fp4"):
        assert np.array_equal(fb.matmul(a, b, track="bf16"), fp4)
    monkeypatch.setenv("FP4BF16_TRACK", "bf16")
    assert np.array_equal(fb.matmul(a, b, track="fp4"), bf16) and not np.array_equal(bf16, fp4)


def test_nan_and_inf(rng):
    a, b = draw(rng, (4, 32)), draw(rng, (32, 3))
    a[2, 5] = np.nan
    y = fb.matmul(a, b)
    assert np.isnan(y[2]).all() and np.isfinite(y[[0, 1, 3]]).all()
    with pytest.raises(fb.NonFiniteError, match="NaN"):
        fb.matmul(a, b, track="fp4")
    with pytest.raises(fb.NonFiniteError, match="NaN"):
        fb.matmul(b.T.copy(), a.T.copy(), track="fp4")
    y = fb.matmul(fb.quantize(a, nan="propagate"), b, track="fp4")
    assert np.isnan(y[2]).all() and np.isfinite(y[[0, 1, 3]]).all()


def test_results_do_not_depend_on_threads(rng, monkeypatch):
    from fp4bf16.backends import threads

    a, b = draw(rng, (513, 200)), draw(rng, (200, 301))
    before = threads.num_threads()
    try:
        threads.set_num_threads(1)
        one = fb.matmul(a, b, track="fp4")
        threads.set_num_threads(3)
        assert calc_diff(one, fb.matmul(a, b, track="fp4")) < 1e-12
    finally:
        threads.set_num_threads(before)


# ---- bad input ---------------------------------------------------------------------------------------------


def test_k_mismatch_names_both():
    a, b = np.zeros((4096, 7168), BF16), np.zeros((7160, 2048), BF16)
    with pytest.raises(fb.ShapeError) as error:
        fb.matmul(a, b)
    assert "matmul: K of a (4096, 7168) is 7168 but K of b (7160, 2048) is 7160" in str(error.value)
    with pytest.raises(
        fb.ShapeError, match=r"K of x \(4, 16\) is 16 but K of weight \(8, 12\) is 12.*weight.T"
    ):
        fb.linear(np.zeros((4, 16)), np.zeros((8, 12)))
    with pytest.raises(fb.ShapeError, match=r"leading axes of a .* are \(2,\) but those of b .* are \(3,\)"):
        fb.matmul(np.zeros((2, 4, 16)), np.zeros((3, 16, 4)))
    with pytest.raises(fb.ShapeError, match=r"weight has shape \(12,\), but two axes \(N, K\) are needed"):
        fb.linear([[1.0] * 12], np.zeros(12))
    with pytest.raises(fb.ShapeError, match="at least one axis"):
        fb.matmul(np.float32(2), np.zeros((16, 4)))


def test_wrong_axis_says_which_to_pass(rng):
    a, b = draw(rng, (16, 32)), draw(rng, (32, 16))
    right = r"b \(32, 16\) is blocked along axis 1, but a right operand .* second last axis, 0; pass axis=-2"
    for wrong in (fb.quantize(b), fb.quantize(np.ascontiguousarray(b.T), axis=-2).T):
        with pytest.raises(fb.ShapeError, match=right):
            fb.matmul(a, wrong)
    left = r"a \(16, 32\) is blocked along axis 0, but a left operand .* last axis, 1; pass axis=-1"
    for wrong in (fb.quantize(a, axis=0), fb.quantize(np.ascontiguousarray(a.T)).T):
        with pytest.raises(fb.ShapeError, match=left):
            fb.matmul(wrong, b, track="fp4")
    with pytest.raises(fb.ShapeError, match=r"weight \(16, 32\) is blocked along axis 0.*pass axis=-1"):
        fb.linear(a, fb.quantize(a, axis=0))
    assert fb.matmul(fb.quantize(a, axis=0), b, track="bf16").shape == (16, 16)  # decoded: any axis will do


def test_wrong_dtype_and_names(rng):
    a, b = draw(rng, (4, 32)), draw(rng, (32, 3))
    with pytest.raises(fb.DTypeError, match="a: has dtype int64"):
        fb.matmul(np.ones((4, 32), np.int64), b)
    with pytest.raises(fb.DTypeError, match="dtype is int32"):
        fb.matmul(a, b, dtype="int32")
    with pytest.raises(fb.DTypeError, match="out has dtype float64"):
        fb.matmul(a, b, out=np.empty((4, 3)))
    with pytest.raises(ValueError, match="'fp5' is not a track; did you mean 'fp4'"):
        fb.matmul(a, b, track="fp5")
    with pytest.raises(ValueError, match="'gelo' is not an activation; did you mean 'gelu'"):
        fb.matmul(a, b, activation="gelo")
    with pytest.raises(ValueError, match="stream=None"):
        fb.matmul(a, b, stream=0)
    with pytest.raises(TypeError, match="track is 'dual' but b is a plain array.*DualWeight"):
        fb.matmul(a, b, track="dual")
    with pytest.raises(TypeError, match="track is 'dual' but b is a QuantizedArray.*DualWeight"):
        fb.matmul(a, fb.quantize(b, axis=-2), track="dual")
    with pytest.raises(TypeError, match="linear: unexpected argument 'activaton'; did you mean 'activation'"):
        fb.linear(a, b.T, activaton="silu")
    with pytest.raises(TypeError, match="convert it with"):
        fb.matmul(object(), b)


def test_bias_residual_and_out_are_checked(rng):
    a, b = draw(rng, (4, 32)), draw(rng, (32, 3))
    with pytest.raises(fb.ShapeError, match=r"bias has shape \(4,\) but must be \(3,\)"):
        fb.matmul(a, b, bias=np.zeros(4, np.float32))
    with pytest.raises(fb.ShapeError, match=r"residual has shape \(3,\) but must be \(4, 3\)"):
        fb.matmul(a, b, residual=np.zeros(3, np.float32))
    with pytest.raises(fb.ShapeError, match=r"out has shape \(3, 4\) but the result has shape \(4, 3\)"):
        fb.matmul(a, b, out=np.empty((3, 4), np.float32))
    locked = np.empty((4, 3), np.float32)
    locked.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        fb.matmul(a, b, out=locked)
    square = draw(rng, (32, 32))
    for args in ((square, square.copy()), (square.copy(), square)):
        with pytest.raises(ValueError, match="overlaps an input"):
            fb.matmul(*args, out=square)
    with pytest.raises(ValueError, match="overlaps an input"):
        fb.matmul(square.copy(), square.copy(), residual=square, out=square)
    q = fb.quantize(square, axis=-2)
    with pytest.raises(ValueError, match="overlaps an input"):
        fb.matmul(np.ones((1, 32), np.float32), q, out=q.outer_scale.reshape(1, 32))


# ---- PyTorch -----------------------------------------------------------------------------------------------


def test_torch_in_torch_out_zero_copy(rng):
    torch = pytest.importorskip("torch")
    a = torch.from_numpy(draw(rng, (6, 48))).to(torch.bfloat16)
    b = torch.from_numpy(draw(rng, (48, 5))).to(torch.bfloat16)
    y = fb.matmul(a, b)
    assert isinstance(y, torch.Tensor) and y.dtype == torch.bfloat16
    want = (a.float() @ b.float()).to(torch.bfloat16)
    assert torch.allclose(y.float(), want.float(), rtol=2**-7, atol=1e-6)
    out = torch.full((6, 5), float("nan"), dtype=torch.bfloat16)
    pointer = out.data_ptr()
    assert fb.matmul(a, b, out=out) is out and out.data_ptr() == pointer and torch.equal(out, y)
    q = fb.quantize(b, axis=-2)
    assert isinstance(fb.matmul(a, q), torch.Tensor)
    w = fb.DualWeight(b, rank=2)
    assert w.master is b and isinstance(w.down, torch.Tensor) and w.up.dtype == torch.bfloat16
    assert isinstance(fb.matmul(a, w, bias=b[0]), torch.Tensor)
    x = torch.ones(3, 48, requires_grad=True)
    assert not fb.matmul(x, b).requires_grad
    da, db = fb.matmul_vjp(torch.ones(6, 5, dtype=torch.bfloat16), a, b)
    assert isinstance(da, torch.Tensor) and db.shape == b.shape and db.dtype == torch.bfloat16


def test_mixed_frameworks_are_named(rng):
    torch = pytest.importorskip("torch")
    a, b = draw(rng, (4, 32)), torch.ones(32, 3)
    with pytest.raises(TypeError, match="a is a numpy array but b is a torch array"):
        fb.matmul(a, b)
    with pytest.raises(TypeError, match="a is a numpy array but b is a torch array"):
        fb.matmul(a, fb.quantize(b, axis=-2))
    with pytest.raises(TypeError, match="a is a torch array but bias is a numpy array"):
        fb.matmul(torch.ones(4, 32), b, bias=np.zeros(3, np.float32))
    with pytest.raises(TypeError, match="out is a torch array"):
        fb.matmul(a, draw(rng, (32, 3)), out=torch.empty(4, 3))
    with pytest.raises(TypeError, match="g is a torch array but a is a numpy array"):
        fb.matmul_vjp(torch.ones(4, 3), a, draw(rng, (32, 3)))


# ---- gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shapes", [
    ((5, 32), (32, 7)), ((32,), (32, 7)), ((5, 32), (32,)), ((32,), (32,)), ((2, 3, 5, 32), (32, 7)),
    ((2, 3, 5, 32), (3, 32, 7)), ((32,), (3, 32, 7)), ((2, 5, 32), (1, 32, 7)), ((1, 5, 32), (4, 32, 7)), ((0,
    32), (32, 7)), ((3, 0), (0, 4)), ((2, 5, 32), (32,)),
])  # fmt: skip
def test_reference_gradients_equal_finite_differences(rng, shapes):
    a, b, va, vb = (rng.standard_normal(s) for s in shapes * 2)
    g = rng.standard_normal(np.shape(a @ b))
    da, db = fb.matmul_vjp(g, a, b, track="reference")
    assert da.shape == a.shape and db.shape == b.shape and da.dtype == np.float64
    h = 1e-5
    numeric = (np.sum((a + h * va) @ (b + h * vb) * g) - np.sum((a - h * va) @ (b - h * vb) * g)) / (2 * h)
    assert abs(numeric - (np.sum(da * va) + np.sum(db * vb))) < 1e-7 * (1 + abs(numeric))


@pytest.mark.parametrize("track", ["bf16", "fp4"])
@pytest.mark.parametrize("shape", [(37, 100, 19), (1, 64, 33), (300, 48, 70), (0, 32, 8), (40, 64, 300)])
def test_gradients_equal_the_reference(rng, track, shape):
    m, k, n = shape
    a, b, g = draw(rng, (m, k)), draw(rng, (k, n)), draw(rng, (m, n))
    want = ref.matmul_vjp(g, a, b, track, accumulate=np.float64)
    for got, exact in zip(fb.matmul_vjp(g, a, b, track=track), want, strict=True):
        assert calc_diff(got, exact) < 1e-10
    if track == "fp4":
        aq, bq = fb.quantize(a, search="fast"), fb.quantize(b, axis=-2)
        for got, exact in zip(fb.matmul_vjp(g, aq, bq), want, strict=True):
            assert calc_diff(got, exact) < 1e-10
        da, db = fb.matmul_vjp(g, a, b, track="fp4", save="bf16", backward="master")
        plain = ref.matmul_vjp(g, a, b, "bf16", accumulate=np.float64)
        assert calc_diff(da, plain[0]) < 1e-10 and calc_diff(db, plain[1]) < 1e-10


@pytest.mark.parametrize("track", ["bf16", "fp4", "reference"])
def test_linear_gradients(rng, track):
    x, weight, g = draw(rng, (3, 20, 48)), draw(rng, (10, 48)), draw(rng, (3, 20, 10))
    want = ref.linear_vjp(g, x, weight, track=track, accumulate=np.float64)
    got = fb.linear_vjp(g, x, weight, track=track)
    assert [v.shape for v in got] == [(3, 20, 48), (10, 48), (10,)]
    for one, exact in zip(got, want, strict=True):
        assert calc_diff(one, exact) < 1e-9
    if track == "fp4":
        assert calc_diff(fb.linear_vjp(g, x, fb.quantize(weight))[0], want[0]) < 1e-10


def test_gradient_arguments_are_checked(rng):
    a, b, g = draw(rng, (4, 32)), draw(rng, (32, 3)), draw(rng, (4, 3))
    with pytest.raises(
        fb.ShapeError, match=r"g has shape \(3, 4\) but the product of a .* has shape \(4, 3\)"
    ):
        fb.matmul_vjp(g.T, a, b)
    with pytest.raises(ValueError, match="save: 'fp8' is not known"):
        fb.matmul_vjp(g, a, b, save="fp8")
    with pytest.raises(TypeError, match="backward is 'master' but b is a QuantizedArray"):
        fb.matmul_vjp(g, a, fb.quantize(b, axis=-2), backward="master")
    with pytest.raises(TypeError, match="save is 'bf16' but a is a QuantizedArray"):
        fb.matmul_vjp(g, fb.quantize(a), b, track="fp4", save="bf16")
    with pytest.raises(TypeError, match="a gradient is a plain float array"):
        fb.matmul_vjp(fb.quantize(g), a, b)


# ---- the table of backends ---------------------------------------------------------------------------------


def test_every_kernel_of_the_table_exists():
    assert available_backends()[0] == "cpu"
    kernels = backend_for()
    for name in dir(kernels):
        assert getattr(kernels, name) is not None
    with pytest.raises(AttributeError, match="no function 'gemv'"):
        _ = kernels.gemv


@pytest.mark.parametrize("m,most", [(64, 14), (2048, 40)])
def test_no_float32_copy_of_a_prepared_weight_is_kept(m, most):
    """In a process of its own: after the call, memory is back where it was but for panels of a few MiB, one a
    thread.
    """
    code = (
        "import gc, tracemalloc, numpy as np, fp4bf16 as fb\n"
        "w = fb.quantize(np.random.default_rng(0).standard_normal((2048, 2048), np.float32), axis=-2)\n"
        f"x = fb.quantize(np.ones(({m}, 2048), np.float32))\n"
        "small = fb.quantize(np.ones((16, 16), np.float32), axis=-2)\n"
        "fb.matmul(np.ones((2, 16), np.float32), small)\n"
        "tracemalloc.start()\n"
        "y = fb.matmul(x, w)\n"
        "kept, peak = tracemalloc.get_traced_memory()\n"
        "print(kept - y.nbytes, peak - y.nbytes)"
    )
    two = {**os.environ, "FP4BF16_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=two)
    kept, peak = map(int, done.stdout.split())
    assert kept < 9 << 20, "a copy of the 16 MiB that the weight has in float32 outlives the call"
    assert peak < most << 20, "more than one operand was decoded at once"


def test_a_refused_call_is_tried_once_and_has_no_other_error_before_it(monkeypatch):
    torch = pytest.importorskip("torch")
    gemm, tries = importlib.import_module("fp4bf16.gemm"), []
    product = gemm._matmul
    monkeypatch.setattr(gemm, "_matmul", lambda *args: tries.append(1) or product(*args))
    for call in (
        lambda: fb.matmul(torch.ones(4, 32), torch.ones(31, 3)),
        lambda: fb.linear(torch.ones(4, 32), torch.ones(3, 31)),
        lambda: fb.matmul([[1.0, 2.0]], [[1.0]]),
    ):
        tries.clear()
        with pytest.raises(fb.ShapeError) as refused:
            call()
        assert len(tries) <= 1 and refused.value.__context__ is None
