"""Shares of trials and how sure they are."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..errors import ShapeError

Z95 = 1.959963984540054  # 97.5 % point of the standard normal


def wilson(hits: float, n: float, z: float = Z95) -> tuple[float, float]:
    """Interval (low, high) of a share, of 95 % by default; (NaN, NaN) where there was no trial.

    Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22, 1927:

    (p + z²/2n ± z sqrt(p (1 - p)/n + z²/4n²)) / (1 + z²/n), p = hits / n

    It holds also for few trials and where all or none succeed, for which p ± z sqrt(p (1 - p)/n) has no
    width. Trials count as independent. Raises `ShapeError` unless 0 <= hits <= n.

    >>> [round(v, 5) for v in wilson(10_000, 10_000)]
    [0.99962, 1.0]
    """
    if not 0 <= hits <= n:
        raise ShapeError(f"wilson: {hits} hits of {n}; pass hits from 0 to n")
    if n == 0:
        return math.nan, math.nan
    p, square = hits / n, z * z / n
    middle, width = p + square / 2, z * math.sqrt(p * (1 - p) / n + square / (4 * n))
    low, high = (middle - width) / (1 + square), (middle + width) / (1 + square)
    return (0.0 if hits == 0 else low), (1.0 if hits == n else high)  # exactly, as rounding would not have it


def rates(counts: Mapping[str, float]) -> dict[str, float]:
    """Success of the rollouts with Wilson's 95 % interval, of the first seeds alone (``first_try_*``) and
    after the retries (``success_*``): rate, low and high of each. `counts`: of a `pool.Pool`.

    >>> counts = {"rollouts": 100, "unhealthy": 3, "nonfinite_rewards": 1, "lost": 0}
    >>> rates(counts)["first_try_rate"], rates(counts)["success_rate"]
    (0.96, 1.0)
    """
    total, found = counts["rollouts"], {}
    failed = counts["unhealthy"] + counts["nonfinite_rewards"]
    for name, good in (("first_try", total - failed), ("success", total - counts["lost"])):
        low, high = wilson(good, total)
        rate = good / total if total else math.nan
        found |= {f"{name}_rate": rate, f"{name}_low": low, f"{name}_high": high}
    return found
