"""Recorded rearrangements: shapes, slices, joining, and broadcasting with its adjoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ShapeError
from .tape import Op, Variable
from .xp import namespace


def shape_of(x: Any) -> tuple:
    """Shape of an array or variable; () for a number."""
    return getattr(x, "shape", ())


# ---- broadcasting ----


def fold_to(x: Any, shape: tuple) -> Any:
    """Sum the axes of array x over which an operand of `shape` was repeated."""
    if x.shape == shape:
        return x
    lead = x.ndim - len(shape)
    axes = tuple(range(lead)) + tuple(
        lead + i for i, n in enumerate(shape) if n == 1 and x.shape[lead + i] != 1
    )
    return x.sum(axis=axes, keepdims=True).reshape(shape)


def broadcast(x: Any, shape: tuple) -> Any:
    return namespace(x).broadcast_to(x, shape)


_sum_to_op = Op(
    "sum_to",
    lambda x, shape: (fold_to(x, shape), x.shape),
    lambda g, inputs, node, needs, shape: (broadcast_to(g, node.saved),),
    lambda g, arrays, saved, needs, shape: (broadcast(g, saved),),
    keep=False,
)
_broadcast_op = Op(
    "broadcast_to",
    lambda x, shape: (broadcast(x, shape), x.shape),
    lambda g, inputs, node, needs, shape: (sum_to(g, node.saved),),
    lambda g, arrays, saved, needs, shape: (fold_to(g, saved),),
    keep=False,
)


def sum_to(x: Any, shape: tuple) -> Variable:
    """Sum x over the axes along which `shape` is broadcast to x's shape: the adjoint of `broadcast_to`."""
    return x if shape_of(x) == shape else _sum_to_op(x, shape=shape)


def broadcast_to(x: Any, shape: tuple) -> Variable:
    """x repeated to `shape` by NumPy's rules."""
    return x if shape_of(x) == shape else _broadcast_op(x, shape=tuple(shape))


_reshape_op = Op(
    "reshape",
    lambda x, shape: (x.reshape(shape), x.shape),
    lambda g, inputs, node, needs, shape: (reshape(g, node.saved),),
    lambda g, arrays, saved, needs, shape: (g.reshape(saved),),
    keep=False,
)


def _inverse(axes: tuple) -> tuple:
    return tuple(axes.index(i) for i in range(len(axes)))


_transpose_op = Op(
    "transpose",
    lambda x, axes: (x.transpose(axes), None),
    lambda g, inputs, node, needs, axes: (transpose(g, _inverse(axes)),),
    lambda g, arrays, saved, needs, axes: (g.transpose(_inverse(axes)),),
    keep=False,
)


def _unslice(g: Any, shape: tuple, key: Any) -> Any:
    out = namespace(g).zeros(shape, g.dtype)
    out[key] = g
    return out


_slice_op = Op(
    "slice",
    lambda x, key: (x[key], x.shape),
    lambda g, inputs, node, needs, key: (unslice(g, node.saved, key),),
    lambda g, arrays, saved, needs, key: (_unslice(g, saved, key),),
    keep=False,
)
_unslice_op = Op(
    "unslice",
    lambda x, shape, key: (_unslice(x, shape, key), None),
    lambda g, inputs, node, needs, shape, key: (getitem(g, key),),
    lambda g, arrays, saved, needs, shape, key: (g[key],),
    keep=False,
)


def _pieces(shapes: Sequence[tuple], axis: int) -> list[tuple]:
    keys, start = [], 0
    for shape in shapes:
        stop = start + shape[axis]
        keys.append((slice(None),) * axis + (slice(start, stop),))
        start = stop
    return keys


def _concat_fused(g, arrays, saved, needs, axis):
    return [g[key] if need else None for key, need in zip(_pieces(saved, axis), needs, strict=True)]


_concat_op = Op(
    "concat",
    lambda *xs, axis: (namespace(xs[0]).concatenate(xs, axis=axis), [x.shape for x in xs]),
    lambda g, inputs, node, needs, axis: [
        getitem(g, key) if need else None for key, need in zip(_pieces(node.saved, axis), needs, strict=True)
    ],
    _concat_fused,
    keep=False,
)


def reshape(x: Any, shape: tuple) -> Variable:
    """x with another shape of the same size (one entry may be -1)."""
    return x if shape_of(x) == tuple(shape) else _reshape_op(x, shape=tuple(shape))


def transpose(x: Any, axes: tuple | None = None) -> Variable:
    """x with permuted axes (reversed by default)."""
    axes = tuple(range(x.ndim))[::-1] if axes is None else tuple(a % x.ndim for a in axes)
    return _transpose_op(x, axes=axes)


def getitem(x: Any, key: Any) -> Variable:
    """x[key] for integers, slices, None and Ellipsis; rows by an integer array: `take`."""
    parts = key if isinstance(key, tuple) else (key,)
    if not all(isinstance(k, (int, slice, type(None), type(Ellipsis), np.integer)) for k in parts):
        raise TypeError(f"getitem: {key!r} is neither integers nor slices; use take(x, indices) for rows")
    return _slice_op(x, key=key)


def unslice(x: Any, shape: tuple, key: Any) -> Variable:
    """Zeros of `shape` with x at `key`: the adjoint of `getitem`."""
    return _unslice_op(x, shape=tuple(shape), key=key)


def pad(x: Any, widths: Sequence[tuple[int, int]]) -> Variable:
    """x with zeros around it: (before, after) for each axis.

    >>> import numpy as np
    >>> pad(Variable(np.ones(2)), [(1, 0)]).data
    array([0., 1., 1.])
    """
    shape = tuple(n + a + b for n, (a, b) in zip(x.shape, widths, strict=True))
    return unslice(x, shape, tuple(slice(a, a + n) for n, (a, _) in zip(x.shape, widths, strict=True)))


def concat(xs: Sequence[Any], axis: int = -1) -> Variable:
    """The arrays xs one after the other along `axis`; other axes agree."""
    axis = axis % xs[0].ndim
    shapes = {tuple(n for i, n in enumerate(x.shape) if i != axis) for x in xs}
    if len(shapes) != 1:
        raise ShapeError(
            f"concat: shapes {[tuple(x.shape) for x in xs]} may differ along axis {axis} only; slice or pad"
        )
    return _concat_op(*xs, axis=axis)
