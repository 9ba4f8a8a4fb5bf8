"""Stochastic rounding of the quantisers, in NumPy: encoders that take random words.

A magnitude v between two neighbours lo < hi of its format becomes hi with probability f = (v - lo) / (hi -
lo), which float32 holds exactly, and else lo: upwards iff the upper 24 bits of the element's Philox word are
under f * 2^24. So the mean of many draws is v (to 2^-24 of a step), unless a block scale that is too small
clips the block's largest element: every block scale is therefore rounded up here (`SCALE_RULES`).
"""

from __future__ import annotations

import numpy as np

from .formats import E2M1, E4M3, E4M3_MAX

#: Rules that never clip, the default first.
SCALE_RULES = {"nvfp4_exact": (None,), "nvfp4": ("te",), "mxfp4": ("rceil", "ceil"), "fp8": (None,)}
_E2M1, _E4M3 = E2M1[:8], E4M3[:0x7F]  # magnitudes, ascending


def scale_rule_of(fmt: str, rule: str | None) -> str | None:
    """`rule`, or the format's default; raises `ValueError` for one that clips."""
    known = SCALE_RULES[fmt]
    if rule is not None and rule not in known:
        raise ValueError(
            f"quantize: scale_rule is {rule!r}, but rounding='stochastic' of {fmt} needs a block scale that "
            f"clips nothing, or its mean is off; pass scale_rule={known[0]!r}"
        )
    return known[0] if rule is None else rule


def _neighbours(v: np.ndarray, table: np.ndarray, random: np.ndarray) -> np.ndarray:
    """Codes of the magnitudes `v`, clamped to the table's last value, rounded by the words `random`."""
    v = np.minimum(v, table[-1])
    low = np.searchsorted(table, v, side="right") - 1
    high = np.minimum(low + 1, len(table) - 1)
    step = np.where(high == low, np.float32(1), table[high] - table[low])
    f = (v - table[low]) / step  # exact: steps are powers of two
    up = (random >> np.uint32(8)).astype(np.float32) < f * np.float32(2**24)
    return (low + up).astype(np.uint8)


def encode_e2m1(x: np.ndarray, random: np.ndarray) -> np.ndarray:
    """Codes 0..15 of finite float32 `x` by the uint32 words `random` of its shape; beyond 6 saturates.

    >>> encode_e2m1(np.float32([2.25, 2.25, -3, 7]), np.uint32([0x3FFFFFFF, 0x40000000, 0, 0])).tolist()
    [5, 4, 13, 7]
    """
    return _neighbours(np.abs(x), _E2M1, random) | (np.signbit(x).astype(np.uint8) << 3)


def encode_e4m3(x: np.ndarray, random: np.ndarray) -> np.ndarray:
    """E4M3 bytes of finite float32 `x` by the uint32 words `random` of its shape; beyond 448 saturates."""
    return _neighbours(np.abs(x), _E4M3, random) | (np.signbit(x).astype(np.uint8) << 7)


def encode_e4m3_up(x: np.ndarray) -> np.ndarray:
    """The least E4M3 byte with a value >= `x` (float32, >= 0), at most 448's.

    >>> encode_e4m3_up(np.float32([0, 1e-9, 1, 1.001, 1e9])).tolist()
    [0, 1, 56, 57, 126]
    """
    return np.searchsorted(_E4M3, np.minimum(x, E4M3_MAX), side="left").astype(np.uint8)
