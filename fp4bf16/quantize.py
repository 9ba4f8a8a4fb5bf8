"""Quantise and decode arrays of any supported framework: the public `quantize`, `dequantize`, `expand`.

Host arrays are computed here by the CPU's kernels, arrays on the GPU by `backends.cuda_quantize`.
"""

from __future__ import annotations

import importlib
import math
from functools import cache

import numpy as np

from . import dispatch
from .device import check_together, is_device, to_host
from .errors import DTypeError, ShapeError
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
from .layout import (
    check_axis,
    check_options,
    check_out,
    check_outer,
    exponent_scales,
    kept_axes,
    stored_order,
)

_TRANSPOSE = 1 << 16  # elements from which NumPy's copy of a transpose is the slower one


@cache
def _kernels():
    """The CPU's functions; numba is imported here, by the first array that is quantised or decoded."""
    return importlib.import_module(".backends.cpu_quantize", __package__)


# ---- rows -------------------------------------------------------------------------------------------------
def _rows(array: np.ndarray, axis: int) -> np.ndarray:
    """The array as (rows, K), blocked axis last; a view where the memory allows."""
    if axis == 0 and array.ndim == 2 and array.size >= _TRANSPOSE and array.flags.c_contiguous:
        if array.dtype in (np.float32, BFLOAT16):
            return _kernels().transposed(array)
    stored = np.moveaxis(array, axis, -1) if axis != array.ndim - 1 else array
    k = stored.shape[-1]
    return np.ascontiguousarray(stored).reshape(math.prod(stored.shape[:-1]), k)


# ---- outer scales ------------------------------------------------------------------------------------------
def _group_amax(rows: np.ndarray, lead: tuple[int, ...], keep: list[int]):
    """(outer shape, amax per row of the row's group)."""
    shape = tuple(n if i in keep else 1 for i, n in enumerate(lead))
    amax = _kernels().amax_rows(rows).reshape(lead)
    away = tuple(i for i in range(len(lead)) if i not in keep)
    group = amax.max(axis=away, keepdims=True, initial=np.float32(0)).reshape(shape)
    return (*shape, 1), np.broadcast_to(group, lead).reshape(-1)


def _resolve_outer(outer, fmt: Format, rows: np.ndarray, lead, axis: int):
    """(keyword arguments of the kernel, f(its decode scales) -> the container's outer_scale, its shape)."""
    outer = check_outer(outer, fmt)
    if outer is None:
        return {}, lambda decode: None, None
    if not isinstance(outer, str):
        if is_device(outer):
            check_together("quantize", [("x", rows), ("outer", outer)])
        scale = exponent_scales(outer, lead)
        per_row = np.broadcast_to(scale, (*lead, 1)).reshape(-1)
        return {"outer_rows": per_row}, lambda decode: scale, scale.shape
    if outer == "row":
        return {}, lambda decode: decode.reshape(*lead, 1), (*lead, 1)
    keep = kept_axes(outer, len(lead) + 1, axis)
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
    nan=None, out=None, stream=None, seed=0, expand=False, stats=True,
) -> QuantizedArray:  # fmt: skip
    """Quantise `x` in blocks along `axis`: a value decodes as code * block_scale * outer_scale.

    Args:
        x: float32, float64, float16 or bfloat16, at least one axis (NumPy, PyTorch, CuPy); float64 is
            rounded to float32 first. On the GPU what the kernel cannot walk is copied by the framework:
            negative, repeated or interleaved strides.
        format: "nvfp4_exact" (16 a block, scales m * 2^k with m in {1, 1.25, 1.5}: every code * scale is an
            E4M3 number), "nvfp4" (16, any E4M3 scale), "mxfp4" (32, powers of two), "fp8" (E4M3, no block
            scale).
        axis: the axis that will be contracted; it is stored last and padded with zeros to whole blocks.
        outer: what shares an outer scale: "row" (default of nvfp4_exact, fp8), "tensor" (default of nvfp4),
            "image" (an index of axis 0), "head" ((batch, seq, heads, dim): a batch and head), or exponents e
            of given scales 2^e, an int or an array that broadcasts to the stored rows (*lead, 1). "mxfp4"
            has none. Exponents on the GPU are not read back: those outside -119 .. 120 count as the nearer.
            An array of them on the host is copied there, which waits and cannot be captured in a graph.
        rounding: "nearest", ties to even; or "stochastic": a value between two neighbours lo and hi becomes
            hi with probability (v - lo) / (hi - lo), so that the mean of many draws is the value. Block
            scales are then rounded up, as a clipped block would bias the mean ("mxfp4": rule "rceil").
        scale_rule: nvfp4: "te" (Transformer Engine), "four_over_six" (arXiv:2512.02010; squared error, bound
            256; "four_over_six_mae": absolute error; "..._448": bound 448). mxfp4: "even", "floor" (OCP MX
            1.0, 6.3), "rceil", "ceil".
        search: of nvfp4_exact: "full" tries four scales a block (decoding and quantising again changes no
            value), "fast" two.
        nan: "raise", the default on the host; or "propagate", the default on the GPU: the block that holds
            NaN or Inf decodes to NaN ("fp8": the element alone). "raise" on the GPU waits for the result.
        out: `QuantizedArray` made by the same call, to write to. Where a captured graph multiplies it, pass
            ``expand=True`` each time: the expanded bytes then stay in place.
        stream: of a GPU array: a handle, an object with ``__cuda_stream__``, a PyTorch or CuPy stream; by
            default the framework's current one. Host arrays have none.
        seed: of stochastic rounding, an int or (seed, stream, call): element i of x in C order takes word
            i % 4 of Philox4x32-10 (Salmon et al., SC 2011) with key seed and counter (i // 4, stream, call),
            the same on the CPU and the GPU. The same seed is the same draw, the default (0) too: pass another
            each time, such as (0, layer, step).
        expand: make `.expanded` in the same pass ("nvfp4_exact" and "fp8").
        stats: keep `stats`. On the GPU they stay there; the first attribute that is read waits for them.

    Returns:
        `QuantizedArray` of x's framework and device.

    Raises:
        ShapeError, DTypeError, NonFiniteError, ValueError: what was given and what to pass instead.

    >>> import numpy as np, fp4bf16 as fb
    >>> xq = fb.quantize(np.array([[0.5, 6, -3, 1] * 4], np.float32))
    >>> fb.dequantize(xq)[0, :4].tolist()
    [0.5, 6.0, -3.0, 1.0]
    >>> x = np.full((1, 1600), 2.25, np.float32)
    >>> x[0, ::16] = 6  # the scale of every block is one
    >>> drawn = fb.dequantize(fb.quantize(x, rounding="stochastic", seed=1))[x < 6]
    >>> sorted(set(drawn.tolist())), bool(abs(drawn.mean() - 2.25) < 0.05)
    ([2.0, 3.0], True)
    """
    fmt = get_format(format)
    if expand and fmt.name not in ("nvfp4_exact", "fp8"):
        raise ValueError(f"quantize: expand=True, but {fmt} has products that E4M3 does not hold; quantise "
                         f"as 'nvfp4_exact', or leave it out")  # fmt: skip
    if is_device(x):
        return dispatch.table("cuda_quantize").quantize(
            x, fmt, axis, outer, rounding, seed, scale_rule, search,
            "propagate" if nan is None else nan, expand, stats, out, stream,
        )  # fmt: skip
    dispatch.check_stream("quantize", stream)
    operand, nan = float_operand(x, "x"), "raise" if nan is None else nan
    check_options(fmt, rounding, scale_rule, search, nan)
    axis = check_axis(axis, operand.array.ndim, operand.shape)
    options = {"scale_rule": scale_rule, "search": search, "nan": nan}
    if rounding == "stochastic":
        options |= {"rounding": rounding, "seed": seed, "after": math.prod(operand.shape[axis + 1 :])}
    xq = _quantize(operand, fmt, axis, outer, out, options)
    if expand:
        xq._expanded = _expand(xq)
    if not stats:
        xq.stats = None
    return xq


