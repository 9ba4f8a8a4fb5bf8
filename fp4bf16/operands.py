"""Operands of a product at the door: what they are, whether they fit, and as which matrices they multiply."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import device
from .device import DeviceArray
from .dual import DualWeight
from .errors import DTypeError, ShapeError, nearest
from .formats import Format, QuantizedArray, get_format
from .interop import FLOATS, float_operand, np_dtype, wrap
from .tracks import resolve_track

# ---- operands ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Arg:
    """An operand: its array (None for a `QuantizedArray` or `DualWeight`), logical shape and framework.

    `place` is an array that says where it lies: in device memory a `DeviceArray`, that of `array` or of the
    bytes; None or an `Operand` on the host.
    """

    value: Any
    name: str
    shape: tuple[int, ...]
    framework: str
    array: np.ndarray | DeviceArray | None
    dtype: np.dtype | None
    place: Any = None


def as_arg(x: Any, name: str) -> Arg:
    if isinstance(x, QuantizedArray):
        if device.is_device(x.packed):
            device.check_container(name, x)
            o = device.operand(x.packed, name)
        else:
            x.check()
            o = wrap(x.packed, name)
        return Arg(x, name, x.shape, o.framework, None, None, o)
    if isinstance(x, DualWeight):
        x.check()
        return Arg(x, name, x.shape, x.framework, None, None, x.place)
    if device.is_device(x):
        o = device.float_operand(x, name)
        return Arg(x, name, o.shape, o.framework, o, np_dtype(o.dtype), o)
    o = float_operand(x, name)
    return Arg(x, name, o.array.shape, o.framework, o.array, o.array.dtype)


def on_device(*args: Arg) -> bool:
    return any(type(arg.place) is DeviceArray for arg in args)


def places(*args: Arg) -> list[tuple[str, Any]]:
    """Names and places, for `device.check_together`."""
    return [(arg.name, arg if arg.place is None else arg.place) for arg in args]


def transposed(arg: Arg) -> Arg:
    """The operand with its two axes swapped, as a view."""
    value, array, place = arg.value, arg.array, arg.place
    if type(array) is DeviceArray:
        array = place = device.permute(array, (1, 0))
        value = array.owner
    elif array is not None:
        value = array = array.T
    else:
        value = value.T
        value._expanded = arg.value._expanded  # the same bytes, whichever way they are seen
    return Arg(value, arg.name, arg.shape[::-1], arg.framework, array, arg.dtype, place)


def check_plain(op: str, arg: Arg) -> None:
    """What is added to a product is a plain array."""
    if arg.array is None:
        kind = type(arg.value).__name__
        how = "dequantize it" if kind == "QuantizedArray" else "pass its master"
        raise TypeError(f"{op}: {arg.name} is a {kind}, but a plain array is needed; {how}")


def check_accumulate(op: str, accumulate: str) -> str:
    if accumulate not in ("promoted", "fast"):
        hint = nearest(accumulate, ("promoted", "fast"))
        raise ValueError(f"{op}: accumulate: {accumulate!r} is not known{hint}")
    return accumulate


def check_frameworks(op: str, args: list[Arg]) -> str:
    for other in args[1:]:
        if other.framework != args[0].framework:
            raise TypeError(
                f"{op}: {args[0].name} is a {args[0].framework} array but {other.name} is a "
                f"{other.framework} array; convert one of them so that all operands come from one framework"
            )
    return args[0].framework


def choose_track(op: str, track: str | None, a: Arg, b: Arg) -> str:
    """Which row of the track table a call is on; the default follows from what the operands are."""
    dual = isinstance(b.value, DualWeight)
    if isinstance(a.value, DualWeight):
        raise TypeError(f"{op}: {a.name} is a DualWeight, but it can only be the right operand; write x @ w "
                        f"with the weight on the right")  # fmt: skip
    quantized = isinstance(a.value, QuantizedArray) or isinstance(b.value, QuantizedArray)
    track = resolve_track(track, "dual" if dual else "fp4" if quantized else "bf16")
    if track == "dual" and not dual:
        kind = "a QuantizedArray" if isinstance(b.value, QuantizedArray) else "a plain array"
        raise TypeError(f"{op}: track is 'dual' but {b.name} is {kind}, which has no BF16 branch; "
                        f"make it a fp4bf16.DualWeight or choose track='fp4' or 'bf16'")  # fmt: skip
    return track


def check_axis(op: str, arg: Arg, right: bool, track: str) -> None:
    """A quantised operand of the FP4 track must be blocked along the contraction."""
    q = arg.value
    if not isinstance(q, QuantizedArray) or track not in ("fp4", "dual"):
        return
    want = max(0, q.ndim - 2) if right else q.ndim - 1
    if q.axis != want:
        side, place = ("right", "second last") if right else ("left", "last")
        raise ShapeError(
            f"{op}: {arg.name} {q.shape} is blocked along axis {q.axis}, but a {side} operand is blocked "
            f"along its {place} axis, {want}; pass axis={-2 if right and q.ndim > 1 else -1} to quantize"
        )


def shapes(op: str, a: Arg, b: Arg) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape of the product, leading axes of it), by np.matmul's rules."""
    for x in (a, b):
        if not x.shape:
            raise ShapeError(
                f"{op}: {x.name} has shape (), but at least one axis is needed; multiply by a number with *"
            )
        if isinstance(x.value, DualWeight) and len(x.shape) != 2:  # here, since conv2d takes such a weight
            raise ShapeError(
                f"{x.name}: is a DualWeight of a convolution, {x.shape}, but a product needs (K, N); "
                f"call conv2d, or make one of the reshaped weight"
            )
    k_a, k_b = a.shape[-1], b.shape[-2 if len(b.shape) > 1 else 0]
    if k_a != k_b:
        raise ShapeError(
            f"{op}: K of {a.name} {a.shape} is {k_a} but K of {b.name} {b.shape} is {k_b}; the last axis of "
            f"{a.name} and the {'second last' if len(b.shape) > 1 else 'only'} axis of {b.name} must be equal"
        )
    lead = a.shape[:-2]
    if len(b.shape) > 2:
        try:
            lead = np.broadcast_shapes(lead, b.shape[:-2])
        except ValueError:
            raise ShapeError(
                f"{op}: leading axes of {a.name} {a.shape} are {a.shape[:-2]} but those of {b.name} "
                f"{b.shape} are {b.shape[:-2]}; they must be equal or 1"
            ) from None
    return lead + a.shape[-2:-1] + (b.shape[-1:] if len(b.shape) > 1 else ()), lead


