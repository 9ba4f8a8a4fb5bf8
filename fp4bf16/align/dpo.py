"""Diffusion-DPO: move a diffusion model towards the pictures that a reward prefers, away from those that it
does not.

L = -E log sigmoid(-(beta / 2) [(e_w - e_w_ref) - (e_l - e_l_ref)])

Wallace et al. 2023, "Diffusion Model Alignment Using Direct Preference Optimization", eq. 14, in the form
of its released code: e = ||prediction - target||² as the *mean* over a picture's elements, one timestep and
one noise for the chosen (w) and the rejected (l) picture of a pair, the reference frozen. `beta` absorbs T
and the SNR weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..diffusion.losses import picture_errors
from ..diffusion.samplers import Model
from ..diffusion.schedules import Schedule
from ..errors import ShapeError
from ..nn.tape import Variable
from .drift import hold as hold_together
from .drift import phase_drift

#: policy(x, t, condition) -> the network's output as a variable of the tape
Policy = Callable[[np.ndarray, np.ndarray, np.ndarray | None], Variable]

__all__ = ["DPOResult", "Policy", "dpo_backward", "dpo_loss", "phase_drift"]


@dataclass(frozen=True)
class DPOResult:
    """Loss, its gradients with respect to the chosen and the rejected errors (float64 (pairs,)), and
    statistics.
    """

    loss: float
    chosen_gradient: np.ndarray
    rejected_gradient: np.ndarray
    stats: dict[str, float]


def dpo_loss(
    chosen: np.ndarray,
    rejected: np.ndarray,
    reference_chosen: np.ndarray,
    reference_rejected: np.ndarray,
    beta: float,
) -> DPOResult:
    """Diffusion-DPO of per-picture errors, each float64 (pairs,): of the policy, then of the frozen
    reference.

    Statistics have TRL's names. The implicit reward of a picture is (beta / 2) (e_ref - e): a margin is
    chosen minus rejected, the accuracy is the share of positive margins (a margin of exactly 0 counts one
    half), and ``errors/*`` stand where TRL has ``logps/*`` (-e is the log-likelihood up to scale and
    constant).

    >>> e = np.array([0.5, 0.25])
    >>> result = dpo_loss(e, e, e, e, beta=4000.0)         # the policy is still the reference
    >>> result.loss == float(np.log(2)), result.stats["rewards/margins"]
    (True, 0.0)
    """
    shapes = {np.shape(x) for x in (chosen, rejected, reference_chosen, reference_rejected)}
    if len(shapes) != 1 or len(shapes.pop()) != 1:
        raise ShapeError(
            f"dpo_loss: errors have shapes chosen {np.shape(chosen)}, rejected {np.shape(rejected)}, "
            "reference "
            f"{np.shape(reference_chosen)} and {np.shape(reference_rejected)}; give four arrays of one "
            "value a pair"
        )
    reward_chosen = beta / 2 * (reference_chosen - chosen)
    reward_rejected = beta / 2 * (reference_rejected - rejected)
    margin = reward_chosen - reward_rejected
    losses = np.logaddexp(0.0, -margin)  # -log sigmoid(margin), without overflow
    slope = np.exp(-np.logaddexp(0.0, margin)) / len(margin)  # -dL/dmargin = sigmoid(-margin) / pairs
    stats = {
        "rewards/chosen": float(reward_chosen.mean()),
        "rewards/rejected": float(reward_rejected.mean()),
        "rewards/margins": float(margin.mean()),
        "rewards/accuracies": float((0.5 + 0.5 * np.sign(margin)).mean()),
        "errors/chosen": float(np.mean(chosen)),
        "errors/rejected": float(np.mean(rejected)),
        "errors/reference_chosen": float(np.mean(reference_chosen)),
        "errors/reference_rejected": float(np.mean(reference_rejected)),
    }
    return DPOResult(float(losses.mean()), slope * (beta / 2), -slope * (beta / 2), stats)


def dpo_backward(
    policy: Policy,
    reference: Model,
    chosen: np.ndarray,
    rejected: np.ndarray,
    condition: np.ndarray,
    t: np.ndarray,
    eps: np.ndarray,
    schedule: Schedule,
    prediction: str,
    beta: float,
    hold: float = 0.0,
    phases: int = 1,
) -> DPOResult:
    """Loss and gradient of a batch of pairs: afterwards the policy's parameters hold their gradients.

    `chosen`, `rejected`, `eps`: (pairs, ...) float32, `condition` one row a pair, `t` (pairs,). Chosen and
    rejected pictures run as one batch of 2 pairs with the same t and the same noise; the reference runs
    without a tape.

    e_w - e_l does not feel what both pictures of a pair share: ``beta hold mean(d²)`` is added to what is
    minimised, d the `phase_drift` of output and reference. The loss that is returned is the preference loss
    alone; "drift" is sqrt(mean(d²)), and "kl" the mean of (output - reference)², which is the divergence from
    the reference up to a factor of the noise level.
    """
    pairs = len(chosen)
    x0, noise = np.concatenate([chosen, rejected]), np.concatenate([eps, eps])
    t, condition = np.concatenate([t, t]), np.concatenate([condition, condition])
    x_t, target = schedule.add_noise(x0, noise, t), schedule.target(x0, noise, t, prediction)
    frozen = reference(x_t, t, condition)
    anchor, _ = picture_errors(frozen, target)
    output = policy(x_t, t, condition)
    errors, gradient = picture_errors(output.data, target)
    result = dpo_loss(errors[:pairs], errors[pairs:], anchor[:pairs], anchor[pairs:], beta)
    weight = np.concatenate([result.chosen_gradient, result.rejected_gradient])
    gradient *= weight.astype(gradient.dtype).reshape(-1, *(1,) * (gradient.ndim - 1))
    result.stats["drift"] = float(hold_together(gradient, output.data, frozen, phases, beta * hold))
    result.stats["kl"] = float(np.mean(np.square(output.data - frozen), dtype=np.float64))
    output.backward(gradient)
    return result
