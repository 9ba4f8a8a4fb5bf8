"""DiffusionNFT: fit the model to pictures of its own with the weight that their reward earns, and an implicit
opposite of the model to the same pictures with the rest of that weight.

r = clip(A / (2 c) + 1/2, 0, 1)                                          the optimality of a picture, c = 5
v+ = beta v + (1 - beta) v_old        v- = (1 + beta) v_old - beta v
L = mean_i c [r mean((x0+ - x0)²) / w+ + (1 - r) mean((x0- - x0)²) / w-] / beta + kl mean((v - v_ref)²)
w± = mean|x0± - x0| of the picture, float64, at least 1e-5, taken as a constant

Zheng et al. 2025, "DiffusionNFT: Online Diffusion Reinforcement with Forward Process", with the adaptive
weights and the factor c (the clip of the advantages A) of its released code, which Sol-RL (Li et al. 2026)
uses as it is. Pictures come from the old policy, which follows the trained one (`old_share`).

The network's output is v there. Here it may be eps or x0 as well: x0 = a x_t + b output, so that x0+ and x0-
are the same mixtures of the two x0. For v, x0 and in flow matching |b| <= 1. With eps |b| = sigma / alpha has
no bound, so errors are counted in units of max(1, |b|): else the noisiest level would be all of the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..diffusion.samplers import Model
from ..diffusion.schedules import Schedule
from ..errors import ConfigError, ShapeError
from ..nn.xp import namespace
from .dpo import Policy
from .drift import hold as hold_together
from .drift import packed

#: Order of the numbers of `nft_loss`.
NFT_STATS = (
    "loss", "loss/positive", "loss/negative", "loss/kl", "rewards/chosen", "rewards/rejected",
    "rewards/margins", "rewards/accuracies", "kl", "moved", "advantage",
)  # fmt: skip
_LEAST = 1e-5  # of the weights w


@dataclass(frozen=True)
class NFTSettings:
    """beta: how far the two implicit policies lie from the old one; kl: weight of the squared distance from
    the reference; advantage_clip: c above. Raises `ConfigError` for values that cannot be.
    """

    beta: float = 1.0
    kl: float = 1e-4
    advantage_clip: float = 5.0

    def __post_init__(self):
        for name, value, low in (("beta", self.beta, False), ("kl", self.kl, True),
                                 ("advantage_clip", self.advantage_clip, False)):  # fmt: skip
            if not (math.isfinite(value) and (value > 0 or (low and value == 0))):
                least = "0 or more" if low else "positive"
                raise ConfigError(f"nft.{name}: is {value}, but it must be {least} and finite")


class NFTLoss(NamedTuple):
    """values: float64 (len(NFT_STATS),); gradient: of the loss in the output, of its shape and dtype. Both
    are arrays of the output's framework.
    """

    values: Any
    gradient: Any


def old_share(step: int) -> float:
    """What remains of the old policy after iteration number `step` (from 0): old <- share old + (1 - share)
    new, share = min(0.001 step, 0.5), the released code's decay of type 1. That code counts updates of its
    optimizer, of which one of its iterations makes one; here an iteration makes one for every `align.batch`
    entries, and iterations are what is counted.

    >>> old_share(0), old_share(250), old_share(10_000)
    (0.0, 0.25, 0.5)
    """
    return min(0.001 * step, 0.5)


def nft_loss(
    output: Any, old: Any, reference: Any, x_t: Any, x0: Any, coefficients: tuple[Any, Any], advantage: Any,
    settings: NFTSettings = NFTSettings(), live: Any | None = None,
) -> NFTLoss:  # fmt: skip
    """The loss of a batch and its gradient, by hand: see the module.

    Args:
        output, old, reference: what policy, old policy and reference say of x_t, (n, ...).
        x_t, x0: noisy and clean pictures, (n, ...), in the dtype of the output.
        coefficients: (a, b) of each picture, n elements each: x0 = a x_t + b output
            (`Schedule.x0_coefficients`).
        advantage: (n,), clipped here.
        live: (n,), 0 for pictures that only fill the batch up; None: all are real. Where all are 1 the result
            is that of None, bit for bit.

    All are NumPy's or all CuPy's arrays; nothing is read back, so that a CUDA graph can hold the call.
    Statistics (`NFT_STATS`): the two parts of the loss and kl times its weight; "kl", mean of (output -
    reference)²; "moved", mean of (output - old)²; "advantage", mean. The implicit reward of a picture is
    e_ref - e, e the mean of its squared error in x0: "rewards/chosen" and "rewards/rejected" are its means
    over pictures with r above and under 1/2 (0 where there are none), "rewards/margins" their difference,
    "rewards/accuracies" the share of those whose reward has the sign of r - 1/2 (0 counts one half).

    Raises `ShapeError` where shapes do not belong together.

    >>> x0, zero = np.ones((2, 4)), np.zeros((2, 4))
    >>> loss = nft_loss(zero, zero, zero, zero, x0, (np.zeros(2), np.ones(2)), np.array([5.0, -5.0]))
    >>> float(loss.values[0]), loss.gradient[:, 0].tolist()     # towards the first, away from the second
    (5.0, [-1.25, 1.25])
    """
    _check_shapes(output, old, reference, x_t, x0, coefficients, advantage, live)
    xp, n, c, beta = namespace(output), len(output), settings.advantage_clip, settings.beta
    live = xp.ones(n) if live is None else live.astype(np.float64)
    share = live * (n / live.sum())  # the mean over n of what is multiplied by it is that of the real ones
    across = (n, *(1,) * (output.ndim - 1))
    a, b = (k.reshape(across).astype(output.dtype) for k in coefficients)
    unit = 1 / xp.maximum(abs(b), 1)
    known = a * x_t - x0
    error, error_old, error_ref = (unit * (known + b * out) for out in (output, old, reference))
    plus = beta * error + (1 - beta) * error_old
    minus = (1 + beta) * error_old - beta * error
    advantage = advantage.astype(np.float64).clip(-c, c)
    r = (advantage / (2 * c) + 0.5).clip(0, 1)
    weight_plus, weight_minus = (xp.maximum(_mean(xp, abs(e)), _LEAST) for e in (plus, minus))
    positive = c / beta * r * _mean(xp, plus * plus) / weight_plus
    negative = c / beta * (1 - r) * _mean(xp, minus * minus) / weight_minus
    distance = output - reference
    kl = (_mean(xp, distance * distance) * share).mean()
    loss = ((positive + negative) * share).mean() + settings.kl * kl
    slope = 2 * c / output.size  # beta of d x0± and 1 / beta of the loss cancel
    pull, push, back = ((w * share).reshape(across).astype(output.dtype) for w in
                        (slope * (r / weight_plus), slope * ((1 - r) / weight_minus),
                         2 * settings.kl / output.size))  # fmt: skip
    gradient = unit * b * (pull * plus - push * minus)
    gradient += distance * back
    reward = _mean(xp, error_ref * error_ref) - _mean(xp, error * error)
    moved = (_mean(xp, (output - old) ** 2) * share).mean()
    values = [loss, (positive * share).mean(), (negative * share).mean(), settings.kl * kl,
              *_rewards(xp, reward, r, live), kl, moved, (advantage * share).mean()]  # fmt: skip
    return NFTLoss(packed(xp, values), gradient)


def _mean(xp: Any, x: Any) -> Any:
    """Mean of each picture, float64 (n,)."""
    return x.reshape(len(x), -1).mean(axis=1, dtype=np.float64)


def _rewards(xp: Any, reward: Any, r: Any, live: Any) -> tuple[Any, Any, Any, Any]:
    """Means of the implicit rewards of pictures with r above and under 1/2, margin and accuracy."""
    side = xp.sign(r - 0.5) * live
    chosen, rejected = ((reward * (side == s)).sum() / xp.maximum((side == s).sum(), 1) for s in (1, -1))
    told = side * side
    right = (told * (0.5 + 0.5 * xp.sign(reward * side))).sum()
    undecided = 0.5 * (told.sum() == 0)
    return chosen, rejected, chosen - rejected, right / xp.maximum(told.sum(), 1) + undecided


def _check_shapes(output, old, reference, x_t, x0, coefficients, advantage, live) -> None:
    n = len(output)
    for name, array in (("old", old), ("reference", reference), ("x_t", x_t), ("x0", x0)):
        if array.shape != output.shape:
            raise ShapeError(f"nft_loss: {name} has shape {array.shape} but output has shape {output.shape}; "
                             f"they must be equal")  # fmt: skip
    rest = (("a", coefficients[0]), ("b", coefficients[1]), ("advantage", advantage), ("live", live))
    for name, array in rest:
        if array is None:
            continue
        if array.size != n or (name in ("advantage", "live") and array.ndim != 1):
            raise ShapeError(f"nft_loss: {name} has shape {array.shape} but there are {n} pictures; give one "
                             f"value a picture")  # fmt: skip
    if not n:
        raise ShapeError("nft_loss: output holds no picture; give at least one")


def nft_backward(
    policy: Policy, old: Model, reference: Model, x0: np.ndarray, condition: np.ndarray, t: np.ndarray,
    eps: np.ndarray, advantage: np.ndarray, schedule: Schedule, prediction: str,
    settings: NFTSettings = NFTSettings(), hold: float = 0.0, phases: int = 1,
) -> tuple[float, dict[str, float]]:  # fmt: skip
    """(loss, statistics) of a batch: afterwards the policy's parameters hold their gradients.

    `x0`, `eps` (n, ...) float32, `condition` one row a picture, `t` and `advantage` (n,). Old policy and
    reference run without a tape. ``advantage_clip hold mean(d²)`` is added to what is minimised, d the
    `phase_drift`, whose size is the statistic "drift"; it is no part of the loss that is returned.
    """
    x_t = schedule.add_noise(x0, eps, t)
    before, frozen = old(x_t, t, condition), reference(x_t, t, condition)
    output = policy(x_t, t, condition)
    coefficients = schedule.x0_coefficients(t, prediction, x0.ndim, x0.dtype)
    values, gradient = nft_loss(output.data, before, frozen, x_t, x0, coefficients, advantage, settings)
    drift = hold_together(gradient, output.data, frozen, phases, settings.advantage_clip * hold)
    output.backward(gradient)
    stats = dict(zip(NFT_STATS, values.tolist(), strict=True)) | {"drift": float(drift)}
    return stats.pop("loss"), stats
