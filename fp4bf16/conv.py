"""Convolution of NHWC pictures on the tracks, and its gradients.

x is (N, H, W, C), w (O, kh, kw, C), the result (N, OH, OW, O). A convolution is the product of the patches of
x, (N*OH*OW, kh*kw*C), with w as (O, kh*kw*C): FP4 blocks run along C within a tap, so that a patch of a
quantised picture is a picture's quantised values and x is quantised once, not once a tap.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from . import certify as certificates
from .certify import ActivationNorms, Certificate
from .dispatch import backend_for, check_stream
from .dual import DualWeight
from .epilogue import Epilogue, with_branch
from .errors import ShapeError, nearest
from .formats import Format, QuantizedArray
from .interop import BFLOAT16, output, outputs
from .operands import (
    Arg,
    as_arg,
    check_frameworks,
    choose_format,
    choose_track,
    host_arg,
    memory_of,
    part_of_dual,
    result_dtype_of,
)
from .quantize import quantize
from .tracks import resolve_track

_QUANTISED = ("fp4", "dual")  # tracks on which x and the bulk of w are FP4


# ---- what is asked for -------------------------------------------------------------------------------------


def _pads(padding: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """((top, bottom), (left, right)) of an int or of such pairs."""
    try:
        if isinstance(padding, int | np.integer):
            pads = ((int(padding),) * 2,) * 2
        else:
            (top, bottom), (left, right) = padding
            pads = ((int(top), int(bottom)), (int(left), int(right)))
    except (TypeError, ValueError):
        raise ShapeError(f"conv2d: padding is {padding!r}, but a whole number or ((top, bottom), (left, "
                         f"right)) is needed; pass for example padding=1") from None  # fmt: skip
    if min(pads[0] + pads[1]) < 0:
        raise ShapeError(f"conv2d: padding is {padding!r}, but it cannot be negative; crop x instead")
    return pads


def _stride(stride: Any) -> int:
    if isinstance(stride, bool) or not isinstance(stride, int | np.integer) or stride < 1:
        raise ShapeError(f"conv2d: stride is {stride!r}, but one whole number of at least 1 is needed; "
                         f"it holds for both axes")  # fmt: skip
    return int(stride)


def _geometry(x_shape, w_shape, stride, padding):
    """`Geometry` of convolving x_shape with w_shape; ShapeError where they do not fit."""
    if len(x_shape) != 4:
        raise ShapeError(f"conv2d: x has shape {tuple(x_shape)}, but four axes (N, H, W, C) are needed")
    if len(w_shape) != 4 or 0 in w_shape[1:3]:
        raise ShapeError(f"conv2d: w has shape {tuple(w_shape)}, but (O, kh, kw, C) is needed; transpose "
                         f"a PyTorch (O, C, kh, kw) weight with w.transpose(0, 2, 3, 1)")  # fmt: skip
    (n, h, w, c), (o, kh, kw, wc) = x_shape, w_shape
    if c != wc:
        raise ShapeError(f"conv2d: x {tuple(x_shape)} has {c} channels but w {tuple(w_shape)} takes {wc}; "
                         f"x is (N, H, W, C) and w is (O, kh, kw, C)")  # fmt: skip
    stride, ((top, bottom), (left, right)) = _stride(stride), _pads(padding)
    if top + h + bottom < kh or left + w + right < kw:
        raise ShapeError(f"conv2d: the kernel ({kh}, {kw}) is larger than the padded picture "
                         f"({top + h + bottom}, {left + w + right}); pad more")  # fmt: skip
    oh, ow = (top + h + bottom - kh) // stride + 1, (left + w + right - kw) // stride + 1
    return backend_for().Geometry(n, h, w, c, o, kh, kw, stride, top, left, oh, ow)


def _check_blocks(op: str, arg: Arg) -> None:
    """A quantised operand is blocked along C and stored as it is seen."""
    q = arg.value
    if isinstance(q, QuantizedArray) and q.order != tuple(range(q.ndim)):
        raise ShapeError(f"{op}: {arg.name} {q.shape} is blocked along axis {q.axis}, but pictures and "
                         f"weights are blocked along C, the last axis; quantize with axis=-1")  # fmt: skip


def _check_gradient(op: str, g: Arg, geo) -> None:
    want = (geo.n, geo.oh, geo.ow, geo.o)
    if g.array is None:
        raise TypeError(f"{op}: g is a {type(g.value).__name__}, but a gradient is a plain float array")
    if g.shape != want:
        raise ShapeError(f"{op}: g has shape {g.shape} but the convolution's result has shape {want}; g is "
                         f"the gradient in that result, with the same stride and padding")  # fmt: skip


# ---- operands as the track sees them -----------------------------------------------------------------------


def _exact(track: str, *args: Arg) -> bool:
    """Whether the "reference" track computes in float64."""
    return track == "reference" and any(a.dtype == np.float64 for a in args)


def _values(kernels, arg: Arg, track: str, fmt: Format, exact: bool, search: str) -> np.ndarray:
    """What the track multiplies, float32 or float64; on the BF16 track still to be rounded to BF16."""
    if arg.array is None:
        dense = np.ascontiguousarray(kernels.dense(arg.value, rounding=track == "bf16"))
        return dense.astype(np.float64) if exact else dense
    if track in _QUANTISED:
        return kernels.fake_quantize(kernels.values(arg.array), fmt, search)
    return kernels.values(arg.array, exact)


def _unrounded(arg: Arg, track: str) -> bool:
    """Whether `_values` of the operand are to be rounded (which is done while the patches are copied)."""
    return track == "bf16" and arg.array is not None and arg.dtype != BFLOAT16


def _weight(kernels, w: Arg, track: str, fmt: Format, exact: bool) -> np.ndarray:
    """Values (O, kh, kw, C) of the weight, rounded; of a DualWeight the master or the twin."""
    part = part_of_dual(w, track)
    values = _values(kernels, part, track, fmt, exact, "full")
    return kernels.rounded(values) if _unrounded(part, track) else values


def _branch(w: DualWeight) -> tuple[np.ndarray, np.ndarray]:
    """The low-rank branch as two convolutions: (rank, kh, kw, C), and 1x1 (rank, O); float32."""
    down, up = w.branch_factors()
    return np.ascontiguousarray(down.T).reshape(up.shape[0], *w.shape[1:]), up


def _hidden(kernels, x: Arg, w: DualWeight, geo) -> tuple[np.ndarray, np.ndarray]:
    """(T = bf16(bf16(x) * down) (pixels, rank), up (rank, O)), float32."""
    down, up = _branch(w)
    thin = geo._replace(o=up.shape[0])
    hidden = np.empty((geo.pixels, thin.o), np.float32)
    values = _values(kernels, x, "bf16", w.format, False, "fast")
    kernels.conv_forward(values, down.reshape(thin.o, geo.k), thin, hidden, _unrounded(x, "bf16"))
    kernels.round_bf16(hidden, hidden)
    return hidden, up


# ---- the primitive -----------------------------------------------------------------------------------------


def conv2d(x, w, *, stride=1, padding=0, bias=None, activation=None, residual=None, track=None, format=None,
           certify=False, dtype=None, out=None, stream=None):  # fmt: skip
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
        out: array that the result is written to. stream: None for host arrays.

    Returns:
        (N, OH, OW, O) of x's framework, OH = (top + H + bottom - kh) // stride + 1 and OW alike; with
        `certify` a pair of it and the `Certificate`.

    Raises:
        ShapeError: shapes, axes, stride or padding do not fit. DTypeError: integers and the like. TypeError:
            mixed frameworks, or track="dual" without a DualWeight. NonFiniteError: NaN or Inf on FP4.

    >>> import numpy as np, fp4bf16 as fb
    >>> x, w = np.ones((1, 4, 4, 16), np.float32), np.ones((2, 3, 3, 16), np.float32)
    >>> fb.conv2d(x, w, padding=1)[0, :2, :2, 0].astype(int).tolist()
    [[64, 96], [96, 144]]
    """
    check_stream("conv2d", stream)
    x, w = host_arg(x, "x"), host_arg(w, "w")
    track, fmt = choose_track("conv2d", track, x, w), choose_format(format, x, w)
    geo = _geometry(x.shape, w.shape, stride, padding)
    for arg in (x, w):
        _check_blocks("conv2d", arg)
    kernels, exact, shape = backend_for(x, w), _exact(track, x, w), (geo.n, geo.oh, geo.ow, geo.o)
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
        finish = with_branch(*_hidden(kernels, x, w.value, geo), finish or (lambda *_: None))
    values = _values(kernels, x, track, fmt, exact, "fast")
    matrix = _weight(kernels, w, track, fmt, exact).reshape(geo.o, geo.k)
    kernels.conv_forward(values, matrix, geo, rows, _unrounded(x, track), finish)


