"""DDPO with importance sampling: the steps of the ancestral sampler as actions, of a policy that is Gaussian.

x' ~ N(mu, s²), mu = p x0 + q x_t, x0 = clip(a x_t + b output)           ancestral sampling, DDPM eq. 6 and 7
log p = mean over elements of -(x' - mu)² / (2 s²) - log s - log(2 pi) / 2
rho = exp(log p - log p_old)
L = mean max(-A rho, -A clip(rho, 1 - eps, 1 + eps))                     PPO, Schulman et al. 2017, eq. 7

Black et al. 2023, "Training Diffusion Models with Reinforcement Learning", section 4.3 (DDPO-IS), whose code
averages log-probabilities over elements; that is why eps is as small as 1e-4. The last step draws nothing
and is no action.

The log-probabilities of the old policy come from the same function, on the same batches, as those that are
trained, so that rho is exactly 1 before the first update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..diffusion.samplers import Model, plan
from ..diffusion.schedules import Schedule
from ..errors import ConfigError, ShapeError
from ..nn.xp import namespace
from .dpo import Policy
from .drift import hold as hold_together
from .drift import packed

#: Order of the numbers of `ppo_loss`.
PPO_STATS = ("loss", "ratio", "ratio_spread", "clipfrac", "advantage", "kl", "approx_kl")
#: Columns of `step_table`: x0 = a x + b output, mu = p x0 + q x, deviation s, |x0| at most `bound`.
COLUMNS = ("a", "b", "p", "q", "s", "bound")


@dataclass(frozen=True, eq=False)
class Trajectories:
    """What the ancestral sampler did: pictures (n, H, W, 3) float32; latents (steps + 1, n, ...) float32,
    from the start noise to the folded pictures; timesteps (steps,) int64, at which the network was asked.
    """

    pictures: np.ndarray
    latents: np.ndarray
    timesteps: np.ndarray


def step_table(
    schedule: Schedule, steps: int, prediction: str, clip: float | None = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """(timesteps (steps,), float64 (steps, len(COLUMNS))) of the ancestral sampler's Gaussian steps.

    Those of `samplers.plan`; the last step has s = 0.

    >>> from fp4bf16.diffusion import cosine
    >>> t, table = step_table(cosine(100), 2, "v")
    >>> t.tolist(), table[-1, 2:].tolist()
    ([99, 49], [1.0, 0.0, 0.0, 1.0])
    """
    made = plan("ancestral", schedule, steps)
    timesteps = np.array([step.t for step in made], np.int64)
    table = np.zeros((steps, len(COLUMNS)))
    a, b = schedule.x0_coefficients(timesteps, prediction, 1, np.float64)
    table[:, 0], table[:, 1], table[:, 5] = a, b, math.inf if clip is None else clip
    for row, step in zip(table, made, strict=True):
        p, _, q, s = step.factors()
        row[2:5] = p, q, s or 0.0
    return timesteps, table


def step_mean(output: Any, x: Any, rows: Any) -> tuple[Any, Any]:
    """(mu, d mu / d output) of steps from `x` (n, ...): float64 of its shape.

    rows: the line of `step_table` of each, (n, 6) float64. Where the sampler clips x0, the derivative is 0.
    """
    a, b, p, q, _, bound = (_across(rows[:, i], x.ndim) for i in range(len(COLUMNS)))
    x = x.astype(np.float64)
    x0 = a * x + b * output.astype(np.float64)
    inside = abs(x0) <= bound
    xp = namespace(x0)
    return p * xp.minimum(xp.maximum(x0, -bound), bound) + q * x, inside * (p * b)


def log_probability(output: Any, x: Any, following: Any, rows: Any) -> tuple[Any, Any]:
    """(log p (n,), d log p / d output (n, ...)) of the steps from `x` to `following`, both (n, ...): float64.

    The log-density of N(mu, s²) at `following`, averaged over the elements of a picture; s > 0.

    >>> rows = np.array([[0.0, 1.0, 1.0, 0.0, 2.0, np.inf]])      # mu = output, s = 2
    >>> logp, slope = log_probability(np.zeros((1, 1)), np.zeros((1, 1)), np.ones((1, 1)), rows)
    >>> round(float(logp[0]), 4), float(slope[0, 0])           # -1 / 8 - log 2 - log(2 pi) / 2
    (-1.7371, 0.25)
    """
    xp = namespace(output)
    mean, slope = step_mean(output, x, rows)
    s = rows[:, 4]
    off = following.astype(np.float64) - mean
    squares = (off * off).reshape(len(off), -1).mean(axis=1)
    logp = -squares / (2 * s * s) - xp.log(s) - 0.5 * math.log(2 * math.pi)
    return logp, off * slope / (_across(s * s, x.ndim) * (off.size // len(off)))


def _across(values: Any, ndim: int) -> Any:
    return values.reshape(-1, *(1,) * (ndim - 1))


class PPOLoss(NamedTuple):
    """values: float64 (len(PPO_STATS),); gradient: of the loss in the output, of its shape and dtype. Both
    are arrays of the output's framework.
    """

    values: Any
    gradient: Any


def ppo_loss(
    output: Any, reference: Any, x: Any, following: Any, rows: Any, advantage: Any, old: Any, clip: float,
    live: Any | None = None,
) -> PPOLoss:  # fmt: skip
    """The loss of a batch of steps and its gradient, by hand: see the module.

    Args:
        output, reference: what policy and reference say of x, (n, ...).
        x, following: latents before and after the step, (n, ...).
        rows: (n, 6) float64 of `step_table`; advantage, old: (n,), old the log-probabilities of the policy
            that drew the steps.
        clip: of the ratio.
        live: (n,), 0 for steps that only fill the batch up; None: all are real.

    All are NumPy's or all CuPy's arrays; nothing is read back. Statistics (`PPO_STATS`): "ratio", mean of
    rho; "ratio_spread", the largest |rho - 1|; "clipfrac", share of steps whose ratio is outside 1 +- clip;
    "advantage", mean; "kl", mean of (mu - mu_ref)² / (2 s²), the divergence from the reference of one element
    of one step, which is no part of the loss; "approx_kl", mean of (log p - log p_old)² / 2, how far the
    policy has gone from the one that drew the steps: the estimator k2 of Schulman 2020, "Approximating KL
    Divergence", by the name that DDPO's code and TRL have for it, of log p averaged over elements as theirs.

    Raises `ShapeError` where shapes do not belong together.

    >>> rows = np.array([[0.0, 1.0, 1.0, 0.0, 2.0, np.inf]])
    >>> one, zero = np.ones((1, 1)), np.zeros((1, 1))
    >>> old, _ = log_probability(zero, zero, one, rows)
    >>> loss = ppo_loss(zero, zero, zero, one, rows, np.array([3.0]), old, clip=0.1)
    >>> loss.values[:2].tolist(), float(loss.gradient[0, 0])
    ([-3.0, 1.0], -0.75)
    """
    _check_shapes(output, reference, x, following, rows, advantage, old, live)
    xp = namespace(output)
    logp, slope = log_probability(output, x, following, rows)
    live = xp.ones(len(output)) if live is None else live.astype(np.float64)
    count = live.sum()
    change = logp - old
    ratio = xp.exp(change)
    plain, bounded = -advantage * ratio, -advantage * ratio.clip(1 - clip, 1 + clip)
    loss = (xp.maximum(plain, bounded) * live).sum() / count
    # in the ratio, by the ratio: that is in log p. Where the bounded form is the larger one it is constant.
    weight = plain * (plain >= bounded) * live / count
    gradient = (slope * _across(weight, x.ndim)).astype(output.dtype)
    off = abs(ratio - 1) * live
    mu, mu_ref = step_mean(output, x, rows)[0], step_mean(reference, x, rows)[0]
    kl = ((mu - mu_ref) ** 2).reshape(len(mu), -1).mean(axis=1) / (2 * rows[:, 4] ** 2)
    values = [loss, (ratio * live).sum() / count, off.max(), ((off > clip) * live).sum() / count,
              (advantage * live).sum() / count, (kl * live).sum() / count,
              0.5 * (change * change * live).sum() / count]  # fmt: skip
    return PPOLoss(packed(xp, values), gradient)


def _check_shapes(output, reference, x, following, rows, advantage, old, live) -> None:
    n = len(output)
    for name, array in (("reference", reference), ("x", x), ("following", following)):
        if array.shape != output.shape:
            raise ShapeError(f"ppo_loss: {name} has shape {array.shape} but output has shape {output.shape}; "
                             f"they must be equal")  # fmt: skip
    for name, array, shape in (("rows", rows, (n, len(COLUMNS))), ("advantage", advantage, (n,)),
                               ("old", old, (n,)), ("live", live, (n,))):  # fmt: skip
        if array is not None and array.shape != shape:
            raise ShapeError(f"ppo_loss: {name} has shape {array.shape} but there are {n} steps; pass one of "
                             f"shape {shape}")  # fmt: skip
    if not n:
        raise ShapeError("ppo_loss: output holds no step; give at least one")


def check_clip(clip: float) -> float:
    """`clip` if a ratio can be clipped by it; else `ConfigError`."""
    if not 0 < clip < 1:
        raise ConfigError(f"ppo.clip: is {clip}, but a ratio is clipped to 1 +- a number between 0 and 1; "
                          f"1e-4 is usual where log-probabilities are averaged over elements")  # fmt: skip
    return clip


def ppo_backward(
    policy: Policy, reference: Model, x: np.ndarray, following: np.ndarray, condition: np.ndarray,
    t: np.ndarray, rows: np.ndarray, advantage: np.ndarray, old: np.ndarray, clip: float,
    live: np.ndarray | None = None, hold: float = 0.0, phases: int = 1,
) -> tuple[float, dict[str, float]]:  # fmt: skip
    """(loss, statistics) of a batch of steps: afterwards the policy's parameters hold their gradients.

    `x`, `following` (n, ...) float32, `condition` one row a step, `t` (n,) the timesteps; the rest as in
    `ppo_loss`. The reference runs without a tape. ``hold mean(d²)`` is added to what is minimised, d the
    `phase_drift`, whose size is the statistic "drift"; it is no part of the loss that is returned.
    """
    check_clip(clip)
    frozen = reference(x, t, condition)
    output = policy(x, t, condition)
    found = ppo_loss(output.data, frozen, x, following, rows, advantage, old, clip, live)
    drift = hold_together(found.gradient, output.data, frozen, phases, hold, live)
    output.backward(found.gradient)
    stats = dict(zip(PPO_STATS, found.values.tolist(), strict=True)) | {"drift": float(drift)}
    return stats.pop("loss"), stats
