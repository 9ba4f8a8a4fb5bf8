"""Convolution of pictures and its three gradients, as sums over the taps of the kernel.

Pictures are (N, H, W, C), weights (O, kh, kw, C), results (N, OH, OW, O) with OH = (top + H + bottom - kh) //
stride + 1 and OW alike. Everything is computed and returned in float64: these functions say what the result
is, the fast kernels say how near they come to it.

    y[n, p, q, o] = bias[o] + sum_{i, j, c} x[n, p*stride + i - top, q*stride + j - left, c] * w[o, i, j, c]

with x taken as 0 outside the picture (what every framework calls convolution is this cross-correlation).
"""

from __future__ import annotations

import numpy as np

from .gemm import epilogue, round_bf16
from .quantize import dequantize, quantize


def padding_pairs(padding) -> tuple[tuple[int, int], tuple[int, int]]:
    """((top, bottom), (left, right)) of an int or of such pairs.

    >>> padding_pairs(1)
    ((1, 1), (1, 1))
    """
    if isinstance(padding, int | np.integer):
        return (int(padding),) * 2, (int(padding),) * 2
    (top, bottom), (left, right) = padding
    return (int(top), int(bottom)), (int(left), int(right))


def output_size(size: int, kernel: int, stride: int, pads: tuple[int, int]) -> int:
    """Positions at which the kernel lies wholly inside the padded picture."""
    return (pads[0] + size + pads[1] - kernel) // stride + 1


def _pad(x: np.ndarray, pads) -> np.ndarray:
    return np.pad(np.asarray(x, np.float64), ((0, 0), *pads, (0, 0)))


def _taps(kernel_size, stride: int, oh: int, ow: int):
    """For each tap (i, j): the slices of the padded picture that it meets, one element for each output."""
    for i in range(kernel_size[0]):
        for j in range(kernel_size[1]):
            rows = slice(i, i + stride * (oh - 1) + 1, stride)
            columns = slice(j, j + stride * (ow - 1) + 1, stride)
            yield i, j, rows, columns


def conv2d(x, w, stride: int = 1, padding=0, bias=None) -> np.ndarray:
    """x (N, H, W, C) * w (O, kh, kw, C) -> float64 (N, OH, OW, O).

    >>> conv2d(np.ones((1, 4, 4, 2)), np.ones((3, 3, 3, 2)), padding=1)[0, :, :, 0]
    array([[ 8., 12., 12.,  8.],
           [12., 18., 18., 12.],
           [12., 18., 18., 12.],
           [ 8., 12., 12.,  8.]])
    """
    pads, w = padding_pairs(padding), np.asarray(w, np.float64)
    padded = _pad(x, pads)
    oh, ow = (output_size(x.shape[a], w.shape[a], stride, pads[a - 1]) for a in (1, 2))
    y = np.zeros((x.shape[0], oh, ow, w.shape[0]))
    for i, j, rows, columns in _taps(w.shape[1:3], stride, oh, ow):
        y += padded[:, rows, columns] @ w[:, i, j].T
    return y if bias is None else y + np.asarray(bias, np.float64)


def conv2d_dgrad(g, w, input_shape, stride: int = 1, padding=0) -> np.ndarray:
    """Gradient in x of sum(g * conv2d(x, w)): each tap sends g back to where it read.

    >>> conv2d_dgrad(np.ones((1, 2, 2, 1)), np.ones((1, 2, 2, 1)), (1, 3, 3, 1))[0, :, :, 0]
    array([[1., 2., 1.],
           [2., 4., 2.],
           [1., 2., 1.]])
    """
    g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
    (top, bottom), (left, right) = padding_pairs(padding)
    n, height, width, channels = input_shape
    padded = np.zeros((n, top + height + bottom, left + width + right, channels))
    for i, j, rows, columns in _taps(w.shape[1:3], stride, g.shape[1], g.shape[2]):
        padded[:, rows, columns] += g @ w[:, i, j]
    return padded[:, top : top + height, left : left + width]


def conv2d_wgrad(g, x, kernel_size, stride: int = 1, padding=0) -> np.ndarray:
    """Gradient in w of sum(g * conv2d(x, w)): for each tap the product of g with what the tap read.

    >>> conv2d_wgrad(np.ones((1, 2, 2, 1)), np.ones((1, 3, 3, 1)), (2, 2))[0, :, :, 0]
    array([[4., 4.],
           [4., 4.]])
    """
    g, padded = np.asarray(g, np.float64), _pad(x, padding_pairs(padding))
    dw = np.zeros((g.shape[3], *kernel_size, x.shape[3]))
    for i, j, rows, columns in _taps(kernel_size, stride, g.shape[1], g.shape[2]):
        dw[:, i, j] = np.einsum("npqo,npqc->oc", g, padded[:, rows, columns])
    return dw


