"""The closed loop on the CPU: steps on the route in force, and what sampled steps measure.

A mixin of `engine.HostEngine`. Without a loop a step is forward and backward on BF16 and nothing else.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..diffusion.losses import squared_error
from ..diffusion.noise import normal, subseed
from ..errors import NonFiniteError
from ..nn.optim import AdamW
from ..nn.tape import Variable
from ..routing import (
    ActivationProbe,
    ClosedLoop,
    RouteSet,
    layer_traces,
    measure,
    squared_error_scale,
)
from ..tune import LatencyTable
from .config import Config
from .denoiser import Denoiser, base_routes

#: once(part): loss and more of the entries of a step in a slice; afterwards the parameters hold the gradient.
Once = Callable[[slice], tuple[float, Any]]


@dataclass(frozen=True, eq=False)
class Pictures:
    """What the network's own loss is measured on: clean folded pictures (n, h, w, c), bags or None, noise
    levels (n,), noise like the pictures (None: drawn). own: the step's loss is this very one.
    """

    x0: np.ndarray
    captions: np.ndarray | None
    t: np.ndarray
    eps: np.ndarray | None = None
    own: bool = False

    def part(self, some: slice) -> Pictures:
        """The pictures of a slice."""
        captions, eps = (None if a is None else a[some] for a in (self.captions, self.eps))
        return Pictures(self.x0[some], captions, self.t[some], eps, self.own)


def make_loop(config: Config, model: Denoiser) -> ClosedLoop | None:
    """The closed loop of a run; None where its training's forward is on BF16.

    >>> from fp4bf16.train.config import get_preset, override
    >>> from fp4bf16.train.data import Vocabulary
    >>> config = override(get_preset("ci"), ["loop.forward=router"])
    >>> loop = make_loop(config, Denoiser(config, Vocabulary(("cat", "face"))))
    >>> loop.route()["conv_in.weight"], len(loop.free) > 20
    ('bf16', True)
    """
    if config.loop.forward == "bf16":
        return None
    return ClosedLoop(
        model.unet, config.route, config.loop, config.diffusion.timesteps, subseed(config.seed, "loop"),
        config.base.batch, routes=base_routes(config), shape=model.shape,
    )  # fmt: skip


def routes_in(config: Config, model: Denoiser, state: Mapping[str, Any] | None) -> RouteSet | None:
    """The routes that a run draws its FP4 pictures on, from the state of its loop in a checkpoint if there is
    one.
    """
    loop = make_loop(config, model)
    if loop is None or state is None:
        return base_routes(config)
    loop.restore(state)
    return loop.routes()


class HostLoop:
    """The part of `HostEngine` that a closed loop drives. `loop`: None where the forward is on BF16."""

    loop: ClosedLoop | None = None
    model: Denoiser
    config: Config
    parameters: Any  # what is trained, flat
    optimizer: AdamW
    latencies: LatencyTable | None = None  # made when they are first measured

    def use(self, loop: ClosedLoop | None) -> None:
        """Train on the routes of `loop` from now on; None: on BF16."""
        self.loop = loop
        self.model.track = "bf16" if loop is None else loop.track

    def learn(self, once: Once, count: int, pictures: Callable[[], Pictures]) -> tuple[float, Any]:
        """What ``once`` gives of all `count` entries of a step, whose gradient the parameters then hold.

        With a loop: on the route in force, again where a layer violates the constraint, and on sampled steps
        both tracks are measured first, the network's own loss on `pictures()`.
        """
        whole = slice(0, count)
        if self.loop is None:
            return once(whole)
        with self.loop.step():
            if self.loop.deciding and self.loop.sampled():
                with contextlib.suppress(NonFiniteError):  # the step itself says what is to be done then
                    self._observe(once, count, pictures())
            return self.loop.checked(lambda: once(whole), self.gradients)

    def learned(self, own: bool) -> None:
        """The update is made. own: the moments are those of the network's own loss."""
        loop = self.loop
        if loop is None:
            return
        moments = None
        if own and loop.deciding and loop.sampled() and self.optimizer.count:
            unbiased = 1 / (1 - self.optimizer.betas[1] ** self.optimizer.count)
            views = self.parameters.views(self.optimizer.second)
            moments = {n: views[n] * np.float32(unbiased) for n in loop.free if n in views}
        loop.after(moments=moments)

    def gradients(self) -> dict[str, np.ndarray]:
        """The gradient of each layer that is trained, by the layer's name; of adapters both parts."""
        views = self._gradient_views()
        if self.lora is None:
            return {n: views[n] for n in self.loop.router.layers if n in views}
        found: dict[str, np.ndarray] = {}
        for name in self.lora.adapted:
            parts = [views[f"{name}.{part}"].reshape(-1) for part in ("lora_down", "lora_up")]
            found[f"{name}.weight"] = np.concatenate(parts)
        return found

    def _gradient_views(self) -> dict[str, np.ndarray]:
        """The gradients of what is trained, on the host, by name."""
        return self.parameters.views(self.parameters.grad)

    # ---- sampled steps ----
    def _observe(self, once: Once, count: int, pictures: Pictures) -> None:
        """Gradients of two micro-batches with the layers that are decided about on BF16, of the first with
        them on FP4 too, and what FP4 would add to the network's own loss.
        """
        loop, parts = self.loop, self.loop.parts(count)
        if not parts:
            return
        small = [self._gradient(once, part, loop.slow_route()) for part in parts]
        fast = self._gradient(once, parts[0], loop.fast_route())
        some = pictures.part(slice(parts[0].start, parts[-1].stop))
        traces = latency = None
        if loop.curves():
            traces = self._traces(some)
        if loop.clocks():
            latency = self._latency(some)
        size = parts[0].stop - parts[0].start
        loop.observe(small=small, fast=fast, batch=size, traces=traces, latency=latency)
        self._sensitivity(some, None)
        if loop.router.buckets > 1:  # one bucket a time, in turn
            turn = (loop.number + 1) // self.config.loop.every
            self._sensitivity(some, turn % loop.router.buckets)

    def _gradient(self, once: Once, part: slice, route: Mapping[str, str]) -> dict[str, np.ndarray]:
        with self.loop.routed(route):
            once(part)
        return {name: g.copy() for name, g in self.gradients().items()}

    def _sensitivity(self, some: Pictures, bucket: int | None) -> None:
        """The network's loss on `some` with the layers that are decided about on BF16, and what FP4 would do
        to each of their products; at the noise levels of a bucket, or as they are.
        """
        loop, outputs = self.loop, math.prod(self.model.shape)
        if bucket is not None:
            low, high = (-(-b * loop.timesteps // loop.router.buckets) for b in (bucket, bucket + 1))
            some = Pictures(some.x0, some.captions, low + some.t * (high - low) // loop.timesteps, None)
        probe = ActivationProbe(frozenset(loop.free), operands=loop.operands)
        with loop.routed(loop.slow_route(), probe):
            loss = self._own_loss(some)
        if not math.isfinite(loss):
            return
        probe.scale = max(squared_error_scale(loss, outputs), 1e-30)
        # Adam's moments are those of another loss in policy training, and of all noise levels at once
        squares = None
        if self.lora is None and not (some.own and bucket is None):
            squares = {n: np.square(g, dtype=np.float64) for n, g in self.gradients().items()}
        loop.observe(
            loss=loss, batch=len(some.x0), outputs=outputs, activation=probe.omega, squares=squares,
            bucket=bucket,
        )  # fmt: skip

    def _noisy(self, some: Pictures) -> tuple[np.ndarray, np.ndarray]:
        """(x_t, target) of pictures at their noise levels."""
        model, eps = self.model, some.eps
        if eps is None:
            eps = normal(subseed(self.config.seed, "loop/noise"), self.loop.number, some.x0.shape)
        target = model.schedule.target(some.x0, eps, some.t, model.prediction)
        return model.schedule.add_noise(some.x0, eps, some.t), target

    def _own_loss(self, some: Pictures) -> float:
        """Mean squared error of the prediction; afterwards the parameters hold its gradient."""
        x, target = self._noisy(some)
        self.parameters.zero_grad()
        output = self.model.policy(x, some.t, some.captions)
        loss, gradient = squared_error(output.data, target)
        output.backward(gradient)
        return loss

    def _traces(self, some: Pictures) -> dict[str, Any]:
        """Traces of the Hessian blocks of the network's own loss, with the layers decided about on BF16."""
        c, loop, model = self.config.loop, self.loop, self.model
        x, target = self._noisy(some)

        def loss() -> Variable:
            off = model.policy(x, some.t, some.captions) - target
            return (off * off).mean()

        named = {n: p for n in loop.free if (p := loop.parameter(n)) is not None}
        with loop.routed(loop.slow_route()):
            return layer_traces(loss, named, c.probes, subseed(self.config.seed, "loop", loop.number),
                                c.sensitivity)  # fmt: skip

    def _latency(self, some: Pictures) -> dict[str, dict[str, float]]:
        """Measured microseconds of both tracks, kept in the cache's table from run to run."""
        x, _ = self._noisy(some)
        if self.latencies is None:
            self.latencies = LatencyTable.load()
        sample = self.model.schedule.scale_input(x, some.t)
        tracks = ("bf16", self.loop.router.fast)
        with self.loop.routed(self.loop.slow_route()):
            found = measure(
                self.model.unet, sample, some.t, captions=some.captions, tracks=tracks, table=self.latencies
            )
        if not self.latencies.frozen:
            self.latencies.save()
        return {name: times for name, times in found.items() if name in self.loop.router.layers}
