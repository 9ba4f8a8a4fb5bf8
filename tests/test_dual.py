"""DualWeight and the dual product: branch, twin, outliers, refresh, accuracy, gradients."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import fp4bf16 as fb
from fp4bf16.dual import low_rank
from fp4bf16.gemm import branch_vjp
from fp4bf16.python_ref import gemm as ref

BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPES = [
    (37, 100, 19, 8),
    (1, 64, 33, 4),
    (200, 320, 96, 32),
    (5, 16, 300, 64),
    (0, 32, 8, 4),
    (33, 48, 20, 0),
]


def sqnr(y, want):
    """Signal over error power, dB."""
    y, want = np.asarray(y, np.float64), np.asarray(want, np.float64)
    error = np.square(y - want).sum()
    return np.inf if error == 0 else 10 * np.log10(np.square(want).sum() / error)


def calc_diff(x, y):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    total = (x * x + y * y).sum()
    return 0.0 if total == 0 else 1 - 2 * (x * y).sum() / total


def beside_ties(x, down):
    """What an element of bf16(x @ down) may move by where the sum is so near a tie of BF16 that FP32, whose
    sums are off by a share of all terms' sizes, may round it to the other side; 0 elsewhere."""
    x, down = ref.round_bf16(x).astype(np.float64), down.astype(np.float64)
    exact, off = x @ down, 2e-6 * (np.abs(x) @ np.abs(down))
    return np.abs(ref.round_bf16(exact + off).astype(np.float64) - ref.round_bf16(exact - off))


def weight(rng, k, n):
    """A weight with a few strong directions, as trained ones have."""
    strong = rng.standard_normal((k, 4)) @ rng.standard_normal((4, n))
    return (rng.standard_normal((k, n)) + strong).astype(np.float32)


