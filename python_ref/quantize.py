"""The quantisers in NumPy: nvfp4_exact, nvfp4 (Transformer Engine's rule, four-over-six), mxfp4, fp8.

A value decodes as code * block_scale * outer_scale. Everything is float32 and the order of the operations is
part of the rule: kernels must give the same bytes. Blocks run along `axis`, which is stored last and padded
with zeros to a whole number of blocks. A block of zeros has scale byte 0 and codes 0. A block that holds NaN
or Inf either raises or, with ``nan="propagate"``, gets a NaN scale; amax is taken over the finite elements,
so that it harms no other block.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from . import stochastic
from .formats import (
    E2M1,
    E4M3,
    E4M3_MAX,
    E4M3_NAN,
    E8M0,
    E8M0_NAN,
    FLT_MAX,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    pack,
    unpack,
)
from .random import seed_words, words

BLOCK = {"nvfp4_exact": 16, "nvfp4": 16, "mxfp4": 32, "fp8": 1}
DEFAULT_OUTER = {"nvfp4_exact": "row", "nvfp4": "tensor", "mxfp4": None, "fp8": "row"}
SCALE_RULES = {
    "nvfp4_exact": (None,),
    "nvfp4": ("te", "four_over_six", "four_over_six_mae", "four_over_six_448", "four_over_six_mae_448"),
    "mxfp4": ("even", "floor", "rceil", "ceil"),
    "fp8": (None,),
}
#: Outer exponents e. Every code * block scale * 2^e is then a normal float32 and bfloat16 (nvfp4_exact needs
#: 2^(e-7)).
MIN_EXPONENT, MAX_EXPONENT = -119, 120

# nvfp4_exact's 37 scales m * 2^k, m in {1, 1.25, 1.5}: those whose product with any E2M1 value fits E4M3.
SCALE_BYTE = np.array([8 * (7 + k) + m for k in range(-6, 6) for m in (0, 2, 4)] + [0x68], np.uint8)  # (37,)
SCALE = E4M3[SCALE_BYTE]  # (37,) 2^-6 .. 64
INVERSE = np.float32(1) / SCALE  # (37,)
# (4m)^2 * 4^(k + 6): brings the squared errors of different scales to one integer unit.
WEIGHT = np.array([m * m * 4**k for k in range(12) for m in (4, 5, 6)] + [16 * 4**12], np.int64)  # (37,)
# Where in (6 s_{g-1}, 6 s_g] the fast search changes its pair: one half, for m = 1.5 five eighths.
_BELOW = np.append(np.float32(0.75) * SCALE[0], SCALE[:-1])
PAIR_EDGE = 6 * (_BELOW + np.array([0.5, 0.5, 0.625] * 12 + [0.5], np.float32) * (SCALE - _BELOW))  # (37,)


class Quantized(NamedTuple):
    """`packed` uint8 (*lead, Kp/2) or, fp8, (*lead, K); `block_scale` uint8 (*lead, Kp/block) or None;
    `outer_scale` float32, 1 in the axes it does not vary over, or None; logical `shape`; `k`, length of the
    blocked axis; `axis`.
    """

    packed: np.ndarray
    block_scale: np.ndarray | None
    outer_scale: np.ndarray | None
    shape: tuple[int, ...]
    k: int
    axis: int
    format: str


def outer_exponent(amax: np.ndarray) -> np.ndarray:
    """Least e >= MIN_EXPONENT with amax <= 288 * 2^e, by the exponent bits (288 = 0.5625 * 2^9); 0 for amax
    0.
    """
    mantissa, exponent = np.frexp(np.asarray(amax, np.float32))
    e = exponent - 9 + (mantissa > np.float32(0.5625))
    return np.where(amax == 0, 0, np.maximum(e, MIN_EXPONENT)).astype(np.int32)


def quantize(
    x, fmt="nvfp4_exact", axis=-1, outer="default", scale_rule=None, search="full", nan="raise",
    rounding="nearest", seed=0,
):  # fmt: skip
    """Quantise `x` (any shape of at least one axis, converted to float32) -> `Quantized`.

    `outer`: "row", "image", "head", "tensor", None, or exponents e of 2^e; `scale_rule` and `search` as in
    `fp4bf16.quantize`. Raises `ValueError` on NaN or Inf unless ``nan="propagate"``.

    ``rounding="stochastic"`` rounds up or down by chance, without bias (see `stochastic`): the element with
    index i in the C order of `x` takes word i of the draw `seed`, an int or (seed, stream word, call word).
    nvfp4_exact then takes the least scale that does not clip (`search` is not used), nvfp4 rounds its block
    scale up, mxfp4's rule is "rceil" (default) or "ceil".

    >>> q = quantize(np.float32([[1, 2, 3, 6] * 4]))
    >>> dequantize(q)[0, :4].tolist()
    [1.0, 2.0, 3.0, 6.0]
    """
    x = np.asarray(x)
    stored = np.moveaxis(x, axis, -1).astype(np.float32)  # (*lead, K)
    finite = np.isfinite(stored)
    if nan == "raise" and not finite.all():
        raise ValueError(
            f"quantize: x holds {np.sum(~finite)} NaN or Inf; remove them or pass nan='propagate'"
        )
    block = BLOCK[fmt]
    pad = -stored.shape[-1] % block
    width = [(0, 0)] * (stored.ndim - 1) + [(0, pad)]
    clean = np.pad(np.where(finite, stored, np.float32(0)), width)  # (*lead, Kp)
    split = (*clean.shape[:-1], clean.shape[-1] // block, block)
    blocks = clean.reshape(split)  # (*lead, Kp/block, block)
    bad = np.pad(~finite, width).reshape(split).any(-1)  # (*lead, Kp/block)
    random = None
    if rounding == "stochastic":
        scale_rule = stochastic.scale_rule_of(fmt, scale_rule)
        drawn = np.moveaxis(words(*seed_words(seed), x.size).reshape(x.shape), axis, -1)
        random = np.pad(drawn, width).reshape(split)
    elif rounding != "nearest":
        raise ValueError(f"quantize: rounding is {rounding!r}, but 'nearest' or 'stochastic' is needed")
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
        outer_scale, parts = _QUANTIZERS[fmt](blocks, axis % x.ndim, outer, scale_rule, search, random)
    packed, block_scale = _finish(fmt, *parts, bad, blocks)
    return Quantized(packed, block_scale, outer_scale, x.shape, stored.shape[-1], axis % x.ndim, fmt)


def _finish(fmt, codes, block_scale, bad, blocks):
    """Zero blocks, non-finite blocks, packing."""
    if fmt == "fp8":  # the element carries NaN itself
        return np.where(bad, E4M3_NAN, codes[..., 0]), None
    zero = ~blocks.any(-1) | bad
    codes = np.where(zero[..., None], np.uint8(0), codes)
    block_scale = np.where(zero, np.uint8(0), block_scale)
    block_scale = np.where(bad, E8M0_NAN if fmt == "mxfp4" else E4M3_NAN, block_scale)
    return pack(codes.reshape(*codes.shape[:-2], codes.shape[-2] * codes.shape[-1])), block_scale


def _group_amax(blocks: np.ndarray, axis: int, outer: str) -> np.ndarray:
    """amax of each group that shares an outer scale, float32, with the axes it does not vary over kept as 1.
    """
    lead = blocks.ndim - 2  # axes of the stored array without the blocked one
    rest = [a for a in range(lead + 1) if a != axis]  # logical axis of each leading stored axis
    if outer == "row":
        keep = rest
    elif outer == "tensor":
        keep = []
    elif outer == "image" and lead and axis != 0:
        keep = [0]
    elif outer == "head" and lead == 3 and axis in (1, 3):  # (batch, seq, heads, dim)
        keep = [0, 2]
    else:
        raise ValueError(
            f"quantize: outer={outer!r} does not fit an array of {lead + 1} axes blocked along {axis}"
        )
    reduce = tuple(i for i, a in enumerate(rest) if a not in keep) + (lead, lead + 1)
    return np.abs(blocks).max(reduce, keepdims=True, initial=np.float32(0))[..., 0]


def _outer(blocks, axis, outer, default):
    """(amax, None) of the groups, or (None, exponents) as given."""
    outer = default if isinstance(outer, str) and outer == "default" else outer
    if outer is None:
        raise ValueError("quantize: outer=None is for mxfp4; pass outer=0 for an outer scale of one")
    if isinstance(outer, str):
        return _group_amax(blocks, axis, outer), None
    e = np.asarray(outer)
    e = e.reshape((1,) * (blocks.ndim - 1)) if e.ndim == 0 else e
    return None, e.astype(np.int32)


def _e2m1(scaled: np.ndarray, random: np.ndarray | None) -> np.ndarray:
    return encode_e2m1(scaled) if random is None else stochastic.encode_e2m1(scaled, random)


def _power(e: np.ndarray) -> np.ndarray:
    return np.ldexp(np.float32(1), e).astype(np.float32)


# ---- nvfp4_exact -------------------------------------------------------------------------------------------
def _exact(blocks, axis, outer, scale_rule, search, random):
    amax, e = _outer(blocks, axis, outer, "row")
    e = outer_exponent(amax) if e is None else e
    t = blocks * _power(-e)[..., None]
    a = np.abs(t).max(-1)  # (*lead, blocks)
    g = np.minimum(np.searchsorted(6 * SCALE, a, side="left"), 36)  # least s with 6 s >= a
    chosen = _search(np.abs(t), _candidates(g, a, search)) if random is None else g
    codes = _e2m1(t * INVERSE[chosen][..., None], random)
    return _power(e), (codes, SCALE_BYTE[chosen])


def _search(t, candidates):
    """Index of the best candidate of each block."""
    best, chosen = None, None
    for index in candidates:
        error = _squared_error(t, index)
        if best is None:
            best, chosen = error, index
        else:  # ascending and strict: ties keep the smaller scale
            chosen = np.where(error < best, index, chosen)
            best = np.minimum(error, best)
    return chosen


def _candidates(g, a, search):
    """Indices of the scales to try, ascending, clipped to the window."""
    if search == "full":
        offsets = [np.full_like(g, c) for c in (-1, 0, 1, 2)]
    elif search == "fast":
        lower, m125 = a <= PAIR_EDGE[g], g % 3 == 1
        offsets = [np.where(lower | m125, -1, 0), np.where(m125 & ~lower, 0, 1)]
    else:
        raise ValueError(f"quantize: search is {search!r}, but 'full' or 'fast' is needed")
    return [np.clip(g + c, 0, 36) for c in offsets]


def _squared_error(t, index):
    """Squared error of a block under a scale, an integer: the same whatever the order of summation.

    T = rint(16 |t| / s) up to 255 and Q = 16 E2M1(|t| / s), so the error in t is (T - Q) s / 16.
    """
    fine = np.rint(np.minimum(t * (np.float32(16) * INVERSE[index])[..., None], np.float32(255))).astype(
        np.int64
    )
    coarse = (16 * E2M1[encode_e2m1(t * INVERSE[index][..., None])]).astype(np.int64)
    return ((fine - coarse) ** 2).sum(-1) * WEIGHT[index]


# ---- nvfp4 -------------------------------------------------------------------------------------------------
def _nvfp4(blocks, axis, outer, scale_rule, search, random):
    """Transformer Engine's NVFP4 (its order of float32 operations) and Four Over Six (arXiv 2512.02010) as it
    has it.
    """
    rule = scale_rule or "te"
    if rule not in SCALE_RULES["nvfp4"]:
        raise ValueError(f"quantize: scale_rule is {rule!r}, but nvfp4 knows {SCALE_RULES['nvfp4']}")
    bound = np.float32(448 if rule == "te" or rule.endswith("448") else 256)
    amax, e = _outer(blocks, axis, outer, "tensor")
    if e is None:
        encode = np.minimum(bound * 6 / amax, FLT_MAX)  # S
        encode = np.where((amax == 0) | (encode == 0), np.float32(1), encode)
    else:
        encode = _power(-e)
        amax = bound * 6 * _power(e)
    decode = np.float32(1) / encode
    block_amax = np.abs(blocks).max(-1)
    if rule == "te":
        exact = block_amax * (encode * (np.float32(1) / np.float32(6)))
        scale = encode_e4m3(exact) if random is None else stochastic.encode_e4m3_up(exact)
        return decode, (_nvfp4_codes(blocks, scale, decode, random), scale)
    base = block_amax / np.float32(6) * encode
    tries = []
    for factor in (np.float32(1.5), np.float32(1)):  # the block's amax at 4, at 6
        scale = encode_e4m3(base * factor)
        codes = _nvfp4_codes(blocks, scale, decode)
        tries.append((codes, scale, _four_over_six_error(blocks, codes, scale, amax, bound, "mae" in rule)))
    (codes4, scale4, error4), (codes6, scale6, error6) = tries
    four = error4 < error6
    return decode, (np.where(four[..., None], codes4, codes6), np.where(four, scale4, scale6))


def _nvfp4_codes(blocks, scale, decode, random=None):
    m = np.minimum(np.float32(1) / (E4M3[scale] * decode), FLT_MAX)
    return _e2m1(blocks * m[..., None], random)


def _four_over_six_error(blocks, codes, scale, amax, bound, absolute):
    """Error of a block in the input's domain; summed in index order, which decides near-ties."""
    value = E2M1[codes] * E4M3[scale][..., None] * amax[..., None] / (np.float32(6) * bound)
    difference = value - blocks
    term = np.abs(difference) if absolute else difference * difference
    total = np.zeros(blocks.shape[:-1], np.float32)
    for i in range(blocks.shape[-1]):
        total = total + term[..., i]
    return total


