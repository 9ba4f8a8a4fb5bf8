"""Convolutions of device arrays: what each track convolves, as the kernels read it, and the launches.

Nothing synchronises, allocates outside the framework's allocator or is read back (but for ``certify=``), so a
call can be captured in a CUDA graph. The kernels read bfloat16 pictures with a multiple of 8 channels, and
E4M3 bytes with a multiple of 16, at addresses and strides of 16 bytes; any other operand (float32, three
channels, PyTorch's NCHW memory, odd views) is copied into such an array first, channels padded with zeros.

An outer scale for each picture and for each output channel stays apart and multiplies the sums. One that
varies within a picture is decoded into BF16 numbers: exactly for a power of two ("nvfp4_exact"), rounded
otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from . import device
from .backends import cuda_conv, cuda_math
from .backends import cuda_gemm as kernels
from .backends.cuda_conv import Geometry
from .backends.cuda_gemm import ALIGNMENT, DTYPES, EXPANDING, Matrices, round_up
from .backends.cuda_tape import left_to_framework
from .device import DeviceArray
from .dual import DualWeight
from .formats import Format, QuantizedArray
from .gemm_cuda import Call, contiguous, decoded_rows, exact, expanded, float32, outer_of
from .operands import Arg, part_of_dual


@dataclass(slots=True)
class Side:
    """Pictures (N, H, W, C) or a weight (O, kh, kw, C) as the kernels read them, channels padded.

    Attributes:
        array: "bfloat16", or "uint8" for E4M3 bytes. scale: float32, one for each index of the first axis or
            one for all, which multiplies the sums; or None.
    """

    array: DeviceArray
    scale: DeviceArray | None = None


# ---- memory ------------------------------------------------------------------------------------------------
def readable(x: DeviceArray, weight: bool) -> bool:
    """Whether the kernels can read `x` where it lies; the taps of a weight must lie side by side."""
    if x.dtype not in ("bfloat16", "uint8") or x.size == 0:
        return False
    unit, c = ALIGNMENT // x.itemsize, x.shape[3]
    if x.address % ALIGNMENT or x.strides[3] != 1 or c % unit:
        return False
    natural = c
    for axis in (2, 1, 0):
        if x.shape[axis] > 1 and (x.strides[axis] < natural or x.strides[axis] % unit):
            return False
        if weight and axis and x.shape[axis] > 1 and x.strides[axis] != natural:
            return False
        natural = natural * x.shape[axis] if weight else c
    return True


def matrices(x: DeviceArray) -> Matrices:
    """Pixels as rows of matrices, as few matrices as the memory allows."""
    axes: list[tuple[int, int]] = []
    for n, s in zip(x.shape[:3], x.strides[:3], strict=True):
        if n == 1:
            continue
        if axes and axes[-1][1] == n * s:
            axes[-1] = axes[-1][0] * n, s
        else:
            axes.append((n, s))
    *lead, (rows, step) = axes or [(1, x.shape[3])]
    steps = tuple(s for _, s in lead)
    return Matrices(x, tuple(n for n, _ in lead), steps, rows, step, x.shape[3], x.strides[3])


def even(x: DeviceArray) -> Matrices:
    """`matrices`, of a copy by the framework where they are not evenly spaced: each would be a launch."""
    m = matrices(x)
    return m if kernels.uniform(m.lead, m.steps) is not None else matrices(contiguous(x))


def copied(x: DeviceArray, stream: int) -> DeviceArray:
    """A contiguous copy in bfloat16, channels padded with zeros to a multiple of 8."""
    m = even(float32(x))
    new = kernels.empty((*x.shape[:3], round_up(m.k, 8)), "bfloat16", like=x)
    if new.size:
        kernels.convert(m.array, m.array.address, m.lead, m.steps, m.rows, m.k, m.row_stride, m.k_stride, new,
                        new.address, stream)  # fmt: skip
    return new


def bf16(x: DeviceArray, weight: bool, stream: int) -> DeviceArray:
    """`x` as the kernels read it, itself or a copy rounded to BF16."""
    return x if x.dtype == "bfloat16" and readable(x, weight) else copied(x, stream)


# ---- operands of the tracks --------------------------------------------------------------------------------
def apart(q: QuantizedArray) -> bool:
    """Whether the outer scale varies with the first axis alone."""
    return q.outer_scale is None or all(n == 1 for n in q.outer_scale.shape[1:])


def _scale(q: QuantizedArray) -> DeviceArray | None:
    outer = outer_of(q)
    return None if outer is None else contiguous(outer)


def decoded(q: QuantizedArray, scaled: bool, stream: int) -> DeviceArray:
    """code * block scale, times the outer scale if `scaled`, in BF16."""
    rows, strides = decoded_rows(q, "bfloat16", scaled, stream)
    x = replace(rows, shape=q.shape, strides=strides)
    return x if q.k % 8 == 0 else copied(x, stream)  # what lies behind the channels was not written


def _prepared(q: QuantizedArray, e4m3: bool, stream: int) -> Side:
    """A quantised operand of the FP4 track."""
    if not e4m3:
        scale = _scale(q) if apart(q) else None
        return Side(decoded(q, scale is None, stream), scale)
    found = expanded(q)
    width = round_up(q.k, 16)
    if found.shape[3] != width:  # of fp8: its rows are padded, and zero there
        found = replace(found, shape=(*found.shape[:3], width))
    return Side(found if readable(found, True) else contiguous(found), _scale(q))


def quantized(x: DeviceArray, fmt: Format, search: str, kind: str, stream: int, **fields) -> Side:
    """`x` quantised on the fly, one outer scale for each index of its first axis; kinds as in
    `cuda_gemm.quantized`: "expanded" E4M3 bytes, "codes" in BF16 with the scale apart, "values" with it
    inside.
    """
    x, shape = float32(x), x.shape
    rows, pixels = math.prod(shape[:3]), shape[1] * shape[2]
    outer = None if fmt.default_outer is None else kernels.empty(shape[:1], "float32", like=x)
    if outer is not None:
        fields |= {"outer_scale": outer.address, "mid": pixels, "inner": 1}
    if kind == "expanded":
        width = round_up(shape[3], 16)
        array = kernels.empty((*shape[:3], width), "uint8", like=x)
        fields |= {"expanded": array.address, "expanded_stride": width}
        kernels.quantize(even(x), fmt, search, stream, **fields)
        return Side(array, outer)
    padded = round_up(shape[3], fmt.multiple)
    packed = kernels.empty((rows, padded // 2 if fmt.block else padded), "uint8", like=x)
    block = kernels.empty((rows, padded // fmt.block), "uint8", like=x) if fmt.block else None
    if block is not None:
        fields["block_scale"] = block.address
    kernels.quantize(even(x), fmt, search, stream, packed=packed.address, **fields)
    inside = outer if kind == "values" else None
    array = kernels.decoded(fmt, packed, block, inside, rows, shape[3], "bfloat16", stream, pixels, 1)
    width = array.shape[1]
    strides = tuple(math.prod(shape[i + 1 : 3]) * width for i in range(3))
    array = replace(array, shape=shape, strides=(*strides, 1))
    array = array if width == shape[3] else copied(array, stream)
    return Side(array, None if kind == "values" else outer)


def bf16_side(arg: Arg, weight: bool, stream: int) -> Side:
    """An operand of the BF16 track: rounded, or decoded with its outer scale."""
    if arg.array is None:
        return Side(bf16(decoded(arg.value, True, stream), weight, stream))
    return Side(bf16(arg.array, weight, stream))


def fp4_sides(x: Arg, w: Arg, fmt: Format, stream: int, **fields) -> tuple[Side, Side]:
    """The operands of the FP4 track: E4M3 bytes where both formats have them and no outer scale varies within
    a picture or a channel's weight, else BF16. `fields`: more results of the quantiser of a plain `x`.
    """
    formats = [fmt if a.array is not None else a.value.format for a in (x, w)]
    e4m3 = all(f.name in EXPANDING for f in formats)
    e4m3 = e4m3 and all(a.array is not None or apart(a.value) for a in (x, w))
    sides = []
    for arg, search, more in ((x, "fast", fields), (w, "full", {})):
        if arg.array is None:
            sides.append(_prepared(arg.value, e4m3, stream))
        else:
            sides.append(quantized(arg.array, fmt, search, "expanded" if e4m3 else "codes", stream, **more))
    return tuple(sides)


def used(arg: Arg, weight: bool, track: str, fmt: Format, stream: int) -> DeviceArray:
    """What `track` convolves in BF16, outer scales included, for the gradients."""
    if track not in ("fp4", "dual") or arg.array is None:
        return bf16_side(arg, weight, stream).array
    return quantized(arg.array, fmt, "full" if weight else "fast", "values", stream).array


# ---- the low-rank branch -----------------------------------------------------------------------------------
def branch_weights(w: DualWeight, stream: int) -> tuple[DeviceArray, DeviceArray]:
    """(D as (ranks, kh, kw, C), U as (O, ranks)), the ranks padded with zeros to a multiple of 8."""
    branch, (_, kh, kw, c) = w.branch, w.shape
    ranks, width = branch.down_t.shape
    down = replace(branch.down_t, shape=(ranks, kh, kw, c), strides=(width, kw * c, c, 1))
    return bf16(down, True, stream), branch.up_t


def hidden_pictures(x: Arg, w: DualWeight, geo: Geometry, stream: int) -> tuple[DeviceArray, DeviceArray]:
    """(T = bf16(bf16(x) conv D) (N, OH, OW, ranks), U)."""
    down, up = branch_weights(w, stream)
    thin = geo._replace(o=down.shape[0])
    hidden = kernels.empty((geo.n, geo.oh, geo.ow, thin.o), "bfloat16", like=down)
    cuda_conv.forward(thin, hidden, stream, **_pair(bf16_side(x, False, stream), Side(down)))
    return hidden, up


# ---- the convolution ---------------------------------------------------------------------------------------
def _pair(x: Side, w: Side) -> dict[str, Any]:
    """Two operands as arguments of `cuda_conv.forward`; none where the pictures are empty, of which the
    quantiser makes no scales.
    """
    if x.array.size == 0:
        return {}
    bits = 8 if x.array.dtype == "uint8" else 16
    return {f"x{bits}": x.array, f"w{bits}": w.array, "image_scale": x.scale, "col_scale": w.scale}


@dataclass(slots=True)
class Finish:
    """What follows the sums."""

    bias: DeviceArray | None = None
    activation: str | None = None
    residual: DeviceArray | None = None
    accumulate: str = "promoted"
    run_if: DeviceArray | None = None

    def arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def convolve(d: DeviceArray, geo: Geometry, stream: int, four, sixteen, finish: Finish) -> None:
    """d = the pair `four` of the FP4 track, and the branch `sixteen`, (T, U) or None, with the epilogue.

    E4M3 operands are one launch. BF16 ones carry scales that the branch must not get: it is added by a second
    launch, and an activation by the framework.
    """
    pair, branch = _pair(*four), {}
    if sixteen is not None:
        branch = {"x16": sixteen[0], "w16": sixteen[1], "on_output": True}
    if not branch or "x16" not in pair:
        cuda_conv.forward(geo, d, stream, **pair, **branch, **finish.arguments())
        return
    bulk = kernels.empty(d.shape, "float32", like=d)
    first = Finish() if finish.activation else Finish(residual=finish.residual)
    cuda_conv.forward(geo, bulk, stream, **pair, **first.arguments())
    y = kernels.empty(d.shape, "float32", like=d) if finish.activation else d
    last = Finish(None if finish.activation else finish.bias, residual=bulk)
    cuda_conv.forward(geo, y, stream, **branch, **last.arguments())
    if finish.activation:
        y = cuda_math.epilogue(y, finish.bias, finish.activation, finish.residual)
        device.assign(d, left_to_framework(device.astype(y, d.dtype)))


def storable(x: DeviceArray) -> bool:
    """Whether a kernel can write `x`, or add it, where it lies."""
    if x.dtype not in DTYPES or (x.strides[3] != 1 and x.shape[3] > 1) or x.address % x.itemsize:
        return False
    return all(n == 1 or s >= x.shape[3] for n, s in zip(x.shape[:3], x.strides, strict=False))


def writable(d: DeviceArray) -> DeviceArray:
    """What a kernel writes: `d`, or new memory that is to be copied to it."""
    if storable(d):
        return d
    return kernels.empty(d.shape, "float32" if d.dtype == "float64" else d.dtype, like=d)


def finish_of(call: Call, accumulate: str) -> Finish:
    """The epilogue as the kernels read it."""
    bias, residual = call.bias, call.residual
    if bias is not None:
        bias = contiguous(float32(bias))
    if residual is not None:
        residual = float32(residual)
        if not storable(residual):
            residual = contiguous(residual)
    return Finish(bias, call.activation, residual, accumulate)


def conv2d(x: Arg, w: Arg, geo: Geometry, track, fmt, dtype, epilogue, certify, out, stream, accumulate,
           threshold=None):  # fmt: skip
    """`fp4bf16.conv2d` of checked operands on the device."""
    shape, part = (geo.n, geo.oh, geo.ow, geo.o), part_of_dual(w, track)
    with device.ordered("conv2d", stream, [x.place, w.place]) as handle:
        call = Call("conv2d", x, w, part, shape, dtype, *epilogue, out)
        if threshold is not None:
            from .threshold_cuda import conv

            return conv(call, w.value, geo, track, fmt, handle, accumulate, threshold, certify)
        if certify:
            from .certified_conv_cuda import certified

            return certified(call, w, geo, track, fmt, handle, accumulate, certify)
        if track == "reference":
            return call.store(_reference(call, geo, handle))
        target, finish = writable(call.d), finish_of(call, accumulate)
        if target.size:
            _on_track(target, x, w, part, geo, track, fmt, handle, finish)
        return call.store(target)


def _on_track(d: DeviceArray, x: Arg, w: Arg, part: Arg, geo, track, fmt, stream, finish: Finish) -> None:
    if track == "bf16":
        pair = bf16_side(x, False, stream), bf16_side(part, True, stream)
        convolve(d, geo, stream, pair, None, finish)
        return
    four, sixteen = sides(x, w, part, geo, track, fmt, stream)
    convolve(d, geo, stream, four, sixteen, finish)


def sides(x: Arg, w: Arg, part: Arg, geo: Geometry, track: str, fmt: Format, stream: int, **fields):
    """(operands of the FP4 track, (T, U) of the branch or None)."""
    sixteen = None
    if track == "dual" and w.value.rank and geo.h * geo.w * x.shape[3]:
        sixteen = hidden_pictures(x, w.value, geo, stream)
    return fp4_sides(x, part, fmt, stream, **fields), sixteen


# ---- the "reference" track, by the framework ---------------------------------------------------------------
def taps(geo: Geometry) -> Iterator[tuple[int, int, slice, slice]]:
    """Each tap of the kernel, and the lines and columns of the padded picture that it meets."""
    for i in range(geo.kh):
        for j in range(geo.kw):
            rows = slice(i, i + geo.stride * (geo.oh - 1) + 1, geo.stride)
            yield i, j, rows, slice(j, j + geo.stride * (geo.ow - 1) + 1, geo.stride)


def padded(geo: Geometry, c: int, dtype: str, like: DeviceArray) -> tuple[DeviceArray, DeviceArray]:
    """(zeros as wide as the taps reach, the view of the picture in it)."""
    height = max(geo.top + geo.h, (geo.oh - 1) * geo.stride + geo.kh)
    width = max(geo.left + geo.w, (geo.ow - 1) * geo.stride + geo.kw)
    zeros = device.full((geo.n, height, width, c), 0, dtype, like=like)
    lines, columns = slice(geo.top, geo.top + geo.h), slice(geo.left, geo.left + geo.w)
    return zeros, cuda_math.part(zeros, slice(None), lines, columns)


def tap_of(w: DeviceArray, i: int, j: int) -> DeviceArray:
    return cuda_math.part(w, slice(None), i, j)


def _reference(call: Call, geo: Geometry, stream: int) -> DeviceArray:
    dtype = "float64" if any(a.dtype == "float64" for a in (call.a, call.b)) else "float32"
    y = product(call.a, call.b, geo, dtype, stream)
    y = cuda_math.epilogue(y, call.bias, call.activation, call.residual)
    return left_to_framework(device.astype(y, call.d.dtype))


def product(x: Arg, w: Arg, geo: Geometry, dtype: str, stream: int) -> DeviceArray:
    """x conv w in `dtype` by the framework's matrix products, tap by tap."""
    values, weight = exact(x, dtype, stream), exact(w, dtype, stream)
    wide, inner = padded(geo, values.shape[3], dtype, values)
    device.assign(inner, values)
    y = None
    for i, j, rows, columns in taps(geo):
        met = cuda_math.part(wide, slice(None), rows, columns)
        term = cuda_math.matmul(met, device.permute(tap_of(weight, i, j), (1, 0)))
        y = term if y is None else cuda_math.epilogue(y, None, None, term)
    return y
