"""``threshold=`` of products and convolutions of device arrays, decided on the device.

The FP4 product, the kernel of its certificate, which sets a flag, and the BF16 product into the same result,
whose kernels do nothing where the flag is not set. Nothing is read back, so that a call can be captured in a
CUDA graph; the certificate that is returned is read when one of its fields is asked for.

It holds for plain activations and weights without a branch; for others the host decides (`epilogue.within`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from . import certify as certificates
from . import conv_cuda, device
from .backends import cuda_certificate, cuda_math
from .backends import cuda_gemm as kernels
from .backends.cuda_conv import Geometry
from .backends.cuda_spectral import frobenius, rounded_up, spectral_norms
from .certify import ActivationNorms, Certificate, WeightNorms
from .device import DeviceArray
from .errors import ShapeError
from .fallbacks import fallbacks
from .formats import Format, QuantizedArray
from .gemm_cuda import Call, bf16_side, exact, fp4_product, fp4_sides, multiply, outer_of
from .operands import Arg, as_arg
from .python_ref import certify as formulas
from .quantize import quantize

_ROOM = 1 + 2.0**-20  # over what sums lose that the framework makes in float64
_FIELDS = frozenset(f.name for f in fields(Certificate))


class Pending(Certificate):
    """A certificate whose numbers are on the device: the first look at a field fetches them, and waits. In a
    captured graph those of the last replay are fetched, once.
    """

    def __init__(self, make: Callable[[], Certificate]):
        object.__setattr__(self, "_make", make)

    def __getattribute__(self, name: str) -> Any:
        if name in _FIELDS:
            held = object.__getattribute__(self, "__dict__")
            if (make := held.pop("_make", None)) is not None:
                held |= vars(make())
        return object.__getattribute__(self, name)


@dataclass(slots=True)
class _Product:
    """An FP4 product y and what its certificate is made of. sums: of all of x, (1, 3). weight: (8,). outer:
    the largest outer scale of x (1,), on FP8 tensor cores. used: how it was summed.
    """

    y: DeviceArray
    sums: DeviceArray
    weight: DeviceArray
    reference: str
    k: int
    columns: int
    factor: float
    used: str
    outer: DeviceArray | None


# ---- the two operations ------------------------------------------------------------------------------------
def gemm(call: Call, weight: Any, track: str, fmt: Format, stream: int, accumulate: str, threshold: float,
         certify: bool | str) -> Any:  # fmt: skip
    """`matmul`; None where the host has to decide."""
    a, b = call.a, call.b
    if not _takes(call, weight, track):
        return None
    if len(b.shape) > 2:
        raise ShapeError(f"{call.op}: {b.name} has shape {b.shape}, but a certificate is for one matrix; "
                         f"call it for each of the leading axes")  # fmt: skip
    columns = b.shape[-1] if len(b.shape) > 1 else 1
    lead, m = (a.shape[:-2], a.shape[-2]) if len(a.shape) > 1 else ((), 1)
    y = device.empty((*lead, m, columns), "float32", like=call.d)
    q = _quantized(b, fmt, axis=max(-2, -len(b.shape)))
    kept, more = _sums(math.prod(a.shape[:-1]), y)
    four = fp4_sides(a, q, fmt, stream, **more)
    fp4_product(four, None, kernels.left(y), stream, kernels.Finish(accumulate=accumulate))
    used = accumulate if four[0].array.dtype == "uint8" else "fp32"
    row, reference = _weight(b, q, (a.shape[-1], columns), stream)
    found = _Product(y, _summed(*kept, a), row, reference, a.shape[-1], columns, 1.0, used,
                     _largest(four[0].scale, used))  # fmt: skip

    def again(flag: DeviceArray) -> None:
        pair = bf16_side(a, False, stream), bf16_side(b, True, stream)
        multiply(kernels.left(y), stream, None, pair, kernels.Finish(run_if=flag))

    return _finished(call, found, again, stream, threshold, certify)


def conv(call: Call, weight: Any, geo: Geometry, track: str, fmt: Format, stream: int, accumulate: str,
         threshold: float, certify: bool | str) -> Any:  # fmt: skip
    """`conv2d`; None where the host has to decide."""
    x, w = call.a, call.b
    if not _takes(call, weight, track) or (w.array is None and not conv_cuda.apart(w.value)):
        return None
    outer = None if fmt.default_outer is None else "image"
    q = _quantized(w, fmt, outer=outer)
    y = device.empty(call.d.shape, "float32", like=call.d)
    kept, more = _sums(math.prod(x.shape[:3]), y)
    four = conv_cuda.fp4_sides(x, q, fmt, stream, **more)
    conv_cuda.convolve(y, geo, stream, four, None, conv_cuda.Finish(accumulate=accumulate))
    used = accumulate if four[0].array.dtype == "uint8" else "fp32"
    k = geo.kh * geo.kw * x.shape[3]
    row, reference = _weight(w, q, (geo.o, k), stream)
    factor = formulas.conv_factor((geo.kh, geo.kw), (geo.stride, geo.stride))
    found = _Product(y, _summed(*kept, x), row, reference, k, geo.o, factor, used,
                     _largest(four[0].scale, used))  # fmt: skip

    def again(flag: DeviceArray) -> None:
        pair = conv_cuda.bf16_side(x, False, stream), conv_cuda.bf16_side(w, True, stream)
        conv_cuda.convolve(y, geo, stream, pair, None, conv_cuda.Finish(run_if=flag))

    return _finished(call, found, again, stream, threshold, certify)


def _quantized(w: Arg, fmt: Format, **how: Any) -> Arg:
    """A weight as the FP4 track multiplies it."""
    return w if w.array is None else as_arg(quantize(w.value, fmt, stats=False, **how), w.name)


def _takes(call: Call, weight: Any, track: str) -> bool:
    """Whether the device decides: activations that are quantised here, a weight without a branch and without
    a block that overflowed, and something to do.
    """
    if track != "fp4" or call.a.array is None or 0 in (*call.a.shape, call.d.size):
        return False
    if isinstance(weight, QuantizedArray):
        return weight.stats is None or weight.stats.overflow == 0
    return call.b.array is not None


# ---- norms -------------------------------------------------------------------------------------------------
def _sums(rows: int, like: DeviceArray) -> tuple[tuple[DeviceArray, DeviceArray], dict[str, int]]:
    """Memory for the quantiser's sums and counts, and its arguments."""
    sums, counts = device.full((rows, 3), 0, "float64", like), device.full((5,), 0, "int32", like)
    return (sums, counts), {"sums": sums.address, "counts": counts.address}


