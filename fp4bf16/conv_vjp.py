"""Gradients of convolutions: in the pictures, in the weight, and all of a call's at once."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from . import device
from .conv_operands import (
    QUANTISED,
    branch_of,
    check_blocks,
    check_gradient,
    device_geometry,
    geometry,
    is_exact,
    lie_on_device,
    unrounded,
    values_of,
    weight_of,
)
from .conv_vjp_cuda import Gradients
from .dispatch import backend_for
from .errors import nearest
from .formats import Format, QuantizedArray
from .gemm_vjp_cuda import device_outputs
from .interop import BFLOAT16, output, outputs
from .operands import (
    Arg,
    as_arg,
    check_frameworks,
    choose_format,
    choose_track,
    memory_of,
    part_of_dual,
    result_dtype_of,
)
from .tracks import resolve_track


def conv2d_dgrad(g, w, input_shape, *, stride=1, padding=0, track=None, format=None, dtype=None, out=None,
                 stream=None):  # fmt: skip
    """Gradient in x of sum(g * conv2d(x, w)): g (N, OH, OW, O), w (O, kh, kw, C) -> (N, H, W, C).

    Linear in g and in w: its own gradients are conv2d(., w) and conv2d_wgrad(g, .). Products of BF16 operands
    with FP32 accumulation; on the FP4 track w is the decoded weight (straight through the quantiser).
    `input_shape` is x's, which stride > 1 leaves open; the rest is as in `conv2d`. Raises what `conv2d`
    raises.

    >>> import numpy as np
    >>> from fp4bf16.conv import conv2d_dgrad
    >>> g, w = np.ones((1, 2, 2, 1), np.float32), np.ones((1, 2, 2, 1), np.float32)
    >>> conv2d_dgrad(g, w, (1, 3, 3, 1))[0, :, :, 0]
    array([[1., 2., 1.],
           [2., 4., 2.],
           [1., 2., 1.]], dtype=float32)
    """
    g, w = as_arg(g, "g"), as_arg(w, "w")
    gpu = lie_on_device("conv2d_dgrad", stream, g, w)
    track, fmt = choose_track("conv2d_dgrad", track, g, w), choose_format(format, g, w)
    geo = geometry(input_shape, w.shape, stride, padding)
    dtype = result_dtype_of("conv2d_dgrad", dtype, g, w)
    gradients = _gradients("conv2d_dgrad", g, geo, fmt, memory_of(g, w), stream) if gpu else None
    return _dgrad("conv2d_dgrad", g, w, geo, track, fmt, dtype, out, memory_of(g, w), gradients)


def _gradients(op: str, g: Arg, geo, fmt: Format, inputs, stream) -> Gradients:
    """The gradients of device arrays, to be asked for one by one."""
    check_gradient(op, g, geo)
    return Gradients(op, g, device_geometry(geo), fmt, inputs, stream)


def _dgrad(op: str, g: Arg, w: Arg, geo, track: str, fmt: Format, dtype, out, inputs, gradients) -> Any:
    """`conv2d_dgrad` on the track that was chosen; `out` shares no memory with `inputs`."""
    check_gradient(op, g, geo)
    check_blocks(op, w)
    if gradients is not None:
        return gradients.pictures(w, part_of_dual(w, track), track, geo.c, dtype, out)
    framework, shape = check_frameworks(op, [g, w]), (geo.n, geo.h, geo.w, geo.c)
    owned, returned = output(op, out, shape, dtype, framework, inputs)
    target = owned if owned.flags.c_contiguous else np.empty(shape, dtype)
    _input_gradient(g, w, geo, track, fmt, target)
    if target is not owned:
        owned[...] = target
    return returned


def _input_gradient(g: Arg, w: Arg, geo, track: str, fmt: Format, target: np.ndarray) -> None:
    kernels, exact = backend_for(g, w), is_exact(track, g, w)
    values, rounding = kernels.values(g.array, exact), track != "reference" and g.dtype != BFLOAT16
    matrix = weight_of(kernels, w, track, fmt, exact)
    if track != "dual":
        kernels.conv_dgrad(values, matrix, geo, target, rounding)
        return
    # dX = dgrad(g, twin) + dgrad(bf16(g up^T), down)
    down, up = branch_of(w.value)
    thin, through = geo._replace(o=up.shape[0]), np.empty((*g.shape[:3], up.shape[0]), np.float32)
    pointwise = geo._replace(h=geo.oh, w=geo.ow, c=geo.o, o=thin.o, kh=1, kw=1, stride=1, top=0, left=0)
    kernels.conv_forward(values, up, pointwise, through.reshape(geo.pixels, thin.o), rounding)
    bulk, low = np.empty(target.shape, np.float32), np.empty(target.shape, np.float32)
    kernels.conv_dgrad(values, matrix, geo, bulk, rounding)
    kernels.conv_dgrad(through, down, thin, low, True)
    bulk += low
    kernels.store(bulk, target)


def conv2d_wgrad(g, x, kernel_size, *, stride=1, padding=0, track=None, format=None, dtype=None, out=None,
                 stream=None):  # fmt: skip
    """Gradient in w of sum(g * conv2d(x, w)): g (N, OH, OW, O), x (N, H, W, C) -> (O, kh, kw, C).

    Linear in g and in x: its own gradients are conv2d(x, .) and conv2d_dgrad(g, ., x.shape). Products of BF16
    operands with FP32 accumulation; on the FP4 track x is the decoded input (straight through the quantiser).
    `kernel_size` is (kh, kw); the rest is as in `conv2d`. Raises what `conv2d` raises.

    >>> import numpy as np
    >>> from fp4bf16.conv import conv2d_wgrad
    >>> g, x = np.ones((1, 2, 2, 1), np.float32), np.ones((1, 3, 3, 1), np.float32)
    >>> conv2d_wgrad(g, x, (2, 2))[0, :, :, 0]
    array([[4., 4.],
           [4., 4.]], dtype=float32)
    """
    g, x = as_arg(g, "g"), as_arg(x, "x")
    gpu = lie_on_device("conv2d_wgrad", stream, g, x)
    track = resolve_track(track, "bf16" if x.array is not None else "fp4")
    kh, kw = (int(n) for n in kernel_size)
    geo = geometry(x.shape, (*g.shape[3:], kh, kw, *x.shape[3:]), stride, padding)
    dtype, fmt = result_dtype_of("conv2d_wgrad", dtype, g, x), choose_format(format, g, x)
    gradients = _gradients("conv2d_wgrad", g, geo, fmt, memory_of(g, x), stream) if gpu else None
    return _wgrad("conv2d_wgrad", g, x, geo, track, fmt, dtype, out, memory_of(g, x), gradients)


def _wgrad(op: str, g: Arg, x: Arg, geo, track: str, fmt: Format, dtype, out, inputs, gradients) -> Any:
    """`conv2d_wgrad` on the track that was chosen; `out` shares no memory with `inputs`."""
    check_gradient(op, g, geo)
    check_blocks(op, x)
    if gradients is not None:
        return gradients.weight(x, track, dtype, out)
    framework, shape = check_frameworks(op, [g, x]), (geo.o, geo.kh, geo.kw, geo.c)
    target, returned = output(op, out, shape, dtype, framework, inputs)
    kernels, exact = backend_for(g, x), is_exact(track, g, x)
    values = values_of(kernels, x, track, fmt, exact, "fast")
    gradient = kernels.values(g.array, exact)
    if exact:
        values, gradient = values.astype(np.float64, copy=False), gradient.astype(np.float64, copy=False)
    round_g = track != "reference" and g.dtype != BFLOAT16
    dw = kernels.conv_wgrad(gradient, values, geo, unrounded(x, track), round_g)
    kernels.store(dw, target)
    return returned


def conv2d_vjp(g, x, w, *, stride=1, padding=0, track=None, format=None, needs=(True, True, True), save="fp4",
               backward="track", out=None, stream=None):  # fmt: skip
    """Gradients (dx, dw, dbias) of sum(g * conv2d(x, w, bias=b)): g (N, OH, OW, O), the rest as in `conv2d`.

    dx is `conv2d_dgrad` in x's dtype, dw `conv2d_wgrad` in w's (x's for a quantised w), dbias (O,) the sum of
    g, rounded to BF16 except on the "reference" track, over the pixels. `needs` says which are wanted; the
    others are None. The FP4 track is straight through the quantiser: the decoded operands are multiplied, and
    no gradient is masked (Bengio et al., arXiv:1308.3432). `save` and `backward` are those of `matmul_vjp`:
    with ``save="bf16"`` dw takes x itself, with ``backward="master"`` dx the BF16 weight. `out` has an array
    or None for each gradient. Raises what `conv2d` raises.

    >>> import numpy as np, fp4bf16 as fb
    >>> x, w = np.ones((1, 3, 3, 1), np.float32), np.ones((1, 2, 2, 1), np.float32)
    >>> dx, dw, db = fb.conv2d_vjp(np.ones((1, 2, 2, 1), np.float32), x, w)
    >>> dx.shape, dw.shape, float(db[0])
    ((1, 3, 3, 1), (1, 2, 2, 1), 4.0)
    """
    g, x, w = as_arg(g, "g"), as_arg(x, "x"), as_arg(w, "w")
    gpu = lie_on_device("conv2d_vjp", stream, x, w, g)
    track, fmt = choose_track("conv2d_vjp", track, x, w), choose_format(format, x, w)
    check_frameworks("conv2d_vjp", [x, w, g])
    track_x, track_w = _kept(x, track, "save", save), _kept(w, track, "backward", backward)
    out = (device_outputs if gpu else outputs)("conv2d_vjp", out, _NAMES)
    memory, geo = memory_of(g, x, w), geometry(x.shape, w.shape, stride, padding)
    check_gradient("conv2d_vjp", g, geo)
    gradients = _gradients("conv2d_vjp", g, geo, fmt, memory, stream) if gpu else None
    dtypes = [a.dtype for a in (x, w) if a.dtype is not None] or [g.dtype]
    shapes = x.shape, (geo.o, geo.kh, geo.kw, geo.c), (geo.o,)
    _check_out(out, needs, shapes, (dtypes[0], dtypes[-1], g.dtype), g, memory, gpu)
    dx = dw = None
    if needs[0]:
        dx = _dgrad("conv2d_vjp", g, w, geo, track_w, fmt, dtypes[0], out[0], memory, gradients)
    if needs[1]:
        if gradients is not None:
            gradients.summed = needs[2]
        dw = _wgrad("conv2d_vjp", g, x, geo, track_x, fmt, dtypes[-1], out[1], memory, gradients)
    if needs[2]:
        db = _dbias(g, track, out[2], memory) if gradients is None else gradients.bias(track, out[2])
    return dx, dw, db if needs[2] else None


def _check_out(out, needs, shapes, dtypes, g: Arg, memory, gpu: bool) -> None:
    """Raise for an `out` that does not fit, by the name of its gradient and before any of them is written."""
    for name, array, need, shape, dtype in zip(_NAMES, out, needs, shapes, dtypes, strict=True):
        op = f"conv2d_vjp: {name}"
        if array is None or not need:
            continue
        if gpu:
            device.out_operand(op, array, shape, str(dtype), replace(g.place, name="g"), memory)
        else:
            output(op, array, shape, dtype, g.framework, memory)


_NAMES = ("dx", "dw", "dbias")
_KEPT = {"save": ("fp4", "bf16"), "backward": ("track", "master")}


def _kept(arg: Arg, track: str, name: str, value: str) -> str:
    """The track on which an operand enters its gradient's product."""
    if value not in _KEPT[name]:
        raise ValueError(f"conv2d_vjp: {name}: {value!r} is not known{nearest(value, _KEPT[name])}")
    if track not in QUANTISED or value == _KEPT[name][0]:
        return track
    if isinstance(arg.value, QuantizedArray):
        raise TypeError(f"conv2d_vjp: {name} is {value!r} but {arg.name} is a QuantizedArray, which has no "
                        f"BF16 form; pass {arg.name} unquantised")  # fmt: skip
    return "bf16"


def _dbias(arg: Arg, track: str, out: Any, inputs) -> Any:
    """Sum of g (N, OH, OW, O) over the pixels, in g's dtype."""
    kernels, exact = backend_for(), track == "reference"
    rows = kernels.values(arg.array, exact) if exact else kernels.rounded(arg.array)
    target, returned = output("conv2d_vjp", out, arg.shape[-1:], arg.dtype, arg.framework, inputs)
    kernels.store(kernels.column_sums(rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])), target)
    return returned
