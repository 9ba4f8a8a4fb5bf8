"""Norms of the weights of FP4 products, on the device: what certificates there read (docs/certificate.md,
section 3), made anew with each version of the weights, and nothing waited for.

Layers of one shape are one batch. A sigma is `spectral_norms` with as many squarings as on the CPU, four for
W^ and three for W - W^; sigma(W), which only the rounding of 16-bit results needs, is the sum of both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ... import device
from ...adapters import DeviceArray
from ...backends import cuda_math
from ...backends.cuda_gemm import round_up
from ...backends.cuda_spectral import frobenius, rounded_up, spectral_norms
from .graph import Graph
from .workspace import Run, converted, decoded, part, shaped

_ROOM = 1 + 2.0**-40  # over what float64 loses in a sum of squares
_BATCH = 1 << 22  # elements of a batch of weights, unless one alone has more
FIELDS = 8


class _Entry(NamedTuple):
    """A weight of the table: where its numbers are. shape: (pieces, outputs, K) of each piece."""

    layer: Any
    row: int
    shape: tuple[int, int, int]


class WeightNorms:
    """The table of one `DeviceParameters`, rows by layer as `Layout.row_of` numbers them.

    table: (rows, 8) float32, rounded up: |W|_F, |W^|_F, upper bounds of the largest singular values of W =
    the BF16 copy, of W^ that FP4 products read in its place and of W - W^, the largest outer scale of W^,
    zeros; infinite where nothing is known. Of a weight by phases sigma is the root of the sum of its phases'
    squares, with which |Y|^2 = sum |P W_phase|^2 is bounded by one norm of the patches P.

    A row is made at the first request, and with all others by every refresh and step.
    """

    def __init__(self, weights: Any):
        self._weights, self._entries = weights, {}
        self._graph: Graph | None = None
        like, layout = weights.data, weights.layout
        self.table = device.full((layout.most_rows, FIELDS), float("inf"), "float32", like, "weight norms")

    def row(self, run: Run, layer: Any) -> DeviceArray:
        """(8,) of a layer that runs on FP4."""
        row = self._weights.layout.row_of(layer)
        if row not in self._entries:
            pieces = 4 if layer.how.get("phases") else 1
            k = layer.kh * layer.kw * layer.c
            self._graph = None
            self._entries[row] = entry = _Entry(layer, row, (pieces, layer.o, k))
            with run.aside():
                self._make(run, [entry])
        return shaped_row(self.table, row)

    def refresh(self, stream: int) -> None:
        """All rows anew; outside of a capture in one launch, a graph of them."""
        if not self._entries:
            return
        if device.capturing(self.table, stream):
            self._all(stream)
        elif self._graph is None:
            self._graph = Graph(self.table)
            self._graph.capture(self._all)  # whose warm-up makes them
        else:
            self._graph.replay(stream)

    # ---- numbers
    def _all(self, stream: int) -> None:
        run = Run(self._weights, None, self._weights.data, False, "packed", "twin", "fast")
        run.stream = stream
        shapes: dict[tuple, list[_Entry]] = {}
        for entry in self._entries.values():
            shapes.setdefault(entry.shape, []).append(entry)
        for shape, entries in shapes.items():
            count = max(1, _BATCH // math.prod(shape))
            for start in range(0, len(entries), count):
                self._make(run, entries[start : start + count])

    def _make(self, run: Run, entries: Sequence[_Entry]) -> None:
        """Rows of weights of one shape. Arrays are filled, not stacked: of a list CuPy copies addresses from
        the host, which a graph would read again.
        """
        arrays, count = cuda_math.of(self.table), len(entries)
        pieces, o, k = entries[0].shape

        def doubles(*shape: int) -> Any:
            return arrays.raw(run.empty(shape, "float64"))

        w, used, rows = doubles(count, pieces, o, k), doubles(count, pieces, o, k), doubles(count, FIELDS)
        rows[:, 6:] = 0
        for i, entry in enumerate(entries):
            w[i], used[i], rows[i, 5] = self._values(run, entry.layer, entry.shape)

        def whole(x: Any) -> Any:
            return frobenius(x.reshape(count, 1, -1)) * _ROOM

        def sigma(x: Any, squarings: int) -> Any:
            of = spectral_norms(arrays.xp, x.reshape(count * pieces, o, k), squarings)
            return of if pieces == 1 else frobenius(of.reshape(count, 1, pieces)) * _ROOM

        rows[:, 0], rows[:, 1] = whole(w), whole(used)
        rows[:, 3], rows[:, 4] = sigma(used, 4), sigma(w - used, 3)
        rows[:, 2] = rows[:, 3] + rows[:, 4]
        rows, table = rounded_up(arrays, rows), arrays.raw(self.table)
        for i, entry in enumerate(entries):
            table[entry.row] = rows[i]

    def _values(self, run: Run, layer: Any, shape: tuple[int, int, int]) -> tuple[Any, Any, Any]:
        """(W, W^) float32 (pieces, outputs, K) and the largest outer scale of W^, of the framework."""
        pieces, o, k = shape
        raw, taps = cuda_math.of(run.like).raw, layer.kh * layer.kw
        w8, scale = layer.eight(run)
        rows = pieces * o, taps * w8.shape[3]
        used = decoded(run, shaped(w8, rows), None, scale, 1, rows)
        both = []
        for x, wide in ((layer.sixteen(run), round_up(layer.c, 8)), (used, w8.shape[3])):
            flat = part(shaped(x, (1, 1, pieces * o * taps, wide)), 0, layer.c)
            values = raw(converted(run, flat, layer.c, "float32"))
            both.append(values.reshape(o, pieces, k).swapaxes(0, 1))
        scales = raw(converted(run, shaped(scale, (1, 1, 1, scale.size)), scale.size, "float32"))
        live = (both[1] != 0).any(2)  # rows of zeros have the scale 1, and lose nothing
        largest = (scales.reshape(o, pieces).swapaxes(0, 1) * live).max()
        return *both, largest


def shaped_row(table: DeviceArray, row: int) -> DeviceArray:
    """One row of a table, a view that the kernels read."""
    width = table.shape[1]
    address = table.address + row * width * table.itemsize
    return DeviceArray(address, (width,), (1,), table.dtype, table.device, table.framework, table.owner,
                       table.name)  # fmt: skip