def _quantize(operand: Operand, fmt: Format, axis: int, outer, out, options: dict) -> QuantizedArray:
    array = operand.array
    order = stored_order(array.ndim, axis)
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
    check_out(out, fmt, operand.shape, order)
    names = ("packed", "block_scale", "outer_scale")
    check_together("quantize", [("x", operand)] + [(f"out.{n}", getattr(out, n)) for n in names])
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
    xq.check()
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
        out: array of that shape and dtype to write to. stream: as for `quantize`.

    Raises:
        TypeError: xq is no `QuantizedArray`. DTypeError, ShapeError, ValueError: another dtype; an out that
        does not fit, is read-only, or shares memory with xq.

    >>> import numpy as np, fp4bf16 as fb
    >>> fb.dequantize(fb.quantize(np.ones((2, 16), np.float32)), dtype="bfloat16").dtype
    dtype(bfloat16)
    """
    if not isinstance(xq, QuantizedArray):
        raise TypeError(
            f"dequantize: xq is a {type(xq).__name__}, but a QuantizedArray is needed; quantize it first"
        )
    if is_device(xq.packed):
        return dispatch.table("cuda_quantize").dequantize(xq, dtype, out, stream)
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
    exact. On the GPU the products of "nvfp4" are counted, which waits for it; "nvfp4_exact" needs no look.
    """
    if not isinstance(xq, QuantizedArray):
        raise TypeError(
            f"expand: xq is a {type(xq).__name__}, but a QuantizedArray is needed; quantize it first"
        )
    if is_device(xq.packed):
        return dispatch.table("cuda_quantize").expand(xq)
    packed, scale, _, framework = _stored(xq)
    rows = _kernels().expand_rows(packed, scale, xq.format)
    return unwrap(rows.reshape(*xq.lead, xq.k_padded), framework)


_expand = expand  # under `quantize`, whose argument has the name


def host_values(xq: QuantizedArray) -> np.ndarray:
    """The values as a NumPy array, float32; a container on the GPU is waited for."""
    value = dequantize(xq, dtype="float32")
    return to_host(value) if is_device(value) else np.asarray(value)


def fake_quantize(
    x: np.ndarray, format="nvfp4_exact", axis=-1, outer="default", search="fast", out=None
) -> np.ndarray:
    """``dequantize(quantize(x))`` of a NumPy array in one pass, bit for bit: what the FP4 track sees of `x`.

    Returns bfloat16 for bfloat16, else float32. `out`: C-contiguous float32 or bfloat16 of x's shape, for
    axis -1.
    """
    fmt = get_format(format)
    axis = check_axis(axis, x.ndim, x.shape)
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
