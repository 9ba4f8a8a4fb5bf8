"""Nearest training pictures, and what is called a near-copy."""

from __future__ import annotations

import numpy as np
import pytest

from fp4bf16.errors import NonFiniteError, ShapeError
from fp4bf16.train import neighbours
from fp4bf16.train.neighbours import Nearest, compare


@pytest.mark.parametrize("n, m, shape", [(1, 1, (3,)), (7, 5, (4, 4, 3)), (30, 201, (5,))])
def test_nearest_is_the_direct_search(n, m, shape, rng, monkeypatch):
    x, reference = rng.normal(size=(n, *shape)), rng.normal(size=(m, *shape))
    distance, index = Nearest(reference)(x)
    direct = np.sqrt(((x.reshape(n, 1, -1) - reference.reshape(1, m, -1)) ** 2).mean(2))
    assert (index == direct.argmin(1)).all() and np.allclose(distance, direct.min(1), rtol=1e-12)
    monkeypatch.setattr(neighbours, "_ENTRIES", 1)
    again = Nearest(reference)(x)
    assert (again[1] == index).all() and np.allclose(again[0], distance, rtol=1e-12)


def test_a_copy_is_at_distance_0(rng):
    reference = rng.uniform(-1, 1, (50, 8, 8, 3)).astype(np.float32)
    distance, index = Nearest(reference)(reference[[3, 40]])
    assert distance.tolist() == [0, 0] and index.tolist() == [3, 40]
    nudged = Nearest(reference)(reference[3:4] + np.float32(1e-3))[0]
    assert nudged[0] == pytest.approx(1e-3, rel=1e-3)  # which the expanded square would not resolve


def test_nothing_to_look_up(rng):
    distance, index = Nearest(rng.normal(size=(5, 3)))(np.empty((0, 3)))
    assert distance.shape == index.shape == (0,)


def test_bad_pictures(rng):
    nearest = Nearest(rng.normal(size=(5, 4, 4, 3)))
    with pytest.raises(ShapeError, match="27 numbers a picture, but the reference has 48"):
        nearest(np.zeros((2, 3, 3, 3)))
    with pytest.raises(NonFiniteError, match="NaN or Inf"):
        nearest(np.full((2, 4, 4, 3), np.nan))
    with pytest.raises(ShapeError, match="no picture"):
        Nearest(np.empty((0, 4)))
    with pytest.raises(ShapeError, match="one row a picture"):
        nearest(np.zeros(48))


def test_near_copies_are_few_of_held_out_pictures_and_all_of_copies(rng):
    train, heldout = rng.normal(size=(300, 6)), rng.normal(size=(400, 6))
    nearest = Nearest(train)
    held = nearest(heldout)[0]
    same = compare(nearest(rng.normal(size=(400, 6)))[0], held)
    assert same["near_copies"]["value"] < 0.12 and same["heldout_n"] == 400
    copies = compare(nearest(train[:40] + 1e-4)[0], held)
    assert copies["near_copies"]["value"] == 1 and copies["near_copies"]["low"] > 0.9
    assert copies["smallest"] < 1e-3 < copies["limit"] < copies["heldout_median"]
    assert compare(held, held)["near_copies"]["value"] == pytest.approx(0.05, abs=0.003)


def test_without_held_out_pictures_there_is_no_limit():
    found = compare(np.array([1.0, 3.0]), np.empty(0))
    assert found["median"] == 2 and found["limit"] is None and found["near_copies"] is None
    assert compare(np.empty(0), np.array([1.0]))["median"] is None
