"""Emulation of the optimizer for `host_cuda`: float32 in the order of fp4bf16.h, twins by the CPU quantiser.

Its units are its own (one a row with a twin, else one a tensor): nobody but the library may know them.
"""

from __future__ import annotations

import math

import numpy as np
from host_cuda import memory

from fp4bf16.backends import cpu_quantize
from fp4bf16.formats import FORMATS
from fp4bf16.interop import BFLOAT16

EXACT = FORMATS["nvfp4_exact"]


def define(library) -> None:
    """Add the optimizer to a `HostCuda`."""
    found = Optimizer(library)
    library._define("adamw", "const fp4bf16_adamw_args*, void*", found.adamw)
    library._define("sum_of_squares", "const float*, int64_t, double*, void*, void*", found.sum_of_squares)
    library._define("clip_scalars", "const double*, const double*, double, float*, double*, void*",
                    found.clip_scalars)  # fmt: skip
    library.lib.fp4bf16_adamw_units = library.ffi.callback("int64_t(int64_t, int64_t, int32_t)", units)


def units(rows: int, columns: int, twin: int) -> int:
    if rows < 0 or columns < 0 or (twin and columns % 16):
        return -1
    return (rows if twin else 1) if rows * columns else 0


class Optimizer:
    def __init__(self, library):
        self.at = library.at

    def _flat(self, pointer, start: int, size: int, dtype=np.float32):
        """`size` elements from `start` on; None for NULL."""
        address = self.at(pointer)
        return memory(address + start * np.dtype(dtype).itemsize, (size,), dtype) if address else None

    def adamw(self, a) -> None:
        table = memory(self.at(a.tensors), (a.tensor_count, 8), np.int64)
        known = 0
        for unit, offset, rows, columns, twin, scale, *rest in table.tolist():
            assert unit == known and rest == [0, 0], f"a tensor begins at unit {unit}, not {known}"
            known += units(rows, columns, twin >= 0)
            assert offset % 4 == 0 and (twin < 0 or twin % 16 == 0), "alignment"
            size = rows * columns
            p = self._flat(a.parameters, offset, size)
            if size and self.at(a.gradient):
                self._step(a, offset, size, p)
            half = self._flat(a.bf16, offset, size, BFLOAT16)
            if half is not None:
                half[:] = p.astype(BFLOAT16)
            if twin >= 0 and self.at(a.twin):
                x = p.reshape(rows, columns)
                q = cpu_quantize.quantize_rows(x, EXACT, search="full", nan="propagate")
                bytes_ = cpu_quantize.expand_rows(q.packed, q.block_scale, EXACT)
                self._flat(a.twin, twin, size, np.uint8)[:] = bytes_.reshape(-1)
                self._flat(a.twin_scale, scale, rows)[:] = q.outer
        assert known == a.units, f"units is {a.units}, but the tensors take {known}"

    def _step(self, a, offset: int, size: int, p) -> None:
        s = memory(self.at(a.scalars), (8,), np.float32)
        if s[4] == 0:
            return
        f = np.float32
        m, v = self._flat(a.first, offset, size), self._flat(a.second, offset, size)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            g = self._flat(a.gradient, offset, size) * s[3]
            v[:] = v * f(a.beta2) + g * g * f(1 - a.beta2)
            m[:] = m * f(a.beta1) + g * f(1 - a.beta1)
            p[:] = p * s[2] - m / (np.sqrt(v) * s[1] + f(a.eps)) * s[0]
            average = self._flat(a.average, offset, size)
            if average is not None:
                average += (p - average) * s[5]

    def sum_of_squares(self, x, count, squares, workspace) -> None:
        assert self.at(workspace) and self.at(workspace) % 8 == 0, "workspace"
        memory(self.at(workspace), (1024,), np.float64)[:] = np.nan  # it is all the kernel's
        wide = memory(self.at(x), (count,), np.float32).astype(np.float64)
        memory(self.at(squares), (1,), np.float64)[0] = wide @ wide

    def clip_scalars(self, squares, loss, limit, scalars, norm_out) -> None:
        norm = float(np.sqrt(memory(self.at(squares), (1,), np.float64)[0]))
        s = memory(self.at(scalars), (8,), np.float32)
        finite = math.isfinite(norm)
        if self.at(loss):
            finite = finite and math.isfinite(memory(self.at(loss), (1,), np.float64)[0])
        s[3] = limit / norm if limit and norm > limit else 1
        s[4] = finite
        if self.at(norm_out):
            memory(self.at(norm_out), (1,), np.float64)[0] = norm
