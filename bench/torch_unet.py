"""The UNet in PyTorch, the peer that the benchmarks compare with: what diffusers' ``UNet2DModel`` is for the
arguments that `fp4bf16.nn.UNetConfig` knows, under its parameter names, so that state dicts fit both.

It does what diffusers does, operation by operation, so that its time is that network's: NCHW, group norm and
SiLU apart, SiLU of the time embedding in every block, the division by the scale also where that is 1,
attention by ``scaled_dot_product_attention``. `tests/test_torch_unet.py` holds it against both.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ResnetBlock2D(nn.Module):
    """norm, SiLU, conv, + time, norm, SiLU, conv, + shortcut."""

    def __init__(self, config: Any, inputs: int, outputs: int, scale: float = 1.0):
        super().__init__()
        groups, eps = config.norm_num_groups, config.norm_eps
        self.scale = scale
        self.norm1 = nn.GroupNorm(groups, inputs, eps)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time_emb_proj = nn.Linear(config.time_dim, outputs)
        self.norm2 = nn.GroupNorm(groups, outputs, eps)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time_emb_proj(F.silu(time))[:, :, None, None]
        h = self.conv2(F.silu(self.norm2(h)))
        skip = x if self.conv_shortcut is None else self.conv_shortcut(x)
        return (skip + h) / self.scale


class Attention(nn.Module):
    """Self-attention over the pixels; ``sdpa=False`` writes softmax(Q K^T) V out."""

    def __init__(self, config: Any, channels: int, groups: int | None, scale: float = 1.0, sdpa: bool = True):
        super().__init__()
        head = channels if config.attention_head_dim is None else config.attention_head_dim
        self.heads, self.scale, self.sdpa = channels // head, scale, sdpa
        self.group_norm = nn.GroupNorm(groups or config.norm_num_groups, channels, config.norm_eps)
        self.to_q = nn.Linear(channels, channels)
        self.to_k = nn.Linear(channels, channels)
        self.to_v = nn.Linear(channels, channels)
        self.to_out = nn.ModuleList([nn.Linear(channels, channels)])

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        tokens = self.group_norm(x.view(n, c, h * w)).transpose(1, 2)
        split = (n, h * w, self.heads, c // self.heads)
        q, k, v = (f(tokens).view(split).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        if self.sdpa:
            out = F.scaled_dot_product_attention(q, k, v)
        else:
            out = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(split[-1]), -1) @ v
        out = self.to_out[0](out.transpose(1, 2).reshape(n, h * w, c))
        return (out.transpose(-1, -2).reshape(n, c, h, w) + x) / self.scale


class Downsample2D(nn.Module):
    """3x3 convolution of stride 2; padding 0 pads on the right and at the bottom alone."""

    def __init__(self, channels: int, padding: int):
        super().__init__()
        self.padding = padding
        self.conv = nn.Conv2d(channels, channels, 3, 2, padding)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x if self.padding else F.pad(x, (0, 1, 0, 1)))


class Upsample2D(nn.Module):
    """Nearest-neighbour upsampling by 2, then a 3x3 convolution."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class DownBlock2D(nn.Module):
    """Residual blocks, with attention if asked for, and a downsampling unless it is the last block."""

    def __init__(self, config: Any, inputs: int, outputs: int, attention: bool, last: bool, sdpa: bool):
        super().__init__()
        count = config.layers_per_block
        widths = [inputs] + [outputs] * (count - 1)
        self.resnets = nn.ModuleList(ResnetBlock2D(config, n, outputs) for n in widths)
        if attention:
            self.attentions = nn.ModuleList(Attention(config, outputs, None, sdpa=sdpa) for _ in widths)
        if not last:
            self.downsamplers = nn.ModuleList([Downsample2D(outputs, config.downsample_padding)])
        self.attention, self.last = attention, last

    def forward(self, x: Tensor, time: Tensor, skips: list[Tensor]) -> Tensor:
        for i, resnet in enumerate(self.resnets):
            x = resnet(x, time)
            if self.attention:
                x = self.attentions[i](x)
            skips.append(x)
        if not self.last:
            x = self.downsamplers[0](x)
            skips.append(x)
        return x


class UpBlock2D(nn.Module):
    """Residual blocks on the features joined with the skips, attention if asked for, then an upsampling."""

    def __init__(self, config: Any, below: int, inputs: int, outputs: int, attention: bool, last: bool,
                 sdpa: bool):  # fmt: skip
        super().__init__()
        count = config.layers_per_block + 1
        skips = [outputs] * (count - 1) + [inputs]
        widths = [(outputs if i else below) + skip for i, skip in enumerate(skips)]
        self.resnets = nn.ModuleList(ResnetBlock2D(config, n, outputs) for n in widths)
        if attention:
            self.attentions = nn.ModuleList(Attention(config, outputs, None, sdpa=sdpa) for _ in widths)
        if not last:
            self.upsamplers = nn.ModuleList([Upsample2D(outputs)])
        self.attention, self.last = attention, last

    def forward(self, x: Tensor, time: Tensor, skips: list[Tensor]) -> Tensor:
        for i, resnet in enumerate(self.resnets):
            x = resnet(torch.cat([x, skips.pop()], 1), time)
            if self.attention:
                x = self.attentions[i](x)
        return x if self.last else self.upsamplers[0](x)


