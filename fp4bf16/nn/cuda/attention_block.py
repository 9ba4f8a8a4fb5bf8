"""Self-attention over the pixels on the device: norm, q, k and v, attention, the product out, + x.

q, k and v are channel ranges of one array. softmax(Q K^T) V itself runs on the BF16 track, whatever the route
says of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...adapters import DeviceArray
from ...backends import cuda_attention
from .blocks import summed
from .products import (
    Group,
    Layer,
    Norm,
    Part,
    input_gradient,
    normed,
    passed,
    pictures,
    product,
    weight_gradient,
)  # fmt: skip
from .workspace import Pictures, Run, part, seen


class Kept(NamedTuple):
    """What the backward needs; `again` has the norm's result by track, as the products read it."""

    x: DeviceArray
    statistics: dict
    again: dict
    qkv: DeviceArray
    out: DeviceArray  # of the attention
    lse: DeviceArray
    again_out: Any
    parts: list[Part]  # of to_q, to_k, to_v
    track: str  # of to_out


class AttentionBlock:
    """See `nn.Attention`, of whose parameters `name` is the prefix."""

    def __init__(self, name: str, module: Any, layout: Any):
        self.norm = Norm(f"{name}.group_norm", module.group_norm)
        self.inward = Group(
            [Layer(f"{name}.{n}", getattr(module, n)) for n in ("to_q", "to_k", "to_v")], layout
        )
        self.outward = Layer(f"{name}.to_out.0", module.to_out[0])
        self.heads = module.heads

    reads_sums = True

    @staticmethod
    def output(shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def _tokens(self, x: DeviceArray) -> DeviceArray:
        """(N, H, W, C) as (N, T, heads, D)."""
        n, h, w, c = x.shape
        shape, dim = (n, h * w, self.heads, c // self.heads), c // self.heads
        strides = (x.strides[0], x.strides[2], dim, 1)
        return seen(x, shape, strides)

    def _parts(self, qkv: DeviceArray) -> list[DeviceArray]:
        c = qkv.shape[3] // 3
        return [part(qkv, i * c, c) for i in range(3)]

    @property
    def scale(self) -> float:
        return (self.outward.c // self.heads) ** -0.5

    # ---- forward
    def forward(self, run: Run, x: Pictures, out: DeviceArray, sums: bool) -> tuple[Pictures, Kept | None]:
        n, h, w, c = x.array.shape
        parts, track = self.inward.parts(), self.outward.track
        feeds, statistics = {}, {}
        for kind in dict.fromkeys(p.track for p in parts):
            feeds[kind], statistics = normed(run, self.norm, x, False, kind)
        qkv = run.empty((n, h, w, 3 * c), hold="saved BF16")
        for p in parts:
            product(run, p.layer, feeds[p.track], part(qkv, p.start, p.layer.o))
        again = {kind: feed.again for kind, feed in feeds.items()}
        del feeds
        mixed = run.empty(x.array.shape, hold="saved BF16")
        lse = run.empty((n, self.heads, h * w), "float32", "statistics") if run.recording else None
        tokens = [self._tokens(t) for t in (*self._parts(qkv), mixed)]
        cuda_attention.forward(*tokens, run.stream, scale=self.scale, lse=lse)
        feed = pictures(run, mixed, track, kept=True)
        result = product(run, self.outward, feed, out, sums, residual=x.array)
        if not run.recording:
            return result, None
        run.hold("saved BF16", x.array)
        return result, Kept(x.array, statistics, again, qkv, mixed, lse, feed.again, parts, track)

    # ---- backward
    def backward(self, run: Run, kept: Kept, g: DeviceArray, add: DeviceArray | None = None) -> DeviceArray:
        shape = kept.x.shape
        own = passed(run, self.outward, g)  # what is added to x afterwards is no part of the layer
        weight_gradient(run, self.outward, kept.again_out(run), own)
        d = input_gradient(run, self.outward, kept.track, own, shape)
        dqkv = run.empty(kept.qkv.shape)
        self._attention_backward(run, kept, d, dqkv)
        x, statistics, again, parts = kept.x, kept.statistics, kept.again, kept.parts
        del d, kept, own
        value = {kind: f(run) for kind, f in again.items()}
        gradient = None
        for p in parts:
            own = passed(run, p.layer, part(dqkv, p.start, p.layer.o))
            weight_gradient(run, p.layer, value[p.track], own)
            gradient = input_gradient(run, p.layer, p.track, own, shape, gradient)
        del value
        return self.norm.backward(run, x, gradient, False, statistics, summed(run, g, add))

    def _attention_backward(self, run: Run, kept: Kept, d: DeviceArray, dqkv: DeviceArray) -> None:
        q, k, v = (self._tokens(t) for t in self._parts(kept.qkv))
        dq, dk, dv = (self._tokens(t) for t in self._parts(dqkv))
        cuda_attention.backward(q, k, v, self._tokens(kept.out), kept.lse, self._tokens(d), dq, dk, dv,
                                run.stream, scale=self.scale)  # fmt: skip
