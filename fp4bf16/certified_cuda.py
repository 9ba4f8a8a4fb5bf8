"""The certified form of a product of device arrays.

The product runs on the device, with its quantiser's sums of squares; these, the product and, for the
estimate, the operands are copied to the host, where the certificate is made. A certified call synchronises,
and its epilogue is the framework's.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import certify as certificates
from . import device
from .backends import cuda_gemm as kernels
from .backends import cuda_math
from .backends.cuda_gemm import Matrices
from .certify import ActivationNorms, Certificate, WeightNorms
from .device import DeviceArray
from .dual import DualWeight
from .errors import ShapeError
from .formats import Format, QuantizedArray
from .gemm_cuda import Call, bf16_side, dual_sides, exact, fp4_product, fp4_sides, multiply
from .interop import BFLOAT16
from .operands import Arg


def _matrix(arg: Arg, track: str, stream: int, right: bool = False) -> np.ndarray:
    """The operand on the host, (rows, K) or (K, N), float32 of BF16 values but on the "reference" track."""
    dtype = "float64" if track == "reference" and str(arg.dtype) == "float64" else "float32"
    x = device.to_host(exact(arg, dtype, stream))
    x = x if track == "reference" else x.astype(BFLOAT16).astype(np.float32)
    if right:
        return x if x.ndim > 1 else x[:, None]
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _activation(a: Arg, track: str, sums: tuple | None, k: int, stream: int) -> ActivationNorms:
    if track == "reference":
        return certificates.plain_norms(_matrix(a, track, stream), rounded=False)
    if sums is not None:
        found, counts = (device.to_host(x) for x in sums)
        return certificates.activation_norms(certificates.quant_stats(found, counts, str(a.dtype)), k)
    if a.value.stats is None:  # loaded or made by hand: the decoded operand stands for itself
        return certificates.plain_norms(_matrix(a, "fp4", stream), rounded=True)
    return certificates.activation_norms(a.value.stats, k)


def _weight(b: Arg, weight: Any, track: str, fmt: Format, stream: int) -> tuple[WeightNorms, np.ndarray]:
    """(norms, the weight of the BF16 track as (K, N) on the host)."""
    if isinstance(weight, DualWeight):
        return weight.norms(track), weight.master_values()
    if isinstance(weight, QuantizedArray):
        w = _matrix(b, "bf16", stream, right=True)
        return certificates.quantized_weight_norms(weight, lambda: _matrix(b, "reference", stream, True)), w
    w = _matrix(b, "bf16", stream, right=True)
    if track == "reference":
        return certificates.weight_norms(w, _matrix(b, track, stream, right=True)), w
    from .quantize import quantize

    q = quantize(b.value, fmt, axis=max(-2, -len(b.shape)), stats=False)
    used = device.to_host(exact(Arg(q, b.name, b.shape, b.framework, None, None, b.place), "float32", stream))
    return certificates.weight_norms(w, used if used.ndim > 1 else used[:, None]), w


def certified_product(call: Call, weight, track, fmt, stream, accumulate, certify) -> tuple[Any, Certificate]:
    """(the result, its certificate)."""
    op, a, b = call.op, call.a, call.b
    if certify not in (True, "bound"):
        raise ValueError(f"{op}: certify is {certify!r}, but True, False or 'bound' is needed; pass one")
    if len(b.shape) > 2:
        raise ShapeError(f"{op}: {b.name} has shape {b.shape}, but a certificate is for one matrix; "
                         f"call it for each of the leading axes")  # fmt: skip
    rows, columns = math.prod(a.shape[:-1]), b.shape[-1] if len(b.shape) > 1 else 1
    lead, m = (a.shape[:-2], a.shape[-2]) if len(a.shape) > 1 else ((), 1)
    y = device.empty((*lead, m, columns), "float32", like=call.d)
    if track == "bf16":
        pair = bf16_side(a, False, stream), bf16_side(b, True, stream)
        multiply(kernels.left(y), stream, None, pair)
        found = certificates.same()
    else:
        y, x_norms, hidden, accumulate, outer = _linear(call, weight, track, fmt, y, stream, accumulate)
        w_norms, w = _weight(b, weight, track, fmt, stream)
        y_host = device.to_host(y).reshape(rows, columns)
        found = _certificate(call, x_norms, w_norms, w, y_host, hidden, accumulate, outer, certify, stream)
    shape = call.d.shape
    result = cuda_math.epilogue(cuda_math.reshaped(y, shape), call.bias, call.activation, call.residual)
    return call.store(device.astype(result, call.d.dtype)), found


def _linear(call: Call, weight, track, fmt, y: DeviceArray, stream, accumulate):
    """(the product alone, norms of what was multiplied, norms of the rows of T, kind of its sums, outer
    scales)."""
    a, b = call.a, call.b
    if track == "reference":
        dtype = "float64" if "float64" in (str(a.dtype), str(b.dtype)) else "float32"
        product = cuda_math.matmul(exact(a, dtype, stream), exact(b, dtype, stream))
        norms = _activation(a, track, None, 0, stream)
        return cuda_math.reshaped(product, y.shape), norms, None, "fp32", None
    sums, fields, hidden, sixteen = None, {}, None, None
    if a.array is not None:
        rows = math.prod(a.shape[:-1])
        sums = device.full((rows, 3), 0, "float64", like=y), device.full((5,), 0, "int32", like=y)
        fields = {"sums": sums[0].address, "counts": sums[1].address}
    if track == "dual":
        four, sixteen, hidden = dual_sides(a, weight, fmt, stream, **fields)
    else:
        four = fp4_sides(a, b, fmt, stream, **fields)
    fp4_product(four, sixteen, kernels.left(y), stream, kernels.Finish(accumulate=accumulate))
    used = accumulate if four[0].array.dtype == "uint8" else "fp32"
    norms = _activation(a, track, sums, a.shape[-1], stream)
    outer = tuple(_outer(m) for m in four) if used != "fp32" else None
    if hidden is None:
        return y, norms, None, used, outer
    branch = weight.branch
    t = device.to_host(hidden).astype(np.float32)
    if branch.outliers:  # the quantiser left these out
        outliers = certificates.row_norms(t[:, branch.rank : branch.rank + branch.outliers])
        norms = ActivationNorms(np.hypot(norms.rows, outliers), norms.rows_used, norms.rows_error,
                                norms.overflow)  # fmt: skip
    return y, norms, certificates.row_norms(t[:, : branch.rank + branch.outliers]), used, outer


def _outer(side: Matrices) -> np.ndarray | float:
    """The outer scales of an operand of the FP8 tensor cores: one a row of it, or the largest for all."""
    scales = device.to_host(side.scale).reshape(-1)
    return scales if scales.size == side.rows * side.count else float(scales.max(initial=0.0))


def _certificate(call, x_norms, w_norms, w, y, hidden, accumulate, outer, certify, stream) -> Certificate:
    a, parts = call.a, {}
    if hidden is not None:
        parts["hidden"] = hidden
    if certify is True:
        x = _matrix(a, "bf16", stream)
        # a quantised a is known by its decoded values; what was lost before them is bounded
        unseen = 0.0 if a.array is not None else x_norms.error * w_norms.sigma
        parts |= {"estimate": certificates.sketch(x, w, y) + unseen, "confidence": 1 - 1e-3}
    bias, residual = (
        None if v is None else device.to_host(v).astype(np.float32) for v in (call.bias, call.residual)
    )
    given = bias is not None or residual is not None or call.activation is not None
    return certificates.device_certificate(
        x_norms, w_norms, k=a.shape[-1], columns=y.shape[1], accumulate=accumulate, outer=outer,
        dtype=call.d.dtype, activation=call.activation,
        added=certificates.added_norms(y.shape[0], bias, residual),
        epilogue=given, product_norm=certificates.norm(y), **parts,
    )  # fmt: skip
