"""What surrounds products and convolutions, emulated on host memory as fp4bf16.h says (see host_cuda.py)."""

from __future__ import annotations

import numpy as np
from host_cuda import memory
from host_live import LIVE

from fp4bf16.interop import BFLOAT16
from fp4bf16.nn import fused
from fp4bf16.nn.layers import timestep_embedding

F32, F64, I64 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.int64)
_STRIDES = "const int64_t*"


def _shifted(x: np.ndarray, oh: int, ow: int, stride: int, dy: int, dx: int) -> np.ndarray:
    """(n, oh, ow, c): x at (p * stride + dy, q * stride + dx), zero outside."""
    n, h, w, c = x.shape
    rows, columns = np.arange(oh) * stride + dy, np.arange(ow) * stride + dx
    found = np.zeros((n, oh, ow, c), x.dtype)
    inside = np.ix_(range(n), (rows >= 0) & (rows < h), (columns >= 0) & (columns < w), range(c))
    found[inside] = x[:, rows[(rows >= 0) & (rows < h)]][:, :, columns[(columns >= 0) & (columns < w)]]
    return found


class _Emulation:
    """The functions; pointers become arrays by `view`."""

    def __init__(self, library):
        self.loaded = library

    def view(self, pointer, shape, dtype, strides=None) -> np.ndarray:
        return memory(self.loaded.at(pointer), shape, dtype, strides)

    def picture(self, pointer, shape, dtype, strides) -> np.ndarray:
        return self.view(pointer, shape, dtype, (*(strides[i] for i in range(3)), 1))

    # ---- pictures
    def runs(self, run_if) -> bool:
        """Whether a launch with this condition does anything."""
        return not self.loaded.at(run_if) or bool(self.view(run_if, (1,), np.int32)[0])

    def upsample(self, x, element_bytes, n, h, w, c, x_strides, y, y_strides, run_if) -> None:
        if not self.runs(run_if):
            return
        dtype = {1: np.uint8, 2: np.uint16}[element_bytes]
        source = self.picture(x, (n, h, w, c), dtype, x_strides)
        target = self.picture(y, (n, 2 * h, 2 * w, c), dtype, y_strides)
        target[...] = fused.upsample_nearest(source)

    def upsample_backward(self, g, n, h, w, c, g_strides, add, add_strides, dx, dx_strides) -> None:
        patches = self.picture(g, (n, 2 * h, 2 * w, c), BFLOAT16, g_strides).astype(F32)
        with np.errstate(invalid="ignore"):
            total = fused.upsample_nearest_vjp(patches)
            if self.loaded.at(add):
                total = total + self.picture(add, (n, h, w, c), BFLOAT16, add_strides).astype(F32)
        self.picture(dx, (n, h, w, c), BFLOAT16, dx_strides)[...] = total.astype(BFLOAT16)

    # ---- convolutions of few channels
    def patches(
        self, x, dtype, n, h, w, c, x_strides, oh, ow, kh, kw, stride, top, left, out, width, run_if
    ) -> None:  # fmt: skip
        if not self.runs(run_if):
            return
        source = self.picture(x, (n, h, w, c), (F32, BFLOAT16)[dtype], x_strides)
        target = self._wide(out, (n, oh, ow), width)
        for i, (r, s) in enumerate(np.ndindex(kh, kw)):
            seen = _shifted(source, oh, ow, stride, r - top, s - left)
            target[..., i * c : (i + 1) * c] = seen.astype(BFLOAT16)

    def _wide(self, out, pixels, width) -> np.ndarray:
        target = self.view(out, (*pixels, width), BFLOAT16)
        target[...] = 0
        return target

    def conv2d_few(
        self, x, n, h, w, c, x_strides, weight, oh, ow, o, kh, kw, top, left, bias, out, out_strides,
        run_if,
    ) -> None:  # fmt: skip
        if not self.runs(run_if):
            return
        assert o * kh * kw <= 64 and c % 8 == 0
        pictures = self.picture(x, (n, h, w, c), BFLOAT16, x_strides).astype(F64)
        products = pictures @ self.view(weight, (o * kh * kw, c), BFLOAT16).astype(F64).T
        products = products.astype(F32).reshape(n, h, w, o, kh, kw)
        total = np.zeros((n, oh, ow, o), F32)
        for r, s in np.ndindex(kh, kw):
            total += _shifted(products[..., r, s], oh, ow, 1, r - top, s - left)
        if self.loaded.at(bias):
            total += self.view(bias, (o,), F32)
        self.picture(out, (n, oh, ow, o), F32, out_strides)[...] = total

    def spread_taps(
        self, g, dtype, n, oh, ow, o, g_strides, h, w, kh, kw, top, left, y, width
    ) -> None:  # fmt: skip
        gradient = self.picture(g, (n, oh, ow, o), (F32, BFLOAT16)[dtype], g_strides)
        target = self._wide(y, (n, h, w), width)
        each = target[..., : o * kh * kw]
        for i, (r, s) in enumerate(np.ndindex(kh, kw)):
            each[..., i :: kh * kw] = _shifted(gradient, h, w, 1, top - r, left - s).astype(BFLOAT16)

    # ---- rows
    def add(self, a, a_stride, b, b_stride, rows, c, out, out_stride) -> None:
        x, y = (
            self.view(pointer, (rows, c), BFLOAT16, (stride, 1)).astype(F32)
            for pointer, stride in ((a, a_stride), (b, b_stride))
        )
        with np.errstate(invalid="ignore"):
            self.view(out, (rows, c), BFLOAT16, (out_stride, 1))[...] = (x + y).astype(BFLOAT16)

    def column_sums(self, x, rows, c, x_stride, sums, workspace) -> None:
        self.view(workspace, (min(256, rows), c), F32)[...] = np.nan  # must be there
        total = self.view(sums, (c,), F32)
        added = self.view(x, (rows, c), BFLOAT16, (x_stride, 1)).astype(F64).sum(axis=0)
        total[...] = (total + added).astype(F32)

    # ---- SiLU
    def silu(self, x, count, dtype, y) -> None:
        kind = (F32, BFLOAT16)[dtype]
        result = fused.plain_silu(self.view(x, (count,), kind).astype(F64))
        self.view(y, (count,), kind)[...] = result.astype(F32).astype(kind)

    def silu_backward(self, g, x, count, dtype, dx) -> None:
        kind = (F32, BFLOAT16)[dtype]
        gradient, at = (self.view(pointer, (count,), kind).astype(F64) for pointer in (g, x))
        self.view(dx, (count,), kind)[...] = fused.plain_silu_vjp(gradient, at).astype(F32).astype(kind)

    # ---- embeddings
    def timestep_embedding(self, t, t_step, rows, dim, flip, freq_shift, max_period, out, stride) -> None:
        steps = self.view(t, (rows,), I64, (t_step,))
        wanted = timestep_embedding(steps, dim, bool(flip), freq_shift, max_period)
        self.view(out, (rows, dim), BFLOAT16, (stride, 1))[...] = wanted.astype(BFLOAT16)

    def take_rows(self, weight, count, dim, index, rows, out, out_stride) -> None:
        table, chosen = self.view(weight, (count, dim), F32), self.view(index, (rows,), I64)
        known = (chosen >= 0) & (chosen < count)
        result = self.view(out, (rows, dim), BFLOAT16, (out_stride, 1))
        result[...] = 0
        result[known] = table[chosen[known]].astype(BFLOAT16)

    def take_rows_backward(self, g, g_stride, index, rows, dim, dweight, count) -> None:
        gradient = self.view(g, (rows, dim), BFLOAT16, (g_stride, 1)).astype(F32)
        table = self.view(dweight, (count, dim), F32)
        for row, chosen in zip(gradient, self.view(index, (rows,), I64), strict=True):
            if 0 <= chosen < count:
                table[chosen] += row


