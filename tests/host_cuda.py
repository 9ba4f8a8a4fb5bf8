"""The CUDA library and a device framework, emulated in host memory: the device front end without a GPU.

`HostCuda` answers as `backends.cuda.load()` does. Its functions have the C signatures of fp4bf16.h (cffi
callbacks), read and write host memory through the addresses in their arguments, and compute with the CPU
quantiser and NumPy. `FakeArray` is an array of a framework "fake" with devices 0 and 1, whose memory is the
host's; what it allocates is poisoned.

    pytest: the fixture `host_cuda` of this file, imported by name, puts both in place for a test.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import math
from collections import Counter
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import host_live
import numpy as np
import pytest

from fp4bf16 import device
from fp4bf16.adapters import DeviceArray, _dtype_name
from fp4bf16.backends import cpu_quantize, cuda, cuda_math
from fp4bf16.backends.threads import blas_limit
from fp4bf16.fallbacks import fallbacks
from fp4bf16.formats import FORMATS
from fp4bf16.interop import BFLOAT16
from fp4bf16.python_ref.formats import E2M1, E4M3, E8M0, encode_e4m3, unpack
from fp4bf16.python_ref.gemm import gelu, silu

HEADER = Path(__file__).resolve().parents[1] / "src" / "cuda" / "fp4bf16.h"
HEADERS = [HEADER, HEADER.with_name("fp4bf16_network.h")]
DTYPES = (np.dtype(np.float32), BFLOAT16, np.dtype(np.float16))
NAMES = ("nvfp4_exact", "nvfp4", "mxfp4", "fp8")
RULES = (
    None, "te", "four_over_six", "four_over_six_mae", "four_over_six_448", "four_over_six_mae_448", "even",
    "floor", "rceil", "ceil",
)  # fmt: skip
POISON = 0xA5
#: Modules beside this one whose ``define(library)`` adds the emulation of a kernel family.
EXTENSIONS = (
    "host_conv", "host_norm", "host_attention", "host_elementwise", "host_diffusion", "host_optimizer",
    "host_lora", "host_certificate",
)  # fmt: skip


# ---- memory
class _Memory:
    def __init__(self, address: int, shape, strides, dtype):
        self.__array_interface__ = {
            "data": (address, False), "shape": tuple(shape), "version": 3, "typestr": f"<u{dtype.itemsize}",
            "strides": tuple(s * dtype.itemsize for s in strides),
        }  # fmt: skip


def memory(address: int, shape, dtype, strides=None) -> np.ndarray:
    """The array at `address`; strides in elements, C order by default."""
    dtype = np.dtype(dtype)
    shape = tuple(int(n) for n in shape)
    if 0 in shape:
        return np.empty(shape, dtype)
    assert address, f"a NULL pointer is read as {dtype} of shape {shape}"
    strides = device.contiguous_strides(shape) if strides is None else strides
    return np.asarray(_Memory(int(address), shape, strides, dtype)).view(dtype)


def _rounded(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x.astype(dtype)


# ---- the library
@cache
def _declarations():
    """The header's, parsed once: it takes half a second."""
    import cffi

    ffi, texts = cffi.FFI(), [header.read_text() for header in HEADERS]
    for text in texts:
        declared = text.split("/* cffi: begin */")[1].split("/* cffi: end */")[0]
        ffi.cdef(declared.replace("FP4BF16_API ", ""))
    return ffi, "".join(texts)


