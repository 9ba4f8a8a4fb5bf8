"""Quantised tensors of other programs, and exact changes of format: nothing here is quantised again.

A block scale, an outer scale and E4M3's own range can trade powers of two: moving 2^t from one to another
changes no value as long as each still holds what it must. `recast` does that, and refuses where it cannot.
"""

from __future__ import annotations

import warnings
from typing import Any

import ml_dtypes
import numpy as np

from .device import check_together, is_device, operand, to_host
from .dispatch import table
from .errors import DTypeError, ShapeError, nearest
from .formats import Format, QuantizedArray, get_format
from .interop import Operand, common_framework, unwrap, wrap
from .python_ref.formats import E2M1, E4M3, E8M0, encode_e4m3, pack, unpack
from .python_ref.quantize import SCALE_BYTE

_NIBBLES = ("low_first", "high_first")
_LARGEST = {"fp8": 448.0, "nvfp4": 448.0, "nvfp4_exact": 64.0}  # of what takes the power of two
_EXACT = np.isin(np.arange(256), np.append(SCALE_BYTE, (0, 0x7F)))  # bytes that nvfp4_exact may hold


# ---- bytes of other programs -------------------------------------------------------------------------------
def from_parts(packed, block_scale=None, outer_scale=None, format="nvfp4", shape=None, axis=-1,
               nibble_order="low_first") -> QuantizedArray:  # fmt: skip
    """The `QuantizedArray` of bytes that another program wrote: x = code * block_scale * outer_scale.

    Args:
        packed: (*lead, K/2) uint8 or PyTorch's float4_e2m1fn_x2, two codes a byte; or ml_dtypes'
            float4_e2m1fn (*lead, K), one a byte; for "fp8" (*lead, K) E4M3 as uint8 or a float8 dtype. The
            blocked axis is last. NumPy or PyTorch on the CPU; kept as it is where nothing must be changed.
            Arrays on a GPU are looked at on the host, which waits for them.
        block_scale: (*lead, ceil(K / block)) E4M3 ("mxfp4": E8M0) as uint8 or a float8 dtype, linear layout.
        outer_scale: the *decode* scale, a number or float32 (*lead or 1, 1); 1 by default. A program that
            divides by its global scale G (compressed-tensors) has 1 / G here.
        format: "nvfp4", "nvfp4_exact", "mxfp4" or "fp8".
        shape: logical shape; by default K is twice the bytes. axis: the logical axis that the blocks run
            along: -1 as stored, -2 for a right operand.
        nibble_order: "low_first", or "high_first" for files that hold the even k in the high nibble
            (ComfyUI, BFL).

    Raises:
        ShapeError: parts that do not fit together. DTypeError: parts of another kind. ValueError: negative
        block scales, or scales that "nvfp4_exact" does not have.

    >>> import numpy as np, fp4bf16 as fb
    >>> packed, scale = np.full((1, 8), 0x21, np.uint8), np.full((1, 1), 0x38, np.uint8)
    >>> fb.dequantize(fb.from_parts(packed, scale, 2.0))[0, :2].tolist()
    [1.0, 2.0]
    >>> fb.dequantize(fb.from_parts(packed, scale, 2.0, nibble_order="high_first"))[0, :2].tolist()
    [2.0, 1.0]
    """
    if is_device(packed):
        return _from_device_parts(packed, block_scale, outer_scale, format, shape, axis, nibble_order)
    fmt = get_format(format)
    if nibble_order not in _NIBBLES:
        raise ValueError(
            f"from_parts: nibble_order: {nibble_order!r} is not known{nearest(nibble_order, _NIBBLES)}"
        )
    codes = wrap(packed, "packed")
    parts = [codes] + ([] if block_scale is None else [wrap(block_scale, "block_scale")])
    common_framework("from_parts", *parts)
    if codes.array.ndim == 0:
        raise ShapeError("from_parts: packed has no axes, but the blocked axis is its last; reshape it")
    stored, data = _stored_codes(codes, fmt, shape, axis, nibble_order)
    order = _stored_order(len(stored), axis)
    logical = tuple(stored[i] for i in order)
    if shape is not None and tuple(shape) != logical:
        raise ShapeError(
            f"from_parts: packed {codes.shape} holds an array of shape {logical} blocked along axis {axis}, "
            f"but shape is {tuple(shape)}; pass the shape, or the axis, that belongs to packed"
        )
    scale = None if len(parts) == 1 else _byte_view(parts[1], ("float8_e4m3fn", "float8_e8m0fnu"))
    outer = _outer(outer_scale, fmt, stored)
    _check_scales(fmt, scale, outer)
    made = [None if p is None else unwrap(p, codes.framework) for p in (data, scale, outer)]
    return QuantizedArray(*made, fmt, logical, order)


