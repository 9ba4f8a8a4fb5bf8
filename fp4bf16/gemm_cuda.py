"""Products of device arrays: which operands multiply on which track, their shapes, epilogue and result.

Nothing synchronises, allocates outside the framework's allocator or is read back (but for ``certify=``), so a
call can be captured in a CUDA graph. Plain operands that are quantised here propagate NaN.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from . import device
from .backends import cuda_gemm as kernels
from .backends import cuda_math
from .backends import cuda_tape as tape
from .backends.cuda_gemm import EXPANDING, Finish, Matrices
from .backends.cuda_tape import left_to_framework
from .device import DeviceArray
from .dual import DualWeight
from .errors import ShapeError, nearest
from .formats import Format, QuantizedArray
from .operands import Arg, as_arg, check_plain, memory_of, places
from .tracks import resolve_track

# ---- operands ----------------------------------------------------------------------------------------------


def float32(x: DeviceArray) -> DeviceArray:
    """float64 rounded to float32 by the framework; other dtypes as they are."""
    return left_to_framework(device.astype(x, "float32")) if x.dtype == "float64" else x


def contiguous(x: DeviceArray) -> DeviceArray:
    new = device.contiguous(x)
    return x if new is x else left_to_framework(new)


def _plain(x: DeviceArray, right: bool) -> Matrices:
    return (kernels.right if right else kernels.left)(float32(x))


def _part(q: QuantizedArray, name: str) -> DeviceArray | None:
    part = getattr(q, name)
    return None if part is None else contiguous(device.operand(part, name))


def outer_of(q: QuantizedArray) -> DeviceArray | None:
    """The outer scale where it lies; float32, as the kernels read it."""
    if q.outer_scale is None:
        return None
    outer = device.operand(q.outer_scale, "outer_scale")
    return outer if outer.dtype == "float32" else left_to_framework(device.astype(outer, "float32"))


def expanded(q: QuantizedArray) -> DeviceArray:
    """E4M3 bytes in the stored layout, rows 16-byte aligned, kept on `q` for the next call."""
    if q.format.name != "fp8":
        return device.operand(q.expanded, "expanded")
    if q._expanded is None or q._expanded is q.packed:  # padded where TMA could not read them
        packed = _part(q, "packed")
        if q.k % kernels.ALIGNMENT or packed.address % kernels.ALIGNMENT:
            padded = device.full((*q.lead, kernels.round_up(q.k, 16)), 0, "uint8", like=packed)
            view = cuda_math.part(padded, ..., slice(0, q.k))
            device.assign(view, packed)
            packed = left_to_framework(view)
        q._expanded = packed.owner
    return device.operand(q._expanded, "expanded")


def expand_once(q: Any, track: str | None) -> None:
    """The expanded bytes of a prepared operand, before views of it are made: each would make its own."""
    if type(q) is not QuantizedArray or q.format.name not in EXPANDING:
        return
    if q._expanded is not None and q._expanded is not q.packed:
        return
    if device.is_device(q.packed) and resolve_track(track, "fp4") in ("fp4", "dual"):
        with device.ordered("expand", None, [device.operand(q.packed, "packed")]):
            expanded(q)


def _logical(q: QuantizedArray, array: DeviceArray, strides, k: int, outer, right: bool) -> Matrices:
    """The stored `array` of `q` as matrices in the order of q's logical axes."""
    if q.ndim == 1:
        return Matrices(array, (), (), 1, kernels.round_up(k, 16), k, 1, outer, (), 0)
    row = q.ndim - (1 if right else 2)
    lead = range(q.ndim - 2)
    over = (0,) * q.ndim
    if outer is not None:
        over = _outer_steps(q, outer)
        if over[row] not in (0, 1):  # the kernel's scales lie beside one another
            outer = device.permute(device.broadcast(outer, (*q.lead, 1)), q.order)
            outer = contiguous(outer)
            over = outer.strides
    steps = [strides[position] for position in q.order]
    shape = q.shape
    return Matrices(
        array, tuple(shape[i] for i in lead), tuple(steps[i] for i in lead), shape[row], steps[row], k,
        steps[q.axis], outer, tuple(over[i] for i in lead), over[row],
    )  # fmt: skip


