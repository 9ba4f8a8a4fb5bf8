"""Low-rank adapters of a network on the GPU: part of its weights, W + (alpha / rank) up down.

`nn.LoRA` runs a branch beside each product; here the network's graphs stay as they are, and what they read is
renewed when the adapters change, FP4 twins and all. So the base, another policy's adapters and the policy's
own take turns in one set of weights, and beside it only the base's float32 numbers are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ...backends import cuda_lora
from ...backends.cuda_lora import Entry
from ...device import DeviceArray
from ...errors import ConfigError
from ..layers import Linear, generator
from ..lora import adaptable, check_settings, chosen, first_adapter, named_parts
from ..module import FlatParameters
from .parameters import DeviceParameters


class DeviceLoRA:
    """Adapters of a `UNet2D` on the GPU.

    Args:
        unet: the network, after `UNet2D.cuda`. What its weights hold is overwritten by `put`.
        base: the flat float32 weights without adapters, laid out as ``unet.flat.data``; read by every `put`.
        rank, alpha, seed, targets: as of `nn.LoRA`, whose names, layouts and first numbers these have.

    Attributes: `flat` (`DeviceParameters` of the adapters, without copies), rank, alpha, scale, adapted.

    Raises `ConfigError` as `nn.LoRA` does, and for a network on the CPU.
    """

    def __init__(
        self, unet: Any, base: DeviceArray, rank: int, alpha: float, seed: Any = 0,
        targets: Sequence[str] | None = None,
    ):  # fmt: skip
        self.rank, self.alpha = check_settings(rank, alpha)
        if not unet.on_device:
            raise ConfigError("DeviceLoRA: the network is on the CPU, where adapters run beside it; call "
                              "unet.cuda(like) first, or use nn.LoRA")  # fmt: skip
        self.scale = self.alpha / self.rank
        self.base, self._network = base, unet.flat
        layers, rng = chosen(adaptable(unet), targets, self.rank), generator(seed)
        self.adapted = tuple(layers)
        named: dict[str, Any] = {}
        for name, layer in layers.items():
            named |= named_parts(name, first_adapter(layer, self.rank, rng))
        packed = FlatParameters(named)
        self.flat = DeviceParameters(packed, base, lambda name: False, copies=False)
        layout = self._network.layout
        weights = {name: f"{name}.weight" if name else "weight" for name in layers}
        self._table = cuda_lora.make_table(
            [
                Entry(
                    layout.shapes[weight][0], math.prod(layout.shapes[weight][1:]), layout.offsets[weight],
                    *(packed.offsets[part] for part in named_parts(name, (None, None))),
                    isinstance(layers[name], Linear),
                )
                for name, weight in weights.items()
            ],
            base,
        )  # fmt: skip
        self._changed = layout.table_of(weights.values(), base)

    def put(self, adapters: DeviceArray | None, stream: int = 0) -> None:
        """Make the network's weights those with the adapters of a flat array laid out as ``flat.data``; None:
        the base's.
        """
        network = self._network
        cuda_lora.merge(self._table, self.base, adapters, network.data, self.rank, self.scale, stream)
        network.refresh(stream, self._changed)

    @contextmanager
    def using(self, adapters: DeviceArray | None, stream: int = 0) -> Iterator[None]:
        """Run with other adapters, or none, then with those in `flat` again."""
        self.put(adapters, stream)
        try:
            yield
        finally:
            self.put(self.flat.data, stream)

    def project(self, stream: int = 0) -> None:
        """The adapters' gradients, in ``flat.grad``, from those of the weights in ``unet.flat.grad``: exact,
        where the weights hold the adapters in `flat`.
        """
        cuda_lora.gradient(self._table, self._network.grad, self.flat.data, self.flat.grad, self.rank,
                           self.scale, stream)  # fmt: skip
