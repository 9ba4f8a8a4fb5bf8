"""A PI rule: the consistency that is measured moves the budget that the router may spend."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..averages import Average
from ..errors import ConfigError

#: The budget is never taken to less than this part of what the user gave, and never to more than all of it.
WIDEST = 8.0
_PROPORTIONAL, _INTEGRAL = 0.5, 0.1  # gains, in octaves of the budget for an octave of the consistency
_LEAK = 0.9  # share of the integral that a sampled step without a measurement leaves


class Feedback:
    """factor = 2^(P e + I sum of e), e = log2(target / consistency), within [1/8, 1].

    A discrete PI rule on logarithms (Åström & Hägglund 1995, ch. 3): while the network lies farther from BF16
    than `target`, its budget becomes less; when it lies closer again it gets back what it had. e is of a
    moving average, so that the trend moves the budget and single steps do not.

    The budget that the user gave is the most: how far a product is from BF16 is set by the format (squares of
    0.016 for operands of a normal distribution, 0.001 to 0.015 in the layers of trained networks) and hardly
    by the budget, so that the sum of errors of a network that lies closer would carry it to any limit above.

    Anti-windup: what the limits cut off is not added to the sum, so that the factor leaves a limit with the
    first trend on the other side. While nothing is measured (no layer is on FP4) the sum decays, so that a
    budget that has emptied the route comes back.

    >>> feedback = Feedback(target=0.02)
    >>> feedback.update(0.005), feedback.update(0.64) < 1, Feedback(0.02).update(1e9)
    (1.0, True, 0.125)
    """

    def __init__(self, target: float, moves: bool = True, decay: float = 0.8):
        if not 0 < target < math.inf:
            raise ConfigError(f"loop.target: is {target}, but a positive finite number is needed, e.g. 0.02")
        self.target, self.moves = float(target), moves
        self._trend, self._sum, self._exponent = Average(decay), 0.0, 0.0

    @property
    def factor(self) -> float:
        """What the budget is multiplied with, at most 1; 1 where ``moves`` is False."""
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
            self._exponent = self._sum
            return self.factor
        if not math.isfinite(consistency):
            consistency = self.target * WIDEST**2
        value = self._trend.update(consistency)
        error = math.log2(self.target / value) if value > 0 else 4 * most
        wanted = _PROPORTIONAL * error + self._sum + _INTEGRAL * error
        self._exponent = min(0.0, max(-most, wanted))
        if wanted >= -most or error > 0:  # not at the lower limit, or on its way back
            self._sum = min(0.0, max(-most, self._sum + _INTEGRAL * error))
        return self.factor

    def state(self) -> dict[str, Any]:
        """For a checkpoint, JSON-able; `restore` takes it back bit for bit."""
        return {"trend": self._trend.state(), "sum": self._sum, "exponent": self._exponent}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave."""
        self._trend = Average.of(self._trend.decay, *state["trend"])
        self._sum, self._exponent = float(state["sum"]), float(state["exponent"])
