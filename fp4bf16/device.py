"""Arrays in device memory: PyTorch CUDA tensors and CuPy arrays, seen as an address, a shape and strides.

Nothing is imported here that the caller has not imported: a framework is recognised by its arrays. Nothing
synchronises or is read back, and memory comes from the caller's framework alone, on its current stream; so
calls can be captured in a CUDA graph. A `DeviceArray` keeps the framework's array, and with it the memory.

Work goes to `stream`, or to the framework's current stream of the operands' device:

    with ordered("matmul", stream, (a, b)) as handle:  # device and stream are the framework's current ones
        out = empty(shape, "bfloat16", like=a)
        call("gemm", args, handle)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np

from .adapters import Cupy, DeviceArray, Torch, contiguous_strides
from .backends import cuda
from .errors import CudaError, DTypeError, ShapeError
from .interop import FLOATS

_MODULES = {"torch": (Torch, "Tensor"), "cupy": (Cupy, "ndarray")}
_FRAMEWORKS: dict[str, Any] = {}
_KINDS: dict[type, Any] = {}  # a type's framework, or None


def register(framework: Any, kind: type) -> None:
    """Teach this module arrays of type `kind`, which `framework` (methods as of `Torch`) answers for."""
    _FRAMEWORKS[framework.name] = _KINDS[kind] = framework


def _framework_of(kind: type) -> Any:
    found = None
    for name, (adapter, array) in _MODULES.items():
        module = sys.modules.get(name)
        if module is not None and issubclass(kind, getattr(module, array, ())):
            found = _FRAMEWORKS.get(name) or adapter(module)
            _FRAMEWORKS[name] = found
    _KINDS[kind] = found
    return found


# ---- operands ----------------------------------------------------------------------------------------------
def is_device(x: Any) -> bool:
    """Whether `x` is an array in device memory: a PyTorch CUDA tensor, a CuPy array."""
    try:
        framework = _KINDS[type(x)]
    except KeyError:
        framework = _framework_of(type(x))
    return framework is not None and framework.on_device(x)


def operand(x: Any, name: str) -> DeviceArray:
    """`x` as a `DeviceArray` called `name`, without a copy; `TypeError` for kinds and layouts not taken."""
    if type(x) is DeviceArray:
        return x
    if not is_device(x):
        raise TypeError(f"{name}: is {_described(x)}, but an array on the GPU is needed; pass a PyTorch CUDA "
                        f"tensor ({name}.cuda()) or a CuPy array")  # fmt: skip
    return _KINDS[type(x)].wrap(x, name)


def float_operand(x: Any, name: str) -> DeviceArray:
    """`operand`, then check that it holds floating-point numbers that the primitives compute with."""
    found = operand(x, name)
    if found.dtype not in FLOATS:
        how = ".float()" if found.framework == "torch" else ".astype('float32')"
        raise DTypeError(f"{name}: has dtype {found.dtype}, but one of {', '.join(FLOATS)} is needed; "
                         f"convert it with {name}{how}")  # fmt: skip
    return found


def _described(x: Any) -> str:
    """What `x` is and where, for messages about operands that do not belong together."""
    if type(x) is DeviceArray:
        return f"a {x.framework} array on cuda:{x.device}"
    if is_device(x):
        return _described(operand(x, "x"))
    if hasattr(x, "packed"):
        return "a QuantizedArray"
    module = type(x).__module__.split(".")[0]
    if module == "builtins" and not isinstance(x, list | tuple | float | int):
        return f"a Python {type(x).__name__}"
    framework = getattr(x, "framework", None) or ("numpy" if module == "builtins" else module)
    where = "the host" if str(getattr(x, "device", "cpu")) == "cpu" else str(x.device)
    return f"a {framework} array on {where}"


def check_together(op: str, operands: Sequence[tuple[str, Any]]) -> None:
    """`TypeError` naming two of the ``(name, array)`` that are of different frameworks or devices.

    Takes arrays of any kind, `DeviceArray` and `interop.Operand`; None is passed over.
    """
    known = [(name, _described(x)) for name, x in operands if x is not None]
    for name, place in known[1:]:
        if place != known[0][1]:
            raise TypeError(f"{op}: {known[0][0]} is {known[0][1]} but {name} is {place}; move or convert "
                            f"one of them so that all operands are of one framework and device")  # fmt: skip


def check_container(name: str, q: Any) -> None:
    """Raise unless the arrays of a `QuantizedArray` fit one another and lie on one device."""
    q.check()
    parts = ("packed", "block_scale", "outer_scale", "_expanded")
    check_together(name, [(f"{name}.{n.lstrip('_')}", getattr(q, n)) for n in parts])


def common(op: str, arrays: Sequence[DeviceArray]) -> DeviceArray:
    """The first of `arrays`, after checking that all are of its framework and device."""
    first = arrays[0]
    for other in arrays:
        if other.device != first.device or other.framework != first.framework:
            check_together(op, [(a.name, a) for a in arrays])
    return first


# ---- memory ------------------------------------------------------------------------------------------------
def empty(shape: Sequence[int], dtype: str, like: DeviceArray, name: str = "result") -> DeviceArray:
    """A new C-contiguous array on `like`'s device by its framework's allocator."""
    shape = tuple(shape)
    framework = _FRAMEWORKS[like.framework]
    owner = framework.empty(shape, dtype, like)
    address, strides = framework.address(owner), contiguous_strides(shape)
    return DeviceArray(address, shape, strides, dtype, like.device, like.framework, owner, name)


def full(shape: Sequence[int], value: float, dtype: str, like: DeviceArray, name="result") -> DeviceArray:
    """A new array that holds `value` everywhere."""
    framework = _FRAMEWORKS[like.framework]
    return framework.wrap(framework.full(tuple(shape), value, dtype, like), name)


def astype(x: DeviceArray, dtype: str) -> DeviceArray:
    """`x` converted by its framework; `x` itself where it is of that dtype."""
    if x.dtype == dtype:
        return x
    framework = _FRAMEWORKS[x.framework]
    return framework.wrap(framework.astype(x.owner, dtype), x.name)


def contiguous(x: DeviceArray) -> DeviceArray:
    """`x` C-contiguous and aligned to its elements; copied by its framework where it is not."""
    if x.c_contiguous and x.address % x.itemsize == 0:
        return x
    framework = _FRAMEWORKS[x.framework]
    copied = framework.copy if x.c_contiguous else framework.contiguous
    return framework.wrap(copied(x.owner), x.name)


def assign(target: DeviceArray, source: DeviceArray) -> None:
    """Write `source` to `target`, of any strides, by the framework."""
    _FRAMEWORKS[target.framework].assign(target.owner, source.owner)


def permute(x: DeviceArray, axes: Sequence[int]) -> DeviceArray:
    """`x` with its axes permuted, a view."""
    framework = _FRAMEWORKS[x.framework]
    return framework.wrap(framework.permute(x.owner, tuple(axes)), x.name)


def reshape(x: DeviceArray, shape: Sequence[int]) -> DeviceArray:
    """`x`, C-contiguous, in another shape."""
    framework = _FRAMEWORKS[x.framework]
    return framework.wrap(framework.reshape(x.owner, tuple(shape)), x.name)


def broadcast(x: DeviceArray, shape: Sequence[int]) -> DeviceArray:
    """`x` broadcast to `shape`, a view."""
    framework = _FRAMEWORKS[x.framework]
    return framework.wrap(framework.broadcast(x.owner, tuple(shape)), x.name)


def powers_of_two(e: DeviceArray) -> DeviceArray:
    """2^e of whole numbers as float32, exactly; e outside -119 .. 120 counts as the nearer of these."""
    framework = _FRAMEWORKS[e.framework]
    return framework.wrap(framework.powers(e.owner), e.name)


def from_host(array: np.ndarray, like: DeviceArray, name: str = "array") -> DeviceArray:
    """A copy of a NumPy array on `like`'s device. Waits for the copy."""
    framework = _FRAMEWORKS[like.framework]
    return framework.wrap(framework.from_host(array, like), name)


