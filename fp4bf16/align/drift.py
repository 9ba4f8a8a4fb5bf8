"""What keeps folded pixels together: the drift of a network's channels from the reference, and its hold.

A preference loss compares pictures with one another and does not feel what all of them share, so a shift of
all outputs alike costs nothing and grows. Where the channels are pictures folded by `phases` pixels (channel
c phases + i is colour c at pixel i), such a shift is a grid over every picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..nn.xp import namespace


def phase_drift(output: Any, reference: Any, phases: int) -> Any:
    """Mean of output - reference over all but the channels, less that over the phases: float64 (channels,).

    >>> phase_drift(np.float32([[[[3.0, 1.0]]]]), np.zeros((1, 1, 1, 2), np.float32), phases=2).tolist()
    [1.0, -1.0]
    """
    mean = (output - reference).reshape(-1, output.shape[-1]).mean(axis=0, dtype=np.float64)
    mean = mean.reshape(-1, phases)
    return (mean - mean.mean(axis=1, keepdims=True)).reshape(-1)


def hold(
    gradient: Any, output: Any, reference: Any, phases: int, weight: float, live: Any | None = None
) -> Any:
    """Adds to `gradient`, in place, that of ``weight mean(d²)``, d the `phase_drift`: sqrt(mean(d²)), 0-d.

    `gradient`, `output`, `reference` (n, ..., channels) are NumPy's or CuPy's; nothing is read back. `live`
    (n,) of zeros and ones leaves out the pictures that only fill a batch up.

    >>> g = np.zeros((1, 1, 1, 2))
    >>> float(hold(g, np.array([[[[3.0, 1.0]]]]), np.zeros((1, 1, 1, 2)), 2, weight=0.5)), g.ravel().tolist()
    (1.0, [0.5, -0.5])
    """
    xp = namespace(output)
    if live is None:
        d, share = phase_drift(output, reference, phases), 1.0
    else:
        share = live.reshape(-1, *(1,) * (output.ndim - 1)) * (len(live) / live.sum())
        rows = share.astype(output.dtype)
        d = phase_drift(output * rows, reference * rows, phases)
    if weight:
        slope = (2 * weight / output.size) * d * share
        gradient += slope.astype(gradient.dtype)
    return xp.sqrt((d * d).mean())


def packed(xp: Any, values: Sequence[Any]) -> Any:
    """0-d arrays or numbers as one float64 array. CuPy's own `stack` reads addresses from the host, which a
    replayed CUDA graph must not.

    >>> packed(np, [np.float64(0.5), 2]).tolist()
    [0.5, 2.0]
    """
    row = xp.empty(len(values), np.float64)
    for i, value in enumerate(values):
        row[i] = value
    return row
