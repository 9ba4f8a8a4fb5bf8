"""The closed loop on a GPU: graphs of each route, what sampled steps measure, the constraint.

A mixin of `device.CudaEngine`. Forward and backward are one graph, the update follows when the constraint
lets it: what the host looks at lies beside the loss, for which it waits anyway. A step that breaks the
constraint is never applied; it runs again with those layers on BF16, as the graph of another route.

Sampled steps run as calls, with a `Probe` of both tracks' products and sketches of some. Certificates of all
FP4 products are made in the graphs (`nn.cuda.certificates`) and read beside the loss. With a limit on them
products are summed with promotion: of faster sums too little is proven to be limited.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .. import device
from ..adapters import DeviceArray
from ..backends import cuda_diffusion
from ..consistency import Consistency, Constraint
from ..diffusion.noise import subseed
from ..errors import ConfigError
from ..nn.cuda.certificates import Certificates, Found
from ..nn.cuda.lora import DeviceLoRA
from ..nn.cuda.parameters import DeviceParameters
from ..nn.cuda.sketches import Sketches
from ..nn.cuda.watch import Clock, Probe, watching
from ..nn.tape import Variable
from ..nn.unet import UNet2D
from ..routing import ClosedLoop, layer_traces, squared_error_scale, work
from ..tracks import tracks
from ..tune import LatencyTable
from .host_loop import HostLoop, Once, Pictures
from .policy import Data, PairData, TrajectoryData

BETAS = (0.9, 0.999)


def check_routes(route: Mapping[str, str], routes: Any) -> None:
    """`ConfigError` for routes that the GPU does not run."""
    for one in (route, *routes):
        for pattern, kind in one.items():
            if kind not in ("fp4", "bf16"):
                raise ConfigError(f"--route: {pattern} is on {kind!r}, but on the GPU a network runs on "
                                  f"'fp4' and 'bf16'; choose one, or leave out --device")  # fmt: skip


class ToldConstraint(Constraint):
    """A constraint that is told what the device has found of products, in place of watching them."""

    def take(self, found: Mapping[str, Found]) -> None:
        """{layer: its certificate} of the layers that ran on FP4."""
        for name, of in found.items():
            self.ratios[name] = of.ratio
            self._seen[name] = [of.product**2, float(of.elements), of.weight]


class ToldConsistency(Consistency):
    """A consistency that is told its ratios."""

    def take(self, ratios: Mapping[str, float]) -> None:
        """{layer: |f_fp4 - f_bf16|^2 / |f_bf16|^2} of this step's chosen layers."""
        self._ratios = {name: [ratio] for name, ratio in ratios.items()}


