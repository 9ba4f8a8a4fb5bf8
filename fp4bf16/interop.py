"""Arrays of any supported framework in, arrays of the same framework out, without a copy.

An operand is wrapped at the door (`wrap`), stays a NumPy view inside the CPU backend, and its result is
unwrapped on the way out (`unwrap`). Frameworks are recognised by the arrays themselves: nothing is imported
here. Arrays on a GPU are `device`'s; what takes host arrays alone says so here.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from .errors import DTypeError, ShapeError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
#: dtypes that the primitives compute with, by name.
FLOATS = ("float64", "float32", "float16", "bfloat16")

_NAMES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
    "single": "float32", "fp64": "float64", "double": "float64",
}  # fmt: skip
_HOW = {
    "jax": "numpy.asarray(x)",
    "jaxlib": "numpy.asarray(x)",
    "numba": "x.copy_to_host()",
    "tensorflow": "x.numpy()",
    "pandas": "x.to_numpy()",
    "mlx": "numpy.array(x)",
    "fp4bf16": "its attribute that is an array: .data of a Variable, .master or .twin of a DualWeight",
}
_TO_FLOAT = {"numpy": ".astype('float32')", "torch": ".float()"}


def np_dtype(dtype: Any, where: str = "dtype") -> np.dtype:
    """NumPy dtype of a name, a NumPy, ml_dtypes or PyTorch dtype; bfloat16 is ml_dtypes'.

    >>> np_dtype("bfloat16").itemsize
    2
    """
    name = _NAMES.get(str(dtype), str(dtype).removeprefix("torch."))
    if name == "bfloat16":
        return BFLOAT16
    try:
        return np.dtype(name if isinstance(dtype, str) or str(dtype).startswith("torch.") else dtype)
    except TypeError:
        raise DTypeError(f"{where}: {dtype!r} is not a dtype; known: {', '.join(FLOATS)}") from None


@dataclass(slots=True)
class Operand:
    """One argument, seen as a NumPy array that shares the caller's memory.

    Attributes:
        array: NumPy view; bfloat16 as ml_dtypes.bfloat16. name: what the argument is called in messages.
        framework: "numpy" or "torch".
    """

    array: np.ndarray
    name: str
    framework: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> str:
        return _dtype_name(self.array.dtype)


@cache
def _dtype_name(dtype: np.dtype) -> str:
    return str(dtype)  # composed anew by NumPy at every call, which cost as much as a small product


@cache
def _framework(kind: type) -> str:
    if issubclass(kind, np.ndarray | np.generic):
        return "numpy"
    return "torch" if (kind.__module__ or "").split(".")[0] in ("torch", "torch_xla") else "other"


def _is_torch(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _from_torch(x: Any, name: str) -> np.ndarray:
    torch = sys.modules["torch"]
    if x.device.type == "meta":
        raise TypeError(f"{name}: is a PyTorch tensor on meta, which has a shape but no numbers; pass one "
                        f"that has them")  # fmt: skip
    if x.device.type != "cpu":
        what = "this operation does not run on CUDA yet"
        if x.device.type != "cuda":
            what = "that is no device which is computed on here"
        raise TypeError(f"{name}: is a PyTorch tensor on {x.device}, but {what}; pass {name}.cpu()")
    if x.requires_grad:
        x = x.detach()
    if x.layout != torch.strided:
        raise TypeError(f"{name}: is a PyTorch tensor with layout {x.layout}, but dense strided data is "
                        f"needed; pass {name}.to_dense()")  # fmt: skip
    if x.is_conj() or x.is_neg():
        how = "resolve_conj()" if x.is_conj() else "resolve_neg()"
        raise TypeError(f"{name}: is a PyTorch view that negates numbers when it is read, but plain data "
                        f"is needed; pass {name}.{how}")  # fmt: skip
    if x.dtype == torch.bfloat16:  # NumPy has no bfloat16: the same bits travel as int16
        return x.view(torch.int16).numpy().view(BFLOAT16)
    if x.dtype in (getattr(torch, n, None) for n in ("float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn_x2")):
        return x.view(torch.uint8).numpy()
    try:
        return x.numpy()
    except (TypeError, RuntimeError) as error:  # a dtype that NumPy lacks; a tensor of a functorch transform
        raise TypeError(f"{name}: is a PyTorch tensor of dtype {x.dtype} that has no NumPy view ({error}); "
                        f"pass plain data, for example {name}.float()") from None  # fmt: skip


def wrap(x: Any, name: str) -> Operand:
    """View `x` as an `Operand` called `name`; raises `TypeError` with the conversion for kinds not taken."""
    if type(x) is np.ndarray:
        return Operand(x, name, "numpy")
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name}: is a masked array, whose masked elements have no value to compute with; "
                        f"give them one with {name}.filled(0), or pass {name}.data")  # fmt: skip
    if isinstance(x, np.ndarray):  # np.memmap, np.matrix: as the array that they are, without their own rules
        return Operand(x.view(np.ndarray), name, "numpy")
    if _is_torch(x):
        return Operand(_from_torch(x, name), name, "torch")
    if isinstance(x, np.generic | int | float | list | tuple):
        try:
            return Operand(np.asarray(x), name, "numpy")
        except ValueError as error:
            raise TypeError(f"{name}: is no array ({error}); pass one, all rows of one length") from None
    package = type(x).__module__.split(".")[0]
    how = _HOW.get(package, "numpy.asarray(x)")
    if package == "cupy":
        raise TypeError(f"{name}: is a CuPy array, but this operation does not run on CUDA yet; pass "
                        f"cupy.asnumpy({name})")  # fmt: skip
    raise TypeError(
        f"{name}: is a {type(x).__module__}.{type(x).__qualname__}, but NumPy arrays and PyTorch tensors are "
        f"what is taken here; convert it with {how}"
    )


def float_operand(x: Any, name: str) -> Operand:
    """`wrap`, then check that it holds floating-point numbers that the primitives compute with."""
    operand = wrap(x, name)
    if operand.dtype not in FLOATS:
        raise DTypeError(
            f"{name}: has dtype {operand.dtype}, but one of {', '.join(FLOATS)} is needed; "
            f"convert it with {name}{_TO_FLOAT[operand.framework]}"
        )
    return operand


def unwrap(array: np.ndarray, framework: str) -> Any:
    """`array` as the framework's own kind, sharing memory."""
    if framework == "numpy":
        return array
    import torch

    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    try:
        return torch.from_numpy(array)
    except TypeError:
        raise DTypeError(f"a result of dtype {array.dtype} has no form in PyTorch here; ask for NumPy "
                         f"arrays, or for another dtype") from None  # fmt: skip