# ---- certified ---------------------------------------------------------------------------------------------


def _certified(kernels, x: Arg, w: Arg, geo, track, fmt, exact, rows, epilogue, certify) -> Certificate:
    """rows = the convolution with its epilogue, and its certificate."""
    if certify not in (True, "bound"):
        raise ValueError(f"conv2d: certify is {certify!r}, but True, False or 'bound' is needed")
    plain, parts = x, {}
    if track in _QUANTISED and x.array is not None:  # quantised here for the quantiser's sums
        outer = None if fmt.default_outer is None else "image"
        x = as_arg(quantize(x.value, fmt, outer=outer, search="fast"), "x")
    y = np.empty(rows.shape, np.float64 if exact else np.float32)
    if track == "dual":
        hidden, up = _hidden(kernels, plain, w.value, geo)
        parts["hidden"] = np.array([np.linalg.norm(hidden.astype(np.float64))])
        twin = as_arg(w.value.twin, "w")
        _convolve(kernels, x, twin, geo, "fp4", fmt, exact, y, with_branch(hidden, up, lambda *_: None))
    else:
        _convolve(kernels, x, w, geo, track, fmt, exact, y, None)
    found = certificates.same()
    if track != "bf16":
        norms, weight, matrix = _norms(kernels, x, w, geo, track, fmt, exact)
        factor = certificates.conv_factor((geo.kh, geo.kw), (geo.stride, geo.stride))
        if certify is True:
            unseen = 0.0 if plain.array is not None else factor * norms.error * weight.sigma
            parts |= {"estimate": _sketch(kernels, plain, matrix, geo, y) + unseen, "confidence": 1 - 1e-3}
        added = certificates.added_norms(geo.pixels, epilogue.bias, epilogue.residual)
        found = certificates.certificate(
            norms, weight, k=geo.k, columns=y.size, dtype=str(rows.dtype), activation=epilogue.name,
            hidden_rows=geo.pixels,
            added=np.array([np.linalg.norm(added)]), epilogue=not epilogue.empty, factor=factor,
            product_norm=float(np.linalg.norm(y.astype(np.float64))), **parts,
        )  # fmt: skip
        found = replace(found, rows=None)
    epilogue(y, slice(0, geo.pixels), slice(0, geo.o))
    kernels.store(y, rows)
    return found


