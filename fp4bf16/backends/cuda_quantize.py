"""Quantise, decode and expand on the device: the compiled library's kernels behind the public functions.

`quantize_array` is the whole of it for callers that want other results than a container: the expansion alone,
the low-rank branch's T, the gathered outlier columns.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from .. import device
from ..device import DeviceArray
from ..errors import DTypeError, NonFiniteError, ShapeError
from ..formats import Format, QuantizedArray, QuantStats
from ..interop import np_dtype
from ..layout import (
    Rows,
    check_axis,
    check_options,
    check_out,
    check_outer,
    check_outer_shape,
    exponent_scales,
    groups,
    kept_axes,
    rows_of,
    stored_order,
)
from ..python_ref.random import seed_words
from . import cuda

DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
FORMAT_CODES = {"nvfp4_exact": 0, "nvfp4": 1, "mxfp4": 2, "fp8": 3}
RULES = {
    None: 0, "te": 1, "four_over_six": 2, "four_over_six_mae": 3, "four_over_six_448": 4,
    "four_over_six_mae_448": 5, "even": 6, "floor": 7, "rceil": 8, "ceil": 9,
}  # fmt: skip
EXPANDED = ("nvfp4_exact", "fp8")  # formats whose expansion is exact whatever the numbers


class DeviceQuantized(NamedTuple):
    """What one pass made, None where it was not asked for; `rows` and K are those of the stored layout.

    packed: uint8 (\\*lead, Kp / 2), fp8 (\\*lead, K). block_scale: uint8 (\\*lead, Kp / block). outer_scale:
    float32 in the container's shape. expanded: uint8 (\\*lead, Kp rounded up to `align`). sums: float64
    (rows, 3); counts: int32 (5,), as in fp4bf16.h. hidden: bfloat16 (rows, rank + outliers).
    """

    packed: DeviceArray | None
    block_scale: DeviceArray | None
    outer_scale: DeviceArray | None
    expanded: DeviceArray | None
    sums: DeviceArray | None
    counts: DeviceArray | None
    hidden: DeviceArray | None
    order: tuple[int, ...]


class DeviceStats(QuantStats):
    """`QuantStats` that stay on the device until one is asked for, which waits for the quantiser."""

    def __init__(self, sums: DeviceArray, counts: DeviceArray, source_dtype: str):
        self._sums, self._counts, self.source_dtype = sums, counts, source_dtype

    def _row(self, column: int) -> np.ndarray:
        if not isinstance(self._sums, np.ndarray):
            self._sums = device.to_host(self._sums.owner)
        return self._sums[:, column]

    def _count(self, index: int) -> int:
        if not isinstance(self._counts, np.ndarray):
            self._counts = device.to_host(self._counts.owner)
        return int(self._counts[index])

    row_norm_sq = property(lambda self: self._row(0))
    row_quantized_norm_sq = property(lambda self: self._row(1))
    row_error_sq = property(lambda self: self._row(2))
    clipped = property(lambda self: self._count(0))
    underflowed_blocks = property(lambda self: self._count(1))
    zero_blocks = property(lambda self: self._count(2))
    overflow = property(lambda self: self._count(3))

    def on_host(self) -> QuantStats:
        return QuantStats(
            self.row_norm_sq, self.row_quantized_norm_sq, self.row_error_sq, self.clipped,
            self.underflowed_blocks, self.zero_blocks, self.overflow, self.source_dtype,
        )  # fmt: skip

    def __reduce__(self):  # copies and pickles are plain numbers
        host = self.on_host()
        return QuantStats, tuple(getattr(host, name) for name in QuantStats.__dataclass_fields__)

    def __repr__(self) -> str:
        return f"DeviceStats of {self._sums.shape[0]} rows"


# ---- the kernel's arguments --------------------------------------------------------------------------------
@cache
def _pointers(library: Any) -> dict[str, Any]:
    fields = library.ffi.typeof("fp4bf16_quantize_args").fields
    return {name: field.type for name, field in fields if field.type.kind == "pointer"}


class _Arguments:
    """A zeroed fp4bf16_quantize_args; addresses are set with their C types."""

    def __init__(self):
        library = cuda.load()
        self.struct = library.ffi.new("fp4bf16_quantize_args*")
        self._cast, self._kinds = library.ffi.cast, _pointers(library)

    def point(self, **arrays: DeviceArray | None) -> None:
        for name, array in arrays.items():
            if array is not None:
                setattr(self.struct, name, self._cast(self._kinds[name], array.address))


def _strided_rows(x: DeviceArray, axis: int, after: int | None):
    """(x or a contiguous copy of it, its rows)."""
    rows = _walk(x, axis, after)
    if rows is None:
        x = device.contiguous(x)
        rows = _walk(x, axis, after)
    return x, rows


def _walk(x: DeviceArray, axis: int, after: int | None) -> Rows | None:
    if x.address % x.itemsize:
        return None
    lead, strides = ([n for i, n in enumerate(v) if i != axis] for v in (x.shape, x.strides))
    return rows_of(lead, strides, x.shape[axis], x.strides[axis], after)


def _outer_arguments(args: _Arguments, x: DeviceArray, outer, lead: tuple[int, ...], axis: int):
    """Sets the groups and given scales -> (shape of the outer scale, the given scales or None)."""
    struct, rows = args.struct, math.prod(lead)
    if outer is None:
        struct.mid, struct.inner = 1, max(rows, 1)
        return None, None
    if isinstance(outer, str):
        keep = kept_axes(outer, len(lead) + 1, axis)
        varies = [i in keep for i in range(len(lead))]
        struct.mid, struct.inner = map(lambda n: max(n, 1), groups(lead, varies))
        return (*(n if v else 1 for n, v in zip(lead, varies, strict=True)), 1), None
    scale = _given_scales(x, outer, lead)
    if scale.size == 1:
        struct.mid, struct.inner, struct.outer_given_stride = max(rows, 1), 1, 0
        args.point(outer_given=scale)
        return scale.shape, (scale, scale)
    full = device.contiguous(device.broadcast(scale, (*lead, 1)))
    struct.mid, struct.inner, struct.outer_given_stride = 1, max(rows, 1), 1
    args.point(outer_given=full)
    return scale.shape, (scale, full)


def _given_scales(x: DeviceArray, outer, lead: tuple[int, ...]) -> DeviceArray:
    """2^e of exponents on the device (not looked at: outside -119 .. 120 the nearer bound) or on the host."""
    if device.is_device(outer):
        e = device.operand(outer, "outer")
        device.common("quantize", (x, e))
        if e.dtype not in ("int8", "int16", "int32", "int64", "uint8"):
            raise DTypeError(f"quantize: outer has dtype {e.dtype}, but exponents are whole numbers; pass "
                             f"int32")  # fmt: skip
        shape = check_outer_shape(e.shape, lead)
        scale = device.contiguous(device.powers_of_two(e))
        return device.reshape(scale, shape)
    scale = exponent_scales(outer, lead)
    if scale.size == 1:
        return device.full(scale.shape, float(scale.reshape(-1)[0]), "float32", x)
    return device.from_host(scale, x)


# ---- quantise ----------------------------------------------------------------------------------------------
def quantize_array(
    x: DeviceArray, fmt: Format, axis: int, outer, handle: int, *, rounding="nearest", seed=0,
    scale_rule=None, search="full", packed=True, expanded=False, align=1, stats=True,
    down_t: DeviceArray | None = None, outlier_index: DeviceArray | None = None, hidden_align=8,
    out: DeviceQuantized | None = None,
) -> DeviceQuantized:  # fmt: skip
    """Quantise on the stream `handle`; inside `device.ordered`.

    Args:
        x: any strides; float64 is converted to float32, what the kernel cannot walk is copied, both by the
            framework. axis, outer: as in `fp4bf16.quantize`, axis from 0.
        packed, expanded, stats: which results to make. align: the rows of `expanded` are a multiple of so
            many bytes long.
        down_t: bfloat16 (rank, K): `hidden` is bf16(x @ down). outlier_index: int32 (outliers,) ascending:
            these columns go to `hidden` behind the rank, and count as zero elsewhere. The rows of `hidden`
            are a multiple of `hidden_align` long.
        out: arrays to write to, C-contiguous; those that are None are made.
    """
    if x.dtype not in DTYPES:
        x = device.astype(x, "float32")
    lead = tuple(n for i, n in enumerate(x.shape) if i != axis)
    rows, k = math.prod(lead), x.shape[axis]
    kp = -(-k // fmt.multiple) * fmt.multiple
    args = _Arguments()
    struct = args.struct
    outer_shape, given = _outer_arguments(args, x, outer, lead, axis)
    result = _results(x, fmt, lead, k, kp, outer_shape, given, packed, expanded, align, stats, out)
    hidden = None
    if down_t is not None or outlier_index is not None:
        hidden = _hidden(args, x, rows, k, down_t, outlier_index, hidden_align)
    result = result._replace(hidden=hidden, order=stored_order(x.ndim, axis))
    if rows == 0 or k == 0:
        _clear(result, given is None)
        return result
    after = math.prod(x.shape[axis + 1 :]) if rounding == "stochastic" else None
    x, form = _strided_rows(x, axis, after)
    struct.rows, struct.k_size = rows, k
    struct.after, struct.x_stride, struct.k_stride = form
    struct.dtype, struct.format = DTYPES[x.dtype], FORMAT_CODES[fmt.name]
    struct.rule, struct.search = RULES[scale_rule], search == "fast"
    if rounding == "stochastic":
        struct.rounding = 1
        struct.seed, struct.stream_word, struct.call_word = seed_words(seed)
    args.point(x=x, packed=result.packed, block_scale=result.block_scale, expanded=result.expanded,
               sums=result.sums, counts=result.counts)  # fmt: skip
    if given is None:
        args.point(outer_scale=result.outer_scale)
    if result.expanded is not None:
        struct.expanded_stride = result.expanded.shape[-1]
    size = cuda.load().lib.fp4bf16_quantize_workspace_size(struct)
    workspace = device.empty((size,), "uint8", x) if size > 0 else None
    args.point(workspace=workspace)
    device.call("quantize", struct, handle)
    return result


def _results(x, fmt, lead, k, kp, outer_shape, given, packed, expanded, align, stats, out) -> DeviceQuantized:
    """Arrays for what was asked for: those of `out`, else new ones."""

    def make(name: str, wanted: bool, shape: tuple[int, ...], dtype: str) -> DeviceArray | None:
        if not wanted:
            return None
        ready = getattr(out, name) if out is not None else None
        return device.empty(shape, dtype, x, name) if ready is None else ready

    rows, blocks = math.prod(lead), kp // fmt.block if fmt.block else 0
    width = -(-kp // align) * align
    codes = make("packed", packed, (*lead, kp // 2 if fmt.block else k), "uint8")
    scale = make("block_scale", fmt.block > 0 and packed, (*lead, blocks), "uint8")
    whole = make("expanded", expanded, (*lead, width), "uint8")
    sums = make("sums", stats, (rows, 3), "float64")
    counts = device.full((5,), 0, "int32", x) if stats else None
    if outer_shape is None:
        outer = None
    elif given is None or out is not None:
        outer = make("outer_scale", True, outer_shape, "float32")
        if outer.shape != outer_shape:
            raise ShapeError(f"quantize: out.outer_scale has shape {outer.shape}, but outer= makes "
                             f"{outer_shape}; pass an out that was made with the same outer=")  # fmt: skip
        if given is not None:
            device.assign(outer, given[0])
    else:
        outer = given[0]
    return DeviceQuantized(codes, scale, outer, whole, sums, counts, None, ())


def _hidden(args, x, rows, k, down_t, outlier_index, hidden_align) -> DeviceArray:
    struct = args.struct
    if down_t is not None:
        if down_t.shape[-1] != k or down_t.strides[-1] != 1 or down_t.dtype != "bfloat16":
            raise ShapeError(f"quantize: down_t is {down_t.dtype} of shape {down_t.shape}, but bfloat16 "
                             f"(rank, {k}) is needed, its rows contiguous")  # fmt: skip
        struct.rank, struct.down_stride = down_t.shape[0], down_t.strides[0] if down_t.shape[0] > 1 else k
        args.point(down_t=down_t)
    if outlier_index is not None:
        struct.outliers = outlier_index.shape[0]
        args.point(outlier_index=outlier_index)
    width = struct.rank + struct.outliers
    hidden = device.empty((rows, -(-width // hidden_align) * hidden_align), "bfloat16", x, "hidden")
    struct.hidden_stride = hidden.shape[1]
    args.point(hidden=hidden)
    return hidden


def _clear(result: DeviceQuantized, outer: bool) -> None:
    """Results of an array without elements: nothing is launched for it."""
    scale = result.outer_scale if outer else None
    for array, value in ((result.sums, 0), (scale, 1), (result.hidden, 0)):
        if array is not None and array.size:
            device.assign(array, device.full(array.shape, value, array.dtype, array))


def quantize(x, fmt: Format, axis: int, outer, rounding, seed, scale_rule, search, nan, expand, stats, out,
             stream) -> QuantizedArray:  # fmt: skip
    """`fp4bf16.quantize` of an array on the device."""
    operand = device.float_operand(x, "x")
    axis = check_axis(axis, operand.ndim, operand.shape)
    outer = check_outer(outer, fmt)
    check_options(fmt, rounding, scale_rule, search, nan)
    targets = None if out is None else _targets(out, fmt, operand, axis, expand)
    with device.ordered("quantize", stream, (operand,)) as handle:
        q = quantize_array(
            operand, fmt, axis, outer, handle, rounding=rounding, seed=seed, scale_rule=scale_rule,
            search=search, expanded=expand and fmt.block > 0, stats=stats or nan == "raise", out=targets,
        )  # fmt: skip
        if nan == "raise":
            _raise_non_finite(q.counts)
    found = DeviceStats(q.sums, q.counts, operand.dtype) if stats else None
    expanded = q.packed if expand and fmt.block == 0 else q.expanded
    expanded = None if expanded is None else expanded.owner
    if out is not None:
        out.stats, out._expanded = found, expanded
        return out
    parts = [None if p is None else p.owner for p in (q.packed, q.block_scale, q.outer_scale)]
    return QuantizedArray(*parts, fmt, operand.shape, q.order, found, expanded)


def _raise_non_finite(counts: DeviceArray) -> None:
    bad = int(device.to_host(counts.owner)[4])
    if bad:
        raise NonFiniteError(f"quantize: x holds NaN or Inf (or values beyond float32) in {bad} of its "
                             f"blocks; clean x or pass nan='propagate'")  # fmt: skip


def _targets(out, fmt: Format, x: DeviceArray, axis: int, expand: bool) -> DeviceQuantized:
    """`out`'s arrays as what to write to, after checking that they are what the result needs."""
    check_out(out, fmt, x.shape, stored_order(x.ndim, axis))
    parts = {n: getattr(out, n) for n in ("packed", "block_scale", "outer_scale")}
    if expand and fmt.block:
        parts["expanded"] = out._expanded
    device.check_together("quantize", [("x", x)] + [(f"out.{n}", p) for n, p in parts.items()])
    found = {n: None if p is None else device.operand(p, f"out.{n}") for n, p in parts.items()}
    for p in found.values():
        if p is not None and not p.c_contiguous:
            raise ValueError(f"quantize: {p.name} is not contiguous; pass out.copy()")
        if p is not None and device.overlap(p, x):
            raise ValueError(
                f"quantize: {p.name} overlaps x in memory; pass an out that shares nothing with x"
            )
    named = [found.get(n) for n in ("packed", "block_scale", "outer_scale", "expanded")]
    return DeviceQuantized(*named, None, None, None, ())


