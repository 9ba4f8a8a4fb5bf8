"""Sampling on a GPU: the network, the pictures and their noise live there; each kind of step is one captured
graph.

What differs from step to step (noise levels, seeds, the sampler's coefficients) is written to fixed buffers
before a replay. Draws and formulas are the CPU's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from .. import device
from ..adapters import DeviceArray
from ..backends import cuda, cuda_diffusion, cuda_math
from ..diffusion.noise import NOISE
from ..diffusion.samplers import START, Step, check_guidance, coefficients, plan
from ..errors import CudaError, ShapeError
from ..extras import require
from ..nn.cuda.graph import Graph
from ..nn.cuda.watch import current
from ..nn.tape import no_grad
from ..nn.unet import pixel_shuffle
from ..routing import bucket_of
from ..tracks import tracks


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
    """Named buffers of the device, made at first use; one name has one for each shape and dtype."""

    def __init__(self, like: DeviceArray):
        self.like, self._held = like, {}

    def __call__(self, name: str, shape: Sequence[int], dtype: str = "float32") -> DeviceArray:
        key = name, tuple(shape), dtype
        if key not in self._held:
            self._held[key] = device.full(shape, 0, dtype, like=self.like, name=name)
        return self._held[key]

    def drop(self, *names: str) -> None:
        """Forget the buffers of these names. Graphs that read them must be gone before."""
        for key in [key for key in self._held if key[0] in names]:
            del self._held[key]


#: Graphs of a kind of step that are kept, one a route: each has a pool as large as the step. Of sampling all
#: buckets of noise levels have their routes, before and after a decision.
KEPT = 4


def _part(x: DeviceArray, start: int, stop: int) -> DeviceArray:
    """x[start:stop], a view."""
    return device.operand(x.owner[start:stop], x.name)


class Way(NamedTuple):
    """How pictures are drawn: what graphs of the sampler differ in."""

    sampler: str
    track: str
    guidance: float


class CudaSampler:
    """A model on the GPU that draws pictures; the model's network is moved there.

    On the FP4 track each noise level runs on the model's `routes`, if it has some. `routed`: whether the
    layers' tracks may change from one call to another.
    """

    routed = False

    def __init__(self, model: Any):
        self.model, self.like = model, place()
        model.unet.cuda(self.like.owner)
        self.memory_of, self._graphs = _Memory(self.like), {}
        self._layers = [m for _, m in model.unet.named_modules() if getattr(m, "routed", False)]

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

    def _run(self, key: tuple, function: Callable[[int], None], routed: bool = False) -> None:
        """Run `function`, of what lies in the buffers: the first time as it is, then as a captured graph; of
        each route that the layers are on its own, where `routed` says that it changes.
        """
        if watched := tuple(w for w in current() if not w.recorded):
            key = (*key, watched)  # whose launches are part of the graph
        if routed:
            key = self._on_route(key)
        graph = self._graphs.get(key)
        if graph is None:
            graph = Graph(self.like)
            graph.capture(function, warmups=1)
            self._graphs[key] = graph
        else:
            graph.replay(self._stream())

    def _on_route(self, kind: tuple) -> tuple:
        """The key of a kind of step on the layers' present route; room for its graph, that used last goes
        last.
        """
        key = (*kind, frozenset(m.key for m in self._layers if m.track == "fp4"))
        if key in self._graphs:
            self._graphs[key] = self._graphs.pop(key)
            return key
        routes = getattr(self.model, "routes", None)
        most = KEPT if routes is None else max(KEPT, 2 * len(routes.buckets))
        held = [k for k in self._graphs if k[:-1] == kind and isinstance(k[-1], frozenset)]
        for old in held[: max(0, len(held) + 1 - most)]:
            del self._graphs[old]
        return key

    def _forget(self, *kinds: str) -> None:
        """Drop the graphs of these kinds of steps, on every route."""
        for key in [key for key in self._graphs if key[0] in kinds]:
            del self._graphs[key]

    def _stream(self) -> int:
        return device.launch("train", None, (self.like,))

    def _network(self, x: DeviceArray, t: DeviceArray, bag: DeviceArray | None) -> Any:
        """The network's output as a variable."""
        return self.model.unet(x.owner, t.owner, captions=None if bag is None else bag.owner)

    # -------------------------------------------------------------------------------------------- sampling

    def draw(
        self,
        seeds: Any,
        captions: Sequence[str],
        steps: int,
        track: str = "bf16",
        sampler: str | None = None,
        guidance: float | None = None,
    ) -> np.ndarray:
        """Pictures of the policy, as `Denoiser.draw`.

        All x lie in the scale that the network sees, in which every schedule is a VP one.
        """
        model, of = self.model, self.model.config.diffusion
        if len(seeds) != len(captions):
            raise ShapeError(f"draw: there are {len(captions)} captions but {len(seeds)} seeds; give one "
                             f"caption a seed")  # fmt: skip
        way = Way(of.sampler if sampler is None else sampler, track,
                  check_guidance(of.guidance if guidance is None else guidance))  # fmt: skip
        seeds, bags = np.array(seeds, np.uint64), model.encode(captions)
        made = plan(way.sampler, model.schedule, steps)
        _, table = coefficients(way.sampler, model.schedule, steps)
        scale = model.schedule.start_scale / model.schedule.norm[made[0].t]
        pictures = np.empty((len(seeds), *model.shape), np.float32)
        routes = getattr(model, "routes", None) if track == "fp4" else None
        with nullcontext() if routes is None else self._returning():
            self._draw_chunks(pictures, seeds, bags, made, table, scale, way)
        return np.ascontiguousarray(pixel_shuffle(pictures, model.config.model.unshuffle))

    def _draw_chunks(self, pictures, seeds, bags, made, table, scale, way) -> None:
        """Fill `pictures`, chunk after chunk."""
        chunk = self.model.config.diffusion.chunk
        for start in range(0, len(seeds), chunk):
            count = min(chunk, len(seeds) - start)
            rows = np.minimum(np.arange(start, start + chunk), start + count - 1)
            x = self._noise_of(seeds[rows], scale)
            device.write(self.memory_of("bag", (chunk, bags.shape[1])), bags[rows])
            sound = self.memory_of("sound", (chunk,))
            device.write(sound, np.zeros(chunk))
            for step, row in zip(made, table, strict=True):
                self._advance(x, step, row, bags.shape[1], way)
            drawn = device.to_host(x) + device.to_host(sound).reshape(-1, *(1,) * (x.ndim - 1))
            pictures[start : start + count] = drawn[:count]

    @contextmanager
    def _returning(self) -> Iterator[None]:
        """The layers' tracks are afterwards as they were."""
        before = {layer.key: layer.track for layer in self._layers}
        try:
            yield
        finally:
            self.model.unet.apply_route(before)

    def _route(self, t: int, way: Way) -> bool:
        """Put the layers on the route of a noise level where it has one; whether routes change at all."""
        routes = getattr(self.model, "routes", None)
        if way.track != "fp4":
            return False
        if routes is not None:
            levels = len(self.model.schedule)
            self.model.unet.apply_route(routes.of(bucket_of(int(t), levels, len(routes.buckets))))
        return routes is not None or self.routed

    def _advance(self, x: DeviceArray, step: Step, row: np.ndarray, words: int, way: Way) -> None:
        """x after one evaluation of the network (two with guidance), in place."""
        chunk = x.shape[0]
        device.write(self.memory_of("level", (chunk,), "int64"), np.full(chunk, step.t))
        device.write(self.memory_of("coefficients", (8,)), row)
        device.write(self.memory_of("number", (1,), "uint32"), np.array([step.t + 1]))
        if way.sampler == "heun" and not step.corrects:
            device.assign(self.memory_of("z", x.shape), x)
        routed = self._route(step.t, way)
        self._run(("sample", way, chunk), lambda stream: self._sample(stream, x, words, way), routed)

    def _noise_of(self, seeds: np.ndarray, scale: float = 1.0) -> DeviceArray:
        """The start noise of one chunk times `scale`, in the buffer that the sampler works in."""
        x = self.memory_of("x", (len(seeds), *self.model.shape))
        device.write(self.memory_of("seeds", seeds.shape, "uint64"), seeds)
        device.write(self.memory_of("number", (1,), "uint32"), np.array([START]))
        self._noise_into(x, self._stream())
        if scale != 1:
            raw = cuda_math.of(x).raw(x)
            raw *= np.float32(scale)
        return x

    def _noise_into(self, out: DeviceArray, stream: int) -> DeviceArray:
        """`out`, filled with the noise whose number lies in its buffer, of the pictures' seeds."""
        where = self.memory_of("seeds", out.shape[:1], "uint64"), self.memory_of("number", (1,), "uint32")
        cuda_diffusion.normal(*where, out, stream, stream_word=NOISE)
        return out

    def _sample(self, stream: int, x: DeviceArray, words: int, way: Way) -> None:
        """One step of the sampler; z is noise, or what the caller kept, or there is none."""
        chunk = x.shape[0]
        level, bag = self.memory_of("level", (chunk,), "int64"), self.memory_of("bag", (chunk, words))
        with no_grad(), tracks(None if way.track == "fp4" else way.track):
            output = self._guided(x, level, bag, way.guidance)
        z = self.memory_of("z", x.shape) if way.sampler in ("ancestral", "heun") else None
        if way.sampler == "ancestral":
            self._noise_into(z, stream)
        # The step clips: what is not finite would come out as a pixel. NaN stays in a sum of zeros.
        raw = cuda_math.of(output).raw
        held = raw(self.memory_of("sound", (chunk,)))
        held += (raw(output) * np.float32(0)).reshape(chunk, -1).sum(axis=1)
        table, prediction = self.memory_of("coefficients", (8,)), self.model.prediction
        cuda_diffusion.sampler_step(output, z, table, prediction, x, stream)

    def _guided(self, x: DeviceArray, level: DeviceArray, bag: DeviceArray, guidance: float) -> DeviceArray:
        """The network's output, or `samplers.guided`'s."""

        def output(of: DeviceArray) -> DeviceArray:
            return device.operand(self._network(x, level, of).data, "output")

        if guidance == 1:
            return output(bag)
        without = output(self.memory_of("no caption", bag.shape))  # zeros, never written
        if guidance == 0:
            return without
        found = output(bag)
        raw, low = (cuda_math.of(a).raw(a) for a in (found, without))
        raw -= low
        raw *= np.float32(guidance)
        raw += low
        return found
