"""Which of the host's memory counts as the device's, and until when: an emulated launch is given no other.

On a GPU an array that is dropped between taking its address and the launch leaves a pointer to memory that is
another's by then. In host memory such a kernel would mostly find its old bytes there and be right.
"""

from __future__ import annotations

import bisect
import re
import weakref
from functools import cache

import numpy as np


class Live:
    """The memory of arrays that somebody has; arrays are known weakly."""

    def __init__(self):
        self._ranges: dict[int, tuple[int, int, weakref.ref]] = {}
        self._sorted: list[tuple[int, int, int]] = []  # (low, high, key) of each

    def add(self, array: np.ndarray) -> None:
        """The memory that `array` is a view of, as long as any view of it lives."""
        while isinstance(array.base, np.ndarray):
            array = array.base
        key, known, order = id(array), self._ranges, self._sorted
        if key in known:
            return
        low, high = np.lib.array_utils.byte_bounds(array)
        place = low, max(high, low + 1), key

        def forget(_):
            del known[key]
            del order[bisect.bisect_left(order, place)]

        known[key] = *place[:2], weakref.ref(array, forget)
        bisect.insort(order, place)

    def holds(self, address: int) -> bool:
        near = bisect.bisect_left(self._sorted, (address + 1,)) - 1  # the last that begins there or before
        if near >= 0 and address < self._sorted[near][1]:
            return True
        return any(low <= address < high for low, high, _ in self._sorted)  # foreign memory may overlap


LIVE = Live()


@cache
def _host_parameters(text: str) -> dict[str, set[int]]:
    """Of each function of the header the places of its arrays of a fixed length, which lie on the host."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    found = re.findall(r"\bfp4bf16_(\w+)\(([^)]*)\);", text)
    return {name: {i for i, p in enumerate(ps.split(",")) if "[" in p} for name, ps in found}


@cache
def _pointers(struct) -> list[tuple[str, bool]]:
    """Of a struct the fields that are pointers, and whether there are several in an array."""
    fields = [(name, described.type) for name, described in struct.fields]
    several = {name for name, kind in fields if kind.kind == "array" and kind.item.kind == "pointer"}
    return [(name, name in several) for name, kind in fields if kind.kind == "pointer" or name in several]


def check(ffi, header: str, name: str, arguments: tuple) -> None:
    """AssertionError unless every pointer that a launch of `name` is given lies in memory that lives."""
    host, word = _host_parameters(header)[name], ffi.typeof("uintptr_t")

    def lives(where: str, pointer) -> None:
        address = int(ffi.cast(word, pointer))
        assert not address or LIVE.holds(address), f"{where} points to memory that no array holds any more"

    for i, value in enumerate(arguments):
        kind = ffi.typeof(value) if isinstance(value, ffi.CData) else None
        if kind is None or kind.kind != "pointer" or i in host:
            continue
        if kind.item.kind != "struct":
            lives(f"argument {i}", value)
            continue
        for field, several in _pointers(kind.item):
            if several:
                for j, element in enumerate(getattr(value, field)):
                    lives(f"{field}[{j}]", element)
            else:
                lives(field, getattr(value, field))
