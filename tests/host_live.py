"""Which of the host's memory counts as the device's, and until when: an emulated launch is given no other.

On a GPU an array that is dropped between taking its address and the launch leaves a pointer to memory that is
another's by then. In host memory such a kernel would mostly find its old bytes there and be right.
"""

from __future__ import annotations

import re
import weakref
from functools import cache

import numpy as np


class Live:
    """The memory of arrays that somebody has; arrays are known weakly."""

    def __init__(self):
        self._ranges: dict[int, tuple[int, int, weakref.ref]] = {}

    def add(self, array: np.ndarray) -> None:
        """The memory that `array` is a view of, as long as any view of it lives."""
        while isinstance(array.base, np.ndarray):
            array = array.base
        key, known = id(array), self._ranges
        if key not in known:
            low, high = np.lib.array_utils.byte_bounds(array)
            known[key] = low, max(high, low + 1), weakref.ref(array, lambda _: known.pop(key))

    def holds(self, address: int) -> bool:
        return any(low <= address < high for low, high, _ in list(self._ranges.values()))


LIVE = Live()


@cache
def _host_parameters(text: str) -> dict[str, set[int]]:
    """Of each function of the header the places of its arrays of a fixed length, which lie on the host."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    found = re.findall(r"\bfp4bf16_(\w+)\(([^)]*)\);", text)
    return {name: {i for i, p in enumerate(ps.split(",")) if "[" in p} for name, ps in found}


def check(ffi, header: str, name: str, arguments: tuple) -> None:
    """AssertionError unless every pointer that a launch of `name` is given lies in memory that lives."""
    host = _host_parameters(header)[name]
    for i, value in enumerate(arguments):
        kind = ffi.typeof(value) if isinstance(value, ffi.CData) else None
        if kind is None or kind.kind != "pointer" or i in host:
            continue
        if kind.item.kind != "struct":
            _lives(ffi, f"argument {i}", value)
            continue
        for field, described in kind.item.fields:
            if described.type.kind == "pointer":
                _lives(ffi, field, getattr(value, field))
            elif described.type.kind == "array" and described.type.item.kind == "pointer":
                for j, element in enumerate(getattr(value, field)):
                    _lives(ffi, f"{field}[{j}]", element)


def _lives(ffi, where: str, pointer) -> None:
    address = int(ffi.cast("uintptr_t", pointer))
    assert not address or LIVE.holds(address), f"{where} points to memory that no array holds any more"
