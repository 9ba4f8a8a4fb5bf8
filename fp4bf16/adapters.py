"""Arrays of PyTorch and CuPy in device memory, and what `device` asks of either framework.

Nothing is imported here: the frameworks' modules are the caller's own.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from .errors import DTypeError
from .interop import BFLOAT16

ITEMSIZE = {
    "float64": 8, "int64": 8, "uint64": 8, "float32": 4, "int32": 4, "uint32": 4, "bfloat16": 2, "float16": 2,
    "int16": 2, "uint16": 2, "uint8": 1, "int8": 1, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip
#: Byte formats, which are handled as their bits.
BYTES = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2")


@dataclass(slots=True)
class DeviceArray:
    """One array in device memory.

    Attributes:
        address: of element (0, ..., 0). shape, strides: strides in elements, may be 0 or negative.
        dtype: name; float8 and packed float4 of the frameworks are "uint8". device: index of the GPU.
        framework: "torch" or "cupy". owner: the framework's array over this memory. name: for messages.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int
    framework: str
    owner: Any
    name: str = "array"

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    @property
    def c_contiguous(self) -> bool:
        step = 1
        for n, s in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if n != 1 and s != step:
                return self.size == 0
            step *= n
        return True

    def span(self) -> tuple[int, int]:
        """Addresses of the first byte and of the one past the last; equal for an empty array."""
        if self.size == 0:
            return self.address, self.address
        reach = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        size = self.itemsize
        low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
        return self.address + low * size, self.address + (high + 1) * size


@lru_cache(maxsize=4096)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a C-contiguous array.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


