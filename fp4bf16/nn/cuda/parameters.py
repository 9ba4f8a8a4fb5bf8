"""A module's parameters in device memory: the flat float32 arrays, their BF16 copy, the FP4 twins.

`DeviceParameters` is one set of weights. The average of the weights and the reference model of DPO are
further sets of the same `Layout` (`clone`), each with its own copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ... import device
from ...backends import cuda_conv, cuda_optimizer
from ...backends.cuda_optimizer import Entry, Table
from ...device import DeviceArray
from ...errors import DTypeError, ShapeError
from ..module import FlatParameters
from .norms import WeightNorms

_TWIN, _SCALES = 128, 32  # elements: twins of equal rows start on a line of the cache, as do their scales


def takes_twin(shape: tuple[int, ...]) -> bool:
    """Whether a parameter of this shape can have a twin: a matrix or kernel of whole blocks."""
    return len(shape) > 1 and shape[-1] > 0 and shape[-1] % 16 == 0


def _rounded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _numbers(name: str, value: Any) -> np.ndarray:
    if device.is_device(value):
        raise TypeError(f"DeviceParameters: {name} is an array on the GPU, but the state is of host arrays; "
                        f"pass what state_dict() gives")  # fmt: skip
    array = np.asarray(value)
    if array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16":
        raise DTypeError(f"DeviceParameters: {name} has dtype {array.dtype}, but real numbers are needed; "
                         f"pass what state_dict() gives")  # fmt: skip
    return array


class Alike(NamedTuple):
    """Twins whose rows are equally long: where the first one's bytes and scales begin, and all their rows."""

    twin: int
    scale: int
    rows: int


class Phases(NamedTuple):
    """What `nn.fused.phase_weights` makes of a weight (O, 3, 3, C): float32 (O, 2, 2, 2, 2, C), flat; its
    BF16 copy; E4M3 bytes and decode scales (4 O,) of its twin, a row being one phase of an output channel;
    and the table with which the optimizer's kernel makes the copies.
    """

    data: DeviceArray
    bf16: DeviceArray
    twin: DeviceArray
    twin_scale: DeviceArray
    table: Table


