"""Launch plans: what a product did for operands of some shapes, done again for others of the same shapes.

The first call with given shapes, strides and dtypes goes the long way and leaves a tape of its launches and
of the memory it made. The next one allocates the same, writes the new addresses into the old arguments and
launches: microseconds in place of checks. Plans belong to a thread, because the arguments are changed in
place. Operands that a framework's own functions had to convert leave no plan.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from .. import device
from ..adapters import contiguous_strides
from ..device import DeviceArray
from ..errors import CudaError
from . import cuda

_MOST = 512  # plans a thread keeps
_ALIGNMENT, _APART = 16, 256  # of every address in a plan; of temporary arrays from one another
_local = threading.local()


# ---- recording ---------------------------------------------------------------------------------------------
class Tape:
    """What one call launched and allocated; `whole` until something happens that is not on it."""

    def __init__(self):
        self.launches: list[tuple[str, tuple]] = []
        self.made: list[DeviceArray] = []
        self.whole = True

    def __enter__(self) -> Tape:
        _local.tape = self
        return self

    def __exit__(self, *error: Any) -> None:
        _local.tape = None


def _tape() -> Tape | None:
    return getattr(_local, "tape", None)


def empty(shape: Sequence[int], dtype: str, like: DeviceArray) -> DeviceArray:
    """`device.empty`, on the tape."""
    made = device.empty(shape, dtype, like=like)
    if (tape := _tape()) is not None:
        tape.made.append(made)
    return made


def call(name: str, *arguments: Any) -> None:
    """`device.call`, on the tape."""
    device.call(name, *arguments)
    if (tape := _tape()) is not None:
        tape.launches.append((name, arguments))


def left_to_framework(x: DeviceArray) -> DeviceArray:
    """`x`, which a function of the framework has made: not on the tape."""
    if (tape := _tape()) is not None:
        tape.whole = False
    return x


# ---- signatures --------------------------------------------------------------------------------------------
def _torch(x: Any) -> tuple[tuple, int]:
    return (x.shape, x.stride(), x.dtype, x.get_device(), x.is_neg()), x.data_ptr()


def _cupy(x: Any) -> tuple[tuple, int]:
    memory = x.data
    return (x.shape, x.strides, x.dtype, memory.device_id), memory.ptr


def _any(x: Any) -> tuple[tuple, int]:
    x = device.operand(x, "x")
    return (x.shape, x.strides, x.dtype, x.device), x.address


SIGNATURES: dict[str, Callable[[Any], tuple[tuple, int]]] = {"torch": _torch, "cupy": _cupy}


class Plans:
    """The plans of one thread for the arrays of one framework."""

    def __init__(self, framework: str):
        self.known: dict[tuple, Plan] = {}
        self.signature = SIGNATURES.get(framework, _any)


def plans(framework: str) -> Plans:
    try:
        return _local.plans[framework]
    except AttributeError:
        _local.plans = {}
    except KeyError:
        pass
    return _local.plans.setdefault(framework, Plans(framework))


# ---- plans -------------------------------------------------------------------------------------------------
class _Launch:
    """One launch: which of the arguments, or words of its struct, are addresses, and of what."""

    def __init__(self, name: str, arguments: tuple, find: Callable[[int], tuple[int, int] | None]):
        library = cuda.load()
        self.ffi, self.stream = library.ffi, None
        self.function, kinds = device._function(library, name)
        self.words, self.struct, patches = None, len(arguments) == 2, []
        if self.struct:
            self.args = arguments[0]
            buffer = self.ffi.buffer(self.args)
            self.words = memoryview(buffer).cast("B").cast("Q")
            fields = self.ffi.typeof(self.args).item.fields
            places = [f.offset // 8 for _, f in fields if f.type.kind == "pointer"]
            values = [(at, self.words[at]) for at in places]
        else:
            cast, self.kinds = self.ffi.cast, kinds
            self.args = [a if k is None else cast(k, a) for k, a in zip(kinds, arguments, strict=True)]
            values = [(i, a) for i, (k, a) in enumerate(zip(kinds[:-1], arguments[:-1], strict=True)) if k]
        for at, address in values:
            if address:
                patches.append((at, find(address)))
        self.patches = patches
        self.complete = all(found is not None for _, found in patches)
        self.patches = [(at, *found) for at, found in patches if found is not None]

    def run(self, addresses: list[int], stream: Any) -> int:
        if self.struct:
            words = self.words
            for at, source, offset in self.patches:
                words[at] = addresses[source] + offset
            return self.function(self.args, stream)
        args = self.args
        for at, source, offset in self.patches:
            args[at] = self.ffi.cast(self.kinds[at], addresses[source] + offset)
        args[-1] = stream
        return self.function(*args)


def _maker(framework: Any, shape: tuple[int, ...], dtype: str, like: Any) -> Callable[[], Any]:
    """A function that makes such an array; of PyTorch's functions the one that is called fastest."""
    if framework.name == "torch":
        strides, kind = contiguous_strides(shape), framework.dtypes[dtype]
        return partial(framework.torch.empty_strided, shape, strides, dtype=kind, device=like.owner.device)
    return lambda: framework.empty(shape, dtype, like)


