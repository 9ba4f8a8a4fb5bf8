"""Operands of a convolution at the door: whether they fit, and what each track convolves on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import device
from .conv_cuda import Geometry
from .dispatch import backend_for, check_stream
from .dual import DualWeight
from .errors import ShapeError
from .formats import Format, QuantizedArray
from .interop import BFLOAT16
from .operands import Arg, on_device, part_of_dual, places

QUANTISED = ("fp4", "dual")  # tracks on which x and the bulk of w are FP4


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


def geometry(x_shape, w_shape, stride, padding):
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


def lie_on_device(op: str, stream: Any, *args: Arg) -> bool:
    """Whether the operands lie on a GPU, all on one and of one framework."""
    if not on_device(*args):
        check_stream(op, stream)
        return False
    device.check_together(op, places(*args))
    return True


def device_geometry(geo) -> Geometry:
    return Geometry(*(getattr(geo, name) for name in Geometry._fields))


def check_blocks(op: str, arg: Arg) -> None:
    """A quantised operand is blocked along C and stored as it is seen."""
    q = arg.value
    if isinstance(q, QuantizedArray) and q.order != tuple(range(q.ndim)):
        raise ShapeError(f"{op}: {arg.name} {q.shape} is blocked along axis {q.axis}, but pictures and "
                         f"weights are blocked along C, the last axis; quantize with axis=-1")  # fmt: skip


def check_gradient(op: str, g: Arg, geo) -> None:
    want = (geo.n, geo.oh, geo.ow, geo.o)
    if g.array is None:
        raise TypeError(f"{op}: g is a {type(g.value).__name__}, but a gradient is a plain float array")
    if g.shape != want:
        raise ShapeError(f"{op}: g has shape {g.shape} but the convolution's result has shape {want}; g is "
                         f"the gradient in that result, with the same stride and padding")  # fmt: skip


# ---- operands as the track sees them -----------------------------------------------------------------------


def is_exact(track: str, *args: Arg) -> bool:
    """Whether the "reference" track computes in float64."""
    return track == "reference" and any(a.dtype == np.float64 for a in args)


def values_of(kernels, arg: Arg, track: str, fmt: Format, exact: bool, search: str) -> np.ndarray:
    """What the track multiplies, float32 or float64; on the BF16 track still to be rounded to BF16."""
    if arg.array is None:
        dense = np.ascontiguousarray(kernels.dense(arg.value, rounding=track == "bf16"))
        return dense.astype(np.float64) if exact else dense
    if track in QUANTISED:
        return kernels.fake_quantize(kernels.values(arg.array), fmt, search)
    return kernels.values(arg.array, exact)


def unrounded(arg: Arg, track: str) -> bool:
    """Whether `values_of` of the operand are to be rounded (which is done while the patches are copied)."""
    return track == "bf16" and arg.array is not None and arg.dtype != BFLOAT16


def weight_of(kernels, w: Arg, track: str, fmt: Format, exact: bool) -> np.ndarray:
    """Values (O, kh, kw, C) of the weight, rounded; of a DualWeight the master or the twin."""
    part = part_of_dual(w, track)
    values = values_of(kernels, part, track, fmt, exact, "full")
    return kernels.rounded(values) if unrounded(part, track) else values


def branch_of(w: DualWeight) -> tuple[np.ndarray, np.ndarray]:
    """The low-rank branch as two convolutions: (rank, kh, kw, C), and 1x1 (rank, O); float32."""
    down, up = w.branch_factors()
    return np.ascontiguousarray(down.T).reshape(up.shape[0], *w.shape[1:]), up


def hidden_of(kernels, x: Arg, w: DualWeight, geo) -> tuple[np.ndarray, np.ndarray]:
    """(T = bf16(bf16(x) * down) (pixels, rank), up (rank, O)), float32."""
    down, up = branch_of(w)
    thin = geo._replace(o=up.shape[0])
    hidden = np.empty((geo.pixels, thin.o), np.float32)
    values = values_of(kernels, x, "bf16", w.format, False, "fast")
    kernels.conv_forward(values, down.reshape(thin.o, geo.k), thin, hidden, unrounded(x, "bf16"))
    kernels.round_bf16(hidden, hidden)
    return hidden, up
