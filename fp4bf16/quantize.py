"""Quantise and decode arrays of any supported framework: the public `quantize`, `dequantize`, `expand`."""

from __future__ import annotations

import importlib
import math
from functools import cache

import numpy as np

from . import dispatch
from .errors import DTypeError, ShapeError, nearest
from .formats import Format, QuantizedArray, QuantStats, get_format
from .interop import (
    BFLOAT16,
    Operand,
    common_framework,
    float_operand,
    np_dtype,
    output,
    shares_memory,
    unwrap,
    wrap,
)

MIN_EXPONENT, MAX_EXPONENT = -119, 120
_TRANSPOSE = 1 << 16  # elements from which NumPy's copy of a transpose is the slower one
OUTERS = ("default", "row", "image", "head", "tensor")


@cache
def _kernels():
    """The CPU's functions; numba is imported here, by the first array that is quantised or decoded."""
    return importlib.import_module(".backends.cpu_quantize", __package__)


# ---- axes and rows -----------------------------------------------------------------------------------------
def _check_axis(axis: int, ndim: int, shape) -> int:
    if ndim == 0:
        raise ShapeError(
            "quantize: x has no axes, but blocks run along one; pass an array of at least one axis"
        )
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer) or not -ndim <= axis < ndim:
        raise ShapeError(
            f"quantize: axis={axis!r}, but x of shape {tuple(shape)} has axes {-ndim} to {ndim - 1}"
        )
    return int(axis) % ndim


def _order(ndim: int, axis: int) -> tuple[int, ...]:
    """Stored position of each logical axis when `axis` is moved last."""
    return tuple(ndim - 1 if i == axis else i - (i > axis) for i in range(ndim))


def _rows(array: np.ndarray, axis: int) -> np.ndarray:
    """The array as (rows, K), blocked axis last; a view where the memory allows."""
    if axis == 0 and array.ndim == 2 and array.size >= _TRANSPOSE and array.flags.c_contiguous:
        if array.dtype in (np.float32, BFLOAT16):
            return _kernels().transposed(array)
    stored = np.moveaxis(array, axis, -1) if axis != array.ndim - 1 else array
    k = stored.shape[-1]
    return np.ascontiguousarray(stored).reshape(math.prod(stored.shape[:-1]), k)


# ---- outer scales ------------------------------------------------------------------------------------------
def _kept_axes(outer: str, ndim: int, axis: int) -> list[int]:
    """Stored axes that the outer scale varies over."""
    order = _order(ndim, axis)
    if outer == "row":
        return list(range(ndim - 1))
    if outer == "tensor":
        return []
    if outer == "image":
        if axis == 0:
            raise ShapeError(
                "quantize: outer='image' wants one scale per index of axis 0, but the blocks run along "
                "axis 0; pass another axis= or outer='row'"
            )
        return [order[0]]
    if ndim != 4 or axis not in (1, 3):
        raise ShapeError(
            f"quantize: outer='head' is for (batch, seq, heads, dim) blocked along axis 1 or 3, but x has "
            f"{ndim} axes and axis is {axis}; pass outer='row' or 'tensor'"
        )
    return [order[0], order[2]]


def _group_amax(rows: np.ndarray, lead: tuple[int, ...], keep: list[int]):
    """(outer shape, amax per row of the row's group)."""
    shape = tuple(n if i in keep else 1 for i, n in enumerate(lead))
    amax = _kernels().amax_rows(rows).reshape(lead)
    away = tuple(i for i in range(len(lead)) if i not in keep)
    group = amax.max(axis=away, keepdims=True, initial=np.float32(0)).reshape(shape)
    return (*shape, 1), np.broadcast_to(group, lead).reshape(-1)


