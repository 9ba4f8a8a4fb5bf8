"""What a reward is, and the check that every answer of one passes through.

A reward is any callable ``reward(images, prompts)``: images float32 (n, H, W, 3), RGB in [-1, 1], prompts n
strings; it returns n finite numbers, larger is better. Give it a ``name`` for messages and logs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ..errors import RewardError


@runtime_checkable
class Reward(Protocol):
    """The protocol; a plain function with this signature is one."""

    def __call__(self, images: np.ndarray, prompts: Sequence[str]) -> Any: ...


def reward_name(reward: Any) -> str:
    """How messages call `reward`: its ``name``, else its function or class name."""
    return getattr(reward, "name", None) or getattr(reward, "__name__", None) or type(reward).__name__


def _numbers(answer: Any) -> np.ndarray:
    if hasattr(answer, "detach"):  # of a PyTorch model, which may be on a GPU and want a gradient
        answer = answer.detach().cpu()
    if isinstance(answer, np.ma.MaskedArray):
        answer = answer.filled(np.nan)
    values = np.asarray(answer)
    if values.dtype.kind == "c":
        raise TypeError("complex numbers have no order")
    with np.errstate(over="ignore"):  # beyond float32: infinite, and refused as such
        return values.astype(np.float32)


def score(reward: Reward, images: np.ndarray, prompts: Sequence[str]) -> np.ndarray:
    """``reward(images, prompts)``, checked: float32 (n,).

    Raises `RewardError` when there are not as many prompts as pictures, or unless the reward returns one
    finite number a picture.

    >>> pictures = np.full((2, 4, 4, 3), 0.5, np.float32)
    >>> score(lambda images, prompts: images.mean(axis=(1, 2, 3)), pictures, ["a", "b"])
    array([0.5, 0.5], dtype=float32)
    """
    name, n = reward_name(reward), len(images)
    if len(prompts) != n:
        raise RewardError(f"reward {name}: {n} pictures but {len(prompts)} prompts; pass one a picture")
    answer = reward(images.copy(), list(prompts))  # what it does to them is its own affair
    try:
        values = _numbers(answer)
    except (TypeError, ValueError):
        raise RewardError(
            f"reward {name}: returned {type(answer).__name__}, no numbers; it must return {n} numbers"
        ) from None
    if values.shape != (n,):
        raise RewardError(
            f"reward {name}: returned shape {values.shape} for {n} pictures; it must return one number "
            "a picture"
        )
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        first = int(bad[0])
        raise RewardError(
            f"reward {name}: returned {values[first]} for picture {first} ({prompts[first]!r}), and is not "
            f"finite for {bad.size} of {n} pictures; it must return a finite number for each"
        )
    return values
