"""The engine of a run on a GPU: weights, average, moments, data and noise live there; each kind of step is
one captured graph.

What differs from step to step (which pictures, noise levels, seeds, learning rate) is written to fixed
buffers before a replay. The host waits once a step, for loss and norm, because the number of updates so far,
which the next step needs, depends on whether they are finite. Draws and noise are the CPU's; so are the
formulas.

Training runs on the BF16 track, as on the CPU; `track` is for comparisons.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import device
from ..adapters import DeviceArray
from ..backends import cuda, cuda_diffusion, cuda_elementwise, cuda_math, cuda_optimizer
from ..backends.cuda_diffusion import DPO_STATS
from ..diffusion.noise import NOISE
from ..diffusion.samplers import START, coefficients
from ..errors import ConfigError, CudaError, ShapeError
from ..nn.cuda.graph import Graph
from ..nn.tape import no_grad
from ..nn.unet import pixel_shuffle
from ..tracks import tracks
from .checkpoint import give, take
from .config import Config
from .engine import BaseData, PairData, StepResult
from .extras import require

BETAS = (0.9, 0.999)


def place() -> DeviceArray:
    """An array on the GPU that CuPy has as its current one: what others are made like.

    Raises `ImportError` without CuPy, `LibraryError` without the compiled library, `CudaError` without a GPU:
    each a sentence with the fix.
    """
    cupy = require("cupy", "--device cuda", extra="cuda")
    if not cuda.load().device_count():
        raise CudaError("--device cuda: the driver has no GPU; leave out --device to run on the CPU")
    return device.operand(cupy.zeros(1, np.float32), "device")


class _Memory:
    """Named buffers of the device, made at first use."""

    def __init__(self, like: DeviceArray):
        self.like, self._held = like, {}

    def __call__(self, name: str, shape: Sequence[int], dtype: str = "float32") -> DeviceArray:
        key = name, tuple(shape)
        if key not in self._held:
            self._held[key] = device.full(shape, 0, dtype, like=self.like, name=name)
        return self._held[key]


def _part(x: DeviceArray, start: int, stop: int) -> DeviceArray:
    """x[start:stop], a view."""
    return device.operand(x.owner[start:stop], x.name)


class CudaSampler:
    """A model on the GPU that draws pictures; the model's network is moved there."""

    def __init__(self, model: Any):
        self.model, self.like = model, place()
        model.unet.cuda(self.like.owner)
        self.memory_of, self._graphs = _Memory(self.like), {}

    @property
    def device(self) -> str:
        """What the numbers depend on: the kind of GPU."""
        return f"cuda: {cuda.load().device(self.like.device).name}"

    def memory(self) -> dict[str, float]:
        """MB that CuPy's pool and those of the graphs hold."""
        if self.like.framework != "cupy":
            return {}
        held = sys.modules["cupy"].get_default_memory_pool().total_bytes()
        return {"gpu_mb": round((held + sum(graph.memory for graph in self._graphs.values())) / 1e6, 1)}

    def _run(self, key: tuple, function: Callable[[int], None]) -> None:
        """Run `function`, of what lies in the buffers: the first time as it is, then as a captured graph."""
        graph = self._graphs.get(key)
        if graph is None:
            graph = Graph(self.like)
            graph.capture(function, warmups=1)
            self._graphs[key] = graph
        else:
            graph.replay(self._stream())

    def _stream(self) -> int:
        return device.launch("train", None, (self.like,))

    def _network(self, x: DeviceArray, t: DeviceArray, bag: DeviceArray | None) -> Any:
        """The network's output as a variable."""
        return self.model.unet(x.owner, t.owner, captions=None if bag is None else bag.owner)

    # -------------------------------------------------------------------------------------------- sampling

    def draw(self, seeds: Any, captions: Sequence[str], steps: int, track: str = "bf16",
             sampler: str = "ddim") -> np.ndarray:  # fmt: skip
        """Pictures of the policy, as `Denoiser.draw`."""
        model = self.model
        if len(seeds) != len(captions):
            raise ShapeError(f"draw: there are {len(captions)} captions but {len(seeds)} seeds; give one "
                             f"caption a seed")  # fmt: skip
        chunk, seeds, bags = model.config.diffusion.chunk, np.array(seeds, np.uint64), model.encode(captions)
        timesteps, table = coefficients(sampler, model.schedule, steps)
        pictures = np.empty((len(seeds), *model.shape), np.float32)
        for start in range(0, len(seeds), chunk):
            count = min(chunk, len(seeds) - start)
            rows = np.minimum(np.arange(start, start + chunk), start + count - 1)
            x = self._noise_of(seeds[rows])
            device.write(self.memory_of("bag", (chunk, bags.shape[1])), bags[rows])
            for t, row in zip(timesteps, table, strict=True):
                device.write(self.memory_of("level", (chunk,), "int64"), np.full(chunk, t))
                device.write(self.memory_of("coefficients", (8,)), row)
                device.write(self.memory_of("number", (1,), "uint32"), np.array([t + 1]))
                self._run(("sample", sampler, track, chunk), lambda stream, x=x, bag=bags.shape[1]:
                          self._sample(stream, x, bag, track, sampler))  # fmt: skip
            pictures[start : start + count] = device.to_host(x)[:count]
        return np.ascontiguousarray(pixel_shuffle(pictures, model.config.model.unshuffle))

    def _noise_of(self, seeds: np.ndarray) -> DeviceArray:
        """The start noise of one chunk, in the buffer that the sampler works in."""
        x = self.memory_of("x", (len(seeds), *self.model.shape))
        device.write(self.memory_of("seeds", seeds.shape, "uint64"), seeds)
        device.write(self.memory_of("number", (1,), "uint32"), np.array([START]))
        return self._noise_into(x, self._stream())

    def _noise_into(self, out: DeviceArray, stream: int) -> DeviceArray:
        """`out`, filled with the noise whose number lies in its buffer, of the pictures' seeds."""
        where = self.memory_of("seeds", out.shape[:1], "uint64"), self.memory_of("number", (1,), "uint32")
        cuda_diffusion.normal(*where, out, stream, stream_word=NOISE)
        return out

    def _sample(self, stream: int, x: DeviceArray, words: int, track: str, sampler: str) -> None:
        """One step of the sampler; DDIM here adds no noise."""
        chunk = x.shape[0]
        level, bag = self.memory_of("level", (chunk,), "int64"), self.memory_of("bag", (chunk, words))
        with no_grad(), tracks(None if track == "fp4" else track):
            output = self._network(x, level, bag).data
        noise = None if sampler == "ddim" else self._noise_into(self.memory_of("z", x.shape), stream)
        table, prediction = self.memory_of("coefficients", (8,)), self.model.prediction
        cuda_diffusion.sampler_step(device.operand(output, "output"), noise, table, prediction, x, stream)


