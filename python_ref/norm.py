"""Group normalisation of pictures, optionally followed by SiLU, and its gradient, in float64.

    y = (x - mean) / sqrt(var + eps) * gamma + beta,   mean and var over (H, W, the C/groups channels of a
    group)

with the biased variance (Wu and He 2018, "Group Normalization", equations 1 to 6).
"""

from __future__ import annotations

import numpy as np


def silu(x) -> np.ndarray:
    """x * sigmoid(x), without overflow.

    >>> silu(np.array([-1000.0, 0.0, 1000.0])).tolist()
    [-0.0, 0.0, 1000.0]
    """
    x = np.asarray(x, np.float64)
    return x * sigmoid(x)


def sigmoid(x) -> np.ndarray:
    """1 / (1 + exp(-x)), from exp(-|x|) alone so that nothing overflows."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, e) / (1.0 + e)


def _normalise(x: np.ndarray, groups: int, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """(x - mean) / std as (N, pixels, groups, channels a group), and 1 / std as (N, 1, groups, 1)."""
    n, channels = x.shape[0], x.shape[-1]
    grouped = np.asarray(x, np.float64).reshape(n, -1, groups, channels // groups)
    mean = grouped.mean((1, 3), keepdims=True)
    centred = grouped - mean  # two passes: E[x^2] - E[x]^2 would cancel
    rstd = 1.0 / np.sqrt((centred**2).mean((1, 3), keepdims=True) + eps)
    return centred * rstd, rstd


def group_norm(x, groups: int, gamma=None, beta=None, eps: float = 1e-5, activation: str | None = None):
    """x (N, ..., C), C a multiple of `groups`, gamma and beta (C,) -> float64 of x's shape; activation
    "silu".

    >>> y = group_norm(np.arange(8.0).reshape(1, 2, 2, 2), groups=2)
    >>> y[0, :, :, 0].round(3)
    array([[-1.342, -0.447],
           [ 0.447,  1.342]])
    """
    y = _normalise(x, groups, eps)[0].reshape(x.shape)
    if gamma is not None:
        y = y * np.asarray(gamma, np.float64)
    if beta is not None:
        y = y + np.asarray(beta, np.float64)
    return silu(y) if activation == "silu" else y


def group_norm_vjp(g, x, groups: int, gamma=None, beta=None, eps: float = 1e-5, activation=None):
    """(dx, dgamma, dbeta) of sum(g * group_norm(x, ...)).

    With h the normalised x and u = g * gamma: dx = (u - mean(u) - h * mean(u * h)) / std, the means over the
    group.
    """
    h, rstd = _normalise(x, groups, eps)
    channels = x.shape[-1]
    gamma = np.ones(channels) if gamma is None else np.asarray(gamma, np.float64)
    beta = np.zeros(channels) if beta is None else np.asarray(beta, np.float64)
    g, flat = np.asarray(g, np.float64), h.reshape(x.shape)
    if activation == "silu":  # d silu(z) / dz = s + z s (1 - s)
        z = flat * gamma + beta
        s = sigmoid(z)
        g = g * (s + z * s * (1.0 - s))
    over = tuple(range(x.ndim - 1))
    u = (g * gamma).reshape(h.shape)
    dx = (u - u.mean((1, 3), keepdims=True) - h * (u * h).mean((1, 3), keepdims=True)) * rstd
    return dx.reshape(x.shape), (g * flat).sum(over), g.sum(over)
