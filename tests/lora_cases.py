"""A small network, its arguments and adapters that do something, for the tests of adapters."""

from __future__ import annotations

import numpy as np

from fp4bf16 import nn

TRACKS = ("bf16", "fp4", "dual", "reference")


def network(**changes):
    """Every kind of layer: attention, stride 2 padded on one side, shortcuts, captions; 8 x 8 pixels."""
    values = dict(
        in_channels=3, out_channels=3, block_out_channels=(8, 16), norm_num_groups=4, attention_head_dim=8,
        down_block_types=("AttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "AttnUpBlock2D"),
        downsample_padding=0, caption_vocabulary=5)  # fmt: skip
    return nn.UNet2D(nn.UNetConfig.tiny(**{**values, **changes}), seed=5)


def arguments(rng, batch=3, dtype=np.float32):
    x = rng.standard_normal((batch, 8, 8, 3)).astype(dtype)
    return x, rng.integers(0, 1000, batch), (rng.random((batch, 5)) < 0.5).astype(dtype)


def call(unet, given):
    x, t, bag = given
    return unet(x, t, captions=bag)


def moved(lora, rng, size=0.2):
    """The adapters with an `up` that is not zero."""
    for name, p in lora.named_parameters().items():
        if name.endswith("lora_up"):
            p.assign(size * rng.standard_normal(p.shape))
    return lora


def bits(x):
    return np.ascontiguousarray(x).view(f"u{x.itemsize}")


def state_of(lora):
    return {name: p.data.copy() for name, p in lora.named_parameters().items()}


def dense_state(unet, lora):
    """W + alpha / rank up down by the definition, a value at a time."""
    state, found = unet.state_dict(), state_of(lora)
    for name in lora.adapted:
        name = f"{name}." if name else ""
        down, up = found[f"{name}lora_down"], found[f"{name}lora_up"]
        added = (
            np.einsum("kr,rn->nk", down, up)
            if down.ndim == 2
            else np.einsum("rijc,or->oijc", down, up[:, 0, 0])
        )
        state[f"{name}weight"] = state[f"{name}weight"] + lora.alpha / lora.rank * added
    return state