def _exponents(outer, lead: tuple[int, ...]):
    """(outer shape, decode scale per row) of given exponents e of 2^e."""
    e = np.asarray(outer)
    if e.dtype.kind not in "iu":
        raise DTypeError(
            f"quantize: outer={outer!r} is neither an exponent (int) nor one of {', '.join(OUTERS)}"
        )
    if e.size and (e.min() < MIN_EXPONENT or e.max() > MAX_EXPONENT):
        raise ValueError(
            f"quantize: outer exponents reach from {e.min()} to {e.max()}, but {MIN_EXPONENT} to "
            f"{MAX_EXPONENT} keep every decoded value a normal number"
        )
    shape = (1,) * (len(lead) + 1) if e.ndim == 0 else e.shape
    scale = np.ldexp(np.float32(1), e.astype(np.int32)).astype(np.float32).reshape(shape)
    try:
        if len(shape) != len(lead) + 1 or shape[-1] != 1:
            raise ValueError
        full = np.broadcast_to(scale, (*lead, 1))
    except ValueError:
        raise ShapeError(
            f"quantize: outer exponents of shape {e.shape} do not broadcast to the stored rows {(*lead, 1)}; "
            f"pass one exponent, or an array with as many axes as x that is 1 in the last"
        ) from None
    return scale, full.reshape(-1)


def _resolve_outer(outer, fmt: Format, rows: np.ndarray, lead, axis: int):
    """(keyword arguments of the kernel, f(its decode scales) -> the container's outer_scale, its shape)."""
    if isinstance(outer, str):
        if outer not in OUTERS:
            raise ValueError(f"quantize: outer={outer!r} is unknown{nearest(outer, OUTERS)}")
        outer = fmt.default_outer if outer == "default" else outer
        if fmt.default_outer is None and outer is not None:
            raise ValueError(f"quantize: outer={outer!r}, but {fmt} has no outer scale; pass outer=None")
    if outer is None:
        if fmt.default_outer is not None:
            raise ValueError(
                f"quantize: outer=None, but {fmt} has an outer scale; pass outer=0 for one of 2^0"
            )
        return {}, lambda decode: None, None
    if fmt.default_outer is None:
        raise ValueError(f"quantize: outer={outer!r}, but {fmt} has no outer scale; pass outer=None")
    if not isinstance(outer, str):
        scale, per_row = _exponents(outer, lead)
        return {"outer_rows": per_row}, lambda decode: scale, scale.shape
    if outer == "row":
        return {}, lambda decode: decode.reshape(*lead, 1), (*lead, 1)
    keep = _kept_axes(outer, len(lead) + 1, axis)
    shape, amax = _group_amax(rows, lead, keep)
    first = tuple(slice(None) if n > 1 or i in keep else slice(0, 1) for i, n in enumerate(shape[:-1]))

    def pick(decode):
        if decode.size:
            return np.ascontiguousarray(decode.reshape(lead)[first]).reshape(shape)
        return np.ones(shape, np.float32)

    return {"amax": amax}, pick, shape


# ---- public ------------------------------------------------------------------------------------------------
def quantize(
    x, format="nvfp4_exact", axis=-1, outer="default", rounding="nearest", scale_rule=None, search="full",
    nan="raise", out=None, stream=None,
) -> QuantizedArray:  # fmt: skip
    """Quantise `x` in blocks along `axis`: a value decodes as code * block_scale * outer_scale.

    Args:
        x: float32, float64, float16 or bfloat16, at least one axis (NumPy, PyTorch on the CPU); float64 is
            rounded to float32 first.
        format: "nvfp4_exact" (16 a block, scales m * 2^k with m in {1, 1.25, 1.5}: every code * scale is an
            E4M3 number), "nvfp4" (16, any E4M3 scale), "mxfp4" (32, powers of two), "fp8" (E4M3, no block
            scale).
        axis: the axis that will be contracted; it is stored last and padded with zeros to whole blocks.
        outer: what shares an outer scale: "row" (default of nvfp4_exact, fp8), "tensor" (default of nvfp4),
            "image" (an index of axis 0), "head" ((batch, seq, heads, dim): a batch and head), or exponents e
            of given scales 2^e, an int or an array that broadcasts to the stored rows (*lead, 1). "mxfp4"
            has none.
        rounding: "nearest", ties to even.
        scale_rule: nvfp4: "te" (Transformer Engine), "four_over_six" (arXiv:2512.02010; squared error, bound
            256; "four_over_six_mae": absolute error; "..._448": bound 448). mxfp4: "even", "floor" (OCP MX
            1.0, 6.3), "rceil", "ceil".
        search: of nvfp4_exact: "full" tries four scales a block (decoding and quantising again changes no
            value), "fast" two.
        nan: "raise", or "propagate": the block that holds NaN or Inf decodes to NaN ("fp8": the element
            alone).
        out: `QuantizedArray` made by the same call, to write to.
        stream: None, as host arrays have none.

    Returns:
        `QuantizedArray` of x's framework, with `stats`.

    Raises:
        ShapeError, DTypeError, NonFiniteError, ValueError: what was given and what to pass instead.

    >>> import numpy as np, fp4bf16 as fb
    >>> xq = fb.quantize(np.array([[0.5, 6, -3, 1] * 4], np.float32))
    >>> fb.dequantize(xq)[0, :4].tolist()
    [0.5, 6.0, -3.0, 1.0]
    """
    dispatch.check_stream("quantize", stream)
    fmt, operand = get_format(format), float_operand(x, "x")
    if rounding != "nearest":
        raise ValueError(f"quantize: rounding={rounding!r}, but only rounding='nearest' is known; pass that")
    axis = _check_axis(axis, operand.array.ndim, operand.shape)
    return _quantize(operand, fmt, axis, outer, out, {"scale_rule": scale_rule, "search": search, "nan": nan})


