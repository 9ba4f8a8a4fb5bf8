"""Rank fidelity: ranks, ties, what was lost, and all measures by counting."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fp4bf16.align.fidelity import rank_fidelity, ranks, spearman
from fp4bf16.errors import ShapeError


def test_ranks_share_ties(rng):
    a, b = rng.integers(0, 5, (2, 30)).astype(float)
    slow = np.array([np.mean([sorted(a).index(v) + 1, 30 - sorted(a)[::-1].index(v)]) for v in a])
    np.testing.assert_array_equal(ranks(a), slow)
    np.testing.assert_array_equal(ranks(np.stack([a, b]))[0], slow)
    assert spearman(a, b) == pytest.approx(np.corrcoef(ranks(a), ranks(b))[0, 1])
    assert np.isnan(spearman(a, np.ones(30)))
    assert ranks(np.array([np.inf, -np.inf, 0.0])).tolist() == [3, 1, 2]


def test_ranks_of_many_take_no_square_of_memory():
    assert ranks(np.arange(200_000.0))[-1] == 200_000


def test_what_was_lost_has_no_rank(rng):
    a, b = rng.standard_normal((2, 4, 20))
    lost_a, lost_b = rng.random((2, 4, 20)) < 0.2
    found = spearman(np.where(lost_a, np.nan, a), np.where(lost_b, np.nan, b))
    for row in range(4):
        known = ~(lost_a[row] | lost_b[row])
        assert found[row] == pytest.approx(spearman(a[row][known], b[row][known]))
    assert np.isnan(spearman(np.full(5, np.nan), np.arange(5.0)))
    assert np.isnan(spearman(np.array([1.0, np.nan]), np.array([1.0, 2.0])))
    assert np.isnan(ranks(np.array([1.0, np.nan, 0.0]))).tolist() == [False, True, False]


def test_rank_fidelity_of_perfect_random_and_reversed(rng):
    true = rng.standard_normal((400, 24))
    good = rank_fidelity(true * 3 + 1, true, 4)
    assert good["spearman"] == pytest.approx(1) and good["hit_best"] == pytest.approx(1)
    assert good["hit_worst"] == pytest.approx(1) and good["left_out"] == 0
    assert good["rank_best"] == pytest.approx(2.5) and good["perfect_best"] == 2.5
    assert good["rank_worst"] == pytest.approx(22.5) and good["perfect_worst"] == 22.5
    blind = rank_fidelity(rng.standard_normal(true.shape), true, 4)
    assert abs(blind["spearman"]) < 0.05 and blind["hit_best"] == pytest.approx(1 / 6, abs=0.05)
    assert blind["rank_best"] == pytest.approx(blind["random"], abs=0.8)
    assert rank_fidelity(-true, true, 4)["spearman"] == pytest.approx(-1)
    assert rank_fidelity(-true, true, 4)["hit_best"] == 0
    for k in (0, 25):
        with pytest.raises(ShapeError, match=f"k is {k}"):
            rank_fidelity(true, true, k)


def test_rank_fidelity_by_counting(rng):
    """With ties: the mean over all ways to break the proxy's; a pick that shares the last true place hits."""
    proxy, true = rng.integers(0, 3, (2, 6)).astype(float)
    true[0] = true.max() + 1  # not constant
    k, n, found = 2, 6, {"hit_best": [], "hit_worst": [], "rank_best": [], "rank_worst": []}
    true_rank = n + 1 - ranks(true)
    for order in itertools.permutations(range(n)):
        for end, sign in (("best", -1), ("worst", 1)):
            picks = sorted(order, key=lambda i, sign=sign: sign * proxy[i])[:k]  # stable: ties by `order`
            edge = sorted(sign * true)[k - 1]
            found[f"hit_{end}"].append(np.mean([sign * true[i] <= edge for i in picks]))
            found[f"rank_{end}"].append(np.mean(true_rank[picks]))
    got = rank_fidelity(proxy[None], true[None], k)
    for name, values in found.items():
        assert got[name] == pytest.approx(np.mean(values)), name


def test_rank_fidelity_of_constant_and_lost_rewards(rng):
    true = rng.standard_normal((30, 12))
    flat = rank_fidelity(np.zeros((30, 12)), true, 3)  # a proxy that sees nothing is chance, exactly
    assert np.isnan(flat["spearman"]) and flat["hit_best"] == pytest.approx(0.25)
    assert flat["rank_best"] == flat["rank_worst"] == pytest.approx(flat["random"])
    some = true.copy()
    some[:10] = 1.0  # prompts of which nothing can be ranked are left out
    assert rank_fidelity(true, some, 3)["hit_best"] == rank_fidelity(true[10:], some[10:], 3)["hit_best"] == 1
    nothing = rank_fidelity(true, np.ones((30, 12)), 3)
    assert np.isnan(nothing["hit_best"]) and np.isnan(nothing["rank_worst"])
    proxy, lost = true.copy(), rng.random((30, 12)) < 0.3
    lost[:, :6] = False
    proxy[lost] = np.nan
    got = rank_fidelity(proxy, true, 3)
    assert got["left_out"] == lost.sum() and got["hit_best"] == pytest.approx(1) == got["spearman"]
    assert got["rank_best"] == pytest.approx(2) and got["perfect_worst"] < 11
    proxy[3] = np.nan  # a prompt of which nothing is left
    assert rank_fidelity(proxy, true, 3)["hit_best"] == pytest.approx(1)
    empty = rank_fidelity(np.full((2, 4), np.nan), np.zeros((2, 4)), 1)
    assert np.isnan(empty["spearman"]) and np.isnan(empty["random"]) and empty["left_out"] == 8