# ---- back --------------------------------------------------------------------------------------------------
class Stored(NamedTuple):
    """A container's arrays as the kernels read them, C-contiguous; mid, inner: groups of the outer scale."""

    packed: DeviceArray
    block_scale: DeviceArray | None
    outer_scale: DeviceArray | None
    mid: int
    inner: int


def stored(op: str, xq: QuantizedArray, name: str = "xq") -> Stored:
    """The arrays of a container on the device; inside `device.ordered`, as it may have to copy some."""
    parts = [(f"{name}.{n}", getattr(xq, n)) for n in ("packed", "block_scale", "outer_scale")]
    device.check_together(op, parts)
    packed, scale, outer = (None if p is None else device.contiguous(device.operand(p, n)) for n, p in parts)
    if outer is None:
        return Stored(packed, scale, None, max(xq.rows, 1), 1)
    lead = xq.lead
    outer = device.contiguous(device.astype(outer, "float32"))
    shared = groups(lead, [n == m for n, m in zip(outer.shape[:-1], lead, strict=True)])
    if shared is None:
        outer = device.contiguous(device.broadcast(outer, (*lead, 1)))
        shared = 1, xq.rows
    return Stored(packed, scale, outer, *(max(n, 1) for n in shared))


def dequantize_array(xq: QuantizedArray, s: Stored, target: DeviceArray, form: Rows, handle: int) -> None:
    """Decode to `target`, whose memory `form` walks in the container's stored order."""
    scale = s.block_scale.address if s.block_scale is not None else 0
    outer = s.outer_scale.address if s.outer_scale is not None else 0
    device.call("dequantize", FORMAT_CODES[xq.format.name], s.packed.address, scale, outer, xq.rows, xq.k,
                s.mid, s.inner, target.address, DTYPES[target.dtype], *form, handle)  # fmt: skip