def _quantize(operand: Operand, fmt: Format, axis: int, outer, out, options: dict) -> QuantizedArray:
    array = operand.array
    order = _order(array.ndim, axis)
    rows = _kernels().as_rows(_rows(array, axis))
    lead = tuple(n for i, n in enumerate(array.shape) if i != axis)
    given, outer_scale, outer_shape = _resolve_outer(outer, fmt, rows, lead, axis)
    target = _targets(out, fmt, operand, order, outer_shape) if out is not None else None
    q = _kernels().quantize_rows(rows, fmt, out=target, **options, **given)
    stats = QuantStats(*q.sums.T, *q.counts[:4].tolist(), operand.dtype)
    scale = outer_scale(q.outer)
    if out is not None:
        return _fill(out, scale, stats)
    parts = [None if p is None else p.reshape(*lead, p.shape[1]) for p in (q.packed, q.block_scale)]
    parts = [None if p is None else unwrap(p, operand.framework) for p in (*parts, scale)]
    return QuantizedArray(*parts, fmt, array.shape, order, stats)


def _targets(out, fmt: Format, operand, order, outer_shape):
    """`out`'s bytes as rows to write to, after checking that they are what the result needs."""
    if not isinstance(out, QuantizedArray):
        raise TypeError(
            f"quantize: out is a {type(out).__name__}, but a QuantizedArray is needed; leave out=None"
        )
    if (out.format, out.shape, out.order) != (fmt, operand.shape, order):
        raise ShapeError(
            f"quantize: out is {out.format} of shape {out.shape} stored in order {out.order}, but the result "
            f"is {fmt} of shape {operand.shape} in order {order}; pass an out made by the same call"
        )
    names = ("packed", "block_scale", "outer_scale")
    parts = [wrap(p, f"out.{n}") for n in names if (p := getattr(out, n)) is not None]
    common_framework("quantize", operand, *parts)
    found = None if out.outer_scale is None else parts[-1].shape
    if found != outer_shape:
        raise ShapeError(
            f"quantize: out.outer_scale has shape {found}, but outer= makes {outer_shape}; pass an out that "
            f"was made with the same outer="
        )
    for p in parts:
        if not (p.array.flags.writeable and p.array.flags.c_contiguous):
            raise ValueError(f"quantize: {p.name} is read-only or not contiguous; pass out.copy()")
        if shares_memory(p.array, operand.array):
            raise ValueError(
                f"quantize: {p.name} overlaps x in memory; pass an out that shares nothing with x"
            )
    rows = out.rows
    packed, scale = (
        None if p is None else wrap(p, "out").array.view(np.uint8).reshape(rows, p.shape[-1])
        for p in (out.packed, out.block_scale)
    )
    return packed, scale


def _fill(out: QuantizedArray, scale, stats) -> QuantizedArray:
    if scale is not None:
        wrap(out.outer_scale, "out.outer_scale").array[...] = scale
    out.stats, out._expanded = stats, None
    return out