# ---- mxfp4, fp8 --------------------------------------------------------------------------------------------
# Added to the bits of amax before its exponent is read: "floor" is OCP MX 6.3; "even" goes up from 1.75 *
# 2^k, where the element would round to 8; "rceil" is the least power of two that does not clip, "ceil" rounds
# log2(amax) up.
MX_ROUND = {"floor": 0, "even": 0x200000, "rceil": 0x3FFFFF, "ceil": 0x7FFFFF}


def _mxfp4(blocks, axis, outer, scale_rule, search, random):
    if outer not in (None, "default"):
        raise ValueError(f"quantize: outer={outer!r}, but mxfp4 has no outer scale; pass outer=None")
    rule = scale_rule or "even"
    if rule not in MX_ROUND:
        raise ValueError(f"quantize: scale_rule is {rule!r}, but mxfp4 knows {SCALE_RULES['mxfp4']}")
    bits = np.abs(blocks).max(-1).view(np.uint32)
    byte = np.maximum(((bits + np.uint32(MX_ROUND[rule])) >> 23).astype(np.int32) - 2, 0).astype(np.uint8)
    inverse = _power(127 - byte.astype(np.int32))
    return None, (_e2m1(blocks * inverse[..., None], random), byte)


def _fp8(blocks, axis, outer, scale_rule, search, random):
    """E4M3 elements under a float32 decode scale amax / 448, at least the smallest normal number."""
    amax, e = _outer(blocks, axis, outer, "row")
    if e is None:
        decode = np.maximum(amax / E4M3_MAX, np.finfo(np.float32).tiny)
        decode = np.where(amax == 0, np.float32(1), decode)
    else:
        decode = _power(e)
    scaled = blocks * (np.float32(1) / decode)[..., None]
    codes = encode_e4m3(scaled) if random is None else stochastic.encode_e4m3(scaled, random)
    return decode, (codes, None)


