"""Matrix products on the CPU: rows of an operand are rounded, decoded or quantised by panels, then sgemm.

    product(A (M, K), B (K, N)) -> out (M, N)

The longer of M and N is cut into panels, which the threads take in turn. Its operand is made a panel at a
time in memory that the next one overwrites; the shorter operand is made once, shared by the threads, and
freed on return. So a packed weight never has an FP32 copy that outlives the call. BLAS runs one thread
inside a panel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np

from ..formats import Format, QuantizedArray
from ..interop import BFLOAT16, wrap
from . import cpu_quantize as quantizer
from . import cpu_quantize_kernels as kernels
from .cpu_quantize import _flat
from .jit import njit
from .threads import num_threads, parallel_chunks, run_inline, scratch

_PANEL_BYTES = 2 << 20  # of one panel: half of a usual second-level cache
_KEPT_BYTES = 4 << 20  # larger ones are freed after use
_PANEL_ROWS = 128  # but never fewer rows: sgemm packs the other operand anew for every panel
_CHUNK_FLOPS = 6_000_000  # least work worth waking a thread for (about 0.07 ms)
_CHUNK_ELEMENTS = 1 << 16  # the same for conversions
_MAKING = 20  # flops of a product in the time in which one element of an operand is decoded or rounded

Finish = Callable[[np.ndarray, slice, slice], None]


# ---- conversions -------------------------------------------------------------------------------------------


def _to_bf16(x: np.ndarray, out: np.ndarray) -> None:
    """out = the BF16 numbers nearest to x, ties to even; C-contiguous, float32 or the bits of BF16 each."""
    if x.size < _CHUNK_ELEMENTS:  # not worth the way through the thread pool
        kernels.round_bf16(_flat(x), 0, x.size, out.reshape(-1))
    else:
        source, target = _flat(x), out.reshape(-1)
        parallel_chunks(x.size, lambda i, j: kernels.round_bf16(source, i, j, target), _CHUNK_ELEMENTS)


@njit(nogil=True, cache=True)
def _gelu(x):
    """x Phi(x) in place, exact: erfc of the float64 value, so that the negative tail keeps its digits."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            v = float(x[i, j])
            x[i, j] = 0.5 * v * math.erfc(-0.7071067811865476 * v)


def _silu(x: np.ndarray) -> None:
    """x / (1 + exp(-x)) in place; exp overflows to inf and the quotient to -0, as it should."""
    with np.errstate(over="ignore", under="ignore"):
        t = np.exp(-x)
        t += 1
        x /= t


#: In place on a float32 or float64 panel (rows, columns).
ACTIVATIONS: dict[str, Callable[[np.ndarray], None]] = {"silu": _silu, "gelu": _gelu}


def store_rows(y: np.ndarray, out: np.ndarray) -> None:
    """out[...] = y, both (rows, columns), rounded once to out's dtype."""
    if out.dtype == BFLOAT16 and y.dtype == np.float32 and y.flags.c_contiguous:
        bits = out.view(np.uint16)
        target = bits if bits.flags.c_contiguous else np.empty(bits.shape, np.uint16)
        _to_bf16(y, target)
        if target is not bits:
            bits[...] = target
    else:
        # float16: beyond 65504 is inf, without a warning from a worker thread
        with np.errstate(over="ignore"):
            out[...] = y


# ---- operands, by rows along which the last axis is contiguous ---------------------------------------------


class Values:
    """Rows of a float array (rows, k), rounded to BF16 or as they are; float64 is kept only when `exact`."""

    def __init__(self, x: np.ndarray, rounding: bool, exact: bool = False):
        self.x, self.shape = x, x.shape
        self.dtype = np.dtype(np.float64 if exact and x.dtype == np.float64 else np.float32)
        self.rounding = rounding and x.dtype != BFLOAT16
        self.direct = x.dtype == self.dtype and not self.rounding

    def fill(self, start: int, stop: int, panel: np.ndarray) -> None:
        part = self.x[start:stop]
        if part.dtype == BFLOAT16:
            _to_bf16(
                np.ascontiguousarray(part).view(np.uint16), panel
            )  # widened: they are BF16 numbers already
            return
        if not self.rounding or part.dtype != panel.dtype or not part.flags.c_contiguous:
            panel[...] = part
            part = panel
        if self.rounding:
            _to_bf16(part, panel)


