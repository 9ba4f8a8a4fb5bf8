"""Matrix products on a GPU: each operand as the kernels take it, the arguments, the launch.

Both operands are seen as matrices (\\*lead, rows, k), k being the contraction: `a` as it is, `b` with its
last two axes swapped. The kernels read BF16 with either axis contiguous and E4M3 bytes with k contiguous, at
addresses and strides of 16 bytes, because that is what TMA reads. What is anything else (float32, float16,
misaligned, strides that are negative, zero or odd) is copied first, by `fp4bf16_convert` into memory of the
framework's allocator. Everything is ordered on the stream and nothing is read back.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ..device import DeviceArray
from ..errors import ShapeError
from ..formats import Format
from . import cuda
from .cuda_tape import call, empty

DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
FORMATS = {"nvfp4_exact": 0, "nvfp4": 1, "mxfp4": 2, "fp8": 3}
ACTIVATIONS = {None: 0, "silu": 1, "gelu": 2}
ACCUMULATE = {"promoted": 0, "fast": 1}
#: Formats whose values are E4M3 numbers times the outer scale: the FP8 tensor cores multiply them exactly.
EXPANDING = ("nvfp4_exact", "fp8")
ALIGNMENT = 16  # bytes, of addresses and strides


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def condition(run_if: DeviceArray | None) -> int:
    """The address of a launch's condition, one int32 on the device; 0 for none."""
    if run_if is None:
        return 0
    if run_if.dtype != "int32" or run_if.size != 1:
        raise ShapeError(f"run_if has dtype {run_if.dtype} and shape {run_if.shape}, but one int32 is "
                         f"needed; pass the flag of a certificate")  # fmt: skip
    return run_if.address


# ---- operands ----------------------------------------------------------------------------------------------
@dataclass(slots=True)
class Matrices:
    """`array` seen as matrices (\\*lead, rows, k); steps and strides in elements.

    Attributes:
        steps: from matrix to matrix, one for each axis of `lead`.
        scale: float32, multiplies the rows, or None; `scale_steps` and `scale_stride` are its steps over the
            matrices and over the rows.
    """

    array: DeviceArray
    lead: tuple[int, ...]
    steps: tuple[int, ...]
    rows: int
    row_stride: int
    k: int
    k_stride: int
    scale: DeviceArray | None = None
    scale_steps: tuple[int, ...] = ()
    scale_stride: int = 0

    @property
    def count(self) -> int:
        return math.prod(self.lead)

    @property
    def T(self) -> Matrices:
        """Rows and contraction exchanged; without the scale, which would then run along the contraction."""
        return Matrices(self.array, self.lead, self.steps, self.k, self.k_stride, self.rows, self.row_stride)


def left(x: DeviceArray) -> Matrices:
    """x (..., M, K) or (K,) as matrices of M rows."""
    if len(x.shape) == 1:
        return Matrices(x, (), (), 1, x.shape[0], x.shape[0], x.strides[0])
    shape, steps = x.shape, x.strides
    return Matrices(x, shape[:-2], steps[:-2], shape[-2], steps[-2], shape[-1], steps[-1])


def right(x: DeviceArray) -> Matrices:
    """x (..., K, N) or (K,) as matrices of N rows."""
    if len(x.shape) == 1:
        return Matrices(x, (), (), 1, x.shape[0], x.shape[0], x.strides[0])
    return left(x).T


def uniform(shape: tuple[int, ...], steps: tuple[int, ...]) -> int | None:
    """The one step from each matrix to the next in C order; None where the steps differ."""
    step = reach = None
    for n, s in zip(reversed(shape), reversed(steps), strict=True):
        if n == 1:
            continue
        if step is None:
            step, reach = s, s * n
        elif s != reach:
            return None
        else:
            reach *= n
    return step or 0