def write(target: DeviceArray, array: np.ndarray) -> None:
    """Copy a NumPy array into `target`, of its shape and C-contiguous, on the framework's current stream."""
    array = np.ascontiguousarray(array, target.dtype)
    if array.shape != target.shape:
        raise ShapeError(f"write: {target.name} has shape {target.shape} but the array has {array.shape}; "
                         f"they must be equal")  # fmt: skip
    _FRAMEWORKS[target.framework].write(target.owner, array)


def to_host(x: Any) -> np.ndarray:
    """A NumPy copy of a device array (`DeviceArray` or the framework's own). Waits for the device."""
    x = operand(x, "x")
    return _FRAMEWORKS[x.framework].to_host(x.owner)


def out_operand(op: str, out: Any, shape: Sequence[int], dtype: str, like: DeviceArray,
                inputs: Sequence[DeviceArray | None] = ()) -> DeviceArray:  # fmt: skip
    """The array that a result is written to: a new one for ``out=None``, else `out` after checks.

    Its framework, device, shape and dtype must be the result's, it must not repeat memory, and the range of
    its addresses must not meet that of any of `inputs`.
    """
    shape = tuple(shape)
    if out is None:
        return empty(shape, dtype, like)
    check_together(op, [(like.name, like), ("out", out)])
    target = operand(out, "out")
    if target.shape != shape:
        raise ShapeError(f"{op}: out has shape {target.shape} but the result has shape {shape}; allocate out "
                         f"with the result's shape")  # fmt: skip
    if target.dtype != dtype:
        other = f" or pass dtype={target.dtype!r}" if target.dtype in FLOATS else ""
        raise DTypeError(f"{op}: out has dtype {target.dtype} but the result has dtype {dtype}; allocate out "
                         f"with that dtype{other}")  # fmt: skip
    if target.size and any(s == 0 and n > 1 for n, s in zip(shape, target.strides, strict=True)):
        raise ValueError(f"{op}: out of shape {shape} repeats the same memory (its strides are "
                         f"{target.strides}); pass an array of its own memory")  # fmt: skip
    for x in inputs:
        if x is not None and overlap(target, x):
            raise ValueError(f"{op}: out overlaps {x.name} in memory; pass an out that shares nothing with "
                             f"the operands")  # fmt: skip
    return target


