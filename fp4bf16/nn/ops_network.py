"""Recorded network operations over the package's primitives: products, convolution, attention, group norm,
lookups.

The track of a call is settled in the forward and kept for the way back. Derivatives run on the BF16 track (on
the "reference" track: unrounded), straight through the quantiser: on the FP4 track dX = g W^ and dW = g^T X^
with the dequantised operands W^ and X^.
"""

from __future__ import annotations

from typing import Any

from ..attention import attention as attention_primitive
from ..attention import attention_vjp as attention_vjp_primitive
from ..conv import conv2d as conv2d_primitive
from ..conv import conv2d_dgrad, conv2d_wgrad
from ..errors import ShapeError
from ..gemm import DualWeight
from ..gemm import linear as linear_primitive
from ..gemm import matmul as matmul_primitive
from ..quantize import dequantize, quantize
from ..tracks import resolve_track, tracks
from . import fused
from .ops_math import add, data_of, div, mean, mul, sigmoid, softmax, sqrt, sub, sum
from .ops_shape import reshape, shape_of, sum_to, transpose
from .tape import Op, Variable
from .xp import namespace


def _exact(track: str) -> str:
    """The track of a derivative: unrounded for the oracle, BF16 for all others."""
    return "reference" if track == "reference" else "bf16"


# ---- quantiser, passed through ----

_through_op = Op(
    "through_quantiser",
    lambda x, value: (value, None),
    lambda g, inputs, node, needs, value: (g,),
    lambda g, arrays, saved, needs, value: (g,),
    keep=False,
)


def _on_grid(x: Any, outer: str, search: str) -> Any:
    return dequantize(quantize(x, "nvfp4_exact", outer=outer, search=search), dtype=str(x.dtype))


def _dense(twin: Any, dtype: Any) -> Any:
    """The weight (N, ..., K) that a `QuantizedArray` or a `DualWeight` stands for."""
    if not isinstance(twin, DualWeight):
        return dequantize(twin, dtype=str(dtype))
    down, up = twin.branch_factors()  # (K, r) and (r, N)
    rest = dequantize(twin.twin, dtype="float32")
    rest = rest.T if rest.ndim == 2 else rest
    return (rest + (down @ up).T.reshape(rest.shape)).astype(dtype)


def _seen(x: Any, w: Any, track: str, twin: Any, outer: str) -> tuple:
    """The arrays x and w as the product on `track` saw them: its derivatives use these."""
    if track not in ("fp4", "dual"):
        return x, w
    return _on_grid(x, outer, "fast"), _on_grid(w, outer, "full") if twin is None else _dense(twin, w.dtype)


def _seen_taped(x: Any, w: Any, track: str, twin: Any, outer: str) -> tuple:
    """The same as variables whose derivative is that of x and w."""
    if track not in ("fp4", "dual"):
        return x, w
    values = _seen(data_of(x), data_of(w), track, twin, outer)
    return tuple(_through_op(v, value=value) for v, value in zip((x, w), values, strict=True))


def through_quantiser(x: Any, outer: str = "row", search: str = "fast") -> Variable:
    """x on the `nvfp4_exact` grid (blocks along the last axis); the derivative is the identity
    (straight-through).

    Not finite: `NonFiniteError`. outer and search as in `fp4bf16.quantize`.
    """
    return _through_op(x, value=_on_grid(data_of(x), outer, search))


# ---- products ----


def _swap(x: Any) -> Any:
    axes = tuple(range(x.ndim))
    return transpose(x, axes[:-2] + (axes[-1], axes[-2]))


def _matmul_vjp(g, inputs, node, needs, track):
    a, b = inputs
    if track == "fp4":
        a, b = through_quantiser(a), _swap(through_quantiser(_swap(b), search="full"))
    t = _exact(track)
    return (
        sum_to(_matmul_op(g, _swap(b), track=t), shape_of(a)) if needs[0] else None,
        sum_to(_matmul_op(_swap(a), g, track=t), shape_of(b)) if needs[1] else None,
    )


def _matmul_forward(a, b, track):
    with tracks(track):
        return matmul_primitive(a, b), None


_matmul_op = Op("matmul", _matmul_forward, _matmul_vjp)