def _summed(sums: DeviceArray, counts: DeviceArray, x: Arg) -> DeviceArray:
    """Of all rows, (1, 3), with what rounding x to bfloat16 adds (`certify.activation_norms`); infinite where
    a block overflowed.
    """
    arrays, k = cuda_math.of(sums), x.shape[-1]
    found, over = arrays.raw(sums), arrays.raw(counts)[3:4] > 0
    total = arrays.raw(whole := device.empty((1, 3), "float64", like=sums))
    total[0] = found.sum(0)
    if str(x.dtype) != "bfloat16":
        rounding = found[:, 0] ** 0.5 * formulas.bf16_rounding(1.0, 0) + formulas.bf16_rounding(0.0, k)
        for i in (0, 2):
            total[0, i] = ((found[:, i] ** 0.5 + rounding) ** 2).sum()
    total *= 1 + 2.0**-30
    total += arrays.double(arrays.xp.where(over, float("inf"), 0.0))
    return whole


def _largest(scale: DeviceArray | None, used: str) -> DeviceArray | None:
    """The largest of the outer scales, where sums are those of FP8 tensor cores."""
    if used == "fp32" or scale is None:
        return None
    raw = cuda_math.of(scale).raw(device.contiguous(scale))
    return cuda_math.wrapped(raw.max().reshape(1), scale)


def _weight(given: Arg, used: Arg, shape: tuple[int, int], stream: int) -> tuple[DeviceArray, str]:
    """(the kernel's (8,), what it is against) of a weight that is seen as a matrix of `shape`."""
    q = used.value
    if given.array is not None:
        return _row(q, exact(given, "float32", stream), shape, stream), "master"
    reference = "quantized" if q.stats is None else "original"
    if device.capturing(used.place, stream):  # nothing has run yet, and may not be kept
        return _row(q, None, shape, stream), reference
    owner = q.packed if q.stats is None else q.stats
    return certificates.once(owner, lambda: _row(q, None, shape, stream), "row"), reference


