"""Convolution of NHWC pictures on the tracks, and its gradients.

x is (N, H, W, C), w (O, kh, kw, C), the result (N, OH, OW, O). A convolution is the product of the patches of
x, (N*OH*OW, kh*kw*C), with w as (O, kh*kw*C): FP4 blocks run along C within a tap, so that a patch of a
quantised picture is a picture's quantised values and x is quantised once, not once a tap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .dispatch import backend_for, check_stream
from .dual import DualWeight
from .errors import DTypeError, ShapeError, nearest
from .formats import Format, QuantizedArray, get_format
from .interop import FLOATS, Operand, common_framework, float_operand, np_dtype, output, wrap
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


@dataclass(slots=True)
class _Weight:
    """The weight at the door; `array` is None where it is quantised or dual."""

    value: Any
    shape: tuple[int, ...]
    framework: str
    array: np.ndarray | None
    default: str
    name: str = "w"

    @property
    def dtype(self) -> str | None:
        return None if self.array is None else str(self.array.dtype)

    @property
    def memory(self) -> list[np.ndarray]:
        """What a result must not overlap."""
        q = self.value.twin if isinstance(self.value, DualWeight) else self.value
        if self.array is not None:
            return [self.array]
        return [wrap(p, "w").array for p in (q.packed, q.block_scale, q.outer_scale) if p is not None]


def _weight(w: Any) -> _Weight:
    if isinstance(w, DualWeight):
        if len(w.shape) != 4:
            raise ShapeError(f"conv2d: w is a DualWeight of shape {w.shape}, but (O, kh, kw, C) is needed; "
                             f"make it from the convolution's weight as it is")  # fmt: skip
        return _Weight(w, w.shape, w.framework, None, "dual")
    if not isinstance(w, QuantizedArray):
        o = float_operand(w, "w")
        return _Weight(w, o.shape, o.framework, o.array, "bf16")
    if w.ndim == 4 and w.order != (0, 1, 2, 3):
        raise ShapeError(f"conv2d: w {w.shape} is blocked along axis {w.axis}, but convolution weights "
                         f"(O, kh, kw, C) are blocked along C; quantize with axis=-1")  # fmt: skip
    return _Weight(w, w.shape, wrap(w.packed, "w").framework, None, "fp4")


def _track(track: str | None, w: _Weight) -> str:
    track = resolve_track(track, w.default)
    if track == "dual" and not isinstance(w.value, DualWeight):
        kind = "a plain array" if w.array is not None else "a QuantizedArray"
        raise TypeError(f"conv2d: track is 'dual' but w is {kind}, which has no BF16 branch; make it a "
                        f"fp4bf16.DualWeight or choose track='fp4' or 'bf16'")  # fmt: skip
    return track


def _format(format: Any, w: Any = None) -> Format:
    """The one asked for, else that of a prepared weight, else nvfp4_exact."""
    return get_format(format or getattr(w, "format", None) or "nvfp4_exact")


def _result(dtype: Any, *operands: Any) -> np.dtype:
    """The dtype asked for, else the operands' common one: float64 > float32 > the one that all share."""
    if dtype is None:
        known = {o.dtype for o in operands if o is not None and o.dtype is not None}
        return np_dtype(known.pop() if len(known) == 1 else "float64" if "float64" in known else "float32")
    result = np_dtype(dtype, "conv2d: dtype")
    if str(result) not in FLOATS:
        raise DTypeError(f"conv2d: dtype is {result}, but one of {', '.join(FLOATS)} is needed; leave it "
                         f"out for that of x")  # fmt: skip
    return result


# ---- operands as the track sees them -----------------------------------------------------------------------


def _exact(track: str, *operands: Any) -> bool:
    """Whether the "reference" track computes in float64."""
    return track == "reference" and any(o.dtype == "float64" for o in operands)


def _input(kernels, x: Operand, track: str, fmt: Format, exact: bool) -> tuple[np.ndarray, bool]:
    """Values of x, and whether they are still to be rounded to BF16 (while the patches are copied)."""
    if track in ("fp4", "dual"):
        return kernels.fake_quantize(kernels.values(x.array), fmt, "fast"), False
    return kernels.values(x.array, exact), track == "bf16" and x.dtype != "bfloat16"


def _matrix(kernels, w: _Weight, track: str, fmt: Format, exact: bool) -> np.ndarray:
    """Values (O, kh, kw, C) of the weight on the track; of a DualWeight the master or the twin."""
    value, array = w.value, w.array
    if isinstance(value, DualWeight):
        if track in ("fp4", "dual"):
            value = value.twin
        else:
            array = wrap(value.master, "w").array
    if array is None:
        dense = kernels.dense(value, rounding=track == "bf16").reshape(value.shape)
        return dense.astype(np.float64) if exact else dense
    if track in ("fp4", "dual"):
        return kernels.fake_quantize(kernels.values(array), fmt, "full")
    return kernels.rounded(array) if track == "bf16" else kernels.values(array, exact)


