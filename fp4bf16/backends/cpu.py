"""The CPU function table. A kernel's module, and numba with it, is imported when the kernel is first used."""

from __future__ import annotations

import importlib
from typing import Any

#: kernel -> module of this package that holds it
_HOME = {
    **dict.fromkeys(
        (
            "Geometry",
            "column_sums",
            "conv_dgrad",
            "conv_forward",
            "conv_wgrad",
            "fake_quantize",
            "fake_quantize_sums",
            "rounded",
            "store",
            "values",
        ),
        "cpu_conv",
    ),
    **dict.fromkeys(("quick_spectral_norm_upper", "twin_norms"), "cpu_spectral"),
    **dict.fromkeys(("attention_backward", "attention_forward"), "cpu_attention"),
    **dict.fromkeys(
        ("amax_rows", "dequantize_rows", "expand_rows", "fake_quantize_rows", "quantize_rows", "round_bf16"),
        "cpu_quantize",
    ),
    **dict.fromkeys(
        (
            "ACTIVATIONS",
            "add_product",
            "batched",
            "dense",
            "fake_quantized_matrix",
            "plain_matrix",
            "product",
            "quantized_matrix",
            "store_rows",
        ),
        "cpu_gemm",
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"the CPU backend has no function {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __package__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_HOME)