def _row(q: QuantizedArray, master: DeviceArray | None, shape: tuple[int, int], stream: int) -> DeviceArray:
    """(8,) float32 of W' = q, and of its master or its recorded error (`certify.quantized_weight_norms`)."""
    arg = as_arg(q, "w")
    value = exact(replace(arg, value=q), "float32", stream)
    arrays = cuda_math.of(value)
    xp, double = arrays.xp, arrays.double
    w = double(arrays.raw(value)).reshape(1, *shape)
    size, s_used = frobenius(w) * _ROOM, spectral_norms(xp, w, 5)
    if master is not None:
        rounded = device.astype(device.astype(master, "bfloat16"), "float32")
        whole = double(arrays.raw(rounded)).reshape(1, *shape)
        full, error = frobenius(whole) * _ROOM, spectral_norms(xp, whole - w, 5)
    else:
        known = None if q.stats is None else certificates.activation_norms(q.stats, q.k)
        full = size if known is None else size * 0 + known.norm
        error = size * 0 + (0.0 if known is None else known.error)
    outer = outer_of(q)
    scale = size * 0 if outer is None else double(arrays.raw(device.contiguous(outer)).max().reshape(1))
    scale = xp.where(size > 0, scale, 0.0)  # of zeros it is 1, and they lose nothing
    row = arrays.raw(device.full((8,), 0, "float64", like=value))
    for i, part in enumerate((full, size, s_used + error, s_used, error, scale)):
        row[i : i + 1] = part
    return cuda_math.wrapped(rounded_up(arrays, row), value)


# ---- the decision ------------------------------------------------------------------------------------------
def _finished(call: Call, p: _Product, again: Callable[[DeviceArray], None], stream: int, threshold: float,
              certify: bool | str) -> Any:  # fmt: skip
    """The result, of whichever track, and with `certify` the certificate."""
    raw = cuda_math.of(p.y).raw(p.y)
    squares = cuda_math.wrapped((raw * raw).reshape(-1, p.columns).sum(1), p.y)
    out, flag = device.full((4,), 0, "float32", p.y), device.full((1,), 0, "int32", p.y)
    gain = formulas.ACCUMULATE[p.used](p.k, subnormal=0)
    dtype = "float32" if call.d.dtype == "float64" else call.d.dtype
    cuda_certificate.certificate(
        p.weight, out, stream, k=p.k, columns=p.columns, elements=p.y.size, output=dtype, sums=p.sums,
        outer_scale=p.outer, factor=p.factor * _ROOM, gain=gain, squares=squares, threshold=threshold,
        flag=flag, counts=fallbacks.counter(call.op, p.y, stream),
    )  # fmt: skip
    again(flag)
    y = cuda_math.reshaped(p.y, call.d.shape)
    result = cuda_math.epilogue(y, call.bias, call.activation, call.residual)
    result = call.store(device.astype(result, call.d.dtype))
    if not certify:
        return result
    added, activation = _added(call, p.y.size // p.columns), call.activation
    return result, Pending(lambda: _read(p, out, flag, added, dtype, activation))


def _added(call: Call, rows: int) -> list[tuple[DeviceArray, float]]:
    """Norms of bias and residual, each with how often it is added, as a norm."""
    found = []
    for x, times in ((call.bias, math.sqrt(rows)), (call.residual, 1.0)):
        if x is not None:
            wide = device.astype(x, "float32")
            raw = cuda_math.of(wide).double(cuda_math.of(wide).raw(wide)).reshape(1, -1)
            found.append((cuda_math.wrapped(frobenius(raw), x), times))
    return found


def _read(p: _Product, out: DeviceArray, flag: DeviceArray, added: list, dtype: str,
          activation: str | None) -> Certificate:  # fmt: skip
    """The certificate of what is on the device by now."""
    _, _, ratio, product_norm = device.to_host(out).tolist()
    if device.to_host(flag)[0]:
        return replace(certificates.same(), refused=math.inf if math.isnan(ratio) else ratio)
    norms = [np.sqrt(s) for s in np.asarray(device.to_host(p.sums), np.float64).reshape(3, 1)]
    row = device.to_host(p.weight).astype(np.float64).tolist()
    outer, rows = None, math.sqrt(p.y.size / p.columns)
    if p.outer is not None:
        outer = float(device.to_host(p.outer)[0]) * rows, row[5] / rows
    found = certificates.certificate(
        ActivationNorms(*norms), WeightNorms(*row[:5], p.reference), k=p.k, columns=p.y.size, dtype=dtype,
        activation=activation, added=np.array([sum(float(device.to_host(x)[0]) * n for x, n in added)]),
        epilogue=bool(added) or activation is not None, factor=p.factor, product_norm=product_norm,
        accumulate=p.used, outer=outer,
    )  # fmt: skip
    return replace(found, relative=ratio, rows=None)