def _from_device_parts(packed, block_scale, outer_scale, *rest) -> QuantizedArray:
    """The same of arrays on a GPU: copied to the host, made there, copied back."""
    like = operand(packed, "packed")
    parts = [p for p in (("packed", packed), ("block_scale", block_scale)) if p[1] is not None]
    if is_device(outer_scale):
        parts.append(("outer_scale", outer_scale))
    check_together("from_parts", parts)
    on_host = (to_host(p) if is_device(p) else p for p in (packed, block_scale, outer_scale))
    return table("cuda_quantize").from_host(from_parts(*on_host, *rest), like)


def _stored_order(ndim: int, axis: int) -> tuple[int, ...]:
    if not -ndim <= axis < ndim:
        raise ShapeError(
            f"from_parts: axis={axis}, but packed has axes {-ndim} to {ndim - 1}; pass one of them"
        )
    axis %= ndim
    return tuple(ndim - 1 if i == axis else i - (i > axis) for i in range(ndim))


def _byte_view(part: Operand, known: tuple[str, ...]) -> np.ndarray:
    if part.dtype not in ("uint8", *known):
        raise DTypeError(
            f"from_parts: {part.name} has dtype {part.dtype}, but uint8 or {' or '.join(known)} is needed; "
            f"pass the bytes with .view('uint8')"
        )
    return part.array.view(np.uint8)


