"""Exponential moving average of the parameters: what is sampled from is the average, not the last step."""

from __future__ import annotations

import numpy as np


class EMA:
    """Average of one flat float32 parameter buffer: avg <- d avg + (1 - d) p after every step.

    d = min(decay, (1 + n) / (10 + n)) in the n-th update, so that a short run does not average over its
    random start (the warm-up of TensorFlow's ExponentialMovingAverage with ``num_updates``).

    >>> ema = EMA(np.zeros(2, np.float32), decay=0.9)
    >>> ema.update(np.ones(2, np.float32), step=1000)
    >>> [round(float(v), 3) for v in ema.average]
    [0.1, 0.1]
    """

    def __init__(self, parameters: np.ndarray, decay: float):
        self.average, self.decay = parameters.copy(), float(decay)
        self._difference = np.empty_like(self.average)

    def update(self, parameters: np.ndarray, step: int) -> None:
        """Move the average towards `parameters` after update number `step` (from 0)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        np.subtract(parameters, self.average, out=self._difference)
        self._difference *= np.float32(1 - decay)
        self.average += self._difference