def folded(x: Matrices) -> Matrices | None:
    """The matrices as one with all their rows, where the memory allows; None otherwise."""
    count = x.count
    if count == 1:
        return x if not x.lead else replace(x, lead=(), steps=(), scale_steps=())
    step = uniform(x.lead, x.steps)
    stride = step if x.rows == 1 else x.row_stride
    if step is None or step != x.rows * stride:
        return None
    scale_stride = 0
    if x.scale is not None:
        over = uniform(x.lead, x.scale_steps)
        scale_stride = over if x.rows == 1 else x.scale_stride
        if over is None or over != x.rows * scale_stride or scale_stride not in (0, 1):
            return None
    return replace(x, lead=(), steps=(), rows=count * x.rows, row_stride=stride, scale_steps=(),
                   scale_stride=scale_stride)  # fmt: skip


def _stored(x: Matrices) -> tuple[bool, int] | None:
    """(rows are the contiguous axis, stride of the other) if the kernels can read `x` as it lies."""
    unit = ALIGNMENT // x.array.itemsize
    if x.array.address % ALIGNMENT or any(
        s < 0 or s % unit for n, s in zip(x.lead, x.steps, strict=True) if n > 1
    ):
        return None
    if x.k_stride == 1 or x.k <= 1:
        stride = x.row_stride if x.rows > 1 else round_up(x.k, unit)
        if stride >= x.k and stride % unit == 0:
            return False, stride
    if unit == 8 and (x.row_stride == 1 or x.rows <= 1):
        stride = x.k_stride if x.k > 1 else round_up(x.rows, unit)
        if stride >= x.rows and stride % unit == 0:
            return True, stride
    return None


def readable(x: Matrices) -> bool:
    """Whether the kernels can read `x` as it lies."""
    return x.array.dtype in ("bfloat16", "uint8") and _stored(x) is not None


def bf16(x: Matrices, stream: int) -> Matrices:
    """`x` as BF16 matrices that the kernels can read: itself, or a copy rounded to nearest."""
    if x.array.dtype == "bfloat16" and _stored(x) is not None:
        return x
    return copied(x, "bfloat16", stream)


def copied(x: Matrices, dtype: str, stream: int) -> Matrices:
    """A copy of `dtype` with aligned strides; of the two inner axes the contiguous one stays it."""
    turned = x.row_stride == 1 and x.k_stride != 1 and x.rows > 1
    outer, inner = (x.k, x.rows) if turned else (x.rows, x.k)
    strides = (x.k_stride, x.row_stride) if turned else (x.row_stride, x.k_stride)
    width = round_up(inner, 8)
    new = empty((*x.lead, outer, width), dtype, like=x.array)
    if new.size:
        convert(x.array, x.array.address, x.lead, x.steps, outer, inner, *strides, new, new.address, stream)
    steps = tuple(math.prod(x.lead[i + 1 :]) * outer * width for i in range(len(x.lead)))
    inner_strides = (1, width) if turned else (width, 1)
    return replace(x, array=new, steps=steps, row_stride=inner_strides[0], k_stride=inner_strides[1])


def convert(x, address, lead, steps, rows, k, row_stride, k_stride, out, to, stream) -> None:
    """out (\\*lead, rows, k rounded up to 8) = x, one launch where the steps over `lead` are uniform."""
    step = uniform(lead, steps)
    if step is None:
        size = math.prod(lead[1:]) * rows * out.shape[-1] * out.itemsize
        for i in range(lead[0]):
            convert(x, address + i * steps[0] * x.itemsize, lead[1:], steps[1:], rows, k, row_stride,
                     k_stride, out, to + i * size, stream)  # fmt: skip
        return
    call("convert", address, DTYPES[x.dtype], math.prod(lead), rows, k, step, row_stride, k_stride,
                     to, DTYPES[out.dtype], out.shape[-1], stream)  # fmt: skip


# ---- argument structs --------------------------------------------------------------------------------------
_LETTERS = {"int64_t": "q", "int32_t": "i", "uint32_t": "I", "uint64_t": "Q", "float": "f", "double": "d"}