class MidBlock2D(nn.Module):
    """Residual block, attention, residual block."""

    def __init__(self, config: Any, channels: int, sdpa: bool):
        super().__init__()
        scale = float(config.mid_block_scale_factor)
        attentions = [Attention(config, channels, config.attn_norm_num_groups, scale, sdpa)]
        self.attentions = nn.ModuleList(attentions if config.add_attention else [])
        self.resnets = nn.ModuleList(ResnetBlock2D(config, channels, channels, scale) for _ in range(2))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = self.resnets[0](x, time)
        for layer in self.attentions:
            x = layer(x)
        return self.resnets[1](x, time)


class TimestepEmbedding(nn.Module):
    """linear_1, SiLU, linear_2."""

    def __init__(self, inputs: int, dim: int):
        super().__init__()
        self.linear_1 = nn.Linear(inputs, dim)
        self.linear_2 = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.silu(self.linear_1(x)))


class TorchUNet(nn.Module):
    """Noisy pictures (B, C, H, W) and timesteps (B,) or one number -> (B, C', H, W).

    config: `fp4bf16.nn.UNetConfig` without captions. channels_last: parameters and pictures in NHWC memory.
    sdpa: attention by PyTorch's own function, as diffusers does by default.
    """

    def __init__(self, config: Any, channels_last: bool = False, sdpa: bool = True):
        super().__init__()
        if config.caption_vocabulary is not None:
            raise ValueError("TorchUNet: caption_vocabulary is set, but diffusers' network has no captions")
        self.config, widths, last = config, config.block_out_channels, len(config.block_out_channels) - 1
        self.conv_in = nn.Conv2d(config.in_channels, widths[0], 3, padding=1)
        self.time_embedding = TimestepEmbedding(widths[0], config.time_dim)
        if config.num_class_embeds is not None:
            self.class_embedding = nn.Embedding(config.num_class_embeds, config.time_dim)
        self.down_blocks = nn.ModuleList(
            DownBlock2D(config, widths[max(i - 1, 0)], widths[i], kind.startswith("Attn"), i == last, sdpa)
            for i, kind in enumerate(config.down_block_types)
        )
        self.mid_block = MidBlock2D(config, widths[-1], sdpa) if config.mid_block_type else None
        back = widths[::-1]
        self.up_blocks = nn.ModuleList(
            UpBlock2D(config, back[max(i - 1, 0)], back[min(i + 1, last)], back[i], kind.startswith("Attn"),
                      i == last, sdpa)
            for i, kind in enumerate(config.up_block_types)
        )  # fmt: skip
        self.conv_norm_out = nn.GroupNorm(config.norm_num_groups, widths[0], config.norm_eps)
        self.conv_out = nn.Conv2d(widths[0], config.out_channels, 3, padding=1)
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.to(memory_format=self.memory_format)

    def embed(self, timesteps: Tensor) -> Tensor:
        """Sinusoidal embedding (B, widths[0]), FP32: sines then cosines, or the other way round."""
        c, half = self.config, self.config.block_out_channels[0] // 2
        exponent = -math.log(10000.0) * torch.arange(half, dtype=torch.float32, device=timesteps.device)
        angle = timesteps[:, None].float() * torch.exp(exponent / (half - c.freq_shift))[None]
        parts = [torch.sin(angle), torch.cos(angle)]
        return torch.cat(parts[::-1] if c.flip_sin_to_cos else parts, -1)

    def forward(self, sample: Tensor, timesteps: Any, class_labels: Tensor | None = None) -> Tensor:
        c = self.config
        sample = sample.contiguous(memory_format=self.memory_format)
        times = torch.as_tensor(timesteps, device=sample.device).reshape(-1).expand(len(sample))
        time = self.time_embedding(self.embed(times).to(self.conv_in.weight.dtype))
        if c.num_class_embeds is not None:
            time = time + self.class_embedding(class_labels)
        x = self.conv_in(2 * sample - 1.0 if c.center_input_sample else sample)
        skips = [x]
        for block in self.down_blocks:
            x = block(x, time, skips)
        if self.mid_block is not None:
            x = self.mid_block(x, time)
        for block in self.up_blocks:
            x = block(x, time, skips)
        return self.conv_out(F.silu(self.conv_norm_out(x)))
