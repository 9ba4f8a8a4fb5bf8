"""Intervals of shares, means and paired differences: known values, coverage, bad input."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fp4bf16.align import shares
from fp4bf16.errors import ShapeError
from fp4bf16.train.intervals import (
    Interval,
    difference_interval,
    mean_interval,
    paired_gain,
    resample,
    share_interval,
)


# ---- shares
def test_a_share_with_its_interval():
    share = share_interval(81, 263)
    assert (share.low, share.high) == shares.wilson(81, 263)
    assert share.value == 81 / 263 and share.n == 263 and share.captions is None
    assert math.isnan(share_interval(0, 0).value) and share_interval(0, 0).as_dict()["low"] is None
    with pytest.raises(ShapeError, match="4 hits of 3"):
        share_interval(4, 3)


# ---- means
def _clustered(rng, captions: int = 40, each: int = 5):
    """Scores whose captions differ more than the pictures of one: (scores, captions), mean 0."""
    effect = rng.normal(size=captions).repeat(each)
    return effect + 0.3 * rng.normal(size=captions * each), [
        f"c{i}" for i in range(captions) for _ in range(each)
    ]


def test_mean_interval_covers_where_pictures_of_a_caption_resemble_each_other(rng):
    inside, naive = 0, 0
    for i in range(150):
        values, captions = _clustered(rng)
        found = mean_interval(values, captions, seed=i, replicates=400)
        inside += found.low <= 0 <= found.high
        alone = mean_interval(values, [str(j) for j in range(len(values))], seed=i, replicates=400)
        naive += alone.low <= 0 <= alone.high
    assert (
        inside / 150 > 0.85
    )  # 95 % are meant; 150 repetitions know it to 2 %, and 40 captions cost a little
    assert naive / 150 < 0.8  # what taking the pictures as independent would claim


def test_mean_interval_is_of_what_is_known(rng):
    values, captions = _clustered(rng)
    values[::7] = np.nan
    found = mean_interval(values, captions)
    assert found.value == pytest.approx(np.nanmean(values)) and found.n == np.isfinite(values).sum()
    assert found.captions == 40 and found.low < found.value < found.high
    assert found == mean_interval(values, captions)
    order = rng.permutation(len(values))
    again = mean_interval(values[order], [captions[i] for i in order])
    assert (again.low, again.high) == pytest.approx((found.low, found.high))


def test_mean_interval_of_too_little():
    one = mean_interval(np.array([1.0, 3.0]), ["a", "a"])
    assert one.value == 2 and math.isnan(one.low) and one.captions == 1
    none = mean_interval(np.array([np.nan]), ["a"])
    assert none.n == 0 and none.as_dict() == {"value": None, "low": None, "high": None, "n": 0, "captions": 0}
    assert mean_interval(np.empty(0), []).n == 0
    with pytest.raises(ShapeError, match=r"shape \(3,\) but there are 2 captions"):
        mean_interval(np.zeros(3), ["a", "b"])


# ---- differences
def test_a_paired_difference_is_sharper_than_two_means(rng):
    before, captions = _clustered(rng)
    after = before + 0.1 + 0.01 * rng.normal(size=len(before))
    change = difference_interval(before, after, captions)
    assert change.low < change.value < change.high and change.low > 0.09 and change.high < 0.11
    alone = mean_interval(before, captions)
    assert change.high - change.low < 0.1 * (alone.high - alone.low)


def test_difference_leaves_out_a_pair_of_which_one_is_missing():
    before, after = np.array([1.0, np.nan, 3.0]), np.array([2.0, 5.0, np.nan])
    found = difference_interval(before, after, ["a", "b", "c"])
    assert found.value == 1 and found.n == 1
    with pytest.raises(ShapeError, match="same captions and seeds"):
        difference_interval(np.zeros(2), np.zeros(3), ["a", "b", "c"])


def test_paired_gain(rng):
    base, captions = rng.uniform(size=60), [f"c{i % 12}" for i in range(60)]
    assert paired_gain(base, base, captions) == (0, 0, 0)
    aligned = np.clip(base + 0.2, 0, 1)
    gain, low, high = paired_gain(base, aligned, captions)
    assert gain == pytest.approx(100 * ((aligned > 0.5).mean() - (base > 0.5).mean())) and low <= gain <= high
    assert math.isnan(paired_gain(base[:2], aligned[:2], ["a", "a"])[1])


def test_resample_draws_each_as_often_in_the_mean():
    drawn = resample(5, 20, 4000)
    assert (drawn.sum(1) == 20).all()
    assert np.abs(drawn.mean(0) - 1).max() < 0.08 and drawn.var() == pytest.approx(0.95, abs=0.03)


def test_interval_as_json():
    assert Interval(0.5, 0.25, math.inf, 3).as_dict() == {
        "value": 0.5, "low": 0.25, "high": None, "n": 3, "captions": None
    }  # fmt: skip
