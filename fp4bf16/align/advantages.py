"""Advantages: how much better a picture is than those of its prompt, in units of the spread of all."""

from __future__ import annotations

import math

import numpy as np

from ..errors import ConfigError, ShapeError

_LEAST = 1e-4  # added to the standard deviation


def advantages(labels: np.ndarray, clip: float = 5.0) -> np.ndarray:
    """(R - mean of the prompt) / (std of all + 1e-4), clipped to +-`clip`: float32 (prompts, keep).

    `labels` (prompts, keep) are the rewards of what was kept; the standard deviation is that of all kept
    pictures of all prompts, so that a prompt whose pictures are alike does not count like one where they
    differ (Sol-RL and Flow-GRPO, per-prompt statistics with a global standard deviation). A label that is not
    finite is that of a picture that is not healthy: it has advantage 0 and no part in mean and deviation.
    Prompts whose rewards are all equal, or of which one picture alone is healthy, have advantages of 0.

    Raises `ShapeError` for labels of another shape, `ConfigError` for a `clip` that is not positive.

    >>> advantages(np.array([[0.0, 2.0], [5.0, np.nan], [1.0, 1.0]]), clip=0.5).tolist()
    [[-0.5, 0.5], [0.0, 0.0], [0.0, 0.0]]
    """
    labels = np.asarray(labels, np.float64)
    if labels.ndim != 2:
        raise ShapeError(
            f"advantages: labels have shape {labels.shape}, but one row a prompt is needed; pass them as "
            f"(prompts, keep)"
        )
    if not 0 < clip < math.inf:
        raise ConfigError(
            f"advantage_clip: is {clip}, but advantages are clipped to a positive number; 5 is usual"
        )
    good = np.isfinite(labels)
    result = np.zeros(labels.shape, np.float32)
    if not good.any():
        return result
    values = np.where(good, labels, 0.0)
    mean = values.sum(1, keepdims=True) / np.maximum(good.sum(1, keepdims=True), 1)
    # of equal numbers the mean may differ in the last bit, which must not become an advantage
    high = np.where(good, labels, -np.inf).max(1, keepdims=True)
    low = np.where(good, labels, np.inf).min(1, keepdims=True)
    told = good & (high > low)
    scaled = (values - mean) / (labels[good].std() + _LEAST)
    result[told] = np.clip(scaled, -clip, clip)[told]
    return result
