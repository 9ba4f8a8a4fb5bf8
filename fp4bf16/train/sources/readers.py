"""What every kind of set offers to the streams: samples one after the other, or by number.

A set is read in one of two ways. An `Index` knows all its samples by number (folders, tables, the emoji).
`Shards` are units (tar files, row groups of parquet files) that are read from front to back, because
jumping about in them is slow; a sample's place in its unit is remembered, so that it can be read again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from .counts import Counts

Blob = bytes | Path | np.ndarray


class Record(NamedTuple):
    """One sample, not decoded yet.

    caption: not empty; blobs: a picture, or the chosen and the rejected one; place: where it stands in its
    unit; after: where the unit goes on behind it.
    """

    caption: str
    blobs: tuple[Blob, ...]
    place: int = 0
    after: int = 0


class Reader(Protocol):
    """Common to both kinds."""

    noun: str  # what the samples are called in a summary
    looked_for: str  # what a good sample consists of, for messages
    faults: dict[str, int]  # what was wrong with files when the set was opened

    def identity(self) -> dict[str, Any]:
        """What tells this set from one whose files have changed."""

    def captions(self, counts: Counts) -> Iterator[str]:
        """All captions, in the order of the files, without reading pictures."""

    def role(self, caption: str) -> str:
        """The part of a run that may see this caption."""


class Index(Reader, Protocol):
    """A set whose samples have numbers."""

    def __len__(self) -> int: ...

    def record(self, number: int, counts: Counts) -> Record | None:
        """A sample; None, and a count, when it is to be left out."""


class Shards(Reader, Protocol):
    """A set of units that are read from front to back."""

    units: int

    def records(self, unit: int, start: int, counts: Counts) -> Iterator[Record]:
        """The samples of a unit from `start` on (0, or a record's `after`)."""

    def fetch(self, unit: int, places: Sequence[int]) -> Iterator[Record]:
        """The samples at these places, in any order; one that is not there is left out."""
