"""Operands -> backend: the only place that knows both backends.

Host arrays run on the CPU, whose table of functions is `backends.cpu`. Arrays on the GPU run in the compiled
library, `backends.cuda`; what each public function makes of it is a table beside it, `backends.cuda_quantize`
for one. `device` tells the two kinds of arrays apart.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import Any

from .device import DeviceArray, is_device


@cache
def table(name: str) -> ModuleType:
    """The module of `backends` called `name`; its kernels are imported when they are first used."""
    return importlib.import_module(f".backends.{name}", __package__)


def on_gpu(x: Any) -> bool:
    """Whether `x`, an array, a `QuantizedArray` or a `DeviceArray`, lies in device memory."""
    return isinstance(x, DeviceArray) or is_device(getattr(x, "packed", x))


def backend_name(*operands: Any) -> str:
    """ "cuda" where an operand lies in device memory, else "cpu"."""
    return "cuda" if any(map(on_gpu, operands)) else "cpu"


def backend_for(*operands: Any) -> ModuleType:
    """The module that computes on `operands`, arrays of any kind; without any, the CPU's."""
    return table(backend_name(*operands))


def available_backends() -> list[str]:
    """Backends that can compute on this machine now; "cuda" needs the compiled library and a GPU.

    >>> available_backends()[0]
    'cpu'
    """
    return ["cpu", "cuda"] if table("cuda").available() else ["cpu"]


def check_stream(op: str, stream: Any) -> None:
    """Host arrays have no stream: the CPU backend has finished when a call returns."""
    if stream is not None:
        raise ValueError(
            f"{op}: stream is {stream!r}, but host arrays are computed before the call returns and have no "
            f"stream; leave stream=None"
        )
