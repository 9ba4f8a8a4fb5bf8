"""Save and load arrays and quantised arrays, bit for bit, as safetensors files.

The file format is that of the safetensors README: eight bytes of little-endian header length, a JSON header
``{name: {"dtype", "shape", "data_offsets"}}``, then the tensors without gaps. A quantised array is kept as
uint8 and float32 tensors ``name.packed``, ``name.block_scale``, ``name.outer_scale``, which any safetensors
reader can read, and a line of JSON in the header's ``__metadata__``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from .device import is_device, to_host
from .files import write_atomic
from .formats import FORMATS, QuantizedArray
from .interop import unwrap, wrap

_KEY = "fp4bf16"  # of our line in __metadata__
_VERSION = 1
_MAX_HEADER = 100 << 20  # bytes; the limit of the safetensors library
_MAX_AXES = 32
_PARTS = ("packed", "block_scale", "outer_scale")

#: header name -> NumPy dtype. "F4" is read as packed bytes: its last axis is halved.
DTYPES: dict[str, np.dtype] = {
    name: np.dtype(kind)
    for name, kind in {
        "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": ml_dtypes.bfloat16,
        "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
        "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
        "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    }.items()
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class _Entry(NamedTuple):
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


# ---- save --------------------------------------------------------------------------------------------------
def save(path, arrays: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> None:
    """Write `arrays`, name -> `QuantizedArray` or array of a supported framework, to a safetensors file.

    The file appears whole or not at all: it is written beside `path`, flushed to the disk and renamed.
    `stats` of a quantised array are not kept. Arrays on a GPU are copied to the host for it.

    Args:
        path: file to make or replace. metadata: further strings for the header.

    Raises:
        TypeError: a value is no array, or has a dtype that the format does not hold. ValueError: two names
        collide.

    >>> import numpy as np, fp4bf16 as fb, tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "w.safetensors"
    >>> fb.save(path, {"w": fb.quantize(np.ones((4, 32), np.float32))})
    >>> fb.load(path)["w"].shape
    (4, 32)
    """
    for name, given in (("arrays", arrays), ("metadata", {} if metadata is None else metadata)):
        if not isinstance(given, Mapping):
            raise TypeError(f"save: {name} is a {type(given).__name__}, but a dict by name is needed")
    tensors, quantized = _flatten(arrays)
    extra = dict(metadata or {})
    if _KEY in extra or not all(isinstance(s, str) for item in extra.items() for s in item):
        raise ValueError(f"save: metadata must map strings to strings and leave the key {_KEY!r} free")
    if quantized:
        extra[_KEY] = json.dumps({"version": _VERSION, "arrays": quantized}, separators=(",", ":"))
    order = sorted(
        tensors, key=lambda name: (-tensors[name].itemsize, name)
    )  # wide ones first: all stay aligned
    header: dict[str, Any] = {"__metadata__": extra} if extra else {}
    at = 0
    for name in order:
        a = tensors[name]
        header[name] = {"dtype": _NAMES[a.dtype], "shape": list(a.shape), "data_offsets": [at, at + a.nbytes]}
        at += a.nbytes
    try:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"save: a name or the metadata is no UTF-8 ({error}); rename it") from None
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER:
        raise ValueError(f"save: the header takes {len(text)} bytes, but at most {_MAX_HEADER} are read back")
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"save: {path}: the folder {path.parent} is not there; make it first")
    parts = (memoryview(tensors[name].reshape(-1).view(np.uint8)) for name in order)
    write_atomic(path, (len(text).to_bytes(8, "little"), text, *parts))


def _flatten(arrays: Mapping[str, Any]):
    """(tensor name -> contiguous array, name -> description of a quantised array)."""
    tensors: dict[str, np.ndarray] = {}
    quantized: dict[str, dict] = {}

    def add(name, value):
        if name in tensors or name == "__metadata__":
            raise ValueError(
                f"save: two tensors would be called {name!r}, or the name is reserved; rename one"
            )
        a = to_host(value) if is_device(value) else wrap(value, name).array
        a = a.astype(a.dtype.newbyteorder("<"), copy=False)
        if a.dtype not in _NAMES:
            raise TypeError(
                f"save: {name} has dtype {a.dtype}, which safetensors does not hold; convert it first"
            )
        tensors[name] = a if a.flags.c_contiguous else np.ascontiguousarray(a)

    for name, value in arrays.items():
        if not isinstance(name, str):
            raise TypeError(f"save: name {name!r} is a {type(name).__name__}, but a string is needed")
        if not isinstance(value, QuantizedArray):
            add(name, value)
            continue
        for part in _PARTS:
            if getattr(value, part) is not None:
                add(f"{name}.{part}", getattr(value, part))
        quantized[name] = {"format": value.format.name, "shape": value.shape, "order": value.order}
    return tensors, quantized


# ---- load --------------------------------------------------------------------------------------------------
def load(path, framework: str = "numpy") -> dict[str, Any]:
    """Read a safetensors file: name -> `QuantizedArray` for what `save` quantised, else an array.

    Reads files of other programs too: "F8_E4M3", "F8_E5M2", "F8_E8M0" as ml_dtypes', "F4" as packed uint8
    (..., K/2).

    Args:
        path: the file. framework: "numpy" or "torch" (the eight-bit floats need "numpy").

    Raises:
        ValueError: the file is not a safetensors file or is damaged; the sentence says where.

    >>> import numpy as np, fp4bf16 as fb, tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "x.safetensors"
    >>> fb.save(path, {"x": np.arange(3)})
    >>> fb.load(path)["x"].tolist()
    [0, 1, 2]
    """
    if framework not in ("numpy", "torch"):
        raise ValueError(f"load: framework is {framework!r}, but 'numpy' or 'torch' is needed")
    with open(path, "rb") as f:
        entries, metadata, base = _read_header(f, path)
        tensors = {name: _read(f, path, base, entry) for name, entry in entries.items()}
    out: dict[str, Any] = {}
    for name, item in _quantized(metadata, path).items():
        out[name] = _container(tensors, name, item, framework, path)
    for name, a in tensors.items():
        if name in out:
            raise _error(path, f"{name!r} names both a tensor and a quantised array")
        out[name] = unwrap(a, framework)
    return out


def load_metadata(path) -> dict[str, str]:
    """The strings of a safetensors file's ``__metadata__``."""
    with open(path, "rb") as f:
        return _read_header(f, path)[1]


