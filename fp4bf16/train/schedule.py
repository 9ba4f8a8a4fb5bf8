"""The learning rate of a run, step after step."""

from __future__ import annotations


def learning_rate(step: int, steps: int, lr: float, decay: float) -> float:
    """Constant, then falling linearly to 0 over the last `decay` share of the steps.

    >>> [learning_rate(s, 10, 1.0, 0.4) for s in (0, 5, 6, 8)]
    [1.0, 1.0, 1.0, 0.5]
    """
    left = steps * decay
    return lr * min(1.0, (steps - step) / left) if left else lr
