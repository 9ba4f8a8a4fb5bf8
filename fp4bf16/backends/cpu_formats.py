"""E2M1, E4M3 and their scales on scalars and on 16 lanes: inlined pieces of the quantiser kernels.

Rounding to a grid adds and subtracts 1.5 * 2^(23 - n), which rounds to a multiple of 2^-n, half to even, as
IEEE 754 addition does; no operation is contracted, so the pieces give the bytes of `python_ref.formats`.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from . import simd
from .jit import njit
from .simd import bits, from_bits, lane, load, max_lane, select, splat, store

f32, i32 = np.float32, np.int32
# x + 1.5 * 2^(23 - n) rounds x to a multiple of 2^-n, half to even, and leaves x * 2^n in the low bits.
ROUND_HALF, ROUND_ONE, ROUND_TWO = f32(1.5 * 2**22), f32(1.5 * 2**23), f32(1.5 * 2**24)
ROUND_16TH, ROUND_512TH = f32(1.5 * 2**19), f32(1.5 * 2**14)
BITS_HALF, BITS_ONE, BITS_TWO = (i32(v.view(i32)) for v in (ROUND_HALF, ROUND_ONE, ROUND_TWO))
BITS_512TH = i32(ROUND_512TH.view(i32))
INF_BITS, ABS, SIGN = i32(0x7F800000), i32(0x7FFFFFFF), i32(-0x80000000)
FLT_MAX, SIXTH = np.finfo(f32).max, f32(1) / f32(6)
FLT_TINY = np.finfo(f32).tiny
TWO, FOUR, SIX, FINE_MAX, NAN = f32(2), f32(4), f32(6), f32(255 / 16), f32(np.nan)
MIN_EXPONENT = -119

E8M0 = np.append(np.ldexp(f32(1), np.arange(255) - 127), f32(np.nan)).astype(f32)  # (256,)
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(f32)  # (256,)

kernel = njit(nogil=True, cache=True, error_model="numpy")
inline = njit(nogil=True, cache=True, error_model="numpy", forceinline=True)


# ---- scalars -----------------------------------------------------------------------------------------------
@inline
def scalar_bits(x):
    return lane(bits(splat(x)), 0)


@inline
def scalar_from_bits(b):
    return lane(from_bits(splat(i32(b))), 0)


@inline
def power_of_two(e):
    return scalar_from_bits((e + 127) << 23)


@inline
def outer_exponent(amax_bits):
    """Least e >= -119 with amax <= 288 * 2^e; 0 for amax 0. 288 = 1.125 * 2^8."""
    if amax_bits == 0:
        return 0
    e = (amax_bits >> 23) - 127 - 8 + ((amax_bits & 0x7FFFFF) > 0x100000)
    return max(e, MIN_EXPONENT)


@inline
def e4m3_byte(y):
    """E4M3 byte of 0 <= y <= 448, half to even."""
    if y < f32(2**-6):
        return scalar_bits(y + ROUND_512TH) - BITS_512TH
    b = scalar_bits(y)
    return ((b + i32(0x7FFFF) + ((b >> 20) & 1)) >> 20) - 960


@inline
def scale_index(amax_bits):
    """Index of the least of the 37 scales with 6 s >= amax; thresholds 1.125, 1.5, 1.875 within an octave."""
    fraction = amax_bits & 0x7FFFFF
    step = (fraction > 0x100000) + (fraction > 0x400000) + (fraction > 0x700000)
    return min(max(3 * ((amax_bits >> 23) - 127) + 11 + step, 0), 36)


# ---- 16 lanes ----------------------------------------------------------------------------------------------
@inline
def load_block(x, base, n):
    """Up to 16 elements; what lies beyond `n` reads as zero."""
    return load(x, base) if n >= 16 else simd.load_first(x, base, n)


@inline
def store_block(out, base, n, value):
    if n >= 16:
        store(out, base, value)
    else:
        simd.store_first(out, base, n, value)


@inline
def minimum(a, b):
    return select(a < b, a, splat(b))


@inline
def e2m1_value(v):
    """0 <= v <= 6 rounded to {0, .5, 1, 1.5, 2, 3, 4, 6}, half to even: the step is .5 under 2, 1 under 4,
    then 2.
    """
    magic = select(v < FOUR, select(v < TWO, splat(ROUND_HALF), splat(ROUND_ONE)), splat(ROUND_TWO))
    return (v + magic) - magic


@inline
def e2m1(v):
    """(`e2m1_value`, code) of 0 <= v <= 6; the code is the rounded multiple of the step, plus 0, 2 or 4."""
    low, middle = v < TWO, v < FOUR
    magic = select(middle, select(low, splat(ROUND_HALF), splat(ROUND_ONE)), splat(ROUND_TWO))
    zero = select(
        middle,
        select(low, splat(i32(BITS_HALF)), splat(i32(BITS_ONE - 2))),
        splat(i32(BITS_TWO - 4)),
    )
    shifted = v + magic
    return shifted - magic, bits(shifted) - zero


@inline
def sign_code(x_bits):
    return (x_bits >> i32(28)) & i32(8)


@inline
def with_sign(value, x_bits):
    return from_bits(bits(value) | (x_bits & SIGN))


@inline
def e4m3_codes(a):
    """E4M3 bytes, int32 lanes, of 0 <= a <= 448."""
    b = bits(a)
    normal = ((b + i32(0x7FFFF) + ((b >> i32(20)) & i32(1))) >> i32(20)) - i32(960)
    return select(a < f32(2**-6), bits(a + ROUND_512TH) - BITS_512TH, normal)


@inline
def e4m3_values(b):
    """float32 values of E4M3 bytes in int32 lanes, sign and NaN included."""
    a = b & i32(0x7F)
    value = select(a < i32(8), simd.to_f32(a) * f32(2**-9), from_bits((a << i32(20)) + i32(120 << 23)))
    return from_bits(bits(select(a == i32(0x7F), splat(NAN), value)) | ((b & i32(0x80)) << i32(24)))


@inline
def e2m1_decode(c):
    """Twice the value of codes 0..15, float32: an integer, so that no subnormal number appears on the way."""
    a = c & i32(7)
    twice = select(a < i32(4), a, select(a < i32(6), (a << i32(1)) - i32(4), (a << i32(2)) - i32(16)))
    return from_bits(bits(simd.to_f32(twice)) | ((c & i32(8)) << i32(28)))


# ---- rows --------------------------------------------------------------------------------------------------
@inline
def row_amax(x, base, k):
    """Bits of the largest finite magnitude of a row."""
    top = splat(i32(0))
    for j in range(0, k, 16):
        a = bits(load_block(x, base + j, k - j)) & ABS
        top = select(a > top, a, top)
    amax = max_lane(top)
    if amax < INF_BITS:
        return amax
    top = splat(i32(0))
    for j in range(0, k, 16):
        a = bits(load_block(x, base + j, k - j)) & ABS
        a = select(a < INF_BITS, a, splat(i32(0)))
        top = select(a > top, a, top)
    return max_lane(top)
