"""CPU kernels of what surrounds the products in a network: group norm with SiLU, SiLU, sums of columns.

Imported when the first of them runs (numba compiles once and caches). Float32, C-contiguous arrays. One
picture or one slice is one unit of work, and every sum has a fixed order, so results depend neither on the
batch around a picture nor on the number of threads.
"""

from __future__ import annotations

import numpy as np

from .jit import njit
from .threads import parallel_chunks

f4 = np.float32
_PARALLEL_ELEMENTS = 1 << 15  # below this a second thread costs more than it saves


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def exp32(x):
    """exp(x) in float32, under 2 ulp for -87 <= x <= 88 and clamped outside: Cephes' expf polynomial."""
    x = f4(-87.0) if x < f4(-87.0) else x  # comparisons that let NaN through
    x = f4(88.0) if x > f4(88.0) else x
    n = (x * f4(1.4426950408889634) + f4(12582912.0)) - f4(12582912.0)  # round to the nearest integer
    r = x - n * f4(0.693359375)
    r = r + n * f4(2.12194440e-4)
    p = f4(1.9875691500e-4)
    p = p * r + f4(1.3981999507e-3)
    p = p * r + f4(8.3334519073e-3)
    p = p * r + f4(4.1665795894e-2)
    p = p * r + f4(1.6666665459e-1)
    p = p * r + f4(5.0000001201e-1)
    p = p * (r * r) + r + f4(1.0)
    return p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(nogil=True, cache=True, error_model="numpy")
def _group_stats(x, shift, groups, eps, mean, rstd):
    """Mean and 1/sqrt(var + eps) of one picture, spread over channels. x (P, C), shift (C,), mean and rstd
    (C,).
    """
    pixels, channels = x.shape
    width = channels // groups
    acc = np.zeros(channels, f4)
    for p in range(pixels):
        for c in range(channels):
            acc[c] += x[p, c] + shift[c]
    for g in range(groups):
        total = 0.0
        for c in range(g * width, (g + 1) * width):
            total += acc[c]
        for c in range(g * width, (g + 1) * width):
            mean[c] = f4(total / (pixels * width))
            acc[c] = f4(0.0)
    for p in range(pixels):
        for c in range(channels):
            d = x[p, c] + shift[c] - mean[c]
            acc[c] += d * d
    for g in range(groups):
        total = 0.0
        for c in range(g * width, (g + 1) * width):
            total += acc[c]
        for c in range(g * width, (g + 1) * width):
            rstd[c] = f4(1.0 / np.sqrt(total / (pixels * width) + eps))


@njit(nogil=True, cache=True, error_model="numpy")
def _group_norm(x, shift, weight, bias, groups, eps, silu, mean, rstd, y, start, stop):
    """Pictures start..stop. x and y (N, P, C), shift, mean, rstd (N, C); weight, bias (C,)."""
    pixels, channels = x.shape[1], x.shape[2]
    for n in range(start, stop):
        _group_stats(x[n], shift[n], groups, eps, mean[n], rstd[n])
        for p in range(pixels):
            xs, ys, ms, rs, ss = x[n, p], y[n, p], mean[n], rstd[n], shift[n]
            if silu:
                for c in range(channels):
                    z = (xs[c] + ss[c] - ms[c]) * rs[c] * weight[c] + bias[c]
                    ys[c] = z / (f4(1.0) + exp32(-z))
            else:
                for c in range(channels):
                    ys[c] = (xs[c] + ss[c] - ms[c]) * rs[c] * weight[c] + bias[c]