def matmul(a: Any, b: Any, track: str | None = None) -> Variable:
    """a (..., M, K) @ b (..., K, N), batched and broadcast as `numpy.matmul`; both at least 2-D.

    track: "bf16" (default), "fp4" or "reference"; "dual" runs as "bf16", since neither operand is a
    `DualWeight`.
    """
    if a.ndim < 2 or b.ndim < 2:
        raise ShapeError(
            f"matmul: a has shape {a.shape} and b {b.shape}, but both need at least 2 axes; reshape vectors"
        )
    track = resolve_track(track, "bf16")
    return _matmul_op(a, b, track="bf16" if track == "dual" else track)


Variable.__matmul__, Variable.__rmatmul__ = matmul, lambda a, b: matmul(b, a)


def _certified(result: Any, certify: Any) -> tuple:
    """(array, nothing saved) of a product, whose certificate goes to the list of `certify`."""
    if certify is None:
        return result, None
    certify[1].append(result[1])
    return result[0], None


def _how(certify: Any) -> bool | str:
    return False if certify is None else certify[0]


def _linear_forward(x, w, b, track, twin, certify=None):
    with tracks(track):
        y = linear_primitive(x, w if twin is None else twin, b, certify=_how(certify))
    return _certified(y, certify)


def _linear_fused(g, arrays, saved, needs, track, twin, certify=None):
    x, w = _seen(arrays[0], arrays[1], track, twin, "row")
    n, k = w.shape
    g2 = g.reshape(-1, n)
    with tracks(_exact(track)):
        dx = matmul_primitive(g2, w).reshape(x.shape) if needs[0] else None
        dw = matmul_primitive(g2.T, x.reshape(-1, k)) if needs[1] else None
    return dx, dw, fused.column_sums(g2) if needs[2] else None


def _linear_vjp(g, inputs, node, needs, track, twin, certify=None):
    x, w = _seen_taped(inputs[0], inputs[1], track, twin, "row")
    n, k = w.shape
    g2, t = reshape(g, (-1, n)), _exact(track)
    return (
        reshape(_matmul_op(g2, w, track=t), shape_of(x)) if needs[0] else None,
        _matmul_op(transpose(g2), reshape(x, (-1, k)), track=t) if needs[1] else None,
        sum(g2, 0) if needs[2] else None,
    )


_linear_op = Op("linear", _linear_forward, _linear_vjp, _linear_fused)


def linear(
    x: Any,
    weight: Any,
    bias: Any = None,
    track: str | None = None,
    twin: Any = None,
    certify: tuple[bool | str, list] | None = None,
) -> Variable:
    """x (..., K) times weight (N, K) transposed, plus bias (N,): (..., N).

    twin: a `QuantizedArray` or `DualWeight` of `weight`, prepared once, that the forward uses in its place.
    certify: (True or "bound", list): the `Certificate` of the product is appended to the list.
    """
    track = resolve_track(track, "bf16")
    twin = twin if track in ("fp4", "dual") else None
    return _linear_op(x, weight, bias, track=track, twin=twin, certify=certify)


# ---- convolution ----


def _conv_forward(x, w, b, r, stride, padding, track, twin, certify=None):
    how = dict(stride=stride, padding=padding, certify=_how(certify))
    with tracks(track):
        y = conv2d_primitive(x, w if twin is None else twin, bias=b, residual=r, **how)
    return _certified(y, certify)


def _conv_fused(g, arrays, saved, needs, stride, padding, track, twin, certify=None):
    x, w = _seen(arrays[0], arrays[1], track, twin, "image")
    dx = dw = None
    g = namespace(g).ascontiguousarray(g)
    with tracks(_exact(track)):
        if needs[0]:
            dx = conv2d_dgrad(g, w, x.shape, stride=stride, padding=padding)
        if needs[1]:
            dw = conv2d_wgrad(g, x, w.shape[1:3], stride=stride, padding=padding)
    return dx, dw, fused.column_sums(g) if needs[2] else None, g if needs[3] else None


def _conv_vjp(g, inputs, node, needs, stride, padding, track, twin, certify=None):
    x, w = _seen_taped(inputs[0], inputs[1], track, twin, "image")
    how = dict(stride=stride, padding=padding, track=_exact(track))
    return (
        _dgrad_op(g, w, shape=shape_of(x), **how) if needs[0] else None,
        _wgrad_op(g, x, size=shape_of(w)[1:3], **how) if needs[1] else None,
        sum(g, (0, 1, 2)) if needs[2] else None,
        g if needs[3] else None,
    )


def _dgrad_forward(g, w, shape, stride, padding, track):
    with tracks(track):
        return conv2d_dgrad(g, w, shape, stride=stride, padding=padding), None


def _wgrad_forward(g, x, size, stride, padding, track):
    with tracks(track):
        return conv2d_wgrad(g, x, size, stride=stride, padding=padding), None