def overlap(a: DeviceArray, b: DeviceArray) -> bool:
    """Whether the ranges of their addresses meet; interleaved views count as overlapping."""
    (a_low, a_high), (b_low, b_high) = a.span(), b.span()
    return a_low < b_high and b_low < a_high


# ---- streams and launches ----------------------------------------------------------------------------------
def stream_handle(op: str, stream: Any, device: int) -> int:
    """The cudaStream_t of an int, an object with ``__cuda_stream__``, PyTorch's or CuPy's stream.

    Raises:
        TypeError: no stream, or one of another device than `device`. ValueError: a negative handle.
    """
    if isinstance(stream, int | np.integer) and not isinstance(stream, bool):
        return _whole_handle(op, stream)
    handle = getattr(stream, "cuda_stream", None)  # torch.cuda.Stream
    if handle is None and hasattr(stream, "device_id"):  # cupy.cuda.Stream
        handle = getattr(stream, "ptr", None)
    if handle is None and hasattr(stream, "__cuda_stream__"):
        handle = _by_protocol(op, stream)
    if handle is None:
        raise TypeError(f"{op}: stream is a {type(stream).__name__}, but a stream is needed; pass a handle "
                        f"as int, a PyTorch, CuPy or cuda.core stream, or None")  # fmt: skip
    handle = _whole_handle(op, handle)
    place = _stream_device(stream)
    if place is not None and place != device:
        raise TypeError(f"{op}: stream is of cuda:{place} but the operands are on cuda:{device}; pass a "
                        f"stream of their device")  # fmt: skip
    return handle


def _whole_handle(op: str, handle: Any) -> int:
    if isinstance(handle, bool) or not isinstance(handle, int | np.integer):
        raise TypeError(f"{op}: the handle of stream is {handle!r}, but a whole number is needed; pass a "
                        f"stream that is open")  # fmt: skip
    if not 0 <= handle < 1 << 64:
        raise ValueError(f"{op}: stream is {handle}, but a cudaStream_t is not negative and has 64 bits; "
                         f"pass 0 for the default stream")  # fmt: skip
    return int(handle)


def _by_protocol(op: str, stream: Any) -> Any:
    """The handle that ``__cuda_stream__`` answers with, a method or a property."""
    answer = stream.__cuda_stream__
    if callable(answer) and not isinstance(stream, type):
        answer = answer()
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise TypeError(f"{op}: __cuda_stream__ of stream, a {type(stream).__name__}, gives {answer!r}, but "
                        f"(0, handle) is needed; pass its handle as an int")  # fmt: skip
    version, handle = answer
    if version != 0:
        raise TypeError(f"{op}: stream follows version {version!r} of __cuda_stream__, but version 0 is "
                        f"known; pass its handle as an int")  # fmt: skip
    return handle


