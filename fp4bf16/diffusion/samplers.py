"""Samplers: from noise to pictures with few evaluations of the network.

A sampler is a pure function of (model, start noise, condition). `generate` draws the noise of every picture
from its own seed and runs fixed-size chunks, the last one padded: every picture goes through the same
kernels with the same shapes whatever stands beside it, so that one seed gives one picture, bit for bit, in
any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..errors import ConfigError, ShapeError, nearest
from .noise import normal
from .schedules import Schedule

#: model(x (batch, ...) float32, t (batch,) int64, condition (batch, ...) or None) -> (batch, ...) float32
Model = Callable[[np.ndarray, np.ndarray, np.ndarray | None], np.ndarray]

START = (
    0  # step number of the noise that a picture starts from; the noise added at timestep t has number t + 1
)


def ddim(
    model: Model,
    x: np.ndarray,
    condition,
    schedule: Schedule,
    steps: int,
    *,
    prediction: str = "v",
    eta: float = 0.0,
    clip: float | None = 1.0,
    noise: Callable[[int], np.ndarray] | None = None,
    spacing: str = "trailing",
) -> np.ndarray:
    """DDIM (Song et al. 2021) from start noise `x` (batch, ...) in `steps` evaluations of `model`.

    x' = sqrt(alpha_bar') x0 + sqrt(1 - alpha_bar' - s²) eps + s z                                   eq. 12
    s = eta sqrt((1 - alpha_bar') / (1 - alpha_bar)) sqrt(1 - alpha_bar / alpha_bar')                eq. 16

    `eta` 0 is deterministic. `clip` bounds |x0| before eps is recomputed from it. `noise(t)` gives z where
    eta > 0.
    """
    if eta and noise is None:
        raise ConfigError(
            f"ddim: eta is {eta} but no noise was given; pass noise=, or eta=0 for the deterministic form"
        )
    timesteps = schedule.timesteps(steps, spacing)
    for t, previous in zip(timesteps, [*timesteps[1:], -1], strict=True):
        batch_t = np.full(len(x), t, np.int64)
        x0, eps = schedule.to_x0_eps(model(x, batch_t, condition), x, batch_t, prediction)
        if clip is not None:
            np.clip(x0, -clip, clip, out=x0)
            eps = schedule.eps_from_x0(x0, x, batch_t)
        here, there = schedule.alpha_bar[t], 1.0 if previous < 0 else schedule.alpha_bar[previous]
        s = eta * np.sqrt((1 - there) / (1 - here)) * np.sqrt(1 - here / there)
        x = np.float32(np.sqrt(there)) * x0 + np.float32(np.sqrt(max(1 - there - s * s, 0.0))) * eps
        if s > 0:
            x += np.float32(s) * noise(int(t))
    return x


def ancestral(
    model: Model,
    x: np.ndarray,
    condition,
    schedule: Schedule,
    steps: int,
    *,
    prediction: str = "v",
    clip: float | None = 1.0,
    noise: Callable[[int], np.ndarray],
    spacing: str = "trailing",
) -> np.ndarray:
    """Ancestral sampling of DDPM from start noise `x`: draws from the posterior q(x' | x_t, x0) at every
    step.

    mean = sqrt(alpha_bar') beta / (1 - alpha_bar) x0 + sqrt(1 - beta) (1 - alpha_bar') / (1 - alpha_bar) x_t
    variance = beta (1 - alpha_bar') / (1 - alpha_bar)                                DDPM eq. 6 and 7
    with beta = 1 - alpha_bar / alpha_bar' where timesteps are left out               Improved DDPM eq. 19
    """
    timesteps = schedule.timesteps(steps, spacing)
    for t, previous in zip(timesteps, [*timesteps[1:], -1], strict=True):
        batch_t = np.full(len(x), t, np.int64)
        x0, _ = schedule.to_x0_eps(model(x, batch_t, condition), x, batch_t, prediction)
        if clip is not None:
            np.clip(x0, -clip, clip, out=x0)
        here, there = schedule.alpha_bar[t], 1.0 if previous < 0 else schedule.alpha_bar[previous]
        beta = 1 - here / there
        x = (
            np.float32(np.sqrt(there) * beta / (1 - here)) * x0
            + np.float32(np.sqrt(1 - beta) * (1 - there) / (1 - here)) * x
        )
        if previous >= 0:
            x += np.float32(np.sqrt(beta * (1 - there) / (1 - here))) * noise(int(t))
    return x


def coefficients(
    sampler: str, schedule: Schedule, steps: int, *, clip: float | None = 1.0, spacing: str = "trailing"
) -> tuple[np.ndarray, np.ndarray]:
    """(timesteps (steps,), float32 (steps, 8)) of `ddim` with eta 0 or of `ancestral`, for a kernel that
    makes one step: sqrt(alpha_bar), sqrt(1 - alpha_bar), a, b, c, d, clip (0: none), 0, where
    x' = a x0 + b eps + c x + d z with the clipped x0 and the eps that belongs to it.

    >>> from fp4bf16.diffusion import cosine
    >>> t, table = coefficients("ddim", cosine(100), 2)
    >>> t.tolist(), table[-1, 2:6].tolist()
    ([99, 49], [1.0, 0.0, 0.0, 0.0])
    """
    if sampler not in SAMPLERS:
        raise ConfigError(f"coefficients: sampler {sampler!r} is not known{nearest(sampler, SAMPLERS)}")
    timesteps = schedule.timesteps(steps, spacing)
    table = np.zeros((steps, 8))
    for row, t, previous in zip(table, timesteps, [*timesteps[1:], -1], strict=True):
        here, there = schedule.alpha_bar[t], 1.0 if previous < 0 else schedule.alpha_bar[previous]
        row[:2], row[6] = (np.sqrt(here), np.sqrt(1 - here)), clip or 0.0
        if sampler == "ddim":
            row[2:4] = np.sqrt(there), np.sqrt(1 - there)
            continue
        beta = 1 - here / there
        row[2] = np.sqrt(there) * beta / (1 - here)
        row[4] = np.sqrt(1 - beta) * (1 - there) / (1 - here)
        row[5] = np.sqrt(beta * (1 - there) / (1 - here)) if previous >= 0 else 0.0
    return timesteps, table.astype(np.float32)


SAMPLERS = {"ddim": ddim, "ancestral": ancestral}


def generate(
    model: Model,
    seeds: Sequence[int],
    condition: np.ndarray | None,
    shape: Sequence[int],
    schedule: Schedule,
    steps: int,
    *,
    sampler: str = "ddim",
    prediction: str = "v",
    chunk: int = 64,
    clip: float | None = 1.0,
) -> np.ndarray:
    """One picture (`shape`) for every seed, float32 (len(seeds), *shape).

    `condition` holds one row a picture, or is None. The model always sees `chunk` pictures.

    >>> from fp4bf16.diffusion import cosine
    >>> zero = lambda x, t, condition: np.zeros_like(x)
    >>> generate(zero, [7, 8, 9], None, (2, 2, 3), cosine(100), steps=4, chunk=2).shape
    (3, 2, 2, 3)
    """
    if sampler not in SAMPLERS:
        raise ConfigError(f"generate: sampler {sampler!r} is not known{nearest(sampler, SAMPLERS)}")
    if condition is not None and len(condition) != len(seeds):
        raise ShapeError(
            f"generate: condition has {len(condition)} rows but there are {len(seeds)} seeds; "
            f"give one row a seed"
        )
    seeds, shape = np.array(seeds, np.uint64), tuple(shape)
    pictures = np.empty((len(seeds), *shape), np.float32)
    for start in range(0, len(seeds), chunk):
        count = min(chunk, len(seeds) - start)
        rows = np.minimum(
            np.arange(start, start + chunk), start + count - 1
        )  # the last picture pads the chunk

        def draw(t: int, some=seeds[rows]) -> np.ndarray:
            return normal(some, t + 1, shape)

        x = normal(seeds[rows], START, shape)
        c = None if condition is None else np.ascontiguousarray(condition[rows])
        done = SAMPLERS[sampler](model, x, c, schedule, steps, prediction=prediction, clip=clip, noise=draw)
        pictures[start : start + count] = done[:count]
    return pictures
