"""The quantisers as numba kernels over rows: bit-equal to `python_ref.quantize`, whose comments hold the
rules.

Every kernel works on rows ``start`` to ``stop`` of a flat C-contiguous array, one block of 16 (32) lanes at a
time. `mode` is a sum of CODES (write packed and scale), VALUES (write the decoded values) and STATS (row
norms). Counts go to `total`, int64 (5,): see CLIPPED to NONFINITE. float32 operations are the reference's, in
its order; float64 is used for statistics alone.
"""

from __future__ import annotations

import numpy as np

from ..python_ref.quantize import INVERSE, PAIR_EDGE, SCALE, SCALE_BYTE
from . import simd
from .cpu_formats import (
    ABS,
    E4M3,
    E8M0,
    FINE_MAX,
    FLT_MAX,
    FLT_TINY,
    INF_BITS,
    NAN,
    ROUND_16TH,
    SIGN,
    SIX,
    SIXTH,
    e2m1,
    e2m1_decode,
    e2m1_value,
    e4m3_byte,
    e4m3_codes,
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
from .simd import (
    bits,
    count,
    from_bits,
    lane,
    max_lane,
    offset,
    pointer,
    select,
    splat,
    sum_everywhere,
    sum_lanes,
    to_f64,
)

CODES, VALUES, STATS = 1, 2, 4
CLIPPED, UNDERFLOWED, ZERO, OVERFLOW, NONFINITE = range(5)

# Clipping is counted beyond what the rounding of 1/s can cause.
SIX_PLUS, TOP_PLUS = f32(6 * (1 + 2**-20)), f32(448 * (1 + 2**-20))
# (4m)^2 4^k. Block errors are sums of 16 squares of multiples of 1/16 under 10, so that float32 holds them
# and these products exactly: the integers of the reference, in another unit.
WEIGHT = np.array([m * m * 4.0**k for k in range(-6, 6) for m in (4, 5, 6)] + [16 * 4.0**6], f32)
# Candidates of the fast search: [lower or upper part of the interval, g].
_G = np.arange(37)
PAIR_A = np.clip(np.stack([_G - 1, _G - (_G % 3 == 1)]), 0, 36)
PAIR_B = np.clip(np.stack([_G + 1, _G + (_G % 3 != 1)]), 0, 36)


@kernel
def amax_rows(x, k, start, stop, amax):
    x, amax = pointer(x), pointer(amax)
    for r in range(start, stop):
        amax[r] = scalar_from_bits(row_amax(x, r * k, k))


# The choice between scales stays in vector registers: as a branch it would be mispredicted every other time.
@inline
def candidate(a, index):
    """(a / s, squared error of the block `a` >= 0 in every lane) under scale `index`: the integers of the
    reference times 4^-10.
    """
    v = a * INVERSE[index]
    fine = (minimum(v, FINE_MAX) + ROUND_16TH) - ROUND_16TH
    d = fine - e2m1_value(minimum(v, SIX))
    return v, sum_everywhere(d * d) * WEIGHT[index]


@inline
def better(a, index, best_v, best_index, best):
    """The best so far, or `index` if its error is smaller."""
    v, error = candidate(a, index)
    smaller = error < best
    return (
        select(smaller, v, best_v),
        select(smaller, splat(i32(index)), best_index),
        select(smaller, error, best),
    )


@inline
def search_full(a, g):
    """(a / s, index of s in every lane) of the best of g - 1 to g + 2, the smallest where several are."""
    first = max(g - 1, 0)
    v, error = candidate(a, first)
    index = splat(i32(first))
    v, index, error = better(a, g, v, index, error)
    v, index, error = better(a, min(g + 1, 36), v, index, error)
    v, index, error = better(a, min(g + 2, 36), v, index, error)
    return v, index


@inline
def search_fast(a, amax, g):
    upper = i32(amax > PAIR_EDGE[g])
    first, second = PAIR_A[upper, g], PAIR_B[upper, g]
    v, error = candidate(a, first)
    v, index, error = better(a, second, v, splat(i32(first)), error)
    return v, index


@inline
def write_empty(mode, bad, nan_byte, at, base, n, packed, scale, values):
    """A 16-lane part of a block of zeros, or of one that holds NaN or Inf."""
    if mode & CODES:
        simd.store_nibbles(packed, 8 * at, splat(i32(0)))
        scale[0] = nan_byte if bad else 0
    if mode & VALUES:
        store_block(values, base, n, splat(NAN if bad else f32(0)))


@inline
def add_counts(total, clipped, underflowed, zero, overflow, nonfinite):
    total[CLIPPED] += clipped
    total[UNDERFLOWED] += underflowed
    total[ZERO] += zero
    total[OVERFLOW] += overflow
    total[NONFINITE] += nonfinite


@inline
def add_squares(norm, norm_q, norm_e, x_bits, q):
    """The three float64 sums with x^2, q^2, (|x| - q)^2 added; q >= 0."""
    x64, q64 = to_f64(from_bits(x_bits & ABS)), to_f64(q)
    return simd.add_square(norm, x64), simd.add_square(norm_q, q64), simd.add_square(norm_e, x64 - q64)


@inline
def write_sums(sums, r, norm, norm_q, norm_e):
    sums[3 * r], sums[3 * r + 1], sums[3 * r + 2] = sum_lanes(norm), sum_lanes(norm_q), sum_lanes(norm_e)


@kernel
def exact_rows(x, k, start, stop, decode, find_outer, full, mode, packed, scale, values, sums, total):
    x, decode, total, sums = pointer(x), pointer(decode), pointer(total), pointer(sums)
    packed, scale, values = pointer(packed), pointer(scale), pointer(values)
    blocks = (k + 15) // 16
    clipped = underflowed = zero = overflow = nonfinite = 0
    for r in range(start, stop):
        if find_outer:
            decode[r] = power_of_two(outer_exponent(row_amax(x, r * k, k)))
        outer = decode[r]
        encode = f32(1) / outer
        norm = norm_q = norm_e = splat(np.float64(0))
        for b in range(blocks):
            base, n, at = r * k + 16 * b, k - 16 * b, r * blocks + b
            x_bits = bits(load_block(x, base, n))
            top = max_lane(x_bits & ABS)
            if top == 0 or top >= INF_BITS:
                zero += top == 0
                nonfinite += top != 0
                write_empty(mode, top != 0, 0x7F, at, base, n, packed, offset(scale, at), values)
                continue
            a = from_bits(x_bits & ABS) * encode
            amax = scalar_from_bits(top) * encode
            g = scale_index(scalar_bits(amax))
            v, chosen = search_full(a, g) if full else search_fast(a, amax, g)
            index = lane(chosen, 0)
            clipped += count(v > SIX_PLUS)
            overflow += amax > f32(288)
            underflowed += amax < f32(6 * 2**-6)
            code_value, code = e2m1(minimum(v, SIX))
            if mode & CODES:
                simd.store_nibbles(packed, 8 * at, code | sign_code(x_bits))
                scale[at] = SCALE_BYTE[index]
            if mode & (VALUES | STATS):
                q = (code_value * SCALE[index]) * outer
                if mode & VALUES:
                    store_block(values, base, n, with_sign(q, x_bits))
                if mode & STATS:
                    norm, norm_q, norm_e = add_squares(norm, norm_q, norm_e, x_bits, q)
        if mode & STATS:
            write_sums(sums, r, norm, norm_q, norm_e)
    add_counts(total, clipped, underflowed, zero, overflow, nonfinite)


# ---- nvfp4 -------------------------------------------------------------------------------------------------
@inline
def nvfp4_multiplier(byte, decode):
    return min(f32(1) / (E4M3[byte] * decode), FLT_MAX)


@inline
def four_over_six_try(a, byte, decode, amax, bound6, absolute):
    """(`a` scaled by one candidate, errors of its elements), in float32 and in this order, which is part of
    the rule.
    """
    v = a * nvfp4_multiplier(byte, decode)
    d = ((e2m1_value(minimum(v, SIX)) * E4M3[byte]) * amax) / splat(bound6) - a
    return v, from_bits(bits(d) & ABS) if absolute else d * d


@inline
def four_over_six(a, top, encode, decode, amax, bound6, absolute):
    """(scaled block, scale byte): the block's amax at 4 where that has the smaller error, else at 6."""
    base = top / SIX * encode
    byte4, byte6 = e4m3_byte(min(base * f32(1.5), f32(448))), e4m3_byte(min(base, f32(448)))
    v4, terms4 = four_over_six_try(a, byte4, decode, amax, bound6, absolute)
    v6, terms6 = four_over_six_try(a, byte6, decode, amax, bound6, absolute)
    error4, error6 = simd.sums_in_order(terms4, terms6)
    four = splat(error4) < splat(error6)
    return select(four, v4, v6), lane(select(four, splat(i32(byte4)), splat(i32(byte6))), 0)


@kernel
def nvfp4_rows(
    x, k, start, stop, amax, encode, decode, find_outer, rule, bound6, mode, packed, scale, values,
    sums, total,
):  # fmt: skip
    """`rule`: 0 Transformer Engine, 1 four-over-six by squared error, 2 by absolute error."""
    x, total, sums = pointer(x), pointer(total), pointer(sums)
    amax, encode, decode = pointer(amax), pointer(encode), pointer(decode)
    packed, scale, values = pointer(packed), pointer(scale), pointer(values)
    blocks = (k + 15) // 16
    clipped = underflowed = zero = overflow = nonfinite = 0
    for r in range(start, stop):
        if find_outer:
            amax[r] = scalar_from_bits(row_amax(x, r * k, k))
            s = min(bound6 / amax[r], FLT_MAX)
            encode[r] = f32(1) if amax[r] == 0 or s == 0 else s
            decode[r] = f32(1) / encode[r]
        s_sixth = encode[r] * SIXTH
        norm = norm_q = norm_e = splat(np.float64(0))
        for b in range(blocks):
            base, n, at = r * k + 16 * b, k - 16 * b, r * blocks + b
            x_bits = bits(load_block(x, base, n))
            top_bits = max_lane(x_bits & ABS)
            if top_bits == 0 or top_bits >= INF_BITS:
                zero += top_bits == 0
                nonfinite += top_bits != 0
                write_empty(mode, top_bits != 0, 0x7F, at, base, n, packed, offset(scale, at), values)
                continue
            a = from_bits(x_bits & ABS)
            top = scalar_from_bits(top_bits)
            unrounded = top * s_sixth
            if rule == 0:
                byte = i32(e4m3_byte(min(unrounded, f32(448))))
                v = a * nvfp4_multiplier(byte, decode[r])
            else:
                v, byte = four_over_six(a, top, encode[r], decode[r], amax[r], bound6, rule == 2)
            clipped += count(v > SIX_PLUS) if byte else 0
            overflow += unrounded > f32(464)
            underflowed += byte == 0
            code_value, code = e2m1(minimum(v, SIX))
            if mode & CODES:
                simd.store_nibbles(packed, 8 * at, code | sign_code(x_bits))
                scale[at] = byte
            if mode & (VALUES | STATS):
                q = (code_value * E4M3[byte]) * decode[r]
                if mode & VALUES:
                    store_block(values, base, n, with_sign(q, x_bits))
                if mode & STATS:
                    norm, norm_q, norm_e = add_squares(norm, norm_q, norm_e, x_bits, q)
        if mode & STATS:
            write_sums(sums, r, norm, norm_q, norm_e)
    add_counts(total, clipped, underflowed, zero, overflow, nonfinite)


# ---- mxfp4 -------------------------------------------------------------------------------------------------
@kernel
def mxfp4_rows(x, k, start, stop, rounding, mode, packed, scale, values, sums, total):
    """`rounding` is added to the bits of amax before its exponent is read."""
    x, total, sums = pointer(x), pointer(total), pointer(sums)
    packed, scale, values = pointer(packed), pointer(scale), pointer(values)
    blocks = (k + 31) // 32
    clipped = underflowed = zero = nonfinite = 0
    for r in range(start, stop):
        norm = norm_q = norm_e = splat(np.float64(0))
        for b in range(blocks):
            base, n, at = r * k + 32 * b, k - 32 * b, r * blocks + b
            first, second = bits(load_block(x, base, n)), bits(load_block(x, base + 16, n - 16))
            a, c = first & ABS, second & ABS
            top = max_lane(select(a > c, a, c))
            if top == 0 or top >= INF_BITS:
                zero += top == 0
                nonfinite += top != 0
                for h in range(2):
                    write_empty(
                        mode,
                        top != 0,
                        0xFF,
                        2 * at + h,
                        base + 16 * h,
                        n - 16 * h,
                        packed,
                        offset(scale, at),
                        values,
                    )
                continue
            exponent = ((top + rounding) >> 23) - 2
            underflowed += exponent < 0
            byte = max(exponent, 0)
            inverse, s = scalar_from_bits((254 - byte) << 23), E8M0[byte]
            for h in range(2):
                x_bits = second if h else first
                v = from_bits(x_bits & ABS) * inverse
                clipped += count(v > SIX_PLUS)
                code_value, code = e2m1(minimum(v, SIX))
                if mode & CODES:
                    simd.store_nibbles(packed, 16 * at + 8 * h, code | sign_code(x_bits))
                    scale[at] = byte
                if mode & (VALUES | STATS):
                    q = code_value * s
                    if mode & VALUES:
                        store_block(values, base + 16 * h, n - 16 * h, with_sign(q, x_bits))
                    if mode & STATS:
                        norm, norm_q, norm_e = add_squares(norm, norm_q, norm_e, x_bits, q)
        if mode & STATS:
            write_sums(sums, r, norm, norm_q, norm_e)
    add_counts(total, clipped, underflowed, zero, 0, nonfinite)


# ---- fp8 ---------------------------------------------------------------------------------------------------
@kernel
def fp8_rows(x, k, start, stop, decode, find_outer, mode, packed, values, sums, total):
    x, decode, total, sums = pointer(x), pointer(decode), pointer(total), pointer(sums)
    packed, values = pointer(packed), pointer(values)
    clipped = nonfinite = 0
    for r in range(start, stop):
        if find_outer:
            amax = scalar_from_bits(row_amax(x, r * k, k))
            decode[r] = f32(1) if amax == 0 else max(amax / f32(448), FLT_TINY)
        outer = decode[r]
        encode = f32(1) / outer
        norm = norm_q = norm_e = splat(np.float64(0))
        for base in range(r * k, (r + 1) * k, 16):
            n = (r + 1) * k - base
            x_bits = bits(load_block(x, base, n))
            bad = (x_bits & ABS) >= INF_BITS
            nonfinite += count(bad)
            v = from_bits(x_bits & ABS) * encode
            clipped += count(v > TOP_PLUS)
            byte = select(
                bad, splat(i32(0x7F)), e4m3_codes(minimum(v, f32(448))) | ((x_bits >> i32(24)) & i32(0x80))
            )
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


# ---- back --------------------------------------------------------------------------------------------------
@kernel
def dequantize_rows(packed, scale, outer, half_scale, block, k, start, stop, out):
    """(code * block scale) * outer scale; `half_scale` (256,) is half of each scale byte's value, `block` 16
    or 32.
    """
    packed, scale, outer, out = pointer(packed), pointer(scale), pointer(outer), pointer(out)
    half_scale = pointer(half_scale)
    parts, per_row = (k + 15) // 16, (k + block - 1) // block
    for r in range(start, stop):
        for p in range(parts):
            s = half_scale[scale[r * per_row + 16 * p // block]]
            twice = e2m1_decode(simd.load_nibbles(packed, (r * per_row * block >> 1) + 8 * p))
            store_block(out, r * k + 16 * p, k - 16 * p, (twice * s) * outer[r])


@kernel
def dequantize_fp8_rows(packed, outer, k, start, stop, out):
    packed, outer, out = pointer(packed), pointer(outer), pointer(out)
    for r in range(start, stop):
        for base in range(r * k, (r + 1) * k, 16):
            n = (r + 1) * k - base
            store_block(out, base, n, e4m3_values(simd.load_bytes(packed, base, n)) * outer[r])


@kernel
def expand_blocks(packed, scale, half_scale, start, stop, out):
    """E4M3 bytes of 16-element blocks `start` to `stop`; returns how many products E4M3 does not hold."""
    packed, scale, out, half_scale = pointer(packed), pointer(scale), pointer(out), pointer(half_scale)
    inexact = 0
    for b in range(start, stop):
        value = e2m1_decode(simd.load_nibbles(packed, 8 * b)) * half_scale[scale[b]]
        magnitude = bits(value) & ABS
        bad = magnitude > INF_BITS
        byte = e4m3_codes(minimum(from_bits(magnitude), f32(448))) | ((bits(value) >> i32(24)) & i32(0x80))
        byte = select(bad, splat(i32(0x7F)), byte)
        inexact += 16 - count(bad) - count(e4m3_values(byte) == value)
        simd.store_bytes(out, 16 * b, 16, byte)
    return inexact


@kernel
def transpose(x, rows, columns, start, stop, out):
    """Columns `start` to `stop` of x (rows, columns) as rows of `out`, in tiles that fit the first-level
    cache.
    """
    x, out = pointer(x), pointer(out)
    for left in range(start, stop, 16):
        right = min(left + 16, stop)
        for top in range(0, rows, 64):
            bottom = min(top + 64, rows)
            for j in range(left, right):
                for i in range(top, bottom):
                    out[j * rows + i] = x[i * columns + j]


@kernel
def round_bf16(x, start, stop, out):
    """bfloat16 of x, half to even: to uint16 as bits, to float32 as values. NaN stays NaN."""
    x, out = pointer(x), pointer(out)
    for base in range(start, stop, 16):
        b = bits(load_block(x, base, stop - base))
        rounded = (b + ((b >> i32(16)) & i32(1)) + i32(0x7FFF)) & i32(-0x10000)
        quiet = (b & SIGN) | i32(0x7FC00000)
        rounded = select((b & ABS) > INF_BITS, quiet, rounded)
        store_block(out, base, stop - base, from_bits(rounded))
