"""Elementwise work in one pass: a compiled CPU kernel where the arrays allow, else plain `xp` code.

The plain functions (``plain_*``) are what the kernels are tested against and what float64 and CuPy arrays run
on.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from .xp import host, is_host, namespace


@cache
def _kernels() -> Any:
    from ..backends import cpu_norm  # numba is imported with the first kernel

    return cpu_norm


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)), without overflow on either side."""
    xp = namespace(x)
    e = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, 1 / (1 + e), e / (1 + e)).astype(x.dtype, copy=False)


def plain_silu(x: Any) -> Any:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def plain_silu_vjp(g: Any, x: Any) -> Any:
    """g times the derivative of SiLU, s * (1 + x * (1 - s)) with s = sigmoid(x)."""
    s = sigmoid(x)
    return g * (s * (1 + x * (1 - s)))


def silu(x: Any) -> Any:
    """x * sigmoid(x), any shape."""
    return _kernels().silu(host(x)) if is_host(x) else plain_silu(x)


def silu_vjp(g: Any, x: Any) -> Any:
    """Gradient of `silu` for the output gradient `g`."""
    if is_host(x) and g.dtype == x.dtype:
        return _kernels().silu_vjp(host(g), host(x))
    return plain_silu_vjp(g, x)


def plain_group_norm(x: Any, shift: Any, weight: Any, bias: Any, groups: int, eps: float, act: bool) -> tuple:
    """(y, mean, rstd) for x (N, P, C) + shift (N, C); mean and rstd are (N, C), repeated inside a group."""
    xp = namespace(x)
    n, pixels, channels = x.shape
    v = x if shift is None else x + shift[:, None, :]
    grouped = v.reshape(n, pixels, groups, channels // groups)
    mean = grouped.mean(axis=(1, 3), keepdims=True)
    var = xp.square(grouped - mean).mean(axis=(1, 3), keepdims=True)
    rstd = 1 / xp.sqrt(var + eps)
    width = channels // groups
    mean = xp.repeat(mean.reshape(n, groups), width, axis=1).astype(x.dtype, copy=False)
    rstd = xp.repeat(rstd.reshape(n, groups), width, axis=1).astype(x.dtype, copy=False)
    y = (v - mean[:, None]) * rstd[:, None] * weight + bias
    return (plain_silu(y) if act else y), mean, rstd


def plain_group_norm_vjp(
    g: Any, x: Any, shift: Any, weight: Any, bias: Any, groups: int, act: bool, mean: Any, rstd: Any
) -> tuple:
    """(dx, dshift, dweight, dbias) of `plain_group_norm` (Wu and He 2018, differentiated by hand)."""
    xp = namespace(x)
    n, pixels, channels = x.shape
    v = x if shift is None else x + shift[:, None, :]
    h = (v - mean[:, None]) * rstd[:, None]
    if act:
        g = plain_silu_vjp(g, h * weight + bias)

    def group_mean(t):
        means = t.reshape(n, pixels, groups, channels // groups).mean(axis=(1, 3))
        return xp.repeat(means, channels // groups, axis=1)[:, None]

    gw = g * weight
    dx = rstd[:, None] * (gw - group_mean(gw) - h * group_mean(gw * h))
    return dx, dx.sum(axis=1), (g * h).sum(axis=(0, 1)), g.sum(axis=(0, 1))


def group_norm(x: Any, shift: Any, weight: Any, bias: Any, groups: int, eps: float, act: bool) -> tuple:
    """(y, mean, rstd); x (N, P, C), shift (N, C) or None, `act` applies SiLU."""
    if is_host(x) and weight.dtype == x.dtype:
        xp = namespace(x)
        if shift is None:
            shift = xp.zeros((x.shape[0], x.shape[2]), x.dtype)
        return _kernels().group_norm(*map(host, (x, shift, weight, bias)), groups, eps, act)
    return plain_group_norm(x, shift, weight, bias, groups, eps, act)


def group_norm_vjp(
    g: Any, x: Any, shift: Any, weight: Any, bias: Any, groups: int, act: bool, mean: Any, rstd: Any
) -> tuple:
    """(dx, dshift, dweight, dbias) of `group_norm`."""
    if is_host(x) and weight.dtype == x.dtype:
        xp = namespace(x)
        if shift is None:
            shift = xp.zeros((x.shape[0], x.shape[2]), x.dtype)
        return _kernels().group_norm_vjp(*map(host, (g, x, shift, weight, bias)), groups, act, mean, rstd)
    return plain_group_norm_vjp(g, x, shift, weight, bias, groups, act, mean, rstd)


def column_sums(x: Any) -> Any:
    """Sum of x (..., C) over all but the last axis: (C,); the gradient of a bias."""
    flat = x.reshape(-1, x.shape[-1])
    return _kernels().column_sums(host(flat)) if is_host(flat) else flat.sum(axis=0)


def softmax(x: Any, axis: int = -1) -> Any:
    """exp(x - max) / sum along `axis`."""
    xp = namespace(x)
    e = xp.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def upsample_nearest(x: Any) -> Any:
    """Each pixel of x (N, H, W, C) four times: (N, 2H, 2W, C)."""
    xp = namespace(x)
    n, h, w, c = x.shape
    return xp.broadcast_to(x[:, :, None, :, None], (n, h, 2, w, 2, c)).reshape(n, 2 * h, 2 * w, c)


#: (a, r) -> the taps of one side of a 3x3 kernel that lie on pixel y + a - 1 + r of the small pictures when
#: the kernel stands on pixel 2 y + a of the upsampled ones.
_PHASE_TAPS = {(0, 0): (0,), (0, 1): (1, 2), (1, 0): (0, 1), (1, 1): (2,)}


def phase_weights(w: Any) -> Any:
    """w (O, 3, 3, C) -> (O, 2, 2, 2, 2, C): for each phase (a, b) of the pixels (2 y + a, 2 x + b) the 2x2
    kernel on the small pictures that equals w on the upsampled ones. Sums in ascending order of the taps.
    """
    xp = namespace(w)
    out = xp.empty((w.shape[0], 2, 2, 2, 2, w.shape[3]), w.dtype)
    for (a, r), rows in _PHASE_TAPS.items():
        for (b, s), columns in _PHASE_TAPS.items():
            first, *rest = (w[:, i, j] for i in rows for j in columns)
            for tap in rest:
                first = first + tap
            out[:, a, b, r, s] = first
    return out


def phase_weights_vjp(g: Any) -> Any:
    """The adjoint of `phase_weights`: (O, 2, 2, 2, 2, C) -> (O, 3, 3, C)."""
    dw = namespace(g).zeros((g.shape[0], 3, 3, g.shape[-1]), g.dtype)
    for (a, r), rows in _PHASE_TAPS.items():
        for (b, s), columns in _PHASE_TAPS.items():
            for i in rows:
                for j in columns:
                    dw[:, i, j] += g[:, a, b, r, s]
    return dw


def interleave_phases(y: Any) -> Any:
    """y (N, H + 1, W + 1, 4 O), channel 4 o + 2 a + b -> (N, 2 H, 2 W, O): pixel (2 y + a, 2 x + b) is that
    of phase (a, b) at (y + a, x + b).
    """
    n, h, w = y.shape[0], y.shape[1] - 1, y.shape[2] - 1
    t = y.reshape(n, h + 1, w + 1, y.shape[3] // 4, 2, 2)
    out = namespace(y).empty((n, 2 * h, 2 * w, t.shape[3]), y.dtype)
    for a in (0, 1):
        for b in (0, 1):
            out[:, a::2, b::2] = t[:, a : a + h, b : b + w, :, a, b]
    return out


def interleave_phases_vjp(g: Any) -> Any:
    """The adjoint of `interleave_phases`: (N, 2 H, 2 W, O) -> (N, H + 1, W + 1, 4 O)."""
    n, h, w, o = g.shape[0], g.shape[1] // 2, g.shape[2] // 2, g.shape[3]
    out = namespace(g).zeros((n, h + 1, w + 1, o, 2, 2), g.dtype)
    for a in (0, 1):
        for b in (0, 1):
            out[:, a : a + h, b : b + w, :, a, b] = g[:, a::2, b::2]
    return out.reshape(n, h + 1, w + 1, 4 * o)


def upsample_nearest_vjp(g: Any) -> Any:
    """Sum of each 2 x 2 patch of g (N, 2H, 2W, C)."""
    n, h, w, c = g.shape
    t = g.reshape(n, h // 2, 2, w // 2, 2, c)
    out = t[:, :, 0, :, 0] + t[:, :, 0, :, 1]
    out += t[:, :, 1, :, 0]
    out += t[:, :, 1, :, 1]
    return out
