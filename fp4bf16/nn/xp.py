"""The one place through which the network's arrays are touched, so that the same code runs on NumPy and on
CuPy.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def namespace(array: Any) -> Any:
    """The module whose functions work on `array`: `numpy`, or `cupy` for its device arrays.

    >>> namespace(np.ones(3)) is np
    True
    """
    if isinstance(array, (np.ndarray, np.generic)):
        return np
    module = type(array).__module__.partition(".")[0]
    if module == "cupy":
        return sys.modules["cupy"]
    if isinstance(array, (int, float)):
        return np
    raise TypeError(
        f"nn: {type(array).__module__}.{type(array).__name__} is no array of the network's; "
        "convert it with numpy.asarray(x) (host) or cupy.asarray(x) (device)"
    )


def as_array(data: Any) -> Any:
    """`data` as an array of its own framework: arrays pass through, Python numbers and lists become
    NumPy's.
    """
    if isinstance(data, np.ndarray):
        return data
    if isinstance(data, (int, float, list, tuple, np.generic)):
        return np.asarray(data)
    namespace(data)
    return data


def host(array: Any) -> np.ndarray:
    """`array` as compiled CPU kernels take it: float32, C-contiguous, writeable (a read-only one would make
    numba compile the kernel again); copied only where it is not.
    """
    return np.require(array, np.float32, "CW")


def is_host(array: Any) -> bool:
    """Whether compiled CPU kernels may take `array`: a C-contiguous float32 NumPy array."""
    return type(array) is np.ndarray and array.dtype == np.float32 and array.flags.c_contiguous
