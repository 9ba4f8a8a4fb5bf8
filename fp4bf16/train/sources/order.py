"""In which order samples are taken: a pure function of (seed, epoch), with a position that can be saved.

An index is taken in a random permutation. Shards are permuted, and what is read from them is shuffled in a
buffer: each draw takes one of its entries at random, and the next good sample takes the free place. The
buffer runs empty at the end of an epoch, so that an epoch gives every good sample once. With shuffle = 0 both
keep to the order of the files.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ...diffusion.noise import integers, permutation, subseed
from ..data import words_of
from ..pictures import from_bytes
from .counts import Counts, Skip, whole
from .decode import decode
from .readers import Index, Reader, Record, Shards

_BLOCK = 1024  # random words drawn at a time


class Closed(Exception):  # noqa: N818  (no error: nobody wants the samples any more)
    """The stream was closed while a sample was looked for."""


class Exhausted(Exception):  # noqa: N818  (the source makes a sentence of it)
    """An epoch without one good sample."""


class Changed(Exception):  # noqa: N818  (likewise)
    """A sample that a position remembers is not there any more."""


class Item(NamedTuple):
    """A decoded sample: its pictures, uint8 or float32 (size, size, 3) each, its caption, its epoch."""

    pictures: tuple[np.ndarray, ...]
    caption: str
    epoch: int


class Order(ABC):
    """Samples one by one, for ever. The two kinds of order derive from it.

    role, word: only captions with this role, and with this word in them; None: all.
    """

    def __init__(
        self,
        reader: Reader,
        size: int,
        seed: int,
        shuffle: int,
        role: str | None = None,
        word: str | None = None,
    ):
        self.reader, self.size, self.seed, self.shuffle = reader, size, seed, shuffle
        self.role, self.word = role, word
        self.counts = Counts(faults=dict(reader.faults))
        self.stop = threading.Event()
        self.epoch = 0
        self.given = 0  # samples of this epoch so far
        self._begin()

    def take(self) -> Item:
        """The next sample; `Exhausted` when a whole epoch has none."""
        while True:
            item = self.draw()
            if item is not None:
                self.given += 1
                return item
            if not self.given:
                raise Exhausted
            self.epoch, self.given = self.epoch + 1, 0
            self._begin()

    @abstractmethod
    def draw(self) -> Item | None:
        """The next sample of the epoch; None at its end."""

    def snapshot(self) -> dict[str, Any]:
        """The position, as JSON has it."""
        return {"epoch": self.epoch, "epoch_given": self.given, "counts": self.counts.copy().to_dict()}

    def restore(self, known: Mapping[str, Any]) -> None:
        """Take up a position; `Changed`, or a `ValueError`, `KeyError` or `TypeError` for what is none."""
        self.epoch, self.given = whole(known["epoch"]), whole(known["epoch_given"])
        self.counts = Counts.from_dict(known["counts"])
        self._begin()

    @abstractmethod
    def _begin(self) -> None:
        """Make ready for `self.epoch`."""

    def _decoded(self, record: Record) -> Item | None:
        """None when the caption is not wanted, or, with a count, when a picture cannot be used."""
        if self.stop.is_set():
            raise Closed
        caption = record.caption
        if (self.role is not None and self.reader.role(caption) != self.role) or (
            self.word is not None and self.word not in words_of(caption)
        ):
            self.counts.others += 1
            return None
        try:
            item = Item(tuple(decode(blob, self.size) for blob in record.blobs), caption, self.epoch)
        except Skip as reason:
            self.counts.skip(reason.reason)
            return None
        self.counts.read += 1
        return item

    def _permutation(self, purpose: str, n: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(n)
        return permutation(subseed(self.seed, "source", purpose), self.epoch, n)


class IndexOrder(Order):
    """A permutation of the samples' numbers. The position is how many of them were taken."""

    reader: Index

    def _begin(self) -> None:
        self._numbers = self._permutation("order", len(self.reader))
        self._position = 0

    def draw(self) -> Item | None:
        while self._position < len(self._numbers):
            record = self.reader.record(int(self._numbers[self._position]), self.counts)
            self._position += 1
            item = self._decoded(record) if record else None
            if item is not None:
                return item
        return None

    def snapshot(self) -> dict[str, Any]:
        return super().snapshot() | {"position": self._position}

    def restore(self, known: Mapping[str, Any]) -> None:
        super().restore(known)
        self._position = whole(known["position"])
        if self._position > len(self._numbers):
            raise ValueError(f"position {self._position} of {len(self._numbers)}")


