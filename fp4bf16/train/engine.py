"""The arithmetic of a run: one step of the base training, one of DPO, pictures from the weights.

An engine holds weights, their average and the optimizer's moments, and nothing else of a run. `HostEngine`
keeps them in NumPy arrays; `device.CudaEngine` has the same methods on a GPU. Checkpoints hold host arrays by
name, so that either goes on where the other stopped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..align.dpo import dpo_backward
from ..diffusion.ema import EMA
from ..diffusion.losses import squared_error
from ..diffusion.noise import integers, normal, uniform
from ..errors import ShapeError
from ..nn.optim import AdamW, clip_norm
from .checkpoint import give, take
from .config import Config
from .denoiser import Denoiser


@dataclass(frozen=True)
class BaseData:
    """What the base model learns from, and what is drawn for one step.

    pictures: folded, float32 (n, h, w, c); captions: bags of words, float32 (n, vocabulary), or None for a
    network without; seeds: of the purposes row, t, noise and drop; levels: how many noise levels there are.
    """

    pictures: np.ndarray
    captions: np.ndarray | None
    seeds: dict[str, int]
    levels: int

    def draw(self, step: int, batch: int, drop_caption: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(row, t, keep) of one step, (batch,) each: which pictures, at which noise levels, with captions or
        not.
        """
        row = integers(self.seeds["row"], step, batch, 0, len(self.pictures))
        t = integers(self.seeds["t"], step, batch, 0, self.levels)
        return row, t, uniform(self.seeds["drop"], step, (batch, 1))[:, 0] >= drop_caption


@dataclass(frozen=True)
class PairData:
    """The comparisons of one iteration of DPO, in the order in which they are taken.

    chosen, rejected: folded pictures, one a pair; captions: bags, one a pair; row, t: pair and noise level of
    each comparison; noise: (seed, step) of all their noise.
    """

    chosen: np.ndarray
    rejected: np.ndarray
    captions: np.ndarray
    row: np.ndarray
    t: np.ndarray
    noise: tuple[int, int]

    def __len__(self) -> int:
        return len(self.row)


