"""Philox4x32-10 and Box-Muller normals on the CPU, bit-equal to `python_ref.random`, which explains them.

Each step runs over a small block in its own loop, so that the compiler turns every loop into vector
instructions; nothing is reordered or contracted, so the bits are those of the reference.
"""

from __future__ import annotations

import numpy as np

from ..python_ref.random import COS_TERMS, LN2_HIGH, LN2_LOW, LOG_TERMS, MULTIPLIERS, SIN_TERMS, SQRT2, WEYL
from .jit import njit
from .threads import parallel_chunks

_BLOCK = 256  # counters at a time: 1,024 elements, whose scratch stays in the first-level cache
_M0, _M1 = (np.uint64(m) for m in MULTIPLIERS)
_W0, _W1 = (np.uint64(w) for w in WEYL)
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)
_MANTISSA, _ONE = np.int64((1 << 52) - 1), np.int64(1023 << 52)
L1, L2, L3, L4, L5, L6, L7, L8, L9 = LOG_TERMS
S0, S1, S2, S3, S4, S5, S6, S7 = SIN_TERMS
C0, C1, C2, C3, C4, C5, C6, C7, C8 = COS_TERMS


@njit(nogil=True, cache=True, forceinline=True)
def philox(block, seed, stream, call):
    """The four words of counter (block, stream, call), uint64 in and out."""
    c0, c1 = block & _LOW, block >> _32
    c2, c3 = np.uint64(stream), np.uint64(call)
    k0, k1 = seed & _LOW, seed >> _32
    for _ in range(10):
        p0 = (c0 & _LOW) * _M0
        p1 = (c2 & _LOW) * _M1
        c0 = (p1 >> _32) ^ c1 ^ k0
        c2 = (p0 >> _32) ^ c3 ^ k1
        c1 = p1 & _LOW
        c3 = p0 & _LOW
        k0 = (k0 + _W0) & _LOW
        k1 = (k1 + _W1) & _LOW
    return c0, c1, c2, c3


@njit(nogil=True, cache=True)
def _philox(seed, stream, call, first, w):
    """w (4, n) uint64 <- the words of counters first..first+n-1."""
    for i in range(w.shape[1]):
        w[0, i], w[1, i], w[2, i], w[3, i] = philox(np.uint64(first + i), seed, stream, call)


@njit(nogil=True, cache=True)
def _radius(w, u, bits):
    """u <- sqrt(-2 log((w + 1/2) 2^-32)); bits is u's memory seen as int64."""
    n = w.size
    for i in range(n):
        u[i] = (np.float64(w[i]) + 0.5) * 2.0**-32
    for i in range(n):
        e = np.float64((bits[i] >> np.int64(52)) - np.int64(1023))
        bits[i] = (bits[i] & _MANTISSA) | _ONE
        m = u[i]
        big = m > SQRT2
        m = m * 0.5 if big else m
        e = e + 1.0 if big else e
        s = (m - 1.0) / (m + 1.0)
        z = s * s
        t = L9
        t = t * z + L8
        t = t * z + L7
        t = t * z + L6
        t = t * z + L5
        t = t * z + L4
        t = t * z + L3
        t = t * z + L2
        t = t * z + L1
        log = e * LN2_HIGH + (2.0 * s + (s * (z * t) + e * LN2_LOW))
        u[i] = np.sqrt(-2.0 * log)


@njit(nogil=True, cache=True)
def _direction(w, sine, cosine):
    """sine, cosine <- of 2 pi (w + 1/2) 2^-32."""
    for i in range(w.size):
        x = 2.0 * ((np.float64(w[i]) + 0.5) * 2.0**-32)
        q = np.int64(2.0 * x + 0.5)
        r = x - 0.5 * np.float64(q)
        z = r * r
        s = S7
        s = s * z + S6
        s = s * z + S5
        s = s * z + S4
        s = s * z + S3
        s = s * z + S2
        s = s * z + S1
        s = s * z + S0
        c = C8
        c = c * z + C7
        c = c * z + C6
        c = c * z + C5
        c = c * z + C4
        c = c * z + C3
        c = c * z + C2
        c = c * z + C1
        c = c * z + C0
        s = s * r
        odd = (q & 1) == 1
        a = c if odd else s
        b = s if odd else c
        sine[i] = -a if (q & 2) != 0 else a
        cosine[i] = -b if ((q + 1) & 2) != 0 else b


@njit(nogil=True, cache=True)
def _normal_tasks(seeds, stream, call, out, tasks, start, stop):
    """Tasks start..stop-1 of ``tasks`` blocks a row of out (rows, n) float32."""
    n = out.shape[1]
    w = np.empty((4, _BLOCK), np.uint64)
    u = np.empty(_BLOCK)
    sine, cosine = np.empty(_BLOCK), np.empty(_BLOCK)
    pairs = np.empty(4 * _BLOCK, np.float32)
    for task in range(start, stop):
        row, first = task // tasks, (task % tasks) * _BLOCK
        _philox(seeds[row], stream, call, first, w)
        for half in range(2):
            _radius(w[2 * half], u, u.view(np.int64))
            _direction(w[2 * half + 1], sine, cosine)
            for i in range(_BLOCK):
                pairs[4 * i + 2 * half] = np.float32(u[i] * cosine[i])
                pairs[4 * i + 2 * half + 1] = np.float32(u[i] * sine[i])
        count = min(4 * _BLOCK, n - 4 * first)
        out[row, 4 * first : 4 * first + count] = pairs[:count]


@njit(nogil=True, cache=True)
def _word_tasks(seeds, stream, call, out, tasks, start, stop):
    """As `_normal_tasks`, raw words into out (rows, n) uint32."""
    n = out.shape[1]
    w = np.empty((4, _BLOCK), np.uint64)
    flat = np.empty(4 * _BLOCK, np.uint32)
    for task in range(start, stop):
        row, first = task // tasks, (task % tasks) * _BLOCK
        _philox(seeds[row], stream, call, first, w)
        for i in range(_BLOCK):
            for j in range(4):
                flat[4 * i + j] = np.uint32(w[j, i])
        count = min(4 * _BLOCK, n - 4 * first)
        out[row, 4 * first : 4 * first + count] = flat[:count]


def _run(kernel, seeds, stream, call, out):
    tasks = -(-out.shape[1] // (4 * _BLOCK))

    def chunk(start, stop):
        kernel(seeds, np.uint32(stream), np.uint32(call), out, tasks, start, stop)

    parallel_chunks(len(seeds) * tasks, chunk, min_rows=8)
    return out


def normal(seeds: np.ndarray, stream: int, call: int, count: int) -> np.ndarray:
    """float32 (len(seeds), count): row i is ``python_ref.random.normal(seeds[i], stream, call, count)``.

    The bits are the same; `seeds` is uint64 (n,).
    """
    return _run(_normal_tasks, seeds, stream, call, np.empty((len(seeds), count), np.float32))


def words(seeds: np.ndarray, stream: int, call: int, count: int) -> np.ndarray:
    """uint32 (len(seeds), count): row i is ``python_ref.random.words(seeds[i], stream, call, count)``."""
    return _run(_word_tasks, seeds, stream, call, np.empty((len(seeds), count), np.uint32))
