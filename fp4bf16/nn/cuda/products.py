"""The products of a network on the device: convolutions and linear layers, what they read, their gradients.

A linear layer is a 1x1 convolution of pictures (N, 1, 1, C), so that there is one kind of product. Each runs
on its own track: BF16, or FP4 with both operands quantised, the weight once when it changes. What a product
read (`Feed`) can be had again in BF16 for the weight's gradient, which is thus dW = g^T X^ with the operand
that the forward multiplied; dX = g W^ with the decoded twin, or the master (`Run.backward`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from ...adapters import ITEMSIZE, DeviceArray, contiguous_strides
from ...backends import cuda_conv, cuda_elementwise, cuda_norm
from ...backends.cuda_gemm import round_up
from ...errors import ConfigError
from ...tracks import resolve_track
from .certificates import Sizes, by_picture
from .workspace import Pictures, Run, decoded, quantize, rows, seen, shaped

#: A run and a track to the same pictures as a product on that track reads them, and the layer that reads them
#: so, None: the same one.
Other = Callable[[Run, str], "tuple[Feed, Layer | None]"]


class Layer:
    """A convolution or linear layer of the model, seen as a convolution; its parameters begin with `name`.

    members: (name in routes, first output, outputs) of the layers that it stands for: itself, or those of a
    `Group`. joined: whether what is added to the product is part of the layer's result, as the CPU has it.
    group: that it is the whole of.
    """

    joined, group = False, None

    def __init__(self, name: str, module: Any):
        self.name, self.module = name, module
        shape = tuple(module.weight.shape)
        self.o, self.kh, self.kw, self.c = shape if len(shape) == 4 else (shape[0], 1, 1, shape[1])
        self.stride, padding = getattr(module, "stride", 1), getattr(module, "padding", 0)
        pads = ((padding, padding),) * 2 if isinstance(padding, int) else padding
        (self.top, self.bottom), (self.left, self.right) = pads
        self.members = [(f"{name}.weight", 0, self.o)]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.o, self.kh, self.kw, self.c

    @property
    def track(self) -> str:
        """The track of this call: ``with tracks(...)``, else the route's."""
        track = resolve_track(self.module.track, "bf16")
        if track not in ("fp4", "bf16"):
            raise ConfigError(f"{self.name}: its track is {track!r}, but on the GPU a network runs on 'fp4' "
                              f"and 'bf16'; apply a route of these, or keep it on the CPU")  # fmt: skip
        return track

    def on(self, track: str) -> list[tuple[Layer, int]]:
        """The products that it is on a track, and the output that each begins at."""
        return [(self, 0)] if self.group is None else [(p.layer, p.start) for p in self.group.on(track)]

    def output(self, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Shape of the result for pictures of `shape`."""
        n, h, w, _ = shape
        oh = (h + self.top + self.bottom - self.kh) // self.stride + 1
        ow = (w + self.left + self.right - self.kw) // self.stride + 1
        return n, oh, ow, self.o

    def geometry(self, shape: tuple[int, ...]) -> cuda_conv.Geometry:
        n, oh, ow, o = self.output(shape)
        size = (self.kh, self.kw, self.stride, self.top, self.left)
        return cuda_conv.Geometry(n, shape[1], shape[2], oh, ow, o, *size)

    def bias(self, run: Run) -> DeviceArray:
        return shaped(run.weights.data_of(f"{self.name}.bias"), (self.o,))

    @property
    def how(self) -> dict[str, Any]:
        """More options of the launches of `cuda_conv`."""
        return {}

    # ---- the weight, as the kernels read it
    def sixteen(self, run: Run) -> DeviceArray:
        """BF16 (O, kh, kw, C), C rounded up to 8 with zeros."""
        wide = round_up(self.c, 8)
        padding = {"channels": wide, "shape": self.shape, "stream": run.stream} if wide > self.c else {}
        return shaped(run.weights.bf16_of(f"{self.name}.weight", **padding), (*self.shape[:3], wide))

    def eight(self, run: Run) -> tuple[DeviceArray, DeviceArray]:
        """E4M3 (O, kh, kw, C), C rounded up to 16 with zeros, and the outer scales (O,)."""
        twin = self._twin(run)
        if twin is not None:
            return twin
        w8 = run.empty((*self.shape[:3], round_up(self.c, 16)), "uint8")
        return w8, self._quantised(run, {"expanded": w8})

    def _twin(self, run: Run) -> tuple[DeviceArray, DeviceArray] | None:
        """The twin that the weights keep; none of a weight whose channels are no multiple of a block."""
        twin = run.weights.twin_of(f"{self.name}.weight") if self.c % 16 == 0 else None
        return None if twin is None else (shaped(twin[0], self.shape), shaped(twin[1], (self.o,)))

    def _quantised(self, run: Run, results: dict[str, DeviceArray]) -> DeviceArray:
        """Fills `results` with the quantised weight, of which no twin is kept; returns its outer scales."""
        scale = run.empty((self.o,), "float32")
        taps = self.kh * self.kw
        weight = run.weights.data_of(f"{self.name}.weight")
        quantize(run, weight, self.o * taps, self.c, self.c, taps, "full", results | {"outer_scale": scale})
        return scale

    def seen(self, run: Run, track: str) -> DeviceArray:
        """BF16 (O, kh, kw, C) of the weight that the forward multiplied, for the gradient in the pictures."""
        if track == "bf16" or run.backward == "master":
            return self.sixteen(run)
        if self._twin(run) is not None:
            return self._decoded_twin(run)
        packed, block = _packed(run, (*self.shape[:3], self.c), None)
        scale = self._quantised(run, {"packed": packed, "block_scale": block})
        return decoded(run, packed, block, scale, self.kh * self.kw, self.shape)

    def _decoded_twin(self, run: Run) -> DeviceArray:
        """All twins of equal rows are decoded at once, when the first of them is needed."""
        w8, scale, first = run.weights.twins_like(f"{self.name}.weight")
        k = w8.shape[1]
        if k not in run.twins:
            run.twins[k] = decoded(run, w8, None, scale, 1, w8.shape)
        whole = run.twins[k]
        place = whole.address + first * k * ITEMSIZE[whole.dtype]
        return seen(whole, self.shape, contiguous_strides(self.shape), place)


class Part(NamedTuple):
    """One product of a `Group`: outputs `start` to ``start + layer.o`` of all that the group has."""

    layer: Layer
    track: str
    start: int


class Group:
    """Layers that read the same pictures. Where their parameters lie one after another in the flat arrays
    (`FlatParameters`), and they run on one track, they are one product.
    """

    def __init__(self, layers: list[Layer], layout: Any):
        self.layers, self.o = layers, sum(layer.o for layer in layers)
        self.whole = copy(layers[0])
        self.whole.o, self.whole.group = self.o, self
        starts = [sum(layer.o for layer in layers[:i]) for i in range(len(layers))]
        self.whole.members = [
            (f"{layer.name}.weight", s, layer.o) for layer, s in zip(layers, starts, strict=True)
        ]
        weights, biases = ([f"{layer.name}.{part}" for layer in layers] for part in ("weight", "bias"))
        counts, sizes = [layer.o for layer in layers], [math.prod(layer.shape) for layer in layers]
        self._on = set()
        if all(
            _consecutive([layout.offsets[n] for n in names], lengths)
            for names, lengths in ((weights, sizes), (biases, counts))
        ):
            self._on.add("bf16")
            twins = [layout.twins.get(n) for n in weights]
            if None not in twins and all(
                _consecutive([t[i] for t in twins], lengths) for i, lengths in ((0, sizes), (1, counts))
            ):
                self._on.add("fp4")

    def parts(self) -> list[Part]:
        """The products of this call."""
        return self._parts([layer.track for layer in self.layers])

    def on(self, track: str) -> list[Part]:
        """The products of a call whose layers all run on `track`."""
        return self._parts([track] * len(self.layers))

    def _parts(self, tracks: list[str]) -> list[Part]:
        if len(set(tracks)) == 1 and tracks[0] in self._on:
            return [Part(self.whole, tracks[0], 0)]
        starts = [sum(layer.o for layer in self.layers[:i]) for i in range(len(self.layers))]
        return [Part(*both, start) for *both, start in zip(self.layers, tracks, starts, strict=True)]


def _consecutive(starts: list[int], lengths: list[int]) -> bool:
    """Whether each begins where the one before ends."""
    return all(a + n == b for a, n, b in zip(starts, lengths, starts[1:], strict=False))


# ---- what a product reads ----------------------------------------------------------------------------------
class Feed(NamedTuple):
    """Pictures as a product reads them.

    x: E4M3 (N, H, W, C rounded up to 16) with `scale`, one for all or one a picture; or BF16, `scale` None.
    again: a function of the `Run` that gives them in BF16 (N, H, W, C) in the backward; None where there
    will be none. other: gives them on another track, for the watchers of a run; None where there are none.
    sizes: their norms on FP4, where products are certified.
    """

    x: DeviceArray
    scale: DeviceArray | None
    again: Callable[[Run], DeviceArray] | None
    other: Other | None = None
    sizes: Sizes | None = None


def given(array: DeviceArray, run: Run) -> DeviceArray:
    """`Feed.again` of an array that is kept."""
    return array


def _packed(run: Run, shape: tuple[int, ...], hold: str | None) -> tuple[DeviceArray, DeviceArray]:
    """Memory for packed codes and block scales of pictures."""
    width = round_up(shape[-1], 16)
    codes = run.empty((*shape[:-1], width // 2), "uint8", hold)
    return codes, run.empty((*shape[:-1], width // 16), "uint8", hold)


class Norm:
    """A group normalisation of the model."""

    def __init__(self, name: str, module: Any):
        self.name, self.groups, self.eps = name, module.groups, module.eps

    def forward(self, run: Run, x: Pictures, silu: bool, **results: Any) -> DeviceArray | None:
        """Fills `results`: those of `cuda_norm.group_norm`, whose norms it returns."""
        gamma, beta = (run.weights.data_of(f"{self.name}.{part}") for part in ("weight", "bias"))
        return cuda_norm.group_norm(x.array, gamma, beta, self.groups, self.eps, run.stream, silu=silu,
                                    sums=x.sums or None, run_if=run.run_if, **results)  # fmt: skip

    def statistics(self, run: Run, x: DeviceArray) -> dict[str, DeviceArray]:
        """Memory for mean and reciprocal deviation (N, groups), which the backward reads."""
        shape = (x.shape[0], self.groups)
        return {name: run.empty(shape, "float32", "statistics") for name in ("mean", "rstd")}

    def backward(
        self, run: Run, x: DeviceArray, g: DeviceArray, silu: bool, statistics: dict,
        add: DeviceArray | None = None, dshift: DeviceArray | None = None,
    ) -> DeviceArray:  # fmt: skip
        """The gradient in x, + add; those of the parameters are added to theirs."""
        gamma, beta = (run.weights.data_of(f"{self.name}.{part}") for part in ("weight", "bias"))
        dgamma, dbeta = (run.gradients.grad_of(f"{self.name}.{part}") for part in ("weight", "bias"))
        dx = run.empty(x.shape)
        cuda_norm.group_norm_backward(x, g, gamma, beta, self.groups, run.stream, silu=silu, dx=dx, add=add,
                                      dgamma=dgamma, dbeta=dbeta, dshift=dshift, **statistics)  # fmt: skip
        return dx


def normed(run: Run, norm: Norm, x: Pictures, silu: bool, track: str) -> tuple[Feed, dict]:
    """The norm of x (and SiLU) as a product on `track` reads it, and the norm's statistics.

    A norm that the backward computes again has to have the same bits: it keeps the sums over x.
    """
    if run.watchers:
        watchers, run.watchers = run.watchers, ()
        feed, statistics = normed(run, norm, x, silu, track)
        run.watchers = watchers
        return feed._replace(other=partial(_normed_on, norm, x, silu)), statistics
    statistics = norm.statistics(run, x.array) if run.recording else {}
    if track == "fp4" and x.array.shape[3] % 16 == 0:
        return _normed_fp4(run, norm, x, silu, statistics), statistics
    y = run.empty(x.array.shape)
    norm.forward(run, x, silu, y=y, **statistics)
    if track == "fp4":
        return pictures(run, y, track), statistics
    again = None
    if run.recording and run.save == "bf16":
        run.hold("saved BF16", y)
        again = partial(given, y)
    elif run.recording:
        run.hold("statistics", *x.sums)
        again = partial(_normed_again, norm, x, silu)
    return Feed(y, None, again), statistics


def _normed_on(norm: Norm, x: Pictures, silu: bool, run: Run, track: str) -> tuple[Feed, None]:
    return normed(run, norm, x, silu, track)[0], None


def _normed_again(norm: Norm, x: Pictures, silu: bool, run: Run) -> DeviceArray:
    y = run.empty(x.array.shape)
    norm.forward(run, x, silu, y=y)
    return y


def _normed_fp4(run: Run, norm: Norm, x: Pictures, silu: bool, statistics: dict) -> Feed:
    shape, count = x.array.shape, rows(x.array)[0]
    expanded, outer = run.empty(shape, "uint8"), run.empty((1,), "float32")
    results: dict[str, Any] = {"expanded": expanded, "outer_scale": outer, **statistics}
    if run.certificates is not None:
        results["norms"] = lambda parts: run.empty((parts, 2), "float32")
    if keep := run.recording and run.save != "recompute":
        packed, block = _packed(run, shape, "saved FP4" if run.save == "packed" else None)
        results |= {"packed": packed, "block_scale": block}
    sizes = Sizes(norms=norm.forward(run, x, silu, **results), outer=outer)
    if keep:
        again = _kept(run, packed, block, outer, count, shape)
    else:
        run.hold("statistics", *x.sums)
        again = partial(_normed_fp4_again, norm, x, silu) if run.recording else None
    return Feed(expanded, outer, again, sizes=None if run.certificates is None else sizes)


def _normed_fp4_again(norm: Norm, x: Pictures, silu: bool, run: Run) -> DeviceArray:
    shape, count = x.array.shape, rows(x.array)[0]
    packed, block = _packed(run, shape, None)
    outer = run.empty((1,), "float32")
    norm.forward(run, x, silu, packed=packed, block_scale=block, outer_scale=outer)
    return decoded(run, packed, block, outer, count, shape)


def _kept(run: Run, packed, block, outer, per_scale: int, shape) -> Callable[[Run], DeviceArray]:
    """`Feed.again` of packed pictures: kept as they are, or decoded at once."""
    if run.save == "packed":
        return partial(_decoded_again, packed, block, outer, per_scale, shape)
    value = decoded(run, packed, block, outer, per_scale, shape)
    run.hold("saved BF16", value)
    return partial(given, value)


def _decoded_again(packed, block, outer, per_scale, shape, run: Run) -> DeviceArray:
    return decoded(run, packed, block, outer, per_scale, shape)


def pictures(run: Run, x: DeviceArray, track: str, kept: bool = False) -> Feed:
    """BF16 pictures as a product on `track` reads them; FP4 with one outer scale a picture.

    kept: whether something else keeps x for the backward.
    """
    keep = partial(given, x) if run.recording else None
    other = partial(_pictures_on, x) if run.watchers else None
    if track == "bf16":
        run.hold(None if kept else "saved BF16", x)
        return Feed(x, None, keep, other)
    n, h, w, c = x.shape
    expanded = run.empty((n, h, w, round_up(c, 16)), "uint8")
    results = {"expanded": expanded, "outer_scale": run.empty((n,), "float32")}
    outer = results["outer_scale"]
    again = None
    if run.recording and run.save == "recompute":
        run.hold(None if kept else "saved BF16", x)
        again = partial(_quantised_again, x)
    elif run.recording:
        hold = "saved FP4" if run.save == "packed" else None
        results["packed"], results["block_scale"] = _packed(run, x.shape, hold)
    sizes = None
    if run.certificates is not None:
        results["sums"] = run.empty((n * h * w, 3), "float64")
    _quantise_pictures(run, x, results)
    if run.certificates is not None:
        sizes = Sizes(sums=by_picture(run, results["sums"], n), picture=h * w * c)
    if run.recording and again is None:
        again = _kept(run, results["packed"], results["block_scale"], outer, h * w, x.shape)
    return Feed(expanded, outer, again, other, sizes)


def _pictures_on(x: DeviceArray, run: Run, track: str) -> tuple[Feed, None]:
    return pictures(run, x, track), None


def _quantise_pictures(run: Run, x: DeviceArray, results: dict[str, DeviceArray]) -> None:
    count, c, stride = rows(x)
    quantize(run, x, count, c, stride, x.shape[1] * x.shape[2], "fast", results)


def _quantised_again(x: DeviceArray, run: Run) -> DeviceArray:
    packed, block = _packed(run, x.shape, None)
    outer = run.empty((x.shape[0],), "float32")
    _quantise_pictures(run, x, {"packed": packed, "block_scale": block, "outer_scale": outer})
    return decoded(run, packed, block, outer, x.shape[1] * x.shape[2], x.shape)


def upsampled(run: Run, x: DeviceArray, track: str) -> Feed:
    """x at twice its size, each pixel as a 2 x 2 patch, as a product on `track` reads it."""
    small = pictures(run, x, track)
    again = None if small.again is None else partial(_upsampled_again, small.again)
    other = partial(_upsampled_on, x) if run.watchers else None
    sizes = None if small.sizes is None else small.sizes._replace(times=2.0)
    return Feed(doubled(run, small.x), small.scale, again, other, sizes)


def _upsampled_on(x: DeviceArray, run: Run, track: str) -> tuple[Feed, None]:
    return upsampled(run, x, track), None


def _upsampled_again(again: Callable[[Run], DeviceArray], run: Run) -> DeviceArray:
    return doubled(run, again(run))


def doubled(run: Run, x: DeviceArray) -> DeviceArray:
    n, h, w, c = x.shape
    y = run.empty((n, 2 * h, 2 * w, c), x.dtype)
    cuda_elementwise.upsample(x, y, run.stream, run.run_if)
    return y


# ---- products ----------------------------------------------------------------------------------------------
#: Pixels of an image, and of the batch, from which a norm gains by the convolution's sums: smaller images are
#: normalised from registers, and little work is over sooner in one kernel (measured on an H200). So the last
#: bits of a picture may depend on the batch, as they do by the tiles that are chosen for it.
SUMMED_IMAGE, SUMMED_BATCH = 256, 65536
_NOTHING: Mapping[str, Any] = MappingProxyType({})


def _sums_pay(geo: cuda_conv.Geometry) -> bool:
    pixels = geo.oh * geo.ow
    return pixels >= SUMMED_IMAGE and geo.n * pixels >= SUMMED_BATCH


def product(run: Run, layer: Layer, feed: Feed, d: DeviceArray, sums: bool = False,
            **finish: Any) -> Pictures:  # fmt: skip
    """d = feed * weight + bias, with more of the epilogue's operands in `finish`.

    sums: whether a norm reads d; then what is returned has them, where they pay and the kernel for these
    operands makes them.
    """
    scale = None
    if feed.scale is None:
        operands = {"x16": feed.x, "w16": layer.sixteen(run)}
    else:
        w8, scale = layer.eight(run)
        operands = {"x8": feed.x, "w8": w8, "image_scale": feed.scale, "col_scale": scale,
                    "accumulate": run.accumulate}  # fmt: skip
    more = {"bias": layer.bias(run), **layer.how, **finish}
    geometry, operands = layer.geometry(feed.x.shape), operands | more

    def memory(parts: int) -> DeviceArray:
        return run.empty((geometry.n, parts, geometry.o, 2), "float32")

    pay = sums and _sums_pay(geometry)
    certificates = None if feed.sizes is None else run.certificates
    wanted = memory if pay or certificates is not None else None
    made = cuda_conv.forward(geometry, d, run.stream, sums=wanted, run_if=run.run_if, **operands)
    if certificates is not None:
        pay &= certificates.certify(run, layer, feed, d, made, finish)
    observed(run, layer, feed, d, scale, finish)
    return Pictures(d, (made,) if pay and made is not None else ())


def observed(run: Run, layer: Layer, feed: Feed, d: DeviceArray | None, scale: DeviceArray | None = None,
             finish: Mapping[str, Any] = _NOTHING) -> None:  # fmt: skip
    """Show a product to the watchers of the run; see `watch.RunWatcher.product`."""
    for watcher in run.watchers:
        watcher.product(run, layer, feed, scale, d, finish)


def passed(run: Run, layer: Layer, g: DeviceArray) -> DeviceArray:
    """The gradient in a product's result as the watchers of the run pass it on."""
    for watcher in run.watchers:
        g = watcher.gradient(run, layer, g)
    return g


def weight_gradient(run: Run, layer: Layer, x: DeviceArray, g: DeviceArray, bias: bool = True) -> None:
    """Add the gradients of the weight and, with `bias`, of the bias: x is what the product read, g the
    gradient in its result, both BF16.
    """
    dw, db = (run.gradients.grad_of(f"{layer.name}.{part}") for part in ("weight", "bias"))
    dw, db = shaped(dw, layer.shape), shaped(db, (layer.o,)) if bias else None
    cuda_conv.wgrad(layer.geometry(x.shape), g, x, dw, run.stream, db=db, accumulate=True)


def input_gradient(run: Run, layer: Layer, track: str, g: DeviceArray, shape: tuple[int, ...],
                   residual: DeviceArray | None = None, dtype: str = "bfloat16") -> DeviceArray:  # fmt: skip
    """The gradient in what the product read (of `shape`), + residual."""
    dx = run.empty(shape, dtype)
    weight = layer.seen(run, track)
    cuda_conv.dgrad(layer.geometry(shape), g, weight, dx, run.stream, residual=residual, **layer.how)
    return dx
