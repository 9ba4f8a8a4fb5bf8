"""Random numbers drawn per (seed, step): one seed, one picture, in any batch, on any number of threads.

Every function is a pure function of its arguments; there is no generator whose state must be saved. Two
draws are independent when seed, step or stream differ. Numbers come from Philox4x32-10 with key = seed and
counter = (element // 4, stream, step); `fp4bf16.python_ref.random` holds the formulas, and the bits are the
same on every backend.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from ..errors import DTypeError

# Stream 0 is left to stochastic rounding.
NOISE, UNIFORM, INTEGERS, PERMUTATION = 1, 2, 3, 4

Shape = int | Sequence[int]


def _seeds(seed, name: str) -> tuple[np.ndarray, bool]:
    """uint64 (n,) and whether `seed` was a single number."""
    array = np.asarray(seed)
    if array.ndim > 1:
        raise ValueError(f"{name}: seed has shape {array.shape}; pass one whole number or a 1-D array")
    if array.dtype.kind not in "iuO" and array.size:
        raise DTypeError(f"{name}: seed is {array.dtype}; pass whole numbers in [0, 2^64)")
    values = [array.item()] if array.ndim == 0 else array.tolist()
    for value in values:
        if not (isinstance(value, int) and 0 <= value < 2**64):
            raise ValueError(f"{name}: seed is {value!r}, but it must be a whole number in [0, 2^64)")
    return np.array(values, np.uint64), array.ndim == 0


def _draw(name: str, seed, step: int, shape: Shape, stream: int, per_element: int = 1):
    """Checked: seeds, shape of the result, words a seed."""
    seeds, single = _seeds(seed, name)
    for what, value in (("step", step), ("stream", stream)):
        if not (isinstance(value, int | np.integer) and 0 <= value < 2**32):
            raise ValueError(f"{name}: {what} is {value!r}, but it must be a whole number in [0, 2^32)")
    shape = (int(shape),) if isinstance(shape, int | np.integer) else tuple(int(n) for n in shape)
    if any(n < 0 for n in shape):
        raise ValueError(f"{name}: shape {shape} has a negative length")
    count = math.prod(shape) * per_element
    return seeds, (shape if single else (len(seeds), *shape)), count


def _words(seeds: np.ndarray, stream: int, step: int, count: int) -> np.ndarray:
    from ..backends import cpu_random

    return cpu_random.words(seeds, stream, step, count)


def normal(seed, step: int, shape: Shape, stream: int = NOISE) -> np.ndarray:
    """Standard normals: float32 `shape` for one seed, (len(seed), *shape) for an array of seeds.

    Row i depends on ``seed[i]`` alone. Box-Muller in float64, rounded once; largest magnitude 6.76.
    Raises `ValueError` for a seed outside [0, 2^64) or a step outside [0, 2^32).

    >>> one = normal(7, 0, (2, 2))
    >>> batch = normal([5, 6, 7], 0, (2, 2))
    >>> bool((batch[2] == one).all()), batch.shape
    (True, (3, 2, 2))
    """
    from ..backends import cpu_random

    seeds, full, count = _draw("normal", seed, step, shape, stream)
    return cpu_random.normal(seeds, stream, step, count).reshape(full)


def uniform(seed, step: int, shape: Shape, stream: int = UNIFORM) -> np.ndarray:
    """Uniform in [0, 1), multiples of 2^-24: float32, shaped as `normal`.

    >>> uniform(0, 0, 3).shape
    (3,)
    """
    seeds, full, count = _draw("uniform", seed, step, shape, stream)
    words = _words(seeds, stream, step, count)
    return ((words >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)).reshape(full)


def integers(seed, step: int, shape: Shape, low: int, high: int, stream: int = INTEGERS) -> np.ndarray:
    """Whole numbers in [low, high), at most 2^32 of them: int64, shaped as `normal`.

    Each value's probability is 1 / (high - low) up to 2^-32. Raises `ValueError` for another range.

    >>> integers(0, 0, 4, low=10, high=12)
    array([11, 10, 11, 11])
    """
    if not 0 < high - low <= 2**32:
        raise ValueError(f"integers: [low, high) is [{low}, {high}), but it must hold 1 to 2^32 values")
    seeds, full, count = _draw("integers", seed, step, shape, stream)
    scaled = _words(seeds, stream, step, count).astype(np.uint64) * np.uint64(high - low)
    return ((scaled >> np.uint64(32)).astype(np.int64) + low).reshape(full)


def permutation(seed: int, epoch: int, n: int, stream: int = PERMUTATION) -> np.ndarray:
    """A permutation of range(n), int64 (n,): the order of n random 64-bit keys.

    >>> sorted(permutation(3, 0, 5).tolist())
    [0, 1, 2, 3, 4]
    """
    seeds, full, count = _draw("permutation", seed, epoch, n, stream, per_element=2)
    if len(full) != 1 or len(seeds) != 1:
        raise ValueError("permutation: seed must be one whole number, and n too")
    words = _words(seeds, stream, epoch, count).astype(np.uint64).reshape(-1, 2)
    return np.argsort(words[:, 0] << np.uint64(32) | words[:, 1], kind="stable")


def subseed(seed: int, *names: object) -> int:
    """A seed for one purpose of a run, in [0, 2^64): 8 bytes of SHA-256 over the seed and the names.

    Give every consumer its own, so that a change in one draws nothing else anew.

    >>> subseed(0, "judge") != subseed(0, "data")
    True
    """
    text = "/".join([str(int(_seeds(seed, "subseed")[0][0])), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