def dequantize(xq: QuantizedArray, dtype, out, stream):
    """`fp4bf16.dequantize` of a container on the device."""
    name = str(np_dtype(dtype, "dequantize: dtype"))
    if name not in (*DTYPES, "float64"):
        raise DTypeError(f"dequantize: dtype is {name}, but float32, bfloat16, float16 or float64 is needed")
    packed = device.operand(xq.packed, "xq.packed")
    with device.ordered("dequantize", stream, (packed,)) as handle:
        parts = stored("dequantize", xq)
        target = None
        if out is not None:
            arrays = (parts.packed, parts.block_scale, parts.outer_scale)
            target = device.out_operand("dequantize", out, xq.shape, name, packed, arrays)
        value = target
        form = None if target is None or name == "float64" else _form(xq, target.strides)
        if form is None:
            value, form = _new(xq, packed, "float32" if name == "float64" else name)
        if xq.size:
            dequantize_array(xq, parts, value, form, handle)
        if value.dtype != name:
            value = device.astype(value, name)
        if target is None:
            return value.owner
        if value is not target and target.size:
            device.assign(target, value)
        return out


def _form(xq: QuantizedArray, strides) -> Rows | None:
    """How an array of xq's logical shape and these strides is walked in the stored order."""
    if xq.size == 0:
        return Rows(1, max(xq.k, 1), 1)
    stored_strides = [0] * xq.ndim
    for logical, position in enumerate(xq.order):
        stored_strides[position] = strides[logical]
    return rows_of(xq.lead, stored_strides[:-1], xq.k, stored_strides[-1])


