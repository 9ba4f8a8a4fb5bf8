"""What a process that explores for a run builds: its model on the CPU, with the adapters if there are any."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..align.pool import Draw
from ..nn.lora import LoRA
from ..routing import RouteSet
from .checkpoint import give, take
from .config import Config
from .data import Vocabulary
from .denoiser import Denoiser


def weights_of(engine: Any) -> dict[str, np.ndarray]:
    """The weights that a `HostEngine` collects pictures with, for `Explorer.refresh` and `digest_of`: copies
    by name, ``policy.*`` of the network and ``lora.*`` of adapters beside it, which are not merged: that
    would round otherwise. NFT collects with its old policy. Where noise levels have routes of their own they
    are "routes" (`encode_routes`).
    """
    routes = engine.model.routes
    return _weights_of(engine) | ({} if routes is None else {"routes": encode_routes(routes)})


def encode_routes(routes: RouteSet) -> np.ndarray:
    """Routes as JSON in an array of bytes, which travels with the weights.

    >>> bytes(encode_routes(RouteSet([{"*": "fp4"}])))[:10]
    b'{"format":'
    """
    return np.frombuffer(json.dumps(routes.to_dict()).encode(), np.uint8)


def _weights_of(engine: Any) -> dict[str, np.ndarray]:
    trained = engine.parameters
    flat = trained.data if engine.old is None else engine.old
    views = {name: view.copy() for name, view in trained.views(flat).items()}
    if engine.lora is None:
        return give(views, "policy")
    return give(engine.model.unet.state_dict(), "policy") | give(views, "lora")


@dataclass(frozen=True)
class MakeDraw:
    """For `align.workers.Explorer`: called in a worker, gives the draw function of a run's model and what
    takes up `weights_of` its engine.

    config, words, phases: of the run (`Denoiser.config`, `Vocabulary.words`, `Denoiser.by_phases`).

    >>> from fp4bf16.train.config import get_preset
    >>> draw, load = MakeDraw(get_preset("ci"), ("cat", "face"))()
    >>> draw([7, 8], ["cat face", "face"], 1, "fp4").shape
    (2, 16, 16, 3)
    """

    config: Config
    words: tuple[str, ...]
    phases: bool = True

    def __call__(self) -> tuple[Draw, Callable[[Mapping[str, np.ndarray]], None]]:
        model, c = Denoiser(self.config, Vocabulary(tuple(self.words))), self.config.lora
        model.unet.upsample_by_phases(self.phases)
        held: list[LoRA] = []

        def load(arrays: Mapping[str, np.ndarray]) -> None:
            model.unet.load_state_dict(take(arrays, "policy"))
            if "routes" in arrays:
                model.routes = RouteSet.from_dict(json.loads(bytes(arrays["routes"])), "explorer")
            if adapters := take(arrays, "lora"):
                if not held:
                    held.append(LoRA(model.unet, c.rank, c.alpha, 0))
                flat = held[0].flat
                for name, view in flat.views(flat.data).items():
                    view[...] = adapters[name]
                flat.touch()
            elif held:
                held.pop().detach()

        return model.draw, load
