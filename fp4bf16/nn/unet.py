"""The DDPM UNet (Ho et al. 2020) with the parameter names of diffusers' ``UNet2DModel``, in NHWC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from ..errors import ConfigError, ShapeError, nearest
from . import ops as F
from .layers import (
    Attention,
    BagEmbedding,
    Conv2d,
    Downsample2D,
    Embedding,
    GroupNorm,
    ResnetBlock2D,
    TimestepEmbedding,
    Upsample2D,
    generator,
    timestep_embedding,
    upsampling,
)
from .module import Module
from .tape import Variable
from .xp import namespace

#: Arguments of diffusers' model of which one value alone is supported here.
_FIXED = {
    "time_embedding_type": ("positional",),
    "act_fn": ("silu", "swish"),
    "mid_block_type": ("UNetMidBlock2D", None),
    "downsample_type": ("conv",),
    "upsample_type": ("conv",),
    "resnet_time_scale_shift": ("default",),
    "class_embed_type": (None,),
    "dropout": (0, 0.0),
    "downsample_padding": (0, 1),
}
_DOWN, _UP = ("DownBlock2D", "AttnDownBlock2D"), ("UpBlock2D", "AttnUpBlock2D")


@dataclass(frozen=True)
class UNetConfig:
    """Arguments of ``UNet2DModel`` by diffusers' names and defaults, and `caption_vocabulary`.

    caption_vocabulary: number of words of a bag-of-words caption whose mean embedding
    (``caption_embedding.weight``) is added to the time embedding; None for no captions. attention_head_dim
    None: one head over all channels. Values that are not supported raise `ConfigError` naming argument, value
    and what is.

    >>> UNetConfig.ddpm_cifar10_32().block_out_channels
    (128, 256, 256, 256)
    """

    sample_size: int | tuple[int, int] | None = None
    in_channels: int = 3
    out_channels: int = 3
    center_input_sample: bool = False
    time_embedding_type: str = "positional"
    time_embedding_dim: int | None = None
    freq_shift: float = 0
    flip_sin_to_cos: bool = True
    down_block_types: tuple[str, ...] = (
        "DownBlock2D",
        "AttnDownBlock2D",
        "AttnDownBlock2D",
        "AttnDownBlock2D",
    )
    mid_block_type: str | None = "UNetMidBlock2D"
    up_block_types: tuple[str, ...] = ("AttnUpBlock2D", "AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D")
    block_out_channels: tuple[int, ...] = (224, 448, 672, 896)
    layers_per_block: int = 2
    mid_block_scale_factor: float = 1
    downsample_padding: int = 1
    downsample_type: str = "conv"
    upsample_type: str = "conv"
    dropout: float = 0.0
    act_fn: str = "silu"
    attention_head_dim: int | None = 8
    norm_num_groups: int = 32
    attn_norm_num_groups: int | None = None
    norm_eps: float = 1e-5
    resnet_time_scale_shift: str = "default"
    add_attention: bool = True
    class_embed_type: str | None = None
    num_class_embeds: int | None = None
    num_train_timesteps: int | None = None
    caption_vocabulary: int | None = None

    def __post_init__(self) -> None:
        for name in ("down_block_types", "up_block_types", "block_out_channels"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, allowed in _FIXED.items():
            self._check(getattr(self, name) in allowed, name, "one of " + ", ".join(map(repr, allowed)))
        for name, allowed in (("down_block_types", _DOWN), ("up_block_types", _UP)):
            self._check(
                all(b in allowed for b in getattr(self, name)), name, "a tuple of " + " and ".join(allowed)
            )
            self._check(
                len(getattr(self, name)) == len(self.block_out_channels) > 0,
                name,
                f"one entry for each of block_out_channels {self.block_out_channels}",
            )
        for name in ("in_channels", "out_channels", "layers_per_block", "norm_num_groups"):
            value = getattr(self, name)
            self._check(isinstance(value, int) and value > 0, name, "a positive whole number")
        for c in self.block_out_channels:
            self._check(
                c % self.norm_num_groups == 0, "norm_num_groups", f"a divisor of the {c} channels of a block"
            )

    def _check(self, good: bool, name: str, needed: str) -> None:
        if not good:
            raise ConfigError(f"UNetConfig: {name} is {getattr(self, name)!r}, but must be {needed}")

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> UNetConfig:
        """From a diffusers ``config.json`` as a dict; keys that begin with "_" (class and version) are
        skipped.
        """
        known = {f.name for f in fields(cls)}
        given = {k: v for k, v in config.items() if not k.startswith("_")}
        for key in given:
            if key not in known:
                raise ConfigError(
                    f"UNetConfig: {key!r} is not an argument of this model{nearest(key, known)}"
                )
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `from_dict` takes them back."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def ddpm_cifar10_32(cls, **changes: Any) -> UNetConfig:
        """The published ``google/ddpm-cifar10-32`` configuration: 35.7 M parameters, 12.44 GFLOP a
        picture.
        """
        values = dict(
            sample_size=32,
            freq_shift=1,
            flip_sin_to_cos=False,
            block_out_channels=(128, 256, 256, 256),
            down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
            downsample_padding=0,
            attention_head_dim=None,
            norm_eps=1e-6,
        )
        return cls(**{**values, **changes})

    @classmethod
    def tiny(cls, **changes: Any) -> UNetConfig:
        """16 x 16 RGB pictures as 8 x 8 x 12 (`pixel_unshuffle`): 0.66 M parameters beside the captions'."""
        values = dict(
            sample_size=8,
            in_channels=12,
            out_channels=12,
            block_out_channels=(32, 64),
            down_block_types=("DownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "UpBlock2D"),
            layers_per_block=1,
            norm_num_groups=8,
            attention_head_dim=None,
        )
        return cls(**{**values, **changes})

    @property
    def time_dim(self) -> int:
        """Width of the time embedding."""
        return self.time_embedding_dim or 4 * self.block_out_channels[0]


class _Builder:
    """What all blocks of one network share."""

    def __init__(self, config: UNetConfig, seed: Any):
        self.config, self.rng = config, generator(seed)

    def resnet(self, inputs: int, outputs: int, scale: float = 1.0) -> ResnetBlock2D:
        c = self.config
        return ResnetBlock2D(inputs, outputs, c.time_dim, c.norm_num_groups, c.norm_eps, scale, self.rng)

    def attention(self, channels: int, groups: int | None = None, scale: float = 1.0) -> Attention:
        c = self.config
        head = channels if c.attention_head_dim is None else c.attention_head_dim
        return Attention(channels, head, groups or c.norm_num_groups, c.norm_eps, scale, self.rng)


class DownBlock2D(Module):
    """Residual blocks, each followed by attention if asked for, then a downsampling unless it is the last
    block.
    """

    def __init__(self, build: _Builder, inputs: int, outputs: int, attention: bool, last: bool):
        count = build.config.layers_per_block
        self.resnets = [build.resnet(inputs if i == 0 else outputs, outputs) for i in range(count)]
        self.attentions = [build.attention(outputs) for _ in range(count)] if attention else []
        self.downsamplers = []
        if not last:
            self.downsamplers.append(Downsample2D(outputs, build.config.downsample_padding, build.rng))

    def forward(self, x: Any, time: Any, skips: list) -> Variable:
        for i, resnet in enumerate(self.resnets):
            x = resnet(x, time)
            if self.attentions:
                x = self.attentions[i](x)
            skips.append(x)
        for layer in self.downsamplers:
            x = layer(x)
            skips.append(x)
        return x


class UpBlock2D(Module):
    """Residual blocks on the features joined with the skips, with attention if asked for, then an
    upsampling.
    """

    def __init__(self, build: _Builder, below: int, inputs: int, outputs: int, attention: bool, last: bool):
        count = build.config.layers_per_block + 1
        self.resnets = []
        for i in range(count):
            skip = inputs if i == count - 1 else outputs
            self.resnets.append(build.resnet((below if i == 0 else outputs) + skip, outputs))
        self.attentions = [build.attention(outputs) for _ in range(count)] if attention else []
        self.upsamplers = [] if last else [Upsample2D(outputs, build.rng)]

    def forward(self, x: Any, time: Any, skips: list) -> Variable:
        for i, resnet in enumerate(self.resnets):
            x = resnet(F.concat([x, skips.pop()], axis=-1), time)
            if self.attentions:
                x = self.attentions[i](x)
        for layer in self.upsamplers:
            x = layer(x)
        return x


class MidBlock2D(Module):
    """Residual block, attention, residual block."""

    def __init__(self, build: _Builder, channels: int):
        c = build.config
        scale = float(c.mid_block_scale_factor)
        self.attentions = []
        if c.add_attention:
            self.attentions.append(build.attention(channels, c.attn_norm_num_groups, scale))
        self.resnets = [build.resnet(channels, channels, scale) for _ in range(2)]

    def forward(self, x: Any, time: Any) -> Variable:
        x = self.resnets[0](x, time)
        for layer in self.attentions:
            x = layer(x)
        return self.resnets[1](x, time)


class UNet2D(Module):
    """Noisy pictures and timesteps -> prediction of the pictures' shape.

    config: `UNetConfig` or a dict of its arguments. seed: of the initial weights. zero_conv_out: start from a
    zero last convolution, so that the first prediction is zero.

    >>> model = UNet2D(UNetConfig.tiny())
    >>> model(np.zeros((2, 8, 8, 12), np.float32), timesteps=10).shape
    (2, 8, 8, 12)
    """

    def __init__(self, config: UNetConfig | Mapping[str, Any], seed: Any = 0, zero_conv_out: bool = False):
        self.config = c = config if isinstance(config, UNetConfig) else UNetConfig.from_dict(config)
        build = _Builder(c, seed)
        rng, widths, n = build.rng, c.block_out_channels, len(c.block_out_channels)
        self.conv_in = Conv2d(c.in_channels, widths[0], 3, padding=1, seed=rng)
        self.time_embedding = TimestepEmbedding(widths[0], c.time_dim, rng)
        if c.num_class_embeds is not None:
            self.class_embedding = Embedding(c.num_class_embeds, c.time_dim, rng)
        if c.caption_vocabulary is not None:
            self.caption_embedding = BagEmbedding(c.caption_vocabulary, c.time_dim, rng)
        self.down_blocks = [
            DownBlock2D(build, widths[max(i - 1, 0)], widths[i], kind.startswith("Attn"), i == n - 1)
            for i, kind in enumerate(c.down_block_types)
        ]
        self.mid_block = MidBlock2D(build, widths[-1]) if c.mid_block_type else None
        back = widths[::-1]
        self.up_blocks = [
            UpBlock2D(
                build,
                back[max(i - 1, 0)],
                back[min(i + 1, n - 1)],
                back[i],
                kind.startswith("Attn"),
                i == n - 1,
            )
            for i, kind in enumerate(c.up_block_types)
        ]
        self.conv_norm_out = GroupNorm(c.norm_num_groups, widths[0], c.norm_eps)
        self.conv_out = Conv2d(widths[0], c.out_channels, 3, padding=1, zero=zero_conv_out, seed=rng)
        self.flat  # noqa: B018  (packs the parameters)

    def flat_order(self, names: list[str]) -> list[str]:
        """Those of layers that read the same lie together, so that a GPU can make one product of them: the
        projections of the time embedding by width, and to_q, to_k and to_v of each attention.
        """
        index = {name: i for i, name in enumerate(names)}
        widths = {name: p.shape[0] for name, p in self.named_parameters().items()}

        def place(name: str) -> tuple:
            if ".time_emb_proj." in name:
                return -1, name.endswith(".bias"), widths[name], index[name]
            block, found, layer = name.rpartition(".to_")
            if found and layer[:2] in ("q.", "k.", "v."):
                return index[f"{block}.to_q.weight"], name.endswith(".bias"), 0, index[name]
            return index[name], False, 0, 0

        return sorted(names, key=place)

    def embed(self, batch: int, timesteps: Any, class_labels: Any = None, captions: Any = None) -> Variable:
        """SiLU of the sum of the time, class and caption embeddings: (batch, time_dim)."""
        c, dtype = self.config, self.conv_in.weight.dtype
        times = np.asarray(timesteps)
        if times.shape not in ((), (1,), (batch,)):
            raise ShapeError(
                f"UNet2D: timesteps has shape {times.shape} but sample has {batch} pictures; "
                "pass one number or one for each"
            )
        times = np.broadcast_to(times.reshape(-1), (batch,))
        emb = timestep_embedding(times, c.block_out_channels[0], c.flip_sin_to_cos, c.freq_shift)
        emb = self.time_embedding(namespace(self.conv_in.weight.data).asarray(emb, dtype=dtype))
        for layer, given in self._conditions(batch, class_labels, captions):
            emb = F.add(emb, layer(given))
        return F.silu(emb)

    def _conditions(self, batch: int, class_labels: Any, captions: Any) -> list[tuple[Module, Any]]:
        """(layer, its input) of the conditions, after checking that they are those that the model takes."""
        c, found = self.config, []
        for name, given, argument in (
            ("class_labels", class_labels, "num_class_embeds"),
            ("captions", captions, "caption_vocabulary"),
        ):
            wanted = getattr(c, argument)
            if given is None and wanted is None:
                continue
            if given is None or wanted is None:
                raise ConfigError(
                    f"UNet2D: {name} is {'missing' if given is None else 'given'}, but {argument} "
                    f"is {wanted}; "
                    + (f"pass {name}" if given is None else f"leave it out or set {argument}")
                )
            shape = (len(given),) if isinstance(given, list | tuple) else getattr(given, "shape", ())
            if not shape:
                raise ShapeError(
                    f"UNet2D: {name} is {given!r}, but one for each of the {batch} pictures is needed; pass "
                    f"an array of {batch} rows"
                )
            rows = shape[0]
            if rows != batch:
                raise ShapeError(
                    f"UNet2D: {name} has {rows} rows but sample has {batch} pictures; they must agree"
                )
            found.append((self.class_embedding if name == "class_labels" else self.caption_embedding, given))
        return found

    def forward(
        self, sample: Any, timesteps: Any, class_labels: Any = None, captions: Any = None
    ) -> Variable:
        """sample (B, H, W, in_channels); timesteps: one number or (B,); class_labels (B,) integers;
        captions (B, caption_vocabulary), 1 where a word occurs, an all-zero row for no caption.
        Returns (B, H, W, out_channels) in the parameters' dtype. On the GPU all arrays are on it, timesteps
        and class_labels int64; there a label that is no class, which the CPU refuses, adds nothing.
        """
        if not hasattr(sample, "shape"):
            raise TypeError(
                f"UNet2D: sample is a {type(sample).__name__}, but an array of pictures is needed; pass one "
                f"of shape (B, H, W, {self.config.in_channels})"
            )
        self._check_shape(tuple(sample.shape))
        if self.on_device:
            return self._on_device(sample, timesteps, class_labels, captions)
        c, sample = self.config, self._converted(sample)
        time = self.embed(sample.shape[0], timesteps, class_labels, captions)
        if c.center_input_sample:
            sample = sample * 2.0 - 1.0
        x = self.conv_in(sample)
        skips = [x]
        for block in self.down_blocks:
            x = block(x, time, skips)
        if self.mid_block is not None:
            x = self.mid_block(x, time)
        for block in self.up_blocks:
            x = block(x, time, skips)
        return self.conv_out(self.conv_norm_out(x, silu=True))

    def _on_device(self, sample: Any, timesteps: Any, class_labels: Any, captions: Any) -> Variable:
        from .cuda import unet as device_unet

        self._conditions(sample.shape[0], class_labels, captions)
        return device_unet.call(self, self._network, sample, timesteps, class_labels, captions)

    def upsample_by_phases(self, on: bool = True) -> UNet2D:
        """Whether upsampling convolutions run as four 2x2 ones on the small pictures (`ops.upsample_conv`),
        as they do at first, on both devices; returns the model. On the GPU a captured graph keeps its way.
        """
        for conv in upsampling(self).values():
            conv.phases = bool(on)
        return self

    def phased(self, track: str | None = None) -> list[str]:
        """Names of the weights that are multiplied by phases, on `track` or on that of each layer."""
        return [name for name, conv in upsampling(self).items() if conv.by_phases(track or conv.track)]

    def cuda(
        self, like: Any, save: str = "packed", backward: str = "twin", accumulate: str = "fast"
    ) -> UNet2D:
        """Move the parameters to the GPU of `like`, an array there or the module ``cupy``; returns the model.

        From then on the model takes and gives that framework's arrays, `flat` is a `DeviceParameters`, and
        ``output.backward(g)`` adds to ``flat.grad``. Layers run on the tracks "fp4" and "bf16". Who writes
        parameters in place calls ``flat.refresh()``, which makes their BF16 and FP4 copies anew.

        save: how the inputs of FP4 products are kept for the backward: "packed" FP4, "bf16" of the same
        numbers, or "recompute"; the gradients are the same. backward: the weight in dX = g W of FP4 layers,
        the decoded "twin" or the "master".
        """
        from .cuda import unet as device_unet

        if self.on_device:
            raise ConfigError("UNet2D.cuda: the model is on the GPU already; call cpu() first")
        self._network = device_unet.move(self, like, save, backward, accumulate)
        return self

    def cpu(self) -> UNet2D:
        """Bring the parameters back to the host; waits for the GPU."""
        from .cuda import unet as device_unet

        if self.on_device:
            device_unet.bring_back(self)
            self._network = None
        return self

    @property
    def network(self) -> Any:
        """Its form on the GPU, an `nn.cuda.unet.Network`; None on the CPU."""
        return self._network

    def inventory(self) -> dict[str, int]:
        """Bytes on the GPU by kind: weights, gradients, and what the last recorded forward kept for its
        backward.
        """
        from .cuda import unet as device_unet

        if not self.on_device:
            raise ConfigError("UNet2D.inventory: the model is on the CPU; call cuda(like) first")
        return device_unet.inventory(self._network, self.flat)

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        c = self.config
        halvings = 2 ** (len(c.block_out_channels) - 1)
        if len(shape) != 4 or shape[3] != c.in_channels:
            raise ShapeError(f"UNet2D: sample has shape {shape}, but (B, H, W, {c.in_channels}) is needed")
        if shape[1] % halvings or shape[2] % halvings or 0 in shape[1:3]:
            raise ShapeError(
                f"UNet2D: sample is {shape[1]} x {shape[2]} pixels, but the "
                f"{len(c.block_out_channels)} levels need multiples of {halvings}; pad or resize"
            )

    def _converted(self, sample: Any) -> Any:
        if not isinstance(sample, Variable):
            sample = sample.astype(self.conv_in.weight.dtype, copy=False)
        return sample


def pixel_unshuffle(x: Any, factor: int = 2) -> Any:
    """(N, H, W, C) -> (N, H/f, W/f, C f²): patches become channels, in `torch.nn.PixelUnshuffle`'s order (c,
    dy, dx).

    Arrays or variables. Raises `ShapeError` if H or W is no multiple of `factor`.

    >>> pixel_unshuffle(np.arange(4.0).reshape(1, 2, 2, 1))[0, 0, 0].tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    n, h, w, c = x.shape
    if h % factor or w % factor:
        raise ShapeError(
            f"pixel_unshuffle: {h} x {w} pixels are no multiple of {factor}; pad or crop the pictures"
        )
    x = x.reshape(n, h // factor, factor, w // factor, factor, c).transpose(0, 1, 3, 5, 2, 4)
    return x.reshape(n, h // factor, w // factor, c * factor * factor)


def pixel_shuffle(x: Any, factor: int = 2) -> Any:
    """(N, H, W, C f²) -> (N, H f, W f, C): the inverse of `pixel_unshuffle`."""
    n, h, w, c = x.shape
    if c % (factor * factor):
        raise ShapeError(f"pixel_shuffle: {c} channels are no multiple of {factor * factor}; change factor")
    x = x.reshape(n, h, w, c // factor**2, factor, factor).transpose(0, 1, 4, 2, 5, 3)
    return x.reshape(n, h * factor, w * factor, c // factor**2)
