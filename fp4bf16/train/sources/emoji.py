"""The emoji pairs that ship with the package, as a set like any other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..data import ASSETS, STYLES, load_pairs, split_table
from .counts import Counts
from .readers import Record


class Emoji:
    """The pairs by style, the winner chosen (`readers.Index`); or, without a winner, all pictures of both
    styles one by one. Each caption has the role of the table that ships, not that of its hash.
    """

    looked_for = "the emoji pairs that ship with the package"

    def __init__(self, size: int, winner: str | None):
        self._pairs, self._winner = load_pairs(size), winner
        self.noun = "pairs" if winner else "pictures"
        self.faults: dict[str, int] = {}

    def role(self, caption: str) -> str:
        return split_table()[caption]

    def identity(self) -> dict[str, Any]:
        return {"files": 1, "bytes": (ASSETS / "pairs32.npz").stat().st_size, "digest": self._winner or "all"}

    def __len__(self) -> int:
        return len(self._pairs) * (1 if self._winner else len(STYLES))

    def record(self, number: int, counts: Counts) -> Record | None:
        style, row = divmod(number, len(self._pairs))
        images: tuple[np.ndarray, ...] = (self._pairs.images[style, row],)
        if self._winner:
            order = sorted(range(len(STYLES)), key=lambda i: STYLES[i] != self._winner)
            images = tuple(self._pairs.images[i, row] for i in order)
        return Record(self._pairs.captions[row], images)

    def captions(self, counts: Counts) -> Iterator[str]:
        counts.read += len(self._pairs)
        return iter(self._pairs.captions)
