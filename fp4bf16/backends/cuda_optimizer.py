"""The optimizer's kernels on a GPU: AdamW, the average of the weights, their BF16 copy and FP4 twins in one
pass, and the norm of the gradient. Flat float32 arrays as `nn.FlatParameters` has them.

What changes from step to step lies in `scalars`, a device array (8,), so that a captured graph can be
replayed: the host writes `step_scalars` there, `clip_scalars` the two that follow from the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from .. import device
from ..device import DeviceArray
from . import cuda
from .cuda_gemm import filled

_PARTS = 1024  # doubles that sum_of_squares works in


class Entry(NamedTuple):
    """One tensor of the flat arrays: `rows * columns` elements from `offset` on. With a twin (offset there,
    -1: none) columns is a multiple of 16; `scale`: its first row's place among the twins' scales.
    """

    offset: int
    rows: int
    columns: int
    twin: int = -1
    scale: int = 0


class Table(NamedTuple):
    """What `adamw` walks over: the entries on the device, int64 (tensors, 8), and the units they take."""

    tensors: DeviceArray
    units: int


def tensor_table(entries: Iterable[Entry]) -> tuple[np.ndarray, int]:
    """The int64 (tensors, 8) that fp4bf16_adamw reads, and its units.

    Raises:
        ValueError: columns of an entry with a twin are no multiple of 16, or sizes are out of range.
    """
    lib = cuda.load().lib
    rows, units = [], 0
    for entry in entries:
        rows.append((units, entry.offset, entry.rows, entry.columns, entry.twin, entry.scale, 0, 0))
        count = int(lib.fp4bf16_adamw_units(entry.rows, entry.columns, int(entry.twin >= 0)))
        if count < 0:
            raise ValueError(f"tensor_table: a tensor has {entry.rows} rows of {entry.columns} columns and "
                             f"its twin lies at {entry.twin}, but a twin needs columns of a multiple of 16; "
                             f"pass twin=-1")  # fmt: skip
        units += count
    return np.array(rows, np.int64).reshape(-1, 8), units


def step_scalars(
    count: int, lr: float, betas: tuple[float, float], weight_decay: float = 0.0,
    ema_decay: float | None = None, ema_step: int | None = None,
) -> np.ndarray:  # fmt: skip
    """scalars (8,) of update number `count` (from 1), as `nn.optim.AdamW.step` and `diffusion.EMA.update`
    compute them; `ema_step` (from 0) is count - 1 by default. The factor on the gradient is 1, the step on.

    >>> step_scalars(1, 0.1, (0.9, 0.999)).round(3).tolist()
    [1.0, 31.62299919128418, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    """
    for name, value in (("lr", lr), ("weight_decay", weight_decay)):
        if not math.isfinite(value):
            raise ValueError(f"adamw: {name} is {value}, but a finite number is needed; lower it")
    beta1, beta2 = betas
    step = count - 1 if ema_step is None else ema_step
    mix = 0.0 if ema_decay is None else 1 - min(ema_decay, (1 + step) / (10 + step))
    return np.array([
        lr / (1 - beta1**count), 1 / math.sqrt(1 - beta2**count), 1 - lr * weight_decay, 1, 1, mix, 0, 0,
    ]).astype(np.float32)  # fmt: skip


def _fields(table: Table, arrays: dict[str, DeviceArray | None]) -> dict:
    fields = {"tensor_count": table.tensors.shape[0], "units": table.units, "tensors": table.tensors.address}
    return fields | {name: x.address for name, x in arrays.items() if x is not None}


def adamw(
    table: Table, parameters: DeviceArray, gradient: DeviceArray, first: DeviceArray, second: DeviceArray,
    scalars: DeviceArray, stream: int, *, average: DeviceArray | None = None, bf16: DeviceArray | None = None,
    twin: DeviceArray | None = None, twin_scale: DeviceArray | None = None,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
) -> None:  # fmt: skip
    """One step in place on flat float32 arrays: the bits of `nn.optim.AdamW`, then of `diffusion.EMA` on
    `average`; `bf16`, `twin` (uint8) and `twin_scale` are made from the new parameters.
    """
    fields = _fields(table, {
        "parameters": parameters, "gradient": gradient, "first": first, "second": second, "average": average,
        "bf16": bf16, "twin": twin, "twin_scale": twin_scale, "scalars": scalars,
    })  # fmt: skip
    fields |= {"beta1": betas[0], "beta2": betas[1], "eps": eps}
    device.call("adamw", filled("fp4bf16_adamw_args", fields), stream)


def refresh(
    table: Table, parameters: DeviceArray, stream: int, *, bf16: DeviceArray | None = None,
    twin: DeviceArray | None = None, twin_scale: DeviceArray | None = None,
) -> None:  # fmt: skip
    """The BF16 copy and the twins alone, from the parameters as they are."""
    fields = _fields(table, {"parameters": parameters, "bf16": bf16, "twin": twin, "twin_scale": twin_scale})
    device.call("adamw", filled("fp4bf16_adamw_args", fields), stream)


def sum_of_squares(x: DeviceArray, squares: DeviceArray, stream: int) -> None:
    """squares (1,) float64 = the sum of squares of x, contiguous float32; NaN and Inf come through."""
    workspace = device.empty((_PARTS,), "float64", like=x)
    device.call("sum_of_squares", x.address, x.size, squares.address, workspace.address, stream)


def clip_scalars(
    squares: DeviceArray, scalars: DeviceArray, stream: int, *, limit: float | None = None,
    loss: DeviceArray | None = None, norm: DeviceArray | None = None,
) -> None:  # fmt: skip
    """scalars[3] (factor on the gradient so that its norm is at most `limit`) and scalars[4] (0: a norm or
    loss (1,) float64 that is not finite, no step); the norm goes to `norm` (1,) float64.
    """
    device.call("clip_scalars", squares.address, 0 if loss is None else loss.address, limit or 0.0,
                scalars.address, 0 if norm is None else norm.address, stream)  # fmt: skip