class Struct:
    """A C struct filled by field names in one go: cffi's assignment, field by field, costs several times as
    much as the kernel's launch. Array fields take a tuple."""

    def __init__(self, ffi: Any, name: str):
        self.ffi, self.kind = ffi, ffi.typeof(f"{name}*")
        fields = self.kind.item.fields
        self.offset = {field: f.offset for field, f in fields}
        letters, self.zero, self.arrays = [], {}, False
        for field, f in fields:
            kind, count = f.type, 1
            if kind.kind == "array":
                kind, count, self.arrays = kind.item, kind.length, True
            letter = {"pointer": "P", "enum": "I"}.get(kind.kind) or _LETTERS[kind.cname]
            letters.append(letter * count)
            self.zero[field] = (0,) * count if f.type.kind == "array" else 0
        self.packer = struct.Struct("@" + "".join(letters))

    def fill(self, values: dict[str, Any]) -> Any:
        """A new struct with these fields, the others zero."""
        args = self.ffi.new(self.kind)
        found = (self.zero | values).values()
        if self.arrays:
            found = [v for value in found for v in (value if type(value) is tuple else (value,))]
        self.ffi.buffer(args)[0 : self.packer.size] = self.packer.pack(*found)
        return args


@cache
def _struct(library: Any, name: str) -> Struct:
    return Struct(library.ffi, name)


def filled(name: str, values: dict[str, Any]) -> Any:
    library = cuda.load()
    made = _struct(library, name)
    if len(values.keys() - made.zero.keys()):
        raise KeyError(f"{name} has no fields {values.keys() - made.zero.keys()}")
    return made.fill(values)


# ---- the product -------------------------------------------------------------------------------------------
@dataclass(slots=True)
class Finish:
    """The epilogue of a product; `residual` as matrices with `k` columns. run_if: (1,) int32; nothing is done
    where it is 0 when the kernel starts.
    """

    bias: DeviceArray | None = None
    activation: str | None = None
    residual: Matrices | None = None
    alpha: float = 1.0
    accumulate: str = "promoted"
    run_if: DeviceArray | None = None


def _batch(lead: tuple[int, ...], steps: tuple[int, ...]) -> tuple[int, int, int] | None:
    """(div, mod, step): matrix z of `lead` in C order lies at z // div % mod * step; None where none do."""
    pairs = [(n, s) for n, s in zip(lead, steps, strict=True) if n != 1]
    div = mod = 1
    step = 0
    while pairs and pairs[-1][1] == 0:
        div *= pairs.pop()[0]
    while pairs and (step == 0 or pairs[-1][1] == step * mod):
        n, s = pairs.pop()
        step = step or s
        mod *= n
    return None if any(s for _, s in pairs) else (div, mod, step)


def _over(steps: tuple[int, ...], own: tuple[int, ...], lead: tuple[int, ...]) -> tuple[int, ...]:
    """Steps over the axes of `lead`, to which those of `own` are broadcast."""
    missing = len(lead) - len(own)
    return (0,) * missing + tuple(
        0 if n == 1 else s for n, s in zip(own, steps or (0,) * len(own), strict=True)
    )