class ShardOrder(Order):
    """Permuted units through a buffer of decoded pictures.

    The position is the unit that is being read (`shard`, counted in the order of the epoch), where it goes on
    (`start`), and which unit and place each entry of the buffer came from.
    """

    reader: Shards

    def _begin(self) -> None:
        self._units = self._permutation("units", self.reader.units)
        self._buffer: list[tuple[int, int, Item]] = []
        self._at(0, 0)
        self._words: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def _at(self, shard: int, start: int) -> None:
        self._shard, self._start, self._records = shard, start, None

    def draw(self) -> Item | None:
        while self._shard < len(self._units) and len(self._buffer) < max(self.shuffle, 1):
            self._read()
        if not self._buffer:
            return None
        chosen = self._random(len(self._buffer))
        item = self._buffer[chosen][2]
        self._buffer[chosen] = self._buffer[-1]
        self._buffer.pop()
        return item

    def _read(self) -> None:
        """One record more, into the buffer if it is good; or on to the next unit."""
        unit = int(self._units[self._shard])
        if self._records is None:
            self._records: Iterator[Record] | None = self.reader.records(unit, self._start, self.counts)
        record = next(self._records, None)
        if record is None:
            self._at(self._shard + 1, 0)
            return
        item = self._decoded(record)
        self._start = record.after
        if item is not None:
            self._buffer.append((unit, record.place, item))

    def _random(self, below: int) -> int:
        """A number under `below` for the draw `self.given` of the epoch."""
        block, word = divmod(self.given, _BLOCK)
        if self._words[0] != block:
            seed = subseed(self.seed, "source", "buffer", self.epoch)
            self._words = block, integers(seed, block, _BLOCK, 0, 2**32)
        return int(self._words[1][word]) * below >> 32

    def snapshot(self) -> dict[str, Any]:
        places = [[unit, place] for unit, place, _ in self._buffer]
        return super().snapshot() | {"shard": self._shard, "start": self._start, "buffer": places}

    def restore(self, known: Mapping[str, Any]) -> None:
        super().restore(known)
        shard, start = whole(known["shard"]), whole(known["start"])
        places = [(whole(unit), whole(place)) for unit, place in known["buffer"]]
        if shard > len(self._units) or any(unit >= self.reader.units for unit, _ in places):
            raise ValueError(f"shard {shard} of {len(self._units)}")
        if len(places) > max(self.shuffle, 1) or len(set(places)) < len(places):
            raise ValueError(f"{len(places)} entries in a buffer of {self.shuffle}")
        self._at(shard, start)
        found = {}
        for unit in sorted({unit for unit, _ in places}):
            for record in self.reader.fetch(unit, [p for u, p in places if u == unit]):
                counts, self.counts = self.counts, Counts()  # what is read again counts once
                item = self._decoded(record)
                self.counts = counts
                if item is not None:
                    found[unit, record.place] = item
        if len(found) < len(places):
            raise Changed
        self._buffer = [(*where, found[where]) for where in places]


def batch(items: list[Item], size: int, pictures: int) -> tuple[Any, ...]:
    """Samples as arrays: float32 (n, size, size, 3) in [-1, 1] for each of their pictures, and captions."""
    columns = []
    for column in range(pictures):
        array = np.empty((len(items), size, size, 3), np.float32)
        for row, item in zip(array, items, strict=True):
            picture = item.pictures[column]
            row[...] = from_bytes(picture) if picture.dtype == np.uint8 else picture
        columns.append(array)
    return (*columns, [item.caption for item in items])