def result_dtype_of(op: str, dtype: Any, a: Arg, b: Arg) -> np.dtype:
    if dtype is not None:
        dtype = np_dtype(dtype, f"{op}: dtype")
        if str(dtype) not in FLOATS:
            raise DTypeError(f"{op}: dtype is {dtype}, but one of {', '.join(FLOATS)} is needed; leave it "
                             f"out for the dtype of {a.name}")  # fmt: skip
        return dtype
    known = {x.dtype for x in (a, b) if x.dtype is not None}
    if len(known) == 1:
        return known.pop()
    return np.dtype("float64" if np.dtype("float64") in known else "float32")


# ---- as matrices -------------------------------------------------------------------------------------------


def left_matrix(kernels, arg: Arg, track: str, fmt: Format):
    """The left operand as a kernel matrix (rows, K), its leading axes flattened."""
    q, k = arg.value, arg.shape[-1]
    if arg.array is not None:
        x = arg.array if arg.array.ndim == 2 else arg.array.reshape(math.prod(arg.shape[:-1]), k)
        if track in ("fp4", "dual"):
            return kernels.fake_quantized_matrix(x, fmt, "fast", right=False)
        return kernels.plain_matrix(x, rounding=track == "bf16", exact=track == "reference")
    if q.order == tuple(range(q.ndim)):
        return kernels.quantized_matrix(q, rounding=track == "bf16")
    x = kernels.dense(q, rounding=track == "bf16")
    return kernels.plain_matrix(x.reshape(-1, k), rounding=False)


def right_matrix(kernels, arg: Arg, track: str, fmt: Format):
    """The right operand, one or two axes, as a kernel matrix (K, N)."""
    q = arg.value
    if arg.array is not None:
        x = arg.array if arg.array.ndim == 2 else arg.array[:, None]
        if track in ("fp4", "dual"):
            return kernels.fake_quantized_matrix(x, fmt, "full", right=True)
        return kernels.plain_matrix(x, rounding=track == "bf16", exact=track == "reference")
    matrix = kernels.quantized_matrix(q, rounding=track == "bf16")
    return matrix.T if q.ndim == 1 else matrix


