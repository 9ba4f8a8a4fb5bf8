"""One computation on two tracks: FP4 for the bulk, BF16 to anchor it, from any array framework."""

from __future__ import annotations

import importlib

from ._version import __version__

# Imported now, not at first use: `quantize`, `attention` and `compare` name both a module and its function,
# and the function must win. These modules are light; numba is imported by the first kernel that runs.
from .attention import attention, attention_vjp
from .certify import Certificate
from .compare import compare
from .conv import conv2d, conv2d_vjp
from .errors import (
    CheckpointError,
    ConfigError,
    CudaError,
    DTypeError,
    LibraryError,
    NonFiniteError,
    RewardError,
    ShapeError,
    UnsupportedArchError,
)
from .foreign import from_parts, recast
from .formats import FORMATS, Format, QuantizedArray, QuantStats, get_format
from .gemm import DualWeight, linear, linear_vjp, matmul, matmul_vjp
from .io import load, save
from .quantize import dequantize, quantize
from .tracks import match_route, tracks

#: Imported at first use.
_MODULES = ("nn", "diffusion", "align", "train", "testing", "python_ref")

__all__ = [
    "FORMATS", "Certificate", "CheckpointError", "ConfigError", "CudaError", "DTypeError", "DualWeight",
    "Format", "LibraryError", "NonFiniteError", "QuantStats", "QuantizedArray", "RewardError",
    "ShapeError", "UnsupportedArchError", "__version__", "attention", "attention_vjp", "compare",
    "conv2d", "conv2d_vjp", "dequantize", "from_parts", "get_format", "linear", "linear_vjp", "load",
    "match_route", "matmul", "matmul_vjp", "quantize", "recast", "save", "tracks", *_MODULES,
]  # fmt: skip


def __getattr__(name: str):
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module 'fp4bf16' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