class HostMemory:
    """What the fixture `gpu` is, on host memory: the tests of a kernel then run with its emulation, too."""

    POISON = 0xA5

    def __init__(self):
        self.held: dict[int, np.ndarray] = {}

    def empty(self, nbytes: int) -> int:
        raw = np.full(nbytes + 128, self.POISON, np.uint8)
        address = raw.ctypes.data + -raw.ctypes.data % 64
        self.held[address] = raw
        LIVE.add(raw)
        return address

    def put(self, array: np.ndarray) -> int:
        array = np.ascontiguousarray(array)
        address = self.empty(array.nbytes)
        memory(address, (array.nbytes,), np.uint8)[...] = array.reshape(-1).view(np.uint8)
        return address

    def get(self, address: int, shape, dtype) -> np.ndarray:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raw = memory(address, (size + 64,), np.uint8).copy()
        assert (raw[size:] == self.POISON).all(), "wrote past the end of its output"
        return raw[:size].view(dtype).reshape(shape)

    def free(self) -> None:
        self.held = {}


class Held:
    """An array in device memory among poison: `pad` elements longer axes, `front` elements before it.

    `shape` and `dtype` instead of an array leave it poisoned, as an output is.
    """

    def __init__(self, memory, array=None, pad=(), front=0, *, shape=None, dtype=None):
        self.memory, self.front = memory, front
        self.shape = array.shape if array is not None else tuple(shape)
        self.dtype = np.dtype(array.dtype if array is not None else dtype)
        self.pads = (0,) * (len(self.shape) - len(pad)) + tuple(pad)
        self.full = tuple(n + p for n, p in zip(self.shape, self.pads, strict=True))
        size = front + int(np.prod(self.full))
        self.before = np.full(size * self.dtype.itemsize, memory.POISON, np.uint8).view(self.dtype)
        if array is not None:
            self.view(self.before)[...] = array
        self.start = memory.put(self.before)
        self.address = self.start + front * self.dtype.itemsize
        steps = self.view(self.before).strides
        self.strides = [s // self.dtype.itemsize for s in steps[:-1]]

    def view(self, flat: np.ndarray) -> np.ndarray:
        return flat[self.front :].reshape(self.full)[tuple(slice(n) for n in self.shape)]

    def get(self) -> np.ndarray:
        """The array now, after a look at everything around it."""
        after = self.memory.get(self.start, self.before.shape, self.dtype)
        found = self.view(after).copy()
        self.view(after)[...] = self.view(self.before)
        assert after.tobytes() == self.before.tobytes(), "wrote between or before its rows"
        return found


def define(library) -> None:
    """Adds the functions to a `HostCuda`."""
    e = _Emulation(library)
    pixels = "int64_t, int64_t, int64_t, int64_t"
    rows = "int64_t, int64_t"
    for name, kinds in (
        ("upsample", f"const void*, int32_t, {pixels}, {_STRIDES}, void*, {_STRIDES}, const int32_t*, "
         "void*"),
        ("upsample_backward", f"const void*, {pixels}, {_STRIDES}, const void*, {_STRIDES}, void*, "
         f"{_STRIDES}, void*"),
        ("patches", f"const void*, fp4bf16_dtype, {pixels}, {_STRIDES}, {', '.join(['int64_t'] * 7)}, void*, "
         "int64_t, const int32_t*, void*"),
        ("conv2d_few", f"const void*, {pixels}, {_STRIDES}, const void*, {', '.join(['int64_t'] * 7)}, "
         f"const float*, float*, {_STRIDES}, const int32_t*, void*"),
        ("spread_taps", f"const void*, fp4bf16_dtype, {pixels}, {_STRIDES}, {', '.join(['int64_t'] * 6)}, "
         "void*, int64_t, void*"),
        ("add", f"const void*, int64_t, const void*, int64_t, {rows}, void*, int64_t, void*"),
        ("column_sums", f"const void*, {rows}, int64_t, float*, void*, void*"),
        ("silu", "const void*, int64_t, fp4bf16_dtype, void*, void*"),
        ("silu_backward", "const void*, const void*, int64_t, fp4bf16_dtype, void*, void*"),
        ("timestep_embedding", f"const int64_t*, int64_t, {rows}, int32_t, float, float, void*, int64_t, "
         "void*"),
        ("take_rows", f"const float*, {rows}, const int64_t*, int64_t, void*, int64_t, void*"),
        ("take_rows_backward", f"const void*, int64_t, const int64_t*, {rows}, float*, int64_t, void*"),
    ):  # fmt: skip
        library._define(name, kinds, getattr(e, name))