class Product:
    """The arguments of one product, launched once or, where the batch is no two-level one, in a loop."""

    def __init__(self, d: Matrices, finish: Finish):
        self.lead, self.fields, self.parts = d.lead, {}, []
        self._put("d", d.array.address, d.array.itemsize, d.steps)
        self.fields |= {
            "m": d.rows, "n": d.k, "d_dtype": DTYPES[d.array.dtype], "d_stride": max(d.row_stride, d.k),
            "alpha": finish.alpha, "activation": ACTIVATIONS[finish.activation],
            "accumulate": ACCUMULATE[finish.accumulate],
            "run_if": condition(finish.run_if),
        }  # fmt: skip
        if finish.bias is not None:
            self.fields |= {"bias": finish.bias.address, "bias_dtype": DTYPES[finish.bias.dtype]}
        if (r := finish.residual) is not None:
            self._put("residual", r.array.address, r.array.itemsize, _over(r.steps, r.lead, d.lead))
            self.fields["residual_dtype"] = DTYPES[r.array.dtype]
            self.fields["residual_stride"] = max(r.row_stride, r.k)

    def _put(self, name: str, address: int, itemsize: int, steps: tuple[int, ...]) -> None:
        self.fields[name] = address
        self.parts.append((name, itemsize, steps))

    def track(self, bits: int, a: Matrices, b: Matrices) -> None:
        """The FP4 (8) or the BF16 (16) track of the product."""
        self.fields[f"k{bits}"] = a.k
        for side, x, major in (("a", a, "a16_m_major"), ("b", b, "b16_n_major")):
            turned, stride = _stored(x)
            self._put(f"{side}{bits}", x.array.address, x.array.itemsize, _over(x.steps, x.lead, self.lead))
            self.fields[f"{side}{bits}_stride"] = stride
            if bits == 16:
                self.fields[major] = int(turned)
            if x.scale is not None:
                name = "row_scale" if side == "a" else "col_scale"
                self._put(name, x.scale.address, 4, _over(x.scale_steps, x.lead, self.lead))
                self.fields[f"{name}_step"] = x.scale_stride

    def launch(self, stream: int, function: str = "gemm") -> None:
        self._launch(self.lead, self.fields, [steps for *_, steps in self.parts], stream, function)

    def _launch(self, lead, fields, steps, stream, function) -> None:
        batch = self._fit(lead, steps)
        if batch is None:
            for i in range(lead[0]):
                moved = dict(fields)
                for (name, itemsize, _), s in zip(self.parts, steps, strict=True):
                    moved[name] += i * s[0] * itemsize
                self._launch(lead[1:], moved, [s[1:] for s in steps], stream, function)
            return
        call(function, filled("fp4bf16_gemm_args", fields | batch), stream)

    def _fit(self, lead, steps) -> dict[str, int] | None:
        """The batch fields; None where the index of a matrix is no z // div % mod."""
        fields: dict[str, int] = {"batch_count": math.prod(lead)}
        for (name, _, _), s in zip(self.parts, steps, strict=True):
            side = {"a": "a", "b": "b", "row_scale": "a", "col_scale": "b"}.get(name.rstrip("0123456789"))
            if side is None:  # the residual and D have a matrix each z
                step = uniform(lead, s)
                if step is None:
                    return None
            else:
                found = _batch(lead, s)
                if found is None:
                    return None
                div, mod, step = found
                if step:
                    known = (
                        fields.setdefault(f"{side}_batch_div", div),
                        fields.setdefault(f"{side}_batch_mod", mod),
                    )
                    if known != (div, mod):
                        return None
            fields[f"{name}_batch_stride"] = step
        for side in "ab":
            fields.setdefault(f"{side}_batch_div", 1)
            fields.setdefault(f"{side}_batch_mod", 1)
        return fields


def product(d: Matrices, stream: int, four=None, sixteen=None, finish: Finish | None = None) -> None:
    """d (\\*lead, M, N) = the sum of the tracks `four` and `sixteen`, pairs (a, b), with the epilogue.

    With `four`, the scales of its operands belong to it alone and `sixteen` is in true units.
    """
    if d.rows == 0 or d.k == 0 or d.count == 0:
        return
    call = Product(d, finish or Finish())
    if sixteen is not None and sixteen[0].k:
        call.track(16, *sixteen)
    if four is not None and four[0].k:
        call.track(8, *four)
    call.launch(stream)


# ---- quantise, decode --------------------------------------------------------------------------------------
def quantizable(x: Matrices, stream: int) -> tuple[Matrices, dict[str, int]]:
    """(x or a copy of it, where its elements lie as the quantiser's arguments say it)."""
    for m in (x, None):
        m = copied(x, x.array.dtype, stream) if m is None else m
        step = uniform(m.lead, m.steps)
        flat = folded(replace(m, scale=None))
        if (m.k_stride == 1 or m.k <= 1) and flat is not None and (flat.row_stride >= m.k or flat.rows <= 1):
            return m, {"after": 1, "x_stride": max(flat.row_stride, m.k), "k_stride": 1}
        if m.row_stride == 1 and m.k_stride >= m.rows and step is not None and step >= 0:
            return m, {"after": m.rows, "x_stride": step, "k_stride": m.k_stride}
    raise AssertionError("a copy can always be quantised")


