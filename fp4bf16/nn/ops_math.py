"""Recorded arithmetic, elementwise functions and reductions, and `Variable`'s operators."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import ShapeError
from . import fused
from .ops_shape import broadcast, broadcast_to, fold_to, getitem, reshape, shape_of, sum_to, transpose
from .tape import Node, Op, Variable
from .xp import as_array, namespace


def _like(x: Any, other: Any) -> Any:
    """A constant in the dtype of the variable that it meets, so that float64 constants do not widen a
    network.
    """
    if not isinstance(other, Variable) or isinstance(x, Variable) or type(x) in (float, int, bool):
        return x
    if isinstance(x, np.generic):
        return x.item()
    return as_array(x).astype(other.dtype, copy=False)


def _pair(op: Op, a: Any, b: Any) -> Variable:
    return op(_like(a, b), _like(b, a))


# ---- arithmetic ----


def _add_fused(g, arrays, saved, needs):
    return [fold_to(g, s) if need else None for s, need in zip(saved, needs, strict=True)]


def _sub_fused(g, arrays, saved, needs):
    return (fold_to(g, saved[0]) if needs[0] else None, -fold_to(g, saved[1]) if needs[1] else None)


def _mul_vjp(g, inputs, node, needs):
    a, b = inputs
    return (
        sum_to(mul(g, b), shape_of(a)) if needs[0] else None,
        sum_to(mul(g, a), shape_of(b)) if needs[1] else None,
    )


def _mul_fused(g, arrays, saved, needs):
    a, b = arrays
    return (
        fold_to(g * b, shape_of(a)) if needs[0] else None,
        fold_to(g * a, shape_of(b)) if needs[1] else None,
    )


def _div_vjp(g, inputs, node, needs):
    a, b = inputs
    return (
        sum_to(div(g, b), shape_of(a)) if needs[0] else None,
        sum_to(neg(div(mul(g, a), mul(b, b))), shape_of(b)) if needs[1] else None,
    )


_add_op = Op(
    "add",
    lambda a, b: (a + b, (shape_of(a), shape_of(b))),
    lambda g, inputs, node, needs: [
        sum_to(g, s) if n else None for s, n in zip(node.saved, needs, strict=True)
    ],
    _add_fused,
    keep=False,
)
_sub_op = Op(
    "sub",
    lambda a, b: (a - b, (shape_of(a), shape_of(b))),
    lambda g, inputs, node, needs: (
        sum_to(g, node.saved[0]) if needs[0] else None,
        neg(sum_to(g, node.saved[1])) if needs[1] else None,
    ),
    _sub_fused,
    keep=False,
)
_mul_op = Op("mul", lambda a, b: (a * b, None), _mul_vjp, _mul_fused)
_div_op = Op("div", lambda a, b: (a / b, None), _div_vjp)
_neg_op = Op(
    "neg",
    lambda x: (-x, None),
    lambda g, inputs, node, needs: (neg(g),),
    lambda g, arrays, saved, needs: (-g,),
    keep=False,
)
_power_op = Op(
    "power",
    lambda x, exponent: (x**exponent, None),
    lambda g, inputs, node, needs, exponent: (mul(g, mul(power(inputs[0], exponent - 1), exponent)),),
)


def add(a: Any, b: Any) -> Variable:
    """a + b, broadcast."""
    return _pair(_add_op, a, b)


def sub(a: Any, b: Any) -> Variable:
    """a - b, broadcast."""
    return _pair(_sub_op, a, b)


def mul(a: Any, b: Any) -> Variable:
    """a * b, broadcast."""
    return _pair(_mul_op, a, b)


def div(a: Any, b: Any) -> Variable:
    """a / b, broadcast."""
    return _pair(_div_op, a, b)


def neg(x: Any) -> Variable:
    """-x."""
    return _neg_op(x)


def power(x: Any, exponent: float) -> Variable:
    """x to a constant power (a Python number)."""
    if exponent == 1:
        return x
    return full_like(x, 1.0) if exponent == 0 else _power_op(x, exponent=exponent)


def full_like(x: Any, value: float) -> Variable:
    """A constant of x's shape and dtype."""
    data = x.data if isinstance(x, Variable) else x
    return Variable._of(namespace(data).full(data.shape, value, data.dtype), None)


# ---- elementwise functions ----


def _out(node: Node) -> Variable:
    """The output of `node` (kept in saved) as a variable of the graph."""
    return Variable._of(node.saved, node)


def _twice(y: Any) -> tuple:
    return y, y