def _error(path, what: str) -> ValueError:
    return ValueError(f"load: {os.fspath(path)} cannot be read as safetensors: {what}")


def _pairs(items):
    seen = dict(items)
    if len(seen) != len(items):
        raise ValueError("a name stands twice in the header")
    return seen


def _read_header(f, path) -> tuple[dict[str, _Entry], dict[str, str], int]:
    """(entries in file order, metadata, where the data starts)."""
    size = os.fstat(f.fileno()).st_size
    head = f.read(8)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length < 2 or length > min(size - 8, _MAX_HEADER):
        raise _error(path, f"its first eight bytes give a header of {length} bytes, but the file has {size}")
    try:
        header = json.loads(f.read(length).decode("utf-8"), object_pairs_hook=_pairs)
    except (ValueError, RecursionError) as error:
        raise _error(path, f"the header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise _error(path, f"the header is a JSON {type(header).__name__}, but an object is needed")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _error(path, "__metadata__ does not map strings to strings")
    entries = sorted(((n, _entry(n, item, path)) for n, item in header.items()), key=lambda e: e[1][2:])
    at = 0
    for name, entry in entries:
        if entry.start != at:
            raise _error(
                path, f"the data of {name!r} starts at {entry.start}, but the one before ends at {at}"
            )
        at = entry.stop
    if 8 + length + at != size:
        raise _error(path, f"its tensors end at byte {8 + length + at}, but the file has {size} bytes")
    return dict(entries), metadata, 8 + length


def _entry(name: str, item: Any, path) -> _Entry:
    """Check one tensor's description."""
    if not isinstance(item, dict) or set(item) != {"dtype", "shape", "data_offsets"}:
        raise _error(path, f"the entry of {name!r} is not made of dtype, shape and data_offsets")
    kind, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
            raise _error(path, f"{what} of {name!r} is not a list of whole numbers from 0 on")
    if len(shape) > _MAX_AXES or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _error(path, f"{name!r} has {len(shape)} axes and data_offsets {offsets[:4]}")
    if kind == "F4" and shape and shape[-1] % 2 == 0:
        kind, shape = "U8", [*shape[:-1], shape[-1] // 2]
    if not isinstance(kind, str) or kind not in DTYPES:
        raise _error(
            path, f"dtype of {name!r} is {str(kind)[:40]!r}; known: F4 (even last axis), {', '.join(DTYPES)}"
        )
    need = math.prod(shape) * DTYPES[kind].itemsize
    if offsets[1] - offsets[0] != need:
        raise _error(
            path,
            f"{name!r} of shape {shape} and dtype {kind} takes {need} bytes, but data_offsets span "
            f"{offsets[1] - offsets[0]}",
        )
    return _Entry(DTYPES[kind], tuple(shape), *offsets)


def _read(f, path, base: int, entry: _Entry) -> np.ndarray:
    try:
        array = np.empty(entry.shape, entry.dtype)
    except (ValueError, MemoryError) as error:  # an empty tensor, but of axes that NumPy does not count to
        raise _error(path, f"a tensor of shape {entry.shape} cannot be made ({error})") from None
    raw = array.reshape(-1).view(np.uint8)
    f.seek(base + entry.start)
    if f.readinto(memoryview(raw)) != raw.size:
        raise _error(path, "it ends before its last tensor")
    if entry.dtype == np.bool_ and raw.size and raw.max() > 1:
        raise _error(path, "a BOOL tensor holds a byte other than 0 and 1")
    return array


def _quantized(metadata: dict[str, str], path) -> dict[str, dict]:
    if _KEY not in metadata:
        return {}
    try:
        ours = json.loads(metadata[_KEY], object_pairs_hook=_pairs)
        version, arrays = ours["version"], ours["arrays"]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise _error(path, f"__metadata__[{_KEY!r}] is not what fp4bf16.save writes") from None
    if version != _VERSION:
        raise _error(
            path,
            f"its quantised arrays are of version {version!r}, but this package reads {_VERSION}; update it",
        )
    if not isinstance(arrays, dict) or not all(isinstance(v, dict) for v in arrays.values()):
        raise _error(path, f"__metadata__[{_KEY!r}] does not describe its arrays")
    return arrays


def _container(tensors: dict[str, np.ndarray], name: str, item: dict, framework: str, path) -> QuantizedArray:
    """Take the parts of one quantised array out of `tensors`."""
    fmt, shape, order = item.get("format"), item.get("shape"), item.get("order")
    lists = all(isinstance(v, list) and all(type(n) is int and n >= 0 for n in v) for v in (shape, order))
    if not isinstance(fmt, str) or fmt not in FORMATS or not lists:
        raise _error(path, f"the description of {name!r} is not of a known format, shape and order")
    parts = [tensors.pop(f"{name}.{part}", None) for part in _PARTS]
    for part, array, dtype in zip(_PARTS, parts, (np.uint8, np.uint8, np.float32), strict=True):
        if array is not None and array.dtype != dtype:
            raise _error(path, f"{name}.{part} has dtype {array.dtype}, but {np.dtype(dtype)} is needed")
    outer, axes = parts[2], len(shape)
    if (outer is None) != (FORMATS[fmt].default_outer is None):
        raise _error(
            path,
            f"{name}.outer_scale is {'missing' if outer is None else 'there'}, but {fmt} "
            f"{'has' if outer is None else 'has no'} outer scale",
        )
    try:
        q = QuantizedArray(
            *(None if p is None else unwrap(p, framework) for p in parts), FORMATS[fmt], shape, order
        )
        if outer is not None and (outer.ndim != axes or outer.shape[-1] != 1):
            raise ValueError(f"outer_scale has shape {outer.shape}")
        if outer is not None:
            if any(n not in (1, m) for n, m in zip(outer.shape, (*q.lead, 1), strict=True)):
                raise ValueError(f"outer_scale has shape {outer.shape} for rows {q.lead}")
    except (ValueError, OverflowError) as error:
        raise _error(path, f"the parts of {name!r} do not fit together ({error})") from None
    return q
