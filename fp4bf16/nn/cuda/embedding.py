"""The time embedding on the device, with those of classes and captions: SiLU of their sum, (N, 1, 1, D)."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...adapters import DeviceArray
from ...backends import cuda_conv, cuda_elementwise, cuda_math
from ...backends.cuda_gemm import filled, round_up
from ...device import call
from .products import Feed, Layer, input_gradient, pictures, product, weight_gradient
from .workspace import Run, converted, part, shaped


class Time:
    """The embedding that the residual blocks read, in the form of each track that asks for it."""

    def __init__(self, value: DeviceArray):
        self.value, self._feeds = value, {}

    def feed(self, run: Run, track: str) -> Feed:
        if track not in self._feeds:
            self._feeds[track] = pictures(run, self.value, track)
        return self._feeds[track]


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

    def __init__(self, model: Any):
        c = model.config
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
        run.time = Time(value)
        if not run.recording:
            return None
        run.hold("saved BF16", inner, total, value)
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
        """From `run.time_gradient`; None where no block reads the embedding."""
        if run.time_gradient is None:
            return
        g = converted(run, run.time_gradient, self.dim)
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
        weight_gradient(run, self.linear2, kept.second(run), d)
        g = input_gradient(run, self.linear2, kept.tracks[1], d, kept.inner.shape)
        d = run.empty(g.shape)
        cuda_elementwise.silu_backward(g, kept.inner, d, run.stream)
        weight_gradient(run, self.linear1, kept.first(run), d)
