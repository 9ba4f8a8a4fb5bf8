"""The nearest training picture of each sample: does a model copy what it was trained on?

A distance alone does not say so, as simple pictures resemble each other. So the samples' distances stand
beside those of real pictures that the model was never trained on, and a near-copy is a sample that lies
closer to a training picture than 95 % of those do.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import NonFiniteError, ShapeError
from .intervals import share_interval

NEAR = 5  # per cent: the quantile of the held-out pictures' distances under which a sample is a near-copy
_ENTRIES = 1 << 22  # distances in memory at a time


class Nearest:
    """Nearest rows of `reference` (m, d) in the Euclidean distance, divided by sqrt(d): a root mean square.

    >>> nearest = Nearest(np.array([[0.0, 0.0], [3.0, 4.0]]))
    >>> distance, index = nearest(np.array([[3.0, 3.0]]))
    >>> round(float(distance[0]), 4), int(index[0])
    (0.7071, 1)
    """

    def __init__(self, reference: np.ndarray):
        self.reference = _rows("reference", reference)
        if not len(self.reference):
            raise ShapeError("reference: holds no picture; pass at least one")
        self._half = (self.reference**2).sum(axis=1) / 2

    def __call__(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(distance float64 (n,), index int64 (n,)) of the nearest row of the reference.

        Raises `ShapeError` for rows of another length, `NonFiniteError`.
        """
        values = _rows("values", values)
        m, d = self.reference.shape
        if values.shape[1] != d:
            raise ShapeError(f"values: have {values.shape[1]} numbers a picture, but the reference has {d}")
        index, step = np.empty(len(values), np.int64), max(1, _ENTRIES // m)
        for start in range(0, len(values), step):
            some = slice(start, start + step)
            index[some] = (self._half - values[some] @ self.reference.T).argmin(axis=1)
        # Once more from the difference, for the distance of a copy to be 0 and not what rounding leaves.
        return np.sqrt(((values - self.reference[index]) ** 2).mean(axis=1)), index


def _rows(name: str, values: np.ndarray) -> np.ndarray:
    """(n, everything else), float64 and finite."""
    values = np.asarray(values)
    if values.ndim < 2:
        raise ShapeError(f"{name}: shape is {values.shape}; pass one row a picture")
    values = values.reshape(len(values), int(np.prod(values.shape[1:]))).astype(np.float64)
    if not np.isfinite(values).all():
        raise NonFiniteError(f"{name}: hold NaN or Inf; leave out the pictures that do")
    return values


def compare(samples: np.ndarray, heldout: np.ndarray) -> dict[str, Any]:
    """What distances to the nearest training picture say of `samples` (n,), beside those of `heldout` (m,).

    Returns the medians of both, the `limit` (the `NEAR` per cent point of the held-out pictures) and the
    share of samples under it with its Wilson interval; without held-out pictures the last two are None. Of
    real pictures, `NEAR` per cent lie under the limit, so a share far above it means copying.

    >>> found = compare(np.array([0.0, 0.0, 2.0, 2.0]), np.linspace(1, 2, 101))
    >>> found["near_copies"]["value"], found["median"], found["heldout_median"]
    (0.5, 1.0, 1.5)
    """
    found: dict[str, Any] = {
        "median": float(np.median(samples)) if len(samples) else None,
        "smallest": float(samples.min()) if len(samples) else None,
        "heldout_median": None,
        "limit": None,
        "near_copies": None,
        "n": len(samples),
        "heldout_n": len(heldout),
    }
    if not len(heldout) or not len(samples):
        return found
    limit = float(np.percentile(heldout, NEAR))
    share = share_interval(int((samples < limit).sum()), len(samples)).as_dict()
    return found | {"heldout_median": float(np.median(heldout)), "limit": limit, "near_copies": share}
