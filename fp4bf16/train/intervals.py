"""95 % intervals of what a set of pictures scores: shares, means, and paired differences of means.

Pictures of one caption resemble each other, so means are resampled caption by caption (the cluster
bootstrap: Davison and Hinkley, "Bootstrap Methods and their Application", 1997, section 3.8), and pictures
drawn from the same noise by two models are compared pair by pair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..align.shares import Z95
from ..align.shares import wilson as bounds
from ..diffusion.noise import integers, subseed
from ..errors import ShapeError

REPLICATES = 2000


@dataclass(frozen=True)
class Interval:
    """`value` and its 95 % interval from `n` pictures of `captions` captions (None where it plays no part).

    `low` and `high` are NaN where there is too little for an interval, `value` too where there is nothing.
    """

    value: float
    low: float
    high: float
    n: int
    captions: int | None = None

    def as_dict(self) -> dict[str, float | int | None]:
        """Plain numbers for JSON, NaN as None."""
        numbers = {"value": self.value, "low": self.low, "high": self.high}
        plain = {k: v if math.isfinite(v) else None for k, v in numbers.items()}
        return plain | {"n": self.n, "captions": self.captions}


def resample(seed: int, count: int, replicates: int) -> np.ndarray:
    """How often each of `count` things is drawn in `count` draws with replacement: float64 (replicates,
    count).

    >>> resample(0, 5, 3).sum(axis=1)
    array([5., 5., 5.])
    """
    drawn = integers(seed, 0, (replicates, count), 0, count) + count * np.arange(replicates)[:, None]
    return (
        np.bincount(drawn.ravel(), minlength=replicates * count).reshape(replicates, count).astype(np.float64)
    )


def share_interval(hits: int, n: int) -> Interval:
    """A share of `n` trials with Wilson's score interval (`align.shares.wilson`).

    It takes the pictures as independent. Raises `ShapeError` unless 0 <= hits <= n.

    >>> share = share_interval(10, 10)
    >>> share.value, round(share.low, 3), share.high
    (1.0, 0.722, 1.0)
    """
    low, high = bounds(hits, n)
    return Interval(hits / n if n else math.nan, low, high, n)


def mean_interval(
    values: np.ndarray, captions: Sequence[str], seed: int = 0, replicates: int = REPLICATES
) -> Interval:
    """Mean of `values` (n,), with the percentile interval of a bootstrap over captions.

    NaN is left out (a picture that could not be scored). With one caption there is no interval. Raises
    `ShapeError` unless there is a caption for each value.

    >>> found = mean_interval(np.array([1.0, 2.0, 3.0, np.nan]), ["a", "a", "b", "c"])
    >>> found.value, found.n, found.captions, found.low <= found.value <= found.high
    (2.0, 3, 2, True)
    """
    values = np.asarray(values, np.float64)
    if values.shape != (len(captions),):
        raise ShapeError(
            f"mean_interval: values have shape {values.shape} but there are {len(captions)} "
            f"captions; pass one a value"
        )
    known = ~np.isnan(values)
    if not known.any():
        return Interval(math.nan, math.nan, math.nan, 0, 0)
    _, index = np.unique(np.asarray(captions, str)[known], return_inverse=True)
    sums, sizes = np.bincount(index, values[known]), np.bincount(index)
    value, n, count = float(values[known].mean()), int(known.sum()), len(sums)
    if count < 2:
        return Interval(value, math.nan, math.nan, n, count)
    drawn = resample(subseed(seed, "captions"), count, replicates)
    low, high = np.percentile((drawn @ sums) / (drawn @ sizes), [2.5, 97.5])
    return Interval(value, float(low), float(high), n, count)


def difference_interval(
    before: np.ndarray, after: np.ndarray, captions: Sequence[str], seed: int = 0
) -> Interval:
    """Mean of ``after - before`` (n,), picture by picture, as `mean_interval`; pairs with a NaN are left out.

    >>> difference_interval(np.array([1.0, 5.0]), np.array([2.0, 6.0]), ["a", "b"]).as_dict()
    {'value': 1.0, 'low': 1.0, 'high': 1.0, 'n': 2, 'captions': 2}
    """
    before, after = np.asarray(before, np.float64), np.asarray(after, np.float64)
    if before.shape != after.shape:
        raise ShapeError(
            f"difference_interval: before has shape {before.shape} but after has {after.shape}; pass the "
            f"scores of the same captions and seeds"
        )
    return mean_interval(after - before, captions, seed)


def paired_gain(base: np.ndarray, aligned: np.ndarray, captions: Sequence[str]) -> tuple[float, float, float]:
    """Gain of the share of wins (probability > 0.5), in percentage points, with its 95 % interval.

    Pictures are paired by their noise. Pictures of one caption are not independent, so the interval is the
    normal one of the means by caption (cluster-robust).

    >>> paired_gain(np.zeros(4), np.array([0.0, 0.0, 1.0, 1.0]), ["a", "b", "a", "b"])
    (50.0, 50.0, 50.0)
    """
    difference = (aligned > 0.5).astype(float) - (base > 0.5)
    _, index = np.unique(np.array(captions), return_inverse=True)
    means = np.bincount(index, difference) / np.bincount(index)
    gain = 100 * float(difference.mean())
    half = 100 * Z95 * float(means.std(ddof=1)) / math.sqrt(len(means)) if len(means) > 1 else math.nan
    return gain, gain - half, gain + half