def whole_operand(kernels, arg: Arg, track: str, fmt: Format, right: bool) -> np.ndarray:
    """An operand with any leading axes as one array of what is multiplied."""
    if arg.array is None:
        return kernels.dense(arg.value, rounding=track == "bf16")
    x = arg.array
    if track not in ("fp4", "dual"):
        matrix = kernels.plain_matrix(
            x.reshape(math.prod(x.shape[:-1]), x.shape[-1]),
            rounding=track == "bf16",
            exact=track == "reference",
        )
        return matrix.whole().reshape(x.shape)
    if right and x.ndim > 1:
        x = np.swapaxes(x, -1, -2)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    used = (
        kernels.fake_quantized_matrix(rows, fmt, "full" if right else "fast", right=False)
        .whole()
        .reshape(x.shape)
    )
    return np.swapaxes(used, -1, -2) if right and x.ndim > 1 else used


def memory_of(*args: Arg) -> list[Any]:
    """Memory that a result must not overlap: NumPy arrays, or `DeviceArray` on a device."""
    found = []
    for arg in args:
        if arg.array is not None:
            found.append(arg.array)
        else:
            w, parts = arg.value, []
            if isinstance(w, DualWeight):
                parts, w = [w.master, w.down, w.up], w.twin
            parts += [w.packed, w.block_scale, w.outer_scale, w._expanded]
            found += [_memory(p, arg.name) for p in parts if p is not None]
    return found


def _memory(x: Any, name: str) -> Any:
    return device.operand(x, name) if device.is_device(x) else wrap(x, name).array


def part_of_dual(b: Arg, track: str) -> Arg:
    """A DualWeight as what `track` multiplies: the master or the twin; any other operand as it is."""
    w = b.value
    if not isinstance(w, DualWeight):
        return b
    return as_arg(w.master if track in ("bf16", "reference") else w.twin, b.name)


def branch(kernels, a: Arg, w: DualWeight) -> tuple[Arg, np.ndarray, np.ndarray]:
    """(a without the outlier columns, T = bf16(a @ down) (rows, r), up (r, N)), float32.

    An outlier column's "low-rank" column is a column of a itself, so its rounding changes nothing.
    """
    down, up = w.branch_factors()
    left = left_matrix(kernels, a, "bf16", w.format)
    hidden = np.empty((left.shape[0], down.shape[1]), np.float32)
    kernels.product(left, kernels.plain_matrix(down, rounding=False), hidden)
    kernels.round_bf16(hidden, hidden)
    if w.outlier_index.size:
        if a.array is None:
            raise TypeError(
                f"a DualWeight with outlier rows needs {a.name} as a plain array, because its outlier "
                f"columns are taken out before it is quantised; pass {a.name} unquantised"
            )
        masked = a.array.copy()
        masked[..., w.outlier_index] = 0
        a = Arg(masked, a.name, a.shape, a.framework, masked, a.dtype)
    return a, hidden, up


def choose_format(format: str | Format | None, a: Arg, b: Arg) -> Format:
    """The one asked for, else that of a prepared operand, else nvfp4_exact."""
    if format is not None:
        return get_format(format)
    for x in (b.value, a.value):
        if isinstance(x, QuantizedArray | DualWeight):
            return x.format
    return get_format("nvfp4_exact")


def linear_weight(op: str, x: Arg, weight: Any) -> Arg:
    """The (N, K) weight as a right operand (K, N); a mismatch of K is told in the weight's own shape."""
    w = as_arg(weight, "weight")
    if isinstance(weight, DualWeight):
        return w
    if len(w.shape) != 2:
        raise ShapeError(f"{op}: weight has shape {w.shape}, but two axes (N, K) are needed; reshape it")
    k = x.shape[-1] if x.shape else 0
    if k != w.shape[1]:
        raise ShapeError(f"{op}: K of x {x.shape} is {k} but K of weight {w.shape} is {w.shape[1]}; weight "
                         f"is (N, K), pass weight.T if it is (K, N)")  # fmt: skip
    if isinstance(weight, QuantizedArray) and w.value.axis != 1:
        raise ShapeError(f"{op}: weight {w.shape} is blocked along axis {w.value.axis}, but a weight (N, K) "
                         f"is blocked along its last axis; pass axis=-1 to quantize")  # fmt: skip
    return transposed(w)
