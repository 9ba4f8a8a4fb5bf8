"""The PI rule from the measured consistency to the router's budget."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from fp4bf16.errors import ConfigError
from fp4bf16.routing import Feedback
from fp4bf16.routing.feedback import WIDEST


def test_feedback_takes_from_the_budget_gives_back_and_stays_within_its_limits(rng):
    target = float(rng.uniform(1e-4, 1))
    assert Feedback(target).update(target) == pytest.approx(1.0, abs=1e-12)
    far = Feedback(target)
    down = [far.update(target * 3) for _ in range(200)]
    assert down == sorted(down, reverse=True) and down[0] < 1 and down[-1] == 1 / WIDEST
    up = [far.update(target / 3) for _ in range(200)]
    first = up.index(min(up))  # the trend has to come down before the budget goes up
    assert up[first:] == sorted(up[first:]) and first < 10 and up[-1] == 1
    # No wind-up: however long it was at its limit, what reverses it takes no longer
    once, long = Feedback(target), Feedback(target)
    for feedback, count in ((once, 60), (long, 2000)):
        for _ in range(count):
            feedback.update(target * 3)
    back = [[feedback.update(target / 3) for _ in range(50)] for feedback in (once, long)]
    assert back[0] == pytest.approx(back[1], rel=1e-3)  # the trend of 60 steps is 0.8^60 away
    assert back[1][-1] > 1 / WIDEST


def test_feedback_leaves_the_users_budget_where_the_network_is_close_enough(rng):
    """However long: the distance is set by the format, and a sum of its errors has no end."""
    feedback = Feedback(0.02)
    values = rng.uniform(0.0009, 0.0165, 3000)  # of layers on FP4, trained and not
    assert {feedback.update(float(v)) for v in values} == {1.0}
    assert feedback.update(1.0) < 1  # and it is as ready as at first
    assert feedback.factor == pytest.approx(_after(0.02, values[-200:].tolist() + [1.0]), rel=1e-9)


def _after(target: float, values: list[float]) -> float:
    feedback = Feedback(target)
    return [feedback.update(v) for v in values][-1]


def test_feedback_forgets_where_nothing_is_measured_and_takes_what_is_not_finite_as_far():
    feedback = Feedback(0.01)
    for _ in range(50):
        feedback.update(1.0)
    assert feedback.factor == 1 / WIDEST
    for _ in range(100):
        feedback.update(None)
    assert 0.99 < feedback.factor <= 1
    for bad in (math.inf, math.nan):
        assert Feedback(0.01).update(bad) == 1 / WIDEST
    assert Feedback(0.01).update(0.0) == 1
    assert Feedback(0.01, moves=False).update(5.0) == 1.0
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match=r"loop\.target"):
            Feedback(bad)


def test_feedback_resumes_to_the_bit(rng):
    values = np.exp(rng.normal(-4, 2, 40)).tolist()
    whole, first = Feedback(0.01), Feedback(0.01)
    expected = [whole.update(v) for v in values]
    for v in values[:17]:
        first.update(v)
    second = Feedback(0.01)
    second.restore(json.loads(json.dumps(first.state())))
    assert [second.update(v) for v in values[17:]] == expected[17:]
