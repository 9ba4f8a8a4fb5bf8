"""Matrix products with NumPy's semantics on the FP4, the BF16 and the dual track, and their gradients.

Left operands are blocked along their last axis, right ones along their second last: both along K. Host arrays
(NumPy, PyTorch on the CPU) are computed on the CPU, device arrays (PyTorch on CUDA, CuPy) on their GPU.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import device, gemm_cuda
from .dispatch import backend_for, check_stream
from .dual import DualWeight
from .epilogue import Epilogue, certified_product, with_branch, within
from .errors import nearest
from .formats import Format
from .gemm_vjp import branch_vjp, linear_vjp, matmul_vjp
from .interop import output, unwrap
from .operands import (
    Arg,
    as_arg,
    branch,
    check_accumulate,
    check_axis,
    check_frameworks,
    choose_format,
    choose_track,
    left_matrix,
    linear_weight,
    memory_of,
    on_device,
    part_of_dual,
    places,
    result_dtype_of,
    right_matrix,
    shapes,
    whole_operand,
)

__all__ = ["DualWeight", "branch_vjp", "linear", "linear_vjp", "matmul", "matmul_vjp"]


# ---- the product -------------------------------------------------------------------------------------------


def _compute(kernels, a: Arg, b: Arg, track: str, fmt: Format, target: np.ndarray, lead, finish) -> None:
    """target (..., M, N), two axes at least, = a @ b on `track` with `finish` applied to the panels."""
    if len(b.shape) <= 2:
        rows = target.reshape(-1, target.shape[-1]) if target.ndim != 2 else target
        left, right = left_matrix(kernels, a, track, fmt), right_matrix(kernels, b, track, fmt)
        kernels.product(left, right, rows, finish)
        return
    x, w = (
        whole_operand(kernels, a, track, fmt, right=False),
        whole_operand(kernels, b, track, fmt, right=True),
    )
    kernels.batched(x[None] if x.ndim == 1 else x, w, target, finish)


def _two_arrays(a: Arg, b: Arg) -> bool:
    """Two plain matrices of one framework: nothing is left to check, and small products are over sooner."""
    plain = a.array is not None and b.array is not None
    return plain and len(a.shape) == len(b.shape) == 2 and a.framework == b.framework


def _on_device(op: str, a: Arg, b: Arg, track, bias, activation, residual, certify, out, stream, dtype,
               format, accumulate, threshold):  # fmt: skip
    device.check_together(op, places(a, b))
    track = choose_track(op, track, a, b)
    result_dtype = result_dtype_of(op, dtype, a, b)
    fmt = choose_format(format, a, b)
    shape, _ = shapes(op, a, b)
    weight = b.value
    b = part_of_dual(b, track)
    check_axis(op, a, False, track)
    check_axis(op, b, True, track)
    epilogue = bias, activation, residual
    return gemm_cuda.matmul(op, a, b, weight, track, fmt, shape, str(result_dtype), epilogue, certify, out,
                            stream, accumulate, threshold)  # fmt: skip


def _matmul(op: str, a: Arg, b: Arg, track, bias, activation, residual, certify, out, stream, dtype, format,
            accumulate, threshold=None):  # fmt: skip
    check_accumulate(op, accumulate)
    if on_device(a, b):
        return _on_device(op, a, b, track, bias, activation, residual, certify, out, stream, dtype, format,
                          accumulate, threshold)  # fmt: skip
    check_stream(op, stream)
    track = choose_track(op, track, a, b)
    result_dtype = result_dtype_of(op, dtype, a, b)
    fmt = choose_format(format, a, b)
    shape, lead = shapes(op, a, b)
    if not certify and out is bias is activation is residual is None and _two_arrays(a, b):
        kernels, target = backend_for(a, b), np.empty(shape, result_dtype)
        kernels.product(left_matrix(kernels, a, track, fmt), right_matrix(kernels, b, track, fmt), target)
        return unwrap(target, a.framework)
    inputs = memory_of(a, b)
    weight = b.value
    b = part_of_dual(b, track)
    check_axis(op, a, False, track)
    check_axis(op, b, True, track)
    kernels = backend_for(a, b)
    epilogue = Epilogue(op, bias, activation, residual, shape, track == "reference", kernels)
    framework = check_frameworks(op, [a, b, *epilogue.args])
    array, result = output(op, out, shape, result_dtype, framework, (*inputs, *memory_of(*epilogue.args)))
    # 1-D operands are a row or a column: their axis is put in here and is not in `shape`
    full = lead + (a.shape[-2] if len(a.shape) > 1 else 1, b.shape[-1] if len(b.shape) > 1 else 1)
    target = array.reshape(full)
    if target.ndim > 2 and not target.flags.c_contiguous:  # its rows cannot be flattened without a copy
        target = np.empty(full, result_dtype)
    if certify:
        rows = target.reshape(math.prod(full[:-1]), full[-1])
        certificate = certified_product(op, kernels, a, b, weight, track, fmt, rows, epilogue, certify)
    else:
        finish = None if epilogue.empty else epilogue
        if track == "dual":
            a, hidden, up = branch(kernels, a, weight)
            finish = with_branch(hidden, up, epilogue)
        _compute(kernels, a, b, track, fmt, target, lead, finish)
    if target.base is not array and target is not array and not np.may_share_memory(target, array):
        array.reshape(full)[...] = target
    if out is None and framework == "numpy" and not shape:
        result = result[()]  # a number, as np.matmul of two vectors gives
    return (result, certificate) if certify else result


def matmul(
    a: Any,
    b: Any,
    *,
    track: str | None = None,
    bias: Any = None,
    activation: str | None = None,
    residual: Any = None,
    certify: bool | str = False,
    out: Any = None,
    stream: Any = None,
    dtype: Any = None,
    format: str | Format | None = None,
    accumulate: str = "promoted",
    threshold: float | None = None,
):
    """``activation(a @ b + bias) + residual`` on one of the tracks, with the shapes of ``np.matmul``.

    Args:
        a: (..., M, K) or (K,): float array, or a `QuantizedArray` blocked along its last axis.
        b: (..., K, N) or (K,): float array, `QuantizedArray` blocked along its second last axis, or
            `DualWeight`.
        track: "bf16": operands rounded to bfloat16, FP32 sums. "fp4": plain operands are quantised on the fly
            (a with ``search="fast"``, b with "full"), prepared ones used as they are. "dual": FP4 product
            plus the BF16 branch of a DualWeight. "reference": nothing is rounded, computed in the operands'
            own dtype. Omitted: "dual" for a DualWeight, "fp4" where an operand is a QuantizedArray, else
            "bf16".
        bias: (N,), added first. activation: "silu" or "gelu" (exact, by erf). residual: shape of the result,
            added last. All in FP32 on the accumulators.
        certify: True: also return a `Certificate` of the distance to the BF16 track; b must have two axes at
            most. "bound": the same without the randomised estimate. Norms of a prepared weight are kept;
            those of a plain b cost several products in FP64 every time.
        out: array for the result, sharing no memory with an input. dtype: dtype of the result; default: that
            of the plain operands (float32 if both are quantised, or for a mixture; float64 for a mixture with
            float64).
        stream: must be None for host arrays. On the GPU an int handle or any stream object; default: the
            framework's current stream. On another one the result belongs to it and nothing waits: order it
            with the streams that made the operands, and keep these until it is done (`record_stream` of a
            PyTorch tensor that is let go before).
        format: FP4 format of operands quantised on the fly; default: that of the prepared operand, else
            "nvfp4_exact".
        accumulate: how FP8 tensor cores sum: "promoted" to FP32 every 128 elements of K, or "fast", up to a
            tenth faster and coarser (they keep about 14 bits). Elsewhere sums are FP32 throughout.
        threshold: certify the product, and redo it on the BF16 track where its certified distance is over
            this share of its norm (`Certificate.relative`, 0.5 being half of it). Counted by
            `certify.fallbacks`. A GPU decides itself, without synchronising, where a is plain, b plain or a
            `QuantizedArray` and certify not True; the certificate waits when it is looked at. For others the
            host decides there, after a synchronisation.

    On the GPU nothing synchronises, memory comes from the framework, and the call can be captured in a CUDA
    graph; only ``certify=`` copies to the host and waits. "nvfp4_exact" and "fp8" multiply as E4M3 numbers
    (FP4 storage and numerics on FP8 tensor cores), "nvfp4" and "mxfp4" as the BF16 numbers that they decode
    to, all with FP32 outer scales. BF16 operands and their transposes are read where they lie; others, and
    those whose address or strides are no multiples of 16 bytes, negative or zero, are copied to BF16 first.
    float64 goes through float32, NaN and Inf pass through the quantiser, and the "reference" track is the
    framework's own product in float32 or float64.

    Returns:
        Array of the caller's framework, or ``(array, Certificate)`` with ``certify=True``.

    Raises:
        ShapeError: shapes, or the axis that an operand is blocked along, do not fit. DTypeError: not a float
            dtype.
        TypeError: mixed frameworks or devices; track "dual" without a DualWeight. NonFiniteError: NaN or Inf
            in an operand that is quantised on the CPU. CudaError, UnsupportedArchError: the GPU.

    >>> import numpy as np, fp4bf16 as fb
    >>> a, b = np.ones((2, 32), np.float32), np.full((32, 3), 0.5, np.float32)
    >>> fb.matmul(a, fb.quantize(b, axis=-2), track="fp4")[0]
    array([16., 16., 16.], dtype=float32)
    """

    def run(certify=certify, threshold=None):
        x, y = as_arg(a, "a"), as_arg(b, "b")
        return _matmul("matmul", x, y, track, bias, activation, residual, certify, out, stream, dtype, format,
                       accumulate, threshold)  # fmt: skip

    if threshold is not None:
        return within("matmul", a, threshold, certify, run)
    if certify or stream is not None or type(a) is np.ndarray:
        return run()
    options = track, activation, dtype, format, accumulate
    return gemm_cuda.planned("matmul", (a, b, bias, residual), out, options, run)


def linear(x: Any, weight: Any, bias: Any = None, **kwargs):
    """``x @ weight.T + bias`` with a weight (N, K) as PyTorch and diffusers keep it.

    Args:
        x: (..., K). weight: (N, K) float array or `QuantizedArray` blocked along its last axis, or a
            `DualWeight` (K, N). bias: (N,). Other arguments, errors and devices as for `matmul`.

    >>> import numpy as np, fp4bf16 as fb
    >>> fb.linear(np.ones((4, 32), np.float32), np.ones((8, 32), np.float32), np.ones(8, np.float32))[0, 0]
    np.float32(33.0)
    """
    names = ("track", "activation", "residual", "certify", "out", "stream", "dtype", "format",
             "accumulate")  # fmt: skip
    threshold = kwargs.pop("threshold", None)
    for name in kwargs:
        if name not in names:
            raise TypeError(f"linear: unexpected argument {name!r}{nearest(name, (*names, 'threshold'))}")
    rest = [None] * (len(names) - 1) + ["promoted"]
    if kwargs:
        rest = [kwargs.get(name, default) for name, default in zip(names, rest, strict=True)]
    track, activation, residual, certify, out, stream, *options = rest

    def run(certify=certify, threshold=None):
        left = as_arg(x, "x")
        gemm_cuda.expand_once(weight, track)
        w = linear_weight("linear", left, weight)
        return _matmul("linear", left, w, track, bias, activation, residual, certify, out, stream, *rest[6:],
                       threshold)  # fmt: skip

    if threshold is not None:
        return within("linear", x, threshold, certify, run)
    if certify or stream is not None or type(x) is np.ndarray:
        return run()
    options = track, activation, *options
    return gemm_cuda.planned("linear", (x, weight, bias, residual), out, options, run)
