"""The certified form of a convolution of device arrays.

As in `certified_cuda`: the convolution runs on the device, with its quantiser's sums of squares; these, the
sums and, for the estimate, the operands are copied to the host, where the certificate is made. A certified
call synchronises, and its epilogue is the framework's.
"""

from __future__ import annotations

import math

import numpy as np

from . import certify as certificates
from . import conv_cuda as front
from . import device
from .backends import cuda_math
from .backends.cuda_conv import Geometry
from .certify import ActivationNorms, WeightNorms
from .conv import certificate_of
from .conv_cuda import Finish, Side
from .device import DeviceArray
from .dispatch import backend_for
from .dual import DualWeight
from .errors import ShapeError
from .formats import Format, QuantizedArray
from .gemm_cuda import Call, exact
from .interop import BFLOAT16
from .operands import Arg, as_arg
from .quantize import quantize


def certified(call: Call, w: Arg, geo: Geometry, track, fmt, stream, accumulate, certify):
    """(the result, its certificate)."""
    if certify not in (True, "bound"):
        raise ValueError(f"conv2d: certify is {certify!r}, but True, False or 'bound' is needed")
    x, part, y = call.a, call.b, device.empty(call.d.shape, "float32", like=call.d)
    if track == "bf16":
        pair = front.bf16_side(x, False, stream), front.bf16_side(part, True, stream)
        front.convolve(y, geo, stream, pair, None, Finish())
        found = certificates.same()
    else:
        y, norms, parts = _sums(call, w, geo, track, fmt, y, stream, accumulate)
        found = _certificate(call, w, geo, track, fmt, y, norms, parts, certify, stream)
    result = cuda_math.epilogue(y, call.bias, call.activation, call.residual)
    return call.store(device.astype(result, call.d.dtype)), found


def _sums(call: Call, w: Arg, geo: Geometry, track, fmt, y: DeviceArray, stream, accumulate):
    """(x conv w alone, norms of x, what else the certificate is made of)."""
    x, part = call.a, call.b
    if track == "reference":
        dtype = "float64" if any(str(a.dtype) == "float64" for a in (x, part)) else "float32"
        norms = certificates.plain_norms(_rows(x, track, stream), rounded=False)
        return front.product(x, part, geo, dtype, stream), norms, {}
    for arg in (x, part):
        if arg.array is None and not front.apart(arg.value) and arg.value.format.name != "nvfp4_exact":
            raise ShapeError(f"conv2d: {arg.name} has outer scales of shape "
                             f"{tuple(arg.value.outer_scale.shape)}, which are rounded into BF16 on the GPU, "
                             f"and that is not certified; quantize it with outer='image'")  # fmt: skip
    sums, fields = None, {}
    if x.array is not None:
        rows = math.prod(x.shape[:3])
        sums = device.full((rows, 3), 0, "float64", like=y), device.full((5,), 0, "int32", like=y)
        fields = {"sums": sums[0].address, "counts": sums[1].address}
    four, sixteen = front.sides(x, w, part, geo, track, fmt, stream, **fields)
    front.convolve(y, geo, stream, four, sixteen, Finish(accumulate=accumulate))
    parts = {}
    if four[0].array.dtype == "uint8":
        pixels = math.sqrt(geo.oh * geo.ow)
        outer = _norm(four[0]) * pixels, _norm(four[1]) / math.sqrt(max(1, y.size))
        parts = {"accumulate": accumulate, "outer": outer}
    if sixteen is not None:
        parts["hidden"] = np.array([np.linalg.norm(device.to_host(sixteen[0]).astype(np.float64))])
    return y, _pictures(x, sums, stream), parts


def _norm(side: Side) -> float:
    """Norm of the outer scales, one for each picture or output channel."""
    scales = device.to_host(side.scale).astype(np.float64)
    return float(np.linalg.norm(scales)) * math.sqrt(side.array.shape[0] / max(1, scales.size))


def _rows(arg: Arg, track: str, stream: int) -> np.ndarray:
    """The operand on the host as rows along C, float32 of BF16 values but on the "reference" track."""
    dtype = "float64" if track == "reference" and str(arg.dtype) == "float64" else "float32"
    x = device.to_host(exact(arg, dtype, stream))
    x = x if track == "reference" else x.astype(BFLOAT16).astype(np.float32)
    return x.reshape(math.prod(x.shape[:3]), x.shape[3])


def _pictures(x: Arg, sums: tuple | None, stream: int) -> ActivationNorms:
    if sums is not None:
        found = certificates.quant_stats(*map(device.to_host, sums), str(x.dtype))
        return certificates.activation_norms(found, x.shape[3])
    if x.value.stats is None:  # loaded or made by hand: the decoded operand stands for itself
        return certificates.plain_norms(_rows(x, "reference", stream), rounded=True)
    return certificates.activation_norms(x.value.stats, x.shape[3])


def _weight(w: Arg, part: Arg, track: str, fmt: Format, stream: int) -> tuple[WeightNorms, np.ndarray]:
    """(norms, the BF16 track's weight (O, K) on the host)."""
    flat = (w.shape[0], math.prod(w.shape[1:]))
    if isinstance(w.value, DualWeight):
        return w.value.norms(track), w.value.master_values().T
    if isinstance(w.value, QuantizedArray):
        used = _rows(w, "reference", stream).reshape(flat)
        return certificates.quantized_weight_norms(w.value, lambda: used), used
    matrix = _rows(w, "bf16", stream).reshape(flat)
    if track != "reference":
        outer = None if fmt.default_outer is None else "image"
        part = as_arg(quantize(w.value, fmt, outer=outer, stats=False), "w")
    return certificates.weight_norms(matrix, _rows(part, "reference", stream).reshape(flat)), matrix


def _certificate(call: Call, w: Arg, geo: Geometry, track, fmt, y, norms, parts, certify, stream):
    x = call.a
    weight, matrix = _weight(w, call.b, track, fmt, stream)
    values = None
    if certify is True:
        values = as_arg(_rows(x, "bf16", stream).reshape(x.shape), "x")
    bias, residual = (
        None if v is None else device.to_host(v).astype(np.float32) for v in (call.bias, call.residual)
    )
    whole = backend_for().Geometry(c=x.shape[3], **geo._asdict())
    return certificate_of(
        norms, weight, matrix, values, whole, device.to_host(y).reshape(whole.pixels, geo.o), certify,
        x.array is not None, dtype=call.d.dtype, activation=call.activation, added=(bias, residual),
        epilogue=bias is not None or residual is not None or call.activation is not None, **parts,
    )  # fmt: skip