def _stored_codes(codes: Operand, fmt: Format, shape, axis: int, nibble_order: str):
    """(stored shape, bytes as the container keeps them)."""
    if fmt.block == 0:
        data = _byte_view(codes, ("float8_e4m3fn",))
        return data.shape, data
    single = codes.dtype == "float4_e2m1fn"  # ml_dtypes': one code a byte
    data = _byte_view(codes, ("float4_e2m1fn",))
    k = data.shape[-1] if single else 2 * data.shape[-1]
    if shape is not None and -len(shape) <= axis < len(shape) and not single and k - shape[axis] in range(2):
        k = int(shape[axis])  # an odd K leaves half a byte
    wide = -(-k // fmt.block) * fmt.block
    if single or nibble_order == "high_first" or k < 2 * data.shape[-1]:
        data = data & 15 if single else unpack(data, nibble_order)
        data = pack(np.pad(data[..., :k], [(0, 0)] * (data.ndim - 1) + [(0, wide - k)]))
    elif wide > k:
        data = np.pad(data, [(0, 0)] * (data.ndim - 1) + [(0, (wide - k) // 2)])
    return (*data.shape[:-1], k), data


def _outer(outer: Any, fmt: Format, stored: tuple[int, ...]) -> np.ndarray | None:
    if fmt.default_outer is None:
        if outer is not None:
            raise ValueError(f"from_parts: outer_scale is {outer!r}, but {fmt} has none; pass None")
        return None
    value = np.asarray(wrap(1.0 if outer is None else outer, "outer_scale").array, np.float32)
    if value.size == 1:
        return value.reshape((1,) * len(stored)).copy()
    want = (*stored[:-1], 1)
    if value.ndim != len(want) or any(a not in (1, b) for a, b in zip(value.shape, want, strict=True)):
        raise ShapeError(
            f"from_parts: outer_scale has shape {value.shape}, but one number or {want} (or 1 in some "
            f"of these axes) is needed; reshape it"
        )
    return value


def _check_scales(fmt: Format, scale: np.ndarray | None, outer: np.ndarray | None) -> None:
    if fmt.scale == "float8_e4m3fn" and scale is not None and (scale > 0x7F).any():
        raise ValueError(
            f"from_parts: {int((scale > 0x7F).sum())} of the {scale.size} bytes of block_scale are negative "
            f"E4M3 numbers; pass scales, which are not"
        )
    if fmt.name != "nvfp4_exact" or scale is None:
        return
    odd = int((~_EXACT[scale]).sum())
    if odd or not _powers(outer):
        what = f"{odd} of the {scale.size} block scales" if odd else "an outer scale that is no power of two"
        raise ValueError(f"from_parts: {what} cannot be of format nvfp4_exact; pass format='nvfp4'")


# ---- exact changes of format -------------------------------------------------------------------------------
def recast(xq: QuantizedArray, format, approx: bool = False) -> QuantizedArray:
    """The same numbers in another format, exactly, or `ValueError`: powers of two move between the scales.

    Args:
        xq: a container of any format; one on a GPU is recast on the host, which waits for it.
        format: "fp8": E4M3 elements with the block scales folded in and one outer scale a row, what FP8
            tensor cores multiply; exact for "nvfp4_exact", for any NVFP4 whose products fit E4M3's four bits,
            and for "mxfp4" whose rows span few enough octaves. "nvfp4": one outer scale for the whole tensor,
            as other programs want it; exact where the block scales of all rows lie within E4M3's range of
            each other (14 octaves and what its subnormals hold). "nvfp4_exact": from "nvfp4" and "mxfp4"
            whose block scales are m * 2^k, m in {1, 1.25, 1.5}, under an outer scale that is a power of two.
        approx: for "fp8" alone: round what does not fit E4M3, with a `RuntimeWarning` that says how much.

    Returns:
        A container of xq's framework and shape without `stats`; xq itself if it is that already.

    Raises:
        ValueError: some number would change; the sentence says how many, or how far the scales spread.

    >>> import numpy as np, fp4bf16 as fb
    >>> xq = fb.quantize(np.linspace(-3, 3, 64, dtype=np.float32).reshape(2, 32))
    >>> for name in ("fp8", "nvfp4"):
    ...     print(np.array_equal(fb.dequantize(fb.recast(xq, name)), fb.dequantize(xq)))
    True
    True
    """
    if not isinstance(xq, QuantizedArray):
        raise TypeError(
            f"recast: xq is a {type(xq).__name__}, but a QuantizedArray is needed; quantize it first"
        )
    fmt = get_format(format)
    if fmt is xq.format and (fmt.name != "nvfp4" or np.prod(xq.outer_scale.shape) == 1):
        return xq
    if fmt.name == "mxfp4" or xq.format.block == 0:
        raise ValueError(f"recast: {xq.format} does not become {fmt} without rounding; if that is meant, "
                         f"quantize(dequantize(xq), {fmt.name!r})")  # fmt: skip
    if approx and fmt.name != "fp8":
        raise ValueError(f"recast: approx=True, but {fmt} is never approximated; leave it out or take 'fp8'")
    if is_device(xq.packed):
        cuda = table("cuda_quantize")
        return cuda.from_host(recast(cuda.to_host(xq), fmt, approx), operand(xq.packed, "xq.packed"))
    framework = wrap(xq.packed, "xq.packed").framework
    codes, scale, outer = _wide(xq)
    make = _to_fp8 if fmt.name == "fp8" else _to_tensor if fmt.name == "nvfp4" else _to_exact
    packed, block_scale, outer = make(xq, codes, scale, outer, approx)
    arrays = (None if p is None else np.ascontiguousarray(p) for p in (packed, block_scale, outer))
    parts = (None if p is None else unwrap(p, framework) for p in arrays)
    return QuantizedArray(*parts, fmt, xq.shape, xq.order)


def _wide(xq: QuantizedArray):
    """(codes (*lead, Kp), block scales (*lead, Kp/16), outer (*lead, 1)), float64 scales, Kp of NVFP4."""
    packed, scale = (wrap(p, "xq").array.view(np.uint8) for p in (xq.packed, xq.block_scale))
    wide = -(-xq.k // 16) * 16
    table = E8M0 if xq.format.name == "mxfp4" else E4M3
    scale = np.repeat(table[scale].astype(np.float64), xq.format.block // 16, axis=-1)[..., : wide // 16]
    codes = unpack(packed)[..., :wide]
    used = (codes & 7).reshape(*scale.shape, 16).any(-1)
    scale = np.where(used | np.isnan(scale), scale, 0.0)  # a block of zeros fits everywhere
    outer = np.ones(1) if xq.outer_scale is None else wrap(xq.outer_scale, "xq").array.astype(np.float64)
    return codes, scale, np.broadcast_to(outer, (*xq.lead, 1))


def _powers(x: np.ndarray) -> bool:
    return bool((np.frexp(x)[0] == 0.5).all())


def _shift(largest: np.ndarray, limit: float) -> np.ndarray:
    """Least t with largest <= limit * 2^t; 0 where largest is 0."""
    mantissa, exponent = np.frexp(largest / limit)
    return np.where(largest == 0, 0, exponent - (mantissa == 0.5))


def _moved(outer: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """outer * 2^shift as float32, which must hold it."""
    wide = np.ldexp(outer, shift)
    with np.errstate(over="ignore", under="ignore"):
        narrow = wide.astype(np.float32)
    if not (narrow == wide).all():
        raise ValueError(
            f"recast: an outer scale would become {wide[narrow != wide][0]:.3g}, which float32 does not "
            f"hold; dequantize"
        )
    return narrow


def _to_fp8(xq: QuantizedArray, codes, scale, outer, approx: bool):
    value = E2M1[codes] * np.repeat(scale, 16, axis=-1)
    size = np.where(np.isnan(value), 0, np.abs(value)).max(-1, keepdims=True, initial=0)
    least = _shift(size, _LARGEST["fp8"])
    fits = _fits(value).all(-1, keepdims=True)
    shift = np.where(fits, 0, least)  # as `expanded` has it wherever that is exact
    value = np.ldexp(value, -shift)
    byte = encode_e4m3(value)
    wrong = ~_fits(value)
    if wrong.any() and not approx:
        raise ValueError(
            f"recast: {int(wrong.sum())} of the {wrong.size} numbers of {xq.format} do not fit E4M3 under "
            f"one outer scale a row; dequantize, or pass approx=True to round them"
        )
    if wrong.any():
        warnings.warn(
            f"recast: {int(wrong.sum())} of the {wrong.size} numbers of {xq.format} were rounded to E4M3",
            RuntimeWarning,
            stacklevel=3,
        )
    return byte[..., : xq.k], None, _moved(outer, shift)


def _fits(value: np.ndarray) -> np.ndarray:
    """Which numbers (float64) E4M3 holds exactly."""
    clipped = np.clip(value, -448, 448)
    return (clipped.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) == value) | np.isnan(value)


def _to_tensor(xq: QuantizedArray, codes, scale, outer, approx):
    zero = ~np.nan_to_num(scale).any(-1, keepdims=True)
    mantissa, exponent = np.frexp(outer)
    found = np.unique(mantissa[~zero])
    if found.size > 1:
        raise ValueError(
            f"recast: the outer scales of {xq.format}, {outer[~zero].min():.6g} to {outer[~zero].max():.6g}, "
            f"do not differ by powers of two; quantize with outer='tensor'"
        )
    scale = np.ldexp(scale, np.where(zero, 0, exponent))
    shift = _shift(np.nan_to_num(scale).max(initial=0), _LARGEST["nvfp4"])
    byte = _scale_bytes(xq, np.ldexp(scale, -shift), "of one tensor")
    one = np.full((1,) * xq.ndim, found[0] if found.size else 1.0)
    return pack(codes), byte, _moved(one, shift)


def _to_exact(xq: QuantizedArray, codes, scale, outer, approx):
    if not _powers(outer):
        raise ValueError("recast: the outer scale of nvfp4 is no power of two, as nvfp4_exact needs it; "
                         "recast to 'fp8', which keeps it")  # fmt: skip
    shift = _shift(np.nan_to_num(scale).max(-1, keepdims=True, initial=0), _LARGEST["nvfp4_exact"])
    byte = _scale_bytes(xq, np.ldexp(scale, -shift), "of a row")
    odd = int((~_EXACT[byte]).sum())
    if odd:
        raise ValueError(
            f"recast: {odd} of the {byte.size} block scales are not m * 2^k with m in {{1, 1.25, 1.5}} "
            f"within 12 octaves of the row's largest; keep {xq.format}, or recast to 'fp8'"
        )
    return pack(codes), byte, _moved(outer, shift)


def _scale_bytes(xq: QuantizedArray, scale: np.ndarray, what: str) -> np.ndarray:
    if not _fits(scale).all():
        used = scale[scale > 0]
        spread = np.log2(used.max() / used.min())
        raise ValueError(
            f"recast: the block scales {what} spread over {spread:.1f} octaves, more than E4M3 holds under "
            f"one outer scale; keep {xq.format}"
        )
    return encode_e4m3(scale)


__all__ = ["from_parts", "recast"]