def _dgrad_vjp(h, inputs, node, needs, shape, stride, padding, track):
    """dgrad is linear in g and in w: its adjoints are the convolution of h and the weight gradient at h."""
    g, w = inputs
    how = dict(stride=stride, padding=padding, track=track)
    return (
        _conv_op(h, w, None, None, twin=None, **how) if needs[0] else None,
        _wgrad_op(g, h, size=shape_of(w)[1:3], **how) if needs[1] else None,
    )


def _wgrad_vjp(h, inputs, node, needs, size, stride, padding, track):
    """wgrad is linear in g and in x: its adjoints are the convolution with h and the input gradient
    through h.
    """
    g, x = inputs
    how = dict(stride=stride, padding=padding, track=track)
    return (
        _conv_op(x, h, None, None, twin=None, **how) if needs[0] else None,
        _dgrad_op(g, h, shape=shape_of(x), **how) if needs[1] else None,
    )


_conv_op = Op("conv2d", _conv_forward, _conv_vjp, _conv_fused)
_dgrad_op = Op("conv2d_dgrad", _dgrad_forward, _dgrad_vjp)
_wgrad_op = Op("conv2d_wgrad", _wgrad_forward, _wgrad_vjp)


def conv2d(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: int = 1,
    padding: Any = 0,
    residual: Any = None,
    track: str | None = None,
    twin: Any = None,
    certify: tuple[bool | str, list] | None = None,
) -> Variable:
    """Convolution of x (N, H, W, I) with weight (O, kh, kw, I), plus bias (O,), plus residual of the output's
    shape.

    padding: an int or ((top, bottom), (left, right)). twin: a `QuantizedArray` of `weight`, prepared once,
    that the forward uses in its place. certify: as in `linear`.
    """
    track = resolve_track(track, "bf16")
    how = dict(stride=stride, padding=padding, track=track, certify=certify)
    return _conv_op(x, weight, bias, residual, twin=twin if track in ("fp4", "dual") else None, **how)


# ---- attention ----


def _attention_forward(q, k, v, track, causal, scale):
    with tracks(track):
        return attention_primitive(q, k, v, causal=causal, scale=scale), None


def _attention_fused(g, arrays, saved, needs, track, causal, scale):
    with tracks(track):
        return attention_vjp_primitive(g, *arrays, causal=causal, scale=scale)


def _causal_mask(q: Any, k: Any) -> Any:
    """0 where key j may be seen by query i (j <= i, aligned at the first token), a large negative number
    elsewhere.
    """
    xp = namespace(q)
    return xp.where(xp.tri(q.shape[-2], k.shape[-1], dtype=bool), 0.0, -1e30).astype(q.dtype)


def _attention_vjp(g, inputs, node, needs, track, causal, scale):
    """dV = P^T g, dS = scale P (g V^T - sum P (g V^T)), dQ = dS K, dK = dS^T Q; P = softmax(scale Q K^T).

    On the FP4 track the operands are taken unquantised here, which the fused form does not do.
    """
    q, k, v, g = (transpose(t, (0, 2, 1, 3)) for t in (*inputs, g))
    t = _exact(track)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    kt = _swap(k)
    scores = mul(_matmul_op(q, kt, track=t), factor)
    if causal:
        scores = add(scores, _causal_mask(scores.data, scores.data))
    p = softmax(scores)
    dp = _matmul_op(g, _swap(v), track=t)
    ds = mul(mul(p, sub(dp, sum(mul(p, dp), -1, keepdims=True))), factor)
    dq, dk, dv = (
        _matmul_op(ds, k, track=t),
        _matmul_op(_swap(ds), q, track=t),
        _matmul_op(_swap(p), g, track=t),
    )
    return [transpose(d, (0, 2, 1, 3)) if need else None for d, need in zip((dq, dk, dv), needs, strict=True)]


_attention_op = Op("attention", _attention_forward, _attention_vjp, _attention_fused)


def attention(
    q: Any, k: Any, v: Any, track: str | None = None, causal: bool = False, scale: float | None = None
) -> Variable:
    """softmax(scale q k^T) v for q, k, v (batch, tokens, heads, dim); scale defaults to 1/sqrt(dim)."""
    return _attention_op(q, k, v, track=resolve_track(track, "bf16"), causal=causal, scale=scale)


# ---- group norm ----