def _outer_steps(q: QuantizedArray, outer: DeviceArray) -> tuple[int, ...]:
    """Steps of the outer scale along the logical axes, 0 where it does not vary."""
    return tuple(outer.strides[p] if outer.shape[p] > 1 else 0 for p in q.order)


def decoded_rows(q: QuantizedArray, dtype: str, scaled: bool, stream: int):
    """(decoded rows of q, strides of the stored axes); with the outer scale if `scaled`."""
    packed, block = _part(q, "packed"), _part(q, "block_scale")
    outer = outer_of(q) if scaled else None
    outer = None if outer is None else contiguous(outer)
    mid, inner = 1, max(1, q.rows)
    if outer is not None:
        varies = [n > 1 for n in outer.shape[:-1]]
        first = varies.index(True) if True in varies else 0
        if outer.size == 1:
            mid, inner = max(1, q.rows), 1
        elif not all(v or n == 1 for v, n in zip(varies, q.lead, strict=True)):
            if varies == [True] + [False] * (len(varies) - 1):  # one an index of the first axis
                mid, inner = math.prod(q.lead[first + 1 :]), 1
            else:
                outer = contiguous(device.broadcast(outer, (*q.lead, 1)))
    rows = kernels.decoded(q.format, packed, block, outer, q.rows, q.k, dtype, stream, mid, inner)
    width = rows.shape[1]
    steps = tuple(math.prod(q.lead[i + 1 :]) * width for i in range(q.ndim - 1))
    return rows, (*steps, 1)


def _prepared(q: QuantizedArray, right: bool, exact: bool, stream: int) -> Matrices:
    """A quantised operand of the FP4 track: E4M3 bytes if `exact`, else BF16, outer scales apart."""
    outer = outer_of(q)
    if exact:
        array = expanded(q)
        return _logical(q, array, array.strides, kernels.round_up(q.k, 16), outer, right)
    array, strides = decoded_rows(q, "bfloat16", False, stream)
    return _logical(q, array, strides, q.k, outer, right)


def dense(q: QuantizedArray, right: bool, stream: int) -> Matrices:
    """A quantised operand decoded to BF16 with its outer scale, blocked along any axis."""
    array, strides = decoded_rows(q, "bfloat16", True, stream)
    if q.ndim == 1:
        return _logical(q, array, strides, q.k, None, right)
    steps = [strides[p] for p in q.order]
    x = Matrices(array, q.shape[:-2], tuple(steps[:-2]), q.shape[-2], steps[-2], q.shape[-1], steps[-1])
    return x.T if right else x


def bf16_side(arg: Arg, right: bool, stream: int) -> Matrices:
    """An operand of the BF16 track: rounded, or decoded with its outer scale."""
    x = _plain(arg.array, right) if arg.array is not None else dense(arg.value, right, stream)
    return kernels.bf16(x, stream)


def decoded_side(q: QuantizedArray, right: bool, stream: int) -> Matrices:
    """A quantised operand decoded to BF16; one outer scale for all of it stays apart, as `scale`."""
    outer = outer_of(q)
    if outer is None or outer.size != 1 or q.format.name != "nvfp4":
        return dense(q, right, stream)
    array, strides = decoded_rows(q, "bfloat16", False, stream)
    return _logical(q, array, strides, q.k, outer, right)


