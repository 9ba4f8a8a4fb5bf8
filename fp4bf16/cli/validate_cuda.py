"""The GPU's rows of ``validate``: the public functions on arrays of each framework that is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..backends import cuda
from ..errors import CudaError, LibraryError
from ..interop import BFLOAT16

if TYPE_CHECKING:
    from .validate import Case

#: What runs on the GPU; of attention the BF16 track alone (`runs`).
OPS = (
    "quantize", "dequantize", "matmul", "linear", "dual", "conv2d", "attention", "conv2d_vjp",
    "attention_vjp", "certify",
)  # fmt: skip


def _torch(array: np.ndarray) -> Any:
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise ImportError("PyTorch was built without CUDA or finds no GPU")
    if array.dtype == BFLOAT16:  # NumPy's side has no bfloat16 that PyTorch knows: the bits travel
        return torch.from_numpy(array.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(array).cuda()


def _cupy(array: np.ndarray) -> Any:
    return importlib.import_module("cupy").asarray(array)


#: Framework -> a copy of a NumPy array on the GPU.
ARRAYS: dict[str, Callable[[np.ndarray], Any]] = {"torch": _torch, "cupy": _cupy}


def problem() -> str | None:
    """Why no row can run on a GPU here, or None."""
    try:
        return "no GPU" if cuda.load().device_count() == 0 else None
    except (LibraryError, CudaError) as error:
        return str(error)


def backends() -> tuple[list[str], list[str]]:
    """("cuda/torch", ...) that can run here, and a line for each that cannot."""
    reason = problem()
    if reason is not None:
        return [], [f"cuda: {reason}"]
    found, absent = [], []
    for name, put in ARRAYS.items():
        try:
            put(np.ones(1, np.float32))
            found.append(f"cuda/{name}")
        except Exception as error:  # not installed, built without CUDA, broken
            absent.append(f"cuda/{name}: {type(error).__name__}: {error}")
    return found, absent


def runs(op: str, track: str | None) -> bool:
    """Whether the library has this track of `op`; "reference" is the framework's own product."""
    return track != "reference" and (track in (None, "bf16") or not op.startswith("attention"))


def options(case: Case) -> list[dict[str, Any]]:
    """Variants that only the GPU has, as further options of `case`."""
    if case.op in ("matmul", "linear", "conv2d") and case.track == "fp4" and case.format == "nvfp4_exact":
        return [{"accumulate": "fast"}]
    return []


def arrays(case: Case, host: list[np.ndarray]) -> list[Any]:
    """`host` on the GPU, as arrays of the case's framework."""
    return [ARRAYS[case.backend.removeprefix("cuda/")](x) for x in host]