class HostCuda(cuda.Library):
    """`calls` counts the launches by name, `streams` are the handles that they were given. `tracked`: each
    pointer must lie in memory that lives (host_live.py); what is of PyTorch is not known there.
    """

    tracked = True

    def __init__(self):
        self.ffi, self.header = _declarations()
        self.path, self.calls, self.streams = HEADER, Counter(), []
        self._error, self._word = self.ffi.new("char[]", 512), self.ffi.typeof("uintptr_t")
        self.lib = SimpleNamespace(fp4bf16_last_error=lambda: self._error)
        define = self._define
        define("quantize", "const fp4bf16_quantize_args*, void*", self.quantize)
        define("dequantize", "fp4bf16_format, const uint8_t*, const uint8_t*, const float*, int64_t, "
               "int64_t, int64_t, int64_t, void*, fp4bf16_dtype, int64_t, int64_t, int64_t, void*",
               self.dequantize)  # fmt: skip
        define("expand", "fp4bf16_format, const uint8_t*, const uint8_t*, int64_t, int64_t, uint8_t*, "
               "int64_t, int32_t*, void*", self.expand)  # fmt: skip
        define("convert", "const void*, fp4bf16_dtype, int64_t, int64_t, int64_t, int64_t, int64_t, "
               "int64_t, void*, fp4bf16_dtype, int64_t, void*", self.convert)  # fmt: skip
        for name in ("gemm", "gemm_simple"):
            define(name, "const fp4bf16_gemm_args*, void*", self.gemm)
        self.lib.fp4bf16_quantize_workspace_size = self.ffi.callback(
            "int64_t(const fp4bf16_quantize_args*)", lambda args: 64
        )
        self.lib.fp4bf16_device_count = self.ffi.callback("fp4bf16_status(int32_t*)", self._count)
        self.lib.fp4bf16_device_query = self.ffi.callback(
            "fp4bf16_status(int32_t, fp4bf16_device*)", lambda index, info: 0
        )
        for name in EXTENSIONS:
            if importlib.util.find_spec(name) is not None:
                importlib.import_module(name).define(self)
        self._no_config = self.ffi.new("char[]", b"host")
        self.lib.fp4bf16_gemm_config = lambda args, config: self._no_config

    def _define(self, name: str, kinds: str, function) -> None:
        def guarded(*arguments):
            self.calls[name] += 1
            self.streams.append(int(self.ffi.cast("intptr_t", arguments[-1])))
            try:
                if self.tracked:
                    host_live.check(self.ffi, self.header, name, arguments[:-1])
                function(*arguments[:-1])
                return 0
            except Exception as error:  # a C function has no exceptions: status and sentence
                sentence = f"{name}: {type(error).__name__}: {error}".encode()[:511] + b"\0"
                self.ffi.buffer(self._error)[: len(sentence)] = sentence
                return 1

        signature = f"fp4bf16_status({kinds})"
        setattr(self.lib, f"fp4bf16_{name}", self.ffi.callback(signature, guarded, error=4))

    def at(self, pointer) -> int:
        return int(self.ffi.cast(self._word, pointer))

    @staticmethod
    def _count(count) -> int:
        count[0] = 2
        return 0

    # ---- quantise
    def quantize(self, a) -> None:
        fmt, dtype = FORMATS[NAMES[a.format]], DTYPES[a.dtype]
        rows, k, after = a.rows, a.k_size, a.after
        assert after >= 1 and rows % after == 0, f"after is {after} but rows are {rows}"
        assert self.at(a.workspace) % 16 == 0 and self.at(a.workspace), "workspace"
        assert self.at(a.x) % dtype.itemsize == 0, "x is not aligned to its elements"
        x = memory(self.at(a.x), (rows // after, after, k), dtype, (a.x_stride, 1, a.k_stride))
        x = np.array(x, np.float32).reshape(rows, k)
        hidden = self._hidden(a, x)
        if a.outliers:
            x[:, memory(self.at(a.outlier_index), (a.outliers,), np.int32)] = 0
        given = self._outer(a, fmt, x)
        random = {"seed": (a.seed, a.stream_word, a.call_word), "after": after} if a.rounding else {}
        rule = "rceil" if a.rounding and fmt.name == "mxfp4" and not a.rule else RULES[a.rule]
        q = cpu_quantize.quantize_rows(
            x, fmt, given.get("outer"), rule, ("full", "fast")[a.search], "propagate", amax=given.get("amax"),
            rounding=("nearest", "stochastic")[a.rounding], **random,
        )  # fmt: skip
        self._put(a.packed, q.packed)
        self._put(a.block_scale, q.block_scale)
        self._put(a.sums, q.sums)
        if self.at(a.counts):
            memory(self.at(a.counts), (5,), np.int32)[:] += q.counts.astype(np.int32)
        if self.at(a.outer_scale) and q.outer is not None:
            group, count = given["group"], given["count"]
            scale = np.ones(count, np.float32)
            scale[group] = q.outer
            self._put(a.outer_scale, scale)
        if self.at(a.expanded):
            assert fmt.name in ("nvfp4_exact", "fp8"), f"expanded is not for {fmt}"
            byte = cpu_quantize.expand_rows(q.packed, q.block_scale, fmt)
            target = memory(self.at(a.expanded), (rows, a.expanded_stride), np.uint8)
            target[:] = 0
            target[:, : byte.shape[1]] = byte
        if hidden is not None:
            self._put(a.hidden, hidden)

    def _put(self, pointer, array) -> None:
        if self.at(pointer):
            memory(self.at(pointer), array.shape, array.dtype)[...] = array

    def _outer(self, a, fmt, x) -> dict:
        """Keyword arguments of the outer scale, and each row's group."""
        rows = x.shape[0]
        if fmt.name == "mxfp4":
            return {}
        assert a.mid >= 1 and a.inner >= 1, f"mid, inner = {a.mid}, {a.inner}"
        row = np.arange(rows)
        group = row // (a.mid * a.inner) * a.inner + row % a.inner
        count = -(-rows // (a.mid * a.inner)) * a.inner
        if self.at(a.outer_given):
            stride = a.outer_given_stride
            scale = memory(self.at(a.outer_given), (count,), np.float32, (stride,))
            return {"outer": np.array(scale[group]), "group": group, "count": count}
        amax = np.zeros(count, np.float32)
        if x.size:
            np.maximum.at(amax, group, np.where(np.isfinite(x), np.abs(x), 0).max(1).astype(np.float32))
        return {"amax": amax[group], "group": group, "count": count}

    def _hidden(self, a, x):
        if not self.at(a.hidden):
            return None
        hidden = np.zeros((a.rows, a.hidden_stride), BFLOAT16)
        rounded = _rounded(x, BFLOAT16)
        if a.rank:
            down = memory(self.at(a.down_t), (a.rank, a.k_size), BFLOAT16, (a.down_stride, 1))
            hidden[:, : a.rank] = rounded.astype(np.float32) @ down.astype(np.float32).T
        if a.outliers:
            index = memory(self.at(a.outlier_index), (a.outliers,), np.int32)
            hidden[:, a.rank : a.rank + a.outliers] = rounded[:, index]
        return hidden

    # ---- back
    def _stored(self, format, packed, block_scale, rows, k):
        fmt = FORMATS[NAMES[format]]
        kp = -(-k // fmt.multiple) * fmt.multiple
        if fmt.block == 0:
            return fmt, E4M3[memory(self.at(packed), (rows, k), np.uint8)]
        codes = unpack(memory(self.at(packed), (rows, kp // 2), np.uint8))
        scale = memory(self.at(block_scale), (rows, kp // fmt.block), np.uint8)
        scale = (E8M0 if fmt.name == "mxfp4" else E4M3)[scale]
        with np.errstate(invalid="ignore"):
            return fmt, E2M1[codes] * np.repeat(scale, fmt.block, axis=-1)

    def dequantize(self, format, packed, block_scale, outer, rows, k, mid, inner, x, dtype, after, x_stride,
                   k_stride) -> None:  # fmt: skip
        _, value = self._stored(format, packed, block_scale, rows, k)
        value = value[:, :k].astype(np.float32)
        if self.at(outer):
            row = np.arange(rows)
            group = row // (mid * inner) * inner + row % inner
            count = -(-rows // (mid * inner)) * inner
            with np.errstate(over="ignore"):
                value = value * memory(self.at(outer), (count,), np.float32)[group][:, None]
        shape = (rows // after, after, k)
        target = memory(self.at(x), shape, DTYPES[dtype], (x_stride, 1, k_stride))
        target[...] = _rounded(value, DTYPES[dtype]).reshape(shape)

    def expand(self, format, packed, block_scale, rows, kp, expanded, stride, inexact) -> None:
        fmt, value = self._stored(format, packed, block_scale, rows, kp)
        assert fmt.name in ("nvfp4_exact", "nvfp4"), f"expand is not for {fmt}"
        byte = encode_e4m3(value)
        target = memory(self.at(expanded), (rows, stride), np.uint8)
        target[:, :kp], target[:, kp:] = byte, 0
        if self.at(inexact):
            odd = (E4M3[byte] != value) & ~np.isnan(value)
            memory(self.at(inexact), (1,), np.int32)[0] += odd.sum()

    def convert(self, x, dtype, batch, rows, k, batch_stride, row_stride, k_stride, out, out_dtype,
                out_stride) -> None:  # fmt: skip
        source = memory(self.at(x), (batch, rows, k), DTYPES[dtype], (batch_stride, row_stride, k_stride))
        target = memory(self.at(out), (batch, rows, out_stride), DTYPES[out_dtype])
        target[..., :k] = _rounded(_rounded(source, np.dtype(np.float32)), DTYPES[out_dtype])
        target[..., k:] = 0

    def runs(self, run_if) -> bool:
        """Whether a launch with this `run_if` does something."""
        return not self.at(run_if) or bool(memory(self.at(run_if), (1,), np.int32)[0])

    # ---- product
    def gemm(self, a) -> None:
        if not self.runs(a.run_if):
            return
        for z in range(a.batch_count or 1):
            self._gemm(a, z)

    def _gemm(self, a, z: int) -> None:
        """Matrix z in float64, rounded to float32, then to its dtype."""
        ia = z // (a.a_batch_div or 1) % (a.a_batch_mod or 1)
        ib = z // (a.b_batch_div or 1) % (a.b_batch_mod or 1)
        m, n, k8, k16 = a.m, a.n, a.k8, a.k16
        d = np.zeros((m, n))
        if k8:
            a8 = memory(self.at(a.a8) + ia * a.a8_batch_stride, (m, k8), np.uint8, (a.a8_stride, 1))
            b8 = memory(self.at(a.b8) + ib * a.b8_batch_stride, (n, k8), np.uint8, (a.b8_stride, 1))
            d = E4M3[a8].astype(np.float64) @ E4M3[b8].astype(np.float64).T
        scale = np.ones((m, n))
        for pointer, length, step, start, axis in (
            (a.row_scale, m, a.row_scale_step, ia * a.row_scale_batch_stride, 1),
            (a.col_scale, n, a.col_scale_step, ib * a.col_scale_batch_stride, 0),
        ):
            if self.at(pointer):
                vector = memory(self.at(pointer) + 4 * start, (length,), np.float32, (step,))
                scale = scale * np.expand_dims(vector.astype(np.float64), axis)
        if k8:
            d = d * scale
        if k16:
            steps = (1, a.a16_stride) if a.a16_m_major else (a.a16_stride, 1)
            a16 = memory(self.at(a.a16) + 2 * ia * a.a16_batch_stride, (m, k16), BFLOAT16, steps)
            steps = (1, a.b16_stride) if a.b16_n_major else (a.b16_stride, 1)
            b16 = memory(self.at(a.b16) + 2 * ib * a.b16_batch_stride, (n, k16), BFLOAT16, steps)
            product = a16.astype(np.float64) @ b16.astype(np.float64).T
            d = d + (product if k8 else product * scale)
        d = d * a.alpha
        if self.at(a.bias):
            d = d + memory(self.at(a.bias), (n,), DTYPES[a.bias_dtype]).astype(np.float64)
        d = (lambda x: x, silu, gelu)[a.activation](d)
        if self.at(a.residual):
            dtype = DTYPES[a.residual_dtype]
            start = self.at(a.residual) + dtype.itemsize * z * a.residual_batch_stride
            d = d + memory(start, (m, n), dtype, (a.residual_stride, 1)).astype(np.float64)
        dtype = DTYPES[a.d_dtype]
        start = self.at(a.d) + dtype.itemsize * z * a.d_batch_stride
        single = _rounded(d, np.dtype(np.float32))
        memory(start, (m, n), dtype, (a.d_stride, 1))[...] = _rounded(single, dtype)


# ---- the framework
class FakeArray:
    """An array "on a GPU": NumPy's memory, which only the emulation above may touch."""

    def __init__(self, array: np.ndarray, device: int = 0):
        self.array, self.device = np.asarray(array), device
        host_live.LIVE.add(self.array)

    def __setstate__(self, state):  # of a deep copy
        self.__init__(**state)

    shape = property(lambda self: self.array.shape)
    size = property(lambda self: self.array.size)
    dtype = property(lambda self: self.array.dtype)
    itemsize = property(lambda self: self.array.itemsize)
    T = property(lambda self: FakeArray(self.array.T, self.device))

    def __getitem__(self, index):
        return FakeArray(self.array[index], self.device)

    def copy(self):
        return FakeArray(self.array.copy(), self.device)


class Fake:
    """The framework of `FakeArray`; `made` are the shapes and dtypes that it was asked for."""

    name = "fake"

    def __init__(self):
        self.device, self.stream, self.made, self.moved = 0, 0, [], 0
        self.followed = []  # (stream that waits, stream that it waits for)

    @staticmethod
    def on_device(x) -> bool:
        return True

    @staticmethod
    def address(x) -> int:
        return x.array.ctypes.data

    def wrap(self, x, name: str) -> DeviceArray:
        a, dtype = x.array, _dtype_name(x.array.dtype)
        strides = tuple(s // a.itemsize for s in a.strides)
        return DeviceArray(a.ctypes.data, a.shape, strides, dtype, x.device, "fake", x, name)

    def _make(self, shape, dtype, like) -> FakeArray:
        assert self.device == like.device, "allocated while another device was current"
        dtype = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
        self.made.append((tuple(shape), str(dtype)))
        size = math.prod(shape) * dtype.itemsize
        # Views of an empty array start beyond it, where on a GPU nothing looks.
        raw = np.empty(size + 64 if size else 1 << 14, np.uint8)
        start = -raw.ctypes.data % 64  # as device allocators align
        raw[:] = POISON
        return FakeArray(raw[start : start + size].view(dtype).reshape(shape), like.device)

    def empty(self, shape, dtype, like):
        return self._make(shape, dtype, like)

    def full(self, shape, value, dtype, like):
        made = self._make(shape, dtype, like)
        made.array[...] = value
        return made

    def _made_of(self, x, array) -> FakeArray:
        assert self.device == x.device, "made while another device was current: CuPy allocates there"
        return FakeArray(array, x.device)

    def astype(self, x, dtype):
        return self._made_of(x, _rounded(x.array, BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)))

    def contiguous(self, x):
        return self._made_of(x, np.ascontiguousarray(x.array))

    def copy(self, x):
        return self._made_of(x, x.array.copy(order="C"))

    def assign(self, target, source) -> None:
        target.array[...] = source.array

    def broadcast(self, x, shape):
        return FakeArray(np.broadcast_to(x.array, shape), x.device)

    def reshape(self, x, shape):
        return FakeArray(x.array.reshape(shape), x.device)

    def permute(self, x, axes):
        return FakeArray(x.array.transpose(axes), x.device)

    def powers(self, e):
        return self._made_of(e, np.ldexp(np.float32(1), np.clip(e.array, -119, 120)).astype(np.float32))

    def from_host(self, array, like):
        return FakeArray(np.array(array), like.device)

    def write(self, target, array) -> None:
        target.array[...] = array

    def to_host(self, x):
        self.moved += 1  # a synchronisation
        return x.array.copy()

    def current_device(self) -> int:
        return self.device

    def current_stream(self, place: int) -> int:
        return self.stream

    def follow(self, handle: int, place: int) -> None:
        self.followed.append((handle, self.stream))

    @contextmanager
    def device_context(self, place: int):
        before, self.device = self.device, place
        try:
            yield
        finally:
            self.device = before

    @contextmanager
    def stream_context(self, stream, handle: int, place: int):
        before, self.stream = self.stream, handle
        try:
            yield
        finally:
            self.stream = before


def put(array, place: int = 0) -> FakeArray:
    """A copy of `array` "on the device"."""
    array = np.asarray(array)
    return FakeArray(array.copy(order="K"), place)


@pytest.fixture
def host_cuda(monkeypatch):
    """`HostCuda` in place of the library, with `.fake`, the framework of `FakeArray`.

    NumPy's products run on one thread meanwhile: OpenBLAS's others would spin on after each small one.
    """
    library, fake = HostCuda(), Fake()
    library.fake = fake
    monkeypatch.setattr(cuda, "load", lambda: library)
    monkeypatch.setitem(device._FRAMEWORKS, "fake", fake)
    monkeypatch.setitem(device._KINDS, FakeArray, fake)
    monkeypatch.setattr(fallbacks, "_device", {})
    with blas_limit():
        yield library


assert ctypes.sizeof(ctypes.c_void_p) == 8, "addresses are read as 64 bits"
__all__ = ["Fake", "FakeArray", "HostCuda", "host_cuda", "memory", "put"]


class Arrays(cuda_math.Arrays):
    """NumPy behind `FakeArray`."""

    def __init__(self):
        super().__init__(np)

    def raw(self, x):
        return x.owner.array

    def owner(self, raw, like):
        return FakeArray(np.asarray(raw), like.device)

    def erfc(self, x):
        return np.frompyfunc(math.erfc, 1, 1)(x).astype(np.float64)