def fp4_sides(a: Arg, b: Arg, fmt: Format, stream: int, **branch) -> tuple[Matrices, Matrices]:
    """The operands of the FP4 track: E4M3 bytes where both formats expand, else BF16, outer scales apart.

    `branch`: what the quantiser of a plain `a` makes besides.
    """
    formats = [fmt if x.array is not None else x.value.format for x in (a, b)]
    exact = all(f.name in EXPANDING for f in formats)
    sides = []
    for arg, right in ((a, False), (b, True)):
        if arg.array is None:
            sides.append(_prepared(arg.value, right, exact, stream))
        else:
            search, extra = ("full", {}) if right else ("fast", branch)
            x = _plain(arg.array, right)
            kind = "expanded" if exact else "codes"
            sides.append(kernels.quantized(x, fmt, search, stream, kind, **extra))
    return tuple(sides)


# ---- the product of matrices -------------------------------------------------------------------------------
def result_matrices(x: DeviceArray, row: bool, column: bool) -> Matrices:
    """An array (..., M, N) as matrices of M rows and `k` = N; `row`, `column`: whether it has those axes."""
    shape, steps = x.shape, x.strides
    if not column:
        shape, steps = (*shape, 1), (*steps, 1)
    if not row:
        shape, steps = (*shape[:-1], 1, shape[-1]), (*steps[:-1], max(1, shape[-1]), steps[-1])
    return Matrices(x, shape[:-2], steps[:-2], shape[-2], steps[-2], shape[-1], steps[-1])


def _storable(x: Matrices) -> bool:
    """Whether the epilogue can read or write `x` where it lies."""
    if x.array.dtype not in kernels.DTYPES or (x.k_stride != 1 and x.k > 1) or min(x.steps, default=0) < 0:
        return False
    return x.rows <= 1 or x.row_stride >= x.k


def writable(d: DeviceArray, row: bool, column: bool) -> Matrices:
    """What the kernel writes: `d`, or new memory that is to be copied to it."""
    x = result_matrices(d, row, column)
    if _storable(x):
        return x
    dtype = "float32" if d.dtype == "float64" else d.dtype
    return result_matrices(kernels.empty(d.shape, dtype, like=d), row, column)


def multiply(d: Matrices, stream: int, four=None, sixteen=None, finish: Finish | None = None) -> None:
    """d = the product of the pairs `four` and `sixteen`; a batch that shares B becomes the rows of one A."""
    finish = finish or Finish()
    pairs = [p for p in (four, sixteen) if p is not None]
    if all(b.count == 1 for _, b in pairs):
        parts = [d, *(a for a, _ in pairs)] + ([] if finish.residual is None else [finish.residual])
        flat = [kernels.folded(x) for x in parts]
        if all(x is not None for x in flat):
            d, rest = flat[0], flat[1:]
            pairs = [(rest.pop(0), kernels.folded(b)) for _, b in pairs]
            four = pairs.pop(0) if four is not None else None
            sixteen = pairs.pop(0) if sixteen is not None else None
            finish = replace(finish, residual=rest[0] if rest else None)
    kernels.product(d, stream, four, sixteen, finish)


def dual_sides(a: Arg, w: Any, fmt: Format, stream: int, **fields):
    """(FP4 operands, BF16 operands of the branch or None, T = bf16(a @ down) with the outlier columns or
    None); one kernel makes all that depends on a BF16 `a`. `fields`: more results of that quantiser."""
    twin, branch = as_arg(w.twin, "b"), w.branch
    if branch.rank + branch.outliers == 0:
        return fp4_sides(a, twin, fmt, stream, **fields), None, None
    if branch.outliers and a.array is None:
        raise TypeError(
            f"a DualWeight with outlier rows needs {a.name} as a plain array, because its outlier "
            f"columns are taken out before it is quantised; pass {a.name} unquantised"
        )
    rows, width = math.prod(a.shape[:-1]), branch.up_t.shape[1]
    hidden = kernels.empty((rows, width), "bfloat16", like=branch.up_t)
    inside = branch.outliers > 0 or quantiser_multiplies(a, branch.rank)
    if inside:
        fields |= branch.fields() | {"hidden": hidden.address, "hidden_stride": width}
    four = fp4_sides(a, twin, fmt, stream, **fields)
    if not inside:
        hidden_product(a, branch, hidden, stream)
    left = four[0]
    each = tuple(math.prod(left.lead[i + 1 :]) * left.rows for i in range(len(left.lead)))
    x = replace(left, array=hidden, steps=tuple(n * width for n in each), row_stride=width,
                k=branch.rank + branch.outliers, k_stride=1, scale=None)  # fmt: skip
    return four, (x, branch.up), hidden