class CudaLoop(HostLoop):
    """The part of `CudaEngine` that a closed loop drives."""

    loop: ClosedLoop | None = None
    lora: DeviceLoRA | None = None
    network: DeviceParameters
    parameters: DeviceParameters  # what is trained: the network's or the adapters'
    like: DeviceArray
    _own_track: str | None = "bf16"  # without a loop
    _mode: str = ""  # "step": a step's own forward and backward; "look": one that only looks; else neither
    _certificates: Certificates | None = None
    _shadow: UNet2D | None = None
    _norm: float = 0.0  # of the gradient of the last attempt

    def use(self, loop: ClosedLoop | None) -> None:
        """Train on the routes of `loop` from now on; None: on BF16."""
        super().use(loop)
        self.track, self.routed = (self._own_track, False) if loop is None else (loop.track, True)
        self._forget("base", "dpo", "nft", "ppo", "ppo old", "sample")
        self._certificates, network = None, self.model.unet.network
        network.accumulate = "fast" if loop is None or loop.settings.limit == 0 else "promoted"
        if loop is None:
            return
        s = loop.settings
        loop.constraint = ToldConstraint(s.limit, s.jump, s.cooldown)
        seed = subseed(self.config.seed, "loop")
        loop.consistency = ToldConsistency(s.consistency, s.consistency_layers, seed)
        loop.parameter = self._host_parameter
        self._certificates = Certificates(self.model.unet, recorded=True)

    # ---- graphs
    def _run(self, key: tuple, function: Callable[[int], None], routed: bool = False) -> None:
        """Each route of training has graphs of its own; sampled steps, and those that look, run as calls."""
        if self.loop is None or key[0] == "sample":
            super()._run(key, function, routed)
        elif self._mode == "look":
            self._call(function)
        elif self._mode == "step":
            self._run_step(key, function)
        else:
            super()._run(key, function, routed=True)

    def _call(self, function: Callable[[int], Any]) -> Any:
        with device.ordered("train", None, (self.like,)) as stream:
            return function(stream)

    def _run_step(self, key: tuple, function: Callable[[int], None]) -> None:
        certificates, chosen = self._certificates, self.loop.consistency.chosen

        def watched(stream: int, *more: Any) -> None:
            certificates.begin()
            with watching(certificates, *more):
                function(stream)
            certificates.end(self.network)

        if not chosen:
            super()._run(key, watched, routed=True)
            return
        probe = Probe((), chosen, self.loop.consistency.weight)
        sketches = Sketches(self.loop.sketcher)
        self._call(lambda stream: watched(stream, probe, sketches))
        probe.read()
        sketches.read()
        self.loop.consistency.take(probe.ratios)

    # ---- a step
    def learn(self, once: Once, count: int, pictures: Callable[[], Pictures]) -> Any:
        """As `HostLoop.learn`, with a loop. What `once` returns is a dict with the gradient's "norm"."""
        with self.loop.step():
            if self.loop.deciding and self.loop.sampled():
                self._observe(once, count, pictures())
            return self.loop.checked(lambda: self._attempt(once, count), self._broken)

    def _attempt(self, once: Once, count: int) -> Any:
        self._mode = "step"
        try:
            found = once(slice(0, count))
        finally:
            self._mode = ""
        self._norm = found["norm"]
        self.loop.constraint.take(self._certificates.read())
        return found

    def _broken(self) -> dict[str, np.ndarray]:
        """The layers' gradients where the norm of all is not finite; else none, for all of them are."""
        return {} if math.isfinite(self._norm) else self.gradients()

    def _gradient_views(self) -> dict[str, np.ndarray]:
        return self.parameters.state(self.parameters.grad)

    def _learnt(self, once: Once, count: int, pictures: Callable[[], Pictures], average: Any) -> Any:
        """What `once` gives of all entries; with a loop the update is not in its graph, but follows."""
        if self.loop is None:
            return once(slice(0, count))
        found = self.learn(once, count, pictures)
        self._call(lambda stream: self._apply(stream, average))  # as calls: what it renews may be new
        return found

    def learned(self, own: bool) -> None:
        """The update is made. own: the moments are those of the network's own loss."""
        loop, moments = self.loop, None
        if loop is None:
            return
        if loop.deciding and loop.sampled():
            self._refresh_shadow()
            if own and self.updates:
                unbiased = np.float32(1 / (1 - BETAS[1] ** self.updates))
                found = self.parameters.state(self.second)
                moments = {n: found[n] * unbiased for n in loop.free if n in found}
        loop.after(moments=moments)

    # ---- the weights on the host
    def _refresh_shadow(self) -> UNet2D:
        """A network on the host with the weights of now: what is computed of them alone is computed there."""
        unet = self.model.unet
        if self._shadow is None:
            self._shadow = UNet2D(unet.config, seed=0)
        self._shadow.load_state_dict(self.network.to_host())
        return self._shadow

    def _host_parameter(self, name: str) -> Any:
        return (self._shadow or self._refresh_shadow()).flat.named.get(name)

    # ---- sampled steps
    def _gradient(self, once: Once, part: slice, route: Mapping[str, str]) -> dict[str, np.ndarray]:
        self._mode = "look"
        try:
            with self.loop.routed(route):
                once(part)
        finally:
            self._mode = ""
        return self.gradients()

    def _pictures(self, data: Data, some: slice) -> Pictures:
        """The clean pictures that the entries `some` are about, at their noise levels."""
        row = data.row[some]
        if isinstance(data, TrajectoryData):
            return Pictures(data.latents[-1][row], data.captions[row], data.timesteps[data.step[some]])
        x0 = data.chosen if isinstance(data, PairData) else data.pictures
        return Pictures(x0[row], data.captions[row], data.t[some])

    def _sensitivity(self, some: Pictures, bucket: int | None) -> None:
        """As `HostLoop._sensitivity`, with a `Probe`."""
        loop, outputs = self.loop, math.prod(self.model.shape)
        some = some if bucket is None else self._of_bucket(some, bucket)
        probe = Probe(frozenset(loop.free), operands=loop.operands)
        with loop.routed(loop.slow_route()):
            loss = self._own_loss(some, probe)
        if not math.isfinite(loss):
            return
        probe.read()
        scale = max(squared_error_scale(loss, outputs), 1e-30)
        squares = None
        # Adam's moments are of another loss, or of all levels at once
        if self.lora is None and not (some.own and bucket is None):
            squares = {n: np.square(g, dtype=np.float64) for n, g in self.gradients().items()}
        loop.observe(
            loss=loss, batch=len(some.x0), outputs=outputs, squares=squares, bucket=bucket,
            activation={n: scale * value for n, value in probe.omega.items()},
        )  # fmt: skip

    def _of_bucket(self, some: Pictures, bucket: int) -> Pictures:
        """The pictures at noise levels of a bucket, with new noise."""
        loop = self.loop
        low, high = (-(-b * loop.timesteps // loop.router.buckets) for b in (bucket, bucket + 1))
        return Pictures(some.x0, some.captions, low + some.t * (high - low) // loop.timesteps, None)

    def _inputs(self, some: Pictures) -> tuple[np.ndarray, np.ndarray]:
        """(x_t as the network sees it, target) of pictures."""
        x, target = self._noisy(some)
        return self.model.schedule.scale_input(x, some.t), target

    def _own_loss(self, some: Pictures, *watchers: Any) -> float:
        """Mean squared error of the prediction; afterwards the parameters hold its gradient."""
        x, target = (self._put(a.astype(np.float32)) for a in self._inputs(some))
        found = device.empty((len(some.x0),), "float64", self.like)

        def once(stream: int) -> None:
            with watching(*watchers):
                output = self._forward(x, self._put(some.t.astype(np.int64)), self._put(some.captions))
            prediction = device.operand(output.data, "output")
            gradient = device.empty(x.shape, "float32", self.like)
            cuda_diffusion.squared_error(prediction, target, found, stream)
            cuda_diffusion.squared_error_backward(prediction, target, None, gradient, stream)
            self._backward(output, gradient)

        self._call(once)
        return float(device.to_host(found).mean())

    def _put(self, array: np.ndarray | None) -> DeviceArray | None:
        return None if array is None else device.from_host(np.ascontiguousarray(array), self.like)

    def _traces(self, some: Pictures) -> dict[str, Any]:
        """Traces of the Hessian blocks, on the host: the device's network has no second derivatives."""
        c, loop, shadow = self.config.loop, self.loop, self._refresh_shadow()
        shadow.apply_route(loop.slow_route())
        x, target = self._inputs(some)

        def loss() -> Variable:
            with tracks(None):
                off = shadow(x, some.t, captions=some.captions) - target
            return (off * off).mean()

        named = {n: p for n in loop.free if (p := loop.parameter(n)) is not None}
        seed = subseed(self.config.seed, "loop", loop.number)
        return layer_traces(loss, named, c.probes, seed, c.sensitivity)

    def _latency(self, some: Pictures) -> dict[str, dict[str, float]]:
        """Measured microseconds of both tracks, kept in the cache's table from run to run."""
        loop, clock = self.loop, Clock()
        if self.latencies is None:
            self.latencies = LatencyTable.load()
        with loop.routed(loop.slow_route()):
            self._own_loss(some, clock)
        table, sizes = self.latencies, work(self.model.unet, some.x0.shape)
        found: dict[str, dict[str, float]] = {}
        for name, times in clock.times.items():
            of = sizes[name]
            for track, time in times.items():
                table.update(of.op, of.shape, track, self.device, time)
                held = table.get(of.op, of.shape, track, self.device)
                found.setdefault(name, {})[track] = time if held is None else held.microseconds
        if not table.frozen:
            table.save()
        return {name: times for name, times in found.items() if name in loop.router.layers}
