"""Low-rank adapters on a GPU: merged into the weights of a network, and their gradients from the weights'.

Flat float32 arrays; sums in float64, in an order that the shapes alone decide; results are rounded once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from .. import device
from ..device import DeviceArray
from . import cuda
from .cuda_gemm import filled


class Entry(NamedTuple):
    """One weight (rows, columns) and its adapter: where they begin in their flat arrays. transposed: down is
    (columns, rank) and up (rank, rows), as of a linear layer; else (rank, columns) and (rows, rank).
    """

    rows: int
    columns: int
    weight: int
    down: int
    up: int
    transposed: bool


class Table(NamedTuple):
    """What the kernels walk over: the entries on the device, int64 (layers, 8), and the units that each of
    the two takes.
    """

    layers: DeviceArray
    merge_units: int
    gradient_units: int


def make_table(entries: Iterable[Entry], like: DeviceArray) -> Table:
    """The table of these layers; `ValueError` for sizes out of range."""
    lib, rows, units = cuda.load().lib, [], [0, 0]
    for entry in entries:
        rows.append((*units, *entry[:5], int(entry.transposed)))
        for which in (0, 1):
            count = int(lib.fp4bf16_lora_units(entry.rows, entry.columns, which))
            if count < 0:
                raise ValueError(f"lora: a weight has {entry.rows} rows of {entry.columns} columns, but each "
                                 f"must be 0 to 2^28; leave the layer out of targets")  # fmt: skip
            units[which] += count
    array = np.array(rows, np.int64).reshape(-1, 8)
    return Table(device.from_host(array, like, "layers"), *units)


def _call(name: str, table: Table, units: int, rank: int, scale: float, stream: int,
          **arrays: DeviceArray | None) -> None:  # fmt: skip
    fields = {"layer_count": table.layers.shape[0], "units": units, "rank": rank, "scale": scale,
              "layers": table.layers.address}  # fmt: skip
    fields |= {name: x.address for name, x in arrays.items() if x is not None}
    device.call(name, filled("fp4bf16_lora_args", fields), stream)


def merge(
    table: Table, base: DeviceArray, adapters: DeviceArray | None, weights: DeviceArray, rank: int,
    scale: float, stream: int,
) -> None:  # fmt: skip
    """The weights of the table's layers = base + scale up down; base without adapters. The rest of `weights`
    stays as it is.
    """
    _call("lora_merge", table, table.merge_units, rank, scale, stream, base=base, adapters=adapters,
          weights=weights)  # fmt: skip


def gradient(
    table: Table, gradient: DeviceArray, adapters: DeviceArray, adapters_gradient: DeviceArray, rank: int,
    scale: float, stream: int,
) -> None:  # fmt: skip
    """From the weights' gradient G the adapters': scale G down^T for up, scale up^T G for down."""
    _call("lora_gradient", table, table.gradient_units, rank, scale, stream, gradient=gradient,
          adapters=adapters, adapters_gradient=adapters_gradient)  # fmt: skip