class Codes:
    """Rows of a quantised array, decoded, and on the BF16 track rounded to BF16 where the format needs it."""

    direct, dtype = False, np.dtype(np.float32)

    def __init__(self, packed, block_scale, outer, fmt, shape: tuple[int, int], rounding: bool = False):
        self.packed, self.block_scale, self.outer, self.fmt = packed, block_scale, outer, fmt
        self.shape = shape
        # the values of these two are BF16 numbers already
        self.rounding = rounding and fmt.name not in ("nvfp4_exact", "mxfp4")

    def fill(self, start: int, stop: int, panel: np.ndarray) -> None:
        rows = slice(start, stop)
        outer = self.outer if self.outer is None or self.outer.size == 1 else self.outer[rows]
        scale = None if self.block_scale is None else self.block_scale[rows]
        quantizer.dequantize_rows(self.packed[rows], scale, outer, self.fmt, self.shape[1], panel)
        if self.rounding:
            _to_bf16(panel, panel)


class Quantised:
    """Rows of a float array as the quantiser would give them back; codes are never stored."""

    direct, dtype = False, np.dtype(np.float32)

    def __init__(self, x: np.ndarray, fmt: Format, search: str):
        self.x, self.fmt, self.search, self.shape = x, fmt, search, x.shape
        self.amax = None  # of each row, found on the way
        if fmt.default_outer == "tensor":
            amax = quantizer.amax_rows(x)
            self.amax = np.full(x.shape[0], amax.max(initial=np.float32(0)), np.float32)

    def fill(self, start: int, stop: int, panel: np.ndarray) -> None:
        rows = slice(start, stop)
        amax = None if self.amax is None else self.amax[rows]
        quantizer.fake_quantize_rows(self.x[rows], self.fmt, None, self.search, panel, amax=amax)


Rows = Values | Codes | Quantised


