"""Steps of a network on the device: the changes of size, copies, scales.

Every step has

    output(shape)                shape of its result for pictures of `shape`
    forward(run, x, out, sums)   fills `out` from the `Pictures` x; returns `out` as `Pictures`, with sums
                                 where `sums` asks for them and the step can, and what `backward` needs,
                                 None where nothing is recorded
    backward(run, kept, g, add)  the gradient in x for the gradient `g` in `out`, + add, a second gradient
                                 in x (or None); those of the parameters are added to theirs
    reads_sums                   whether it uses the sums of x

and reads and writes pictures that may be a range of channels of wider ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ... import device
from ...adapters import DeviceArray
from ...backends import cuda_conv, cuda_elementwise
from ...interop import BFLOAT16
from .products import Layer, input_gradient, passed, pictures, product, upsampled, weight_gradient
from .workspace import Pictures, Run


def summed(run: Run, a: DeviceArray, b: DeviceArray | None) -> DeviceArray:
    """a + b in memory of its own; a itself where b is None."""
    if b is None:
        return a
    out = run.empty(a.shape)
    cuda_elementwise.add(a, b, out, run.stream)
    return out


class Kept(NamedTuple):
    """What a step of one product keeps: its track, its input again, the shape of x, and more."""

    track: str
    again: Any
    shape: tuple[int, ...]
    more: Any = None


class Downsample:
    """A convolution of stride 2."""

    reads_sums = False

    def __init__(self, layer: Layer):
        self.layer, self.output = layer, layer.output

    def forward(self, run: Run, x: Pictures, out: DeviceArray, sums: bool) -> tuple[Pictures, Kept | None]:
        track = self.layer.track
        feed = pictures(run, x.array, track, kept=True)  # x is a skip
        result = product(run, self.layer, feed, out, sums)
        return result, Kept(track, feed.again, x.array.shape) if run.recording else None

    def backward(self, run: Run, kept: Kept, g: DeviceArray, add: DeviceArray | None = None) -> DeviceArray:
        g = passed(run, self.layer, g)
        weight_gradient(run, self.layer, kept.again(run), g)
        return input_gradient(run, self.layer, kept.track, g, kept.shape, add)


class Upsample:
    """Each pixel as a 2 x 2 patch, then a convolution."""

    reads_sums = False

    def __init__(self, layer: Layer):
        self.layer = layer

    def output(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        n, h, w, c = shape
        return self.layer.output((n, 2 * h, 2 * w, c))

    def forward(self, run: Run, x: Pictures, out: DeviceArray, sums: bool) -> tuple[Pictures, Kept | None]:
        track = self.layer.track
        feed = upsampled(run, x.array, track)
        result = product(run, self.layer, feed, out, sums)
        return result, Kept(track, feed.again, x.array.shape) if run.recording else None

    def backward(self, run: Run, kept: Kept, g: DeviceArray, add: DeviceArray | None = None) -> DeviceArray:
        g = passed(run, self.layer, g)
        weight_gradient(run, self.layer, kept.again(run), g)
        n, h, w, c = kept.shape
        wide = input_gradient(run, self.layer, kept.track, g, (n, 2 * h, 2 * w, c))
        dx = run.empty(kept.shape)
        cuda_elementwise.upsample_backward(wide, dx, run.stream, add=add)
        return dx


class Copy:
    """The same pictures at another place, with their sums: what a network without a middle block hands on."""

    reads_sums = True

    @staticmethod
    def output(shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    @staticmethod
    def forward(run: Run, x: Pictures, out: DeviceArray, sums: bool) -> tuple[Pictures, tuple]:
        nothing = device.full(x.array.shape, 0.0, "bfloat16", run.like)
        cuda_elementwise.add(x.array, nothing, out, run.stream)
        return Pictures(out, x.sums), ()

    @staticmethod
    def backward(run: Run, kept: tuple, g: DeviceArray, add: DeviceArray | None = None) -> DeviceArray:
        return summed(run, g, add)


class Scale:
    """Division by a block's output scale, as a product with the identity matrix: exact, and strided as all
    products are. Few networks have a scale other than one.
    """

    def __init__(self, scale: float, channels: int, like: DeviceArray):
        self.factor = 1.0 / scale
        identity = np.eye(channels).reshape(channels, 1, 1, channels)
        self.identity = device.from_host(identity.astype(BFLOAT16), like)

    def apply(self, run: Run, x: DeviceArray, out: DeviceArray) -> DeviceArray:
        n, h, w, c = x.shape
        geometry = cuda_conv.Geometry(n, h, w, h, w, c, 1, 1, 1, 0, 0)
        cuda_conv.forward(geometry, out, run.stream, x16=x, w16=self.identity, alpha=self.factor)
        return out


class Scaled:
    """A step whose result, the sum with its residual, is divided by a scale; it has no sums."""

    def __init__(self, step: Any, scale: Scale):
        self.step, self.scale = step, scale
        self.output, self.reads_sums = step.output, step.reads_sums

    def forward(self, run: Run, x: Pictures, out: DeviceArray, sums: bool) -> tuple[Pictures, Any]:
        whole, kept = self.step.forward(run, x, run.empty(out.shape), False)
        return Pictures(self.scale.apply(run, whole.array, out)), kept

    def backward(self, run: Run, kept: Any, g: DeviceArray, add: DeviceArray | None = None) -> DeviceArray:
        return self.step.backward(run, kept, self.scale.apply(run, g, run.empty(g.shape)), add)
