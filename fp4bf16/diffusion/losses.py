"""The training loss of a diffusion model, and the per-picture error that preference losses are made of.

Values and gradients with respect to the network's output are written out (they are two lines): the tape
then starts from the output, ``output.backward(gradient)``, and no graph of the loss is ever built.

The same errors train a score-based model: with eps prediction their mean over t is the denoising score
matching loss with the weight lambda(sigma) = sigma² (`score_weight`), that of Song & Ermon 2019, section 4.2,
and Song et al. 2021, eq. 7.
"""

from __future__ import annotations

import numpy as np

from ..errors import ShapeError
from .schedules import Schedule, check_prediction


def squared_error(output: np.ndarray, target: np.ndarray) -> tuple[float, np.ndarray]:
    """Mean squared error over all elements and its gradient with respect to `output` (same shape).

    L = mean (output - target)²: DDPM eq. 14 for eps prediction; for v the loss of progressive distillation's
    appendix D, "SNR+1 weighting". Raises `ShapeError` when the shapes differ.

    >>> loss, gradient = squared_error(np.ones((1, 2), np.float32), np.zeros((1, 2), np.float32))
    >>> loss, gradient.tolist()
    (1.0, [[1.0, 1.0]])
    """
    difference = _difference("squared_error", output, target)
    loss = float(np.mean(np.square(difference), dtype=np.float64))
    return loss, difference * difference.dtype.type(2 / difference.size)


def picture_errors(output: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean squared error of every picture (first axis), float64 (batch,), and d error / d output (output's
    shape).

    >>> errors, gradient = picture_errors(np.ones((2, 4), np.float32), np.zeros((2, 4), np.float32))
    >>> errors.tolist(), gradient[0].tolist()
    ([1.0, 1.0], [0.5, 0.5, 0.5, 0.5])
    """
    difference = _difference("picture_errors", output, target)
    flat = difference.reshape(len(difference), -1)
    errors = np.einsum("ij,ij->i", flat, flat, dtype=np.float64) / flat.shape[1]
    return errors, difference * difference.dtype.type(2 / flat.shape[1])


def score_weight(schedule: Schedule, t, prediction: str) -> np.ndarray:
    """lambda, float64 (batch,), with ||output - target||² = lambda ||score - true score||² at the
    timesteps `t` (batch,), the true one being that of x_t given x_0: the weight of score matching that an
    unweighted error of the output stands for.

    eps: sigma², so that all levels count alike in eps; v: sigma² (alpha² + sigma²) / alpha², which is
    sigma² (1 + sigma²) on VE; x0: sigma⁴ / alpha². Raises `ConfigError` for a prediction that is not known.

    >>> from fp4bf16.diffusion import ve
    >>> [score_weight(ve(3), [2], p).tolist() for p in ("eps", "v", "x0")]
    [[2500.0], [6252500.0], [6250000.0]]
    """
    at = np.asarray(t, np.int64)
    alpha, sigma, norm = schedule.alpha[at], schedule.sigma[at], schedule.norm[at]
    per_eps = {"eps": 1.0, "v": norm / alpha, "x0": sigma / alpha}[check_prediction(prediction)]
    return (sigma * per_eps) ** 2


def _difference(op: str, output: np.ndarray, target: np.ndarray) -> np.ndarray:
    if output.shape != target.shape:
        raise ShapeError(
            f"{op}: output has shape {output.shape} but target has shape {target.shape}; they must be equal"
        )
    return output - target
