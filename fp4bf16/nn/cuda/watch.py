"""What looks at the products of a network on the device while they run, as `nn.watch` does on the CPU.

The network is one node of the tape there, so that its products are not seen by `nn.watching`. A recorded run
asks these watchers instead: after each product, and in the backward for the gradient in its result.

    probe = Probe(names, terms, weight)
    with watching(probe):
        output = model(x, t)
        output.backward(g)
    probe.read()                     # waits: omega, ratios by layer

Layers are known by the names of `Module.apply_route`. A product of several layers (`products.Group`) is one
call; `Layer.members` says which of its channels are whose.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np

from ... import device
from ...adapters import DeviceArray
from ...backends import cuda_math
from .graph import Graph
from .workspace import Run, converted, decoded, part

_watchers: contextvars.ContextVar[tuple] = contextvars.ContextVar("fp4bf16_device_watchers", default=())

_VANISHES = 1e-30  # as of `consistency`: squares of outputs under this, an element, have no ratio to train


class RunWatcher:
    """Looks at the products of runs; this one does nothing.

    Attributes: recorded, whether of recorded runs alone; certifies, whether it is a
    `certificates.Certificates`.
    """

    recorded, certifies = True, False

    def product(self, run: Run, layer: Any, feed: Any, scale: DeviceArray | None, d: DeviceArray | None,
                finish: Mapping[str, Any]) -> None:  # fmt: skip
        """After a product. feed: what it read. scale: the weight's outer scales (O,), by phases (4 O,), None
        on the BF16 track. d: its result; with `finish` more than weight and bias are in it, and None says
        that it stands nowhere by itself.
        """

    def gradient(self, run: Run, layer: Any, g: DeviceArray) -> DeviceArray:
        """Before the backward of a product, with the gradient in its result; what goes on in place of g."""
        return g


@contextmanager
def watching(*watchers: RunWatcher) -> Iterator[None]:
    """Runs that begin inside are watched by these, in place of those outside, for as long as they live: their
    backward too.

    Raises `TypeError` for what is no `RunWatcher`, `ValueError` for two that certify.
    """
    for watcher in watchers:
        if not isinstance(watcher, RunWatcher):
            raise TypeError(f"watching: {watcher!r} is a {type(watcher).__name__}, but a RunWatcher is "
                            f"needed; on the device others are not asked")  # fmt: skip
    if sum(watcher.certifies for watcher in watchers) > 1:
        raise ValueError("watching: two of the watchers certify products, but one can; pass one of them")
    token = _watchers.set(watchers)
    try:
        yield
    finally:
        _watchers.reset(token)


def current() -> tuple[RunWatcher, ...]:
    """The watchers in force."""
    return _watchers.get()


def track_of(feed: Any) -> str:
    """The track of a product that read `feed`."""
    return "bf16" if feed.scale is None else "fp4"


def alone(run: Run, layer: Any, feed: Any, track: str, like: DeviceArray | None) -> DeviceArray:
    """The product of what `feed` holds for `track` with weight and bias, nothing added; in the dtype of
    `like`, BF16 where that is None.
    """
    from .products import product  # which asks the watchers

    out = run.empty(layer.output(feed.x.shape), "bfloat16" if like is None else like.dtype)
    for of, start in layer.on(track):
        product(run, of, feed, part(out, start, of.o))
    return out


# ---- both tracks, on a sampled step ------------------------------------------------------------------------
class _Product:
    """What a probe keeps of a product until its gradient comes."""

    __slots__ = ("difference", "square", "change")

    def __init__(self, difference: Any, square: Any, change: Any):
        self.difference, self.square, self.change = difference, square, change


class Probe(RunWatcher):
    """Runs chosen products on the other track as well: `routing.sensitivity.ActivationProbe` and
    `consistency.Consistency` on the device, by the same formulas.

    Args:
        names: layers whose Omega is measured, 1/2 N sum (dL/dy)^2 (y_fp4 - y_bf16)^2; None: all.
        terms: layers of the consistency term; those that run on BF16 are passed over.
        weight: lambda of the term, whose gradient is added; 0 measures alone.
        operands: what Omega's y_fp4 has quantised, as of `ActivationProbe`: "both", or "activations" alone
            (of a layer whose channels are no multiple of a block, both).

    Each run is one backward of one forward; begin with a new probe for another step. Nothing is read back
    before `read`, which fills `omega` {name: float} (without the factor `scale` of the CPU's) and `ratios`
    {name: |y_fp4 - y_bf16|^2 / |y_bf16|^2}. Outputs and, but for the term, gradients stay as they are.
    """

    def __init__(
        self,
        names: Collection[str] | None = None,
        terms: Collection[str] = (),
        weight: float = 0,
        operands: str = "both",
    ):
        self.names, self.terms, self.weight, self.operands = names, frozenset(terms), float(weight), operands
        self.omega: dict[str, float] = {}
        self.ratios: dict[str, float] = {}
        self._kept: dict[tuple[int, str], _Product] = {}  # by run and layer
        self._omegas: list[tuple[Any, int, DeviceArray]] = []  # layer, N, sums by output
        self._ratios: list[tuple[Any, DeviceArray, DeviceArray]] = []  # layer, those of difference and BF16
        self._sampled: set[str] = set()  # layers of the term that have run on FP4

    def _wants(self, layer: Any, track: str) -> tuple[bool, bool]:
        """Whether Omega, and whether the term, is asked of any member."""
        names = [name for name, _, _ in layer.members]
        omega = self.names is None or any(name in self.names for name in names)
        return omega, track == "fp4" and any(name in self.terms for name in names)

    # ---- forward
    def product(self, run, layer, feed, scale, d, finish) -> None:
        track = track_of(feed)
        omega, term = self._wants(layer, track)
        if not omega and not term:
            return
        y = self._both(run, layer, feed, d, finish, track)
        raw = cuda_math.of(run.like).raw
        difference = raw(y["fp4"]) - raw(y["bf16"])
        change = difference
        if omega and self.operands == "activations" and layer.c % 16 == 0:
            change = raw(self._rounded(run, layer, feed, d, track)) - raw(y["bf16"])
        square = None
        if term:
            high = raw(y["bf16"])
            if layer.joined and finish:  # what is added is part of the result there, as on the CPU
                high = raw(converted(run, d, d.shape[3], "float32")) - difference
            square, error = self._sums(high), self._sums(difference)
            self._ratios.append(
                (layer, cuda_math.wrapped(error, run.like), cuda_math.wrapped(square, run.like))
            )
            self._sampled |= {name for name, _, _ in layer.members if name in self.terms}
        self._kept[id(run), layer.name] = _Product(difference, square, change if omega else None)

    def _both(self, run, layer, feed, d, finish, track) -> dict[str, DeviceArray]:
        """The product alone on both tracks, float32."""
        found = {}
        with run.aside():
            for kind in ("fp4", "bf16"):
                if kind == track and d is not None and not finish:
                    found[kind] = converted(run, d, d.shape[3], "float32")
                    continue
                other, of = (feed, layer) if kind == track else feed.other(run, kind)
                out = alone(run, layer if of is None else of, other, kind, d)
                found[kind] = converted(run, out, out.shape[3], "float32")
        return found

    def _rounded(self, run, layer, feed, d, track) -> DeviceArray:
        """The product of the quantised input with the BF16 weight, float32."""
        from .products import Feed

        with run.aside():
            other, of = (feed, layer) if track == "fp4" else feed.other(run, "fp4")
            n, h, w, _ = shape = other.x.shape
            x = decoded(run, other.x, None, other.scale, n * h * w // other.scale.size, shape)
            y = alone(run, layer if of is None else of, Feed(x, None, None), "bf16", d)
            return converted(run, y, y.shape[3], "float32")

    @staticmethod
    def _sums(x: Any) -> Any:
        """Sums of squares by output, float64."""
        return (x * x).reshape(-1, x.shape[-1]).sum(axis=0, dtype=np.float64)

    # ---- backward
    def gradient(self, run, layer, g) -> DeviceArray:
        kept = self._kept.pop((id(run), layer.name), None)
        if kept is None:
            return g
        raw = cuda_math.of(run.like).raw
        wide = converted(run, g, g.shape[3], "float32")
        if kept.change is not None:
            sums = self._sums(raw(wide) * kept.change)
            self._omegas.append((layer, g.shape[0], cuda_math.wrapped(sums, run.like)))
        if kept.square is None or self.weight == 0:
            return g
        added = raw(wide) + kept.difference * self._factor(cuda_math.of(run.like).xp, layer, kept)
        made = cuda_math.wrapped(added, run.like, "gradient")
        return converted(run, made, g.shape[3], g.dtype)

    def _factor(self, xp: Any, layer: Any, kept: _Product) -> Any:
        """What the difference is multiplied by in the gradient, float32 by output: 2 weight / (square layers)
        of the output's own layer.
        """
        factor = xp.zeros_like(kept.square)
        pixels = kept.difference.size // kept.difference.shape[-1]
        for name, start, count in layer.members:
            if name not in self.terms:
                continue
            square = kept.square[start : start + count].sum()
            usable = (square > _VANISHES * pixels * count) & (square < math.inf)
            safe = xp.where(usable, square, 1.0)
            factor[start : start + count] = (
                xp.where(usable, 2.0 * self.weight / len(self._sampled), 0.0) / safe
            )
        return factor.astype(np.float32)

    # ---- results
    def read(self) -> None:
        """Fill `omega` and `ratios`; waits for the device. Infinite where something was not finite."""
        omega, ratios = {}, {}
        for layer, batch, sums in self._omegas:
            host = device.to_host(sums)
            for name, start, count in layer.members:
                if self.names is None or name in self.names:
                    value = 0.5 * batch * float(host[start : start + count].sum())
                    omega[name] = omega.get(name, 0.0) + (value if math.isfinite(value) else math.inf)
        for layer, error, square in self._ratios:
            above, below = device.to_host(error), device.to_host(square)
            for name, start, count in layer.members:
                if name in self.terms:
                    over, under = (float(s[start : start + count].sum()) for s in (above, below))
                    ratios[name] = over / under if under != 0 else 0.0
        self.omega, self.ratios = omega, ratios


# ---- the clock ---------------------------------------------------------------------------------------------
class Clock(RunWatcher):
    """Times the products of a recorded run on both tracks; microseconds by layer in `times` {name: {track}}.

    A time holds what the track needs besides the product: the norm that writes its input, with the quantiser
    where that is FP4, or the quantiser alone; without what is added afterwards. `repeats` of it are captured
    as a graph, so that launches by the host do not count. Products of one kind and size are timed once;
    those of a `products.Group` share its time by their outputs. Waits for the device.
    """

    def __init__(self, repeats: int = 10, clock: Callable[[], float] = perf_counter):
        self.repeats, self.clock = repeats, clock
        self.times: dict[str, dict[str, float]] = {}
        self._known: dict[tuple, dict[str, float]] = {}

    def product(self, run, layer, feed, scale, d, finish) -> None:
        n, h, w, _ = feed.x.shape
        key = feed.other.func, n, h, w, layer.module.weight.shape, layer.kh, layer.o, layer.stride
        if key not in self._known:
            self._known[key] = {kind: self._time(run, layer, feed, d, kind) for kind in ("bf16", "fp4")}
        for name, _, count in layer.members:
            times = self._known[key]
            self.times[name] = {kind: times[kind] * count / layer.o for kind in times}

    def _time(self, run: Run, layer: Any, feed: Any, d: DeviceArray | None, kind: str) -> float:
        def once(stream: int) -> None:
            before, run.stream = run.stream, stream
            try:
                for _ in range(self.repeats):
                    other, of = feed.other(run, kind)
                    alone(run, layer if of is None else of, other, kind, d)
            finally:
                run.stream = before

        with run.aside():
            graph = Graph(run.like)
            graph.capture(once)
            graph.replay(run.stream)
            mark = device.full((1,), 0, "float32", run.like)
            device.to_host(mark)  # waits
            start = self.clock()
            graph.replay(run.stream)
            device.to_host(mark)
            return 1e6 * (self.clock() - start) / self.repeats
