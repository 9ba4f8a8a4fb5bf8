"""Weights to and from diffusers: convolution weights change between (O, I, kh, kw) and our (O, kh, kw, I)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..io import load
from .module import Module

#: Attention layers of checkpoints from before diffusers 0.17, as the published DDPM ones are.
_OLD_NAMES = {".query.": ".to_q.", ".key.": ".to_k.", ".value.": ".to_v.", ".proj_attn.": ".to_out.0."}


def _host(value: Any) -> np.ndarray:
    """A float32 array of a NumPy array or a PyTorch tensor."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().float().numpy()
    return np.asarray(value, np.float32)


def from_diffusers(state: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """A diffusers state dict (arrays or CPU tensors) -> our names and layouts, float32.

    4-D weights (O, I, kh, kw) become (O, kh, kw, I); the attention names of old checkpoints become today's.

    >>> from_diffusers({"conv_in.weight": np.zeros((8, 3, 5, 5))})["conv_in.weight"].shape
    (8, 5, 5, 3)
    """
    result = {}
    for name, value in state.items():
        value = _host(value)
        for old, new in _OLD_NAMES.items():
            name = name.replace(old, new)
        result[name] = np.ascontiguousarray(value.transpose(0, 2, 3, 1)) if value.ndim == 4 else value
    return result


def to_diffusers(state: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Our state dict -> diffusers' layouts: the inverse of `from_diffusers`."""
    return {
        name: np.ascontiguousarray(v.transpose(0, 3, 1, 2)) if v.ndim == 4 else np.asarray(v)
        for name, v in state.items()
    }


def load_diffusers(module: Module, source: Any) -> Module:
    """Load a diffusers checkpoint into `module`: a state dict or the path of a ``.safetensors`` file.

    Raises `ShapeError` that lists missing, unexpected and mis-shaped keys; nothing is written then.
    """
    state = source if isinstance(source, Mapping) else load(source)
    module.load_state_dict(from_diffusers(state))
    return module
