"""Convolution on the CPU: gather the patches, rounding to BF16 on the way, then one BLAS product a block of
lines.

A *line* is one row of output pixels of one picture; lines are numbered over the whole batch. Each thread
takes a contiguous range of lines and works through it in blocks whose patches stay in its second-level cache.

    forward   Y (pixels, O) = P (pixels, kh*kw*C) @ W (O, kh*kw*C)^T
    wgrad    dW (kh*kw*C, O) = P^T @ G (pixels, O), one partial sum a thread, added in index order
    dgrad    stride 1: the convolution of G with the flipped weights; stride > 1: P' = G @ W, added back to
             where the patches came from

The last form serves a stride-1 convolution to fewer channels as well, and wgrad then takes the patches of G:
patches are made of the narrower side, because moving them is what costs beside the product.

Accumulation is BLAS's, in float32 (float64 for float64 operands that are not rounded).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ..interop import BFLOAT16
from . import cpu_quantize as quantizer
from .jit import njit
from .threads import parallel_chunks, scratch

_BLOCK_BYTES = 1 << 20  # patches of one block of lines: half of a usual second-level cache
_CHUNK_FLOPS = 12_000_000  # least work worth waking a thread for (about 0.1 ms)


#: finish(y, rows, columns) changes a block of sums in place, before it is rounded and stored.
Finish = Callable[[np.ndarray, slice, slice], None]


class Geometry(NamedTuple):
    """Sizes of one convolution: x (n, h, w, c), weights (o, kh, kw, c), y (n, oh, ow, o); padding above and
    left."""

    n: int
    h: int
    w: int
    c: int
    o: int
    kh: int
    kw: int
    stride: int
    top: int
    left: int
    oh: int
    ow: int

    @property
    def k(self) -> int:
        """Length of a patch."""
        return self.kh * self.kw * self.c

    @property
    def lines(self) -> int:
        return self.n * self.oh

    @property
    def pixels(self) -> int:
        return self.n * self.oh * self.ow

    @property
    def pointwise(self) -> bool:
        """A patch is one pixel, and the patches are the pixels in order."""
        return (self.kh == self.kw == self.stride == 1 and self.top == self.left == 0
                and self.oh == self.h and self.ow == self.w)  # fmt: skip


# ---- numba kernels: flat arrays and explicit offsets, so that the inner loops are plain copies -------------


@njit(nogil=True, cache=True, inline="always")
def _nearest_bf16(bits):
    """float32 bits -> those of the nearest BF16, ties to even; NaN stays NaN."""
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return (bits | np.uint32(0x00400000)) & np.uint32(0xFFFF0000) if nan else rounded


@njit(nogil=True, cache=True)
def _round(x, y):
    """y = the BF16 nearest to x: uint32 bits of float32 in and out."""
    for i in range(x.size):
        y[i] = _nearest_bf16(np.uint32(x[i]))


@njit(nogil=True, cache=True)
def _narrow(x, y):
    """y = the BF16 nearest to x: uint32 bits of float32 -> uint16 bits of bfloat16."""
    for i in range(x.size):
        y[i] = np.uint16(_nearest_bf16(x[i]) >> np.uint32(16))


@njit(nogil=True, cache=True)
def _widen(x, y):
    """uint16 bits of bfloat16 -> uint32 bits of float32."""
    for i in range(x.size):
        y[i] = np.uint32(x[i]) << np.uint32(16)


@njit(nogil=True, cache=True)
def _copy(x, y):
    for i in range(x.size):  # a loop's own index: `x[offset + i]` is tested for wrap-around, not vectorised
        y[i] = x[i]


@njit(nogil=True, cache=True)
def _add(x, y):
    for i in range(x.size):
        y[i] += x[i]


@njit(nogil=True, cache=True)
def _gather(x, cols, window, first, last, h, w, c, kh, kw, stride, top, left, oh, ow, rounding):
    """Patches of lines [first, last) of x, all flat; `window` holds the padded lines that one picture's share
    needs.

    x and cols are float64, or uint32 bits of float32 (rounded to BF16 when `rounding`).
    """
    width = (ow - 1) * stride + kw  # of the padded picture, as far as patches reach
    begin, end = max(0, -left), min(w, width - left)  # columns of x inside it
    line, at = first, 0
    while line < last:
        n, y0 = divmod(line, oh)
        y1 = min(oh, y0 + last - line)
        rows = (y1 - 1 - y0) * stride + kh
        for r in range(rows):
            base = r * width * c
            iy = y0 * stride + r - top
            if iy < 0 or iy >= h or end <= begin:
                window[base : base + width * c] = 0
                continue
            lo, hi = base + (begin + left) * c, base + (end + left) * c
            window[base:lo] = 0
            window[hi : base + width * c] = 0
            source = ((n * h + iy) * w + begin) * c
            if rounding:
                _round(x[source : source + hi - lo], window[lo:hi])
            else:
                _copy(x[source : source + hi - lo], window[lo:hi])
        run = kw * c
        for y in range(y1 - y0):
            for ox in range(ow):
                for i in range(kh):
                    source = ((y * stride + i) * width + ox * stride) * c
                    _copy(window[source : source + run], cols[at : at + run])
                    at += run
        line += y1 - y0


@njit(nogil=True, cache=True)
def _scatter(cols, x, window, first, last, h, w, c, kh, kw, stride, top, left, oh, ow):
    """The transpose of `_gather` for whole pictures [first, last): patches added back to where they came
    from."""
    width = (ow - 1) * stride + kw
    begin, end = max(0, -left), min(w, width - left)
    run, at = kw * c, 0
    for n in range(first, last):
        window[:] = 0
        for y in range(oh):
            for ox in range(ow):
                for i in range(kh):
                    target = ((y * stride + i) * width + ox * stride) * c
                    _add(cols[at : at + run], window[target : target + run])
                    at += run
        for iy in range(h):
            base = (n * h + iy) * w * c
            x[base : base + w * c] = 0
            r = iy + top
            if 0 <= r < (oh - 1) * stride + kh and end > begin:
                source = (r * width + begin + left) * c
                _copy(window[source : source + (end - begin) * c], x[base + begin * c : base + end * c])


# ---- values and buffers ------------------------------------------------------------------------------------

def values(x: np.ndarray, exact: bool = False) -> np.ndarray:
    """x as C-contiguous numbers to compute with: float64 if `exact` and x is float64, else float32.

    bfloat16 and float16 become float32 without loss; float64 is rounded to float32 unless `exact`.
    """
    if x.dtype == BFLOAT16:
        x = np.ascontiguousarray(x)
        y = np.empty(x.shape, np.float32)
        _widen(x.view(np.uint16).reshape(-1), y.view(np.uint32).reshape(-1))
        return y
    return np.ascontiguousarray(x, np.float64 if exact and x.dtype == np.float64 else np.float32)


def rounded(x: np.ndarray) -> np.ndarray:
    """float32 array of the BF16 values nearest to x, ties to even."""
    if x.dtype == BFLOAT16:
        return values(x)
    x = values(x)
    y = np.empty(x.shape, np.float32)
    _round(x.view(np.uint32).reshape(-1), y.view(np.uint32).reshape(-1))
    return y


def round_in_place(x: np.ndarray) -> None:
    """x, C-contiguous float32, becomes the BF16 values nearest to it."""
    flat = x.reshape(-1).view(np.uint32)
    _round(flat, flat)


def store(y: np.ndarray, out: np.ndarray) -> None:
    """out[...] = y, rounded once to out's dtype."""
    if y is out:
        return
    if out.dtype == BFLOAT16 and y.dtype == np.float32 and out.flags.c_contiguous and y.flags.c_contiguous:
        _narrow(y.view(np.uint32).reshape(-1), out.view(np.uint16).reshape(-1))
    else:
        out[...] = y


