"""How well a cheap ranking of seeds agrees with the true one."""

from __future__ import annotations

import numpy as np

from ..errors import ShapeError


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks along the last axis, 1 = smallest, ties sharing their mean rank; float64, shape of `values`.

    >>> ranks(np.array([10.0, 20.0, 20.0, 5.0])).tolist()
    [2.0, 3.5, 3.5, 1.0]
    """
    values = np.asarray(values, np.float64)
    below = (values[..., None, :] < values[..., :, None]).sum(-1)
    equal = (values[..., None, :] == values[..., :, None]).sum(-1)
    return below + (equal + 1) / 2


def spearman(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Spearman's rank correlation along the last axis (Pearson's correlation of the ranks); NaN where one
    is constant.

    >>> float(spearman(np.array([1.0, 2.0, 3.0]), np.array([10.0, 30.0, 20.0])))
    0.5
    """
    x, y = ranks(a), ranks(b)
    x, y = x - x.mean(-1, keepdims=True), y - y.mean(-1, keepdims=True)
    norm = np.sqrt((x * x).sum(-1) * (y * y).sum(-1))
    return np.divide((x * y).sum(-1), norm, out=np.full(norm.shape, np.nan), where=norm > 0)[()]


def rank_fidelity(proxy: np.ndarray, true: np.ndarray, k: int) -> dict[str, float]:
    """Agreement of `proxy` with `true` rewards, both (prompts, seeds), when the best and worst `k` are
    picked.

    spearman: mean over the prompts. hit_best, hit_worst: share of the proxy's `k` best (worst) that are
    among the true `k` best (worst). rank_best, rank_worst: mean true rank of the picks, 1 = best;
    perfect_best and perfect_worst are what a perfect proxy gets, random what a blind one gets. A high mean
    rank is not a high hit rate: both are given.
    """
    proxy, true = np.asarray(proxy, np.float64), np.asarray(true, np.float64)
    if proxy.shape != true.shape or proxy.ndim != 2 or not 1 <= k <= proxy.shape[1]:
        raise ShapeError(
            f"rank_fidelity: proxy has shape {proxy.shape}, true {true.shape} and k is {k}; give two "
            f"(prompts, seeds) arrays and k from 1 to seeds"
        )
    n = proxy.shape[1]
    picked, right = np.argsort(-proxy, 1, kind="stable"), np.argsort(-true, 1, kind="stable")
    true_rank = n + 1 - ranks(true)  # 1 = best

    def hits(a: np.ndarray, b: np.ndarray) -> float:
        return float((a[:, :, None] == b[:, None, :]).any(2).mean())

    rho = spearman(proxy, true)
    return {
        "spearman": float(np.nanmean(rho)) if np.isfinite(rho).any() else float("nan"),
        "hit_best": hits(picked[:, :k], right[:, :k]),
        "hit_worst": hits(picked[:, -k:], right[:, -k:]),
        "rank_best": float(np.take_along_axis(true_rank, picked[:, :k], 1).mean()),
        "rank_worst": float(np.take_along_axis(true_rank, picked[:, -k:], 1).mean()),
        "perfect_best": (k + 1) / 2,
        "perfect_worst": n - (k - 1) / 2,
        "random": (n + 1) / 2,
    }
