"""The arithmetic of a run: one step of the base training, one of policy training, pictures from the weights.

An engine holds weights, their average and the optimizer's moments, and nothing else of a run. `HostEngine`
keeps them in NumPy arrays; `device.CudaEngine` has the same methods on a GPU. Checkpoints hold host arrays by
name, so that either goes on where the other stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..diffusion.ema import EMA
from ..diffusion.losses import squared_error
from ..diffusion.noise import integers, normal, subseed, uniform
from ..errors import ShapeError
from ..nn.lora import LoRA
from ..nn.optim import AdamW, clip_norm
from .checkpoint import give, take
from .config import Config
from .denoiser import Denoiser
from .host_loop import Pictures, make_loop
from .host_policy import HostPolicy
from .policy import StepResult


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


class HostEngine(HostPolicy):
    """The network on the CPU.

    `parameters`: what is trained, the network's or, while aligning with ``align.parameters = "lora"``, those
    of adapters beside it (`lora`), which leave the network as the reference. `old`: NFT's old policy, flat.
    """

    device = "cpu"

    def __init__(self, model: Denoiser, config: Config):
        self.model, self.config = model, config
        self.parameters = model.unet.flat
        self.ema: EMA | None = EMA(self.parameters.data, config.base.ema)
        self.lora: LoRA | None = None
        self.old: np.ndarray | None = None
        self._renew(aligning=False)

    def _renew(self, aligning: bool) -> None:
        """An optimizer without a past, as the base training or the alignment sets it."""
        base, lr = self.config.base, self.config.align.lr
        self.optimizer = (
            AdamW(self.parameters.data, lr)
            if aligning
            else AdamW(self.parameters.data, base.lr, weight_decay=base.weight_decay)
        )
        nft = aligning and self.config.align.objective == "nft"
        self.old = self.parameters.data.copy() if nft else None

    def _adapt(self, aligning: bool) -> None:
        """Adapters where they are trained, and none elsewhere. With them the network itself is what the base
        training found, and no average is kept beside it.
        """
        c, flat = self.config, self.model.unet.flat
        if self.lora is not None:
            self.lora.detach()
            self.lora, self.parameters = None, flat
        if aligning and c.align.parameters == "lora":
            self.lora = LoRA(self.model.unet, c.lora.rank, c.lora.alpha, subseed(c.seed, "lora"))
            self.parameters, self.ema = self.lora.flat, None
        elif self.ema is None:
            self.ema = EMA(flat.data, c.base.ema)

    # ------------------------------------------------------------------------------------------------ state

    @property
    def updates(self) -> int:
        """Updates of the optimizer so far, those left out not counted."""
        return self.optimizer.count

    @property
    def size(self) -> int:
        """Number of the network's parameters, with the gaps of the flat buffer."""
        return self.model.unet.flat.data.size

    @property
    def trained(self) -> int:
        """Number of parameters that are trained: those of the network, or of the adapters."""
        return sum(p.size for p in self.parameters.named.values())

    @property
    def average(self) -> np.ndarray:
        """The averaged weights of the base training, flat: what alignment starts from and stays near."""
        return self.model.unet.flat.data if self.ema is None else self.ema.average

    def memory(self) -> dict[str, float]:
        """Memory of the device for the metrics; of the host nothing, it is measured elsewhere."""
        return {}

    def state(self) -> dict[str, np.ndarray]:
        """All arrays of a checkpoint: ``policy.*`` (adapters merged into it), ``ema.*``, ``adam.first.*``,
        ``adam.second.*``; ``lora.*`` (adapters) and ``old.*`` (the old policy) where there are such.
        """
        base, views = self.model.unet.flat, self.parameters.views
        policy = base.views(base.data) if self.lora is None else self.lora.merged_state()
        arrays = give(policy, "policy") | give(base.views(self.average), "ema")
        if self.lora is not None:
            arrays |= give(views(self.parameters.data), "lora")
        for name, moment in self.optimizer.state().items():
            arrays |= give(views(moment), f"adam.{name}")
        return arrays if self.old is None else arrays | give(views(self.old), "old")

    def restore(self, arrays: dict[str, np.ndarray], updates: int, aligning: bool) -> None:
        """Take up what `state` gave; `ShapeError` where it does not fit."""
        self._adapt(aligning)
        self._renew(aligning)
        if self.lora is None:
            self.model.unet.load_state_dict(take(arrays, "policy"))
            restore_flat(self.parameters, take(arrays, "ema"), self.ema.average)
        else:
            self.model.unet.load_state_dict(take(arrays, "ema"))
            restore_flat(self.parameters, take(arrays, "lora"), self.parameters.data)
            self.parameters.touch()
        for name, moment in self.optimizer.state().items():
            restore_flat(self.parameters, take(arrays, f"adam.{name}"), moment)
        if self.old is not None:
            restore_flat(self.parameters, take(arrays, "old"), self.old)
        self.optimizer.count, self._begun = updates, None

    def begin_alignment(self, weights: dict[str, np.ndarray] | None = None) -> None:
        """What is aligned, and what it stays near, is the average of the weights, or `weights` from
        elsewhere; the optimizer starts anew, the old policy is the policy.
        """
        flat, average = self.model.unet.flat, self.average
        if weights is not None:
            restore_flat(flat, weights, average)
        flat.data[...] = average
        flat.touch()
        self._adapt(aligning=True)
        self._renew(aligning=True)
        if self.loop is not None:
            self.loop.renew()

    # ------------------------------------------------------------------------------------------------ steps

    def base_step(self, data: BaseData, step: int, lr: float) -> StepResult:
        """One step of the base training; nothing is updated where loss or gradient are not finite."""
        c, model = self.config.base, self.model
        row, t, keep = data.draw(step, c.batch, c.drop_caption)
        x0, eps = data.pictures[row], normal(data.seeds["noise"], step, (c.batch, *model.shape))
        bag = None if data.captions is None else data.captions[row] * keep[:, None]
        x = model.schedule.add_noise(x0, eps, t)
        target = model.schedule.target(x0, eps, t, model.prediction)

        def once(some: slice) -> tuple[float, None]:
            output = model.policy(x[some], t[some], None if bag is None else bag[some])
            loss, gradient = squared_error(output.data, target[some])
            model.unet.zero_grad()
            output.backward(gradient)
            return loss, None

        loss, _ = self.learn(once, c.batch, lambda: Pictures(x0, bag, t, eps, own=True))
        result = StepResult(loss, clip_norm(self.parameters.grad, c.clip), {})
        if self._update(result, lr):
            self.ema.update(self.parameters.data, step)
        self.learned(own=True)
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
    """The engine of ``--device``: "cpu" or "cuda", with the closed loop of the configuration; a sentence
    where there is no such device.
    """
    if device == "cpu":
        engine: Any = HostEngine(model, config)
    else:
        from .device import CudaEngine  # not needed on a CPU

        engine = CudaEngine(model, config)
    if (loop := make_loop(config, model)) is not None:
        engine.use(loop)
    return engine


def make_sampler(device: str, model: Denoiser) -> Any:
    """A function (seeds, captions, steps, track) -> pictures of `model` on that device."""
    if device == "cpu":
        return model.draw
    from .device import CudaSampler

    return CudaSampler(model).draw
