"""Stochastic rounding as numba kernels over rows: bit-equal to `python_ref.quantize`; the rule is in
`python_ref.stochastic`.

Kernels are built as those of `cpu_quantize_kernels`. Random words come from a window, float32 of their upper
24 bits, that is filled as the rows are walked: element (r, i) of (rows, K) is the logical element
(r // after) * K * after + i * after + r % after, so that its word depends neither on chunks nor on threads.
"""

from __future__ import annotations

import numpy as np

from ..python_ref.quantize import INVERSE, MX_ROUND, SCALE, SCALE_BYTE
from . import simd
from .cpu_formats import (
    ABS,
    BITS_ONE,
    E4M3,
    E8M0,
    FLT_MAX,
    FLT_TINY,
    FOUR,
    INF_BITS,
    ROUND_ONE,
    SIX,
    SIXTH,
    TWO,
    e4m3_values,
    f32,
    i32,
    inline,
    kernel,
    load_block,
    minimum,
    outer_exponent,
    power_of_two,
    row_amax,
    scalar_bits,
    scalar_from_bits,
    scale_index,
    sign_code,
    store_block,
    with_sign,
)
from .cpu_quantize_kernels import (
    CODES,
    SIX_PLUS,
    STATS,
    TOP_PLUS,
    VALUES,
    add_counts,
    add_squares,
    nvfp4_multiplier,
    write_empty,
    write_sums,
)
from .cpu_random import philox
from .simd import bits, count, from_bits, load, max_lane, offset, pointer, select, splat

EXACT, NVFP4, MXFP4 = 0, 1, 2
KINDS = {"nvfp4_exact": EXACT, "nvfp4": NVFP4, "mxfp4": MXFP4}
BOUND6 = f32(6 * 448)
NAN_BYTE = np.array([0x7F, 0x7F, 0xFF], i32)
WINDOW = 1024  # words at a time; they stay in the first-level cache
_SPARE = 32  # lanes read beyond the window, of elements beyond the row: they hold 0 or old words
_ALL = f32(2**24)
_3, _2 = np.uint64(3), np.uint64(2)


# ---- random words ------------------------------------------------------------------------------------------
@inline
def upper(word):
    return f32(i32(word >> np.uint64(8)))


@kernel
def fill_adjacent(window, first, blocks, seed, stream, call):
    """window <- the words of elements 4 * first to 4 * (first + blocks)."""
    for i in range(blocks):
        w0, w1, w2, w3 = philox(np.uint64(first + i), seed, stream, call)
        window[4 * i] = upper(w0)
        window[4 * i + 1] = upper(w1)
        window[4 * i + 2] = upper(w2)
        window[4 * i + 3] = upper(w3)


@kernel
def fill_apart(window, first, step, number, seed, stream, call):
    """window <- the words of elements first, first + step, ...: one of each block's four is used."""
    for i in range(number):
        index = np.uint64(first + i * step)
        w0, w1, w2, w3 = philox(index >> _2, seed, stream, call)
        place = index & _3
        low = w0 if place == 0 else w1
        high = w2 if place == 2 else w3
        window[i] = upper(low if place < 2 else high)


