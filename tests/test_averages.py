"""Moving averages: their weights, their states, and what is no state."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fp4bf16.averages import Average, Averages
from fp4bf16.errors import ConfigError


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 0.999])
def test_each_value_counts_decay_times_the_next(decay, rng):
    average, values = Average(decay), rng.standard_normal(30)
    assert average.value is None
    for i, value in enumerate(values):
        weights = decay ** np.arange(i, -1, -1, dtype=float)
        # Sums of 30 numbers near 1, divided by 1 - decay^n, which is exact to 2^-53 / (1 - decay)
        expected = np.average(values[: i + 1], weights=weights)
        assert average.update(float(value)) == pytest.approx(expected, rel=1e-9, abs=1e-11)
    assert average.count == 30


def test_a_state_goes_on_bit_for_bit(rng):
    average, rows = Average(0.8), Averages("here", 0.8, 2)
    for _ in range(7):
        average.update(float(rng.standard_normal()))
        rows.add("a", rng.standard_normal(2).tolist())
    other, others = Average.of(0.8, *json.loads(json.dumps(average.state()))), Averages("here", 0.8, 2)
    others.restore(json.loads(json.dumps(rows.state())))
    x, row = float(rng.standard_normal()), rng.standard_normal(2).tolist()
    assert other.update(x) == average.update(x)
    assert others.add("a", row) == rows.add("a", row) and others.means("a") == rows.means("a")


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.8, 0.9, 0.999])
def test_states_of_earlier_versions_go_on(decay, rng):
    """[total, weight], the weight summed as the total is: after no value, a few, and so many that it is 1."""
    average, weight = Average(decay), 0.0
    for n in range(1201):
        if n < 40 or n % 100 == 0:
            total, old = json.loads(json.dumps([average.total, weight]))
            other = Average.of(decay, total, old)
            assert other.count == n if 1 - weight > 1e-6 else decay**other.count < 1e-5
            x = float(rng.standard_normal())
            same = Average(decay, average.total, average.count)
            assert other.update(x) == pytest.approx(same.update(x), rel=1e-12, abs=1e-12)
            rows = Averages("here", decay, 2)
            rows.restore({"sums": {"a": [total, 2 * total, old]} if n else {}, "skipped": {"a": 1}})
            assert not n or rows.means("a") == pytest.approx([average.value, 2 * average.value], rel=1e-12)
            assert rows.skipped == {"a": 1}
        average.update(float(rng.standard_normal()))
        weight = decay * weight + (1.0 - decay)


@pytest.mark.parametrize("state", [
    (1.0, -1), (1.0, 2.5), (1.0, True), (1.0, 0.6), (1.0, -0.1), (1.0, np.nan), ("nan", 3), (np.inf, 3),
    (None, 3), (np.nan, 0.1),
])  # fmt: skip
def test_what_is_no_state_is_refused(state):
    with pytest.raises((ValueError, TypeError)):
        Average.of(0.9, *state)


def test_rows_of_another_length_are_refused():
    with pytest.raises(ConfigError, match="has 2 numbers instead of 3"):
        Averages("here", 0.8, 2).restore({"sums": {"a": [1.0, 2]}, "skipped": {}})
