"""Intervals of shares: known values, their equation, coverage, bad input; rates of a pool."""

from __future__ import annotations

import math

import pytest

from fp4bf16.align.shares import Z95, rates, wilson
from fp4bf16.errors import ShapeError


@pytest.mark.parametrize(
    "hits, n, low, high",
    # Roots of (p - share)^2 = z^2 p (1 - p) / n, which is how Wilson defines them.
    [(0, 10, 0.0, 0.27754), (10, 10, 0.72246, 1.0), (5, 10, 0.23659, 0.76341), (81, 263, 0.25529, 0.36620),
     (10_000, 10_000, 0.999616, 1.0)],
)  # fmt: skip
def test_known_shares(hits, n, low, high):
    assert wilson(hits, n) == pytest.approx((low, high), abs=2e-5)
    assert hits or wilson(hits, n)[0] == 0.0
    assert hits < n or wilson(hits, n)[1] == 1.0


def test_the_interval_is_that_of_its_equation(rng):
    """Its ends are the shares from which the seen one lies just z standard deviations away."""
    for _ in range(50):
        n = int(rng.integers(1, 20_000))
        k, z = int(rng.integers(0, n + 1)), float(rng.choice([Z95, 1.0, 3.0]))
        low, high = wilson(k, n, z)
        assert 0 <= low <= k / n <= high <= 1
        for end, edge in ((low, 0), (high, n)):
            if k != edge:
                assert abs(k / n - end) == pytest.approx(z * math.sqrt(end * (1 - end) / n), rel=1e-5)


@pytest.mark.parametrize("n, p", [(30, 0.02), (30, 0.5), (200, 0.999)])
def test_it_covers(n, p):
    """The exact coverage, summed over all numbers of hits."""
    covered = 0.0
    for hits in range(n + 1):
        low, high = wilson(hits, n)
        if low <= p <= high:
            covered += math.comb(n, hits) * p**hits * (1 - p) ** (n - hits)
    assert 0.92 < covered <= 1


def test_nothing_and_nonsense():
    assert all(math.isnan(v) for v in wilson(0, 0))
    for hits, n in ((-1, 3), (4, 3), (1, 0), (math.nan, 3)):
        with pytest.raises(ShapeError, match=f"{hits} hits of {n}; pass hits from 0 to n"):
            wilson(hits, n)


def test_rates_of_first_tries_and_after_retries():
    counts = {"rollouts": 1000, "unhealthy": 30, "nonfinite_rewards": 20, "retried": 61, "lost": 4}
    found = rates(counts)
    assert found["first_try_rate"] == 0.95 and found["success_rate"] == 0.996
    assert (found["success_low"], found["success_high"]) == wilson(996, 1000)
    assert (found["first_try_low"], found["first_try_high"]) == wilson(950, 1000)
    assert all(math.isnan(v) for v in rates(dict.fromkeys(counts, 0)).values())
