"""A PI rule: the consistency that is measured moves the budget that the router may spend."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from .decision import Average

#: The budget is never moved by more than this factor, up or down.
WIDEST = 8.0
_PROPORTIONAL, _INTEGRAL = 0.5, 0.1  # gains, in octaves of the budget for an octave of the consistency
_LEAK = 0.9  # share of the integral that a sampled step without a measurement leaves


class Feedback:
    """factor = 2^(P e + I sum of e), e = log2(target / consistency), within [1/8, 8].

    A discrete PI rule on logarithms (Åström & Hägglund 1995, ch. 3): a network that lies twice as close to
    BF16 as `target` asks for gets more budget, one that lies farther away less. e is of a moving average, so
    that the trend moves the budget and single steps do not. Anti-windup: what the limits cut off is taken
    out of the sum at once, so that the factor leaves a limit with the first error of the other sign. While
    nothing is measured (no layer is on FP4) the sum decays, so that a budget that has emptied the route comes
    back.

    >>> feedback = Feedback(target=0.02)
    >>> feedback.update(0.02), feedback.update(0.08) < 1, Feedback(0.02).update(1e-9)
    (1.0, True, 8.0)
    """

    def __init__(self, target: float, moves: bool = True, memory: float = 0.8):
        if not 0 < target < math.inf:
            raise ConfigError(f"loop.target: is {target}, but a positive finite number is needed, e.g. 0.02")
        self.target, self.moves = float(target), moves
        self._trend, self._sum, self._exponent = Average(memory), 0.0, 0.0

    @property
    def factor(self) -> float:
        """What the budget is multiplied with; 1 where ``moves`` is False."""
        return 2.0**self._exponent if self.moves else 1.0

    @property
    def trend(self) -> float | None:
        """Moving average of the consistency, None before the first."""
        return self._trend.value

    def update(self, consistency: float | None) -> float:
        """Take in what a sampled step measured, None for nothing; returns the new factor. What is not finite
        counts as the farthest.
        """
        most = math.log2(WIDEST)
        if consistency is None:
            self._sum *= _LEAK
            self._exponent = min(most, max(-most, self._sum))
            return self.factor
        if not math.isfinite(consistency):
            consistency = self.target * WIDEST**4
        value = self._trend.update(consistency)
        error = math.log2(self.target / value) if value > 0 else 4 * most
        wanted = _PROPORTIONAL * error + self._sum + _INTEGRAL * error
        self._exponent = min(most, max(-most, wanted))
        if wanted == self._exponent or error * self._sum < 0:  # not saturated, or on its way back
            self._sum += _INTEGRAL * error
        self._sum = min(most, max(-most, self._sum))
        return self.factor

    def state(self) -> dict[str, Any]:
        """For a checkpoint, JSON-able; `restore` takes it back bit for bit."""
        return {
            "trend": [self._trend.total, self._trend.weight], "sum": self._sum, "exponent": self._exponent,
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave."""
        self._trend = Average(self._trend.memory, *map(float, state["trend"]))
        self._sum, self._exponent = float(state["sum"]), float(state["exponent"])
