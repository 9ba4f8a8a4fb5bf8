"""Layers of diffusion UNets and of the small networks that judge their pictures. Pictures are NHWC.

Weights are drawn as PyTorch's layers draw them (uniform within 1/sqrt(fan in); embeddings standard normal),
from a `numpy.random.Generator` over Philox, so that a seed gives the same network everywhere.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import ConfigError, ShapeError
from ..tracks import resolve_track
from . import ops as F
from .module import Module, Parameter, twin_of
from .tape import Variable
from .watch import current, watched
from .xp import namespace


def generator(seed: Any = 0) -> np.random.Generator:
    """A generator over Philox; a generator passes through, so that layers can share one."""
    return seed if isinstance(seed, np.random.Generator) else np.random.Generator(np.random.Philox(seed))


def _uniform(rng: np.random.Generator, shape: tuple, fan_in: int) -> Parameter:
    bound = 1.0 / math.sqrt(max(1, fan_in))
    return Parameter(rng.uniform(-bound, bound, shape).astype(np.float32))


class Linear(Module):
    """x (..., inputs) -> (..., outputs); weight (outputs, inputs), bias (outputs,).

    >>> Linear(3, 2)(np.ones((4, 3), np.float32)).shape
    (4, 2)
    """

    routed = True
    adapter: Any = None  #: a low-rank branch beside the product, set by `LoRA`

    def __init__(self, inputs: int, outputs: int, bias: bool = True, seed: Any = 0):
        rng = generator(seed)
        self.weight = _uniform(rng, (outputs, inputs), inputs)
        self.bias = _uniform(rng, (outputs,), inputs) if bias else None

    def multiplied(self, track: str) -> Parameter:
        """The weight whose rounded or quantised numbers a product on `track` multiplies."""
        return self.weight

    def forward(self, x: Any) -> Variable:
        def make(track: str, certify: Any = None) -> Variable:
            twin = twin_of(self.weight, track, certify is not None)
            return F.linear(x, self.weight, self.bias, track=track, twin=twin, certify=certify)

        watchers = current()
        y = watched(self, x, make, watchers) if watchers else make(self.track)
        return y if self.adapter is None else self.adapter.linear(self, x, y)


class Conv2d(Module):
    """x (N, H, W, inputs) -> (N, H', W', outputs); weight (outputs, kh, kw, inputs), bias (outputs,).

    padding: an int or ((top, bottom), (left, right)). ``zero=True`` starts from zero weights and bias.

    >>> Conv2d(3, 8, 3, stride=2, padding=1)(np.ones((1, 8, 8, 3), np.float32)).shape
    (1, 4, 4, 8)
    """

    routed = True
    adapter: Any = None  #: a low-rank branch beside the product, set by `LoRA`

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int = 3,
        stride: int = 1,
        padding: Any = 0,
        bias: bool = True,
        zero: bool = False,
        seed: Any = 0,
    ):
        rng = generator(seed)
        self.stride, self.padding = stride, padding
        self.weight = _uniform(rng, (outputs, kernel, kernel, inputs), inputs * kernel * kernel)
        self.bias = _uniform(rng, (outputs,), inputs * kernel * kernel) if bias else None
        if zero:
            for p in self.parameters():
                p.data[...] = 0

    def multiplied(self, track: str) -> Parameter:
        """The weight whose rounded or quantised numbers a product on `track` multiplies."""
        return self.weight

    def product(
        self, x: Any, track: str, bias: Any = None, residual: Any = None, certify: Any = None
    ) -> Variable:
        """x times the weight, plus what is given, on `track`; seen by nobody. certify: as in `ops.conv2d`."""
        twin = twin_of(self.weight, track, certify is not None)
        return F.conv2d(x, self.weight, bias, self.stride, self.padding, residual, track, twin, certify)

    def pictures(self, x: Any) -> Any:
        """What the kernel stands on."""
        return x

    def forward(self, x: Any, residual: Any = None) -> Variable:
        def make(track: str, certify: Any = None) -> Variable:
            return self.product(x, track, self.bias, residual, certify)

        watchers = current()
        y = watched(self, x, make, watchers) if watchers else make(self.track)
        return y if self.adapter is None else self.adapter.conv(self, x, y)


class GroupNorm(Module):
    """Group normalisation over (H, W, channels of a group); weight and bias (channels,).

    Called with ``silu=True`` it applies SiLU too, with ``shift=`` (N, channels) it normalises x + shift.
    """

    def __init__(self, groups: int, channels: int, eps: float = 1e-5):
        if channels % groups:
            raise ConfigError(
                f"GroupNorm: {groups} groups do not divide {channels} channels; change norm_num_groups"
            )
        self.groups, self.eps = groups, eps
        self.weight = Parameter(np.ones(channels, np.float32))
        self.bias = Parameter(np.zeros(channels, np.float32))

    def forward(self, x: Any, silu: bool = False, shift: Any = None) -> Variable:
        return F.group_norm(x, self.weight, self.bias, self.groups, self.eps, silu, shift)


class Embedding(Module):
    """Integers -> rows of weight (count, dim)."""

    def __init__(self, count: int, dim: int, seed: Any = 0):
        self.weight = Parameter(generator(seed).standard_normal((count, dim)).astype(np.float32))

    def forward(self, indices: Any) -> Variable:
        return F.take(self.weight, indices)


class BagEmbedding(Module):
    """Mean of the rows of weight (vocabulary, dim) whose word is present.

    Input: (B, vocabulary), 1 where the word occurs, else 0. An all-zero row (no caption) gives zeros.
    """

    routed = True

    def __init__(self, vocabulary: int, dim: int, seed: Any = 0):
        self.weight = Parameter(generator(seed).standard_normal((vocabulary, dim)).astype(np.float32))

    def forward(self, bag: Any) -> Variable:
        xp = namespace(self.weight.data)
        bag = xp.asarray(bag.data if isinstance(bag, Variable) else bag, dtype=self.weight.dtype)
        if bag.ndim != 2 or bag.shape[1] != self.weight.shape[0]:
            raise ShapeError(
                f"captions: shape {tuple(bag.shape)} given, but there are {self.weight.shape[0]} words; "
                f"pass (batch, {self.weight.shape[0]})"
            )
        words = bag.sum(axis=1, keepdims=True)
        total = F.matmul(bag, self.weight, track=self.track)  # the 0/1 bag is exact on every track
        return F.mul(total, 1.0 / words.clip(1.0))


def timestep_embedding(
    timesteps: Any,
    dim: int,
    flip_sin_to_cos: bool = False,
    freq_shift: float = 1.0,
    max_period: float = 10000.0,
) -> np.ndarray:
    """Sinusoidal embedding (Vaswani et al. 2017; Ho et al. 2020) of timesteps (B,): float32 (B, dim).

    Frequencies max_period^(-i / (dim/2 - freq_shift)); first sines, then cosines (swapped by
    `flip_sin_to_cos`). Computed in float32, as the published weights were trained.

    >>> timestep_embedding(np.array([0]), 4).tolist()
    [[0.0, 0.0, 1.0, 1.0]]
    """
    half = dim // 2
    exponent = (
        np.float32(-math.log(max_period)) * np.arange(half, dtype=np.float32) / np.float32(half - freq_shift)
    )
    angle = np.asarray(timesteps).astype(np.float32)[:, None] * np.exp(exponent)[None]
    parts = [np.sin(angle), np.cos(angle)]
    if dim % 2:
        parts.append(np.zeros((len(angle), 1), np.float32))
    return np.concatenate([parts[1], parts[0], *parts[2:]] if flip_sin_to_cos else parts, axis=1)


class TimestepEmbedding(Module):
    """linear_1, SiLU, linear_2: (B, inputs) -> (B, dim)."""

    def __init__(self, inputs: int, dim: int, seed: Any = 0):
        rng = generator(seed)
        self.linear_1 = Linear(inputs, dim, seed=rng)
        self.linear_2 = Linear(dim, dim, seed=rng)

    def forward(self, x: Any) -> Variable:
        return self.linear_2(F.silu(self.linear_1(x)))


class ResnetBlock2D(Module):
    """norm, SiLU, conv, + time embedding, norm, SiLU, conv, + shortcut; (N, H, W, inputs) -> (N, H, W,
    outputs).

    `time` is SiLU of the time embedding (B, time_dim), computed once for all blocks; time_dim None: no
    embedding.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        time_dim: int | None = None,
        groups: int = 32,
        eps: float = 1e-6,
        scale: float = 1.0,
        seed: Any = 0,
    ):
        rng = generator(seed)
        self.scale = scale
        self.norm1 = GroupNorm(groups, inputs, eps)
        self.conv1 = Conv2d(inputs, outputs, 3, padding=1, seed=rng)
        self.time_emb_proj = Linear(time_dim, outputs, seed=rng) if time_dim else None
        self.norm2 = GroupNorm(groups, outputs, eps)
        self.conv2 = Conv2d(outputs, outputs, 3, padding=1, seed=rng)
        self.conv_shortcut = Conv2d(inputs, outputs, 1, seed=rng) if inputs != outputs else None

    def forward(self, x: Any, time: Any = None) -> Variable:
        h = self.conv1(self.norm1(x, silu=True))
        shift = None if self.time_emb_proj is None or time is None else self.time_emb_proj(time)
        h = self.norm2(h, silu=True, shift=shift)
        skip = x if self.conv_shortcut is None else self.conv_shortcut(x)
        h = self.conv2(h, residual=skip)
        return h if self.scale == 1.0 else F.div(h, self.scale)


