"""A residual block on the device: norm, SiLU, conv, + time embedding, norm, SiLU, conv, + shortcut.

The quantiser sits in the norms, the time embedding, the biases and the residual in the convolutions, and a
1x1 shortcut on the BF16 track beside an FP4 convolution is that convolution's second track: k-tiles of the
same launch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...adapters import DeviceArray
from .blocks import summed
from .products import (
    Layer,
    Norm,
    input_gradient,
    normed,
    observed,
    passed,
    pictures,
    product,
    weight_gradient,
)
from .workspace import Pictures, Run, shaped


class Kept(NamedTuple):
    """What the backward needs; `again*` are those of the products' `Feed`."""

    x: DeviceArray
    h: DeviceArray  # the first convolution's result
    again1: Any
    again2: Any
    again_shortcut: Any
    statistics1: dict
    statistics2: dict
    tracks: tuple[str, str, str]  # of both convolutions and the shortcut


class ResnetBlock:
    """See `nn.ResnetBlock2D`, of whose parameters `name` is the prefix."""

    def __init__(self, name: str, module: Any):
        self.norm1, self.norm2 = (Norm(f"{name}.{n}", getattr(module, n)) for n in ("norm1", "norm2"))
        self.conv1, self.conv2 = (Layer(f"{name}.{n}", getattr(module, n)) for n in ("conv1", "conv2"))
        self.conv2.joined = True
        self.projection = self._optional(name, module, "time_emb_proj")
        self.shortcut = self._optional(name, module, "conv_shortcut")

    @staticmethod
    def _optional(name: str, module: Any, part: str) -> Layer | None:
        found = getattr(module, part)
        return None if found is None else Layer(f"{name}.{part}", found)

    reads_sums = True

    def output(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:3], self.conv2.o)

    # ---- forward
    def forward(self, run: Run, x: Pictures, out: DeviceArray, sums: bool) -> tuple[Pictures, Kept | None]:
        layers = (self.conv1, self.conv2, self.shortcut)
        tracks = tuple("" if layer is None else layer.track for layer in layers)
        feed, statistics1 = normed(run, self.norm1, x, True, tracks[0])
        again1 = feed.again
        shift = {} if self.projection is None else {"image_bias": run.time.bias(self.projection)}
        h = run.empty(self.output(x.array.shape), hold="saved BF16")
        inner = product(run, self.conv1, feed, h, sums=True, **shift)
        del feed
        feed, statistics2 = normed(run, self.norm2, inner, True, tracks[1])
        finish, again_shortcut = self._residual(run, x.array, tracks)
        result = product(run, self.conv2, feed, out, sums, **finish)
        if not run.recording:
            return result, None
        return result, Kept(x.array, h, again1, feed.again, again_shortcut, statistics1, statistics2, tracks)

    def _residual(self, run: Run, x: DeviceArray, tracks: tuple) -> tuple[dict, Any]:
        """What the second convolution adds, as operands of its launch; the shortcut's input again."""
        if self.shortcut is None:
            return {"residual": x}, None
        feed = pictures(run, x, tracks[2], kept=True)
        if tracks[1:3] == ("fp4", "bf16"):
            observed(run, self.shortcut, feed, None)
            weight = shaped(self.shortcut.sixteen(run), (self.shortcut.o, self.shortcut.c))
            return {"x16": x, "w16": weight, "on_output": True, "bias2": self.shortcut.bias(run)}, feed.again
        residual = run.empty(self.output(x.shape))
        product(run, self.shortcut, feed, residual)
        return {"residual": residual}, feed.again

    # ---- backward
    def backward(self, run: Run, kept: Kept, g: DeviceArray, add: DeviceArray | None = None) -> DeviceArray:
        x, h, again1, again2, again_shortcut, statistics1, statistics2, tracks = kept
        del kept
        g = passed(run, self.conv2, g)
        weight_gradient(run, self.conv2, again2(run), g)
        d = input_gradient(run, self.conv2, tracks[1], g, h.shape)
        dshift = None if self.projection is None else run.time.gradient(run, self.projection)
        dh = self.norm2.backward(run, h, d, True, statistics2, dshift=dshift)
        del again2, h, d
        dh = passed(run, self.conv1, dh)
        weight_gradient(run, self.conv1, again1(run), dh)
        d = input_gradient(run, self.conv1, tracks[0], dh, x.shape)
        del again1, dh
        if self.shortcut is None:
            add = summed(run, g, add)
        else:
            g = passed(run, self.shortcut, g)
            weight_gradient(run, self.shortcut, again_shortcut(run), g)
            add = input_gradient(run, self.shortcut, tracks[2], g, x.shape, add)
        return self.norm1.backward(run, x, d, True, statistics1, add)
