"""Convolution of NHWC pictures on the tracks, and its gradients.

x is (N, H, W, C), w (O, kh, kw, C), the result (N, OH, OW, O). A convolution is the product of the patches of
x, (N*OH*OW, kh*kw*C), with w as (O, kh*kw*C): FP4 blocks run along C within a tap, so that a patch of a
quantised picture is a picture's quantised values and x is quantised once, not once a tap.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from . import certify as certificates
from . import conv_cuda
from .certify import ActivationNorms, Certificate
from .conv_operands import (
    QUANTISED,
    check_blocks,
    device_geometry,
    geometry,
    hidden_of,
    is_exact,
    lie_on_device,
    unrounded,
    values_of,
    weight_of,
)
from .conv_vjp import conv2d_dgrad, conv2d_vjp, conv2d_wgrad
from .dispatch import backend_for
from .dual import DualWeight
from .epilogue import (
    Epilogue,
    Squares,
    quantized_values,
    sketched_weight,
    squares,
    with_branch,
    within,
)
from .formats import QuantizedArray
from .gemm_cuda import planned
from .interop import output
from .operands import (
    Arg,
    as_arg,
    check_accumulate,
    check_frameworks,
    choose_format,
    choose_track,
    memory_of,
    result_dtype_of,
)
from .quantize import quantize

__all__ = ["conv2d", "conv2d_dgrad", "conv2d_vjp", "conv2d_wgrad"]


# ---- the primitive -----------------------------------------------------------------------------------------


def conv2d(x, w, *, stride=1, padding=0, bias=None, activation=None, residual=None, track=None, format=None,
           certify=False, dtype=None, out=None, stream=None, accumulate="promoted",
           threshold=None):  # fmt: skip
    """Convolve pictures x (N, H, W, C) with w (O, kh, kw, C): activation(x * w + bias) + residual.

    y[n, p, q, o] = sum over i, j, c of x[n, p*stride + i - top, q*stride + j - left, c] * w[o, i, j, c], x
    being 0 outside the picture (the cross-correlation that frameworks call convolution).

    Args:
        x: pictures, float64, float32, float16 or bfloat16, or a `QuantizedArray` blocked along C.
        w: weights of such a dtype, a `QuantizedArray` blocked along C, or a `DualWeight` of four axes.
        stride: one whole number for both axes. padding: an int or ((top, bottom), (left, right)), zeros.
        bias: (O,). activation: None, "silu" or "gelu". residual: of the result's shape.
        track: "bf16" rounds both operands to BF16; "fp4" quantises x along C with one outer scale a picture,
            and w, if plain, along C within a tap with one outer scale an output channel, both in `format`;
            "dual" adds the branch of a DualWeight in BF16; "reference" rounds nothing. Omitted: "dual" for a
            `DualWeight`, "fp4" for a `QuantizedArray`, else "bf16". Accumulation is in FP32.
        certify: True or "bound": also return a `Certificate` of the distance to the BF16 track's result.
        dtype: of the result; by default x's, or the wider one when x and w differ.
        out: array that the result is written to. stream, accumulate, threshold: as for `matmul`.

    On the GPU nothing synchronises, memory comes from the framework, and the call can be captured in a CUDA
    graph; only ``certify=`` copies to the host and waits. "nvfp4_exact" and "fp8" are convolved as E4M3
    numbers, "nvfp4" and "mxfp4" as the BF16 numbers that they decode to, with FP32 outer scales; an operand
    whose outer scale varies within a picture, or within an output channel of w, is decoded and rounded to
    BF16 (exact for "nvfp4_exact"). Pictures are read where they lie if they are bfloat16 with a multiple of 8
    channels, side by side, at addresses and strides of 16 bytes (a PyTorch channels_last tensor is, as
    ``x.permute(0, 2, 3, 1)``); others are copied first. NaN and Inf pass through the quantiser, and the
    "reference" track is the framework's own products.

    Returns:
        (N, OH, OW, O) of x's framework, OH = (top + H + bottom - kh) // stride + 1 and OW alike; with
        `certify` a pair of it and the `Certificate`.

    Raises:
        ShapeError: shapes, axes, stride or padding do not fit. DTypeError: integers and the like. TypeError:
            mixed frameworks or devices, or track="dual" without a DualWeight. NonFiniteError: NaN or Inf on
            FP4 on the CPU. CudaError, UnsupportedArchError: the GPU.

    >>> import numpy as np, fp4bf16 as fb
    >>> x, w = np.ones((1, 4, 4, 16), np.float32), np.ones((2, 3, 3, 16), np.float32)
    >>> fb.conv2d(x, w, padding=1)[0, :2, :2, 0].astype(int).tolist()
    [[64, 96], [96, 144]]
    """

    def run(certify=certify, threshold=None):
        return _conv2d(as_arg(x, "x"), as_arg(w, "w"), stride, padding, bias, activation, residual, track,
                       format, certify, dtype, out, stream, accumulate, threshold)  # fmt: skip

    if threshold is not None:
        return within("conv2d", x, threshold, certify, run)
    if certify or stream is not None or type(x) is np.ndarray:
        return run()
    options = track, activation, stride, padding, dtype, format, accumulate
    return planned("conv2d", (x, w, bias, residual), out, options, run)


def _conv2d(x: Arg, w: Arg, stride, padding, bias, activation, residual, track, format, certify, dtype, out,
            stream, accumulate, threshold=None):  # fmt: skip
    check_accumulate("conv2d", accumulate)
    gpu = lie_on_device("conv2d", stream, x, w)
    track, fmt = choose_track("conv2d", track, x, w), choose_format(format, x, w)
    geo = geometry(x.shape, w.shape, stride, padding)
    for arg in (x, w):
        check_blocks("conv2d", arg)
    if gpu:
        dtype, epilogue = str(result_dtype_of("conv2d", dtype, x, w)), (bias, activation, residual)
        return conv_cuda.conv2d(x, w, device_geometry(geo), track, fmt, dtype, epilogue, certify, out, stream,
                                accumulate, threshold)  # fmt: skip
    kernels, exact, shape = backend_for(x, w), is_exact(track, x, w), (geo.n, geo.oh, geo.ow, geo.o)
    epilogue = Epilogue("conv2d", bias, activation, residual, shape, track == "reference", kernels)
    framework = check_frameworks("conv2d", [x, w, *epilogue.args])
    target, returned = output("conv2d", out, shape, result_dtype_of("conv2d", dtype, x, w), framework,
                              memory_of(x, w, *epilogue.args))  # fmt: skip
    flat = target if target.flags.c_contiguous else np.empty(shape, target.dtype)
    rows = flat.reshape(geo.pixels, geo.o)
    if certify:
        certificate = _certified(kernels, x, w, geo, track, fmt, exact, rows, epilogue, certify)
    else:
        _convolve(kernels, x, w, geo, track, fmt, exact, rows, None if epilogue.empty else epilogue)
    if flat is not target:
        target[...] = flat
    return (returned, certificate) if certify else returned


def _convolve(kernels, x: Arg, w: Arg, geo, track, fmt, exact: bool, rows: np.ndarray, finish) -> None:
    """rows (pixels, O) = x * w on the track, then `finish` in place on each block of sums."""
    if track == "dual":  # FP4 products first, then the branch into the same sums
        finish = with_branch(*hidden_of(kernels, x, w.value, geo), finish or (lambda *_: None))
    values = values_of(kernels, x, track, fmt, exact, "fast")
    matrix = weight_of(kernels, w, track, fmt, exact).reshape(geo.o, geo.k)
    kernels.conv_forward(values, matrix, geo, rows, unrounded(x, track), finish)


# ---- certified ---------------------------------------------------------------------------------------------


def _certified(kernels, x: Arg, w: Arg, geo, track, fmt, exact, rows, epilogue, certify) -> Certificate:
    """rows = the convolution with its epilogue, and its certificate."""
    if certify not in (True, "bound"):
        raise ValueError(f"conv2d: certify is {certify!r}, but True, False or 'bound' is needed")
    prepared = isinstance(w.value, QuantizedArray) and x.array is not None
    if track == "fp4" and certify == "bound" and prepared:
        return _prepared(kernels, x, w, geo, fmt, rows, epilogue)
    plain, parts = x, {}
    if track in QUANTISED and x.array is not None:  # quantised here for the quantiser's sums
        outer = None if fmt.default_outer is None else "image"
        x = as_arg(quantize(x.value, fmt, outer=outer, search="fast"), "x")
    y = np.empty(rows.shape, np.float64 if exact else np.float32)
    if track == "dual":
        hidden, up = hidden_of(kernels, plain, w.value, geo)
        parts["hidden"] = np.array([np.linalg.norm(hidden.astype(np.float64))])
        twin = as_arg(w.value.twin, "w")
        _convolve(kernels, x, twin, geo, "fp4", fmt, exact, y, with_branch(hidden, up, lambda *_: None))
    else:
        _convolve(kernels, x, w, geo, track, fmt, exact, y, None)
    found = certificates.same()
    if track != "bf16":
        norms, weight, matrix = _norms(kernels, x, w, geo, track, fmt, exact)
        found = certificate_of(
            norms, weight, matrix, plain, geo, y, certify, plain.array is not None, dtype=str(rows.dtype),
            activation=epilogue.name, added=(epilogue.bias, epilogue.residual), epilogue=not epilogue.empty,
            **parts,
        )  # fmt: skip
    epilogue(y, slice(0, geo.pixels), slice(0, geo.o))
    kernels.store(y, rows)
    return found


def _prepared(kernels, x: Arg, w: Arg, geo, fmt, rows, epilogue) -> Certificate:
    """rows = the convolution of plain pictures with a prepared weight, as it is without a certificate, and
    its bound.
    """
    values, norms = quantized_values(kernels, x, fmt, geo.c, "image")
    matrix = weight_of(kernels, w, "fp4", fmt, False).reshape(geo.o, geo.k)
    found = Squares(epilogue)
    kernels.conv_forward(values, matrix, geo, rows, False, found)
    weight = certificates.quantized_weight_norms(w.value, lambda: matrix)
    return certificate_of(
        norms, weight, matrix, x, geo, found.norm, "bound", True, dtype=str(rows.dtype),
        activation=epilogue.name, added=(epilogue.bias, epilogue.residual), epilogue=not epilogue.empty,
    )  # fmt: skip


def certificate_of(norms: ActivationNorms, weight, matrix, x: Arg, geo, y, certify, seen: bool, *, added,
                   **parts) -> Certificate:  # fmt: skip
    """The certificate of y (pixels, O) = x * w, or of a y that is known by its norm alone.

    `matrix` (O, k) and `x` are what the BF16 track multiplies, for the estimate; `seen`: x is what the caller
    gave, and not what a quantiser left of it. `added`: bias and residual or None; the rest is as in
    `certify.certificate`.

    An output pixel meets several input pixels, so only the norm of the whole tensor goes into the bound:
    |patches(x)|_F <= conv_factor |x|_F.
    """
    factor = certificates.conv_factor((geo.kh, geo.kw), (geo.stride, geo.stride))
    norms = ActivationNorms(*(np.array([v]) for v in (norms.norm, norms.used, norms.error)), norms.overflow)
    if certify is True:
        unseen = 0.0 if seen else factor * norms.error * weight.sigma
        parts |= {"estimate": _sketch(backend_for(), x, matrix, geo, y) + unseen, "confidence": 1 - 1e-3}
    bias, residual = added  # |bias| + |residual row| over all pixels is at most this (Minkowski)
    added = 0.0 if bias is None else math.sqrt(geo.pixels) * certificates.norm(bias)
    if residual is not None:  # squares were added in float32 within a row
        added += math.sqrt(squares(residual.reshape(geo.pixels, geo.o))) * (1 + 2.0**-14)
    found = certificates.certificate(
        norms, weight, k=geo.k, columns=geo.pixels * geo.o, hidden_rows=geo.pixels, added=np.array([added]),
        factor=factor, product_norm=y if isinstance(y, float) else certificates.norm(y), **parts,
    )  # fmt: skip
    return replace(found, rows=None)


def _norms(kernels, x: Arg, w: Arg, geo, track, fmt, exact):
    """(norms of x, norms of w, the BF16 track's weight (O, k))."""
    if isinstance(x.value, QuantizedArray) and x.value.stats is not None:
        norms = certificates.activation_norms(x.value.stats, geo.c)
    else:
        pixels = values_of(kernels, x, track, fmt, exact, "fast").reshape(math.prod(x.shape[:3]), geo.c)
        norms = certificates.plain_norms(pixels, rounded=x.array is None)
    used = weight_of(kernels, w, track, fmt, exact).reshape(geo.o, geo.k)
    if isinstance(w.value, DualWeight):
        return norms, w.value.norms(track), w.value.master_values().T
    if isinstance(w.value, QuantizedArray):
        return norms, *sketched_weight(certificates.quantized_weight_norms(w.value, lambda: used), used)
    matrix = weight_of(kernels, w, "bf16", fmt, False).reshape(geo.o, geo.k)
    return norms, certificates.weight_norms(matrix, used), matrix


def _sketch(kernels, x: Arg, matrix: np.ndarray, geo, y: np.ndarray, columns=16, delta=1e-3) -> float:
    """A limit that |bf16(x) * w - y|_F exceeds with probability `delta` at most.

    `certify.sketch` with its product X (W^T G) as a convolution to `columns` channels.
    """
    g = certificates.gaussian(geo.o, columns)
    values = values_of(kernels, x, "bf16", None, False, "fast")
    values = (kernels.rounded(values) if unrounded(x, "bf16") else values).astype(np.float64)
    through = np.empty((geo.pixels, columns))
    kernels.conv_forward(values, g.T @ matrix.astype(np.float64), geo._replace(o=columns), through, False)
    through -= y.astype(np.float64) @ g
    return float(np.linalg.norm(through)) * certificates.sketch_factor(columns, delta) / math.sqrt(columns)
