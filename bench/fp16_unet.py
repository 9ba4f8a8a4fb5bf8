"""The UNet in PyTorch as mixed precision in FP16 runs it on a GPU, and a network whose activations are large.

`Fp16UNet` is `torch_unet.TorchUNet` with captions and, layer by layer, the arithmetic of
``torch.autocast("cuda", torch.float16)``: convolutions and linear layers round operands to FP16, sum in FP32
and round the result to FP16, where what is beyond 65504 becomes infinite; group norms run in FP32; everything
else runs in the type that it is given. On a CPU this is an emulation, which does not depend on what PyTorch's
CPU kernels do with FP16.

`louder` scales what a network's layers give out without changing what it computes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from torch_unet import TorchUNet  # noqa: E402

from fp4bf16.nn.loader import to_diffusers  # noqa: E402

torch.set_num_threads(1)  # its idle threads spin beside those of this package, which makes both much slower


def _rounded(x: Tensor) -> Tensor:
    """The FP16 numbers nearest to x, in FP32."""
    return x.half().float()


class Fp16Conv2d(nn.Conv2d):
    """FP16 operands, FP32 sums, FP16 result."""

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(_rounded(x), _rounded(self.weight), _rounded(self.bias)).half()


class Fp16Linear(nn.Linear):
    """FP16 operands, FP32 sums, FP16 result."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(_rounded(x), _rounded(self.weight), _rounded(self.bias)).half()


class Fp32GroupNorm(nn.GroupNorm):
    """In FP32, whatever it is given, as autocast does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


_FP16 = {nn.Conv2d: Fp16Conv2d, nn.Linear: Fp16Linear, nn.GroupNorm: Fp32GroupNorm}


class Bag(nn.Module):
    """Mean of the rows of weight (vocabulary, dim) whose word is present; the product in FP16 if so asked."""

    def __init__(self, vocabulary: int, dim: int, fp16: bool):
        super().__init__()
        self.weight, self.fp16 = nn.Parameter(torch.zeros(vocabulary, dim)), fp16

    def forward(self, bag: Tensor) -> Tensor:
        total = (_rounded(bag) @ _rounded(self.weight)).half() if self.fp16 else bag @ self.weight
        return total / bag.sum(1, keepdim=True).clamp(min=1.0)


class Fp16UNet(TorchUNet):
    """A captioned UNet of `fp4bf16.nn.UNetConfig` with the weights `state` (ours, by name).

    fp16=False: the same in FP32. Called with pictures (B, C, H, W), timesteps (B,) and bags of words.
    """

    def __init__(self, config: Any, state: Mapping[str, np.ndarray], fp16: bool = True):
        words = config.caption_vocabulary
        super().__init__(replace(config, caption_vocabulary=None, num_class_embeds=words))
        self.class_embedding = Bag(words, config.time_dim, fp16)  # it takes the place of the classes
        named = {k.replace("caption_embedding", "class_embedding"): v for k, v in to_diffusers(state).items()}
        self.load_state_dict({k: torch.from_numpy(np.array(v)) for k, v in named.items()})
        for module in self.modules() if fp16 else ():
            module.__class__ = _FP16.get(type(module), type(module))

    def predict(self, x: np.ndarray, t: np.ndarray, captions: np.ndarray) -> np.ndarray:
        """As the model of a sampler: float32 (B, H, W, C), timesteps, bags -> float32 (B, H, W, C)."""
        x, t, captions = (torch.from_numpy(a) for a in (x, t, captions))
        with torch.no_grad():
            out = self(x.permute(0, 3, 1, 2), t, captions)
        return np.ascontiguousarray(out.float().permute(0, 2, 3, 1).numpy())


#: Layers whose weight and bias both give what a norm follows; of the others in the same stream, what they
#: read is larger already, and the bias alone is scaled.
_BOTH = ("conv_in.", ".conv1.", ".time_emb_proj.", ".conv2.", ".to_out.0.")
_BIAS = (".conv_shortcut.bias", ".downsamplers.0.conv.bias", ".upsamplers.0.conv.bias")


def louder(state: Mapping[str, np.ndarray], factor: float) -> dict[str, np.ndarray]:
    """Weights with which all convolutions but the last, and the attentions, give `factor` times as much.

    Every path through the network ends in a group norm, which divides by it again: but for the norms' eps
    and rounding the outputs stay the same, so that only the range of the numbers inside is tried.
    """
    scale = np.float32(factor)

    def grown(name: str) -> bool:
        inner = "." + name  # so that names of the outermost level are found alike
        return any(part in inner for part in _BOTH) or name.endswith(_BIAS)

    return {name: value * scale if grown(name) else value.copy() for name, value in state.items()}


def largest(network: Fp16UNet, x: np.ndarray, t: np.ndarray, captions: np.ndarray) -> float:
    """Largest magnitude of any layer's result, to be held against FP16's 65504."""
    found, hooks = [0.0], []
    for module in network.modules():
        hooks.append(module.register_forward_hook(lambda m, i, out: found.append(float(out.abs().max()))))
    network.predict(x, t, captions)
    for hook in hooks:
        hook.remove()
    return max(found)


def train_fp16(network: Fp16UNet, batches: Any, lr: float) -> dict[str, Any]:
    """Train in mixed precision with dynamic loss scaling, as ``torch.amp.GradScaler`` does it.

    batches: (x, t, bags, target) of NumPy arrays, pictures (B, H, W, C). Returns what became of it: losses,
    scales, and the updates that were left out because a gradient was not finite.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    optimizer = torch.optim.AdamW(network.parameters(), lr, weight_decay=0.0)
    losses, scales, skipped = [], [scaler.get_scale()], 0
    for x, t, bags, target in batches:
        optimizer.zero_grad()
        out = network(torch.from_numpy(x).permute(0, 3, 1, 2), torch.from_numpy(t), torch.from_numpy(bags))
        loss = F.mse_loss(out.float(), torch.from_numpy(target).permute(0, 3, 1, 2))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
        skipped += scales[-1] < scales[-2]
    finite = [v for v in losses if np.isfinite(v)]
    return {
        "steps": len(losses),
        "updates_left_out": int(skipped),
        "losses_not_finite": len(losses) - len(finite),
        "first_loss": finite[0] if finite else None,
        "last_loss": finite[-1] if finite else None,
        "first_scale": scales[0],
        "last_scale": scales[-1],
    }
