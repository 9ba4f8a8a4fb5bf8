"""Convolution of NHWC pictures on the tracks, and its gradients.

x is (N, H, W, C), w (O, kh, kw, C), the result (N, OH, OW, O). A convolution is the product of the patches of
x, (N*OH*OW, kh*kw*C), with w as (O, kh*kw*C): FP4 blocks run along C within a tap, so that a patch of a
quantised picture is a picture's quantised values and x is quantised once, not once a tap.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .errors import ShapeError, nearest
from .formats import QuantizedArray, get_format
from .interop import Operand, common_dtype, common_framework, float_operand, np_dtype, output
from .tracks import resolve_track

Pads = tuple[tuple[int, int], tuple[int, int]]


# ---- what is asked for -------------------------------------------------------------------------------------


def _pads(padding: Any) -> Pads:
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
    from .backends.cpu_conv import Geometry

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
    return Geometry(n, h, w, c, o, kh, kw, stride, top, left, oh, ow)


def _weight(w: Any) -> tuple[Operand | QuantizedArray, str]:
    """The weight, checked, and the track that it runs on when none is asked for."""
    if not isinstance(w, QuantizedArray):
        return float_operand(w, "w"), "bf16"
    if w.ndim != 4:
        raise ShapeError(f"conv2d: w has shape {w.shape}, but four axes (O, kh, kw, C) are needed")
    if w.order != (0, 1, 2, 3):
        raise ShapeError(f"conv2d: w {w.shape} is blocked along axis {w.axis}, but convolution weights "
                         f"(O, kh, kw, C) are blocked along C; quantize with axis=-1")  # fmt: skip
    return w, "fp4"


def _track(track: str | None, default: str) -> str:
    track = resolve_track(track, default)
    if track == "dual":
        raise TypeError("conv2d: track='dual' needs a DualWeight, but w is a plain or quantised array; "
                        "make one with DualWeight(w)")  # fmt: skip
    return track


# ---- operands as the track sees them -----------------------------------------------------------------------


def _exact(*operands: Operand) -> bool:
    """Whether the "reference" track computes in float64."""
    return any(o.dtype == "float64" for o in operands)


def _fake(x: np.ndarray, fmt: str, search: str) -> np.ndarray:
    """Decoded FP4 values of x, blocked along the last axis, one outer scale for each index of the first."""
    from .quantize import dequantize, quantize

    outer = None if get_format(fmt).default_outer is None else "image"
    return dequantize(quantize(x, fmt, outer=outer, search=search), dtype="float32")


def _input(x: Operand, track: str, fmt: str, exact: bool) -> tuple[np.ndarray, bool]:
    """Values of x, and whether they are still to be rounded to BF16 (while the patches are copied)."""
    from .backends import cpu_conv

    if track == "fp4":
        return _fake(cpu_conv.values(x.array), fmt, "fast"), False
    return cpu_conv.values(x.array, exact), track == "bf16" and x.dtype != "bfloat16"


def _weights(w: Operand | QuantizedArray, track: str, fmt: str, exact: bool) -> np.ndarray:
    """Values (O, kh, kw, C) of the weight on the track."""
    from .backends import cpu_conv

    if isinstance(w, QuantizedArray):
        from .quantize import dequantize

        value = np.asarray(dequantize(w, dtype="float32"))
        return cpu_conv.rounded(value) if track == "bf16" else value
    if track == "fp4":
        return _fake(cpu_conv.values(w.array), fmt, "full")
    return cpu_conv.rounded(w.array) if track == "bf16" else cpu_conv.values(w.array, exact)


def _vector(value: Any, name: str, length: int, dtype: np.dtype) -> tuple[Operand | None, np.ndarray | None]:
    if value is None:
        return None, None
    operand = float_operand(value, name)
    if operand.shape != (length,):
        raise ShapeError(f"conv2d: {name} has shape {operand.shape} but w has {length} output channels; "
                         f"pass a {name} of shape ({length},)")  # fmt: skip
    return operand, operand.array.astype(dtype, copy=False)


def _residual(value: Any, shape: tuple, dtype: np.dtype) -> tuple[Operand | None, np.ndarray | None]:
    if value is None:
        return None, None
    operand = float_operand(value, "residual")
    if operand.shape != shape:
        raise ShapeError(f"conv2d: residual has shape {operand.shape} but the result has shape {shape}; "
                         f"pass a residual of the result's shape")  # fmt: skip
    return operand, operand.array.astype(dtype, copy=False)


def _finish(bias, activation, residual):
    """What is done to each block of results: activation(y + bias) + residual, in place; None where nothing
    is."""
    if bias is None and activation is None and residual is None:
        return None

    def finish(y: np.ndarray, pixels: slice) -> None:
        if bias is not None:
            y += bias
        if activation is not None:
            activation(y)
        if residual is not None:
            y += residual[pixels]

    return finish


# ---- the primitive -----------------------------------------------------------------------------------------


def conv2d(x, w, *, stride=1, padding=0, bias=None, activation=None, residual=None, track=None,
           format="nvfp4_exact", certify=False, dtype=None, out=None, stream=None):  # fmt: skip
    """Convolve pictures x (N, H, W, C) with w (O, kh, kw, C): activation(x * w + bias) + residual.

    y[n, p, q, o] = sum over i, j, c of x[n, p*stride + i - top, q*stride + j - left, c] * w[o, i, j, c], x
    being 0 outside the picture (the cross-correlation that frameworks call convolution).

    Args:
        x: pictures, float64, float32, float16 or bfloat16. w: weights of such a dtype, or a `QuantizedArray`
            of shape (O, kh, kw, C) blocked along its last axis.
        stride: one whole number for both axes. padding: an int or ((top, bottom), (left, right)), zeros.
        bias: (O,). activation: None, "silu" or "gelu". residual: of the result's shape.
        track: "bf16" rounds both operands to BF16; "fp4" quantises x along C with one outer scale a picture,
            and w, if plain, along C within a tap with one outer scale an output channel, both in `format`;
            "reference" rounds nothing. Omitted: "fp4" for a `QuantizedArray`, else "bf16". Accumulation is in
            FP32.
        dtype: of the result; by default x's, or the wider one when x and w differ.
        out: array that the result is written to.

    Returns:
        (N, OH, OW, O) of x's framework, OH = (top + H + bottom - kh) // stride + 1 and OW alike.

    Raises:
        ShapeError: shapes, axes, stride or padding do not fit. DTypeError: integers and the like. TypeError:
            mixed frameworks, or track="dual" without a DualWeight. NonFiniteError: NaN or Inf on FP4.

    >>> import numpy as np, fp4bf16 as fb
    >>> x, w = np.ones((1, 4, 4, 16), np.float32), np.ones((2, 3, 3, 16), np.float32)
    >>> fb.conv2d(x, w, padding=1)[0, :2, :2, 0]
    array([[64., 96.],
           [96., 144.]], dtype=float32)
    """
    from .backends import cpu_conv

    xo = float_operand(x, "x")
    weight, default = _weight(w)
    track = _track(track, default)
    geo = _geometry(xo.shape, weight.shape, stride, padding)
    operands = [xo] if isinstance(weight, QuantizedArray) else [xo, weight]
    result = common_dtype(*operands) if dtype is None else np_dtype(dtype)
    exact = track == "reference" and _exact(*operands)
    compute, shape = np.dtype(np.float64 if exact else np.float32), (geo.n, geo.oh, geo.ow, geo.o)
    extra, b = _vector(bias, "bias", geo.o, compute)
    more, r = _residual(residual, shape, compute)
    operands += [o for o in (extra, more) if o is not None]
    framework = common_framework("conv2d", *operands)
    target, returned = output("conv2d", out, shape, result, framework, tuple(o.array for o in operands))
    values, rounding = _input(xo, track, format, exact)
    matrix = _weights(weight, track, format, exact).reshape(geo.o, geo.k)
    flat = target if target.flags.c_contiguous else np.empty(shape, result)
    finish = _finish(b, _activation(activation), None if r is None else r.reshape(-1, geo.o))
    cpu_conv.forward(values, matrix, geo, flat.reshape(-1, geo.o), rounding, finish)
    if flat is not target:
        target[...] = flat
    return returned


def conv2d_dgrad(g, w, input_shape, *, stride=1, padding=0, track=None, format="nvfp4_exact", dtype=None):
    """Gradient in x of sum(g * conv2d(x, w)): g (N, OH, OW, O), w (O, kh, kw, C) -> (N, H, W, C).

    Linear in g and in w: its own gradients are conv2d(., w) and conv2d_wgrad(g, .). Products of BF16 operands
    with FP32 accumulation; on the FP4 track w is the decoded weight (straight through the quantiser).
    `input_shape` is x's, which stride > 1 leaves open; the rest is as in `conv2d`. Raises what `conv2d`
    raises.

    >>> import numpy as np, fp4bf16 as fb
    >>> g, w = np.ones((1, 2, 2, 1), np.float32), np.ones((1, 2, 2, 1), np.float32)
    >>> fb.conv2d_dgrad(g, w, (1, 3, 3, 1))[0, :, :, 0]
    array([[1., 2., 1.],
           [2., 4., 2.],
           [1., 2., 1.]], dtype=float32)
    """
    from .backends import cpu_conv

    go = float_operand(g, "g")
    weight, default = _weight(w)
    track = _track(track, default)
    geo = _geometry(input_shape, weight.shape, stride, padding)
    _check_gradient(go, geo)
    operands = [go] if isinstance(weight, QuantizedArray) else [go, weight]
    framework = common_framework("conv2d_dgrad", *operands)
    result = common_dtype(*operands) if dtype is None else np_dtype(dtype)
    exact = track == "reference" and _exact(*operands)
    target, returned = output("conv2d_dgrad", None, (geo.n, geo.h, geo.w, geo.c), result, framework)
    cpu_conv.dgrad(cpu_conv.values(go.array, exact), _weights(weight, track, format, exact), geo, target,
                   track != "reference" and go.dtype != "bfloat16")  # fmt: skip
    return returned


def conv2d_wgrad(g, x, kernel_size, *, stride=1, padding=0, track=None, format="nvfp4_exact", dtype=None):
    """Gradient in w of sum(g * conv2d(x, w)): g (N, OH, OW, O), x (N, H, W, C) -> (O, kh, kw, C).

    Linear in g and in x: its own gradients are conv2d(x, .) and conv2d_dgrad(g, ., x.shape). Products of BF16
    operands with FP32 accumulation; on the FP4 track x is the decoded input (straight through the quantiser).
    `kernel_size` is (kh, kw); the rest is as in `conv2d`. Raises what `conv2d` raises.

    >>> import numpy as np, fp4bf16 as fb
    >>> g, x = np.ones((1, 2, 2, 1), np.float32), np.ones((1, 3, 3, 1), np.float32)
    >>> fb.conv2d_wgrad(g, x, (2, 2))[0, :, :, 0]
    array([[4., 4.],
           [4., 4.]], dtype=float32)
    """
    from .backends import cpu_conv

    go, xo = float_operand(g, "g"), float_operand(x, "x")
    track = _track(track, "bf16")
    kh, kw = kernel_size
    channels = go.shape[-1] if go.shape else 0
    geo = _geometry(xo.shape, (channels, int(kh), int(kw), *xo.shape[3:]), stride, padding)
    _check_gradient(go, geo)
    framework = common_framework("conv2d_wgrad", go, xo)
    result = common_dtype(go, xo) if dtype is None else np_dtype(dtype)
    exact = track == "reference" and _exact(go, xo)
    values, rounding = _input(xo, track, format, exact)
    gradient = cpu_conv.values(go.array, exact).reshape(-1, geo.o)
    dw = cpu_conv.wgrad(gradient, values, geo, rounding, track != "reference" and go.dtype != "bfloat16")
    target, returned = output("conv2d_wgrad", None, (geo.o, geo.kh, geo.kw, geo.c), result, framework)
    cpu_conv.store(dw.reshape(target.shape), target)
    return returned


def conv2d_vjp(g, x, w, *, stride=1, padding=0, track=None, format="nvfp4_exact", needs=(True, True, True)):
    """Gradients (dx, dw, dbias) of sum(g * conv2d(x, w, bias=b)): g (N, OH, OW, O), the rest as in `conv2d`.

    dx is `conv2d_dgrad` in x's dtype, dw `conv2d_wgrad` in w's (x's for a quantised w), dbias (O,) the sum of
    g, rounded to BF16 except on the "reference" track, over the pixels. `needs` says which are wanted; the
    others are None. The FP4 track is straight through the quantiser: the decoded operands are multiplied, and
    no gradient is masked (Bengio et al., arXiv:1308.3432). Raises what `conv2d` raises.

    >>> import numpy as np, fp4bf16 as fb
    >>> x, w = np.ones((1, 3, 3, 1), np.float32), np.ones((1, 2, 2, 1), np.float32)
    >>> dx, dw, db = fb.conv2d_vjp(np.ones((1, 2, 2, 1), np.float32), x, w)
    >>> dx.shape, dw.shape, float(db[0])
    ((1, 3, 3, 1), (1, 2, 2, 1), 4.0)
    """
    xo = float_operand(x, "x")
    weight, default = _weight(w)
    track = _track(track, default)
    keywords = {"stride": stride, "padding": padding, "track": track, "format": format}
    dw_dtype = xo.dtype if isinstance(weight, QuantizedArray) else weight.dtype
    if not isinstance(weight, QuantizedArray):
        common_framework("conv2d_vjp", xo, weight)
    dx = conv2d_dgrad(g, w, xo.shape, dtype=xo.dtype, **keywords) if needs[0] else None
    dw = conv2d_wgrad(g, x, weight.shape[1:3], dtype=dw_dtype, **keywords) if needs[1] else None
    return dx, dw, _dbias(g, track) if needs[2] else None


def _dbias(g: Any, track: str) -> Any:
    """Sum of g (N, OH, OW, O) over the pixels, in g's dtype."""
    from .backends import cpu_conv

    go = float_operand(g, "g")
    exact = track == "reference" and go.dtype == "float64"
    rows = cpu_conv.values(go.array, exact) if track == "reference" else cpu_conv.rounded(go.array)
    target, returned = output("conv2d_vjp", None, go.shape[-1:], go.array.dtype, go.framework)
    cpu_conv.store(cpu_conv.column_sums(rows.reshape(-1, rows.shape[-1])), target)
    return returned


def _check_gradient(g: Operand, geo) -> None:
    want = (geo.n, geo.oh, geo.ow, geo.o)
    if g.shape != want:
        raise ShapeError(f"conv2d: g has shape {g.shape} but the convolution's result has shape {want}; "
                         f"g is the gradient in that result, with the same stride and padding")  # fmt: skip


def _activation(name: str | None):
    if name is None:
        return None
    from .backends.cpu_gemm import ACTIVATIONS

    if name not in ACTIVATIONS:
        raise ValueError(f"activation: {name!r} is not an activation{nearest(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]