def _new(xq: QuantizedArray, like: DeviceArray, dtype: str) -> tuple[DeviceArray, Rows]:
    """New memory in the logical order where the kernel can walk it, else a view of the stored order."""
    form = _form(xq, device.contiguous_strides(xq.shape))
    if form is not None:
        return device.empty(xq.shape, dtype, like), form
    value = device.empty(xq.stored_shape, dtype, like)
    return device.permute(value, xq.order), Rows(1, xq.k, 1)


def expand(xq: QuantizedArray, stream=None):
    """E4M3 bytes of a container on the device; "nvfp4" is looked at, which waits for the device."""
    if xq.format.block == 0:
        return xq.packed
    if xq.format.name == "mxfp4":
        raise ValueError(
            "expand: block scales of mxfp4 span 2^-127 to 2^127, which E4M3 does not hold; use dequantize"
        )
    packed = device.operand(xq.packed, "xq.packed")
    with device.ordered("expand", stream, (packed,)) as handle:
        parts = stored("expand", xq)
        made = device.empty((*xq.lead, xq.k_padded), "uint8", packed, "expanded")
        looks = xq.format.name not in EXPANDED
        inexact = device.full((1,), 0, "int32", packed) if looks else None
        if made.size:
            device.call("expand", FORMAT_CODES[xq.format.name], parts.packed.address,
                        parts.block_scale.address, xq.rows, xq.k_padded, made.address, xq.k_padded,
                        inexact.address if looks else 0, handle)  # fmt: skip
        count = int(device.to_host(inexact.owner)[0]) if looks else 0
    if count:
        raise ValueError(
            f"expand: {count} of {made.size} products of a code and its block scale need more than E4M3's "
            f"four bits, as those of format {xq.format} may; use dequantize, or quantise as 'nvfp4_exact'"
        )
    return made.owner


# ---- to the host and back ----------------------------------------------------------------------------------
def to_host(xq: QuantizedArray) -> QuantizedArray:
    """A copy in NumPy arrays. Waits for the device."""
    parts = [None if p is None else device.to_host(p) for p in (xq.packed, xq.block_scale, xq.outer_scale)]
    stats = xq.stats.on_host() if isinstance(xq.stats, DeviceStats) else xq.stats
    return QuantizedArray(*parts, xq.format, xq.shape, xq.order, stats)


def from_host(xq: QuantizedArray, like: DeviceArray) -> QuantizedArray:
    """A copy of a container in NumPy arrays on `like`'s device."""
    with device.ordered("quantize", None, (like,)):
        parts = [None if p is None else device.from_host(np.ascontiguousarray(p), like).owner
                 for p in (xq.packed, xq.block_scale, xq.outer_scale)]  # fmt: skip
    return QuantizedArray(*parts, xq.format, xq.shape, xq.order, xq.stats)
