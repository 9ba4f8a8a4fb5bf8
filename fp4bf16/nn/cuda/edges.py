"""Steps of a network on the device: the first convolution and the last, of few channels on one side.

A tile of a product takes 64 or more channels of a tap at once, and 128 outputs; those of a picture's 3 leave
it nearly empty, tap after tap. Both convolutions are therefore made 1x1, with the taps among the channels:

    the first   the values that an output pixel meets, side by side, times the weight's rows (O, kh kw C)
    the last    each pixel times the weight as rows (O kh kw, C), then the sum of what its neighbours hold for
                each output, in one kernel; the gradient in the prediction is spread to the taps first
"""

from __future__ import annotations

from copy import copy
from functools import partial

from ...adapters import DeviceArray
from ...backends import cuda_conv, cuda_elementwise
from ...backends.cuda_gemm import round_up
from .blocks import Kept
from .products import (
    Feed,
    Layer,
    Norm,
    given,
    input_gradient,
    normed,
    observed,
    passed,
    pictures,
    product,
    weight_gradient,
)  # fmt: skip
from .workspace import Pictures, Run, converted, part, shaped

_FEW_CHANNELS = 16  # of pictures: their 3 x 3 patches have 144 values at most, a layer's result 128 or more
_FEW_OUTPUTS, _FEW_INPUTS = 64, 1024  # of all taps, and channels: what `conv2d_few` takes


def pointwise(layer: Layer, o: int, c: int) -> Layer:
    """The same weight as that of a 1x1 convolution (O, C)."""
    made = copy(layer)
    made.o, made.c, made.kh, made.kw, made.stride = o, c, 1, 1, 1
    made.top = made.bottom = made.left = made.right = 0
    return made


class First:
    """The convolution that the latents enter by: float32 (B, H, W, C) of any number of channels."""

    reads_sums = False

    def __init__(self, layer: Layer):
        self.layer, self.output = layer, layer.output
        self.rows = pointwise(layer, layer.o, layer.kh * layer.kw * layer.c)

    def forward(self, run: Run, x: Pictures, out: DeviceArray, sums: bool) -> tuple[Pictures, Kept | None]:
        track, x = self.layer.track, x.array
        feed, layer = self._feed(x, run, track)
        if run.watchers:
            feed = feed._replace(other=partial(self._feed, x))
        result = product(run, layer, feed, out, sums)
        return result, Kept(track, feed.again, x.shape, layer) if run.recording else None

    def _feed(self, x: DeviceArray, run: Run, track: str) -> tuple[Feed, Layer]:
        """x as the product reads it, and which layer that is."""
        layer = self.layer
        if track == "fp4":
            return pictures(run, part(converted(run, x, round_up(layer.c, 8)), 0, layer.c), track), layer
        if layer.c <= _FEW_CHANNELS:
            layer, wide = self.rows, self._patches(run, x)
        else:
            wide = converted(run, x, round_up(layer.c, 8))
        run.hold("saved BF16", wide)
        return Feed(wide, None, partial(given, part(wide, 0, layer.c))), layer

    def _patches(self, run: Run, x: DeviceArray) -> DeviceArray:
        wide = run.empty((*self.output(x.shape)[:3], round_up(self.rows.c, 8)))
        cuda_elementwise.patches(x, wide, self.layer.geometry(x.shape), run.stream, run.run_if)
        return wide

    def backward(self, run: Run, kept: Kept, g: DeviceArray, add: None = None) -> None:
        weight_gradient(run, kept.more, kept.again(run), passed(run, kept.more, g))


class Last:
    """Norm, SiLU and the convolution that the prediction leaves by, float32."""

    reads_sums = True

    def __init__(self, norm: Norm, layer: Layer):
        self.norm, self.layer, self.output = norm, layer, layer.output
        self.taps = pointwise(layer, layer.o * layer.kh * layer.kw, layer.c)
        self.few = layer.stride == 1 and self.taps.o <= _FEW_OUTPUTS

    def forward(self, run: Run, x: Pictures, out: DeviceArray, sums: bool) -> tuple[Pictures, Kept | None]:
        layer, track = self.layer, self.layer.track
        feed, statistics = normed(run, self.norm, x, True, track)
        if self.few and track == "bf16" and layer.c <= _FEW_INPUTS:
            cuda_elementwise.conv2d_few(feed.x, layer.sixteen(run), layer.bias(run), out,
                                        layer.geometry(feed.x.shape), run.stream)  # fmt: skip
            observed(run, layer, feed, out)
        else:
            product(run, layer, feed, out)
        if not run.recording:
            return Pictures(out), None
        run.hold("saved BF16", x.array)
        return Pictures(out), Kept(track, feed.again, x.array.shape, (x.array, statistics))

    def backward(self, run: Run, kept: Kept, g: DeviceArray, add: DeviceArray | None = None) -> DeviceArray:
        g = passed(run, self.layer, g)
        g = part(converted(run, g, round_up(self.layer.o, 8)), 0, self.layer.o)
        again = kept.again(run)
        if self.few:
            d = self._gradients_of_taps(run, kept, again, g)
        else:
            weight_gradient(run, self.layer, again, g)
            d = input_gradient(run, self.layer, kept.track, g, kept.shape)
        x, statistics = kept.more
        return self.norm.backward(run, x, d, True, statistics, add)

    def _gradients_of_taps(self, run: Run, kept: Kept, x: DeviceArray, g: DeviceArray) -> DeviceArray:
        """Adds the gradients of the layer; that in what it read, x."""
        taps = self.taps
        cuda_elementwise.column_sums(g, run.gradients.grad_of(f"{taps.name}.bias"), run.stream)
        spread = run.empty((*kept.shape[:3], round_up(taps.o, 8)))
        cuda_elementwise.spread_taps(g, spread, self.layer.geometry(kept.shape), run.stream)
        spread = part(spread, 0, taps.o)
        weight_gradient(run, taps, x, spread, bias=False)
        dx = run.empty(kept.shape)
        weight = shaped(self.layer.seen(run, kept.track), taps.shape)
        cuda_conv.dgrad(taps.geometry(kept.shape), spread, weight, dx, run.stream)
        return dx