_exp_op = Op(
    "exp",
    lambda x: _twice(namespace(x).exp(x)),
    lambda g, inputs, node, needs: (mul(g, _out(node)),),
    lambda g, arrays, saved, needs: (g * saved,),
    keep=False,
)
_log_op = Op(
    "log", lambda x: (namespace(x).log(x), None), lambda g, inputs, node, needs: (div(g, inputs[0]),)
)
_sqrt_op = Op(
    "sqrt",
    lambda x: _twice(namespace(x).sqrt(x)),
    lambda g, inputs, node, needs: (div(mul(g, 0.5), _out(node)),),
    keep=False,
)
_tanh_op = Op(
    "tanh",
    lambda x: _twice(namespace(x).tanh(x)),
    lambda g, inputs, node, needs: (mul(g, sub(1.0, mul(_out(node), _out(node)))),),
    keep=False,
)
_sigmoid_op = Op(
    "sigmoid",
    lambda x: _twice(fused.sigmoid(x)),
    lambda g, inputs, node, needs: (mul(g, mul(_out(node), sub(1.0, _out(node)))),),
    lambda g, arrays, saved, needs: (g * (saved * (1 - saved)),),
    keep=False,
)
_softplus_op = Op(
    "softplus",
    lambda x: (namespace(x).logaddexp(x, namespace(x).zeros((), x.dtype)), None),
    lambda g, inputs, node, needs: (mul(g, sigmoid(inputs[0])),),
    lambda g, arrays, saved, needs: (g * fused.sigmoid(arrays[0]),),
)


def _silu_vjp(g, inputs, node, needs):
    s = sigmoid(inputs[0])
    return (mul(g, mul(s, add(1.0, mul(inputs[0], sub(1.0, s))))),)


_silu_op = Op(
    "silu",
    lambda x: (fused.silu(x), None),
    _silu_vjp,
    lambda g, arrays, saved, needs: (fused.silu_vjp(g, arrays[0]),),
)
_where_op = Op(
    "where",
    lambda a, b, condition: (namespace(condition).where(condition, a, b), (shape_of(a), shape_of(b))),
    lambda g, inputs, node, needs, condition: (
        sum_to(where(condition, g, 0.0), node.saved[0]) if needs[0] else None,
        sum_to(where(condition, 0.0, g), node.saved[1]) if needs[1] else None,
    ),
    keep=False,
)


def exp(x: Any) -> Variable:
    """e to the x."""
    return _exp_op(x)


def log(x: Any) -> Variable:
    """Natural logarithm."""
    return _log_op(x)


def sqrt(x: Any) -> Variable:
    """Square root."""
    return _sqrt_op(x)


def tanh(x: Any) -> Variable:
    """Hyperbolic tangent."""
    return _tanh_op(x)


def sigmoid(x: Any) -> Variable:
    """1 / (1 + exp(-x))."""
    return _sigmoid_op(x)


def softplus(x: Any) -> Variable:
    """log(1 + exp(x)), without overflow."""
    return _softplus_op(x)


def log_sigmoid(x: Any) -> Variable:
    """log(sigmoid(x)) = -softplus(-x).

    >>> import numpy as np
    >>> bool(log_sigmoid(Variable(np.zeros(()))).item() == -np.log(2.0))
    True
    """
    return neg(softplus(neg(x)))


def silu(x: Any) -> Variable:
    """x * sigmoid(x)."""
    return _silu_op(x)


def where(condition: Any, a: Any, b: Any) -> Variable:
    """a where the boolean array `condition` holds, else b; gradients flow to the chosen one."""
    return _where_op(_like(a, b), _like(b, a), condition=condition)


def data_of(x: Any) -> Any:
    """The array of a variable; anything else as it is."""
    return x.data if isinstance(x, Variable) else x


def maximum(a: Any, b: Any) -> Variable:
    """The larger of a and b (a where they are equal)."""
    return where(data_of(a) >= data_of(b), a, b)


def minimum(a: Any, b: Any) -> Variable:
    """The smaller of a and b (a where they are equal)."""
    return where(data_of(a) <= data_of(b), a, b)


def clip(x: Any, low: float, high: float) -> Variable:
    """x limited to low..high; no gradient outside."""
    return minimum(maximum(x, low), high)


# ---- reductions ----


def _axes(axis: Any, ndim: int) -> tuple:
    if axis is None:
        return tuple(range(ndim))
    return tuple(a % ndim for a in (axis if isinstance(axis, tuple) else (axis,)))


def _kept(shape: tuple, axes: tuple) -> tuple:
    return tuple(1 if i in axes else n for i, n in enumerate(shape))


def _sum_fused(g, arrays, saved, needs, axis, keepdims):
    shape, axes = saved
    return (broadcast(g.reshape(_kept(shape, axes)), shape),)


