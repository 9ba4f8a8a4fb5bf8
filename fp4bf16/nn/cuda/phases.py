"""Upsampling convolutions on the device as one product of the small pictures, by phases of the result's
pixels (`fp4bf16.nn.ops.upsample_conv`), where the model's layer says so. Watchers are shown that product.
"""

from __future__ import annotations

from typing import Any

from ...adapters import DeviceArray
from .blocks import Kept, Upsample
from .parameters import Phases
from .products import Layer, doubled, input_gradient, passed, pictures, product, weight_gradient
from .workspace import Pictures, Run, decoded, shaped


class PhaseLayer(Layer):
    """A 3x3 convolution behind a nearest upsampling as a 2x2 kernel for each phase of the result's pixels."""

    def __init__(self, name: str, module: Any):
        super().__init__(name, module)
        self.kh = self.kw = 2

    @property
    def how(self) -> dict[str, Any]:
        return {"phases": True}

    def output(self, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
        n, h, w, _ = shape
        return n, 2 * h, 2 * w, self.o

    def _phases(self, run: Run) -> Phases:
        return run.weights.phases_of(f"{self.name}.weight", run.stream)

    def sixteen(self, run: Run) -> DeviceArray:
        """BF16 (O, 4, 4, C): phases, then taps."""
        return shaped(self._phases(run).bf16, (self.o, 4, 4, self.c))

    def _twin(self, run: Run) -> tuple[DeviceArray, DeviceArray]:
        """E4M3 (O, 4, 4, C) and the outer scales (4 O,), one a phase of an output channel."""
        made = self._phases(run)
        return shaped(made.twin, (self.o, 4, 4, self.c)), made.twin_scale

    def _decoded_twin(self, run: Run) -> DeviceArray:
        made, shape = self._phases(run), (4 * self.o, 4 * self.c)
        whole = decoded(run, shaped(made.twin, shape), None, made.twin_scale, 1, shape)
        return shaped(whole, (self.o, 4, 4, self.c))


class PhasedUpsample(Upsample):
    """`Upsample`, by phases in the calls for which the layer's module says so (`by_phases`)."""

    def __init__(self, layer: Layer):
        super().__init__(layer)
        self.phases = PhaseLayer(layer.name, layer.module)

    def forward(self, run: Run, x: Pictures, out: DeviceArray, sums: bool) -> tuple[Pictures, Any]:
        track = self.layer.track
        if not self.layer.module.by_phases(track):
            return super().forward(run, x, out, sums)
        feed = pictures(run, x.array, track)
        result = product(run, self.phases, feed, out, sums)
        return result, Kept(track, feed.again, x.array.shape, self.phases) if run.recording else None

    def backward(self, run: Run, kept: Kept, g: DeviceArray, add: DeviceArray | None = None) -> DeviceArray:
        if kept.more is None:
            return super().backward(run, kept, g, add)
        g = passed(run, kept.more, g)
        # The gradient in the phases' weights, summed back to the taps, is that of the upsampled pictures: one
        # product in place of four and their sum.
        weight_gradient(run, self.layer, doubled(run, kept.again(run)), g)
        return input_gradient(run, kept.more, kept.track, g, kept.shape, add)
