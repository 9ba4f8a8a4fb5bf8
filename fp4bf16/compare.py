"""`compare`: what each number format does to the user's own array."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .interop import BFLOAT16, float_operand
from .quantize import dequantize, quantize

#: (label, arguments of `quantize`); None is plain bfloat16.
ARMS = (
    ("nvfp4_exact", {"format": "nvfp4_exact"}),
    ("nvfp4_exact fast", {"format": "nvfp4_exact", "search": "fast"}),
    ("nvfp4", {"format": "nvfp4"}),
    ("nvfp4 four_over_six", {"format": "nvfp4", "scale_rule": "four_over_six"}),
    ("mxfp4", {"format": "mxfp4"}),
    ("mxfp4 floor", {"format": "mxfp4", "scale_rule": "floor"}),
    ("fp8", {"format": "fp8"}),
    ("bf16", None),
)


class Comparison(NamedTuple):
    """One line of `compare`.

    Attributes:
        name: format, with its rule where there are several. relative_error: norm of the error over norm of x.
        sqnr_db: 20 log10 of its inverse, decibel. clipped: share of elements beyond the largest code of their
        block. underflowed: share of elements that are not zero but decode to zero. bits: stored bits an
        element, all scales and padding counted.
    """

    name: str
    relative_error: float
    sqnr_db: float
    clipped: float
    underflowed: float
    bits: float


def compare(x, axis=-1, file=None) -> list[Comparison]:
    """Print, for every format, what it does to `x`, and return the lines as data.

    Args:
        x: float array of any supported framework, at least one axis, finite.
        axis: the axis that blocks run along. file: where to print (standard output); False prints nothing.

    Raises:
        NonFiniteError: x holds NaN or Inf. ShapeError, DTypeError: as `quantize`.

    >>> import numpy as np, fp4bf16 as fb
    >>> rows = fb.compare(np.eye(32, dtype=np.float32), file=False)
    >>> rows[0].name, rows[0].relative_error
    ('nvfp4_exact', 0.0)
    """
    array = float_operand(x, "x").array
    lines = [_measure(array, axis, name, arguments) for name, arguments in ARMS]
    if file is not False:
        print(_table(array, lines), file=file)
    return lines


def _measure(x: np.ndarray, axis: int, name: str, arguments: dict | None) -> Comparison:
    if arguments is None:
        value = x.astype(np.float64)
        decoded = x.astype(np.float32).astype(BFLOAT16).astype(np.float64)
        return _line(
            name, float((value**2).sum()), float(((value - decoded) ** 2).sum()), 0, value, decoded, 16.0
        )
    xq = quantize(x, axis=axis, **arguments)
    bits = 8 * xq.nbytes / x.size if x.size else xq.format.bits
    stats = xq.stats
    return _line(name, stats.norm_sq, stats.error_norm_sq, stats.clipped, x, dequantize(xq), bits)


def _line(name, norm_sq, error_sq, clipped, x, decoded, bits) -> Comparison:
    error = math.sqrt(error_sq / norm_sq) if norm_sq else 0.0
    size = max(1, x.size)
    lost = int(np.count_nonzero((x != 0) & (decoded == 0)))
    return Comparison(
        name, error, -20 * math.log10(error) if error else math.inf, clipped / size, lost / size, bits
    )


def _table(x: np.ndarray, lines: list[Comparison]) -> str:
    head = f"{'format':20s} {'rel. error':>10s} {'SQNR dB':>8s} {'clipped':>8s} {'to zero':>8s} {'bits':>6s}"
    body = (
        f"{r.name:20s} {100 * r.relative_error:9.3f}% {r.sqnr_db:8.2f} {100 * r.clipped:7.3f}% "
        f"{100 * r.underflowed:7.3f}% {r.bits:6.2f}"
        for r in lines
    )
    return "\n".join([f"x {x.shape} {x.dtype}", head, *body])
