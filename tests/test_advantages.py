"""Advantages of rewards within their prompt."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from fp4bf16.align.advantages import advantages
from fp4bf16.errors import ConfigError, ShapeError


def _by_hand(labels, clip):
    """One picture at a time, in Python's own numbers."""
    rows = [[float(x) for x in row] for row in labels]
    kept = [x for row in rows for x in row if np.isfinite(x)]
    mean = sum(kept) / len(kept)
    deviation = (sum((x - mean) ** 2 for x in kept) / len(kept)) ** 0.5
    result = []
    for row in rows:
        good = [x for x in row if np.isfinite(x)]
        of_row = sum(good) / len(good) if good else 0.0
        result.append([max(-clip, min(clip, (x - of_row) / (deviation + 1e-4))) if np.isfinite(x) else 0.0
                       for x in row])  # fmt: skip
    return result


@pytest.mark.parametrize("shape", [(1, 2), (5, 7), (16, 8), (3, 1)])
@pytest.mark.parametrize("broken", [0, 0.3])
def test_against_plain_python(shape, broken, rng):
    labels = 3 * rng.standard_normal(shape) - 10
    labels[rng.random(shape) < broken] = np.nan
    if not np.isfinite(labels).any():
        labels[0, 0] = 1.0
    clip = float(rng.uniform(0.5, 3))
    found = advantages(labels, clip)
    assert found.dtype == np.float32 and found.shape == shape
    np.testing.assert_allclose(found, _by_hand(labels, clip), rtol=1e-5, atol=1e-7)


def test_unhealthy_pictures_change_nothing_of_the_others(rng):
    labels = rng.standard_normal((4, 6))
    wider = np.concatenate([labels, np.full((4, 3), np.nan), np.full((4, 1), np.inf)], 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = advantages(wider)
        assert not advantages(np.full((2, 3), np.nan)).any()
    np.testing.assert_allclose(found[:, :6], advantages(labels), rtol=1e-5)
    assert not found[:, 6:].any()


def test_equal_rewards_teach_nothing(rng):
    value = rng.standard_normal()
    assert not advantages(np.full((5, 7), value)).any()
    labels = np.full((3, 7), value)  # a mean of seven equal numbers may be another number
    labels[0] = rng.standard_normal(7)
    found = advantages(labels)
    assert found[0].any() and not found[1:].any()
    labels[1, 1:] = np.nan  # one picture alone
    assert not advantages(labels)[1].any()


def test_sum_and_order(rng):
    labels = rng.standard_normal((6, 8))
    found = advantages(labels, clip=100.0)
    np.testing.assert_allclose(found.sum(1), 0, atol=1e-5)
    np.testing.assert_array_equal(np.argsort(found, 1), np.argsort(labels, 1))
    bounded = advantages(labels, clip=0.25)
    assert bounded.max() == 0.25 and bounded.min() == -0.25
    assert advantages(np.zeros((0, 4))).shape == (0, 4) and advantages(np.zeros((3, 0))).shape == (3, 0)


@pytest.mark.parametrize("clip", [0.0, -1.0, np.nan, np.inf])
def test_clip_that_cannot_be(clip):
    with pytest.raises(ConfigError, match="advantage_clip: is"):
        advantages(np.zeros((1, 2)), clip)


def test_labels_of_another_shape():
    with pytest.raises(ShapeError, match=r"labels have shape \(4,\), but one row a prompt"):
        advantages(np.zeros(4))
