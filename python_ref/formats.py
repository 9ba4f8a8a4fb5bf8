"""Element and scale encodings of the OCP Microscaling formats, one array operation at a time.

E2M1, E4M3 and E8M0 are those of "OCP Microscaling Formats (MX) v1.0", section 5.3 and 5.4, and "OFP8 v1.0".
Every encoder rounds half to even and saturates. NaN: E4M3 and E8M0 have a code for it, E2M1 has none, so
`encode_e2m1` raises; none of them turns a NaN into a number.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

E2M1_MAX, E4M3_MAX = np.float32(6), np.float32(448)
E4M3_NAN, E8M0_NAN = np.uint8(0x7F), np.uint8(0xFF)
FLT_MAX = np.finfo(np.float32).max

#: value of each code S EE M; code 8 is -0.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # (16,)
#: value of each E4M3 byte; 0x7F and 0xFF are NaN.
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)  # (256,)
#: value of each E8M0 byte, 2^(byte - 127); byte 0 is 2^-127, 0xFF is NaN.
E8M0 = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan)).astype(
    np.float32
)  # (256,)

# Midpoints between neighbouring magnitudes. A tie goes to the even code, so it goes up where the code above
# is even.
_MIDPOINTS = (
    (0.25, False),
    (0.75, True),
    (1.25, False),
    (1.75, True),
    (2.5, False),
    (3.5, True),
    (5.0, False),
)


def encode_e2m1(x: np.ndarray) -> np.ndarray:
    """Codes 0..15 of `x`, uint8, shape of x; beyond 6 saturates, Inf too. Raises `ValueError` on NaN.

    >>> encode_e2m1(np.float32([0.25, 0.75, -2.4, 100.0])).tolist()
    [0, 2, 12, 7]
    """
    x = np.asarray(x)
    if np.isnan(x).any():
        raise ValueError(
            "encode_e2m1: x holds NaN, which E2M1 cannot; decide what it becomes before encoding"
        )
    a = np.abs(x)
    code = np.zeros(x.shape, np.uint8)
    for middle, tie_goes_up in _MIDPOINTS:
        code += (a >= middle) if tie_goes_up else (a > middle)
    return code | (np.signbit(x).astype(np.uint8) << 3)


def decode_e2m1(code: np.ndarray) -> np.ndarray:
    """Values of the codes 0..15, float32."""
    return E2M1[np.asarray(code)]


def encode_e4m3(x: np.ndarray) -> np.ndarray:
    """E4M3 bytes of `x`, uint8; beyond 448 saturates, Inf too; NaN becomes 0x7F.

    >>> encode_e4m3(np.float32([1.0, 1000.0, np.nan])).tolist()
    [56, 126, 127]
    """
    x = np.asarray(x, np.float32)
    byte = np.clip(x, -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(x), E4M3_NAN, byte)


def decode_e4m3(byte: np.ndarray) -> np.ndarray:
    """Values of E4M3 bytes, float32."""
    return E4M3[np.asarray(byte)]


def encode_e8m0(x: np.ndarray, round_mode: str = "nearest") -> np.ndarray:
    """E8M0 bytes of positive `x`, uint8: the power of two "nearest" (half up), "up" or "down", saturating.

    Zero and everything under 2^-127 become byte 0, Inf becomes 254; NaN and negative numbers become 0xFF.
    """
    x = np.asarray(x, np.float32)
    mantissa, exponent = np.frexp(x)  # x = mantissa * 2^exponent, mantissa in [0.5, 1)
    if round_mode not in ("nearest", "up", "down"):
        raise ValueError(
            f"encode_e8m0: round_mode is {round_mode!r}, but 'nearest', 'up' or 'down' is needed"
        )
    up = {"nearest": mantissa >= 0.75, "up": mantissa > 0.5, "down": np.zeros(x.shape, bool)}[round_mode]
    byte = np.where(x == 0, 0, np.where(np.isinf(x), 254, np.clip(exponent - 1 + up + 127, 0, 254)))
    return np.where(np.isnan(x) | (x < 0), E8M0_NAN, byte).astype(np.uint8)


def decode_e8m0(byte: np.ndarray) -> np.ndarray:
    """Values of E8M0 bytes, float32."""
    return E8M0[np.asarray(byte)]


def pack(codes: np.ndarray, nibble_order: str = "low_first") -> np.ndarray:
    """Two codes a byte, uint8 (..., K/2); K must be even. "low_first": the even k in the low nibble.

    >>> hex(pack(np.uint8([1, 7]))[0])
    '0x71'
    """
    codes = np.asarray(codes, np.uint8)
    if codes.ndim == 0 or codes.shape[-1] % 2:
        raise ValueError(
            f"pack: the last axis of codes of shape {codes.shape} must be even; pad it with zeros"
        )
    low, high = _order(codes[..., ::2], codes[..., 1::2], nibble_order, "pack")
    return (low & 15) | (high << 4)


def unpack(packed: np.ndarray, nibble_order: str = "low_first") -> np.ndarray:
    """Codes of packed bytes, uint8 (..., 2 * bytes); "high_first" reads files that hold the even k in the
    high nibble.
    """
    packed = np.asarray(packed, np.uint8)
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    codes[..., ::2], codes[..., 1::2] = _order(packed & 15, packed >> 4, nibble_order, "unpack")
    return codes


def _order(first, second, nibble_order, where):
    if nibble_order not in ("low_first", "high_first"):
        raise ValueError(
            f"{where}: nibble_order is {nibble_order!r}, but 'low_first' or 'high_first' is needed"
        )
    return (first, second) if nibble_order == "low_first" else (second, first)


def round_bf16(x: np.ndarray) -> np.ndarray:
    """`x` rounded once to bfloat16 (half to even), returned as float32."""
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
