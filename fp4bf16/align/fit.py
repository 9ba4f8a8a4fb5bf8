"""The training loop of the small networks: AdamW, a rate that falls as a cosine, clipped gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..errors import NonFiniteError
from ..nn import AdamW, Module, Variable, clip_norm
from ..tracks import tracks

OnStep = Callable[[int, float], None]  # (step, loss; NaN: none yet), called after each step of a training

_MEAN = 50  # steps that the loss is averaged over


def fit(
    network: Module,
    loss_of_step: Callable[[int], Variable],
    steps: int,
    *,
    lr: float,
    weight_decay: float,
    clip: float = 1.0,
    warmup: int = 0,
    on_step: OnStep | None = None,
    name: str = "fit",
    track: str = "bf16",
) -> float:
    """Lower ``loss_of_step(step)``, one number, in `steps` steps; what it draws is to be a function of it.

    The rate is lr (1 + cos(pi step / steps)) / 2, in the first `warmup` steps times step / warmup. Loss and
    gradients are on `track`; gradients are clipped to the norm `clip`. ``on_step(step, loss)`` is called
    after each step. Returns the loss, averaged over about the last 50 steps; 0 where there are none. Raises
    `NonFiniteError`, which calls the training `name`, if it is not finite.

    >>> import numpy as np
    >>> from fp4bf16.nn import Linear
    >>> line, x = Linear(1, 1, seed=0), np.ones((4, 1), np.float32)
    >>> losses = []
    >>> square = lambda step: (line(x) * line(x)).sum()
    >>> _ = fit(line, square, 20, lr=0.1, weight_decay=0.0, on_step=lambda step, loss: losses.append(loss))
    >>> losses[-1] < losses[0]
    True
    """
    flat = network.flat
    optimizer = AdamW(flat.data, lr, weight_decay=weight_decay)
    recent = 0.0
    for step in range(steps):
        network.zero_grad()
        with tracks(track):
            loss = loss_of_step(step)
            loss.backward()
        value = loss.item()
        if not math.isfinite(value):
            raise NonFiniteError(f"{name}: loss is {value} at step {step}; lower its lr of {lr}")
        clip_norm(flat.grad, clip)
        rate = 0.5 * lr * (1 + math.cos(math.pi * step / steps))
        optimizer.step(flat.grad, rate * min(1.0, step / warmup) if warmup else rate)
        flat.touch()
        recent += (value - recent) / min(step + 1, _MEAN)
        if on_step is not None:
            on_step(step, value)
    return recent