def quantiser_multiplies(a: Arg, rank: int) -> bool:
    """Whether the quantiser of `a` makes T on the tensor cores; else a product of its own is faster."""
    if a.array is None or a.array.dtype != "bfloat16" or rank > 128:
        return False
    k, (least, most) = a.shape[-1], (512, 8192) if rank <= 64 else (256, 4096)
    if not least < k <= most:  # what a cluster of 2 to 16 thread blocks holds of D
        return False
    x = kernels.left(a.array)
    return x.k_stride == 1 and kernels.readable(x)


def hidden_product(a: Arg, branch: Any, hidden: DeviceArray, stream: int) -> None:
    """hidden[:, :rank] = bf16(a @ down) of an `a` whose quantiser does not make it."""
    x = kernels.folded(bf16_side(a, False, stream))
    if x is None:
        x = kernels.folded(kernels.copied(bf16_side(a, False, stream), "bfloat16", stream))
    d = Matrices(hidden, (), (), x.rows, hidden.shape[1], branch.rank, 1)
    kernels.product(d, stream, sixteen=(x, branch.down))


def fp4_product(four, sixteen, d: Matrices, stream: int, finish: Finish) -> None:
    """E4M3 operands: one kernel. BF16 ones carry scales that the branch must not get, so that it is added by
    a second product, and the epilogue by the framework."""
    if four[0].array.dtype == "uint8":
        return multiply(d, stream, four, sixteen, finish)
    if sixteen is None:
        return multiply(d, stream, None, four, finish)
    bulk, y = (_like(d, "float32") for _ in range(2))
    multiply(bulk, stream, None, four)
    multiply(y, stream, None, sixteen, Finish(residual=bulk))
    shape = (*d.lead, d.rows, d.k)
    residual = None
    if finish.residual is not None:
        residual = cuda_math.reshaped(finish.residual.array, shape)
    y = cuda_math.epilogue(cuda_math.reshaped(y.array, shape), finish.bias, finish.activation, residual)
    y = left_to_framework(device.astype(y, d.array.dtype))
    device.assign(cuda_math.reshaped(d.array, shape), y)


def _like(d: Matrices, dtype: str) -> Matrices:
    """New memory for the matrices d, contiguous."""
    return kernels.left(kernels.empty((*d.lead, d.rows, d.k), dtype, like=d.array))


# ---- the call ----------------------------------------------------------------------------------------------
def _epilogue(op: str, shape, bias: Any, activation: str | None, residual: Any) -> list[Arg]:
    """The checked operands of the epilogue."""
    known = [name for name in kernels.ACTIVATIONS if name]
    if activation is not None and activation not in known:
        raise ValueError(f"{op}: activation: {activation!r} is not an activation{nearest(activation, known)}")
    columns = shape[-1] if shape else 1
    args = [as_arg(x, name) for x, name in ((bias, "bias"), (residual, "residual")) if x is not None]
    for arg in args:
        want = (columns,) if arg.name == "bias" else shape
        check_plain(op, arg)
        if arg.shape != want:
            raise ShapeError(f"{op}: {arg.name} has shape {arg.shape} but must be {want}, "
                             f"{'one number a column of' if arg.name == 'bias' else 'the shape of'} "
                             f"the result; broadcast it to that shape first")  # fmt: skip
    return args