def _sum_vjp(g, inputs, node, needs, axis, keepdims):
    shape, axes = node.saved
    return (broadcast_to(reshape(g, _kept(shape, axes)), shape),)


_sum_op = Op(
    "sum",
    lambda x, axis, keepdims: (
        namespace(x).sum(x, axis=axis, keepdims=keepdims),
        (x.shape, _axes(axis, x.ndim)),
    ),
    _sum_vjp,
    _sum_fused,
    keep=False,
)


def sum(x: Any, axis: int | tuple | None = None, keepdims: bool = False) -> Variable:
    """Sum over `axis` (all axes by default)."""
    return _sum_op(x, axis=axis, keepdims=keepdims)


def mean(x: Any, axis: int | tuple | None = None, keepdims: bool = False) -> Variable:
    """Arithmetic mean over `axis` (all axes by default)."""
    count = math.prod(x.shape[a] for a in _axes(axis, x.ndim))
    return mul(sum(x, axis, keepdims), 1.0 / count)


def _mse_forward(x, target, axis):
    d = x - target
    return namespace(d).mean(d * d, axis=axis), d


def _mse_fused(g, arrays, saved, needs, axis):
    axes = _axes(axis, saved.ndim)
    scale = 2.0 / math.prod(saved.shape[a] for a in axes)
    d = saved * (g.reshape(_kept(saved.shape, axes)) * scale)
    return (d if needs[0] else None, -d if needs[1] else None)


def _mse_vjp(g, inputs, node, needs, axis):
    d = sub(inputs[0], inputs[1])
    axes = _axes(axis, d.ndim)
    scale = 2.0 / math.prod(d.shape[a] for a in axes)
    d = mul(d, mul(reshape(g, _kept(d.shape, axes)), scale))
    return (d if needs[0] else None, neg(d) if needs[1] else None)


_mse_op = Op("mean_squared_error", _mse_forward, _mse_vjp, _mse_fused)


def mean_squared_error(x: Any, target: Any, axis: int | tuple | None = None) -> Variable:
    """Mean of (x - target)² over `axis` (all axes by default); x and target have one shape.

    ``axis=(1, 2, 3)`` gives one number a picture. Raises `ShapeError` for different shapes.

    >>> import numpy as np
    >>> mean_squared_error(Variable(np.ones((2, 3))), np.zeros((2, 3)), axis=1).data
    array([1., 1.])
    """
    if shape_of(x) != shape_of(target):
        raise ShapeError(
            f"mean_squared_error: x has shape {shape_of(x)} but target has shape {shape_of(target)}; "
            "they must be equal"
        )
    return _mse_op(_like(x, target), _like(target, x), axis=axis)


def _softmax_fused(g, arrays, y, needs, axis):
    gy = g * y
    gy -= y * gy.sum(axis=axis, keepdims=True)
    return (gy,)


def _softmax_vjp(g, inputs, node, needs, axis):
    y = _out(node)
    return (mul(y, sub(g, sum(mul(g, y), axis, keepdims=True))),)


_softmax_op = Op(
    "softmax", lambda x, axis: _twice(fused.softmax(x, axis)), _softmax_vjp, _softmax_fused, keep=False
)


def softmax(x: Any, axis: int = -1) -> Variable:
    """exp(x) normalised to sum 1 along `axis`."""
    return _softmax_op(x, axis=axis)


def log_softmax(x: Any, axis: int = -1) -> Variable:
    """log(softmax(x)) along `axis`; the maximum is subtracted as a constant first, so that nothing
    overflows.
    """
    x = sub(x, data_of(x).max(axis=axis, keepdims=True))
    return sub(x, log(sum(exp(x), axis, keepdims=True)))


def stop_gradient(x: Any) -> Variable:
    """The value of x as a constant."""
    return x.detach() if isinstance(x, Variable) else Variable(x)


# ---- Variable's operators ----

Variable.__add__ = Variable.__radd__ = add
Variable.__sub__, Variable.__rsub__ = sub, lambda a, b: sub(b, a)
Variable.__mul__ = Variable.__rmul__ = mul
Variable.__truediv__, Variable.__rtruediv__ = div, lambda a, b: div(b, a)
Variable.__neg__, Variable.__pow__, Variable.__getitem__ = neg, power, getitem
Variable.sum, Variable.mean = sum, mean
Variable.reshape = lambda x, *shape: reshape(
    x, shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
)
Variable.transpose = lambda x, *axes: transpose(
    x, axes[0] if axes and isinstance(axes[0], tuple) else axes or None
)
Variable.T = property(transpose)