# ---- frameworks --------------------------------------------------------------------------------------------
class Torch:
    """What is asked of PyTorch; `torch` is the caller's own module."""

    name = "torch"

    def __init__(self, torch: Any):
        self.torch = torch
        self.names = {getattr(torch, n): n for n in ITEMSIZE if hasattr(torch, n)}
        self.dtypes = {n: d for d, n in self.names.items()}
        self.bits = {getattr(torch, n) for n in BYTES if hasattr(torch, n)}
        self.raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
            lambda device: torch.cuda.current_stream(device).cuda_stream
        )
        self.current_device = getattr(torch._C, "_cuda_getDevice", None) or torch.cuda.current_device

        self.rocm = getattr(torch.version, "hip", None) is not None  # calls its devices cuda, too

    def on_device(self, x: Any) -> bool:
        return x.is_cuda and not self.rocm

    @staticmethod
    def address(x: Any) -> int:
        return x.data_ptr()

    def wrap(self, x: Any, name: str) -> DeviceArray:
        if x.requires_grad:
            x = x.detach()
        if x.is_nested:
            raise TypeError(f"{name}: is a nested PyTorch tensor, but one shape is needed; pass "
                            f"{name}.to_padded_tensor(0.0)")  # fmt: skip
        if x.layout is not self.torch.strided:
            raise TypeError(f"{name}: is a PyTorch tensor with layout {x.layout}, but dense strided data is "
                            f"needed; pass {name}.to_dense()")  # fmt: skip
        if x.is_neg() or x.is_conj():
            how = "resolve_conj()" if x.is_conj() else "resolve_neg()"
            raise TypeError(f"{name}: is a PyTorch view that negates numbers when it is read, but plain data "
                            f"is needed; pass {name}.{how}")  # fmt: skip
        dtype = self.names.get(x.dtype)
        if dtype is None:
            if x.dtype not in self.bits:
                raise DTypeError(f"{name}: has dtype {x.dtype}, which is not known here; pass "
                                 f"{name}.float()")  # fmt: skip
            x, dtype = x.view(self.torch.uint8), "uint8"
        try:
            address = x.data_ptr()
        except RuntimeError as error:  # a tensor of a functorch transform, a fake one of the compiler
            raise TypeError(f"{name}: is a PyTorch tensor without memory of its own ({error}); pass plain "
                            f"data, outside vmap, grad and compile") from None  # fmt: skip
        if address == 0 and x.numel():
            raise TypeError(f"{name}: is a PyTorch tensor of shape {tuple(x.shape)} whose memory was "
                            f"released; pass one that holds its numbers")  # fmt: skip
        return DeviceArray(address, tuple(x.shape), x.stride(), dtype, x.get_device(), "torch", x, name)

    def empty(self, shape: tuple[int, ...], dtype: str, like: DeviceArray) -> Any:
        return self.torch.empty(shape, dtype=self.dtypes[dtype], device=like.owner.device)

    def full(self, shape: tuple[int, ...], value: float, dtype: str, like: DeviceArray) -> Any:
        return self.torch.full(shape, value, dtype=self.dtypes[dtype], device=like.owner.device)

    def astype(self, x: Any, dtype: str) -> Any:
        return x.to(self.dtypes[dtype])

    def contiguous(self, x: Any) -> Any:
        return x.contiguous()

    def copy(self, x: Any) -> Any:
        return x.clone(memory_format=self.torch.contiguous_format)

    def assign(self, target: Any, source: Any) -> None:
        target.detach().copy_(source)

    def broadcast(self, x: Any, shape: tuple[int, ...]) -> Any:
        return x.expand(shape)

    def reshape(self, x: Any, shape: tuple[int, ...]) -> Any:
        return x.reshape(shape)

    def permute(self, x: Any, axes: tuple[int, ...]) -> Any:
        return x.permute(axes)

    def powers(self, e: Any) -> Any:
        """2^e of whole numbers, exactly, as float32."""
        e = e.to(self.torch.int32).clamp(-119, 120)
        return ((e + 127) << 23).view(self.torch.float32)

    def from_host(self, array: np.ndarray, like: DeviceArray) -> Any:
        if array.dtype == BFLOAT16:
            raw = self.torch.from_numpy(array.view(np.int16)).to(like.owner.device)
            return raw.view(self.torch.bfloat16)
        return self.torch.from_numpy(np.ascontiguousarray(array)).to(like.owner.device)

    def write(self, target: Any, array: np.ndarray) -> None:
        target.detach().copy_(self.torch.from_numpy(array))

    def to_host(self, x: Any) -> np.ndarray:
        x = x.detach().cpu()
        if x.dtype == self.torch.bfloat16:
            return x.view(self.torch.int16).numpy().view(BFLOAT16)
        return x.view(self.torch.uint8).numpy() if x.dtype in self.bits else x.numpy()

    def current_stream(self, device: int) -> int:
        return self.raw_stream(device)

    def device_context(self, device: int) -> Any:
        return self.torch.cuda.device(device)

    def follow(self, handle: int, device: int) -> None:
        """Stream `handle` waits for what the current stream holds; not under capture, which it would join."""
        if not self.torch.cuda.is_current_stream_capturing():
            other = self.torch.cuda.ExternalStream(0 if handle == 1 else handle, device=device)
            other.wait_stream(self.torch.cuda.current_stream(device))

    def stream_context(self, stream: Any, handle: int, device: int) -> Any:
        if not isinstance(stream, self.torch.cuda.Stream):  # 1 is the legacy default stream, PyTorch's own 0
            stream = self.torch.cuda.ExternalStream(0 if handle == 1 else handle, device=device)
        return self.torch.cuda.stream(stream)