class Plan:
    """The launches of one call, its temporary memory, and where its operands may not meet its result."""

    def __init__(self, tape: Tape, inputs: list[DeviceArray], result: DeviceArray, given: bool):
        self.given, self.shape, self.dtype, self.device = given, result.shape, result.dtype, result.device
        place = SimpleNamespace(device=getattr(result.owner, "device", None))  # not the array: it is let go
        self.like = SimpleNamespace(owner=place, device=result.device)
        made = [x for x in tape.made if x is not result]
        self.offsets, self.size = [], 0  # all temporary memory is one array: an allocation costs 2 us
        for x in made:
            self.offsets.append(self.size)
            self.size += -(-x.nbytes // _APART) * _APART
        sources = [*inputs, result, *made]
        spans = [x.span() for x in sources]

        bases = [x.address for x in sources]

        def find(address: int) -> tuple[int, int] | None:
            if address in bases:  # equal ones are equal in every call of this plan: the key says which are
                return bases.index(address), 0
            within = [i for i, (low, high) in enumerate(spans) if low <= address < high]
            return (within[0], address - bases[within[0]]) if len(within) == 1 else None

        self.launches = [_Launch(name, arguments, find) for name, arguments in tape.launches]
        pairs = zip(sources, spans, strict=True)
        self.spans = [(low - x.address, high - x.address) for x, (low, high) in pairs]
        aligned = all(x % _ALIGNMENT == 0 and x for x in bases)
        self.usable = tape.whole and aligned and all(x.complete for x in self.launches)
        self.streams: dict[int, Any] = {}
        self.last: tuple[int, ...] | None = None  # addresses that were found to be aligned and apart
        framework = device._FRAMEWORKS[result.framework]
        self.make_result = _maker(framework, self.shape, self.dtype, self.like)
        self.make_temporary = _maker(framework, (self.size,), "uint8", self.like)

    def run(self, addresses: list[int], out: Any, framework: Any, stream: int) -> Any:
        """The result; None where the long way is needed after all. `addresses`: of the inputs."""
        if self.given:
            address = framework.address(out)
            state = (*addresses, address)
        else:
            state = tuple(addresses)
        if state != self.last:  # else these very addresses were looked at before
            bits = 0
            for at in state:
                bits |= at
            if 0 in state or bits % _ALIGNMENT or (self.given and self._meets(address, addresses)):
                return None
            self.last = state
        if not self.given:
            out = self.make_result()
            address = framework.address(out)
        addresses.append(address)
        if self.size:
            held = self.make_temporary()
            start = framework.address(held)
            addresses += [start + offset for offset in self.offsets]
        handle = self.streams.get(stream)
        if handle is None:
            handle = self.streams[stream] = cuda.load().ffi.cast("void*", stream)
        for launch in self.launches:
            status = launch.run(addresses, handle)
            if status:
                library = cuda.load()
                text = library.ffi.string(library.lib.fp4bf16_last_error()).decode()
                raise cuda._ERRORS.get(status, CudaError)(text)
        return out

    def _meets(self, address: int, addresses: list[int]) -> bool:
        """Whether the result overlaps an input: the long way says which."""
        spans = self.spans
        low, high = spans[len(addresses)]
        low, high = low + address, high + address
        for (start, stop), at in zip(spans, addresses, strict=False):
            if start + at < high and low < stop + at:
                return True
        return False


def keep(found: Plans, key: tuple, plan: Plan) -> None:
    if plan.usable:
        if len(found.known) >= _MOST:
            found.known.clear()
        found.known[key] = plan