def _norms(kernels, x: Arg, w: Arg, geo, track, fmt, exact):
    """(norms of x as one row, norms of w, the BF16 track's weight (O, k)).

    An output pixel meets several input pixels, so only the norm of the whole tensor goes into the bound:
    |patches(x)|_F <= conv_factor |x|_F.
    """
    if isinstance(x.value, QuantizedArray) and x.value.stats is not None:
        norms = certificates.activation_norms(x.value.stats, geo.c)
    else:
        pixels = _values(kernels, x, track, fmt, exact, "fast").reshape(math.prod(x.shape[:3]), geo.c)
        norms = certificates.plain_norms(pixels, rounded=x.array is None)
    norms = ActivationNorms(*(np.array([v]) for v in (norms.norm, norms.used, norms.error)), norms.overflow)
    used = _weight(kernels, w, track, fmt, exact).reshape(geo.o, geo.k)
    if isinstance(w.value, DualWeight):
        return norms, w.value.norms(track), w.value.master_values().T
    if isinstance(w.value, QuantizedArray):
        return norms, certificates.quantized_weight_norms(w.value, lambda: used), used
    matrix = _weight(kernels, w, "bf16", fmt, False).reshape(geo.o, geo.k)
    return norms, certificates.weight_norms(matrix, used), matrix


def _sketch(kernels, x: Arg, matrix: np.ndarray, geo, y: np.ndarray, columns=16, delta=1e-3) -> float:
    """A limit that |bf16(x) * w - y|_F exceeds with probability `delta` at most.

    `certify.sketch` with its product X (W^T G) as a convolution to `columns` channels.
    """
    g = certificates.gaussian(geo.o, columns)
    values = _values(kernels, x, "bf16", None, False, "fast")
    values = (kernels.rounded(values) if _unrounded(x, "bf16") else values).astype(np.float64)
    through = np.empty((geo.pixels, columns))
    kernels.conv_forward(values, g.T @ matrix.astype(np.float64), geo._replace(o=columns), through, False)
    through -= y.astype(np.float64) @ g
    return float(np.linalg.norm(through)) * certificates.sketch_factor(columns, delta) / math.sqrt(columns)


# ---- gradients ---------------------------------------------------------------------------------------------


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
    check_stream("conv2d_dgrad", stream)
    g, w = host_arg(g, "g"), host_arg(w, "w")
    track, fmt = choose_track("conv2d_dgrad", track, g, w), choose_format(format, g, w)
    geo = _geometry(input_shape, w.shape, stride, padding)
    dtype = result_dtype_of("conv2d_dgrad", dtype, g, w)
    return _dgrad("conv2d_dgrad", g, w, geo, track, fmt, dtype, out, memory_of(g, w))