class Attention(Module):
    """Self-attention over the pixels of (N, H, W, channels) with group norm before and the input added after.

    Heads of `head_dim` channels; products to_q, to_k, to_v, to_out.0. `track` is the track of softmax(Q K^T)
    V.
    """

    routed = True

    def __init__(
        self,
        channels: int,
        head_dim: int,
        groups: int = 32,
        eps: float = 1e-6,
        scale: float = 1.0,
        seed: Any = 0,
    ):
        if channels % head_dim:
            raise ConfigError(
                f"attention_head_dim: {head_dim} does not divide {channels} channels; "
                "use a divisor or None (one head)"
            )
        rng = generator(seed)
        self.heads, self.scale = channels // head_dim, scale
        self.group_norm = GroupNorm(groups, channels, eps)
        self.to_q = Linear(channels, channels, seed=rng)
        self.to_k = Linear(channels, channels, seed=rng)
        self.to_v = Linear(channels, channels, seed=rng)
        self.to_out = [Linear(channels, channels, seed=rng)]

    def forward(self, x: Any) -> Variable:
        n, h, w, c = x.shape
        tokens = F.reshape(self.group_norm(x), (n, h * w, c))
        split = (n, h * w, self.heads, c // self.heads)
        q, k, v = (F.reshape(layer(tokens), split) for layer in (self.to_q, self.to_k, self.to_v))
        out = self.to_out[0](F.reshape(F.attention(q, k, v, track=self.track), (n, h * w, c)))
        out = F.add(F.reshape(out, (n, h, w, c)), x)
        return out if self.scale == 1.0 else F.div(out, self.scale)


class Downsample2D(Module):
    """3x3 convolution of stride 2; padding 0 pads by one on the right and at the bottom only, as DDPM's
    UNet does.
    """

    def __init__(self, channels: int, padding: int = 1, seed: Any = 0):
        self.conv = Conv2d(channels, channels, 3, 2, padding if padding else ((0, 1), (0, 1)), seed=seed)

    def forward(self, x: Any) -> Variable:
        return self.conv(x)


class UpsampledConv2d(Conv2d):
    """A 3x3 convolution of pictures (N, H, W, channels) that count as upsampled to twice their size, each
    pixel as a 2 x 2 patch: (N, 2H, 2W, channels).

    By phases (`by_phases`) it is one product of the pictures themselves, `ops.upsample_conv`: 4/9 of the
    work, the same result but for what is rounded or quantised, which are then sums of the weight's taps.
    """

    phases = True  #: whether to multiply by phases; see `UNet2D.upsample_by_phases`

    def __init__(self, channels: int, seed: Any = 0):
        super().__init__(channels, channels, 3, padding=1, seed=seed)

    def by_phases(self, track: str) -> bool:
        """Whether a call on `track` is made by phases: with whole blocks of channels, not on "dual"."""
        track = resolve_track(track, "bf16")
        return self.phases and track != "dual" and self.weight.shape[3] % 16 == 0

    def multiplied(self, track: str) -> Parameter:
        return self.weight.phases() if self.by_phases(track) else self.weight

    def product(
        self, x: Any, track: str, bias: Any = None, residual: Any = None, certify: Any = None
    ) -> Variable:
        if residual is not None or not self.by_phases(track):
            return super().product(self.pictures(x), track, bias, residual, certify)
        kernels = self.weight.phases()
        twin = twin_of(kernels, track, certify is not None)
        return F.upsample_conv(x, self.weight, bias, track, kernels.data, twin, certify)

    def pictures(self, x: Any) -> Variable:
        return F.upsample_nearest(x)

    def forward(self, x: Any) -> Variable:
        return super().forward(x)  # nothing is added to what is upsampled


class Upsample2D(Module):
    """Nearest-neighbour upsampling by 2, then a 3x3 convolution."""

    def __init__(self, channels: int, seed: Any = 0):
        self.conv = UpsampledConv2d(channels, seed=seed)

    def forward(self, x: Any) -> Variable:
        return self.conv(x)


def upsampling(model: Module) -> dict[str, UpsampledConv2d]:
    """The convolutions behind an upsampling, by the name of their weight."""
    return {f"{name}.weight": m for name, m in model.named_modules() if isinstance(m, UpsampledConv2d)}
