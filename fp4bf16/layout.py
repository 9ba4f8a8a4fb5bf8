"""How arrays are cut: the blocked axis, the groups that share an outer scale, rows of strided memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .errors import DTypeError, ShapeError, nearest
from .formats import Format, QuantizedArray
from .python_ref.quantize import MAX_EXPONENT, MIN_EXPONENT, SCALE_RULES
from .python_ref.stochastic import scale_rule_of

OUTERS = ("default", "row", "image", "head", "tensor")
ROUNDINGS, SEARCHES, POLICIES = ("nearest", "stochastic"), ("full", "fast"), ("raise", "propagate")


# ---- arguments of quantize ---------------------------------------------------------------------------------
def check_options(fmt: Format, rounding: str, scale_rule: str | None, search: str, nan: str) -> None:
    """`ValueError` for a word that is not known, or a rule that the format has not."""
    for name, value, known, what in (
        ("rounding", rounding, ROUNDINGS, "rounding"), ("search", search, SEARCHES, "search"),
        ("nan", nan, POLICIES, "policy"),
    ):  # fmt: skip
        if value not in known:
            raise ValueError(f"{name}: {value!r} is not a {what}{nearest(value, known)}")
    if rounding == "stochastic":
        scale_rule_of(fmt.name, scale_rule)
    elif scale_rule is not None and scale_rule not in SCALE_RULES[fmt.name]:
        known = [r for r in SCALE_RULES[fmt.name] if r]
        raise ValueError(
            f"scale_rule: {scale_rule!r} is not a rule of {fmt}{nearest(scale_rule, known)}"
            if known
            else f"scale_rule: {fmt} has no scale rules; leave scale_rule=None"
        )


def check_axis(axis: int, ndim: int, shape: Sequence[int]) -> int:
    """`axis`, counted from 0."""
    if ndim == 0:
        raise ShapeError(
            "quantize: x has no axes, but blocks run along one; pass an array of at least one axis"
        )
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer) or not -ndim <= axis < ndim:
        raise ShapeError(
            f"quantize: axis={axis!r}, but x of shape {tuple(shape)} has axes {-ndim} to {ndim - 1}; "
            f"pass one of these"
        )
    return int(axis) % ndim


def stored_order(ndim: int, axis: int) -> tuple[int, ...]:
    """Stored position of each logical axis when `axis` is moved last."""
    return tuple(ndim - 1 if i == axis else i - (i > axis) for i in range(ndim))


def check_out(out, fmt: Format, shape: tuple[int, ...], order: tuple[int, ...]) -> None:
    """An `out=` of quantize must be a container of the result's kind."""
    if not isinstance(out, QuantizedArray):
        raise TypeError(
            f"quantize: out is a {type(out).__name__}, but a QuantizedArray is needed; leave out=None"
        )
    if (out.format, out.shape, out.order) != (fmt, shape, order):
        raise ShapeError(
            f"quantize: out is {out.format} of shape {out.shape} stored in order {out.order}, but the result "
            f"is {fmt} of shape {shape} in order {order}; pass an out made by the same call"
        )


# ---- outer scales ------------------------------------------------------------------------------------------
def check_outer(outer, fmt: Format):
    """`outer` without "default": a word, None (the format has none), or exponents as they were given."""
    if isinstance(outer, str):
        if outer not in OUTERS:
            raise ValueError(f"quantize: outer={outer!r} is unknown{nearest(outer, OUTERS)}")
        outer = fmt.default_outer if outer == "default" else outer
    if fmt.default_outer is None and outer is not None:
        raise ValueError(f"quantize: outer={outer!r}, but {fmt} has no outer scale; pass outer=None")
    if fmt.default_outer is not None and outer is None:
        raise ValueError(f"quantize: outer=None, but {fmt} has an outer scale; pass outer=0 for one of 2^0")
    return outer


def kept_axes(outer: str, ndim: int, axis: int) -> list[int]:
    """Stored axes that the outer scale varies over."""
    order = stored_order(ndim, axis)
    if outer == "row":
        return list(range(ndim - 1))
    if outer == "tensor":
        return []
    if outer == "image":
        if axis == 0:
            raise ShapeError(
                "quantize: outer='image' wants one scale per index of axis 0, but the blocks run along "
                "axis 0; pass another axis= or outer='row'"
            )
        return [order[0]]
    if ndim != 4 or axis not in (1, 3):
        raise ShapeError(
            f"quantize: outer='head' is for (batch, seq, heads, dim) blocked along axis 1 or 3, but x has "
            f"{ndim} axes and axis is {axis}; pass outer='row' or 'tensor'"
        )
    return [order[0], order[2]]


