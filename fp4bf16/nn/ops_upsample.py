"""Recorded changes of size: nearest upsampling, the convolution behind it by phases, pooling."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from ..certify import Certificate, norm
from ..errors import ShapeError
from . import fused
from .ops_math import add, mul
from .ops_network import conv2d
from .ops_shape import reshape
from .tape import Op, Variable
from .xp import namespace

_upsample_op = Op(
    "upsample_nearest",
    lambda x: (fused.upsample_nearest(x), None),
    lambda g, inputs, node, needs: (_patch_sum_op(g),),
    lambda g, arrays, saved, needs: (fused.upsample_nearest_vjp(g),),
    keep=False,
)
_patch_sum_op = Op(
    "patch_sum",
    lambda x: (fused.upsample_nearest_vjp(x), None),
    lambda g, inputs, node, needs: (_upsample_op(g),),
    keep=False,
)


def upsample_nearest(x: Any) -> Variable:
    """Each pixel of x (N, H, W, C) as a 2 x 2 patch: (N, 2H, 2W, C)."""
    return _upsample_op(x)


_phase_weights_op = Op(
    "phase_weights",
    lambda w, made=None: (fused.phase_weights(w) if made is None else made, None),
    lambda g, inputs, node, needs, made=None: (_phase_taps_op(g),),
    lambda g, arrays, saved, needs, made=None: (fused.phase_weights_vjp(g),),
    keep=False,
)
_phase_taps_op = Op(
    "phase_taps",
    lambda g: (fused.phase_weights_vjp(g), None),
    lambda g, inputs, node, needs: (_phase_weights_op(g),),
    keep=False,
)
_interleave_op = Op(
    "interleave_phases",
    lambda y: (fused.interleave_phases(y), None),
    lambda g, inputs, node, needs: (_split_op(g),),
    lambda g, arrays, saved, needs: (fused.interleave_phases_vjp(g),),
    keep=False,
)
_split_op = Op(
    "split_phases",
    lambda y: (fused.interleave_phases_vjp(y), None),
    lambda g, inputs, node, needs: (_interleave_op(g),),
    keep=False,
)


def upsample_conv(
    x: Any,
    weight: Any,
    bias: Any = None,
    track: str | None = None,
    kernels: Any = None,
    twin: Any = None,
    certify: tuple[bool | str, list] | None = None,
) -> Variable:
    """``conv2d(upsample_nearest(x), weight, bias, padding=1)`` for weight (O, 3, 3, C), as a 2x2 convolution
    of x itself for each of the four phases of the result's pixels: (N, 2H, 2W, O) with 4/9 of the products.

    The weights are the sums of the taps that meet the same pixel of x, in the weight's dtype, and it is these
    that a track rounds or quantises, each phase of an output channel with an outer scale of its own. Without
    rounding the result is the same.

    kernels: these sums as an array (4 O, 2, 2, C), where they are known (`Parameter.phases`); twin: theirs,
    prepared once, that the forward multiplies in their place. certify: as in `linear`; the certificate is of
    what is returned (`docs/certificate.md`, section 2).
    """
    o, c = weight.shape[0], weight.shape[3]
    made = None if kernels is None else kernels.reshape(o, 2, 2, 2, 2, c)
    by_phase = reshape(_phase_weights_op(weight, made=made), (4 * o, 2, 2, c))
    four = None if bias is None else _four_times(bias)
    found = None if certify is None else (certify[0], [])
    y = _interleave_op(conv2d(x, by_phase, four, 1, 1, None, track, twin, found))
    if certify is not None:
        certify[1].append(_of_what_is_kept(found[1][0], y.data, bias))
    return y


def _four_times(bias: Any) -> Variable:
    """bias (O,) for the four phases of each channel: (4 O,)."""
    wide = namespace(bias.data if isinstance(bias, Variable) else bias).zeros((1, 4), bias.dtype)
    return reshape(add(reshape(bias, (-1, 1)), wide), (-1,))


def _of_what_is_kept(found: Certificate, y: np.ndarray, bias: Any) -> Certificate:
    """The certificate of all phases on all of the (H + 1) (W + 1) pixels, as that of the result y: what was
    left out is in the bound, but not in the norm that it is compared with. That norm is of y - bias, less
    what rounding to y can have added to it.
    """
    if not found.terms:  # ran on the BF16 track
        return found
    product = norm(y)
    if bias is not None:
        b = np.asarray(bias.data if isinstance(bias, Variable) else bias)
        product = max(0.0, norm(y - b) - 2.0**-22 * (product + math.sqrt(y.size / b.size) * norm(b)))
    limit = found.limit
    relative = limit / product if 0 < product < math.inf else (0.0 if limit == 0 else math.inf)
    return replace(found, relative=relative, terms=found.terms | {"product": product})


def avg_pool2(x: Any) -> Variable:
    """Mean of each 2 x 2 patch of x (N, H, W, C), H and W even: (N, H/2, W/2, C)."""
    if x.shape[1] % 2 or x.shape[2] % 2:
        raise ShapeError(
            f"avg_pool2: x is {x.shape[1]} x {x.shape[2]} pixels, but both must be even; pad or crop"
        )
    return mul(_patch_sum_op(x), 0.25)
