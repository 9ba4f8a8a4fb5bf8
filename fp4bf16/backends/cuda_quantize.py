"""Quantise, decode and expand on the device: the compiled library's kernels behind the public functions."""

from __future__ import annotations

import math
from functools import cache, lru_cache
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


class DeviceStats(QuantStats):
    """`QuantStats` that stay on the device until one is asked for, which waits for the quantiser.

    They are read once: those of a captured call are of the replay before the first look.
    """

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
class Plan(NamedTuple):
    """What follows from shapes and strides: logical axes but the blocked one as `lead`, `rows` of `k`, their
    padded length, the stored order, the outer scale's shape and groups, and how x is walked (None: a copy).
    """

    lead: tuple[int, ...]
    rows: int
    k: int
    k_padded: int
    order: tuple[int, ...]
    outer_shape: tuple[int, ...] | None
    mid: int
    inner: int
    form: Rows | None


@lru_cache(maxsize=4096)
def _plan(shape, strides, multiple: int, axis: int, outer: str | None, stochastic: bool) -> Plan:
    """`outer` is None where the scales are given or the format has none."""
    lead = tuple(n for i, n in enumerate(shape) if i != axis)
    rows, k = math.prod(lead), shape[axis]
    outer_shape, mid, inner = None, 1, max(rows, 1)
    if outer is not None:
        keep = kept_axes(outer, len(shape), axis)
        varies = [i in keep for i in range(len(lead))]
        mid, inner = (max(n, 1) for n in groups(lead, varies))
        outer_shape = (*(n if v else 1 for n, v in zip(lead, varies, strict=True)), 1)
    form = None
    if rows and k:
        after = math.prod(shape[axis + 1 :]) if stochastic else None
        lead_strides = [s for i, s in enumerate(strides) if i != axis]
        form = rows_of(lead, lead_strides, k, strides[axis], after)
    padded = -(-k // multiple) * multiple
    return Plan(lead, rows, k, padded, stored_order(len(shape), axis), outer_shape, mid, inner, form)


@cache
def _pointers(library: Any) -> dict[str, Any]:
    fields = library.ffi.typeof("fp4bf16_quantize_args").fields
    return {name: field.type for name, field in fields if field.type.kind == "pointer"}


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
def quantize(x, fmt: Format, axis: int, outer, rounding, seed, scale_rule, search, nan, expand, stats, out,
             stream) -> QuantizedArray:  # fmt: skip
    """`fp4bf16.quantize` of an array on the device."""
    operand = device.float_operand(x, "x")
    axis = check_axis(axis, len(operand.shape), operand.shape)
    outer = check_outer(outer, fmt)
    check_options(fmt, rounding, scale_rule, search, nan)
    with device.ordered("quantize", stream, (operand,)) as handle:
        targets = {} if out is None else _targets(out, fmt, operand, axis, expand)
        source = operand if operand.dtype in DTYPES else device.astype(operand, "float32")
        given = None if outer is None or isinstance(outer, str) else outer
        key = fmt.multiple, axis, outer if given is None else None, rounding == "stochastic"
        plan = _plan(source.shape, source.strides, *key)
        if plan.rows and plan.k and (plan.form is None or source.address % source.itemsize):
            source = device.contiguous(source)
            plan = _plan(source.shape, source.strides, *key)
        if given is not None:
            given = _given_scales(source, given, plan.lead)
        made = _results(source, fmt, plan, given, expand, stats or nan == "raise", targets)
        if plan.rows and plan.k:
            random = seed_words(seed) if rounding == "stochastic" else None
            _launch(source, fmt, plan, given, made, scale_rule, search, random, handle)
        else:
            _clear(made, given is None)
        if nan == "raise":
            _raise_non_finite(made["counts"])
    found = DeviceStats(made["sums"], made["counts"], operand.dtype) if stats else None
    owned = {name: None if array is None else array.owner for name, array in made.items()}
    expanded = owned["packed"] if expand and fmt.block == 0 else owned["expanded"]
    if out is not None:
        out.stats, out._expanded = found, expanded
        return out
    parts = (owned[name] for name in ("packed", "block_scale", "outer_scale"))
    return QuantizedArray(*parts, fmt, operand.shape, plan.order, found, expanded)


def _results(x: DeviceArray, fmt: Format, plan: Plan, given, expand, stats, targets: dict) -> dict:
    """Name -> array to write to: that of `targets`, a new one, or None for what is not asked for."""
    lead, blocks = plan.lead, plan.k_padded // fmt.block if fmt.block else 0
    shapes = {
        "packed": ((*lead, plan.k_padded // 2 if fmt.block else plan.k), "uint8"),
        "block_scale": ((*lead, blocks), "uint8") if fmt.block else None,
        "outer_scale": None if plan.outer_shape is None else (plan.outer_shape, "float32"),
        "expanded": ((*lead, plan.k_padded), "uint8") if expand and fmt.block else None,
        "sums": ((plan.rows, 3), "float64") if stats else None,
    }
    made = {
        name: None if wanted is None else targets.get(name) or device.empty(*wanted, x, name)
        for name, wanted in shapes.items()
    }
    made["counts"] = device.full((5,), 0, "int32", x) if stats else None
    if given is not None:
        made["outer_scale"] = targets.get("outer_scale") or given
    shape, target = plan.outer_shape if given is None else given.shape, targets.get("outer_scale")
    if target is not None:
        if target.shape != shape:
            raise ShapeError(f"quantize: out.outer_scale has shape {target.shape}, but outer= makes {shape}; "
                             f"pass an out that was made with the same outer=")  # fmt: skip
        if given is not None:
            device.assign(target, given)
    return made


def _launch(x, fmt: Format, plan: Plan, given, made: dict, scale_rule, search, random, handle: int) -> None:
    library = cuda.load()
    args, cast, kinds = library.ffi.new("fp4bf16_quantize_args*"), library.ffi.cast, _pointers(library)
    args.rows, args.k_size, args.mid, args.inner = plan.rows, plan.k, plan.mid, plan.inner
    args.after, args.x_stride, args.k_stride = plan.form
    args.dtype, args.format = DTYPES[x.dtype], FORMAT_CODES[fmt.name]
    args.rule, args.search = RULES[scale_rule], search == "fast"
    if random is not None:
        args.rounding = 1
        args.seed, args.stream_word, args.call_word = random
    if made["expanded"] is not None:
        args.expanded_stride = plan.k_padded
    if given is not None:
        made = made | {"outer_scale": None}
        if given.size == 1:
            args.mid, args.inner = plan.rows, 1
        else:
            given = device.contiguous(device.broadcast(given, (*plan.lead, 1)))
            args.mid, args.inner, args.outer_given_stride = 1, plan.rows, 1
        args.outer_given = cast(kinds["outer_given"], given.address)
    args.x = cast(kinds["x"], x.address)
    for name, array in made.items():
        if array is not None:
            setattr(args, name, cast(kinds[name], array.address))
    size = library.lib.fp4bf16_quantize_workspace_size(args)
    if size > 0:
        workspace = device.empty((size,), "uint8", x)
        args.workspace = cast(kinds["workspace"], workspace.address)
    device.call("quantize", args, handle)


def _clear(made: dict, outer: bool) -> None:
    """Results of an array without elements: nothing is launched for it."""
    for array, value in ((made["sums"], 0), (made["outer_scale"] if outer else None, 1)):
        if array is not None and array.size:
            device.assign(array, device.full(array.shape, value, array.dtype, array))


def _raise_non_finite(counts: DeviceArray) -> None:
    bad = int(device.to_host(counts.owner)[4])
    if bad:
        raise NonFiniteError(f"quantize: x holds NaN or Inf (or values beyond float32) in {bad} of its "
                             f"blocks; clean x or pass nan='propagate'")  # fmt: skip


def _targets(out, fmt: Format, x: DeviceArray, axis: int, expand: bool) -> dict[str, DeviceArray]:
    """`out`'s arrays by name, after checking that they are what the result needs."""
    check_out(out, fmt, x.shape, stored_order(len(x.shape), axis))
    out.check()
    parts = {n: getattr(out, n) for n in ("packed", "block_scale", "outer_scale")}
    if expand and fmt.block:
        parts["expanded"] = out._expanded
    parts = {n: p for n, p in parts.items() if p is not None}
    device.check_together("quantize", [("x", x)] + [(f"out.{n}", p) for n, p in parts.items()])
    found = {n: device.operand(p, f"out.{n}") for n, p in parts.items()}
    for name, p in found.items():
        want = "float32" if name == "outer_scale" else "uint8"
        if p.dtype != want:
            raise DTypeError(f"quantize: {p.name} has dtype {p.dtype}, but {want} is written; pass an out "
                             f"made by the same call")  # fmt: skip
        if not p.c_contiguous:
            raise ValueError(f"quantize: {p.name} is not contiguous; pass out.copy()")
        if device.overlap(p, x):
            raise ValueError(
                f"quantize: {p.name} overlaps x in memory; pass an out that shares nothing with x"
            )
    return found


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
    xq.check()
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
    xq.check()
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
