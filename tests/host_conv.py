"""Emulation of the convolutions for `host_cuda`: products of patches in float64, rounded as fp4bf16.h says.

The `_simple` functions are the same: what they sum is.
"""

from __future__ import annotations

from itertools import product

import numpy as np
from host_cuda import DTYPES, _rounded, memory

from fp4bf16.backends import cpu_quantize
from fp4bf16.formats import FORMATS
from fp4bf16.interop import BFLOAT16
from fp4bf16.python_ref.conv import phase_weights
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
    library._define("phase_weights", "const float*, int64_t, int64_t, float*, void*", found.phase_weights)
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
    phases = 4 if a.phases else 1
    pixels = a.oh * a.ow // phases
    return 0 if pixels % 16 else max(1, pixels // 128) * phases


def taps(x: np.ndarray, a) -> np.ndarray:
    """(n, oh, ow, kh, kw, c): what each output pixel meets, zero outside the pictures; a copy."""
    n, h, w, c = x.shape
    rows, columns = (a.oh - 1) * a.stride + a.kh, (a.ow - 1) * a.stride + a.kw
    padded = np.zeros((n, max(rows, a.top + h), max(columns, a.left + w), c), x.dtype)
    padded[:, a.top : a.top + h, a.left : a.left + w] = x
    view = np.lib.stride_tricks.sliding_window_view(padded[:, :rows, :columns], (a.kh, a.kw), axis=(1, 2))
    return np.ascontiguousarray(view[:, :: a.stride, :: a.stride].transpose(0, 1, 2, 4, 5, 3))


def phase_taps(x: np.ndarray, a) -> np.ndarray:
    """`taps` of an `a.phases`: for each pixel of the result those of the small pictures."""
    n, h, w, c = x.shape
    found = np.zeros((n, a.oh, a.ow, a.kh, a.kw, c), x.dtype)
    for (i, j), (r, s) in product(np.ndindex(a.oh, a.ow), np.ndindex(a.kh, a.kw)):
        y, z = i // 2 + i % 2 + r - a.top, j // 2 + j % 2 + s - a.left
        if 0 <= y < h and 0 <= z < w:
            found[:, i, j, r, s] = x[:, y, z]
    return found


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
        self.at, self.runs = library.at, library.runs

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

    # ---- by phases
    def phase_weights(self, weight, o, c, out) -> None:
        w = memory(self.at(weight), (o, 3, 3, c), SINGLE)
        memory(self.at(out), (o, 2, 2, 2, 2, c), SINGLE)[...] = phase_weights(np.array(w))

    @staticmethod
    def _products(x: np.ndarray, w: np.ndarray, a, phases: int) -> np.ndarray:
        """x (n, h, w, c) times w (o, taps * c), both float64: (n, oh, ow, o)."""
        shape = a.n, a.oh, a.ow, a.o
        if not phases:
            return (taps(x, a).reshape(a.n * a.oh * a.ow, -1) @ w.T).reshape(shape)
        patches, w = phase_taps(x, a), w.reshape(a.o, 2, 2, -1)
        d = np.zeros(shape)
        for i, j in np.ndindex(2, 2):
            part = patches[:, i::2, j::2]
            d[:, i::2, j::2] = part.reshape(*part.shape[:3], -1) @ w[:, i, j].T
        return d

    # ---- forward
    def conv2d(self, a) -> None:
        if not self.runs(a.run_if):
            return
        assert 0 not in (a.kh, a.kw, a.stride) and min(a.top, a.left) >= 0, "sizes"
        assert a.phases in (0, 1), f"phases is {a.phases}"
        if a.phases:
            assert a.stride == 1 and a.oh % 2 == a.ow % 2 == 0 and a.kh * a.kw <= 8, "sizes with phases"
            assert not self.at(a.residual) and not a.x16_on_output, "operands on the result's grid"
        count = a.kh * a.kw * (4 if a.phases else 1)
        shape, pixels = (a.n, a.oh, a.ow, a.o), a.n * a.oh * a.ow
        d, scale = np.zeros(shape), self._scales(a)
        if 0 in shape:
            return
        if a.c8:
            x = self._operand("x8", a.x8, (a.n, a.h, a.w, a.c8), np.dtype(np.uint8), a.x8_strides)
            w = self._weight("w8", a.w8, a, a.c8, np.dtype(np.uint8), a.w8_stride, count)
            d = self._products(E4M3[x].astype(np.float64), E4M3[w].astype(np.float64), a, a.phases) * scale
        if a.c16:
            on_output = a.x16_on_output
            grid, count = ((a.oh, a.ow), 1) if on_output else ((a.h, a.w), count)
            x = self._operand("x16", a.x16, (a.n, *grid, a.c16), BFLOAT16, a.x16_strides)
            w = self._weight("w16", a.w16, a, a.c16, BFLOAT16, a.w16_stride, count).astype(np.float64)
            x = x.astype(np.float64)
            if on_output:
                found = (x.reshape(pixels, -1) @ w.T).reshape(shape)
            else:
                found = self._products(x, w, a, a.phases)
            d = d + (found if a.c8 else found * scale)
        self._finish(a, d * a.alpha)

    def _scales(self, a) -> np.ndarray:
        """image_scale x col_scale, for (n, oh, ow, o)."""
        if a.phases:
            return self._phase_scales(a)
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

    def _phase_scales(self, a) -> np.ndarray:
        scale = np.ones((a.n, a.oh, a.ow, a.o))
        if self.at(a.image_scale):
            images = memory(self.at(a.image_scale), (a.n,), SINGLE, (a.image_scale_step,))
            scale *= images[:, None, None, None]
        if self.at(a.col_scale):
            columns = memory(self.at(a.col_scale), (4 * a.o,), SINGLE, (a.col_scale_step,)).reshape(a.o, 2, 2)
            for i, j in np.ndindex(2, 2):
                scale[:, i::2, j::2] *= columns[:, i, j]
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
            count = a.kh * a.kw * (4 if a.phases else 1)
            w = self._weight("w16", a.w16, a, a.c, BFLOAT16, a.w16_stride, count).astype(np.float64)
            if a.phases:
                dx = self._phase_gradient(a, g, w)
            else:
                columns = g.reshape(-1, a.o) @ w.reshape(a.o, k)
                dx = untaps(columns.reshape(a.n, a.oh, a.ow, a.kh, a.kw, a.c), a)
        if self.at(a.residual):
            dtype = DTYPES[a.residual_dtype]
            dx = dx + self._pictures(a.residual, shape, dtype, a.residual_strides).astype(np.float64)
        dtype = DTYPES[a.dx_dtype]
        self._pictures(a.dx, shape, dtype, a.dx_strides)[...] = _rounded(_rounded(dx, SINGLE), dtype)

    @staticmethod
    def _phase_gradient(a, g: np.ndarray, w: np.ndarray) -> np.ndarray:
        """The adjoint of `phase_taps` of g times w."""
        assert a.stride == 1 and a.oh % 2 == a.ow % 2 == 0, "sizes with phases"
        dx, w = np.zeros((a.n, a.h, a.w, a.c)), w.reshape(a.o, 2, 2, a.kh, a.kw, a.c)
        for (i, j), (r, s) in product(np.ndindex(a.oh, a.ow), np.ndindex(a.kh, a.kw)):
            y, z = i // 2 + i % 2 + r - a.top, j // 2 + j % 2 + s - a.left
            if 0 <= y < a.h and 0 <= z < a.w:
                dx[:, y, z] += g[:, i, j] @ w[:, i % 2, j % 2, r, s]
        return dx

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
