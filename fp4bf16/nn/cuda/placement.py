"""Where the arrays of a function lie in one block of memory: a run of it shows when it takes and frees each.

A pool that sees one request at a time leaves holes: of a training step a quarter of what lives at once. With
the whole run known, the large arrays are placed first and the small ones fill the gaps ("greedy by size",
Pisarchyk and Lee 2020, arXiv:2001.03288), which needs little more than what lives at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

ALIGNMENT = 512  # bytes, as CuPy's pool


class Span:
    """One array: the bytes that it takes, the times between which it lives, where it lies in the block."""

    __slots__ = ("size", "born", "died", "offset")

    def __init__(self, size: int, born: int):
        self.size, self.born, self.died, self.offset = size, born, -1, 0

    @property
    def end(self) -> int:
        return self.offset + self.size


def rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Trace:
    """What a run takes and frees, in order. Time counts these events."""

    def __init__(self):
        self._spans: list[Span] = []
        self._time = 0
        self._returned: int | None = None

    def take(self, size: int) -> Span:
        self._time += 1
        self._spans.append(Span(rounded(size), self._time))
        return self._spans[-1]

    def free(self, span: Span) -> None:
        self._time += 1
        span.died = self._time

    def returned(self) -> None:
        """The function returned: what lives still is of its result, or was made to stay."""
        self._time += 1
        self._returned = self._time

    def again(self) -> list[Span]:
        """What another run will take, in order: all but what lives still, which was made to stay."""
        return [s for s in self._spans if s.died >= 0]

    def inner(self) -> list[Span]:
        """The arrays that were freed before the function returned."""
        return [s for s in self._spans if s.died >= 0 and (self._returned is None or s.died < self._returned)]


def live_peak(spans: Iterable[Span]) -> int:
    """The most bytes that live at once: no block can be smaller."""
    events = [e for s in spans for e in ((s.born, s.size), (s.died, -s.size))]
    live = peak = 0
    for _, size in sorted(events):
        live += size
        peak = max(peak, live)
    return peak


def _placed(spans: Sequence[Span]) -> tuple[int, np.ndarray]:
    """Each of `spans` in turn in the least gap that holds it, between those placed before that live when it
    does: (bytes of the block, offsets).
    """
    born, died, size = (np.array([getattr(s, n) for s in spans], np.int64) for n in ("born", "died", "size"))
    offset, total = np.zeros(len(spans), np.int64), 0
    for i in range(len(spans)):
        beside = np.flatnonzero((born[:i] < died[i]) & (died[:i] > born[i]))
        beside = beside[np.argsort(offset[beside], kind="stable")]
        gap = np.concatenate(([0], np.maximum.accumulate(offset[beside] + size[beside])))
        room = offset[beside] - gap[:-1]
        held = np.flatnonzero(room >= size[i])
        offset[i] = gap[held[np.argmin(room[held])]] if held.size else gap[-1]
        total = max(total, int(offset[i] + size[i]))
    return total, offset


_ORDERS: tuple[Callable[[Span], tuple], ...] = (
    lambda s: (-s.size, s.born),
    lambda s: (-s.size * (s.died - s.born), s.born),
    lambda s: (s.born - s.died, -s.size),
)


def arrange(spans: Sequence[Span]) -> int:
    """Give every span its offset, no two that live at once overlapping. Returns the block's bytes."""
    best, least = None, live_peak(spans)
    for order in _ORDERS:
        ordered = sorted(spans, key=order)
        total, offsets = _placed(ordered)
        if best is None or total < best[0]:
            best = total, ordered, offsets
        if total == least:
            break
    total, ordered, offsets = best
    for span, offset in zip(ordered, offsets.tolist(), strict=True):
        span.offset = offset
    return total


class Placement:
    """Places for another run of the function: the n-th array of a size goes where the n-th of that size lay.
    None says that it has no place here: it is a result (which counts all the same, or it would keep for good
    the place of an intermediate array of its size), the place is taken, or there were fewer such arrays.
    """

    def __init__(self, trace: Trace):
        inner = trace.inner()
        self.size = arrange(inner) if inner else 0
        self._places: dict[int, deque[Span | None]] = {}
        self._live: set[Span] = set()
        placed = set(inner)
        for span in trace.again():
            self._places.setdefault(span.size, deque()).append(span if span in placed else None)

    def take(self, size: int) -> Span | None:
        places = self._places.get(rounded(size))
        if not places:
            return None
        span = places.popleft()
        if span is None or any(span.offset < other.end and other.offset < span.end for other in self._live):
            return None
        self._live.add(span)
        return span

    def free(self, span: Span) -> None:
        self._live.discard(span)