def common_framework(op: str, *operands: Operand) -> str:
    """The framework that all operands share; `TypeError` naming two that differ."""
    first = operands[0]
    for other in operands[1:]:
        if other.framework != first.framework:
            raise TypeError(
                f"{op}: {first.name} is a {first.framework} array but {other.name} is a {other.framework} "
                f"array; convert one of them so that all operands come from one framework"
            )
    return first.framework


def common_dtype(*operands: Operand) -> np.dtype:
    """dtype of a result: float64 > float32 > (bfloat16 with float16 -> float32) > the one that all share."""
    names = {o.dtype for o in operands}
    if len(names) == 1:
        return np_dtype(operands[0].dtype)
    return np.dtype("float64" if "float64" in names else "float32")


def output(op: str, out: Any, shape: tuple[int, ...], dtype: np.dtype, framework: str, inputs: tuple = ()):
    """The array that a result is written to: ``(ndarray, object to return)``.

    `out` is checked: framework, shape, dtype, writeable, and no memory shared with an input (np.ndarray
    `inputs`).
    """
    if out is None:
        array = np.empty(shape, dtype)
        return array, unwrap(array, framework)
    if isinstance(out, np.generic | int | float | list | tuple):
        raise TypeError(f"{op}: out is a {type(out).__name__}, which cannot be written to; pass an array")
    place = str(getattr(out, "device", "cpu"))
    if place not in ("cpu", "meta"):
        raise TypeError(f"{op}: out is on {place} but the operands are on the host; move one of them so that "
                        f"all are in one place")  # fmt: skip
    target = wrap(out, "out")
    if target.framework != framework:
        raise TypeError(f"{op}: out is a {target.framework} array but the operands are {framework} arrays; "
                        f"pass an out of the same framework")  # fmt: skip
    if target.shape != tuple(shape):
        raise ShapeError(f"{op}: out has shape {target.shape} but the result has shape {tuple(shape)}; "
                         f"allocate out with the result's shape")  # fmt: skip
    if target.array.dtype != dtype:
        other = f" or pass dtype={target.dtype!r}" if target.dtype in FLOATS else ""
        raise DTypeError(f"{op}: out has dtype {target.dtype} but the result has dtype {dtype}; "
                         f"allocate out with that dtype{other}")  # fmt: skip
    if not target.array.flags.writeable:
        raise ValueError(f"{op}: out is read-only; pass a writeable array, for example out.copy()")
    steps = target.array.strides
    if target.array.size and any(s == 0 and n > 1 for n, s in zip(target.shape, steps, strict=True)):
        raise ValueError(
            f"{op}: out of shape {target.shape} repeats the same memory (its strides are "
            f"{steps}); pass an array of its own memory, not a broadcast one"
        )
    for x in inputs:
        if x is not None and shares_memory(target.array, x):
            raise ValueError(
                f"{op}: out overlaps an input in memory; pass an out that shares nothing with the operands"
            )
    return target.array, out


def shares_memory(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays overlap; yes, too, where strides are so odd that NumPy would search for ages."""
    try:
        return np.may_share_memory(a, b) and np.shares_memory(a, b, max_work=100_000)
    except np.exceptions.TooHardError:
        return True


def outputs(op: str, out: Any, names: tuple[str, ...]) -> tuple:
    """`out` of a function with several results, one array or None for each of `names`."""
    if out is None:
        return (None,) * len(names)
    if not isinstance(out, tuple | list) or len(out) != len(names):
        got = f"{len(out)} of them" if isinstance(out, tuple | list) else f"a {type(out).__name__}"
        raise TypeError(f"{op}: out is {got}, but {len(names)} arrays ({', '.join(names)}) are needed; "
                        f"pass a tuple with None for those to be made")  # fmt: skip
    arrays = [(n, wrap(x, f"out: {n}").array) for n, x in zip(names, out, strict=True) if x is not None]
    for i, (name, array) in enumerate(arrays):
        for other, memory in arrays[:i]:
            if shares_memory(array, memory):
                raise ValueError(f"{op}: out: {other} and {name} overlap in memory; pass arrays that do not")
    return tuple(out)