def _branch(w: DualWeight) -> tuple[np.ndarray, np.ndarray]:
    """The low-rank branch as two convolutions: (rank, kh, kw, C) and 1x1 (rank, O), float32 of BF16
    values."""
    down, up = w.branch_factors()
    return np.ascontiguousarray(down.T).reshape(up.shape[0], *w.shape[1:]), up


# ---- epilogue ----------------------------------------------------------------------------------------------


def _added(value: Any, name: str, shape: tuple[int, ...]) -> list[Operand]:
    """bias or residual, checked; nothing where there is none."""
    if value is None:
        return []
    operand = float_operand(value, name)
    if operand.shape != shape:
        what = "one number an output channel" if name == "bias" else "the shape of the result"
        raise ShapeError(f"conv2d: {name} has shape {operand.shape} but must be {shape}, {what}; "
                         f"broadcast it to that shape first")  # fmt: skip
    return [operand]


def _finish(kernels, added: dict[str, np.ndarray], activation: str | None, columns: int, exact: bool):
    """What is done in place to each block of sums: activation(y + bias) + residual; None where nothing is."""
    if activation is None and not added:
        return None
    if activation is not None and activation not in kernels.ACTIVATIONS:
        raise ValueError(f"conv2d: activation: {activation!r} is not an activation"
                         f"{nearest(activation, kernels.ACTIVATIONS)}")  # fmt: skip
    act = None if activation is None else kernels.ACTIVATIONS[activation]
    bias, residual = added.get("bias"), added.get("residual")
    bias = None if bias is None else bias.astype(np.float64 if exact else np.float32)
    residual = None if residual is None else residual.reshape(residual.size // max(1, columns), columns)

    def finish(y: np.ndarray, pixels: slice) -> None:
        if bias is not None:
            y += bias
        if act is not None:
            act(y)
        if residual is not None:
            y += residual[pixels]

    return finish


# ---- the primitive -----------------------------------------------------------------------------------------


def conv2d(x, w, *, stride=1, padding=0, bias=None, activation=None, residual=None, track=None,
           format=None, certify=False, dtype=None, out=None, stream=None):  # fmt: skip
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
    check_stream("conv2d", stream)
    xo, weight = float_operand(x, "x"), _weight(w)
    track, fmt = _track(track, weight), _format(format, w)
    geo = _geometry(xo.shape, weight.shape, stride, padding)
    shape = (geo.n, geo.oh, geo.ow, geo.o)
    extra = _added(bias, "bias", shape[3:]) + _added(residual, "residual", shape)
    framework = common_framework("conv2d", xo, weight, *extra)
    target, returned = output("conv2d", out, shape, _result(dtype, xo, weight), framework,
                              (xo.array, *weight.memory, *(o.array for o in extra)))  # fmt: skip
    kernels, exact = backend_for(xo), _exact(track, xo, weight)
    finish = _finish(kernels, {o.name: o.array for o in extra}, activation, geo.o, exact)
    values, rounding = _input(kernels, xo, track, fmt, exact)
    if track == "dual":
        finish = _with_branch(kernels, w, xo, geo, finish)
    matrix = _matrix(kernels, weight, track, fmt, exact).reshape(geo.o, geo.k)
    flat = target if target.flags.c_contiguous else np.empty(shape, target.dtype)
    kernels.conv_forward(values, matrix, geo, flat.reshape(geo.pixels, geo.o), rounding, finish)
    if flat is not target:
        target[...] = flat
    return returned


def _with_branch(kernels, w: DualWeight, x: Operand, geo, finish):
    """`finish` after the branch: FP4 products first, then bf16(bf16(x) * down) * up into the same sums."""
    down, up = _branch(w)
    hidden = np.empty((geo.pixels, up.shape[0]), np.float32)
    thin = geo._replace(o=up.shape[0])
    rounding = x.dtype != "bfloat16"
    kernels.conv_forward(kernels.values(x.array), down.reshape(thin.o, geo.k), thin, hidden, rounding)
    kernels.round_bf16(hidden, hidden)

    def both(y: np.ndarray, pixels: slice) -> None:
        y += hidden[pixels] @ up
        if finish is not None:
            finish(y, pixels)

    return both


# ---- gradients ---------------------------------------------------------------------------------------------


def conv2d_dgrad(g, w, input_shape, *, stride=1, padding=0, track=None, format=None, dtype=None):
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
    go, weight = float_operand(g, "g"), _weight(w)
    track, fmt = _track(track, weight), _format(format, w)
    geo = _geometry(input_shape, weight.shape, stride, padding)
    _check_gradient(go, geo)
    framework = common_framework("conv2d_dgrad", go, weight)
    shape = (geo.n, geo.h, geo.w, geo.c)
    target, returned = output("conv2d_dgrad", None, shape, _result(dtype, go, weight), framework)
    kernels, exact = backend_for(go), _exact(track, go, weight)
    values, rounding = kernels.values(go.array, exact), track != "reference" and go.dtype != "bfloat16"
    matrix = _matrix(kernels, weight, track, fmt, exact)
    if track != "dual":
        kernels.conv_dgrad(values, matrix, geo, target, rounding)
        return returned
    # dX = dgrad(g, twin) + dgrad(bf16(g up^T), down)
    down, up = _branch(w)
    through = np.empty((*go.shape[:3], up.shape[0]), np.float32)
    kernels.conv_forward(values, up, _pointwise(geo, up.shape[0]), through.reshape(geo.pixels, -1), rounding)
    bulk, low = np.empty(shape, np.float32), np.empty(shape, np.float32)
    kernels.conv_dgrad(values, matrix, geo, bulk, rounding)
    kernels.conv_dgrad(through, down, geo._replace(o=up.shape[0]), low, True)
    kernels.store(bulk + low, target)
    return returned


def _pointwise(geo, o: int):
    """Geometry of a 1x1 convolution of the results of `geo` to `o` channels."""
    return geo._replace(h=geo.oh, w=geo.ow, c=geo.o, o=o, kh=1, kw=1, stride=1, top=0, left=0)


def conv2d_wgrad(g, x, kernel_size, *, stride=1, padding=0, track=None, format=None, dtype=None):
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
    go, xo = float_operand(g, "g"), float_operand(x, "x")
    track, fmt = resolve_track(track, "bf16"), _format(format)
    kh, kw = (int(n) for n in kernel_size)
    geo = _geometry(xo.shape, (*go.shape[3:], kh, kw, *xo.shape[3:]), stride, padding)
    _check_gradient(go, geo)
    framework = common_framework("conv2d_wgrad", go, xo)
    shape = (geo.o, kh, kw, geo.c)
    target, returned = output("conv2d_wgrad", None, shape, _result(dtype, go, xo), framework)
    kernels, exact = backend_for(go), _exact(track, go, xo)
    values, rounding = _input(kernels, xo, track, fmt, exact)
    gradient = kernels.values(go.array, exact).reshape(geo.pixels, geo.o)
    if exact:
        values, gradient = values.astype(np.float64, copy=False), gradient.astype(np.float64, copy=False)
    dw = kernels.conv_wgrad(gradient, values, geo, rounding, track != "reference" and go.dtype != "bfloat16")
    kernels.store(dw.reshape(shape), target)
    return returned


def conv2d_vjp(g, x, w, *, stride=1, padding=0, track=None, format=None, needs=(True, True, True)):
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
    xo, weight = float_operand(x, "x"), _weight(w)
    track, fmt = _track(track, weight), _format(format, w)
    common_framework("conv2d_vjp", xo, weight)
    keywords = {"stride": stride, "padding": padding, "track": track, "format": fmt}
    dw_dtype = xo.dtype if weight.dtype is None else weight.dtype
    dx = conv2d_dgrad(g, w, xo.shape, dtype=xo.dtype, **keywords) if needs[0] else None
    dw = conv2d_wgrad(g, x, weight.shape[1:3], dtype=dw_dtype, **keywords) if needs[1] else None
    return dx, dw, _dbias(g, track) if needs[2] else None


def _dbias(g: Any, track: str) -> Any:
    """Sum of g (N, OH, OW, O) over the pixels, in g's dtype."""
    go, kernels = float_operand(g, "g"), backend_for()
    exact = track == "reference"
    rows = kernels.values(go.array, exact) if exact else kernels.rounded(go.array)
    target, returned = output("conv2d_vjp", None, go.shape[-1:], go.array.dtype, go.framework)
    kernels.store(kernels.column_sums(rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])), target)
    return returned


def _check_gradient(g: Operand, geo) -> None:
    want = (geo.n, geo.oh, geo.ow, geo.o)
    if g.shape != want:
        raise ShapeError(f"conv2d: g has shape {g.shape} but the convolution's result has shape {want}; "
                         f"g is the gradient in that result, with the same stride and padding")  # fmt: skip
