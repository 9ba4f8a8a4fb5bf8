"""Emulation of the convolutions for `host_cuda`: products of patches in float64, rounded as fp4bf16.h says.

The `_simple` functions are the same: what they sum is.
"""

from __future__ import annotations

import numpy as np
from host_cuda import DTYPES, _rounded, memory

from fp4bf16.backends import cpu_quantize
from fp4bf16.formats import FORMATS
from fp4bf16.interop import BFLOAT16
from fp4bf16.python_ref.formats import E4M3
from fp4bf16.python_ref.gemm import gelu, silu

SINGLE = np.dtype(np.float32)
EXACT = FORMATS["nvfp4_exact"]
WORKSPACE = 96  # bytes; the emulation needs none, but checks that the caller gives it


def define(library) -> None:
    """Add the convolutions to a `HostCuda`."""
    found = Convolutions(library)
    for name in ("conv2d", "conv2d_dgrad", "conv2d_wgrad"):
        kinds = f"const fp4bf16_{name}_args*, void*"
        for variant in (name, f"{name}_simple"):
            library._define(variant, kinds, getattr(found, name))
    library.lib.fp4bf16_conv2d_wgrad_workspace_size = library.ffi.callback(
        "int64_t(const fp4bf16_conv2d_wgrad_args*)", lambda args: WORKSPACE
    )
    library.lib.fp4bf16_conv2d_sum_parts = library.ffi.callback(
        "int64_t(const fp4bf16_conv2d_args*)", sum_parts
    )
    none = library.ffi.new("char[]", b"host")
    library.lib.fp4bf16_conv2d_config = lambda args, config: none