def parts(w):
    return (np.asarray(m, np.float32) for m in (w.down, w.up, fb.dequantize(w.twin)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("format", ["nvfp4_exact", "nvfp4", "mxfp4", "fp8"])
def test_dual_product_is_the_unfused_one(rng, shape, format):
    """alpha (A4 @ B4) + (X @ D) @ U + bias over 40 dB from float64 of the same operands."""
    m, k, n, rank = shape
    x, bias = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal(n).astype(np.float32)
    w = fb.DualWeight(weight(rng, k, n), rank=rank, format=format)
    down, up, twin = (v.astype(np.float64) for v in parts(w))
    x4 = ref.fake_quantize(x, format, search="fast").astype(np.float64)
    unfused = x4 @ twin + (ref.round_bf16(x).astype(np.float64) @ down) @ up + bias
    y = fb.matmul(x, w, bias=bias)
    assert y.shape == (m, n) and sqnr(y, unfused) > 40
    same_rounding = ref.dual_matmul(x, *parts(w), fmt=format, accumulate=np.float64, bias=bias)
    moved, sums = beside_ties(x, down), np.abs(x4) @ np.abs(twin) + np.abs(bias)
    sums += np.abs(ref.round_bf16(x).astype(np.float64) @ down) @ np.abs(up)
    assert (np.abs(y - same_rounding) <= moved @ np.abs(up) + 2e-6 * sums).all()
    assert sqnr(fb.matmul(x, w, bias=bias, dtype="bfloat16"), unfused) > 40


def test_the_branch_earns_its_place(rng):
    x, dense = rng.standard_normal((64, 256)).astype(np.float32), weight(rng, 256, 128)
    exact = ref.round_bf16(x).astype(np.float64) @ ref.round_bf16(dense)
    errors = [100 - sqnr(fb.matmul(x, fb.DualWeight(dense, rank=r)), exact) for r in (0, 4, 32)]
    assert errors[0] > errors[1] + 4 and errors[1] > errors[2]
    assert abs(errors[0] - (100 - sqnr(fb.matmul(x, dense, track="fp4"), exact))) < 0.5


def test_tracks_of_a_dual_weight(rng):
    x, dense = rng.standard_normal((9, 64)).astype(np.float32), weight(rng, 64, 24)
    w = fb.DualWeight(dense, rank=6)
    assert np.array_equal(fb.matmul(x, w, track="bf16"), fb.matmul(x, dense, track="bf16"))
    assert np.array_equal(fb.matmul(x, w, track="fp4"), fb.matmul(x, w.twin))
    master = np.asarray(w.master, np.float32)
    assert np.array_equal(fb.matmul(x, w, track="reference"), fb.matmul(x, master, track="reference"))
    assert np.array_equal(fb.matmul(x, w), fb.matmul(x, w, track="dual"))
    assert np.array_equal(fb.linear(x, w), fb.matmul(x, w))
    xq = fb.quantize(x, search="fast")
    used = fb.dequantize(xq)
    want = ref.dual_matmul(used, *parts(w), accumulate=np.float64)
    assert calc_diff(fb.matmul(xq, w), want) < 1e-3  # the branch sees the decoded input
    with pytest.raises(TypeError, match="a is a DualWeight, but it can only be the right operand"):
        fb.matmul(w, x.T)


def test_outlier_rows_stay_in_bf16(rng):
    x, dense = rng.standard_normal((32, 96)).astype(np.float32), weight(rng, 96, 40)
    x[:, [3, 50]] *= 100
    exact = ref.round_bf16(x).astype(np.float64) @ ref.round_bf16(dense)
    with_outliers = fb.DualWeight(dense, rank=8, outliers=[50, 3, 3])
    assert with_outliers.outlier_index.tolist() == [3, 50]
    assert (
        not fb.dequantize(with_outliers.twin)[[3, 50]].any()
        and not np.asarray(with_outliers.down)[[3, 50]].any()
    )
    gain = sqnr(fb.matmul(x, with_outliers), exact) - sqnr(fb.matmul(x, fb.DualWeight(dense, rank=8)), exact)
    assert gain > 10
    dense[7] *= 50
    assert fb.DualWeight(dense, outliers=1).outlier_index.tolist() == [7]
    with pytest.raises(TypeError, match="outlier rows needs a as a plain array"):
        fb.matmul(fb.quantize(x), with_outliers)
    with pytest.raises(fb.ShapeError, match=r"outliers holds row 96, but w \(96, 40\) has rows 0 to 95"):
        fb.DualWeight(dense, outliers=[96])
    with pytest.raises(fb.ShapeError, match="outliers is 97, but w"):
        fb.DualWeight(dense, outliers=97)


def test_refresh_follows_the_master(rng):
    dense, new = weight(rng, 64, 24), weight(rng, 64, 24)
    master = dense.astype(BF16)
    w = fb.DualWeight(master, rank=6)
    assert w.master is master
    before, norms = fb.matmul(np.eye(64, dtype=np.float32), w), w.norms()
    master[...] = new.astype(BF16)
    assert np.array_equal(fb.matmul(np.eye(64, dtype=np.float32), w), before)  # not before it is asked for
    assert w.refresh() is w
    fresh = fb.DualWeight(new, rank=6)
    for one, other in ((w.down, fresh.down), (w.up, fresh.up), (w.twin.packed, fresh.twin.packed)):
        assert np.array_equal(one, other)
    assert w.norms() != norms and w.norms() == fresh.norms()
    w.refresh(dense)
    assert np.array_equal(master, dense.astype(BF16))
    with pytest.raises(fb.ShapeError, match=r"w has shape \(24, 64\) but the master has shape \(64, 24\)"):
        w.refresh(dense.T)
    twin = w.twin
    with pytest.raises(fb.NonFiniteError, match="1536 of the 1536 elements"):
        w.refresh(np.full_like(dense, np.inf))
    assert np.array_equal(master, dense.astype(BF16)) and w.twin is twin  # a refused weight changes nothing
    master.flags.writeable = False
    with pytest.raises(ValueError, match="master is read-only, but w goes into it"):
        w.refresh(new)
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="w is a torch array but master is a numpy array"):
        w.refresh(torch.from_numpy(new))


def test_refresh_may_keep_the_factors(rng):
    """The twin is made anew from what the old factors leave; outlier rows follow the master."""
    dense = weight(rng, 64, 24)
    w = fb.DualWeight(dense, rank=6, outliers=[5])
    down, up = np.array(w.down), np.array(w.up)
    new = dense + 0.1 * rng.standard_normal(dense.shape).astype(np.float32)
    w.refresh(new, factors=False)
    assert np.array_equal(w.down, down) and np.array_equal(w.up, up)
    left = new.astype(BF16).astype(np.float32) - down.astype(np.float32) @ up.astype(np.float32)
    left[5] = 0
    assert np.array_equal(w.twin.packed, fb.quantize(left, axis=0).packed)
    x = rng.standard_normal((8, 64)).astype(np.float32)
    assert sqnr(fb.matmul(x, w), ref.round_bf16(x).astype(np.float64) @ ref.round_bf16(new)) > 15


def test_branch_is_the_best_rank_r_approximation(rng):
    w = weight(rng, 60, 45)
    s = np.linalg.svd(w.astype(np.float64), compute_uv=False)
    for rank in (0, 1, 7, 45):
        down, up = low_rank(w, rank)
        left = np.linalg.norm(w - down.astype(np.float64) @ up)
        assert np.isclose(left, np.sqrt((s[rank:] ** 2).sum()), rtol=1e-4, atol=1e-4)


def test_randomised_svd_above_1024(rng):
    w = weight(rng, 1100, 160)
    down, up = low_rank(w, 8)
    s = np.linalg.svd(w.astype(np.float64), compute_uv=False)
    left = np.linalg.norm(w - down.astype(np.float64) @ up)
    assert left < 1.01 * np.sqrt((s[8:] ** 2).sum())
    again = low_rank(w, 8)
    assert np.array_equal(down, again[0]) and np.array_equal(up, again[1])


def test_description_and_bad_input(rng):
    w = fb.DualWeight(weight(rng, 64, 32), rank=4)
    assert (
        repr(w) == f"DualWeight(shape (64, 32), rank 4, nvfp4_exact twin, 0 outlier rows, {w.nbytes} bytes)"
    )
    assert w.nbytes == 2 * 64 * 32 + w.twin.nbytes + 2 * 4 * (64 + 32)
    assert w.shape == (64, 32) and w.ndim == 2 and w.dtype == "bfloat16" and w.twin.axis == 0
    assert fb.DualWeight(weight(rng, 16, 8)).rank == 8  # cut to what there is
    with pytest.raises(fb.ShapeError, match=r"w has shape \(64,\), but two axes"):
        fb.DualWeight(np.ones(64, np.float32))
    with pytest.raises(ValueError, match="rank is -1"):
        fb.DualWeight(np.ones((16, 16), np.float32), rank=-1)
    with pytest.raises(fb.DTypeError, match="w: has dtype int64"):
        fb.DualWeight(np.ones((16, 16), np.int64))
    broken = weight(rng, 16, 16)
    broken[3, 4] = np.nan
    with pytest.raises(fb.NonFiniteError, match="1 of the 256 elements"):
        fb.DualWeight(broken)
    with pytest.raises(fb.ShapeError, match=r"K of a \(2, 32\) is 32 but K of b \(64, 32\) is 64"):
        fb.matmul(np.ones((2, 32), np.float32), w)


def test_convolution_weight_keeps_four_axes(rng):
    dense = weight(rng, 12, 9 * 20).reshape(12, 3, 3, 20)
    w = fb.DualWeight(dense, rank=5)
    assert w.shape == (12, 3, 3, 20) and w.down.shape == (180, 5) and w.up.shape == (5, 12)
    assert w.twin.shape == w.shape and w.twin.axis == 3 and w.twin.outer_scale.shape == (12, 1, 1, 1)
    rebuilt = fb.dequantize(w.twin).reshape(12, -1).T + np.asarray(w.down, np.float32) @ np.asarray(
        w.up, np.float32
    )
    plain = fb.dequantize(fb.quantize(dense, axis=-1, outer="image")).reshape(12, -1).T
    target = dense.reshape(12, -1).T
    assert np.linalg.norm(rebuilt - target) < 0.9 * np.linalg.norm(plain - target)
    with pytest.raises(fb.ShapeError, match="b: is a DualWeight of a convolution.*call conv2d"):
        fb.matmul(np.ones((2, 180), np.float32), w)
    with pytest.raises(fb.ShapeError, match="convolution's weight .* has no outlier rows"):
        fb.DualWeight(dense, outliers=1)


# ---- gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(37, 100, 19, 8), (60, 64, 80, 4), (5, 32, 6, 0)])
@pytest.mark.parametrize("save", ["fp4", "bf16"])
def test_gradients_equal_the_reference(rng, shape, save):
    m, k, n, rank = shape
    x, g = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((m, n)).astype(np.float32)
    w = fb.DualWeight(weight(rng, k, n), rank=rank)
    want = ref.dual_matmul_vjp(g, x, *parts(w), save=save, accumulate=np.float64)
    dx, dw = fb.matmul_vjp(g, x, w, save=save)
    ddown, dup = branch_vjp(g, x, w, save=save)
    for got, exact in zip((dx, dw, ddown, dup), want, strict=True):
        # a hidden number whose FP32 sum lies on the other side of a tie of BF16 makes 3e-8
        assert got.shape == exact.shape and calc_diff(got, exact) < 1e-6
    master = fb.matmul_vjp(g, x, w, backward="master")[0]
    assert calc_diff(master, ref.round_bf16(g).astype(np.float64) @ np.asarray(w.master, np.float64).T) < 1e-9
    dx2, dw2, db = fb.linear_vjp(g, x, w, save=save)
    assert np.array_equal(dx, dx2) and np.array_equal(dw, dw2) and db.shape == (n,)


def test_gradient_with_outliers_reaches_every_row(rng):
    x, g = rng.standard_normal((40, 64)).astype(np.float32), rng.standard_normal((40, 24)).astype(np.float32)
    x[:, 9] *= 30
    w = fb.DualWeight(weight(rng, 64, 24), rank=4, outliers=[9, 20])
    dx, dw = fb.matmul_vjp(g, x, w)
    exact_x = g.astype(np.float64) @ np.asarray(w.master, np.float64).T
    exact_w = x.astype(np.float64).T @ g
    assert sqnr(dx, exact_x) > 15 and sqnr(dw, exact_w) > 15
    assert sqnr(dx[:, [9, 20]], exact_x[:, [9, 20]]) > 40 and sqnr(dw[[9, 20]], exact_w[[9, 20]]) > 40
    ddown, _ = branch_vjp(g, x, w)
    assert not ddown[[9, 20]].any() and ddown[:9].any()
