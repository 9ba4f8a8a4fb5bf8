"""Operands -> backend: the only place that knows both backends.

A backend is a module with one table of functions, `backends.cpu` or `backends.cuda`. Host arrays run
on the CPU.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import Any


@cache
def table(name: str) -> ModuleType:
    """The function table of the backend called `name`; its kernels are imported when they are first used."""
    return importlib.import_module(f".backends.{name}", __package__)


def backend_name(*operands: Any) -> str:
    """The CPU: arrays on a device never come this far, `interop.wrap` refuses them in a sentence."""
    return "cpu"


def backend_for(*operands: Any) -> ModuleType:
    """The function table that computes on `operands` (`interop.Operand` or `QuantizedArray`)."""
    return table(backend_name(*operands))


def available_backends() -> list[str]:
    """Backends that can compute on this machine now.

    >>> available_backends()[0]
    'cpu'
    """
    return ["cpu"]


def check_stream(op: str, stream: Any) -> None:
    """Host arrays have no stream: the CPU backend has finished when a call returns."""
    if stream is not None:
        raise ValueError(
            f"{op}: stream is {stream!r}, but host arrays are computed before the call returns and have no "
            f"stream; leave stream=None"
        )