def whole(rows: Rows) -> np.ndarray:
    """All rows as one array (rows, k): a view where nothing is to be done, else new memory."""
    if rows.direct:
        return rows.x
    array = np.empty(rows.shape, rows.dtype)
    least = -(-_CHUNK_ELEMENTS // max(1, rows.shape[1]))
    parallel_chunks(rows.shape[0], lambda start, stop: rows.fill(start, stop, array[start:stop]), least)
    return array


def _panel(rows: Rows, start: int, stop: int, name: str) -> np.ndarray:
    if rows.direct:
        return rows.x[start:stop]
    panel = scratch(f"gemm {name}", (stop - start, rows.shape[1]), rows.dtype, _KEPT_BYTES)
    rows.fill(start, stop, panel)
    return panel


# ---- the product -------------------------------------------------------------------------------------------


class Matrix:
    """`rows` seen as a matrix, or as its transpose."""

    __slots__ = ("rows", "transposed", "shape")

    def __init__(self, rows: Rows, transposed: bool = False):
        self.rows, self.transposed = rows, transposed
        self.shape = rows.shape[::-1] if transposed else rows.shape

    @property
    def T(self) -> Matrix:
        return Matrix(self.rows, not self.transposed)

    def whole(self, scratch: bool = False) -> np.ndarray:
        """As an array: new memory, or this thread's scratch where the caller knows that it is small."""
        array = _panel(self.rows, 0, self.rows.shape[0], "whole") if scratch else whole(self.rows)
        return array.T if self.transposed else array


def plain_matrix(x: np.ndarray, rounding: bool, exact: bool = False) -> Matrix:
    """A float array (rows, k) of any dtype and strides; its contiguous axis becomes the rows' own."""
    by_columns = x.shape[0] > 1 and x.shape[1] > 1 and x.strides[0] == x.itemsize
    return Matrix(Values(x.T if by_columns else x, rounding, exact), by_columns)


def fake_quantized_matrix(x: np.ndarray, fmt: Format, search: str, right: bool) -> Matrix:
    """A float array (rows, K), or as right operand (K, columns), quantised on the fly along K."""
    return Matrix(Quantised(x.T if right else x, fmt, search), transposed=right)


def _parts(q: QuantizedArray):
    """packed (rows, bytes), block_scale (rows, blocks) or None, outer float32 (rows,) or None, for NumPy."""
    packed, scale, outer = (
        p if p is None or type(p) is np.ndarray else wrap(p, "operand").array
        for p in (q.packed, q.block_scale, q.outer_scale)
    )
    lead = packed.shape[:-1]
    rows = math.prod(lead)
    if outer is not None:
        if outer.shape != (*lead, 1):
            outer = np.broadcast_to(outer, (*lead, 1))
        outer = np.ascontiguousarray(outer.reshape(rows), np.float32)
    if len(lead) != 1:
        packed, scale = (None if p is None else p.reshape(rows, p.shape[-1]) for p in (packed, scale))
    return packed, scale, outer


def quantized_matrix(q: QuantizedArray, rounding: bool = False) -> Matrix:
    """A quantised array in which the blocked axis is the last (rows flattened) or, of two, the first."""
    packed, scale, outer = _parts(q)
    axis = q.axis
    rows = Codes(packed, scale, outer, q.format, (packed.shape[0], q.shape[axis]), rounding)
    return Matrix(rows, transposed=axis == 0 and q.ndim > 1)


def dense(q: QuantizedArray, rounding: bool = False) -> np.ndarray:
    """A quantised array decoded to float32 in its logical shape, whatever the order of its axes."""
    rows = Codes(*_parts(q), q.format, (q.rows, q.k), rounding)
    return whole(rows).reshape(q.stored_shape).transpose(q.order)


def product(a: Matrix, b: Matrix, out: np.ndarray, finish: Finish | None = None) -> None:
    """out (M, N) = A (M, K) @ B (K, N), then ``finish(y, rows, columns)`` in place on each accumulated panel.

    Accumulates in float32 (float64 where an operand is exact float64) and rounds once to out's dtype.
    """
    (m, k), n = a.shape, b.shape[1]
    if m == 0 or n == 0:
        return
    threads = min(num_threads(), (2 * m * n + _MAKING * (m + n)) * k // _CHUNK_FLOPS)
    if threads < 2:
        run_inline(lambda: _product(a, b, out, finish, 1))
    else:
        _product(a, b, out, finish, threads)


def _product(a: Matrix, b: Matrix, out: np.ndarray, finish: Finish | None, threads: int) -> None:
    (m, k), n = a.shape, b.shape[1]
    by_rows = m >= n  # the longer side is cut into panels, the other operand is made whole
    length, other = max(m, n), min(m, n)
    cut, kept = (a, b) if by_rows else (b, a)
    # a panel is a range of stored rows; where it would be a strided gather, all of it is made at once
    streamed = cut.transposed != by_rows
    accumulator = a.rows.dtype if a.rows.dtype == b.rows.dtype else np.dtype(np.float64)
    fixed = kept.whole(scratch=k * other * accumulator.itemsize <= _PANEL_BYTES)
    made = None if streamed else cut.whole()
    panels = _panels(length, max(k, other) * accumulator.itemsize, threads)

    def panel(start: int, stop: int) -> None:
        part = slice(start, stop)
        if streamed:
            rows = _panel(cut.rows, start, stop, "panel")
            left, right = (rows, fixed) if by_rows else (fixed, rows.T)
        else:
            left, right = (made[part], fixed) if by_rows else (fixed, made[:, part])
        rows, columns = (part, slice(0, n)) if by_rows else (slice(0, m), part)
        _multiply(left, right, out[rows, columns], accumulator, finish, rows, columns)

    # The panels are fixed, so results repeat; which thread takes the next one is not, so that a core which
    # something else uses (BLAS's own threads spin for 30 ms after a product) does not hold up the other.
    numbers = itertools.count()

    def work(first: int, last: int) -> None:
        while (i := next(numbers)) < panels:
            panel(length * i // panels, length * (i + 1) // panels)

    if threads == 1:
        work(0, 1)
    else:
        parallel_chunks(threads, work)


def _panels(length: int, row_bytes: int, threads: int) -> int:
    """Into how many panels to cut `length` rows: under _PANEL_BYTES each, two a thread, but no short ones."""
    least = -(-length // max(_PANEL_ROWS, _PANEL_BYTES // max(1, row_bytes)))
    if threads == 1:
        return least
    return max(least, threads, min(2 * threads, length // (2 * _PANEL_ROWS)))


def _multiply(left, right, target, accumulator, finish, rows, columns) -> None:
    """One product of panels into `target`, with the epilogue on the accumulators."""
    direct = target.dtype == accumulator
    y = target if direct else scratch("gemm y", target.shape, accumulator, _KEPT_BYTES)
    np.matmul(left, right, out=y)
    if finish is not None:
        finish(y, rows, columns)
    if not direct:
        store_rows(y, target)


def add_product(y: np.ndarray, left: np.ndarray, right: np.ndarray) -> None:
    """y += left @ right, float32: a low-rank branch into the accumulators of a panel."""
    part = scratch("gemm branch", y.shape, y.dtype, _KEPT_BYTES)
    np.matmul(left, right, out=part)
    y += part


def batched(a: np.ndarray, b: np.ndarray, out: np.ndarray, finish: Finish | None = None) -> None:
    """out (batch..., M, N) = a (..., M, K) @ b (..., K, N), leading axes broadcast, both made whole before.

    `finish` sees each matrix of the batch with ``rows`` a slice of the flattened (batch * M) rows.
    """
    lead, (m, n) = out.shape[:-2], out.shape[-2:]
    a, b = (np.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (a, b))
    accumulator = np.result_type(a.dtype, b.dtype)

    def chunk(first: int, last: int) -> None:
        for i in range(first, last):
            at = np.unravel_index(i, lead)
            rows = slice(i * m, (i + 1) * m)
            _multiply(a[at], b[at], out[at], accumulator, finish, rows, slice(0, n))

    parallel_chunks(math.prod(lead), chunk, -(-_CHUNK_FLOPS // max(1, 2 * m * n * a.shape[-1])))
