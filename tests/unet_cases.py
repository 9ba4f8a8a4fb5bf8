"""Networks on both sides, for tests of the UNet's device form: emulated, and on a GPU."""

from __future__ import annotations

import contextlib

import numpy as np

import fp4bf16 as fb
from fp4bf16 import device, nn

CONFIGS = {
    "ddpm-cifar10-32": ({}, (2, 32, 32, 3)),
    "tiny": (dict(caption_vocabulary=6), (3, 8, 8, 12)),
    "variants": (
        dict(
            in_channels=3, out_channels=5, center_input_sample=True, freq_shift=1, attention_head_dim=8,
            down_block_types=("AttnDownBlock2D", "DownBlock2D", "AttnDownBlock2D"), layers_per_block=2,
            up_block_types=("AttnUpBlock2D", "UpBlock2D", "AttnUpBlock2D"), block_out_channels=(16, 16, 32),
            mid_block_scale_factor=1.4, num_class_embeds=4, attn_norm_num_groups=4, time_embedding_dim=40,
            norm_eps=1e-3),
        (2, 8, 12, 3)),
    "no middle": (
        dict(in_channels=20, mid_block_type=None, downsample_padding=0, block_out_channels=(24, 40)),
        (1, 8, 4, 20)),
}  # fmt: skip
#: softmax(QK)V and the captions' lookup run on BF16 on the device: here on the CPU too.
FP4 = {"*.attentions.?": "bf16", "caption*": "bf16", "*": "fp4"}


class Case:
    """A network on both sides, with the same weights and arguments; `put` makes arrays on the device.

    loud: part of the names of weights that are made three times as large, to be better seen in the result.
    batch: so many pictures in place of the configuration's.
    """

    def __init__(self, name, rng, put, route=None, loud=None, batch=None, **options):
        changes, self.shape = CONFIGS[name]
        self.shape = (batch or self.shape[0], *self.shape[1:])
        make = nn.UNetConfig.ddpm_cifar10_32 if name.startswith("ddpm") else nn.UNetConfig.tiny
        config, seed, self.put = make(**changes), int(rng.integers(1 << 30)), put
        self.host, self.device = (nn.UNet2D(config, seed=seed) for _ in range(2))
        moved = self.host.state_dict()
        for key, value in moved.items():
            if value.ndim == 1:  # norms and biases start at 1 and 0
                value += 0.1 * rng.standard_normal(value.shape).astype(np.float32)
            elif loud and loud in key:
                value *= 3
        for model in (self.host, self.device):
            model.load_state_dict(moved)
            model.apply_route(route or {})
        self.device.cuda(put(np.zeros(1, np.float32)), **options)
        batch = self.shape[0]
        self.x, self.t = rng.standard_normal(self.shape).astype(np.float32), rng.integers(0, 1000, batch)
        self.more = {}
        if config.caption_vocabulary:
            self.more["captions"] = (rng.random((batch, config.caption_vocabulary)) < 0.5).astype(np.float32)
        if config.num_class_embeds:
            self.more["class_labels"] = rng.integers(0, config.num_class_embeds, batch)
        self.g = rng.standard_normal((*self.shape[:3], config.out_channels)).astype(np.float32)

    def on_host(self, track=None):
        """(prediction, gradients by name)."""
        with fb.tracks(track) if track else contextlib.nullcontext():
            y = self.host(self.x, self.t, **self.more)
        self.host.zero_grad()
        y.backward(self.g)
        return y.data, {n: p.grad.copy() for n, p in self.host.named_parameters().items()}

    def forward(self):
        more = {name: self.put(value) for name, value in self.more.items()}
        return self.device(self.put(self.x), self.put(self.t), **more)

    @staticmethod
    def fetch(x):
        return np.array(device.to_host(x))

    def on_device(self, track=None):
        with fb.tracks(track) if track else contextlib.nullcontext():
            y = self.forward()
        self.device.zero_grad()
        y.backward(self.put(self.g))
        return self.fetch(y.data), self.gradients()

    def gradients(self):
        flat = self.device.flat
        return {name: value.copy() for name, value in flat.state(flat.grad).items()}


def distance(x, y):
    return np.linalg.norm(np.subtract(x, y, dtype=np.float64))


def relative(x, y):
    return distance(x, y) / np.linalg.norm(y)


def joined(gradients, names=None):
    return np.concatenate([gradients[n].ravel() for n in names or gradients])
