"""How often calls with ``threshold=`` were certified and redone; `certify.fallbacks` is this process's."""

from __future__ import annotations

import threading
from collections import Counter

from . import device
from .backends import cuda_math
from .device import DeviceArray

__all__ = ["Fallbacks", "fallbacks"]


class Fallbacks:
    """How often calls with ``threshold=`` were certified and how often redone, by operation, in this process.

    Attributes: calls, redone: {"matmul" | "linear" | "conv2d": number}. What a GPU decided is counted there,
    replays of graphs included, and fetched when asked for, which waits.
    """

    def __init__(self) -> None:
        self._host, self._lock = (Counter(), Counter()), threading.Lock()
        self._device: dict[tuple[str, str, int], DeviceArray] = {}

    def count(self, op: str, redone: bool) -> None:
        with self._lock:
            self._host[0][op] += 1
            self._host[1][op] += redone

    def counter(self, op: str, like: DeviceArray, stream: int) -> DeviceArray | None:
        """(calls, redone) of `op`, (2,) int32 on like's device, for a kernel to add to; None where a capture
        would have to make it, whose replays would begin with zeros again.
        """
        key = op, like.framework, like.device
        with self._lock:
            if key not in self._device and not device.capturing(like, stream):
                self._device[key] = device.full((2,), 0, "int32", like, "counts")
            return self._device.get(key)

    def _total(self, which: int) -> Counter:
        with self._lock:
            total, known = Counter(self._host[which]), dict(self._device)
        for (op, *_), counts in known.items():
            found = int(device.to_host(counts)[which])
            if found or op in total or int(device.to_host(counts)[0]):
                total[op] += found
        return total

    @property
    def calls(self) -> Counter:
        return self._total(0)

    @property
    def redone(self) -> Counter:
        return self._total(1)

    def reset(self) -> None:
        with self._lock:
            for counts in self._host:
                counts.clear()
            for counts in self._device.values():  # which graphs may hold
                cuda_math.of(counts).raw(counts)[...] = 0


fallbacks = Fallbacks()
