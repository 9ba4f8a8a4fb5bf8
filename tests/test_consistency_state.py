"""What a `Constraint` gives a checkpoint, and what it refuses to take up from one."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

import fp4bf16 as fb
from fp4bf16 import nn
from fp4bf16.consistency import Constraint
from fp4bf16.errors import ConfigError


def layer(rng):
    made = nn.Linear(48, 20, seed=int(rng.integers(1 << 30)))
    made.apply_route({"*": "fp4"})
    return made


def test_state_holds_what_json_cannot(rng):
    constraint = Constraint(limit=2.0)
    constraint.begin(0)
    certificate = fb.Certificate(math.inf, 0.0, terms={"product": math.inf, "x": 1.0, "w": math.nan})
    constraint.product(layer(rng), None, nn.Variable(np.ones((2, 2), np.float32)), None, certificate)
    text = json.dumps(constraint.state(), allow_nan=False)
    other = Constraint(limit=2.0)
    other.restore(json.loads(text))
    assert other.violations().keys() == constraint.violations().keys() == {".weight"}


@pytest.mark.parametrize(
    "state", [{}, None, {"held": 3}, {"held": {"a": [1]}, "averages": {}}, {"held": {}, "averages": {"a": 1}}]
)
def test_a_foreign_state_is_refused(state):
    with pytest.raises(ConfigError, match="Constraint: the state lacks"):
        Constraint(1.0).restore(state)


@pytest.mark.parametrize(
    "change",
    [
        {"step": "5"}, {"step": 1.5}, {"step": True}, {"seen": {"a": [1.0]}}, {"seen": {"a": [1, 2, 3, 4]}},
        {"averages": {"a": {"product": [1.0, -1]}}}, {"averages": {"a": {"product": ["nan", 7]}}},
        {"averages": {"a": {"product": [-1.0, 7]}}}, {"averages": {"a": {"product": [1.0, 7.5]}}},
        {"averages": {"a": {"product": [1.0]}}}, {"refused": [["a", "b"]]}, {"refused": ""}, {"held": []},
        {"held": {"a": [1.5, "x"]}}, {"held": {"a": [math.inf, "x"]}}, {"ratios": {"a": None}},
    ],
)  # fmt: skip
def test_a_spoilt_state_is_refused_at_once_and_changes_nothing(rng, change):
    constraint = Constraint(limit=2.0)
    constraint.begin(3)
    constraint.punish(3, {"layer": "reason"})
    state = json.loads(json.dumps(constraint.state()))
    other = Constraint(limit=2.0)
    with pytest.raises(ConfigError, match="Constraint: the state lacks"):
        other.restore({**state, **change})
    assert other.state() == Constraint(limit=2.0).state()
    other.restore(state)
    assert other.held(4) == {"layer": "reason"}