def _norm_forward(x, shift, weight, bias, groups, eps, act):
    n, channels = x.shape[0], x.shape[-1]
    y, mean_, rstd = fused.group_norm(x.reshape(n, -1, channels), shift, weight, bias, groups, eps, act)
    return y.reshape(x.shape), (mean_, rstd)


def _norm_fused(g, arrays, saved, needs, groups, eps, act):
    x, shift, weight, bias = arrays
    flat = (x.shape[0], -1, x.shape[-1])
    args = (shift, weight, bias, groups, act, *saved)
    dx, dshift, dw, db = fused.group_norm_vjp(g.reshape(flat), x.reshape(flat), *args)
    return dx.reshape(x.shape), dshift if needs[1] else None, dw, db


def _norm_vjp(g, inputs, node, needs, groups, eps, act):
    x, shift, weight, bias = inputs
    n, channels = x.shape[0], x.shape[-1]
    grouped, per_channel = (n, -1, groups, channels // groups), (1, 1, groups, channels // groups)
    v, w, b = reshape(x, grouped), reshape(weight, per_channel), reshape(bias, per_channel)
    if shift is not None:
        v = add(v, reshape(shift, (n, 1, groups, channels // groups)))
    d = sub(v, mean(v, (1, 3), keepdims=True))
    rstd = div(1.0, sqrt(add(mean(mul(d, d), (1, 3), keepdims=True), eps)))
    h = mul(d, rstd)
    g = reshape(g, grouped)
    if act:
        z = add(mul(h, w), b)
        s = sigmoid(z)
        g = mul(g, mul(s, add(1.0, mul(z, sub(1.0, s)))))
    gw = mul(g, w)
    inner = sub(sub(gw, mean(gw, (1, 3), keepdims=True)), mul(h, mean(mul(gw, h), (1, 3), keepdims=True)))
    dx = mul(rstd, inner)
    return (
        reshape(dx, shape_of(x)) if needs[0] else None,
        reshape(sum(dx, 1), (n, channels)) if needs[1] else None,
        reshape(sum(mul(g, h), (0, 1)), (channels,)) if needs[2] else None,
        reshape(sum(g, (0, 1)), (channels,)) if needs[3] else None,
    )


_norm_op = Op("group_norm", _norm_forward, _norm_vjp, _norm_fused)


def group_norm(
    x: Any, weight: Any, bias: Any, groups: int, eps: float = 1e-5, silu: bool = False, shift: Any = None
) -> Variable:
    """Group normalisation (Wu and He 2018) of x (N, ..., C) over all but the batch and the other groups'
    channels.

    weight, bias: (C,). shift (N, C) is added to x first (a time embedding); ``silu=True`` applies SiLU
    afterwards: both in the same pass. Raises `ShapeError` if C is no multiple of `groups`.
    """
    channels = x.shape[-1]
    if channels % groups:
        raise ShapeError(
            f"group_norm: x has {channels} channels, which {groups} groups do not divide; change groups"
        )
    return _norm_op(x, shift, weight, bias, groups=groups, eps=eps, act=silu)


# ---- lookups ----


def _scatter(g: Any, indices: Any, rows: int) -> Any:
    xp = namespace(g)
    out = xp.zeros((rows, *g.shape[indices.ndim :]), g.dtype)
    xp.add.at(out, indices, g)
    return out


_take_op = Op(
    "take",
    lambda w, indices: (w[indices], w.shape[0]),
    lambda g, inputs, node, needs, indices: (_scatter_op(g, indices=indices, rows=node.saved),),
    lambda g, arrays, saved, needs, indices: (_scatter(g, indices, saved),),
    keep=False,
)
_scatter_op = Op(
    "scatter_rows",
    lambda g, indices, rows: (_scatter(g, indices, rows), None),
    lambda h, inputs, node, needs, indices, rows: (_take_op(h, indices=indices),),
    keep=False,
)


def take(weight: Any, indices: Any) -> Variable:
    """Rows of weight (rows, ...) at the integer array `indices`: shape indices.shape + weight.shape[1:].

    Raises `ShapeError` for an index outside 0..rows-1, naming it.
    """
    xp = namespace(weight.data if isinstance(weight, Variable) else weight)
    indices = xp.asarray(indices)
    if indices.size and (
        indices.dtype.kind not in "iu" or indices.min() < 0 or indices.max() >= weight.shape[0]
    ):
        raise ShapeError(
            f"take: indices ({indices.dtype}) reach from {indices.min()} to {indices.max()}, but weight has "
            f"{weight.shape[0]} rows; pass integers from 0 to {weight.shape[0] - 1}"
        )
    return _take_op(weight, indices=indices)