def exponent_scales(outer, lead: tuple[int, ...]) -> np.ndarray:
    """Decode scales 2^e of given exponents on the host, float32 in the shape of the container's outer
    scale.
    """
    e = np.asarray(outer)
    if e.dtype.kind not in "iu":
        raise DTypeError(
            f"quantize: outer={outer!r} is neither an exponent (int) nor one of {', '.join(OUTERS)}; "
            f"pass one of these"
        )
    if e.size and (e.min() < MIN_EXPONENT or e.max() > MAX_EXPONENT):
        raise ValueError(
            f"quantize: outer exponents reach from {e.min()} to {e.max()}, but {MIN_EXPONENT} to "
            f"{MAX_EXPONENT} keep every decoded value a normal number; clip them"
        )
    shape = check_outer_shape(e.shape, lead)
    return np.ldexp(np.float32(1), e.astype(np.int32)).astype(np.float32).reshape(shape)


def check_outer_shape(shape: tuple[int, ...], lead: tuple[int, ...]) -> tuple[int, ...]:
    """The container's shape of exponents given in `shape`, which must broadcast to the stored rows."""
    full = (1,) * (len(lead) + 1) if not shape else tuple(shape)
    if len(full) != len(lead) + 1 or any(n not in (1, m) for n, m in zip(full, (*lead, 1), strict=True)):
        raise ShapeError(
            f"quantize: outer exponents of shape {tuple(shape)} do not broadcast to the stored rows "
            f"{(*lead, 1)}; pass one exponent, or an array with as many axes as x that is 1 in the last"
        )
    return full


def groups(lead: Sequence[int], varies: Sequence[bool]) -> tuple[int, int] | None:
    """(mid, inner) of an outer scale that varies over some of the stored axes `lead`, as fp4bf16.h has them:
    row r belongs to group r // (mid * inner) * inner + r % inner. None where two runs of axes are shared.
    """
    i, mid, inner = len(lead), 1, 1
    while i and (varies[i - 1] or lead[i - 1] == 1):
        i -= 1
        inner *= lead[i]
    while i and (not varies[i - 1] or lead[i - 1] == 1):
        i -= 1
        mid *= lead[i]
    return (mid, inner) if all(v or n == 1 for v, n in zip(varies[:i], lead[:i], strict=True)) else None


# ---- rows of strided memory --------------------------------------------------------------------------------
class Rows(NamedTuple):
    """Element (row, k) lies at (row // after) * x_stride + k * k_stride + row % after, in elements."""

    after: int
    x_stride: int
    k_stride: int


def _collapsed(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int] | None:
    """(length, stride) of axes that are one axis in memory; stride 0 where there is but one element."""
    count, step = 1, 0
    for n, s in zip(reversed(shape), reversed(strides), strict=True):
        if n == 1:
            continue
        if count > 1 and s != step * count:
            return None
        step = s if count == 1 else step
        count *= n
    return count, step


def rows_of(lead, lead_strides, k: int, k_stride: int, after: int | None = None) -> Rows | None:
    """Memory of stored axes `lead` and a blocked axis of `k` as rows; None where it must be copied first.

    `after` asks for one form: the product of the logical axes behind the blocked one, 1 for the last axis.
    Nothing may overlap: repeated, negative and interleaved strides give None. No axis may be empty.
    """
    if after in (None, 1) and (k_stride == 1 or k == 1):
        if found := _collapsed(lead, lead_strides):
            count, step = found
            if count == 1 or step >= k:
                return Rows(1, step if count > 1 else k, 1)
    i, tail = len(lead), 1
    while i and (lead[i - 1] == 1 or (lead_strides[i - 1] == tail and tail != after)):
        i -= 1
        tail *= lead[i]
    if tail == 1 or (after is not None and tail != after):
        return None
    found = _collapsed(lead[:i], lead_strides[:i])
    k_stride = tail if k == 1 else k_stride
    if found is None or k_stride < tail:
        return None
    count, step = found
    reach = (k - 1) * k_stride + tail
    return Rows(tail, step if count > 1 else k * k_stride, k_stride) if count == 1 or step >= reach else None