_QUANTIZERS = {"nvfp4_exact": _exact, "nvfp4": _nvfp4, "mxfp4": _mxfp4, "fp8": _fp8}


# ---- back --------------------------------------------------------------------------------------------------
def dequantize(q: Quantized) -> np.ndarray:
    """Values, float32, in the logical shape: (code * block_scale) * outer_scale, in that order."""
    if q.format == "fp8":
        value = decode_e4m3(q.packed)
    else:
        value = E2M1[unpack(q.packed)]
        table = E8M0 if q.format == "mxfp4" else E4M3
        value = value * np.repeat(table[q.block_scale], BLOCK[q.format], axis=-1)
    if q.outer_scale is not None:
        value = value * q.outer_scale
    return np.moveaxis(value[..., : q.k], -1, q.axis)


def expand(q: Quantized) -> np.ndarray:
    """E4M3 bytes (*lead, Kp) with the block scale folded in; `ValueError` unless every product is exact."""
    if q.format == "fp8":
        return q.packed
    if q.format == "mxfp4":
        raise ValueError(
            "expand: mxfp4's block scales are powers of two over 2^±127, which E4M3 does not hold; dequantize"
        )
    value = E2M1[unpack(q.packed)] * np.repeat(E4M3[q.block_scale], 16, axis=-1)
    byte = encode_e4m3(value)
    exact = (E4M3[byte] == value) | np.isnan(value)
    if not exact.all():
        raise ValueError(
            f"expand: {np.sum(~exact)} products of a code and its block scale do not fit E4M3; dequantize"
        )
    return byte