@njit(nogil=True, cache=True, error_model="numpy")
def _group_norm_vjp(g, x, shift, weight, bias, groups, silu, mean, rstd, dx, dshift, dw, db, start, stop):
    """Derivative of `_group_norm`: dx (N, P, C), and per picture dshift, dw, db (N, C)."""
    pixels, channels = x.shape[1], x.shape[2]
    width = channels // groups
    one = f4(1.0)
    m1, m2 = np.empty(channels, f4), np.empty(channels, f4)
    for n in range(start, stop):
        ms, rs, ss, a1, a2 = mean[n], rstd[n], shift[n], db[n], dw[n]
        for c in range(channels):
            a1[c] = a2[c] = f4(0.0)
        for p in range(pixels):  # gradient of the normalised value's affine image, kept in dx
            xs, gs, ds = x[n, p], g[n, p], dx[n, p]
            if silu:
                for c in range(channels):
                    h = (xs[c] + ss[c] - ms[c]) * rs[c]
                    z = h * weight[c] + bias[c]
                    s = one / (one + exp32(-z))
                    d = gs[c] * (s * (one + z * (one - s)))
                    ds[c] = d
                    a1[c] += d
                    a2[c] += d * h
            else:
                for c in range(channels):
                    d = gs[c]
                    ds[c] = d
                    a1[c] += d
                    a2[c] += d * ((xs[c] + ss[c] - ms[c]) * rs[c])
        for i in range(groups):
            t1 = t2 = 0.0
            for c in range(i * width, (i + 1) * width):
                t1 += weight[c] * a1[c]
                t2 += weight[c] * a2[c]
            for c in range(i * width, (i + 1) * width):
                m1[c], m2[c] = f4(t1 / (pixels * width)), f4(t2 / (pixels * width))
        out = dshift[n]
        for c in range(channels):
            out[c] = f4(0.0)
        for p in range(pixels):
            xs, ds = x[n, p], dx[n, p]
            for c in range(channels):
                h = (xs[c] + ss[c] - ms[c]) * rs[c]
                d = rs[c] * (weight[c] * ds[c] - m1[c] - h * m2[c])
                ds[c] = d
                out[c] += d


@njit(nogil=True, cache=True, error_model="numpy")
def _silu(x, y, start, stop):
    for i in range(start, stop):
        y[i] = x[i] / (f4(1.0) + exp32(-x[i]))


@njit(nogil=True, cache=True, error_model="numpy")
def _silu_vjp(g, x, dx, start, stop):
    for i in range(start, stop):
        s = f4(1.0) / (f4(1.0) + exp32(-x[i]))
        dx[i] = g[i] * (s * (f4(1.0) + x[i] * (f4(1.0) - s)))


@njit(nogil=True, cache=True, error_model="numpy")
def _column_sums(x, part, total):
    rows, columns = x.shape
    for first in range(0, rows, 64):
        for c in range(columns):
            part[c] = f4(0.0)
        for r in range(first, min(rows, first + 64)):
            line = x[r]
            for c in range(columns):
                part[c] += line[c]
        for c in range(columns):
            total[c] += part[c]


def column_sums(x):
    """Sum over the rows of x (rows, columns): 64 rows at a time in float32, those in float64; (columns,)."""
    total = np.zeros(x.shape[1], np.float64)
    _column_sums(x, np.empty(x.shape[1], f4), total)
    return total.astype(f4)


def group_norm(x, shift, weight, bias, groups, eps, silu):
    """(y, mean, rstd) of x (N, P, C) + shift (N, C); mean and rstd are (N, C), repeated inside a group."""
    n, pixels, channels = x.shape
    y, mean, rstd = np.empty_like(x), np.empty((n, channels), f4), np.empty((n, channels), f4)
    parallel_chunks(
        n,
        lambda a, b: _group_norm(x, shift, weight, bias, groups, eps, silu, mean, rstd, y, a, b),
        max(1, _PARALLEL_ELEMENTS // max(1, pixels * channels)),
    )
    return y, mean, rstd


def group_norm_vjp(g, x, shift, weight, bias, groups, silu, mean, rstd):
    """(dx (N, P, C), dshift (N, C), dweight (C,), dbias (C,)) for the gradient g (N, P, C)."""
    n, pixels, channels = x.shape
    dx = np.empty_like(x)
    dshift, dw, db = (np.empty((n, channels), f4) for _ in range(3))
    parallel_chunks(
        n,
        lambda a, b: _group_norm_vjp(
            g, x, shift, weight, bias, groups, silu, mean, rstd, dx, dshift, dw, db, a, b
        ),
        max(1, _PARALLEL_ELEMENTS // max(1, pixels * channels)),
    )
    return dx, dshift, column_sums(dw), column_sums(db)


def silu(x):
    """x * sigmoid(x), any shape."""
    y = np.empty_like(x)
    a, b = x.reshape(-1), y.reshape(-1)
    parallel_chunks(a.size, lambda i, j: _silu(a, b, i, j), _PARALLEL_ELEMENTS)
    return y


def silu_vjp(g, x):
    """g * d silu(x)/dx."""
    dx = np.empty_like(x)
    a, b, c = g.reshape(-1), x.reshape(-1), dx.reshape(-1)
    parallel_chunks(b.size, lambda i, j: _silu_vjp(a, b, c, i, j), _PARALLEL_ELEMENTS)
    return dx
