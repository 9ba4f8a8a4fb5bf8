"""fp4bf16: one computation on two tracks, FP4 for the bulk and BF16 to anchor it, from any array framework."""

from __future__ import annotations

import importlib

from ._version import __version__
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
from .formats import FORMATS, Format, QuantizedArray, QuantStats, get_format
from .tracks import match_route, tracks

# Imported now, not at first use: `quantize`, `attention` and `compare` name both a module and its function, and the
# function must win. These modules are light; numba is imported by the first kernel that runs.
# --- interim while the modules are being written: import those that exist ---
import pathlib as _p
_LAZY = {
    "quantize": ("quantize", "dequantize"), "compare": ("compare",), "io": ("save", "load"),
    "gemm": ("matmul", "matmul_vjp", "linear", "linear_vjp", "DualWeight"),
    "conv": ("conv2d", "conv2d_vjp"), "attention": ("attention", "attention_vjp"), "certify": ("Certificate",),
}  # fmt: skip
for _m, _names in _LAZY.items():
    if (_p.Path(__file__).parent / f"{_m}.py").exists():
        _mod = importlib.import_module(f".{_m}", __name__)
        for _n in _names:
            globals()[_n] = getattr(_mod, _n)
_MODULES = ("nn", "diffusion", "align", "train", "testing", "python_ref")

__all__ = [
    "FORMATS", "CheckpointError", "ConfigError", "CudaError", "DTypeError", "Format", "LibraryError",
    "NonFiniteError", "QuantStats", "QuantizedArray", "RewardError", "ShapeError", "UnsupportedArchError",
    "__version__", "get_format", "match_route", "tracks", *_MODULES,
]  # fmt: skip


def __getattr__(name: str):
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module 'fp4bf16' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
