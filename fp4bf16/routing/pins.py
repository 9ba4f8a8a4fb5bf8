"""The layers that a router decides about, and what a user's route means to it."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..nn.unet import UNet2D
from .latency import work

FAST = ("fp4", "dual")  #: tracks that leave BF16


@dataclass(frozen=True)
class LayerInfo:
    """A layer that a route names: its weights, and operations for a picture. certified: whether its products
    have a certificate; those without (softmax(QK)V, captions) run as pinned, else on BF16.
    """

    parameters: int
    flops: float
    certified: bool = True


def layers_of(unet: UNet2D, shape: Sequence[int] | None = None) -> dict[str, LayerInfo]:
    """The layers of a UNet for `Router`, in the order and under the names of `Module.apply_route`.

    shape: (B, H, W, C) of the network's input, by default its own size; the batch does not matter.

    >>> from fp4bf16.nn import UNet2D, UNetConfig
    >>> layers_of(UNet2D(UNetConfig.tiny()))["conv_in.weight"]
    LayerInfo(parameters=3456, flops=442368.0, certified=True)
    """
    shape = None if shape is None else (1, *tuple(shape)[1:])
    sizes = {name: p.size for name, p in unet.named_parameters().items()}
    return {
        name: LayerInfo(sizes.get(name, 0), w.flops, w.op in ("linear", "conv2d"))
        for name, w in work(unet, shape).items()
    }


def free_track(pins: Mapping[str, str], name: str) -> tuple[str | None, str, str]:
    """(pinned track or None, track that it may go to, reason) of a layer: what a user's route means here.

    The first pattern that matches decides, as everywhere, and pins its layers. The pattern "*" is the rest:
    with "fp4" or "dual" the router chooses between that track and BF16; with "bf16" the rest is pinned too. A
    layer that nothing matches is free.

    >>> free_track({"conv_in*": "bf16", "*": "fp4"}, "conv_in.weight")
    ('bf16', 'fp4', "pinned by 'conv_in*'")
    >>> free_track({"conv_in*": "bf16", "*": "fp4"}, "conv_out.weight")[0] is None
    True
    """
    fast = pins.get("*", "fp4")
    fast = fast if fast in FAST else "fp4"
    for pattern, track in pins.items():
        if fnmatch.fnmatchcase(name, pattern):
            free = pattern == "*" and track in FAST
            return (None if free else track), fast, f"pinned by {pattern!r}"
    return None, fast, ""