def _stream_device(stream: Any) -> int | None:
    """Index of a stream's device; None where it does not say."""
    place = getattr(stream, "device_id", None)
    if place is None:
        try:
            place = getattr(stream, "device", None)
        except Exception:  # cuda.core asks the driver, which may refuse for a stream under capture
            return None
        place = getattr(place, "index", getattr(place, "device_id", None))
    return place if isinstance(place, int) and place >= 0 else None


def launch(op: str, stream: Any, arrays: Sequence[DeviceArray]) -> int:
    """The handle to launch on: `stream`'s, or the framework's current stream on the arrays' device.

    `TypeError` where the arrays are of different frameworks or devices. The device itself is made current by
    `on`, or by `ordered`, which also allocates on that stream.
    """
    first = common(op, arrays)
    if stream is None:
        return _FRAMEWORKS[first.framework].current_stream(first.device)
    return stream_handle(op, stream, first.device)


def follow(handle: int, x: DeviceArray) -> None:
    """Stream `handle` of x's device waits for the current one: for memory of `handle` that was read there and
    is about to be freed. A framework hands it out again to work on `handle`.
    """
    framework = _FRAMEWORKS[x.framework]
    if handle != framework.current_stream(x.device):
        framework.follow(handle, x.device)


def on(x: DeviceArray) -> Any:
    """A context in which x's device is the current one; free where it is already."""
    framework = _FRAMEWORKS[x.framework]
    return _NOTHING if framework.current_device() == x.device else framework.device_context(x.device)


_NOTHING = nullcontext()


class _Current:
    """The usual context of a launch: everything is current already."""

    __slots__ = ("handle",)

    def __init__(self, handle: int):
        self.handle = handle

    def __enter__(self) -> int:
        return self.handle

    def __exit__(self, *error: Any) -> None:
        return None


def capturing(x: DeviceArray, handle: int) -> bool:
    """Whether a graph is being captured on stream `handle`, as far as x's framework says."""
    asked = getattr(_FRAMEWORKS[x.framework], "capturing", None)
    return asked is not None and asked(handle)


def ordered(op: str, stream: Any, arrays: Sequence[DeviceArray]) -> Any:
    """A context that gives the stream's handle: in it, `stream` and its device are the framework's current
    ones, so that what is allocated, converted and freed inside is ordered with the kernels.
    """
    first = common(op, arrays)
    framework = _FRAMEWORKS[first.framework]
    if stream is None and framework.current_device() == first.device:
        handle = framework.current_stream(first.device)
        allocator = _capture_allocator(framework, handle)
        return _Current(handle) if allocator is None else _within(allocator, handle)
    return _switched(op, stream, first, framework)


def _capture_allocator(framework: Any, handle: int) -> Any:
    """What CuPy needs under capture; PyTorch keeps a pool for each graph itself."""
    make = getattr(framework, "capture_allocator", None)
    return None if make is None else make(handle)


@contextmanager
def _within(context: Any, handle: int):
    with context:
        yield handle


@contextmanager
def _switched(op: str, stream: Any, first: DeviceArray, framework: Any):
    with on(first):
        current = framework.current_stream(first.device)
        handle = current if stream is None else stream_handle(op, stream, first.device)
        if handle == current:
            yield handle
        else:
            allocator = _capture_allocator(framework, handle) or nullcontext()
            with framework.stream_context(stream, handle, first.device), allocator:
                yield handle


@cache
def _function(library: Any, name: str) -> tuple[Any, tuple[Any, ...]]:
    """A function of the library, and for each parameter its C type where an int must be cast to it."""
    function = getattr(library.lib, f"fp4bf16_{name}")
    kinds = library.ffi.typeof(function).args
    return function, tuple(kind if kind.kind == "pointer" else None for kind in kinds)


def call(name: str, *arguments: Any) -> None:
    """``fp4bf16_<name>(*arguments)``: ints for pointers and streams; its status as an exception.

    Raises:
        ValueError: an argument is out of range. CudaError: the runtime failed, no driver. LibraryError: the
            compiled library is missing. UnsupportedArchError: it holds no code for this GPU.
    """
    library = cuda.load()
    function, kinds = _function(library, name)
    cast = library.ffi.cast
    status = function(*[
        cast(kind, a) if kind is not None and isinstance(a, int) else a
        for kind, a in zip(kinds, arguments, strict=True)
    ])  # fmt: skip
    if status:
        text = library.ffi.string(library.lib.fp4bf16_last_error()).decode()
        raise cuda._ERRORS.get(status, CudaError)(text)
