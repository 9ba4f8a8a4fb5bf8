"""The time embedding on the device, with those of classes and captions: SiLU of their sum, (N, 1, 1, D)."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...adapters import DeviceArray
from ...backends import cuda_conv, cuda_elementwise, cuda_math
from ...backends.cuda_gemm import filled, round_up
from ...device import call
from .products import Feed, Group, Layer, input_gradient, passed, pictures, product, weight_gradient
from .workspace import Run, converted, part, seen, shaped


class Projections:
    """The layers that lead the embedding to each residual block, in groups of equal width: few products in
    place of many small ones, forward and backward.
    """

    def __init__(self, layers: list[Layer], layout: Any):
        widths: dict[int, list[Layer]] = {}
        for layer in layers:
            widths.setdefault(layer.o, []).append(layer)
        self.groups = [Group(same, layout) for same in widths.values()]


class Time:
    """The embedding (N, 1, 1, D), what the residual blocks add of it, and the gradients in that."""

    def __init__(self, run: Run, projections: Projections, value: DeviceArray):
        self.value, self._bias, self._gradient = value, {}, {}
        self._groups = [(group, group.parts()) for group in projections.groups]
        self._feeds: dict[str, Feed] = {}
        for group, parts in self._groups:
            sums = run.empty((*value.shape[:3], group.o), "float32")
            for p in parts:
                if p.track not in self._feeds:
                    self._feeds[p.track] = pictures(run, value, p.track)
                product(run, p.layer, self._feeds[p.track], part(sums, p.start, p.layer.o))
            for i, layer in enumerate(group.layers):
                own = part(sums, i * layer.o, layer.o)
                self._bias[layer.name] = seen(own, (value.shape[0], layer.o), (group.o, 1))

    def bias(self, layer: Layer) -> DeviceArray:
        """What `layer` makes of the embedding: (N, O) float32."""
        return self._bias[layer.name]

    def gradient(self, run: Run, layer: Layer) -> DeviceArray:
        """Where the gradient in `bias` is written: (N, O) float32, those of a group side by side."""
        if not self._gradient:
            n = self.value.shape[0]
            for group, _ in self._groups:
                whole = run.empty((len(group.layers), n, group.layers[0].o), "float32")
                for i, member in enumerate(group.layers):
                    place = whole.address + 4 * i * n * member.o
                    self._gradient[member.name] = seen(whole, (n, member.o), (member.o, 1), place)
        return self._gradient[layer.name]

    def backward(self, run: Run) -> DeviceArray:
        """The gradient in `value`, float32; those of the layers' parameters are added to theirs."""
        total, n = None, self.value.shape[0]
        again = {track: feed.again(run) for track, feed in self._feeds.items()}
        for group, parts in self._groups:
            width = group.layers[0].o
            for p in parts:
                first, count = group.layers[p.start // width], p.layer.o // width
                g = run.empty((n, 1, 1, p.layer.o))  # (layers, N, O) -> (N, layers, O)
                call("convert", self.gradient(run, first).address, 0, n, count, width, width, n * width, 1,
                     g.address, 1, width, run.stream)  # fmt: skip
                g = passed(run, p.layer, g)
                weight_gradient(run, p.layer, again[p.track], g)
                total = input_gradient(run, p.layer, p.track, g, self.value.shape, total, "float32")
        return total


class Kept(NamedTuple):
    """What the backward needs."""

    first: Any  # `Feed.again` of both layers
    second: Any
    inner: DeviceArray  # the first layer's result
    total: DeviceArray  # the sum of the embeddings
    labels: DeviceArray | None
    words: DeviceArray | None  # BF16, every word's share of its caption
    tracks: tuple[str, str]


class Embedding:
    """Timesteps, and class labels or captions where the model has them."""

    def __init__(self, model: Any, projections: Projections):
        c, self.projections = model.config, projections
        self.channels, self.flip, self.shift = c.block_out_channels[0], c.flip_sin_to_cos, c.freq_shift
        self.dim, self.classes, self.vocabulary = c.time_dim, c.num_class_embeds, c.caption_vocabulary
        names = ("time_embedding.linear_1", "time_embedding.linear_2")
        modules = (model.time_embedding.linear_1, model.time_embedding.linear_2)
        self.linear1, self.linear2 = (Layer(n, m) for n, m in zip(names, modules, strict=True))

    # ---- forward
    def forward(self, run: Run, batch: int, t: DeviceArray, labels, captions) -> Kept | None:
        """Puts `run.time` in place. t (B,) or (1,) int64, labels (B,) int64, captions (B, words) float32."""
        tracks = self.linear1.track, self.linear2.track
        waves = run.empty((batch, self.channels))
        cuda_elementwise.timestep_embedding(t, waves, run.stream, flip=self.flip, freq_shift=self.shift)
        first = pictures(run, shaped(waves, (batch, 1, 1, self.channels)), tracks[0])
        shape = (batch, 1, 1, self.dim)
        inner, hidden, total, value = (run.empty(shape) for _ in range(4))
        product(run, self.linear1, first, inner)
        cuda_elementwise.silu(inner, hidden, run.stream)
        second = pictures(run, hidden, tracks[1])
        added, words = self._conditions(run, batch, labels, captions)
        product(run, self.linear2, second, total, residual=added)
        cuda_elementwise.silu(total, value, run.stream)
        run.time = Time(run, self.projections, value)
        if not run.recording:
            return None
        run.hold("saved BF16", inner, total)
        return Kept(first.again, second.again, inner, total, labels, words, tracks)

    def _conditions(self, run: Run, batch: int, labels, captions) -> tuple[Any, Any]:
        """(sum of the class and caption embeddings (B, 1, 1, D), shares of the words), None where absent."""
        found, words = None, None
        if labels is not None:
            found = run.empty((batch, self.dim))
            weight = run.weights.data_of("class_embedding.weight")
            cuda_elementwise.take_rows(weight, labels, found, run.stream)
        if captions is not None:
            found, words = self._captions(run, captions, found)
        return None if found is None else shaped(found, (batch, 1, 1, self.dim)), words

    def _captions(self, run: Run, captions: DeviceArray, added: DeviceArray | None) -> tuple:
        """Mean of the rows of the words: BF16 whatever the route says, as a lookup is. The bag is exact in
        BF16, the share of each word a scale of the rows.
        """
        batch, count = captions.shape
        raw = cuda_math.of(captions).raw(captions)
        shares = 1.0 / raw.sum(axis=1, keepdims=True).clip(1.0)
        share = cuda_math.wrapped(shares, captions)
        bag = converted(run, shaped(captions, (batch, 1, 1, count)), round_up(count, 8))
        weight, out = run.weights.bf16_of("caption_embedding.weight"), run.empty((batch, self.dim))
        fields = {
            "m": batch, "n": self.dim, "k16": count, "a16": bag.address, "a16_stride": bag.shape[3],
            "b16": weight.address, "b16_stride": self.dim, "b16_n_major": 1, "row_scale": share.address,
            "row_scale_step": 1, "alpha": 1.0, "d": out.address, "d_dtype": 1, "d_stride": self.dim,
        }  # fmt: skip
        if added is not None:
            fields |= {"residual": added.address, "residual_dtype": 1, "residual_stride": self.dim}
        call("gemm", filled("fp4bf16_gemm_args", fields), run.stream)
        if not run.recording:
            return out, None
        words = shaped(cuda_math.wrapped(raw * shares, captions), (batch, 1, 1, count))
        return out, part(converted(run, words, round_up(count, 8)), 0, count)

    # ---- backward
    def backward(self, run: Run, kept: Kept) -> None:
        """From the gradients that the residual blocks left in `run.time`."""
        g = converted(run, run.time.backward(run), self.dim)
        d = run.empty(g.shape)
        cuda_elementwise.silu_backward(g, kept.total, d, run.stream)
        batch = d.shape[0]
        if kept.labels is not None:
            target = run.gradients.grad_of("class_embedding.weight")
            cuda_elementwise.take_rows_backward(shaped(d, (batch, self.dim)), kept.labels, target, run.stream)
        if kept.words is not None:
            target = run.gradients.grad_of("caption_embedding.weight")
            count = kept.words.shape[3]
            geometry = cuda_conv.Geometry(batch, 1, 1, 1, 1, count, 1, 1, 1, 0, 0)
            cuda_conv.wgrad(geometry, kept.words, d, shaped(target, (count, 1, 1, self.dim)), run.stream,
                            accumulate=True)  # fmt: skip
        d = passed(run, self.linear2, d)
        weight_gradient(run, self.linear2, kept.second(run), d)
        g = input_gradient(run, self.linear2, kept.tracks[1], d, kept.inner.shape)
        d = run.empty(g.shape)
        cuda_elementwise.silu_backward(g, kept.inner, d, run.stream)
        d = passed(run, self.linear1, d)
        weight_gradient(run, self.linear1, kept.first(run), d)
