"""The engine of a run on a GPU: weights, average, moments, data and noise live there; each kind of step is
one captured graph.

What differs from step to step (which pictures, noise levels, seeds, learning rate) is written to fixed
buffers before a replay. The host waits once a step, for loss and norm, because the number of updates so far,
which the next step needs, depends on whether they are finite. Draws and noise are the CPU's; so are the
formulas.

Training runs on the BF16 track, as on the CPU; `track` is for comparisons.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import device
from ..adapters import DeviceArray
from ..backends import cuda_diffusion, cuda_elementwise, cuda_optimizer
from ..diffusion.noise import NOISE, normal, subseed
from ..nn.cuda.lora import DeviceLoRA
from ..nn.cuda.parameters import DeviceParameters
from ..tracks import tracks
from .checkpoint import give, take
from .config import Config
from .device_loop import BETAS, check_routes
from .device_policy import CudaPolicy
from .device_sampler import CudaSampler, _part
from .engine import BaseData
from .host_loop import Pictures
from .policy import StepResult

__all__ = ["BETAS", "CudaEngine", "CudaSampler"]


class CudaEngine(CudaPolicy, CudaSampler):
    """`engine.HostEngine` on a GPU; track: of the training's forward. Raises `ConfigError` for routes that
    the GPU does not run.

    network: the weights that the network runs with; `parameters`: what is trained, these or, while aligning
    with ``align.parameters = "lora"``, adapters (`lora`), which are merged into them: between two steps the
    network's weights are the policy's. `average`: the averaged weights of the base training, what alignment
    starts from and stays near; with adapters their base, of which only the float32 numbers are kept.
    """

    def __init__(self, model: Any, config: Config, track: str | None = "bf16"):
        check_routes(config.route, config.routes)
        super().__init__(model)
        self.config, self.track, self._own_track = config, track, track
        self.network = model.unet.flat
        self.average = self.network.clone(self._stream(), copies=config.align.parameters == "full")
        self._train(None)
        self.alpha_bar = device.from_host(model.schedule.alpha_bar, self.like, "alpha_bar")
        self.updates, self._aligning = 0, False
        self.old: DeviceParameters | None = None  # NFT's old policy
        self._room: dict[str, tuple[int, int]] = {}  # pictures (or pairs) and entries that buffers hold
        self._base: BaseData | None = None
        self._shown: tuple[DeviceArray | None, ...] = ()  # its pictures and captions on the device
        self._ahead: tuple[int, np.ndarray] = (-1, np.empty(0))  # a step and its rows, drawn early
        self._at = -1  # the step of the base training

    # ----------------------------------------------------------------------------------------------- state

    @property
    def size(self) -> int:
        return self.network.layout.size

    def _adapters(self, aligning: bool) -> DeviceLoRA | None:
        """New adapters where they are trained, and none elsewhere."""
        c = self.config
        if not aligning or c.align.parameters == "full":
            return None
        seed = subseed(c.seed, "lora")
        return DeviceLoRA(self.model.unet, self.average.data, c.lora.rank, c.lora.alpha, seed)

    def _train(self, lora: DeviceLoRA | None) -> None:
        """Train these adapters, or the network's weights; the moments are zero and as many."""
        self.lora, self.parameters = lora, self.network if lora is None else lora.flat
        self._forget("base", "dpo", "nft", "ppo")
        self.memory_of.drop("first", "second")
        moments = (self.memory_of(name, self.parameters.data.shape) for name in ("first", "second"))
        self.first, self.second = moments

    def inventory(self) -> dict[str, int]:
        """Bytes on the device of the weights and of what is trained, by kind; not those of the pictures, and
        of the activations, which the graphs' pools hold.

        network: weights, gradients, BF16 copy and FP4 twins; average: of the base training, or the base of
        adapters; adapters: with their gradients; moments: of what is trained; old policy.
        """
        found = {"network": self.network.nbytes(), "average": self.average.nbytes(),
                 "moments": self.first.nbytes + self.second.nbytes}  # fmt: skip
        if self.lora is not None:
            found["adapters"] = self.parameters.nbytes()
        return found if self.old is None else found | {"old policy": self.old.nbytes()}

    def state(self) -> dict[str, np.ndarray]:
        p = self.parameters
        arrays = give(self.network.to_host(), "policy") | give(self.average.to_host(), "ema")
        if self.lora is not None:
            arrays |= give(p.to_host(), "lora")
        for name, moment in (("first", self.first), ("second", self.second)):
            arrays |= give(p.state(moment), f"adam.{name}")
        return arrays if self.old is None else arrays | give(self.old.to_host(), "old")

    def restore(self, arrays: dict[str, np.ndarray], updates: int, aligning: bool) -> None:
        stream, lora = self._stream(), self._adapters(aligning)
        trained, own = (self.network, "policy") if lora is None else (lora.flat, "lora")
        moments = {name: trained.layout.pack(take(arrays, f"adam.{name}")) for name in ("first", "second")}
        self.network.layout.pack(take(arrays, "ema"))  # nothing is written unless everything fits
        if nft := aligning and self.config.align.objective == "nft":
            trained.layout.pack(take(arrays, "old"))
        trained.from_host(take(arrays, own), stream)
        self.average.from_host(take(arrays, "ema"), stream)
        self._train(lora)
        if lora is not None:
            self._from_average(stream)
        device.write(self.first, moments["first"])
        device.write(self.second, moments["second"])
        self.updates, self._aligning, self._begun = updates, aligning, None
        self._begin_old(nft)
        if nft:
            self.old.from_host(take(arrays, "old"), stream)

    def begin_alignment(self, weights: dict[str, np.ndarray] | None = None) -> None:
        stream = self._stream()
        if weights is not None:
            self.average.from_host(weights, stream)
        self.average.refresh(stream)  # its numbers alone were kept up to date
        self._train(self._adapters(aligning=True))
        self._from_average(stream)
        self.updates, self._aligning, self._begun = 0, True, None
        self._begin_old(self.config.align.objective == "nft")
        self._base = None
        if self.loop is not None:
            self.loop.renew()

    def _from_average(self, stream: int) -> None:
        """The network's weights are the average, with the adapters where there are such."""
        device.assign(self.network.data, self.average.data)
        self.network.refresh(stream)
        self._merge(stream)

    def _merge(self, stream: int) -> None:
        """The network's weights have the adapters, where there are such."""
        if self.lora is not None:
            self.lora.put(self.parameters.data, stream)

    # --------------------------------------------------------------------------------------- the optimizer

    def _write_scalars(self, lr: float, step: int | None = None) -> None:
        """What the next update needs; step: of the base training, for the decay of the average."""
        decay = 0.0 if self._aligning else self.config.base.weight_decay
        scalars = cuda_optimizer.step_scalars(
            self.updates + 1, lr, BETAS, decay, None if step is None else self.config.base.ema, step
        )
        device.write(self.memory_of("scalars", (8,)), scalars)

    def _update(self, stream: int, limit: float, norm: DeviceArray, average: DeviceArray | None) -> None:
        """Clip the gradient and step, unless its norm is not finite; with a loop the step follows when the
        constraint lets it.
        """
        scalars, squares = self.memory_of("scalars", (8,)), self.memory_of("squares", (1,), "float64")
        if self.lora is not None:
            self.lora.project(stream)
        cuda_optimizer.sum_of_squares(self.parameters.grad, squares, stream)
        cuda_optimizer.clip_scalars(squares, scalars, stream, limit=limit, norm=norm)
        if self.loop is None:
            self._apply(stream, average)

    def _apply(self, stream: int, average: DeviceArray | None) -> None:
        """The step, and the copies of the weights with it; nothing where the norm was not finite."""
        p, scalars = self.parameters, self.memory_of("scalars", (8,))
        cuda_optimizer.adamw(
            p.layout.table, p.data, p.grad, self.first, self.second, scalars, stream, average=average,
            betas=BETAS, **p.copies(),
        )  # fmt: skip
        p.refresh_padded(stream)
        self._merge(stream)

    def _begin_old(self, nft: bool) -> None:
        """NFT's old policy, which begins as the policy; none for others."""
        self.old = self.parameters.clone(self._stream()) if nft else None
        for key in [key for key in self._graphs if "nft" in key or "old" in key]:
            self._graphs.pop(key)  # they read the one before

    def _counted(self, result: StepResult) -> StepResult:
        self.updates += result.finite
        return result

    # ------------------------------------------------------------------------------------- the base model

    def base_step(self, data: BaseData, step: int, lr: float) -> StepResult:
        """One step of the base training; nothing is updated where the gradient is not finite."""
        if data is not self._base:
            self._begin_base(data)
        at, rows = self._ahead
        rows, self._at = rows if at == step else self._rows(data, step), step
        device.write(self.memory_of("base rows", rows.shape, "int64"), rows)
        device.write(self.memory_of("base number", (1,), "uint32"), np.array([step]))
        self._write_scalars(lr, step)
        batch, average = self.config.base.batch, self.average.data
        found = self._learnt(self._base_once, batch, lambda: self._base_pictures(data, rows, step), average)
        result = self._counted(StepResult(found["loss"], found["norm"], {}))
        self.learned(own=True)
        return result

    def _base_once(self, some: slice) -> dict[str, float]:
        """Loss and norm of the gradient of the pictures `some`, all of them or fewer."""
        batch, at = self.config.base.batch, int(self._at)
        if some == slice(0, batch):
            self._run(("base",), self._base_graph)
        else:
            self._run(("base part", some.start, some.stop), lambda stream: self._base_graph(stream, some))
        if self._ahead[0] != at + 1:
            self._ahead = at + 1, self._rows(self._base, at + 1)  # while the GPU works
        found = device.to_host(self.memory_of("base results", (some.stop - some.start + 1,), "float64"))
        return {"loss": float(found[:-1].mean()), "norm": float(found[-1])}

    def _base_pictures(self, data: BaseData, rows: np.ndarray, step: int) -> Pictures:
        """What the rows are about, on the host."""
        row, t, worded = rows
        captions = None if data.captions is None else data.captions[row] * (worded >= 0)[:, None]
        eps = normal(data.seeds["noise"], step, (len(row), *self.model.shape))
        return Pictures(data.pictures[row], captions, t, eps, own=True)

    def _rows(self, data: BaseData, step: int) -> np.ndarray:
        """(3, batch) of one step: row of the picture, noise level, row of the caption or -1."""
        row, t, keep = data.draw(step, self.config.base.batch, self.config.base.drop_caption)
        return np.stack([row, t, np.where(keep, row, -1)])

    def _begin_base(self, data: BaseData) -> None:
        """Other pictures: into the place of those before where they are as many, so that the graph stays."""
        self._ahead = -1, np.empty(0)
        arrays = data.pictures, data.captions
        shapes = [None if a is None else a.shape for a in arrays]
        if self._base is None or shapes != [None if x is None else x.shape for x in self._shown]:
            self._forget("base")
            self._shown = tuple(None if a is None else device.from_host(a, self.like, "data") for a in arrays)
        else:
            for held, array in zip(self._shown, arrays, strict=True):
                if held is not None:
                    device.write(held, array)
        device.write(self.memory_of("base seed", (1,), "uint64"), np.array([data.seeds["noise"]], np.uint64))
        self._base = data

    def _base_graph(self, stream: int, some: slice | None = None) -> None:
        batch, shape = self.config.base.batch, self.model.shape
        rows = self.memory_of("base rows", (3, batch), "int64")
        row, t, worded = (device.operand(rows.owner[i], "rows") for i in range(3))
        eps = device.empty((batch, *shape), "float32", self.like)
        whole = device.reshape(eps, (1, eps.size))  # one seed draws for the batch, as on the CPU
        self._normal("base", whole, stream)
        pictures, captions = self._shown
        if some is not None:
            row, t, worded, eps = (_part(a, some.start, some.stop) for a in (row, t, worded, eps))
            batch = some.stop - some.start
        x, target = self._noised(pictures, row, eps, t, stream)
        output = self._forward(x, t, self._bag(captions, worded, stream))
        found = self.memory_of("base results", (batch + 1,), "float64")
        prediction = device.operand(output.data, "output")
        gradient = device.empty(x.shape, "float32", self.like)
        cuda_diffusion.squared_error(prediction, target, _part(found, 0, batch), stream)
        cuda_diffusion.squared_error_backward(prediction, target, None, gradient, stream)
        self._backward(output, gradient)
        self._update(stream, self.config.base.clip, _part(found, batch, batch + 1), self.average.data)

    def _normal(self, name: str, out: DeviceArray, stream: int) -> None:
        """Noise of the seed and the number that are written for `name`."""
        seed = self.memory_of(f"{name} seed", (1,), "uint64")
        cuda_diffusion.normal(
            seed, self.memory_of(f"{name} number", (1,), "uint32"), out, stream, stream_word=NOISE
        )

    def _noised(self, pictures, row, eps, t, stream: int) -> tuple[DeviceArray, DeviceArray]:
        """(x_t, target) of the rows."""
        x, target = (device.empty(eps.shape, "float32", self.like) for _ in range(2))
        cuda_diffusion.add_noise(
            pictures, row, eps, t, self.alpha_bar, self.model.prediction, stream, x_t=x, target=target
        )
        return x, target

    def _bag(self, captions: DeviceArray | None, row: DeviceArray, stream: int) -> DeviceArray | None:
        """Bags of words of the rows; a row of -1 has no caption."""
        if captions is None:
            return None
        bag = device.empty((row.size, captions.shape[1]), "bfloat16", self.like)  # zeros and ones, exact
        cuda_elementwise.take_rows(captions, row, bag, stream)
        return bag

    def _forward(self, x: DeviceArray, t: DeviceArray, bag: DeviceArray | None) -> Any:
        with tracks(self.track):
            return self._network(x, t, bag)

    def _backward(self, output: Any, gradient: DeviceArray) -> None:
        self.model.unet.zero_grad()
        output.backward(gradient.owner)
