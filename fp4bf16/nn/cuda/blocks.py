"""Steps of a network on the device: the changes of size, copies, scales.

Every step has

    output(shape)                shape of its result for pictures of `shape`
    forward(run, x, out)         fills `out`; returns what `backward` needs, None where nothing is recorded
    backward(run, kept, g, add)  the gradient in x for the gradient `g` in `out`, + add, a second gradient
                                 in x (or None); those of the parameters are added to theirs

and reads and writes pictures that may be a range of channels of wider ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ... import device
from ...adapters import DeviceArray
from ...backends import cuda_conv, cuda_elementwise
from ...interop import BFLOAT16
from .products import Layer, input_gradient, pictures, product, upsampled, weight_gradient
from .workspace import Run


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

    def __init__(self, layer: Layer):
        self.layer, self.output = layer, layer.output

    def forward(self, run: Run, x: DeviceArray, out: DeviceArray) -> Kept | None:
        track = self.layer.track
        feed = pictures(run, x, track, kept=True)  # x is a skip
        product(run, self.layer, feed, out)
        return Kept(track, feed.again, x.shape) if run.recording else None

    def backward(self, run: Run, kept: Kept, g: DeviceArray, add: DeviceArray | None = None) -> DeviceArray:
        weight_gradient(run, self.layer, kept.again(run), g)
        return input_gradient(run, self.layer, kept.track, g, kept.shape, add)


class Upsample:
    """Each pixel as a 2 x 2 patch, then a convolution."""

    def __init__(self, layer: Layer):
        self.layer = layer

    def output(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        n, h, w, c = shape
        return self.layer.output((n, 2 * h, 2 * w, c))

    def forward(self, run: Run, x: DeviceArray, out: DeviceArray) -> Kept | None:
        track = self.layer.track
        feed = upsampled(run, x, track)
        product(run, self.layer, feed, out)
        return Kept(track, feed.again, x.shape) if run.recording else None

    def backward(self, run: Run, kept: Kept, g: DeviceArray, add: DeviceArray | None = None) -> DeviceArray:
        weight_gradient(run, self.layer, kept.again(run), g)
        n, h, w, c = kept.shape
        wide = input_gradient(run, self.layer, kept.track, g, (n, 2 * h, 2 * w, c))
        dx = run.empty(kept.shape)
        cuda_elementwise.upsample_backward(wide, dx, run.stream, add=add)
        return dx


class Copy:
    """The same pictures at another place: what a network without a middle block hands on."""

    @staticmethod
    def output(shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    @staticmethod
    def forward(run: Run, x: DeviceArray, out: DeviceArray) -> tuple:
        nothing = device.full(x.shape, 0.0, "bfloat16", run.like)
        cuda_elementwise.add(x, nothing, out, run.stream)
        return ()

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
    """A step whose result, the sum with its residual, is divided by a scale."""

    def __init__(self, step: Any, scale: Scale):
        self.step, self.scale, self.output = step, scale, step.output

    def forward(self, run: Run, x: DeviceArray, out: DeviceArray) -> Any:
        whole = run.empty(out.shape)
        kept = self.step.forward(run, x, whole)
        self.scale.apply(run, whole, out)
        return kept

    def backward(self, run: Run, kept: Any, g: DeviceArray, add: DeviceArray | None = None) -> DeviceArray:
        return self.step.backward(run, kept, self.scale.apply(run, g, run.empty(g.shape)), add)