class CudaEngine(CudaSampler):
    """`engine.HostEngine` on a GPU; track: of the training's forward."""

    def __init__(self, model: Any, config: Config, track: str | None = "bf16"):
        for pattern, kind in config.route.items():
            if kind not in ("fp4", "bf16"):
                raise ConfigError(f"--route: {pattern} is on {kind!r}, but on the GPU a network runs on "
                                  f"'fp4' and 'bf16'; choose one, or leave out --device")  # fmt: skip
        super().__init__(model)
        self.config, self.track = config, track
        self.parameters = model.unet.flat
        self.average = self.parameters.clone(self._stream())
        moments = (self.memory_of(name, self.parameters.data.shape) for name in ("first", "second"))
        self.first, self.second = moments
        self.alpha_bar = device.from_host(model.schedule.alpha_bar, self.like, "alpha_bar")
        self.updates, self._aligning = 0, False
        self._room = config.align.prompts * config.align.keep // 2  # pairs that the buffers of DPO hold
        self._base: BaseData | None = None
        self._ahead: tuple[int, np.ndarray] = (-1, np.empty(0))  # a step and its rows, drawn early

    # ----------------------------------------------------------------------------------------------- state

    @property
    def size(self) -> int:
        return self.parameters.layout.size

    def state(self) -> dict[str, np.ndarray]:
        p = self.parameters
        arrays = give(p.to_host(), "policy") | give(self.average.to_host(), "ema")
        for name, moment in (("first", self.first), ("second", self.second)):
            arrays |= give(p.state(moment), f"adam.{name}")
        return arrays

    def restore(self, arrays: dict[str, np.ndarray], updates: int, aligning: bool) -> None:
        stream, layout = self._stream(), self.parameters.layout
        moments = {name: layout.pack(take(arrays, f"adam.{name}")) for name in ("first", "second")}
        layout.pack(take(arrays, "ema"))  # nothing is written unless everything fits
        self.parameters.from_host(take(arrays, "policy"), stream)
        self.average.from_host(take(arrays, "ema"), stream)
        device.write(self.first, moments["first"])
        device.write(self.second, moments["second"])
        self.updates, self._aligning = updates, aligning

    def begin_alignment(self, weights: dict[str, np.ndarray] | None = None) -> None:
        stream = self._stream()
        if weights is not None:
            self.average.from_host(weights, stream)
        device.assign(self.parameters.data, self.average.data)
        self.parameters.refresh(stream)
        self.average.refresh(stream)
        zero = np.zeros(self.size, np.float32)
        device.write(self.first, zero)
        device.write(self.second, zero)
        self.updates, self._aligning = 0, True
        self._graphs.pop(("base",), None)  # its pool is as large as a step of training
        self._base = None

    # --------------------------------------------------------------------------------------- the optimizer

    def _write_scalars(self, lr: float, step: int | None = None) -> None:
        """What the next update needs; step: of the base training, for the decay of the average."""
        decay = 0.0 if self._aligning else self.config.base.weight_decay
        scalars = cuda_optimizer.step_scalars(
            self.updates + 1, lr, BETAS, decay, None if step is None else self.config.base.ema, step
        )
        device.write(self.memory_of("scalars", (8,)), scalars)

    def _update(self, stream: int, limit: float, norm: DeviceArray, average: DeviceArray | None) -> None:
        """Clip the gradient and step, unless its norm is not finite; the copies of the weights with it."""
        p, scalars = self.parameters, self.memory_of("scalars", (8,))
        squares = self.memory_of("squares", (1,), "float64")
        cuda_optimizer.sum_of_squares(p.grad, squares, stream)
        cuda_optimizer.clip_scalars(squares, scalars, stream, limit=limit, norm=norm)
        cuda_optimizer.adamw(
            p.layout.table, p.data, p.grad, self.first, self.second, scalars, stream, average=average,
            betas=BETAS, **p.copies(),
        )  # fmt: skip
        p.refresh_padded(stream)

    def _counted(self, result: StepResult) -> StepResult:
        self.updates += result.finite
        return result

    # ------------------------------------------------------------------------------------- the base model

    def base_step(self, data: BaseData, step: int, lr: float) -> StepResult:
        """One step of the base training; nothing is updated where the gradient is not finite."""
        if data is not self._base:
            self._begin_base(data)
        at, rows = self._ahead
        rows = rows if at == step else self._rows(data, step)
        device.write(self.memory_of("base rows", rows.shape, "int64"), rows)
        device.write(self.memory_of("base number", (1,), "uint32"), np.array([step]))
        self._write_scalars(lr, step)
        self._run(("base",), self._base_graph)
        self._ahead = step + 1, self._rows(data, step + 1)  # while the GPU works
        found = device.to_host(self.memory_of("base results", (self.config.base.batch + 1,), "float64"))
        return self._counted(StepResult(float(found[:-1].mean()), float(found[-1]), {}))

    def _rows(self, data: BaseData, step: int) -> np.ndarray:
        """(3, batch) of one step: row of the picture, noise level, row of the caption or -1."""
        row, t, keep = data.draw(step, self.config.base.batch, self.config.base.drop_caption)
        return np.stack([row, t, np.where(keep, row, -1)])

    def _begin_base(self, data: BaseData) -> None:
        self._ahead = -1, np.empty(0)
        self._graphs.pop(("base",), None)
        self._pictures, self._captions = (
            None if array is None else device.from_host(array, self.like, "data")
            for array in (data.pictures, data.captions)
        )
        device.write(self.memory_of("base seed", (1,), "uint64"), np.array([data.seeds["noise"]], np.uint64))
        self._base = data

    def _base_graph(self, stream: int) -> None:
        batch, shape = self.config.base.batch, self.model.shape
        rows = self.memory_of("base rows", (3, batch), "int64")
        row, t, worded = (device.operand(rows.owner[i], "rows") for i in range(3))
        eps = device.empty((batch, *shape), "float32", self.like)
        whole = device.reshape(eps, (1, eps.size))  # one seed draws for the batch, as on the CPU
        self._normal("base", whole, stream)
        x, target = self._noised(self._pictures, row, eps, t, stream)
        output = self._forward(x, t, self._bag(self._captions, worded, stream))
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

    # ------------------------------------------------------------------------------------------------- DPO

    def begin_pairs(self, data: PairData) -> None:
        """Pictures, captions and all noise of one iteration to the device."""
        count = len(data.chosen)
        self._room = max(self._room, count)
        pictures, captions = self._pair_buffers()
        for start, part in ((0, data.chosen), (self._room, data.rejected)):
            device.write(_part(pictures, start, start + count), part)
        device.write(_part(captions, 0, count), data.captions)
        device.write(self.memory_of("dpo seed", (1,), "uint64"), np.array([data.noise[0]], np.uint64))
        device.write(self.memory_of("dpo number", (1,), "uint32"), np.array([data.noise[1]]))
        eps = self.memory_of("dpo noise", (len(data), *self.model.shape))
        self._normal("dpo", device.reshape(eps, (1, eps.size)), self._stream())

    def _pair_buffers(self) -> tuple[DeviceArray, DeviceArray]:
        """Pictures (2 room, ...), the chosen ones first, and captions (room, words): larger than an iteration
        may need, so that one graph serves all.
        """
        words = len(self.model.vocabulary)
        pictures = self.memory_of("dpo pictures", (2 * self._room, *self.model.shape))
        return pictures, self.memory_of("dpo captions", (self._room, words))

    def dpo_step(self, data: PairData, some: slice, lr: float) -> StepResult:
        """One step of DPO on the comparisons `some` of those begun."""
        row, t = data.row[some], data.t[some]
        n, noise = len(row), self.memory_of("dpo noise", (len(data), *self.model.shape))
        index = np.stack([np.concatenate(two) for two in ((row, row + self._room), (t, t), (row, row))])
        device.write(self.memory_of("dpo rows", (3, 2 * n), "int64"), index)
        both = self.memory_of("dpo eps", (2 * n, *self.model.shape))
        for start in (0, n):  # both pictures of a pair have the same noise
            device.assign(_part(both, start, start + n), _part(noise, some.start, some.stop))
        self._write_scalars(lr)
        self._run(("dpo", n, self._room), lambda stream: self._dpo_graph(stream, n))
        found = device.to_host(self.memory_of("dpo results", (len(DPO_STATS) + 2,), "float64")).tolist()
        stats = dict(zip((*DPO_STATS, "norm", "drift"), found, strict=True))
        loss, norm = stats.pop("loss"), stats.pop("norm")
        return self._counted(StepResult(loss, norm, stats))

    def _dpo_graph(self, stream: int, n: int) -> None:
        """`align.dpo.dpo_backward`, then the update."""
        shape, unet, c = self.model.shape, self.model.unet, self.config.align
        rows = self.memory_of("dpo rows", (3, 2 * n), "int64")
        row, t, worded = (device.operand(rows.owner[i], "rows") for i in range(3))
        pictures, captions = self._pair_buffers()
        x, target = self._noised(pictures, row, self.memory_of("dpo eps", (2 * n, *shape)), t, stream)
        bag = self._bag(captions, worded, stream)
        anchor, errors, weight = (device.empty((2 * n,), "float64", self.like) for _ in range(3))
        with no_grad(), unet.using(self.average):
            frozen = device.operand(self._forward(x, t, bag).data, "frozen")
        cuda_diffusion.squared_error(frozen, target, anchor, stream)
        output = self._forward(x, t, bag)
        prediction = device.operand(output.data, "output")
        gradient = device.empty(x.shape, "float32", self.like)
        cuda_diffusion.squared_error(prediction, target, errors, stream)
        found, count = self.memory_of("dpo results", (len(DPO_STATS) + 2,), "float64"), len(DPO_STATS)
        cuda_diffusion.dpo(errors, anchor, c.beta, weight, _part(found, 0, count), stream)
        cuda_diffusion.squared_error_backward(prediction, target, weight, gradient, stream)
        hold(prediction, frozen, gradient, self.config.model.unshuffle**2, c.beta * c.hold,
             _part(found, count + 1, count + 2))  # fmt: skip
        self._backward(output, gradient)
        self._update(stream, c.clip, _part(found, count, count + 1), None)


def hold(output: DeviceArray, frozen: DeviceArray, gradient: DeviceArray, phases: int, weight: float,
         drift: DeviceArray) -> None:  # fmt: skip
    """Adds to `gradient` that of ``weight mean(d²)``, d as of `align.dpo.phase_drift`; drift (1,) float64:
    the root of the mean of d².
    """
    xp = cuda_math.of(output)
    difference = xp.raw(output) - xp.raw(frozen)
    mean = difference.reshape(-1, output.shape[-1]).mean(axis=0, dtype=np.float64).reshape(-1, phases)
    d = (mean - mean.mean(axis=1, keepdims=True)).reshape(-1)
    xp.raw(drift)[...] = (d * d).mean() ** 0.5
    if weight:
        target = xp.raw(gradient)
        target += (2 * weight / output.size * d).astype(np.float32)