class Call:
    """One checked product: operands, result and epilogue."""

    def __init__(self, op, a: Arg, b: Arg, used: Arg, shape, dtype, bias, activation, residual, out):
        self.op, self.a, self.b, self.out = op, a, used, out
        added = _epilogue(op, shape, bias, activation, residual)
        device.check_together(op, places(a, b, *added))
        inputs = [*memory_of(a, b), *memory_of(*added)]
        like = replace(a.place, name=a.name)
        self.d = device.out_operand(op, out, shape, dtype, like, inputs)
        self.full = len(a.shape) > 1, len(b.shape) > 1
        named = {arg.name: arg.array for arg in added}
        self.bias, self.residual, self.activation = named.get("bias"), named.get("residual"), activation

    def finish(self, accumulate: str) -> Finish:
        bias, residual = self.bias, self.residual
        if bias is not None:
            bias = contiguous(float32(bias))
        if residual is not None:
            found = result_matrices(float32(residual), *self.full)
            if not _storable(found):
                found = result_matrices(contiguous(found.array), *self.full)
            residual = found
        return Finish(bias, self.activation, residual, 1.0, accumulate)

    def store(self, target: DeviceArray) -> Any:
        if target is not self.d:
            device.assign(self.d, left_to_framework(target))
        return self.d.owner if self.out is None else self.out


def matmul(op, a, b, weight, track, fmt, shape, dtype, epilogue, certify, out, stream, accumulate, threshold):
    """The product of checked operands; `b` is what `track` multiplies, `weight` the caller's operand."""
    whole = b if b.value is weight else as_arg(weight, b.name)
    with device.ordered(op, stream, [a.place, b.place]) as handle:
        call = Call(op, a, whole, b, shape, dtype, *epilogue, out)
        if certify or threshold is not None:
            from . import certified_cuda, threshold_cuda

            if threshold is not None:
                return threshold_cuda.gemm(call, weight, track, fmt, handle, accumulate, threshold, certify)
            return certified_cuda.certified_product(call, weight, track, fmt, handle, accumulate, certify)
        if track == "reference":
            return call.store(_reference(call, handle))
        target, finish = writable(call.d, *call.full), call.finish(accumulate)
        if track == "bf16":
            pair = bf16_side(a, False, handle), bf16_side(b, True, handle)
            multiply(target, handle, None, pair, finish)
        elif track == "dual":
            four, sixteen, _ = dual_sides(a, weight, fmt, handle)
            fp4_product(four, sixteen, target, handle, finish)
        else:
            fp4_product(fp4_sides(a, b, fmt, handle), None, target, handle, finish)
        return call.store(target.array)


def exact(arg: Arg, dtype: str, stream: int) -> DeviceArray:
    """An operand of the "reference" track."""
    if arg.array is not None:
        return device.astype(arg.array, dtype)
    q = arg.value
    rows, _ = decoded_rows(q, "float32", True, stream)
    stored = cuda_math.reshaped(cuda_math.part(rows, slice(None), slice(0, q.k)), q.stored_shape)
    return device.astype(device.permute(stored, q.order), dtype)


def _reference(call: Call, stream: int) -> DeviceArray:
    dtype = "float64" if any(x.dtype == "float64" for x in (call.a, call.b)) else "float32"
    y = cuda_math.matmul(exact(call.a, dtype, stream), exact(call.b, dtype, stream))
    y = cuda_math.epilogue(y, call.bias, call.activation, call.residual)
    return left_to_framework(device.astype(cuda_math.reshaped(y, call.d.shape), call.d.dtype))


# ---- plans -------------------------------------------------------------------------------------------------
def _parts(x: Any) -> list[Any]:
    """The framework's arrays of an operand, those that it does not have left out."""
    if type(x) is QuantizedArray:
        parts = [p for p in (x.packed, x.block_scale, x.outer_scale) if p is not None]
        return parts if x._expanded is None or x._expanded is x.packed else [*parts, x._expanded]
    if type(x) is DualWeight:
        branch = x.branch
        factors = [p.owner for p in (branch.down_t, branch.up_t, branch.index32) if p is not None]
        return [x.master, *_parts(x.twin), *factors]
    return [x]


