"""Distances between two sets of pictures, by the features that some extractor gives them.

Fréchet distance: between the normal distributions with the mean and covariance of each set (Dowson and
Landau, J. Multivariate Analysis 12, 1982; on image features Heusel et al., NeurIPS 2017, eq. 6). It is
biased upwards, the more the fewer pictures there are for the features' dimension.

Kernel distance: squared maximum mean discrepancy by its unbiased estimate (Gretton et al., JMLR 13, 2012,
eq. 3) with the cubic kernel k(x, y) = (x.y / d + 1)^3 (Binkowski et al., ICLR 2018). It is right in the mean
for any number of pictures, so for two draws of one distribution it may come out slightly negative.

A distance says nothing without the extractor it was taken with, and two extractors' distances cannot be
compared. Everything is float64, and no array of n x n is ever held.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..diffusion.noise import permutation, subseed
from ..errors import NonFiniteError, ShapeError
from .intervals import Z95, resample

BLOCKS = 50  # that a set is resampled in
REPLICATES = 1000
_ENTRIES = 1 << 22  # of the kernel matrix in memory at a time: 32 MiB, and as much again to cube it


def _features(name: str, values: np.ndarray, like: int | None = None) -> np.ndarray:
    """Checked: finite, (n, d) with n >= 2, and d = `like` where given."""
    values = np.asarray(values)
    if values.ndim != 2 or len(values) < 2 or not values.shape[1]:
        raise ShapeError(f"{name}: shape is {values.shape}; pass features (n, d) of at least 2 pictures")
    if like is not None and values.shape[1] != like:
        raise ShapeError(f"{name}: has {values.shape[1]} features a picture, but the other set has {like}; "
                         f"use one extractor for both")  # fmt: skip
    if not np.isfinite(values).all():
        bad = int((~np.isfinite(values).all(axis=1)).sum())
        raise NonFiniteError(
            f"{name}: the features of {bad} of {len(values)} pictures hold NaN or Inf; leave them out"
        )
    return values


# ------------------------------------------------------------------------------------------------- Fréchet


@dataclass(frozen=True)
class Gaussian:
    """Mean (d,) and covariance (d, d), float64, of the features of `n` pictures."""

    mean: np.ndarray
    covariance: np.ndarray
    n: int

    @classmethod
    def of(cls, features: np.ndarray, name: str = "features", chunk: int = 4096) -> Gaussian:
        """Of features (n, d); the covariance is divided by n - 1. `chunk` rows are taken at a time."""
        features = _features(name, features)
        n, d = features.shape
        parts = [slice(start, start + chunk) for start in range(0, n, chunk)]
        mean = sum(features[p].sum(axis=0, dtype=np.float64) for p in parts) / n
        covariance = np.zeros((d, d))
        for p in parts:
            centred = features[p] - mean
            covariance += centred.T @ centred
        return cls(mean, covariance / (n - 1), n)


def _root(matrix: np.ndarray) -> np.ndarray:
    """Symmetric square root of a positive semidefinite matrix; eigenvalues under 0 are rounding."""
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T


def frechet(a: Gaussian, b: Gaussian) -> float:
    """|mu_a - mu_b|^2 + tr(A + B - 2 (A B)^(1/2)) of two normal distributions; 0 where they are equal.

    The trace of (A B)^(1/2) is the sum of the square roots of the eigenvalues of A^(1/2) B A^(1/2), which is
    symmetric, so singular covariances (fewer pictures than dimensions) are no special case.

    >>> one = Gaussian(np.zeros(2), np.diag([1.0, 4.0]), 9)
    >>> other = Gaussian(np.array([3.0, 0.0]), np.diag([4.0, 9.0]), 9)
    >>> round(frechet(one, other), 9)
    11.0
    """
    if a.mean.shape != b.mean.shape:
        raise ShapeError(f"frechet: means of {a.mean.shape} and {b.mean.shape}; use one extractor for both")
    root = _root(a.covariance)
    product = root @ b.covariance @ root
    eigenvalues = np.linalg.eigvalsh((product + product.T) / 2)
    shared = np.sqrt(np.maximum(eigenvalues, 0)).sum()
    spread = np.trace(a.covariance) + np.trace(b.covariance) - 2 * shared
    return max(0.0, float(((a.mean - b.mean) ** 2).sum() + spread))


def frechet_distance(x: np.ndarray, y: np.ndarray) -> float:
    """Fréchet distance of two sets of features, (n, d) and (m, d).

    Biased upwards by about a constant / n (see `frechet_at_infinity`); `frechet_note` says so for a given n.
    Raises `ShapeError` and `NonFiniteError`.

    >>> x = np.random.default_rng(0).normal(size=(500, 3))
    >>> frechet_distance(x, x) < 1e-9, 0.9 < frechet_distance(x, x + [1, 0, 0]) < 1.1
    (True, True)
    """
    x = _features("x", x)
    return frechet(Gaussian.of(x, "x"), Gaussian.of(_features("y", y, x.shape[1]), "y"))


def frechet_note(n: int, m: int, d: int) -> str:
    """What to think of a Fréchet distance of `n` and `m` pictures in `d` dimensions.

    >>> frechet_note(24, 242, 56)
    'biased upwards: 24 pictures for 56 dimensions, so the covariance is singular; compare equal n only'
    """
    few = min(n, m)
    if few <= d:
        return (f"biased upwards: {few} pictures for {d} dimensions, so the covariance is singular; compare "
                f"equal n only")  # fmt: skip
    return f"biased upwards by about a constant / n ({few} pictures for {d} dimensions); compare equal n only"


def frechet_at_infinity(x: np.ndarray, reference: Gaussian, seed: int = 0) -> float | None:
    """The Fréchet distance to `reference` that infinitely many pictures like `x` (n, d) would have.

    The bias is a constant / n to first order, so the distances of smaller sets are fitted by a line in 1/n
    and read at 1/n = 0 (Chong and Forsyth, CVPR 2020). The smaller sets are the halves, thirds and quarters
    of `x` in a random order, their distances averaged, which is less noisy than random subsets are. The
    reference's own bias stays. None where n < 8 d, as then a part would have too few pictures to lie on the
    line.

    >>> x = np.random.default_rng(0).normal(size=(4000, 8))
    >>> truth = Gaussian(np.zeros(8), np.eye(8), 4000)
    >>> abs(frechet_at_infinity(x, truth)) < frechet(Gaussian.of(x), truth)
    True
    """
    x = _features("x", x, len(reference.mean))
    n, d = x.shape
    if n < 8 * d:
        return None
    order = permutation(subseed(seed, "parts"), 0, n)
    found = []
    for parts in range(1, 5):
        size = n // parts
        pieces = [x[order[i * size : (i + 1) * size]] for i in range(parts)]
        found.append((1 / size, np.mean([frechet(Gaussian.of(piece), reference) for piece in pieces])))
    slope, intercept = np.polyfit(*np.array(found).T, 1)
    return float(intercept)


# -------------------------------------------------------------------------------------------------- kernel


@dataclass(frozen=True)
class Estimate:
    """A kernel distance, or a difference of two: `value`, its standard error, pictures of each set."""

    value: float
    error: float
    n: int
    m: int

    @property
    def low(self) -> float:
        """Lower end of the 95 % interval, value - 1.96 standard errors."""
        return self.value - Z95 * self.error

    @property
    def high(self) -> float:
        """Upper end of it."""
        return self.value + Z95 * self.error


@dataclass(frozen=True)
class FeatureSet:
    """Features (n, d) of one set of pictures, cut into blocks for resampling.

    rows (n,), rising: which of the `of` pictures they are, where some were left out; by default all.
    seeds: what the pictures were drawn from. Sets with the same `seeds` are paired by their rows: they are
    resampled together, and a picture is not compared with its twin, which would resemble it for that reason
    alone.
    """

    values: np.ndarray
    seeds: str
    rows: np.ndarray | None = None
    of: int | None = None

    def __post_init__(self):
        _features(self.seeds, self.values)
        if self.rows is not None and len(self.rows) != len(self.values):
            raise ShapeError(f"{self.seeds}: {len(self.values)} features but {len(self.rows)} rows; pass one "
                             f"row a picture")  # fmt: skip

    @property
    def row(self) -> np.ndarray:
        """Row of each picture, int64 (n,)."""
        return np.arange(len(self.values)) if self.rows is None else np.asarray(self.rows, np.int64)

    @property
    def total(self) -> int:
        """Pictures drawn, with those left out."""
        return len(self.values) if self.of is None else self.of

    def block(self, blocks: int) -> np.ndarray:
        """Block of each picture, int64 (n,), rising."""
        return self.row * blocks // self.total


def _cubic(products: np.ndarray, d: int) -> np.ndarray:
    """(x.y / d + 1)^3 of the inner products, in place."""
    products /= d
    products += 1
    square = products * products
    products *= square
    return products


def _by_block(values: np.ndarray, block: np.ndarray, blocks: int) -> np.ndarray:
    """Sums of the rows of each block, (blocks, ...); `block` rises, and a block may have no row."""
    out = np.zeros((blocks, *values.shape[1:]))
    present, starts = np.unique(block, return_index=True)
    out[present] = np.add.reduceat(values, starts, axis=0)
    return out


def block_sums(a: FeatureSet, b: FeatureSet, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Sums of the kernel over the pairs of a block of `a` and one of `b`, and how many pairs there are:
    float64 (blocks, blocks) each.

    A picture with itself, or with its twin of the same row in a set of the same seeds, is no pair.
    """
    d = _features(b.seeds, b.values, a.values.shape[1]).shape[1]
    block_a, block_b = a.block(blocks), b.block(blocks)
    rows = max(1, _ENTRIES // len(b.values))
    right = np.ascontiguousarray(b.values.T, np.float64)
    by_column = np.empty((len(a.values), blocks))  # sums over each block of b
    for start in range(0, len(a.values), rows):
        some = slice(start, start + rows)
        kernel = _cubic(a.values[some].astype(np.float64) @ right, d)
        by_column[some] = _by_block(kernel.T, block_b, blocks).T
    sums = _by_block(by_column, block_a, blocks)
    sizes_a, sizes_b = (np.bincount(k, minlength=blocks).astype(np.float64) for k in (block_a, block_b))
    counts = np.outer(sizes_a, sizes_b)
    if a.seeds == b.seeds:
        _, i, j = np.intersect1d(a.row, b.row, assume_unique=True, return_indices=True)
        twins = np.einsum("ij,ij->i", a.values[i].astype(np.float64), b.values[j].astype(np.float64))
        diagonal = np.arange(blocks)
        sums[diagonal, diagonal] -= np.bincount(block_a[i], _cubic(twins, d), minlength=blocks)
        counts[diagonal, diagonal] -= np.bincount(block_a[i], minlength=blocks)
    return sums, counts


class KernelTable:
    """Kernel distances between named sets of features, each pair of sets gone through once.

    The standard error is that of a bootstrap over blocks of consecutive pictures (`blocks` a set, fewer where
    a set is small): paired sets are drawn with the same blocks, so a change between them is as sharp as their
    pairing makes it.

    >>> rng = np.random.default_rng(0)
    >>> sets = {name: FeatureSet(rng.normal(size=(200, 4)) + shift, name)
    ...         for name, shift in (("a", 0.0), ("b", 0.0), ("c", 0.5))}
    >>> table = KernelTable(sets)
    >>> table.distance("a", "b").low < 0 < table.distance("a", "c").low
    True
    """

    def __init__(
        self,
        sets: Mapping[str, FeatureSet],
        seed: int = 0,
        blocks: int = BLOCKS,
        replicates: int = REPLICATES,
    ):
        self.sets, self.seed, self.replicates = dict(sets), seed, replicates
        self.blocks = min([blocks, *(s.total for s in self.sets.values())])
        self._sums: dict[tuple[str, str], tuple[np.ndarray, np.ndarray]] = {}
        self._drawn: dict[str, np.ndarray] = {}

    def distance(self, a: str, b: str) -> Estimate:
        """Unbiased squared MMD of two sets."""
        return self._estimate([(a, a, 1.0), (b, b, 1.0), (a, b, -2.0)], a, b)

    def change(self, a: str, b: str, reference: str) -> Estimate:
        """distance(a, reference) - distance(b, reference), what is common to both cancelled."""
        terms = [(a, a, 1.0), (a, reference, -2.0), (b, b, -1.0), (b, reference, 2.0)]
        return self._estimate(terms, a, b)

    def _pair(self, a: str, b: str) -> tuple[np.ndarray, np.ndarray]:
        if (b, a) in self._sums:
            sums, counts = self._sums[b, a]
            return sums.T, counts.T
        if (a, b) not in self._sums:
            self._sums[a, b] = block_sums(self.sets[a], self.sets[b], self.blocks)
        return self._sums[a, b]

    def _weights(self, name: str) -> np.ndarray:
        """How often each block is drawn in each replicate, float64 (replicates, blocks)."""
        seeds = self.sets[name].seeds
        if seeds not in self._drawn:
            self._drawn[seeds] = resample(
                subseed(self.seed, "bootstrap", seeds), self.blocks, self.replicates
            )
        return self._drawn[seeds]

    def _estimate(self, terms: list[tuple[str, str, float]], a: str, b: str) -> Estimate:
        """Weighted sum of mean kernels, with the standard error of the sum.

        A mean of pairs resampled with weights 1 + u is, up to u^3, its value + a part linear in u + one
        quadratic in u. If V1 and V2 are the variances that single pictures and pairs of pictures contribute
        to the estimate (Hoeffding), resampling gives the linear part V1 + 2 V2 and the quadratic one V2: the
        plain bootstrap has three times the variance that two sets of one distribution (V1 = 0) really have.
        So V1 + V2 is taken, as the first less the second, and never less than V2.
        """
        value, linear, whole = 0.0, np.zeros(self.replicates), np.zeros(self.replicates)
        for left, right, factor in terms:
            sums, counts = self._pair(left, right)
            if not counts.sum():
                raise ShapeError(f"kernel distance: {left} and {right} have no pair of different pictures; "
                                 f"pass more")  # fmt: skip
            u, v = self._weights(left), self._weights(right)
            mean = sums.sum() / counts.sum()
            centred = sums - mean * counts  # the mean's derivative, times the number of pairs
            pairs = np.einsum("rb,bc,rc->r", u, counts, v, optimize=True)
            part = ((u - 1) @ centred.sum(axis=1) + (v - 1) @ centred.sum(axis=0)) / counts.sum()
            value += factor * float(mean)
            linear += factor * part
            whole += factor * np.einsum("rb,bc,rc->r", u, centred, v, optimize=True) / np.maximum(pairs, 1)
        second = float((whole - linear).var())
        variance = max(float(linear.var()) - second, second)
        return Estimate(value, math.sqrt(variance), len(self.sets[a].values), len(self.sets[b].values))


def kernel_distance(x: np.ndarray, y: np.ndarray, seed: int = 0, blocks: int = BLOCKS) -> Estimate:
    """Kernel distance of two independent sets of features, (n, d) and (m, d), with its standard error.

    Raises `ShapeError` and `NonFiniteError`.

    >>> x, y = np.random.default_rng(0).normal(size=(2, 300, 4))
    >>> found = kernel_distance(x, y)
    >>> found.low < 0 < found.high, (found.n, found.m)
    (True, (300, 300))
    """
    x = _features("x", x)
    y = _features("y", y, x.shape[1])
    return KernelTable({"x": FeatureSet(x, "x"), "y": FeatureSet(y, "y")}, seed, blocks).distance("x", "y")