class Layout:
    """Where each parameter lies in the flat arrays of a module, and its twin in those of the twins: those of
    equal rows one after another, so that one launch can decode them (`alike`: length of the rows -> them).

    Attributes: shapes, offsets, twins (name -> place of its bytes, of its scales); size, twin_size,
    scale_size: elements of the arrays; table: what the optimizer's kernel walks over; rows: see `row_of`.
    """

    def __init__(self, flat: FlatParameters, like: DeviceArray, quantised: Callable[[str], bool]):
        self.shapes = {name: tuple(p.shape) for name, p in flat.named.items()}
        self.offsets, self.size = dict(flat.offsets), int(flat.data.size)
        self.twins: dict[str, tuple[int, int]] = {}
        self.alike: dict[int, Alike] = {}
        self.twin_size = self.scale_size = 0
        self._place_twins([n for n, shape in self.shapes.items() if quantised(n) and takes_twin(shape)])
        self.rows: dict[tuple, int] = {}
        self.table = self.table_of(self.shapes, like)

    def _place_twins(self, names: list[str]) -> None:
        by_length: dict[int, list[str]] = {}
        for name in names:
            by_length.setdefault(self.row_length(name), []).append(name)
        for k, equal in by_length.items():
            twin, scale, rows = self.twin_size, self.scale_size, 0
            for name in equal:
                self.twins[name] = twin + rows * k, scale + rows
                rows += self.shapes[name][0]
            self.alike[k] = Alike(twin, scale, rows)
            self.twin_size += _rounded(rows * k, _TWIN)
            self.scale_size += _rounded(rows, _SCALES)

    def table_of(self, names: Iterable[str], like: DeviceArray) -> Table:
        """What the optimizer's kernel walks over for these parameters alone."""
        tensors, units = cuda_optimizer.tensor_table(self._entry(n, self.shapes[n]) for n in names)
        return Table(device.from_host(tensors, like, "tensors"), units)

    def _entry(self, name: str, shape: tuple[int, ...]) -> Entry:
        if name not in self.twins:
            return Entry(self.offsets[name], 1, math.prod(shape))
        return Entry(self.offsets[name], shape[0], self.row_length(name), *self.twins[name])

    @property
    def most_rows(self) -> int:
        """More than there are products: a row for each layer, by phases, and with those beside it."""
        return 3 * sum(len(shape) > 1 for shape in self.shapes.values())

    def row_of(self, layer: Any) -> int:
        """The row of a product (`products.Layer`) in tables of them, in the order in which they are met."""
        key = layer.name, layer.o, bool(layer.how)
        return self.rows.setdefault(key, len(self.rows))

    def row_length(self, name: str) -> int:
        """Elements of an output of a matrix or kernel."""
        return math.prod(self.shapes[name][1:])

    def check(self, name: str) -> None:
        if name not in self.shapes:
            raise KeyError(f"DeviceParameters: there is no parameter {name!r}; the names are those of the "
                           f"module's state_dict()")  # fmt: skip

    def pack(self, state: Mapping[str, Any]) -> np.ndarray:
        """Host arrays by name -> one flat float32 array; `ShapeError` names what does not fit."""
        if not isinstance(state, Mapping):
            raise TypeError(f"DeviceParameters: the state is a {type(state).__name__}, but arrays by name "
                            f"are needed; pass what state_dict() gives")  # fmt: skip
        state = {name: _numbers(name, value) for name, value in state.items()}
        wrong = [f"{n} is missing" for n in self.shapes if n not in state]
        wrong += [f"{n} is not known" for n in state if n not in self.shapes]
        wrong += [
            f"{n} has shape {tuple(state[n].shape)} instead of {shape}"
            for n, shape in self.shapes.items() if n in state and tuple(state[n].shape) != shape
        ]  # fmt: skip
        if wrong:
            raise ShapeError(f"DeviceParameters: the state does not fit: {'; '.join(wrong)}; load one of the "
                             f"same configuration")  # fmt: skip
        flat = np.zeros(self.size, np.float32)
        for name, view in self.views(flat).items():
            view[...] = state[name]
        return flat

    def views(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Views by name of a flat host array."""
        return {
            name: flat[start : start + int(np.prod(self.shapes[name]))].reshape(self.shapes[name])
            for name, start in self.offsets.items()
        }


class DeviceParameters:
    """One set of weights on a GPU, laid out as the module's `flat`.

    Args:
        flat: the module's flat parameters, float32, on the host; copied.
        like: an array on the GPU, which says where and whose memory this is.
        quantised: name -> whether that weight gets a twin; by default all of whole blocks of 16 do.
        grad: whether to make `grad`, zero.
        copies: whether there are BF16 copy and twins; without them nothing can run with these weights.

    Attributes: layout; data, grad (float32), bf16: flat arrays of the same offsets, zero between parameters;
    twin (uint8, E4M3 bytes of code * block scale), twin_scale (float32, one a row). The copies are zero until
    `refresh`, or a step of the optimizer, makes them from `data`.
    """

    def __init__(self, flat: FlatParameters, like: Any, quantised: Callable[[str], bool] = lambda name: True,
                 grad: bool = True, copies: bool = True):  # fmt: skip
        if flat.data.dtype != np.float32:
            raise DTypeError(f"DeviceParameters: the parameters are {flat.data.dtype}, but float32 is "
                             f"needed; convert them with module.to('float32')")  # fmt: skip
        like = device.operand(like, "like")
        with device.on(like):
            data = device.from_host(np.array(flat.data), like, "data")
            self._make(Layout(flat, like, quantised), data, grad, copies)

    def _make(self, layout: Layout, data: DeviceArray, grad: bool, copies: bool) -> None:
        def zeros(size: int, dtype: str, name: str) -> DeviceArray:
            return device.full((size,), 0, dtype, like=data, name=name)

        self.layout, self.data, self.copied = layout, data, copies
        self.grad = zeros(layout.size, "float32", "grad") if grad else None
        self.bf16 = zeros(layout.size * copies, "bfloat16", "bf16")
        self.twin = zeros(layout.twin_size * copies, "uint8", "twin")
        self.twin_scale = zeros(layout.scale_size * copies, "float32", "twin_scale")
        self.version = 0  # how often `data` has changed, as far as the host knows
        self._views: dict[tuple, DeviceArray] = {}
        self._padded: dict[tuple, DeviceArray] = {}
        self._phases: dict[str, Phases] = {}
        self._norms: WeightNorms | None = None

    def clone(self, stream: int = 0, grad: bool = False, copies: bool = True) -> DeviceParameters:
        """Another set of the same layout with the same numbers, its copies made where these have some and
        `copies` is true.
        """
        copies = copies and self.copied
        made = object.__new__(DeviceParameters)
        with device.ordered("clone", stream, (self.data,)) as handle:
            data = device.empty(self.data.shape, "float32", like=self.data, name="data")
            device.assign(data, self.data)
            made._make(self.layout, data, grad, copies)
            made.refresh(handle)
            for name in self._phases if copies else ():
                made.phases_of(name, handle)
        return made

    # ---- by name
    def _view(self, kind: str, flat: DeviceArray, name: str, start: int, shape) -> DeviceArray:
        found = self._views.get((kind, name))
        if found is None:
            size = int(np.prod(shape))
            part = device.operand(flat.owner[start : start + size], name)
            found = self._views[kind, name] = device.reshape(part, shape)
        return found

    def _parameter(self, kind: str, flat: DeviceArray, name: str) -> DeviceArray:
        self.layout.check(name)
        return self._view(kind, flat, name, self.layout.offsets[name], self.layout.shapes[name])

    def data_of(self, name: str) -> DeviceArray:
        """float32 view in the parameter's shape."""
        return self._parameter("data", self.data, name)

    def grad_of(self, name: str) -> DeviceArray:
        """float32 view of the gradient."""
        if self.grad is None:
            raise ValueError(f"grad_of: {name} has no gradient here; make the set with grad=True")
        return self._parameter("grad", self.grad, name)

    def bf16_of(self, name: str, channels: int | None = None, stream: int = 0,
                shape: tuple[int, ...] | None = None) -> DeviceArray:  # fmt: skip
        """bfloat16 view in the parameter's shape; or a copy whose last axis is padded with zeros to
        `channels`, for kernels that need strides of 16 bytes.

        `shape` is what is padded, where it is not the parameter's own: (O, kh * kw * C), say. The padded copy
        is made at the first request, on `stream`, and again by every `refresh` and step.
        """
        if channels is None:
            return self._parameter("bf16", self.bf16, name)
        self.layout.check(name)
        own = self.layout.shapes[name]
        shape = own if shape is None else tuple(shape)
        if math.prod(shape) != math.prod(own):
            raise ShapeError(f"bf16_of: {name} has shape {own}, which cannot be seen as {shape}; pass one of "
                             f"as many elements")  # fmt: skip
        if len(shape) < 2 or channels < shape[-1]:
            raise ShapeError(f"bf16_of: {name} has shape {shape}, which cannot be padded to {channels} "
                             f"channels; pass at least its own")  # fmt: skip
        key = name, shape, channels
        if key not in self._padded:
            with device.ordered("bf16_of", stream, (self.data,)) as handle:
                wide = (*shape[:-1], channels)
                self._padded[key] = device.full(wide, 0, "bfloat16", like=self.data, name=name)
                self._pad(key, handle)
        return self._padded[key]

    def _pad(self, key: tuple[str, tuple[int, ...], int], stream: int) -> None:
        name, shape, channels = key
        source, k = self.data_of(name), shape[-1]
        rows = source.size // max(k, 1)
        device.call("convert", source.address, 0, 1, rows, k, 0, k, 1, self._padded[key].address, 1, channels,
                    stream)  # fmt: skip

    def phases_of(self, name: str, stream: int = 0) -> Phases:
        """The weight of a convolution behind an upsampling, by phases, with its copies.

        Made at the first request, on `stream`, and again by every `refresh` and step, as padded copies are.
        """
        if name not in self._phases:
            weight = self.data_of(name)
            if len(weight.shape) != 4 or weight.shape[1:3] != (3, 3) or weight.shape[3] % 16:
                raise ShapeError(f"phases_of: {name} has shape {weight.shape}, but (O, 3, 3, C) is needed, C "
                                 f"a multiple of 16; convolve the upsampled pictures")  # fmt: skip
            o, _, _, c = weight.shape
            entries = [Entry(0, 4 * o, 4 * c, 0, 0)]
            with device.ordered("phases_of", stream, (self.data,)) as handle:
                tensors, units = cuda_optimizer.tensor_table(entries)
                self._phases[name] = Phases(
                    *(device.empty((16 * o * c,), dtype, like=self.data, name=name)
                      for dtype in ("float32", "bfloat16", "uint8")),
                    device.empty((4 * o,), "float32", like=self.data, name=name),
                    Table(device.from_host(tensors, self.data, "tensors"), units),
                )  # fmt: skip
                self._fill_phases(name, handle)
        return self._phases[name]

    def _fill_phases(self, name: str, stream: int) -> None:
        made = self._phases[name]
        cuda_conv.phase_weights(self.data_of(name), made.data, stream)
        cuda_optimizer.refresh(made.table, made.data, stream, bf16=made.bf16, twin=made.twin,
                               twin_scale=made.twin_scale)  # fmt: skip

    def nbytes(self) -> int:
        """Memory of the numbers, the gradients and all copies."""
        flat = self.data, self.grad, self.bf16, self.twin, self.twin_scale, *self._padded.values()
        return sum(x.nbytes for x in flat if x is not None) + self.phase_bytes()

    @property
    def norms(self) -> WeightNorms:
        """Norms of the weights of FP4 products, for certificates: made when asked for, and kept up to date
        by every `refresh` and step from then on.
        """
        if self._norms is None:
            self._norms = WeightNorms(self)
        return self._norms

    def phase_bytes(self) -> int:
        """Memory of all weights by phases with their copies."""
        return sum(x.nbytes for made in self._phases.values() for x in made[:4])

    def twin_of(self, name: str) -> tuple[DeviceArray, DeviceArray] | None:
        """(E4M3 bytes in the parameter's shape, decode scales (rows,)); None for a weight without a twin."""
        self.layout.check(name)
        place = self.layout.twins.get(name)
        if place is None:
            return None
        shape = self.layout.shapes[name]
        return (self._view("twin", self.twin, name, place[0], shape),
                self._view("scale", self.twin_scale, name, place[1], shape[:1]))  # fmt: skip

    def twins_like(self, name: str) -> tuple[DeviceArray, DeviceArray, int]:
        """All twins whose rows are as long as those of `name`, as one matrix: E4M3 bytes (rows, k), decode
        scales (rows,), and the row at which `name` begins.
        """
        k = self.layout.row_length(name)
        twin, scale, rows = self.layout.alike[k]
        return (self._view("twins", self.twin, f"twins of {k}", twin, (rows, k)),
                self._view("scales", self.twin_scale, f"scales of twins of {k}", scale, (rows,)),
                self.layout.twins[name][1] - scale)  # fmt: skip

    # ---- kernels
    def refresh(self, stream: int = 0, table: Table | None = None) -> None:
        """Make the copies anew from `data`; table: of what has changed (`Layout.table_of`), None: all."""
        if copies := self.copies():
            cuda_optimizer.refresh(table or self.layout.table, self.data, stream, **copies)
        self.refresh_padded(stream)

    def refresh_padded(self, stream: int = 0) -> None:
        """Make the padded copies, the weights by phases and `norms` anew from `data`; the others come from
        the optimizer's pass.
        """
        self.version += 1
        for key in self._padded:
            self._pad(key, stream)
        for name in self._phases:
            self._fill_phases(name, stream)
        if self._norms is not None:
            self._norms.refresh(stream)

    def copies(self) -> dict[str, DeviceArray]:
        """The copies as arguments of `cuda_optimizer`; without those that are empty."""
        found = {"bf16": self.bf16, "twin": self.twin, "twin_scale": self.twin_scale}
        return {name: x for name, x in found.items() if x.size}

    # ---- host
    def to_host(self) -> dict[str, np.ndarray]:
        """The parameters by name, NumPy; waits for the device."""
        return self.layout.views(device.to_host(self.data))

    def from_host(self, state: Mapping[str, Any], stream: int = 0) -> None:
        """Take over parameters by name and make the copies; `ShapeError` where they do not fit, and then
        nothing is written.
        """
        flat = self.layout.pack(state)
        with device.ordered("from_host", stream, (self.data,)) as handle:
            device.assign(self.data, device.from_host(flat, like=self.data))
            self.refresh(handle)

    def state(self, flat: DeviceArray) -> dict[str, np.ndarray]:
        """Another flat array of this layout (a moment, an average) by name, for a checkpoint."""
        if isinstance(flat, DeviceParameters):
            raise TypeError("state: flat is a DeviceParameters, but one flat array is needed; pass its data")
        found = device.operand(flat, "flat")
        if found.shape != self.data.shape:
            raise ShapeError(f"state: flat has shape {found.shape}, but this layout has {self.data.shape}; "
                             f"pass an array of it")  # fmt: skip
        return self.layout.views(device.to_host(found))