def conv2d_vjp(g, x, w, stride: int = 1, padding=0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dx, dw, dbias) of sum(g * conv2d(x, w, bias))."""
    dx = conv2d_dgrad(g, w, x.shape, stride, padding)
    dw = conv2d_wgrad(g, x, w.shape[1:3], stride, padding)
    return dx, dw, np.asarray(g, np.float64).sum((0, 1, 2))


#: (a, r) -> the taps of one side of a 3x3 kernel that lie on pixel y + a - 1 + r of the small pictures when
#: the kernel stands on pixel 2 y + a of the upsampled ones.
PHASE_TAPS = {(0, 0): (0,), (0, 1): (1, 2), (1, 0): (0, 1), (1, 1): (2,)}


def phase_weights(w) -> np.ndarray:
    """w (O, 3, 3, C) -> (O, 2, 2, 2, 2, C) of w's dtype, for `upsample_conv`: [:, a, b] is the 2x2 kernel of
    the pixels (2 y + a, 2 x + b) of the result. Taps are added up line by line, in ascending order.

    >>> phase_weights(np.arange(9.0).reshape(1, 3, 3, 1))[0, 1, 0, :, :, 0]  # {0, 1} or {2} by {0} or {1, 2}
    array([[ 3., 12.],
           [ 6., 15.]])
    """
    w = np.asarray(w)
    out = np.zeros((w.shape[0], 2, 2, 2, 2, w.shape[3]), w.dtype)
    for (a, r), rows in PHASE_TAPS.items():
        for (b, s), columns in PHASE_TAPS.items():
            total = None
            for i in rows:
                for j in columns:
                    total = w[:, i, j] if total is None else total + w[:, i, j]
            out[:, a, b, r, s] = total
    return out


def upsample_conv(x, w, bias=None, track: str = "bf16", fmt: str = "nvfp4_exact") -> np.ndarray:
    """conv2d with padding 1 of w (O, 3, 3, C) on x (N, H, W, C), whose pixels count as 2 x 2 each, as four
    convolutions of x itself: float64 (N, 2H, 2W, O).

    A track rounds or quantises the `phase_weights`, each phase of an output channel being an output channel.
    """
    n, height, width, c = x.shape
    kernels = phase_weights(w)
    x, flat = operands(x, kernels.reshape(-1, 2, 2, c), track, fmt)
    kernels = np.asarray(flat, np.float64).reshape(kernels.shape)
    y = np.zeros((n, 2 * height, 2 * width, w.shape[0]))
    for a in (0, 1):
        for b in (0, 1):
            pads = ((1 - a, a), (1 - b, b))
            y[:, a::2, b::2] = conv2d(x, kernels[:, a, b], 1, pads)
    return y if bias is None else y + np.asarray(bias, np.float64)


def operands(x, w, track: str = "bf16", fmt: str = "nvfp4_exact"):
    """The two arrays that `track` convolves: rounded to BF16, quantised and decoded, or as they are
    ("reference").

    On the FP4 track x is blocked along its channels with one outer scale a picture, w along its input
    channels within a tap with one outer scale an output channel; mxfp4 has no outer scale.
    """
    if track == "reference":
        return x, w
    if track == "bf16":
        return round_bf16(x), round_bf16(w)
    outer = None if fmt == "mxfp4" else "image"
    return (dequantize(quantize(x, fmt, outer=outer, search="fast")),
            dequantize(quantize(w, fmt, outer=outer, search="full")))  # fmt: skip


def conv2d_track(x, w, stride=1, padding=0, track="bf16", fmt="nvfp4_exact", **epilogue_args):
    """conv2d of the operands of `track`, then activation(y + bias) + residual."""
    return epilogue(conv2d(*operands(x, w, track, fmt), stride, padding), **epilogue_args)


def conv2d_vjp_track(g, x, w, stride: int = 1, padding=0, track: str = "bf16", fmt: str = "nvfp4_exact"):
    """(dx, dw, dbias) with the operands that the forward pass convolved: straight through the rounding and
    the
    quantiser (Bengio et al., arXiv:1308.3432). g is rounded to BF16 except on the "reference" track."""
    g = g if track == "reference" else round_bf16(g)
    return conv2d_vjp(g, *operands(x, w, track, fmt), stride, padding)
