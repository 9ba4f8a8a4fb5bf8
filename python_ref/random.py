"""Counter-based random numbers: Philox4x32-10, and normals with the same bits on every machine.

Philox4x32-10 is the generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011). Element i of a draw is word i % 4 of the block with key = the 64-bit seed and counter = (i // 4 as
two words, low first, stream, call), so it depends on nothing but (seed, stream, call, i): not on the batch,
the order or the number of threads.

Normals are Box-Muller pairs in float64. Logarithm and sine are polynomials of our own, made of + - * / and
sqrt, which IEEE 754 rounds in one way only; a backend that keeps the order of operations and contracts none
of them gets the same bits.
"""

from __future__ import annotations

import numpy as np

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # table 2 of the paper
WEYL = (0x9E3779B9, 0xBB67AE85)  # 2^32 / golden ratio, 2^32 (sqrt(3) - 1)
ROUNDS = 10

SQRT2 = 1.4142135623730951
LN2_HIGH = 2977044471 * 2.0**-32  # 32 bits of ln 2, so that an exponent times it is exact
LN2_LOW = 1.9082149292705877e-10  # ln 2 - LN2_HIGH
# 2 atanh(s) = 2 s + s (2/3 s^2 + 2/5 s^4 + ...); |s| <= (sqrt(2) - 1) / (sqrt(2) + 1): nine terms leave 2^-55
LOG_TERMS = tuple(2 / (2 * k + 1) for k in range(1, 10))
# (-1)^k pi^(2k+1) / (2k+1)!  and  (-1)^k pi^2k / (2k)!, for |x| <= 1/4
SIN_TERMS = (
    3.141592653589793, -5.16771278004997, 2.5501640398773455, -0.5992645293207921,
    0.08214588661112823, -0.0073704309457143504, 0.00046630280576761255, -2.1915353447830217e-05,
)  # fmt: skip
COS_TERMS = (
    1.0, -4.934802200544679, 4.0587121264167685, -1.3352627688545895, 0.2353306303588932,
    -0.02580689139001406, 0.0019295743094039231, -0.0001046381049248457, 4.303069587032947e-06,
)  # fmt: skip


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Ten rounds of Philox: uint32 (..., 4) counter and (..., 2) key -> uint32 (..., 4).

    >>> [hex(w) for w in philox4x32(np.zeros(4, np.uint32), np.zeros(2, np.uint32))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = (np.asarray(counter, np.uint32)[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = (np.asarray(key, np.uint32)[..., i].astype(np.uint64) for i in range(2))
    low = np.uint64(0xFFFFFFFF)
    for _ in range(ROUNDS):
        p0, p1 = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0, c1, c2, c3 = (p1 >> np.uint64(32)) ^ c1 ^ k0, p1 & low, (p0 >> np.uint64(32)) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + np.uint64(WEYL[0])) & low, (k1 + np.uint64(WEYL[1])) & low
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1).astype(np.uint32)


def seed_words(seed) -> tuple[int, int, int]:
    """(seed, stream, call) of ``seed`` or ``(seed, stream, call)``; `ValueError` unless seed < 2^64, others <
    2^32.

    >>> seed_words(7)
    (7, 0, 0)
    """
    parts = tuple(seed) if isinstance(seed, tuple | list) else (seed, 0, 0)
    whole = all(isinstance(p, int | np.integer) and not isinstance(p, bool) for p in parts)
    limits = (2**64, 2**32, 2**32)
    if len(parts) != 3 or not whole or not all(0 <= p < m for p, m in zip(parts, limits, strict=True)):
        raise ValueError(
            f"seed: {seed!r} is neither a whole number from 0 to 2^64 - 1 nor (seed, stream, call) with "
            f"stream and call from 0 to 2^32 - 1; pass e.g. seed=0 or seed=(0, 1, 2)"
        )
    return tuple(map(int, parts))


def words(seed: int, stream: int, call: int, count: int) -> np.ndarray:
    """Elements 0..count-1 of a draw as raw uint32 words; `seed` < 2^64, `stream` and `call` < 2^32."""
    block = np.arange((count + 3) // 4, dtype=np.uint64)
    counter = np.empty((block.size, 4), np.uint32)
    counter[:, 0], counter[:, 1] = block & np.uint64(0xFFFFFFFF), block >> np.uint64(32)
    counter[:, 2], counter[:, 3] = stream, call
    key = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
    return philox4x32(counter, key).reshape(-1)[:count]


def log_unit(u: np.ndarray) -> np.ndarray:
    """Natural logarithm of normal float64 numbers in (0, 1], to about one unit in the last place.

    u = m 2^e with m in [1/sqrt(2), sqrt(2)]; log m = 2 atanh((m - 1) / (m + 1)).
    """
    m, e = np.frexp(np.asarray(u, np.float64))
    m, e = m * 2, e - 1
    big = m > SQRT2
    m, e = np.where(big, m * 0.5, m), np.where(big, e + 1, e)
    s = (m - 1) / (m + 1)
    z = s * s
    tail = np.full_like(z, LOG_TERMS[-1])
    for term in LOG_TERMS[-2::-1]:
        tail = tail * z + term
    return e * LN2_HIGH + (2 * s + (s * (z * tail) + e * LN2_LOW))


def sincospi(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """sin(pi x) and cos(pi x) of float64 x in [0, 2), to about one unit in the last place."""
    x = np.asarray(x, np.float64)
    quadrant = np.floor(2 * x + 0.5)
    r = x - 0.5 * quadrant  # in [-1/4, 1/4], exact
    z = r * r
    s, c = np.full_like(z, SIN_TERMS[-1]), np.full_like(z, COS_TERMS[-1])
    for term in SIN_TERMS[-2::-1]:
        s = s * z + term
    for term in COS_TERMS[-2::-1]:
        c = c * z + term
    s = s * r
    q = quadrant.astype(np.int64)
    odd = (q & 1) == 1
    sine, cosine = np.where(odd, c, s), np.where(odd, s, c)
    return np.where((q & 2) != 0, -sine, sine), np.where(((q + 1) & 2) != 0, -cosine, cosine)


def normal(seed: int, stream: int, call: int, count: int) -> np.ndarray:
    """Standard normals, float32 (count,): elements 2j and 2j+1 are the Box-Muller pair of words 2j and 2j+1.

    With u = (w + 1/2) 2^-32: sqrt(-2 log u0) times cos and sin of 2 pi u1. Largest magnitude 6.76.

    >>> normal(seed=0, stream=0, call=0, count=2)
    array([ 0.9911377, -0.9246626], dtype=float32)
    """
    u = (words(seed, stream, call, count + count % 2).astype(np.float64) + 0.5) * 2.0**-32
    radius = np.sqrt(-2 * log_unit(u[0::2]))
    sine, cosine = sincospi(2 * u[1::2])
    pair = np.stack([radius * cosine, radius * sine], axis=-1)
    return pair.reshape(-1)[:count].astype(np.float32)


def uniform(seed: int, stream: int, call: int, count: int) -> np.ndarray:
    """Uniform in [0, 1): float32 (count,), the upper 24 bits of each word times 2^-24."""
    return (words(seed, stream, call, count) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def integers(seed: int, stream: int, call: int, count: int, low: int, high: int) -> np.ndarray:
    """Whole numbers in [low, high): int64 (count,), low + floor(word (high - low) / 2^32).

    A value's probability is off by less than 2^-32.
    """
    w = words(seed, stream, call, count).astype(np.uint64)
    return (w * np.uint64(high - low) >> np.uint64(32)).astype(np.int64) + low


def permutation(seed: int, stream: int, call: int, count: int) -> np.ndarray:
    """A permutation of range(count), int64: the order of 64-bit keys, ties by index."""
    w = words(seed, stream, call, 2 * count).astype(np.uint64).reshape(-1, 2)
    return np.argsort(w[:, 0] << np.uint64(32) | w[:, 1], kind="stable")
