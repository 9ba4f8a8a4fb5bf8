"""What engines are tested with: the emoji pairs as the base training takes them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fp4bf16.train.data import Pairs
from fp4bf16.train.denoiser import Denoiser
from fp4bf16.train.engine import BaseData


def base_data(pairs: Pairs, model: Denoiser, seed: Callable[[str], int]) -> BaseData:
    """The pictures of both styles, one after the other, with their captions; `seed` of a purpose."""
    pictures = model.fold(np.concatenate([pairs.style("noto"), pairs.style("twemoji")]))
    captions = np.concatenate([model.encode(pairs.captions)] * 2)
    seeds = {name: seed(f"base/{name}") for name in ("row", "t", "noise", "drop")}
    return BaseData(pictures, captions, seeds, len(model.schedule))