def _stored(xq: QuantizedArray):
    """(packed rows, block scale rows, outer per row or None, framework) of a container, as NumPy views."""
    if not isinstance(xq, QuantizedArray):
        raise TypeError(
            f"dequantize: xq is a {type(xq).__name__}, but a QuantizedArray is needed; quantize it first"
        )
    packed = wrap(xq.packed, "xq.packed")
    scale = None if xq.block_scale is None else wrap(xq.block_scale, "xq.block_scale").array
    rows = xq.rows
    outer = None
    if xq.outer_scale is not None:
        outer = np.asarray(wrap(xq.outer_scale, "xq.outer_scale").array, np.float32)
        outer = outer.reshape(1) if outer.size == 1 else np.broadcast_to(outer, (*xq.lead, 1)).reshape(rows)
    two = [a if a is None else a.view(np.uint8).reshape(rows, a.shape[-1]) for a in (packed.array, scale)]
    return (*two, outer, packed.framework)


def dequantize(xq: QuantizedArray, dtype="float32", out=None, stream=None):
    """Decode to an array of `dtype` and of the container's framework, in the logical shape.

    float32 holds code * block_scale exactly and rounds the product with the outer scale once; "nvfp4_exact"
    and "mxfp4" are exact in float32 and bfloat16.

    Args:
        xq: the container. dtype: "float32", "bfloat16", "float16" or "float64".
        out: array of that shape and dtype to write to. stream: None, as host arrays have none.

    Raises:
        TypeError: xq is no `QuantizedArray`. DTypeError, ShapeError, ValueError: another dtype; an out that
        does not fit, is read-only, or shares memory with xq.

    >>> import numpy as np, fp4bf16 as fb
    >>> fb.dequantize(fb.quantize(np.ones((2, 16), np.float32)), dtype="bfloat16").dtype
    dtype(bfloat16)
    """
    dispatch.check_stream("dequantize", stream)
    packed, scale, outer, framework = _stored(xq)
    dtype = np_dtype(dtype, "dequantize: dtype")
    if dtype not in (np.float32, np.float64, np.float16, BFLOAT16):
        raise DTypeError(f"dequantize: dtype is {dtype}, but float32, bfloat16, float16 or float64 is needed")
    direct = dtype if dtype in (np.float32, BFLOAT16) else np.dtype(np.float32)
    rows = np.empty((xq.rows, xq.k), direct)
    _kernels().dequantize_rows(packed, scale, outer, xq.format, xq.k, rows)
    with np.errstate(over="ignore"):  # float16 holds 65504 at most; beyond it lies Inf, as IEEE 754 has it
        stored = rows.reshape(xq.stored_shape).astype(dtype, copy=False)
    value = stored.transpose(xq.order)
    if out is None:
        return unwrap(value, framework)
    target, result = output("dequantize", out, xq.shape, dtype, framework, (packed, scale, outer))
    target[...] = value
    return result


def expand(xq: QuantizedArray):
    """E4M3 bytes, uint8 (\\*lead, K_padded), of code * block_scale; `ValueError` unless every product is
    exact.
    """
    packed, scale, _, framework = _stored(xq)
    rows = _kernels().expand_rows(packed, scale, xq.format)
    return unwrap(rows.reshape(*xq.lead, xq.k_padded), framework)


def fake_quantize(
    x: np.ndarray, format="nvfp4_exact", axis=-1, outer="default", search="fast", out=None
) -> np.ndarray:
    """``dequantize(quantize(x))`` of a NumPy array in one pass, bit for bit: what the FP4 track sees of `x`.

    Returns bfloat16 for bfloat16, else float32. `out`: C-contiguous float32 or bfloat16 of x's shape, for
    axis -1.
    """
    fmt = get_format(format)
    axis = _check_axis(axis, x.ndim, x.shape)
    rows = _kernels().as_rows(_rows(x, axis))
    lead = tuple(n for i, n in enumerate(x.shape) if i != axis)
    given, _, _ = _resolve_outer(outer, fmt, rows, lead, axis)
    if out is not None and axis != x.ndim - 1:
        raise ShapeError(
            f"fake_quantize: out= needs the blocks along the last axis, but axis is {axis}; leave out=None"
        )
    target = None if out is None else out.reshape(rows.shape)
    value = _kernels().fake_quantize_rows(rows, fmt, search=search, out=target, **given)
    if out is not None:
        return out
    return np.moveaxis(value.reshape(*lead, rows.shape[1]), -1, axis)