class Cupy:
    """What is asked of CuPy. Its bfloat16 is ml_dtypes' (CuPy 14 and later; older ones have none).

    CuPy's pool hands out again what is freed during a graph capture, although the graph goes on using it at
    every replay (PyTorch keeps a pool for each graph). What is made on a stream under capture is therefore
    kept in `held`, for the life of the process; but on a stream in `pooled`, whose owner has made a pool that
    lives as long as the graph the current allocator.
    """

    name = "cupy"

    def __init__(self, cupy: Any):
        self.cupy, self.held, self.pooled = cupy, [], set()
        self.current_device = cupy.cuda.runtime.getDevice

    @staticmethod
    def on_device(x: Any) -> bool:
        return True

    @staticmethod
    def address(x: Any) -> int:
        return x.data.ptr

    def wrap(self, x: Any, name: str) -> DeviceArray:
        dtype = _dtype_name(x.dtype)
        if dtype in BYTES:
            x, dtype = x.view(np.uint8), "uint8"
        if dtype not in ITEMSIZE:
            raise DTypeError(f"{name}: has dtype {x.dtype}, which is not known here; pass "
                             f"{name}.astype('float32')")  # fmt: skip
        size, memory = x.itemsize, x.data
        if any(s % size for s in x.strides):
            raise TypeError(f"{name}: has strides {x.strides}, no multiples of its {size} bytes an element; "
                            f"pass {name}.copy()")  # fmt: skip
        strides = tuple([s // size for s in x.strides])
        return DeviceArray(memory.ptr, x.shape, strides, dtype, memory.device_id, "cupy", x, name)

    def capture_allocator(self, stream: int) -> Any:
        """A context for one call on `stream`, or None: under capture all that the call makes, intermediate
        results too, comes from a pool of its own, which is held as well.
        """
        if stream <= 2 or stream in self.pooled:  # 1, 2: the default streams
            return None
        if not self.capturing(stream):
            return None
        self.held.append(self.cupy.cuda.MemoryPool())
        return self.cupy.cuda.using_allocator(self.held[-1].malloc)

    def capturing(self, stream: int) -> bool:
        return stream > 2 and bool(self.cupy.cuda.runtime.streamIsCapturing(stream))

    def _kept(self, x: Any) -> Any:
        stream = self.cupy.cuda.get_current_stream()
        if stream.ptr > 2 and stream.ptr not in self.pooled and stream.is_capturing():
            self.held.append(x)
        return x

    def _make(self, function: Any, dtype: str, like: DeviceArray, *args: Any) -> Any:
        kind = BFLOAT16 if dtype == "bfloat16" else dtype
        try:
            if self.current_device() == like.device:
                return self._kept(function(*args, dtype=kind))
            with self.cupy.cuda.Device(like.device):
                return self._kept(function(*args, dtype=kind))
        except (TypeError, ValueError) as error:
            if dtype != "bfloat16":
                raise
            raise DTypeError(f"dtype is bfloat16, but CuPy {self.cupy.__version__} has none ({error}); "
                             f"install CuPy 14 or later, or pass dtype='float32'") from None  # fmt: skip

    def empty(self, shape: tuple[int, ...], dtype: str, like: DeviceArray) -> Any:
        return self._make(self.cupy.empty, dtype, like, shape)

    def full(self, shape: tuple[int, ...], value: float, dtype: str, like: DeviceArray) -> Any:
        return self._make(self.cupy.full, dtype, like, shape, value)

    def astype(self, x: Any, dtype: str) -> Any:
        return self._kept(x.astype(BFLOAT16 if dtype == "bfloat16" else dtype))

    def contiguous(self, x: Any) -> Any:
        return self._kept(self.cupy.ascontiguousarray(x))

    def copy(self, x: Any) -> Any:
        return self._kept(x.copy(order="C"))

    def assign(self, target: Any, source: Any) -> None:
        target[...] = source

    def broadcast(self, x: Any, shape: tuple[int, ...]) -> Any:
        return self.cupy.broadcast_to(x, shape)

    def reshape(self, x: Any, shape: tuple[int, ...]) -> Any:
        return x.reshape(shape)

    def permute(self, x: Any, axes: tuple[int, ...]) -> Any:
        return x.transpose(axes)

    def powers(self, e: Any) -> Any:
        e = e.astype(np.int32).clip(-119, 120)
        return self._kept(((e + np.int32(127)) << np.int32(23)).view(np.float32))

    def from_host(self, array: np.ndarray, like: DeviceArray) -> Any:
        with self.cupy.cuda.Device(like.device):
            return self.cupy.asarray(array)

    def write(self, target: Any, array: np.ndarray) -> None:
        # With a stream the copy is ordered there; from pageable memory it has read `array` when it returns.
        target.set(array, stream=self.cupy.cuda.get_current_stream())

    def to_host(self, x: Any) -> np.ndarray:
        return self.cupy.asnumpy(x)

    def current_stream(self, device: int) -> int:
        return self.cupy.cuda.get_current_stream(device).ptr

    def device_context(self, device: int) -> Any:
        return self.cupy.cuda.Device(device)

    def follow(self, handle: int, device: int) -> None:
        """Stream `handle` waits for what the current stream holds; not under capture, which it would join."""
        current = self.cupy.cuda.get_current_stream(device)
        if current.ptr <= 2 or not current.is_capturing():  # 1, 2: the default streams
            event = self.cupy.cuda.Event(disable_timing=True)
            event.record(current)
            self.cupy.cuda.runtime.streamWaitEvent(handle, event.ptr)

    def stream_context(self, stream: Any, handle: int, device: int) -> Any:
        if isinstance(stream, self.cupy.cuda.Stream | self.cupy.cuda.ExternalStream):
            return stream
        # CuPy 14 deprecates this for Stream.from_external, which would destroy the caller's stream in the end
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return self.cupy.cuda.ExternalStream(handle, device)


@cache
def _dtype_name(dtype: np.dtype) -> str:
    return str(dtype)