@inline
def random_lanes(window, edges, r, i, k, stop, draw):
    """Upper 24 bits, float32, of the words of elements (r, i) to (r, i + 15); `edges` are the first and the
    last position r * k + i that the window holds.
    """
    seed, stream, call, after = draw
    p = r * k + i
    if p + min(16, k - i) > edges[1]:
        if after == 1:
            edges[0] = p & ~3
            blocks = min(WINDOW >> 2, (stop * k - edges[0] + 3) >> 2)
            edges[1] = edges[0] + 4 * blocks
            fill_adjacent(window, edges[0] >> 2, blocks, seed, stream, call)
        else:
            edges[0], edges[1] = p, p + min(WINDOW, k - i)
            first = (r // after) * (k * after) + i * after + r % after
            fill_apart(window, first, after, edges[1] - p, seed, stream, call)
    return load(window, p - edges[0])


# ---- rounding ----------------------------------------------------------------------------------------------
@inline
def e2m1_by(v, random):
    """(value, code) of 0 <= v <= 6."""
    low, middle = v < TWO, v < FOUR
    step = select(middle, select(low, splat(f32(0.5)), splat(f32(1))), splat(TWO))
    per_step = select(middle, select(low, splat(TWO), splat(f32(1))), splat(f32(0.5)))
    code = select(middle, select(low, splat(i32(0)), splat(i32(2))), splat(i32(4)))
    q = v * per_step
    near = (q + ROUND_ONE) - ROUND_ONE
    floor = select(near > q, near - f32(1), near)
    n = floor + select(random < (q - floor) * _ALL, splat(f32(1)), splat(f32(0)))
    return n * step, bits(n + ROUND_ONE) - i32(BITS_ONE) + code


@inline
def e4m3_by(a, random):
    """E4M3 bytes, int32 lanes, of 0 <= a <= 448: the 20 bits that a normal number loses are f * 2^20."""
    b = bits(a)
    q = a * f32(512)
    near = (q + ROUND_ONE) - ROUND_ONE
    floor = select(near > q, near - f32(1), near)
    subnormal = a < f32(2**-6)
    f = select(subnormal, (q - floor) * _ALL, simd.to_f32((b & i32(0xFFFFF)) << i32(4)))
    byte = select(subnormal, bits(floor + ROUND_ONE) - i32(BITS_ONE), (b >> i32(20)) - i32(960))
    return byte + select(random < f, splat(i32(1)), splat(i32(0)))


@inline
def e4m3_byte_up(y):
    """Least E4M3 byte with a value >= y, 0 <= y <= 448."""
    if y < f32(2**-6):
        n = i32(y * f32(512))
        return n + i32(f32(n) < y * f32(512))
    return ((scalar_bits(y) + i32(0xFFFFF)) >> 20) - 960


# ---- block formats -----------------------------------------------------------------------------------------
@inline
def row_scale(kind, find_outer, x, r, k, amax, encode, decode):
    """(the factor that brings the row's blocks to the range of the block scales, decode scale)."""
    if kind == EXACT:
        if find_outer:
            decode[r] = power_of_two(outer_exponent(row_amax(x, r * k, k)))
        return f32(1) / decode[r], decode[r]
    if kind == NVFP4:
        if find_outer:
            amax[r] = scalar_from_bits(row_amax(x, r * k, k))
            s = min(BOUND6 / amax[r], FLT_MAX)
            encode[r] = f32(1) if amax[r] == 0 or s == 0 else s
            decode[r] = f32(1) / encode[r]
        return encode[r] * SIXTH, decode[r]
    return f32(1), f32(1)


@inline
def block_scale(kind, top_bits, encode, decode, rounding):
    """(byte, its value, factors of |x|, overflowed?, underflowed?): scales that clip nothing."""
    top = scalar_from_bits(top_bits)
    if kind == EXACT:
        amax = top * encode
        g = scale_index(scalar_bits(amax))
        return i32(SCALE_BYTE[g]), SCALE[g], encode, INVERSE[g], amax > f32(288), amax < f32(6 * 2**-6)
    if kind == NVFP4:
        exact = top * encode
        byte = i32(e4m3_byte_up(min(exact, f32(448))))
        return byte, E4M3[byte], f32(1), nvfp4_multiplier(byte, decode), exact > TOP_PLUS, byte == 0
    exponent = ((top_bits + rounding) >> 23) - 2
    byte = i32(max(exponent, 0))
    return byte, E8M0[byte], f32(1), scalar_from_bits((254 - byte) << 23), False, exponent < 0


@inline
def block_top(x, base, n, parts):
    """Bits of the largest magnitude of a block of 16 or 32; those of a NaN are larger than any."""
    top = bits(load_block(x, base, n)) & ABS
    if parts == 2:
        second = bits(load_block(x, base + 16, n - 16)) & ABS
        top = select(top > second, top, second)
    return max_lane(top)


@kernel
def block_rows(
    x, k, start, stop, kind, amax, encode, decode, find_outer, rounding, draw, window, edges, mode, packed,
    scale, values, sums, total,
):  # fmt: skip
    """`kind` is EXACT, NVFP4 (Transformer Engine's rule) or MXFP4, where `rounding` is added to the bits of
    amax before its exponent is read.
    """
    x, total, sums, window, edges = pointer(x), pointer(total), pointer(sums), pointer(window), pointer(edges)
    amax, encode, decode = pointer(amax), pointer(encode), pointer(decode)
    packed, scale, values = pointer(packed), pointer(scale), pointer(values)
    parts = 2 if kind == MXFP4 else 1
    size = 16 * parts
    blocks = (k + size - 1) // size
    clipped = underflowed = zero = overflow = nonfinite = 0
    for r in range(start, stop):
        to_scale, outer = row_scale(kind, find_outer, x, r, k, amax, encode, decode)
        norm = norm_q = norm_e = splat(np.float64(0))
        for b in range(blocks):
            base, n, at = r * k + size * b, k - size * b, r * blocks + b
            top = block_top(x, base, n, parts)
            if top == 0 or top >= INF_BITS:
                zero += top == 0
                nonfinite += top != 0
                for h in range(parts):
                    part, left = base + 16 * h, n - 16 * h
                    here = parts * at + h
                    nan_byte = NAN_BYTE[kind]
                    write_empty(mode, top != 0, nan_byte, here, part, left, packed, offset(scale, at), values)
                continue
            byte, s, first, second, over, under = block_scale(kind, top, to_scale, outer, rounding)
            overflow += over
            underflowed += under
            if mode & CODES:
                scale[at] = byte
            for h in range(parts):
                part, left = base + 16 * h, n - 16 * h
                x_bits = bits(load_block(x, part, left))
                v = (from_bits(x_bits & ABS) * first) * second
                clipped += count(v > SIX_PLUS) if byte or kind == MXFP4 else 0
                random = random_lanes(window, edges, r, size * b + 16 * h, k, stop, draw)
                value, code = e2m1_by(minimum(v, SIX), random)
                if mode & CODES:
                    simd.store_nibbles(packed, 8 * (parts * at + h), code | sign_code(x_bits))
                if mode & (VALUES | STATS):
                    q = (value * s) * outer
                    if mode & VALUES:
                        store_block(values, part, left, with_sign(q, x_bits))
                    if mode & STATS:
                        norm, norm_q, norm_e = add_squares(norm, norm_q, norm_e, x_bits, q)
        if mode & STATS:
            write_sums(sums, r, norm, norm_q, norm_e)
    add_counts(total, clipped, underflowed, zero, overflow, nonfinite)


# ---- fp8 ---------------------------------------------------------------------------------------------------
@kernel
def fp8_rows(
    x, k, start, stop, decode, find_outer, draw, window, edges, mode, packed, values, sums, total
):  # fmt: skip
    x, decode, total, sums = pointer(x), pointer(decode), pointer(total), pointer(sums)
    packed, values, window, edges = pointer(packed), pointer(values), pointer(window), pointer(edges)
    clipped = nonfinite = 0
    for r in range(start, stop):
        if find_outer:
            amax = scalar_from_bits(row_amax(x, r * k, k))
            decode[r] = f32(1) if amax == 0 else max(amax / f32(448), FLT_TINY)
        outer = decode[r]
        encode = f32(1) / outer
        norm = norm_q = norm_e = splat(np.float64(0))
        for i in range(0, k, 16):
            base, n = r * k + i, k - i
            x_bits = bits(load_block(x, base, n))
            bad = (x_bits & ABS) >= INF_BITS
            nonfinite += count(bad)
            v = from_bits(x_bits & ABS) * encode
            clipped += count(v > TOP_PLUS)
            random = random_lanes(window, edges, r, i, k, stop, draw)
            byte = e4m3_by(minimum(v, f32(448)), random) | ((x_bits >> i32(24)) & i32(0x80))
            byte = select(bad, splat(i32(0x7F)), byte)
            if mode & CODES:
                simd.store_bytes(packed, base, n, byte)
            if mode & (VALUES | STATS):
                q = e4m3_values(byte) * outer
                if mode & VALUES:
                    store_block(values, base, n, q)
                if mode & STATS:
                    magnitude = from_bits(bits(q) & ABS)
                    norm, norm_q, norm_e = add_squares(norm, norm_q, norm_e, x_bits, magnitude)
        if mode & STATS:
            write_sums(sums, r, norm, norm_q, norm_e)
    add_counts(total, clipped, 0, 0, 0, nonfinite)


# ---- launch ------------------------------------------------------------------------------------------------
def chunk_of(fmt: str, rule, draw, flat, k: int, scales, mode: int, packed, scale, values, sums):
    """fn(start, stop, total) that rounds rows start..stop-1; `draw` is (seed, stream, call, after)."""
    none = np.empty(0, f32)
    amax, encode, decode, find = (none, none, none, False) if fmt == "mxfp4" else scales
    draw = (*map(np.uint64, draw[:3]), np.int64(draw[3]))
    kind = KINDS.get(fmt)
    rounding = i32(MX_ROUND[rule] if fmt == "mxfp4" else 0)

    def chunk(i, j, total):
        words, edges = np.zeros(WINDOW + _SPARE, f32), np.zeros(2, np.int64)
        if fmt == "fp8":
            fp8_rows(flat, k, i, j, decode, find, draw, words, edges, mode, packed, values, sums, total)
        else:
            block_rows(
                flat, k, i, j, kind, amax, encode, decode, find, rounding, draw, words, edges, mode,
                packed, scale, values, sums, total,
            )  # fmt: skip

    return chunk