def _dgrad(op: str, g: Arg, w: Arg, geo, track: str, fmt: Format, dtype, out, inputs) -> Any:
    """`conv2d_dgrad` on the track that was chosen; `out` shares no memory with `inputs`."""
    _check_gradient(op, g, geo)
    _check_blocks(op, w)
    framework, shape = check_frameworks(op, [g, w]), (geo.n, geo.h, geo.w, geo.c)
    owned, returned = output(op, out, shape, dtype, framework, inputs)
    target = owned if owned.flags.c_contiguous else np.empty(shape, dtype)
    _input_gradient(g, w, geo, track, fmt, target)
    if target is not owned:
        owned[...] = target
    return returned


def _input_gradient(g: Arg, w: Arg, geo, track: str, fmt: Format, target: np.ndarray) -> None:
    kernels, exact = backend_for(g, w), _exact(track, g, w)
    values, rounding = kernels.values(g.array, exact), track != "reference" and g.dtype != BFLOAT16
    matrix = _weight(kernels, w, track, fmt, exact)
    if track != "dual":
        kernels.conv_dgrad(values, matrix, geo, target, rounding)
        return
    # dX = dgrad(g, twin) + dgrad(bf16(g up^T), down)
    down, up = _branch(w.value)
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
    check_stream("conv2d_wgrad", stream)
    g, x = host_arg(g, "g"), host_arg(x, "x")
    track = resolve_track(track, "bf16" if x.array is not None else "fp4")
    kh, kw = (int(n) for n in kernel_size)
    geo = _geometry(x.shape, (*g.shape[3:], kh, kw, *x.shape[3:]), stride, padding)
    dtype, fmt = result_dtype_of("conv2d_wgrad", dtype, g, x), choose_format(format, g, x)
    return _wgrad("conv2d_wgrad", g, x, geo, track, fmt, dtype, out, memory_of(g, x))


def _wgrad(op: str, g: Arg, x: Arg, geo, track: str, fmt: Format, dtype, out, inputs) -> Any:
    """`conv2d_wgrad` on the track that was chosen; `out` shares no memory with `inputs`."""
    _check_gradient(op, g, geo)
    _check_blocks(op, x)
    framework, shape = check_frameworks(op, [g, x]), (geo.o, geo.kh, geo.kw, geo.c)
    target, returned = output(op, out, shape, dtype, framework, inputs)
    kernels, exact = backend_for(g, x), _exact(track, g, x)
    values = _values(kernels, x, track, fmt, exact, "fast")
    gradient = kernels.values(g.array, exact)
    if exact:
        values, gradient = values.astype(np.float64, copy=False), gradient.astype(np.float64, copy=False)
    round_g = track != "reference" and g.dtype != BFLOAT16
    dw = kernels.conv_wgrad(gradient, values, geo, _unrounded(x, track), round_g)
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
    check_stream("conv2d_vjp", stream)
    g, x, w = host_arg(g, "g"), host_arg(x, "x"), host_arg(w, "w")
    track, fmt = choose_track("conv2d_vjp", track, x, w), choose_format(format, x, w)
    check_frameworks("conv2d_vjp", [x, w, g])
    track_x, track_w = _kept(x, track, "save", save), _kept(w, track, "backward", backward)
    out, memory = outputs("conv2d_vjp", out, ("dx", "dw", "dbias")), memory_of(g, x, w)
    geo = _geometry(x.shape, w.shape, stride, padding)
    _check_gradient("conv2d_vjp", g, geo)
    dtypes = [a.dtype for a in (x, w) if a.dtype is not None] or [g.dtype]
    dx = dw = None
    if needs[0]:
        dx = _dgrad("conv2d_vjp", g, w, geo, track_w, fmt, dtypes[0], out[0], memory)
    if needs[1]:
        dw = _wgrad("conv2d_vjp", g, x, geo, track_x, fmt, dtypes[-1], out[1], memory)
    return dx, dw, _dbias(g, track, out[2], memory) if needs[2] else None


_KEPT = {"save": ("fp4", "bf16"), "backward": ("track", "master")}


def _kept(arg: Arg, track: str, name: str, value: str) -> str:
    """The track on which an operand enters its gradient's product."""
    if value not in _KEPT[name]:
        raise ValueError(f"conv2d_vjp: {name}: {value!r} is not known{nearest(value, _KEPT[name])}")
    if track not in _QUANTISED or value == _KEPT[name][0]:
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
