"""How well a cheap ranking of seeds agrees with the true one."""

from __future__ import annotations

import numpy as np

from ..errors import ShapeError

_MEASURES = ("spearman", "hit_best", "hit_worst", "rank_best", "rank_worst")


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks along the last axis, 1 = smallest, ties sharing their mean rank; float64, shape of `values`.

    A NaN has no rank: it stays NaN, and the others are ranked without it.

    >>> ranks(np.array([10.0, 20.0, np.nan, 20.0, 5.0])).tolist()
    [2.0, 3.5, nan, 3.5, 1.0]
    """
    values = np.asarray(values, np.float64)
    found = np.full(values.shape, np.nan)
    for index in np.ndindex(values.shape[:-1]):
        row, known = values[index], ~np.isnan(values[index])
        order = np.sort(row[known])
        first, last = (np.searchsorted(order, row[known], side) for side in ("left", "right"))
        found[index][known] = (first + last + 1) / 2
    return found


def spearman(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Spearman's rank correlation along the last axis (Pearson's correlation of the ranks); NaN where one
    is constant. Places at which either is NaN are left out.

    >>> float(spearman(np.array([1.0, 2.0, 3.0, np.nan]), np.array([10.0, 30.0, 20.0, 5.0])))
    0.5
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    both = ~(np.isnan(a) | np.isnan(b))
    x, y = (ranks(np.where(both, v, np.nan)) for v in (a, b))
    count = np.where(both.any(-1), both.sum(-1), np.nan)[..., None]  # nothing left of a row: NaN
    x, y = (np.where(both, v - np.where(both, v, 0).sum(-1, keepdims=True) / count, 0) for v in (x, y))
    norm = np.sqrt((x * x).sum(-1) * (y * y).sum(-1))
    return np.divide((x * y).sum(-1), norm, out=np.full(norm.shape, np.nan), where=norm > 0)[()]


def _picks(values: np.ndarray, k: int) -> np.ndarray:
    """Probability (n,) with which each of `values` is among the `k` largest, ties being broken at random."""
    order = np.sort(values)[::-1]
    edge = order[k - 1]
    above, level = values > edge, values == edge
    return above + level * ((k - above.sum()) / level.sum())


def _one_prompt(proxy: np.ndarray, true: np.ndarray, k: int) -> dict[str, float]:
    """The measures of `rank_fidelity` of one prompt, both (n,) without NaN, n >= k."""
    n, found = len(true), {"spearman": float(spearman(proxy, true))}
    if true.min() == true.max():  # nothing to be ranked: any pick would be right
        return dict.fromkeys(_MEASURES, np.nan)
    true_rank = n + 1 - ranks(true)  # 1 = best
    for end, sign in (("best", 1), ("worst", -1)):
        share = _picks(sign * proxy, k) / k
        right = sign * true >= np.sort(sign * true)[-k]  # not beaten by k others
        found[f"hit_{end}"] = float(share @ right)
        found[f"rank_{end}"] = float(share @ true_rank)
    return found


def rank_fidelity(proxy: np.ndarray, true: np.ndarray, k: int) -> dict[str, float]:
    """Agreement of `proxy` with `true` rewards, both (prompts, seeds), when the best and worst `k` are
    picked.

    spearman: mean over the prompts. hit_best, hit_worst: share of the proxy's `k` best (worst) that are
    among the true `k` best (worst). rank_best, rank_worst: mean true rank of the picks, 1 = best;
    perfect_best and perfect_worst are what a perfect proxy gets, random what a blind one gets. A high mean
    rank is not a high hit rate: both are given.

    Ties: those of the proxy are broken at random, and the expectation is given, so that a constant proxy
    hits as often as chance; a pick that shares the last true place is right. NaN (a rollout that was lost)
    in either array: the seed is compared in neither, and counted in left_out. Prompts whose true rewards
    are all equal, or of which fewer than `k` seeds are left, have no rank to be found; measures are means
    over the others, NaN if there are none.

    >>> found = rank_fidelity(np.array([[1.0, 2.0, 3.0, 4.0]]), np.array([[1.0, 3.0, 2.0, 9.0]]), 1)
    >>> found["hit_best"], found["rank_best"], found["rank_worst"], round(found["spearman"], 3)
    (1.0, 1.0, 4.0, 0.8)
    """
    proxy, true = np.asarray(proxy, np.float64), np.asarray(true, np.float64)
    if proxy.shape != true.shape or proxy.ndim != 2 or not 1 <= k <= proxy.shape[1]:
        raise ShapeError(
            f"rank_fidelity: proxy has shape {proxy.shape}, true {true.shape} and k is {k}; give two "
            f"(prompts, seeds) arrays and k from 1 to seeds"
        )
    both, rows, counts = ~(np.isnan(proxy) | np.isnan(true)), [], []
    for p, t, known in zip(proxy, true, both, strict=True):
        if known.sum() >= k:
            rows.append(_one_prompt(p[known], t[known], k))
            counts.append(int(known.sum()))
    n = float(np.mean(counts)) if counts else float("nan")
    return {name: _mean([row[name] for row in rows]) for name in _MEASURES} | {
        "perfect_best": (k + 1) / 2,
        "perfect_worst": n - (k - 1) / 2,
        "random": (n + 1) / 2,
        "left_out": float((~both).sum()),
    }


def _mean(values: list[float]) -> float:
    known = [v for v in values if np.isfinite(v)]
    return float(np.mean(known)) if known else float("nan")
