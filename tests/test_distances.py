"""Fréchet and kernel distance: closed forms, slow direct sums, unbiasedness, standard errors, memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from fp4bf16.errors import NonFiniteError, ShapeError
from fp4bf16.train import distances
from fp4bf16.train.distances import (
    FeatureSet,
    Gaussian,
    KernelTable,
    block_sums,
    frechet,
    frechet_at_infinity,
    frechet_distance,
    frechet_note,
    kernel_distance,
)


def covariance(rng, d: int) -> np.ndarray:
    a = rng.normal(size=(d, d + 2))
    return a @ a.T / d


# ---- Fréchet
@pytest.mark.parametrize("d", [1, 2, 7, 40])
def test_frechet_is_the_closed_form(d, rng):
    a, b = covariance(rng, d), covariance(rng, d)
    mu, nu = rng.normal(size=(2, d))
    # By the eigenvalues of the product itself, which is not symmetric: another way than the module's.
    shared = np.sqrt(np.maximum(np.linalg.eigvals(a @ b).real, 0)).sum()
    expected = ((mu - nu) ** 2).sum() + np.trace(a) + np.trace(b) - 2 * shared
    assert frechet(Gaussian(mu, a, 9), Gaussian(nu, b, 9)) == pytest.approx(expected, rel=1e-9)


def test_frechet_of_commuting_covariances(rng):
    s, t = rng.uniform(0.1, 3, (2, 5))
    turn = np.linalg.qr(rng.normal(size=(5, 5)))[0]
    a, b = (turn * s**2) @ turn.T, (turn * t**2) @ turn.T
    assert frechet(Gaussian(np.zeros(5), a, 9), Gaussian(np.zeros(5), b, 9)) == pytest.approx(
        ((s - t) ** 2).sum()
    )


def test_frechet_of_sets(rng):
    x, y = rng.normal(size=(60, 5)), rng.normal(size=(45, 5)) * 2 + 1
    turn = np.linalg.qr(rng.normal(size=(5, 5)))[0]
    distance = frechet_distance(x, y)
    assert frechet_distance(y, x) == pytest.approx(distance, rel=1e-9)
    assert frechet_distance(3 * x @ turn + 1, 3 * y @ turn + 1) == pytest.approx(9 * distance, rel=1e-9)
    assert 0 <= frechet_distance(x, x) < 1e-9
    known = Gaussian(x.mean(0), np.cov(x.T), 60)
    assert frechet(known, Gaussian.of(y)) == pytest.approx(distance, rel=1e-9)


@pytest.mark.parametrize("n, d", [(2, 9), (9, 9), (10, 9)])
def test_frechet_of_fewer_pictures_than_dimensions(n, d, rng):
    x, y = rng.normal(size=(n, d)), rng.normal(size=(300, d))
    a, b = np.cov(x.T), np.cov(y.T)
    shared = np.sqrt(np.maximum(np.linalg.eigvals(a @ b).real, 0)).sum()
    expected = ((x.mean(0) - y.mean(0)) ** 2).sum() + np.trace(a) + np.trace(b) - 2 * shared
    # A rank that is lacking leaves eigenvalues of 1e-16, whose roots of 1e-8 are all that the ways differ by.
    assert frechet_distance(x, y) == pytest.approx(expected, abs=1e-5)
    assert ("singular" in frechet_note(n, 300, d)) == (n <= d)


def test_moments_are_those_of_float64_in_any_chunk(rng):
    x = (rng.normal(size=(101, 4)) + 1e4).astype(np.float32)  # whose float32 sums would lose 3 digits
    whole = Gaussian.of(x)
    assert np.allclose(whole.mean, x.astype(np.float64).mean(0), rtol=1e-14)
    assert np.allclose(whole.covariance, np.cov(x.astype(np.float64).T), rtol=1e-9)
    parts = Gaussian.of(x, chunk=7)
    assert np.allclose(parts.covariance, whole.covariance, rtol=1e-12) and whole.n == 101


def test_extrapolation_takes_the_bias_out(rng):
    d = 12
    truth = Gaussian(np.zeros(d), np.eye(d), 10**9)
    found = []
    for _ in range(8):
        x = rng.normal(size=(1500, d))
        found.append((frechet(Gaussian.of(x), truth), frechet_at_infinity(x, truth)))
    biased, corrected = np.array(found).T  # both should be 0
    assert biased.mean() > 0.02 and abs(corrected.mean()) < biased.mean() / 2.5


def test_extrapolation_is_of_one_scale_and_seed(rng):
    truth = Gaussian(np.full(3, 2.0), np.eye(3), 9)
    x = rng.normal(size=(400, 3))
    assert frechet_at_infinity(x, truth) == pytest.approx(12, rel=0.15)  # (2^2) 3
    assert frechet_at_infinity(x, truth, seed=3) == frechet_at_infinity(x, truth, seed=3)
    assert frechet_at_infinity(x, truth, seed=3) != frechet_at_infinity(x, truth, seed=4)
    assert frechet_at_infinity(x[:23], truth) is None


# ---- kernel
def slow(x: np.ndarray, y: np.ndarray, twins: bool = False) -> float:
    """Unbiased squared MMD, one pair at a time; without the pairs (x_i, y_i) where they are twins."""
    d = x.shape[1]

    def mean(a, b, skip):
        pairs = [(sum(float(p) * float(q) for p, q in zip(u, v, strict=True)) / d + 1) ** 3
                 for i, u in enumerate(a) for j, v in enumerate(b) if not (skip and i == j)]  # fmt: skip
        return sum(pairs) / len(pairs)

    return mean(x, x, True) + mean(y, y, True) - 2 * mean(x, y, twins)


@pytest.mark.parametrize("n, m, d", [(2, 2, 1), (2, 3, 5), (17, 9, 4), (61, 40, 3)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_kernel_distance_is_the_direct_sum(n, m, d, dtype, rng):
    x, y = rng.normal(size=(n, d)).astype(dtype), (rng.normal(size=(m, d)) + 0.3).astype(dtype)
    found = kernel_distance(x, y)
    assert found.value == pytest.approx(slow(x, y), rel=1e-9, abs=1e-9)
    assert (found.n, found.m) == (n, m) and found.error >= 0
    assert found.low <= found.value <= found.high
    assert kernel_distance(y, x).value == pytest.approx(found.value, rel=1e-9, abs=1e-9)


def test_twins_are_no_pair(rng):
    x = rng.normal(size=(30, 4))
    y = x + 0.1 * rng.normal(size=x.shape)
    table = KernelTable({"x": FeatureSet(x, "s"), "y": FeatureSet(y, "s"), "z": FeatureSet(y, "t")})
    assert table.distance("x", "y").value == pytest.approx(slow(x, y, twins=True), rel=1e-9, abs=1e-12)
    assert table.distance("x", "z").value == pytest.approx(slow(x, y), rel=1e-9, abs=1e-12)


def test_pictures_left_out_keep_the_pairing(rng):
    x, y = rng.normal(size=(2, 30, 4))
    kept_x, kept_y = np.delete(np.arange(30), [3, 17]), np.delete(np.arange(30), [0, 17, 29])
    a, b = FeatureSet(x[kept_x], "s", kept_x, 30), FeatureSet(y[kept_y], "s", kept_y, 30)
    sums, counts = block_sums(a, b, 7)
    kernel = (x @ y.T / 4 + 1) ** 3
    np.fill_diagonal(kernel, 0)
    assert sums.sum() == pytest.approx(kernel[np.ix_(kept_x, kept_y)].sum())
    assert counts.sum() == 28 * 27 - len(set(kept_x) & set(kept_y))
    block = np.arange(30) * 7 // 30
    inside = kernel[np.ix_(kept_x[block[kept_x] == 2], kept_y[block[kept_y] == 2])]
    assert sums[2, 2] == pytest.approx(inside.sum())


def expected_kernel(mu, a, nu, b) -> float:
    """E (x.y / d + 1)^3 of independent x ~ N(mu, a) and y ~ N(nu, b), from their moments up to the third."""
    d = len(mu)

    def third(m, s):
        sym = np.einsum("i,jk->ijk", m, s) + np.einsum("j,ik->ijk", m, s) + np.einsum("k,ij->ijk", m, s)
        return np.einsum("i,j,k->ijk", m, m, m) + sym

    one = mu @ nu / d
    two = np.sum((a + np.outer(mu, mu)) * (b + np.outer(nu, nu))) / d**2
    three = np.sum(third(mu, a) * third(nu, b)) / d**3
    return float(three + 3 * two + 3 * one + 1)


def test_kernel_distance_of_gaussians_is_the_closed_form(rng):
    d = 4
    mu, nu = 0.3 * rng.normal(size=(2, d))
    a, b = covariance(rng, d), covariance(rng, d)
    truth = expected_kernel(mu, a, mu, a) + expected_kernel(nu, b, nu, b) - 2 * expected_kernel(mu, a, nu, b)
    values = []
    for _ in range(60):
        x, y = rng.multivariate_normal(mu, a, 40), rng.multivariate_normal(nu, b, 25)
        table = KernelTable({"x": FeatureSet(x, "x"), "y": FeatureSet(y, "y")}, replicates=2)
        values.append(table.distance("x", "y").value)
    # Right in the mean although each set is small: a biased estimate would be off by E k(x, x) / 40 and more.
    assert abs(np.mean(values) - truth) < 4.5 * np.std(values, ddof=1) / np.sqrt(60)
    large = kernel_distance(rng.multivariate_normal(mu, a, 3000), rng.multivariate_normal(nu, b, 3000))
    assert abs(large.value - truth) < 4.5 * large.error


@pytest.mark.parametrize("shift, n, d", [(0.0, 60, 20), (0.15, 120, 6), (0.8, 120, 6)])
def test_standard_error_is_that_of_repetitions(shift, n, d, rng):
    """Also where both sets are of one distribution, where the plain bootstrap is wrong by 1.7."""
    found = []
    for i in range(240):
        x, y = rng.normal(size=(n, d)), rng.normal(size=(n, d)) + shift
        sets, replicates = {"x": FeatureSet(x, "x"), "y": FeatureSet(y, "y")}, 200 if i < 40 else 2
        found.append(KernelTable(sets, replicates=replicates).distance("x", "y"))
    spread = np.std([f.value for f in found], ddof=1)  # itself known to about 5 %
    assert 0.7 < np.mean([f.error for f in found[:40]]) / spread < 1.5


def test_change_is_the_difference_and_sharp_where_paired(rng):
    reference = FeatureSet(rng.normal(size=(150, 5)), "r")
    x = rng.normal(size=(150, 5)) + 0.4
    y = x + 0.02 * rng.normal(size=x.shape)
    sets = {"r": reference, "x": FeatureSet(x, "s"), "y": FeatureSet(y, "s"), "other": FeatureSet(y, "t")}
    table = KernelTable(sets)
    change = table.change("y", "x", "r")
    apart = table.distance("y", "r").value - table.distance("x", "r").value
    assert change.value == pytest.approx(apart, abs=1e-12)
    assert change.error < 0.3 * table.change("other", "x", "r").error
    assert change.error < 0.3 * table.distance("x", "r").error


def test_blocks_chunks_and_seeds_change_no_value(rng, monkeypatch):
    x, y = rng.normal(size=(83, 5)), rng.normal(size=(31, 5)) + 1
    value = kernel_distance(x, y).value
    for blocks in (1, 2, 31, 1000):
        assert kernel_distance(x, y, blocks=blocks).value == pytest.approx(value, rel=1e-11)
    monkeypatch.setattr(distances, "_ENTRIES", 1)
    assert kernel_distance(x, y).value == pytest.approx(value, rel=1e-11)
    one, two = kernel_distance(x, y, seed=1), kernel_distance(x, y, seed=2)
    assert one == kernel_distance(x, y, seed=1)
    assert (
        one.value == two.value and one.error != two.error and one.error == pytest.approx(two.error, rel=0.3)
    )


def test_no_array_of_n_by_n_is_held(rng, monkeypatch):
    monkeypatch.setattr(distances, "_ENTRIES", 1 << 16)
    n = 2500
    x, y = rng.normal(size=(2, n, 8))
    tracemalloc.start()
    try:
        kernel_distance(x, y)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < n * n * 8 / 5


# ---- bad input
@pytest.mark.parametrize("function", [frechet_distance, kernel_distance])
@pytest.mark.parametrize(
    "x, y, error, sentence",
    [
        (np.zeros((0, 3)), np.zeros((4, 3)), ShapeError, r"x: shape is \(0, 3\).*at least 2 pictures"),
        (np.zeros((1, 3)), np.zeros((4, 3)), ShapeError, r"x: shape is \(1, 3\)"),
        (np.zeros((4, 3)), np.zeros((1, 3)), ShapeError, r"y: shape is \(1, 3\)"),
        (np.zeros((4, 0)), np.zeros((4, 0)), ShapeError, r"x: shape is \(4, 0\)"),
        (np.zeros(4), np.zeros((4, 3)), ShapeError, r"x: shape is \(4,\)"),
        (
            np.zeros((4, 3)),
            np.zeros((4, 5)),
            ShapeError,
            "y: has 5 features a picture, but the other set has 3",
        ),
        (np.full((4, 3), np.nan), np.zeros((4, 3)), NonFiniteError, "features of 4 of 4 pictures"),
        (np.zeros((4, 3)), np.full((4, 3), np.inf), NonFiniteError, "y: the features of 4 of 4 pictures"),
    ],
)
def test_bad_features(function, x, y, error, sentence):
    with pytest.raises(error, match=sentence):
        function(x, y)


def test_extractors_are_not_mixed(rng):
    with pytest.raises(ShapeError, match="use one extractor"):
        frechet(Gaussian.of(rng.normal(size=(5, 3))), Gaussian.of(rng.normal(size=(5, 4))))
    with pytest.raises(ShapeError, match="5 features but 4 rows"):
        FeatureSet(rng.normal(size=(5, 3)), "x", np.arange(4), 9)