def quantize(x: Matrices, fmt: Format, search: str, stream: int, **fields) -> None:
    """Fill the results among `fields` (addresses) with the quantised rows of `x`, outer scales as the format
    has them by default."""
    x, place = quantizable(x, stream)
    rows = x.count * x.rows
    if rows == 0 or x.k == 0:
        return
    mid, inner = (rows, 1) if fmt.default_outer == "tensor" else (1, rows)
    values = {
        "x": x.array.address, "rows": rows, "k_size": x.k, "dtype": DTYPES[x.array.dtype],
        "format": FORMATS[fmt.name], "search": 1 if search == "fast" else 0, "mid": mid, "inner": inner,
    }  # fmt: skip
    args = filled("fp4bf16_quantize_args", values | place | fields)
    library = cuda.load()
    size = int(library.lib.fp4bf16_quantize_workspace_size(args))
    if size > 0:
        workspace = empty((size,), "uint8", like=x.array)
        args.workspace = library.ffi.cast("void*", workspace.address)
    call("quantize", args, stream)


def quantized(x: Matrices, fmt: Format, search: str, stream: int, kind: str, **fields) -> Matrices:
    """The rows of `x` quantised on the fly, in one of three kinds; `fields`: of the low-rank branch.

    "expanded": E4M3 bytes, the outer scales as `scale`. "codes": BF16 numbers, the same. "values": BF16
    numbers with the outer scales of the rows in them; only one for the whole tensor stays apart.
    """
    rows, like = x.count * x.rows, x.array
    groups = 1 if fmt.default_outer == "tensor" else rows
    outer = None if fmt.default_outer is None else empty((groups,), "float32", like=like)
    if outer is not None:
        fields["outer_scale"] = outer.address
    if kind == "expanded":
        width = round_up(x.k, 16)
        array = empty((rows, width), "uint8", like=like)
        quantize(x, fmt, search, stream, expanded=array.address, expanded_stride=width, **fields)
        k = width  # what lies behind x's own elements is zero
    else:
        kp = round_up(x.k, fmt.multiple)
        packed = empty((rows, kp // 2 if fmt.block else kp), "uint8", like=like)
        block = None
        if fmt.block:
            block = empty((rows, kp // fmt.block), "uint8", like=like)
            fields["block_scale"] = block.address
        quantize(x, fmt, search, stream, packed=packed.address, **fields)
        inside = outer if kind == "values" and fmt.default_outer == "row" else None
        array = decoded(fmt, packed, block, inside, rows, x.k, "bfloat16", stream)
        k, width, outer = x.k, array.shape[1], None if inside is not None else outer
    each = tuple(math.prod(x.lead[i + 1 :]) * x.rows for i in range(len(x.lead)))
    one = groups == 1 and rows != 1
    return Matrices(
        array, x.lead, tuple(n * width for n in each), x.rows, width, k, 1, outer,
        (0,) * len(each) if one else each, 0 if one else 1,
    )  # fmt: skip


def decoded(fmt, packed, block, outer, rows, k, dtype, stream, mid=1, inner=None) -> DeviceArray:
    """(rows, k rounded up to 8) of `dtype`: code * block scale, times the outer scale of the row's group
    unless `outer` is None. The columns behind k are not written."""
    width = round_up(k, 8)
    new = empty((rows, width), dtype, like=packed)
    if rows and k:
        call(
            "dequantize", FORMATS[fmt.name], packed.address, 0 if block is None else block.address,
            0 if outer is None else outer.address, rows, k, mid, rows if inner is None else inner,
            new.address, DTYPES[dtype], 1, width, 1, stream,
        )  # fmt: skip
    return new