class _Known:
    """Signature and arrays of a container, kept in its `__dict__` as long as these are the same objects."""

    __slots__ = ("witness", "key", "parts")

    def __init__(self, x: Any, witness: tuple, signature: Callable):
        self.witness, self.parts = witness, _parts(x)
        q = x.twin if type(x) is DualWeight else x
        own = (x.rank, x.branch.outliers) if q is not x else q.order
        expansion = q._expanded is None, q._expanded is q.packed  # which decide what `parts` are
        key = q.shape, own, q.format.name, expansion, *(signature(p)[0] for p in self.parts)
        if len(_NUMBERS) >= _MOST:
            _NUMBERS.clear()  # numbers are never given again: at worst a plan is made twice
        self.key = _NUMBERS.setdefault(key, next(_next))

    def __reduce__(self):
        return type(None), ()  # addresses and the like are not for copies


_NUMBERS: dict[tuple, int] = {}
_MOST = 4096  # signatures that are remembered
_next = itertools.count()


def _known(x: QuantizedArray | DualWeight, signature: Callable) -> _Known:
    if type(x) is DualWeight:
        q = x.twin
        witness = x.master, q, x._branch, q.packed, q.block_scale, q.outer_scale, q._expanded
    else:
        witness = x.packed, x.block_scale, x.outer_scale, x._expanded, x.shape, x.order, None
    known = x.__dict__.get("_known")
    if known is not None:
        a, b, c, d, e, f, g = known.witness
        h, i, j, k, m, n, o = witness
        if a is h and b is i and c is j and d is k and e is m and f is n and g is o:
            return known
    known = x.__dict__["_known"] = _Known(x, witness, signature)
    return known


def planned(op: str, operands: tuple, out: Any, options: tuple, long: Callable[[], Any]) -> Any:
    """What `long` gives, by the plan of an earlier call with such operands if there is one.

    `options` is all else that the result depends on. Only for the framework's current stream.
    """
    try:
        first = operands[0]
        array = first.packed if type(first) is QuantizedArray else first
        framework = device._KINDS[type(array)]
        if not framework.on_device(array):
            raise TypeError("nothing is planned on the host")
        found = tape.plans(framework.name)
        address, signature = framework.address, found.signature
        key, addresses = [op, resolve_track(options[0], ""), options], []
        for x in operands:
            if x is None:
                key.append(None)
            elif type(x) is QuantizedArray or type(x) is DualWeight:
                known = _known(x, signature)
                key.append(known.key)
                for part in known.parts:
                    addresses.append(address(part))
            else:
                known, at = signature(x)
                key.append(known)
                addresses.append(at)
        if len({*addresses}) < len(addresses):  # which operands are the same memory
            key.append(tuple(map(addresses.index, addresses)))
        key.append(None if out is None else signature(out)[0])
        key = tuple(key)
        plan = found.known.get(key)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        key = None
    if key is None:  # here, so that what `long` says of wrong operands has no other error in front
        return long()
    if plan is None:
        return _planning(found, key, operands, out, long)
    if framework.current_device() == plan.device:
        result = plan.run(addresses, out, framework, framework.current_stream(plan.device))
        if result is not None:
            return result
    return long()


def _planning(found: tape.Plans, key: tuple, operands: tuple, out: Any, long: Callable[[], Any]) -> Any:
    """What `long` gives, leaving a plan."""
    try:
        arrays = [device.operand(p, "operand") for x in operands if x is not None for p in _parts(x)]
    except TypeError:
        return long()  # which says what is wrong
    with tape.Tape() as recorded:
        result = long()
    if recorded.whole and recorded.launches:
        given = out is not None
        plan = tape.Plan(recorded, arrays, device.operand(out if given else result, "result"), given)
        tape.keep(found, key, plan)
    return result