class StepResult(NamedTuple):
    """Loss, norm of the gradient before clipping (one not finite: nothing was updated), further numbers."""

    loss: float
    norm: float
    stats: dict[str, float]

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class HostEngine:
    """The network on the CPU."""

    device = "cpu"

    def __init__(self, model: Denoiser, config: Config):
        self.model, self.config = model, config
        self.parameters = model.unet.flat
        self.ema = EMA(self.parameters.data, config.base.ema)
        self._eps: np.ndarray | None = None
        self._renew(aligning=False)

    def _renew(self, aligning: bool) -> None:
        """An optimizer without a past, as the base training or the alignment sets it."""
        base, lr = self.config.base, self.config.align.lr
        self.optimizer = (
            AdamW(self.parameters.data, lr)
            if aligning
            else AdamW(self.parameters.data, base.lr, weight_decay=base.weight_decay)
        )

    # ------------------------------------------------------------------------------------------------ state

    @property
    def updates(self) -> int:
        """Updates of the optimizer so far, those left out not counted."""
        return self.optimizer.count

    @property
    def size(self) -> int:
        """Number of parameters, with the gaps of the flat buffer."""
        return self.parameters.data.size

    def memory(self) -> dict[str, float]:
        """Memory of the device for the metrics; of the host nothing, it is measured elsewhere."""
        return {}

    def state(self) -> dict[str, np.ndarray]:
        """All arrays of a checkpoint: ``policy.*``, ``ema.*``, ``adam.first.*``, ``adam.second.*``."""
        views = self.parameters.views
        arrays = give(views(self.parameters.data), "policy") | give(views(self.ema.average), "ema")
        for name, moment in self.optimizer.state().items():
            arrays |= give(views(moment), f"adam.{name}")
        return arrays

    def restore(self, arrays: dict[str, np.ndarray], updates: int, aligning: bool) -> None:
        """Take up what `state` gave; `ShapeError` where it does not fit."""
        self._renew(aligning)
        self.model.unet.load_state_dict(take(arrays, "policy"))
        restore_flat(self.parameters, take(arrays, "ema"), self.ema.average)
        for name, moment in self.optimizer.state().items():
            restore_flat(self.parameters, take(arrays, f"adam.{name}"), moment)
        self.optimizer.count = updates

    def begin_alignment(self, weights: dict[str, np.ndarray] | None = None) -> None:
        """What is aligned, and what DPO stays near, is the average of the weights, or `weights` from
        elsewhere; the optimizer starts anew.
        """
        if weights is not None:
            restore_flat(self.parameters, weights, self.ema.average)
        self.parameters.data[...] = self.ema.average
        self.parameters.touch()
        self._renew(aligning=True)

    # ------------------------------------------------------------------------------------------------ steps

    def base_step(self, data: BaseData, step: int, lr: float) -> StepResult:
        """One step of the base training; nothing is updated where loss or gradient are not finite."""
        c, model = self.config.base, self.model
        row, t, keep = data.draw(step, c.batch, c.drop_caption)
        x0, eps = data.pictures[row], normal(data.seeds["noise"], step, (c.batch, *model.shape))
        bag = None if data.captions is None else data.captions[row] * keep[:, None]
        output = model.policy(model.schedule.add_noise(x0, eps, t), t, bag)
        loss, gradient = squared_error(output.data, model.schedule.target(x0, eps, t, model.prediction))
        model.unet.zero_grad()
        output.backward(gradient)
        result = StepResult(loss, clip_norm(self.parameters.grad, c.clip), {})
        if self._update(result, lr):
            self.ema.update(self.parameters.data, step)
        return result

    def begin_pairs(self, data: PairData) -> None:
        """Make ready for the comparisons of one iteration."""
        seed, step = data.noise
        self._eps = normal(seed, step, (len(data), *self.model.shape))

    def dpo_step(self, data: PairData, some: slice, lr: float) -> StepResult:
        """One step of DPO on the comparisons `some` of those begun."""
        c, model = self.config.align, self.model
        row = data.row[some]
        model.unet.zero_grad()
        found = dpo_backward(
            model.policy,
            model.reference(self.ema.average),
            data.chosen[row],
            data.rejected[row],
            data.captions[row],
            data.t[some],
            self._eps[some],
            model.schedule,
            model.prediction,
            c.beta,
            c.hold,
            self.config.model.unshuffle**2,
        )
        result = StepResult(found.loss, clip_norm(self.parameters.grad, c.clip), found.stats)
        self._update(result, lr)
        return result

    def _update(self, result: StepResult, lr: float) -> bool:
        if result.finite:
            self.optimizer.step(self.parameters.grad, lr)
            self.parameters.touch()
        return result.finite

    def draw(self, seeds: Any, captions: Sequence[str], steps: int, track: str = "bf16") -> np.ndarray:
        """Pictures of the policy, as `Denoiser.draw`."""
        return self.model.draw(seeds, captions, steps, track)


def restore_flat(parameters: Any, state: dict[str, np.ndarray], flat: np.ndarray) -> None:
    """Copy named arrays into a flat buffer laid out as `parameters`."""
    views = parameters.views(flat)
    if set(views) != set(state):
        different = sorted(set(views) ^ set(state))
        raise ShapeError(f"parameter {different[0]} is on one side only")
    for name, view in views.items():
        if view.shape != state[name].shape:
            raise ShapeError(f"{name} has shape {state[name].shape} instead of {view.shape}")
        view[...] = state[name]


def make_engine(device: str, model: Denoiser, config: Config) -> Any:
    """The engine of ``--device``: "cpu" or "cuda"; a sentence where there is no such device."""
    if device == "cpu":
        return HostEngine(model, config)
    from .device import CudaEngine  # not needed on a CPU

    return CudaEngine(model, config)


def make_sampler(device: str, model: Denoiser) -> Any:
    """A function (seeds, captions, steps, track) -> pictures of `model` on that device."""
    if device == "cpu":
        return model.draw
    from .device import CudaSampler

    return CudaSampler(model).draw