def bits(x: np.ndarray) -> np.ndarray:
    """Flat view that the kernels take: float64, or the bits of float32."""
    flat = x.reshape(-1)
    return flat if flat.dtype == np.float64 else flat.view(np.uint32)


def _blocks(first: int, last: int, most: int) -> Iterator[tuple[int, int]]:
    """Even contiguous parts of range(first, last), none longer than `most`."""
    parts = -(-(last - first) // max(1, most))
    for i in range(parts):
        yield first + (last - first) * i // parts, first + (last - first) * (i + 1) // parts


class _Patches:
    """The patches of x, block by block; `rounding` rounds them to BF16 as they are copied."""

    def __init__(self, x: np.ndarray, geo: Geometry, rounding: bool):
        self.x, self.geo, self.rounding, self.dtype = bits(x), geo, rounding, x.dtype
        self.most = max(1, _BLOCK_BYTES // max(1, geo.ow * geo.k * x.itemsize))  # lines a block
        self.direct = x.reshape(geo.pixels, geo.c) if geo.pointwise and not rounding else None
        self.kind = self.x.dtype

    def lines(self, first: int, last: int) -> np.ndarray:
        """(pixels, kh*kw*C) of lines [first, last), in this thread's buffer."""
        g = self.geo
        if self.direct is not None:
            return self.direct[first * g.ow : last * g.ow]
        cols = scratch("conv cols", ((last - first) * g.ow, g.k), self.dtype)
        if g.pointwise:
            _round(self.x[first * g.ow * g.c : last * g.ow * g.c], bits(cols))
            return cols
        rows = (min(last - first, g.oh) - 1) * g.stride + g.kh
        window = scratch("conv window", (rows * ((g.ow - 1) * g.stride + g.kw) * g.c,), self.kind)
        _gather(self.x, bits(cols), window, first, last, g.h, g.w, g.c, g.kh, g.kw, g.stride, g.top, g.left,
                g.oh, g.ow, self.rounding)  # fmt: skip
        return cols


def least(flops_each: int) -> int:
    """Lines or pictures that make a chunk worth a thread of its own."""
    return max(1, -(-_CHUNK_FLOPS // max(1, flops_each)))


# ---- the three products ------------------------------------------------------------------------------------


def conv_forward(x: np.ndarray, w: np.ndarray, geo: Geometry, out: np.ndarray, rounding: bool,
                 finish: Finish | None = None) -> None:  # fmt: skip
    """out (pixels, O) = patches of x times w (O, k), then ``finish(y, pixels, channels)`` in place on each
    block y of sums.

    x is what `values` returns, w holds values of the same dtype, `out` is C-contiguous of any dtype.
    """
    if _narrows(geo):
        adjoint = _adjoint(geo)
        flipped = _flipped(w.reshape(geo.o, geo.kh, geo.kw, geo.c))
        _spread(x, flipped, adjoint, out.reshape(geo.n, geo.oh, geo.ow, geo.o), rounding, finish)
    else:
        _collect(x, w, geo, out, rounding, finish)


def conv_dgrad(g: np.ndarray, w: np.ndarray, geo: Geometry, out: np.ndarray, round_g: bool) -> None:
    """out (n, h, w, c) = gradient in x of the convolution `geo`; g (n, oh, ow, o), w (o, kh, kw, c)."""
    if geo.stride == 1 and not _narrows(_adjoint(geo)):
        adjoint = _adjoint(geo)
        rows = out.reshape(adjoint.pixels, geo.c)
        _collect(g, _flipped(w).reshape(geo.c, adjoint.k), adjoint, rows, round_g, None)
    else:
        _spread(g, w, geo, out, round_g, None)


def conv_wgrad(g: np.ndarray, x: np.ndarray, geo: Geometry, rounding: bool, round_g: bool) -> np.ndarray:
    """dW (O, kh, kw, C) from g (n, oh, ow, o) and x (n, h, w, c); partial sums are added in order."""
    if not _narrows(geo):
        total = _products(g.reshape(geo.pixels, geo.o), x, geo, rounding, round_g)
        return total.reshape(geo.kh, geo.kw, geo.c, geo.o).transpose(3, 0, 1, 2)
    adjoint = _adjoint(geo)
    total = _products(x.reshape(adjoint.pixels, geo.c), g, adjoint, round_g, rounding)
    return total.reshape(geo.kh, geo.kw, geo.o, geo.c)[::-1, ::-1].transpose(2, 0, 1, 3)


def _narrows(geo: Geometry) -> bool:
    """Whether the results are the narrower side, and their patches cheaper to move than the inputs'."""
    return geo.stride == 1 and geo.kh * geo.kw > 1 and 2 * geo.o <= geo.c and geo.n > 1


def _adjoint(geo: Geometry) -> Geometry:
    """The convolution by flipped weights that is the transpose of a convolution with stride 1."""
    return Geometry(geo.n, geo.oh, geo.ow, geo.o, geo.c, geo.kh, geo.kw, 1,
                    geo.kh - 1 - geo.top, geo.kw - 1 - geo.left, geo.h, geo.w)  # fmt: skip


def _flipped(w: np.ndarray) -> np.ndarray:
    """(O, kh, kw, C) -> (C, kh, kw, O) with both kernel axes reversed: the weights of `_adjoint`."""
    return np.ascontiguousarray(w[:, ::-1, ::-1].transpose(3, 1, 2, 0))


def _collect(x, w, geo: Geometry, out, rounding: bool, finish: Finish | None) -> None:
    """out (pixels, O) = patches of x (pixels, k) @ w^T."""
    patches, w_t, channels = _Patches(x, geo, rounding), w.T, slice(0, geo.o)

    def lines(first: int, last: int) -> None:
        for a, b in _blocks(first, last, patches.most):
            pixels = slice(a * geo.ow, b * geo.ow)
            target = out[pixels]
            y = target if out.dtype == x.dtype else scratch("conv y", target.shape, x.dtype)
            np.matmul(patches.lines(a, b), w_t, out=y)
            if finish is not None:
                finish(y, pixels, channels)
            store(y, target)

    parallel_chunks(geo.lines, lines, least(2 * geo.ow * geo.k * geo.o))


def _spread(g, w, geo: Geometry, out, round_g: bool, finish: Finish | None) -> None:
    """out (n, h, w, c) = what the patches g (pixels, O) @ w (O, k) add up to where they overlap."""
    direct = out if out.dtype == g.dtype else np.empty(out.shape, g.dtype)
    rows, matrix = g.reshape(geo.pixels, geo.o), w.reshape(geo.o, geo.k)
    each = geo.oh * geo.ow  # pixels a picture
    most = max(1, _BLOCK_BYTES // max(1, each * geo.k * g.itemsize))
    size = ((geo.oh - 1) * geo.stride + geo.kh) * ((geo.ow - 1) * geo.stride + geo.kw) * geo.c
    channels = slice(0, geo.c)

    def pictures(first: int, last: int) -> None:
        window = scratch("conv window", (size,), g.dtype)
        for a, b in _blocks(first, last, most):
            cols = scratch("conv cols", ((b - a) * each, geo.k), g.dtype)
            np.matmul(_rows(rows, a * each, b * each, round_g), matrix, out=cols)
            _scatter(cols.reshape(-1), direct.reshape(-1), window, a, b, geo.h, geo.w, geo.c, geo.kh, geo.kw,
                     geo.stride, geo.top, geo.left, geo.oh, geo.ow)  # fmt: skip
            if finish is not None:
                pixels = slice(a * geo.h * geo.w, b * geo.h * geo.w)
                finish(direct[a:b].reshape(pixels.stop - pixels.start, geo.c), pixels, channels)
            if direct is not out:
                store(direct[a:b], out[a:b])

    parallel_chunks(geo.n, pictures, least(2 * each * geo.k * geo.o))


def _products(rows_of, x, geo: Geometry, rounding: bool, round_rows: bool) -> np.ndarray:
    """patches of x (pixels, k)^T @ rows (pixels, O) -> (k, O)."""
    patches, parts = _Patches(x, geo, rounding), {}

    def lines(first: int, last: int) -> None:
        total = None
        for a, b in _blocks(first, last, patches.most):
            part = patches.lines(a, b).T @ _rows(rows_of, a * geo.ow, b * geo.ow, round_rows)
            total = part if total is None else np.add(total, part, out=total)
        parts[first] = total

    parallel_chunks(geo.lines, lines, least(2 * geo.ow * geo.k * geo.o))
    total, *others = [parts[first] for first in sorted(parts)] or [np.zeros((geo.k, geo.o), x.dtype)]
    for part in others:
        total += part
    return total


def _rows(g: np.ndarray, first: int, last: int, rounding: bool) -> np.ndarray:
    """Rows [first, last) of g (pixels, O), rounded to BF16 into this thread's buffer when asked."""
    rows = g[first:last]
    if not rounding:
        return rows
    buffer = scratch("conv rows", rows.shape, g.dtype)
    _round(bits(rows), bits(buffer))
    return buffer


def column_sums(x: np.ndarray) -> np.ndarray:
    """Sum over the rows of x (rows, columns), as a product with ones: BLAS adds in many lanes."""
    return np.ones(x.shape[0], x.dtype) @ x


def fake_quantize(x: np.ndarray, fmt, search: str, outer: str = "image") -> np.ndarray:
    """Decoded FP4 values of x (groups, ..., K), float32, blocked along the last axis.

    One outer scale for each index of the first axis ("image": a picture, an output channel, a head), or for
    each row; formats without an outer scale ignore that.
    """
    rows, amax = _grouped(x, fmt, outer)
    return quantizer.fake_quantize_rows(rows, fmt, None, search, amax=amax).reshape(x.shape)


def fake_quantize_sums(x: np.ndarray, fmt, search: str, outer: str = "image") -> tuple:
    """`fake_quantize` with what a certificate needs of the same pass: (values, sums float64 (rows, 3), counts
    (5,)), as `cpu_quantize.QuantizedRows` has them. outer: "tensor" is one scale for all as well.
    """
    rows, amax = _grouped(x, fmt, outer)
    found, sums, counts = quantizer.fake_quantize_sums(rows, fmt, search, amax)
    return found.reshape(x.shape), sums, counts


def _grouped(x: np.ndarray, fmt, outer: str) -> tuple[np.ndarray, np.ndarray | None]:
    """(rows of x, largest magnitude of the group that shares each one's outer scale, or None: of the row)."""
    rows, amax = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), None
    if outer != "row" and fmt.default_outer is not None and x.size:
        groups = x.shape[0] if outer == "image" else 1
        amax = quantizer.amax_rows(rows).reshape(groups, -1).max(1)
        amax = np.repeat(amax, rows.shape[0] // groups)
    return rows, amax
