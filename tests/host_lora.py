"""Emulation of the adapters' kernels for `host_cuda`: NumPy's float64 products, rounded once.

Its units are its own (one a layer, two of the gradient): nobody but the library may know them.
"""

from __future__ import annotations

import numpy as np
from host_cuda import memory


def define(library) -> None:
    """Add the adapters to a `HostCuda`."""
    found = Adapters(library)
    for name, function in (("merge", found.merge), ("gradient", found.gradient)):
        library._define(f"lora_{name}", "const fp4bf16_lora_args*, void*", function)
    library.lib.fp4bf16_lora_units = library.ffi.callback("int64_t(int64_t, int64_t, int32_t)", units)


def units(rows: int, columns: int, gradient: int) -> int:
    if min(rows, columns) < 0:
        return -1
    return (1 + gradient) * bool(rows and columns)


class Adapters:
    def __init__(self, library):
        self.at = library.at

    def _matrix(self, pointer, start: int, shape, transposed: bool = False):
        """float32 view of `shape`; transposed: of a matrix that is stored so."""
        stored = memory(self.at(pointer) + 4 * start, shape[::-1] if transposed else shape, np.float32)
        return stored.T if transposed else stored

    def _layers(self, a, which: int):
        """(rows, columns, offset of the weight, (start, shape, transposed) of down and of up)."""
        known = [0, 0]
        for *first, rows, columns, weight, down, up, transposed in memory(
            self.at(a.layers), (a.layer_count, 8), np.int64
        ).tolist():
            assert first == known and transposed in (0, 1), f"a layer begins at {first}, not {known}"
            known = [n + units(rows, columns, i) for i, n in enumerate(known)]
            r, t = a.rank, bool(transposed)
            yield rows, columns, weight, (down, (r, columns), t), (up, (rows, r), t)
        assert known[which] == a.units, f"units is {a.units}, but the layers take {known[which]}"

    def merge(self, a) -> None:
        assert np.isfinite(a.scale) and a.rank >= 1
        for rows, columns, weight, down, up in self._layers(a, 0):
            base = self._matrix(a.base, weight, (rows, columns))
            target = self._matrix(a.weights, weight, (rows, columns))
            if not self.at(a.adapters):
                target[...] = base
                continue
            d, u = (self._matrix(a.adapters, *part).astype(np.float64) for part in (down, up))
            with np.errstate(over="ignore", invalid="ignore"):
                target[...] = base + a.scale * (u @ d)

    def gradient(self, a) -> None:
        for rows, columns, weight, down, up in self._layers(a, 1):
            g = self._matrix(a.gradient, weight, (rows, columns)).astype(np.float64)
            d, u = (self._matrix(a.adapters, *part).astype(np.float64) for part in (down, up))
            with np.errstate(over="ignore", invalid="ignore"):
                self._matrix(a.adapters_gradient, *down)[...] = a.scale * (u.T @ g)
                self._matrix(a.adapters_gradient, *up)[...] = a.scale * (g @ d.T)