def sum_parts(a) -> int:
    """What a caller has to expect: one part or several, and none for pictures that no tiles fill."""
    if a.d_dtype != 1 or 0 in (a.n, a.oh, a.ow, a.o) or not (a.c8 or a.c16):
        return 0
    pixels = a.oh * a.ow
    return 0 if pixels % 16 else max(1, pixels // 128)


def taps(x: np.ndarray, a) -> np.ndarray:
    """(n, oh, ow, kh, kw, c): what each output pixel meets, zero outside the pictures; a copy."""
    n, h, w, c = x.shape
    rows, columns = (a.oh - 1) * a.stride + a.kh, (a.ow - 1) * a.stride + a.kw
    padded = np.zeros((n, max(rows, a.top + h), max(columns, a.left + w), c), x.dtype)
    padded[:, a.top : a.top + h, a.left : a.left + w] = x
    view = np.lib.stride_tricks.sliding_window_view(padded[:, :rows, :columns], (a.kh, a.kw), axis=(1, 2))
    return np.ascontiguousarray(view[:, :: a.stride, :: a.stride].transpose(0, 1, 2, 4, 5, 3))


def untaps(y: np.ndarray, a) -> np.ndarray:
    """The adjoint of `taps`: (n, h, w, c)."""
    n, *_, c = y.shape
    rows, columns = (a.oh - 1) * a.stride + a.kh, (a.ow - 1) * a.stride + a.kw
    padded = np.zeros((n, max(rows, a.top + a.h), max(columns, a.left + a.w), c))
    for r in range(a.kh):
        for s in range(a.kw):
            stop = r + a.stride * (a.oh - 1) + 1, s + a.stride * (a.ow - 1) + 1
            padded[:, r : stop[0] : a.stride, s : stop[1] : a.stride] += y[:, :, :, r, s]
    return padded[:, a.top : a.top + a.h, a.left : a.left + a.w]


def expanded(d: np.ndarray, exponent: int) -> np.ndarray:
    """E4M3 bytes of d (n, oh, ow, o) under one given outer scale, by the CPU's quantiser."""
    assert -119 <= exponent <= 120, f"an exponent of {exponent}"
    rows = d.reshape(-1, d.shape[3]).astype(np.float32)
    outer = np.full(len(rows), np.ldexp(np.float32(1), exponent), np.float32)
    q = cpu_quantize.quantize_rows(rows, EXACT, outer, None, "fast", "propagate")
    return cpu_quantize.expand_rows(q.packed, q.block_scale, EXACT).reshape(d.shape)


class Convolutions:
    def __init__(self, library):
        self.at = library.at

    # ---- memory
    def _pictures(self, pointer, shape, dtype, strides) -> np.ndarray:
        return memory(self.at(pointer), shape, dtype, (*strides, 1))

    def _operand(self, name: str, pointer, shape, dtype, strides) -> np.ndarray:
        """Pictures that TMA reads: aligned, as the header asks on sm_90."""
        if 0 not in shape:
            assert self.at(pointer) % 16 == 0, f"{name} is not aligned to 16 bytes"
            for n, s in zip(shape, strides, strict=False):
                assert n == 1 or s * dtype.itemsize % 16 == 0, f"{name}: a stride of {s} elements"
        return self._pictures(pointer, shape, dtype, strides)

    def _weight(self, name: str, pointer, a, c: int, dtype, stride: int, taps_: int) -> np.ndarray:
        """(o, taps * c) in float64."""
        if a.o and c:
            assert self.at(pointer) % 16 == 0, f"{name} is not aligned to 16 bytes"
            assert stride * dtype.itemsize % 16 == 0, f"{name}: a row of {stride} elements"
        return memory(self.at(pointer), (a.o, taps_ * c), dtype, (stride, 1))

    # ---- forward
    def conv2d(self, a) -> None:
        assert 0 not in (a.kh, a.kw, a.stride) and min(a.top, a.left) >= 0, "sizes"
        shape, pixels = (a.n, a.oh, a.ow, a.o), a.n * a.oh * a.ow
        d, scale = np.zeros(shape), self._scales(a)
        if 0 in shape:
            return
        if a.c8:
            x = self._operand("x8", a.x8, (a.n, a.h, a.w, a.c8), np.dtype(np.uint8), a.x8_strides)
            w = self._weight("w8", a.w8, a, a.c8, np.dtype(np.uint8), a.w8_stride, a.kh * a.kw)
            patches = taps(E4M3[x].astype(np.float64), a).reshape(pixels, -1)
            d = (patches @ E4M3[w].astype(np.float64).T).reshape(shape) * scale
        if a.c16:
            on_output = a.x16_on_output
            grid, count = ((a.oh, a.ow), 1) if on_output else ((a.h, a.w), a.kh * a.kw)
            x = self._operand("x16", a.x16, (a.n, *grid, a.c16), BFLOAT16, a.x16_strides)
            w = self._weight("w16", a.w16, a, a.c16, BFLOAT16, a.w16_stride, count).astype(np.float64)
            patches = x.astype(np.float64) if on_output else taps(x.astype(np.float64), a)
            product = (patches.reshape(pixels, -1) @ w.T).reshape(shape)
            d = d + (product if a.c8 else product * scale)
        self._finish(a, d * a.alpha)

    def _scales(self, a) -> np.ndarray:
        """image_scale x col_scale, for (n, oh, ow, o)."""
        scale = np.ones((a.n, 1, 1, a.o))
        for pointer, count, step, shape in (
            (a.image_scale, a.n, a.image_scale_step, (-1, 1, 1, 1)),
            (a.col_scale, a.o, a.col_scale_step, (1, 1, 1, -1)),
        ):
            assert step in (0, 1), f"a scale's step is {step}"
            if self.at(pointer) and count:
                vector = memory(self.at(pointer), (count,), np.float32, (step,))
                scale = scale * vector.astype(np.float64).reshape(shape)
        return scale

    def _finish(self, a, d: np.ndarray) -> None:
        for pointer in (a.bias, a.bias2):
            if self.at(pointer):
                d = d + memory(self.at(pointer), (a.o,), DTYPES[a.bias_dtype]).astype(np.float64)
        if self.at(a.image_bias):
            dtype, steps = DTYPES[a.image_bias_dtype], (a.image_bias_stride, 1)
            added = memory(self.at(a.image_bias), (a.n, a.o), dtype, steps).astype(np.float64)
            d = d + added[:, None, None]
        d = (lambda x: x, silu, gelu)[a.activation](d)
        if self.at(a.residual):
            dtype = DTYPES[a.residual_dtype]
            d = d + self._pictures(a.residual, d.shape, dtype, a.residual_strides).astype(np.float64)
        dtype = DTYPES[a.d_dtype]
        d = _rounded(_rounded(d, SINGLE), dtype)
        self._pictures(a.d, d.shape, dtype, a.d_strides)[...] = d
        if self.at(a.sums):
            parts = sum_parts(a)
            assert parts > 0, "sums of a result that has none"
            v = d.reshape(a.n, -1, a.o).astype(np.float64)
            sums = memory(self.at(a.sums), (a.n, parts, a.o, 2), SINGLE)
            for i, run in enumerate(np.array_split(v, parts, axis=1)):
                sums[:, i, :, 0], sums[:, i, :, 1] = run.sum(1), (run * run).sum(1)
        if self.at(a.expanded):
            assert a.o % 16 == 0 and dtype == BFLOAT16, f"expanded of {a.o} channels, {dtype}"
            memory(self.at(a.expanded), d.shape, np.uint8)[...] = expanded(d, a.expanded_exponent)

    # ---- gradients
    def conv2d_dgrad(self, a) -> None:
        shape, k = (a.n, a.h, a.w, a.c), a.kh * a.kw * a.c
        if 0 in shape:
            return
        dx = np.zeros(shape)
        if a.o and a.oh and a.ow:
            g = self._operand("g", a.g, (a.n, a.oh, a.ow, a.o), BFLOAT16, a.g_strides).astype(np.float64)
            w = self._weight("w16", a.w16, a, a.c, BFLOAT16, a.w16_stride, a.kh * a.kw).astype(np.float64)
            columns = g.reshape(-1, a.o) @ w.reshape(a.o, k)
            dx = untaps(columns.reshape(a.n, a.oh, a.ow, a.kh, a.kw, a.c), a)
        if self.at(a.residual):
            dtype = DTYPES[a.residual_dtype]
            dx = dx + self._pictures(a.residual, shape, dtype, a.residual_strides).astype(np.float64)
        dtype = DTYPES[a.dx_dtype]
        self._pictures(a.dx, shape, dtype, a.dx_strides)[...] = _rounded(_rounded(dx, SINGLE), dtype)

    def conv2d_wgrad(self, a) -> None:
        assert self.at(a.workspace) and self.at(a.workspace) % 16 == 0, "workspace"
        memory(self.at(a.workspace), (WORKSPACE,), np.uint8)[:] = 0xA5
        k, pixels = a.kh * a.kw * a.c, a.n * a.oh * a.ow
        dw, db = np.zeros((a.o, k)), np.zeros(a.o)
        if pixels and a.o:
            g = self._operand("g", a.g, (a.n, a.oh, a.ow, a.o), BFLOAT16, a.g_strides)
            g = g.astype(np.float64).reshape(pixels, a.o)
            db = g.sum(0)
            if k:
                x = self._operand("x", a.x, (a.n, a.h, a.w, a.c), BFLOAT16, a.x_strides)
                dw = g.T @ taps(x.astype(np.float64), a).reshape(pixels, k)
        for pointer, found, strides in ((a.dw, dw, (a.dw_stride, 1)), (a.db, db, (1,))):
            if self.at(pointer):
                target = memory(self.at(pointer), found.shape, SINGLE, strides)
                target[...] = _rounded(found + (target if a.accumulate else 0), SINGLE)
