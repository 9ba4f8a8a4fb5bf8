"""Batches from a source, for ever, read ahead by one thread."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ...errors import ConfigError
from .counts import Counts
from .order import Closed, Item, Order, batch

CHUNK = 64  # samples that are read ahead at a time, at most
_CHUNK_BYTES = 8 << 20
_AHEAD = 2  # chunks that wait, beside the one in use and the one being made


Explain = Callable[[BaseException, Order], BaseException]


class Chunk(NamedTuple):
    """Samples in order, and the position behind them."""

    items: list[Item]
    after: dict[str, Any]


class Stream:
    """Shuffled samples of a source, epoch after epoch; made by `Source.stream`.

    One thread reads and decodes ahead. The sequence does not depend on it, nor on how many samples are asked
    for at a time, nor on stops: a stream that begins at a `state` goes on exactly as the one that gave it.
    Close it, or use it in a ``with``, to end the thread at once; otherwise it ends with the stream.
    """

    def __init__(self, order: Order, pictures: int, skip: int, settings: dict[str, Any], explain: Explain):
        self._settings, self._pictures = settings, pictures
        self._size, self._epoch = order.size, order.epoch
        # The position before the chunk in use, the one behind it, and how many of its items were given.
        self._before = self._after = order.snapshot()
        self._items, self._given = [], 0
        self._queue: queue.Queue[Chunk | BaseException] = queue.Queue(_AHEAD)
        self._error: BaseException | None = None
        self._closed = False
        self._stop = order.stop
        length = max(1, min(CHUNK, _CHUNK_BYTES // (3 * order.size**2 * pictures)))
        self._thread = threading.Thread(
            target=_work, args=(order, length, self._queue, explain), name="fp4bf16-source", daemon=True
        )
        # The thread holds the order, never the stream, so that a forgotten stream can go, and its thread too.
        self._finalizer = weakref.finalize(self, order.stop.set)
        self._thread.start()
        if skip:
            self._take(skip)

    def next(self, n: int) -> tuple[Any, ...]:
        """The next `n` samples: (pictures, captions), or (chosen, rejected, captions) of pairs; pictures are
        float32 (n, size, size, 3) in [-1, 1], captions a list of n strings.

        Raises `ConfigError` when the source has not one good sample; `ValueError` after `close`.
        """
        if type(n) is not int or n < 0:
            raise ConfigError(f"next: n is {n!r}, but it must be a whole number of at least 0")
        if self._closed:
            raise ValueError("next: the stream is closed; make another from its state")
        return batch(self._take(n), self._size, self._pictures)

    def state(self) -> dict[str, Any]:
        """The position behind the last sample given: a dict that JSON holds, for `Source.stream`."""
        return self._settings | self._before | {"skip": self._given}

    @property
    def counts(self) -> Counts:
        """What was read and what was left out, all epochs together, up to the end of the chunk of samples
        that was read ahead with the last one given: at most `CHUNK` samples, and the buffer, further on.
        """
        return Counts.from_dict(self._after["counts"])

    @property
    def epoch(self) -> int:
        """The epoch, from 0 on, that the last sample given belongs to."""
        return self._epoch

    def close(self) -> None:
        """End the thread. What was read ahead is dropped; `state` stays as it is."""
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)
        self._closed = True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, n: int) -> list[Item]:
        """`n` samples; nothing is taken when an error comes first."""
        taken: list[Item] = []
        # Names of its own, so that an error leaves the position where it was.
        before, after, items, given = self._before, self._after, self._items, self._given
        while len(taken) < n:
            if given == len(items):
                chunk = self._chunk()
                before, after, items, given = after, chunk.after, chunk.items, 0
            some = items[given : given + n - len(taken)]
            taken += some
            given += len(some)
        if given == len(items):  # one position has one state
            before, items, given = after, [], 0
        if taken:
            self._epoch = taken[-1].epoch
        self._before, self._after, self._items, self._given = before, after, items, given
        return taken

    def _chunk(self) -> Chunk:
        if self._error is None:
            found = self._queue.get()
            if not isinstance(found, BaseException):
                return found
            self._error = found
        raise self._error


def _work(order: Order, length: int, chunks: queue.Queue[Chunk | BaseException], explain: Explain) -> None:
    """Fill the queue until the stream is closed or an error comes up, which goes the same way."""
    while not order.stop.is_set():
        try:
            found: Chunk | BaseException = Chunk([order.take() for _ in range(length)], order.snapshot())
        except Closed:
            return
        except BaseException as error:  # it is raised where the samples are asked for
            found = explain(error, order)
        while not order.stop.is_set():
            try:
                chunks.put(found, timeout=0.1)
                break
            except queue.Full:
                continue
        if isinstance(found, BaseException):
            return


def check_skip(known: Mapping[str, Any]) -> int:
    """How many samples behind the position of a state it stands; `ValueError` for none that is one."""
    skip = known["skip"]
    if type(skip) is not int or not 0 <= skip < CHUNK:
        raise ValueError(f"skip is {skip!r}")
    return skip
